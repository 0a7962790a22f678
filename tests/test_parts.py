"""Parts of tensors, as of one expert of many: read band by band, cast, and copied by ranges.

What must come out is cut by torch out of the whole tensors that the rank files were made of.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import rank_files
import strategies
import torch
from checkpoints import save_ranks, scratch, sharded
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed
from torch.distributed.tensor import Shard

from streammerge import writer
from streammerge.adapt import Output
from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.dtypes import FROM_TORCH, ITEMSIZE
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate, value_bands
from streammerge.formats import describe
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.values import Cast, Stored

KINDS = ("3-D mesh", "_StridedShard", "empty rank", "non-contiguous local", "sliced mesh")
KINDS += ("non-contiguous buffer", "tensor above the budget", "empty tensors", "conj bit", "FSDP2")
BUFFERS = (1, 50, 500, 4 << 10, 64 << 10)

generators = st.integers(0, 2**32).map(random.Random)


@contextmanager
def saved(
    checkpoint: rank_files.Checkpoint,
) -> Iterator[tuple[Checkpoint, Sources, dict[str, torch.Tensor]]]:
    """A checkpoint on the disk, and the whole tensors that it was made of."""
    with scratch() as folder:
        states = rank_files.write_checkpoint(checkpoint, folder)
        described = describe(folder)
        opened = Sources(described.files)
        try:
            yield described, opened, rank_files.expected_tensors(checkpoint, states)
        finally:
            opened.close()


def random_part(tensor: Tensor, rng: random.Random) -> Stored:
    """Any part of a tensor, also all of it or nothing."""
    shape = tensor.shape
    most = next((dim for dim, size in enumerate(shape) if size == 0), len(shape))
    fixed_dims = rng.choice((0, rng.randint(0, most)))
    index = tuple(rng.randrange(size) for size in shape[:fixed_dims])
    rest = shape[fixed_dims:]
    rows = None
    if rest and rng.random() < 0.6:
        first = rng.randint(0, rest[0])
        rows = (first, rng.randint(min(1, rest[0] - first), rest[0] - first))
    return Stored(tensor, index, rows, swapped=len(rest) > 1 and rng.random() < 0.5)


def cut(full: torch.Tensor, part: Stored) -> torch.Tensor:
    """The part of the whole tensor, by torch, in raw integers."""
    value = rank_files.raw(full)[part.index]
    if part.rows is not None:
        first, count = part.rows
        value = value[first : first + count]
    return value.transpose(-1, -2) if part.swapped else value


def read(value: Stored | Cast, sources: Sources, rng: random.Random) -> tuple[bytes, int]:
    """All of a value through a buffer of random size and place, and the number of bands."""
    small = math.prod(value.shape) < 1_000
    size = rng.choice(BUFFERS if small else BUFFERS[2:])
    nbytes = buffer_nbytes(value, band_numel(value, size))
    at = rng.randint(0, 9)
    memory = memoryview(bytearray(rng.randbytes(at + nbytes)))
    buffer = BandBuffer(nbytes, memory[at:])
    found = [bytes(evaluate(value, band, sources, buffer)) for band in value_bands(value, size)]
    return b"".join(found), len(found)


def check_bands(whole: Mapping[str, torch.Tensor], part: Stored, data: bytes) -> None:
    expected = cut(whole[part.tensor.name], part)
    assert part.shape == tuple(expected.shape)
    assert data == expected.numpy().tobytes(), (part, part.tensor.layout)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_that_torch_cuts(kind: str) -> None:
    seen = Counter[str]()

    @fixed(25)
    @given(checkpoint=strategies.CHECKPOINTS[kind], rng=generators)
    def reading_gives_what_torch_cuts(
        checkpoint: rank_files.Checkpoint, rng: random.Random
    ) -> None:
        with saved(checkpoint) as (described, sources, whole):
            for tensor in described.tensors:
                for _ in range(6):
                    part = random_part(tensor, rng)
                    data, count = read(part, sources, rng)
                    check_bands(whole, part, data)
                    if data:
                        seen["several bands"] += count > 1
                        seen["index"] += bool(part.index)
                        seen["rows"] += part.rows is not None
                        seen["swapped"] += part.swapped and min(part.shape[-2:]) > 1

    reading_gives_what_torch_cuts()
    assert min(seen[what] for what in ("several bands", "index", "rows", "swapped")) >= 20, seen


@fixed(60)
@given(checkpoint=strategies.float_checkpoints(), rng=generators)
def test_casts_of_parts_are_those_of_torch(
    checkpoint: rank_files.Checkpoint, rng: random.Random
) -> None:
    with saved(checkpoint) as (described, sources, whole):
        for tensor in described.tensors:
            full = whole[tensor.name]
            if not full.is_floating_point():
                continue
            part = random_part(tensor, rng)
            target = rng.choice((torch.float32, torch.float16, torch.bfloat16))
            data, _ = read(Cast(part, FROM_TORCH[str(target)[6:]]), sources, rng)
            expected = cut(full, part).contiguous().view(full.dtype).to(target).flatten()
            found = torch.frombuffer(bytearray(data or bytes(8)), dtype=target)[: len(expected)]
            # Which NaN comes out depends on torch's kernel; that it is one does not.
            nan = expected.isnan()
            assert torch.equal(found.isnan(), nan)
            assert torch.equal(
                rank_files.raw(found.masked_fill(nan, 0)),
                rank_files.raw(expected.masked_fill(nan, 0)),
            )


# --- ranges that the kernel copies ---


def copied(part: Stored, sources: Sources, files: Checkpoint) -> bytes | None:
    """What the copies of a part bring into a file that has it at some offset."""
    offset = 13
    output = Output("w", part.dtype, part.shape, part)
    ranges = writer._copy_ranges(output, offset)
    if ranges is None:
        return None
    nbytes = math.prod(part.shape) * ITEMSIZE[part.dtype]
    target = bytearray(offset + nbytes)
    filled = bytearray(offset + nbytes)
    for piece in ranges:
        where = slice(piece.offset, piece.offset + piece.nbytes)
        start = sources.member_offset(piece.file, piece.member) + piece.start
        with open(files.files[piece.file].path, "rb") as stream:
            stream.seek(start)
            target[where] = stream.read(piece.nbytes)
        assert piece.nbytes > 0
        assert not any(filled[where])
        filled[where] = b"\1" * piece.nbytes
    assert filled == bytes(offset) + b"\1" * nbytes
    return bytes(target[offset:])


@pytest.mark.parametrize("kind", ["3-D mesh", "_StridedShard", "empty rank", "FSDP2"])
def test_copies_cover_exactly_a_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_COPY", 1)
    monkeypatch.setattr(writer, "_CALL_SIZE", 100)
    seen = Counter[str]()

    @fixed(25)
    @given(checkpoint=strategies.CHECKPOINTS[kind], rng=generators)
    def copies_bring_what_torch_cuts(checkpoint: rank_files.Checkpoint, rng: random.Random) -> None:
        with saved(checkpoint) as (described, sources, whole):
            for tensor in described.tensors:
                for _ in range(4):
                    part = random_part(tensor, rng)
                    data = copied(part, sources, described)
                    if data is not None:
                        check_bands(whole, part, data)
                        seen["index"] += bool(part.index and data)
                        seen["rows"] += bool(part.rows and data)

    copies_bring_what_torch_cuts()
    assert min(seen.values()) >= 20, seen


@pytest.mark.parametrize("dim", [0, 1])
def test_experts_are_copied_where_their_rows_are_long(tmp_path: Path, dim: int) -> None:
    """Of gate and up, [E, 2I, H], the halves of one expert: a copy per local shard of it."""
    experts, rows, columns = 5, 2 * 384, 256
    full = rank_files.random_bits(torch.float32, (experts, rows, columns), 3)
    save_ranks(tmp_path, lambda rank: {"w": sharded(full, (Shard(dim),))})
    described = describe(tmp_path)
    sources = Sources(described.files)
    (tensor,) = described.tensors
    for expert in range(experts):
        for half in range(2):
            part = Stored(tensor, (expert,), (half * rows // 2, rows // 2))
            ranges = writer._copy_ranges(Output("w", "F32", part.shape, part), 0)
            assert ranges is not None
            # By rows, two of four ranks have each a half of the half.
            assert len(ranges) == (1 if dim == 0 else 2)
            assert copied(part, sources, described) == cut(full, part).numpy().tobytes()
    swapped = Stored(tensor, (0,), swapped=True)
    assert copied(swapped, sources, described) is None
    sources.close()
