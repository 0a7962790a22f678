"""The names that PEFT gives to the tensors of a model with an adapter. Pure.

PEFT wraps the modules that it trains, so the weight of a wrapped ``q_proj`` is
``q_proj.base_layer.weight``, and its adapter hangs beside ``base_layer``::

    <module>.lora_A.<adapter>.weight          also lora_B, which may have a bias
    <module>.lora_embedding_A.<adapter>       also lora_embedding_B
    <module>.lora_magnitude_vector.<adapter>.weight             DoRA
    <module>.modules_to_save.<adapter>.<...>  trained in full; the weights it replaces are
    <module>.original_module.<...>

Two wrappers around one module, for two of its parameters, give ``base_layer.base_layer``. Adapter
files have the same names without the adapter's, and ``lora_magnitude_vector`` without ``.weight``;
weights trained in full have their plain names there. Source: peft 0.21 `tuners/lora/layer.py`,
`utils/other.py`, `utils/save_and_load.py`. Names here are without ``base_model.model.``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "plain",
    "base",
    "trained",
    "original",
    "lora_A",
    "lora_B",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
]

FILE_PREFIX = "base_model.model."
BASE_LAYER = "base_layer"
_TRAINED = "modules_to_save"
_ORIGINAL = "original_module"
_TOKEN_ADAPTER = "token_adapter"
TRAINABLE_TOKENS = "trainable tokens"

# What may follow a part of an adapter and the adapter's name, and which role that is. peft before
# 0.11 has no ".weight" after the name of a magnitude.
_LORA_PARTS: dict[str, dict[tuple[str, ...], Role]] = {
    "lora_A": {("weight",): "lora_A"},
    "lora_B": {("weight",): "lora_B", ("bias",): "lora_B.bias"},
    "lora_embedding_A": {(): "lora_embedding_A"},
    "lora_embedding_B": {(): "lora_embedding_B"},
    "lora_magnitude_vector": {
        (): "lora_magnitude_vector",
        ("weight",): "lora_magnitude_vector",
    },
}
_FILE_SUFFIXES: dict[Role, str] = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_B.bias": "lora_B.bias",
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "lora_magnitude_vector": "lora_magnitude_vector",
}

# How the parameters of PEFT's other methods begin: `prefix` in peft 0.21 `tuners/*/model.py`.
_OTHER_METHODS: dict[str, str] = {
    "trainable_tokens_": TRAINABLE_TOKENS,
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "lora_diag": "KaSA",
    "lora_monteclora_": "MonteCLoRA",
    "lora_velora_": "VeLoRA",
    "ia3_": "IA3",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "boft_": "BOFT",
    "vera_": "VeRA",
    "pvera_": "PVeRA",
    "vblora_": "VB-LoRA",
    "randlora_": "RandLoRA",
    "fourierft_": "FourierFT",
    "hra_": "HRA",
    "bone_": "Bone",
    "miss_": "MiSS",
    "ln_tuning_": "LN tuning",
    "poly_": "Poly",
    "shira_": "SHiRA",
    "c3a_": "C3A",
    "road_": "RoAd",
    "waveft_": "WaveFT",
    "delora_": "DeLoRA",
    "gralora_": "GraLoRA",
}
_LONGEST_TAIL = 2  # the adapter's name and "weight"


@dataclass(frozen=True, slots=True)
class PeftName:
    """A name, taken apart.

    Attributes:
        role: what the tensor is. ``base`` is below a ``base_layer``, ``trained`` and ``original``
            are the two sides of ``modules_to_save``, ``plain`` is everything else.
        path: the tensor's name without PEFT's parts; for a tensor of an adapter, its module's.
        owner: the path of the wrapper that holds it, with the ``base_layer`` parts; empty for
            ``plain``.
        depth: how many wrappers of the same module are around that one.
        adapter: the name of the adapter, if the name has it.
    """

    role: Role
    path: str
    owner: str = ""
    depth: int = 0
    adapter: str | None = None

    @property
    def is_lora(self) -> bool:
        """Whether it is a tensor of an adapter."""
        return self.role in _FILE_SUFFIXES

    @property
    def module(self) -> str:
        """The path of the wrapped module without PEFT's parts."""
        return _without_base_layers(tuple(self.owner.split(".")))

    @property
    def is_nested(self) -> bool:
        """Whether it is a wrapper's, and inside or around a module that is trained in full."""
        return self.role in ("trained", "original") and _has_wrapper(self.path)

    @property
    def file_name(self) -> str:
        """What the tensor of an adapter, or a weight trained in full, is called in its file."""
        if self.is_lora:
            return f"{FILE_PREFIX}{self.owner}.{_FILE_SUFFIXES[self.role]}"
        return FILE_PREFIX + self.path


