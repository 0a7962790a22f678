"""Merges that were interrupted: what stays, what the next one takes over, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_same_tensors, load_directory

import streammerge
from streammerge import Progress, SourceChangedError, SourceError, TargetError, TargetPathError
from streammerge.cli import main
from streammerge.crc import crc_amount
from streammerge.journal import Journal, Written, read_records, read_written
from streammerge.planner import fingerprint
from streammerge.target import missing_space, staging_path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 60
GO_ON = "the same command goes on where it stopped"

STATE = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(6)}
pytestmark = pytest.mark.usefixtures("no_open_files")

OPTIONS: dict[str, Any] = {"max_shard_size": 256, "workers": 1}
WEIGHTS = [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
SIDE_FILES = ["model.safetensors.index.json", "config.json", "tokenizer/vocab.txt"]
FILES = [*WEIGHTS, *SIDE_FILES]  # in the order in which they are written


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    checkpoints.save_plain(folder, [STATE] * 2)
    checkpoints.save_side_files(folder)
    return folder


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, str]:
    """Digests of what a merge writes that nothing interrupts."""
    streammerge.merge(source, tmp_path / "expected", **OPTIONS)
    return checkpoints.digests(tmp_path / "expected")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "merged"


def staging_of(target: Path) -> Path:
    return Path(staging_path(str(target)))


def finished_files(target: Path) -> dict[str, Written]:
    """The files that the journal names, by name."""
    return {file.name: file for file in read_written(str(staging_of(target) / "journal"))}


def interrupt(source: Path, target: Path, *, after: int, **options: Any) -> dict[str, Written]:
    """Merge until so many files are finished; returns these."""
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), interrupting(target, after, error):
        streammerge.merge(source, target, **{**OPTIONS, **options})
    finished = finished_files(target)
    assert sorted(finished) == sorted(FILES[:after])
    return finished


class interrupting:
    """Raises an error when the journal has got a number of files."""

    def __init__(self, target: Path, after: int, error: BaseException) -> None:
        self._after = after
        self._error = error
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        record_written = Journal.record_written
        left = self._after

        def record_some(journal: Journal, *files: Written) -> None:
            nonlocal left
            if left <= 0 or len(files) > left:
                record_written(journal, *files[:left])
                left = 0
                raise self._error
            left -= len(files)
            record_written(journal, *files)

        self._patch.setattr(Journal, "record_written", record_some)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


# --- the journal ----------------------------------------------------------------------------------

RECORDS = [("job", {"version": "1"}), ("written", {"name": "ä\udcff", "size": 1}), ("crc", {})]


@pytest.fixture(scope="module")
def stored() -> bytes:
    """The bytes of a journal."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "journal")
        write_journal(path)
        return Path(path).read_bytes()


def write_journal(path: str) -> None:
    journal = Journal(path)
    for kind, payload in RECORDS:
        journal.record(kind, payload)
    journal.close()


def test_records_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path)
    assert list(journal.records("job")) == []
    for kind, payload in RECORDS:
        journal.record(kind, payload)
    journal.record("crc", {"a": 1}, {"b": [2, None]})
    assert list(journal.records("crc")) == [{}, {"a": 1}, {"b": [2, None]}]
    journal.close()
    journal.close()
    assert list(read_records(path)) == [*RECORDS, ("crc", {"a": 1}), ("crc", {"b": [2, None]})]


def test_a_journal_that_is_not_there(tmp_path: Path) -> None:
    assert list(read_records(str(tmp_path / "journal"))) == []


def test_a_line_can_be_read_by_people(stored: bytes) -> None:
    line = stored.splitlines()[0]
    checksum, text = line.split(b" ", 1)
    assert json.loads(text) == ["job", {"version": "1"}]
    assert int(checksum, 16) == zlib.crc32(text)


def test_a_torn_line_counts_as_not_written(stored: bytes, tmp_path: Path) -> None:
    """Cut at every byte, and then go on."""
    ends = [i + 1 for i, byte in enumerate(stored) if byte == ord("\n")]
    for size in range(len(stored) + 1):
        path = tmp_path / f"journal-{size}"
        path.write_bytes(stored[:size])
        whole = sum(end <= size for end in ends)
        assert list(read_records(str(path))) == RECORDS[:whole]
        journal = Journal(str(path))
        journal.record("more", {"x": size})
        journal.close()
        assert list(read_records(str(path))) == [*RECORDS[:whole], ("more", {"x": size})]
        path.unlink()


