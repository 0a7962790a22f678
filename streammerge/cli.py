"""The command line: arguments, what is shown, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn

import streammerge
from streammerge.arguments import (
    LAYOUT_OPTIONS,
    check_parser,
    inspect_parser,
    merge_parser,
    upload_parser,
    verify_parser,
)
from streammerge.checkpoint import Checkpoint
from streammerge.checks.directory import check_directory
from streammerge.checks.findings import first_error
from streammerge.checks.model import check_model
from streammerge.errors import StreamMergeError, TargetError, UsageError, printable
from streammerge.execution import check_plan_target
from streammerge.formats import describe
from streammerge.pipeline import merge, plan, verify
from streammerge.processes import Processes, SaidElsewhere, Terminated, join
from streammerge.progress import ProgressDisplay
from streammerge.render import (
    checkpoint_json,
    checkpoint_text,
    crc_lines,
    difference_lines,
    findings_json,
    findings_text,
    plan_json,
    plan_text,
    report_json,
    report_text,
    upload_json,
    upload_text,
    verification_json,
    verification_text,
)
from streammerge.target import missing_space, resolve_target
from streammerge.upload import Upload, check_upload, upload

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
  verify REFERENCE MERGED   compare a merged directory with its checkpoint, value by value
  check DIR                 check that a merged directory holds together
  upload DIR REPO           upload a merged directory to the Hugging Face Hub

'streammerge COMMAND --help' shows the options of a command.

exit codes: 0 done, 1 failed, 2 wrong usage, 3 contents differ, 130 interrupted,
143 terminated
"""


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
            return _dispatch(arguments)
    except SystemExit as error:  # argparse, after --help
        return int(error.code or 0)
    except SaidElsewhere as elsewhere:
        if debug:
            traceback.print_exception(elsewhere.error)
        return _exit_code(elsewhere.error)
    except StreamMergeError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), error.hint, as_json, _exit_code(error))
    except KeyboardInterrupt as error:
        # A merge or an upload says itself what is done already, if anything is.
        message = str(error) or "interrupted; nothing was published"
        with _SignalsIgnored():  # a second Ctrl-C says nothing new
            return _fail(message, None, as_json, EXIT_INTERRUPTED)
    except Terminated as error:
        message = str(error) or "terminated; nothing was published"
        with _SignalsIgnored():
            return _fail(message, None, as_json, EXIT_TERMINATED)
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


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        return EXIT_TERMINATED
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _merge(args: argparse.Namespace, processes: Processes) -> int:
    *sources, target = args.paths
    if not sources:
        raise UsageError(
            f"one path given ({target}), but a source and a target are needed",
            hint="streammerge merge SRC DST",
        )
    if args.private and not args.push_to_hub:
        raise UsageError("--private goes with --push-to-hub")
    if args.dry_run:
        return _dry_run(args, sources, target) if processes.first else EXIT_DONE
    if args.push_to_hub and processes.first:
        # Hours of merging should not end without a token.
        check_upload(args.push_to_hub, private=args.private)
    with _progress(args, processes) as progress:
        report = merge(
            sources,
            target,
            **_reading(args),
            device=args.device,
            replicas=args.replicas,
            check_crc=args.check_crc,
            verify=args.verify,
            overwrite=args.overwrite,
            restart=args.restart,
            progress=progress,
            processes=processes,
            **_planning(args, processes),
        )
    if not processes.first:
        return EXIT_DONE
    for line in difference_lines(report.comparison) if report.comparison else ():
        _warn(line)  # also with --quiet
    for line in crc_lines(report.crcs) if report.crcs else ():
        _warn(line)
    if not args.quiet:
        for line in report.warnings:
            _warn(line)
    shown = not args.quiet and not args.json
    if shown:
        _show(report_text(report, verbose=args.verbose))  # before the upload, which may fail
    uploaded = _push(args, report.target, args.push_to_hub) if args.push_to_hub else None
    if args.json:
        _show_json(report_json(report) | {"upload": uploaded and upload_json(uploaded)})
    elif shown and uploaded:
        _show(upload_text(uploaded))
    return EXIT_DONE


def _progress(
    args: argparse.Namespace, processes: Processes | None = None
) -> AbstractContextManager[ProgressDisplay | None]:
    silent = args.quiet or sys.stderr is None or (args.json and not sys.stderr.isatty())
    silent = silent or (processes is not None and not processes.first)
    return nullcontext() if silent else ProgressDisplay(sys.stderr)


def _push(args: argparse.Namespace, directory: str, repo: str) -> Upload:
    progress = not args.quiet and sys.stderr is not None and sys.stderr.isatty()
    return upload(directory, repo, private=args.private, progress=progress)


def _reading(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `merge` that say how the checkpoint is read."""
    given = {name: getattr(args, name) for name in LAYOUT_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    return {"format": args.format, "options": options}


def _planning(args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    """The arguments of `plan`."""
    return {
        "max_shard_size": args.max_shard_size,
        "memory": args.memory,
        "workers": processes.default_workers if args.workers is None else args.workers,
        **_adaptation(args),
    }


def _adaptation(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "raw": args.raw,
        "assets": args.assets,
        "base": args.base,
        "names_from": args.names_from,
        "lora_mode": args.lora,
        "lora_alpha": args.lora_alpha,
        "rslora": args.rslora,
        "keep_packed": args.keep_packed,
        "transpose_experts": args.transpose_experts and args.transpose_experts == "yes",
        "untie": args.untie,
        "dtype": args.dtype,
        "keep_dtype": args.keep_dtype,
        "compat": args.compat,
    }


def _describe(
    args: argparse.Namespace, sources: list[str], target: str | None = None
) -> Checkpoint:
    reading = _reading(args)
    return describe(sources, format=reading["format"], target=target, **reading["options"])


def _dry_run(args: argparse.Namespace, sources: list[str], target: str) -> int:
    decided = plan(_describe(args, sources, target), **_planning(args, Processes()))
    path, refusal = os.path.abspath(target), None
    try:
        path = resolve_target(target)
        check_plan_target(decided, path, args.overwrite)
    except TargetError as error:
        refusal = str(error)
    lacking = missing_space(path, decided.disk_nbytes)
    if args.json:
        _show_json(plan_json(decided, path, lacking, refusal))
    elif not args.quiet:
        _show(plan_text(decided, path, lacking, refusal, verbose=args.verbose))
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    checkpoint = _describe(args, args.paths)
    if args.json:
        _show_json(checkpoint_json(checkpoint))
    elif not args.quiet:
        _show(checkpoint_text(checkpoint))
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    *reference, merged = args.paths
    if not reference:
        raise UsageError(
            f"one path given ({merged}), but a reference and a merged directory are needed",
            hint="streammerge verify REFERENCE MERGED",
        )
    adaptation = _adaptation(args)
    if args.dtype is None:
        del adaptation["dtype"]
    with _progress(args) as progress:
        found = verify(
            reference,
            merged,
            **_reading(args),
            rtol=args.rtol,
            atol=args.atol,
            memory=args.memory,
            workers=args.workers,
            device=args.device,
            progress=progress,
            **adaptation,
        )
    if args.json:
        _show_json(verification_json(found))
    elif not args.quiet:
        _show(verification_text(found, verbose=args.verbose))
    return EXIT_DONE if found.equal else EXIT_DIFFERENT


def _check(args: argparse.Namespace) -> int:
    if len(args.paths) != 1:
        raise UsageError("check takes one directory", hint="streammerge check DIR")
    (directory,) = args.paths
    findings = check_directory(directory)
    if not args.no_model and first_error(findings) is None:
        findings += check_model(directory)
    if args.json:
        _show_json(findings_json(directory, findings))
    elif not args.quiet:
        _show(findings_text(directory, findings))
    return EXIT_DONE if first_error(findings) is None else EXIT_DIFFERENT


def _upload(args: argparse.Namespace) -> int:
    if len(args.paths) != 2:
        raise UsageError(
            "upload takes a directory and a repository", hint="streammerge upload DIR REPO"
        )
    directory, repo = args.paths
    if (fault := first_error(check_directory(directory))) is not None:
        raise TargetError(f"{directory} does not hold together: {fault}")
    check_upload(repo, private=args.private)
    uploaded = _push(args, directory, repo)
    if args.json:
        _show_json({"directory": directory} | upload_json(uploaded))
    elif not args.quiet:
        _show(upload_text(uploaded))
    return EXIT_DONE


def _by_first(
    command: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace, Processes], int]:
    """A command that of several processes only the first carries out."""
    return lambda args, processes: command(args) if processes.first else EXIT_DONE


_COMMANDS = {
    "merge": (merge_parser, _merge),
    "inspect": (inspect_parser, _by_first(_inspect)),
    "verify": (verify_parser, _by_first(_verify)),
    "check": (check_parser, _by_first(_check)),
    "upload": (upload_parser, _by_first(_upload)),
}


def _dispatch(arguments: list[str]) -> int:
    if "--version" in arguments:
        _show(f"streammerge {streammerge.__version__}")
        return EXIT_DONE
    # Options may stand anywhere, so also before the command.
    at = next((i for i, argument in enumerate(arguments) if argument in _COMMANDS), None)
    if at is None:
        if not arguments or {"-h", "--help"} & set(arguments):
            _show(_OVERVIEW.rstrip())
            return EXIT_DONE if arguments else EXIT_USAGE
        word = next((a for a in arguments if not a.startswith("-")), arguments[0])
        raise UsageError(f"unknown command {word!r}", hint="streammerge --help")
    make_parser, command = _COMMANDS[arguments[at]]
    arguments = arguments[:at] + arguments[at + 1 :]
    # parse_intermixed_args takes names after "--" for options, too.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # Threads are ours; a pool inside torch on top of them would only add memory.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with join() as processes:
        parser = make_parser()
        args = parser.parse_intermixed_args(arguments[:end])
        args.paths = [*args.paths, *arguments[end + 1 :]]
        if not args.paths:
            parser.error("no directory given")
        return command(args, processes)


def _show(text: str) -> None:
    """Print to standard output, all of it: at exit, Python would report a failure in its own way.

    Raises:
        StreamMergeError: it cannot be written; its disk may be full.
        BrokenPipeError: whoever read it has seen enough.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StreamMergeError(f"standard output: {error.strerror}") from error


def _show_json(value: object) -> None:
    _show(json.dumps(value, indent=2))


def _warn(line: str) -> None:
    print(f"streammerge: warning: {printable(line)}", file=sys.stderr)


def _fail(message: str, hint: str | None, as_json: bool, code: int) -> int:
    line = printable(" ".join(message.split()))
    print(f"streammerge: error: {line}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint)}", file=sys.stderr)
    if as_json:
        try:
            _show_json({"error": line, "hint": hint, "exit_code": code})
        except (OSError, StreamMergeError):  # stderr has it; Python would complain again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


class _SignalsIgnored:
    """Ignores SIGINT and SIGTERM inside the block (in the main thread)."""

    def __enter__(self) -> None:
        self._previous: dict[int, object] = {}
        with suppress(ValueError):  # not the main thread: signals are somebody else's
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


class _SigtermAsException:
    """Raises `Terminated` on SIGTERM inside the block (in the main thread)."""

    def __enter__(self) -> None:
        self._previous: object = None
        with suppress(ValueError):  # not the main thread: signals are somebody else's
            self._previous = signal.signal(signal.SIGTERM, self._raise)

    def __exit__(self, *_: object) -> None:
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._raise:
            signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated
