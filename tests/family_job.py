"""Writes checkpoints of model families: ``python family_job.py DIR`` runs four gloo ranks.

For every family a tiny model of transformers is sharded as verl shards it, trained for a step and
saved as verl saves it, to ``DIR/<family>``. Beside it are ``DIR/<family>.reference.safetensors``,
the whole tensors by torch's own collectives, and ``DIR/<family>.logits.safetensors``: inputs, and
what the unsharded model with these tensors makes of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_job import (
    TOKENIZER_BYTES,
    VOCAB,
    WORLD_SIZE,
    clones,
    random_ids,
    run_ranks,
    save_rank_files,
    save_reference,
    train_step,
    whole,
)
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
)

# Sizes that four ranks cannot share evenly, but for those that a model's heads settle. Experts are
# multiplied in groups, whose rows must be multiples of 16 bytes.
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 54,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = 6
EXPERT_SIZE = 12
IMAGE_TOKEN = VOCAB - 1
VISION_START, VISION_END = VOCAB - 3, VOCAB - 2
IMAGE_TOKENS = 4  # per picture, in all models here
IMAGE_SIZE, PATCH_SIZE = 8, 4

Inputs = dict[str, torch.Tensor]


def save(
    out: Path,
    family: str,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    make_inputs: Callable[[torch.Tensor], Inputs] = lambda ids: {"input_ids": ids},
    *,
    dtype: torch.dtype = torch.float32,
    untrained: tuple[str, ...] = (),
    class_of_fsdp: bool = False,
) -> None:
    """Train a model under FSDP2 and save it.

    Args:
        out: where to.
        family: name of the case.
        model_class, config: the model.
        make_inputs: what the model takes, given token ids.
        dtype: of its weights.
        untrained: parts of the names of parameters that its outputs do not depend on.
        class_of_fsdp: whether the config names the class that FSDP2 makes of the model's.
    """
    config.dtype = dtype
    torch.manual_seed(3)
    model = model_class._from_config(config)
    perturb(model)
    before = clones(model.state_dict())
    shard(model)
    inputs = make_inputs(random_ids(columns=9))
    train_step(model, lambda: model(**inputs).logits.float().square().mean())
    state = model.state_dict()
    save_rank_files(out / family, state)
    full = whole(state)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in untrained):
            assert not torch.equal(full[name], before[name]), f"{name} was not trained"
        assert parameter.dtype == dtype, name
    save_reference(out, family, full)
    if dist.get_rank() == 0:
        save_logits(out, family, model_class._from_config(config), full, make_inputs)
        config.architectures = [(type(model) if class_of_fsdp else model_class).__name__]
        save_side_files(out / family / "huggingface", model, config)


def shard(model: PreTrainedModel) -> None:
    """Shard a model as verl's `apply_fsdp2` does, but from the inside out."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    tied = model.config.tie_word_embeddings
    wrapped = [
        module
        for module in model.modules()
        if type(module).__name__ in set(model._no_split_modules)
        or (isinstance(module, nn.Embedding) and not tied)
    ]
    for module in (*reversed(wrapped), model):
        fully_shard(module, mesh=mesh)


def perturb(model: nn.Module) -> None:
    """Move what begins at zero away from it, as a layer behind such a one would not be trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.05)


def save_logits(
    out: Path,
    family: str,
    model: PreTrainedModel,
    state: dict[str, torch.Tensor],
    make_inputs: Callable[[torch.Tensor], Inputs],
) -> None:
    """Save inputs, and what the unsharded model makes of them."""
    model.load_state_dict(state, strict=True)
    model.eval()
    inputs = make_inputs(torch.arange(2 * 11).reshape(2, 11) * 3 % VOCAB)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.isfinite().all()
    save_file({**inputs, "logits": logits}, out / f"{family}.logits.safetensors")


def save_side_files(directory: Path, model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """What verl leaves beside its rank files."""
    config.save_pretrained(directory)
    if model.can_generate():
        GenerationConfig(max_new_tokens=5, eos_token_id=1).save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes(TOKENIZER_BYTES)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')


def with_picture(ids: torch.Tensor, patches: Callable[[int], Inputs]) -> Inputs:
    """Token ids with a picture in each row."""
    rows = len(ids)
    marks = torch.tensor([VISION_START, *[IMAGE_TOKEN] * IMAGE_TOKENS, VISION_END])
    words = ids % VISION_START
    ids = torch.cat([words[:, :2], marks.expand(rows, -1), words[:, 2:]], dim=1)
    return {"input_ids": ids, **patches(rows)}


def pixels(rows: int) -> Inputs:
    """Pictures, one per row."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {"pixel_values": torch.randn(rows, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)}


