"""How far two tensors are apart, element by element, with torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streammerge.dtypes import FLOATING, ITEMSIZE, torch_dtype
from streammerge.elements import BYTE_FLOATS, byte_values
from streammerge.errors import UsageError

if TYPE_CHECKING:
    import torch

# Dtypes to whose values a tolerance applies.
INEXACT = FLOATING | {"F4", "C64"}
_STRIPE_NUMEL = 1 << 15  # elements converted at once, to stay in the processor's cache

_SUMMED = frozenset({"F64", "F32", "F16", "BF16"})  # what folds result in
# Of sums in float32 and float64: what another order of summation changes, as a part of the largest
# value around.
_NOISE = 2.0**-21
_NOISE_F64 = 2.0**-50


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two values are close enough, as for ``torch.allclose`` with ``equal_nan=True``.

    A value m is close to the reference r where ``|m - r| <= atol + rtol * |r|``, in float64.
    Equal infinities are close, and two NaNs. Integers and booleans must be equal.
    """

    rtol: float
    atol: float

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not 0 <= value < math.inf:
                raise UsageError(f"{name} must be a number from 0 on, not {value:g}")


@dataclass(frozen=True, slots=True)
class Measure:
    """How two runs of elements differ.

    Attributes:
        count: elements that differ (in any bit) or are not close.
        first: the first of them, counted in elements.
        largest: the largest absolute difference among them; NaN if one of two values is.
        rounding: whether all of them are as small as another order of summation makes them.
    """

    count: int = 0
    first: int | None = None
    largest: float = 0
    rounding: bool = True

    def followed_by(self, other: Measure) -> Measure:
        """Both together; they are of the same tensor, in any order."""
        firsts = [m.first for m in (self, other) if m.first is not None]
        either_nan = math.isnan(self.largest) or math.isnan(other.largest)
        return Measure(
            self.count + other.count,
            min(firsts, default=None),
            math.nan if either_nan else max(self.largest, other.largest),
            self.rounding and other.rounding,
        )


def measure(
    dtype: str,
    reference: memoryview,
    merged: memoryview,
    tolerance: Tolerance | None = None,
    start: int = 0,
) -> Measure:
    """Compare elements.

    Args:
        dtype: safetensors name.
        reference, merged: equally many bytes.
        tolerance: None compares bits.
        start: index of the first element.
    """
    total = Measure()
    step = _STRIPE_NUMEL * ITEMSIZE[dtype]
    for at in range(0, len(reference), step):
        a, b = reference[at : at + step], merged[at : at + step]
        found = _measure(dtype, a, b, tolerance, start + at // ITEMSIZE[dtype])
        if found is not None:
            total = total.followed_by(found)
    return total


def _measure(
    dtype: str, reference: memoryview, merged: memoryview, tolerance: Tolerance | None, start: int
) -> Measure | None:
    differs = _bits(dtype, reference) != _bits(dtype, merged)
    if not differs.any():
        return None
    a, b = _numbers(dtype, reference), _numbers(dtype, merged)
    if tolerance is not None and dtype in INEXACT:
        differs &= ~_close(a, b, tolerance).all(dim=1)
    where = differs.nonzero()
    if not len(where):
        return None
    count, first = len(where), start + int(where[0])
    if dtype not in INEXACT:
        return Measure(count, first, _largest_of_integers(a[differs], b[differs]), False)
    both_nan = a.isnan() & b.isnan()
    apart = (b - a).abs().masked_fill(both_nan | (a == b), 0)
    return Measure(
        count,
        first,
        float(apart[differs].max()),
        bool(_is_rounding(dtype, a, apart)[differs].all()),
    )


def _close(reference: torch.Tensor, merged: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    apart = (merged - reference).abs()
    allowed = tolerance.atol + (tolerance.rtol * reference).abs()
    both_nan = reference.isnan() & merged.isnan()
    return (merged == reference) | both_nan | (apart.isfinite() & (apart <= allowed))


def _is_rounding(dtype: str, reference: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
    import torch

    if dtype not in _SUMMED:
        return torch.zeros_like(apart, dtype=torch.bool)
    noise = _NOISE_F64 if dtype == "F64" else _NOISE
    size = reference.abs()
    largest = size.nan_to_num(0, posinf=0).max()
    allowed = torch.finfo(torch_dtype(dtype)).eps * size + noise * largest
    return (apart <= allowed) & allowed.isfinite()


def _largest_of_integers(a: torch.Tensor, b: torch.Tensor) -> int:
    import torch

    # The difference of two int64 needs 64 bits without a sign.
    apart = torch.maximum(a, b) - torch.minimum(a, b)
    beyond = apart[apart < 0]
    return int(beyond.max()) + (1 << 64) if len(beyond) else int(apart.max())


def _bits(dtype: str, data: memoryview) -> torch.Tensor:
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.frombuffer(data, dtype=kinds[ITEMSIZE[dtype]])


def _numbers(dtype: str, data: memoryview) -> torch.Tensor:
    """The values as float64, complex128 or int64, a row per element; U64 less 2**63."""
    import torch

    if dtype in BYTE_FLOATS:
        table = torch.tensor(byte_values(dtype), dtype=torch.float64)
        return table[torch.frombuffer(data, dtype=torch.uint8).long()]
    if dtype == "U64":
        values = torch.frombuffer(data, dtype=torch.int64) ^ torch.iinfo(torch.int64).min
    elif dtype == "BOOL":
        values = torch.frombuffer(data, dtype=torch.uint8).long()
    else:
        kind = torch.complex128 if dtype == "C64" else torch.float64
        wide = kind if dtype in INEXACT else torch.int64
        values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(wide)
    return values[:, None]
