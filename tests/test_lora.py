"""LoRA adapters: folded as PEFT folds them, split so that PEFT loads them, refused in doubt."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft_models
import pytest
import torch
from checkpoints import DATA, save_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from peft_models import ALPHA, RANK, ROWS, PeftCase
from safetensors.torch import save_file
from torch import nn

import streammerge
from streammerge import lora
from streammerge.changes import Change
from streammerge.checkpoint import Tensor
from streammerge.errors import UnsupportedError
from streammerge.lora import adapter_only, fold, has_adapter, is_adapter_name, join_base, split
from streammerge.lora.names import parse_name
from streammerge.lora.settings import LayerSettings, Settings, make_config
from streammerge.values import Fold, Stored, Value

PREFIX = "base_model.model."
NO_BASE = "adapter_config.json names no base model"
Shapes = Mapping[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def cases() -> dict[str, PeftCase]:
    """All models, built when they are asked for."""

    class Cases(dict):  # type: ignore[type-arg]
        def __missing__(self, row: str) -> PeftCase:
            self[row] = ROWS[row]()
            return self[row]

    return Cases()


def stored(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    """A state dict as the values of a checkpoint of one rank, without PEFT's prefix."""
    save_plain(folder, [dict(state)])
    checkpoint = streammerge.describe(str(folder))
    return {t.name.removeprefix(PREFIX): Stored(t) for t in checkpoint.tensors}


def shaped(shapes: Shapes, dtype: str = "F32") -> dict[str, Value]:
    """Values of which only names, shapes and a dtype matter."""
    return {
        name: Stored(Tensor(name, dtype, shape, SimpleNamespace(), SimpleNamespace()))  # type: ignore[arg-type]
        for name, shape in shapes.items()
    }


def peft_settings(case: PeftCase, folder: Path) -> Settings:
    """The settings that PEFT writes beside an adapter."""
    case.model.peft_config["default"].save_pretrained(str(folder))
    found = lora.read_settings(None, json.loads((folder / "adapter_config.json").read_text()))
    assert found is not None
    return found