def qwen2(out: Path) -> None:
    """Tied, in a config that names FSDP2's class."""
    config = Qwen2Config(**TEXT, tie_word_embeddings=True)
    save(out, "qwen2", Qwen2ForCausalLM, config, class_of_fsdp=True)


def qwen3(out: Path) -> None:
    """In bfloat16."""
    config = Qwen3Config(**TEXT, head_dim=8)
    save(out, "qwen3", Qwen3ForCausalLM, config, dtype=torch.bfloat16)


def llama(out: Path) -> None:
    """Not tied."""
    save(out, "llama", LlamaForCausalLM, LlamaConfig(**TEXT))


def gemma3_text(out: Path) -> None:
    """Tied."""
    config = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=6)
    save(out, "gemma3_text", Gemma3ForCausalLM, config)


def gemma3(out: Path) -> None:
    """Tied, with pictures."""
    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        vision_use_head=False,
    )
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=6),
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )

    def inputs(ids: torch.Tensor) -> Inputs:
        found = with_picture(ids, pixels)
        return {**found, "token_type_ids": (found["input_ids"] == IMAGE_TOKEN).long()}

    save(out, "gemma3", Gemma3ForConditionalGeneration, config, inputs)


def qwen3_moe(out: Path) -> None:
    """Packed experts, one layer without."""
    config = Qwen3MoeConfig(
        **TEXT,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_SIZE,
        mlp_only_layers=[0],
    )
    save(out, "qwen3_moe", Qwen3MoeForCausalLM, config)


def mixtral(out: Path) -> None:
    """Packed experts under other names than files have."""
    sizes = TEXT | {"intermediate_size": EXPERT_SIZE}
    config = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=2)
    save(out, "mixtral", MixtralForCausalLM, config)


def deepseek_v3(out: Path) -> None:
    """Packed experts, shared ones, one layer without, a buffer that is no parameter."""
    config = DeepseekV3Config(
        **TEXT | {"num_key_value_heads": 4},
        moe_intermediate_size=EXPERT_SIZE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=10,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=6,
    )
    save(out, "deepseek_v3", DeepseekV3ForCausalLM, config)


def qwen2_5_vl(out: Path) -> None:
    """Towers that files name otherwise."""
    side = 4  # patches
    config = Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 30,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": TEXT["hidden_size"],
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )

    def patches(rows: int) -> Inputs:
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = 3 * 2 * PATCH_SIZE**2
        return {
            "pixel_values": torch.randn(rows * side**2, size, generator=generator),
            "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        }

    def inputs(ids: torch.Tensor) -> Inputs:
        found = with_picture(ids, patches)
        return {**found, "mm_token_type_ids": (found["input_ids"] == IMAGE_TOKEN).int()}

    save(out, "qwen2_5_vl", Qwen2_5_VLForConditionalGeneration, config, inputs)


def llava(out: Path) -> None:
    """A vision tower around which files have another level than the model."""
    vision = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    save(
        out,
        "llava",
        LlavaForConditionalGeneration,
        config,
        lambda ids: with_picture(ids, pixels),
        # It takes the output of the last layer but one.
        untrained=("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm."),
    )


def token_classification(out: Path) -> None:
    """A critic."""
    config = Qwen2Config(**TEXT, num_labels=1)
    save(out, "token_classification", Qwen2ForTokenClassification, config)


def sequence_classification(out: Path) -> None:
    """A reward model."""
    config = Qwen3Config(**TEXT, head_dim=8, num_labels=3, pad_token_id=0)
    save(out, "sequence_classification", Qwen3ForSequenceClassification, config)


CASES = (
    qwen2,
    qwen3,
    llama,
    gemma3_text,
    gemma3,
    qwen3_moe,
    mixtral,
    deepseek_v3,
    qwen2_5_vl,
    llava,
    token_classification,
    sequence_classification,
)

if __name__ == "__main__":
    sys.exit(run_ranks(Path(sys.argv[1]).resolve(), CASES))
