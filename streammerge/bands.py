"""Bands of an output tensor and the source ranges that fill them. Pure arithmetic, no files.

A band is one contiguous interval of the row-major output: fixed leading indices, a range of one
dim, all of the trailing dims. Its piece of a contiguous local shard is then contiguous in the
source too, for any `Shard` dims, so that one ``preadv`` fills all its runs in the band.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammerge.placement import Box, row_major_strides

MIN_RUN_BYTES = 64  # below this, picking elements apart is faster than one buffer per run
_MIN_SCATTER_BYTES = 4096  # below this, a read per run costs more than picking elements apart
_MIN_SKIP_BYTES = 32 << 10  # below this, skipping unused bytes costs more than reading them
_MIN_DENSITY = 4  # read a span at once if at least one in this many of its elements is wanted


@dataclass(frozen=True, slots=True)
class Band:
    """A contiguous interval of a tensor.

    Attributes:
        offsets, sizes: the box that it covers.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Runs:
    """Equally long runs in a band, in bytes. Bands of one tensor mostly share a few of these.

    Attributes:
        first: offset of the first run.
        dims: (size, stride) of each dim over which runs repeat.
        nbytes: length of a run.
    """

    first: int
    dims: tuple[tuple[int, int], ...]
    nbytes: int

    def __iter__(self) -> Iterator[slice]:
        firsts = [self.first]
        for size, stride in self.dims:
            firsts = [first + i * stride for first in firsts for i in range(size)]
        return (slice(first, first + self.nbytes) for first in firsts)


