"""Answers whether two tensors hold the same bits, by reads that fit the buffer budget."""

from __future__ import annotations

from streammerge.bands import Band, bands
from streammerge.dtypes import ITEMSIZE
from streammerge.evaluate import band_numel, buffer_nbytes
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Stored, Value


def same_bits(first: Value, other: Value, sources: Sources, buffer_size: int) -> bool:
    """Whether two stored values are equal in dtype, shape and every bit.

    Args:
        first, other: what to compare; a computed value equals none.
        sources: the files.
        buffer_size: bytes of buffer; both share it.
    """
    if not (isinstance(first, Stored) and isinstance(other, Stored)):
        return False
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    if _same_storage(first, other):
        return True
    numel = min(band_numel(value, buffer_size // 2) for value in (first, other))
    itemsize = ITEMSIZE[first.dtype]
    a = BandBuffer(buffer_nbytes(first, numel))
    b = BandBuffer(buffer_nbytes(other, numel))
    for band in bands(first.shape, itemsize, numel * itemsize):
        if not _same_band(first, other, band, sources, a, b):
            return False
    return True


def _same_band(
    first: Stored, other: Stored, band: Band, sources: Sources, a: BandBuffer, b: BandBuffer
) -> bool:
    read_stored(first, band, sources, a)
    # Compares in C and copies nothing, where memoryviews would compare item by item.
    return a.data.startswith(read_stored(other, band, sources, b))


def _same_storage(first: Stored, other: Stored) -> bool:
    """Whether both are the same bytes of the same files, as tied weights of FSDP2 are."""
    a, b = first.tensor.extents, other.tensor.extents
    return (
        (first.index, first.rows, first.swapped) == (other.index, other.rows, other.swapped)
        and first.tensor.layout is other.tensor.layout
        and (a.files, a.members, a.starts) == (b.files, b.members, b.starts)
        and (a.strides, a.conjugated) == (b.strides, b.conjugated)
    )
