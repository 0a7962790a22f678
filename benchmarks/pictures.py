"""Draws what `compare` has measured. Needs matplotlib.

    python benchmarks/pictures.py [CONFIG]

draws a config of results/compare.json again.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import HERE, MIB, NotCompared, compared

OURS = "streammerge"
OURS_COLOR, OURS_LIGHTER = "#d55e00", "#f2a57b"
PALE = 0.4
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


def draw(config: str, outcomes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw ``memory.svg`` and ``peers.svg``.

    Args:
        config: the name of what was merged.
        outcomes: of that config, as `compare` keeps them.
        folder: where to put the pictures.
    """
    measured = [outcome for outcome in outcomes if outcome.get("warm")]
    names = [outcome["name"] for outcome in measured]
    others = itertools.cycle(COLORS)
    colors = {n: OURS_LIGHTER if n.startswith(OURS) else next(others) for n in names}
    colors[OURS] = OURS_COLOR
    with mpl.rc_context(STYLE):
        for name, draw_all in (("memory.svg", draw_memory), ("peers.svg", draw_peers)):
            figure = draw_all(measured, colors)
            figure.suptitle(f"{config}, source in the page cache", fontsize=9)
            # The same figures give the same file, whatever the day.
            figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")


def draw_memory(outcomes: Sequence[dict[str, Any]], colors: dict[str, str]) -> Figure:
    """Draw resident memory over time: all of it as a line, the file-backed part dotted."""
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
    axes.set_xlabel("seconds, until the processes end")
    axes.set_ylabel("resident memory, MiB (dotted: file-backed)")
    figure.legend(loc="outside right upper")
    return figure


def draw_peers(outcomes: Sequence[dict[str, Any]], colors: dict[str, str]) -> Figure:
    """Draw time and peak memory of each peer as bars; the wait for the disk is pale."""
    figure = Figure(figsize=(8, 0.45 * len(outcomes) + 0.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [outcome["name"] for outcome in outcomes]
    shades = [colors[name] for name in names]
    ended, durable = (
        [statistics.median(run[kind] for run in o["warm"]) for o in outcomes]
        for kind in ("seconds", "durable_seconds")
    )
    peaks = in_mib([max(run["peak"] for run in o["warm"]) for o in outcomes])
    draw_bars(left, names, durable, PALE, shades, "{:.1f}")
    left.barh(names, ended, color=shades)
    left.set_title("seconds (pale: until the result is on the disk)", fontsize=9)
    draw_bars(right, names, peaks, 1, shades, "{:,.0f}")
    right.set_title("peak resident memory, MiB (log)", fontsize=9)
    right.set_xscale("log")
    right.set_xlim(left=1)
    left.invert_yaxis()
    return figure


def draw_bars(
    axes: Axes,
    names: Sequence[str],
    figures: Sequence[float],
    alpha: float,
    colors: Sequence[str],
    form: str,
) -> None:
    """Draw one row of bars, each with its figure."""
    bars = axes.barh(names, figures, color=colors, alpha=alpha)
    axes.bar_label(bars, [form.format(figure) for figure in figures], padding=3)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.2)


def in_mib(figures: Sequence[int]) -> list[float]:
    """Return bytes in MiB."""
    return [figure / MIB for figure in figures]


def main(argv: list[str]) -> int:
    try:
        configs = compared()
    except NotCompared as error:
        raise SystemExit(str(error)) from None
    name = argv[0] if argv else next(iter(configs))
    if name not in configs:
        raise SystemExit(f"{name} is none of {', '.join(configs)}")
    draw(name, configs[name], HERE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
