"""Damaged rank files: an error, or what torch reads from the same damaged files. Never a third.

Each case damages real rank files by its number, in one of the ways of `MUTATIONS`. What merges all
the same must be what `torch.load` and torch's own placement give for these files. Where torch
refuses a file, the damage must not have changed a value.

500 cases run as a rule; ``STREAMMERGE_MUTATIONS=10000`` runs more.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import logging
import math
import os
import random
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_unpickler
import torch
from checkpoints import rank_file, save_ranks, scratch, sharded
from oracles import assert_same_tensors
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import streammerge
from streammerge import StreamMergeError

CASES = int(os.environ.get("STREAMMERGE_MUTATIONS", "500"))
PARTS = 10


@dataclass(frozen=True)
class Sample:
    """A good checkpoint, in memory.

    Attributes:
        files: the rank files.
        mesh: sizes of the mesh that all its DTensors are on.
        values: what it holds.
    """

    files: tuple[bytes, ...]
    mesh: tuple[int, ...]
    values: dict[str, torch.Tensor]


def state_of(mesh: tuple[int, ...]) -> dict[str, object]:
    """What the current rank holds: tensors of most kinds that fit on a mesh of one dim or two."""
    rows, buffer = torch.arange(33.0).view(11, 3), torch.arange(10, dtype=torch.int16)
    copies = [Replicate()] * (len(mesh) - 1)
    tied = sharded(rows.bfloat16(), [*copies, Shard(0)], mesh)
    return {
        "rows": sharded(rows, [*copies, Shard(0)], mesh),
        "columns": sharded(rows * 2, [*copies, Shard(1)], mesh),
        "both": sharded(rows * 3, [Shard(0)] * len(mesh), mesh),
        "tied": tied,
        "tied too": tied,
        "norm": sharded(torch.ones(5), [Replicate()] * len(mesh), mesh),
        "buffer": buffer.view(5, 2).t(),
        "scalar": torch.tensor(7),
        "empty": sharded(torch.ones(0, 3), [*copies, Shard(0)], mesh),
        "step": 3,
    }


def make_sample(
    folder: Path, mesh: tuple[int, ...], *, legacy: bool = False, wrapped: bool = False
) -> Sample:
    count = math.prod(mesh)

    def build(rank: int) -> dict[str, object]:
        state = state_of(mesh)
        return {"model": state, "epoch": 1} if wrapped else state

    save_ranks(folder, build, world_size=count)
    if legacy:
        for path in folder.glob("*.pt"):
            state = torch.load(path, weights_only=True)
            torch.save(state, path, _use_new_zipfile_serialization=False)
    files = tuple(rank_file(folder, rank, count).read_bytes() for rank in range(count))
    return Sample(files, mesh, read_by_torch(folder, mesh))


@functools.cache
def samples() -> tuple[Sample, ...]:
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    with scratch() as folder:
        return (
            make_sample(folder / "a", (2,)),
            make_sample(folder / "b", (2, 2)),
            make_sample(folder / "c", (3,), wrapped=True),
            make_sample(folder / "d", (2,), legacy=True),
        )


def read_by_torch(folder: Path, mesh: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Merge with torch's own reader and its own placement. Nothing of ours takes part."""
    found: dict[str, torch.Tensor] = {}
    # Of several copies the one of the lowest rank counts.
    for rank in reversed(range(math.prod(mesh))):
        path = rank_file(folder, rank, math.prod(mesh))
        zipped = path.read_bytes()[:4] == b"PK\3\4"
        # Mapped, torch takes the values as they are, without a look at their checksums.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unusual protocols
            state = torch.load(path, weights_only=True, mmap=zipped)
        position = [int(i) for i in torch.unravel_index(torch.tensor(rank), mesh)]
        wrapped = [value for value in state.values() if isinstance(value, dict)]
        for name, value in (wrapped or [state])[0].items():
            if isinstance(value, DTensor):
                spec, local = value._spec, value._local_tensor
                shape = spec.tensor_meta.shape
                sizes, offsets = _compute_local_shape_and_global_offset(
                    shape, mesh, position, spec.placements
                )
                if name not in found or found[name].shape != shape:
                    found[name] = torch.zeros(shape, dtype=local.dtype)
                if 0 not in sizes:
                    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                        assert local.shape[dim] == size, f"{name} of rank {rank}"
                        assert offset + size <= shape[dim]
                    region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                    found[name][region] = local
            elif isinstance(value, torch.Tensor):
                found[name] = value.clone()
    return found


