"""Comparing merged directories with what they were merged from. Values are told by torch."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rank_files
import strategies
import torch
from checkpoints import DATA, digests, snapshot
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracles import load_directory, raw_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import (
    COLUMNS,
    CONFIG,
    EMBEDDING,
    GRID,
    HEAD,
    Run,
    State,
    make_run,
    open_model,
    random_state,
    save,
    tied_state,
    write_json,
)
from test_memory import MIB, check_without_torch, make, need_space, run_child
from transformers import AutoModelForCausalLM

import streammerge
from streammerge import execution
from streammerge.errors import ResultError, UsageError
from streammerge.verifier import TensorDifference, Verification

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DIFFERENT, USAGE = 3, 2
MOE, LORA = "fsdp2_moe__t213", "fsdp2_lora__t213"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, as merges flush their files to the disk."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "merged"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Qwen2 in float32 that needs no edit."""
    return save(tmp_path / "source", random_state(), CONFIG)


def differences(found: Verification) -> dict[str, TensorDifference]:
    by_name = {difference.name: difference for difference in found.compared.differences}
    assert len(by_name) == len(found.compared.differences)
    assert found.equal == (not by_name)
    return by_name


def kinds(found: Verification) -> dict[str, str]:
    return {name: difference.kind for name, difference in differences(found).items()}


def changes(found: Verification, kind: str) -> dict[str, str | None]:
    return {c.name: c.to for c in found.changes if c.kind == kind}


def load(path: Path) -> State:
    """The tensors of a copy, as safetensors maps the file: edits would show in its tensors."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        return load_file(shutil.copy(path, scratch))


def rewrite(folder: Path, edit: Callable[[State], State | None], file: str = WEIGHTS) -> None:
    """Change the tensors of a file, which safetensors writes again."""
    state = load(folder / file)
    save_file(edit(state) or state, folder / file, metadata={"format": "pt"})


def positions(path: Path) -> dict[str, tuple[int, int]]:
    """Where in a safetensors file the bytes of each tensor begin and end."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header.pop("__metadata__", None)
    return {
        n: (size + e["data_offsets"][0], size + e["data_offsets"][1]) for n, e in header.items()
    }


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))


