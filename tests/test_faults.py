"""System calls that fail or do less than they were asked, each in turn; and full disks for real.

Whatever fails: one line that says so, exit code 1, the source untouched, the target absent, as it
was, or complete; and the same command then ends with the same bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from streammerge.cli import main
from streammerge.journal import Written, read_written
from streammerge.target import staging_path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 120

# Copied by the kernel, but for the last, which is stored with other strides.
STATE = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(4)} | {
    "odd": torch.arange(64.0).view(8, 8).t()
}
OPTIONS = ["--max-shard-size", "256", "--workers", "1", "--quiet"]

Digests = dict[str, str]


# Thousands of merges, each flushed to the disk several times: in memory, where there is a place.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield make_source(Path(folder, "source"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder on the file system of the source, where the kernel can copy."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def make_source(folder: Path) -> Path:
    checkpoints.save_plain(folder, [STATE] * 2)
    (folder / "huggingface" / "tokenizer").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "huggingface" / "tokenizer" / "vocab.txt").write_text("a\n")
    return folder


@pytest.fixture(scope="module")
def expected(source: Path) -> Digests:
    """Digests of what a merge writes in peace."""
    target = source.with_name("expected")
    assert merge(source, target) == 0
    return checkpoints.digests(target)


@pytest.fixture(scope="module")
def earlier(source: Path) -> Path:
    """An earlier result."""
    checkpoints.save_plain(source.with_name("less"), [{"w": torch.zeros(3)}])
    assert merge(source.with_name("less"), source.with_name("earlier")) == 0
    return source.with_name("earlier")


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def merge(source: Path, target: Path, *options: str) -> int:
    return main(["merge", str(source), str(target), *OPTIONS, *options])


def staging_of(target: Path) -> Path:
    return Path(staging_path(str(target)))


def finished_files(target: Path) -> list[Written]:
    merged = str(staging_of(target) / "merged")
    written = read_written(str(staging_of(target) / "journal"))
    return [file for file in written if file.lies_in(merged)]


# --- one call fails -------------------------------------------------------------------------------

READING = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EINTR)  # ENOENT says what is the case
WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.EINTR)
COPYING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EXDEV, errno.ETXTBSY)
CALLS = {
    "open": (*READING, errno.ENOENT, errno.EMFILE, errno.ENOSPC),
    "pread": READING,
    "preadv": READING,
    "fstat": READING,
    "stat": READING,
    "lstat": READING,
    "scandir": READING,
    "listdir": READING,
    "statvfs": READING,
    "copy_file_range": COPYING,
    "sendfile": COPYING,
    "lseek": (errno.EIO,),
    "pwrite": WRITING,
    "ftruncate": WRITING,
    "fsync": WRITING,
    "mkdir": WRITING,
    "rename": WRITING,
    "unlink": WRITING,
    "rmdir": WRITING,
}


INJECTED: Counter[str] = Counter()


class Fault:
    """Lets one call of ``os.<name>`` fail.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        self._lock = threading.Lock()
        self._patch = pytest.MonkeyPatch()
        self.calls = 0
        self.code = CALLS[name][number % len(CALLS[name])]

    def __enter__(self) -> Fault:
        real = getattr(os, self._name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls += 1
                fails = self.calls == self._number
            if fails:
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments, **options)

        self._patch.setattr(os, self._name, call)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    @property
    def happened(self) -> bool:
        return self.calls >= self._number


def refuse(code: int) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def interrupt(source: Path, target: Path, keep: int) -> None:
    """Leave what an interrupted merge leaves that had finished some of the weights."""
    with pytest.MonkeyPatch.context() as patch:
        # All weights are finished then.
        patch.setattr("streammerge.execution.write_side_files", refuse(errno.EIO))
        assert merge(source, target) == 1
    finished = sorted(finished_files(target), key=lambda file: file.name)
    assert len(finished) == len(STATE)
    for file in finished[keep:]:
        (staging_of(target) / "merged" / file.name).unlink()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("begin", ["new", "old", "interrupted", "without copy_file_range"])
