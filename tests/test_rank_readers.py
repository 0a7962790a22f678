"""Rank files read by several processes: the same result, and nothing left behind when one fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import rank_file, save_plain, save_ranks, sharded

import streammerge
from streammerge import CheckpointNotFoundError, SourceError, StreamMergeError, rank_readers
from streammerge.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / "data"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes help to read small checkpoints, too; all end with the test."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(rank_readers, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(rank_readers, "count_cores", lambda: 3)
    monkeypatch.setattr(subprocess, "Popen", start)
    yield processes
    assert [process.pid for process in processes if process.returncode is None] == []


def facts(checkpoint: Checkpoint) -> list[object]:
    """All that a checkpoint says, comparable."""
    found: list[object] = [
        (checkpoint.root, checkpoint.format, checkpoint.world_size, checkpoint.skipped)
    ]
    for file in checkpoint.files:
        members = file.members
        columns = (members.header_offsets, members.data_offsets, members.sizes, members.crcs)
        found.append((file.path, file.size, file.mtime_ns, file.inode, *map(list, columns)))
    for tensor in checkpoint.tensors:
        layout = tensor.layout
        fields = [getattr(layout, name) for name in layout.__slots__]
        found.append((tensor.name, tensor.dtype, tensor.shape, fields, tensor.conflicts))
        extents = tensor.extents
        found.append([list(extents.files), list(extents.members), list(extents.starts)])
        found.append([extents.strides, extents.conjugated])
    return found


def describe_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    with monkeypatch.context() as patch:
        patch.setattr(rank_readers, "BYTES_PER_PROCESS", 1 << 60)
        return facts(streammerge.describe(folder))


@pytest.mark.parametrize(
    "name",
    [
        "fsdp1_shardedtensor_origparams__t24",
        "fsdp2_hsdp_2x2__t213",
        "fsdp2_odd_storage__t213",
        "fsdp2_tp_3d_2x2x2__t213",
        "fsdp2_w4_legacy__t213",
        "toy_w12__t213",
    ],
)
def test_the_result_is_the_same(
    name: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = facts(streammerge.describe(DATA / name))
    assert len(started) == 2
    assert found == describe_alone(DATA / name, monkeypatch)


def test_ranks_with_other_keys_and_values(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipeline stages: the names change from rank to rank, and within what a process reads."""
    states: list[object] = []
    for rank in range(9):
        tensors = {f"stage.{rank // 2}.{i}": torch.ones(rank + 1, i) for i in range(3)}
        odd = {"t": torch.arange(6.0).view(2, 3).t(), "c": torch.ones(2, dtype=torch.cfloat).conj()}
        states.append({"model": {**tensors, **(odd if rank % 2 else {}), "flag": rank}, "step": 3})
    save_plain(tmp_path, states)
    found = facts(streammerge.describe(tmp_path))
    assert len(started) == 2
    assert found == describe_alone(tmp_path, monkeypatch)


def test_files_whose_names_do_not_say_how_many(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """Other processes do not miss the last rank either; only then is it known how many."""
    save_ranks(tmp_path, lambda rank: {"w": sharded(torch.ones(8, 2), sizes=(8,))}, world_size=8)
    for rank in range(8):
        rank_file(tmp_path, rank, 8).rename(tmp_path / f"{rank}.pt")
    assert streammerge.describe(tmp_path, pattern="{rank}.pt").world_size == 8
    (tmp_path / "7.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match="1 of 8 rank files missing: rank 7 "):
        streammerge.describe(tmp_path, pattern="{rank}.pt")
    assert len(started) == 4


def test_columns_that_are_equal_are_the_same(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4), "v": torch.full((2,), rank)} for rank in range(3)])
    paths = [str(rank_file(tmp_path, rank, 3)) for rank in range(3)]
    first, second, third = rank_readers.read_rank_files(paths)
    assert first.names is second.names is third.names
    assert first.members is third.members
    assert first.file.members.sizes is third.file.members.sizes
    assert first.file.members.crcs is not third.file.members.crcs
    assert (first.file.path, third.file.path) == (paths[0], paths[2])


# --- what can go wrong ---


