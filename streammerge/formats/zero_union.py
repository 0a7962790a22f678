"""Puts the partitions of DeepSpeed ZeRO together. Pure.

ZeRO-1 and 2 flatten the parameters of each group into one vector, pad it at its end, and give each
rank an equal range of it. ZeRO-3 flattens and pads each parameter by itself, gives each rank an
equal range of that, and joins a rank's ranges in the order of the parameters. Both ways a rank
holds ranges of flattened parameters, which may begin in the middle of a row, and padding, which
belongs to none.

Source: ``deepspeed/utils/zero_to_fp32.py`` and ``runtime/zero/stage_1_and_2.py`` (DeepSpeed 0.19).
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from streammerge.checkpoint import Extents, FlatLayout, PlainLayout, Tensor
from streammerge.dtypes import ITEMSIZE
from streammerge.entries import Ints, quoted
from streammerge.errors import InconsistentRanksError, PlacementError, UnsupportedError
from streammerge.formats.zero_files import Local, ModelStates, OptimizerStates, Shapes
from streammerge.placement import check_flat_tiling

# DeepSpeed pads a group to a multiple of this for each rank (nccl_start_alignment_factor).
_ALIGNMENT = 2


class _Piece(NamedTuple):
    """A range of a flattened parameter.

    Attributes:
        rank: that holds it.
        file: index of its file.
        stored: the flat tensor that it is in.
        start: its first element there.
        begin: its first element in the parameter.
        numel: elements.
    """

    rank: int
    file: int
    stored: Local
    start: int
    begin: int
    numel: int


def unite(models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]) -> list[Tensor]:
    """The tensors of a checkpoint, in the order of the module's state dict.

    Files are numbered in the order in which they are given, model states first.

    Args:
        models: the model states: of rank 0, or with ZeRO-3 of every rank.
        optimizers: the optimizer states of every rank; none if no ZeRO optimizer wrote any.

    Raises:
        SourceError: files that contradict each other, partitions that do not fit the parameters.
    """
    _compare_models(models)
    union = _Union(models, optimizers)
    tensors = {tensor.name: tensor for tensor in union.trained()}
    for tensor in union.frozen():
        tensors.setdefault(tensor.name, tensor)
    shared = models[0].shared
    for name in models[0].module:
        if name not in tensors and shared.get(name, name) not in tensors:
            tensors[name] = union.whole(name)
    for name, source in shared.items():
        if source in tensors and name not in tensors:
            tensors[name] = union.alias(name, tensors[source])
    order = itertools.chain((n for n in models[0].module if n in tensors), tensors)
    return [tensors[name] for name in dict.fromkeys(order)]


def _compare_models(models: Sequence[ModelStates]) -> None:
    """Every rank of ZeRO-3 lists the same parameters."""
    first = models[0]
    for model in models[1:]:
        for what, found, expected in (
            ("global_steps", model.step, first.step),
            ("param_shapes", model.groups, first.groups),
            ("frozen_param_shapes", model.frozen, first.frozen),
            ("buffer_names", model.buffers, first.buffers),
        ):
            if found != expected:
                said = f"{found} here, {expected}" if what == "global_steps" else "others than"
                raise InconsistentRanksError(
                    f"{model.file.path}: '{what}': {said} in {first.file.path}",
                    hint="are they files of one and the same step?",
                )


class _Union:
    """Makes tensors of what the files say together."""

    def __init__(
        self, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        # By value. Tensors of one size have the same layout, and lie in the same members.
        self._layouts: dict[object, FlatLayout] = {}
        self._columns: dict[object, array[int]] = {}

    # --- parameters that the optimizer owns ---

    def trained(self) -> Iterator[Tensor]:
        """The parameters that the optimizer owns, group by group."""
        groups = self._models[0].groups
        if not self._optimizers or groups is None:
            return
        stage = self._optimizers[0].stage
        pieces = self._slices(groups) if stage == 3 else self._ranges(groups)
        for name, shape, parts in pieces:
            local = self._models[0].module.get(name)
            if local is not None and local.sizes != shape and (stage < 3 or 0 not in local.sizes):
                raise InconsistentRanksError(
                    f"{self._models[0].file.path}: key {quoted(name)}: shape {list(local.sizes)} "
                    f"in 'module', {list(shape)} in 'param_shapes'"
                )
            yield self._flat(name, shape, parts, None if local is None else local.dtype)

    def _ranges(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, Ints, list[_Piece]]]:
        """ZeRO-1 and 2: ranges of one vector per group."""
        for number, shapes in enumerate(groups):
            partitions = [states.partitions[number] for states in self._optimizers]
            ends = self._ends_of_group(number, partitions)
            at = 0
            for (name, shape), gap in zip(shapes, self._gaps(number, shapes), strict=True):
                numel = math.prod(shape)
                if at + numel > ends[-1]:
                    raise PlacementError(
                        f"{self._optimizers[-1].file.path}: key {quoted(name)}: takes elements "
                        f"{at:,} to {at + numel:,} of group {number}, of which the partitions of "
                        f"all ranks hold {ends[-1]:,}"
                    )
                pieces = [
                    self._piece(rank, partitions[rank], start, begin, length)
                    for rank, start, begin, length in _cut(ends, at, numel)
                ]
                self._check_fragments(number, name, pieces)
                yield name, shape, pieces
                at += numel + gap
            unit = _ALIGNMENT * len(self._optimizers)
            if -(-at // unit) != -(-ends[-1] // unit):
                raise PlacementError(
                    f"{self._optimizers[0].file.path}: 'single_partition_of_fp32_groups': the "
                    f"partitions of group {number} hold {ends[-1]:,} elements, its parameters "
                    f"take {at:,}"
                )

    def _ends_of_group(self, number: int, partitions: Sequence[Local]) -> list[int]:
        """Where each rank's partition ends in the vector; only its padding may be left out."""
        sizes = [partition.sizes[0] for partition in partitions]
        for rank, (before, size) in enumerate(itertools.pairwise(sizes), start=1):
            if size > sizes[0] or (size and before != sizes[0]):
                raise InconsistentRanksError(
                    f"{self._optimizers[rank].file.path}: "
                    f"'single_partition_of_fp32_groups': {size:,} elements of group {number}, "
                    f"after partitions of {sizes[0]:,} and {before:,}"
                )
        return list(itertools.accumulate(sizes))

    def _gaps(self, number: int, shapes: Shapes) -> Ints:
        gaps = self._optimizers[0].gaps
        if gaps is None:
            return (0,) * len(shapes)
        if len(gaps) <= number or len(gaps[number]) != len(shapes):
            raise InconsistentRanksError(
                f"{self._optimizers[0].file.path}: 'param_alignment_paddings' of group {number} "
                f"are not those of {len(shapes)} parameters"
            )
        return gaps[number]

    def _check_fragments(self, number: int, name: str, pieces: Sequence[_Piece]) -> None:
        """Compare with what the ranks list themselves."""
        held = {piece.rank: (piece.start, piece.numel) for piece in pieces}
        for rank, states in enumerate(self._optimizers):
            if states.fragments is None:
                continue
            listed = states.fragments[number].get(name) if number < len(states.fragments) else None
            if listed is not None and listed.numel == 0:
                listed = None
            if listed != held.get(rank):
                raise PlacementError(
                    f"{states.file.path}: key {quoted(name)}: 'param_slice_mappings' says "
                    f"{_describe(listed)}, its place among the parameters gives "
                    f"{_describe(held.get(rank))}"
                )

    def _slices(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, Ints, list[_Piece]]]:
        """ZeRO-3: a slice of every parameter, padded to the same size on all ranks."""
        count = len(self._optimizers)
        ends = self._ends_of_slices()
        at = 0
        for name, shape in itertools.chain.from_iterable(groups):
            numel = math.prod(shape)
            size = -(-numel // count)
            if at + size > ends[-1]:
                raise PlacementError(
                    f"{self._optimizers[0].file.path}: key {quoted(name)}: takes elements {at:,} "
                    f"to {at + size:,} of the partition, which has {ends[-1]:,}"
                )
            pieces = []
            for rank, states in enumerate(self._optimizers):
                first = rank * size
                for group, start, begin, length in _cut(ends, at, min(size, numel - first)):
                    stored = states.partitions[group]
                    pieces.append(self._piece(rank, stored, start, first + begin, length))
            yield name, shape, pieces
            at += size
        if at != ends[-1]:
            raise PlacementError(
                f"{self._optimizers[0].file.path}: 'fp32_flat_groups': {ends[-1]:,} elements, the "
                f"slices of all parameters take {at:,}"
            )

    def _ends_of_slices(self) -> list[int]:
        """Where each flat tensor ends in a rank's slices, the same on all ranks."""
        first, *others = self._optimizers
        sizes = [partition.sizes for partition in first.partitions]
        for states in others:
            if [partition.sizes for partition in states.partitions] != sizes:
                raise InconsistentRanksError(
                    f"{states.file.path}: 'fp32_flat_groups': other sizes than in {first.file.path}"
                )
        return list(itertools.accumulate(size for (size,) in sizes)) or [0]

    def _piece(self, rank: int, stored: Local, start: int, begin: int, numel: int) -> _Piece:
        return _Piece(rank, len(self._models) + rank, stored, start, begin, numel)

    # --- parameters that are not trained ---

    def frozen(self) -> Iterator[Tensor]:
        """The parameters that are listed as not trained."""
        for name, shape in self._models[0].frozen.items():
            for model in self._models:
                if name not in model.fragments:
                    raise InconsistentRanksError(
                        f"{model.file.path}: key {quoted(name)}: not in 'frozen_param_fragments'"
                    )
            yield self._frozen(name, shape, [model.fragments[name] for model in self._models])

    def _frozen(self, name: str, shape: Ints, fragments: Sequence[Local]) -> Tensor:
        numel = math.prod(shape)
        size = -(-numel // len(fragments))
        if all(fragment.sizes == (size,) for fragment in fragments) and self._sliced:
            pieces = [
                _Piece(rank, rank, fragment, 0, rank * size, min(size, numel - rank * size))
                for rank, fragment in enumerate(fragments)
                if rank * size < numel
            ]
            return self._flat(name, shape, pieces, None)
        for model, fragment in zip(self._models, fragments, strict=True):
            if fragment.sizes != shape:
                raise PlacementError(
                    f"{model.file.path}: key {quoted(name)}: shape {list(fragment.sizes)} in "
                    f"'frozen_param_fragments', expected {list(shape)}"
                    + (f" or [{size}]" if self._sliced else "")
                )
        return self._plain(name, dict(enumerate(fragments)))

    @property
    def _sliced(self) -> bool:
        return bool(self._optimizers) and self._optimizers[0].stage == 3

    # --- what is in the module ---

    def whole(self, name: str) -> Tensor:
        """A buffer, or a parameter that the module's state dict holds."""
        found = {rank: m.module[name] for rank, m in enumerate(self._models) if name in m.module}
        if self._sliced and name not in self._models[0].buffers and found[0].sizes == (0,):
            raise UnsupportedError(
                f"{self._models[0].file.path}: key {quoted(name)}: its values are in no file: it "
                "is neither among the trained parameters nor among the frozen ones",
                hint="was it saved with exclude_frozen_parameters?",
            )
        return self._plain(name, found)

    def alias(self, name: str, source: Tensor) -> Tensor:
        """A parameter that is another one as well."""
        local = self._models[0].module.get(name)
        if local is not None and local.sizes != source.shape and not self._sliced:
            raise InconsistentRanksError(
                f"{self._models[0].file.path}: key {quoted(name)}: shape {list(local.sizes)}, but "
                f"'shared_params' says that it is {quoted(source.name)} of {list(source.shape)}"
            )
        return replace(source, name=name)

    # --- tensors ---

    def _flat(
        self, name: str, shape: Ints, pieces: Sequence[_Piece], module_dtype: str | None
    ) -> Tensor:
        """A tensor of ranges. Of one without elements, the first file holds all."""
        dtypes = {piece.stored.dtype for piece in pieces}
        if len(dtypes) > 1:
            raise InconsistentRanksError(
                f"key {quoted(name)}: partitions of several dtypes: {', '.join(sorted(dtypes))}"
            )
        if not pieces:
            return self._empty(name, shape, module_dtype)
        dtype = pieces[0].stored.dtype
        begins = self._column("q", [piece.begin for piece in pieces])
        counts = self._column("q", [piece.numel for piece in pieces])
        check_flat_tiling(math.prod(shape), begins, counts)
        ranks = tuple(piece.rank for piece in pieces)
        layout = self._layouts.setdefault(
            (id(begins), id(counts), ranks), FlatLayout(begins, counts, ranks)
        )
        itemsize = ITEMSIZE[dtype]
        extents = Extents(
            self._column("i", [piece.file for piece in pieces]),
            self._column("i", [piece.stored.view.member for piece in pieces]),
            array("q", [p.stored.view.start + p.start * itemsize for p in pieces]),
        )
        return Tensor(name, dtype, shape, layout, extents, module_dtype=module_dtype)

    def _empty(self, name: str, shape: Ints, module_dtype: str | None) -> Tensor:
        held = self._optimizers[0].partitions
        extents = Extents()
        extents.add(len(self._models), 0, 0, None, False)
        dtype = held[0].dtype if held else "F32"
        return Tensor(name, dtype, shape, PlainLayout((0,)), extents, module_dtype=module_dtype)

    def _plain(self, name: str, found: Mapping[int, Local]) -> Tensor:
        """A tensor of which every file that has it holds all."""
        first = next(iter(found.values()))
        extents = Extents()
        ranks, conflicts = [], []
        for rank, local in found.items():
            if (local.dtype, local.sizes) != (first.dtype, first.sizes):
                conflicts.append((rank, f"{local.dtype} {list(local.sizes)}"))
                continue
            ranks.append(rank)
            view = local.view
            extents.add(rank, view.member, view.start, view.strides, view.conj)
        layout = PlainLayout(tuple(ranks))
        return Tensor(name, first.dtype, first.sizes, layout, extents, tuple(conflicts))

    def _column(self, code: str, values: Sequence[int]) -> array[int]:
        column = array(code, values)
        return self._columns.setdefault((code, column.tobytes()), column)


def _cut(ends: Sequence[int], begin: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a range at the ends of the segments that it goes through.

    Args:
        ends: where each segment ends; the first starts at 0.
        begin, count: the range, which does not leave them.

    Yields:
        For each part the segment, where it starts there, where in the range, and its length.
    """
    at = begin
    while at < begin + count:
        segment = bisect_right(ends, at)
        start = at - (ends[segment - 1] if segment else 0)
        length = min(begin + count, ends[segment]) - at
        yield segment, start, at - begin, length
        at += length


def _describe(fragment: tuple[int, int] | None) -> str:
    if fragment is None:
        return "none of it is here"
    return f"elements {fragment[0]:,} to {sum(fragment):,}"
