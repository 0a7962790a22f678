"""Compare copies and cast on a GPU and on the CPU: are the values equal, and what does a GB take?

    python benchmarks/gpu.py [--work DIR] [--size 2GB]

Takes less than five minutes. Says so and ends where torch finds no GPU.

Why the defaults are what they are. Comparing the copies that ranks hold moves each byte to the GPU
once and nothing back; ``--device auto`` does it there if a GiB or more is to be compared, as torch
has to be imported for it. Casting and copying move bytes there and back for an operation that the
CPU does as fast as memory allows, so they stay on the CPU. The table says whether that holds on
the machine at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_shapes import parse_size
from process_trees import read_once
from report import table
from workspace import Workspace, say

BAND = 16 << 20  # bytes that are cast at a time
ROUNDS = 5
DEVICES = ("cpu", "cuda")
GB = 1e9

# In a process of its own, as it matters whether torch is imported already.
COMPARE = """
import json, sys, time
started = time.perf_counter()
import streammerge
plan = streammerge.plan(streammerge.describe(sys.argv[1]), raw=True)
try:
    found = streammerge.compare(plan, replicas="check-all", device=sys.argv[2])
    said = {"device": found.device, "nbytes": found.nbytes, "difference": None}
except streammerge.ReplicaMismatchError as error:
    said = {"difference": str(error)}
print(json.dumps({"seconds": time.perf_counter() - started, **said}))
"""


def compare_copies(source: Path, device: str) -> dict[str, Any]:
    """Compare the copies of a checkpoint in a new process and return what it says."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, source, device], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spoil(path: Path) -> None:
    """Change one byte in the middle of the largest member of a rank file."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    with path.open("r+b") as file:
        at = largest.header_offset + largest.file_size // 2
        file.seek(at)
        (before,) = file.read(1)
        file.seek(at)
        file.write(bytes([before ^ 1]))


def measure_copies(workspace: Workspace, size: str) -> list[list[str]]:
    """Compare the copies that HSDP keeps, on both devices; then with one bit changed."""
    source = workspace.make(size, 4, "--layout", "hsdp")
    read_once(source)
    rows = []
    for device in DEVICES:
        runs = [compare_copies(source, device) for _ in range(ROUNDS)]
        assert all(run["device"] == device and not run["difference"] for run in runs)
        seconds = statistics.median(run["seconds"] for run in runs)
        rows.append([f"two copies, {device}", per_gb(seconds, runs[0]["nbytes"]), "equal"])
    spoiled = source / "model_world_size_4_rank_3.pt"
    spoil(spoiled)
    found = [compare_copies(source, device)["difference"] for device in DEVICES]
    spoil(spoiled)
    verdict = "found alike by both" if found[0] and found[0] == found[1] else str(found)
    return [*rows, ["one bit of one copy changed", "", verdict]]


def measure_casts() -> list[list[str]]:
    """Cast all kinds of bits from float32 on both devices, a band at a time."""
    bits = torch.frombuffer(bytearray(os.urandom(BAND)), dtype=torch.float32)
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for way, cast in ways_to_cast(bits, dtype).items():
            verdict = compare_bits(bits.to(dtype), cast())
            rows.append([f"float32 to {name}, {way}", per_gb(timed(cast), BAND), verdict])
    return rows


def ways_to_cast(bits: torch.Tensor, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that cast a band and leave the result in the memory of the CPU."""
    target = torch.empty(bits.shape, dtype=dtype)
    pinned, locked = bits.pin_memory(), target.pin_memory()
    return {
        "cpu": lambda: target.copy_(bits),
        "cuda": lambda: target.copy_(bits.to("cuda").to(dtype)),
        "cuda, pinned memory": lambda: locked.copy_(pinned.to("cuda", non_blocking=True).to(dtype)),
    }


def compare_bits(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return whether two tensors have the same bits, apart from the payload of a NaN."""
    differ = expected.view(torch.int16) != found.view(torch.int16)
    of_nan = differ & expected.isnan() & found.isnan()
    if not differ.any():
        return "equal"
    others = int(differ.sum() - of_nan.sum())
    return f"{others} values differ" if others else f"equal but for {int(of_nan.sum())} NaNs"


def timed(cast: Callable[[], torch.Tensor]) -> float:
    """Return the median seconds of a cast."""
    taken = []
    for _ in range(4 * ROUNDS):
        started = time.perf_counter()
        cast()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def per_gb(seconds: float, nbytes: int) -> str:
    """Return seconds per GB for people."""
    return f"{seconds / nbytes * GB:.3f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("benchmark-data"), metavar="DIR")
    parser.add_argument("--size", type=parse_size, default="2GB", help="of one copy of the weights")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was measured.")
        return 0
    say(torch.cuda.get_device_name())
    rows = measure_copies(Workspace(args.work), str(args.size)) + measure_casts()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    print(table(["", "seconds per GB read", "values"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
