"""Open merged checkpoints with several versions of transformers; COMPATIBILITY.md keeps the result.

    python benchmarks/compatibility.py [--scratch DIR] [--python VERSION=PATH ...] [--update]

Makes a virtual environment per version, writes tiny checkpoints with the newest of them as verl
saves them, merges each with and without ``--compat 4``, and opens every result in every
environment. A result is right where it opens without a missing or an unexpected key, every
parameter has the trained value, and config, tokenizer, dtypes and logits are those of the model
that was saved. Exits 1 if a cell is not right and not listed in ``KNOWN``, if one that is listed is
otherwise, or if the kept table differs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "tests" / "data"
KEPT = HERE / "COMPATIBILITY.md"
RESULT_MARK = "<!-- The rest is what `compatibility.py --update` writes. -->\n"

TORCH = "2.13.0"
VERSIONS = ("4.46.3", "4.57.6", "5.0.0", "5.24.0")
OLDEST, LAST_4, FIRST_5, NEWEST = VERSIONS
MERGES: dict[str, tuple[str, ...]] = {"--compat 4": ("--compat", "4"), "no --compat": ()}
WORLD_SIZE = 4

CAUSAL_LM = "AutoModelForCausalLM"
IMAGE_TEXT = "AutoModelForImageTextToText"
TOKEN_CLASSIFICATION = "AutoModelForTokenClassification"

State = dict[str, Any]


def load(name: str) -> Any:
    """Import what only the environments have."""
    return importlib.import_module(name)


def is_version_4() -> bool:
    """Whether the transformers at hand is 4.x."""
    version: str = load("transformers").__version__
    return version.startswith("4.")


# --- the checkpoints ------------------------------------------------------------------------------

# Sizes that four ranks cannot share evenly, but for those that a model's heads settle. 5.x
# multiplies experts in groups, whose rows must be multiples of 16 bytes.
VOCAB = 67
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 54,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
THETA = 500_000.0  # the default of none of these models
ROPE = {"rope_type": "default", "rope_theta": THETA}
IMAGE_TOKEN, VISION_START, VISION_END = VOCAB - 1, VOCAB - 3, VOCAB - 2
LORA_RANK, LORA_ALPHA = 8, 12
LORA_TARGETS = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Trained:
    """A model of transformers, and what there is to say about its checkpoint.

    Attributes:
        model: with the values that a reader must find.
        auto_class: what a user opens it with.
        inputs: what the model takes.
        state: what the rank files hold, if not the model's own state dict.
        meta: ``lora_train_meta.json``, if there is one.
        extra: tensors of the checkpoint that no model has.
    """

    model: Any
    auto_class: str
    inputs: Mapping[str, Any]
    state: State | None = None
    meta: Mapping[str, object] | None = None
    extra: tuple[str, ...] = ()


def build(config_class: str, architecture: str, *, dtype: str = "float32", **options: Any) -> Any:
    """Return a model with random weights of a size that makes attention care about positions."""
    torch, transformers = load("torch"), load("transformers")
    config = getattr(transformers, config_class)(**options)
    config.architectures = [architecture]
    config.dtype = getattr(torch, dtype)
    torch.manual_seed(3)
    model = getattr(transformers, architecture)._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn_like(parameter), alpha=spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
    return model.eval()


def text_inputs() -> State:
    """Token ids."""
    torch = load("torch")
    return {"input_ids": torch.arange(2 * 11).reshape(2, 11) * 3 % VISION_START}


def picture_inputs(tokens: int, **patches: Any) -> State:
    """Token ids with a picture in each row, and the picture."""
    torch = load("torch")
    words = text_inputs()["input_ids"]
    marks = torch.tensor([VISION_START, *[IMAGE_TOKEN] * tokens, VISION_END]).expand(2, -1)
    ids = torch.cat([words[:, :2], marks, words[:, 2:]], dim=1)
    return {"input_ids": ids, **patches}


def rope() -> dict[str, Any]:
    """What a config calls a theta of its own."""
    return {"rope_theta": THETA} if is_version_4() else {"rope_parameters": ROPE}


def language_model(config_class: str, architecture: str, **options: Any) -> Trained:
    """A model for text."""
    model = build(config_class, architecture, **{**TEXT, **rope(), **options})
    return Trained(model, CAUSAL_LM, text_inputs())


def qwen2() -> Trained:
    return language_model("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=True)


def qwen3() -> Trained:
    return language_model("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, dtype="bfloat16")


def llama(**options: Any) -> Trained:
    return language_model("LlamaConfig", "LlamaForCausalLM", **options)


def llama_with_scaled_rope() -> Trained:
    """Scaled enough for the inputs here to show it."""
    scaled = {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    return llama(rope_parameters=scaled)


def gemma3_ropes() -> dict[str, object]:
    """A theta for each kind of layer."""
    local = {"rope_type": "default", "rope_theta": 20_000.0}
    return {"full_attention": ROPE, "sliding_attention": local}


def gemma3_text() -> Trained:
    return language_model(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=gemma3_ropes(),
    )


def gemma3() -> Trained:
    """Tied, with a vision tower that 4.x names differently."""
    torch = load("torch")
    text = {**TEXT, "head_dim": 8, "sliding_window": 6, "rope_parameters": gemma3_ropes()}
    model = build(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 30,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    inputs = picture_inputs(4, pixel_values=torch.randn(2, 3, 8, 8))
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).long()
    return Trained(model, IMAGE_TEXT, inputs)


def qwen2_5_vl() -> Trained:
    """Two towers that files name differently."""
    torch = load("torch")
    model = build(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 30,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": TEXT["hidden_size"],
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    pixels = torch.randn(2 * 4 * 4, 3 * 2 * 4 * 4)
    grid = torch.tensor([[1, 4, 4]] * 2)
    inputs = picture_inputs(4, pixel_values=pixels, image_grid_thw=grid)
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).int()
    return Trained(model, IMAGE_TEXT, inputs)


def deepseek_v3() -> Trained:
    """Experts, shared ones, one layer without, a buffer that is no parameter."""
    scaled = {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    return language_model(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **EXPERTS,
        num_key_value_heads=4,
        n_routed_experts=6,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=10,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=6,
        rope_parameters=scaled,
    )


def qwen3_moe() -> Trained:
    """Experts, one layer without."""
    return language_model(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        **EXPERTS,
        head_dim=8,
        num_experts=6,
        mlp_only_layers=[0],
    )


def mixtral() -> Trained:
    return language_model(
        "MixtralConfig",
        "MixtralForCausalLM",
        intermediate_size=12,
        num_local_experts=6,
        num_experts_per_tok=2,
    )


def token_classification() -> Trained:
    """A critic."""
    options = {**TEXT, **rope(), "num_labels": 1}
    model = build("Qwen2Config", "Qwen2ForTokenClassification", **options)
    return Trained(model, TOKEN_CLASSIFICATION, text_inputs())


def llama_lora() -> Trained:
    """The rank files hold base and adapter, the model what becomes of them."""
    torch = load("torch")
    trained = llama()
    state: State = {}
    for name, weight in trained.model.state_dict().items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(LORA_TARGETS):
            state[f"base_model.model.{name}"] = weight
            continue
        # Eighths, and a scale of 1.5: products and sums are exact, in whatever order.
        rows, columns = weight.shape
        a = torch.randint(-8, 9, (LORA_RANK, columns)) / 8
        b = torch.randint(-8, 9, (rows, LORA_RANK)) / 8
        state[f"base_model.model.{layer}.base_layer.weight"] = weight.clone()
        state[f"base_model.model.{layer}.lora_A.default.weight"] = a
        state[f"base_model.model.{layer}.lora_B.default.weight"] = b
        weight.add_(b @ a, alpha=LORA_ALPHA / LORA_RANK)
    meta = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "task_type": "CAUSAL_LM"}
    return Trained(trained.model, CAUSAL_LM, trained.inputs, state, meta)


def value_head() -> Trained:
    """As TRL wraps a model."""
    torch = load("torch")
    trained = qwen2()
    state = {f"pretrained_model.{k}": v for k, v in trained.model.state_dict().items()}
    state["v_head.summary.weight"] = torch.randn(1, TEXT["hidden_size"])
    state["v_head.summary.bias"] = torch.randn(1)
    return Trained(trained.model, CAUSAL_LM, trained.inputs, state)


def stored(folder: Path) -> Trained:
    """A checkpoint of the tests: the model with the values that are stored beside it."""
    transformers, safetensors = load("transformers"), load("safetensors.torch")
    merged = folder / "expected_merged.safetensors"
    tensors = safetensors.load_file(merged if merged.exists() else folder / "expected.safetensors")
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    config = transformers.AutoConfig.from_pretrained(folder / "huggingface")
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)._from_config(config)
    state = {name: tensors[name] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)  # with its own dtypes
    model.tie_weights()
    causal = architecture.endswith("ForCausalLM")
    extra = tuple(tensors.keys() - state.keys())
    auto_class = CAUSAL_LM if causal else TOKEN_CLASSIFICATION
    return Trained(model.eval(), auto_class, text_inputs(), extra=extra)


MADE: dict[str, Callable[[], Trained]] = {
    "Qwen2, tied": qwen2,
    "Qwen3, bfloat16": qwen3,
    "Llama": llama,
    "Llama, scaled RoPE": llama_with_scaled_rope,
    "Gemma3 text, tied": gemma3_text,
    "Gemma3 with pictures": gemma3,
    "Qwen3-MoE": qwen3_moe,
    "Mixtral": mixtral,
    "DeepSeek-V3": deepseek_v3,
    "Qwen2.5-VL": qwen2_5_vl,
    "Qwen2 token classification": token_classification,
    "Llama with LoRA": llama_lora,
    "Qwen2 with value head": value_head,
}
MADE_BY_4: dict[str, Callable[[], Trained]] = {
    f"Qwen3-MoE, trained with {LAST_4}": qwen3_moe,
}
STORED = ("fsdp2_w4", "fsdp2_lora", "fsdp2_moe", "fsdp2_tokencls", "fsdp2_compiled")
# Models of the hub, as 4.x wrote them: only their names and shapes count.
BASES: dict[str, Callable[[], Trained]] = {
    "Gemma3 with pictures": gemma3,
    "Qwen2.5-VL": qwen2_5_vl,
}
# Rows that merge the checkpoint of another row with more options; {base} is one of `BASES`.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Llama, `--max-shard-size 30KB`": ("Llama", ("--max-shard-size", "30KB")),
    "Gemma3 with pictures, `--names-from`": ("Gemma3 with pictures", ("--names-from", "{base}")),
    "Qwen2.5-VL, `--names-from`": ("Qwen2.5-VL", ("--names-from", "{base}")),
    "fsdp2_w4, `--dtype bfloat16`": ("fsdp2_w4", ("--dtype", "bfloat16")),
}


# --- writing them ---------------------------------------------------------------------------------


def make(out: Path, cases: Mapping[str, Callable[[], Trained]]) -> None:
    """Write checkpoints to ``out/<name>/source`` and what to expect to ``out/<name>/reference``."""
    for name, case in cases.items():
        trained = case()
        save_checkpoint(out / name / "source", trained)
        tokenizer = save_tokenizer(out / name / "source" / "huggingface")
        save_reference(out / name / "reference", trained, tokenizer)


def make_all(rows: Path, bases: Path) -> None:
    """Write what the version at hand writes, and what to expect of the stored checkpoints."""
    if is_version_4():
        make(rows, MADE_BY_4)
        for name, case in BASES.items():
            case().model.save_pretrained(bases / name)
    else:
        make(rows, MADE)
        for name in STORED:
            save_reference(rows / name / "reference", stored(fixture(name)), None)


def fixture(name: str) -> Path:
    """The directory of a stored checkpoint."""
    return FIXTURES / f"{name}__t213"


def save_checkpoint(source: Path, trained: Trained) -> None:
    """Write what verl's checkpoint manager does with FSDP2."""
    transformers = load("transformers")
    state = trained.model.state_dict() if trained.state is None else trained.state
    buffers = {name for name, _ in trained.model.named_buffers()}
    save_rank_files(source, state, buffers)
    fsdp_config = {"FSDP_version": 2, "world_size": WORLD_SIZE}
    (source / "fsdp_config.json").write_text(json.dumps(fsdp_config))
    if trained.meta is not None:
        (source / "lora_train_meta.json").write_text(json.dumps(trained.meta))
    trained.model.config.save_pretrained(source / "huggingface")
    if trained.model.can_generate():
        generation = transformers.GenerationConfig(max_new_tokens=5, eos_token_id=1)
        generation.save_pretrained(source / "huggingface")


