"""Reading the weights of a Hugging Face directory, compared with safetensors and transformers."""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_same_tensors, load_directory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    SourceChangedError,
    SourceError,
    StreamMergeError,
    UnsupportedError,
    UsageError,
)
from streammerge.bands import bands
from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.dtypes import FROM_TORCH, TO_TORCH
from streammerge.evaluate import band_numel, buffer_nbytes, evaluate
from streammerge.formats.safetensors_files import FILES, Entry, describe, matches, read_file
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.values import Stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=100)


# --- makers and readers ---


def raw_file(header: object, data: bytes = b"") -> bytes:
    """A safetensors file of a header, as JSON or as text, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def info(dtype: str = "U8", shape: Sequence[int] = (4,), begin: int = 0, end: int = 4) -> object:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shards(directory: Path, contents: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    """Write files and their index; returns the weight map."""
    for filename, tensors in contents.items():
        save_file(dict(tensors), directory / filename)
    weight_map = {name: filename for filename, names in contents.items() for name in names}
    write_index(directory, weight_map)
    return weight_map


def two_shards(directory: Path) -> dict[str, str]:
    return shards(
        directory,
        {
            "model-00001-of-00002.safetensors": {"a": torch.arange(3), "b": torch.ones(2, 2)},
            "model-00002-of-00002.safetensors": {"c": torch.zeros(5)},
        },
    )


def values(checkpoint: Checkpoint, buffer_size: int = 64) -> dict[str, torch.Tensor]:
    """All tensors, read as the writer reads them, in bands of a few elements."""
    opened = Sources(checkpoint.files)
    try:
        return {t.name: value(t, opened, buffer_size) for t in checkpoint.tensors}
    finally:
        opened.close()


def value(tensor: Tensor, opened: Sources, buffer_size: int) -> torch.Tensor:
    stored = Stored(tensor)
    numel = band_numel(stored, buffer_size)
    buffer = BandBuffer(buffer_nbytes(stored, numel))
    # In numbers of elements, so that the itemsize does not matter here.
    parts = [evaluate(stored, b, opened, buffer).tobytes() for b in bands(tensor.shape, 1, numel)]
    dtype = getattr(torch, TO_TORCH[tensor.dtype])
    data = bytearray(b"".join(parts))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(tensor.shape)


def error_of(directory: Path) -> StreamMergeError:
    """The error of a directory: one line, which names it."""
    with pytest.raises(SourceError) as caught:
        describe([str(directory)])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(directory))
    return caught.value


def error_of_file(directory: Path, content: bytes) -> StreamMergeError:
    """The error of a directory with only this file, which it names."""
    (directory / SINGLE).write_bytes(content)
    error = error_of(directory)
    assert str(error).startswith(f"{directory / SINGLE}: ")
    return error


# --- what is read ---

_NAMES = st.text(
    st.one_of(st.sampled_from('ab."\\\n\x7f/é'), st.characters(exclude_categories=["Cs"])),
    max_size=8,
).filter(lambda name: name != "__metadata__")


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of every dtype, empty ones and scalars among them."""
    tensors = {}
    for name in draw(st.lists(_NAMES, unique=True, min_size=1, max_size=6)):
        dtype = draw(st.sampled_from(tuple(FROM_TORCH)))
        fewest = 1 if dtype == "float4_e2m1fn_x2" else 0
        shape = draw(st.lists(st.integers(0, 5), min_size=fewest, max_size=3))
        nbytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        raw = torch.arange(nbytes).mul(37).add(len(tensors)) % (2 if dtype == "bool" else 256)
        tensors[name] = raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    return tensors


