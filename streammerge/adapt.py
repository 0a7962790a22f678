"""What of a checkpoint is written, under which names and as which dtypes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.dtypes import FLOATING, FROM_TORCH
from streammerge.errors import UsageError
from streammerge.header import tensor_nbytes
from streammerge.values import Cast, Stored, Value

DTYPES = ("keep", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A tensor of the result.

    Attributes:
        name, dtype, shape: as in its header.
        value: where its bytes come from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: Value

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_nbytes(self.dtype, self.shape)


def adapt(checkpoint: Checkpoint, *, dtype: str = "keep") -> tuple[Output, ...]:
    """The tensors of the result, in the order of the checkpoint.

    Args:
        checkpoint: as `describe` gives it.
        dtype: ``keep``, or what floating-point tensors become.

    Raises:
        UsageError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    return tuple(_adapt_tensor(tensor, dtype) for tensor in checkpoint.tensors)


def _adapt_tensor(tensor: Tensor, dtype: str) -> Output:
    stored = Stored(tensor)
    if dtype == "keep" or tensor.dtype not in FLOATING or tensor.dtype == FROM_TORCH[dtype]:
        return Output(tensor.name, tensor.dtype, tensor.shape, stored)
    target = FROM_TORCH[dtype]
    return Output(tensor.name, target, tensor.shape, Cast(stored, target))