@dataclass(frozen=True, slots=True)
class Gather:
    """One contiguous source range and the runs that it fills, in order.

    Attributes:
        start: byte offset from the local shard's first element.
        runs: where its parts go.
    """

    start: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Scatter:
    """A source range that is picked apart in units of 1, 2, 4 or 8 bytes.

    For shards that are not contiguous, and where runs would be very short.

    Attributes:
        start: byte offset from the local shard's first element.
        nbytes: length of the range.
        dims: (size, source stride, band stride) of each dim, in units.
        target: first unit in the band.
        unit: bytes.
    """

    start: int
    nbytes: int
    dims: tuple[tuple[int, int, int], ...]
    target: int
    unit: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A range that is contiguous on both sides, in bytes.

    Attributes:
        start: offset from the local shard's first element.
        target: offset in the output tensor.
        nbytes: length.
    """

    start: int
    target: int
    nbytes: int


def bands(
    shape: Sequence[int], itemsize: int, budget: int, origin: Sequence[int] | None = None
) -> Iterator[Band]:
    """Cut a box into bands of at most `budget` bytes (at least one element), in order.

    Args:
        shape: sizes of the box.
        itemsize: bytes per element.
        budget: bytes per band.
        origin: offsets of the box; zero if not given.
    """
    if 0 in shape:
        return
    origin = tuple(origin) if origin is not None else (0,) * len(shape)
    if not shape:
        yield Band((), ())
        return
    limit = max(1, budget // itemsize)
    trailing = row_major_strides(shape)
    dim = next(d for d in range(len(shape)) if trailing[d] <= limit)
    rows = max(1, limit // trailing[dim])
    rest = tuple(shape[dim + 1 :])
    for leading in itertools.product(*map(range, shape[:dim])):
        for first in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - first)
            inner = (*leading, first, *(0,) * len(rest))
            yield Band(
                tuple(o + i for o, i in zip(origin, inner, strict=True)),
                (*(1,) * dim, count, *rest),
            )


def fill_steps(
    band: Band,
    box: Box,
    strides: Sequence[int] | None,
    itemsize: int,
    scratch: int,
) -> Iterator[Gather | Scatter]:
    """What to read, and where to put it, for the part of a band that one local shard holds.

    Args:
        band: the band.
        box: the part of the tensor that the shard holds, and where in the shard.
        strides: the shard's strides in elements; None if it is contiguous.
        itemsize: bytes per element.
        scratch: most bytes that a `Scatter` may span (at least one element).
    """
    sizes, at_source, at_band = [], [], []
    for first, count, offset, size, origin in zip(
        band.offsets, band.sizes, box.offsets, box.sizes, box.origin, strict=True
    ):
        begin, end = max(first, offset), min(first + count, offset + size)
        if begin >= end:
            return
        sizes.append(end - begin)
        at_source.append(begin - offset + origin)
        at_band.append(begin - first)
    source_strides = row_major_strides(box.local_shape) if strides is None else tuple(strides)
    band_strides = row_major_strides(band.sizes)
    start = _dot(at_source, source_strides)
    target = _dot(at_band, band_strides)
    dims = _merge(zip(sizes, source_strides, band_strides, strict=True))
    if _source_order_is_contiguous(dims):
        if dims and dims[-1][2] != 1:
            dims.append((1, 1, 1))  # runs of one element
        if len(dims) < 2 or dims[-1][0] * itemsize >= MIN_RUN_BYTES:
            yield _gather(dims, start, target, itemsize)
        else:
            yield from _pick_short_runs(dims, start, target, itemsize, scratch)
    elif dims[-1][1] == 1 and dims[-1][0] * itemsize >= _MIN_SCATTER_BYTES:
        # Several parts of a shard, each with long runs: one read per run.
        yield from _gather_parts(dims, start, target, itemsize)
    else:
        yield from _scatter(dims, start, target, itemsize, max(scratch, itemsize))


def run_nbytes(shape: Sequence[int], box: Box, itemsize: int) -> int:
    """Bytes of the runs that a box has in the row-major tensor around it."""
    nbytes = itemsize
    for size, whole in zip(reversed(box.sizes), reversed(shape), strict=True):
        nbytes *= size
        if size != whole:
            break
    return nbytes


def copy_steps(
    shape: Sequence[int], box: Box, strides: Sequence[int] | None, itemsize: int, least: int
) -> list[Copy] | None:
    """The contiguous copies that bring a local shard into the output, or None.

    Args:
        shape: shape of the output tensor.
        box: the part that the shard holds.
        strides: the shard's strides; None if it is contiguous.
        itemsize: bytes per element.
        least: shortest copy in bytes that is worth a call, unless the whole is one copy.

    Returns:
        None where the shard is not contiguous or would need shorter copies.
    """
    if strides is not None:
        return None
    source_strides = row_major_strides(box.local_shape)
    band_strides = row_major_strides(shape)
    dims = _merge(zip(box.sizes, source_strides, band_strides, strict=True))
    start, target = _dot(box.origin, source_strides), _dot(box.offsets, band_strides)
    if dims and not (dims[-1][1] == dims[-1][2] == 1):
        return None
    run = dims[-1][0] if dims else 1
    if len(dims) > 1 and run * itemsize < least:
        return None
    copies = []
    for index in itertools.product(*(range(size) for size, _, _ in dims[:-1])):
        copies.append(
            Copy(
                (start + sum(i * d[1] for i, d in zip(index, dims, strict=False))) * itemsize,
                (target + sum(i * d[2] for i, d in zip(index, dims, strict=False))) * itemsize,
                run * itemsize,
            )
        )
    return copies


# A dim of a piece: (size, source stride, band stride), in elements.
_Dim = tuple[int, int, int]


def _merge(dims: Iterator[_Dim] | zip[_Dim]) -> list[_Dim]:
    """Drop dims of size 1 and join neighbours that are contiguous on both sides."""
    merged: list[_Dim] = []
    for size, source, target in dims:
        if size == 1:
            continue
        if merged:
            outer_size, outer_source, outer_target = merged[-1]
            if outer_source == source * size and outer_target == target * size:
                merged[-1] = (outer_size * size, source, target)
                continue
        merged.append((size, source, target))
    return merged


def _source_order_is_contiguous(dims: Sequence[_Dim]) -> bool:
    expected = 1
    for size, source, _ in reversed(dims):
        if source != expected:
            return False
        expected *= size
    return True


def _gather(dims: Sequence[_Dim], start: int, target: int, itemsize: int) -> Gather:
    run = 1
    outer = list(dims)
    if outer and outer[-1][2] == 1:
        run = outer.pop()[0]
    repeats = tuple((size, stride * itemsize) for size, _, stride in outer)
    return Gather(start * itemsize, Runs(target * itemsize, repeats, run * itemsize))


def _pick_short_runs(
    dims: Sequence[_Dim], start: int, target: int, itemsize: int, scratch: int
) -> Iterator[Scatter]:
    """Short runs of a contiguous source, in the largest units that fit all of their offsets."""
    offsets = [dims[-1][0], start, target]
    offsets += [stride for dim in dims[:-1] for stride in dim[1:]]
    factor = math.gcd(8 // itemsize, *offsets)
    *outer, (run, _, _) = dims
    in_units = [(size, source // factor, band // factor) for size, source, band in outer]
    in_units.append((run // factor, 1, 1))
    unit = itemsize * factor
    yield from _scatter(in_units, start // factor, target // factor, unit, max(scratch, unit))


def _gather_parts(dims: Sequence[_Dim], start: int, target: int, itemsize: int) -> Iterator[Gather]:
    inner = dims[-1:]
    for index in itertools.product(*(range(size) for size, _, _ in dims[:-1])):
        yield _gather(
            inner,
            start + sum(i * d[1] for i, d in zip(index, dims, strict=False)),
            target + sum(i * d[2] for i, d in zip(index, dims, strict=False)),
            itemsize,
        )


def _scatter(
    dims: Sequence[_Dim], start: int, target: int, itemsize: int, scratch: int
) -> Iterator[Scatter]:
    """Halve the widest dim until the span fits the scratch buffer and is dense enough."""
    span = 1 + sum((size - 1) * source for size, source, _ in dims)
    nbytes = span * itemsize
    wanted = math.prod(size for size, source, _ in dims if source)
    widest = max(range(len(dims)), key=lambda d: (dims[d][0] - 1) * dims[d][1], default=None)
    if widest is None:
        yield Scatter(start * itemsize, nbytes, (), target, itemsize)
        return
    size, source, band_stride = dims[widest]
    inner_nbytes = nbytes - (size - 1) * source * itemsize
    gap = source * itemsize - inner_nbytes
    sparse = wanted * _MIN_DENSITY < span and max(inner_nbytes, gap) >= _MIN_SKIP_BYTES
    if source == 0 or (nbytes <= scratch and not sparse):
        yield Scatter(start * itemsize, nbytes, tuple(dims), target, itemsize)
        return
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        part = list(dims)
        if count == 1:
            del part[widest]
        else:
            part[widest] = (count, source, band_stride)
        yield from _scatter(
            part, start + first * source, target + first * band_stride, itemsize, scratch
        )


def _dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(indices, strides, strict=True))
