"""Checkpoints of tiny language models with the side files that a training leaves beside them.

The rank files hold DTensors of torch, the config is what transformers writes or close to it, and
what a merged directory holds is what transformers opens of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import rank_files
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel, Qwen2ForCausalLM

from streammerge.cli import main

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# As transformers 4.57 writes it, without what has the default; nothing in it needs an edit but the
# dtype, which is that of the weights.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "dtype": "float32",
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "model_type": "qwen2",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.57.6",
    "use_cache": False,
    "vocab_size": 66,
}
SHAPES: dict[str, tuple[int, ...]] = {
    EMBEDDING: (66, 8),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in (
            ("self_attn.q_proj.weight", (8, 8)),
            ("self_attn.q_proj.bias", (8,)),
            ("self_attn.k_proj.weight", (4, 8)),
            ("self_attn.k_proj.bias", (4,)),
            ("self_attn.v_proj.weight", (4, 8)),
            ("self_attn.v_proj.bias", (4,)),
            ("self_attn.o_proj.weight", (8, 8)),
            ("mlp.gate_proj.weight", (12, 8)),
            ("mlp.up_proj.weight", (12, 8)),
            ("mlp.down_proj.weight", (8, 12)),
            ("input_layernorm.weight", (8,)),
            ("post_attention_layernorm.weight", (8,)),
        )
    },
    "model.norm.weight": (8,),
    HEAD: (66, 8),
}

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Split:
    """How a tensor is spread over ranks.

    Attributes:
        placements: one per mesh dim.
        sizes: of the mesh, which has all ranks.
    """

    placements: tuple[Placement, ...] = (Shard(0),)
    sizes: tuple[int, ...] = (4,)


PLAIN = Split((), ())
ROWS = Split()
COLUMNS = Split((Shard(1),))
COPIES = Split((Replicate(),))
HYBRID = Split((Replicate(), Shard(0)), (2, 2))
GRID = Split((Shard(0), Shard(1)), (2, 2))


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def warnings(self) -> list[str]:
        """What it warned of."""
        start = "streammerge: warning: "
        return [line[len(start) :] for line in self.err.splitlines() if line.startswith(start)]

    @property
    def json(self) -> Any:
        """What it printed with ``--json``."""
        return json.loads(self.out)


Run = Callable[..., Done]


def make_run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command line in this process."""

    def run(*arguments: str | Path, code: int = 0) -> Done:
        capsys.readouterr()
        found = main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, (found, printed.out, printed.err)
        return Done(found, printed.out, printed.err)

    return run


def refuse(run: Run, target: Path, *arguments: str | Path, code: int = 1) -> str:
    """Run a merge that has to fail with one line (and a hint), and leave nothing; the lines."""
    source = Path(arguments[0])
    before = checkpoints.snapshot(source)
    done = run("merge", *arguments, target, code=code)
    assert done.out == ""
    lines = done.err.splitlines()
    assert [line.partition(": ")[0] for line in lines] in (["streammerge"], ["streammerge", "hint"])
    assert lines[0].startswith("streammerge: error: ")
    assert list(target.parent.iterdir()) == []
    assert checkpoints.snapshot(source) == before
    return done.err


def random_state(dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """A tiny Qwen2 whose head and embedding are two weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def tied_state(dtype: torch.dtype = torch.float32) -> State:
    """The same where they are equal, and the same tensor."""
    state = random_state(dtype)
    state[HEAD] = state[EMBEDDING]
    return state


def without(state: Mapping[str, torch.Tensor], *names: str) -> State:
    """A state dict without some of its keys."""
    return {name: tensor for name, tensor in state.items() if name not in names}


def save(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, object] | None = None,
    *,
    splits: Mapping[str, Split] | None = None,
    world_size: int = 2,
) -> Path:
    """Write rank files and the config beside them.

    Args:
        folder: the new directory.
        state: whole tensors. The same tensor under two names is so on every rank, too.
        config: what becomes ``huggingface/config.json``; None for no such folder.
        splits: how tensors are spread; others are split by rows over all ranks, in one mesh.
        world_size: number of ranks.

    Returns:
        The directory.
    """
    splits = splits or {}

    def build(rank: int) -> dict[str, object]:
        made: dict[tuple[int, Split], object] = {}
        meshes = {}
        result: dict[str, object] = {}
        for name, tensor in state.items():
            split = splits.get(name, Split(sizes=(world_size,)))
            key = (id(tensor), split)
            if key not in made:
                if not split.placements:
                    made[key] = tensor
                else:
                    assert math.prod(split.sizes) == world_size
                    if split.sizes not in meshes:
                        meshes[split.sizes] = init_device_mesh("cpu", split.sizes)
                    mesh = meshes[split.sizes]
                    made[key] = rank_files.dtensor(tensor, mesh, split.placements)
            result[name] = made[key]
        return result

    checkpoints.save_ranks(folder, build, world_size=world_size)
    if config is not None:
        write_json(folder / "huggingface" / "config.json", config)
    return folder


def write_json(path: Path, value: object) -> None:
    """A JSON file as transformers writes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The contents of a JSON file."""
    return json.loads(path.read_text())


def open_model(
    directory: Path,
    model_class: type[PreTrainedModel] = Qwen2ForCausalLM,
    unexpected: Sequence[str] = (),
) -> PreTrainedModel:
    """What transformers makes of a directory, which has to hold all of the model and no more.

    Args:
        directory: to open.
        model_class: what to open it as.
        unexpected: names that it may have besides.
    """
    model, loading = model_class.from_pretrained(directory, output_loading_info=True)
    assert set(loading.pop("unexpected_keys")) == set(unexpected)
    assert not any(loading.values()), loading
    return model
