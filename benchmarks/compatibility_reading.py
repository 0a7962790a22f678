"""Opens merged checkpoints as a user would, and says what is wrong with them.

Runs in an environment of the version of transformers that reads.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compatibility_models import State, is_version_4, load
from compatibility_writing import rope_of, tokenized

Problems = list[tuple[str, str]]  # in few words, and details

# Files name towers as one version or another has them in memory.
TOWERS = (
    (r"^(?:model\.language_model|language_model\.model)\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^model\.(?=visual\.|vision_tower\.|multi_modal_projector\.)", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)


def read_all(rows: Path, merge: str) -> dict[str, Problems]:
    """Return what is wrong with each result of one kind of merge."""
    transformers = load("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return {
        folder.name: problems_of(folder / merge, folder / "reference")
        for folder in sorted(rows.iterdir())
    }


def problems_of(merged: Path, reference: Path) -> Problems:
    """Open one result as a user would and compare it with what was saved."""
    expected = json.loads((reference / "expected.json").read_text())
    if not (merged / "config.json").exists():
        return [("not merged", "")]
    model_type = json.loads((merged / "config.json").read_text())["model_type"]
    if model_type not in load("transformers").CONFIG_MAPPING:
        return [("unknown model", "")]
    checks: tuple[tuple[str, Callable[[], Problems]], ...] = (
        ("config", lambda: config_problems(merged, expected["rope"])),
        ("tokenizer", lambda: tokenizer_problems(merged, expected["tokenizer"])),
        ("loading", lambda: model_problems(merged, reference, expected, auto=True)),
        ("loading", lambda: model_problems(merged, reference, expected, auto=False)),
    )
    problems: dict[str, str] = {}
    for what, check in checks:
        try:
            found = check()
        except Exception as error:
            found = [(f"{what}: {type(error).__name__}", traceback.format_exc())]
        problems.update((k, v) for k, v in found if k not in problems)
    return list(problems.items())


def config_problems(merged: Path, expected: Mapping[str, object]) -> Problems:
    """Compare the parameters of RoPE that 4.x and 5.x call differently."""
    found = rope_of(load("transformers").AutoConfig.from_pretrained(merged))
    return [
        (f"{name} {found.get(name)}", f"expected {value}")
        for name, value in expected.items()
        if found.get(name) != value
    ]


def tokenizer_problems(merged: Path, expected: Mapping[str, object] | None) -> Problems:
    """Compare what a tokenizer makes of texts, if there was one."""
    if expected is None:
        return []
    found = tokenized(load("transformers").AutoTokenizer.from_pretrained(merged))
    return [
        (f"tokenizer: {'no' if found[key] is None else 'other'} {key}", f"{found[key]!r}")
        for key, value in expected.items()
        if found[key] != value
    ]


def model_problems(
    merged: Path, reference: Path, expected: Mapping[str, Any], *, auto: bool
) -> Problems:
    """Load a result in the dtype that it is in, or in the reader's default."""
    transformers, safetensors = load("transformers"), load("safetensors.torch")
    options = {("torch_dtype" if is_version_4() else "dtype"): "auto"} if auto else {}
    model, loading = getattr(transformers, expected["auto_class"]).from_pretrained(
        merged, output_loading_info=True, **options
    )
    own = set(expected["extra"])
    keys = {kind: sorted(map(str, set(found) - own)) for kind, found in loading.items()}
    if any(keys.values()):  # then the rest follows
        return [
            (f"{len(k)} {kind.replace('_', ' ')}", ", ".join(k)) for kind, k in keys.items() if k
        ]
    forward = safetensors.load_file(reference / "forward.safetensors")
    problems = value_problems(model, reference, expected["dtype"] if auto else None)
    problems += head_problems(model, forward.pop("head", None), tied=expected["tied"])
    if (reference / "value_head.safetensors").exists():
        heads = [safetensors.load_file(d / "value_head.safetensors") for d in (merged, reference)]
        problems += different("of the value head", *heads)
    if auto:
        problems += forward_problems(model, forward)
    return problems


def value_problems(model: Any, reference: Path, dtype: str | None) -> Problems:
    """Compare the parameters, under the names that this version saves them by.

    Args:
        model: as opened.
        reference: directory of what was saved.
        dtype: what most tensors are in; None if the reader chose another.
    """
    safetensors = load("safetensors.torch")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = plain_names(safetensors.load_file(Path(folder) / "model.safetensors"))
    stored = plain_names(safetensors.load_file(reference / "model.safetensors"))
    expected = {n: t.to(found[n].dtype) if n in found else t for n, t in stored.items()}
    problems = different("values", found, expected)
    if dtype is not None:
        # A tensor of another dtype than most is loaded in that of most, or as it is.
        fine = {n: {dtype, str(t.dtype)} for n, t in stored.items()}
        wrong = [n for n, t in found.items() if n in fine and str(t.dtype) not in fine[n]]
        problems += [(f"{len(wrong)} dtypes differ", ", ".join(wrong))] if wrong else []
    return problems


def plain_names(tensors: State) -> State:
    """The same tensors, without what versions name differently."""
    for pattern, replacement in TOWERS:
        tensors = {re.sub(pattern, replacement, name): t for name, t in tensors.items()}
    return tensors


def different(what: str, found: State, expected: State) -> Problems:
    """Compare tensors by name and value."""
    torch = load("torch")
    names = found.keys() ^ expected.keys()
    names |= {n for n in found.keys() & expected.keys() if not torch.equal(found[n], expected[n])}
    return [(f"{len(names)} {what} differ", ", ".join(sorted(names)))] if names else []


def head_problems(model: Any, expected: Any, *, tied: bool) -> Problems:
    """Compare the output head, which no file holds where it is tied."""
    if expected is None:
        return []
    weight = model.get_output_embeddings().weight
    problems = different("heads", {"": weight}, {"": expected.to(weight.dtype)})
    if tied and weight.data_ptr() != model.get_input_embeddings().weight.data_ptr():
        problems.append(("head not tied", ""))
    return problems


def forward_problems(model: Any, forward: State) -> Problems:
    """Compare logits, if the model gives any."""
    torch = load("torch")
    expected = forward.pop("logits")
    known = inspect.signature(model.forward).parameters
    inputs = {name: tensor for name, tensor in forward.items() if name in known}
    try:
        with torch.no_grad():
            logits = model.eval()(**inputs).logits.float()
    except RuntimeError as error:
        return [("forward fails", str(error))]
    worst = ((logits - expected).abs().max() / expected.abs().max()).item()
    limit = 1e-4 if model.dtype == torch.float32 else 0.05
    return [("logits differ", f"by {worst:.2g} of the largest")] if not worst <= limit else []
