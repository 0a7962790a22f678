"""Writes real FSDP checkpoints: ``python fsdp_job.py DIR`` runs four gloo ranks on the CPU.

Every case below becomes a directory ``DIR/<case>`` of rank files, saved as verl saves them, and a
file ``DIR/<case>.reference.safetensors`` with what torch itself says the whole tensors are. The
Qwen2 cases also get ``DIR/<case>.logits.safetensors``.

One process imports torch and transformers and forks the ranks: the imports cost more than all the
cases together.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

WORLD_SIZE = 4
# A rank that takes this long is stuck: it prints its stacks and exits, even if nobody is left to
# kill it.
DEADLINE_SECONDS = 150
VOCAB = 67
# Not UTF-8, line ends of both kinds, none at the end: a copy that goes through text would show.
TOKENIZER_BYTES = bytes(range(256)) + b"\r\n\n\x00\xff tokenizer"

State = dict[str, torch.Tensor]


class Block(nn.Module):
    """Rows that four ranks cannot share evenly, and a convolution for a third dim."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 11)
        self.down = nn.Linear(11, 16, bias=False)
        self.conv = nn.Conv1d(16, 5, kernel_size=3, padding=1)
        self.out = nn.Linear(5, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A norm may have another dtype than the weights around it.
        h = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        h = self.down(torch.relu(self.up(h)))
        return x + self.out(self.conv(h.transpose(1, 2)).transpose(1, 2))


class Toy(nn.Module):
    """One block, a head of three rows (so the fourth rank has none), buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 16)
        self.block = Block()
        self.head = nn.Linear(16, 3)
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("tokens_seen", torch.tensor(0))
        self.register_buffer("table", torch.arange(-3, 4, dtype=torch.int32))
        self.register_buffer("bytes", torch.arange(250, 256, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False, False, True, True]))
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.linspace(0, 1, 6))
        self.register_buffer("cache", torch.zeros(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.tokens_seen += ids.numel()
        return self.head(self.block(self.emb(ids)) * self.scale)


def seeded_toy() -> Toy:
    torch.manual_seed(7)
    return Toy()


def whole(state: dict[str, Any]) -> State:
    """The whole tensors by torch's own collectives; every rank has to call it."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def clones(state: dict[str, Any]) -> State:
    """Contiguous copies without shared storage, which is what safetensors accepts."""
    return {
        key: value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


def random_ids(rows: int = 2, columns: int = 5) -> torch.Tensor:
    """Token ids that differ from rank to rank, as a data loader's do."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randint(0, VOCAB, (rows, columns), generator=generator)


def train_step(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = loss_of()
    assert torch.isfinite(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save_rank_files(
    directory: Path,
    state: dict[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    version: int = 2,
) -> None:
    """What verl's checkpoint manager writes; only the file of the model holds weights."""
    rank = dist.get_rank()
    directory.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{WORLD_SIZE}_rank_{rank}.pt"
    torch.save(state, directory / f"model_{suffix}")
    if optimizer is not None:
        torch.save(optimizer.state_dict(), directory / f"optim_{suffix}")
        rng = {"cpu": torch.get_rng_state()}
        torch.save({"lr_scheduler": None, "rng": rng}, directory / f"extra_state_{suffix}")
    if rank == 0:
        config = {"FSDP_version": version, "world_size": WORLD_SIZE}
        (directory / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def save_reference(out: Path, case: str, state: State) -> None:
    if dist.get_rank() == 0:
        save_file(clones(state), out / f"{case}.reference.safetensors")


def qwen2(out: Path, tied: bool) -> None:
    """A trained causal LM as verl's FSDP2 actor saves it."""
    case = "qwen2_tied" if tied else "qwen2_untied"
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=54,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(config)
    before = clones(model.state_dict())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if not tied:
        fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = random_ids(columns=9)
    optimizer = train_step(model, lambda: model(input_ids=ids, labels=ids).loss)

    actor = out / case / "global_step_1" / "actor"
    state = model.state_dict()
    save_rank_files(actor, state, optimizer)

    full = whole(state)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, value in full.items():
        assert torch.equal(value, gathered[key]), key
        assert not torch.equal(value, before[key]), f"{key} was not trained"
    save_reference(out, case, full)

    fixed_ids = torch.arange(2 * 11).reshape(2, 11) * 3 % VOCAB
    model.eval()
    with torch.no_grad():
        sharded_logits = model(input_ids=fixed_ids).logits
    if dist.get_rank() == 0:
        unsharded = Qwen2ForCausalLM(config)
        unsharded.load_state_dict(full, strict=True)
        unsharded.eval()
        with torch.no_grad():
            logits = unsharded(input_ids=fixed_ids).logits
        save_file(
            {"input_ids": fixed_ids, "logits": logits, "sharded_logits": sharded_logits},
            out / f"{case}.logits.safetensors",
        )
        huggingface = actor / "huggingface"
        config.save_pretrained(huggingface)
        GenerationConfig(max_new_tokens=5, eos_token_id=1).save_pretrained(huggingface)
        (huggingface / "tokenizer.json").write_bytes(TOKENIZER_BYTES)
        (huggingface / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")


def qwen2_tied(out: Path) -> None:
    qwen2(out, tied=True)


def qwen2_untied(out: Path) -> None:
    qwen2(out, tied=False)


def sharded_toy(mesh: DeviceMesh, **options: Any) -> Toy:
    toy = seeded_toy()
    fully_shard(toy.block, mesh=mesh, **options)
    fully_shard(toy, mesh=mesh, **options)
    return toy


def local_shard(state: dict[str, Any], key: str) -> torch.Tensor:
    tensor = state[key]
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def fsdp2_hsdp(out: Path) -> None:
    """Two replicas of two shards; then again with a replica that went its own way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    toy = sharded_toy(mesh)
    ids = random_ids()
    optimizer = train_step(toy, lambda: toy(ids).square().mean())
    state = toy.state_dict()
    save_rank_files(out / "fsdp2_hsdp", state, optimizer)
    full = whole(state)
    save_reference(out, "fsdp2_hsdp", full)

    if dist.get_rank() == 3:
        local_shard(state, "block.up.weight").add_(1)
    save_rank_files(out / "fsdp2_hsdp_diverged", state)


def fsdp2_shard1(out: Path) -> None:
    """Each parameter along its first dim that divides evenly, as verl chooses it."""

    def placement(parameter: nn.Parameter) -> Shard:
        even = (dim for dim, size in enumerate(parameter.shape) if size % WORLD_SIZE == 0)
        return Shard(next(even, 0))

    full = clones(seeded_toy().state_dict())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    state = sharded_toy(mesh, shard_placement_fn=placement).state_dict()
    for key, placements in {
        "emb.weight": (Shard(1),),
        "block.conv.weight": (Shard(1),),
        "block.down.weight": (Shard(0),),
    }.items():
        assert state[key].placements == placements, key
    save_rank_files(out / "fsdp2_shard1", state)
    save_reference(out, "fsdp2_shard1", full)


def tensor_parallel_toy(mesh: DeviceMesh) -> Toy:
    toy = seeded_toy()
    parallelize_module(
        toy,
        mesh,
        {
            "emb": RowwiseParallel(),
            "block.up": ColwiseParallel(),
            "block.down": RowwiseParallel(),
            "head": ColwiseParallel(),
        },
    )
    return toy


def fsdp2_tp(out: Path) -> None:
    """Uneven rows under FSDP and TP; norms on two parallel meshes, once equal and once not."""
    full = clones(seeded_toy().state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    toy = tensor_parallel_toy(mesh["tp"])
    fully_shard(toy.block, mesh=mesh["fsdp"])
    fully_shard(toy, mesh=mesh["fsdp"])
    state = toy.state_dict()
    assert state["block.up.weight"].device_mesh.ndim == 2
    assert state["block.norm.weight"].device_mesh.ndim == 1
    save_rank_files(out / "fsdp2_tp", state)
    save_reference(out, "fsdp2_tp", full)

    if dist.get_rank() == 3:
        local_shard(state, "block.norm.weight").add_(1)
    save_rank_files(out / "fsdp2_tp_diverged", state)


def fsdp2_mesh_3d(out: Path) -> None:
    """HSDP and TP together, with a mesh dim of size one."""
    full = clones(seeded_toy().state_dict())
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    toy = tensor_parallel_toy(mesh["tp"])
    fully_shard(toy.block, mesh=mesh["replicate", "shard"])
    fully_shard(toy, mesh=mesh["replicate", "shard"])
    state = toy.state_dict()
    assert state["block.up.weight"].device_mesh.ndim == 3
    save_rank_files(out / "fsdp2_mesh_3d", state)
    save_reference(out, "fsdp2_mesh_3d", full)


def fsdp2_diverged_buffer(out: Path) -> None:
    """FSDP2 never synchronises buffers: ranks 1 and 3 have seen more tokens."""
    toy = sharded_toy(init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",)))
    ids = random_ids(columns=5 + dist.get_rank() % 2)
    optimizer = train_step(toy, lambda: toy(ids).square().mean())
    state = toy.state_dict()
    save_rank_files(out / "fsdp2_diverged_buffer", state, optimizer)
    # Only rank 0 writes the reference, so this holds rank 0's buffers.
    save_reference(out, "fsdp2_diverged_buffer", whole(state))


def fsdp2_mixed_dtypes(out: Path) -> None:
    """Weights in bfloat16, norms in float32, a head in float16, integer buffers."""
    toy = seeded_toy()
    toy.emb.bfloat16()
    for module in (toy.block.up, toy.block.down, toy.block.conv, toy.block.out):
        module.bfloat16()
    toy.head.half()
    toy.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].half(),))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    # FSDP2 wants one dtype per call.
    for module in (toy.block.norm, toy.block, toy.head, toy):
        fully_shard(module, mesh=mesh)
    ids = random_ids()
    optimizer = train_step(toy, lambda: toy(ids).float().square().mean())
    state = toy.state_dict()
    save_rank_files(out / "fsdp2_mixed_dtypes", state, optimizer)
    save_reference(out, "fsdp2_mixed_dtypes", whole(state))


def fsdp1(out: Path, variant: str, **options: Any) -> None:
    """A trained FSDP1 model in each kind of state dict."""
    model = FullyShardedDataParallel(
        seeded_toy(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **options,
    )
    ids = random_ids()
    optimizer = train_step(model, lambda: model(ids).square().mean())

    def save(case: str, kind: StateDictType) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict()
        save_rank_files(out / case, state, optimizer, version=1)
        return state

    full = save(f"fsdp1_full_{variant}", StateDictType.FULL_STATE_DICT)
    save_reference(out, f"fsdp1_full_{variant}", full)
    save(f"fsdp1_sharded_{variant}", StateDictType.SHARDED_STATE_DICT)
    save_reference(out, f"fsdp1_sharded_{variant}", full)
    if "device_mesh" not in options:  # torch refuses the two together
        save(f"fsdp1_local_{variant}", StateDictType.LOCAL_STATE_DICT)


def fsdp1_mesh(out: Path) -> None:
    """A device mesh makes the shards DTensors."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    fsdp1(out, "mesh", device_mesh=mesh, use_orig_params=True)


def fsdp1_flat(out: Path) -> None:
    """ShardedTensors; the local state dict holds flat parameters alone, without names."""
    fsdp1(out, "flat", use_orig_params=False)


def fsdp1_orig(out: Path) -> None:
    """ShardedTensors; the local state dict also has each name, with a flat share of the values."""
    fsdp1(out, "orig", use_orig_params=True)


CASES = (
    qwen2_tied,
    qwen2_untied,
    fsdp2_hsdp,
    fsdp2_shard1,
    fsdp2_tp,
    fsdp2_mesh_3d,
    fsdp2_diverged_buffer,
    fsdp2_mixed_dtypes,
    fsdp1_mesh,
    fsdp1_flat,
    fsdp1_orig,
)


def run_rank(rank: int, out: Path, cases: Sequence[Callable[[Path], None]]) -> None:
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out / 'store'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    for case in cases:
        case(out)
        dist.barrier()
        if rank == 0:
            print(f"{case.__name__} saved", flush=True)
    dist.destroy_process_group()


def run_ranks(out: Path, cases: Sequence[Callable[[Path], None]]) -> int:
    """Run cases on all ranks, one after the other; the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, out, cases), name=f"rank {rank}", daemon=True)
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                print(f"{process.name} ended with {process.exitcode}", flush=True)
                # The others wait for it in a collective; being daemons they end with this process.
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(Path(sys.argv[1]).resolve(), CASES))
