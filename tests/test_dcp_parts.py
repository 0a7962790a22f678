"""Which part of a saved state dict is the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streammerge import UnsupportedError, UsageError
from streammerge.formats.dcp_parts import choose_part

Nested = dict[str, object]
# All names of some models begin with ``model.``.
GEMMA = ["model.language_model.layers.0.w", "model.vision_tower.w"]
OLMO = ["model.transformer.wte.weight", "model.transformer.blocks.0.w"]
HF = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def flatten(nested: Nested, path: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Names and paths as DCP makes them; a leaf is a number of bytes for an object."""
    found: dict[str, tuple[str, ...]] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= flatten(value, (*path, key))
        else:
            found[".".join((*path, key))] = (*path, key)
    return found


def state(*names: str) -> Nested:
    return dict.fromkeys(names or HF, 0)


ADAM: Nested = {"state": {"w": state("exp_avg", "step")}, "param_groups": state("0.lr")}
SAVED: dict[str, tuple[Nested, str, set[str]]] = {
    "model": ({"model": state()}, "model.", set()),
    "accelerate": ({"model": state("weight")}, "model.", set()),
    "torch": (
        {"model": state(), "optimizer": ADAM, "step": 0},
        "model.",
        {"optimizer.*", "step"},
    ),
    "top level": (state(), "", set()),
    "a single tensor": (state("weight"), "", set()),
    "torchtitan": (
        {**state("tok_embeddings.weight"), "optimizer": ADAM, "train_state": state("step")},
        "",
        {"optimizer.*", "train_state.*"},
    ),
    "torchtitan, HF names": (
        {**state(), "optimizer": ADAM, "dataloader": state("dp_rank_0")},
        "",
        {"optimizer.*", "dataloader.*"},
    ),
    "prime-rl": (
        {"app": {"model": state(), "optimizers": {"0": ADAM}, "progress": state("step")}},
        "app.model.",
        {"app.optimizers.*", "app.progress.*"},
    ),
    "Lightning": (
        {"model": state(), "optimizer_0": ADAM},
        "model.",
        {"optimizer_0.*"},
    ),
    "VeOmni": (
        {"model": state(), "optimizer": ADAM, "extra_state": state("rng")},
        "model.",
        {"optimizer.*", "extra_state.*"},
    ),
    "with an average": ({"model": state(), "ema": state()}, "model.", {"ema.*"}),
    "another name": ({"actor": state(), "optim": ADAM}, "actor.", {"optim.*"}),
    "nested": ({"model": {"encoder": state("w"), "decoder": state("w")}}, "model.", set()),
    "a scheduler inside": ({"model": state("scheduler.weight", "w")}, "model.", set()),
    "an rng beside": ({**state(), "rng_state": 0}, "", {"rng_state"}),
}


@pytest.mark.parametrize("case", SAVED)
def test_the_model_is_found(case: str) -> None:
    nested, start, left = SAVED[case]
    paths = flatten(nested)
    part = choose_part(list(paths), (), paths)
    inside = [name for name in paths if name.startswith(start)]
    if not start:
        inside = [name for name in paths if len(paths[name]) == 1 and name != "rng_state"]
    assert part.names == {name: name.removeprefix(start) for name in inside}
    assert {entry.name for entry in part.skipped} == left


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (HF, HF),
        ([f"model.{name}" for name in HF], HF),
        ([f"app.model.{name}" for name in HF], HF),
        (HF[:2], HF[:2]),  # a model without head, at top level
        (["weight"], ["weight"]),
        ([*HF, "optimizer.state.w.exp_avg", "lr_scheduler.last_epoch"], HF),
        ([*(f"app.model.{name}" for name in HF), "app.optimizer.state.w.step"], HF),
        ([*HF, "rng_state"], HF),
        (["layers.0.w", "layers.1.w"], ["layers.0.w", "layers.1.w"]),
        (["model.w", "head.w"], ["model.w", "head.w"]),
        (GEMMA, GEMMA),
        ([f"model.{name}" for name in GEMMA], GEMMA),
        (OLMO, OLMO),
        (["model.language_model.lm_head.weight"], ["language_model.lm_head.weight"]),
        ([*HF, "model.scheduler.weight"], [*HF, "model.scheduler.weight"]),
    ],
)
def test_without_paths_names_are_judged(names: Sequence[str], expected: Sequence[str]) -> None:
    assert list(choose_part(names, (), {}).names.values()) == list(expected)


