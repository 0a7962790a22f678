"""Turns bands of values into bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from streammerge.bands import MIN_RUN_BYTES, Band, bands, run_nbytes
from streammerge.dtypes import ITEMSIZE, torch_dtype
from streammerge.folds import evaluate_fold, fold_bands, fold_nbytes
from streammerge.reader import MAX_RUNS, BandBuffer, full_band, local_parts, read_stored
from streammerge.sources import Sources
from streammerge.values import Cast, Fold, Stored, Value, stored_base

_BAND_SIZE = 2 << 20  # larger bands leave the processor's cache and take twice the time


def value_bands(value: Value, buffer_size: int) -> Iterator[Band]:
    """The bands to evaluate a value in, in order.

    Args:
        value: what will be evaluated.
        buffer_size: bytes of buffer per thread, at least `least_buffer`.
    """
    if isinstance(value, Fold):
        yield from fold_bands(value)
        return
    itemsize = ITEMSIZE[value.dtype]
    budget = min(_BAND_SIZE, band_numel(value, buffer_size) * itemsize)
    yield from bands(value.shape, itemsize, budget)


def least_buffer(value: Value) -> int:
    """Fewest bytes of buffer with which a value can be evaluated."""
    return fold_nbytes(value) if isinstance(value, Fold) else 0


def band_numel(value: Stored | Cast, buffer_size: int) -> int:
    """How many elements of a value a band may have, given the bytes of its buffer.

    What the band leaves free serves to pick elements apart.
    """
    stored = stored_base(value)
    itemsize = ITEMSIZE[stored.dtype]
    # Each run of a band keeps a buffer object; short runs are picked apart and need none. A box of
    # one run is one object, however short.
    shape = full_band(stored, Band((0,) * len(stored.shape), stored.shape)).sizes
    runs = (
        run
        for box, _, _ in local_parts(stored)
        if (run := run_nbytes(shape, box, itemsize)) < math.prod(box.sizes) * itemsize
    )
    limit = MAX_RUNS * max(MIN_RUN_BYTES, min(runs, default=buffer_size)) // itemsize
    return max(1, min(limit, buffer_size * 4 // _quarters(value)))


def buffer_nbytes(value: Value, numel: int) -> int:
    """Bytes of buffer for a band of `numel` elements: the inverse of `band_numel`."""
    if isinstance(value, Fold):
        return fold_nbytes(value)
    return -(-numel * _quarters(value) // 4)


def evaluate(
    value: Value, band: Band, sources: Sources, buffer: BandBuffer, device: str = "cpu"
) -> memoryview:
    """The bytes of a band.

    Args:
        value: what to compute.
        band: one of its `value_bands`, or of a stored or cast value any part with at most
            `band_numel` elements.
        sources: the files.
        buffer: at least `buffer_nbytes` of memory.
        device: where folds are computed, ``cpu`` or ``cuda``.

    Returns:
        The part of the buffer that holds the result.
    """
    if isinstance(value, Fold):
        return evaluate_fold(value, band, sources, buffer, device)
    if isinstance(value, Cast):
        return _cast(value, band, sources, buffer)
    return read_stored(value, band, sources, buffer)


def _quarters(value: Stored | Cast) -> int:
    """Quarter bytes of buffer per element."""
    stored = stored_base(value)
    itemsize = ITEMSIZE[stored.dtype]
    if isinstance(value, Cast):
        # The room of the result is free until the stored bytes are complete.
        return 4 * (itemsize + ITEMSIZE[value.dtype])
    return (8 if stored.tensor.extents.strides or stored.swapped else 5) * itemsize


def _cast(value: Cast, band: Band, sources: Sources, buffer: BandBuffer) -> memoryview:
    import torch

    stored = read_stored(value.value, band, sources, buffer)
    target = buffer.memory[len(stored) :][: band.numel * ITEMSIZE[value.dtype]]
    read = torch.frombuffer(stored, dtype=torch_dtype(value.value.dtype))
    torch.frombuffer(target, dtype=torch_dtype(value.dtype)).copy_(read)
    return target
