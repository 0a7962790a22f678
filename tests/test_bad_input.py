"""Bad checkpoints and bad targets: what is refused, in which words, and that nothing is touched."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import rank_files
import torch
from checkpoints import rank_file, reshaped, save_plain, save_ranks, sharded, sharded_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

import streammerge
from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    NoSpaceError,
    PlacementError,
    Progress,
    ReplicaMismatchError,
    SourceChangedError,
    SourceError,
    StreamMergeError,
    TargetPathError,
    UnsafePickleError,
    UnsupportedError,
)
from streammerge.cli import main

ROOT = Path(__file__).resolve().parents[1]
GOOD = "fsdp2_w4__t213"
WEIGHT = torch.arange(24.0).view(12, 2)


@dataclass(frozen=True)
class Refusal:
    """What a refused command said."""

    code: int
    error: str
    hint: str | None


def parse_refusal(code: int, output: str, errors: str) -> Refusal:
    """Check the form of what was said: one error line, at most one hint, nothing else."""
    lines = errors.splitlines()
    assert output == ""
    assert errors.endswith("\n")
    assert 1 <= len(lines) <= 2, errors
    assert lines[0].startswith("streammerge: error: "), errors
    assert not lines[0].startswith("streammerge: error: unexpected "), errors
    hint = None
    if len(lines) == 2:
        assert lines[1].startswith("hint: "), errors
        hint = lines[1].removeprefix("hint: ")
    return Refusal(code, lines[0].removeprefix("streammerge: error: "), hint)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Refusal]:
    """Runs a merge that has to fail and leave everything below `tmp_path` as it was."""

    def run(*arguments: str | Path, code: int = 1) -> Refusal:
        before = checkpoints.snapshot(tmp_path)
        found = main(["merge", *map(str, arguments)])
        captured = capsys.readouterr()
        refusal = parse_refusal(found, captured.out, captured.err)
        assert refusal.code == code, refusal
        assert checkpoints.snapshot(tmp_path) == before
        return refusal

    return run


# --- checkpoints ----------------------------------------------------------------------------------

BAD: list[Any] = []
Make = Callable[[Path], None]


def bad(
    error: type[StreamMergeError], *parts: str, hint: str | None = None
) -> Callable[[Make], Make]:
    """Enter a maker of a bad checkpoint into the table.

    Args:
        error: exact class.
        parts: what the message must hold; ``{source}`` is the directory, ``{rank[2]}`` a file.
        hint: what the hint must hold; None if there must be no hint.
    """

    def enter(make: Make) -> Make:
        BAD.append(pytest.param(make, error, parts, hint, id=make.__name__))
        return make

    return enter


@pytest.mark.parametrize(("make", "error", "parts", "hint"), BAD)
def test_refuses_a_bad_checkpoint(
    make: Make,
    error: type[StreamMergeError],
    parts: Sequence[str],
    hint: str | None,
    tmp_path: Path,
    refuse: Callable[..., Refusal],
) -> None:
    source = tmp_path / "source"
    make(source)
    files = [str(rank_file(source, rank)) for rank in range(5)]

    refusal = refuse(source, tmp_path / "parent" / "merged")

    for part in parts:
        assert part.format(source=source, rank=files) in refusal.error
    if hint is None:
        assert refusal.hint is None
    else:
        assert refusal.hint is not None
        assert hint in refusal.hint
    with pytest.raises(StreamMergeError) as caught:
        streammerge.merge(source, tmp_path / "merged")
    assert type(caught.value) is error
    assert str(caught.value) == refusal.error
    assert caught.value.hint == refusal.hint


NODES = "if each node kept its own files"


@bad(CheckpointNotFoundError, "{source}: 1 of 4 rank files missing: rank 2", hint=NODES)
def one_rank_is_missing(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    rank_file(source, 2).unlink()


@bad(CheckpointNotFoundError, "6 of 12 rank files missing: ranks 1, 3-5, 8, 11", hint=NODES)
def several_ranks_are_missing(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 12)
    for rank in (1, 3, 4, 5, 8, 11):
        rank_file(source, rank, 12).unlink()


@bad(InconsistentRanksError, "{rank[4]}", "rank 4", "world size of 4")
def a_rank_beyond_the_world_size(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    shutil.copy(rank_file(source, 0), rank_file(source, 4))


@bad(InconsistentRanksError, "{source}", "several world sizes (2 and 4)", hint="one run only")
def two_world_sizes(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    for rank in range(2):
        shutil.copy(rank_file(source, rank), rank_file(source, rank, 2))


@bad(InconsistentRanksError, "{source}/fsdp_config.json", "world_size 8", "rank files say 4")
def a_config_of_another_world_size(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    (source / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}')


@bad(CorruptFileError, "{source}/fsdp_config.json: not JSON", "line 1 column 16")
def a_config_that_is_cut_short(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    (source / "fsdp_config.json").write_text('{"world_size": ')


@bad(CorruptFileError, "{source}/fsdp_config.json: not JSON")
def a_config_that_is_no_text(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    (source / "fsdp_config.json").write_bytes(b"\xff\xfe{}")


@bad(CorruptFileError, "{source}/fsdp_config.json: not JSON")
def a_config_that_is_nested_too_deeply(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    (source / "fsdp_config.json").write_text("[" * 100_000)


@bad(SourceError, "{rank[2]}: Is a directory")
def a_directory_of_the_name_of_a_rank_file(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    rank_file(source, 2).unlink()
    rank_file(source, 2).mkdir()


@bad(CorruptFileError, "{rank[1]}", "empty (0 bytes)")
def an_empty_file(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    checkpoints.cut(rank_file(source, 1), 0)


@bad(CorruptFileError, "{rank[3]}", "cut short")
def a_file_without_its_last_byte(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    checkpoints.cut(rank_file(source, 3), -1)


@bad(CorruptFileError, "{rank[3]}", "cut short", "storage")
def a_legacy_file_without_its_last_byte(source: Path) -> None:
    checkpoints.copy_stored("fsdp2_w4_legacy__t213", source)
    checkpoints.cut(rank_file(source, 3), -1)


@bad(CorruptFileError, "{rank[0]}", "not a torch.save file")
def text(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    rank_file(source, 0).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@bad(CorruptFileError, "{rank[1]}", "a zip archive", "no data.pkl")
def another_zip_archive(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    with zipfile.ZipFile(rank_file(source, 1), "w") as archive:
        archive.writestr("readme.txt", "nothing of interest")


@bad(CorruptFileError, "{rank[1]}", "not a torch.save file")
def a_pickle_of_something_else(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    rank_file(source, 1).write_bytes(pickle.dumps({"step": 3}, protocol=2))


@bad(UnsupportedError, "{rank[0]}", "a list, not a dict of tensors", hint="rank file")
def a_torch_file_of_a_list(source: Path) -> None:
    save_plain(source, [[WEIGHT]] * 4)


@bad(UnsupportedError, "{source}", "hold no tensors", "'epoch', 'lr'")
def a_torch_file_without_tensors(source: Path) -> None:
    save_plain(source, [{"epoch": 3, "lr": 0.1}] * 4)


@bad(UnsupportedError, "{source}", "no tensors")
def rank_files_of_empty_dicts(source: Path) -> None:
    save_plain(source, [{}] * 4)


@bad(UnsupportedError, "{rank[0]}", "key 7")
def a_key_that_is_no_name(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT, 7: WEIGHT}] * 4)


@bad(UnsupportedError, "'__metadata__'", "reserved")
def a_key_that_safetensors_reserves(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT, "__metadata__": WEIGHT}] * 4)


@bad(UnsupportedError, "{rank[0]}", "'w'", "complex128")
def a_dtype_that_safetensors_lacks(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT.to(torch.complex128)}] * 4)


@bad(InconsistentRanksError, "'scale'", "{rank[0]}", "{rank[2]}")
def a_key_that_is_a_tensor_for_some_ranks_only(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT, "scale": WEIGHT if rank < 2 else 1.0} for rank in range(4)])


# --- damaged files ---


@bad(UnsupportedError, "{rank[2]}", "compressed", hint="zip -0")
def compressed_members(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    with checkpoints.members(rank_file(source, 2), zipfile.ZIP_DEFLATED):
        pass


@bad(UnsupportedError, "{rank[0]}", "big-endian")
def a_file_of_a_big_endian_machine(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    with checkpoints.members(rank_file(source, 0)) as members:
        assert members["byteorder"] == b"little"
        members["byteorder"] = b"big"


@bad(UnsupportedError, "{rank[0]}", "big-endian")
def a_legacy_file_of_a_big_endian_machine(source: Path) -> None:
    checkpoints.copy_stored("fsdp2_w4_legacy__t213", source)
    path = rank_file(source, 0)
    data = path.read_bytes()
    # In the pickled dict of system info: the key, its memo slot, then NEWTRUE.
    found = re.search(rb"little_endianq.\x88", data)
    assert found is not None
    path.write_bytes(data[: found.end() - 1] + pickle.NEWFALSE + data[found.end() :])


@bad(CorruptFileError, "{rank[1]}", ".storage_alignment")
def an_alignment_beyond_measure(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    with checkpoints.members(rank_file(source, 1)) as members:
        assert members[".storage_alignment"] == b"64"
        members[".storage_alignment"] = b"9" * 5000


@bad(CorruptFileError, "{rank[1]}", "storage '0'", "missing")
def a_storage_that_is_missing(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    with checkpoints.members(rank_file(source, 1)) as members:
        del members["data/0"]


@bad(CorruptFileError, "{rank[1]}", "storage '0' has 92 bytes, the pickle says 96")
def a_storage_that_is_too_short(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 4)
    with checkpoints.members(rank_file(source, 1)) as members:
        members["data/0"] = members["data/0"][:-4]


@bad(CorruptFileError, "{rank[1]}", "'w'", "[12, 2]", "byte 100", "96 bytes")
def a_tensor_that_leaves_its_storage(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 4)
    with checkpoints.members(rank_file(source, 1)) as members:
        # _rebuild_tensor_v2(storage, 0, (12, 2), ...): its storage offset becomes 1.
        before, after = b"QK\x00K\x0cK\x02", b"QK\x01K\x0cK\x02"
        assert members["data.pkl"].count(before) == 1
        members["data.pkl"] = members["data.pkl"].replace(before, after)


@bad(CorruptFileError, "{rank[1]}", "local header", "zip directory")
def a_local_header_that_is_overwritten(source: Path) -> None:
    save_plain(source, [{name: WEIGHT.clone() for name in "abcdefghi"}] * 4)
    path = rank_file(source, 1)
    start, _ = checkpoints.member_range(path, "data/2")
    with zipfile.ZipFile(path) as archive:
        header = next(i for i in archive.infolist() if i.filename.endswith("/data/2")).header_offset
    checkpoints.poke(path, header, bytes(start - header))


@bad(CorruptFileError, "{rank[1]}", "data.pkl")
def a_pickle_with_a_flipped_bit(source: Path) -> None:
    save_plain(source, [{"weight_a": WEIGHT, "weight_b": WEIGHT + 1}] * 4)
    path = rank_file(source, 1)
    start, end = checkpoints.member_range(path, "data.pkl")
    at = start + path.read_bytes()[start:end].index(b"weight_a")
    # Still a fine pickle, now with a key "veight_a"; only the checksum shows it.
    checkpoints.poke(path, at, b"v")


# --- rank files that contradict each other ---


def _swap(source: Path, name: str, a: int, b: int) -> None:
    checkpoints.copy_stored(name, source)
    rank_file(source, a).rename(source / "aside")
    rank_file(source, b).rename(rank_file(source, a))
    (source / "aside").rename(rank_file(source, b))


RENAMED = ("{rank[1]}", "name says rank 1", "rank 2 wrote it")


@bad(InconsistentRanksError, *RENAMED, hint="renamed")
def renamed_files_of_torch_2_13(source: Path) -> None:
    _swap(source, "fsdp2_w4__t213", 1, 2)


@bad(InconsistentRanksError, *RENAMED, hint="renamed")
def renamed_files_of_torch_2_6(source: Path) -> None:
    _swap(source, "fsdp2_w4__t26", 1, 2)


@bad(InconsistentRanksError, *RENAMED, hint="renamed")
def renamed_files_of_torch_2_4(source: Path) -> None:
    _swap(source, "fsdp2_w4__t24", 1, 2)


@bad(InconsistentRanksError, *RENAMED, hint="renamed")
def renamed_files_of_sliced_meshes(source: Path) -> None:
    _swap(source, "fsdp2_tp_2x2__t213", 1, 2)


@bad(InconsistentRanksError, *RENAMED, hint="renamed")
def renamed_files_of_sharded_tensors(source: Path) -> None:
    _swap(source, "fsdp1_shardedtensor_origparams__t213", 1, 2)


@bad(InconsistentRanksError, "{rank[0]}", "'w'", "rank 4", "world size of 4")
def files_of_a_larger_job(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": sharded(WEIGHT, sizes=(6,))}, world_size=6)
    for rank in range(6):
        path = rank_file(source, rank, 6)
        if rank < 4:
            path.rename(rank_file(source, rank))
        else:
            path.unlink()


@bad(
    InconsistentRanksError, "'w'", "global shape [12, 3] here", "[12, 2]", "{rank[0]}", "{rank[2]}"
)
def two_global_shapes(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": sharded(torch.ones(12, 3 if rank == 2 else 2))})


@bad(InconsistentRanksError, "'w'", "dtype F16 here", "F32", "{rank[0]}", "{rank[3]}")
def two_dtypes(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": sharded(WEIGHT.half() if rank == 3 else WEIGHT)})


@bad(InconsistentRanksError, "'w'", "placements (Shard(1))", "(Shard(0))", "{rank[0]}", "{rank[1]}")
def two_placements(source: Path) -> None:
    full = torch.ones(4, 4)
    save_ranks(source, lambda rank: {"w": sharded(full, [Shard(1 if rank == 1 else 0)])})


@bad(
    InconsistentRanksError,
    "'w'",
    "(Shard(0), Replicate()) on a mesh 2x2",
    "(Shard(0)) on a mesh 4",
    "{rank[0]}",
    "{rank[1]}",
)
def two_meshes(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        if rank == 1:
            return {"w": sharded(WEIGHT, [Shard(0), Replicate()], (2, 2))}
        return {"w": sharded(WEIGHT)}

    save_ranks(source, build)


@bad(InconsistentRanksError, "'w'", "(0, (1, 0))", "{rank[0]}", "{rank[1]}")
def two_shard_orders(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        mesh = init_device_mesh("cpu", (2, 2))
        order = (ShardOrderEntry(0, (1, 0)),) if rank == 1 else None
        return {"w": rank_files.dtensor(WEIGHT, mesh, [Shard(0), Shard(0)], order=order)}

    save_ranks(source, build)


@bad(InconsistentRanksError, "'w'", "a plain tensor here", "a DTensor in {rank[0]}", "{rank[1]}")
def a_plain_tensor_among_dtensors(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": WEIGHT if rank == 1 else sharded(WEIGHT)})


@bad(
    PlacementError,
    "{rank[1]}",
    "'w'",
    "shape [2, 2]",
    "rank 1",
    "(Shard(0))",
    "hold [3, 2]",
    "[12, 2]",
)
def a_local_shard_that_is_too_short(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT)
        return {"w": reshaped(tensor, torch.ones(2, 2)) if rank == 1 else tensor}

    save_ranks(source, build)


@bad(PlacementError, "{rank[3]}", "'w'", "shape [0, 2]", "rank 3", "hold [3, 2]")
def a_local_shard_that_is_empty(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT)
        return {"w": reshaped(tensor, torch.ones(0, 2)) if rank == 3 else tensor}

    save_ranks(source, build)


@bad(PlacementError, "{rank[0]}", "'w'", "dtype F64", "F32")
def a_local_shard_of_another_dtype(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": reshaped(sharded(WEIGHT), torch.ones(3, 2).double())})


@bad(PlacementError, "{rank[0]}", "'w'", "Shard(2)", "2 dims")
def a_placement_on_a_dim_that_is_not_there(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT)
        tensor._spec.placements = (Shard(2),)
        return {"w": tensor}

    save_ranks(source, build)


@bad(PlacementError, "{rank[2]}", "'w'", "rank 2", "[0, 1] as 2")
def data_of_a_rank_outside_its_mesh(source: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT, sizes=(4,))
        mesh = DeviceMesh("cpu", [0, 1])
        tensor._spec.mesh = mesh
        return {"w": reshaped(tensor, torch.ones(6, 2))}

    save_ranks(source, build)


@bad(PlacementError, "'w'", "rank 3", "{rank[3]} does not hold it")
def a_local_shard_that_is_missing(source: Path) -> None:
    save_ranks(
        source, lambda rank: {"v": sharded(WEIGHT)} | ({} if rank == 3 else {"w": sharded(WEIGHT)})
    )


@bad(UnsupportedError, "{rank[0]}", "Partial(sum)", hint="redistribute")
def a_pending_reduction(source: Path) -> None:
    checkpoints.copy_stored("toy_partial__t213", source)


@bad(
    UnsupportedError,
    "{rank[0]}",
    "flat parameter of FSDP1",
    "_flat_param",
    hint="SHARDED_STATE_DICT",
)
def flat_parameters(source: Path) -> None:
    checkpoints.copy_stored("fsdp1_local_state_dict__t213", source)


# --- ShardedTensor ---

# Rows 0 to 11 over four ranks.
TILES = [((3 * rank, 0), (3, 2), rank) for rank in range(4)]


@bad(PlacementError, "'w'", "18 of the 24 elements", "[12, 2]")
def a_chunk_that_nobody_lists(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": sharded_tensor(WEIGHT, TILES[:3])})


@bad(PlacementError, "{rank[2]}", "'w'", "list 1 shards for rank 2", "holds 0")
def a_chunk_that_its_rank_does_not_hold(source: Path) -> None:
    save_ranks(source, lambda rank: {"w": sharded_tensor(WEIGHT, TILES, [] if rank == 2 else None)})


@bad(PlacementError, "'w'", "[6, 0]", "rank 2", "{rank[2]} does not hold it")
def a_chunk_whose_rank_lacks_the_key(source: Path) -> None:
    save_ranks(
        source,
        lambda rank: {"v": WEIGHT} | ({} if rank == 2 else {"w": sharded_tensor(WEIGHT, TILES)}),
    )


@bad(PlacementError, "'w'", "[3:6, 0:2]", "[5:8, 0:2]", "overlap")
def a_chunk_covered_twice(source: Path) -> None:
    parts = [*TILES[:2], ((5, 0), (3, 2), 2), TILES[3]]
    save_ranks(source, lambda rank: {"w": sharded_tensor(WEIGHT, parts)})


@bad(PlacementError, "'w'", "[10:13, 0:2]", "[12, 2]")
def a_chunk_outside_the_tensor(source: Path) -> None:
    parts = [*TILES[:3], ((10, 0), (3, 2), 3)]
    save_ranks(source, lambda rank: {"w": sharded_tensor(WEIGHT, parts)})


@bad(PlacementError, "{rank[1]}", "'w'", "[6:9, 0:2]", "not listed for rank 1")
def a_chunk_of_another_rank(source: Path) -> None:
    held = [((6, 0), (3, 2), 2)]
    save_ranks(
        source, lambda rank: {"w": sharded_tensor(WEIGHT, TILES, held if rank == 1 else None)}
    )


@bad(InconsistentRanksError, "'w'", "different shards", "{rank[0]}", "{rank[3]}")
def two_lists_of_chunks(source: Path) -> None:
    other = [((4 * i, 0), (4, 2), (0, 1, 3)[i]) for i in range(3)]
    save_ranks(source, lambda rank: {"w": sharded_tensor(WEIGHT, other if rank == 3 else TILES)})


@bad(
    InconsistentRanksError, "'w'", "global shape [12, 3] here", "[12, 2]", "{rank[0]}", "{rank[2]}"
)
def two_global_shapes_of_sharded_tensors(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        columns = 3 if rank == 2 else 2
        parts = [((3 * r, 0), (3, columns), r) for r in range(4)]
        return {"w": sharded_tensor(torch.ones(12, columns), parts)}

    save_ranks(source, build)


# --- pickles that ask for more ---


@bad(UnsafePickleError, "{rank[1]}", "posix.system", "nothing was run")
def a_pickle_that_runs_a_command(source: Path) -> None:
    checkpoints.copy_stored(GOOD, source)
    payload = checkpoints.calling(os.system, f"touch {source.parent}/ran")
    checkpoints.replace_pickle(rank_file(source, 1), pickle.dumps({"w": payload}, protocol=2))


@bad(UnsafePickleError, "{rank[1]}", "posix.system", "nothing was run")
def a_legacy_pickle_that_runs_a_command(source: Path) -> None:
    payload = checkpoints.calling(os.system, f"touch {source.parent}/ran")
    states = [{"w": WEIGHT, "x": payload if rank == 1 else 0} for rank in range(4)]
    save_plain(source, states, legacy=True)


@bad(UnsafePickleError, "{rank[0]}", "eval", "nothing was run")
def a_pickle_that_evaluates_an_expression(source: Path) -> None:
    payload = checkpoints.calling(eval, f"open({str(source.parent / 'ran')!r}, 'w')")
    save_plain(source, [{"w": WEIGHT, "x": payload}] * 4)


@bad(UnsafePickleError, "{rank[0]}", "getattr", "'__globals__'", "nothing was run")
def a_pickle_that_looks_around(source: Path) -> None:
    save_plain(source, [{"w": checkpoints.calling(getattr, torch.Tensor, "__globals__")}] * 4)


@bad(UnsafePickleError, "{rank[0]}", "datetime.timedelta")
def a_pickle_of_an_unknown_class(source: Path) -> None:
    import datetime

    save_plain(source, [{"w": WEIGHT, "since": datetime.timedelta(days=1)}] * 4)


# --- copies that differ ---

FIRST = "--replicas first"


@bad(ReplicaMismatchError, "'b'", "rank 2 holds another value than rank 0", "[7, 1]", hint=FIRST)
def a_copy_with_another_value(source: Path) -> None:
    changed = WEIGHT.clone()
    changed[7, 1] = -1
    save_plain(source, [{"w": WEIGHT, "b": changed if rank == 2 else WEIGHT} for rank in range(4)])


@bad(ReplicaMismatchError, "'b'", "ranks 1, 3 hold another value than rank 0", "[5]", hint=FIRST)
def copies_with_another_sign_of_zero(source: Path) -> None:
    zeros, changed = torch.zeros(9), torch.zeros(9)
    changed[5] = -0.0
    save_plain(source, [{"b": changed if rank % 2 else zeros} for rank in range(4)])


@bad(ReplicaMismatchError, "'b'", "rank 1 ", "rank 0", "F32 [6]", "F32 [5]", hint=FIRST)
def a_copy_with_another_shape(source: Path) -> None:
    save_plain(source, [{"b": torch.zeros(6 if rank == 1 else 5)} for rank in range(4)])


@bad(ReplicaMismatchError, "'b'", "ranks 1, 2, 3", "rank 0", "I32 [5]", "I64 [5]", hint=FIRST)
def copies_with_another_dtype(source: Path) -> None:
    int32, int64 = torch.arange(5, dtype=torch.int32), torch.arange(5)
    save_plain(source, [{"b": int32 if rank else int64} for rank in range(4)])


@bad(ReplicaMismatchError, "'a'", "rank 1", "2 more keys: 'b', 'c'", hint=FIRST)
def copies_of_several_keys(source: Path) -> None:
    save_plain(source, [{key: torch.full((3,), float(rank)) for key in "abc"} for rank in range(2)])


@bad(ReplicaMismatchError, "'n'", "rank 3", "rank 0", "[2]", hint=FIRST)
def copies_of_a_replicated_dtensor(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(torch.ones(3), [Replicate()])
        return {"n": reshaped(tensor, torch.tensor([1.0, 1.0, 2.0])) if rank == 3 else tensor}

    save_ranks(source, build)


@bad(
    ReplicaMismatchError,
    "'layers.0.experts.w1'",
    "ranks 2, 3",
    "parallel device meshes",
    "expert parallelism",
    hint="gathered",
)
def experts_that_were_sliced_locally(source: Path) -> None:
    checkpoints.copy_stored("fsdp2_ep_local__t213", source)


def test_nothing_of_a_hostile_pickle_is_run(tmp_path: Path) -> None:
    payload = pickle.dumps(checkpoints.calling(os.system, f"touch {tmp_path}/ran"), protocol=2)
    pickle.loads(payload)
    assert (tmp_path / "ran").exists(), "the payload works where it is run"
    (tmp_path / "ran").unlink()
    source = tmp_path / "source"
    checkpoints.copy_stored(GOOD, source)
    checkpoints.replace_pickle(rank_file(source, 0), payload)

    assert main(["inspect", str(source)]) == 1
    assert not (tmp_path / "ran").exists()


# --- files cut short ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2_w4__t213", "fsdp2_w4_legacy__t213", "fsdp2_w4__t24"])
def test_a_file_cut_short_anywhere(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    checkpoints.copy_stored(name, source)
    path = rank_file(source, 0)
    data = path.read_bytes()
    step = max(1, len(data) // 150)
    lengths = {*range(0, len(data), step), *range(1, 70), *range(len(data) - 70, len(data))}
    for length in sorted(lengths, reverse=True):
        checkpoints.cut(path, length)
        with pytest.raises(CorruptFileError) as caught:
            streammerge.describe(source)
        assert str(caught.value).startswith(f"{path}: "), length
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numel", [1, 1000])
def test_a_file_with_a_byte_too_many(numel: int, tmp_path: Path) -> None:
    """Some copy tools pad files; what torch reads, we read, and what it refuses, we refuse."""
    save_plain(tmp_path / "source", [{"w": torch.ones(numel)}])
    path = rank_file(tmp_path / "source", 0, 1)
    with path.open("ab") as stream:
        stream.write(b"\0" * 8)
    try:
        torch.load(path)
    except RuntimeError:
        with pytest.raises(CorruptFileError):
            streammerge.describe(tmp_path / "source")
    else:
        streammerge.merge(tmp_path / "source", tmp_path / "merged")


# --- finding the checkpoint -----------------------------------------------------------------------


def test_no_such_directory(tmp_path: Path, refuse: Callable[..., Refusal]) -> None:
    refusal = refuse(tmp_path / "nowhere", tmp_path / "merged")
    assert refusal.error == f"{tmp_path}/nowhere: no such directory"


def test_no_checkpoint_at_all(tmp_path: Path, refuse: Callable[..., Refusal]) -> None:
    (tmp_path / "source" / "logs").mkdir(parents=True)
    refusal = refuse(tmp_path / "source", tmp_path / "merged")
    assert refusal.error.startswith(f"{tmp_path}/source: no checkpoint here or below")
    assert "model_world_size_{W}_rank_{R}.pt" in refusal.error


def test_optimizer_states_are_no_model(tmp_path: Path, refuse: Callable[..., Refusal]) -> None:
    checkpoints.copy_stored(GOOD, tmp_path / "source")
    for rank in range(4):
        path = rank_file(tmp_path / "source", rank)
        path.rename(path.with_name(path.name.replace("model_", "optim_")))
    assert "no checkpoint here or below" in refuse(tmp_path / "source", tmp_path / "merged").error


@pytest.mark.parametrize("what", ["huggingface", "model_world_size_4_rank_0.pt"])
def test_a_part_of_the_checkpoint(
    what: str, tmp_path: Path, refuse: Callable[..., Refusal]
) -> None:
    source = tmp_path / "source"
    checkpoints.copy_stored(GOOD, source)
    refusal = refuse(source / what, tmp_path / "merged")
    assert refusal.error.startswith(f"{source / what}: ")
    assert refusal.hint is not None
    assert "directory" in refusal.hint


def test_several_candidates_below_a_parent(tmp_path: Path, refuse: Callable[..., Refusal]) -> None:
    parent = tmp_path / "global_step_100"
    for name in ("critic", "actor"):
        checkpoints.copy_stored(GOOD, parent / name)
    refusal = refuse(parent, tmp_path / "merged")
    assert refusal.error.startswith(f"{parent}: 2 checkpoints to choose from: ")
    assert refusal.error.endswith(f"{parent}/actor, {parent}/critic")
    assert refusal.hint is not None


def test_the_same_rank_in_two_directories(tmp_path: Path, refuse: Callable[..., Refusal]) -> None:
    for name in ("node0", "node1"):
        checkpoints.copy_stored(GOOD, tmp_path / name)
    refusal = refuse(tmp_path / "node0", tmp_path / "node1", tmp_path / "merged")
    for name in ("node0", "node1"):
        assert str(rank_file(tmp_path / name, 0)) in refusal.error
    assert "rank 0 twice" in refusal.error


# --- targets --------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoints.copy_stored(GOOD, tmp_path / "step" / "actor")
    return tmp_path / "step" / "actor"


def refused_target(refuse: Callable[..., Refusal], source: Path, *options: str | Path) -> Refusal:
    """The refusal of a target, checked to be the same through the function."""
    refusal = refuse(source, *options)
    target = next(option for option in options if isinstance(option, Path))
    with pytest.raises(TargetPathError) as caught:
        streammerge.merge(source, target, overwrite="--overwrite" in options)
    assert str(caught.value) == refusal.error
    return refusal


def test_the_target_is_a_link(tmp_path: Path, source: Path, refuse: Callable[..., Refusal]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for options in ((), ("--overwrite",)):
        refusal = refused_target(refuse, source, tmp_path / "link", *options)
        assert refusal.error.startswith(f"{tmp_path}/link: the target is a link")
        assert str(tmp_path / "real") in refusal.error


def test_the_target_is_a_dangling_link(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is a link" in refused_target(refuse, source, tmp_path / "link").error


def test_the_target_is_a_file(tmp_path: Path, source: Path, refuse: Callable[..., Refusal]) -> None:
    (tmp_path / "merged").write_text("precious")
    refusal = refused_target(refuse, source, tmp_path / "merged", "--overwrite")
    assert refusal.error == f"{tmp_path}/merged: exists and is not a directory"


def test_the_parent_of_the_target_is_a_file(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "file").write_text("precious")
    refusal = refuse(source, tmp_path / "file" / "merged")
    assert f"{tmp_path}/file" in refusal.error
    assert "not a directory" in refusal.error.lower()


def test_the_target_is_the_source(source: Path, refuse: Callable[..., Refusal]) -> None:
    refusal = refused_target(refuse, source, source, "--overwrite")
    assert refusal.error == f"{source}: the target is a folder that is read"


def test_the_target_is_the_source_by_another_name(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "alias").symlink_to(source)
    refusal = refused_target(refuse, tmp_path / "alias", source, "--overwrite")
    assert "is a folder that is read" in refusal.error


def test_the_target_is_above_the_source(source: Path, refuse: Callable[..., Refusal]) -> None:
    refusal = refused_target(refuse, source, source.parent, "--overwrite")
    assert refusal.error.startswith(f"{source.parent}: the target lies above {source}")


def test_the_target_is_a_parent_given_as_source(
    source: Path, refuse: Callable[..., Refusal]
) -> None:
    refusal = refused_target(refuse, source.parent, source.parent, "--overwrite")
    assert "the target lies above" in refusal.error


def test_the_target_is_the_folder_of_side_files(
    source: Path, refuse: Callable[..., Refusal]
) -> None:
    refusal = refused_target(refuse, source, source / "huggingface", "--overwrite")
    assert refusal.error == f"{source}/huggingface: the target is a folder that is read"


def test_the_target_is_below_the_folder_of_side_files(
    source: Path, refuse: Callable[..., Refusal]
) -> None:
    # Side files are read from all folders below; a second merge would copy the first one.
    target = source / "huggingface" / "merged"
    refusal = refused_target(refuse, source, target)
    assert str(target) in refusal.error
    assert str(source / "huggingface") in refusal.error


def test_the_target_is_not_empty(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    refusal = refused_target(refuse, source, tmp_path / "merged")
    assert refusal.error.startswith(f"{tmp_path}/merged: exists and is not empty")
    assert refusal.hint is not None
    assert "--overwrite" in refusal.hint


def test_the_target_is_no_earlier_result(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "merged" / "papers").mkdir(parents=True)
    (tmp_path / "merged" / "papers" / "thesis.tex").write_text("precious")
    refusal = refused_target(refuse, source, tmp_path / "merged", "--overwrite")
    assert refusal.error.startswith(f"{tmp_path}/merged: ")
    assert "not an earlier result" in refusal.error


def test_the_target_is_a_repository(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    """Such as a clone from the Hub, with weights in it."""
    (tmp_path / "merged" / ".git").mkdir(parents=True)
    (tmp_path / "merged" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (tmp_path / "merged" / "model.safetensors").write_text("of a revision before")
    refusal = refused_target(refuse, source, tmp_path / "merged", "--overwrite")
    assert refusal.error == (
        f"{tmp_path}/merged: is a Git repository, whose history would be lost with it"
    )


@pytest.mark.parametrize("below", ["", "checkpoint-5"])
def test_the_target_holds_another_checkpoint(
    below: str, tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    """Whatever else is in it, such as the weights that a trainer gathered."""
    other = shutil.copytree(source, tmp_path / "other" / below)
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    refusal = refused_target(refuse, source, tmp_path / "other", "--overwrite")
    assert refusal.error == (
        f"{tmp_path}/other: holds a checkpoint of a training ({other}), so it is not an earlier "
        "result and is not replaced"
    )


def test_an_output_file_of_the_target_is_a_link(
    tmp_path: Path, source: Path, refuse: Callable[..., Refusal]
) -> None:
    (tmp_path / "base.safetensors").write_text("precious")
    target = tmp_path / "merged"
    target.mkdir()
    (target / "model.safetensors").symlink_to(tmp_path / "base.safetensors")
    refusal = refused_target(refuse, source, target, "--overwrite")
    assert str(target / "model.safetensors") in refusal.error
    assert "link" in refusal.error


def test_the_target_is_a_mount_point(
    tmp_path: Path,
    source: Path,
    refuse: Callable[..., Refusal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "disk"
    target.mkdir()
    (target / "thesis.tex").write_text("precious")
    ismount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(target) or ismount(path))
    refusal = refused_target(refuse, source, target, "--overwrite")
    assert refusal.error.startswith(f"{target}: a mount point")
    assert "thesis.tex" in refusal.error
    assert refusal.hint is not None


def test_too_little_space(
    tmp_path: Path,
    source: Path,
    refuse: Callable[..., Refusal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import streammerge.execution

    needed = streammerge.plan(streammerge.describe(source)).disk_nbytes
    fake_free_space(monkeypatch, needed - 1)
    monkeypatch.setattr(streammerge.execution, "write_files", forbidden)
    monkeypatch.setattr(streammerge.execution, "compare_replicas", forbidden)

    refusal = refuse(source, tmp_path / "new" / "merged")

    assert f"{tmp_path}/new/merged: {needed:,} bytes are needed, 1 more than" in refusal.error
    assert refusal.hint is not None
    with pytest.raises(NoSpaceError):
        streammerge.merge(source, tmp_path / "new" / "merged")


def test_just_enough_space(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = streammerge.plan(streammerge.describe(source)).disk_nbytes
    fake_free_space(monkeypatch, needed)
    streammerge.merge(source, tmp_path / "merged")
    written = sum(path.stat().st_size for path in (tmp_path / "merged").iterdir())
    assert written == needed


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("called although the merge cannot be finished")


def fake_free_space(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let the disk have that many bytes free for us."""
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[0] = values[1] = 1  # block sizes
        values[3], values[4] = nbytes + 10**9, nbytes  # f_bfree counts what is root's alone
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)


