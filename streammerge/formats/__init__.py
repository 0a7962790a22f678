"""The checkpoint layouts that can be read.

A layout is a module with

- ``NAME``, for people;
- ``matches(path)``: whether a directory holds a checkpoint of this layout, by its file names;
- ``describe(paths)``: the `Checkpoint` in one or several such directories.

`FORMATS` lists them; nothing else knows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import ModuleType

from streammerge.checkpoint import Checkpoint
from streammerge.errors import CheckpointNotFoundError, UsageError
from streammerge.formats import rank_files

FORMATS: tuple[ModuleType, ...] = (rank_files,)

_SEARCH_DEPTH = 4
_MAX_CANDIDATES = 20

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def describe(sources: Sources) -> Checkpoint:
    """Read the metadata of a checkpoint: what it holds and where the bytes are.

    Args:
        sources: one directory, or several when each node kept its own files. A directory may
            also be a parent of the only checkpoint below it.

    Returns:
        The checkpoint. Its chunks are proven to tile every tensor.

    Raises:
        UsageError: no source at all.
        SourceError: no checkpoint, or one that is damaged or contradicts itself.
    """
    paths = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not paths:
        raise UsageError("no source directory given")
    located = [_locate(os.fspath(path)) for path in paths]
    layouts = {layout.NAME: layout for layout, _ in located}
    if len(layouts) > 1:
        raise CheckpointNotFoundError(
            f"the sources hold different layouts: {', '.join(sorted(layouts))}"
        )
    checkpoint: Checkpoint = located[0][0].describe([path for _, path in located])
    return checkpoint


def _locate(path: str) -> tuple[ModuleType, str]:
    """The layout and the directory of the checkpoint at or below `path`."""
    if not path:
        raise CheckpointNotFoundError("a source is an empty path")
    if not os.path.isdir(path):
        if os.path.exists(path):
            raise CheckpointNotFoundError(
                f"{path}: not a directory", hint="give the directory that holds the rank files"
            )
        raise CheckpointNotFoundError(f"{path}: no such directory")
    layout = _layout_of(path)
    if layout is not None:
        return layout, path
    candidates = []
    for directory in _directories_below(path, _SEARCH_DEPTH):
        layout = _layout_of(directory)
        if layout is not None:
            candidates.append((layout, directory))
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise CheckpointNotFoundError(
            f"{path}: no checkpoint here or below (looked for "
            f"{', '.join(layout.FILES for layout in FORMATS)})",
            hint=_hint_for_nothing(path),
        )
    names = [directory for _, directory in candidates]
    more = f" and {len(names) - _MAX_CANDIDATES} more" if len(names) > _MAX_CANDIDATES else ""
    raise CheckpointNotFoundError(
        f"{path}: {len(names)} checkpoints to choose from: "
        f"{', '.join(names[:_MAX_CANDIDATES])}{more}",
        hint="give one of them as the source",
    )


def _layout_of(path: str) -> ModuleType | None:
    for layout in FORMATS:
        if layout.matches(path):
            return layout
    return None


def _directories_below(path: str, depth: int) -> Iterator[str]:
    """Directories below `path`, in order of their names; hidden ones and links are left out."""
    try:
        with os.scandir(path) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            )
    except OSError:
        return
    for name in names:
        directory = os.path.join(path, name)
        yield directory
        if depth > 1:
            yield from _directories_below(directory, depth - 1)


def _hint_for_nothing(path: str) -> str | None:
    parent = os.path.dirname(os.path.abspath(path))
    if _layout_of(parent) is not None:
        return f"the rank files are in {parent}; give that directory"
    return None
