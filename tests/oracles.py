"""Expected results by the reference libraries: safetensors and huggingface_hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    """Both hold the same names, dtypes, shapes and bits."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(raw_bits(found[name]), raw_bits(value)), name


def assert_same_directory(
    directory: Path, expected: Mapping[str, torch.Tensor], max_shard_size: int | str
) -> None:
    """The weights in `directory` are, byte for byte, what the reference libraries write.

    Args:
        directory: a merged directory.
        expected: the tensors in the order of the checkpoint.
        max_shard_size: limit of a file.
    """
    clones = {name: value.clone().contiguous() for name, value in expected.items()}
    split = split_torch_state_dict_into_shards(clones, max_shard_size=max_shard_size)
    written = sorted(path.name for path in directory.glob("*.safetensors"))
    assert written == sorted(split.filename_to_tensors)
    for filename, names in split.filename_to_tensors.items():
        reference = save({name: clones[name] for name in names}, metadata={"format": "pt"})
        assert (directory / filename).read_bytes() == reference, filename
    index = directory / "model.safetensors.index.json"
    assert index.exists() == split.is_sharded
    if split.is_sharded:
        content = json.loads(index.read_text())
        assert content["weight_map"] == split.tensor_to_filename
        assert content["metadata"]["total_size"] == split.metadata["total_size"]
        numel = sum(clone.numel() for clone in clones.values())
        assert content["metadata"]["total_parameters"] == numel


def load_directory(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a merged directory, read by safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        part = load_file(path)
        assert not set(part) & set(tensors)
        tensors.update(part)
    return tensors
