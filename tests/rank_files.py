"""Makers of real rank files: what each rank of a job would save, without communication.

torch itself does the work. Its "fake" process group lets one process act as every rank in turn, so
device meshes, `DTensorSpec`s, FSDP2 and the pickles are the genuine ones; only the collectives are
missing. Two things follow from that:

- A local shard cannot be scattered, so `dtensor` cuts it out of the global tensor with torch's own
  splitting, in the order in which torch's specs say that the splits were made. `full_tensor` closes
  the circle: it feeds the shards to torch's real `DTensor.full_tensor`.
- A rank's place along a mesh dim is asked of the process group (`DeviceMesh.get_local_rank`), not
  of the mesh coordinate: groups sort their ranks.

`python rank_files.py real|fake DIR` saves the same small state dicts from four real gloo processes
or from one that acts as each of them.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

StateDict = dict[str, Any]
ShardOrder = tuple[ShardOrderEntry, ...]

# Every dtype that a safetensors file can hold and torch can save.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
# torch has no typed storage class for these, and its legacy format cannot write them.
NOT_IN_LEGACY_FILES = frozenset(
    dtype for dtype in DTYPES if dtype.itemsize == 1 and dtype.is_floating_point
) | {torch.uint16, torch.uint32, torch.uint64}

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)

# Splitting, copying and stitching are done on integers of the same size: some kernels are missing
# for the small floats, and none of them may touch a bit.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Ways to store the same values; see `arrange`.
LAYOUTS = ("dense", "offset", "padded", "permuted", "channels_last", "stepped", "view", "conj")
_FILLER = 0xA5  # bytes around a tensor that are not its own must never surface


@dataclass(frozen=True)
class MeshPlan:
    """How a job makes a device mesh.

    Attributes:
        shape: sizes of the root mesh.
        ranks: ranks of the root mesh, row-major. May leave out ranks of the job.
        names: names of the root's mesh dims.
        dims: slice the root by these names.
        flatten: flatten the slice into one mesh dim.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = None
    dims: tuple[str, ...] | None = None
    flatten: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh dims that the tensor sees."""
        if self.dims is None or self.names is None:
            return self.shape
        sizes = tuple(self.shape[self.names.index(name)] for name in self.dims)
        return (math.prod(sizes),) if self.flatten else sizes

    def build(self, roots: dict[MeshPlan, DeviceMesh]) -> DeviceMesh | None:
        """The mesh as the current rank sees it, None if it is not in it.

        Args:
            roots: root meshes made so far, which slices of one root share as in a job.
        """
        key = MeshPlan(self.shape, self.ranks, self.names)
        if key not in roots:
            roots[key] = DeviceMesh(
                "cpu", torch.tensor(self.ranks).view(self.shape), mesh_dim_names=self.names
            )
        mesh = roots[key]
        if dist.get_rank() not in self.ranks:
            return None  # it took part in making the process groups, though
        if self.dims is not None:
            mesh = mesh[self.dims]
        return mesh._flatten() if self.flatten else mesh


@dataclass(frozen=True)
class RankMesh:
    """A device mesh as one rank holds it, with the rank's place in the group of each mesh dim."""

    mesh: DeviceMesh
    positions: tuple[int, ...]


