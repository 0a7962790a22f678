"""Made-up weights: the value of any element, without the others.

A tensor's elements, row-major, run through one block of random numbers over and over, from a place
that its name decides. The block's length is prime, so that no shard of a tensor equals another one.
What a rank file holds and what a merged tensor has to be can both be had in pieces, and the weights
in bfloat16 are those in float32, rounded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

PERIOD = 4_194_301  # elements, a prime
PIECE = 1 << 20  # elements given at a time


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a tensor that is taken for a matrix.

    Attributes:
        name: the tensor.
        columns: length of a row of the whole matrix, in elements.
        rows: the first row, and the one after the last.
        within: the first column, and the one after the last.
    """

    name: str
    columns: int
    rows: tuple[int, int]
    within: tuple[int, int]

    @property
    def numel(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.within[1] - self.within[0])


def flat_part(name: str, start: int, stop: int) -> Part:
    """Return elements of a tensor by their row-major index."""
    return Part(name, 1, (start, stop), (0, 1))


@cache
def random_block(dtype: torch.dtype) -> Any:
    """Return the block, twice in a row, as unsigned integers of the width of ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(PERIOD, generator=generator).mul_(0.02).to(dtype).repeat(2)
    return values.view({2: torch.uint16, 4: torch.uint32}[dtype.itemsize]).numpy()


def pieces(part: Part, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of a part, row-major, about `PIECE` elements at a time."""
    if part.numel == 0:
        return
    block = random_block(dtype)
    begin = zlib.crc32(part.name.encode())
    low, high = part.within
    if high - low == part.columns:
        first, last = (row * part.columns for row in part.rows)
        for index in range(first, last, PIECE):
            place = (begin + index) % PERIOD
            yield memoryview(block[place : place + min(PIECE, last - index)]).cast("B")
        return
    step = max(1, PIECE // part.columns)
    for row in range(part.rows[0], part.rows[1], step):
        count = min(step, part.rows[1] - row)
        place = (begin + row * part.columns) % PERIOD
        band = block[place : place + count * part.columns].reshape(count, part.columns)
        yield memoryview(np.ascontiguousarray(band[:, low:high]).data).cast("B")
