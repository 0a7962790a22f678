"""Whether two stored values are found equal exactly if torch finds all their bits equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import rank_files
import strategies
import torch
from checkpoints import poke, reshaped, save_plain, save_ranks, sharded
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from streammerge import probe
from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.dtypes import ITEMSIZE
from streammerge.formats import describe
from streammerge.placement import row_major_strides
from streammerge.probe import same_bits
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.values import Cast, Fold, Stored

KINDS = ("3-D mesh", "_StridedShard", "empty rank", "non-contiguous local", "sliced mesh")
KINDS += ("non-contiguous buffer", "tensor above the budget", "empty tensors", "conj bit", "FSDP2")
BUFFERS = (2, 50, 500, 4 << 10, 64 << 10)
COPY = " (copy)"

generators = st.integers(0, 2**32).map(random.Random)


def with_copies(checkpoint: rank_files.Checkpoint) -> rank_files.Checkpoint:
    """Every tensor a second time under another name, as a plain one."""
    copies = [
        replace(
            entry,
            key=entry.key + COPY,
            mesh=None,
            placements=(),
            shard_order=None,
            fully_shard=None,
            layout="dense",
            parameter=False,
            tied=False,
            holders=None,
        )
        for entry in checkpoint.entries
        if entry.fused is None
    ]
    return replace(checkpoint, entries=checkpoint.entries + tuple(copies))


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Checkpoint, Sources]]:
    described = describe(folder)
    sources = Sources(described.files)
    try:
        yield described, sources
    finally:
        sources.close()


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in checkpoint.tensors}


def random_part(tensor: Tensor, rng: random.Random) -> Stored:
    """Any part of a tensor, also all of it or nothing."""
    shape = tensor.shape
    most = next((dim for dim, size in enumerate(shape) if size == 0), len(shape))
    index = tuple(rng.randrange(size) for size in shape[: rng.choice((0, rng.randint(0, most)))])
    rest = shape[len(index) :]
    rows = None
    if rest and rng.random() < 0.5:
        first = rng.randint(0, rest[0])
        rows = (first, rng.randint(min(1, rest[0] - first), rest[0] - first))
    return Stored(tensor, index, rows, swapped=len(rest) > 1 and rng.random() < 0.5)


def cut(bits: torch.Tensor, part: Stored) -> torch.Tensor:
    """The part of a whole tensor, by torch, in raw integers."""
    value = bits[part.index]
    if part.rows is not None:
        first, count = part.rows
        value = value[first : first + count]
    return value.transpose(-1, -2) if part.swapped else value


def flip_bit(
    checkpoint: Checkpoint, tensor: Tensor, whole: torch.Tensor, rng: random.Random
) -> None:
    """Flip a bit of a plain, dense tensor, on the disk and in the whole."""
    at = tuple(rng.randrange(size) for size in tensor.shape)
    byte, bit = rng.randrange(ITEMSIZE[tensor.dtype]), 1 << rng.randrange(8)
    element = sum(i * n for i, n in zip(at, row_major_strides(tensor.shape), strict=True))
    # A plain tensor is read from the first rank that has it.
    file = checkpoint.files[tensor.extents.files[0]]
    offset = file.members.data_offsets[tensor.extents.members[0]] + tensor.extents.starts[0]
    offset += element * ITEMSIZE[tensor.dtype] + byte
    with open(file.path, "rb") as stream:
        stream.seek(offset)
        old = stream.read(1)[0]
    poke(Path(file.path), offset, bytes([old ^ bit]))
    flipped = whole[at].clone().view(1).view(torch.uint8)
    flipped[byte] ^= bit
    whole[at] = flipped.view(whole.dtype)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answer_is_that_of_torch(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = Counter[str]()

    @settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(checkpoint=strategies.CHECKPOINTS[kind].map(with_copies), rng=generators)
    def compare(checkpoint: rank_files.Checkpoint, rng: random.Random) -> None:
        folder = tmp_path_factory.mktemp("source")
        states = rank_files.write_checkpoint(checkpoint, folder)
        whole = {
            name: rank_files.raw(tensor).clone()
            for name, tensor in rank_files.expected_tensors(checkpoint, states).items()
        }
        with opened(folder) as (described, sources):
            found = tensors(described)
            for name, other in found.items():
                if not name.endswith(COPY):
                    continue
                tensor = found[name.removesuffix(COPY)]
                assert same_bits(Stored(tensor), Stored(other), sources, rng.choice(BUFFERS))
                for _ in range(4):
                    part = random_part(tensor, rng)
                    if 0 not in tensor.shape and rng.random() < 0.7:
                        flip_bit(described, other, whole[name], rng)
                    expected = torch.equal(cut(whole[tensor.name], part), cut(whole[name], part))
                    same = replace(part, tensor=other)
                    size = rng.choice(BUFFERS)
                    assert same_bits(part, same, sources, size) == expected
                    assert same_bits(same, part, sources, size) == expected
                    seen["equal" if expected else "different"] += bool(tensor.numel)

    compare()
    assert min(seen["equal"], seen["different"]) >= 10, seen


# --- what no bytes are needed for -----------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of every read of a source file."""
    sizes: list[int] = []
    original = Sources.read

    def counted(self: Sources, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        sizes.append(sum(map(len, buffers)))
        original(self, index, offset, buffers)

    monkeypatch.setattr(Sources, "read", counted)
    return sizes


def test_one_storage_is_equal_unread(tmp_path: Path, read: list[int]) -> None:
    whole = torch.randn(6, 5)

    def build(rank: int) -> dict[str, object]:
        tensor = sharded(whole)
        return {"embed": tensor, "head": tensor}

    save_ranks(tmp_path, build)
    with opened(tmp_path) as (described, sources):
        embed, head = (Stored(tensor) for tensor in described.tensors)
        assert same_bits(embed, head, sources, 4096)
        part = replace(embed, rows=(1, 3), swapped=True)
        assert same_bits(part, replace(head, rows=(1, 3), swapped=True), sources, 4096)
        assert read == []
        # Other parts of it are other values.
        assert not same_bits(part, replace(head, rows=(2, 3), swapped=True), sources, 4096)
        assert sum(read) > 0


def test_one_storage_seen_in_two_ways_is_read(tmp_path: Path) -> None:
    whole = torch.randn(4, 4)
    numbers = torch.tensor([1 + 2j])
    state = {
        "w": whole,
        "same": whole.view(4, 4),
        "transposed": whole.T,
        "first": whole[:2],
        "second": whole[2:],
        "numbers": numbers,
        "conjugates": numbers.conj(),
    }
    save_plain(tmp_path, [state])
    with opened(tmp_path) as (described, sources):
        values = {name: Stored(tensor) for name, tensor in tensors(described).items()}
        assert same_bits(values["w"], values["same"], sources, 64)
        assert not same_bits(values["w"], values["transposed"], sources, 64)
        assert same_bits(values["w"], replace(values["transposed"], swapped=True), sources, 64)
        assert not same_bits(values["first"], values["second"], sources, 64)
        assert same_bits(values["first"], replace(values["w"], rows=(0, 2)), sources, 64)
        assert not same_bits(values["numbers"], values["conjugates"], sources, 64)


def test_one_storage_under_two_placements_is_read(tmp_path: Path) -> None:
    """The local shards are the same bytes, but rows to one and columns to the other."""

    def build(rank: int) -> dict[str, object]:
        local = torch.arange(8.0) + 8 * rank
        rows = sharded(torch.zeros(4, 4), (Shard(0),), (2,))
        columns = sharded(torch.zeros(4, 4), (Shard(1),), (2,))
        return {
            "rows": reshaped(rows, local.view(2, 4)),
            "columns": reshaped(columns, local.view(4, 2)),
        }

    save_ranks(tmp_path, build, world_size=2)
    with opened(tmp_path) as (described, sources):
        rows, columns = (Stored(tensor) for tensor in described.tensors)
        assert not same_bits(rows, columns, sources, 4096)


def test_other_dtypes_and_shapes_differ_unread(tmp_path: Path, read: list[int]) -> None:
    zeros = torch.zeros(2, 3)
    state = {
        "w": zeros,
        "dtype": zeros.to(torch.int32),
        "shape": zeros.view(3, 2),
        "flat": zeros.view(6),
        "larger": torch.zeros(2, 4),
    }
    save_plain(tmp_path, [state])
    with opened(tmp_path) as (described, sources):
        first, *others = (Stored(tensor) for tensor in described.tensors)
        for other in others:
            assert not same_bits(first, other, sources, 4096)
    assert read == []


def test_nothing_equals_nothing(tmp_path: Path) -> None:
    save_plain(
        tmp_path,
        [
            {
                "a": torch.empty(0, 5),
                "b": torch.empty(0, 5),
                "c": torch.tensor(1.5),
                "d": torch.tensor(1.5),
            }
        ],
    )
    with opened(tmp_path) as (described, sources):
        a, b, c, d = (Stored(tensor) for tensor in described.tensors)
        assert same_bits(a, b, sources, 4096)
        assert same_bits(c, d, sources, 4096)


def test_computed_values_equal_none(tmp_path: Path, read: list[int]) -> None:
    save_plain(tmp_path, [{name: torch.ones(3, 3) for name in ("w", "a", "b")}])
    with opened(tmp_path) as (described, sources):
        w, a, b = described.tensors
        fold = Fold(Stored(w), a, b, 1.0, "linear", "F32")
        for value in (Cast(Stored(w), "BF16"), fold):
            assert not same_bits(value, value, sources, 4096)
            assert not same_bits(value, Stored(w), sources, 4096)
            assert not same_bits(Stored(w), value, sources, 4096)
    assert read == []


# --- numbers and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "other", "equal"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (float("inf"), float("inf"), True),
    ],
)
def test_bits_count_not_numbers(tmp_path: Path, first: float, other: float, equal: bool) -> None:
    save_plain(tmp_path, [{"a": torch.tensor([first]), "b": torch.tensor([other])}])
    with opened(tmp_path) as (described, sources):
        a, b = (Stored(tensor) for tensor in described.tensors)
        assert same_bits(a, b, sources, 4096) == equal


