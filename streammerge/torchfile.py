"""The container that torch.save writes: where the pickle and each stored blob lie in the file.

Two kinds: a zip archive with stored members (the default since torch 1.6) and the legacy stream of
pickles. Only metadata are read here, with plain reads: a file that is cut short while it is mapped
would kill the process, and a map of the whole file would drag its pages into it.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from streammerge.checkpoint import File, Members
from streammerge.dtypes import FROM_TORCH, ITEMSIZE
from streammerge.errors import CorruptFileError, SourceError, UnsupportedError, about
from streammerge.pickle_machine import MAX_BYTES, EndOfPickleError
from streammerge.unpickler import Storage, Unpickled, brief, unpickle

_MAX_COMMENT = (1 << 16) - 1
_MAX_DIRECTORY = 64 << 20  # bytes; that of 45,000 tensors has 5 MB
_MAX_NOTE = 1 << 10  # bytes of members like byteorder
_UNUSED_NOTES = (b"version", b".format_version", b".data/serialization_id")

# Zip records: APPNOTE.TXT of PKWARE, sections 4.3.7 to 4.3.16.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ZIP64_EXTRA = 1
_IN_ZIP64_EXTRA = 0xFFFFFFFF
HAS_DESCRIPTOR = 1 << 3  # flag: sizes and CRC follow the data, not in the local header
_IGNORED_FLAGS = 0b110  # how hard a compressor tried
_PLAIN_FLAGS = HAS_DESCRIPTOR | 1 << 11 | _IGNORED_FLAGS  # 1 << 11: the name is UTF-8
_ALIGNMENT = 64  # torch pads members to this, or to what .storage_alignment says

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LEGACY_FIRST_READ = 1 << 20

MAX_LOCAL_HEADER = _LOCAL_HEADER.size + 0xFFFF  # with its name, without its extra field


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """A torch.save file, its pickle read into stand-ins.

    Attributes:
        file: path, identity and members.
        root: the pickled object.
        members: storage key -> index into ``file.members``.
        pickle_nbytes: bytes of the pickle.
        stem: what torch.save called the file, without its ending; empty where it does not say so.
    """

    file: File
    root: object
    members: Mapping[str, int]
    pickle_nbytes: int
    stem: str = ""


def read_torch_file(path: str, *, foreign: bool = False) -> TorchFile:
    """Read the metadata of a torch.save file.

    What that takes is bounded, whatever the file holds; see `pickle_machine`.

    Args:
        path: the file.
        foreign: whether its pickle may hold objects of any class, see `unpickler.Foreign`.

    Raises:
        CorruptFileError: empty, cut short, damaged, or no torch.save file.
        UnsafePickleError: a pickle outside the allow-list.
        UnsupportedError: compressed, big-endian, or with larger metadata than any checkpoint has.
    """
    members, stem = Members(), ""
    try:
        with about(path), opened(path) as fd:
            status = os.fstat(fd)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise CorruptFileError("not a regular file")
            if status.st_size == 0:
                raise CorruptFileError("the file is empty (0 bytes)")
            if os.pread(fd, 4, 0) == b"PK\x03\x04":
                archive, unpickled = read_zip(Span(fd, 0, status.st_size), foreign=foreign)
                keys = _add_blobs(archive, unpickled, members)
                root, pickle_nbytes = unpickled.value, unpickled.end
                stem = archive.prefix.decode(errors="replace").removesuffix("/")
            else:
                root, keys, pickle_nbytes = _read_legacy(fd, status.st_size, members, foreign)
    except EndOfPickleError as error:  # there is no more of it
        raise CorruptFileError(str(error)) from error
    file = File(path, status.st_size, status.st_mtime_ns, status.st_ino, members)
    return TorchFile(file, root, keys, pickle_nbytes, stem)


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of a file that is read. A pipe of that name is not waited for.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def storage_nbytes(storage: Storage) -> int:
    """Bytes of a storage by its dtype and number of elements."""
    if storage.dtype is None:
        return storage.numel
    return storage.numel * _itemsize(storage.dtype)


def _itemsize(dtype: str) -> int:
    name = FROM_TORCH.get(dtype)
    if name is not None:
        return ITEMSIZE[name]
    return {"complex128": 16, "complex32": 4, "qint32": 4}.get(dtype, 1)


def _read_range(fd: int, start: int, size: int) -> bytes:
    """Bytes of a file; fewer where it ends."""
    parts = []
    while size > 0 and (part := os.pread(fd, size, start)):
        parts.append(part)
        start += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


# --- zip ---


class Span(NamedTuple):
    """A part of an open file: all of it, or a chunk that was appended to others.

    Attributes:
        fd: descriptor of the file.
        start: first byte.
        size: bytes.
    """

    fd: int
    start: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset in the part on; fewer where the file ends."""
        return _read_range(self.fd, self.start + offset, size)


