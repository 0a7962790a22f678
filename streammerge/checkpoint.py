"""What a checkpoint holds and where its bytes are. Data only; nothing here opens a file.

Half a million Python objects are too much for 512 ranks of 1,000 tensors, so what exists once per
rank and tensor lives in arrays, and `Tensor.chunks` makes its records as they are asked for.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from streammerge.dtypes import ITEMSIZE, PACKING
from streammerge.placement import (
    Box,
    Sharding,
    flat_boxes,
    local_boxes,
    mesh_positions,
    unravel,
)


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The stored blobs (torch storages) of one file, in columns.

    Attributes:
        header_offsets: where the zip local header starts, -1 in files that have none.
        data_offsets: where the bytes start.
        sizes: bytes.
        crcs: CRC-32 of the bytes; 0 where the writer stored none.
        names: CRC-32 of the name that the local header must have, if there is one.
    """

    header_offsets: array[int] = field(default_factory=lambda: array("q"))
    data_offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    crcs: array[int] = field(default_factory=lambda: array("Q"))
    names: array[int] = field(default_factory=lambda: array("I"))

    def add(self, header_offset: int, data_offset: int, size: int, crc: int, name: int = 0) -> int:
        """Append a member and return its index."""
        self.header_offsets.append(header_offset)
        self.data_offsets.append(data_offset)
        self.sizes.append(size)
        self.crcs.append(crc)
        self.names.append(name)
        return len(self.sizes) - 1

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """A file that is read, as it was when its metadata was read.

    Attributes:
        path: as given.
        size: bytes.
        mtime_ns, inode: to notice that a file has changed meanwhile.
        members: its stored blobs.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    members: Members


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Where the local shards of a tensor lie, one slot per rank (or box), in columns.

    Attributes:
        files: index into `Checkpoint.files`.
        members: index into the file's `Members`.
        starts: byte offset of the first element in the member.
        strides: slot -> strides in elements, for shards that are not contiguous.
        conjugated: slots whose value is the complex conjugate of what is stored.
    """

    files: array[int] = field(default_factory=lambda: array("i"))
    members: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    conjugated: set[int] = field(default_factory=set)

    def add(
        self, file: int, member: int, start: int, strides: tuple[int, ...] | None, conj: bool
    ) -> int:
        """Append a slot and return its index."""
        slot = len(self.files)
        self.files.append(file)
        self.members.append(member)
        self.starts.append(start)
        if strides is not None:
            self.strides[slot] = strides
        if conj:
            self.conjugated.add(slot)
        return slot

    def shifted(self, count: int) -> Extents:
        """The same, with `count` added to every index of a file."""
        return replace(self, files=array("i", (file + count for file in self.files)))

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor and the extents that hold it.

    Attributes:
        box: the part.
        replicas: slots that should hold the same bytes; the first is read.
    """

    box: Box
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlainLayout:
    """Plain tensors: one value, of which every rank holds a copy.

    Attributes:
        ranks: the rank of each slot, ascending.
    """

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return "plain"

    def chunks(self, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
        """One chunk: the whole, from every rank."""
        box = Box.whole_shard((0,) * len(shape), shape)
        return (Chunk(box, tuple(range(len(self.ranks)))),)

    def undeclared(self, chunk: Chunk) -> tuple[int, ...]:
        """The copies among a chunk's replicas that no placement declares: all."""
        return chunk.replicas