def shuffled(folder: Path, state: Mapping[str, torch.Tensor], seed: int) -> None:
    """A directory with three files of any names, whose keys are in no order."""
    random_ = random.Random(seed)
    names = sorted(state)
    random_.shuffle(names)
    folder.mkdir()
    weight_map = {}
    for number in range(3):
        some = names[number::3]
        file = f"weights-{'xyz'[number]}.safetensors"
        with tempfile.TemporaryDirectory() as scratch:
            single = Path(scratch) / WEIGHTS
            save_file({name: state[name] for name in some}, single)
            content, size = single.read_bytes(), int.from_bytes(single.read_bytes()[:8], "little")
            header, where = json.loads(content[8 : 8 + size]), positions(single)
        data, fresh = b"", {}
        for name in some:
            begin, end = where[name]
            offsets = [len(data), len(data) + end - begin]
            fresh[name] = header[name] | {"data_offsets": offsets}
            data += content[begin:end]
        text = json.dumps(fresh).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
        with safe_open(folder / file, "pt") as opened:  # what the library takes too
            assert sorted(opened.keys()) == sorted(some)
        weight_map |= dict.fromkeys(some, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def assert_difference(
    difference: TensorDifference, reference: torch.Tensor, merged: torch.Tensor
) -> None:
    """A difference says what torch says of two tensors of which one element differs."""
    sides = [raw_bits(t).reshape(*reference.shape, -1) for t in (reference, merged)]
    (index,) = (sides[0] != sides[1]).any(dim=-1).nonzero().tolist()
    values = difference.values
    assert difference.kind == "values"
    assert values is not None
    assert (values.count, values.numel) == (1, reference.numel())
    assert list(values.index) == index
    if reference.dtype == torch.float4_e2m1fn_x2:
        return  # torch cannot read its elements
    a, b = (element(tensor[tuple(index)]) for tensor in (reference, merged))
    texts = [repr(a), repr(b)]
    if texts[0] == texts[1]:
        hexes = [bytes(side[tuple(index)].tolist())[::-1].hex() for side in sides]
        texts = [f"{text} (0x{digits})" for text, digits in zip(texts, hexes, strict=True)]
    assert [values.reference, values.merged] == texts
    if reference.dtype != torch.bool:
        same = a == b or ("nan" in texts[0] and "nan" in texts[1])
        assert repr(float(values.largest or 0)) == repr(0.0 if same else float(abs(a - b)))


def element(tensor: torch.Tensor) -> Any:
    """What Python makes of an element; of small floats after a conversion, which is exact."""
    small = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return (tensor.double() if small else tensor).item()


# --- equal ----------------------------------------------------------------------------------------


def mergeable() -> list[str]:
    refused = ("local_state_dict", "divergent", "ep_local", "lora_only", "partial")
    return sorted(
        path.name
        for path in DATA.iterdir()
        if path.is_dir() and not any(word in path.name for word in refused)
    )


@pytest.mark.parametrize("name", mergeable())
def test_merges_of_stored_checkpoints(name: str, tmp_path: Path) -> None:
    before = snapshot(DATA / name)
    for number, options in enumerate(({}, {"raw": True}, {"dtype": "bfloat16"})):
        folder = tmp_path / str(number)
        report = streammerge.merge(DATA / name, folder, max_shard_size=3000, **options)
        written = digests(folder)
        options.pop("dtype", None)  # it is inferred
        found = streammerge.verify(DATA / name, folder, memory="64KiB", workers=3, **options)
        assert found.equal
        assert (found.compared.tensors, found.compared.nbytes) == (report.tensors, report.nbytes)
        # Casts are said in other words, as nobody asked for them.
        for kind in ("renamed", "dropped", "folded", "expanded", "apart"):
            assert changes(found, kind) == {c.name: c.to for c in report.changes if c.kind == kind}
        assert {n: str(to) for n, to in changes(found, "cast").items()} == {
            c.name: "bfloat16" for c in report.changes if c.kind == "cast"
        }
        assert changes(found, "config") == {}
        assert digests(folder) == written  # nothing is left behind
    assert snapshot(DATA / name) == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LORA, {"lora_mode": "split"}),
        (LORA, {"lora_mode": "keep"}),
        (LORA, {"dtype": "float16", "keep_dtype": ["*norm*"]}),
        (LORA, {"lora_alpha": 3.0, "rslora": True}),
        ("fsdp2_lora_only__t213", {"lora_alpha": 8.0}),
        (MOE, {"keep_packed": True}),
        ("fsdp2_w4__t213", {"dtype": "float16", "keep_dtype": ["*norm*"]}),
    ],
)
def test_the_same_options_as_in_the_merge(name: str, options: dict[str, Any], target: Path) -> None:
    streammerge.merge(DATA / name, target, **options)
    assert streammerge.verify(DATA / name, target, **options).equal


