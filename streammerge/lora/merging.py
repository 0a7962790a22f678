"""LoRA adapters of a checkpoint: folded into their weights, or split off. Pure.

Names here are those that PEFT gives in memory (`names`), after `streammerge.names.clean_names`. The
arithmetic is that of peft 0.21 `tuners/lora/layer.py` (`merge`, `get_delta_weight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from streammerge.changes import Change
from streammerge.checkpoint import Tensor
from streammerge.config import JsonObject
from streammerge.errors import UnsupportedError
from streammerge.lora.layers import (
    Kind,
    Layer,
    Names,
    find_layers,
    is_transposed,
    parents,
    read_names,
    settle_kinds,
    some,
)
from streammerge.lora.names import FILE_PREFIX, PeftName, is_adapter_name, parse_name
from streammerge.lora.settings import LayerSettings, Settings, make_config
from streammerge.names import is_value_head
from streammerge.values import Fold, Stored, Value, stored_base

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})  # others are quantized
# Modules that make a model a classifier, whatever verl's file says of its task.
_CLASSIFIER_HEADS = frozenset({"score", "classifier"})


@dataclass(frozen=True, slots=True)
class Folded:
    """A model without an adapter.

    Attributes:
        values: its tensors under plain names, in the order of the checkpoint.
        changes: what was done to which name.
        warnings: for people, a line each.
    """

    values: dict[str, Value]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A base model and its adapter.

    Attributes:
        values: the tensors of the base model under plain names; none if the checkpoint has none.
        adapter: the tensors of ``adapter_model.safetensors``.
        config: ``adapter_config.json``.
        changes: what was done to which name.
        warnings: for people, a line each.
    """

    values: dict[str, Value]
    adapter: dict[str, Value]
    config: JsonObject
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


def adapter_only(values: Mapping[str, Value]) -> bool:
    """Whether a checkpoint holds what LoRA trains and nothing else of the model.

    That is adapters, ``modules_to_save``, and biases where those are trained; value heads do not
    count.
    """
    rest = [name for name in values if not is_adapter_name(name)]
    return len(rest) < len(values) and all(
        is_value_head(name) or _is_trained_bias(parse_name(name), "all") for name in rest
    )


def join_base(values: Mapping[str, Value], base: Mapping[str, Value]) -> dict[str, Value]:
    """A checkpoint that holds an adapter alone, completed with the weights of its base model.

    Args:
        values: the adapter, as `adapter_only` has it.
        base: the base model under plain names.

    Returns:
        The base model in its order, with trained biases instead of its own, then the adapter.

    Raises:
        UnsupportedError: the base model does not have a module that is adapted, or a bias that is
            trained, under exactly that name.
    """
    modules = {name.rpartition(".")[0] for name in base}
    missing: list[str] = []
    biases: dict[str, str] = {}
    for key in values:
        name = parse_name(key)
        if name.is_lora and name.path not in modules:
            missing.append(name.path)
        elif name.role in ("plain", "base") and not is_value_head(key):
            biases[name.path] = key
    missing += [path for path in biases if path not in base]
    if missing:
        raise UnsupportedError(
            f"the adapter is for {some(missing)}, which the base model does not have; "
            f"names there are like {some(base)}",
            hint="the base model must have the names that the model had in training; saved by "
            "another version of transformers it may have others",
        )
    joined = dict(base) | {path: values[key] for path, key in biases.items()}
    taken = set(biases.values())
    return joined | {key: value for key, value in values.items() if key not in taken}


