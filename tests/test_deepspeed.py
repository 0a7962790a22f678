"""DeepSpeed ZeRO: stored checkpoints, random ones by the documented rules, and bad ones."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
import zero_checkpoints
from checkpoints import calling, copy_stored, scratch, snapshot
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_same_tensors, load_directory
from safetensors.torch import load_file
from strategies import MergeOptions, fixed
from zero_checkpoints import Written, Zero

import streammerge
from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    PlacementError,
    SourceError,
    StreamMergeError,
    UnsupportedError,
    UsageError,
)
from streammerge.checkpoint import FlatLayout

DATA = Path(__file__).parent / "data"
STORED = sorted(path.name for path in DATA.glob("ds_*"))


def merge(source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What a merge writes."""
    streammerge.merge(source, target, **options)
    return load_directory(target)


# --- stored ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_auto_is_the_dtype_of_the_module(name: str, tmp_path: Path) -> None:
    found = merge(DATA / name, tmp_path / "merged", dtype="auto")

    assert_same_tensors(found, load_file(DATA / name / "expected_module_dtype.safetensors"))


def test_the_module_decides_where_the_config_says_otherwise(tmp_path: Path) -> None:
    written = zero_checkpoints.write(
        Zero(groups=({"a.weight": (3, 2), "b.bias": (4,)},), buffers={"scale": (2,)}),
        tmp_path / "source",
    )
    config = {"architectures": ["Model"], "dtype": "float16"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))

    found = merge(tmp_path / "source", tmp_path / "auto", dtype="auto")
    assert_same_tensors(found, written.module)
    edited = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert edited["dtype"] == "bfloat16"

    found = merge(tmp_path / "source", tmp_path / "kept", dtype="auto", keep_dtype=["*.bias"])
    assert_same_tensors(found, {**written.module, "b.bias": written.masters["b.bias"]})

    found = merge(tmp_path / "source", tmp_path / "half", dtype="float16")
    assert {value.dtype for value in found.values()} == {torch.float16}


def test_inspect_names_what_is_left_out() -> None:
    checkpoint = streammerge.describe(DATA / "ds_zero3__t213")

    assert checkpoint.format == "DeepSpeed ZeRO-3"
    assert checkpoint.world_size == 2
    assert [(s.name, s.kind) for s in checkpoint.skipped] == [
        ("optimizer_state_dict", "optimizer state of 2 ranks")
    ]


# --- random ---------------------------------------------------------------------------------------


