"""Carries out a plan: check and compare what is stored, write, verify, publish.

Several processes share checking, comparing and writing. The first of them alone has the staging
directory, verifies and publishes.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from streammerge.arithmetic import check_device
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, File, Members, Skipped
from streammerge.checks.directory import check_directory
from streammerge.checks.findings import first_error
from streammerge.completion import Completion
from streammerge.crc import CrcReport, check_crcs, crc_amount
from streammerge.errors import (
    ProcessesError,
    SourceError,
    StreamMergeError,
    TargetError,
    TargetPathError,
)
from streammerge.formats import find_training
from streammerge.journal import Journal
from streammerge.phases import OnProgress, in_phase
from streammerge.planner import Fingerprint, Plan, fingerprint, output_names
from streammerge.processes import Processes
from streammerge.publisher import Staging, sees_token
from streammerge.replicas import Comparison, compare_replicas, replica_amount
from streammerge.shares import FileRange, cut_files, owner
from streammerge.sources import Sources
from streammerge.target import check_space, check_target
from streammerge.verifier import check_written
from streammerge.writer import create_files, write_files, write_side_files

# How long a process looks for the staging directory of the first one: an NFS client may remember
# for a while that a name did not exist.
_SEEN_SECONDS = 40.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """What a merge did.

    Attributes:
        target: the directory, absolute.
        files: names of all files in it.
        tensors: number of tensors.
        nbytes: bytes of all tensors.
        seconds: from the start of `merge` (or `write`) to the end.
        peak_memory: highest resident bytes of a process so far (``VmHWM``); None where the system
            does not say.
        comparison: what was compared between ranks; None if nothing was.
        crcs: what was compared with its CRC-32, also by a merge that this one goes on with; None
            if nothing was.
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


def execute(
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
    processes: Processes | None = None,
) -> Report:
    """Carry out a plan. Arguments and errors as in `pipeline.merge`.

    Args:
        replicas: see there; None compares no copies.
        started: when the merge began, by `time.monotonic`.
    """
    check_device(device)
    processes = processes or Processes()
    processes.tell(written=[])  # what an earlier merge has written is no part of this one
    if processes.first:
        check_plan_target(plan, target, overwrite)
        check_space(target, plan.disk_nbytes)
    assets = _asset_files(plan)
    fold_device = "cuda" if device == "cuda" else "cpu"
    job = fingerprint(plan, assets, fold_device)
    checks = (replicas, check_crc, verify)
    _check_same_job(job, checks, processes)
    crcs = comparison = None
    with ExitStack() as held:
        sources = Sources((*plan.checkpoint.files, *assets))
        held.callback(sources.close)
        staging = completion = None
        if processes.first:
            staging = Staging(target, job, overwrite=overwrite, restart=restart)
            held.enter_context(staging)
            completion = Completion(
                plan, staging.result, staging.journal, _shares(plan, staging.kept, processes)
            )
            held.callback(_record_rest, completion, processes)
            held.enter_context(processes.ending_first())
        place = _meet_in_staging(staging, processes)
        if check_crc:
            journal = None if staging is None else staging.journal
            crcs = check_stored(plan, journal, progress=progress, processes=processes)
        if replicas is not None:
            comparison = compare(
                plan, replicas=replicas, device=device, progress=progress, processes=processes
            )
        _write_together(plan, place, sources, completion, fold_device, progress, processes)
        sources.check_unchanged()
        processes.exchange(None)
        if staging is not None:
            side_files = write_side_files(plan, staging.result, sources, staging.kept)
            staging.journal.record_written(*side_files)
            sources.check_unchanged()
            _check(staging.result, target, raw=plan.unchecked)
            if verify:
                with processes.interruptible():  # the others wait, and may fail
                    check_written(plan, staging.result, device=fold_device, on_progress=progress)
            check_plan_target(plan, target, overwrite)  # it may have appeared meanwhile
            staging.publish()
        peaks = processes.exchange(peak_memory())
    warning = None if staging is None else staging.warning
    return Report(
        target=target,
        files=tuple(output_names(plan)),
        tensors=sum(len(file.outputs) for file in plan.files),
        nbytes=plan.nbytes,
        seconds=time.monotonic() - started,
        peak_memory=max((peak for peak in peaks if peak is not None), default=None),
        comparison=comparison,
        crcs=crcs,
        verified=verify,
        skipped=plan.skipped,
        assets=plan.checkpoint.assets,
        left_out=plan.left_out,
        changes=plan.changes,
        warnings=(*plan.warnings, *([] if warning is None else [warning])),
    )


def compare(
    plan: Plan,
    *,
    replicas: str = "check",
    device: str = "auto",
    progress: OnProgress | None = None,
    processes: Processes | None = None,
) -> Comparison:
    """Compare the copies of a plan's checkpoint. Arguments and errors as in `merge`."""
    processes = processes or Processes()
    checkpoint = plan.checkpoint
    _, total = replica_amount(checkpoint, replicas)
    # Not those that are written from: files that vanish meanwhile are then missed before that.
    sources = Sources(checkpoint.files)
    try:
        return compare_replicas(
            checkpoint,
            sources,
            mode=replicas,
            device=device,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            on_progress=in_phase(progress, "compare", total, processes),
            processes=processes,
        )
    finally:
        sources.close()


def check_stored(
    plan: Plan,
    journal: Journal | None = None,
    *,
    progress: OnProgress | None = None,
    processes: Processes | None = None,
) -> CrcReport:
    """Compare all data of a plan's checkpoint with their CRC-32.

    Args:
        plan: of what.
        journal: of the first process: says what was compared before, and is told what is compared
            now.
        progress: called now and then in the calling thread.
        processes: those that share the work; each gets the same result.

    Raises:
        CorruptFileError: bytes that are not those that torch.save wrote.
    """
    processes = processes or Processes()
    checkpoint = plan.checkpoint
    before = {} if journal is None else journal.checked_members()
    lists = [(file, members.tolist()) for file, members in before.items()]
    done = {file: array("I", members) for file, members in processes.exchange(lists)[0]}
    del lists
    total = crc_amount(checkpoint, done)
    mine: dict[int, list[int]] = {}

    def record(file: int, members: Sequence[int]) -> None:
        if journal is not None:
            journal.record_checked(file, members)
        else:
            mine.setdefault(file, []).extend(members)

    show = in_phase(progress, "check", total, processes)
    sources = Sources(checkpoint.files)
    try:
        report = check_crcs(
            checkpoint,
            sources,
            buffer_size=plan.buffer_size,
            workers=plan.workers,
            done={**done, **_of_others(checkpoint, processes)},
            on_checked=record,
            on_progress=show,
        )
    finally:
        sources.close()
    waiting = None if show is None else partial(show, report.nbytes)
    told = (report.members, report.nbytes, list(mine.items()))
    found = processes.exchange(told, meanwhile=waiting)
    if journal is not None:
        for file, members in (entry for _, _, checked in found for entry in checked):
            journal.record_checked(file, members)
    if waiting is not None:
        waiting()  # now it is known what all have done
    members, nbytes = (sum(column) for column in list(zip(*found, strict=True))[:2])
    for file, earlier in done.items():
        sizes = checkpoint.files[file].members.sizes
        members += len(earlier)
        nbytes += sum(sizes[member] for member in earlier)
    return replace(report, members=members, nbytes=nbytes)


def _of_others(checkpoint: Checkpoint, processes: Processes) -> dict[int, range]:
    """The members of the files that other processes check."""
    total = sum(file.size for file in checkpoint.files)
    at, others = 0, {}
    for index, file in enumerate(checkpoint.files):
        if owner(at, file.size, total, processes.size) != processes.rank:
            others[index] = range(len(file.members))
        at += file.size
    return others


def check_plan_target(plan: Plan, target: str, overwrite: bool) -> None:
    """Refuse a target that is in the way or would destroy what is read.

    Raises:
        TargetPathError: see `target.check_target`; or a checkpoint of a training is in it.
    """
    checkpoint = plan.checkpoint
    check_target(
        target,
        checkpoint.directories,
        overwrite,
        assets=checkpoint.copied_folder,
        names=output_names(plan),
    )
    if overwrite and (training := find_training(target)) is not None:
        raise TargetPathError(
            f"{target}: holds a checkpoint of a training ({training}), so it is not an earlier "
            "result and is not replaced",
            hint="give a new directory, or remove this one yourself",
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


def _check_same_job(
    job: Fingerprint, checks: tuple[str | None, bool, bool], processes: Processes
) -> None:
    """Refuse processes that would not write parts of the same files.

    Raises:
        ProcessesError: this one does something else than the first.
    """
    first, others = processes.exchange((asdict(job), checks) if processes.first else None)[0]
    if processes.first:
        return
    difference = job.differs_from(first)
    if difference is None and list(checks) != others:
        difference = "it was asked for other checks"
    if difference is not None:
        raise ProcessesError(
            f"process {processes.rank} ({os.uname().nodename}) does not do what process 0 does: "
            f"{difference}",
            hint="all need the same command, package and checkpoint",
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the result is made, as all processes see it.

    Attributes:
        directory: holds what becomes the target.
        kept: names of the files that an interrupted merge has finished.
        token: see `publisher.sees_token`.
    """

    directory: str
    kept: frozenset[str]
    token: str


def _meet_in_staging(staging: Staging | None, processes: Processes) -> _Place:
    """Bring all processes into the staging directory of the first one.

    Raises:
        ProcessesError: this one does not see it.
    """
    found = None
    if staging is not None:
        token = os.urandom(16).hex()
        staging.write_token(token)
        found = (staging.result, sorted(staging.kept), token)
    directory, kept, token = processes.exchange(found)[0]
    deadline = time.monotonic() + _SEEN_SECONDS
    while staging is None and not sees_token(directory, token):
        processes.check()
        if time.monotonic() > deadline:
            raise ProcessesError(
                f"{directory}: process {processes.rank} ({os.uname().nodename}) does not see it",
                hint="the target must lie on a file system that all processes share",
            )
        time.sleep(_LOOK_SECONDS)
    return _Place(directory, frozenset(kept), token)


def _shares(plan: Plan, kept: Collection[str], processes: Processes) -> list[tuple[FileRange, ...]]:
    """What each process writes of the files that are not there yet."""
    left = [index for index, file in enumerate(plan.files) if file.name not in kept]
    cuts = cut_files([plan.files[index].size for index in left], processes.size)
    return [tuple(part._replace(file=left[part.file]) for part in share) for share in cuts]


def _record_rest(completion: Completion, processes: Processes) -> None:
    """Record what other processes had finished when they ended, if all had to end early."""
    with suppress(StreamMergeError):  # there is an error already
        completion.add_told(processes.told())


def _write_together(
    plan: Plan,
    place: _Place,
    sources: Sources,
    completion: Completion | None,
    device: str,
    progress: OnProgress | None,
    processes: Processes,
) -> None:
    """Write the weights, this process its share. In the end all are on the disk."""
    made = None
    if processes.size > 1:
        if completion is not None:
            create_files(plan, place.directory, place.kept)
        processes.exchange(None)  # now the files are there
        made = partial(sees_token, place.directory, place.token)
    written: list[int] = []

    def finish(file: int) -> None:
        if completion is not None:
            completion.add(processes.rank, [file])
        written.append(file)
        processes.tell(written=written.copy())

    there = sum(o.nbytes for f in plan.files if f.name in place.kept for o in f.outputs)
    show = in_phase(progress, "write", plan.nbytes, processes, there)

    def advance(nbytes: int) -> None:
        if completion is not None:
            completion.add_told(processes.told())
        if show is not None:
            show(nbytes)

    done = write_files(
        plan,
        place.directory,
        sources,
        _shares(plan, place.kept, processes)[processes.rank],
        made=made,
        finished=finish,
        on_progress=advance,
        device=device,
    )
    processes.exchange(None, meanwhile=lambda: advance(done))
    advance(done)  # now all have told
    if completion is not None:
        completion.check_all()


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
