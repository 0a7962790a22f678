"""Names in files: against what transformers itself writes and reads."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_same_tensors
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from streammerge.changes import Change
from streammerge.checkpoint import Extents, PlainLayout, Tensor
from streammerge.errors import UnsupportedError, UsageError
from streammerge.hub_names import EXPERTS, check_expert_counts, expand_experts, match_base
from streammerge.values import Cast, Fold, Stored, Value

pytest.importorskip("transformers", "5.24", reason="its names are the reference")
revert = pytest.importorskip("transformers.core_model_loading").revert_weight_conversion

State = dict[str, torch.Tensor]

# --- tiny models ----------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Every family takes from these what it knows. Three experts, so that an even number is no help.
MOE = {
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 3,
    "moe_num_experts": 3,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 24,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

SPECIAL: dict[str, dict[str, Any]] = {
    "beam": {"num_hidden_layers": 4},
    "flint": {"num_hidden_layers": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "jamba": {"mamba_dt_rank": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {"layer_types": ["full_attention"] * 2},
    "nemotron_h": {"mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 4},
}


def _vlm(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": TEXT | text, "vision_config": vision}


VLMS: dict[str, dict[str, Any]] = {
    "gemma3": _vlm({"model_type": "gemma3_text"}, VISION | {"model_type": "siglip_vision_model"})
    | {"mm_tokens_per_image": 4},
    "internvl": _vlm(
        {"model_type": "qwen3"},
        VISION | {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
    ),
    "llava": _vlm({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "mistral3": _vlm({"model_type": "mistral"}, VISION | {"model_type": "pixtral", "head_dim": 8}),
    "paligemma": _vlm({"model_type": "gemma"}, VISION | {"model_type": "siglip_vision_model"}),
    "qwen2_vl": _vlm({"rope_parameters": ROPE}, QWEN_VISION),
    "qwen2_5_vl": _vlm({"rope_parameters": ROPE}, QWEN_VISION),
    "qwen3_vl": _vlm({}, QWEN_VISION),
    "qwen3_vl_moe": _vlm(MOE, QWEN_VISION),
    "glm4v_moe": _vlm(MOE | {"rope_parameters": ROPE}, QWEN_VISION),
    "aria": _vlm(MOE | {"model_type": "aria_text"}, VISION | {"model_type": "idefics3_vision"}),
}
# InternVL 3.5 A3B: experts in the text model, under a type of another family.
INTERNVL_MOE = _vlm(MOE | {"model_type": "qwen3_moe"}, VLMS["internvl"]["vision_config"])

DENSE = ("llama", "qwen2", "qwen3")
PACKED_IN_FILES = ("gpt_oss", "llama4_text")
OMNI = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")  # too large for these tests, see `omni`


def tiny(model_type: str, options: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    if options is None:
        options = VLMS.get(model_type) or TEXT | MOE | SPECIAL.get(model_type, {})
    config = transformers.CONFIG_MAPPING[model_type](**options)
    classes = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if "text_config" in options
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return getattr(transformers, classes[model_type])._from_config(config)


def omni(model_type: str) -> transformers.PreTrainedModel:
    """A model on the meta device, with two layers of text."""
    config = transformers.CONFIG_MAPPING[model_type]()
    thinker = getattr(config, "thinker_config", config)
    thinker.text_config.num_hidden_layers = 2
    config.enable_audio_output = False
    (name,) = (
        name
        for name in ("Qwen3OmniMoe", "Qwen3OmniMoeThinker")
        if getattr(transformers, f"{name}ForConditionalGeneration").config_class is type(config)
    )
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config)


def stored(name: str, shape: tuple[int, ...], dtype: str = "F32") -> Stored:
    """A whole tensor of a checkpoint."""
    return Stored(Tensor(name, dtype, shape, PlainLayout((0,)), Extents()))


def checkpoint(state: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    """What the checkpoint of a model holds."""
    return {name: stored(name, tuple(tensor.shape)) for name, tensor in state.items()}


def header(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a base model's files say of their tensors."""
    return {name: ("BF16", tuple(tensor.shape)) for name, tensor in state.items()}


