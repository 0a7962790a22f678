"""The tensors and the config of models of any size, and how they are stored. Needs no torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

LAYOUTS = ("shard0", "shard1", "tp", "hsdp")
FORMATS = ("rank-files", "dcp", "safetensors", "zero")
DCP_FOLDER = "pytorch_model_fsdp_0"  # as accelerate calls it
DESCRIPTION = "made.json"  # in a checkpoint, for those who check what becomes of it

TENSORS_PER_LAYER = 12  # of Qwen2
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a model.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, vocab: as its config calls them.
        headless: leave the output head out and say that it is tied.
        model_type: as its config says it, a key of `ARCHITECTURES`.
        experts: per layer, each with `intermediate` columns; 0 for a dense model.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    headless: bool = False
    model_type: str = "qwen2"
    experts: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of the model; ``tp_dim`` is the dim that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


MODELS = {
    "qwen2.5-0.5b": Model(896, 4864, 24, 14, 2, 151936),
    "qwen2.5-1.5b": Model(1536, 8960, 28, 12, 2, 151936),
    "qwen2.5-3b": Model(2048, 11008, 36, 16, 2, 151936),
    "qwen2.5-7b": Model(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": Model(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": Model(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": Model(8192, 29568, 80, 64, 8, 152064),
    "llama-8b": Model(4096, 14336, 32, 32, 8, 128256, model_type="llama"),
    "llama-70b": Model(8192, 28672, 80, 64, 8, 128256, model_type="llama"),
    # 45,069 tensors, as a model with the experts of DeepSeek-V3 has.
    "moe-256": Model(4096, 1536, 58, 32, 4, 151936, model_type="qwen3_moe", experts=256),
    # As many tensors, but small ones, for planning: what that takes does not depend on their sizes.
    "moe-256-thin": Model(128, 64, 58, 4, 2, 4096, model_type="qwen3_moe", experts=256),
    "moe-256-tiny": Model(64, 32, 2, 4, 2, 1024, model_type="qwen3_moe", experts=256),
}


def parse_size(text: str) -> int:
    """Return bytes: ``"4GB"`` is decimal, ``"4GiB"`` binary."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parameters(model: Model) -> list[Parameter]:
    """Return the parameters of ``model`` in the order of its state dict."""
    listed = [Parameter("model.embed_tokens.weight", (model.vocab, model.hidden), 0)]
    for layer in range(model.layers):
        listed += _layer(model, f"model.layers.{layer}.")
    listed.append(Parameter("model.norm.weight", (model.hidden,), None))
    if not model.headless:
        listed.append(Parameter("lm_head.weight", (model.vocab, model.hidden), 0))
    return listed


def _layer(model: Model, prefix: str) -> Iterator[Parameter]:
    hidden, kv = model.hidden, model.kv_heads * model.head_dim
    for name, out in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
        yield Parameter(f"{prefix}self_attn.{name}.weight", (out, hidden), 0)
        if model.model_type == "qwen2":
            yield Parameter(f"{prefix}self_attn.{name}.bias", (out,), 0)
    yield Parameter(f"{prefix}self_attn.o_proj.weight", (hidden, hidden), 1)
    if model.model_type == "qwen3_moe":
        for name in ("q_norm", "k_norm"):
            yield Parameter(f"{prefix}self_attn.{name}.weight", (model.head_dim,), None)
        yield Parameter(f"{prefix}mlp.gate.weight", (model.experts, hidden), None)
        for expert in range(model.experts):
            yield from _mlp(model, f"{prefix}mlp.experts.{expert}.")
    else:
        yield from _mlp(model, f"{prefix}mlp.")
    yield Parameter(f"{prefix}input_layernorm.weight", (hidden,), None)
    yield Parameter(f"{prefix}post_attention_layernorm.weight", (hidden,), None)


def _mlp(model: Model, prefix: str) -> Iterator[Parameter]:
    for name in ("gate_proj", "up_proj"):
        yield Parameter(f"{prefix}{name}.weight", (model.intermediate, model.hidden), 0)
    yield Parameter(f"{prefix}down_proj.weight", (model.hidden, model.intermediate), 1)


def count_values(model: Model) -> int:
    """Return the number of values of all parameters."""
    return sum(parameter.numel for parameter in parameters(model))


def model_of_size(
    size: int, itemsize: int, *, largest: int | None = None, tensors: int | None = None
) -> Model:
    """Choose the dimensions of a Qwen2 model so that the weights take about ``size`` bytes.

    Args:
        size: Bytes of all weights together.
        itemsize: Bytes of one element.
        largest: Bytes of the embedding, which is then the largest tensor; the head is left out.
        tensors: At least so many tensors, rounded up to whole layers.
    """
    fixed = 2 if largest else 3
    layers = math.ceil((tensors - fixed) / TENSORS_PER_LAYER) if tensors else None
    room = size - largest if largest else int(0.9 * size)  # the rest of it goes to the embeddings
    if room < 0:
        raise ValueError("the largest tensor is larger than the model")
    chosen = None
    for hidden in (64, 128, 256, 512, 1024, 1536, 2048, 3584, 5120, 8192):
        head_dim = 128 if hidden >= 1024 else 16
        heads = hidden // head_dim
        candidate = Model(hidden, 6 * hidden, 1, heads, max(2, heads // 4), 64)
        one_layer = itemsize * sum(p.numel for p in parameters(candidate)[1:-2])
        if chosen is None or one_layer * (layers or 20) <= room:
            chosen = candidate, layers or max(1, room // one_layer), one_layer
    assert chosen is not None
    dims, count, one_layer = chosen
    row = dims.hidden * itemsize
    vocab = largest // row if largest else max(64, (size - count * one_layer) // (2 * row))
    if not largest:
        vocab -= vocab % 64
    return replace(dims, layers=count, vocab=vocab, headless=largest is not None)


def config(model: Model, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` with which transformers builds the model.

    Args:
        model: The dimensions.
        dtype: As torch calls it, without ``torch.``.
    """
    made: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.model_type]],
        "attention_dropout": 0.0,
        "bos_token_id": min(151643, model.vocab - 2),
        "eos_token_id": min(151645, model.vocab - 1),
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": 32768,
        "model_type": model.model_type,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": model.headless,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    if model.experts:
        made |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": model.intermediate,
            "norm_topk_prob": True,
            "num_experts": model.experts,
            "num_experts_per_tok": 8,
        }
    return made


def to_json(model: Model) -> dict[str, Any]:
    """Return the dimensions as a JSON object, from which ``Model(**...)`` makes them again."""
    return asdict(model)
