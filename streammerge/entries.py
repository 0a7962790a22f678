"""What one rank file says of each key: the stand-ins of its pickle, checked, as columns.

The rules are in the formats themselves: ``DTensor``, ``DTensorSpec`` and ``DeviceMesh`` of torch
2.4 to 2.14, ``ShardedTensor`` of FSDP1.

Thousands of tensors differ in little but their names. Everything else about one is its form; a
file lists each form once. Columns and forms hold nothing but numbers, strings and tuples,
so that they can be sent by another process (`rank_readers`).
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streammerge import unpickler as stand_ins
from streammerge.checkpoint import File
from streammerge.dtypes import FROM_TORCH, ITEMSIZE
from streammerge.errors import (
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    SourceError,
    UnsupportedError,
    about,
)
from streammerge.names import FLAT_PARAMETERS, flat_parameter_error
from streammerge.placement import row_major_strides
from streammerge.torchfile import TorchFile, read_torch_file
from streammerge.unpickler import MAX_DIMS, brief

# What a file's device meshes may name in ranks, all together: one mesh of 8,192 ranks for each of
# 1,000 tensors, where torch stores one for all.
_MAX_MESH_RANKS = 1 << 23
# Parts that strided placements may cut a local shard into. FSDP2 over TP makes one.
_MAX_SPLITS = 1 << 16

# FSDP1 gives each rank one shard, at most.
_MAX_SHARDS_PER_RANK = 16
# Shards that are believed where only the shards say how many ranks there are.
_MAX_SHARDS_UNNAMED = 4096

Ints = tuple[int, ...]


class Mesh(NamedTuple):
    """A device mesh: its shape, the ranks in it, row-major, and its dim names."""

    shape: Ints
    ranks: Ints
    dim_names: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"{list(self.ranks)} as {'x'.join(map(str, self.shape))}"


class PlainForm(NamedTuple):
    """A tensor that is no DTensor: one copy of the whole value."""

    dtype: str
    sizes: Ints


class MeshForm(NamedTuple):
    """A DTensor: its local and global shape and how it is spread.

    Attributes:
        dtype: safetensors name.
        sizes: local shape.
        shape: global shape.
        mesh: index into `RankFile.meshes`.
        placements: one per mesh dim, as class name and arguments: ``("Shard", 0)``.
        shard_order, strided_is_order: see `placement.Sharding`.
    """

    dtype: str
    sizes: Ints
    shape: Ints
    mesh: int
    placements: tuple[tuple[Any, ...], ...]
    shard_order: tuple[tuple[int, Ints], ...] | None
    strided_is_order: bool | None


class BoxForm(NamedTuple):
    """A ShardedTensor: its local shards and what its metadata say of all shards.

    Attributes:
        dtype: safetensors name.
        shape: global shape.
        held: offsets and sizes of the local shards.
        listed: offsets, sizes and rank of every shard.
    """

    dtype: str
    shape: Ints
    held: tuple[tuple[Ints, Ints], ...]
    listed: tuple[tuple[Ints, Ints, int], ...]


Form = PlainForm | MeshForm | BoxForm


class View(NamedTuple):
    """A local tensor as a view on a stored blob.

    Attributes:
        member: index into the file's members.
        start: byte offset of the first element in the member.
        strides: in elements; None if contiguous.
        conj: the value is the complex conjugate of what is stored.
    """

    member: int
    start: int
    strides: Ints | None
    conj: bool


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """What a rank file holds, without the data.

    Attributes:
        file: path, identity and members.
        pickle_nbytes: bytes of its pickle.
        names: the keys of its tensors.
        forms: what there is to say about them, without repetitions.
        meshes: the device meshes that forms refer to.
        kinds, members, starts: for each key, the index of its form, and of its local tensor the
            index of the member and the byte offset there (0 for a ShardedTensor, see `shards`).
        odd: position of a key -> its view, where that is not contiguous or is conjugated.
        shards: position of a key -> the local shards of its ShardedTensor.
        skipped: keys that hold no tensor, and what they hold.
        beside: what lies beside the state dict, likewise.
    """

    file: File
    pickle_nbytes: int
    names: list[str] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    meshes: list[Mesh] = field(default_factory=list)
    kinds: array[int] = field(default_factory=lambda: array("i"))
    members: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    odd: dict[int, View] = field(default_factory=dict)
    shards: dict[int, list[View]] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    beside: list[tuple[str, str]] = field(default_factory=list)


def read_rank_file(path: str, rank: int, world_size: int, *, named: bool = True) -> RankFile:
    """Read the metadata of one rank file.

    Args:
        path: the file.
        rank: as its name says.
        world_size: number of rank files.
        named: whether the names of the files say the world size. If not, the device meshes may
            know of more ranks than there are files.

    Raises:
        SourceError: a file that is damaged, contradicts itself or its name, or cannot be merged.
    """
    source = read_torch_file(path)
    found = RankFile(source.file, source.pickle_nbytes)
    reader = _Reader(source, rank, world_size, named, found)
    with about(path):
        state_dict, beside = unwrap(source.root)
        for name, value in state_dict.items():
            reader.add(name, value)
    for key, value in beside.items():
        name = key if isinstance(key, str) else brief(key)
        found.beside.append((name, f"{kind_of(value)} beside the model"))
    return found


def quoted(name: str) -> str:
    """A key for people, on one line."""
    return f"'{name}'" if name.isprintable() and len(name) <= 200 else f"{name!r:.200}"


def view_of(tensor: stand_ins.StridedTensor, member: int, stored: int) -> tuple[str, View]:
    """The dtype (safetensors name) and the place of a tensor.

    Args:
        tensor: as it stands in a pickle.
        member: the blob that it is a view on.
        stored: bytes of that blob.

    Raises:
        UnsupportedError: a dtype that safetensors does not have.
        CorruptFileError: a view that leaves the blob.
    """
    dtype = FROM_TORCH.get(tensor.dtype or "")
    if dtype is None:
        raise UnsupportedError(
            f"dtype {tensor.dtype or 'unknown'} has no equivalent in safetensors"
        )
    if 0 in tensor.sizes:
        # Where nothing is read, the offset means nothing; it may lie behind the storage.
        return dtype, View(member, 0, None, tensor.conj)
    contiguous = True
    last = tensor.offset
    step = 1
    for size, stride in zip(reversed(tensor.sizes), reversed(tensor.strides), strict=True):
        if size != 1:  # as torch has it, dims of size 1 may have any stride
            contiguous = contiguous and stride == step
            last += (size - 1) * stride
            step *= size
    itemsize = ITEMSIZE[dtype]
    if (last + 1) * itemsize > stored:
        raise CorruptFileError(
            f"local tensor {list(tensor.sizes)} of {dtype} reaches byte "
            f"{(last + 1) * itemsize:,} of a storage of {stored:,} bytes"
        )
    strides = None if contiguous else tensor.strides
    return dtype, View(member, tensor.offset * itemsize, strides, tensor.conj)


class _Reader:
    """Adds what a rank file says of its keys to the columns of a `RankFile`."""

    def __init__(
        self, source: TorchFile, rank: int, world_size: int, named: bool, found: RankFile
    ) -> None:
        self._members = source.members
        self._sizes = source.file.members.sizes
        self._rank = rank
        self._world_size = world_size
        self._named = named
        self._found = found
        self._forms: dict[Form, int] = {}
        self._meshes: dict[Mesh, int] = {}
        # By id: the stand-ins stay alive as long as the source does.
        self._mesh_records: dict[int, int] = {}
        self._mesh_ranks = 0
        self._listings: dict[int, tuple[tuple[Ints, Ints, int], ...]] = {}

    def add(self, name: object, value: object) -> None:
        """Add the value of a key."""
        if not isinstance(name, str):
            raise UnsupportedError(f"key {brief(name)} is not a name")
        if name.rpartition(".")[2] in FLAT_PARAMETERS:
            raise flat_parameter_error(quoted(name))
        try:
            if isinstance(value, stand_ins.DTensor):
                self._add_mesh_form(name, value)
            elif isinstance(value, stand_ins.StridedTensor):
                dtype, view = self._view(value)
                self._add(name, PlainForm(dtype, value.sizes), view)
            elif isinstance(value, stand_ins.ShardedTensor):
                self._add_box_form(name, value)
            else:
                self._found.skipped.append((name, kind_of(value)))
        except SourceError as error:
            raise type(error)(f"key {quoted(name)}: {error}", hint=error.hint) from error

    def _add(self, name: str, form: Form, view: View) -> None:
        found = self._found
        index = self._forms.setdefault(form, len(found.forms))
        if index == len(found.forms):
            found.forms.append(form)
        if view.strides is not None or view.conj:
            found.odd[len(found.names)] = view
        found.names.append(name)
        found.kinds.append(index)
        found.members.append(view.member)
        found.starts.append(view.start)

    def _view(self, tensor: stand_ins.StridedTensor) -> tuple[str, View]:
        member = self._members[tensor.storage.key]
        return view_of(tensor, member, self._sizes[member])

    # --- DTensor ---

    def _add_mesh_form(self, name: str, value: stand_ins.DTensor) -> None:
        local, spec = value._local_tensor, value._spec
        if not isinstance(local, stand_ins.StridedTensor):
            raise UnsupportedError("a DTensor whose local tensor is not a plain tensor")
        if not isinstance(spec, stand_ins.DTensorSpec):
            raise CorruptFileError("a DTensor without a spec")
        meta = spec.tensor_meta
        if not isinstance(meta, stand_ins.TensorMeta):
            raise CorruptFileError("a DTensor without its global shape")
        shape = meta.shape
        if not stand_ins.is_shape(shape):
            raise CorruptFileError(f"a DTensor of global shape {brief(shape)}")
        dtype, view = self._view(local)
        torch_dtype = meta.dtype
        said = FROM_TORCH.get(torch_dtype) if isinstance(torch_dtype, str) else None
        if said != dtype:
            raise PlacementError(f"local shard has dtype {dtype}, its DTensor says {said}")
        strided_is_order = spec.use_strided_shard_as_shard_order
        if strided_is_order is not None and type(strided_is_order) is not bool:
            raise CorruptFileError("a DTensor whose use_strided_shard_as_shard_order is damaged")
        form = MeshForm(
            dtype,
            local.sizes,
            shape,
            self._mesh(spec.mesh),
            _read_placements(spec.placements, len(shape)),
            _read_shard_order(spec.shard_order),
            strided_is_order,
        )
        self._add(name, form, view)

    def _mesh(self, record: object) -> int:
        if not isinstance(record, stand_ins.DeviceMesh):
            raise CorruptFileError("a DTensor without a device mesh")
        index = self._mesh_records.get(id(record))
        if index is None:
            mesh = self._read_mesh(record)
            self._check_writer(record, mesh)
            index = self._meshes.setdefault(mesh, len(self._meshes))
            if index == len(self._found.meshes):
                self._found.meshes.append(mesh)
            self._mesh_records[id(record)] = index
        return index

    def _read_mesh(self, record: stand_ins.DeviceMesh) -> Mesh:
        """Shape and ranks of a device mesh, whichever torch version pickled it."""
        layout = record._layout
        if layout is not None:  # torch 2.11 and newer
            rank_map = self._rank_map(record._flatten_rank_map)
            if not isinstance(layout, stand_ins.MeshLayout) or not stand_ins.is_ints(rank_map):
                raise CorruptFileError("a device mesh whose layout is damaged")
            axes = _read_axes(layout)
            shape = tuple(math.prod(size for size, _ in axis) for axis in axes)
            ranks = _ranks_of_layout(axes, rank_map, self._rank)
        else:
            mesh = record.mesh
            listed = self._rank_map(record._flatten_mesh_list)
            if not isinstance(mesh, stand_ins.StridedTensor) or not stand_ins.is_ints(listed):
                raise CorruptFileError("a device mesh without its ranks")
            shape, ranks = mesh.sizes, listed
        if not ranks or math.prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
            raise CorruptFileError(
                f"a device mesh of shape {list(shape)} with ranks {brief(ranks)}"
            )
        names = record._mesh_dim_names or record.mesh_dim_names
        return Mesh(shape, ranks, _read_dim_names(names, len(shape)))

    def _rank_map(self, value: object) -> object:
        """A list of ranks as a tuple; all lists together have a bounded length."""
        if not isinstance(value, tuple | list):
            return value
        self._mesh_ranks += len(value)
        if self._mesh_ranks > _MAX_MESH_RANKS:
            raise UnsupportedError("more ranks in its device meshes than any job has")
        return tuple(value)

    def _check_writer(self, record: stand_ins.DeviceMesh, mesh: Mesh) -> None:
        if self._named and max(mesh.ranks) >= self._world_size:
            outside = next(rank for rank in mesh.ranks if rank >= self._world_size)
            raise InconsistentRanksError(
                f"the device mesh {mesh} names rank {outside}, "
                f"but the file's name says a world size of {self._world_size}"
            )
        writer = record._rank
        coordinate = record._coordinate_on_dim
        if writer is None and coordinate is not None:
            at = coordinate
            if isinstance(coordinate, list) and len(coordinate) == len(mesh.shape):
                at = tuple(coordinate)
            if (
                not stand_ins.is_shape(at)
                or len(at) != len(mesh.shape)
                or any(index >= size for index, size in zip(at, mesh.shape, strict=True))
            ):
                raise CorruptFileError(f"a device mesh with coordinate {brief(coordinate)}")
            strides = row_major_strides(mesh.shape)
            writer = mesh.ranks[sum(a * s for a, s in zip(at, strides, strict=True))]
        self._check_rank(writer, "device mesh")

    def _check_rank(self, writer: object, source: str) -> None:
        if writer is not None and writer != self._rank:
            raise InconsistentRanksError(
                f"the file's name says rank {self._rank}, its {source} says that rank "
                f"{brief(writer)} wrote it",
                hint="the rank files were renamed or mixed up; restore their names",
            )

    # --- ShardedTensor ---

    def _add_box_form(self, name: str, value: stand_ins.ShardedTensor) -> None:
        state = value.state
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
            raise CorruptFileError("a ShardedTensor whose state is damaged")
        shards, metadata, group = state[:3]
        if not isinstance(metadata, stand_ins.ShardedTensorMetadata):
            raise CorruptFileError("a ShardedTensor without metadata")
        shape = metadata.size
        if not stand_ins.is_shape(shape):
            raise CorruptFileError(f"a ShardedTensor of global shape {brief(shape)}")
        if isinstance(group, stand_ins.ProcessGroupState):
            self._check_rank(group.global_rank, "process group")
        listed = self._read_listing(metadata.shards_metadata)
        ours = {(offsets, sizes) for offsets, sizes, owner in listed if owner == self._rank}
        if len(shards) > len(listed):
            raise PlacementError(
                f"the metadata list {len(listed)} shards, this rank alone holds {len(shards)}"
            )
        views: list[View] = []
        held: list[tuple[Ints, Ints]] = []
        dtypes: set[str] = set()
        for shard in shards:
            if not isinstance(shard, stand_ins.LocalShard):
                raise CorruptFileError("a ShardedTensor whose local shards are damaged")
            tensor = shard.tensor
            if not isinstance(tensor, stand_ins.StridedTensor):
                raise UnsupportedError("a ShardedTensor whose local shard is not a plain tensor")
            dtype, view = self._view(tensor)
            dtypes.add(dtype)
            offsets, sizes, _ = _read_shard_metadata(shard.metadata)
            if tensor.sizes != sizes:
                raise PlacementError(
                    f"local shard has shape {list(tensor.sizes)}, its metadata say {list(sizes)}"
                )
            if (offsets, sizes) not in ours:
                raise PlacementError(
                    f"local shard {_describe_range(offsets, sizes)} is not listed for rank "
                    f"{self._rank}"
                )
            views.append(view)
            held.append((offsets, sizes))
        expected = sum(owner == self._rank and 0 not in sizes for _, sizes, owner in listed)
        full = sum(0 not in sizes for _, sizes in held)
        if expected != full:
            raise PlacementError(
                f"the metadata list {expected} shards for rank {self._rank}, its file holds {full}"
            )
        if len(dtypes) > 1:
            raise PlacementError(f"local shards of several dtypes: {', '.join(sorted(dtypes))}")
        self._found.shards[len(self._found.names)] = views
        dtype = dtypes.pop() if dtypes else _read_box_dtype(value)
        self._add(name, BoxForm(dtype, shape, tuple(held), listed), View(0, 0, None, False))

    def _read_listing(self, records: object) -> tuple[tuple[Ints, Ints, int], ...]:
        """The shards that the metadata of a ShardedTensor list."""
        listed = self._listings.get(id(records))
        if listed is None:
            if not isinstance(records, list):
                raise CorruptFileError("a ShardedTensor whose metadata are damaged")
            limit = _MAX_SHARDS_PER_RANK * self._world_size
            if len(records) > (limit if self._named else max(limit, _MAX_SHARDS_UNNAMED)):
                raise UnsupportedError(
                    f"a ShardedTensor of {len(records):,} shards over {self._world_size} ranks"
                )
            listed = self._listings[id(records)] = tuple(map(_read_shard_metadata, records))
        return listed


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
    dicts = {id(value): value for value in root.values() if isinstance(value, dict)}
    with_tensors = {key for key, value in dicts.items() if any(map(_is_tensor, value.values()))}
    nested = {
        key: value
        for key, value in root.items()
        if id(value) in with_tensors
        # a module's own, beside its weights
        and not (isinstance(key, str) and key.endswith("_extra_state"))
    }
    flat = any(map(_is_tensor, root.values()))
    name: object = next((name for name in _WRAPPERS if name in nested), None)
    if name is None and not nested and not flat:  # a rank that keeps no tensors, wrapped or not
        name = next((name for name in _WRAPPERS if isinstance(root.get(name), dict)), None)
    if name is None and not flat and len(nested) == 1:
        name = next(iter(nested))
    if name is not None:
        return root[name], {key: value for key, value in root.items() if key != name}
    if nested:
        where = "tensors beside and in" if flat else "several dicts of tensors to choose from:"
        raise UnsupportedError(f"{where} {', '.join(map(brief, list(nested)[:5]))}")
    return root, {}


def kind_of(value: object) -> str:
    """What an entry that is no tensor is, for people."""
    if isinstance(value, stand_ins.Record):
        return "object"
    return "None" if value is None else type(value).__name__


def _is_tensor(value: object) -> bool:
    kinds = (stand_ins.StridedTensor, stand_ins.DTensor, stand_ins.ShardedTensor)
    return isinstance(value, kinds)


# --- placements and meshes ---


def _read_placements(value: object, ndim: int) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise CorruptFileError("a DTensor without placements")
    placements = tuple([_read_placement(record, ndim) for record in value])
    splits = math.prod(placement[2] for placement in placements if len(placement) == 3)
    if splits > _MAX_SPLITS:
        raise PlacementError(f"split factors that cut a local shard into {splits:,} parts")
    return placements


def _read_placement(record: object, ndim: int) -> tuple[Any, ...]:
    """Class name and arguments of one placement."""
    if isinstance(record, stand_ins.ReplicatePlacement):
        return ("Replicate",)
    if isinstance(record, stand_ins.PartialPlacement):
        reduce_op = record.reduce_op
        return ("Partial", reduce_op if isinstance(reduce_op, str) else "sum")
    if not isinstance(record, stand_ins.ShardPlacement | stand_ins.StridedShardPlacement):
        raise UnsupportedError(f"a placement of an unknown kind ({kind_of(record)})")
    dim = record.dim
    if not stand_ins.is_int(dim):
        raise CorruptFileError(f"a placement on dim {brief(dim)}")
    dim = dim + ndim if dim < 0 else dim
    if isinstance(record, stand_ins.ShardPlacement):
        return ("Shard", dim)
    factor = record.split_factor
    if not stand_ins.is_int(factor) or factor < 1:
        raise CorruptFileError(f"a placement with split factor {brief(factor)}")
    return ("StridedShard", dim, factor)


def _read_shard_order(value: object) -> tuple[tuple[int, Ints], ...] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) > MAX_DIMS:
        raise CorruptFileError("a DTensor whose shard_order is damaged")
    order = []
    for entry in value:
        if not isinstance(entry, stand_ins.ShardOrderEntry):
            raise CorruptFileError("a DTensor whose shard_order is damaged")
        dim, mesh_dims = entry.tensor_dim, entry.mesh_dims
        if not stand_ins.is_int(dim) or not stand_ins.is_shape(mesh_dims):
            raise CorruptFileError("a DTensor whose shard_order is damaged")
        order.append((dim, mesh_dims))
    return tuple(order)


def _read_dim_names(names: object, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if (
        not isinstance(names, tuple | list)
        or len(names) != ndim
        or not all(isinstance(name, str) for name in names)
    ):
        raise CorruptFileError(f"a device mesh of {ndim} dims with names {brief(names)}")
    return tuple(names)


# Each mesh dim as (size, stride) pairs: one, none for size 1, or several for a flattened dim.
_Axes = list[list[tuple[int, int]]]


def _read_axes(layout: stand_ins.MeshLayout) -> _Axes:
    """The dims of a mesh layout: ``axes`` (torch 2.13) or ``shape`` and ``stride`` (torch 2.11)."""
    axes = layout.axes
    pairs: list[tuple[Any, Any]]
    if isinstance(axes, tuple) and all(isinstance(a, stand_ins.FlatLayout) for a in axes):
        pairs = [(axis.shape, axis.stride) for axis in axes[: MAX_DIMS + 1]]
    else:
        shape, stride = layout.shape, layout.stride
        if not isinstance(shape, tuple):
            shape, stride = (shape,), (stride,)
        if not isinstance(stride, tuple) or len(shape) != len(stride):
            raise CorruptFileError("a device mesh whose layout is damaged")
        pairs = list(zip(shape, stride, strict=True))
    if len(pairs) > MAX_DIMS:
        raise CorruptFileError("a device mesh of too many dims")
    result = []
    for sizes, strides in pairs:
        flat_sizes, flat_strides = _flatten(sizes), _flatten(strides)
        if len(flat_sizes) != len(flat_strides):
            raise CorruptFileError("a device mesh whose layout is damaged")
        result.append(list(zip(flat_sizes, flat_strides, strict=True)))
    return result


def _flatten(value: object) -> list[int]:
    """An int, or the ints in nested tuples."""
    flat: list[int] = []
    pending = [value]
    for _ in range(MAX_DIMS):
        if not pending:
            return flat
        item = pending.pop()
        if stand_ins.is_int(item) and item >= 0:
            flat.append(item)
        elif isinstance(item, tuple) and len(item) <= MAX_DIMS:
            pending.extend(reversed(item))
        else:
            break
    raise CorruptFileError("a device mesh whose layout is damaged")


def _ranks_of_layout(axes: _Axes, rank_map: Ints, rank: int) -> Ints:
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


# --- shards of a ShardedTensor ---


def _read_shard_metadata(record: object) -> tuple[Ints, Ints, int]:
    """Offsets and sizes of one shard of a ShardedTensor, and the rank that owns it."""
    if not isinstance(record, stand_ins.ShardMetadata):
        raise CorruptFileError("a ShardedTensor whose metadata are damaged")
    offsets, sizes = (
        tuple(value) if isinstance(value, list | tuple) and len(value) <= MAX_DIMS else None
        for value in (record.shard_offsets, record.shard_sizes)
    )
    placement = record.placement
    owner = placement._rank if isinstance(placement, stand_ins.RemoteDevice) else None
    if (
        not stand_ins.is_shape(offsets)
        or not stand_ins.is_shape(sizes)
        or len(offsets) != len(sizes)
        or not stand_ins.is_int(owner)
    ):
        raise CorruptFileError("a ShardedTensor whose metadata are damaged")
    return offsets, sizes, owner


def _describe_range(offsets: Ints, sizes: Ints) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(offsets, sizes, strict=True))}]"


def _read_box_dtype(value: stand_ins.ShardedTensor) -> str:
    """A rank without rows says the dtype only in the arguments of its wrapper."""
    for argument in value.args:
        dtype = FROM_TORCH.get(argument) if isinstance(argument, str) else None
        if dtype is not None:
            return dtype
    raise CorruptFileError("a ShardedTensor without a dtype")