def evaluated(values: Mapping[str, Value], state: State) -> State:
    """The values, by torch: indices, then rows, then the last two dims."""
    result = {}
    for name, value in values.items():
        assert isinstance(value, Stored)
        tensor = state[value.tensor.name][value.index]
        if value.rows is not None:
            first, count = value.rows
            tensor = tensor[first : first + count]
        result[name] = tensor.mT if value.swapped else tensor
        assert result[name].shape == value.shape
    return result


def assert_loads(model: transformers.PreTrainedModel, files: State, folder: Path) -> None:
    """A folder with these tensors opens as the model, with nothing missing or left over."""
    model.config.save_pretrained(folder)
    tensors = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in files.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert {key: found for key, found in report.items() if found} == {}
    assert_same_tensors(loaded.state_dict(), model.state_dict())


def assert_same_shapes(values: Mapping[str, Value], expected: State) -> None:
    """The values have the names and shapes of the expected tensors."""
    assert {n: v.shape for n, v in values.items()} == {
        n: tuple(t.shape) for n, t in expected.items()
    }


# --- experts, without a base model ----------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(EXPERTS.keys() - VLMS.keys() - set(OMNI)))
def test_files_hold_what_transformers_saves_and_loads(model_type, tmp_path):
    model = tiny(model_type)
    state = model.state_dict()
    result = expand_experts(checkpoint(state), model.config.to_dict())
    files = evaluated(result.values, state)
    assert_same_tensors(files, revert(model, state))
    assert files.keys() != state.keys()
    assert result.warnings == ()
    assert_loads(model, files, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("internvl", INTERNVL_MOE), ("aria", None), ("glm4v_moe", None)],
)
def test_experts_of_vision_language_models(model_type, options, tmp_path):
    model = tiny(model_type, options)
    state = model.state_dict()
    result = expand_experts(checkpoint(state), model.config.to_dict())
    experts = {name for name in revert(model, state) if ".experts." in name}
    assert {name.split(".layers.")[-1] for name in experts} == {
        name.split(".layers.")[-1] for name in result.values if ".experts." in name
    }
    assert_loads(model, evaluated(result.values, state), tmp_path)


def test_only_the_names_of_a_whole_nemotron_h_begin_with_backbone():
    name = "model.language_model.layers.0.mixer.experts.up_proj"
    config = {"model_type": "nemotron_h_omni", "text_config": {"model_type": "nemotron_h"}}
    result = expand_experts({name: stored(name, (2, 4, 3))}, config)
    assert list(result.values) == [
        f"model.language_model.layers.0.mixer.experts.{i}.up_proj.weight" for i in range(2)
    ]


@pytest.mark.parametrize("model_type", [*DENSE, *PACKED_IN_FILES, "qwen3_vl"])
def test_other_models_keep_their_names(model_type):
    model = tiny(model_type)
    values = checkpoint(model.state_dict())
    result = expand_experts(values, model.config.to_dict())
    assert list(result.values.items()) == list(values.items())
    assert (result.changes, result.warnings) == ((), ())


@pytest.mark.parametrize("model_type", [*DENSE, *VLMS])
def test_vision_language_models_keep_their_names_with_a_warning(model_type):
    model = tiny(model_type)
    state = model.state_dict()
    warnings = expand_experts(checkpoint(state), model.config.to_dict()).warnings
    saved = {name for name in revert(model, state) if ".experts." not in name}
    warned = [line for line in warnings if line.startswith("the tensors are named as transformers")]
    assert len(warned) == (not saved <= state.keys())
    files = expand_experts(checkpoint(revert(model, state)), model.config.to_dict())
    assert not [line for line in files.warnings if line in warned]


