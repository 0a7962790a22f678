"""Reads the pickle of a torch.save file into stand-ins, without torch and without running it.

Only the globals of an exact allow-list are resolved, and each resolves to a stand-in that keeps
what it is given. The list is that of FSDP rank files written by torch 2.4 to 2.14.

A pickle can call what `find_class` hands out and can set the state of any object it reaches. So
nothing mutable is handed out: stand-ins are classes whose ``__setstate__`` shadows attribute
setting (on the class itself that call fails), tuples and strings.
"""

from __future__ import annotations

import pickle
import reprlib
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

from streammerge.dtypes import FROM_TORCH, NOT_IN_SAFETENSORS, STORAGES
from streammerge.errors import UnsafePickleError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self


_INT_LIMIT = 1 << 63


class Storage:
    """A persistent id: which stored blob, how many elements of which dtype.

    Attributes:
        key: the blob's name inside the file.
        dtype: torch dtype name, or None for an untyped storage, which counts bytes.
        numel: number of elements.
    """

    __slots__ = ("dtype", "key", "numel")

    def __init__(self, key: str, dtype: str | None, numel: int) -> None:
        self.key = key
        self.dtype = dtype
        self.numel = numel

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a storage has no state")


class StridedTensor:
    """``torch._utils._rebuild_tensor_v2``: a view on a storage.

    Attributes:
        storage: the blob.
        offset: first element in the storage, in elements.
        sizes, strides: per dim, in elements.
        dtype: torch dtype name.
        conj: the value is the complex conjugate of what is stored.
    """

    __slots__ = ("conj", "dtype", "offset", "sizes", "storage", "strides")

    storage: Storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None
    conj: bool

    def __new__(
        cls,
        storage: object,
        offset: object,
        sizes: object,
        strides: object,
        requires_grad: object = False,
        backward_hooks: object = None,
        metadata: object = None,
    ) -> Self:
        if not isinstance(storage, Storage) or not is_int(offset) or offset < 0:
            raise pickle.UnpicklingError("a tensor without a storage")
        if not is_ints(sizes) or not is_ints(strides) or len(sizes) != len(strides):
            raise pickle.UnpicklingError(
                f"a tensor of sizes {brief(sizes)}, strides {brief(strides)}"
            )
        tensor = super().__new__(cls)
        tensor.storage = storage
        tensor.offset = offset
        tensor.sizes = sizes
        tensor.strides = strides
        tensor.dtype = storage.dtype
        tensor.conj = False
        if metadata:
            if not isinstance(metadata, dict) or set(metadata) - {"conj", "neg"}:
                raise pickle.UnpicklingError(f"unknown tensor metadata {brief(metadata)}")
            if metadata.get("neg"):
                raise UnsupportedError("a tensor is stored as a negated view (neg bit)")
            tensor.conj = bool(metadata.get("conj"))
        return tensor

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a tensor has no state")


class UntypedTensor(StridedTensor):
    """``torch._utils._rebuild_tensor_v3``: the same on an untyped storage, dtype apart."""

    __slots__ = ()

    def __new__(
        cls,
        storage: object,
        offset: object,
        sizes: object,
        strides: object,
        requires_grad: object,
        backward_hooks: object,
        dtype: object,
        metadata: object = None,
    ) -> Self:
        if not isinstance(dtype, str):
            raise pickle.UnpicklingError(f"a tensor of dtype {brief(dtype)}")
        tensor = super().__new__(
            cls, storage, offset, sizes, strides, requires_grad, backward_hooks, metadata
        )
        tensor.dtype = dtype
        return tensor


class Record:
    """Keeps the arguments and the state of any other object that a rank file may hold."""

    __slots__ = ("args", "state")

    args: tuple[object, ...]
    state: Any

    def __new__(cls, *args: object) -> Self:
        # Not __init__: a pickle can create objects without it (NEWOBJ).
        record = super().__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str, index: int | None = None) -> Any:
        """A field from the state (a dict, or a pair of dicts), or else positional argument `index`.

        None where there is no such field.
        """
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        if index is not None and index < len(self.args):
            return self.args[index]
        return None


class DTensor(Record):
    """State: ``_local_tensor`` and ``_spec``."""

    __slots__ = ()


class ShardedTensor(Record):
    """State: (local shards, metadata, process group state, sharding spec, init_rrefs)."""

    __slots__ = ()


