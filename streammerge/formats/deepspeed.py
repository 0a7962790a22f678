"""DeepSpeed ZeRO 1, 2 and 3: ``{tag}/[bf16_]zero_pp_rank_{R}_mp_rank_00_optim_states.pt``.

Written by ``engine.save_checkpoint``, which Hugging Face Trainer, accelerate and Lightning call.
Beside the folders of the tags lies ``latest``, which names one of them. A tag's model states are
``mp_rank_00_model_states.pt``, or with ZeRO-3 ``zero_pp_rank_{R}_mp_rank_00_model_states.pt``.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammerge.assets import CONFIG, HUGGINGFACE
from streammerge.checkpoint import Checkpoint, File, Skipped
from streammerge.dtypes import ITEMSIZE
from streammerge.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    InconsistentRanksError,
    SourceError,
    UnsupportedError,
)
from streammerge.formats.rank_paths import missing_ranks
from streammerge.formats.zero_files import (
    Local,
    ModelStates,
    OptimizerStates,
    read_model_states,
    read_optimizer_states,
    share_with,
)
from streammerge.formats.zero_union import unite
from streammerge.sources import Sources

NAME = "DeepSpeed ZeRO"
WORD = "deepspeed"
FILES = "zero_pp_rank_{R}_mp_rank_00_optim_states.pt"
OPTIONS: tuple[str, ...] = ("tag",)
TRAINING = True
LATEST = "latest"
_MAX_TAG = 255  # bytes; it is the name of a folder

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SLICED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*\.pt")
_LAYERS = re.compile(r"layer_\d+-model.*_states\.pt")
_UNIVERSAL = "zero"  # folder of a universal checkpoint: one folder per parameter in it

_ALL_NODES = "if each node kept its own files, give all their directories as sources"


def matches(path: str, *, tag: str | None = None) -> bool:
    """Whether a directory is the folder of a tag, or holds such folders, of whatever tag."""
    return _is_tag(path) or bool(_tags_in(path))


def describe(paths: Sequence[str], *, tag: str | None = None) -> Checkpoint:
    """Read the metadata of the checkpoint in one or several directories.

    Args:
        paths: directories with the folders of tags, or folders of one tag.
        tag: which of several tags; that of ``latest`` if not given.

    Raises:
        SourceError: missing, damaged or contradictory files, or none of that tag.
    """
    folders = _folders_of_tag(paths, tag)
    found = _find_files(folders)
    optimizers = _read_optimizers(folders, found)
    stage = optimizers[0].stage if optimizers else 0
    models = _read_models(_model_files(folders, found, stage))
    _check_world(models, optimizers)
    files = (*(states.file for states in models), *(states.file for states in optimizers))
    _check_steps(optimizers, files, len(models))
    tensors = unite(models, optimizers)
    if not tensors:
        raise UnsupportedError(f"{models[0].file.path}: holds no tensors")
    assets = next(filter(_has_config, _asset_folders(paths, folders)), None)
    skipped = dict(itertools.chain.from_iterable(model.skipped for model in models))
    if optimizers:
        skipped["optimizer_state_dict"] = f"optimizer state of {_ranks(len(optimizers))}"
    directories = [*paths, *folders, *([] if assets is None else [assets])]
    return Checkpoint(
        root=folders[0],
        format=f"{NAME}-{stage}" if optimizers else "DeepSpeed",
        world_size=max(1, len(optimizers)),
        files=files,
        tensors=tuple(tensors),
        skipped=tuple(Skipped(*entry) for entry in skipped.items()),
        directories=tuple(dict.fromkeys(directories)),
        assets=assets,
    )


# --- the folder of a tag ---


def _is_tag(path: str) -> bool:
    return any(
        _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) or _SLICED_MODEL.fullmatch(name)
        for name in _names(path)
    )


def _tags_in(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and _is_tag(entry.path))
    except OSError:
        return []


def _names(path: str) -> list[str]:
    """The names in a directory, in order; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _folders_of_tag(paths: Sequence[str], tag: str | None) -> list[str]:
    """The folder of the tag in each of the directories."""
    tag = tag or _latest(paths) or _only_tag(paths)
    if os.path.basename(tag) != tag or tag in ("", ".", ".."):
        raise CheckpointNotFoundError(f"{paths[0]}: tag {tag!r:.80} is not the name of a folder")
    folders = []
    for path in paths:
        if _is_tag(path):
            folder, there = path, [os.path.basename(os.path.abspath(path))]
        else:
            folder, there = os.path.join(path, tag), _tags_in(path)
        if tag not in there:
            _refuse_closed(folder)
            raise CheckpointNotFoundError(
                f"{path}: no checkpoint of tag '{tag}' (found {', '.join(there) or 'none'})",
                hint="--tag chooses one",
            )
        folders.append(folder)
    return list(dict.fromkeys(folders))


