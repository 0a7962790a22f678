"""What is known of an adapter beside its weights, and the ``adapter_config.json`` of one. Pure.

The weights of an adapter do not tell by which factor their product counts. That is in
``lora_train_meta.json``, which verl writes (rank and alpha only), or in PEFT's
``adapter_config.json`` (peft 0.21 `tuners/lora/config.py`), or the user says it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from streammerge.config import JsonObject, JsonValue
from streammerge.errors import UnsupportedError

META = "lora_train_meta.json"
CONFIG = "adapter_config.json"
ALPHA_OPTION = "--lora-alpha"

_T = TypeVar("_T")

# peft 0.21 `utils/peft_types.py`; others make `PeftModel.from_pretrained` fail.
_TASK_TYPES = frozenset(
    {"SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"}
)
# Settings under which peft computes something else than W + scale * B @ A, or refuses to merge
# (`tuners/lora/variants.py`, `tuners/lora/model.py`).
_UNSUPPORTED: dict[str, str] = {
    "use_qalora": "QALoRA pools the inputs of a layer",
    "alora_invocation_tokens": "an aLoRA adapter acts on some tokens only, it has no merged form",
    "use_bdlora": "BD-LoRA has block-diagonal matrices",
    "arrow_config": "Arrow routes between several adapters",
    "kasa_config": "KaSA has a diagonal between the matrices",
    "layer_replication": "layers of the base model are used several times",
    "megatron_config": "Megatron's layers are split over ranks in their own way",
    "trainable_token_indices": "single rows of the embedding are trained, and weights do not tell "
    "which",
}
# Values of `init_lora_weights` that change the base weights before training begins.
_BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
_PATTERN = r"(.*\.)?({})$"  # what the key of a pattern must match


@dataclass(frozen=True, slots=True)
class Settings:
    """How an adapter was trained, as far as files and options tell.

    Attributes:
        r: rank.
        alpha: the factor of the product is alpha / r.
        rslora: whether it is alpha / sqrt(r) instead (rsLoRA). None: not said.
        dora: whether layers have magnitudes (DoRA). None: not said.
        fan_in_fan_out: whether weights are ``[in, out]``. None: not said.
        rank_pattern, alpha_pattern: other values for some modules; keys are names or regular
            expressions for their ends.
        bias: which biases of the base model are trained: ``none``, ``all``, ``lora_only``.
        target_parameters: parameters that are no module's ``weight``, by name or its end; empty
            if there are none or nothing says so.
        modules_to_save: modules that are trained in full.
        task_type: PEFT's kind of model, such as ``CAUSAL_LM``.
        base_model: name or path of the base model.
        initialization: the method that changed the base weights before training, if one did.
        any_version: whether nothing tells which version of PEFT read the patterns.
        source: which file or option says alpha, for people.
    """

    r: int | None = None
    alpha: float | None = None
    rslora: bool | None = None
    dora: bool | None = None
    fan_in_fan_out: bool | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    bias: str = "none"
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    task_type: str | None = None
    base_model: str | None = None
    initialization: str | None = None
    any_version: bool = False
    source: str = ""

    def rank_of(self, module: str) -> int | None:
        """The rank that a module (or parameter) should have; None if nothing says so."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float | None:
        """The alpha of a module (or parameter); None if nothing says so.

        Raises:
            UnsupportedError: it depends on the version of PEFT, which nothing tells.
        """
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        if self.any_version and alpha != self._alpha_in_peft_13(module):
            raise UnsupportedError(
                f"{CONFIG}: alpha_pattern gives '{module}' another alpha in peft 0.13 and older, "
                "and nothing tells which version trained the adapter",
                hint="give both patterns the whole names of modules as keys, which all versions "
                "read alike, or peft_version if it was 0.14 or later",
            )
        return alpha

    def _alpha_in_peft_13(self, module: str) -> float | None:
        """As peft 0.11 to 0.13 `tuners/lora/model.py`: one key is looked up in both patterns."""
        keys = (*self.rank_pattern, *self.alpha_pattern)
        key = next((key for key in keys if re.match(rf".*\.{key}$", module)), module)
        return self.alpha_pattern.get(key, self.alpha)

    def scale(self, alpha: float, rank: int) -> float:
        """The factor of the product of a layer."""
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Rank and alpha of one module or parameter.

    Attributes:
        name: the name that patterns are matched with.
        rank, alpha: as trained.
    """

    name: str
    rank: int
    alpha: float


def read_settings(
    meta: JsonObject | None,
    adapter_config: JsonObject | None,
    *,
    alpha: float | None = None,
    rslora: bool = False,
) -> Settings | None:
    """What files and options tell of an adapter.

    Args:
        meta: ``lora_train_meta.json``.
        adapter_config: ``adapter_config.json``. It can say more, so it counts where the two
            differ only in that.
        alpha: what the user says; counts before both.
        rslora: whether the user says that it is rsLoRA.

    Returns:
        The settings, or None if there is neither a file nor an option.

    Raises:
        UnsupportedError: the files contradict each other, hold a value of the wrong kind, or are
            of a kind of adapter that is not W + scale * B @ A.
    """
    if meta is None and adapter_config is None and alpha is None and not rslora:
        return None
    meta = meta or {}
    config = adapter_config or {}
    _refuse_unsupported(config)
    rank_pattern = {k: _count(v, f"rank_pattern.{k}") for k, v in _pattern(config, "rank_pattern")}
    alpha_pattern = {
        k: _number(v, CONFIG, f"alpha_pattern.{k}") for k, v in _pattern(config, "alpha_pattern")
    }
    said, source = alpha, ALPHA_OPTION
    if said is None:
        said, source = _alpha(meta, config)
    dora = config.get("use_dora")
    fan_in_fan_out = config.get("fan_in_fan_out")
    initialization = config.get("init_lora_weights")
    base_model = config.get("base_model_name_or_path")
    task_type = config.get("task_type") or meta.get("task_type")
    return Settings(
        r=_rank(meta, config, rank_pattern),
        alpha=said,
        rslora=True if rslora else bool(config.get("use_rslora")) if config else None,
        dora=dora if isinstance(dora, bool) else None,
        fan_in_fan_out=fan_in_fan_out if isinstance(fan_in_fan_out, bool) else None,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        bias=_bias(config),
        target_parameters=_names(config, "target_parameters"),
        modules_to_save=_names(config, "modules_to_save"),
        task_type=task_type if isinstance(task_type, str) and task_type in _TASK_TYPES else None,
        base_model=base_model if isinstance(base_model, str) and base_model else None,
        initialization=(
            initialization
            if isinstance(initialization, str) and initialization.lower().startswith(_BASE_CHANGING)
            else None
        ),
        any_version=bool(alpha_pattern) and "peft_version" not in config,
        source=source,
    )


def make_config(
    settings: Settings,
    layers: Sequence[LayerSettings],
    *,
    base_name_or_path: str | None,
    task_type: str | None,
    target_modules: Sequence[str],
    target_parameters: Sequence[str],
    modules_to_save: Sequence[str],
    flags: Iterable[str],
) -> JsonObject:
    """An ``adapter_config.json`` that PEFT 0.11 to 0.21, vLLM and SGLang can read.

    It is short, as older versions refuse keys that they do not know; what is left out has PEFT's
    default. Where ranks or alphas differ, the commonest is the default, and the patterns have full
    names: peft 0.13 looks up one key in both patterns.

    Args:
        settings: how the adapter was trained.
        layers: every module and parameter of it.
        base_name_or_path: of the base model, if known.
        task_type: PEFT's kind of model, if known.
        target_modules: modules with adapters; written even if empty, since its absence means
            something else to PEFT and SGLang.
        target_parameters: parameters with adapters (peft 0.17 and later).
        modules_to_save: modules trained in full.
        flags: names of settings that are true, of those that are false by default.
    """
    rank = commonest(layer.rank for layer in layers)
    alpha = commonest(layer.alpha for layer in layers)
    ranks = _deviations({layer.name: layer.rank for layer in layers}, rank)
    alphas = _deviations({layer.name: layer.alpha for layer in layers}, alpha)
    config: JsonObject = {"peft_type": "LORA"}
    if task_type is not None:
        config["task_type"] = task_type
    if base_name_or_path is not None:
        config["base_model_name_or_path"] = base_name_or_path
    config |= {
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain_number(alpha),
        "target_modules": list(target_modules),
        "bias": settings.bias,
    }
    lists = {"target_parameters": target_parameters, "modules_to_save": modules_to_save}
    config |= {key: list(names) for key, names in lists.items() if names}
    config |= dict.fromkeys(sorted(flags), True)
    if ranks:
        config["rank_pattern"] = dict(ranks)
    if alphas:
        config["alpha_pattern"] = {name: _plain_number(value) for name, value in alphas.items()}
    return config


def regex_fault(text: str) -> str | None:
    """Why a text is not a regular expression; None if it is one."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def commonest(values: Iterable[_T]) -> _T:
    """The value that occurs most often; of several, the first."""
    return Counter(values).most_common(1)[0][0]


