"""Runs the jobs that write checkpoints of real FSDP, and the command line on these."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# A job needs about 15 seconds. Its ranks print their stacks at a shorter deadline of their own.
JOB_TIMEOUT_SECONDS = 180
MERGE_TIMEOUT_SECONDS = 120


def run_job(script: str, root: Path, timeout: float = JOB_TIMEOUT_SECONDS) -> None:
    """Run one of the jobs, or fail with the end of its log.

    Args:
        script: file name.
        root: the directory that it writes to.
        timeout: seconds.
    """
    log = root / "job.log"
    environment = os.environ | {
        # A GPU would take FSDP1 off gloo, and a machine's own name may not resolve.
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, str(TESTS / script), str(root)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # The session holds the ranks too: none of them outlives a failure, a timeout or Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    if status != 0:
        tail = log.read_text(errors="replace")[-20_000:]
        pytest.fail(f"{script} ended with {status}:\n{tail}")


def run_merge(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m streammerge merge``."""
    return subprocess.run(
        [sys.executable, "-m", "streammerge", "merge", *map(str, arguments)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=MERGE_TIMEOUT_SECONDS,
        check=False,
    )


def merge(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same, where it has to succeed."""
    done = run_merge(*arguments)
    assert done.returncode == 0, done.stderr
    return done
