"""Compares the values of pairs of tensors, band by band, and measures how far they are apart.

A first pass compares bytes, so equal directories need neither torch nor numpy unless values are
computed. What differs is then measured with torch: how many elements, and how far.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from streammerge.arithmetic import import_torch, one_torch_thread
from streammerge.bands import Band, bands
from streammerge.checkpoint import Tensor
from streammerge.dtypes import ITEMSIZE
from streammerge.elements import first_difference, show
from streammerge.errors import UnsupportedError
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate, least_buffer, value_bands
from streammerge.measure import Measure, Tolerance, measure
from streammerge.parallel import STACK_SIZE, TORCH_STACK_SIZE, Team, run
from streammerge.phases import OnProgress, in_phase
from streammerge.placement import unravel
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Fold, Stored, Value, needs_torch

_BATCH_COUNT = 8  # bands of a tensor that are handed out together
_LEAST_SHARE = 64 << 10  # of the buffer, for what is merged, where a fold takes all of it


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of a tensor differ.

    Attributes:
        index: of the first element that differs.
        reference, merged: its values as Python writes them, with their bits where they would look
            the same.
        count: how many elements differ; None where there is no torch to count them.
        numel: how many there are.
        largest: the largest absolute difference; NaN if one of two values is; None as for `count`.
        rounding: whether it is a fold in which all differences are as small as another order of
            summation makes them.
    """

    index: tuple[int, ...]
    reference: str
    merged: str
    count: int | None
    numel: int
    largest: float | None
    rounding: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two sides of a tensor, of one dtype and shape.

    Attributes:
        name: its key.
        reference: what it should be.
        merged: what it is.
    """

    name: str
    reference: Value
    merged: Tensor


@dataclass(frozen=True, slots=True)
class _Job:
    """Consecutive bands of a pair, of which the first starts at element `start`."""

    position: int
    pair: Pair
    bands: tuple[Band, ...]
    start: int

    @property
    def numel(self) -> int:
        return sum(band.numel for band in self.bands)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.pair.merged.dtype]


@dataclass(frozen=True, slots=True)
class _Found:
    """The first element that differs, and the bytes of both sides."""

    index: int
    reference: bytes
    merged: bytes


def compare_values(
    pairs: Sequence[Pair],
    reference: Sources,
    merged: Sources,
    *,
    tolerance: Tolerance | None = None,
    buffer_size: int,
    workers: int,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> dict[str, ValueDifference]:
    """Compare the values of tensors, in bounded memory.

    Args:
        pairs: what to compare.
        reference, merged: the files of both sides.
        tolerance, device, on_progress: see `compare_with_plan`.
        buffer_size: bytes of buffer per worker, for both sides.
        workers: number of threads.

    Returns:
        What differs, by name.
    """
    arithmetic = any(needs_torch(pair.reference) for pair in pairs)
    if arithmetic:
        import_torch("converting dtypes or folding adapters")

    def make_reader() -> _Reader:
        return _Reader(reference, merged, buffer_size, device)

    with one_torch_thread() if arithmetic else nullcontext():
        differing = _find_differing(
            pairs,
            make_reader,
            buffer_size,
            workers,
            TORCH_STACK_SIZE if arithmetic else STACK_SIZE,
            on_progress,
        )
    if not differing:
        return {}
    try:
        import_torch("measuring how far values are apart")
    except UnsupportedError:
        if tolerance is not None:
            raise
        return {
            pairs[at].name: _difference(pairs[at], found, None) for at, found in differing.items()
        }
    with one_torch_thread():
        measured = _measure_differing(
            pairs, differing, make_reader, tolerance, buffer_size, workers, on_progress
        )
    return {
        pairs[at].name: _difference(pairs[at], found, total)
        for at, (found, total) in measured.items()
    }


def _find_differing(
    pairs: Sequence[Pair],
    make_reader: Callable[[], _Reader],
    buffer_size: int,
    workers: int,
    stack_size: int,
    on_progress: OnProgress | None,
) -> dict[int, _Found]:
    """The pairs of which any bit differs, with the first element that does."""
    differing: dict[int, _Found] = {}
    lock = threading.Lock()

    def make_worker(team: Team) -> Callable[[_Job], None]:
        reader = make_reader()

        def work(job: _Job) -> None:
            left = job.nbytes
            earlier = differing.get(job.position)
            if earlier is None or earlier.index >= job.start:
                for start, expected, found in reader.parts(job):
                    if not reader.begins_with(expected):
                        first = _first_difference(start, expected, found, job.pair.merged.dtype)
                        with lock:
                            earlier = differing.get(job.position, first)
                            differing[job.position] = min(earlier, first, key=_index)
                        break
                    left -= len(found)
                    team.advance(len(found))
            team.advance(left)

        return work

    run(
        _jobs(enumerate(pairs), buffer_size),
        make_worker,
        workers,
        in_phase(on_progress, "verify", sum(pair.merged.nbytes for pair in pairs)),
        stack_size,
    )
    return differing


def _measure_differing(
    pairs: Sequence[Pair],
    differing: Mapping[int, _Found],
    make_reader: Callable[[], _Reader],
    tolerance: Tolerance | None,
    buffer_size: int,
    workers: int,
    on_progress: OnProgress | None,
) -> dict[int, tuple[_Found, Measure]]:
    """How far pairs are apart, without those that are close enough."""
    measured: dict[int, tuple[_Found, Measure]] = {}
    lock = threading.Lock()

    def make_worker(team: Team) -> Callable[[_Job], None]:
        reader = make_reader()

        def work(job: _Job) -> None:
            dtype = job.pair.merged.dtype
            if job.start + job.numel <= differing[job.position].index:
                team.advance(job.nbytes)
                return
            for start, expected, found in reader.parts(job):
                here = measure(dtype, expected, found, tolerance, start)
                if here.first is not None:
                    first = _element(here.first, start, expected, found, dtype)
                    with lock:
                        _add(measured, job.position, first, here)
                team.advance(len(found))

        return work

    differing_pairs = [(at, pairs[at]) for at in sorted(differing)]
    total = sum(pair.merged.nbytes for _, pair in differing_pairs)
    run(
        _jobs(differing_pairs, buffer_size),
        make_worker,
        workers,
        in_phase(on_progress, "measure", total),
        TORCH_STACK_SIZE,
    )
    return measured


def _add(
    measured: dict[int, tuple[_Found, Measure]], position: int, found: _Found, here: Measure
) -> None:
    earlier = measured.get(position)
    if earlier is None:
        measured[position] = found, here
        return
    first = min(earlier[0], found, key=_index)
    measured[position] = first, earlier[1].followed_by(here)


def _index(found: _Found) -> int:
    return found.index


def _jobs(pairs: Iterable[tuple[int, Pair]], buffer_size: int) -> Iterator[_Job]:
    for position, pair in pairs:
        start = 0
        remaining = value_bands(pair.reference, _reference_share(pair.reference, buffer_size))
        while some := tuple(itertools.islice(remaining, _BATCH_COUNT)):
            job = _Job(position, pair, some, start)
            yield job
            start += job.numel


def _reference_share(value: Value, buffer_size: int) -> int:
    return max(least_buffer(value), buffer_size // 2)


class _Reader:
    """Reads both sides of jobs, for one thread.

    Args:
        reference, merged: the files of both sides.
        buffer_size: bytes of buffer for both.
        device: where folds are computed.
    """

    def __init__(self, reference: Sources, merged: Sources, buffer_size: int, device: str) -> None:
        self._reference, self._merged = reference, merged
        self._buffer_size = buffer_size
        self._device = device
        self._expected, self._found = BandBuffer(0), BandBuffer(0)

    def parts(self, job: _Job) -> Iterator[tuple[int, memoryview, memoryview]]:
        """The bytes of both sides, part by part.

        Yields:
            Index of the first element, bytes of the reference, bytes of what is merged.
        """
        value = job.pair.reference
        stored = Stored(job.pair.merged)
        itemsize = ITEMSIZE[stored.dtype]
        share = self._buffer_size - _reference_share(value, self._buffer_size)
        limit = band_numel(stored, max(share, min(self._buffer_size // 2, _LEAST_SHARE)))
        start = job.start
        for band in job.bands:
            self._expected = _with_room(self._expected, buffer_nbytes(value, band.numel))
            expected = evaluate(value, band, self._reference, self._expected, self._device)
            for part in bands(band.sizes, itemsize, limit * itemsize, band.offsets):
                self._found = _with_room(self._found, buffer_nbytes(stored, part.numel))
                found = read_stored(stored, part, self._merged, self._found)
                yield start, expected[: len(found)], found
                expected = expected[len(found) :]
                start += part.numel

    def begins_with(self, expected: memoryview) -> bool:
        """Whether what is merged of the current part begins with these bytes."""
        # Compares in C and copies nothing, where memoryviews would compare item by item.
        return self._found.data.startswith(expected)


def _with_room(buffer: BandBuffer, nbytes: int) -> BandBuffer:
    return buffer if len(buffer) >= nbytes else BandBuffer(nbytes)


def _first_difference(start: int, expected: memoryview, found: memoryview, dtype: str) -> _Found:
    index = first_difference(expected, found, ITEMSIZE[dtype])
    return _element(start + index, start, expected, found, dtype)


def _element(index: int, start: int, expected: memoryview, found: memoryview, dtype: str) -> _Found:
    itemsize = ITEMSIZE[dtype]
    where = slice((index - start) * itemsize, (index - start + 1) * itemsize)
    return _Found(index, bytes(expected[where]), bytes(found[where]))


def _difference(pair: Pair, found: _Found, total: Measure | None) -> ValueDifference:
    reference, merged = show(pair.merged.dtype, found.reference, found.merged)
    return ValueDifference(
        index=unravel(found.index, pair.merged.shape),
        reference=reference,
        merged=merged,
        count=None if total is None else total.count,
        numel=math.prod(pair.merged.shape),
        largest=None if total is None else total.largest,
        rounding=total is not None and total.rounding and isinstance(pair.reference, Fold),
    )
