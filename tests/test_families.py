"""Model families of transformers: trained under real FSDP2, merged by command, opened at once.

``family_job.py`` writes the checkpoints and what the unsharded models say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from jobs import merge, run_job
from oracles import assert_same_tensors, load_directory
from safetensors.torch import load_file
from transformers import PreTrainedModel

from streammerge.cli import main

# Family -> the class that a user would open it with.
FAMILIES = {
    "qwen2": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "gemma3_text": "AutoModelForCausalLM",
    "gemma3": "AutoModelForImageTextToText",
    "qwen3_moe": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM",
    "deepseek_v3": "AutoModelForCausalLM",
    "qwen2_5_vl": "AutoModelForImageTextToText",
    "llava": "AutoModelForImageTextToText",
    "token_classification": "AutoModelForTokenClassification",
    "sequence_classification": "AutoModelForSequenceClassification",
}
# Their files have other names than they have in memory, which only a base model tells.
NEED_NAMES_FROM = {"gemma3", "qwen2_5_vl", "llava"}
TIED = {"qwen2", "gemma3_text", "gemma3"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with one checkpoint per family."""
    root = tmp_path_factory.mktemp("families")
    run_job("family_job.py", root)
    return root


@pytest.fixture(scope="session")
def merged(checkpoints: Path) -> Path:
    """The directory with one merged model per family, by the plain command."""
    for family in FAMILIES:
        merge(checkpoints / family, checkpoints / "merged" / family)
    return checkpoints / "merged"


def open_model(directory: Path, family: str) -> PreTrainedModel:
    """The model in a directory, which has to hold all of it and nothing else."""
    model, loading = getattr(transformers, FAMILIES[family]).from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """The job runs on one thread, and the order of a sum may depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_opens_with_the_trained_values(checkpoints: Path, merged: Path, family: str) -> None:
    model = open_model(merged / family, family)
    reference = load_file(checkpoints / f"{family}.reference.safetensors")
    assert_same_tensors(model.state_dict(), reference)
    inputs = load_file(checkpoints / f"{family}.logits.safetensors")
    logits = inputs.pop("logits")
    with one_thread(), torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_as_transformers_saves_them(
    checkpoints: Path, merged: Path, tmp_path: Path, family: str
) -> None:
    open_model(merged / family, family).save_pretrained(tmp_path / "saved")
    found = merged / family
    if family in NEED_NAMES_FROM:
        found = tmp_path / "found"
        merge(checkpoints / family, found, "--names-from", tmp_path / "saved")
        open_model(found, family)
    tensors = load_directory(found)
    assert_same_tensors(tensors, load_directory(tmp_path / "saved"))
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    assert has_head == (not family.endswith("classification") and family not in TIED)


@pytest.mark.parametrize("family", FAMILIES)
def test_holds_together(merged: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(merged / family)]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_little_is_edited_beside_the_weights(checkpoints: Path, merged: Path, family: str) -> None:
    source, target = checkpoints / family / "huggingface", merged / family
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, target))
    (architecture,) = before["architectures"]
    assert architecture.startswith("FSDP") == (family == "qwen2")
    edits = {
        "architectures": [architecture.removeprefix("FSDP")],
        "torch_dtype": before["dtype"],  # what 4.x reads
    }
    assert after == before | edits
    others = {path.name for path in source.iterdir()} - {"config.json"}
    assert {"tokenizer.json", "tokenizer_config.json"} <= others
    for name in others:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    assert {path.name for path in target.iterdir()} == others | {"config.json", "model.safetensors"}
