"""Compares what should be equal on several ranks, before anything is written.

Raw bits are compared (a NaN equals the same NaN), in pieces that fit the buffer budget: bytes as
they are, or with ``torch.equal`` on integer views where torch is loaded. Several processes share
the work, and then what they have found.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from streammerge.arithmetic import check_device
from streammerge.bands import Band, bands
from streammerge.checkpoint import Checkpoint, Chunk, MeshLayout, Tensor
from streammerge.dtypes import ITEMSIZE
from streammerge.elements import first_difference
from streammerge.errors import ReplicaMismatchError, StreamMergeError, UsageError
from streammerge.evaluate import band_numel, buffer_nbytes
from streammerge.parallel import STACK_SIZE, TORCH_STACK_SIZE, Team, run
from streammerge.placement import unravel
from streammerge.processes import Processes
from streammerge.reader import BandBuffer, read_shard
from streammerge.shares import owner
from streammerge.sources import Sources
from streammerge.values import Stored

if TYPE_CHECKING:
    import torch

MODES = ("check", "first", "check-all")

# With less to compare, importing torch and moving the bytes costs more than comparing them here.
_WORTH_A_GPU = 1 << 30
_PART_SIZE = 32 << 20  # bytes of one copy that a process compares with the others

# Whether the buffer begins with the piece.
Equal = Callable[[bytearray, memoryview], bool]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor whose copies differ.

    Attributes:
        name: its key.
        ranks: the ranks whose copy differs from that of `first_rank`.
        first_rank: the rank whose copy is used.
        reason: what differs, for people.
    """

    name: str
    ranks: tuple[int, ...]
    first_rank: int
    reason: str

    def __str__(self) -> str:
        return f"key '{self.name}': {self.reason}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_replicas` did.

    Attributes:
        tensors: number of tensors with copies that were compared.
        nbytes: bytes read for it.
        differences: in the order of the checkpoint.
        device: where, ``cpu`` or ``cuda``.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...]
    device: str


@dataclass(frozen=True, slots=True)
class _Found:
    """Which rank a copy was compared with, and the index of the first element that differs."""

    first_rank: int
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of a chunk, to be compared between slots."""

    tensor: Tensor
    chunk: Chunk
    slots: tuple[int, ...]
    part: Band

    @property
    def nbytes(self) -> int:
        return self.part.numel * ITEMSIZE[self.tensor.dtype] * len(self.slots)


def merge_non_dtensor_shards(key: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one value of a replicated entry, of which every rank holds a copy.

    Copies are compared bit by bit with ``torch.equal`` on the tensors' own device.

    Args:
        key: name of the entry, for the error.
        shards: the copy of each rank, in order of ranks; any shape and dtype.

    Returns:
        The first copy.

    Raises:
        ValueError: no copies, or one that differs from rank 0's in shape, dtype or value.
    """
    if not shards:
        raise ValueError(f"'{key}': no copies")
    import torch

    first = shards[0]
    bits = _bits(first)
    for rank, shard in enumerate(shards[1:], start=1):
        if shard.shape != first.shape:
            difference = f"shape {list(shard.shape)}, rank 0 {list(first.shape)}"
        elif shard.dtype != first.dtype:
            difference = f"dtype {shard.dtype}, rank 0 {first.dtype}"
        elif not torch.equal(bits, _bits(shard).to(bits.device)):
            difference = "another value than rank 0"
        else:
            continue
        raise ValueError(f"'{key}': rank {rank} holds {difference}; copies must be equal")
    return first


