"""Placement rules compared with what torch itself computes for the same mesh and placements.

The oracle is a tensor of its own element numbers, split by torch: what a rank then holds says which
elements its boxes must name, and in which order.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from streammerge.errors import PlacementError, UnsupportedError
from streammerge.placement import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    check_tiling,
    describe_box,
    local_boxes,
    local_shape,
    mesh_positions,
    row_major_strides,
)

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=150)

TorchPlacements = tuple[Any, ...]


class MeshSize:
    """What torch's conversions of placements ask of a mesh: its sizes."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]


def ours(placements: TorchPlacements) -> tuple[Placement, ...]:
    return tuple(
        Replicate()
        if isinstance(p, TorchReplicate)
        else StridedShard(p.dim, p.split_factor)
        if isinstance(p, TorchStridedShard)
        else Shard(p.dim)
        for p in placements
    )


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def torch_local(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    position: Sequence[int],
    placements: TorchPlacements,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """What one position of the mesh holds when torch splits mesh dim after mesh dim in `order`."""
    local = numbered(shape)
    for mesh_dim in range(len(mesh_shape)) if order is None else order:
        placement = placements[mesh_dim]
        if isinstance(placement, TorchReplicate):
            continue
        parts, _ = placement._split_tensor(local, mesh_shape[mesh_dim], with_padding=False)
        local = parts[position[mesh_dim]]
    return local


def execution_order(mesh_shape: Sequence[int], shard_order: Sequence[ShardOrderEntry]) -> list[int]:
    """Mesh dims in an order that keeps to the shard order of every tensor dim."""
    return [mesh_dim for entry in shard_order for mesh_dim in entry.mesh_dims]


def assert_holds(
    shape: tuple[int, ...], sharding: Sharding, position: tuple[int, ...], expected: torch.Tensor
) -> None:
    """The boxes name exactly the elements of `expected`, each at its place in the local shard."""
    local = expected.numpy()
    found = local_shape(shape, sharding, position)
    if local.size or found:
        assert math.prod(found) == local.size
    if local.size:
        assert found == local.shape
    whole = numbered(shape).numpy()
    filled = np.full(local.shape, -1)
    boxes = local_boxes(shape, sharding, position)
    assert bool(boxes) == bool(local.size)
    for box in boxes:
        assert box.local_shape == found
        assert 0 not in box.sizes
        where = tuple(slice(o, o + n) for o, n in zip(box.origin, box.sizes, strict=True))
        source = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert (filled[where] == -1).all()
        filled[where] = whole[source]
    np.testing.assert_array_equal(filled, local)


def assert_tiles(shape: tuple[int, ...], sharding: Sharding) -> None:
    """All positions together hold every element equally often, and `check_tiling` agrees."""
    counts = np.zeros(shape, dtype=int)
    distinct = set()
    for position in np.ndindex(sharding.mesh_shape):
        for box in local_boxes(shape, sharding, position):
            counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
            distinct.add((box.offsets, box.sizes))
    copies = math.prod(
        size
        for size, placement in zip(sharding.mesh_shape, sharding.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    assert (counts == copies).all()
    check_tiling(shape, [Box.whole_shard(*box) for box in sorted(distinct)])


# --- strategies ---


mesh_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def shapes(draw: st.DrawFn, least_dims: int = 1) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 13), min_size=least_dims, max_size=3)))


@st.composite
def plain_cases(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], TorchPlacements]:
    mesh_shape = draw(mesh_shapes)
    shape = draw(shapes())
    placement = st.one_of(st.integers(0, len(shape) - 1).map(TorchShard), st.just(TorchReplicate()))
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@st.composite
def ordered_cases(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], TorchPlacements, tuple[ShardOrderEntry, ...]]:
    """Plain placements and a shard order, which need not be left to right."""
    shape, mesh_shape, placements = draw(plain_cases())
    order = []
    for dim in range(len(shape)):
        mesh_dims = [m for m, p in enumerate(placements) if p == TorchShard(dim)]
        if mesh_dims:
            order.append(ShardOrderEntry(dim, tuple(draw(st.permutations(mesh_dims)))))
    return shape, mesh_shape, placements, tuple(order)


# --- plain placements ---


