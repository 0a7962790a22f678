"""Checkpoints, plans and reports as text for people and as JSON objects. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

from streammerge.assets import ADAPTER_FILE
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, MeshLayout, Skipped, Tensor
from streammerge.checks.findings import Finding
from streammerge.crc import CrcReport
from streammerge.errors import printable
from streammerge.execution import Report
from streammerge.header import INDEX_FILE
from streammerge.planner import Plan
from streammerge.replicas import Comparison
from streammerge.upload import Upload
from streammerge.verifier import TensorDifference, Verification

Json = dict[str, object]

_NAMED = 3  # how many names a grouped line shows
_DIFFERENCES = 20  # how many are shown


def checkpoint_json(checkpoint: Checkpoint) -> Json:
    """``inspect --json``."""
    return {
        "root": checkpoint.root,
        "format": checkpoint.format,
        "world_size": checkpoint.world_size,
        "files": [{"path": file.path, "bytes": file.size} for file in checkpoint.files],
        "meshes": [
            {"shape": list(shape), "dim_names": names and list(names), "parallel": count}
            for shape, names, count in checkpoint.meshes()
        ],
        "tensors": [_tensor_json(tensor) for tensor in checkpoint.tensors],
        "skipped": _skipped_json(checkpoint.skipped),
        "left_out": [{"path": entry.path, "bytes": entry.nbytes} for entry in checkpoint.left_out],
        "assets": checkpoint.assets,
        "totals": {
            "tensors": len(checkpoint.tensors),
            "parameters": sum(tensor.numel for tensor in checkpoint.tensors),
            "bytes": checkpoint.nbytes,
            "file_bytes": sum(file.size for file in checkpoint.files),
        },
    }


def checkpoint_text(checkpoint: Checkpoint) -> str:
    """``inspect``."""
    lines = [f"{checkpoint.root}: {checkpoint.format}, world size {checkpoint.world_size}"]
    for shape, names, count in checkpoint.meshes():
        text = f"mesh {'x'.join(map(str, shape))}"
        text += f" ({', '.join(names)})" if names else " (no dim names)"
        lines.append(text + (f", {count} parallel" if count > 1 else ""))
    rows = [("name", "dtype", "global shape", "placements", "bytes")]
    rows += [
        (printable(t.name), t.dtype, str(list(t.shape)), str(t.layout), f"{t.nbytes:,}")
        for t in checkpoint.tensors
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines.append("")
    for *cells, nbytes in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join((*padded, nbytes)))
    numel = sum(tensor.numel for tensor in checkpoint.tensors)
    lines.append("")
    lines.append(
        f"{len(checkpoint.tensors):,} tensors, {numel:,} parameters, {size(checkpoint.nbytes)}"
    )
    lines += [f"skipped: {entry.name} ({entry.kind})" for entry in checkpoint.skipped]
    if checkpoint.left_out:
        left_out = _some([os.path.basename(e.path) for e in checkpoint.left_out], False)
        total = sum(entry.nbytes for entry in checkpoint.left_out)
        lines.append(f"left out, state of the training: {left_out} ({size(total)})")
    lines.append(f"side files: {checkpoint.assets or 'none found'}")
    return _text(lines)


def plan_json(plan: Plan, target: str, lacking: int, refusal: str | None) -> Json:
    """``merge --dry-run --json``."""
    return {
        "target": target,
        "dry_run": True,
        "files": [
            {
                "name": file.name,
                "bytes": file.size,
                "tensors": [
                    {
                        "name": output.name,
                        "dtype": output.dtype,
                        "shape": list(output.shape),
                        "bytes": output.nbytes,
                    }
                    for output in file.outputs
                ],
            }
            for file in plan.files
        ],
        "index": any(text.name == INDEX_FILE for text in plan.texts),
        "texts": [{"name": text.name, "bytes": len(text.data)} for text in plan.texts],
        "assets": [{"name": asset.name, "bytes": asset.size} for asset in plan.assets],
        "assets_from": plan.checkpoint.assets,
        "left_out": list(plan.left_out),
        "skipped": _skipped_json(plan.skipped),
        "changes": _changes_json(plan.changes),
        "warnings": list(plan.warnings),
        "tensor_bytes": plan.nbytes,
        "disk_bytes": plan.disk_nbytes,
        "disk_bytes_missing": lacking,
        "target_refused": refusal,
        "workers": plan.workers,
        "memory": plan.memory,
        "predicted_peak_memory": plan.predicted_memory,
    }


def plan_text(
    plan: Plan, target: str, lacking: int, refusal: str | None, *, verbose: bool = False
) -> str:
    """``merge --dry-run``."""
    lines = [f"{target} would hold"]
    for file in plan.files:
        lines.append(f"  {file.name}  {file.size:,} bytes, {len(file.outputs):,} tensors")
        if verbose:
            lines += [f"    {o.name}  {o.dtype} {list(o.shape)}" for o in file.outputs]
    lines += [f"  {text.name}  {len(text.data):,} bytes" for text in plan.texts]
    lines += [f"  {asset.name}  {asset.size:,} bytes" for asset in plan.assets]
    if plan.checkpoint.assets is not None:
        lines.append(f"side files from {plan.checkpoint.assets}")
    lines += _change_lines(plan.changes, verbose)
    lines += _left_out_lines(plan.skipped, plan.left_out, verbose)
    lines.append(
        f"{size(plan.disk_nbytes)} on disk; about {size(plan.predicted_memory)} peak memory with "
        f"{plan.workers} worker{'s' if plan.workers > 1 else ''}"
    )
    if lacking:
        lines.append(f"the disk lacks {size(lacking)} ({lacking:,} bytes)")
    if refusal:
        lines.append(f"the target would be refused: {refusal}")
    lines += [f"warning: {line}" for line in plan.warnings]
    return _text(lines)


def report_json(report: Report) -> Json:
    """``merge --json``."""
    return {
        "target": report.target,
        "files": list(report.files),
        "tensors": report.tensors,
        "bytes": report.nbytes,
        "seconds": round(report.seconds, 3),
        "bytes_per_second": round(_rate(report)),
        "peak_memory": report.peak_memory,
        "crcs": report.crcs and _crcs_json(report.crcs),
        "replicas": report.comparison and _comparison_json(report.comparison),
        "verified": report.verified,
        "skipped": _skipped_json(report.skipped),
        "changes": _changes_json(report.changes),
        "warnings": list(report.warnings),
        "assets_from": report.assets,
        "left_out": list(report.left_out),
    }


def report_text(report: Report, *, verbose: bool = False) -> str:
    """The closing summary of ``merge``."""
    lines = []
    if report.crcs is not None:
        lines.append(
            f"checked the CRC-32 of {report.crcs.members:,} stored tensors, "
            f"{size(report.crcs.nbytes)}"
        )
    if report.comparison is not None and verbose:
        lines.append(
            f"compared the copies of {report.comparison.tensors:,} tensors, "
            f"{size(report.comparison.nbytes)}, on {report.comparison.device}"
        )
    lines += _change_lines(report.changes, verbose)
    lines += _left_out_lines(report.skipped, report.left_out, verbose)
    if report.assets is not None:
        lines.append(f"side files from {report.assets}")
    if verbose:
        lines += [f"wrote {name}" for name in report.files]
    if report.verified:
        lines.append("read the result again: it is what the checkpoint holds")
    what = "tensors of an adapter, no model" if ADAPTER_FILE in report.files else "tensors"
    text = (
        f"{report.target}: {report.tensors:,} {what}, {size(report.nbytes)} in "
        f"{report.seconds:.1f} s ({size(_rate(report))}/s)"
    )
    if report.peak_memory is not None:
        text += f", peak memory {size(report.peak_memory)}"
    return _text([*lines, text])


def difference_lines(comparison: Comparison) -> list[str]:
    """Every key whose copies differ and whose value was taken from the first rank."""
    return [f"{d}; took the value of rank {d.first_rank}" for d in comparison.differences]


def crc_lines(report: CrcReport) -> list[str]:
    """What `check_crcs` could not check."""
    if not report.without:
        return []
    count = sum(count for _, count in report.without)
    names = _some([path for path, _ in report.without], False)
    return [f"--check-crc: no CRC-32 is stored for {count:,} tensors in {names}"]


def verification_json(found: Verification) -> Json:
    """``verify --json``."""
    return {
        "reference": found.reference,
        "merged": found.merged,
        "equal": found.equal,
        "tensors": found.compared.tensors,
        "bytes": found.compared.nbytes,
        "tolerance": found.tolerance
        and {"rtol": found.tolerance.rtol, "atol": found.tolerance.atol},
        "differences": [_tensor_difference_json(d) for d in found.compared.differences],
        "changes": _changes_json(found.changes),
        "seconds": round(found.seconds, 3),
        "bytes_per_second": round(found.compared.nbytes / max(found.seconds, 1e-9)),
        "peak_memory": found.peak_memory,
    }


def verification_text(found: Verification, *, verbose: bool = False) -> str:
    """``verify``."""
    lines = _change_lines(found.changes, verbose)
    differences = found.compared.differences
    shown = differences if verbose else differences[:_DIFFERENCES]
    lines += [f"different: {difference.name}: {difference.reason}" for difference in shown]
    if len(shown) < len(differences):
        lines.append(f"different: {len(differences) - len(shown):,} more tensors")
    if any(d.values is not None and d.values.rounding for d in differences):
        lines.append(
            "adapters that were folded on another machine, or on a GPU, may differ in the last "
            "bits: --rtol and --atol allow for that"
        )
    nbytes, seconds = found.compared.nbytes, found.seconds
    kept = "within the tolerance" if found.tolerance else "bit by bit"
    result = (
        f"holds what {found.reference} does, {kept}"
        if found.equal
        else f"differs from {found.reference} in {len(differences):,} "
        f"tensor{'s' if len(differences) > 1 else ''}"
    )
    text = (
        f"{found.merged} {result}: {found.compared.tensors:,} tensors compared, {size(nbytes)} in "
        f"{seconds:.1f} s ({size(nbytes / max(seconds, 1e-9))}/s)"
    )
    if found.peak_memory is not None:
        text += f", peak memory {size(found.peak_memory)}"
    return _text([*lines, text])


def size(nbytes: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def upload_json(upload: Upload) -> Json:
    """The part of an upload in ``--json``."""
    return {"url": upload.url, "deleted": list(upload.deleted)}


def upload_text(upload: Upload) -> str:
    """What an upload did."""
    text = f"uploaded to {upload.url}"
    if upload.deleted:
        text += f"; deleted there, as loaders would take them: {_some(upload.deleted, True)}"
    return printable(text)


def findings_json(directory: str, findings: Sequence[Finding]) -> Json:
    """``check --json``."""
    return {
        "directory": directory,
        "findings": [{"severity": f.severity, "message": f.message} for f in findings],
    }


def findings_text(directory: str, findings: Sequence[Finding]) -> str:
    """``check``."""
    if not findings:
        return printable(f"{directory}: nothing found")
    return _text(f"{finding.severity}: {finding.message}" for finding in findings)


def _text(lines: Iterable[str]) -> str:
    """Lines below each other; what they name has no line breaks, and does not steer a terminal."""
    return "\n".join(map(printable, lines))


def _change_lines(changes: Sequence[Change], verbose: bool) -> list[str]:
    """Changes of the same kind and reason as one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        text = change.name if change.to is None else f"{change.name} -> {change.to}"
        groups.setdefault((change.kind, change.reason), []).append(text)
    lines = []
    for (kind, reason), texts in groups.items():
        shown = _some(texts, verbose, 1 if "->" in texts[0] else _NAMED)
        lines.append(f"{kind}: {shown} ({reason})")
    return lines


