"""The restricted unpickler: what it resolves, what it refuses, and that nothing leaves a trace.

Hostile pickles are put together opcode by opcode (see `pickletools`), packed as torch.save packs
them, and read as any rank file is.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import os
import pickle
import pickletools
import random
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pickle_code import (
    DTENSOR,
    SHARDED,
    build,
    call,
    dict_,
    dtensor,
    name,
    new,
    number,
    pack,
    program,
    storage,
    tensor,
    text,
    tuple_,
)

import streammerge
from streammerge import (
    CorruptFileError,
    StreamMergeError,
    UnsafePickleError,
    UnsupportedError,
    unpickler,
)
from streammerge.torchfile import read_torch_file
from streammerge.unpickler import Record, Storage, StridedTensor, UntypedTensor, unpickle

DATA = Path(__file__).parent / "data"
ALLOWED = sorted(unpickler._ALLOWED)


# What the rank files of torch 2.4 to 2.14 were seen to name.
SEEN = {
    ("collections", "OrderedDict"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "device"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._tensor.api", "DTensor"),
    *(
        ("torch.distributed._tensor.placement_types", name)
        for name in ("DTensorSpec", "TensorMeta", "Shard", "Replicate")
    ),
    (DTENSOR, "DTensor"),
    (f"{DTENSOR}._dtensor_spec", "DTensorSpec"),
    (f"{DTENSOR}._dtensor_spec", "TensorMeta"),
    (f"{DTENSOR}._dtensor_spec", "ShardOrderEntry"),
    *(
        (f"{DTENSOR}.placement_types", name)
        for name in ("Shard", "Replicate", "_StridedShard", "Partial")
    ),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
    (f"{SHARDED}.sharded_tensor.api", "ShardedTensor"),
    (f"{SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"),
    (f"{SHARDED}.sharded_tensor.metadata", "TensorProperties"),
    (f"{SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    (f"{SHARDED}.sharded_tensor.shard", "Shard"),
    (f"{SHARDED}.metadata", "ShardMetadata"),
    (f"{SHARDED}.sharding_spec.api", "EnumerableShardingSpec"),
    (f"{SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    ("torch.distributed.remote_device", "_remote_device"),
    ("__builtin__", "getattr"),
    ("_codecs", "encode"),
    ("_io", "BytesIO"),
}
# Spellings of the same things by other versions, and kinds of placements that are only refused.
OTHER_SPELLINGS = {
    ("builtins", "getattr"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch.nn.parameter", "Parameter"),
    (f"{DTENSOR}._api", "DTensor"),
    (f"{DTENSOR}._ops._embedding_ops", "_MaskPartial"),
    *(
        (module, name)
        for module in (
            "torch.distributed._tensor.placement_types",
            f"{DTENSOR}.placement_types",
        )
        for name in (
            "_StridedShard",
            "Partial",
            "_Partial",
            "_NormPartial",
            "_MaskPartial",
            "MaskPartial",
        )
    ),
}


def short(value: object) -> str:
    """A test id that fits a line."""
    return ascii(value)[:50]


EMPTY = (b")", b"}", b"]", b"N", b"\x88", b"K\x00", b"K\x07")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `read` and `describe` put the rank file."""
    return tmp_path


def read(folder: Path, code: bytes) -> Any:
    path = folder / "model_world_size_1_rank_0.pt"
    pack(path, code)
    return read_torch_file(str(path)).root


def describe(folder: Path, code: bytes) -> streammerge.Checkpoint:
    pack(folder / "model_world_size_1_rank_0.pt", code)
    return streammerge.describe(folder)


