"""Single elements as Python values, and how far tensors are apart; torch is the reference."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammerge.dtypes import ITEMSIZE, TO_TORCH
from streammerge.elements import decode, show
from streammerge.errors import UsageError
from streammerge.measure import Measure, Tolerance, measure

FLOATS = ["F64", "F32", "F16", "BF16"]
BYTE_FLOATS = ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
INTEGERS = ["U64", "I64", "U32", "I32", "U16", "I16", "U8", "I8"]


def torch_type(dtype: str) -> torch.dtype:
    found = getattr(torch, TO_TORCH[dtype])
    assert isinstance(found, torch.dtype)
    return found


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor."""
    return memoryview(
        bytearray(
            tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        )
    )


def items(dtype: str, data: bytes) -> list[Any]:
    return torch.frombuffer(bytearray(data), dtype=torch_type(dtype)).tolist()


def same(a: Any, b: Any) -> bool:
    """Equal in Python's view, with the sign of zero, NaN equal to itself."""
    return repr(a) == repr(b)


# --- one element ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*BYTE_FLOATS, "U8", "I8"])
def test_all_bytes(dtype: str) -> None:
    data = bytes(range(256))
    tensor = torch.frombuffer(bytearray(data), dtype=torch_type(dtype))
    # torch lists float8 only after a conversion, which is exact.
    expected = tensor.to(torch.float64).tolist() if dtype in BYTE_FLOATS else tensor.tolist()
    for byte, value in zip(data, expected, strict=True):
        assert same(decode(dtype, bytes([byte])), value), byte


@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "I16"])
def test_all_pairs_of_bytes(dtype: str) -> None:
    data = b"".join(struct.pack("<H", n) for n in range(1 << 16))
    for n, value in enumerate(items(dtype, data)):
        assert same(decode(dtype, data[2 * n : 2 * n + 2]), value), n


@pytest.mark.parametrize("dtype", [d for d in ITEMSIZE if d not in {*BYTE_FLOATS, "F4", "BOOL"}])
@given(data=st.data())
def test_any_bytes(dtype: str, data: st.DataObject) -> None:
    size = ITEMSIZE[dtype]
    element = data.draw(st.binary(min_size=size, max_size=size))
    assert same(decode(dtype, element), items(dtype, element)[0])


def test_bool() -> None:
    assert decode("BOOL", b"\0") is False
    assert decode("BOOL", b"\1") is True


def test_two_values_in_a_byte() -> None:
    """OCP Microscaling Formats 1.0, table 5: sign, two bits of exponent, one of mantissa."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    for byte in range(256):
        assert same(decode("F4", bytes([byte])), (values[byte & 15], values[byte >> 4]))


def test_what_looks_the_same_is_shown_with_its_bits() -> None:
    quiet, other = (struct.pack("<I", n) for n in (0x7FC00000, 0x7FC00001))
    assert show("F32", quiet, other) == ("nan (0x7fc00000)", "nan (0x7fc00001)")
    assert show("BOOL", b"\1", b"\2") == ("True (0x01)", "True (0x02)")
    assert show("F32", struct.pack("<f", 0.0), struct.pack("<f", -0.0)) == ("0.0", "-0.0")


# --- bits -----------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-3, 1e30, math.inf, -math.inf, math.nan, 5e-324, 65504.0]
numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-2, 2, width=16))


@st.composite
def float_pairs(draw: st.DrawFn, dtypes: list[str]) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Two tensors of one dtype, which share many elements or nearly so."""
    dtype = draw(st.sampled_from(dtypes))
    count = draw(st.integers(1, 12))
    values = draw(st.lists(numbers, min_size=count, max_size=count))
    factors = st.sampled_from([1.0, 1.0, 1 + 2**-9, 1 - 2**-20, 1.1, -1.0])
    scaled = [value * draw(factors) for value in values]
    others = [draw(st.one_of(st.just(value), numbers)) for value in scaled]
    kind = torch_type(dtype)
    as_double = (torch.tensor(v, dtype=torch.float64) for v in (values, others))
    reference, merged = (tensor.to(kind) for tensor in as_double)
    return dtype, reference, merged


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    )


