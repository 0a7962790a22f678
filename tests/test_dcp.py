"""Checkpoints of torch.distributed.checkpoint, written by four gloo ranks in ``dcp_job.py``.

Expected values are torch's own: what FSDP and DTensor gather, and what `dcp_to_torch_save` reads.
"""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import run_job
from oracles import assert_same_tensors, load_directory, raw_bits
from safetensors.torch import load_file, save_file
from strategies import fixed
from test_memory import LIMIT, MIB, run_child
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import streammerge
from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    StreamMergeError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from streammerge.bands import Band
from streammerge.checkpoint import Checkpoint
from streammerge.cli import main
from streammerge.formats import dcp, dcp_metadata, dcp_safetensors
from streammerge.planner import fingerprint
from streammerge.reader import BandBuffer, read_stored
from streammerge.sources import Sources
from streammerge.values import Stored

DATA = Path(__file__).parent / "data"
CASES = (
    "accelerate",
    "app",
    "columns",
    "file_per_chunk",
    "fsdp1_flat",
    "fsdp1_mesh",
    "fsdp1_orig",
    "fsdp2",
    "hf",
    "hf_files",
    "hsdp",
    "mesh_3d",
    "odd",
    "one_tensor",
    "one_tensor_top",
    "threads",
    "torchtitan",
    "tp",
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with one checkpoint per case."""
    root = tmp_path_factory.mktemp("dcp")
    run_job("dcp_job.py", root)
    return root


def folder_of(root: Path) -> Path:
    """The folder of the weights in a case."""
    found = [path.parent for path in sorted(root.rglob(".metadata"))]
    return next(path for path in found if not path.name.startswith("optimizer"))


def values(checkpoint: Checkpoint) -> dict[str, bytes]:
    """All bytes of all tensors, by our reader."""
    sources = Sources(checkpoint.files)
    found = {}
    try:
        for tensor in checkpoint.tensors:
            band = Band((0,) * len(tensor.shape), tensor.shape)
            data = read_stored(Stored(tensor), band, sources, BandBuffer(2 * tensor.nbytes + 64))
            found[tensor.name] = bytes(data)
    finally:
        sources.close()
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bits(t.resolve_conj()).numpy().tobytes() for name, t in tensors.items()}


# --- what real jobs write ---


@pytest.mark.parametrize("budget", [(), ("--memory", "16KiB", "--max-shard-size", "2KB")])
@pytest.mark.parametrize("case", CASES)
def test_merges_to_the_values_of_torch(
    checkpoints: Path, tmp_path: Path, case: str, budget: Sequence[str]
) -> None:
    target = tmp_path / "merged"
    arguments = ["merge", str(checkpoints / case), str(target), "--raw", "--quiet", *budget]
    assert main(arguments) == 0
    expected = load_file(checkpoints / f"{case}.reference.safetensors")
    assert_same_tensors(load_directory(target), expected)


@pytest.mark.parametrize("case", ["app", "fsdp1_orig", "fsdp2", "mesh_3d", "odd", "torchtitan"])
def test_holds_what_torch_itself_reads(checkpoints: Path, tmp_path: Path, case: str) -> None:
    folder = folder_of(checkpoints / case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(folder), str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    state = whole.get("app", whole)
    state = state.get("model", state)
    checkpoint = streammerge.describe(folder)
    expected = bits({name: state[name] for name in (t.name for t in checkpoint.tensors)})
    assert values(checkpoint) == expected
    tensors = {name for name, value in state.items() if torch.is_tensor(value)}
    assert {tensor.name for tensor in checkpoint.tensors} == tensors


def test_tensors_are_in_the_order_of_the_state_dict(checkpoints: Path) -> None:
    buffers = ["scale", "tokens_seen", "table", "bytes", "mask", "inv_freq"]
    for case in ("fsdp2", "torchtitan"):
        names = [tensor.name for tensor in streammerge.describe(checkpoints / case).tensors]
        assert names[:8] == [*buffers, "emb.weight", "block.norm.weight"]
        assert names[-2:] == ["head.weight", "head.bias"]


def test_says_what_it_is(checkpoints: Path) -> None:
    checkpoint = streammerge.describe(checkpoints / "fsdp2")
    assert checkpoint.format == "torch.distributed.checkpoint"
    assert checkpoint.world_size == 4
    assert str(next(t for t in checkpoint.tensors if t.name == "emb.weight").layout) == "4 chunks"
    checkpoint = streammerge.describe(checkpoints / "hf_files")
    assert checkpoint.format == "torch.distributed.checkpoint, safetensors, 4 shards"
    assert checkpoint.world_size == 4


def test_tensors_that_are_cut_alike_share_a_layout(checkpoints: Path) -> None:
    tensors = {t.name: t for t in streammerge.describe(checkpoints / "fsdp2").tensors}
    assert tensors["block.norm.weight"].layout is tensors["block.norm.bias"].layout
    assert tensors["block.norm.weight"].layout is not tensors["block.up.bias"].layout


# --- which part is the model ---


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("fsdp2", {"optimizer.*", "lr_scheduler.*", "step"}),
        ("torchtitan", {"optimizer.*", "dataloader.*", "train_state.*"}),
        ("app", {"app.optimizers.*", "app.progress.*"}),
        ("accelerate", set()),
    ],
)
def test_takes_the_model_and_says_what_is_left(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], case: str, left: set[str]
) -> None:
    checkpoint = streammerge.describe(checkpoints / case)
    assert {entry.name for entry in checkpoint.skipped} == left
    assert main(["inspect", str(checkpoints / case)]) == 0
    shown = capsys.readouterr().out
    assert all(f"skipped: {name} (" in shown for name in left)


def test_names_the_objects_inside_a_model(checkpoints: Path) -> None:
    skipped = streammerge.describe(checkpoints / "odd").skipped
    assert [(entry.name, entry.kind) for entry in skipped] == [
        ("model._extra_state.not", "a pickled object")
    ]


@pytest.mark.parametrize("prefix", ["optimizer", "optimizer.", "optimizer.state"])
def test_a_prefix_chooses_another_part(checkpoints: Path, prefix: str) -> None:
    folder = folder_of(checkpoints / "fsdp2")
    checkpoint = streammerge.describe(folder, prefix=prefix)
    start = prefix.strip(".") + "."
    expected = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata
    names = [
        key.removeprefix(start)
        for key, value in expected.items()
        if key.startswith(start) and isinstance(value, TensorStorageMetadata)
    ]
    assert sorted(tensor.name for tensor in checkpoint.tensors) == sorted(names) != []
    assert "model.*" in {entry.name for entry in checkpoint.skipped}


def test_the_top_level_is_a_part_too(checkpoints: Path) -> None:
    by_default = streammerge.describe(checkpoints / "torchtitan")
    chosen = streammerge.describe(checkpoints / "torchtitan", prefix="")
    assert [t.name for t in chosen.tensors] == [t.name for t in by_default.tensors]


def test_a_prefix_of_nothing_is_refused_with_those_there_are(checkpoints: Path) -> None:
    with pytest.raises(UsageError) as caught:
        streammerge.describe(checkpoints / "app", prefix="model")
    message = str(caught.value)
    assert "no tensor is in 'model'" in message
    assert "'app.model' (18 tensors)" in message
    assert "'app.optimizers' (" in message


def test_other_layouts_take_no_prefix() -> None:
    with pytest.raises(UsageError, match="nothing that fits --prefix"):
        streammerge.describe(DATA / "fsdp2_w1__t213", prefix="model")


# --- side files ---


def test_side_files_come_from_the_folder_above(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoints / "accelerate"
    target = tmp_path / "merged"
    folder = source / "checkpoint-20"
    assert main(["merge", str(source), str(target), "--dry-run"]) == 0
    assert f"side files from {folder}\n" in capsys.readouterr().out
    assert main(["merge", str(source), str(target)]) == 0
    assert f"side files from {folder}\n" in capsys.readouterr().out
    names = sorted(path.name for path in target.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert main(["inspect", str(source)]) == 0
    assert f"side files: {folder}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (("W/config.json", "W/huggingface/config.json", "config.json"), "W"),
        (("W/huggingface/config.json", "config.json", "huggingface/config.json"), "W/huggingface"),
        (("config.json", "huggingface/config.json"), "."),
        (("huggingface/config.json", "tokenizer.json"), "huggingface"),
        (("huggingface/tokenizer.json", "tokenizer.json"), "huggingface"),
        (("tokenizer.json",), None),
        ((), None),
    ],
)
def test_which_folder_side_files_come_from(
    tmp_path: Path, there: Sequence[str], expected: str | None
) -> None:
    folder = tmp_path / "run" / "W"
    shutil.copytree(DATA / "dcp_model__t213" / "checkpoint", folder)
    for name in there:
        path = folder.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    found = streammerge.describe(folder).assets
    assert found == (None if expected is None else os.path.normpath(folder.parent / expected))


def test_of_a_folder_of_the_training_only_what_belongs_to_a_model_is_copied(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "dcp_model__t213" / "checkpoint", run / "weights")
    copied = {"config.json": "{}", "modeling_x.py": "", "additional_chat_templates/a.jinja": ""}
    left = {"train.log": "", "args.json": "{}", "other/config.json": "{}", "model.safetensors": ""}
    for name, text in {**copied, **left}.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    target = run / "merged"  # beside the weights, as people have it

    assert main(["merge", str(run / "weights"), str(target), "--raw", "--quiet"]) == 0

    found = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert found == {*copied, "model.safetensors"}
    for name, text in copied.items():
        assert (target / name).read_text() == text


# --- files that are missing or damaged ---


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of a stored checkpoint."""
    return Path(shutil.copytree(DATA / "dcp_model__t213" / "checkpoint", tmp_path / "source"))


def refuse(folder: Path | Sequence[Path], kind: type[StreamMergeError], *parts: str) -> str:
    """The line and the hint of an error that has all these parts."""
    paths = [folder] if isinstance(folder, Path) else list(folder)
    with pytest.raises(StreamMergeError) as caught:
        streammerge.describe(paths)
    text = str(caught.value)
    assert type(caught.value) is kind, text
    assert "\n" not in text
    assert all(part in text for part in parts), text
    return f"{text} {caught.value.hint}"


def test_all_files_that_cannot_be_read_are_named(source: Path) -> None:
    (source / "__0_0.distcp").unlink()
    (source / "__2_0.distcp").write_bytes(b"")
    os.truncate(source / "__3_0.distcp", 5000)
    refuse(
        source,
        CorruptFileError,
        "3 of 4 files",
        "missing: __0_0.distcp;",
        f"empty (0 bytes): {source}/__2_0.distcp;",
        f"cut short: {source}/__3_0.distcp (has 5,000 bytes, needs 55,858)",
    )


def test_missing_files_may_be_on_other_nodes(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    expected = values(streammerge.describe(source))
    for rank in (1, 2):
        (source / f"__{rank}_0.distcp").rename(other / f"__{rank}_0.distcp")
    hint = refuse(source, CheckpointNotFoundError, "missing: __1_0.distcp, __2_0.distcp")
    assert "each node" in hint
    hint = refuse(other, CheckpointNotFoundError, ".metadata is missing")
    assert "written last" in hint
    for order in ([source, other], [other, source]):
        assert values(streammerge.describe(order)) == expected
    shutil.copy(source / "__0_0.distcp", other)
    refuse([source, other], InconsistentRanksError, "__0_0.distcp twice")
    (other / "__0_0.distcp").unlink()
    shutil.copy(DATA / "dcp_top__t213" / "checkpoint" / ".metadata", other)
    refuse([source, other], InconsistentRanksError, "different checkpoints")


def test_a_save_that_was_interrupted(source: Path) -> None:
    (source / ".metadata").rename(source / ".metadata.tmp")
    assert "interrupted" in refuse(source, CheckpointNotFoundError, ".metadata is missing")
    (source / ".metadata").touch()
    refuse(source, CorruptFileError, ".metadata: the file is empty")


def test_a_save_without_collectives(source: Path) -> None:
    (source / ".metadata").rename(source / "__0.metadata")
    assert "use_collectives" in refuse(source, CheckpointNotFoundError, ".metadata is missing")


def test_files_of_other_parts_are_not_needed(checkpoints: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of(checkpoints / "file_per_chunk"), tmp_path / "copy"))
    expected = values(streammerge.describe(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    names = {k.fqn: v.relative_path for k, v in metadata.storage_data.items() if k.fqn == "scale"}
    (folder / names["scale"]).unlink()
    refuse(folder, CheckpointNotFoundError, names["scale"])
    metadata.state_dict_metadata["optimizer.scale"] = metadata.state_dict_metadata.pop("scale")
    metadata.planner_data.pop("scale")
    metadata.planner_data["optimizer.scale"] = ("optimizer", "scale")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    del expected["scale"]
    assert values(streammerge.describe(folder)) == expected


def test_an_optimizer_beside_a_model_is_no_candidate(checkpoints: Path) -> None:
    folder = checkpoints / "accelerate" / "checkpoint-20"
    assert streammerge.describe(folder).root == str(folder / "pytorch_model_fsdp_0")
    refuse(folder / "optimizer_0", UnsupportedError, "optim")


@pytest.mark.parametrize("model", ["weights", "weights/model", "pytorch_model_fsdp_0"])
@pytest.mark.parametrize("optimizer", ["optimizer", "optimizer/optim", "optimizer_0", "optim"])
def test_any_parent_leads_to_the_model(tmp_path: Path, model: str, optimizer: str) -> None:
    stored = DATA / "dcp_model__t213" / "checkpoint"
    run = tmp_path / "step_3" / "policy"
    shutil.copytree(stored, run / model)
    shutil.copytree(DATA / "dcp_app_optim__t213" / "checkpoint", run / optimizer)
    for folder in (tmp_path, tmp_path / "step_3", run):
        assert streammerge.describe(folder).root == str(run / model)


def test_flat_parameters_are_refused(source: Path) -> None:
    metadata = pickle.loads((source / ".metadata").read_bytes())
    entries = metadata.state_dict_metadata
    entries["model.layers.0._flat_param"] = entries.pop("model.one_row")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(source, UnsupportedError, "'model.layers.0._flat_param' is a flat parameter")


def test_what_another_part_of_the_same_shapes_left_is_not_taken_up(
    tmp_path: Path,
) -> None:
    parts = ("actor", "critic")
    paths = {f"{part}.w": (part, "w") for part in parts}
    folder = write_whole(tmp_path / "source", {name: torch.ones(3) for name in paths}, paths)
    refuse(folder, UnsupportedError, "'actor' (1 tensor), 'critic' (1 tensor)")
    plans = [streammerge.plan(streammerge.describe(folder, prefix=p), raw=True) for p in parts]
    one, other = (fingerprint(plan, ()) for plan in plans)
    assert one.sources == other.sources
    assert one.result != other.result


def test_an_optimizer_alone_is_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = checkpoints / "accelerate" / "checkpoint-20" / "optimizer_0"
    copy = Path(shutil.copytree(folder, tmp_path / "optimizer_0"))
    refuse(copy, UnsupportedError, "holds no model, only 'optimizer' (")


# --- metadata that were tampered with ---

# Changes that Python's own pickle can express, made to the real classes.
Change = Callable[[Metadata], object]
KEY = "model.five_rows"


def index_of(metadata: Metadata, key: str = KEY) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == key)


def store(metadata: Metadata, **fields: Any) -> None:
    place = metadata.storage_data[index_of(metadata)]
    for name, value in fields.items():
        setattr(place, name, value)


def tensor(metadata: Metadata) -> TensorStorageMetadata:
    return metadata.state_dict_metadata[KEY]


def move_chunk(metadata: Metadata) -> None:
    """The second chunk also covers the second row."""
    chunk = tensor(metadata).chunks[1]
    old = next(i for i in metadata.storage_data if i.fqn == KEY and i.offset == chunk.offsets)
    place = metadata.storage_data.pop(old)
    chunk.offsets = torch.Size([1, 0])
    metadata.storage_data[MetadataIndex(KEY, [1, 0], 1)] = place


def leave_hole(metadata: Metadata) -> None:
    """The first chunk is neither listed nor stored."""
    metadata.storage_data.pop(index_of(metadata))
    drop_chunk(metadata)


def drop_chunk(metadata: Metadata) -> None:
    del tensor(metadata).chunks[0]


def exchange_places(metadata: Metadata) -> None:
    """Two chunks of other shapes are each where the other should be."""
    first, other = index_of(metadata), index_of(metadata, "model.one_row")
    places = metadata.storage_data
    places[first], places[other] = places[other], places[first]


TAMPERED: dict[str, tuple[Change, type[StreamMergeError], tuple[str, ...]]] = {
    "path above": (
        lambda m: store(m, relative_path="../secret"),
        CorruptFileError,
        (f"key '{KEY}'", "'../secret'", "plain file name"),
    ),
    "absolute path": (
        lambda m: store(m, relative_path="/etc/passwd"),
        CorruptFileError,
        (f"key '{KEY}'", "'/etc/passwd'"),
    ),
    "two lines": (
        lambda m: store(m, relative_path="a\nb"),
        CorruptFileError,
        (f"key '{KEY}'", "plain file name"),
    ),
    "no path": (lambda m: store(m, relative_path=7), CorruptFileError, (f"key '{KEY}'",)),
    "offset outside": (
        lambda m: store(m, offset=1 << 62),
        CorruptFileError,
        ("cut short", "__0_0.distcp"),
    ),
    "negative offset": (lambda m: store(m, offset=-5), CorruptFileError, (f"key '{KEY}'", "-5")),
    "huge offset": (lambda m: store(m, offset=1 << 70), CorruptFileError, (f"key '{KEY}'",)),
    "offset of another": (
        lambda m: store(m, offset=3),
        CorruptFileError,
        ("__0_0.distcp", f"key '{KEY}'", "byte 3: begins inside another, which ends at "),
    ),
    "offset inside": (
        lambda m: store(m, offset=m.storage_data[index_of(m)].offset + 64),
        CorruptFileError,
        ("__0_0.distcp", f"key '{KEY}'", "no archive of torch.save starts there"),
    ),
    "length too short": (
        lambda m: store(m, length=700),
        CorruptFileError,
        (f"key '{KEY}'", "cut short"),
    ),
    "no length": (lambda m: store(m, length=0), CorruptFileError, (f"key '{KEY}'",)),
    "compressed": (
        lambda m: store(m, transform_descriptors=["stream.zstd"]),
        UnsupportedError,
        (f"key '{KEY}'", "['stream.zstd']"),
    ),
    "nowhere": (
        lambda m: m.storage_data.pop(index_of(m)),
        InconsistentRanksError,
        (f"key '{KEY}'", "nothing says where the chunk at [0, 0]"),
    ),
    "no places": (
        lambda m: setattr(m, "storage_data", None),
        InconsistentRanksError,
        ("nothing says where",),
    ),
    "another shape": (
        lambda m: setattr(tensor(m), "size", torch.Size([6, 3])),
        PlacementError,
        (f"key '{KEY}'", "chunks cover 15 of the 18 elements"),
    ),
    "not listed": (drop_chunk, InconsistentRanksError, (f"key '{KEY}'", "that it does not list")),
    "a hole": (leave_hole, PlacementError, (f"key '{KEY}'", "9 of the 15", "index [0, 0]")),
    "overlap": (move_chunk, PlacementError, (f"key '{KEY}'", "[0:2, 0:3] and [1:3, 0:3] overlap")),
    "no chunks": (
        lambda m: setattr(tensor(m), "chunks", []),
        InconsistentRanksError,
        (f"key '{KEY}'",),
    ),
    "chunks of another": (
        lambda m: setattr(tensor(m), "chunks", m.state_dict_metadata["model.one_row"].chunks),
        CorruptFileError,
        (f"key '{KEY}'", "not listed for it alone"),
    ),
    "other dims": (
        lambda m: setattr(tensor(m), "size", torch.Size([5, 3, 1])),
        CorruptFileError,
        (f"key '{KEY}'", "other dims"),
    ),
    "another dtype": (
        lambda m: setattr(tensor(m).properties, "dtype", torch.int32),
        InconsistentRanksError,
        (f"key '{KEY}'", "holds float32, .metadata says int32"),
    ),
    "unknown dtype": (
        lambda m: setattr(tensor(m).properties, "dtype", torch.complex128),
        UnsupportedError,
        (f"key '{KEY}'", "complex128"),
    ),
    "not a dtype": (
        lambda m: setattr(tensor(m).properties, "dtype", 7),
        CorruptFileError,
        (f"key '{KEY}'", "dtype is 7"),
    ),
    "negative size": (
        lambda m: setattr(tensor(m), "size", (5, -3)),
        CorruptFileError,
        (f"key '{KEY}'", "its shape is (5, -3)"),
    ),
    "huge size": (
        lambda m: setattr(tensor(m), "size", (1 << 62, 1 << 62)),
        PlacementError,
        (f"key '{KEY}'", "chunks cover 15 of the"),
    ),
    "the place of another": (
        lambda m: store(m, offset=m.storage_data[index_of(m, "model.one_row")].offset),
        CorruptFileError,
        (f"key '{KEY}'", "begins inside another, which ends at "),
    ),
    "places exchanged": (
        exchange_places,
        InconsistentRanksError,
        ("holds shape", "[1, 7]", "[2, 3]"),
    ),
    "not a tensor": (
        lambda m: m.state_dict_metadata.update({"model.x": "what"}),
        CorruptFileError,
        ("its keys stand for", "'what'"),
    ),
    "a function": (
        lambda m: setattr(m, "planner_data", os.system),
        UnsafePickleError,
        ("posix.system", "nothing was run"),
    ),
    "nothing": (
        lambda m: m.state_dict_metadata.clear(),
        UnsupportedError,
        ("holds no tensors",),
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_metadata_are_refused(source: Path, name: str) -> None:
    change, kind, parts = TAMPERED[name]
    metadata = pickle.loads((source / ".metadata").read_bytes())
    change(metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(source, kind, *parts)


def test_metadata_written_by_newer_pythons(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.12 on enums are pickled by value, from 3.13 on paths have another module."""

    class Module:
        class PosixPath:
            pass

    Module.PosixPath.__module__ = "pathlib._local"
    Module.PosixPath.__qualname__ = "PosixPath"
    monkeypatch.setitem(sys.modules, "pathlib._local", Module)  # type: ignore[arg-type]

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            if isinstance(value, enum.Enum):
                return type(value), (value.value,)
            if isinstance(value, Path):
                return Module.PosixPath, value.parts
            return NotImplemented

    expected = values(streammerge.describe(source))
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for protocol in (2, 4, 5):
        stream = io.BytesIO()
        Pickler(stream, protocol).dump(metadata)
        assert b"pathlib._local" in stream.getvalue()
        assert b"getattr" not in stream.getvalue()
        (source / ".metadata").write_bytes(stream.getvalue())
        assert values(streammerge.describe(source)) == expected


def test_metadata_that_are_cut_short(source: Path) -> None:
    data = (source / ".metadata").read_bytes()
    for length in (1, 2, 100, len(data) // 2, len(data) - 1):
        (source / ".metadata").write_bytes(data[:length])
        refuse(source, CorruptFileError, ".metadata: the pickle is damaged: it ends too early")


def test_metadata_of_another_kind(source: Path) -> None:
    for value in ({"a": 1}, [1], None, "text"):
        (source / ".metadata").write_bytes(pickle.dumps(value))
        refuse(source, CorruptFileError, ".metadata", "expected the metadata of a checkpoint")


def test_what_metadata_may_cost_is_bounded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own size and by that of the data: both are large where there are many chunks."""
    refused = "its pickle holds more than is read"
    bomb = b"\x80\x04" + b"]" * 1_500_000 + b"."
    (source / ".metadata").write_bytes(bomb)
    refuse(source, UnsupportedError, ".metadata", refused)
    monkeypatch.setattr(dcp_metadata, "_CELLS_WITHOUT_BYTES", 1 << 40)
    refuse(source, CorruptFileError, ".metadata", "expected the metadata of a checkpoint")
    monkeypatch.setattr(dcp_metadata, "_CELLS_WITHOUT_DATA", 1 << 20)
    refuse(source, UnsupportedError, ".metadata", refused)
    os.truncate(source / "__0_0.distcp", 1 << 28)
    refuse(source, CorruptFileError, ".metadata", "expected the metadata of a checkpoint")
    monkeypatch.setattr(dcp_metadata, "_MAX_BYTES", len(bomb) - 1)
    refuse(source, UnsupportedError, "has 1,500,003 bytes, more than is read")


def test_a_chunk_that_holds_something_else(source: Path) -> None:
    for value, kind, part in (
        ({"a": torch.ones(2)}, UnsupportedError, "expected a plain tensor"),
        (torch.ones(2, 3).to_sparse(), UnsafePickleError, "_rebuild_sparse_tensor"),
        (torch.ones(2, 3, dtype=torch.float64), InconsistentRanksError, "holds float64"),
        (torch.ones(3, 2), InconsistentRanksError, "holds shape [3, 2]"),
    ):
        stream = io.BytesIO()
        torch.save(value, stream)
        (source / "other.distcp").write_bytes(stream.getvalue())
        metadata = pickle.loads((source / ".metadata").read_bytes())
        store(metadata, relative_path="other.distcp", offset=0, length=len(stream.getvalue()))
        (source / ".metadata").write_bytes(pickle.dumps(metadata))
        refuse(source, kind, "other.distcp", f"key '{KEY}'", part)


@given(st.data())
@fixed(150)
def test_damaged_bytes_give_one_error_or_the_same_values(data: st.DataObject) -> None:
    original = DATA / "dcp_model__t26" / "checkpoint"
    with CopyOf(original) as folder:
        name = data.draw(st.sampled_from([".metadata", ".metadata", "__1_0.distcp"]))
        content = bytearray((folder / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        (folder / name).write_bytes(content)
        problem = ""
        try:
            checkpoint = streammerge.describe(folder)
            found = values(checkpoint)
        except StreamMergeError as error:
            problem = str(error)
        if problem:
            assert "\n" not in problem
        else:
            assert {t.name: t.nbytes for t in checkpoint.tensors} == {
                name: len(data) for name, data in found.items()
            }


class CopyOf:
    """A copy of a checkpoint in a folder that is removed."""

    def __init__(self, original: Path) -> None:
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self._original = original

    def __enter__(self) -> Path:
        return Path(shutil.copytree(self._original, Path(self._folder.name) / "copy"))

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


# --- any tiling, against torch ---


def archive(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def cut(shape: Sequence[int], draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[Any]:
    """Cut a box by straight cuts into (offsets, sizes)."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        first, second, moved = list(sizes), list(sizes), list(offsets)
        first[dim], second[dim], moved[dim] = at, sizes[dim] - at, offsets[dim] + at
        boxes += [(offsets, tuple(first)), (tuple(moved), tuple(second))]
    # Two empty parts, or an empty and a full one, may begin at one place; DCP keeps one of them.
    full = [box for box in boxes if 0 not in box[1]]
    return full or boxes[:1]


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], draw: Callable[[st.SearchStrategy[Any]], Any]
) -> None:
    """What DCP writes for tensors that were cut somehow, with chunks in any file and any order."""
    folder.mkdir()
    entries: dict[str, TensorStorageMetadata] = {}
    parts = []
    for name, value in tensors.items():
        boxes = draw(st.permutations(cut(value.shape, draw)))
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        properties = TensorProperties(dtype=value.dtype)
        entries[name] = TensorStorageMetadata(properties, value.shape, chunks)
        for number, (offsets, sizes) in enumerate(boxes):
            part = value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            hint = draw(st.sampled_from([number, None, 0, 99]))
            parts.append((MetadataIndex(name, offsets, hint), part, draw(st.integers(0, 3))))
    files = {number: bytearray() for number in range(4)}
    places = {}
    for index, part, number in draw(st.permutations(parts)):
        if draw(st.booleans()) and part.ndim > 1:
            part = part.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: PLW2901
        elif draw(st.booleans()):
            part = part.clone()  # noqa: PLW2901
        data = archive(part)
        places[index] = _StorageInfo(f"__{number}_0.distcp", len(files[number]), len(data))
        files[number] += data
    metadata = Metadata(entries, {name: (name,) for name in tensors}, places, StorageMeta())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for number, content in files.items():
        (folder / f"__{number}_0.distcp").write_bytes(content)


@given(st.data())
@fixed(40)
def test_any_tiling_gives_what_torch_reads(data: st.DataObject) -> None:
    import tempfile

    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64])
    shapes = st.lists(st.integers(0, 6), max_size=3)
    tensors = {}
    for name in ("a", "b.weight", "c"):
        shape, dtype = data.draw(shapes), data.draw(dtypes)
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(numel).reshape(shape).to(dtype)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "checkpoint"
        write_checkpoint(folder, tensors, data.draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(str(folder), f"{root}/whole.pt")
        expected = torch.load(f"{root}/whole.pt")
        assert_same_tensors(expected, tensors)  # the writer above is right
        assert values(streammerge.describe(folder)) == bits(expected)


def write_whole(folder: Path, tensors: dict[str, torch.Tensor], paths: Any = None) -> Path:
    """A checkpoint in which each tensor is one chunk."""
    folder.mkdir()
    entries, places, content = {}, {}, b""
    for name, value in tensors.items():
        chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
        properties = TensorProperties(dtype=value.dtype)
        entries[name] = TensorStorageMetadata(properties, value.shape, [chunk])
        data = archive(value)
        place = _StorageInfo("__0_0.distcp", len(content), len(data))
        places[MetadataIndex(name, chunk.offsets, 0)] = place
        content += data
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, paths, places)))
    (folder / "__0_0.distcp").write_bytes(content)
    return folder


# --- the safetensors form ---


@pytest.fixture
def shards(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in the safetensors form."""
    return Path(shutil.copytree(checkpoints / "hf", tmp_path / "source"))


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}-model-00001-of-00001.safetensors"


def test_a_missing_shard_is_named(shards: Path) -> None:
    shard(shards, 2).unlink()
    refuse(shards, CheckpointNotFoundError, "shards are missing: 2")
    shard(shards, 1).unlink()
    refuse(shards, CheckpointNotFoundError, "shards are missing: 1, 2")


def test_shards_of_several_nodes(shards: Path, tmp_path: Path) -> None:
    expected = values(streammerge.describe(shards))
    other = tmp_path / "other"
    other.mkdir()
    shard(shards, 1).rename(shard(other, 1))
    assert values(streammerge.describe([shards, other])) == expected
    shutil.copy(shard(shards, 3), other)
    refuse([shards, other], InconsistentRanksError, f"{shard(other, 3).name} twice")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the saved offsets of a shard."""
    header = path.read_bytes()
    size = int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8 : 8 + size])["__metadata__"]
    info = json.loads(metadata["DCP_SHARDING_INFO"])
    change(info)
    metadata["DCP_SHARDING_INFO"] = json.dumps(info)
    save_file(load_file(path), path, metadata)


@pytest.mark.parametrize(
    ("offsets", "kind", "part"),
    [
        ([0, 0], PlacementError, "overlap"),
        ([2, 0], PlacementError, "overlap"),
        ([99, 0], PlacementError, "chunks cover"),
        ([17], CorruptFileError, "its saved_offsets are [17]"),
        ([17, -1], CorruptFileError, "its saved_offsets are [17, -1]"),
        ([17, 1 << 70], CorruptFileError, "its saved_offsets are"),
        ([17.0, 0], CorruptFileError, "its saved_offsets are"),
        ("17, 0", CorruptFileError, "its saved_offsets are"),
        (None, CorruptFileError, "its saved_offsets are None"),
    ],
    ids=str,
)
def test_offsets_that_cannot_be(
    shards: Path, offsets: object, kind: type[StreamMergeError], part: str
) -> None:
    path = shard(shards, 2)
    rewrite(path, lambda info: info["emb.weight"].update(saved_offsets=offsets))
    refuse(shards, kind, "'emb.weight'", part)


def test_shards_without_their_offsets(shards: Path) -> None:
    save_file(load_file(shard(shards, 2)), shard(shards, 2))
    refuse(shards, CorruptFileError, shard(shards, 2).name, "DCP_SHARDING_INFO")


def test_an_empty_shard_is_named_once(shards: Path) -> None:
    shard(shards, 2).write_bytes(b"")
    with pytest.raises(CorruptFileError) as caught:
        streammerge.describe(shards)
    assert str(caught.value) == f"{shard(shards, 2)}: the file is empty (0 bytes)"


def test_a_shard_that_is_a_pipe_is_not_waited_for(shards: Path) -> None:
    shard(shards, 2).unlink()
    os.mkfifo(shard(shards, 2))
    refuse(shards, CorruptFileError, shard(shards, 2).name, "the file is empty")


def test_shards_of_several_saves(shards: Path) -> None:
    shutil.copy(shard(shards, 1), shards / "shard-00001-model-00001-of-00007.safetensors")
    refuse(shards, InconsistentRanksError, "different saves")


def test_shards_that_differ_in_dtype(shards: Path) -> None:
    path = shard(shards, 2)
    header = path.read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    tensors = load_file(path)
    tensors["emb.weight"] = tensors["emb.weight"].half()
    save_file(tensors, path, metadata)
    refuse(shards, InconsistentRanksError, "'emb.weight'", "F16 of 2 dims here, F32")


def test_plain_directories_are_not_taken_for_shards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    assert not dcp_safetensors.matches(str(tmp_path))
    assert not dcp.matches(str(tmp_path))
    assert not dcp.matches(str(tmp_path / "missing"))


# --- scale ---


def write_many(folder: Path, ranks: int, tensors: int) -> None:
    """Many small chunks, of a few forms, as DCP would list them."""
    folder.mkdir()
    archives = [archive(torch.full((1, 16 + form), float(form))) for form in range(4)]
    entries, places = {}, {}
    at = 0
    for number in range(tensors):
        name, form = f"model.layers.{number}.weight", number % 4
        shape, data = torch.Size([ranks, 16 + form]), archives[form]
        sizes = torch.Size([1, 16 + form])
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), sizes) for rank in range(ranks)]
        properties = TensorProperties(dtype=torch.float32)
        entries[name] = TensorStorageMetadata(properties, shape, chunks)
        for rank in range(ranks):
            place = _StorageInfo(f"__{rank}_0.distcp", at, len(data))
            places[MetadataIndex(name, [rank, 0], rank)] = place
        at += len(data)
    paths = {name: ("model", name.removeprefix("model.")) for name in entries}
    metadata = Metadata(entries, paths, places, StorageMeta())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    row = b"".join(archives[number % 4] for number in range(tensors))
    for rank in range(ranks):
        (folder / f"__{rank}_0.distcp").write_bytes(row)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no VmHWM")
def test_a_hundred_thousand_chunks_take_little_memory(tmp_path: Path) -> None:
    peaks = {}
    for ranks, tensors in ((4, 16), (64, 1562)):
        source, target = tmp_path / f"source_{ranks}", tmp_path / f"target_{ranks}"
        write_many(source, ranks, tensors)
        work = "from streammerge.cli import main\ncode = main(argv)"
        figures = run_child(work, "merge", source, target, "--raw", "--quiet")
        assert figures["modules"] == []
        assert figures["children"] == 0
        peaks[ranks] = figures["peak"]
        shutil.rmtree(source)
    tensor = load_directory(target)["layers.5.weight"]
    assert torch.equal(tensor, torch.full((64, 17), 1.0))
    shutil.rmtree(target)
    assert peaks[64] <= 48 * MIB < LIMIT, f"{peaks[64] / MIB:.1f} MiB"
    assert peaks[64] - peaks[4] <= 160 * 64 * 1562
