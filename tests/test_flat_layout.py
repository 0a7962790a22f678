"""Tensors whose chunks are ranges of the flattened tensor: geometry, and reading parts of them."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import strategies
import torch
from checkpoints import scratch
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

from streammerge import PlacementError
from streammerge.adapt import Output
from streammerge.bands import Band
from streammerge.checkpoint import Extents, File, FlatLayout, Members, Tensor
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate, value_bands
from streammerge.placement import check_flat_tiling, flat_boxes, row_major_strides, unravel
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Cast, Stored
from streammerge.writer import _copy_ranges

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def positions(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Row-major positions of the elements of a box, by torch."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    part = index[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    return part.reshape(-1).tolist()


@st.composite
def ranges(draw: strategies.Draw) -> tuple[tuple[int, ...], int, int]:
    """A shape and a range of its elements."""
    shape = draw(SHAPES)
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(0, math.prod(shape) - begin))


@given(ranges())
@fixed(500)
def test_boxes_of_a_range_are_its_elements_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, begin, count = case
    boxes = list(flat_boxes(shape, begin, count))

    found = [positions(unravel(at, shape), sizes, shape) for at, sizes in boxes]

    assert [*itertools.chain.from_iterable(found)] == list(range(begin, begin + count))
    assert [part[0] for part in found] == [at for at, _ in boxes]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("begin", "count", "boxes"),
    [
        (0, 24, [(0, (2, 3, 4))]),
        (0, 12, [(0, (1, 3, 4))]),
        (4, 4, [(4, (1, 1, 4))]),
        (3, 8, [(3, (1, 1, 1)), (4, (1, 1, 4)), (8, (1, 1, 3))]),
        (2, 20, [(2, (1, 1, 2)), (4, (1, 2, 4)), (12, (1, 2, 4)), (20, (1, 1, 2))]),
        (23, 1, [(23, (1, 1, 1))]),
        (5, 0, []),
    ],
)
def test_boxes(begin: int, count: int, boxes: list[tuple[int, tuple[int, ...]]]) -> None:
    assert list(flat_boxes((2, 3, 4), begin, count)) == boxes


def test_boxes_of_huge_tensors_take_no_time() -> None:
    shape = (1 << 20, 1 << 20, 1 << 20)
    count = math.prod(shape) - 2

    boxes = list(flat_boxes(shape, 1, count))

    assert len(boxes) == 5
    assert sum(math.prod(sizes) for _, sizes in boxes) == count


@pytest.mark.parametrize(
    ("begins", "counts", "message"),
    [
        ([0, 5], [4, 5], "begins at element 5, expected 4"),
        ([0, 3], [4, 6], "begins at element 3, expected 4"),
        ([1], [9], "begins at element 1, expected 0"),
        ([0], [9], "cover 9 of 10 elements"),
        ([0, 4], [4, 7], "cover 11 of 10 elements"),
        ([0, 12], [12, -2], "begins at element 12, expected 12"),
        ([], [], "cover 0 of 10 elements"),
    ],
)
def test_what_does_not_tile(begins: list[int], counts: list[int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_flat_tiling(10, begins, counts)


def test_what_tiles() -> None:
    check_flat_tiling(10, [0, 4, 4], [4, 0, 6])
    check_flat_tiling(0, [], [])


def stored_tensor(
    folder: Path, full: torch.Tensor, cuts: Sequence[int], padding: int = 3
) -> tuple[Tensor, Sources]:
    """A tensor cut at some of its elements, each part in a file of its own, behind padding."""
    bounds = [0, *sorted(cuts), full.numel()]
    begins, counts, files = array("q"), array("q"), []
    extents = Extents()
    flat = full.reshape(-1)
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        junk = torch.full((padding,), 77, dtype=full.dtype)
        data = torch.cat([junk, flat[begin:end], junk]).numpy().tobytes()
        path = folder / f"part{number}"
        path.write_bytes(data)
        status = path.stat()
        members = Members()
        members.add(-1, 0, len(data), 0)
        files.append(File(str(path), status.st_size, status.st_mtime_ns, status.st_ino, members))
        begins.append(begin)
        counts.append(end - begin)
        extents.add(number, 0, padding * full.dtype.itemsize, None, False)
    layout = FlatLayout(begins, counts, tuple(range(len(files))))
    dtype = {torch.float32: "F32", torch.int16: "I16"}[full.dtype]
    return Tensor("t", dtype, tuple(full.shape), layout, extents), Sources(files)


@st.composite
def parts(draw: strategies.Draw) -> tuple[torch.Tensor, list[int], tuple, torch.Tensor]:
    """A tensor, where it is cut, a part of it (as `Stored` has it), and torch's value of that."""
    shape = draw(SHAPES.filter(bool))
    numel = math.prod(shape)
    cuts = draw(st.lists(st.integers(0, numel), max_size=5))
    fixed_dims = draw(st.integers(0, len(shape) - 1))
    index = tuple(draw(st.integers(0, size - 1)) for size in shape[:fixed_dims])
    rows = None
    if draw(st.booleans()):
        first = draw(st.integers(0, shape[fixed_dims] - 1))
        rows = (first, draw(st.integers(1, shape[fixed_dims] - first)))
    swapped = len(shape) - fixed_dims >= 2 and draw(st.booleans())
    full = torch.arange(numel, dtype=draw(st.sampled_from((torch.float32, torch.int16))))
    full = full.reshape(shape)
    part = full[index]
    if rows is not None:
        part = part[rows[0] : sum(rows)]
    if swapped:
        part = part.transpose(-1, -2)
    return full, cuts, (index, rows, swapped), part.contiguous()