@settings(max_examples=300)
@given(pair=float_pairs([*FLOATS, *BYTE_FLOATS[:4]]))
def test_bits_of_floats(pair: tuple[str, torch.Tensor, torch.Tensor]) -> None:
    dtype, reference, merged = pair
    found = measure(dtype, raw(reference), raw(merged))
    differs = bits(reference) != bits(merged)
    assert found.count == int(differs.sum())
    assert found.first == (int(differs.nonzero()[0]) if differs.any() else None)
    largest = 0.0
    doubles = (side.double()[differs].tolist() for side in (reference, merged))
    for a, b in zip(*doubles, strict=True):
        if math.isnan(a) != math.isnan(b):
            largest = math.nan
        elif a != b and not math.isnan(a) and not math.isnan(largest):
            largest = max(largest, abs(a - b))
    assert same(float(found.largest), largest)


@settings(max_examples=200)
@given(data=st.data(), dtype=st.sampled_from(INTEGERS))
def test_bits_of_integers(data: st.DataObject, dtype: str) -> None:
    """Differences of 64-bit integers do not fit in one."""
    info = torch.iinfo(torch_type(dtype))
    values = st.one_of(st.sampled_from([info.min, info.max, 0, 1]), st.integers(info.min, info.max))
    count = data.draw(st.integers(1, 6))
    reference = data.draw(st.lists(values, min_size=count, max_size=count))
    merged = [data.draw(st.one_of(st.just(value), values)) for value in reference]
    size, signed = ITEMSIZE[dtype], info.min < 0
    encoded = (
        memoryview(bytearray(b"".join(v.to_bytes(size, "little", signed=signed) for v in side)))
        for side in (reference, merged)
    )
    # A tolerance is for floating-point values only.
    found = measure(dtype, *encoded, data.draw(st.sampled_from([None, Tolerance(1.0, 1e30)])))
    apart = [abs(a - b) for a, b in zip(reference, merged, strict=True)]
    assert found.count == sum(1 for gap in apart if gap)
    assert found.first == next((at for at, gap in enumerate(apart) if gap), None)
    assert found.largest == max(apart)
    assert isinstance(found.largest, int)


def test_bits_of_other_dtypes() -> None:
    reference, merged = torch.tensor([1 + 1j, 2j]), torch.tensor([1 + 1j, 3 + 6j])
    assert measure("C64", raw(reference), raw(merged)) == Measure(1, 1, 5.0, False)
    bools = raw(torch.tensor([True, False])), raw(torch.tensor([True, True]))
    assert measure("BOOL", *bools) == Measure(1, 1, 1, False)
    # 0.5 and 6 in a byte against 0.5 and -6, then 1 and 0 against 1.5 and 0.
    packed = memoryview(bytearray([0x71, 0x02])), memoryview(bytearray([0xF1, 0x03]))
    assert measure("F4", *packed) == Measure(2, 0, 12.0, False)


def test_powers_of_two_from_bytes() -> None:
    packed = memoryview(bytearray([127, 3])), memoryview(bytearray([129, 3]))
    assert measure("F8_E8M0", *packed) == Measure(1, 0, 3.0, False)


def test_long_runs(generator: torch.Generator) -> None:
    reference = torch.randn(200_001, generator=generator)
    merged = reference.clone()
    where = torch.randperm(len(merged), generator=generator)[:1000]
    merged[where] += torch.randn(1000, generator=generator)
    found = measure("F32", raw(reference), raw(merged), start=7)
    differs = reference != merged
    assert found.count == int(differs.sum())
    assert found.first == 7 + int(differs.nonzero()[0])
    assert found.largest == float((reference.double() - merged.double()).abs().max())


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


# --- tolerance ------------------------------------------------------------------------------------