def snapshot() -> dict[object, object]:
    """Everything that a pickle can lay hands on."""
    kinds = [value for value in vars(unpickler).values() if isinstance(value, type)]
    state: dict[object, object] = {kind: dict(vars(kind)) for kind in kinds}
    state["allowed"] = dict(unpickler._ALLOWED)
    state["module"] = dict(vars(unpickler))
    state[OrderedDict] = dict(vars(OrderedDict))
    state["modules"] = set(sys.modules) - {m for m in sys.modules if m.startswith("torch")}
    return state


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    before = snapshot()
    yield
    after = snapshot()
    assert before.keys() == after.keys()
    before.pop("modules")
    after.pop("modules")
    assert before == after


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A path that exists once any hostile code has run."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@contextmanager
def little_memory() -> Iterator[None]:
    """A number in a file must not take the machine down with the test."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


# --- the allow-list ---


def test_the_list_changes_only_on_purpose() -> None:
    storages = {("torch", n) for n in dir(torch) if n.endswith("Storage") and n != "UntypedStorage"}
    dtypes = {("torch", n) for n, value in vars(torch).items() if type(value) is torch.dtype}
    listed = set(ALLOWED)
    assert listed >= SEEN | OTHER_SPELLINGS
    left = listed - SEEN - OTHER_SPELLINGS
    assert {n for _, n in left if n.endswith("Storage")} <= {n for _, n in storages}
    left = {(module, n) for module, n in left if not n.endswith("Storage")}
    # Whatever else is there names a dtype: of this torch or of a newer one.
    assert {str(unpickler._ALLOWED[module, n]) for module, n in left} == {n for _, n in left}
    assert {module for module, _ in left} == {"torch"}
    # A dtype has several names (torch.half), but pickles by one.
    assert {n for _, n in left} >= {str(getattr(torch, n))[6:] for _, n in dtypes}


@pytest.mark.parametrize("kind", ["GLOBAL", "STACK_GLOBAL"])
def test_every_listed_name_resolves(folder: Path, kind: str) -> None:
    for module, attribute in SEEN | OTHER_SPELLINGS:
        if kind == "GLOBAL":
            code = program(b"]", name(module, attribute), b"a")
        else:
            code = program(b"]", text(module), text(attribute), b"\x93a", protocol=4)
        (value,) = read(folder, code)
        assert value is unpickler._ALLOWED[module, attribute]


def test_every_dtype_pickles_by_a_listed_name(folder: Path) -> None:
    for value in vars(torch).values():
        if type(value) is torch.dtype:
            assert read(folder, pickle.dumps(value, 2)) == str(value).removeprefix("torch.")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_every_typed_storage_is_known(folder: Path) -> None:
    for attribute in dir(torch):
        kind = getattr(torch, attribute)
        if attribute.endswith("Storage") and hasattr(kind, "dtype") and attribute != "Storage":
            dtype = str(kind.dtype).removeprefix("torch.")
            assert read(folder, program(name("torch", attribute))) == ("storage", dtype)


def test_stored_checkpoints_name_nothing_else() -> None:
    files = sorted(DATA.glob("*/*.pt"))
    assert len(files) > 100
    found: set[tuple[str, str]] = set()
    for file in files:
        with file.open("rb") as stream:
            if stream.read(2) != b"PK":
                continue
        with zipfile.ZipFile(file) as archive:
            (pickled,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            for opcode, argument, _ in pickletools.genops(archive.read(pickled)):
                if opcode.name == "GLOBAL":
                    module, _, attribute = str(argument).partition(" ")
                    found.add((module, attribute))
    assert found <= set(ALLOWED)
    assert len(found & SEEN) > 30


FORBIDDEN = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("__builtin__", "eval"),
    ("builtins", "exec"),
    ("builtins", "open"),
    ("builtins", "__import__"),
    ("builtins", "setattr"),
    ("builtins", "type"),
    ("builtins", "object"),
    ("builtins", "dict"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
    ("builtins", "slice"),
    ("operator", "attrgetter"),
    ("functools", "partial"),
    ("importlib", "import_module"),
    ("pickle", "loads"),
    ("_pickle", "Unpickler"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("__main__", "x"),
    ("torch", "load"),
    ("torch", "Generator"),
    ("torch.hub", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_qtensor"),
    ("torch._utils", "_import_dotted_name"),
    ("torch._tensor", "_rebuild_from_type"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("collections", "defaultdict"),
    ("collections", "OrderedDict.fromkeys"),
    ("collections", "OrderedDict.__init__"),
    ("collections", "abc"),
    ("torch.distributed.tensor", "DTensor.__setstate__"),
    ("torch.distributed.tensor", "DTensor.__new__.__globals__"),
    ("torch", "FloatStorage.__class__"),
    ("torch", "Size.__new__"),
    ("torch", ""),
    ("", ""),
    ("", "getattr"),
    ("Torch", "Size"),
    ("torch ", "Size"),
    ("torch", "Size "),
    ("torch", "\u0405ize"),
    ("streammerge.unpickler", "Record"),
    ("streammerge.unpickler", "Opaque"),
    ("_codecs", "decode"),
    ("codecs", "encode"),
    ("_io", "FileIO"),
    ("_io", "open"),
    ("io", "BytesIO"),
]


@pytest.mark.parametrize(("module", "attribute"), FORBIDDEN, ids=short)
def test_any_other_name_is_refused_and_named(folder: Path, module: str, attribute: str) -> None:
    codes = [
        program(text(module), text(attribute), b"\x93", protocol=4),
        program(b"\x8c", bytes([len(module.encode())]) + module.encode(), text(attribute), b"\x93"),
    ]
    if module and attribute and (module + attribute).isascii():
        codes += [program(name(module, attribute)), program(name(module, attribute) + b")R")]
    for code in codes:
        with pytest.raises(UnsafePickleError) as caught:
            read(folder, code)
        assert f"{module}.{attribute}" in str(caught.value)
        assert "nothing was run" in str(caught.value)


class Evil:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_run(folder: Path, marker: Path, protocol: int) -> None:
    for evil in (
        Evil(os.system, f"touch {marker}"),
        Evil(os.mkdir, str(marker)),
        Evil(eval, f"open({str(marker)!r}, 'w')"),
        Evil(exec, f"open({str(marker)!r}, 'w')"),
        Evil(open, str(marker), "w"),
        Evil(getattr, "text", "format"),
        Evil(__import__, "os"),
        Evil(subprocess.Popen, ["touch", str(marker)]),
    ):
        for value in (evil, {"w": evil}, [evil], (evil,), OrderedDict(w=torch.ones(1), x=evil)):
            buffer = io.BytesIO()
            pickle.Pickler(buffer, protocol).dump(value)
            with pytest.raises(UnsafePickleError):
                read(folder, buffer.getvalue())
            path = folder / "real.pt"
            torch.save(value, path, pickle_protocol=max(2, protocol))
            with pytest.raises(UnsafePickleError):
                read_torch_file(str(path))
            torch.save(
                value,
                path,
                pickle_protocol=max(2, protocol),
                _use_new_zipfile_serialization=False,
            )
            with pytest.raises(UnsafePickleError):
                read_torch_file(str(path))


@pytest.mark.parametrize("part", range(5))
def test_each_pickle_of_a_legacy_file_is_restricted(
    tmp_path: Path, marker: Path, part: int
) -> None:
    pickles = [
        pickle.dumps(torch.serialization.MAGIC_NUMBER, 2),
        pickle.dumps(torch.serialization.PROTOCOL_VERSION, 2),
        pickle.dumps({"little_endian": True}, 2),
        pickle.dumps({}, 2),
        pickle.dumps([], 2),
    ]
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(pickles))
    assert read_torch_file(str(path)).root == {}
    pickles[part] = pickle.dumps(Evil(os.system, f"touch {marker}"), 2)
    path.write_bytes(b"".join(pickles))
    # In place of the magic number it is just no torch.save file.
    with pytest.raises(UnsafePickleError if part else CorruptFileError):
        read_torch_file(str(path))


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_protocols_are_refused(folder: Path, marker: Path, protocol: int) -> None:
    for value in (Evil(os.mkdir, str(marker)), [True, 1 << 40], slice(3)):
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol).dump(value)
        with pytest.raises((CorruptFileError, UnsafePickleError)):
            read(folder, buffer.getvalue())


def test_opcodes_that_torch_does_not_write(folder: Path) -> None:
    """Among them those that name a class in other ways: INST and the extension codes."""
    known = {opcode.code for opcode in pickletools.opcodes}
    missing = known - {opcode.code for opcode in pickletools.opcodes if opcode.proto >= 2}
    written = set("(.012NGKMJXc)t]a}seuqhrjbRQ")  # of protocols 0 and 1, in those above, too
    copyreg.add_extension("os", "system", 240)
    try:
        for code in (missing - written) | {"\x82", "\x83", "\x84", "\x97", "\x98"}:
            for before in (b"", b"N", b"NN", b"(" + text("x")):
                for after in (b"\xf0", b"\xf0\0\0\0", b"os\nsystem\n", b"5\n"):
                    with pytest.raises(CorruptFileError, match=f"opcode {ord(code):#04x}"):
                        read(folder, program(before, code.encode("latin1"), after))
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert len(missing - written) > 10


# --- getattr ---


GETATTR = name("__builtin__", "getattr")
MEMORY_FORMAT = name(f"{SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
SHARDED_TENSOR = name(f"{SHARDED}.sharded_tensor.api", "ShardedTensor")


def test_getattr_in_its_two_uses(folder: Path) -> None:
    nested = call(GETATTR, SHARDED_TENSOR, text("ProcessGroupState"))
    assert read(folder, program(nested)) is unpickler.ProcessGroupState
    for member in ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"):
        assert read(folder, program(call(GETATTR, MEMORY_FORMAT, text(member)))) is None
    assert read(folder, program(call(MEMORY_FORMAT, b"K\x00"))) is None  # Python 3.12


@pytest.mark.parametrize("attribute", ["__class__", "__init__", "__new__", "__dict__", "mro"])
def test_getattr_gives_no_attribute_of_the_enum(folder: Path, attribute: str) -> None:
    try:
        value = read(folder, program(call(GETATTR, MEMORY_FORMAT, text(attribute))))
    except UnsafePickleError:
        return
    assert value is None


@pytest.mark.parametrize(
    "arguments",
    [
        (SHARDED_TENSOR, text("__init__")),
        (SHARDED_TENSOR, text("__setstate__")),
        (SHARDED_TENSOR, text("ProcessGroupState.__init__")),
        (SHARDED_TENSOR, text("")),
        (SHARDED_TENSOR, b"N"),
        (SHARDED_TENSOR, tuple_()),
        (call(SHARDED_TENSOR), text("ProcessGroupState")),
        (name(DTENSOR, "DTensor"), text("ProcessGroupState")),
        (name("collections", "OrderedDict"), text("fromkeys")),
        (call(name("collections", "OrderedDict")), text("update")),
        (b"}", text("update")),
        (b"]", text("append")),
        (text("{0.__class__}"), text("format")),
        (tuple_(), text("__class__")),
        (GETATTR, text("__new__")),
        (name("torch", "Size"), text("__new__")),
        (b"N", text("__class__")),
        (MEMORY_FORMAT, b"K\x05"),
        (MEMORY_FORMAT, b"N"),
        (b"]", b"]"),
    ],
    ids=short,
)
@pytest.mark.parametrize("module", ["__builtin__", "builtins"])
def test_any_other_getattr_is_refused(
    folder: Path, module: str, arguments: tuple[bytes, bytes]
) -> None:
    with pytest.raises(UnsafePickleError, match="getattr"):
        read(folder, program(call(name(module, "getattr"), *arguments)))


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_getattr_takes_two_arguments(folder: Path, count: int) -> None:
    arguments = (SHARDED_TENSOR, text("ProcessGroupState"), b"N", b"N")[:count]
    with pytest.raises((CorruptFileError, UnsafePickleError)):
        read(folder, program(call(GETATTR, *arguments)))


# --- what is handed out cannot be changed ---


STATES = [
    dict_(field=b"K\x01"),
    dict_(__new__=name("torch", "device"), __class__=name("torch", "Tensor")),
    tuple_(b"N", dict_(field=b"K\x01")),
    tuple_(b"}", dict_(__setstate__=name("torch", "device"))),
    tuple_(dict_(args=b")"), dict_(args=b")")),
    b"N",
    b")",
    b"K\x01",
    text("state"),
]
# One spelling of each stand-in; dtypes and storages are plain strings and tuples, of which two do.
HANDED_OUT = [
    *{
        value if isinstance(value, type) else type(value): name(*pair)
        for pair, value in sorted(unpickler._ALLOWED.items())
    }.values(),
    name("torch", "float32"),
    name("torch.storage", "UntypedStorage"),
    call(GETATTR, SHARDED_TENSOR, text("ProcessGroupState")),
]


@pytest.mark.parametrize("target", HANDED_OUT, ids=short)
def test_state_is_not_set_on_what_is_handed_out(folder: Path, target: bytes) -> None:
    for state in STATES:
        try:
            value = read(folder, program(build(target, state)))
        except CorruptFileError:
            continue
        # An empty state sets nothing.
        assert state in (b"N", b")")
        assert value is read(folder, program(target)) or value == read(folder, program(target))


@pytest.mark.parametrize("target", HANDED_OUT, ids=short)
def test_items_are_not_set_on_what_is_handed_out(folder: Path, target: bytes) -> None:
    for change in (
        text("key") + b"K\x01s",
        b"K\x00K\x01s",
        b"(" + text("a") + b"K\x01" + text("b") + b"K\x02u",
        b"K\x01a",
        b"(K\x01K\x02e",
        b"(K\x01K\x02\x90",
    ):
        with pytest.raises(CorruptFileError):
            read(folder, program(target, change, protocol=4))


INSTANCES = {
    "record": call(name("torch", "device"), text("cpu")),
    "dtensor": new(name(DTENSOR, "DTensor")),
    "storage": storage(),
    "tensor": tensor(),
    "size": call(name("torch", "Size"), tuple_(b"K\x01")),
    "bytes": call(name("_codecs", "encode"), text("x"), text("latin1")),
}


@pytest.mark.parametrize("instance", INSTANCES)
def test_items_are_not_set_on_stand_ins(folder: Path, instance: str) -> None:
    for change in (text("key") + b"K\x01s", b"K\x00K\x01s", b"K\x01a", b"(K\x01e", b"(K\x01\x90"):
        with pytest.raises(CorruptFileError):
            read(folder, program(INSTANCES[instance], change, protocol=4))


@pytest.mark.parametrize("instance", ["storage", "tensor", "size", "bytes"])
@pytest.mark.parametrize("state", STATES[:5], ids=short)
def test_values_have_no_state(folder: Path, instance: str, state: bytes) -> None:
    with pytest.raises(CorruptFileError):
        read(folder, program(build(INSTANCES[instance], state)))


def test_a_record_keeps_its_fields_and_nothing_else(folder: Path) -> None:
    fields = dict_(_spec=b"K\x01", field=b"K\x02", set_state=b"K\x03", __class__=b"N")
    other = dict_(_local_tensor=b"K\x04", _spec=b"K\x05")
    for state, local, spec in (
        (fields, None, 1),
        (tuple_(b"N", fields), None, 1),
        (tuple_(fields, other), 4, 1),
        *((state, None, None) for state in STATES),
    ):
        record = read(folder, program(build(new(name(DTENSOR, "DTensor"), b"K\x06"), state)))
        assert type(record) is unpickler.DTensor
        assert not hasattr(record, "__dict__")
        assert not hasattr(record, "field")
        assert (record._local_tensor, record._spec) == (local, spec)


def test_a_dict_cannot_pose_as_something_else(folder: Path) -> None:
    """OrderedDict takes attributes (torch keeps ``_metadata`` there); its methods stay its own."""
    good = call(name("collections", "OrderedDict")) + text("w") + tensor() + b"s"
    assert [t.name for t in describe(folder, program(good)).tensors] == ["w"]
    for attribute in ("items", "values", "keys", "get", "__iter__", "__len__", "__class__", "pop"):
        for value in (name("torch", "device"), name("torch", "Size"), b"N", b"K\x01"):
            attributes = dict_(**{attribute: value})
            for state in (attributes, tuple_(b"N", attributes), tuple_(attributes, attributes)):
                try:
                    checkpoint = describe(folder, program(build(good, state)))
                except StreamMergeError:
                    continue
                assert [t.name for t in checkpoint.tensors] == ["w"]
    metadata = call(name("collections", "OrderedDict"))
    code = program(build(good, dict_(_metadata=metadata)))
    assert [t.name for t in describe(folder, code).tensors] == ["w"]


# --- calls ---


def outcome(read_it: Any, folder: Path, code: bytes) -> str:
    try:
        read_it(folder, code)
    except StreamMergeError as error:
        return type(error).__name__
    return "success"


@pytest.mark.parametrize("target", HANDED_OUT, ids=short)
def test_any_arguments(folder: Path, target: bytes) -> None:
    """Calls and constructions with too few, too many and wrong arguments."""
    arguments = [
        *((value,) * count for value in (b"N", b"K\x01") for count in range(10)),
        *itertools.product((text("x"), b"]", b"}", target), repeat=2),
        (tensor(),),
        (storage(), b"K\x00", tuple_(b"K\x02"), tuple_(b"K\x01")),
        (target, target, tuple_(target, target), b"N"),
    ]
    codes = []
    for items in arguments:
        codes.append(call(target, *items))
        codes.append(new(target, *items))
        codes.append(target + tuple_(*items) + dict_(key=b"K\x01") + b"\x92")
        codes.append(b"(" + target + b"".join(items) + b"o")
    codes += [target + other + b"R" for other in EMPTY]
    codes += [target + other + b"\x81" for other in EMPTY]
    codes += [target + b")" + other + b"\x92" for other in EMPTY]
    # One file with one result each would be slow: all in one pickle where that succeeds.
    path = folder / "model.pt"
    for code in codes:
        try:
            unpickle(program(code, protocol=4))
        except UnsafePickleError:
            continue
        except Exception:
            pack(path, program(code, protocol=4))
            with pytest.raises(StreamMergeError):
                read_torch_file(str(path))


def test_tensors_of_subclasses(folder: Path) -> None:
    from_type = name("torch._tensor", "_rebuild_from_type_v2")
    wrapper = name("torch._utils", "_rebuild_wrapper_subclass")
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    plain = name("torch", "Tensor")
    state = dict_(_spec=b"K\x01")
    value = read(
        folder, program(call(from_type, wrapper, name(DTENSOR, "DTensor"), tuple_(b"N"), state))
    )
    assert isinstance(value, unpickler.DTensor)
    assert value._spec == 1
    arguments = tuple_(storage(), b"K\x01", tuple_(b"K\x02"), tuple_(b"K\x01"), b"\x89", b"N")
    value = read(folder, program(call(from_type, rebuild, plain, arguments, state)))
    assert isinstance(value, StridedTensor)
    assert (value.offset, value.sizes, value.strides) == (1, (2,), (1,))
    for wrong in (
        (b"N", b"N", b"N", b"N"),
        (plain, plain, b")", b"N"),
        (rebuild, b"N", arguments, state),
        (rebuild, name("torch", "Size"), arguments, state),
        (name("torch", "Size"), plain, tuple_(b")"), state),
        (GETATTR, plain, tuple_(SHARDED_TENSOR, text("ProcessGroupState")), state),
        (from_type, plain, tuple_(from_type, plain, b")", b"N"), state),
        (wrapper, name(DTENSOR, "DTensor"), b"N", state),
        (b"]", plain, arguments, state),
    ):
        with pytest.raises(CorruptFileError):
            read(folder, program(call(from_type, *wrong)))


@pytest.mark.parametrize(
    "arguments",
    [
        (b"N", b"K\x00", tuple_(b"K\x04"), tuple_(b"K\x01")),
        (text("0"), b"K\x00", tuple_(b"K\x04"), tuple_(b"K\x01")),
        (storage(), b"N", tuple_(b"K\x04"), tuple_(b"K\x01")),
        (storage(), b"\x88", tuple_(b"K\x04"), tuple_(b"K\x01")),
        (storage(), number(-1), tuple_(b"K\x04"), tuple_(b"K\x01")),
        (storage(), b"G" + struct.pack(">d", 1.0), tuple_(b"K\x04"), tuple_(b"K\x01")),
        (storage(), b"K\x00", b"N", tuple_(b"K\x01")),
        (storage(), b"K\x00", b"](K\x04e", tuple_(b"K\x01")),
        (storage(), b"K\x00", tuple_(number(-4)), tuple_(b"K\x01")),
        (storage(), b"K\x00", tuple_(b"\x88"), tuple_(b"K\x01")),
        (storage(), b"K\x00", tuple_(text("4")), tuple_(b"K\x01")),
        (storage(), b"K\x00", tuple_(b"K\x04"), tuple_(number(-1))),
        (storage(), b"K\x00", tuple_(b"K\x04"), tuple_()),
        (storage(), b"K\x00", tuple_(b"K\x04"), b"N"),
        (storage(), b"K\x00", tuple_(b"K\x04"), tuple_(b"K\x01"), b"\x89", b"N", b"K\x01"),
        (storage(), b"K\x00", b")", b")", b"\x89", b"N", dict_(other=b"\x88")),
        (storage(), b"K\x00", b")", b")", b"\x89", b"N", dict_(neg=b"\x88")),
    ],
    ids=short,
)
def test_tensors_that_make_no_sense(folder: Path, arguments: tuple[bytes, ...]) -> None:
    with pytest.raises((CorruptFileError, UnsupportedError)):
        read(folder, program(call(name("torch._utils", "_rebuild_tensor_v2"), *arguments)))


@pytest.mark.parametrize(
    ("sizes", "strides", "offset"),
    [
        (tuple_(b"K\x05"), tuple_(b"K\x01"), b"K\x00"),
        (tuple_(b"K\x04"), tuple_(b"K\x01"), b"K\x01"),
        (tuple_(b"K\x02"), tuple_(b"K\x04"), b"K\x00"),
        (tuple_(), tuple_(), b"K\x04"),
        (tuple_(number(2**70)), tuple_(b"K\x01"), b"K\x00"),
        (tuple_(b"K\x02"), tuple_(number(2**70)), b"K\x00"),
        (tuple_(b"K\x01"), tuple_(b"K\x01"), number(2**70)),
        (tuple_(b"K\x00"), tuple_(b"K\x01"), number(2**70)),
        (tuple_(b"K\x00", number(2**70)), tuple_(b"K\x01", b"K\x01"), b"K\x00"),
    ],
    ids=short,
)
def test_tensors_beyond_their_storage(
    folder: Path, sizes: bytes, strides: bytes, offset: bytes
) -> None:
    """They are refused, or hold no element at all; numbers of any size are no other error."""
    code = program(dict_(w=tensor(sizes, strides, offset)))
    try:
        checkpoint = describe(folder, code)
    except StreamMergeError:
        return
    assert checkpoint.tensors[0].nbytes == 0


def test_size_one_dims_may_have_any_stride(folder: Path) -> None:
    code = program(dict_(w=tensor(tuple_(b"K\x01", b"K\x04"), tuple_(number(2**62), b"K\x01"))))
    (value,) = describe(folder, code).tensors
    assert value.shape == (1, 4)


def test_good_tensors(folder: Path) -> None:
    value = read(folder, program(tensor()))
    assert isinstance(value, StridedTensor)
    assert (value.sizes, value.strides, value.offset, value.dtype, value.conj) == (
        (4,),
        (1,),
        0,
        "float32",
        False,
    )
    assert (value.storage.key, value.storage.dtype, value.storage.numel) == ("0", "float32", 4)
    untyped = storage(numel=b"K\x10", kind=name("torch.storage", "UntypedStorage"))
    code = call(
        name("torch._utils", "_rebuild_tensor_v3"),
        untyped,
        b"K\x01",
        call(name("torch", "Size"), tuple_(b"K\x02")),
        tuple_(b"K\x03"),
        b"\x89",
        b"N",
        name("torch", "uint16"),
    )
    value = read(folder, program(code))
    assert isinstance(value, UntypedTensor)
    assert (value.sizes, value.strides, value.offset, value.dtype) == ((2,), (3,), 1, "uint16")


# --- persistent ids ---


FLOAT = name("torch", "FloatStorage")
PIDS = [
    b"N",
    b"K\x01",
    text("0"),
    b")",
    b"]",
    b"}",
    tuple_(text("storage")),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu")),
    tuple_(text("module"), FLOAT, text("0"), text("cpu"), b"K\x04"),
    tuple_(b"N", FLOAT, text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), b"N", text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), text("FloatStorage"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), name("torch", "float32"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), name("torch", "Size"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), tuple_(b"N", b"N"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, b"K\x00", text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, b"N", text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, b"]", text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), b"N"),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), text("4")),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), number(-1)),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), number(2**70)),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), b"K\x03"),
    tuple_(text("storage"), FLOAT, text("1"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, text("../data/0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), b"K\x04", tuple_(b"K\x00", b"K\x01")),
    tuple_(text("storage"), FLOAT, text("0"), text("cpu"), b"K\x04", b"N", b"N"),
    tuple_(text("storage"), tuple_(text("storage"), b"K\x05"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), tuple_(text("storage"), b"]"), text("0"), text("cpu"), b"K\x04"),
    tuple_(text("storage"), tuple_(text("storage"), text("x")), text("0"), text("cpu"), b"K\x04"),
    b"]2a",
    b"}" + text("self") + b"2s",
]


@pytest.mark.parametrize("pid", PIDS, ids=short)
def test_persistent_ids_of_another_form(folder: Path, pid: bytes) -> None:
    with pytest.raises(CorruptFileError):
        read(folder, program(pid, b"Q"))


def test_persistent_ids_as_text_are_refused(folder: Path) -> None:
    with pytest.raises(CorruptFileError):
        read(folder, program(b"Pstorage\n", protocol=0)[2:])


def test_one_storage_under_two_dtypes(folder: Path) -> None:
    """Views of different dtypes on one storage are torch's business; sizes must agree."""
    other = storage(kind=name("torch", "IntStorage"))
    first, second = read(folder, program(tuple_(storage(), other)))
    assert isinstance(first, Storage)
    assert isinstance(second, Storage)
    assert (first.dtype, second.dtype) == ("float32", "int32")
    with pytest.raises(CorruptFileError):
        read(folder, program(tuple_(storage(), storage(kind=name("torch", "DoubleStorage")))))
    first, second = read(folder, program(tuple_(storage(), storage())))
    assert first is second


