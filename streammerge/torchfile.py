"""The container that torch.save writes: where the pickle and each stored blob lie in the file.

Two kinds: a zip archive with stored members (the default since torch 1.6) and the legacy stream of
pickles. Only metadata are read here; they are mapped in small windows that are closed again, since
a map of the whole file would drag its pages into this process.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streammerge.checkpoint import File, Members
from streammerge.dtypes import FROM_TORCH, ITEMSIZE
from streammerge.errors import CorruptFileError, SourceError, StreamMergeError, UnsupportedError
from streammerge.unpickler import Storage, Unpickler, brief

_WINDOW = 1 << 20  # bytes mapped at a time; a multiple of every page size
_MAX_COMMENT = (1 << 16) - 1

# Zip records: APPNOTE.TXT of PKWARE, sections 4.3.7 to 4.3.16.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ZIP64_EXTRA = 1
_ALIGNMENT = 64  # torch pads members to this, or to what .storage_alignment says

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """A torch.save file, its pickle read into stand-ins.

    Attributes:
        file: path, identity and members.
        root: the pickled object.
        members: storage key -> index into ``file.members``.
    """

    file: File
    root: object
    members: Mapping[str, int]


def read_torch_file(path: str) -> TorchFile:
    """Read the metadata of a torch.save file.

    Raises:
        CorruptFileError: empty, cut short, damaged, or no torch.save file.
        UnsafePickleError: a pickle outside the allow-list.
        UnsupportedError: compressed or big-endian.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_size == 0:
            raise CorruptFileError("the file is empty (0 bytes)")
        start = os.pread(fd, 4, 0)
        read = _read_zip if start == b"PK\x03\x04" else _read_legacy
        members = Members()
        root, keys = read(fd, status.st_size, members)
    except StreamMergeError as error:
        raise type(error)(f"{path}: {error}", hint=error.hint) from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)
    file = File(path, status.st_size, status.st_mtime_ns, status.st_ino, members)
    return TorchFile(file, root, keys)


def storage_nbytes(storage: Storage) -> int:
    """Bytes of a storage by its dtype and number of elements."""
    if storage.dtype is None:
        return storage.numel
    return storage.numel * _itemsize(storage.dtype)


