"""What the bytes of an output tensor are: stored ones, or computed from stored ones.

`evaluate` turns a band of a value into bytes. The union is closed: whoever handles a `Value`
handles every kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streammerge.bands import Band, Gather, Scatter, fill_steps
from streammerge.checkpoint import Chunk, Tensor
from streammerge.dtypes import ITEMSIZE, TO_TORCH
from streammerge.errors import UnsupportedError
from streammerge.sources import Sources

if TYPE_CHECKING:
    import torch

# Flips the sign of an IEEE number by its highest byte.
_FLIP_SIGN = bytes(byte ^ 0x80 for byte in range(256))
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint, as it is."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor of the checkpoint, rounded to another floating-point dtype as torch does."""

    value: Stored
    dtype: str


Value = Stored | Cast


def needs_torch(value: Value) -> bool:
    """Whether evaluating a value takes arithmetic."""
    return isinstance(value, Cast)


def stored_tensor(value: Value) -> Tensor:
    """The tensor of the checkpoint that a value is made of."""
    return value.value.tensor if isinstance(value, Cast) else value.tensor


def band_cost(value: Value) -> int:
    """Bytes of buffer per element of a band of this value, scratch included."""
    tensor = stored_tensor(value)
    cost = ITEMSIZE[tensor.dtype]
    if isinstance(value, Cast):
        return cost + ITEMSIZE[value.dtype]  # the result serves as scratch before it is made
    return 2 * cost if tensor.extents.strides else cost


def evaluate(value: Value, band: Band, sources: Sources, buffer: memoryview) -> memoryview:
    """The bytes of a band.

    Args:
        value: what to compute.
        band: which part of the output tensor.
        sources: the files.
        buffer: room for ``band.numel * band_cost(value)`` bytes.

    Returns:
        The part of the buffer that holds the result.
    """
    if isinstance(value, Cast):
        return _cast(value, band, sources, buffer)
    nbytes = band.numel * ITEMSIZE[value.tensor.dtype]
    read_band(value.tensor, value.tensor.chunks(), band, sources, buffer[:nbytes], buffer[nbytes:])
    return buffer[:nbytes]


def read_band(
    tensor: Tensor,
    chunks: Sequence[Chunk],
    band: Band,
    sources: Sources,
    target: memoryview,
    scratch: memoryview,
) -> None:
    """Read a band of a stored tensor, from the first replica of each chunk.

    Args:
        tensor: the tensor.
        chunks: those of its chunks that may meet the band.
        band: which part.
        sources: the files.
        target: as many bytes as the band has.
        scratch: room to pick apart shards that are not contiguous; allocated if too small.
    """
    for chunk in chunks:
        read_shard(tensor, chunk, chunk.replicas[0], band, sources, target, scratch)


def read_shard(
    tensor: Tensor,
    chunk: Chunk,
    slot: int,
    band: Band,
    sources: Sources,
    target: memoryview,
    scratch: memoryview,
) -> None:
    """Read the part of a band that one local shard holds. Arguments as in `read_band`."""
    extents = tensor.extents
    itemsize = ITEMSIZE[tensor.dtype]
    base: int | None = None
    file = extents.files[slot]
    room = max(len(scratch), 4096)
    for step in fill_steps(band, chunk.box, extents.strides.get(slot), itemsize, room):
        if base is None:
            base = sources.member_offset(file, extents.members[slot]) + extents.starts[slot]
        if isinstance(step, Gather):
            runs = [target[begin:end] for begin, end in step.runs]
            sources.read(file, base + step.start, runs)
        else:
            if len(scratch) < step.nbytes:
                scratch = memoryview(bytearray(step.nbytes))
            runs = [scratch[: step.nbytes]]
            sources.read(file, base + step.start, runs)
        if slot in extents.conjugated:
            for run in runs:
                # Of a complex64, the last byte holds the sign of the imaginary part.
                run[7::8] = bytes(run[7::8]).translate(_FLIP_SIGN)
        if isinstance(step, Scatter):
            _pick_apart(runs[0], target, step, itemsize)


def _pick_apart(source: memoryview, target: memoryview, step: Scatter, itemsize: int) -> None:
    """Copy strided elements. The longest dim is left to memoryview, which copies it in C."""
    format_ = _FORMATS[itemsize]
    elements, result = source.cast(format_), target.cast(format_)
    dims = list(step.dims) or [(1, 1, 1)]
    inner = max(range(len(dims)), key=lambda d: (dims[d][1] > 0, dims[d][0]))
    size, source_step, target_step = dims.pop(inner)
    for index in itertools.product(*(range(count) for count, _, _ in dims)):
        a = sum(i * stride for i, (_, stride, _) in zip(index, dims, strict=True))
        b = step.target + sum(i * stride for i, (_, _, stride) in zip(index, dims, strict=True))
        where = slice(b, b + (size - 1) * target_step + 1, target_step)
        if source_step:
            result[where] = elements[a : a + (size - 1) * source_step + 1 : source_step]
        else:  # an expanded dim: one element, many times
            one = bytes(source[a * itemsize : (a + 1) * itemsize])
            result[where] = memoryview(one * size).cast(format_)


def _cast(value: Cast, band: Band, sources: Sources, buffer: memoryview) -> memoryview:
    import torch

    source_dtype = value.value.tensor.dtype
    source_end = band.numel * ITEMSIZE[source_dtype]
    target_end = source_end + band.numel * ITEMSIZE[value.dtype]
    source, target = buffer[:source_end], buffer[source_end:target_end]
    # The target is not filled yet, so it serves as scratch.
    read_band(
        value.value.tensor, value.value.tensor.chunks(), band, sources, source, buffer[source_end:]
    )
    read = torch.frombuffer(source, dtype=_torch_dtype(source_dtype))
    torch.frombuffer(target, dtype=_torch_dtype(value.dtype)).copy_(read)
    return target


def _torch_dtype(dtype: str) -> torch.dtype:
    import torch

    found = getattr(torch, TO_TORCH[dtype], None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            f"the installed torch {torch.__version__} has no dtype {TO_TORCH[dtype]}"
        )
    return found
