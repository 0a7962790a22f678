"""How a model is divided into files, and with which memory it is written. Pure.

The same model and options give the same plan, down to the bytes of each header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from streammerge.adapt import Model, Output, Text
from streammerge.assets import Asset
from streammerge.changes import Change
from streammerge.checkpoint import Checkpoint, File, Skipped, Tensor
from streammerge.cores import count_cores
from streammerge.dtypes import ITEMSIZE
from streammerge.errors import UsageError
from streammerge.evaluate import least_buffer
from streammerge.header import (
    INDEX_FILE,
    encode_header,
    encode_index,
    shard_filename,
    split_into_shards,
    storage_order,
)
from streammerge.values import Cast, Stored, Value, needs_torch

DEFAULT_SHARD_SIZE = "5GB"
DEFAULT_MEMORY = "16MiB"
MIN_MEMORY = 4096
_MIN_WORKER_MEMORY = 4096

# Peak memory of a process, measured (tests/test_memory.py): the interpreter with this package,
# what torch adds when it is imported, and the records kept per chunk.
_BASE_MEMORY = 24 << 20
_TORCH_MEMORY = 240 << 20
_CHUNK_MEMORY = 160

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I)?B?|B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class OutputFile:
    """A safetensors file of the result.

    Attributes:
        name: file name.
        header: the bytes before the data.
        outputs: the tensors in storage order.
        offsets: where each starts in the file.
        size: bytes of the file.
    """

    name: str
    header: bytes
    outputs: tuple[Output, ...]
    offsets: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will be written, complete.

    Attributes:
        checkpoint: what it is made of.
        files: the safetensors files, first those of the model.
        texts: the files that are written from memory, the index among them.
        assets: side files that are copied.
        left_out: side files that are not.
        skipped: entries of the checkpoint that are no tensors.
        changes: what differs from the checkpoint.
        warnings: what the user should know, a line each.
        unchecked: whether checking the result makes no sense; see `Model`.
        memory: bytes of all buffers together.
        workers: threads that copy.
        predicted_memory: peak resident bytes of a process that does only this.
    """

    checkpoint: Checkpoint
    files: tuple[OutputFile, ...]
    texts: tuple[Text, ...]
    assets: tuple[Asset, ...]
    left_out: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    unchecked: bool
    memory: int
    workers: int
    predicted_memory: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(output.nbytes for file in self.files for output in file.outputs)

    @property
    def disk_nbytes(self) -> int:
        """Bytes of all files of the result."""
        return (
            sum(file.size for file in self.files)
            + sum(len(text.data) for text in self.texts)
            + sum(asset.size for asset in self.assets)
        )

    @property
    def buffer_size(self) -> int:
        """Bytes of buffer per worker."""
        return self.memory // self.workers


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What merges that write the same bytes have in common. Holds no absolute path.

    Attributes:
        version: of streammerge.
        sources: (name, size, mtime_ns) of each file that is read.
        result: digest of everything that is decided about the result.
    """

    version: str
    sources: tuple[tuple[str, int, int], ...]
    result: str

    def differs_from(self, before: Mapping[str, Any]) -> str | None:
        """How this job differs from an earlier one, for people; None if it is the same.

        Args:
            before: the fingerprint of that one as a JSON object.
        """
        version = before.get("version")
        if version != self.version:
            return f"streammerge {version} wrote it, this is {self.version}"
        sources = tuple((name, size, mtime_ns) for name, size, mtime_ns in before["sources"])
        if [name for name, *_ in sources] != [name for name, *_ in self.sources]:
            return "it was made of other files"
        for old, new in zip(sources, self.sources, strict=True):
            if old != new:
                return f"{new[0]} has changed since"
        return None if before["result"] == self.result else "it was made with other options"


def make_plan(
    checkpoint: Checkpoint,
    model: Model,
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    memory: int | str | None = None,
    workers: int | None = None,
) -> Plan:
    """Divide a model into files.

    Args:
        checkpoint: what it is made of.
        model: as `adapt` gives it.
        max_shard_size: limit of a file's tensor data, in bytes or as ``5GB`` or ``4GiB``.
        memory: all buffers together, in bytes or as ``16MiB``. `DEFAULT_MEMORY` if not given, or
            what the largest LoRA fold takes.
        workers: threads; min(4, cores) if not given, fewer where memory is short.

    Raises:
        UsageError: an option that makes no sense, or too little memory for a fold.
        UnsupportedError: a name or a number of tensors that safetensors cannot hold.
    """
    check_limits(max_shard_size=max_shard_size, memory=memory, workers=workers)
    limit = parse_size(max_shard_size, "max shard size")
    threads = workers or min(4, count_cores())
    budget, least = _budget(model, memory, threads)
    threads = max(1, min(threads, budget // least))

    outputs = {output.name: output for output in model.outputs}
    sizes = {name: output.nbytes for name, output in outputs.items()}
    shards = split_into_shards(sizes, limit)
    files = [
        _output_file(shard_filename(i, len(shards)), [outputs[name] for name in names])
        for i, names in enumerate(shards)
    ]
    texts = list(model.texts)
    # Loaders without an index read every *.safetensors of the directory.
    beside = any("/" not in name for name in model.apart)
    if len(files) > 1 or (files and beside):
        weight_map = {o.name: file.name for file in files for o in file.outputs}
        numel = sum(output.numel for output in model.outputs)
        index = encode_index(weight_map, sum(sizes.values()), numel)
        texts.insert(0, Text(INDEX_FILE, index))
    files += [_output_file(name, apart) for name, apart in model.apart.items()]
    return Plan(
        checkpoint=checkpoint,
        files=tuple(files),
        texts=tuple(texts),
        assets=model.assets,
        left_out=model.left_out,
        skipped=checkpoint.skipped,
        changes=model.changes,
        warnings=model.warnings,
        unchecked=model.unchecked,
        memory=budget,
        workers=threads,
        predicted_memory=_predict_memory(checkpoint, list(_all_outputs(model)), budget),
    )


def check_limits(
    *, max_shard_size: int | str, memory: int | str | None, workers: int | None
) -> None:
    """Refuse numbers that make no sense for any model. Arguments as of `make_plan`.

    Raises:
        UsageError: such a number.
    """
    if parse_size(max_shard_size, "max shard size") < 1:
        raise UsageError("max shard size must be at least 1 byte")
    if memory is not None and (budget := parse_size(memory, "memory")) < MIN_MEMORY:
        raise UsageError(f"memory must be at least {MIN_MEMORY:,} bytes, not {budget:,}")
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")


def parse_size(value: int | str, what: str) -> int:
    """Bytes of ``5GB`` (decimal), ``4GiB`` (binary) or a plain number.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise UsageError(
            f"{what}: {value!r} is not a size", hint="write it like 5GB, 512MiB or 65536"
        )
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


