"""What a check finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_NAMED = 3  # how many names a message shows


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is, or may be, wrong with a directory.

    Attributes:
        severity: ``error`` if a loader fails or gets other values than were trained; ``warning``
            if some loader may, or if it cannot be told.
        message: one line for people. It begins with the file, where it is about one.
    """

    severity: Literal["error", "warning"]
    message: str


def error(message: str) -> Finding:
    """A finding that makes the directory unfit."""
    return Finding("error", message)


def warning(message: str) -> Finding:
    """A finding that the user should know."""
    return Finding("warning", message)


def first_error(findings: Iterable[Finding]) -> str | None:
    """The first error, and how many more there are; None without any."""
    errors = [finding.message for finding in findings if finding.severity == "error"]
    if not errors:
        return None
    return errors[0] + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")


def listed(names: Iterable[str], count: int | None = None) -> str:
    """The first of some names, and how many more there are.

    Args:
        names: all of them; only the first are asked for if `count` is given.
        count: how many there are.
    """
    if count is None:
        names = list(names)
        count = len(names)
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    return ", ".join(itertools.islice(names, _NAMED)) + more
