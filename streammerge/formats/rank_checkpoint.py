"""The checkpoint in a set of rank files, however these are called."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Sequence

from streammerge.assets import CONFIG, HUGGINGFACE
from streammerge.checkpoint import Checkpoint, Skipped
from streammerge.entries import BoxForm, RankFile, quoted
from streammerge.errors import SourceError, UnsupportedError
from streammerge.formats.rank_paths import RankPaths, missing_ranks_error
from streammerge.formats.rank_union import collect_keys, unite
from streammerge.rank_readers import read_rank_files


def describe_rank_files(directories: Sequence[str], found: RankPaths, name: str) -> Checkpoint:
    """Read the metadata of all rank files.

    Args:
        directories: where they were found, as given.
        found: the files.
        name: of the layout.

    Raises:
        SourceError: missing, damaged or contradictory rank files.
    """
    ranks = list(read_rank_files(found.paths, named=found.named))
    if not found.named:
        _check_complete(", ".join(directories), ranks)
    names, skipped = collect_keys(ranks)
    if not names:
        keys = ", ".join(map(quoted, list(skipped)[:5])) or "none"
        raise UnsupportedError(f"{directories[0]}: the rank files hold no tensors (keys: {keys})")
    around: dict[str, str] = {}
    for key, kind in itertools.chain.from_iterable(rank.beside for rank in ranks):
        around.setdefault(key, kind)
    assets = _find_assets(directories)
    read = [*directories, *map(os.path.dirname, found.paths), *([] if assets is None else [assets])]
    return Checkpoint(
        root=directories[0],
        format=name,
        world_size=len(ranks),
        files=tuple(rank.file for rank in ranks),
        tensors=tuple(unite(ranks, names)),
        skipped=tuple(Skipped(*entry) for entry in (*skipped.items(), *around.items())),
        directories=tuple(dict.fromkeys(read)),
        assets=assets,
    )


def _check_complete(where: str, ranks: Sequence[RankFile]) -> None:
    """Refuse to go on without ranks that the files name, but whose files are not there.

    Where names do not say the world size, it is the number of ranks in all device meshes.
    """
    knows_most = max(ranks, key=_last_rank)
    last = _last_rank(knows_most)
    if last >= len(ranks):
        why = f"{knows_most.file.path} names rank {last}"
        raise missing_ranks_error(where, range(len(ranks)), last + 1, why)


def _last_rank(rank: RankFile) -> int:
    """The highest rank that holds a part of a tensor, according to one file."""
    meshes = (max(mesh.ranks) for mesh in rank.meshes)
    listings = {form.listed for form in rank.forms if isinstance(form, BoxForm)}
    owners = (owner for listing in listings for _, _, owner in listing)
    return max((*meshes, *owners), default=0)


def _find_assets(directories: Sequence[str]) -> str | None:
    """The folder with config, tokenizer and the like: one beside the files, or theirs."""
    beside = [os.path.join(directory, HUGGINGFACE) for directory in directories]
    for directory in beside:
        if _is_directory(directory):
            return directory
    with_config = (d for d in directories if os.path.isfile(os.path.join(d, CONFIG)))
    return next(with_config, None)


def _is_directory(path: str) -> bool:
    """As `os.path.isdir`, which takes a directory that cannot be looked at for none."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