# --- ways to damage files -------------------------------------------------------------------------

Files = list[bytearray]
Mutation = Callable[[Files, random.Random], None]
MUTATIONS: list[Mutation] = []


def mutation(mutate: Mutation) -> Mutation:
    MUTATIONS.append(mutate)
    return mutate


def flip(file: bytearray, rng: random.Random, begin: int, end: int) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if begin < end:
            file[rng.randrange(begin, end)] ^= rng.randrange(1, 256)


def members_of(file: bytearray) -> dict[str, tuple[int, int, int]]:
    """Of each member: where its entry in the directory is, where its bytes begin and end."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            sizes = struct.unpack_from("<2H", file, info.header_offset + 26)
            begin = info.header_offset + 30 + sum(sizes)
            found[info.filename.partition("/")[2]] = (at, begin, begin + info.file_size)
            at += 46 + sum(struct.unpack_from("<3H", file, at + 28))
    return found


def fix_checksum(file: bytearray, member: str) -> None:
    """The writer's fault, then, or a forgery."""
    at, begin, end = members_of(file)[member]
    struct.pack_into("<I", file, at + 16, zlib.crc32(file[begin:end]))


def pickled_part(file: bytearray) -> tuple[int, int]:
    if file.startswith(b"PK"):
        return members_of(file)["data.pkl"][1:]
    return 0, len(file) // 2


