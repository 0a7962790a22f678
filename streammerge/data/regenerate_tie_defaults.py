"""Make or update ``tie_defaults.json`` from the installed transformers.

Run once for every version that is added: ``python -m streammerge.data.regenerate_tie_defaults``.
Entries of other versions stay as they are.

An entry says what an absent ``tie_word_embeddings`` means, by ``model_type``:

===========  =======================================================================================
``true``     the configuration class has the setting, and it is true
``false``    the same, and it is false
``none``     the class has no such setting (transformers 4 gave it to every class)
``nested``   type -> sub-configuration -> default, for types with a sub-configuration whose default
             differs from the type's own
===========  =======================================================================================
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tie_defaults.json")
_SETTING = "tie_word_embeddings"

Entry = dict[str, Any]


def installed_entry() -> tuple[str, Entry]:
    """Version and entry of the installed transformers.

    Types whose configuration cannot be made without arguments are left out.
    """
    # Imported by name: type checkers need not have it.
    transformers = importlib.import_module("transformers")
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING

    transformers.logging.set_verbosity_error()  # it warns about the defaults of several types
    entry: Entry = {"true": [], "false": [], "none": [], "nested": {}}
    for model_type in sorted(mapping.keys()):
        try:
            config = mapping[model_type]()
        except Exception:  # of any kind, also those of huggingface_hub's validation
            continue
        default = getattr(config, _SETTING, None)
        entry[{True: "true", False: "false", None: "none"}[default]].append(model_type)
        nested = _nested(config)
        if any(value != default for value in nested.values()):
            entry["nested"][model_type] = nested
    return transformers.__version__, entry


def _nested(config: Any) -> dict[str, bool]:
    """The defaults of the sub-configurations that have the setting."""
    found = {}
    for name in type(config).sub_configs:
        # Not by getattr: some configurations do not let it read what layers may override.
        value = getattr(vars(config).get(name), _SETTING, None)
        if value is not None:
            found[name] = value
    return found


def dumps(entries: dict[str, Entry]) -> str:
    """The file's text: versions ascending, one line per list and per nested type."""
    versions = sorted(entries, key=lambda version: [int(n) for n in version.split(".")])
    return "{\n" + ",\n".join(f'"{v}": {_entry_text(entries[v])}' for v in versions) + "\n}\n"


def _entry_text(entry: Entry) -> str:
    lists = [f'"{key}": {json.dumps(entry[key])}' for key in ("true", "false", "none")]
    rows = [f'"{name}": {json.dumps(subs)}' for name, subs in sorted(entry["nested"].items())]
    return "{\n" + ",\n".join(lists) + ',\n"nested": {\n' + ",\n".join(rows) + "\n}}"


def main() -> None:
    """Update the file beside this module."""
    entries: dict[str, Entry] = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    version, entry = installed_entry()
    entries[version] = entry
    PATH.write_text(dumps(entries), "utf-8")


if __name__ == "__main__":
    main()
