"""Output heads that share the values of the input embedding. Pure.

A config ties the two by ``tie_word_embeddings``. Loaders then make one weight of them, and what a
file holds of the head is ignored, compared or asked for, depending on the loader. transformers 4
reads the flag of the text model's config, transformers 5 that of the whole model's; where it is
absent, the class of the config decides (`data.tie_defaults`). A file opens right everywhere if both
readings are the same and fit what it holds: `decide` sees to that, or refuses.

Source: runs of transformers 4.46 to 5.24; for the pairs, ``_tied_weights_keys`` of 5.24. Other ties
(of encoders and decoders, of masked language models, of biases) are left as stored: equal copies
open right everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from streammerge.changes import Change
from streammerge.config import Edit, JsonObject, model_type_of
from streammerge.data.tie_defaults import is_known, nested_default, own_default, reader
from streammerge.errors import UnsupportedError, UsageError
from streammerge.values import Fold, Value

FLAG = "tie_word_embeddings"
# What the lfm2 types called it first; with them it wins. transformers 5.24 `configuration_lfm2.py`.
_LFM2_FLAG = "tie_embedding"

# Sub-configs with the flag of the language model: those of `get_text_config(decoder=True)` in
# transformers 4.57, then those of remote code.
_TEXT_CONFIGS = ("decoder", "generator", "text_config", "llm_config", "language_config")

# Model types with a pair that their class in transformers 5.24 ties for no flag.
NEVER_TIED_IN_5 = frozenset(
    {
        "audioflamingo3",
        "bailing_hybrid",
        "bigbird_pegasus",
        "cosmos3_edge",
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
        "kimi_linear",
        "mllama",
        "mllama_text_model",
        "molmo2",
        "moshi",
        "muse_spark",
        "musicflamingo",
        "omniasr",
        "pp_formulanet",
        "qwen2_audio",
        "vibevoice_asr",
        "voxtral",
        "xlstm",
    }
)

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """Models that name head and input embedding the same way.

    Attributes:
        head, embedding: ends of the names.
        blocks: what the names of layers have before the number.
        model_types: the only types with this embedding, where `blocks` does not tell.
    """

    head: str
    embedding: str
    blocks: str
    model_types: tuple[str, ...] = ()


_FAMILIES = (
    _Family("lm_head.weight", "model.embed_tokens.weight", "model.layers."),
    *(
        _Family("lm_head.weight", f"model.{part}.embed_tokens.weight", f"model.{part}.layers.")
        for part in ("language_model", "text_model", "decoder")
    ),
    _Family("lm_head.weight", "transformer.wte.weight", "transformer.h."),
    *(
        _Family("lm_head.weight", f"transformer.{module}.weight", "transformer.h.", model_types)
        for module, model_types in (
            ("word_embeddings", ("bloom", "falcon")),
            ("tokens_embed", ("openai-gpt",)),
            ("w", ("ctrl",)),
        )
    ),
    _Family("lm_head.weight", "gpt_neox.embed_in.weight", "gpt_neox.layers."),
    _Family("embed_out.weight", "gpt_neox.embed_in.weight", "gpt_neox.layers."),
    _Family("embed_out.weight", "gpt_neox_japanese.embed_in.weight", "gpt_neox_japanese.layers."),
    _Family("lm_head.weight", "backbone.embeddings.weight", "backbone.layers."),
    _Family("decoder.weight", "model.embeddings.tok_embeddings.weight", "model.layers."),
    _Family("output_projection.weight", "biogpt.embed_tokens.weight", "biogpt.layers."),
    *(
        _Family(head, "model.decoder.embed_tokens.weight", "model.decoder.layers.")
        for head in ("proj_out.weight", "output_projection.weight")
    ),
)
_HEADS = tuple(dict.fromkeys(family.head for family in _FAMILIES))

# Modules that hold an input embedding, also in models whose ties are left alone.
_EMBEDDING_MODULES = frozenset(family.embedding.split(".")[-2] for family in _FAMILIES) | {
    "embed_text_tokens",
    "embedding",
    "input_embedding",
    "input_embeds_layer",
    "shared",
    "word_embedding",
}
# Where a half is enough to tell that there is a pair, and what the other half is called.
_PREFIXES = ("", "language_model.", "thinker.")

# Architectures that predict tokens, and what models have that predict something else.
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_OTHER_HEADS = frozenset({"classifier", "qa_outputs", "score"})


@dataclass(frozen=True, slots=True)
class Pair:
    """An output head and the input embedding it may be tied to, one of which is there at least.

    Attributes:
        head, embedding: names in the checkpoint; None for the one that is absent.
        head_name, embedding_name: the same, and of the absent one what its name would be.
        owner: keys that lead to the config of the model they belong to; usually none.
    """

    head: str | None
    embedding: str | None
    head_name: str
    embedding_name: str
    owner: _Path = ()


@dataclass(frozen=True, slots=True)
class TieFlag:
    """Whether a config ties the pair, as transformers 4 and 5 read it.

    Attributes:
        tied4, tied5: None if the config does not say and no default is known for its model type.
    """

    tied4: bool | None
    tied5: bool | None

    def __str__(self) -> str:
        readings = {True: "tied", False: "not tied", None: "not known"}
        return f"transformers 4: {readings[self.tied4]}, 5: {readings[self.tied5]}"

    @property
    def everywhere(self) -> bool:
        """Whether both tie."""
        return bool(self.tied4 and self.tied5)

    @property
    def somewhere(self) -> bool:
        """Whether one of them ties."""
        return bool(self.tied4 or self.tied5)

    @property
    def unknown(self) -> bool:
        """Whether it is not known what one of them does."""
        return self.tied4 is None or self.tied5 is None


@dataclass(frozen=True, slots=True)
class TieDecision:
    """What becomes of head and embedding.

    Attributes:
        values: all tensors, in the order of the checkpoint.
        edits: of ``config.json``.
        changes: of the tensors. Edits hold their reasons themselves.
        warnings: one line each, for people.
    """

    values: dict[str, Value]
    edits: tuple[Edit, ...] = ()
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


# --- names ----------------------------------------------------------------------------------------


def find_pair(names: Collection[str], config: JsonObject | None) -> Pair | None:
    """The pair of the language model, or the half of it that a checkpoint has.

    Args:
        names: of all tensors, in the order of the checkpoint.
        config: of the model; None if there is none.

    Returns:
        None where the names tell of no pair: other names, several weights tied to one another.
    """
    config = config or {}
    known = frozenset(names)
    embeddings = [name for name in names if _module(name) in _EMBEDDING_MODULES]
    found = [match for name in embeddings for match in _matches(name, known)]
    found.sort(key=lambda match: match[0].count("."))  # the outermost model's first
    whole = [(prefix, family) for prefix, family in found if prefix + family.head in known]
    if whole:
        return _pair(*whole[0], known, config)
    headed = [prefix for prefix in _PREFIXES if any(prefix + head in known for head in _HEADS)]
    if headed and embeddings:
        return None  # a head, but of another embedding
    halves = (
        _families_of_head(headed[0], known, model_type_of(config))
        if headed
        else [match for match in found if match[0] in _PREFIXES]
    )
    return _pair(*halves[0], known, config) if halves else None


def _module(name: str) -> str:
    """The module that a parameter belongs to."""
    modules = [part for part in name.split(".")[:-1] if not part.isdigit()]
    return modules[-1] if modules else ""


def _matches(embedding: str, known: frozenset[str]) -> Iterator[tuple[str, _Family]]:
    """Prefix and family of each reading of an embedding's name."""
    for family in _FAMILIES:
        if ("." + embedding).endswith("." + family.embedding):
            prefix = embedding.removesuffix(family.embedding)
            if not _is_encoder_tied(prefix, known):
                yield prefix, family


def _is_encoder_tied(prefix: str, known: frozenset[str]) -> bool:
    """Whether an encoder has the embedding too, so that three or four weights may be tied."""
    encoder = prefix + "model.encoder."
    return prefix + "model.shared.weight" in known or any(
        name.startswith(encoder) and name.endswith("embed_tokens.weight") for name in known
    )


def _families_of_head(
    prefix: str, known: frozenset[str], model_type: str | None
) -> list[tuple[str, _Family]]:
    """Families that fit a head and the layers; one at most."""
    fitting = [
        family
        for family in _FAMILIES
        if prefix + family.head in known
        and any(name.startswith(prefix + family.blocks) for name in known)
    ]
    special = [family for family in fitting if model_type in family.model_types]
    usual = [family for family in fitting if not family.model_types]
    chosen = special or usual
    return [(prefix, chosen[0])] if len(chosen) == 1 else []


def _pair(prefix: str, family: _Family, known: frozenset[str], config: JsonObject) -> Pair:
    head, embedding = prefix + family.head, prefix + family.embedding
    return Pair(
        head if head in known else None,
        embedding if embedding in known else None,
        head,
        embedding,
        _owner(prefix, config),
    )


def _owner(prefix: str, config: JsonObject) -> _Path:
    """Keys of the sub-config that belongs to a part of the model, such as ``thinker_config``."""
    path: _Path = ()
    for part in prefix.split(".")[:-1]:
        child = config.get(f"{part}_config")
        if isinstance(child, dict):
            path, config = (*path, f"{part}_config"), child
    return path


# --- the flag -------------------------------------------------------------------------------------


def read_flag(config: JsonObject, whole_type: str | None) -> TieFlag:
    """How transformers 4 and 5 read the config of a model, or of a part of one.

    4.x takes ``get_text_config(decoder=True).tie_word_embeddings`` (4.57 `modeling_utils.py`), 5.x
    ``config.tie_word_embeddings`` (5.24, the same file). Some configs take over a true flag of the
    text config in 5.24, not in 5.0: that counts as not tied.

    Args:
        config: of the model or part.
        whole_type: the type of the whole model.
    """
    return TieFlag(_flag_in_4(config, whole_type), _flag_in_5(config, whole_type))


def _flag_in_4(config: JsonObject, whole_type: str | None) -> bool | None:
    major = reader(4, whole_type)
    model_type = model_type_of(config)
    key, text = _text_config(config)
    if text is None:  # a flat config: its class makes a text config of it, if it has one
        readings = [_own_flag(config), nested_default(major, model_type, _TEXT_CONFIGS)]
    else:
        readings = [
            _own_flag(text),
            own_default(major, model_type_of(text)),
            nested_default(major, model_type, (key,)),
        ]
    readings.append(_class_default(major, model_type))
    return next((reading for reading in readings if reading is not None), None)


def _flag_in_5(config: JsonObject, whole_type: str | None) -> bool | None:
    model_type = model_type_of(config)
    if model_type in NEVER_TIED_IN_5:
        return False
    own = _own_flag(config)
    return _class_default(reader(5, whole_type), model_type) if own is None else own


def _class_default(major: int, model_type: str | None) -> bool | None:
    """What a config's class says; one without the setting does not tie."""
    own = own_default(major, model_type)
    return False if own is None and is_known(model_type) else own


def _own_flag(config: JsonObject) -> bool | None:
    """What a config says by itself."""
    return next((bool(config[key]) for key in _flag_keys(config) if key in config), None)


def _flag_keys(config: JsonObject) -> tuple[str, ...]:
    """Names of the flag, the one that wins first."""
    is_lfm2 = (model_type_of(config) or "").startswith("lfm2")
    return (_LFM2_FLAG, FLAG) if is_lfm2 and _LFM2_FLAG in config else (FLAG,)


def _text_config(config: JsonObject) -> tuple[str, JsonObject | None]:
    """Key and config of the text model in a larger one."""
    for key in _TEXT_CONFIGS:
        found = config.get(key)
        if isinstance(found, dict):
            return key, found
    return "", None


def _part(config: JsonObject, path: _Path) -> JsonObject:
    """The sub-config at a path that is known to be there."""
    for key in path:
        child = config[key]
        assert isinstance(child, dict)
        config = child
    return config


def _set_flag(config: JsonObject, owner: _Path, tied: bool, reason: str) -> tuple[Edit, ...]:
    """Edits after which every reading of the flag is the same."""
    part = _part(config, owner)
    places = [(owner, part)]
    key, text = _text_config(part)
    if text is not None:
        places.append(((*owner, key), text))
    return tuple(
        Edit((*path, flag), tied, reason)
        for path, place in places
        for flag in _flag_keys(place)
        if place.get(flag) is not tied
    )


# --- the decision ---------------------------------------------------------------------------------


def question(values: Mapping[str, Value], config: JsonObject | None) -> tuple[Value, Value] | None:
    """Head and embedding, if `decide` has to know whether they are equal.

    Args:
        values: all tensors, in the order of the checkpoint.
        config: of the model; None if there is none.
    """
    pair = find_pair(values, config)
    if config is None or pair is None or pair.head is None or pair.embedding is None:
        return None
    head, embedding = values[pair.head], values[pair.embedding]
    asks = _pair_flag(pair, config).somewhere and _difference(head, embedding) is None
    return (head, embedding) if asks and not _folded(pair, values) else None


def decide(
    values: Mapping[str, Value],
    config: JsonObject | None,
    *,
    equal: bool | None,
    untie: bool = False,
) -> TieDecision:
    """Settle what is written of head and embedding, and what the config says about them.

    Args:
        values: all tensors under their final names, in the order of the checkpoint.
        config: of the model; None if there is none: then all is written as it is.
        equal: the answer to `question`; None where there was none, or with `untie`.
        untie: whether a pair that the config ties is written as two weights.

    Raises:
        UnsupportedError: a tied pair with different values or a LoRA adapter; an output head or
            input embedding that is not stored and that loaders would fill at random.
        UsageError: `untie` with one half of a tied pair.
    """
    if config is None:
        return TieDecision(dict(values))
    pair = find_pair(values, config)
    if pair is None:
        return TieDecision(dict(values), warnings=_check_embedding(values, config))
    if pair.head is None:
        return _decide_embedding(values, config, pair, untie)
    if pair.embedding is None:
        return _decide_head(values, config, pair, untie)
    return _decide_whole(values, config, pair, equal, untie)


def _decide_whole(
    values: Mapping[str, Value], config: JsonObject, pair: Pair, equal: bool | None, untie: bool
) -> TieDecision:
    flag = _pair_flag(pair, config)
    head, embedding = pair.head_name, pair.embedding_name
    unchanged = TieDecision(dict(values))
    if untie and (flag.somewhere or flag.unknown):
        reason = "output head and input embedding are written as two weights"
        return replace(unchanged, edits=_set_flag(config, pair.owner, False, reason))
    if not flag.somewhere:
        return replace(unchanged, warnings=_warn_unknown(pair, flag, config))

    folded = _folded(pair, values)
    if folded is not None:
        raise UnsupportedError(
            f"{folded} has a LoRA adapter, but config.json ties {head} to {embedding} ({flag}): "
            "training used them as two weights",
            hint=f"--untie writes both and sets {FLAG} to false, --lora split keeps the adapter "
            "apart",
        )
    difference = _difference(values[head], values[embedding])
    if difference is None and equal is None:
        raise ValueError(f"whether {head} and {embedding} are equal has to be known")
    if difference is not None or not equal:
        raise UnsupportedError(
            f"{head} and {embedding} differ{difference or ''}, but config.json ties them "
            f"({flag}): loaders would use one of them for both",
            hint=f"--untie writes both and sets {FLAG} to false",
        )
    if not flag.everywhere:
        said = f"both {head} and {embedding} are written, though they are equal: config.json does "
        return replace(unchanged, warnings=(f"{said}not tie them for every reader ({flag})",))
    return TieDecision(
        {name: value for name, value in values.items() if name != head},
        _set_flag(config, pair.owner, True, "the output head is tied and not written"),
        (
            Change(
                "dropped",
                head,
                None,
                "equal to the input embedding, to which config.json ties it",
            ),
        ),
    )


def _decide_head(
    values: Mapping[str, Value], config: JsonObject, pair: Pair, untie: bool
) -> TieDecision:
    """Settle an output head without an input embedding."""
    flag = _pair_flag(pair, config)
    head, embedding = pair.head_name, pair.embedding_name
    _check_tied_half(head, embedding, values, flag, untie)
    if not _can_tie(pair, flag, config):
        return TieDecision(
            dict(values), warnings=_check_absent(embedding, head, values, config, flag)
        )
    # transformers 4.57 leaves both without values if only the head is there.
    return TieDecision(
        {embedding if name == head else name: value for name, value in values.items()},
        _set_flag(config, pair.owner, True, "the output head is stored as the input embedding"),
        (Change("renamed", head, embedding, "tied, and loaders look for the input embedding"),),
    )


