"""The mergers that are compared: what each reads, and how it is started.

Each is run as its package ships it, in a process of its own, as its users do. verl cannot be
installed without an inference engine; `standin_verl` does the same and is labelled. Nobody but
streammerge and ``cp && sync`` waits for the disk: what the others have written may still be in
memory when they end, so `process_trees` takes the time until it is on the disk, too.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model_shapes import DCP_FOLDER
from report import HERE

Command = tuple[str | Path, ...]

ACCELERATE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2])
"""
DCP_TO_TORCH_SAVE = """
import os, sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
os.mkdir(sys.argv[2])
dcp_to_torch_save(sys.argv[1], os.path.join(sys.argv[2], "model.pt"))
"""
CONSOLIDATE = """
import glob, os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
names = {}
for path in glob.glob(os.path.join(sys.argv[1], "*.safetensors")):
    with safe_open(path, "pt") as file:
        names.update(dict.fromkeys(file.keys(), 1))
os.mkdir(sys.argv[2])
consolidate_safetensors_files(sys.argv[1], sys.argv[2], names, num_threads=os.cpu_count())
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A merger.

    Attributes:
        name: for people.
        form: what it reads, see `model_shapes.FORMATS`.
        command: source and target -> how it is started, without the interpreter.
        package: what must be installed.
        note: for people.
    """

    name: str
    form: str
    command: Callable[[Path, Path], Command]
    package: str = "streammerge"
    note: str = ""


def merge_command(source: Path, target: Path, *options: str) -> Command:
    """Return the arguments of Python that merge with streammerge."""
    return ("-m", "streammerge", "merge", source, target, "--quiet", *options)


def copy_command(source: Path, target: Path) -> Command:
    """Return how the rank files are copied, and the copies written to the disk."""
    src, dst = shlex.quote(str(source)), shlex.quote(str(target))
    return "sh", "-c", f"mkdir {dst} && cp {src}/*.pt {dst} && sync {dst}/*"


CP = Peer("cp && sync", "rank-files", copy_command, package="")
STREAMMERGE = Peer("streammerge", "rank-files", merge_command)
PEERS = (
    CP,
    STREAMMERGE,
    Peer("streammerge, DCP", "dcp", merge_command),
    Peer("streammerge, ZeRO", "zero", merge_command),
    Peer(
        "verl's merger (stand-in)",
        "rank-files",
        lambda source, target: (HERE / "standin_verl.py", source, target),
        package="transformers",
        note="its algorithm, not its code; always bfloat16",
    ),
    Peer(
        "torch.load(mmap=True)",
        "rank-files",
        lambda source, target: (HERE / "standin_mmap.py", source, target),
        package="safetensors",
        note="a plain merger of 10 lines",
    ),
    Peer(
        "accelerate merge_fsdp_weights",
        "dcp",
        lambda source, target: ("-c", ACCELERATE, source / DCP_FOLDER, target),
        package="accelerate",
    ),
    Peer(
        "torch dcp_to_torch_save",
        "dcp",
        lambda source, target: ("-c", DCP_TO_TORCH_SAVE, source / DCP_FOLDER, target),
        package="torch",
        note="one file of torch.save",
    ),
    Peer(
        "torch consolidate_safetensors_files",
        "safetensors",
        lambda source, target: ("-c", CONSOLIDATE, source, target),
        package="torch",
        note="one file, for which it takes one thread",
    ),
    Peer(
        "DeepSpeed zero_to_fp32",
        "zero",
        lambda source, target: (
            *("-m", "deepspeed.utils.zero_to_fp32", source, target),
            "--safe_serialization",
        ),
        package="deepspeed",
    ),
)


def full_command(peer: Peer, source: Path, target: Path, python: str = sys.executable) -> Command:
    """Return the whole command line of a peer."""
    command = peer.command(source, target)
    return command if peer is CP else (python, *command)
