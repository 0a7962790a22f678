"""What a training run keeps beside its weights to go on: optimizer, scheduler, random numbers.

None of it becomes part of a model. It is recognised by its names, so that it can be said what was
left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from streammerge.assets import TRAINING_STATE
from streammerge.checkpoint import File, LeftOut


def is_training_state(name: str) -> bool:
    """Whether a file or folder of this name holds the state of a training run, no weights."""
    return any(fnmatch(name, pattern) for pattern in TRAINING_STATE)


def find_training_state(directories: Iterable[str], read: Sequence[File]) -> tuple[LeftOut, ...]:
    """The files and folders in some directories that hold the state of a training run.

    Args:
        directories: where to look, not below them. What cannot be looked at is passed over.
        read: files that are part of the checkpoint, whatever their names.
    """
    known = {file.path for file in read}
    found = {}
    for directory in directories:
        for path in _entries(directory):
            if path not in known and is_training_state(os.path.basename(path)):
                found[os.path.realpath(path)] = LeftOut(path, _nbytes(path))
    return tuple(found.values())


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.path.join(directory, name) for name in os.listdir(directory))
    except OSError:
        return []


def _nbytes(path: str) -> int:
    """Bytes of a file, or of the files in a folder."""
    paths = _entries(path) if os.path.isdir(path) else [path]
    total = 0
    for name in paths:
        try:
            total += os.stat(name).st_size
        except OSError:
            continue
    return total
