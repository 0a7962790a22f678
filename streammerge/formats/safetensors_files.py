"""Safetensors weights of a Hugging Face directory: one file, or several and an index of them.

Written by ``save_pretrained`` of transformers, by huggingface_hub and by streammerge itself. Only
headers and the index are read. The format is that of ``safetensors`` 0.8 (`tensor.rs`), whose
checks are made here; what it lets pass though readers may take it differently is refused as well:
a key twice, a key that the format does not know.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeGuard

from streammerge.checkpoint import Checkpoint, Extents, File, Members, PlainLayout, Tensor
from streammerge.dtypes import ITEMSIZE, PACKING
from streammerge.entries import quoted
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    SourceError,
    UnsupportedError,
    about,
)
from streammerge.formats.weight_map import (
    check_places,
    check_start,
    find_weights,
    has_weights,
    listed,
    note_place,
    only_directory,
    parse_object,
    read_range,
)
from streammerge.header import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    SINGLE_FILE,
    tensor_nbytes,
)
from streammerge.lfs import START_BYTES
from streammerge.torchfile import opened
from streammerge.unpickler import brief

NAME = "Hugging Face safetensors"
WORD = "hf"
FILES = f"{SINGLE_FILE} with config.json, or {INDEX_FILE}"
OPTIONS: tuple[str, ...] = ()
TRAINING = False

_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_INT_LIMIT = 1 << 63
_INT_DIGITS = 19


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
    return has_weights(path, SINGLE_FILE, INDEX_FILE)


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
    directory = only_directory(paths)
    weight_map = find_weights(directory, SINGLE_FILE, INDEX_FILE)
    if not weight_map and not os.path.isfile(os.path.join(directory, SINGLE_FILE)):
        _raise_nothing_found(directory)
    files: list[File] = []
    tensors: list[Tensor] = []
    places: dict[str, str] = {}
    layout = PlainLayout((0,))
    blank = Extents(starts=array("q", [0]))
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for filename in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        file, entries = read_file(os.path.join(directory, filename))
        in_file = replace(blank, files=array("i", [len(files)]))
        for member, entry in enumerate(entries):
            note_place(directory, places, entry.name, filename)
            # There can be 100,000 of them, so what is the same for many exists once.
            extents = replace(in_file, members=array("i", [member]))
            shape = shapes.setdefault(entry.shape, entry.shape)
            tensors.append(Tensor(entry.name, entry.dtype, shape, layout, extents))
        files.append(file)
    check_places(os.path.join(directory, INDEX_FILE), weight_map, places)
    if not tensors:
        raise UnsupportedError(f"{directory}: the weights hold no tensors")
    return Checkpoint(
        root=directory,
        format=NAME,
        world_size=1,
        files=tuple(files),
        tensors=tuple(tensors),
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
    file, entries, _ = read_file_with_metadata(path)
    return file, entries


def read_file_with_metadata(path: str) -> tuple[File, list[Entry], dict[str, str]]:
    """As `read_file`, with the free-form metadata of the header."""
    with about(path):
        with opened(path) as fd:
            status = os.fstat(fd)
            text = _read_header(fd, status.st_size)
        data_start = _LENGTH_BYTES + len(text)
        entries, metadata = _parse_header(text)
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
    file = File(path, status.st_size, status.st_mtime_ns, status.st_ino, members)
    return file, entries, metadata


def _raise_nothing_found(directory: str) -> NoReturn:
    if not os.path.isdir(directory):
        problem = "not a directory" if os.path.exists(directory) else "no such directory"
        raise CheckpointNotFoundError(
            f"{directory}: {problem}",
            hint="give a local directory; a model of the Hub must be downloaded first",
        )
    with about(directory):
        names = sorted(os.listdir(directory))
        weights = [name for name in names if name.endswith(".safetensors")]
        hint = None
        if "adapter_model.safetensors" in names:
            hint = "this is a LoRA adapter; give the directory of the model that it was made for"
        elif weights:
            hint = f"without an index, loaders ignore what is there: {listed(weights)}"
        elif any(name.endswith(".bin") for name in names):
            hint = "what torch saved can be converted to safetensors: streammerge merge DIR NEW"
        raise CheckpointNotFoundError(
            f"no weights here (looked for {SINGLE_FILE} or {INDEX_FILE})", hint=hint
        )


# --- reading bytes ---


def _read_header(fd: int, size: int) -> bytes:
    start = read_range(fd, 0, min(size, START_BYTES))
    check_start(start)
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
    return read_range(fd, _LENGTH_BYTES, length)


# --- what a header says ---


def _parse_header(text: bytes) -> tuple[list[Entry], dict[str, str]]:
    """The tensors in the order of their bytes, which are proven to leave no gap; the metadata."""
    header = parse_object(text, _parse_natural)
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFileError(f"its {METADATA_KEY} is {brief(metadata)}, expected strings")
    _check_text((*header, *metadata, *metadata.values()))
    entries = []
    for name, info in header.items():
        try:
            entries.append(_parse_entry(name, info))
        except SourceError as error:
            raise type(error)(f"key {quoted(name)}: {error}", hint=error.hint) from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise CorruptFileError(
                f"key {quoted(entry.name)}: its data start at {entry.begin:,}, the data before "
                f"end at {end:,}"
            )
        end = entry.end
    return entries, metadata


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


def _parse_natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > _INT_DIGITS:
        raise CorruptFileError(f"holds the number {digits:.30}, expected 0 to {_INT_LIMIT - 1}")
    return int(digits)


def _check_text(strings: Iterable[str]) -> None:
    """Escapes in JSON can spell half a surrogate pair."""
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise CorruptFileError(f"holds {bad!r}, which is not Unicode text") from error
