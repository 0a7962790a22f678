"""Files of accelerate: ``pytorch_model_fsdp_{M}_rank{R}.bin``, one torch.save file per rank.

Written by ``save_fsdp_model`` of accelerate (1.15, `utils/fsdp_utils.py`), which names them after
the number M of the model:

- ``pytorch_model_fsdp_{M}_rank{R}.bin``: SHARDED_STATE_DICT with ``use_dcp=False``
- ``pytorch_model_fsdp_rank{R}.bin``: LOCAL_STATE_DICT of the first model; flat parameters, which
  are refused, as they hold neither names nor shapes
- ``pytorch_model_fsdp.bin``: FULL_STATE_DICT of the first model, by rank 0 alone
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from streammerge.checkpoint import Checkpoint
from streammerge.errors import CheckpointNotFoundError, InconsistentRanksError, SourceError
from streammerge.formats.rank_checkpoint import describe_rank_files
from streammerge.formats.rank_paths import find_rank_files, parse_pattern

NAME = "accelerate FSDP files"
WORD = "bin"
FILES = "pytorch_model_fsdp_{M}_rank{R}.bin"
OPTIONS: tuple[str, ...] = ()
TRAINING = True

_FILE = re.compile(r"(pytorch_model_fsdp(?:_[0-9]+)?)(_rank[0-9]+)?\.bin")


def matches(path: str) -> bool:
    """Whether a directory holds such files."""
    try:
        return bool(_patterns([path]))
    except SourceError:
        return False


def describe(paths: Sequence[str]) -> Checkpoint:
    """Read the metadata of all rank files in one or several directories.

    Raises:
        SourceError: missing, damaged or contradictory files, or those of several models.
    """
    patterns = _patterns(paths)
    where = ", ".join(paths)
    if not patterns:
        raise CheckpointNotFoundError(f"{where}: no {FILES} here")
    if len(patterns) > 1:
        raise InconsistentRanksError(
            f"{where}: files of {len(patterns)} checkpoints: {', '.join(patterns)}",
            hint=f"choose one: --format fsdp --pattern '{patterns[0]}'",
        )
    return describe_rank_files(paths, find_rank_files(paths, parse_pattern(patterns[0])), NAME)


def _patterns(paths: Sequence[str]) -> list[str]:
    """The patterns that the files in some directories have, in order."""
    found = set()
    for path in paths:
        try:
            with os.scandir(path) as entries:
                matches = [_FILE.fullmatch(entry.name) for entry in entries]
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        found |= {m[1] + ("_rank{rank}.bin" if m[2] else ".bin") for m in matches if m is not None}
    return sorted(found)