@given(plain_cases())
@fixed
def test_plain_shards(case: tuple[tuple[int, ...], tuple[int, ...], TorchPlacements]) -> None:
    shape, mesh_shape, placements = case
    sharding = Sharding(mesh_shape, ours(placements))
    for position in np.ndindex(mesh_shape):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(position), placements
        )
        assert local_shape(shape, sharding, position) == tuple(sizes)
        boxes = local_boxes(shape, sharding, position)
        if 0 in sizes:
            assert boxes == ()
        else:
            assert boxes == (Box.whole_shard(tuple(offsets), tuple(sizes)),)
        expected = torch_local(shape, mesh_shape, position, placements)
        assert_holds(shape, sharding, position, expected)
    if math.prod(shape):
        assert_tiles(shape, sharding)


@pytest.mark.parametrize("size", range(12))
@pytest.mark.parametrize("parts", range(1, 8))
def test_one_dim_is_split_as_torch_chunk_does(size: int, parts: int) -> None:
    chunks = list(torch.arange(size).chunk(parts)) if size else []
    chunks += [torch.empty(0, dtype=torch.int64)] * (parts - len(chunks))
    sharding = Sharding((parts,), (Shard(0),))
    for index, chunk in enumerate(chunks):
        assert_holds((size,), sharding, (index,), chunk)


def test_a_scalar_is_one_box_without_dims() -> None:
    sharding = Sharding((2, 3), (Replicate(), Replicate()))
    for position in np.ndindex((2, 3)):
        assert local_shape((), sharding, position) == ()
        assert local_boxes((), sharding, position) == (Box((), (), (), ()),)
    check_tiling((), [Box((), (), (), ())])


def test_a_mesh_of_no_dims_holds_the_whole() -> None:
    sharding = Sharding((), ())
    assert local_boxes((2, 3), sharding, ()) == (Box.whole_shard((0, 0), (2, 3)),)


def test_chunks_of_a_dim_are_one_box_each_also_when_the_last_is_short() -> None:
    sharding = Sharding((4,), (Shard(0),))
    boxes = [local_boxes((5, 3), sharding, (i,)) for i in range(4)]
    assert [[(b.offsets, b.sizes) for b in part] for part in boxes] == [
        [((0, 0), (2, 3))],
        [((2, 0), (2, 3))],
        [((4, 0), (1, 3))],
        [],
    ]


# --- several shardings of one dim ---


@given(ordered_cases())
@fixed
def test_split_factors_are_read_as_an_order(case: Any) -> None:
    """What FSDP2 writes over tensor parallelism: uneven dims and empty ranks included."""
    shape, mesh_shape, plain, shard_order = case
    mesh: Any = MeshSize(mesh_shape)
    placements = DTensorSpec._convert_shard_order_to_StridedShard(shard_order, plain, mesh)
    # Two orders can have the same split factors where a mesh dim has one rank: torch's reading.
    decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    assert decoded is not None
    order = execution_order(mesh_shape, decoded)
    for flag in (None, True):
        sharding = Sharding(mesh_shape, ours(placements), None, flag)
        for position in np.ndindex(mesh_shape):
            expected = torch_local(shape, mesh_shape, position, plain, order)
            assert_holds(shape, sharding, position, expected)
        if math.prod(shape):
            assert_tiles(shape, sharding)


@given(ordered_cases())
@fixed
def test_a_stated_shard_order_rules(case: Any) -> None:
    shape, mesh_shape, placements, shard_order = case
    stated = tuple((entry.tensor_dim, entry.mesh_dims) for entry in shard_order)
    sharding = Sharding(mesh_shape, ours(placements), stated, False)
    order = execution_order(mesh_shape, shard_order)
    for position in np.ndindex(mesh_shape):
        expected = torch_local(shape, mesh_shape, position, placements, order)
        assert_holds(shape, sharding, position, expected)
    if math.prod(shape):
        assert_tiles(shape, sharding)


