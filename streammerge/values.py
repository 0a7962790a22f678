"""What the bytes of an output tensor are: stored ones, or computed from stored ones. Data only.

The union is closed: whoever handles a `Value` handles every kind. `evaluate` turns values into
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from streammerge.checkpoint import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint or a part of it, as it is.

    Attributes:
        tensor: the tensor.
        index: fixed leading indices, such as one expert of many; their dims are dropped.
        rows: (first, count) of the dim after them; None for all.
        swapped: whether the last two dims change places.
    """

    tensor: Tensor
    index: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    swapped: bool = False

    @property
    def dtype(self) -> str:
        """Safetensors name."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part, after swapping."""
        shape = self.tensor.shape[len(self.index) :]
        if self.rows is not None:
            shape = (self.rows[1], *shape[1:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape


@dataclass(frozen=True, slots=True)
class Cast:
    """Stored values, rounded to another floating-point dtype as torch does."""

    value: Stored
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.value.shape


@dataclass(frozen=True, slots=True)
class Fold:
    """A weight with its LoRA adapter: ``W + scale * B @ A`` in float32, rounded once to `dtype`.

    It is summed in float64 if W or the result is. As a matrix, W is ``[out, in]``: a linear weight,
    or a convolution with its trailing dims flattened. The kind is that of W as it is stored, before
    the base swaps its dims.

    ===============  ====================  ==================  =================================
    kind             W                     A, B                product
    ===============  ====================  ==================  =================================
    ``linear``       ``[out, in]``         [r, in], [out, r]   ``B @ A``
    ``transposed``   ``[in, out]``         the same            ``(B @ A).T``: fan_in_fan_out,
                                                               embeddings (``in`` is the vocabulary)
    ``bias``         ``[out]``             None, [out]         ``B``
    ===============  ====================  ==================  =================================

    With E experts, W is ``[E, out, in]`` (or ``[E, in, out]``), A ``[E * r, in]`` with the rows of
    expert e from ``e * r`` on, and B ``[out, r * E]`` with the columns of expert e at ``e::E``.

    Attributes:
        base: W, or a part of it.
        a, b: the adapter.
        scale: factor of the product.
        kind: as in the table.
        dtype: of the result.
        magnitude: of a DoRA layer, ``[out]``: each row of the sum is scaled to this norm. Rows of
            the result must be ``out``.
        experts: E.
    """

    base: Stored
    a: Tensor | None
    b: Tensor
    scale: float
    kind: Literal["linear", "transposed", "bias"]
    dtype: str
    magnitude: Tensor | None = None
    experts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the base."""
        return self.base.shape


Value = Stored | Cast | Fold


def needs_torch(value: Value) -> bool:
    """Whether evaluating a value takes arithmetic."""
    return not isinstance(value, Stored)


def stored_base(value: Value) -> Stored:
    """What is stored of a value, without its cast or its adapter."""
    if isinstance(value, Fold):
        return value.base
    return value.value if isinstance(value, Cast) else value


def as_dtype(value: Value, dtype: str) -> Value:
    """A value rounded to another dtype, once."""
    if isinstance(value, Fold):
        return replace(value, dtype=dtype)
    return Cast(stored_base(value), dtype)
