"""What a merge makes of a checkpoint, through the command line: names, dtypes, experts, side files.

Ties have a file of their own. Expected values come from transformers, safetensors and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DATA, copy_stored, digests, snapshot
from oracles import assert_same_tensors, load_directory
from safetensors.torch import load_file, save_file
from small_models import (
    COLUMNS,
    CONFIG,
    EMBEDDING,
    GRID,
    HEAD,
    PLAIN,
    Run,
    Split,
    State,
    make_run,
    open_model,
    random_state,
    read_json,
    refuse,
    save,
    tied_state,
    without,
    write_json,
)
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen3VLMoeConfig,
)

import streammerge
from streammerge.errors import UsageError

INDEX = "model.safetensors.index.json"
FAILED, USAGE, DIFFERENT = 1, 2, 3


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target in a folder of its own, where a refused merge leaves nothing."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "merged"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Qwen2 in float32 that needs no edit at all, with a tokenizer."""
    folder = save(tmp_path / "source", random_state(), CONFIG)
    (folder / "huggingface" / "tokenizer.json").write_text("{}")
    return folder


def edit_config(source: Path, **changes: object) -> dict[str, Any]:
    """Change keys of the config beside a checkpoint (None removes one)."""
    path = source / "huggingface" / "config.json"
    config = read_json(path) | changes
    config = {key: value for key, value in config.items() if value is not None}
    write_json(path, config)
    return config


def changes(found: Any, kind: str) -> dict[str, str | None]:
    """Of a report as JSON, what was changed in one way: name before -> after."""
    return {c["name"]: c["to"] for c in found["changes"] if c["kind"] == kind}


# --- names ----------------------------------------------------------------------------------------


def test_wrapper_parts_of_torch_compile(target: Path, run: Run) -> None:
    """At the front and between components."""
    name = "fsdp2_compiled__t213"
    report = run("merge", DATA / name, target, "--json").json
    stored = load_file(DATA / name / "expected.safetensors")
    assert any("._orig_mod." in key for key in stored)
    expected = {key.replace("_orig_mod.", ""): tensor for key, tensor in stored.items()}
    assert changes(report, "renamed") == {
        key: to for key, to in zip(stored, expected, strict=True) if key != to
    }
    del expected[HEAD]  # tied
    assert_same_tensors(load_directory(target), expected)
    open_model(target, unexpected=[key for key in expected if not key.startswith("model.")])


def test_prefix_of_ddp(target: Path, run: Run) -> None:
    name = "toy_ddp__t213"
    run("merge", DATA / name, target)
    stored = load_file(DATA / name / "expected.safetensors")
    assert_same_tensors(
        load_directory(target), {key.removeprefix("module."): t for key, t in stored.items()}
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        "_fsdp_wrapped_module.{}",
        "module.{}",
        "module.module._orig_mod.{}",
        "_orig_mod.module.{}",
        "_checkpoint_wrapped_module._orig_mod.{}",
    ],
)
def test_wrappers_of_the_whole_model(tmp_path: Path, target: Path, run: Run, wrapped: str) -> None:
    state = random_state()
    named = {wrapped.format(name): tensor for name, tensor in state.items()}
    run("merge", save(tmp_path / "source", named, CONFIG), target)
    assert_same_tensors(open_model(target).state_dict(), state)


def test_names_that_meet_are_refused(tmp_path: Path, target: Path, run: Run) -> None:
    """Also where the values are equal."""
    state = random_state() | {f"_orig_mod.{EMBEDDING}": random_state()[EMBEDDING]}
    source = save(tmp_path / "source", state, CONFIG)
    said = refuse(run, target, source)
    assert f"'{EMBEDDING}' and '_orig_mod.{EMBEDDING}' both become '{EMBEDDING}'" in said
    run("merge", source, target, "--raw")
    assert_same_tensors(load_directory(target), state)


# --- value heads and classifiers ------------------------------------------------------------------


def value_head_state() -> tuple[State, State]:
    head = {"v_head.summary.weight": torch.randn(1, 8), "v_head.summary.bias": torch.randn(1)}
    return random_state(), head


@pytest.mark.parametrize("prefix", ["pretrained_model.", ""])
def test_value_head_goes_to_a_file_of_its_own(
    tmp_path: Path, target: Path, run: Run, prefix: str
) -> None:
    state, head = value_head_state()
    named = {prefix + name: tensor for name, tensor in state.items()} | head
    done = run("merge", save(tmp_path / "source", named, CONFIG), target)
    assert "apart: v_head.summary.weight -> value_head.safetensors and 1 more" in done.out
    assert "value head" in done.out
    assert {path.name for path in target.glob("*.safetensors*")} == {
        "model.safetensors",
        INDEX,
        "value_head.safetensors",
    }
    # Without an index, loaders would read the value head, too; with one, they must not.
    index = read_json(target / INDEX)
    assert index["weight_map"] == dict.fromkeys(state, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert_same_tensors(load_file(target / "model.safetensors"), state)
    assert_same_tensors(load_file(target / "value_head.safetensors"), head)
    assert_same_tensors(open_model(target).state_dict(), state)
    assert run("check", target).err == ""


def test_a_value_head_that_was_put_apart_is_not_lost_silently(
    tmp_path: Path, target: Path, run: Run
) -> None:
    state, head = value_head_state()
    first = run("merge", save(tmp_path / "source", state | head, CONFIG), tmp_path / "apart")
    assert not [line for line in first.warnings if "trained weights" in line]
    again = run("merge", tmp_path / "apart", target)
    where = tmp_path / "apart" / "value_head.safetensors"
    assert f"{where}: holds trained weights, which are not in the result" in again.warnings


def test_an_adapter_that_was_split_off_is_not_lost_silently(
    tmp_path: Path, target: Path, run: Run
) -> None:
    run("merge", DATA / "fsdp2_lora__t213", tmp_path / "split", "--lora", "split")
    done = run("merge", tmp_path / "split", target)
    where = tmp_path / "split" / "lora_adapter/"
    assert f"{where}/: holds trained weights, which are not in the result" in done.warnings


def test_value_head_beside_several_files(tmp_path: Path, target: Path, run: Run) -> None:
    state, head = value_head_state()
    source = save(tmp_path / "source", state | head, CONFIG)
    run("merge", source, target, "--max-shard-size", "2000", "--dtype", "bfloat16")
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert set(read_json(target / INDEX)["weight_map"]) == set(state)
    assert_same_tensors(
        load_file(target / "value_head.safetensors"),
        {name: tensor.bfloat16() for name, tensor in head.items()},
    )
    assert_same_tensors(
        open_model(target).state_dict(), {name: t.bfloat16() for name, t in state.items()}
    )


def test_a_value_head_alone_is_the_model(tmp_path: Path, target: Path, run: Run) -> None:
    _, head = value_head_state()
    run("merge", save(tmp_path / "source", head), target)
    assert_same_tensors(load_file(target / "model.safetensors"), head)
    assert {path.name for path in target.iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "no config"])
