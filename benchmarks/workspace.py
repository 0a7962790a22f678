"""Where benchmarks keep their sources, and what their scripts have in common."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from process_trees import Contender, run_well
from report import HERE


class Workspace:
    """A folder on the disk that is measured.

    Attributes:
        folder: holds the sources, which are made once and used again.
        target: where mergers write, one after the other, in a folder for nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.target = self.folder / "output" / "merged"
        # Installed packages have their bytecode compiled; a checkout need not.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(self.folder / "pycache")
        os.environ["PYTHONPATH"] = str(HERE.parent)

    def make(self, size: str, world_size: int, *options: str) -> Path:
        """Make a checkpoint, unless it is there already, and return its folder.

        Args:
            size, world_size, options: of `make_checkpoint`; they name the folder.
        """
        options = ("--size", size, "--world-size", str(world_size), *options)
        name = "-".join(option.lstrip("-") for option in options)
        path = self.folder / name
        if not path.exists():
            say(f"making {name}")
            partial = path.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            script = HERE / "make_checkpoint.py"
            jobs = str(os.cpu_count())
            run_well([sys.executable, script, partial, *options, "--jobs", jobs])
            partial.rename(path)
        return path


def add_options(parser: argparse.ArgumentParser, quick: str) -> None:
    """Add the options that the benchmarks share.

    Args:
        parser: Of a benchmark.
        quick: What ``--quick`` does.
    """
    parser.add_argument("--work", type=Path, default=Path("benchmark-data"), metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--update", action="store_true", help="keep the result in README.md")


def announce(what: str) -> Callable[[int, Contender], None]:
    """Return what tells about each run of some rounds."""
    return lambda number, contender: say(f"round {number + 1}, {what}: {contender.name}")


def say(message: str) -> None:
    """Tell what is going on."""
    print(message, file=sys.stderr, flush=True)
