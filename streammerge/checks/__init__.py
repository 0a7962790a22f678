"""Checks of a model before others load it.

``consistency`` is about names, shapes and config and needs no files, so a merge asks it before it
writes; ``directory`` is about what lies on the disk, ``model`` compares with the model that
transformers builds. All give ``findings``.
"""

from __future__ import annotations

from streammerge.checks.directory import check_directory
from streammerge.checks.findings import Finding

__all__ = ["Finding", "check_directory"]
