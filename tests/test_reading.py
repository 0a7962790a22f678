"""Reading and copying bytes when the system gives less than was asked for, or refuses.

Source files and checkpoints are put together by hand; what must come out is cut from numpy arrays
or converted by torch.
"""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import streammerge
from streammerge import (
    CorruptFileError,
    NoSpaceError,
    ResultError,
    SourceChangedError,
    SourceError,
    TargetError,
    sources,
)
from streammerge.bands import bands
from streammerge.checkpoint import (
    Boxes,
    BoxLayout,
    Checkpoint,
    Extents,
    File,
    Layout,
    Members,
    MeshLayout,
    PlainLayout,
    Tensor,
)
from streammerge.dtypes import FLOATING, ITEMSIZE, TO_TORCH
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate
from streammerge.placement import Box, Replicate, Shard, Sharding, StridedShard, local_boxes
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.target import staging_path
from streammerge.torchfile import read_torch_file
from streammerge.values import Cast, Stored

KIB = 1 << 10


# --- makers ---


class Maker:
    """Writes source files and describes them as a checkpoint."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.files: list[File] = []
        self.tensors: list[Tensor] = []
        self.expected: dict[str, np.ndarray] = {}

    def file(self, blob: bytes) -> int:
        """A file that holds one blob somewhere in its middle; its index."""
        before = self.rng.randbytes(self.rng.randint(0, 300))
        path = self.directory / f"source_{len(self.files)}"
        path.write_bytes(before + blob + self.rng.randbytes(self.rng.randint(0, 50)))
        members = Members()
        members.add(-1, len(before), len(blob), 0)
        status = path.stat()
        self.files.append(
            File(str(path), status.st_size, status.st_mtime_ns, status.st_ino, members)
        )
        return len(self.files) - 1

    def value(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Random elements."""
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        return np.frombuffer(self.rng.randbytes(nbytes), f"V{ITEMSIZE[dtype]}").reshape(shape)

    def plain(self, name: str, dtype: str, shape: tuple[int, ...], copies: int = 1) -> Tensor:
        """A tensor that one or more files hold whole."""
        value = self.value(dtype, shape)
        extents = Extents()
        for _ in range(copies):
            extents.add(self.file(value.tobytes()), 0, 0, None, False)
        return self._add(name, dtype, value, PlainLayout(tuple(range(copies))), extents)

    def strided(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        conj: bool = False,
    ) -> Tensor:
        """A tensor that is a strided view on a blob."""
        itemsize = ITEMSIZE[dtype]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        start = self.rng.randint(0, 5)
        stored = self.value(dtype, (start + span,))
        view = np.lib.stride_tricks.as_strided(
            stored[start:], shape, [s * itemsize for s in strides]
        )
        extents = Extents()
        extents.add(self.file(stored.tobytes()), 0, start * itemsize, strides, conj)
        return self._add(name, dtype, view, PlainLayout((0,)), extents)

    def mesh(self, name: str, dtype: str, shape: tuple[int, ...], sharding: Sharding) -> Tensor:
        """A tensor whose local shards lie in one file per rank."""
        value = self.value(dtype, shape)
        extents = Extents()
        for position in np.ndindex(sharding.mesh_shape):
            boxes = local_boxes(shape, sharding, position)
            local = np.empty(boxes[0].local_shape if boxes else (0,), value.dtype)
            for box in boxes:
                local[region(box.origin, box.sizes)] = value[region(box.offsets, box.sizes)]
            extents.add(self.file(local.tobytes()), 0, 0, None, False)
        ranks = tuple(range(math.prod(sharding.mesh_shape)))
        return self._add(name, dtype, value, MeshLayout(sharding, None, (ranks,)), extents)

    def boxes(self, name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[Box]) -> Tensor:
        """A tensor of free boxes."""
        value = self.value(dtype, shape)
        extents = Extents()
        for box in parts:
            piece = value[region(box.offsets, box.sizes)]
            extents.add(self.file(piece.tobytes()), 0, 0, None, False)
        layout = BoxLayout(Boxes.of(parts, len(shape)), array("i", range(len(parts))))
        return self._add(name, dtype, value, layout, extents)

    def checkpoint(self) -> Checkpoint:
        root = str(self.directory)
        return Checkpoint(
            root, "by hand", 1, tuple(self.files), tuple(self.tensors), (), (root,), None
        )

    def _add(
        self, name: str, dtype: str, value: np.ndarray, layout: Layout, extents: Extents
    ) -> Tensor:
        tensor = Tensor(name, dtype, value.shape, layout, extents)
        self.tensors.append(tensor)
        self.expected[name] = value
        return tensor


