"""How a result appears: staging, lock, fsync, rename; and what is left when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from oracles import assert_same_tensors, load_directory

import streammerge
from streammerge import NoSpaceError, Progress, TargetError, TargetPathError
from streammerge.journal import read_written
from streammerge.target import staging_path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 60

pytestmark = pytest.mark.usefixtures("no_open_files")

OLD = {"w": torch.zeros(64), "old": torch.ones(3)}
NEW = {"w": torch.arange(64.0), "v": torch.arange(32.0).view(4, 8), "i": torch.arange(9)}
OPTIONS: dict[str, Any] = {"max_shard_size": 200, "workers": 2}
GO_ON = "the same command goes on where it stopped"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint that becomes several files, with side files in a folder of their own."""
    folder = tmp_path / "source"
    checkpoints.save_plain(folder, [NEW] * 2)
    checkpoints.save_side_files(folder)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "merged"


@pytest.fixture
def old_target(tmp_path: Path, target: Path) -> Path:
    """A target that holds an earlier result."""
    checkpoints.save_plain(tmp_path / "earlier", [OLD])
    streammerge.merge(tmp_path / "earlier", target, max_shard_size=100)
    (target / "README.md").write_text("my notes")
    return target


def staging_of(target: Path) -> Path:
    return Path(staging_path(str(target)))


def assert_new(target: Path) -> None:
    """The target is the new result, nothing else, and alone."""
    assert_same_tensors(load_directory(target), NEW)
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    side_files = {"config.json", "tokenizer/vocab.txt", "model.safetensors.index.json"}
    assert {name for name in files if not name.endswith(".safetensors")} == side_files
    assert list(target.parent.iterdir()) == [target]


# --- when it works --------------------------------------------------------------------------------


def test_the_staging_directory_is_hidden_and_beside_the_target(target: Path) -> None:
    staging = staging_of(target)
    assert staging.parent == target.parent
    assert staging.name.startswith(".")
    assert target.name in staging.name


def test_the_target_does_not_exist_before_the_end(source: Path, target: Path) -> None:
    seen = []

    def progress(state: Progress) -> None:
        seen.append((state.phase, target.exists(), staging_of(target).is_dir()))

    streammerge.merge(source, target, progress=progress, **OPTIONS)

    assert set(seen) == {("compare", False, True), ("write", False, True)}
    assert_new(target)


def test_an_old_target_stays_until_the_end(source: Path, old_target: Path) -> None:
    before = checkpoints.snapshot(old_target)
    seen = []

    def progress(state: Progress) -> None:
        seen.append(checkpoints.snapshot(old_target))

    streammerge.merge(source, old_target, overwrite=True, progress=progress, **OPTIONS)

    assert seen
    assert all(state == before for state in seen)
    assert_new(old_target)


