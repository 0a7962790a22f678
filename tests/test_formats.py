"""The layouts: how each is recognised, what it is merged to, what is refused, in which words."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoints
import numpy as np
import pytest
import rank_files
import small_models
import torch
from checkpoints import save_plain, save_ranks, sharded, sharded_tensor
from huggingface_hub import save_torch_state_dict
from hypothesis import given
from hypothesis import strategies as st
from jobs import run_job
from oracles import assert_same_directory, assert_same_tensors, load_directory
from safetensors.torch import load_file, save_file
from small_models import CONFIG, Run, make_run, random_state, read_json, write_json
from strategies import fixed
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import streammerge
from streammerge import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    SourceError,
    StreamMergeError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    formats,
)
from streammerge.arguments import LAYOUT_OPTIONS

ROOT = Path(__file__).resolve().parents[1]
WEIGHT = torch.arange(24.0).view(12, 2)
RANK_FILES = "model_world_size_4_rank_{rank}.pt"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
OLD_FIRST, OLD_SECOND = (f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2))
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


def error_of(*sources: Path, **options: str) -> tuple[type[StreamMergeError], str, str | None]:
    """Class, message and hint of what cannot be described; the message is one line."""
    with pytest.raises(StreamMergeError) as caught:
        streammerge.describe(list(sources), **options)
    assert "\n" not in str(caught.value)
    return type(caught.value), str(caught.value), caught.value.hint


def rank_names(pattern: str, count: int) -> list[str]:
    return [pattern.format(rank=rank, world=count) for rank in range(count)]


def save_as(
    folder: Path, pattern: str, build: Callable[[int], Mapping[str, object]], world_size: int = 4
) -> None:
    """Save rank files under other names."""
    made = folder.parent / "made"
    save_ranks(made, build, world_size=world_size)
    for rank, name in enumerate(rank_names(pattern, world_size)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        checkpoints.rank_file(made, rank, world_size).rename(folder / name)
    shutil.rmtree(made)


def rows(rank: int) -> dict[str, object]:
    """A weight in rows over four ranks and a buffer that all hold."""
    return {"w": sharded(WEIGHT), "scale": torch.tensor(0.5)}


ROWS = {"w": WEIGHT, "scale": torch.tensor(0.5)}


def save_model(
    folder: Path, state: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> None:
    """A model as transformers would save it."""
    state = random_state() if state is None else state
    folder.mkdir(parents=True, exist_ok=True)
    clones = {name: tensor.clone() for name, tensor in state.items()}
    save_torch_state_dict(clones, folder, **options)
    write_json(folder / "config.json", CONFIG)


# --- what a layout is -----------------------------------------------------------------------------


def test_each_layout_has_what_a_layout_has() -> None:
    for layout in formats.FORMATS:
        for text in (layout.NAME, layout.WORD, layout.FILES):
            assert isinstance(text, str)
            assert text.isprintable()
        assert re.fullmatch(r"[a-z][a-z-]*", layout.WORD)
        assert type(layout.TRAINING) is bool
        assert set(layout.OPTIONS) <= set(LAYOUT_OPTIONS)
        given = dict.fromkeys(layout.OPTIONS, "x")
        inspect.signature(layout.matches).bind("path", **given)
        inspect.signature(layout.describe).bind(["path"], **given)
        inspect.signature(layout.matches).bind("path")
        inspect.signature(layout.describe).bind(["path"])
    words = formats.format_words()
    assert words[0] == "auto"
    assert len(set(words)) == len(words) == len({lay.NAME for lay in formats.FORMATS}) + 1


def test_finished_models_come_last() -> None:
    order = [layout.TRAINING for layout in formats.FORMATS]
    assert order == sorted(order, reverse=True)


def test_no_layout_is_found_in_what_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for layout in formats.FORMATS:
        for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
            assert layout.matches(str(path)) is False


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The layout of the page that tells how to add one, added."""
    page = (ROOT / "streammerge" / "formats" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("toy")
    exec(code, module.__dict__)
    monkeypatch.setattr(formats, "FORMATS", (module, *formats.FORMATS))
    return module


def save_ranges(folder: Path, name: str, values: Sequence[float], *bounds: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for begin, end in zip((0, *bounds), (*bounds, len(values)), strict=True):
        np.array(values[begin:end], "<f4").tofile(folder / f"{name}.{begin}-{end}.f32")


@pytest.mark.parametrize("options", [(), ("--format", "ranges")])
def test_a_layout_of_ones_own(
    toy: ModuleType, options: Sequence[str], tmp_path: Path, run: Run
) -> None:
    source, target = tmp_path / "run" / "step_3", tmp_path / "merged"
    save_ranges(source, "norm.weight", range(9), 4, 7)
    save_ranges(source, "norm.bias", [2.5])
    expected = {"norm.bias": torch.tensor([2.5]), "norm.weight": torch.arange(9.0)}

    shown = run("inspect", tmp_path / "run", *options, "--json").json
    assert (shown["root"], shown["format"]) == (str(source), "ranges")
    assert {t["name"]: t["shape"] for t in shown["tensors"]} == {
        "norm.weight": [9],
        "norm.bias": [1],
    }
    run("merge", tmp_path / "run", target, *options)
    assert_same_tensors(load_directory(target), expected)
    run("merge", tmp_path / "run", target, *options, "--overwrite", "--dtype", "bfloat16")
    assert_same_tensors(load_directory(target), {k: v.bfloat16() for k, v in expected.items()})


def test_a_layout_of_ones_own_from_several_nodes(toy: ModuleType, tmp_path: Path, run: Run) -> None:
    save_ranges(tmp_path / "a", "w", range(6), 4)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "w.4-6.f32").rename(tmp_path / "b" / "w.4-6.f32")
    run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "merged")
    assert_same_tensors(load_directory(tmp_path / "merged"), {"w": torch.arange(6.0)})
    (tmp_path / "out").mkdir()
    refused = small_models.refuse(run, tmp_path / "out" / "merged", tmp_path / "b")
    assert "2 of" in refused


