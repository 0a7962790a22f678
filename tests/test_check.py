"""Checks of directories: transformers and peft write good ones, each test damages one."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from checkpoints import cut
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from streammerge.checks.consistency import (
    Weight,
    check_consistency,
    check_experts,
    check_layers,
)
from streammerge.checks.directory import check_directory
from streammerge.checks.findings import Finding
from streammerge.checks.model import check_model

State = dict[str, torch.Tensor]
Config = dict[str, Any]

# --- models ---------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "qwen2": (
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**TEXT, tie_word_embeddings=False),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        lambda: transformers.Qwen3Config(**TEXT, tie_word_embeddings=True),
    ),
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TEXT)),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(**TEXT, **MOE, num_local_experts=3, num_experts=3),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**TEXT, num_local_experts=3),
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **TEXT,
            **MOE,
            n_routed_experts=3,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4
        ),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={
                **TEXT,
                "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 24,
                "depth": 3,
                "num_heads": 2,
                "out_hidden_size": 16,
            },
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(**VISION),
        ),
    ),
    "token_classification": (
        "Qwen2ForTokenClassification",
        lambda: transformers.Qwen2Config(**TEXT, num_labels=3),
    ),
    "encoder_decoder": (
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(
            vocab_size=32,
            d_model=16,
            encoder_layers=2,
            decoder_layers=3,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        ),
    ),
    "recurrent": (
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=3),
    ),
    "hybrid": (
        "Qwen3NextForCausalLM",
        lambda: transformers.Qwen3NextConfig(
            **TEXT,
            **MOE,
            num_experts=3,
            shared_expert_intermediate_size=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "packed": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**TEXT, num_local_experts=3),
    ),
}


def build(family: str) -> PreTrainedModel:
    name, make_config = FAMILIES[family]
    model = getattr(transformers, name)(make_config())
    assert isinstance(model, PreTrainedModel)
    return model.to(torch.bfloat16)


Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a family's model, as transformers saves it. Not to be changed."""
    root = tmp_path_factory.mktemp("saved")

    def save(family: str) -> Path:
        if not (root / family).exists():
            build(family).save_pretrained(root / family)
        return root / family

    return save


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Saved:
    """The same, to be changed."""

    def save(family: str) -> Path:
        return shutil.copytree(saved(family), tmp_path / family)

    return save


