"""How far a merge is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streammerge.processes import Processes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a merge is.

    Attributes:
        phase: ``check`` (CRC-32), ``compare`` (copies on several ranks), ``write``, ``verify``, or
            ``measure`` (how far differing values are apart).
        done, total: bytes of this phase.
    """

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def in_phase(
    progress: OnProgress | None,
    phase: str,
    total: int,
    processes: Processes | None = None,
    there: int = 0,
) -> Callable[[int], None] | None:
    """What to call with the bytes that this process has done; those of all are shown.

    Args:
        progress: shows them.
        phase, total: see `Progress`.
        processes: those that share the work; this one alone if not given.
        there: bytes that were done before.
    """
    processes = processes or Processes()
    if progress is None and processes.size == 1:
        return None
    processes.tell(**{phase: 0})  # an earlier merge may have told another number

    def advance(nbytes: int) -> None:
        processes.check()
        processes.tell(**{phase: nbytes})
        if progress is not None and processes.first:
            done = there + sum(state.get(phase, 0) for state in processes.told())
            progress(Progress(phase, done, total))

    return advance
