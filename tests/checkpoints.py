"""Small makers of checkpoints, good ones and damaged ones."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rank_files
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

DATA = Path(__file__).parent / "data"

# (offsets, sizes, rank that the metadata name)
Part = tuple[tuple[int, ...], tuple[int, ...], int]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of merges flush their files to disk."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def copy_stored(name: str, folder: Path) -> None:
    """Copy a stored checkpoint, without its expected result."""
    shutil.copytree(DATA / name, folder, ignore=shutil.ignore_patterns("expected.safetensors"))


def rank_file(folder: Path, rank: int, world_size: int = 4) -> Path:
    """The path of a rank file."""
    return folder / f"model_world_size_{world_size}_rank_{rank}.pt"


def save_plain(folder: Path, states: Sequence[object], *, legacy: bool = False) -> None:
    """Save one object per rank with torch.save."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(
            state,
            rank_file(folder, rank, len(states)),
            _use_new_zipfile_serialization=not legacy,
        )


def save_many(folder: Path, *, tensors: int, numel: int, world_size: int = 2) -> int:
    """Save plain tensors of `numel` floats on every rank; returns the bytes of the result."""
    state = {f"layers.{i}.weight": torch.full((numel,), float(i)) for i in range(tensors)}
    save_plain(folder, [state] * world_size)
    return 4 * tensors * numel


def sharded(
    full: torch.Tensor, placements: Sequence[Placement] = (Shard(0),), sizes: Sequence[int] = (4,)
) -> DTensor:
    """The current rank's DTensor on a mesh of the whole job."""
    return rank_files.dtensor(full, init_device_mesh("cpu", tuple(sizes)), placements)


def reshaped(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """The same DTensor around another local shard, whatever its shape."""
    tensor._local_tensor = local
    return tensor


def sharded_tensor(
    full: torch.Tensor, listed: Sequence[Part], held: Sequence[Part] | None = None
) -> ShardedTensor:
    """The current rank's ShardedTensor, whether or not it makes sense.

    Args:
        full: the global tensor.
        listed: the shards that the metadata list.
        held: the shards whose data the rank has; those that are listed for it if not given.
    """
    rank = dist.get_rank()
    columns = full.shape[1:]
    rows = full.shape[0] // dist.get_world_size()
    metadata = ShardedTensorMetadata(
        [
            _shard_metadata(((rows * r, 0), (rows, *columns), r))
            for r in range(dist.get_world_size())
        ],
        full.size(),
        TensorProperties(dtype=full.dtype),
    )
    local = LocalShard(
        full[rows * rank : rows * (rank + 1)].clone(), metadata.shards_metadata[rank]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            [local], metadata, process_group=dist.group.WORLD
        )
    # torch refuses to make what does not tile, so that comes afterwards.
    tensor._metadata.shards_metadata = [_shard_metadata(part) for part in listed]
    if held is None:
        held = [part for part in listed if part[2] == rank]
    tensor._local_shards = []
    for offsets, sizes, owner in held:
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        data = full[index] if full[index].shape == sizes else full.new_zeros(sizes)
        tensor._local_shards.append(
            LocalShard(data.clone(), _shard_metadata((offsets, sizes, owner)))
        )
    return tensor


def _shard_metadata(part: Part) -> ShardMetadata:
    offsets, sizes, rank = part
    return ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")


def save_ranks(
    folder: Path, build: Callable[[int], Mapping[str, object]], *, world_size: int = 4
) -> None:
    """Save what `build(rank)` returns, called while torch takes this process for that rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        rank_files.save_rank_files(folder, world_size, lambda rank: dict(build(rank)))


# --- damage ---------------------------------------------------------------------------------------


def cut(path: Path, nbytes: int) -> None:
    """Keep the first bytes of a file; as many less from its end if negative."""
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)


@contextmanager
def members(path: Path, compression: int = zipfile.ZIP_STORED) -> Iterator[dict[str, bytes]]:
    """The members of a zip archive, written back when the block ends.

    Names are without the root folder. The padding that torch adds gets lost.
    """
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        found = {name.removeprefix(f"{root}/"): archive.read(name) for name in archive.namelist()}
    yield found
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in found.items():
            archive.writestr(f"{root}/{name}", data)


def member_range(path: Path, name: str) -> tuple[int, int]:
    """Where in the file the stored bytes of a member begin and end."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.split("/", 1)[1] == name)
    with path.open("rb") as stream:
        stream.seek(info.header_offset + 26)
        name_size, extra_size = struct.unpack("<2H", stream.read(4))
    start = info.header_offset + 30 + name_size + extra_size
    return start, start + info.file_size


def poke(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file, without a change of its length or time."""
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def calling(function: Callable[..., Any], *arguments: object) -> object:
    """An object whose pickle asks to call a function with arguments."""

    class Call:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
            return function, arguments

    return Call()


def replace_pickle(path: Path, data: bytes) -> None:
    """Put another pickle into a zip rank file; its storages stay."""
    with members(path) as found:
        found["data.pkl"] = data


# --- looking --------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder: kind and mode, for files also times and a hash of the contents."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        entry: tuple[object, ...] = (oct(status.st_mode),)
        if path.is_symlink():
            entry += (os.readlink(path),)
        elif path.is_file():
            entry += (status.st_mtime_ns, status.st_ino, digest(path))
        found[str(path.relative_to(folder))] = entry
    return found


def digest(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def save_side_files(source: Path) -> None:
    """Put side files, one in a folder of its own, beside rank files."""
    (source / "huggingface" / "tokenizer").mkdir(parents=True)
    (source / "huggingface" / "config.json").write_text("{}")
    (source / "huggingface" / "tokenizer" / "vocab.txt").write_text("a\n")
