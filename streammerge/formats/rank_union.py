"""Compares what the rank files say of each key, and puts it together. Pure.

There are ranks times tensors of them, half a million and more, but they have few forms. So forms
are compared once for each way in which they occur together, and all that is done for each rank and
tensor is to copy its place in the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streammerge.checkpoint import (
    Boxes,
    BoxLayout,
    Extents,
    Layout,
    MeshLayout,
    PlainLayout,
    Tensor,
)
from streammerge.entries import (
    BoxForm,
    Form,
    Ints,
    Mesh,
    MeshForm,
    PlainForm,
    RankFile,
    View,
    quoted,
)
from streammerge.errors import (
    InconsistentRanksError,
    PlacementError,
    about,
)
from streammerge.placement import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    check_tiling,
    local_shape,
    mesh_positions,
)

_ABSENT = -1
_PLACEMENTS: dict[str, type[Placement]] = {
    "Shard": Shard,
    "StridedShard": StridedShard,
    "Replicate": Replicate,
    "Partial": Partial,
}
_KINDS: dict[type[Form], str] = {
    PlainForm: "a plain tensor",
    MeshForm: "a DTensor",
    BoxForm: "a ShardedTensor",
}


def collect_keys(ranks: Sequence[RankFile]) -> tuple[dict[str, int], dict[str, str]]:
    """The keys of all rank files.

    Returns:
        Those of tensors, with the first rank that has it, and the others, with what they hold.

    Raises:
        InconsistentRanksError: a key that holds a tensor in some files only.
    """
    names: dict[str, int] = {}
    skipped: dict[str, tuple[str, int]] = {}
    for rank, found in enumerate(ranks):
        for name, kind in found.skipped:
            if name in names:
                raise InconsistentRanksError(
                    f"{found.file.path}: key {quoted(name)}: no tensor ({kind}) here, but one in "
                    f"{ranks[names[name]].file.path}"
                )
            skipped.setdefault(name, (kind, rank))
        if rank and found.names is ranks[rank - 1].names:
            continue
        for name in found.names:
            if name in skipped:
                kind, other = skipped[name]
                raise InconsistentRanksError(
                    f"{found.file.path}: key {quoted(name)}: a tensor here, but none ({kind}) in "
                    f"{ranks[other].file.path}"
                )
            names.setdefault(name, rank)
    return names, {name: kind for name, (kind, _) in skipped.items()}


def unite(ranks: Sequence[RankFile], names: Iterable[str]) -> Iterator[Tensor]:
    """The tensors of a checkpoint, each compared over all ranks.

    Args:
        ranks: what the files hold, by rank.
        names: the keys of tensors in all files, in the order of the result.

    Raises:
        SourceError: rank files that contradict each other, shards that are missing or do not tile.
    """
    rows = _Rows(ranks, {name: place for place, name in enumerate(names)})
    arranger = _Arranger([found.file.path for found in ranks], list(rows.forms), list(rows.meshes))
    arrangements: dict[Ints, _Arrangement] = {}
    zeros: dict[int, array[int]] = {}
    for name, place in rows.places.items():
        kinds = tuple([row[place] for row in rows.kinds])
        found = arrangements.get(kinds)
        if found is None:
            found = arrangements[kinds] = arranger.arrange(name, kinds)
        if place in rows.shards:
            extents = _extents_of_shards(rows.shards[place])
        else:
            members = array("i", [rows.members[rank][place] for rank in found.ranks])
            starts = array("q", [rows.starts[rank][place] for rank in found.ranks])
            if not any(starts):  # as FSDP2 has it; then one column is enough
                starts = zeros.setdefault(len(starts), starts)
            extents = Extents(found.ranks, members, starts)
            views = rows.odd.get(place, {})
            for slot, rank in enumerate(found.ranks if views else ()):
                if rank in views:
                    _note_oddness(extents, slot, views[rank])
        yield Tensor(name, found.dtype, found.shape, found.layout, extents, found.conflicts)


class _Rows:
    """The columns of all rank files in one numbering of tensors, forms and meshes.

    Attributes:
        places: key of a tensor -> its number.
        forms, meshes: the same for these; forms refer to this numbering of meshes.
        kinds, members, starts: by rank, as in `RankFile`; `_ABSENT` where a rank lacks a tensor.
        odd, shards: as in `RankFile`, by tensor, then by rank.
    """

    def __init__(self, ranks: Sequence[RankFile], places: dict[str, int]) -> None:
        self.places = places
        self.forms: dict[Form, int] = {}
        self.meshes: dict[Mesh, int] = {}
        self.kinds: list[array[int]] = []
        self.members: list[array[int]] = []
        self.starts: list[array[int]] = []
        self.odd: dict[int, dict[int, View]] = {}
        self.shards: dict[int, dict[int, list[View]]] = {}
        every = list(range(len(places)))
        numbers = every
        for rank, found in enumerate(ranks):
            if rank == 0 or found.names is not ranks[rank - 1].names:
                numbers = [places[name] for name in found.names]
            forms = self._number_forms(found)
            kinds = array("i", [forms[kind] for kind in found.kinds])
            columns = [
                (self.kinds, kinds),
                (self.members, found.members),
                (self.starts, found.starts),
            ]
            for rows, column in columns:
                row = column if numbers == every else _spread(column, numbers, len(every))
                rows.append(rows[-1] if rows and row == rows[-1] else row)  # most are equal
            for position, view in found.odd.items():
                self.odd.setdefault(numbers[position], {})[rank] = view
            for position, views in found.shards.items():
                self.shards.setdefault(numbers[position], {})[rank] = views

    def _number_forms(self, found: RankFile) -> list[int]:
        meshes = [self.meshes.setdefault(mesh, len(self.meshes)) for mesh in found.meshes]
        forms = (
            form._replace(mesh=meshes[form.mesh]) if isinstance(form, MeshForm) else form
            for form in found.forms
        )
        return [self.forms.setdefault(form, len(self.forms)) for form in forms]


def _spread(column: array[int], numbers: Sequence[int], count: int) -> array[int]:
    """The values of one rank at the numbers of their tensors, `_ABSENT` elsewhere."""
    row = array(column.typecode, [_ABSENT]) * count
    for number, value in zip(numbers, column, strict=True):
        row[number] = value
    return row


def _extents_of_shards(shards: Mapping[int, Sequence[View]]) -> Extents:
    extents = Extents()
    for rank, views in shards.items():
        for view in views:
            extents.add(rank, view.member, view.start, view.strides, view.conj)
    return extents


def _note_oddness(extents: Extents, slot: int, view: View) -> None:
    if view.strides is not None:
        extents.strides[slot] = view.strides
    if view.conj:
        extents.conjugated.add(slot)


# --- forms that occur together ---


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """What the rank files say together of a tensor, but for where its bytes are.

    Attributes:
        dtype, shape, layout, conflicts: as in `Tensor`.
        ranks: the rank of each slot.
    """

    dtype: str
    shape: Ints
    layout: Layout
    ranks: array[int]
    conflicts: tuple[tuple[int, str], ...] = ()


class _Arranger:
    """Compares forms over the ranks.

    Args:
        paths: the rank files, by rank.
        forms, meshes: what the numbers stand for.
    """

    def __init__(self, paths: Sequence[str], forms: Sequence[Form], meshes: Sequence[Mesh]) -> None:
        self._paths = paths
        self._forms = forms
        self._meshes = meshes
        # By value. Tensors share layouts, so that what follows from one is worked out once.
        self._layouts: dict[object, Layout] = {}
        self._shardings: dict[object, Sharding] = {}
        self._positions: dict[int, dict[int, Ints]] = {}

    def arrange(self, name: str, kinds: Sequence[int]) -> _Arrangement:
        """Compare the forms of one key.

        Args:
            name: the key, for messages.
            kinds: number of the form by rank.
        """
        key = f"key {quoted(name)}"
        forms: dict[int, Any] = {
            rank: self._forms[kind] for rank, kind in enumerate(kinds) if kind != _ABSENT
        }
        first_rank, first = next(iter(forms.items()))
        for rank, form in forms.items():
            if type(form) is not type(first):
                raise InconsistentRanksError(
                    f"{self._paths[rank]}: {key}: {_KINDS[type(form)]} here, "
                    f"{_KINDS[type(first)]} in {self._paths[first_rank]}"
                )
        if isinstance(first, PlainForm):
            return self._arrange_plain(forms)
        if isinstance(first, MeshForm):
            return self._arrange_mesh(key, forms)
        return self._arrange_boxes(key, forms)

    def _arrange_plain(self, forms: Mapping[int, PlainForm]) -> _Arrangement:
        first = next(iter(forms.values()))
        # Not an error yet: --replicas first may go on without these copies.
        conflicts = tuple(
            (rank, f"{form.dtype} {list(form.sizes)}")
            for rank, form in forms.items()
            if form != first
        )
        ranks = tuple(rank for rank, form in forms.items() if form == first)
        layout = self._layouts.setdefault(ranks, PlainLayout(ranks))
        return _Arrangement(first.dtype, first.sizes, layout, array("i", ranks), conflicts)

    def _arrange_mesh(self, key: str, forms: Mapping[int, MeshForm]) -> _Arrangement:
        first_rank, first = next(iter(forms.items()))
        mesh_of: dict[int, int] = {}
        for rank, form in forms.items():
            with about(f"{self._paths[rank]}: {key}"):
                self._compare_mesh_forms(form, first, first_rank)
                if self._holds_part(rank, form):
                    mesh_of[rank] = form.mesh
        with about(key):
            ranks = self._ranks_of_meshes(mesh_of)
        meshes = tuple(dict.fromkeys(mesh_of.values()))
        sharding = self._sharding(first)
        dim_names = self._meshes[first.mesh].dim_names
        layout = self._layouts.setdefault(
            (sharding, dim_names, meshes),
            MeshLayout(sharding, dim_names, tuple(self._meshes[mesh].ranks for mesh in meshes)),
        )
        return _Arrangement(first.dtype, first.shape, layout, array("i", ranks))

    def _compare_mesh_forms(self, form: MeshForm, first: MeshForm, first_rank: int) -> None:
        here, there = self._sharding(form), self._sharding(first)
        for what, found, expected in (
            ("global shape", list(form.shape), list(first.shape)),
            ("dtype", form.dtype, first.dtype),
            ("placements", str(here), str(there)),
            ("shard_order", here.shard_order, there.shard_order),
            ("use_strided_shard_as_shard_order", here.strided_is_order, there.strided_is_order),
        ):
            if found != expected:
                raise InconsistentRanksError(
                    f"{what} {found} here, {expected} in {self._paths[first_rank]}"
                )

    def _holds_part(self, rank: int, form: MeshForm) -> bool:
        """Whether a rank is in its mesh; its local shard is then the one that belongs there."""
        mesh = self._meshes[form.mesh]
        position = self._positions_in(form.mesh).get(rank)
        if position is None:
            if 0 not in form.sizes:
                raise PlacementError(
                    f"rank {rank} holds data, but is not in its device mesh {mesh}"
                )
            return False
        sharding = self._sharding(form)
        expected = local_shape(form.shape, sharding, position)
        # A shard without elements may have lost its other dims (torch makes it [0]).
        if form.sizes != expected and not (0 in expected and 0 in form.sizes):
            raise PlacementError(
                f"local shard has shape {list(form.sizes)}, rank {rank} of {sharding} should "
                f"hold {list(expected)} of {list(form.shape)}"
            )
        return True

    def _ranks_of_meshes(self, mesh_of: Mapping[int, int]) -> list[int]:
        """The ranks of all meshes, mesh after mesh, each of which holds its part."""
        if not mesh_of:
            raise PlacementError("no rank of its device mesh holds it")
        ranks: list[int] = []
        for number in dict.fromkeys(mesh_of.values()):
            mesh = self._meshes[number]
            for rank in mesh.ranks:
                other = mesh_of.get(rank)
                if other is None:
                    raise PlacementError(
                        f"the device mesh {mesh} spreads it over rank {rank}, but "
                        f"{self._paths[rank]} does not hold it"
                    )
                if other != number:
                    raise InconsistentRanksError(
                        f"rank {rank} is in the device mesh {mesh} by the file of another rank, "
                        f"in {self._meshes[other]} by {self._paths[rank]}"
                    )
                ranks.append(rank)
        return ranks

    def _arrange_boxes(self, key: str, forms: Mapping[int, BoxForm]) -> _Arrangement:
        first_rank, first = next(iter(forms.items()))
        boxes: list[Box] = []
        ranks: list[int] = []
        for rank, form in forms.items():
            for what, found, expected in (
                ("global shape", list(form.shape), list(first.shape)),
                ("dtype", form.dtype, first.dtype),
            ):
                if found != expected:
                    raise InconsistentRanksError(
                        f"{self._paths[rank]}: {key}: {what} {found} here, {expected} in "
                        f"{self._paths[first_rank]}"
                    )
            boxes += [Box.whole_shard(*part) for part in form.held]
            ranks += [rank] * len(form.held)
        with about(key):
            self._check_listings(forms)
        holders = array("i", ranks)
        layout = BoxLayout(Boxes.of(boxes, len(first.shape)), holders)
        return _Arrangement(first.dtype, first.shape, layout, holders)

    def _check_listings(self, forms: Mapping[int, BoxForm]) -> None:
        """What the metadata list is the same in all files, held by those it says, and tiles."""
        listings: dict[tuple[tuple[Ints, Ints, int], ...], int] = {}
        parts: dict[frozenset[tuple[Ints, Ints]], int] = {}
        for rank, form in forms.items():
            if form.listed not in listings:
                listings[form.listed] = rank
                parts.setdefault(frozenset(shard[:2] for shard in form.listed), rank)
        if len(parts) > 1:
            two = " and ".join(self._paths[rank] for rank in list(parts.values())[:2])
            raise InconsistentRanksError(f"{two} list different shards of it")
        held = {(*part, rank) for rank, form in forms.items() for part in form.held}
        for listing in listings:
            for shard in listing:
                offsets, sizes, owner = shard
                if 0 not in sizes and shard not in held:
                    known = 0 <= owner < len(self._paths)
                    where = self._paths[owner] if known else "no rank file"
                    raise PlacementError(
                        f"the shard at {list(offsets)} belongs to rank {owner}, but {where} does "
                        "not hold it"
                    )
            shape = next(iter(forms.values())).shape
            check_tiling(shape, [Box.whole_shard(o, n) for o, n, _ in listing])

    def _sharding(self, form: MeshForm) -> Sharding:
        mesh_shape = self._meshes[form.mesh].shape
        key = (mesh_shape, form.placements, form.shard_order, form.strided_is_order)
        sharding = self._shardings.get(key)
        if sharding is None:
            placements = tuple(_PLACEMENTS[kind](*rest) for kind, *rest in form.placements)
            sharding = self._shardings[key] = Sharding(
                mesh_shape, placements, form.shard_order, form.strided_is_order
            )
        return sharding

    def _positions_in(self, number: int) -> Mapping[int, Ints]:
        """The position of each rank of a mesh, see `placement.mesh_positions`."""
        positions = self._positions.get(number)
        if positions is None:
            mesh = self._meshes[number]
            found = mesh_positions(mesh.shape, mesh.ranks)
            positions = self._positions[number] = dict(zip(mesh.ranks, found, strict=True))
        return positions
