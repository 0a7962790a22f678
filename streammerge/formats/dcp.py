"""torch.distributed.checkpoint (DCP): ``.metadata`` and ``__{rank}_{number}.distcp`` files.

Written by accelerate, the Trainer of transformers and what builds on it, torchtitan, prime-rl,
NeMo-RL, VeOmni and Lightning with torch 2.4 to 2.14. A ``.distcp`` file is a row of archives, each
with one chunk of a tensor or with a pickled object; ``.metadata`` says which is where. Chunks that
several ranks hold are stored once.
"""

from __future__ import annotations

import filecmp
import os
import re
import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammerge.assets import find_asset_folder
from streammerge.checkpoint import Checkpoint, Extents, File, Members, Tensor
from streammerge.dtypes import FROM_TORCH
from streammerge.entries import View, quoted, view_of
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    SourceError,
    UnsupportedError,
    about,
)
from streammerge.formats.chunks import Layouts
from streammerge.formats.dcp_metadata import Metadata, TensorInfo, read_metadata
from streammerge.formats.dcp_parts import choose_part
from streammerge.formats.rank_paths import holds_file
from streammerge.names import refuse_flat_parameter
from streammerge.stored_tensors import TensorReader
from streammerge.torchfile import Span, opened

NAME = "torch.distributed.checkpoint"
WORD = "dcp"
FILES = ".metadata with *.distcp"
OPTIONS: tuple[str, ...] = ("prefix",)
TRAINING = True

METADATA = ".metadata"
_SUFFIX = ".distcp"
_RANK_OF_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")
_ANY_FILE = re.compile(r"\.metadata|.*\.distcp")


def matches(path: str, *, prefix: str | None = None) -> bool:
    """Whether a directory holds DCP files, whichever part of them is asked for."""
    return holds_file(path, _ANY_FILE)


def describe(paths: Sequence[str], *, prefix: str | None = None) -> Checkpoint:
    """Read what one or several directories hold of a checkpoint, without its data.

    Args:
        paths: the directories.
        prefix: the part to take; see `dcp_parts.choose_part`.

    Raises:
        SourceError: missing, damaged or contradictory files.
        UsageError: a prefix that no tensor has.
    """
    directories = list(dict.fromkeys(paths))
    path = _find_metadata(directories)
    file, metadata = read_metadata(path, _data_nbytes(directories))
    with about(path):
        part = choose_part(list(metadata.tensors), metadata.objects, metadata.paths, prefix)
        names = _in_order_of_paths(part.names, metadata)
        wanted = _find_rows(metadata, names)
    files = _find_files(directories, metadata, wanted)
    places = _read_chunks(metadata, files, wanted)
    layouts = Layouts()
    with about(path):
        tensors = tuple(_build(*item, metadata, places, layouts) for item in names.items())
    assets, mixed = find_asset_folder(directories)
    ranks = {int(match[1]) for name in metadata.names if (match := _RANK_OF_FILE.fullmatch(name))}
    return Checkpoint(
        root=directories[0],
        format=NAME,
        world_size=max(ranks) + 1 if ranks else len(metadata.names),
        files=(*places.files, file),
        tensors=tensors,
        skipped=part.skipped,
        directories=tuple(directories if mixed or assets is None else [*directories, assets]),
        assets=assets,
        assets_mixed=mixed,
    )


# --- finding the files ---


def _find_metadata(directories: Sequence[str]) -> str:
    """The only ``.metadata`` file; where nodes kept their own files, one of them has it."""
    found = [path for d in directories if os.path.lexists(path := os.path.join(d, METADATA))]
    if not found:
        where = ", ".join(directories)
        if any(os.path.exists(os.path.join(d, f"{METADATA}.tmp")) for d in directories):
            hint = f"{METADATA}.tmp is there: the save was interrupted before its end"
        elif any(os.path.exists(os.path.join(d, f"__0{METADATA}")) for d in directories):
            hint = (
                f"there is one {METADATA} for each rank, which is not read: save it with "
                "use_collectives=True"
            )
        else:
            hint = (
                "it is written last, by one node: was the save interrupted, or are the files of "
                "the first node elsewhere? Give all their directories as sources"
            )
        raise CheckpointNotFoundError(f"{where}: {METADATA} is missing", hint=hint)
    for other in found[1:]:
        try:
            same = filecmp.cmp(found[0], other, shallow=False)
        except OSError as error:
            raise SourceError(f"{error.filename or other}: {error.strerror}") from error
        if not same:
            raise InconsistentRanksError(f"{found[0]} and {other} are of different checkpoints")
    return found[0]


