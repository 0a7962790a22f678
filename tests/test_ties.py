"""Ties of output head and input embedding, with transformers as the judge of what opens right."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from streammerge import UnsupportedError, UsageError
from streammerge.changes import Change
from streammerge.checkpoint import Extents, PlainLayout, Tensor
from streammerge.config import Edit, model_type_of
from streammerge.data import regenerate_tie_defaults
from streammerge.dtypes import FROM_TORCH
from streammerge.ties import (
    NEVER_TIED_IN_5,
    Pair,
    TieDecision,
    TieFlag,
    decide,
    find_pair,
    question,
    read_flag,
)
from streammerge.values import Fold, Stored, Value

FLAG = "tie_word_embeddings"
HEAD, EMBEDDING, LAYER = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.weight"
TABLES = json.loads(regenerate_tie_defaults.PATH.read_text("utf-8"))

Config = dict[str, Any]

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=300)
by_transformers_5 = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="asks what transformers 5 does"
)


def tensor(name: str, shape: Sequence[int] = (8, 4), dtype: str = "F32") -> Tensor:
    return Tensor(name, dtype, tuple(shape), PlainLayout((0,)), Extents())


def stored(*names: str) -> dict[str, Value]:
    """Values by name; those of layers have another shape than head and embedding."""
    return {name: Stored(tensor(name, (4, 4) if ".0." in name else (8, 4))) for name in names}


def with_adapter(name: str) -> Fold:
    a, b = tensor(f"{name}.a", (2, 4)), tensor(f"{name}.b", (8, 2))
    return Fold(Stored(tensor(name)), a, b, 2.0, "linear", "F32")


def qwen2(tied: bool | None = None, architecture: str | None = "Qwen2ForCausalLM") -> Config:
    """A config; the type's default is not to tie."""
    config: Config = {"model_type": "qwen2"}
    if architecture is not None:
        config["architectures"] = [architecture]
    return config if tied is None else {**config, FLAG: tied}


def edited(config: Config, edits: Iterable[Edit]) -> Config:
    """The config after edits, each of which has to change something."""
    result = copy.deepcopy(config)
    for edit in edits:
        place = result
        for key in edit.path[:-1]:
            place = place[key]
        assert place.get(edit.path[-1], "absent") != edit.value
        place[edit.path[-1]] = edit.value
    return result


def edits_of(decision: TieDecision) -> dict[str, object]:
    """New values by dotted path."""
    return {".".join(edit.path): edit.value for edit in decision.edits}


def is_unchanged(decision: TieDecision, values: Mapping[str, Value]) -> bool:
    """Whether all is written as it is."""
    same = list(decision.values.items()) == list(values.items())
    return same and not decision.edits and not decision.changes


# --- the table of defaults ------------------------------------------------------------------------


def test_installed_transformers_gives_the_stored_defaults() -> None:
    version, entry = regenerate_tie_defaults.installed_entry()
    if version not in TABLES:
        pytest.skip(f"no defaults are stored for transformers {version}")
    assert entry == TABLES[version]


def test_stored_defaults_have_the_form_that_the_script_writes() -> None:
    assert regenerate_tie_defaults.PATH.read_text("utf-8") == regenerate_tie_defaults.dumps(TABLES)


# --- the flag -------------------------------------------------------------------------------------

ABSENT, FLAT = "absent", "flat"  # no flag; no text_config at all


def read_whole(config: Config) -> TieFlag:
    """The flag of a whole model."""
    return read_flag(config, model_type_of(config))


@pytest.mark.parametrize(
    # As read by transformers 4.57.6; by 5.0.0 and 5.24.0.
    ("model_type", "top", "text", "tied4", "tied5"),
    [
        ("qwen2", True, FLAT, True, True),
        ("qwen2", False, FLAT, False, False),
        ("qwen2", ABSENT, FLAT, False, False),
        ("llama", ABSENT, FLAT, False, False),
        ("mixtral", ABSENT, FLAT, False, False),
        ("gemma2", ABSENT, FLAT, True, True),
        ("gemma2", False, FLAT, False, False),
        ("gemma2", None, FLAT, False, False),
        ("gpt2", ABSENT, FLAT, True, True),
        ("starcoder2", ABSENT, FLAT, True, True),
        ("smollm3", ABSENT, FLAT, True, True),
        ("gemma3", ABSENT, ABSENT, True, True),
        ("gemma3", False, ABSENT, True, False),
        ("gemma3", ABSENT, False, False, True),
        ("gemma3", False, False, False, False),
        ("paligemma", ABSENT, ABSENT, True, True),
        ("qwen2_5_vl", ABSENT, ABSENT, False, False),
        ("qwen2_5_vl", ABSENT, True, True, False),  # 5.24 takes it over, 5.0 does not
        ("qwen2_5_vl", True, ABSENT, False, True),
        ("qwen2_5_vl", True, True, True, True),
        ("qwen2_5_vl", False, True, True, False),
        ("qwen2_vl", True, FLAT, True, True),
        ("qwen2_vl", False, FLAT, False, False),
        ("qwen3_vl_moe", ABSENT, ABSENT, False, False),
        ("glm4v", ABSENT, ABSENT, False, False),
        ("glm4v", ABSENT, True, True, False),
        ("llava", ABSENT, ABSENT, False, False),
        ("llava", ABSENT, FLAT, False, False),
        ("llava", True, ABSENT, False, True),
        ("internvl", ABSENT, ABSENT, False, True),
        ("mistral3", ABSENT, ABSENT, False, True),
        ("mistral3", True, True, True, True),
        # The class has no flag in 5.x.
        ("blip-2", ABSENT, ABSENT, True, False),
        # In 5.x only, so that no other reads it.
        ("qwen3_5", ABSENT, ABSENT, False, False),
        ("gemma4", ABSENT, ABSENT, True, True),
        # In neither.
        ("internlm2", ABSENT, FLAT, None, None),
        ("internlm2", True, FLAT, True, True),
        ("internlm2", False, FLAT, False, False),
        # Its class in 5.x has no tie to switch on.
        ("xlstm", True, FLAT, True, False),
    ],
)
def test_flag_as_both_versions_read_it(
    model_type: str, top: bool | str | None, text: bool | str, tied4: bool, tied5: bool
) -> None:
    config: Config = {"model_type": model_type}
    if top != ABSENT:
        config[FLAG] = top
    if text != FLAT:
        config["text_config"] = {} if text == ABSENT else {FLAG: text}
    assert read_whole(config) == TieFlag(tied4, tied5)