@given(ordered_cases())
@settings(fixed, max_examples=60)
def test_even_strided_shards_are_where_torch_says(case: Any) -> None:
    """torch places even ones from left to right, by strides: the same elements."""
    shape, mesh_shape, plain, shard_order = case
    shape = tuple(math.prod(mesh_shape) * (n % 3 + 1) for n in shape)
    mesh: Any = MeshSize(mesh_shape)
    placements = DTensorSpec._convert_shard_order_to_StridedShard(shard_order, plain, mesh)
    sharding = Sharding(mesh_shape, ours(placements))
    for position in np.ndindex(mesh_shape):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(position), placements
        )
        assert local_shape(shape, sharding, position) == tuple(sizes)
        first = local_boxes(shape, sharding, position)[0]
        assert first.offsets == tuple(offsets)
        expected = torch_local(shape, mesh_shape, position, placements)
        assert_holds(shape, sharding, position, expected)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.integers(0, 2**32).map(random.Random),
    st.sampled_from([None, True, False]),
)
@settings(fixed, max_examples=100)
def test_split_factors_that_no_order_gives(
    mesh_shape: tuple[int, ...], rng: random.Random, flag: bool | None
) -> None:
    """torch then splits from left to right, in blocks."""
    placements = tuple(
        rng.choice(
            [
                TorchReplicate(),
                TorchShard(0),
                TorchStridedShard(0, split_factor=rng.randint(2, 4)),
                TorchStridedShard(1, split_factor=rng.randint(2, 3)),
            ]
        )
        for _ in mesh_shape
    )
    assume(any(isinstance(p, TorchStridedShard) for p in placements))
    mesh: Any = MeshSize(mesh_shape)
    decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    assume(flag is False or decoded is None)
    # The least sizes that divide evenly at every step.
    even = [1, 1]
    for size, placement in zip(mesh_shape, placements, strict=True):
        if isinstance(placement, TorchStridedShard):
            even[placement.dim] *= size * placement.split_factor
        elif isinstance(placement, TorchShard):
            even[0] *= size
    shape = (even[0], even[1])
    sharding = Sharding(mesh_shape, ours(placements), None, flag)
    for position in np.ndindex(mesh_shape):
        expected = torch_local(shape, mesh_shape, position, placements)
        assert_holds(shape, sharding, position, expected)
    assert_tiles(shape, sharding)


def test_a_lone_strided_shard() -> None:
    """``distribute_tensor`` puts rows 0, 1, 4, 5 on rank 0 and 2, 3, 6, 7 on rank 1."""
    sharding = Sharding((2,), (StridedShard(0, 2),), None, True)
    held = [local_boxes((8,), sharding, (i,)) for i in range(2)]
    assert [[(b.offsets[0], b.origin[0], b.sizes[0]) for b in boxes] for boxes in held] == [
        [(0, 0, 2), (4, 2, 2)],
        [(2, 0, 2), (6, 2, 2)],
    ]


@pytest.mark.parametrize("size", [1, 3, 6, 7, 9])
def test_uneven_blocks_that_no_order_gives_are_refused(size: int) -> None:
    sharding = Sharding((2,), (StridedShard(0, 2),))
    with pytest.raises(PlacementError, match="evenly"):
        local_boxes((size,), sharding, (0,))
    with pytest.raises(PlacementError, match="evenly"):
        local_shape((size,), sharding, (0,))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "placements",
    [
        (TorchStridedShard(0, split_factor=2), TorchShard(0)),
        (TorchStridedShard(0, split_factor=3), TorchShard(0)),
        (TorchShard(0), TorchStridedShard(0, split_factor=2)),
        (TorchStridedShard(0, split_factor=2), TorchStridedShard(0, split_factor=3)),
    ],
    ids=str,
)
def test_strided_shards_with_a_shard_order_of_their_own(
    placements: TorchPlacements, order: tuple[int, int]
) -> None:
    """With ``use_strided_shard_as_shard_order=False`` strides are strides, and the order is stated.

    ``full_tensor`` (torch 2.13, four gloo processes) restores a tensor that was split like this,
    and none that was split from left to right regardless.
    """
    shape, mesh_shape = (72,), (2, 2)
    sharding = Sharding(mesh_shape, ours(placements), ((0, order),), False)
    for position in np.ndindex(mesh_shape):
        expected = torch_local(shape, mesh_shape, position, placements, order)
        assert_holds(shape, sharding, position, expected)
    assert_tiles(shape, sharding)


def test_strided_shards_of_two_dims() -> None:
    placements = (TorchStridedShard(0, split_factor=2), TorchStridedShard(1, split_factor=3))
    sharding = Sharding((2, 2), ours(placements))
    for position in np.ndindex((2, 2)):
        expected = torch_local((8, 12), (2, 2), position, placements)
        assert_holds((8, 12), sharding, position, expected)
        assert len(local_boxes((8, 12), sharding, position)) == 6
    assert_tiles((8, 12), sharding)