@mutation
def flip_anywhere(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    flip(file, rng, 0, len(file))


@mutation
def flip_in_the_pickle(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    flip(file, rng, *pickled_part(file))
    if file.startswith(b"PK"):
        fix_checksum(file, "data.pkl")


@mutation
def flip_a_bit_in_the_pickle(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    file[rng.randrange(*pickled_part(file))] ^= 1 << rng.randrange(8)
    if file.startswith(b"PK"):
        fix_checksum(file, "data.pkl")


@mutation
def flip_in_the_directory(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    at = file.find(b"PK\1\2")
    flip(file, rng, max(at, 0), len(file))


@mutation
def flip_in_the_headers(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    starts = [at for at in range(len(file) - 4) if file[at : at + 4] in (b"PK\3\4", b"PK\7\x08")]
    at = rng.choice(starts or [0])
    flip(file, rng, at, min(len(file), at + 64))


@mutation
def flip_in_the_data(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    if file.startswith(b"PK"):
        member = rng.choice([m for m in members_of(file) if m.startswith("data/")])
        flip(file, rng, *members_of(file)[member][1:])
        if rng.random() < 0.5:
            fix_checksum(file, member)
    else:
        flip(file, rng, len(file) // 2, len(file))


@mutation
def cut(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    size = len(file)
    del file[rng.randrange(size) :]
    if rng.random() < 0.5:  # a copy that was given its size before it had its bytes
        file += bytes(size - len(file))


@mutation
def insert_or_delete(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    at, count = rng.randrange(len(file)), rng.choice((1, 2, 8, 64, 512))
    if rng.random() < 0.5:
        file[at:at] = rng.randbytes(count)
    else:
        del file[at : at + count]


@mutation
def swap_ranges(files: Files, rng: random.Random) -> None:
    a, b = rng.choice(files), rng.choice(files)
    size = rng.choice((4, 16, 64, 512))
    at, to = (rng.randrange(max(1, len(file) - size)) for file in (a, b))
    a[at : at + size], b[to : to + size] = bytes(b[to : to + size]), bytes(a[at : at + size])


@mutation
def zero_a_block(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    size = rng.choice((16, 64, 512))
    at = rng.randrange(len(file)) // size * size
    size = min(size, len(file) - at)
    file[at : at + size] = bytes(size)


@mutation
def exchange_members(files: Files, rng: random.Random) -> None:
    """With their checksums, so that only what they hold can tell."""
    a, b = rng.sample(files, 2)
    if not a.startswith(b"PK"):
        return swap_ranges(files, rng)
    theirs = members_of(b)
    member, (_, begin, end) = rng.choice(list(members_of(a).items()))
    same = [name for name, (_, start, stop) in theirs.items() if stop - start == end - begin]
    if same:
        other = rng.choice(same)
        _, start, stop = theirs[other]
        a[begin:end], b[start:stop] = bytes(b[start:stop]), bytes(a[begin:end])
        fix_checksum(a, member)
        fix_checksum(b, other)
    return None


@mutation
def exchange_entries_of_the_directory(files: Files, rng: random.Random) -> None:
    """All but the names of two members, or only where they are."""
    file = rng.choice(files)
    if not file.startswith(b"PK"):
        return swap_ranges([file], rng)
    (a, _, _), (b, _, _) = rng.sample(list(members_of(file).values()), 2)
    for begin, end in rng.choice((((42, 46),), ((16, 28), (42, 46)))):
        file[a + begin : a + end], file[b + begin : b + end] = (
            bytes(file[b + begin : b + end]),
            bytes(file[a + begin : a + end]),
        )
    return None


@mutation
def exchange_files(files: Files, rng: random.Random) -> None:
    a, b = rng.sample(range(len(files)), 2)
    files[a], files[b] = files[b], files[a]
    if rng.random() < 0.3:
        files[a] = bytearray(files[b])


@mutation
def put_another_value_into_the_pickle(files: Files, rng: random.Random) -> None:
    file = rng.choice(files)
    if not file.startswith(b"PK"):
        return flip_in_the_pickle(files, rng)
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("/data.pkl"))
    members[name] = test_unpickler.mutate(test_unpickler.pieces_of(members[name]), rng)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    file[:] = stream.getvalue()
    return None


# --- the property ---------------------------------------------------------------------------------


def merge(folder: Path, case: int) -> str:
    """Damage a sample by the number of the case, merge it, and compare; says how it ended."""
    rng = random.Random(case)
    sample = rng.choice(samples())
    mutate = MUTATIONS[case % len(MUTATIONS)]
    files = [bytearray(file) for file in sample.files]
    mutate(files, rng)
    source, target = folder / "source", folder / "target"
    source.mkdir()
    for rank, file in enumerate(files):
        rank_file(source, rank, len(files)).write_bytes(file)
    try:
        with test_unpickler.little_memory():
            streammerge.merge(source, target, raw=True)
    except StreamMergeError as error:
        if "\n" in str(error) or target.exists():
            pytest.fail(f"not as an error should be: {error!r}")
        return type(error).__name__
    merged = load_file(target / "model.safetensors")
    try:
        expected = read_by_torch(source, sample.mesh)
    except Exception as error:
        expected, how = sample.values, f"original, torch: {type(error).__name__}"
    else:
        how = "as torch has it"
    assert_same_tensors(merged, expected)
    return how


def test_the_samples() -> None:
    """Undamaged, torch reads from them what was saved."""
    rows = torch.arange(33.0).view(11, 3)
    for sample in samples():
        values = sample.values
        assert torch.equal(values["rows"], rows)
        assert torch.equal(values["columns"], rows * 2)
        assert torch.equal(values["both"], rows * 3)
        assert torch.equal(values["tied"], rows.bfloat16())
        assert torch.equal(values["buffer"], torch.arange(10, dtype=torch.int16).view(5, 2).t())


@functools.cache
def outcomes_of(part: int) -> Counter[str]:
    outcomes = Counter[str]()
    for case in range(part, CASES, PARTS):
        with scratch() as folder:
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                outcomes[merge(folder, case)] += 1
            except BaseException:
                print(f"case {case}: {MUTATIONS[case % len(MUTATIONS)].__name__}")
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
    return outcomes


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files(part: int) -> None:
    assert outcomes_of(part).total() == len(range(part, CASES, PARTS))


def test_what_the_damage_led_to() -> None:
    outcomes = sum(map(outcomes_of, range(PARTS)), Counter[str]())
    print(outcomes)
    assert outcomes["as torch has it"] >= CASES / 20
    for error in (
        "CorruptFileError",
        "InconsistentRanksError",
        "PlacementError",
        "ReplicaMismatchError",
        "UnsafePickleError",
        "UnsupportedError",
    ):
        assert outcomes[error] >= 1, outcomes