def region(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    directory = tmp_path / "sources"
    directory.mkdir()
    return Maker(directory)


def read_all(value: Stored | Cast, files: Sequence[File], buffer_size: int = 1 << 20) -> bytes:
    """The whole of a value, band by band, through one buffer."""
    tensor = value.value.tensor if isinstance(value, Cast) else value.tensor
    opened = Sources(files)
    numel = band_numel(value, buffer_size)
    buffer = BandBuffer(buffer_nbytes(value, numel))
    result = b""
    try:
        # In numbers of elements, so that the itemsize does not matter here.
        for band in bands(tensor.shape, 1, numel):
            result += evaluate(value, band, opened, buffer)
    finally:
        opened.close()
    return result


def various(maker: Maker) -> None:
    """Tensors that are read in every way."""
    maker.plain("plain", "F32", (40, 30))
    maker.plain("scalar", "F64", ())
    maker.plain("empty", "F32", (3, 0))
    maker.strided("transposed", "F32", (30, 20), (1, 30))
    maker.strided("expanded", "BF16", (5, 4, 6), (0, 6, 1))
    maker.strided("spread", "I64", (20, 30), (3000, 1))
    maker.strided("channels last", "F16", (3, 4, 5, 6), (120, 1, 24, 4))
    maker.mesh("rows", "BF16", (10, 700), Sharding((4,), (Shard(0),)))
    maker.mesh("columns", "F32", (60, 50), Sharding((4,), (Shard(1),)))
    maker.mesh("thin columns", "U8", (300, 8), Sharding((8,), (Shard(1),)))
    maker.mesh("both", "I16", (13, 9), Sharding((2, 3), (Shard(1), Shard(0))))
    maker.mesh("strided shard", "F32", (16, 5), Sharding((2, 2), (StridedShard(0, 4), Shard(0))))
    maker.mesh("replicas", "F32", (6, 6), Sharding((2, 2), (Replicate(), Shard(0))))
    maker.mesh("empty ranks", "F32", (2, 3), Sharding((4,), (Shard(0),)))
    maker.boxes(
        "boxes",
        "F32",
        (6, 8),
        [
            Box.whole_shard((0, 0), (6, 3)),
            Box.whole_shard((0, 3), (2, 5)),
            Box.whole_shard((2, 3), (4, 5)),
        ],
    )


# --- reading ---


@pytest.mark.parametrize("buffer_size", [1, 100, 5000, 1 << 20])
def test_every_kind_of_tensor(maker: Maker, buffer_size: int) -> None:
    various(maker)
    for tensor in maker.tensors:
        data = read_all(Stored(tensor), maker.files, buffer_size)
        assert data == maker.expected[tensor.name].tobytes(), tensor.name


@contextmanager
def short_reads(monkeypatch: pytest.MonkeyPatch, most: Callable[[], int]) -> Iterator[Counter[str]]:
    """``preadv`` that returns at most so many bytes, as it may."""
    real = os.preadv
    seen: Counter[str] = Counter()

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert 0 < len(buffers) <= os.sysconf("SC_IOV_MAX")
        seen["calls"] += 1
        left = most()
        some = []
        for buffer in buffers:
            if len(buffer) >= left:
                some.append(buffer[:left])
                seen["short"] += 1
                break
            some.append(buffer)
            left -= len(buffer)
        return real(fd, some, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield seen


@pytest.mark.parametrize("most", ["one byte", "random", "a run"])
def test_short_reads(maker: Maker, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    various(maker)
    rng = random.Random(1)
    limit = {"one byte": lambda: 1, "random": lambda: rng.randint(1, 100), "a run": lambda: 52}
    with short_reads(monkeypatch, limit[most]) as seen:
        for tensor in maker.tensors:
            data = read_all(Stored(tensor), maker.files, 4000)
            assert data == maker.expected[tensor.name].tobytes(), tensor.name
    assert seen["short"] > 100


def test_more_buffers_than_one_call_takes(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = maker.rng.randbytes(5000)
    maker.file(blob)
    opened = Sources(maker.files)
    start = maker.files[0].members.data_offsets[0]
    for limit in (1 << 20, 1500):
        with short_reads(monkeypatch, lambda limit=limit: limit) as seen:
            for sizes in ([1] * 5000, [2] * 2500, [3] * 1600):
                memory = bytearray(sum(sizes))
                views, at = [], 0
                for size in sizes:
                    views.append(memoryview(memory)[at : at + size])
                    at += size
                opened.read(0, start, views)
                assert memory == blob[: len(memory)]
        assert seen["calls"] >= 10
    opened.close()


def test_random_strided_views(maker: Maker) -> None:
    rng = random.Random(3)
    for i in range(150):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        strides = tuple(rng.choice([0, 1, rng.randint(0, 40)]) for _ in shape)
        dtype = rng.choice(["U8", "BF16", "F32", "F64"])
        maker.strided(f"w{i}", dtype, shape, strides)
    for tensor in maker.tensors:
        data = read_all(Stored(tensor), maker.files, rng.choice([1, 64, 500, 1 << 16]))
        assert data == maker.expected[tensor.name].tobytes()


@pytest.mark.parametrize("strides", [None, (1, 7), (0, 1), (9, 1)], ids=str)
@pytest.mark.parametrize("buffer_size", [1, 200, 1 << 16])
def test_conjugated_views(maker: Maker, strides: tuple[int, int] | None, buffer_size: int) -> None:
    shape = (7, 5)
    tensor = maker.strided("w", "C64", shape, strides or (5, 1), conj=True)
    if strides is None:
        tensor.extents.strides.clear()
    stored = torch.frombuffer(bytearray(maker.expected["w"].tobytes()), dtype=torch.complex64)
    # Zeros, infinities and NaN bits among the values.
    expected = stored.conj().resolve_conj().numpy().tobytes()
    assert read_all(Stored(tensor), maker.files, buffer_size) == expected


@pytest.mark.parametrize("dtype", sorted(FLOATING))
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_casts_are_those_of_torch(maker: Maker, dtype: str, target: str) -> None:
    """Odd numbers of elements too: the result then starts at an odd address."""
    source, result = (getattr(torch, TO_TORCH[name]) for name in (dtype, target))
    rng = np.random.default_rng(4)
    for shape, strides in (((257,), None), ((3, 5, 7), None), ((9, 11), (1, 9)), ((3, 5), (0, 2))):
        name = f"{shape}{strides}"
        if strides is None:
            tensor = maker.plain(name, dtype, shape)
        else:
            tensor = maker.strided(name, dtype, shape, strides)
        # Random bits are mostly huge or tiny: put ordinary numbers in half of the file.
        path = Path(maker.files[-1].path)
        content = bytearray(path.read_bytes())
        start = maker.files[-1].members.data_offsets[0]
        size = maker.files[-1].members.sizes[0] // 2 // ITEMSIZE[dtype]
        ordinary = torch.from_numpy(rng.standard_normal(size).astype("float32")).to(source)
        raw = ordinary.view(torch.uint8).numpy().tobytes()
        content[start : start + len(raw)] = raw
        with path.open("r+b") as stream:
            stream.write(content)
        status = path.stat()
        old = maker.files[-1]
        maker.files[-1] = File(old.path, old.size, status.st_mtime_ns, status.st_ino, old.members)
        stored = torch.frombuffer(bytearray(read_all(Stored(tensor), maker.files)), dtype=source)
        expected = stored.to(result)
        for buffer_size in (1, 100, 1 << 16):
            data = read_all(Cast(Stored(tensor), target), maker.files, buffer_size)
            found = torch.frombuffer(bytearray(data), dtype=result)
            # Which NaN a NaN becomes depends in torch on its place in the vector.
            nan = expected.isnan()
            assert torch.equal(found.isnan(), nan)
            bits = torch.int32 if target == "F32" else torch.int16
            assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def test_the_first_replica_is_read(maker: Maker) -> None:
    tensor = maker.plain("w", "F32", (50,), copies=3)
    for file in maker.files[1:]:
        os.unlink(file.path)
    assert read_all(Stored(tensor), maker.files) == maker.expected["w"].tobytes()


# --- sources that change ---


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grow(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as stream:
        stream.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    status = path.stat()
    os.truncate(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [touch, grow, cut, replace])
def test_a_source_that_is_another_file_now(maker: Maker, change: Callable[[Path], None]) -> None:
    tensor = maker.plain("w", "F32", (50,))
    path = Path(maker.files[0].path)
    opened = Sources(maker.files)
    opened.check_unchanged()
    change(path)
    with pytest.raises(SourceChangedError) as caught:
        read_all(Stored(tensor), maker.files)
    assert str(path) in str(caught.value)
    with pytest.raises(SourceChangedError) as caught:
        opened.check_unchanged()
    assert str(path) in str(caught.value)


def test_a_source_that_is_gone(maker: Maker) -> None:
    tensor = maker.plain("w", "F32", (50,))
    os.unlink(maker.files[0].path)
    with pytest.raises(SourceError):
        read_all(Stored(tensor), maker.files)
    with pytest.raises(SourceChangedError, match="gone"):
        Sources(maker.files).check_unchanged()


@pytest.mark.parametrize("size", [0, 1, 100, 4000])
def test_a_source_cut_while_it_is_open(maker: Maker, size: int) -> None:
    blob = maker.rng.randbytes(5000)
    maker.file(blob)
    opened = Sources(maker.files)
    start = maker.files[0].members.data_offsets[0]
    whole = memoryview(bytearray(5000))
    opened.read(0, start, [whole])
    os.truncate(maker.files[0].path, start + size)
    halves = [whole[:2500], whole[2500:]]
    with pytest.raises(SourceChangedError, match=f"ends at byte {start + size:,}"):
        opened.read(0, start, halves)
    opened.close()


def test_a_source_that_cannot_be_read(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = maker.plain("w", "F32", (50,))

    def preadv(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(SourceError, match="Input/output error") as caught:
            read_all(Stored(tensor), maker.files)
    assert maker.files[0].path in str(caught.value)
    os.chmod(maker.files[0].path, 0)
    if os.access(maker.files[0].path, os.R_OK):
        return  # as root
    with pytest.raises(SourceError, match="Permission denied"):
        read_all(Stored(tensor), maker.files)


# --- open files ---


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_files_share_a_few_descriptors(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MAX_OPEN", 5)
    tensor = maker.mesh("w", "F32", (60, 40), Sharding((60,), (Shard(0),)))
    opened = Sources(maker.files)
    value = Stored(tensor)
    buffer = BandBuffer(buffer_nbytes(value, 2400))
    before = open_files()
    for _ in range(3):
        result = b""
        for band in bands(tensor.shape, 4, 500):
            result += evaluate(value, band, opened, buffer)
            assert open_files() <= before + 5
        assert result == maker.expected["w"].tobytes()
    opened.close()
    assert open_files() == before


def test_the_limit_leaves_room_in_the_usual_one(maker: Maker) -> None:
    """More files than a process may usually open (1,024) are no trouble."""
    tensor = maker.mesh("w", "U8", (1100, 2), Sharding((1100,), (Shard(0),)))
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, old[0]), old[1]))
    before = open_files()
    try:
        assert read_all(Stored(tensor), maker.files) == maker.expected["w"].tobytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert open_files() == before


def test_a_low_limit_of_open_files(maker: Maker) -> None:
    """Where fewer files may be open than would be kept, idle ones are closed."""
    tensor = maker.mesh("w", "U8", (100, 2), Sharding((100,), (Shard(0),)))
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(maker.files[0].path, os.O_RDONLY)  # the lowest free number
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 20, old[1]))
    try:
        assert read_all(Stored(tensor), maker.files) == maker.expected["w"].tobytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_threads_share_sources(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor in use is not closed under the hands of another thread."""
    monkeypatch.setattr(sources, "_MAX_OPEN", 2)
    tensor = maker.mesh("w", "F32", (30, 40), Sharding((30,), (Shard(0),)))
    opened = Sources(maker.files)
    value = Stored(tensor)
    results: list[bytes] = []
    before = open_files()

    def work() -> None:
        buffer = BandBuffer(buffer_nbytes(value, 1200))
        for _ in range(20):
            pieces = [
                bytes(evaluate(value, band, opened, buffer)) for band in bands(tensor.shape, 4, 700)
            ]
            results.append(b"".join(pieces))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 120
    assert set(results) == {maker.expected["w"].tobytes()}
    opened.close()
    assert open_files() == before


def test_a_failed_block_gives_its_descriptor_back(maker: Maker) -> None:
    maker.file(b"abc")
    opened = Sources(maker.files)
    before = open_files()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), opened.descriptor(0):
            raise ZeroDivisionError
    opened.close()
    assert open_files() == before


# --- local headers ---


def test_the_local_header_is_checked_when_a_member_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(6.0), "b": torch.arange(3)}, path)
    file = read_torch_file(str(path))
    assert file.members == {"0": 0, "1": 1}
    opened = Sources([file.file])
    for member in (0, 1, 0, 1):
        assert opened.member_offset(0, member) == file.file.members.data_offsets[member]
    opened.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, b"PK\x01\x02"), (0, b"\0\0\0\0"), (26, b"\xff\xff"), (28, b"\0\0"), (28, b"\xff\xff")],
)
def test_a_damaged_local_header(tmp_path: Path, field: int, value: bytes) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(6.0), "b": torch.arange(3)}, path)
    status = path.stat()
    file = read_torch_file(str(path)).file
    with path.open("r+b") as stream:
        stream.seek(file.members.header_offsets[1] + field)
        stream.write(value)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    opened = Sources([file])
    for _ in range(2):
        assert opened.member_offset(0, 0) == file.members.data_offsets[0]
        with pytest.raises(CorruptFileError, match="local header") as caught:
            opened.member_offset(0, 1)
        assert str(path) in str(caught.value)
    opened.close()


def test_unchecked_members_in_the_middle(tmp_path: Path) -> None:
    """Planning looks at three local headers only; the others are checked when they are read."""
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({f"w{i}": torch.arange(float(i + 1)) for i in range(9)}, path)
    file = read_torch_file(str(path)).file
    with path.open("r+b") as stream:
        stream.seek(file.members.header_offsets[2] + 28)
        (extra,) = struct.unpack("<H", stream.read(2))
        stream.seek(-2, os.SEEK_CUR)
        stream.write(struct.pack("<H", extra - 4))
    with pytest.raises(CorruptFileError, match="local header"):
        streammerge.merge(tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# --- copying in the kernel ---


REAL_COPY = getattr(os, "copy_file_range", None)
REAL_SENDFILE = os.sendfile
REAL_WRITE = os.pwrite


def big(maker: Maker) -> Checkpoint:
    """Tensors that are copied by the kernel, and one that is not."""
    maker.plain("plain", "F32", (50_000,))
    maker.plain("small", "U8", (3,))
    maker.plain("empty", "F32", (0, 4))
    maker.mesh("rows", "F32", (1001, 64), Sharding((4,), (Shard(0),)))
    maker.mesh("columns", "F32", (3, 80_000), Sharding((2,), (Shard(1),)))
    maker.mesh("uneven", "BF16", (5, 7), Sharding((4,), (Shard(0),)))
    maker.strided("transposed", "F32", (30, 20), (1, 30))
    return maker.checkpoint()


def write_and_check(maker: Maker, target: Path, **options: Any) -> None:
    """Write everything and compare with what safetensors reads."""
    report = streammerge.write(
        streammerge.plan(maker.checkpoint(), **{"workers": 2, "memory": "1MiB", **options}), target
    )
    found: dict[str, torch.Tensor] = {}
    for name in report.files:
        if name.endswith(".safetensors"):
            found |= load_file(target / name)
    assert found.keys() == maker.expected.keys()
    for name, value in found.items():
        expected = maker.expected[name]
        assert tuple(value.shape) == expected.shape
        assert value.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes(), name


def refuse(number: int) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def partial_copy(most: int) -> Callable[..., int]:
    def copy_file_range(source: int, target: int, count: int, *offsets: int) -> int:
        assert REAL_COPY is not None
        return int(REAL_COPY(source, target, min(count, most), *offsets))

    return copy_file_range


def partial_send(most: int) -> Callable[..., int]:
    def sendfile(target: int, source: int, offset: int, count: int) -> int:
        return REAL_SENDFILE(target, source, offset, min(count, most))

    return sendfile


def every_other(number: int, real: Callable[..., int]) -> Callable[..., int]:
    """Work once, refuse once, and so on: refusals in the middle of a range."""
    turn = iter(range(10**9))

    def call(*arguments: int) -> int:
        if next(turn) % 2:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


def nothing(*arguments: object) -> int:
    return 0


needs_copy_file_range = pytest.mark.skipif(REAL_COPY is None, reason="no os.copy_file_range")
REFUSALS = [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM]


@needs_copy_file_range
@pytest.mark.parametrize("sendfile", ["works", "refuses", "partial", "nothing"])
@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_kernel_copies_that_are_refused(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sendfile: str
) -> None:
    big(maker)
    calls = {
        "works": REAL_SENDFILE,
        "refuses": refuse(number),
        "partial": partial_send(9001),
        "nothing": nothing,
    }
    monkeypatch.setattr(os, "copy_file_range", refuse(number))
    monkeypatch.setattr(os, "sendfile", calls[sendfile])
    write_and_check(maker, tmp_path / "merged")


@needs_copy_file_range
@pytest.mark.parametrize(
    "copy",
    [
        partial_copy(9001),
        every_other(errno.EXDEV, partial_copy(9001)),
        every_other(errno.EINVAL, partial_copy(1 << 30)),
        nothing,
    ],
)
@pytest.mark.parametrize(
    "send",
    [
        partial_send(7001),
        every_other(errno.EINVAL, partial_send(7001)),
        refuse(errno.EINVAL),
        nothing,
    ],
)
@pytest.mark.parametrize("write", [None, 1000])
def test_kernel_copies_that_do_a_part(
    maker: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copy: Callable[..., int],
    send: Callable[..., int],
    write: int | None,
) -> None:
    big(maker)
    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(os, "sendfile", send)
    if write is not None:
        monkeypatch.setattr(
            os, "pwrite", lambda fd, data, offset: REAL_WRITE(fd, data[:write], offset)
        )
    write_and_check(maker, tmp_path / "merged", memory="64KiB")


def test_kernel_copies_to_the_file_that_was_made(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to one that has its name by then: of another merge, on another machine."""
    big(maker)
    path = Path(staging_path(str(tmp_path / "merged"))) / "merged" / "model.safetensors"
    copied = 0

    def send(target: int, source: int, offset: int, count: int) -> int:
        nonlocal copied
        if not copied:
            path.unlink()
            path.write_bytes(b"")
        copied += (done := REAL_SENDFILE(target, source, offset, count))
        return done

    if REAL_COPY is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    monkeypatch.setattr(os, "sendfile", send)
    with pytest.raises(ResultError, match="has 0 bytes"):
        write_and_check(maker, tmp_path / "merged")
    assert copied


def test_kernel_copies_as_they_are(maker: Maker, tmp_path: Path) -> None:
    big(maker)
    for i, size in enumerate(("1KB", "300KB", "5GB")):
        write_and_check(maker, tmp_path / f"merged {i}", max_shard_size=size)


def test_short_reads_while_writing(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(maker)
    if REAL_COPY is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    monkeypatch.setattr(os, "sendfile", refuse(errno.EINVAL))
    with short_reads(monkeypatch, lambda: 1777) as seen:
        write_and_check(maker, tmp_path / "merged")
    assert seen["short"] > 100


@needs_copy_file_range
@pytest.mark.parametrize("where", ["copy_file_range", "sendfile", "pwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_is_full(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    big(maker)
    plan = streammerge.plan(maker.checkpoint(), workers=2)
    if where != "copy_file_range":
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    if where == "pwrite":
        monkeypatch.setattr(os, "sendfile", refuse(errno.EINVAL))
    monkeypatch.setattr(os, where, refuse(number))
    with pytest.raises(NoSpaceError):
        streammerge.write(plan, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@needs_copy_file_range
def test_a_disk_error_of_the_target(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(maker)
    plan = streammerge.plan(maker.checkpoint(), workers=2)
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EIO))
    with pytest.raises(TargetError):
        streammerge.write(plan, tmp_path / "merged")


@needs_copy_file_range
def test_a_disk_error_of_the_source(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one call reads and writes, the error must name the side that failed."""
    maker.plain("w", "F32", (50_000,))
    plan = streammerge.plan(maker.checkpoint(), workers=1)
    start = maker.files[0].members.data_offsets[0]
    assert start > 0
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EIO))
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(SourceError) as caught:
        streammerge.write(plan, tmp_path / "merged")
    assert maker.files[0].path in str(caught.value)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_source_cut_while_it_is_copied(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    """It ends while it is open: an error, not zeros in the result."""
    maker.plain("w", "F32", (50_000,))
    plan = streammerge.plan(maker.checkpoint(), workers=1)
    path = maker.files[0].path
    real = sources._compare

    def compare_and_cut(file: File, status: os.stat_result) -> None:
        real(file, status)
        os.truncate(path, file.size - 100)

    monkeypatch.setattr(sources, "_compare", compare_and_cut)
    if not kernel:
        if REAL_COPY is not None:
            monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
        monkeypatch.setattr(os, "sendfile", refuse(errno.EINVAL))
    with pytest.raises(SourceChangedError) as caught:
        streammerge.write(plan, tmp_path / "merged")
    assert path in str(caught.value)
    assert not (tmp_path / "merged").exists()


def test_a_source_that_grows_while_it_is_copied(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte could be read, but of which file?"""
    maker.plain("w", "F32", (50_000,))
    plan = streammerge.plan(maker.checkpoint(), workers=1)
    path = Path(maker.files[0].path)
    done = threading.Event()

    def progress(_: object) -> None:
        if not done.is_set():
            done.set()
            grow(path)

    with pytest.raises(SourceChangedError):
        streammerge.write(plan, tmp_path / "merged", progress=progress)
    assert done.is_set()
    assert not (tmp_path / "merged").exists()


def test_a_flush_that_comes_after_the_end_of_its_file(tmp_path: Path) -> None:
    from streammerge import output_files

    finished: list[int] = []
    target = output_files.create_file(str(tmp_path), "file", 10)
    with output_files.Syncer(finished.append) as syncer:
        syncer.put(target, True)
        syncer.put(target, False)  # by a thread that was held up
    assert target.fd == -1
    assert finished == [target.part.file]
