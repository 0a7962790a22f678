"""Makes the result appear at once: a staging directory beside the target, renamed at the end.

Until then the target does not exist (or is the old one). Nothing is written through a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence

from streammerge.errors import NoSpaceError, TargetError, TargetPathError

_STAGING = ".{}.streammerge"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def resolve_target(path: str) -> str:
    """The absolute path of a target: its parent with links resolved, its own name as given.

    Raises:
        TargetPathError: the target itself is a link.
    """
    if not path:
        raise TargetPathError("the target is an empty path")
    stripped = path.rstrip("/") or "/"
    if os.path.basename(stripped) in ("", ".", ".."):
        return os.path.realpath(stripped)
    target = os.path.join(
        os.path.realpath(os.path.dirname(stripped) or "."), os.path.basename(stripped)
    )
    if os.path.islink(target):
        raise TargetPathError(
            f"{path}: the target is a link (to {os.readlink(target)})",
            hint="give the directory itself, or remove the link",
        )
    return target


def check_target(
    target: str,
    read_directories: Sequence[str],
    overwrite: bool,
    *,
    assets: str | None = None,
    names: Sequence[str] = (),
) -> None:
    """Refuse a target that is in the way or would destroy what is read.

    Args:
        target: as `resolve_target` gives it.
        read_directories: the folders that are read.
        overwrite: whether an old result may be replaced.
        assets: the folder of side files, which is read with all folders below it.
        names: the files that will be written.

    Raises:
        TargetPathError: any such target.
    """
    for directory in read_directories:
        source = os.path.realpath(directory)
        if source == target:
            raise TargetPathError(f"{target}: the target is a folder that is read")
        if os.path.commonpath([source, target]) == target:
            raise TargetPathError(
                f"{target}: the target lies above {source}, which is read",
                hint="give a new directory",
            )
    if assets is not None:
        folder = os.path.realpath(assets)
        if os.path.commonpath([folder, target]) == folder:
            raise TargetPathError(
                f"{target}: the target lies in {folder}, whose files are copied",
                hint="give a directory elsewhere",
            )
    parent = os.path.dirname(target)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise TargetPathError(f"{target}: {parent} is not a directory")
    if not os.path.lexists(target):
        return
    if os.path.islink(target):
        raise TargetPathError(f"{target}: the target is a link (to {os.readlink(target)})")
    if not os.path.isdir(target):
        raise TargetPathError(f"{target}: exists and is not a directory")
    if os.path.ismount(target):
        raise TargetPathError(
            f"{target}: a mount point, which no finished directory can be renamed to",
            hint="give a new directory below it",
        )
    found = sorted(os.listdir(target))
    if not found:
        return
    if not overwrite:
        raise TargetPathError(
            f"{target}: exists and is not empty (it holds {', '.join(found[:3])})",
            hint="give a new directory, or --overwrite to replace this one",
        )
    if not any(name.endswith(".safetensors") for name in found):
        raise TargetPathError(
            f"{target}: holds no *.safetensors, so it is no earlier result and is not replaced",
            hint="give a new directory, or remove this one yourself",
        )
    for name in names:
        path = os.path.join(target, name)
        if os.path.islink(path):
            raise TargetPathError(
                f"{path}: is a link (to {os.readlink(path)}), not a file of an earlier result",
                hint="give a new directory, or remove the link",
            )


def missing_space(target: str, nbytes: int) -> int:
    """Bytes that the disk of `target` lacks to hold `nbytes` more; 0 if there is room."""
    existing = os.path.dirname(target)
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    status = os.statvfs(existing)
    return max(0, nbytes - status.f_bavail * status.f_frsize)


def check_space(target: str, nbytes: int) -> None:
    """Refuse to start what cannot be finished.

    Raises:
        NoSpaceError: less than `nbytes` are free where `target` will be.
    """
    lacking = missing_space(target, nbytes)
    if lacking:
        raise NoSpaceError(
            f"{target}: {nbytes:,} bytes are needed, {lacking:,} more than the disk has free",
            hint="free some space, or give a target on another disk",
        )


class Staging:
    """The staging directory of a target, locked against a second merge.

    A context manager: what is not published is removed.

    Args:
        target: as `resolve_target` gives it.

    Attributes:
        path: the staging directory, empty at first.
    """

    def __init__(self, target: str, overwrite: bool = False) -> None:
        self.target = target
        self._overwrite = overwrite
        self.path = os.path.join(os.path.dirname(target), _STAGING.format(os.path.basename(target)))
        self._fd = -1
        self._made_parents: list[str] = []
        self._published = False

    def __enter__(self) -> Staging:
        try:
            self._make_parents()
            self._fd = self._lock()
        except OSError as error:
            self._remove_parents()
            raise TargetError(f"{error.filename or self.path}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if not self._published:
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_parents()
        os.close(self._fd)

    def publish(self) -> None:
        """Make the staging directory the target. Its files are fsynced already.

        Raises:
            TargetError: it cannot be renamed; an old target is then still in place.
        """
        try:
            for directory, _, _ in os.walk(self.path):
                _sync_directory(directory)
            if self._overwrite and os.path.isdir(self.target) and os.listdir(self.target):
                _exchange(self.path, self.target)
                self._published = True
                _sync_directory(os.path.dirname(self.target))
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                os.rename(self.path, self.target)
                self._published = True
            _sync_directory(os.path.dirname(self.target))
            for directory in self._made_parents:
                _sync_directory(os.path.dirname(directory))
        except OSError as error:
            raise TargetError(f"{self.target}: {error.strerror}") from error

    def _make_parents(self) -> None:
        missing = []
        parent = os.path.dirname(self.target)
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for directory in reversed(missing):
            os.mkdir(directory)
            self._made_parents.append(directory)

    def _remove_parents(self) -> None:
        for directory in reversed(self._made_parents):
            try:
                os.rmdir(directory)
            except OSError:
                return

    def _lock(self) -> int:
        """Create the staging directory, or take over what a dead merge left, and lock it."""
        try:
            os.mkdir(self.path)
        except FileExistsError:
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                raise TargetPathError(
                    f"{self.path}: is in the way of the staging directory"
                ) from None
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another merge may have published and so renamed it between the two calls.
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                raise BlockingIOError
            for name in os.listdir(self.path):
                path = os.path.join(self.path, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            raise TargetPathError(
                f"{self.target}: another merge is writing it (lock on {self.path})",
                hint="wait for it, or give another target",
            ) from None
        except BaseException:
            os.close(fd)
            raise
        return fd


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: str, old: str) -> None:
    """Swap two directories, atomically where the system can."""
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
    aside = f"{new}.old"
    # Left by a crash between the renames below; the result it was is replaced by now.
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)
