"""Reads the pickle of a torch.save file into stand-ins, without torch and without running it.

Only the globals of an exact allow-list are resolved, and each resolves to a stand-in that keeps
what it is given. The list is that of FSDP rank files written by torch 2.4 to 2.14. Files that hold
objects of any class beside the weights can be read too: those become one stand-in that keeps
nothing.

A pickle can call the classes that are handed out, with any arguments, and can set the state of
their objects. It cannot reach their attributes: `pickle_machine` has no way to do so.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeGuard

from streammerge.dtypes import FROM_TORCH, NOT_IN_SAFETENSORS, STORAGES
from streammerge.errors import UnsafePickleError, UnsupportedError
from streammerge.pickle_machine import MAX_ARGUMENTS, OddKey, damaged, run

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_DIMS = 64  # of tensors and meshes; most of torch's kernels end there too
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
            raise damaged("a tensor without a storage")
        if not is_shape(sizes) or not is_shape(strides) or len(sizes) != len(strides):
            raise damaged(f"a tensor of sizes {brief(sizes)}, strides {brief(strides)}")
        tensor = super().__new__(cls)
        tensor.storage = storage
        tensor.offset = offset
        tensor.sizes = sizes
        tensor.strides = strides
        tensor.dtype = storage.dtype
        tensor.conj = False
        if metadata:
            if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
                raise damaged(f"unknown tensor metadata {brief(metadata)}")
            if metadata.get("neg"):
                raise UnsupportedError("a tensor is stored as a negated view (neg bit)")
            tensor.conj = bool(metadata.get("conj"))
        return tensor


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
            raise damaged(f"a tensor of dtype {brief(dtype)}")
        tensor = super().__new__(
            cls, storage, offset, sizes, strides, requires_grad, backward_hooks, metadata
        )
        tensor.dtype = dtype
        return tensor


class Record:
    """An object of which the fields in ``__slots__`` are kept, under the names that torch has.

    They come as arguments, in the order of ``ARGUMENTS``, or in the state. The rest is dropped.
    """

    __slots__: tuple[str, ...] = ()
    ARGUMENTS: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: object) -> Self:
        # Not __init__: a pickle can create objects without it (NEWOBJ).
        record = super().__new__(cls)
        if args:
            for name, value in zip(cls.ARGUMENTS, args, strict=False):
                setattr(record, name, value)
        return record

    def set_state(self, state: object) -> None:
        """Take the fields from a dict, or from a pair of them, of which the second has slots."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in reversed(parts):
            if isinstance(part, dict):
                for name in self.__slots__:
                    if name in part:
                        setattr(self, name, part[name])

    def __getattr__(self, name: str) -> Any:
        """A field that was not given is None."""
        if name in self.__slots__:
            return None
        raise AttributeError(f"{type(self).__name__} keeps no {name}")

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...


class DTensor(Record):
    __slots__ = ("_local_tensor", "_spec")


class DTensorSpec(Record):
    __slots__ = (
        "mesh",
        "placements",
        "shard_order",
        "tensor_meta",
        "use_strided_shard_as_shard_order",
    )


class TensorMeta(Record):
    __slots__ = ARGUMENTS = ("shape", "stride", "dtype")


class DeviceMesh(Record):
    """The first three are those of torch 2.9 and older."""

    __slots__ = (
        "_coordinate_on_dim",
        "_flatten_mesh_list",
        "_flatten_rank_map",
        "_layout",
        "_mesh_dim_names",
        "_rank",
        "mesh",
        "mesh_dim_names",
    )


class MeshLayout(Record):
    """``axes`` (torch 2.13) or ``shape`` and ``stride`` (torch 2.11)."""

    __slots__ = ("axes", "shape", "stride")

    def __new__(cls, first: object = None, stride: object = None) -> Self:
        record = super().__new__(cls)
        record.axes = record.shape = first
        record.stride = stride
        return record


class FlatLayout(Record):
    __slots__ = ARGUMENTS = ("shape", "stride")


class ShardOrderEntry(Record):
    __slots__ = ARGUMENTS = ("tensor_dim", "mesh_dims")


class ShardPlacement(Record):
    __slots__ = ARGUMENTS = ("dim",)


class StridedShardPlacement(Record):
    __slots__ = ARGUMENTS = ("dim", "split_factor")


class ReplicatePlacement(Record):
    __slots__ = ()


class PartialPlacement(Record):
    __slots__ = ARGUMENTS = ("reduce_op",)


class ShardedTensor(Record):
    """State: (local shards, metadata, process group state, sharding spec, init_rrefs)."""

    __slots__ = ("args", "state")

    def __new__(cls, *args: object) -> Self:
        record = super().__new__(cls)
        record.args = args
        return record

    def set_state(self, state: object) -> None:
        """Keep all of it."""
        self.state = state