def test_value_head_beside_an_adapter_alone(
    tmp_path: Path, target: Path, run: Run, config: dict[str, Any] | None
) -> None:
    """A critic whose base model is elsewhere: neither embedding nor config is missing here."""
    name = "model.layers.0.self_attn.q_proj"
    adapter = {
        f"{name}.lora_A.weight": torch.randn(2, 8),
        f"{name}.lora_B.weight": torch.ones(8, 2),
    }
    _, head = value_head_state()
    state = {
        f"base_model.model.{key.replace('.weight', '.default.weight')}": tensor
        for key, tensor in adapter.items()
    }
    source = save(tmp_path / "source", state | head, config)
    done = run("merge", source, target, "--lora-alpha", "4")
    assert not [line for line in done.warnings if "config.json" in line and "missing" in line]
    assert {path.name for path in target.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "value_head.safetensors",
    }
    assert_same_tensors(load_file(target / "value_head.safetensors"), head)
    assert_same_tensors(
        load_file(target / "adapter_model.safetensors"),
        {f"base_model.model.{key}": tensor for key, tensor in adapter.items()},
    )


def test_token_classification_as_it_is(target: Path, run: Run) -> None:
    name = "fsdp2_tokencls__t213"
    report = run("merge", DATA / name, target, "--json").json
    stored = load_file(DATA / name / "expected.safetensors")
    assert {change["kind"] for change in report["changes"]} == {"config"}
    assert_same_tensors(load_directory(target), stored)
    assert_same_tensors(open_model(target, Qwen2ForTokenClassification).state_dict(), stored)


@pytest.mark.parametrize("flag", [True, False])
def test_sequence_classification_as_it_is(
    tmp_path: Path, target: Path, run: Run, flag: bool
) -> None:
    """A tied flag, as in the config of a critic that was made of a small language model."""
    state = without(random_state(), HEAD) | {"score.weight": torch.randn(1, 8)}
    config = CONFIG | {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": flag,
    }
    run("merge", save(tmp_path / "source", state, config), target)
    assert_same_tensors(open_model(target, Qwen2ForSequenceClassification).state_dict(), state)
    assert read_json(target / "config.json") == config


# --- dtypes ---------------------------------------------------------------------------------------

