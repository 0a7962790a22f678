"""The files beside the weights: config, tokenizer, chat template and the like."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from streammerge.config import JsonObject, parse_json
from streammerge.errors import CheckpointNotFoundError, CorruptFileError, SourceError, about
from streammerge.header import MAX_HEADER_BYTES
from streammerge.lfs import MAX_POINTER_BYTES, refuse_pointer

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_DIRECTORY = "lora_adapter"  # where verl puts an adapter beside a model
VALUE_HEAD_FILE = "value_head.safetensors"
# verl writes the first beside its rank files; the others are PEFT's.
_LORA_META = "lora_train_meta.json"
_ADAPTER_CONFIGS = (os.path.join(ADAPTER_DIRECTORY, ADAPTER_CONFIG), ADAPTER_CONFIG)

# What a training run keeps beside its weights to go on: verl and SkyRL (`optim_`, `extra_state_`),
# accelerate (`utils/constants.py`), the Trainer of transformers (`trainer.py`), NeMo-RL
# (``optimizer/optim``). Some are directories, in the format of torch.distributed.checkpoint.
TRAINING_STATE = (
    "optim",
    "optim_*",
    "optimizer*",
    "extra_state_*",
    "scheduler*",
    "scaler*",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "random_states_*",
    "rng_state*",
    "custom_checkpoint_*",
    "trainer_state.json",
    "training_args.bin",
)
# Weights, their indexes, and what belongs to a training run: never copied. A stale weights file
# beside a new index would be loaded instead of ours, without a warning. Code is copied, whatever
# its name.
DENIED = (
    "*.safetensors",
    "*.safetensors.index*.json",
    "pytorch_model*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.distcp",
    "*.npz",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    *TRAINING_STATE,
    "fsdp_config.json",
    "adapter_config.json",
    "adapter_model.*",
    "latest",
)
# The last are those in which trainers keep checkpoints and logs beside a finished model.
DENIED_DIRECTORIES = (
    ".git",
    ".cache",
    "__pycache__",
    ADAPTER_DIRECTORY,
    "checkpoint-*",
    "global_step*",
    "pytorch_model_fsdp_*",
    "optimizer_*",
    "runs",
    "wandb",
)
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
# DeepSpeed puts them beside each of its checkpoints.
_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


# Where weights have a folder of their own, it and the one above hold files of the training too, and
# other checkpoints. What belongs beside a model is taken from there.
HUGGINGFACE = "huggingface"
BESIDE_A_MODEL = (
    "config.json",
    "generation_config.json",
    "configuration.json",
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "bpe.codes",
    "dict.txt",
    "normalizer.json",
    "chat_template.*",
    "*processor_config.json",
    "image_processor*.json",
    "feature_extractor*.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_FOLDERS_BESIDE_A_MODEL = ("additional_chat_templates", "[0-9]_*")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that is copied byte for byte.

    Attributes:
        path: where it is.
        name: its name below the target, with ``/``.
        size: bytes.
    """

    path: str
    name: str
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class SideFiles:
    """What is beside the weights of a checkpoint.

    Attributes:
        directory: the folder that is copied from; None if there is none.
        assets: the files to copy.
        left_out: names of those that are not copied.
        texts: the JSON files that a merge may edit: name -> bytes.
        chat_template: what ``chat_template.jinja`` says; None if there is none, or no UTF-8.
        lora_meta, adapter_config: what says how an adapter was trained, if there is such a file.
    """

    directory: str | None
    assets: tuple[Asset, ...] = ()
    left_out: tuple[str, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)
    chat_template: str | None = None
    lora_meta: JsonObject | None = None
    adapter_config: JsonObject | None = None

    def parsed(self, name: str) -> JsonObject | None:
        """A JSON file that may be edited, parsed; None if there is none.

        Raises:
            CorruptFileError: it is no JSON object.
        """
        data = self.texts.get(name)
        return None if data is None else parse_json(data, f"{self.directory}/{name}")


def find_asset_folder(weights: Sequence[str]) -> tuple[str | None, bool]:
    """Where config and tokenizer are that belong to weights in a folder of their own.

    Args:
        weights: the folder, or those of several nodes.

    Returns:
        The first with a config of the folder, its ``huggingface/``, the one above and the
        ``huggingface/`` there; else the first ``huggingface/`` that exists; else None. And whether
        the folder holds files of the training too.

    Raises:
        SourceError: a folder that cannot be looked at.
    """
    folders = []
    for path in weights:
        for folder in (path, os.path.dirname(os.path.abspath(path))):
            folders += [(folder, True), (os.path.join(folder, HUGGINGFACE), False)]
    for folder, mixed in folders:
        if _exists(os.path.join(folder, CONFIG)):
            return folder, mixed
    for folder, mixed in folders:
        if not mixed and _exists(folder):
            return folder, mixed
    return None, False