class LocalShard(Record):
    """One shard of a ShardedTensor."""

    __slots__ = ("metadata", "tensor")


class ShardMetadata(Record):
    __slots__ = ("placement", "shard_offsets", "shard_sizes")


class ShardedTensorMetadata(Record):
    __slots__ = ("shards_metadata", "size")


class ProcessGroupState(Record):
    __slots__ = ("global_rank",)


class RemoteDevice(Record):
    __slots__ = ("_rank",)


class Opaque(Record):
    """Something that carries no tensor data and is of no interest. There is only one."""

    __slots__ = ()

    def __new__(cls, *args: object) -> Any:
        return _OPAQUE


_OPAQUE = object.__new__(Opaque)


class Foreign(Record):
    """Something of a class that is not on the list. Nothing of it is kept; there is only one."""

    __slots__ = ()

    def __new__(cls, *args: object) -> Any:
        return _FOREIGN

    def take_items(self, items: object) -> None:
        """Ignore the items of a list, dict or set of that class."""


_FOREIGN = object.__new__(Foreign)


class FragmentAddress(Record):
    """DeepSpeed: where in its partition the part of a parameter lies, in elements."""

    __slots__ = ("numel", "start")


class _ZeroStage:
    """``ZeroStageEnum`` of DeepSpeed: becomes its number."""

    __slots__ = ()
    MEMBERS: ClassVar[dict[str, int]] = {
        "disabled": 0,
        "optimizer_states": 1,
        "gradients": 2,
        "weights": 3,
    }

    def __new__(cls, value: object = None) -> Any:
        return value


class _Size:
    """``torch.Size``: becomes a plain tuple."""

    __slots__ = ()

    def __new__(cls, sizes: object = ()) -> Any:
        if not isinstance(sizes, tuple):
            raise damaged("torch.Size of something that is not a tuple")
        return sizes


class _Parameter:
    """``torch._utils._rebuild_parameter``: the tensor itself."""

    __slots__ = ()

    def __new__(cls, data: object, *rest: object) -> Any:
        return data


class _Encode:
    """``_codecs.encode``: how protocol 2 spells bytes."""

    __slots__ = ()

    def __new__(cls, text: object, encoding: object = "latin1") -> Any:
        if not isinstance(text, str) or encoding != "latin1":
            raise damaged("_codecs.encode of something that is not latin1 text")
        return text.encode("latin1")


class _FromType:
    """``torch._tensor._rebuild_from_type_v2(function, type, args, state)``."""

    __slots__ = ()

    def __new__(cls, function: Any, kind: Any, args: object, state: object) -> Any:
        if not isinstance(args, tuple) or len(args) > MAX_ARGUMENTS:
            raise damaged("a tensor whose arguments are not a tuple")
        if kind in (DTensor, ShardedTensor):
            record: Record = kind(*args)
            record.set_state(state)
            return record
        if function is Foreign or kind is Foreign:
            return _FOREIGN
        if kind is Opaque and function in (StridedTensor, UntypedTensor, _Parameter):
            # A plain Tensor or Parameter with Python attributes; they are no weights.
            return function(*args)
        raise damaged("a tensor of an unknown subclass")


class _Getattr:
    """``getattr``, which files use for a nested class and for members of enums, nothing else."""

    __slots__ = ()

    def __new__(cls, owner: object, name: object) -> Any:
        if owner is ShardedTensor and name == "ProcessGroupState":
            return ProcessGroupState
        if owner is _MemoryFormat and isinstance(name, str):
            return None
        if owner is _ZeroStage and isinstance(name, str) and name in _ZeroStage.MEMBERS:
            return _ZeroStage.MEMBERS[name]
        if owner is Foreign or owner is _FOREIGN:
            return Foreign
        raise UnsafePickleError(f"the pickle asks for getattr(..., {brief(name)}); nothing was run")


class _MemoryFormat:
    """``MEM_FORMAT_ENCODING``: an enum, pickled by getattr or (Python 3.12) by value."""

    __slots__ = ()

    def __new__(cls, value: object = None) -> Any:
        return None


class StateDict(dict[Any, Any]):
    """``collections.OrderedDict``; its items come one by one."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def set_state(self, state: object) -> None:
        """Ignore ``_metadata`` of a module's state dict."""


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
    ("torch.distributed.remote_device", "_remote_device"): RemoteDevice,
    # Extra state of modules.
    ("_codecs", "encode"): _Encode,
    ("_io", "BytesIO"): Opaque,
    **{(module, "getattr"): _Getattr for module in ("__builtin__", "builtins")},
    **{("torch", name): name for name in (*FROM_TORCH, *NOT_IN_SAFETENSORS)},
    **{("torch", name): ("storage", dtype) for name, dtype in STORAGES.items()},
}

