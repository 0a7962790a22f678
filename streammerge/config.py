"""Edits of ``config.json`` and other JSON side files, as small as they can be. Pure.

An edit is data (`Edit`); `apply_edits` turns edits into new bytes, `config_changes` into records
for people. Which edits ``config.json`` needs is decided here, except for ties (`ties`) and readers
of transformers 4.x (`compat`).
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from streammerge.changes import Change
from streammerge.dtypes import ITEMSIZE, TO_TORCH
from streammerge.errors import CorruptFileError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]

MAX_DEPTH = 100  # no config comes close; json itself gives up at about 1,000

# What a model may be computed in; a config that names another dtype asks for nothing we know.
COMPUTE_DTYPES: frozenset[str] = frozenset({"float64", "float32", "bfloat16", "float16"})
_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")

# Names of what quantized layers keep beside or instead of a weight: bitsandbytes, GPTQ and AWQ,
# HQQ, compressed-tensors, ModelOpt, fine-grained FP8, MXFP4.
_QUANTIZED_NAME = re.compile(
    r"""(?:^|\.)(?:
        (?:nested_)?absmax | (?:nested_)?quant_map | quant_state\..+ | SCB
        | qweight | qzeros | W_q | \w+_scale_inv
        | \w*weight_(?:packed|scale|scales|scale_2|global_scale|zero_point)
    )$""",
    re.VERBOSE,
)
# What holds quantized data where it is of these types. Under other names they are buffers, or
# values that happen to need no more bits.
_QUANTIZED_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_QUANTIZED_FLOATS = frozenset(d for d in ITEMSIZE if d.startswith(("F8_", "F4")))
_WEIGHT_NAME = re.compile(r"(?:^|[._])(?:weight|proj|blocks|data|qdata)$")


class _Removed:
    """Stands for the value of a key that is removed."""

    def __repr__(self) -> str:
        return "REMOVED"


REMOVED = _Removed()


@dataclass(frozen=True, slots=True)
class Edit:
    """One key of a JSON object that is set or removed.

    Attributes:
        path: keys from the top.
        value: what it becomes, `REMOVED` for nothing.
        reason: why, for people.
    """

    path: tuple[str, ...]
    value: JsonValue | _Removed
    reason: str


# --- JSON files -----------------------------------------------------------------------------------


def parse_json(data: bytes, path: str) -> JsonObject:
    """The object in a JSON file, as transformers reads it (``json.loads`` of UTF-8 text).

    So NaN and Infinity are numbers, the last of equal keys counts, and a byte order mark is an
    error.

    Args:
        data: the bytes of the file.
        path: the file, for errors.

    Raises:
        CorruptFileError: no JSON, no object, or nested deeper than `MAX_DEPTH`.
    """
    try:
        value: JsonValue = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CorruptFileError(f"{path} is not a JSON file: {reason}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds a JSON {_kind(value)}, expected an object")
    if _is_deeper(value, MAX_DEPTH):
        raise CorruptFileError(f"{path} is nested more than {MAX_DEPTH} levels deep")
    return value


def _kind(value: JsonValue) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _is_deeper(value: JsonValue, depth: int) -> bool:
    level: list[JsonValue] = [value]
    for _ in range(depth):
        level = [item for container in level for item in _items(container)]
    return any(isinstance(item, dict | list) for item in level)


def _items(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def apply_edits(
    data: bytes, edits: Sequence[Edit], path: str = "config.json"
) -> tuple[bytes, bool]:
    """The bytes of a JSON file after edits, formatted as before where that can be told.

    The formatting is kept if some arguments of ``json.dumps`` give the bytes that are there. New
    keys go to their sorted place in a file that is sorted at all levels, else to the end.

    Args:
        data: the bytes of the file.
        edits: made in their order; removing what is not there does nothing.
        path: the file, for errors.

    Returns:
        The new bytes (`data` itself if nothing changes), and whether the file had to be formatted
        anew: indented by 2, non-ASCII text unescaped.

    Raises:
        CorruptFileError: as from `parse_json`.
        KeyError: an edit inside an object that is not there.
    """
    before = parse_json(data, path)
    after = copy.deepcopy(before)
    for edit in edits:
        _apply(after, edit)
    if _same(before, after):
        return data, False
    style = _find_style(data, before)
    if style is None:
        return _Style().dump(after), True
    return style.dump(after), False


def config_changes(
    edits: Sequence[Edit], before: JsonObject, name: str = "config.json"
) -> tuple[Change, ...]:
    """What edits change, for people; one record per key, in the order of the edits.

    Args:
        edits: as for `apply_edits`.
        before: the object that they are made in.
        name: the file.
    """
    last = {edit.path: edit for edit in edits}
    return tuple(
        Change(
            "config",
            f"{name}: {'.'.join(edit.path)}",
            None if isinstance(edit.value, _Removed) else json.dumps(edit.value),
            edit.reason,
        )
        for edit in last.values()
        if not _same(_look_up(before, edit.path), edit.value)
    )


def _apply(root: JsonObject, edit: Edit) -> None:
    *parents, key = edit.path
    part = root
    for parent in parents:
        child = part.get(parent)
        if not isinstance(child, dict):
            if isinstance(edit.value, _Removed):
                return
            raise KeyError(".".join(edit.path))
        part = child
    if isinstance(edit.value, _Removed):
        part.pop(key, None)
    else:
        part[key] = copy.deepcopy(edit.value)


def _look_up(root: JsonObject, path: tuple[str, ...]) -> JsonValue | _Removed:
    value: JsonValue = root
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return REMOVED
        value = value[key]
    return value


def _same(a: JsonValue | _Removed, b: JsonValue | _Removed) -> bool:
    """Whether two values are the same JSON; unlike ``==``, which takes 1, 1.0 and true for one."""
    if isinstance(a, _Removed) or isinstance(b, _Removed):
        return a is b
    return json.dumps(a) == json.dumps(b)


@dataclass(frozen=True, slots=True)
class _Style:
    """How a JSON file is formatted: arguments of ``json.dumps``, and what it leaves open.

    Attributes:
        newline: line ending.
        end: what follows the closing brace.
    """

    indent: str | None = "  "
    separators: tuple[str, str] = (",", ": ")
    sort_keys: bool = False
    ensure_ascii: bool = False
    newline: str = "\n"
    end: str = "\n"

    def dump(self, value: JsonObject) -> bytes:
        text = json.dumps(
            value,
            indent=self.indent,
            separators=self.separators,
            sort_keys=self.sort_keys,
            ensure_ascii=self.ensure_ascii,
        )
        try:
            return (text.replace("\n", self.newline) + self.end).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
            return replace(self, ensure_ascii=True).dump(value)


def _find_style(data: bytes, value: JsonObject) -> _Style | None:
    """The style in which dumping `value` gives `data`, if there is one."""
    text = data.decode()
    body = text.rstrip(" \t\r\n")
    first_line = re.match(r"\{(\r?\n)([ \t]*)", body)
    style = _Style(
        indent=first_line[2] if first_line else None,
        newline=first_line[1] if first_line else "\n",
        end=text[len(body) :],
    )
    items = (",", ", ") if first_line else (", ", ",")  # the default of json.dumps first
    for item, key, escaped in itertools.product(items, (": ", ":"), (True, False)):
        found = replace(style, separators=(item, key), ensure_ascii=escaped)
        if found.dump(value) == data:
            by_key = replace(found, sort_keys=True)
            return by_key if by_key.dump(value) == data else found
    return None


# --- what the edits of config.json are ------------------------------------------------------------


def model_configs(config: JsonObject) -> Iterator[tuple[tuple[str, ...], JsonObject]]:
    """The parts of a config that configure a model, each with its path: the top and nested ones.

    A nested part is an object under a key that ends in ``_config``, or with a ``model_type`` (such
    as ``decoder`` of encoder-decoder models). Other objects hold data in which the same keys may
    mean something else, like the vocabulary map of Emu3.
    """
    yield (), config
    for key, part in config.items():
        if not isinstance(part, dict) or key in _QUANTIZATION_KEYS:
            continue
        if key.endswith("_config") or "model_type" in part:
            for path, nested in model_configs(part):
                yield (key, *path), nested


def model_type_of(config: JsonObject | None) -> str | None:
    """The ``model_type`` of a config, None where it says none."""
    found = config.get("model_type") if config else None
    return found if isinstance(found, str) else None


def dtype_edits(config: JsonObject, dtype: str) -> list[Edit]:
    """Edits that make every reader load the weights in the dtype that they are stored in.

    transformers 4.46 reads ``torch_dtype`` only; later versions read both, and ``dtype`` wins. 4.57
    also honours the dtypes of nested configs, 5.x does not. So the top gets both keys, and nested
    keys that name a dtype get the same one; null stays.

    Args:
        config: ``config.json``.
        dtype: torch's name, such as ``bfloat16``.
    """
    return [
        Edit((*path, key), dtype, f"the weights are {dtype}")
        for path, part in model_configs(config)
        for key in _DTYPE_KEYS
        if (not path or _compute_dtype(part.get(key)) is not None) and part.get(key) != dtype
    ]


def config_dtype(config: JsonObject) -> str | None:
    """The dtype that a config asks for: at the top, else in ``text_config``; ``dtype`` wins.

    Returns:
        torch's name, or None for no dtype, ``auto``, or one not in `COMPUTE_DTYPES`.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for key in _DTYPE_KEYS:
                if part.get(key) is not None:
                    return _compute_dtype(part[key])
    return None


