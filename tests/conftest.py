"""Shared settings of the test suite."""

from __future__ import annotations

import os

# Before anything imports torch or transformers: the tests run on few cores, without a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