STORED = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.mark.parametrize("option", ["keep", "auto", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_dtype(tmp_path: Path, target: Path, run: Run, option: str, stored: torch.dtype) -> None:
    """The config of a training in mixed precision asks for bfloat16, whatever is stored."""
    state = random_state(stored)
    source = save(tmp_path / "source", state, CONFIG | {"dtype": None, "torch_dtype": "bfloat16"})
    report = run("merge", source, target, "--dtype", option, "--json").json
    wanted = {"keep": stored, "auto": torch.bfloat16}.get(option) or getattr(torch, option)
    expected = {name: tensor.to(wanted) for name, tensor in state.items()}
    assert_same_tensors(load_directory(target), expected)
    # 5.x opens a model in the dtype that its config says.
    model = open_model(target)
    assert model.dtype == wanted
    assert_same_tensors(model.state_dict(), expected)
    config = read_json(target / "config.json")
    assert (config["dtype"], config["torch_dtype"]) == (NAMES[wanted], NAMES[wanted])
    casts = changes(report, "cast")
    assert set(casts) == (set() if stored == wanted else set(state))
    saves = [line for line in report["warnings"] if "--dtype auto would save" in line]
    nbytes = sum(tensor.nbytes for tensor in state.values()) // 2
    if option == "keep" and stored == torch.float32:
        assert saves == [
            "config.json asks for bfloat16, but float32 is stored; --dtype auto would save "
            f"{nbytes:,} bytes"
        ]
    else:
        assert saves == []


def test_what_auto_would_save_is_what_it_saves(tmp_path: Path, target: Path, run: Run) -> None:
    """Tied, so that the head is written by neither; with a value head and a buffer of integers."""
    state = tied_state() | value_head_state()[1] | {"model.steps": torch.arange(5)}
    config = CONFIG | {"dtype": "bfloat16", "tie_word_embeddings": True}
    source = save(tmp_path / "source", state, config)
    kept = run("merge", source, target, "--json").json
    auto = run("merge", source, target.with_name("auto"), "--dtype", "auto", "--json").json
    (said,) = [line for line in kept["warnings"] if "would save" in line]
    assert f"would save {kept['bytes'] - auto['bytes']:,} bytes" in said


def test_keep_dtype_by_patterns(tmp_path: Path, target: Path, run: Run) -> None:
    state = random_state() | {"model.layers.0.A_log": torch.randn(3), "model.ids": torch.arange(3)}
    source = save(tmp_path / "source", state, CONFIG)
    done = run(
        *("merge", source, target, "--dtype", "bfloat16"),
        *("--keep-dtype", "*.A_log", "--keep-dtype", "*norm*", "--keep-dtype", "nothing?"),
    )
    kept = {name for name in state if "norm" in name or "A_log" in name or name == "model.ids"}
    found = load_directory(target)
    assert_same_tensors(
        found, {n: t if n in kept else t.to(torch.bfloat16) for n, t in state.items()}
    )
    assert [line for line in done.warnings if "nothing?" in line]
    assert not [line for line in done.warnings if "A_log" in line or "'*norm*'" in line]
    # Loaders make it one dtype: that which the most bytes have.
    assert len([line for line in done.warnings if "several dtypes" in line]) == 1
    assert read_json(target / "config.json")["dtype"] == "bfloat16"


def test_a_single_pattern_need_not_be_in_a_list(tmp_path: Path, target: Path) -> None:
    source = save(tmp_path / "source", random_state(), CONFIG)
    streammerge.merge(source, target, dtype="bfloat16", keep_dtype="*norm*")
    dtypes = {name: tensor.dtype for name, tensor in load_directory(target).items()}
    assert dtypes == {
        name: torch.float32 if "norm" in name else torch.bfloat16 for name in random_state()
    }


def test_a_version_to_be_compatible_with_must_be_known(source: Path, target: Path) -> None:
    for version in (5, "4"):
        with pytest.raises(UsageError, match=f"^compat {version!r}: expected 4$"):
            streammerge.merge(source, target, compat=version)  # type: ignore[arg-type]
    assert not target.exists()


def test_majority_decides_what_the_config_says(tmp_path: Path, target: Path, run: Run) -> None:
    state = random_state(torch.bfloat16)
    state |= {name: tensor.float() for name, tensor in state.items() if "norm" in name}
    source = save(tmp_path / "source", state, CONFIG)
    done = run("merge", source, target)
    assert_same_tensors(load_directory(target), state)
    assert read_json(target / "config.json") == CONFIG | {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert len([line for line in done.warnings if "several dtypes" in line]) == 1
    assert open_model(target).dtype == torch.bfloat16


def test_nested_dtypes(tmp_path: Path, target: Path, run: Run) -> None:
    config = CONFIG | {
        "dtype": "float32",
        "torch_dtype": None,
        "text_config": {"dtype": "float32", "torch_dtype": None},
        "vision_config": {"torch_dtype": "float16", "deeper_config": {"dtype": "float64"}},
        "audio_config": {"layers": 3},
        "vocabulary_map": {"dtype": "float32", "torch_dtype": 7},
    }
    del config["torch_dtype"]
    run("merge", save(tmp_path / "source", random_state(torch.bfloat16), config), target)
    assert read_json(target / "config.json") == config | {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "torch_dtype": None},
        "vision_config": {"torch_dtype": "bfloat16", "deeper_config": {"dtype": "bfloat16"}},
    }


def test_auto_without_a_dtype_keeps_and_says_so(tmp_path: Path, target: Path, run: Run) -> None:
    config = without(CONFIG, "dtype", "torch_dtype")
    for number, beside in enumerate((config, config | {"dtype": "auto"}, None)):
        source = save(tmp_path / f"source{number}", random_state(torch.float16), beside)
        done = run("merge", source, target.with_name(str(number)), "--dtype", "auto")
        assert [line for line in done.warnings if "--dtype auto" in line]
        found = load_directory(target.with_name(str(number)))
        assert_same_tensors(found, random_state(torch.float16))


QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_stale_quantization_config_is_removed(tmp_path: Path, target: Path, run: Run) -> None:
    config = CONFIG | {
        "quantization_config": QUANTIZATION,
        "compression_config": {},
        "text_config": {"quantization_config": QUANTIZATION},
    }
    source = save(tmp_path / "source", random_state(), config)
    report = run("merge", source, target, "--json").json
    assert changes(report, "config") == {
        "config.json: quantization_config": None,
        "config.json: compression_config": None,
        "config.json: text_config.quantization_config": None,
    }
    assert read_json(target / "config.json") == CONFIG | {"text_config": {}}


def quantized_state() -> State:
    state = random_state(torch.bfloat16)
    for name in list(state):
        if name.endswith("proj.weight"):
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.tensor([[0.25]])
    return state


def plainly(state: State) -> dict[str, Split]:
    """Every rank has all of it: torch cannot split the small floats."""
    return dict.fromkeys(state, PLAIN)


def test_quantized_weights_are_written_as_they_are(tmp_path: Path, target: Path, run: Run) -> None:
    config = CONFIG | {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "quantization_config": QUANTIZATION,
    }
    state = quantized_state()
    source = save(tmp_path / "source", state, config, splits=plainly(state))
    text = (source / "huggingface" / "config.json").read_bytes()
    done = run("merge", source, target)
    assert_same_tensors(load_directory(target), quantized_state())
    assert (target / "config.json").read_bytes() == text
    assert not [line for line in done.warnings if "--dtype" in line]
    target = target.with_name("other") / "merged"
    target.parent.mkdir()
    for option in ("bfloat16", "auto", "float32"):
        said = refuse(run, target, source, "--dtype", option)
        assert "are quantized, so they cannot be converted" in said


def test_config_of_quantized_weights_does_not_follow_their_scales(
    tmp_path: Path, target: Path, run: Run
) -> None:
    """bitsandbytes: more bytes of float32 beside the weights than of what is computed in."""
    state = {
        "model.embed_tokens.weight": torch.randn(4, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 1, dtype=torch.uint8),
        "model.layers.0.mlp.up_proj.weight.absmax": torch.rand(64),
    }
    config = {
        "model_type": "nobodys",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    source = save(tmp_path / "source", state, config)
    run("merge", source, target)
    assert read_json(target / "config.json") == config


def test_no_adapter_is_folded_into_quantized_weights(
    tmp_path: Path, target: Path, run: Run
) -> None:
    name = "model.layers.0.mlp.up_proj"
    state = quantized_state()
    state = {
        f"base_model.model.{key.replace(f'{name}.', f'{name}.base_layer.')}": tensor
        for key, tensor in state.items()
    }
    state |= {
        f"base_model.model.{name}.lora_A.default.weight": torch.randn(2, 8),
        f"base_model.model.{name}.lora_B.default.weight": torch.randn(12, 2),
    }
    config = CONFIG | {"quantization_config": QUANTIZATION}
    source = save(tmp_path / "source", state, config, splits=plainly(state))
    assert "quantized" in refuse(run, target, source, "--lora-alpha", "4")
    run("merge", source, target, "--lora-alpha", "4", "--lora", "split")
    assert_same_tensors(load_directory(target), quantized_state())


# --- side files -----------------------------------------------------------------------------------


def test_nothing_is_edited_where_nothing_must_be(source: Path, target: Path, run: Run) -> None:
    done = run("merge", source, target)
    assert done.err == ""
    first, _ = done.out.splitlines()
    assert first == f"side files from {source}/huggingface"
    folder = source / "huggingface"
    assert digests(target) == digests(folder) | {
        "model.safetensors": digests(target)["model.safetensors"]
    }
    assert_same_tensors(open_model(target).state_dict(), random_state())


KEPT = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "qwen.tiktoken",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "preprocessor_config.json",
    "modeling_nobodys.py",
    "scheduler.py",
    "nested/code.py",
    "1_Pooling/config.json",
    "modules.json",
    "LICENSE.txt",
    ".gitattributes",
]
LEFT_OUT = [
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "consolidated.00.pth",
    "rank0.pt",
    "last.ckpt",
    "__0_0.distcp",
    "state.npz",
    "tf_model.h5",
    "flax_model.msgpack",
    "model-q4.gguf",
    "model.onnx",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state_0.pth",
    "trainer_state.json",
    "training_args.bin",
    "adapter_config.json",
    "adapter_model.bin",
    "nested/pytorch_model.bin",
    ".git/config",
    ".cache/huggingface/download/x.metadata",
    "lora_adapter/README.md",
    "__pycache__/modeling.cpython-311.pyc",
]


@pytest.mark.parametrize("given", [False, True], ids=["huggingface", "--assets"])
def test_what_is_copied_and_what_is_not(
    tmp_path: Path, source: Path, target: Path, run: Run, given: bool
) -> None:
    folder = source / "huggingface"
    if given:
        folder = tmp_path / "base"
        (source / "huggingface").rename(folder)
    for number, name in enumerate(KEPT + LEFT_OUT):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON has to be JSON, but in whatever form; the rest is no text.
        data = b'{ "n":%d }\r\n' if name.endswith(".json") else b"\r\n\xff\x00 %d"
        path.write_bytes(data % number)
    arguments = ["--assets", folder] if given else []
    report = run("merge", source, target, *arguments, "--json").json
    written = digests(target)
    copied = set(KEPT) | {"config.json"}
    assert set(written) == copied | {"model.safetensors"}
    before = digests(folder)
    assert {name: written[name] for name in copied} == {name: before[name] for name in copied}
    assert set(report["files"]) == set(written)
    folders = {".git/", ".cache/", "__pycache__/", "lora_adapter/"}
    left = {name for name in LEFT_OUT if f"{name.split('/')[0]}/" not in folders}
    assert set(report["left_out"]) == left | folders
    assert_same_tensors(load_file(target / "model.safetensors"), random_state())


def test_links_to_files_are_followed(tmp_path: Path, source: Path, target: Path, run: Run) -> None:
    """As in the cache of the Hub."""
    folder = source / "huggingface"
    for name in ("config.json", "tokenizer.json"):
        (folder / name).rename(tmp_path / f"blob-{name}")
        (folder / name).symlink_to(tmp_path / f"blob-{name}")
    run("merge", source, target)
    assert not (target / "config.json").is_symlink()
    assert read_json(target / "config.json") == CONFIG


FORMATS: dict[str, Callable[[Mapping[str, object]], str]] = {
    "indent 4": lambda c: json.dumps(c, indent=4),
    "indent 2, no newline": lambda c: json.dumps(c, indent=2),
    "tabs, two newlines": lambda c: json.dumps(c, indent="\t") + "\n\n",
    "one line": json.dumps,
    "dense": lambda c: json.dumps(c, separators=(",", ":")) + "\n",
    "CRLF": lambda c: (json.dumps(c, indent=2) + "\n").replace("\n", "\r\n"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_formatting_of_an_edited_config_is_kept(
    source: Path, target: Path, run: Run, kind: str
) -> None:
    """So is the order of keys; new ones come last."""
    path = source / "huggingface" / "config.json"
    config = {key: CONFIG[key] for key in reversed(CONFIG)} | {"note": "ünï\u2028code"}
    path.write_bytes(FORMATS[kind](config).encode())
    run("merge", source, target)
    assert (target / "config.json").read_bytes() == path.read_bytes()
    del config["torch_dtype"]
    path.write_bytes(FORMATS[kind](config).encode())
    run("merge", source, target.with_name("edited"), "--dtype", "bfloat16")
    expected = config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    edited = (target.with_name("edited") / "config.json").read_bytes()
    assert edited == FORMATS[kind](expected).encode()


def test_a_config_of_mixed_formatting_is_reformatted_and_that_is_said(
    source: Path, target: Path, run: Run
) -> None:
    path = source / "huggingface" / "config.json"
    text = path.read_text().replace('"hidden_size": 8', '"hidden_size":   8')
    path.write_text(text)
    run("merge", source, target)
    assert (target / "config.json").read_text() == text  # not edited, so not formatted either
    report = run("merge", source, target.with_name("edited"), "--dtype", "float16", "--json").json
    assert {c["reason"] for c in report["changes"] if c["name"] == "config.json"} == {
        "its formatting could not be kept"
    }
    edited = (target.with_name("edited") / "config.json").read_text()
    assert edited == json.dumps(json.loads(edited), indent=2) + "\n"


def test_traces_of_the_training_go_from_the_config(source: Path, target: Path, run: Run) -> None:
    edit_config(
        source,
        architectures=["FSDPQwen2ForCausalLM"],
        _name_or_path="/mnt/secret/base",
        text_config={"_name_or_path": "/mnt/secret/base"},
    )
    report = run("merge", source, target, "--json").json
    assert changes(report, "config") == {
        "config.json: architectures": '["Qwen2ForCausalLM"]',
        "config.json: _name_or_path": None,
        "config.json: text_config._name_or_path": None,
    }
    assert read_json(target / "config.json") == CONFIG | {"text_config": {}}


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "qwen.tiktoken", "sentencepiece.bpe.model")


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "config.json and tokenizer"),
        (("config.json",), "tokenizer"),
        *(((name,), "config.json") for name in TOKENIZERS),
    ],
)
def test_what_is_missing_is_said(
    source: Path, target: Path, run: Run, present: tuple[str, ...], missing: str
) -> None:
    folder = source / "huggingface"
    for path in folder.iterdir():
        path.unlink()
    for name in present:
        write_json(folder / name, CONFIG)
    if not present:
        folder.rmdir()
    done = run("merge", source, target)
    (said,) = [line for line in done.warnings if "--assets DIR" in line]
    where, what = said.rsplit(": ", 1)
    assert ("no folder huggingface/" in where) == (not present)
    assert what.startswith(f"{missing} missing ")
    assert_same_tensors(load_directory(target), random_state())
    assert {path.name for path in target.iterdir()} == {"model.safetensors", *present}


