"""Checkpoints of real DeepSpeed, written on the CPU by ``deepspeed_job.py``; needs deepspeed.

What a merge gives must be what ``zero_to_fp32`` gives, and with ``--dtype auto`` the module's own.
Beside that, frozen parameters that ``zero_to_fp32`` drops are kept, and buffers keep their dtype.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from jobs import run_job
from oracles import assert_same_tensors, load_directory
from safetensors.torch import load_file

import streammerge

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)

CASES = (
    "zero1_bf16_optimizer",
    "zero1_fp32_w1",
    "zero1_w4_groups",
    "zero2_aligned",
    "zero2_round_robin",
    "zero2_shared",
    "zero3_fp32_w4",
    "zero3_shared",
    "zero3_sub_groups",
    "zero3_w1",
)
JOBS_TIMEOUT_SECONDS = 600  # each of them starts up to four processes
# zero_to_fp32 keeps neither.
DROPPED = {"zero1": {"conv.weight", "layers.1.bias"}, "zero2": set(), "zero3": set()}
BUFFERS = {"scale", "table"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with one checkpoint per case."""
    root = tmp_path_factory.mktemp("real_deepspeed")
    run_job("deepspeed_job.py", root, JOBS_TIMEOUT_SECONDS)
    return root


def test_all_cases_are_there(checkpoints: Path) -> None:
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_masters_are_those_of_zero_to_fp32(checkpoints: Path, tmp_path: Path, case: str) -> None:
    streammerge.merge(checkpoints / case, tmp_path / "merged", raw=True)

    found = load_directory(tmp_path / "merged")
    expected = load_file(checkpoints / f"{case}.expected.safetensors")
    module = load_file(checkpoints / f"{case}.module.safetensors")
    assert found.keys() == module.keys()
    assert found.keys() - expected.keys() - BUFFERS == DROPPED[case[:5]]
    kept = found.keys() - expected.keys() | BUFFERS
    assert_same_tensors(found, {**expected, **{name: module[name] for name in kept}})
    for name in BUFFERS & expected.keys():
        assert torch.equal(found[name].float(), expected[name].float())


@pytest.mark.parametrize("case", CASES)
def test_auto_gives_the_module(checkpoints: Path, tmp_path: Path, case: str) -> None:
    streammerge.merge(checkpoints / case, tmp_path / "merged", dtype="auto")

    module = load_file(checkpoints / f"{case}.module.safetensors")
    assert_same_tensors(load_directory(tmp_path / "merged"), module)