def _by_pattern(pattern: Mapping[str, _T], name: str, default: _T | None) -> _T | None:
    """As `get_pattern_key` in peft 0.21 `utils/other.py`: the first key that matches counts."""
    for key, value in pattern.items():
        if re.match(_PATTERN.format(key), name):
            return value
    return pattern.get(name, default)


def _deviations(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """A pattern that gives each name its value, where that is not the default.

    A key matches the ends of names too, so a name that has another's as its end needs a key of its
    own. Of several keys that match, PEFT takes the first, so the longest come first.
    """
    odd = {name for name, value in values.items() if value != default}

    def matched(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[start:]) in odd for start in range(len(parts)))

    return {n: values[n] for n in sorted(values, key=len, reverse=True) if matched(n)}


def _refuse_unsupported(config: JsonObject) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{CONFIG}: the adapter is of type {kind}, expected LORA")
    for key, reason in _UNSUPPORTED.items():
        if config.get(key):
            raise UnsupportedError(f"{CONFIG}: {key} is set; {reason}: not supported")


def _alpha(meta: JsonObject, config: JsonObject) -> tuple[float | None, str]:
    """Alpha and the file that says it."""
    found = {
        name: _number(value, name, "lora_alpha")
        for name, value in ((META, meta.get("lora_alpha")), (CONFIG, config.get("lora_alpha")))
        if value is not None
    }
    # verl's exporter writes 0 where it does not know, and the meta file cuts 0.5 down to 0.
    found = {name: alpha for name, alpha in found.items() if alpha != 0}
    if not found:
        return None, ""
    source, alpha = list(found.items())[-1]
    if int(alpha) != int(found.get(META, alpha)):
        raise UnsupportedError(
            f"{META} says lora_alpha {found[META]:g}, {CONFIG} says {found[CONFIG]:g}",
            hint=f"say which with {ALPHA_OPTION}",
        )
    return alpha, source


