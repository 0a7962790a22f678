"""The steps in order: describe, adapt, plan, check, compare, write, verify, publish."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from streammerge.adapt import Model, adapt_nothing
from streammerge.adaptation import Adaptation, StrPath, adapt_checkpoint
from streammerge.arithmetic import FOLD_DEVICES, check_device
from streammerge.assets import SideFiles
from streammerge.checkpoint import Checkpoint
from streammerge.errors import UsageError
from streammerge.execution import Report, execute, peak_memory
from streammerge.formats import AUTO, SourcePaths, describe
from streammerge.measure import Tolerance
from streammerge.phases import OnProgress
from streammerge.planner import (
    DEFAULT_MEMORY,
    DEFAULT_SHARD_SIZE,
    Plan,
    check_limits,
    make_plan,
    parse_size,
)
from streammerge.processes import Processes
from streammerge.target import check_target, resolve_target
from streammerge.verifier import (
    Verification,
    compare_with_plan,
    describe_side,
    infer_dtypes,
    is_model,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def merge(
    sources: SourcePaths,
    target: StrPath,
    *,
    format: str = AUTO,
    options: Mapping[str, str] | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    memory: int | str | None = None,
    workers: int | None = None,
    device: str = "auto",
    replicas: str = "check",
    check_crc: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    progress: OnProgress | None = None,
    processes: Processes | None = None,
    **adaptation: Unpack[Adaptation],
) -> Report:
    """Merge a checkpoint into a Hugging Face directory.

    Args:
        sources: directory of the checkpoint, or several; see `describe`.
        target: directory to create. It does not exist before everything is written.
        format, options: the layout of the checkpoint and its options, see `describe`.
        max_shard_size, memory, workers: see `planner.make_plan`.
        device: where copies are compared: ``auto``, ``cpu`` or ``cuda``; with ``cuda``, LoRA folds
            are computed there too.
        replicas: ``check`` compares what ranks hold without a placement that says so, ``check-all``
            also the copies of sharded weights, ``first`` goes on with the first rank's value.
        check_crc: whether stored bytes are compared with their CRC-32 before any are copied.
        verify: whether the result is read again and compared with the checkpoint before it is
            published.
        overwrite: replace an earlier result.
        restart: discard what an interrupted merge into the target left. Else it is taken over if
            it is of the same job, and refused if not.
        progress: called now and then in the calling thread; of several processes in the first.
        processes: those that merge together, all of which call this alike (`processes.join`).
        adaptation: see `Adaptation`.

    Returns:
        What was done. Copies that differed (``replicas="first"``) are in its `comparison`.

    Raises:
        StreamMergeError: bad input or target; the target is then as it was before. Finished files
            wait beside it if the same call could go on with them.
    """
    started = time.monotonic()
    processes = processes or Processes()
    with processes.interruptible():
        path = resolve_target(os.fspath(target))
        checkpoint = describe(sources, format=format, target=path, **(options or {}))
        if processes.first:
            check_target(path, checkpoint.directories, overwrite, assets=checkpoint.copied_folder)
        decided = plan(
            checkpoint, max_shard_size=max_shard_size, memory=memory, workers=workers, **adaptation
        )
    return execute(
        decided,
        path,
        replicas=replicas,
        check_crc=check_crc,
        verify=verify,
        overwrite=overwrite,
        restart=restart,
        device=device,
        progress=progress,
        processes=processes,
        started=started,
    )


def plan(
    checkpoint: Checkpoint,
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    memory: int | str | None = None,
    workers: int | None = None,
    **adaptation: Unpack[Adaptation],
) -> Plan:
    """Decide everything about a merge.

    Of the data, the output head and the input embedding are read, where the config ties them and
    they are stored twice. Arguments and errors as in `merge`.
    """
    # Before anything is read, which may take a while.
    check_limits(max_shard_size=max_shard_size, memory=memory, workers=workers)
    buffer_size = parse_size(DEFAULT_MEMORY if memory is None else memory, "memory")
    model, whole = adapt_checkpoint(checkpoint, buffer_size, **adaptation)
    return make_plan(whole, model, max_shard_size=max_shard_size, memory=memory, workers=workers)


def write(
    plan: Plan,
    target: StrPath,
    *,
    overwrite: bool = False,
    restart: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> Report:
    """Carry out a plan, without comparing copies first. Arguments and errors as in `merge`."""
    path, started = resolve_target(os.fspath(target)), time.monotonic()
    return execute(
        plan,
        path,
        overwrite=overwrite,
        restart=restart,
        device=device,
        progress=progress,
        started=started,
    )


def verify(
    reference: SourcePaths,
    merged: StrPath,
    *,
    format: str = AUTO,
    options: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    memory: int | str | None = None,
    workers: int | None = None,
    device: str = "cpu",
    progress: OnProgress | None = None,
    **adaptation: Unpack[Adaptation],
) -> Verification:
    """Compare a merged directory with what it was merged from. Nothing is written.

    Names, dtypes, shapes and every value are compared. A checkpoint goes through the same
    adaptation as in `merge`, with the dtypes of `merged` unless `dtype` is given, so what a merge
    changes is listed, not counted as a difference. Two checkpoints are compared as they are, and
    so are two Hugging Face directories of the same names, dtypes and shapes.

    Args:
        reference: directory of a checkpoint, or several, or a Hugging Face directory.
        format, options: the layout of the reference and its options, see `describe`.
        merged: the directory to compare; its files, their order and their names do not matter.
        rtol, atol: how far values may be apart, see `Tolerance`; one that is not given is 0. If
            neither is given, every bit counts: -0.0 is not 0.0, a NaN equals the same NaN.
        memory, workers: see `planner.make_plan`.
        device: where folds are computed, ``cpu`` or ``cuda``.
        progress: called now and then in the calling thread.
        adaptation: see `Adaptation`.

    Raises:
        StreamMergeError: bad input.
    """
    started = time.monotonic()
    check_limits(max_shard_size=DEFAULT_SHARD_SIZE, memory=memory, workers=workers)
    check_device(device, FOLD_DEVICES)
    tolerance = None
    if rtol is not None or atol is not None:
        tolerance = Tolerance(rtol or 0.0, atol or 0.0)
    expected = describe_side(reference, format=format, options=options)
    found = describe_side(merged)
    model, whole = _adapt_for(expected, found, memory, adaptation)
    decided = make_plan(whole, model, memory=memory, workers=workers)
    compared = compare_with_plan(
        decided,
        found,
        tolerance=tolerance,
        device=device,
        on_progress=progress,
    )
    return Verification(
        reference=expected.root,
        merged=found.root,
        compared=compared,
        changes=tuple(change for change in decided.changes if change.kind != "config"),
        tolerance=tolerance,
        seconds=time.monotonic() - started,
        peak_memory=peak_memory(),
    )


def _adapt_for(
    expected: Checkpoint,
    found: Checkpoint,
    memory: int | str | None,
    adaptation: Adaptation,
) -> tuple[Model, Checkpoint]:
    """What a directory should hold that was made of a checkpoint, or of the same kind as it."""
    kinds = is_model(expected), is_model(found)
    if kinds == (True, False):
        raise UsageError(
            f"{found.root} is a checkpoint and {expected.root} a Hugging Face directory",
            hint="the checkpoint comes first: streammerge verify CHECKPOINT MERGED",
        )
    given = [name for name, value in adaptation.items() if value and name != "raw"]
    if kinds == (False, False) and given:
        option = given[0].removesuffix("_mode").replace("_", "-")
        raise UsageError(
            f"--{option}: {expected.root} and {found.root} are both checkpoints, so they are "
            "compared as they are"
        )
    as_they_are = kinds == (False, False) or (
        kinds == (True, True) and not given and _kinds_of(expected) == _kinds_of(found)
    )
    if as_they_are:
        return adapt_nothing(expected, SideFiles(None)), expected
    buffer_size = parse_size(DEFAULT_MEMORY if memory is None else memory, "memory")
    model, whole = adapt_checkpoint(expected, buffer_size, **adaptation)
    inferred = "dtype" not in adaptation and not adaptation.get("raw", False)
    return (infer_dtypes(model, found.tensors) if inferred else model), whole


def _kinds_of(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
