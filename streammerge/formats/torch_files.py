"""Weights of a Hugging Face directory that torch saved: ``pytorch_model.bin``, one file or several.

Written by ``save_pretrained`` of transformers 4 with ``safe_serialization=False``, which was the
default before 4.35, and by ``save_model`` of accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from streammerge.checkpoint import Checkpoint, File, PlainLayout, Skipped, Tensor
from streammerge.entries import quoted, read_rank_file
from streammerge.errors import CheckpointNotFoundError, UnsupportedError
from streammerge.formats.rank_union import collect_keys, unite
from streammerge.formats.weight_map import (
    check_places,
    find_weights,
    has_weights,
    note_place,
    only_directory,
)

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

NAME = "Hugging Face torch files"
WORD = "hf-bin"
FILES = f"{SINGLE_FILE} with config.json, or {INDEX_FILE}"
OPTIONS: tuple[str, ...] = ()
TRAINING = False


def matches(path: str) -> bool:
    """Whether a directory holds weights under the names that transformers looks for."""
    return has_weights(path, SINGLE_FILE, INDEX_FILE)


def describe(paths: Sequence[str]) -> Checkpoint:
    """Read the metadata of the weights in one directory.

    Tensors come in the order of their file's name, then of its dict. What an indexed file holds
    counts, even if the index leaves it out.

    Raises:
        UsageError: several directories.
        SourceError: no weights there, files that are missing, damaged or contradict each other.
    """
    directory = only_directory(paths)
    weight_map = find_weights(directory, SINGLE_FILE, INDEX_FILE)
    if not weight_map and not os.path.isfile(os.path.join(directory, SINGLE_FILE)):
        raise CheckpointNotFoundError(
            f"{directory}: no weights here (looked for {SINGLE_FILE} or {INDEX_FILE})"
        )
    files: list[File] = []
    tensors: list[Tensor] = []
    skipped: list[Skipped] = []
    places: dict[str, str] = {}
    for filename in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        file, held, others = _read_file(os.path.join(directory, filename))
        for tensor in held:
            note_place(directory, places, tensor.name, filename)
            extents = tensor.extents.shifted(len(files))
            tensors.append(replace(tensor, extents=extents))
        skipped += others
        files.append(file)
    check_places(os.path.join(directory, INDEX_FILE), weight_map, places)
    if not tensors:
        raise UnsupportedError(f"{directory}: the weights hold no tensors")
    return Checkpoint(
        root=directory,
        format=NAME,
        world_size=1,
        files=tuple(files),
        tensors=tuple(tensors),
        skipped=tuple(dict.fromkeys(skipped)),
        directories=(directory,),
        assets=directory,
    )


def _read_file(path: str) -> tuple[File, list[Tensor], list[Skipped]]:
    """A file, its tensors, and its other entries."""
    found = read_rank_file(path, 0, 1)
    names, others = collect_keys([found])
    tensors = list(unite([found], names))
    for tensor in tensors:
        if not isinstance(tensor.layout, PlainLayout):
            raise UnsupportedError(
                f"{path}: key {quoted(tensor.name)} is a part of a tensor ({tensor.layout}), "
                "expected whole ones",
                hint=f"if it is a rank file: --format fsdp --pattern '{os.path.basename(path)}'",
            )
    return found.file, tensors, [Skipped(*entry) for entry in (*others.items(), *found.beside)]
