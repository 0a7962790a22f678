"""Wrapper parts in names, as torch, peft and stored checkpoints have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import peft
import pytest
import torch
from checkpoints import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    checkpoint_wrapper,
)
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE, clean_tensor_name

import streammerge
from streammerge import UnsupportedError
from streammerge.changes import Change
from streammerge.names import clean_names, is_value_head, refuse_flat_parameter

ANYWHERE = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def cleaned(names: Sequence[str], **options: bool) -> list[str]:
    """The clean names in order."""
    return list(clean_names(names, **options).names.values())


def stored_names(checkpoint: str) -> list[str]:
    return [tensor.name for tensor in streammerge.describe(DATA / checkpoint).tensors]


def compiled(module: nn.Module) -> nn.Module:
    """The module as torch.compile wraps it; the backend imports no compiler."""
    return torch.compile(module, backend="eager")


class Toy(nn.Module):
    """A model with a module, its weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))


TOY = list(Toy().state_dict())


# --- parts anywhere ---


@pytest.mark.parametrize("part", ANYWHERE)
def test_parts_go_wherever_they_are(part: str) -> None:
    names = [f"{part}.a.weight", f"a.{part}.bias", f"b.{part}.{part}.weight", "c.weight"]
    assert cleaned(names) == ["a.weight", "a.bias", "b.weight", "c.weight"]


@pytest.mark.parametrize("part", ANYWHERE)
@pytest.mark.parametrize("pattern", ["my{}.x", "{}s.x", "a.{}_.x", "a.my{}", "{}x", "A{}.b"])
def test_only_whole_components_go(part: str, pattern: str) -> None:
    name = pattern.format(part)
    assert clean_names([name]).names == {name: name}
    assert clean_names([name]).changes == ()


def test_torch_calls_them_that() -> None:
    assert {FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE} < set(ANYWHERE)


@given(st.lists(st.sampled_from([*ANYWHERE[1:3], "layers", "0", "weight"]), min_size=1))
@fixed
def test_fsdp_cleans_names_the_same(components: list[str]) -> None:
    """Torch replaces text, which is the same as long as no component ends in a wrapper's name."""
    name = ".".join([*components, "weight"])
    assert cleaned([name]) == [clean_tensor_name(name)]


# --- prefixes ---


@pytest.mark.parametrize("times", [1, 2, 3])
def test_module_goes_from_the_front_of_all(times: int) -> None:
    names = ["module." * times + name for name in TOY]
    assert cleaned(names) == TOY


def test_module_stays_unless_all_have_it() -> None:
    names = ["module.a.weight", "module.b.weight", "modules.c.weight"]
    assert cleaned(names) == names
    names = ["module.a.weight", "module"]
    assert cleaned(names) == names
    names = ["module.a.weight", "v_head.summary.weight"]
    assert cleaned(names) == names


def test_module_stays_in_the_middle() -> None:
    """Levit of transformers has such a residual wrapper."""
    names = ["levit.stages.0.module.queries.weight", "levit.stages.0.module.keys.weight"]
    assert cleaned(names) == names
    assert cleaned([f"module.{name}" for name in names]) == names


@pytest.mark.parametrize(
    "inside",
    [
        "q.lora_A.default.weight",
        "q.lora_B.default.bias",
        "q.lora_embedding_A.default",
        "q.lora_magnitude_vector.default.weight",
        "q.modules_to_save.default.weight",
        "q.base_layer.weight",
    ],
)
def test_a_peft_model_is_known_by_what_peft_puts_inside(inside: str) -> None:
    result = clean_names([f"base_model.model.{inside}", "base_model.model.norm.weight"])
    assert list(result.names.values()) == [inside, "norm.weight"]
    assert result.peft


def test_a_peft_model_is_known_by_its_settings() -> None:
    names = ["base_model.model.a.weight", "base_model.model.b.weight"]
    assert cleaned(names) == names
    assert not clean_names(names).peft
    assert cleaned(names, adapter_settings=True) == ["a.weight", "b.weight"]
    assert clean_names(names, adapter_settings=True).peft


@pytest.mark.parametrize("adapter_settings", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["base_model.model.q.lora_A.default.weight", "lm_head.weight"],
        ["base_model.q.lora_A.default.weight", "base_model.model.q.weight"],
        ["model.base_model.model.q.lora_A.default.weight"],
        ["base_model.models.q.lora_A.default.weight"],
        ["base_model.model"],
        ["v_head.summary.weight"],
        ["q.lora_A.vision.weight", "q.base_layer.weight"],
    ],
)
def test_other_base_models_stay(names: list[str], adapter_settings: bool) -> None:
    result = clean_names(names, adapter_settings=adapter_settings)
    assert list(result.names.values()) == names
    assert not result.peft


