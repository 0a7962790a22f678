"""Checks of a Hugging Face directory before others load it. Builds no model, reads no weights.

Whether the files are complete and belong together, the index, the headers and the sizes tell; what
names and shapes tell is in `consistency`. `model` compares with the model itself.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from streammerge.assets import (
    ADAPTER_CONFIG,
    ADAPTER_DIRECTORY,
    ADAPTER_FILE,
    CONFIG,
    VALUE_HEAD_FILE,
    is_beside_a_model,
    read_json,
)
from streammerge.checks.consistency import Weight, Weights, check_consistency, remote_modules
from streammerge.checks.findings import Finding, error, listed, warning
from streammerge.config import JsonObject
from streammerge.errors import CorruptFileError, SourceError
from streammerge.formats.safetensors_files import read_file_with_metadata
from streammerge.header import INDEX_FILE, METADATA_KEY, SINGLE_FILE
from streammerge.lfs import START_BYTES, refuse_pointer
from streammerge.lora.names import FILE_PREFIX, PeftName, parse_name
from streammerge.lora.settings import Settings, read_settings, regex_fault

__all__ = ["Finding", "check_directory"]

_MAIN_WEIGHTS = re.compile(r"model.*\.safetensors")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model.*\.bin")
# Halves of an adapter that are nothing without the other.
_HALVES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True, slots=True)
class Index:
    """``model.safetensors.index.json``.

    Attributes:
        weight_map: tensor name -> file name.
        total_size: bytes of all tensors, as it says.
    """

    weight_map: Mapping[str, str]
    total_size: object

    @property
    def files(self) -> list[str]:
        """The files that it lists."""
        return sorted(set(self.weight_map.values()))


def check_directory(directory: str, *, raw: bool = False) -> list[Finding]:
    """Check the files of a model, or of an adapter alone.

    Args:
        directory: a merged directory, or the staging directory of one.
        raw: only whether the files of weights are complete and belong together: names, shapes,
            dtypes and side files are meant to be those of the checkpoint, whatever they say.

    Returns:
        What is wrong; nothing if all is well. What cannot be read is a finding too.
    """
    try:
        files = sorted(os.listdir(directory))
    except OSError as problem:
        return [error(f"{directory}: {problem.strerror}")]
    if ADAPTER_CONFIG in files and not any(map(_is_weights, files)):
        return list(_check_adapter(directory))
    findings = list(_check_model(directory, files, raw))
    if os.path.isdir(os.path.join(directory, ADAPTER_DIRECTORY)):
        findings += _check_adapter(directory, ADAPTER_DIRECTORY)
    return findings


def _check_model(directory: str, files: Sequence[str], raw: bool) -> Iterator[Finding]:
    config = None
    if not raw:
        config, findings = _read_config(directory, files)
        yield from findings
        yield from _check_remote_code(directory, files)
        yield from _check_pointers(directory, files)
    index, findings = _read_index(directory, files)
    yield from findings
    expected = _expected_files(files, index)
    yield from _check_file_names(files, expected)
    weights, places, findings = _read_weights(directory, [f for f in expected if f in files])
    yield from findings
    if index is not None and set(places.values()) == set(expected):
        yield from _check_index(index, weights, places)
    if VALUE_HEAD_FILE in files:
        yield from _read_tensors(directory, VALUE_HEAD_FILE)[1]
    if not raw:
        yield from check_consistency(weights, config)


# --- config and code ------------------------------------------------------------------------------


def _read_config(directory: str, files: Sequence[str]) -> tuple[JsonObject | None, list[Finding]]:
    if CONFIG not in files:
        return None, [warning(f"no {CONFIG}: these are weights only, loaders ask for it")]
    return _read_json(directory, CONFIG)


def _check_remote_code(directory: str, files: Sequence[str]) -> Iterator[Finding]:
    """Whether the modules that configs name under ``auto_map`` are there."""
    for name in files:
        if name != CONFIG and not name.endswith("_config.json"):
            continue
        config, findings = _read_json(directory, name)
        if name not in (CONFIG, ADAPTER_CONFIG):  # reported elsewhere
            yield from findings
        for module in remote_modules(config or {}):
            if not os.path.isfile(os.path.join(directory, module)):
                yield error(f"{name}: auto_map needs {module}, which is not there")


def _check_pointers(directory: str, files: Sequence[str]) -> Iterator[Finding]:
    """Whether tokenizer files are there, or pointers of Git LFS in their place."""
    for name in files:
        path = os.path.join(directory, name)
        if name == CONFIG or not os.path.isfile(path) or not is_beside_a_model(name):
            continue
        try:
            with open(path, "rb") as stream:
                refuse_pointer(stream.read(START_BYTES))
        except CorruptFileError as problem:
            yield error(f"{name}: {problem}")
        except OSError as problem:
            yield error(f"{name}: {problem.strerror}")


# --- files of weights -----------------------------------------------------------------------------


def _is_weights(name: str) -> bool:
    """Whether a file is one of the weights of a model, or their index."""
    patterns = (_MAIN_WEIGHTS, _PICKLED_WEIGHTS)
    return name == INDEX_FILE or any(pattern.fullmatch(name) for pattern in patterns)


def _read_index(directory: str, files: Sequence[str]) -> tuple[Index | None, list[Finding]]:
    if INDEX_FILE not in files:
        return None, []
    content, findings = _read_json(directory, INDEX_FILE)
    if content is None:
        return None, findings
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(metadata, dict):
        findings.append(error(f"{INDEX_FILE}: has no metadata, which transformers asks for"))
        metadata = {}
    if not isinstance(weight_map, dict) or not weight_map:
        return None, [*findings, error(f"{INDEX_FILE}: has no weight_map")]
    plain = {
        name: file
        for name, file in weight_map.items()
        if isinstance(file, str) and file == os.path.basename(file) != ""
    }
    odd = [repr(file) for name, file in weight_map.items() if name not in plain]
    if odd:
        findings.append(error(f"{INDEX_FILE}: expected names of files, found {listed(odd)}"))
    return Index(plain, metadata.get("total_size")), findings


def _expected_files(files: Sequence[str], index: Index | None) -> list[str]:
    """The files that hold the weights of the model."""
    if index is not None:
        return index.files
    if INDEX_FILE in files:  # which cannot be read
        return [name for name in files if _MAIN_WEIGHTS.fullmatch(name)]
    return [SINGLE_FILE]


def _check_file_names(files: Sequence[str], expected: Sequence[str]) -> Iterator[Finding]:
    """Missing files, and files that loaders would take besides."""
    indexed = INDEX_FILE in files
    missing = [name for name in expected if name not in files]
    if missing and not indexed:
        yield error(f"no {SINGLE_FILE} and no {INDEX_FILE}")
    elif missing:
        yield error(f"{INDEX_FILE}: {len(missing)} files missing that it lists: {listed(missing)}")
    for name in files:
        if name == ADAPTER_CONFIG:
            yield error(
                f"{name}: beside the weights of a model, so that transformers looks for the base "
                f"model of an adapter; it belongs in {ADAPTER_DIRECTORY}/"
            )
        elif _PICKLED_WEIGHTS.fullmatch(name):
            yield error(f"{name}: weights beside those in safetensors files; loaders may take them")
        elif not name.endswith(".safetensors") or name in expected:
            continue
        elif name == SINGLE_FILE:
            yield error(f"{name}: stale; loaders take it and ignore {INDEX_FILE}")
        elif indexed and _is_weights(name):
            yield error(f"{name}: stale; {INDEX_FILE} does not list it")
        elif not indexed:
            yield error(f"{name}: needs {INDEX_FILE}; without one, loaders read every file")
        elif name != VALUE_HEAD_FILE:
            yield warning(f"{name}: {INDEX_FILE} does not list it; some loaders read every file")


def _read_weights(
    directory: str, files: Sequence[str]
) -> tuple[dict[str, Weight], dict[str, str], list[Finding]]:
    """The tensors of files, which file each is in, and what is wrong with them."""
    weights: dict[str, Weight] = {}
    places: dict[str, str] = {}
    findings = []
    for name in files:
        tensors, problems = _read_tensors(directory, name)
        findings += problems
        twice = [tensor for tensor in tensors if tensor in places]
        if twice:
            findings.append(error(f"{name}: tensors that {places[twice[0]]} has: {listed(twice)}"))
        weights |= tensors
        places |= dict.fromkeys(tensors, name)
    return weights, places, findings


def _check_index(index: Index, weights: Weights, places: Mapping[str, str]) -> Iterator[Finding]:
    wrong = [name for name, file in index.weight_map.items() if places.get(name) != file]
    if wrong:
        yield error(f"{INDEX_FILE}: {len(wrong)} tensors not in their file: {listed(wrong)}")
    unlisted = [name for name in places if name not in index.weight_map]
    if unlisted:
        yield error(f"{INDEX_FILE}: lacks {len(unlisted)} tensors: {listed(unlisted)}")
    total = sum(weight.nbytes for weight in weights.values())
    if index.total_size != total:
        yield warning(f"{INDEX_FILE}: total_size is {index.total_size}, the tensors have {total}")


# --- adapters -------------------------------------------------------------------------------------


def _check_adapter(directory: str, folder: str = "") -> Iterator[Finding]:
    """An adapter as PEFT reads it. Source: peft 0.21 `peft_model.py`, `utils/save_and_load.py`."""
    config_file = os.path.join(folder, ADAPTER_CONFIG)
    weights_file = os.path.join(folder, ADAPTER_FILE)
    config, findings = _read_json(directory, config_file)
    weights, problems = _read_tensors(directory, weights_file)
    yield from (*findings, *problems)
    if config is None:
        return
    missing = [key for key in ("peft_type", "r", "lora_alpha") if not config.get(key)]
    if not (config.get("target_modules") or config.get("target_parameters")):
        missing.append("target_modules")
    if missing:
        yield error(f"{config_file}: lacks {listed(missing)}; PEFT fails or takes its defaults")
        return
    if not config.get("base_model_name_or_path"):
        yield warning(f"{config_file}: says no base_model_name_or_path, so PEFT must be given it")
    try:
        settings = read_settings(None, config)
    except SourceError as problem:
        yield error(f"{config_file}: {str(problem).removeprefix(f'{ADAPTER_CONFIG}: ')}")
        return
    targets = config.get("target_modules")
    if isinstance(targets, str) and (fault := regex_fault(targets)) is not None:
        yield error(
            f"{config_file}: target_modules is {targets!r:.80}, not a regular expression: {fault}"
        )
    elif settings is not None and weights:
        for finding in _check_adapter_weights(weights, settings, config):
            yield Finding(finding.severity, f"{weights_file}: {finding.message}")


def _check_adapter_weights(
    weights: Weights, settings: Settings, config: JsonObject
) -> Iterator[Finding]:
    strange = [name for name in weights if not name.startswith(FILE_PREFIX)]
    if strange:
        yield error(f"PEFT ignores tensors without the prefix {FILE_PREFIX}: {listed(strange)}")
    parsed = [(parse_name(n.removeprefix(FILE_PREFIX)), w) for n, w in weights.items()]
    lora = [(name, weight) for name, weight in parsed if name.is_lora]
    if not lora:
        yield error("holds no LoRA weights")
    owners: dict[str, set[str]] = defaultdict(set)
    for name, _ in lora:
        owners[name.owner].add(name.role)
    for a, b in _HALVES:
        halves = [owner for owner, roles in owners.items() if len(roles & {a, b}) == 1]
        if halves:
            yield error(f"{a} without {b}, or the other way round: {listed(halves)}")
    named = [name.path for name, _ in lora if name.adapter is not None]
    if named:
        yield warning(f"names still have the name of the adapter: {listed(named)}")
    if not config.get("target_parameters"):  # these have ranks per expert, and no module
        yield from _check_ranks(lora, settings)
        untargeted = sorted(p for p in owners if not _is_target(p, config.get("target_modules")))
        if untargeted:
            yield error(f"PEFT drops what target_modules does not name: {listed(untargeted)}")


def _check_ranks(lora: Sequence[tuple[PeftName, Weight]], settings: Settings) -> Iterator[Finding]:
    for name, weight in lora:
        rank = settings.rank_of(name.path)
        if name.role in ("lora_A", "lora_embedding_A") and weight.shape[:1] != (rank,):
            yield error(f"{name.path}: {name.role} is {list(weight.shape)}, but r is {rank}")
            return  # the others are alike


def _is_target(path: str, targets: object) -> bool:
    """As `check_target_module_exists` in peft 0.21 `tuners/tuners_utils.py`."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, path) is not None
    names = targets if isinstance(targets, list) else []
    return any(path == name or path.endswith(f".{name}") for name in names)


# --- reading --------------------------------------------------------------------------------------


def _read_tensors(directory: str, name: str) -> tuple[dict[str, Weight], list[Finding]]:
    """The tensors of a file, whose size is compared with what its header says."""
    path = os.path.join(directory, name)
    try:
        _, entries, metadata = read_file_with_metadata(path)
    except SourceError as problem:
        return {}, [error(_relative(str(problem), directory))]
    findings = []
    if (said := metadata.get("format")) != "pt":
        findings.append(
            error(f"{name}: {METADATA_KEY} says format {said!r}, transformers 4 asks for 'pt'")
        )
    return {entry.name: Weight(entry.dtype, entry.shape) for entry in entries}, findings


def _read_json(directory: str, name: str) -> tuple[JsonObject | None, list[Finding]]:
    try:
        return read_json(os.path.join(directory, name)), []
    except SourceError as problem:
        return None, [error(_relative(str(problem), directory))]


def _relative(message: str, directory: str) -> str:
    return message.removeprefix(os.path.join(directory, ""))
