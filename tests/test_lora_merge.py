"""LoRA adapters of models sharded by real FSDP2, through the command line, against PEFT.

``lora_job.py`` writes the checkpoints, a row for each way in which PEFT adapts a layer. Expected
values are PEFT's.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import peft_models
import pytest
import torch
from checkpoints import DATA, digests, save_plain
from huggingface_hub import save_torch_state_dict
from jobs import merge, run_job
from lora_job import ROWS, TRAINED
from oracles import assert_same_tensors, load_directory
from peft import LoraConfig, PeftModel, get_peft_model
from peft_models import ALPHA, RANK, PeftCase
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from streammerge.cli import main

PREFIX = "base_model.model."
TOYS_IN_BFLOAT16 = {"bfloat16", "bfloat16_adapter"}
EXPERTS_OF_TRANSFORMERS = {"qwen3_moe", "mixtral"}
META = {"r": RANK, "lora_alpha": ALPHA}

State = Mapping[str, torch.Tensor]
Run = Callable[..., str]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with two checkpoints per row."""
    root = tmp_path_factory.mktemp("lora")
    run_job("lora_job.py", root)
    return root


@pytest.fixture(scope="session")
def cases(checkpoints: Path) -> Mapping[str, PeftCase]:
    """The models that were sharded, built when they are asked for."""

    class Cases(dict[str, PeftCase]):
        def __missing__(self, row: str) -> PeftCase:
            self[row] = case = ROWS[row]()
            if row in TRAINED:
                case.model.load_state_dict(load_file(checkpoints / f"{row}.reference.safetensors"))
            return case

    return Cases()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a merge in this process: the command line without the time that importing torch takes.

    Returns what it printed.
    """

    def run_here(*arguments: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        found = main(["merge", *map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed.out + printed.err

    return run_here


@pytest.fixture
def refuse(run: Run, tmp_path: Path) -> Run:
    """Runs a merge that has to fail, with one line and a hint at most, and leave nothing.

    Returns the line.
    """

    def refuse_here(*arguments: str | Path, code: int = 1) -> str:
        parent = tmp_path / "refused"
        parent.mkdir()
        lines = run(*arguments, parent / "dst", code=code).splitlines()
        assert list(parent.iterdir()) == []
        parent.rmdir()
        assert [line.partition(": ")[0] for line in lines] in (
            ["streammerge"],
            ["streammerge", "hint"],
        )
        assert lines[0].startswith("streammerge: error: ")
        return lines[0]

    return refuse_here


def open_base(directory: Path, case: PeftCase) -> nn.Module:
    """The model in a directory, which has to hold all of it and nothing else."""
    if isinstance(case.base, PreTrainedModel):
        model, loading = type(case.base).from_pretrained(directory, output_loading_info=True)
        assert not any(loading.values()), loading
        if model.config.model_type in EXPERTS_OF_TRANSFORMERS:
            model.set_experts_implementation("eager")
        return model
    model = copy.deepcopy(case.base)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7)
    model.load_state_dict(load_directory(directory), strict=True)
    return model


def folded(checkpoints: Path, row: str, run: Run) -> Path:
    """A row, merged by the plain command."""
    target = checkpoints / "folded" / row
    if not target.exists():
        run(checkpoints / row, target)
    return target


def save_base(case: PeftCase, directory: Path) -> None:
    """A base model in several files, as the Hub has it."""
    if isinstance(case.base, PreTrainedModel):
        case.base.save_pretrained(directory, max_shard_size=2000)
    else:
        directory.mkdir()
        save_torch_state_dict(case.base.state_dict(), directory, max_shard_size=300)
    assert len(list(directory.glob("*.safetensors"))) > 1


def assert_close(found: State, expected: State) -> None:
    """Equal but for the order of sums."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def load_adapter(base: nn.Module, directory: Path, *, autocast: bool = True) -> PeftModel:
    """An adapter on its base model, without a warning about names or settings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, directory, autocast_adapter_dtype=autocast)
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if re.search("adapter keys|fan_in_fan_out", text)] == []
    return model.eval()


# --- fold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", sorted(ROWS.keys() - TOYS_IN_BFLOAT16))
def test_fold_equals_merge_and_unload(
    checkpoints: Path, cases: Mapping[str, PeftCase], run: Run, row: str
) -> None:
    case = cases[row]
    model = open_base(folded(checkpoints, row, run), case)
    assert_close(model.state_dict(), case.merged().state_dict())
    moved = case.outputs(case.model) - case.outputs(case.base)
    assert moved.abs().max() > 0.01  # so that the adapter matters
    torch.testing.assert_close(case.outputs(model.eval()), case.outputs(case.model))


@pytest.mark.parametrize("row", sorted(TOYS_IN_BFLOAT16))
def test_fold_is_rounded_once(
    checkpoints: Path, cases: Mapping[str, PeftCase], run: Run, row: str
) -> None:
    case = cases[row]
    found = load_directory(folded(checkpoints, row, run))
    exact = copy.deepcopy(case.model).double().merge_and_unload().state_dict()
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert found[name].dtype == torch.bfloat16
        ulp = torch.finfo(torch.bfloat16).eps * 2.0 ** tensor.abs().log2().floor()
        assert ((found[name].double() - tensor).abs() <= ulp.clamp_min(1e-7)).all(), name
    if row == "bfloat16":
        # With the adapter in float32, PEFT rounds once too.
        assert_same_tensors(found, case.merged().state_dict())


@pytest.mark.parametrize("row", ROWS)
def test_bytes_depend_on_neither_budget_nor_workers(
    checkpoints: Path, tmp_path: Path, run: Run, row: str
) -> None:
    expected = digests(folded(checkpoints, row, run))
    least = "4096"
    if row == "wide":
        # By a process of its own: there, memory lies elsewhere.
        merge(checkpoints / row, tmp_path / "process")
        assert digests(tmp_path / "process") == expected
        said = run(checkpoints / row, tmp_path / "less", "--memory", least, code=2)
        least = re.search(r"hint: --memory (\d+) or more", said)[1]
        run(checkpoints / row, tmp_path / "less", "--memory", str(int(least) - 1), code=2)
    run(checkpoints / row, tmp_path / "least", "--memory", least, "--workers", "1")
    assert digests(tmp_path / "least") == expected
    run(checkpoints / row, tmp_path / "more", "--memory", "64MiB", "--workers", "3")
    assert digests(tmp_path / "more") == expected
    assert not (tmp_path / "less").exists()


def test_fold_of_stored_checkpoint(tmp_path: Path, run: Run) -> None:
    source = DATA / "fsdp2_lora__t213"
    run(source, tmp_path / "dst")
    expected = load_file(source / "expected_merged.safetensors")
    head = expected.pop("lm_head.weight")
    assert torch.equal(head, expected["model.embed_tokens.weight"])  # tied
    assert_same_tensors(load_directory(tmp_path / "dst"), expected)


def test_options_tell_what_no_file_does(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    source = tmp_path / "src"
    shutil.copytree(checkpoints / "rslora", source)
    shutil.rmtree(source / "lora_adapter")
    (source / "lora_train_meta.json").unlink()
    run(source, tmp_path / "dst", "--lora-alpha", str(ALPHA), "--rslora")
    assert digests(tmp_path / "dst") == digests(folded(checkpoints, "rslora", run))
    said = run(source, tmp_path / "other", "--lora-alpha", str(ALPHA))
    assert "if it was trained with rsLoRA, --rslora makes it 4.04145" in said


def test_dtype_is_that_of_the_one_rounding(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    run(checkpoints / "linear", tmp_path / "dst", "--dtype", "bfloat16")
    whole = load_directory(folded(checkpoints, "linear", run))
    assert_same_tensors(
        load_directory(tmp_path / "dst"), {name: t.bfloat16() for name, t in whole.items()}
    )


# --- split and keep -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_split_loads_in_peft(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, run: Run, row: str
) -> None:
    case = cases[row]
    run(checkpoints / row, tmp_path / "dst", "--lora", "split")
    base = open_base(tmp_path / "dst", case)
    before = case.base.state_dict()
    biases_trained = row in ("bias_lora_only", "bias_all")
    for name, tensor in base.state_dict().items():
        if not (biases_trained and name.endswith(".bias")):
            assert torch.equal(tensor, before[name]), name
    adapter = tmp_path / "dst" / "lora_adapter"
    model = load_adapter(base, adapter, autocast=row != "bfloat16_adapter")
    assert torch.equal(case.outputs(model), case.outputs(case.model))
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_keep_writes_what_is_stored(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, run: Run
) -> None:
    said = run(checkpoints / "wide", tmp_path / "dst", "--lora", "keep")
    assert "PEFT" in said
    state = cases["wide"].model.state_dict()
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    assert_same_tensors(load_directory(tmp_path / "dst"), expected)


# --- an adapter alone -----------------------------------------------------------------------------

ALONE = sorted(ROWS.keys() - {"experts", *EXPERTS_OF_TRANSFORMERS})


@pytest.mark.parametrize("row", ALONE)
def test_adapter_alone_becomes_an_adapter_directory(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, run: Run, row: str
) -> None:
    case = cases[row]
    said = run(checkpoints / f"{row}_alone", tmp_path / "dst")
    assert "the result is an adapter directory" in said
    assert "tensors of an adapter, no model" in said
    assert {path.name for path in (tmp_path / "dst").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = copy.deepcopy(case.base)
    model = load_adapter(base, tmp_path / "dst", autocast=row != "bfloat16_adapter")
    assert torch.equal(case.outputs(model), case.outputs(case.model))


@pytest.mark.parametrize("row", ALONE)
def test_adapter_alone_is_folded_into_its_base(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, run: Run, row: str
) -> None:
    case = cases[row]
    save_base(case, tmp_path / "base")
    run(checkpoints / f"{row}_alone", tmp_path / "dst", "--base", tmp_path / "base")
    # What the whole checkpoint gives, to the bit.
    expected = load_directory(folded(checkpoints, row, run))
    assert_same_tensors(load_directory(tmp_path / "dst"), expected)
    open_base(tmp_path / "dst", case)


def test_base_has_the_side_files(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, run: Run
) -> None:
    source, base = tmp_path / "src", tmp_path / "base"
    shutil.copytree(checkpoints / "qwen2_alone", source)
    shutil.rmtree(source / "huggingface")
    save_base(cases["qwen2"], base)
    (base / "tokenizer.json").write_bytes(b"tokens")
    run(source, tmp_path / "dst", "--base", base)
    open_base(tmp_path / "dst", cases["qwen2"])
    assert (tmp_path / "dst" / "tokenizer.json").read_bytes() == b"tokens"


@pytest.mark.parametrize("row", sorted(EXPERTS_OF_TRANSFORMERS))
def test_base_that_keeps_experts_apart(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, refuse: Run, row: str
) -> None:
    save_base(cases[row], tmp_path / "base")
    line = refuse(checkpoints / f"{row}_alone", "--base", tmp_path / "base")
    assert "'model.layers.0.mlp.experts'" in line
    assert "which the base model does not have" in line


def test_parameters_of_an_adapter_alone_need_its_config(checkpoints: Path, refuse: Run) -> None:
    line = refuse(checkpoints / "experts_alone")
    assert "has adapters for 2 parameters, and nothing tells which" in line


def test_adapter_alone_cannot_be_folded_into_nothing(checkpoints: Path, refuse: Run) -> None:
    line = refuse(checkpoints / "linear_alone", "--lora", "fold", code=2)
    assert "holds an adapter and no base weights" in line


def test_base_is_for_an_adapter_alone(
    checkpoints: Path, cases: Mapping[str, PeftCase], tmp_path: Path, refuse: Run
) -> None:
    save_base(cases["linear"], tmp_path / "base")
    line = refuse(checkpoints / "linear", "--base", tmp_path / "base", code=2)
    assert "--base is for checkpoints that hold an adapter and no base weights" in line


def test_stored_checkpoint_of_an_adapter_alone(tmp_path: Path, run: Run) -> None:
    source = DATA / "fsdp2_lora_only__t213"
    run(source, tmp_path / "dst", "--lora-alpha", "16")
    expected = load_file(source / "expected.safetensors")
    assert_same_tensors(
        load_file(tmp_path / "dst" / "adapter_model.safetensors"),
        {name.replace(".default", ""): tensor for name, tensor in expected.items()},
    )
    config = json.loads((tmp_path / "dst" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    # Nothing tells which other modules there are, so only whole names are safe.
    assert config["target_modules"] == [
        f"model.layers.{layer}.{module}"
        for layer in range(2)
        for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    ]


# --- what is refused ------------------------------------------------------------------------------


def toy(config: peft.PeftConfig, build: Callable[[], nn.Module] = peft_models.Toy) -> PeftModel:
    """A toy with any adapter."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(build(), config)


