"""The safetensors form of torch.distributed.checkpoint: a file for each rank, with its chunks.

``HuggingFaceStorageWriter(save_distributed=True)`` of torch 2.8 to 2.14 writes
``shard-{rank + 1}-model-{i}-of-{n}.safetensors``. Which part of its tensor a chunk is stands in the
metadata of the header, as JSON: ``DCP_SHARDING_INFO`` -> key -> ``saved_offsets``. Nothing says how
many ranks there were, nor the global shapes: these are what the chunks span.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammerge.assets import find_asset_folder
from streammerge.checkpoint import Checkpoint, Extents, File, Tensor
from streammerge.config import parse_json
from streammerge.entries import quoted
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    SourceError,
    UnsupportedError,
    about,
)
from streammerge.formats.chunks import Layouts
from streammerge.formats.dcp_parts import choose_part
from streammerge.formats.rank_paths import holds_file
from streammerge.formats.safetensors_files import Entry, read_file_with_metadata
from streammerge.names import refuse_flat_parameter
from streammerge.unpickler import brief, is_shape

NAME = "torch.distributed.checkpoint, safetensors"
WORD = "dcp-safetensors"
FILES = "shard-*-model-*-of-*.safetensors"
OPTIONS: tuple[str, ...] = ("prefix",)
TRAINING = True

_FILE = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_VERSION = "DCP_VERSION"
_MAX_NAMED = 20


def matches(path: str, *, prefix: str | None = None) -> bool:
    """Whether a directory holds such files."""
    return holds_file(path, _FILE)


def describe(paths: Sequence[str], *, prefix: str | None = None) -> Checkpoint:
    """Read the headers of all files in one or several directories.

    Args:
        paths: the directories.
        prefix: the part to take; see `dcp_parts.choose_part`.

    Raises:
        SourceError: missing, damaged or contradictory files.
        UsageError: a prefix that no tensor has.
    """
    directories = list(dict.fromkeys(paths))
    found, shards = _find_files(directories)
    files: list[File] = []
    chunks: dict[str, _Chunks] = {}
    for path in found:
        file, entries, metadata = read_file_with_metadata(path)
        with about(path):
            _add_chunks(chunks, len(files), entries, metadata)
        files.append(file)
    with about(directories[0]):
        part = choose_part(list(chunks), (), {}, prefix)
        for key in part.names:
            refuse_flat_parameter(key)
        layouts = Layouts()
        tensors = tuple(_tensor(name, chunks[key], layouts) for key, name in part.names.items())
    assets, mixed = find_asset_folder(directories)
    return Checkpoint(
        root=directories[0],
        format=f"{NAME}, {shards} shard{'' if shards == 1 else 's'}",
        world_size=shards,
        files=tuple(files),
        tensors=tensors,
        skipped=part.skipped,
        directories=tuple(directories if mixed or assets is None else [*directories, assets]),
        assets=assets,
        assets_mixed=mixed,
    )


def _find_files(directories: Sequence[str]) -> tuple[list[str], int]:
    """The files in order of their shards, and the number of these."""
    found: dict[tuple[int, int, int], str] = {}
    for directory in directories:
        try:
            with os.scandir(directory) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            raise SourceError(f"{directory}: {error.strerror}") from error
        for name in names:
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            path = os.path.join(directory, name)
            shard, place, total = map(int, match.groups())
            other = found.setdefault((shard, place, total), path)
            if other != path and not os.path.samefile(other, path):
                raise InconsistentRanksError(f"{name} twice: {other} and {path}")
    where = ", ".join(directories)
    if not found:
        raise CheckpointNotFoundError(f"{where}: no {FILES} here")
    totals = {total: path for (_, _, total), path in found.items()}
    if len(totals) > 1:
        two = " and ".join(list(totals.values())[:2])
        raise InconsistentRanksError(f"{where}: files of different saves: {two}")
    shards = {shard for shard, _, _ in found}
    missing = [n for n in range(1, min(max(shards), len(shards) + _MAX_NAMED)) if n not in shards]
    if missing or min(shards) < 1:
        raise CheckpointNotFoundError(
            f"{where}: files of shards are missing: {', '.join(map(str, missing)) or 'from 1 on'}",
            hint="if each node kept its own files, give all their directories as sources",
        )
    return [found[key] for key in sorted(found)], len(shards)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The chunks of a tensor, in columns.

    Attributes:
        dtype: safetensors name.
        ndim: number of dims.
        bounds: for each chunk its offsets, then its sizes.
        files, members: where each is.
    """

    dtype: str
    ndim: int
    bounds: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("i"))
    members: array[int] = field(default_factory=lambda: array("i"))

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Offsets, sizes and number of each chunk."""
        ndim = self.ndim
        for number in range(len(self.files)):
            at = 2 * ndim * number
            offsets = tuple(self.bounds[at : at + ndim])
            yield offsets, tuple(self.bounds[at + ndim : at + 2 * ndim]), number


def _add_chunks(
    chunks: dict[str, _Chunks], file: int, entries: Sequence[Entry], metadata: Mapping[str, str]
) -> None:
    """Add what one file holds."""
    version = metadata.get(_VERSION, "1.0")
    if not version.startswith("1."):
        raise UnsupportedError(f"{_VERSION} {brief(version)}, known is 1")
    text = metadata.get(_INFO)
    if text is None:
        raise CorruptFileError(f"its metadata have no {_INFO}")
    info: Mapping[str, Any] = parse_json(text.encode(), _INFO)
    for member, entry in enumerate(entries):
        with about(f"key {quoted(entry.name)}"):
            said = info.get(entry.name)
            offsets = said.get(_OFFSETS) if isinstance(said, dict) else None
            place = tuple(offsets) if isinstance(offsets, list) else None
            if not is_shape(place) or len(place) != len(entry.shape):
                raise CorruptFileError(
                    f"its {_OFFSETS} are {brief(offsets)}, its shape is {list(entry.shape)}"
                )
            found = chunks.setdefault(entry.name, _Chunks(entry.dtype, len(entry.shape)))
            if (found.dtype, found.ndim) != (entry.dtype, len(entry.shape)):
                raise InconsistentRanksError(
                    f"{entry.dtype} of {len(entry.shape)} dims here, {found.dtype} of "
                    f"{found.ndim} in other files"
                )
            found.bounds.extend(place)
            found.bounds.extend(entry.shape)
            found.files.append(file)
            found.members.append(member)


def _tensor(name: str, chunks: _Chunks, layouts: Layouts) -> Tensor:
    every = sorted(chunks)
    ends = [[o + n for o, n in zip(offsets, sizes, strict=True)] for offsets, sizes, _ in every]
    shape = tuple(map(max, zip(*ends, strict=True)))
    used = [chunk for chunk in every if 0 not in chunk[1]] or every[:1]
    with about(f"key {quoted(name)}"):
        layout = layouts.layout(shape, [(offsets, sizes) for offsets, sizes, _ in used])
    numbers = [number for _, _, number in used]
    extents = Extents(
        array("i", [chunks.files[number] for number in numbers]),
        array("i", [chunks.members[number] for number in numbers]),
        layouts.zeros(len(numbers)),
    )
    return Tensor(name, chunks.dtype, shape, layout, extents)
