"""What one rank file says of each key: stand-ins of the pickle turned into checked records.

The rules are in the formats themselves: ``DTensor``, ``DTensorSpec`` and ``DeviceMesh`` of torch
2.4 to 2.14, ``ShardedTensor`` of FSDP1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streammerge import unpickler as stand_ins
from streammerge.dtypes import FROM_TORCH, ITEMSIZE
from streammerge.errors import (
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    UnsupportedError,
)
from streammerge.placement import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    ShardOrder,
    StridedShard,
    describe_box,
    mesh_positions,
    row_major_strides,
)
from streammerge.torchfile import TorchFile
from streammerge.unpickler import brief


@dataclass(frozen=True, slots=True)
class View:
    """A local tensor as a view on a stored blob.

    Attributes:
        member: index into the file's members.
        start: byte offset of the first element in the member.
        dtype: safetensors name.
        sizes: local shape.
        strides: in elements; None if contiguous.
        conj: the value is the complex conjugate of what is stored.
    """

    member: int
    start: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    conj: bool


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh: the ranks in it, row-major, and its shape and dim names."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"{list(self.ranks)} as {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class PlainEntry:
    """A tensor that is no DTensor: one copy of the whole value."""

    view: View


@dataclass(frozen=True, slots=True)
class MeshEntry:
    """A DTensor: its local shard, global shape and how it is spread.

    Meshes and shardings are interned over all rank files: equal ones are the same object. The
    position is that of the file's rank, see `placement.mesh_positions`; None outside the mesh.
    """

    view: View
    shape: tuple[int, ...]
    sharding: Sharding
    mesh: Mesh
    position: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class BoxEntry:
    """A ShardedTensor: its local shards and what its metadata say of all shards."""

    views: tuple[View, ...]
    boxes: tuple[Box, ...]
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[tuple[Box, int], ...]


Entry = PlainEntry | MeshEntry | BoxEntry


class EntryReader:
    """Turns the stand-ins of one rank file into entries.

    Args:
        source: the rank file.
        rank: the rank that its name says.
        world_size: the number of ranks that its name says.
        interned: meshes and shardings seen so far; thousands of tensors share a few of them.
    """

    def __init__(
        self, source: TorchFile, rank: int, world_size: int, interned: dict[object, Any]
    ) -> None:
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._interned = interned
        # By id: records stay alive as long as the source does.
        self._meshes: dict[int, tuple[Mesh, tuple[int, ...] | None]] = {}

    def read(self, value: object) -> Entry | None:
        """The entry for one value of the state dict, None if it is no tensor.

        Raises:
            SourceError: a tensor that contradicts itself, its file or its rank, or that cannot be
                merged.
        """
        if isinstance(value, stand_ins.StridedTensor):
            return PlainEntry(self._view(value))
        if isinstance(value, stand_ins.DTensor):
            return self._mesh_entry(value)
        if isinstance(value, stand_ins.ShardedTensor):
            return self._box_entry(value)
        return None

    def _view(self, tensor: stand_ins.StridedTensor) -> View:
        dtype = FROM_TORCH.get(tensor.dtype or "")
        if dtype is None:
            raise UnsupportedError(
                f"dtype {tensor.dtype or 'unknown'} has no equivalent in safetensors"
            )
        member = self._source.members[tensor.storage.key]
        itemsize = ITEMSIZE[dtype]
        stored = self._source.file.members.sizes[member]
        last = tensor.offset
        if 0 not in tensor.sizes:
            last += sum(
                (size - 1) * stride
                for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
            )
            if (last + 1) * itemsize > stored:
                raise CorruptFileError(
                    f"local tensor {list(tensor.sizes)} of {dtype} reaches byte "
                    f"{(last + 1) * itemsize:,} of a storage of {stored:,} bytes"
                )
        contiguous = _is_contiguous(tensor.sizes, tensor.strides)
        return View(
            member,
            # Where nothing is read, the offset means nothing; it may lie behind the storage.
            0 if 0 in tensor.sizes else tensor.offset * itemsize,
            dtype,
            tensor.sizes,
            None if contiguous else tensor.strides,
            tensor.conj,
        )

    def _mesh_entry(self, value: stand_ins.DTensor) -> MeshEntry:
        local, spec = value.field("_local_tensor"), value.field("_spec")
        if not isinstance(local, stand_ins.StridedTensor):
            raise UnsupportedError("a DTensor whose local tensor is no plain tensor")
        if not isinstance(spec, stand_ins.DTensorSpec):
            raise CorruptFileError("a DTensor without a spec")
        meta = spec.field("tensor_meta")
        if not isinstance(meta, stand_ins.TensorMeta):
            raise CorruptFileError("a DTensor without its global shape")
        shape = meta.field("shape", 0)
        if not stand_ins.is_ints(shape):
            raise CorruptFileError(f"a DTensor of global shape {brief(shape)}")
        view = self._view(local)
        torch_dtype = meta.field("dtype", 2)
        dtype = FROM_TORCH.get(torch_dtype) if isinstance(torch_dtype, str) else None
        if dtype != view.dtype:
            raise PlacementError(f"local shard has dtype {view.dtype}, its DTensor says {dtype}")
        strided_is_order = spec.field("use_strided_shard_as_shard_order")
        if strided_is_order is not None and type(strided_is_order) is not bool:
            raise CorruptFileError("a DTensor whose use_strided_shard_as_shard_order is damaged")
        mesh, position = self._mesh(spec.field("mesh"))
        sharding = Sharding(
            mesh.shape,
            _read_placements(spec.field("placements"), len(shape)),
            _read_shard_order(spec.field("shard_order")),
            strided_is_order,
        )
        sharding = self._interned.setdefault(sharding, sharding)
        return MeshEntry(view, shape, sharding, mesh, position)

    def _mesh(self, record: object) -> tuple[Mesh, tuple[int, ...] | None]:
        if not isinstance(record, stand_ins.DeviceMesh):
            raise CorruptFileError("a DTensor without a device mesh")
        found = self._meshes.get(id(record))
        if found is None:
            mesh = _read_mesh(record, self._rank)
            self._check_writer(record, mesh)
            mesh = self._interned.setdefault(mesh, mesh)
            position = None
            if self._rank in mesh.ranks:
                index = mesh.ranks.index(self._rank)
                position = mesh_positions(mesh.shape, mesh.ranks)[index]
            found = self._meshes[id(record)] = (mesh, position)
        return found

    def _check_writer(self, record: stand_ins.DeviceMesh, mesh: Mesh) -> None:
        outside = [rank for rank in mesh.ranks if rank >= self._world_size]
        if outside:
            raise InconsistentRanksError(
                f"the device mesh {mesh} names rank {outside[0]}, "
                f"but the file's name says a world size of {self._world_size}"
            )
        writer = record.field("_rank")
        coordinate = record.field("_coordinate_on_dim")
        if writer is None and coordinate is not None:
            at = tuple(coordinate) if isinstance(coordinate, list | tuple) else None
            if (
                not stand_ins.is_ints(at)
                or len(at) != len(mesh.shape)
                or any(index >= size for index, size in zip(at, mesh.shape, strict=True))
            ):
                raise CorruptFileError(f"a device mesh with coordinate {brief(coordinate)}")
            strides = row_major_strides(mesh.shape)
            writer = mesh.ranks[sum(a * s for a, s in zip(at, strides, strict=True))]
        if writer is not None and writer != self._rank:
            raise InconsistentRanksError(
                f"the file's name says rank {self._rank}, its device mesh says that rank "
                f"{brief(writer)} wrote it",
                hint="the rank files were renamed or mixed up; restore their names",
            )

    def _box_entry(self, value: stand_ins.ShardedTensor) -> BoxEntry:
        state = value.state
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
            raise CorruptFileError("a ShardedTensor whose state is damaged")
        shards, metadata, group = state[:3]
        if not isinstance(metadata, stand_ins.ShardedTensorMetadata):
            raise CorruptFileError("a ShardedTensor without metadata")
        shape = metadata.field("size")
        if not stand_ins.is_ints(shape):
            raise CorruptFileError(f"a ShardedTensor of global shape {brief(shape)}")
        writer = group.field("global_rank") if isinstance(group, stand_ins.Record) else None
        if writer is not None and writer != self._rank:
            raise InconsistentRanksError(
                f"the file's name says rank {self._rank}, its process group says that rank "
                f"{brief(writer)} wrote it",
                hint="the rank files were renamed or mixed up; restore their names",
            )
        owners = tuple(_read_shard_metadata(m) for m in metadata.field("shards_metadata") or ())
        views, boxes = [], []
        for shard in shards:
            if not isinstance(shard, stand_ins.LocalShard):
                raise CorruptFileError("a ShardedTensor whose local shards are damaged")
            tensor = shard.field("tensor")
            if not isinstance(tensor, stand_ins.StridedTensor):
                raise UnsupportedError("a ShardedTensor whose local shard is no plain tensor")
            view = self._view(tensor)
            box, _ = _read_shard_metadata(shard.field("metadata"))
            if view.sizes != box.sizes:
                raise PlacementError(
                    f"local shard has shape {list(view.sizes)}, its metadata say {list(box.sizes)}"
                )
            if (box, self._rank) not in owners:
                raise PlacementError(
                    f"local shard {describe_box(box)} is not listed for rank {self._rank}"
                )
            views.append(view)
            boxes.append(box)
        listed = sum(owner == self._rank and 0 not in box.sizes for box, owner in owners)
        held = sum(0 not in box.sizes for box in boxes)
        if listed != held:
            raise PlacementError(
                f"the metadata list {listed} shards for rank {self._rank}, its file holds {held}"
            )
        dtype = views[0].dtype if views else _read_box_dtype(value)
        return BoxEntry(tuple(views), tuple(boxes), dtype, shape, owners)


# Names under which training loops keep the model's state dict, most usual first.
_WRAPPERS = ("model", "module", "state_dict", "model_state_dict")


def unwrap(root: object) -> tuple[Mapping[object, object], Mapping[object, object]]:
    """The state dict inside a pickled object, and what lies beside it.

    It is the object itself, or a dict inside it (``{"model": state_dict, "step": 3}``).

    Raises:
        UnsupportedError: no state dict, or several.
    """
    if not isinstance(root, dict):
        raise UnsupportedError(
            f"it holds a {kind_of(root)}, not a dict of tensors", hint="is it a model's rank file?"
        )
    nested = {
        key: value
        for key, value in root.items()
        if isinstance(value, dict)
        and any(_is_tensor(v) for v in value.values())
        and not str(key).endswith("_extra_state")  # a module's own, beside its weights
    }
    flat = any(_is_tensor(value) for value in root.values())
    name = next((name for name in _WRAPPERS if name in nested), None)
    if name is None and not nested and not flat:  # a rank that keeps no tensors, wrapped or not
        name = next((name for name in _WRAPPERS if isinstance(root.get(name), dict)), None)
    if name is None and not flat and len(nested) == 1:
        name = next(iter(nested))
    if name is not None:
        return root[name], {key: value for key, value in root.items() if key != name}
    if nested:
        where = "tensors beside and in" if flat else "several dicts of tensors to choose from:"
        raise UnsupportedError(f"{where} {', '.join(map(brief, nested))}")
    return root, {}


def kind_of(value: object) -> str:
    """What an entry that is no tensor is, for people."""
    if isinstance(value, stand_ins.Record):
        return "object"
    return "None" if value is None else type(value).__name__


def _is_tensor(value: object) -> bool:
    kinds = (stand_ins.StridedTensor, stand_ins.DTensor, stand_ins.ShardedTensor)
    return isinstance(value, kinds)


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    # As torch has it: dims of size 1 may have any stride, a tensor without elements is contiguous.
    if 0 in sizes:
        return True
    expected = row_major_strides(sizes)
    return all(
        size == 1 or stride == e for size, stride, e in zip(sizes, strides, expected, strict=True)
    )


def _read_placements(value: object, ndim: int) -> tuple[Placement, ...]:
    if not isinstance(value, tuple | list):
        raise CorruptFileError("a DTensor without placements")
    placements: list[Placement] = []
    for record in value:
        if isinstance(record, stand_ins.ReplicatePlacement):
            placements.append(Replicate())
        elif isinstance(record, stand_ins.PartialPlacement):
            placements.append(Partial(str(record.field("reduce_op", 0) or "sum")))
        elif isinstance(record, stand_ins.ShardPlacement | stand_ins.StridedShardPlacement):
            dim = record.field("dim", 0)
            if not stand_ins.is_int(dim):
                raise CorruptFileError(f"a placement on dim {brief(dim)}")
            dim = dim + ndim if dim < 0 else dim
            if isinstance(record, stand_ins.ShardPlacement):
                placements.append(Shard(dim))
            else:
                factor = record.field("split_factor", 1)
                if not stand_ins.is_int(factor) or factor < 1:
                    raise CorruptFileError(f"a placement with split factor {brief(factor)}")
                placements.append(StridedShard(dim, factor))
        else:
            raise UnsupportedError(f"a placement of an unknown kind ({kind_of(record)})")
    return tuple(placements)


def _read_shard_order(value: object) -> ShardOrder | None:
    if value is None:
        return None
    order = []
    for entry in value if isinstance(value, tuple) else ():
        if not isinstance(entry, stand_ins.ShardOrderEntry):
            raise CorruptFileError("a DTensor whose shard_order is damaged")
        dim, mesh_dims = entry.field("tensor_dim", 0), entry.field("mesh_dims", 1)
        if not stand_ins.is_int(dim) or not stand_ins.is_ints(mesh_dims):
            raise CorruptFileError("a DTensor whose shard_order is damaged")
        order.append((dim, mesh_dims))
    return tuple(order)


def _read_mesh(record: stand_ins.DeviceMesh, rank: int) -> Mesh:
    """Shape and ranks of a device mesh, whichever torch version pickled it."""
    names = record.field("_mesh_dim_names") or record.field("mesh_dim_names")
    dim_names = tuple(map(str, names)) if isinstance(names, tuple | list) else None
    layout = record.field("_layout")
    if layout is not None:  # torch 2.11 and newer
        rank_map = record.field("_flatten_rank_map")
        if not isinstance(layout, stand_ins.MeshLayout) or not stand_ins.is_ints(rank_map):
            raise CorruptFileError("a device mesh whose layout is damaged")
        axes = _read_axes(layout)
        shape = tuple(math.prod(size for size, _ in axis) for axis in axes)
        ranks = _ranks_of_layout(axes, rank_map, rank)
    else:
        mesh = record.field("mesh")
        flat = record.field("_flatten_mesh_list")
        ranks = tuple(flat) if isinstance(flat, tuple | list) else ()
        if not isinstance(mesh, stand_ins.StridedTensor) or not stand_ins.is_ints(ranks):
            raise CorruptFileError("a device mesh without its ranks")
        shape = mesh.sizes
    if math.prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
        raise CorruptFileError(f"a device mesh of shape {list(shape)} with ranks {brief(ranks)}")
    return Mesh(shape, ranks, dim_names)


# Each mesh dim as (size, stride) pairs: one, none for size 1, or several for a flattened dim.
_Axes = list[list[tuple[int, int]]]


def _read_axes(layout: stand_ins.MeshLayout) -> _Axes:
    """The dims of a mesh layout: ``axes`` (torch 2.13) or ``shape`` and ``stride`` (torch 2.11)."""
    axes = layout.field("axes", 0)
    pairs: list[tuple[Any, Any]]
    if isinstance(axes, tuple) and all(isinstance(a, stand_ins.FlatLayout) for a in axes):
        pairs = [(axis.field("shape", 0), axis.field("stride", 1)) for axis in axes]
    else:
        shape, stride = layout.field("shape", 0), layout.field("stride", 1)
        if not isinstance(shape, tuple):
            shape, stride = (shape,), (stride,)
        if not isinstance(stride, tuple) or len(shape) != len(stride):
            raise CorruptFileError("a device mesh whose layout is damaged")
        pairs = list(zip(shape, stride, strict=True))
    result = []
    for sizes, strides in pairs:
        flat_sizes, flat_strides = _flatten(sizes), _flatten(strides)
        if len(flat_sizes) != len(flat_strides):
            raise CorruptFileError("a device mesh whose layout is damaged")
        result.append(list(zip(flat_sizes, flat_strides, strict=True)))
    return result


def _flatten(value: object) -> list[int]:
    if stand_ins.is_int(value) and value >= 0:
        return [value]
    if isinstance(value, tuple):
        return [n for item in value for n in _flatten(item)]
    raise CorruptFileError("a device mesh whose layout is damaged")


def _ranks_of_layout(axes: _Axes, rank_map: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The ranks of the mesh that holds `rank`.

    A layout gives positions in the rank map of the root mesh, starting at 0. For a sliced mesh it
    stands for all its parallel copies; each starts elsewhere, and ours is the one `rank` is in.
    """
    pairs = [pair for axis in axes for pair in axis]
    if not 0 < math.prod(size for size, _ in pairs) <= len(rank_map):
        raise CorruptFileError("a device mesh whose layout leaves its rank map")
    base = 0
    if rank in rank_map:
        base = rank_map.index(rank)
        # The coordinate along a dim is what is left of the position by its stride; what no dim
        # accounts for is where our copy starts.
        for size, stride in sorted(pairs, key=lambda pair: -pair[1]):
            if stride:
                base -= (base // stride % size) * stride
    positions = [
        base + sum(steps)
        for steps in itertools.product(
            *(range(0, size * stride, stride) if stride else (0,) * size for size, stride in pairs)
        )
    ]
    if any(position >= len(rank_map) for position in positions):
        raise CorruptFileError("a device mesh whose layout leaves its rank map")
    return tuple(rank_map[position] for position in positions)


def _read_shard_metadata(record: object) -> tuple[Box, int]:
    """The part of one shard of a ShardedTensor, and the rank that owns it."""
    if not isinstance(record, stand_ins.ShardMetadata):
        raise CorruptFileError("a ShardedTensor whose metadata are damaged")
    offsets, sizes = record.field("shard_offsets"), record.field("shard_sizes")
    placement = record.field("placement")
    owner = placement.field("_rank") if isinstance(placement, stand_ins.Record) else None
    if not isinstance(offsets, list | tuple) or not isinstance(sizes, list | tuple):
        raise CorruptFileError("a ShardedTensor whose metadata are damaged")
    offsets, sizes = tuple(offsets), tuple(sizes)
    if (
        not stand_ins.is_ints(offsets)
        or not stand_ins.is_ints(sizes)
        or not stand_ins.is_int(owner)
    ):
        raise CorruptFileError("a ShardedTensor whose metadata are damaged")
    return Box.whole_shard(offsets, sizes), owner


def _read_box_dtype(value: stand_ins.ShardedTensor) -> str:
    """A rank without rows says the dtype only in the arguments of its wrapper."""
    for argument in value.args:
        dtype = FROM_TORCH.get(argument) if isinstance(argument, str) else None
        if dtype is not None:
            return dtype
    raise CorruptFileError("a ShardedTensor without a dtype")