# --- against a process group ---


@contextmanager
def acting_as(rank: int, world_size: int) -> Iterator[None]:
    """One process that believes to be `rank` of a job; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


MESHES = [
    ((4,), (0, 1, 2, 3)),
    ((4,), (2, 0, 3, 1)),
    ((3,), (5, 1, 4)),
    ((2, 2), (0, 1, 2, 3)),
    ((2, 2), (0, 2, 1, 3)),
    ((2, 2), (3, 1, 0, 2)),
    ((2, 3), (4, 0, 2, 5, 3, 1)),
    ((3, 2), (5, 4, 3, 2, 1, 0)),
    ((2, 2, 2), (7, 2, 5, 0, 3, 6, 1, 4)),
    ((1, 4), (3, 0, 1, 2)),
    ((2, 1, 2), (3, 1, 0, 2)),
]


@pytest.mark.parametrize(("mesh_shape", "ranks"), MESHES, ids=str)
def test_positions_are_those_of_the_process_groups(
    mesh_shape: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    expected = []
    for rank in ranks:
        with acting_as(rank, 8):
            mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(mesh_shape))
            expected.append(tuple(mesh.get_local_rank(dim) for dim in range(len(mesh_shape))))
    assert mesh_positions(mesh_shape, ranks) == expected


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 2**32).map(random.Random))
@fixed
def test_positions_number_every_line_of_the_mesh(shape: list[int], rng: random.Random) -> None:
    ranks = rng.sample(range(1000), math.prod(shape))
    array = np.array(ranks).reshape(shape)
    # argsort of argsort gives the place of each element in its sorted line.
    places = [array.argsort(axis=d).argsort(axis=d).reshape(-1) for d in range(len(shape))]
    expected = list(zip(*map(list, places), strict=True)) if shape else [()]
    assert mesh_positions(shape, ranks) == expected


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((7, 5), (2, 3), (TorchShard(0), TorchShard(0))),
        ((7, 5), (2, 3), (TorchShard(1), TorchShard(0))),
        ((3, 5), (4, 2), (TorchShard(0), TorchShard(1))),
        ((8, 4), (2, 2), (TorchStridedShard(0, split_factor=2), TorchShard(0))),
        ((12, 3), (2, 2), (TorchShard(0), TorchStridedShard(0, split_factor=3))),
        ((6, 2), (2, 2), (TorchReplicate(), TorchShard(0))),
        ((2, 2), (3, 2), (TorchShard(0), TorchReplicate())),
        ((), (2, 2), (TorchReplicate(), TorchReplicate())),
    ],
    ids=str,
)
def test_distribute_tensor_holds_what_the_boxes_say(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: TorchPlacements
) -> None:
    sharding = Sharding(mesh_shape, ours(placements))
    world_size = math.prod(mesh_shape)
    ranks = range(world_size)
    for rank, position in zip(ranks, mesh_positions(mesh_shape, ranks), strict=True):
        with acting_as(rank, world_size):
            mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(mesh_shape))
            value = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
            assert_holds(shape, sharding, position, value.to_local())


# --- what is refused ---


def test_partial_is_refused() -> None:
    sharding = Sharding((2, 2), (Shard(0), Partial("avg")))
    for call in (local_boxes, local_shape):
        with pytest.raises(UnsupportedError, match="avg"):
            call((4,), sharding, (0, 0))
    assert isinstance(TorchPartial("avg"), TorchPartial)


@pytest.mark.parametrize(
    ("shape", "sharding"),
    [
        ((4,), Sharding((2,), (Shard(1),))),
        ((), Sharding((2,), (Shard(0),))),
        ((4, 4), Sharding((2,), (StridedShard(2, 2),))),
        ((4,), Sharding((2,), (Shard(-1),))),
        ((4,), Sharding((2, 2), (Shard(0),))),
        ((4,), Sharding((2,), (Shard(0), Shard(0)))),
        ((4,), Sharding((2,), ())),
        ((4,), Sharding((2, 2), (Shard(0), Shard(0)), ((0, (0,)),), False)),
        ((4,), Sharding((2, 2), (Shard(0), Shard(0)), ((0, (0, 0)),), False)),
        ((4,), Sharding((2, 2), (Shard(0), Replicate()), ((0, (1,)),), False)),
        ((4, 4), Sharding((2, 2), (Shard(0), Shard(1)), ((0, (1,)), (1, (0,))), False)),
        ((4,), Sharding((2, 2), (Shard(0), Shard(0)), ((0, (0, 1)), (0, (1, 0))), False)),
        ((4,), Sharding((2,), (Shard(0),), ((0, (3,)),), False)),
        ((4,), Sharding((2,), (Shard(0),), (), False)),
        ((4,), Sharding((2, 2), (StridedShard(0, 2), Shard(0)), ((0, (0,)),), False)),
        ((4,), Sharding((2, 2), (StridedShard(0, 2), Shard(0)), ((1, (1, 0)),), False)),
        ((4,), Sharding((2,), (StridedShard(0, 0),))),
    ],
    ids=str,
)
def test_placements_that_make_no_sense_are_refused(
    shape: tuple[int, ...], sharding: Sharding
) -> None:
    with pytest.raises(PlacementError):
        local_shape(shape, sharding, (0,) * len(sharding.mesh_shape))


def test_text_for_people() -> None:
    sharding = Sharding((2, 3), (StridedShard(0, 3), Shard(0)))
    assert str(sharding) == "(_StridedShard(0, split_factor=3), Shard(0)) on a mesh 2x3"
    assert str(Partial("sum")) == "Partial(sum)"
    assert describe_box(Box.whole_shard((0, 8), (4, 8))) == "[0:4, 8:16]"
    assert Sharding((2,), (Replicate(),)).replicated
    assert not sharding.replicated


# --- proof of tiling ---


def guillotine(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Box]:
    """Cut a box into many by random straight cuts."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, sizes[dim])
        moved = list(offsets)
        moved[dim] += at
        first, second = list(sizes), list(sizes)
        first[dim], second[dim] = at, sizes[dim] - at
        boxes += [(offsets, tuple(first)), (tuple(moved), tuple(second))]
    rng.shuffle(boxes)
    return [Box.whole_shard(*box) for box in boxes]