limits = st.one_of(st.just(0.0), st.floats(0, 2), st.sampled_from([1e-8, 1e-5, 2**-8, 1e40]))


@settings(max_examples=500)
@given(pair=float_pairs([*FLOATS, *BYTE_FLOATS[:4]]), rtol=limits, atol=limits)
def test_tolerance_is_that_of_allclose(
    pair: tuple[str, torch.Tensor, torch.Tensor], rtol: float, atol: float
) -> None:
    dtype, reference, merged = pair
    found = measure(dtype, raw(reference), raw(merged), Tolerance(rtol, atol))
    sides = merged.double(), reference.double()
    close = torch.isclose(*sides, rtol=rtol, atol=atol, equal_nan=True)
    assert found.count == int((~close).sum())
    assert (found.count == 0) == torch.allclose(*sides, rtol=rtol, atol=atol, equal_nan=True)
    assert found.first == (int((~close).nonzero()[0]) if found.count else None)


@given(
    values=st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=8),
    rtol=limits,
    atol=limits,
)
def test_tolerance_of_complex_values(
    values: list[tuple[float, float, float, float]], rtol: float, atol: float
) -> None:
    table = torch.tensor(values, dtype=torch.float64).float()
    reference = torch.complex(table[:, 0], table[:, 1])
    merged = torch.complex(table[:, 2], table[:, 3])
    found = measure("C64", raw(reference), raw(merged), Tolerance(rtol, atol))
    sides = merged.to(torch.complex128), reference.to(torch.complex128)
    close = torch.isclose(*sides, rtol=rtol, atol=atol, equal_nan=True)
    assert found.count == int((~close).sum())


def test_both_values_of_a_byte_must_be_close() -> None:
    reference, merged = memoryview(bytearray([0x11])), memoryview(bytearray([0x21]))
    assert measure("F4", reference, merged, Tolerance(0, 0.5)).count == 0
    assert measure("F4", reference, merged, Tolerance(0, 0.4)).count == 1


@pytest.mark.parametrize("number", [-1e-9, math.nan, math.inf])
def test_bad_tolerances(number: float) -> None:
    with pytest.raises(UsageError, match="rtol must be a number from 0 on"):
        Tolerance(number, 0)
    with pytest.raises(UsageError, match="atol must be a number from 0 on"):
        Tolerance(0, number)


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rank", [16, 64])
def test_another_order_of_summation_is_rounding(
    dtype: str, rank: int, generator: torch.Generator
) -> None:
    kind = torch_type(dtype)
    wide = torch.float64 if dtype == "F64" else torch.float32
    weight = torch.randn(900, 700, generator=generator).to(kind).to(wide)
    a = torch.randn(rank, 700, generator=generator, dtype=wide)
    b = torch.randn(900, rank, generator=generator, dtype=wide) / 8
    order = torch.randperm(rank, generator=generator)
    folded = (weight + b @ a).to(kind)
    product = torch.zeros_like(weight)
    for at in order.tolist():
        product += torch.outer(b[:, at], a[at])
    other = (weight + product).to(kind)
    found = measure(dtype, raw(folded), raw(other))
    assert found.count > 0
    assert found.rounding

    wrong = folded.clone()
    wrong[7, 7] = wrong[7, 7] * 1.25 + 0.01
    found = measure(dtype, raw(folded), raw(wrong))
    assert (found.count, found.rounding) == (1, False)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_rounding(value: float) -> None:
    reference, merged = torch.tensor([1.0, 2.0, value]), torch.tensor([1.0, 2.0, 3.0])
    for pair in ((reference, merged), (merged, reference)):
        assert not measure("F32", *map(raw, pair)).rounding


def test_measures_of_parts_add_up() -> None:
    parts = [Measure(2, 5, 0.5, True), Measure(), Measure(1, 3, math.nan, False)]
    total = Measure()
    for part in parts:
        total = total.followed_by(part)
    assert (total.count, total.first, total.rounding) == (3, 3, False)
    assert math.isnan(total.largest)
