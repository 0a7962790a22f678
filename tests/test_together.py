"""Merges by several processes, which are threads here: the same bytes as by one.

The cuts between their shares are at any byte here, where real ones are some pages apart.
"""

from __future__ import annotations

import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import rank_files
import strategies
import test_every_layout
import torch
from fake_store import FakeStore
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

import streammerge
from streammerge import Progress, ReplicaMismatchError, StreamMergeError, execution, shares
from streammerge.errors import (
    CorruptFileError,
    ProcessesError,
    ResultError,
    SourceChangedError,
    TargetError,
    TargetPathError,
)
from streammerge.journal import read_written
from streammerge.processes import Processes, SaidElsewhere
from streammerge.target import staging_path

KINDS = ("FSDP2", "FSDP2 over TP", "3-D mesh", "sliced mesh", "non-contiguous local")
KINDS += ("non-contiguous buffer", "tensor above the budget", "empty tensors", "long runs")


@pytest.fixture(autouse=True)
def any_cut() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "ALIGNMENT", 1)
        patch.setattr("streammerge.processes._POLL_SECONDS", (0.001, 0.005))
        patch.setattr("streammerge.processes._BEAT_SECONDS", 0.02)
        yield


def merge_together(
    count: int,
    source: Path,
    target: Path,
    *,
    each: Callable[[int], Any] | None = None,
    **options: Any,
) -> list[Any]:
    """The reports or errors of some processes, by rank."""
    store = FakeStore()
    ends: list[Any] = [None] * count

    def live(rank: int) -> None:
        own = options | (each(rank) if each is not None else {})
        one = Processes(rank, count, local_rank=rank, local_size=count, connect=lambda: store)
        try:
            with one:
                ends[rank] = streammerge.merge(source, target, processes=one, **own)
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=live, args=[rank]) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def assert_one_error(ends: list[Any]) -> StreamMergeError:
    """The first process has it; the others only end."""
    first, *others = ends
    assert isinstance(first, StreamMergeError)
    for other in others:
        assert isinstance(other, SaidElsewhere)
        assert type(other.error) is type(first)
    return first


@pytest.mark.parametrize("kind", KINDS)
@fixed(8)
@given(data=st.data(), count=st.integers(2, 4), seed=st.integers(0, 2**16))
def test_the_same_bytes(kind: str, data: st.DataObject, count: int, seed: int) -> None:
    rng = random.Random(seed)
    checkpoint = data.draw(strategies.CHECKPOINTS[kind])
    options: dict[str, Any] = {
        "dtype": rng.choice(["keep", "bfloat16"]),
        "replicas": "first",
        "max_shard_size": rng.choice([64, 1000, "1GB"]),
    }
    with checkpoints.scratch() as folder:
        source, together = folder / "source", folder / "together"
        rank_files.write_checkpoint(checkpoint, source)
        alone = streammerge.merge(source, folder / "alone", **options)
        seen: list[Progress] = []

        def each(rank: int) -> dict[str, Any]:
            own: dict[str, Any] = {"progress": seen.append}
            if options["dtype"] == "keep":  # else its place in a band decides about bits of a NaN
                own |= {"memory": (4096, 64 << 10)[rank % 2], "workers": 1 + rank % 2}
            return own

        ends = merge_together(count, source, together, each=each, **options)
        for end in ends:
            assert isinstance(end, streammerge.Report), end
            assert end.comparison == alone.comparison
            assert (end.files, end.changes, end.nbytes) == (
                alone.files,
                alone.changes,
                alone.nbytes,
            )
        assert checkpoints.digests(together) == checkpoints.digests(folder / "alone")
        assert seen[-1] == Progress("write", alone.nbytes, alone.nbytes)  # no byte twice
        assert not Path(staging_path(str(together))).exists()


@test_every_layout.every_layout
@pytest.mark.parametrize("dtype", ["keep", "auto"])
def test_every_layout_together(name: str, dtype: str, tmp_path: Path) -> None:
    source = test_every_layout.DATA / name
    options: dict[str, Any] = {"dtype": dtype, "check_crc": True, "verify": True}
    if dtype == "auto" and name.startswith("dcp"):
        options["dtype"] = "bfloat16"  # without a config nothing says it
    alone = streammerge.merge(source, tmp_path / "alone", **options)
    for end in merge_together(3, source, tmp_path / "together", **options):
        assert isinstance(end, streammerge.Report), end
        assert end.crcs == alone.crcs
    assert checkpoints.digests(tmp_path / "together") == checkpoints.digests(tmp_path / "alone")