tiling_shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(tiling_shapes, st.integers(0, 12), st.integers(0, 2**32).map(random.Random))
@fixed
def test_every_tiling_is_accepted(shape: tuple[int, ...], cuts: int, rng: random.Random) -> None:
    check_tiling(shape, guillotine(shape, cuts, rng))


@given(tiling_shapes, st.integers(0, 12), st.integers(0, 2**32).map(random.Random))
@fixed
def test_gaps_overlaps_and_excesses_are_refused(
    shape: tuple[int, ...], cuts: int, rng: random.Random
) -> None:
    boxes = guillotine(shape, cuts, rng)
    full = [i for i, box in enumerate(boxes) if 0 not in box.sizes]
    box = boxes[victim := rng.choice(full)]
    dim = rng.randrange(len(shape))
    without = boxes[:victim] + boxes[victim + 1 :]
    smaller, larger, shifted = list(box.sizes), list(box.sizes), list(box.offsets)
    smaller[dim] -= 1
    larger[dim] += 1
    shifted[dim] += rng.choice([-1, 1])
    for wrong in (
        without,
        [*boxes, box],
        [*without, Box.whole_shard(box.offsets, tuple(smaller))],
        [*without, Box.whole_shard(box.offsets, tuple(larger))],
        [*without, Box.whole_shard(tuple(shifted), box.sizes)],
    ):
        with pytest.raises(PlacementError):
            check_tiling(shape, wrong)


