"""Open merged checkpoints with several versions of transformers; COMPATIBILITY.md keeps the result.

    python benchmarks/compatibility.py [--scratch DIR] [--python VERSION=PATH ...] [--update]

Makes a virtual environment per version, writes tiny checkpoints with the newest of them as verl
saves them, merges each with and without ``--compat 4``, and opens every result in every
environment. A result is right where it opens without a missing or an unexpected key, every
parameter has the trained value, and config, tokenizer, dtypes and logits are those of the model
that was saved. Exits 1 if a cell is not right and not listed in ``KNOWN``, if one that is listed is
otherwise, or if the kept table differs. The models are in `compatibility_models`, what runs in the
environments in `compatibility_writing` and `compatibility_reading`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compatibility_models import (
    FIRST_5,
    LAST_4,
    MADE,
    MADE_BY_4,
    NEWEST,
    OLDEST,
    STORED,
    VERSIONS,
    fixture,
    load,
)
from compatibility_reading import Problems, read_all
from compatibility_writing import make_all

HERE = Path(__file__).resolve().parent
KEPT = HERE / "COMPATIBILITY.md"
RESULT_MARK = "<!-- The rest is what `compatibility.py --update` writes. -->\n"

TORCH = "2.13.0"
MERGES: dict[str, tuple[str, ...]] = {"--compat 4": ("--compat", "4"), "no --compat": ()}

# Rows that merge the checkpoint of another row with more options; {base} is one of `BASES`.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Llama, `--max-shard-size 30KB`": ("Llama", ("--max-shard-size", "30KB")),
    "Gemma3 with pictures, `--names-from`": ("Gemma3 with pictures", ("--names-from", "{base}")),
    "Qwen2.5-VL, `--names-from`": ("Qwen2.5-VL", ("--names-from", "{base}")),
    "fsdp2_w4, `--dtype bfloat16`": ("fsdp2_w4", ("--dtype", "bfloat16")),
}

Cells = dict[tuple[str, str, str], Problems]  # merge, row, version


@dataclass(frozen=True, slots=True)
class Known:
    """Cells that are not right, and why. The first four are regular expressions."""

    merge: str
    row: str
    version: str
    cell: str
    where: str
    why: str

    def covers(self, merge: str, row: str, version: str) -> bool:
        pairs = ((self.merge, merge), (self.row, row), (self.version, version))
        return all(re.fullmatch(pattern, text) for pattern, text in pairs)


# The first that covers a cell counts.
KNOWN = (
    Known(
        ".*",
        "(Qwen3|Gemma3|DeepSeek-V3|Qwen2.5-VL).*",
        OLDEST,
        "unknown model",
        f"unknown model, {OLDEST}",
        "that version does not have it.",
    ),
    Known(
        ".*",
        "fsdp2_(w4|compiled)",
        OLDEST,
        "forward fails",
        f"fsdp2_w4 and fsdp2_compiled, {OLDEST}",
        "they hold bfloat16 weights and float32 norms. Later versions load all in one dtype; this "
        "one loads each as it is and cannot multiply them. The merge warns of it; "
        "`--dtype bfloat16` helps, as its row shows.",
    ),
    Known(
        ".*",
        "fsdp2_moe",
        r"5\..*",
        "forward fails",
        "fsdp2_moe, 5.x",
        "all values are right, but 5.x multiplies experts in groups, which takes rows of a "
        "multiple of 16 bytes; those of this toy have 24.",
    ),
    Known(
        "no --compat",
        "(?!fsdp2_|Qwen3-MoE, trained).*",
        r"4\..*",
        r"rope_theta 10+\.0; .*tokenizer: ValueError; .*",
        "without `--compat`, 4.x",
        "this is what the option is for. 4.x takes its default for rope_theta, among others, and "
        "knows no such tokenizer class. The merge warns of it. The stored checkpoints have the "
        "defaults and no tokenizer.",
    ),
    Known(
        "no --compat",
        "Qwen3-MoE",
        FIRST_5,
        "loading: RuntimeError",
        f"Qwen3-MoE without `--compat`, {FIRST_5}",
        "5.24 writes the number of experts under a name that 5.0 does not read.",
    ),
    Known(
        ".*",
        "Gemma3 with pictures",
        f"{LAST_4}|{FIRST_5}",
        "21 missing keys; 21 unexpected keys",
        "Gemma3 with pictures, before 5.24",
        "the vision tower is stored as 5.24 names it in memory, without the level `vision_model.` "
        "that earlier versions have. The merge warns of it; `--names-from` a model of the Hub "
        "gives names that all open, as its row shows.",
    ),
)


def is_known(merge: str, row: str, version: str, cell: str) -> bool:
    """Whether a cell is as it has to be."""
    for known in KNOWN:
        if known.covers(merge, row, version):
            return re.fullmatch(known.cell, cell) is not None
    return cell == "right"


def environment(version: str, folder: Path) -> str | None:
    """Return the Python of a virtual environment, made if need be; None if that cannot be."""
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        wanted = [f"torch=={TORCH}", f"transformers=={version}"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-qq", *wanted],
        ):
            if subprocess.run(command, check=False).returncode != 0:
                print(f"transformers {version} cannot be installed here", file=sys.stderr)
                return None
        done.touch()
    return str(python)


def run(python: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def step(python: str, name: str, *arguments: object) -> Any:
    """Run one of `STEPS` in an environment and return what it does."""
    done = run(python, __file__, "--step", name, *arguments)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed in {python}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


STEPS: dict[str, Callable[..., object]] = {
    "make": lambda rows, bases: make_all(Path(rows), Path(bases)),
    "read": lambda rows, merge: read_all(Path(rows), merge),
    "versions": lambda: {n: load(n).__version__ for n in ("transformers", "tokenizers", "torch")},
}


def merge_all(python: str, rows: Path, bases: Path) -> None:
    """Merge every checkpoint, with and without ``--compat 4``."""
    for row, (origin, _) in VARIANTS.items():
        (rows / row).mkdir()
        (rows / row / "reference").symlink_to(rows / origin / "reference")
    for folder in sorted(rows.iterdir()):
        origin, options = VARIANTS.get(folder.name, (folder.name, ()))
        source = fixture(origin) if origin in STORED else rows / origin / "source"
        own = [option.format(base=bases / origin) for option in options]
        for merge, more in MERGES.items():
            arguments = ("merge", source, folder / merge, "--quiet", *own, *more)
            done = run(python, "-m", "streammerge", *arguments)
            if done.returncode != 0:
                print(f"{folder.name}, {merge}: {done.stderr}", file=sys.stderr)


def measure(scratch: Path, pythons: Mapping[str, str]) -> Cells:
    """Write the checkpoints, merge them, open the results."""
    rows, bases = scratch / "rows", scratch / "bases"
    step(pythons[NEWEST], "make", rows, bases)
    step(pythons[LAST_4], "make", rows, bases)
    merge_all(pythons[NEWEST], rows, bases)
    return {
        (merge, row, version): problems
        for version, python in pythons.items()
        for merge in MERGES
        for row, problems in step(python, "read", rows, merge).items()
    }


def cell(problems: Problems) -> str:
    return "; ".join(words for words, _ in problems) or "right"


def table(cells: Cells, merge: str, versions: Sequence[str]) -> str:
    """Return the cells of one kind of merge as a Markdown table."""
    lines = [f"| `{merge}` | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    for row in (*MADE, *MADE_BY_4, *VARIANTS, *STORED):
        found = [cell(cells[merge, row, version]) for version in versions]
        lines.append(f"| {row} | {' | '.join(found)} |")
    return "\n".join(lines)


def surprises(cells: Cells) -> list[str]:
    """Say what is not as it has to be."""
    lines = []
    for (merge, row, version), problems in cells.items():
        if not is_known(merge, row, version, cell(problems)):
            lines.append(f"{row}, {merge}, {version}: {cell(problems)}")
            lines += [f"    {words}: {details}" for words, details in problems]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and results")
    parser.add_argument("--environments", type=Path, help="make environments here, or use them")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VERSION=PATH",
        help="the Python of an environment with that version; may be repeated",
    )
    parser.add_argument("--update", action="store_true", help=f"rewrite {KEPT.name}")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)  # within an environment
    args = parser.parse_args(argv)
    if args.step:
        name, *arguments = args.step
        print(json.dumps(STEPS[name](*arguments)))
        return 0

    given = dict(text.split("=", 1) for text in args.python)
    with tempfile.TemporaryDirectory(prefix="compatibility-", dir=args.scratch) as folder:
        scratch = Path(folder).resolve()
        environments = args.environments or scratch / "environments"
        found = {v: given.get(v) or environment(v, environments / v) for v in VERSIONS}
        pythons = {version: python for version, python in found.items() if python}
        packages = {version: step(python, "versions") for version, python in pythons.items()}
        for version in (LAST_4, NEWEST):
            if version not in pythons:
                parser.error(f"transformers {version} writes checkpoints, so it is needed")
        for version, used in packages.items():
            if used["transformers"] != version:
                parser.error(f"{pythons[version]} has transformers {used['transformers']}")
        cells = measure(scratch, pythons)

    tables = [table(cells, merge, list(pythons)) for merge in MERGES]
    lists = [
        [
            ", ".join(f"{name} {number}" for name, number in used.items())
            for used in packages.values()
        ],
        [f"{known.where}: {known.why}" for known in KNOWN],
    ]
    first, last = ("\n".join(f"- {line}" for line in lines) for lines in lists)
    text = "\n\n".join([first, *tables, last]) + "\n"
    print(text)
    wrong = surprises(cells)
    if args.update:
        kept, _, _ = KEPT.read_text().partition(RESULT_MARK)
        KEPT.write_text(f"{kept}{RESULT_MARK}\n{text}")
    elif len(pythons) == len(VERSIONS) and not all(t in KEPT.read_text() for t in tables):
        wrong.append(f"{KEPT.name} has other tables; --update rewrites them")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
