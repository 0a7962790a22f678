"""Safetensors weights of a Hugging Face directory: one file, or several and an index of them.

Only headers and the index are read. The format is that of ``safetensors`` 0.8 (`tensor.rs`), whose
checks are made here; what it lets pass though readers may take it differently is refused as well:
a key twice, a key that the format does not know. Files are found as transformers 5.24 does
(`modeling_utils.py`, `_get_resolved_checkpoint_files`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

from streammerge.checkpoint import Checkpoint, Extents, File, Members, PlainLayout, Tensor
from streammerge.dtypes import ITEMSIZE, PACKING
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    SourceError,
    StreamMergeError,
    UnsupportedError,
    UsageError,
)
from streammerge.header import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    SINGLE_FILE,
    tensor_nbytes,
)
from streammerge.unpickler import brief

NAME = "safetensors"
FILES = f"{SINGLE_FILE} or {INDEX_FILE}"

_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_INT_LIMIT = 1 << 63
_INT_DIGITS = 19
_LFS_POINTER = b"version https://git-lfs"
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a header.

    Attributes:
        name, dtype: as they stand there.
        shape: as torch has it.
        begin, end: its bytes, counted from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def matches(path: str) -> bool:
    """Whether a directory holds weights under the names that transformers looks for."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (SINGLE_FILE, INDEX_FILE))


def describe(paths: Sequence[str]) -> Checkpoint:
    """Read the headers of the weights in one directory.

    Tensors come in the order of their file's name, then of their bytes. Loaders go by file, so
    what an indexed file holds counts, even if the index leaves it out.

    Raises:
        UsageError: several directories.
        CheckpointNotFoundError: no weights there, or files missing that the index lists.
        CorruptFileError: a file that is cut short, damaged, or no safetensors file.
        UnsupportedError: files that contradict each other, no tensors, or an unknown dtype.
    """
    directories = tuple(dict.fromkeys(paths))
    if len(directories) != 1:
        raise UsageError(f"expected one Hugging Face directory, not {len(directories)}")
    (directory,) = directories
    weight_map = _find_weights(directory)
    files: list[File] = []
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    layout = PlainLayout((0,))
    for filename in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        file, entries = read_file(os.path.join(directory, filename))
        for member, entry in enumerate(entries):
            other = places.setdefault(entry.name, filename)
            if other != filename:
                raise UnsupportedError(
                    f"{directory}: key {_quote(entry.name)} is both in {other} and in {filename}"
                )
            extents = Extents()
            extents.add(len(files), member, 0, None, False)
            tensors[entry.name] = Tensor(entry.name, entry.dtype, entry.shape, layout, extents)
        files.append(file)
    _check_places(os.path.join(directory, INDEX_FILE), weight_map, places)
    if not tensors:
        raise UnsupportedError(f"{directory}: the weights hold no tensors")
    return Checkpoint(
        root=directory,
        format=NAME,
        world_size=1,
        files=tuple(files),
        tensors=tuple(tensors.values()),
        skipped=(),
        directories=(directory,),
        assets=directory,
    )


