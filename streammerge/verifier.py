"""Compares what a plan writes with what a directory holds: names, dtypes, shapes and every value.

Here the tensors of both sides are matched; `differences` compares their values.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from streammerge.adapt import Model, Output
from streammerge.assets import ADAPTER_DIRECTORY, ADAPTER_FILE, VALUE_HEAD_FILE
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, Extents, PlainLayout, Tensor
from streammerge.differences import Pair, ValueDifference, compare_values
from streammerge.dtypes import FLOATING, TO_TORCH
from streammerge.errors import ResultError
from streammerge.formats import AUTO, FORMATS, SourcePaths, describe, safetensors_files
from streammerge.header import SINGLE_FILE
from streammerge.measure import Tolerance
from streammerge.phases import OnProgress
from streammerge.planner import Plan
from streammerge.sources import Sources
from streammerge.values import Value, as_dtype

# Weights beside a model, which no index lists.
APART_FILES = (VALUE_HEAD_FILE, f"{ADAPTER_DIRECTORY}/{ADAPTER_FILE}", ADAPTER_FILE)

_INFERRED = ("F32", "F16", "BF16")  # what --dtype can make

Kind = Literal["missing", "extra", "dtype", "shape", "values"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not what it should be.

    Attributes:
        name: its key; of a file beside the model, with the name of the file before it.
        kind: ``missing`` and ``extra`` are those that only one side has.
        reason: what differs, for people.
        values: the details of kind ``values``.
    """

    name: str
    kind: Kind
    reason: str
    values: ValueDifference | None = None

    def __str__(self) -> str:
        return f"key '{self.name}': {self.reason}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare_with_plan` did.

    Attributes:
        tensors: how many were compared by value.
        nbytes: bytes of them.
        differences: first what is missing or extra, then in the order of the reference.
    """

    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        reference, merged: the directories.
        compared: what was compared, and what differs.
        changes: what differs from the reference because the merge does that: names, dtypes, folds.
        tolerance: how far values may be apart; None if every bit counts.
        seconds: from start to end.
        peak_memory: as in `Report`.
    """

    reference: str
    merged: str
    compared: Compared
    changes: tuple[Change, ...]
    tolerance: Tolerance | None
    seconds: float
    peak_memory: int | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.compared.differences


# --- the two sides ---


def describe_side(
    sources: SourcePaths, *, format: str = AUTO, options: Mapping[str, str] | None = None
) -> Checkpoint:
    """Describe a checkpoint or a finished model, with the weights that lie beside a model.

    The names of these are ``file: name``. A model without its config, or an adapter alone, counts
    too if it is in the directory itself.

    Args:
        sources, format, options: see `formats.describe`.

    Raises:
        StreamMergeError: see `formats.describe`.
    """
    paths = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    root = os.fspath(paths[0]) if len(paths) == 1 else ""
    if format == AUTO and not options and _is_bare_model(root):
        model = _describe_bare_model(root)
    else:
        model = describe(paths, format=format, **(options or {}))
    return _with_weights_beside(model) if model.format == safetensors_files.NAME else model


def is_model(checkpoint: Checkpoint) -> bool:
    """Whether it is a finished model, not a checkpoint of a training."""
    return any(checkpoint.format == layout.NAME and not layout.TRAINING for layout in FORMATS)


def _is_bare_model(directory: str) -> bool:
    weights = (SINGLE_FILE, ADAPTER_FILE)
    if not any(os.path.isfile(os.path.join(directory, name)) for name in weights):
        return False
    return not any(layout.matches(directory) for layout in FORMATS)


def _describe_bare_model(directory: str) -> Checkpoint:
    if os.path.isfile(os.path.join(directory, SINGLE_FILE)):
        return safetensors_files.describe([directory])
    return Checkpoint(directory, safetensors_files.NAME, 1, (), (), (), (directory,), None)


def _with_weights_beside(model: Checkpoint) -> Checkpoint:
    files, tensors = [*model.files], [*model.tensors]
    layout = PlainLayout((0,))
    for name in APART_FILES:
        path = os.path.join(model.root, name)
        if not os.path.isfile(path):
            continue
        file, entries = safetensors_files.read_file(path)
        for member, entry in enumerate(entries):
            extents = Extents()
            extents.add(len(files), member, 0, None, False)
            key = _key(name, entry.name)
            tensors.append(Tensor(key, entry.dtype, entry.shape, layout, extents))
        files.append(file)
    return replace(model, files=tuple(files), tensors=tuple(tensors))


def expected_values(plan: Plan) -> dict[str, Value]:
    """The tensors that a plan writes, under the names of `describe_side`."""
    return {_key(file.name, o.name): o.value for file in plan.files for o in file.outputs}