@settings(deadline=None)
@given(data=st.data())
def test_damage_ends_the_journal(data: st.DataObject, stored: bytes) -> None:
    """Lines before a changed byte are good; no line that was changed is taken for one."""
    at = data.draw(st.integers(0, len(stored) - 1))
    changed = bytearray(stored)
    changed[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "journal")
        Path(path).write_bytes(changed)
        assert list(read_records(path)) == RECORDS[: stored.count(b"\n", 0, at)]


def test_lines_behind_a_damaged_one_do_not_come_back(stored: bytes, tmp_path: Path) -> None:
    """Not even when a new line fits in exactly where the damaged one was."""
    path = tmp_path / "journal"
    path.write_bytes(b"x" + stored[1:])
    journal = Journal(str(path))
    journal.record(*RECORDS[0])
    journal.close()
    assert list(read_records(str(path))) == RECORDS[:1]


def test_what_fails_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line, then the disk is full, then there is room again."""
    path = str(tmp_path / "journal")
    journal = Journal(path)
    journal.record("a", {})
    pwrite, calls = os.pwrite, []

    def write_half(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", write_half)
    with pytest.raises(streammerge.NoSpaceError, match="journal"):
        journal.record("b", {"long": "x" * 100})
    monkeypatch.undo()
    journal.record("c", {})
    journal.close()
    assert [kind for kind, _ in read_records(path)] == ["a", "c"]


def test_short_writes_to_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1], offset))
    write_journal(str(tmp_path / "journal"))
    assert list(read_records(str(tmp_path / "journal"))) == RECORDS


# --- which merges are the same job ----------------------------------------------------------------


def job_of(source: Path, **options: Any) -> Any:
    plan = streammerge.plan(streammerge.describe(source), **{**OPTIONS, **options})
    return fingerprint(plan, [file_of(asset.path) for asset in plan.assets])


def file_of(path: str) -> Any:
    from streammerge.checkpoint import File, Members

    status = os.stat(path)
    return File(path, status.st_size, status.st_mtime_ns, status.st_ino, Members())


def differences(source: Path, before: Any, **options: Any) -> str | None:
    """How a job differs from one that was stored as JSON."""
    from dataclasses import asdict

    return job_of(source, **options).differs_from(json.loads(json.dumps(asdict(before))))


@pytest.mark.parametrize(
    "options",
    [
        {"max_shard_size": 512},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "keep_dtype": ["layers.0.*"]},
        {"untie": True, "max_shard_size": "1GB"},
    ],
)
def test_other_options_are_another_job(options: dict[str, Any], source: Path) -> None:
    assert differences(source, job_of(source), **options) == "it was made with other options"
    assert differences(source, job_of(source, **options), **options) is None


@pytest.mark.parametrize("options", [{"workers": 3}, {"memory": "1MiB"}])
def test_options_that_change_no_byte_are_the_same_job(
    options: dict[str, Any], source: Path
) -> None:
    assert differences(source, job_of(source), **options) is None


def test_the_same_files_elsewhere_are_the_same_job(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = job_of(source)
    assert str(tmp_path) not in repr(before)
    shutil.copytree(source, tmp_path / "other" / "copy")
    assert differences(tmp_path / "other" / "copy", before) is None
    monkeypatch.chdir(tmp_path)
    assert differences(Path("source"), before) is None


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def grow(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(0, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("folder", "name", "change"),
    [
        (".", "model_world_size_2_rank_1.pt", touch),
        ("huggingface", "tokenizer/vocab.txt", touch),
        ("huggingface", "tokenizer/vocab.txt", grow),
    ],
)
def test_a_source_that_has_changed_is_another_job(
    folder: str, name: str, change: Callable[[Path], None], source: Path
) -> None:
    before = job_of(source)
    change(source / folder / name)
    assert differences(source, before) == f"{name} has changed since"


def test_a_config_that_has_changed_is_another_job(source: Path) -> None:
    before = job_of(source)
    (source / "huggingface" / "config.json").write_text('{"a": 1}')
    assert differences(source, before) is not None


def test_other_files_are_another_job(source: Path) -> None:
    before = job_of(source)
    (source / "huggingface" / "merges.txt").write_text("")
    assert differences(source, before) == "it was made of other files"


def test_another_version_is_another_job(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = job_of(source)
    monkeypatch.setattr(streammerge, "__version__", "9.9")
    assert differences(source, before) == "streammerge 0.1.0 wrote it, this is 9.9"


@pytest.mark.parametrize("folded", [False, True])
def test_the_device_counts_where_it_computes(folded: bool, tmp_path: Path) -> None:
    weight = {"base_model.model.q.base_layer.weight": torch.zeros(4, 6)}
    adapter = {
        "base_model.model.q.lora_A.default.weight": torch.zeros(2, 6),
        "base_model.model.q.lora_B.default.weight": torch.zeros(4, 2),
    }
    checkpoints.save_plain(tmp_path / "source", [weight | adapter])
    plan = streammerge.plan(
        streammerge.describe(tmp_path / "source"),
        lora_mode="fold" if folded else "split",
        lora_alpha=4,
    )
    assert (fingerprint(plan, [], "cpu") != fingerprint(plan, [], "cuda")) == folded


def test_what_is_folded_counts(tmp_path: Path) -> None:
    """Headers are equal; only what the values are made of differs."""
    state = {
        "base_model.model.q.base_layer.weight": torch.zeros(4, 6),
        "base_model.model.q.lora_A.default.weight": torch.zeros(2, 6),
        "base_model.model.q.lora_B.default.weight": torch.zeros(4, 2),
    }
    checkpoints.save_plain(tmp_path / "source", [state])
    checkpoint = streammerge.describe(tmp_path / "source")
    jobs = [
        fingerprint(streammerge.plan(checkpoint, lora_mode="fold", **options), [])
        for options in ({"lora_alpha": 4}, {"lora_alpha": 8}, {"lora_alpha": 4, "rslora": True})
    ]
    assert len(set(jobs)) == 3


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(1, len(FILES)))
@pytest.mark.parametrize("old", [False, True])
def test_finished_files_are_kept(
    after: int, old: bool, source: Path, target: Path, expected: dict[str, str]
) -> None:
    """Interrupted after each file: the result is the same, and finished files are the same."""
    if old:
        checkpoints.save_plain(source.parent / "earlier", [{"w": torch.zeros(3)}])
        streammerge.merge(source.parent / "earlier", target)
    finished = interrupt(source, target, after=after, overwrite=old)
    written = []
    create = streammerge.writer.create_file

    def record_create(directory: str, name: str, *rest: Any) -> Any:
        written.append(name)
        return create(directory, name, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streammerge.writer, "create_file", record_create)
        streammerge.merge(source, target, overwrite=old, **OPTIONS)

    assert checkpoints.digests(target) == expected
    assert not staging_of(target).exists()
    assert written == FILES[after:]
    for file in finished.values():
        assert file.lies_in(str(target))


@settings(deadline=None, max_examples=25)
@given(stops=st.lists(st.integers(0, len(FILES) - 1), max_size=4))
def test_interrupted_again_and_again(stops: list[int]) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # it flushes all the time
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        source, target = Path(folder, "source"), Path(folder, "merged")
        checkpoints.save_plain(source, [STATE] * 2)
        streammerge.merge(source, Path(folder, "expected"), **OPTIONS)
        finished: dict[str, Written] = {}
        for stop in stops:
            with suppress(KeyboardInterrupt), interrupting(target, stop, KeyboardInterrupt()):
                streammerge.merge(source, target, **OPTIONS)
                break
            # What was finished before still is.
            assert finished.items() <= finished_files(target).items()
            finished = finished_files(target)
        else:
            streammerge.merge(source, target, **OPTIONS)
        for file in finished.values():
            assert file.lies_in(str(target))
        assert checkpoints.digests(target) == checkpoints.digests(Path(folder, "expected"))


def cut(path: Path) -> None:
    checkpoints.cut(path, -1)


def replace_by_a_copy(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def edit(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\1\1\1\1")


def link(path: Path) -> None:
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")


def make_a_directory(path: Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text("")


@pytest.mark.parametrize(
    "damage", [Path.unlink, cut, edit, touch, replace_by_a_copy, link, make_a_directory]
)
def test_a_file_that_is_not_as_the_journal_says_is_written_again(
    damage: Callable[[Path], None], source: Path, target: Path, expected: dict[str, str]
) -> None:
    finished = interrupt(source, target, after=4)
    damage(staging_of(target) / "merged" / WEIGHTS[1])
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert not any(path.is_symlink() for path in target.rglob("*"))
    kept = {name for name, file in finished.items() if file.lies_in(str(target))}
    assert kept == set(finished) - {WEIGHTS[1]}


def test_what_the_journal_does_not_name_is_removed(
    source: Path, target: Path, expected: dict[str, str]
) -> None:
    interrupt(source, target, after=2)
    merged = staging_of(target) / "merged"
    (merged / "stale" / "deep").mkdir(parents=True)
    (merged / "stale" / "deep" / "model.safetensors").write_text("")
    (merged / WEIGHTS[4]).write_text("half")
    (merged / "link").symlink_to(source)
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert {path.name for path in target.iterdir() if path.is_dir()} == {"tokenizer"}


@pytest.mark.parametrize("size", [0, 5, 40])
def test_a_journal_cut_short(
    size: int, source: Path, target: Path, expected: dict[str, str]
) -> None:
    """Without its first line it is no journal, and everything is written again."""
    interrupt(source, target, after=3)
    checkpoints.cut(staging_of(target) / "journal", size)
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected


def test_what_is_there_needs_no_space(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{i}": torch.zeros(64_000) for i in range(4)}
    checkpoints.save_plain(source.parent / "large", [state])
    options: dict[str, Any] = {"max_shard_size": 256_000, "workers": 1}
    with pytest.raises(KeyboardInterrupt), interrupting(target, 3, KeyboardInterrupt()):
        streammerge.merge(source.parent / "large", target, **options)
    for path in (staging_of(target) / "merged").glob("*.safetensors"):
        if path.name not in finished_files(target):
            path.unlink()
    statvfs = os.statvfs
    needed = streammerge.plan(streammerge.describe(source.parent / "large")).disk_nbytes

    def nearly_full(path: str) -> os.statvfs_result:
        fields = list(statvfs(path))
        fields[1], fields[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    free = needed // 10
    with pytest.raises(streammerge.NoSpaceError):
        streammerge.merge(source.parent / "large", target, **options)
    free = needed // 3  # as three of four files are there
    streammerge.merge(source.parent / "large", target, **options)
    assert_same_tensors(load_directory(target), state)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_progress_counts_what_is_there(after: int, source: Path, target: Path) -> None:
    interrupt(source, target, after=after) if after else None
    seen: list[Progress] = []
    streammerge.merge(source, target, progress=seen.append, **OPTIONS)
    written = [state for state in seen if state.phase == "write"]
    assert {state.total for state in written} == {6 * 256}
    assert [s.done for s in written] == sorted(s.done for s in written)
    assert written[0].done >= after * 256
    assert written[-1].done == 6 * 256


# --- staging directories that are refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-shard-size", "600"], "it was made with other options"),
        (["--dtype", "bfloat16"], "it was made with other options"),
        ([], "model_world_size_2_rank_0.pt has changed since"),
    ],
)
def test_another_job_is_refused(
    arguments: list[str],
    said: str,
    source: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt(source, target, after=2)
    if not arguments:
        touch(checkpoints.rank_file(source, 0, 2))
    before = checkpoints.snapshot(source.parent)
    command = ["merge", str(source), str(target), "--max-shard-size", "256", *arguments]

    assert main(command) == 1

    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"streammerge: error: {staging_of(target)}: ")
    assert error.endswith(said)
    assert hint == "hint: --restart discards it"
    assert checkpoints.snapshot(source.parent) == before

    assert main([*command, "--restart", "--quiet"]) == 0
    assert list(target.parent.iterdir()) == [target]


def test_restart_without_need(source: Path, target: Path, expected: dict[str, str]) -> None:
    """It discards what is of the same job as well, and does no harm where nothing is."""
    finished = interrupt(source, target, after=3)
    streammerge.merge(source, target, restart=True, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert not any(file.lies_in(str(target)) for file in finished.values())
    streammerge.merge(source, target, restart=True, overwrite=True, **OPTIONS)
    assert checkpoints.digests(target) == expected


def test_a_merge_that_is_comparing_has_the_target(source: Path, target: Path) -> None:
    """The second one need not wait for hours to hear that."""
    seen = []

    def progress(state: Progress) -> None:
        if state.phase == "compare" and not seen:
            with pytest.raises(TargetPathError, match="another merge is writing it") as caught:
                streammerge.merge(source, target, **OPTIONS)
            seen.append(caught.value)

    streammerge.merge(source, target, progress=progress, **OPTIONS)
    assert seen


def test_a_merge_that_another_one_took_over(
    source: Path, target: Path, expected: dict[str, str]
) -> None:
    """As on two machines whose file system keeps locks to one: it leaves all as it is."""
    seen = []

    def progress(state: Progress) -> None:
        if state.phase == "compare" and not seen:
            seen.append(state)
            (staging_of(target) / "token").write_text("of another one")
            (staging_of(target) / "mine").write_text("of another one")

    with pytest.raises(TargetPathError, match=r"another merge has taken its place$"):
        streammerge.merge(source, target, progress=progress, **OPTIONS)
    assert not target.exists()
    assert (staging_of(target) / "mine").exists()
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected


# --- what was compared with its CRC-32 ------------------------------------------------------------


def bytes_to_check(source: Path, target: Path) -> int:
    """Merge, with --check-crc, and say how many bytes are read for that; all are reported."""
    totals = []

    def progress(state: Progress) -> None:
        if state.phase == "check":
            totals.append(state.total)

    report = streammerge.merge(source, target, check_crc=True, progress=progress, **OPTIONS)
    assert report.crcs is not None
    assert report.crcs.nbytes == crc_amount(streammerge.describe(source))
    return max(totals, default=0)


def test_what_was_checked_is_not_read_again(
    source: Path, target: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    whole = bytes_to_check(source, tmp_path / "other")
    assert whole > 0
    interrupt(source, target, after=0, check_crc=True)
    assert bytes_to_check(source, target) == 0
    assert checkpoints.digests(target) == expected


def test_checking_goes_on_where_it_stopped(
    source: Path, target: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_checked = Journal.record_checked
    sizes = [file.members.sizes for file in streammerge.describe(source).files]
    read = 0

    def stop(journal: Journal, file: int, members: Sequence[int]) -> None:
        nonlocal read
        if read:
            raise KeyboardInterrupt
        read += sum(sizes[file][member] for member in members)
        record_checked(journal, file, members)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record_checked", stop)
        with pytest.raises(KeyboardInterrupt):
            streammerge.merge(source, target, check_crc=True, **OPTIONS)
    rest = bytes_to_check(source, target)
    assert 0 < rest < rest + read == sum(map(sum, sizes))
    assert checkpoints.digests(target) == expected


# --- what stays after a failure -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (KeyboardInterrupt(), True),
        (SystemExit(3), True),
        (RuntimeError("CUDA out of memory"), True),
        (TargetPathError("in the way"), True),
        (streammerge.UnsupportedError("no torch"), True),
        (streammerge.UsageError("no GPU"), True),
        (SourceChangedError("changed"), False),
        (streammerge.CorruptFileError("damaged"), False),
        (streammerge.ReplicaMismatchError("differ"), False),
        (SourceError("damaged"), False),
        (TargetError("input/output error"), True),
        (TargetError("does not hold together"), True),
        (streammerge.ResultError("is not what the checkpoint holds"), False),
    ],
)
def test_what_may_pass(error: BaseException, stays: bool, source: Path, target: Path) -> None:
    with pytest.raises(type(error)) as caught, interrupting(target, 2, error):
        streammerge.merge(source, target, **OPTIONS)
    assert caught.value is error
    assert staging_of(target).exists() == stays
    assert not target.exists()
    assert target.parent.exists() == stays
    if isinstance(error, streammerge.StreamMergeError):
        assert error.hint == (GO_ON if stays else None)


def test_a_source_that_vanishes_and_comes_back(
    source: Path, target: Path, expected: dict[str, str]
) -> None:
    """As with a file server that is gone for a while."""
    finished = interrupt(source, target, after=3)
    path = checkpoints.rank_file(source, 0, 2)

    def progress(state: Progress) -> None:
        if state.phase == "compare" and path.exists():
            path.rename(path.with_suffix(".away"))

    with pytest.raises(SourceError, match=f"{path}: No such file or directory") as caught:
        streammerge.merge(source, target, progress=progress, **OPTIONS)
    assert caught.value.hint == GO_ON
    path.with_suffix(".away").rename(path)
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert all(file.lies_in(str(target)) for file in finished.values())


def test_a_source_that_changes_ends_the_job(source: Path, target: Path) -> None:
    interrupt(source, target, after=3)

    def progress(state: Progress) -> None:
        if state.phase == "write":
            touch(checkpoints.rank_file(source, 1, 2))

    with pytest.raises(SourceChangedError):
        streammerge.merge(source, target, progress=progress, **OPTIONS)
    assert not staging_of(target).exists()


def test_a_side_file_that_changes_ends_the_job(source: Path, target: Path) -> None:
    def progress(state: Progress) -> None:
        if state.phase == "compare":
            touch(source / "huggingface" / "tokenizer" / "vocab.txt")

    with pytest.raises(SourceChangedError, match=r"vocab\.txt"):
        streammerge.merge(source, target, progress=progress, **OPTIONS)
    assert not target.parent.exists()


@pytest.mark.parametrize("name", [WEIGHTS[2], "config.json"])
def test_a_disk_that_lies(
    name: str,
    source: Path,
    target: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What reads back differently than it was written is not published."""
    fsync = os.fsync

    def flip_a_bit(fd: int) -> None:
        fsync(fd)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            (byte,) = os.pread(fd, 1, 1)
            os.pwrite(fd, bytes([byte ^ 1]), 1)

    monkeypatch.setattr(os, "fsync", flip_a_bit)
    with pytest.raises(TargetError, match=rf"{name}: its first bytes are not those"):
        streammerge.merge(source, target, **OPTIONS)
    assert name not in finished_files(target)
    monkeypatch.undo()
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected


def test_a_file_of_another_size(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def cut_short(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(WEIGHTS[0]):
            os.ftruncate(fd, os.fstat(fd).st_size - 4)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", cut_short)
    with pytest.raises(TargetError, match=rf"{WEIGHTS[0]}: has 364 bytes, not 368"):
        streammerge.merge(source, target, **OPTIONS)
    assert not target.exists()


def test_what_was_damaged_after_it_was_finished_is_not_published(
    source: Path, target: Path, expected: dict[str, str]
) -> None:
    """A header that nothing in the file system tells from the one that was written."""
    interrupt(source, target, after=4)
    path = staging_of(target) / "merged" / WEIGHTS[2]
    checkpoints.poke(path, 8, b"x")
    with pytest.raises(TargetError, match="does not hold together") as caught:
        streammerge.merge(source, target, **OPTIONS)
    assert caught.value.hint == f"--restart writes all of it again; {GO_ON}"
    assert not target.exists()
    streammerge.merge(source, target, restart=True, **OPTIONS)
    assert checkpoints.digests(target) == expected


# --- signals --------------------------------------------------------------------------------------

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


def stop_a_merge(number: int, source: Path, target: Path, *options: str) -> tuple[int, str, str]:
    """Send a signal to a process once it has finished a file; its exit code and output."""
    arguments = ("merge", str(source), str(target), "--max-shard-size", "256", "--workers", "1")
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_MERGE, *arguments, "--quiet", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not finished_files(target):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        return process.returncode, out, err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal(
    name: str, code: int, source: Path, target: Path, expected: dict[str, str]
) -> None:
    stopped = stop_a_merge(getattr(signal, name), source, target)
    message = f"merge interrupted; nothing was published; {GO_ON}"
    assert stopped == (code, "", f"streammerge: error: {message}\n")
    finished = finished_files(target)
    assert finished
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert all(file.lies_in(str(target)) for file in finished.values())


def test_a_signal_as_json(source: Path, target: Path) -> None:
    code, out, _ = stop_a_merge(signal.SIGINT, source, target, "--json")
    assert code == 130
    message = f"merge interrupted; nothing was published; {GO_ON}"
    assert json.loads(out) == {"error": message, "hint": None, "exit_code": 130}


def test_a_killed_process(source: Path, target: Path, expected: dict[str, str]) -> None:
    assert stop_a_merge(signal.SIGKILL, source, target) == (-signal.SIGKILL, "", "")
    assert not target.exists()
    finished = finished_files(target)
    streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected
    assert all(file.lies_in(str(target)) for file in finished.values())


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_an_interrupt_right_after_the_rename_says_so(
    call: str,
    source: Path,
    target: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = os if call == "rename" else shutil
    real = getattr(module, call)

    def call_and_interrupt(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, call, call_and_interrupt)
    with pytest.raises(KeyboardInterrupt, match=f"^merge interrupted; {target} is complete$"):
        streammerge.merge(source, target, **OPTIONS)
    assert checkpoints.digests(target) == expected


@pytest.mark.parametrize("again", ["the same job", "another job"])
def test_what_a_kill_after_the_rename_leaves_is_no_obstacle(
    again: str, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    streammerge.merge(source, target, **OPTIONS)
    monkeypatch.undo()
    assert (staging_of(target) / "journal").exists()
    target.rename(target.with_name("used"))
    options = OPTIONS if again == "the same job" else {"max_shard_size": 1000}
    streammerge.merge(source, target, **options)
    assert_same_tensors(load_directory(target), STATE)
    assert not staging_of(target).exists()


# --- targets that nothing can be renamed to -------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What looks like the root of a new file system."""
    folder = tmp_path / "mount"
    (folder / "lost+found").mkdir(parents=True)
    ismount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(folder) or ismount(path))
    return folder


def result_in(mount: Path) -> dict[str, str]:
    shutil.rmtree(mount / "lost+found")
    return checkpoints.digests(mount)


def test_a_mount_point_is_filled(source: Path, mount: Path, expected: dict[str, str]) -> None:
    seen = []

    def progress(state: Progress) -> None:
        seen.append({path.name for path in mount.iterdir()})

    report = streammerge.merge(source, mount, progress=progress, **OPTIONS)

    assert {frozenset(names) for names in seen} == {frozenset({".streammerge", "lost+found"})}
    assert result_in(mount) == expected
    assert report.warnings[-1] == (
        f"{mount}: a mount point, so its files did not appear all at once; the index, or the only "
        "file of weights, came last: until then nothing took it for a model"
    )


@pytest.mark.parametrize("many", [False, True])
def test_what_makes_a_model_comes_last(
    many: bool, source: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    rename, fsync = os.rename, os.fsync

    def record_rename(old: str, new: str) -> None:
        rename(old, new)
        events.append(os.path.relpath(new, mount))

    def record_fsync(fd: int) -> None:
        fsync(fd)
        events.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), mount))

    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "fsync", record_fsync)
    streammerge.merge(source, mount, **(OPTIONS if many else {"workers": 1}))
    weights = WEIGHTS if many else []
    last = "model.safetensors.index.json" if many else "model.safetensors"
    moves = [*weights, "config.json", "tokenizer", "fsync .", last, "fsync ."]
    assert events[-len(moves) :] == moves


