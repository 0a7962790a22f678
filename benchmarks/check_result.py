"""Compare what a merge wrote with the weights that were made up for its source, bit by bit.

    python benchmarks/check_result.py SOURCE RESULT

RESULT is a directory of safetensors files, or a file of ``torch.save``. Prints one line and exits
1 where a tensor is missing or differs. A result in bfloat16 of a source in float32 has to be the
weights rounded, which is what `weights` makes.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_shapes import DESCRIPTION, Model, Parameter, parameters
from weights import flat_part, pieces

SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of a result: where its bytes are and how they are to be read."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    path: Path
    offset: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("result", type=Path, metavar="RESULT")
    args = parser.parse_args(argv)
    described = json.loads((args.source / DESCRIPTION).read_text())
    stored = getattr(torch, described["dtype"])
    fault = first_fault(Model(**described["model"]), stored, find_tensors(args.result))
    print(fault or "equal")
    return 1 if fault else 0


def find_tensors(result: Path) -> dict[str, Found]:
    """Return the tensors of a result by name."""
    if result.is_dir():
        files = sorted(result.glob("*.safetensors"))
        if files:
            return {name: found for path in files for name, found in of_safetensors(path)}
        (result,) = (p for p in result.iterdir() if p.suffix in (".pt", ".bin"))
    return of_torch(result)


def of_safetensors(path: Path) -> Iterator[tuple[str, Found]]:
    """Yield the tensors of one file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            offset = 8 + length + entry["data_offsets"][0]
            yield name, Found(dtype, tuple(entry["shape"]), path, offset)


def of_torch(path: Path) -> dict[str, Found]:
    """Return the tensors of a file of ``torch.save``."""
    state: Mapping[str, Any] = torch.load(path, map_location="meta", weights_only=True)
    if list(state) == ["model"]:
        state = state["model"]
    return {
        name: Found(
            tensor.dtype,
            tuple(tensor.shape),
            path,
            tensor.untyped_storage()._checkpoint_offset
            + tensor.storage_offset() * tensor.dtype.itemsize,
        )
        for name, tensor in state.items()
    }


def first_fault(model: Model, stored: torch.dtype, found: Mapping[str, Found]) -> str | None:
    """Return how a result differs from the model; None if it is as it should be.

    Args:
        model: The dimensions.
        stored: The dtype of the source, which a result may have in bfloat16 instead.
        found: The tensors of the result. Buffers may be among them; they are not looked at.
    """
    expected = parameters(model)
    missing = [parameter.name for parameter in expected if parameter.name not in found]
    if missing:
        return f"{len(missing)} of {len(expected)} tensors missing: {missing[0]} ..."
    converted = set()
    for parameter in expected:
        tensor = found[parameter.name]
        if tensor.shape != parameter.shape:
            return f"{parameter.name}: shape {tensor.shape}, expected {parameter.shape}"
        if tensor.dtype not in (stored, torch.bfloat16):
            return f"{parameter.name}: {tensor.dtype}, expected {stored}"
        converted.add(tensor.dtype)
        if not has_weights(parameter, tensor):
            return f"{parameter.name}: values differ"
    return None if len(converted) == 1 else "tensors of several dtypes"


def has_weights(parameter: Parameter, tensor: Found) -> bool:
    """Whether a tensor of a result has the bytes of the made-up weights."""
    assert tensor.dtype is not None
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        part = flat_part(parameter.name, 0, parameter.numel)
        return all(file.read(len(piece)) == piece for piece in pieces(part, tensor.dtype))


if __name__ == "__main__":
    raise SystemExit(main())
