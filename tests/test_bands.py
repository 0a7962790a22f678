"""Bands and reading steps, carried out on numpy arrays and compared with numpy slicing.

A storage is an array of elements, a local shard a strided view on it, an output tensor another
array. Every step is done literally, byte by byte, as it says.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammerge.bands import Band, Copy, Gather, Scatter, bands, copy_steps, fill_steps, run_nbytes
from streammerge.placement import (
    Box,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    local_boxes,
    row_major_strides,
)

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=300)

UNTOUCHED = 0xEE
FILLER = 0xDD  # of the storage around the shard


# --- bands ---


@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 500),
    st.booleans(),
)
@fixed
def test_bands_tile_in_order_and_keep_to_the_budget(
    shape: tuple[int, ...], itemsize: int, budget: int, shifted: bool
) -> None:
    origin = tuple(range(10, 10 + len(shape))) if shifted else None
    base = origin or (0,) * len(shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    for band in bands(shape, itemsize, budget, origin):
        assert band.numel == math.prod(band.sizes) > 0
        assert band.numel * itemsize <= max(budget, itemsize)
        where = tuple(
            slice(o - b, o - b + n) for o, b, n in zip(band.offsets, base, band.sizes, strict=True)
        )
        piece = numbers[where]
        assert piece.shape == band.sizes
        seen.extend(piece.reshape(-1).tolist())
    # In order and complete: each band is one interval, since its elements are consecutive numbers.
    assert seen == list(range(numbers.size))


def test_bands_are_as_large_as_their_shape_allows() -> None:
    assert [b.sizes for b in bands((10, 8), 4, 100)] == [(3, 8)] * 3 + [(1, 8)]
    assert [b.sizes for b in bands((2, 10), 4, 16)] == [(1, 4), (1, 4), (1, 2)] * 2
    assert [b.sizes for b in bands((3, 4, 5), 2, 10**6)] == [(3, 4, 5)]
    assert [b.sizes for b in bands((), 8, 1)] == [()]
    assert [b.sizes for b in bands((2,), 8, 0)] == [(1,), (1,)]
    assert list(bands((3, 0, 2), 4, 64)) == []


def test_the_budget_is_used_when_rows_allow() -> None:
    """No more bands than twice what the budget makes necessary, but for the ends of rows."""
    for shape in itertools.product((1, 5, 16), repeat=3):
        count = sum(1 for _ in bands(shape, 2, 64))
        rows = math.prod(shape[:2]) if shape[2] * 2 > 64 else 1
        assert count <= 2 * -(-math.prod(shape) * 2 // 64) + 2 * rows + shape[0]


# --- carrying steps out ---


@dataclass
class LocalShard:
    """A strided view on a storage, with the bytes around it filled.

    Attributes:
        raw: the bytes from the first element on; reads outside fail.
        view: the shard.
        strides: in elements; None if contiguous.
    """

    raw: bytes
    view: np.ndarray
    strides: tuple[int, ...] | None


def make_shard(
    shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None, rng: random.Random
) -> LocalShard:
    used = row_major_strides(shape) if strides is None else strides
    span = 1 + sum((n - 1) * s for n, s in zip(shape, used, strict=True)) if 0 not in shape else 0
    raw = np.frombuffer(rng.randbytes(span * itemsize), dtype=f"V{itemsize}")
    view = np.lib.stride_tricks.as_strided(raw, shape, [s * itemsize for s in used])
    return LocalShard(raw.tobytes(), view, strides)


def carry_out(step: Gather | Scatter, raw: bytes, target: bytearray) -> int:
    """Do what a step says. Returns the number of bytes that it wrote."""
    assert step.start >= 0
    if isinstance(step, Gather):
        at = step.start
        for run in step.runs:
            assert 0 <= run.start < run.stop <= len(target)
            assert run.step is None
            end = at + run.stop - run.start
            assert end <= len(raw)
            target[run] = raw[at:end]
            at = end
        return at - step.start
    assert step.unit in (1, 2, 4, 8)
    assert step.start + step.nbytes <= len(raw)
    sizes = [size for size, _, _ in step.dims]
    last = sum((size - 1) * source for size, source, _ in step.dims)
    assert (last + 1) * step.unit == step.nbytes
    last = step.target + sum((size - 1) * place for size, _, place in step.dims)
    assert 0 <= step.target <= last < len(target) // step.unit
    kind, as_strided = f"V{step.unit}", np.lib.stride_tricks.as_strided
    scratch = np.frombuffer(raw, kind, step.nbytes // step.unit, step.start)
    units = np.frombuffer(target, kind, len(target) // step.unit)[step.target :]
    places = as_strided(units, sizes, [place * step.unit for _, _, place in step.dims])
    places[...] = as_strided(scratch, sizes, [source * step.unit for _, source, _ in step.dims])
    return math.prod(sizes) * step.unit


def region(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def overlap(band: Band, box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
    """Where band and box meet: in the band, in the shard, and how many elements."""
    in_band, in_shard, count = [], [], 1
    for first, length, offset, size, origin in zip(
        band.offsets, band.sizes, box.offsets, box.sizes, box.origin, strict=True
    ):
        begin = max(first, offset)
        end = max(begin, min(first + length, offset + size))
        in_band.append(slice(begin - first, end - first))
        in_shard.append(slice(begin - offset + origin, end - offset + origin))
        count *= end - begin
    return tuple(in_band), tuple(in_shard), count


def check_fill(
    band: Band, box: Box, shard: LocalShard, itemsize: int, scratch: int
) -> list[Gather | Scatter]:
    """Carry out the steps of one band and compare the whole buffer with numpy."""
    nbytes = band.numel * itemsize
    target = bytearray([UNTOUCHED]) * nbytes
    steps = list(fill_steps(band, box, shard.strides, itemsize, scratch))
    written = 0
    for step in steps:
        if isinstance(step, Scatter):
            assert step.nbytes <= max(scratch, step.unit)
        written += carry_out(step, shard.raw, target)
    expected_bytes = bytes([UNTOUCHED]) * nbytes
    expected = np.frombuffer(bytearray(expected_bytes), f"V{itemsize}").reshape(band.sizes)
    in_band, in_shard, count = overlap(band, box)
    if count:
        expected[in_band] = shard.view[in_shard]
    assert bytes(target) == expected.tobytes()
    assert written == count * itemsize
    assert bool(steps) == bool(count)
    return steps


def random_case(
    rng: random.Random, largest: int = 6
) -> tuple[tuple[int, ...], Box, tuple[int, ...]]:
    """A global shape, a box in it, and the shape of the larger local shard that holds the box."""
    ndim = rng.randint(0, 4)
    shape, offsets, sizes, origin, local = [], [], [], [], []
    for _ in range(ndim):
        n = rng.randint(1, largest)
        size = rng.randint(1, n)
        before, after = rng.choice([(0, 0), (0, 0), (rng.randint(0, 2), rng.randint(0, 2))])
        shape.append(n)
        sizes.append(size)
        offsets.append(rng.randint(0, n - size))
        origin.append(before)
        local.append(before + size + after)
    box = Box(tuple(offsets), tuple(sizes), tuple(origin), tuple(local))
    return tuple(shape), box, tuple(local)


def random_strides(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...] | None:
    """Contiguous, permuted (transposed, channels-last), stepped, expanded, or anything at all."""
    kind = rng.choice(["contiguous", "permuted", "stepped", "expanded", "any"])
    if kind == "contiguous":
        return None
    if kind == "any":
        return tuple(rng.randint(0, 9) for _ in shape)
    order = list(range(len(shape)))
    if kind == "permuted" or rng.random() < 0.5:
        rng.shuffle(order)
    strides = [0] * len(shape)
    step = rng.randint(1, 3) if kind == "stepped" else 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] + (rng.randint(0, 1) if kind == "stepped" else 0)
    if kind == "expanded" and shape:
        for dim in rng.sample(order, rng.randint(1, len(shape))):
            strides[dim] = 0
    return tuple(strides)


def test_random_shards_fill_random_bands() -> None:
    rng = random.Random(1)
    kinds: Counter[str] = Counter()
    for _ in range(3000):
        shape, box, local = random_case(rng)
        itemsize = rng.choice([1, 2, 4, 8])
        shard = make_shard(local, itemsize, random_strides(local, rng), rng)
        budget = rng.choice([0, 8, 24, 60, 200, 10**6])
        scratch = rng.choice([0, itemsize, 3 * itemsize, 40, 10**6])
        for band in bands(shape, itemsize, budget):
            for step in check_fill(band, box, shard, itemsize, scratch):
                kinds[type(step).__name__] += 1
    assert min(kinds["Gather"], kinds["Scatter"]) > 1000


def test_bands_need_not_be_whole_rows_of_the_tensor() -> None:
    """Pieces of a chunk (as replicas are compared) start anywhere and end anywhere."""
    rng = random.Random(2)
    for _ in range(1500):
        _, box, local = random_case(rng)
        itemsize = rng.choice([1, 2, 4, 8])
        shard = make_shard(local, itemsize, random_strides(local, rng), rng)
        for band in bands(box.sizes, itemsize, rng.choice([8, 24, 60]), box.offsets):
            check_fill(band, box, shard, itemsize, rng.choice([0, 24, 10**6]))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("scratch", [300, 4096, 5000, 1 << 16])
def test_large_shards(itemsize: int, scratch: int) -> None:
    """Long runs and wide strides, where steps are chosen by size."""
    rng = random.Random(3)
    kinds: Counter[type] = Counter()
    for strides in (
        None,
        (1, 20),  # transposed
        (1, 3000),  # transposed out of a wider matrix
        (5000, 1),  # a slice of columns
        (0, 1),  # expanded rows
        (1, 0),  # expanded columns
        (7000, 2),  # every other column
        (2, 9000),
    ):
        local = (20, 1100)
        shard = make_shard(local, itemsize, strides, rng)
        box = Box((3, 100), (12, 900), (5, 150), local)
        for budget in (2048, 1 << 15, 1 << 20):
            for band in itertools.islice(bands((20, 1200), itemsize, budget), 12):
                kinds.update(map(type, check_fill(band, box, shard, itemsize, scratch)))
    assert kinds[Gather]
    assert kinds[Scatter]


def test_runs_are_few_or_long() -> None:
    """Each run costs a buffer object, so that short ones must not become runs."""
    rng = random.Random(5)
    for _ in range(300):
        shape = (rng.randint(1, 300), rng.randint(1, 40))
        width = rng.randint(1, shape[1])
        box = Box.whole_shard((0, rng.randint(0, shape[1] - width)), (shape[0], width))
        itemsize = rng.choice([1, 2, 4, 8])
        shard = make_shard(box.sizes, itemsize, None, rng)
        for band in bands(shape, itemsize, 1 << 20):
            for step in check_fill(band, box, shard, itemsize, 1 << 20):
                if isinstance(step, Gather):
                    count = sum(1 for _ in step.runs)
                    assert count == 1 or step.runs.nbytes >= 64
        assert run_nbytes(shape, box, itemsize) == (
            width * itemsize if width < shape[1] else math.prod(box.sizes) * itemsize
        )


def test_a_sparse_shard_is_not_read_whole() -> None:
    """Of a column in a wide matrix, read the elements, not the matrix."""
    box = Box.whole_shard((0, 0), (50, 1))
    band = Band((0, 0), (50, 1))
    read = sum(
        step.nbytes
        for step in fill_steps(band, box, (100_000, 1), 4, 1 << 30)
        if isinstance(step, Scatter)
    )
    assert read < 1 << 20


@given(st.integers(0, 2**32).map(random.Random))
@fixed
def test_shards_of_a_mesh_fill_a_tensor(rng: random.Random) -> None:
    """All shards of a mesh together give the tensor, strided shards and replicas included."""
    mesh_shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 2)))
    ndim = rng.randint(1, 3)
    placements = tuple(
        rng.choice([Replicate(), Shard(rng.randrange(ndim)), StridedShard(rng.randrange(ndim), 2)])
        for _ in mesh_shape
    )
    strided = any(isinstance(p, StridedShard) for p in placements)
    scale = math.prod(mesh_shape) * 4 if strided else 1  # uneven strided shards are refused
    shape = tuple(scale * rng.randint(1, 1 if strided else 7) for _ in range(ndim))
    if math.prod(shape) > 20_000:
        return
    sharding = Sharding(mesh_shape, placements)
    itemsize = rng.choice([1, 2, 4, 8])
    value = np.frombuffer(rng.randbytes(math.prod(shape) * itemsize), f"V{itemsize}").reshape(shape)
    shards = []
    for position in np.ndindex(mesh_shape):
        boxes = local_boxes(shape, sharding, position)
        if boxes:
            local = np.empty(boxes[0].local_shape, f"V{itemsize}")
            for box in boxes:
                local[region(box.origin, box.sizes)] = value[region(box.offsets, box.sizes)]
            shards.append((boxes, local.tobytes()))
    budget = rng.choice([16, 100, 1000, 10**6])
    result = b""
    for band in bands(shape, itemsize, budget):
        target = bytearray(band.numel * itemsize)
        for boxes, raw in shards:
            for box in boxes:
                for step in fill_steps(band, box, None, itemsize, 64):
                    carry_out(step, raw, target)
        result += target
    assert result == value.tobytes()


# --- copies ---


def test_random_copies() -> None:
    rng = random.Random(4)
    outcomes: Counter[bool] = Counter()
    for _ in range(3000):
        shape, box, local = random_case(rng)
        itemsize = rng.choice([1, 2, 4, 8])
        shard = make_shard(local, itemsize, None, rng)
        least = rng.choice([0, 1, itemsize, 10, 40])
        copies = copy_steps(shape, box, None, itemsize, least)
        outcomes[copies is None] += 1
        if copies is None:
            continue
        if len(copies) > 1:
            assert all(copy.nbytes >= least for copy in copies)
        nbytes = math.prod(shape) * itemsize
        target = bytearray([UNTOUCHED]) * nbytes
        for copy in copies:
            assert copy.start >= 0
            assert copy.start + copy.nbytes <= len(shard.raw)
            assert copy.target >= 0
            assert copy.target + copy.nbytes <= nbytes
            piece = shard.raw[copy.start : copy.start + copy.nbytes]
            target[copy.target : copy.target + copy.nbytes] = piece
        expected = np.frombuffer(bytearray([UNTOUCHED]) * nbytes, f"V{itemsize}").reshape(shape)
        expected[region(box.offsets, box.sizes)] = shard.view[region(box.origin, box.sizes)]
        assert bytes(target) == expected.tobytes()
        assert sum(copy.nbytes for copy in copies) == math.prod(box.sizes) * itemsize
    assert min(outcomes.values()) > 300


def test_rows_are_one_copy_however_short() -> None:
    box = Box.whole_shard((4, 0), (2, 3))
    assert copy_steps((8, 3), box, None, 2, 1 << 20) == [Copy(0, 24, 12)]
    scalar = Box((), (), (), ())
    assert copy_steps((), scalar, None, 4, 1 << 20) == [Copy(0, 0, 4)]


def test_columns_are_copies_if_long_enough() -> None:
    box = Box.whole_shard((0, 100), (3, 50))
    assert copy_steps((3, 200), box, None, 4, 200) == [
        Copy(0, 400, 200),
        Copy(200, 1200, 200),
        Copy(400, 2000, 200),
    ]
    assert copy_steps((3, 200), box, None, 4, 201) is None


def test_strided_shards_are_never_copied() -> None:
    assert copy_steps((4, 4), Box.whole_shard((0, 0), (4, 4)), (1, 4), 4, 0) is None


def test_an_empty_tensor_copies_nothing() -> None:
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4)):
        copies = copy_steps(shape, Box.whole_shard((0,) * len(shape), shape), None, 4, 10)
        assert sum(copy.nbytes for copy in copies or []) == 0