def test_names_that_only_look_like_lora() -> None:
    names = ["base_model.model.flora_A.weight", "base_model.model.my_base_layer.weight"]
    assert cleaned(names) == names


def test_the_wrapped_model_of_a_value_head() -> None:
    names = ["pretrained_model.lm_head.weight", "v_head.summary.weight", "summary.bias"]
    assert cleaned(names) == ["lm_head.weight", "v_head.summary.weight", "summary.bias"]
    assert cleaned(["pretrained_model.a", "pretrained_model.b.c"]) == ["a", "b.c"]


@pytest.mark.parametrize("other", ["lm_head.weight", "v_heads.weight", "score.weight", "summary"])
def test_a_pretrained_model_beside_anything_else_stays(other: str) -> None:
    names = ["pretrained_model.embed.weight", "v_head.summary.weight", other]
    assert cleaned(names) == names


@pytest.mark.parametrize("front", ["", "pretrained_model."])
def test_a_peft_model_beside_a_value_head(front: str) -> None:
    """TRL's own state dict leaves ``pretrained_model.`` off."""
    names = [
        f"{front}base_model.model.q.base_layer.weight",
        f"{front}base_model.model.q.lora_A.default.weight",
        "v_head.summary.weight",
    ]
    result = clean_names(names)
    assert list(result.names.values()) == [
        "q.base_layer.weight",
        "q.lora_A.default.weight",
        "v_head.summary.weight",
    ]
    assert result.peft


def test_wrappers_in_any_order() -> None:
    names = [
        "module._orig_mod.pretrained_model.base_model.model._fsdp_wrapped_module.q.base_layer.weight",
        "module._orig_mod.pretrained_model.base_model.model.q.lora_A._orig_mod.default.weight",
        "module._orig_mod.v_head.summary.weight",
    ]
    assert cleaned(names) == [
        "q.base_layer.weight",
        "q.lora_A.default.weight",
        "v_head.summary.weight",
    ]
    names = [f"base_model.model.module.base_model.model.{name}" for name in ("a", "b.base_layer.c")]
    assert cleaned(names) == ["a", "b.base_layer.c"]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("v_head.summary.weight", True),
        ("summary.bias", True),
        ("v_head", False),
        ("summary", False),
        ("v_heads.weight", False),
        ("model.v_head.weight", False),
        ("summary_proj.weight", False),
    ],
)
def test_value_heads(name: str, head: bool) -> None:
    assert is_value_head(name) is head


# --- changes ---


def test_changes_say_what_went() -> None:
    names = ["module.a._orig_mod.b", "module._orig_mod._fsdp_wrapped_module.c", "module.d"]
    assert clean_names(names).changes == (
        Change(
            "renamed",
            "module.a._orig_mod.b",
            "a.b",
            "wrapper part _orig_mod of torch.compile, prefix module. of DDP",
        ),
        Change(
            "renamed",
            "module._orig_mod._fsdp_wrapped_module.c",
            "c",
            "wrapper part _orig_mod of torch.compile, "
            "wrapper part _fsdp_wrapped_module of FSDP1, prefix module. of DDP",
        ),
        Change("renamed", "module.d", "d", "prefix module. of DDP"),
    )


def test_what_stays_is_no_change() -> None:
    changes = clean_names(["a", "b._orig_mod.c"]).changes
    assert [(change.name, change.to) for change in changes] == [("b._orig_mod.c", "b.c")]


def test_the_same_parts_give_the_same_reason() -> None:
    """Whatever their order and number, so that they are shown as one group."""
    names = [
        "_orig_mod.a._fsdp_wrapped_module.b",
        "_fsdp_wrapped_module.c._orig_mod.d",
        "_orig_mod._orig_mod._fsdp_wrapped_module.e",
    ]
    assert len({change.reason for change in clean_names(names).changes}) == 1
    names = [f"module.module.{name}" for name in TOY]
    assert {change.reason for change in clean_names(names).changes} == {"prefix module. of DDP"}


