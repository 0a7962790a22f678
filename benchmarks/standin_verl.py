"""A stand-in for verl's model merger, which cannot be installed without an inference engine.

    python benchmarks/standin_verl.py SOURCE TARGET

Does what ``verl.model_merger`` does with FSDP rank files, in its order and with its copies, but is
none of its code: load rank 0 to see the mesh, and keep it; load every rank file at once, in
threads; convert each entry to bfloat16; concatenate key by key; build the model on the meta device,
give it memory, and save the dict through it. Takes `Shard(0)` over one mesh dim only.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM


def load(path: Path) -> dict[str, Any]:
    """Load a rank file, data and all."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return state


def main(source: Path, target: Path) -> None:
    paths = {int(p.stem.rpartition("_")[2]): p for p in source.glob("model_world_size_*.pt")}
    first = load(paths[0])
    kept = next(value for _, value in sorted(first.items()))
    count = kept.device_mesh.size() if isinstance(kept, DTensor) else 1

    with ThreadPoolExecutor(max_workers=min(32, os.cpu_count() or 1)) as pool:
        states = list(pool.map(load, [paths[rank] for rank in range(count)]))

    merged: dict[str, Any] = {}
    for key in set(states[0]):
        merged[key] = []
        for state in states:
            value = state.pop(key)
            local = value._local_tensor if isinstance(value, DTensor) else value
            merged[key].append(local.bfloat16())
    for key in sorted(merged):
        merged[key] = torch.cat(merged[key], dim=0)

    config = AutoConfig.from_pretrained(source / "huggingface")
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.save_pretrained(target, state_dict=merged)
    del first


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
