"""What torchrun starts in tests: some command lines of streammerge, one after the other.

Each process notes down what it said and how it ended. With ``FAULT`` in the environment, the
process of ``FAULT_RANK`` is killed after so many copies, and all are slow.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401  (the memory that it takes is known before the first merge)

from streammerge import cli, writer
from streammerge.progress import ProgressDisplay

SECONDS_PER_COPY = 0.1
RANK = int(os.environ["RANK"])


def peak() -> int:
    """Highest resident bytes so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Start `peak` again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Write stdout and stderr to files, also what is written by torch."""
    kept = os.dup(1), os.dup(2)
    for fd, suffix in ((1, ".out"), (2, ".err")):
        with Path(f"{path}{suffix}").open("wb") as file:
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)
            os.close(before)


def slowly(copy: Callable[..., None], kill_after: int | None) -> Callable[..., None]:
    """Copying that takes its time, until the process is killed."""
    copies = 0

    def copy_slowly(*arguments: Any) -> None:
        nonlocal copies
        copy(*arguments)
        copies += 1
        if copies == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SECONDS_PER_COPY)

    return copy_slowly


def run(name: str, arguments: list[str], folder: Path) -> None:
    """One command line, whose end is noted down in ``NAME.RANK.json``."""
    path = folder / f"{name}.{RANK}"
    shown: list[tuple[str, int, int]] = []

    class Display(ProgressDisplay):
        def __call__(self, progress: Any) -> None:
            shown.append((progress.phase, progress.done, progress.total))

    cli.ProgressDisplay = Display  # type: ignore[misc]
    forget_peak()
    before = peak()
    with recorded(path):
        code = cli.main(arguments)
    end = {"code": code, "before": before, "peak": peak(), "shown": shown}
    Path(f"{path}.json").write_text(json.dumps(end))


def main() -> int:
    """Run what ``STEPS`` lists; or the arguments, if there are any."""
    if "FAULT" in os.environ:
        mine = os.environ["FAULT_RANK"] == os.environ["RANK"]
        kill_after = int(os.environ["FAULT"]) if mine else None
        writer._copy_range = slowly(writer._copy_range, kill_after)
    if len(sys.argv) > 1:
        return cli.main(sys.argv[1:])
    steps = json.loads(os.environ["STEPS"])
    for name, arguments in steps:
        run(name, arguments, Path(os.environ["STEPS_FOLDER"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