class _Window(io.RawIOBase):
    """Part of a file as a stream, mapped one window at a time."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self._fd = fd
        self._at = start
        self._end = end
        self._base = 0
        self._map: mmap.mmap | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = min(len(buffer), self._end - self._at)
        if size <= 0:
            return 0
        base = self._at - self._at % _WINDOW
        if self._map is None or base != self._base:
            self._unmap()
            length = min(_WINDOW, self._end - base)
            self._map = mmap.mmap(self._fd, length, offset=base, access=mmap.ACCESS_READ)
            self._base = base
        first = self._at - base
        piece = self._map[first : first + size]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        self._unmap()
        super().close()

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def _read_range(fd: int, start: int, size: int) -> bytes:
    with _Window(fd, start, start + size) as window:
        return io.BufferedReader(window).read(size)


def _crc(fd: int, start: int, size: int) -> int:
    crc = 0
    with _Window(fd, start, start + size) as window:
        buffer = memoryview(bytearray(1 << 16))
        while count := window.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _unpickle(unpickler: Unpickler) -> object:
    try:
        return unpickler.load()
    except StreamMergeError:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        raise CorruptFileError(f"the pickle is damaged: {error or 'it ends too early'}") from error
    except MemoryError as error:
        raise CorruptFileError("the pickle asks for more memory than there is") from error
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError) as error:
        raise CorruptFileError(f"the pickle is damaged: {error}") from error
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"the pickle is damaged: {error}") from error


# --- zip ---


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    header_offset: int


def _read_zip(fd: int, size: int, members: Members) -> tuple[object, dict[str, int]]:
    directory, count, directory_offset = _find_directory(fd, size)
    entries = {entry.name: entry for entry in _parse_directory(directory, count)}
    if len(entries) != count:
        raise CorruptFileError("the zip directory names a member twice")
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CorruptFileError("a zip archive, but not one that torch.save wrote (no data.pkl)")
    prefix = pickles[0].removesuffix("data.pkl")

    def read_member(name: str) -> bytes:
        entry = entries[name]
        return _read_range(fd, _local_data_offset(fd, entry, directory_offset), entry.size)

    for entry in entries.values():
        if entry.method != 0 or entry.flags & 1 or entry.stored != entry.size:
            raise UnsupportedError(
                f"member {entry.name} is compressed or encrypted; torch.save stores members as is",
                hint="unpack the archive and pack it again without compression (zip -0)",
            )
    if f"{prefix}byteorder" in entries and read_member(f"{prefix}byteorder") != b"little":
        raise UnsupportedError("the file was written on a big-endian machine")
    alignment = _ALIGNMENT
    if f"{prefix}.storage_alignment" in entries:
        text = read_member(f"{prefix}.storage_alignment")
        if not text.isdigit() or len(text) > 10 or not 0 < int(text) <= 1 << 30:
            raise CorruptFileError(f".storage_alignment says {text!r:.40}")
        alignment = int(text)

    entry = entries[pickles[0]]
    start = _local_data_offset(fd, entry, directory_offset)
    if entry.crc and _crc(fd, start, entry.size) != entry.crc:
        raise CorruptFileError("data.pkl is damaged: its CRC-32 is not that of the zip directory")
    with io.BufferedReader(_Window(fd, start, start + entry.size), 1 << 16) as stream:
        unpickler = Unpickler(stream)
        root = _unpickle(unpickler)

    blobs = {
        name.removeprefix(f"{prefix}data/"): entry
        for name, entry in entries.items()
        if name.startswith(f"{prefix}data/")
    }
    aligned = _is_aligned(fd, blobs, alignment, directory_offset)
    keys = {}
    for key, storage in unpickler.storages.items():
        blob = blobs.get(key)
        if blob is None:
            raise CorruptFileError(f"storage {key!r:.40} is named in the pickle, but missing")
        if blob.size != storage_nbytes(storage):
            raise CorruptFileError(
                f"storage {key!r:.40} has {blob.size:,} bytes, the pickle says "
                f"{storage_nbytes(storage):,}"
            )
        if aligned:
            data_offset = _aligned_data_offset(blob, alignment)
        else:
            data_offset = _local_data_offset(fd, blob, directory_offset)
        if data_offset + blob.size > directory_offset:
            raise CorruptFileError(f"storage {key!r:.40} reaches into the zip directory")
        keys[key] = members.add(blob.header_offset, data_offset, blob.size, blob.crc)
    return root, keys


def _find_directory(fd: int, size: int) -> tuple[bytes, int, int]:
    """The central directory, its number of entries and its offset."""
    tail_size = min(size, _END.size + _MAX_COMMENT)
    tail = _read_range(fd, size - tail_size, tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CorruptFileError("the file is cut short: it has no zip directory at its end")
    _, _, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = size - tail_size + at
    if count == 0xFFFF or nbytes == 0xFFFFFFFF or offset == 0xFFFFFFFF or _has_locator(tail, at):
        locator = _read_range(fd, max(0, end - _END64_LOCATOR.size), _END64_LOCATOR.size)
        if len(locator) < _END64_LOCATOR.size or locator[:4] != b"PK\x06\x07":
            raise CorruptFileError("the zip directory is damaged (no zip64 locator)")
        end = _END64_LOCATOR.unpack(locator)[2]
        record = _read_range(fd, end, _END64.size) if end + _END64.size <= size else b""
        if len(record) < _END64.size or record[:4] != b"PK\x06\x06":
            raise CorruptFileError("the zip directory is damaged (no zip64 record)")
        *_, count, nbytes, offset = _END64.unpack(record)
    if offset + nbytes > end or count * _CENTRAL_HEADER.size > nbytes:
        raise CorruptFileError("the zip directory is damaged (it does not fit into the file)")
    return _read_range(fd, offset, nbytes), count, offset


def _has_locator(tail: bytes, end: int) -> bool:
    start = end - _END64_LOCATOR.size
    return start >= 0 and tail[start : start + 4] == b"PK\x06\x07"


def _parse_directory(directory: bytes, count: int) -> Iterator[_Entry]:
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
        at += _CENTRAL_HEADER.size
        name = directory[at : at + name_size].decode("utf-8", "backslashreplace")
        at += name_size
        if 0xFFFFFFFF in (stored, size, offset):
            extra = directory[at : at + extra_size]
            size, stored, offset = _zip64_values(extra, size, stored, offset)
        at += extra_size + comment_size
        yield _Entry(name, method, flags, crc, stored, size, offset)


def _zip64_values(extra: bytes, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset that do not fit in 32 bits stand in an extra field, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64_EXTRA:
            values = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra[at : at + nbytes]))
            try:
                size = next(values) if size == 0xFFFFFFFF else size
                stored = next(values) if stored == 0xFFFFFFFF else stored
                offset = next(values) if offset == 0xFFFFFFFF else offset
            except StopIteration:
                break
            return size, stored, offset
        at += nbytes
    raise CorruptFileError("the zip directory is damaged (zip64 values are missing)")


def _local_data_offset(fd: int, entry: _Entry, limit: int) -> int:
    """Where a member's bytes start, by its local header."""
    if entry.header_offset + _LOCAL_HEADER.size > limit:
        raise CorruptFileError(f"member {entry.name} lies outside the file")
    offset = local_data_offset(os.pread(fd, _LOCAL_HEADER.size, entry.header_offset))
    if offset is None:
        raise CorruptFileError(f"member {entry.name} has no local header where the directory says")
    if entry.header_offset + offset + entry.size > limit:
        raise CorruptFileError(f"member {entry.name} lies outside the file")
    return entry.header_offset + offset


