"""Rank files: ``model_world_size_{W}_rank_{R}.pt``, one torch.save file per rank.

Written by verl (FSDP1 and FSDP2, also its VeOmni engine), EasyR1 and SkyRL, with
``fsdp_config.json`` (not by EasyR1) and ``huggingface/`` beside them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence

from streammerge.checkpoint import Checkpoint, Skipped
from streammerge.entries import quoted
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    SourceError,
    UnsupportedError,
)
from streammerge.rank_readers import read_rank_files
from streammerge.rank_union import collect_keys, unite

NAME = "FSDP rank files"
FILES = "model_world_size_{W}_rank_{R}.pt"
ASSETS = "huggingface"
CONFIG = "fsdp_config.json"
_MAX_CONFIG = 1 << 20  # bytes; it holds two numbers

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def matches(path: str) -> bool:
    """Whether a directory holds rank files."""
    try:
        with os.scandir(path) as entries:
            return any(_RANK_FILE.fullmatch(entry.name) for entry in entries)
    except OSError:
        return False


def describe(paths: Sequence[str]) -> Checkpoint:
    """Read the metadata of all rank files in one or several directories.

    Raises:
        SourceError: missing, damaged or contradictory rank files.
    """
    world_size, rank_files = _find_rank_files(paths)
    by_rank = [rank_files[rank] for rank in range(world_size)]
    ranks = list(read_rank_files(by_rank))
    names, skipped = collect_keys(ranks)
    if not names:
        keys = ", ".join(map(quoted, list(skipped)[:5])) or "none"
        raise UnsupportedError(f"{paths[0]}: the rank files hold no tensors (keys: {keys})")
    around: dict[str, str] = {}
    for key, kind in itertools.chain.from_iterable(rank.beside for rank in ranks):
        around.setdefault(key, kind)
    directories = list(dict.fromkeys(paths))
    assets = next((d for d in (os.path.join(p, ASSETS) for p in paths) if _is_directory(d)), None)
    return Checkpoint(
        root=paths[0],
        format=NAME,
        world_size=world_size,
        files=tuple(rank.file for rank in ranks),
        tensors=tuple(unite(ranks, names)),
        skipped=tuple(Skipped(*entry) for entry in (*skipped.items(), *around.items())),
        directories=tuple(directories if assets is None else [*directories, assets]),
        assets=assets,
    )


# --- finding the files ---


def _is_directory(path: str) -> bool:
    """As `os.path.isdir`, which takes a directory that cannot be looked at for none."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _find_rank_files(paths: Sequence[str]) -> tuple[int, dict[int, str]]:
    """World size and rank -> path."""
    found: dict[int, dict[int, str]] = {}
    for path in dict.fromkeys(paths):
        try:
            with os.scandir(path) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None:
                continue
            world_size, rank = int(match[1]), int(match[2])
            ranks = found.setdefault(world_size, {})
            file = os.path.join(path, name)
            if rank in ranks and not os.path.samefile(ranks[rank], file):
                raise InconsistentRanksError(f"rank {rank} twice: {ranks[rank]} and {file}")
            ranks.setdefault(rank, file)
    where = ", ".join(paths)
    if len(found) != 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise InconsistentRanksError(
            f"{where}: rank files of several world sizes ({sizes})",
            hint="keep the files of one run only",
        )
    ((world_size, ranks),) = found.items()
    for path in paths:
        _check_config(os.path.join(path, CONFIG), world_size)
    strange = [rank for rank in ranks if rank >= world_size]
    if strange:
        raise InconsistentRanksError(
            f"{ranks[strange[0]]}: rank {strange[0]} of a world size of {world_size}"
        )
    if len(ranks) < world_size:
        raise CheckpointNotFoundError(
            f"{where}: {world_size - len(ranks)} of {world_size} rank files missing: "
            f"rank{'s' if world_size - len(ranks) > 1 else ''} {_missing(ranks, world_size)}",
            hint="if each node kept its own files, give all their directories as sources",
        )
    return world_size, ranks


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


def _missing(ranks: Iterable[int], world_size: int) -> str:
    """The ranks between those that are there, for people, all of them: ``1, 4-7``."""
    parts = []
    for before, after in itertools.pairwise([-1, *sorted(ranks), world_size]):
        if after - before == 2:
            parts.append(str(before + 1))
        elif after - before > 2:
            parts.append(f"{before + 1}-{after - 1}")
    return ", ".join(parts)