@pytest.mark.parametrize("moved", range(len(WEIGHTS) + 4))
@pytest.mark.parametrize("killed", [False, True])
def test_moving_in_is_interrupted(
    moved: int,
    killed: bool,
    source: Path,
    mount: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure takes back what was moved, a kill leaves it; the same command goes on from both."""
    rename, done = os.rename, 0
    complete = moved == len(WEIGHTS) + 3  # and the config, the tokenizer, the index

    def fail(old: str, new: str) -> None:
        nonlocal done
        done += 1
        if done == moved + 1:
            raise OSError(5, "Input/output error")
        rename(old, new)

    with monkeypatch.context() as patch:
        if killed:  # nothing is taken back
            patch.setattr("streammerge.publisher.moved_entries", lambda _: [])
        patch.setattr(os, "rename", fail)
        if not complete:
            with pytest.raises(TargetError, match="Input/output error"):
                streammerge.merge(source, mount, **OPTIONS)
        else:  # published, but not cleaned up
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            streammerge.merge(source, mount, **OPTIONS)
    found = {path.name for path in mount.iterdir()} - {"lost+found", ".streammerge"}
    assert len(found) == (moved if killed or complete else 0)
    finished = read_written(str(mount / ".streammerge" / "journal"))
    streammerge.merge(source, mount, **OPTIONS)
    assert result_in(mount) == expected
    assert all(file.lies_in(str(mount)) for file in finished)


def test_what_was_moved_in_needs_no_room_again(
    source: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail(old: str, new: str) -> None:
        if Path(new).name == WEIGHTS[2]:
            raise OSError(5, "Input/output error")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr("streammerge.publisher.moved_entries", lambda _: [])  # as by a kill
        patch.setattr(os, "rename", fail)
        with pytest.raises(TargetError, match="Input/output error"):
            streammerge.merge(source, mount, **OPTIONS)
    assert (mount / WEIGHTS[1]).exists()
    files = [path for path in mount.rglob("*") if path.is_file()]
    there = sum(path.stat().st_blocks * 512 for path in files)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1))
    assert missing_space(str(mount), there + 1) == 1


def test_what_others_look_for_is_gone(source: Path, target: Path) -> None:
    """A process that lives on, of several of which the first was killed, ends at its next file."""
    interrupt(source, target, after=2)
    token = staging_of(target) / "token"
    earlier = token.read_text()
    seen = []
    streammerge.merge(source, target, progress=lambda _: seen.append(token.read_text()), **OPTIONS)
    assert earlier not in seen


def test_another_job_in_a_mount_point(
    source: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it was removed
        streammerge.merge(source, mount, **OPTIONS)
    with pytest.raises(TargetPathError, match="other options"):
        streammerge.merge(source, mount, max_shard_size=600)
    streammerge.merge(source, mount, max_shard_size=600, restart=True)
    shutil.rmtree(mount / "lost+found")
    assert_same_tensors(load_directory(mount), STATE)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mount_point_that_holds_something(overwrite: bool, source: Path, mount: Path) -> None:
    (mount / "model.safetensors").write_text("precious")
    with pytest.raises(TargetPathError, match=r"a mount point.*model\.safetensors"):
        streammerge.merge(source, mount, overwrite=overwrite, **OPTIONS)
    assert (mount / "model.safetensors").read_text() == "precious"


def test_what_appears_in_a_mount_point_is_not_replaced(source: Path, mount: Path) -> None:
    def progress(state: Progress) -> None:
        (mount / "config.json").write_text("precious")

    with pytest.raises(TargetPathError, match=r"config\.json"):
        streammerge.merge(source, mount, progress=progress, overwrite=True, **OPTIONS)
    assert (mount / "config.json").read_text() == "precious"


def test_what_is_put_into_a_folder_that_was_moved_stays(
    source: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the journal names is taken back for the next try."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        streammerge.merge(source, mount, **OPTIONS)
    (mount / "tokenizer" / "mine.txt").write_text("precious")
    with pytest.raises(TargetPathError, match="tokenizer"):
        streammerge.merge(source, mount, **OPTIONS)
    assert (mount / "tokenizer" / "mine.txt").read_text() == "precious"


# Runs as root of a user namespace of its own: mounts are private, and go with the process.
REAL_MOUNT = """
set -e
mount {mount} "$1"
"$2" -m streammerge merge "$3" "$1" --max-shard-size 256 --quiet
rm -rf "$1/lost+found"
cp -r "$1" "$4"
"""


def unshare(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return unshare('mount -t tmpfs tmpfs "$1"', folder).returncode == 0
        except FileNotFoundError:
            return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here")


@needs_mounts
@pytest.mark.parametrize("how", ["-t tmpfs tmpfs", '--bind "$1"'])
def test_a_real_mount_point(
    how: str, source: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    """Another file system, and the same one mounted again, which has no number of its own."""
    (tmp_path / "mount point").mkdir()
    arguments = (tmp_path / "mount point", sys.executable, source, tmp_path / "copy")
    done = unshare(REAL_MOUNT.format(mount=how), *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkpoints.digests(tmp_path / "copy") == expected


IN_A_FOLDER_OF_OTHERS = """
import os, sys
import streammerge
source, target, elsewhere = sys.argv[1:]
if os.getuid() == 0:
    # All that is imported on the way, as another user may not read the standard library.
    streammerge.merge(source, elsewhere)
    os.setgid(65534)
    os.setuid(65534)
report = streammerge.merge(source, target, max_shard_size=256)
print(*report.warnings)
"""


def test_a_target_in_a_folder_that_cannot_be_written(
    source: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    """As an administrator gives one to a user."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "place", "merged")
        target.mkdir(parents=True)
        shutil.copytree(source, Path(folder, "source"))
        os.chmod(folder, 0o755)
        target.chmod(0o777)
        target.parent.chmod(0o555)
        arguments = (Path(folder, "source"), target, tmp_path / "elsewhere")
        done = subprocess.run(
            [sys.executable, "-c", IN_A_FOLDER_OF_OTHERS, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        target.parent.chmod(0o755)
        assert done.stderr == ""
        assert f"{target}: in a folder that cannot be written, so" in done.stdout
        assert checkpoints.digests(target) == expected


# --- random kills ---------------------------------------------------------------------------------


def test_a_few_random_kills(tmp_path: Path) -> None:
    """The script makes a hundred when nobody waits for it."""
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "kill_and_resume.py"),
            *("--kills", "5", "--size", "64MB", "--scratch", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Every result byte-identical" in done.stdout
