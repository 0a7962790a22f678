"""The merger that one writes in ten minutes: memory-mapped rank files, ``torch.cat``, one file.

    python benchmarks/standin_mmap.py SOURCE TARGET

Takes `Shard(0)` over one mesh dim only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(source: Path, target: Path) -> None:
    paths = sorted(
        source.glob("model_world_size_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2])
    )
    states = [torch.load(path, mmap=True, weights_only=False) for path in paths]
    merged = {key: torch.cat([state[key]._local_tensor for state in states]) for key in states[0]}
    target.mkdir()
    save_file(merged, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
