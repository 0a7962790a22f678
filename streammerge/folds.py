"""The arithmetic of LoRA folds: ``W + scale * B @ A``, block by block.

A block is some rows of the result. How many depends on nothing but shapes, and each is computed
from matrices of the same sizes in equally aligned memory, so that the bytes depend on neither the
buffer budget nor the number of workers. All memory is cut out of the one buffer that is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streammerge.bands import Band
from streammerge.checkpoint import Tensor
from streammerge.dtypes import ITEMSIZE, torch_dtype
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Fold, Stored

if TYPE_CHECKING:
    import torch

_BLOCK_NUMEL = 1 << 18  # elements of the result per block
_LEAST_ROWS = 32  # per block: for every product, a BLAS first rearranges the whole right matrix
_SCRATCH_NUMEL = 1 << 15  # elements read or converted at once, to stay in the processor's cache
_ALIGNMENT = 64  # a BLAS may sum in another order where its operands lie differently


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A fold as matrices: result [rows, columns] = base + scale * left [rows, rank] @ right.

    Attributes:
        stacked: whether the result is a stack of such matrices, one per expert.
        rows, columns, rank: sizes.
        flipped: whether left is made of A and right of B.
    """

    stacked: bool
    rows: int
    columns: int
    rank: int
    flipped: bool


class _Layout(NamedTuple):
    """Bytes of each part of the buffer, in this order.

    Attributes:
        stored: the block's stored values, then its rounded result.
        product: the block's left times right, then the sum. While there is none, this and the
            part before serve to read whatever is read.
        left: the block's left matrix, then its magnitudes.
        right: the right matrix, which stays.
    """

    stored: int
    product: int
    left: int
    right: int


def fold_bands(fold: Fold) -> Iterator[Band]:
    """The blocks of a fold, as bands of its result."""
    if 0 in fold.shape:
        return
    matrices = _matrices(fold)
    lead = fold.shape[:1] if matrices.stacked else ()
    inner = fold.shape[len(lead) + 1 :]
    count = _block_rows(matrices)
    for expert in range(*lead) if lead else (None,):
        for first in range(0, matrices.rows, count):
            rows = min(count, matrices.rows - first)
            where = (first, *(0 for _ in inner))
            if expert is None:
                yield Band(where, (rows, *inner))
            else:
                yield Band((expert, *where), (1, rows, *inner))


def fold_nbytes(fold: Fold) -> int:
    """Bytes of buffer that a fold takes."""
    return sum(_layout(fold)) + _ALIGNMENT


def evaluate_fold(
    fold: Fold, band: Band, sources: Sources, buffer: BandBuffer, device: str
) -> memoryview:
    """The bytes of one of the `fold_bands`.

    Args:
        fold: what to compute.
        band: the block.
        sources: the files.
        buffer: `fold_nbytes` of memory.
        device: where, ``cpu`` or ``cuda``.

    Returns:
        The part of the buffer that holds the result.
    """
    expert = _expert(fold, band)
    workspace = buffer.kept
    if not isinstance(workspace, _Workspace) or not workspace.serves(fold, expert, device):
        workspace = _Workspace(fold, expert, device, sources, buffer.memory)
        buffer.kept = workspace
    return workspace.evaluate(band, sources)


