"""Reads stored tensors, band by band, from their local shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from streammerge.bands import Band, Gather, Runs, Scatter, fill_steps
from streammerge.checkpoint import Chunk, FlatLayout, Tensor
from streammerge.dtypes import ITEMSIZE
from streammerge.placement import Box, row_major_strides
from streammerge.sources import Sources
from streammerge.values import Stored

# Flips the sign of an IEEE number by its highest byte.
_FLIP_SIGN = bytes(byte ^ 0x80 for byte in range(256))
MIN_SCRATCH = 4096  # allocated where a buffer leaves less
MAX_RUNS = 16384  # buffers kept per thread: 3 MiB of memoryviews
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class BandBuffer:
    """Memory for a band, which starts at its first byte, and for scratch after it.

    Args:
        nbytes: size.
        within: memory to use; newly allocated if not given.

    Attributes:
        data: the bytes, if they were allocated here.
        kept: what the last fold left in the memory for its next band; see `folds`.
    """

    def __init__(self, nbytes: int, within: memoryview | None = None) -> None:
        self.data = bytearray(nbytes if within is None else 0)
        self._memory = memoryview(self.data) if within is None else within[:nbytes]
        self._views: dict[Runs, list[memoryview]] = {}
        self._count = 0
        self.kept: object = None

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def memory(self) -> memoryview:
        """A view on the bytes, to write to: nothing that was kept in them is relied on."""
        self.kept = None
        return self._memory

    def views(self, runs: Runs) -> list[memoryview]:
        """The runs as buffers. Cached: making them costs more than filling them."""
        views = self._views.get(runs)
        if views is None:
            views = [self._memory[where] for where in runs]
            self._count += len(views)
            if self._count > MAX_RUNS:
                self._views.clear()
                self._count = len(views)
            self._views[runs] = views
        return views


def local_parts(
    stored: Stored, band: Band | None = None
) -> Iterator[tuple[Box, int, tuple[int, ...] | None]]:
    """The local shards that make up a stored value.

    Args:
        stored: the value.
        band: a `full_band` of it; shards that hold nothing of it may be left out.

    Yields:
        For each the box that it fills, the slot that holds it, and its strides in elements (None
        if contiguous). Boxes are in the coordinates of the value with its fixed indices as
        leading dims of size 1.
    """
    tensor = stored.tensor
    cut = _cut_of(stored)
    for chunk in _chunks_of(stored, band, cut):
        box = chunk.box if cut is None else _cut(chunk.box, *cut)
        if box is None:
            continue
        slot = chunk.replicas[0]
        strides = tensor.extents.strides.get(slot)
        if stored.swapped:
            strides = _swap(row_major_strides(box.local_shape) if strides is None else strides)
            box = Box(*map(_swap, (box.offsets, box.sizes, box.origin, box.local_shape)))
        yield box, slot, strides


def read_stored(stored: Stored, band: Band, sources: Sources, buffer: BandBuffer) -> memoryview:
    """Read a band of a stored value to the start of a buffer; the rest of it serves as scratch.

    Args:
        stored: what to read.
        band: which part of it.
        sources: the files.
        buffer: room for the band at least.

    Returns:
        The part of the buffer that holds the band.
    """
    band = full_band(stored, band)
    for box, slot, strides in local_parts(stored, band):
        read_shard(stored.tensor, box, slot, strides, band, sources, buffer)
    return buffer.memory[: band.numel * ITEMSIZE[stored.dtype]]


def full_band(stored: Stored, band: Band) -> Band:
    """A band of a stored value with its fixed indices as leading dims of size 1."""
    fixed = len(stored.index)
    return Band((0,) * fixed + band.offsets, (1,) * fixed + band.sizes) if fixed else band


def read_shard(
    tensor: Tensor,
    box: Box,
    slot: int,
    strides: Sequence[int] | None,
    band: Band,
    sources: Sources,
    buffer: BandBuffer,
) -> None:
    """Read into a buffer the part of a band that one local shard holds.

    Args:
        tensor: the tensor.
        box: the part of it that the shard holds.
        slot: which of its extents to read.
        strides: of the shard, in elements; None if it is contiguous.
        band: which part to read.
        sources: the files.
        buffer: room for the band; the rest of it serves as scratch.
    """
    extents = tensor.extents
    itemsize = ITEMSIZE[tensor.dtype]
    memory = buffer.memory
    target = memory[: band.numel * itemsize]
    scratch = memory[len(target) :]
    base: int | None = None
    file = extents.files[slot]
    room = max(len(scratch), MIN_SCRATCH)
    for step in fill_steps(band, box, strides, itemsize, room):
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


def _chunks_of(
    stored: Stored, band: Band | None, cut: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> tuple[Chunk, ...]:
    """The chunks of a tensor that may hold something of a band of a value."""
    tensor = stored.tensor
    if band is None or stored.swapped or not isinstance(tensor.layout, FlatLayout):
        return tensor.chunks()
    strides = row_major_strides(tensor.shape)
    origin = (0,) * len(strides) if cut is None else cut[0]
    first = sum(
        (at + offset) * stride
        for at, offset, stride in zip(origin, band.offsets, strides, strict=True)
    )
    extent = sum((size - 1) * stride for size, stride in zip(band.sizes, strides, strict=True))
    return tensor.layout.chunks(tensor.shape, first, first + extent)


def _cut_of(stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """First index and size in each dim of the part of its tensor that a value is; None for all."""
    if not stored.index and stored.rows is None:
        return None
    fixed = len(stored.index)
    begin = [*stored.index, *(0 for _ in stored.tensor.shape[fixed:])]
    sizes = [*(1 for _ in stored.index), *stored.tensor.shape[fixed:]]
    if stored.rows is not None:
        begin[fixed], sizes[fixed] = stored.rows
    return tuple(begin), tuple(sizes)


def _cut(box: Box, begin: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """What a box has of a part of the tensor, in the coordinates of the part."""
    offsets, extent, origin = [], [], []
    for first, count, start, size, inner in zip(
        box.offsets, box.sizes, begin, sizes, box.origin, strict=True
    ):
        low, high = max(first, start), min(first + count, start + size)
        if low >= high:
            return None
        offsets.append(low - start)
        extent.append(high - low)
        origin.append(inner + low - first)
    return Box(tuple(offsets), tuple(extent), tuple(origin), box.local_shape)


def _swap(values: Sequence[int]) -> tuple[int, ...]:
    *rest, a, b = values
    return (*rest, b, a)


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