def _latest(paths: Sequence[str]) -> str | None:
    """What the files ``latest`` say; None if there are none, or the folders of a tag are given."""
    tags: dict[str, str] = {}
    for path in paths:
        file = os.path.join(path, LATEST)
        if not os.path.isfile(file):  # it may be a tag as well
            continue
        try:
            with open(file, "rb") as stream:
                text = stream.read(_MAX_TAG + 1)
        except OSError as error:
            raise SourceError(f"{file}: {error.strerror}") from error
        name = text.decode(errors="replace").strip()
        if len(text) > _MAX_TAG or not name.isprintable() or os.path.basename(name) != name:
            raise CorruptFileError(
                f"{file}: {name!r:.40} is not a tag, which is the name of a folder"
            )
        tags.setdefault(name, file)
    if len(tags) > 1:
        raise InconsistentRanksError(
            f"{' and '.join(tags.values())} name different tags: {', '.join(tags)}",
            hint="--tag chooses one",
        )
    return next(iter(tags), None)


def _only_tag(paths: Sequence[str]) -> str:
    tags: dict[str, None] = {}
    for path in paths:
        if _is_tag(path):
            inside = [os.path.basename(os.path.abspath(path))]
        else:
            inside = _tags_in(path)
            for entry in os.listdir(path):
                _refuse_closed(os.path.join(path, entry))  # it may be of another tag
        tags.update(dict.fromkeys(inside))
    if not tags:
        raise CheckpointNotFoundError(f"{', '.join(paths)}: no {FILES} here or one level below")
    if len(tags) != 1:
        raise CheckpointNotFoundError(
            f"{', '.join(paths)}: no file '{LATEST}', and {len(tags)} tags to choose from: "
            f"{', '.join(tags)}",
            hint="--tag chooses one",
        )
    return next(iter(tags))


def _refuse_closed(path: str) -> None:
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
        raise SourceError(f"{path}: {os.strerror(errno.EACCES)}", hint="--tag chooses another")


def _asset_folders(paths: Sequence[str], folders: Sequence[str]) -> Iterator[str]:
    for path in (*paths, *folders, *(os.path.dirname(os.path.abspath(f)) for f in folders)):
        yield os.path.join(path, HUGGINGFACE)
        yield path


def _has_config(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, CONFIG))


