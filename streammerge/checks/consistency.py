"""Whether the names and shapes of a model fit each other and its config. Pure.

How many tensors a model must have cannot be told without building it (`model` does). What
can be told: layers and experts are numbered without holes up to the number in the config, layers
of a kind have the same tensors, no name has the part of a wrapper, the embedding has a row per
token. There are many configs and architectures: about one that is not understood, nothing is said.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from streammerge.checkpoint import Extents, PlainLayout, Tensor
from streammerge.checks.findings import Finding, error, listed, warning
from streammerge.config import (
    JsonObject,
    JsonValue,
    architecture_edits,
    config_dtype,
    dtype_edits,
    majority_dtype,
    model_configs,
    quantization_edits,
    quantized_for_certain,
)
from streammerge.dtypes import FLOATING, TO_TORCH
from streammerge.errors import UnsupportedError
from streammerge.header import tensor_nbytes
from streammerge.hub_names import EXPERT_COUNTS, EXPERTS
from streammerge.lora.names import parse_name
from streammerge.names import clean_names
from streammerge.ties import decide, find_pair
from streammerge.values import Stored, Value

# What lists of layers are called, and the number of layers in the config of a language model.
_LAYER_LISTS = ("layers", "h", "blocks", "block", "layer")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Layers behind the last one that predict further tokens: DeepSeek-V3, GLM-4.5 and others.
_EXTRA_LAYERS = re.compile(r"nextn|mtp")
_MAX_DIGITS = 9  # of the number of a layer or expert; what is longer is another part of a name
_EXPERT = re.compile(rf"(.*\bexperts)\.(\d{{1,{_MAX_DIGITS}}})\.(.+)")
_EXPERT_NUMBER = re.compile(r"(\bexperts)\.\d+\.")
_PACKED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
# Where the config of the language model is, in that of a larger model.
_WRAPPING_CONFIGS = ("thinker_config",)
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# Layers that differ from the rest are a fault only if they are few.
_MOST_ODD = 2


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a file.

    Attributes:
        dtype: safetensors name.
        shape: as torch has it.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_nbytes(self.dtype, self.shape)


Weights = Mapping[str, Weight]


def check_consistency(weights: Weights, config: JsonObject | None) -> Iterator[Finding]:
    """Everything that the tensors of a model and its config tell about each other.

    Args:
        weights: the tensors of all files.
        config: ``config.json``; None if there is none.
    """
    yield from check_architectures(config)
    yield from check_wrapper_parts(weights, config or {})
    yield from check_layers(weights, config or {})
    yield from check_experts(weights, config or {})
    yield from check_vocabulary(weights, config or {})
    yield from check_ties(weights, config)
    yield from check_dtypes(weights, config)


# --- classes and code -----------------------------------------------------------------------------


def check_architectures(config: JsonObject | None) -> Iterator[Finding]:
    """Whether the config names the class of the model."""
    if config is None:
        return
    if not config.get("architectures"):
        yield warning("config.json: says no architectures, which vLLM and SGLang ask for")
    for edit in architecture_edits(config):
        if edit.path == ("architectures",):
            yield warning(f"config.json: architectures should be changed: {edit.reason}")


def remote_modules(config: JsonObject) -> list[str]:
    """The files that an ``auto_map`` needs: ``file.Class``, or a list of them with nulls.

    ``repo--file.Class`` is fetched from the Hub. Source: transformers 5.24
    `dynamic_module_utils.py`.
    """
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return []
    modules = set()
    for value in auto_map.values():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference and "." in reference:
                modules.add(reference.rpartition(".")[0].replace(".", "/") + ".py")
    return sorted(modules)


# --- names ----------------------------------------------------------------------------------------


def check_wrapper_parts(names: Collection[str], config: JsonObject) -> Iterator[Finding]:
    """Parts of names that wrappers left: of torch.compile, FSDP, DDP, PEFT, TRL."""
    try:
        changes = clean_names(list(names), adapter_settings=True).changes
    except UnsupportedError as problem:
        yield error(str(problem))
        return
    if changes:
        yield error(
            f"{len(changes)} names have parts of wrappers, which loaders do not know: "
            f"{listed(change.name for change in changes)}"
        )
    peft = [name for name in names if parse_name(name).role != "plain"]
    # Phi-4-multimodal has adapters of its own, and says so.
    if peft and not any(key.endswith("_lora") for key in config):
        yield error(f"{len(peft)} names are PEFT's, which loaders do not know: {listed(peft)}")
    heads = [name for name in names if name.startswith("v_head.")]
    if heads:
        yield warning(
            f"a value head is among the weights ({listed(heads)}): transformers ignores it, vLLM "
            "refuses it"
        )


# --- layers ---------------------------------------------------------------------------------------

_Stack = dict[int, set[str]]  # number of a layer -> its tensors


def check_layers(names: Collection[str], config: JsonObject) -> Iterator[Finding]:
    """Whether all layers are there, and a few of them differ from the rest."""
    stacks = _stacks(names)
    counted = _layer_counts(stacks, names, config)
    for path, stack in stacks.items():
        count = counted.get(path)
        if count is None:
            # Lists of unlike modules, as in a convolutional encoder, may have members without
            # tensors. Layers that are all alike have none.
            missing = _missing(stack, max(stack))
            if missing and len({frozenset(tensors) for tensors in stack.values()}) == 1:
                yield warning(f"{path}: layer {missing} missing, up to {max(stack)}")
            continue
        if missing := _missing(stack, count):
            yield error(f"{path}: layer {missing} missing, config.json says {count} layers")
        surplus = sorted(number for number in stack if number >= count + _extra_layers(config))
        if surplus:
            yield error(
                f"{path}: has layer {_numbers(surplus)}, but config.json says {count} layers; "
                "loaders leave the others out"
            )
        yield from _check_alike(path, {n: t for n, t in stack.items() if n < count})


def _stacks(names: Iterable[str]) -> dict[str, _Stack]:
    """The outermost numbered lists of layers, by path."""
    stacks: dict[str, _Stack] = defaultdict(lambda: defaultdict(set))
    for name in names:
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.isdecimal() and len(p) <= _MAX_DIGITS), 0)
        if at and parts[at - 1] in _LAYER_LISTS:
            # Whether all experts are there is asked elsewhere.
            rest = _EXPERT_NUMBER.sub(r"\1.*.", ".".join(parts[at + 1 :]))
            stacks[".".join(parts[:at])][int(parts[at])].add(rest)
    return stacks


def _layer_counts(
    stacks: Mapping[str, _Stack], names: Collection[str], config: JsonObject
) -> dict[str, int]:
    """How many layers the config gives to the lists that it is known to count."""
    if config.get("is_encoder_decoder"):
        return _sided_layer_counts(stacks, config)
    section = language_config(config)
    count = next(_ints(section, _LAYER_COUNTS), None)
    kinds = section.get("layer_types")
    if count is None or (isinstance(kinds, list) and "mlp" in kinds):
        return {}  # Dory counts attention and mlp as layers of their own
    pair = find_pair(names, config)
    # The layers of a language model are beside its embedding.
    beside = pair.embedding_name.rsplit(".", 2)[0] if pair is not None else None
    paths = [path for path in stacks if path.rpartition(".")[0] == beside]
    if not paths and len(stacks) == 1:
        paths = list(stacks)
    return {paths[0]: count} if len(paths) == 1 else {}


def _sided_layer_counts(stacks: Mapping[str, _Stack], config: JsonObject) -> dict[str, int]:
    keys = {
        "encoder": ("encoder_layers", "num_layers"),
        "decoder": ("decoder_layers", "num_decoder_layers", "num_layers"),
    }
    counts = {}
    for path in stacks:
        side = path.split(".")[-2] if "." in path else ""
        count = next(_ints(config, keys.get(side, ())), None)
        if count is not None:
            counts[path] = count
    return counts


def _extra_layers(config: JsonObject) -> int:
    section = language_config(config)
    keys = [key for key in section if _EXTRA_LAYERS.search(key)]
    return max(_ints(section, keys), default=0)


def _check_alike(path: str, stack: _Stack) -> Iterator[Finding]:
    """Layers that lack something which all others have.

    Layers of another kind (dense before experts, attention among recurrent ones) have tensors of
    their own as well, so that nothing follows from what they lack.
    """
    kinds = Counter(frozenset(tensors) for tensors in stack.values())
    if not kinds:
        return
    usual, usual_count = kinds.most_common(1)[0]
    odd = {number: tensors for number, tensors in stack.items() if tensors != usual}
    if not odd or len(odd) > _MOST_ODD or usual_count < 2 * len(odd):
        return
    for number, tensors in sorted(odd.items()):
        if tensors < usual and number > 0:  # what stands before the first may do its norm
            yield warning(
                f"{path}.{number}: lacks {listed(sorted(usual - tensors))}, which the other "
                f"{usual_count} layers have"
            )


# --- experts --------------------------------------------------------------------------------------


def check_experts(weights: Weights, config: JsonObject) -> Iterator[Finding]:
    """Whether every layer has all experts, and each expert all its tensors."""
    yield from _check_packed(weights, config)
    counts = set(_ints_anywhere(config, EXPERT_COUNTS))
    groups: dict[str, _Stack] = defaultdict(lambda: defaultdict(set))
    problems: dict[Finding, list[str]] = defaultdict(list)  # of several layers, mostly
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            groups[match[1]][int(match[2])].add(match[3])
        elif name.endswith(_PACKED_EXPERTS):
            for problem in _check_expert_count(weight.shape[0], counts):
                problems[problem].append(name)
    for path, group in groups.items():
        for problem in _check_expert_group(group, counts):
            problems[problem].append(path)
    for problem, paths in problems.items():
        yield Finding(problem.severity, f"{listed(paths)}: {problem.message}")


def _check_expert_group(group: _Stack, counts: Collection[int]) -> Iterator[Finding]:
    count = max(group) + 1
    if missing := _missing(group, count):
        yield error(f"expert {missing} missing of {count}")
    else:
        yield from _check_expert_count(count, counts)
    every = set().union(*group.values())
    # Those beyond the count, if any, are of another kind.
    usual = {n: tensors for n, tensors in group.items() if n < max(counts, default=count)}
    lacking = sorted(number for number, tensors in usual.items() if tensors != every)
    if lacking:
        names = listed(sorted(every - usual[lacking[0]]))
        yield error(f"expert {_numbers(lacking)} incomplete, {lacking[0]} lacks {names}")


def _check_expert_count(count: int, counts: Collection[int]) -> Iterator[Finding]:
    if counts and count not in counts:
        said = f"holds {count} experts, config.json says {' or '.join(map(str, sorted(counts)))}"
        yield error(said) if count < max(counts) else warning(said)


def _check_packed(names: Iterable[str], config: JsonObject) -> Iterator[Finding]:
    for section in (config, language_config(config)):
        form = EXPERTS.get(str(section.get("model_type")))
        packed = [name for name in names if form is not None and form.packs(name)]
        if packed:
            yield warning(
                f"{len(packed)} tensors hold packed experts, as transformers 5 has them in memory; "
                f"transformers 4 and vLLM do not know them: {listed(packed)}"
            )
            return


# --- vocabulary -----------------------------------------------------------------------------------


def check_vocabulary(weights: Weights, config: JsonObject) -> Iterator[Finding]:
    """Whether embedding and head have a row for each token."""
    size = next(_ints(language_config(config), ("vocab_size",)), None)
    pair = find_pair(weights, config)
    if size is None or pair is None:
        return
    rows = {
        name: weights[name].shape[0]
        for name in (pair.embedding, pair.head)
        if name is not None and len(weights[name].shape) == 2
    }
    for name, count in rows.items():
        if count < size:
            yield error(f"{name}: has {count} rows, config.json says vocab_size {size}")
        elif size not in rows.values():  # some models embed more tokens than they predict
            yield warning(
                f"{name}: has {count} rows, config.json says vocab_size {size}; transformers "
                "refuses that unless the model pads its vocabulary"
            )


def check_ties(weights: Weights, config: JsonObject | None) -> Iterator[Finding]:
    """Whether a head or an embedding that is not stored is tied to the one that is."""
    values: dict[str, Value] = {
        name: Stored(Tensor(name, weight.dtype, weight.shape, PlainLayout((0,)), Extents()))
        for name, weight in weights.items()
    }
    try:
        # Both stored and equal is fine. Whether they are, only the data tell.
        decision = decide(values, config, equal=True)
    except UnsupportedError as problem:
        yield error(str(problem))
        return
    pair = find_pair(weights, config)
    if pair is not None and None not in (pair.head, pair.embedding):
        return  # all else is about what a merge would drop
    yield from map(warning, decision.warnings)
    for change in decision.changes:
        yield error(f"{change.name}: stored without {change.to}; {change.reason}")
    if pair is not None and pair.head is None:
        for edit in decision.edits:
            where = ".".join(edit.path)
            yield warning(f"config.json: {where} should be {json.dumps(edit.value)}: {edit.reason}")


# --- dtypes ---------------------------------------------------------------------------------------


def check_dtypes(weights: Weights, config: JsonObject | None) -> Iterator[Finding]:
    """Whether the config says what is stored, and that is one dtype."""
    tensors = [(name, weight.dtype) for name, weight in weights.items()]
    if config is not None:
        for edit in quantization_edits(config, tensors):
            yield error(f"config.json: {'.'.join(edit.path)} must go: {edit.reason}")
    if quantized_for_certain(tensors, config) is not None:
        return  # the config says in which dtype they compute, not how they are stored
    stored = majority_dtype((weight.dtype, weight.nbytes) for weight in weights.values())
    if config is not None and stored is not None:
        yield from _check_config_dtype(config, stored)
    nbytes = Counter[str]()
    for weight in weights.values():
        if weight.dtype in FLOATING:
            nbytes[weight.dtype] += weight.nbytes
    if len(nbytes) > 1:
        shares = ", ".join(f"{n:,} bytes of {TO_TORCH[d]}" for d, n in nbytes.most_common())
        yield warning(
            f"floating-point tensors of several dtypes ({shares}): loaders convert all to one, "
            "transformers 4.46 does not and fails in use; --dtype makes them one"
        )


def _check_config_dtype(config: JsonObject, stored: str) -> Iterator[Finding]:
    if config_dtype(config) is None:
        yield warning(
            f"config.json: says no dtype, {stored} is stored; transformers 4 loads float32, "
            "transformers 5 the dtype of the first tensor"
        )
        return
    parts = dict(model_configs(config))
    for edit in dtype_edits(config, stored):
        said = parts[edit.path[:-1]].get(edit.path[-1])
        if said is not None:  # one of dtype and torch_dtype is enough
            where = ".".join(edit.path)
            yield warning(f"config.json: {where} is {said}, but most of what is stored is {stored}")


# --- configs --------------------------------------------------------------------------------------


def language_config(config: JsonObject) -> JsonObject:
    """The part of a config that is about the language model; the whole of it if it has no parts."""
    for keys in (_WRAPPING_CONFIGS, _TEXT_CONFIGS):
        for key in keys:
            section = config.get(key)
            if isinstance(section, dict):
                config = section
                break
    return config


def _ints(section: JsonObject, keys: Iterable[str]) -> Iterator[int]:
    for key in keys:
        value = section.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def _ints_anywhere(value: JsonValue, keys: Collection[str]) -> Iterator[int]:
    if isinstance(value, dict):
        yield from _ints(value, keys)
        for nested in value.values():
            yield from _ints_anywhere(nested, keys)


def _numbers(numbers: Iterable[int]) -> str:
    return listed(map(str, numbers))


def _missing(numbers: Collection[int], count: int) -> str:
    """The numbers below `count` that are not there, for people; empty if all are.

    Names and configs can claim any number of layers, so nothing counts up to it.
    """
    missing = max(count, 0) - sum(number < count for number in numbers)
    absent = (str(number) for number in range(count) if number not in numbers)
    return listed(absent, missing) if missing else ""