def find_side_files(
    directory: str | None,
    roots: Sequence[str],
    weights: Collection[str] = (),
    *,
    mixed: bool = False,
) -> SideFiles:
    """What is beside the weights.

    Args:
        directory: the folder with config and tokenizer; None if there is none.
        roots: folders in which the settings of an adapter may be, besides that one.
        weights: files that are read: neither they nor their index count as left out.
        mixed: whether the folder holds files of the training too.

    Raises:
        SourceError: a file or folder that cannot be read.
        CorruptFileError: the settings of an adapter are no JSON object; a pointer of Git LFS in
            place of a file that loaders ask for.
    """
    folders = [*roots, *([] if directory is None else [directory])]
    meta = _first_json(os.path.join(folder, _LORA_META) for folder in folders)
    adapter = _first_json(os.path.join(f, name) for f in folders for name in _ADAPTER_CONFIGS)
    if directory is None:
        return SideFiles(None, lora_meta=meta, adapter_config=adapter)
    if not os.path.isdir(directory):
        raise CheckpointNotFoundError(f"{directory}: no such directory for side files")
    for name in (CONFIG, TOKENIZER_CONFIG):
        path = os.path.join(directory, name)
        if os.path.exists(path) and not os.path.isfile(path):
            raise CorruptFileError(f"{path}: is not a file")
    assets, names = find_assets(directory, mixed=mixed)
    _refuse_pointers(assets)
    unread = [name for name in names if os.path.join(directory, name) not in weights]
    replaced = _INDEXES if len(unread) < len(names) else ()
    left_out = tuple(name for name in unread if not _is_any(name, replaced))
    texts = {a.name: _read(a.path) for a in assets if a.name in (CONFIG, TOKENIZER_CONFIG)}
    template = next((_read_text(a.path) for a in assets if a.name == _CHAT_TEMPLATE), None)
    return SideFiles(directory, assets, left_out, texts, template, meta, adapter)


def _refuse_pointers(assets: Iterable[Asset]) -> None:
    """Refuse pointers among what loaders ask for. Others, like pictures, may be pointers."""
    for asset in assets:
        if asset.size <= MAX_POINTER_BYTES and is_beside_a_model(asset.name):
            start = _read(asset.path)
            with about(asset.path):
                refuse_pointer(start)


def find_assets(
    directory: str, *, mixed: bool = False
) -> tuple[tuple[Asset, ...], tuple[str, ...]]:
    """The files of a directory to copy, and the names of those left out, both in order of names.

    Links to files are followed, links to directories are left out. Of a folder that holds files of
    the training too (`mixed`), only what belongs beside a model counts, left out or not.

    Raises:
        SourceError: the directory cannot be read.
    """
    assets: list[Asset] = []
    left_out: list[str] = []

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename}: {error.strerror}") from error

    for parent, directories, names in os.walk(directory, onerror=fail):
        if mixed and parent == directory:
            directories[:] = _matching(directories, _FOLDERS_BESIDE_A_MODEL)
            names = _matching(names, BESIDE_A_MODEL)  # noqa: PLW2901
        for name in sorted(directories):
            path = os.path.join(parent, name)
            if _is_any(name, DENIED_DIRECTORIES) or os.path.islink(path):
                directories.remove(name)
                left_out.append(os.path.relpath(path, directory) + "/")
        directories.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, directory)
            if name in _RECOVERY_SCRIPTS or (not name.endswith(".py") and _is_any(name, DENIED)):
                left_out.append(relative)
                continue
            try:
                status = os.stat(path)
            except OSError as error:
                raise SourceError(f"{path}: {error.strerror}") from error
            if not stat.S_ISREG(status.st_mode):
                left_out.append(relative)
                continue
            assets.append(Asset(path, relative.replace(os.sep, "/"), status.st_size))
    return tuple(assets), tuple(left_out)


def is_beside_a_model(name: str) -> bool:
    """Whether a file is one that loaders ask for, or else belongs to a model."""
    return _is_any(name, BESIDE_A_MODEL)


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if _is_any(name, patterns)]


def _exists(path: str) -> bool:
    """As `os.path.exists`, which takes what cannot be looked at for nothing."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    return True


def read_json(path: str) -> JsonObject:
    """The object in a JSON file beside the weights.

    Raises:
        CorruptFileError: it is no JSON object, or too large to be one.
        SourceError: it cannot be read.
    """
    return parse_json(_read(path), path)


def _first_json(paths: Iterator[str]) -> JsonObject | None:
    return next((read_json(path) for path in paths if os.path.isfile(path)), None)


def _read_text(path: str) -> str | None:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_HEADER_BYTES:  # the index of the weights may be as long as a header
                raise CorruptFileError(
                    f"{path}: has {size:,} bytes, too large for what it should be"
                )
            return file.read(size)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe of that name is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
