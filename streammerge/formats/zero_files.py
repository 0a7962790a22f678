"""What one file of a DeepSpeed ZeRO checkpoint says: the stand-ins of its pickle, checked.

There are two kinds. Model states hold the module's state dict, of which ZeRO-3 leaves placeholders
only, and the names and shapes of the parameters that the optimizer owns. Optimizer states hold one
rank's partition of these, flattened, as float32 master copies.

Source: `_common_checkpoint_state` of ``deepspeed/runtime/engine.py``, `state_dict` of
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``
(DeepSpeed 0.19).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from streammerge import unpickler as stand_ins
from streammerge.checkpoint import File
from streammerge.entries import Ints, View, kind_of, quoted, view_of
from streammerge.errors import (
    CorruptFileError,
    InconsistentRanksError,
    UnsupportedError,
    about,
)
from streammerge.rank_readers import share, share_members
from streammerge.torchfile import TorchFile, read_torch_file
from streammerge.unpickler import brief

# What DeepSpeed notes in the model states beside the module.
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
    }
)
_MAX_NUMEL = 1 << 60  # of a parameter; what sums these up stays within 64 bits
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_.*")
_STEP_DTYPES = ("F32", "F64", "I32", "I64")


# Names and shapes, in an order that matters.
Shapes = tuple[tuple[str, Ints], ...]


class Local(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: safetensors name.
        sizes: its shape.
        view: where it lies.
    """

    dtype: str
    sizes: Ints
    view: View


@dataclass(frozen=True, slots=True, eq=False)
class ModelStates:
    """A file of model states.

    Attributes:
        file: path, identity and members.
        module: the tensors of the module's state dict; ZeRO-3 leaves empty placeholders.
        skipped: what else it holds, and what lies beside it: key and what it is.
        groups: the parameters that the optimizer owns, group by group, in the order in which they
            lie there; None if it is no ZeRO optimizer's.
        buffers: names of buffers.
        frozen: shape by name of the parameters that are not trained, where they are listed.
        fragments: of these, what the file holds: all of one, or with ZeRO-3 a slice.
        shared: name -> name of the parameter that it is.
        world_size: ranks, if it says so.
        step: number of steps that the model was trained, if it says so.
    """

    file: File
    module: Mapping[str, Local]
    skipped: tuple[tuple[str, str], ...]
    groups: tuple[Shapes, ...] | None
    buffers: frozenset[str]
    frozen: Mapping[str, Ints]
    fragments: Mapping[str, Local]
    shared: Mapping[str, str]
    world_size: int | None
    step: int | None


class Fragment(NamedTuple):
    """The part of a parameter that a partition holds: its first element there, and how many."""

    start: int
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStates:
    """A file of one rank's optimizer states.

    Attributes:
        file: path, identity and members.
        stage: of ZeRO.
        counts: into how many partitions each group is divided; one number for ZeRO-3.
        partitions: this rank's, flat, group by group.
        gaps: elements left free after each parameter of each group, where they are listed.
        fragments: what each partition holds, where that is listed.
        step: number of steps that the optimizer made, or where that is stored; None if unknown.
    """

    file: File
    stage: int
    counts: Ints
    partitions: tuple[Local, ...]
    gaps: tuple[Ints, ...] | None
    fragments: tuple[Mapping[str, Fragment], ...] | None
    step: Local | int | None


def read_model_states(path: str) -> ModelStates:
    """Read the metadata of a file of model states.

    Raises:
        SourceError: a file that is damaged, or of a kind that cannot be merged.
    """
    source = _read_file(path)
    with about(path):
        root = source.root
        if not isinstance(root, dict) or "module" not in root or "buffer_names" not in root:
            raise CorruptFileError("no model states of DeepSpeed (no 'module', 'buffer_names')")
        _refuse_parallel_models(root)
        module, skipped = _read_module(root["module"], source)
        beside = [
            (key, f"{kind_of(value)} beside the model")
            for key, value in root.items()
            if isinstance(key, str) and key not in _OWN_KEYS and value is not None
        ]
        shapes = root.get("param_shapes")
        return ModelStates(
            file=source.file,
            module=module,
            skipped=(*skipped, *beside),
            groups=None if shapes is None else tuple(_read_groups(shapes)),
            buffers=_read_names("buffer_names", root["buffer_names"]),
            frozen=_read_shapes("frozen_param_shapes", root.get("frozen_param_shapes") or {}),
            fragments=_read_tensors(
                "frozen_param_fragments", root.get("frozen_param_fragments") or {}, source
            ),
            shared=_read_shared(root.get("shared_params") or {}),
            world_size=_read_count(root.get("dp_world_size")),
            step=_read_count(root.get("global_steps")),
        )