@pytest.fixture
def model(copy: Saved) -> Path:
    """An untied model in one file."""
    return copy("qwen2")


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same in three files and an index."""
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    shutil.rmtree(model)
    loaded.save_pretrained(model, max_shard_size="10KB")
    assert len(list(model.glob("*.safetensors"))) == 3
    return model


def edit_weights(directory: Path, edit: Callable[[State], object]) -> None:
    state = load_file(directory / "model.safetensors")
    edit(state)
    save_file(state, directory / "model.safetensors", {"format": "pt"})


def edit_json(path: Path, edit: Callable[[Config], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def rename(state: State, old: str, new: str) -> None:
    """Replace part of all names."""
    for name in list(state):
        state[re.sub(old, new, name)] = state.pop(name)


def found(directory: Path, *expected: str, raw: bool = False) -> None:
    """Compare the findings, in order of their text, with beginnings of them."""
    findings = [f"{f.severity} {f.message}" for f in check_directory(str(directory), raw=raw)]
    match(findings, expected)


def match(findings: list[str], expected: tuple[str, ...]) -> None:
    findings.sort()
    assert all("\n" not in finding for finding in findings)
    assert [f[: len(e)] for f, e in zip(findings, expected, strict=False)] == list(expected)
    assert len(findings) == len(expected), findings[len(expected) :]


# --- good directories -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_wrong_with_what_transformers_saves(saved: Saved, family: str) -> None:
    found(saved(family))
    assert check_model(str(saved(family))) == []


def test_shards(sharded: Path) -> None:
    found(sharded)
    assert check_model(str(sharded)) == []


@pytest.fixture
def with_value_head(model: Path) -> Path:
    """A model in one file with an index, and a value head beside it."""
    state = load_file(model / "model.safetensors")
    total = sum(tensor.nbytes for tensor in state.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(state, "model.safetensors"),
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head = {"v_head.summary.weight": torch.zeros(1, 16)}
    save_file(head, model / "value_head.safetensors", {"format": "pt"})
    return model


def test_a_value_head_beside_an_index(with_value_head: Path) -> None:
    found(with_value_head)
    assert check_model(str(with_value_head)) == []


def test_weights_only(model: Path) -> None:
    (model / "config.json").unlink()
    found(model, "warning no config.json: these are weights only")


# --- files ----------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    found(tmp_path / "none", f"error {tmp_path}/none: No such file or directory")


def test_a_pointer_of_git_lfs(model: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (model / "tokenizer.json").write_bytes(pointer)
    found(model, "error tokenizer.json: a pointer of Git LFS, not the file itself")


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    found(model, "error no model.safetensors and no model.safetensors.index.json")


@pytest.mark.parametrize("nbytes", [0, 5, 200, -1])
def test_a_file_cut_short(model: Path, nbytes: int) -> None:
    cut(model / "model.safetensors", nbytes)
    found(model, "error model.safetensors: ")


def test_a_file_with_bytes_behind(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    found(model, "error model.safetensors: has ")


def test_a_file_that_is_a_directory(model: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
        (model / name).mkdir()
    found(
        model,
        "error config.json: Is a directory",
        "error model.safetensors: Is a directory",
    )


def test_pipes_are_not_waited_for(model: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
    found(
        model, "error config.json is not a JSON file", "error model.safetensors: the file is empty"
    )
    differences(model, "error ")


def test_a_config_beyond_measure(model: Path) -> None:
    os.truncate(model / "config.json", 1 << 40)
    found(model, "error config.json: has 1,099,511,627,776 bytes, too large")


def test_no_format(model: Path) -> None:
    save_file(load_file(model / "model.safetensors"), model / "model.safetensors")
    found(model, "error model.safetensors: __metadata__ says format None")


def second(directory: Path) -> Path:
    return directory / "model-00002-of-00003.safetensors"


def index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def move_in_map(index: Config) -> None:
    index["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"


def drop_from_map(index: Config) -> None:
    del index["weight_map"]["lm_head.weight"]


def add_to_map(index: Config) -> None:
    index["weight_map"]["more.weight"] = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda d: second(d).unlink(),
            "model.safetensors.index.json: 1 files missing that it lists: model-00002-of-00003",
        ),
        (lambda d: cut(second(d), 0), "model-00002-of-00003.safetensors: the file is empty"),
        (
            lambda d: edit_json(index(d), move_in_map),
            "model.safetensors.index.json: 1 tensors not in their file: lm_head.weight",
        ),
        (
            lambda d: edit_json(index(d), drop_from_map),
            "model.safetensors.index.json: lacks 1 tensors: lm_head.weight",
        ),
        (
            lambda d: edit_json(index(d), add_to_map),
            "model.safetensors.index.json: 1 tensors not in their file: more.weight",
        ),
        (
            lambda d: edit_json(index(d), lambda i: i.pop("metadata")),
            "model.safetensors.index.json: has no metadata",
        ),
        (
            lambda d: edit_json(index(d), lambda i: i.update(weight_map={})),
            "model.safetensors.index.json: has no weight_map",
        ),
        (
            lambda d: edit_json(index(d), lambda i: i["weight_map"].update(x="../x")),
            "model.safetensors.index.json: expected names of files, found '../x'",
        ),
        (lambda d: index(d).write_text("{"), "model.safetensors.index.json is not a JSON file"),
        (lambda d: index(d).write_text("[]"), "model.safetensors.index.json holds a JSON list"),
        (
            lambda d: shutil.copy(second(d), d / "model.safetensors"),
            "model.safetensors: stale; loaders take it",
        ),
        (
            lambda d: shutil.copy(second(d), d / "model-00004-of-00004.safetensors"),
            "model-00004-of-00004.safetensors: stale; model.safetensors.index.json does not",
        ),
        (
            lambda d: (d / "pytorch_model.bin").write_bytes(b"x"),
            "pytorch_model.bin: weights beside those in safetensors files",
        ),
        (
            lambda d: (d / "adapter_config.json").write_text("{}"),
            "adapter_config.json: beside the weights of a model",
        ),
    ],
)
def test_shards_that_do_not_fit_the_index(
    sharded: Path, damage: Callable[[Path], object], expected: str
) -> None:
    damage(sharded)
    findings = [f"{f.severity} {f.message}" for f in check_directory(str(sharded), raw=True)]
    expected = f"error {expected}"
    assert any(finding.startswith(expected) for finding in findings), findings
    # A map without its metadata has no total either; all else is one finding.
    others = [f for f in findings if not f.startswith(expected)]
    assert [f for f in others if "total_size is None" not in f] == []


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    state = load_file(second(sharded))
    save_file(
        {"lm_head.weight": torch.zeros(32, 16, dtype=torch.bfloat16), **state},
        second(sharded),
        {"format": "pt"},
    )
    places = json.loads(index(sharded).read_text())["weight_map"]
    if places["lm_head.weight"] != "model-00001-of-00003.safetensors":
        pytest.fail("the head is expected in the first shard")
    found(
        sharded,
        "error model-00002-of-00003.safetensors: tensors that model-00001-of-00003.safetensors has",
        "error model.safetensors.index.json: 1 tensors not in their file: lm_head.weight",
    )


def test_a_wrong_total(sharded: Path) -> None:
    edit_json(index(sharded), lambda i: i["metadata"].update(total_size=5))
    found(sharded, "warning model.safetensors.index.json: total_size is 5, the tensors have ")


def test_other_files_of_tensors(sharded: Path) -> None:
    shutil.copy(second(sharded), sharded / "consolidated.safetensors")
    found(sharded, "warning consolidated.safetensors: model.safetensors.index.json does not list")
    for path in (*sharded.glob("model-*"), index(sharded)):
        path.unlink()
    build("qwen2").save_pretrained(sharded)
    found(sharded, "error consolidated.safetensors: needs model.safetensors.index.json")


def test_a_value_head_without_an_index(with_value_head: Path) -> None:
    index(with_value_head).unlink()
    found(with_value_head, "error value_head.safetensors: needs model.safetensors.index.json")


def test_a_damaged_value_head(with_value_head: Path) -> None:
    cut(with_value_head / "value_head.safetensors", -1)
    found(with_value_head, "error value_head.safetensors: cut short")


# --- config ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda c: c.update(architectures=None),
            "warning config.json: says no architectures",
        ),
        (
            lambda c: c.update(architectures=["FSDPQwen2ForCausalLM"]),
            "warning config.json: architectures should be changed: FSDP is not part",
        ),
        (lambda c: c.pop("dtype"), "warning config.json: says no dtype, bfloat16 is stored"),
        (
            lambda c: c.update(dtype="float32"),
            "warning config.json: dtype is float32, but most of what is stored is bfloat16",
        ),
        (
            lambda c: c.update(torch_dtype="float16"),
            "warning config.json: torch_dtype is float16, but most",
        ),
        (
            lambda c: c.update(text_config={"dtype": "float16"}),
            "warning config.json: text_config.dtype is float16, but most",
        ),
        (
            lambda c: c.update(quantization_config={"quant_method": "fp8"}),
            "error config.json: quantization_config must go: no stored tensor is quantized",
        ),
        (
            lambda c: c.update(quantization_config=None),
            "error config.json: quantization_config must go",
        ),
        (
            lambda c: c.update(auto_map={"AutoModel": "modeling_x.XModel"}),
            "error config.json: auto_map needs modeling_x.py, which is not there",
        ),
        (lambda c: c.update(auto_map={"AutoModel": "ann/repo--modeling_x.XModel"}), None),
        (lambda c: c.update(num_hidden_layers=5), "error model.layers: layer 4 missing"),
        (
            lambda c: c.update(num_hidden_layers=10**12),
            "error model.layers: layer 4, 5, 6 and 999999999993 more missing, config.json says",
        ),
        (lambda c: c.update(num_hidden_layers=3), "error model.layers: has layer 3, but"),
        (lambda c: c.update(num_hidden_layers=3, num_nextn_predict_layers=1), None),
    ],
)
def test_config(model: Path, edit: Callable[[Config], object], expected: str | None) -> None:
    edit_json(model / "config.json", edit)
    found(model, *([] if expected is None else [expected]))


def test_a_vocabulary_that_is_too_large(model: Path) -> None:
    edit_json(model / "config.json", lambda c: c.update(vocab_size=33))
    found(
        model,
        "error lm_head.weight: has 32 rows, config.json says vocab_size 33",
        "error model.embed_tokens.weight: has 32 rows, config.json says vocab_size 33",
    )


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_no_config_in_its_file(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    found(model, "error config.json ")


def test_code_of_tokenizers(model: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    found(model, "error tokenizer_config.json: auto_map needs tokenization_x.py")
    (model / "tokenization_x.py").touch()
    found(model)
    (model / "tokenizer_config.json").write_text("no")
    found(model, "error tokenizer_config.json is not a JSON file")


# --- names and shapes -----------------------------------------------------------------------------


def pop(*names: str) -> Callable[[State], object]:
    return lambda state: [state.pop(name) for name in names]


def put(**shapes: tuple[int, ...]) -> Callable[[State], object]:
    """Add tensors; ``__`` stands for a dot."""
    return lambda state: state.update(
        {n.replace("__", "."): torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    )


def pop_layer(number: int) -> Callable[[State], object]:
    return lambda state: [state.pop(n) for n in list(state) if f"layers.{number}." in n]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (pop_layer(1), "error model.layers: layer 1 missing, config.json says 4 layers"),
        (pop_layer(3), "error model.layers: layer 3 missing, config.json says 4 layers"),
        (
            pop("model.layers.2.mlp.up_proj.weight"),
            "warning model.layers.2: lacks mlp.up_proj.weight, which the other 3 layers have",
        ),
        (pop("lm_head.weight"), "error lm_head.weight is not stored and config.json does not tie"),
        (put(model__embed_tokens__weight=(40, 16)), None),
        (
            put(v_head__summary__weight=(1, 16)),
            "warning a value head is among the weights (v_head.summary.weight)",
        ),
        (
            lambda state: rename(state, r"(layers\.\d\.)", r"\1_orig_mod."),
            "error 48 names have parts of wrappers, which loaders do not know: ",
        ),
        (
            lambda state: rename(state, "^", "base_model.model."),
            "error 51 names have parts of wrappers, which loaders do not know: ",
        ),
        (
            put(model__layers__0__self_attn__q_proj__lora_A__default__weight=(2, 16)),
            "error 1 names are PEFT's, which loaders do not know: ",
        ),
        (
            put(_flat_param=(7,)),
            "error key '_flat_param' is a flat parameter of FSDP1",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(16)}),
            "warning floating-point tensors of several dtypes (",
        ),
    ],
)
def test_names_and_shapes(
    model: Path, damage: Callable[[State], object], expected: str | None
) -> None:
    edit_weights(model, damage)
    found(model, *([] if expected is None else [expected]))
    found(model, raw=True)


def test_a_vocabulary_that_is_too_small(model: Path) -> None:
    more = put(lm_head__weight=(40, 16), model__embed_tokens__weight=(40, 16))
    edit_weights(model, more)
    found(
        model,
        "warning lm_head.weight: has 40 rows, config.json says vocab_size 32; transformers",
        "warning model.embed_tokens.weight: has 40 rows, config.json says vocab_size 32; ",
    )


def test_two_damages_are_two_findings(model: Path) -> None:
    edit_weights(model, pop_layer(1))
    edit_weights(model, pop("model.layers.2.mlp.up_proj.weight"))
    found(
        model,
        "error model.layers: layer 1 missing, config.json says 4 layers",
        "warning model.layers.2: lacks mlp.up_proj.weight, which the other 2 layers have",
    )


def test_names_that_a_model_has_itself(model: Path) -> None:
    """Phi-4-multimodal has adapters for pictures and speech."""
    edit_weights(model, put(model__layers__0__self_attn__q_proj__lora_A__vision__weight=(2, 16)))
    edit_json(model / "config.json", lambda c: c.update(vision_lora={"r": 2}))
    found(model)


def test_half_a_tied_pair(copy: Saved) -> None:
    directory = copy("qwen3")
    edit_weights(directory, lambda state: rename(state, r"model\.embed_tokens", "lm_head"))
    found(directory, "error lm_head.weight: stored without model.embed_tokens.weight; ")


@pytest.mark.parametrize(
    ("family", "damage", "expected"),
    [
        (
            "qwen3_moe",
            lambda state: [state.pop(n) for n in list(state) if "layers.1.mlp.experts.1." in n],
            "error model.layers.1.mlp.experts: expert 1 missing of 3",
        ),
        (
            "qwen3_moe",
            lambda state: [state.pop(n) for n in list(state) if ".experts.2." in n],
            "error model.layers.0.mlp.experts, model.layers.1.mlp.experts, model.layers.2.mlp"
            ".experts and 1 more: holds 2 experts, config.json says 3",
        ),
        (
            "mixtral",
            pop("model.layers.1.block_sparse_moe.experts.1.w2.weight"),
            "error model.layers.1.block_sparse_moe.experts: expert 1 incomplete, 1 lacks w2.weight",
        ),
        (
            "deepseek_v3",
            pop("model.layers.1.mlp.experts.0.up_proj.weight"),
            "error model.layers.1.mlp.experts: expert 0 incomplete, 0 lacks up_proj.weight",
        ),
        (
            "packed",
            put(model__layers__0__mlp__experts__down_proj=(2, 24, 16)),
            "error model.layers.0.mlp.experts.down_proj: holds 2 experts, config.json says 3",
        ),
        (
            "qwen3_moe",
            put(model__layers__0__mlp__experts__down_proj=(3, 16, 8)),
            "warning 1 tensors hold packed experts, as transformers 5 has them in memory",
        ),
        (
            "gemma3",
            lambda state: [state.pop(n) for n in list(state) if "vision" in n and "layers.1." in n],
            "warning vision_tower.encoder.layers: layer 1 missing, up to 2",
        ),
        (
            "encoder_decoder",
            lambda state: [state.pop(n) for n in list(state) if "decoder.layers.2." in n],
            "error model.decoder.layers: layer 2 missing, config.json says 3 layers",
        ),
        (
            "recurrent",
            pop("backbone.layers.1.mixer.A_log"),
            "warning backbone.layers.1: lacks mixer.A_log, which the other 2 layers have",
        ),
    ],
)
def test_other_families(
    copy: Saved, family: str, damage: Callable[[State], object], expected: str
) -> None:
    directory = copy(family)
    edit_weights(directory, damage)
    found(directory, expected)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        # A convolutional encoder: activations are layers without tensors.
        (
            ["encoder.layers.0.conv.weight", "encoder.layers.1.block.weight", "encoder.layers.3.x"],
            {},
        ),
        # More kinds of layers than one can tell a fault from.
        ([f"model.layers.{n}.{'ab'[n % 2]}.weight" for n in range(4)], {"num_hidden_layers": 4}),
        # The first has a norm less, or more.
        ([f"layers.{n}.{w}" for n in range(4) for w in "ab" if (n, w) != (0, "a")], {}),
        ([f"layers.{n}.{w}" for n in range(4) for w in "ab" if n == 0 or w == "a"], {}),
        # A number that is no layer's.
        (["model.layers.weight", "model.layers", "0.weight", "x.7"], {"num_hidden_layers": 1}),
        # Two stacks, neither beside an embedding: whose number is it?
        (["a.layers.0.x", "b.layers.0.x"], {"num_hidden_layers": 2}),
        (["model.layers.0.x"], {"num_hidden_layers": "many"}),
        (["model.layers.0.x"], {"num_hidden_layers": 2, "layer_types": ["attention", "mlp"]}),
    ],
)
def test_layers_that_are_not_understood(names: list[str], config: Config) -> None:
    assert list(check_layers(names, config)) == []


@given(count=st.integers(4, 8), data=st.data())
def test_whatever_is_gone_from_layers_is_found(count: int, data: st.DataObject) -> None:
    tensors = ["norm.weight", "attn.q.weight", "attn.q.bias", "mlp.0.weight"]
    names = [f"transformer.h.{layer}.{tensor}" for layer in range(count) for tensor in tensors]
    config: Config = {"n_layer": count}
    assert list(check_layers(names, config)) == []

    layer = data.draw(st.integers(0, count - 1))
    rest = [name for name in names if not name.startswith(f"transformer.h.{layer}.")]
    (finding,) = check_layers(rest, config)
    assert finding.severity == "error"
    assert finding.message.startswith(f"transformer.h: layer {layer} missing")

    layer = data.draw(st.integers(1, count - 1))
    gone = data.draw(st.sets(st.sampled_from(tensors), min_size=1, max_size=3))
    rest = [name for name in names if name not in {f"transformer.h.{layer}.{g}" for g in gone}]
    (finding,) = check_layers(rest, config)
    assert finding.severity == "warning"
    assert all(tensor in finding.message for tensor in gone)
    assert f"transformer.h.{layer}: lacks" in finding.message


def test_layers_and_experts_beyond_measure() -> None:
    names = [f"layers.{number}.norm.weight" for number in (0, 999_999_999, "9" * 5000)]
    (finding,) = check_layers(names, {})
    assert finding.message == ("layers: layer 1, 2, 3 and 999999995 more missing, up to 999999999")
    experts = {f"mlp.experts.{n}.w.weight": Weight("F32", (2,)) for n in (1, 999_999_999)}
    (finding,) = check_experts(experts, {})
    assert finding.message == (
        "mlp.experts: expert 0, 2, 3 and 999999995 more missing of 1000000000"
    )


_keys = st.sampled_from(
    [
        "architectures",
        "dtype",
        "is_encoder_decoder",
        "model_type",
        "num_experts",
        "num_hidden_layers",
        "quantization_config",
        "text_config",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    ]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["bfloat16", "llama", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=8,
)
_parts = st.sampled_from(["model", "layers", "0", "1", "experts", "lm_head", "embed_tokens", "h"])
_weights = st.builds(
    Weight,
    st.sampled_from(["BF16", "F32", "I64", "U8", "F8_E4M3"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
_names = st.lists(_parts, min_size=1, max_size=5).map(".".join)


@settings(max_examples=200)
@given(
    config=st.dictionaries(_keys, _json),
    tensors=st.dictionaries(_names | _names.map("{}.weight".format), _weights, max_size=6),
)
def test_no_config_and_no_names_are_too_odd(config: Config, tensors: dict[str, Weight]) -> None:
    for finding in check_consistency(tensors, config):
        assert isinstance(finding, Finding)
        assert "\n" not in finding.message


def test_quantized_weights(model: Path) -> None:
    def quantize(state: State) -> None:
        for name in [n for n in state if n.endswith("proj.weight")]:
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.ones(1, 1)

    edit_weights(model, quantize)
    edit_json(
        model / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})
    )
    found(model)
    assert [f.message for f in check_model(str(model))] == [
        "not compared with the model: the model is quantized"
    ]


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft_adapter(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Path:
    """An adapter as PEFT saves it. Not to be changed."""
    folder = tmp_path_factory.mktemp("adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    targets = ["q_proj", "down_proj", "embed_tokens"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.fixture
def adapter(peft_adapter: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(peft_adapter, tmp_path / "adapter")


def edit_adapter(directory: Path, edit: Callable[[State], object]) -> None:
    path = directory / "adapter_model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path, {"format": "pt"})


def test_an_adapter_alone(peft_adapter: Path) -> None:
    found(peft_adapter)


def test_an_adapter_beside_a_model(model: Path, adapter: Path) -> None:
    shutil.copytree(adapter, model / "lora_adapter")
    found(model)
    (model / "lora_adapter" / "adapter_model.safetensors").unlink()
    found(model, "error lora_adapter/adapter_model.safetensors: No such file or directory")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c.pop("peft_type"), "error adapter_config.json: lacks peft_type"),
        (lambda c: c.pop("r"), "error adapter_config.json: lacks r"),
        (lambda c: c.pop("lora_alpha"), "error adapter_config.json: lacks lora_alpha"),
        (lambda c: c.update(lora_alpha=0), "error adapter_config.json: lacks lora_alpha"),
        (lambda c: c.update(target_modules=[]), "error adapter_config.json: lacks target_modules"),
        (lambda c: c.update(peft_type="IA3"), "error adapter_config.json: "),
        (
            lambda c: c.pop("base_model_name_or_path"),
            "warning adapter_config.json: says no base_model_name_or_path",
        ),
        (
            lambda c: c.update(target_modules=["q_proj"]),
            "error adapter_model.safetensors: PEFT drops what target_modules does not name: "
            "model.embed_tokens, model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj and 2",
        ),
        (lambda c: c.update(target_modules=".*(q_proj|down_proj|embed_tokens)"), None),
        (lambda c: c.update(target_modules="all-linear"), None),
        (
            lambda c: c.update(r=3),
            "error adapter_model.safetensors: model.embed_tokens: lora_embedding_A is [2, 32], but",
        ),
        (lambda c: c.update(r=3, rank_pattern={"q_proj|down_proj|embed_tokens": 2}), None),
        (lambda c: c.update(target_modules="(?i).*(q_proj|down_proj|embed_tokens)"), None),
        (
            lambda c: c.update(target_modules="(q_proj"),
            "error adapter_config.json: target_modules is '(q_proj', not a regular expression",
        ),
    ],
)
def test_adapter_config(
    adapter: Path, edit: Callable[[Config], object], expected: str | None
) -> None:
    edit_json(adapter / "adapter_config.json", edit)
    found(adapter, *([] if expected is None else [expected]))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda state: [state.pop(n) for n in list(state) if "0.self_attn.q_proj.lora_B" in n],
            "error adapter_model.safetensors: lora_A without lora_B, or the other way round: "
            "model.layers.0.self_attn.q_proj",
        ),
        (
            lambda state: [state.pop(n) for n in list(state) if "lora_embedding_A" in n],
            "error adapter_model.safetensors: lora_embedding_A without lora_embedding_B",
        ),
        (
            lambda state: rename(state, r"^base_model\.model\.", ""),
            "error adapter_model.safetensors: PEFT ignores tensors without the prefix",
        ),
        (
            lambda state: rename(state, r"(lora_[AB])\.", r"\1.default."),
            "warning adapter_model.safetensors: names still have the name of the adapter",
        ),
        (
            lambda state: (
                [state.pop(n) for n in list(state) if "embed_tokens" not in n]
                and rename(state, "lora_embedding_", "embedding_")
            ),
            "error adapter_model.safetensors: holds no LoRA weights",
        ),
    ],
)
def test_adapter_weights(adapter: Path, edit: Callable[[State], object], expected: str) -> None:
    edit_adapter(adapter, edit)
    found(adapter, expected)


# --- the model itself -----------------------------------------------------------------------------

VERSION = f"transformers {transformers.__version__}"


def differences(directory: Path, *expected: str) -> None:
    match([f"{f.severity} {f.message}" for f in check_model(str(directory))], expected)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            pop("model.layers.1.mlp.up_proj.weight"),
            ["error {}: 1 tensors missing, random if loaded: model.layers.1.mlp.up_proj.weight"],
        ),
        (pop("lm_head.weight"), ["error {}: 1 tensors missing, random if loaded: lm_head.weight"]),
        (
            put(model__layers__1__mlp__up_proj__bias=(24,)),
            ["warning {}: has no such 1 tensors, ignores them (vLLM may not): model.layers.1.mlp"],
        ),
        (
            put(v_head__summary__weight=(1, 16), v_head__summary__bias=(1,)),
            ["warning {}: has no such 2 tensors, ignores them (vLLM may not): v_head.summary.bias"],
        ),
        (
            put(model__norm__weight=(17,), model__layers__0__mlp__up_proj__weight=(16, 24)),
            ["error {}: 2 of other shapes: model.layers.0.mlp.up_proj.weight is [16, 24]"],
        ),
        (
            lambda state: rename(state, r"(layers\.\d\.)", r"\1_orig_mod."),
            [
                "error {}: 48 tensors missing, random if loaded: model.layers.0.input_layernorm",
                "warning {}: has no such 48 tensors, ignores them (vLLM may not): model.layers.0._",
            ],
        ),
    ],
)
def test_differences_from_the_model(
    model: Path, damage: Callable[[State], object], expected: list[str]
) -> None:
    edit_weights(model, damage)
    differences(model, *[e.format(f"{VERSION}, Qwen2ForCausalLM") for e in expected])


def test_experts_that_cannot_be_packed(copy: Saved) -> None:
    directory = copy("mixtral")
    edit_weights(directory, pop("model.layers.1.block_sparse_moe.experts.1.w2.weight"))
    (finding,) = check_model(str(directory))
    assert (finding.severity, finding.message.startswith(VERSION)) == ("error", True)


def test_damaged_files_are_findings(model: Path) -> None:
    cut(model / "model.safetensors", -1)
    differences(model, f"error {model}/model.safetensors: cut short")
    (model / "model.safetensors").unlink()
    differences(model, f"error {model}: no weights here")
    (model / "config.json").write_text("[]")
    differences(model, f"error {model}/config.json holds a JSON list")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c.update(architectures=[]), "config.json says no architecture"),
        (
            lambda c: c.update(architectures=["NoSuchModel"]),
            f"{VERSION} has no NoSuchModel",
        ),
        (
            lambda c: c.update(
                architectures=["OwnModel"], auto_map={"AutoModelForCausalLM": "own.OwnModel"}
            ),
            f"{VERSION} has no OwnModel outside its own code, which is not run",
        ),
        (lambda c: c.update(quantization_config={}), "the model is quantized"),
    ],
)
def test_not_compared(model: Path, edit: Callable[[Config], object], expected: str) -> None:
    (model / "own.py").write_text("raise SystemExit('code of the directory was run')")
    edit_json(model / "config.json", edit)
    differences(model, f"warning not compared with the model: {expected}")


def test_a_config_that_needs_its_own_code(model: Path) -> None:
    (model / "own.py").write_text("raise SystemExit('code of the directory was run')")
    edit_json(
        model / "config.json",
        lambda c: c.update(model_type="own", auto_map={"AutoConfig": "own.OwnConfig"}),
    )
    differences(model, f"error config.json: {VERSION} cannot read it: ValueError: ")


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    differences(model, "warning not compared with the model: no config.json")


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_without_a_library(saved: Saved, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == library else find(name)
    )
    differences(saved("qwen2"), f"warning not compared with the model: {library} is not installed")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_it_is_quiet_and_leaves_no_traces(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_weights(model, lambda state: rename(state, "mlp", "_orig_mod.mlp"))
    log = transformers.utils.logging
    before = (log.get_verbosity(), log.is_progress_bar_enabled(), sorted(model.iterdir()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "0")
        assert len(check_model(str(model))) == 2
    assert capfd.readouterr() == ("", "")
    assert (log.get_verbosity(), log.is_progress_bar_enabled(), sorted(model.iterdir())) == before
    assert before[0] == logging.WARNING
