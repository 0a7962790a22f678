"""Writes DeepSpeed ZeRO checkpoints by their documented rules, with torch.save and no DeepSpeed.

``test_real_deepspeed.py`` shows that DeepSpeed itself writes such files.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Shape = tuple[int, ...]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Zero:
    """A checkpoint to write.

    Attributes:
        stage: 1, 2 or 3.
        world_size: ranks.
        groups: shape by name of the trained parameters, group by group.
        frozen, buffers: the same of what is not trained.
        shared: name -> the parameter that it is.
        dtype: of the module.
        stripped: whether the padding at the end of a group is left out of the files; that of
            ``BF16_Optimizer`` is not.
        gaps: elements between two parameters of a group, where they are aligned.
        sub_groups: ZeRO-3 joins the parameters of a group in so many flat tensors.
        listed: whether the optimizer states list what they hold.
        tag: name of the folder.
        seed: of the values.
    """

    stage: int = 2
    world_size: int = 2
    groups: tuple[Mapping[str, Shape], ...] = ({"a": (5, 3), "b": (4,)},)
    frozen: Mapping[str, Shape] = field(default_factory=dict)
    buffers: Mapping[str, Shape] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    stripped: bool = True
    gaps: int = 0
    sub_groups: int = 1
    listed: bool = True
    tag: str = "global_step3"
    seed: int = 0

    @property
    def sliced(self) -> bool:
        """Whether every parameter is partitioned by itself."""
        return self.stage == 3


@dataclass(frozen=True)
class Written:
    """The objects that `save` puts into files, which a test may damage first.

    Attributes:
        files: name below the folder of the tag -> object.
        masters: what the checkpoint holds: float32 of what is trained, the rest as in the module.
        module: the same in the dtypes of the module.
    """

    files: dict[str, Any]
    masters: State
    module: State


def build(zero: Zero) -> Written:
    """All the objects of a checkpoint."""
    generator = torch.Generator().manual_seed(zero.seed)

    def values(shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    trained = {n: values(s) for group in zero.groups for n, s in group.items()}
    frozen = {name: values(shape).to(zero.dtype) for name, shape in zero.frozen.items()}
    buffers = {name: values(shape) for name, shape in zero.buffers.items()}
    masters = {**buffers, **trained, **frozen}
    masters |= {name: masters[source] for name, source in zero.shared.items()}
    module = {
        name: value if name in buffers else value.to(zero.dtype) for name, value in masters.items()
    }
    files: dict[str, Any] = {}
    for rank in range(zero.world_size if zero.sliced else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if zero.sliced else "mp_rank_00"
        files[f"{name}_model_states.pt"] = _model_states(zero, rank, module)
    for rank in range(zero.world_size):
        prefix = "bf16_" if zero.dtype == torch.bfloat16 else ""
        states = _slices(zero, rank, trained) if zero.sliced else _ranges(zero, rank, trained)
        files[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": states,
            "ds_config": {"zero_optimization": {"stage": zero.stage}},
            "ds_version": "0.19.8",
        }
    return Written(files, masters, module)


def save(written: Written, folder: Path, tag: str = "global_step3", *, latest: bool = True) -> None:
    """Save the files of a checkpoint below a folder."""
    (folder / tag).mkdir(parents=True)
    with deepspeed_classes():
        for name, value in written.files.items():
            torch.save(value, folder / tag / name)
    if latest:
        (folder / "latest").write_text(tag)


def write(zero: Zero, folder: Path) -> Written:
    """Build and save a checkpoint."""
    written = build(zero)
    save(written, folder, zero.tag)
    return written


# --- model states ---


def _model_states(zero: Zero, rank: int, module: State) -> dict[str, Any]:
    entries = OrderedDict(module)
    fragments = OrderedDict((name, module[name]) for name in zero.frozen)
    if zero.sliced:
        for name in entries:
            if name not in zero.buffers:
                entries[name] = entries[name].new_empty(0)
        for name, value in fragments.items():
            fragments[name] = _slice(value, rank, zero.world_size)
    has_frozen = zero.stage > 1
    return {
        "module": entries,
        "buffer_names": list(zero.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
            for group in (_sub_groups(zero) if zero.sliced else zero.groups)
        ],
        "frozen_param_shapes": OrderedDict((n, torch.Size(s)) for n, s in zero.frozen.items())
        if has_frozen
        else None,
        "frozen_param_fragments": fragments if has_frozen else None,
        # Only the first rank looks for them.
        "shared_params": dict(zero.shared) if rank == 0 else {},
        "lr_scheduler": {"last_epoch": 3},
        "global_steps": 3,
        "global_samples": 12,
        "skipped_steps": 0,
        "dp_world_size": zero.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


# --- optimizer states ---


def _slice(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """What a rank holds of a parameter that is partitioned by itself."""
    size = math.ceil(value.numel() / world_size)
    padded = torch.cat([value.reshape(-1), value.new_full((size * world_size - value.numel(),), 7)])
    return padded[rank * size : (rank + 1) * size].clone()


def _sub_groups(zero: Zero) -> list[dict[str, Shape]]:
    parts = []
    for group in zero.groups:
        items = list(group.items())
        size = math.ceil(len(items) / zero.sub_groups) or 1
        parts += [dict(items[i : i + size]) for i in range(0, len(items), size)]
    return parts


def _slices(zero: Zero, rank: int, trained: State) -> dict[str, Any]:
    flat = [
        torch.cat([torch.empty(0), *(_slice(trained[n], rank, zero.world_size) for n in group)])
        for group in _sub_groups(zero)
    ]
    for tensor in flat:
        tensor.ds_id = "0_5"  # makes torch save it by _rebuild_from_type_v2
    return {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": LossScaler(),
        "partition_count": zero.world_size,
        "optimizer_state_dict": _adam(flat),
        "fp32_flat_groups": flat,
    }


def _ranges(zero: Zero, rank: int, trained: State) -> dict[str, Any]:
    partitions, paddings, gaps, fragments = [], [], [], []
    for group in zero.groups:
        of_group = [0 if i == len(group) - 1 else zero.gaps for i in range(len(group))]
        parts = []
        for name, gap in zip(group, of_group, strict=True):
            parts += [trained[name].reshape(-1), torch.full((gap,), 7.0)]
        vector = torch.cat([torch.empty(0), *parts])
        numel = len(vector)
        unit = 2 * zero.world_size
        vector = torch.cat([vector, torch.full((-numel % unit,), 7.0)])
        size = len(vector) // zero.world_size
        padding = min(size, max(0, (rank + 1) * size - numel))
        partition = vector[rank * size : (rank + 1) * size].clone()
        partitions.append(partition[: size - padding] if zero.stripped else partition)
        paddings.append(padding)
        gaps.append(of_group)
        fragments.append(_fragments(group, of_group, rank * size, size))
    states = {
        "loss_scaler": LossScaler(),
        "base_optimizer_state": _adam(partitions),
        "single_partition_of_fp32_groups": partitions,
        "group_paddings": paddings,
        "partition_count": [zero.world_size] * len(zero.groups),
    }
    if zero.stripped:  # BF16_Optimizer does not say
        states["zero_stage"] = ZeroStageEnum(zero.stage)
    if zero.gaps:
        states["param_alignment_paddings"] = gaps
    if zero.listed:
        states["param_slice_mappings"] = fragments
    return states


def _fragments(
    group: Mapping[str, Shape], gaps: list[int], begin: int, size: int
) -> OrderedDict[str, fragment_address]:
    listed = OrderedDict()
    at = 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        end = at + math.prod(shape)
        low, high = max(at, begin), min(end, begin + size)
        if low < high:
            listed[name] = fragment_address(numel=high - low, start=low - begin)
        at = end + gap
    return listed


def _adam(partitions: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "state": {
            number: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.zeros_like(partition),
                "exp_avg_sq": torch.zeros_like(partition),
            }
            for number, partition in enumerate(partitions)
        },
        "param_groups": [{"lr": 0.1, "params": [i]} for i in range(len(partitions))],
    }


# --- DeepSpeed's classes, as far as its pickles name them ---


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:
    numel: int
    start: int


class LossScaler:
    """An object that nothing here knows."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


_CLASSES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
}


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Let pickle take the classes here for those of DeepSpeed."""
    packages = {name.rsplit(".", n)[0] for name in _CLASSES for n in range(name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in packages}
    own = {kind: kind.__module__ for kind in _CLASSES.values()}
    try:
        sys.modules |= {name: ModuleType(name) for name in packages}
        for name, kind in _CLASSES.items():
            setattr(sys.modules[name], kind.__name__, kind)
            kind.__module__ = name
        yield
    finally:
        for kind, name in own.items():
            kind.__module__ = name
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