def _compute_dtype(value: JsonValue) -> str | None:
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    return name if name in COMPUTE_DTYPES else None


def majority_dtype(outputs: Iterable[tuple[str, int]]) -> str | None:
    """The dtype that the most bytes of floating-point tensors have; of two, the wider one.

    Args:
        outputs: dtype (safetensors name) and bytes of each tensor. FP8 and FP4 do not count: they
            are no dtype to compute in.

    Returns:
        torch's name, None if nothing counts.
    """
    nbytes: dict[str, int] = {}
    for dtype, size in outputs:
        if TO_TORCH[dtype] in COMPUTE_DTYPES:
            nbytes[dtype] = nbytes.get(dtype, 0) + size
    if not nbytes:
        return None
    return TO_TORCH[max(nbytes, key=lambda dtype: (nbytes[dtype], ITEMSIZE[dtype]))]


def is_quantized(tensors: Iterable[tuple[str, str]]) -> str | None:
    """The first tensor that shows that weights are stored quantized, None if there is none.

    That is: FP8, FP4 or small integers under the name of a weight; a name that only quantized
    layers have (``qweight``, ``weight_scale_inv``, ``absmax`` ...). Integers under other names are
    buffers: positions, masks, counters, token tables.

    Args:
        tensors: name and dtype (safetensors name).
    """
    for name, dtype in tensors:
        if _QUANTIZED_NAME.search(name):
            return name
        if dtype in _QUANTIZED_INTEGERS | _QUANTIZED_FLOATS and _WEIGHT_NAME.search(name):
            return name
    return None


