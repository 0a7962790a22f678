"""Writes checkpoints through torch.distributed.checkpoint: ``python dcp_job.py DIR``, four ranks.

Every case becomes a directory ``DIR/<case>`` with a checkpoint somewhere in it, and a file
``DIR/<case>.reference.safetensors`` with the whole tensors by torch's own collectives.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from fsdp_job import (
    WORLD_SIZE,
    Block,
    Toy,
    clones,
    random_ids,
    run_ranks,
    save_reference,
    seeded_toy,
    sharded_toy,
    tensor_parallel_toy,
    train_step,
    whole,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

State = dict[str, Any]


def save(folder: Path, state: State, **options: Any) -> None:
    """What training loops call."""
    if options:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    else:
        dcp.save(state, checkpoint_id=folder)


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))


def trained() -> tuple[Toy, torch.optim.Optimizer]:
    toy = sharded_toy(mesh_1d())
    ids = random_ids()
    return toy, train_step(toy, lambda: toy(ids).square().mean())


def fsdp2(out: Path) -> None:
    """Model, optimizer, scheduler and a counter, as the tutorials of torch have it."""
    toy, optimizer = trained()
    states = {
        "model": get_model_state_dict(toy),
        "optimizer": get_optimizer_state_dict(toy, optimizer),
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "step": 7,
    }
    save(out / "fsdp2" / "step_7", states)
    save_reference(out, "fsdp2", whole(toy.state_dict()))


def torchtitan(out: Path) -> None:
    """The entries of the model at top level, everything else beside them."""
    toy, optimizer = trained()
    states = {
        **get_model_state_dict(toy),
        "optimizer": get_optimizer_state_dict(toy, optimizer),
        "dataloader": {f"dp_rank_{dist.get_rank()}": b"position"},
        "train_state": {"step": torch.tensor(7), "losses": torch.ones(3)},
    }
    save(out / "torchtitan" / "step-7", states)
    save_reference(out, "torchtitan", whole(toy.state_dict()))


class App:
    """A stateful object, as prime-rl has it."""

    def __init__(self, states: State) -> None:
        self.states = states

    def state_dict(self) -> State:
        return self.states

    def load_state_dict(self, states: State) -> None:
        raise NotImplementedError


def app(out: Path) -> None:
    toy, optimizer = trained()
    states = {
        "model": toy.state_dict(),
        "optimizers": [get_optimizer_state_dict(toy, optimizer)],
        "progress": {"step": 3, "seen": torch.tensor(5)},
    }
    save(out / "app" / "step_3" / "trainer", {"app": App(states)})
    save_reference(out, "app", whole(toy.state_dict()))


def layouts(out: Path) -> None:
    """HSDP, TP, both, and columns, some with rows that ranks cannot share evenly."""
    full = clones(seeded_toy().state_dict())
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    save(out / "hsdp", {"model": sharded_toy(hsdp).state_dict()})
    save_reference(out, "hsdp", full)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    toy = tensor_parallel_toy(mesh["tp"])
    fully_shard(toy.block, mesh=mesh["fsdp"])
    fully_shard(toy, mesh=mesh["fsdp"])
    save(out / "tp", {"model": toy.state_dict()})
    save_reference(out, "tp", full)

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    toy = tensor_parallel_toy(mesh["tp"])
    fully_shard(toy.block, mesh=mesh["replicate", "shard"])
    fully_shard(toy, mesh=mesh["replicate", "shard"])
    save(out / "mesh_3d", {"model": toy.state_dict()})
    save_reference(out, "mesh_3d", full)

    def columns(parameter: torch.nn.Parameter) -> Shard:
        return Shard(parameter.ndim - 1)

    full = {name: value for name, value in full.items() if name.endswith("weight")}
    state = {
        name: distribute_tensor(value, mesh_1d(), [columns(value)]) for name, value in full.items()
    }
    save(out / "columns", {"model": state})
    save_reference(out, "columns", full)


def files(out: Path) -> None:
    """A file for each chunk, and several for each rank."""
    toy = sharded_toy(mesh_1d())
    save(out / "file_per_chunk", toy.state_dict(), single_file_per_rank=False)
    save_reference(out, "file_per_chunk", whole(toy.state_dict()))
    save(out / "threads", {"model": toy.state_dict()}, thread_count=3)
    save_reference(out, "threads", whole(toy.state_dict()))


def fsdp1(out: Path) -> None:
    """ShardedTensors and DTensors."""
    for case, options in {
        "fsdp1_flat": {"use_orig_params": False},
        "fsdp1_orig": {"use_orig_params": True},
        "fsdp1_mesh": {"use_orig_params": True, "device_mesh": mesh_1d()},
    }.items():
        model = FullyShardedDataParallel(
            seeded_toy(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            **options,
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            save(out / case, {"model": model.state_dict()})
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            save_reference(out, case, model.state_dict())


def odd(out: Path) -> None:
    """One tensor alone; tensors that are no blob in its order; all kinds of dtypes."""
    weight = torch.arange(35.0).reshape(7, 5)
    one = {"weight": distribute_tensor(weight, mesh_1d(), [Shard(0)])}
    save(out / "one_tensor", {"model": one})
    save_reference(out, "one_tensor", {"weight": weight})
    save(out / "one_tensor_top", {"weight": one["weight"]})
    save_reference(out, "one_tensor_top", {"weight": weight})

    images = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(1))
    state = {
        "channels_last": images.contiguous(memory_format=torch.channels_last),
        "transposed": torch.arange(20.0).reshape(4, 5).t(),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "part": torch.arange(40)[7:19:2],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 5, dtype=torch.int16),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "bool": torch.tensor([True, False, True]),
        "uint16": torch.arange(5).to(torch.uint16),
        "float8": torch.arange(6.0).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "_extra_state": {"not": "a tensor"},
    }
    save(out / "odd", {"model": state})
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    save_reference(out, "odd", {name: t.resolve_conj() for name, t in tensors.items()})


def accelerate(out: Path) -> None:
    """As accelerate saves FSDP2, and the Trainer of transformers through it."""
    toy, optimizer = trained()
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, but not used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PartialState(cpu=True, backend="gloo")  # its log asks for it
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
        )
    folder = out / "accelerate" / "checkpoint-20"
    save_fsdp_model(plugin, None, toy, str(folder))
    save_fsdp_optimizer(plugin, None, optimizer, toy, str(folder))
    save_reference(out, "accelerate", whole(toy.state_dict()))
    if dist.get_rank() == 0:
        for name in ("config.json", "tokenizer.json", "trainer_state.json", "rng_state_0.pth"):
            (folder / name).write_text("{}")
        (folder / "runs").mkdir()
        (folder / "runs" / "config.json").write_text("{}")


def huggingface(out: Path) -> None:
    """DCP's safetensors form, in one file per rank and in several."""
    toy = sharded_toy(mesh_1d())
    state = toy.state_dict()
    full = whole(state)
    for case, mapping in {
        "hf": None,
        "hf_files": {name: 1 + number % 2 for number, name in enumerate(full)},
    }.items():
        writer = dcp.HuggingFaceStorageWriter(
            str(out / case), fqn_to_index_mapping=mapping, save_distributed=True
        )
        dcp.save(state, storage_writer=writer)
        save_reference(out, case, full)


CASES = (
    fsdp2,
    torchtitan,
    app,
    layouts,
    files,
    fsdp1,
    odd,
    accelerate,
    huggingface,
)

if __name__ == "__main__":
    sys.exit(run_ranks(Path(sys.argv[1]).resolve(), CASES))