@dataclass(frozen=True)
class FullyShard:
    """Let FSDP2 make the DTensor.

    Attributes:
        dim: the tensor dim that FSDP2 shards.
        data_dims: names of the mesh dims to pass: one shards, two replicate and shard (HSDP).
        tensor_dims: name of the tensor-parallel mesh dim, if any; the entry's placements apply
            there first.
    """

    dim: int
    data_dims: tuple[str, ...]
    tensor_dims: tuple[str, ...] = ()

    def mesh_of(self, root: MeshPlan) -> MeshPlan:
        """The mesh that FSDP2 gives the DTensor: its own dims, then the tensor-parallel one."""
        dims = self.data_dims + self.tensor_dims
        return root if dims == root.names else replace(root, dims=dims)


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
        seed: of the values.
        numbers: values that are hard to round, not just any bits.
        mesh: index into the checkpoint's meshes; None for a plain tensor.
        placements: one per mesh dim (with `fully_shard`: those of the tensor-parallel dims).
        shard_order: the spec's own field, where it is not the default.
        layout: how ranks store their local shard, one of `LAYOUTS`.
        layout_every: the layout holds for every n-th rank, the others store it densely.
        expand: this dim holds one value repeated, with stride 0 as far as the layout keeps it.
        tied: a second key for the same tensor.
        fused: (dim, parts): store one tensor, save each part of it as a view under its own key.
        holders: the ranks that have the key; None means all that are in the mesh.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int = 0
    numbers: bool = False
    mesh: int | None = None
    placements: tuple[Placement, ...] = ()
    shard_order: ShardOrder | None = None
    fully_shard: FullyShard | None = None
    layout: str = "dense"
    layout_every: int = 1
    expand: int | None = None
    parameter: bool = False
    tied: bool = False
    fused: tuple[int, int] | None = None
    holders: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Everything that decides the bytes of a set of rank files.

    Attributes:
        wrapped: save ``{"model": state_dict, "step": 3}``.
        extra_state: add entries that are no tensors.
        location: device that the storages claim to come from.
    """

    world_size: int
    meshes: tuple[MeshPlan, ...]
    entries: tuple[Entry, ...]
    legacy: bool = False
    protocol: int = 2
    wrapped: bool = False
    extra_state: bool = False
    location: str = "cpu"


@contextmanager
def acting_as(rank: int, world_size: int) -> Iterator[None]:
    """Within, torch.distributed takes this process for that rank of a job of that size."""
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    _forget_other_ranks()
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch puts its own around it, each time


def _forget_other_ranks() -> None:
    """Empty torch's cache of operator results.

    A DTensor operator (`detach` in `nn.Parameter`, for one) takes its result's spec from that cache
    if the inputs' meshes are equal, and those of two ranks are: it would hand out the wrong one.
    """
    _clear_sharding_prop_cache()


def rank_file(folder: Path, rank: int, world_size: int) -> Path:
    """The path under which verl saves the state dict of a rank."""
    return folder / f"model_world_size_{world_size}_rank_{rank}.pt"


def save_rank_files(
    folder: Path,
    world_size: int,
    build: Callable[[int], StateDict],
    *,
    legacy: bool = False,
    protocol: int = 2,
    location: str = "cpu",
) -> None:
    """Save what `build(rank)` returns for each rank, called while torch takes us for that rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        with acting_as(rank, world_size):
            _save(build(rank), rank_file(folder, rank, world_size), legacy, protocol, location)


def _save(state: StateDict, path: Path, legacy: bool, protocol: int, location: str) -> None:
    with ExitStack() as stack:
        if location != "cpu":
            # What torch calls to learn where a storage lives; the rest of a file does not differ.
            stack.enter_context(
                mock.patch("torch.serialization.location_tag", return_value=location)
            )
        torch.save(
            state,
            path,
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=not legacy,
        )


# --- values and how they are stored ---------------------------------------------------------------


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same size and strides."""
    return tensor.resolve_conj().view(_RAW[tensor.dtype.itemsize])


def contiguous_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Bit-exact contiguous copy, for every dtype."""
    bits = raw(tensor)
    return torch.empty(bits.shape, dtype=bits.dtype).copy_(bits).view(tensor.dtype)


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A tensor of random bits: NaNs with payloads, infinities, denormals and signed zeros occur."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(high, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(tuple(shape))


# How many bits of each dtype's mantissa some conversion to another dtype drops.
_DROPPED = {
    torch.float64: (29, 42, 45),
    torch.float32: (13, 16),
    torch.float16: (3,),
    torch.bfloat16: (1, 2, 3),
}


