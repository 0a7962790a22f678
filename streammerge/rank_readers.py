"""Reads the rank files of a checkpoint; with many of them, other processes help.

What one file can cost is bounded by `pickle_machine`, so this is about time alone: a few processes
start faster than the metadata of hundreds of ranks are read. They are new Python processes that
import what they need of this package: a fork would inherit locks that other threads hold. What
they send back are numbers and strings, which nothing unpickles.

This process reads as well, and does not merely wait: each of the others takes 15 MiB of memory.
"""

from __future__ import annotations

import gc
import marshal
import os
import select
import signal
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streammerge import errors
from streammerge.checkpoint import File, Members
from streammerge.cores import count_cores
from streammerge.entries import (
    BoxForm,
    Form,
    Mesh,
    MeshForm,
    PlainForm,
    RankFile,
    View,
    read_rank_file,
)
from streammerge.errors import SourceError, StreamMergeError

if TYPE_CHECKING:
    from subprocess import Popen

# Bytes of pickles, about three seconds of work, for which another process is worth its memory.
BYTES_PER_PROCESS = 32 << 20
MAX_READERS = 8

_T = TypeVar("_T")
_READY = b"\n"
_LOOK_MILLISECONDS = 1000
_PIPE_SIZE = 64 << 10
_LENGTH = struct.Struct("<Q")
_FORMS: tuple[type[Form], ...] = (PlainForm, MeshForm, BoxForm)
# Modules are found without __init__.py, which would import the whole package.
_PROGRAM = """
import sys, types
package = types.ModuleType("streammerge")
package.__path__ = [sys.argv[1]]
sys.modules["streammerge"] = package
from streammerge.rank_readers import serve
serve()
"""


def read_rank_files(paths: Sequence[str], *, named: bool = True) -> Iterator[RankFile]:
    """Read the metadata of all rank files.

    Args:
        paths: the files, by rank.
        named: whether their names say the world size, see `entries.read_rank_file`.

    Yields:
        What each holds, by rank. A column with the same values as that of the rank before is the
        same object; for most checkpoints that is all but the CRCs.

    Raises:
        SourceError: see `entries.read_rank_file`; also if a process was killed.
    """
    world_size = len(paths)
    before = read_rank_file(paths[0], 0, world_size, named=named)
    yield before
    jobs = list(enumerate(paths))[1:]
    processes = _start(jobs, world_size, named, _count_processes(before.pickle_nbytes * len(jobs)))
    sent: dict[int, list[str]] = {}  # by reader: the last names
    try:
        for place, (rank, path) in enumerate(jobs):
            reader = place % (1 + len(processes))
            if reader == 0:
                found = read_rank_file(path, rank, world_size, named=named)
            else:
                found = _receive(processes[reader - 1], path, sent.get(reader, []))
                sent[reader] = found.names
            before = _share_columns(found, before)
            yield before
    finally:
        _stop(processes)


def _count_processes(nbytes: int) -> int:
    """How many processes help to read so many bytes of pickles."""
    return min(nbytes // BYTES_PER_PROCESS, min(count_cores(), MAX_READERS) - 1)


def _share_columns(found: RankFile, before: RankFile) -> RankFile:
    """The same with the columns of another file in place of those that are equal."""

    return replace(
        found,
        file=share_members(found.file, before.file),
        names=share(found.names, before.names),
        kinds=share(found.kinds, before.kinds),
        members=share(found.members, before.members),
        starts=share(found.starts, before.starts),
    )


def share_members(file: File, before: File) -> File:
    """The same with the columns of another file's members in place of those that are equal."""
    columns = (
        share(getattr(file.members, name), getattr(before.members, name))
        for name in Members.__slots__
    )
    return replace(file, members=Members(*columns))


def share(column: _T, other: _T) -> _T:
    """The other one, if both are equal."""
    return other if column == other else column


# --- in this process ---


def _start(
    jobs: Sequence[tuple[int, str]], world_size: int, named: bool, count: int
) -> list[Popen[bytes]]:
    """Start processes that share the jobs with this one; none where that makes no sense.

    The first of every `count + 1` jobs is for this process.
    """
    if count == 0 or not _is_python(sys.executable):
        return []
    import subprocess

    # Isolated, and with the same encoding of file names.
    options = ["-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}"]
    command = [sys.executable, *options, "-c", _PROGRAM, os.path.dirname(__file__)]
    processes: list[Popen[bytes]] = []
    try:
        for number in range(1, count + 1):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which stops the others
            )
            processes.append(process)
            assert process.stdin is not None
            with process.stdin as stream:
                marshal.dump((world_size, named, list(jobs[number :: count + 1])), stream)
        if all(_read(process, len(_READY)) == _READY for process in processes):
            return processes
    except OSError:
        pass  # no memory, no rights, a limit: they would only have been faster
    except BaseException:
        _stop(processes)
        raise
    _stop(processes)
    return []