# --- the machine itself ---


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02(.",
        b"\x80\x06N.",
        b"\x80\xffN.",
        b"\xff",
        b"\x80\x02h\x00.",
        b"\x80\x02j\xff\xff\xff\xff.",
        b"\x80\x02q\x00.",
        b"\x80\x020.",
        b"\x80\x021.",
        b"\x80\x02t.",
        b"\x80\x02R.",
        b"\x80\x02NR.",
        b"\x80\x02)R.",
        b"\x80\x02)b.",
        b"\x80\x02s.",
        b"\x80\x02Ns.",
        b"\x80\x02(u.",
        b"\x80\x02}(NNNu.",
        b"\x80\x02}(]Nu.",
        b"\x80\x02}]Ns.",
        b"\x80\x02})}sNs.",
        b"\x80\x02\x81.",
        b"\x80\x02N)\x81.",
        b"\x80\x02\x85.",
        b"\x80\x02Q.",
        b"\x80\x04\x90.",
        b"\x80\x04\x93.",
        b"\x80\x04NN\x93.",
        b"\x80\x04]]\x93.",
        b"\x80\x04\x94.",
        b"\x80\x05\x97.",
        b"\x80\x05\x98.",
        b"\x80\x05N\x98.",
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
        b"\x80\x02\x8a\x09\x01.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x03B\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x05\x96" + b"\xff" * 8 + b".",
        b"\x80\x02Inot a number\n.",
        b"\x80\x02I" + b"9" * 5000 + b"\n.",
        b"\x80\x02L" + b"9" * 5000 + b"L\n.",
        b"\x80\x02F1e5x\n.",
        b"\x80\x02Sno quotes\n.",
        b"\x80\x02V\\ud800\\uXXXX\n.",
        b"\x80\x02c\xff\xfe\nx\n.",
        b"\x80\x02ctorch\n.",
        b"\x80\x02g\n.",
        b"\x80\x02gx\n.",
        b"\x80\x02Np-1\n.",
        b"\x80\x02Npx\n.",
    ],
    ids=short,
)
def test_broken_programs(folder: Path, code: bytes) -> None:
    with pytest.raises((CorruptFileError, UnsafePickleError)):
        read(folder, code)