def output_names(plan: Plan) -> list[str]:
    """Names of all files of the result."""
    return [part.name for parts in (plan.files, plan.texts, plan.assets) for part in parts]


def fingerprint(plan: Plan, assets: Sequence[File], device: str = "cpu") -> Fingerprint:
    """What identifies the job of carrying out a plan.

    Args:
        plan: the plan.
        assets: its side files, as they are now.
        device: where LoRA folds are computed: one rounds them differently than the other.
    """
    from streammerge import __version__  # which imports this module

    try:
        # hashlib would load OpenSSL: 3.6 MiB.
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b

    digest = blake2b()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else ascii(part).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    for file in plan.files:
        add(file.name, file.header)
        for output in file.outputs:
            add(_recipe(output.value, device))
    for text in plan.texts:
        add(text.name, text.data)
    add(*(entry.name for entry in plan.skipped))  # which tells what part of a checkpoint it is
    read = [(os.path.basename(file.path), file) for file in plan.checkpoint.files]
    read += [(asset.name, file) for asset, file in zip(plan.assets, assets, strict=True)]
    return Fingerprint(
        __version__,
        tuple((name, file.size, file.mtime_ns) for name, file in read),
        digest.hexdigest()[:32],
    )


def _recipe(value: Value, device: str) -> object:
    """All that decides about the bytes of a value, but for those of the sources."""
    if isinstance(value, Stored):
        return _origin(value.tensor), value.index, value.rows, value.swapped
    if isinstance(value, Cast):
        return _recipe(value.value, device), value.dtype
    adapter = [t and _origin(t) for t in (value.a, value.b, value.magnitude)]
    settings = (value.scale, value.kind, value.dtype, value.experts, device)
    return _recipe(value.base, device), adapter, settings


def _origin(tensor: Tensor) -> object:
    # Two models may have tensors of the same name, but in other files.
    files = tensor.extents.files
    return tensor.name, files[0] if files else None  # no rank holds a shard of an empty tensor


def _all_outputs(model: Model) -> Iterator[Output]:
    yield from model.outputs
    for outputs in model.apart.values():
        yield from outputs


def _budget(model: Model, memory: int | str | None, threads: int) -> tuple[int, int]:
    """Bytes of all buffers together, and the fewest that a thread needs."""
    largest = max(_all_outputs(model), key=lambda output: least_buffer(output.value))
    least = max(_MIN_WORKER_MEMORY, least_buffer(largest.value))
    if memory is None:
        return max(parse_size(DEFAULT_MEMORY, "memory"), least * threads), least
    budget = parse_size(memory, "memory")
    if budget < least:
        raise UsageError(
            f"memory of {budget:,} bytes is too little to fold the adapter into "
            f"'{largest.name}', which takes {least:,}",
            hint=f"--memory {least} or more, or omit it",
        )
    return budget, least


def _output_file(name: str, outputs: Sequence[Output]) -> OutputFile:
    by_name = {output.name: output for output in outputs}
    ordered = [by_name[n] for n in storage_order((o.name, o.dtype) for o in outputs)]
    header = encode_header({o.name: (o.dtype, o.shape) for o in ordered})
    offsets = []
    at = len(header)
    for output in ordered:
        offsets.append(at)
        at += output.nbytes
    return OutputFile(name, header, tuple(ordered), tuple(offsets), at)


def _predict_memory(checkpoint: Checkpoint, outputs: Collection[Output], budget: int) -> int:
    chunks = sum(len(tensor.extents) for tensor in checkpoint.tensors)
    largest = max((output.nbytes for output in outputs), default=0)
    torch = _TORCH_MEMORY if any(needs_torch(output.value) for output in outputs) else 0
    itemsize = max(ITEMSIZE.values())
    buffers = min(budget, max(largest * itemsize, MIN_MEMORY))
    return _BASE_MEMORY + torch + buffers + chunks * _CHUNK_MEMORY