def _is_python(executable: str | None) -> bool:
    """Whether a program is a Python that can be started once more, no program that embeds one."""
    name = os.path.basename(executable or "")
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _receive(process: Popen[bytes], path: str, names: list[str]) -> RankFile:
    """The next file that a process has read."""
    header = _read(process, _LENGTH.size)
    size = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 1
    data = _read(process, size)
    if len(data) < size:
        status = process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise SourceError(
            f"{path}: the process that read it has ended ({how})",
            hint="was it killed for lack of memory?",
        )
    kind, *message = marshal.loads(data)
    if kind is not None:
        text, hint = message
        raise getattr(errors, kind)(text, hint=hint)
    return _unpack(path, message, names)


def _read(process: Popen[bytes], size: int) -> bytes:
    """So many bytes, or less if the process ends."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    # A Ctrl-C that comes just before a read that blocks would not be seen until that ends.
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    parts = []
    while size:
        while not ready.poll(_LOOK_MILLISECONDS):
            pass
        part = os.read(fd, min(size, _PIPE_SIZE))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _stop(processes: Sequence[Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


# --- in the others ---


def serve() -> None:
    """Read the files that stdin lists and write to stdout what they hold."""
    gc.disable()  # nothing here is cyclic, but for hostile pickles
    world_size, named, jobs = marshal.load(sys.stdin.buffer)
    sys.stdout.buffer.write(_READY)
    names: list[str] | None = None
    try:
        for rank, path in jobs:
            sys.stdout.buffer.flush()
            try:
                found = read_rank_file(path, rank, world_size, named=named)
                message = (None, *_pack(found, names))
                names = found.names
            except StreamMergeError as error:
                message = (type(error).__name__, str(error), error.hint)
            data = marshal.dumps(message)
            sys.stdout.buffer.write(_LENGTH.pack(len(data)))
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # the reader is gone


# --- what is sent ---


def _pack(found: RankFile, names: list[str] | None) -> tuple[Any, ...]:
    """A rank file as what `marshal` knows. Names that are those of the file before are left out."""
    file = found.file
    members = file.members
    return (
        (file.size, file.mtime_ns, file.inode, found.pickle_nbytes),
        [
            column.tobytes()
            for column in (
                *(members.header_offsets, members.data_offsets, members.sizes),
                *(members.crcs, members.names),
                *(found.kinds, found.members, found.starts),
            )
        ],
        None if found.names == names else found.names,
        [(_FORMS.index(type(form)), *form) for form in found.forms],
        list(map(tuple, found.meshes)),
        {place: tuple(view) for place, view in found.odd.items()},
        {place: list(map(tuple, views)) for place, views in found.shards.items()},
        (found.skipped, found.beside),
    )


def _unpack(path: str, message: Sequence[Any], known: list[str]) -> RankFile:
    """The inverse of `_pack`."""
    numbers, columns, names, forms, meshes, odd, shards, others = message
    size, mtime_ns, inode, pickle_nbytes = numbers
    arrays = [array(code, content) for code, content in zip("qqqQIiiq", columns, strict=True)]
    return RankFile(
        file=File(path, size, mtime_ns, inode, Members(*arrays[:5])),
        pickle_nbytes=pickle_nbytes,
        names=known if names is None else names,
        forms=[_FORMS[kind](*fields) for kind, *fields in forms],
        meshes=[Mesh(*mesh) for mesh in meshes],
        kinds=arrays[5],
        members=arrays[6],
        starts=arrays[7],
        odd={place: View(*view) for place, view in odd.items()},
        shards={place: [View(*view) for view in views] for place, views in shards.items()},
        skipped=others[0],
        beside=others[1],
    )
