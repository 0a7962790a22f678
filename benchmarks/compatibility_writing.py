"""Writes the checkpoints that `compatibility` opens, and what a reader must find in them.

Runs in an environment of the version of transformers that writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compatibility_models import (
    BASES,
    MADE,
    MADE_BY_4,
    STORED,
    State,
    Trained,
    fixture,
    is_version_4,
    load,
    stored,
)

WORLD_SIZE = 4


def make(out: Path, cases: Mapping[str, Callable[[], Trained]]) -> None:
    """Write checkpoints to ``out/<name>/source`` and what to expect to ``out/<name>/reference``."""
    for name, case in cases.items():
        trained = case()
        save_checkpoint(out / name / "source", trained)
        tokenizer = save_tokenizer(out / name / "source" / "huggingface")
        save_reference(out / name / "reference", trained, tokenizer)


def make_all(rows: Path, bases: Path) -> None:
    """Write what the version at hand writes, and what to expect of the stored checkpoints."""
    if is_version_4():
        make(rows, MADE_BY_4)
        for name, case in BASES.items():
            case().model.save_pretrained(bases / name)
    else:
        make(rows, MADE)
        for name in STORED:
            save_reference(rows / name / "reference", stored(fixture(name)), None)


def save_checkpoint(source: Path, trained: Trained) -> None:
    """Write what verl's checkpoint manager does with FSDP2."""
    transformers = load("transformers")
    state = trained.model.state_dict() if trained.state is None else trained.state
    buffers = {name for name, _ in trained.model.named_buffers()}
    save_rank_files(source, state, buffers)
    fsdp_config = {"FSDP_version": 2, "world_size": WORLD_SIZE}
    (source / "fsdp_config.json").write_text(json.dumps(fsdp_config))
    if trained.meta is not None:
        (source / "lora_train_meta.json").write_text(json.dumps(trained.meta))
    trained.model.config.save_pretrained(source / "huggingface")
    if trained.model.can_generate():
        generation = transformers.GenerationConfig(max_new_tokens=5, eos_token_id=1)
        generation.save_pretrained(source / "huggingface")


def save_rank_files(folder: Path, state: State, buffers: set[str]) -> None:
    """Save parameters as DTensors over four ranks, buffers whole. One process is each in turn."""
    torch, dist = load("torch"), load("torch.distributed")
    fake = load("torch.testing._internal.distributed.fake_pg")
    device_mesh = load("torch.distributed.device_mesh")
    tensors = load("torch.distributed.tensor")
    folder.mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=WORLD_SIZE)
        mesh = device_mesh.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
        sharded: dict[int, Any] = {}  # by address, as tied parameters are one DTensor
        saved = {}
        for name, tensor in state.items():
            saved[name] = tensor
            if name in buffers:
                continue
            if tensor.data_ptr() not in sharded:
                rows = -(-len(tensor) // WORLD_SIZE)
                sharded[tensor.data_ptr()] = tensors.DTensor.from_local(
                    tensor.detach()[rank * rows : (rank + 1) * rows].clone(),
                    mesh,
                    [tensors.Shard(0)],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            saved[name] = sharded[tensor.data_ptr()]
        torch.save(saved, folder / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")
        dist.destroy_process_group()


def save_reference(
    reference: Path, trained: Trained, tokenizer: Mapping[str, object] | None
) -> None:
    """Write what a reader must find.

    ``model.safetensors`` has the values under the names that transformers saves them by,
    ``forward.safetensors`` inputs, logits and the output head.
    """
    torch, safetensors = load("torch"), load("safetensors.torch")
    model = trained.model
    model.save_pretrained(reference)
    ((dtype, _),) = Counter(p.dtype for p in model.parameters()).most_common(1)
    forward = dict(trained.inputs)
    head = model.get_output_embeddings()
    if head is not None:
        forward["head"] = head.weight.detach().clone()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others do not take all sizes
    with torch.no_grad():
        forward["logits"] = model.to(dtype)(**trained.inputs).logits.float()
    safetensors.save_file(forward, reference / "forward.safetensors")
    state = trained.state or {}
    if value_head := {n: t for n, t in state.items() if n.startswith("v_head.")}:
        safetensors.save_file(value_head, reference / "value_head.safetensors")
    expected = {
        "auto_class": trained.auto_class,
        "dtype": str(dtype),
        "tied": head is not None and head.weight is model.get_input_embeddings().weight,
        "rope": rope_of(model.config),
        "tokenizer": tokenizer,
        "extra": trained.extra,
    }
    (reference / "expected.json").write_text(json.dumps(expected))


CHAT = [{"role": "user", "content": "to be or not to be"}]
PROMPT = "<|start|>to be<|end|> or not"


def save_tokenizer(directory: Path) -> dict[str, object]:
    """Write a tokenizer with special tokens and a chat template; return what it makes of texts."""
    transformers, tokenizers = load("transformers"), load("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator([PROMPT, str(CHAT)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        additional_special_tokens=["<|start|>", "<|end|>"],
        model_max_length=64,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    return tokenized(tokenizer)


def tokenized(tokenizer: Any) -> dict[str, object]:
    """What a tokenizer makes of texts."""
    ids = tokenizer(PROMPT)["input_ids"]
    has_template = tokenizer.chat_template is not None
    return {
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "chat template": tokenizer.apply_chat_template(CHAT, tokenize=False)
        if has_template
        else None,
        "eos": tokenizer.eos_token_id,
        "length": tokenizer.model_max_length,
    }


def rope_of(config: Any) -> dict[str, object]:
    """The thetas of the text model, under the names of 4.x."""
    names = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}
    text = config.get_text_config()
    if is_version_4():  # it keeps 5.x's keys too, without a look at them
        return {name: getattr(text, name) for name in names if hasattr(text, name)}
    rope = text.rope_parameters
    if "full_attention" in rope:
        return {name: rope[kind]["rope_theta"] for name, kind in names.items()}
    return {"rope_theta": rope["rope_theta"]}