def quantized_for_certain(
    tensors: Iterable[tuple[str, str]], config: JsonObject | None
) -> str | None:
    """A tensor of a model whose weights are quantized, None if they may be plain.

    Dtypes alone do not tell: integers may be counts, and FP8 may hold values that need no scale. It
    is certain where the config says so, or where a name is one that only quantized layers have.

    Args:
        tensors: name and dtype (safetensors name).
        config: ``config.json``; None if there is none.
    """
    tensors = list(tensors)
    named = next((name for name, _ in tensors if _QUANTIZED_NAME.search(name)), None)
    if named is not None:
        return named
    parts = [part for _, part in model_configs(config or {})]
    declared = any(part.get(key) for part in parts for key in _QUANTIZATION_KEYS)
    return is_quantized(tensors) if declared else None


def quantization_edits(config: JsonObject, tensors: Iterable[tuple[str, str]]) -> list[Edit]:
    """Edits that remove ``quantization_config`` and ``compression_config`` where they are wrong.

    With plain weights, transformers would ask for scales or for a quantization library. A null is
    an AttributeError in transformers 4.57, whatever is stored.

    Args:
        config: ``config.json``.
        tensors: name and dtype (safetensors name) of what is stored.
    """
    tensors = list(tensors)
    plain = is_quantized(tensors) is None and not any(d in _QUANTIZED_FLOATS for _, d in tensors)
    return [
        Edit(
            (*path, key),
            REMOVED,
            "no stored tensor is quantized" if plain else "transformers 4.57 fails on null",
        )
        for path, part in model_configs(config)
        for key in _QUANTIZATION_KEYS
        if key in part and (plain or part[key] is None)
    ]


def architecture_edits(config: JsonObject) -> list[Edit]:
    """Edits that take off what training left: the ``FSDP`` of class names, paths to a base model.

    FSDP1 renames a model's class; transformers takes the prefix off where it saves a model.
    """
    edits = []
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        names = [n.removeprefix("FSDP") if isinstance(n, str) else n for n in architectures]
        if names != architectures:
            edits.append(Edit(("architectures",), names, "FSDP is not part of the class name"))
    edits += [
        Edit((*path, "_name_or_path"), REMOVED, "a path of the training machine")
        for path, part in model_configs(config)
        if "_name_or_path" in part
    ]
    return edits