@given(state_dicts())
@fixed
def test_what_safetensors_writes(tensors: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_file(tensors, Path(directory, SINGLE))
        checkpoint = describe([directory])
        found = values(checkpoint)
        assert_same_tensors(found, tensors)
        assert_same_tensors(found, load_directory(Path(directory)))


@pytest.mark.parametrize("name", FROM_TORCH)
def test_each_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if name == "bool":
        raw %= 2
    tensors = {"w": raw.view(dtype).reshape(3, 2), "empty": raw[:0].view(dtype).reshape(0, 3)}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    checkpoint = describe([str(tmp_path)])
    assert {t.name: t.dtype for t in checkpoint.tensors} == dict.fromkeys(tensors, FROM_TORCH[name])
    assert_same_tensors(values(checkpoint), tensors)


def test_the_checkpoint(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    checkpoint = describe([str(tmp_path)])
    assert (checkpoint.root, checkpoint.assets) == (str(tmp_path), str(tmp_path))
    assert checkpoint.directories == (str(tmp_path),)
    assert (checkpoint.format, checkpoint.world_size) == ("Hugging Face safetensors", 1)
    assert checkpoint.skipped == ()
    filenames = sorted(set(weight_map.values()))
    assert [file.path for file in checkpoint.files] == [str(tmp_path / f) for f in filenames]
    for file in checkpoint.files:
        status = os.stat(file.path)
        expected = (status.st_size, status.st_mtime_ns, status.st_ino)
        assert (file.size, file.mtime_ns, file.inode) == expected
    for tensor in checkpoint.tensors:
        (chunk,) = tensor.chunks()
        assert chunk.replicas == (0,)
        assert (chunk.box.offsets, chunk.box.sizes) == ((0,) * len(tensor.shape), tensor.shape)
        assert tensor.layout.ranks == (0,)
        file = checkpoint.files[tensor.extents.files[0]]
        assert os.path.basename(file.path) == weight_map[tensor.name]
        member = tensor.extents.members[0]
        assert tensor.extents.starts[0] == 0
        assert file.members.header_offsets[member] == -1
        assert file.members.sizes[member] == tensor.nbytes
        assert file.members.crcs[member] == 0


def test_tensors_come_in_the_order_of_files_and_bytes(tmp_path: Path) -> None:
    header = {"x": info(begin=4, end=8), "y": info(shape=[0], begin=4), "z": info()}
    for filename in ("part_b.safetensors", "part_a.safetensors"):
        names = {f"{name}.{filename[5]}": value for name, value in header.items()}
        (tmp_path / filename).write_bytes(raw_file(names, bytes(8)))
    write_index(tmp_path, {"x.b": "part_b.safetensors", "x.a": "part_a.safetensors"})
    names = [tensor.name for tensor in describe([str(tmp_path)]).tensors]
    assert names == ["z.a", "y.a", "x.a", "z.b", "y.b", "x.b"]


def test_what_huggingface_hub_writes(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(7, 5) for i in range(9)}
    save_torch_state_dict(tensors, tmp_path, max_shard_size=300)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    checkpoint = describe([str(tmp_path)])
    assert_same_tensors(values(checkpoint), tensors)
    assert len(checkpoint.files) == len(list(tmp_path.glob("*.safetensors")))


def tiny_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("max_shard_size", ["50GB", "1KB"])
def test_what_transformers_writes(tmp_path: Path, max_shard_size: str) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "1KB")
    assert_same_tensors(values(describe([str(tmp_path)])), model.state_dict())


def test_a_file_written_over_afterwards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / SINGLE)
    checkpoint = describe([str(tmp_path)])
    save_file({"a": torch.ones(4)}, tmp_path / SINGLE)
    with pytest.raises(SourceChangedError):
        values(checkpoint)