def test_a_type_that_is_no_name_is_an_unknown_one():
    values = checkpoint({"model.language_model.norm.weight": torch.ones(2)})
    assert expand_experts(values, {"model_type": ["qwen2_vl"]}).warnings == ()


def test_models_that_transformers_4_saved_keep_their_names():
    model = tiny("mixtral")
    values = checkpoint(revert(model, model.state_dict()))
    result = expand_experts(values, model.config.to_dict())
    assert list(result.values.items()) == list(values.items())
    assert (result.changes, result.warnings) == ((), ())


def test_experts_stand_where_the_packed_tensor_was_in_the_order_of_transformers():
    model = tiny("qwen3_moe")
    state = model.state_dict()
    names = list(expand_experts(checkpoint(state), model.config.to_dict()).values)
    saved = list(revert(model, state))
    layer = "model.layers.1.mlp.experts"
    downs = [name for name in saved if name.startswith(layer) and "down_proj" in name]
    gates_and_ups = [n for n in saved if n.startswith(layer) and "down_proj" not in n]
    first = names.index(gates_and_ups[0])
    assert names[first : first + 9] == gates_and_ups + downs
    assert names[first - 1] == "model.layers.1.self_attn.k_norm.weight"
    assert names[first + 9] == "model.layers.1.mlp.gate.weight"


def test_the_stored_mixtral_checkpoint():
    folder = DATA / "fsdp2_moe__t213"
    state = load_file(folder / "expected.safetensors")
    config = json.loads((folder / "huggingface" / "config.json").read_text())
    result = expand_experts(checkpoint(state), config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder / "huggingface")
        )
    assert_same_tensors(evaluated(result.values, state), revert(model, state))
    layer, reason = "model.layers.0", "as files of mixtral models have it"
    experts = f"{layer}.block_sparse_moe.experts.*"
    assert {change for change in result.changes if change.name.startswith(layer)} == {
        Change(
            "renamed", f"{layer}.mlp.gate.weight", f"{layer}.block_sparse_moe.gate.weight", reason
        ),
        Change(
            "expanded",
            f"{layer}.mlp.experts.gate_up_proj",
            f"{experts}.w1.weight, {experts}.w3.weight",
            reason,
        ),
        Change("expanded", f"{layer}.mlp.experts.down_proj", f"{experts}.w2.weight", reason),
    }
    assert len(result.changes) == 2 * 3


sizes = st.integers(1, 5)


@settings(derandomize=True, deadline=None, database=None)
@given(experts=sizes, rows=sizes, columns=sizes, form=st.sampled_from(["qwen3_moe", "mixtral"]))
def test_parts_tile_the_packed_tensor(experts, rows, columns, form):
    shape = (experts, 2 * rows, columns)
    packed = torch.arange(math.prod(shape)).reshape(shape)
    state = {"model.layers.0.mlp.experts.gate_up_proj": packed}
    result = expand_experts(checkpoint(state), {"model_type": form})
    parts = evaluated(result.values, state)
    assert len(parts) == 2 * experts
    assert {part.shape for part in parts.values()} == {(rows, columns)}
    every = torch.cat([part.flatten() for part in parts.values()])
    assert sorted(every.tolist()) == packed.flatten().tolist()


def test_parts_of_casts_and_folds():
    config = {"model_type": "qwen3_moe"}
    base = stored("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 4))
    a, b = stored("a", (2 * 3, 4)).tensor, stored("b", (6, 2 * 3)).tensor
    fold = Fold(base, a, b, scale=0.5, kind="linear", dtype="BF16", experts=2)
    for value in (fold, Cast(base, "BF16")):
        parts = expand_experts({base.tensor.name: value}, config).values
        up = parts["model.layers.0.mlp.experts.1.up_proj.weight"]
        part = Stored(base.tensor, index=(1,), rows=(3, 3))
        field = "base" if isinstance(value, Fold) else "value"
        assert up == dataclasses.replace(value, **{field: part})
        assert (up.shape, up.dtype) == ((3, 4), "BF16")


# --- refused, and warned of -----------------------------------------------------------------------

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 7, 5), f"{GATE_UP}: 7 rows per expert, expected an even number: those of gate and up"),
        ((8, 5), f"{GATE_UP}: shape [8, 5], expected [experts, rows, columns]"),
    ],
)
def test_packed_tensors_that_are_no_experts(shape, message):
    with pytest.raises(UnsupportedError) as caught:
        expand_experts({GATE_UP: stored(GATE_UP, shape)}, {"model_type": "qwen3_moe"})
    assert str(caught.value) == message