def _rank(meta: JsonObject, config: JsonObject, rank_pattern: Mapping[str, int]) -> int | None:
    found = [_count(o["r"], "r", n) for n, o in ((META, meta), (CONFIG, config)) if "r" in o]
    if len(found) == 2 and found[0] != found[1] and found[0] not in rank_pattern.values():
        raise UnsupportedError(
            f"{META} says r {found[0]}, {CONFIG} says {found[1]}",
            hint="remove the file that is not of this run",
        )
    return found[-1] if found else None


def _bias(config: JsonObject) -> str:
    bias = config.get("bias", "none")
    if bias in ("none", "all", "lora_only"):
        return str(bias)
    raise UnsupportedError(f"{CONFIG}: bias is {bias!r}, expected none, all or lora_only")


def _names(config: JsonObject, key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list):
        raise UnsupportedError(f"{CONFIG}: {key} is {value!r}, expected a list of names")
    return tuple(str(name) for name in value)


def _pattern(config: JsonObject, key: str) -> Iterable[tuple[str, JsonValue]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise UnsupportedError(f"{CONFIG}: {key} is {value!r}, expected an object")
    for name in value:
        # Where PEFT puts it, it cannot set flags.
        fault = regex_fault(name) or regex_fault(_PATTERN.format(name))
        if fault is not None:
            raise UnsupportedError(
                f"{CONFIG}: {key} has the key {name!r:.80}, which is not a regular expression: "
                f"{fault}"
            )
    return value.items()


def _number(value: JsonValue, file: str, key: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond the largest float
            if math.isfinite(number := float(value)):
                return number
    raise UnsupportedError(f"{file}: {key} is {value!r:.80}, expected a number")


def _count(value: JsonValue, key: str, file: str = CONFIG) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedError(f"{file}: {key} is {value!r}, expected a positive integer")
    return value


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
