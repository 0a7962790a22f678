"""Compares stored bytes with the CRC-32 that torch.save wrote for them, before any are copied.

Kernel copies bypass this process and bands read out of order, so this is a pass of its own: each
member once, in the order of the file, in small buffers.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from streammerge.checkpoint import Checkpoint, File
from streammerge.errors import CorruptFileError
from streammerge.parallel import Team, run
from streammerge.sources import Sources

_READ_SIZE = 1 << 20  # longer reads leave the processor's cache
_BATCH_SIZE = 64 << 20  # members that are handed out, and reported, together
_BATCH_COUNT = 1024
_SMALL = 64 << 10  # checked even if no tensor of the model needs it: the ranks of a device mesh
_NAMED = 3

# Index of a file -> members of it.
Done = Mapping[int, Collection[int]]
OnChecked = Callable[[int, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class CrcReport:
    """What `check_crcs` did.

    Attributes:
        members: how many were compared with their CRC-32.
        nbytes: bytes of them.
        without: the files with members that carry none, and how many.
    """

    members: int
    nbytes: int
    without: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Members of a file, in the order of their bytes."""

    file: int
    members: tuple[int, ...]


def check_crcs(
    checkpoint: Checkpoint,
    sources: Sources,
    *,
    buffer_size: int,
    workers: int,
    done: Done | None = None,
    on_checked: OnChecked | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> CrcReport:
    """Compare the members that hold data of a tensor, and all small ones, with their CRC-32.

    torch.save writes one for each storage since torch 1.6, unless it was switched off
    (``torch.serialization.set_crc32_options``); legacy files and safetensors have none.

    Args:
        checkpoint: as `describe` gives it.
        sources: its files.
        buffer_size: bytes of buffer per worker.
        workers: number of threads; each takes another file while there are enough.
        done: members that are not checked again: index of a file -> indices of members.
        on_checked: called with the index of a file and with members of it that are right. One
            thread at a time calls it, but not always the same.
        on_progress: called now and then, in this thread, with the bytes checked so far.

    Raises:
        CorruptFileError: bytes that have another CRC-32.
        SourceError: a file that cannot be read or has changed.
    """
    needed = _needed(checkpoint)
    done = {} if done is None else done
    lock = threading.Lock()
    checked = 0

    def make_worker(team: Team) -> Callable[[_Batch], None]:
        buffer = memoryview(bytearray(min(buffer_size, _READ_SIZE)))

        def work(batch: _Batch) -> None:
            nonlocal checked
            for member in batch.members:
                _check(checkpoint, sources, batch.file, member, buffer, team)
            with lock:
                checked += len(batch.members)
                if on_checked is not None:
                    on_checked(batch.file, batch.members)

        return work

    nbytes = run(
        _alternate(_streams(checkpoint, needed, done), workers), make_worker, workers, on_progress
    )
    return CrcReport(checked, nbytes, _without(checkpoint, needed))


def crc_amount(checkpoint: Checkpoint, done: Done | None = None) -> int:
    """How many bytes `check_crcs` reads."""
    needed = _needed(checkpoint)
    return sum(
        checkpoint.files[batch.file].members.sizes[member]
        for stream in _streams(checkpoint, needed, done or {})
        for batch in stream
        for member in batch.members
    )


def _needed(checkpoint: Checkpoint) -> list[bytearray]:
    """For each file, a flag per member: whether it is to be checked."""
    needed = [bytearray(n <= _SMALL for n in file.members.sizes) for file in checkpoint.files]
    for tensor in checkpoint.tensors:
        extents = tensor.extents
        for file, member in zip(extents.files, extents.members, strict=True):
            needed[file][member] = 1
    return needed


def _without(checkpoint: Checkpoint, needed: list[bytearray]) -> tuple[tuple[str, int], ...]:
    counts = []
    for file, flags in zip(checkpoint.files, needed, strict=True):
        columns = zip(flags, file.members.sizes, file.members.crcs, strict=True)
        counts.append(sum(1 for flag, size, crc in columns if flag and size and not crc))
    return tuple(
        (file.path, count) for file, count in zip(checkpoint.files, counts, strict=True) if count
    )


def _streams(
    checkpoint: Checkpoint, needed: list[bytearray], done: Done
) -> Iterator[Iterator[_Batch]]:
    """The batches of each file."""
    for index, file in enumerate(checkpoint.files):
        yield _batches(index, file, needed[index], done.get(index, ()))


def _batches(index: int, file: File, needed: bytearray, done: Collection[int]) -> Iterator[_Batch]:
    crcs, sizes, offsets = file.members.crcs, file.members.sizes, file.members.data_offsets
    skipped = frozenset(done)
    members = [m for m, flag in enumerate(needed) if flag and crcs[m] and m not in skipped]
    members.sort(key=offsets.__getitem__)
    batch: list[int] = []
    nbytes = 0
    for member in members:
        batch.append(member)
        nbytes += sizes[member]
        if nbytes >= _BATCH_SIZE or len(batch) >= _BATCH_COUNT:
            yield _Batch(index, tuple(batch))
            batch, nbytes = [], 0
    if batch:
        yield _Batch(index, tuple(batch))


def _alternate(streams: Iterator[Iterator[_Batch]], count: int) -> Iterator[_Batch]:
    """The batches of `count` files at a time, in turn: each worker is then busy with another."""
    running = deque(itertools.islice(streams, count))
    while running:
        stream = running.popleft()
        batch = next(stream, None)
        if batch is not None:
            yield batch
            running.append(stream)
        elif (following := next(streams, None)) is not None:
            running.append(following)


def _check(
    checkpoint: Checkpoint,
    sources: Sources,
    index: int,
    member: int,
    buffer: memoryview,
    team: Team,
) -> None:
    members = checkpoint.files[index].members
    at = sources.member_offset(index, member)
    crc = 0
    for done in range(0, members.sizes[member], len(buffer)):
        part = buffer[: members.sizes[member] - done]
        sources.read(index, at + done, [part])
        crc = zlib.crc32(part, crc)
        team.advance(len(part))
    if crc != members.crcs[member]:
        raise CorruptFileError(
            f"{checkpoint.files[index].path}: the data of {_keys(checkpoint, index, member)} are "
            f"damaged: their CRC-32 is {crc:08x}, torch.save stored {members.crcs[member]:08x}",
            hint="copy the file again from where it was written",
        )


def _keys(checkpoint: Checkpoint, file: int, member: int) -> str:
    """The tensors with data in a member, for people."""
    names = [
        f"'{tensor.name}'"
        for tensor in checkpoint.tensors
        if (file, member) in zip(tensor.extents.files, tensor.extents.members, strict=True)
    ]
    if not names:
        return "a storage that belongs to no tensor of the model"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"key{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