# --- what is refused ---


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.b", "a._orig_mod.b"], "keys 'a.b' and 'a._orig_mod.b' both become 'a.b'"),
        (
            ["x", "_orig_mod.a", "_fsdp_wrapped_module.a"],
            "keys '_orig_mod.a' and '_fsdp_wrapped_module.a' both become 'a'",
        ),
        (["module._orig_mod.a", "module.a"], "keys 'module._orig_mod.a' and 'module.a' both"),
        (
            ["pretrained_model.v_head.x", "v_head.x"],
            "keys 'pretrained_model.v_head.x' and 'v_head.x' both become 'v_head.x'",
        ),
        (["a", "a"], "keys 'a' and 'a' both become 'a'"),
    ],
)
def test_names_that_become_the_same(names: list[str], message: str) -> None:
    with pytest.raises(UnsupportedError, match="both become") as caught:
        clean_names(names)
    assert str(caught.value).startswith(message)
    assert caught.value.hint is not None
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["_orig_mod", "_orig_mod._fsdp_wrapped_module", "module._orig_mod.", "module."]
)
def test_a_name_of_wrapper_parts_only(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no part that is not a wrapper's") as caught:
        clean_names([name])
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "_flat_param",
        "flat_param",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._flat_param",
        "model.flat_param.x",
    ],
)
def test_flat_parameters(name: str) -> None:
    for refuse in (refuse_flat_parameter, lambda name: clean_names(["a", name])):
        with pytest.raises(UnsupportedError, match="flat parameter of FSDP1") as caught:
            refuse(name)
        assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize("name", ["my_flat_param", "flat_params.x", "a._flat_param_0", "flat"])
def test_names_that_only_look_like_flat_parameters(name: str) -> None:
    refuse_flat_parameter(name)
    assert cleaned([name]) == [name]


def test_odd_names_stay() -> None:
    names = ["", ".", "a..b", ".a", "a.", "模型.重み", 'q".\n', "__metadata__"]
    assert cleaned(names) == names
    assert clean_names(names).changes == ()


def test_no_names() -> None:
    assert clean_names([]).names == {}
    assert clean_names([], adapter_settings=True).changes == ()


# --- what torch and peft do ---


def test_a_compiled_model() -> None:
    model = Toy()
    model.layers[1] = compiled(model.layers[1])
    names = list(compiled(model).state_dict())
    assert names != TOY
    assert cleaned(names) == TOY


def test_checkpointed_layers() -> None:
    model = Toy()
    model.layers[0] = checkpoint_wrapper(compiled(model.layers[0]))
    assert cleaned(list(model.state_dict())) == TOY
    parameters = [name for name, _ in model.named_parameters()]
    assert any(_CHECKPOINT_WRAPPED_MODULE in name for name in parameters)
    assert cleaned(parameters) == [name for name, _ in Toy().named_parameters()]


@pytest.mark.parametrize("order", ["compiled outside", "compiled inside"])
def test_data_parallel_and_compiled(order: str) -> None:
    if order == "compiled outside":
        model = compiled(nn.DataParallel(Toy()))
    else:
        model = nn.DataParallel(compiled(nn.DataParallel(Toy())))
    names = list(model.state_dict())
    assert names != TOY
    assert cleaned(names) == TOY


def lora_model() -> peft.PeftModel:
    lora = peft.LoraConfig(r=1, target_modules=["0", "embed"], modules_to_save=["head"])
    return peft.get_peft_model(Toy(), lora)


def test_a_peft_model() -> None:
    model = lora_model()
    result = clean_names(list(model.state_dict()))
    assert list(result.names.values()) == list(model.get_base_model().state_dict())
    assert result.peft


def test_an_adapter_alone() -> None:
    """Peft's own adapter files, which lack the adapter's name."""
    names = list(peft.get_peft_model_state_dict(lora_model()))
    result = clean_names(names)
    assert result.peft
    assert list(result.names.values()) == [name.removeprefix("base_model.model.") for name in names]


def test_a_wrapped_peft_model() -> None:
    model = lora_model()
    expected = list(model.get_base_model().state_dict())
    base = model.get_base_model()
    base.layers[1] = compiled(base.layers[1])
    names = list(nn.DataParallel(compiled(model)).state_dict())
    assert cleaned(names) == expected


# --- stored checkpoints ---


@pytest.mark.parametrize(
    ("wrapped", "plain", "reason"),
    [
        (
            "fsdp2_compiled__t213",
            "fsdp2_w4__t213",
            "wrapper part _orig_mod of torch.compile",
        ),
        ("toy_ddp__t213", "toy_w12__t213", "prefix module. of DDP"),
    ],
)
def test_stored_checkpoints(wrapped: str, plain: str, reason: str) -> None:
    """The same model was saved with and without the wrapper."""
    names = stored_names(wrapped)
    result = clean_names(names)
    assert list(result.names.values()) == stored_names(plain)
    assert [change.name for change in result.changes] == names
    assert {change.reason for change in result.changes} == {reason}
    assert not result.peft