@given(parts(), st.sampled_from((64, 256, 4096)))
@fixed(400)
def test_reads_what_torch_indexes(case: tuple, budget: int) -> None:
    full, cuts, (index, rows, swapped), expected = case
    with scratch() as folder:
        tensor, sources = stored_tensor(folder, full, cuts)
        value = Stored(tensor, index, rows, swapped)
        found = b""
        for band in value_bands(value, budget):
            assert band.numel <= band_numel(value, budget)
            buffer = BandBuffer(buffer_nbytes(value, band.numel))
            found += bytes(evaluate(value, band, sources, buffer))
        sources.close()

    assert found == expected.numpy().tobytes()


@given(parts(), st.data())
@fixed(300)
def test_reads_any_box(case: tuple, data: st.DataObject) -> None:
    """Adapters are read column by column."""
    full, cuts, (index, rows, swapped), expected = case
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    sizes = tuple(
        data.draw(st.integers(1, size - o)) for size, o in zip(expected.shape, offsets, strict=True)
    )
    box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    with scratch() as folder:
        tensor, sources = stored_tensor(folder, full, cuts)
        value = Stored(tensor, index, rows, swapped)
        buffer = BandBuffer(buffer_nbytes(value, math.prod(sizes)))
        found = bytes(read_stored(value, Band(offsets, sizes), sources, buffer))
        sources.close()

    assert found == expected[box].contiguous().numpy().tobytes()


@given(parts())
@fixed(300)
def test_copies_what_torch_indexes(case: tuple) -> None:
    full, cuts, (index, rows, swapped), expected = case
    with scratch() as folder:
        tensor, sources = stored_tensor(folder, full, cuts)
        value = Stored(tensor, index, rows, swapped)
        ranges = _copy_ranges(Output("t", value.dtype, value.shape, value), 5)
        found = bytearray(5 + expected.nbytes)
        for part in ranges or ():
            target = memoryview(found)[part.offset : part.offset + part.nbytes]
            sources.read(part.file, part.start, [target])
        sources.close()

    if ranges is None:
        assert swapped
    else:
        assert found[5:] == expected.numpy().tobytes()
        assert len(ranges) <= len(cuts) + 1


@given(st.data())
@fixed(200)
def test_leaves_out_what_is_not_asked_for(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    numel = math.prod(shape)
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, numel), max_size=6))), numel]
    begins = array("q", bounds[:-1])
    counts = array("q", [b - a for a, b in itertools.pairwise(bounds)])
    layout = FlatLayout(begins, counts, tuple(range(len(begins))))
    first = data.draw(st.integers(0, numel - 1))
    last = data.draw(st.integers(first, numel - 1))
    strides = row_major_strides(shape)

    whole = layout.chunks(shape)
    some = layout.chunks(shape, first, last)

    assert set(some) <= set(whole)
    for chunk in set(whole) - set(some):
        begin = sum(o * s for o, s in zip(chunk.box.offsets, strides, strict=True))
        assert begin > last or begin + math.prod(chunk.box.sizes) <= first
    touched = {slot for slot, a in enumerate(begins) if counts[slot] and a <= last}
    touched &= {slot for slot, a in enumerate(begins) if a + counts[slot] > first}
    assert {slot for chunk in some for slot in chunk.replicas} == touched


def test_a_cast_of_a_flat_tensor(tmp_path: Path) -> None:
    full = torch.randn(7, 5)
    tensor, sources = stored_tensor(tmp_path, full, (3, 11, 12, 30))
    value = Cast(Stored(tensor), "BF16")
    found = b""
    for band in value_bands(value, 100):
        found += bytes(evaluate(value, band, sources, BandBuffer(200)))
    sources.close()

    assert found == full.bfloat16().view(torch.int16).numpy().tobytes()
