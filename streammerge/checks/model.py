"""Compares a merged directory with the model that the installed transformers builds of its config.

What loads is what counts: the check is `from_pretrained` with tensors on the meta device, which
have a shape and no data, so that names are renamed, experts packed and heads tied as they are in
use. Nothing is downloaded, no code of the directory is run. The answer holds for the installed
version of transformers; others have other names.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streammerge.assets import CONFIG, read_json
from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.checks.findings import Finding, error, listed, warning
from streammerge.config import JsonObject
from streammerge.dtypes import TO_TORCH
from streammerge.errors import SourceError
from streammerge.formats import safetensors_files

if TYPE_CHECKING:
    import torch

_REQUIRED = ("transformers", "accelerate")  # accelerate is what places tensors on a device


def check_model(directory: str) -> list[Finding]:
    """Compare names and shapes with those of the model.

    Args:
        directory: a merged directory.

    Returns:
        What is wrong; a warning where the two cannot be compared: transformers or accelerate is
        not installed, has no such model, or the model is quantized or needs code of its own.
    """
    for name in _REQUIRED:
        if importlib.util.find_spec(name) is None:
            return [_not_compared(f"{name} is not installed")]
    path = os.path.join(directory, CONFIG)
    if not os.path.exists(path):
        return [_not_compared(f"no {CONFIG}")]
    try:
        config = read_json(path)
        checkpoint = safetensors_files.describe([directory])
    except SourceError as problem:
        return [error(str(problem))]
    transformers = importlib.import_module("transformers")
    with _quiet(transformers):
        return list(_compare(transformers, directory, config, checkpoint))


def _compare(
    transformers: Any, directory: str, config: JsonObject, checkpoint: Checkpoint
) -> Iterator[Finding]:
    version = f"transformers {transformers.__version__}"
    architecture = _architecture(config)
    if architecture is None:
        yield _not_compared(f"{CONFIG} says no architecture")
        return
    if "quantization_config" in config:
        yield _not_compared("the model is quantized")
        return
    model_class = getattr(transformers, architecture, None)
    if not hasattr(model_class, "from_pretrained"):
        own = " outside its own code, which is not run" if "auto_map" in config else ""
        yield _not_compared(f"{version} has no {architecture}{own}")
        return
    try:
        model_config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # whatever a config makes its class do
        yield error(f"{CONFIG}: {version} cannot read it: {_brief(problem)}")
        return
    try:
        loaded = _load_without_data(model_class, model_config, checkpoint)
    except (ImportError, NotImplementedError) as problem:  # a missing library, no meta tensors
        yield _not_compared(f"{version} cannot build {architecture} here: {_brief(problem)}")
        return
    except Exception as problem:
        yield error(f"{version} cannot load it as {architecture}: {_brief(problem)}")
        return
    yield from _differences(loaded, checkpoint, f"{version}, {architecture}")


def _load_without_data(
    model_class: Any, config: Any, checkpoint: Checkpoint
) -> Mapping[str, Collection[Any]]:
    """The loader's report on missing, unexpected and mismatched keys."""
    # 4.57 would give memory to what is missing, to fill it at random. The name and the module are
    # those by which transformers knows how to convert what is stored.
    same = {"__module__": model_class.__module__, "_initialize_missing_keys": _fill_nothing}
    unfilled: Any = type(model_class.__name__, (model_class,), same)
    _, report = unfilled.from_pretrained(
        None,
        config=config,
        state_dict={tensor.name: _without_data(tensor) for tensor in checkpoint.tensors},
        device_map={"": "meta"},
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return report  # type: ignore[no-any-return]


def _fill_nothing(*_: object, **__: object) -> None:
    """Stands in for what gives values to missing tensors."""


def _without_data(tensor: Tensor) -> torch.Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=getattr(torch, TO_TORCH[tensor.dtype]), device="meta")


def _differences(
    report: Mapping[str, Collection[Any]], checkpoint: Checkpoint, model: str
) -> Iterator[Finding]:
    missing = sorted(report["missing_keys"])
    if missing:
        yield error(f"{model}: {len(missing)} tensors missing, random if loaded: {listed(missing)}")
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        yield warning(
            f"{model}: has no such {len(unexpected)} tensors, ignores them (vLLM may not): "
            f"{listed(unexpected)}"
        )
    # 4.57 gives names, 5.x also both shapes.
    shapes = {tensor.name: list(tensor.shape) for tensor in checkpoint.tensors}
    mismatched = []
    for item in report["mismatched_keys"]:
        name, *both = (item,) if isinstance(item, str) else item
        stored = list(both[0]) if both else shapes.get(name, "?")
        mismatched.append(f"{name} is {stored}" + (f" for {list(both[1])}" if both else ""))
    if mismatched:
        yield error(f"{model}: {len(mismatched)} of other shapes: {listed(sorted(mismatched))}")


def _architecture(config: JsonObject) -> str | None:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return None


def _not_compared(reason: str) -> Finding:
    return warning(f"not compared with the model: {reason}")


def _brief(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines()]
    return f"{type(problem).__name__}: {next(filter(None, lines), 'no message')}"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from writing to stderr about what is reported here."""
    log = transformers.utils.logging
    verbosity, progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if progress:
            log.enable_progress_bar()
