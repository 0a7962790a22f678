"""Merges by processes that real torchrun starts: on this machine, and on two of its making.

A start takes seconds, so a few of them do everything.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from jobs import TESTS
from test_memory import make
from torch.distributed.tensor import Shard

from streammerge.cli import main
from streammerge.journal import read_written
from streammerge.target import staging_path

TIMEOUT_SECONDS = 90
MIB = 2**20
SHARDS = ["--max-shard-size", "1MB"]
GO_ON = "the same command goes on where it stopped"


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"} | more


class Torchrun:
    """A torchrun with the test's job; all of its processes end with the block."""

    def __init__(
        self, *options: str, job: Sequence[str | Path] = (), before: Sequence[str] = (), **env: str
    ) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        self._command = [*before, *command, str(TESTS / "torchrun_job.py"), *map(str, job)]
        self._env = environment(**env)

    def __enter__(self) -> Torchrun:
        self.process = subprocess.Popen(
            self._command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        # Its workers have sessions of their own, and end when it is told to.
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and what streammerge said."""
        output, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
        lines = output.splitlines()
        if self.process.returncode not in (0, 1):
            print(output)
        return self.process.returncode, [
            line for line in lines if line.startswith(("streammerge: ", "hint: "))
        ]


# --- checkpoints ----------------------------------------------------------------------------------


def build(rank: int) -> dict[str, torch.Tensor]:
    """Weights that are copied, and others that need bands; buffers with copies everywhere."""
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for i in range(6):
        state[f"layers.{i}.weight"] = checkpoints.sharded(torch.randn(512, 512))
        state[f"layers.{i}.wide"] = checkpoints.sharded(torch.randn(100, 600), (Shard(1),))
        state[f"layers.{i}.buffer"] = torch.randn(3000)
    return state


def build_differing(rank: int) -> dict[str, torch.Tensor]:
    """Two ranks hold another value, of keys that are far apart."""
    state = build(rank)
    if rank == 2:
        state["layers.0.buffer"][17] += 1
    if rank in (1, 3):
        state["layers.5.buffer"][[100, 2000]] += 1
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    checkpoints.save_ranks(folder / "source", build)
    (folder / "source" / "huggingface").mkdir()
    (folder / "source" / "huggingface" / "config.json").write_text("{}")
    return folder / "source"


@pytest.fixture(scope="module")
def differing(folder: Path) -> Path:
    checkpoints.save_ranks(folder / "differing", build_differing)
    return folder / "differing"


@pytest.fixture(scope="module")
def alone(source: Path, folder: Path) -> dict[str, str]:
    """Digests of what one process writes."""
    assert main(["merge", str(source), str(folder / "alone"), *SHARDS, "--quiet"]) == 0
    return checkpoints.digests(folder / "alone")


def finished_files(target: Path) -> list[Any]:
    staging = Path(staging_path(str(target)))
    written = read_written(str(staging / "journal"))
    return [file for file in written if file.lies_in(str(staging / "merged"))]


# --- all that needs no accident: one start --------------------------------------------------------


class End:
    """How a command line ended in one process."""

    def __init__(self, path: Path) -> None:
        noted = json.loads(Path(f"{path}.json").read_text())
        self.code: int = noted["code"]
        self.memory: int = noted["peak"] - noted["before"]
        self.shown: list[list[Any]] = noted["shown"]
        self.out = Path(f"{path}.out").read_text()
        self.err = Path(f"{path}.err").read_text()


def interrupt_one_process(source: Path, target: Path) -> None:
    """Leave what a single process has finished that was interrupted."""
    code = (
        "import sys\n"
        "from streammerge import journal\n"
        "from streammerge.cli import main\n"
        "record, left = journal.Journal.record_written, [2]\n"
        "def record_some(self, *files):\n"
        "    if left[0] == 0: raise KeyboardInterrupt\n"
        "    left[0] -= 1\n"
        "    record(self, *files)\n"
        "journal.Journal.record_written = record_some\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "merge", str(source), str(target), *SHARDS, "--workers", "1"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 130
    assert len(finished_files(target)) == 2


@pytest.fixture(scope="module")
def ends(
    source: Path, differing: Path, alone: dict[str, str], folder: Path
) -> dict[str, list[End]]:
    """How some command lines ended in each of two processes."""
    make(folder / "large", "300MB", 4, "shard1", sparse=True, tensors=14)
    interrupt_one_process(source, folder / "continued")
    first = ["--replicas", "first"]
    steps = {
        "copied": ["merge", source, folder / "copied", *SHARDS],
        "cast": ["merge", source, folder / "cast", *SHARDS, "--dtype", "bfloat16", "--quiet"],
        "continued": ["merge", source, folder / "continued", *SHARDS, "--quiet"],
        "differ": ["merge", differing, folder / "differ", *SHARDS],
        "json": ["merge", differing, folder / "json", *SHARDS, *first, "--json"],
        "dry": ["merge", source, folder / "dry", "--dry-run"],
        "absent": ["merge", folder / "nothing", folder / "absent"],
        "in the way": ["merge", source, folder / "alone", "--json"],
        "usage": ["merge", source, folder / "usage", "--bogus"],
        "large": ["merge", folder / "large", folder / "large merged", "--quiet"],
        "inspect": ["inspect", source],
        "help": ["merge", "--help"],
    }
    listed = [(name, list(map(str, arguments))) for name, arguments in steps.items()]
    options = ["--standalone", "--nproc-per-node", "2"]
    with Torchrun(*options, STEPS=json.dumps(listed), STEPS_FOLDER=str(folder)) as torchrun:
        assert torchrun.end() == (0, [])
    shutil.rmtree(folder / "large merged")
    return {name: [End(folder / f"{name}.{rank}") for rank in range(2)] for name in steps}


def test_the_same_bytes(ends: dict[str, list[End]], folder: Path, alone: dict[str, str]) -> None:
    first, second = ends["copied"]
    assert (first.code, second.code) == (0, 0)
    assert checkpoints.digests(folder / "copied") == alone
    assert f"{folder}/copied: 18 tensors, " in first.out
    warnings = first.err.splitlines()
    assert len(warnings) == 2
    assert all(line.startswith("streammerge: warning: ") for line in warnings)
    assert (second.out, second.err) == ("", "")


def test_the_same_bytes_converted(ends: dict[str, list[End]], source: Path, folder: Path) -> None:
    assert [end.code for end in ends["cast"]] == [0, 0]
    options = [*SHARDS, "--dtype", "bfloat16", "--quiet"]
    assert main(["merge", str(source), str(folder / "cast alone"), *options]) == 0
    assert checkpoints.digests(folder / "cast") == checkpoints.digests(folder / "cast alone")


def test_both_have_written(ends: dict[str, list[End]], folder: Path) -> None:
    """All progress is shown by the first, and reaches the end."""
    first, second = ends["copied"]
    total = 4 * 6 * (512 * 512 + 100 * 600 + 3000)
    assert second.shown == []
    for phase, expected in (("compare", 4 * 6 * 3000 * 4), ("write", total)):
        shown = [(done, of) for name, done, of in first.shown if name == phase]
        assert {of for _, of in shown} == {expected}
        assert shown[-1] == (expected, expected)
        assert [done for done, _ in shown] == sorted(done for done, _ in shown)


def test_one_process_is_continued_by_two(
    ends: dict[str, list[End]], folder: Path, alone: dict[str, str]
) -> None:
    assert [end.code for end in ends["continued"]] == [0, 0]
    assert checkpoints.digests(folder / "continued") == alone


def test_copies_that_differ(ends: dict[str, list[End]], folder: Path) -> None:
    """Each process finds one of the keys; the first names both."""
    first, second = ends["differ"]
    assert (first.code, second.code) == (1, 1)
    assert first.err.splitlines() == [
        "streammerge: error: key 'layers.0.buffer': rank 2 holds another value than rank 0 (first "
        "at index [17]) (and 1 more keys: 'layers.5.buffer')",
        "hint: --replicas first takes the first rank's value of each such key",
    ]
    assert (first.out, second.out, second.err) == ("", "", "")
    assert not (folder / "differ").exists()
    assert not Path(staging_path(str(folder / "differ"))).exists()


def test_differences_of_all_are_reported(
    ends: dict[str, list[End]], differing: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ends["json"]
    assert (first.code, second.code, second.out, second.err) == (0, 0, "", "")
    report = json.loads(first.out)
    options = [*SHARDS, "--replicas", "first", "--json"]
    assert main(["merge", str(differing), str(folder / "json alone"), *options]) == 0
    expected = json.loads(capsys.readouterr().out)
    for varies in ("target", "seconds", "bytes_per_second", "peak_memory"):
        del report[varies], expected[varies]
    assert report == expected
    assert "layers.5.buffer" in first.err
    assert "layers.0.buffer" in first.err
    assert checkpoints.digests(folder / "json") == checkpoints.digests(folder / "json alone")


def test_a_dry_run_is_printed_once(ends: dict[str, list[End]], folder: Path) -> None:
    first, second = ends["dry"]
    assert (first.code, second.code) == (0, 0)
    assert f"{folder}/dry" in first.out
    assert (second.out, second.err) == ("", "")
    assert not (folder / "dry").exists()


def test_inspect_is_printed_once(ends: dict[str, list[End]]) -> None:
    first, second = ends["inspect"]
    assert (first.code, second.code) == (0, 0)
    assert "layers.0.weight" in first.out or "18" in first.out
    assert (second.out, second.err) == ("", "")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("absent", 1, "nothing: no such directory"),
        ("in the way", 1, "exists and is not empty"),
        ("usage", 2, "unrecognized arguments: --bogus"),
    ],
)
def test_bad_input_is_said_once(
    name: str, code: int, said: str, ends: dict[str, list[End]]
) -> None:
    first, second = ends[name]
    assert (first.code, second.code) == (code, code)
    error, *hints = first.err.splitlines()
    assert error.startswith("streammerge: error: ")
    assert said in error
    assert all(line.startswith("hint: ") for line in hints)
    assert len(hints) <= 1
    assert (second.out, second.err) == ("", "")
    if name == "in the way":
        assert json.loads(first.out)["exit_code"] == 1


def test_memory_of_each_process(ends: dict[str, list[End]]) -> None:
    """Over what torch takes: buffers of 16 MiB, and what a process takes anyway."""
    for end in ends["large"]:
        assert end.code == 0, end.err
        assert end.memory <= (16 + 32) * MIB, f"{end.memory / MIB:.0f} MiB"


# --- accidents ------------------------------------------------------------------------------------


@contextmanager
def two_machines() -> Iterator[tuple[str, list[list[str]]]]:
    """The address of the first, and what to write before a command for it to run on each.

    Where that is allowed they are network namespaces with a cable between them.
    """
    names = [f"streammerge-{os.getpid()}-{i}" for i in range(2)]
    wires = [f"sm{os.getpid() % 10**6}-{i}" for i in range(2)]
    script = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", wires[0], "type", "veth", "peer", "name", wires[1]],
    ]
    for i, (name, wire) in enumerate(zip(names, wires, strict=True)):
        script += [
            ["ip", "link", "set", wire, "netns", name],
            ["ip", "-n", name, "addr", "add", f"10.77.0.{1 + i}/24", "dev", wire],
            ["ip", "-n", name, "link", "set", wire, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        done = [subprocess.run(step, capture_output=True, check=False) for step in script]
        allowed = all(step.returncode == 0 for step in done)
    except OSError:
        allowed = False
    try:
        if allowed:
            yield "10.77.0.1", [["ip", "netns", "exec", name] for name in names]
        else:
            yield "127.0.0.1", [[], []]
    finally:
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_one_of_three_is_killed_and_two_machines_go_on(
    source: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "merged"
    merge = ["merge", source, target, *SHARDS, "--workers", "1", "--quiet"]
    started = time.monotonic()
    options = ["--standalone", "--nproc-per-node", "3"]
    with Torchrun(*options, job=merge, FAULT="6", FAULT_RANK="1") as torchrun:
        code, said = torchrun.end()
    assert time.monotonic() - started < TIMEOUT_SECONDS
    assert code == 1
    error, hint = said
    assert error.startswith("streammerge: error: process 1 of 3 (")
    assert error.endswith(") is gone without a word")
    assert hint.startswith("hint: ")
    assert hint.endswith(GO_ON)
    assert not target.exists()
    finished = finished_files(target)
    assert 0 < len(finished) < len(alone) - 2

    with two_machines() as (address, machines), ExitStack() as running:
        port = free_port()
        nodes = [
            running.enter_context(
                Torchrun(
                    *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"),
                    *("--master-addr", address, "--master-port", str(port)),
                    job=merge,
                    before=before,
                )
            )
            for rank, before in enumerate(machines)
        ]
        assert [node.end() for node in nodes] == [(0, []), (0, [])]
    assert checkpoints.digests(target) == alone
    for file in finished:
        assert file.lies_in(str(target))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_gone_on_by_one_process(
    number: signal.Signals, source: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "merged"
    merge = ["merge", source, target, *SHARDS, "--workers", "1", "--quiet"]
    options = ["--standalone", "--nproc-per-node", "2"]
    with Torchrun(*options, job=merge, FAULT="0", FAULT_RANK="0") as torchrun:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not finished_files(target) and time.monotonic() < deadline:
            time.sleep(0.05)
        torchrun.process.send_signal(number)
        _, said = torchrun.end()
    assert said == [f"streammerge: error: merge interrupted; nothing was published; {GO_ON}"]
    finished = finished_files(target)
    assert finished
    assert not target.exists()
    assert main(list(map(str, merge))) == 0
    assert checkpoints.digests(target) == alone
    for file in finished:
        assert file.lies_in(str(target))