class DTensorSpec(Record):
    __slots__ = ()


class TensorMeta(Record):
    __slots__ = ()


class DeviceMesh(Record):
    __slots__ = ()


class MeshLayout(Record):
    __slots__ = ()


class FlatLayout(Record):
    __slots__ = ()


class ShardOrderEntry(Record):
    __slots__ = ()


class ShardPlacement(Record):
    __slots__ = ()


class StridedShardPlacement(Record):
    __slots__ = ()


class ReplicatePlacement(Record):
    __slots__ = ()


class PartialPlacement(Record):
    __slots__ = ()


class LocalShard(Record):
    """One shard of a ShardedTensor: ``tensor`` and ``metadata``."""

    __slots__ = ()


class ShardMetadata(Record):
    __slots__ = ()


class ShardedTensorMetadata(Record):
    __slots__ = ()


class ProcessGroupState(Record):
    __slots__ = ()


class Opaque(Record):
    """Something that carries no tensor data and is of no interest."""

    __slots__ = ()


class _Size:
    """``torch.Size``: becomes a plain tuple."""

    __slots__ = ()

    def __new__(cls, sizes: object = ()) -> Any:
        if not isinstance(sizes, tuple | list):
            raise pickle.UnpicklingError("torch.Size of something that is no sequence")
        return tuple(sizes)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("torch.Size has no state")


class _Parameter:
    """``torch._utils._rebuild_parameter``: the tensor itself."""

    __slots__ = ()

    def __new__(cls, data: object, *rest: object) -> Any:
        return data

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a parameter has no state")


class _Encode:
    """``_codecs.encode``: how protocol 2 spells bytes."""

    __slots__ = ()

    def __new__(cls, text: object, encoding: object = "latin1") -> Any:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError("_codecs.encode of something that is no latin1 text")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("bytes have no state")


class _FromType:
    """``torch._tensor._rebuild_from_type_v2(function, type, args, state)``."""

    __slots__ = ()

    def __new__(cls, function: Any, kind: Any, args: tuple[object, ...], state: object) -> Any:
        if kind in (DTensor, ShardedTensor):
            record: Record = kind(*args)
            record.__setstate__(state)
            return record
        if kind is Opaque and function in (StridedTensor, UntypedTensor, _Parameter):
            # A plain Tensor or Parameter with Python attributes; they are no weights.
            return function(*args)
        raise pickle.UnpicklingError("a tensor of an unknown subclass")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a tensor has no state")


class _Getattr:
    """``getattr``, which rank files use for a nested class and for an enum member, nothing else."""

    __slots__ = ()

    def __new__(cls, owner: object, name: object) -> Any:
        if owner is ShardedTensor and name == "ProcessGroupState":
            return ProcessGroupState
        if owner is _MemoryFormat and isinstance(name, str):
            return None
        raise UnsafePickleError(f"the pickle asks for getattr(..., {brief(name)}); nothing was run")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("getattr has no state")


class _MemoryFormat:
    """``MEM_FORMAT_ENCODING``: an enum, pickled by getattr or (Python 3.12) by value."""

    __slots__ = ()

    def __new__(cls, value: object = None) -> Any:
        return None

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("an enum has no state")