def test_an_empty_target_is_used(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    streammerge.merge(source, target, **OPTIONS)
    assert_new(target)


def test_overwriting_what_does_not_exist(source: Path, target: Path) -> None:
    streammerge.merge(source, target, overwrite=True, **OPTIONS)
    assert_new(target)


def test_a_target_inside_the_source(source: Path) -> None:
    target = source / "merged"
    for overwrite in (False, True):
        streammerge.merge(source, target, overwrite=overwrite, **OPTIONS)
        assert_same_tensors(load_directory(target), NEW)
    assert {path.name for path in source.iterdir() if path.suffix != ".pt"} == {
        "huggingface",
        "merged",
    }


def test_links_above_the_target_are_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    report = streammerge.merge(source, tmp_path / "link" / "merged", **OPTIONS)
    assert report.target == str(tmp_path / "disk" / "merged")
    assert (tmp_path / "link").is_symlink()
    assert_new(tmp_path / "disk" / "merged")


def test_the_report_names_the_files(source: Path, target: Path) -> None:
    report = streammerge.merge(source, target, **OPTIONS)
    files = [str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()]
    assert sorted(report.files) == sorted(files)


# --- without renameat2 ----------------------------------------------------------------------------


def missing(*_: object, **__: object) -> object:
    """A C library that lacks renameat2."""
    return object()


def refusing(code: int) -> Callable[..., Any]:
    """A C library whose renameat2 fails with that error."""

    class Library:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(code)
            return -1

    return lambda *_, **__: Library


LIBRARIES = {
    "missing": missing,
    "ENOSYS": refusing(errno.ENOSYS),
    "EINVAL": refusing(errno.EINVAL),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_overwriting_without_renameat2(
    library: str, source: Path, old_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", LIBRARIES[library])
    streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert_new(old_target)


CRASH_AFTER_THE_FIRST_RENAME = """
import ctypes, os, sys
import streammerge

ctypes.CDLL = lambda *arguments, **options: object()
rename = os.rename
def rename_and_crash(*paths):
    rename(*paths)
    os._exit(9)
os.rename = rename_and_crash
streammerge.merge(sys.argv[1], sys.argv[2], overwrite=True, max_shard_size=200)
"""


def test_what_a_crash_between_two_renames_leaves_is_no_obstacle(
    source: Path, old_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an atomic exchange, a crash can leave the old result aside."""
    crashed = subprocess.run(
        [sys.executable, "-c", CRASH_AFTER_THE_FIRST_RENAME, str(source), str(old_target)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert crashed.returncode == 9
    assert not old_target.exists()
    assert_same_tensors(load_directory(staging_of(old_target) / "old"), OLD)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    for _ in range(2):
        streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
        assert_new(old_target)


@pytest.mark.parametrize("then", ["another job", "no overwrite"])
def test_the_old_result_comes_back_after_a_crash_between_two_renames(
    then: str, source: Path, old_target: Path
) -> None:
    before = checkpoints.snapshot(old_target)
    subprocess.run(
        [sys.executable, "-c", CRASH_AFTER_THE_FIRST_RENAME, str(source), str(old_target)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    options = {"max_shard_size": 1000, "overwrite": True} if then == "another job" else OPTIONS
    with pytest.raises(TargetPathError):
        streammerge.merge(source, old_target, **options)
    assert checkpoints.snapshot(old_target) == before


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_rename_brings_the_old_result_back(
    failing: int, source: Path, old_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoints.snapshot(old_target)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    fail_on_call(monkeypatch, "rename", failing, errno.EACCES)
    with pytest.raises(TargetError, match=str(old_target)):
        streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert checkpoints.snapshot(old_target) == before
    streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert_new(old_target)


# --- when it fails --------------------------------------------------------------------------------


def fail_on_call(monkeypatch: pytest.MonkeyPatch, name: str, number: int, code: int) -> list[int]:
    """Let the n-th call of ``os.<name>`` fail, once; returns the list of calls so far."""
    real = getattr(os, name)
    calls: list[int] = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)
    return calls


FAULTS = [
    ("mkdir", 1, errno.EACCES),
    ("mkdir", 2, errno.ENOSPC),
    ("ftruncate", 1, errno.EROFS),
    ("ftruncate", 2, errno.ENOSPC),
    ("ftruncate", 4, errno.EFBIG),
    ("pwrite", 1, errno.ENOSPC),
    ("pwrite", 5, errno.EDQUOT),
    ("copy_file_range", 1, errno.ENOSPC),
    ("copy_file_range", 3, errno.EIO),
    ("fsync", 1, errno.EIO),
    ("fsync", 5, errno.ENOSPC),
    ("fsync", 12, errno.EIO),
    ("makedirs", 2, errno.ENOSPC),
    ("makedirs", 5, errno.EDQUOT),
    ("rename", 1, errno.EACCES),
]


@pytest.mark.parametrize(("name", "number", "code"), FAULTS)
@pytest.mark.parametrize("old", [False, True])
def test_a_failed_call(
    old: bool,
    name: str,
    number: int,
    code: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """What was there stays. Finished files wait in the staging directory; without any, it goes."""
    target = request.getfixturevalue("old_target" if old else "target")
    if name == "rename":
        monkeypatch.setattr(ctypes, "CDLL", missing)
    before = checkpoints.snapshot(tmp_path)
    calls = fail_on_call(monkeypatch, name, number, code)

    with pytest.raises(TargetError) as caught:
        streammerge.merge(source, target, overwrite=old, **OPTIONS)

    assert len(calls) >= number
    assert str(target.parent) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    monkeypatch.undo()
    staging = staging_of(target)
    finished = read_written(str(staging / "journal"))
    assert bool(finished) == staging.exists()
    full = code in (errno.ENOSPC, errno.EDQUOT)
    assert isinstance(caught.value, NoSpaceError) == full
    hints = ["free some space and start again"] * full + [GO_ON] * bool(finished)
    assert (caught.value.hint or "") == "; ".join(hints)
    if finished:
        shutil.rmtree(staging)
        if not old:
            target.parent.rmdir()
    assert checkpoints.snapshot(tmp_path) == before


def test_a_failed_exchange(source: Path, old_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoints.snapshot(old_target)
    monkeypatch.setattr(ctypes, "CDLL", refusing(errno.EACCES))
    with pytest.raises(TargetError, match="Permission denied"):
        streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert checkpoints.snapshot(old_target) == before
    monkeypatch.undo()
    streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert_new(old_target)


@pytest.mark.parametrize("old", [False, True])
def test_a_failure_after_the_rename_leaves_the_new_result(
    old: bool,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """It is complete then; only its entry in the parent may not be on the disk yet."""
    target.parent.mkdir(exist_ok=True)
    if old:
        request.getfixturevalue("old_target")
    fsync = os.fsync

    def fail_after_the_rename(fd: int) -> None:
        fsync(fd)
        if (
            (target / "config.json").exists()
            and os.path.samestat(os.fstat(fd), target.parent.stat())
            and not (staging_of(target) / "merged" / "config.json").exists()
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_after_the_rename)
    with pytest.raises(TargetError, match=f"{target}: Input/output error") as caught:
        streammerge.merge(source, target, overwrite=old, **OPTIONS)
    assert caught.value.hint == f"{target} is complete"
    assert_same_tensors(load_directory(target), NEW)
    if old:  # not removed, as the new one might not be found after a crash
        assert_same_tensors(load_directory(staging_of(target) / "merged"), OLD)


@pytest.mark.parametrize("phase", ["compare", "write"])
@pytest.mark.parametrize("old", [False, True])
def test_an_interrupt_leaves_what_was_there(
    old: bool, phase: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue("old_target" if old else "target")
    before = checkpoints.snapshot(tmp_path)

    def progress(state: Progress) -> None:
        if state.phase == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streammerge.merge(source, target, overwrite=old, progress=progress, **OPTIONS)
    if phase == "write":
        shutil.rmtree(staging_of(target), ignore_errors=True)
        if not old and target.parent.exists():
            target.parent.rmdir()
    assert checkpoints.snapshot(tmp_path) == before


def test_only_folders_of_its_own_are_taken_away(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    before = checkpoints.snapshot(tmp_path)
    fail_on_call(monkeypatch, "ftruncate", 2, errno.EACCES)
    with pytest.raises(TargetError):
        streammerge.merge(source, tmp_path / "mine" / "a" / "b" / "merged", **OPTIONS)
    assert checkpoints.snapshot(tmp_path) == before


# --- targets that appear meanwhile ----------------------------------------------------------------


def once_writing(action: Callable[[], object]) -> Callable[[Progress], None]:
    """A callback that does something when the writing has begun, once."""
    done = []

    def progress(state: Progress) -> None:
        if state.phase == "write" and not done:
            done.append(state)
            action()

    return progress


def test_a_target_that_appears_meanwhile_is_not_replaced(source: Path, target: Path) -> None:
    def appear() -> None:
        target.mkdir()
        (target / "thesis.tex").write_text("precious")

    with pytest.raises(TargetPathError, match=str(target)):
        streammerge.merge(source, target, progress=once_writing(appear), **OPTIONS)
    assert (target / "thesis.tex").read_text() == "precious"
    shutil.rmtree(target)
    streammerge.merge(source, target, **OPTIONS)
    assert_new(target)


def test_a_target_that_is_filled_meanwhile_is_not_replaced(source: Path, target: Path) -> None:
    target.mkdir(parents=True)

    def fill() -> None:
        (target / "thesis.tex").write_text("precious")

    with pytest.raises(TargetPathError, match=str(target)):
        streammerge.merge(source, target, progress=once_writing(fill), **OPTIONS)
    assert (target / "thesis.tex").read_text() == "precious"
    shutil.rmtree(target)
    streammerge.merge(source, target, **OPTIONS)
    assert_new(target)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_that_appears_meanwhile_is_not_followed(
    overwrite: bool, source: Path, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("precious")

    def link() -> None:
        target.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(TargetPathError, match=str(target)):
        streammerge.merge(
            source, target, overwrite=overwrite, progress=once_writing(link), **OPTIONS
        )
    assert target.is_symlink()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["config.json"]


def test_a_file_that_appears_meanwhile_stays(source: Path, target: Path) -> None:
    with pytest.raises(TargetError, match=str(target)):
        streammerge.merge(
            source, target, progress=once_writing(lambda: target.write_text("precious")), **OPTIONS
        )
    assert target.read_text() == "precious"


# --- links in an old result -----------------------------------------------------------------------


def test_a_link_in_an_old_result_is_not_written_through(
    source: Path, old_target: Path, tmp_path: Path
) -> None:
    """Whether the old result is replaced or the merge refused, what the link names stays."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("precious")
    (old_target / "tokenizer").symlink_to(tmp_path / "base")
    (old_target / "notes.md").symlink_to(tmp_path / "base" / "README.md")
    before = checkpoints.snapshot(tmp_path / "base")
    with contextlib.suppress(TargetPathError):
        streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
        assert_new(old_target)
    assert checkpoints.snapshot(tmp_path / "base") == before


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_merge_into_the_same_target(source: Path, target: Path) -> None:
    staging = staging_of(target)
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_text("half of the other merge")
    fd = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        before = checkpoints.snapshot(target.parent)
        with pytest.raises(TargetPathError, match="another merge is writing it") as caught:
            streammerge.merge(source, target, **OPTIONS)
        assert str(target) in str(caught.value)
        assert caught.value.hint is not None
        assert checkpoints.snapshot(target.parent) == before
    finally:
        os.close(fd)
    streammerge.merge(source, target, **OPTIONS)
    assert_new(target)


SLOW_MERGE = """
import sys, time
import streammerge.writer
from streammerge.cli import main

copy_range = streammerge.writer._copy_range
def slow_copy_range(*arguments):
    time.sleep(0.3)
    copy_range(*arguments)
streammerge.writer._copy_range = slow_copy_range
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def slow_merge(source: Path, target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that merges, in the middle of the copying."""
    arguments = ("merge", str(source), str(target), "--quiet", "--max-shard-size", "200")
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_MERGE, *arguments, "--overwrite", "--workers", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not list(staging_of(target).rglob("*.safetensors")):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield running
        running.kill()


def test_two_processes_at_once(
    source: Path, target: Path, slow_merge: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(TargetPathError, match="another merge is writing it"):
        streammerge.merge(source, target, **OPTIONS)
    assert slow_merge.wait(TIMEOUT_SECONDS) == 0
    assert_new(target)


def test_after_a_merge_that_was_killed(
    source: Path, target: Path, slow_merge: subprocess.Popen[bytes]
) -> None:
    slow_merge.kill()
    assert slow_merge.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    assert not target.exists()
    assert staging_of(target).exists()
    streammerge.merge(source, target, **OPTIONS)
    assert_new(target)


def test_an_old_result_survives_a_merge_that_is_killed(
    source: Path, old_target: Path, slow_merge: subprocess.Popen[bytes]
) -> None:
    before = checkpoints.snapshot(old_target)
    slow_merge.kill()
    slow_merge.wait(TIMEOUT_SECONDS)
    assert checkpoints.snapshot(old_target) == before
    streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    assert_new(old_target)


def test_what_a_dead_merge_left_is_replaced(source: Path, target: Path, tmp_path: Path) -> None:
    staging = staging_of(target)
    (staging / "tokenizer" / "deep").mkdir(parents=True)
    (staging / "tokenizer" / "deep" / "stale.json").write_text("{}")
    (staging / "stale.safetensors").write_bytes(b"half")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    (staging / "link").symlink_to(tmp_path / "precious")

    streammerge.merge(source, target, **OPTIONS)

    assert_new(target)
    assert (tmp_path / "precious" / "file").read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_something_else_under_the_name_of_the_staging_directory(
    kind: str, source: Path, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    target.parent.mkdir()
    if kind == "link":
        staging_of(target).symlink_to(tmp_path / "precious")
    else:
        staging_of(target).write_text("precious")
    before = checkpoints.snapshot(tmp_path)
    with pytest.raises(TargetPathError, match="in the way"):
        streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.snapshot(tmp_path) == before


# --- the order of calls ---------------------------------------------------------------------------

Event = tuple[str, str]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Records what is written, flushed, published and removed, in order."""
    from streammerge import publisher

    recorded: list[Event] = []
    fsync, rename, exchange, rmtree = os.fsync, os.rename, publisher._exchange, shutil.rmtree
    pwrite = os.pwrite

    def record_pwrite(fd: int, data: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith("/journal"):
            payloads = [line[9:] for line in bytes(data).splitlines()]
            for kind, payload in map(json.loads, payloads):
                recorded.append(("journal", payload["name"] if kind == "written" else kind))
        else:
            recorded.append(("write", path))
        return pwrite(fd, data, offset)

    def record_fsync(fd: int) -> None:
        fsync(fd)
        recorded.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))

    def record_rename(old: str, new: str) -> None:
        rename(old, new)
        recorded.append(("publish", str(new)))

    def record_exchange(new: str, old: str, aside: str) -> None:
        exchange(new, old, aside)
        recorded.append(("publish", old))

    def record_rmtree(path: str, **options: Any) -> None:
        recorded.append(("remove", str(path)))
        rmtree(path, **options)

    monkeypatch.setattr(os, "pwrite", record_pwrite)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(publisher, "_exchange", record_exchange)
    monkeypatch.setattr(shutil, "rmtree", record_rmtree)
    return recorded


def split_events(events: list[Event], target: Path) -> tuple[set[str], list[Event]]:
    """What is flushed before the target appears, below its directory; and all that follows."""
    at = events.index(("publish", str(target)))
    result = staging_of(target) / "merged"
    flushed = (Path(path) for kind, path in events[:at] if kind == "fsync")
    before = {str(path.relative_to(result)) for path in flushed if path.is_relative_to(result)}
    return before, events[at + 1 :]


def everything_in(target: Path) -> set[str]:
    return {".", *(str(path.relative_to(target)) for path in target.rglob("*"))}


def test_everything_is_on_the_disk_before_it_appears(
    source: Path, target: Path, events: list[Event]
) -> None:
    target.parent.mkdir()
    streammerge.merge(source, target, **OPTIONS)
    before, after = split_events(events, target)
    assert before == everything_in(target)
    # Then the entry of the target itself, and nothing is written any more.
    assert after == [("fsync", str(target.parent)), ("remove", str(staging_of(target)))]


def test_new_folders_above_the_target_are_on_the_disk(
    source: Path, tmp_path: Path, events: list[Event]
) -> None:
    target = tmp_path / "a" / "b" / "merged"
    streammerge.merge(source, target, **OPTIONS)
    before, after = split_events(events, target)
    assert before == everything_in(target)
    synced = {path for kind, path in after if kind == "fsync"}
    assert {str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)} <= synced


def test_an_old_result_is_removed_last(source: Path, old_target: Path, events: list[Event]) -> None:
    events.clear()
    streammerge.merge(source, old_target, overwrite=True, **OPTIONS)
    before, after = split_events(events, old_target)
    assert before == everything_in(old_target)
    # The old result goes only when the new one is sure to be found after a crash.
    assert after == [("fsync", str(old_target.parent)), ("remove", str(staging_of(old_target)))]
    assert_new(old_target)


def test_the_journal_names_only_what_is_on_the_disk(
    source: Path, target: Path, events: list[Event]
) -> None:
    streammerge.merge(source, target, **OPTIONS)
    staging = staging_of(target)
    flush_of_journal = ("fsync", str(staging / "journal"))
    # The job comes first, and it is there to be found after a crash.
    assert events[:2] == [("journal", "job"), flush_of_journal]
    assert events[2:4] == [("fsync", str(staging)), ("fsync", str(target.parent))]
    names = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert names == {name for kind, name in events if kind == "journal"} - {"job"}
    for name in names:
        path = str(staging / "merged" / name)
        at = events.index(("journal", name))
        flushed = events.index(("fsync", path))
        assert (
            flushed
            < at
            < events.index(flush_of_journal, at)
            < events.index(("publish", str(target)))
        )
        assert ("write", path) not in events[flushed:]