class _Workspace:
    """The buffer of a thread, cut up for one fold and expert, with the right matrix loaded.

    Args:
        fold, expert, device: what to compute, of which expert, and where.
        sources: the files.
        memory: `fold_nbytes` of memory, wherever it starts.
    """

    def __init__(
        self, fold: Fold, expert: int, device: str, sources: Sources, memory: memoryview
    ) -> None:
        import torch

        self._fold, self._expert, self._device = fold, expert, device
        self._matrices = matrices = _matrices(fold)
        self._dtype = dtype = _sum_dtype(fold)
        layout = _layout(fold)
        memory = memory[-torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _ALIGNMENT :]
        self._room = BandBuffer(layout.stored + layout.product, memory)
        parts = []
        for nbytes in layout:
            parts.append(memory[:nbytes])
            memory = memory[nbytes:]
        _, self._product, self._left, right = parts
        self._right: torch.Tensor | None = None
        if fold.a is not None:
            loaded = _view(right, dtype, matrices.rank, matrices.columns)
            self._load_right(loaded, sources)
            self._right = loaded.to(device)

    def serves(self, fold: Fold, expert: int, device: str) -> bool:
        """Whether it was made for this."""
        return (self._fold, self._expert, self._device) == (fold, expert, device)

    def evaluate(self, band: Band, sources: Sources) -> memoryview:
        """The bytes of a block of the fold, see `evaluate_fold`."""
        import torch

        fold, stacked = self._fold, self._matrices.stacked
        first, rows = band.offsets[stacked], band.sizes[stacked]
        numel = rows * self._matrices.columns
        left, magnitudes = self._load_left(first, rows, sources)
        data = read_stored(fold.base, band, sources, self._room)
        stored = _view(data, fold.base.dtype, numel).to(self._device)
        # From here on, what serves to read holds the product.
        product = _view(self._product, self._dtype, rows, self._matrices.columns)
        if self._device != "cpu":
            product = torch.empty_like(product, device=self._device)
        if self._right is None:
            product.copy_(left)
        else:
            torch.mm(left.to(self._device), self._right, out=product)
        self._add(product.view(-1), stored)
        if magnitudes is not None:
            norms = torch.linalg.vector_norm(product, dim=1, keepdim=True)
            product.mul_(magnitudes.to(self._device) / norms)
        return self._round(product.view(-1))

    def _add(self, product: torch.Tensor, stored: torch.Tensor) -> None:
        """Scale the product and add the stored values.

        Little by little, as values of another dtype are converted into new memory.
        """
        for first in range(0, len(product), _SCRATCH_NUMEL):
            stripe = slice(first, first + _SCRATCH_NUMEL)
            product[stripe].mul_(self._fold.scale).add_(stored[stripe].to(product.dtype))

    def _round(self, total: torch.Tensor) -> memoryview:
        nbytes = len(total) * ITEMSIZE[self._fold.dtype]
        if self._device == "cpu" and self._fold.dtype == self._dtype:
            return self._product[:nbytes]
        result = self._room.memory[:nbytes]
        _view(result, self._fold.dtype, len(total)).copy_(total)
        return result

    def _load_left(
        self, first: int, rows: int, sources: Sources
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the left matrix, and the norms that DoRA gives to rows of the result."""
        fold, rank = self._fold, self._matrices.rank
        if fold.base.rows is not None and not fold.base.swapped:
            first += fold.base.rows[0]
        where = range(first, first + rows)
        left = _view(self._left, self._dtype, rows, rank)
        if fold.a is None:
            self._load(fold.b, where, range(1), left, sources)
        elif self._matrices.flipped:
            self._load(fold.a, self._rows_of_a(), where, left.T, sources)
        else:
            self._load(fold.b, where, self._columns_of_b(), left, sources)
        if fold.magnitude is None:
            return left, None
        magnitudes = _view(self._left[left.nbytes :], self._dtype, rows, 1)
        self._load(fold.magnitude, where, range(1), magnitudes, sources)
        return left, magnitudes

    def _load_right(self, right: torch.Tensor, sources: Sources) -> None:
        fold = self._fold
        first = fold.base.rows[0] if fold.base.rows is not None and fold.base.swapped else 0
        where = range(first, first + self._matrices.columns)
        if self._matrices.flipped:
            self._load(fold.b, where, self._columns_of_b(), right.T, sources)
        else:
            assert fold.a is not None
            self._load(fold.a, self._rows_of_a(), where, right, sources)

    def _rows_of_a(self) -> range:
        first = self._expert * self._matrices.rank
        return range(first, first + self._matrices.rank)

    def _columns_of_b(self) -> range:
        return range(self._expert, self._matrices.rank * self._fold.experts, self._fold.experts)

    def _load(
        self, tensor: Tensor, rows: range, columns: range, target: torch.Tensor, sources: Sources
    ) -> None:
        """Read a part of a tensor, taken as a matrix with its trailing dims flattened."""
        inner = tensor.shape[1:]
        limit = min(_SCRATCH_NUMEL, len(self._room) // ITEMSIZE[tensor.dtype])
        whole_rows = len(inner) != 1 or columns.step != 1
        across = math.prod(inner) if whole_rows else min(len(columns), limit)
        down = max(1, limit // across)
        for row in range(0, len(rows), down):
            part = target[row : row + down]
            at, height = rows.start + row, len(part)
            if whole_rows:
                band = Band((at, *(0 for _ in inner)), (height, *inner))
                block = self._read(tensor, band, sources)
                part.copy_(block[:, columns.start : columns.stop : columns.step])
                continue
            for column in range(0, len(columns), across):
                width = min(across, len(columns) - column)
                band = Band((at, columns.start + column), (height, width))
                part[:, column : column + width].copy_(self._read(tensor, band, sources))

    def _read(self, tensor: Tensor, band: Band, sources: Sources) -> torch.Tensor:
        data = read_stored(Stored(tensor), band, sources, self._room)
        return _view(data, tensor.dtype, band.sizes[0], math.prod(band.sizes[1:]))


def _matrices(fold: Fold) -> _Matrices:
    shape = fold.shape
    # The adapter of a 3-d convolution weight has as many dims; that of experts has two.
    stacked = len(shape) == 3 and len(fold.b.shape) == 2
    rows, *inner = shape[stacked:]
    rank = fold.a.shape[0] // fold.experts if fold.a is not None else 1
    flipped = (fold.kind == "transposed") != fold.base.swapped
    assert fold.magnitude is None or not flipped, "the norms would be those of columns"
    return _Matrices(stacked, rows, math.prod(inner), rank, flipped)


def _expert(fold: Fold, band: Band) -> int:
    if _matrices(fold).stacked:
        return band.offsets[0]
    return fold.base.index[0] if fold.base.index else 0


def _block_rows(matrices: _Matrices) -> int:
    return min(matrices.rows, max(_LEAST_ROWS, _BLOCK_NUMEL // max(1, matrices.columns)))


def _sum_dtype(fold: Fold) -> str:
    return "F64" if "F64" in (fold.base.dtype, fold.dtype) else "F32"


def _layout(fold: Fold) -> _Layout:
    matrices = _matrices(fold)
    rows = _block_rows(matrices)
    numel = rows * matrices.columns
    dtype = _sum_dtype(fold)
    itemsize = ITEMSIZE[dtype]
    stored = ITEMSIZE[fold.base.dtype]
    rounded = ITEMSIZE[fold.dtype] if fold.dtype != dtype else 0
    # Some are read by whole rows, which may be longer than those of a small base.
    longest = max(
        math.prod(t.shape[1:]) * ITEMSIZE[t.dtype] for t in (fold.a, fold.b) if t is not None
    )
    layout = _Layout(
        stored=max(numel * max(stored, rounded), longest),
        product=numel * itemsize,
        left=rows * (matrices.rank + 1) * itemsize,
        right=matrices.rank * matrices.columns * itemsize if fold.a is not None else 0,
    )
    return _Layout(*(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in layout))


def _view(memory: memoryview, dtype: str, *shape: int) -> torch.Tensor:
    """The front of some memory as a tensor."""
    import torch

    return torch.frombuffer(memory, dtype=torch_dtype(dtype), count=math.prod(shape)).view(shape)
