"""A corpus of bad checkpoints, made by hand, each with the error that it must end in.

Here are tricks with the container and the pickle, and damage that only several ranks together show;
what users run into is in `test_bad_input`. `test_every_error_is_reached` counts both.
"""

from __future__ import annotations

import os
import resource
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import checkpoints
import pickle_code as p
import pytest
import test_bad_input
import torch
from checkpoints import member_range, poke, rank_file, save_plain, save_ranks, sharded
from torch.distributed.device_mesh import DeviceMesh

import streammerge
from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    Progress,
    ReplicaMismatchError,
    SourceChangedError,
    SourceError,
    StreamMergeError,
    UnsafePickleError,
    UnsupportedError,
)

WEIGHT = torch.arange(24.0).view(12, 2)
Make = Callable[[Path], None]


@dataclass(frozen=True)
class Bad:
    """A bad checkpoint.

    Attributes:
        make: writes it.
        error: class of the error.
        message: its text; ``{source}`` is the directory, ``{rank[2]}`` the file of a rank,
            ``{name}`` the root folder in a file of one rank.
        meanwhile: what happens to the checkpoint while it is merged.
    """

    make: Make
    error: type[StreamMergeError]
    message: str
    meanwhile: Make | None


CORPUS: list[Bad] = []


def bad(
    error: type[StreamMergeError], message: str, meanwhile: Make | None = None
) -> Callable[[Make], Make]:
    """Enter a maker of a bad checkpoint into the corpus."""

    def enter(make: Make) -> Make:
        CORPUS.append(Bad(make, error, message, meanwhile))
        return make

    return enter


