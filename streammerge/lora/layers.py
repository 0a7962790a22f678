"""Which weight each adapter of a checkpoint belongs to, and how. Pure.

Rank files hold tensors and no modules, so this is told by names, shapes and the settings of the
adapter; what they do not tell is refused. Source: peft 0.21 `tuners/lora/layer.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from streammerge.checkpoint import Tensor
from streammerge.errors import UnsupportedError
from streammerge.lora.names import TRAINABLE_TOKENS, PeftName, Role, method_of, parse_name
from streammerge.lora.settings import ALPHA_OPTION, Settings
from streammerge.values import Value, stored_base

# Models whose linear layers are `transformers.pytorch_utils.Conv1D`, with weights ``[in, out]``.
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_LINEAR_ROLES: tuple[Role, Role] = ("lora_A", "lora_B")
_EMBEDDING_ROLES: tuple[Role, Role] = ("lora_embedding_A", "lora_embedding_B")
_NAMES_SHOWN = 3

Kind = Literal["linear", "transposed"]
_K = TypeVar("_K", bound=str)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a checkpoint, by what they are.

    Attributes:
        parsed: key -> the same, taken apart.
        base: plain name -> key, of the tensors of the base model.
        trained: plain name -> key, of modules trained in full.
        adapters: module -> its adapters, that of the innermost wrapper first, as role -> key.
    """

    parsed: dict[str, PeftName]
    base: dict[str, str]
    trained: dict[str, str]
    adapters: dict[str, list[dict[Role, str]]]


@dataclass(frozen=True, slots=True)
class Layer:
    """An adapter and the weight it belongs to.

    Attributes:
        module: path of the module.
        target: plain name of the weight.
        keys: role -> key, of the adapter.
        a, b: the matrices.
        base: the weight; None in a checkpoint that holds the adapter alone.
        alpha: see `Settings`.
        parameter: whether the weight is one of ``target_parameters``.
        experts: how many matrices the weight is a stack of.
    """

    module: str
    target: str
    keys: dict[Role, str]
    a: Tensor
    b: Tensor
    base: Value | None
    alpha: float
    parameter: bool
    experts: int

    @property
    def rank(self) -> int:
        """Rank of the product."""
        return self.a.shape[0] // self.experts

    @property
    def pattern_name(self) -> str:
        """The name that PEFT matches patterns with."""
        return self.target if self.parameter else self.module

    @property
    def is_stack(self) -> bool:
        """Whether the weight is a stack of matrices, one per expert."""
        return self.parameter and self.base is not None and len(self.base.shape) == 3

    @property
    def is_embedding(self) -> bool:
        """Whether it is the adapter of an `nn.Embedding`."""
        return "lora_embedding_A" in self.keys

    @property
    def is_linear(self) -> bool:
        """Whether it is the adapter of an `nn.Linear` or a `Conv1D` of transformers."""
        return not self.parameter and not self.is_embedding and len(self.a.shape) == 2

    @property
    def has_magnitude(self) -> bool:
        """Whether it is a DoRA layer."""
        return "lora_magnitude_vector" in self.keys


def read_names(names: Iterable[str]) -> Names:
    """Take the names of a checkpoint apart.

    Raises:
        UnsupportedError: names of another method than LoRA or of two adapters, names that collide
            or lack their counterpart.
    """
    parsed = {key: parse_name(key) for key in names}
    _refuse_other_methods(parsed)
    adapters = {name.adapter for name in parsed.values() if name.adapter is not None}
    if len(adapters) > 1:
        raise UnsupportedError(
            f"the checkpoint holds several adapters: {some(sorted(adapters))}",
            hint="save it with one of them",
        )
    found = Names(parsed, {}, {}, {})
    wrappers: dict[str, dict[int, dict[Role, str]]] = {}
    for key, name in parsed.items():
        if name.is_lora:
            _add(wrappers.setdefault(name.path, {}).setdefault(name.depth, {}), name.role, key)
        elif name.role == "trained":
            _add(found.trained, name.path, key)
        else:
            _add(found.base, name.path, key)
    for module, by_depth in wrappers.items():
        found.adapters[module] = [by_depth[depth] for depth in sorted(by_depth, reverse=True)]
    for key, name in parsed.items():
        if name.role == "base" and len(found.adapters.get(name.module, ())) != name.depth + 1:
            raise UnsupportedError(f"key '{key}' is of a layer with an adapter, which is missing")
        if name.role == "original" and name.path not in found.trained:
            raise UnsupportedError(f"key '{key}' has no counterpart in modules_to_save")
    return found