def random_numbers(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Floating-point values that are hard to round: ties, their neighbours, ends of the range.

    Half of them have any bits, half are of a size that all dtypes can hold, and in most of both the
    bits that a conversion drops are just above, just below or just one half.
    """
    bits = random_bits(dtype, shape, seed)
    if dtype not in _DROPPED:
        return bits
    generator = torch.Generator().manual_seed(seed + 1)

    def pick(values: Sequence[float]) -> torch.Tensor:
        index = torch.randint(len(values), bits.shape, generator=generator)
        return torch.tensor(values)[index]

    mantissas = 1 + torch.rand(bits.shape, generator=generator, dtype=torch.float64)
    numbers = (
        mantissas * pick((-1, 1)) * 2.0 ** torch.randint(-30, 20, bits.shape, generator=generator)
    )
    integers = torch.where(pick((0, 1)) == 1, raw(numbers.to(dtype)), raw(bits)).long()
    dropped = pick((0, *_DROPPED[dtype]))
    tails = (1 << dropped) // 2 + pick((-1, 0, 0, 1))
    rounded = torch.where(dropped > 0, integers >> dropped << dropped | tails, integers)
    return rounded.to(_RAW[dtype.itemsize]).view(dtype)


def arrange(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor with the same logical values, stored another way.

    Args:
        layout: "view" leaves the tensor as it is, a view on whatever it was cut from. "dense" is a
            copy of its own; "offset" starts inside a larger storage; "padded" is followed by
            padding, as in FSDP2; "permuted" has its dims reversed in memory; "channels_last" as
            torch has it (4-d, else as "permuted"); "stepped" takes every other element of the last
            dim; "conj" stores the conjugates and has the bit set (complex only, else "dense").
    """
    if layout == "view":
        return tensor
    if layout == "conj" and tensor.dtype.is_complex:
        return contiguous_clone(tensor.resolve_conj().conj_physical()).conj()
    source = raw(tensor)
    shape = source.shape
    if layout == "offset":
        room = _filled(source.numel() + 5, source.dtype)
        target = room[3 : 3 + source.numel()].view(shape)
    elif layout == "padded":
        room = _filled(source.numel() + 8, source.dtype)
        target = room[: source.numel()].view(shape)
    elif layout == "channels_last" and source.ndim == 4:
        target = (
            _filled(source.numel(), source.dtype)
            .view(shape[0], shape[2], shape[3], shape[1])
            .permute(0, 3, 1, 2)
        )
    elif layout in ("permuted", "channels_last"):
        dims = tuple(reversed(range(source.ndim)))
        target = _filled(source.numel(), source.dtype).view(tuple(reversed(shape))).permute(dims)
    elif layout == "stepped" and source.ndim:
        room = _filled(2 * source.numel(), source.dtype).view(*shape[:-1], 2 * shape[-1])
        target = room[..., ::2]
    else:
        target = torch.empty(shape, dtype=source.dtype)
    return target.copy_(source).view(tensor.dtype)


def _filled(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count * dtype.itemsize,), _FILLER, dtype=torch.uint8).view(dtype)


# --- DTensors -------------------------------------------------------------------------------------


def rank_mesh(mesh: DeviceMesh) -> RankMesh:
    """Ask torch for the current rank's place in the group of each mesh dim."""
    return RankMesh(mesh, tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim)))


def shard_order(
    mesh: DeviceMesh, placements: Sequence[Placement], explicit: ShardOrder | None = None
) -> ShardOrder | None:
    """In which order torch says that the mesh dims split each tensor dim.

    Returns:
        None if the split factors of `_StridedShard` stand for no order.
    """
    if explicit is not None:
        return explicit
    return DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(placements), mesh)


def local_view(
    full: torch.Tensor,
    where: RankMesh,
    placements: Sequence[Placement],
    order: ShardOrder | None = None,
) -> torch.Tensor:
    """The current rank's part of a tensor, as a view where that is possible.

    The splits are those of `distribute_tensor`, but made in the order of the spec. For uneven
    sizes, `distribute_tensor` makes shards of `_StridedShard` that `full_tensor` cannot put
    together again, so it is no model; FSDP2 over TP, which the placement exists for, is.
    """
    part = raw(full)
    steps = shard_order(where.mesh, placements, order)
    if steps is not None:
        for tensor_dim, mesh_dims in steps:
            for mesh_dim in mesh_dims:
                parts = Shard._custom_chunk(part, where.mesh.size(mesh_dim), tensor_dim)
                part = parts[where.positions[mesh_dim]]
    else:
        for mesh_dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(
                    part, where.mesh.size(mesh_dim), with_padding=False, contiguous=False
                )
                part = parts[where.positions[mesh_dim]]
    return part.view(full.dtype)