def fold(
    values: Mapping[str, Value], settings: Settings | None, *, model_type: str | None
) -> Folded:
    """Fold the adapter of a model into its weights.

    Args:
        values: the model, under PEFT's names.
        settings: how the adapter was trained.
        model_type: of ``config.json``; tells how square weights lie.

    Raises:
        UnsupportedError: what PEFT could not merge either, or what cannot be known: no alpha, two
            adapters, a weight or matrix without its counterpart, shapes that do not fit, an
            adapter of another method, a quantized base.
    """
    if adapter_only(values):
        raise UnsupportedError(
            "the checkpoint holds a LoRA adapter without its base model",
            hint="give the base model with --base DIR, or take the adapter with --lora split",
        )
    settings = settings or Settings()
    names = read_names(values)
    layers = find_layers(names, values, settings, alone=False)
    if settings.initialization and any(
        names.base[layer.target] == layer.target for layer in layers
    ):
        raise _changed_base(settings.initialization)
    folds = _make_folds(layers, names, values, settings, model_type)
    result: dict[str, Value] = {}
    changes: list[Change] = []
    for key, value in values.items():
        name = names.parsed[key]
        if name.is_lora:
            changes.append(Change("dropped", key, None, "adapter, folded into its weight"))
        elif names.trained.get(name.path, key) != key:
            changes.append(Change("dropped", key, None, "modules_to_save has the trained one"))
        elif name.path in folds:
            result[name.path], reason = folds[name.path]
            changes.append(Change("folded", key, name.path, reason))
        else:
            result[name.path] = value
            changes += _renamed(key, name)
    return Folded(result, tuple(changes), tuple(_scale_warnings(layers, settings)))


def split(
    values: Mapping[str, Value],
    settings: Settings | None,
    *,
    model_type: str | None,
    base_name_or_path: str | None,
) -> Split:
    """Take the adapter of a model apart from it.

    Base and adapter together are the trained model. Modules trained in full are in the adapter,
    and the base has what they replace. Of biases that are trained in place (``bias`` of the
    settings) nothing else is left, so both have them.

    Args:
        values: the model, under PEFT's names; or an adapter alone.
        settings: how the adapter was trained.
        model_type: of ``config.json``; tells how square weights lie.
        base_name_or_path: what the config names as base model; None for what the settings name.

    Raises:
        UnsupportedError: an adapter that cannot be described reliably: no alpha, two adapters,
            a weight or matrix without its counterpart, an adapter of another method.
    """
    settings = settings or Settings()
    alone = adapter_only(values)
    if settings.initialization and alone:
        raise _changed_base(settings.initialization)
    names = read_names(values)
    layers = find_layers(names, values, settings, alone=alone)
    if not layers:
        raise UnsupportedError("the checkpoint holds modules_to_save, but no LoRA adapter to split")
    if alone:
        settings = replace(settings, bias=_bias_setting(names))
    result: dict[str, Value] = {}
    adapter: dict[str, Value] = {}
    changes: list[Change] = []
    for key, value in values.items():
        name = names.parsed[key]
        if name.is_lora or name.role == "trained":
            adapter[name.file_name] = value
            changes.append(Change("split", key, name.file_name, "adapter"))
            continue
        trained_bias = not is_value_head(key) and _is_trained_bias(name, settings.bias)
        if trained_bias:
            adapter[FILE_PREFIX + key] = value
            reason = "trained bias" if alone else "trained bias, in the base model too"
            changes.append(Change("split", key, FILE_PREFIX + key, reason))
        if not (alone and trained_bias):
            result[name.path] = value
            changes += _renamed(key, name)
    if not settings.initialization:
        base_name_or_path = base_name_or_path or settings.base_model
    config = _make_config(names, layers, settings, base_name_or_path, model_type)
    warnings = (*_scale_warnings(layers, settings), *_config_warnings(config))
    return Split(result, adapter, config, tuple(changes), warnings)


def _make_folds(
    layers: Sequence[Layer],
    names: Names,
    values: Mapping[str, Value],
    settings: Settings,
    model_type: str | None,
) -> dict[str, tuple[Fold, str]]:
    """The weights and biases that change, by plain name, each with the reason for people."""
    for layer in layers:
        _float(values[names.base[layer.target]])  # first: quantized weights have other shapes
    kinds = settle_kinds(layers, settings, model_type)
    dora = settings.dora or any(layer.has_magnitude for layer in layers)
    folds: dict[str, tuple[Fold, str]] = {}
    for layer in layers:
        kind = kinds[layer.target]
        base = _float(values[names.base[layer.target]])
        a, b = _float(Stored(layer.a)).tensor, _float(Stored(layer.b)).tensor
        scale = settings.scale(layer.alpha, layer.rank)
        magnitude = _magnitude(layer, kind, values, settings) if dora else None
        weight = Fold(base, a, b, scale, kind, base.dtype, magnitude, layer.experts)
        reason = f"{'DoRA' if dora else 'LoRA'}, scale {_scale_text(layer, settings)}"
        folds[layer.target] = weight, reason
        if "lora_B.bias" in layer.keys:
            folds[f"{layer.module}.bias"] = _fold_bias(layer, names, values, scale), reason
    return folds