class StateDict(dict[Any, Any]):
    """``collections.OrderedDict``, without the attributes that a pickle could set on one."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass  # ``_metadata`` of a module's state dict


_PLACEMENTS = {
    "Shard": ShardPlacement,
    "_StridedShard": StridedShardPlacement,
    "Replicate": ReplicatePlacement,
    "Partial": PartialPlacement,
    "_Partial": PartialPlacement,
    "_NormPartial": PartialPlacement,
    "_MaskPartial": PartialPlacement,
    "MaskPartial": PartialPlacement,
}
_SHARDED = "torch.distributed._shard"

_ALLOWED: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): StateDict,
    ("torch._tensor", "_rebuild_from_type_v2"): _FromType,
    ("torch._utils", "_rebuild_wrapper_subclass"): Opaque,
    ("torch._utils", "_rebuild_tensor"): StridedTensor,
    ("torch._utils", "_rebuild_tensor_v2"): StridedTensor,
    ("torch._utils", "_rebuild_tensor_v3"): UntypedTensor,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _Parameter,
    ("torch", "Tensor"): Opaque,
    ("torch", "Size"): _Size,
    ("torch", "device"): Opaque,
    ("torch.nn.parameter", "Parameter"): Opaque,
    ("torch.serialization", "_get_layout"): Opaque,
    ("torch.storage", "UntypedStorage"): ("storage", None),
    # DTensor: up to torch 2.4 in one place, from 2.5 on in another.
    ("torch.distributed._tensor.api", "DTensor"): DTensor,
    ("torch.distributed.tensor", "DTensor"): DTensor,
    ("torch.distributed.tensor._api", "DTensor"): DTensor,
    **{
        (module, name): stand_in
        for module in (
            "torch.distributed._tensor.placement_types",
            "torch.distributed.tensor._dtensor_spec",
        )
        for name, stand_in in (("DTensorSpec", DTensorSpec), ("TensorMeta", TensorMeta))
    },
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"): ShardOrderEntry,
    **{
        (module, name): stand_in
        for module in (
            "torch.distributed._tensor.placement_types",
            "torch.distributed.tensor.placement_types",
        )
        for name, stand_in in _PLACEMENTS.items()
    },
    ("torch.distributed.tensor._ops._embedding_ops", "_MaskPartial"): PartialPlacement,
    ("torch.distributed.device_mesh", "DeviceMesh"): DeviceMesh,
    ("torch.distributed._mesh_layout", "_MeshLayout"): MeshLayout,
    ("torch.distributed._mesh_layout", "_FlatLayout"): FlatLayout,
    # ShardedTensor (FSDP1).
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"): ShardedTensor,
    (f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"): ShardedTensorMetadata,
    (f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties"): Opaque,
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _MemoryFormat,
    (f"{_SHARDED}.sharded_tensor.shard", "Shard"): LocalShard,
    (f"{_SHARDED}.metadata", "ShardMetadata"): ShardMetadata,
    (f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"): Opaque,
    (f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"): Opaque,
    ("torch.distributed.remote_device", "_remote_device"): Opaque,
    # Extra state of modules.
    ("_codecs", "encode"): _Encode,
    ("_io", "BytesIO"): Opaque,
    **{(module, "getattr"): _Getattr for module in ("__builtin__", "builtins")},
    **{("torch", name): name for name in (*FROM_TORCH, *NOT_IN_SAFETENSORS)},
    **{("torch", name): ("storage", dtype) for name, dtype in STORAGES.items()},
}


_STORAGE_KINDS = {id(kind) for kind in _ALLOWED.values() if isinstance(kind, tuple)}


class Unpickler(pickle.Unpickler):
    """A `pickle.Unpickler` that hands out stand-ins.

    Args:
        stream: where the pickle starts; left behind its end if it can ``peek``.

    Attributes:
        storages: the storages that the pickle names, by key, with the dtype of the last mention.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the allow-list.

        Raises:
            UnsafePickleError: any other global.
        """
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UnsafePickleError(
                f"the pickle asks for the global {module}.{name}, which no rank file needs; "
                "nothing was run"
            ) from None

    def persistent_load(self, pid: Any) -> Storage:
        """``("storage", storage class, key, location, numel)``; legacy files add a view."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError(f"unknown persistent id {brief(pid)}")
        kind, key, numel = pid[1], pid[2], pid[4]
        if id(kind) not in _STORAGE_KINDS:  # not ==, which a pickle's own tuple could meet
            raise pickle.UnpicklingError(f"unknown storage class in persistent id {brief(pid)}")
        if not isinstance(key, str) or not is_ints((numel,)):
            raise pickle.UnpicklingError(f"unknown persistent id {brief(pid)}")
        if len(pid) == 6 and pid[5] is not None:
            raise pickle.UnpicklingError("a storage is a view on another one")
        storage = self.storages.get(key)
        if storage is None or (storage.dtype, storage.numel) != (kind[1], numel):
            storage = self.storages[key] = Storage(key, kind[1], numel)
        return storage


def brief(value: object) -> str:
    """A value from a pickle for an error message; printing all of it may never end."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__} without end"


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value from a pickle is an int of 64 bits. Pickles can hold longer ones."""
    return type(value) is int and -_INT_LIMIT <= value < _INT_LIMIT


def is_ints(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether a value from a pickle is a tuple of non-negative ints of 64 bits."""
    return type(value) is tuple and all(type(n) is int and 0 <= n < _INT_LIMIT for n in value)