def dtensor(
    full: torch.Tensor,
    mesh: DeviceMesh | RankMesh,
    placements: Sequence[Placement],
    *,
    order: ShardOrder | None = None,
    layout: str = "dense",
) -> DTensor:
    """The current rank's DTensor of a global tensor.

    Args:
        mesh: the rank must be in it. A bare mesh needs the rank's process group to be active.
        order: the spec's `shard_order`, where it is not the default.
        layout: how the local shard is stored, see `arrange`.
    """
    where = mesh if isinstance(mesh, RankMesh) else rank_mesh(mesh)
    local = arrange(local_view(full, where, placements, order), layout)
    return from_local(local, where.mesh, placements, full, order)


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    full: torch.Tensor,
    order: ShardOrder | None = None,
) -> DTensor:
    """A DTensor around a local shard; the global shape, stride and dtype are those of `full`."""
    # Newer torch gives a DTensor its local shard's storage offset and then fails to save it; up to
    # 2.9 such files were written. Around a shard without an offset they still come out the same.
    plain = local if local.storage_offset() == 0 else contiguous_clone(local)
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        tensor_meta=TensorMeta(full.size(), full.stride(), full.dtype),
        shard_order=order,  # type: ignore[arg-type]
    )
    tensor = DTensor(plain, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter as a module has it; trainable if its dtype can be."""
    trainable = tensor.dtype in _TRAINABLE
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad=trainable)
    around = from_local(
        contiguous_clone(tensor._local_tensor),
        tensor.device_mesh,
        tensor.placements,
        tensor,
        None if tensor._spec.use_strided_shard_as_shard_order else tensor._spec.shard_order,
    )
    parameter = nn.Parameter(around, requires_grad=trainable)
    assert parameter._spec == tensor._spec
    parameter._local_tensor = tensor._local_tensor  # see `from_local`
    return parameter


def full_tensor(
    world_size: int,
    plan: MeshPlan,
    shards: Mapping[int, DTensor],
) -> torch.Tensor:
    """`DTensor.full_tensor` of the shards of all ranks, its collectives played within one process.

    Args:
        shards: one DTensor per rank of the job, all of one tensor.
    """
    first = shards[0]
    bits = {rank: contiguous_clone(raw(shard._local_tensor)) for rank, shard in shards.items()}
    with acting_as(0, world_size):
        mesh = plan.build({})
        assert mesh is not None
        dtype = raw(first._local_tensor).dtype
        meta = TensorMeta(first.shape, first.stride(), dtype)
        spec = DTensorSpec(mesh, first._spec.placements, tensor_meta=meta)
        if not first._spec.use_strided_shard_as_shard_order:
            spec.shard_order = first._spec.shard_order
        with _quiet_redistribution(), LocalTensorMode(world_size):
            gathered = DTensor(LocalTensor(bits), spec, requires_grad=False).full_tensor()
            if isinstance(gathered, LocalTensor):
                gathered = gathered.reconcile()  # raises unless all ranks got the same
    return gathered.view(first.dtype)


@contextmanager
def _quiet_redistribution() -> Iterator[None]:
    """torch logs a warning wherever several gathers follow each other."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def fully_sharded(
    parameters: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    dims: Mapping[str, int],
) -> StateDict:
    """The state dict of a module with these parameters after FSDP2.

    Args:
        parameters: whole tensors, or DTensors that tensor parallelism has already split.
        mesh: 1-D, or 2-D for HSDP. The rank's process group must be active.
        dims: the tensor dim to shard, by name.
    """
    module = nn.Module()
    by_id = {}
    for name, tensor in parameters.items():
        parameter = nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(name, parameter)
        by_id[id(parameter)] = Shard(dims[name])
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: by_id[id(p)])
    return module.state_dict()