# --- sources that change --------------------------------------------------------------------------


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace_by_a_copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def cut_in_half(path: Path) -> None:
    checkpoints.cut(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("phase", ["compare", "write"])
@pytest.mark.parametrize("change", [touch, replace_by_a_copy, cut_in_half, remove])
def test_the_source_changes_meanwhile(
    change: Callable[[Path], None],
    phase: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "source"
    save_plain(source, [{"a": WEIGHT, "b": WEIGHT}] * 4)
    path = rank_file(source, 0)
    done = []

    def progress(_: object, state: Progress) -> None:
        if state.phase == phase and not done:
            done.append(state)
            change(path)

    monkeypatch.setattr("streammerge.cli.ProgressDisplay.__call__", progress)

    code = main(["merge", str(source), str(tmp_path / "merged")])

    assert done
    refusal = parse_refusal(code, *capsys.readouterr())
    assert refusal.code == 1
    assert str(path) in refusal.error
    left = {*tmp_path.iterdir()} - {source}
    if (change, phase) == (remove, "write"):  # it may come back, so finished files are kept
        left -= {tmp_path / ".merged.streammerge"}
    assert not left


@pytest.mark.parametrize("change", [touch, replace_by_a_copy, cut_in_half, remove])
def test_the_class_of_a_changed_source(change: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_plain(source, [{"a": WEIGHT}] * 2)
    plan = streammerge.plan(streammerge.describe(source))
    change(rank_file(source, 0, 2))
    with pytest.raises(streammerge.SourceError) as caught:
        streammerge.write(plan, tmp_path / "merged")
    if change is not remove:
        assert type(caught.value) is SourceChangedError
        assert caught.value.hint is not None
    assert sorted(tmp_path.iterdir()) == [source]


# --- the whole process ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        one_rank_is_missing,
        a_file_without_its_last_byte,
        a_legacy_pickle_that_runs_a_command,
        a_copy_with_another_value,
        experts_that_were_sliced_locally,
    ],
)
def test_as_a_process(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "source")
    before = checkpoints.snapshot(tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "streammerge", "merge", "source", "new/merged"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    refusal = parse_refusal(done.returncode, done.stdout, done.stderr)
    assert refusal.code == 1
    assert checkpoints.snapshot(tmp_path) == before


# --- files that cannot be looked at ---------------------------------------------------------------


def failing(call: str, after: int = 0, only: Path | None = None) -> Callable[..., Any]:
    """A function of `os` that fails once, after some calls, maybe for one path only."""
    original = getattr(os, call)
    calls = 0

    def fail(first: Any, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        if only is None or str(first) == str(only):
            calls += 1
            if calls == after + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(first, *rest, **options)

    return fail


def test_a_source_that_cannot_be_listed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first call looks for the layout, the second for the rank files.
    monkeypatch.setattr(os, "scandir", failing("scandir", after=1, only=source))
    with pytest.raises(SourceError, match=re.escape(f"{source}: {os.strerror(errno.EIO)}")):
        streammerge.describe(source)


def test_side_files_that_cannot_be_looked_at(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be missing in the result."""
    folder = source / "huggingface"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "stat", failing("stat", only=folder))
    with pytest.raises(SourceError, match=re.escape(f"{folder}: {os.strerror(errno.EIO)}")):
        streammerge.describe(source)


@pytest.mark.parametrize("call", ["pread", "fstat"])
def test_a_rank_file_that_cannot_be_looked_at_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plan = streammerge.plan(streammerge.describe(source), raw=True)
    # The first fstat is that of the lock in the staging directory.
    monkeypatch.setattr(os, call, failing(call, after=int(call == "fstat")))
    with pytest.raises(SourceError, match=rf"rank_\d\.pt: {os.strerror(errno.EIO)}"):
        streammerge.write(plan, tmp_path / "merged")
    monkeypatch.undo()
    assert not (tmp_path / "merged").exists()
