"""Property tests: random checkpoints, saved by torch, merged, and compared with what torch holds.

The oracle of a case is the tensors that the checkpoint was made from, bit by bit, and for a part of
the cases `DTensor.full_tensor` too. The files must be those that `safetensors` writes, split as
`huggingface_hub` splits. Examples are drawn by kind (see `strategies`), so that each trait that
matters occurs often enough; what really occurred is counted on the saved objects.
"""

from __future__ import annotations

import functools
import json
import os
import pickletools
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import rank_files
import strategies
import torch
from checkpoints import scratch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strategies import MergeOptions, fixed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import streammerge

# About one example in seven repeats an earlier one, and is not counted. Some kinds take their time.
EXAMPLES = {
    **dict.fromkeys(strategies.CHECKPOINTS, 175),
    "FSDP2": 110,
    "FSDP2 over TP": 110,
    "empty tensors": 50,
    "long runs": 50,
}
REQUIRED = {
    "cases": 2_000,
    "3-D mesh": 100,
    "_StridedShard": 100,
    "empty rank": 100,
    "sliced mesh": 100,
    "non-contiguous local": 100,
    "tensor above the budget": 100,
    "full_tensor": 300,
}
INDEX = "model.safetensors.index.json"


def traits(checkpoint: rank_files.Checkpoint, states: Sequence[rank_files.StateDict]) -> set[str]:
    """What occurs in a checkpoint, read off the objects that were saved."""
    found = set()
    storages = Counter[tuple[int, int]]()
    for rank, state in enumerate(states):
        for value in state.values():
            if not isinstance(value, torch.Tensor):
                continue
            local = value
            if isinstance(value, DTensor):
                local = value._local_tensor
                mesh = value.device_mesh
                found.add(f"{mesh.ndim}-D mesh")
                if mesh._root_mesh is not None:
                    found.add("sliced mesh")
                if any(isinstance(p, _StridedShard) for p in value.placements):
                    found.add("_StridedShard")
                if value.numel() and not local.numel():
                    found.add("empty rank")
            if not local.is_contiguous():
                found.add("non-contiguous local")
            if local.is_conj():
                found.add("conj bit")
            if 0 in local.stride():
                found.add("stride 0")
            storage = local.untyped_storage()
            if storage.nbytes() > local.nbytes:
                found.add("larger storage")
            if storage.nbytes():
                storages[rank, storage.data_ptr()] += 1
    if max(storages.values(), default=0) > 1:
        found.add("shared storage")
    if len({frozenset(state) for state in states}) > 1:
        found.add("key sets differ")
    for flag in ("legacy", "wrapped", "extra_state"):
        if getattr(checkpoint, flag):
            found.add(flag)
    return found


def merge(
    source: Path, target: Path, options: MergeOptions, dtype: str = "keep"
) -> dict[str, bytes]:
    """Merge, and read back every file that was written."""
    streammerge.merge(
        source,
        target,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        memory=options.memory,
        workers=options.workers,
    )
    return {path.name: path.read_bytes() for path in target.iterdir()}