# --- its files ---


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a tag.

    Attributes:
        optimizers: rank -> optimizer states.
        slices: rank -> model states of ZeRO-3.
        models: model states of ZeRO-1 and 2, under 0.
    """

    optimizers: dict[int, str] = field(default_factory=dict)
    slices: dict[int, str] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)


def _find_files(folders: Sequence[str]) -> _Found:
    found = _Found()
    for folder in folders:
        for name in _names(folder):
            path = os.path.join(folder, name)
            _refuse_kind(path, name)
            for pattern, files in (
                (_OPTIMIZER, found.optimizers),
                (_SLICED_MODEL, found.slices),
                (_MODEL, found.models),
            ):
                match = pattern.fullmatch(name)
                if match is not None:
                    rank, part = (0, match[1]) if pattern is _MODEL else (int(match[1]), match[2])
                    _refuse_part(path, int(part))
                    _add(files, rank, path)
    return found


def _add(files: dict[int, str], rank: int, path: str) -> None:
    other = files.setdefault(rank, path)
    if other != path and not os.path.samefile(other, path):
        raise InconsistentRanksError(f"rank {rank} twice: {other} and {path}")


def _refuse_kind(path: str, name: str) -> None:
    if _EXPERTS.fullmatch(name):
        raise UnsupportedError(
            f"{path}: experts in files of their own (DeepSpeed MoE), whose optimizer is "
            "partitioned over other ranks than that of the rest"
        )
    if _LAYERS.fullmatch(name):
        raise UnsupportedError(
            f"{path}: layers in files of their own (pipeline parallelism), and nothing in the "
            "files says which parameters a stage's optimizer owns"
        )
    if name == _UNIVERSAL and os.path.isdir(path):
        raise UnsupportedError(
            f"{path}: a universal checkpoint, of which each parameter is a folder",
            hint="give the checkpoint that it was made of",
        )


def _refuse_part(path: str, part: int) -> None:
    if part:
        raise UnsupportedError(
            f"{path}: part {part} of a model that is split over ranks (tensor or pipeline "
            "parallelism), and nothing in the files says how"
        )


def _read_optimizers(folders: Sequence[str], found: _Found) -> list[OptimizerStates]:
    """The optimizer states by rank. How many there should be, the first says."""
    if not found.optimizers:
        return []
    states = read_optimizer_states(found.optimizers[min(found.optimizers)])
    where = f"{', '.join(folders)}: optimizer states"
    paths = _by_rank(where, found.optimizers, max(states.counts), states.file.path)
    return [states, *map(read_optimizer_states, paths[1:])]


def _model_files(folders: Sequence[str], found: _Found, stage: int) -> list[str]:
    """The model states: one file, or with ZeRO-3 one per rank."""
    if found.models and found.slices:
        raise InconsistentRanksError(
            f"{found.models[0]} is of ZeRO-1 or 2, {found.slices[min(found.slices)]} of ZeRO-3",
            hint="keep the files of one save only",
        )
    where = ", ".join(folders)
    if found.slices and not found.optimizers:
        raise CheckpointNotFoundError(
            f"{where}: the optimizer states are missing, which hold the parameters",
            hint=_ALL_NODES,
        )
    if stage == 3:
        count = len(found.optimizers)
        return _by_rank(f"{where}: model states", found.slices, count, found.optimizers[0])
    if not found.models:
        raise CheckpointNotFoundError(
            f"{where}: mp_rank_00_model_states.pt is missing", hint=_ALL_NODES
        )
    return [found.models[0]]


def _read_models(paths: Sequence[str]) -> list[ModelStates]:
    models: list[ModelStates] = []
    for path in paths:
        states = read_model_states(path)
        models.append(share_with(states, models[-1]) if models else states)
    return models


def _by_rank(where: str, files: Mapping[int, str], count: int, source: str) -> list[str]:
    """The files of all ranks, of which there are as many as `source` says."""
    last = max(files, default=0)
    if last >= count:
        raise InconsistentRanksError(
            f"{files.get(last, where)}: rank {last}, but {source} says that there are "
            f"{_ranks(count)}"
        )
    missing = count - len(files)
    if missing:
        raise CheckpointNotFoundError(
            f"{where}: {missing} of {count} files missing: rank{'s' if missing > 1 else ''} "
            f"{missing_ranks(files, count)}",
            hint=_ALL_NODES,
        )
    return [files[rank] for rank in range(count)]


# --- whether they belong together ---


def _check_world(models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]) -> None:
    """All files are of one job and one stage.

    Raises:
        InconsistentRanksError: they are not.
        UnsupportedError: a group that fewer ranks share.
        CheckpointNotFoundError: a ZeRO checkpoint without optimizer states.
    """
    count = len(optimizers)
    groups = models[0].groups
    if groups is not None and not optimizers:
        raise CheckpointNotFoundError(
            f"{models[0].file.path}: the optimizer states beside it are missing, which hold the "
            "parameters",
            hint=_ALL_NODES,
        )
    if groups is None and optimizers:
        raise UnsupportedError(
            f"{models[0].file.path}: no 'param_shapes', so that nothing says which parameters the "
            "partitions hold"
        )
    for model in models:
        if optimizers and model.world_size not in (None, count):
            raise InconsistentRanksError(
                f"{model.file.path}: written by {_ranks(model.world_size or 0)}, the optimizer "
                f"states by {count}"
            )
    for states in optimizers:
        if states.stage != optimizers[0].stage:
            raise InconsistentRanksError(
                f"{states.file.path}: of ZeRO-{states.stage}, {optimizers[0].file.path} of "
                f"ZeRO-{optimizers[0].stage}"
            )
        if max(states.counts) != count:
            raise InconsistentRanksError(
                f"{states.file.path}: 'partition_count' is {max(states.counts)}, there are files "
                f"of {_ranks(count)}"
            )
        if min(states.counts) != count:
            raise UnsupportedError(
                f"{states.file.path}: 'partition_count' is {list(states.counts)}: a group that is "
                "partitioned over fewer ranks (experts) cannot be merged"
            )
        if states.stage < 3 and not len(states.partitions) == len(groups or ()):
            raise InconsistentRanksError(
                f"{states.file.path}: partitions of {len(states.partitions)} parameter groups, "
                f"{models[0].file.path} lists {len(groups or ())}"
            )


def _check_steps(optimizers: Sequence[OptimizerStates], files: Sequence[File], offset: int) -> None:
    """All optimizers have made the same number of steps.

    Where that is a tensor of one number, it is read: nothing else tells files of another step.

    Args:
        optimizers: by rank.
        files: all files, those of the optimizers from `offset` on.

    Raises:
        InconsistentRanksError: they have not.
    """
    steps: dict[object, str] = {}
    sources = Sources(files)
    try:
        for number, states in enumerate(optimizers, start=offset):
            step = states.step
            if isinstance(step, Local):
                steps.setdefault(_read(number, step, sources), states.file.path)
            elif step is not None:
                steps.setdefault(step, states.file.path)
    finally:
        sources.close()
    if len(steps) > 1:
        first, other = list(steps.values())[:2]
        raise InconsistentRanksError(
            f"{other}: 'step': its optimizer has made another number of steps than that of {first}",
            hint="are they files of one and the same step?",
        )


def _read(file: int, scalar: Local, sources: Sources) -> bytes:
    """The bytes of a tensor of one element."""
    value = bytearray(ITEMSIZE[scalar.dtype])
    start = sources.member_offset(file, scalar.view.member) + scalar.view.start
    sources.read(file, start, [memoryview(value)])
    return bytes(value)


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