def infer_dtypes(model: Model, found: Iterable[Tensor]) -> Model:
    """Convert the floating-point tensors of a model as those of a directory are converted.

    Args:
        model: what the reference holds, in its own dtypes.
        found: the tensors of the directory.

    Returns:
        The model, with a change per tensor that is converted.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in found}
    changes = []

    def convert(output: Output, key: str) -> Output:
        dtype = dtypes.get(key, output.dtype)
        if dtype == output.dtype or dtype not in _INFERRED or output.dtype not in FLOATING:
            return output
        reason = f"as it was merged: {TO_TORCH[output.dtype]} to {TO_TORCH[dtype]}"
        changes.append(Change("cast", key, TO_TORCH[dtype], reason))
        return replace(output, dtype=dtype, value=as_dtype(output.value, dtype))

    outputs = tuple(convert(output, output.name) for output in model.outputs)
    apart = {
        file: tuple(convert(output, _key(file, output.name)) for output in beside)
        for file, beside in model.apart.items()
    }
    return replace(model, outputs=outputs, apart=apart, changes=(*model.changes, *changes))


def pair_up(
    expected: Mapping[str, Value], found: Iterable[Tensor], changes: Iterable[Change] = ()
) -> tuple[list[Pair], list[TensorDifference]]:
    """Match the two sides by name.

    Args:
        expected: what should be there.
        found: what is there.
        changes: what the merge does; it explains tensors that should not be there.

    Returns:
        The tensors of which values are to be compared, and those that differ without that.
    """
    tensors = {tensor.name: tensor for tensor in found}
    dropped = {change.name: change.reason for change in changes if change.kind == "dropped"}
    differences = [
        TensorDifference(name, "missing", "missing") for name in expected if name not in tensors
    ]
    for name in tensors:
        if name not in expected:
            why = f" (a merge drops it: {dropped[name]})" if name in dropped else ""
            differences.append(TensorDifference(name, "extra", f"should not be there{why}"))
    pairs = []
    for name, value in expected.items():
        if (tensor := tensors.get(name)) is None:
            continue
        if (tensor.dtype, tensor.shape) == (value.dtype, value.shape):
            pairs.append(Pair(name, value, tensor))
            continue
        kind: Kind = "dtype" if tensor.shape == value.shape else "shape"
        there, right = (f"{side.dtype} {list(side.shape)}" for side in (tensor, value))
        differences.append(TensorDifference(name, kind, f"{there}, should be {right}"))
    return pairs, differences


# --- comparing ---


def compare_with_plan(
    plan: Plan,
    merged: Checkpoint,
    *,
    tolerance: Tolerance | None = None,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> Compared:
    """Compare what a plan writes with what is there.

    Args:
        plan: what should be there; its buffers and workers are used.
        merged: what is there.
        tolerance: how far values may be apart; None compares every bit.
        device: where folds are computed, ``cpu`` or ``cuda``.
        on_progress: called now and then, in this thread; the phase is ``verify``, then ``measure``
            for what differs.

    Raises:
        SourceError: a file that cannot be read or has changed.
        UnsupportedError: there is no torch to compute values or a tolerance with.
    """
    pairs, differences = pair_up(expected_values(plan), merged.tensors, plan.changes)
    reference_files, merged_files = Sources(plan.checkpoint.files), Sources(merged.files)
    try:
        found = compare_values(
            pairs,
            reference_files,
            merged_files,
            tolerance=tolerance,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            device=device,
            on_progress=on_progress,
        )
        reference_files.check_unchanged()
        merged_files.check_unchanged()
    finally:
        reference_files.close()
        merged_files.close()
    for pair in pairs:
        if (values := found.get(pair.name)) is not None:
            differences.append(TensorDifference(pair.name, "values", _reason(values), values))
    return Compared(len(pairs), sum(pair.merged.nbytes for pair in pairs), tuple(differences))


def check_written(
    plan: Plan, directory: str, *, device: str = "cpu", on_progress: OnProgress | None = None
) -> Compared:
    """Compare a directory that was just written with its plan, bit by bit, as the disk has it.

    Args:
        plan, device, on_progress: see `compare_with_plan`.
        directory: the staging directory.

    Raises:
        ResultError: it holds something else.
    """
    written = describe_side(directory)
    for file in written.files:
        _forget_pages(file.path)
    compared = compare_with_plan(plan, written, device=device, on_progress=on_progress)
    if compared.differences:
        count = len(compared.differences)
        more = f" (and {count - 1} more keys)" if count > 1 else ""
        raise ResultError(
            f"the result is not what the checkpoint holds: {compared.differences[0]}{more}",
            hint="was it changed while it was written? Otherwise the disk or the memory is faulty",
        )
    return compared


# --- results ---


def _reason(values: ValueDifference) -> str:
    text = f"{values.merged} at {list(values.index)}, should be {values.reference}"
    if values.count is None:
        return text
    text = (
        f"{values.count:,} of {values.numel:,} values differ, by at most {values.largest!r}; "
        f"first {text}"
    )
    if values.rounding:
        text += "; no more than an adapter folded on another machine"
    return text


def _forget_pages(path: str) -> None:
    """Drop a file from the page cache, so that it is read from the disk."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _key(file: str, name: str) -> str:
    return f"{file}: {name}" if file in APART_FILES else name
