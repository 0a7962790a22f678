"""Tiny models with a trained LoRA adapter, one for each way in which PEFT can adapt a layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

# alpha / r = 7 / 3 is no power of two, so a product that counts wrongly shows in every bit.
RANK, ALPHA = 3, 7


@dataclass(frozen=True, slots=True, eq=False)
class PeftCase:
    """A model with an adapter that is not zero.

    Attributes:
        description: what the case is about.
        model: the trained model, in eval mode.
        config: of its adapter.
        base: the model before training, with its own copies of the weights.
        inputs: something to run both with.
        model_type: as ``config.json`` would say it; None for toys.
    """

    description: str
    model: PeftModel
    config: LoraConfig
    base: nn.Module
    inputs: torch.Tensor
    model_type: str | None

    def outputs(self, model: nn.Module) -> torch.Tensor:
        """What a model makes of the inputs."""
        with torch.no_grad():
            found = model(self.inputs)
        return found if isinstance(found, torch.Tensor) else found.logits

    def merged(self) -> nn.Module:
        """The model with the adapter folded in by PEFT."""
        return copy.deepcopy(self.model).merge_and_unload()

    def trained_names(self) -> list[str]:
        """Names of what is trained."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]


# --- toys -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with linear weights, one of them square. No size divides by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.norm(x + self.down(torch.tanh(self.up(self.q(x)))))


