"""What of a checkpoint is written, under which names and as which dtypes. Pure.

`draft` settles names, adapters and layouts, `adapt` ties, dtypes and edits of the side files. What
lies between is the one question that takes a look at the data: whether the output head equals the
input embedding (`question`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from streammerge import hub_names, lora, ties
from streammerge.assets import (
    ADAPTER_CONFIG,
    ADAPTER_DIRECTORY,
    ADAPTER_FILE,
    CONFIG,
    TOKENIZER_CONFIG,
    VALUE_HEAD_FILE,
    Asset,
    SideFiles,
)
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint
from streammerge.checks.consistency import Weight, check_consistency, remote_modules
from streammerge.checks.findings import error, first_error
from streammerge.compat import compat_edits, compat_warnings, tokenizer_compat_edits
from streammerge.config import (
    Edit,
    JsonObject,
    apply_edits,
    architecture_edits,
    config_changes,
    config_dtype,
    dtype_edits,
    majority_dtype,
    model_type_of,
    parse_json,
    quantization_edits,
    quantized_for_certain,
)
from streammerge.dtypes import FLOATING, FROM_TORCH, ITEMSIZE, PACKING, TO_TORCH
from streammerge.errors import UnsupportedError, UsageError
from streammerge.header import tensor_nbytes
from streammerge.names import clean_names, is_value_head
from streammerge.values import Fold, Stored, Value, as_dtype, stored_base

DTYPES = ("keep", "auto", "float32", "float16", "bfloat16")
LORA_MODES = ("fold", "split", "keep")
COMPATS = (4,)

_KEPT = (
    "--lora keep: the adapter is among the weights, under PEFT's names, which no loader of models "
    "knows"
)
_OF_MODULE = "the dtypes of the module"  # stands for what `_module_dtype` says of each tensor
_MODEL_FILES = frozenset({CONFIG, "generation_config.json"})
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")

Values = dict[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A tensor of the result.

    Attributes:
        name, dtype, shape: as in its header.
        value: where its bytes come from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: Value

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        """Number of values (packed dtypes hold several per element)."""
        return self.nbytes // ITEMSIZE[self.dtype] * PACKING.get(self.dtype, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A small file that is written whole.

    Attributes:
        name: below the target, with ``/``.
        data: its bytes.
    """

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A model before ties, dtypes and side files are settled.

    Attributes:
        values: its tensors, in the order of the checkpoint.
        apart: tensors of files beside it: file name -> tensors.
        adapter_config: of the adapter that is split off.
        keeps_adapter: whether the tensors of an adapter are among the others, under PEFT's names.
        changes, warnings: so far.
    """

    values: Values
    apart: Mapping[str, Values]
    adapter_config: JsonObject | None
    keeps_adapter: bool
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Everything that is written, but for the division into files.

    Attributes:
        outputs: the tensors of the model.
        apart: files of their own beside it: file name -> tensors.
        texts: small files.
        assets: side files that are copied.
        left_out: names of side files that are not.
        changes: what differs from the checkpoint.
        warnings: what the user should know, a line each.
        unchecked: whether it keeps names that no loader knows, so that checking the result
            makes no sense.
    """

    outputs: tuple[Output, ...]
    apart: Mapping[str, tuple[Output, ...]]
    texts: tuple[Text, ...]
    assets: tuple[Asset, ...]
    left_out: tuple[str, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    unchecked: bool = False


def adapt_nothing(checkpoint: Checkpoint, side: SideFiles) -> Model:
    """The model that is exactly what the checkpoint holds (``--raw``)."""
    outputs = tuple(_output(tensor.name, Stored(tensor)) for tensor in checkpoint.tensors)
    return Model(outputs, {}, (), side.assets, side.left_out, (), (), unchecked=True)


def draft(
    checkpoint: Checkpoint,
    side: SideFiles,
    *,
    base: Checkpoint | None = None,
    base_name: str | None = None,
    names_from: Checkpoint | None = None,
    lora_mode: str | None = None,
    lora_alpha: float | None = None,
    rslora: bool = False,
    keep_packed: bool = False,
    transpose_experts: bool | None = None,
) -> Draft:
    """Settle names, adapters and layouts.

    Args:
        checkpoint: what is merged.
        side: what is beside it.
        base: the model that a LoRA-only checkpoint is folded into.
        base_name: where that model is from, for the config of an adapter.
        names_from: a model whose names and layouts the result gets.
        lora_mode: ``fold``, ``split``, ``keep``; None folds, or splits where there is no base.
        lora_alpha, rslora: how the adapter was trained, where no file says so.
        keep_packed: whether experts stay packed where the Hub keeps them apart.
        transpose_experts: whether packed experts are transposed, where shapes cannot tell.

    Raises:
        UsageError: options that do not go together or with the checkpoint.
        UnsupportedError: names that collide, an adapter that cannot be folded, names or shapes
            that the model of `names_from` does not have.
    """
    if lora_mode is not None and lora_mode not in LORA_MODES:
        raise UsageError(f"unknown LoRA mode {lora_mode!r}, expected {', '.join(LORA_MODES)}")
    config = side.parsed(CONFIG)
    settings = lora.read_settings(
        side.lora_meta, side.adapter_config, alpha=lora_alpha, rslora=rslora
    )
    names = [tensor.name for tensor in checkpoint.tensors]
    clean = clean_names(names, adapter_settings=settings is not None)
    values: Values = {clean.names[t.name]: Stored(t) for t in checkpoint.tensors}
    adapted = (clean.peft or settings is not None) and lora.has_adapter(values)
    keeps_adapter = adapted and lora_mode == "keep"
    if adapted:
        model_type = model_type_of(config)
        settled = _settle_adapter(values, settings, lora_mode, base, base_name, model_type)
    elif useless := _options_of_adapters(base, lora_mode, lora_alpha, rslora):
        raise UsageError(f"{useless[0]}: the checkpoint holds no LoRA adapter")
    else:
        settled = lora.Folded(values, (), ())

    heads = {name: value for name, value in settled.values.items() if is_value_head(name)}
    if len(heads) == len(settled.values) and not isinstance(settled, lora.Split):
        heads = {}  # nothing that they could stand beside
    values = {name: value for name, value in settled.values.items() if name not in heads}

    if keeps_adapter:
        named = hub_names.HubNames(values, warnings=(_KEPT,))
    elif names_from is not None and values:
        shapes = {t.name: (t.dtype, t.shape) for t in names_from.tensors}
        named = hub_names.match_base(values, shapes, config, transpose=transpose_experts)
    elif keep_packed:
        hub_names.check_expert_counts(values, config)
        named = hub_names.HubNames(values)
    else:
        named = hub_names.expand_experts(values, config)

    apart: dict[str, Values] = {}
    adapter_config = None
    if isinstance(settled, lora.Split):
        apart[f"{ADAPTER_DIRECTORY}/{ADAPTER_FILE}" if values else ADAPTER_FILE] = settled.adapter
        adapter_config = settled.config
    if heads:
        apart[VALUE_HEAD_FILE] = heads
    reason = "the value head is not part of the model that loaders build"
    later = (
        *settled.changes,
        *(Change("apart", name, VALUE_HEAD_FILE, reason) for name in heads),
        *named.changes,
    )
    stored_names = {new: old for old, new in clean.names.items()}
    return Draft(
        values=named.values,
        apart=apart,
        adapter_config=adapter_config,
        keeps_adapter=keeps_adapter,
        changes=(
            *clean.changes,
            *(replace(change, name=stored_names.get(change.name, change.name)) for change in later),
        ),
        warnings=(*settled.warnings, *named.warnings, *_left_behind(side, adapted, bool(heads))),
    )


def _left_behind(side: SideFiles, adapted: bool, has_heads: bool) -> list[str]:
    """Trained weights in files beside a finished model, where an earlier merge put them apart."""
    beside = {f"{ADAPTER_DIRECTORY}/": adapted, VALUE_HEAD_FILE: has_heads}
    return [
        f"{side.directory}/{name}: holds trained weights, which are not in the result"
        for name, held in beside.items()
        if not held and name in side.left_out
    ]


def question(drafted: Draft, side: SideFiles) -> tuple[Value, Value] | None:
    """The two values of which `adapt` must know whether they are equal, if there are such."""
    return None if drafted.keeps_adapter else ties.question(drafted.values, side.parsed(CONFIG))


def adapt(
    drafted: Draft,
    side: SideFiles,
    *,
    equal: bool | None,
    untie: bool = False,
    dtype: str = "keep",
    keep_dtype: Sequence[str] = (),
    compat: int | None = None,
) -> Model:
    """Settle ties, dtypes and the edits of side files.

    Args:
        drafted: as `draft` gives it.
        side: what is beside the checkpoint.
        equal: the answer to `question`; None where there was none.
        untie: whether head and embedding become two weights although the config ties them.
        dtype: one of `DTYPES`: what floating-point tensors become; ``auto`` is what they had in
            the module that was trained, where master copies are stored, else what the config says.
        keep_dtype: patterns of names that keep their dtype, as for a shell, or one.
        compat: the major version of transformers that must be able to read the config too.

    Raises:
        UsageError: an unknown dtype or version.
        UnsupportedError: ties that contradict the config, casts of quantized weights.
        CorruptFileError: a side file that is no JSON object.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if compat is not None and compat not in COMPATS:
        raise UsageError(f"compat {compat!r}: expected {', '.join(map(str, COMPATS))}")
    if isinstance(keep_dtype, str):  # a sequence too, of letters, one of which may be a star
        keep_dtype = [keep_dtype]
    config = side.parsed(CONFIG)
    # Among PEFT's names, those of an output head and an input embedding may not be found.
    known = None if drafted.keeps_adapter else config
    tied = ties.decide(drafted.values, known, equal=equal, untie=untie)
    missing = _missing_side_files(side, adapter_alone=not drafted.values)
    warnings = [*missing, *drafted.warnings, *tied.warnings]
    changes = [*drafted.changes, *tied.changes]

    groups = {"": tied.values, **drafted.apart}
    stored = {name: value for values in groups.values() for name, value in values.items()}
    target = _target_dtype(dtype, stored, config)
    if dtype == "auto" and target == "keep":
        warnings.append("--dtype auto: no config.json says which dtype, so it is kept")
    quantized = quantized_for_certain(
        ((name, value.dtype) for name, value in stored.items()), config
    )
    if quantized is not None:
        _refuse_arithmetic(quantized, stored, target)
    apart = {}
    for file, values in groups.items():
        apart[file], casts = _cast(values, target, keep_dtype)
        changes += casts
    outputs = apart.pop("")
    warnings += [
        f"--keep-dtype {pattern}: no tensor has such a name"
        for pattern in keep_dtype
        if not any(fnmatchcase(name, pattern) for name in stored)
    ]
    if config is not None and target == "keep" and quantized is None:
        everything = [*outputs, *itertools.chain.from_iterable(apart.values())]
        warnings += _savings(everything, config)

    if config is None:
        options = {"--untie": untie, "--compat": compat is not None}
        warnings += [
            f"{o}: there is no config.json to edit" for o, given in options.items() if given
        ]
    texts: list[Text] = []
    assets, left_out = side.assets, side.left_out
    if outputs and config is not None:
        texts, edited, more = _edit_side_files(config, side, outputs, tied.edits, compat)
        changes += edited
        warnings += more
    if outputs and not drafted.keeps_adapter:
        warnings += _check(outputs, side, texts)
    if drafted.adapter_config is not None:
        folder = f"{ADAPTER_DIRECTORY}/" if outputs else ""
        data = json.dumps(drafted.adapter_config, indent=2, ensure_ascii=False) + "\n"
        texts.append(Text(folder + ADAPTER_CONFIG, data.encode()))
    if not outputs:
        warnings.append(
            "the checkpoint holds an adapter and no base weights: the result is an adapter "
            "directory (for PEFT), not a model; --base DIR folds it into its base model"
        )
        # Loaders would take a folder with a config for a model.
        left_out = (*left_out, *(a.name for a in assets if a.name in _MODEL_FILES))
        assets = tuple(a for a in assets if a.name not in _MODEL_FILES)
    replaced = {text.name for text in texts}
    return Model(
        outputs=outputs,
        apart=apart,
        texts=tuple(texts),
        assets=tuple(asset for asset in assets if asset.name not in replaced),
        left_out=left_out,
        changes=tuple(changes),
        warnings=tuple(dict.fromkeys(warnings)),
        unchecked=drafted.keeps_adapter,
    )


def _settle_adapter(
    values: Values,
    settings: lora.Settings | None,
    mode: str | None,
    base: Checkpoint | None,
    base_name: str | None,
    model_type: str | None,
) -> lora.Folded | lora.Split:
    """Fold the adapter of a checkpoint, split it off, or leave it."""
    alone = lora.adapter_only(values)
    if base is not None and not alone:
        raise UsageError("--base is for checkpoints that hold an adapter and no base weights")
    if alone and base is None:
        if mode == "fold":
            raise UsageError(
                "the checkpoint holds an adapter and no base weights, so there is nothing to fold "
                "it into",
                hint="give the base model with --base DIR, or omit --lora fold to get the adapter",
            )
        mode = mode or "split"
    if mode == "keep":
        if base is not None:
            raise UsageError("--base: --lora keep folds nothing into it")
        return lora.Folded(values, (), ())
    if mode == "split":
        return lora.split(values, settings, model_type=model_type, base_name_or_path=base_name)
    if base is not None:
        values = lora.join_base(values, {t.name: Stored(t) for t in base.tensors})
    return lora.fold(values, settings, model_type=model_type)


def _options_of_adapters(
    base: Checkpoint | None, mode: str | None, alpha: float | None, rslora: bool
) -> list[str]:
    """The given options that make no sense without an adapter."""
    given = {
        "--base": base is not None,
        "--lora split": mode == "split",
        "--lora-alpha": alpha is not None,
        "--rslora": rslora,
    }
    return [option for option, is_given in given.items() if is_given]


def _output(name: str, value: Value) -> Output:
    return Output(name, value.dtype, value.shape, value)


def _cast(
    values: Values, dtype: str, keep_dtype: Sequence[str]
) -> tuple[tuple[Output, ...], list[Change]]:
    outputs = []
    changes = []
    for name, value in values.items():
        result = value
        target = _module_dtype(value) if dtype == _OF_MODULE else FROM_TORCH.get(dtype)
        kept = any(fnmatchcase(name, pattern) for pattern in keep_dtype)
        if target is not None and not kept and value.dtype in FLOATING and value.dtype != target:
            result = as_dtype(value, target)
            reason = f"--dtype: {TO_TORCH[value.dtype]} to {TO_TORCH[target]}"
            changes.append(Change("cast", name, target, reason))
        outputs.append(_output(name, result))
    return tuple(outputs), changes


def _target_dtype(dtype: str, values: Values, config: JsonObject | None) -> str:
    """What ``--dtype`` asks for: torch's name, ``keep`` or `_OF_MODULE`."""
    if dtype != "auto":
        return dtype
    if any(map(_module_dtype, values.values())):
        return _OF_MODULE
    return (config_dtype(config) if config else None) or "keep"


def _module_dtype(value: Value) -> str | None:
    """The dtype that a value had in the module that was trained, where the files say so."""
    return stored_base(value).tensor.module_dtype


def _refuse_arithmetic(quantized: str, values: Values, dtype: str) -> None:
    """Refuse to convert or fold into quantized weights, of which one is named."""
    if dtype != "keep":
        raise UnsupportedError(
            f"key '{quantized}': the weights are quantized, so they cannot be converted to {dtype}",
            hint="omit --dtype",
        )
    if any(isinstance(value, Fold) for value in values.values()):
        raise UnsupportedError(
            f"key '{quantized}': the weights are quantized, so no adapter can be folded into them",
            hint="--lora split writes the adapter beside them",
        )


def _savings(outputs: Sequence[Output], config: JsonObject) -> list[str]:
    """What ``--dtype auto`` would save, if it would."""
    wanted = config_dtype(config)
    if wanted is None:
        return []
    itemsize = ITEMSIZE[FROM_TORCH[wanted]]
    wider = [o for o in outputs if o.dtype in FLOATING and ITEMSIZE[o.dtype] > itemsize]
    if not wider:
        return []
    stored = majority_dtype((o.dtype, o.nbytes) for o in wider)
    saved = sum(o.nbytes - o.numel * itemsize for o in wider)
    return [
        f"config.json asks for {wanted}, but {stored} is stored; --dtype auto would save "
        f"{saved:,} bytes"
    ]


def _missing_side_files(side: SideFiles, *, adapter_alone: bool) -> list[str]:
    names = {asset.name for asset in side.assets}
    missing = [] if CONFIG in names or adapter_alone else [CONFIG]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in _TOKENIZER_FILES):
        missing.append("tokenizer")
    if not missing:
        return []
    where = side.directory or "no folder huggingface/ beside the weights"
    return [f"{where}: {' and '.join(missing)} missing in the result; --assets DIR supplies them"]


def _check(outputs: Sequence[Output], side: SideFiles, texts: Sequence[Text]) -> list[str]:
    """Look for what would not hold together before anything is written.

    Raises:
        UnsupportedError: loaders would fail or get other values than were trained.
    """
    written = {text.name: parse_json(text.data, text.name) for text in texts}
    configs = {name: written.get(name) or side.parsed(name) for name in side.texts}
    findings = list(
        check_consistency({o.name: Weight(o.dtype, o.shape) for o in outputs}, configs.get(CONFIG))
    )
    there = {asset.name for asset in side.assets}
    for name, config in configs.items():
        findings += [
            error(f"{name}: auto_map needs {module}, which is not there (--assets DIR supplies it)")
            for module in remote_modules(config or {})
            if module not in there
        ]
    if (fault := first_error(findings)) is not None:
        raise UnsupportedError(
            f"the result would not hold together: {fault}",
            hint="--raw writes what the checkpoint holds anyway",
        )
    return [finding.message for finding in findings]


def _edit_side_files(
    config: JsonObject,
    side: SideFiles,
    outputs: Sequence[Output],
    tie_edits: Sequence[Edit],
    compat: int | None,
) -> tuple[list[Text], list[Change], list[str]]:
    """The JSON files that change, what changes in them, and what readers of old will miss."""
    tokenizer_config = side.parsed(TOKENIZER_CONFIG)
    tensors = [(o.name, o.dtype) for o in outputs]
    edits = [*architecture_edits(config), *tie_edits, *quantization_edits(config, tensors)]
    stored = majority_dtype((o.dtype, o.nbytes) for o in outputs)
    if stored is not None and quantized_for_certain(tensors, config) is None:
        edits += dtype_edits(config, stored)
    tokenizer_edits = []
    if compat is not None:
        edits += compat_edits(config)
        tokenizer_edits = (
            tokenizer_compat_edits(tokenizer_config, side.chat_template) if tokenizer_config else []
        )

    texts: list[Text] = []
    changes: list[Change] = []
    config = _edit(CONFIG, config, edits, side, texts, changes)
    if tokenizer_config is not None:
        tokenizer_config = _edit(
            TOKENIZER_CONFIG, tokenizer_config, tokenizer_edits, side, texts, changes
        )
    warnings = compat_warnings(config, tokenizer_config or {}, [o.name for o in outputs])
    return texts, changes, warnings


def _edit(
    name: str,
    before: JsonObject,
    edits: Sequence[Edit],
    side: SideFiles,
    texts: list[Text],
    changes: list[Change],
) -> JsonObject:
    """Edit a side file if anything in it changes; what it says afterwards."""
    data, reformatted = apply_edits(side.texts[name], edits, name)
    if data == side.texts[name]:
        return before
    texts.append(Text(name, data))
    changes += config_changes(edits, before, name)
    if reformatted:
        changes.append(Change("config", name, None, "its formatting could not be kept"))
    return parse_json(data, name)
