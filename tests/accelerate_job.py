"""Writes checkpoints with accelerate: ``python accelerate_job.py DIR`` runs four gloo ranks.

Every case below becomes a directory ``DIR/<case>``, saved by ``save_fsdp_model``, and a file
``DIR/<case>.reference.safetensors`` with the whole tensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from fsdp_job import (
    WORLD_SIZE,
    Block,
    random_ids,
    run_ranks,
    save_reference,
    seeded_toy,
    sharded_toy,
    train_step,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def save(
    out: Path,
    model: nn.Module,
    kind: str,
    *,
    version: int,
    optimizer: torch.optim.Optimizer | None = None,
    number: int = 0,
) -> None:
    """What ``Accelerator.save_state`` does with a model, but into files of each rank."""
    rank = str(dist.get_rank())
    # What torchrun sets. Nobody meets at that address: the ranks have met already.
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    state: Any = PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    save_fsdp_model(plugin, state, model, str(out), number, use_dcp=False)
    if optimizer is not None:
        save_fsdp_optimizer(plugin, state, optimizer, model, str(out), use_dcp=False)


def fsdp2_sharded(out: Path) -> None:
    """Two trained replicas of two shards, the optimizer beside them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    toy = sharded_toy(mesh)
    ids = random_ids()
    optimizer = train_step(toy, lambda: toy(ids).square().mean())
    save(out / "fsdp2_sharded", toy, "SHARDED_STATE_DICT", version=2, optimizer=optimizer)
    save_reference(out, "fsdp2_sharded", whole(toy.state_dict()))


def fsdp2_full(out: Path) -> None:
    """Everything in one file, by rank 0."""
    toy = sharded_toy(init_device_mesh("cpu", (WORLD_SIZE,)))
    save(out / "fsdp2_full", toy, "FULL_STATE_DICT", version=2)
    save_reference(out, "fsdp2_full", whole(toy.state_dict()))


def fsdp2_two_models(out: Path) -> None:
    """Two models in one directory, as of a GAN."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for number in range(2):
        toy = sharded_toy(mesh)
        with torch.no_grad():
            toy.head.weight.fill_(number)
        save(out / "fsdp2_two_models", toy, "SHARDED_STATE_DICT", version=2, number=number)
    save_reference(out, "fsdp2_two_models", whole(toy.state_dict()))


def fsdp1(out: Path) -> None:
    """ShardedTensors, and the flat parameters that they are kept in."""
    model = FullyShardedDataParallel(
        seeded_toy(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    ids = random_ids()
    train_step(model, lambda: model(ids).square().mean())
    for kind in ("sharded", "local"):
        save(out / f"fsdp1_{kind}", model, f"{kind.upper()}_STATE_DICT", version=1)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        save_reference(out, "fsdp1_sharded", model.state_dict())


CASES = (fsdp2_sharded, fsdp2_full, fsdp2_two_models, fsdp1)

if __name__ == "__main__":
    sys.exit(run_ranks(Path(sys.argv[1]).resolve(), CASES))