def test_the_options_of_a_layout_of_ones_own(
    toy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    """Both of its functions get what was given, and only that."""
    got = []

    def matches(path: str, *, tag: str = "default") -> bool:
        got.append(tag)
        return bool(plain_matches(path))

    def describe(paths: Sequence[str], *, tag: str = "default") -> streammerge.Checkpoint:
        got.append(tag)
        return plain_describe(paths)

    plain_matches, plain_describe = toy.matches, toy.describe
    for name, value in (("OPTIONS", ("tag",)), ("matches", matches), ("describe", describe)):
        monkeypatch.setattr(toy, name, value, raising=True)
    save_ranges(tmp_path / "source", "w", range(3))
    run("inspect", tmp_path / "source", "--tag", "step_3")
    assert got == ["step_3", "step_3"]
    run("inspect", tmp_path / "source")
    assert got[2:] == ["default", "default"]


def test_an_optimizer_is_no_checkpoint(toy: ModuleType, tmp_path: Path) -> None:
    """Whatever its format: accelerate saves it in that of the weights beside it."""
    for name in ("optimizer_0", "weights_0"):
        save_ranges(tmp_path / "checkpoint-5" / name, "w", range(3))
    found = streammerge.describe(tmp_path)
    assert found.root == str(tmp_path / "checkpoint-5" / "weights_0")
    assert found.left_out == ()  # what is beside the folder that was found is not looked for
    found = streammerge.describe(tmp_path / "checkpoint-5")
    left = [(os.path.basename(entry.path), entry.nbytes) for entry in found.left_out]
    assert left == [("optimizer_0", 12)]
    assert streammerge.describe(tmp_path / "checkpoint-5" / "optimizer_0").nbytes == 12


# --- options --------------------------------------------------------------------------------------


def test_an_unknown_layout(tmp_path: Path, run: Run) -> None:
    save_plain(tmp_path, [ROWS])
    for command in (("merge", tmp_path, tmp_path / "merged"), ("inspect", tmp_path)):
        done = run(*command, "--format", "zip", code=2)
        assert "invalid choice: 'zip' (choose from" in done.err
    kind, message, hint = error_of(tmp_path, format="zip")
    assert (kind, message) == (UsageError, "unknown layout 'zip'")
    assert hint is not None
    assert hint.startswith("one of auto, fsdp, bin")


def test_an_option_that_the_layout_does_not_take(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert error_of(tmp_path, format="hf", pattern="x-{rank}.pt") == (
        UsageError,
        "--pattern goes with FSDP rank files (--format fsdp), not with --format hf",
        None,
    )


def test_an_option_that_no_layout_takes(tmp_path: Path) -> None:
    save_plain(tmp_path, [ROWS])
    assert error_of(tmp_path, colour="red")[:2] == (UsageError, "--colour goes with no layout")


def test_an_option_of_another_layout_than_is_there(tmp_path: Path, run: Run) -> None:
    save_model(tmp_path / "model")
    kind, message, hint = error_of(tmp_path, pattern="x-{rank}.pt")
    assert kind is UsageError
    assert message == (
        f"{tmp_path}/model: Hugging Face safetensors, nothing that fits --pattern 'x-{{rank}}.pt': "
        "--pattern goes with FSDP rank files (--format fsdp)"
    )
    assert hint is None
    done = run("inspect", tmp_path, "--pattern", "x-{rank}.pt", code=2)
    assert done.err == f"streammerge: error: {message}\n"


@pytest.mark.parametrize("word", ["fsdp", "bin", "dcp-safetensors", "deepspeed", "hf", "hf-bin"])
def test_a_layout_that_is_not_there(word: str, tmp_path: Path, run: Run) -> None:
    """The layout itself says what it misses."""
    (tmp_path / "source" / "empty").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "merged"
    refused = small_models.refuse(run, target, tmp_path / "source", "--format", word)
    assert refused.startswith(f"streammerge: error: {tmp_path}/source: no ")


def test_nothing_at_all(tmp_path: Path) -> None:
    kind, message, hint = error_of(tmp_path)
    assert kind is CheckpointNotFoundError
    assert message.startswith(f"{tmp_path}: no checkpoint here or below (looked for ")
    for layout in formats.FORMATS:
        assert layout.FILES in message
    assert hint is None


def test_files_that_could_be_of_ranks(tmp_path: Path) -> None:
    torch.save(ROWS, tmp_path / "consolidated.00.pth")
    kind, _, hint = error_of(tmp_path)
    assert kind is CheckpointNotFoundError
    assert hint == "if each rank saved a file of its own: --pattern NAME, with {rank} for the rank"


# --- which checkpoint -----------------------------------------------------------------------------


def test_a_training_comes_before_a_model_beside_it(tmp_path: Path, run: Run) -> None:
    save_plain(tmp_path / "run" / "step_1" / "actor", [{"w": WEIGHT}] * 2)
    save_model(tmp_path / "run" / "base")
    save_model(tmp_path / "run" / "step_1" / "actor" / "huggingface")
    for format in ("auto", "fsdp"):
        found = streammerge.describe(tmp_path / "run", format=format)
        assert found.root == str(tmp_path / "run" / "step_1" / "actor")
    kind, message, hint = error_of(tmp_path / "run", format="hf")
    assert kind is CheckpointNotFoundError
    assert message.startswith(
        f"{tmp_path}/run: 2 checkpoints to choose from: {tmp_path}/run/base, "
    )
    assert hint == "give one of them as the source"
    shown = run("inspect", tmp_path / "run" / "step_1", "--format", "hf").out
    assert shown.startswith(f"{tmp_path}/run/step_1/actor/huggingface: Hugging Face safetensors")


def test_in_one_directory_the_training_counts(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_plain(tmp_path, [{"w": WEIGHT}] * 2)
    assert streammerge.describe(tmp_path).format == "FSDP rank files"
    assert streammerge.describe(tmp_path, format="hf").format == "Hugging Face safetensors"


def test_a_model_above_checkpoints_of_its_training(tmp_path: Path) -> None:
    """Nobody knows which is meant, so nothing is chosen."""
    save_model(tmp_path)
    save_plain(tmp_path / "checkpoint-5", [{"w": WEIGHT}] * 2)
    assert error_of(tmp_path) == (
        CheckpointNotFoundError,
        f"{tmp_path}: 2 checkpoints to choose from: {tmp_path} (Hugging Face safetensors), "
        f"{tmp_path}/checkpoint-5 (FSDP rank files)",
        "give one of them as the source, or --format hf or --format fsdp",
    )
    assert streammerge.describe(tmp_path, format="hf").root == str(tmp_path)
    assert streammerge.describe(tmp_path, format="fsdp").root == str(tmp_path / "checkpoint-5")


def test_trainings_of_two_layouts(tmp_path: Path) -> None:
    save_plain(tmp_path / "a", [{"w": WEIGHT}] * 2)
    (tmp_path / "b").mkdir()
    torch.save({"w": WEIGHT}, tmp_path / "b" / "pytorch_model_fsdp_0_rank0.bin")
    save_model(tmp_path / "c")
    assert error_of(tmp_path) == (
        CheckpointNotFoundError,
        f"{tmp_path}: 2 checkpoints to choose from: {tmp_path}/a (FSDP rank files), "
        f"{tmp_path}/b (accelerate FSDP files)",
        "give one of them as the source, or --format fsdp or --format bin",
    )


def close(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As it is for all but root, whom nothing stops."""

    monkeypatch.setattr(os, "access", lambda path, *_, **__: str(path) != str(folder))


def test_a_folder_that_cannot_be_looked_into(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may hold the checkpoint that is meant, so no other is taken instead."""
    save_plain(tmp_path / "step_1", [{"w": WEIGHT}] * 2)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "step_2").mkdir()
    close(monkeypatch, tmp_path / "lost+found")
    assert streammerge.describe(tmp_path).root == str(tmp_path / "step_1")
    close(monkeypatch, tmp_path / "step_2")
    assert error_of(tmp_path) == (
        SourceError,
        f"{tmp_path}/step_2: Permission denied, and a checkpoint may be in it",
        "give the directory of the checkpoint itself",
    )
    assert streammerge.describe(tmp_path / "step_1").root == str(tmp_path / "step_1")
    kind, message, _ = error_of(tmp_path / "step_2")
    assert (kind, message) == (SourceError, f"{tmp_path}/step_2: Permission denied")


def test_a_closed_folder_in_a_finished_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model(tmp_path)
    (tmp_path / "logs").mkdir()
    close(monkeypatch, tmp_path / "logs")
    assert streammerge.describe(tmp_path).root == str(tmp_path)


def test_the_only_checkpoint_is_the_target(tmp_path: Path) -> None:
    save_plain(tmp_path / "step_1", [{"w": WEIGHT}] * 2)
    with pytest.raises(CheckpointNotFoundError) as caught:
        streammerge.describe(tmp_path, target=tmp_path / "step_1")
    assert str(caught.value) == (
        f"{tmp_path}: no checkpoint here or below but {tmp_path}/step_1, which is the target"
    )
    assert caught.value.hint == "give another target"


def test_many_to_choose_from(tmp_path: Path) -> None:
    for step in range(30):
        save_model(tmp_path / f"step_{step:02}", {"w": WEIGHT})
    _, message, _ = error_of(tmp_path)
    assert message.startswith(f"{tmp_path}: 30 checkpoints to choose from: {tmp_path}/step_00, ")
    assert message.endswith(f"{tmp_path}/step_19 and 10 more")


def test_models_of_two_kinds_in_two_sources(tmp_path: Path) -> None:
    save_plain(tmp_path / "a", [{"w": WEIGHT}] * 2)
    save_model(tmp_path / "b")
    kind, message, _ = error_of(tmp_path / "a", tmp_path / "b")
    assert kind is CheckpointNotFoundError
    assert message == (
        "the sources hold different layouts: FSDP rank files, Hugging Face safetensors"
    )


def test_two_models_are_no_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_model(tmp_path / name)
    kind, message, _ = error_of(tmp_path / "a", tmp_path / "b")
    assert (kind, message) == (UsageError, "expected one Hugging Face directory, not 2")


def test_stray_safetensors_are_no_layout(tmp_path: Path) -> None:
    """Neither under the name of a model's file, without a config or an index."""
    save_file({"w": WEIGHT}, tmp_path / "expected.safetensors")
    save_file({"w": WEIGHT}, tmp_path / SINGLE)
    assert error_of(tmp_path)[1].startswith(f"{tmp_path}: no checkpoint here or below")
    assert [t.name for t in streammerge.describe(tmp_path, format="hf").tensors] == ["w"]


def test_the_target_is_no_source(tmp_path: Path, run: Run) -> None:
    """Nor is what is staged beside it."""
    save_model(tmp_path / "run" / "model")
    target = tmp_path / "run" / "merged"
    for options in ((), ("--overwrite",), ("--overwrite", "--dry-run")):
        run("merge", tmp_path / "run", target, *options)
    shutil.copytree(target, tmp_path / "run" / ".other.streammerge" / "result")
    run("merge", tmp_path / "run", target, "--overwrite")
    assert "2 checkpoints to choose from" in error_of(tmp_path / "run")[1]


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    save_plain(tmp_path / "step", [{"w": WEIGHT}] * 2)
    (tmp_path / "step" / "huggingface").mkdir()
    _, message, hint = error_of(tmp_path / "step" / "huggingface")
    assert message.startswith(f"{tmp_path}/step/huggingface: no checkpoint here or below")
    assert hint == f"the FSDP rank files are in {tmp_path}/step; give that directory"


# --- accelerate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints that accelerate wrote, one per case."""
    root = tmp_path_factory.mktemp("accelerate")
    run_job("accelerate_job.py", root)
    return root


@pytest.mark.parametrize("case", ["fsdp2_sharded", "fsdp2_full", "fsdp1_sharded"])
def test_accelerate(case: str, accelerate: Path, tmp_path: Path, run: Run) -> None:
    expected = load_file(accelerate / f"{case}.reference.safetensors")
    run("merge", accelerate / case, tmp_path / "merged", "--replicas", "check-all")
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)
    shown = run("inspect", accelerate / case, "--json").json
    assert shown["format"] == "accelerate FSDP files"
    assert shown["world_size"] == (1 if case == "fsdp2_full" else 4)


def test_accelerate_says_what_is_left_out(accelerate: Path, run: Run) -> None:
    source = accelerate / "fsdp2_sharded"
    paths = [source / f"optimizer_0_rank{rank}.bin" for rank in range(4)]
    left = run("inspect", source, "--json").json["left_out"]
    assert left == [{"path": str(p), "bytes": p.stat().st_size} for p in paths]
    shown = run("inspect", source).out.splitlines()[-2]
    assert shown.startswith("left out, state of the training: optimizer_0_rank0.bin, ")
    assert " and 1 more (" in shown


def test_an_optimizer_in_a_folder_of_its_own(tmp_path: Path, run: Run) -> None:
    """As accelerate keeps it beside a folder of weights, which is found below the source."""
    source = tmp_path / "checkpoint-5"
    save_plain(source / "weights", [{"w": WEIGHT}] * 2)
    (source / "optimizer_0").mkdir()
    (source / "optimizer_0" / "__0_0.distcp").write_bytes(bytes(300))
    (source / "optimizer_0" / ".metadata").write_bytes(bytes(20))
    (source / "weights" / "extra_state_world_size_2_rank_0.pt").write_bytes(bytes(7))
    shown = run("inspect", source, "--json").json["left_out"]
    assert shown == [
        {"path": str(source / "optimizer_0"), "bytes": 320},
        {"path": str(source / "weights" / "extra_state_world_size_2_rank_0.pt"), "bytes": 7},
    ]
    assert run("inspect", source).out.splitlines()[-2] == (
        "left out, state of the training: optimizer_0, extra_state_world_size_2_rank_0.pt (327 B)"
    )
    inner = run("inspect", source / "weights" / "..", "--json").json["left_out"]
    assert len(inner) == 2


def test_accelerate_with_two_models(accelerate: Path, tmp_path: Path, run: Run) -> None:
    source = accelerate / "fsdp2_two_models"
    kind, message, hint = error_of(source)
    assert kind is InconsistentRanksError
    assert message == (
        f"{source}: files of 2 checkpoints: pytorch_model_fsdp_0_rank{{rank}}.bin, "
        "pytorch_model_fsdp_1_rank{rank}.bin"
    )
    assert hint == "choose one: --format fsdp --pattern 'pytorch_model_fsdp_0_rank{rank}.bin'"
    options = ("--format", "fsdp", "--pattern", "pytorch_model_fsdp_1_rank{rank}.bin")
    run("merge", source, tmp_path / "merged", *options)
    expected = load_file(accelerate / "fsdp2_two_models.reference.safetensors")
    assert bool((expected["head.weight"] == 1).all())
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)


def test_accelerate_with_flat_parameters(accelerate: Path) -> None:
    source = accelerate / "fsdp1_local"
    kind, message, hint = error_of(source)
    assert kind is UnsupportedError
    assert message.startswith(f"{source}/pytorch_model_fsdp_rank0.bin: key 'block._flat_param' is ")
    assert "flat parameter of FSDP1 (LOCAL_STATE_DICT)" in message
    assert hint == "save with StateDictType.SHARDED_STATE_DICT"


@pytest.mark.parametrize("case", ["fsdp2_sharded", "fsdp1_sharded"])
@pytest.mark.parametrize(("missing", "listed"), [((3,), "rank 3"), ((1, 3), "ranks 1, 3")])
def test_accelerate_without_ranks(
    case: str, missing: Sequence[int], listed: str, accelerate: Path, tmp_path: Path
) -> None:
    """How many there were is nowhere in the names."""
    source = tmp_path / "source"
    shutil.copytree(accelerate / case, source)
    for rank in missing:
        (source / f"pytorch_model_fsdp_0_rank{rank}.bin").unlink()
    kind, message, hint = error_of(source)
    assert kind is CheckpointNotFoundError
    if missing == (3,):
        assert message.startswith(f"{source}: 1 of 4 rank files missing: rank 3 ({source}/pytorch")
        assert message.endswith(".bin names rank 3)")
    else:
        # Of the last, nothing is known before the others are read.
        last = source / "pytorch_model_fsdp_0_rank2.bin"
        assert message == (f"{source}: 1 of 3 rank files missing: rank 1 (the last is {last})")
    assert hint == "if each node kept its own files, give all their directories as sources"


def test_accelerate_on_two_nodes(accelerate: Path, tmp_path: Path, run: Run) -> None:
    for node in range(2):
        for rank in (2 * node, 2 * node + 1):
            name = f"pytorch_model_fsdp_0_rank{rank}.bin"
            (tmp_path / f"node{node}").mkdir(exist_ok=True)
            shutil.copy(accelerate / "fsdp2_sharded" / name, tmp_path / f"node{node}" / name)
    run("merge", tmp_path / "node0", tmp_path / "node1", tmp_path / "merged")
    expected = load_file(accelerate / "fsdp2_sharded.reference.safetensors")
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)