def test_assets_stand_in_for_the_folder_beside(
    tmp_path: Path, source: Path, target: Path, run: Run
) -> None:
    """A base model's folder, with weights in it, and with another dtype."""
    base = tmp_path / "base"
    model = open_model(merged(run, source, tmp_path / "first"))
    model.bfloat16().save_pretrained(base)
    (base / "vocab.json").write_text("{}")
    (base / "merges.txt").write_text("")
    (source / "huggingface" / "tokenizer.json").write_text("other")
    run("merge", source, target, "--assets", base)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "vocab.json",
    }
    assert_same_tensors(open_model(target).state_dict(), random_state())
    assert read_json(target / "config.json")["dtype"] == "float32"


def merged(run: Run, source: Path, target: Path, *options: str) -> Path:
    run("merge", source, target, *options)
    return target


def test_remote_code_is_copied_and_asked_for(source: Path, target: Path, run: Run) -> None:
    auto_map = {
        "AutoConfig": "configuration_nobodys.NobodysConfig",
        "AutoModelForCausalLM": "modeling_nobodys.NobodysForCausalLM",
        "AutoTokenizer": ["tokens.Slow", None],
        "AutoProcessor": "somebody/else--processing.Processor",
    }
    edit_config(source, auto_map=auto_map)
    folder = source / "huggingface"
    for name in ("configuration_nobodys.py", "modeling_nobodys.py"):
        (folder / name).write_text(f"# {name}\n")
    assert "auto_map needs tokens.py" in refuse(run, target, source)
    (folder / "tokens.py").write_text("")
    run("merge", source, target)
    assert (target / "modeling_nobodys.py").read_text() == "# modeling_nobodys.py\n"
    assert read_json(target / "config.json")["auto_map"] == auto_map


BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "a list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "deep": lambda path: path.write_text('{"a":' * 5000 + "1" + "}" * 5000),
    "a directory": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "100 MB": lambda path: (path.write_text("{}"), os.truncate(path, 100_000_000)),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_broken_config(source: Path, target: Path, run: Run, name: str, kind: str) -> None:
    path = source / "huggingface" / name
    path.unlink(missing_ok=True)
    BROKEN[kind](path)
    said = refuse(run, target, source)
    assert str(path) in said
    assert refuse(run, target, source, "--dry-run") == said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs(source: Path, target: Path, run: Run, name: str) -> None:
    path = source / "huggingface" / name
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    said = refuse(run, target, source)
    assert f"error: {path}: a pointer of Git LFS, not the file itself\n" in said
    assert "git lfs pull" in said


def test_pictures_may_be_pointers_of_git_lfs(source: Path, target: Path, run: Run) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (source / "huggingface" / "figure.png").write_bytes(pointer)
    run("merge", source, target)
    assert (target / "figure.png").read_bytes() == pointer


def test_missing_assets(tmp_path: Path, source: Path, target: Path, run: Run) -> None:
    assert "no such directory" in refuse(run, target, source, "--assets", tmp_path / "none")
    assert "no such directory" in refuse(
        run, target, source, "--assets", source / "huggingface" / "config.json"
    )


NEW_CONFIG = without(CONFIG, "rope_theta") | {
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "transformers_version": "5.24.0",
}