def test_base_of_an_adapter(tmp_path: Path, target: Path) -> None:
    base = tmp_path / "base"
    streammerge.merge(DATA / LORA, tmp_path / "split", lora_mode="split")
    shutil.copytree(tmp_path / "split", base, ignore=shutil.ignore_patterns("lora_adapter"))
    adapter = load(tmp_path / "split" / "lora_adapter" / "adapter_model.safetensors")
    state = {
        n.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."): t
        for n, t in adapter.items()
    }
    source = save(tmp_path / "adapter", state)
    options: dict[str, Any] = {"base": base, "lora_alpha": 16.0}
    streammerge.merge(source, target, **options)
    found = streammerge.verify(source, target, **options)
    assert found.equal
    assert changes(found, "folded")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_transformers_saves_again(
    source: Path, target: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Other files, another split, and another order of keys."""
    streammerge.merge(source, target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype or "auto")
    model.save_pretrained(tmp_path / "again", max_shard_size="4KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    found = streammerge.verify(source, tmp_path / "again")
    assert found.equal
    assert found.compared.tensors == len(random_state())
    assert set(changes(found, "cast").values()) == ({"bfloat16"} if dtype else set())


def test_tied_weights_that_transformers_saves(target: Path, tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    source = save(tmp_path / "source", tied_state(), config)
    streammerge.merge(source, target)
    open_model(target).save_pretrained(tmp_path / "again")
    found = streammerge.verify(source, tmp_path / "again")
    assert found.equal
    assert set(changes(found, "dropped")) == {HEAD}


def test_experts_that_transformers_saves(target: Path, tmp_path: Path) -> None:
    """transformers 5 packs them in memory, and unpacks them again when it saves."""
    streammerge.merge(DATA / MOE, target)
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(tmp_path / "again")
    found = streammerge.verify(DATA / MOE, tmp_path / "again")
    assert found.equal
    assert changes(found, "expanded")


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("kind", strategies.CHECKPOINTS)
def test_any_checkpoint_and_a_single_bit(kind: str) -> None:
    """A directory in no order, written by safetensors, and then with one bit flipped."""
    cases = 0

    @examples(6)
    @given(
        checkpoint=strategies.CHECKPOINTS[kind],
        options=strategies.OPTIONS.get(kind, strategies.merge_options),
        seed=st.integers(0, 1 << 30),
    )
    def is_found(
        checkpoint: rank_files.Checkpoint, options: strategies.MergeOptions, seed: int
    ) -> None:
        nonlocal cases
        with tempfile.TemporaryDirectory() as scratch:
            source, merged = Path(scratch) / "source", Path(scratch) / "merged"
            states = rank_files.write_checkpoint(checkpoint, source)
            expected = rank_files.expected_tensors(checkpoint, states)
            shuffled(merged, expected, seed)
            limits: dict[str, Any] = {"memory": options.memory, "workers": options.workers}
            assert streammerge.verify(source, merged, raw=True, **limits).equal

            random_ = random.Random(seed)
            places = {
                n: at for path in merged.glob("*.safetensors") for n, at in positions(path).items()
            }
            some = sorted(name for name, (begin, end) in places.items() if begin < end)
            if not some:
                return
            name = random_.choice(some)
            path = merged / json.loads((merged / INDEX).read_text())["weight_map"][name]
            flip(path, random_.randrange(*positions(path)[name]), random_.randrange(8))
            found = differences(streammerge.verify(source, merged, raw=True, **limits))
            assert set(found) == {name}
            assert_difference(found[name], expected[name], load_directory(merged)[name])
            cases += 1

    is_found()
    assert cases >= 2


# --- different ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2_odd_storage__t213", LORA, MOE])
def test_a_bit_of_every_tensor(name: str, target: Path) -> None:
    streammerge.merge(DATA / name, target)
    expected = load(target / WEIGHTS)
    random_ = random.Random(7)
    for begin, end in positions(target / WEIGHTS).values():
        if begin < end:
            flip(target / WEIGHTS, random_.randrange(begin, end), random_.randrange(8))
    damaged = load(target / WEIGHTS)
    found = differences(streammerge.verify(DATA / name, target))
    assert set(found) == {name for name, tensor in expected.items() if tensor.numel()}
    for key, difference in found.items():
        assert_difference(difference, expected[key], damaged[key])
        assert f"first {difference.values.merged} at" in difference.reason  # type: ignore[union-attr]


def test_many_elements(source: Path, target: Path) -> None:
    streammerge.merge(source, target)
    expected = load(target / WEIGHTS)
    noise = torch.Generator().manual_seed(1)

    def edit(state: State) -> None:
        mask = torch.rand(state[EMBEDDING].shape, generator=noise) < 0.3
        state[EMBEDDING] += mask * torch.randn(mask.shape, generator=noise)
        state["model.norm.weight"][3:5] = torch.tensor([math.nan, math.inf])

    rewrite(target, edit)
    found = differences(streammerge.verify(source, target, memory=4096, workers=2))
    assert set(found) == {EMBEDDING, "model.norm.weight"}
    damaged = load(target / WEIGHTS)[EMBEDDING]
    apart = (damaged.double() - expected[EMBEDDING].double()).abs()
    values = found[EMBEDDING].values
    assert values is not None
    assert (values.count, values.numel) == (int((apart > 0).sum()), apart.numel())
    assert values.largest == float(apart.max())
    assert list(values.index) == (apart > 0).nonzero()[0].tolist()
    values = found["model.norm.weight"].values
    assert values is not None
    assert (values.count, values.merged) == (2, "nan")
    assert math.isnan(values.largest or 0)


@pytest.mark.parametrize("memory", [4096, "1MiB"])
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_a_tensor_in_many_parts(
    tmp_path: Path, target: Path, memory: int | str, tolerance: float | None
) -> None:
    """Several threads compare its parts, in any order."""
    generator = torch.Generator().manual_seed(2)
    tensor = torch.randn(150, 400, generator=generator)
    source = save(tmp_path / "source", {"a": tensor, "b": tensor.T.contiguous()})
    streammerge.merge(source, target)
    damaged = tensor.clone()
    where = 7_000 + torch.randperm(50_000, generator=generator)[:300]
    damaged.view(-1)[where] += torch.randn(300, generator=generator)
    rewrite(target, lambda state: state | {"a": damaged, "b": damaged.T.contiguous()})
    found = differences(
        streammerge.verify(source, target, memory=memory, workers=3, atol=tolerance)
    )
    apart = (damaged.double() - tensor.double()).abs()
    for name, far in (("a", apart), ("b", apart.T)):
        mask = far > (tolerance or 0)
        values = found[name].values
        assert values is not None
        assert values.count == int(mask.sum())
        assert list(values.index) == mask.nonzero()[0].tolist()
        assert values.largest == float(far.max())


def test_zeros_of_both_signs_and_nans_of_other_bits(tmp_path: Path, target: Path) -> None:
    state = {"zero": torch.tensor([1.0, 0.0]), "nan": torch.tensor([math.nan, 1.0])}
    source = save(tmp_path / "source", state)
    streammerge.merge(source, target)
    assert streammerge.verify(source, target).equal  # a NaN equals itself
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    rewrite(
        target,
        lambda s: {"zero": torch.tensor([1.0, -0.0]), "nan": torch.cat([other, s["nan"][1:]])},
    )
    found = differences(streammerge.verify(source, target))
    values = {name: difference.values for name, difference in found.items()}
    assert {n: v and (v.reference, v.merged, v.largest) for n, v in values.items()} == {
        "zero": ("0.0", "-0.0", 0.0),
        "nan": ("nan (0x7fc00000)", "nan (0x7fc00001)", 0.0),
    }
    assert streammerge.verify(source, target, rtol=0).equal


def test_names_shapes_and_dtypes(source: Path, target: Path) -> None:
    streammerge.merge(source, target)
    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    square, other = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"

    def edit(state: State) -> None:
        state["renamed"] = state.pop(norm)
        state[bias] = state[bias].to(torch.int32)
        state[other] = state[other].T.contiguous()
        state[square] = state[square][:-1].contiguous()

    rewrite(target, edit)
    found = streammerge.verify(source, target)
    assert kinds(found) == {
        norm: "missing",
        "renamed": "extra",
        bias: "dtype",
        other: "shape",
        square: "shape",
    }
    reasons = {name: d.reason for name, d in differences(found).items()}
    assert reasons[norm] == "missing"
    assert reasons["renamed"] == "should not be there"
    assert reasons[bias] == "I32 [8], should be F32 [8]"
    assert reasons[other] == "F32 [8, 12], should be F32 [12, 8]"
    assert found.compared.tensors == len(random_state()) - 4


def test_a_head_that_the_merge_drops(target: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "source", tied_state(), CONFIG | {"tie_word_embeddings": True})
    streammerge.merge(source, target)
    rewrite(target, lambda state: state | {HEAD: state[EMBEDDING].clone()})
    found = streammerge.verify(source, target)
    assert kinds(found) == {HEAD: "extra"}
    assert "a merge drops it: equal to the input embedding" in differences(found)[HEAD].reason
    assert streammerge.verify(source, target, raw=True).equal


# --- dtypes ---------------------------------------------------------------------------------------


def test_dtypes_are_those_of_the_merged_one_unless_given(source: Path, target: Path) -> None:
    streammerge.merge(source, target, dtype="bfloat16", keep_dtype=["*norm*"])
    found = streammerge.verify(source, target)
    assert found.equal
    cast = changes(found, "cast")
    assert set(cast) == {name for name in random_state() if "norm" not in name}
    assert set(cast.values()) == {"bfloat16"}
    norms = {name for name in random_state() if "norm" in name}
    for dtype, wrong in (
        ("keep", set(cast)),
        ("bfloat16", norms),
        ("float16", {*cast, *norms}),
    ):
        found = streammerge.verify(source, target, dtype=dtype)
        assert kinds(found) == dict.fromkeys(wrong, "dtype")


def test_raw_infers_nothing(source: Path, target: Path) -> None:
    streammerge.merge(source, target, dtype="bfloat16")
    found = streammerge.verify(source, target, raw=True)
    assert set(kinds(found).values()) == {"dtype"}


def test_a_wrong_rounding_is_found(source: Path, target: Path) -> None:
    """Cut off, as it is done by those who take the upper half of a float32."""
    streammerge.merge(source, target, dtype="bfloat16")
    wide = random_state()

    def edit(state: State) -> None:
        state[EMBEDDING] = (
            (wide[EMBEDDING].view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        )

    rewrite(target, edit)
    (difference,) = differences(streammerge.verify(source, target)).values()
    assert difference.values is not None
    cut = load(target / WEIGHTS)[EMBEDDING]
    assert difference.values.count == int((cut != wide[EMBEDDING].bfloat16()).sum()) > 50
    assert not difference.values.rounding  # which is about adapters


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.float64])
def test_other_dtypes_are_no_merges(source: Path, target: Path, dtype: torch.dtype) -> None:
    streammerge.merge(source, target)
    rewrite(target, lambda state: state | {EMBEDDING: state[EMBEDDING].to(dtype)})
    assert kinds(streammerge.verify(source, target)) == {EMBEDDING: "dtype"}


# --- tolerance and folds --------------------------------------------------------------------------


def test_tolerance(source: Path, target: Path) -> None:
    streammerge.merge(source, target)
    expected = load(target / WEIGHTS)

    def edit(state: State) -> None:
        state[EMBEDDING] *= 1 + 1e-4
        state[HEAD] += 1e-3

    rewrite(target, edit)
    damaged = load(target / WEIGHTS)
    assert set(kinds(streammerge.verify(source, target))) == {EMBEDDING, HEAD}
    for rtol, atol in (
        (2e-4, None),
        (None, 2e-3),
        (2e-4, 2e-3),
        (1e-5, 1e-8),
        (0, 0),
        (1e-4, 9e-4),
    ):
        limits = {"rtol": rtol or 0.0, "atol": atol or 0.0}
        far = {
            name: ~torch.isclose(damaged[name].double(), tensor.double(), **limits)
            for name, tensor in expected.items()
        }
        found = streammerge.verify(source, target, rtol=rtol, atol=atol)
        assert found.tolerance is not None
        counts = {n: d.values.count for n, d in differences(found).items() if d.values}
        assert counts == {name: int(mask.sum()) for name, mask in far.items() if mask.any()}
        for name, difference in differences(found).items():
            assert difference.values is not None
            assert list(difference.values.index) == far[name].nonzero()[0].tolist()
            first = difference.values.index
            assert difference.values.reference == repr(expected[name][first].item())
            assert difference.values.merged == repr(damaged[name][first].item())


def test_folds_of_another_order_of_summation(target: Path) -> None:
    """They differ, and it is said that this is no more than rounding."""
    streammerge.merge(DATA / LORA, target)
    stored = load(DATA / LORA / "expected.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    key = f"base_model.model.{name}"
    a, b = (stored[f"{key}.lora_{x}.default.weight"] for x in "AB")
    weight = stored[f"{key}.base_layer.weight"]
    product = sum(torch.outer(b[:, r], a[r]) for r in reversed(range(len(a))))
    other = weight + 4 * product
    right = load(target / WEIGHTS)[f"{name}.weight"]
    assert not torch.equal(other, right)
    assert torch.allclose(other, right)
    rewrite(target, lambda state: state | {f"{name}.weight": other})
    found = streammerge.verify(DATA / LORA, target)
    (difference,) = differences(found).values()
    assert difference.values is not None
    assert difference.values.rounding
    assert difference.values.count == int((other != right).sum())
    assert "no more than an adapter folded on another machine" in difference.reason
    assert streammerge.verify(DATA / LORA, target, rtol=1e-5, atol=1e-6).equal

    # The adapter left away is no rounding.
    rewrite(target, lambda state: state | {f"{name}.weight": weight})
    (difference,) = differences(streammerge.verify(DATA / LORA, target)).values()
    assert difference.values is not None
    assert not difference.values.rounding


# --- files beside the model -----------------------------------------------------------------------


def test_value_head(tmp_path: Path, target: Path) -> None:
    state = random_state() | {
        "v_head.summary.weight": torch.ones(1, 8),
        "v_head.summary.bias": torch.ones(1),
    }
    source = save(tmp_path / "source", state, CONFIG)
    streammerge.merge(source, target, dtype="bfloat16")
    found = streammerge.verify(source, target)
    assert found.equal
    assert found.compared.tensors == len(state)
    file = "value_head.safetensors"
    assert changes(found, "cast")[f"{file}: v_head.summary.bias"] == "bfloat16"
    rewrite(target, lambda s: {n: t + 1 for n, t in s.items()} | {"x": torch.ones(1)}, file)
    assert kinds(streammerge.verify(source, target)) == {
        f"{file}: v_head.summary.weight": "values",
        f"{file}: v_head.summary.bias": "values",
        f"{file}: x": "extra",
    }
    (target / file).unlink()
    assert set(kinds(streammerge.verify(source, target)).values()) == {"missing"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (LORA, "lora_adapter/adapter_model.safetensors"),
        ("fsdp2_lora_only__t213", "adapter_model.safetensors"),
    ],
)
def test_adapter(name: str, file: str, target: Path) -> None:
    options: dict[str, Any] = {"lora_mode": "split", "lora_alpha": 16.0}
    streammerge.merge(DATA / name, target, **options)
    key = min(load(target / file))
    rewrite(target, lambda s: s | {key: s[key] * 2}, file)
    found = streammerge.verify(DATA / name, target, **options)
    assert kinds(found) == {f"{file}: {key}": "values"}
    assert changes(found, "split")


# --- both of one kind -----------------------------------------------------------------------------


def test_two_directories(source: Path, target: Path, tmp_path: Path) -> None:
    streammerge.merge(source, target)
    state = load(target / WEIGHTS)
    shuffled(tmp_path / "again", state, 3)
    found = streammerge.verify(target, tmp_path / "again")
    assert found.equal
    assert found.compared.tensors == len(state)
    assert found.changes == ()
    assert streammerge.verify(tmp_path / "again", target).equal
    rewrite(target, lambda s: s | {HEAD: s[HEAD].bfloat16()})
    found = streammerge.verify(target, tmp_path / "again", dtype="keep")
    assert {d.name: d.reason for d in found.compared.differences} == {
        HEAD: "F32 [66, 8], should be BF16 [66, 8]"
    }
    assert kinds(streammerge.verify(target, tmp_path / "again")) == {HEAD: "values"}
    assert streammerge.verify(tmp_path / "again", target).equal  # rounded as a merge does


def test_a_model_that_was_merged_again(source: Path, target: Path, tmp_path: Path) -> None:
    streammerge.merge(source, target)
    streammerge.merge(target, tmp_path / "half", dtype="bfloat16", max_shard_size=1000)
    found = streammerge.verify(target, tmp_path / "half")
    assert found.equal
    assert {change.kind for change in found.changes} == {"cast"}
    assert streammerge.verify(target, tmp_path / "half", dtype="bfloat16").equal
    assert not streammerge.verify(target, tmp_path / "half", raw=True).equal


def test_two_checkpoints(tmp_path: Path) -> None:
    """However they are sharded."""
    state = random_state()
    rows = save(tmp_path / "rows", state, CONFIG)
    matrices = [name for name, tensor in state.items() if tensor.ndim == 2]
    splits = {name: (COLUMNS, GRID)[at % 2] for at, name in enumerate(matrices)}
    backwards = dict(reversed(state.items()))
    columns = save(tmp_path / "columns", backwards, splits=splits, world_size=4)
    assert streammerge.verify(rows, columns).equal
    state[HEAD][5, 5] = 7.0
    other = save(tmp_path / "other", state, world_size=3)
    found = differences(streammerge.verify(rows, other))
    assert set(found) == {HEAD}
    assert found[HEAD].values is not None
    assert found[HEAD].values.index == (5, 5)
    assert found[HEAD].values.merged == "7.0"


def test_checkpoints_of_several_torch_versions() -> None:
    for others in ("fsdp2_w4__t24", "fsdp2_w4__t26"):
        expected = load(DATA / others / "expected.safetensors")
        same = load(DATA / "fsdp2_w4__t213" / "expected.safetensors")
        equal = expected.keys() == same.keys() and all(
            torch.equal(expected[name], same[name]) for name in same
        )
        assert streammerge.verify(DATA / others, DATA / "fsdp2_w4__t213").equal == equal


# --- refused --------------------------------------------------------------------------------------


def test_the_wrong_way_round(source: Path, target: Path) -> None:
    streammerge.merge(source, target)
    with pytest.raises(UsageError, match="is a checkpoint and") as caught:
        streammerge.verify(target, source)
    assert caught.value.hint == "the checkpoint comes first: streammerge verify CHECKPOINT MERGED"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bfloat16"}, "--dtype"),
        ({"lora_mode": "fold"}, "--lora"),
        ({"keep_packed": True}, "--keep-packed"),
    ],
)
def test_nothing_to_adapt(source: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: .* are both checkpoints"):
        streammerge.verify(source, source, **options)
    nothing = {name: None if name != "keep_packed" else False for name in options}
    assert streammerge.verify(source, source, raw=True, **nothing).equal


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"rtol": -1.0}, "rtol must be"),
        ({"atol": math.nan}, "atol must be"),
        ({"memory": 10}, "memory must be"),
        ({"workers": 0}, "workers must be"),
    ],
)
def test_bad_limits(source: Path, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        streammerge.verify(source, source, **limits)


# --- by command -----------------------------------------------------------------------------------


def test_what_is_said(source: Path, target: Path, run: Run) -> None:
    run("merge", source, target, "--dtype", "bfloat16")
    done = run("verify", source, target)
    *lines, summary = done.out.splitlines()
    assert lines[0].startswith("cast: ")
    assert lines[0].endswith(" (as it was merged: float32 to bfloat16)")
    assert summary.startswith(
        f"{target} holds what {source} does, bit by bit: 27 tensors compared, "
    )
    assert " peak memory " in summary
    assert done.err == ""
    assert run("verify", source, target, "--quiet").out == ""

    expected = load(target / WEIGHTS)
    flip(target / WEIGHTS, positions(target / WEIGHTS)[HEAD][0] + 2 * 13 + 1, 6)
    damaged = load(target / WEIGHTS)[HEAD][1, 5].item()
    right = expected[HEAD][1, 5].item()
    done = run("verify", source, target, code=DIFFERENT)
    assert (
        f"different: {HEAD}: 1 of 528 values differ, by at most {abs(damaged - right)!r}; first "
        f"{damaged!r} at [1, 5], should be {right!r}"
    ) in done.out.splitlines()
    assert f"{target} differs from {source} in 1 tensor: " in done.out
    assert run("verify", source, target, "--quiet", code=DIFFERENT).out == ""
    done = run("verify", source, target, "--atol", "1e39")
    assert f"{target} holds what {source} does, within the tolerance: " in done.out


def test_json(source: Path, target: Path, run: Run) -> None:
    run("merge", source, target)
    found = run("verify", source, target, "--json").json
    nbytes = sum(tensor.nbytes for tensor in random_state().values())
    assert found["seconds"] > 0
    assert found["peak_memory"] > 10 * MIB
    assert found["bytes_per_second"] > 0
    for volatile in ("seconds", "peak_memory", "bytes_per_second"):
        del found[volatile]
    assert found == {
        "reference": str(source),
        "merged": str(target),
        "equal": True,
        "tensors": 27,
        "bytes": nbytes,
        "tolerance": None,
        "differences": [],
        "changes": [],
    }
    rewrite(target, lambda s: s | {HEAD: s[HEAD] * 0 + math.inf} | {"new": torch.ones(1)})
    done = run("verify", source, target, "--json", "--rtol", "0.5", code=DIFFERENT)
    found = json.loads(done.out, parse_constant=pytest.fail)
    assert found["tolerance"] == {"rtol": 0.5, "atol": 0.0}
    extra, values = found["differences"]
    assert extra == {
        "name": "new",
        "kind": "extra",
        "reason": "should not be there",
        "values": None,
    }
    assert (values["name"], values["kind"]) == (HEAD, "values")
    assert values["values"] == {
        "index": [0, 0],
        "reference": repr(random_state()[HEAD][0, 0].item()),
        "merged": "inf",
        "count": 528,
        "elements": 528,
        "largest": "inf",
        "rounding": False,
    }


def test_a_long_list(tmp_path: Path, target: Path, run: Run) -> None:
    source = save(tmp_path / "source", {f"t{i:02}": torch.ones(3) for i in range(30)})
    run("merge", source, target)
    rewrite(target, lambda s: {name: tensor + 1 for name, tensor in s.items()})
    done = run("verify", source, target, code=DIFFERENT)
    assert done.out.count("different: t") == 20
    assert "different: 10 more tensors\n" in done.out
    done = run("verify", source, target, "--verbose", code=DIFFERENT)
    assert done.out.count("different: t") == 30


def test_several_sources_and_one_path(tmp_path: Path, source: Path, target: Path, run: Run) -> None:
    run("merge", source, target)
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(source, one)
    two.mkdir()
    (one / "model_world_size_2_rank_1.pt").rename(two / "model_world_size_2_rank_1.pt")
    run("verify", one, two, target)
    done = run("verify", source, code=USAGE)
    assert "a reference and a merged directory are needed" in done.err
    done = run("verify", source, tmp_path / "nothing", code=1)
    assert done.err.startswith(f"streammerge: error: {tmp_path / 'nothing'}: no such directory")


# --- merge --verify -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2_w4__t213", LORA])
def test_merge_that_verifies(name: str, target: Path, run: Run) -> None:
    done = run("merge", DATA / name, target, "--verify", "--max-shard-size", "2KB")
    assert "read the result again: it is what the checkpoint holds\n" in done.out
    assert run("merge", DATA / name, target, "--overwrite", "--json").json["verified"] is False
    done = run("merge", DATA / name, target, "--overwrite", "--verify", "--json")
    assert done.json["verified"] is True


def test_the_disk_is_asked_what_was_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *rest: asked.append((os.fstat(fd).st_ino, *rest))
    )
    streammerge.merge(source, target, max_shard_size=2000)
    assert asked == []
    streammerge.merge(source, target, max_shard_size=2000, overwrite=True, verify=True)
    weights = sorted(target.glob("*.safetensors"))
    assert len(weights) > 1
    assert sorted(asked) == sorted(
        (path.stat().st_ino, 0, 0, os.POSIX_FADV_DONTNEED) for path in weights
    )


def test_merge_that_went_wrong_is_not_published(
    source: Path, target: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a disk or a memory that loses a bit."""
    write_files = execution.write_files

    def write(plan: Any, directory: str, *rest: Any, **options: Any) -> int:
        done = write_files(plan, directory, *rest, **options)
        path = Path(directory) / WEIGHTS
        flip(path, positions(path)[HEAD][0] + 3, 7)
        return done

    monkeypatch.setattr(execution, "write_files", write)
    value = random_state()[HEAD][0, 0].item()
    done = run("merge", source, target, "--verify", code=1)
    assert (
        f"the result is not what the checkpoint holds: key '{HEAD}': 1 of 528 values differ, by at "
        f"most {abs(2 * value)!r}; first {-value!r} at [0, 0], should be {value!r}"
    ) in done.err
    assert os.listdir(target.parent) == [source.name]  # what is wrong is not gone on with
    with pytest.raises(ResultError):
        streammerge.merge(source, target, verify=True)
    run("merge", source, target)  # which does not notice
    assert kinds(streammerge.verify(source, target)) == {HEAD: "values"}


# --- memory ---------------------------------------------------------------------------------------

VERIFY = "from streammerge.cli import main\ncode = main(argv) - EXPECTED"


def verify_in_child(*arguments: str | Path, code: int = 0, data_limit: int) -> dict[str, Any]:
    work = VERIFY.replace("EXPECTED", str(code))
    return run_child(work, "verify", *arguments, data_limit=data_limit)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on the disk that is emptied at once, as pytest keeps those of its last runs."""
    folder, hook = tmp_path_factory.mktemp("scratch"), sys.excepthook
    yield folder
    sys.excepthook = hook  # the maker of checkpoints lets torch put its own there
    shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("layout", ["shard0", "tp"])
def test_peak_memory(scratch: Path, layout: str) -> None:
    """Large tensors in 64 MiB, with neither torch nor numpy."""
    need_space(scratch, 1_500_000_000)
    options: dict[str, Any] = {"largest": "600MB", "tensors": 20, "sparse": True}
    make(scratch / "source", "1.2GB", 8, layout, **options)
    streammerge.merge(scratch / "source", scratch / "target")
    sides = (scratch / "source", scratch / "target")
    check_without_torch(verify_in_child(*sides, data_limit=64 * MIB))
    check_without_torch(verify_in_child(sides[1], sides[1], data_limit=64 * MIB))


def test_a_difference_without_torch(source: Path, target: Path) -> None:
    """It is found all the same, but not counted."""
    streammerge.merge(source, target)
    rewrite(target, lambda state: state | {HEAD: state[HEAD] + 1})
    command = (
        "import sys; sys.modules['torch'] = None\n"
        "from streammerge.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def child(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", command, "verify", str(source), str(target), *options],
            env=os.environ | {"PYTHONPATH": str(Path(streammerge.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )

    done = child()
    assert done.returncode == DIFFERENT, done.stderr
    value = random_state()[HEAD][0, 0]
    assert (
        f"different: {HEAD}: {(value + 1).item()!r} at [0, 0], should be {value.item()!r}\n"
        in done.stdout
    )
    done = child("--rtol", "0.1")
    assert done.returncode == 1
    assert "measuring how far values are apart needs torch, which cannot be imported" in done.stderr
