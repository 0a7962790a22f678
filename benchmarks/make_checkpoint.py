"""Write an FSDP2 checkpoint of any size, as verl saves one, without holding it in memory.

Each rank file is what ``torch.save`` writes: real DTensors over a real DeviceMesh. The "fake"
backend of torch.distributed lets one process act as every rank in turn. Room for the tensor data
is reserved first and filled piece by piece, or left as holes (``--sparse``), so that a checkpoint
may be larger than the memory and, when sparse, than the disk.

    python benchmarks/make_checkpoint.py DST --size 4GB --world-size 8 --layout tp --buffers
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

LAYOUTS = ("shard0", "shard1", "tp", "hsdp")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

PIECE = 4 << 20  # bytes written at a time
TENSORS_PER_LAYER = 12


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a Qwen2 model; ``headless`` leaves the output head out."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    headless: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Contents:
    """What a storage holds: random values of ``dtype``, the same for the same ``seed``."""

    seed: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of the model; ``tp_dim`` is the dim that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None


MODELS = {
    "qwen2.5-0.5b": Model(896, 4864, 24, 14, 2, 151936),
    "qwen2.5-1.5b": Model(1536, 8960, 28, 12, 2, 151936),
    "qwen2.5-3b": Model(2048, 11008, 36, 16, 2, 151936),
    "qwen2.5-7b": Model(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": Model(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": Model(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": Model(8192, 29568, 80, 64, 8, 152064),
}


def parse_size(text: str) -> int:
    """Return bytes: ``"4GB"`` is decimal, ``"4GiB"`` binary."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parameters(model: Model) -> list[Parameter]:
    """Return the parameters of ``model`` in the order of its state dict."""
    hidden, kv = model.hidden, model.kv_heads * model.head_dim
    listed = [Parameter("model.embed_tokens.weight", (model.vocab, hidden), 0)]
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        for name, out in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            listed.append(Parameter(f"{prefix}self_attn.{name}.weight", (out, hidden), 0))
            listed.append(Parameter(f"{prefix}self_attn.{name}.bias", (out,), 0))
        listed.append(Parameter(f"{prefix}self_attn.o_proj.weight", (hidden, hidden), 1))
        for name in ("gate_proj", "up_proj"):
            listed.append(Parameter(f"{prefix}mlp.{name}.weight", (model.intermediate, hidden), 0))
        listed.append(Parameter(f"{prefix}mlp.down_proj.weight", (hidden, model.intermediate), 1))
        listed.append(Parameter(f"{prefix}input_layernorm.weight", (hidden,), None))
        listed.append(Parameter(f"{prefix}post_attention_layernorm.weight", (hidden,), None))
    listed.append(Parameter("model.norm.weight", (hidden,), None))
    if not model.headless:
        listed.append(Parameter("lm_head.weight", (model.vocab, hidden), 0))
    return listed


