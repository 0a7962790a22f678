"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read into columns.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata`` (torch 2.4 to 2.14), which
lists the chunks of each tensor and, for each chunk, the file, offset and length of its bytes. A
chunk takes 150 bytes of it and would take a kilobyte as objects; there are 100,000 of them in a
checkpoint of 512 ranks and 200 tensors. So the pickle is read block by block, each chunk becomes a
row, and where it is stored is filled in as it is read.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streammerge.checkpoint import File, Members
from streammerge.dtypes import FROM_TORCH, NOT_IN_SAFETENSORS
from streammerge.entries import quoted
from streammerge.errors import (
    CorruptFileError,
    InconsistentRanksError,
    UnsupportedError,
    about,
)
from streammerge.formats.dcp_parts import KeyPath
from streammerge.pickle_machine import EndOfPickleError, Stream, damaged, run_stream
from streammerge.torchfile import opened
from streammerge.unpickler import Opaque, Record, allowed, brief, is_int, is_shape, look_up

_MAX_BYTES = 1 << 30  # of the pickle; that of 2 million chunks has 300 MB
# What its values may take, in cells of the pickle machine. A chunk takes a hundred of them, 150
# bytes of metadata and a thousand or more in its file; honest metadata stay below all three.
_MAX_CELLS = 192 << 20
_CELLS_WITHOUT_DATA = 16 << 20
_CELLS_WITHOUT_BYTES = 1 << 20
_DATA_BYTES_PER_CELL = 8
_BLOCK = 256 << 10
_NOWHERE = -1
_MAX_DEPTH = 64  # of nested dicts

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"

Ints = tuple[int, ...]