def find_layers(
    names: Names, values: Mapping[str, Value], settings: Settings, *, alone: bool
) -> list[Layer]:
    """Which weight each adapter belongs to.

    Args:
        names: of the values.
        values: the checkpoint.
        settings: how the adapter was trained.
        alone: whether the checkpoint holds nothing of the base model.

    Raises:
        UnsupportedError: a matrix without its counterpart or its weight, a rank that is not the
            one of the settings, no alpha.
    """
    own: dict[str, dict[str, Value]] = {}
    for path, key in names.base.items():
        own.setdefault(path.rpartition(".")[0], {})[path] = values[key]
    layers: list[Layer] = []
    for module, wrappers in names.adapters.items():
        pairs = [_matrices(module, keys, values) for keys in wrappers]
        parameters = {} if alone else own.get(module, {})
        if alone:
            targets, parameter = _targets_alone(module, pairs, settings)
        else:
            targets, parameter = _find_targets(module, pairs, parameters, settings)
        for keys, (a, b), target in zip(wrappers, pairs, targets, strict=True):
            name = target if parameter else module
            base = parameters.get(target)
            alpha = _alpha(name, settings)
            experts = _experts(name, a, base, settings) if parameter else 1
            _check_rank(name, a, experts, settings)
            layers.append(Layer(module, target, keys, a, b, base, alpha, parameter, experts))
    return layers


def settle_kinds(
    layers: Sequence[Layer], settings: Settings, model_type: str | None
) -> dict[str, Kind]:
    """How the weight of each layer lies, by plain name.

    Shapes tell it, but for square weights. There, the other layers do: the settings (or the type
    of the model) hold for all linear ones, and all stacks of experts of a model lie alike. Which
    way these do depends on the versions of peft and of transformers that trained the adapter (peft
    0.19 swapped them for most models), so the type of the model alone does not tell.

    Raises:
        UnsupportedError: shapes that do not fit; a square weight of which nothing tells how it
            lies.
    """
    possible = {layer.target: possible_kinds(layer) for layer in layers}
    stacks: set[Kind] = set()
    linears: set[Kind] = set()
    for layer in layers:
        kinds = possible[layer.target]
        if not kinds:
            raise _misfit(layer)
        if len(kinds) == 1 and layer.is_stack:
            stacks.update(kinds)
        elif len(kinds) == 1 and layer.is_linear:
            linears.update(kinds)
    settled: dict[str, Kind] = {}
    for layer in layers:
        kinds = possible[layer.target]
        if len(kinds) == 1:
            settled[layer.target] = kinds[0]
            continue
        if layer.is_stack:
            kind = next(iter(stacks)) if len(stacks) == 1 else None
        else:
            kind = _kind_of_square(linears, settings, model_type)
        if kind is None:
            hint = None
            if layer.is_linear:
                hint = "config.json (its model_type) or adapter_config.json (its fan_in_fan_out)"
                hint += " beside the checkpoint tells"
            raise UnsupportedError(
                f"key '{_key(layer)}' is square, and nothing tells whether it is [out, in] or "
                "[in, out]",
                hint=hint,
            )
        settled[layer.target] = kind
    return settled


def possible_kinds(layer: Layer) -> tuple[Kind, ...]:
    """The ways in which the weight may lie for the shapes to fit; two for a square one."""
    assert layer.base is not None
    shape, a, b = layer.base.shape, layer.a.shape, layer.b.shape
    if layer.parameter:
        return _parameter_kinds(shape, a, b)
    if len(shape) > 2:  # a convolution; with groups, A has more channels and B fewer
        fits = b == (shape[0], a[0], *(1 for _ in shape[2:])) and a[1:] == shape[1:]
        return ("linear",) if fits else ()
    if len(a) != 2 or len(b) != 2 or b[1] != a[0]:
        return ()
    if layer.is_embedding:
        return ("transposed",) if shape == (a[1], b[0]) else ()
    return _kinds(shape, a, b)


def is_transposed(layer: Layer, model_type: str | None) -> bool:
    """Whether a layer is certain to be a linear one with a weight ``[in, out]``."""
    if not layer.is_linear:
        return False
    if layer.base is None:
        return model_type in _CONV1D_MODELS
    kinds = possible_kinds(layer)
    return kinds == ("transposed",) or (len(kinds) > 1 and model_type in _CONV1D_MODELS)


