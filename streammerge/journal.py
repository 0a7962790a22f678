"""What a merge has done, on the disk, for the next one to go on with.

A file of lines: the CRC-32 of the rest, a space, ``[kind, payload]`` as JSON. A record is on the
disk when `Journal.record` returns. Lines from the first damaged one on, which a crash tore, count
as never written.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streammerge.errors import writing_error

Payload = Mapping[str, Any]

WRITTEN = "written"
CHECKED = "checked"


@dataclass(frozen=True, slots=True)
class Written:
    """An output file as it was when it was finished and on the disk.

    Attributes:
        name: below the directory of the result, with ``/``.
        size: bytes.
        mtime_ns, inode: to know it again.
    """

    name: str
    size: int
    mtime_ns: int
    inode: int

    def lies_in(self, directory: str) -> bool:
        """Whether the file is there, untouched."""
        try:
            status = os.lstat(os.path.join(directory, self.name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        now = (status.st_size, status.st_mtime_ns, status.st_ino)
        return stat.S_ISREG(status.st_mode) and now == (self.size, self.mtime_ns, self.inode)


class Journal:
    """A file of records, opened to add to it. Safe to share between threads.

    Args:
        path: the file; made if it does not exist. Damaged lines at its end are cut off.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            self._end = sum(map(len, _good_lines(path)))
            os.ftruncate(self._fd, self._end)
        except BaseException:
            self.close()
            raise

    def record(self, kind: str, *payloads: Payload) -> None:
        """Add records, all on the disk when this returns. What fails is overwritten by the next.

        Args:
            kind: what they are about.
            payloads: JSON objects.

        Raises:
            TargetError: the disk is full, or another error of writing.
        """
        data = memoryview(b"".join(_encode(kind, payload) for payload in payloads))
        with self._lock:
            end = self._end
            try:
                while data:
                    count = os.pwrite(self._fd, data, end)
                    data = data[count:]
                    end += count
                os.fsync(self._fd)
            except OSError as error:
                raise writing_error(self.path, error) from error
            self._end = end

    def record_written(self, *files: Written) -> None:
        """Add finished files; see `record`."""
        self.record(WRITTEN, *map(asdict, files))

    def record_checked(self, file: int, members: Sequence[int]) -> None:
        """Add members of a source file whose CRC-32 is right; see `record`.

        Args:
            file: its index in the checkpoint that is merged.
            members: their indices in the file.
        """
        self.record(CHECKED, {"file": file, "members": list(members)})

    def checked_members(self) -> dict[int, array[int]]:
        """What `record_checked` was told: index of a file -> indices of members."""
        checked: dict[int, array[int]] = {}  # there may be millions
        for payload in self.records(CHECKED):
            checked.setdefault(payload["file"], array("I")).extend(payload["members"])
        return checked

    def records(self, kind: str) -> Iterator[Payload]:
        """The payloads of all records of a kind, oldest first."""
        return (payload for found, payload in read_records(self.path) if found == kind)

    def close(self) -> None:
        """Close the file, once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_records(path: str) -> Iterator[tuple[str, Payload]]:
    """The good records of a journal as (kind, payload); none if there is no such file."""
    for line in _good_lines(path):
        kind, payload = json.loads(line[9:])
        yield kind, payload


def read_written(path: str) -> list[Written]:
    """The files that a journal names, each as it was recorded last."""
    payloads = (payload for kind, payload in read_records(path) if kind == WRITTEN)
    return list({payload["name"]: Written(**payload) for payload in payloads}.values())


def _encode(kind: str, payload: Payload) -> bytes:
    text = json.dumps([kind, payload], separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _good_lines(path: str) -> Iterator[bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(fd, "rb") as file:
        for line in file:
            text = line[9:-1]
            if line != b"%08x %s\n" % (zlib.crc32(text), text):
                return
            yield line