def read_file(path: str) -> tuple[File, list[Entry]]:
    """Read the header of one file.

    Returns:
        The file, with one member per tensor, and its tensors in the order of their bytes.

    Raises:
        CorruptFileError: cut short, damaged, or no safetensors file.
        UnsupportedError: an unknown dtype.
    """
    with _about(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            text = _read_header(fd, status.st_size)
        finally:
            os.close(fd)
        data_start = _LENGTH_BYTES + len(text)
        entries = _parse_header(text)
        needed = data_start + (entries[-1].end if entries else 0)
        if status.st_size < needed:
            raise CorruptFileError(f"cut short: has {status.st_size:,} bytes, needs {needed:,}")
        if status.st_size > needed:
            raise CorruptFileError(
                f"has {status.st_size:,} bytes, but its header describes {needed:,}"
            )
    members = Members()
    for entry in entries:
        members.add(-1, data_start + entry.begin, entry.end - entry.begin, 0)
    return File(path, status.st_size, status.st_mtime_ns, status.st_ino, members), entries


# --- finding the files ---


def _find_weights(directory: str) -> dict[str, str]:
    """Tensor name -> file name by the index; empty if `SINGLE_FILE` has none."""
    single, index = (os.path.join(directory, name) for name in (SINGLE_FILE, INDEX_FILE))
    if not os.path.isfile(index):
        if not os.path.isfile(single):
            _raise_nothing_found(directory)
        return {}
    with _about(index):
        weight_map = _parse_index(_read_whole(index))
    filenames = sorted(set(weight_map.values()))
    if os.path.isfile(single) and filenames != [SINGLE_FILE]:
        raise UnsupportedError(
            f"{directory}: {SINGLE_FILE} lies beside an index of other files; loaders take it and "
            "ignore the index",
            hint=f"remove the stale one: {SINGLE_FILE}, or {INDEX_FILE} and its files",
        )
    missing = [f for f in filenames if not os.path.isfile(os.path.join(directory, f))]
    if missing:
        raise CheckpointNotFoundError(
            f"{index}: {len(missing)} of the {len(filenames)} files that it lists are missing: "
            f"{_listed(missing)}"
        )
    return weight_map


def _parse_index(text: bytes) -> dict[str, str]:
    weight_map = _parse_object(text, int).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"its weight_map is {brief(weight_map)}, expected file names")
    for name, filename in weight_map.items():
        if not isinstance(filename, str) or not _is_plain(filename):
            raise CorruptFileError(
                f"gives {brief(filename)} as the file of key {_quote(name)}, expected a plain "
                "file name"
            )
    return weight_map


def _is_plain(filename: str) -> bool:
    """Whether a name stays in its directory, on any system, and an error message on its line."""
    if filename in {"", ".", ".."} or not filename.isprintable():
        return False
    return "/" not in filename and "\\" not in filename


def _check_places(index: str, weight_map: Mapping[str, str], places: Mapping[str, str]) -> None:
    """Compare the index with what its files hold."""
    wrong = [name for name, filename in weight_map.items() if places.get(name) != filename]
    if wrong:
        raise CorruptFileError(
            f"{index}: {len(wrong)} of {len(weight_map)} keys are not in the file that it gives: "
            f"{_listed(wrong)}"
        )


def _raise_nothing_found(directory: str) -> NoReturn:
    if not os.path.isdir(directory):
        problem = "not a directory" if os.path.exists(directory) else "no such directory"
        raise CheckpointNotFoundError(
            f"{directory}: {problem}",
            hint="give a local directory; a model of the Hub must be downloaded first",
        )
    with _about(directory):
        names = sorted(os.listdir(directory))
        weights = [name for name in names if name.endswith(".safetensors")]
        hint = None
        if "adapter_model.safetensors" in names:
            hint = "this is a LoRA adapter; give the directory of the model that it was made for"
        elif weights:
            hint = f"without an index, loaders ignore what is there: {_listed(weights)}"
        elif any(name.endswith(".bin") for name in names):
            hint = "weights that torch saved must be converted to safetensors first"
        raise CheckpointNotFoundError(f"no weights here (looked for {FILES})", hint=hint)


# --- reading bytes ---


def _read_header(fd: int, size: int) -> bytes:
    start = _read_range(fd, 0, min(size, len(_LFS_POINTER)))
    _check_start(start)
    if size < _LENGTH_BYTES:
        raise CorruptFileError(f"cut short: has {size:,} bytes, needs {_LENGTH_BYTES:,} and more")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptFileError(
            f"no safetensors file: its first bytes announce a header of {length:,} bytes, the "
            f"format allows {MAX_HEADER_BYTES:,}"
        )
    if start[_LENGTH_BYTES:] and start[_LENGTH_BYTES] != ord("{"):
        raise CorruptFileError("no safetensors file: byte 8 is not the '{' of a header")
    if _LENGTH_BYTES + length > size:
        raise CorruptFileError(
            f"cut short: has {size:,} bytes, needs {_LENGTH_BYTES + length:,} for its header alone"
        )
    return _read_range(fd, _LENGTH_BYTES, length)


