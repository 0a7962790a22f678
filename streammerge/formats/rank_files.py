"""Rank files: ``model_world_size_{W}_rank_{R}.pt``, one torch.save file per rank.

Written by verl (FSDP1 and FSDP2, also its VeOmni engine), EasyR1 and SkyRL, with
``fsdp_config.json`` (not by EasyR1) and ``huggingface/`` beside them. Others call their rank files
as they like, so a pattern can say it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from streammerge.checkpoint import Checkpoint
from streammerge.errors import CorruptFileError, InconsistentRanksError, SourceError
from streammerge.formats.rank_checkpoint import describe_rank_files
from streammerge.formats.rank_paths import find_rank_files, has_rank_files, parse_pattern

NAME = "FSDP rank files"
WORD = "fsdp"
FILES = "model_world_size_{W}_rank_{R}.pt"
OPTIONS: tuple[str, ...] = ("pattern",)
TRAINING = True

CONFIG = "fsdp_config.json"
_MAX_CONFIG = 1 << 20  # bytes; it holds two numbers
_PATTERN = "model_world_size_{world}_rank_{rank}.pt"


def matches(path: str, *, pattern: str = _PATTERN) -> bool:
    """Whether a directory holds rank files.

    Raises:
        UsageError: the pattern is not a valid one.
    """
    return has_rank_files(path, parse_pattern(pattern))


def describe(paths: Sequence[str], *, pattern: str = _PATTERN) -> Checkpoint:
    """Read the metadata of all rank files in one or several directories.

    Args:
        paths: the directories.
        pattern: how the files are called, see `rank_paths`. Without ``{world}`` the world size is
            the number of ranks in the device meshes.

    Raises:
        SourceError: missing, damaged or contradictory rank files.
        UsageError: the pattern is not a valid one.
    """
    found = find_rank_files(paths, parse_pattern(pattern))
    for path in paths:
        _check_config(os.path.join(path, CONFIG), len(found.paths))
    return describe_rank_files(paths, found, NAME)


def _check_config(path: str, world_size: int) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as stream:
            text = stream.read(_MAX_CONFIG + 1) or b""
        if len(text) > _MAX_CONFIG:
            raise CorruptFileError(f"{path}: more than {_MAX_CONFIG:,} bytes")
        config = json.loads(text.decode())
    except FileNotFoundError:
        return
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not JSON ({error})") from error
    stated = config.get("world_size") if isinstance(config, dict) else None
    if stated is not None and stated != world_size:
        raise InconsistentRanksError(
            f"{path}: says world_size {stated!r:.40}, the rank files say {world_size}"
        )