def test_accelerate_takes_the_config_beside_the_files(tmp_path: Path, run: Run) -> None:
    source = tmp_path / "checkpoint-5"
    state = random_state()
    pattern = "pytorch_model_fsdp_0_rank{rank}.bin"
    save_as(source, pattern, lambda rank: {k: sharded(v) for k, v in state.items()})
    write_json(source / "config.json", CONFIG)
    write_json(source / "trainer_state.json", {})
    for name in (
        "random_states_0.pkl",
        "optimizer_0_rank0.bin",
        "scheduler.bin",
        "rng_state_0.pth",
    ):
        (source / name).touch()
    (source / "tokenizer.json").write_text("{}")
    done = run("merge", source, tmp_path / "merged", "--json").json
    assert done["files"] == [SINGLE, "config.json", "tokenizer.json"]
    assert not [name for name in done["left_out"] if name.startswith("pytorch_model")]
    assert_same_tensors(load_directory(tmp_path / "merged"), state)
    shown = run("inspect", source, "--json").json
    assert sorted(os.path.basename(entry["path"]) for entry in shown["left_out"]) == [
        "optimizer_0_rank0.bin",
        "random_states_0.pkl",
        "rng_state_0.pth",
        "scheduler.bin",
        "trainer_state.json",
    ]


