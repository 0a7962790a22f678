"""CRC-32 of stored bytes. What torch.save stored, and where, is said by torch and zipfile."""

from __future__ import annotations

import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DATA, copy_stored, poke, rank_file, save_many, save_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import streammerge
from streammerge import crc
from streammerge.checkpoint import Checkpoint
from streammerge.cli import main
from streammerge.crc import CrcReport, check_crcs, crc_amount
from streammerge.errors import CorruptFileError
from streammerge.sources import Sources

STORED = [
    "fsdp1_dtensor_origparams__t24",
    "fsdp1_shardedtensor_origparams__t26",
    "fsdp2_lora__t213",
    "fsdp2_odd_storage__t213",
    "fsdp2_tp_2x2_uneven__t213",
    "fsdp2_w4__t213",
    "toy_hsdp_transposed__t213",
]
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True)
class Stored:
    """A storage in a rank file, by its zip directory.

    Attributes:
        begin, end: its bytes.
        padding: what torch put before it, to align it.
    """

    crc: int
    begin: int
    end: int
    padding: range


def storages(path: Path) -> list[Stored]:
    """The storages of a rank file in the order of their bytes."""
    return [stored for name, stored in members(path) if "/data/" in name]


def members(path: Path) -> list[tuple[str, Stored]]:
    """All members of a zip archive in the order of their bytes, with their names."""
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for info in archive.infolist():
            stream.seek(info.header_offset)
            *_, name_size, extra_size = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
            extra = info.header_offset + _LOCAL_HEADER.size + name_size
            begin = extra + extra_size
            # The extra field starts with its kind and size.
            padding = range(min(extra + 4, begin), begin)
            found.append((info.filename, Stored(info.CRC, begin, begin + info.file_size, padding)))
    return sorted(found, key=lambda member: member[1].begin)


def keys_at(path: Path) -> dict[int, set[str]]:
    """Where storages begin, and the keys of the tensors in them, by torch."""
    state = torch.load(path, map_location="meta", weights_only=False)
    keys: dict[int, set[str]] = {}
    for key, value in state.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, torch.Tensor):
            keys.setdefault(local.untyped_storage()._checkpoint_offset, set()).add(key)
    return keys


