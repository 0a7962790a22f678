"""Where a rank's local shard lies in the global tensor. Pure geometry, no files, no torch.

The rules are those of ``torch.distributed.tensor``: each sharding is ``torch.chunk`` of what the
previous ones left, so chunks are ``ceil(n / parts)`` long, the last may be short and ranks may be
empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from streammerge.errors import PlacementError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor dim `dim` is split over the mesh dim."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """``_StridedShard``: like `Shard`, applied after mesh dims further right (FSDP2 over TP)."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the mesh dim holds the same."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Ranks hold terms of a pending reduction. Never mergeable; named in the error."""

    reduce_op: str

    def __str__(self) -> str:
        return f"Partial({self.reduce_op})"


Placement = Shard | StridedShard | Replicate | Partial

# (tensor dim, mesh dims in the order in which they split it): torch's ShardOrderEntry.
ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is spread over a device mesh, without saying over which ranks.

    Attributes:
        mesh_shape: sizes of the mesh dims.
        placements: one per mesh dim.
        shard_order: the order of several shardings of one tensor dim, where the spec states one.
        strided_is_order: the spec's ``use_strided_shard_as_shard_order``; None in files of torch
            2.9 and older, which have no such field.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: ShardOrder | None = None
    strided_is_order: bool | None = None

    @property
    def replicated(self) -> bool:
        """Whether no mesh dim shards the tensor."""
        return all(isinstance(placement, Replicate) for placement in self.placements)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.placements))}) on a mesh {_by(self.mesh_shape)}"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offsets: first index in each dim of the global tensor.
        sizes: extent in each dim.
        origin: first index in each dim of the local shard that holds it. All zero, but for a
            ``_StridedShard`` that gives a rank several parts.
        local_shape: shape of that local shard. The sizes, but for the same.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    origin: tuple[int, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def whole_shard(cls, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        """The part of a local shard that holds nothing else."""
        return cls(offsets, sizes, (0,) * len(sizes), sizes)


# Boxes that are cut in more dims than this have too many corners to look at. No training cuts
# tensors so; a few such boxes are compared in pairs.
_MAX_CUT_DIMS = 4
_MAX_COMPARED = 256

# Along one tensor dim, a local shard is a list of (start, length) segments of the global dim.
_Segments = tuple[tuple[int, int], ...]


def mesh_positions(mesh_shape: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Position of each rank along each mesh dim.

    A position is the place in the *sorted* ranks of the line through the mesh, not the mesh
    coordinate: the process group of a line sorts its ranks, and that is what gives out shards.

    Args:
        mesh_shape: sizes of the mesh dims.
        ranks: the ranks of the mesh, row-major.

    Returns:
        For each rank, in the given order, one position per mesh dim.
    """
    positions = [[0] * len(mesh_shape) for _ in ranks]
    for dim, (size, stride) in enumerate(
        zip(mesh_shape, row_major_strides(mesh_shape), strict=True)
    ):
        for first in range(len(ranks)):
            if first // stride % size == 0:
                line = range(first, first + size * stride, stride)
                for place, index in enumerate(sorted(line, key=ranks.__getitem__)):
                    positions[index][dim] = place
    return list(map(tuple, positions))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of that shape."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def local_boxes(
    shape: tuple[int, ...], sharding: Sharding, position: tuple[int, ...]
) -> tuple[Box, ...]:
    """The parts of the global tensor that one position of the mesh holds.

    Args:
        shape: global shape.
        sharding: mesh shape and placements.
        position: see `mesh_positions`.

    Returns:
        One box; none if the shard is empty; several for a ``_StridedShard`` whose split factor
        is not that of mesh dims to its right.

    Raises:
        UnsupportedError: a placement is `Partial`.
        PlacementError: placements that do not fit the shape or cannot be resolved.
    """
    if 0 in shape:
        return ()
    per_dim = _local_segments(shape, sharding, position)
    located = []
    for segments in per_dim:
        origins = itertools.accumulate((length for _, length in segments), initial=0)
        located.append(
            [
                (start, length, at)
                for (start, length), at in zip(segments, origins, strict=False)
                if length
            ]
        )
    local = local_shape(shape, sharding, position)
    boxes = []
    for combination in itertools.product(*located):
        offsets, sizes, origin = zip(*combination, strict=True) if combination else ((), (), ())
        boxes.append(Box(offsets, sizes, origin, local))
    return tuple(boxes)


