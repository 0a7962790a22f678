"""Writes real DeepSpeed checkpoints: ``python deepspeed_job.py DIR [CASE ...]``, gloo on the CPU.

Every case below becomes a directory ``DIR/<case>``, saved by ``engine.save_checkpoint``, and two
files beside it: ``DIR/<case>.expected.safetensors`` holds what DeepSpeed's own ``zero_to_fp32``
makes of it, ``DIR/<case>.module.safetensors`` the parameters of the module as they were trained.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch import nn

DEADLINE_SECONDS = 150
VOCAB = 13


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        stage: of ZeRO.
        world_size: number of ranks.
        dtype: that the module is trained in.
        fp32_grads: gradients accumulate in float32; with ZeRO-1 and bfloat16, this is what takes
            DeepSpeed's ``BF16_Optimizer``.
        groups: number of parameter groups.
        frozen: whether a weight and a bias are not trained.
        shared: whether the head is the embedding.
        tag: of the checkpoint.
        zero: further settings of ``zero_optimization``.
    """

    stage: int
    world_size: int = 2
    dtype: str = "bf16"
    fp32_grads: bool = False
    groups: int = 1
    frozen: bool = True
    shared: bool = False
    tag: str | None = None
    zero: tuple[tuple[str, Any], ...] = ()


CASES = {
    "zero1_bf16_optimizer": Case(1, 3, fp32_grads=True, groups=2),
    "zero1_fp32_w1": Case(1, 1, "fp32", shared=True),
    "zero1_w4_groups": Case(1, 4, groups=3),
    "zero2_aligned": Case(2, 3, groups=2, zero=(("parameter_alignment", True),)),
    "zero2_shared": Case(2, 2, shared=True, tag="best"),
    "zero2_round_robin": Case(2, 2, zero=(("round_robin_gradients", True),)),
    "zero3_fp32_w4": Case(3, 4, "fp32", groups=2),
    "zero3_shared": Case(3, 3, shared=True, groups=3),
    "zero3_sub_groups": Case(3, 2, zero=(("sub_group_size", 60),)),
    "zero3_w1": Case(3, 1),
}


class Model(nn.Module):
    """Odd sizes, a scalar parameter, buffers of several dtypes, one that is not saved."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)])
        self.conv = nn.Conv1d(6, 5, kernel_size=3, padding=1)
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.out = nn.Linear(5, 6, bias=False)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("table", torch.arange(7, dtype=torch.int32))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if shared:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        x = self.layers[1](torch.relu(self.layers[0](x)))
        x = self.out(self.conv(x.transpose(1, 2)).transpose(1, 2) * self.gain)
        return self.head(x)


def parameter_groups(model: nn.Module, count: int) -> list[dict[str, Any]]:
    """The trained parameters in several groups, of which each has another learning rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[i::count], "lr": 0.01 * (i + 1)} for i in range(count)]


def settings(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 8,
            **dict(case.zero),
        },
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.fp32_grads:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def train_and_save(case: Case, name: str, root: Path) -> None:
    """Two steps, a checkpoint, and what is in the module then."""
    torch.manual_seed(0)
    model = Model(case.shared)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 7
    if case.frozen:
        model.layers[1].bias.requires_grad = False
        model.conv.weight.requires_grad = False
    optimizer = torch.optim.AdamW(parameter_groups(model, case.groups))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(case))
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, VOCAB, (1, 9), generator=generator)
        loss = engine(ids).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(root / name), tag=case.tag)
    values = {}
    for key, parameter in engine.module.named_parameters(remove_duplicate=False):
        gather = contextlib.nullcontext()
        if case.stage == 3:
            gather = deepspeed.zero.GatheredParameters([parameter])
        with gather:
            values[key] = parameter.detach().clone().contiguous()
    # Of BF16_Optimizer, zero_to_fp32 says that it is no ZeRO.
    masters = {
        key: safe_get_full_fp32_param(parameter)
        for key, parameter in engine.module.named_parameters(remove_duplicate=False)
        if case.fp32_grads and parameter.requires_grad
    }
    values |= {k: v.clone() for k, v in engine.module.named_buffers() if k != "scratch"}
    if dist.get_rank() == 0:
        save_file(values, root / f"{name}.module.safetensors")
        if not case.fp32_grads:
            masters = get_fp32_state_dict_from_zero_checkpoint(str(root / name))
        save_file(
            {key: value.clone().contiguous() for key, value in masters.items()},
            root / f"{name}.expected.safetensors",
        )
        recipe = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, **asdict(case)}
        (root / f"{name}.recipe.json").write_text(json.dumps(recipe))


def run_rank(rank: int, name: str, root: Path) -> None:
    """One rank of a job."""
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    case = CASES[name]
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(case.world_size)}
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/{name}.store", rank=rank, world_size=case.world_size
    )
    train_and_save(case, name, root)
    dist.destroy_process_group()


def main(root: Path, names: list[str]) -> None:
    """Run the jobs, one after the other."""
    context = multiprocessing.get_context("fork")
    for name in names or CASES:
        ranks = [
            context.Process(target=run_rank, args=(rank, name, root))
            for rank in range(CASES[name].world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{name}: a rank failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
