"""The steps in order: describe, adapt, plan, check, compare, write, verify, publish."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from streammerge.adapt import Model, adapt, adapt_nothing, draft, question
from streammerge.assets import SideFiles, find_side_files
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, File, Members, Skipped
from streammerge.checks.directory import check_directory
from streammerge.checks.findings import first_error
from streammerge.crc import CrcReport, check_crcs, crc_amount
from streammerge.errors import SourceError, TargetError, UsageError
from streammerge.formats import AUTO, describe, safetensors_files
from streammerge.formats import Sources as SourcePaths
from streammerge.journal import Journal
from streammerge.measure import Tolerance
from streammerge.planner import (
    DEFAULT_MEMORY,
    DEFAULT_SHARD_SIZE,
    Plan,
    check_limits,
    fingerprint,
    make_plan,
    output_names,
    parse_size,
)
from streammerge.probe import same_bits
from streammerge.publisher import Staging
from streammerge.replicas import Comparison, compare_replicas, replica_amount
from streammerge.sources import Sources
from streammerge.target import check_space, check_target, resolve_target
from streammerge.verifier import (
    Verification,
    check_written,
    compare_with_plan,
    describe_side,
    infer_dtypes,
    is_model,
)
from streammerge.writer import write_files

if TYPE_CHECKING:
    from typing_extensions import Unpack

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a merge is.

    Attributes:
        phase: ``check`` (CRC-32), ``compare`` (copies on several ranks), ``write``, ``verify``, or
            ``measure`` (how far differing values are apart).
        done, total: bytes of this phase.
    """

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


class Adaptation(TypedDict, total=False):
    """How a checkpoint becomes a model. Everything may be left away.

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
    assets: Path | None
    base: Path | None
    names_from: Path | None
    lora_mode: str | None
    lora_alpha: float | None
    rslora: bool
    keep_packed: bool
    transpose_experts: bool | None
    untie: bool
    dtype: str
    keep_dtype: Sequence[str]
    compat: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a merge did.

    Attributes:
        target: the directory, absolute.
        files: names of all files in it.
        tensors: number of tensors.
        nbytes: bytes of all tensors.
        seconds: from the start of `merge` (or `write`) to the end.
        peak_memory: highest resident bytes of this process so far (``VmHWM``); None where the
            system does not say.
        comparison: what was compared between ranks; None if nothing was.
        crcs: what was compared with its CRC-32; None if nothing was.
        verified: whether the result was read again and compared with the checkpoint.
        skipped: entries that are no tensors.
        assets: the folder that side files were copied from; None if there is none.
        left_out: side files that were not copied.
        changes: what differs from the checkpoint.
        warnings: what the user should know, a line each.
    """

    target: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    peak_memory: int | None
    comparison: Comparison | None
    crcs: CrcReport | None
    verified: bool
    skipped: tuple[Skipped, ...]
    assets: str | None
    left_out: tuple[str, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


def merge(
    sources: SourcePaths,
    target: Path,
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
        progress: called now and then in the calling thread.
        adaptation: see `Adaptation`.

    Returns:
        What was done. Copies that differed (``replicas="first"``) are in its `comparison`.

    Raises:
        StreamMergeError: bad input or target; the target is then as it was before. Finished files
            wait beside it if the same call could go on with them.
    """
    started = time.monotonic()
    path = resolve_target(os.fspath(target))
    checkpoint = describe(sources, format=format, target=path, **(options or {}))
    check_target(path, checkpoint.directories, overwrite, assets=checkpoint.copied_folder)
    decided = plan(
        checkpoint, max_shard_size=max_shard_size, memory=memory, workers=workers, **adaptation
    )
    return _write(
        decided,
        path,
        replicas=replicas,
        check_crc=check_crc,
        verify=verify,
        overwrite=overwrite,
        restart=restart,
        device=device,
        progress=progress,
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
    model, whole = _adapt(checkpoint, buffer_size, **adaptation)
    return make_plan(whole, model, max_shard_size=max_shard_size, memory=memory, workers=workers)


def write(
    plan: Plan,
    target: Path,
    *,
    overwrite: bool = False,
    restart: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> Report:
    """Carry out a plan, without comparing copies first. Arguments and errors as in `merge`."""
    path, started = resolve_target(os.fspath(target)), time.monotonic()
    return _write(
        plan,
        path,
        overwrite=overwrite,
        restart=restart,
        device=device,
        progress=progress,
        started=started,
    )


def compare(
    plan: Plan,
    *,
    replicas: str = "check",
    device: str = "auto",
    progress: OnProgress | None = None,
) -> Comparison:
    """Compare the copies of a plan's checkpoint. Arguments and errors as in `merge`."""
    checkpoint = plan.checkpoint
    _, total = replica_amount(checkpoint, replicas)
    sources = Sources(checkpoint.files)
    try:
        return compare_replicas(
            checkpoint,
            sources,
            mode=replicas,
            device=device,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            on_progress=_in_phase(progress, "compare", total),
        )
    finally:
        sources.close()


def check_stored(
    plan: Plan, journal: Journal | None = None, *, progress: OnProgress | None = None
) -> CrcReport:
    """Compare all data of a plan's checkpoint with their CRC-32.

    Args:
        plan: of what.
        journal: says what was compared before, and is told what is compared now.
        progress: called now and then in the calling thread.

    Raises:
        CorruptFileError: bytes that are not those that torch.save wrote.
    """
    done = {} if journal is None else journal.checked_members()
    sources = Sources(plan.checkpoint.files)
    try:
        return check_crcs(
            plan.checkpoint,
            sources,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            done=done,
            on_checked=None if journal is None else journal.record_checked,
            on_progress=_in_phase(progress, "check", crc_amount(plan.checkpoint, done)),
        )
    finally:
        sources.close()


def verify(
    reference: SourcePaths,
    merged: Path,
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
        on_progress=_with_phases(progress),
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


def check_plan_target(plan: Plan, target: str, overwrite: bool) -> None:
    """Refuse a target that is in the way or would destroy what is read.

    Raises:
        TargetPathError: see `publisher.check_target`.
    """
    checkpoint = plan.checkpoint
    check_target(
        target,
        checkpoint.directories,
        overwrite,
        assets=checkpoint.copied_folder,
        names=output_names(plan),
    )


def peak_memory() -> int | None:
    """Highest resident bytes of this process so far; None where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _adapt(
    checkpoint: Checkpoint,
    buffer_size: int,
    *,
    raw: bool = False,
    assets: Path | None = None,
    base: Path | None = None,
    names_from: Path | None = None,
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
        raise UsageError("raw writes what is stored, so no adaptation goes with it")
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
    model, whole = _adapt(expected, buffer_size, **adaptation)
    inferred = "dtype" not in adaptation and not adaptation.get("raw", False)
    return (infer_dtypes(model, found.tensors) if inferred else model), whole


def _kinds_of(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}


def _describe_model(directory: Path | None) -> Checkpoint | None:
    return None if directory is None else safetensors_files.describe([os.fspath(directory)])


def _write(
    plan: Plan,
    target: str,
    *,
    replicas: str | None = None,
    check_crc: bool = False,
    verify: bool = False,
    overwrite: bool,
    restart: bool,
    device: str,
    progress: OnProgress | None,
    started: float,
) -> Report:
    check_plan_target(plan, target, overwrite)
    check_space(target, plan.disk_nbytes)
    assets = _asset_files(plan)
    fold_device = "cuda" if device == "cuda" else "cpu"
    job = fingerprint(plan, assets, fold_device)
    crcs = comparison = None
    sources = Sources((*plan.checkpoint.files, *assets))
    try:
        with Staging(target, job, overwrite=overwrite, restart=restart) as staging:
            if check_crc:
                crcs = check_stored(plan, staging.journal, progress=progress)
            if replicas is not None:
                comparison = compare(plan, replicas=replicas, device=device, progress=progress)
            write_files(
                plan,
                staging.result,
                sources,
                staging.journal,
                kept=staging.kept,
                on_progress=_in_phase(progress, "write", plan.nbytes),
                device=fold_device,
            )
            sources.check_unchanged()
            _check(staging.result, target, raw=plan.unchecked)
            if verify:
                check_written(
                    plan, staging.result, device=fold_device, on_progress=_with_phases(progress)
                )
            check_plan_target(plan, target, overwrite)  # it may have appeared meanwhile
            staging.publish()
    finally:
        sources.close()
    return Report(
        target=target,
        files=tuple(output_names(plan)),
        tensors=sum(len(file.outputs) for file in plan.files),
        nbytes=plan.nbytes,
        seconds=time.monotonic() - started,
        peak_memory=peak_memory(),
        comparison=comparison,
        crcs=crcs,
        verified=verify,
        skipped=plan.skipped,
        assets=plan.checkpoint.assets,
        left_out=plan.left_out,
        changes=plan.changes,
        warnings=(*plan.warnings, *([] if staging.warning is None else [staging.warning])),
    )


def _asset_files(plan: Plan) -> tuple[File, ...]:
    """The side files that a plan copies, as files that are read and must not change meanwhile.

    Raises:
        SourceError: one cannot be found.
    """
    files = []
    for asset in plan.assets:
        try:
            status = os.stat(asset.path)
        except OSError as error:
            raise SourceError(f"{asset.path}: {error.strerror}") from error
        files.append(File(asset.path, asset.size, status.st_mtime_ns, status.st_ino, Members()))
    return tuple(files)


def _check(staged: str, target: str, *, raw: bool) -> None:
    """Check a staging directory once more, as it lies on the disk.

    Raises:
        TargetError: it does not hold together, or cannot be looked at.
    """
    fault = first_error(check_directory(staged, raw=raw))
    if fault is not None:
        fault = fault.replace(staged, target)
        raise TargetError(
            f"the result does not hold together: {fault}",
            hint="--restart writes all of it again",
        )


def _in_phase(progress: OnProgress | None, phase: str, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(Progress(phase, done, total))


def _with_phases(progress: OnProgress | None) -> Callable[[str, int, int], None] | None:
    if progress is None:
        return None
    return lambda phase, done, total: progress(Progress(phase, done, total))
