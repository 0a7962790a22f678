"""Pointers of Git LFS, which a clone without LFS has in place of large files.

The Hub keeps weights in LFS, and files like ``tokenizer.json`` too. A pointer is a text of three
lines (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
"""

from __future__ import annotations

from streammerge.errors import CorruptFileError

_START = b"version https://git-lfs"

START_BYTES = len(_START)
MAX_POINTER_BYTES = 1024  # by its specification


def refuse_pointer(start: bytes) -> None:
    """Refuse a file by its first `START_BYTES` if it is a pointer.

    Raises:
        CorruptFileError: it is one.
    """
    if start.startswith(_START):
        raise CorruptFileError(
            "a pointer of Git LFS, not the file itself", hint="fetch the files: git lfs pull"
        )