def test_two_tensors_of_one_name():
    single = "model.layers.0.mlp.experts.1.gate_proj.weight"
    values = {single: stored(single, (3, 5)), GATE_UP: stored(GATE_UP, (4, 6, 5))}
    with pytest.raises(UnsupportedError, match=f"{GATE_UP}: another tensor gets the name"):
        expand_experts(values, {"model_type": "qwen3_moe"})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, "num_experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "n_routed_experts"),
        ({"model_type": "gpt_oss", "num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 8}}, "num_experts"),
    ],
)
def test_the_experts_of_one_rank_only(config, key):
    """USERS: only rank 0's experts were saved."""
    packed = {GATE_UP: stored(GATE_UP, (2, 6, 4))}
    with pytest.raises(UnsupportedError) as caught:
        expand_experts(packed, config)
    assert str(caught.value) == f"{GATE_UP}: 2 experts, expected 8 ({key}) as in config.json"
    assert caught.value.hint is not None
    with pytest.raises(UnsupportedError, match="2 experts, expected 8"):
        match_base(packed, {GATE_UP: ("BF16", (8, 6, 4))}, config)
    check_expert_counts({GATE_UP: stored(GATE_UP, (8, 6, 4))}, config)


def test_single_experts_of_one_rank_only():
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(2)]
    values = {name: stored(name, (3, 4)) for name in names}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts: 2 experts, expected 8"):
        expand_experts(values, {"model_type": "qwen3_moe", "num_experts": 8})
    check_expert_counts(values, {"model_type": "qwen3_moe", "num_experts": 2})


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"model_type": "qwen3_moe"},
        {"model_type": "qwen3_moe", "num_experts": None},
        {"model_type": "unheard_of", "num_experts": 8},
        # Both keys, by transformers 5 and by hand: either is right.
        {"model_type": "qwen3_moe", "num_experts": 128, "num_local_experts": 2},
    ],
)
def test_experts_that_no_config_counts(config):
    check_expert_counts({GATE_UP: stored(GATE_UP, (2, 6, 4))}, config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "without config.json it is not known"),
        ({"model_type": "unheard_of"}, "model type 'unheard_of' is not known"),
        ({"model_type": "longcat_flash", "n_routed_experts": 2}, "'longcat_flash' is not known"),
    ],
)
def test_packed_experts_of_unknown_models_are_left_with_a_warning(config, said):
    values: dict[str, Value] = {GATE_UP: stored(GATE_UP, (3, 6, 4))}
    result = expand_experts(values, config)
    assert result.values == values
    (warning,) = result.warnings
    assert said in warning
    assert "--names-from" in warning


def test_transposed_experts_are_left_with_a_warning():
    model = tiny("qwen3_vl_moe")
    state = model.state_dict()
    values = checkpoint(state)
    result = expand_experts(values, model.config.to_dict())
    assert result.values == values
    (warning,) = result.warnings
    assert "transposed" in warning
    assert "--names-from" in warning


def test_experts_that_are_already_as_in_files_need_no_warning():
    """As transformers 4.57 has qwen3_vl_moe in memory."""
    model = tiny("qwen3_vl_moe")
    result = expand_experts(checkpoint(_transposed(model.state_dict())), model.config.to_dict())
    assert (result.changes, result.warnings) == ((), ())