@dataclass(slots=True, eq=False)
class TensorInfo:
    """A tensor and its chunks, which are consecutive rows.

    Attributes:
        dtype: torch dtype name.
        shape: global shape.
        first, count: its rows.
        bounds: for each row its offsets, then its sizes; tensors that are cut alike share them.
    """

    dtype: str
    shape: Ints
    first: int
    count: int
    bounds: array[int]
    _rows: dict[Ints, int] | None = None  # by offsets, where indices do not tell

    @property
    def rows(self) -> range:
        """Its rows."""
        return range(self.first, self.first + self.count)

    def box(self, row: int) -> tuple[Ints, Ints]:
        """The offsets and sizes of a row."""
        ndim = len(self.shape)
        at = 2 * ndim * (row - self.first)
        return tuple(self.bounds[at : at + ndim]), tuple(self.bounds[at + ndim : at + 2 * ndim])

    def find_row(self, offsets: object) -> int | None:
        """The row of the chunk at some offsets."""
        if self._rows is None:
            boxes = [(self.box(row), row) for row in self.rows]
            # An empty chunk may start where a full one does; its bytes are of no interest.
            boxes.sort(key=lambda box: 0 not in box[0][1])
            self._rows = {offsets: row for (offsets, _), row in boxes}
        return self._rows.get(offsets) if is_shape(offsets) else None


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """What a ``.metadata`` file says.

    Attributes:
        tensors: by key, in the order of the file.
        objects: keys of what is no tensor.
        paths: key -> the keys of the nested dicts that it was made of, where the file says so.
        names: the files that it names.
        files: for each row (chunk), index into `names`; -1 where nothing says where it is.
        offsets, lengths: for each row, its bytes in that file.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    files: array[int] = field(default_factory=lambda: array("i"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))


def read_metadata(path: str, data_nbytes: int) -> tuple[File, Metadata]:
    """Read a ``.metadata`` file.

    Args:
        path: the file.
        data_nbytes: bytes of all files that it may speak of. The more there are, the more it may
            cost to read it.

    Raises:
        CorruptFileError: empty, cut short, damaged, or no such file.
        UnsafePickleError: a pickle outside the allow-list.
        UnsupportedError: larger than any is, or chunks that were compressed.
        InconsistentRanksError: chunks that are in two places.
    """
    with about(path), opened(path) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError("not a regular file")
        if status.st_size == 0:
            raise CorruptFileError("the file is empty (0 bytes)")
        if status.st_size > _MAX_BYTES:
            raise UnsupportedError(f"has {status.st_size:,} bytes, more than is read")
        cells = min(
            _MAX_CELLS,
            _CELLS_WITHOUT_DATA + data_nbytes // _DATA_BYTES_PER_CELL,
            _CELLS_WITHOUT_BYTES + status.st_size,
        )
        metadata = _Builder().run(lambda: _blocks(fd, status.st_size), cells)
    return File(path, status.st_size, status.st_mtime_ns, status.st_ino, Members()), metadata


def _blocks(fd: int, size: int) -> Iterator[bytes]:
    for at in range(0, size, _BLOCK):
        block = os.pread(fd, min(_BLOCK, size - at), at)
        yield block
        if len(block) < min(_BLOCK, size - at):
            return


class _Builder:
    """Fills the columns while the pickle is run."""

    def __init__(self) -> None:
        self._found = Metadata()
        self._numbers: dict[str, int] = {}  # of files
        # The chunks that no tensor has claimed yet: first row, bounds, dims.
        self._first = 0
        self._bounds = array("q")
        self._dims: set[int] = set()
        self._known: dict[int, array[int]] = {}  # bounds, by their hash

    def run(self, blocks: Callable[[], Iterator[bytes]], cells: int) -> Metadata:
        """Run the pickle, whose values may take this many cells; see `pickle_machine`."""
        stand_ins = self._stand_ins()

        def find_global(module: str, name: str) -> object:
            return look_up(stand_ins, module, name, ".metadata of torch")

        try:
            root = run_stream(Stream(blocks, self._take_item, cells), find_global)
        except EndOfPickleError as error:
            raise CorruptFileError(str(error)) from error
        if not isinstance(root, _Root):
            raise CorruptFileError(f"holds {brief(root)}, expected the metadata of a checkpoint")
        if root.state_dict_metadata != {}:  # all of it was taken
            raise CorruptFileError(f"its keys stand for {brief(root.state_dict_metadata)}")
        self._read_paths(root.planner_data)
        return self._found

    def _stand_ins(self) -> dict[tuple[str, str], object]:
        builder = self

        class Chunk(Record):
            """``ChunkStorageMetadata``: becomes the number of its row."""

            __slots__ = ()

            def set_state(self, state: object) -> Any:
                return builder.add_chunk(state)

        class Tensor(Record):
            """``TensorStorageMetadata``: becomes what is said of the tensor."""

            __slots__ = ()

            def set_state(self, state: object) -> Any:
                return builder.add_tensor(state)

        own = {
            "Metadata": _Root,
            "TensorStorageMetadata": Tensor,
            "BytesStorageMetadata": _Object,
            "ChunkStorageMetadata": Chunk,
            "TensorProperties": _Properties,
            "MetadataIndex": _Index,
            "StorageMeta": Opaque,
            "_MEM_FORMAT_ENCODING": _AS_IN_RANK_FILES[_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"],
        }
        return {
            **{(f"{_CHECKPOINT}.metadata", name): kind for name, kind in own.items()},
            (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _Place,
            (_SHARDED_TENSOR, "TensorProperties"): _Properties,
            **{
                (module, name): Opaque
                for module in ("pathlib", "pathlib._local")
                for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
            },
            **_AS_IN_RANK_FILES,
        }

    def add_chunk(self, state: object) -> int:
        """Add a row."""
        offsets, sizes = _values(state, "offsets", "sizes")
        if not is_shape(offsets) or not is_shape(sizes) or len(offsets) != len(sizes):
            raise damaged(f"a chunk of sizes {brief(sizes)} at {brief(offsets)}")
        self._bounds.extend(offsets)
        self._bounds.extend(sizes)
        found = self._found
        found.files.append(_NOWHERE)
        found.offsets.append(0)
        found.lengths.append(0)
        self._dims.add(len(offsets))
        return len(found.files) - 1

    def add_tensor(self, state: object) -> TensorInfo | _Problem:
        """Give a tensor the chunks that were added since the last one."""
        properties, size, chunks = _values(state, "properties", "size", "chunks")
        first, after = self._first, len(self._found.files)
        bounds, dims = self._bounds, self._dims
        self._first, self._bounds, self._dims = after, array("q"), set()
        dtype = properties.dtype if isinstance(properties, _Properties) else properties
        if not is_shape(size):
            return _Problem(f"its shape is {brief(size)}")
        if type(dtype) is not str:
            return _Problem(f"its dtype is {brief(dtype)}")
        if not isinstance(chunks, list) or chunks != list(range(first, after)):
            return _Problem("its chunks are not listed for it alone")
        if not dims <= {len(size)}:
            return _Problem(f"its shape is {brief(size)}, but its chunks have other dims")
        known = self._known.setdefault(hash(bounds.tobytes()), bounds)
        return TensorInfo(dtype, size, first, after - first, known if known == bounds else bounds)

    def _take_item(self, key: object, value: object) -> bool:
        """Take what the dicts of tensors and of places hold."""
        if isinstance(key, _Index):
            self._fill(key, value)
            return True
        if not isinstance(value, TensorInfo | _Object | _Problem):
            return False
        if not isinstance(key, str):
            raise damaged(f"a tensor of the name {brief(key)}")
        found = self._found
        if key in found.tensors or key in found.objects:
            raise CorruptFileError(f"key {quoted(key)} twice")
        if isinstance(value, _Problem):
            raise CorruptFileError(f"key {quoted(key)}: {value.text}")
        if isinstance(value, _Object):
            found.objects[key] = None
        else:
            found.tensors[key] = value
        return True

    def _fill(self, index: _Index, place: object) -> None:
        """Note where the chunk that an index stands for is stored."""
        tensor = self._found.tensors.get(index.fqn) if isinstance(index.fqn, str) else None
        if tensor is None:
            return  # an object
        with about(f"key {quoted(index.fqn)}"):
            self._fill_row(self._row_of(tensor, index), place)

    def _fill_row(self, row: int, place: object) -> None:
        if not isinstance(place, _Place):
            raise CorruptFileError(f"is stored at {brief(place)}")
        if place.transform_descriptors:
            raise UnsupportedError(
                f"was transformed by {brief(place.transform_descriptors)} when it was saved",
                hint="load it with the extensions that wrote it, and save it without",
            )
        name, offset, length = place.relative_path, place.offset, place.length
        if not isinstance(name, str) or not _is_plain(name):
            raise CorruptFileError(f"is stored in {brief(name)}, expected a plain file name")
        if not is_int(offset) or not is_int(length) or offset < 0 or length < 0:
            raise CorruptFileError(f"is stored at {brief(offset)} with {brief(length)} bytes")
        found = self._found
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(found.names)
            found.names.append(name)
        before = (found.files[row], found.offsets[row], found.lengths[row])
        if before[0] != _NOWHERE and before != (number, offset, length):
            raise InconsistentRanksError("a chunk of it is stored in two places")
        found.files[row], found.offsets[row], found.lengths[row] = number, offset, length

    def _row_of(self, tensor: TensorInfo, index: _Index) -> int:
        """The row of a chunk: where the index says, or by its offsets."""
        offset, hint = index.offset, index.index
        if offset is None and tensor.count == 1:
            return tensor.first
        if is_int(hint) and 0 <= hint < tensor.count:
            row = tensor.first + hint
            if tensor.box(row)[0] == offset:
                return row
        found = tensor.find_row(offset)
        if found is None:
            raise InconsistentRanksError(f"stores a chunk at {brief(offset)} that it does not list")
        return found

    def _read_paths(self, planner_data: object) -> None:
        """Keep the nested keys of those names that are made of them."""
        if not isinstance(planner_data, Mapping):
            return
        for name, path in planner_data.items():
            if isinstance(name, str) and isinstance(path, tuple) and len(path) <= _MAX_DEPTH:
                parts = tuple([p if isinstance(p, str) else brief(p) for p in path])
                if ".".join(parts) == name:
                    self._found.paths[name] = parts


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is wrong with a tensor whose key is not known yet."""

    text: str