class Entry(NamedTuple):
    """A member as the central directory has it.

    Attributes:
        at: where its entry in the directory starts.
        header_offset: where its local header starts.
    """

    at: int
    name: bytes
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    header_offset: int

    def __str__(self) -> str:
        return ascii(self.name.decode("utf-8", "backslashreplace"))[1:-1][:200]


def read_zip(span: Span, *, foreign: bool = False) -> tuple[Archive, Unpickled]:
    """Read the directory and the pickle of a zip archive that torch.save wrote.

    Args:
        span: where it is.
        foreign: as for `read_torch_file`.

    Raises:
        SourceError: as `read_torch_file` does, without the path.
    """
    archive = Archive(span)
    pickles = [n for n in archive.entries if n.endswith(b"/data.pkl") and n.count(b"/") == 1]
    if len(pickles) != 1:
        raise CorruptFileError("a zip archive, but not one that torch.save wrote (no data.pkl)")
    prefix = archive.prefix = pickles[0].removesuffix(b"data.pkl")

    if archive.read_note(prefix + b"byteorder", b"little") != b"little":
        raise UnsupportedError("the file was written on a big-endian machine")
    text = archive.read_note(prefix + b".storage_alignment", b"%d" % _ALIGNMENT)
    if not text.isdigit() or len(text) > 10 or not 0 < int(text) <= 1 << 30:
        raise CorruptFileError(f".storage_alignment says {text!r:.40}")
    archive.alignment = int(text)
    data = archive.read(pickles[0])
    try:
        return archive, unpickle(data, foreign=foreign)._replace(end=len(data))
    except EndOfPickleError as error:  # there is no more of it
        raise CorruptFileError(str(error)) from error


def _add_blobs(archive: Archive, unpickled: Unpickled, members: Members) -> dict[str, int]:
    """Add the stored blobs that a pickle names to the members of its file."""
    aligned = archive.is_aligned()
    keys = {}
    for key, storage in unpickled.storages.items():
        blob = archive.blob(key, storage)
        if aligned:
            data_offset = _aligned_data_offset(blob, archive.alignment)
            archive.check_inside(blob, data_offset)
        else:
            data_offset = archive.data_offset(blob)
        keys[key] = members.add(
            blob.header_offset, data_offset, blob.size, blob.crc, zlib.crc32(blob.name)
        )
    for name in _UNUSED_NOTES:  # read for their CRC-32
        archive.read_note(archive.prefix + name, b"")
    return keys