def check(checkpoint: Checkpoint, **options: Any) -> CrcReport:
    sources = Sources(checkpoint.files)
    try:
        return check_crcs(checkpoint, sources, **{"buffer_size": 1 << 20, "workers": 2} | options)
    finally:
        sources.close()


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip a bit of a file, without a change of its time."""
    with path.open("rb") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
    poke(path, offset, bytes([byte ^ 1 << bit]))


@contextmanager
def flipped(path: Path, offset: int, bit: int) -> Iterator[None]:
    flip(path, offset, bit)
    yield
    flip(path, offset, bit)


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(("workers", "buffer_size"), [(1, 64), (3, 1 << 20)])
def test_stored_checkpoints(name: str, workers: int, buffer_size: int) -> None:
    checkpoint = streammerge.describe(DATA / name)
    stored = [s for path in (DATA / name).glob("*.pt") for s in storages(path)]
    assert all(s.crc for s in stored if s.begin < s.end)
    nbytes = sum(s.end - s.begin for s in stored)
    counts: list[int] = []
    report = check(checkpoint, workers=workers, buffer_size=buffer_size, on_progress=counts.append)
    assert report == CrcReport(sum(1 for s in stored if s.crc), nbytes, ())
    assert crc_amount(checkpoint) == nbytes
    assert counts == sorted(counts)
    assert counts[-1] == nbytes


def test_each_byte_is_read_once_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_many(tmp_path, tensors=40, numel=1000)
    checkpoint = streammerge.describe(tmp_path)
    reads: dict[int, list[tuple[int, int]]] = {}
    read = Sources.read

    def record(self: Sources, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        reads.setdefault(index, []).append((offset, sum(map(len, buffers))))
        read(self, index, offset, buffers)

    monkeypatch.setattr(Sources, "read", record)
    check(checkpoint, workers=1, buffer_size=512)
    for index, file in enumerate(checkpoint.files):
        assert reads[index] == sorted(reads[index])
        assert max(size for _, size in reads[index]) == 512
        covered = {at for offset, size in reads[index] for at in range(offset, offset + size)}
        expected = {at for s in storages(Path(file.path)) for at in range(s.begin, s.end)}
        assert covered == expected
        assert sum(size for _, size in reads[index]) == len(expected)


def test_workers_take_different_files() -> None:
    files = iter([iter(["a1", "a2", "a3"]), iter(["b1"]), iter(["c1", "c2"])])
    batches: Any = crc._alternate(files, 2)  # type: ignore[arg-type]
    assert list(batches) == ["a1", "b1", "a2", "a3", "c1", "c2"]


# --- what is damaged ------------------------------------------------------------------------------


def test_every_member_is_protected(tmp_path: Path) -> None:
    """Bits at the first, the last and some other byte of all storages."""
    copy_stored("fsdp2_w4__t213", tmp_path / "source")
    checkpoint = streammerge.describe(tmp_path / "source")
    random_ = random.Random(4)
    flips = 0
    for file in checkpoint.files:
        path = Path(file.path)
        keys = keys_at(path)
        for stored in storages(path):
            some = range(stored.begin, stored.end)
            for offset in {*some[:1], *some[-1:], random_.choice(some)} if some else ():
                with flipped(path, offset, random_.randrange(8)):
                    with pytest.raises(CorruptFileError) as caught:
                        check(checkpoint, workers=1)
                    data = path.read_bytes()[stored.begin : stored.end]
                line = str(caught.value)
                assert line.startswith(f"{path}: the data of ")
                assert f"{zlib.crc32(data):08x}, torch.save stored {stored.crc:08x}" in line
                names = keys.get(stored.begin, ())  # none has the ranks of the device mesh
                assert ("no tensor" in line) == (not names)
                assert all(f"'{key}'" in line for key in names)
                assert line.count("'") == 2 * len(names)
                flips += 1
    assert flips > 200
    check(checkpoint)


def test_every_member_that_is_no_storage_is_protected(tmp_path: Path) -> None:
    """With or without --check-crc: bits of each byte, of the long pickle some."""
    source = tmp_path / "source"
    copy_stored("fsdp2_w4__t213", source)
    path = rank_file(source, 2)
    others = {name: stored for name, stored in members(path) if "/data/" not in name}
    assert {name.partition("/")[2] for name in others} == {
        *("data.pkl", "byteorder", "version"),
        *(".format_version", ".storage_alignment", ".data/serialization_id"),
    }
    random_ = random.Random(4)
    for stored in others.values():
        for offset in range(stored.begin, stored.end, max(1, (stored.end - stored.begin) // 40)):
            with flipped(path, offset, random_.randrange(8)), pytest.raises(CorruptFileError):
                streammerge.describe(source)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of real FSDP, to damage and to repair."""
    folder = tmp_path_factory.mktemp("real") / "source"
    copy_stored("fsdp2_tp_2x2_uneven__t213", folder)
    return folder


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rank=st.integers(0, 3), bit=st.integers(0, 7))
def test_every_flip_in_a_member_is_refused_and_none_in_padding(
    real: Path, data: st.DataObject, rank: int, bit: int
) -> None:
    path = rank_file(real, rank)
    stored = storages(path)
    inside = data.draw(st.sampled_from([True, True, False]))
    ranges = [range(s.begin, s.end) if inside else s.padding for s in stored]
    offset = data.draw(st.sampled_from([r for r in ranges if r]).flatmap(st.sampled_from))
    with flipped(path, offset, bit):
        checkpoint = streammerge.describe(real)
        if inside:
            with pytest.raises(CorruptFileError, match=re.escape(f"{path}: the data of")):
                check(checkpoint)
        else:
            check(checkpoint)


def test_the_crc_itself_is_damaged(tmp_path: Path) -> None:
    save_plain(tmp_path, [{"a": torch.arange(100.0)}])
    path = rank_file(tmp_path, 0, 1)
    (stored,) = storages(path)
    at = path.read_bytes().rindex(stored.crc.to_bytes(4, "little"))
    flip(path, at, 3)
    with pytest.raises(CorruptFileError, match=f"is {stored.crc:08x}, torch.save stored"):
        check(streammerge.describe(tmp_path))


def test_many_keys_in_one_member(tmp_path: Path) -> None:
    rows = torch.arange(100.0).view(10, 10)
    save_plain(tmp_path, [{f"row{i}": rows[i] for i in range(10)}])
    path = rank_file(tmp_path, 0, 1)
    flip(path, storages(path)[0].begin, 0)
    with pytest.raises(CorruptFileError, match="keys 'row0', 'row1', 'row2' and 7 more are"):
        check(streammerge.describe(tmp_path))


