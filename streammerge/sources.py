"""Reads byte ranges of the source files. Nothing here knows what the bytes mean."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streammerge.checkpoint import File
from streammerge.errors import CorruptFileError, SourceChangedError, SourceError
from streammerge.torchfile import MAX_LOCAL_HEADER, read_local_header

_MAX_OPEN = 256  # below the usual limit of 1,024 open files per process
_MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


class Sources:
    """The source files, opened as they are needed. Safe to share between threads.

    Args:
        files: as `Checkpoint.files`.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._checked: dict[int, bytearray] = {}

    @contextmanager
    def descriptor(self, index: int) -> Iterator[int]:
        """An open file descriptor of file `index`, for the duration of the block.

        Raises:
            SourceChangedError: the file is another one than when its metadata were read.
        """
        with self._lock:
            fd = self._open.pop(index, None)
            if fd is None:
                fd = self._open_file(index)
            self._open[index] = fd
            self._users[index] = self._users.get(index, 0) + 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[index] -= 1
                self._close_idle(_MAX_OPEN)

    def member_offset(self, index: int, member: int) -> int:
        """Where the bytes of a member start in file `index`; its local header is checked once.

        Sizes, checksum, name and place must be those of the central directory.

        Raises:
            SourceError: the local header cannot be read.
            CorruptFileError: it contradicts the zip directory.
        """
        file = self._files[index]
        members = file.members
        data_offset = members.data_offsets[member]
        header_offset = members.header_offsets[member]
        checked = self._checked.get(index)
        if checked is None:
            with self._lock:
                checked = self._checked.setdefault(index, bytearray(len(members)))
        if not checked[member] and header_offset >= 0:
            distance = data_offset - header_offset
            with self.descriptor(index) as fd:
                try:
                    header = os.pread(fd, min(distance, MAX_LOCAL_HEADER), header_offset)
                except OSError as error:
                    raise self._read_error(index, error) from error
            name, size, crc = (
                column[member] for column in (members.names, members.sizes, members.crcs)
            )
            if read_local_header(header, name, size, crc) != distance:
                raise CorruptFileError(
                    f"{file.path}: the local header at byte {header_offset:,} contradicts the "
                    "zip directory"
                )
            checked[member] = 1
        return data_offset

    def read(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill equally long buffers, one after the other, from consecutive bytes of file `index`.

        Raises:
            SourceError: the file cannot be read or ends too early.
        """
        with self.descriptor(index) as fd:
            for first in range(0, len(buffers), _MAX_BUFFERS):
                pending = buffers[first : first + _MAX_BUFFERS]
                left = len(pending) * len(pending[0])
                while left:
                    try:
                        count = os.preadv(fd, pending, offset)
                    except OSError as error:
                        raise self._read_error(index, error) from error
                    if count == 0:
                        raise self.cut_short(index, offset)
                    offset += count
                    left -= count
                    if left:
                        pending = _skip(pending, count)

    def check_unchanged(self) -> None:
        """Compare every file with what it was when its metadata were read.

        Raises:
            SourceChangedError: one has another size, time or inode, or is gone.
        """
        for file in self._files:
            try:
                status = os.stat(file.path)
            except OSError as error:
                raise SourceChangedError(
                    f"{file.path}: gone while it was merged ({error.strerror})"
                ) from error
            _compare(file, status)

    def cut_short(self, index: int, offset: int) -> SourceError:
        """The error for a file that ended before all its bytes were read."""
        file = self._files[index]
        return SourceChangedError(
            f"{file.path}: ends at byte {offset:,}, but had {file.size:,} bytes before"
        )

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._close_idle(0)

    def _open_file(self, index: int) -> int:
        file = self._files[index]
        try:
            try:
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                self._close_idle(0)
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._read_error(index, error) from error
        try:
            _compare(file, os.fstat(fd))
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise self._read_error(index, error) from error
            raise
        return fd

    def _read_error(self, index: int, error: OSError) -> SourceError:
        return SourceError(f"{self._files[index].path}: {error.strerror}")

    def _close_idle(self, keep: int) -> None:
        excess = len(self._open) - keep
        if excess <= 0:
            return
        for index in [i for i in self._open if not self._users.get(i)][:excess]:
            os.close(self._open.pop(index))


def _compare(file: File, status: os.stat_result) -> None:
    now = (status.st_size, status.st_mtime_ns, status.st_ino)
    if now != (file.size, file.mtime_ns, file.inode):
        raise SourceChangedError(
            f"{file.path}: changed while it was merged (size, time or inode)",
            hint="is the training still writing it? Start again when it is done",
        )


def _skip(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` after `count` bytes."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []
