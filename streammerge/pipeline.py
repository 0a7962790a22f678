"""The steps in order: describe, compare, plan, write, publish."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from streammerge.checkpoint import Skipped
from streammerge.formats import Sources as SourcePaths
from streammerge.formats import describe
from streammerge.planner import DEFAULT_MEMORY, DEFAULT_SHARD_SIZE, Plan, output_names, plan
from streammerge.publisher import Staging, check_space, check_target, resolve_target
from streammerge.replicas import Comparison, compare_replicas, replica_amount
from streammerge.sources import Sources
from streammerge.writer import write_files


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a merge is.

    Attributes:
        phase: ``compare`` (copies on several ranks) or ``write``.
        done, total: bytes of this phase.
    """

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


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
        skipped: entries that are no tensors.
        left_out: side files that were not copied.
    """

    target: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    peak_memory: int | None
    comparison: Comparison | None
    skipped: tuple[Skipped, ...]
    left_out: tuple[str, ...]


def merge(
    sources: SourcePaths,
    target: str | os.PathLike[str],
    *,
    dtype: str = "keep",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    device: str = "auto",
    replicas: str = "check",
    overwrite: bool = False,
    progress: OnProgress | None = None,
) -> Report:
    """Merge a checkpoint into a Hugging Face directory.

    Args:
        sources: directory of the rank files, or several; see `describe`.
        target: directory to create. It does not exist before everything is written.
        dtype, max_shard_size, memory, workers: see `plan`.
        device: where copies are compared: ``auto``, ``cpu`` or ``cuda``.
        replicas: ``check`` compares what ranks hold without a placement that says so, ``check-all``
            also the copies of sharded weights, ``first`` goes on with the first rank's value.
        overwrite: replace an earlier result.
        progress: called now and then in the calling thread.

    Returns:
        What was done. Copies that differed (``replicas="first"``) are in its `comparison`.

    Raises:
        StreamMergeError: bad input or target; the target is then as it was before.
    """
    started = time.monotonic()
    checkpoint = describe(sources)
    decided = plan(
        checkpoint, dtype=dtype, max_shard_size=max_shard_size, memory=memory, workers=workers
    )
    path = resolve_target(os.fspath(target))
    check_plan_target(decided, path, overwrite)
    check_space(path, decided.disk_nbytes)
    comparison = compare(decided, replicas=replicas, device=device, progress=progress)
    return _write(decided, path, overwrite, progress, comparison, started)


def write(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: OnProgress | None = None,
) -> Report:
    """Carry out a plan, without comparing copies first. Arguments and errors as in `merge`."""
    path = resolve_target(os.fspath(target))
    return _write(plan, path, overwrite, progress, None, time.monotonic())


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
        assets=checkpoint.assets,
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


def _write(
    plan: Plan,
    target: str,
    overwrite: bool,
    progress: OnProgress | None,
    comparison: Comparison | None,
    started: float,
) -> Report:
    check_plan_target(plan, target, overwrite)
    check_space(target, plan.disk_nbytes)
    sources = Sources(plan.checkpoint.files)
    try:
        with Staging(target, overwrite) as staging:
            write_files(plan, staging.path, sources, _in_phase(progress, "write", plan.nbytes))
            sources.check_unchanged()
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
        skipped=plan.skipped,
        left_out=plan.left_out,
    )


def _in_phase(progress: OnProgress | None, phase: str, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(Progress(phase, done, total))