def local_data_offset(header: bytes) -> int | None:
    """Distance from a zip local header to its data, or None if it is no local header."""
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        return None
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(header[: _LOCAL_HEADER.size])
    return int(_LOCAL_HEADER.size + name_size + extra_size)


LOCAL_HEADER_SIZE = _LOCAL_HEADER.size


def _aligned_data_offset(entry: _Entry, alignment: int) -> int:
    """Where torch's writer put a member's bytes: PyTorchStreamWriter pads the local extra field.

    Spares one random read per member; the local header is checked when the member is first read.
    """
    start = entry.header_offset + _LOCAL_HEADER.size + len(entry.name.encode()) + 4
    if entry.size >= 0xFFFFFFFF or entry.header_offset >= 0xFFFFFFFF:
        start += 4
        if entry.size >= 0xFFFFFFFF:
            start += 16
        if entry.header_offset >= 0xFFFFFFFF:
            start += 8
    return start + -start % alignment


def _is_aligned(fd: int, blobs: Mapping[str, _Entry], alignment: int, limit: int) -> bool:
    """Whether the file keeps to torch's padding, judged by its first, middle and last member."""
    entries = list(blobs.values())
    return all(
        _local_data_offset(fd, entry, limit) == _aligned_data_offset(entry, alignment)
        for entry in entries[:1] + entries[len(entries) // 2 :][:1] + entries[-1:]
    )


# --- legacy ---


def _read_legacy(fd: int, size: int, members: Members) -> tuple[object, dict[str, int]]:
    """Four pickles (magic, protocol, system, object), the keys, then per key a count and bytes."""
    with io.BufferedReader(_Window(fd, 0, size), 1 << 16) as stream:
        try:
            magic = _unpickle(Unpickler(stream))
        except SourceError:
            magic = None
        if magic != _LEGACY_MAGIC:
            raise CorruptFileError("not a torch.save file (neither a zip archive nor a legacy one)")
        protocol, system = _unpickle(Unpickler(stream)), _unpickle(Unpickler(stream))
        if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict):
            raise CorruptFileError(f"legacy torch.save file of unknown protocol {brief(protocol)}")
        if system.get("little_endian") is False:
            raise UnsupportedError("the file was written on a big-endian machine")
        unpickler = Unpickler(stream)
        root = _unpickle(unpickler)
        keys = _unpickle(Unpickler(stream))
        at = stream.tell()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CorruptFileError("the list of storages is damaged")
    offsets = {}
    for key in keys:
        storage = unpickler.storages.get(key)
        if storage is None:
            raise CorruptFileError(f"storage {key!r:.40} is stored, but not named in the pickle")
        count = int.from_bytes(os.pread(fd, 8, at), "little", signed=True)
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
    missing = set(unpickler.storages) - set(offsets)
    if missing:
        raise CorruptFileError(f"storage {min(missing)!r:.40} is named in the pickle, but missing")
    return root, offsets


def _itemsize(dtype: str) -> int:
    name = FROM_TORCH.get(dtype)
    if name is not None:
        return ITEMSIZE[name]
    return {"complex128": 16, "complex32": 4, "qint32": 4}.get(dtype, 1)