@pytest.mark.parametrize(
    ("text_type", "tied4"), [("llama", False), ("gemma", True), ("qwen2", False)]
)
def test_flag_absent_from_a_text_config_is_that_of_its_type(text_type: str, tied4: bool) -> None:
    config: Config = {"model_type": "llava", "text_config": {"model_type": text_type}}
    assert read_whole(config) == TieFlag(tied4, False)


@pytest.mark.parametrize("key", ["decoder", "generator", "text_config", "llm_config"])
def test_text_model_by_any_of_its_keys(key: str) -> None:
    config: Config = {"model_type": "unheard_of", FLAG: False, key: {FLAG: True}}
    assert read_whole(config) == TieFlag(True, False)


def test_unknown_type_with_a_text_model_of_a_known_one() -> None:
    config: Config = {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}}
    assert read_whole(config) == TieFlag(False, None)


def test_config_without_a_type() -> None:
    assert read_whole({}) == TieFlag(None, None)


@pytest.mark.parametrize("original", [True, False])
def test_original_name_of_the_flag_wins_in_lfm2(original: bool) -> None:
    config: Config = {"model_type": "lfm2", "tie_embedding": original, FLAG: not original}
    assert transformers.Lfm2Config(**config).tie_word_embeddings is original
    assert read_whole(config) == TieFlag(original, original)
    # It means nothing elsewhere.
    assert read_whole({**config, "model_type": "qwen2"}) == TieFlag(not original, not original)


