"""Output heads and input embeddings through the command line: all that a checkpoint may hold of
them, under every flag, against what transformers opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DATA
from oracles import assert_same_tensors, load_directory, raw_bits
from safetensors.torch import load_file
from small_models import (
    COLUMNS,
    CONFIG,
    COPIES,
    EMBEDDING,
    GRID,
    HEAD,
    HYBRID,
    PLAIN,
    ROWS,
    Run,
    Split,
    State,
    make_run,
    open_model,
    random_state,
    read_json,
    refuse,
    save,
    tied_state,
    without,
)
from transformers import GemmaConfig, GemmaForCausalLM

from streammerge import describe, plan
from streammerge.sources import Sources

FLAG = "tie_word_embeddings"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target in a folder of its own, where a refused merge leaves nothing."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "merged"


def with_flag(flag: bool | None, **changes: object) -> dict[str, Any]:
    config = CONFIG | changes
    del config[FLAG]
    return config if flag is None else config | {FLAG: flag}


def states() -> dict[str, State]:
    """What a checkpoint may hold of the pair."""
    equal = tied_state()
    different = random_state()
    return {
        "equal": equal,
        "different": different,
        "embedding": without(different, HEAD),
        "head": without(different, EMBEDDING),
        "neither": without(different, HEAD, EMBEDDING),
    }


# --- HF.md's table --------------------------------------------------------------------------------

TIED, APART, RANDOM = "one weight", "two weights", "refused"
# flag, what is stored -> what must open. Without the flag, Qwen2 does not tie.
TABLE = [
    (True, "equal", TIED),
    (True, "different", RANDOM),
    (True, "embedding", TIED),
    (True, "head", TIED),
    (True, "neither", RANDOM),
    *(
        (flag, stored, expected)
        for flag in (False, None)
        for stored, expected in (
            ("equal", APART),
            ("different", APART),
            ("embedding", RANDOM),
            ("head", RANDOM),
            ("neither", RANDOM),
        )
    ),
]


@pytest.mark.parametrize(("flag", "stored", "expected"), TABLE)
def test_opens_with_what_was_trained(
    tmp_path: Path, target: Path, run: Run, flag: bool | None, stored: str, expected: str
) -> None:
    state = states()[stored]
    source = save(tmp_path / "source", state, with_flag(flag))
    if expected == RANDOM:
        said = refuse(run, target, source)
        assert (HEAD in said) == (stored != "neither")
        return
    run("merge", source, target)
    written = load_directory(target)
    names = set(state) | {EMBEDDING} if expected == APART else (set(state) | {EMBEDDING}) - {HEAD}
    assert set(written) == names
    model = open_model(target)
    embedding = state.get(EMBEDDING, state.get(HEAD))
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(model.get_output_embeddings().weight, state.get(HEAD, embedding))
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == (expected == TIED)
    for name, tensor in model.state_dict().items():
        if name not in (HEAD, EMBEDDING):
            assert torch.equal(tensor, state[name]), name
    config = read_json(target / "config.json")
    assert config.get(FLAG) is (True if expected == TIED else flag)
    assert run("check", target).out.strip() == f"{target}: nothing found"


@pytest.mark.parametrize("stored", ["equal", "different"])
@pytest.mark.parametrize("flag", [True, False, None])
def test_untie_writes_both(
    tmp_path: Path, target: Path, run: Run, flag: bool | None, stored: str
) -> None:
    state = states()[stored]
    run("merge", save(tmp_path / "source", state, with_flag(flag)), target, "--untie")
    assert_same_tensors(load_directory(target), state)
    model = open_model(target)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert_same_tensors(model.state_dict(), state)
    config = read_json(target / "config.json")
    assert config == with_flag(None if flag is None else False)


def test_untie_needs_both(tmp_path: Path, target: Path, run: Run) -> None:
    for stored, absent in (("embedding", HEAD), ("head", EMBEDDING)):
        source = save(tmp_path / stored, states()[stored], with_flag(True))
        said = refuse(run, target, source, "--untie", code=2)
        assert f"no {absent}" in said


def test_refusal_of_different_values_names_the_way_out(
    tmp_path: Path, target: Path, run: Run
) -> None:
    source = save(tmp_path / "source", random_state(), with_flag(True))
    error, hint = refuse(run, target, source).splitlines()
    assert f"{HEAD} and {EMBEDDING} differ" in error
    assert "transformers 4: tied, 5: tied" in error
    assert "--untie" in hint
    assert refuse(run, target, source, "--dry-run").splitlines() == [error, hint]


# --- the flag -------------------------------------------------------------------------------------


def test_model_type_that_ties_by_default(tmp_path: Path, target: Path, run: Run) -> None:
    """transformers 4 leaves the flag out of the config where it is what the class has."""
    torch.manual_seed(0)
    model = GemmaForCausalLM(
        GemmaConfig(
            vocab_size=66,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
        )
    )
    config = model.config.to_dict() | {"architectures": ["GemmaForCausalLM"]}
    del config[FLAG]
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert HEAD in state
    run("merge", save(tmp_path / "source", state, config), target)
    assert set(load_directory(target)) == set(state) - {HEAD}
    assert read_json(target / "config.json")[FLAG] is True
    assert_same_tensors(open_model(target, GemmaForCausalLM).state_dict(), state)


def vision_config(top: bool | None, text: bool | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "float32",
        "model_type": "qwen2_5_vl",
        "text_config": {"model_type": "qwen2_5_vl_text", "num_hidden_layers": 1, "vocab_size": 66},
        "torch_dtype": "float32",
    }
    for part, flag in ((config, top), (config["text_config"], text)):
        if flag is not None:
            part[FLAG] = flag
    return config


VISION_EMBEDDING = "model.language_model.embed_tokens.weight"


def vision_state(*, head: bool = True) -> State:
    embedding = torch.randn(66, 8)
    state = {
        VISION_EMBEDDING: embedding,
        "model.language_model.layers.0.input_layernorm.weight": torch.randn(8),
    }
    return state | ({HEAD: embedding} if head else {})


# HF.md: what 4.57 and 5.0 (the stricter of 5.x) read of qwen2_5_vl; its default is not to tie.
@pytest.mark.parametrize(
    ("top", "text", "tied4", "tied5"),
    [
        (None, True, True, False),
        (True, None, False, True),
        (True, True, True, True),
        (False, True, True, False),
        (True, False, False, True),
        (False, False, False, False),
        (None, None, False, False),
    ],
)
def test_both_readings_of_the_flag(
    tmp_path: Path,
    target: Path,
    run: Run,
    top: bool | None,
    text: bool | None,
    tied4: bool,
    tied5: bool,
) -> None:
    config = vision_config(top, text)
    done = run("merge", save(tmp_path / "source", vision_state(), config), target)
    dropped = tied4 and tied5
    assert (HEAD in load_directory(target)) == (not dropped)
    warned = [line for line in done.warnings if "not tie them for every reader" in line]
    assert bool(warned) == (tied4 != tied5)
    if warned:
        assert f"transformers 4: {'' if tied4 else 'not '}tied" in warned[0]
    written = read_json(target / "config.json")
    assert written == config


@pytest.mark.parametrize(("top", "text"), [(None, True), (True, None), (True, True)])
def test_a_head_that_some_reader_does_not_tie_is_tied_at_both_levels(
    tmp_path: Path, target: Path, run: Run, top: bool | None, text: bool | None
) -> None:
    """With only the embedding, the right values come of flags at both levels alone."""
    source = save(tmp_path / "source", vision_state(head=False), vision_config(top, text))
    run("merge", source, target)
    written = read_json(target / "config.json")
    assert (written[FLAG], written["text_config"][FLAG]) == (True, True)


def test_untie_says_so_at_both_levels(tmp_path: Path, target: Path, run: Run) -> None:
    source = save(tmp_path / "source", vision_state(), vision_config(None, True))
    run("merge", source, target, "--untie")
    written = read_json(target / "config.json")
    assert (written[FLAG], written["text_config"][FLAG]) == (False, False)
    assert set(load_directory(target)) == set(vision_state())


UNKNOWN = {"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}


def test_unknown_model_type_without_the_flag_keeps_both(
    tmp_path: Path, target: Path, run: Run
) -> None:
    for stored in ("equal", "different"):
        state = states()[stored]
        done = run("merge", save(tmp_path / stored, state, with_flag(None, **UNKNOWN)), target)
        assert_same_tensors(load_directory(target), state)
        (said,) = [line for line in done.warnings if FLAG in line]
        assert "nobodys" in said
        assert FLAG not in read_json(target / "config.json")
        target = target.with_name("other")


def test_unknown_model_type_with_the_flag(tmp_path: Path, target: Path, run: Run) -> None:
    config = with_flag(True, **UNKNOWN)
    run("merge", save(tmp_path / "equal", tied_state(), config), target)
    assert HEAD not in load_directory(target)
    run("merge", save(tmp_path / "head", states()["head"], config), target.with_name("head"))
    assert set(load_directory(target.with_name("head"))) == set(tied_state()) - {HEAD}


def test_without_config_both_are_written(tmp_path: Path, target: Path, run: Run) -> None:
    run("merge", save(tmp_path / "source", tied_state()), target)
    assert_same_tensors(load_directory(target), tied_state())


# --- comparing values -----------------------------------------------------------------------------

SPLITS = {
    "plain": PLAIN,
    "rows": ROWS,
    "columns": COLUMNS,
    "copies": COPIES,
    "hybrid": HYBRID,
    "grid": GRID,
}


def pair_source(
    folder: Path, head: torch.Tensor, embedding: torch.Tensor, splits: Sequence[Split]
) -> Path:
    state = {EMBEDDING: embedding, "model.norm.weight": torch.ones(8), HEAD: head}
    config = with_flag(True, num_hidden_layers=0, vocab_size=len(embedding))
    return save(
        folder,
        state,
        config,
        splits=dict(zip((HEAD, EMBEDDING), splits, strict=True)),
        world_size=4,
    )


def last_bit_differs(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    raw_bits(other)  # a copy if it is not contiguous
    other.view(-1).view(torch.uint8)[-tensor.element_size()] ^= 1
    assert not torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))
    return other


@pytest.mark.parametrize("memory", ["4KiB", "16MiB"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("plain", "rows"), ("rows", "columns"), ("grid", "hybrid"), ("copies", "columns")],
)
def test_equal_values_under_different_placements(
    tmp_path: Path, target: Path, run: Run, first: str, second: str, memory: str
) -> None:
    """Uneven by rows and by columns, and several buffers of the smallest budget long."""
    tensor = torch.randn(66, 27)
    splits = SPLITS[first], SPLITS[second]
    source = pair_source(tmp_path / "equal", tensor, tensor.clone(), splits)
    run("merge", source, target, "--memory", memory)
    assert HEAD not in load_directory(target)
    target = target.with_name("other") / "merged"
    target.parent.mkdir()
    source = pair_source(tmp_path / "different", last_bit_differs(tensor), tensor, splits)
    assert "differ" in refuse(run, target, source, "--memory", memory)


NAN = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("head", "embedding", "equal"),
    [
        ([*NAN], [*NAN], True),
        ([*NAN], [*NAN.flip(0)], False),
        ([0.0, 1.0, 2.0], [-0.0, 1.0, 2.0], False),
        ([-0.0, 1.0, 2.0], [-0.0, 1.0, 2.0], True),
    ],
)
def test_bits_are_compared_not_numbers(
    tmp_path: Path,
    target: Path,
    run: Run,
    head: Sequence[float],
    embedding: Sequence[float],
    equal: bool,
) -> None:
    tensors = [torch.stack([torch.as_tensor(v) for v in x]).repeat(4, 4) for x in (head, embedding)]
    source = pair_source(tmp_path / "source", *tensors, (ROWS, COLUMNS))
    if equal:
        run("merge", source, target)
        found = load_directory(target)[EMBEDDING]
        assert torch.equal(raw_bits(found), raw_bits(tensors[1]))
    else:
        refuse(run, target, source)


def test_another_dtype_or_shape_is_another_value(tmp_path: Path, target: Path, run: Run) -> None:
    tensor = torch.ones(66, 8)
    source = pair_source(tmp_path / "dtype", tensor.bfloat16(), tensor, (ROWS, ROWS))
    assert "in dtype (BF16, F32)" in refuse(run, target, source)
    source = pair_source(tmp_path / "shape", torch.ones(68, 8), tensor, (ROWS, ROWS))
    assert "in shape ([68, 8], [66, 8])" in refuse(run, target, source)


def test_a_shared_tensor_is_equal_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks of FSDP2 have it. The bytes of an equal copy are read, but no others."""
    read: list[int] = []
    original = Sources.read

    def counted(self: Sources, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        read.append(sum(map(len, buffers)))
        original(self, index, offset, buffers)

    monkeypatch.setattr(Sources, "read", counted)
    tensor = torch.randn(66, 8)
    shared = pair_source(tmp_path / "shared", tensor, tensor, (ROWS, ROWS))
    assert len(plan(describe(shared)).changes) == 1
    assert read == []
    copied = pair_source(tmp_path / "copied", tensor, tensor.clone(), (ROWS, ROWS))
    assert len(plan(describe(copied)).changes) == 1
    assert sum(read) == 2 * tensor.nbytes


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_w4_trained__t213",
        "fsdp2_w4_legacy__t24",
        "fsdp2_hsdp_2x2__t213",
        "fsdp1_dtensor_origparams__t213",
        "fsdp1_full_state_dict__t213",
    ],
)
def test_stored_checkpoints(target: Path, run: Run, name: str) -> None:
    """FSDP2 saves the tied pair as one storage, FSDP1 as two."""
    run("merge", DATA / name, target)
    state = load_file(DATA / name / "expected.safetensors")
    head = state.pop(HEAD)
    assert torch.equal(head, state[EMBEDDING])
    assert_same_tensors(load_directory(target), state)
    extra = [key for key in state if not key.startswith("model.")]
    model = open_model(target, unexpected=extra)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert torch.equal(model.get_output_embeddings().weight, head.to(model.dtype))