@pytest.mark.parametrize(
    "code",
    [
        b"]2a",
        b"}" + text("w") + b"2s",
        b"}q\x00" + text("w") + b"]h\x00as",
        b"](2e",
        b"}q\x00" + text("model") + b"h\x00s" + text("w") + tensor() + b"s",
        b"(]q\x00h\x00ah\x00t",
        build(new(name(DTENSOR, "DTensor")) + b"q\x00", b"h\x00"),
        b"}" + text("w") + build(new(name(DTENSOR, "DTensor")) + b"q\x00", b"h\x00") + b"s",
        b"}"
        + text("w")
        + build(
            new(name(DTENSOR, "DTensor")) + b"q\x00",
            dict_(_local_tensor=b"h\x00", _spec=b"h\x00"),
        )
        + b"s",
    ],
    ids=short,
)
def test_values_that_contain_themselves(folder: Path, code: bytes) -> None:
    outcomes = {outcome(read, folder, program(code)), outcome(describe, folder, program(code))}
    assert outcomes <= {"success", "CorruptFileError", "UnsupportedError"}


@pytest.mark.parametrize(
    "code",
    [
        b"]" * 100_000 + b"a" * 99_999,
        b"N" + b"\x85" * 100_000,
        b"N" + b"\x85" * 100_000 + b"Q",
        dict_(w=tensor(sizes=b"N" + b"\x85" * 100_000)),
        dict_(w=call(name("torch", "Size"), b"N" + b"\x85" * 100_000)),
        call(GETATTR, SHARDED_TENSOR, b"N" + b"\x85" * 100_000),
        dict_(w=call(name("torch._utils", "_rebuild_parameter"), b"N" + b"\x85" * 100_000)),
    ],
    ids=lambda code: ascii(code[:30]),
)
def test_deep_nesting(folder: Path, code: bytes) -> None:
    outcomes = {outcome(read, folder, program(code)), outcome(describe, folder, program(code))}
    assert outcomes <= {"success", "CorruptFileError", "UnsafePickleError", "UnsupportedError"}