def _fold_bias(layer: Layer, names: Names, values: Mapping[str, Value], scale: float) -> Fold:
    """The bias of a layer whose B has a bias (``lora_bias``)."""
    key = layer.keys["lora_B.bias"]
    target = f"{layer.module}.bias"
    if target not in names.base:
        raise UnsupportedError(
            f"key '{key}': the layer has no bias to fold it into, PEFT does not merge it either"
        )
    base = _float(values[names.base[target]])
    return Fold(base, None, _float(values[key]).tensor, scale, "bias", base.dtype)


def _float(value: Value) -> Stored:
    """A value that arithmetic makes sense with."""
    stored = stored_base(value)
    if stored.dtype not in _FLOATS:
        raise UnsupportedError(
            f"key '{stored.tensor.name}' is of {stored.dtype}: an adapter cannot be folded into "
            "quantized weights",
            hint="--lora split keeps the adapter apart",
        )
    return stored


def _magnitude(layer: Layer, kind: Kind, values: Mapping[str, Value], settings: Settings) -> Tensor:
    """The magnitudes of a DoRA layer."""
    if not layer.has_magnitude:
        raise UnsupportedError(
            f"key '{layer.a.name}' is of a DoRA adapter, but its lora_magnitude_vector is missing"
        )
    magnitude = _float(values[layer.keys["lora_magnitude_vector"]]).tensor
    if settings.dora is False:
        raise UnsupportedError(
            f"key '{magnitude.name}' is of a DoRA adapter, its settings say that use_dora is false",
            hint="they are of another run",
        )
    if not layer.is_linear or kind != "linear":
        raise UnsupportedError(
            f"key '{magnitude.name}': DoRA is supported on linear layers with weights [out, in] "
            "only, not on embeddings, convolutions or fan_in_fan_out"
        )
    if magnitude.shape != layer.b.shape[:1]:
        raise UnsupportedError(
            f"key '{magnitude.name}' has shape {list(magnitude.shape)}, expected "
            f"{list(layer.b.shape[:1])}"
        )
    return magnitude


def _renamed(key: str, name: PeftName) -> Iterator[Change]:
    """The change of a name, if there is one."""
    reasons = {
        "trained": "trained in full (modules_to_save)",
        "original": "what the trained module of modules_to_save replaces",
    }
    if key != name.path:
        reason = reasons.get(name.role, "wrapper part base_layer of PEFT")
        yield Change("renamed", key, name.path, reason)


def _is_trained_bias(name: PeftName, bias: str) -> bool:
    """Whether a tensor of the base model is a bias that is trained in place under a setting.

    As `_get_learnable_bias_state_dict` in peft 0.21 `tuners/tuners_utils.py`.
    """
    if bias == "lora_only":
        return name.role == "base" and name.path == f"{name.module}.bias"
    return bias == "all" and name.role in ("base", "plain") and name.path.endswith(".bias")


def _bias_setting(names: Names) -> str:
    """The setting under which the biases of an adapter alone are trained."""
    keys = [key for key in names.base.values() if not is_value_head(key)]
    if not keys:
        return "none"
    wrapped = all(_is_trained_bias(names.parsed[key], "lora_only") for key in keys)
    return "lora_only" if wrapped else "all"


def _scale_text(layer: Layer, settings: Settings) -> str:
    """The factor of a layer's product and where it is from, for people."""
    scale = settings.scale(layer.alpha, layer.rank)
    rank = f"sqrt(r {layer.rank})" if settings.rslora else f"r {layer.rank}"
    return f"{scale:.6g} = alpha {layer.alpha:g} / {rank} ({settings.source})"


