"""Where benchmarks keep their sources, and what their scripts have in common."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from process_trees import Contender, run_well
from report import HERE


class Workspace:
    """A folder on the disk that is measured.

    Attributes:
        folder: holds the sources, which are made once and used again.
        target: where mergers write, one after the other, in a folder for nothing else.
    """

    def __init__(self, folder: Path, target_folder: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Emptied again and again, so it must be none that a person has.
        self.target = (target_folder or folder).resolve() / "benchmark-output" / "merged"
        self.target.parent.mkdir(parents=True, exist_ok=True)
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


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, names: Collection[str]
) -> argparse.Namespace:
    """Add the options that the benchmarks share, and parse the command line.

    Args:
        parser: Of a benchmark, with the options of its own.
        argv: The arguments; None for those of the process.
        names: What it measures, of which some may be chosen.
    """
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("benchmark-data"),
        metavar="DIR",
        help="folder for checkpoints, which are used again, and for what is merged",
    )
    parser.add_argument(
        "--target-dir",
        type=Path,
        metavar="DIR",
        help="merge into a folder below this one, such as /dev/shm, to leave the disk out",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds of small checkpoints")
    parser.add_argument("--update", action="store_true", help="keep the result in README.md")
    args = parser.parse_args(argv)
    for option, given in (("--quick", args.quick), ("--target-dir", args.target_dir)):
        if given and args.update:
            parser.error(f"{option} is for trying: it keeps nothing")
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    if unknown := [name for name in args.names if name not in names]:
        parser.error(f"{unknown[0]} is none of {', '.join(names)}")
    args.rounds = 2 if args.quick else args.rounds
    return args


def announce(what: str) -> Callable[[int, Contender], None]:
    """Return what tells about each run of some rounds."""
    return lambda number, contender: say(f"round {number + 1}, {what}: {contender.name}")


def say(message: str) -> None:
    """Tell what is going on."""
    print(message, file=sys.stderr, flush=True)
