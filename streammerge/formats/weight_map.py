"""Which files hold the weights of a Hugging Face directory: one, or several and an index of them.

Files are found as transformers 5.24 does (`modeling_utils.py`, `_get_resolved_checkpoint_files`).
Where it takes what contradicts itself, it is refused here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from streammerge.assets import CONFIG
from streammerge.entries import quoted
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    UnsupportedError,
    UsageError,
    about,
)
from streammerge.header import MAX_HEADER_BYTES
from streammerge.lfs import refuse_pointer
from streammerge.unpickler import brief

_MAX_NAMED = 5


def has_weights(directory: str, single: str, index: str) -> bool:
    """Whether a directory holds weights under the names that transformers looks for.

    A single file counts only beside a config: alone it is anybody's.
    """
    beside = (index, single) if os.path.isfile(os.path.join(directory, CONFIG)) else (index,)
    return any(os.path.isfile(os.path.join(directory, name)) for name in beside)


def only_directory(paths: Sequence[str]) -> str:
    """The one directory that a finished model is in.

    Raises:
        UsageError: several.
    """
    directories = list(dict.fromkeys(paths))
    if len(directories) != 1:
        raise UsageError(f"expected one Hugging Face directory, not {len(directories)}")
    return directories[0]


def find_weights(directory: str, single: str, index: str) -> dict[str, str]:
    """Tensor name -> file name by the index; empty if there is the single file alone.

    Args:
        directory: where to look.
        single: name of the file, where one holds all weights; it need not exist.
        index: name of the index, likewise.

    Raises:
        CheckpointNotFoundError: files are missing that the index lists.
        CorruptFileError: an index that is damaged, or names files outside the directory.
        UnsupportedError: the single file lies beside an index of others.
    """
    path = os.path.join(directory, index)
    if not os.path.isfile(path):
        return {}
    with about(path):
        weight_map = _parse_index(_read_whole(path))
    filenames = sorted(set(weight_map.values()))
    if os.path.isfile(os.path.join(directory, single)) and filenames != [single]:
        raise UnsupportedError(
            f"{directory}: {single} lies beside an index of other files; loaders take it and "
            "ignore the index",
            hint=f"remove the stale one: {single}, or {index} and its files",
        )
    missing = [f for f in filenames if not os.path.isfile(os.path.join(directory, f))]
    if missing:
        raise CheckpointNotFoundError(
            f"{path}: {len(missing)} of the {len(filenames)} files that it lists are missing: "
            f"{listed(missing)}"
        )
    return weight_map


def note_place(directory: str, places: dict[str, str], name: str, filename: str) -> None:
    """Enter which file holds a key.

    Raises:
        UnsupportedError: another does, too.
    """
    other = places.setdefault(name, filename)
    if other != filename:
        raise UnsupportedError(
            f"{directory}: key {quoted(name)} is both in {other} and in {filename}"
        )


def check_places(index: str, weight_map: Mapping[str, str], places: Mapping[str, str]) -> None:
    """Compare an index with what its files hold.

    Loaders go by file, so a key that the index leaves out does no harm.

    Raises:
        CorruptFileError: a key is not in the file that the index gives.
    """
    wrong = [name for name, filename in weight_map.items() if places.get(name) != filename]
    if wrong:
        raise CorruptFileError(
            f"{index}: {len(wrong)} of {len(weight_map)} keys are not in the file that it gives: "
            f"{listed(wrong)}"
        )


def _parse_index(text: bytes) -> dict[str, str]:
    weight_map = parse_object(text, int).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"its weight_map is {brief(weight_map)}, expected file names")
    for name, filename in weight_map.items():
        if not isinstance(filename, str) or not _is_plain(filename):
            raise CorruptFileError(
                f"gives {brief(filename)} as the file of key {quoted(name)}, expected a plain "
                "file name"
            )
    return weight_map


def _is_plain(filename: str) -> bool:
    """Whether a name stays in its directory, on any system, and an error message on its line."""
    if filename in {"", ".", ".."} or not filename.isprintable():
        return False
    return "/" not in filename and "\\" not in filename


# --- reading ---


def _read_whole(path: str) -> bytes:
    """A JSON file; no longer than a header may be."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_HEADER_BYTES:
            raise CorruptFileError(f"has {size:,} bytes, which is too long for an index")
        text = read_range(fd, 0, size)
    finally:
        os.close(fd)
    check_start(text)
    return text


def read_range(fd: int, start: int, size: int) -> bytes:
    """The bytes of an open file.

    Raises:
        CorruptFileError: it ends before them.
    """
    data = bytearray()
    while len(data) < size:
        part = os.pread(fd, size - len(data), start + len(data))
        if not part:
            raise CorruptFileError(f"ends at byte {start + len(data):,} while it is read")
        data += part
    return bytes(data)


def check_start(start: bytes) -> None:
    """Refuse a file by its first `START_BYTES`: an empty one, or a pointer in place of the file."""
    if not start:
        raise CorruptFileError("the file is empty (0 bytes)")
    refuse_pointer(start)


def parse_object(text: bytes, parse_int: Callable[[str], int]) -> dict[str, object]:
    """A JSON object, read as strictly as safetensors does; a key twice is refused as well.

    Raises:
        CorruptFileError: it is none.
    """
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_int=parse_int,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"holds {brief(value)}, expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise CorruptFileError(f"key {quoted(name)} twice")
            seen.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise CorruptFileError(f"holds {name}, which is not JSON")


# --- messages ---


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(quoted, names[:_MAX_NAMED])) + more
