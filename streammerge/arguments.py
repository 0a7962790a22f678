"""The command line's arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

from streammerge.adapt import COMPATS, DTYPES, LORA_MODES
from streammerge.arithmetic import DEVICES, FOLD_DEVICES
from streammerge.errors import UsageError
from streammerge.formats import AUTO, format_words
from streammerge.planner import DEFAULT_MEMORY, DEFAULT_SHARD_SIZE
from streammerge.replicas import MODES


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def merge_parser() -> argparse.ArgumentParser:
    """The arguments of ``merge``."""
    parser = Parser(
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
    _add_source(parser)
    _add_output(parser)
    _add_values(parser, dtype="keep")
    _add_model(parser)
    _add_lora(parser)
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
        help="where copies are compared (default: a GPU, if there is one and enough to compare); "
        "with cuda, adapters are folded there too",
    )
    checks.add_argument(
        "--check-crc",
        action="store_true",
        help="compare stored bytes with the CRC-32 that torch.save wrote for them, before any are "
        "copied; reads everything once more",
    )
    checks.add_argument(
        "--verify",
        action="store_true",
        help="read the result again and compare it with the checkpoint before it is published",
    )
    _add_running(parser)
    upload = parser.add_argument_group("upload")
    upload.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="upload the result to this repository of the Hugging Face Hub",
    )
    upload.add_argument("--private", action="store_true", help="create that repository as private")
    _add_common(parser)
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    """The arguments of ``inspect``."""
    parser = Parser(
        prog="streammerge inspect",
        usage="streammerge inspect SRC [SRC ...] [options]",
        description="Show what a checkpoint holds: layout, meshes, tensors, totals.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="*", default=[], metavar="SRC", help="directories of the checkpoint"
    )
    _add_source(parser)
    _add_common(parser)
    return parser


def check_parser() -> argparse.ArgumentParser:
    """The arguments of ``check``."""
    parser = Parser(
        prog="streammerge check",
        usage="streammerge check DIR [options]",
        description="Check that a Hugging Face directory holds together: index, files, headers, "
        "layers, config. Where transformers is installed, also names and shapes of the model.",
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="*", default=[], metavar="DIR", help="what to check")
    parser.add_argument(
        "--no-model", action="store_true", help="do not build the model with transformers"
    )
    _add_common(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    """The arguments of ``verify``."""
    parser = Parser(
        prog="streammerge verify",
        usage="streammerge verify REFERENCE [REFERENCE ...] MERGED [options]",
        description="Compare a merged directory with the checkpoint that it was merged from: "
        "names, dtypes, shapes and every value. Takes the options of the merge; what a merge "
        "changes is listed. Two checkpoints are compared as they are, and so are two Hugging Face "
        "directories of the same names, dtypes and shapes.",
        epilog="exit codes: 0 equal, 3 different",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        default=[],
        metavar="REFERENCE ... MERGED",
        help="directories of the checkpoint, or a Hugging Face directory, then the directory to "
        "compare with it",
    )
    tolerance = parser.add_argument_group(
        "tolerance",
        "As for torch.allclose: |merged - reference| <= atol + rtol * |reference|, for floating-"
        "point values. Without these, every bit counts.",
    )
    tolerance.add_argument("--rtol", type=float, metavar="X", help="relative (default: 0)")
    tolerance.add_argument("--atol", type=float, metavar="X", help="absolute (default: 0)")
    _add_source(parser)
    _add_values(parser, dtype=None)
    _add_model(parser)
    _add_lora(parser)
    running = _add_running(parser)
    running.add_argument(
        "--device",
        choices=FOLD_DEVICES,
        default="cpu",
        help="where adapters are folded, as in the merge (default: cpu)",
    )
    _add_common(parser)
    return parser


def upload_parser() -> argparse.ArgumentParser:
    """The arguments of ``upload``."""
    parser = Parser(
        prog="streammerge upload",
        usage="streammerge upload DIR REPO [options]",
        description="Upload a merged directory to the Hugging Face Hub, or go on with an upload "
        "that was interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="*", default=[], metavar="DIR REPO", help="what to upload, and where to"
    )
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    _add_common(parser)
    return parser


# What `_add_source` adds for some layouts; a layout's module says which it takes.
LAYOUT_OPTIONS = ("prefix", "pattern", "tag")


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("source")
    source.add_argument(
        "--format",
        choices=format_words(),
        default=AUTO,
        help="layout of the checkpoint (default: what its file names say)",
    )
    source.add_argument(
        "--prefix",
        metavar="KEY",
        help="with torch.distributed.checkpoint: where the model's keys are, such as app.model",
    )
    source.add_argument(
        "--pattern",
        metavar="NAME",
        help="with rank files of other names: how they are called, with {rank} for the rank and "
        "{world} for the world size, such as 'model_state-{rank}.pt'",
    )
    source.add_argument(
        "--tag",
        metavar="TAG",
        help="with DeepSpeed: which checkpoint, such as global_step100 (default: the latest)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=DEFAULT_SHARD_SIZE,
        help="largest safetensors file, as 5GB or 4GiB (default: %(default)s)",
    )
    output.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    output.add_argument(
        "--restart",
        action="store_true",
        help="discard what an interrupted merge into DST left, instead of going on with it",
    )
    output.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")


def _add_values(parser: argparse.ArgumentParser, *, dtype: str | None) -> None:
    values = parser.add_argument_group("dtypes and side files")
    values.add_argument(
        "--dtype",
        choices=DTYPES,
        default=dtype,
        help="convert floating-point tensors; auto takes the dtype of the config or, with ZeRO, "
        f"that of each parameter in the module (default: {dtype or 'what MERGED has'})",
    )
    values.add_argument(
        "--keep-dtype",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors that --dtype leaves alone, such as '*norm*'; may be repeated",
    )
    values.add_argument(
        "--assets",
        metavar="DIR",
        help="folder with config, tokenizer and the like, such as the base model's (default: the "
        "folder huggingface beside the weights, or their own; with DCP and ZeRO also those above)",
    )
    values.add_argument(
        "--raw",
        action="store_true",
        help="leave everything as the checkpoint holds it: names, ties, dtypes, config",
    )


def _add_running(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    running = parser.add_argument_group("running")
    running.add_argument(
        "--memory",
        metavar="SIZE",
        help=f"all buffers together (default: {DEFAULT_MEMORY}, or what folding an adapter takes)",
    )
    running.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads (default: number of cores, at most 4)",
    )
    return running


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--untie",
        action="store_true",
        help="keep output head and input embedding apart, and say so in the config",
    )
    model.add_argument(
        "--keep-packed",
        action="store_true",
        help="leave the experts of a layer in one tensor where the Hub keeps them apart",
    )
    model.add_argument(
        "--names-from",
        metavar="DIR",
        help="give the result the names and layouts of this model; its headers are read",
    )
    model.add_argument(
        "--transpose-experts",
        choices=("yes", "no"),
        help="with --names-from: whether packed experts are transposed, if shapes cannot tell",
    )
    model.add_argument(
        "--compat",
        type=int,
        choices=COMPATS,
        help="add to the config what this older major version of transformers reads",
    )


def _add_lora(parser: argparse.ArgumentParser) -> None:
    lora = parser.add_argument_group("LoRA")
    lora.add_argument(
        "--lora",
        choices=LORA_MODES,
        help="fold the adapter into the weights, write it beside them, or keep all tensors as "
        "they are (default: fold; split if there are no base weights)",
    )
    lora.add_argument(
        "--lora-alpha", type=float, metavar="X", help="alpha of the adapter, if no file says it"
    )
    lora.add_argument(
        "--rslora", action="store_true", help="the adapter was trained as rsLoRA (alpha/sqrt(r))"
    )
    lora.add_argument(
        "--base",
        metavar="DIR",
        help="model to fold the adapter into, if the checkpoint holds no base weights",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    common = parser.add_argument_group("messages")
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    volume = common.add_mutually_exclusive_group()
    volume.add_argument("--quiet", action="store_true", help="only errors")
    volume.add_argument("--verbose", action="store_true", help="more details")
    common.add_argument("--debug", action="store_true", help="show tracebacks")
