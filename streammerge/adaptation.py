"""Adapts a checkpoint to what the Hub expects: reads what is beside it, asks the probe, decides."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from streammerge.adapt import Model, adapt, adapt_nothing, draft, question
from streammerge.assets import find_side_files
from streammerge.checkpoint import Checkpoint
from streammerge.errors import UsageError
from streammerge.formats import safetensors_files
from streammerge.probe import same_bits
from streammerge.sources import Sources

StrPath = str | os.PathLike[str]


class Adaptation(TypedDict, total=False):
    """How a checkpoint becomes a model. Everything may be omitted.

    Attributes:
        raw: write exactly what the checkpoint holds; nothing else may be given with it but
            `assets`.
        assets: folder with config, tokenizer and the like, instead of the one that was found.
        base: Hugging Face directory into which a checkpoint that holds a LoRA adapter only is
            folded.
        names_from: Hugging Face directory whose names and layouts the result gets.
        lora_mode, lora_alpha, rslora, keep_packed, transpose_experts: see `adapt.draft`.
        untie, dtype, keep_dtype, compat: see `adapt.adapt`.
    """

    raw: bool
    assets: StrPath | None
    base: StrPath | None
    names_from: StrPath | None
    lora_mode: str | None
    lora_alpha: float | None
    rslora: bool
    keep_packed: bool
    transpose_experts: bool | None
    untie: bool
    dtype: str
    keep_dtype: Sequence[str]
    compat: int | None


def adapt_checkpoint(
    checkpoint: Checkpoint,
    buffer_size: int,
    *,
    raw: bool = False,
    assets: StrPath | None = None,
    base: StrPath | None = None,
    names_from: StrPath | None = None,
    lora_mode: str | None = None,
    lora_alpha: float | None = None,
    rslora: bool = False,
    keep_packed: bool = False,
    transpose_experts: bool | None = None,
    untie: bool = False,
    dtype: str = "keep",
    keep_dtype: Sequence[str] = (),
    compat: int | None = None,
) -> tuple[Model, Checkpoint]:
    """The model that is made of a checkpoint, and the checkpoint with all that is read for it."""
    values = (base, names_from, lora_mode, lora_alpha, transpose_experts, compat)
    switches = (rslora, keep_packed, untie, keep_dtype, dtype != "keep")
    if raw and (any(value is not None for value in values) or any(switches)):
        raise UsageError(
            "--raw writes exactly what is stored, so no option goes with it that changes values or "
            "names, such as --dtype"
        )
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise UsageError(f"--lora-alpha {lora_alpha:g}: expected a positive number")
    if transpose_experts is not None and names_from is None:
        raise UsageError("--transpose-experts goes with --names-from")
    if keep_packed and names_from is not None:
        raise UsageError("--keep-packed: --names-from says how experts are kept")
    if keep_dtype and dtype == "keep":
        raise UsageError("--keep-dtype goes with --dtype")
    base_model = _describe_model(base)
    names_model = _describe_model(names_from)
    folder = os.fspath(assets) if assets is not None else checkpoint.assets
    if folder is None and base_model is not None:
        folder = base_model.root
    weights = {file.path for file in checkpoint.files}
    mixed = checkpoint.assets_mixed and assets is None
    side = find_side_files(folder, () if raw else checkpoint.directories, weights, mixed=mixed)
    whole = checkpoint
    if base_model is not None:
        base_model = base_model.shifted(len(checkpoint.files))
        whole = checkpoint.followed_by(base_model)
    read = whole.directories + (() if names_model is None else names_model.directories)
    whole = replace(whole, assets=folder, assets_mixed=mixed, directories=read)
    if raw:
        return adapt_nothing(checkpoint, side), whole
    drafted = draft(
        checkpoint,
        side,
        base=base_model,
        base_name=None if base is None else os.fspath(base),
        names_from=names_model,
        lora_mode=lora_mode,
        lora_alpha=lora_alpha,
        rslora=rslora,
        keep_packed=keep_packed,
        transpose_experts=transpose_experts,
    )
    equal = None
    if (asked := question(drafted, side)) is not None:
        sources = Sources(whole.files)
        try:
            equal = same_bits(*asked, sources, buffer_size)
        finally:
            sources.close()
    model = adapt(
        drafted,
        side,
        equal=equal,
        untie=untie,
        dtype=dtype,
        keep_dtype=keep_dtype,
        compat=compat,
    )
    return model, whole


def _describe_model(directory: StrPath | None) -> Checkpoint | None:
    return None if directory is None else safetensors_files.describe([os.fspath(directory)])
