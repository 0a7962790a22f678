"""Compare a merge with ``cp`` of the same rank files: whole processes, interleaved.

    python benchmarks/copy_speed.py [--scratch DIR] [--rounds 5] [--size qwen2.5-1.5b]

Each round runs every contender once, in an order that rotates, into a target that does not exist
yet. Between runs the target is deleted and the deletion synced, so that each starts alike. The
source is in the page cache. Both sides end on the disk: a merge fsyncs its files, and so does
``sync``. Ratios are taken within a round, as the speed of a disk drifts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYOUTS = ("shard0", "shard1", "tp", "hsdp")

# ru_maxrss of a new process starts with the peak of the process that forked it. This starter is
# small, so that the peak it reports is that of the command or, at least, its own few MB.
STARTER = """
import os, sys, time
begin = time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - begin
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024,
      usage.ru_utime + usage.ru_stime, file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one process took: seconds, peak RSS in bytes, CPU seconds."""

    seconds: float
    peak: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Goal:
    """The ratio to ``cp`` that a contender must reach."""

    limit: float
    inclusive: bool

    def met(self, ratio: float) -> bool:
        return ratio <= self.limit if self.inclusive else ratio < self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.inclusive else 'below'} {self.limit}"


CP = "cp + sync"
GOALS = {
    "merge, 1 worker": Goal(1.2, inclusive=True),
    "merge, 2 workers": Goal(1.0, inclusive=False),
}


def commands(source: Path, target: Path) -> dict[str, list[str]]:
    """Return the command line of each contender."""
    merge = [sys.executable, "-m", "streammerge", "merge", str(source), str(target), "--quiet"]
    src, dst = shlex.quote(str(source)), shlex.quote(str(target))
    copy = f"mkdir {dst} && cp {src}/*.pt {dst} && sync {dst}/*"
    return {
        CP: ["sh", "-c", copy],
        "merge, 1 worker": [*merge, "--workers", "1"],
        "merge, 2 workers": [*merge, "--workers", "2"],
    }


def run(command: list[str]) -> Run:
    """Run a command to its end; raise if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    starter = [sys.executable, "-I", "-S", "-c", STARTER, *command]
    done = subprocess.run(
        starter,
        check=False,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    *messages, figures = done.stderr.splitlines() or [""]
    code, seconds, peak, cpu = figures.split()
    if code != "0":
        raise RuntimeError(f"{shlex.join(command)} exited with {code}: " + "\n".join(messages))
    return Run(float(seconds), int(peak), float(cpu))


def remove(target: Path) -> None:
    """Delete a target and wait until the disk is idle again."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()


def read_once(source: Path) -> int:
    """Bring the rank files into the page cache and return their bytes."""
    total = 0
    for path in sorted(source.glob("*.pt")):
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 20):
                total += len(block)
    return total


def measure(source: Path, target: Path, rounds: int) -> dict[str, list[Run]]:
    """Return the runs of each contender, one a round."""
    contenders = commands(source, target)
    names = list(contenders)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    remove(target)
    for command in contenders.values():  # untimed: compiles bytecode, warms the page cache
        run(command)
        remove(target)
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        # Every other round backwards, so that no contender always follows the same one.
        for name in order if number % 2 == 0 else reversed(order):
            runs[name].append(run(contenders[name]))
            remove(target)
    return runs


def ratios(runs: dict[str, list[Run]], name: str) -> list[float]:
    """Return seconds of a contender over those of ``cp`` in the same round."""
    return [mine.seconds / cp.seconds for mine, cp in zip(runs[name], runs[CP], strict=True)]


def table(runs: dict[str, list[Run]], total: int) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| | median s | min | max | GB/s | ratio to cp (median) | ratios | CPU s | peak RSS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, taken in runs.items():
        seconds = [one.seconds for one in taken]
        median = statistics.median(seconds)
        each = ratios(runs, name)
        spread = "" if name == CP else f"{min(each):.2f} to {max(each):.2f}"
        cpu = statistics.median(one.cpu for one in taken)
        peak = max(one.peak for one in taken) / 2**20
        lines.append(
            f"| {name} | {median:.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
            f"| {total / median / 1e9:.2f} | {statistics.median(each):.2f} | {spread} "
            f"| {cpu:.2f} | {peak:.0f} MiB |"
        )
    return "\n".join(lines)


def machine(scratch: Path) -> str:
    """Return one line about the machine and the disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    found = subprocess.run(
        ["df", "--output=fstype", str(scratch)], capture_output=True, text=True, check=False
    )
    file_system = found.stdout.split()[-1] if found.returncode == 0 else "unknown"
    return (
        f"{cores} cores, {memory:.0f} GiB, Linux {platform.release()}, {file_system}, "
        f"Python {platform.python_version()}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scratch", type=Path, help="folder for source and targets")
    parser.add_argument("--size", default="qwen2.5-1.5b", help="as in make_checkpoint.py")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["shard0", "shard1", "tp"])
    args = parser.parse_args(argv)
    met = True
    with tempfile.TemporaryDirectory(prefix="copy_speed-", dir=args.scratch) as name:
        scratch = Path(name)
        # Installed packages have their bytecode compiled; a checkout need not.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(scratch / "pycache")
        print(f"{machine(scratch)}; {args.rounds} rounds")
        for layout in args.layouts:
            source, target = scratch / "source", scratch / "target"
            maker = [sys.executable, str(HERE / "make_checkpoint.py"), str(source)]
            maker += ["--size", args.size, "--world-size", str(args.world_size), "--layout", layout]
            subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
            os.sync()
            total = read_once(source)
            runs = measure(source, target, args.rounds)
            remove(source)
            print(f"\n## {layout}, {args.world_size} ranks, bfloat16 kept, {total / 1e9:.2f} GB\n")
            print(table(runs, total), flush=True)
            if layout == "shard0":
                print()
                for contender, goal in GOALS.items():
                    ratio = statistics.median(ratios(runs, contender))
                    met = met and goal.met(ratio)
                    verdict = "met" if goal.met(ratio) else "MISSED"
                    print(f"Goal for {contender}: {goal}; measured {ratio:.2f}: {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