@dataclass(frozen=True, slots=True, eq=False)
class MeshLayout:
    """DTensors: a sharding over one device mesh, or over several parallel ones.

    A mesh sliced from a larger one differs from rank file to rank file; the tensor then exists
    once per parallel mesh.

    Attributes:
        sharding: mesh shape and placements, the same for all meshes.
        dim_names: names of the mesh dims, if any.
        meshes: the ranks of each mesh, row-major; slots are in this order, mesh after mesh.
    """

    sharding: Sharding
    dim_names: tuple[str, ...] | None
    meshes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.sharding.placements))})"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each slot."""
        return tuple(rank for mesh in self.meshes for rank in mesh)

    def chunks(self, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
        """The chunks in row-major order of their offsets."""
        return _mesh_chunks(self, shape)

    def undeclared(self, chunk: Chunk) -> tuple[int, ...]:
        """One replica per parallel mesh: nothing in the files says that these are copies.

        A tensor that no mesh dim shards is a replicated entry like a plain one: all its copies.
        """
        if self.sharding.replicated:
            return chunk.replicas
        size = math.prod(self.sharding.mesh_shape)
        first: dict[int, int] = {}
        for slot in chunk.replicas:
            first.setdefault(slot // size, slot)
        return tuple(first.values())


@dataclass(frozen=True, slots=True)
class Boxes:
    """Parts of a tensor, each held by a local shard of its own, in one column.

    Attributes:
        ndim: dims of the tensor.
        bounds: for each part its offsets, then its sizes.
    """

    ndim: int
    bounds: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, boxes: Sequence[Box], ndim: int) -> Boxes:
        """The same as columns."""
        return cls(ndim, array("q", [n for box in boxes for n in (*box.offsets, *box.sizes)]))

    def __iter__(self) -> Iterator[Box]:
        ndim = self.ndim
        for at in range(0, len(self.bounds), 2 * ndim):
            offsets = tuple(self.bounds[at : at + ndim])
            yield Box.whole_shard(offsets, tuple(self.bounds[at + ndim : at + 2 * ndim]))


@dataclass(frozen=True, slots=True, eq=False)
class BoxLayout:
    """ShardedTensors: every slot says itself which part it holds.

    Attributes:
        boxes: the part of each slot.
        ranks: the rank of each slot, ascending.
    """

    boxes: Boxes
    ranks: array[int]

    def __str__(self) -> str:
        return "ShardedTensor"

    def chunks(self, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
        """The chunks in row-major order of their offsets."""
        if not shape:
            whole = Box.whole_shard((), ())
            return (Chunk(whole, tuple(range(len(self.ranks)))),)
        return _box_chunks(self)

    def undeclared(self, chunk: Chunk) -> tuple[int, ...]:
        """All copies: hybrid sharding keeps several, and nothing in the files says so."""
        return chunk.replicas


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayout:
    """Partitions of the flattened tensor: every slot holds a range of its elements.

    A range may begin and end in the middle of a row. It is then several chunks.

    Attributes:
        begins: first element of each slot, ascending.
        counts: elements of each slot.
        ranks: the rank of each slot.
    """

    begins: array[int]
    counts: array[int]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return "flat"

    def chunks(
        self, shape: tuple[int, ...], first: int = 0, last: int | None = None
    ) -> tuple[Chunk, ...]:
        """The chunks in row-major order of their offsets.

        Args:
            shape: of the tensor.
            first, last: slots that hold nothing between these two elements are left out.
        """
        begin = max(0, bisect_right(self.begins, first) - 1)
        end = len(self.begins) if last is None else bisect_right(self.begins, last)
        return tuple(
            Chunk(box, (slot,)) for slot in range(begin, end) for box in self._boxes(slot, shape)
        )

    def undeclared(self, chunk: Chunk) -> tuple[int, ...]:
        """The one copy that there is."""
        return chunk.replicas

    def _boxes(self, slot: int, shape: tuple[int, ...]) -> Iterator[Box]:
        begin, count = self.begins[slot], self.counts[slot]
        for at, sizes in flat_boxes(shape, begin, count):
            # As if the slot were the beginning of a tensor of the same shape: its elements have
            # the same strides.
            yield Box(unravel(at, shape), sizes, unravel(at - begin, shape), shape)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """Chunks that are stored once each, by whichever rank (torch.distributed.checkpoint).

    Attributes:
        boxes: the part of each slot. That of a 0-d tensor is not listed.
    """

    boxes: Boxes

    def __str__(self) -> str:
        count = len(self.ranks)
        return f"{count:,} chunk{'' if count == 1 else 's'}"

    @property
    def ranks(self) -> Sequence[int]:
        """The number of each slot; which rank stored it is not recorded."""
        return range(len(self.boxes.bounds) // (2 * self.boxes.ndim) if self.boxes.ndim else 1)

    def chunks(self, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
        """The chunks in row-major order of their offsets."""
        if not shape:
            return (Chunk(Box.whole_shard((), ()), (0,)),)
        return _box_chunks(self)

    def undeclared(self, chunk: Chunk) -> tuple[int, ...]:
        """There are no copies."""
        return chunk.replicas


Layout = PlainLayout | MeshLayout | BoxLayout | ChunkLayout | FlatLayout


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of the checkpoint.

    Attributes:
        name: its key.
        dtype: safetensors name.
        shape: global shape.
        layout: how it is spread over ranks.
        extents: where its local shards lie, one slot per rank.
        conflicts: how copies differ in shape or dtype from the first, by rank; for people.
        module_dtype: what the tensor had in the module that was trained, where what is stored is a
            master copy of it (safetensors name).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    extents: Extents
    conflicts: tuple[tuple[int, str], ...] = ()
    module_dtype: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, contiguous."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Number of values (packed dtypes hold several per element)."""
        return math.prod(self.shape) * PACKING.get(self.dtype, 1)

    def chunks(self) -> tuple[Chunk, ...]:
        """The parts that tile the tensor, in row-major order of their offsets."""
        return self.layout.chunks(self.shape)


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of the checkpoint that is no tensor of the model.

    Attributes:
        name: its key, or a pattern for a whole part: ``optimizer.*``.
        kind: what it is, for people.
    """

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """State of a training run that lies beside the weights and is not read.

    Attributes:
        path: a file or a folder.
        nbytes: its size.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that is known of a checkpoint before its data are read.

    Attributes:
        root: the directory (the first of several).
        format: name of the layout, for people.
        world_size: number of ranks that wrote it.
        files: what is read.
        tensors: in the order of the first rank's dict, then what other ranks add.
        skipped: entries that are no tensors, or belong to no model.
        directories: every folder that is read.
        assets: the folder with config, tokenizer and the like, if there is one.
        left_out: state of the training run beside the weights, see `formats.describe`.
        assets_mixed: whether that folder holds files and folders of the training too.
    """

    root: str
    format: str
    world_size: int
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    skipped: tuple[Skipped, ...]
    directories: tuple[str, ...]
    assets: str | None
    left_out: tuple[LeftOut, ...] = ()
    assets_mixed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def copied_folder(self) -> str | None:
        """The folder that is copied with all folders in it, if there is one."""
        return None if self.assets_mixed else self.assets

    def shifted(self, count: int) -> Checkpoint:
        """The same after `count` other files: that much is added to every index of a file."""
        tensors = (replace(t, extents=t.extents.shifted(count)) for t in self.tensors)
        return replace(self, tensors=tuple(tensors))

    def followed_by(self, other: Checkpoint) -> Checkpoint:
        """This checkpoint and another, which is `shifted` by the number of files of this one."""
        return replace(
            self,
            files=self.files + other.files,
            tensors=self.tensors + other.tensors,
            directories=self.directories + other.directories,
        )

    def meshes(self) -> Iterator[tuple[tuple[int, ...], tuple[str, ...] | None, int]]:
        """The distinct device meshes: (shape, dim names, number of parallel ones)."""
        seen = set()
        for tensor in self.tensors:
            layout = tensor.layout
            if isinstance(layout, MeshLayout):
                mesh = (layout.sharding.mesh_shape, layout.dim_names, len(layout.meshes))
                if mesh not in seen:
                    seen.add(mesh)
                    yield mesh


@lru_cache(maxsize=16)  # readers ask once per band, one tensor after another
def _box_chunks(layout: BoxLayout | ChunkLayout) -> tuple[Chunk, ...]:
    replicas: dict[Box, list[int]] = {}
    for slot, box in enumerate(layout.boxes):
        if 0 not in box.sizes:
            replicas.setdefault(box, []).append(slot)
    return tuple(
        Chunk(box, tuple(replicas[box])) for box in sorted(replicas, key=lambda box: box.offsets)
    )


@lru_cache(maxsize=512)
def _mesh_chunks(layout: MeshLayout, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    replicas: dict[Box, list[tuple[int, int]]] = {}
    slot = 0
    for mesh in layout.meshes:
        for rank, position in zip(
            mesh, mesh_positions(layout.sharding.mesh_shape, mesh), strict=True
        ):
            for box in local_boxes(shape, layout.sharding, position):
                replicas.setdefault(box, []).append((rank, slot))
            slot += 1
    return tuple(
        Chunk(box, tuple(slot for _, slot in sorted(replicas[box])))
        for box in sorted(replicas, key=lambda box: box.offsets)
    )