class _Root(Record):
    """``Metadata``."""

    __slots__ = ("planner_data", "state_dict_metadata")


class _Object(Record):
    """``BytesStorageMetadata``: a pickled object."""

    __slots__ = ()


class _Index(Record):
    """``MetadataIndex``: a chunk of a tensor."""

    __slots__ = ("fqn", "index", "offset")


class _Place(Record):
    """``_StorageInfo``: where the bytes of a chunk are."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


class _Properties(Record):
    """``TensorProperties``, whose state is a tuple that begins with the dtype."""

    __slots__ = ("dtype",)

    def set_state(self, state: object) -> None:
        """Keep the dtype."""
        if isinstance(state, tuple) and state:
            self.dtype = state[0]
        else:
            Record.set_state(self, state)


_AS_IN_RANK_FILES = allowed(
    [
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"),
        ("__builtin__", "getattr"),
        ("builtins", "getattr"),
        *(("torch", name) for name in (*FROM_TORCH, *NOT_IN_SAFETENSORS)),
    ]
)


def _values(state: object, *names: str) -> list[object]:
    """Some entries of the state of an object."""
    if not isinstance(state, dict):
        raise damaged(f"an object with the state {brief(state)}")
    return [state.get(name) for name in names]


def _is_plain(name: str) -> bool:
    """Whether a file name stays in its directory, and an error message on its line."""
    if name in {"", ".", ".."} or len(name) > 255 or not name.isprintable():
        return False
    return "/" not in name and "\\" not in name