class Toy(nn.Module):
    """An embedding, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs for token ids."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Conv1DToy(nn.Module):
    """Layers with weights ``[in, out]``; `proj` is square."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.fc = Conv1D(10, 6)
        self.out = Conv1D(6, 10)
        self.proj = Conv1D(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs for token ids."""
        return self.proj(self.out(torch.tanh(self.fc(self.embed(ids)))))


class ConvToy(nn.Module):
    """Convolutions over 1, 2 and 3 dims, and one over 2 with a kernel of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.line = nn.Conv1d(6, 5, 3, padding=1)
        self.point = nn.Conv2d(5, 6, 1)
        self.plane = nn.Conv2d(6, 7, (3, 1), padding=(1, 0))
        self.cube = nn.Conv3d(7, 3, (1, 3, 1), padding=(0, 1, 0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs for token ids."""
        x = torch.tanh(self.line(self.embed(ids).mT))
        x = torch.tanh(self.plane(self.point(x[..., None])))
        return self.cube(x[..., None])


class Experts(nn.Module):
    """Experts as transformers 5 keeps them, ``[E, out, in]``, or transposed as gpt-oss has them."""

    def __init__(self, *, is_transposed: bool, inner: int = 5) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = (3, 2 * inner, 6), (3, 6, inner)
        if is_transposed:
            up, down = (3, 6, 2 * inner), (3, inner, 6)
        self.gate_up_proj = nn.Parameter(torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all experts."""
        up, down = self.gate_up_proj, self.down_proj
        if not self.is_transposed:
            up, down = up.mT, down.mT
        gate, value = torch.einsum("ti,eio->teo", x, up).chunk(2, dim=-1)
        return torch.einsum("teo,eoh->th", torch.tanh(gate) * value, down)


class Router(nn.Module):
    """A module that is no `nn.Linear` and has a matrix called ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return x @ self.weight.T


class MoeToy(nn.Module):
    """A layer of experts."""

    def __init__(self, *, is_transposed: bool, inner: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.gate = Router()
        self.experts = Experts(is_transposed=is_transposed, inner=inner)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs for token ids."""
        x = self.embed(ids)
        return self.experts(x) * self.gate(x).amax(-1)[..., None]


# --- rows -----------------------------------------------------------------------------------------


def linear() -> PeftCase:
    """Linear layers, those of a name in all blocks."""
    return make_case("linear layers", Toy, target_modules=["q", "down"])


def some_layers() -> PeftCase:
    """Linear layers of one block only, so that their names must be given whole."""
    return make_case("one block of two", Toy, target_modules=["layers.1.up", "head"])


def bfloat16() -> PeftCase:
    """A base in bfloat16; PEFT keeps the adapter in float32."""
    return make_case("bfloat16 base", lambda: Toy().bfloat16(), target_modules=["q", "up", "down"])


def rslora() -> PeftCase:
    """The factor alpha / sqrt(r)."""
    return make_case("rsLoRA", Toy, target_modules=["q", "up"], use_rslora=True)


def patterns() -> PeftCase:
    """Ranks and alphas that differ between layers."""
    return make_case(
        "rank_pattern, alpha_pattern",
        Toy,
        target_modules=["q", "up", "down"],
        rank_pattern={"layers.0.q": 5, "down": 2},
        alpha_pattern={r"layers\.1\..*": 3.5},
    )


def fan_in_fan_out() -> PeftCase:
    """GPT-2, whose weights are ``[in, out]``, one of them square; tied head."""
    config = GPT2Config(
        vocab_size=13,
        n_positions=8,
        n_embd=6,
        n_layer=1,
        n_head=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return make_case(
        "fan_in_fan_out",
        lambda: GPT2LMHeadModel(config),
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )


def fan_in_fan_out_toy() -> PeftCase:
    """The same in a model whose type tells nothing."""
    return make_case(
        "fan_in_fan_out, unknown model",
        Conv1DToy,
        target_modules=["fc", "out", "proj"],
        fan_in_fan_out=True,
    )


def embedding() -> PeftCase:
    """An embedding and a linear layer."""
    return make_case("embedding", Toy, target_modules=["embed", "up"])


def convolution() -> PeftCase:
    """Convolutions."""
    return make_case("convolutions", ConvToy, target_modules=["line", "point", "plane", "cube"])


def lora_bias() -> PeftCase:
    """B with a bias."""
    return make_case("lora_bias", Toy, target_modules=["q", "up"], lora_bias=True)


def bias_lora_only() -> PeftCase:
    """Biases of adapted layers, trained in place."""
    return make_case("bias=lora_only", Toy, target_modules=["q", "up"], bias="lora_only")


def bias_all() -> PeftCase:
    """All biases, trained in place."""
    return make_case("bias=all", Toy, target_modules=["q", "up"], bias="all")


def dora() -> PeftCase:
    """Magnitudes."""
    return make_case("DoRA", Toy, target_modules=["q", "up", "down"], use_dora=True)


def dora_rslora() -> PeftCase:
    """Magnitudes and the factor alpha / sqrt(r)."""
    return make_case("DoRA, rsLoRA", Toy, target_modules=["up"], use_dora=True, use_rslora=True)


def modules_to_save() -> PeftCase:
    """Modules trained in full: a layer, and one with modules of its own."""
    return make_case(
        "modules_to_save", Toy, target_modules=["q"], modules_to_save=["head", "layers.1"]
    )


def experts() -> PeftCase:
    """Stacks of experts; two wrappers around one module."""
    return make_case(
        "target_parameters",
        lambda: MoeToy(is_transposed=False),
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )


def experts_transposed() -> PeftCase:
    """The same with the weights of an expert ``[in, out]``; one of the two is square."""
    return make_case(
        "target_parameters, transposed",
        lambda: MoeToy(is_transposed=True, inner=6),
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 2},
    )


def one_parameter() -> PeftCase:
    """One parameter of two, and a matrix that is no layer's."""
    return make_case(
        "target_parameters, a matrix",
        lambda: MoeToy(is_transposed=False),
        target_modules=["embed"],
        target_parameters=["gate.weight", "experts.down_proj"],
    )


def qwen2() -> PeftCase:
    """A language model of transformers with a tied head."""
    config = Qwen2Config(**_QWEN2, tie_word_embeddings=True)
    return make_case(
        "Qwen2",
        lambda: Qwen2ForCausalLM(config),
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
    )


def qwen2_classifier() -> PeftCase:
    """A token classifier, whose head PEFT trains in full."""
    config = Qwen2Config(**_QWEN2, num_labels=1)
    return make_case(
        "Qwen2 token classification",
        lambda: Qwen2ForTokenClassification(config),
        task_type="TOKEN_CLS",
        target_modules="model.*_proj",
    )


def qwen3_moe() -> PeftCase:
    """A mixture of experts of transformers."""
    config = Qwen3MoeConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=10,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )

    def build() -> Qwen3MoeForCausalLM:
        model = Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("eager")  # others want wider rows
        return model

    return make_case(
        "Qwen3-MoE",
        build,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )


_QWEN2 = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}

ROWS: dict[str, Callable[[], PeftCase]] = {
    row.__name__: row
    for row in (
        linear,
        some_layers,
        bfloat16,
        rslora,
        patterns,
        fan_in_fan_out,
        fan_in_fan_out_toy,
        embedding,
        convolution,
        lora_bias,
        bias_lora_only,
        bias_all,
        dora,
        dora_rslora,
        modules_to_save,
        experts,
        experts_transposed,
        one_parameter,
        qwen2,
        qwen2_classifier,
        qwen3_moe,
    )
}


def make_case(description: str, build: Callable[[], nn.Module], **settings: Any) -> PeftCase:
    """Build a model, adapt it and move everything that is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(description))
        base = build()
        # PEFT changes the configs that it is given.
        config = LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, **settings})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of embeddings and tied weights among the targets
            model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return PeftCase(
        description,
        model.eval(),
        config,
        base.eval(),
        torch.tensor([3, 1, 4, 1, 5, 9]) if not isinstance(base, PreTrainedModel) else _IDS,
        base.config.model_type if isinstance(base, PreTrainedModel) else None,
    )


_IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