def _scale_warnings(layers: Iterable[Layer], settings: Settings) -> Iterator[str]:
    """What nothing in the checkpoint tells: whether it is rsLoRA."""
    if settings.rslora is not None:
        return
    stabilized = replace(settings, rslora=True)
    scales = {
        _scale_text(layer, settings): stabilized.scale(layer.alpha, layer.rank)
        for layer in layers
        if layer.rank > 1
    }
    for text, other in scales.items():
        yield f"LoRA scale {text}; if it was trained with rsLoRA, --rslora makes it {other:.6g}"


def _changed_base(method: str) -> UnsupportedError:
    return UnsupportedError(
        f"the adapter was initialized with {method}, which changes the base weights, so it does "
        "not fit the base model as it was before",
        hint="merge a checkpoint that holds the base weights too",
    )


def _make_config(
    names: Names,
    layers: Sequence[Layer],
    settings: Settings,
    base_name_or_path: str | None,
    model_type: str | None,
) -> JsonObject:
    """The ``adapter_config.json`` of layers that are found in the checkpoint."""
    weights = [path for path, key in names.base.items() if not key.endswith(".bias")]
    modules = {parent for path in weights for parent in parents(path)}
    trained = {names.parsed[key].owner for key in names.trained.values()}
    flags = {
        "use_rslora": bool(settings.rslora),
        "use_dora": any(layer.has_magnitude for layer in layers),
        "lora_bias": any("lora_B.bias" in layer.keys for layer in layers),
        "fan_in_fan_out": bool(settings.fan_in_fan_out)
        or any(is_transposed(layer, model_type) for layer in layers),
    }
    return make_config(
        settings,
        [LayerSettings(layer.pattern_name, layer.rank, layer.alpha) for layer in layers],
        base_name_or_path=base_name_or_path,
        task_type=_task_type(settings, names),
        target_modules=_shortest([x.module for x in layers if not x.parameter], modules, 1),
        target_parameters=_shortest([x.target for x in layers if x.parameter], weights, 2),
        modules_to_save=sorted(trained),
        flags=[flag for flag, is_set in flags.items() if is_set],
    )


def _task_type(settings: Settings, names: Names) -> str | None:
    """PEFT's kind of model; none for a classifier that is said to be a language model.

    verl says so of every model, critics too. PEFT can load an adapter without a task.
    """
    heads = {path.split(".")[0] for path in (*names.base, *names.trained)}
    if settings.task_type == "CAUSAL_LM" and not heads.isdisjoint(_CLASSIFIER_HEADS):
        return None
    return settings.task_type


def _shortest(trained: Sequence[str], everything: Iterable[str], parts: int) -> list[str]:
    """The ends of names, where no other name has the same end, else the whole names.

    PEFT takes each as the end of a name.

    Args:
        trained: the names that are meant.
        everything: all names that there are; a name that is not among them is given whole.
        parts: how long an end is.
    """

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    known = set(everything)
    others = {end(name) for name in known - set(trained)}
    short = [name if end(name) in others or name not in known else end(name) for name in trained]
    return list(dict.fromkeys(short))


def _config_warnings(config: JsonObject) -> Iterator[str]:
    """What loaders make of a config."""
    if "base_model_name_or_path" not in config:
        yield (
            "adapter_config.json names no base model (base_model_name_or_path), so only "
            "PeftModel.from_pretrained can load the adapter, not AutoPeftModel or AutoModel"
        )
    unknown_to_vllm = [key for key in ("use_dora", "modules_to_save") if key in config]
    if unknown_to_vllm:
        what = " or ".join(unknown_to_vllm)
        yield f"vLLM loads no adapter with {what}; --lora fold gives a model that it loads"
    if "rank_pattern" in config or "alpha_pattern" in config:
        yield (
            "rank or alpha differs between layers (rank_pattern, alpha_pattern): PEFT heeds that, "
            "vLLM and SGLang may not"
        )
    if "target_parameters" in config:
        yield (
            "the adapter is for parameters (target_parameters): peft 0.17 and later load it, and "
            "peft 0.19 expects other shapes than 0.17 and 0.18 for most models"
        )
