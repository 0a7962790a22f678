"""Draws what `compare` has measured. Needs matplotlib.

    python benchmarks/pictures.py [CONFIG]

draws a config of results/compare.json again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import HERE, MIB, RESULTS

OURS = "streammerge"
OURS_COLOR, OURS_LIGHTER = "#d55e00", "#f2a57b"
# Okabe and Ito's colours, which people tell apart who do not see all of them.
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
STYLE: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "streammerge",  # the same figures give the same file
}


def draw(outcomes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw ``memory.svg`` and ``peers.svg``.

    Args:
        outcomes: of one config, as `compare` keeps them.
        folder: where to put the pictures.
    """
    measured = [outcome for outcome in outcomes if outcome.get("warm")]
    names = [outcome["name"] for outcome in measured]
    others = itertools.cycle(COLORS)
    colors = {n: OURS_LIGHTER if n.startswith(OURS) else next(others) for n in names}
    colors[OURS] = OURS_COLOR
    with mpl.rc_context(STYLE):
        draw_memory(measured, colors, folder / "memory.svg")
        draw_peers(measured, colors, folder / "peers.svg")


def draw_memory(outcomes: Sequence[dict[str, Any]], colors: dict[str, str], path: Path) -> None:
    """Draw resident memory over time: all of it as a line, the file-backed part dashed."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for outcome in outcomes:
        times, anonymous, file_backed = zip(*outcome["curve"], strict=True)
        resident = [a + f for a, f in zip(anonymous, file_backed, strict=True)]
        color, name = colors[outcome["name"]], outcome["name"]
        width = 2.4 if name == OURS else 1.4
        axes.plot(times, in_mib(resident), color=color, label=name, linewidth=width)
        axes.plot(times, in_mib(file_backed), color=color, linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory, MiB (dotted: file-backed)")
    figure.legend(loc="outside right upper")
    save(figure, path)


def draw_peers(outcomes: Sequence[dict[str, Any]], colors: dict[str, str], path: Path) -> None:
    """Draw time and peak memory of each peer as bars."""
    figure = Figure(figsize=(8, 0.45 * len(outcomes) + 0.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [outcome["name"] for outcome in outcomes]
    shades = [colors[name] for name in names]
    seconds = [statistics.median(run["seconds"] for run in o["warm"]) for o in outcomes]
    peaks = in_mib([max(run["peak"] for run in o["warm"]) for o in outcomes])
    draw_bars(left, names, seconds, shades, "seconds", "{:.1f}")
    draw_bars(right, names, peaks, shades, "peak resident memory, MiB (log)", "{:,.0f}")
    right.set_xscale("log")
    right.set_xlim(left=1)
    left.invert_yaxis()
    save(figure, path)


def draw_bars(
    axes: Axes,
    names: Sequence[str],
    figures: Sequence[float],
    colors: Sequence[str],
    title: str,
    form: str,
) -> None:
    """Draw one row of bars, each with its figure."""
    bars = axes.barh(names, figures, color=colors)
    axes.bar_label(bars, [form.format(figure) for figure in figures], padding=3)
    axes.set_title(title, fontsize=9)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.2)


def in_mib(figures: Sequence[int]) -> list[float]:
    """Return bytes in MiB."""
    return [figure / MIB for figure in figures]


def save(figure: Figure, path: Path) -> None:
    """Write a picture that has no date in it."""
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def main(argv: list[str]) -> int:
    configs = json.loads((RESULTS / "compare.json").read_text())["configs"]
    draw(configs[argv[0]] if argv else next(iter(configs.values())), HERE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
