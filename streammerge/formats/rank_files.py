"""Rank files: ``model_world_size_{W}_rank_{R}.pt``, one torch.save file per rank.

Written by verl (FSDP1 and FSDP2, also its VeOmni engine), EasyR1 and SkyRL, with
``fsdp_config.json`` (not by EasyR1) and ``huggingface/`` beside them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streammerge.checkpoint import (
    BoxLayout,
    Checkpoint,
    Extents,
    File,
    Layout,
    MeshLayout,
    PlainLayout,
    Skipped,
    Tensor,
)
from streammerge.entries import (
    BoxEntry,
    Entry,
    EntryReader,
    Mesh,
    MeshEntry,
    PlainEntry,
    View,
    kind_of,
    unwrap,
)
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    SourceError,
    UnsupportedError,
)
from streammerge.placement import Box, check_tiling, local_shape
from streammerge.torchfile import read_torch_file
from streammerge.unpickler import brief

NAME = "FSDP rank files"
FILES = "model_world_size_{W}_rank_{R}.pt"
ASSETS = "huggingface"
CONFIG = "fsdp_config.json"

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_FLAT_PARAMETERS = {"_flat_param", "flat_param"}


def matches(path: str) -> bool:
    """Whether a directory holds rank files."""
    try:
        with os.scandir(path) as entries:
            return any(_RANK_FILE.fullmatch(entry.name) for entry in entries)
    except OSError:
        return False


def describe(paths: Sequence[str]) -> Checkpoint:
    """Read the metadata of all rank files in one or several directories.

    Raises:
        SourceError: missing, damaged or contradictory rank files.
    """
    world_size, rank_files = _find_rank_files(paths)
    builders: dict[str, _TensorBuilder] = {}
    interned: dict[object, Any] = {}
    skipped: dict[str, tuple[Skipped, str]] = {}
    around: dict[str, Skipped] = {}
    files: list[File] = []
    for rank in range(world_size):
        path = rank_files[rank]
        source = read_torch_file(path)
        files.append(source.file)
        reader = EntryReader(source, rank, world_size, interned)
        try:
            state_dict, beside = unwrap(source.root)
            for name, value in state_dict.items():
                _add(builders, skipped, interned, reader, rank, path, name, value)
        except SourceError as error:
            raise type(error)(f"{path}: {error}", hint=error.hint) from error
        for key, value in beside.items():
            around.setdefault(str(key), Skipped(str(key), f"{kind_of(value)} beside the model"))
    if not builders:
        keys = ", ".join(map(repr, list(skipped)[:5])) or "none"
        raise UnsupportedError(f"{paths[0]}: the rank files hold no tensors (keys: {keys})")
    directories = list(dict.fromkeys(paths))
    assets = next((d for d in (os.path.join(p, ASSETS) for p in paths) if os.path.isdir(d)), None)
    return Checkpoint(
        root=paths[0],
        format=NAME,
        world_size=world_size,
        files=tuple(files),
        tensors=tuple(builder.finish(rank_files) for builder in builders.values()),
        skipped=(*(entry for entry, _ in skipped.values()), *around.values()),
        directories=tuple(directories if assets is None else [*directories, assets]),
        assets=assets,
    )


def _add(
    builders: dict[str, _TensorBuilder],
    skipped: dict[str, tuple[Skipped, str]],
    interned: dict[object, Any],
    reader: EntryReader,
    rank: int,
    path: str,
    name: object,
    value: object,
) -> None:
    if not isinstance(name, str):
        raise UnsupportedError(f"key {brief(name)} is no name")
    if name.rsplit(".", 1)[-1] in _FLAT_PARAMETERS:
        raise UnsupportedError(
            f"key '{name}' is a flat parameter of FSDP1 (LOCAL_STATE_DICT): several weights in "
            "one tensor, without their names and shapes",
            hint="save with StateDictType.SHARDED_STATE_DICT",
        )
    try:
        entry = reader.read(value)
        builder = builders.get(name)
        if entry is None:
            if builder is not None:
                raise InconsistentRanksError(
                    f"no tensor ({kind_of(value)}) here, but one in {builder.first_path}"
                )
            skipped.setdefault(name, (Skipped(name, kind_of(value)), path))
            return
        if name in skipped:
            raise InconsistentRanksError(
                f"a tensor here, but none ({skipped[name][0].kind}) in {skipped[name][1]}"
            )
        if builder is None:
            builder = builders[name] = _TensorBuilder(name, entry, path, interned)
        builder.add(rank, path, entry)
    except SourceError as error:
        raise type(error)(f"key '{name}': {error}", hint=error.hint) from error


# --- finding the files ---


def _find_rank_files(paths: Sequence[str]) -> tuple[int, dict[int, str]]:
    """World size and rank -> path."""
    found: dict[int, dict[int, str]] = {}
    for path in dict.fromkeys(paths):
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None:
                continue
            world_size, rank = int(match[1]), int(match[2])
            ranks = found.setdefault(world_size, {})
            file = os.path.join(path, name)
            if rank in ranks and not os.path.samefile(ranks[rank], file):
                raise InconsistentRanksError(f"rank {rank} twice: {ranks[rank]} and {file}")
            ranks.setdefault(rank, file)
    where = ", ".join(paths)
    if len(found) != 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise InconsistentRanksError(
            f"{where}: rank files of several world sizes ({sizes})",
            hint="keep the files of one run only",
        )
    ((world_size, ranks),) = found.items()
    for path in paths:
        _check_config(os.path.join(path, CONFIG), world_size)
    strange = [rank for rank in ranks if rank >= world_size]
    if strange:
        raise InconsistentRanksError(
            f"{ranks[strange[0]]}: rank {strange[0]} of a world size of {world_size}"
        )
    if len(ranks) < world_size:
        missing = (rank for rank in range(world_size) if rank not in ranks)
        raise CheckpointNotFoundError(
            f"{where}: {world_size - len(ranks)} of {world_size} rank files missing: "
            f"rank{'s' if world_size - len(ranks) > 1 else ''} {_ranges(missing)}",
            hint="if each node kept its own files, give all their directories as sources",
        )
    return world_size, ranks


def _check_config(path: str, world_size: int) -> None:
    try:
        with open(path, encoding="utf-8") as stream:
            config = json.load(stream)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not JSON ({error})") from error
    stated = config.get("world_size") if isinstance(config, dict) else None
    if stated is not None and stated != world_size:
        raise InconsistentRanksError(
            f"{path}: says world_size {stated!r:.40}, the rank files say {world_size}"
        )


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers for people, all of them: ``1, 4-7``."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(parts)


# --- putting the ranks together ---


class _TensorBuilder:
    """Collects what the rank files say of one key and checks each against the first."""

    def __init__(self, name: str, entry: Entry, path: str, interned: dict[object, Any]) -> None:
        self.name = name
        # Tensors share layouts too, so that each is worked out once per shape.
        self.interned = interned
        self.first = entry
        self.first_path = path
        self.ranks = array("i")
        self.extents = Extents()
        self.conflicts: list[tuple[int, str]] = []
        self.meshes: list[Mesh] = []
        self.boxes: list[Box] = []
        # What the metadata of the rank files list, with the first file that says so.
        self.listings: dict[tuple[tuple[Box, int], ...], str] = {}

    def add(self, rank: int, path: str, entry: Entry) -> None:
        first = self.first
        if type(entry) is not type(first):
            raise InconsistentRanksError(
                f"{_describe_kind(entry)} here, {_describe_kind(first)} in {self.first_path}"
            )
        if isinstance(entry, PlainEntry):
            self._add_plain(rank, entry)
        elif isinstance(entry, MeshEntry):
            self._add_mesh(rank, entry)
        else:
            self._add_boxes(rank, path, entry)

    def finish(self, rank_files: Mapping[int, str]) -> Tensor:
        """The tensor, once all rank files are in.

        Raises:
            SourceError: local shards that are missing or do not tile.
        """
        try:
            layout, extents = self._layout(rank_files)
        except SourceError as error:
            raise type(error)(f"key '{self.name}': {error}", hint=error.hint) from error
        first = self.first
        if isinstance(first, BoxEntry):
            dtype, shape = first.dtype, first.shape
        else:
            dtype = first.view.dtype
            shape = first.view.sizes if isinstance(first, PlainEntry) else first.shape
        return Tensor(self.name, dtype, shape, layout, extents, tuple(self.conflicts))

    def _add_plain(self, rank: int, entry: PlainEntry) -> None:
        assert isinstance(self.first, PlainEntry)
        first, view = self.first.view, entry.view
        if (view.sizes, view.dtype) != (first.sizes, first.dtype):
            # Not an error yet: --replicas first may go on without this copy.
            self.conflicts.append((rank, f"{view.dtype} {list(view.sizes)}"))
            return
        self._add_extent(rank, view)

    def _add_mesh(self, rank: int, entry: MeshEntry) -> None:
        assert isinstance(self.first, MeshEntry)
        first = self.first
        here, there = entry.sharding, first.sharding
        if (entry.shape, entry.view.dtype, here) != (first.shape, first.view.dtype, there):
            for what, found, expected in (
                ("global shape", list(entry.shape), list(first.shape)),
                ("dtype", entry.view.dtype, first.view.dtype),
                ("placements", str(here), str(there)),
                ("shard_order", here.shard_order, there.shard_order),
                (
                    "use_strided_shard_as_shard_order",
                    here.strided_is_order,
                    there.strided_is_order,
                ),
            ):
                if found != expected:
                    raise InconsistentRanksError(
                        f"{what} {found} here, {expected} in {self.first_path}"
                    )
        if entry.position is None:
            if 0 not in entry.view.sizes:
                raise PlacementError(
                    f"rank {rank} holds data, but is not in its device mesh {entry.mesh}"
                )
            return
        expected_sizes = local_shape(entry.shape, entry.sharding, entry.position)
        # A shard without elements may have lost its other dims (torch makes it [0]).
        if entry.view.sizes != expected_sizes and not (
            0 in expected_sizes and 0 in entry.view.sizes
        ):
            raise PlacementError(
                f"local shard has shape {list(entry.view.sizes)}, rank {rank} of "
                f"{entry.sharding} should hold {list(expected_sizes)} of {list(entry.shape)}"
            )
        self.meshes.append(entry.mesh)
        self._add_extent(rank, entry.view)

    def _add_boxes(self, rank: int, path: str, entry: BoxEntry) -> None:
        assert isinstance(self.first, BoxEntry)
        for what, found, expected in (
            ("global shape", list(entry.shape), list(self.first.shape)),
            ("dtype", entry.dtype, self.first.dtype),
        ):
            if found != expected:
                raise InconsistentRanksError(
                    f"{what} {found} here, {expected} in {self.first_path}"
                )
        self.listings.setdefault(entry.owners, path)
        for view, box in zip(entry.views, entry.boxes, strict=True):
            self.boxes.append(box)
            self._add_extent(rank, view)

    def _add_extent(self, rank: int, view: View) -> None:
        self.ranks.append(rank)
        self.extents.add(rank, view.member, view.start, view.strides, view.conj)

    def _layout(self, rank_files: Mapping[int, str]) -> tuple[Layout, Extents]:
        if isinstance(self.first, MeshEntry):
            return self._mesh_layout(self.first, rank_files)
        if isinstance(self.first, BoxEntry):
            return self._box_layout(self.first, rank_files)
        ranks = tuple(self.ranks)
        return self.interned.setdefault(ranks, PlainLayout(ranks)), self.extents

    def _mesh_layout(
        self, first: MeshEntry, rank_files: Mapping[int, str]
    ) -> tuple[MeshLayout, Extents]:
        slots = {rank: slot for slot, rank in enumerate(self.ranks)}
        meshes = list({id(mesh): mesh for mesh in self.meshes}.values())
        if not meshes:
            raise PlacementError("no rank of its device mesh holds it")
        extents = Extents()
        for mesh in meshes:
            for rank in mesh.ranks:
                slot = slots.get(rank)
                if slot is None:
                    raise PlacementError(
                        f"the device mesh {mesh} spreads it over rank {rank}, but "
                        f"{rank_files[rank]} does not hold it"
                    )
                if self.meshes[slot] is not mesh:
                    raise InconsistentRanksError(
                        f"rank {rank} is in the device mesh {mesh} by the file of another "
                        f"rank, in {self.meshes[slot]} by {rank_files[rank]}"
                    )
                extents.add(
                    self.extents.files[slot],
                    self.extents.members[slot],
                    self.extents.starts[slot],
                    self.extents.strides.get(slot),
                    slot in self.extents.conjugated,
                )
        key = (first.sharding, first.mesh.dim_names, *map(id, meshes))
        layout = self.interned.get(key)
        if layout is None:
            ranks = tuple(mesh.ranks for mesh in meshes)
            layout = MeshLayout(first.sharding, first.mesh.dim_names, ranks)
            self.interned[key] = layout
        return layout, extents

    def _box_layout(
        self, first: BoxEntry, rank_files: Mapping[int, str]
    ) -> tuple[BoxLayout, Extents]:
        held = {(box, rank) for box, rank in zip(self.boxes, self.ranks, strict=True)}
        parts = {
            frozenset(box for box, _ in listing): path for listing, path in self.listings.items()
        }
        if len(parts) > 1:
            raise InconsistentRanksError(
                f"{' and '.join(list(parts.values())[:2])} list different shards of it"
            )
        for listing in self.listings:
            boxes = [box for box, _ in listing]
            for box, owner in listing:
                if 0 not in box.sizes and (box, owner) not in held:
                    where = rank_files.get(owner, "no rank file")
                    raise PlacementError(
                        f"the shard at {list(box.offsets)} belongs to rank {owner}, but "
                        f"{where} does not hold it"
                    )
            check_tiling(first.shape, boxes)
        return BoxLayout(tuple(self.boxes), tuple(self.ranks)), self.extents


def _describe_kind(entry: Entry) -> str:
    if isinstance(entry, PlainEntry):
        return "a plain tensor"
    return "a DTensor" if isinstance(entry, MeshEntry) else "a ShardedTensor"
