"""The container of torch.save: offsets are those of zipfile and of torch; damage is an error.

Nothing but a `StreamMergeError` may come out of a damaged file, wherever the damage is.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as torch_config

import streammerge
from streammerge import CorruptFileError, SourceError, StreamMergeError, UnsupportedError
from streammerge.dtypes import FROM_TORCH
from streammerge.torchfile import TorchFile, read_torch_file
from streammerge.unpickler import StridedTensor

DATA = Path(__file__).parent / "data"
DTYPES = {name: getattr(torch, name) for name in FROM_TORCH}


def raw(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def state_dict() -> dict[str, torch.Tensor]:
    """Small tensors of many kinds of storages."""
    shared = torch.arange(24, dtype=torch.float32)
    return {
        "float": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "view": shared[4:16].reshape(3, 4),
        "tied": shared[20:],
        "transposed": torch.arange(12, dtype=torch.int16).reshape(3, 4).t(),
        "none left": torch.ones(8)[:0],
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    }


def storage_offset(file: TorchFile, name: str) -> int:
    """Where streammerge says that the storage of an entry starts."""
    assert isinstance(file.root, dict)
    tensor = file.root[name]
    assert isinstance(tensor, StridedTensor)
    return file.file.members.data_offsets[file.members[tensor.storage.key]]


def torch_offsets(path: Path) -> dict[str, int]:
    """Where torch itself says so."""
    loaded = torch.load(path, map_location="meta", weights_only=False)
    return {name: value.untyped_storage()._checkpoint_offset for name, value in loaded.items()}


def zipfile_offsets(path: Path) -> dict[str, int]:
    """Where each member's bytes start, found by searching what zipfile reads of them."""
    offsets = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for info in archive.infolist():
            stream.seek(info.header_offset + 26)
            name_size, extra_size = struct.unpack("<HH", stream.read(4))
            offset = info.header_offset + 30 + name_size + extra_size
            if info.CRC:  # not left out by skip_data
                stream.seek(offset)
                assert stream.read(info.file_size) == archive.read(info)
            offsets[info.filename] = offset
    return offsets


def check(path: Path, expected: dict[str, torch.Tensor]) -> TorchFile:
    """The file reads, and the bytes at every offset are those of the tensor."""
    file = read_torch_file(str(path))
    status = path.stat()
    assert (file.file.path, file.file.size) == (str(path), status.st_size)
    assert (file.file.mtime_ns, file.file.inode) == (status.st_mtime_ns, status.st_ino)
    assert isinstance(file.root, dict)
    assert list(file.root) == list(expected)
    content = path.read_bytes()
    for name, value in expected.items():
        tensor = file.root[name]
        assert isinstance(tensor, StridedTensor)
        assert tensor.sizes == tuple(value.shape)
        assert tensor.strides == value.stride()
        assert tensor.dtype == str(value.dtype).removeprefix("torch.")
        assert tensor.offset == value.storage_offset()
        at = storage_offset(file, name)
        size = file.file.members.sizes[file.members[tensor.storage.key]]
        whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        assert content[at : at + size] == raw(whole)
        assert size == whole.nbytes
    return file


def repack(source: Path, target: Path, **options: Any) -> None:
    """Pack the members of an archive again with Python's zipfile, which aligns nothing."""
    reverse = options.pop("reverse", False)
    zip64 = options.pop("zip64", False)
    comment = options.pop("comment", b"")
    extra = options.pop("extra", {})
    leave_out = options.pop("leave_out", ())
    replace = options.pop("replace", {})
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        infos = old.infolist()
        for info in reversed(infos) if reverse else infos:
            short = info.filename.split("/", 1)[1]
            if short in leave_out:
                continue
            with new.open(info.filename, "w", force_zip64=zip64) as stream:
                stream.write(replace.get(short, old.read(info)))
        root = infos[0].filename.split("/", 1)[0]
        for name, content in extra.items():
            new.writestr(f"{root}/{name}", content)
        new.comment = comment


