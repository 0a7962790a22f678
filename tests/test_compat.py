"""What transformers 4.x needs beside 5.x's keys.

transformers 5.24 is the oracle of what 5.x reads before and after. The suite runs without 4.x, so
what 4.x needs is written by hand. It was found with 4.57.6, by reading its classes and by running:
for each row of `EDITS`, 5.24.0 saved a tiny model with random weights. With the keys of the row,
4.57.6 and 5.0.0 gave logits within 1e-5 of 5.24.0's (in standard deviations); without them 4.57.6
was off by more than 0.04, or failed. But for:

- gemma3 and llava: their vision towers have other names in 4.57.6 and 5.0.0 (text logits are right)
- qwen3_vl_moe: 4.57.6 wants its experts transposed
- mistral3: 4.57.6 wants tie_word_embeddings in text_config, too; 5.0.0 fails on the rope_type of
  Pixtral that 5.24.0 writes
- olmo3: 5.0.0 has one rotary embedding for all layers; it is wrong with and without the keys
- apertus: 4.57.6 differs by 2e-3, its activation computes in bfloat16
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from streammerge.compat import compat_edits, compat_warnings, tokenizer_compat_edits
from streammerge.config import Edit, JsonObject, apply_edits, parse_json

DEFAULT = {"rope_theta": 123457.0, "rope_type": "default"}
SLIDING = {"rope_theta": 4321.0, "rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
MROPE = {"mrope_section": [16, 24, 24]}
THETA = {"rope_theta": 123457.0}


def of_layers(full: JsonObject, sliding: JsonObject) -> JsonObject:
    return {"full_attention": full, "sliding_attention": sliding}


# (model type, arguments of its config, what is added)
EDITS: list[tuple[str, JsonObject, JsonObject]] = [
    *(
        (model_type, {"rope_parameters": DEFAULT}, THETA)
        for model_type in (
            *("qwen2", "qwen3", "llama", "mistral", "gemma2", "granite", "olmo2", "smollm3"),
            *("starcoder2", "seed_oss", "cohere2", "exaone4", "helium", "ernie4_5", "lfm2"),
            *("qwen2_moe", "mixtral", "deepseek_v3"),
        )
    ),
    ("qwen2", {"rope_parameters": DEFAULT | YARN}, THETA | {"rope_scaling": YARN}),
    ("llama", {"rope_parameters": DEFAULT | LLAMA3}, THETA | {"rope_scaling": LLAMA3}),
    (
        "deepseek_v3",
        {"rope_parameters": DEFAULT | YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        THETA | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    # Part of each head is turned.
    *(
        (
            model_type,
            {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}},
            THETA | {"partial_rotary_factor": 0.25},
        )
        for model_type in ("glm4", "glm4_moe", "phi", "phi3", "qwen3_next", "stablelm", "nemotron")
    ),
    (
        "gpt_neox",
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 123457.0, "rotary_pct": 0.5},
    ),
    # Sliding attention has parameters of its own.
    (
        "gemma3_text",
        {"rope_parameters": of_layers(DEFAULT, SLIDING)},
        THETA | {"rope_local_base_freq": 4321.0},
    ),
    (
        "gemma3_text",
        {"rope_parameters": of_layers(DEFAULT | LINEAR, SLIDING)},
        THETA | {"rope_local_base_freq": 4321.0, "rope_scaling": LINEAR},
    ),
    (
        "olmo3",
        {"rope_parameters": of_layers(DEFAULT | YARN, DEFAULT)},
        THETA | {"rope_scaling": YARN},
    ),
    # rope_scaling is refused unless it looks like this.
    (
        "olmo2",
        {"rope_parameters": DEFAULT | LINEAR},
        THETA | {"rope_scaling": {"type": "linear", "factor": 8.0}},
    ),
    (
        "phi3",
        {
            "original_max_position_embeddings": 2048,
            "rope_parameters": DEFAULT
            | {
                "rope_type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
                "original_max_position_embeddings": 2048,
            },
        },
        THETA
        | {
            "partial_rotary_factor": 1.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        },
    ),
    # 4.57 scales these two if rope_scaling is not there.
    ("gpt_oss", {"rope_parameters": DEFAULT}, THETA | {"rope_scaling": None}),
    ("apertus", {"rope_parameters": DEFAULT}, THETA | {"rope_scaling": None}),
    ("gpt_oss", {"rope_parameters": DEFAULT | YARN}, THETA | {"rope_scaling": YARN}),
    # 5.24 writes num_local_experts.
    ("qwen3_moe", {"rope_parameters": DEFAULT, "num_experts": 8}, THETA | {"num_experts": 8}),
    # Composite models. Without rope_scaling, the Qwen ones fail in 4.57.
    *(
        (
            model_type,
            {"text_config": {"rope_parameters": DEFAULT | MROPE}},
            {
                "text_config.rope_theta": 123457.0,
                "text_config.rope_scaling": {"rope_type": "default"} | MROPE,
            },
        )
        for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
    ),
    (
        "qwen3_vl_moe",
        {"text_config": {"rope_parameters": DEFAULT | MROPE, "num_experts": 8}},
        {
            "text_config.rope_theta": 123457.0,
            "text_config.rope_scaling": {"rope_type": "default"} | MROPE,
            "text_config.num_experts": 8,
        },
    ),
    (
        "gemma3",
        {"text_config": {"rope_parameters": of_layers(DEFAULT | LINEAR, SLIDING)}},
        {
            "text_config.rope_theta": 123457.0,
            "text_config.rope_local_base_freq": 4321.0,
            "text_config.rope_scaling": LINEAR,
        },
    ),
    (
        "llava",
        {"text_config": {"model_type": "qwen2", "rope_parameters": DEFAULT}},
        {"text_config.rope_theta": 123457.0},
    ),
    (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "rope_parameters": DEFAULT},
            "vision_config": {"model_type": "pixtral", "rope_parameters": DEFAULT},
        },
        {"text_config.rope_theta": 123457.0, "vision_config.rope_theta": 123457.0},
    ),
]
# Without arguments, for what 5.24 reads: also model types that 4.x does not know or has no theta
# for, types with other kinds of parameters, and types without.
OTHER_MODEL_TYPES = (
    *(
        "gemma4",
        "bailing_hybrid",
        "zaya",
        "modernbert",
        "deepseek_v4",
        "ministral3",
        "mimo_v2_flash",
    ),
    *("t5", "whisper", "bamba", "falcon_h1", "qwen3_omni_moe", "t5gemma", "dia", "idefics2"),
)


def saved(model_type: str, **arguments: Any) -> bytes:
    """``config.json`` as 5.24 writes it."""
    return AutoConfig.for_model(model_type, **copy.deepcopy(arguments)).to_json_string().encode()


def edited(data: bytes) -> JsonObject:
    edits = compat_edits(json.loads(data))
    new, reformatted = apply_edits(data, edits)
    assert not reformatted
    return parse_json(new, "config.json")


def read(config: JsonObject, folder: Path) -> JsonObject:
    """What transformers reads of a config."""
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder).to_dict()


def without(config: JsonObject, edits: list[Edit]) -> JsonObject:
    config = copy.deepcopy(config)
    for edit in edits:
        part: Any = config
        for key in edit.path[:-1]:
            part = part[key]
        part.pop(edit.path[-1], None)
        # 5.24 keeps the `type` that 4.x wants beside its own rope_type.
        if edit.path[-1] == "rope_scaling" and edit.value is not None:
            part["rope_parameters"].pop("type", None)
    return config


def ids(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("model_type", "arguments", "expected"), EDITS, ids=ids)
def test_what_is_added(model_type: str, arguments: JsonObject, expected: JsonObject) -> None:
    edits = compat_edits(json.loads(saved(model_type, **arguments)))
    assert {".".join(edit.path): edit.value for edit in edits} == expected


@pytest.mark.parametrize(
    ("model_type", "arguments"),
    [
        *((model_type, arguments) for model_type, arguments, _ in EDITS),
        *((model_type, {}) for model_type in OTHER_MODEL_TYPES),
    ],
    ids=ids,
)
def test_transformers_5_reads_the_same(
    model_type: str, arguments: JsonObject, tmp_path: Path
) -> None:
    data = saved(model_type, **arguments)
    before, after = json.loads(data), edited(data)
    edits = compat_edits(before)
    assert without(after, edits) == before
    assert without(read(after, tmp_path), edits) == without(read(before, tmp_path), edits)
    assert compat_edits(after) == []


def test_only_what_4x_reads_is_added() -> None:
    for model_type in ("gemma4", "bailing_hybrid", "zaya", "deepseek_v4", "ministral3", "t5"):
        assert compat_edits(json.loads(saved(model_type))) == []
    vision = [e for e in compat_edits(json.loads(saved("qwen2_5_vl"))) if "vision" in e.path[0]]
    assert vision == []


def test_configs_of_4x_stay_as_they_are() -> None:
    config: JsonObject = {
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "num_experts": 8,
        "transformers_version": "4.57.6",
    }
    assert compat_edits(config) == []
    assert compat_warnings(config, {"additional_special_tokens": ["<a>"]}) == []
    assert compat_edits({}) == []
    assert compat_edits({"model_type": "qwen2", "rope_parameters": None}) == []


def test_what_is_there_stays_unless_it_is_null() -> None:
    config: JsonObject = {
        "model_type": "qwen2",
        "rope_theta": 1.0,
        "rope_scaling": None,
        "rope_parameters": DEFAULT | YARN,
    }
    assert [(e.path, e.value) for e in compat_edits(config)] == [(("rope_scaling",), YARN)]
    (missing, conflict) = compat_warnings(config, {})
    assert "defaults for rope_scaling;" in missing
    assert "rope_parameters and rope_theta do not agree" in conflict


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "rope_parameters": DEFAULT | {"rope_type": "proportional"}},
        {"model_type": "llama", "rope_parameters": DEFAULT | {"rope_type": ["linear"]}},
        {"model_type": "olmo2", "rope_parameters": DEFAULT | YARN},
        {"model_type": "phi3", "rope_parameters": DEFAULT | LINEAR},
        {"model_type": "gemma3_text", "rope_parameters": of_layers(DEFAULT, SLIDING | LINEAR)},
        {"model_type": "olmo3", "rope_parameters": of_layers(DEFAULT, SLIDING)},
        {"model_type": "modernbert", "rope_parameters": of_layers(DEFAULT, SLIDING)},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": DEFAULT}},
    ],
)
def test_what_4x_cannot_say_is_warned_of(config: JsonObject) -> None:
    nested: JsonObject = {"text_config": config}
    assert compat_edits(nested) == []
    (warning,) = compat_warnings(nested, {})
    assert "transformers 4.x has no keys for text_config.rope_parameters" in warning


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.fixture
def bpe() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "<start>", "<end>", "<image>"])
    return tokenizer


def write_tokenizer(bpe: Tokenizer, folder: Path, **arguments: Any) -> JsonObject:
    """Save a tokenizer as 5.24 does, returning its config."""
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(arguments))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    config = parse_json((folder / "tokenizer_config.json").read_bytes(), "tokenizer_config.json")
    assert "additional_special_tokens" not in config
    return config


def what_a_tokenizer_reads(folder: Path) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        type(tokenizer),
        tokenizer("<start>hi<image><end>").input_ids,
        tokenizer.all_special_tokens,
        tokenizer.extra_special_tokens,
        tokenizer.eos_token,
        getattr(tokenizer, "image_token", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [  # Each opened in 4.57.6, 5.0.0 and 5.24.0 with the same ids and the same special tokens.
        (
            {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": ["<start>", "<end>"]},
            {"additional_special_tokens": ["<start>", "<end>"], "extra_special_tokens": None},
        ),
        (
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "additional_special_tokens": ["<start>"],
                "image_token": "<image>",
            },
            {
                "additional_special_tokens": ["<start>"],
                "extra_special_tokens": {"image_token": "<image>"},
            },
        ),
        (
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "extra_special_tokens": {"image_token": "<image>"},
            },
            {"extra_special_tokens": {"image_token": "<image>"}},
        ),
    ],
)
def test_transformers_5_reads_the_same_tokenizer(
    bpe: Tokenizer, tmp_path: Path, arguments: JsonObject, expected: JsonObject
) -> None:
    folder = tmp_path / "tokenizer"
    config = write_tokenizer(bpe, folder, eos_token="<end>", pad_token="<pad>", **arguments)
    before = what_a_tokenizer_reads(folder)
    path = folder / "tokenizer_config.json"
    new, reformatted = apply_edits(path.read_bytes(), tokenizer_compat_edits(config))
    assert not reformatted
    path.write_bytes(new)
    after = json.loads(new)
    assert {key: after.get(key) for key in expected} == expected
    assert {k: v for k, v in after.items() if k not in expected} == {
        k: v for k, v in config.items() if k not in expected
    }
    assert what_a_tokenizer_reads(folder) == before
    assert before[0] is Qwen2Tokenizer
    assert tokenizer_compat_edits(after) == []


def test_the_class_of_generic_tokenizers(bpe: Tokenizer, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", additional_special_tokens=["<start>"]
    )
    tokenizer.save_pretrained(tmp_path)
    before = what_a_tokenizer_reads(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert config["tokenizer_class"] == "TokenizersBackend"
    new, _ = apply_edits(path.read_bytes(), tokenizer_compat_edits(config))
    assert json.loads(new)["tokenizer_class"] == "PreTrainedTokenizerFast"
    path.write_bytes(new)
    assert what_a_tokenizer_reads(tmp_path) == before


def test_special_tokens_of_both_names_are_joined() -> None:
    added = {"__type": "AddedToken", "content": "<b>"}
    config: JsonObject = {
        "extra_special_tokens": ["<a>", added, "<c>"],
        "additional_special_tokens": ["<c>", "<d>"],
    }
    new, _ = apply_edits(json.dumps(config).encode(), tokenizer_compat_edits(config))
    assert json.loads(new) == {"additional_special_tokens": ["<c>", "<d>", "<a>", added]}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": ["<a>"]},
        {"extra_special_tokens": {"image_token": "<a>"}, "additional_special_tokens": None},
        {"extra_special_tokens": {}, "tokenizer_class": None},
    ],
)
def test_tokenizers_of_4x_stay_as_they_are(config: JsonObject) -> None:
    assert tokenizer_compat_edits(config) == []
    assert compat_warnings({}, config) == []


# --- warnings -------------------------------------------------------------------------------------


def test_warnings_name_what_4x_would_not_read_until_it_is_added() -> None:
    data = saved("qwen3_moe", num_experts=8)
    tokenizer: JsonObject = {"extra_special_tokens": ["<a>"]}
    of_config, of_tokenizer = compat_warnings(json.loads(data), tokenizer)
    assert "defaults for rope_theta, num_experts; --compat 4 adds" in of_config
    assert "tokenizer_config.json" in of_tokenizer
    assert "--compat 4" in of_tokenizer
    assert all("\n" not in warning for warning in (of_config, of_tokenizer))
    assert compat_warnings(edited(data), {}) == []


def test_stored_configs_are_in_the_form_of_transformers_5() -> None:
    data = (DATA / "fsdp2_w4__t213" / "huggingface" / "config.json").read_bytes()
    (warning,) = compat_warnings(json.loads(data), {})
    assert "defaults for rope_theta;" in warning


@pytest.mark.parametrize(
    ("vision", "name", "warned"),
    [
        ("siglip_vision_model", "vision_tower.encoder.layers.0.mlp.fc1.weight", True),
        ("clip_vision_model", "model.vision_tower.embeddings.class_embedding", True),
        ("siglip_vision_model", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", False),
        ("internvl_vision", "model.vision_tower.encoder.layer.0.mlp.fc1.weight", False),
        ("siglip_vision_model", "language_model.model.embed_tokens.weight", False),
    ],
)
def test_vision_towers_with_the_names_of_newer_versions(
    vision: str, name: str, warned: bool
) -> None:
    config: JsonObject = {"vision_config": {"model_type": vision}}
    warnings = compat_warnings(config, {}, ["lm_head.weight", name])
    assert ["the vision tower has" in warning for warning in warnings] == [True] * warned
    assert compat_warnings(config, {}) == []


def test_a_type_that_is_no_name_is_none_that_4x_knows() -> None:
    config: JsonObject = {
        "model_type": ["llama"],
        "rope_parameters": DEFAULT,
        "num_local_experts": 2,
        "vision_config": {"model_type": ["clip_vision_model"]},
    }
    assert compat_edits(config) == []
    assert compat_warnings(config, {}, ["vision_tower.embeddings.class_embedding"]) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "{{ messages }}"),
        ({"chat_template": None}, "{{ messages }}"),
        ({"chat_template": "x"}, "x"),
    ],
)
def test_a_template_file_is_repeated_in_the_config(config: JsonObject, expected: str) -> None:
    # Before 4.47 transformers reads it there only (found by running 4.46.3).
    data = json.dumps(config).encode()
    new, _ = apply_edits(data, tokenizer_compat_edits(config, "{{ messages }}"))
    assert json.loads(new)["chat_template"] == expected
    assert tokenizer_compat_edits(config) == []
