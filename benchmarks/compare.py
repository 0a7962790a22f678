"""Compare streammerge with every other merger: time, memory, bytes, and whether values are right.

    python benchmarks/compare.py [CONFIG ...] [--work DIR] [--rounds 5] [--update] [--quick]

Whole processes, interleaved, first with the source in the page cache, then without. Two times are
taken of each: until the process ends, and until what it wrote is on the disk, for which streammerge
and ``cp && sync`` wait and the others do not. Each merger runs once before, untimed, and what it
wrote is compared with the weights that were made up for its source. After that the smallest
RLIMIT_DATA under which it still works is looked for. Prints Markdown tables; ``--update`` keeps
them in README.md, the figures in results/compare.json, and draws memory.svg and peers.svg.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import CP, PEERS, STREAMMERGE, Peer, full_command
from process_trees import (
    CommandFailed,
    Contender,
    Sample,
    Usage,
    emptied,
    measure_rounds,
    read_once,
    run,
)
from report import (
    HERE,
    MIB,
    Spread,
    keep,
    machine_facts,
    machine_text,
    memory_text,
    package_versions,
    ratios,
    rounds_text,
    spread,
    table,
)
from workspace import Workspace, announce, parse_options, say

NAME = "compare"
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "deepspeed")
CAP_PRECISION = 1.2
MAX_CAP = 1 << 40
CURVE_POINTS = 120
TIME_COLUMNS = (
    *("", "reads", "ends after, s", "on the disk after, s", "times as long as ours"),
    *("not cached: on the disk after, s", "CPU s", "GB read / written", "values"),
)
MEMORY_COLUMNS = ("", "peak memory", "times ours", "anonymous + file", "least RLIMIT_DATA")


@dataclass(frozen=True, slots=True)
class Config:
    """What is merged.

    Attributes:
        size, dtype, world_size: of the model, see `make_checkpoint`.
        forms: those who read these formats take part; ``cp`` and streammerge always do.
    """

    size: str
    dtype: str
    forms: tuple[str, ...]
    world_size: int = 8


CONFIGS = {
    "qwen2.5-1.5b": Config("qwen2.5-1.5b", "bfloat16", ("rank-files", "dcp", "safetensors")),
    "qwen2.5-0.5b-fp32": Config("qwen2.5-0.5b", "float32", ("zero",)),
    "qwen2.5-7b": Config("qwen2.5-7b", "bfloat16", ("rank-files", "dcp", "safetensors")),
    "small": Config("300MB", "bfloat16", ("rank-files", "dcp", "safetensors")),
    "small-fp32": Config("300MB", "float32", ("zero",)),
}
DEFAULT = ("qwen2.5-1.5b", "qwen2.5-0.5b-fp32")
QUICK = ("small", "small-fp32")


@dataclass(slots=True)
class Outcome:
    """What was found about a peer.

    Attributes:
        peer: which.
        verdict: ``equal``, how its values differ, or why it did not run.
        warm, cold: the runs with and without the source in the page cache, one a round.
        cap: the smallest ``RLIMIT_DATA`` under which it works.
    """

    peer: Peer
    verdict: str
    warm: Sequence[Usage] = ()
    cold: Sequence[Usage] = ()
    cap: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with the memory over time of the median run."""
        made: dict[str, Any] = {
            "name": self.peer.name,
            "reads": self.peer.form,
            "note": self.peer.note,
            "verdict": self.verdict,
            "smallest_cap": self.cap,
        }
        for cache, usages in (("warm", self.warm), ("cold", self.cold)):
            made[cache] = [usage_json(usage) for usage in usages]
        if self.warm:
            middle = sorted(self.warm, key=lambda usage: usage.seconds)[len(self.warm) // 2]
            made["curve"] = [
                (round(s.seconds, 2), s.anonymous, s.file_backed) for s in thinned(middle.samples)
            ]
        return made


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most `CURVE_POINTS` samples: of neighbours, the one with the most memory."""
    step = -(-len(samples) // CURVE_POINTS) or 1
    return [
        max(samples[start : start + step], key=lambda sample: sample.resident)
        for start in range(0, len(samples), step)
    ]


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the figures of a run as a JSON object."""
    highest = usage.highest
    return {
        "seconds": round(usage.seconds, 3),
        "durable_seconds": round(usage.durable_seconds, 3),
        "cpu": round(usage.cpu, 3),
        "peak": usage.peak,
        "anonymous": highest.anonymous,
        "file_backed": highest.file_backed,
        "read": usage.moved.read,
        "written": usage.moved.written,
        "from_disk": usage.moved.from_disk,
        "to_disk": usage.moved.to_disk,
    }


# --- measuring ---


def prepare(workspace: Workspace, config: Config) -> dict[str, Path]:
    """Make the sources of a config that are not there yet, and return them by format."""
    return {
        form: workspace.make(
            *(config.size, config.world_size, "--dtype", config.dtype, "--format", form)
        )
        for form in dict.fromkeys((STREAMMERGE.form, *config.forms))
    }


class Comparison:
    """One config and all mergers that can read it.

    Attributes:
        target: where they write, one after the other.
        sources: by format.
    """

    def __init__(
        self, target: Path, sources: Mapping[str, Path], pythons: Mapping[str, str]
    ) -> None:
        self.target = target
        self.sources = sources
        self._pythons = pythons

    def contender(self, peer: Peer) -> Contender:
        """Return how a peer is run."""
        source = self.sources[peer.form]
        python = self._pythons.get(peer.package, sys.executable)
        return Contender(
            peer.name,
            full_command(peer, source, self.target, python),
            self.target,
            (source,),
            {"TQDM_DISABLE": "1"},
        )

    def try_out(self, peer: Peer) -> tuple[str, int | None]:
        """Run a peer once.

        Returns:
            A verdict on what it wrote, and its highest anonymous memory; None if it failed.

        Raises:
            CommandFailed: it is our own merge of rank files that did.
        """
        contender = self.contender(peer)
        with emptied(self.target):
            read_once(self.sources[peer.form])
            usage = run(contender.command, environment=contender.environment)
            if usage.code:
                said = usage.errors[-1] if usage.errors else str(usage.code)
                if peer is STREAMMERGE:
                    raise CommandFailed(said)
                return f"fails: {said.replace(f'{self.sources[peer.form]}', 'SRC')}", None
            anonymous = usage.highest.anonymous
            if peer is CP:
                return "a copy of the shards", anonymous
            return self._check(peer), anonymous

    def _check(self, peer: Peer) -> str:
        done = subprocess.run(
            [sys.executable, HERE / "check_result.py", self.sources[peer.form], self.target],
            capture_output=True,
            text=True,
            check=False,
        )
        return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]

    def smallest_cap(self, peer: Peer, start: int) -> int:
        """Return the smallest ``RLIMIT_DATA`` under which a peer still works."""
        contender = self.contender(peer)

        def works(cap: int) -> bool:
            with emptied(self.target):
                read_once(self.sources[peer.form])
                usage = run(contender.command, environment=contender.environment, data_limit=cap)
                return usage.code == 0 and self.target.is_dir()

        return smallest(works, start)


