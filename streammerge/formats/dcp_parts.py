"""Which part of a saved state dict is the model. Pure.

Training loops save nested dicts: ``{"model": ..., "optimizer": ...}``, ``{"app": {"model": ...}}``,
or the model's own entries at top level with the others beside them (torchtitan). DCP joins the
keys with dots and keeps, in its metadata, which keys a name was made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streammerge.checkpoint import Skipped
from streammerge.errors import UnsupportedError, UsageError

KeyPath = tuple[str, ...]  # the keys of nested dicts, from the outside

# Keys under which training loops keep the model, and other things.
_MODELS = frozenset({"model", "module", "state_dict", "model_state_dict"})
_OTHERS = re.compile(
    r"(optim|optims|optimizer|optimizers|optim_state|optimizer_state|optimizer_state_dict)(_?\d+)?"
    r"|(lr_)?schedulers?(_?\d+)?|(train_|eval_)?data_?loaders?(_?\d+)?"
    r"|train(er|ing)?_state|progress|rng(_states?)?|random_states?|extra_states?|scaler|loss_scaler"
)
_WRAPPERS = frozenset({"app", "trainer", "train"})
# What follows ``model.`` in names of a model that was saved under that key. A model's own names go
# on with ``model.language_model.layers.`` (Gemma 3, Qwen2.5-VL) or ``model.transformer.`` (OLMo).
_INSIDE_MODEL = (
    "model.",
    "lm_head.",
    "module.",
    "base_model.",
    "language_model.model.",
    "language_model.lm_head.",
)
_TOP = "the top level"
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint that is taken.

    Attributes:
        names: key in the checkpoint -> name without the prefix.
        skipped: what is left, part by part, and the objects in this part.
    """

    names: Mapping[str, str]
    skipped: tuple[Skipped, ...]


def choose_part(
    tensors: Sequence[str],
    objects: Iterable[str],
    paths: Mapping[str, KeyPath],
    prefix: str | None = None,
) -> Part:
    """Choose the tensors of the model, or of the part that the user names.

    Args:
        tensors: keys of tensors.
        objects: keys of what is no tensor.
        paths: key -> the keys of the nested dicts that it was made of, where that is known.
        prefix: keys of the wanted part, joined with dots: ``app.model``; empty for the top level.

    Raises:
        UnsupportedError: no model, or several, and no prefix.
        UsageError: a prefix that no tensor has.
    """
    objects = list(objects)
    every = [*tensors, *objects]
    if not all(name in paths for name in every):
        paths = _guess_paths(every, whole=prefix is not None and not prefix.strip("."))
    parts: dict[KeyPath, list[str]] = {}
    for name in tensors:
        parts.setdefault(_part_of(paths[name]), []).append(name)
    if prefix is None:
        chosen = _find_model(parts)
    else:
        chosen = tuple(prefix.strip(".").split(".")) if prefix.strip(".") else ()
    joined = ".".join(chosen)
    start = f"{joined}." if chosen else ""

    def belongs(name: str) -> bool:
        part = _part_of(paths[name])
        if not chosen:
            return part == ()
        beside = len(part) > len(chosen) and _OTHERS.fullmatch(part[-1]) is not None
        return name.startswith(start) and not beside

    names = {name: name[len(start) :] for name in tensors if belongs(name)}
    if not names:
        raise UsageError(
            f"no tensor is in {_spell(chosen)}, only in {_list(parts)}",
            hint="--prefix takes one of them",
        )
    inside = [Skipped(name, "a pickled object") for name in objects if belongs(name)]
    left = [name for name in every if not belongs(name)]
    return Part(names, (*inside, *_summary(left, set(objects), paths)))


def _part_of(path: KeyPath) -> KeyPath:
    """The keys above an entry, as far as they say what it is."""
    for depth, key in enumerate(path):
        if _OTHERS.fullmatch(key):
            return path[: depth + 1]
        if key in _MODELS and depth + 1 < len(path):
            return path[: depth + 1]
    return path[:-1]


def _find_model(parts: Mapping[KeyPath, Sequence[str]]) -> KeyPath:
    candidates = [part for part in parts if not (part and _OTHERS.fullmatch(part[-1]))]
    models = [part for part in candidates if part and part[-1] in _MODELS]
    if len(models) == 1:
        return models[0]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        offered = {part: parts[part] for part in candidates}
        raise UnsupportedError(
            f"holds several parts that may be the model: {_list(offered)}",
            hint="--prefix chooses one (empty: the top level)",
        )
    raise UnsupportedError(
        f"holds no model, only {_list(parts)}" if parts else "holds no tensors",
        hint="--prefix takes one of them anyway" if parts else None,
    )


def _guess_paths(names: Sequence[str], *, whole: bool = False) -> dict[str, KeyPath]:
    """The keys that names may have been made of, where nothing says so.

    A model's own names have dots too, so a leading ``model.`` is a key of its own only if what
    follows looks like the names of a whole model, and not if names are to be left `whole`.
    """
    others: dict[str, KeyPath] = {}
    for name in names:
        keys = name.split(".")
        above = keys[: 2 if keys[0] in _WRAPPERS else 1]  # `model.scheduler` is of the model
        depth = next((d for d, key in enumerate(above) if _OTHERS.fullmatch(key)), None)
        if depth is not None:
            inner = [".".join(keys[depth + 1 :])] if keys[depth + 1 :] else []
            others[name] = (*keys[: depth + 1], *inner)
    rest = [name for name in names if name not in others]
    prefix: KeyPath = ()
    while rest and not whole:
        start = len(".".join(prefix)) + 1 if prefix else 0
        first = {name[start:].partition(".")[0] for name in rest}
        if len(first) != 1 or not all("." in name[start:] for name in rest):
            break
        (key,) = first
        inside = [name[start + len(key) + 1 :] for name in rest]
        is_model = key in _MODELS and any(name.startswith(_INSIDE_MODEL) for name in inside)
        if is_model or key in _WRAPPERS:
            prefix = (*prefix, key)
        if key not in _WRAPPERS:
            break
    start = len(".".join(prefix)) + 1 if prefix else 0
    return {name: others.get(name) or (*prefix, name[start:]) for name in names}


def _summary(
    names: Sequence[str], objects: set[str], paths: Mapping[str, KeyPath]
) -> list[Skipped]:
    """What is left out, one entry for each part."""
    counts: dict[str, list[int]] = {}
    for name in names:
        part = _part_of(paths[name])
        label = f"{'.'.join(part)}.*" if part and part != paths[name] else name
        counts.setdefault(label, [0, 0])[name in objects] += 1
    found = []
    for label, (tensors, others) in counts.items():
        what = [_count(tensors, "tensor")] if tensors else []
        what += [_count(others, "pickled object")] if others else []
        found.append(Skipped(label, f"{' and '.join(what)}, left out"))
    return found


def _list(parts: Mapping[KeyPath, Sequence[str]]) -> str:
    texts = [f"{_spell(part)} ({_count(len(names), 'tensor')})" for part, names in parts.items()]
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more


def _spell(part: KeyPath) -> str:
    return f"'{'.'.join(part)}'" if part else _TOP


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
