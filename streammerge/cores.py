"""How many cores there are. A module of its own, as processes that read pickles stay small."""

from __future__ import annotations

import os


def count_cores() -> int:
    """The cores that this process may use: a batch system gives a job some of its machine's."""
    return len(os.sched_getaffinity(0))
