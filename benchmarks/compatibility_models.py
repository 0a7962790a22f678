"""The models whose checkpoints `compatibility` opens: tiny ones of many families."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "data"

VERSIONS = ("4.46.3", "4.57.6", "5.0.0", "5.24.0")
OLDEST, LAST_4, FIRST_5, NEWEST = VERSIONS

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


def fixture(name: str) -> Path:
    """The directory of a stored checkpoint."""
    return FIXTURES / f"{name}__t213"