def save_rank_files(folder: Path, state: State, buffers: set[str]) -> None:
    """Save parameters as DTensors over four ranks, buffers whole. One process is each in turn."""
    torch, dist = load("torch"), load("torch.distributed")
    fake = load("torch.testing._internal.distributed.fake_pg")
    device_mesh = load("torch.distributed.device_mesh")
    tensors = load("torch.distributed.tensor")
    folder.mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=WORLD_SIZE)
        mesh = device_mesh.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
        sharded: dict[int, Any] = {}  # by address, as tied parameters are one DTensor
        saved = {}
        for name, tensor in state.items():
            saved[name] = tensor
            if name in buffers:
                continue
            if tensor.data_ptr() not in sharded:
                rows = -(-len(tensor) // WORLD_SIZE)
                sharded[tensor.data_ptr()] = tensors.DTensor.from_local(
                    tensor.detach()[rank * rows : (rank + 1) * rows].clone(),
                    mesh,
                    [tensors.Shard(0)],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            saved[name] = sharded[tensor.data_ptr()]
        torch.save(saved, folder / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")
        dist.destroy_process_group()


def save_reference(
    reference: Path, trained: Trained, tokenizer: Mapping[str, object] | None
) -> None:
    """Write what a reader must find.

    ``model.safetensors`` has the values under the names that transformers saves them by,
    ``forward.safetensors`` inputs, logits and the output head.
    """
    torch, safetensors = load("torch"), load("safetensors.torch")
    model = trained.model
    model.save_pretrained(reference)
    ((dtype, _),) = Counter(p.dtype for p in model.parameters()).most_common(1)
    forward = dict(trained.inputs)
    head = model.get_output_embeddings()
    if head is not None:
        forward["head"] = head.weight.detach().clone()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others do not take all sizes
    with torch.no_grad():
        forward["logits"] = model.to(dtype)(**trained.inputs).logits.float()
    safetensors.save_file(forward, reference / "forward.safetensors")
    state = trained.state or {}
    if value_head := {n: t for n, t in state.items() if n.startswith("v_head.")}:
        safetensors.save_file(value_head, reference / "value_head.safetensors")
    expected = {
        "auto_class": trained.auto_class,
        "dtype": str(dtype),
        "tied": head is not None and head.weight is model.get_input_embeddings().weight,
        "rope": rope_of(model.config),
        "tokenizer": tokenizer,
        "extra": trained.extra,
    }
    (reference / "expected.json").write_text(json.dumps(expected))


CHAT = [{"role": "user", "content": "to be or not to be"}]
PROMPT = "<|start|>to be<|end|> or not"


def save_tokenizer(directory: Path) -> dict[str, object]:
    """Write a tokenizer with special tokens and a chat template; return what it makes of texts."""
    transformers, tokenizers = load("transformers"), load("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator([PROMPT, str(CHAT)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        additional_special_tokens=["<|start|>", "<|end|>"],
        model_max_length=64,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    return tokenized(tokenizer)


def tokenized(tokenizer: Any) -> dict[str, object]:
    """What a tokenizer makes of texts."""
    ids = tokenizer(PROMPT)["input_ids"]
    has_template = tokenizer.chat_template is not None
    return {
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "chat template": tokenizer.apply_chat_template(CHAT, tokenize=False)
        if has_template
        else None,
        "eos": tokenizer.eos_token_id,
        "length": tokenizer.model_max_length,
    }


# --- opening the results --------------------------------------------------------------------------

Problems = list[tuple[str, str]]  # in few words, and details

# Files name towers as one version or another has them in memory.
TOWERS = (
    (r"^(?:model\.language_model|language_model\.model)\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^model\.(?=visual\.|vision_tower\.|multi_modal_projector\.)", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)


def read_all(rows: Path, merge: str) -> dict[str, Problems]:
    """Return what is wrong with each result of one kind of merge."""
    transformers = load("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return {
        folder.name: problems_of(folder / merge, folder / "reference")
        for folder in sorted(rows.iterdir())
    }


def problems_of(merged: Path, reference: Path) -> Problems:
    """Open one result as a user would and compare it with what was saved."""
    expected = json.loads((reference / "expected.json").read_text())
    if not (merged / "config.json").exists():
        return [("not merged", "")]
    model_type = json.loads((merged / "config.json").read_text())["model_type"]
    if model_type not in load("transformers").CONFIG_MAPPING:
        return [("unknown model", "")]
    checks: tuple[tuple[str, Callable[[], Problems]], ...] = (
        ("config", lambda: config_problems(merged, expected["rope"])),
        ("tokenizer", lambda: tokenizer_problems(merged, expected["tokenizer"])),
        ("loading", lambda: model_problems(merged, reference, expected, auto=True)),
        ("loading", lambda: model_problems(merged, reference, expected, auto=False)),
    )
    problems: dict[str, str] = {}
    for what, check in checks:
        try:
            found = check()
        except Exception as error:
            found = [(f"{what}: {type(error).__name__}", traceback.format_exc())]
        problems.update((k, v) for k, v in found if k not in problems)
    return list(problems.items())


def config_problems(merged: Path, expected: Mapping[str, object]) -> Problems:
    """Compare the parameters of RoPE that 4.x and 5.x call differently."""
    found = rope_of(load("transformers").AutoConfig.from_pretrained(merged))
    return [
        (f"{name} {found.get(name)}", f"expected {value}")
        for name, value in expected.items()
        if found.get(name) != value
    ]


def rope_of(config: Any) -> dict[str, object]:
    """The thetas of the text model, under the names of 4.x."""
    names = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}
    text = config.get_text_config()
    if is_version_4():  # it keeps 5.x's keys too, without a look at them
        return {name: getattr(text, name) for name in names if hasattr(text, name)}
    rope = text.rope_parameters
    if "full_attention" in rope:
        return {name: rope[kind]["rope_theta"] for name, kind in names.items()}
    return {"rope_theta": rope["rope_theta"]}


def tokenizer_problems(merged: Path, expected: Mapping[str, object] | None) -> Problems:
    """Compare what a tokenizer makes of texts, if there was one."""
    if expected is None:
        return []
    found = tokenized(load("transformers").AutoTokenizer.from_pretrained(merged))
    return [
        (f"tokenizer: {'no' if found[key] is None else 'other'} {key}", f"{found[key]!r}")
        for key, value in expected.items()
        if found[key] != value
    ]


def model_problems(
    merged: Path, reference: Path, expected: Mapping[str, Any], *, auto: bool
) -> Problems:
    """Load a result in the dtype that it is in, or in the reader's default."""
    transformers, safetensors = load("transformers"), load("safetensors.torch")
    options = {("torch_dtype" if is_version_4() else "dtype"): "auto"} if auto else {}
    model, loading = getattr(transformers, expected["auto_class"]).from_pretrained(
        merged, output_loading_info=True, **options
    )
    own = set(expected["extra"])
    keys = {kind: sorted(map(str, set(found) - own)) for kind, found in loading.items()}
    if any(keys.values()):  # then the rest follows
        return [
            (f"{len(k)} {kind.replace('_', ' ')}", ", ".join(k)) for kind, k in keys.items() if k
        ]
    forward = safetensors.load_file(reference / "forward.safetensors")
    problems = value_problems(model, reference, expected["dtype"] if auto else None)
    problems += head_problems(model, forward.pop("head", None), tied=expected["tied"])
    if (reference / "value_head.safetensors").exists():
        heads = [safetensors.load_file(d / "value_head.safetensors") for d in (merged, reference)]
        problems += different("of the value head", *heads)
    if auto:
        problems += forward_problems(model, forward)
    return problems


def value_problems(model: Any, reference: Path, dtype: str | None) -> Problems:
    """Compare the parameters, under the names that this version saves them by.

    Args:
        model: as opened.
        reference: directory of what was saved.
        dtype: what most tensors are in; None if the reader chose another.
    """
    safetensors = load("safetensors.torch")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = plain_names(safetensors.load_file(Path(folder) / "model.safetensors"))
    stored = plain_names(safetensors.load_file(reference / "model.safetensors"))
    expected = {n: t.to(found[n].dtype) if n in found else t for n, t in stored.items()}
    problems = different("values", found, expected)
    if dtype is not None:
        # A tensor of another dtype than most is loaded in that of most, or as it is.
        fine = {n: {dtype, str(t.dtype)} for n, t in stored.items()}
        wrong = [n for n, t in found.items() if n in fine and str(t.dtype) not in fine[n]]
        problems += [(f"{len(wrong)} dtypes differ", ", ".join(wrong))] if wrong else []
    return problems


def plain_names(tensors: State) -> State:
    """The same tensors, without what versions name differently."""
    for pattern, replacement in TOWERS:
        tensors = {re.sub(pattern, replacement, name): t for name, t in tensors.items()}
    return tensors


def different(what: str, found: State, expected: State) -> Problems:
    """Compare tensors by name and value."""
    torch = load("torch")
    names = found.keys() ^ expected.keys()
    names |= {n for n in found.keys() & expected.keys() if not torch.equal(found[n], expected[n])}
    return [(f"{len(names)} {what} differ", ", ".join(sorted(names)))] if names else []


def head_problems(model: Any, expected: Any, *, tied: bool) -> Problems:
    """Compare the output head, which no file holds where it is tied."""
    if expected is None:
        return []
    weight = model.get_output_embeddings().weight
    problems = different("heads", {"": weight}, {"": expected.to(weight.dtype)})
    if tied and weight.data_ptr() != model.get_input_embeddings().weight.data_ptr():
        problems.append(("head not tied", ""))
    return problems


def forward_problems(model: Any, forward: State) -> Problems:
    """Compare logits, if the model gives any."""
    torch = load("torch")
    expected = forward.pop("logits")
    known = inspect.signature(model.forward).parameters
    inputs = {name: tensor for name, tensor in forward.items() if name in known}
    try:
        with torch.no_grad():
            logits = model.eval()(**inputs).logits.float()
    except RuntimeError as error:
        return [("forward fails", str(error))]
    worst = ((logits - expected).abs().max() / expected.abs().max()).item()
    limit = 1e-4 if model.dtype == torch.float32 else 0.05
    return [("logits differ", f"by {worst:.2g} of the largest")] if not worst <= limit else []


# --- all together ---------------------------------------------------------------------------------

Cells = dict[tuple[str, str, str], Problems]  # merge, row, version


@dataclass(frozen=True, slots=True)
class Known:
    """Cells that are not right, and why. The first four are regular expressions."""

    merge: str
    row: str
    version: str
    cell: str
    where: str
    why: str

    def covers(self, merge: str, row: str, version: str) -> bool:
        pairs = ((self.merge, merge), (self.row, row), (self.version, version))
        return all(re.fullmatch(pattern, text) for pattern, text in pairs)


# The first that covers a cell counts.
KNOWN = (
    Known(
        ".*",
        "(Qwen3|Gemma3|DeepSeek-V3|Qwen2.5-VL).*",
        OLDEST,
        "unknown model",
        f"unknown model, {OLDEST}",
        "that version does not have it.",
    ),
    Known(
        ".*",
        "fsdp2_(w4|compiled)",
        OLDEST,
        "forward fails",
        f"fsdp2_w4 and fsdp2_compiled, {OLDEST}",
        "they hold bfloat16 weights and float32 norms. Later versions load all in one dtype; this "
        "one loads each as it is and cannot multiply them. The merge warns of it; "
        "`--dtype bfloat16` helps, as its row shows.",
    ),
    Known(
        ".*",
        "fsdp2_moe",
        r"5\..*",
        "forward fails",
        "fsdp2_moe, 5.x",
        "all values are right, but 5.x multiplies experts in groups, which takes rows of a "
        "multiple of 16 bytes; those of this toy have 24.",
    ),
    Known(
        "no --compat",
        "(?!fsdp2_|Qwen3-MoE, trained).*",
        r"4\..*",
        r"rope_theta 10+\.0; .*tokenizer: ValueError; .*",
        "without `--compat`, 4.x",
        "this is what the option is for. 4.x takes its default for rope_theta, among others, and "
        "knows no such tokenizer class. The merge warns of it. The stored checkpoints have the "
        "defaults and no tokenizer.",
    ),
    Known(
        "no --compat",
        "Qwen3-MoE",
        FIRST_5,
        "loading: RuntimeError",
        f"Qwen3-MoE without `--compat`, {FIRST_5}",
        "5.24 writes the number of experts under a name that 5.0 does not read.",
    ),
    Known(
        ".*",
        "Gemma3 with pictures",
        f"{LAST_4}|{FIRST_5}",
        "21 missing keys; 21 unexpected keys",
        "Gemma3 with pictures, before 5.24",
        "the vision tower is stored as 5.24 names it in memory, without the level `vision_model.` "
        "that earlier versions have. The merge warns of it; `--names-from` a model of the Hub "
        "gives names that all open, as its row shows.",
    ),
)


def is_known(merge: str, row: str, version: str, cell: str) -> bool:
    """Whether a cell is as it has to be."""
    for known in KNOWN:
        if known.covers(merge, row, version):
            return re.fullmatch(known.cell, cell) is not None
    return cell == "right"


def environment(version: str, folder: Path) -> str | None:
    """Return the Python of a virtual environment, made if need be; None if that cannot be."""
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        wanted = [f"torch=={TORCH}", f"transformers=={version}"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-qq", *wanted],
        ):
            if subprocess.run(command, check=False).returncode != 0:
                print(f"transformers {version} cannot be installed here", file=sys.stderr)
                return None
        done.touch()
    return str(python)


def run(python: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def step(python: str, name: str, *arguments: object) -> Any:
    """Run one of `STEPS` in an environment and return what it does."""
    done = run(python, __file__, "--step", name, *arguments)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed in {python}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


STEPS: dict[str, Callable[..., object]] = {
    "make": lambda rows, bases: make_all(Path(rows), Path(bases)),
    "read": lambda rows, merge: read_all(Path(rows), merge),
    "versions": lambda: {n: load(n).__version__ for n in ("transformers", "tokenizers", "torch")},
}


def merge_all(python: str, rows: Path, bases: Path) -> None:
    """Merge every checkpoint, with and without ``--compat 4``."""
    for row, (origin, _) in VARIANTS.items():
        (rows / row).mkdir()
        (rows / row / "reference").symlink_to(rows / origin / "reference")
    for folder in sorted(rows.iterdir()):
        origin, options = VARIANTS.get(folder.name, (folder.name, ()))
        source = fixture(origin) if origin in STORED else rows / origin / "source"
        own = [option.format(base=bases / origin) for option in options]
        for merge, more in MERGES.items():
            arguments = ("merge", source, folder / merge, "--quiet", *own, *more)
            done = run(python, "-m", "streammerge", *arguments)
            if done.returncode != 0:
                print(f"{folder.name}, {merge}: {done.stderr}", file=sys.stderr)


def measure(scratch: Path, pythons: Mapping[str, str]) -> Cells:
    """Write the checkpoints, merge them, open the results."""
    rows, bases = scratch / "rows", scratch / "bases"
    step(pythons[NEWEST], "make", rows, bases)
    step(pythons[LAST_4], "make", rows, bases)
    merge_all(pythons[NEWEST], rows, bases)
    return {
        (merge, row, version): problems
        for version, python in pythons.items()
        for merge in MERGES
        for row, problems in step(python, "read", rows, merge).items()
    }


def cell(problems: Problems) -> str:
    return "; ".join(words for words, _ in problems) or "right"


def table(cells: Cells, merge: str, versions: Sequence[str]) -> str:
    """Return the cells of one kind of merge as a Markdown table."""
    lines = [f"| `{merge}` | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    for row in (*MADE, *MADE_BY_4, *VARIANTS, *STORED):
        found = [cell(cells[merge, row, version]) for version in versions]
        lines.append(f"| {row} | {' | '.join(found)} |")
    return "\n".join(lines)


def surprises(cells: Cells) -> list[str]:
    """Say what is not as it has to be."""
    lines = []
    for (merge, row, version), problems in cells.items():
        if not is_known(merge, row, version, cell(problems)):
            lines.append(f"{row}, {merge}, {version}: {cell(problems)}")
            lines += [f"    {words}: {details}" for words, details in problems]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and results")
    parser.add_argument("--environments", type=Path, help="make environments here, or use them")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VERSION=PATH",
        help="the Python of an environment with that version; may be repeated",
    )
    parser.add_argument("--update", action="store_true", help=f"rewrite {KEPT.name}")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)  # within an environment
    args = parser.parse_args(argv)
    if args.step:
        name, *arguments = args.step
        print(json.dumps(STEPS[name](*arguments)))
        return 0

    given = dict(text.split("=", 1) for text in args.python)
    with tempfile.TemporaryDirectory(prefix="compatibility-", dir=args.scratch) as folder:
        scratch = Path(folder).resolve()
        environments = args.environments or scratch / "environments"
        found = {v: given.get(v) or environment(v, environments / v) for v in VERSIONS}
        pythons = {version: python for version, python in found.items() if python}
        packages = {version: step(python, "versions") for version, python in pythons.items()}
        for version in (LAST_4, NEWEST):
            if version not in pythons:
                parser.error(f"transformers {version} writes checkpoints, so it is needed")
        for version, used in packages.items():
            if used["transformers"] != version:
                parser.error(f"{pythons[version]} has transformers {used['transformers']}")
        cells = measure(scratch, pythons)

    tables = [table(cells, merge, list(pythons)) for merge in MERGES]
    lists = [
        [
            ", ".join(f"{name} {number}" for name, number in used.items())
            for used in packages.values()
        ],
        [f"{known.where}: {known.why}" for known in KNOWN],
    ]
    first, last = ("\n".join(f"- {line}" for line in lines) for lines in lists)
    text = "\n\n".join([first, *tables, last]) + "\n"
    print(text)
    wrong = surprises(cells)
    if args.update:
        kept, _, _ = KEPT.read_text().partition(RESULT_MARK)
        KEPT.write_text(f"{kept}{RESULT_MARK}\n{text}")
    elif len(pythons) == len(VERSIONS) and not all(t in KEPT.read_text() for t in tables):
        wrong.append(f"{KEPT.name} has other tables; --update rewrites them")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