def test_a_stored_lora_model() -> None:
    names = cleaned(stored_names("fsdp2_lora__t213"))
    kept = [name.replace(".base_layer.", ".") for name in names if ".lora_" not in name]
    assert kept == stored_names("fsdp2_w4__t213")
    assert clean_names(stored_names("fsdp2_lora_only__t213")).peft


# --- properties ---

# Neighbours of what is taken away, and what is taken away in other places only.
COMPONENTS = (
    "layers",
    "0",
    "weight",
    "my_orig_mod",
    "_orig_mods",
    "module",
    "base_model",
    "model",
    "pretrained_model",
    "lora_A",
    "base_layer",
    "v_head",
    "é",
    "",
)
PREFIXES = {"DDP": ["module"], "PEFT": ["base_model", "model"], "TRL": ["pretrained_model"]}
HEAD = ["v_head", "summary", "weight"]
# No prefix leads these and they are no heads, so nothing is common to a list that has them.
ANCHORS = [["anchor", "lora_A", "default", "weight"], ["anchor", "weight"]]

paths = st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=5).filter(lambda p: p != [""])
plain_paths = st.lists(paths, unique_by=tuple, max_size=8).map(lambda some: [*some, *ANCHORS])


def joined(some: Sequence[Sequence[str]]) -> list[str]:
    return [".".join(path) for path in some]


@given(plain_paths, st.booleans())
@fixed
def test_names_without_wrapper_parts_stay(plain: list[list[str]], adapter_settings: bool) -> None:
    names = joined(plain)
    result = clean_names(names, adapter_settings=adapter_settings)
    assert list(result.names.items()) == list(zip(names, names, strict=True))
    assert result.changes == ()
    assert not result.peft


@st.composite
def wrapped_models(draw: st.DrawFn) -> tuple[list[str], list[str], bool]:
    """Names of a wrapped model, its names before, and whether one of the wrappers is PEFT's."""
    plain = draw(plain_paths)
    with_head = draw(st.booleans())
    inner = st.sampled_from(("anywhere", "PEFT") if with_head else ("anywhere", *PREFIXES))
    wrappers = draw(st.lists(inner, max_size=4))
    if with_head:
        wrappers += ["TRL and its head", *draw(st.lists(st.sampled_from(("anywhere", *PREFIXES))))]
    wrapped = [list(path) for path in plain]
    for wrapper in wrappers:
        if wrapper == "anywhere":
            for path in wrapped:
                part = draw(st.sampled_from(("", *ANYWHERE)))
                if part:
                    path.insert(draw(st.integers(0, len(path) - 1)), part)
        elif wrapper == "TRL and its head":
            wrapped = [PREFIXES["TRL"] + path for path in wrapped] + [list(HEAD)]
        else:
            wrapped = [PREFIXES[wrapper] + path for path in wrapped]
    return joined(wrapped), joined([*plain, HEAD] if with_head else plain), "PEFT" in wrappers


@given(wrapped_models())
@fixed
def test_cleaning_undoes_wrapping(model: tuple[list[str], list[str], bool]) -> None:
    wrapped, plain, is_peft = model
    result = clean_names(wrapped)
    assert list(result.names.items()) == list(zip(wrapped, plain, strict=True))
    assert result.peft is is_peft
    renamed = {change.name: change.to for change in result.changes}
    assert renamed == {a: b for a, b in zip(wrapped, plain, strict=True) if a != b}


any_paths = st.lists(
    st.lists(
        st.sampled_from((*COMPONENTS, *ANYWHERE, "module", "base_model", "model", "summary")),
        min_size=1,
        max_size=6,
    ),
    unique_by=tuple,
    max_size=6,
)


@given(any_paths, st.lists(st.sampled_from(tuple(PREFIXES)), max_size=3), st.booleans())
@fixed
def test_whatever_the_names(
    some: list[list[str]], prefixes: list[str], adapter_settings: bool
) -> None:
    """All are kept, in order, clean and distinct, or the whole is refused."""
    for prefix in prefixes:
        some = [PREFIXES[prefix] + path for path in some]
    names = joined(some)
    try:
        result = clean_names(names, adapter_settings=adapter_settings)
    except UnsupportedError:
        return
    assert list(result.names) == names
    clean = list(result.names.values())
    assert len(set(clean)) == len(names)
    assert clean_names(clean, adapter_settings=adapter_settings).changes == ()
    for name, to in result.names.items():
        gone = Counter(name.split(".")) - Counter(to.split("."))
        assert set(gone) <= {*ANYWHERE, *(part for parts in PREFIXES.values() for part in parts)}
        assert set(ANYWHERE).isdisjoint(to.split("."))
        rest = iter(name.split("."))
        assert all(component in rest for component in to.split("."))  # in their old order
