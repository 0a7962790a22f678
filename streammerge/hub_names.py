"""Names and layouts in files against those in memory: packed experts, vision-language models. Pure.

transformers 5 packs the experts of a layer into one tensor when it loads a model, and keeps the
towers of vision-language models below ``model.``; ``save_pretrained`` undoes both. Rank files hold
what was in memory, so it is undone here.

Source: transformers 5.24, ``conversion_mapping.py`` (the forms below are its transforms, read
backwards) and ``core_model_loading.py`` (``revert_weight_conversion``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from streammerge.changes import Change, Kind
from streammerge.config import JsonObject, model_type_of
from streammerge.errors import UnsupportedError, UsageError
from streammerge.values import Cast, Stored, Value, stored_base

_T = TypeVar("_T")

Rules = tuple[tuple[re.Pattern[str], str], ...]  # pattern, replacement; the first match counts


@dataclass(frozen=True, slots=True)
class HubNames:
    """The tensors as files have them.

    Attributes:
        values: in the order of the checkpoint; the parts of a packed tensor stand in its place.
        changes: what was renamed, expanded or transposed, one record per tensor before.
        warnings: one line each, for people.
    """

    values: dict[str, Value]
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """How files keep the experts that transformers 5 packs.

    Attributes:
        name: the model type that the form is named after.
        packed: end of a packed tensor's name -> ends of the names in files. A ``*`` stands for
            the number of the expert; several names share the rows of an expert, in this order.
        renames: what else differs, for models of this form only.
    """

    name: str
    packed: tuple[tuple[str, tuple[str, ...]], ...]
    renames: Rules = ()

    def file_names(self, name: str) -> tuple[str, ...]:
        """The names in files of a tensor, with ``*`` for the number of the expert."""
        for packed, parts in self.packed:
            if name.endswith(f".{packed}"):
                module = name.removesuffix(packed)
                return tuple(_rename(module + part, self.renames) for part in parts)
        return (_rename(name, self.renames),)

    def packs(self, name: str) -> bool:
        """Whether a tensor of that name holds packed experts."""
        return any(name.endswith(f".{packed}") for packed, _ in self.packed)


def _rules(*rules: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


def _rename(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        renamed, count = pattern.subn(replacement, name, count=1)
        if count:
            return renamed
    return name


def _gated(
    name: str,
    *renames: tuple[str, str],
    memory: str = "mlp.experts",
    file: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Experts:
    """Experts of the gate's, the up and the down projection; the first two share a tensor."""
    gate, up, down = (f"{file}.*.{part}.weight" for part in parts)
    packed = ((f"{memory}.gate_up_proj", (gate, up)), (f"{memory}.down_proj", (down,)))
    return Experts(name, packed, _rules(*renames))


_QWEN2_MOE = _gated("qwen2_moe")
_MIXTRAL = _gated(
    "mixtral",
    (r"\.mlp\.(gate\.weight|e_score_correction_bias)$", r".block_sparse_moe.\1"),
    file="block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
)
_GRANITEMOE = Experts(
    "granitemoe",
    (
        ("block_sparse_moe.experts.gate_up_proj", ("block_sparse_moe.input_linear.weight",)),
        ("block_sparse_moe.experts.down_proj", ("block_sparse_moe.output_linear.weight",)),
    ),
    _rules((r"(\.block_sparse_moe\.router)\.weight$", r"\1.layer.weight")),
)
_ARIA = Experts(
    "aria_text",
    (
        ("mlp.experts.gate_up_proj", ("mlp.experts.fc1.weight",)),
        ("mlp.experts.down_proj", ("mlp.experts.fc2.weight",)),
    ),
)