def smallest(works: Callable[[int], bool], start: int) -> int:
    """Return about the smallest number that works, by bisection.

    Args:
        works: Whether a number works; if one does, all that are greater do.
        start: Where to begin, best near the answer.

    Returns:
        A number that works; one that is smaller by more than a fifth does not.

    Raises:
        ValueError: nothing works.
    """
    high = start
    while not works(high):
        high *= 2
        if high > MAX_CAP:
            raise ValueError("nothing works")
    low = high // 2
    if high == start:
        while low and works(low):
            high, low = low, low // 2
    while high > low * CAP_PRECISION:
        middle = int((high * max(low, 1)) ** 0.5)
        if not low < middle < high:
            break
        if works(middle):
            high = middle
        else:
            low = middle
    return high


def compare(
    workspace: Workspace, config: Config, rounds: int, pythons: Mapping[str, str], *, caps: bool
) -> list[Outcome]:
    """Measure all mergers that can read a config."""
    comparison = Comparison(workspace.target, prepare(workspace, config), pythons)
    outcomes: list[Outcome] = []
    peaks: dict[str, int] = {}
    for peer in PEERS:
        if peer.form not in config.forms and peer not in (CP, STREAMMERGE):
            continue
        python = pythons.get(peer.package, sys.executable)
        if peer.package not in ("", "streammerge") and not package_versions(python, [peer.package]):
            outcomes.append(Outcome(peer, f"not run: {peer.package} is not installed"))
            continue
        say(f"trying {peer.name}")
        verdict, peak = comparison.try_out(peer)
        outcomes.append(Outcome(peer, verdict))
        if peak is not None:
            peaks[peer.name] = peak
    running = [outcome for outcome in outcomes if outcome.peer.name in peaks]
    contenders = [comparison.contender(outcome.peer) for outcome in running]
    for cold in (False, True):
        runs = measure_rounds(
            contenders,
            rounds,
            cold=cold,
            on_run=announce("cold" if cold else "warm"),
        )
        for outcome in running:
            if cold:
                outcome.cold = runs[outcome.peer.name]
            else:
                outcome.warm = runs[outcome.peer.name]
    for outcome in running if caps else []:
        say(f"looking for the smallest limit of {outcome.peer.name}")
        start = max(peaks[outcome.peer.name], MIB)
        outcome.cap = comparison.smallest_cap(outcome.peer, start)
    return outcomes


