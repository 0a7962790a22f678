"""Write a checkpoint of any size, as FSDP2 training saves one, without holding it in memory.

Each rank file is what ``torch.save`` writes: real DTensors over a real DeviceMesh. The "fake"
backend of torch.distributed lets one process act as every rank in turn. Room for the tensor data
is reserved first and filled piece by piece, or left as holes (``--sparse``), so that a checkpoint
may be larger than the memory and, when sparse, than the disk. The same weights can be had in other
formats: torch's distributed checkpoint (``dcp``, as accelerate names its parts), the safetensors
files of its ranks (``safetensors``), and DeepSpeed's ZeRO stage 2 (``zero``).

    python benchmarks/make_checkpoint.py DST --size 4GB --world-size 8 --layout tp --buffers
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_shapes import (
    DCP_FOLDER,
    DESCRIPTION,
    FORMATS,
    LAYOUTS,
    MODELS,
    Model,
    Parameter,
    config,
    count_values,
    model_of_size,
    parameters,
    parse_size,
    to_json,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from weights import Part, flat_part, pieces

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

ZEROS = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a storage holds: parts of made-up weights of ``dtype``, then zeros."""

    parts: tuple[Part, ...]
    dtype: torch.dtype

    def pieces(self, nbytes: int) -> Iterator[bytes | memoryview]:
        """Yield ``nbytes``, in pieces."""
        left = nbytes
        for part in self.parts:
            for piece in pieces(part, self.dtype):
                yield piece
                left -= len(piece)
        while left > 0:
            yield ZEROS[:left]
            left -= len(ZEROS)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a parameter that a rank holds.

    Attributes:
        parameter: of the model.
        tensor: the DTensor. Its memory is reserved but never touched.
        storage: that memory, with the padding of FSDP2.
        contents: what the storage is to hold.
    """

    parameter: Parameter
    tensor: DTensor
    storage: torch.UntypedStorage
    contents: Contents


def buffers(model: Model, size: int) -> dict[str, torch.Tensor]:
    """Return plain buffers, among them one that is larger than a copy buffer for a large model."""
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, model.head_dim, 2) / model.head_dim)
    rows = max(8, min(size // 128, 64_000_000) // (4 * model.head_dim))
    named: dict[str, torch.Tensor] = {"model.rotary_emb.inv_freq": inv_freq}
    named["model.rotary_emb.cos_cached"] = torch.empty(rows, model.head_dim)
    named["model.steps"] = torch.tensor(12345)
    named["model.enabled"] = torch.tensor([True, False, True])
    return named


def buffer_contents(name: str, buffer: torch.Tensor) -> Contents | None:
    """Return what is made up for a buffer; None for one that has its values already."""
    if buffer.ndim != 2:
        return None
    return Contents((flat_part(name, 0, buffer.numel()),), buffer.dtype)


def chunk(n: int, parts: int, index: int) -> tuple[int, int, int]:
    """Return start, length and padded length of one part, as ``torch.chunk`` cuts ``n``."""
    padded = -(-n // parts)
    start = min(n, index * padded)
    return start, min(padded, n - start), padded


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

    def shard(self, parameter: Parameter, dtype: torch.dtype) -> LocalShard:
        """Return this rank's part of a parameter."""
        shape, dim = parameter.shape, 0
        # FSDP2 takes Shard(1) for even splits alone.
        if self.name == "shard1" and len(shape) == 2 and shape[1] % self.fsdp_size == 0:
            dim = 1
        starts, local, mesh = [0] * len(shape), list(shape), self.fsdp_mesh
        placements: list[Placement] = [Shard(dim)]
        if self.name == "hsdp":
            placements.insert(0, Replicate())
        if self.name == "tp" and parameter.tp_dim is not None:
            mesh = self.mesh
            at = parameter.tp_dim
            starts[at], local[at], _ = chunk(shape[at], 2, self.tp_rank)
            if at == dim:
                placements = [_StridedShard(dim, split_factor=2)]
            placements.append(Shard(at))
        start, length, padded = chunk(local[dim], self.fsdp_size, self.fsdp_rank)
        starts[dim] += start
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
        local[dim] = length
        ranges = [(start, start + n) for start, n in zip(starts, local, strict=True)]
        rows, within = (*ranges, (0, 1))[:2]
        part = Part(parameter.name, (*shape, 1)[1], rows, within)
        return LocalShard(parameter, tensor, whole.untyped_storage(), Contents((part,), dtype))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write.

    Attributes:
        model: the dimensions.
        world_size: number of ranks.
        layout: one of ``LAYOUTS``.
        dtype: of all parameters.
        buffers: plain buffers, equal on all ranks.
        sparse: leave the tensor data as holes, which read as zeros.
    """

    model: Model
    world_size: int
    layout: str
    dtype: torch.dtype
    buffers: Mapping[str, torch.Tensor]
    sparse: bool

    @contextlib.contextmanager
    def acting_as(self, rank: int) -> Iterator[list[LocalShard]]:
        """Be one rank of the process group; gives its parts of all parameters."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.world_size)
        try:
            layout = Layout(self.layout, self.world_size, rank)
            yield [layout.shard(parameter, self.dtype) for parameter in parameters(self.model)]
        finally:
            dist.destroy_process_group()


# --- rank files ---


class ReservingWriter:
    """A writer for ``torch.save`` that leaves a hole in the file for chosen storages."""

    def __init__(self, path: Path, reserved: Mapping[int, Contents]) -> None:
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


def save(path: Path, value: Any, reserved: Mapping[int, Contents], *, sparse: bool) -> None:
    """Write what ``torch.save`` writes.

    Args:
        path: The file to write.
        value: The object to save.
        reserved: Contents by the ``_cdata`` of an untyped storage, in place of its own.
        sparse: Leave holes there.
    """
    serialization: Any = torch.serialization
    writer = ReservingWriter(path, reserved)
    serialization._save(value, writer, pickle, 2, False)
    writer.close()
    fill(path, writer.members, sparse=sparse)


@cache
def crc_of_zeros(nbytes: int) -> int:
    crc = 0
    for begin in range(0, nbytes, len(ZEROS)):
        crc = zlib.crc32(ZEROS[: nbytes - begin], crc)
    return crc


def fill(path: Path, members: Mapping[str, Contents], *, sparse: bool) -> None:
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
                    for piece in contents.pieces(info.file_size):
                        crc = zlib.crc32(piece, crc)
                        file.write(piece)
                # A data descriptor follows the data; it and the directory hold the CRC-32.
                file.write(struct.pack("<II", 0x08074B50, crc))
                struct.pack_into("<I", entries, position + 16, crc)
            position += 46 + sum(struct.unpack_from("<HHH", entries, position + 28))
        file.seek(directory)
        file.write(entries)


def write_rank_files(dst: Path, recipe: Recipe, jobs: int) -> None:
    """Write the files of all ranks, by several processes, and ``fsdp_config.json``."""
    write = partial(write_rank_file, dst, recipe)
    if jobs > 1:
        # A fork would inherit torch's threads, or rather their locks.
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            list(pool.map(write, range(recipe.world_size)))
    else:
        for rank in range(recipe.world_size):
            write(rank)
    stated = {"FSDP_version": 2, "world_size": recipe.world_size}
    (dst / "fsdp_config.json").write_text(json.dumps(stated, indent=4))


def write_rank_file(dst: Path, recipe: Recipe, rank: int) -> None:
    """Write ``model_world_size_{W}_rank_{R}.pt`` of one rank."""
    with recipe.acting_as(rank) as shards:
        state_dict: OrderedDict[str, torch.Tensor] = OrderedDict()
        reserved: dict[int, Contents] = {}
        for shard in shards:
            state_dict[shard.parameter.name] = shard.tensor
            reserved[shard.storage._cdata] = shard.contents
        for name, buffer in recipe.buffers.items():
            state_dict[name] = buffer
            contents = buffer_contents(name, buffer)
            if contents is not None:
                reserved[buffer.untyped_storage()._cdata] = contents
        path = dst / f"model_world_size_{recipe.world_size}_rank_{rank}.pt"
        save(path, state_dict, reserved, sparse=recipe.sparse)


