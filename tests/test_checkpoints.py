"""Stored checkpoints of torch 2.4 to 2.13, merged and compared bit by bit with torch's values."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles import assert_same_directory, assert_same_tensors, load_directory
from safetensors.torch import load_file

import streammerge
from streammerge.cli import main

DATA = Path(__file__).parent / "data"
REFUSED = {
    "fsdp1_local_state_dict__t213": "flat parameter",
    "fsdp2_divergent_buffers__t213": "'vec_buf': ranks 1, 2, 3",
    "fsdp2_ep_local__t213": "parallel device meshes",
    "toy_partial__t213": "Partial(sum)",
}
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
MERGED = [name for name in NAMES if name not in REFUSED]
BUDGETS = {
    "default": [],
    "small": ["--memory", "64KiB", "--max-shard-size", "10KB"],
    "check-all": ["--replicas", "check-all", "--workers", "1"],
}


def test_all_stored_checkpoints_are_there() -> None:
    assert len(NAMES) == 80
    assert set(REFUSED) <= set(NAMES)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MERGED)
def test_merges_to_the_values_of_torch(name: str, budget: str, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    options = BUDGETS[budget]

    assert main(["merge", str(DATA / name), str(target), "--raw", "--quiet", *options]) == 0

    expected = load_file(DATA / name / "expected.safetensors")
    assert_same_tensors(load_directory(target), expected)
    order = [tensor.name for tensor in streammerge.describe(DATA / name).tensors]
    limit = options[options.index("--max-shard-size") + 1] if budget == "small" else "5GB"
    assert_same_directory(target, {name: expected[name] for name in order}, limit)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_cannot_be_merged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "merged"

    assert main(["merge", str(DATA / name), str(target), "--raw"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("streammerge: error: ")
    assert REFUSED[name] in error
    assert list(tmp_path.iterdir()) == []


def test_goes_on_with_the_first_value_if_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DATA / "fsdp2_divergent_buffers__t213"
    target = tmp_path / "merged"

    options = ["--replicas", "first", "--raw", "--quiet"]

    assert main(["merge", str(source), str(target), *options]) == 0

    assert_same_tensors(load_directory(target), load_file(source / "expected.safetensors"))
    warnings = capsys.readouterr().err
    assert "'vec_buf': ranks 1, 2, 3" in warnings
    assert "'int_buf'" in warnings
