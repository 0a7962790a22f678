"""Pickles put together opcode by opcode (see `pickletools`), packed as torch.save packs them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

SHARDED = "torch.distributed._shard"
DTENSOR = "torch.distributed.tensor"


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        return b"\x8b" + struct.pack("<I", len(data)) + data
    return b"\x8a" + bytes([len(data)]) + data


def tuple_(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_(*arguments) + b"R"


def new(kind: bytes, *arguments: bytes) -> bytes:
    return kind + tuple_(*arguments) + b"\x81"


def build(target: bytes, state: bytes) -> bytes:
    return target + state + b"b"


def dict_(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def program(*code: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + b"".join(code) + b"."


def storage(
    key: bytes = text("0"),
    numel: bytes = b"K\x04",
    kind: bytes = name("torch", "FloatStorage"),
    location: bytes = text("cpu"),
) -> bytes:
    return tuple_(text("storage"), kind, key, location, numel) + b"Q"


def tensor(
    sizes: bytes = tuple_(b"K\x04"), strides: bytes = tuple_(b"K\x01"), offset: bytes = b"K\x00"
) -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, storage(), offset, sizes, strides, b"\x89", hooks)


def pack(path: Path, code: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", code)
        archive.writestr("model/data/0", struct.pack("<4f", 1, 2, 3, 4))


def dtensor(
    axes: bytes = b"",
    ranks: bytes = tuple_(b"K\x00"),
    placement: bytes = call(name(f"{DTENSOR}.placement_types", "Shard"), b"K\x00"),
    **spec: bytes,
) -> bytes:
    """A DTensor of torch 2.13 over one rank, [4] of float32."""
    flat = name("torch.distributed._mesh_layout", "_FlatLayout")
    layout = call(
        name("torch.distributed._mesh_layout", "_MeshLayout"),
        axes or tuple_(call(flat, b"K\x01", b"K\x01")),
    )
    mesh = build(
        new(name("torch.distributed.device_mesh", "DeviceMesh")),
        dict_(_layout=layout, _flatten_rank_map=ranks, _rank=b"K\x00"),
    )
    meta = call(
        name(f"{DTENSOR}._dtensor_spec", "TensorMeta"),
        tuple_(b"K\x04"),
        tuple_(b"K\x01"),
        name("torch", "float32"),
    )
    fields = {"mesh": mesh, "placements": tuple_(placement), "tensor_meta": meta, **spec}
    state = dict_(
        _local_tensor=tensor(),
        _spec=build(new(name(f"{DTENSOR}._dtensor_spec", "DTensorSpec")), dict_(**fields)),
    )
    return build(new(name(DTENSOR, "DTensor")), state)
