"""What readers of transformers 4.x need in a directory that transformers 5 wrote. Pure.

5.x renamed keys of ``config.json`` and ``tokenizer_config.json``, which 4.x does not know. It
silently takes its defaults (a rope_theta of 10,000 instead of 1,000,000, 128 experts instead of
64), or it fails. The old keys can stand beside the new ones; 5.x then reads what it read before.

The tables are from the classes of transformers 4.57.6: what their constructors take, and 5.24.0
does not write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from streammerge.config import REMOVED, Edit, JsonObject, JsonValue, model_configs, model_type_of

REASON = "for readers of transformers 4.x"

# Model types, of whole models and of parts, that take rope_theta in 4.57.6 and have rope_parameters
# in 5.24.0. 4.x does not know the others, or does not read a theta for them.
_ROPE_MODELS = frozenset(
    """
    apertus arcee aria_text bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder
    blt_patcher chameleon cohere cohere2 csm csm_depth_decoder_model deepseek_v2 deepseek_v3
    dia_decoder dia_encoder diffllama doge dots1 efficientloftr emu3_text_model ernie4_5
    ernie4_5_moe evolla exaone4 falcon falcon_h1 flex_olmo gemma gemma2 gemma3_text gemma3n_text glm
    glm4 glm4_moe glm4v_moe_text glm4v_text gpt_neox gpt_neox_japanese gpt_oss granite granitemoe
    granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jetmoe
    kyutai_speech_to_text lfm2 llama llama4_text llama4_vision_model longcat_flash mimi minimax
    ministral mistral mixtral mllama_text_model modernbert modernbert-decoder moonshine moshi
    nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal phimoe pixtral qwen2
    qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text
    qwen3 qwen3_moe qwen3_next qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text
    qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text recurrent_gemma seed_oss smollm3 stablelm
    starcoder2 t5_gemma_module vaultgemma zamba2
    """.split()  # noqa: SIM905
)
# model_type -> the 4.x names of rope_theta and partial_rotary_factor, where they are others.
_THETA = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
_PARTIAL_FACTOR = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
# model_type with parameters per layer type -> the 4.x name of the theta of sliding attention,
# which 4.x does not scale. Olmo3 has one theta for both.
_SLIDING_THETA = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": "rope_theta",
}
# model_type -> all that 4.x allows in rope_scaling beside the kind, which it calls `type` there.
_ONLY_SCALING_FIELDS = {
    "phi3": {"short_factor", "long_factor"},
    "phi4_multimodal": {"short_factor", "long_factor"},
    "chameleon": {"factor"},
    "olmo": {"factor"},
    "olmo2": {"factor"},
}
_KINDS = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
# `axial` is a name of 5.x. In 4.x, axial models have no key that says so.
_UNSCALED = frozenset({"default", "axial"})
# 4.x scales these if it is not told otherwise.
_SCALED_BY_DEFAULT = frozenset({"apertus", "gpt_oss"})
# 4.57 and 5.0 read num_experts of these; 5.24 writes num_local_experts.
_NUM_EXPERTS = frozenset({"qwen3_moe", "qwen3_omni_moe_talker_text", "qwen3_vl_moe_text"})
# 4.57 and 5.0 have `vision_model.` before the parts of these vision towers.
_VISION_MODELS = frozenset({"clip_vision_model", "siglip_vision_model"})
_VISION_PART = re.compile(r"(?:^|\.)vision_tower\.(?:embeddings|encoder)\.")


class _Inexpressible(Exception):
    """4.x has no keys for these RoPE parameters."""


def compat_edits(config: JsonObject) -> list[Edit]:
    """Edits that add to ``config.json`` what transformers 4.x reads instead of 5.x's keys.

    What is there already stays, unless it is null. Nothing is added for RoPE parameters that 4.x
    has no keys for; `compat_warnings` names them.
    """
    return [
        Edit((*path, key), value, REASON)
        for path, part in model_configs(config)
        for key, value in _legacy_keys(part).items()
        if key not in part or (part[key] is None and value is not None)
    ]


def tokenizer_compat_edits(
    tokenizer_config: JsonObject, chat_template: str | None = None
) -> list[Edit]:
    """Edits that make ``tokenizer_config.json`` one that transformers 4.x opens.

    What 5.x calls ``extra_special_tokens`` (a list) and ``model_specific_special_tokens`` (named
    ones) is ``additional_special_tokens`` and ``extra_special_tokens`` in 4.x, and the class
    ``TokenizersBackend`` is ``PreTrainedTokenizerFast``. 5.x takes the old names for its own.

    Args:
        tokenizer_config: ``tokenizer_config.json``.
        chat_template: what ``chat_template.jinja`` says, if there is one. Before 4.47 that file is
            not read; versions that read it prefer it to the same text in the config.
    """
    edits = []
    if chat_template is not None and tokenizer_config.get("chat_template") is None:
        edits.append(Edit(("chat_template",), chat_template, REASON))
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":
        edits.append(Edit(("tokenizer_class",), "PreTrainedTokenizerFast", REASON))
    extra = tokenizer_config.get("extra_special_tokens")
    named = tokenizer_config.get("model_specific_special_tokens")
    if isinstance(extra, list):
        known = tokenizer_config.get("additional_special_tokens")
        tokens = list(known) if isinstance(known, list) else []
        tokens += [token for token in extra if token not in tokens]
        edits.append(Edit(("additional_special_tokens",), tokens, REASON))
    if isinstance(named, dict) and not isinstance(extra, dict):
        edits.append(Edit(("extra_special_tokens",), named, REASON))
    elif isinstance(extra, list):
        edits.append(Edit(("extra_special_tokens",), REMOVED, REASON))
    return edits


def compat_warnings(
    config: JsonObject, tokenizer_config: JsonObject, names: Iterable[str] = ()
) -> list[str]:
    """What readers of transformers 4.x would get wrong, one line each.

    Args:
        config: ``config.json`` as it is written, after all edits.
        tokenizer_config: ``tokenizer_config.json``, likewise; ``{}`` if there is none.
        names: the tensors that are written.
    """
    warnings = []
    if missing := [".".join(edit.path) for edit in compat_edits(config)]:
        warnings.append(
            "config.json is in the form of transformers 5: readers of 4.x would take their "
            f"defaults for {', '.join(missing)}; --compat 4 adds what they need"
        )
    if tokenizer_compat_edits(tokenizer_config):
        warnings.append(
            "tokenizer_config.json is in the form of transformers 5: readers of 4.x would not "
            "open it or miss special tokens; --compat 4 writes it in a form that both open"
        )
    for path, part in model_configs(config):
        warnings += _rope_warnings(".".join((*path, "rope_parameters")), part)
    if _has_unprefixed_vision_tower(config, names):
        warnings.append(
            "the vision tower has the tensor names of newer transformers 5: 4.x and 5.0 would "
            "start from random values there; --names-from a base model has the names for all"
        )
    return warnings


def _rope_warnings(key: str, part: JsonObject) -> Iterator[str]:
    try:
        legacy = _legacy_rope(part)
    except _Inexpressible:
        yield f"config.json: transformers 4.x has no keys for {key}, it would take its defaults"
        return
    for old, value in legacy.items():
        if part.get(old) not in (None, value):
            yield (
                f"config.json: {key} and {old} do not agree: transformers 5 reads the first, "
                "4.x the second"
            )


def _has_unprefixed_vision_tower(config: JsonObject, names: Iterable[str]) -> bool:
    vision = config.get("vision_config")
    return (
        isinstance(vision, dict)
        and model_type_of(vision) in _VISION_MODELS
        and any(_VISION_PART.search(name) for name in names)
    )


def _legacy_keys(part: JsonObject) -> JsonObject:
    """What 4.x reads of one part of a config where 5.x has other keys."""
    try:
        keys = _legacy_rope(part)
    except _Inexpressible:
        keys = {}
    if model_type_of(part) in _NUM_EXPERTS and "num_local_experts" in part:
        keys["num_experts"] = part["num_local_experts"]
    return keys


def _legacy_rope(part: JsonObject) -> JsonObject:
    """What 4.x reads instead of ``rope_parameters``.

    Raises:
        _Inexpressible: 4.x has no keys for them.
    """
    model_type, rope = model_type_of(part), part.get("rope_parameters")
    if not isinstance(rope, dict) or model_type is None or model_type not in _ROPE_MODELS:
        return {}
    if "full_attention" not in rope and "sliding_attention" not in rope:
        return _legacy_rope_of_all(model_type, rope, part)
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    name = _SLIDING_THETA.get(model_type)
    if name is None or not isinstance(full, dict) or not isinstance(sliding, dict):
        raise _Inexpressible
    keys = _legacy_rope_of_all(model_type, full, part)
    of_sliding = _legacy_rope_of_all(model_type, sliding, part)
    theta = of_sliding.pop("rope_theta", None)
    if of_sliding or keys.setdefault(name, theta) != theta:
        raise _Inexpressible
    return keys


def _legacy_rope_of_all(model_type: str, rope: JsonObject, part: JsonObject) -> JsonObject:
    """The same, of parameters that are not per layer type."""
    keys: JsonObject = {}
    if "rope_theta" in rope:
        keys[_THETA.get(model_type, "rope_theta")] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        factor = _PARTIAL_FACTOR.get(model_type, "partial_rotary_factor")
        keys[factor] = rope["partial_rotary_factor"]
    scaling = _legacy_scaling(model_type, rope, part)
    if scaling is not None or model_type in _SCALED_BY_DEFAULT:
        keys["rope_scaling"] = scaling
    return keys


def _legacy_scaling(model_type: str, rope: JsonObject, part: JsonObject) -> JsonValue:
    """``rope_scaling`` of 4.x, None if nothing is scaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    apart = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    fields = {key: value for key, value in rope.items() if key not in apart}
    if not isinstance(kind, str):
        raise _Inexpressible
    if kind in _UNSCALED and not fields:
        return None
    if kind not in _KINDS:
        raise _Inexpressible
    allowed = _ONLY_SCALING_FIELDS.get(model_type)
    if allowed is None:
        return {"rope_type": kind, **fields}
    # The phi models have original_max_position_embeddings beside rope_scaling, too.
    fields = {key: value for key, value in fields.items() if part.get(key) != value}
    if fields.keys() != allowed:
        raise _Inexpressible
    return {"type": kind, **fields}