def _read_file(path: str) -> TorchFile:
    """A file, which torch.save wrote under the rank that it has now.

    Nothing else tells whose a partition of ZeRO-3 is. The pickle of a zip archive lies in a folder
    that is called as the file was.
    """
    source = read_torch_file(path, foreign=True)
    named, wrote = _RANK.fullmatch(os.path.basename(path)), _RANK.fullmatch(source.stem)
    if named is not None and wrote is not None and int(named[1]) != int(wrote[1]):
        raise InconsistentRanksError(
            f"{path}: the file's name says rank {int(named[1])}, torch.save wrote it as "
            f"{quoted(source.stem)}",
            hint="the rank files were renamed or mixed up; restore their names",
        )
    return source


def share_with(states: ModelStates, before: ModelStates) -> ModelStates:
    """The same with what is equal in another file in place of its own.

    The model states of all ranks differ in little but the bytes of their tensors.
    """
    return replace(
        states,
        file=share_members(states.file, before.file),
        module=share(states.module, before.module),
        groups=share(states.groups, before.groups),
        buffers=share(states.buffers, before.buffers),
        frozen=share(states.frozen, before.frozen),
        fragments=share(states.fragments, before.fragments),
    )


def read_optimizer_states(path: str) -> OptimizerStates:
    """Read the metadata of a file of optimizer states: all but the optimizer's own state.

    Raises:
        SourceError: a file that is damaged, or of a kind that cannot be merged.
    """
    source = _read_file(path)
    with about(path):
        root = source.root if isinstance(source.root, dict) else {}
        states = root.get("optimizer_state_dict")
        if not isinstance(states, dict):
            raise CorruptFileError("no optimizer states of DeepSpeed (no 'optimizer_state_dict')")
        if states.get("ds_zero_partition_groups") is not None:
            raise UnsupportedError(
                "its expert parameters are partitioned over ranks of their own (AutoEP)",
                hint="ds_to_universal.py of DeepSpeed gathers them",
            )
        stage = _read_stage(states)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        return OptimizerStates(
            file=source.file,
            stage=stage,
            counts=_read_counts(states.get("partition_count")),
            partitions=tuple(_read_partitions(key, states.get(key), source)),
            gaps=_read_gaps(states.get("param_alignment_paddings")),
            fragments=None if _is_reordered(root.get("ds_config")) else _read_fragments(states),
            step=_read_step(states, source),
        )


def _damaged(key: str, value: object) -> CorruptFileError:
    return CorruptFileError(f"'{key}' is damaged ({brief(value)})")


# --- model states ---


def _refuse_parallel_models(root: Mapping[Any, Any]) -> None:
    """Refuse a model of which this file holds a part, by other rules than those of ZeRO."""
    if root["module"] is None:
        raise UnsupportedError(
            "its module is in files of its own, layer by layer (pipeline parallelism)"
        )
    degree = root.get("mp_world_size")
    if degree not in (None, 1):
        raise UnsupportedError(
            f"the model is split over {brief(degree)} ranks (model parallelism), and nothing in "
            "the files says how"
        )
    if any(root.get(key) for key in ("ds_autoep_layers", "autoep_layers")):
        raise UnsupportedError("its experts are in files of their own (AutoEP)")


def _read_module(value: object, source: TorchFile) -> tuple[dict[str, Local], list[Any]]:
    if not isinstance(value, dict):
        raise _damaged("module", value)
    tensors, skipped = {}, []
    for name, entry in value.items():
        if not isinstance(name, str):
            raise UnsupportedError(f"key {brief(name)} is not a name")
        if isinstance(entry, stand_ins.StridedTensor):
            tensors[name] = _read_local(name, entry, source)
        elif isinstance(entry, stand_ins.Record) and not name.endswith("_extra_state"):
            raise UnsupportedError(
                f"key {quoted(name)}: an object that is not a plain tensor, but may be a weight"
            )
        else:
            skipped.append((name, kind_of(entry)))
    return tensors, skipped


def _read_tensors(key: str, value: object, source: TorchFile) -> dict[str, Local]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _damaged(key, value)
    return {name: _read_local(name, entry, source) for name, entry in value.items()}


def _read_local(name: str, value: object, source: TorchFile) -> Local:
    with about(f"key {quoted(name)}"):
        if not isinstance(value, stand_ins.StridedTensor):
            raise UnsupportedError(f"is not a plain tensor ({kind_of(value)})")
        member = source.members[value.storage.key]
        dtype, view = view_of(value, member, source.file.members.sizes[member])
        return Local(dtype, value.sizes, view)