# --- rank files of other names --------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "model_state-{rank}.pt",
        "model.rank_{rank}.pth",
        "rank_{rank}/model_state.pt",
        "{rank}-of-{world}.ckpt",
        "world_{world}/shard[{rank}]+.bin",
        "weights/{rank}",
    ],
)
def test_a_pattern(pattern: str, tmp_path: Path, run: Run) -> None:
    save_as(tmp_path / "run" / "step_5", pattern, rows)
    save_model(tmp_path / "run" / "step_5" / "base")
    run("merge", tmp_path / "run", tmp_path / "merged", "--pattern", pattern, "--raw")
    assert_same_tensors(load_directory(tmp_path / "merged"), ROWS)
    report = streammerge.merge(
        tmp_path / "run", tmp_path / "again", options={"pattern": pattern}, raw=True
    )
    assert report.tensors == 2


def test_a_sharded_tensor_of_which_no_rank_holds_a_shard(tmp_path: Path, run: Run) -> None:
    listed = [((0, 0), (0, 2), rank) for rank in range(4)]
    empty = torch.ones(0, 2)
    save_ranks(tmp_path / "source", lambda _: {"w": sharded_tensor(empty, listed, []), "v": WEIGHT})
    run("merge", tmp_path / "source", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert_same_tensors(merged, {"w": empty, "v": WEIGHT})


def test_a_pattern_of_twelve_ranks(tmp_path: Path) -> None:
    """Which are not in the order of their names, with zeros before the number or without."""
    for text in ("{rank}.pt", "0{rank}.pt"):
        folder = tmp_path / text[:1]
        save_as(folder, text, lambda rank: {"w": sharded(WEIGHT, sizes=(12,))}, 12)
        found = streammerge.describe(folder, pattern="{rank}.pt")
        paths = [str(folder / name) for name in rank_names(text, 12)]
        assert [file.path for file in found.files] == paths


def test_a_pattern_of_one_file(tmp_path: Path, run: Run) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"model": ROWS, "step": 7}, source / "consolidated.pt")
    run("merge", source, tmp_path / "merged", "--pattern", "consolidated.pt")
    assert_same_tensors(load_directory(tmp_path / "merged"), ROWS)