# --- whole checkpoints ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def rank_meshes(
    world_size: int, rank: int, plans: tuple[MeshPlan, ...]
) -> tuple[RankMesh | None, ...]:
    """The meshes of a job as one rank holds them; None for a mesh that the rank is not in.

    Cached: making process groups is what takes the time.
    """
    with acting_as(rank, world_size):
        return _build_meshes(plans)


def _build_meshes(plans: Sequence[MeshPlan]) -> tuple[RankMesh | None, ...]:
    roots: dict[MeshPlan, DeviceMesh] = {}
    meshes = [plan.build(roots) for plan in plans]
    return tuple(None if mesh is None else rank_mesh(mesh) for mesh in meshes)


def global_tensors(entry: Entry) -> dict[str, torch.Tensor]:
    """The values of an entry by key, before any splitting: what a merge must give back."""
    full = _global_tensor(entry)
    if entry.fused is not None:
        dim, parts = entry.fused
        # Views of uneven length: those of fused query, key and value differ as well.
        pieces = raw(full).tensor_split(parts, dim)
        return {f"{entry.key}.{i}": piece.view(full.dtype) for i, piece in enumerate(pieces)}
    keys = [entry.key, f"{entry.key}.tied"] if entry.tied else [entry.key]
    return dict.fromkeys(keys, full)


def _global_tensor(entry: Entry) -> torch.Tensor:
    make = random_numbers if entry.numbers else random_bits
    if entry.expand is None:
        return make(entry.dtype, entry.shape, entry.seed)
    thin = list(entry.shape)
    thin[entry.expand] = min(thin[entry.expand], 1)
    bits = raw(make(entry.dtype, thin, entry.seed))
    return bits.expand(entry.shape).view(entry.dtype)


def state_dict(checkpoint: Checkpoint, rank: int) -> StateDict:
    """What a rank saves, before any wrapping."""
    plans = checkpoint.meshes
    if any(entry.fully_shard for entry in checkpoint.entries):
        with acting_as(rank, checkpoint.world_size):
            return _state_dict(checkpoint, rank, _build_meshes(plans))
    return _state_dict(checkpoint, rank, rank_meshes(checkpoint.world_size, rank, plans))


def _state_dict(checkpoint: Checkpoint, rank: int, meshes: Sequence[RankMesh | None]) -> StateDict:
    _forget_other_ranks()
    state: StateDict = {}
    for entry in checkpoint.entries:
        where = None if entry.mesh is None else meshes[entry.mesh]
        if entry.mesh is not None and where is None:
            continue
        if entry.holders is not None and rank not in entry.holders:
            continue
        layout = entry.layout if rank % entry.layout_every == 0 else "dense"
        full = _global_tensor(entry)
        tensor: torch.Tensor
        if entry.fully_shard is not None:
            assert where is not None
            if entry.key not in state:
                state.update(_fully_shard(checkpoint.entries, where.mesh))
            continue
        if entry.fused is not None:
            state.update(_fused(entry, full, where, layout))
            continue
        if where is None:
            tensor = arrange(full, layout)
        else:
            tensor = dtensor(full, where, entry.placements, order=entry.shard_order, layout=layout)
        if entry.parameter:
            tensor = as_parameter(tensor)
        state[entry.key] = tensor
        if entry.tied:
            state[f"{entry.key}.tied"] = tensor
    if checkpoint.extra_state:
        state["block._extra_state"] = io.BytesIO(b"scales of rank %d" % rank)
        state["_extra_state"] = None if rank % 2 else {"amax": 1.5, "steps": [1, 2]}
    return state


def _fully_shard(entries: Sequence[Entry], root: DeviceMesh) -> StateDict:
    """All entries that FSDP2 makes, as the parameters of one module: they have one mesh."""
    parameters, dims = {}, {}
    for entry in entries:
        if entry.fully_shard is not None:
            how = entry.fully_shard
            full = _global_tensor(entry)
            if how.tensor_dims:
                full = dtensor(full, root[how.tensor_dims], entry.placements)
            parameters[entry.key], dims[entry.key] = full, how.dim
    return fully_sharded(parameters, root[how.data_dims], dims)


