"""The dtypes that safetensors has, under its names, and what torch calls them.

Source: ``safetensors`` 0.8 (``Dtype`` in its Rust crate) and ``torch.storage``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streammerge.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# safetensors name -> bytes per stored element. In this order the reference writer lays tensors
# out: by dtype, then by name. F4 packs two values in a stored byte (torch.float4_e2m1fn_x2).
ITEMSIZE: dict[str, int] = {
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "F4": 1,
    "BOOL": 1,
}

# Values per stored element, where it is not one.
PACKING: dict[str, int] = {"F4": 2}

# torch dtype name -> safetensors name.
FROM_TORCH: dict[str, str] = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
TO_TORCH: dict[str, str] = {dtype: name for name, dtype in FROM_TORCH.items()}

# torch's dtypes that safetensors cannot hold. They may stand in a checkpoint (in an entry that is
# skipped, say), so reading must know them; writing one is refused.
NOT_IN_SAFETENSORS: frozenset[str] = frozenset(
    {
        "complex32",
        "complex128",
        "quint8",
        "qint8",
        "qint32",
        "quint4x2",
        "quint2x4",
        *(f"bits{n}" for n in ("1x8", "2x4", "4x2", "8", "16")),
        *(f"{sign}int{n}" for sign in ("u", "") for n in range(1, 8)),
    }
)

# torch.<X>Storage -> torch dtype name. UntypedStorage counts bytes and carries no dtype.
STORAGES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}

# What torch's Tensor.is_floating_point says, and Tensor.to can convert (it has no kernel for F4).
FLOATING: frozenset[str] = frozenset(
    {
        "F64",
        "F32",
        "BF16",
        "F16",
        "F8_E5M2FNUZ",
        "F8_E4M3FNUZ",
        "F8_E8M0",
        "F8_E4M3",
        "F8_E5M2",
    }
)


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's dtype of a safetensors name.

    Raises:
        UnsupportedError: the installed torch has none.
    """
    import torch

    found = getattr(torch, TO_TORCH[dtype], None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            f"the installed torch {torch.__version__} has no dtype {TO_TORCH[dtype]}"
        )
    return found