# Types whose language model has a pair and whose class does as the flag says.
LANGUAGE_MODELS = sorted(
    {
        *("bloom", "cohere", "cohere2", "deepseek_v3", "falcon", "falcon_mamba", "gemma"),
        *("gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt2"),
        *("gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "granite", "jetmoe", "llama"),
        *("mamba", "mistral", "mixtral", "modernbert-decoder", "mpt", "nemotron", "olmo2"),
        *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe"),
        *("qwen3_next", "recurrent_gemma", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
    & set(CONFIG_MAPPING.keys())
)
VISION_LANGUAGE_MODELS = sorted(
    {
        *("aria", "aya_vision", "cohere2_vision", "gemma3", "gemma3n", "gemma4", "glm4v"),
        *("idefics3", "internvl", "janus", "llava", "llava_next", "mistral3", "paligemma"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    }
    & set(CONFIG_MAPPING.keys())
)


@by_transformers_5
@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
def test_installed_transformers_reads_the_flag_alike(model_type: str) -> None:
    for said in ({}, {FLAG: True}, {FLAG: False}):
        config = {"model_type": model_type, **said}
        read = CONFIG_MAPPING[model_type].from_dict(config).tie_word_embeddings
        assert read_whole(config) == TieFlag(read, read)


@by_transformers_5
@pytest.mark.parametrize("model_type", VISION_LANGUAGE_MODELS)
def test_edits_settle_every_reading(model_type: str) -> None:
    """Dropped, the pair is tied in 5.x and in the text config; untied, in neither."""
    values = stored(HEAD, "model.language_model.embed_tokens.weight", LAYER)
    own: Config = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
    own["architectures"] = ["SomeForConditionalGeneration"]
    said = [(top, text) for top in (None, True, False) for text in (None, True, False)]
    for top, text in said:
        config = copy.deepcopy(own)
        for place, value in ((config, top), (config["text_config"], text)):
            place.pop(FLAG, None)
            if value is not None:
                place[FLAG] = value
        for untie in (False, True):
            decision = decide(values, config, equal=True, untie=untie)
            result = edited(config, decision.edits)
            if HEAD in decision.values and not untie:
                assert result == config
                continue
            read = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(result))
            assert read.tie_word_embeddings is (not untie)
            if decision.edits:
                assert result[FLAG] is result["text_config"][FLAG] is (not untie)
            assert (HEAD in decision.values) is untie


@by_transformers_5
def test_classes_of_types_that_are_never_tied_declare_no_tie() -> None:
    checked = set()
    for table in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ"):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        for model_type in NEVER_TIED_IN_5 & set(names):
            assert not getattr(transformers, names[model_type])._tied_weights_keys
            checked.add(model_type)
    assert len(checked) > 15


# --- the pair -------------------------------------------------------------------------------------


@by_transformers_5
@pytest.mark.parametrize(
    "architecture",
    [
        "BioGptForCausalLM",
        "BloomForCausalLM",
        "CTRLLMHeadModel",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "GPTNeoXJapaneseForCausalLM",
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "MambaForCausalLM",
        "ModernBertDecoderForCausalLM",
        "OPTForCausalLM",
        "OpenAIGPTLMHeadModel",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "TrOCRForCausalLM",
        "WhisperForConditionalGeneration",
    ],
)
def test_pair_is_the_one_that_transformers_declares(architecture: str) -> None:
    ((head, embedding),) = getattr(transformers, architecture)._tied_weights_keys.items()
    others = ("model.encoder.layers.0.fc1.weight", "model.vision_tower.embeddings.0.weight")
    for prefix in ("", "policy.", "a.b."):
        names = [prefix + name for name in (*others, head, embedding)]
        pair = find_pair(names, None)
        assert pair == Pair(prefix + head, prefix + embedding, prefix + head, prefix + embedding)


@by_transformers_5
@pytest.mark.parametrize(
    "architecture",
    [
        "BartForConditionalGeneration",
        "BertForMaskedLM",
        "BertLMHeadModel",
        "BlenderbotForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "RobertaForCausalLM",
        "T5ForConditionalGeneration",
    ],
)
def test_other_ties_are_left_alone(architecture: str) -> None:
    tied = getattr(transformers, architecture)._tied_weights_keys
    values = stored(*dict.fromkeys([*tied, *tied.values()]))
    for flag in (True, False):
        config = {"architectures": [architecture], "model_type": "t5", FLAG: flag}
        for untie in (False, True):
            decision = decide(values, config, equal=True, untie=untie)
            assert is_unchanged(decision, values)
            assert not decision.warnings


@pytest.mark.parametrize(
    "others",
    [
        ("model.shared.weight",),  # mbart by itself
        ("model.encoder.embed_tokens.weight",),  # fsmt
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),  # bart
        ("model.encoder.language_model.embed_tokens.weight",),  # diffusion_gemma
    ],
)
@pytest.mark.parametrize("head", [HEAD, "proj_out.weight", "something_else.weight"])
def test_embedding_of_an_encoder_and_a_decoder_is_left_alone(
    others: tuple[str, ...], head: str
) -> None:
    values = stored(*others, "model.decoder.embed_tokens.weight", "model.decoder.layers.0.w", head)
    for flag in (True, False):
        config = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}
        decision = decide(values, {**config, FLAG: flag}, equal=True)
        assert is_unchanged(decision, values)
        assert not decision.warnings


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # vision-language models as the hub has them
        (
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
        ),
        (("lm_head.weight", "visual.embed.weight", EMBEDDING), (HEAD, EMBEDDING)),
        # not of one prefix
        (("lm_head.weight", "policy.model.embed_tokens.weight"), None),
        (("policy.lm_head.weight", "model.embed_tokens.weight"), (None, EMBEDDING)),
        # no component of that name
        (("lm_head.weight", "my_model.embed_tokens.weight"), None),
        # the outermost of several
        (
            ("draft.lm_head.weight", "draft.model.embed_tokens.weight", HEAD, EMBEDDING),
            (HEAD, EMBEDDING),
        ),
        # the whole before a half
        (("value.model.embed_tokens.weight", "a.b.lm_head.weight", "a.b." + EMBEDDING),) * 2,
        # a head of another embedding
        (("lm_head.weight", "embed_text_tokens.weight", LAYER), None),
        (("lm_head.weight", "model.embed_text_tokens.weight", LAYER), None),
        # base models and parts
        (("embed_tokens.weight", "layers.0.mlp.weight"), None),
        (("depth_decoder.model.embed_tokens.weight", "codebooks_head.weight"), None),
        (("model.layers.0.mlp.weight",), None),
        ((), None),
    ],
)
def test_pair_by_names(names: tuple[str, ...], expected: tuple[str | None, ...] | None) -> None:
    pair = find_pair(names, None)
    if expected is None:
        assert pair is None
    else:
        assert pair is not None
        assert (pair.head, pair.embedding) == expected[-2:]


def test_pair_of_a_part_belongs_to_its_config() -> None:
    names = ["thinker.lm_head.weight", "thinker.model.embed_tokens.weight"]
    names += ["talker.model.embed_tokens.weight", "talker.codec_head.weight"]
    config: Config = {"model_type": "qwen2_5_omni", "thinker_config": {}, "talker_config": {}}
    pair = find_pair(names, config)
    assert pair == Pair(names[0], names[1], names[0], names[1], ("thinker_config",))


@pytest.mark.parametrize(
    ("model_type", "head", "layer", "embedding"),
    [
        ("qwen2", HEAD, "model.layers.3.mlp.weight", EMBEDDING),
        (
            "gemma3",
            HEAD,
            "model.language_model.layers.0.mlp.weight",
            "model.language_model.embed_tokens.weight",
        ),
        (
            "llava",
            "language_model.lm_head.weight",
            "language_model.model.layers.0.mlp.weight",
            "language_model.model.embed_tokens.weight",
        ),
        ("gpt2", HEAD, "transformer.h.0.mlp.weight", "transformer.wte.weight"),
        ("falcon", HEAD, "transformer.h.0.mlp.weight", "transformer.word_embeddings.weight"),
        ("bloom", HEAD, "transformer.h.0.mlp.weight", "transformer.word_embeddings.weight"),
        ("opt", HEAD, "model.decoder.layers.0.fc1.weight", "model.decoder.embed_tokens.weight"),
        ("mamba", HEAD, "backbone.layers.0.mixer.weight", "backbone.embeddings.weight"),
        (
            "gpt_neox",
            "embed_out.weight",
            "gpt_neox.layers.0.mlp.weight",
            "gpt_neox.embed_in.weight",
        ),
    ],
)
def test_name_of_an_absent_embedding(
    model_type: str, head: str, layer: str, embedding: str
) -> None:
    config: Config = {"model_type": model_type}
    assert find_pair([layer, head], config) == Pair(head, None, head, embedding)


# --- every row of the table of loads, decided and opened ------------------------------------------

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
TOKENS = torch.tensor([[1, 5, 9, 31, 0]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def tiny(config: Any, tied: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that is really tied or not, and its weights, head and embedding apart."""
    torch.manual_seed(0)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class(config)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.normal_()  # far from what a new model has
        model.lm_head.weight = (
            embedding if tied else torch.nn.Parameter(torch.randn_like(embedding))
        )
    return model, {name: weight.clone() for name, weight in model.state_dict().items()}


def as_values(weights: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    return {
        name: Stored(tensor(name, weight.shape, FROM_TORCH[str(weight.dtype).split(".")[1]]))
        for name, weight in weights.items()
    }


def opened(
    folder: Path, config: Config, weights: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a config and a file: the model, and what it says of the keys."""
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    contiguous = {name: weight.clone() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    model_class = getattr(transformers, config["architectures"][0])
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    return model, info


def opens_right(
    folder: Path,
    config: Config,
    decision: TieDecision,
    weights: Mapping[str, torch.Tensor],
    original: Any,
) -> bool:
    """Whether what was decided opens without a complaint and computes what the original does."""
    written = {name: weights[value.tensor.name] for name, value in decision.values.items()}
    model, info = opened(folder, edited(config, decision.edits), written)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return torch.equal(logits(model), logits(original))


def qwen2_files(tied: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    return tiny(transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], **TINY), tied)


def without(weights: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name not in names}


def test_tied_both_equal(tmp_path: Path) -> None:
    model, weights = qwen2_files(tied=True)
    values, config = as_values(weights), {**qwen2(tied=True), **TINY}
    assert question(values, config) == (values[HEAD], values[EMBEDDING])

    decision = decide(values, config, equal=True)

    assert list(decision.values) == list(without(weights, HEAD))
    assert decision.edits == ()
    (change,) = decision.changes
    assert (change.kind, change.name, change.to) == ("dropped", HEAD, None)
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_by_default_both_equal_says_so_in_the_config(tmp_path: Path) -> None:
    own = transformers.GemmaConfig(architectures=["GemmaForCausalLM"], head_dim=8, **TINY)
    model, weights = tiny(own, tied=True)
    config = {"model_type": "gemma", "architectures": own.architectures, "head_dim": 8, **TINY}
    decision = decide(as_values(weights), config, equal=True)
    assert HEAD not in decision.values
    assert edits_of(decision) == {FLAG: True}
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_both_different() -> None:
    values, config = stored(EMBEDDING, LAYER, HEAD), qwen2(tied=True)
    assert question(values, config) == (values[HEAD], values[EMBEDDING])
    with pytest.raises(UnsupportedError, match=r"lm_head.weight and model.* differ, ") as error:
        decide(values, config, equal=False)
    assert error.value.hint is not None
    assert "--untie" in error.value.hint


@pytest.mark.parametrize("equal", [False, None])
def test_tied_both_different_untied(tmp_path: Path, equal: bool | None) -> None:
    model, weights = qwen2_files(tied=False)
    config = {**qwen2(tied=True), **TINY}
    decision = decide(as_values(weights), config, equal=equal, untie=True)
    assert list(decision.values) == list(weights)
    assert edits_of(decision) == {FLAG: False}
    assert decision.changes == ()
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_both_equal_untied(tmp_path: Path) -> None:
    model, weights = qwen2_files(tied=True)
    config = {**qwen2(tied=True), **TINY}
    decision = decide(as_values(weights), config, equal=True, untie=True)
    assert list(decision.values) == list(weights)
    assert edits_of(decision) == {FLAG: False}
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_only_embedding(tmp_path: Path) -> None:
    model, weights = qwen2_files(tied=True)
    values, config = as_values(without(weights, HEAD)), {**qwen2(tied=True), **TINY}
    assert question(values, config) is None
    decision = decide(values, config, equal=None)
    assert is_unchanged(decision, values)
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_only_head(tmp_path: Path) -> None:
    model, weights = qwen2_files(tied=True)
    values, config = as_values(without(weights, EMBEDDING)), {**qwen2(tied=True), **TINY}
    assert question(values, config) is None

    decision = decide(values, config, equal=None)

    assert list(decision.values) == [EMBEDDING if name == HEAD else name for name in values]
    assert decision.values[EMBEDDING] is values[HEAD]
    (change,) = decision.changes
    assert (change.kind, change.name, change.to) == ("renamed", HEAD, EMBEDDING)
    assert opens_right(tmp_path, config, decision, weights, model)


def test_tied_only_head_of_a_known_type_with_its_default() -> None:
    config: Config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    decision = decide(stored(LAYER, HEAD), config, equal=None)
    assert list(decision.values) == [LAYER, EMBEDDING]
    assert edits_of(decision) == {FLAG: True}


@pytest.mark.parametrize("equal", [True, False, None])
def test_untied_both(tmp_path: Path, equal: bool | None) -> None:
    model, weights = qwen2_files(tied=equal is True)
    values, config = as_values(weights), {**qwen2(tied=False), **TINY}
    assert question(values, config) is None
    for untie in (False, True):
        decision = decide(values, config, equal=equal, untie=untie)
        assert is_unchanged(decision, values)
        assert not decision.warnings
    assert opens_right(tmp_path, config, decision, weights, model)


@pytest.mark.parametrize(
    ("tied", "absent", "message"),
    [
        (False, (HEAD,), "lm_head.weight is not stored"),
        (False, (EMBEDDING,), "model.embed_tokens.weight is not stored"),
        (False, (HEAD, EMBEDDING), "no input embedding is stored"),
        (True, (HEAD, EMBEDDING), "no input embedding is stored"),
    ],
)
def test_what_would_be_random(
    tmp_path: Path, tied: bool, absent: tuple[str, ...], message: str
) -> None:
    _, weights = qwen2_files(tied)
    weights, config = without(weights, *absent), {**qwen2(tied), **TINY}
    _, info = opened(tmp_path, config, weights)
    assert set(absent) & set(info["missing_keys"])  # else there was nothing to refuse

    values = as_values(weights)
    assert question(values, config) is None
    for untie in (False, True):
        with pytest.raises(UnsupportedError, match=message):
            decide(values, config, equal=None, untie=untie)


# --- flags at two levels --------------------------------------------------------------------------

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
VISION |= {"out_hidden_size": 16, "fullatt_block_indexes": [0]}
NESTED_EMBEDDING = "model.language_model.embed_tokens.weight"


def qwen2_5_vl_files(tied: bool) -> tuple[Any, dict[str, torch.Tensor], Config]:
    """Model, weights, and a config with a flag nowhere."""
    own = transformers.Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={**TINY, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=VISION,
    )
    model, weights = tiny(own, tied)
    config: Config = json.loads(own.to_json_string())
    config.pop(FLAG, None)
    config["text_config"].pop(FLAG, None)
    return model, weights, config


@by_transformers_5
@pytest.mark.parametrize(
    ("top", "text", "edits"),
    [
        (None, True, {FLAG: True}),
        (True, None, {f"text_config.{FLAG}": True}),
        (True, False, {f"text_config.{FLAG}": True}),
        (False, True, {FLAG: True}),
        (True, True, {}),
    ],
)
def test_only_embedding_tied_for_some_reader(
    tmp_path: Path, top: bool | None, text: bool | None, edits: dict[str, bool]
) -> None:
    """The head is nowhere, so only a model that ties it everywhere is the one that was trained."""
    model, weights, config = qwen2_5_vl_files(tied=True)
    set_flags(config, top, text)
    values = as_values(without(weights, HEAD))
    decision = decide(values, config, equal=None)
    assert list(decision.values) == list(values)
    assert edits_of(decision) == edits
    assert opens_right(tmp_path, config, decision, weights, model)

    head_only = decide(as_values(without(weights, NESTED_EMBEDDING)), config, equal=None)
    assert set(head_only.values) == set(values)
    assert edits_of(head_only) == edits
    assert opens_right(tmp_path, config, head_only, weights, model)


def set_flags(config: Config, top: bool | None, text: bool | None) -> None:
    for place, value in ((config, top), (config["text_config"], text)):
        if value is not None:
            place[FLAG] = value


@by_transformers_5
@pytest.mark.parametrize(
    ("top", "text", "dropped"),
    [
        (None, None, False),
        (None, True, False),
        (True, None, False),
        (False, True, False),
        (True, True, True),
    ],
)
def test_equal_head_is_dropped_where_both_levels_tie(
    tmp_path: Path, top: bool | None, text: bool | None, dropped: bool
) -> None:
    model, weights, config = qwen2_5_vl_files(tied=True)
    set_flags(config, top, text)
    values = as_values(weights)
    assert (question(values, config) is None) is (top is None and text is None)
    decision = decide(values, config, equal=True)
    assert (HEAD not in decision.values) is dropped
    assert decision.edits == ()
    # Why it is kept is said unless the config is clear.
    assert len(decision.warnings) == (not dropped and (top, text) != (None, None))
    assert opens_right(tmp_path, config, decision, weights, model)


@by_transformers_5
@pytest.mark.parametrize(
    ("top", "text"), [(None, True), (True, None), (False, True), (True, False), (True, True)]
)
def test_different_head_under_a_flag_at_either_level(
    tmp_path: Path, top: bool | None, text: bool | None
) -> None:
    model, weights, config = qwen2_5_vl_files(tied=False)
    set_flags(config, top, text)
    values = as_values(weights)
    with pytest.raises(UnsupportedError, match="differ"):
        decide(values, config, equal=False)
    decision = decide(values, config, equal=False, untie=True)
    after = edited(config, decision.edits)
    assert after[FLAG] is False
    assert after["text_config"][FLAG] is False
    assert opens_right(tmp_path, config, decision, weights, model)


def test_flags_of_a_part_of_the_model() -> None:
    head, embedding = "thinker.lm_head.weight", "thinker.model.embed_tokens.weight"
    thinker: Config = {"model_type": "qwen2_5_omni_thinker", FLAG: True, "text_config": {}}
    config: Config = {"model_type": "qwen2_5_omni", FLAG: False, "thinker_config": thinker}
    decision = decide(stored(head, embedding), config, equal=False, untie=True)
    assert edits_of(decision) == {
        f"thinker_config.{FLAG}": False,
        f"thinker_config.text_config.{FLAG}": False,
    }


def test_both_names_of_the_flag_are_set_in_lfm2() -> None:
    config: Config = {"model_type": "lfm2", "tie_embedding": True}
    values = stored(EMBEDDING, HEAD)
    assert edits_of(decide(values, config, equal=True)) == {FLAG: True}
    untied = edited(config, decide(values, config, equal=True, untie=True).edits)
    assert untied == {"model_type": "lfm2", "tie_embedding": False, FLAG: False}


def test_class_that_never_ties_keeps_both_and_misses_neither() -> None:
    config: Config = {
        "model_type": "qwen2_audio",
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        FLAG: True,
        "text_config": {FLAG: True},
    }
    values = stored(NESTED_EMBEDDING, HEAD)
    assert is_unchanged(decide(values, config, equal=True), values)
    with pytest.raises(UnsupportedError, match="would be random"):
        decide(stored(NESTED_EMBEDDING), config, equal=None)


# --- what is not known ----------------------------------------------------------------------------


def test_unknown_type_without_a_flag_keeps_both_and_says_so() -> None:
    config: Config = {"model_type": "internlm9", "architectures": ["InternLM9ForCausalLM"]}
    values = stored(EMBEDDING, LAYER, HEAD)
    assert question(values, config) is None
    decision = decide(values, config, equal=None)
    assert is_unchanged(decision, values)
    (warning,) = decision.warnings
    assert "internlm9" in warning
    assert edits_of(decide(values, config, equal=None, untie=True)) == {FLAG: False}


def test_unknown_type_with_a_flag_is_taken_at_its_word() -> None:
    config: Config = {"model_type": "internlm9", FLAG: True}
    decision = decide(stored(EMBEDDING, HEAD), config, equal=True)
    assert list(decision.values) == [EMBEDDING]
    assert not decision.warnings


@pytest.mark.parametrize("half", [EMBEDDING, HEAD])
@pytest.mark.parametrize(
    ("flag", "others", "refused", "warned"),
    [
        (None, (LAYER,), False, True),
        (False, (LAYER,), True, False),
        # A weight of that shape may be the other half.
        (None, (LAYER, "model.output.weight"), False, False),
        (False, (LAYER, "model.output.weight"), False, False),
    ],
)
def test_half_of_an_unknown_type(
    half: str, flag: bool | None, others: tuple[str, ...], refused: bool, warned: bool
) -> None:
    config: Config = {"model_type": "internlm9", "architectures": ["InternLM9ForCausalLM"]}
    if flag is not None:
        config[FLAG] = flag
    values = stored(half, *others)
    if refused:
        with pytest.raises(UnsupportedError, match="would be random"):
            decide(values, config, equal=None)
    else:
        decision = decide(values, config, equal=None)
        assert is_unchanged(decision, values)
        assert len(decision.warnings) == warned


def test_no_half_at_all_of_an_unknown_type() -> None:
    config: Config = {"model_type": "internlm9", "architectures": ["InternLM9ForCausalLM"]}
    assert len(decide(stored(LAYER), config, equal=None).warnings) == 1


@pytest.mark.parametrize("names", [(EMBEDDING, HEAD), (EMBEDDING,), (HEAD, LAYER), (LAYER,), ()])
@pytest.mark.parametrize("untie", [False, True])
def test_without_a_config_all_is_written_as_it_is(names: tuple[str, ...], untie: bool) -> None:
    values = stored(*names)
    assert question(values, None) is None
    decision = decide(values, None, equal=None, untie=untie)
    assert is_unchanged(decision, values)
    assert not decision.warnings


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None}])
def test_half_without_architectures_is_kept_with_a_warning(config: Config) -> None:
    values = stored(EMBEDDING, LAYER)
    for flag in ({}, {FLAG: False}):
        decision = decide(values, {"model_type": "qwen2", **config, **flag}, equal=None)
        assert is_unchanged(decision, values)
        assert len(decision.warnings) == 1
    tied = decide(values, {"model_type": "qwen2", **config, FLAG: True}, equal=None)
    assert is_unchanged(tied, values)
    assert not tied.warnings


# --- models without an output head ----------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    ["Qwen2ForTokenClassification", "Qwen2ForSequenceClassification", "Qwen2Model", "EPModel"],
)
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("untie", [False, True])
def test_architecture_without_an_output_head(
    architecture: str, flag: bool | None, untie: bool
) -> None:
    config = qwen2(flag, architecture)
    for values in (
        stored(EMBEDDING, LAYER),
        stored("embed_tokens.weight"),
        stored(LAYER),
        {EMBEDDING: with_adapter(EMBEDDING)},
    ):
        decision = decide(values, config, equal=None, untie=untie)
        assert is_unchanged(decision, values)
        assert not decision.warnings


def test_critic_with_the_architecture_of_its_base() -> None:
    values = stored(EMBEDDING, LAYER, "score.weight")
    decision = decide(values, qwen2(tied=False), equal=None)
    assert is_unchanged(decision, values)
    (warning,) = decision.warnings
    assert "score.weight" in warning


def test_bias_of_an_output_head_is_none() -> None:
    with pytest.raises(UnsupportedError, match=r"lm_head.weight is not stored"):
        decide(stored(EMBEDDING, "lm_head.bias"), qwen2(tied=False), equal=None)


def test_adapter_by_itself_lacks_nothing() -> None:
    values = stored("model.layers.0.mlp.lora_A.weight", "model.layers.0.mlp.lora_B.weight")
    assert is_unchanged(decide(values, qwen2(tied=True), equal=None), values)
    assert is_unchanged(decide({}, qwen2(tied=True), equal=None), {})


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [(HEAD,), (EMBEDDING,), (EMBEDDING, HEAD)])
def test_adapter_on_a_tied_pair(targets: tuple[str, ...]) -> None:
    values = {**stored(EMBEDDING, LAYER, HEAD), **{name: with_adapter(name) for name in targets}}
    assert question(values, qwen2(tied=True)) is None
    with pytest.raises(UnsupportedError, match=f"{targets[0]} has a LoRA adapter") as error:
        decide(values, qwen2(tied=True), equal=None)
    assert error.value.hint is not None
    assert "--untie" in error.value.hint
    untied = decide(values, qwen2(tied=True), equal=None, untie=True)
    assert untied.values == values
    assert edits_of(untied) == {FLAG: False}
    assert is_unchanged(decide(values, qwen2(tied=False), equal=None), values)


