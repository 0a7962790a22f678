"""Runs whole processes, alone or in rounds, and says what they and their children took.

Times are those of the wall: until a process ends, and until what it wrote is on the disk. Memory is
read from ``/proc/PID/status`` of every process of the tree while it runs. ``VmHWM`` is what counts:
the ``ru_maxrss`` of a child starts with the peak of the process that forked it. Bytes are those of
``/proc/PID/io``, read when the process has ended but is not yet gone, which is when it has those of
its children too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.02  # seconds between two looks at the memory
KIB = 1024
ERROR_LINES = 20
_FIELD = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)
_LIMITED_SECONDS = 120  # for a run under a limit of memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a process; ``peak`` is the highest sum of both so far."""

    anonymous: int
    file_backed: int
    peak: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of all processes of a tree, at a time in seconds from its start."""

    seconds: float
    anonymous: int
    file_backed: int

    @property
    def resident(self) -> int:
        return self.anonymous + self.file_backed


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a tree of processes moved.

    Attributes:
        read, written: by system calls; not what is read through a memory map.
        from_disk, to_disk: what the disk had to give, or what was made dirty.
    """

    read: int
    written: int
    from_disk: int
    to_disk: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree of processes took.

    Attributes:
        code: exit code, negative for a signal.
        seconds: from start to end.
        durable_seconds: from start until what it wrote is on the disk.
        cpu: processor seconds.
        peaks: the highest resident bytes of each process.
        samples: memory over time.
        moved: bytes read and written.
        errors: the last lines of stderr.
    """

    code: int
    seconds: float
    durable_seconds: float
    cpu: float
    peaks: tuple[int, ...]
    samples: tuple[Sample, ...]
    moved: Bytes
    errors: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The highest resident bytes of all processes, summed."""
        return sum(self.peaks)

    @property
    def highest(self) -> Sample:
        """The sample with the most memory."""
        return max(self.samples, key=lambda sample: sample.resident, default=Sample(0, 0, 0))


class CommandFailed(Exception):
    """A command that is measured has failed."""


# --- /proc ---


def parse_fields(text: str) -> dict[str, int]:
    """Return the numbers of ``/proc/PID/status``, ``smaps_rollup`` or ``io``, without units."""
    return {name: int(number) for name, number in _FIELD.findall(text)}


def parse_status(text: str) -> Memory | None:
    """Return the memory that ``/proc/PID/status`` states; None for a process that has ended."""
    fields = parse_fields(text)
    if "VmHWM" not in fields:
        return None
    shared = fields["RssFile"] + fields["RssShmem"]
    return Memory(fields["RssAnon"] * KIB, shared * KIB, fields["VmHWM"] * KIB)


def parse_io(text: str) -> Bytes:
    """Return the bytes that ``/proc/PID/io`` states."""
    fields = parse_fields(text)
    return Bytes(
        fields["rchar"],
        fields["wchar"],
        fields["read_bytes"],
        fields["write_bytes"] - fields.get("cancelled_write_bytes", 0),
    )


def parse_parent(text: str) -> int:
    """Return the parent's process id from ``/proc/PID/stat``."""
    # The name, in parentheses, may hold anything.
    return int(text.rpartition(")")[2].split()[1])


class Tree:
    """A process and those that come from it, as they come and go."""

    def __init__(self, root: int) -> None:
        self._parents = {root: os.getpid()}  # of those inside
        self._outside = {os.getpid()}
        self.peaks: dict[int, int] = {}

    def look(self) -> tuple[int, int]:
        """Return the anonymous and file-backed resident bytes of all of them now."""
        self._find()
        memories = {pid: parse_status(_read(f"/proc/{pid}/status")) for pid in self._parents}
        anonymous = file_backed = 0
        for pid, memory in memories.items():
            # Between vfork and exec, a child is in the memory of its parent, which waits.
            if memory is None or memory == memories.get(self._parents[pid]):
                continue
            anonymous += memory.anonymous
            file_backed += memory.file_backed
            self.peaks[pid] = memory.peak
        return anonymous, file_backed

    def _find(self) -> None:
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._outside &= present
        for pid in sorted(present - self._parents.keys() - self._outside):
            stat = _read(f"/proc/{pid}/stat")
            if stat and (parent := parse_parent(stat)) in self._parents:
                self._parents[pid] = parent
            else:
                self._outside.add(pid)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --- one run ---