def test_a_pattern_may_not_lead_elsewhere(tmp_path: Path) -> None:
    save_as(tmp_path / "a", "{rank}.pt", rows)
    (tmp_path / "b").mkdir()
    for pattern in ("../a/{rank}.pt", "/a/{rank}.pt", f"{tmp_path}/a/{{rank}}.pt", "", "./{rank}"):
        kind, message, _ = error_of(tmp_path / "b", pattern=pattern)
        assert kind is UsageError
        assert message == (f"pattern {pattern!r}: expected a path below the source directory")


@pytest.mark.parametrize(
    ("pattern", "problem", "hint"),
    [
        ("{step}/{rank}.pt", "unknown placeholder {step}", "there are {rank} and {world}"),
        ("{}.pt", "unknown placeholder {}", "there are {rank} and {world}"),
        ("{rank}/{rank}.pt", "{rank} twice", None),
        ("{world}.pt", "{world} without {rank}", None),
    ],
)
def test_a_pattern_that_is_none(
    pattern: str, problem: str, hint: str | None, tmp_path: Path
) -> None:
    expected = (UsageError, f"pattern {pattern!r}: {problem}", hint)
    assert error_of(tmp_path, pattern=pattern) == expected


# --- Hugging Face directories ---------------------------------------------------------------------


def tiny(**options: Any) -> Qwen2ForCausalLM:
    names = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    names |= {"num_attention_heads", "num_key_value_heads", "max_position_embeddings"}
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**{n: CONFIG[n] for n in names}, **options))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_size", ["50GB", "3KB"])
def test_what_transformers_saved(tied: bool, max_shard_size: str, tmp_path: Path, run: Run) -> None:
    source, target = tmp_path / "model", tmp_path / "merged"
    model = tiny(tie_word_embeddings=tied)
    model.save_pretrained(source, max_shard_size=max_shard_size)
    (source / "tokenizer.json").write_bytes(b"\xff\r\n")
    assert (source / INDEX).exists() == (max_shard_size == "3KB")
    expected = load_directory(source)
    done = run("merge", source, target, "--max-shard-size", "2KB", "--json").json
    assert done["left_out"] == []
    assert_same_tensors(load_directory(target), expected)
    assert (target / "tokenizer.json").read_bytes() == b"\xff\r\n"
    assert read_json(target / "generation_config.json") == read_json(
        source / "generation_config.json"
    )
    opened = small_models.open_model(target)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    assert (len(expected) == len(model.state_dict())) == (not tied)
    run("check", target)

    # One file is in the order of the format, wherever its tensors came from.
    for number, folder in enumerate((source, target)):
        run("merge", folder, tmp_path / f"one{number}")
    assert checkpoints.digests(tmp_path / "one0") == checkpoints.digests(tmp_path / "one1")


@pytest.mark.parametrize("max_shard_size", ["5GB", "1KB", "300"])
def test_files_are_those_of_the_reference(max_shard_size: str, tmp_path: Path, run: Run) -> None:
    """The tensors stay in the order of the files they come from."""
    state = random_state(torch.bfloat16)
    save_model(tmp_path / "model", state, max_shard_size="2KB")
    weight_map = read_json(tmp_path / "model" / INDEX)["weight_map"]
    stored = [t.name for t in streammerge.describe(tmp_path / "model").tensors]
    assert sorted(stored, key=lambda name: weight_map[name]) == stored
    for options in ((), ("--raw",)):
        target = tmp_path / f"merged{len(options)}"
        limit = ("--max-shard-size", max_shard_size)
        run("merge", tmp_path / "model", target, *limit, *options)
        expected = {name: state[name] for name in stored}
        size = int(max_shard_size) if max_shard_size.isdigit() else max_shard_size
        assert_same_directory(target, expected, size)
        same = read_json(target / "config.json") == CONFIG
        assert same == bool(options)  # else it says that the weights are bfloat16