@st.composite
def zeros(draw: strategies.Draw) -> Zero:
    """Any checkpoint that DeepSpeed could write."""
    shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
    stage = draw(st.integers(1, 3))
    count = draw(st.integers(1, 3))
    names = iter(f"p{i}" for i in range(99))
    groups = tuple(
        {next(names): shape for shape in draw(st.lists(shapes, min_size=1, max_size=4))}
        for _ in range(count)
    )
    frozen = {next(names): shape for shape in draw(st.lists(shapes, max_size=2))}
    buffers = {next(names): shape for shape in draw(st.lists(shapes, max_size=2))}
    sources = [*groups[0], *(frozen if stage != 1 else ())]
    shared = {next(names): s for s in draw(st.lists(st.sampled_from(sources), max_size=2))}
    stripped = stage > 1 or draw(st.booleans())
    return Zero(
        stage=stage,
        world_size=draw(st.integers(1, 5)),
        groups=groups,
        frozen=frozen,
        buffers=buffers,
        shared=shared,
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        stripped=stripped,
        gaps=draw(st.sampled_from((0, 0, 1, 3))) if stripped else 0,
        sub_groups=draw(st.integers(1, 3)),
        listed=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@given(zeros(), strategies.merge_options)
@fixed(400)
def test_any_checkpoint_gives_what_it_was_made_of(zero: Zero, options: MergeOptions) -> None:
    settings = {
        "max_shard_size": options.max_shard_size,
        "memory": options.memory,
        "workers": options.workers,
    }
    with scratch() as folder:
        written = zero_checkpoints.write(zero, folder / "source")
        raw = merge(folder / "source", folder / "raw", raw=True, **settings)
        assert_same_tensors(raw, written.masters)
        cast = merge(folder / "source", folder / "cast", dtype="auto", **settings)
        assert_same_tensors(cast, written.module)


def test_keeps_the_order_of_the_module(tmp_path: Path) -> None:
    zero = Zero(groups=({"b": (3,), "d": (2,)}, {"a": (4,)}), buffers={"c": (1,)})
    written = zero_checkpoints.build(zero)
    module = written.files["mp_rank_00_model_states.pt"]["module"]
    module.move_to_end("b")
    zero_checkpoints.save(written, tmp_path / "source")

    names = [tensor.name for tensor in streammerge.describe(tmp_path / "source").tensors]

    assert names == list(module)
    assert names != sorted(names)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sized_parameters(stage: int, tmp_path: Path) -> None:
    zero = Zero(stage, 3, groups=({"a": (2, 0), "b": (5,), "c": (0,)},), listed=False)
    written = zero_checkpoints.write(zero, tmp_path / "source")

    assert_same_tensors(merge(tmp_path / "source", tmp_path / "merged", raw=True), written.masters)


def test_tensors_share_their_columns(tmp_path: Path) -> None:
    group = {f"layers.{i}.weight": (6, 5) for i in range(9)}
    zero_checkpoints.write(Zero(3, 4, groups=(group,)), tmp_path / "source")

    tensors = streammerge.describe(tmp_path / "source").tensors

    layouts = [tensor.layout for tensor in tensors]
    assert all(isinstance(layout, FlatLayout) for layout in layouts)
    assert len(set(map(id, layouts))) == 1
    assert len({id(tensor.extents.files) for tensor in tensors}) == 1


def test_shared_parameters_are_stored_once(tmp_path: Path) -> None:
    zero = Zero(3, 2, groups=({"emb": (7, 3)},), shared={"head": "emb"})
    zero_checkpoints.write(zero, tmp_path / "source")

    emb, head = streammerge.describe(tmp_path / "source").tensors

    assert (emb.name, head.name) == ("emb", "head")
    assert head.extents is emb.extents


def test_buffers_of_zero3_are_compared(tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero(3, 3, buffers={"s": (2,)}))
    states = written.files["zero_pp_rank_1_mp_rank_00_model_states.pt"]
    states["module"]["s"] = states["module"]["s"] + 1
    zero_checkpoints.save(written, tmp_path / "source")

    with pytest.raises(streammerge.ReplicaMismatchError, match="'s': rank 1 holds another value"):
        merge(tmp_path / "source", tmp_path / "merged", raw=True)
    found = merge(tmp_path / "source", tmp_path / "merged", raw=True, replicas="first")
    assert_same_tensors(found, written.masters)


def test_frozen_parameters_that_every_rank_holds(tmp_path: Path) -> None:
    """Those that ZeRO-3 did not take over are saved whole."""
    written = zero_checkpoints.build(Zero(3, 2, frozen={"f": (3, 2)}))
    for states in written.files.values():
        if "frozen_param_fragments" in states:
            states["frozen_param_fragments"]["f"] = written.module["f"]
    zero_checkpoints.save(written, tmp_path / "source")

    assert_same_tensors(merge(tmp_path / "source", tmp_path / "merged", raw=True), written.masters)


@pytest.mark.parametrize("entry", [None, {"a": 1}, zero_checkpoints.LossScaler()])
def test_other_entries_of_the_module_are_skipped(entry: object, tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero())
    module = written.files["mp_rank_00_model_states.pt"]["module"]
    module["block._extra_state"] = entry
    zero_checkpoints.save(written, tmp_path / "source")

    skipped = streammerge.describe(tmp_path / "source").skipped

    assert "block._extra_state" in [s.name for s in skipped]
    assert ("lr_scheduler", "dict beside the model") in [(s.name, s.kind) for s in skipped]


def test_ddp_without_zero_is_the_module(tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero())
    states = written.files["mp_rank_00_model_states.pt"]
    states |= {"param_shapes": None, "shared_params": None, "frozen_param_shapes": None}
    written = replace(written, files={"mp_rank_00_model_states.pt": states})
    zero_checkpoints.save(written, tmp_path / "source")

    assert_same_tensors(merge(tmp_path / "source", tmp_path / "merged", raw=True), written.module)


def test_dealt_out_parameters_need_not_be_where_they_are_listed(tmp_path: Path) -> None:
    """With round_robin_gradients, DeepSpeed lists fragments as if they were in order."""
    written = zero_checkpoints.build(Zero(groups=({"a": (4, 2), "b": (3,)},)))
    for states in optimizer_states(written).values():
        first = states["optimizer_state_dict"]["param_slice_mappings"][0]
        first["a"].start += 1
        states["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    zero_checkpoints.save(written, tmp_path / "source")

    assert_same_tensors(merge(tmp_path / "source", tmp_path / "merged", raw=True), written.masters)


def test_objects_of_any_class_are_left_alone(tmp_path: Path) -> None:
    """Beside the weights, training loops keep what they like. Nothing of it is run."""
    marker = tmp_path / "ran"
    written = zero_checkpoints.build(Zero())
    states = written.files["mp_rank_00_model_states.pt"]
    states["args"] = calling(Path.touch, marker)
    states["client"] = [OrderedDict(a=range(3)), {random.Random: random.Random(3)}, {1.5, (1, 2)}]
    for optimizer in optimizer_states(written).values():
        optimizer["optimizer_state_dict"]["loss_scaler"] = calling(exec, "1 / 0")
    zero_checkpoints.save(written, tmp_path / "source")

    found = merge(tmp_path / "source", tmp_path / "merged", raw=True)

    assert_same_tensors(found, written.masters)
    assert not marker.exists()


# --- which checkpoint -----------------------------------------------------------------------------


def two_tags(folder: Path, latest: str | None = "step2") -> dict[str, Written]:
    """Two checkpoints of other values below one folder."""
    written = {}
    for number, tag in enumerate(("step1", "step2")):
        written[tag] = zero_checkpoints.build(Zero(seed=number))
        zero_checkpoints.save(written[tag], folder, tag, latest=False)
    if latest is not None:
        (folder / "latest").write_text(latest)
    return written


def tensors_of(source: Path, **options: Any) -> str:
    """The folder of the tag that is read."""
    files = streammerge.describe(source, **options).files
    (folder,) = {Path(file.path).parent.name for file in files}
    return folder


def test_latest_and_tag(tmp_path: Path) -> None:
    two_tags(tmp_path / "run")

    assert tensors_of(tmp_path / "run") == "step2"
    assert tensors_of(tmp_path / "run", tag="step1") == "step1"
    assert tensors_of(tmp_path) == "step2"
    assert tensors_of(tmp_path / "run" / "step1") == "step1"
    assert tensors_of(tmp_path / "run" / "step1", tag="step1") == "step1"


def test_the_folder_of_the_tag_is_named(tmp_path: Path) -> None:
    two_tags(tmp_path / "run")

    assert streammerge.describe(tmp_path).root == str(tmp_path / "run" / "step2")


@pytest.mark.parametrize("tag", [None, "step2"])
def test_a_tag_that_cannot_be_looked_into(
    tag: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No other is taken instead."""
    two_tags(tmp_path, None)
    shutil.rmtree(tmp_path / "step2")
    (tmp_path / "step2").mkdir()
    closed = str(tmp_path / "step2")
    monkeypatch.setattr("os.access", lambda path, *_, **__: str(path) != closed)

    with pytest.raises(SourceError) as caught:
        streammerge.describe(tmp_path, tag=tag)
    assert str(caught.value) == f"{closed}: Permission denied"
    assert tensors_of(tmp_path, tag="step1") == "step1"


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_files_that_changed_places(kind: str, tmp_path: Path) -> None:
    """The partitions of ZeRO-3 do not say whose they are; torch.save does."""
    zero = Zero(stage=3, world_size=2)
    zero_checkpoints.write(zero, tmp_path)
    folder = tmp_path / zero.tag
    first, second = (
        next(folder.glob(f"*zero_pp_rank_{rank}_*_{kind}_states.pt")) for rank in (0, 1)
    )
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)

    with pytest.raises(InconsistentRanksError, match=r"torch\.save wrote it") as caught:
        streammerge.describe(tmp_path)
    assert str(caught.value).startswith(f"{first}: ")


def test_the_only_tag_needs_no_latest(tmp_path: Path) -> None:
    zero_checkpoints.save(zero_checkpoints.build(Zero()), tmp_path, "best", latest=False)

    assert tensors_of(tmp_path) == "best"


def test_a_tag_may_be_called_latest(tmp_path: Path) -> None:
    zero_checkpoints.save(zero_checkpoints.build(Zero()), tmp_path, "latest", latest=False)

    assert tensors_of(tmp_path) == "latest"


@pytest.mark.parametrize(
    ("latest", "tag", "error", "message"),
    [
        (None, None, CheckpointNotFoundError, "2 tags to choose from: step1, step2"),
        ("step3", None, CheckpointNotFoundError, "no checkpoint of tag 'step3' (found step1, "),
        ("step1", "step9", CheckpointNotFoundError, "no checkpoint of tag 'step9'"),
        ("step1", "../run", CheckpointNotFoundError, "tag '../run' is not the name of a folder"),
        ("step1", "..", CheckpointNotFoundError, "tag '..' is not the name of a folder"),
        ("../run/step1", None, CorruptFileError, "latest: '../run/step1' is not a tag"),
        ("a\nb", None, CorruptFileError, "latest: 'a\\nb' is not a tag"),
        ("x" * 300, None, CorruptFileError, "is not a tag"),
    ],
)
def test_refuses_a_wrong_tag(
    latest: str | None,
    tag: str | None,
    error: type[StreamMergeError],
    message: str,
    tmp_path: Path,
) -> None:
    two_tags(tmp_path / "run", latest)

    with pytest.raises(error) as caught:
        streammerge.describe(tmp_path / "run", tag=tag)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_tag_is_refused(tmp_path: Path) -> None:
    two_tags(tmp_path)

    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint of tag 'step1' \(found step2"
    ):
        streammerge.describe(tmp_path / "step2", tag="step1")


def test_other_layouts_have_no_tags() -> None:
    with pytest.raises(UsageError, match="FSDP rank files, nothing that fits --tag"):
        streammerge.describe(DATA / "fsdp2_w4__t213", tag="a")


@pytest.mark.parametrize("stage", [2, 3])
def test_each_node_may_keep_its_own_files(stage: int, tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero(stage, 4))
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        zero_checkpoints.save(written, node)
    for path in nodes[0].glob("*/*rank_[23]_mp*"):
        path.unlink()
    for path in nodes[1].glob("*/*rank_[01]_mp*"):
        path.unlink()
    (nodes[1] / "latest").unlink()
    if stage < 3:
        (nodes[1] / "global_step3" / "mp_rank_00_model_states.pt").unlink()

    streammerge.merge(nodes, tmp_path / "merged", raw=True)
    assert_same_tensors(load_directory(tmp_path / "merged"), written.masters)
    (nodes[1] / "latest").write_text("global_step4")
    with pytest.raises(InconsistentRanksError, match="name different tags: global_step3, global_"):
        streammerge.describe(nodes)
    with pytest.raises(CheckpointNotFoundError, match="2 of 4 files missing: ranks 2-3"):
        streammerge.describe(nodes[0])


def test_side_files_beside_latest(tmp_path: Path) -> None:
    """As Hugging Face Trainer leaves them."""
    source = tmp_path / "checkpoint-3"
    zero_checkpoints.write(Zero(), source)
    for name in ("config.json", "tokenizer.json", "trainer_state.json"):
        (source / name).write_text("{}")
    for name in ("zero_to_fp32.py", "modeling.py", "rng_state_0.pth", "training_args.bin"):
        (source / name).write_text("#")

    streammerge.merge(source, tmp_path / "merged")

    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "modeling.py",
        "model.safetensors",
    }


# --- bad ------------------------------------------------------------------------------------------

BAD: list[Any] = []
Damage = Callable[[Written], None]
MODEL = "mp_rank_00_model_states.pt"


def optimizer_states(written: Written) -> dict[str, Any]:
    """The objects of the optimizer files, by name."""
    return {name: value for name, value in written.files.items() if "optim" in name}


def optimizer(written: Written, rank: int) -> dict[str, Any]:
    """The optimizer states of a rank."""
    return written.files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"][
        "optimizer_state_dict"
    ]


def sliced_model(written: Written, rank: int) -> dict[str, Any]:
    """The model states of a rank of ZeRO-3."""
    return written.files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"]


def bad(error: type[StreamMergeError], *parts: str, zero: Zero | None = None) -> Any:
    """Enter what makes a checkpoint bad into the table.

    Args:
        error: exact class.
        parts: what the message must hold.
        zero: the checkpoint that is damaged.
    """

    def enter(damage: Damage) -> Damage:
        BAD.append(pytest.param(zero or Zero(), damage, error, parts, id=damage.__name__))
        return damage

    return enter


@pytest.mark.parametrize(("zero", "damage", "error", "parts"), BAD)
def test_refuses_a_bad_checkpoint(
    zero: Zero,
    damage: Damage,
    error: type[StreamMergeError],
    parts: tuple[str, ...],
    tmp_path: Path,
) -> None:
    written = zero_checkpoints.build(zero)
    damage(written)
    zero_checkpoints.save(written, tmp_path / "source")
    before = snapshot(tmp_path)

    with pytest.raises(StreamMergeError) as caught:
        streammerge.merge(tmp_path / "source", tmp_path / "merged", raw=True)

    assert type(caught.value) is error, caught.value
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert snapshot(tmp_path) == before


@bad(CheckpointNotFoundError, "1 of 2 files missing: rank 1", "optimizer states")
def rank_file_missing(written: Written) -> None:
    del written.files["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]


@bad(CheckpointNotFoundError, "1 of 3 files missing: rank 0", zero=Zero(3, 3))
def first_rank_file_missing(written: Written) -> None:
    del written.files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@bad(CheckpointNotFoundError, "global_step3: mp_rank_00_model_states.pt is missing")
def model_states_missing(written: Written) -> None:
    del written.files[MODEL]


@bad(CheckpointNotFoundError, "model states: 1 of 3 files missing: rank 1", zero=Zero(3, 3))
def model_states_of_a_rank_missing(written: Written) -> None:
    del written.files["zero_pp_rank_1_mp_rank_00_model_states.pt"]


@bad(CheckpointNotFoundError, MODEL, "the optimizer states beside it are missing")
def optimizer_states_missing(written: Written) -> None:
    for name in optimizer_states(written):
        del written.files[name]


@bad(InconsistentRanksError, "rank_2_mp_rank_00_optim", "rank 2, but", "that there are 2 ranks")
def a_rank_too_many(written: Written) -> None:
    written.files["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"] = written.files[
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    ]


@bad(InconsistentRanksError, "rank_2_mp_rank_00_model", "that there are 2 ranks", zero=Zero(3))
def model_states_of_a_rank_too_many(written: Written) -> None:
    written.files["zero_pp_rank_2_mp_rank_00_model_states.pt"] = sliced_model(written, 1)


@bad(CheckpointNotFoundError, "the optimizer states are missing, which hold", zero=Zero(3))
def optimizer_states_of_slices_missing(written: Written) -> None:
    for name in optimizer_states(written):
        del written.files[name]


@bad(InconsistentRanksError, "rank 0 twice", "bf16_zero_pp", "/zero_pp")
def a_rank_twice(written: Written) -> None:
    written.files["zero_pp_rank_0_mp_rank_00_optim_states.pt"] = written.files[
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    ]


@bad(CorruptFileError, "rank_0_mp", "'partition_count' is damaged ([0])")
def no_ranks(written: Written) -> None:
    optimizer(written, 0)["partition_count"] = [0]


@bad(InconsistentRanksError, "rank_1_mp", "'partition_count' is 3, there are files of 2 ranks")
def another_world_size(written: Written) -> None:
    optimizer(written, 1)["partition_count"] = [3]


@bad(InconsistentRanksError, MODEL, "written by 4 ranks, the optimizer states by 2")
def model_of_another_world_size(written: Written) -> None:
    written.files[MODEL]["dp_world_size"] = 4


@bad(InconsistentRanksError, "rank_1_mp", "of ZeRO-1", "of ZeRO-2")
def another_stage(written: Written) -> None:
    optimizer(written, 1)["zero_stage"] = 1


@bad(InconsistentRanksError, "rank_1_mp", "'step': its optimizer has made another number")
def another_step(written: Written) -> None:
    optimizer(written, 1)["base_optimizer_state"]["state"][0]["step"] += 1


@bad(
    InconsistentRanksError,
    "rank_1_mp",
    "its optimizer has made another number of steps than that of",
)
def another_step_of_the_group(written: Written) -> None:
    for rank in range(2):
        optimizer(written, rank)["base_optimizer_state"]["param_groups"][0]["step"] = 3 + rank


@bad(
    InconsistentRanksError,
    "rank_2_mp_rank_00_model",
    "'global_steps': 4 here, 3 in",
    zero=Zero(3, 3),
)
def model_states_of_another_step(written: Written) -> None:
    sliced_model(written, 2)["global_steps"] = 4


@bad(InconsistentRanksError, "rank_1_mp", "'param_shapes': others than in", zero=Zero(3))
def other_parameters_on_a_rank(written: Written) -> None:
    sliced_model(written, 1)["param_shapes"][0].move_to_end("a")


@bad(InconsistentRanksError, "ZeRO-1 or 2", "ZeRO-3", zero=Zero(3))
def model_states_of_two_stages(written: Written) -> None:
    written.files[MODEL] = sliced_model(written, 0)


@bad(PlacementError, "rank_1_mp", "key 'b': takes elements 15 to 19 of group 0", "hold 18")
def partition_too_short(written: Written) -> None:
    for rank in range(2):
        states = optimizer(written, rank)
        del states["param_slice_mappings"]
        states["single_partition_of_fp32_groups"][0] = torch.zeros((10, 8)[rank])


@bad(PlacementError, "rank_0_mp", "partitions of group 0 hold 40 elements", "parameters take 19")
def partition_too_long(written: Written) -> None:
    for rank in range(2):
        states = optimizer(written, rank)
        del states["param_slice_mappings"]
        states["single_partition_of_fp32_groups"][0] = torch.zeros(20)


@bad(InconsistentRanksError, "rank_1_mp", "12 elements of group 0, after partitions of 10 and 10")
def partitions_of_other_sizes(written: Written) -> None:
    optimizer(written, 1)["single_partition_of_fp32_groups"][0] = torch.zeros(12)


@bad(
    InconsistentRanksError,
    "rank_2_mp",
    "3 elements of group 0, after partitions of 4 and 3",
    zero=Zero(world_size=4),
)
def partition_in_the_middle_too_short(written: Written) -> None:
    for rank, size in enumerate((4, 3, 3, 4)):
        optimizer(written, rank)["single_partition_of_fp32_groups"][0] = torch.zeros(size)


@bad(
    PlacementError,
    "rank_0_mp",
    "key 'b': takes elements 8 to 10 of the partition, which has 9",
    zero=Zero(3),
)
def slice_too_short(written: Written) -> None:
    for rank in range(2):
        optimizer(written, rank)["fp32_flat_groups"] = [torch.zeros(9)]


@bad(PlacementError, "'fp32_flat_groups': 11 elements, the slices", "take 10", zero=Zero(3))
def slice_too_long(written: Written) -> None:
    for rank in range(2):
        optimizer(written, rank)["fp32_flat_groups"] = [torch.zeros(11)]


@bad(InconsistentRanksError, "rank_1_mp", "'fp32_flat_groups': other sizes", zero=Zero(3))
def slices_of_other_sizes(written: Written) -> None:
    optimizer(written, 1)["fp32_flat_groups"] = [torch.zeros(9)]


@bad(InconsistentRanksError, "key 'a'", "several dtypes: BF16, F32")
def partitions_of_other_dtypes(written: Written) -> None:
    groups = optimizer(written, 1)["single_partition_of_fp32_groups"]
    groups[0] = groups[0].bfloat16()


@bad(CorruptFileError, "rank_1_mp", "'single_partition_of_fp32_groups[0]' has shape [3, 3]")
def partition_that_is_not_flat(written: Written) -> None:
    groups = optimizer(written, 1)["single_partition_of_fp32_groups"]
    groups[0] = groups[0].view(3, 3)


@bad(CorruptFileError, "rank_1_mp", "[0]' has shape [1000000000], it should be flat")
def partition_of_one_element(written: Written) -> None:
    groups = optimizer(written, 1)["single_partition_of_fp32_groups"]
    groups[0] = torch.zeros(1).expand(1_000_000_000)


@bad(
    UnsupportedError,
    "rank_1_mp",
    "_fp32_groups[0]': is not a plain tensor (int)",
)
def partition_that_is_no_tensor(written: Written) -> None:
    optimizer(written, 1)["single_partition_of_fp32_groups"][0] = 3


@bad(InconsistentRanksError, "rank_1_mp", "partitions of 0 parameter groups", "lists 1")
def group_missing(written: Written) -> None:
    optimizer(written, 1)["single_partition_of_fp32_groups"] = []


@bad(PlacementError, "rank_1_mp", "key 'b'", "says elements 5 to 8, its place", "5 to 9")
def fragments_of_other_parameters(written: Written) -> None:
    optimizer(written, 1)["param_slice_mappings"][0]["b"].numel -= 1


@bad(PlacementError, "rank_0_mp", "key 'a'", "none of it is here, its place", "elements 0 to 10")
def fragment_missing(written: Written) -> None:
    del optimizer(written, 0)["param_slice_mappings"][0]["a"]


@bad(InconsistentRanksError, "'param_alignment_paddings' of group 0", "not those of 2 parameters")
def gaps_of_other_parameters(written: Written) -> None:
    optimizer(written, 0)["param_alignment_paddings"] = [[1]]


@bad(CorruptFileError, "rank_0_mp", "'param_alignment_paddings' is damaged")
def negative_gaps(written: Written) -> None:
    optimizer(written, 0)["param_alignment_paddings"] = [[-4, 4]]


@bad(InconsistentRanksError, MODEL, "key 'a': shape [5, 3] in 'module', [3, 5]")
def other_shape_in_the_module(written: Written) -> None:
    written.files[MODEL]["param_shapes"][0]["a"] = torch.Size((3, 5))


@bad(CorruptFileError, MODEL, "'param_shapes': 'a' has shape (5, 4611686018427387904, ")
def huge_shape(written: Written) -> None:
    written.files[MODEL]["param_shapes"][0]["a"] = torch.Size((5, *[2**62] * 60))


@bad(CorruptFileError, "'param_shapes': 'a' has shape (-1, 3)")
def negative_shape(written: Written) -> None:
    written.files[MODEL]["param_shapes"][0]["a"] = (-1, 3)


@bad(CorruptFileError, "rank_0_mp", "'partition_count' is damaged (None)")
def no_partition_count(written: Written) -> None:
    del optimizer(written, 0)["partition_count"]


@bad(CheckpointNotFoundError, "of 4000000000000000000 files missing: rank", "2-3999999999999999999")
def huge_partition_count(written: Written) -> None:
    for rank in range(2):
        optimizer(written, rank)["partition_count"] = 4 * 10**18


@bad(UnsupportedError, "'partition_count' is [2, 1]: a group", zero=Zero(groups=({"a": (2,)},) * 2))
def group_of_experts(written: Written) -> None:
    for rank in range(2):
        optimizer(written, rank)["partition_count"] = [2, 1]


@bad(InconsistentRanksError, "rank_1_mp", "key 'f': not in 'frozen_param_fragments'",
     zero=Zero(3, frozen={"f": (3,)}))  # fmt: skip
def frozen_slice_missing(written: Written) -> None:
    del sliced_model(written, 1)["frozen_param_fragments"]["f"]


@bad(PlacementError, "rank_1_mp", "key 'f': shape [1] in 'frozen_", "expected [3] or [2]",
     zero=Zero(3, frozen={"f": (3,)}))  # fmt: skip
def frozen_slice_too_short(written: Written) -> None:
    for rank in range(2):
        fragments = sliced_model(written, rank)["frozen_param_fragments"]
        fragments["f"] = torch.zeros(3 if rank == 0 else 1, dtype=torch.bfloat16)


@bad(PlacementError, MODEL, "key 'f': shape [2] in 'frozen_", "expected [3]",
     zero=Zero(frozen={"f": (3,)}))  # fmt: skip
def frozen_parameter_too_short(written: Written) -> None:
    written.files[MODEL]["frozen_param_fragments"]["f"] = torch.zeros(2)


@bad(UnsupportedError, "key 'f': its values are in no file", zero=Zero(3, frozen={"f": (3,)}))
def placeholder_of_nothing(written: Written) -> None:
    for rank in range(2):
        states = sliced_model(written, rank)
        states["frozen_param_shapes"] = states["frozen_param_fragments"] = None


@bad(InconsistentRanksError, "key 'b': shape [4], but 'shared_params' says", "'a' of [5, 3]")
def shared_with_another_shape(written: Written) -> None:
    states = written.files[MODEL]
    states["shared_params"] = {"c": "a"}
    states["module"]["c"] = states["module"].pop("b")
    states["module"]["b"] = states["module"]["c"]
    states["shared_params"] = {"b": "a"}
    states["param_shapes"][0] = OrderedDict(a=torch.Size((5, 3)), c=torch.Size((4,)))
    for rank in range(2):
        del optimizer(written, rank)["param_slice_mappings"]


@bad(UnsupportedError, MODEL, "layer by layer (pipeline parallelism)")
def module_elsewhere(written: Written) -> None:
    written.files[MODEL]["module"] = None


@bad(UnsupportedError, MODEL, "split over 2 ranks (model parallelism)")
def split_model(written: Written) -> None:
    written.files[MODEL]["mp_world_size"] = 2


@bad(UnsupportedError, "mp_rank_01_model_states.pt: part 1 of a model that is split over ranks")
def part_of_a_model(written: Written) -> None:
    written.files["mp_rank_01_model_states.pt"] = written.files[MODEL]


@bad(UnsupportedError, "layer_01-model_00-model_states.pt", "pipeline parallelism")
def pipeline(written: Written) -> None:
    written.files["layer_01-model_00-model_states.pt"] = {}


@bad(UnsupportedError, "layer_0_expert_1_mp_rank_00_model_states.pt", "experts in files of their")
def experts(written: Written) -> None:
    written.files["layer_0_expert_1_mp_rank_00_model_states.pt"] = {}


@bad(UnsupportedError, "expp_rank_0_mp_rank_00_optim_states.pt", "experts in files of their own")
def optimizers_of_experts(written: Written) -> None:
    written.files["expp_rank_0_mp_rank_00_optim_states.pt"] = {}


@bad(UnsupportedError, MODEL, "AutoEP")
def experts_by_autoep(written: Written) -> None:
    written.files[MODEL]["ds_autoep_layers"] = [{"ep_size": 2}]


@bad(UnsupportedError, "rank_0_mp", "AutoEP", zero=Zero(3))
def partition_groups_of_autoep(written: Written) -> None:
    optimizer(written, 0)["ds_zero_partition_groups"] = [{}]


@bad(UnsupportedError, "rank_0_mp", "no optimizer states of ZeRO 1, 2 or 3 (zero_stage 7)")
def unknown_stage(written: Written) -> None:
    optimizer(written, 0)["zero_stage"] = 7


@bad(UnsupportedError, MODEL, "no 'param_shapes'")
def no_shapes(written: Written) -> None:
    written.files[MODEL]["param_shapes"] = None


@bad(CorruptFileError, MODEL, "no model states of DeepSpeed")
def another_dict(written: Written) -> None:
    written.files[MODEL] = {"state_dict": {}}


@bad(CorruptFileError, "rank_0_mp", "no optimizer states of DeepSpeed")
def optimizer_states_that_are_a_list(written: Written) -> None:
    written.files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"] = [1]


@bad(
    UnsupportedError, MODEL, "key 'block.weight': an object that is not a plain tensor, but may be"
)
def weight_of_another_class(written: Written) -> None:
    written.files[MODEL]["module"]["block.weight"] = zero_checkpoints.LossScaler()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("module", [1]),
        ("param_shapes", {"a": (5, 3)}),
        ("param_shapes", [[("a", (5, 3))]]),
        ("param_shapes", [{3: (5, 3)}]),
        ("buffer_names", "ab"),
        ("shared_params", [("a", "b")]),
        ("shared_params", {"a": 3}),
        ("frozen_param_shapes", [1]),
        ("frozen_param_fragments", {1: torch.ones(1)}),
    ],
)
def test_refuses_damaged_model_states(key: str, value: object, tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero())
    written.files[MODEL][key] = value
    zero_checkpoints.save(written, tmp_path)

    with pytest.raises(CorruptFileError, match=rf"{MODEL}: '{key}'"):
        streammerge.describe(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition_count", "2"),
        ("partition_count", []),
        ("partition_count", [2.0]),
        ("single_partition_of_fp32_groups", {"a": 1}),
        ("param_alignment_paddings", [1, 2]),
        ("param_slice_mappings", [[1]]),
        ("param_slice_mappings", [{"a": 3}]),
    ],
)
def test_refuses_damaged_optimizer_states(key: str, value: object, tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero())
    optimizer(written, 1)[key] = value
    zero_checkpoints.save(written, tmp_path)

    with pytest.raises(CorruptFileError, match=rf"rank_1_mp_rank_00_optim_states.pt: '{key}'"):
        streammerge.describe(tmp_path)


def test_refuses_a_universal_checkpoint(tmp_path: Path) -> None:
    written = zero_checkpoints.build(Zero())
    zero_checkpoints.save(written, tmp_path, "global_step3_universal")
    (tmp_path / "global_step3_universal" / "zero" / "a").mkdir(parents=True)
    for path in tmp_path.glob("*/*optim*"):
        path.unlink()

    with pytest.raises(UnsupportedError, match="zero: a universal checkpoint"):
        streammerge.describe(tmp_path)


def test_any_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Bytes of the pickles and directories are changed at random; the values never are."""
    numbers = random.Random(0)
    outcomes = {"error": 0, "same": 0, "other": 0}
    for name in STORED[:3]:
        copy_stored(name, tmp_path / name)
        expected = load_file(DATA / name / "expected.safetensors")
        for path in sorted((tmp_path / name).glob("*/*.pt")):
            good = path.read_bytes()
            for _ in range(20):
                damaged = bytearray(good)
                damaged[numbers.randrange(len(good))] = numbers.randrange(256)
                path.write_bytes(damaged)
                try:
                    found = merge(tmp_path / name, tmp_path / "merged", raw=True)
                except StreamMergeError:
                    outcomes["error"] += 1
                else:
                    same = found.keys() == expected.keys() and all(
                        torch.equal(value, expected[key]) for key, value in found.items()
                    )
                    outcomes["same" if same else "other"] += 1
                    shutil.rmtree(tmp_path / "merged")
            path.write_bytes(good)
    assert outcomes["error"] > 30
    assert outcomes["same"] > 30


def test_values_are_never_read_for_a_description(tmp_path: Path) -> None:
    """Optimizer files are mostly moments; of these not one byte is read."""
    numel = 1 << 20
    zero_checkpoints.write(Zero(1, 1, groups=({"a": (numel,)},)), tmp_path)
    before = _bytes_read()

    (tensor,) = streammerge.describe(tmp_path).tensors

    assert tensor.nbytes == 4 * numel
    assert _bytes_read() - before < numel


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_pieces_cover_each_parameter_once(tmp_path: Path) -> None:
    """Of every tensor of every stored checkpoint, the chunks tile it."""
    for name in STORED:
        for tensor in streammerge.describe(DATA / name).tensors:
            seen = torch.zeros(tensor.shape, dtype=torch.int32)
            for chunk in tensor.chunks():
                box = chunk.box
                seen[
                    tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                ] += 1
            assert int(seen.min()) == int(seen.max()) == 1, (name, tensor.name)
            assert math.prod(tensor.shape) == seen.numel()


def test_a_folder_without_such_files_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step1")
    (tmp_path / "global_step1").mkdir()

    with pytest.raises(SourceError, match="no checkpoint here or below"):
        streammerge.describe(tmp_path)
