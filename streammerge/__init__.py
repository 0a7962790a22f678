"""Merge sharded training checkpoints into a Hugging Face directory, streaming.

::

    import streammerge

    checkpoint = streammerge.describe("global_step_100/actor")
    plan = streammerge.plan(checkpoint, dtype="bfloat16")
    report = streammerge.write(plan, "merged")

or `merge` for all of it. Nothing is printed; errors are `StreamMergeError`; torch is imported only
for arithmetic.
"""

from __future__ import annotations

from streammerge.adaptation import Adaptation
from streammerge.checkpoint import Checkpoint, Tensor
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    NoSpaceError,
    PlacementError,
    ProcessesError,
    ReplicaMismatchError,
    ResultError,
    SourceChangedError,
    SourceError,
    StreamMergeError,
    TargetError,
    TargetPathError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from streammerge.execution import Report, compare
from streammerge.formats import describe
from streammerge.phases import Progress
from streammerge.pipeline import merge, plan, verify, write
from streammerge.planner import Plan
from streammerge.replicas import Comparison, Difference, merge_non_dtensor_shards
from streammerge.verifier import Verification

__version__ = "0.1.0"

__all__ = [
    "Adaptation",
    "Checkpoint",
    "CheckpointNotFoundError",
    "Comparison",
    "CorruptFileError",
    "Difference",
    "InconsistentRanksError",
    "NoSpaceError",
    "PlacementError",
    "Plan",
    "ProcessesError",
    "Progress",
    "ReplicaMismatchError",
    "Report",
    "ResultError",
    "SourceChangedError",
    "SourceError",
    "StreamMergeError",
    "TargetError",
    "TargetPathError",
    "Tensor",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "__version__",
    "compare",
    "describe",
    "merge",
    "merge_non_dtensor_shards",
    "plan",
    "verify",
    "write",
]