def compare_replicas(
    checkpoint: Checkpoint,
    sources: Sources,
    *,
    mode: str = "check",
    device: str = "auto",
    buffer_size: int,
    workers: int,
    on_progress: Callable[[int], None] | None = None,
    processes: Processes | None = None,
) -> Comparison:
    """Compare the copies that ranks hold of the same values.

    Plain entries, replicated DTensors and copies on parallel meshes are compared in every mode,
    those of sharded weights (HSDP) in mode ``check-all`` only, as that reads them all.

    Args:
        checkpoint: as `describe` gives it.
        sources: its files.
        mode: one of `MODES`.
        device: one of `arithmetic.DEVICES`.
        buffer_size: bytes of buffer per worker; two pieces share it.
        workers: number of threads.
        on_progress: called now and then, in this thread, with the bytes compared so far by this
            process.
        processes: those that share the work; each gets the same result.

    Raises:
        UsageError: an unknown mode or device, or ``cuda`` without a GPU.
        UnsupportedError: ``cuda`` without torch.
        ReplicaMismatchError: copies differ, unless the mode is ``first``.
    """
    if mode not in MODES:
        raise UsageError(f"unknown replicas mode {mode!r}, expected one of {', '.join(MODES)}")
    check_device(device)
    tensors, nbytes = replica_amount(checkpoint, mode)
    place = _choose_device(device, nbytes)
    equal = _torch_equal(place) if place == "cuda" or sys.modules.get("torch") else _bytes_equal
    processes = processes or Processes()
    differing: dict[str, dict[int, _Found]] = {}
    lock = threading.Lock()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done = nbytes
        if on_progress is not None:
            on_progress(nbytes)

    @lru_cache(maxsize=16)  # a tensor has as many jobs as chunks, each of which it looks at
    def most_numel(tensor: Tensor) -> int:
        return band_numel(Stored(tensor), buffer_size // 2)

    def make_worker(team: Team) -> Callable[[_Job], None]:
        first, other = BandBuffer(0), BandBuffer(0)

        def work(job: _Job) -> None:
            nonlocal first, other
            numel = min(job.part.numel, most_numel(job.tensor))
            needed = buffer_nbytes(Stored(job.tensor), numel)
            if len(first) < needed:
                first, other = BandBuffer(needed), BandBuffer(needed)
            found = _compare(job, numel, sources, first, other, equal, team)
            if found:
                with lock:
                    _merge(differing, {job.tensor.name: found})

        return work

    if tensors:
        stack = STACK_SIZE if equal is _bytes_equal else TORCH_STACK_SIZE
        jobs = _share(checkpoint, mode, nbytes, processes)
        run(jobs, make_worker, min(workers, tensors), advance, stack)
    for found in processes.exchange(_as_lists(differing), meanwhile=lambda: advance(done)):
        _merge(differing, _from_lists(found))
    if tensors:
        advance(done)  # now it is known what all have done
    differences = tuple(
        _difference(tensor, differing.get(tensor.name, {}))
        for tensor in checkpoint.tensors
        if tensor.conflicts or tensor.name in differing
    )
    if differences and mode != "first":
        raise _mismatch(checkpoint, differences)
    return Comparison(tensors, nbytes, differences, place)


def replica_amount(checkpoint: Checkpoint, mode: str) -> tuple[int, int]:
    """How many tensors `compare_replicas` compares, and how many bytes it reads for it."""
    names = set()
    nbytes = 0
    for tensor, chunk, slots in _copies(checkpoint, mode):
        names.add(tensor.name)
        nbytes += math.prod(chunk.box.sizes) * ITEMSIZE[tensor.dtype] * len(slots)
    return len(names), nbytes


def _share(checkpoint: Checkpoint, mode: str, nbytes: int, processes: Processes) -> Iterator[_Job]:
    """What this process compares of all `nbytes`. Does not depend on the size of buffers."""
    at = 0
    for tensor, chunk, slots in _copies(checkpoint, mode):
        box, itemsize = chunk.box, ITEMSIZE[tensor.dtype]
        for part in bands(box.sizes, itemsize, _PART_SIZE, box.offsets):
            job = _Job(tensor, chunk, slots, part)
            if owner(at, job.nbytes, nbytes, processes.size) == processes.rank:
                yield job
            at += job.nbytes


def _copies(checkpoint: Checkpoint, mode: str) -> Iterator[tuple[Tensor, Chunk, tuple[int, ...]]]:
    """The chunks that are compared, with the slots that hold copies."""
    for tensor in checkpoint.tensors:
        for chunk in tensor.chunks():
            everything = mode == "check-all"
            slots = chunk.replicas if everything else tensor.layout.undeclared(chunk)
            if len(slots) > 1:
                yield tensor, chunk, slots


def _compare(
    job: _Job,
    numel: int,
    sources: Sources,
    first: BandBuffer,
    other: BandBuffer,
    equal: Equal,
    team: Team,
) -> dict[int, _Found]:
    """The ranks whose copy differs, with where it first does, in bands of `numel` elements."""
    tensor = job.tensor
    itemsize = ITEMSIZE[tensor.dtype]
    ranks = tensor.layout.ranks
    found: dict[int, _Found] = {}
    for band in bands(job.part.sizes, itemsize, numel * itemsize, job.part.offsets):
        nbytes = band.numel * itemsize
        _read_copy(job, job.slots[0], band, sources, first)
        team.advance(nbytes)
        for slot in job.slots[1:]:
            if ranks[slot] not in found:
                _read_copy(job, slot, band, sources, other)
                if not equal(first.data, other.memory[:nbytes]):
                    copies = first.memory[:nbytes], other.memory[:nbytes]
                    at = unravel(first_difference(*copies, itemsize), band.sizes)
                    index = tuple(map(operator.add, band.offsets, at))
                    found[ranks[slot]] = _Found(ranks[job.slots[0]], index)
            team.advance(nbytes)
    return found


def _merge(into: dict[str, dict[int, _Found]], found: dict[str, dict[int, _Found]]) -> None:
    """Add what was found elsewhere; of several places in a tensor the first one stays."""
    for name, ranks in found.items():
        known = into.setdefault(name, {})
        for rank, place in ranks.items():
            known[rank] = min(known.get(rank, place), place, key=lambda found: found.index)


_Lists = list[tuple[str, list[tuple[int, int, tuple[int, ...]]]]]


def _as_lists(differing: dict[str, dict[int, _Found]]) -> _Lists:
    """What was found, for JSON."""
    return [
        (name, [(rank, place.first_rank, place.index) for rank, place in ranks.items()])
        for name, ranks in differing.items()
    ]


def _from_lists(lists: _Lists) -> dict[str, dict[int, _Found]]:
    return {
        name: {rank: _Found(first_rank, tuple(index)) for rank, first_rank, index in ranks}
        for name, ranks in lists
    }


def _read_copy(job: _Job, slot: int, band: Band, sources: Sources, buffer: BandBuffer) -> None:
    strides = job.tensor.extents.strides.get(slot)
    read_shard(job.tensor, job.chunk.box, slot, strides, band, sources, buffer)


def _difference(tensor: Tensor, found: dict[int, _Found]) -> Difference:
    if tensor.conflicts:
        first_rank = tensor.layout.ranks[0]
        ranks = tuple(sorted({rank for rank, _ in tensor.conflicts} | set(found)))
        rank, what = tensor.conflicts[0]
        reason = (
            f"{_ranks(ranks)} differ{'s' if len(ranks) == 1 else ''} from rank {first_rank}: "
            f"rank {rank} holds {what}, rank {first_rank} {tensor.dtype} {list(tensor.shape)}"
        )
    else:
        ranks = tuple(sorted(found))
        first_rank, index = found[ranks[0]].first_rank, list(found[ranks[0]].index)
        reason = (
            f"{_ranks(ranks)} hold{'s' if len(ranks) == 1 else ''} another value than rank "
            f"{first_rank} (first at index {index})"
        )
    return Difference(tensor.name, ranks, first_rank, reason)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _mismatch(checkpoint: Checkpoint, differences: Sequence[Difference]) -> ReplicaMismatchError:
    first = differences[0]
    tensor = next(t for t in checkpoint.tensors if t.name == first.name)
    text = str(first)
    if len(differences) > 1:
        more = ", ".join(f"'{d.name}'" for d in differences[1:4])
        text += f" (and {len(differences) - 1} more keys: {more}"
        text += ", ...)" if len(differences) > 4 else ")"
    hint = "--replicas first takes the first rank's value of each such key"
    if isinstance(tensor.layout, MeshLayout) and len(tensor.layout.meshes) > 1:
        text += (
            f"; its {len(tensor.layout.meshes)} parallel device meshes should hold copies, but "
            "may hold different experts under one key (locally sliced expert parallelism), which "
            "cannot be merged"
        )
        hint = "save experts with their expert-parallel mesh dim in the DTensor, or gathered"
    return ReplicaMismatchError(text, hint=hint)


# --- how two pieces are compared ---


def _bytes_equal(first: bytearray, other: memoryview) -> bool:
    # Compares in C and copies nothing, where memoryviews would compare item by item.
    return first.startswith(other)


def _torch_equal(device: str) -> Equal:
    import torch

    def equal(first: bytearray, other: memoryview) -> bool:
        a = torch.frombuffer(first, dtype=torch.uint8, count=len(other))
        b = torch.frombuffer(other, dtype=torch.uint8)
        if device != "cpu":
            a, b = a.to(device), b.to(device)
        return torch.equal(a, b)

    return equal


def _choose_device(device: str, nbytes: int) -> str:
    if device != "auto":
        return device
    # A look at files saves importing torch to learn that there is no GPU.
    there = any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd")))
    if nbytes < _WORTH_A_GPU or not there:
        return "cpu"
    try:
        check_device("cuda")
    except StreamMergeError:
        return "cpu"
    return "cuda"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor as integers."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