def _read_whole(path: str) -> bytes:
    """A JSON file; no longer than a header may be."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_HEADER_BYTES:
            raise CorruptFileError(f"has {size:,} bytes, which is too long for an index")
        text = _read_range(fd, 0, size)
    finally:
        os.close(fd)
    _check_start(text)
    return text


def _read_range(fd: int, start: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.pread(fd, size - len(data), start + len(data))
        if not part:
            raise CorruptFileError(f"ends at byte {start + len(data):,} while it is read")
        data += part
    return bytes(data)


def _check_start(start: bytes) -> None:
    if not start:
        raise CorruptFileError("the file is empty (0 bytes)")
    if start.startswith(_LFS_POINTER):
        raise CorruptFileError(
            "a pointer of Git LFS, not the file itself", hint="fetch the files: git lfs pull"
        )


# --- what a header says ---


def _parse_header(text: bytes) -> list[Entry]:
    """The tensors in the order of their bytes, which are proven to leave no gap."""
    header = _parse_object(text, _parse_natural)
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFileError(f"its {METADATA_KEY} is {brief(metadata)}, expected strings")
    _check_text((*header, *metadata, *metadata.values()))
    entries = []
    for name, info in header.items():
        try:
            entries.append(_parse_entry(name, info))
        except SourceError as error:
            raise type(error)(f"key {_quote(name)}: {error}", hint=error.hint) from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise CorruptFileError(
                f"key {_quote(entry.name)}: its data start at {entry.begin:,}, the data before "
                f"end at {end:,}"
            )
        end = entry.end
    return entries


def _parse_entry(name: str, info: object) -> Entry:
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        raise CorruptFileError(f"{brief(info)}, expected dtype, shape and data_offsets")
    dtype, sizes, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str):
        raise CorruptFileError(f"dtype {brief(dtype)}, expected a string")
    if dtype not in ITEMSIZE:
        raise UnsupportedError(f"unknown dtype {brief(dtype)}")
    if not _is_ints(sizes):
        raise CorruptFileError(f"shape {brief(sizes)}, expected a list of integers")
    if not _is_ints(offsets) or len(offsets) != 2:
        raise CorruptFileError(f"data_offsets {brief(offsets)}, expected two integers")
    shape = _torch_shape(dtype, sizes)
    nbytes = tensor_nbytes(dtype, shape)
    if offsets[1] - offsets[0] != nbytes:
        raise CorruptFileError(
            f"{dtype} {brief(sizes)} takes {nbytes:,} bytes, but data_offsets are {offsets}"
        )
    return Entry(name, dtype, shape, *offsets)


def _torch_shape(dtype: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The inverse of what `header.encode_header` does to shapes of packed dtypes."""
    numel = 1
    for size in sizes:
        numel *= size or 1  # safetensors multiplies 64-bit numbers, in order
        if numel >= _INT_LIMIT:
            raise CorruptFileError(f"shape {brief(sizes)} has too many elements")
    packing = PACKING.get(dtype, 1)
    if packing == 1:
        return tuple(sizes)
    if not sizes or sizes[-1] % packing:
        raise UnsupportedError(
            f"shape {brief(sizes)} of {dtype}, of which torch holds {packing} in an element"
        )
    return (*sizes[:-1], sizes[-1] // packing)


def _is_ints(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int for n in value)


# --- JSON ---


def _parse_object(text: bytes, parse_int: Callable[[str], int]) -> dict[str, object]:
    """A JSON object, read as strictly as safetensors does."""
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
                raise CorruptFileError(f"key {_quote(name)} twice")
            seen.add(name)
    return value


def _parse_natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > _INT_DIGITS:
        raise CorruptFileError(f"holds the number {digits:.30}, expected 0 to {_INT_LIMIT - 1}")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise CorruptFileError(f"holds {name}, which is not JSON")


def _check_text(strings: Iterable[str]) -> None:
    """Escapes in JSON can spell half a surrogate pair."""
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise CorruptFileError(f"holds {bad!r}, which is no Unicode text") from error


# --- messages ---


@contextmanager
def _about(path: str) -> Iterator[None]:
    """Errors inside are about this file."""
    try:
        yield
    except StreamMergeError as error:
        raise type(error)(f"{path}: {error}", hint=error.hint) from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _quote(name: str) -> str:
    """A name on one line, whatever is in it."""
    return f"{name!r:.200}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(_quote, names[:_MAX_NAMED])) + more