# What files with foreign globals hold beside those.
_OF_DEEPSPEED: dict[tuple[str, str], object] = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _ZeroStage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): FragmentAddress,
}


def allowed(names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], object]:
    """Some entries of the allow-list, for the pickles of other files: (module, name) -> value."""
    return {name: _ALLOWED[name] for name in names}


_STORAGE_KINDS = {id(kind) for kind in _ALLOWED.values() if isinstance(kind, tuple)}


class Unpickled(NamedTuple):
    """What a pickle holds.

    Attributes:
        value: its value, of stand-ins.
        storages: the storages that it names, by key, with the dtype of the last mention.
        end: where it ends.
    """

    value: Any
    storages: dict[str, Storage]
    end: int


def unpickle(data: bytes, start: int = 0, *, foreign: bool = False) -> Unpickled:
    """Read one pickle.

    Args:
        data: what the pickle lies in.
        start: where it starts.
        foreign: whether globals outside the allow-list become `Foreign`.

    Raises:
        UnsafePickleError: a global outside the allow-list, unless it may be `foreign`.
        CorruptFileError: no pickle, or not as torch.save writes them; `EndOfPickleError` if more
            bytes could mend that.
        UnsupportedError: larger than `pickle_machine` allows, or a view of an unsupported kind.
    """
    storages: dict[str, Storage] = {}

    def find_storage(pid: object) -> Storage:
        """``("storage", storage class, key, location, numel)``; legacy files add a view."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise damaged(f"unknown persistent id {brief(pid)}")
        kind, key, numel = pid[1], pid[2], pid[4]
        if id(kind) not in _STORAGE_KINDS:  # not ==, which a pickle's own tuple could satisfy
            raise damaged(f"unknown storage class in persistent id {brief(pid)}")
        if not isinstance(key, str) or not is_int(numel) or numel < 0:
            raise damaged(f"unknown persistent id {brief(pid)}")
        if len(pid) == 6 and pid[5] is not None:
            raise damaged("a storage is a view on another one")
        storage = storages.get(key)
        if storage is None or (storage.dtype, storage.numel) != (kind[1], numel):
            storage = storages[key] = Storage(key, kind[1], numel)
        return storage

    value, end = run(data, start, _find_or_foreign if foreign else _find_global, find_storage)
    return Unpickled(value, storages, end)


def _find_or_foreign(module: str, name: str) -> object:
    known = _ALLOWED.get((module, name))
    return _OF_DEEPSPEED.get((module, name), Foreign) if known is None else known


def _find_global(module: str, name: str) -> object:
    return look_up(_ALLOWED, module, name, "rank file")


def look_up(
    stand_ins: Mapping[tuple[str, str], object], module: str, name: str, file: str
) -> object:
    """The stand-in of a global.

    Args:
        stand_ins: the allow-list, see `allowed`.
        module, name: of the global.
        file: the kind of file whose pickle asks for it.

    Raises:
        UnsafePickleError: it is not on the list.
    """
    try:
        return stand_ins[module, name]
    except KeyError:
        asked = f"{module}.{name}"
        raise UnsafePickleError(
            f"the pickle asks for the global {asked if asked.isprintable() else ascii(asked)}, "
            f"which no {file} needs; nothing was run"
        ) from None


class _Brief(reprlib.Repr):
    """Values from a pickle in a few words. Printing all of one may never end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    repr_StateDict = reprlib.Repr.repr_dict

    def repr_OddKey(self, value: OddKey, level: int) -> str:
        return self.repr1(value.value, level)

    def repr_instance(self, value: object, level: int) -> str:
        if value is None or isinstance(value, bool | float):
            return repr(value)
        return value.__name__ if isinstance(value, type) else f"<{type(value).__name__}>"


_BRIEF = _Brief()


def brief(value: object) -> str:
    """A value from a pickle for an error message, in a few words and on one line."""
    try:
        return _BRIEF.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__} without end"


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value from a pickle is an int of 64 bits. Pickles can hold longer ones."""
    return type(value) is int and -_INT_LIMIT <= value < _INT_LIMIT


def is_ints(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether a value from a pickle is a tuple of non-negative ints of 64 bits."""
    if type(value) is not tuple:
        return False
    for number in value:  # noqa: SIM110, all() takes twice as long
        if type(number) is not int or not 0 <= number < _INT_LIMIT:
            return False
    return True


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether a value from a pickle can be the shape or the strides of a tensor or mesh."""
    return type(value) is tuple and len(value) <= MAX_DIMS and is_ints(value)
