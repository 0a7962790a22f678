"""Finds the rank files of a checkpoint by a pattern of their names.

A pattern is a path below the checkpoint's directory in which ``{rank}`` stands for the rank and
``{world}`` for the world size: ``model_world_size_{world}_rank_{rank}.pt``. Without ``{rank}`` it
names one file, which holds everything.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streammerge.errors import (
    CheckpointNotFoundError,
    InconsistentRanksError,
    SourceError,
    UsageError,
)

_PLACEHOLDER = re.compile(r"(\{.*?\})")
_TOUCHING = re.compile(r"\}[0-9]*\{")
_NUMBERS = {"{rank}": r"(?P<rank>[0-9]+)", "{world}": r"(?P<world>[0-9]+)"}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of rank files.

    Attributes:
        text: as it was given.
        parts: one expression per directory level, the last for the files.
    """

    text: str
    parts: tuple[re.Pattern[str], ...]


def parse_pattern(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        UsageError: another placeholder, one of them twice, or a path that leads elsewhere.
    """
    components = text.split("/")
    if any(component in ("", ".", "..") for component in components):
        raise UsageError(f"pattern {text!r}: expected a path below the source directory")
    found = _PLACEHOLDER.findall(text)
    for placeholder in found:
        if placeholder not in _NUMBERS:
            raise UsageError(
                f"pattern {text!r}: unknown placeholder {placeholder}",
                hint=f"there are {' and '.join(_NUMBERS)}",
            )
        if found.count(placeholder) > 1:
            raise UsageError(f"pattern {text!r}: {placeholder} twice")
    if found == ["{world}"]:
        raise UsageError(f"pattern {text!r}: {{world}} without {{rank}}")
    if _TOUCHING.search(text):
        raise UsageError(f"pattern {text!r}: nothing keeps the two numbers apart")
    return Pattern(text, tuple(map(_expression, components)))


def holds_file(directory: str, name: re.Pattern[str]) -> bool:
    """Whether a directory holds a file whose whole name an expression matches."""
    try:
        with os.scandir(directory) as entries:
            return any(name.fullmatch(entry.name) for entry in entries)
    except OSError:
        return False


def has_rank_files(directory: str, pattern: Pattern) -> bool:
    """Whether a directory holds a file of a pattern."""
    try:
        return next(_walk(directory, pattern.parts), None) is not None
    except OSError:
        return False


class RankPaths(NamedTuple):
    """The rank files of a checkpoint.

    Attributes:
        paths: by rank.
        named: whether their names say the world size. If not, ranks after the last may be missing.
    """

    paths: list[str]
    named: bool


def find_rank_files(directories: Sequence[str], pattern: Pattern) -> RankPaths:
    """The files of a pattern in one or several directories.

    Raises:
        CheckpointNotFoundError: none, or some are missing.
        InconsistentRanksError: a rank twice, beyond the world size, or several world sizes.
        SourceError: a directory that cannot be read.
    """
    found: dict[int | None, dict[int, str]] = {}
    for directory in dict.fromkeys(directories):
        try:
            for file in _walk(directory, pattern.parts):
                ranks = found.setdefault(file.world_size, {})
                other = ranks.setdefault(file.rank, file.path)
                if other != file.path and not os.path.samefile(other, file.path):
                    raise InconsistentRanksError(f"rank {file.rank} twice: {other} and {file.path}")
        except OSError as error:
            raise SourceError(f"{error.filename or directory}: {error.strerror}") from error
    where = ", ".join(directories)
    if not found:
        raise CheckpointNotFoundError(f"{where}: no rank files here (looked for {pattern.text})")
    if len(found) > 1:
        sizes = " and ".join(str(size) for size in sorted(filter(None, found)))
        raise InconsistentRanksError(
            f"{where}: rank files of several world sizes ({sizes})",
            hint="keep the files of one run only",
        )
    ((world_size, ranks),) = found.items()
    if world_size is None:
        _refuse_missing(where, ranks, max(ranks) + 1, f"the last is {ranks[max(ranks)]}")
    else:
        strange = [rank for rank in ranks if rank >= world_size]
        if strange:
            raise InconsistentRanksError(
                f"{ranks[strange[0]]}: rank {strange[0]} of a world size of {world_size}"
            )
        _refuse_missing(where, ranks, world_size)
    return RankPaths([ranks[rank] for rank in sorted(ranks)], world_size is not None)


def missing_ranks(ranks: Iterable[int], world_size: int) -> str:
    """The ranks between those that are there, for people, all of them: ``1, 4-7``."""
    parts = []
    for before, after in itertools.pairwise([-1, *sorted(ranks), world_size]):
        if after - before == 2:
            parts.append(str(before + 1))
        elif after - before > 2:
            parts.append(f"{before + 1}-{after - 1}")
    return ", ".join(parts)


def missing_ranks_error(
    where: str, ranks: Iterable[int], world_size: int, why: str | None = None
) -> CheckpointNotFoundError:
    """The error for a checkpoint without all of its rank files.

    Args:
        where: the directories.
        ranks: those that are there, at least one less than `world_size`.
        world_size: how many there should be.
        why: how that is known, if the names of the files do not say it.
    """
    there = list(ranks)
    count = world_size - len(there)
    reason = "" if why is None else f" ({why})"
    return CheckpointNotFoundError(
        f"{where}: {count} of {world_size} rank files missing: "
        f"rank{'s' if count > 1 else ''} {missing_ranks(there, world_size)}{reason}",
        hint="if each node kept its own files, give all their directories as sources",
    )


def _refuse_missing(
    where: str, ranks: Iterable[int], world_size: int, why: str | None = None
) -> None:
    there = list(ranks)
    if len(there) < world_size:
        raise missing_ranks_error(where, there, world_size, why)


def _expression(component: str) -> re.Pattern[str]:
    pieces = _PLACEHOLDER.split(component)
    return re.compile("".join(_NUMBERS.get(piece) or re.escape(piece) for piece in pieces))


class _Found(NamedTuple):
    world_size: int | None
    rank: int
    path: str


def _walk(
    directory: str,
    parts: Sequence[re.Pattern[str]],
    world_size: int | None = None,
    rank: int = 0,
) -> Iterator[_Found]:
    """The files below a directory that fit the parts of a pattern, in order of their names."""
    first, *rest = parts
    with os.scandir(directory) as entries:
        matches = [(e.name, m) for e in entries if (m := first.fullmatch(e.name)) is not None]
    for name, match in sorted(matches, key=lambda found: found[0]):
        path = os.path.join(directory, name)
        numbers = match.groupdict()
        here = (
            int(numbers["world"]) if "world" in numbers else world_size,
            int(numbers["rank"]) if "rank" in numbers else rank,
        )
        if not rest:
            yield _Found(*here, path)
        elif os.path.isdir(path):
            yield from _walk(path, rest, *here)