def _changes_json(changes: Sequence[Change]) -> list[Json]:
    return [{"kind": c.kind, "name": c.name, "to": c.to, "reason": c.reason} for c in changes]


def _left_out_lines(
    skipped: Sequence[Skipped], left_out: Sequence[str], verbose: bool
) -> list[str]:
    lines = []
    if skipped:
        names = [f"{entry.name} ({entry.kind})" for entry in skipped]
        lines.append(f"skipped: {_some(names, verbose)}")
    if left_out:
        lines.append(f"side files not copied: {_some(left_out, verbose)}")
    return lines


def _some(names: Sequence[str], everything: bool, count: int = _NAMED) -> str:
    if everything or len(names) <= count:
        return ", ".join(names)
    return f"{', '.join(names[:count])} and {len(names) - count:,} more"


def _tensor_json(tensor: Tensor) -> Json:
    layout = tensor.layout
    placements = None
    if isinstance(layout, MeshLayout):
        placements = [str(placement) for placement in layout.sharding.placements]
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "layout": str(layout),
        "placements": placements,
        "mesh": list(layout.sharding.mesh_shape) if isinstance(layout, MeshLayout) else None,
        "bytes": tensor.nbytes,
    }


def _skipped_json(skipped: Sequence[Skipped]) -> list[Json]:
    return [{"name": entry.name, "kind": entry.kind} for entry in skipped]


def _comparison_json(comparison: Comparison) -> Json:
    return {
        "tensors": comparison.tensors,
        "bytes": comparison.nbytes,
        "device": comparison.device,
        "differences": [
            {"name": d.name, "ranks": list(d.ranks), "reason": d.reason}
            for d in comparison.differences
        ],
    }


def _crcs_json(report: CrcReport) -> Json:
    return {
        "members": report.members,
        "bytes": report.nbytes,
        "without": [{"path": path, "members": count} for path, count in report.without],
    }


def _tensor_difference_json(difference: TensorDifference) -> Json:
    values = difference.values
    shown = values and {
        "index": list(values.index),
        "reference": values.reference,
        "merged": values.merged,
        "count": values.count,
        "elements": values.numel,
        "largest": _number_json(values.largest),
        "rounding": values.rounding,
    }
    return {
        "name": difference.name,
        "kind": difference.kind,
        "reason": difference.reason,
        "values": shown,
    }


def _number_json(number: float | None) -> float | str | None:
    """JSON has no infinities and NaNs: they become text."""
    return number if number is None or math.isfinite(number) else repr(number)


def _rate(report: Report) -> float:
    return report.nbytes / max(report.seconds, 1e-9)