def test_every_call_fails_once(
    begin: str,
    name: str,
    source: Path,
    expected: Digests,
    earlier: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = checkpoints.snapshot(source)
    options = ["--overwrite"] if begin == "old" else []
    if begin == "without copy_file_range":
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    number, happened = 1, True
    while happened:  # until there are fewer calls
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            target = Path(folder, "merged")
            if begin == "old":
                shutil.copytree(earlier, target)
            elif begin == "interrupted":
                interrupt(source, target, keep=number % len(STATE))
                capsys.readouterr()
            finished = finished_files(target)
            was = checkpoints.digests(target)

            with Fault(name, number) as fault:
                code = merge(source, target, *options)
            happened = fault.happened

            found = checkpoints.digests(target)
            assert found in ((expected,) if code == 0 else (was, expected))
            check_message(code, capsys.readouterr().err)
            if found != expected:
                finished += finished_files(target)
                assert merge(source, target, *options) == 0
                capsys.readouterr()
                assert checkpoints.digests(target) == expected
                assert os.listdir(folder) == ["merged"]
                for file in finished:
                    assert file.lies_in(str(target))
        INJECTED[name] += happened
        number += 1
    assert checkpoints.snapshot(source) == before


def check_message(code: int, text: str) -> None:
    lines = text.splitlines()
    assert code == (1 if lines else 0)
    if lines:
        assert len(lines) <= 2, text
        assert lines[0].startswith("streammerge: error: "), text
        assert not lines[0].startswith("streammerge: error: unexpected "), text
        assert lines[1:] == [] or lines[1].startswith("hint: "), text


def test_how_many_faults_were_injected() -> None:
    """Shown with ``-s``."""
    print(f"\n{INJECTED.total()} faults injected: {dict(INJECTED)}")
    if set(INJECTED) >= {"open", "pwrite", "rmdir"}:  # the tests above ran
        assert INJECTED.total() >= 1000
        assert INJECTED["pwrite"] >= 50


# --- calls that do less than they were asked ------------------------------------------------------


SHORT: dict[str, Callable[[Any, int], Callable[..., int]]] = {
    "preadv": lambda real, limit: (
        lambda fd, buffers, offset: real(fd, [buffers[0][:limit]], offset)
    ),
    "pwrite": lambda real, limit: lambda fd, data, offset: real(fd, data[:limit], offset),
    "copy_file_range": lambda real, limit: (
        lambda source, target, count, *offsets: real(source, target, min(count, limit), *offsets)
    ),
    "sendfile": lambda real, limit: (
        lambda target, source, offset, count: real(target, source, offset, min(count, limit))
    ),
}


@pytest.mark.parametrize("limit", [1, 7, 100])
@pytest.mark.parametrize("kernel", ["copy_file_range", "sendfile", "neither"])
def test_short_reads_and_writes(
    kernel: str, limit: int, source: Path, expected: Digests, scratch: Path
) -> None:
    used = set()

    def using(name: str, call: Callable[..., int]) -> Callable[..., int]:
        def use(*arguments: Any) -> int:
            used.add(name)
            return call(*arguments)

        return use

    refused = {"copy_file_range": [], "sendfile": ["copy_file_range"]}
    with pytest.MonkeyPatch.context() as patch:
        for name, make in SHORT.items():
            patch.setattr(os, name, using(name, make(getattr(os, name), limit)))
        for name in refused.get(kernel, ["copy_file_range", "sendfile"]):
            patch.setattr(os, name, refuse(errno.EXDEV))
        assert merge(source, scratch / "merged") == 0
    assert used == {"preadv", "pwrite"} | ({kernel} - {"neither"})
    assert checkpoints.digests(scratch / "merged") == expected


@pytest.mark.parametrize("name", ["copy_file_range", "sendfile"])
def test_a_copy_that_stops_half_way(
    name: str,
    source: Path,
    expected: Digests,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Some bytes are copied, then the disk is full; then some, then a way that does not work."""
    real, calls = getattr(os, name), 0
    code = errno.ENOSPC

    def copy_a_bit(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise OSError(code, os.strerror(code))
        return int(SHORT[name](real, 10)(*arguments))

    monkeypatch.setattr(os, name, copy_a_bit)
    if name == "sendfile":
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    merge(source, scratch / "full")
    capsys.readouterr()
    code = errno.EINVAL
    assert merge(source, scratch / "merged") == 0
    assert checkpoints.digests(scratch / "merged") == expected
    monkeypatch.undo()
    if not (scratch / "full").exists():
        assert merge(source, scratch / "full") == 0
    assert checkpoints.digests(scratch / "full") == expected


SIGNALLED_MERGE = """
import signal, sys, threading
from streammerge.cli import main

signal.signal(signal.SIGUSR1, lambda *_: None)
main_thread = threading.main_thread()
ended = threading.Event()
sent = 0
def disturb():
    global sent
    while not ended.wait(0.0002):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.ident:
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
                sent += 1
disturber = threading.Thread(target=disturb)
disturber.start()
code = main(sys.argv[1:])
ended.set()
disturber.join()
print(sent)
sys.exit(code)
"""


def test_signals_that_interrupt_calls(tmp_path: Path) -> None:
    """A handler of the caller's that does nothing: calls return early, or with EINTR."""
    source = tmp_path / "source"
    checkpoints.save_many(source, tensors=12, numel=500_000, world_size=2)
    options = ["--max-shard-size", "4MB", "--quiet"]
    assert main(["merge", str(source), str(tmp_path / "expected"), *options]) == 0
    done = run_python(SIGNALLED_MERGE, "merge", source, tmp_path / "merged", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20
    assert checkpoints.digests(tmp_path / "merged") == checkpoints.digests(tmp_path / "expected")


def run_python(
    code: str, *arguments: str | Path, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


# --- for real -------------------------------------------------------------------------------------

# Two files: one that has room, and a large one that has not.
UNEVEN = {"a": torch.ones(1000), "b": torch.arange(500_000.0)}
UNEVEN_OPTIONS = ["--max-shard-size", "2001kB", "--workers", "1", "--quiet"]

LIMITED_MERGE = """
import resource, sys
from streammerge.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    checkpoints.save_plain(tmp_path / "uneven", [UNEVEN] * 2)
    return tmp_path / "uneven"


def test_a_limit_of_the_file_size(uneven: Path, tmp_path: Path) -> None:
    """The process would get SIGXFSZ, which Python ignores."""
    target = tmp_path / "merged"
    arguments = ["merge", str(uneven), str(target), *UNEVEN_OPTIONS]
    done = run_python(LIMITED_MERGE, *arguments)
    assert done.returncode == 1
    error, *hints = done.stderr.splitlines()
    assert error.endswith("model-00002-of-00002.safetensors: File too large")
    assert not target.exists()
    (finished,) = finished_files(target)
    assert hints == ["hint: the same command goes on where it stopped"]
    assert main(arguments) == 0
    assert finished.lies_in(str(target))
    assert (target / "model-00002-of-00002.safetensors").stat().st_size > 2_000_000


# As root of a user namespace: a small file system, filled while the merge is at it; then grown.
FULL_DISK = """
set -e
mount -t tmpfs -o {limit} tmpfs "$1"
set +e
"$2" -c "$3" merge "$4" "$1/merged" {options} 2> "$5/stderr"
echo $? > "$5/code"
set -e
test ! -e "$1/merged"
cp -r "$1/.merged.streammerge" "$5/staging"
mount -o remount,size=100M,nr_inodes=1000 "$1"
"$2" -m streammerge merge "$4" "$1/merged" {options}
stat -c '%n %i' "$1"/merged/*.safetensors > "$5/inodes"
cp -r "$1/merged" "$5/merged"
"""
# The check of the free space is made at the beginning; another process may take it afterwards.
UNCHECKED_MERGE = """
import sys
import streammerge.target
from streammerge.cli import main
streammerge.target.missing_space = lambda *_: 0
sys.exit(main(sys.argv[1:]))
"""


def can_mount() -> bool:
    command = 'mount -t tmpfs tmpfs "$1"'
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                ["unshare", "-rm", "sh", "-c", command, "sh", folder],
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            return False
        return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here")
@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ("size=1M", "model-00002-of-00002.safetensors"),
        # The root, the staging directory, journal, token and directory in it, one file.
        ("nr_inodes=6", "model-00002-of-00002.safetensors"),
    ],
)
def test_a_full_disk(limit: str, name: str, uneven: Path, tmp_path: Path) -> None:
    """Of bytes or of inodes, for real; after it has grown, the same command goes on."""
    assert main(["merge", str(uneven), str(tmp_path / "expected"), *UNEVEN_OPTIONS]) == 0
    script = FULL_DISK.format(limit=limit, options=" ".join(UNEVEN_OPTIONS))
    (tmp_path / "mount").mkdir()
    (tmp_path / "seen").mkdir()
    arguments = (tmp_path / "mount", sys.executable, UNCHECKED_MERGE, uneven, tmp_path / "seen")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = tmp_path / "seen"
    assert (seen / "code").read_text() == "1\n"
    error, hint = (seen / "stderr").read_text().splitlines()
    assert error.endswith(f"{name}: No space left on device")
    go_on = "the same command goes on where it stopped"
    assert hint == f"hint: free some space and start again; {go_on}"
    assert checkpoints.digests(seen / "merged") == checkpoints.digests(tmp_path / "expected")
    (finished,) = read_written(str(seen / "staging" / "journal"))
    inodes = dict(line.rsplit(" ", 1) for line in (seen / "inodes").read_text().splitlines())
    assert inodes[str(tmp_path / "mount" / "merged" / finished.name)] == str(finished.inode)