def test_without_paths_names_can_be_kept() -> None:
    names = [f"model.{name}" for name in HF]
    part = choose_part([*names, "optimizer.state.w.step"], (), {}, "")
    assert part.names == {name: name for name in names}
    assert [entry.name for entry in part.skipped] == ["optimizer.*"]


def test_an_optimizer_below_a_prefix_stays_out() -> None:
    paths = flatten({"app": {"model": state("w"), "optimizer": ADAM}})
    part = choose_part(list(paths), (), paths, "app")
    assert part.names == {"app.model.w": "model.w"}
    assert [entry.name for entry in part.skipped] == ["app.optimizer.*"]
    assert len(choose_part(list(paths), (), paths, "app.optimizer").names) == 3
    assert len(choose_part(list(paths), (), paths, "app.optimizer.state").names) == 2


def test_several_models_are_refused() -> None:
    paths = flatten({"actor": {"model": state("w")}, "critic": {"model": state("w", "v")}})
    with pytest.raises(UnsupportedError) as caught:
        choose_part(list(paths), (), paths)
    assert "'actor.model' (1 tensor), 'critic.model' (2 tensors)" in str(caught.value)
    assert caught.value.hint == "--prefix chooses one (empty: the top level)"
    part = choose_part(list(paths), (), paths, "critic.model")
    assert part.names == {"critic.model.w": "w", "critic.model.v": "v"}
    assert [(entry.name, entry.kind) for entry in part.skipped] == [
        ("actor.model.*", "1 tensor, left out")
    ]


def test_a_stray_tensor_is_not_taken_for_the_model() -> None:
    paths = flatten({"actor": state(), "global_step": 0})
    with pytest.raises(
        UnsupportedError, match="'actor' \\(3 tensors\\), the top level \\(1 tensor\\)"
    ):
        choose_part(list(paths), (), paths)
    assert len(choose_part(list(paths), (), paths, "actor").names) == 3
    assert choose_part(list(paths), (), paths, "").names == {"global_step": "global_step"}
    assert len(choose_part([*paths][:-1], ["global_step"], paths).names) == 3


def test_no_model_is_refused() -> None:
    paths = flatten({"optimizer": ADAM})
    with pytest.raises(UnsupportedError, match="holds no model, only 'optimizer' \\(3 tensors\\)"):
        choose_part(list(paths), (), paths)
    with pytest.raises(UnsupportedError, match="holds no tensors"):
        choose_part((), ["a"], {"a": ("a",)})


@pytest.mark.parametrize("prefix", ["x", "mode", "model.embed", "", "model.model.norm.weight"])
def test_prefixes_that_no_tensor_has(prefix: str) -> None:
    paths = flatten({"model": state(), "optimizer": ADAM})
    with pytest.raises(UsageError) as caught:
        choose_part(list(paths), (), paths, prefix)
    assert "'model' (3 tensors), 'optimizer' (3 tensors)" in str(caught.value)


def test_many_prefixes_are_not_all_listed() -> None:
    paths = flatten({f"part_{n}": state("w") for n in range(100)})
    with pytest.raises(UnsupportedError, match="and 80 more"):
        choose_part(list(paths), (), paths)


def test_objects_are_named_or_counted() -> None:
    paths = flatten({"model": state("w", "a._extra_state"), "optimizer": ADAM, "step": 0})
    objects = ["model.a._extra_state", "optimizer.param_groups.0.lr", "step"]
    tensors = [name for name in paths if name not in objects]
    part = choose_part(tensors, objects, paths)
    assert [(entry.name, entry.kind) for entry in part.skipped] == [
        ("model.a._extra_state", "a pickled object"),
        ("optimizer.*", "2 tensors and 1 pickled object, left out"),
        ("step", "1 pickled object, left out"),
    ]