@pytest.mark.parametrize("size", [4096, 5000, 64 << 10, 1 << 20])
def test_both_buffers_fit_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    allocated: list[int] = []

    class Counted(BandBuffer):
        def __init__(self, nbytes: int) -> None:
            allocated.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr(probe, "BandBuffer", Counted)
    whole = torch.randn(60, 100, dtype=torch.float64)

    def build(rank: int) -> dict[str, object]:
        return {"rows": sharded(whole), "columns": sharded(whole, (Shard(1),)), "turned": whole.T}

    save_ranks(tmp_path, build)
    with opened(tmp_path) as (described, sources):
        rows, columns, turned = (Stored(tensor) for tensor in described.tensors)
        assert same_bits(rows, columns, sources, size)
        assert same_bits(replace(rows, swapped=True), turned, sources, size)
        assert same_bits(replace(turned, swapped=True), columns, sources, size)
    assert len(allocated) == 6
    assert all(sum(allocated[i : i + 2]) <= size for i in range(0, 6, 2))


def test_reading_ends_with_the_first_difference(tmp_path: Path, read: list[int]) -> None:
    a = torch.zeros(1000, 100)
    b = a.clone()
    b[0, 0] = 1
    save_plain(tmp_path, [{"a": a, "b": b}])
    with opened(tmp_path) as (described, sources):
        first, other = (Stored(tensor) for tensor in described.tensors)
        assert not same_bits(first, other, sources, 4096)
        assert 0 < sum(read) <= 4096
