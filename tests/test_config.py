"""Edits of JSON files. Oracles: ``json``, and transformers, which reads what was edited."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from checkpoints import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from streammerge.config import (
    MAX_DEPTH,
    REMOVED,
    Edit,
    JsonObject,
    apply_edits,
    architecture_edits,
    config_changes,
    config_dtype,
    dtype_edits,
    is_quantized,
    majority_dtype,
    parse_json,
    quantization_edits,
    quantized_for_certain,
)
from streammerge.dtypes import FROM_TORCH
from streammerge.errors import CorruptFileError

MODEL_TYPES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "emu3",
    "qwen2_5_omni",
    "t5gemma",
    "musicgen",
)
STORED_CONFIGS = sorted(
    data
    for data in {path.read_bytes() for path in DATA.glob("*/huggingface/config.json")}
    if b"transformers_version" in data  # the others are of toys, written by hand
)

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=200)

TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def json_of(model_type: str) -> str:
    return AutoConfig.for_model(model_type).to_json_string()


def edited(config: JsonObject, edits: list[Edit]) -> JsonObject:
    data, _ = apply_edits(json.dumps(config).encode(), edits)
    return json.loads(data)


# --- parse_json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "config.json is not a JSON file: Expecting value"),
        (b'{"a": 1', "config.json is not a JSON file: Expecting"),
        (b'{"a": "\xff"}', "config.json is not a JSON file: 'utf-8' codec"),
        ('\ufeff{"a": 1}'.encode(), "config.json is not a JSON file: Unexpected UTF-8 BOM"),
        (b'{"a": ' + b"1" * 5000 + b"}", "config.json is not a JSON file: Exceeds the limit"),
        (b"[1]", "config.json holds a JSON list, expected an object"),
        (b"null", "config.json holds a JSON null, expected an object"),
        (b"true", "config.json holds a JSON boolean, expected an object"),
        (b"1.5", "config.json holds a JSON number, expected an object"),
        (b'"a"', "config.json holds a JSON string, expected an object"),
        (b'{"a":' * 100_000, "config.json is not a JSON file: nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested more than 100 levels"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptFileError) as raised:
        parse_json(data, "config.json")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_json_loads_reads_is_read() -> None:
    deepest = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    for data in (b"{}", b'{"a": 1, "a": 2}', b'{"a": [Infinity, -Infinity]}', deepest):
        assert parse_json(data, "config.json") == json.loads(data)
    assert str(parse_json(b'{"a": NaN}', "config.json")) == "{'a': nan}"


# --- apply_edits ----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("xyzé\x7f"), values),
    max_leaves=8,
)
# These keys tell the formatting: unsorted, with more than one item. Without them it may be unclear
# (`{}`), and then there is more than one way to keep it.
objects = st.dictionaries(st.text("xyzé\x7f", min_size=1), json_values, max_size=4).map(
    lambda drawn: {"b": [1, 2], "a": {"y": None, "x": False}, **drawn}
)
dump_arguments = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 2, 4, "\t"]),
        "sort_keys": st.booleans(),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (", ", ": "), (",", ": ")]),
    }
)
edit_values = st.sampled_from([True, None, 1, "bfloat16", {"z": 1, "a": [1]}])
edit_paths = st.sampled_from([("a",), ("a", "x"), ("a", "w"), ("b",), ("c",), ("zz",), ("0",)])


@fixed
@given(objects, dump_arguments, st.sampled_from(["", "\n", " \n\n"]), edit_paths, edit_values)
def test_the_formatting_of_json_dumps_is_kept(
    before: Any, arguments: Any, end: str, path: tuple[str, ...], value: Any
) -> None:
    after = copy.deepcopy(before)
    (after if len(path) == 1 else after["a"])[path[-1]] = value
    data = (json.dumps(before, **arguments) + end).encode()
    expected = (json.dumps(after, **arguments) + end).encode()
    assert apply_edits(data, [Edit(path, value, "why")]) == (expected, False)


@fixed
@given(objects, dump_arguments, st.sampled_from([("a",), ("a", "x"), ("b",)]))
def test_removing_keeps_the_formatting(before: Any, arguments: Any, path: tuple[str, ...]) -> None:
    after = copy.deepcopy({**before, "unsorted": [1, 2], "last": 1})
    data = json.dumps(after, **arguments).encode()
    del (after if len(path) == 1 else after["a"])[path[-1]]
    expected = json.dumps(after, **arguments).encode()
    assert apply_edits(data, [Edit(path, REMOVED, "why")]) == (expected, False)


@pytest.mark.parametrize("data", STORED_CONFIGS)
def test_stored_configs_keep_their_formatting(data: bytes) -> None:
    config = json.loads(data)
    new, reformatted = apply_edits(data, dtype_edits(config, "bfloat16"))
    expected = config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert new == (json.dumps(expected, indent=2, sort_keys=True) + "\n").encode()
    assert not reformatted


def test_windows_line_endings_are_kept() -> None:
    data = b'{\r\n  "b": [\r\n    1\r\n  ],\r\n  "a": "\\r\\n"\r\n}\r\n'
    new, reformatted = apply_edits(data, [Edit(("a",), 2, "why")])
    assert new == b'{\r\n  "b": [\r\n    1\r\n  ],\r\n  "a": 2\r\n}\r\n'
    assert not reformatted


@pytest.mark.parametrize(
    "data",
    [
        b'{"b": [1, 2],\n"a": 1e-6}',
        b'{\n  "b": [1, 2],\n  "a": 1\n}\n',
        b' {"b": 1, "a": 2}',
        b'{"b": "\\u00E9", "a": 1}',
        b'{"a": 0, "b": 1, "a": 2}',
    ],
)
def test_other_formatting_is_replaced(data: bytes) -> None:
    new, reformatted = apply_edits(data, [Edit(("c",), "é", "why")])
    expected = json.loads(data) | {"c": "é"}
    assert new == (json.dumps(expected, indent=2, ensure_ascii=False) + "\n").encode()
    assert reformatted


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    data = b'{"b": "\\ud800", "a": 1}'
    assert apply_edits(data, [Edit(("a",), 2, "why")]) == (b'{"b": "\\ud800", "a": 2}', False)
    new, reformatted = apply_edits(data[:-1] + b" }", [Edit(("a",), 2, "why")])
    assert new == b'{\n  "b": "\\ud800",\n  "a": 2\n}\n'
    assert reformatted


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [Edit(("a",), 1, "why")],
        [Edit(("c",), REMOVED, "why")],
        [Edit(("c", "d"), REMOVED, "why")],
        [Edit(("a", "d"), REMOVED, "why")],
        [Edit(("a",), 2, "why"), Edit(("a",), 1, "why")],
    ],
)
@pytest.mark.parametrize("data", [b'{"a": 1, "b": NaN}', b' { "a":1,\n"b" : NaN}'])
def test_the_same_bytes_come_back_when_nothing_changes(data: bytes, edits: list[Edit]) -> None:
    new, reformatted = apply_edits(data, edits)
    assert new is data
    assert not reformatted
    assert config_changes(edits, json.loads(data)) == ()


@pytest.mark.parametrize(("old", "new"), [("1", True), ("1.0", 1), ("true", 1), ("0", False)])
def test_equal_values_of_other_types_are_a_change(old: str, new: Any) -> None:
    data = f'{{"a": {old}, "b": 2}}'.encode()
    edit = Edit(("a",), new, "why")
    assert apply_edits(data, [edit])[0] == json.dumps({"a": new, "b": 2}).encode()
    assert len(config_changes([edit], json.loads(data))) == 1


def test_an_edit_inside_what_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"text_config\.dtype"):
        apply_edits(b'{"a": 1}', [Edit(("text_config", "dtype"), "float32", "why")])


def test_edits_do_not_share_their_values_with_the_caller() -> None:
    value: JsonObject = {}
    edits = [Edit(("a",), value, "why"), Edit(("a", "b"), 1, "why")]
    assert apply_edits(b'{"c": 1}', edits)[0] == b'{"a": {"b": 1}, "c": 1}'
    assert value == {}


# --- config_changes -------------------------------------------------------------------------------


def test_changes_say_what_edits_do() -> None:
    before: JsonObject = {"dtype": "float32", "text_config": {"dtype": None}, "same": 1, "old": 1}
    edits = [
        Edit(("dtype",), "float16", "first"),
        Edit(("text_config", "dtype"), {"a": [True]}, "nested"),
        Edit(("same",), 1, "nothing"),
        Edit(("old",), REMOVED, "gone"),
        Edit(("dtype",), "bfloat16", "second"),
    ]
    changes = config_changes(edits, before, "some.json")
    assert [(c.kind, c.name, c.to, c.reason) for c in changes] == [
        ("config", "some.json: dtype", '"bfloat16"', "second"),
        ("config", "some.json: text_config.dtype", '{"a": [true]}', "nested"),
        ("config", "some.json: old", None, "gone"),
    ]


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_reads_the_dtype_and_nothing_else_changes(model_type: str, dtype: str) -> None:
    text = json_of(model_type)
    config = json.loads(text)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] |= {"dtype": "float16", "torch_dtype": None}
    after = edited(config, dtype_edits(config, dtype))

    def others(read: JsonObject) -> JsonObject:
        return {key: value for key, value in read.items() if not key.endswith("dtype")}

    before_read = AutoConfig.for_model(**copy.deepcopy(config))
    read = AutoConfig.for_model(**copy.deepcopy(after))
    assert read.dtype == getattr(torch, dtype)
    assert (after["dtype"], after["torch_dtype"]) == (dtype, dtype)
    if isinstance(config.get("text_config"), dict):
        assert after["text_config"] == config["text_config"] | {"dtype": dtype}
        assert read.text_config.dtype == getattr(torch, dtype)
        before_read.text_config = read.text_config = None
    assert others(read.to_dict()) == others(before_read.to_dict())


def test_every_dtype_of_a_nested_config_is_set_but_null() -> None:
    config: JsonObject = {
        "torch_dtype": "float32",
        "text_config": {"dtype": "torch.float32", "torch_dtype": None},
        "audio_config": {"torch_dtype": "bfloat16", "hidden_size": 1},
        "thinker_config": {"text_config": {"dtype": "float32"}, "dtype": "float64"},
        "decoder": {"model_type": "bert", "torch_dtype": "float32"},
        "vq_config": {"dtype": "int8", "torch_dtype": "auto"},
        "vocabulary_map": {"dtype": "float32", "some": {"torch_dtype": "float32"}},
        "quantization_config": {"model_type": "no", "dtype": "float32"},
    }
    edits = dtype_edits(config, "bfloat16")
    assert {".".join(edit.path): edit.value for edit in edits} == dict.fromkeys(
        (
            "dtype",
            "torch_dtype",
            "text_config.dtype",
            "thinker_config.dtype",
            "thinker_config.text_config.dtype",
            "decoder.torch_dtype",
        ),
        "bfloat16",
    )
    assert dtype_edits(edited(config, edits), "bfloat16") == []


def test_a_model_of_mixed_dtypes_loads_in_the_dtype_of_its_config(tmp_path: Any) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**TINY)).to(torch.bfloat16)
    state = {
        name: value.float() if "norm" in name else value
        for name, value in model.state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    dtype = majority_dtype(
        (FROM_TORCH[str(v.dtype).removeprefix("torch.")], v.nbytes) for v in state.values()
    )
    assert dtype == "bfloat16"
    data = model.config.to_json_string().encode()
    new, _ = apply_edits(data, dtype_edits(json.loads(data), dtype))
    (tmp_path / "config.json").write_bytes(new)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("torch_dtype", [None, "float32", "bfloat16"])
def test_config_dtype_is_what_transformers_reads(
    dtype: str | None, torch_dtype: str | None
) -> None:
    keys = {"dtype": dtype, "torch_dtype": torch_dtype}
    expected = Qwen2Config(**keys).dtype
    name = config_dtype(keys)
    assert (None if name is None else getattr(torch, name)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"dtype": "auto", "torch_dtype": "float32"}, None),
        ({"dtype": "int8"}, None),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": 16}, None),
        ({"text_config": {"torch_dtype": "bfloat16"}, "dtype": None}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}, "torch_dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}, "torch_dtype": "auto"}, None),
        ({"text_config": None}, None),
        ({"vision_config": {"dtype": "bfloat16"}}, None),
    ],
)
def test_config_dtype(config: JsonObject, expected: str | None) -> None:
    assert config_dtype(config) == expected


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], None),
        ([("I64", 100), ("BOOL", 100), ("F8_E4M3", 100), ("F4", 100), ("C64", 100)], None),
        ([("I64", 100), ("F16", 2)], "float16"),
        ([("F32", 4), ("BF16", 2), ("F32", 4), ("BF16", 8)], "bfloat16"),
        ([("BF16", 8), ("F32", 8)], "float32"),
        ([("F64", 8), ("F32", 4)], "float64"),
    ],
)
def test_majority_dtype(outputs: list[tuple[str, int]], expected: str | None) -> None:
    assert majority_dtype(outputs) == expected


# --- quantization ---------------------------------------------------------------------------------


def described(module: torch.nn.Module) -> list[tuple[str, str]]:
    return [
        (f"model.layers.0.mlp.{name}", FROM_TORCH[str(value.dtype).removeprefix("torch.")])
        for name, value in module.state_dict().items()
    ]


def test_layers_of_transformers_that_hold_quantized_weights_are_seen() -> None:
    gpt_oss = AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=32, num_local_experts=2
    )
    for module in (FP8Linear(32, 32), Mxfp4GptOssExperts(gpt_oss)):
        tensors = described(module)
        assert is_quantized([("model.norm.weight", "BF16"), *tensors]) == tensors[0][0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # Names from the file formats of the libraries, which are not installed here.
        ("q_proj.weight", "U8"),  # bitsandbytes, 4 bit; its second tensor is
        ("q_proj.weight.absmax", "F32"),
        ("q_proj.weight.nested_quant_map", "F32"),
        ("q_proj.weight.quant_state.bitsandbytes__nf4", "U8"),
        ("q_proj.weight", "I8"),  # bitsandbytes, 8 bit; its second tensor is
        ("q_proj.SCB", "F32"),
        ("q_proj.qweight", "I32"),  # GPTQ, AWQ
        ("q_proj.qzeros", "I32"),
        ("q_proj.W_q", "F16"),  # HQQ
        ("q_proj.weight_packed", "I32"),  # compressed-tensors
        ("q_proj.weight_scale", "BF16"),
        ("q_proj.weight_scale_2", "F32"),  # ModelOpt
        ("q_proj.weight", "F8_E4M3"),
        ("q_proj.weight_scale_inv", "F32"),  # fine-grained FP8
        ("experts.gate_up_proj_scale_inv", "F32"),
        ("experts.gate_up_proj_blocks", "U8"),  # MXFP4 on disk
        ("q_proj.weight._data", "I8"),  # quanto
        ("q_proj._weight_qdata", "I8"),  # torchao
    ],
)
def test_names_and_dtypes_of_quantized_weights(name: str, dtype: str) -> None:
    name = f"model.layers.0.self_attn.{name}"
    assert is_quantized([("model.norm.weight", "BF16"), (name, dtype)]) == name


@pytest.mark.parametrize("model_type", MODEL_TYPES[: MODEL_TYPES.index("emu3")])
def test_plain_models_are_not_taken_for_quantized(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    for part in (config, getattr(config, "text_config", None)):
        if hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 2
            if getattr(part, "layer_types", None):
                part.layer_types = part.layer_types[:2]
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    assert is_quantized(described(model)) is None


def test_integer_buffers_and_scales_of_plain_models_are_not_taken_for_quantized() -> None:
    tensors = [
        ("embeddings.position_ids", "I64"),
        ("embeddings.token_type_ids", "I32"),
        ("h.0.attn.bias", "U8"),
        ("h.0.attn.bias", "BOOL"),
        ("model.layers.0.mlp.gate.tid2eid", "I32"),
        ("bn.num_batches_tracked", "I64"),
        ("relative_position_index", "I32"),
        ("embed.weight", "I64"),
        ("logit_scale", "F32"),
        ("blocks.0.layer_scale_1", "F32"),
        ("router.per_expert_scale", "BF16"),
        ("norm.weight", "F32"),
    ]
    assert is_quantized(tensors) is None


def test_stored_checkpoints_are_not_taken_for_quantized() -> None:
    seen = 0
    for path in DATA.glob("*/expected.safetensors"):
        if "odd_storage" in path.parent.name:  # holds FP8 on purpose
            continue
        with safe_open(path, "pt") as file:
            tensors = [(key, file.get_slice(key).get_dtype()) for key in file.keys()]  # noqa: SIM118
        assert is_quantized(tensors) is None, path
        seen += len(tensors)
    assert seen > 1000


@pytest.mark.parametrize(
    ("tensors", "config", "certain"),
    [
        ([("a.weight", "I32")], None, None),
        ([("a.weight", "F8_E4M3")], {"quantization_config": None}, None),
        ([("a.weight", "F8_E4M3")], {"quantization_config": {"quant_method": "fp8"}}, "a.weight"),
        ([("a.weight", "BF16")], {"quantization_config": {"quant_method": "fp8"}}, None),
        ([("a.weight", "U8")], {"text_config": {"compression_config": {"x": 1}}}, "a.weight"),
        ([("a.weight", "U8"), ("a.weight.absmax", "F32")], None, "a.weight.absmax"),
    ],
)
def test_what_makes_quantization_certain(
    tensors: list[tuple[str, str]], config: JsonObject | None, certain: str | None
) -> None:
    assert quantized_for_certain(tensors, config) == certain


def test_a_stale_quantization_config_is_removed(tmp_path: Any) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**TINY))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stale = json.loads(path.read_text()) | {
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}
    }
    edits = quantization_edits(stale, described(model))
    assert [(e.path, e.value) for e in edits] == [(("quantization_config",), REMOVED)]
    path.write_text(json.dumps(edited(stale, edits)))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_quantization_edits() -> None:
    config: JsonObject = {
        "quantization_config": None,
        "compression_config": {"format": "dense"},
        "text_config": {"quantization_config": {"quant_method": "fp8"}, "hidden_size": 1},
        "vocabulary_map": {"quantization_config": 1},
    }
    plain = quantization_edits(config, [("a.weight", "BF16")])
    assert edited(config, plain) == {
        "text_config": {"hidden_size": 1},
        "vocabulary_map": {"quantization_config": 1},
    }
    quantized = quantization_edits(config, [("a.weight", "F8_E4M3")])
    assert [edit.path for edit in quantized] == [("quantization_config",)]
    assert quantization_edits({"dtype": "float32"}, []) == []


# --- architectures --------------------------------------------------------------------------------


def test_traces_of_training_are_removed() -> None:
    config: JsonObject = {
        "_name_or_path": "/home/me/base",
        "architectures": ["FSDPQwen2ForCausalLM", "QwenFSDP"],
        "text_config": {"_name_or_path": "", "hidden_size": 1},
        "decoder": {"model_type": "bert", "_name_or_path": "x"},
    }
    edits = architecture_edits(config)
    assert edited(config, edits) == {
        "architectures": ["Qwen2ForCausalLM", "QwenFSDP"],
        "text_config": {"hidden_size": 1},
        "decoder": {"model_type": "bert"},
    }
    assert {edit.path: edit.reason for edit in edits} == {
        ("architectures",): "FSDP is not part of the class name",
        ("_name_or_path",): "a path of the training machine",
        ("text_config", "_name_or_path"): "a path of the training machine",
        ("decoder", "_name_or_path"): "a path of the training machine",
    }


@pytest.mark.parametrize("architectures", [None, "FSDPModel", ["Qwen2ForCausalLM"], [None], []])
def test_other_architectures_stay(architectures: Any) -> None:
    assert architecture_edits({"architectures": architectures}) == []
    assert architecture_edits({}) == []
