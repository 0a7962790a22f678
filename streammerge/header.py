"""Safetensors headers, file names, the sharding rule and the index: everything around the bytes.

Pure functions. The layout is that of the ``safetensors`` library, so that a file is byte-identical
to its ``save_file``; the sharding rule is that of ``huggingface_hub``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from streammerge.dtypes import ITEMSIZE, PACKING
from streammerge.errors import UnsupportedError

METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_ORDER = {dtype: position for position, dtype in enumerate(ITEMSIZE)}


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor of that dtype (safetensors name) and shape (as torch has it)."""
    return math.prod(shape) * ITEMSIZE[dtype]


def storage_order(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Names of (name, dtype) pairs in the order in which safetensors stores them."""
    return [name for name, _ in sorted(tensors, key=lambda t: (_ORDER[t[1]], t[0]))]


def encode_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """The bytes before the data: 8 bytes of length, JSON, spaces up to a multiple of 8.

    Args:
        tensors: name -> (dtype, shape), already in storage order (see `storage_order`).

    Raises:
        UnsupportedError: a name that is not Unicode text or is reserved, or a header over the
            format's limit of 100,000,000 bytes.
    """
    header: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        if name == METADATA_KEY:
            raise UnsupportedError(f"key '{name}': the name is reserved in safetensors")
        end = begin + tensor_nbytes(dtype, shape)
        header[name] = {
            "dtype": dtype,
            "shape": _header_shape(dtype, shape),
            "data_offsets": [begin, end],
        }
        begin = end
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise UnsupportedError(f"a tensor name holds {bad!r}, which is not Unicode text") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"a file of {len(tensors):,} tensors needs a header of {len(text):,} bytes, "
            f"safetensors allows {MAX_HEADER_BYTES:,}",
            hint="use a smaller --max-shard-size",
        )
    return len(text).to_bytes(8, "little") + text


def split_into_shards(sizes: Mapping[str, int], max_shard_size: int) -> list[list[str]]:
    """Distribute tensors over files by the greedy rule of huggingface_hub.

    Tensors are taken in the given order. A file is closed when the next tensor would take it over
    the limit; a tensor above the limit gets a file of its own, at once, and closes nothing. Sizes
    of 6, 6, 2, 6, 2 and 2 GB under a limit of 10 GB give [6], [6, 2], [6, 2, 2]. Tensors without
    bytes go where the first of them is: to huggingface_hub they share a storage.

    Args:
        sizes: name -> bytes.
        max_shard_size: limit in bytes.

    Returns:
        The names of each file.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    current_size = 0
    empty: list[str] = []
    for name, size in sizes.items():
        if size == 0:
            empty.append(name)
            if len(empty) > 1:
                continue
        if size > max_shard_size:
            shards.append([name])
            continue
        if current_size + size > max_shard_size:
            shards.append(current)
            current, current_size = [], 0
        current.append(name)
        current_size += size
    if current:
        shards.append(current)
    if len(empty) > 1:
        next(shard for shard in shards if empty[0] in shard).extend(empty[1:])
    return shards


def shard_filename(index: int, count: int) -> str:
    """Name of file `index` (from 0) of `count`."""
    if count == 1:
        return SINGLE_FILE
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def encode_index(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """``model.safetensors.index.json``, laid out as transformers writes it.

    Args:
        weight_map: tensor name -> file name.
        total_size: bytes of all tensors.
        total_parameters: values in all tensors, buffers included (a rank file does not tell them
            from parameters).
    """
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2, ensure_ascii=True) + "\n").encode()


def _header_shape(dtype: str, shape: Sequence[int]) -> list[int]:
    packing = PACKING.get(dtype, 1)
    if packing == 1:
        return list(shape)
    if not shape:
        raise UnsupportedError(f"a 0-d tensor of packed dtype {dtype} has no safetensors shape")
    return [*shape[:-1], shape[-1] * packing]
