"""Output files: made with their full size, filled by several threads, flushed and checked."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from streammerge.errors import ResultError, writing_error
from streammerge.journal import Written
from streammerge.parallel import start_threads
from streammerge.planner import OutputFile
from streammerge.shares import FileRange

_READ_SIZE = 64 << 10


@dataclass(slots=True)
class TargetFile:
    """An output file that is being filled.

    Attributes:
        name: below the directory of the result, with ``/``.
        path: where it is.
        fd: -1 when it is closed.
        size: bytes of the whole file.
        header: the first bytes.
        part: the bytes that this process fills.
        pending: jobs that are handed out and not done.
        complete: whether all jobs are handed out.
        unsynced: bytes since the last flush was asked for.
        shared: whether several threads fill it.
    """

    name: str
    path: str
    fd: int
    size: int
    header: bytes
    part: FileRange
    pending: int = 0
    complete: bool = False
    unsynced: int = 0
    shared: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Held while writing: the file system has a lock of its own for that, but spins on it.
    writing: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close the file, once."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def create_file(
    directory: str, name: str, size: int, header: bytes = b"", part: FileRange | None = None
) -> TargetFile:
    """Create a file of `size` bytes that begins with `header`, with the mode that the umask gives.

    The folders it lies in are made too.

    Args:
        directory: of the result.
        name, size, header, part: see `TargetFile`; the part is the whole if not given.

    Raises:
        TargetError: it cannot be made.
    """
    path = os.path.join(directory, *name.split("/"))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise writing_error(path, error) from error
    target = TargetFile(name, path, fd, size, header, part or FileRange(-1, 0, size))
    try:
        os.ftruncate(target.fd, size)
        write_at(target, memoryview(header), 0)
    except BaseException as error:
        target.close()
        if isinstance(error, OSError):
            raise writing_error(path, error) from error
        raise
    return target


def open_file(directory: str, file: OutputFile, part: FileRange) -> TargetFile:
    """Open a file that was made before, which may have been on another machine.

    Not for reading, where an NFS client would first read the page that it writes a part of.
    """
    path = os.path.join(directory, *file.name.split("/"))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise writing_error(path, error) from error
    return TargetFile(file.name, path, fd, file.size, file.header, part)


def finish(target: TargetFile) -> Written:
    """Flush a file to the disk and check its size and header.

    Raises:
        TargetError: it cannot be flushed.
        ResultError: it is not what was written.
    """
    sync(target)
    return check_file(target.path, target.name, target.size, target.header)


def check_file(path: str, name: str, size: int, header: bytes) -> Written:
    """Check size and first bytes of a file that is on the disk.

    It is opened again: over NFS, only that shows what other machines have written.

    Raises:
        TargetError: it cannot be read.
        ResultError: it is not what was written.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            same = _starts_with(fd, header)
        finally:
            os.close(fd)
    except OSError as error:
        raise writing_error(path, error) from error
    if status.st_size != size:
        raise ResultError(f"{path}: has {status.st_size:,} bytes, not {size:,}")
    if not same:
        raise ResultError(f"{path}: its first bytes are not those that were written")
    return Written(name, status.st_size, status.st_mtime_ns, status.st_ino)


def _starts_with(fd: int, data: bytes) -> bool:
    offset = 0
    while offset < len(data):
        part = os.pread(fd, min(_READ_SIZE, len(data) - offset), offset)
        if not part or not data.startswith(part, offset):
            return False
        offset += len(part)
    return True


def write_at(target: TargetFile, data: memoryview, offset: int) -> None:
    """Write all of `data`.

    Raises:
        TargetError: the disk is full, or another error of writing.
    """
    try:
        while data:
            count = os.pwrite(target.fd, data, offset)
            data = data[count:]
            offset += count
    except OSError as error:
        raise writing_error(target.path, error) from error


def sync(target: TargetFile) -> None:
    """Wait until what is written is on the disk.

    Raises:
        TargetError: it cannot be.
    """
    try:
        os.fsync(target.fd)
    except OSError as error:
        raise writing_error(target.path, error) from error


class Syncer:
    """A thread that flushes files to the disk while others copy.

    It closes those that are finished, and calls `finished` with their indices.
    """

    def __init__(self, finished: Callable[[int], None]) -> None:
        self._finished = finished
        self._queue: queue.SimpleQueue[tuple[TargetFile, bool] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._given_up = False
        (self._thread,) = start_threads([self._loop])

    def put(self, target: TargetFile, finished: bool) -> None:
        """Hand over a file: a finished one for good, another for what is written so far.

        Raises:
            TargetError: an earlier flush failed.
        """
        if self._error is not None:
            raise self._error
        self._queue.put((target, finished))

    def __enter__(self) -> Syncer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._given_up = error is not None
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            target, finished = item
            try:
                # A flush may come after the end of its file, put by a thread that was held up.
                if self._error is None and target.fd >= 0:
                    if finished:  # also after a failure or Ctrl-C: there is little left to flush
                        sync(target)
                        target.close()
                        self._finished(target.part.file)
                    elif not self._given_up:
                        sync(target)
            except BaseException as error:
                self._error = error
            finally:
                if finished:
                    target.close()