def _transposed(state: Mapping[str, torch.Tensor]) -> State:
    """The experts as files of qwen3_vl_moe have them."""
    return {
        name: tensor.mT.contiguous() if "mlp.experts." in name else tensor
        for name, tensor in state.items()
    }


# --- names of a base model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type",
    [*DENSE, *PACKED_IN_FILES, *VLMS, *sorted(EXPERTS.keys() - VLMS.keys() - set(OMNI))],
)
def test_names_of_what_transformers_saves(model_type):
    model = tiny(model_type)
    state = model.state_dict()
    saved = revert(model, state)
    result = match_base(checkpoint(state), header(saved), model.config.to_dict())
    assert_same_tensors(evaluated(result.values, state), saved)
    assert result.warnings == ()
    assert (result.changes == ()) == (list(result.values) == list(state))
    for same in (saved, state):  # as transformers 4 has it in memory; a base model saved raw
        values = checkpoint(same)
        result = match_base(values, header(same), model.config.to_dict())
        assert (result.values, result.changes) == (values, ())


@pytest.mark.parametrize("model_type", OMNI)
def test_names_of_omni_models(model_type):
    model = omni(model_type)
    state = model.state_dict()
    saved = revert(model, state)
    assert any(".experts.127." in name for name in saved)
    result = match_base(checkpoint(state), header(saved), model.config.to_dict())
    assert_same_shapes(result.values, saved)


def test_no_config_is_needed():
    model = tiny("phimoe")
    state = model.state_dict()
    saved = revert(model, state)
    assert_same_tensors(
        evaluated(match_base(checkpoint(state), header(saved), None).values, state), saved
    )


def _with_tower_level(state: State) -> State:
    """The names of CLIP and SigLIP towers on the hub; transformers 5 saves them without a level."""
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in state.items()
    }


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "paligemma"])
def test_towers_as_on_the_hub(model_type, tmp_path):
    model = tiny(model_type)
    state = model.state_dict()
    saved = revert(model, state)
    hub = _with_tower_level(saved)
    assert any("language_model.model.layers" in name for name in hub)
    files = evaluated(match_base(checkpoint(state), header(hub), None).values, state)
    assert_same_tensors(files, hub)
    assert_loads(model, files, tmp_path)
    # transformers 4.57 has the level in memory, too.
    memory = _with_tower_level(state)
    assert set(match_base(checkpoint(memory), header(hub), None).values) == set(hub)
    assert set(match_base(checkpoint(memory), header(saved), None).values) == set(saved)


def test_experts_and_names_of_vision_language_models_together():
    model = tiny("internvl", INTERNVL_MOE)
    state = model.state_dict()
    saved = revert(model, state)
    assert "language_model.model.layers.0.mlp.experts.2.up_proj.weight" in saved
    result = match_base(checkpoint(state), header(saved), model.config.to_dict())
    assert_same_tensors(evaluated(result.values, state), saved)
    assert {change.reason for change in result.changes} == {"as in the base model"}


# --- transposed experts ---------------------------------------------------------------------------

LAYER = "model.language_model.layers.0.mlp.experts"


def test_experts_are_transposed_as_the_base_model_has_them(tmp_path):
    model = tiny("qwen3_vl_moe")
    state = model.state_dict()
    base = _transposed(state)
    result = match_base(checkpoint(state), header(base), model.config.to_dict())
    files = evaluated(result.values, state)
    assert_same_tensors(files, base)
    assert [change.kind for change in result.changes] == ["transposed"] * 4
    assert_loads(model, files, tmp_path)


def _square() -> transformers.PreTrainedModel:
    """2 * intermediate == hidden: gate_up_proj [3, 16, 16], down_proj [3, 16, 8]."""
    return tiny("qwen3_vl_moe", _vlm(MOE | {"moe_intermediate_size": 8}, QWEN_VISION))


def test_square_experts_are_not_guessed():
    state = _square().state_dict()
    base = _transposed(state)
    with pytest.raises(UnsupportedError) as caught:
        match_base(checkpoint(state), header(base), None)
    assert str(caught.value).startswith(f"{LAYER}.gate_up_proj: shape [3, 16, 16]")
    assert "--transpose-experts" in str(caught.value.hint)
    told = match_base(checkpoint(state), header(base), None, transpose=True)
    assert_same_tensors(evaluated(told.values, state), base)
    told = match_base(checkpoint(state), header(base), None, transpose=False)
    kept = base | {n: t for n, t in state.items() if n.endswith("gate_up_proj")}
    assert_same_tensors(evaluated(told.values, state), kept)


def test_square_experts_of_a_base_model_like_the_checkpoint():
    state = _square().state_dict()
    values = checkpoint(state)
    for transpose in (None, False):
        assert match_base(values, header(state), None, transpose=transpose).values == values
    with pytest.raises(UsageError, match=r"down_proj has shape \[3, 16, 8\] in the base model as"):
        match_base(values, header(state), None, transpose=True)


def test_gpt_oss_is_square_and_never_transposed():
    model = tiny("gpt_oss", TEXT | MOE | {"intermediate_size": 16})
    values = checkpoint(model.state_dict())
    assert values["model.layers.0.mlp.experts.down_proj"].shape == (3, 16, 16)
    assert match_base(values, header(model.state_dict()), model.config.to_dict()).values == values


def test_folded_experts_are_transposed():
    base = stored(f"{LAYER}.down_proj", (2, 4, 3))
    a, b = stored("a", (2 * 3, 3)).tensor, stored("b", (4, 2 * 3)).tensor
    fold = Fold(base, a, b, scale=0.5, kind="linear", dtype="F32", experts=2)
    result = match_base({base.tensor.name: fold}, {base.tensor.name: ("F32", (2, 3, 4))}, None)
    swapped = Stored(base.tensor, swapped=True)
    assert result.values == {base.tensor.name: dataclasses.replace(fold, base=swapped)}


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.conv1d.weight"])
def test_only_experts_are_transposed(name):
    with pytest.raises(UnsupportedError, match=r"weight \[3, 4, 6\] instead of \[3, 6, 4\]"):
        match_base({name: stored(name, (3, 4, 6))}, {name: ("F32", (3, 6, 4))}, None)


# --- what may differ from the base model ----------------------------------------------------------


@pytest.fixture(scope="module")
def llava() -> tuple[State, State]:
    model = tiny("llava")
    return model.state_dict(), revert(model, model.state_dict())


def _without(state: State, name: str) -> State:
    assert name in state
    return {key: tensor for key, tensor in state.items() if key != name}


def test_either_may_lack_the_head(llava):
    state, saved = llava
    head = "language_model.lm_head.weight"
    result = match_base(checkpoint(state), header(_without(saved, head)), None)
    assert set(result.values) == set(saved)
    result = match_base(checkpoint(_without(state, "lm_head.weight")), header(saved), None)
    assert set(result.values) == set(saved) - {head}


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_critic_takes_the_names_of_the_language_model_it_was_made_of(kind):
    base = tiny("qwen3_moe")
    critic = getattr(transformers, f"Qwen3MoeFor{kind}")._from_config(base.config)
    state, saved = critic.state_dict(), revert(base, base.state_dict())
    result = match_base(checkpoint(state), header(saved), base.config.to_dict())
    files = evaluated(result.values, state)
    assert_same_tensors(files, revert(critic, state))
    assert {"score.weight"} <= set(files) - set(saved)


def test_a_language_model_does_not_take_the_names_of_a_classifier():
    base = transformers.Qwen3ForSequenceClassification._from_config(tiny("qwen3").config)
    values = checkpoint(tiny("qwen3").state_dict())
    with pytest.raises(UnsupportedError, match=r"1 are missing \(score\.weight\)"):
        match_base(values, header(base.state_dict()), None)


