"""Makes the result appear at once: a staging directory beside the target, renamed at the end.

Until then the target does not exist (or is the old one). What an interrupted merge has finished
stays in the staging directory, and the same command goes on with it. Nothing is written through a
link.

No directory can be renamed to a mount point, or where the folder above cannot be written. Such a
target is staged inside and filled file by file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from types import TracebackType

from streammerge.errors import (
    ResultError,
    SourceError,
    StreamMergeError,
    TargetPathError,
    UnsupportedError,
    writing_error,
)
from streammerge.header import INDEX_FILE
from streammerge.journal import Journal, read_records, read_written
from streammerge.planner import Fingerprint
from streammerge.target import JOURNAL, moved_entries, staging_path, why_fixed

_RESULT = "merged"
_OLD = "old"
_TOKEN = "token"
_JOB = "job"  # the first record of a journal: a fingerprint
_GO_ON = "the same command goes on where it stopped"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Staging:
    """The staging directory of a target, with a lock and a journal.

    ::

        .DST.streammerge/    beside DST, or DST/.streammerge
            merged/          what becomes DST
            journal          the job, and what is done
            token            of the merge whose directory this is
            old/             the former DST, while merged/ takes its place

    A context manager. It takes over what an interrupted merge of the same job left. Where the block
    fails for a reason that may pass, what the journal names stays for the next merge.

    Args:
        target: as `resolve_target` gives it.
        job: what is merged.
        overwrite: replace an earlier result.
        restart: discard what an interrupted merge left.

    Attributes:
        path: the staging directory.
        result: ``merged``.
        journal: what is done.
        kept: names of the files in `result` that an interrupted merge has finished; there are no
            others.
    """

    journal: Journal

    def __init__(
        self, target: str, job: Fingerprint, *, overwrite: bool = False, restart: bool = False
    ) -> None:
        self.target = target
        self.path = staging_path(target)
        self.result = os.path.join(self.path, _RESULT)
        self.kept: frozenset[str] = frozenset()
        self._job = job
        self._overwrite = overwrite
        self._restart = restart
        self._fixed = why_fixed(target)
        self._old = os.path.join(self.path, _OLD)
        self._journal_path = os.path.join(self.path, JOURNAL)
        self._open = ExitStack()
        self._made: list[str] = []
        self._ours = False  # not another merge's, nor another job's
        self._published = False
        self._token: str | None = None

    def write_token(self, token: str) -> None:
        """Leave something by which all processes know that they see this staging directory.

        And by which this one notices that it was taken over: there are file systems of several
        machines that keep a lock to the machine that has it.

        Raises:
            TargetError: an error of writing.
        """
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.join(self.path, _TOKEN), flags, 0o666)
            with open(fd, "w", encoding="ascii") as file:
                file.write(token)
            self._token = token
        except OSError as error:
            raise writing_error(self.path, error) from error

    @property
    def warning(self) -> str | None:
        """What the user should know about how the result appeared."""
        if self._fixed is None:
            return None
        return (
            f"{self.target}: {self._fixed}, so its files did not appear all at once; the index, or "
            "the only file of weights, came last: until then nothing took it for a model"
        )

    def __enter__(self) -> Staging:
        try:
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._open:
            self._ours = self._ours and not self._is_taken()
            kept = self._ours and not self._published and self._is_worth_keeping(error)
            if not self._published and not kept:
                if self._ours:
                    _remove_tree(self.path)
                self._remove_made()
        self._say_what_is_left(error, kept)

    def publish(self) -> None:
        """Make the result the target. Its files are on the disk already.

        Raises:
            TargetPathError: another merge has taken the staging directory over.
            TargetError: it cannot be renamed; an old target is then still in place.
        """
        if self._is_taken():
            raise TargetPathError(f"{self.path}: another merge has taken its place")
        try:
            for directory, _, _ in os.walk(self.result):
                _sync_directory(directory)
            if self._fixed is None:
                self._rename()
            else:
                self._move_in()
            # A directory that was made above is an entry of the one above it.
            for path in dict.fromkeys([self.path, *reversed(self._made)]):
                _sync_directory(os.path.dirname(path))
        except OSError as error:
            raise writing_error(self.target, error) from error
        # An old result goes only now, when the new one is sure to be found after a crash.
        self.journal.close()  # NFS keeps what is open, under another name
        _remove_tree(self.path)

    # --- beginning ---

    def _begin(self) -> None:
        try:
            self._make_parents()
            self._lock()
            self._take_over()
        except OSError as error:
            raise writing_error(error.filename or self.path, error) from error

    def _make_parents(self) -> None:
        missing = []
        parent = os.path.dirname(self.path)
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for directory in reversed(missing):
            os.mkdir(directory)
            self._made.append(directory)

    def _lock(self) -> None:
        """Create the staging directory, or find what a dead merge left, and lock it.

        Raises:
            TargetPathError: another merge has it.
        """
        made = False
        try:
            os.mkdir(self.path)
            made = True
        except FileExistsError:
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                raise TargetPathError(
                    f"{self.path}: is in the way of the staging directory"
                ) from None
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another merge may have published and so removed it between the two calls.
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise TargetPathError(
                f"{self.target}: another merge is writing it (lock on {self.path})",
                hint="wait for it, or give another target",
            ) from None
        if made:
            self._made.append(self.path)

    def _take_over(self) -> None:
        """Settle what an interrupted merge left: undo, refuse, discard or keep.

        Raises:
            TargetPathError: it is of another job.
        """
        between_two_renames = os.path.isdir(self._old) and os.path.isdir(self.result)
        if between_two_renames and not os.path.lexists(self.target):
            os.rename(self._old, self.target)
        if self._fixed is not None and (moved := moved_entries(self.target)):
            os.makedirs(self.result, exist_ok=True)
            _move(moved, self.target, self.result)
        path = self._journal_path
        _, before = next(read_records(path), (_JOB, None))
        if before is None or self._restart or not os.path.isdir(self.result):
            _remove_others(self.path)
        elif (difference := self._job.differs_from(before)) is not None:
            raise TargetPathError(
                f"{self.path}: an interrupted merge left it that was another one: {difference}",
                hint="--restart discards it",
            )
        self._ours = True
        with suppress(FileNotFoundError):  # a process of that merge may live on, and look for it
            os.unlink(os.path.join(self.path, _TOKEN))
        self.journal = Journal(path)
        self._open.callback(self.journal.close)
        if not os.path.isdir(self.result):
            self.journal.record(_JOB, asdict(self._job))
            os.mkdir(self.result)
        self.kept = frozenset(f.name for f in read_written(path) if f.lies_in(self.result))
        _remove_others(self.result, self.kept)
        _sync_directory(self.path)
        _sync_directory(os.path.dirname(self.path))

    # --- ending ---

    def _is_taken(self) -> bool:
        token = self._token
        return not self._published and token is not None and not sees_token(self.result, token)

    def _rename(self) -> None:
        result = os.stat(self.result)
        try:
            if self._overwrite and os.path.isdir(self.target) and os.listdir(self.target):
                _exchange(self.result, self.target, self._old)
            else:
                os.rename(self.result, self.target)
        finally:  # Ctrl-C may come right after it
            with suppress(OSError):
                self._published = os.path.samestat(result, os.stat(self.target))

    def _move_in(self) -> None:
        """Fill a target that nothing can be renamed to, or leave it as it was."""
        *names, last = _in_moving_order(os.listdir(self.result))
        try:
            _move(names, self.result, self.target)
            _sync_directory(self.target)
            _move([last], self.result, self.target)
            self._published = True
        except BaseException:
            with suppress(OSError):
                _move(moved_entries(self.target), self.target, self.result)
            raise

    def _is_worth_keeping(self, error: BaseException | None) -> bool:
        """Whether something is done that the same command could go on with.

        What the system refused may work the next time, and torch may be installed. What was read
        or written and found wrong stays wrong.
        """
        wrong = isinstance(error, SourceError | ResultError)
        damaged = wrong and not isinstance(error, UnsupportedError)
        if error is None or (damaged and not isinstance(error.__cause__, OSError)):
            return False
        try:
            return any(kind != _JOB for kind, _ in read_records(self._journal_path))
        except OSError:
            return True

    def _say_what_is_left(self, error: BaseException | None, kept: bool) -> None:
        if not self._published and not kept:
            return
        left = f"{self.target} is complete" if self._published else _GO_ON
        if isinstance(error, StreamMergeError):
            error.hint = f"{error.hint}; {left}" if error.hint else left
        elif error is not None and not isinstance(error, Exception) and not error.args:
            # Ctrl-C, or what the caller makes of another signal.
            nothing = "" if self._published else "nothing was published; "
            error.args = (f"merge interrupted; {nothing}{left}",)

    def _remove_made(self) -> None:
        for directory in reversed(self._made):
            with suppress(OSError):
                os.rmdir(directory)


def _in_moving_order(names: Collection[str]) -> list[str]:
    """Weights first, last the index; or last the only weights: what makes a model of the rest."""
    indexed = INDEX_FILE in names

    def turn(name: str) -> tuple[bool, bool, str]:
        weights = name.endswith(".safetensors")
        return name == INDEX_FILE or (weights and not indexed), not weights, name

    return sorted(names, key=turn)


def sees_token(result: str, token: str) -> bool:
    """Whether a process sees the `Staging` of another one, not one of the same path elsewhere.

    Args:
        result: its `result`.
        token: what it has written.
    """
    path = os.path.join(os.path.dirname(result), _TOKEN)
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(len(token) + 1) == token
    except OSError:
        return False


# --- system calls ---


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move(names: Iterable[str], source: str, target: str) -> None:
    for name in names:
        os.rename(os.path.join(source, name), os.path.join(target, name))


def _remove_others(directory: str, kept: Collection[str] = ()) -> None:
    """Remove everything from a directory but the files that are named, and their folders."""
    for folder, directories, names in os.walk(directory, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.relpath(path, directory) not in kept:
                os.unlink(path)
        for name in directories:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                os.unlink(path)
            elif not os.listdir(path):
                os.rmdir(path)


def _remove_tree(path: str) -> None:
    """Remove a directory, as far as that is possible."""
    with suppress(OSError):  # of the directory itself, in spite of the argument
        shutil.rmtree(path, ignore_errors=True)


def _exchange(new: str, old: str, aside: str) -> None:
    """Put a directory in the place of another, atomically where the system can.

    The old one ends in the place of the new one, or aside.
    """
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        result = renameat2(
            _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
        )
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), old)
    # Left by a crash after the renames below, when a new result was in its place.
    _remove_tree(aside)
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