@pytest.mark.parametrize("half", [HEAD, EMBEDDING])
def test_adapter_on_the_only_half_of_a_tied_pair(half: str) -> None:
    values: dict[str, Value] = {**stored(LAYER), half: with_adapter(half)}
    with pytest.raises(UnsupportedError, match=f"{half} has a LoRA adapter"):
        decide(values, qwen2(tied=True), equal=None)


@pytest.mark.parametrize("half", [HEAD, EMBEDDING])
def test_only_half_of_a_tied_pair_cannot_be_untied(half: str) -> None:
    for values in (stored(LAYER, half), {**stored(LAYER), half: with_adapter(half)}):
        with pytest.raises(UsageError, match="--untie"):
            decide(values, qwen2(tied=True), equal=None, untie=True)


# --- what differs without a look at the data ------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((8, 4), "BF16", r"differ in dtype \(F32, BF16\)"), ((9, 4), "F32", "differ in shape")],
)
def test_other_dtype_or_shape_is_a_difference(
    shape: tuple[int, ...], dtype: str, message: str
) -> None:
    values: dict[str, Value] = {**stored(HEAD), EMBEDDING: Stored(tensor(EMBEDDING, shape, dtype))}
    assert question(values, qwen2(tied=True)) is None
    for equal in (None, True):
        with pytest.raises(UnsupportedError, match=message):
            decide(values, qwen2(tied=True), equal=equal)


def test_decision_needs_the_answer() -> None:
    with pytest.raises(ValueError, match="has to be known"):
        decide(stored(HEAD, EMBEDDING), qwen2(tied=True), equal=None)


# --- stored checkpoints ---------------------------------------------------------------------------

# Those whose expected result has plain names; beside each, whether its head goes.
STORED = {
    "fsdp1_dtensor_flatparams__t213": True,
    "fsdp1_full_state_dict__t213": True,
    "fsdp2_divergent_buffers__t213": True,
    "fsdp2_ep_local__t213": False,
    "fsdp2_moe__t213": False,
    "fsdp2_named_parameters__t213": False,
    "fsdp2_odd_storage__t213": False,
    "fsdp2_tokencls__t213": False,
    "fsdp2_tp_2x2__t213": False,
    "fsdp2_w4__t213": True,
    "fsdp2_w4__t24": True,
    "fsdp2_w4_scalarparam__t213": True,
    "fsdp2_w4_trained__t213": True,
    "fsdp2_w4_untied__t213": False,
    "toy_w12__t213": False,
    "tp_only_w2__t213": False,
}


