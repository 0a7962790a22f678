"""The command line: arguments, what is shown, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import FrameType
from typing import NoReturn

import streammerge
from streammerge.adapt import DTYPES
from streammerge.errors import StreamMergeError, TargetError, UsageError
from streammerge.formats import describe
from streammerge.pipeline import check_plan_target, merge
from streammerge.planner import DEFAULT_MEMORY, DEFAULT_SHARD_SIZE, plan
from streammerge.progress import ProgressDisplay
from streammerge.publisher import missing_space, resolve_target
from streammerge.render import (
    checkpoint_json,
    checkpoint_text,
    difference_lines,
    plan_json,
    plan_text,
    report_json,
    report_text,
)
from streammerge.replicas import DEVICES, MODES

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DIFFERENT = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_OVERVIEW = """\
usage: streammerge COMMAND ...

Merge sharded training checkpoints into a Hugging Face directory, streaming.

commands:
  merge SRC [SRC ...] DST   merge a checkpoint into the new directory DST
  inspect SRC [SRC ...]     show what a checkpoint holds, without reading its data

'streammerge COMMAND --help' shows the options of a command.

exit codes: 0 done, 1 failed, 2 wrong usage, 3 contents differ, 130 interrupted,
143 terminated
"""


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that everything is cleaned up."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process if not given.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that the terminal cannot show
    try:
        with _SigtermAsException():
            code = _dispatch(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe can be handled
            return code
    except SystemExit as error:  # argparse, after --help
        return int(error.code or 0)
    except StreamMergeError as error:
        if debug:
            traceback.print_exc()
        return _fail(
            str(error),
            error.hint,
            as_json,
            EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED,
        )
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was published", None, as_json, EXIT_INTERRUPTED)
    except _Terminated:
        return _fail("terminated; nothing was published", None, as_json, EXIT_TERMINATED)
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(
            f"unexpected {type(error).__name__}: {error}",
            "run it again with --debug and report what it shows",
            as_json,
            EXIT_FAILED,
        )


def merge_parser() -> argparse.ArgumentParser:
    """The arguments of ``merge``."""
    parser = _Parser(
        prog="streammerge merge",
        usage="streammerge merge SRC [SRC ...] DST [options]",
        description="Merge a sharded checkpoint into a Hugging Face directory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        default=[],
        metavar="SRC ... DST",
        help="directories of the checkpoint (or a parent of the only one below it), then the "
        "directory to create",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--dtype",
        choices=DTYPES,
        default="keep",
        help="convert floating-point tensors (default: keep)",
    )
    output.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=DEFAULT_SHARD_SIZE,
        help="largest safetensors file, as 5GB or 4GiB (default: %(default)s)",
    )
    output.add_argument(
        "--raw",
        action="store_true",
        help="write exactly what the checkpoint holds: names, ties, dtypes (today the default)",
    )
    output.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    output.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--replicas",
        choices=MODES,
        default="check",
        help="copies that ranks hold of one value: check them (default), go on with the first "
        "rank's, or check the copies of sharded weights (HSDP) too",
    )
    checks.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where copies are compared (default: a GPU, if there is one and enough to compare)",
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--memory",
        metavar="SIZE",
        default=DEFAULT_MEMORY,
        help="all buffers together (default: %(default)s)",
    )
    running.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads that copy (default: number of cores, at most 4)",
    )
    _add_common(parser)
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    """The arguments of ``inspect``."""
    parser = _Parser(
        prog="streammerge inspect",
        usage="streammerge inspect SRC [SRC ...] [options]",
        description="Show what a checkpoint holds: layout, meshes, tensors, totals.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="*", default=[], metavar="SRC", help="directories of the checkpoint"
    )
    _add_common(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    common = parser.add_argument_group("messages")
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    volume = common.add_mutually_exclusive_group()
    volume.add_argument("--quiet", action="store_true", help="only errors")
    volume.add_argument("--verbose", action="store_true", help="more details")
    common.add_argument("--debug", action="store_true", help="show tracebacks")


def _merge(args: argparse.Namespace) -> int:
    *sources, target = args.paths
    if not sources:
        raise UsageError(
            f"one path given ({target}), but a source and a target are needed",
            hint="streammerge merge SRC DST",
        )
    if args.raw and args.dtype != "keep":
        raise UsageError("--raw keeps dtypes, so it cannot go with --dtype")
    if args.dry_run:
        return _dry_run(args, sources, target)
    # Threads are ours; a pool inside torch on top of them would only add memory.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    silent = args.quiet or sys.stderr is None or (args.json and not sys.stderr.isatty())
    with nullcontext() if silent else ProgressDisplay(sys.stderr) as progress:
        report = merge(
            sources,
            target,
            dtype=args.dtype,
            max_shard_size=args.max_shard_size,
            memory=args.memory,
            workers=args.workers,
            device=args.device,
            replicas=args.replicas,
            overwrite=args.overwrite,
            progress=progress,
        )
    for line in difference_lines(report.comparison) if report.comparison else ():
        print(f"streammerge: warning: {line}", file=sys.stderr)  # also with --quiet
    if args.json:
        _print_json(report_json(report))
    elif not args.quiet:
        print(report_text(report, verbose=args.verbose))
    return EXIT_DONE


def _dry_run(args: argparse.Namespace, sources: list[str], target: str) -> int:
    decided = plan(
        describe(sources),
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        memory=args.memory,
        workers=args.workers,
    )
    path, refusal = os.path.abspath(target), None
    try:
        path = resolve_target(target)
        check_plan_target(decided, path, args.overwrite)
    except TargetError as error:
        refusal = str(error)
    lacking = missing_space(path, decided.disk_nbytes)
    if args.json:
        _print_json(plan_json(decided, path, lacking, refusal))
    elif not args.quiet:
        print(plan_text(decided, path, lacking, refusal, verbose=args.verbose))
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    checkpoint = describe(args.paths)
    if args.json:
        _print_json(checkpoint_json(checkpoint))
    elif not args.quiet:
        print(checkpoint_text(checkpoint))
    return EXIT_DONE


_COMMANDS = {"merge": (merge_parser, _merge), "inspect": (inspect_parser, _inspect)}


def _dispatch(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(f"streammerge {streammerge.__version__}")
        return EXIT_DONE
    # Options may stand anywhere, so also before the command.
    at = next((i for i, argument in enumerate(arguments) if argument in _COMMANDS), None)
    if at is None:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(_OVERVIEW, end="")
            return EXIT_DONE if arguments else EXIT_USAGE
        word = next((a for a in arguments if not a.startswith("-")), arguments[0])
        raise UsageError(f"unknown command {word!r}", hint="streammerge --help")
    make_parser, command = _COMMANDS[arguments[at]]
    arguments = arguments[:at] + arguments[at + 1 :]
    # parse_intermixed_args takes names after "--" for options all the same.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = make_parser()
    args = parser.parse_intermixed_args(arguments[:end])
    args.paths = [*args.paths, *arguments[end + 1 :]]
    if not args.paths:
        parser.error("no SRC given")
    return command(args)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _fail(message: str, hint: str | None, as_json: bool, code: int) -> int:
    line = " ".join(message.split())
    print(f"streammerge: error: {line}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    if as_json:
        _print_json({"error": line, "hint": hint, "exit_code": code})
    return code


class _SigtermAsException:
    """Raises `_Terminated` on SIGTERM inside the block (in the main thread)."""

    def __enter__(self) -> None:
        self._previous: object = None
        with suppress(ValueError):  # not the main thread: signals are somebody else's
            self._previous = signal.signal(signal.SIGTERM, self._raise)

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated
