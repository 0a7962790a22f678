"""Compares what a plan writes with what a directory holds: names, dtypes, shapes and every value.

Bytes are compared as they are, tensor by tensor in bands that fit the buffer budget, so equal
directories need neither torch nor numpy unless values are computed. What differs is then measured
with torch: how many elements, and how far they are apart.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Literal

from streammerge.adapt import Model, Output
from streammerge.arithmetic import import_torch, one_torch_thread
from streammerge.assets import ADAPTER_DIRECTORY, ADAPTER_FILE, VALUE_HEAD_FILE
from streammerge.bands import Band, bands
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, Extents, PlainLayout, Tensor
from streammerge.dtypes import FLOATING, ITEMSIZE, TO_TORCH
from streammerge.elements import show
from streammerge.errors import CheckpointNotFoundError, ResultError, UnsupportedError
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate, least_buffer, value_bands
from streammerge.formats import FORMATS, describe, safetensors_files
from streammerge.formats import Sources as SourcePaths
from streammerge.measure import Measure, Tolerance, measure
from streammerge.parallel import STACK_SIZE, TORCH_STACK_SIZE, Team, run
from streammerge.planner import Plan
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Cast, Fold, Stored, Value, needs_torch

# Weights beside a model, of which no index tells.
APART_FILES = (VALUE_HEAD_FILE, f"{ADAPTER_DIRECTORY}/{ADAPTER_FILE}", ADAPTER_FILE)

_INFERRED = ("F32", "F16", "BF16")  # what --dtype can make
_BATCH_COUNT = 8  # bands of a tensor that are handed out together
_LEAST_SHARE = 64 << 10  # of the buffer, for what is merged, where a fold takes all of it

Kind = Literal["missing", "extra", "dtype", "shape", "values"]
OnProgress = Callable[[str, int, int], None]


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


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not what it should be.

    Attributes:
        name: its key; of a file beside the model, with the name of the file before it.
        kind: ``missing`` and ``extra`` are those that only one side has.
        reason: what differs, for people.
        values: the details of kind ``values``.
    """

    name: str
    kind: Kind
    reason: str
    values: ValueDifference | None = None

    def __str__(self) -> str:
        return f"key '{self.name}': {self.reason}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare_with_plan` did.

    Attributes:
        tensors: how many were compared by value.
        nbytes: bytes of them.
        differences: first what is missing or extra, then in the order of the reference.
    """

    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        reference, merged: the directories.
        compared: what was compared, and what differs.
        changes: what differs from the reference because the merge does that: names, dtypes, folds.
        tolerance: how far values may be apart; None if every bit counts.
        seconds: from start to end.
        peak_memory: as in `Report`.
    """

    reference: str
    merged: str
    compared: Compared
    changes: tuple[Change, ...]
    tolerance: Tolerance | None
    seconds: float
    peak_memory: int | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.compared.differences


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


# --- the two sides ---


def describe_reference(sources: SourcePaths) -> Checkpoint:
    """Describe a checkpoint, or the Hugging Face directory that is given alone.

    Raises:
        StreamMergeError: see `describe`.
    """
    paths = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if len(paths) == 1:
        path = os.fspath(paths[0])
        if not _is_checkpoint(path) and _is_model(path):
            return describe_model(path)
    return describe(sources)


def describe_merged(path: str | os.PathLike[str]) -> Checkpoint:
    """Describe a Hugging Face directory, or a checkpoint that is compared as it is.

    Raises:
        StreamMergeError: see `describe`.
    """
    directory = os.fspath(path)
    return describe(directory) if _is_checkpoint(directory) else describe_model(directory)


def describe_model(directory: str) -> Checkpoint:
    """Describe a Hugging Face directory with the weights that lie beside the model.

    Their names are ``file: name``.

    Raises:
        SourceError: see `safetensors_files.describe`.
    """
    beside = [name for name in APART_FILES if os.path.isfile(os.path.join(directory, name))]
    try:
        model = safetensors_files.describe([directory])
    except CheckpointNotFoundError:
        if ADAPTER_FILE not in beside or safetensors_files.matches(directory):
            raise
        model = Checkpoint(directory, safetensors_files.NAME, 1, (), (), (), (directory,), None)
    files, tensors = [*model.files], [*model.tensors]
    layout = PlainLayout((0,))
    for name in beside:
        file, entries = safetensors_files.read_file(os.path.join(directory, name))
        for member, entry in enumerate(entries):
            extents = Extents()
            extents.add(len(files), member, 0, None, False)
            key = _key(name, entry.name)
            tensors.append(Tensor(key, entry.dtype, entry.shape, layout, extents))
        files.append(file)
    return replace(model, files=tuple(files), tensors=tuple(tensors))


def expected_values(plan: Plan) -> dict[str, Value]:
    """The tensors that a plan writes, under the names of `describe_model`."""
    return {_key(file.name, o.name): o.value for file in plan.files for o in file.outputs}