@pytest.mark.parametrize("count", [2, 5])
def test_a_fold(count: int, tmp_path: Path) -> None:
    """Blocks that lie in two shares are computed twice."""
    torch.manual_seed(0)
    state = {
        "base_model.model.q.base_layer.weight": torch.randn(300, 2000),
        "base_model.model.q.lora_A.default.weight": torch.randn(4, 2000),
        "base_model.model.q.lora_B.default.weight": torch.randn(300, 4),
    }
    checkpoints.save_plain(tmp_path / "source", [state])
    options: dict[str, Any] = {"lora_alpha": 4, "dtype": "bfloat16"}
    streammerge.merge(tmp_path / "source", tmp_path / "alone", **options)
    merge_together(count, tmp_path / "source", tmp_path / "together", **options)
    alone = checkpoints.digests(tmp_path / "alone")
    assert checkpoints.digests(tmp_path / "together") == alone


# --- one of several -------------------------------------------------------------------------------

STATE = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(6)}
OPTIONS: dict[str, Any] = {"max_shard_size": 256, "workers": 1}
WEIGHTS = [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    checkpoints.save_plain(folder, [STATE] * 2)
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text("{}")
    return folder


def refuse_to_write(rank: int, file: int) -> Any:
    """A process that fails when it has come to a file."""
    write = execution.write_files

    def fail(plan: Any, directory: str, sources: Any, share: Any, **rest: Any) -> int:
        if threading.current_thread() is threads[rank]:
            before = [part for part in share if part.file < file]
            write(plan, directory, sources, before, **rest)
            raise KeyboardInterrupt
        return write(plan, directory, sources, share, **rest)

    threads: dict[int, threading.Thread] = {}
    return fail, lambda own: threads.setdefault(own, threading.current_thread()) and {}


@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_resumed_by_another_number(
    rank: int, then: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "merged"
    streammerge.merge(source, tmp_path / "alone", **OPTIONS)
    fail, each = refuse_to_write(rank, 2 * rank + 1)  # each of three processes has two files
    monkeypatch.setattr(execution, "write_files", fail)
    first, *_ = merge_together(3, source, target, each=each, **OPTIONS)
    assert isinstance(first, KeyboardInterrupt)
    monkeypatch.undo()
    journal = Path(staging_path(str(target))) / "journal"
    finished = {file.name: file for file in read_written(str(journal))}
    assert WEIGHTS[2 * rank] in finished
    assert WEIGHTS[2 * rank + 1] not in finished

    if then == 1:
        streammerge.merge(source, target, **OPTIONS)
    else:
        for end in merge_together(then, source, target, **OPTIONS):
            assert isinstance(end, streammerge.Report)
    assert checkpoints.digests(target) == checkpoints.digests(tmp_path / "alone")
    for file in finished.values():
        assert file.lies_in(str(target))


def test_a_second_merge_of_the_same_processes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have told about the first one says nothing about files of the second."""
    store, write = FakeStore(), execution.write_files

    def write_but_one(plan: Any, directory: str, *rest: Any, **options: Any) -> int:
        if threading.current_thread() is threads[1] and ".second." in directory:
            raise KeyboardInterrupt
        return write(plan, directory, *rest, **options)

    def live(rank: int) -> None:
        one = Processes(rank, 2, local_rank=rank, local_size=2, connect=lambda: store)
        with suppress(KeyboardInterrupt, SaidElsewhere), one:
            for name in ("first", "second"):
                streammerge.merge(source, tmp_path / name, processes=one, **OPTIONS)

    monkeypatch.setattr(execution, "write_files", write_but_one)
    threads = [threading.Thread(target=live, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "first" / WEIGHTS[5]).exists()
    finished = read_written(str(Path(staging_path(str(tmp_path / "second"))) / "journal"))
    assert {file.name for file in finished} <= set(WEIGHTS[:3])
    streammerge.merge(source, tmp_path / "second", **OPTIONS)
    assert checkpoints.digests(tmp_path / "second") == checkpoints.digests(tmp_path / "first")


def test_a_part_that_nobody_has_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = execution.write_files

    def leave_out(plan: Any, directory: str, sources: Any, share: Any, **rest: Any) -> int:
        left = [part for part in share if part.file != 4]
        return write(plan, directory, sources, left, **rest)

    monkeypatch.setattr(execution, "write_files", leave_out)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged", **OPTIONS))
    assert isinstance(error, ResultError)
    assert str(error).endswith(f"{WEIGHTS[4]}: process 1 has not written its part")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("count", [2, 3])
def test_checked_and_verified(count: int, source: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"check_crc": True, "verify": True}
    alone = streammerge.merge(source, tmp_path / "alone", **options)
    seen: list[Progress] = []
    ends = merge_together(
        count, source, tmp_path / "merged", each=lambda _: {"progress": seen.append}, **options
    )
    assert alone.crcs is not None
    for end in ends:
        assert (end.crcs, end.verified) == (alone.crcs, True)
    assert checkpoints.digests(tmp_path / "merged") == checkpoints.digests(tmp_path / "alone")
    for phase, total in (("check", alone.crcs.nbytes), ("verify", 6 * 256)):
        shown = [state for state in seen if state.phase == phase]
        assert shown[-1] == Progress(phase, total, total)
        assert [state.done for state in shown] == sorted(state.done for state in shown)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_is_found_by_whoever_checks(rank: int, source: Path, tmp_path: Path) -> None:
    """Each of two processes checks one of two files."""
    path = checkpoints.rank_file(source, rank, 2)
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<f", 5.0) * 64) + 3] ^= 1
    path.write_bytes(data)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged", check_crc=True))
    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"{path}: the data of key 'layers.5.weight' are damaged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_was_checked_together_is_not_read_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail, each = refuse_to_write(1, 0)
        patch.setattr(execution, "write_files", fail)
        merge_together(2, source, tmp_path / "merged", each=each, check_crc=True, **OPTIONS)
    seen: list[Progress] = []
    report = streammerge.merge(
        source, tmp_path / "merged", check_crc=True, progress=seen.append, **OPTIONS
    )
    assert {state.total for state in seen if state.phase == "check"} == {0}
    whole = streammerge.merge(source, tmp_path / "alone", check_crc=True, **OPTIONS)
    assert report.crcs == whole.crcs


def test_progress_of_all_in_the_first(source: Path, tmp_path: Path) -> None:
    seen: list[list[Progress]] = [[], [], []]
    merge_together(
        3, source, tmp_path / "merged", each=lambda rank: {"progress": seen[rank].append}, **OPTIONS
    )
    assert seen[1:] == [[], []]
    for phase, total in (("compare", 2 * 6 * 256), ("write", 6 * 256)):
        shown = [state for state in seen[0] if state.phase == phase]
        assert {state.total for state in shown} == {total}
        assert [state.done for state in shown] == sorted(state.done for state in shown)
    assert seen[0][-1] == Progress("write", 6 * 256, 6 * 256)


@pytest.mark.parametrize("rank", [1, 3])
def test_differences_are_found_by_whoever_compares(rank: int, tmp_path: Path) -> None:
    """Some keys by the first process, some by the others, all in one error."""
    states = [{name: value.clone() for name, value in STATE.items()} for _ in range(4)]
    states[rank]["layers.1.weight"][3, 5] += 1
    states[2]["layers.1.weight"][4, 0] += 1
    states[2]["layers.5.weight"][0, 0] += 1
    checkpoints.save_plain(tmp_path / "source", states)
    with pytest.raises(ReplicaMismatchError) as alone:
        streammerge.merge(tmp_path / "source", tmp_path / "alone")
    error = assert_one_error(merge_together(3, tmp_path / "source", tmp_path / "merged"))
    assert isinstance(error, ReplicaMismatchError)
    assert str(error) == str(alone.value)
    ranks = f"ranks {min(rank, 2)}, {max(rank, 2)}"
    assert f"key 'layers.1.weight': {ranks} hold another value than rank 0" in str(error)
    assert "(and 1 more keys: 'layers.5.weight')" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_parts_of_one_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place that is named is the first one, whoever has found it."""
    monkeypatch.setattr("streammerge.replicas._PART_SIZE", 40)
    first = torch.zeros(50, 7)
    other = first.clone()
    other[[13, 49, 31], [2, 0, 6]] = 1
    checkpoints.save_plain(tmp_path / "source", [{"w": first}, {"w": other}])
    error = assert_one_error(merge_together(4, tmp_path / "source", tmp_path / "merged"))
    assert str(error) == (
        "key 'w': rank 1 holds another value than rank 0 (first at index [13, 2])"
    )


@pytest.fixture
def same_signals() -> Iterator[None]:
    """A process that fails with others ignores signals from then on."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_signals")
def test_verifying_is_interrupted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first process does it, and the others wait."""
    verifying, store = threading.Event(), FakeStore()

    def verify(*_: object, **__: object) -> None:
        verifying.set()
        time.sleep(30)

    def fail() -> int:
        verifying.wait(30)
        raise TargetError("no room for the others")

    def live(rank: int) -> None:
        one = Processes(rank, 2, local_rank=rank, local_size=2, connect=lambda: store)
        with one:
            streammerge.merge(source, tmp_path / "merged", processes=one, verify=True, **OPTIONS)

    def live_elsewhere() -> None:
        with suppress(SaidElsewhere):
            live(1)

    monkeypatch.setattr(execution, "check_written", verify)
    monkeypatch.setattr(execution, "peak_memory", fail)
    other = threading.Thread(target=live_elsewhere)
    other.start()
    started = time.monotonic()
    with pytest.raises(TargetError, match="no room for the others"):
        live(0)
    other.join()
    assert time.monotonic() - started < 20
    assert not (tmp_path / "merged").exists()


# --- what does not fit together -------------------------------------------------------------------


def test_other_options(source: Path, tmp_path: Path) -> None:
    ends = merge_together(
        2, source, tmp_path / "merged", each=lambda rank: {"max_shard_size": 256 * (1 + rank)}
    )
    error = assert_one_error(ends)
    assert isinstance(error, ProcessesError)
    assert "process 1 (" in str(error)
    assert str(error).endswith("does not do what process 0 does: it was made with other options")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_other_comparisons(source: Path, tmp_path: Path) -> None:
    modes = ("first", "check")
    ends = merge_together(
        2, source, tmp_path / "merged", each=lambda rank: {"replicas": modes[rank]}
    )
    error = assert_one_error(ends)
    assert str(error).endswith("it was asked for other checks")


def test_a_target_that_only_the_first_sees(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_SEEN_SECONDS", 0.5)
    monkeypatch.setattr(execution, "sees_token", lambda *_: False)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged"))
    assert isinstance(error, ProcessesError)
    assert str(error).startswith(f"{staging_path(str(tmp_path / 'merged'))}/merged: process 1 (")
    assert str(error).endswith(") does not see it")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_staging_directory_that_another_merge_took(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was thought dead must not write to it when it wakes up."""
    write = execution.write_files
    token = Path(staging_path(str(tmp_path / "merged"))) / "token"

    def be_late(*arguments: Any, **rest: Any) -> int:
        token.write_text("another")
        return write(*arguments, **rest)

    monkeypatch.setattr(execution, "write_files", be_late)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged", **OPTIONS))
    assert isinstance(error, TargetPathError)
    assert str(error).endswith("another merge has taken its place")


def test_a_target_that_is_in_the_way(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "merged")
    error = assert_one_error(merge_together(3, source, tmp_path / "merged"))
    assert isinstance(error, TargetPathError)
    assert "exists and is not empty" in str(error)


def test_a_checkpoint_that_is_bad_for_all(source: Path, tmp_path: Path) -> None:
    checkpoints.cut(checkpoints.rank_file(source, 1, 2), 100)
    error = assert_one_error(merge_together(3, source, tmp_path / "merged"))
    assert "model_world_size_2_rank_1.pt" in str(error)
    assert not (tmp_path / "merged").exists()


def test_a_source_that_changes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes look, each at what its own machine shows."""
    write = execution.write_files

    def grow_and_write(*arguments: Any, **rest: Any) -> int:
        done = write(*arguments, **rest)
        with checkpoints.rank_file(source, 0, 2).open("ab") as file:
            file.write(b"x")
        return done

    monkeypatch.setattr(execution, "write_files", grow_and_write)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged"))
    assert isinstance(error, SourceChangedError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_source_that_changes_for_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one waits for what the others see before it publishes."""
    threads: dict[int, threading.Thread] = {}

    def look(_: object) -> None:
        if threading.current_thread() is threads[1]:
            time.sleep(0.3)
            raise SourceChangedError("only here")

    def each(rank: int) -> dict[str, Any]:
        threads[rank] = threading.current_thread()
        return {}

    monkeypatch.setattr("streammerge.sources.Sources.check_unchanged", look)
    error = assert_one_error(merge_together(2, source, tmp_path / "merged", each=each))
    assert str(error) == "only here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
