"""LoRA adapters of a checkpoint: folded into their weights, or split off. Pure.

``names`` is PEFT's grammar of names, ``settings`` what its config files say, ``layers`` finds the
weight that each adapter belongs to, ``merging`` folds and splits.
"""

from __future__ import annotations

from streammerge.lora.merging import Folded, Split, adapter_only, fold, join_base, split
from streammerge.lora.names import has_adapter, is_adapter_name
from streammerge.lora.settings import Settings, read_settings

__all__ = [
    "Folded",
    "Settings",
    "Split",
    "adapter_only",
    "fold",
    "has_adapter",
    "is_adapter_name",
    "join_base",
    "read_settings",
    "split",
]