def _fused(entry: Entry, full: torch.Tensor, where: RankMesh | None, layout: str) -> StateDict:
    """Views on one stored tensor, cut along a dim that is not sharded."""
    assert entry.fused is not None
    dim, parts = entry.fused
    whole = raw(full).tensor_split(parts, dim)
    if where is None:
        stored = arrange(full, layout)
    else:
        stored = arrange(local_view(full, where, entry.placements, entry.shard_order), layout)
    pieces = raw(stored).tensor_split(parts, dim)
    state: StateDict = {}
    for i, (piece, of) in enumerate(zip(pieces, whole, strict=True)):
        local = piece.view(full.dtype)
        state[f"{entry.key}.{i}"] = (
            local
            if where is None
            else from_local(
                local, where.mesh, entry.placements, of.view(full.dtype), entry.shard_order
            )
        )
    return state


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> list[StateDict]:
    """Save all rank files of a checkpoint.

    Returns:
        The state dict of each rank, to see what has been saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states = []
    for rank in range(checkpoint.world_size):
        state = state_dict(checkpoint, rank)
        states.append(state)
        _save(
            {"model": state, "step": 3} if checkpoint.wrapped else state,
            rank_file(folder, rank, checkpoint.world_size),
            checkpoint.legacy,
            checkpoint.protocol,
            checkpoint.location,
        )
    return states


def expected_tensors(
    checkpoint: Checkpoint, states: Sequence[StateDict]
) -> dict[str, torch.Tensor]:
    """Contiguous clones of the global tensors, in the order in which ranks 0, 1, ... name them."""
    values: dict[str, torch.Tensor] = {}
    for entry in checkpoint.entries:
        values.update(global_tensors(entry))
    keys = dict.fromkeys(key for state in states for key in state if key in values)
    return {key: contiguous_clone(values[key]) for key in keys}


# --- the same from a real job ---------------------------------------------------------------------

_SAMPLE_WORLD_SIZE = 4


def sample_state(rank: int, real: bool) -> StateDict:
    """A state dict that both a real rank and one that acts as it can make.

    Args:
        real: let torch split and communicate wherever it can.
    """
    del rank  # the process group knows
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = DeviceMesh("cpu", [[0, 2], [1, 3]])
    line = DeviceMesh("cpu", [2, 0, 3, 1])

    def split(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        if not real:
            return dtensor(full, mesh, placements)
        return distribute_tensor(full, mesh, placements)

    weights = {
        "colwise": split(random_bits(torch.float32, (9, 3), 1), mesh["tp"], (Shard(0),)),
        "rowwise": split(random_bits(torch.bfloat16, (5, 4), 2), mesh["tp"], (Shard(1),)),
        "norm": split(random_bits(torch.float32, (1,), 3), mesh["tp"], (Replicate(),)),
        "free": random_bits(torch.float16, (3, 2), 4),
    }
    state = fully_sharded(weights, mesh["dp"], dict.fromkeys(weights, 0))
    state["hsdp"] = split(random_bits(torch.float64, (6, 2), 5), plain, (Replicate(), Shard(0)))
    state["grid"] = split(random_bits(torch.int64, (4, 6), 6), plain, (Shard(1), Shard(0)))
    state["permuted"] = split(random_bits(torch.int32, (8, 3), 7), line, (Shard(0),))
    state["buffer"] = random_bits(torch.uint8, (7,), 8)
    return state


def _real_rank(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{(folder / 'store').absolute()}",
        rank=rank,
        world_size=_SAMPLE_WORLD_SIZE,
    )
    torch.save(sample_state(rank, real=True), rank_file(folder, rank, _SAMPLE_WORLD_SIZE))
    dist.barrier()
    dist.destroy_process_group()


def _main(kind: str, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "fake":
        save_rank_files(folder, _SAMPLE_WORLD_SIZE, lambda rank: sample_state(rank, real=False))
        return 0
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_real_rank, args=(rank, folder))
        for rank in range(_SAMPLE_WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return 0 if all(process.exitcode == 0 for process in ranks) else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], Path(sys.argv[2])))