@lru_cache(maxsize=4096)
def local_shape(
    shape: tuple[int, ...], sharding: Sharding, position: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the local shard at one position of the mesh. Arguments as in `local_boxes`."""
    return tuple(
        sum(length for _, length in segments)
        for segments in _local_segments(shape, sharding, position)
    )


def check_tiling(shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Prove that free boxes cover a tensor exactly once, in time that grows with their number.

    How often each index is covered follows from the corners of the boxes alone: count a corner as
    +1 if it lies at the upper end of an even number of dims, else as -1, and the corners up to an
    index sum to the number of boxes around it. So boxes tile the tensor if and only if their
    corners are its own once opposite ones at the same place have cancelled.

    Raises:
        PlacementError: a box that leaves the tensor, overlaps another, or a part that none covers.
        UnsupportedError: many boxes that are cut in more dims than any training does.
    """
    full = []
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape) or any(
            offset < 0 or size < 0 or offset + size > n
            for offset, size, n in zip(box.offsets, box.sizes, shape, strict=False)
        ):
            raise PlacementError(f"chunk {describe_box(box)} lies outside the shape {list(shape)}")
        if 0 not in box.sizes:
            full.append(box)
    if 0 in shape:
        return
    dims = [d for d, n in enumerate(shape) if any(box.sizes[d] != n for box in full)]
    if len(dims) <= _MAX_CUT_DIMS:
        wrong = _find_wrong_index(shape, full, dims)
    else:
        wrong = _find_overlap(full)
    if wrong is not None:
        around = [box for box in full if _covers(box, wrong)]
        if len(around) > 1:
            first, second = map(describe_box, around[:2])
            raise PlacementError(f"chunks {first} and {second} overlap")
    volume, numel = sum(math.prod(box.sizes) for box in full), math.prod(shape)
    if wrong is not None or volume != numel:
        where = "" if wrong is None else f", none of them index {list(wrong)}"
        raise PlacementError(
            f"chunks cover {volume:,} of the {numel:,} elements of shape {list(shape)}{where}"
        )


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the element at a row-major position."""
    index = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))


def flat_boxes(
    shape: Sequence[int], begin: int, count: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The boxes that a range of the flattened tensor consists of, in order.

    Each is contiguous in the tensor. There are less than twice as many as dims: the end of a row,
    whole rows, the begin of a row.

    Args:
        shape: of the tensor.
        begin, count: the range, in elements.

    Yields:
        The first element of each box and its sizes.
    """
    strides = row_major_strides(shape)
    end = begin + count
    while begin < end:
        dim = next(
            (d for d, s in enumerate(strides) if begin % s == 0 and begin + s <= end), len(shape)
        )
        if dim == len(shape):  # a 0-d tensor
            yield begin, ()
            return
        stride, size = strides[dim], shape[dim]
        rows = min((end - begin) // stride, size - begin // stride % size)
        yield begin, (*(1,) * dim, rows, *shape[dim + 1 :])
        begin += rows * stride


def check_flat_tiling(numel: int, begins: Sequence[int], counts: Sequence[int]) -> None:
    """Prove that ranges cover a flattened tensor exactly once.

    Args:
        numel: elements of the tensor.
        begins, counts: the ranges, ascending.

    Raises:
        PlacementError: a gap, an overlap, or a range that leaves the tensor.
    """
    at = 0
    for begin, count in zip(begins, counts, strict=True):
        if begin != at or count < 0:
            raise PlacementError(f"a partition begins at element {begin:,}, expected {at:,}")
        at += count
    if at != numel:
        raise PlacementError(f"partitions cover {at:,} of {numel:,} elements")


def describe_box(box: Box) -> str:
    """A box for people: ``[0:4, 8:16]``."""
    ranges = (f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=False))
    return f"[{', '.join(ranges)}]"


def _find_wrong_index(
    shape: Sequence[int], boxes: Sequence[Box], dims: Sequence[int]
) -> tuple[int, ...] | None:
    """The first index that not exactly one box covers; None if there is none.

    Args:
        shape: of the tensor.
        boxes: inside it, none of them empty.
        dims: those that some box does not span. In the others there is nothing to tell apart.
    """
    corners: dict[tuple[int, ...], int] = {}
    whole = Box.whole_shard((0,) * len(shape), tuple(shape))
    for sign, box in itertools.chain([(-1, whole)], zip(itertools.repeat(1), boxes, strict=False)):
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in dims]
        for corner in itertools.product(*ends):
            place = tuple([at for at, _ in corner])
            count = corners.pop(place, 0) + sign * math.prod([factor for _, factor in corner])
            if count:
                corners[place] = count
    if not corners:
        return None
    # At the first corner that is left, nothing before it adds to the sum.
    index = [0] * len(shape)
    for d, at in zip(dims, min(corners), strict=True):
        index[d] = at
    return tuple(index)