def _read_groups(value: object) -> Iterator[Shapes]:
    if not isinstance(value, list):
        raise _damaged("param_shapes", value)
    for shapes in value:
        yield tuple(_read_shapes("param_shapes", shapes).items())


def _read_shapes(key: str, value: object) -> dict[str, Ints]:
    if not isinstance(value, dict):
        raise _damaged(key, value)
    for name, shape in value.items():
        if (
            not isinstance(name, str)
            or not stand_ins.is_shape(shape)
            or math.prod(shape) > _MAX_NUMEL
        ):
            raise CorruptFileError(f"'{key}': {brief(name)} has shape {brief(shape)}")
    return value


def _read_shared(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(name, str) for pair in value.items() for name in pair
    ):
        raise _damaged("shared_params", value)
    return value


def _read_names(key: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _damaged(key, value)
    return frozenset(value)


def _read_count(value: object) -> int | None:
    """A number that only serves to compare files: what is none is no reason to refuse one."""
    return value if stand_ins.is_int(value) else None


# --- optimizer states ---


def _read_stage(states: Mapping[Any, Any]) -> int:
    stage = states.get("zero_stage")
    if stage is None and "single_partition_of_fp32_groups" in states:
        return 1  # BF16_Optimizer partitions as ZeRO-1 does, and does not say so
    if not stand_ins.is_int(stage) or not 1 <= stage <= 3:
        raise UnsupportedError(f"no optimizer states of ZeRO 1, 2 or 3 (zero_stage {brief(stage)})")
    return stage


def _read_counts(value: object) -> Ints:
    """One number, or a list of one per group."""
    counts = tuple(value) if isinstance(value, list) else (value,)
    if not counts or not stand_ins.is_ints(counts) or 0 in counts:
        raise _damaged("partition_count", value)
    return counts


def _read_partitions(key: str, value: object, source: TorchFile) -> Iterator[Local]:
    if not isinstance(value, list):
        raise _damaged(key, value)
    for number, tensor in enumerate(value):
        name = f"{key}[{number}]"
        local = _read_local(name, tensor, source)
        if len(local.sizes) != 1 or local.view.strides is not None or local.view.conj:
            raise CorruptFileError(f"'{name}' has shape {list(local.sizes)}, it should be flat")
        yield local


def _read_gaps(value: object) -> tuple[Ints, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(gaps, list) for gaps in value):
        raise _damaged("param_alignment_paddings", value)
    groups = tuple(tuple(gaps) for gaps in value)
    if not all(stand_ins.is_ints(gaps) for gaps in groups):
        raise _damaged("param_alignment_paddings", value)
    return groups


def _is_reordered(config: object) -> bool:
    """Whether parameters are dealt out to the ranks in turn: then the listed fragments are wrong.

    ``link_hp_params`` walks them in the order that they had before.
    """
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") not in (None, False)


def _read_fragments(states: Mapping[Any, Any]) -> tuple[dict[str, Fragment], ...] | None:
    """What DeepSpeed lists for its universal checkpoints; older versions do not."""
    value = states.get("param_slice_mappings")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise _damaged("param_slice_mappings", value)
    groups = []
    for group in value:
        fragments = {}
        for name, address in group.items():
            if isinstance(address, stand_ins.Foreign):
                return None  # of a version that keeps the class elsewhere
            if (
                not isinstance(name, str)
                or not isinstance(address, stand_ins.FragmentAddress)
                or not stand_ins.is_int(address.start)
                or not stand_ins.is_int(address.numel)
            ):
                raise _damaged("param_slice_mappings", name)
            fragments[name] = Fragment(address.start, address.numel)
        groups.append(fragments)
    return tuple(groups)


def _read_step(states: Mapping[Any, Any], source: TorchFile) -> Local | int | None:
    """The step of the first parameter that has one, as torch's and DeepSpeed's optimizers keep it.

    It is a number of the group, or a number or a tensor of the parameter.
    """
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        optimizer = states.get(key)
        if not isinstance(optimizer, dict):
            continue
        groups, parameters = optimizer.get("param_groups"), optimizer.get("state")
        entries = [
            *(groups if isinstance(groups, list) else ()),
            *(parameters.values() if isinstance(parameters, dict) else ()),
        ]
        for entry in entries:
            step = entry.get("step") if isinstance(entry, dict) else None
            if stand_ins.is_int(step):
                return step
            if isinstance(step, stand_ins.StridedTensor) and step.sizes in ((), (1,)):
                local = _read_local("step", step, source)
                if local.dtype in _STEP_DTYPES:
                    return local
    return None
