"""Checkpoints of real FSDP, written by four gloo ranks in ``fsdp_job.py`` and merged by command.

Expected values are torch's own: the module before it was sharded, or what FSDP and DTensor gather.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import merge, run_job, run_merge
from oracles import load_directory
from safetensors.torch import load_file

QWEN2_CASES = ("qwen2_tied", "qwen2_untied")
EXACT_CASES = (
    "fsdp1_full_flat",
    "fsdp1_full_mesh",
    "fsdp1_full_orig",
    "fsdp1_sharded_flat",
    "fsdp1_sharded_mesh",
    "fsdp1_sharded_orig",
    "fsdp2_hsdp",
    "fsdp2_mesh_3d",
    "fsdp2_mixed_dtypes",
    "fsdp2_shard1",
    "fsdp2_tp",
    *QWEN2_CASES,
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with one checkpoint per case."""
    root = tmp_path_factory.mktemp("real_fsdp")
    run_job("fsdp_job.py", root)
    return root


def refuse(dst: Path, *arguments: str | Path) -> str:
    """The error line of a merge that has to fail and leave nothing behind."""
    done = run_merge(*arguments, dst)
    assert done.returncode == 1, done.stderr
    assert not dst.exists()
    # Nor a staging directory beside it.
    assert list(dst.parent.iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if line.startswith("streammerge: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def ranks_named(line: str) -> set[int]:
    """Ranks that a message names, as in "rank 3" or "ranks 1, 2 and 3"."""
    lists = re.findall(r"\branks? (\d+(?:(?:, | and |, and )\d+)*)", line)
    return {int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert actual[key].shape == tensor.shape, key
        assert torch.equal(actual[key], tensor), key


def reference(checkpoints: Path, case: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoints / f"{case}.reference.safetensors")


def actor(checkpoints: Path, case: str) -> Path:
    return checkpoints / case / "global_step_1" / "actor"


@pytest.mark.parametrize("case", QWEN2_CASES)
def test_trained_model_gives_the_same_logits(checkpoints: Path, tmp_path: Path, case: str) -> None:
    merge(actor(checkpoints, case), tmp_path / "dst")

    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dst", dtype=torch.float32, output_loading_info=True
    )
    model.eval()
    assert not any(loading.values()), loading
    assert_same(model.state_dict(), reference(checkpoints, case))

    recorded = load_file(checkpoints / f"{case}.logits.safetensors")
    threads = torch.get_num_threads()
    # The job runs on one thread, and the order of a sum may depend on their number.
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            logits = model(input_ids=recorded["input_ids"]).logits
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(logits, recorded["logits"])
    # What the sharded model itself said before it was saved.
    torch.testing.assert_close(logits, recorded["sharded_logits"])


@pytest.mark.parametrize("case", QWEN2_CASES)
def test_side_files_are_copied_byte_for_byte(checkpoints: Path, tmp_path: Path, case: str) -> None:
    # The parent directory holds one checkpoint, so it names it.
    merge(checkpoints / case, tmp_path / "dst")
    source = actor(checkpoints, case) / "huggingface"
    names = {path.name for path in source.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    for name in names - {"config.json"}:
        assert (tmp_path / "dst" / name).read_bytes() == (source / name).read_bytes(), name
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "dst")
    )
    assert after == before | {"torch_dtype": "float32"}  # what transformers 4 reads
    assert {path.name for path in (tmp_path / "dst").iterdir()} == names | {"model.safetensors"}


@pytest.mark.parametrize("case", EXACT_CASES)
def test_raw_merge_equals_torch(checkpoints: Path, tmp_path: Path, case: str) -> None:
    merge("--raw", checkpoints / case, tmp_path / "dst")
    assert_same(load_directory(tmp_path / "dst"), reference(checkpoints, case))


@pytest.mark.parametrize("case", ["fsdp1_sharded_flat", "fsdp2_shard1", "fsdp2_tp", "qwen2_tied"])
def test_small_budget_and_many_files_equal_torch(
    checkpoints: Path, tmp_path: Path, case: str
) -> None:
    limits = ("--memory", "64KiB", "--max-shard-size", "1KB")
    merge("--raw", *limits, checkpoints / case, tmp_path / "dst")
    assert len(list((tmp_path / "dst").glob("model-*-of-*.safetensors"))) > 2
    assert_same(load_directory(tmp_path / "dst"), reference(checkpoints, case))


def test_nodes_that_kept_their_own_files(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "fsdp2_tp"
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node, ranks in zip(nodes, ([0, 1], [2, 3]), strict=True):
        node.mkdir()
        for rank in ranks:
            shutil.copy(source / f"model_world_size_4_rank_{rank}.pt", node)
    merge("--raw", *nodes, tmp_path / "dst")
    assert_same(load_directory(tmp_path / "dst"), reference(checkpoints, "fsdp2_tp"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_converts_floats_only(checkpoints: Path, tmp_path: Path, dtype: str) -> None:
    merge("--dtype", dtype, checkpoints / "fsdp2_mixed_dtypes", tmp_path / "dst")
    target = getattr(torch, dtype)
    kept = reference(checkpoints, "fsdp2_mixed_dtypes")
    expected = {
        key: tensor.to(target) if tensor.is_floating_point() else tensor
        for key, tensor in kept.items()
    }
    assert {tensor.dtype for tensor in expected.values()} == {
        target,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    }
    assert_same(load_directory(tmp_path / "dst"), expected)


@pytest.mark.parametrize("case", ["fsdp1_local_flat", "fsdp1_local_orig"])
def test_flat_parameters_are_refused(checkpoints: Path, tmp_path: Path, case: str) -> None:
    assert "_flat_param" in refuse(tmp_path / "dst", checkpoints / case)


def test_buffer_that_differs_between_ranks(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "fsdp2_diverged_buffer"
    line = refuse(tmp_path / "dst", source)
    assert "tokens_seen" in line
    assert {1, 3} <= ranks_named(line)

    done = merge("--raw", "--replicas", "first", source, tmp_path / "dst")
    assert "tokens_seen" in done.stdout + done.stderr
    expected = reference(checkpoints, "fsdp2_diverged_buffer")
    # Two rows of five ids on rank 0, of six on rank 1.
    assert expected["tokens_seen"] == 10
    assert_same(load_directory(tmp_path / "dst"), expected)


def test_copy_on_a_parallel_mesh_that_differs(checkpoints: Path, tmp_path: Path) -> None:
    # TP leaves the norms alone, so ranks 1 and 3 hold what 0 and 2 hold; rank 3 was changed.
    source = checkpoints / "fsdp2_tp_diverged"
    line = refuse(tmp_path / "dst", source)
    assert "block.norm.weight" in line
    assert 3 in ranks_named(line)

    done = merge("--raw", "--replicas", "first", source, tmp_path / "dst")
    assert "block.norm.weight" in done.stdout + done.stderr
    assert_same(load_directory(tmp_path / "dst"), reference(checkpoints, "fsdp2_tp"))


def test_hsdp_copies_are_compared_on_request(checkpoints: Path, tmp_path: Path) -> None:
    expected = reference(checkpoints, "fsdp2_hsdp")
    merge("--raw", "--replicas", "check-all", checkpoints / "fsdp2_hsdp", tmp_path / "equal")
    assert_same(load_directory(tmp_path / "equal"), expected)

    source = checkpoints / "fsdp2_hsdp_diverged"
    merge("--raw", source, tmp_path / "first")
    assert_same(load_directory(tmp_path / "first"), expected)
    # A converted tensor takes another path through the code than a copied one.
    merge("--dtype", "bfloat16", source, tmp_path / "converted")
    key = "block.up.weight"
    assert torch.equal(load_directory(tmp_path / "converted")[key], expected[key].bfloat16())

    (tmp_path / "out").mkdir()
    line = refuse(tmp_path / "out" / "dst", "--raw", "--replicas", "check-all", source)
    assert "block.up.weight" in line
    assert 3 in ranks_named(line)
