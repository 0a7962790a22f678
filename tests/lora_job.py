"""Writes checkpoints of models with LoRA adapters: ``python lora_job.py DIR`` runs four gloo ranks.

Every row of `ROWS` becomes two checkpoints as verl saves them: ``DIR/<row>`` of the whole model,
and ``DIR/<row>_alone`` of what LoRA trains. The tensors are those of the model that the row builds,
but for `TRAINED`, whose whole tensors are in ``DIR/<row>.reference.safetensors``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import peft_models
import torch
import torch.distributed as dist
from fsdp_job import (
    WORLD_SIZE,
    clones,
    random_ids,
    run_ranks,
    save_rank_files,
    save_reference,
    train_step,
    whole,
)
from peft_models import ALPHA, RANK, PeftCase, make_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

# The rows of which names, shapes and config.json do not tell all, so that verl's meta file, which
# has rank and alpha, is not enough.
NEED_CONFIG = {
    "rslora",
    "patterns",
    "fan_in_fan_out_toy",
    "bias_lora_only",
    "bias_all",
    "dora_rslora",
    "modules_to_save",
    "experts_transposed",
    "one_parameter",
}


def wide() -> PeftCase:
    """A language model with weights that are folded in several blocks; a head of its own."""
    config = Qwen2Config(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=8301,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return make_case(
        "several blocks",
        lambda: Qwen2ForCausalLM(config),
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "gate_proj", "down_proj", "lm_head"],
    )


def mixtral() -> PeftCase:
    """Experts that files keep under other names."""
    config = MixtralConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=32,
    )

    def build() -> MixtralForCausalLM:
        model = MixtralForCausalLM(config)
        model.set_experts_implementation("eager")  # others want wider rows
        return model

    return make_case(
        "Mixtral",
        build,
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )


def bfloat16_adapter() -> PeftCase:
    """Adapter and base in bfloat16."""
    case = peft_models.bfloat16()
    case.model.bfloat16()
    return case


ROWS: dict[str, Callable[[], PeftCase]] = {
    **peft_models.ROWS,
    "wide": wide,
    "mixtral": mixtral,
    "bfloat16_adapter": bfloat16_adapter,
}
TRAINED = {"wide"}


def save(row: str, out: Path) -> None:
    """Shard the model of a row and save it."""
    case = ROWS[row]()
    before = clones(case.model.state_dict())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    for module in case.model.modules():
        if type(module).__name__ in ("Block", "Qwen2DecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    trained = case.trained_names()
    if row in TRAINED:
        ids = random_ids(columns=9)
        train_step(case.model, lambda: case.model(input_ids=ids, labels=ids).loss)
    state = case.model.state_dict()
    full = whole(state)
    for name, tensor in full.items():
        moved = row in TRAINED and name in trained
        assert torch.equal(tensor, before[name]) != moved, name
    if row in TRAINED:
        save_reference(out, row, full)
    for directory, names in ((out / row, list(state)), (out / f"{row}_alone", trained)):
        save_rank_files(directory, {name: state[name] for name in names})
        if dist.get_rank() == 0:
            save_side_files(directory, case, row)


def save_side_files(directory: Path, case: PeftCase, row: str) -> None:
    """What verl writes beside the rank files of a model with an adapter."""
    meta = {"r": RANK, "lora_alpha": ALPHA}
    if isinstance(case.base, PreTrainedModel):
        meta["task_type"] = "CAUSAL_LM"  # verl says so of classifiers, too
    (directory / "lora_train_meta.json").write_text(json.dumps(meta, indent=4))
    if row in NEED_CONFIG:
        case.model.peft_config["default"].save_pretrained(directory / "lora_adapter")
    if isinstance(case.base, PreTrainedModel):
        case.base.config.architectures = [type(case.base).__name__]
        case.base.config.save_pretrained(directory / "huggingface")


def case_of(row: str) -> Callable[[Path], None]:
    """The case of the job that saves a row."""

    def case(out: Path) -> None:
        save(row, out)

    case.__name__ = row
    return case


if __name__ == "__main__":
    sys.exit(run_ranks(Path(sys.argv[1]).resolve(), [case_of(row) for row in ROWS]))