@pytest.mark.parametrize(("checkpoint", "dropped"), STORED.items())
def test_stored_checkpoints(checkpoint: str, dropped: bool) -> None:
    config = json.loads((DATA / checkpoint / "huggingface" / "config.json").read_text("utf-8"))
    with safe_open(DATA / checkpoint / "expected.safetensors", "pt") as file:
        values: dict[str, Value] = {
            name: Stored(
                tensor(name, file.get_slice(name).get_shape(), file.get_slice(name).get_dtype())
            )
            for name in file.keys()  # noqa: SIM118 -- a file is no mapping
        }
        asked = question(values, config)
        names = [value.tensor.name for value in asked or () if isinstance(value, Stored)]
        equal = torch.equal(*map(file.get_tensor, names)) if names else None
    decision = decide(values, config, equal=equal)
    assert set(values) - set(decision.values) == ({HEAD} if dropped else set())
    assert decision.edits == ()
    assert decision.warnings == ()


# --- properties -----------------------------------------------------------------------------------

MODEL_TYPES = sorted(
    {
        model_type
        for table in TABLES.values()
        for key in ("true", "false")
        for model_type in table[key]
    }
)
maybe = st.sampled_from((None, True, False))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Of any type that transformers has, with the flag anywhere and nowhere."""
    config: Config = {"model_type": draw(st.sampled_from([*MODEL_TYPES, "unheard_of"]))}
    architecture = draw(
        st.sampled_from((None, "XForCausalLM", "XForConditionalGeneration", "XModel"))
    )
    if architecture is not None:
        config["architectures"] = [architecture]
    if draw(st.booleans()):
        text: Config = {"model_type": draw(st.sampled_from(MODEL_TYPES))}
        config["text_config"] = text if draw(st.booleans()) else {}
        set_flags(config, draw(maybe), draw(maybe))
    elif (flag := draw(maybe)) is not None:
        config[FLAG] = flag
    return config


def said(config: Config) -> list[bool]:
    """All that a config says."""
    places = [config, config.get("text_config", {})]
    return [place[FLAG] for place in places if FLAG in place]


def outcome(
    values: Mapping[str, Value], config: Config, *, equal: bool | None, untie: bool = False
) -> TieDecision | str:
    """The decision, or why it is refused."""
    try:
        return decide(values, config, equal=equal, untie=untie)
    except UnsupportedError as error:
        return str(error)


@fixed
@given(config=configs(), equal=st.booleans(), untie=st.booleans())
def test_head_goes_only_if_equal_and_nothing_contradicts(
    config: Config, equal: bool, untie: bool
) -> None:
    values = stored(EMBEDDING, LAYER, HEAD)
    decision = outcome(values, config, equal=equal, untie=untie)
    levels = 1 + ("text_config" in config)
    if isinstance(decision, str):
        assert "differ" in decision
        assert not equal
        assert not untie
        assert said(config) != [False] * levels
        return
    after = edited(config, decision.edits)
    if HEAD not in decision.values:
        assert equal
        assert not untie
        assert False not in said(config)
        assert said(after) == [True] * levels
        assert list(decision.values) == [EMBEDDING, LAYER]
    else:
        assert decision.values == values
        assert equal or untie or True not in said(config)
        if decision.edits:
            assert untie
            assert said(after) == [False] * levels


@fixed
@given(config=configs(), half=st.sampled_from((EMBEDDING, HEAD)))
def test_absent_half_is_tied_everywhere_or_refused(config: Config, half: str) -> None:
    decision = outcome(stored(LAYER, half), config, equal=None)
    levels = 1 + ("text_config" in config)
    if isinstance(decision, str):
        assert "would be random" in decision
        assert True not in said(config) or config["model_type"] in NEVER_TIED_IN_5
        return
    predicts_tokens = config.get("architectures", ["XModel"]) != ["XModel"]
    if decision.edits:
        assert said(edited(config, decision.edits)) == [True] * levels
    elif (half == HEAD or predicts_tokens) and not decision.warnings:
        assert False not in said(config)
    elif decision.warnings:
        assert config["model_type"] == "unheard_of" or "architectures" not in config
    if half == HEAD and not decision.warnings:
        assert list(decision.values) == [LAYER, EMBEDDING]


def test_default_of_a_flat_config_decides() -> None:
    """Without a flag, the head goes if every version that has the type ties it by default."""
    for model_type in MODEL_TYPES:
        tied = model_type not in NEVER_TIED_IN_5
        for table in TABLES.values():
            if model_type in {*table["true"], *table["false"], *table["none"]}:
                text = table["nested"].get(model_type, {}).get("text_config", True)
                tied = tied and model_type in table["true"] and text
        decision = decide(stored(EMBEDDING, HEAD), {"model_type": model_type}, equal=True)
        assert (HEAD not in decision.values) is tied, model_type


def test_changes_of_one_kind_have_one_reason() -> None:
    """So that they are shown as a group: names belong to the record, not to the reason."""
    config = qwen2(tied=True)
    changes: list[Change] = [
        *decide(stored(EMBEDDING, HEAD), config, equal=True).changes,
        *decide(stored(LAYER, HEAD), config, equal=None).changes,
    ]
    assert len(changes) == 2
    for change in changes:
        assert HEAD not in change.reason
        assert EMBEDDING not in change.reason