@contextmanager
def little_memory() -> Iterator[None]:
    """A gibibyte, whatever a file asks for."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.make.__name__)
def test_the_corpus(case: Bad, tmp_path: Path) -> None:
    source = tmp_path / "source"
    case.make(source)
    count = len(list(source.glob("*.pt")))
    pending = [case.meanwhile] if case.meanwhile is not None else []

    def progress(_: Progress) -> None:
        if pending:
            pending.pop()(source)

    with little_memory(), pytest.raises(StreamMergeError) as caught:
        streammerge.merge(source, tmp_path / "merged", progress=progress)
    files = [str(rank_file(source, rank, count)) for rank in range(count)]
    assert str(caught.value) == case.message.format(source=source, rank=files, name=NAME)
    assert type(caught.value) is case.error
    assert os.listdir(tmp_path) == ["source"]


def test_every_error_is_reached() -> None:
    """At least two checkpoints for each leaf of the tree that a checkpoint can lead to."""
    reached = Counter(case.error for case in CORPUS)
    reached.update(param.values[1] for param in test_bad_input.BAD)
    leaves = set(_leaves(SourceError))
    assert len(leaves) >= 8
    assert {leaf.__name__: reached[leaf] for leaf in leaves if reached[leaf] < 2} == {}
    assert len(CORPUS) >= 40


def _leaves(error: type[StreamMergeError]) -> Iterator[type[StreamMergeError]]:
    children = [c for c in error.__subclasses__() if c.__module__ == "streammerge.errors"]
    if not children:
        yield error
    for child in children:
        yield from _leaves(child)


# --- the container --------------------------------------------------------------------------------

NAME = "model_world_size_1_rank_0"


def one_file(source: Path, *names: str) -> Path:
    """A rank file of one rank with tensors of 96 bytes."""
    save_plain(source, [{name: WEIGHT.clone() for name in names or "ab"}])
    return rank_file(source, 0, 1)


def edit_directory(path: Path, member: str, field: int, code: str, *values: int) -> None:
    """Overwrite fields of one entry of the central directory."""
    content = path.read_bytes()
    at = content.rindex(f"{NAME}/{member}".encode()) - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    poke(path, at + field, struct.pack(code, *values))


def edit_local_header(path: Path, member: str, field: int, data: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        poke(path, archive.getinfo(f"{NAME}/{member}").header_offset + field, data)


def header_offset(path: Path, member: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(f"{NAME}/{member}").header_offset


def edit_end(path: Path, field: int, code: str, *values: int) -> None:
    """Overwrite fields of the end record, which is the last 22 bytes."""
    content = path.read_bytes()
    assert content[-22:-18] == b"PK\x05\x06"
    poke(path, len(content) - 22 + field, struct.pack(code, *values))


@bad(
    CorruptFileError,
    "{rank[0]}: member {name}/data/0 reaches into the next one or out of the file",
)
def two_members_that_overlap(source: Path) -> None:
    path = one_file(source)
    edit_directory(path, "data/1", 42, "<I", member_range(path, "data/0")[0] + 50)


@bad(
    CorruptFileError,
    "{rank[0]}: member {name}/data/0 lies outside the file or over another member",
)
def two_members_at_the_same_place(source: Path) -> None:
    path = one_file(source)
    edit_directory(path, "data/1", 42, "<I", header_offset(path, "data/0"))


@bad(
    CorruptFileError,
    "{rank[0]}: member {name}/data/1 lies outside the file or over another member",
)
def a_member_outside_the_file(source: Path) -> None:
    edit_directory(one_file(source), "data/1", 42, "<I", 1 << 30)


@bad(
    CorruptFileError,
    "{rank[0]}: member {name}/data/1 reaches into the next one or out of the file",
)
def a_member_that_reaches_into_the_directory(source: Path) -> None:
    path = one_file(source)
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    edit_directory(path, "data/1", 42, "<I", start - 96)
    edit_local = bytearray(path.read_bytes())
    name = f"{NAME}/data/1".encode()
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 2056, 0, 0, 0, 0, 0, 0, len(name), 0)
    edit_local[start - 96 : start - 96 + 30 + len(name)] = header + name
    path.write_bytes(edit_local)


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/data/0 contradicts the directory",
)
def two_members_that_are_swapped(source: Path) -> None:
    path = one_file(source)
    first, second = header_offset(path, "data/0"), header_offset(path, "data/1")
    edit_directory(path, "data/0", 42, "<I", second)
    edit_directory(path, "data/1", 42, "<I", first)


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/data.pkl contradicts the directory",
)
def a_local_header_of_another_name(source: Path) -> None:
    edit_local_header(one_file(source), "data.pkl", 30 + len(NAME) + 1, b"DATA")


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/byteorder contradicts the directory",
)
def a_local_header_of_a_shorter_name(source: Path) -> None:
    edit_local_header(one_file(source), "byteorder", 26, struct.pack("<H", len(NAME) + 9))


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/version contradicts the directory",
)
def a_local_header_of_another_size(source: Path) -> None:
    path = one_file(source)
    with checkpoints.members(path):
        pass  # repacked by zipfile, which writes sizes into the local headers
    edit_local_header(path, "version", 18, struct.pack("<II", 3, 3))


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/data.pkl contradicts the directory",
)
def a_local_header_of_another_method(source: Path) -> None:
    edit_local_header(one_file(source), "data.pkl", 8, struct.pack("<H", 8))


@bad(
    CorruptFileError,
    "{rank[0]}: the local header of member {name}/data/0 contradicts the directory",
)
def a_local_header_that_is_encrypted(source: Path) -> None:
    edit_local_header(one_file(source), "data/0", 6, struct.pack("<H", 2056 | 1))


@bad(CorruptFileError, "{rank[0]}: not a torch.save file (neither a zip archive nor a legacy one)")
def no_local_header(source: Path) -> None:
    edit_local_header(one_file(source), "data.pkl", 0, b"PK\x01\x02")


@bad(
    UnsupportedError,
    "{rank[0]}: member {name}/data/1 is compressed or encrypted; torch.save stores members as is",
)
def an_encrypted_member(source: Path) -> None:
    edit_directory(one_file(source), "data/1", 8, "<H", 2056 | 1)


@bad(
    UnsupportedError,
    "{rank[0]}: member {name}/data/1 is compressed or encrypted; torch.save stores members as is",
)
def a_deflated_member(source: Path) -> None:
    edit_directory(one_file(source), "data/1", 10, "<H", 8)


@bad(
    UnsupportedError,
    "{rank[0]}: member {name}/data/1 is compressed or encrypted; torch.save stores members as is",
)
def a_member_of_two_sizes(source: Path) -> None:
    edit_directory(one_file(source), "data/1", 20, "<I", 95)


@bad(CorruptFileError, "{rank[0]}: the zip directory names a member twice")
def a_member_twice(source: Path) -> None:
    path = one_file(source)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore", UserWarning)
        archive.writestr(f"{NAME}/data/0", bytes(96))


@bad(CorruptFileError, "{rank[0]}: a zip archive, but not one that torch.save wrote (no data.pkl)")
def two_pickles(source: Path) -> None:
    with zipfile.ZipFile(one_file(source), "a") as archive:
        archive.writestr("another/data.pkl", p.program(b"}"))


@bad(CorruptFileError, "{rank[0]}: a zip archive, but not one that torch.save wrote (no data.pkl)")
def a_pickle_in_a_deeper_folder(source: Path) -> None:
    source.mkdir()
    with zipfile.ZipFile(rank_file(source, 0, 1), "w") as archive:
        archive.writestr("../../etc/data.pkl", p.program(b"}"))


@bad(CorruptFileError, "{rank[0]}: the zip directory is damaged (zip64 values are missing)")
def a_zip64_size_that_is_missing(source: Path) -> None:
    edit_directory(one_file(source), "data/1", 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF)


@bad(CorruptFileError, "{rank[0]}: the local header of member x/data/0 contradicts the directory")
def a_zip64_size_of_16_eib(source: Path) -> None:
    def lie(name: str) -> bytes:
        return (
            struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1) if name == "data/0" else b""
        )

    write_zip(source, {"data.pkl": p.program(p.dict_(w=p.tensor())), "data/0": bytes(16)}, lie)


@bad(CorruptFileError, "{rank[0]}: member x/data/0 lies outside the file or over another member")
def a_zip64_offset_of_16_eib(source: Path) -> None:
    def lie(name: str) -> bytes:
        return struct.pack("<HHQQQ", 1, 24, 16, 16, (1 << 64) - 64) if name == "data/0" else b""

    write_zip(source, {"data.pkl": p.program(p.dict_(w=p.tensor())), "data/0": bytes(16)}, lie)


@bad(CorruptFileError, "{rank[0]}: member x/data.pkl lies outside the file or over another member")
def zip64_offsets_beyond_any_file(source: Path) -> None:
    def lie(name: str) -> bytes:
        offset = (1 << 64) - 64 * len(name)
        return struct.pack("<HHQQQ", 1, 24, 16, 16, offset) if name != "version" else b""

    members = {"version": b"3\n", "data.pkl": bytes(16), "data/0": bytes(16)}
    write_zip(source, members, lie)


@bad(CorruptFileError, "{rank[0]}: the zip directory is damaged (its two end records differ)")
def a_zip64_directory_of_another_length(source: Path) -> None:
    path = one_file(source)
    content = path.read_bytes()
    end = len(content) - 22
    assert content[end - 20 : end - 16] == b"PK\x06\x07"
    record = end - 20 - 56
    assert content[record : record + 4] == b"PK\x06\x06"
    poke(path, record + 32, struct.pack("<Q", 3))


@bad(CorruptFileError, "{rank[0]}: the zip directory is damaged (no zip64 record)")
def a_zip64_record_outside_the_file(source: Path) -> None:
    path = one_file(source)
    poke(path, path.stat().st_size - 22 - 20 + 8, struct.pack("<Q", 1 << 60))


@bad(UnsupportedError, "{rank[0]}: a zip archive in several parts")
def an_archive_in_parts(source: Path) -> None:
    path = one_file(source)
    record = path.stat().st_size - 22 - 20 - 56
    poke(path, record + 16, struct.pack("<I", 1))


@bad(CorruptFileError, "{rank[0]}: the zip directory is damaged (its length is another one)")
def a_directory_with_an_entry_less(source: Path) -> None:
    path = one_file(source)
    record = path.stat().st_size - 22 - 20 - 56
    (count,) = struct.unpack("<Q", path.read_bytes()[record + 32 : record + 40])
    poke(path, record + 24, struct.pack("<QQ", count - 1, count - 1))
    edit_end(path, 8, "<HH", count - 1, count - 1)


@bad(CorruptFileError, "{rank[0]}: the zip directory is damaged (it does not fit into the file)")
def a_directory_behind_a_gap(source: Path) -> None:
    path = one_file(source)
    content = path.read_bytes()
    record = len(content) - 22 - 20 - 56
    path.write_bytes(content[:record] + bytes(8) + content[record:])
    poke(path, path.stat().st_size - 22 - 20 + 8, struct.pack("<Q", record + 8))


@bad(UnsupportedError, "{rank[0]}: its zip directory has 104,857,600 bytes, more than is read")
def a_directory_of_100_mib(source: Path) -> None:
    """It is a hole, so that it takes no room on the disk."""
    source.mkdir()
    path = rank_file(source, 0, 1)
    size, count = 100 << 20, 1000
    with path.open("wb") as stream:
        stream.write(b"PK\x03\x04")
        stream.truncate(4 + size)
        stream.seek(0, os.SEEK_END)
        stream.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, 4, 0))


@bad(UnsupportedError, "{rank[0]}: member x/data.pkl has 1,073,741,824 bytes, more than is read")
def a_pickle_of_a_gibibyte(source: Path) -> None:
    source.mkdir()
    path = rank_file(source, 0, 1)
    name = b"x/data.pkl"
    entry = (0, 0, 0, 0, 0, 1 << 30, 1 << 30)
    local = struct.pack(
        "<4sH5H3I2H".replace("H5H", "5H"), b"PK\x03\x04", 0, *entry[:4], *entry[4:], len(name), 0
    )
    central = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", 0, 0, *entry[:4], *entry[4:], len(name), 0, 0, 0, 0, 0, 0
    )
    with path.open("wb") as stream:
        stream.write(local + name)
        stream.truncate(len(local + name) + (1 << 30))
        start = stream.seek(0, os.SEEK_END)
        stream.write(central + name)
        size = len(central + name)
        stream.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, size, start, 0))


@bad(
    CorruptFileError, "{rank[0]}: data.pkl is damaged: its CRC-32 is not that of the zip directory"
)
def a_pickle_with_a_flipped_bit(source: Path) -> None:
    path = one_file(source)
    poke(path, member_range(path, "data.pkl")[1] - 1, b"/")


@bad(
    CorruptFileError, "{rank[0]}: byteorder is damaged: its CRC-32 is not that of the zip directory"
)
def a_byte_order_with_a_flipped_bit(source: Path) -> None:
    path = one_file(source)
    poke(path, member_range(path, "byteorder")[0], b"m")


@bad(CorruptFileError, "{rank[0]}: version is damaged: its CRC-32 is not that of the zip directory")
def a_version_with_a_flipped_bit(source: Path) -> None:
    path = one_file(source)
    poke(path, member_range(path, "version")[0], b"1")


@bad(
    CorruptFileError, "{rank[0]}: data.pkl is damaged: its CRC-32 is not that of the zip directory"
)
def a_pickle_whose_checksum_was_removed(source: Path) -> None:
    edit_directory(one_file(source), "data.pkl", 16, "<I", 0)


def write_zip(source: Path, members: dict[str, bytes], extra: Callable[[str], bytes]) -> None:
    """A zip archive whose directory has the extra fields that `extra` gives, with 32-bit marks."""
    source.mkdir()
    parts: list[bytes] = []
    directory = b""
    for name, data in members.items():
        start = sum(map(len, parts))
        full = f"x/{name}".encode()
        crc, size = zlib.crc32(data), len(data)
        parts += [
            struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 0, 0, 0, 0, crc, size, size, len(full), 0),
            full + data,
        ]
        field = extra(name)
        sizes = (0xFFFFFFFF, 0xFFFFFFFF) if field else (size, size)
        offset = 0xFFFFFFFF if len(field) > 20 else start
        directory += struct.pack(
            "<4s6H3I5H2I",
            *(
                b"PK\x01\x02",
                0,
                0,
                0,
                0,
                0,
                0,
                crc,
                *sizes,
                len(full),
                len(field),
                0,
                0,
                0,
                0,
                offset,
            ),
        )
        directory += full + field
    start = sum(map(len, parts))
    end = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), start, 0
    )
    rank_file(source, 0, 1).write_bytes(b"".join(parts) + directory + end)


# --- the legacy container -------------------------------------------------------------------------


def legacy_file(source: Path, value: bytes, keys: bytes, data: bytes) -> None:
    """A legacy rank file of one rank."""
    source.mkdir()
    magic = p.program(p.number(torch.serialization.MAGIC_NUMBER))
    protocol = p.program(p.number(1001))
    system = p.program(p.dict_(little_endian=b"\x88"))
    rank_file(source, 0, 1).write_bytes(
        magic + protocol + system + p.program(value) + p.program(keys) + data
    )


FOUR_FLOATS = struct.pack("<q4f", 4, 1, 2, 3, 4)


@bad(CorruptFileError, "{rank[0]}: storage '0' counts 5, the pickle 4")
def a_legacy_file_that_counts_otherwise(source: Path) -> None:
    data = struct.pack("<q5f", 5, 1, 2, 3, 4, 5)
    legacy_file(source, p.dict_(w=p.tensor()), b"]" + p.text("0") + b"a", data)


@bad(CorruptFileError, "{rank[0]}: storage '0' is stored twice")
def a_legacy_file_with_a_storage_twice(source: Path) -> None:
    keys = b"](" + p.text("0") * 2 + b"e"
    legacy_file(source, p.dict_(w=p.tensor()), keys, FOUR_FLOATS * 2)


@bad(CorruptFileError, "{rank[0]}: storage '0' is named in the pickle, but missing")
def a_legacy_file_without_its_storage(source: Path) -> None:
    legacy_file(source, p.dict_(w=p.tensor()), b"]", b"")


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: it ends too early")
def a_legacy_file_with_a_pickle_that_does_not_end(source: Path) -> None:
    legacy_file(source, b"X\xff\xff\xff\x7f", b"]", b"")


# --- the pickle -----------------------------------------------------------------------------------


def one_pickle(source: Path, *code: bytes) -> None:
    source.mkdir()
    p.pack(rank_file(source, 0, 1), p.program(*code))


# Sixty tuples of twice the one before.
DOUBLED = b"N" + b"2\x86" * 60


@bad(
    UnsupportedError,
    "{rank[0]}: key ((((...), (...)), ((...), (...))), (((...), (...)), ((...), (...)))) is not "
    "a name",
)
def a_key_that_takes_ages_to_hash(source: Path) -> None:
    one_pickle(source, b"}" + DOUBLED + p.tensor() + b"s")


@bad(
    UnsupportedError,
    "{rank[0]}: several dicts of tensors to choose from: 'a', ((((...), (...)), ((...), (...))), "
    "(((...), (...)), ((...), (...))))",
)
def a_key_without_end_beside_the_model(source: Path) -> None:
    inner = b"}" + p.text("v") + p.tensor() + b"s"
    one_pickle(source, b"}(" + p.text("a") + inner + DOUBLED + inner + b"u")


@bad(
    CorruptFileError,
    "{rank[0]}: the pickle is damaged: a tensor of sizes ((((...), (...)), ((...), (...))), "
    "(((...), (...)), ((...), (...)))), strides (1,)",
)
def sizes_without_end(source: Path) -> None:
    one_pickle(source, p.dict_(w=p.tensor(sizes=DOUBLED)))


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: a hole in its memo")
def a_memo_of_two_billion_places(source: Path) -> None:
    one_pickle(source, b"}r\xff\xff\xff\x7f")


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: it ends too early")
def a_text_of_16_eib(source: Path) -> None:
    one_pickle(source, b"\x8d" + b"\xff" * 8)


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: an integer of 12,501 bytes")
def an_integer_of_many_digits(source: Path) -> None:
    one_pickle(source, p.dict_(step=p.number(1 << 100_000)))


@bad(
    UnsupportedError,
    "{rank[0]}: its pickle is larger than anything that is read (128 MiB, or values of 2048 MiB)",
)
def copies_of_a_text_that_fill_the_memory(source: Path) -> None:
    encode = p.name("_codecs", "encode") + b"q\x00" + p.text("x" * (1 << 20))
    arguments = p.text("latin1") + b"\x86q\x01"
    one_pickle(source, encode, arguments, b"h\x00h\x01R0" * 3000)


@bad(UnsupportedError, "{rank[0]}: it holds a tuple, not a dict of tensors")
def nested_a_million_times(source: Path) -> None:
    one_pickle(source, b"N" + b"\x85" * 1_000_000)


@bad(UnsupportedError, "{source}: the rank files hold no tensors (keys: 'model')")
def a_dict_that_is_its_own_model(source: Path) -> None:
    one_pickle(source, b"}q\x00" + p.text("model") + b"h\x00s")


@bad(
    CorruptFileError,
    "{rank[0]}: the pickle is damaged: opcode 0x64, which torch.save does not write",
)
def protocol_0(source: Path) -> None:
    one_pickle(source, b"(dp0\nVw\nI1\ns")


@bad(
    UnsafePickleError,
    "{rank[0]}: the pickle asks for the global os.system, which no rank file needs; nothing was "
    "run",
)
def a_module_of_the_system(source: Path) -> None:
    one_pickle(source, p.text("os"), p.text("system"), b"\x93" + p.text("true") + b"\x85R")


@bad(
    UnsafePickleError,
    "{rank[0]}: the pickle asks for the global 'os\\nerror: all is well.sy\\x1b[31mstem', which "
    "no rank file needs; nothing was run",
)
def a_name_of_two_lines(source: Path) -> None:
    one_pickle(source, p.text("os\nerror: all is well"), p.text("sy\x1b[31mstem"), b"\x93")


@bad(UnsafePickleError, "{rank[0]}: the pickle asks for getattr(..., 'mro'); nothing was run")
def an_attribute_of_a_stand_in(source: Path) -> None:
    one_pickle(
        source, p.call(p.name("builtins", "getattr"), p.name("torch", "Size"), p.text("mro"))
    )


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: it calls what is not a function")
def a_call_of_a_tensor(source: Path) -> None:
    one_pickle(source, p.call(p.tensor()))


@bad(CorruptFileError, "{rank[0]}: the pickle is damaged: a state for a StridedTensor")
def a_state_for_a_tensor(source: Path) -> None:
    one_pickle(source, p.build(p.tensor(), p.dict_(sizes=b")")))


@bad(
    CorruptFileError,
    "{rank[0]}: the pickle is damaged: unknown persistent id ('module', None, None, None, None)",
)
def an_unknown_persistent_id(source: Path) -> None:
    one_pickle(source, p.tuple_(p.text("module"), b"N", b"N", b"N", b"N") + b"Q")


@bad(
    CorruptFileError,
    "{rank[0]}: the pickle is damaged: unknown persistent id ('storage', ('storage', 'float32'), "
    "'0', 'cpu', -4)",
)
def a_storage_of_negative_length(source: Path) -> None:
    one_pickle(source, p.dict_(w=p.storage(numel=p.number(-4))))


@bad(UnsupportedError, "{rank[0]}: a tensor is stored as a negated view (neg bit)")
def a_negated_view(source: Path) -> None:
    rebuild = p.name("torch._utils", "_rebuild_tensor_v2")
    flags = p.dict_(neg=b"\x88")
    one_pickle(
        source,
        p.dict_(
            w=p.call(rebuild, p.storage(), b"K\x00", p.tuple_(), p.tuple_(), b"\x89", b"N", flags)
        ),
    )


@bad(
    CorruptFileError,
    "{rank[0]}: the pickle is damaged: a tensor of sizes (1, 1, 1, 1, 1, 1, ...), strides (1, 1, "
    "1, 1, 1, 1, ...)",
)
def a_tensor_of_65_dims(source: Path) -> None:
    ones = p.tuple_(*[b"K\x01"] * 65)
    one_pickle(source, p.dict_(w=p.tensor(sizes=ones, strides=ones)))


@bad(UnsupportedError, "{rank[0]}: key 'w': dtype quint8 has no equivalent in safetensors")
def a_quantized_tensor(source: Path) -> None:
    rebuild = p.name("torch._utils", "_rebuild_tensor_v2")
    storage = p.storage(kind=p.name("torch", "QUInt8Storage"), numel=b"K\x10")
    one_pickle(
        source,
        p.dict_(w=p.call(rebuild, storage, b"K\x00", p.tuple_(b"K\x10"), p.tuple_(b"K\x01"))),
    )


@bad(
    CorruptFileError,
    "{rank[0]}: key 'w\\nhint: all is well': local tensor [4] of F32 reaches byte 52 of a "
    "storage of 16 bytes",
)
def a_key_of_two_lines(source: Path) -> None:
    one_pickle(source, b"}" + p.text("w\nhint: all is well") + p.tensor(offset=b"K\x09") + b"s")


# --- device meshes and placements -----------------------------------------------------------------

FLAT = p.name("torch.distributed._mesh_layout", "_FlatLayout")
STRIDED_SHARD = p.name(f"{p.DTENSOR}.placement_types", "_StridedShard")


@bad(CorruptFileError, "{rank[0]}: key 'w': a device mesh whose layout is damaged")
def a_mesh_layout_without_end(source: Path) -> None:
    axes = p.tuple_(p.call(FLAT, DOUBLED, DOUBLED))
    one_pickle(source, p.dict_(w=p.dtensor(axes=axes)))


@bad(CorruptFileError, "{rank[0]}: key 'w': a device mesh whose layout leaves its rank map")
def a_mesh_that_leaves_its_ranks(source: Path) -> None:
    axes = p.tuple_(p.call(FLAT, p.number(1 << 62), b"K\x01"))
    one_pickle(source, p.dict_(w=p.dtensor(axes=axes)))


@bad(CorruptFileError, "{rank[0]}: key 'w': a device mesh of shape [2] with ranks (0, 0)")
def a_mesh_with_a_rank_twice(source: Path) -> None:
    axes = p.tuple_(p.call(FLAT, b"K\x02", b"K\x01"))
    ranks = p.tuple_(b"K\x00", b"K\x00")
    one_pickle(source, p.dict_(w=p.dtensor(axes=axes, ranks=ranks)))


@bad(
    PlacementError,
    "{rank[0]}: key 'w': split factors that cut a local shard into 1,099,511,627,776 parts",
)
def a_split_factor_of_a_trillion(source: Path) -> None:
    placement = p.call(STRIDED_SHARD, b"K\x00", p.number(1 << 40))
    one_pickle(source, p.dict_(w=p.dtensor(placement=placement)))


@bad(PlacementError, "{rank[0]}: key 'w': 2 placements for a mesh of 1 dims")
def more_placements_than_mesh_dims(source: Path) -> None:
    shard = p.call(p.name(f"{p.DTENSOR}.placement_types", "Shard"), b"K\x00")
    one_pickle(source, p.dict_(w=p.dtensor(placements=p.tuple_(shard, shard))))


@bad(UnsupportedError, "{rank[0]}: key 'w': a placement of an unknown kind (object)")
def a_placement_of_another_class(source: Path) -> None:
    one_pickle(source, p.dict_(w=p.dtensor(placement=p.call(p.name("torch", "device")))))


@bad(CorruptFileError, "{rank[0]}: key 'w': a DTensor whose shard_order is damaged")
def a_shard_order_of_something_else(source: Path) -> None:
    one_pickle(source, p.dict_(w=p.dtensor(shard_order=p.tuple_(b"N"))))


# --- ranks that contradict each other -------------------------------------------------------------


@bad(
    InconsistentRanksError,
    "key 'w': rank 1 is in the device mesh [1, 2] as 2 by the file of another rank, in [0, 1] as "
    "2 by {rank[1]}",
)
def two_meshes_for_one_rank(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT, sizes=(3,))
        tensor._spec.mesh = DeviceMesh("cpu", [1, 2] if rank == 2 else [0, 1])
        return {"w": checkpoints.reshaped(tensor, torch.ones(6, 2))}

    save_ranks(source, build, world_size=3)


@bad(PlacementError, "key 'w': no rank of its device mesh holds it")
def a_tensor_that_no_rank_of_its_mesh_holds(source: Path) -> None:
    def build(rank: int) -> dict[str, object]:
        tensor = sharded(WEIGHT)
        tensor._spec.mesh = DeviceMesh("cpu", [0, 1])
        return (
            {"v": WEIGHT}
            if rank < 2
            else {"v": WEIGHT, "w": checkpoints.reshaped(tensor, torch.ones(0, 2))}
        )

    save_ranks(source, build)


@bad(InconsistentRanksError, "{rank[1]}: key 'x': a tensor here, but none (float) in {rank[0]}")
def a_tensor_on_one_rank_and_none_on_another(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT, "x": 1.5}, {"w": WEIGHT, "x": WEIGHT}])


@bad(InconsistentRanksError, "{source}/fsdp_config.json: says world_size 3, the rank files say 2")
def a_config_of_three_ranks(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 2)
    (source / "fsdp_config.json").write_text('{"world_size": 3}')


@bad(
    CheckpointNotFoundError,
    "{source}: 2 checkpoints to choose from: {source}/step_1, {source}/step_2",
)
def two_checkpoints_to_choose_from(source: Path) -> None:
    for step in (1, 2):
        save_plain(source / f"step_{step}", [{"w": WEIGHT}])


@bad(CheckpointNotFoundError, "{source}: 4 of 8 rank files missing: ranks 4-7")
def half_a_checkpoint(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 8)
    for rank in range(4, 8):
        rank_file(source, rank, 8).unlink()


@bad(
    CheckpointNotFoundError,
    "{source}: 999999999999 of 1000000000000 rank files missing: ranks 0-6, 8-999999999999",
)
def one_file_of_a_trillion(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}])
    rank_file(source, 0, 1).rename(rank_file(source, 7, 1_000_000_000_000))


@bad(CorruptFileError, "{source}/fsdp_config.json: more than 1,048,576 bytes")
def a_config_of_many_gigabytes(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}])
    (source / "fsdp_config.json").touch()
    os.truncate(source / "fsdp_config.json", 1 << 33)


@bad(
    CorruptFileError,
    "{source}/fsdp_config.json: not JSON (Expecting value: line 1 column 1 (char 0))",
)
def a_config_that_is_a_pipe(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}])
    os.mkfifo(source / "fsdp_config.json")


@bad(CorruptFileError, "{rank[0]}: not a regular file")
def a_rank_file_that_is_a_pipe(source: Path) -> None:
    source.mkdir()
    os.mkfifo(rank_file(source, 0, 1))


@bad(CorruptFileError, "{rank[0]}: not a regular file")
def a_rank_file_that_is_a_device(source: Path) -> None:
    source.mkdir()
    rank_file(source, 0, 1).symlink_to("/dev/zero")


@bad(ReplicaMismatchError, "key 'b': rank 1 holds another value than rank 0 (first at index [0])")
def a_buffer_with_another_nan(source: Path) -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    save_plain(source, [{"b": nan[rank : rank + 1].clone()} for rank in range(2)])


@bad(
    ReplicaMismatchError,
    "key 'a': rank 1 holds another value than rank 0 (first at index [0]) (and 1 more keys: 'b')",
)
def storages_exchanged_between_ranks(source: Path) -> None:
    """The files are fine one by one, their checksums too."""
    save_plain(source, [{"a": torch.ones(3), "b": torch.zeros(3)}] * 2)
    with checkpoints.members(rank_file(source, 1, 2)) as members:
        members["data/0"], members["data/1"] = members["data/1"], members["data/0"]


def cut(source: Path) -> None:
    checkpoints.cut(rank_file(source, 1, 2), -10)


def touch(source: Path) -> None:
    os.utime(rank_file(source, 1, 2), ns=(0, 0))


@bad(
    SourceChangedError,
    "{rank[1]}: changed while it was merged (size, time or inode)",
    meanwhile=cut,
)
def a_file_that_is_cut_meanwhile(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 2)


@bad(
    SourceChangedError,
    "{rank[1]}: changed while it was merged (size, time or inode)",
    meanwhile=touch,
)
def a_file_that_is_written_meanwhile(source: Path) -> None:
    save_plain(source, [{"w": WEIGHT}] * 2)


@pytest.mark.parametrize("edit", ["place", "name", "size", "method"])
def test_a_local_header_that_is_looked_at_late(tmp_path: Path, edit: str) -> None:
    """Those of the first, middle and last storage come with the metadata, others when copied."""
    path = one_file(tmp_path / "source", *"abcdefghi")
    at, other = header_offset(path, "data/2"), header_offset(path, "data/1")
    if edit == "place":
        edit_directory(path, "data/1", 42, "<I", at)
        edit_directory(path, "data/2", 42, "<I", other)
    elif edit == "name":
        edit_local_header(path, "data/2", 30 + len(NAME) + 6, b"1")
    elif edit == "size":
        edit_local_header(path, "data/2", 22, struct.pack("<I", 95))
    else:
        edit_local_header(path, "data/2", 8, struct.pack("<H", 8))
    plan = streammerge.plan(streammerge.describe(tmp_path / "source"))
    with pytest.raises(CorruptFileError) as caught:
        streammerge.write(plan, tmp_path / "merged")
    said = f"the local header at byte {at:,} contradicts the zip directory"
    assert str(caught.value) == f"{path}: {said}"
    assert os.listdir(tmp_path) == ["source"]


# --- what is no harm ------------------------------------------------------------------------------


def test_names_of_members_lead_nowhere(tmp_path: Path) -> None:
    """Nothing is unpacked, so `../` in a name means nothing, even where it is the root's."""
    source = tmp_path / "a" / "b" / "source"
    source.mkdir(parents=True)
    with zipfile.ZipFile(rank_file(source, 0, 1), "w") as archive:
        archive.writestr("../data.pkl", p.program(p.dict_(w=p.tensor())))
        archive.writestr("../data/0", struct.pack("<4f", 1, 2, 3, 4))
        archive.writestr("../../../evil", b"evil")
        archive.writestr("/tmp/evil", b"evil")
    streammerge.merge(source, tmp_path / "a" / "b" / "merged")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "model.safetensors",
        "model_world_size_1_rank_0.pt",
    ]


@pytest.mark.parametrize("what", ["a line\nbreak", "\x1b[31mred"])
def test_what_a_name_holds_steers_no_terminal(tmp_path: Path, what: str) -> None:
    save_plain(tmp_path / "source", [{what: torch.zeros(2)}, {what: torch.ones(2)}])
    with pytest.raises(StreamMergeError) as caught:
        streammerge.merge(tmp_path / "source", tmp_path / "merged")
    assert str(caught.value).isprintable()
    assert ascii(what)[1:-1] in str(caught.value)
