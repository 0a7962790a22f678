"""What can go wrong, as a tree.

::

    StreamMergeError                one line for people, with an optional hint
    ├── UsageError                  an argument or option that makes no sense
    ├── SourceError                 what is read
    │   ├── CheckpointNotFoundError no checkpoint there, several candidates, missing rank files
    │   ├── CorruptFileError        a file cut short, empty, damaged, or of another kind
    │   ├── UnsafePickleError       a pickle that asks for a global outside the allow-list
    │   ├── UnsupportedError        a checkpoint that cannot be merged (Partial, flat parameters)
    │   ├── InconsistentRanksError  rank files that contradict each other or their own names
    │   ├── PlacementError          local shards that do not match their placements, or gaps
    │   ├── ReplicaMismatchError    copies of one value that differ between ranks
    │   └── SourceChangedError      a file that changed while it was read
    ├── TargetError                 what is written
    │   ├── TargetPathError         a target that is in the way, a link, or a folder that is read
    │   ├── NoSpaceError            too little room on the disk
    │   └── ResultError             what was written is not what was planned
    └── ProcessesError              another process of the merge is gone, or does not fit
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "CheckpointNotFoundError",
    "CorruptFileError",
    "InconsistentRanksError",
    "NoSpaceError",
    "PlacementError",
    "ProcessesError",
    "ReplicaMismatchError",
    "ResultError",
    "SourceChangedError",
    "SourceError",
    "StreamMergeError",
    "TargetError",
    "TargetPathError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "about",
    "printable",
    "writing_error",
]


class StreamMergeError(Exception):
    """Base of every error that streammerge raises on purpose.

    Args:
        message: one line: the file, the key, the rank, what was found, what was expected.
        hint: what to do about it, if known; shown on a line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = hint


class UsageError(StreamMergeError):
    """An argument or option that makes no sense."""


class SourceError(StreamMergeError):
    """Something is wrong with what is read."""


class CheckpointNotFoundError(SourceError):
    """There is no checkpoint, there are several to choose from, or rank files are missing."""


class CorruptFileError(SourceError):
    """A file is empty, cut short, damaged, or not what its name says."""


class UnsafePickleError(SourceError):
    """A pickle asks for a global outside the allow-list. Nothing of it was run."""


class UnsupportedError(SourceError):
    """The checkpoint is readable, but its values cannot be merged without guessing."""


class InconsistentRanksError(SourceError):
    """Rank files contradict each other, their own names, or fsdp_config.json."""


class PlacementError(SourceError):
    """A local shard does not have the shape that its placements give, or chunks do not tile."""


class ReplicaMismatchError(SourceError):
    """Copies of one value differ between ranks."""


class SourceChangedError(SourceError):
    """A file changed between the reading of its metadata and of its data."""


class TargetError(StreamMergeError):
    """Something is wrong with where the result goes."""


class TargetPathError(TargetError):
    """The target exists, is a link, or is a folder that is read."""


class NoSpaceError(TargetError):
    """The disk has too little room for the result."""


class ResultError(TargetError):
    """What was written is not what was planned, as the disk has it now."""


class ProcessesError(StreamMergeError):
    """Another process of the same merge is gone, cannot be reached, or merges something else."""


def printable(text: str) -> str:
    """A text on one line. Names in files may hold line breaks, and what else steers a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def about(where: str) -> Iterator[None]:
    """Say which file, key or chunk the errors that are raised inside are about."""
    try:
        yield
    except StreamMergeError as error:
        raise type(error)(f"{where}: {error}", hint=error.hint) from error
    except OSError as error:
        raise SourceError(f"{where}: {error.strerror}") from error


def writing_error(path: str, error: OSError) -> TargetError:
    """The error for a failed system call on what is written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{path}: {error.strerror}", hint="free some space and start again")
    return TargetError(f"{path}: {error.strerror}")