def test_only_what_tensors_need_is_read(tmp_path: Path) -> None:
    """Large storages beside the model, such as those of an optimizer, are not."""
    state = {"model": {"a": torch.ones(100)}, "other": torch.arange(50_000.0)}
    save_plain(tmp_path, [state])
    checkpoint = streammerge.describe(tmp_path)
    assert check(checkpoint).nbytes == 400
    path = rank_file(tmp_path, 0, 1)
    flip(path, storages(path)[1].begin, 0)
    check(checkpoint)


# --- going on -------------------------------------------------------------------------------------


def test_what_was_checked_before_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_many(tmp_path, tensors=30, numel=10, world_size=3)
    monkeypatch.setattr(crc, "_BATCH_COUNT", 4)
    checkpoint = streammerge.describe(tmp_path)
    path = rank_file(tmp_path, 1, 3)
    flip(path, storages(path)[17].begin + 3, 5)

    done: dict[int, set[int]] = {}

    def record(file: int, members: tuple[int, ...]) -> None:
        assert not done.setdefault(file, set()) & {*members}
        done[file] |= {*members}

    with pytest.raises(CorruptFileError):
        check(checkpoint, on_checked=record, workers=1)
    assert done == {0: {*range(30)}, 1: {*range(16)}}
    before = {file: frozenset(members) for file, members in done.items()}
    assert crc_amount(checkpoint, before) == 40 * 44
    with pytest.raises(CorruptFileError, match=r"rank_1\.pt: the data of key 'layers.17.weight'"):
        check(checkpoint, done=before, on_checked=record, workers=1)

    flip(path, storages(path)[17].begin + 3, 5)
    report = check(checkpoint, done=before, on_checked=record)
    assert (report.members, report.nbytes) == (44, 40 * 44)
    assert done == {file: {*range(30)} for file in range(3)}
    assert check(checkpoint, done=done) == CrcReport(0, 0, ())

    # What is taken for checked is not looked at, as it would be in vain.
    flip(path, storages(path)[2].begin, 0)
    assert check(checkpoint, done=before).nbytes == 40 * 44


# --- no CRC at all --------------------------------------------------------------------------------


def test_files_without_crcs(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(0), "c": torch.arange(5)}
    save_plain(tmp_path / "legacy", [state], legacy=True)
    torch.serialization.set_crc32_options(False)
    try:
        save_plain(tmp_path / "off", [state])
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("legacy", "off"):
        report = check(streammerge.describe(tmp_path / name))
        path = rank_file(tmp_path / name, 0, 1)
        assert report == CrcReport(0, 0, ((str(path), 2),))


# --- by command -----------------------------------------------------------------------------------


def test_merge_refuses_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_stored("fsdp2_w4__t213", tmp_path / "source")
    path = rank_file(tmp_path / "source", 2)
    keys = keys_at(path)
    stored = next(s for s in storages(path) if "model.norm.weight" in keys.get(s.begin, ()))
    flip(path, stored.begin, 6)
    arguments = ["merge", str(tmp_path / "source"), str(tmp_path / "target")]
    assert main([*arguments, "--check-crc"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"streammerge: error: {path}: the data of key 'model.norm.weight' are")
    assert hint == "hint: copy the file again from where it was written"
    assert not (tmp_path / "target").exists()

    # Nothing else would have noticed.
    assert main([*arguments, "--quiet"]) == 0
    merged = load_file(tmp_path / "target" / "model.safetensors")["model.norm.weight"]
    expected = load_file(DATA / "fsdp2_w4__t213" / "expected.safetensors")["model.norm.weight"]
    assert not torch.equal(merged, expected)


def test_what_a_merge_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = DATA / "fsdp2_w4__t213"
    stored = [s for path in source.glob("*.pt") for s in storages(path) if s.crc]
    nbytes = sum(s.end - s.begin for s in stored)
    assert main(["merge", str(source), str(tmp_path / "a"), "--check-crc", "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["crcs"] == {"members": len(stored), "bytes": nbytes, "without": []}
    assert "CRC" not in done.err
    assert main(["merge", str(source), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["crcs"] is None

    assert (
        main(["merge", str(DATA / "fsdp2_w4_legacy__t213"), str(tmp_path / "c"), "--check-crc"])
        == 0
    )
    done = capsys.readouterr()
    assert "checked the CRC-32 of 0 stored tensors, 0 B\n" in done.out
    (warning,) = [line for line in done.err.splitlines() if "CRC" in line]
    assert warning.startswith("streammerge: warning: --check-crc: no CRC-32 is stored for ")
    assert warning.endswith(" and 1 more")
