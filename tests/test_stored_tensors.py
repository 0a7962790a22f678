"""Tensors in a row of torch.save archives: where they lie, as Python's zipfile has it."""

from __future__ import annotations

import io
import random
import tempfile
import zipfile
import zlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

from streammerge import StreamMergeError, UnsupportedError, stored_tensors
from streammerge.stored_tensors import StoredTensor, TensorReader
from streammerge.torchfile import Span

TENSORS = [
    torch.randn(3, 5),
    torch.randn(3, 5),
    torch.randn(5, 3),
    torch.arange(15).to(torch.float32).reshape(3, 5),
    torch.ones(7, dtype=torch.bfloat16),
    torch.zeros(7, dtype=torch.bfloat16),
    torch.tensor(3),
    torch.randn(4, 6).t(),
    torch.randn(30)[3:9],
    torch.empty(0, 4),
    torch.arange(6).to(torch.uint16),
    torch.randn(100, 100),
    torch.randn(100, 100),
]


def archive(tensor: object) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def plain_archive(data: bytes) -> bytes:
    """The same without data descriptors and padding, as other writers of zip files have it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), old.read(name))
    return stream.getvalue()


def read_all(archives: Sequence[bytes], reader: TensorReader | None = None) -> list[StoredTensor]:
    """What is read of archives in a row; by a new reader for each, if none is given."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(archives))
        file.flush()
        found, at = [], 0
        for data in archives:
            span = Span(file.fileno(), at, len(data))
            found.append((reader or TensorReader()).read(span))
            at += len(data)
    return found


def facts(stored: StoredTensor) -> tuple[object, ...]:
    tensor = stored.tensor
    view = (tensor.dtype, tensor.sizes, tensor.strides, tensor.offset, tensor.conj)
    return view, tensor.storage.numel, stored[1:]


@pytest.mark.parametrize("rewrite", [bytes, plain_archive])
def test_places_are_those_of_zipfile(rewrite: type[bytes]) -> None:
    archives = [rewrite(archive(tensor)) for tensor in TENSORS]
    content = b"".join(archives)
    at = 0
    found = read_all(archives, TensorReader())
    for data, tensor, stored in zip(archives, TENSORS, found, strict=True):
        info = zipfile.ZipFile(io.BytesIO(data)).getinfo("archive/data/0")
        assert stored.header_offset == at + info.header_offset
        assert (stored.crc, stored.size) == (info.CRC, info.file_size)
        blob = content[stored.data_offset : stored.data_offset + stored.size]
        assert zlib.crc32(blob) == info.CRC
        assert blob == bytes(tensor.untyped_storage())
        assert stored.tensor.sizes == tensor.shape
        assert stored.tensor.strides == tensor.stride()
        assert stored.tensor.dtype == str(tensor.dtype).removeprefix("torch.")
        assert stored.name == zlib.crc32(b"archive/data/0")
        at += len(data)
    assert [facts(one) for one in found] == [facts(one) for one in read_all(archives)]


def test_archives_of_one_form_are_read_in_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[Span] = []
    read = stored_tensors._read_in_full
    monkeypatch.setattr(stored_tensors, "_read_in_full", lambda s: (full.append(s), read(s))[1])
    archives = [archive(torch.full((4, 8), float(n))) for n in range(50)]
    read_all(archives, TensorReader())
    assert len(full) == 1
    monkeypatch.setattr(stored_tensors, "_MAX_FORMS", 3)
    many = [archive(torch.ones(n % 5 + 1, 100)) for n in range(50)]
    assert [facts(one) for one in read_all(many, TensorReader())] == [
        facts(one) for one in read_all(many)
    ]


def outcome(data: bytes, reader: TensorReader) -> object:
    try:
        return facts(read_all([data], reader)[0])
    except StreamMergeError as error:
        return type(error), str(error)


@pytest.mark.parametrize("rewrite", [bytes, plain_archive])
@given(st.integers(0, 2**32).map(random.Random))
@fixed(300)
def test_a_known_form_hides_no_damage(rewrite: type[bytes], rng: random.Random) -> None:
    data = rewrite(archive(torch.arange(6.0).reshape(2, 3)))
    reader = TensorReader()
    read_all([data], reader)
    changed = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    expected = outcome(bytes(changed), TensorReader())
    found = outcome(bytes(changed), reader)
    # The version that torch gives its files is read, but plays no part.
    if "version" not in str(expected):
        assert found == expected


def test_the_pickle_is_read_where_it_lies_behind_the_blob() -> None:
    def blob_first(data: bytes) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
            for name in sorted(old.namelist(), key=lambda name: not name.endswith("/data/0")):
                new.writestr(zipfile.ZipInfo(name), old.read(name))
        return stream.getvalue()

    archives = [blob_first(archive(torch.ones(shape))) for shape in ((2, 6), (6, 2), (3, 4))]
    assert len({len(data) for data in archives}) == 1
    found = read_all(archives, TensorReader())
    assert [one.tensor.sizes for one in found] == [(2, 6), (6, 2), (3, 4)]


@pytest.mark.parametrize("value", [{"a": torch.ones(2)}, [torch.ones(2)], 7, None])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match="expected a plain tensor"):
        read_all([archive(value)])


def test_a_parameter_is_its_tensor() -> None:
    (found,) = read_all([archive(torch.nn.Parameter(torch.ones(2)))])
    assert found.tensor.sizes == (2,)


@pytest.mark.parametrize("length", [0, 3, 40, 500, -1])
def test_an_archive_that_is_cut_is_refused(length: int) -> None:
    data = archive(torch.ones(20))
    for reader in (TensorReader(), TensorReader()):
        with pytest.raises(StreamMergeError):
            read_all([data[:length]], reader)
        read_all([data], reader)


def test_long_archives_are_not_kept() -> None:
    data = archive(torch.ones(3))
    padded = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(padded, "w") as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), old.read(name))
        for number in range(1000):
            new.writestr(zipfile.ZipInfo(f"archive/more/{number}"), b"")
    reader = TensorReader()
    read_all([padded.getvalue()], reader)
    assert reader._forms == {}