def test_one_file(tmp_path: Path) -> None:
    """Of any name, such as that of an adapter."""
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(raw_file({"b": info("BF16", [2], 4, 8), "a": info()}, bytes(8)))
    file, entries = read_file(str(path))
    assert entries == [Entry("a", "U8", (4,), 0, 4), Entry("b", "BF16", (2,), 4, 8)]
    assert list(file.members.sizes) == [4, 4]
    assert [offset - file.members.data_offsets[0] for offset in file.members.data_offsets] == [0, 4]
    path.write_bytes(raw_file({}))
    assert read_file(str(path))[1] == []


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of huggingface_hub has links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.arange(3)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / SINGLE).symlink_to("../blobs/0123")
    found = values(describe([str(tmp_path / "snapshot")]))
    assert_same_tensors(found, {"a": torch.arange(3)})


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file larger than most memories; and nothing is mapped."""
    size = 1 << 38
    start = raw_file({"w": info(shape=[size], end=size)})
    with (tmp_path / SINGLE).open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
    pread, counts = os.pread, []

    def counted(fd: int, count: int, offset: int) -> bytes:
        assert offset + count <= len(start)
        counts.append(count)
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(mmap, "mmap", None)
    (tensor,) = describe([str(tmp_path)]).tensors
    assert tensor.nbytes == size
    assert counts


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_shards(tmp_path)
    expected = load_directory(tmp_path)
    pread, rng = os.pread, random.Random(0)
    monkeypatch.setattr(
        os, "pread", lambda fd, count, offset: pread(fd, rng.randint(1, min(count, 9)), offset)
    )
    checkpoint = describe([str(tmp_path)])
    monkeypatch.undo()
    assert_same_tensors(values(checkpoint), expected)


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / SINGLE)
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, count, offset: pread(fd, count, offset) if offset < 8 else b""
    )
    assert "ends at byte 8 while it is read" in str(error_of(tmp_path))


# --- which files ---


def test_matches(tmp_path: Path) -> None:
    assert f"{SINGLE} with config.json, or {INDEX}" == FILES
    assert not matches(str(tmp_path / "none"))
    assert not matches(str(tmp_path))
    for name in ("adapter_model.safetensors", "pytorch_model.bin", "a.safetensors", "config.json"):
        (tmp_path / name).touch()
    assert not matches(str(tmp_path))
    (tmp_path / INDEX).touch()
    assert matches(str(tmp_path))
    (tmp_path / INDEX).unlink()
    (tmp_path / SINGLE).mkdir()
    assert not matches(str(tmp_path))
    (tmp_path / SINGLE).rmdir()
    (tmp_path / SINGLE).touch()
    assert matches(str(tmp_path))
    (tmp_path / "config.json").unlink()
    assert not matches(str(tmp_path))


def test_loaders_go_by_file(tmp_path: Path) -> None:
    """Transformers takes what the index leaves out, if it is in one of its files; so do we."""
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    index = json.loads((tmp_path / INDEX).read_text())
    left_out = [name for name in index["weight_map"] if name.endswith("up_proj.weight")]
    assert left_out
    kept = {n: f for n, f in index["weight_map"].items() if n not in left_out}
    assert set(kept.values()) == set(index["weight_map"].values())
    (tmp_path / INDEX).write_text(json.dumps({**index, "weight_map": kept}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert_same_tensors(loaded, model.state_dict())
    assert_same_tensors(values(describe([str(tmp_path)])), loaded)


def test_files_outside_of_the_index_do_not_count(tmp_path: Path) -> None:
    two_shards(tmp_path)
    expected = load_directory(tmp_path)
    save_file({"v_head.summary.weight": torch.ones(1)}, tmp_path / "value_head.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"no")
    assert_same_tensors(values(describe([str(tmp_path)])), expected)


def test_an_index_of_the_single_file(tmp_path: Path) -> None:
    shards(tmp_path, {SINGLE: {"a": torch.arange(3)}})
    save_file({"v_head.summary.weight": torch.ones(1)}, tmp_path / "value_head.safetensors")
    assert [tensor.name for tensor in describe([str(tmp_path)]).tensors] == ["a"]


def test_a_single_file_beside_an_index(tmp_path: Path) -> None:
    """Transformers loads the single file, though the index may be the newer one."""
    two_shards(tmp_path)
    save_file({"a": torch.arange(4)}, tmp_path / SINGLE)
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "model.safetensors lies beside an index of other files" in str(error)
    assert "remove the stale one" in str(error.hint)
    weight_map = {"a": SINGLE, "c": "model-00002-of-00002.safetensors"}
    write_index(tmp_path, weight_map)
    assert isinstance(error_of(tmp_path), UnsupportedError)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "remove the stale one" in str(error_of(tmp_path).hint)


def test_missing_files(tmp_path: Path) -> None:
    contents = {f"part_{i}": {f"w{i}": torch.ones(1)} for i in range(9)}
    shards(tmp_path, contents)
    (tmp_path / "part_3").unlink()
    error = error_of(tmp_path)
    assert isinstance(error, CheckpointNotFoundError)
    assert f"{INDEX}: 1 of the 9 files that it lists are missing: 'part_3'" in str(error)
    for i in (1, 2, 4, 5, 6, 7, 8):
        (tmp_path / f"part_{i}").unlink()
    (tmp_path / "part_8").symlink_to("part_7")
    message = str(error_of(tmp_path))
    assert "8 of the 9 files" in message
    assert message.endswith("'part_1', 'part_2', 'part_3', 'part_4', 'part_5' and 3 more")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_key_that_is_not_where_the_index_says(tmp_path: Path, elsewhere: bool) -> None:
    weight_map = two_shards(tmp_path)
    if elsewhere:
        weight_map["a"] = weight_map["c"]
    else:
        weight_map["gone"] = weight_map["c"]
    write_index(tmp_path, weight_map)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptFileError)
    assert f"{INDEX}: 1 of {len(weight_map)} keys are not in the file" in str(error)
    assert str(error).endswith("'a'" if elsewhere else "'gone'")


def test_a_key_in_two_files(tmp_path: Path) -> None:
    shards(tmp_path, {"one": {"a": torch.ones(1)}, "two": {"a": torch.ones(1)}})
    write_index(tmp_path, {"a": "one", "b": "two"})
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "key 'a' is both in one and in two" in str(error)


@pytest.mark.parametrize(
    "filename",
    [
        "",
        ".",
        "..",
        "../model",
        "/etc/passwd",
        "sub/model",
        "sub\\model",
        "a\0",
        "a\nb",
        "sub/",
        3,
        None,
    ],
)
def test_file_names_stay_in_the_directory(tmp_path: Path, filename: object) -> None:
    (tmp_path / "sub").mkdir()
    for place in (tmp_path / "model", tmp_path / "sub" / "model", tmp_path / "sub\\model"):
        save_file({"a": torch.ones(1)}, place)
    directory = tmp_path / "sub" if filename == "../model" else tmp_path
    write_index(directory, {"a": filename})
    error = error_of(directory)
    assert isinstance(error, CorruptFileError)
    assert "as the file of key 'a', expected a plain file name" in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"{", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "its weight_map is None"),
        (b'{"weight_map": []}', "its weight_map is []"),
        (b'{"weight_map": {}}', "its weight_map is {}"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' twice"),
        (b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "x"}}', "holds NaN"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
    ],
)
def test_damaged_indexes(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / INDEX).write_bytes(content)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"{tmp_path / INDEX}: ")
    assert message in str(error)


def test_an_index_that_is_no_index(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as stream:
        stream.truncate(1 << 40)
    assert "too long for an index" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        ([], None),
        (["config.json"], None),
        (["adapter_config.json", "adapter_model.safetensors"], "this is a LoRA adapter"),
        (["model-00001-of-00002.safetensors"], "'model-00001-of-00002.safetensors'"),
        (["weights.safetensors", "pytorch_model.bin"], "'weights.safetensors'"),
        (["pytorch_model.bin"], "converted to safetensors"),
    ],
)
def test_nothing_there(tmp_path: Path, names: list[str], hint: str | None) -> None:
    for name in names:
        save_file({"a": torch.ones(1)}, tmp_path / name)
    error = error_of(tmp_path)
    assert isinstance(error, CheckpointNotFoundError)
    assert f"no weights here (looked for {SINGLE} or {INDEX})" in str(error)
    assert error.hint is None if hint is None else hint in str(error.hint)


def test_no_directory(tmp_path: Path) -> None:
    error = error_of(tmp_path / "none")
    assert isinstance(error, CheckpointNotFoundError)
    assert "no such directory" in str(error)
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    assert "not a directory" in str(error_of(tmp_path / SINGLE))


def test_one_directory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({name: torch.ones(1)}, tmp_path / name / SINGLE)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with pytest.raises(UsageError, match="not 2"):
        describe([one, two])
    assert [tensor.name for tensor in describe([one, one]).tensors] == ["one"]


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)

    def refuse(path: str, *_: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    assert str(error_of(tmp_path)) == f"{tmp_path / SINGLE}: Permission denied"


# --- damaged files ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty (0 bytes)"),
        (b"1234567", "cut short: has 7 bytes, needs 8 and more"),
        (struct.pack("<Q", 100), "cut short: has 8 bytes, needs 108 for its header alone"),
        (struct.pack("<Q", 100_000_001) + b"{}", "a header of 100,000,001 bytes"),
        (b"PK\3\4" + bytes(100), "no safetensors file: byte 8 is not the '{'"),
        (raw_file(b" {}"), "no safetensors file: byte 8 is not the '{'"),
        (b"<!DOCTYPE html><html></html>", "no safetensors file"),
        (raw_file(b""), "not JSON"),
        (raw_file(b"{}\0"), "not JSON"),
        (raw_file(b'{"\xff": 1}'), "not JSON"),
        (raw_file(b"\xef\xbb\xbf{}"), "no safetensors file: byte 8 is not the '{'"),
        (raw_file(b'{"a": ' * 50_000), "not JSON"),
        (raw_file([]), "no safetensors file: byte 8 is not the '{'"),
        (raw_file(b'{"a": NaN}'), "holds NaN"),
        (raw_file(b'{"\\ud800": {}}'), r"holds '\ud800', which is not Unicode text"),
        (raw_file({"__metadata__": {"a": "\ud800"}}), r"holds '\ud800', which is not Unicode text"),
        (raw_file({"__metadata__": {"a": 1}}), "its __metadata__ is {'a': 1}"),
        (raw_file({"__metadata__": None}), "its __metadata__ is None"),
        (raw_file(b'{"a": {}, "a": {}}'), "key 'a' twice"),
        (raw_file(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "key 'dtype' twice"),
        (raw_file({"a": 1}), "key 'a': 1, expected dtype, shape and data_offsets"),
        (raw_file({"a": {"dtype": "U8", "shape": []}}), "expected dtype, shape and data_offsets"),
        (raw_file({"a": {**info(), "strides": [1]}}, bytes(4)), "expected dtype, shape and"),
        (raw_file({"a": info("U7")}, bytes(4)), "key 'a': unknown dtype 'U7'"),
        (raw_file({"a": info(8)}, bytes(4)), "key 'a': dtype 8, expected a string"),
        (raw_file({"a": info(shape=[4.0])}, bytes(4)), "shape [4.0], expected a list of integers"),
        (raw_file({"a": info(shape=[True])}, bytes(4)), "shape [True], expected"),
        (raw_file({"a": info(shape=[-4])}, bytes(4)), "holds the number -4"),
        (raw_file({"a": info(shape=[10**19])}, bytes(4)), "holds the number 10000000000000000000"),
        (raw_file({"a": info(shape=[1 << 63, 0], end=0)}), "too many elements"),
        (raw_file({"a": info(shape=[0, 1 << 63], end=0)}), "too many elements"),
        (raw_file({"a": info(shape=[1 << 32, 1 << 31, 0], end=0)}), "too many elements"),
        (raw_file({"a": {**info(), "data_offsets": 4}}, bytes(4)), "data_offsets 4, expected two"),
        (raw_file({"a": {**info(), "data_offsets": [0]}}, bytes(4)), "data_offsets [0], expected"),
        (raw_file({"a": info(end=3)}, bytes(3)), "takes 4 bytes, but data_offsets are [0, 3]"),
        (raw_file({"a": info(begin=4, end=0)}, bytes(4)), "takes 4 bytes, but data_offsets are"),
        (raw_file({"a": info("BF16")}, bytes(4)), "BF16 [4] takes 8 bytes"),
        (raw_file({"a": info(begin=1, end=5)}, bytes(5)), "its data start at 1, the data before"),
        (
            raw_file({"a": info(), "b": info(begin=5, end=9)}, bytes(9)),
            "key 'b': its data start at 5, the data before end at 4",
        ),
        (
            raw_file({"a": info(), "b": info(begin=3, end=7)}, bytes(7)),
            "key 'b': its data start at 3, the data before end at 4",
        ),
        (raw_file({"a": info(), "b": info()}, bytes(4)), "key 'b': its data start at 0"),
        (raw_file({"a": info("F4", [3], 0, 2)}, bytes(2)), "torch holds 2 in an element"),
        (raw_file({"a": info("F4", [], 0, 1)}, bytes(1)), "torch holds 2 in an element"),
        (raw_file({}), "hold no tensors"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    error = error_of(tmp_path)
    assert message in str(error)
    kinds = ("unknown dtype", "torch holds", "no tensors")
    expected = UnsupportedError if any(kind in message for kind in kinds) else CorruptFileError
    assert type(error) is expected


@pytest.mark.parametrize("change", [-1, -4, 1, 10_000])
def test_files_that_do_not_end_where_the_data_do(tmp_path: Path, change: int) -> None:
    save_file({"a": torch.ones(7)}, tmp_path / SINGLE)
    size = (tmp_path / SINGLE).stat().st_size
    os.truncate(tmp_path / SINGLE, size + change)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptFileError)
    if change < 0:
        assert f"cut short: has {size + change:,} bytes, needs {size:,}" in str(error)
    else:
        assert f"has {size + change:,} bytes, but its header describes {size:,}" in str(error)


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / SINGLE).write_bytes(pointer)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptFileError)
    assert "a pointer of Git LFS" in str(error)
    assert "git lfs pull" in str(error.hint)


def test_messages_stay_short(tmp_path: Path) -> None:
    name = "line\nbreak" * 100_000
    (tmp_path / SINGLE).write_bytes(raw_file({name: info("U7")}, bytes(4)))
    error = error_of(tmp_path)
    assert len(str(error)) < len(str(tmp_path)) + 500
    (tmp_path / SINGLE).write_bytes(raw_file({"a": info(shape=[0] * 100_000)}, bytes(4)))
    assert len(str(error_of(tmp_path))) < len(str(tmp_path)) + 500


# --- whatever the bytes ---


@contextmanager
def directory_of(content: bytes) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp())
    try:
        (directory / SINGLE).write_bytes(content)
        yield directory
    finally:
        shutil.rmtree(directory)


def by_library(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """What safetensors reads; None if it refuses."""
    try:
        with safe_open(path, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    except (SafetensorError, OverflowError):
        return None


def by_us(path: Path) -> dict[str, tuple[str, list[int]]] | str:
    """What we read, or the message if we refuse."""
    try:
        checkpoint = describe([str(path.parent)])
    except SourceError as error:
        return str(error)
    found = {t.name: (t.dtype, list(t.shape)) for t in checkpoint.tensors}
    for dtype, shape in found.values():
        if dtype == "F4":
            shape[-1] *= 2  # torch packs two values
    return found


# What safetensors lets pass, by our messages.
STRICTER = (
    "twice",
    "expected dtype, shape and data_offsets",
    "unknown dtype 'F6",
    "torch holds 2",
    "hold no tensors",
    "__metadata__ is None",
    "too many elements",
    "byte 8 is not the '{'",
)


def compare(content: bytes) -> str:
    """Both read the same or refuse, or we refuse what we say to refuse."""
    with directory_of(content) as directory:
        expected = by_library(directory / SINGLE)
        found = by_us(directory / SINGLE)
    if not isinstance(found, str):
        assert found == expected
        return "the same"
    assert "\n" not in found
    if expected is None:
        return "both refuse"
    assert any(reason in found for reason in STRICTER), found
    return "we refuse"


NUMBERS = ["-0", "-1", "1.0", "4e0", "04", "true", "null", '"4"', "NaN", "[4]", "{}"]
NUMBERS += ["9223372036854775807", "9223372036854775808", "18446744073709551616", "9" * 5_000]
STRINGS = ["F6_E2M3", "F4", "f32", "", "C64", "F8_E8M0", "BOOL", "\\u0055\\u0038", "\\ud800", "é"]
SHAPES = ["[]", "[0]", "[4,0,-0]", "[9223372036854775808,0]", "[4294967296,2147483648,0]"]
VALUES = [*NUMBERS, *(f'"{s}"' for s in STRINGS), *SHAPES, "[0,4]", "[4,0]", "[0,4,4]"]
LENGTHS = [0, 1, 7, 100, 100_000_000, 100_000_001, (1 << 63) - 8, (1 << 64) - 1]

# A key of a header and what it says, as pairs of JSON texts.
Line = tuple[str, list[tuple[str, str]]]


@st.composite
def headers(draw: st.DrawFn, fewest: int = 0) -> tuple[list[Line], int]:
    """The keys of a valid header, and the bytes of data that it describes."""
    lines: list[Line] = []
    end = 0
    for name in draw(st.lists(st.sampled_from("abcdé"), unique=True, min_size=fewest, max_size=4)):
        dtype, itemsize = draw(st.sampled_from([("U8", 1), ("BF16", 2), ("F32", 4), ("C64", 8)]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        begin, end = end, end + itemsize * torch.Size(shape).numel()
        fields = [
            ('"dtype"', f'"{dtype}"'),
            ('"shape"', json.dumps(shape)),
            ('"data_offsets"', json.dumps([begin, end])),
        ]
        lines.append((f'"{name}"', draw(st.permutations(fields))))
    if draw(st.booleans()):
        lines.append(('"__metadata__"', [('"format"', '"pt"')]))
    return draw(st.permutations(lines)), end


def spell(draw: st.DrawFn, lines: Sequence[Line]) -> bytes:
    """A header with spaces in places where JSON allows them."""
    space = draw(st.sampled_from(["", " ", "\n\t"]))

    def object_of(pairs: Sequence[tuple[str, str]]) -> str:
        return "{" + f"{space},".join(f"{k}{space}:{space}{v}" for k, v in pairs) + space + "}"

    return (object_of([(name, object_of(pairs)) for name, pairs in lines]) + space).encode()


@st.composite
def valid_files(draw: st.DrawFn) -> bytes:
    lines, end = draw(headers())
    return raw_file(spell(draw, lines), bytes(end))


@st.composite
def odd_files(draw: st.DrawFn) -> bytes:
    """Files that are valid but for one value, a key too many, a few bytes, or their length."""
    lines, end = draw(headers(fewest=1))
    kind = draw(st.sampled_from(["value", "key", "line", "bytes", "length", "data"]))
    where = draw(st.integers(0, len(lines) - 1))
    name, pairs = lines[where]
    at = draw(st.integers(0, len(pairs) - 1))
    if kind == "value":
        pairs[at] = (pairs[at][0], draw(st.sampled_from(VALUES)))
    if kind == "key":
        key = draw(st.sampled_from(['"x"', '"\\ud800"', pairs[at][0]]))
        pairs.insert(at, (key, draw(st.sampled_from(["4", '"U8"', "[4]", "null"]))))
    if kind == "line":
        other = draw(st.sampled_from([name, '"__metadata__"', '"x"', '"\\u0061"']))
        lines.append((other, pairs))
    content = bytearray(raw_file(spell(draw, lines), bytes(end)))
    if kind == "bytes":
        for _ in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, len(content)))
            content[first : first + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    if kind == "length":
        content[:8] = struct.pack("<Q", draw(st.sampled_from(LENGTHS)))
    if kind == "data":
        content += bytes(draw(st.integers(1, 9)))
        content = content[: len(content) - draw(st.integers(0, 18))]
    return bytes(content)


@given(valid_files())
@fixed
def test_what_the_library_reads(content: bytes) -> None:
    result = compare(content)
    assert result == "the same" or b'"dtype"' not in content


def test_odd_files() -> None:
    seen: Counter[str] = Counter()

    @settings(fixed, max_examples=600)
    @given(odd_files())
    def check(content: bytes) -> None:
        seen[compare(content)] += 1

    check()
    assert min(seen["the same"], seen["both refuse"], seen["we refuse"]) >= 15, seen


@given(st.binary(max_size=200))
@fixed
def test_any_bytes(content: bytes) -> None:
    compare(content)
    compare(raw_file(content))