class Archive:
    """The central directory of a zip file, and the few members that are read here.

    Nothing is unpacked, so a name can lead nowhere; names are compared, no more.

    Attributes:
        entries: name -> member.
        directory_offset: where the directory starts.
        prefix: the folder that all members of torch.save are in, with its slash.
        alignment: what its members are padded to.

    Raises:
        CorruptFileError: a directory that contradicts itself.
        UnsupportedError: compressed or encrypted members.
    """

    prefix = b""
    alignment = _ALIGNMENT

    def __init__(self, span: Span) -> None:
        directory, count, end = _find_directory(span)
        self._span = span
        self.directory_offset = end
        self.entries = {entry.name: entry for entry in _parse_directory(directory, count, end)}
        if len(self.entries) != count:
            raise CorruptFileError("the zip directory names a member twice")
        for entry in self.entries.values():
            if entry.method or entry.stored != entry.size or entry.flags & ~_PLAIN_FLAGS:
                raise UnsupportedError(
                    f"member {entry} is compressed or encrypted; torch.save stores members as is",
                    hint="unpack the archive and pack it again without compression (zip -0)",
                )
        # A member has room up to the next one.
        in_order = sorted(self.entries.values(), key=lambda entry: entry.header_offset)
        self._limits = {a.name: min(b.header_offset, end) for a, b in pairwise(in_order)}
        if in_order:
            self._limits[in_order[-1].name] = end
        # torch can be told to compute no CRCs; then all are 0.
        self._has_crcs = any(entry.crc for entry in in_order)

    def read(self, name: bytes) -> bytes:
        """The bytes of a member, which are those that were stored."""
        entry = self.entries[name]
        if entry.size > MAX_BYTES:
            raise UnsupportedError(f"member {entry} has {entry.size:,} bytes, more than is read")
        data = self._span.read(self.data_offset(entry), entry.size)
        if self._has_crcs and zlib.crc32(data) != entry.crc:
            short = str(entry).rpartition("/")[2]
            raise CorruptFileError(
                f"{short} is damaged: its CRC-32 is not that of the zip directory"
            )
        return data

    def read_note(self, name: bytes, default: bytes) -> bytes:
        """The bytes of a small member, or `default` if there is none."""
        entry = self.entries.get(name)
        if entry is None:
            return default
        if entry.size > _MAX_NOTE:
            raise CorruptFileError(f"member {entry} has {entry.size:,} bytes")
        return self.read(name)

    def blob(self, key: str, storage: Storage) -> Entry:
        """The member that holds a storage.

        Raises:
            CorruptFileError: there is none of that size.
        """
        blob = self.entries.get(self.prefix + b"data/" + key.encode())
        if blob is None:
            raise CorruptFileError(f"storage {key!r:.40} is named in the pickle, but missing")
        nbytes = storage_nbytes(storage)
        if blob.size != nbytes:
            raise CorruptFileError(
                f"storage {key!r:.40} has {blob.size:,} bytes, the pickle says {nbytes:,}"
            )
        return blob

    def data_offset(self, entry: Entry) -> int:
        """Where a member's bytes start. Its local header must agree with the directory."""
        if entry.header_offset + _LOCAL_HEADER.size > self._limits[entry.name]:
            raise CorruptFileError(f"member {entry} lies outside the file or over another member")
        header = self._span.read(entry.header_offset, _LOCAL_HEADER.size + len(entry.name))
        if header[:4] != b"PK\x03\x04":
            raise CorruptFileError(f"member {entry} has no local header where the directory says")
        distance = read_local_header(header, zlib.crc32(entry.name), entry.size, entry.crc)
        if distance is None:
            raise CorruptFileError(f"the local header of member {entry} contradicts the directory")
        self.check_inside(entry, entry.header_offset + distance)
        return entry.header_offset + distance

    def check_inside(self, entry: Entry, data_offset: int) -> None:
        """Check that a member ends before the next one starts."""
        if data_offset + entry.size > self._limits[entry.name]:
            raise CorruptFileError(f"member {entry} reaches into the next one or out of the file")

    def is_aligned(self) -> bool:
        """Whether the stored blobs are padded as torch does it.

        Judged by the first, middle and last. The others are checked when they are first used.
        """
        folder = self.prefix + b"data/"
        entries = [entry for name, entry in self.entries.items() if name.startswith(folder)]
        return all(
            self.data_offset(entry) == _aligned_data_offset(entry, self.alignment)
            for entry in entries[:1] + entries[len(entries) // 2 :][:1] + entries[-1:]
        )


def _find_directory(span: Span) -> tuple[bytes, int, int]:
    """The central directory, its number of entries, and where it starts."""
    size = span.size
    tail_size = min(size, _END.size + _MAX_COMMENT)
    tail = span.read(size - tail_size, tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CorruptFileError("the file is cut short: it has no zip directory at its end")
    _, disk, first_disk, count_here, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = size - tail_size + at
    if count == 0xFFFF or _IN_ZIP64_EXTRA in (nbytes, offset) or _has_locator(tail, at):
        short = (count, nbytes, offset)
        end, disk, first_disk, count_here, count, nbytes, offset = _read_end64(span, end)
        if any(
            value not in (mark, whole)
            for value, mark, whole in zip(
                short,
                (0xFFFF, _IN_ZIP64_EXTRA, _IN_ZIP64_EXTRA),
                (count, nbytes, offset),
                strict=True,
            )
        ):
            raise CorruptFileError("the zip directory is damaged (its two end records differ)")
    if disk or first_disk or count_here != count:
        raise UnsupportedError("a zip archive in several parts")
    if offset + nbytes != end or count * _CENTRAL_HEADER.size > nbytes:
        raise CorruptFileError("the zip directory is damaged (it does not fit into the file)")
    if nbytes > _MAX_DIRECTORY:
        raise UnsupportedError(f"its zip directory has {nbytes:,} bytes, more than is read")
    return span.read(offset, nbytes), count, offset


def _has_locator(tail: bytes, end: int) -> bool:
    start = end - _END64_LOCATOR.size
    return start >= 0 and tail[start : start + 4] == b"PK\x06\x07"


def _read_end64(span: Span, end: int) -> Sequence[int]:
    """Where the zip64 end record starts, and its disks, counts, size and offset."""
    locator = span.read(max(0, end - _END64_LOCATOR.size), _END64_LOCATOR.size)
    if len(locator) < _END64_LOCATOR.size or locator[:4] != b"PK\x06\x07":
        raise CorruptFileError("the zip directory is damaged (no zip64 locator)")
    start = _END64_LOCATOR.unpack(locator)[2]
    if start + _END64.size > end - _END64_LOCATOR.size:
        raise CorruptFileError("the zip directory is damaged (no zip64 record)")
    record = span.read(start, _END64.size)
    if record[:4] != b"PK\x06\x06":
        raise CorruptFileError("the zip directory is damaged (no zip64 record)")
    return start, *_END64.unpack(record)[4:]


def _parse_directory(directory: bytes, count: int, start: int) -> Iterator[Entry]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL_HEADER.size > len(directory):
            raise CorruptFileError("the zip directory is damaged (it ends too early)")
        (
            signature, _, _, flags, method, _, _, crc, stored, size,
            name_size, extra_size, comment_size, _, _, _, offset,
        ) = _CENTRAL_HEADER.unpack_from(directory, at)  # fmt: skip
        if signature != b"PK\x01\x02":
            raise CorruptFileError("the zip directory is damaged (bad entry)")
        entry_at = start + at
        at += _CENTRAL_HEADER.size
        name = directory[at : at + name_size]
        at += name_size
        if _IN_ZIP64_EXTRA in (stored, size, offset):
            extra = directory[at : at + extra_size]
            size, stored, offset = _zip64_values(extra, size, stored, offset)
        at += extra_size + comment_size
        yield Entry(entry_at, name, method, flags, crc, stored, size, offset)
    if at != len(directory):
        raise CorruptFileError("the zip directory is damaged (its length is another one)")


def _zip64_values(extra: bytes, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset that do not fit in 32 bits stand in an extra field, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64_EXTRA:
            values = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra[at : at + nbytes]))
            try:
                size = next(values) if size == _IN_ZIP64_EXTRA else size
                stored = next(values) if stored == _IN_ZIP64_EXTRA else stored
                offset = next(values) if offset == _IN_ZIP64_EXTRA else offset
            except StopIteration:
                break
            return size, stored, offset
        at += nbytes
    raise CorruptFileError("the zip directory is damaged (zip64 values are missing)")


def read_local_header(header: bytes, name: int, size: int, crc: int) -> int | None:
    """Distance from a zip local header to its data.

    Args:
        header: the header with its name.
        name, size, crc: of the member by the central directory; of its name, the CRC-32.

    Returns:
        None if it is no local header, or says otherwise.
    """
    if len(header) < _LOCAL_HEADER.size:
        return None
    (
        signature, _, flags, method, _, _, local_crc, stored, local_size, name_size, extra_size,
    ) = _LOCAL_HEADER.unpack_from(header)  # fmt: skip
    data_start = _LOCAL_HEADER.size + name_size
    unknown = {0} if flags & HAS_DESCRIPTOR else set()
    agrees = (
        signature == b"PK\x03\x04"
        and method == 0
        and not flags & ~_PLAIN_FLAGS
        and local_crc in {crc, *unknown}
        and {stored, local_size} <= {size, _IN_ZIP64_EXTRA, *unknown}
        and len(header) >= data_start
        and zlib.crc32(header[_LOCAL_HEADER.size : data_start]) == name
    )
    return int(data_start + extra_size) if agrees else None


def _aligned_data_offset(entry: Entry, alignment: int) -> int:
    """Where torch's writer put a member's bytes: PyTorchStreamWriter pads the local extra field.

    Saves one random read per member; the local header is checked when the member is first read.
    """
    start = entry.header_offset + _LOCAL_HEADER.size + len(entry.name) + 4
    if entry.size >= _IN_ZIP64_EXTRA or entry.header_offset >= _IN_ZIP64_EXTRA:
        start += 4
        if entry.size >= _IN_ZIP64_EXTRA:
            start += 16
        if entry.header_offset >= _IN_ZIP64_EXTRA:
            start += 8
    return start + -start % alignment


# --- legacy ---


def _read_legacy(
    fd: int, size: int, members: Members, foreign: bool
) -> tuple[object, dict[str, int], int]:
    """Four pickles (magic, protocol, system, object), the keys, then per key a count and bytes."""
    try:
        magic = unpickle(_read_range(fd, 0, 64)).value
    except SourceError:
        magic = None
    if magic != _LEGACY_MAGIC:
        raise CorruptFileError("not a torch.save file (neither a zip archive nor a legacy one)")
    pickled, keys = _read_legacy_pickles(fd, size, foreign)
    if not isinstance(keys.value, list) or not all(isinstance(key, str) for key in keys.value):
        raise CorruptFileError("the list of storages is damaged")
    at = keys.end
    offsets: dict[str, int] = {}
    for key in keys.value:
        storage = pickled.storages.get(key)
        if storage is None or key in offsets:
            problem = "stored, but not named in the pickle" if storage is None else "stored twice"
            raise CorruptFileError(f"storage {key!r:.40} is {problem}")
        count = int.from_bytes(_read_range(fd, at, 8), "little", signed=True)
        nbytes = storage_nbytes(storage)
        at += 8
        if count != storage.numel:
            if at > size:
                raise CorruptFileError(f"the file is cut short before storage {key!r:.40}")
            raise CorruptFileError(
                f"storage {key!r:.40} counts {count:,}, the pickle {storage.numel:,}"
            )
        if at + nbytes > size:
            raise CorruptFileError(
                f"the file is cut short: storage {key!r:.40} ends at {at + nbytes:,}, "
                f"the file at {size:,}"
            )
        offsets[key] = members.add(-1, at, nbytes, 0)
        at += nbytes
    missing = set(pickled.storages) - set(offsets)
    if missing:
        raise CorruptFileError(f"storage {min(missing)!r:.40} is named in the pickle, but missing")
    return pickled.value, offsets, keys.end


def _read_legacy_pickles(fd: int, size: int, foreign: bool) -> tuple[Unpickled, Unpickled]:
    """The object and the keys. Where they end, only reading them tells."""
    nbytes = _LEGACY_FIRST_READ
    while True:
        data = _read_range(fd, 0, min(nbytes, size, MAX_BYTES))
        try:
            protocol = unpickle(data, unpickle(data).end)
            system = unpickle(data, protocol.end)
            if protocol.value != _LEGACY_PROTOCOL or not isinstance(system.value, dict):
                said = brief(protocol.value)
                raise CorruptFileError(f"legacy torch.save file of unknown protocol {said}")
            if system.value.get("little_endian") is False:
                raise UnsupportedError("the file was written on a big-endian machine")
            pickled = unpickle(data, system.end, foreign=foreign)
            return pickled, unpickle(data, pickled.end)
        except EndOfPickleError:
            if nbytes >= min(size, MAX_BYTES):
                raise
            nbytes *= 4