def run(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    data_limit: int | None = None,
    output: Path | None = None,
) -> Usage:
    """Run a command to its end, whether it fails or not.

    Args:
        command: The program and its arguments.
        environment: Variables to add to our own.
        data_limit: ``RLIMIT_DATA`` in bytes.
        output: The folder that it writes to, which is flushed as soon as it has ended. If None,
            nothing is waited for.
    """
    words = [str(word) for word in command]
    if data_limit is not None:
        # A thread that finds no memory when it starts makes CPython wait for it without end.
        limited = ["timeout", "--kill-after=5", str(_LIMITED_SECONDS)]
        words = [*limited, "prlimit", f"--data={data_limit}", *words]
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            words,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        ended: list[float] = []

        def wait() -> None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            ended.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        tree = Tree(process.pid)
        samples = []
        try:
            while not ended:
                anonymous, file_backed = tree.look()
                samples.append(Sample(time.perf_counter() - started, anonymous, file_backed))
                waiter.join(INTERVAL)
        except BaseException:
            process.kill()
            raise
        finally:
            waiter.join()
        durable = ended[0]
        if output is not None:
            flush(output)
            durable = time.perf_counter()
        moved = parse_io(_read(f"/proc/{process.pid}/io"))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # it is no child any more
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()[-ERROR_LINES:]
    return Usage(
        code=process.returncode,
        seconds=ended[0] - started,
        durable_seconds=durable - started,
        cpu=usage.ru_utime + usage.ru_stime,
        peaks=tuple(tree.peaks.values()),
        samples=tuple(samples[:-1] or samples),  # the last may be of a process that is dying
        moved=moved,
        errors=tuple(lines),
    )


def run_well(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> Usage:
    """Run a command that must not fail. Arguments as of `run`.

    Raises:
        CommandFailed: it did.
    """
    usage = run(command, environment=environment, output=output)
    if usage.code:
        words = shlex.join(map(str, command))
        raise CommandFailed(f"{words}: exit code {usage.code}\n" + "\n".join(usage.errors))
    return usage


# --- rounds ---


@dataclass(frozen=True, slots=True)
class Contender:
    """A command that is measured against others.

    Attributes:
        name: for people.
        command: what to run.
        target: what it writes, in a folder for nothing else, which is emptied before and after,
            and flushed to the disk when the command has ended. None if it writes nothing.
        sources: folders that it reads.
        environment: variables to add.
    """

    name: str
    command: tuple[str | Path, ...]
    target: Path | None
    sources: tuple[Path, ...] = ()
    environment: Mapping[str, str] | None = None


def measure_rounds(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    cold: bool = False,
    on_run: Callable[[int, Contender], None] | None = None,
) -> dict[str, list[Usage]]:
    """Run every contender once a round, in an order that changes.

    Ratios are to be taken within a round, as the speed of a disk drifts. Between runs the target is
    deleted and the deletion synced, so that each starts alike.

    Args:
        contenders: What to run.
        rounds: How often.
        cold: Put what is read out of the page cache before each run; else into it.
        on_run: Called before each run.

    Raises:
        CommandFailed: a contender failed.
    """
    runs: dict[str, list[Usage]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in rotated(contenders, number):
            if on_run is not None:
                on_run(number, contender)
            with emptied(contender.target):
                for source in contender.sources:
                    (evict if cold else read_once)(source)
                output = contender.target.parent if contender.target is not None else None
                usage = run_well(contender.command, contender.environment, output)
                runs[contender.name].append(usage)
    return runs


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Return the order of a round: each starts once, and every other round runs backwards."""
    start = number // 2 % len(contenders)
    order = [*contenders[start:], *contenders[:start]]
    return order if number % 2 == 0 else order[::-1]


@contextlib.contextmanager
def emptied(target: Path | None) -> Iterator[None]:
    """Have nothing in the folder of a target before and after, not even what a merge left there.

    Waits until the disk is idle again.
    """
    _empty_folder(target)
    try:
        yield
    finally:
        _empty_folder(target)


def _empty_folder(target: Path | None) -> None:
    if target is not None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
    os.sync()


# --- the page cache ---


def flush(folder: Path) -> None:
    """Wait until a folder and all that is below it are on the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_once(source: Path) -> int:
    """Bring all files of a folder into the page cache and return their bytes."""
    buffer = bytearray(1 << 20)
    total = 0
    for path in _files(source):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def evict(source: Path) -> None:
    """Put all files of a folder out of the page cache."""
    for path in _files(source):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())