def some(names: Iterable[str]) -> str:
    """The first few names, for people."""
    found = list(dict.fromkeys(names))
    shown = ", ".join(f"'{name}'" for name in found[:_NAMES_SHOWN])
    more = len(found) - _NAMES_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def parents(name: str) -> Iterator[str]:
    """The paths of the modules around a tensor, from the outside."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _refuse_other_methods(parsed: Mapping[str, PeftName]) -> None:
    """Refuse what is not LoRA: by its name, or because it is part of a wrapped layer."""
    owners = {name.owner for name in parsed.values() if name.role == "base"}
    lora = any(name.is_lora or name.role == "trained" for name in parsed.values())
    strange: list[tuple[str, str | None]] = []
    for key, name in parsed.items():
        if name.is_nested:
            raise UnsupportedError(f"key '{key}': an adapter in a module of modules_to_save")
        method = None if name.is_lora else method_of(key)
        hangs = name.role == "plain" and any(parent in owners for parent in parents(key))
        if hangs or method == TRAINABLE_TOKENS or (method is not None and not lora):
            strange.append((key, method))
    if strange:
        key, method = next((found for found in strange if found[1]), strange[0])
        kind = f"is of {method}" if method else "is part of a layer with an adapter"
        raise UnsupportedError(f"key '{key}' {kind}; of PEFT's methods only LoRA is supported")
    if not lora:
        raise UnsupportedError(
            "layers are wrapped for an adapter (base_layer), but the checkpoint does not hold it"
        )


def _add(names: dict[_K, str], name: _K, key: str) -> None:
    if names.setdefault(name, key) != key:
        raise UnsupportedError(f"keys '{names[name]}' and '{key}' are both {name}")


def _alpha(name: str, settings: Settings) -> float:
    alpha = settings.alpha_of(name)
    if alpha is None:
        raise UnsupportedError(
            "alpha of the LoRA adapter is unknown: no lora_train_meta.json and no "
            "adapter_config.json says it",
            hint=f"give the lora_alpha of the training with {ALPHA_OPTION}",
        )
    return alpha


def _experts(name: str, a: Tensor, base: Value | None, settings: Settings) -> int:
    """How many matrices a parameter is a stack of."""
    if base is not None:
        return base.shape[0] if len(base.shape) == 3 else 1
    rank = settings.rank_of(name)
    if rank is None:
        raise UnsupportedError(
            f"key '{a.name}' is of an adapter for a parameter, and nothing tells its rank",
            hint="a lora_train_meta.json or adapter_config.json beside the checkpoint does",
        )
    return max(1, a.shape[0] // rank)


def _check_rank(name: str, a: Tensor, experts: int, settings: Settings) -> None:
    rank = settings.rank_of(name)
    if rank is not None and a.shape[0] != rank * experts:
        raise UnsupportedError(
            f"key '{a.name}' has shape {list(a.shape)}, so rank {a.shape[0] / experts:g}; "
            f"the settings of the adapter say {rank}",
            hint="they are of another run, or their rank_pattern is missing",
        )


def _matrices(
    module: str, keys: Mapping[Role, str], values: Mapping[str, Value]
) -> tuple[Tensor, Tensor]:
    """A and B of an adapter."""
    embedding = not keys.keys().isdisjoint(_EMBEDDING_ROLES)
    wanted, other = (_LINEAR_ROLES, _EMBEDDING_ROLES)[:: -1 if embedding else 1]
    for role in wanted:
        if role not in keys:
            key = next(iter(keys.values()))
            raise UnsupportedError(f"key '{key}' has no counterpart {role}")
    if not keys.keys().isdisjoint(other):
        raise UnsupportedError(f"module '{module}' has adapters of a layer and of an embedding")
    a, b = (stored_base(values[keys[role]]).tensor for role in wanted)
    if not a.shape or a.shape[0] == 0:
        raise UnsupportedError(f"key '{a.name}' has shape {list(a.shape)}, so it has no rank")
    return a, b


def _find_targets(
    module: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    parameters: Mapping[str, Value],
    settings: Settings,
) -> tuple[Sequence[str], bool]:
    """The weights that the adapters of a module are for, and whether as parameters.

    The adapter of a layer is for its ``weight``, others are for parameters of any name. PEFT wraps
    the parameters of a module in their order, the first innermost (`_inject_parameters` in peft
    0.21 `tuners/tuners_utils.py`), so mostly there is one way in which shapes fit.
    """
    weight = f"{module}.weight"
    said = [name for name in parameters if _is_said(name, settings)]
    if weight in parameters and len(pairs) == 1 and not said:
        dims, matrix_dims = len(parameters[weight].shape), len(pairs[0][0].shape)
        if dims == matrix_dims or dims != 3:
            return [weight], False
    ways = [
        way
        for way in itertools.combinations(said or parameters, len(pairs))
        if all(
            _parameter_kinds(parameters[name].shape, a.shape, b.shape)
            for name, (a, b) in zip(way, pairs, strict=True)
        )
    ]
    if not ways:
        a, b = pairs[0]
        shapes = some(f"{name} {list(value.shape)}" for name, value in parameters.items())
        raise UnsupportedError(
            f"key '{a.name}': A {list(a.shape)} and B {list(b.shape)} fit no weight of the module, "
            f"which has {shapes or 'none'}"
        )
    if len(ways) > 1:
        raise UnsupportedError(
            f"key '{pairs[0][0].name}': the adapters of the module fit {some(ways[0])}, and "
            f"{some(ways[1])} as well",
            hint="an adapter_config.json beside the checkpoint tells, by target_parameters",
        )
    if ways[0][0].endswith(".in_proj_weight"):
        raise UnsupportedError(
            f"key '{pairs[0][0].name}': LoRA on nn.MultiheadAttention is not supported"
        )
    return ways[0], True


def _targets_alone(
    module: str, pairs: Sequence[tuple[Tensor, Tensor]], settings: Settings
) -> tuple[Sequence[str], bool]:
    """The same, for an adapter without its base model: as far as the settings tell."""
    said = [
        f"{module}.{name.rpartition('.')[2]}"
        for name in settings.target_parameters
        if _ends_with(module, name.rpartition(".")[0])
    ]
    if said and len(said) == len(pairs):
        return said, True
    if len(pairs) == 1 and not said:
        return [f"{module}.weight"], False
    raise UnsupportedError(
        f"module '{module}' has adapters for {len(pairs)} parameters, and nothing tells which",
        hint="an adapter_config.json beside the checkpoint does, by target_parameters",
    )


def _is_said(name: str, settings: Settings) -> bool:
    return any(_ends_with(name, said) for said in settings.target_parameters)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _parameter_kinds(
    shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Kind, ...]:
    """The ways in which a matrix ``[out, in]`` or a stack of them fits."""
    if len(a) != 2 or len(b) != 2 or b[1] != a[0]:
        return ()
    if len(shape) == 2:
        return ("linear",) if shape == (b[0], a[1]) else ()
    if len(shape) != 3 or shape[0] == 0 or a[0] % shape[0]:
        return ()
    return _kinds(shape[1:], a, b)


def _kinds(matrix: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Kind, ...]:
    kinds: list[Kind] = []
    if matrix == (b[0], a[1]):
        kinds.append("linear")
    if matrix == (a[1], b[0]):
        kinds.append("transposed")
    return tuple(kinds)


def _kind_of_square(seen: set[Kind], settings: Settings, model_type: str | None) -> Kind | None:
    """How square linear weights lie, given how the others do."""
    if model_type in _CONV1D_MODELS:
        return "transposed"
    if settings.fan_in_fan_out is not None:
        # PEFT changes the setting to what the last layer needs, so it may not hold for all.
        kind: Kind = "transposed" if settings.fan_in_fan_out else "linear"
        return kind if seen <= {kind} else None
    if seen == {"linear"} or (not seen and model_type is not None):
        return "linear"
    return None


def _key(layer: Layer) -> str:
    assert layer.base is not None
    return stored_base(layer.base).tensor.name


def _misfit(layer: Layer) -> UnsupportedError:
    assert layer.base is not None
    shape = layer.base.shape
    conv = ", or a convolution with groups, which PEFT does not merge either"
    return UnsupportedError(
        f"key '{_key(layer)}' has shape {list(shape)}, which A {list(layer.a.shape)} and "
        f"B {list(layer.b.shape)} do not fit{conv if len(shape) > 2 else ''}"
    )