def test_compat_adds_what_older_readers_need(source: Path, target: Path, run: Run) -> None:
    write_json(source / "huggingface" / "config.json", NEW_CONFIG)
    tokens = {"extra_special_tokens": ["<a>"], "tokenizer_class": "TokenizersBackend"}
    write_json(source / "huggingface" / "tokenizer_config.json", tokens)
    without_it = run("merge", source, target.with_name("without"))
    said = [line for line in without_it.warnings if "--compat 4" in line]
    assert [line.split(" ")[0] for line in said] == ["config.json", "tokenizer_config.json"]
    assert "rope_theta" in said[0]
    assert (
        digests(target.with_name("without"))["config.json"]
        == digests(source / "huggingface")["config.json"]
    )

    done = run("merge", source, target, "--compat", "4", "--json")
    assert not [line for line in done.warnings if "4.x" in line]
    assert read_json(target / "config.json") == NEW_CONFIG | {"rope_theta": 1000000.0}
    assert read_json(target / "tokenizer_config.json") == {
        "additional_special_tokens": ["<a>"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    assert set(changes(done.json, "config")) == {
        "config.json: rope_theta",
        "tokenizer_config.json: tokenizer_class",
        "tokenizer_config.json: additional_special_tokens",
        "tokenizer_config.json: extra_special_tokens",
    }
    assert open_model(target).config.rope_parameters["rope_theta"] == 1000000.0


def test_compat_says_what_it_cannot_add(source: Path, target: Path, run: Run) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 10000.0}
    write_json(source / "huggingface" / "config.json", NEW_CONFIG | {"rope_parameters": rope})
    for options in ((), ("--compat", "4")):
        done = run("merge", source, target.with_name(str(len(options))), *options)
        assert [line for line in done.warnings if "has no keys for rope_parameters" in line]


def test_names_that_older_readers_lack_are_said(tmp_path: Path, target: Path, run: Run) -> None:
    state = {"model.vision_tower.encoder.layers.0.mlp.fc1.weight": torch.ones(2, 2)}
    vision = {"model_type": "siglip_vision_model"}
    config = {"model_type": "gemma3", "architectures": ["Gemma3Model"], "vision_config": vision}
    for options in ((), ("--compat", "4")):
        source = save(tmp_path / f"source{len(options)}", state, config)
        done = run("merge", source, target.with_name(str(len(options))), *options)
        assert [line for line in done.warnings if "vision tower" in line]


# --- experts --------------------------------------------------------------------------------------

MOE = "fsdp2_moe__t213"


def test_packed_experts_are_kept_apart(target: Path, run: Run) -> None:
    """By what transformers itself saves of the model."""
    report = run("merge", DATA / MOE, target, "--json").json
    stored = load_file(DATA / MOE / "expected.safetensors")
    model = MixtralForCausalLM(MixtralConfig.from_pretrained(DATA / MOE / "huggingface"))
    model.load_state_dict(stored)
    model.bfloat16().save_pretrained(target.with_name("saved"))
    expected = load_directory(target.with_name("saved"))
    assert any(".experts.5.w3." in name for name in expected)
    assert_same_tensors(load_directory(target), expected)
    assert_same_tensors(open_model(target, MixtralForCausalLM).state_dict(), stored)
    packed = {name for name in stored if ".experts." in name}
    assert set(changes(report, "expanded")) == packed
    name = "model.layers.0.mlp.experts.gate_up_proj"
    to = "model.layers.0.block_sparse_moe.experts.*.{}.weight"
    assert changes(report, "expanded")[name] == f"{to.format('w1')}, {to.format('w3')}"
    assert set(changes(report, "renamed")) == {name for name in stored if ".mlp.gate." in name}


def test_keep_packed(target: Path, run: Run) -> None:
    done = run("merge", DATA / MOE, target, "--keep-packed")
    stored = load_file(DATA / MOE / "expected.safetensors")
    assert_same_tensors(load_directory(target), stored)
    assert len([line for line in done.warnings if "packed experts" in line]) == 1
    assert_same_tensors(open_model(target, MixtralForCausalLM).state_dict(), stored)


@pytest.mark.parametrize("option", [(), ("--keep-packed",)])
def test_another_number_of_experts_is_refused(
    tmp_path: Path, target: Path, run: Run, option: tuple[str, ...]
) -> None:
    """Those of one rank of expert parallelism."""
    source = tmp_path / "source"
    copy_stored(MOE, source)
    edit_config(source, num_local_experts=12)
    said = refuse(run, target, source, *option)
    assert "6 experts, expected 12 (num_local_experts)" in said
    assert "expert parallelism" in said


@pytest.fixture
def mixtral_base(tmp_path: Path) -> Path:
    """The model of the stored checkpoint before training, in several files."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig.from_pretrained(DATA / MOE / "huggingface"))
    model.save_pretrained(tmp_path / "base", max_shard_size=5000)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 3
    return tmp_path / "base"


def test_names_from_a_base_model(mixtral_base: Path, target: Path, run: Run) -> None:
    run("merge", DATA / MOE, target, "--names-from", mixtral_base)
    run("merge", DATA / MOE, target.with_name("without"))
    assert set(load_directory(target)) == set(load_directory(mixtral_base))
    assert_same_tensors(load_directory(target), load_directory(target.with_name("without")))


def test_names_from_another_model_is_refused_with_the_difference(
    mixtral_base: Path, source: Path, target: Path, run: Run, tmp_path: Path
) -> None:
    said = refuse(run, target, source, "--names-from", mixtral_base)
    assert "are missing (model.layers.0.block_sparse_moe.experts.0.w1.weight, " in said
    assert "are not in the base model (model.layers.0.self_attn.q_proj.bias, " in said
    assert "have another shape (model.embed_tokens.weight [66, 8] instead of [66, 16], " in said
    base = tmp_path / "odd"
    base.mkdir()
    state = random_state() | {"model.layers.1.mlp.up_proj.weight": torch.ones(13, 8)}
    save_file(state, base / "model.safetensors")
    said = refuse(run, target, source, "--names-from", base)
    assert "model.layers.1.mlp.up_proj.weight [12, 8] instead of [13, 8]" in said


def square_experts(width: int) -> tuple[State, dict[str, Any]]:
    """Of qwen3_vl_moe, as transformers 5 has it in memory: files have the last dims swapped."""
    state = {
        "model.language_model.embed_tokens.weight": torch.randn(66, 8),
        "model.language_model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, width, 8),
        "model.language_model.layers.0.mlp.experts.down_proj": torch.randn(3, 8, width // 2),
        "lm_head.weight": torch.randn(66, 8),
    }
    text = Qwen3VLMoeConfig().text_config.to_dict() | {
        "hidden_size": 8,
        "moe_intermediate_size": width // 2,
        "num_experts": 3,
        "num_hidden_layers": 1,
        "vocab_size": 66,
        "tie_word_embeddings": False,
    }
    text = {key: value for key, value in text.items() if "rope" not in key}
    return state, {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("answer", [None, "yes", "no"])
@pytest.mark.parametrize("width", [12, 8], ids=["oblong", "square"])
def test_transposed_experts(
    tmp_path: Path, target: Path, run: Run, width: int, answer: str | None
) -> None:
    state, config = square_experts(width)
    source = save(tmp_path / "source", state, config)
    base = tmp_path / "base"
    base.mkdir()
    hub = {
        name: (t.transpose(-1, -2).contiguous() if t.ndim == 3 else t) for name, t in state.items()
    }
    save_file({name: torch.zeros_like(t) for name, t in hub.items()}, base / "model.safetensors")
    options = ["--names-from", base, *(("--transpose-experts", answer) if answer else ())]
    if width == 8 and answer is None:
        said = refuse(run, target, source, *options)
        assert "[3, 8, 8] does not tell whether it is transposed" in said
        assert "--transpose-experts yes" in said
        return
    report = run("merge", source, target, *options, "--json").json
    expected, swapped = dict(hub), {name for name in state if state[name].ndim == 3}
    if width == 8 and answer == "no":
        gate = "model.language_model.layers.0.mlp.experts.gate_up_proj"
        expected[gate] = state[gate]
        swapped.remove(gate)
    assert_same_tensors(load_directory(target), expected)
    assert set(changes(report, "transposed")) == swapped


# --- what is said ---------------------------------------------------------------------------------


def busy_source(tmp_path: Path) -> Path:
    """A checkpoint in which everything but an adapter has to be changed."""
    state, head = value_head_state()
    state[HEAD] = state[EMBEDDING]
    state |= {"model.steps": torch.arange(3)}
    named = {f"pretrained_model._orig_mod.{name}": tensor for name, tensor in state.items()}
    config = CONFIG | {
        "_name_or_path": "/base",
        "architectures": ["FSDPQwen2ForCausalLM"],
        "torch_dtype": "bfloat16",
        "quantization_config": {},
        "tie_word_embeddings": True,
    }
    del config["dtype"]
    return save(tmp_path / "busy", named | head, config)


def test_dry_run_and_merge_say_the_same(tmp_path: Path, target: Path, run: Run) -> None:
    source = busy_source(tmp_path)
    before = snapshot(tmp_path)
    options = ("--dtype", "auto", "--keep-dtype", "*norm*", "--max-shard-size", "1000")
    planned = run("merge", source, target, *options, "--dry-run", "--json").json
    text = run("merge", source, target, *options, "--dry-run")
    assert snapshot(tmp_path) == before
    done = run("merge", source, target, *options, "--json")
    report = done.json
    assert planned["changes"] == report["changes"]
    assert planned["warnings"] == report["warnings"] == done.warnings
    assert len(report["warnings"]) == len(set(report["warnings"]))
    names = {f["name"] for part in ("files", "texts", "assets") for f in planned[part]}
    assert names == set(report["files"])

    kinds = {change["kind"] for change in report["changes"]}
    assert kinds == {"renamed", "apart", "dropped", "cast", "config"}
    assert len(changes(report, "renamed")) == len(random_state()) + 1
    assert len(changes(report, "cast")) == len(random_state()) - 1 - 5 + 2
    for printed in (text.out, run("merge", source, target.with_name("other"), *options).out):
        lines = printed.splitlines()
        for kind in kinds:
            grouped = [line for line in lines if line.startswith(f"{kind}: ")]
            assert 1 <= len(grouped) <= 4
        assert any(f" and {len(changes(report, 'cast')) - 1} more (" in line for line in lines)
        assert max(map(len, lines)) < 250
    for line in report["warnings"]:
        assert f"warning: {line}" in text.out


def test_verbose_shows_every_change(tmp_path: Path, target: Path, run: Run) -> None:
    source = busy_source(tmp_path)
    found = run("merge", source, target, "--dry-run", "--json").json["changes"]
    for option in ("--dry-run", "--overwrite"):
        printed = run("merge", source, target, "--verbose", option).out
        for change in found:
            after = "" if change["to"] is None else f" -> {change['to']}"
            assert change["name"] + after in printed
            assert f"({change['reason']})" in printed


def test_an_expert_model_is_summed_up_in_few_lines(target: Path, run: Run) -> None:
    done = run("merge", DATA / MOE, target)
    assert len(done.out.splitlines()) <= 6


# --- raw ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [MOE, *(f"fsdp2_{name}__t213" for name in ("w4", "compiled", "lora", "lora_only"))],
)
def test_raw_is_what_is_stored(target: Path, run: Run, name: str) -> None:
    done = run("merge", DATA / name, target, "--raw", "--json")
    assert done.json["changes"] == []
    assert_same_tensors(load_directory(target), load_file(DATA / name / "expected.safetensors"))
    config = DATA / name / "huggingface" / "config.json"
    assert (target / "config.json").read_bytes() == config.read_bytes()
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}


def test_raw_takes_what_would_be_refused(tmp_path: Path, target: Path, run: Run) -> None:
    """Different values under a tied flag, a layer missing, a config that is none."""
    state = {name: t for name, t in random_state().items() if ".layers.1." not in name}
    source = save(tmp_path / "source", state, CONFIG | {"tie_word_embeddings": True})
    refuse(run, target, source)
    run("merge", source, target, "--raw")
    assert_same_tensors(load_directory(target), state)
    for name, beside in (("config.json", "huggingface"), ("lora_train_meta.json", ".")):
        (source / beside / name).write_text("{")
        run("merge", source, target.with_name(name), "--raw")
        assert_same_tensors(load_directory(target.with_name(name)), state)


def test_raw_with_other_assets(tmp_path: Path, source: Path, target: Path, run: Run) -> None:
    folder = tmp_path / "assets"
    write_json(folder / "config.json", {"_name_or_path": "/base"})
    run("merge", source, target, "--raw", "--assets", folder)
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()


ADAPTATIONS = [
    ("--dtype", "auto"),
    ("--dtype", "bfloat16"),
    ("--keep-dtype", "*"),
    ("--untie",),
    ("--keep-packed",),
    ("--names-from", "{base}"),
    ("--transpose-experts", "yes"),
    ("--transpose-experts", "no"),
    ("--compat", "4"),
    ("--lora", "fold"),
    ("--lora", "split"),
    ("--lora", "keep"),
    ("--lora-alpha", "16"),
    ("--lora-alpha", "0"),
    ("--rslora",),
    ("--base", "{base}"),
]


@pytest.mark.parametrize("option", ADAPTATIONS, ids=" ".join)
def test_raw_goes_with_no_adaptation(
    tmp_path: Path, source: Path, target: Path, run: Run, option: tuple[str, ...]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file(random_state(), base / "model.safetensors")
    arguments = [part.format(base=base) for part in option]
    assert "raw" in refuse(run, target, source, "--raw", *arguments, code=USAGE)


# --- checks before publishing ---------------------------------------------------------------------


def missing_layer(state: State, config: dict[str, Any]) -> str:
    for name in [name for name in state if ".layers.1." in name]:
        del state[name]
    return "layer 1 missing"


def missing_rows(state: State, config: dict[str, Any]) -> str:
    config["vocab_size"] = 67
    return "has 66 rows, config.json says vocab_size 67"


def missing_code(state: State, config: dict[str, Any]) -> str:
    config["auto_map"] = {"AutoConfig": "configuration_nobodys.NobodysConfig"}
    return "auto_map needs configuration_nobodys.py"


def too_many_layers(state: State, config: dict[str, Any]) -> str:
    config["num_hidden_layers"] = 1
    return "has layer 1, but config.json says 1 layers"


@pytest.mark.parametrize("damage", [missing_layer, missing_rows, missing_code, too_many_layers])
def test_a_result_that_does_not_hold_together_is_not_published(
    tmp_path: Path,
    target: Path,
    run: Run,
    damage: Callable[[State, dict[str, Any]], str],
) -> None:
    state, config = random_state(), dict(CONFIG)
    expected = damage(state, config)
    source = save(tmp_path / "source", state, config)
    said = refuse(run, target, source)
    assert expected in said
    assert "--raw" in said
    # An earlier result stays.
    save(tmp_path / "good", random_state(), CONFIG)
    run("merge", tmp_path / "good", target)
    before = snapshot(target.parent)
    run("merge", source, target, "--overwrite", code=FAILED)
    assert snapshot(target.parent) == before
    # And check finds the same in what --raw writes.
    run("merge", source, target, "--raw", "--overwrite")
    assert expected in run("check", target, code=DIFFERENT).out


def drop_tensor(target: Path) -> str:
    state = load_file(target / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, target / "model.safetensors", {"format": "pt"})
    return "model.norm.weight"


def cut_file(target: Path) -> str:
    path = target / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return "cut short"


def stale_file(target: Path) -> str:
    save_file(random_state(), target / "model-00001-of-00001.safetensors", {"format": "pt"})
    return "model-00001-of-00001.safetensors"


def break_config(target: Path) -> str:
    (target / "config.json").write_text("{")
    return "config.json is not a JSON file"


def no_weights(target: Path) -> str:
    (target / "model.safetensors").unlink()
    return "no model.safetensors"


@pytest.mark.parametrize("damage", [drop_tensor, cut_file, stale_file, break_config, no_weights])
def test_check(source: Path, target: Path, run: Run, damage: Callable[[Path], str]) -> None:
    run("merge", source, target)
    assert run("check", target).out == f"{target}: nothing found\n"
    assert run("check", target, "--json").json == {"directory": str(target), "findings": []}
    expected = damage(target)
    done = run("check", target, code=DIFFERENT)
    assert done.err == ""
    assert [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert expected in done.out
    found = run("check", target, "--json", code=DIFFERENT).json["findings"]
    assert [f"{f['severity']}: {f['message']}" for f in found] == done.out.splitlines()
    assert run("check", target, "--quiet", code=DIFFERENT).out == ""


def test_check_of_nothing(tmp_path: Path, run: Run) -> None:
    assert "No such file" in run("check", tmp_path / "none", code=DIFFERENT).out
    run("check", tmp_path, code=DIFFERENT)
    run("check", code=USAGE)


def test_check_without_the_model(source: Path, target: Path, run: Run) -> None:
    """What only the model tells is not told without."""
    run("merge", source, target)
    drop_tensor(target)
    assert run("check", target, "--no-model").out == f"{target}: nothing found\n"


# --- the same bytes -------------------------------------------------------------------------------


def test_bytes_depend_on_neither_memory_nor_workers(tmp_path: Path, target: Path, run: Run) -> None:
    """A band of the head needs several buffers; in 4 KiB, one worker has less than a row."""
    state = random_state() | {
        EMBEDDING: torch.randn(520, 24),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 40, 24),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 24, 20),
    }
    state[HEAD] = state[EMBEDDING].clone()
    state = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    splits = {f"_orig_mod.{HEAD}": COLUMNS, f"_orig_mod.{EMBEDDING}": GRID}
    source = save(tmp_path / "source", state, config, splits=splits, world_size=4)
    options = ("--dtype", "bfloat16", "--keep-dtype", "*norm*", "--max-shard-size", "9000")
    results = []
    for number, (memory, workers) in enumerate((("4KiB", 1), ("9KB", 3), ("16MiB", 2))):
        folder = target.with_name(f"merged{number}")
        run("merge", source, folder, *options, "--memory", memory, "--workers", str(workers))
        results.append(digests(folder))
    assert results[0] == results[1] == results[2]
    found = load_directory(folder)
    assert HEAD not in found
    assert torch.equal(found[EMBEDDING], state[f"_orig_mod.{EMBEDDING}"].bfloat16())
    gate = state["_orig_mod.model.layers.0.mlp.experts.gate_up_proj"].bfloat16()
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(found[f"{name}.gate_proj.weight"], gate[expert, :20])
        assert torch.equal(found[f"{name}.up_proj.weight"], gate[expert, 20:])


# --- bad usage ------------------------------------------------------------------------------------


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    copy_stored("fsdp2_lora__t213", tmp_path / "lora")
    return tmp_path / "lora"


@pytest.fixture
def lora_only(tmp_path: Path) -> Path:
    copy_stored("fsdp2_lora_only__t213", tmp_path / "lora_only")
    return tmp_path / "lora_only"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(random_state(), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_options_that_need_an_adapter(source: Path, base: Path, target: Path, run: Run) -> None:
    for option in (["--base", base], ["--lora", "split"], ["--lora-alpha", "8"], ["--rslora"]):
        said = refuse(run, target, source, *option, code=USAGE)
        assert "holds no LoRA adapter" in said
        assert str(option[0]) in said
    run("merge", source, target, "--lora", "fold")


def test_base_needs_an_adapter_alone(lora: Path, base: Path, target: Path, run: Run) -> None:
    assert "no base weights" in refuse(run, target, lora, "--base", base, code=USAGE)


def test_fold_needs_a_base(lora_only: Path, target: Path, run: Run) -> None:
    said = refuse(run, target, lora_only, "--lora", "fold", "--lora-alpha", "8", code=USAGE)
    assert "no base weights" in said
    assert "--base DIR" in said


def test_keep_folds_into_nothing(lora_only: Path, base: Path, target: Path, run: Run) -> None:
    options = ("--lora", "keep", "--lora-alpha", "8", "--base", base)
    assert "--base" in refuse(run, target, lora_only, *options, code=USAGE)


def test_without_alpha(lora_only: Path, target: Path, run: Run) -> None:
    said = refuse(run, target, lora_only)
    assert "alpha of the LoRA adapter is unknown" in said
    assert "--lora-alpha" in said


@pytest.mark.parametrize("alpha", ["nan", "inf", "0", "-1", "1e400"])
def test_alpha_that_is_none(
    lora: Path, lora_only: Path, target: Path, run: Run, alpha: str
) -> None:
    for folder in (lora, lora_only):
        assert "--lora-alpha" in refuse(run, target, folder, "--lora-alpha", alpha, code=USAGE)


@pytest.mark.parametrize("option", ["--base", "--names-from"])
def test_models_that_are_none(
    tmp_path: Path, lora_only: Path, target: Path, run: Run, option: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, expected in (
        ("empty", "no weights here"),
        ("none", "no such directory"),
        ("file", "not a directory"),
    ):
        said = refuse(run, target, lora_only, option, tmp_path / name, "--lora-alpha", "8")
        assert f"{tmp_path / name}: {expected}" in said


@pytest.mark.parametrize(
    "options",
    [
        ["--transpose-experts", "yes"],
        ["--transpose-experts", "no"],
        ["--keep-dtype", "*norm*"],
        ["--keep-packed", "--names-from", "{base}"],
    ],
    ids=" ".join,
)
def test_options_that_do_nothing_alone(
    source: Path, base: Path, target: Path, run: Run, options: list[str]
) -> None:
    arguments = [part.format(base=base) for part in options]
    assert options[0] in refuse(run, target, source, *arguments, code=USAGE)


@pytest.mark.parametrize(
    "options",
    [["--memory", "1"], ["--memory", "-5"], ["--workers", "0"], ["--max-shard-size", "0"]],
    ids=" ".join,
)
def test_senseless_numbers_are_refused_before_anything_is_compared(
    tmp_path: Path, target: Path, run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    state = tied_state() | {HEAD: tied_state()[EMBEDDING].clone()}
    source = save(tmp_path / "source", state, CONFIG | {"tie_word_embeddings": True})

    def compare(*_: object) -> bool:
        raise AssertionError("reads all of the head and the embedding")

    monkeypatch.setattr("streammerge.adaptation.same_bits", compare)
    refuse(run, target, source, *options, code=USAGE)


def test_in_a_process_of_its_own(tmp_path: Path, target: Path) -> None:
    """Neither a plain merge nor a refusal shows a traceback; transformers is not imported."""
    good = save(tmp_path / "good", tied_state(), CONFIG | {"tie_word_embeddings": True})
    bad = save(tmp_path / "bad", random_state(), CONFIG | {"tie_word_embeddings": True})
    code = (
        "import sys; from streammerge.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if {'transformers', 'peft', 'torch'} & set(sys.modules) else code)"
    )
    for source, expected in ((good, 0), (bad, 1)):
        done = subprocess.run(
            [sys.executable, "-c", code, "merge", source, target.with_name(source.name)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=Path(__file__).parents[1],
        )
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr
    assert_same_tensors(
        open_model(target.with_name("good"), Qwen2ForCausalLM).state_dict(), tied_state()
    )
    assert [path.name for path in target.parent.iterdir()] == ["good"]
