"""The checkpoint layouts that can be read, and which of them a directory has.

A layout is a module, see `Format`; `FORMATS` lists them; nothing else knows them. ``README.md``
tells how to add one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from streammerge.checkpoint import Checkpoint
from streammerge.errors import (
    CheckpointNotFoundError,
    SourceError,
    StreamMergeError,
    UsageError,
)
from streammerge.formats import (
    bin_files,
    dcp,
    dcp_safetensors,
    deepspeed,
    rank_files,
    safetensors_files,
    torch_files,
)
from streammerge.formats.training_state import find_training_state, is_training_state

AUTO = "auto"


class Format(Protocol):
    """What a layout's module has.

    Attributes:
        NAME: for people.
        WORD: for ``--format``.
        FILES: the files by which it is recognised, for people.
        OPTIONS: the options that it takes. Both functions get those that were given, by keyword.
        TRAINING: whether a training run writes it. Such checkpoints are found before finished
            models below the same directory.
        matches: whether a directory holds a checkpoint of this layout, by its file names.
        describe: the `Checkpoint` in one or several such directories. If the user names the
            layout, also called for a directory that does not match, to say what is missing.
    """

    NAME: str
    WORD: str
    FILES: str
    OPTIONS: tuple[str, ...]
    TRAINING: bool
    matches: Callable[..., bool]
    describe: Callable[..., Checkpoint]


# Of those that match the same directory, the first counts.
FORMATS: tuple[Format, ...] = (
    rank_files,
    bin_files,
    dcp,
    dcp_safetensors,
    deepspeed,
    safetensors_files,
    torch_files,
)

_SEARCH_DEPTH = 4
_MAX_CANDIDATES = 20
_LOST_AND_FOUND = "lost+found"  # in new file systems, closed to all but root
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")

SourcePaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def describe(
    sources: SourcePaths,
    *,
    format: str = AUTO,
    target: str | os.PathLike[str] | None = None,
    **options: str | None,
) -> Checkpoint:
    """Read the metadata of a checkpoint: what it holds and where the bytes are.

    Args:
        sources: one directory, or several when each node kept its own files. A directory may
            also be a parent of the only checkpoint below it.
        format: the layout, as its ``WORD`` or ``auto``.
        target: a directory that is no source, whatever is in it.
        options: of the layout, see its ``OPTIONS``; None is as if it were not given.

    Returns:
        The checkpoint. Its chunks are proven to tile every tensor.

    Raises:
        UsageError: no source at all, an unknown layout, an option that it does not take.
        SourceError: no checkpoint, or one that is damaged or contradicts itself.
    """
    paths = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not paths:
        raise UsageError("no source directory given")
    given = {name: value for name, value in options.items() if value is not None}
    ignored = None if target is None else os.path.realpath(target)
    search = _Search(_layouts_for(format, given), given, ignored)
    located = [_locate(os.fspath(path), search, format) for path in paths]
    found = {place.layout.NAME: place.layout for place in located}
    if len(found) > 1:
        raise CheckpointNotFoundError(
            f"the sources hold different layouts: {', '.join(sorted(found))}"
        )
    checkpoint = located[0].layout.describe([place.path for place in located], **given)
    beside = dict.fromkeys((*(os.fspath(path) for path in paths), *checkpoint.directories))
    return replace(checkpoint, left_out=find_training_state(beside, checkpoint.files))


def find_training(path: str) -> str | None:
    """The first checkpoint of a training in or below a directory."""
    training = [layout for layout in FORMATS if layout.TRAINING]
    found = _Search(training, {}, None).find(path, [])
    return found[0].path if found else None


def format_words() -> list[str]:
    """What ``--format`` may be."""
    return [AUTO, *(layout.WORD for layout in FORMATS)]


# --- which layouts are asked for ---


def _layouts_for(format: str, given: Mapping[str, str]) -> list[Format]:
    """The layouts that are meant and take the options that were given."""
    meant = [layout for layout in FORMATS if format in (AUTO, layout.WORD)]
    if not meant:
        raise UsageError(f"unknown layout {format!r}", hint=f"one of {', '.join(format_words())}")
    able = [layout for layout in meant if set(given) <= set(layout.OPTIONS)]
    if not able:
        unwanted = [name for name in given if not all(name in lay.OPTIONS for lay in meant)]
        goes = ", ".join(_goes_with(name) for name in unwanted)
        raise UsageError(goes + ("" if format == AUTO else f", not with --format {format}"))
    return able


def _goes_with(option: str) -> str:
    takers = [_title(layout) for layout in FORMATS if option in layout.OPTIONS]
    return f"--{option} goes with {' or '.join(takers) or 'no layout'}"


def _title(layout: Format) -> str:
    return f"{layout.NAME} (--format {layout.WORD})"


# --- finding a checkpoint ---


class _Place(NamedTuple):
    layout: Format
    path: str


@dataclass(frozen=True, slots=True)
class _Search:
    """What is looked for.

    Attributes:
        layouts: those that count.
        options: of the layout, as given.
        ignored: a directory that is not looked at.
    """

    layouts: Sequence[Format]
    options: Mapping[str, str]
    ignored: str | None

    def find(self, path: str, closed: list[str]) -> list[_Place]:
        """The checkpoints to choose from: the directory itself, or those below.

        Checkpoints of a training come before finished models below the same directory: these may
        have been made of them, or hold what the training started from.

        Args:
            path: the directory.
            closed: gets the directories that cannot be looked into.
        """
        here = self.place(path)
        if here is not None and here.layout.TRAINING:
            return [here]
        below = list(self._find_below(path, _SEARCH_DEPTH, closed))
        training = [place for place in below if place.layout.TRAINING]
        if here is not None:
            return [here, *training]
        return training or below

    def place(self, path: str) -> _Place | None:
        """The checkpoint in a directory, if there is one."""
        matching = (lay for lay in self.layouts if lay.matches(path, **self.options))
        layout = next(matching, None)
        return None if layout is None else _Place(layout, path)

    def _find_below(self, path: str, depth: int, closed: list[str]) -> Iterator[_Place]:
        """The checkpoints below a directory, but for those inside one of a training."""
        for directory in _directories_in(path):
            if self.ignored is not None and os.path.realpath(directory) == self.ignored:
                continue
            if not _is_open(directory):
                closed.append(directory)
                continue
            place = self.place(directory)
            if place is not None:
                yield place
            if depth > 1 and not (place is not None and place.layout.TRAINING):
                yield from self._find_below(directory, depth - 1, closed)


def _locate(path: str, search: _Search, format: str) -> _Place:
    """The layout and the directory of the checkpoint at or below `path`."""
    if not path:
        raise CheckpointNotFoundError("a source is an empty path")
    if not os.path.isdir(path):
        if os.path.exists(path):
            raise CheckpointNotFoundError(
                f"{path}: not a directory", hint="give the directory that holds the checkpoint"
            )
        raise CheckpointNotFoundError(f"{path}: no such directory")
    if not _is_open(path):
        raise SourceError(f"{path}: {os.strerror(errno.EACCES)}")
    closed: list[str] = []
    found = search.find(path, closed)
    if closed and len(found) < 2 and not (found and found[0].path == path):
        raise SourceError(
            f"{closed[0]}: {os.strerror(errno.EACCES)}, and a checkpoint may be in it",
            hint="give the directory of the checkpoint itself",
        )
    if len(found) == 1:
        return found[0]
    if found:
        raise _ambiguity(path, found)
    if format != AUTO:
        return _Place(search.layouts[0], path)  # which says what is missing
    raise _nothing(path, search)


def _directories_in(path: str) -> list[str]:
    """Where a checkpoint can be, in order of their names.

    Not in hidden ones, where results are staged, nor in an optimizer's; links are not followed.
    """
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.path
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                and not entry.name.startswith(".")
                and entry.name != _LOST_AND_FOUND
                and not is_training_state(entry.name)
            )
    except OSError:
        return []


def _is_open(directory: str) -> bool:
    """Whether its entries can be listed and looked at; if not, it seems to hold nothing."""
    return os.access(directory, os.R_OK | os.X_OK)


# --- messages ---


def _ambiguity(path: str, found: Sequence[_Place]) -> CheckpointNotFoundError:
    """The error for several checkpoints where one is needed."""
    layouts = list({place.layout.WORD: place.layout for place in found}.values())
    names = [
        place.path if len(layouts) == 1 else f"{place.path} ({place.layout.NAME})"
        for place in found[:_MAX_CANDIDATES]
    ]
    more = f" and {len(found) - _MAX_CANDIDATES} more" if len(found) > _MAX_CANDIDATES else ""
    hint = "give one of them as the source"
    single = [lay for lay in layouts if sum(place.layout is lay for place in found) == 1]
    if len(layouts) > 1 and single:
        hint += f", or {' or '.join(f'--format {layout.WORD}' for layout in single)}"
    return CheckpointNotFoundError(
        f"{path}: {len(found)} checkpoints to choose from: {', '.join(names)}{more}", hint=hint
    )


def _nothing(path: str, search: _Search) -> StreamMergeError:
    """The error for no checkpoint at all, or none that takes the options that were given."""
    options = " ".join(f"--{name} {value!r}" for name, value in search.options.items())
    others = [layout for layout in FORMATS if layout not in search.layouts]
    if elsewhere := _Search(others, {}, search.ignored).find(path, []):
        found = elsewhere[0]
        goes = ", ".join(map(_goes_with, search.options))
        return UsageError(f"{found.path}: {found.layout.NAME}, nothing that fits {options}: {goes}")
    if search.ignored and (there := replace(search, ignored=None).find(path, [])):
        return CheckpointNotFoundError(
            f"{path}: no checkpoint here or below but {there[0].path}, which is the target",
            hint="give another target",
        )
    files = "; ".join(layout.FILES for layout in search.layouts)
    return CheckpointNotFoundError(
        f"{path}: no checkpoint here or below (looked for {options or files})",
        hint=_hint_for_nothing(path, search),
    )


def _hint_for_nothing(path: str, search: _Search) -> str | None:
    above = search.place(os.path.dirname(os.path.abspath(path)))
    if above is not None:
        return f"the {above.layout.NAME} are in {above.path}; give that directory"
    try:
        unknown = any(name.endswith(_TORCH_FILES) for name in os.listdir(path))
    except OSError:
        return None
    if unknown and not search.options:
        return "if each rank saved a file of its own: --pattern NAME, with {rank} for the rank"
    return None