def assert_same_bits(key: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    found_bits, bits = rank_files.raw(found), rank_files.raw(expected)
    if not torch.equal(found_bits, bits):
        where = (found_bits != bits).nonzero()
        pytest.fail(f"{key!r}: {len(where)} of {bits.numel()} values differ, first at {where[0]}")


def assert_files(
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    max_shard_size: int,
    folder: Path,
) -> int:
    """The files are the ones that huggingface_hub and safetensors make of the tensors.

    Returns:
        How many files with weights there are.
    """
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    names = set(split.filename_to_tensors)
    assert set(files) == (names | {INDEX} if split.is_sharded else names)
    if split.is_sharded:
        index = json.loads(files[INDEX])
        assert index["weight_map"] == split.tensor_to_filename
        assert index["metadata"]["total_size"] == split.metadata["total_size"]
    reference = folder / "reference.safetensors"
    for name, keys in split.filename_to_tensors.items():
        save_file({key: tensors[key] for key in keys}, reference, metadata={"format": "pt"})
        assert files[name] == reference.read_bytes(), name
    return len(names)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by the safetensors library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def check_full_tensor(
    checkpoint: rank_files.Checkpoint,
    states: Sequence[rank_files.StateDict],
    expected: dict[str, torch.Tensor],
) -> bool:
    """Ask torch for the whole of the first DTensor that all ranks have.

    Returns:
        Whether there is one.
    """
    for entry in checkpoint.entries:
        if entry.mesh is None:
            continue
        plan = checkpoint.meshes[entry.mesh]
        if entry.fully_shard is not None:
            plan = entry.fully_shard.mesh_of(plan)
        keys = rank_files.global_tensors(entry)
        key = next(iter(keys))
        if len(plan.ranks) == checkpoint.world_size and all(key in state for state in states):
            shards = {rank: state[key] for rank, state in enumerate(states)}
            if any(shard._local_tensor.shape.count(0) > 1 for shard in shards.values()):
                continue  # what FSDP2 makes of a shard that TP left empty; `full_tensor` fails
            whole = rank_files.full_tensor(checkpoint.world_size, plan, shards)
            assert_same_bits(key, whole, expected[key])
            return True
    return False


@functools.cache
def counts_of(kind: str) -> Counter[str]:
    """Run the property on examples of a kind and count what they held.

    Cached, so that `test_counts` costs nothing after the other tests, and is right without them.
    """
    counts = Counter[str]()
    seen = set()

    @fixed(EXAMPLES[kind])
    @given(
        checkpoint=strategies.CHECKPOINTS[kind],
        options=strategies.OPTIONS.get(kind, strategies.merge_options),
        ask_torch=st.integers(0, 3).map(lambda n: n == 0),
    )
    def merging_gives_what_torch_holds(
        checkpoint: rank_files.Checkpoint, options: MergeOptions, ask_torch: bool
    ) -> None:
        case = (checkpoint, options)
        if case in seen:
            return
        with scratch() as folder:
            states = rank_files.write_checkpoint(checkpoint, folder / "source")
            expected = rank_files.expected_tensors(checkpoint, states)
            found = traits(checkpoint, states)
            if ask_torch and check_full_tensor(checkpoint, states, expected):
                found.add("full_tensor")
            files = merge(folder / "source", folder / "target", options)
            merged = load(folder / "target")
            assert set(merged) == set(expected)
            for key, tensor in expected.items():
                assert_same_bits(key, merged[key], tensor)
            if assert_files(files, expected, options.max_shard_size, folder) > 1:
                found.add("several files")
            if max(t.nbytes for t in expected.values()) > strategies.MEMORY[options.memory]:
                found.add("tensor above the budget")
        seen.add(case)
        counts.update(found | {"cases"})

    merging_gives_what_torch_holds()
    return counts


@pytest.mark.parametrize("kind", strategies.CHECKPOINTS)
def test_merge_gives_what_torch_holds(kind: str) -> None:
    counts = counts_of(kind)
    assert counts["cases"] >= EXAMPLES[kind] / 2
    if kind in REQUIRED:
        assert counts[kind] == counts["cases"] >= REQUIRED[kind]


def test_counts() -> None:
    """All kinds together cover enough cases, and enough of each trait."""
    total = sum(map(counts_of, strategies.CHECKPOINTS), Counter[str]())
    assert {trait: total[trait] for trait in REQUIRED if total[trait] < REQUIRED[trait]} == {}


@fixed(120)
@given(
    checkpoint=strategies.float_checkpoints(),
    options=strategies.merge_options,
    memory=st.sampled_from(("4KiB", "9KB", "1MiB")),
    workers=st.integers(1, 3),
    dtype=st.sampled_from(("float32", "float16", "bfloat16")),
)
def test_dtype_rounds_as_torch_does(
    checkpoint: rank_files.Checkpoint,
    options: MergeOptions,
    memory: str,
    workers: int,
    dtype: str,
) -> None:
    to = getattr(torch, dtype)
    with scratch() as folder:
        states = rank_files.write_checkpoint(checkpoint, folder / "source")
        expected = {
            key: tensor.to(to) if tensor.is_floating_point() else tensor
            for key, tensor in rank_files.expected_tensors(checkpoint, states).items()
        }
        files = merge(folder / "source", folder / "target", options, dtype)
        merged = load(folder / "target")
        assert set(merged) == set(expected)
        merged = {key: merged[key] for key in expected}
        for key, tensor in expected.items():
            found, wanted = merged[key], tensor
            if tensor.is_floating_point() and found.dtype == tensor.dtype:
                # Which NaN comes out depends on torch's kernel; that it is one does not.
                either = found.isnan() & tensor.isnan()
                found, wanted = found.masked_fill(either, 0), tensor.masked_fill(either, 0)
            assert_same_bits(key, found, wanted)
        assert_files(files, merged, options.max_shard_size, folder)

        other = MergeOptions(memory, workers, options.max_shard_size)
        assert merge(folder / "source", folder / "again", other, dtype) == files


def test_rank_files_are_those_of_a_real_job(tmp_path: Path) -> None:
    """Four gloo ranks save the same bytes as one process that acts as each of them."""
    # With a GPU torch would name a real job's groups otherwise; a machine's name may not resolve.
    quiet = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for kind in ("real", "fake"):
        command = [sys.executable, rank_files.__file__, kind, str(tmp_path / kind)]
        subprocess.run(command, check=True, timeout=300, env={**os.environ, **quiet})
    for rank in range(4):
        real, fake = (rank_files.rank_file(tmp_path / kind, rank, 4) for kind in ("real", "fake"))
        assert _members(real) == _members(fake)


def _members(path: Path) -> dict[str, object]:
    """A rank file's storages, and its pickle without the hashes of device meshes.

    Those depend on addresses; nothing else in such a pickle needs a LONG1.
    """
    with zipfile.ZipFile(path) as archive:
        members: dict[str, object] = {name: archive.read(name) for name in archive.namelist()}
    root = path.stem
    members.pop(f"{root}/.data/serialization_id")  # a hash of the others
    members[f"{root}/data.pkl"] = [
        (operation.name, None if operation.name == "LONG1" else argument)
        for operation, argument, _ in pickletools.genops(members[f"{root}/data.pkl"])
    ]
    return members
