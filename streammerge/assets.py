"""The files beside the weights: config, tokenizer, chat template and the like."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatch

from streammerge.errors import SourceError

# Weights, their indexes, and what belongs to a training run: never copied. A stale weights file
# beside a new index would be loaded instead of ours, without a warning.
DENIED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.distcp",
    "*.npz",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "adapter_config.json",
    "adapter_model.*",
)
DENIED_DIRECTORIES = (".git", ".cache", "__pycache__")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that is copied byte for byte.

    Attributes:
        path: where it is.
        name: its name below the target, with ``/``.
        size: bytes.
    """

    path: str
    name: str
    size: int


def find_assets(directory: str) -> tuple[tuple[Asset, ...], tuple[str, ...]]:
    """The files of a directory to copy, and the names of those left out, both in order of names.

    Links to files are followed, links to directories are left out.

    Raises:
        SourceError: the directory cannot be read.
    """
    assets: list[Asset] = []
    left_out: list[str] = []

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename}: {error.strerror}") from error

    for parent, directories, names in os.walk(directory, onerror=fail):
        for name in sorted(directories):
            path = os.path.join(parent, name)
            if name in DENIED_DIRECTORIES or os.path.islink(path):
                directories.remove(name)
                left_out.append(os.path.relpath(path, directory) + "/")
        directories.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, directory)
            if any(fnmatch(name, pattern) for pattern in DENIED):
                left_out.append(relative)
                continue
            try:
                size = os.stat(path).st_size
            except OSError as error:
                raise SourceError(f"{path}: {error.strerror}") from error
            if not os.path.isfile(path):
                left_out.append(relative)
                continue
            assets.append(Asset(path, relative.replace(os.sep, "/"), size))
    return tuple(assets), tuple(left_out)