def infer_dtypes(model: Model, found: Iterable[Tensor]) -> Model:
    """Convert the floating-point tensors of a model as those of a directory are converted.

    Args:
        model: what the reference holds, in its own dtypes.
        found: the tensors of the directory.

    Returns:
        The model, with a change per tensor that is converted.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in found}
    changes = []

    def convert(output: Output, key: str) -> Output:
        dtype = dtypes.get(key, output.dtype)
        if dtype == output.dtype or dtype not in _INFERRED or output.dtype not in FLOATING:
            return output
        reason = f"as it was merged: {TO_TORCH[output.dtype]} to {TO_TORCH[dtype]}"
        changes.append(Change("cast", key, TO_TORCH[dtype], reason))
        return replace(output, dtype=dtype, value=_as_dtype(output.value, dtype))

    outputs = tuple(convert(output, output.name) for output in model.outputs)
    apart = {
        file: tuple(convert(output, _key(file, output.name)) for output in beside)
        for file, beside in model.apart.items()
    }
    return replace(model, outputs=outputs, apart=apart, changes=(*model.changes, *changes))


def pair_up(
    expected: Mapping[str, Value], found: Iterable[Tensor], changes: Iterable[Change] = ()
) -> tuple[list[Pair], list[TensorDifference]]:
    """Match the two sides by name.

    Args:
        expected: what should be there.
        found: what is there.
        changes: what the merge does; it explains tensors that should not be there.

    Returns:
        The tensors of which values are to be compared, and those that differ without that.
    """
    tensors = {tensor.name: tensor for tensor in found}
    dropped = {change.name: change.reason for change in changes if change.kind == "dropped"}
    differences = [
        TensorDifference(name, "missing", "missing") for name in expected if name not in tensors
    ]
    for name in tensors:
        if name not in expected:
            why = f" (a merge drops it: {dropped[name]})" if name in dropped else ""
            differences.append(TensorDifference(name, "extra", f"should not be there{why}"))
    pairs = []
    for name, value in expected.items():
        if (tensor := tensors.get(name)) is None:
            continue
        if (tensor.dtype, tensor.shape) == (value.dtype, value.shape):
            pairs.append(Pair(name, value, tensor))
            continue
        kind: Kind = "dtype" if tensor.shape == value.shape else "shape"
        there, right = (f"{side.dtype} {list(side.shape)}" for side in (tensor, value))
        differences.append(TensorDifference(name, kind, f"{there}, should be {right}"))
    return pairs, differences


# --- comparing ---


def compare_with_plan(
    plan: Plan,
    merged: Checkpoint,
    *,
    tolerance: Tolerance | None = None,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> Compared:
    """Compare what a plan writes with what is there.

    Args:
        plan: what should be there; its buffers and workers are used.
        merged: what is there.
        tolerance: how far values may be apart; None compares every bit.
        device: where folds are computed, ``cpu`` or ``cuda``.
        on_progress: called now and then, in this thread, with the phase (``verify``, then
            ``measure`` for what differs), and its bytes done and in all.

    Raises:
        SourceError: a file that cannot be read or has changed.
        UnsupportedError: there is no torch to compute values or a tolerance with.
    """
    pairs, differences = pair_up(expected_values(plan), merged.tensors, plan.changes)
    reference_files, merged_files = Sources(plan.checkpoint.files), Sources(merged.files)
    try:
        found = compare_values(
            pairs,
            reference_files,
            merged_files,
            tolerance=tolerance,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            device=device,
            on_progress=on_progress,
        )
        reference_files.check_unchanged()
        merged_files.check_unchanged()
    finally:
        reference_files.close()
        merged_files.close()
    for pair in pairs:
        if (values := found.get(pair.name)) is not None:
            differences.append(TensorDifference(pair.name, "values", _reason(values), values))
    return Compared(len(pairs), sum(pair.merged.nbytes for pair in pairs), tuple(differences))


def check_written(
    plan: Plan, directory: str, *, device: str = "cpu", on_progress: OnProgress | None = None
) -> Compared:
    """Compare a directory that was just written with its plan, bit by bit, as the disk has it.

    Args:
        plan, device, on_progress: see `compare_with_plan`.
        directory: the staging directory.

    Raises:
        ResultError: it holds something else.
    """
    written = describe_model(directory)
    for file in written.files:
        _forget_pages(file.path)
    compared = compare_with_plan(plan, written, device=device, on_progress=on_progress)
    if compared.differences:
        count = len(compared.differences)
        more = f" (and {count - 1} more keys)" if count > 1 else ""
        raise ResultError(
            f"the result is not what the checkpoint holds: {compared.differences[0]}{more}",
            hint="was it changed while it was written? Otherwise the disk or the memory is faulty",
        )
    return compared


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
        _in_phase(on_progress, "verify", sum(pair.merged.nbytes for pair in pairs)),
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
        _in_phase(on_progress, "measure", total),
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
    """The first element that differs, of parts that do, by halving."""
    itemsize = ITEMSIZE[dtype]
    low, high = 0, len(expected) // itemsize
    while high - low > 1:
        middle = (low + high) // 2
        where = slice(low * itemsize, middle * itemsize)
        if bytes(expected[where]) == bytes(found[where]):
            low = middle
        else:
            high = middle
    return _element(start + low, start, expected, found, dtype)


def _element(index: int, start: int, expected: memoryview, found: memoryview, dtype: str) -> _Found:
    itemsize = ITEMSIZE[dtype]
    where = slice((index - start) * itemsize, (index - start + 1) * itemsize)
    return _Found(index, bytes(expected[where]), bytes(found[where]))


# --- results ---


def _difference(pair: Pair, found: _Found, total: Measure | None) -> ValueDifference:
    reference, merged = show(pair.merged.dtype, found.reference, found.merged)
    return ValueDifference(
        index=_unravel(found.index, pair.merged.shape),
        reference=reference,
        merged=merged,
        count=None if total is None else total.count,
        numel=math.prod(pair.merged.shape),
        largest=None if total is None else total.largest,
        rounding=total is not None and total.rounding and isinstance(pair.reference, Fold),
    )


def _reason(values: ValueDifference) -> str:
    text = f"{values.merged} at {list(values.index)}, should be {values.reference}"
    if values.count is None:
        return text
    text = (
        f"{values.count:,} of {values.numel:,} values differ, by at most {values.largest!r}; "
        f"first {text}"
    )
    if values.rounding:
        text += "; no more than an adapter folded on another machine"
    return text


def _unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(reversed(index))


def _as_dtype(value: Value, dtype: str) -> Value:
    if isinstance(value, Fold):
        return replace(value, dtype=dtype)
    return Cast(value.value if isinstance(value, Cast) else value, dtype)


def _forget_pages(path: str) -> None:
    """Let the system forget what it remembers of a file, so that the disk is asked."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _key(file: str, name: str) -> str:
    return f"{file}: {name}" if file in APART_FILES else name


def _is_checkpoint(path: str) -> bool:
    return any(layout.matches(path) for layout in FORMATS)


def _is_model(path: str) -> bool:
    adapter = os.path.isfile(os.path.join(path, ADAPTER_FILE))
    return adapter or safetensors_files.matches(path)


def _in_phase(progress: OnProgress | None, phase: str, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(phase, done, total)