def test_layers_for_multi_token_prediction_may_be_missing():
    """DeepSeek-V3 has one, layer 61 of 61, and transformers does not load it."""
    model = tiny("deepseek_v3")
    state = model.state_dict()
    saved = revert(model, state)
    vector = torch.zeros(16)
    extra = {"model.layers.2.enorm.weight": vector, "model.layers.2.eh_proj.weight": vector}
    extra["mtp.fc.weight"] = vector
    result = match_base(checkpoint(state), header(saved | extra), model.config.to_dict())
    assert_same_tensors(evaluated(result.values, state), saved)
    (warning,) = result.warnings
    assert warning.startswith("3 tensors of the base model that transformers does not load")
    assert "model.layers.2.eh_proj.weight" in warning
    with pytest.raises(UnsupportedError, match="2 are missing"):  # the config could say three
        match_base(checkpoint(state), header(saved | extra), None)


def test_buffers_of_old_models_may_be_missing():
    state = tiny("llama").state_dict()
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    assert len(match_base(checkpoint(state), header(state | buffers), None).warnings) == 1
    result = match_base(checkpoint(state | buffers), header(state), None)
    assert set(result.values) == set(state | buffers)


def test_scales_of_float8_weights_are_missing_in_another_dtype():
    name = "model.layers.0.mlp.up_proj.weight"
    base = {name: ("F8_E4M3", (256, 256)), f"{name}_scale_inv": ("F32", (2, 2))}
    result = match_base({name: stored(name, (256, 256), "BF16")}, base, None)
    assert (set(result.values), result.warnings) == ({name}, ())
    with pytest.raises(UnsupportedError, match="1 are missing"):
        match_base({name: stored(name, (256, 256), "F8_E4M3")}, base, None)


def test_another_base_model_is_refused_with_what_differs(llava):
    state, saved = llava
    norm, bias = "language_model.model.norm.weight", "multi_modal_projector.linear_1.bias"
    base = header(_without(saved, norm)) | {"model.left": ("F32", (1,)), bias: ("F32", (5,))}
    with pytest.raises(UnsupportedError) as caught:
        match_base(checkpoint(state), base, None)
    assert str(caught.value) == (
        "the tensors are not those of the base model under any known naming; closest, with names "
        "as llava has them: of 64, 1 are missing (model.left); "
        f"1 are not in the base model ({norm}); "
        f"1 have another shape ({bias} [16] instead of [5])"
    )
    assert caught.value.hint is not None


def test_a_larger_model_of_the_family_is_refused():
    model, larger = tiny("qwen3_moe"), tiny("qwen3_moe", TEXT | MOE | {"num_local_experts": 5})
    base = header(revert(larger, larger.state_dict()))
    with pytest.raises(UnsupportedError) as caught:
        match_base(checkpoint(model.state_dict()), base, model.config.to_dict())
    message = str(caught.value)
    assert "experts as qwen2_moe has them: of 51, 12 are missing (model.layers.0.mlp" in message
    assert (
        "2 have another shape (model.layers.0.mlp.gate.weight [3, 16] instead of [5, 16]" in message
    )


# --- large models ---------------------------------------------------------------------------------


def test_a_model_of_36000_tensors_takes_no_time():
    """Qwen3-235B: 94 layers of 128 experts."""
    layer = "model.layers.{}.mlp.experts.{}"
    shapes = {"gate_up_proj": (128, 3072, 4096), "down_proj": (128, 4096, 1536)}
    names = {layer.format(i, end): shape for i in range(94) for end, shape in shapes.items()}
    values = {name: stored(name, shape) for name, shape in names.items()}
    config = {"model_type": "qwen3_moe", "num_experts": 128}
    before = time.process_time()
    expanded = expand_experts(values, config).values
    assert time.process_time() - before < 1
    assert len(expanded) == 94 * 128 * 3
    base = {name: ("BF16", value.shape) for name, value in expanded.items()}
    before = time.process_time()
    assert match_base(values, base, config).values == expanded
    assert time.process_time() - before < 2
