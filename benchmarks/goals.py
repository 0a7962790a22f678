"""Measure every figure that streammerge has a goal for.

    python benchmarks/goals.py [SECTION ...] [--work DIR] [--rounds 5] [--update] [--quick]

Whole processes; ratios are taken within a round, and their median counts. Memory is the sum of
``VmHWM`` over all processes of a run. Exits 1 if a goal is missed. ``peers`` takes its figures from
results/compare.json; if that is not there or an older one, its rows stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import Command, copy_command, merge_command
from process_trees import CommandFailed, Contender, Usage, measure_rounds, run_well
from report import (
    MIB,
    RESULTS,
    NotCompared,
    compared,
    keep,
    machine_facts,
    machine_text,
    memory_text,
    ratios,
    rounds_text,
    spread,
    table,
)
from workspace import Workspace, announce, parse_options, say

NAME = "goals"
STARTS = 9  # rounds of what takes a fraction of a second
PEERS_WITH_A_GOAL = ("verl", "accelerate", "torch dcp_to_torch_save")
BUFFER = 16 * MIB  # streammerge's default for --memory

AS_COMPARED = ("--dtype", "bfloat16", "--format", "rank-files")  # as in `compare`

READ_ALL_WRITE_HALF = """
import os, pathlib, sys
buffer = memoryview(bytearray(1 << 20))
os.mkdir(sys.argv[2])
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pt")):
    target = os.path.join(sys.argv[2], path.name)
    with path.open("rb", buffering=0) as source, open(target, "wb", buffering=0) as copy:
        while count := source.readinto(buffer):
            copy.write(buffer[: count // 2])
        os.fsync(copy.fileno())
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and its goal.

    Attributes:
        figure: what was measured.
        goal: for people.
        measured: for people.
        met: whether the goal is met.
    """

    figure: str
    goal: str
    measured: str
    met: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the checkpoints are that are measured."""

    copied: str
    cast: str
    largest: tuple[str, str]
    chunks: tuple[tuple[str, int, int], ...]
    plan_dense: tuple[str, int, int]
    plan_experts: tuple[str, int]


FULL = Scale(
    copied="qwen2.5-1.5b",
    cast="8GB",
    largest=("4GB", "2GB"),
    chunks=(("1GB", 100, 1000), ("1GB", 200, 1000)),
    plan_dense=("1.3TB", 512, 1000),
    plan_experts=("moe-256-thin", 64),
)
QUICK = Scale(
    copied="300MB",
    cast="600MB",
    largest=("400MB", "200MB"),
    chunks=(("100MB", 20, 500),),
    plan_dense=("20GB", 16, 1000),
    plan_experts=("moe-256-tiny", 16),
)


class Goals:
    """The sections of the table; each measures and returns its rows."""

    def __init__(self, workspace: Workspace, rounds: int, scale: Scale) -> None:
        self._workspace = workspace
        self._rounds = rounds
        self._scale = scale

    def copying(self) -> list[Row]:
        """Keep bfloat16: against `cp`, and other layouts against Shard(0)."""
        sources = {
            layout: self._workspace.make(self._scale.copied, 8, "--layout", layout)
            for layout in ("shard1", "tp")
        }
        even = self._workspace.make(self._scale.copied, 8, *AS_COMPARED)
        runs = self._measure(
            self._contender("cp", copy_command(even, self._target), even),
            self._merge("1 worker", even, "--workers", "1"),
            self._merge("2 workers", even, "--workers", "2"),
            self._merge("shard1", sources["shard1"], "--workers", "2"),
            self._merge("tp", sources["tp"], "--workers", "2"),
        )
        what = f"{self._scale.copied}, bfloat16 kept"
        rows = [
            time_row(f"{what}, {name}, against `cp && sync`", runs[name], runs["cp"], limit)
            for name, limit in (("1 worker", 1.1), ("2 workers", 0.8))
        ]
        for layout, name in (("shard1", "`Shard(1)`"), ("tp", "TP+FSDP")):
            figure = f"{name} against `Shard(0)`, 2 workers"
            rows.append(time_row(figure, runs[layout], runs["2 workers"], 1.5))
        merges = [usage for name, taken in runs.items() if name != "cp" for usage in taken]
        rows.append(memory_row(f"peak memory of these, {what}", merges, memory_limit()))
        return rows

    def checking(self) -> list[Row]:
        """Check CRC-32 before, and the result after: what that costs. It has no goal."""
        source = self._workspace.make(self._scale.copied, 8, *AS_COMPARED)
        options = ("--check-crc", "--verify")
        runs = self._measure(
            self._merge("plain", source),
            *(self._merge(option, source, option) for option in options),
        )
        return [
            cost_row(
                f"`merge {option}` against `merge`, {self._scale.copied}", taken, runs["plain"]
            )
            for option, taken in runs.items()
            if option in options
        ]

    def casting(self) -> list[Row]:
        """Cast float32 to bfloat16: against a copy of half the bytes, and torch's import."""
        source = self._workspace.make(self._scale.cast, 8, "--dtype", "float32")
        half: Command = (sys.executable, "-c", READ_ALL_WRITE_HALF, source, self._target)
        runs = self._measure(
            self._contender("half", half, source),
            self._merge("cast", source, "--dtype", "bfloat16"),
            Contender("import torch", (sys.executable, "-c", "import torch"), None),
        )
        what = f"{self._scale.cast} of float32 to bfloat16"
        figure = f"{what}, against reading all, writing half, sync"
        over = memory_row(
            f"peak memory of it over `import torch`, --memory {memory_text(BUFFER)}",
            runs["cast"],
            32 * MIB + BUFFER,
            less=min(usage.peak for usage in runs["import torch"]),
        )
        return [time_row(figure, runs["cast"], runs["half"], 1.3), over]

    def memory(self) -> list[Row]:
        """Merge a tensor of half the model, and models of many chunks."""
        size, largest = self._scale.largest
        one = self._workspace.make(size, 8, "--largest", largest, "--sparse")
        cases = [(f"a tensor of {largest}", one, memory_limit())]
        for size, world_size, tensors in self._scale.chunks:
            many = self._workspace.make(size, world_size, "--tensors", str(tensors), "--sparse")
            name = f"{world_size} ranks of {tensors:,} tensors"
            cases.append((name, many, memory_limit(world_size * tensors)))
        rows = []
        for figure, source, limit in cases:
            runs = self._measure(self._merge(figure, source), rounds=1)
            rows.append(memory_row(f"peak memory, {figure}", runs[figure], limit))
        return rows

    def starting(self) -> list[Row]:
        """Start and inspect: what a person waits for."""
        source = self._workspace.make("2MB", 4)
        runs = self._measure(
            Contender("--help", python("-m", "streammerge", "--help"), None),
            Contender("inspect", python("-m", "streammerge", "inspect", source), None, (source,)),
            rounds=STARTS,
        )
        return [seconds_row(f"`{name}`", taken, 0.25) for name, taken in runs.items()]

    def planning(self) -> list[Row]:
        """Plan for many ranks."""
        size, world_size, tensors = self._scale.plan_dense
        dense = self._workspace.make(size, world_size, "--tensors", str(tensors), "--sparse")
        name = f"plan of {world_size} ranks of {tensors:,} tensors, {size}"
        return self._plan(name, dense, 30, 300 * MIB)

    def experts(self) -> list[Row]:
        """Plan for many tensors."""
        size, world_size = self._scale.plan_experts
        source = self._workspace.make(size, world_size, "--sparse")
        return self._plan(f"plan of {world_size} ranks, {size}", source, 120, 500 * MIB)

    def peers(self) -> list[Row]:
        """Take what `compare` has measured; nothing if it has not."""
        try:
            configs = compared()
        except NotCompared as error:
            say(f"peers: {error}")
            return []
        rows = []
        for config, outcomes in configs.items():
            ours = next(outcome for outcome in outcomes if outcome["name"] == "streammerge")
            for outcome in outcomes:
                if outcome["warm"] and outcome["name"].startswith(PEERS_WITH_A_GOAL):
                    rows += peer_rows(config, outcome, ours)
        return rows

    # --- how ---

    @property
    def _target(self) -> Path:
        return self._workspace.target

    def _contender(self, name: str, command: Command, source: Path) -> Contender:
        return Contender(name, command, self._target, (source,))

    def _merge(self, name: str, source: Path, *options: str) -> Contender:
        command = python(*merge_command(source, self._target, *options))
        return self._contender(name, command, source)

    def _measure(self, *contenders: Contender, rounds: int = 0) -> dict[str, list[Usage]]:
        measure_rounds(contenders[:2], 1, on_run=announce("untimed"))  # compiles bytecode
        return measure_rounds(contenders, rounds or self._rounds, on_run=announce("timed"))

    def _plan(self, figure: str, source: Path, seconds: float, memory: int) -> list[Row]:
        say(figure)
        command = python(*merge_command(source, self._target, "--dry-run"))
        taken = [run_well(command)]
        return [
            seconds_row(figure, taken, seconds),
            memory_row(f"peak memory of it, {len(taken[0].peaks)} processes", taken, memory),
        ]


SECTIONS: dict[str, Callable[[Goals], list[Row]]] = {
    section.__name__: section
    for section in (
        *(Goals.copying, Goals.checking, Goals.casting, Goals.peers),
        *(Goals.memory, Goals.starting, Goals.planning, Goals.experts),
    )
}


def python(*arguments: str | Path) -> Command:
    """Return the command that runs our own interpreter."""
    return sys.executable, *arguments


# --- rows ---


def memory_limit(chunks: int = 0) -> int:
    """Return the most memory that a merge without arithmetic may take."""
    return 48 * MIB + 64 * max(0, chunks - 100_000)


def time_row(figure: str, mine: Sequence[Usage], others: Sequence[Usage], limit: float) -> Row:
    """Return a ratio of seconds and the most that it may be."""
    found = ratios([usage.seconds for usage in mine], [usage.seconds for usage in others])
    return Row(figure, f"≤ {limit}", str(found), found.median <= limit)


def cost_row(figure: str, mine: Sequence[Usage], others: Sequence[Usage]) -> Row:
    """Return a ratio of seconds that has no goal."""
    found = ratios([usage.seconds for usage in mine], [usage.seconds for usage in others])
    return Row(figure, "none", str(found), True)


def seconds_row(figure: str, taken: Sequence[Usage], limit: float) -> Row:
    """Return seconds and the most that they may be."""
    found = spread(usage.seconds for usage in taken)
    text = str(found) if len(taken) > 1 else f"{found.median:.1f}"
    return Row(figure, f"≤ {limit:g} s", f"{text} s", found.median <= limit)


def memory_row(figure: str, taken: Sequence[Usage], limit: int, less: int = 0) -> Row:
    """Return the peak memory of all runs, less what is not counted, and the most it may be."""
    peak = max(usage.peak for usage in taken) - less
    return Row(figure, f"≤ {memory_text(limit)}", memory_text(peak), peak <= limit)


def peer_rows(config: str, peer: dict[str, Any], ours: dict[str, Any]) -> list[Row]:
    """Return how much longer and larger a peer is than we are, as `compare` keeps both.

    The goal is for the time until the result is on the disk, like for like; what the peer takes
    when nobody waits for its data is a row without a goal.
    """
    durable, ended = (
        ratios(*([run[figure] for run in side["warm"]] for side in (peer, ours)))
        for figure in ("durable_seconds", "seconds")
    )
    larger = max(r["peak"] for r in peer["warm"]) / max(r["peak"] for r in ours["warm"])
    name = f"{peer['name']}, {config}"
    return [
        Row(
            f"time of {name}, until on the disk, against ours",
            *("≥ 8", str(durable), durable.median >= 8),
        ),
        Row(f"time of {name}, not waiting for its data, against ours", "none", str(ended), True),
        Row(f"peak memory of {name}, against ours", "≥ 50", f"{larger:.1f}", larger >= 50),
    ]


def verdict(row: Row) -> str:
    """Return whether the goal is met, if there is one."""
    if row.goal == "none":
        return ""
    return "met" if row.met else "missed"


def render(sections: Mapping[str, Sequence[Row]]) -> str:
    """Return the rows of all sections as a Markdown table."""
    rows = [row for name in SECTIONS for row in sections.get(name, ())]
    return table(
        ["figure", "goal", "measured", ""],
        ([row.figure, row.goal, row.measured, verdict(row)] for row in rows),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    args = parse_options(parser, argv, SECTIONS)
    workspace = Workspace(args.work, args.target_dir)
    goals = Goals(workspace, args.rounds, QUICK if args.quick else FULL)
    facts = machine_facts(workspace.folder, workspace.target.parent)
    sections = {name: SECTIONS[name](goals) for name in args.names or SECTIONS}
    measured = {name: rows for name, rows in sections.items() if rows}
    print(render(measured))
    if args.update and measured:
        kept = kept_rows() | measured
        results = {name: [asdict(row) for row in rows] for name, rows in kept.items()}
        text = f"{machine_text(facts)}; {rounds_text(args.rounds)}.\n\n{render(kept)}"
        keep(NAME, {"machine": facts, "sections": results}, text)
    return 0 if all(row.met for rows in measured.values() for row in rows) else 1


def kept_rows() -> dict[str, list[Row]]:
    """Return the rows that were kept before, by section."""
    try:
        kept = json.loads((RESULTS / f"{NAME}.json").read_text())["sections"]
    except FileNotFoundError:
        return {}
    return {name: [Row(**row) for row in rows] for name, rows in kept.items()}


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except CommandFailed as error:
        raise SystemExit(str(error)) from None
