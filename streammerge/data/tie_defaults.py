"""What an absent ``tie_word_embeddings`` means, by model type and version of transformers.

The table is `tie_defaults.json`; `regenerate_tie_defaults` makes it and describes its form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class _Table:
    """The defaults in one version of transformers.

    Attributes:
        own: by model type; None where the class has no such setting.
        nested: model type -> key of a sub-config -> default, where they are not all the same.
    """

    own: dict[str, bool | None]
    nested: dict[str, dict[str, bool]]


@lru_cache(maxsize=1)
def _tables() -> dict[int, tuple[_Table, ...]]:
    """The tables of each major version, the newest first."""
    from importlib.resources import files

    entries = json.loads((files(__package__) / "tie_defaults.json").read_text("utf-8"))
    tables: dict[int, tuple[_Table, ...]] = {}
    for version in sorted(entries, key=lambda version: [int(n) for n in version.split(".")]):
        entry = entries[version]
        own: dict[str, bool | None] = dict.fromkeys(entry["none"])
        own.update(dict.fromkeys(entry["true"], True))
        own.update(dict.fromkeys(entry["false"], False))
        major = int(version.split(".")[0])
        tables[major] = (_Table(own, entry["nested"]), *tables.get(major, ()))
    return tables


def _lookup(major: int, model_type: str | None) -> _Table | None:
    """The newest table of a major version that has a model type."""
    if model_type is None:
        return None
    return next((table for table in _tables()[major] if model_type in table.own), None)


def is_known(model_type: str | None) -> bool:
    """Whether any version of transformers has a model type."""
    return any(_lookup(major, model_type) for major in _tables())


def reader(major: int, model_type: str | None) -> int:
    """The major version whose defaults hold for a model and all its sub-configs.

    A model that transformers 4 does not have is read by transformers 5 alone, and the other way
    round; that version then stands for both.

    Args:
        major: 4 or 5.
        model_type: of the whole model.
    """
    other = {4: 5, 5: 4}[major]
    return other if _lookup(other, model_type) and not _lookup(major, model_type) else major


def own_default(major: int, model_type: str | None) -> bool | None:
    """The default of a model type; None if it is not known or has no such setting."""
    table = _lookup(major, model_type)
    return table.own[model_type] if table and model_type else None


def nested_default(major: int, model_type: str | None, keys: Sequence[str]) -> bool | None:
    """The default of a sub-config where it differs from its model's.

    Args:
        major: 4 or 5.
        model_type: of the model.
        keys: the sub-config's key, or several of which the first that the model has is meant.
    """
    table = _lookup(major, model_type)
    nested = table.nested.get(model_type, {}) if table and model_type else {}
    return next((nested[key] for key in keys if key in nested), None)
