"""Puts the bytes of a plan into a staging directory. Decides nothing.

Ranges that are contiguous on both sides are copied by the kernel, or through a small buffer where
that turns out to be faster; the rest goes through bands, one buffer per thread. Files have their
full size from the start, so threads work on separate ranges, and the disk writes what is copied
already while the rest is copied.

Several processes may each write a share of the same files. Bands are the same whatever the share:
each process writes the part of them that lies in it.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial

from streammerge.adapt import Output
from streammerge.arithmetic import import_torch, one_torch_thread
from streammerge.bands import Band, copy_steps
from streammerge.errors import (
    SourceError,
    TargetError,
    TargetPathError,
    writing_error,
)
from streammerge.evaluate import buffer_nbytes, evaluate, value_bands
from streammerge.header import tensor_nbytes
from streammerge.journal import Written
from streammerge.output_files import (
    Syncer,
    TargetFile,
    create_file,
    finish,
    open_file,
    write_at,
)
from streammerge.parallel import STACK_SIZE, TORCH_STACK_SIZE, Team, run
from streammerge.planner import Plan
from streammerge.reader import BandBuffer, full_band, local_parts
from streammerge.shares import FileRange
from streammerge.sources import Sources
from streammerge.values import Fold, Stored, needs_torch

_CALL_SIZE = 64 << 20  # most bytes per kernel copy, so that progress and Ctrl-C get a turn
_COPY_BUFFER = 1 << 20  # copies through a buffer stay in the processor's cache
_CONTEST_SIZE = 64 << 20  # bytes that each way of copying gets to show its speed
_BATCH_SIZE = 8 << 20  # small copies are handed out together
_BATCH_COUNT = 256
_FLUSH_SIZE = 128 << 20  # bytes of a file after which the disk is set to work
_LEAST_COPY = 128 << 10  # shorter runs go through a band
_FOLD_BANDS = 8  # of one weight, handed out together
_ASSET_BUFFER = 64 << 10
_FALLBACK = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


@dataclass(frozen=True, slots=True)
class _Range:
    """A kernel copy: from a member of a source file to an offset of the target."""

    file: int
    member: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _CopyJob:
    target: TargetFile
    ranges: tuple[_Range, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.ranges)


@dataclass(frozen=True, slots=True)
class _BandJob:
    """Consecutive bands of a tensor, of which the first starts at `offset`."""

    target: TargetFile
    output: Output
    bands: tuple[Band, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return sum(band.numel for band in self.bands) * tensor_nbytes(self.output.dtype, ())


def create_files(plan: Plan, directory: str, kept: Collection[str] = ()) -> None:
    """Make the files of weights, in full size, with nothing in them but their headers.

    That comes before several processes write to them: an NFS client that has looked for a name in
    vain may say for another minute that it is not there.

    Args:
        plan: what will be written.
        directory: where to; holds nothing but what is kept.
        kept: names of files that are there already.

    Raises:
        TargetError: an error of writing.
    """
    for file in plan.files:
        if file.name not in kept:
            create_file(directory, file.name, file.size, file.header).close()


def write_files(
    plan: Plan,
    directory: str,
    sources: Sources,
    share: Sequence[FileRange],
    *,
    made: Callable[[], bool] | None,
    finished: Callable[[int], None],
    on_progress: Callable[[int], None] | None = None,
    device: str = "cpu",
) -> int:
    """Write files, or parts of them.

    Args:
        plan: what to write.
        directory: where to.
        sources: the files of the plan's checkpoint.
        share: which parts of `Plan.files`, at most one of each file.
        made: whether what `create_files` has made is still there, and not another merge's. None if
            nothing is made yet: each file is made when it is begun.
        finished: called with the index of each file whose part is on the disk, in another thread.
        on_progress: called now and then, in this thread, with the tensor bytes written so far.
        device: where LoRA folds are computed, ``cpu`` or ``cuda``.

    Returns:
        The tensor bytes that were written.

    Raises:
        SourceError: a source that cannot be read, is damaged or has changed.
        TargetError: the disk is full, or another error of writing.
    """
    outputs = [output for part in share for output, _ in _outputs_in(plan, part)]
    arithmetic = any(needs_torch(output.value) for output in outputs)
    if arithmetic:
        import_torch(
            "converting dtypes or folding adapters",
            hint="install torch, or write what is stored with --raw",
        )
    targets: list[TargetFile] = []
    try:
        with Syncer(finished) as syncer, one_torch_thread() if arithmetic else nullcontext():
            return run(
                _jobs(plan, share, directory, made, targets, syncer),
                partial(_make_worker, plan, sources, syncer, _Contest(), device),
                plan.workers,
                on_progress,
                TORCH_STACK_SIZE if arithmetic else STACK_SIZE,
            )
    finally:
        for target in targets:
            target.close()


def _outputs_in(plan: Plan, part: FileRange) -> Iterator[tuple[Output, int]]:
    """The tensors that lie in a part of a file, also if only partly, with their offsets."""
    file = plan.files[part.file]
    for output, offset in zip(file.outputs, file.offsets, strict=True):
        if offset < part.stop and offset + output.nbytes > part.start:
            yield output, offset


def _jobs(
    plan: Plan,
    share: Sequence[FileRange],
    directory: str,
    made: Callable[[], bool] | None,
    targets: list[TargetFile],
    syncer: Syncer,
) -> Iterator[_CopyJob | _BandJob]:
    """All jobs. As many files are filled at a time as there are workers.

    File systems let one thread at a time write to a file, so the next job is always of the file
    that the fewest workers are busy with. Each file that is opened is added to `targets`.
    """
    waiting = iter(share)
    streams: list[tuple[TargetFile, Iterator[_CopyJob | _BandJob]]] = []
    while True:
        while len(streams) < plan.workers and (part := next(waiting, None)) is not None:
            file = plan.files[part.file]
            if made is None:
                target = create_file(directory, file.name, file.size, file.header, part)
            elif made():
                target = open_file(directory, file, part)
            else:
                raise TargetPathError(f"{directory}: another merge has taken its place")
            targets.append(target)
            streams.append((target, _file_jobs(plan, part, target)))
        if not streams:
            return
        stream = min(streams, key=lambda stream: stream[0].pending)
        target, jobs = stream
        target.shared = len(streams) < plan.workers
        job = next(jobs, None)
        if job is None:
            streams.remove(stream)
        with target.lock:
            target.pending += job is not None
            target.complete = job is None
            finished = target.complete and target.pending == 0
        if finished:
            syncer.put(target, finished)
        if job is not None:
            yield job


def _file_jobs(plan: Plan, part: FileRange, target: TargetFile) -> Iterator[_CopyJob | _BandJob]:
    batch: list[_Range] = []
    batch_size = 0
    for output, offset in _outputs_in(plan, part):
        ranges = _copy_ranges(output, offset)
        if ranges is None:
            yield from _band_jobs(target, output, offset, plan.buffer_size)
            continue
        for piece in _clip(ranges, part):
            batch.append(piece)
            batch_size += piece.nbytes
            if len(batch) >= _BATCH_COUNT or batch_size >= _BATCH_SIZE:
                yield _CopyJob(target, tuple(batch))
                batch, batch_size = [], 0
    if batch:
        yield _CopyJob(target, tuple(batch))


def _copy_ranges(output: Output, offset: int) -> list[_Range] | None:
    """The kernel copies that make up an output tensor; None if it needs bands."""
    if not isinstance(output.value, Stored):
        return None
    stored = output.value
    extents = stored.tensor.extents
    if extents.conjugated:
        return None
    itemsize = tensor_nbytes(stored.dtype, ())
    shape = full_band(stored, Band((0,) * len(stored.shape), stored.shape)).sizes
    ranges: list[_Range] = []
    for box, slot, strides in local_parts(stored):
        steps = copy_steps(shape, box, strides, itemsize, _LEAST_COPY)
        if steps is None:
            return None
        start = extents.starts[slot]
        for step in steps:
            for at in range(0, step.nbytes, _CALL_SIZE):
                piece = _Range(
                    extents.files[slot],
                    extents.members[slot],
                    start + step.start + at,
                    offset + step.target + at,
                    min(_CALL_SIZE, step.nbytes - at),
                )
                if ranges and (joined := _join(ranges[-1], piece)) is not None:
                    ranges[-1] = joined
                else:
                    ranges.append(piece)
    return ranges


def _join(first: _Range, second: _Range) -> _Range | None:
    """Both as one copy, where the second goes on where the first ends; rows of a partition do."""
    nbytes = first.nbytes + second.nbytes
    end = (first.file, first.member, first.start + first.nbytes, first.offset + first.nbytes)
    if end != (second.file, second.member, second.start, second.offset) or nbytes > _CALL_SIZE:
        return None
    return _Range(first.file, first.member, first.start, first.offset, nbytes)


def _clip(ranges: Iterable[_Range], part: FileRange) -> Iterator[_Range]:
    """What of some copies lies in a part of the file."""
    for piece in ranges:
        before = max(0, part.start - piece.offset)
        nbytes = min(piece.nbytes, part.stop - piece.offset) - before
        if nbytes > 0:
            yield _Range(
                piece.file, piece.member, piece.start + before, piece.offset + before, nbytes
            )


def _band_jobs(
    target: TargetFile, output: Output, offset: int, buffer_size: int
) -> Iterator[_BandJob]:
    # What a thread loads for a fold serves its next bands too, so it gets some in a row.
    count = _FOLD_BANDS if isinstance(output.value, Fold) else 1
    remaining = value_bands(output.value, buffer_size)
    while some := tuple(itertools.islice(remaining, count)):
        job = _BandJob(target, output, some, offset)
        end = offset + job.nbytes
        if offset < target.part.stop and end > target.part.start:
            yield job
        offset = end


def _make_worker(
    plan: Plan, sources: Sources, syncer: Syncer, contest: _Contest, device: str, team: Team
) -> Callable[[_CopyJob | _BandJob], None]:
    buffer = BandBuffer(0)

    def make_room(nbytes: int) -> None:
        nonlocal buffer
        if len(buffer) < nbytes:
            buffer = BandBuffer(nbytes)

    def work(job: _CopyJob | _BandJob) -> None:
        if isinstance(job, _CopyJob):
            started = time.perf_counter()
            by_kernel = contest.kernel_next(job.target.shared)
            if not by_kernel:
                make_room(min(_COPY_BUFFER, plan.buffer_size))
            for piece in job.ranges:
                if by_kernel:
                    _copy_range(piece, job.target, sources, plan.buffer_size)
                else:
                    _read_and_write(piece, job.target, sources, buffer.memory[:_COPY_BUFFER])
                team.advance(piece.nbytes)
            contest.record(by_kernel, job.nbytes, time.perf_counter() - started)
        else:
            offset = job.offset
            _, start, stop = job.target.part
            for band in job.bands:
                end = offset + band.numel * tensor_nbytes(job.output.dtype, ())
                if offset < stop and end > start:
                    make_room(buffer_nbytes(job.output.value, band.numel))
                    data = evaluate(job.output.value, band, sources, buffer, device)
                    data = data[max(0, start - offset) : stop - offset]
                    with job.target.writing:
                        write_at(job.target, data, max(offset, start))
                    team.advance(len(data))
                offset = end
        target = job.target
        with target.lock:
            target.pending -= 1
            target.unsynced += job.nbytes
            finished = target.complete and target.pending == 0
            flush = target.unsynced >= _FLUSH_SIZE
            if flush:
                target.unsynced = 0
        if finished or flush:
            syncer.put(target, finished)

    return work


def write_side_files(
    plan: Plan, directory: str, sources: Sources, kept: Collection[str] = ()
) -> Iterator[Written]:
    """Write the texts and side files of a plan, each flushed to the disk and checked.

    Args:
        plan: what to write.
        directory: where to.
        sources: the files of the plan's checkpoint, then its side files.
        kept: names of files that are there already.

    Raises:
        SourceError: a side file that cannot be read or has changed.
        TargetError: the disk is full, or another error of writing.
    """
    for text in plan.texts:
        if text.name not in kept:
            with closing(create_file(directory, text.name, len(text.data), text.data)) as target:
                yield finish(target)
    for index, asset in enumerate(plan.assets, start=len(plan.checkpoint.files)):
        if asset.name not in kept:
            with closing(create_file(directory, asset.name, asset.size)) as target:
                for offset in range(0, asset.size, _ASSET_BUFFER):
                    part = memoryview(bytearray(min(_ASSET_BUFFER, asset.size - offset)))
                    sources.read(index, offset, [part])
                    write_at(target, part, offset)
                yield finish(target)


# --- system calls ---


def _copy_range(piece: _Range, target: TargetFile, sources: Sources, buffer_size: int) -> None:
    """Copy in the kernel where it can, else through a small buffer."""
    start = sources.member_offset(piece.file, piece.member) + piece.start
    done = 0
    with target.writing, sources.descriptor(piece.file) as source:
        for method in (_copy_file_range, _send_file):
            try:
                done += method(
                    source, target, start + done, piece.offset + done, piece.nbytes - done
                )
            except OSError as error:
                if error.errno not in _FALLBACK:
                    raise _copy_error(piece, start, target, sources, error) from error
            if done == piece.nbytes:
                return
    rest = _Range(
        piece.file, piece.member, piece.start + done, piece.offset + done, piece.nbytes - done
    )
    buffer = memoryview(bytearray(min(buffer_size, _COPY_BUFFER, rest.nbytes)))
    _read_and_write(rest, target, sources, buffer)


def _read_and_write(
    piece: _Range, target: TargetFile, sources: Sources, buffer: memoryview
) -> None:
    """Copy through a buffer, holding the target only while writing."""
    start = sources.member_offset(piece.file, piece.member) + piece.start
    for done in range(0, piece.nbytes, len(buffer)):
        part = buffer[: piece.nbytes - done]
        sources.read(piece.file, start + done, [part])
        with target.writing:
            write_at(target, part, piece.offset + done)


def _copy_file_range(source: int, target: TargetFile, start: int, offset: int, nbytes: int) -> int:
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(
                source, target.fd, nbytes - done, start + done, offset + done
            )
        except OSError:
            if done == 0:
                raise
            return done
        if count == 0:
            return done
        done += count
    return done


def _send_file(source: int, target: TargetFile, start: int, offset: int, nbytes: int) -> int:
    # It writes at the file position, which nothing else uses, and one thread at a time writes. Not
    # to the path: by now that may be the file of another merge, which has taken this one's place.
    done = 0
    os.lseek(target.fd, offset, os.SEEK_SET)
    while done < nbytes:
        count = os.sendfile(target.fd, source, start + done, nbytes - done)
        if count == 0:
            return done
        done += count
    return done


def _copy_error(
    piece: _Range, start: int, target: TargetFile, sources: Sources, error: OSError
) -> SourceError | TargetError:
    # One call reads and writes; reading the same bytes again tells which side failed.
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        buffer = memoryview(bytearray(min(_COPY_BUFFER, piece.nbytes)))
        for done in range(0, piece.nbytes, len(buffer)):
            sources.read(piece.file, start + done, [buffer[: piece.nbytes - done]])
    return writing_error(target.path, error)


class _Contest:
    """Finds out which way of copying is faster here: by the kernel or through a buffer.

    The kernel saves a pass through this process, and a file server can copy on its own. But where
    source and target do not start at the same place of a page it splits every page. The kernel
    begins; files that several threads share go on through buffers, as these let one thread read
    while another has the file to write to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}

    def kernel_next(self, shared: bool) -> bool:
        """Whether the kernel does the next copy, to a file that threads share or not."""
        with self._lock:
            if self._nbytes[True] < _CONTEST_SIZE:
                return True
            if shared or self._nbytes[False] < _CONTEST_SIZE:
                return False
            rates = {way: self._nbytes[way] / self._seconds[way] for way in (True, False)}
            return rates[True] >= rates[False]

    def record(self, by_kernel: bool, nbytes: int, seconds: float) -> None:
        """Count a finished copy."""
        with self._lock:
            self._nbytes[by_kernel] += nbytes
            self._seconds[by_kernel] += max(seconds, 1e-9)
