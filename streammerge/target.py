"""Where a result goes: which directories may be a target, and where each is staged.

No directory can be renamed to a mount point, or where the folder above cannot be written. Such a
target is fixed: it is staged inside and filled file by file.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from streammerge.errors import NoSpaceError, TargetPathError, writing_error
from streammerge.journal import Written, read_written

JOURNAL = "journal"
_STAGING = ".{}.streammerge"
_STAGING_INSIDE = ".streammerge"
_LOST_AND_FOUND = "lost+found"  # in new file systems
_REPOSITORY = ".git"


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
        TargetError: one that cannot be looked at.
    """
    try:
        _check_place(target, read_directories, assets)
        _check_contents(target, overwrite, names)
    except OSError as error:
        raise writing_error(error.filename or target, error) from error


def _check_place(target: str, read_directories: Sequence[str], assets: str | None) -> None:
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


def _check_contents(target: str, overwrite: bool, names: Sequence[str]) -> None:
    if not os.path.lexists(target):
        return
    if os.path.islink(target):
        raise TargetPathError(f"{target}: the target is a link (to {os.readlink(target)})")
    if not os.path.isdir(target):
        raise TargetPathError(f"{target}: exists and is not a directory")
    found = _foreign_entries(target)
    if not found:
        return
    if (fixed := why_fixed(target)) is not None:
        raise TargetPathError(
            f"{target}: {fixed}, so it must be empty to be filled "
            f"(it holds {', '.join(found[:3])})",
            hint="give a new directory below it, or empty it",
        )
    if not overwrite:
        raise TargetPathError(
            f"{target}: exists and is not empty (it holds {', '.join(found[:3])})",
            hint="give a new directory, or --overwrite to replace this one",
        )
    if not any(name.endswith(".safetensors") for name in found):
        raise TargetPathError(
            f"{target}: holds no *.safetensors, so it is not an earlier result and is not replaced",
            hint="give a new directory, or remove this one yourself",
        )
    if _REPOSITORY in found:
        raise TargetPathError(
            f"{target}: is a Git repository, whose history would be lost with it",
            hint="give a new directory, and move the files from there",
        )
    for name in names:
        path = os.path.join(target, name)
        if os.path.islink(path):
            raise TargetPathError(
                f"{path}: is a link (to {os.readlink(path)}), not a file of an earlier result",
                hint="give a new directory, or remove the link",
            )


def missing_space(target: str, nbytes: int) -> int:
    """Bytes that the disk of `target` lacks to hold a result of `nbytes`; 0 if there is room.

    What an interrupted merge left there will be part of the result, or go.

    Raises:
        TargetError: the disk does not say.
    """
    staging = staging_path(target)
    existing = os.path.dirname(staging)
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    places = [staging]
    try:
        if why_fixed(target) is not None:
            places += [os.path.join(target, entry) for entry in moved_entries(target)]
        status = os.statvfs(existing)
        paths = (path for place in places for path in _files_below(place))
        there = sum(os.lstat(path).st_blocks * 512 for path in paths)
    except OSError as error:
        raise writing_error(error.filename or existing, error) from error
    return max(0, nbytes - there - status.f_bavail * status.f_frsize)


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


# --- where it is staged ---


def staging_path(target: str) -> str:
    """The staging directory of a target."""
    if why_fixed(target) is not None:
        return os.path.join(target, _STAGING_INSIDE)
    return os.path.join(os.path.dirname(target), _STAGING.format(os.path.basename(target)))


def why_fixed(target: str) -> str | None:
    """Why nothing can be renamed to a target that exists; None if it is not fixed."""
    if not os.path.isdir(target):
        return None
    if os.path.ismount(target) or target in _mount_points():
        return "a mount point"
    if not os.access(os.path.dirname(target), os.W_OK | os.X_OK):
        return "in a folder that cannot be written"
    return None


def moved_entries(target: str) -> list[str]:
    """What a fixed target holds that an interrupted merge has moved into it."""
    files: defaultdict[str, list[Written]] = defaultdict(list)
    for file in read_written(os.path.join(target, _STAGING_INSIDE, JOURNAL)):
        files[file.name.split("/")[0]].append(file)
    return [
        entry
        for entry, written in files.items()
        if all(file.lies_in(target) for file in written)
        and len(written) == len(list(_files_below(os.path.join(target, entry))))
    ]


def _foreign_entries(target: str) -> list[str]:
    """What a target holds that came neither from an interrupted merge nor with a file system."""
    found = set(os.listdir(target))
    if why_fixed(target) is not None:
        found -= {_STAGING_INSIDE, _LOST_AND_FOUND, *moved_entries(target)}
    return sorted(found)


def _mount_points() -> set[str]:
    """Where something is mounted, also from the same file system: `os.path.ismount` misses that."""
    try:
        with open("/proc/self/mountinfo", "rb") as mounts:
            escaped = [line.split(b" ")[4] for line in mounts]
    except OSError:
        return set()
    paths = (re.sub(rb"\\(\d{3})", lambda match: bytes([int(match[1], 8)]), e) for e in escaped)
    return set(map(os.fsdecode, paths))


def _files_below(path: str) -> Iterator[str]:
    """Everything in a directory and below that is no directory; the path itself if it is none."""
    if os.path.islink(path) or not os.path.isdir(path):
        yield from [path] if os.path.lexists(path) else ()
        return
    for folder, directories, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
        links = (os.path.join(folder, name) for name in directories)
        yield from filter(os.path.islink, links)