def parse_name(name: str) -> PeftName:
    """Take a name apart. Names that do not fit what PEFT gives are ``plain``."""
    parts = tuple(name.split("."))
    return _parse_full(parts) or _parse_lora(parts) or _parse_base(parts) or PeftName("plain", name)


def is_adapter_name(name: str) -> bool:
    """Whether a tensor is one that LoRA trains: of an adapter, or of ``modules_to_save``."""
    parsed = parse_name(name)
    return parsed.is_lora or parsed.role == "trained"


def has_adapter(names: Iterable[str]) -> bool:
    """Whether some name is one that a PEFT model has and no other: an adapter or a wrapper.

    Only to be asked of names that had the prefix of PEFT or come with the settings of an adapter:
    a few models have parts of these names of their own.
    """
    return any(parse_name(n).role != "plain" or method_of(n) is not None for n in names)


def method_of(name: str) -> str | None:
    """The method of PEFT besides LoRA that a tensor belongs to, as far as its name tells."""
    parts = name.split(".")
    if _TOKEN_ADAPTER in parts:
        return TRAINABLE_TOKENS
    for part in parts[-1 - _LONGEST_TAIL :]:
        for prefix, method in _OTHER_METHODS.items():
            if part.startswith(prefix):
                return method
    return None


def _parse_full(parts: tuple[str, ...]) -> PeftName | None:
    """A tensor of ``modules_to_save``, or the one that it replaces."""
    for marker in (_TRAINED, _ORIGINAL):
        at = parts.index(marker) if marker in parts[1:] else 0
        named = marker == _TRAINED
        rest = parts[at + 1 + named :]
        if at and rest:
            return PeftName(
                role="trained" if named else "original",
                path=".".join((*parts[:at], *rest)),
                owner=".".join(parts[:at]),
                adapter=parts[at + 1] if named else None,
            )
    return None


def _parse_lora(parts: tuple[str, ...]) -> PeftName | None:
    for at in range(len(parts) - 1, 0, -1):
        roles = _LORA_PARTS.get(parts[at])
        if roles is None:
            continue
        tail = parts[at + 1 :]
        adapter = None
        if tail not in roles and tail:
            adapter, *rest = tail
            tail = tuple(rest)
        if tail not in roles:
            return None
        owner = parts[:at]
        path = _without_base_layers(owner)
        return PeftName(roles[tail], path, ".".join(owner), _depth(owner), adapter)
    return None


def _parse_base(parts: tuple[str, ...]) -> PeftName | None:
    if BASE_LAYER not in parts[1:-1]:
        return None
    owner = parts[: len(parts) - 1 - parts[::-1].index(BASE_LAYER)]
    return PeftName("base", _without_base_layers(parts), ".".join(owner), _depth(owner))


def _depth(owner: tuple[str, ...]) -> int:
    """How many wrappers a path goes through last."""
    return next((i for i, part in enumerate(reversed(owner)) if part != BASE_LAYER), len(owner))


def _without_base_layers(parts: tuple[str, ...]) -> str:
    return ".".join(part for part in parts if part != BASE_LAYER)


def _has_wrapper(path: str) -> bool:
    wrappers = {BASE_LAYER, _TRAINED, _ORIGINAL, _TOKEN_ADAPTER, *_LORA_PARTS}
    return not wrappers.isdisjoint(path.split("."))