def model_of_size(
    size: int, itemsize: int, *, largest: int | None = None, tensors: int | None = None
) -> Model:
    """Choose dimensions so that the weights take about ``size`` bytes.

    Args:
        size: Bytes of all weights together.
        itemsize: Bytes of one element.
        largest: Bytes of the embedding, which is then the largest tensor; the head is left out.
        tensors: At least so many tensors, rounded up to whole layers.
    """
    fixed = 2 if largest else 3
    layers = math.ceil((tensors - fixed) / TENSORS_PER_LAYER) if tensors else None
    room = size - largest if largest else int(0.9 * size)  # the rest of it goes to the embeddings
    if room < 0:
        raise ValueError("the largest tensor is larger than the model")
    chosen = None
    for hidden in (64, 128, 256, 512, 1024, 1536, 2048, 3584, 5120, 8192):
        head_dim = 128 if hidden >= 1024 else 16
        heads = hidden // head_dim
        candidate = Model(hidden, 6 * hidden, 1, heads, max(2, heads // 4), 64)
        one_layer = itemsize * sum(math.prod(p.shape) for p in parameters(candidate)[1:-2])
        if chosen is None or one_layer * (layers or 20) <= room:
            chosen = candidate, layers or max(1, room // one_layer), one_layer
    assert chosen is not None
    dims, count, one_layer = chosen
    row = dims.hidden * itemsize
    vocab = largest // row if largest else max(64, (size - count * one_layer) // (2 * row))
    if not largest:
        vocab -= vocab % 64
    return Model(
        dims.hidden, dims.intermediate, count, dims.heads, dims.kv_heads, vocab, largest is not None
    )


def buffers(model: Model, size: int) -> dict[str, torch.Tensor]:
    """Return plain buffers, among them one that is larger than a copy buffer for a large model."""
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, model.head_dim, 2) / model.head_dim)
    rows = max(8, min(size // 128, 64_000_000) // (4 * model.head_dim))
    named: dict[str, torch.Tensor] = {"model.rotary_emb.inv_freq": inv_freq}
    named["model.rotary_emb.cos_cached"] = torch.empty(rows, model.head_dim)
    named["model.steps"] = torch.tensor(12345)
    named["model.enabled"] = torch.tensor([True, False, True])
    return named


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """Return length and padded length of one part, as ``torch.chunk`` cuts ``n``."""
    padded = -(-n // parts)
    return max(0, min(padded, n - index * padded)), padded


class Layout:
    """The device mesh of one rank and the placements of each parameter on it."""

    def __init__(self, name: str, world_size: int, rank: int) -> None:
        if name in ("tp", "hsdp") and (world_size % 2 or world_size < 4):
            raise ValueError(f"layout {name} needs an even world size of at least 4")
        self.name = name
        half = world_size // 2
        if name == "tp":
            self.mesh = init_device_mesh("cpu", (half, 2), mesh_dim_names=("fsdp", "tp"))
            self.fsdp_mesh, self.fsdp_rank, self.tp_rank = self.mesh["fsdp"], rank // 2, rank % 2
        elif name == "hsdp":
            self.mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("ddp", "fsdp"))
            self.fsdp_mesh, self.fsdp_rank, self.tp_rank = self.mesh, rank % half, 0
        else:
            self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
            self.fsdp_mesh, self.fsdp_rank, self.tp_rank = self.mesh, rank, 0
        self.fsdp_size = world_size if name in ("shard0", "shard1") else half

    def shard(
        self, parameter: Parameter, dtype: torch.dtype
    ) -> tuple[DTensor, torch.UntypedStorage, str]:
        """Return the DTensor, its storage with the padding of FSDP2, and the name of its chunk.

        Replicas of a chunk have the same name. The memory is reserved but never touched.
        """
        shape, dim = parameter.shape, 0
        # FSDP2 takes Shard(1) for even splits alone.
        if self.name == "shard1" and len(shape) == 2 and shape[1] % self.fsdp_size == 0:
            dim = 1
        local, mesh = list(shape), self.fsdp_mesh
        placements: list[Placement] = [Shard(dim)]
        chunk_name = f"{parameter.name}/{self.fsdp_rank}"
        if self.name == "hsdp":
            placements.insert(0, Replicate())
        if self.name == "tp" and parameter.tp_dim is not None:
            mesh = self.mesh
            chunk_name += f"/{self.tp_rank}"
            local[parameter.tp_dim], _ = chunk(shape[parameter.tp_dim], 2, self.tp_rank)
            if parameter.tp_dim == dim:
                placements = [_StridedShard(dim, split_factor=2)]
            placements.append(Shard(parameter.tp_dim))
        length, padded = chunk(local[dim], self.fsdp_size, self.fsdp_rank)
        local[dim] = padded
        whole = torch.empty(local, dtype=dtype)
        tensor = DTensor.from_local(
            whole.narrow(dim, 0, length),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        return tensor, whole.untyped_storage(), chunk_name


class ReservingWriter:
    """A writer for ``torch.save`` that leaves a hole in the file for chosen storages."""

    def __init__(self, path: Path, reserved: dict[int, Contents]) -> None:
        self._writer: Any = torch._C.PyTorchFileWriter(str(path))
        self._reserved = reserved
        self.members: dict[str, Contents] = {}

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        contents = None if isinstance(data, (str, bytes)) else self._reserved.get(data._cdata)
        if contents is None:
            self._writer.write_record(name, data, nbytes)
        else:
            self._writer.write_record_metadata(name, nbytes)
            self.members[name] = contents

    def close(self) -> None:
        self._writer.write_end_of_file()


def save(
    path: Path, state_dict: dict[str, Any], reserved: dict[int, Contents]
) -> dict[str, Contents]:
    """Write ``state_dict`` as ``torch.save`` does, without the data of the reserved storages.

    Args:
        path: The rank file to write.
        state_dict: The object to save.
        reserved: Contents by the ``_cdata`` of an untyped storage.

    Returns:
        Contents by member name.
    """
    serialization: Any = torch.serialization
    writer = ReservingWriter(path, reserved)
    serialization._save(state_dict, writer, pickle, 2, False)
    writer.close()
    return writer.members


@cache
def random_block(dtype: torch.dtype) -> memoryview:
    """Return random weights as bytes, more than two pieces of them."""
    generator = torch.Generator().manual_seed(0)
    count = 2 * PIECE // dtype.itemsize + 4097
    values = torch.randn(count, generator=generator).mul_(0.02).to(dtype)
    return values.view(torch.uint8).numpy().data


def pieces(contents: Contents, nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a storage; each piece starts elsewhere in the random block."""
    block, itemsize = random_block(contents.dtype), contents.dtype.itemsize
    source = random.Random(contents.seed)
    for begin in range(0, nbytes, PIECE):
        length = min(PIECE, nbytes - begin)
        start = source.randrange((len(block) - length) // itemsize) * itemsize
        yield block[start : start + length]


@cache
def crc_of_zeros(nbytes: int) -> int:
    crc, zeros = 0, bytes(PIECE)
    for begin in range(0, nbytes, PIECE):
        crc = zlib.crc32(zeros[: nbytes - begin], crc)
    return crc


def fill(path: Path, members: dict[str, Contents], *, sparse: bool) -> None:
    """Write the data of the reserved members (unless sparse) and the CRC-32 of each."""
    with zipfile.ZipFile(path) as archive:
        infos, directory = archive.filelist, archive.start_dir
    with path.open("r+b") as file:
        file.seek(directory)
        entries = bytearray(file.read())
        position = 0
        for info in infos:  # in the order of the central directory
            contents = members.get(info.filename.partition("/")[2])
            if contents is not None:
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                file.seek(name_length + extra_length, os.SEEK_CUR)
                if sparse:
                    crc = crc_of_zeros(info.file_size)
                    file.seek(info.file_size, os.SEEK_CUR)
                else:
                    crc = 0
                    for piece in pieces(contents, info.file_size):
                        crc = zlib.crc32(piece, crc)
                        file.write(piece)
                # A data descriptor follows the data; it and the directory hold the CRC-32.
                file.write(struct.pack("<II", 0x08074B50, crc))
                struct.pack_into("<I", entries, position + 16, crc)
            position += 46 + sum(struct.unpack_from("<HHH", entries, position + 28))
        file.seek(directory)
        file.write(entries)


def write_rank_file(
    dst: Path,
    model: Model,
    rank: int,
    world_size: int,
    *,
    layout: str,
    dtype: torch.dtype,
    plain: dict[str, torch.Tensor],
    sparse: bool,
) -> None:
    """Write ``model_world_size_{W}_rank_{R}.pt`` of one rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        placed = Layout(layout, world_size, rank)
        state_dict: OrderedDict[str, torch.Tensor] = OrderedDict()
        reserved: dict[int, Contents] = {}
        for parameter in parameters(model):
            tensor, storage, chunk_name = placed.shard(parameter, dtype)
            state_dict[parameter.name] = tensor
            reserved[storage._cdata] = Contents(chunk_name, dtype)
        for name, buffer in plain.items():
            state_dict[name] = buffer
            if buffer.ndim == 2:
                reserved[buffer.untyped_storage()._cdata] = Contents(name, buffer.dtype)
        path = dst / f"model_world_size_{world_size}_rank_{rank}.pt"
        fill(path, save(path, state_dict, reserved), sparse=sparse)
    finally:
        dist.destroy_process_group()


def write_checkpoint(
    dst: Path,
    model: Model,
    world_size: int,
    *,
    layout: str = "shard0",
    dtype: torch.dtype = torch.bfloat16,
    with_buffers: bool = False,
    sparse: bool = False,
) -> None:
    """Write the rank files, ``fsdp_config.json`` and ``huggingface/config.json``.

    Args:
        dst: The directory to make; it must not hold a checkpoint yet.
        model: The dimensions.
        world_size: Number of rank files.
        layout: One of ``LAYOUTS``.
        dtype: Of all parameters.
        with_buffers: Also write plain buffers, equal on all ranks.
        sparse: Leave the tensor data as holes, which read as zeros.
    """
    (dst / "huggingface").mkdir(parents=True)
    weight_bytes = dtype.itemsize * sum(math.prod(p.shape) for p in parameters(model))
    plain = buffers(model, weight_bytes) if with_buffers else {}
    for rank in range(world_size):
        write_rank_file(
            dst, model, rank, world_size, layout=layout, dtype=dtype, plain=plain, sparse=sparse
        )
    fsdp_config = {"FSDP_version": 2, "world_size": world_size}
    (dst / "fsdp_config.json").write_text(json.dumps(fsdp_config, indent=4))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": model.headless,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    (dst / "huggingface" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("dst", type=Path, metavar="DST")
    parser.add_argument("--size", default="1GB", help=f"such as 4GB, or {', '.join(MODELS)}")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--layout", choices=LAYOUTS, default="shard0")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--buffers", action="store_true", help="add replicated buffers")
    parser.add_argument("--largest", type=parse_size, help="size of the largest tensor")
    parser.add_argument("--tensors", type=int, help="at least so many tensors")
    parser.add_argument("--sparse", action="store_true", help="leave the tensor data as holes")
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    if args.size.lower() in MODELS:
        if args.largest or args.tensors:
            parser.error("--largest and --tensors need a --size in bytes")
        model = MODELS[args.size.lower()]
    else:
        size = parse_size(args.size)
        model = model_of_size(size, dtype.itemsize, largest=args.largest, tensors=args.tensors)
    write_checkpoint(
        args.dst,
        model,
        args.world_size,
        layout=args.layout,
        dtype=dtype,
        with_buffers=args.buffers,
        sparse=args.sparse,
    )
    count = len(parameters(model))
    weight_bytes = dtype.itemsize * sum(math.prod(p.shape) for p in parameters(model))
    print(f"{args.dst}: {args.world_size} rank files, {count} tensors, {weight_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
