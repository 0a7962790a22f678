"""Single elements of every dtype, decoded without torch, to show them to people.

Layouts: IEEE 754; bfloat16 is the upper half of a float32; the 8-bit and 4-bit floats are those of
``torch/headeronly/util/Float8_*.h`` and ``Float4_e2m1fn_x2.h`` (OCP Microscaling Formats 1.0, and
for FNUZ arXiv 2206.02915).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from typing import Literal

from streammerge.dtypes import PACKING

Element = bool | int | float | complex | tuple[float, float]

_BLOCK_SIZE = 64 << 10  # bytes that are copied to be compared
_SIGNED = frozenset({"I8", "I16", "I32", "I64"})
_IEEE = {"F64": "<d", "F32": "<f", "F16": "<e"}


@dataclass(frozen=True, slots=True)
class _SmallFloat:
    """A float of at most 8 bits: sign, exponent, mantissa.

    Attributes:
        exponent, mantissa: bits.
        bias: of the exponent.
        special: which bits are no numbers: ``ieee`` has infinities and NaNs in the highest
            exponent, ``fn`` a NaN where all bits are set, ``fnuz`` one in place of -0, ``finite``
            none.
    """

    exponent: int
    mantissa: int
    bias: int
    special: Literal["ieee", "fn", "fnuz", "finite"]

    def value(self, bits: int) -> float:
        """What some bits stand for."""
        width = self.exponent + self.mantissa
        magnitude = bits & ((1 << width) - 1)
        sign = -1.0 if bits >> width else 1.0
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa)
        if self.special == "fn" and magnitude == (1 << width) - 1:
            return math.nan
        if self.special == "fnuz" and bits == 1 << width:
            return math.nan
        if self.special == "ieee" and exponent == (1 << self.exponent) - 1:
            return math.nan if mantissa else sign * math.inf
        if exponent:
            mantissa += 1 << self.mantissa
        return sign * math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa)


_SMALL_FLOATS = {
    "F8_E4M3": _SmallFloat(4, 3, 7, "fn"),
    "F8_E5M2": _SmallFloat(5, 2, 15, "ieee"),
    "F8_E4M3FNUZ": _SmallFloat(4, 3, 8, "fnuz"),
    "F8_E5M2FNUZ": _SmallFloat(5, 2, 16, "fnuz"),
    "F4": _SmallFloat(2, 1, 1, "finite"),
}


def decode(dtype: str, data: bytes) -> Element:
    """The value of one stored element.

    Args:
        dtype: safetensors name.
        data: its bytes.

    Returns:
        A pair for F4, which packs two values in a byte, the first in the lower half.
    """
    if dtype in BYTE_FLOATS:
        values = byte_values(dtype)[data[0]]
        return values if len(values) == 2 else values[0]
    if dtype in _IEEE:
        return float(struct.unpack(_IEEE[dtype], data)[0])
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    if dtype == "C64":
        return complex(*struct.unpack("<2f", data))
    if dtype == "BOOL":
        return data != b"\0"
    return int.from_bytes(data, "little", signed=dtype in _SIGNED)


BYTE_FLOATS = frozenset({*_SMALL_FLOATS, "F8_E8M0"})


@cache
def byte_values(dtype: str) -> tuple[tuple[float, ...], ...]:
    """For a dtype of `BYTE_FLOATS`, the value or the two values of each of the 256 bytes."""
    if dtype == "F8_E8M0":  # a power of two, and one NaN
        return (*((math.ldexp(1.0, bits - 127),) for bits in range(255)), (math.nan,))
    small = _SMALL_FLOATS[dtype]
    if PACKING.get(dtype, 1) == 2:
        return tuple((small.value(bits & 15), small.value(bits >> 4)) for bits in range(256))
    return tuple((small.value(bits),) for bits in range(256))


def show(dtype: str, first: bytes, other: bytes) -> tuple[str, str]:
    """Two elements as text, with their bits where they would look the same."""
    texts = repr(decode(dtype, first)), repr(decode(dtype, other))
    if texts[0] != texts[1]:
        return texts
    return _with_bits(texts[0], first), _with_bits(texts[1], other)


def _with_bits(text: str, data: bytes) -> str:
    return f"{text} (0x{data[::-1].hex()})"


def first_difference(first: memoryview, other: memoryview, itemsize: int) -> int:
    """The index of the first element of two bands that differs.

    Args:
        first, other: bytes of both, which are not equal.
        itemsize: bytes of an element.
    """
    block = max(1, _BLOCK_SIZE // itemsize)
    count = len(first) // itemsize

    def equal(begin: int, end: int) -> bool:
        where = slice(begin * itemsize, end * itemsize)
        return bytes(first[where]) == bytes(other[where])

    low = next(at for at in range(0, count, block) if not equal(at, min(at + block, count)))
    high = min(low + block, count)
    while high - low > 1:
        middle = (low + high) // 2
        if equal(low, middle):
            low = middle
        else:
            high = middle
    return low