# Model types whose packed experts are not what files have. Types whose mapping also merges or
# permutes other tensors (kimi_linear, bailing_hybrid, sarvam_moe, ...) are not among them, nor is
# longcat_flash, whose packed tensors hold experts that no file has.
EXPERTS: dict[str, Experts] = {
    **dict.fromkeys(
        (
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "mellum",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe",
            "qwen3_omni_moe_thinker",
            "sarvam_mla",
            "solar_open",
        ),
        _QWEN2_MOE,
    ),
    "axk1": _gated("axk1", (r"\.mlp\.(post_mlp_layernorm\.weight)$", r".\1")),
    "ernie4_5_moe": _gated("ernie4_5_moe", (r"\.mlp\.gate\.(moe_statics\.)", r".mlp.\1")),
    "exaone_moe": _gated("exaone_moe", (r"\.mlp\.gate\.(e_score_correction_bias)$", r".mlp.\1")),
    "flint": _gated("flint", (r"\.self_attn\.sinks$", ".self_attn.softmax_offset")),
    "hy_v3": _gated(
        "hy_v3",
        (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    ),
    "laguna": _gated(
        "laguna",
        (r"\.mlp\.gate\.(e_score_correction_bias)$", r".mlp.experts.\1"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    ),
    "mimo_v2_flash": _gated(
        "mimo_v2_flash", (r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias")
    ),
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "phimoe": _gated(
        "phimoe",
        (r"\.mlp\.router\.weight$", ".block_sparse_moe.gate.weight"),
        file="block_sparse_moe.experts",
        parts=("w1", "w3", "w2"),
    ),
    "lfm2_moe": _gated(
        "lfm2_moe",
        memory="feed_forward.experts",
        file="feed_forward.experts",
        parts=("w1", "w3", "w2"),
    ),
    "jamba": _gated("jamba", memory="feed_forward.experts", file="feed_forward.experts"),
    "nemotron_h": Experts(
        "nemotron_h",
        (
            ("mixer.experts.up_proj", ("mixer.experts.*.up_proj.weight",)),
            ("mixer.experts.down_proj", ("mixer.experts.*.down_proj.weight",)),
        ),
        _rules((r"^model\.(?=embeddings|layers|norm_f)", "backbone.")),
    ),
    "granitemoe": _GRANITEMOE,
    "granitemoehybrid": _GRANITEMOE,
    "granitemoeshared": _GRANITEMOE,
    "aria": _ARIA,
    "aria_text": _ARIA,
}

# Files have the packed tensors of these, too; those of qwen3_vl_moe transposed.
_PACKED_IN_FILES = {"gpt_oss", "llama4", "llama4_text", "qwen3_5_moe", "qwen3_5_moe_text"}
_TRANSPOSED_IN_FILES = {"qwen3_vl_moe", "qwen3_vl_moe_text"}
_PACKED = re.compile(r"\.experts\.(?:gate_up_proj|up_proj|down_proj)$")
_UNPACKED = re.compile(r"(.+\.experts)\.(\d+)\.")

# Where configs say how many experts a layer has, and where they keep that of the text model.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SUBCONFIGS = ("text_config", "llm_config", "thinker_config", "talker_config")

# The mappings of qwen2_vl and of llava backwards, for towers of any name.
_LAYOUTS: dict[str, Rules] = {
    "as in memory": (),
    "as qwen2_vl has them": _rules(
        (r"^(thinker\.)?model\.language_model\.", r"\1model."), (r"^(thinker\.)?model\.", r"\1")
    ),
    "as llava has them": _rules(
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.", ""),
    ),
}
# transformers 5 took a level out of CLIP and SigLIP towers, which 4.x and the hub have.
_TOWERS: tuple[Rules, ...] = (
    (),
    _rules((r"((?:^|\.)vision_tower\.)", r"\1vision_model.")),
    _rules((r"((?:^|\.)vision_tower\.)vision_model\.", r"\1")),
)

# The types that have them.
_NAMED_OTHERWISE_IN_FILES = {
    "aria",
    "aya_vision",
    "fuyu",
    "gemma3",
    "got_ocr2",
    "internvl",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "mllama",
    "paligemma",
    "qwen2_5_omni",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "video_llava",
    "vipllava",
}

_HEAD = re.compile(
    r"(?:(?:^|\.)(?:lm_head|lm_head\.out_proj|embed_out|proj_out|output_projection)|^decoder)"
    r"\.weight$"
)
_CLASSIFIER = re.compile(
    r"^(?:score|classifier|classification_head|qa_outputs|v_head|value_head|summary)\."
)
# What files hold and transformers does not load (`_keys_to_ignore_on_load_unexpected`): layers for
# multi-token prediction, and buffers of old models.
_UNUSED = re.compile(r"(?:^|\.)mtp\w*\.|\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^(?:(?:thinker|model|language_model|backbone)\.)*layers\.(\d{1,9})\.")
_SCALE = "_scale_inv"  # beside a weight in float8

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Naming:
    """A way from names in memory to names in files."""

    experts: Experts | None = None
    layout: str = "as in memory"
    tower: Rules = ()

    def file_names(self, name: str) -> tuple[str, ...]:
        """The names in files of a tensor, with ``*`` for the number of the expert."""
        names = (name,) if self.experts is None else self.experts.file_names(name)
        return tuple(_rename(_rename(each, _LAYOUTS[self.layout]), self.tower) for each in names)


@dataclass(frozen=True, slots=True)
class _Difference:
    """How tensors differ from those of a base model, apart from what may differ."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many tensors stand against the base model."""
        return len(self.missing) + len(self.extra) + len(self.reshaped)


def expand_experts(values: Mapping[str, Value], config: JsonObject | None) -> HubNames:
    """Names as in files, for models whose experts files keep apart.

    What transformers 4.x saved has these names and stays as it is; so do models whose files hold
    packed experts, too (gpt_oss, llama4, qwen3_5_moe), and unknown ones.

    Args:
        values: whole tensors; packed experts are [experts, rows, columns].
        config: of the model; a vision-language model may have its experts in ``text_config``.

    Raises:
        UnsupportedError: as `check_expert_counts`; experts that cannot be halved into gate and up
            projection; two tensors that get one name.
    """
    check_expert_counts(values, config)
    form = _form(config)
    warnings = _name_warnings(values, config)
    if form is None:
        return HubNames(dict(values), (), warnings + _packed_warnings(values, config))
    packed = [name for name in values if form.packs(name)]
    if not packed:
        return HubNames(dict(values), (), warnings)
    for name in packed:
        fault = _fault(values[name].shape, form.file_names(name))
        if fault is not None:
            raise UnsupportedError(f"{name}: {fault}")
    model_type = _model_types(config)[0]
    named, changes = _apply(values, _Naming(form), f"as files of {model_type} models have it")
    return HubNames(named, tuple(changes), warnings)


def check_expert_counts(values: Mapping[str, Value], config: JsonObject | None) -> None:
    """Refuse a checkpoint that lacks experts: those of other expert-parallel ranks.

    Only model types whose experts are known, and configs that state their number, are checked.

    Args:
        values: whole tensors, of packed or of single experts.
        config: of the model.

    Raises:
        UnsupportedError: another number of experts than the config's.
    """
    types = _model_types(config)
    if not any(t in EXPERTS or t in _PACKED_IN_FILES | _TRANSPOSED_IN_FILES for t in types):
        return
    stated = {
        count: key
        for scope in _scopes(config)
        for key in EXPERT_COUNTS
        if isinstance(count := scope.get(key), int)
    }
    if not stated:
        return
    for name, count in _expert_counts(values).items():
        if count not in stated:
            expected = " or ".join(f"{number} ({key})" for number, key in stated.items())
            raise UnsupportedError(
                f"{name}: {count} experts, expected {expected} as in config.json",
                hint="with expert parallelism, the files must hold the experts of all ranks",
            )


def match_base(
    values: Mapping[str, Value],
    base: Mapping[str, tuple[str, tuple[int, ...]]],
    config: JsonObject | None,
    *,
    transpose: bool | None = None,
) -> HubNames:
    """Names and layouts of a base model.

    Every known naming is tried; it counts only if names and shapes are those of the base model,
    one for one. Either may lack the head of a language model, as one does that is tied or that a
    critic was made of (`ties` refuses models that need the head they lack). A classifier or value
    head may be new. The base model may have more of what transformers does not load, such as
    layers for multi-token prediction.

    Args:
        values: whole tensors under their names in memory.
        base: name -> (dtype, shape) of the base model's files. The dtypes do not matter.
        config: of the model.
        transpose: whether packed experts are transposed where their shape cannot tell.

    Raises:
        UnsupportedError: as `check_expert_counts`; no naming gives what the base model has; the
            shape of experts does not tell whether they are transposed, and `transpose` is None.
        UsageError: `transpose`, and other shapes tell that the experts are not transposed.
    """
    check_expert_counts(values, config)
    shapes = {name: shape for name, (_, shape) in base.items()}
    layers = _layer_count(config)
    # With one expert of each layer, even 36,000 tensors are compared under every naming at once.
    some_values, some_shapes = _first_experts(values), _first_experts(shapes)

    def distance(naming: _Naming) -> float:
        try:
            named, _ = _apply(some_values, naming, experts=1)
        except UnsupportedError:  # two tensors get one name
            return math.inf
        return _compare(named, some_shapes, layers).size

    naming = min(_namings(values, config), key=distance)
    named, changes = _apply(values, naming, "as in the base model")
    found = _compare(named, shapes, layers)
    if found.size:
        raise _mismatch(naming, named, found, shapes)
    for name in found.swapped + _square_to_swap(named, found.swapped, transpose):
        named[name] = _part(named[name], swapped=True)
        changes.append(Change("transposed", name, name, "as in the base model"))
    return HubNames(named, tuple(changes), _unused_warnings(found.unused))


# --- renaming and splitting -----------------------------------------------------------------------


def _apply(
    values: Mapping[str, Value], naming: _Naming, reason: str = "", experts: int | None = None
) -> tuple[dict[str, Value], list[Change]]:
    """The tensors under a naming; of packed experts, the given number or all."""
    named: dict[str, Value] = {}
    changes: list[Change] = []
    count = 0
    for name, value in values.items():
        names = naming.file_names(name)
        if names != (name,):
            kind: Kind = "expanded" if "*" in names[0] else "renamed"
            changes.append(Change(kind, name, ", ".join(names), reason))
        parts = _parts(value, names, experts)
        named.update(parts)
        count += len(parts)
        if len(named) != count:
            raise UnsupportedError(f"{name}: another tensor gets the name {names[0]}, too")
    return named, changes


def _parts(value: Value, names: Sequence[str], experts: int | None) -> dict[str, Value]:
    """The experts of a packed tensor by name; of another tensor, itself."""
    if "*" not in names[0]:
        return {names[0]: value}
    count, rows, _ = value.shape
    rows //= len(names)
    return {
        name.replace("*", str(expert)): _part(
            value, index=(expert,), rows=(number * rows, rows) if len(names) > 1 else None
        )
        for number, name in enumerate(names)
        for expert in range(count if experts is None else min(count, experts))
    }


def _part(
    value: Value,
    *,
    index: tuple[int, ...] = (),
    rows: tuple[int, int] | None = None,
    swapped: bool = False,
) -> Value:
    """A part of a whole tensor; of a cast or folded one, the part cast or folded."""
    part = Stored(stored_base(value).tensor, index, rows, swapped)
    if isinstance(value, Stored):
        return part
    if isinstance(value, Cast):
        return dataclasses.replace(value, value=part)
    return dataclasses.replace(value, base=part)


def _fault(shape: tuple[int, ...], names: Sequence[str]) -> str | None:
    """Why a tensor cannot be split under names with ``*``, if so."""
    if "*" not in names[0]:
        return None
    if len(shape) != 3:
        return f"shape {list(shape)}, expected [experts, rows, columns]"
    if shape[1] % len(names):
        return f"{shape[1]} rows per expert, expected an even number: those of gate and up"
    return None


# --- reading the config ---------------------------------------------------------------------------


def _scopes(config: JsonObject | None) -> Iterator[JsonObject]:
    """A config and the parts of it that describe text models, outermost first."""
    if config is not None:
        yield config
        for key in _SUBCONFIGS:
            inner = config.get(key)
            if isinstance(inner, dict):
                yield from _scopes(inner)


def _model_types(config: JsonObject | None) -> list[str]:
    types = map(model_type_of, _scopes(config))
    return [each for each in types if each is not None]


def _form(config: JsonObject | None) -> Experts | None:
    return next((EXPERTS[each] for each in _model_types(config) if each in EXPERTS), None)


def _layer_count(config: JsonObject | None) -> int | None:
    counts = (scope.get("num_hidden_layers") for scope in _scopes(config))
    return next((count for count in counts if isinstance(count, int)), None)


def _expert_counts(values: Mapping[str, Value]) -> dict[str, int]:
    """The packed tensors, and the modules of single experts, with their number of experts."""
    counts: dict[str, int] = {}
    single: defaultdict[str, set[str]] = defaultdict(set)
    for name, value in values.items():
        if _PACKED.search(name) and len(value.shape) == 3:
            counts[name] = value.shape[0]
        elif match := _UNPACKED.match(name):
            single[match[1]].add(match[2])
    return counts | {module: len(numbers) for module, numbers in single.items()}


def _name_warnings(values: Mapping[str, Value], config: JsonObject | None) -> tuple[str, ...]:
    """What to say of vision-language models, whose names are left as they are."""
    model_type = model_type_of(config)
    if model_type not in _NAMED_OTHERWISE_IN_FILES or not _has_language_model(values):
        return ()
    return (
        f"the tensors are named as transformers keeps {model_type} in memory, not as in the files "
        "of such models; transformers 4 and other readers may not find them (--names-from BASE "
        "gives them the names of the base model)",
    )


def _has_language_model(values: Mapping[str, Value]) -> bool:
    """Whether names are those that vision-language models have in memory."""
    return any(re.match(r"(?:thinker\.)?model\.language_model\.", name) for name in values)


def _packed_warnings(values: Mapping[str, Value], config: JsonObject | None) -> tuple[str, ...]:
    """What to say of packed experts that are left as they are."""
    shapes = {name: value.shape for name, value in values.items() if _PACKED.search(name)}
    types = _model_types(config)
    if not shapes or any(each in _PACKED_IN_FILES for each in types):
        return ()
    if not any(each in _TRANSPOSED_IN_FILES for each in types):
        known = f"model type {types[0]!r} is" if types else "without config.json it is"
        return (
            f"{len(shapes)} tensors of packed experts are written as transformers 5 keeps them in "
            f"memory; {known} not known to have them so in files (--names-from BASE finds out)",
        )
    hidden = next((size for scope in _scopes(config) if (size := scope.get("hidden_size"))), None)
    gates = [shape for name, shape in shapes.items() if name.endswith("gate_up_proj")]
    if all(len(shape) == 3 and shape[1] == hidden != shape[2] for shape in gates):
        return ()  # as transformers 4.57 has them in memory, too
    return (
        f"{len(shapes)} tensors of packed experts are written as transformers 5 keeps them in "
        f"memory; transformers 4.57 and vLLM read those of {types[0]} transposed "
        f"(--names-from BASE writes them so)",
    )


# --- comparing with a base model ------------------------------------------------------------------


def _namings(values: Mapping[str, Value], config: JsonObject | None) -> Iterator[_Naming]:
    """The namings that make a difference, the likeliest and cheapest first."""
    form = _form(config)
    forms = [form] if form else list(dict.fromkeys(EXPERTS.values()))
    layouts = list(_LAYOUTS) if _has_language_model(values) else ["as in memory"]
    towers = _TOWERS if any("vision_tower." in name for name in values) else _TOWERS[:1]
    for experts in (None, *(each for each in forms if _can_split(values, each))):
        for layout, tower in itertools.product(layouts, towers):
            yield _Naming(experts, layout, tower)


def _first_experts(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Without the single experts but the first of each layer."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (match := _UNPACKED.match(name)) is None or match[2] == "0"
    }


def _can_split(values: Mapping[str, Value], form: Experts) -> bool:
    packed = [name for name in values if form.packs(name)]
    return bool(packed) and all(
        _fault(values[name].shape, form.file_names(name)) is None for name in packed
    )


def _compare(
    named: Mapping[str, Value],
    base: Mapping[str, tuple[int, ...]],
    layers: int | None,
) -> _Difference:
    found = _Difference()
    for name, value in named.items():
        expected = base.get(name)
        if expected is None:
            if not any(optional.search(name) for optional in (_HEAD, _CLASSIFIER, _UNUSED)):
                found.extra.append(name)
        elif value.shape != expected:
            swapped = len(expected) == 3 and value.shape == (expected[0], *expected[:0:-1])
            swapped = swapped and _PACKED.search(name) is not None
            (found.swapped if swapped else found.reshaped).append(name)
    for name in base.keys() - named.keys():
        layer = _LAYER.match(name)
        if _UNUSED.search(name) or (layer and layers is not None and int(layer[1]) >= layers):
            found.unused.append(name)
        elif not (_HEAD.search(name) or _is_needless_scale(name, named)):
            found.missing.append(name)
    return found


def _is_needless_scale(name: str, named: Mapping[str, Value]) -> bool:
    """Whether a tensor of the base model scales a float8 weight that is another dtype here."""
    weight = named.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
    return weight is not None and not weight.dtype.startswith("F8")


def _square_to_swap(
    named: Mapping[str, Value], swapped: Sequence[str], transpose: bool | None
) -> list[str]:
    """The packed experts that are transposed though their shape does not tell.

    What tells it are the other packed experts: a model has all of them transposed or none. Yet
    transformers 5 does not transpose square ones when it loads them, so a checkpoint may hold them
    in either way.
    """
    packed = {name: named[name].shape for name in named if _PACKED.search(name)}
    square = [name for name, shape in packed.items() if len(shape) == 3 and shape[1] == shape[2]]
    if not square:
        return []
    if transpose and not swapped and len(square) < len(packed):
        other = next(name for name in packed if name not in square)
        raise UsageError(
            f"--transpose-experts yes, but {other} has shape {list(packed[other])} in the base "
            "model as in the checkpoint"
        )
    if transpose is None and swapped:
        raise UnsupportedError(
            f"{square[0]}: shape {list(packed[square[0]])} does not tell whether it is transposed, "
            "as other experts are against those of the base model",
            hint="--transpose-experts yes transposes it, too; no leaves it (right for a model that "
            "transformers 5 loaded from files of the base model's layout)",
        )
    return square if transpose else []


def _unused_warnings(unused: Sequence[str]) -> tuple[str, ...]:
    if not unused:
        return ()
    return (
        f"{len(unused)} tensors of the base model that transformers does not load are not in the "
        f"checkpoint ({_some(sorted(unused))}): the result lacks them, too",
    )


def _mismatch(
    naming: _Naming,
    named: Mapping[str, Value],
    found: _Difference,
    base: Mapping[str, tuple[int, ...]],
) -> UnsupportedError:
    parts = []
    if found.missing:
        parts.append(f"{len(found.missing)} are missing ({_some(sorted(found.missing))})")
    if found.extra:
        parts.append(f"{len(found.extra)} are not in the base model ({_some(found.extra)})")
    if found.reshaped:
        shown = [
            f"{name} {list(named[name].shape)} instead of {list(base[name])}"
            for name in found.reshaped[:_SHOWN]
        ]
        more = ", ..." if len(found.reshaped) > _SHOWN else ""
        parts.append(f"{len(found.reshaped)} have another shape ({', '.join(shown)}{more})")
    experts = f", experts as {naming.experts.name} has them" if naming.experts else ""
    return UnsupportedError(
        "the tensors are not those of the base model under any known naming; "
        f"closest, with names {naming.layout}{experts}: of {len(base):,}, {'; '.join(parts)}",
        hint="--names-from takes the model that was trained, in plain (not quantized) files",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