def _find_overlap(boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """An index that two boxes cover; None if no two overlap. For few boxes of many dims."""
    if len(boxes) > _MAX_COMPARED:
        raise UnsupportedError(f"{len(boxes):,} chunks that are cut in more dims than is checked")
    for one, other in itertools.combinations(boxes, 2):
        index = tuple(map(max, one.offsets, other.offsets))
        if _covers(one, index) and _covers(other, index):
            return index
    return None


def _covers(box: Box, index: Sequence[int]) -> bool:
    return all(o <= i < o + n for i, o, n in zip(index, box.offsets, box.sizes, strict=True))


def _local_segments(
    shape: tuple[int, ...], sharding: Sharding, position: tuple[int, ...]
) -> list[_Segments]:
    per_dim: list[_Segments] = [((0, size),) for size in shape]
    for dim, steps in _split_steps(sharding, len(shape)).items():
        segments = per_dim[dim]
        for mesh_dim, factor in steps:
            parts = sharding.mesh_shape[mesh_dim]
            if factor == 1:
                segments = _chunk(segments, parts, position[mesh_dim])
            else:
                segments = _strided_chunk(segments, factor, parts, position[mesh_dim], sharding)
        per_dim[dim] = segments
    return per_dim


@lru_cache(maxsize=256)
def _split_steps(sharding: Sharding, ndim: int) -> dict[int, list[tuple[int, int]]]:
    """For each sharded tensor dim: the (mesh dim, split factor) steps in order of application."""
    placements = sharding.placements
    if len(placements) != len(sharding.mesh_shape):
        raise PlacementError(
            f"{len(placements)} placements for a mesh of {len(sharding.mesh_shape)} dims"
        )
    for placement in placements:
        if isinstance(placement, Partial):
            raise UnsupportedError(
                f"placement {placement}: ranks hold terms of a pending reduction, not values",
                hint="redistribute the DTensor to Shard or Replicate before saving",
            )
        if isinstance(placement, Shard | StridedShard) and not 0 <= placement.dim < ndim:
            raise PlacementError(f"placement {placement} on a tensor of {ndim} dims")
    strided = any(isinstance(p, StridedShard) for p in placements)
    plain = _left_to_right(placements)
    if strided and sharding.strided_is_order is not False:
        return _decode_strided(sharding) or plain
    if sharding.shard_order is None:
        return plain
    factors = {mesh_dim: factor for steps in plain.values() for mesh_dim, factor in steps}
    ordered = {
        dim: [(m, factors.get(m, 0)) for m in mesh_dims] for dim, mesh_dims in sharding.shard_order
    }
    if len(ordered) != len(sharding.shard_order) or plain != {
        dim: sorted(steps) for dim, steps in ordered.items()
    }:
        raise PlacementError(f"shard_order {sharding.shard_order} contradicts {sharding}")
    return ordered


def _left_to_right(placements: Sequence[Placement]) -> dict[int, list[tuple[int, int]]]:
    steps: dict[int, list[tuple[int, int]]] = {}
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            steps.setdefault(placement.dim, []).append((mesh_dim, 1))
        elif isinstance(placement, StridedShard):
            steps.setdefault(placement.dim, []).append((mesh_dim, placement.split_factor))
    return steps


def _decode_strided(sharding: Sharding) -> dict[int, list[tuple[int, int]]] | None:
    """Read split factors as an order of shardings; None if no order gives them.

    From right to left, a mesh dim goes behind those whose sizes multiply to its split factor
    (1 for a plain `Shard`). torch: DTensorSpec._maybe_convert_StridedShard_to_shard_order.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(sharding.placements))):
        placement = sharding.placements[mesh_dim]
        if not isinstance(placement, Shard | StridedShard):
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        earlier = order.setdefault(placement.dim, [])
        product = 1
        for place in range(len(earlier) + 1):
            if product == factor:
                earlier.insert(place, mesh_dim)
                break
            if place < len(earlier):
                product *= sharding.mesh_shape[earlier[place]]
        else:
            return None
    return {dim: [(mesh_dim, 1) for mesh_dim in mesh_dims] for dim, mesh_dims in order.items()}


def _chunk(segments: _Segments, parts: int, index: int) -> _Segments:
    """``torch.chunk`` of the concatenated segments; past the last chunk it is empty."""
    total = sum(length for _, length in segments)
    size = -(-total // parts)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    picked = []
    at = 0
    for start, length in segments:
        first, last = max(begin, at), min(end, at + length)
        if first < last:
            picked.append((start + first - at, last - first))
        at += length
    return tuple(picked) or ((segments[0][0] if segments else 0, 0),)


def _strided_chunk(
    segments: _Segments, factor: int, parts: int, index: int, sharding: Sharding
) -> _Segments:
    """Split into `factor` blocks and take part `index` of each.

    torch versions disagree on the uneven case, so it is refused.
    """
    total = sum(length for _, length in segments)
    if factor < 1 or total % (factor * parts):
        raise PlacementError(
            f"{sharding}: a dim of {total} does not divide evenly into {factor} x {parts} parts, "
            "and no order of the mesh dims gives the split factor"
        )
    picked: list[tuple[int, int]] = []
    for block in range(factor):
        for start, length in _chunk(_chunk(segments, factor, block), parts, index):
            if picked and sum(picked[-1]) == start:
                picked[-1] = (picked[-1][0], picked[-1][1] + length)
            else:
                picked.append((start, length))
    return tuple(picked)


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) if sizes else "of no dims"