# --- what torch writes ---


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_zip_files(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pt"
    expected = state_dict()
    torch.save(expected, path, pickle_protocol=protocol)
    file = check(path, expected)
    assert {name: storage_offset(file, name) for name in expected} == torch_offsets(path)
    by_zip = zipfile_offsets(path)
    members = file.file.members
    with zipfile.ZipFile(path) as archive:
        for key, index in file.members.items():
            info = archive.getinfo(f"model/data/{key}")
            assert members.data_offsets[index] == by_zip[info.filename]
            assert members.header_offsets[index] == info.header_offset
            assert members.sizes[index] == info.file_size
            assert members.crcs[index] == info.CRC


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_legacy_files(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pt"
    expected = state_dict()
    torch.save(expected, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    file = check(path, expected)
    assert set(file.file.members.header_offsets) == {-1}


@pytest.mark.parametrize("legacy", [False, True])
def test_each_dtype(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    written = {}
    for name, dtype in DTYPES.items():
        value = torch.arange(dtype.itemsize * 3, dtype=torch.uint8)
        value = (value % 2 if dtype == torch.bool else value).view(dtype)
        try:
            torch.save({name: value}, path, _use_new_zipfile_serialization=not legacy)
        except (AttributeError, KeyError, RuntimeError, ValueError, TypeError):
            assert legacy  # the old format knows typed storages only
            continue
        check(path, {name: value})
        written[name] = value
    assert len(written) >= (10 if legacy else len(DTYPES))
    torch.save(written, path, _use_new_zipfile_serialization=not legacy)
    check(path, written)


@pytest.mark.parametrize("alignment", [1, 2, 64, 100, 4096, 1 << 15])
def test_storage_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.pt"
    expected = state_dict()
    with torch_config.patch({"save.storage_alignment": alignment}):
        torch.save(expected, path)
    file = check(path, expected)
    assert {name: storage_offset(file, name) for name in expected} == torch_offsets(path)


def test_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    expected = state_dict()
    with torch_config.patch({"save.compute_crc32": False}):
        torch.save(expected, path)
    file = check(path, expected)
    with zipfile.ZipFile(path) as archive:
        assert {info.CRC for info in archive.infolist()} == set(file.file.members.crcs)
        assert len(set(file.file.members.crcs)) <= 1


@pytest.mark.parametrize(
    "name",
    [
        "model_world_size_8_rank_3.pt",
        "no extension",
        "dots.in.the.name.pt",
        "größe 模型 \U0001f525.pt",
        "n" * 200 + ".pt",
    ],
)
def test_file_names(tmp_path: Path, name: str) -> None:
    """The name of the file becomes part of every member's name, and so of the padding."""
    path = tmp_path / name
    expected = state_dict()
    torch.save(expected, path)
    file = check(path, expected)
    assert {key: storage_offset(file, key) for key in expected} == torch_offsets(path)
    moved = tmp_path / "moved.pt"
    path.rename(moved)
    check(moved, expected)


def test_a_stream_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as stream:
        torch.save(state_dict(), stream)
    check(path, state_dict())


@pytest.mark.parametrize("legacy", [False, True])
def test_many_small_storages(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    expected = {f"layer.{i}": torch.full((i % 5,), i, dtype=torch.int32) for i in range(3000)}
    torch.save(expected, path, _use_new_zipfile_serialization=not legacy)
    file = check(path, expected)
    assert len(file.file.members) == 3000
    if not legacy:
        assert {name: storage_offset(file, name) for name in expected} == torch_offsets(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_longer_than_a_window(tmp_path: Path, legacy: bool) -> None:
    """The pickle is mapped piece by piece; values must survive the seams."""
    path = tmp_path / "model.pt"
    expected = {
        **{f"{i}" + "n" * 70_001: torch.tensor([i]) for i in range(40)},
        "long": torch.arange(1 << 19),
    }
    torch.save(expected, path, _use_new_zipfile_serialization=not legacy)
    check(path, expected)


def test_nothing_stored(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for legacy in (False, True):
        torch.save(OrderedDict(), path, _use_new_zipfile_serialization=not legacy)
        file = check(path, {})
        assert file.members == {}
        assert len(file.file.members) == 0


@pytest.mark.parametrize("legacy", [False, True])
def test_values_that_are_no_tensors(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    value = {
        "step": 3,
        "lr": 0.5,
        "name": "größe",
        "none": None,
        "flags": [True, (1, 2)],
        "b": b"x",
    }
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    assert read_torch_file(str(path)).root == value


# --- above four gigabytes ---


def test_zip64(tmp_path: Path) -> None:
    """A storage above 4 GiB, and members that start behind it. The file is sparse."""
    path = tmp_path / "model.pt"
    expected = {
        "before": torch.empty(3),
        "big": torch.empty((4 << 30) + 5, dtype=torch.uint8),
        "after": torch.empty(7, dtype=torch.int64),
        "empty": torch.empty(0),
        "last": torch.empty(2),
    }
    with torch.serialization.skip_data():
        torch.save(expected, path)
    assert path.stat().st_size > 4 << 30
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("the file system has no sparse files")
    file = read_torch_file(str(path))
    offsets = {name: storage_offset(file, name) for name in expected}
    assert offsets == torch_offsets(path)
    by_zip = zipfile_offsets(path)
    for key, index in file.members.items():
        assert file.file.members.data_offsets[index] == by_zip[f"model/data/{key}"]
    assert offsets["after"] > 4 << 30


def test_a_storage_of_just_4_gib(tmp_path: Path) -> None:
    """Where zip64 begins: 0xFFFFFFFF is itself the mark."""
    path = tmp_path / "model.pt"
    for size in (0xFFFFFFFE, 0xFFFFFFFF, 0x100000000):
        expected = {"big": torch.empty(size, dtype=torch.uint8), "after": torch.empty(7)}
        with torch.serialization.skip_data():
            torch.save(expected, path)
        if path.stat().st_blocks * 512 > 1 << 30:
            pytest.skip("the file system has no sparse files")
        file = read_torch_file(str(path))
        offsets = {name: storage_offset(file, name) for name in expected}
        assert offsets == torch_offsets(path)
        assert list(file.file.members.sizes) == [size, 28]


class StoredTensor:
    """Pickles as a tensor on a storage of that key, which need not exist."""

    def __init__(self, key: str, kind: type, numel: int) -> None:
        self.storage = Storage(("storage", kind, key, "cpu", numel, None))

    def __reduce__(self) -> tuple[Any, ...]:
        numel = self.storage.pid[4]
        return (
            torch._utils._rebuild_tensor_v2,
            (self.storage, 0, (numel,), (1,), False, OrderedDict()),
        )


class Storage:
    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class LegacyPickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.pid if isinstance(obj, Storage) else None


def test_legacy_above_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    count = (4 << 30) + 3
    last = torch.arange(7)
    with path.open("wb") as stream:
        pickle.dump(torch.serialization.MAGIC_NUMBER, stream, 2)
        pickle.dump(torch.serialization.PROTOCOL_VERSION, stream, 2)
        pickle.dump({"protocol_version": 1001, "little_endian": True}, stream, 2)
        value = {
            "big": StoredTensor("0", torch.ByteStorage, count),
            "after": StoredTensor("1", torch.LongStorage, 7),
        }
        LegacyPickler(stream, 2).dump(value)
        pickle.dump(["0", "1"], stream, 2)
        start = stream.tell()
        stream.write(struct.pack("<q", count))
        stream.seek(count, os.SEEK_CUR)
        stream.write(struct.pack("<q", 7) + raw(last))
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("the file system has no sparse files")
    file = read_torch_file(str(path))
    assert storage_offset(file, "big") == start + 8
    after = storage_offset(file, "after")
    assert after == start + 8 + count + 8
    with path.open("rb") as stream:
        stream.seek(after)
        assert stream.read() == raw(last)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptFileError, match="cut short"):
        read_torch_file(str(path))


# --- archives that another program packed ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reverse": True},
        {"zip64": True},
        {"comment": b"packed again"},
        {"comment": b"c" * 65535},
        {"extra": {"note.txt": b"hello", ".data/x": b""}},
        {"leave_out": ["byteorder", ".storage_alignment", ".format_version", "version"]},
    ],
    ids=str,
)
def test_repacked_archives(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.save(state_dict(), tmp_path / "model.pt")
    path = tmp_path / "again.pt"
    repack(tmp_path / "model.pt", path, **options)
    file = check(path, state_dict())
    by_zip = zipfile_offsets(path)
    for key, index in file.members.items():
        assert file.file.members.data_offsets[index] == by_zip[f"model/data/{key}"]


def test_more_members_than_16_bits_count(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "model.pt")
    path = tmp_path / "again.pt"
    repack(tmp_path / "model.pt", path, extra={f"note/{i}": b"" for i in range(66_000)})
    check(path, {"w": torch.arange(3)})


def test_directories_in_the_archive(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "model.pt")
    path = tmp_path / "again.pt"
    repack(tmp_path / "model.pt", path, extra={"": b"", "data/": b""})
    check(path, state_dict())


# --- what is refused ---


def edit_directory(path: Path, name: str, field: int, code: str, value: int) -> None:
    """Change a field of one entry of the central directory."""
    content = bytearray(path.read_bytes())
    at = content.rindex(name.encode()) - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    struct.pack_into(code, content, at + field, value)
    path.write_bytes(content)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(6.0), "b": torch.arange(3)}, path)
    return path


def test_compressed_members_are_refused(tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "again.pt"
    repack(saved, path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match="compressed"):
        read_torch_file(str(path))


def test_encrypted_members_are_refused(saved: Path) -> None:
    edit_directory(saved, "model/data/0", 8, "<H", 2056 | 1)
    with pytest.raises(UnsupportedError, match="encrypted"):
        read_torch_file(str(saved))


@pytest.mark.parametrize("legacy", [False, True])
def test_big_endian_files_are_refused(tmp_path: Path, saved: Path, legacy: bool) -> None:
    path = tmp_path / "again.pt"
    if legacy:
        torch.save({}, saved, _use_new_zipfile_serialization=False)
        content = saved.read_bytes()
        at = content.index(b"little_endian")
        true = content.index(b"\x88", at)
        path.write_bytes(content[:true] + b"\x89" + content[true + 1 :])
    else:
        repack(saved, path, replace={"byteorder": b"big"})
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_torch_file(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": ["data/1"]}, "missing"),
        ({"leave_out": ["data.pkl"]}, r"no data\.pkl"),
        ({"replace": {"data/0": b"\0" * 23}}, "23 bytes"),
        ({"replace": {"data/0": b"\0" * 25}}, "25 bytes"),
        ({"replace": {"data/0": b""}}, "0 bytes"),
        ({"replace": {"data.pkl": b""}}, "damaged"),
        ({"replace": {"data.pkl": b"\x80\x02N"}}, "damaged"),
        ({"replace": {".storage_alignment": b""}}, "alignment"),
        ({"replace": {".storage_alignment": b"0"}}, "alignment"),
        ({"replace": {".storage_alignment": b"-64"}}, "alignment"),
        ({"replace": {".storage_alignment": b"64\n"}}, "alignment"),
        ({"replace": {".storage_alignment": b"9" * 30}}, "alignment"),
        ({"replace": {".storage_alignment": b"9" * 5000}}, "alignment"),
        ({"replace": {".storage_alignment": "\u0663".encode()}}, "alignment"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_archives_that_contradict_themselves(
    tmp_path: Path, saved: Path, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "again.pt"
    repack(saved, path, **options)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_torch_file(str(path))
    assert str(path) in str(caught.value)


def test_two_pickles_are_refused(tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "again.pt"
    repack(saved, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02}.")
    with pytest.raises(CorruptFileError):
        read_torch_file(str(path))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "again.pt"
    repack(saved, path, extra={"data/0": b"\0" * 24})
    with pytest.raises(CorruptFileError, match="twice"):
        read_torch_file(str(path))


@pytest.mark.parametrize("name", ["model/data.pkl", "model/data/0", "model/data/1"])
@pytest.mark.parametrize("offset", [1, 1 << 20, 0xFFFFFFFE, 0xFFFFFFFF])
def test_entries_that_point_elsewhere(saved: Path, name: str, offset: int) -> None:
    edit_directory(saved, name, 42, "<I", offset)
    with pytest.raises(SourceError):
        read_torch_file(str(saved))


@pytest.mark.parametrize("size", [0, 23, 1 << 20, 0xFFFFFFFE, 0xFFFFFFFF])
def test_entries_of_another_size(saved: Path, size: int) -> None:
    edit_directory(saved, "model/data/0", 20, "<I", size)
    edit_directory(saved, "model/data/0", 24, "<I", size)
    with pytest.raises(SourceError):
        read_torch_file(str(saved))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"PK",
        b"PK\x03\x04",
        b"PK\x05\x06" + b"\0" * 18,
        b"PK\x03\x04" + b"\0" * 100 + b"PK\x05\x06" + b"\0" * 18,
        b"PK\x03\x04" + b"\0" * 100 + b"PK\x05\x06" + b"\xff" * 18,
        b"PK\x03\x04PK\x06\x07" + b"\xff" * 16 + b"PK\x05\x06" + b"\xff" * 18,
        b"PK\x03\x04PK\x06\x07" + b"\0" * 16 + b"PK\x05\x06" + b"\xff" * 18,
        b"\x80\x02.",
        b"\x80\x02N.",
        b"\x80\x02K\x01.",
        b"hello\n" * 100,
        b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        bytes(range(256)) * 8,
    ],
    ids=lambda content: ascii(content[:24]),
)
def test_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"model\.pt"):
        read_torch_file(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.pt"):
        with pytest.raises(SourceError) as caught:
            read_torch_file(str(path))
        assert str(path) in str(caught.value)


def test_no_descriptor_stays_open(tmp_path: Path, saved: Path) -> None:
    bad = tmp_path / "bad.pt"
    bad.write_bytes(saved.read_bytes()[:-10])
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_torch_file(str(saved))
        with pytest.raises(SourceError):
            read_torch_file(str(bad))
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- damage ---


@contextmanager
def no_hang_and_little_memory() -> Iterator[None]:
    """Damaged lengths must not take the machine down with the test."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), old[1]))
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize("legacy", [False, True])
def test_cut_short_anywhere(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(
        {"w": torch.arange(6.0), "empty": torch.empty(0), "b": torch.arange(3)},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    content = path.read_bytes()
    read_torch_file(str(path))
    with no_hang_and_little_memory():
        for size in reversed(range(len(content))):
            os.truncate(path, size)
            with pytest.raises(SourceError, match=r"model\.pt"):
                read_torch_file(str(path))


def test_the_front_is_missing(tmp_path: Path, saved: Path) -> None:
    content = saved.read_bytes()
    path = tmp_path / "again.pt"
    for cut in range(1, len(content), 7):
        path.write_bytes(content[cut:])
        with pytest.raises(SourceError):
            read_torch_file(str(path))


def outcome(call: Any, path: str) -> str:
    try:
        call(path)
    except StreamMergeError as error:
        return type(error).__name__
    return "success"


@contextmanager
def damaged(path: Path, places: list[tuple[int, int]]) -> Iterator[None]:
    """The file with some bits flipped, for the duration of the block."""
    with path.open("r+b", buffering=0) as stream:
        original = {}
        for position, flip in places:
            old = os.pread(stream.fileno(), 1, position)
            original.setdefault(position, old)
            os.pwrite(stream.fileno(), bytes([old[0] ^ flip]), position)
        try:
            yield
        finally:
            for position, old in original.items():
                os.pwrite(stream.fileno(), old, position)


def test_the_checksum_of_the_pickle_is_checked(saved: Path) -> None:
    begin, end = pickled_part(saved.read_bytes())
    for position in range(begin, end):
        with (
            damaged(saved, [(position, 0x10)]),
            pytest.raises(CorruptFileError, match="CRC"),
        ):
            read_torch_file(str(saved))
    read_torch_file(str(saved))


def pickled_part(content: bytes) -> tuple[int, int]:
    """Where the pickle lies: damage elsewhere in the data goes unnoticed by design."""
    if not content.startswith(b"PK"):
        return 0, len(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (info,) = (i for i in archive.infolist() if i.filename.endswith("/data.pkl"))
    name_size, extra_size = struct.unpack_from("<HH", content, info.header_offset + 26)
    start = info.header_offset + 30 + name_size + extra_size
    return start, start + info.file_size


def leave_out_checksums(path: Path) -> None:
    """As if the writer had computed none, so that damage reaches the unpickler."""
    content = bytearray(path.read_bytes())
    if content.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            at, count = archive.start_dir, len(archive.infolist())
        for _ in range(count):
            struct.pack_into("<I", content, at + 16, 0)
            at += 46 + sum(struct.unpack_from("<HHH", content, at + 28))
        path.write_bytes(content)


SOURCES = [
    "toy_noname_mesh__t213",
    "fsdp1_shardedtensor_origparams__t24",
    "fsdp2_w4_legacy__t24",
    "fsdp2_tp_2x2_uneven__t213",
]


@pytest.mark.parametrize("source", SOURCES)
def test_flipped_bits(tmp_path_factory: pytest.TempPathFactory, source: str) -> None:
    """Random damage to real rank files: an error or a result, never anything else."""
    directory = tmp_path_factory.mktemp("flipped")
    for file in (DATA / source).glob("*.pt"):
        shutil.copy(file, directory)
    victim = min(directory.glob("*_rank_1.pt"))
    leave_out_checksums(victim)
    content = victim.read_bytes()
    begin, end = pickled_part(content)
    tail = max(0, len(content) - 2000)
    position = st.one_of(
        st.integers(begin, end - 1),
        st.integers(begin, end - 1),
        st.integers(tail, len(content) - 1),
        st.integers(0, len(content) - 1),
    )
    outcomes: Counter[str] = Counter()

    @given(st.lists(st.tuples(position, st.integers(1, 255)), min_size=1, max_size=3))
    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=125,
        suppress_health_check=list(HealthCheck),
    )
    def flip(places: list[tuple[int, int]]) -> None:
        with damaged(victim, places):
            outcomes[outcome(read_torch_file, str(victim))] += 1
            outcomes[outcome(streammerge.describe, str(directory))] += 1

    with no_hang_and_little_memory():
        flip()
    assert outcomes["success"]
    assert outcomes["CorruptFileError"]
    assert outcomes["UnsafePickleError"]


@pytest.mark.parametrize("legacy", [False, True])
def test_every_byte_of_a_pickle_flipped(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save(
        OrderedDict(w=torch.arange(6.0), b=torch.empty(0)),
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    leave_out_checksums(path)
    content = path.read_bytes()
    begin, end = pickled_part(content)
    outcomes: Counter[str] = Counter()
    with no_hang_and_little_memory():
        for position in range(begin, end):
            for flip in (0x01, 0x20, 0xFF):
                with damaged(path, [(position, flip)]):
                    outcomes[outcome(streammerge.describe, str(tmp_path))] += 1
    assert outcomes["success"]
    assert outcomes["CorruptFileError"]


def test_every_byte_of_the_directory_flipped(tmp_path: Path) -> None:
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.arange(6.0), "b": torch.arange(3)}, path)
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    outcomes: Counter[str] = Counter()
    with no_hang_and_little_memory():
        for position in range(start, len(content)):
            for flip in (0x01, 0xFF):
                with damaged(path, [(position, flip)]):
                    outcomes[outcome(streammerge.describe, str(tmp_path))] += 1
    assert outcomes["success"]
    assert outcomes["CorruptFileError"]