# --- torch.distributed.checkpoint ---


class FillingPlanner(DefaultSavePlanner):
    """A planner that makes up the data of a tensor when it is about to be written."""

    def __init__(self, contents: Mapping[str, Contents]) -> None:
        super().__init__()
        self._contents = contents

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        contents = self._contents.get(write_item.index.fqn)
        if contents is None:
            return found
        made = torch.empty(found.shape, dtype=found.dtype)
        at, flat = 0, made.view(-1).view(torch.uint8).numpy()
        for piece in contents.pieces(made.nbytes):
            flat[at : at + len(piece)] = piece
            at += len(piece)
        return made


def write_with_torch(writer: StorageWriter, recipe: Recipe, prefix: str) -> None:
    """Write what ``torch.distributed.checkpoint.save`` writes, one rank after the other.

    Args:
        writer: Of torch.
        recipe: What to write.
        prefix: The state dict is wrapped in a dict with this key, unless empty.
    """
    planners, plans = [], []
    for rank in range(recipe.world_size):
        with recipe.acting_as(rank) as shards:
            state: dict[str, Any] = {s.parameter.name: s.tensor for s in shards}
            made = {s.parameter.name: s.contents for s in shards}
            for name, buffer in recipe.buffers.items():
                state[name] = buffer
                contents = buffer_contents(name, buffer)
                if contents is not None:
                    made[name] = contents
            if prefix:
                state = {prefix: state}
                made = {f"{prefix}.{name}": contents for name, contents in made.items()}
            planner = FillingPlanner(made)
            planner.set_up_planner(state, is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            planners.append(planner)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


# --- DeepSpeed ---


def zero_partitions(listed: Sequence[Parameter], count: int) -> list[tuple[int, tuple[Part, ...]]]:
    """Cut the parameters, laid end to end, as ZeRO stage 2 does.

    Returns:
        For each rank, the length of its partition, and what is in it before the padding.
    """
    total = sum(parameter.numel for parameter in listed)
    length = -(-total // (2 * count)) * 2  # partitions start at a multiple of 4 bytes in 16 bit
    held: list[list[Part]] = [[] for _ in range(count)]
    at = 0
    for parameter in listed:
        for rank in range(at // length, (at + parameter.numel - 1) // length + 1):
            start = max(0, rank * length - at)
            stop = min(parameter.numel, (rank + 1) * length - at)
            held[rank].append(flat_part(parameter.name, start, stop))
        at += parameter.numel
    return [(length, tuple(parts)) for parts in held]


def write_zero(dst: Path, recipe: Recipe) -> None:
    """Write float32 partitions and the bfloat16 module, without the moments of the optimizer."""
    step = dst / "global_step1"
    step.mkdir()
    (dst / "latest").write_text(step.name)
    listed = parameters(recipe.model)
    module = OrderedDict((p.name, torch.empty(p.shape, dtype=torch.bfloat16)) for p in listed)
    reserved = {
        module[p.name].untyped_storage()._cdata: Contents(
            (flat_part(p.name, 0, p.numel),), torch.bfloat16
        )
        for p in listed
    }
    model_states: dict[str, Any] = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [OrderedDict((p.name, torch.Size(p.shape)) for p in listed)],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "dp_world_size": recipe.world_size,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    save(step / "mp_rank_00_model_states.pt", model_states, reserved, sparse=recipe.sparse)
    for rank, (length, parts) in enumerate(zero_partitions(listed, recipe.world_size)):
        flat = torch.empty(length)
        optimizer = {
            "zero_stage": 2,
            "partition_count": [recipe.world_size],
            "single_partition_of_fp32_groups": [flat],
            "group_paddings": [0],
            "ds_version": "0.19.8",
        }
        save(
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            {flat.untyped_storage()._cdata: Contents(parts, torch.float32)},
            sparse=recipe.sparse,
        )


# --- all of them ---


def write_checkpoint(
    dst: Path,
    model: Model,
    world_size: int,
    *,
    layout: str = "shard0",
    dtype: torch.dtype = torch.bfloat16,
    with_buffers: bool = False,
    sparse: bool = False,
    form: str = "rank-files",
    jobs: int = 1,
) -> None:
    """Write a checkpoint and ``huggingface/config.json``.

    Args:
        dst: The directory to make; it must not hold a checkpoint yet.
        model: The dimensions.
        world_size: Number of ranks.
        layout: One of ``LAYOUTS``; ``zero`` has its own.
        dtype: Of all parameters; ``zero`` has its own.
        with_buffers: Also write plain buffers, equal on all ranks.
        sparse: Leave the tensor data as holes, which read as zeros.
        form: One of ``FORMATS``.
        jobs: Processes that write rank files.

    Raises:
        ValueError: a layout that the world size does not allow, or holes where torch writes.
    """
    (dst / "huggingface").mkdir(parents=True)
    plain = buffers(model, dtype.itemsize * count_values(model)) if with_buffers else {}
    recipe = Recipe(model, world_size, layout, dtype, plain, sparse)
    if form == "rank-files":
        write_rank_files(dst, recipe, jobs)
    elif form == "zero":
        dtype = torch.float32  # what comes out
        write_zero(dst, recipe)
    elif sparse:
        raise ValueError(f"{form} is written by torch, which leaves no holes")
    elif form == "dcp":
        writer = FileSystemWriter(dst / DCP_FOLDER, sync_files=False)
        write_with_torch(writer, recipe, "model")
    else:
        shards = HuggingFaceStorageWriter(
            str(dst), dict.fromkeys(names(model, plain), 1), save_distributed=True
        )
        write_with_torch(shards, recipe, "")
    dtype_name = str(dtype).removeprefix("torch.")
    (dst / "huggingface" / "config.json").write_text(
        json.dumps(config(model, dtype_name), indent=2) + "\n"
    )
    described = {"model": to_json(model), "dtype": dtype_name, "sparse": sparse}
    (dst / DESCRIPTION).write_text(json.dumps(described))


def names(model: Model, plain: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of all tensors."""
    return [*(parameter.name for parameter in parameters(model)), *plain]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("dst", type=Path, metavar="DST")
    parser.add_argument("--size", default="1GB", help=f"such as 4GB, or {', '.join(MODELS)}")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--format", choices=FORMATS, default="rank-files")
    parser.add_argument("--layout", choices=LAYOUTS, default="shard0")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--buffers", action="store_true", help="add replicated buffers")
    parser.add_argument("--largest", type=parse_size, help="size of the largest tensor")
    parser.add_argument("--tensors", type=int, help="at least so many tensors")
    parser.add_argument("--sparse", action="store_true", help="leave the tensor data as holes")
    parser.add_argument("--jobs", type=int, default=1, help="processes that write rank files")
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    if args.size.lower() in MODELS:
        if args.largest or args.tensors:
            parser.error("--largest and --tensors need a --size in bytes")
        model = MODELS[args.size.lower()]
    else:
        size = parse_size(args.size)
        model = model_of_size(size, dtype.itemsize, largest=args.largest, tensors=args.tensors)
    try:
        write_checkpoint(
            args.dst,
            model,
            args.world_size,
            layout=args.layout,
            dtype=dtype,
            with_buffers=args.buffers,
            sparse=args.sparse,
            form=args.format,
            jobs=args.jobs,
        )
    except ValueError as error:
        parser.error(str(error))
    count = len(parameters(model))
    weight_bytes = dtype.itemsize * count_values(model)
    print(f"{args.dst}: {args.world_size} ranks, {count} tensors, {weight_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
