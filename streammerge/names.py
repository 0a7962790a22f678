"""Names without the parts that wrappers of a module put into them. Pure.

``torch.compile``, FSDP1, activation checkpointing, DDP, PEFT and TRL hold the module they wrap as
an attribute, whose name then stands in the names of its tensors. Loaders know none of these names.
A name is taken apart at its dots, so that only whole components go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammerge.changes import Change
from streammerge.errors import UnsupportedError

# Attributes that no model in transformers has: wrappers wherever they stand. torch 2.13:
# `_dynamo/eval_frame.py`, `distributed/fsdp/_common_utils.py`,
# `distributed/algorithms/_checkpoint/checkpoint_wrapper.py`. Lightning 2 `fabric/wrappers.py`.
_WRAPPER_PARTS = {
    "_orig_mod": "wrapper part _orig_mod of torch.compile",
    "_fsdp_wrapped_module": "wrapper part _fsdp_wrapped_module of FSDP1",
    "_checkpoint_wrapped_module": "wrapper part _checkpoint_wrapped_module of checkpointing",
    "_forward_module": "wrapper part _forward_module of Lightning",
}
# torch 2.13 `distributed/fsdp/_flat_param.py`; the first versions had no underscore.
FLAT_PARAMETERS = frozenset({"_flat_param", "flat_param"})
# Given by PEFT alone, as ``lora_*`` is. peft 0.21 `tuners/tuners_utils.py`, `utils/other.py`.
_PEFT_PARTS = frozenset({"base_layer", "modules_to_save"})
_VALUE_HEADS = frozenset({"v_head", "summary"})

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A wrapper of the whole model, whose attribute a model may use inside as well.

    Attributes:
        parts: the leading components.
        reason: for people.
        heads_beside: whether value heads hang beside what it wraps.
    """

    parts: _Path
    reason: str
    heads_beside: bool

    def leads(self, path: _Path) -> bool:
        """Whether a name starts with it and goes on."""
        size = len(self.parts)
        return len(path) > size and path[:size] == self.parts


_DDP = _Prefix(("module",), "prefix module. of DDP", heads_beside=False)
_PEFT = _Prefix(("base_model", "model"), "prefix base_model.model. of PEFT", heads_beside=True)
_TRL = _Prefix(("pretrained_model",), "prefix pretrained_model. of TRL", heads_beside=True)


@dataclass(frozen=True, slots=True)
class CleanNames:
    """Names without wrapper parts.

    Attributes:
        names: name in the checkpoint -> name without wrapper parts, in the order given.
        peft: whether they are those of a PEFT model: ``base_model.model.`` was taken off.
        changes: one ``renamed`` for each that differs.
    """

    names: dict[str, str]
    peft: bool
    changes: tuple[Change, ...]


def clean_names(names: Sequence[str], *, adapter_settings: bool = False) -> CleanNames:
    """Take the parts of wrappers out of names.

    ``_orig_mod``, ``_fsdp_wrapped_module`` and others like them go wherever they are. ``module.``,
    ``base_model.model.`` and ``pretrained_model.`` go from the front only, if all names have them,
    and again until none is left; value heads need not have the latter two.
    What PEFT puts inside (``base_layer``, ``lora_A``, ``default``) stays.

    Args:
        names: the names of all tensors of a checkpoint.
        adapter_settings: whether settings of an adapter were found with the checkpoint. Without
            them ``base_model.model.`` goes only if some name has a part that PEFT alone gives.

    Raises:
        UnsupportedError: a flat parameter; a name that has wrapper parts only; two names that
            become the same, even if their values are equal.
    """
    for name in names:
        refuse_flat_parameter(name)
    paths = [tuple(name.split(".")) for name in names]
    reasons = [
        [reason for part, reason in _WRAPPER_PARTS.items() if part in path] for path in paths
    ]
    paths = [tuple(part for part in path if part not in _WRAPPER_PARTS) for path in paths]
    peft = False
    while (prefix := _outermost(paths, adapter_settings)) is not None:
        peft = peft or prefix is _PEFT
        for index, path in enumerate(paths):
            if prefix.leads(path):
                paths[index] = path[len(prefix.parts) :]
                reasons[index].append(prefix.reason)
    clean = [".".join(path) for path in paths]
    changes = tuple(
        Change("renamed", name, to, ", ".join(dict.fromkeys(why)))
        for name, to, why in zip(names, clean, reasons, strict=True)
        if why
    )
    return CleanNames(_unique(names, clean), peft, changes)


def is_value_head(name: str) -> bool:
    """Whether a tensor belongs to a value head that TRL puts beside a language model.

    TRL `modeling_value_head.py`: ``v_head``, a `ValueHead` whose layer is ``summary``.
    """
    return _is_value_head(tuple(name.split(".")))


def refuse_flat_parameter(name: str) -> None:
    """Refuse the name of a flat parameter.

    Raises:
        UnsupportedError: it is one.
    """
    if not FLAT_PARAMETERS.isdisjoint(name.split(".")):
        raise flat_parameter_error(f"'{name}'")


def flat_parameter_error(key: str) -> UnsupportedError:
    """The error for a flat parameter, given its key in quotes."""
    return UnsupportedError(
        f"key {key} is a flat parameter of FSDP1 (LOCAL_STATE_DICT): several weights in one "
        "tensor, without their names and shapes",
        hint="save with StateDictType.SHARDED_STATE_DICT",
    )


def _outermost(paths: Sequence[_Path], adapter_settings: bool) -> _Prefix | None:
    """The prefix that all names have, if there is one."""
    besides_heads = [path for path in paths if not _is_value_head(path)]
    for prefix in (_DDP, _PEFT, _TRL):
        wrapped = besides_heads if prefix.heads_beside else paths
        if not wrapped or not all(map(prefix.leads, wrapped)):
            continue
        if prefix is not _PEFT or adapter_settings or any(map(_has_peft_part, wrapped)):
            return prefix
    return None


def _is_value_head(path: _Path) -> bool:
    return len(path) > 1 and path[0] in _VALUE_HEADS


def _has_peft_part(path: _Path) -> bool:
    return any(part in _PEFT_PARTS or part.startswith("lora_") for part in path)


def _unique(names: Sequence[str], clean: Sequence[str]) -> dict[str, str]:
    """Each name with its clean one, unless that is empty or another's."""
    first: dict[str, str] = {}
    for name, to in zip(names, clean, strict=True):
        if name and not to:
            raise UnsupportedError(f"key '{name}' has no part that is not a wrapper's")
        if to in first:
            raise UnsupportedError(
                f"keys '{first[to]}' and '{name}' both become '{to}' without their wrapper parts",
                hint="--raw keeps the names as they are stored",
            )
        first[to] = name
    return dict(zip(names, clean, strict=True))