def _decide_embedding(
    values: Mapping[str, Value], config: JsonObject, pair: Pair, untie: bool
) -> TieDecision:
    """Settle an input embedding without an output head."""
    flag = _pair_flag(pair, config)
    head, embedding = pair.head_name, pair.embedding_name
    unchanged = TieDecision(dict(values))
    architecture = _architecture(config)
    if architecture and not architecture.endswith(_GENERATIVE):
        return unchanged
    other = next(filter(_is_other_head, values), None)
    if other is not None:
        said = f"config.json calls the model {architecture}, but instead of {head} it has {other}"
        return replace(unchanged, warnings=(said,)) if architecture else unchanged
    _check_tied_half(embedding, head, values, flag, untie)
    if flag.everywhere:
        return unchanged
    if architecture is None:
        said = f"{head} is not stored: it would be random, if the model has an output head"
        return replace(unchanged, warnings=(said,))
    if not _can_tie(pair, flag, config):
        return replace(unchanged, warnings=_check_absent(head, embedding, values, config, flag))
    reason = "the output head is not stored, so every reading of the flag has to tie it"
    return replace(unchanged, edits=_set_flag(config, pair.owner, True, reason))


def _check_tied_half(
    stored: str, absent: str, values: Mapping[str, Value], flag: TieFlag, untie: bool
) -> None:
    """Refuse to take a half for both where the two were not the same in training."""
    if not flag.somewhere:
        return
    if untie:
        raise UsageError(f"--untie: {stored} is tied, but there is no {absent} to write beside it")
    if isinstance(values[stored], Fold):
        raise UnsupportedError(
            f"{stored} has a LoRA adapter, but config.json ties it to {absent} ({flag}), which is "
            "not stored and had none in training",
            hint="--lora split keeps the adapter apart",
        )


def _is_other_head(name: str) -> bool:
    """Whether a parameter belongs to a head that predicts something else than tokens."""
    outermost = name.split(".", maxsplit=1)[0]
    return outermost in _OTHER_HEADS or (outermost.endswith("head") and outermost != "lm_head")


def _can_tie(pair: Pair, flag: TieFlag, config: JsonObject) -> bool:
    """Whether flags at both levels make every loader tie a pair that some of them tie."""
    return flag.somewhere and model_type_of(_part(config, pair.owner)) not in NEVER_TIED_IN_5


def _check_absent(
    absent: str, stored: str, values: Mapping[str, Value], config: JsonObject, flag: TieFlag
) -> tuple[str, ...]:
    """Refuse a half that loaders fill at random; a warning where that is not sure."""
    model_type = model_type_of(config)
    shape = values[stored].shape
    if not is_known(model_type) and any(
        value.shape == shape for name, value in values.items() if name != stored
    ):
        return ()  # that may be it, under a name that is not known here
    said = f"{absent} is not stored and config.json does not tie it to {stored}: it would be random"
    if flag.tied4 is None and flag.tied5 is None:
        return (said,)
    raise UnsupportedError(
        said, hint=f"if training had tied them, set {FLAG} to true in config.json"
    )


def _check_embedding(values: Mapping[str, Value], config: JsonObject) -> tuple[str, ...]:
    """Refuse a language model without an input embedding; a warning where that is not sure."""
    architecture = _architecture(config) or ""
    if not architecture.endswith(_GENERATIVE) or not values:
        return ()
    if any(_module(name) in _EMBEDDING_MODULES or ".lora_" in name for name in values):
        return ()  # one of another name, or an adapter by itself
    said = f"no input embedding is stored, though config.json calls the model {architecture}"
    if is_known(model_type_of(config)):
        raise UnsupportedError(said, hint="loaders would fill it at random")
    return (said,)


def _warn_unknown(pair: Pair, flag: TieFlag, config: JsonObject) -> tuple[str, ...]:
    if not flag.unknown:
        return ()
    return (
        f"{pair.head_name} and {pair.embedding_name} are both written: config.json does not tell "
        f"whether {FLAG} holds for model type {model_type_of(config)} ({flag})",
    )


def _pair_flag(pair: Pair, config: JsonObject) -> TieFlag:
    return read_flag(_part(config, pair.owner), model_type_of(config))


def _architecture(config: JsonObject) -> str | None:
    """The first of a config's architectures."""
    found = config.get("architectures")
    first = found[0] if isinstance(found, list) and found else None
    return first if isinstance(first, str) else None


def _folded(pair: Pair, values: Mapping[str, Value]) -> str | None:
    """The half that has an adapter, if one has."""
    halves = (pair.embedding_name, pair.head_name)
    return next((name for name in halves if isinstance(values[name], Fold)), None)


def _difference(head: Value, embedding: Value) -> str | None:
    """How two values differ without a look at their data."""
    if head.shape != embedding.shape:
        return f" in shape ({list(head.shape)}, {list(embedding.shape)})"
    return f" in dtype ({head.dtype}, {embedding.dtype})" if head.dtype != embedding.dtype else None