def test_a_model_is_cast(tmp_path: Path, run: Run) -> None:
    state = random_state()
    save_model(tmp_path / "model", state)
    options = ("--dtype", "float16", "--keep-dtype", "*norm*")
    run("merge", tmp_path / "model", tmp_path / "merged", *options)
    expected = {n: t if "norm" in n else t.half() for n, t in state.items()}
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)
    small_models.open_model(tmp_path / "merged")


def test_a_model_is_renamed(tmp_path: Path, run: Run) -> None:
    state = random_state()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    save_model(tmp_path / "model", wrapped, max_shard_size="2KB")
    run("merge", tmp_path / "model", tmp_path / "merged")
    assert_same_tensors(load_directory(tmp_path / "merged"), state)
    run("merge", tmp_path / "model", tmp_path / "raw", "--raw")
    assert_same_tensors(load_directory(tmp_path / "raw"), wrapped)


def test_a_model_stays_quantized(tmp_path: Path, run: Run) -> None:
    state = random_state()
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_model(tmp_path / "model", state)
    config = CONFIG | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    write_json(tmp_path / "model" / "config.json", config)
    run("merge", tmp_path / "model", tmp_path / "merged")
    assert_same_tensors(load_directory(tmp_path / "merged"), state)
    assert read_json(tmp_path / "merged" / "config.json") == config


def test_checkpoints_beside_a_model_are_not_copied(tmp_path: Path, run: Run) -> None:
    """A trainer keeps them in the folder of the finished model."""
    source = tmp_path / "model"
    save_model(source)
    for name in ("checkpoint-5", "global_step3", "runs"):
        write_json(source / name / "config.json", {})
    write_json(source / "1_Pooling" / "config.json", {})
    save_file({"v_head.weight": WEIGHT}, source / "value_head.safetensors")
    (source / "optimizer.bin").touch()
    done = run("merge", source, tmp_path / "merged", "--json").json
    assert done["files"] == [SINGLE, "config.json", "1_Pooling/config.json"]
    left = ["checkpoint-5/", "global_step3/", "runs/", "optimizer.bin", "value_head.safetensors"]
    assert done["left_out"] == left
    shown = run("inspect", source, "--json").json["left_out"]
    assert shown == [{"path": str(source / "optimizer.bin"), "bytes": 0}]


def test_a_target_inside_a_model(tmp_path: Path, run: Run) -> None:
    save_model(tmp_path / "model")
    before = checkpoints.snapshot(tmp_path)
    for target, part in (
        (tmp_path / "model", "the target is a folder that is read"),
        (tmp_path, "lies above"),
        (tmp_path / "model" / "merged", "whose files are copied"),
    ):
        done = run("merge", tmp_path / "model", target, "--overwrite", code=1)
        assert part in done.err
    assert checkpoints.snapshot(tmp_path) == before


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, run: Run) -> None:
    """Where every file is a link to a blob."""
    save_model(tmp_path / "blobs", max_shard_size="2KB")
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    done = run("merge", tmp_path / "models--me--mine", tmp_path / "merged", "--json").json
    assert done["left_out"] == []
    assert_same_tensors(load_directory(tmp_path / "merged"), random_state())
    assert not any(path.is_symlink() for path in (tmp_path / "merged").iterdir())


