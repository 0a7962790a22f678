"""What differs between a checkpoint and the model that is written, one record per difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "renamed", "dropped", "folded", "split", "expanded", "transposed", "cast", "apart", "config"
]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        kind: what was done. ``apart`` is a tensor that goes to a file of its own beside the model,
            ``split`` one that goes to the adapter, ``expanded`` one that becomes several,
            ``config`` an edit of a JSON file.
        name: the tensor's name before; for ``config``, file and key (``config.json: dtype``).
        to: its name, dtype, file or (as JSON) value after; None if it is gone.
        reason: why, for people. Changes of the same kind and reason are shown as a group, so it
            does not hold names.
    """

    kind: Kind
    name: str
    to: str | None
    reason: str