def _data_nbytes(directories: Sequence[str]) -> int:
    """Bytes of all files with chunks."""
    nbytes = 0
    for directory in directories:
        try:
            with os.scandir(directory) as entries:
                nbytes += sum(e.stat().st_size for e in entries if e.name.endswith(_SUFFIX))
        except OSError as error:
            raise SourceError(f"{error.filename or directory}: {error.strerror}") from error
    return nbytes


def _in_order_of_paths(names: Mapping[str, str], metadata: Metadata) -> dict[str, str]:
    """In the order of the state dict, which the paths keep; the metadata go by who saved what."""
    ordered = {key: names[key] for key in metadata.paths if key in names}
    return {**ordered, **names}


def _find_rows(metadata: Metadata, names: Iterable[str]) -> array[int]:
    """The rows whose bytes are needed."""
    rows = array("i")
    for key in names:
        tensor = metadata.tensors[key]
        refuse_flat_parameter(key)
        dtype = FROM_TORCH.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"key {quoted(key)}: dtype {tensor.dtype} has no equivalent in safetensors"
            )
        full = [r for r in tensor.rows if 0 not in tensor.box(r)[1]]
        # Of an empty tensor nothing is read, but what is in the file is looked at.
        chosen = full or [r for r in tensor.rows if metadata.files[r] >= 0][:1]
        if not chosen:
            raise InconsistentRanksError(f"key {quoted(key)}: no chunk of it is stored")
        for row in chosen:
            if metadata.files[row] < 0:
                offsets, _ = tensor.box(row)
                raise InconsistentRanksError(
                    f"key {quoted(key)}: nothing says where the chunk at {list(offsets)} is stored"
                )
            rows.append(row)
    return rows


def _find_files(
    directories: Sequence[str], metadata: Metadata, rows: Iterable[int]
) -> dict[int, str]:
    """Number of each file that is needed -> path. One error names all that is wrong with them."""
    needed: dict[int, int] = {}
    for row in rows:
        end = metadata.offsets[row] + metadata.lengths[row]
        number = metadata.files[row]
        needed[number] = max(needed.get(number, 0), end)
    found: dict[int, str] = {}
    missing, empty, short = [], [], []
    for number, nbytes in sorted(needed.items()):
        name = metadata.names[number]
        paths = [p for d in directories if os.path.lexists(p := os.path.join(d, name))]
        if not paths:
            missing.append(name)
            continue
        for other in paths[1:]:
            if not os.path.samefile(paths[0], other):
                raise InconsistentRanksError(f"{name} twice: {paths[0]} and {other}")
        found[number] = paths[0]
        size = _size(paths[0])
        if size == 0:
            empty.append(paths[0])
        elif size < nbytes:
            short.append(f"{paths[0]} (has {size:,} bytes, needs {nbytes:,})")
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if empty:
        problems.append(f"empty (0 bytes): {', '.join(empty)}")
    if short:
        problems.append(f"cut short: {', '.join(short)}")
    if problems:
        count = len(missing) + len(empty) + len(short)
        kind = CorruptFileError if empty or short else CheckpointNotFoundError
        raise kind(
            f"{', '.join(directories)}: {count} of {len(needed)} files with weights cannot be "
            f"read; {'; '.join(problems)}",
            hint="if each node kept its own files, give all their directories as sources"
            if missing
            else "an interrupted or incomplete save or copy; take another checkpoint",
        )
    return found


def _size(path: str) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError(f"{path}: not a regular file")
    return status.st_size


# --- reading the archives ---


@dataclass(slots=True, eq=False)
class _Places:
    """Where the chunks lie: what `Metadata` does not say about it.

    Attributes:
        files: those that are read.
        numbers: number of a file in the metadata -> index in `files`.
        members: for each row, index into the members of its file; -1 for those that are not needed.
        odd: row -> view, where that is not the whole blob in its order.
    """

    members: array[int]
    files: list[File] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    odd: dict[int, View] = field(default_factory=dict)


