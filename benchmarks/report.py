"""What the benchmarks make of their figures: medians, Markdown tables, facts about the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
RESULTS = HERE / "results"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some figures."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def spread(figures: Iterable[float]) -> Spread:
    """Return the spread of at least one figure."""
    found = sorted(figures)
    return Spread(statistics.median(found), found[0], found[-1])


def ratios(mine: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the spread of the ratios of figures of the same round."""
    return spread(one / other for one, other in zip(mine, others, strict=True))


def rounds_text(rounds: int) -> str:
    """Return what stands in a cell of a table, for people."""
    return f"{rounds} rounds, median (range)" if rounds > 1 else "1 round"


def memory_text(nbytes: float) -> str:
    """Return bytes for people: MiB, or GiB from 10 GiB on with one decimal, below with two."""
    if nbytes < MIB:
        return "< 1 MiB"
    if nbytes < GIB:
        return f"{nbytes / MIB:.0f} MiB"
    return f"{nbytes / GIB:.{1 if nbytes >= 10 * GIB else 2}f} GiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fill_section(text: str, name: str, content: str) -> str:
    """Put content between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        ValueError: the text has no such section.
    """
    pattern = rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)"
    filled, count = re.subn(
        pattern, lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{count} sections named {name}")
    return filled


def keep(name: str, results: Any, content: str) -> None:
    """Keep results as JSON, and their text in the README's section of the same name."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    README.write_text(fill_section(README.read_text(), name, content))


class NotCompared(Exception):
    """Nothing is kept of `compare`, or by a version that did not measure what is needed now."""


def compared() -> dict[str, list[dict[str, Any]]]:
    """Return the outcomes that `compare` has kept, by config.

    Raises:
        NotCompared: there are none, or they do not say when results were on the disk.
    """
    path = RESULTS / "compare.json"
    if not path.exists():
        raise NotCompared("no results/compare.json: run compare.py --update first")
    configs: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["configs"]
    outcomes = [outcome for outcomes in configs.values() for outcome in outcomes]
    if not all("durable_seconds" in run for outcome in outcomes for run in outcome["warm"]):
        raise NotCompared(
            "results/compare.json does not say when results were on the disk: "
            "run compare.py --update again"
        )
    return configs


def machine_facts(work: Path, target: Path) -> dict[str, Any]:
    """Return what the figures depend on.

    Args:
        work: The folder that is read from.
        target: The folder that is written to.
    """
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "file_system": _file_system(work),
        "target_file_system": _file_system(target),
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(HERE), "describe", "--always", "--dirty").strip(),
    }


def _file_system(folder: Path) -> str:
    return _output("df", "--output=fstype", str(folder)).split()[-1]


def machine_text(facts: dict[str, Any]) -> str:
    """Return those facts in a line."""
    source, target = facts["file_system"], facts["target_file_system"]
    file_systems = source if source == target else f"from {source} to {target}"
    return (
        f"{facts['cores']} cores ({facts['processor']}), {memory_text(facts['memory'])}, "
        f"Linux {facts['kernel']}, {file_systems}, Python {facts['python']}"
    )


def package_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that an interpreter has."""
    code = (
        "import json, sys\n"
        "from importlib.metadata import version, PackageNotFoundError\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    found: dict[str, str] = json.loads(_output(python, "-I", "-c", code, *packages))
    return found


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout or "unknown"