def evaluated(value: Value, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A value by the table of `Fold`, word for word."""
    if isinstance(value, Stored):
        return state[value.tensor.name]
    assert isinstance(value, Fold)
    weight = state[value.base.tensor.name].float()
    b = state[value.b.name].float()
    if value.kind == "bias":
        assert value.a is None
        product = b
    else:
        assert value.a is not None
        a = state[value.a.name].float()
        if weight.ndim == 3 and a.ndim == 2:
            rank = len(a) // value.experts
            parts = [
                b[:, e :: value.experts] @ a[e * rank : (e + 1) * rank]
                for e in range(value.experts)
            ]
            product = torch.stack([p.T if value.kind == "transposed" else p for p in parts])
        else:
            product = b.flatten(1) @ a.flatten(1)
            product = product.T if value.kind == "transposed" else product.view_as(weight)
    total = weight + value.scale * product
    if value.magnitude is not None:
        total *= (state[value.magnitude.name].float() / total.norm(dim=1))[:, None]
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    return total.to(dtypes[value.dtype])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums."""
    tolerance = 2**-8 if expected.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- against PEFT ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_fold_equals_merge_and_unload(row: str, cases: dict[str, PeftCase], tmp_path: Path):
    case = cases[row]
    state = case.model.state_dict()
    folded = fold(
        stored(tmp_path / "ranks", state),
        peft_settings(case, tmp_path),
        model_type=case.model_type,
    )
    expected = case.merged().state_dict()
    assert list(folded.values) == list(expected)
    for name, value in folded.values.items():
        assert_close(evaluated(value, state), expected[name])
        if isinstance(value, Stored):
            assert torch.equal(evaluated(value, state), expected[name]), name
    assert folded.warnings == ()
    changed = {change.name for change in folded.changes}
    assert changed == {n.removeprefix(PREFIX) for n in state} - set(expected)
    assert {c.to for c in folded.changes if c.kind == "folded"} == {
        name for name, value in folded.values.items() if isinstance(value, Fold)
    }


@pytest.mark.parametrize("row", ROWS)
def test_split_loads_in_peft(row: str, cases: dict[str, PeftCase], tmp_path: Path):
    case = cases[row]
    state = case.model.state_dict()
    parts = split(
        stored(tmp_path / "ranks", state),
        peft_settings(case, tmp_path),
        model_type=case.model_type,
        base_name_or_path="the/base",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = get_peft_model_state_dict(case.model, save_embedding_layers=False)
    # With all biases, PEFT also saves those of `original_module`, which nothing trains.
    assert set(parts.adapter) == {n for n in expected if "original_module" not in n}
    adapter = {name: evaluated(value, state) for name, value in parts.adapter.items()}
    assert all(torch.equal(adapter[name], expected[name]) for name in adapter)

    base = copy.deepcopy(case.base)
    assert list(parts.values) == list(base.state_dict())
    base.load_state_dict({n: evaluated(v, state) for n, v in parts.values.items()}, strict=True)
    loaded = load_adapter(base, adapter, parts.config, tmp_path / "adapter")
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    torch.testing.assert_close(case.outputs(loaded), case.outputs(case.model))
    assert not torch.allclose(case.outputs(case.base), case.outputs(case.model))


def load_adapter(
    base: nn.Module, adapter: Mapping[str, torch.Tensor], config: Any, folder: Path
) -> PeftModel:
    """Write an adapter and load it, without a warning about names."""
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(base, str(folder))
    assert [str(w.message) for w in caught if "adapter keys" in str(w.message)] == []
    return loaded.eval()


# What a rank file and verl's meta file tell of those rows is enough.
@pytest.mark.parametrize(
    "row",
    ["linear", "some_layers", "fan_in_fan_out", "embedding", "convolution", "dora", "experts"],
)
def test_the_meta_file_tells_enough(row: str, cases: dict[str, PeftCase], tmp_path: Path):
    case = cases[row]
    values = stored(tmp_path / "ranks", case.model.state_dict())
    model_type = case.model_type or "toy"
    meta = lora.read_settings({"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}, None)
    full = peft_settings(case, tmp_path)
    found = fold(values, meta, model_type=model_type)
    assert found.values == fold(values, full, model_type=model_type).values
    assert found.warnings == (
        f"LoRA scale {ALPHA / RANK:.6g} = alpha 7 / r 3 (lora_train_meta.json); if it was trained "
        f"with rsLoRA, --rslora makes it {ALPHA / math.sqrt(RANK):.6g}",
    )
    parts = split(values, meta, model_type=model_type, base_name_or_path="the/base")
    expected = split(values, full, model_type=model_type, base_name_or_path="the/base")
    assert parts.config == expected.config | {"task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("row", ["linear", "bias_lora_only", "modules_to_save", "experts"])
def test_an_adapter_alone_is_joined_with_its_base(
    row: str, cases: dict[str, PeftCase], tmp_path: Path
):
    case = cases[row]
    state = {n: case.model.state_dict()[n] for n in case.trained_names()}
    values = stored(tmp_path / "ranks", state)
    assert adapter_only(values)
    found = peft_settings(case, tmp_path)
    base = case.base.state_dict()
    folded = fold(join_base(values, stored(tmp_path / "base", base)), found, model_type="toy")
    expected = case.merged().state_dict()
    assert list(folded.values) == list(expected)
    for name, value in folded.values.items():
        assert_close(evaluated(value, state | base), expected[name])


@pytest.mark.parametrize(
    "row", ["linear", "patterns", "bias_lora_only", "experts", "dora", "qwen2"]
)
def test_an_adapter_alone_becomes_an_adapter_directory(
    row: str, cases: dict[str, PeftCase], tmp_path: Path
):
    case = cases[row]
    state = {n: case.model.state_dict()[n] for n in case.trained_names()}
    parts = split(
        stored(tmp_path / "ranks", state),
        peft_settings(case, tmp_path),
        model_type=case.model_type,
        base_name_or_path=None,
    )
    assert parts.values == {}
    adapter = {name: evaluated(value, state) for name, value in parts.adapter.items()}
    loaded = load_adapter(copy.deepcopy(case.base), adapter, parts.config, tmp_path / "adapter")
    torch.testing.assert_close(case.outputs(loaded), case.outputs(case.model))
    assert any(warning.startswith(NO_BASE) for warning in parts.warnings)


def test_the_config_is_short_enough_for_old_versions(cases: dict[str, PeftCase], tmp_path: Path):
    case = cases["qwen2"]
    parts = split(
        stored(tmp_path / "ranks", case.model.state_dict()),
        Settings(r=RANK, alpha=ALPHA, task_type="CAUSAL_LM", source="lora_train_meta.json"),
        model_type="qwen2",
        base_name_or_path="Qwen/Tiny",
    )
    assert parts.config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "Qwen/Tiny",
        "inference_mode": True,
        "r": 3,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "bias": "none",
    }
    assert isinstance(parts.config["lora_alpha"], int)


def test_a_classifier_is_no_language_model(cases: dict[str, PeftCase], tmp_path: Path):
    # verl's meta file says CAUSAL_LM of critics too, and PeftModelForCausalLM cannot hold one.
    case = cases["qwen2_classifier"]
    meta = lora.read_settings({"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}, None)
    values = stored(tmp_path / "ranks", case.model.state_dict())
    parts = split(values, meta, model_type="qwen2", base_name_or_path="b")
    assert "task_type" not in parts.config
    assert parts.config["modules_to_save"] == ["score"]
    assert any("vLLM loads no adapter with modules_to_save" in w for w in parts.warnings)


def test_fixture_of_verl(tmp_path: Path):
    values = {
        t.name.removeprefix(PREFIX): Stored(t)
        for t in streammerge.describe(str(DATA / "fsdp2_lora__t213")).tensors
    }
    found = lora.read_settings({"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"}, None)
    folded = fold(values, found, model_type="qwen2")
    folds = {name: v for name, v in folded.values.items() if isinstance(v, Fold)}
    assert set(folds) == {
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    assert {(v.scale, v.kind, v.dtype, v.experts) for v in folds.values()} == {
        (4.0, "linear", "F32", 1)
    }
    assert len(folded.values) == 40
    name = "model.layers.0.self_attn.q_proj"
    reason = "LoRA, scale 4 = alpha 16 / r 4 (lora_train_meta.json)"
    renamed = "wrapper part base_layer of PEFT"
    assert [c for c in folded.changes if c.name.startswith(name)] == [
        Change("folded", f"{name}.base_layer.weight", f"{name}.weight", reason),
        Change("renamed", f"{name}.base_layer.bias", f"{name}.bias", renamed),
        Change("dropped", f"{name}.lora_A.default.weight", None, "adapter, folded into its weight"),
        Change("dropped", f"{name}.lora_B.default.weight", None, "adapter, folded into its weight"),
    ]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role", "path", "depth", "adapter"),
    [
        ("h.0.q.lora_A.default.weight", "lora_A", "h.0.q", 0, "default"),
        ("h.0.q.lora_A.weight", "lora_A", "h.0.q", 0, None),
        ("h.0.q.lora_B.default.bias", "lora_B.bias", "h.0.q", 0, "default"),
        ("wte.lora_embedding_A.default", "lora_embedding_A", "wte", 0, "default"),
        ("wte.lora_embedding_B", "lora_embedding_B", "wte", 0, None),
        ("q.lora_magnitude_vector.default.weight", "lora_magnitude_vector", "q", 0, "default"),
        ("q.lora_magnitude_vector.default", "lora_magnitude_vector", "q", 0, "default"),
        ("q.lora_magnitude_vector.weight", "lora_magnitude_vector", "q", 0, None),
        ("q.lora_magnitude_vector", "lora_magnitude_vector", "q", 0, None),
        ("e.base_layer.lora_A.default.weight", "lora_A", "e", 1, "default"),
        ("e.base_layer.base_layer.gate_up_proj", "base", "e.gate_up_proj", 1, None),
        ("q.base_layer.weight", "base", "q.weight", 0, None),
        ("a.base_layer.out.base_layer.weight", "base", "a.out.weight", 0, None),
        ("score.modules_to_save.default.weight", "trained", "score.weight", 0, "default"),
        ("head.modules_to_save.a.0.weight", "trained", "head.0.weight", 0, "a"),
        ("head.original_module.0.weight", "original", "head.0.weight", 0, None),
        # Names that only look like it.
        ("lora_A.weight", "plain", "lora_A.weight", 0, None),
        ("q.lora_A.weight.scale", "plain", "q.lora_A.weight.scale", 0, None),
        ("q.lora_A.default", "plain", "q.lora_A.default", 0, None),
        ("q.lora_bottleneck.weight", "plain", "q.lora_bottleneck.weight", 0, None),
        ("modules_to_save.weight", "plain", "modules_to_save.weight", 0, None),
        ("q.modules_to_save.default", "plain", "q.modules_to_save.default", 0, None),
        ("base_layer.weight", "plain", "base_layer.weight", 0, None),
        ("q.base_layer", "plain", "q.base_layer", 0, None),
    ],
)
def test_names_are_taken_apart(name: str, role: str, path: str, depth: int, adapter: str | None):
    parsed = parse_name(name)
    assert (parsed.role, parsed.path, parsed.depth, parsed.adapter) == (role, path, depth, adapter)
    assert is_adapter_name(name) == (role == "trained" or role.startswith("lora_"))
    assert has_adapter([name]) == (role != "plain")


def test_file_names_are_those_of_peft(cases: dict[str, PeftCase]):
    # verl takes ".default" out of names that end in ".default.weight" only, and keeps ".weight".
    names = {
        "q.lora_A.default.weight": "q.lora_A.weight",
        "q.lora_B.default.bias": "q.lora_B.bias",
        "q.lora_magnitude_vector.default.weight": "q.lora_magnitude_vector",
        "wte.lora_embedding_A.default": "wte.lora_embedding_A",
        "e.base_layer.lora_A.default.weight": "e.base_layer.lora_A.weight",
        "score.modules_to_save.default.weight": "score.weight",
    }
    for name, expected in names.items():
        assert parse_name(name).file_name == PREFIX + expected


@pytest.mark.parametrize(
    "name", ["q.ia3_l.default", "q.hada_w1_a.default", "q.oft_R.default.weight", "q.lora_E.default"]
)
def test_other_methods_count_as_an_adapter(name: str):
    assert has_adapter(["q.weight", name])
    assert not is_adapter_name(name)


def test_an_adapter_alone():
    adapter = {"q.lora_A.default.weight": (3, 6), "q.lora_B.default.weight": (6, 3)}
    assert adapter_only(shaped(adapter))
    assert adapter_only(shaped(adapter | {"score.modules_to_save.default.weight": (1, 6)}))
    assert adapter_only(shaped(adapter | {"q.base_layer.bias": (6,), "norm.bias": (6,)}))
    assert adapter_only(shaped(adapter | {"v_head.summary.weight": (1, 6)}))
    assert not adapter_only(shaped(adapter | {"q.base_layer.weight": (6, 6)}))
    assert not adapter_only(shaped(adapter | {"norm.weight": (6,)}))
    assert not adapter_only(shaped({"norm.bias": (6,)}))
    assert not adapter_only({})


# --- refused --------------------------------------------------------------------------------------

KNOWN = Settings(r=3, alpha=7.0, rslora=False, source="adapter_config.json")
LAYER: Shapes = {
    "q.base_layer.weight": (6, 5),
    "q.lora_A.default.weight": (3, 5),
    "q.lora_B.default.weight": (6, 3),
}
EMBEDDING: Shapes = {
    "e.base_layer.weight": (13, 6),
    "e.lora_embedding_A.default": (3, 13),
    "e.lora_embedding_B.default": (6, 3),
}
CONVOLUTION: Shapes = {
    "c.base_layer.weight": (8, 6, 3),
    "c.lora_A.default.weight": (3, 6, 3),
    "c.lora_B.default.weight": (8, 3, 1),
}


def changed(shapes: Shapes, **changes: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """Shapes with some set, or taken away; ``__`` stands for a dot."""
    named = {name.replace("__", "."): shape for name, shape in changes.items()}
    kept = {name: shape for name, shape in shapes.items() if name not in named}
    return kept | {name: shape for name, shape in named.items() if shape is not None}


REFUSED: dict[str, tuple[Shapes, Settings | None, str]] = {
    "no settings": (LAYER, None, "alpha of the LoRA adapter is unknown"),
    "no alpha": (LAYER, Settings(r=3), "alpha of the LoRA adapter is unknown"),
    "wrong rank": (
        LAYER,
        Settings(r=4, alpha=7.0),
        r"'q.lora_A.default.weight' has shape \[3, 5\], so rank 3; .* say 4",
    ),
    "wrong rank by pattern": (
        LAYER,
        Settings(r=3, alpha=7.0, rank_pattern={"q": 2}),
        "so rank 3; .* say 2",
    ),
    "two adapters": (
        LAYER | {"k.base_layer.weight": (6, 5), "k.lora_A.other.weight": (3, 5)},
        KNOWN,
        "several adapters: 'default', 'other'",
    ),
    "two adapters on a layer": (
        LAYER | {"q.lora_A.other.weight": (3, 5), "q.lora_B.other.weight": (6, 3)},
        KNOWN,
        "several adapters",
    ),
    "A twice": (
        LAYER | {"q.lora_A.weight": (3, 5)},
        KNOWN,
        "'q.lora_A.default.weight' and 'q.lora_A.weight' are both lora_A",
    ),
    "weight twice": (
        LAYER | {"q.base_layer.base_layer.weight": (6, 5)},
        KNOWN,
        "'q.base_layer.weight' and 'q.base_layer.base_layer.weight' are both q.weight",
    ),
    "weight beside base_layer": (
        LAYER | {"q.weight": (6, 5)},
        KNOWN,
        "'q.weight' is part of a layer",
    ),
    "no B": (
        changed(LAYER, q__lora_B__default__weight=None),
        KNOWN,
        "'q.lora_A.default.weight' has no counterpart lora_B",
    ),
    "no A": (changed(LAYER, q__lora_A__default__weight=None), KNOWN, "no counterpart lora_A"),
    "no adapter on a wrapped layer": (
        LAYER | {"k.base_layer.weight": (6, 5)},
        KNOWN,
        "'k.base_layer.weight' is of a layer with an adapter, which is missing",
    ),
    "no adapter at all": ({"q.base_layer.weight": (6, 5)}, KNOWN, "does not hold it"),
    "no weight": (
        changed(LAYER, q__base_layer__weight=None) | {"k.weight": (6, 6)},
        KNOWN,
        "fit no weight of the module, which has none",
    ),
    "adapter alone": (changed(LAYER, q__base_layer__weight=None), KNOWN, "without its base model"),
    "shapes": (
        changed(LAYER, q__lora_B__default__weight=(7, 3)),
        KNOWN,
        r"'q.base_layer.weight' has shape \[6, 5\], which A \[3, 5\] and B \[7, 3\] do not fit",
    ),
    "ranks of A and B": (
        changed(LAYER, q__lora_B__default__weight=(6, 4)),
        KNOWN,
        r"B \[6, 4\] do not fit",
    ),
    "shapes of an embedding": (
        changed(EMBEDDING, e__base_layer__weight=(6, 13)),
        KNOWN,
        "do not fit",
    ),
    "matrices of both kinds": (
        LAYER | {"q.lora_embedding_A.default": (3, 5)},
        KNOWN,
        "no counterpart lora_embedding_B|of a layer and of an embedding",
    ),
    "groups": (
        changed(CONVOLUTION, c__base_layer__weight=(8, 3, 3)),
        KNOWN,
        "do not fit, or a convolution with groups",
    ),
    "kernel of B": (
        changed(CONVOLUTION, c__lora_B__default__weight=(8, 3, 3)),
        KNOWN,
        r"B \[8, 3, 3\] do not fit",
    ),
    "DoRA on a convolution": (
        CONVOLUTION | {"c.lora_magnitude_vector.default.weight": (1, 8, 1)},
        KNOWN,
        "DoRA is supported on linear layers",
    ),
    "DoRA on an embedding": (
        EMBEDDING | {"e.lora_magnitude_vector.default.weight": (6,)},
        KNOWN,
        "DoRA is supported on linear layers",
    ),
    "DoRA and fan_in_fan_out": (
        changed(LAYER, q__base_layer__weight=(5, 6))
        | {"q.lora_magnitude_vector.default.weight": (6,)},
        KNOWN,
        "not on embeddings, convolutions or fan_in_fan_out",
    ),
    "magnitude of another shape": (
        LAYER | {"q.lora_magnitude_vector.default.weight": (5,)},
        KNOWN,
        r"has shape \[5\], expected \[6\]",
    ),
    "magnitudes that are missing": (
        LAYER,
        Settings(r=3, alpha=7.0, dora=True),
        "its lora_magnitude_vector is missing",
    ),
    "magnitudes of one layer only": (
        LAYER
        | {name.replace("q.", "k.", 1): shape for name, shape in LAYER.items()}
        | {"k.lora_magnitude_vector.default.weight": (6,)},
        KNOWN,
        "'q.lora_A.default.weight' is of a DoRA adapter",
    ),
    "magnitudes against the settings": (
        LAYER | {"q.lora_magnitude_vector.default.weight": (6,)},
        Settings(r=3, alpha=7.0, dora=False),
        "say that use_dora is false",
    ),
    "lora_bias without a bias": (
        LAYER | {"q.lora_B.default.bias": (6,)},
        KNOWN,
        "'q.lora_B.default.bias': the layer has no bias",
    ),
    "trainable tokens": (
        LAYER
        | {
            "e.token_adapter.base_layer.weight": (13, 6),
            "e.token_adapter.trainable_tokens_delta.default": (2, 6),
        },
        KNOWN,
        "'e.token_adapter.[a-z_.]*' is of trainable tokens",
    ),
    "IA3": (
        {"q.base_layer.weight": (6, 5), "q.ia3_l.default": (6, 1)},
        KNOWN,
        "'q.ia3_l.default' is of IA3; of PEFT's methods only LoRA",
    ),
    "IA3 alone": ({"q.ia3_l.default": (6, 1)}, KNOWN, "is of IA3"),
    "LoHa": (
        {"q.base_layer.weight": (6, 5), "q.hada_w1_a.default": (6, 3)},
        KNOWN,
        "is of LoHa",
    ),
    "AdaLoRA": (
        {
            "q.base_layer.weight": (6, 5),
            "q.lora_A.default": (3, 5),
            "q.lora_B.default": (6, 3),
            "q.lora_E.default": (3, 1),
            "q.ranknum.default": (),
        },
        KNOWN,
        "'q.lora_E.default' is of AdaLoRA",
    ),
    "KaSA": (LAYER | {"q.lora_diag.default": (3,)}, KNOWN, "is of KaSA"),
    "unknown tensor at a layer": (
        LAYER | {"q.sora_gate.default": (3,)},
        KNOWN,
        "'q.sora_gate.default' is part of a layer with an adapter",
    ),
    "adapter in modules_to_save": (
        LAYER | {"h.modules_to_save.default.d.lora_A.default.weight": (3, 5)},
        KNOWN,
        "an adapter in a module of modules_to_save",
    ),
    "original without a trained one": (
        LAYER | {"h.original_module.weight": (2, 6)},
        KNOWN,
        "'h.original_module.weight' has no counterpart in modules_to_save",
    ),
    "nn.MultiheadAttention": (
        {
            "a.base_layer.in_proj_weight": (18, 6),
            "a.lora_A.default.weight": (3, 6),
            "a.lora_B.default.weight": (18, 3),
        },
        KNOWN,
        "nn.MultiheadAttention is not supported",
    ),
    "A without rows": (
        LAYER | {"q.lora_A.default.weight": (0, 5), "q.lora_B.default.weight": (6, 0)},
        Settings(alpha=7.0),
        r"'q.lora_A.default.weight' has shape \[0, 5\], so it has no rank",
    ),
    "A without dims": (
        LAYER | {"q.lora_A.default.weight": ()},
        KNOWN,
        r"'q.lora_A.default.weight' has shape \[\], so it has no rank",
    ),
    "base changed before training": (
        {"q.weight": (6, 5), **changed(LAYER, q__base_layer__weight=None)},
        Settings(r=3, alpha=7.0, initialization="pissa"),
        "initialized with pissa, which changes the base weights",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str):
    shapes, found, message = REFUSED[reason]
    with pytest.raises(UnsupportedError, match=message):
        fold(shaped(shapes), found, model_type="toy")


@pytest.mark.parametrize("shapes", [LAYER, EMBEDDING, CONVOLUTION])
def test_what_is_refused_is_so_for_its_fault_alone(shapes: Shapes):
    # The layers that the cases above damage are good.
    assert len(fold(shaped(shapes), KNOWN, model_type="toy").values) == 1


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "F8_E4M3"])
def test_a_quantized_base_is_refused(dtype: str):
    values = shaped(LAYER) | shaped({"q.base_layer.weight": (6, 5)}, dtype)
    with pytest.raises(UnsupportedError, match=f"'q.base_layer.weight' is of {dtype}") as caught:
        fold(values, KNOWN, model_type="toy")
    assert "--lora split" in str(caught.value.hint)
    assert split(values, KNOWN, model_type="toy", base_name_or_path=None).values == {
        "q.weight": values["q.base_layer.weight"]
    }


def test_the_hint_for_a_missing_alpha_names_the_option():
    for act in (fold, lambda *a, **k: split(*a, base_name_or_path=None, **k)):
        with pytest.raises(UnsupportedError) as caught:
            act(shaped(LAYER), Settings(r=3), model_type="toy")
        assert "--lora-alpha" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("model_type", "known", "others", "expected"),
    [
        ("llama", {}, None, "linear"),
        ("gpt2", {}, None, "transposed"),
        ("gpt2", {"fan_in_fan_out": False}, None, "transposed"),
        (None, {}, None, None),
        (None, {}, (6, 5), "linear"),
        (None, {}, (5, 6), None),
        ("remote", {}, (5, 6), None),
        ("remote", {"fan_in_fan_out": True}, (5, 6), "transposed"),
        ("remote", {"fan_in_fan_out": True}, None, "transposed"),
        ("remote", {"fan_in_fan_out": True}, (6, 5), None),
        ("remote", {"fan_in_fan_out": False}, (5, 6), None),
        (None, {"fan_in_fan_out": False}, None, "linear"),
    ],
)
def test_square_weights(
    model_type: str | None,
    known: dict[str, bool],
    others: tuple[int, int] | None,
    expected: str | None,
):
    """`others` is the weight of another layer, with 5 inputs and 6 outputs."""
    shapes = {
        "k.base_layer.weight": (6, 6),
        "k.lora_A.default.weight": (3, 6),
        "k.lora_B.default.weight": (6, 3),
    }
    if others:
        shapes |= changed(LAYER, q__base_layer__weight=others)
    found = Settings(r=3, alpha=7.0, **known)  # type: ignore[arg-type]
    if expected is None:
        with pytest.raises(UnsupportedError, match=r"'k\.base_layer\.weight' is square") as caught:
            fold(shaped(shapes), found, model_type=model_type)
        assert "fan_in_fan_out" in str(caught.value.hint)
    else:
        value = fold(shaped(shapes), found, model_type=model_type).values["k.weight"]
        assert isinstance(value, Fold)
        assert value.kind == expected


def stack(name: str, weight: tuple[int, ...], inputs: int, outputs: int) -> Shapes:
    """A stack of 2 experts with an adapter of rank 3."""
    return {
        f"{name}.base_layer.w": weight,
        f"{name}.lora_A.default.weight": (6, inputs),
        f"{name}.lora_B.default.weight": (outputs, 6),
    }


@pytest.mark.parametrize(
    ("other", "expected"), [((2, 8, 5), "linear"), ((2, 5, 8), "transposed"), (None, None)]
)
def test_square_experts_lie_as_the_others_do(other: tuple[int, ...] | None, expected: str | None):
    # Not even the type of the model tells: gpt-oss in transformers 4 lies otherwise than in 5.
    shapes = dict(stack("x", (2, 7, 7), 7, 7))
    shapes |= stack("y", other, 5, 8) if other else {}
    if expected is None:
        with pytest.raises(UnsupportedError, match=r"'x\.base_layer\.w' is square"):
            fold(shaped(shapes), KNOWN, model_type="gpt_oss")
    else:
        value = fold(shaped(shapes), KNOWN, model_type="gpt_oss").values["x.w"]
        assert isinstance(value, Fold)
        assert (value.kind, value.experts, value.scale) == (expected, 2, 7 / 3)


def test_other_layers_do_not_tell_how_a_square_one_lies():
    # Neither a matrix among parameters, nor a convolution or an embedding among layers.
    matrix = {
        "g.base_layer.w": (8, 5),
        "g.lora_A.default.weight": (3, 5),
        "g.lora_B.default.weight": (8, 3),
    }
    with pytest.raises(UnsupportedError, match=r"'x\.base_layer\.w' is square"):
        fold(shaped(matrix | stack("x", (2, 7, 7), 7, 7)), KNOWN, model_type="toy")
    square = changed(LAYER, q__base_layer__weight=(6, 6), q__lora_A__default__weight=(3, 6))
    for other in (CONVOLUTION, EMBEDDING):
        with pytest.raises(UnsupportedError, match=r"'q\.base_layer\.weight' is square"):
            fold(shaped({**square, **other}), KNOWN, model_type=None)


TWINS: Shapes = {
    "m.base_layer.w1": (2, 8, 5),
    "m.base_layer.w3": (2, 8, 5),
    "m.lora_A.default.weight": (6, 5),
    "m.lora_B.default.weight": (8, 6),
}


def test_parameters_of_one_shape_need_settings():
    with pytest.raises(UnsupportedError, match=r"fit 'm.w1', and 'm.w3' as well") as caught:
        fold(shaped(TWINS), KNOWN, model_type="toy")
    assert "target_parameters" in str(caught.value.hint)
    known = Settings(r=3, alpha=7.0, target_parameters=("m.w3",))
    folded = fold(shaped(TWINS), known, model_type="toy")
    assert [name for name, v in folded.values.items() if isinstance(v, Fold)] == ["m.w3"]


def test_wrappers_of_one_module_are_in_the_order_of_its_parameters():
    # As PEFT 0.21 nests them; see also the rows with experts.
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w3 = nn.Parameter(torch.randn(2, 8, 5))
            self.w1 = nn.Parameter(torch.randn(2, 8, 5))

    config = LoraConfig(r=3, target_modules=[], target_parameters=["m.w1", "m.w3"])
    model = get_peft_model(nn.ModuleDict({"m": Twins()}), config)
    wrapper = model.get_submodule(f"{PREFIX}m")
    inner = [wrapper.base_layer.parameter_name, wrapper.parameter_name]
    state = {name.removeprefix(PREFIX): t for name, t in model.state_dict().items()}
    values = shaped({name: tuple(tensor.shape) for name, tensor in state.items()})
    folded = fold(values, Settings(r=3, alpha=7.0), model_type="toy")
    assert inner == ["w3", "w1"]
    depths = {"m.w3": "m.base_layer.lora_A.default.weight", "m.w1": "m.lora_A.default.weight"}
    for target, a in depths.items():
        value = folded.values[target]
        assert isinstance(value, Fold)
        assert value.a is not None
        assert value.a.name == a


def test_a_bias_that_is_replaced_is_not_trained():
    shapes = LAYER | {"q.base_layer.bias": (6,), "norm.bias": (6,), "norm.weight": (6,)}
    for name in ("original_module", "modules_to_save.default"):
        shapes |= {f"h.{name}.weight": (2, 6), f"h.{name}.bias": (2,)}
    for bias, expected in (
        ("all", {"q.base_layer.bias", "norm.bias", "h.bias"}),
        ("lora_only", {"q.base_layer.bias", "h.bias"}),
        ("none", {"h.bias"}),
    ):
        known = Settings(r=3, alpha=7.0, bias=bias)
        values = shaped(shapes)
        parts = split(values, known, model_type="toy", base_name_or_path=None)
        assert {n for n in parts.adapter if n.endswith("bias")} == {PREFIX + n for n in expected}
        assert parts.adapter[f"{PREFIX}h.bias"] == values["h.modules_to_save.default.bias"]
        assert parts.values["h.bias"] == values["h.original_module.bias"]
        assert parts.values["q.bias"] == values["q.base_layer.bias"]
        assert parts.config["bias"] == bias


def test_the_scale_is_warned_about_where_rslora_would_change_it():
    known = Settings(alpha=6.0, source="--lora-alpha")
    assert fold(shaped(LAYER), known, model_type="toy").warnings == (
        "LoRA scale 2 = alpha 6 / r 3 (--lora-alpha); if it was trained with rsLoRA, --rslora "
        "makes it 3.4641",
    )
    one = changed(LAYER, q__lora_A__default__weight=(1, 5), q__lora_B__default__weight=(6, 1))
    assert fold(shaped(one), known, model_type="toy").warnings == ()
    stabilized = Settings(alpha=6.0, rslora=True, source="--lora-alpha")
    folded = fold(shaped(LAYER), stabilized, model_type="toy")
    assert folded.warnings == ()
    assert folded.changes[0].reason == "LoRA, scale 3.4641 = alpha 6 / sqrt(r 3) (--lora-alpha)"


# --- the base model of an adapter alone -----------------------------------------------------------

ALONE = changed(LAYER, q__base_layer__weight=None)


def test_a_base_with_other_names_is_refused():
    base = shaped({"text.q.weight": (6, 5), "text.k.weight": (6, 5)})
    with pytest.raises(UnsupportedError) as caught:
        join_base(shaped(ALONE), base)
    assert str(caught.value) == (
        "the adapter is for 'q', which the base model does not have; names there are like "
        "'text.q.weight', 'text.k.weight'"
    )
    with pytest.raises(UnsupportedError, match=r"for 'k\.bias', which the base model"):
        join_base(shaped({**ALONE, "k.bias": (6,)}), shaped({"q.weight": (6, 5)}))


def test_the_base_keeps_its_order_and_gets_trained_biases():
    adapter = shaped(
        {
            **ALONE,
            "q.base_layer.bias": (6,),
            "h.modules_to_save.default.weight": (2, 6),
            "v_head.summary.weight": (1, 6),
        }
    )
    base = shaped({"h.weight": (2, 6), "q.bias": (6,), "q.weight": (6, 5)})
    joined = join_base(adapter, base)
    assert list(joined)[:3] == ["h.weight", "q.bias", "q.weight"]
    folded = fold(joined, KNOWN, model_type="toy")
    assert list(folded.values) == ["q.bias", "q.weight", "h.weight", "v_head.summary.weight"]
    assert folded.values["q.bias"] == adapter["q.base_layer.bias"]
    assert folded.values["h.weight"] == adapter["h.modules_to_save.default.weight"]


def test_an_adapter_alone_names_its_modules_whole():
    # Nothing tells whether there are others of that name, not even biases that are beside it.
    shapes = {f"h.0.{name}": shape for name, shape in {**ALONE, "q.base_layer.bias": (6,)}.items()}
    parts = split(shaped(shapes), KNOWN, model_type=None, base_name_or_path=None)
    assert parts.config["target_modules"] == ["h.0.q"]


@pytest.mark.parametrize(
    ("biases", "expected"),
    [
        ([], "none"),
        (["q.base_layer.bias"], "lora_only"),
        (["q.base_layer.bias", "norm.bias"], "all"),
    ],
)
@pytest.mark.parametrize("said", ["none", "lora_only", "all"])
def test_biases_of_an_adapter_alone_are_never_lost(biases: list[str], expected: str, said: str):
    # verl's meta file does not tell that they are trained, but what else are they there for?
    head = {"v_head.summary.bias": (1,), "v_head.summary.weight": (1, 6)}
    values = shaped({**ALONE, **dict.fromkeys(biases, (6,)), **head})
    known = Settings(r=3, alpha=7.0, bias=said)
    parts = split(values, known, model_type=None, base_name_or_path=None)
    assert set(parts.values) == set(head)
    assert len(parts.adapter) == len(values) - len(head)
    assert all(parts.adapter[PREFIX + name] == values[name] for name in biases)
    assert parts.config["bias"] == expected


def test_an_adapter_of_a_changed_base_is_refused_alone():
    changed_base = Settings(r=3, alpha=7.0, initialization="olora", base_model="the/first")
    with pytest.raises(UnsupportedError, match="initialized with olora"):
        split(shaped(ALONE), changed_base, model_type=None, base_name_or_path=None)
    # With its own base it is as any other, but does not fit the base that its settings name.
    parts = split(shaped(LAYER), changed_base, model_type="toy", base_name_or_path=None)
    assert "base_model_name_or_path" not in parts.config


def test_the_name_of_the_base_model():
    known = Settings(r=3, alpha=7.0, base_model="the/first")
    for said, expected in ((None, "the/first"), ("the/other", "the/other")):
        parts = split(shaped(LAYER), known, model_type="toy", base_name_or_path=said)
        assert parts.config["base_model_name_or_path"] == expected


def test_parameters_of_an_adapter_alone_need_settings():
    nested = {
        "e.base_layer.lora_A.default.weight": (6, 5),
        "e.base_layer.lora_B.default.weight": (8, 6),
        "e.lora_A.default.weight": (6, 4),
        "e.lora_B.default.weight": (5, 6),
    }
    with pytest.raises(UnsupportedError, match="adapters for 2 parameters, and nothing tells"):
        split(shaped(nested), KNOWN, model_type=None, base_name_or_path=None)
    known = Settings(r=3, alpha=7.0, target_parameters=("e.up", "e.down"))
    config = split(shaped(nested), known, model_type=None, base_name_or_path=None).config
    assert config["target_parameters"] == ["e.up", "e.down"]
    assert (config["r"], config["target_modules"]) == (3, [])


# --- settings -------------------------------------------------------------------------------------


def test_nothing_is_known():
    assert lora.read_settings(None, None) is None


def test_the_meta_file():
    found = lora.read_settings({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}, None)
    assert found == Settings(r=8, alpha=16.0, task_type="CAUSAL_LM", source="lora_train_meta.json")


def test_a_whole_config_of_peft(tmp_path: Path):
    LoraConfig(
        r=8,
        lora_alpha=12.5,  # type: ignore[arg-type]
        use_dora=True,
        fan_in_fan_out=True,
        bias="all",
        task_type="TOKEN_CLS",
        rank_pattern={"q": 4},
        alpha_pattern={"k": 5},
        target_modules=["q", "k"],
        modules_to_save=["score"],
        init_lora_weights="pissa_niter_4",
        base_model_name_or_path="the/base",
    ).save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert lora.read_settings(None, config) == Settings(
        r=8,
        alpha=12.5,
        rslora=False,
        dora=True,
        fan_in_fan_out=True,
        rank_pattern={"q": 4},
        alpha_pattern={"k": 5.0},
        bias="all",
        modules_to_save=("score",),
        task_type="TOKEN_CLS",
        base_model="the/base",
        initialization="pissa_niter_4",
        source="adapter_config.json",
    )


def test_options_count_before_files():
    meta, config = {"r": 8, "lora_alpha": 16}, {"r": 8, "lora_alpha": 32, "use_rslora": False}
    found = lora.read_settings(meta, config, alpha=4.0, rslora=True)
    assert found is not None
    assert (found.alpha, found.rslora, found.source) == (4.0, True, "--lora-alpha")
    alone = lora.read_settings(None, None, alpha=4.0)
    assert alone == Settings(alpha=4.0, source="--lora-alpha")


@pytest.mark.parametrize(
    ("meta", "config", "alpha", "source"),
    [
        (16, 16, 16.0, "adapter_config.json"),
        (12, 12.5, 12.5, "adapter_config.json"),  # the meta file holds integers only
        (16, 0, 16.0, "lora_train_meta.json"),  # verl's exporter writes 0 for "unknown"
        (0, 0.5, 0.5, "adapter_config.json"),
        (0, None, None, ""),
    ],
)
def test_alphas_that_agree(meta: int, config: float | None, alpha: float | None, source: str):
    more = None if config is None else {"lora_alpha": config}
    found = lora.read_settings({"lora_alpha": meta}, more)
    assert found is not None
    assert (found.alpha, found.source) == (alpha, source)


def test_files_that_contradict_each_other():
    with pytest.raises(UnsupportedError) as caught:
        lora.read_settings({"lora_alpha": 16}, {"lora_alpha": 32})
    assert str(caught.value) == (
        "lora_train_meta.json says lora_alpha 16, adapter_config.json says 32"
    )
    with pytest.raises(UnsupportedError, match=r"meta.json says r 4, adapter_config.json says 8"):
        lora.read_settings({"r": 4}, {"r": 8})
    found = lora.read_settings({"r": 4}, {"r": 8, "rank_pattern": {"q": 4}})
    assert found is not None
    assert found.r == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "of type IA3, expected LORA"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config is set"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"megatron_config": {"a": 1}}, "megatron_config is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', expected a number"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan, expected a number"),
        ({"r": True}, "r is True, expected a positive integer"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"bias": "some"}, "bias is 'some', expected none, all or lora_only"),
        ({"rank_pattern": {"q": "4"}}, "rank_pattern.q is '4'"),
        ({"rank_pattern": ["q"]}, r"rank_pattern is \['q'\], expected an object"),
        ({"alpha_pattern": {"(": 4}}, r"the key '\(', which is not a regular expression"),
        ({"alpha_pattern": {"a{99999999999}": 4}}, "which is not a regular expression"),
        ({"alpha_pattern": {"(" * 5000: 4}}, "which is not a regular expression"),
        pytest.param(
            {"rank_pattern": {"(?i)q": 4}},
            "'\\(\\?i\\)q', which is not a regular expression: global flags not at the start",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="a warning before 3.11"),
        ),
        ({"lora_alpha": 10**400}, "lora_alpha is 10+, expected a number"),
        ({"target_parameters": "x"}, "target_parameters is 'x', expected a list"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        lora.read_settings(None, config)


def test_every_variant_of_peft_is_known():
    # A field of a later PEFT that changes the arithmetic must not go by unseen. These do not:
    # training alone differs, or the tensors show it.
    harmless = {"use_dora", "velora_config", "monteclora_config"}
    fields = LoraConfig.__dataclass_fields__.values()
    variants = {f.name for f in fields if f.metadata.get("is_lora_variant")}
    for name in variants - harmless:
        with pytest.raises(UnsupportedError, match=f"{name} is set"):
            lora.read_settings(None, {name: [1]})


@pytest.mark.parametrize("known", [{"peft_version": "0.18.0"}, {}])
def test_patterns_that_old_versions_read_otherwise(known: dict[str, str]):
    # peft 0.13 looks up the key "0.q" in both, so it would give this layer alpha 7.
    config = {"r": 3, "lora_alpha": 7, "rank_pattern": {"0.q": 3}, "alpha_pattern": {"q": 5}}
    found = lora.read_settings(None, config | known)  # type: ignore[arg-type]
    assert found is not None
    assert found.alpha_of("layers.1.q") == 5
    if known:
        assert found.alpha_of("layers.0.q") == 5
    else:
        with pytest.raises(UnsupportedError, match=r"another alpha in peft 0\.13 and older"):
            found.alpha_of("layers.0.q")


def test_unknown_tasks_are_left_out():
    found = lora.read_settings({"task_type": "REWARD"}, {"task_type": None})
    assert found is not None
    assert found.task_type is None


NAMES = st.lists(st.sampled_from(["a", "b", "1", "q"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.dictionaries(
    st.one_of(NAMES, st.sampled_from(["^a", r".*\.q", "a|b", r"b\.1", "q.*"])),
    st.integers(1, 9),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, NAMES)
def test_patterns_match_as_in_peft(pattern: dict[str, int], name: str):
    expected = pattern.get(get_pattern_key(pattern.keys(), name), 77)
    assert Settings(r=77, rank_pattern=pattern).rank_of(name) == expected


def in_peft_13(config: Any, name: str, pattern: str, default: str) -> float:
    """Rank or alpha of a module in peft 0.11 to 0.13, as their `LoraModel` looks it up."""
    keys = [*config.get("rank_pattern", {}), *config.get("alpha_pattern", {})]
    key = next((key for key in keys if re.match(rf".*\.{key}$", name)), name)
    return config.get(pattern, {}).get(key, config[default])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.integers(1, 3), st.sampled_from([4, 8.5])), min_size=1))
def test_written_patterns_give_each_layer_its_rank(layers: dict[str, tuple[int, float]]):
    layers |= {f"model.{name}": expected for name, expected in layers.items()}
    config: Any = make_config(
        Settings(),
        [LayerSettings(name, rank, alpha) for name, (rank, alpha) in layers.items()],
        base_name_or_path=None,
        task_type=None,
        target_modules=[],
        target_parameters=[],
        modules_to_save=[],
        flags=[],
    )
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    for name, expected in layers.items():
        rank = ranks.get(get_pattern_key(ranks, name), config["r"])
        alpha = alphas.get(get_pattern_key(alphas, name), config["lora_alpha"])
        assert (rank, alpha) == expected
        if name.startswith("model."):  # others may be the ends of names
            assert in_peft_13(config, name, "rank_pattern", "r") == expected[0]
            assert in_peft_13(config, name, "alpha_pattern", "lora_alpha") == expected[1]


@settings(max_examples=300, deadline=None)
@given(st.sets(NAMES, min_size=1, max_size=8), st.data())
def test_written_target_modules_are_those_that_peft_finds(modules: set[str], data: st.DataObject):
    # No module of this model is inside another.
    leaves = sorted(m for m in modules if not any(o.startswith(f"{m}.") for o in modules))
    trained = data.draw(st.sets(st.sampled_from(leaves), min_size=1))
    shapes: dict[str, tuple[int, ...]] = {}
    for module in leaves:
        shapes |= (
            {name.replace("q", module, 1): shape for name, shape in LAYER.items()}
            if module in trained
            else {f"{module}.weight": (6, 5)}
        )
    parts = split(shaped(shapes), KNOWN, model_type="toy", base_name_or_path=None)
    config = LoraConfig(target_modules=parts.config["target_modules"])  # type: ignore[arg-type]
    found = {module for module in leaves if check_target_module_exists(config, module)}
    # A name that is the end of another's cannot be told apart from it; an adapter more is zero.
    ends = {m for m in leaves if any(m.endswith(f".{t}") for t in trained)}
    assert trained <= found <= trained | ends


def test_peft_models_are_trained(cases: dict[str, PeftCase]):
    # The rows show something only if the adapter is not zero.
    for row in ("linear", "dora", "experts", "convolution"):
        for name in cases[row].trained_names():
            assert cases[row].model.get_parameter(name).abs().max() > 0.05, name
    assert peft_models.ALPHA / peft_models.RANK not in {0.5, 1.0, 2.0, 4.0}