def lora(**settings: Any) -> LoraConfig:
    """The settings of LoRA."""
    return LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q"], **settings})


def two_adapters() -> PeftModel:
    model = toy(lora())
    model.add_adapter("critic", lora())
    return model


def quantized() -> dict[str, torch.Tensor]:
    state = toy(lora()).state_dict()
    name = f"{PREFIX}layers.1.q.base_layer.weight"
    return state | {name: torch.ones(18, 1, dtype=torch.uint8)}


def without(part: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in toy(lora()).state_dict().items() if part not in name}


REFUSED: dict[str, tuple[Callable[[], PeftModel | State], str]] = {
    "two adapters": (two_adapters, r"several adapters: 'critic', 'default'"),
    "DoRA on an embedding": (
        lambda: toy(lora(target_modules=["embed"], use_dora=True)),
        r"embed\.lora_magnitude_vector\.default\.weight': DoRA is supported on linear layers",
    ),
    "DoRA on a convolution": (
        lambda: toy(lora(target_modules=["plane"], use_dora=True), peft_models.ConvToy),
        r"plane\.lora_magnitude_vector\.default\.weight': DoRA is supported on linear layers",
    ),
    "trainable tokens": (
        lambda: toy(lora(trainable_token_indices={"embed": [1, 2]})),
        "is of trainable tokens",
    ),
    "quantized base": (quantized, r"layers\.1\.q\.base_layer\.weight'.*quantized"),
    "A without B": (lambda: without("layers.1.q.lora_B"), "has no counterpart lora_B"),
    "B without A": (lambda: without("layers.1.q.lora_A"), "has no counterpart lora_A"),
    "layer without an adapter": (lambda: without("layers.1.q.lora"), "adapter, which is missing"),
    "IA3": (
        lambda: toy(peft.IA3Config(target_modules=["q"], feedforward_modules=[])),
        "is of IA3",
    ),
    "LoHa": (lambda: toy(peft.LoHaConfig(target_modules=["q"])), "is of LoHa"),
    "LoKr": (lambda: toy(peft.LoKrConfig(target_modules=["q"])), "is of LoKr"),
    "OFT": (lambda: toy(peft.OFTConfig(target_modules=["q"], oft_block_size=3)), "is of OFT"),
    "VeRA": (lambda: toy(peft.VeraConfig(target_modules=["q"])), "is of VeRA"),
}