# --- what comes out ---


def render(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table of time and one of memory, with a line for each note."""
    ours = next(o for o in outcomes if o.peer is STREAMMERGE)
    ran = [outcome for outcome in outcomes if outcome.warm]
    notes = [f"- {o.peer.name}: {o.peer.note}." for o in outcomes if o.peer.note]
    return "\n".join(
        [
            table(TIME_COLUMNS, (_time_cells(outcome, ours) for outcome in outcomes)),
            "",
            table(MEMORY_COLUMNS, (_memory_cells(outcome, ours) for outcome in ran)),
            "",
            *notes,
        ]
    ).rstrip()


def _time_cells(outcome: Outcome, ours: Outcome) -> list[str]:
    peer, runs = outcome.peer, outcome.warm
    if not runs:
        return [peer.name, peer.form, *[""] * (len(TIME_COLUMNS) - 3), outcome.verdict]
    moved = runs[0].moved
    return [
        peer.name,
        peer.form,
        str(spread(usage.seconds for usage in runs)),
        str(spread(usage.durable_seconds for usage in runs)),
        f"{time_ratio(outcome, ours).median:.1f}",
        str(spread(usage.durable_seconds for usage in outcome.cold)),
        f"{spread(usage.cpu for usage in runs).median:.1f}",
        f"{moved.read / 1e9:.1f} / {moved.written / 1e9:.1f}",
        outcome.verdict,
    ]


def _memory_cells(outcome: Outcome, ours: Outcome) -> list[str]:
    highest = max(outcome.warm, key=lambda usage: usage.peak)
    return [
        outcome.peer.name,
        memory_text(highest.peak),
        f"{memory_ratio(outcome, ours):.1f}",
        f"{memory_text(highest.highest.anonymous)} + {memory_text(highest.highest.file_backed)}",
        memory_text(outcome.cap) if outcome.cap else "",
    ]


def time_ratio(outcome: Outcome, ours: Outcome) -> Spread:
    """Return the seconds until a peer's result is on the disk, over ours of the same round."""
    theirs = [usage.durable_seconds for usage in outcome.warm]
    return ratios(theirs, [usage.durable_seconds for usage in ours.warm])


def memory_ratio(outcome: Outcome, ours: Outcome) -> float:
    """Return the peak memory of a peer over ours."""
    return max(u.peak for u in outcome.warm) / max(u.peak for u in ours.warm)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-caps", dest="caps", action="store_false", help="no RLIMIT_DATA")
    parser.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        metavar="PATH",
        help="an interpreter that has deepspeed, whose import slows others of its environment",
    )
    args = parse_options(parser, argv, CONFIGS)
    args.names = args.names or (QUICK if args.quick else DEFAULT)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    workspace = Workspace(args.work, args.target_dir)
    pythons = {"deepspeed": args.deepspeed_python}
    facts = machine_facts(workspace.folder, workspace.target.parent)
    facts["packages"] = package_versions(args.deepspeed_python, ["deepspeed"]) | package_versions(
        sys.executable, [name for name in PACKAGES if name != "deepspeed"]
    )
    results: dict[str, Any] = {"machine": facts, "rounds": args.rounds, "configs": {}}
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    parts = [f"{machine_text(facts)}; {packages}; {rounds_text(args.rounds)}."]
    for name in args.names:
        config = CONFIGS[name]
        outcomes = compare(workspace, config, args.rounds, pythons, caps=args.caps)
        results["configs"][name] = [outcome.to_json() for outcome in outcomes]
        parts.append(f"{name}, {config.dtype}, {config.world_size} ranks:\n\n{render(outcomes)}")
    content = "\n\n".join(parts)
    print(content)
    if args.update:
        from pictures import draw

        keep(NAME, results, content)
        draw(args.names[0], results["configs"][args.names[0]], HERE)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except CommandFailed as error:
        raise SystemExit(str(error)) from None