def test_errors_are_the_same(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file by rank that has one, whoever reads it first."""
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(8)])
    for rank in (7, 6, 5, 3, 1, 0):
        if rank % 2:
            checkpoints.cut(rank_file(tmp_path, rank, 8), -5)
        else:
            checkpoints.replace_pickle(rank_file(tmp_path, rank, 8), b"\x80\x02cos\nsystem\n.")
        errors = []
        for nbytes in (1, 1 << 60):
            monkeypatch.setattr(rank_readers, "BYTES_PER_PROCESS", nbytes)
            with pytest.raises(StreamMergeError) as caught:
                streammerge.describe(tmp_path)
            errors.append((type(caught.value), str(caught.value), caught.value.hint))
        assert errors[0] == errors[1]
        assert str(rank_file(tmp_path, rank, 8)) in errors[0][1]
    assert len(started) == 10  # the first file is read before any process is started


@pytest.mark.parametrize(
    ("serve", "how"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("os._exit(7)", "status 7"),
        ("os.write(1, bytes([100]) + bytes(40))", "status 0"),
    ],
)
def test_a_process_that_ends_too_early(
    serve: str,
    how: str,
    tmp_path: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(4)])
    monkeypatch.setattr(
        rank_readers, "_PROGRAM", f"import os; os.read(0, 9999); os.write(1, b'\\n'); {serve}"
    )
    with pytest.raises(SourceError, match=f"has ended \\({how}\\)") as caught:
        streammerge.describe(tmp_path)
    assert str(caught.value).startswith(f"{rank_file(tmp_path, 2)}: ")
    assert caught.value.hint is not None
    assert len(started) == 2


@pytest.mark.parametrize(
    "executable",
    ["", None, "/nonexistent/python3", "/usr/bin/env", "not python", "{tmp}/python-that-exits"],
)
def test_where_no_process_can_be_started(
    executable: str | None,
    tmp_path: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Embedded Python, no memory for more processes: they are read here."""
    stub = tmp_path / "python-that-exits"
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    source = tmp_path / "source"
    save_plain(source, [{"w": torch.ones(4)} for _ in range(4)])
    expected = facts(streammerge.describe(source))
    assert len(started) == 2
    path = executable.format(tmp=tmp_path) if executable else executable
    monkeypatch.setattr(sys, "executable", path)
    assert facts(streammerge.describe(source)) == expected
    assert (len(started) > 2) == (path == str(stub))


def test_a_frozen_program_is_not_started_again(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(4)])
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    streammerge.describe(tmp_path)
    assert started == []


def test_processes_stop_when_nobody_reads(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(8)])
    files = rank_readers.read_rank_files([str(rank_file(tmp_path, rank, 8)) for rank in range(8)])
    next(files)
    next(files)
    assert len(started) == 2
    files.close()  # type: ignore[attr-defined]
    assert all(process.returncode is not None for process in started)


def test_in_a_program_of_many_threads(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(6)])
    expected = facts(streammerge.describe(tmp_path))
    results: list[list[object]] = []
    threads = [
        threading.Thread(target=lambda: results.append(facts(streammerge.describe(tmp_path))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# --- the processes themselves ---


def test_what_a_process_imports() -> None:
    """Not torch, not numpy, not the whole package: it starts at once and stays small."""
    program = rank_readers._PROGRAM.replace("serve()", "print(*sys.modules)")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(ROOT / "streammerge")],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.split()
    ours = {
        name.removeprefix("streammerge.") for name in modules if name.startswith("streammerge.")
    }
    assert ours == {
        "changes",
        "checkpoint",
        "cores",
        "dtypes",
        "entries",
        "errors",
        "names",
        "pickle_machine",
        "placement",
        "rank_readers",
        "torchfile",
        "unpickler",
    }
    assert not {"torch", "numpy", "subprocess", "site", "pickle", "threading"} & set(modules)


INTERRUPTED = """
import sys, time
from streammerge import rank_readers
from streammerge.cli import main
rank_readers.BYTES_PER_PROCESS = 1
rank_readers.count_cores = lambda: 3
rank_readers._PROGRAM = rank_readers._PROGRAM.replace("serve()", '''
import os, time
sys.stdout.buffer.write(b"\\\\n")
sys.stdout.flush()
sys.stderr.write(f"{os.getpid()}\\\\n")
sys.stderr.flush()
time.sleep(600)
''')
sys.exit(main(["inspect", sys.argv[1]]))
"""


def test_ctrl_c(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"w": torch.ones(4)} for _ in range(4)])
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    children = [int(process.stderr.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=20) == 130
    assert "Traceback" not in errors
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Even if it was killed; they cannot write any more then."""
    save_plain(tmp_path, [{f"w{i}": torch.ones(4) for i in range(500)} for _ in range(40)])
    program = INTERRUPTED.replace("time.sleep(600)", "serve()")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program.replace(
                "sys.exit", "rank_readers._receive = lambda *_: time.sleep(600)\nsys.exit"
            ),
            str(tmp_path),
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    with process.stderr:
        children = [int(process.stderr.readline()) for _ in range(2)]
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
