"""How copies of several ranks are compared: with bytes or with torch.equal, the same question."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save_plain
from hypothesis import given, settings
from hypothesis import strategies as st

import streammerge
from streammerge import replicas
from streammerge.errors import ReplicaMismatchError, UnsupportedError, UsageError

QUIET_NAN = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
PAIRS = {
    "same": (torch.arange(5.0), torch.arange(5.0), True),
    "last element": (torch.arange(5.0), torch.tensor([0.0, 1, 2, 3, 5]), False),
    "same nan": (QUIET_NAN, QUIET_NAN.clone(), True),
    "other nan": (QUIET_NAN, OTHER_NAN, False),
    "sign of zero": (torch.tensor(0.0), torch.tensor(-0.0), False),
    "strides": (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous(), True),
    "conj": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True]), False),
    "no elements": (torch.zeros(0, 3), torch.zeros(0, 3), True),
}
COMPARE = """
import sys
import streammerge
try:
    streammerge.compare(streammerge.plan(streammerge.describe(sys.argv[1])))
except streammerge.ReplicaMismatchError as error:
    print(error)
assert "torch" not in sys.modules
"""


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=64), st.data())
def test_bytes_and_torch_agree(first: bytes, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from([first, bytes(reversed(first)), first[:-1] + b"\xff"]))
    other = other[: len(first)]
    buffer = bytearray(first + b"behind the piece")

    by_bytes = replicas._bytes_equal(buffer, memoryview(bytearray(other)))

    assert by_bytes == (first[: len(other)] == other)
    if other:
        assert replicas._torch_equal("cpu")(buffer, memoryview(bytearray(other))) == by_bytes


@pytest.mark.parametrize("name", PAIRS)
def test_a_merge_with_and_without_torch_agrees_on_raw_bits(name: str, tmp_path: Path) -> None:
    first, other, equal = PAIRS[name]
    save_plain(tmp_path, [{"key": first}, {"key": first}, {"key": other}])
    plan = streammerge.plan(streammerge.describe(tmp_path))
    assert "torch" in sys.modules

    with_torch = ""
    try:
        streammerge.compare(plan)
    except ReplicaMismatchError as error:
        with_torch = str(error)
    without_torch = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()

    assert with_torch == without_torch
    assert (with_torch == "") == equal
    if not equal:
        assert "'key': rank 2 holds another value than rank 0" in with_torch


def test_every_differing_rank_is_named_whatever_the_budget(tmp_path: Path) -> None:
    copies = [torch.arange(10_000.0) for _ in range(5)]
    copies[1][9_999] = 0
    copies[4][0] = 7
    save_plain(tmp_path, [{"key": copy} for copy in copies])
    for memory, workers in ((4096, 1), ("64KiB", 3), ("16MiB", 2)):
        plan = streammerge.plan(streammerge.describe(tmp_path), memory=memory, workers=workers)
        with pytest.raises(ReplicaMismatchError, match=r"ranks 1, 4 .* index \[9999\]"):
            streammerge.compare(plan)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_but_missing_is_an_error(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"key": torch.ones(3)}] * 2)
    plan = streammerge.plan(streammerge.describe(tmp_path))

    for act in (
        lambda: streammerge.compare(plan, device="cuda"),
        lambda: streammerge.write(plan, tmp_path / "merged", device="cuda"),
        lambda: streammerge.verify(tmp_path, tmp_path, device="cuda"),
    ):
        with pytest.raises(UsageError, match="no GPU"):
            act()


def test_unknown_devices(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"key": torch.ones(3)}] * 2)
    plan = streammerge.plan(streammerge.describe(tmp_path))
    for act in (
        lambda: streammerge.compare(plan, device="tpu"),
        lambda: streammerge.write(plan, tmp_path / "merged", device="tpu"),
        lambda: streammerge.verify(tmp_path, tmp_path, device="tpu"),
    ):
        with pytest.raises(UsageError, match="unknown device 'tpu'"):
            act()


def test_a_gpu_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plain(tmp_path, [{"key": torch.ones(3)}] * 2)
    plan = streammerge.plan(streammerge.describe(tmp_path))
    monkeypatch.setattr(replicas, "_WORTH_A_GPU", 0)
    monkeypatch.setattr(replicas.os.path, "exists", lambda path: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert streammerge.compare(plan).device == "cpu"
    with pytest.raises(UnsupportedError, match="--device cuda needs torch"):
        streammerge.compare(plan, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_answer(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"key": QUIET_NAN}, {"key": QUIET_NAN}, {"key": OTHER_NAN}])
    plan = streammerge.plan(streammerge.describe(tmp_path))

    with pytest.raises(ReplicaMismatchError, match="rank 2"):
        streammerge.compare(plan, device="cuda")