# A tuple of twice itself, 60 times: 2**60 elements when printed.
BOMB = b"N" + b"2\x86" * 60


REBUILD = name("torch._utils", "_rebuild_tensor_v2")
BOMBS = [
    BOMB + b"Q",
    tensor(sizes=BOMB),
    tensor(strides=BOMB),
    tuple_(text("storage"), BOMB, text("0"), text("cpu"), b"K\x04") + b"Q",
    tuple_(text("storage"), FLOAT, BOMB, text("cpu"), b"K\x04") + b"Q",
    call(GETATTR, SHARDED_TENSOR, BOMB),
    call(REBUILD, storage(), b"K\x00", b")", b")", b"\x89", b"N", dict_(x=BOMB)),
    call(name("torch._utils", "_rebuild_tensor_v3"), storage(), *(b"N",) * 5, BOMB),
]


def run_apart(script: str, *arguments: str, timeout: float | None = None) -> str:
    """Standard output of a Python process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(streammerge.__file__).parents[1],
    )
    return done.stdout


def test_error_texts_do_not_blow_up(folder: Path) -> None:
    """Naming the bad value in the error must not print all of it."""
    paths = [folder / f"{i}.pt" for i in range(len(BOMBS))]
    for path, code in zip(paths, BOMBS, strict=True):
        pack(path, program(code))
    script = (
        "import sys\n"
        "from streammerge import StreamMergeError\n"
        "from streammerge.torchfile import read_torch_file\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        read_torch_file(path)\n"
        "    except StreamMergeError as error:\n"
        "        print(len(str(error)))\n"
    )
    try:
        lengths = run_apart(script, *map(str, paths), timeout=20).split()
    except subprocess.TimeoutExpired:
        pytest.fail("still printing the value after 20 seconds")
    assert len(lengths) == len(BOMBS)
    assert max(map(int, lengths)) < 5000


def test_reading_imports_nothing(folder: Path) -> None:
    """Names of the allow-list are stand-ins: torch is not imported to read them."""
    path = folder / "model.pt"
    pack(path, program(b"](", *HANDED_OUT, b"e"))
    script = (
        "import sys\n"
        "from streammerge.torchfile import read_torch_file\n"
        "before = set(sys.modules)\n"
        "read_torch_file(sys.argv[1])\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    assert run_apart(script, str(path)).strip() == ""


# --- mutations of real pickles ---


VALUES = [
    *EMPTY,
    number(-1),
    number(2**64),
    number(2**75),
    b"G" + struct.pack(">d", 1.5),
    text(""),
    text("float32"),
    tuple_(b"K\x01"),
    tuple_(b"K\x02", b"K\x03"),
    tuple_(b"N"),
    b"]K\x01a",
    b"}K\x01K\x02s",
    tensor(),
    storage(),
]


def random_value(rng: random.Random) -> bytes:
    target = rng.choice(HANDED_OUT)
    return rng.choice([*VALUES, target, target + b")R", target + b")\x81"])


VALUE_OPCODES = {
    *("BININT1", "BININT2", "BININT", "LONG1", "NONE", "NEWTRUE", "NEWFALSE", "GLOBAL"),
    *("EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST", "BINUNICODE", "BINGET", "LONG_BINGET"),
}
RESULT_OPCODES = {"TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"}


def pieces_of(code: bytes) -> list[tuple[str, bytes]]:
    """The opcodes of a pickle, by name, each with its bytes."""
    opcodes = list(pickletools.genops(code))
    starts = [position or 0 for _, _, position in opcodes] + [len(code)]
    return [
        (opcode.name, code[begin:end])
        for (opcode, _, _), (begin, end) in zip(opcodes, itertools.pairwise(starts), strict=True)
    ]


def mutate(pieces: list[tuple[str, bytes]], rng: random.Random) -> bytes:
    """Put another value, of any kind, in place of one or two of a pickle."""
    places = [i for i, (name, _) in enumerate(pieces) if name in VALUE_OPCODES | RESULT_OPCODES]
    changed = [code for _, code in pieces]
    for place in rng.sample(places, rng.choice([1, 1, 2])):
        opcode, old = pieces[place]
        kept = old + b"0" if opcode in RESULT_OPCODES else b""  # made, then dropped
        changed[place] = kept + random_value(rng)
    return b"".join(changed)


@pytest.mark.parametrize(
    "source",
    [
        "toy_plain_dtensor_2d__t213",
        "tp_only_w2__t213",
        "fsdp1_shardedtensor_origparams__t213",
        "fsdp1_shardedtensor_origparams__t24",
        "fsdp2_tp_2x2_even__t26",
        "toy_hsdp_transposed__t213",
    ],
)
def test_mutated_pickles(tmp_path: Path, source: str) -> None:
    """Values of any kind where others are expected: an error or a result, never anything else."""
    for file in (DATA / source).glob("*.pt"):
        shutil.copy(file, tmp_path)
    victim = min(tmp_path.glob("*_rank_1.pt"))
    with zipfile.ZipFile(victim) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (pickled,) = (member for member in members if member.endswith("/data.pkl"))
    rng = random.Random(source)
    pieces = pieces_of(members[pickled])
    outcomes: Counter[str] = Counter()
    for _ in range(50):
        code = mutate(pieces, rng)
        with zipfile.ZipFile(victim, "w") as archive:
            for member, content in {**members, pickled: code}.items():
                archive.writestr(member, content)
        try:
            with little_memory():
                streammerge.plan(streammerge.describe(tmp_path))
        except StreamMergeError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["success"] += 1
    assert outcomes["success"]
    assert outcomes["CorruptFileError"]


# --- device meshes and specs ---


STRIDED_SHARD = name(f"{DTENSOR}.placement_types", "_StridedShard")


def test_a_good_dtensor(folder: Path) -> None:
    for flag in (b"\x88", b"\x89", b"N"):
        code = program(dict_(w=dtensor(use_strided_shard_as_shard_order=flag)))
        (value,) = describe(folder, code).tensors
        assert (value.name, value.shape, value.dtype) == ("w", (4,), "F32")


@pytest.mark.parametrize(
    "flag",
    [b"]", b"}", b"K\x02", text("no"), b")", name("torch", "Size"), tuple_(b"]")],
    ids=short,
)
def test_a_flag_that_is_none(folder: Path, flag: bytes) -> None:
    """``use_strided_shard_as_shard_order`` is a bool; anything else is damage."""
    with pytest.raises(CorruptFileError):
        describe(folder, program(dict_(w=dtensor(use_strided_shard_as_shard_order=flag))))


@pytest.mark.parametrize("size", [0, 2, 1 << 30, 1 << 40, 1 << 70, -1], ids=hex)
@pytest.mark.parametrize("stride", [0, 1, 1 << 70, -1], ids=hex)
def test_layouts_that_make_no_sense(folder: Path, size: int, stride: int) -> None:
    flat = call(name("torch.distributed._mesh_layout", "_FlatLayout"), number(size), number(stride))
    with little_memory(), pytest.raises(StreamMergeError):
        describe(folder, program(dict_(w=dtensor(axes=tuple_(flat)))))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": b")"},
        {"ranks": tuple_(b"K\x01")},
        {"ranks": tuple_(number(-1))},
        {"ranks": b"N"},
        {"ranks": tuple_(number(1 << 70))},
        {"axes": b")"},
        {"axes": tuple_(b"N")},
        {"axes": b"K\x01"},
        {"placement": b"N"},
        {"placement": call(name(f"{DTENSOR}.placement_types", "Shard"), b"K\x01")},
        {"placement": call(name(f"{DTENSOR}.placement_types", "Shard"), number(-2))},
        {"placement": call(name(f"{DTENSOR}.placement_types", "Shard"), b"]")},
        {"placement": call(name(f"{DTENSOR}.placement_types", "Shard"), number(1 << 70))},
        {
            "placement": call(
                name(f"{DTENSOR}.placement_types", "_StridedShard"), b"K\x00", b"K\x00"
            )
        },
        {"placement": call(name(f"{DTENSOR}.placement_types", "_StridedShard"), b"K\x00", b"]")},
        {"placement": call(name(f"{DTENSOR}.placement_types", "Partial"), b"]")},
        {"placements": b"N"},
        {"placements": b")"},
        {"placements": b"}"},
        {"shard_order": b"]"},
        {"shard_order": tuple_(b"N")},
        {"shard_order": b"K\x01"},
        {"tensor_meta": b"N"},
        {"mesh": b"N"},
    ],
    ids=short,
)
def test_specs_that_make_no_sense(folder: Path, changes: dict[str, bytes]) -> None:
    with pytest.raises(StreamMergeError):
        describe(folder, program(dict_(w=dtensor(**changes))))


# More digits than Python turns into text (sys.set_int_max_str_digits).
ENDLESS = number(1 << 20_000)
SHARD = name(f"{DTENSOR}.placement_types", "Shard")


@pytest.mark.parametrize(
    "value",
    [
        tensor(sizes=tuple_(ENDLESS)),
        tensor(sizes=tuple_(b"K\x02"), strides=tuple_(ENDLESS)),
        tensor(offset=ENDLESS),
        call(REBUILD, storage(numel=ENDLESS), b"K\x00", tuple_(b"K\x04"), tuple_(b"K\x01")),
        dtensor(placement=call(SHARD, ENDLESS)),
        dtensor(placement=call(STRIDED_SHARD, b"K\x00", ENDLESS)),
        dtensor(ranks=tuple_(ENDLESS)),
        dtensor(ranks=tuple_(b"K\x00", ENDLESS)),
        dtensor(axes=tuple_(ENDLESS)),
        dtensor(shard_order=ENDLESS),
        dtensor(tensor_meta=ENDLESS),
        dtensor(
            tensor_meta=call(
                name(f"{DTENSOR}._dtensor_spec", "TensorMeta"),
                tuple_(ENDLESS),
                tuple_(b"K\x01"),
                name("torch", "float32"),
            )
        ),
        dtensor(
            tensor_meta=call(
                name(f"{DTENSOR}._dtensor_spec", "TensorMeta"),
                tuple_(b"K\x04"),
                tuple_(b"K\x01"),
                ENDLESS,
            )
        ),
    ],
    ids=range(13),
)
def test_numbers_without_end(folder: Path, value: bytes) -> None:
    """An error that names a number must not fail for the length of the number."""
    with little_memory():
        outcome(describe, folder, program(dict_(w=value)))
        assert outcome(describe, folder, program(b"}" + ENDLESS + value + b"s")) != "success"


@pytest.mark.parametrize("factor", [2, 4, 1 << 62], ids=hex)
def test_split_factors_of_any_size(folder: Path, factor: int) -> None:
    placement = call(name(f"{DTENSOR}.placement_types", "_StridedShard"), b"K\x00", number(factor))
    code = program(dict_(w=dtensor(placement=placement)))
    with little_memory():
        assert outcome(describe, folder, code) in ("success", "PlacementError")


def test_records_find_fields_by_name_and_place(folder: Path) -> None:
    kind = name(f"{DTENSOR}._dtensor_spec", "TensorMeta")
    record = read(folder, program(build(call(kind, b"K\x01", b"K\x02"), dict_(shape=b"K\x03"))))
    assert isinstance(record, Record)
    assert [record.shape, record.stride, record.dtype] == [3, 2, None]
    record = read(folder, program(call(kind, *(b"K\x01",) * 5)))
    assert [record.shape, record.stride, record.dtype] == [1, 1, 1]


# --- files that hold objects of any class ---


def read_foreign(folder: Path, code: bytes) -> Any:
    path = folder / "states.pt"
    pack(path, code)
    return read_torch_file(str(path), foreign=True).root


@pytest.mark.parametrize(
    ("module", "attribute"), [f for f in FORBIDDEN if "\n" not in "".join(f)], ids=short
)
def test_any_other_name_can_stand_for_nothing(folder: Path, module: str, attribute: str) -> None:
    kind = b"".join((text(module), text(attribute), b"\x93"))
    items = tuple_(b"K\x01", b"K\x02")[1:-1]
    for code in (
        kind,
        call(kind, text("touch")),
        new(kind),
        build(new(kind), dict_(a=b"K\x01")),
        new(kind) + b"(" + items + b"u",
        new(kind) + b"(" + items + b"e",
        new(kind) + b"(" + items + b"\x90",
        new(kind) + b"K\x01K\x02s",
        new(kind) + b"K\x01a",
        call(name("builtins", "getattr"), kind, text("method")),
        call(call(name("builtins", "getattr"), new(kind), text("method")), text("touch")),
        call(name("torch._tensor", "_rebuild_from_type_v2"), kind, kind, tuple_(), b"N"),
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch._utils", "_rebuild_tensor_v2"),
            kind,
            tuple_(storage(), b"K\x00", tuple_(b"K\x04"), tuple_(b"K\x01")),
            b"N",
        ),
    ):
        value = read_foreign(folder, program(code, protocol=4))
        assert value is unpickler.Foreign or type(value) is unpickler.Foreign
        assert vars(unpickler.Foreign)["__slots__"] == ()


def test_files_with_foreign_objects_are_bounded_too(folder: Path) -> None:
    kind = name("numpy", "ndarray")
    with little_memory():
        for code in (
            b"r" + struct.pack("<I", 1 << 30),
            b"\x8e" + struct.pack("<Q", 1 << 40),
            new(kind) + b"(" + b"K\x01" * 9 + b"e" + b"q\xff",
            b"K\x01(t)R",
        ):
            with pytest.raises(CorruptFileError):
                read_foreign(folder, program(code))


def test_stages_of_zero_are_numbers(folder: Path) -> None:
    kind = name("deepspeed.runtime.zero.config", "ZeroStageEnum")
    for get in (name("__builtin__", "getattr"), name("builtins", "getattr")):
        for stage, member in enumerate(("disabled", "optimizer_states", "gradients", "weights")):
            assert read_foreign(folder, program(call(get, kind, text(member)))) == stage
        with pytest.raises(UnsafePickleError):
            read_foreign(folder, program(call(get, kind, text("__class__"))))
    assert read_foreign(folder, program(call(kind, b"K\x02"))) == 2


def test_rank_files_have_no_classes_of_deepspeed(folder: Path) -> None:
    for module, attribute in unpickler._OF_DEEPSPEED:
        with pytest.raises(UnsafePickleError):
            read(folder, program(name(module, attribute)))