def test_a_model_is_copied_without_torch(tmp_path: Path) -> None:
    save_model(tmp_path / "model", max_shard_size="2KB")
    save_model(tmp_path / "old", safe_serialization=False)
    code = (
        "import sys; from streammerge.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 99 * any(n in sys.modules for n in ('torch', 'numpy', 'safetensors')))"
    )
    for name in ("model", "old"):
        command = ["merge", str(tmp_path / name), str(tmp_path / f"merged_{name}"), "--quiet"]
        subprocess.run([sys.executable, "-c", code, *command], check=True, cwd=ROOT, timeout=60)
        assert_same_tensors(load_directory(tmp_path / f"merged_{name}"), random_state())


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@given(
    st.lists(
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
)
@fixed(40)
def test_any_model_is_split_anew(
    parts: list[tuple[torch.dtype, list[int]]], before: int, after: int, safe: bool
) -> None:
    """From files of one limit to those of another, as the reference libraries write them."""
    state = {
        f"layer.{index}": rank_files.random_bits(dtype, shape, index)
        for index, (dtype, shape) in enumerate(parts)
    }
    with checkpoints.scratch() as folder:
        save_model(folder / "model", state, max_shard_size=before, safe_serialization=safe)
        names = [tensor.name for tensor in streammerge.describe(folder / "model").tensors]
        merged = folder / "merged"
        streammerge.merge(folder / "model", merged, raw=True, max_shard_size=after)
        assert_same_directory(merged, {name: state[name] for name in names}, after)


@pytest.mark.parametrize("max_shard_size", ["5GB", "2KB"])
def test_what_torch_saved(max_shard_size: str, tmp_path: Path, run: Run) -> None:
    source, target = tmp_path / "model", tmp_path / "merged"
    state = random_state(torch.float16)
    save_model(source, state, max_shard_size=max_shard_size, safe_serialization=False)
    assert (source / BIN_INDEX).exists() == (max_shard_size == "2KB")
    assert not list(source.glob("*.safetensors"))
    done = run("merge", source, target, "--max-shard-size", "4KB", "--json").json
    assert done["left_out"] == []
    assert_same_tensors(load_directory(target), state)
    small_models.open_model(target)
    shown = run("inspect", source, "--json").json
    assert (shown["format"], shown["world_size"]) == ("Hugging Face torch files", 1)
    assert [os.path.basename(file["path"]) for file in shown["files"]] == sorted(
        path.name for path in source.glob("*.bin")
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_what_old_transformers_saved(legacy: bool, tmp_path: Path, run: Run) -> None:
    """A state dict as modules make it: with metadata, ties in one storage, transposed weights."""
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=8, n_head=2, n_layer=1, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    model = GPT2LMHeadModel(config)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    state["transformer.h.0.attn.c_attn.weight"] = (
        state["transformer.h.0.attn.c_attn.weight"].T.contiguous().T
    )
    source = tmp_path / "model"
    config.save_pretrained(source)
    torch.save(state, source / BIN, _use_new_zipfile_serialization=not legacy)
    run("merge", source, tmp_path / "merged")
    found = load_directory(tmp_path / "merged")
    assert "lm_head.weight" not in found
    assert_same_tensors(found, {n: t for n, t in state.items() if n != "lm_head.weight"})
    opened = small_models.open_model(tmp_path / "merged", GPT2LMHeadModel)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name


def test_safetensors_come_before_torch_files(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": WEIGHT}, safe_serialization=False)
    save_model(tmp_path, {"w": WEIGHT + 1})
    assert streammerge.describe(tmp_path).format == "Hugging Face safetensors"
    assert streammerge.describe(tmp_path, format="hf-bin").format == "Hugging Face torch files"


# --- bad input ------------------------------------------------------------------------------------

BAD: list[Any] = []
Make = Callable[[Path], object]


def bad(
    error: type[StreamMergeError], *parts: str, hint: str | None = None, **options: str
) -> Callable[[Make], Make]:
    """Enter a maker of a bad checkpoint into the table, see `test_bad_input.bad`.

    Args:
        error: exact class.
        parts: what the message must hold; ``{source}`` is the directory.
        hint: what the hint must hold; None if there must be no hint.
        options: how the checkpoint is described.
    """

    def enter(make: Make) -> Make:
        BAD.append(pytest.param(make, error, parts, hint, options, id=make.__name__))
        return make

    return enter


@pytest.mark.parametrize(("make", "error", "parts", "hint", "options"), BAD)
def test_refuses_a_bad_checkpoint(
    make: Make,
    error: type[StreamMergeError],
    parts: Sequence[str],
    hint: str | None,
    options: Mapping[str, str],
    tmp_path: Path,
    run: Run,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make(source)

    kind, message, said = error_of(source, **options)
    assert kind is error
    for part in parts:
        assert part.replace("{source}", str(source)) in message
    assert said is None if hint is None else hint in (said or "")
    (tmp_path / "out").mkdir()
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    code = 2 if error is UsageError else 1
    lines = small_models.refuse(run, tmp_path / "out" / "merged", source, *arguments, code=code)
    assert lines == f"streammerge: error: {message}\n" + (f"hint: {said}\n" if said else "")


NODES = "if each node kept its own files"
ACCELERATE = "pytorch_model_fsdp_0_rank{rank}.bin"


def bins(source: Path, *ranks: int, build: Callable[[int], Mapping[str, object]] = rows) -> None:
    """Some of the files of four ranks."""
    save_as(source, ACCELERATE, build)
    for rank in set(range(4)) - set(ranks):
        (source / ACCELERATE.format(rank=rank)).unlink()


@bad(
    CheckpointNotFoundError,
    "{source}: 3 of 4 rank files missing: ranks 1-3 ({source}/pytorch_model_fsdp_0_rank0.bin names "
    "rank 3)",
    hint=NODES,
)
def rank_0_alone(source: Path) -> None:
    bins(source, 0)


@bad(
    CheckpointNotFoundError,
    "{source}: 2 of 4 rank files missing: ranks 0-1",
    "the last is {source}/pytorch_model_fsdp_0_rank3.bin",
    hint=NODES,
)
def the_files_of_the_second_node(source: Path) -> None:
    bins(source, 2, 3)


@bad(CheckpointNotFoundError, "1 of 4 rank files missing: rank 3", "rank0.bin", hint=NODES)
def a_sharded_tensor_without_its_last_shard(source: Path) -> None:
    listed = [((3 * rank, 0), (3, 2), rank) for rank in range(4)]
    bins(source, 0, 1, 2, build=lambda rank: {"w": sharded_tensor(WEIGHT, listed)})


@bad(
    InconsistentRanksError,
    "key 'w': placements (Shard(0)) on a mesh 4 here",
    "(Shard(0)) on a mesh 2 in {source}/pytorch_model_fsdp_0_rank0.bin",
)
def files_of_an_earlier_larger_job(source: Path) -> None:
    bins(source, 2, 3)
    save_as(source, ACCELERATE, lambda rank: {"w": sharded(WEIGHT, sizes=(2,))}, 2)


@bad(
    InconsistentRanksError,
    "{source}: files of 2 checkpoints: pytorch_model_fsdp.bin, ",
    hint="--pattern 'pytorch_model_fsdp.bin'",
)
def all_of_it_and_parts_of_it(source: Path) -> None:
    bins(source, 0, 1, 2, 3)
    torch.save(ROWS, source / "pytorch_model_fsdp.bin")


@bad(
    InconsistentRanksError,
    "{source}/pytorch_model_fsdp_0_rank1.bin",
    "name says rank 1",
    "rank 2 wrote it",
    hint="renamed",
)
def renamed_files_of_accelerate(source: Path) -> None:
    bins(source, 0, 1, 2, 3)
    shutil.copy(source / ACCELERATE.format(rank=2), source / ACCELERATE.format(rank=1))


@bad(
    InconsistentRanksError,
    "rank 1 twice: {source}/pytorch_model_fsdp_0_rank01.bin and ",
    "{source}/pytorch_model_fsdp_0_rank1.bin",
)
def a_rank_under_two_names(source: Path) -> None:
    bins(source, 0, 1, 2, 3)
    shutil.copy(source / ACCELERATE.format(rank=1), source / ACCELERATE.format(rank="01"))


@bad(CorruptFileError, "{source}/pytorch_model_fsdp_0_rank2.bin", "empty (0 bytes)")
def an_empty_file_of_accelerate(source: Path) -> None:
    bins(source, 0, 1, 2, 3)
    (source / ACCELERATE.format(rank=2)).write_bytes(b"")


@bad(UnsafePickleError, "{source}/pytorch_model_fsdp_0_rank0.bin", "posix.system")
def a_hostile_file_of_accelerate(source: Path) -> None:
    torch.save({"w": checkpoints.calling(os.system, "false")}, source / ACCELERATE.format(rank=0))


@bad(UnsupportedError, "{source}/pytorch_model_fsdp_0_rank0.bin", "a ShardedTensor of 5,000 shards")
def more_shards_than_any_job_has(source: Path) -> None:
    listed = [((0, 0), (0, 2), rank) for rank in range(5000)]
    save_as(source, ACCELERATE, lambda rank: {"w": sharded_tensor(WEIGHT, listed, [])}, 1)


@bad(
    CheckpointNotFoundError,
    "{source}: 9223372036854775800 of",
    "ranks 1-9223372036854775800",
    hint=NODES,
)
def a_shard_of_a_rank_beyond_measure(source: Path) -> None:
    listed = [((0, 0), (12, 2), 2**63 - 8)]
    save_as(source, ACCELERATE, lambda rank: {"w": sharded_tensor(WEIGHT, listed, [])}, 1)


@bad(
    CheckpointNotFoundError,
    "{source}: no checkpoint here or below (looked for --pattern 'x-{rank}.pt')",
    pattern="x-{rank}.pt",
)
def no_file_of_a_pattern(source: Path) -> None:
    (source / "x-one.pt").touch()


@bad(
    CheckpointNotFoundError,
    "{source}: no rank files here (looked for x-{rank}.pt)",
    format="fsdp",
    pattern="x-{rank}.pt",
)
def no_file_of_a_pattern_and_its_layout(source: Path) -> None:
    (source / "x-one.pt").touch()


@bad(
    InconsistentRanksError,
    "{source}: rank files of several world sizes (2 and 3)",
    hint="one run only",
    pattern="{rank}.of.{world}",
)
def a_pattern_with_two_world_sizes(source: Path) -> None:
    for name in ("0.of.2", "1.of.2", "0.of.3"):
        torch.save(ROWS, source / name)


@bad(
    InconsistentRanksError,
    "{source}/fsdp_config.json: says world_size 3, the rank files say 2",
    pattern="{rank}.pt",
)
def a_pattern_and_a_config_of_three_ranks(source: Path) -> None:
    for name in ("0.pt", "1.pt"):
        torch.save(ROWS, source / name)
    (source / "fsdp_config.json").write_text('{"world_size": 3}')


@bad(
    CheckpointNotFoundError,
    "{source}/model.safetensors.index.json: 1 of the 2 files that it lists are missing",
    SECOND,
)
def a_model_without_one_of_its_files(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100)
    (source / SECOND).unlink()


@bad(
    CorruptFileError,
    "{source}/model.safetensors.index.json: 1 of 2 keys are not in the file that it gives: 'b'",
)
def an_index_of_another_model(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100)
    save_file({"c": WEIGHT}, source / SECOND)


@bad(
    UnsupportedError,
    f"{{source}}: key 'a' is both in {FIRST} and in {SECOND}",
)
def a_key_in_two_files(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100)
    save_file({"a": WEIGHT, "b": WEIGHT + 1}, source / SECOND)


@bad(
    UnsupportedError,
    "{source}: model.safetensors lies beside an index of other files",
    hint="remove the stale one",
)
def a_stale_file_beside_an_index(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100)
    save_file({"a": WEIGHT}, source / SINGLE)


@bad(CorruptFileError, "{source}/model.safetensors: no safetensors file", "the format allows")
def a_header_beyond_measure(source: Path) -> None:
    save_model(source)
    (source / SINGLE).write_bytes(b"\xff" * 64)


@bad(
    CorruptFileError,
    "{source}/model.safetensors.index.json",
    "'../a.safetensors'",
    "plain file name",
)
def an_index_that_leads_elsewhere(source: Path) -> None:
    save_file({"a": WEIGHT}, source.parent / "a.safetensors")
    write_json(source / INDEX, {"metadata": {}, "weight_map": {"a": "../a.safetensors"}})


@bad(
    CheckpointNotFoundError,
    "{source}: no weights here (looked for model.safetensors or model.safetensors.index.json)",
    hint="streammerge merge DIR NEW",
    format="hf",
)
def torch_files_where_safetensors_are_named(source: Path) -> None:
    save_model(source, safe_serialization=False)


@bad(
    CheckpointNotFoundError,
    "{source}/pytorch_model.bin.index.json: 1 of the 2 files that it lists are missing",
    OLD_FIRST,
)
def an_old_model_without_one_of_its_files(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100, safe_serialization=False)
    (source / OLD_FIRST).unlink()


@bad(
    CorruptFileError,
    "{source}/pytorch_model.bin.index.json: 1 of 2 keys are not in the file that it gives: 'b'",
)
def an_index_of_another_old_model(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100, safe_serialization=False)
    torch.save({"c": WEIGHT}, source / OLD_SECOND)


@bad(
    UnsupportedError,
    f"{{source}}: key 'a' is both in {OLD_FIRST} and in {OLD_SECOND}",
)
def a_key_in_two_old_files(source: Path) -> None:
    save_model(source, {"a": WEIGHT, "b": WEIGHT}, max_shard_size=100, safe_serialization=False)
    torch.save({"a": WEIGHT, "b": WEIGHT}, source / OLD_SECOND)


@bad(UnsupportedError, "{source}: the weights hold no tensors")
def an_old_model_without_tensors(source: Path) -> None:
    write_json(source / "config.json", CONFIG)
    torch.save({}, source / BIN)


@bad(UnsafePickleError, "{source}/pytorch_model.bin", "posix.system")
def a_hostile_old_model(source: Path) -> None:
    write_json(source / "config.json", CONFIG)
    torch.save({"w": checkpoints.calling(os.system, "false")}, source / BIN)


@bad(CorruptFileError, "{source}/pytorch_model.bin", "cut short")
def an_old_model_that_is_cut_short(source: Path) -> None:
    save_model(source, safe_serialization=False)
    checkpoints.cut(source / BIN, -1)


@bad(
    UnsupportedError,
    "{source}/pytorch_model.bin: key 'w' is a part of a tensor ((Shard(0))), expected whole ones",
    hint="--format fsdp --pattern 'pytorch_model.bin'",
)
def an_old_model_of_dtensors(source: Path) -> None:
    save_as(source, BIN, lambda rank: {"w": sharded(WEIGHT, sizes=(1,))}, 1)
    write_json(source / "config.json", CONFIG)