def save_replicated(folder: Path, state: State, meta: Mapping[str, Any] | None = META) -> Path:
    """A checkpoint whose two ranks hold whole tensors."""
    save_plain(folder, [dict(state)] * 2)
    if meta is not None:
        (folder / "lora_train_meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(tmp_path: Path, refuse: Run, reason: str) -> None:
    build, message = REFUSED[reason]
    made = build()
    state = made.state_dict() if isinstance(made, PeftModel) else made
    line = refuse(save_replicated(tmp_path / "src", state))
    assert re.search(message, line), line


def test_alpha_has_to_be_known(tmp_path: Path, refuse: Run) -> None:
    source = save_replicated(tmp_path / "src", toy(lora()).state_dict(), meta=None)
    assert "alpha of the LoRA adapter is unknown" in refuse(source)


def test_rank_has_to_be_that_of_the_settings(tmp_path: Path, refuse: Run) -> None:
    source = save_replicated(tmp_path / "src", toy(lora()).state_dict(), META | {"r": 4})
    line = refuse(source)
    assert "shape [3, 6], so rank 3; the settings of the adapter say 4" in line


@pytest.mark.parametrize(
    ("target", "other"),
    [("lm_head", "model.embed_tokens"), ("model.embed_tokens", "lm_head")],
)
def test_adapter_on_one_of_two_tied_weights(
    tmp_path: Path, run: Run, refuse: Run, target: str, other: str
) -> None:
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    model = toy(lora(target_modules=[target]), lambda: Qwen2ForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter))
    state = model.state_dict()
    source = save_replicated(tmp_path / "src", state)
    config.save_pretrained(source / "huggingface")
    line = refuse(source)
    assert f"{target}.weight has a LoRA adapter, but config.json ties" in line

    run(source, tmp_path / "dst", "--untie")
    untied = Qwen2ForCausalLM.from_pretrained(tmp_path / "dst").eval()
    assert torch.equal(untied.state_dict()[f"{other}.weight"], state[f"{PREFIX}{other}.weight"])
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        # In training, only one of the two had an adapter.
        torch.testing.assert_close(untied(ids).logits, model.eval()(ids).logits)
