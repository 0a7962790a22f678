"""What the bytes of an output tensor are: stored ones, or computed from stored ones.

`evaluate` turns a band of a value into bytes. The union is closed: whoever handles a `Value`
handles every kind.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streammerge.bands import (
    MIN_RUN_BYTES,
    Band,
    Gather,
    Runs,
    Scatter,
    fill_steps,
    run_nbytes,
)
from streammerge.checkpoint import Chunk, Tensor
from streammerge.dtypes import ITEMSIZE, TO_TORCH
from streammerge.errors import UnsupportedError
from streammerge.sources import Sources

if TYPE_CHECKING:
    import torch

# Flips the sign of an IEEE number by its highest byte.
_FLIP_SIGN = bytes(byte ^ 0x80 for byte in range(256))
MIN_SCRATCH = 4096  # allocated where a buffer leaves less
MAX_RUNS = 16384  # buffers kept per thread: 3 MiB of memoryviews
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


def band_numel(value: Value, buffer_size: int) -> int:
    """How many elements of a value a band may have, given the bytes of its buffer.

    What the band leaves free serves to pick elements apart.
    """
    tensor = stored_tensor(value)
    itemsize = ITEMSIZE[tensor.dtype]
    # Each run of a band keeps a buffer object; short runs are picked apart and need none.
    runs = (run_nbytes(tensor.shape, chunk.box, itemsize) for chunk in tensor.chunks())
    limit = MAX_RUNS * max(MIN_RUN_BYTES, min(runs, default=0)) // itemsize
    return max(1, min(limit, buffer_size * 4 // _quarters(value)))


def buffer_nbytes(value: Value, numel: int) -> int:
    """Bytes of buffer for a band of `numel` elements: the inverse of `band_numel`."""
    return -(-numel * _quarters(value) // 4)


def _quarters(value: Value) -> int:
    """Quarter bytes of buffer per element."""
    tensor = stored_tensor(value)
    itemsize = ITEMSIZE[tensor.dtype]
    if isinstance(value, Cast):
        # The room of the result is free until the stored bytes are complete.
        return 4 * (itemsize + ITEMSIZE[value.dtype])
    return 8 * itemsize if tensor.extents.strides else 5 * itemsize


class BandBuffer:
    """Memory for a band, which starts at its first byte, and for scratch behind it.

    Args:
        nbytes: size.

    Attributes:
        data, memory: the bytes, and a view on them.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.memory = memoryview(self.data)
        self._views: dict[Runs, list[memoryview]] = {}
        self._count = 0

    def views(self, runs: Runs) -> list[memoryview]:
        """The runs as buffers. Cached: making them costs more than filling them."""
        views = self._views.get(runs)
        if views is None:
            views = [self.memory[where] for where in runs]
            self._count += len(views)
            if self._count > MAX_RUNS:
                self._views.clear()
                self._count = len(views)
            self._views[runs] = views
        return views


def evaluate(value: Value, band: Band, sources: Sources, buffer: BandBuffer) -> memoryview:
    """The bytes of a band.

    Args:
        value: what to compute.
        band: which part of the output tensor, with at most `band_numel` elements.
        sources: the files.
        buffer: memory of the size that `band_numel` was asked with.

    Returns:
        The part of the buffer that holds the result.
    """
    if isinstance(value, Cast):
        return _cast(value, band, sources, buffer)
    return _read(value.tensor, band, sources, buffer)


def _read(tensor: Tensor, band: Band, sources: Sources, buffer: BandBuffer) -> memoryview:
    for chunk in tensor.chunks():
        read_shard(tensor, chunk, chunk.replicas[0], band, sources, buffer)
    return buffer.memory[: band.numel * ITEMSIZE[tensor.dtype]]


def read_shard(
    tensor: Tensor, chunk: Chunk, slot: int, band: Band, sources: Sources, buffer: BandBuffer
) -> None:
    """Read into a buffer the part of a band that one local shard holds.

    Args:
        tensor: the tensor.
        chunk: the part of it that the shard holds.
        slot: which of the chunk's replicas to read.
        band: which part to read.
        sources: the files.
        buffer: room for the band; the rest of it serves as scratch.
    """
    extents = tensor.extents
    itemsize = ITEMSIZE[tensor.dtype]
    target = buffer.memory[: band.numel * itemsize]
    scratch = buffer.memory[len(target) :]
    base: int | None = None
    file = extents.files[slot]
    room = max(len(scratch), MIN_SCRATCH)
    for step in fill_steps(band, chunk.box, extents.strides.get(slot), itemsize, room):
        if base is None:
            base = sources.member_offset(file, extents.members[slot]) + extents.starts[slot]
        if isinstance(step, Gather):
            views = buffer.views(step.runs)
        else:
            if len(scratch) < step.nbytes:
                scratch = memoryview(bytearray(step.nbytes))
            views = [scratch[: step.nbytes]]
        sources.read(file, base + step.start, views)
        if slot in extents.conjugated:
            for view in views:
                # Of a complex64, the last byte holds the sign of the imaginary part.
                view[7::8] = bytes(view[7::8]).translate(_FLIP_SIGN)
        if isinstance(step, Scatter):
            _pick_apart(views[0], target, step)


def _pick_apart(source: memoryview, target: memoryview, step: Scatter) -> None:
    """Copy strided elements. The longest dim is left to memoryview, which copies it in C."""
    format_ = _FORMATS[step.unit]
    whole = len(target) - len(target) % step.unit
    elements, result = source.cast(format_), target[:whole].cast(format_)
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
            one = bytes(source[a * step.unit : (a + 1) * step.unit])
            result[where] = memoryview(one * size).cast(format_)


def _cast(value: Cast, band: Band, sources: Sources, buffer: BandBuffer) -> memoryview:
    import torch

    stored = _read(value.value.tensor, band, sources, buffer)
    target = buffer.memory[len(stored) :][: band.numel * ITEMSIZE[value.dtype]]
    read = torch.frombuffer(stored, dtype=_torch_dtype(value.value.tensor.dtype))
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