def test_the_verdict_on_any_boxes_is_that_of_counting() -> None:
    rng = random.Random(0)
    verdicts: Counter[bool] = Counter()
    for _ in range(1000):
        shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
        counts = np.zeros(shape, dtype=int)
        boxes: list[Box] = []
        # As many elements as the tensor has, so that only counting tells a tiling.
        while counts.sum() < math.prod(shape):
            offsets = tuple(rng.randrange(n) for n in shape)
            sizes = tuple(rng.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))
            if counts.sum() + math.prod(sizes) > math.prod(shape):
                continue
            if counts[offsets] and rng.random() < 0.7:
                continue  # or hardly any would be a tiling
            boxes.append(Box.whole_shard(offsets, sizes))
            counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        tiles = bool((counts == 1).all())
        verdicts[tiles] += 1
        if tiles:
            check_tiling(shape, boxes)
        else:
            with pytest.raises(PlacementError):
                check_tiling(shape, boxes)
    assert min(verdicts[True], verdicts[False]) > 200


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4,), [((0,), (4,)), ((4,), (1,))]),
        ((4,), [((0,), (4,)), ((5,), (0,))]),
        ((4,), [((-1,), (5,))]),
        ((4,), [((0,), (4,)), ((0,), (-1,))]),
        ((4, 2), [((0,), (4,))]),
        ((4,), [((0, 0), (4, 1))]),
        ((4,), [((0,), (4, 1))]),
        ((4, 2), [((0, 0), (4,)), ((0, 0), (4, 2))]),
        ((4, 2), [((0, 0), (4,)), ((0, 0), (4,))]),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (2, 1))]),
        ((), []),
        ((), [((), ()), ((), ())]),
        ((3,), []),
    ],
    ids=str,
)
def test_boxes_that_are_no_tiling(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    with pytest.raises(PlacementError):
        check_tiling(shape, [Box.whole_shard(*box) for box in boxes])


def test_empty_tensors_are_tiled_by_nothing_and_by_empty_boxes() -> None:
    check_tiling((0, 3), [])
    check_tiling((0, 3), [Box.whole_shard((0, 0), (0, 3)), Box.whole_shard((0, 1), (0, 1))])
    check_tiling((4,), [Box.whole_shard((0,), (4,)), Box.whole_shard((4,), (0,))])


def test_a_tiling_that_no_straight_cut_divides() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    middle = ((1, 1), (1, 1))
    check_tiling((3, 3), [Box.whole_shard(*box) for box in [*pinwheel, middle]])
    with pytest.raises(PlacementError, match="8 of the 9"):
        check_tiling((3, 3), [Box.whole_shard(*box) for box in pinwheel])


@pytest.mark.parametrize(
    "grid", [(20_000,), (1, 20_000), (100, 200), (8, 8, 300), (10, 10, 10, 10)]
)
def test_the_proof_takes_time_that_grows_with_the_number_of_boxes(grid: tuple[int, ...]) -> None:
    """All pairs of these would be two hundred million."""
    shape = tuple(3 * n for n in grid)
    places = list(itertools.product(*map(range, grid)))
    boxes = [Box.whole_shard(tuple(3 * i for i in place), (3,) * len(grid)) for place in places]
    random.Random(0).shuffle(boxes)
    check_tiling(shape, boxes)
    index = [2] * len(grid)
    twice = Box.whole_shard(tuple(index), (1,) * len(grid))
    with pytest.raises(PlacementError, match="overlap"):
        check_tiling(shape, [*boxes, twice])
    last = max(boxes, key=lambda box: box.offsets)
    with pytest.raises(PlacementError, match=re.escape(f"none of them index {list(last.offsets)}")):
        check_tiling(shape, [box for box in boxes if box is not last])


def test_boxes_with_more_corners_than_there_are_boxes() -> None:
    half = [Box.whole_shard((at,) + (0,) * 39, (1,) + (2,) * 39) for at in range(2)]
    check_tiling((2,) * 40, half)
    small = [Box.whole_shard((at,) * 40, (1,) * 40) for at in range(2)]
    with pytest.raises(PlacementError, match="chunks cover 2 of the"):
        check_tiling((2,) * 40, small)
    with pytest.raises(PlacementError, match="overlap"):
        check_tiling((2,) * 40, [small[0], *small])
    with pytest.raises(UnsupportedError, match="300 chunks that are cut in more dims"):
        check_tiling((2,) * 40, small * 150)


def test_a_hole_and_an_overlap_of_the_same_size() -> None:
    boxes = [((0,), (2,)), ((3,), (2,)), ((3,), (1,))]
    with pytest.raises(PlacementError, match=r"5 of the 5 elements .* none of them index \[2\]"):
        check_tiling((5,), [Box.whole_shard(*box) for box in boxes])


def test_strides() -> None:
    for shape in itertools.product(range(1, 4), repeat=3):
        assert row_major_strides(shape) == torch.empty(shape).stride()
    assert row_major_strides(()) == ()