def _read_chunks(metadata: Metadata, paths: Mapping[int, str], rows: array[int]) -> _Places:
    """Look into the archive of each chunk, file by file, in the order of their bytes."""
    reader = TensorReader()
    places = _Places(array("i", [-1]) * len(metadata.files))
    owners = _Owners(metadata)
    for number, group in _by_file(metadata.files, rows):
        path, members = paths[number], Members()
        with about(path), opened(path) as fd:
            status = os.fstat(fd)
            end = 0
            for row in sorted(group, key=metadata.offsets.__getitem__):
                key, tensor = owners.owner(row)
                offsets, sizes = tensor.box(row)
                span = Span(fd, metadata.offsets[row], metadata.lengths[row])
                with about(f"key {quoted(key)}: chunk at {list(offsets)}, byte {span.start:,}"):
                    # One archive for many rows would be read for each of them.
                    if span.start < end:
                        raise CorruptFileError(f"begins inside another, which ends at {end:,}")
                    end = span.start + span.size
                    if end > status.st_size:
                        raise CorruptFileError(f"lies outside the {status.st_size:,} bytes of it")
                    view = _read_chunk(reader, span, tensor, sizes, members)
                places.members[row] = view.member
                if view.start or view.strides is not None or view.conj:
                    places.odd[row] = view
        places.numbers[number] = len(places.files)
        places.files.append(File(path, status.st_size, status.st_mtime_ns, status.st_ino, members))
    return places


def _read_chunk(
    reader: TensorReader,
    span: Span,
    tensor: TensorInfo,
    sizes: tuple[int, ...],
    members: Members,
) -> View:
    """Add a chunk to the members of its file. It has to be what the metadata say."""
    stored = reader.read(span)
    for found, expected in (
        (f"shape {list(stored.tensor.sizes)}", f"shape {list(sizes)}"),
        (stored.tensor.dtype, tensor.dtype),
    ):
        if found != expected:
            raise InconsistentRanksError(f"holds {found}, {METADATA} says {expected}")
    member = members.add(
        stored.header_offset, stored.data_offset, stored.size, stored.crc, stored.name
    )
    return view_of(stored.tensor, member, stored.size)[1]


class _Owners:
    """Which tensor a row belongs to."""

    def __init__(self, metadata: Metadata) -> None:
        self._items = sorted(metadata.tensors.items(), key=lambda item: item[1].first)
        self._firsts = array("q", [tensor.first for _, tensor in self._items])

    def owner(self, row: int) -> tuple[str, TensorInfo]:
        """Key and tensor."""
        return self._items[bisect_right(self._firsts, row) - 1]


def _by_file(files: array[int], rows: array[int]) -> Iterator[tuple[int, array[int]]]:
    """The rows of each file, file by file."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[files[row]] = counts.get(files[row], 0) + 1
    ends: dict[int, int] = {}
    at = 0
    for number in sorted(counts):
        ends[number] = at
        at += counts[number]
    ordered = array("i", [0]) * len(rows)
    for row in rows:
        number = files[row]
        ordered[ends[number]] = row
        ends[number] += 1
    for number in sorted(counts):
        end = ends[number]
        yield number, ordered[end - counts[number] : end]


# --- tensors ---


def _build(key: str, name: str, metadata: Metadata, places: _Places, layouts: Layouts) -> Tensor:
    """One tensor. Its chunks are proven to tile it."""
    info = metadata.tensors[key]
    chunks = sorted((info.box(row), row) for row in info.rows)
    chunks = [(bounds, row) for bounds, row in chunks if places.members[row] >= 0]
    rows = [row for _, row in chunks]
    odd = {slot: places.odd[row] for slot, row in enumerate(rows) if row in places.odd}
    with about(f"key {quoted(key)}"):
        layout = layouts.layout(info.shape, [bounds for bounds, _ in chunks])
    extents = Extents(
        array("i", [places.numbers[metadata.files[row]] for row in rows]),
        array("i", [places.members[row] for row in rows]),
        array("q", bytes(8 * len(rows))) if odd else layouts.zeros(len(rows)),
    )
    for slot, view in odd.items():
        extents.starts[slot] = view.start
        if view.strides is not None:
            extents.strides[slot] = view.strides
        if view.conj:
            extents.conjugated.add(slot)
    return Tensor(name, FROM_TORCH[info.dtype], info.shape, layout, extents)
