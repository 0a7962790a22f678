"""Kill merges at random moments, go on, and compare with a merge that ran through.

    python benchmarks/kill_and_resume.py [--kills 100] [--size 256MB] [--scratch DIR] [--seed N]

Every kill is a SIGKILL of the whole process. Most moments are chosen by how much of the output is
on the disk, some when the result is about to be published, the others by time from the start of
the process to a bit after its usual end; at least 60% must hit between the first output byte and
the rename. After each kill the target is
absent, complete, or the earlier result that was to be replaced, to the byte; then the same command
goes on, and may be killed in turn. Files that the journal named are the same files at the end:
same inode, same modification time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from make_checkpoint import write_checkpoint  # noqa: E402
from model_shapes import model_of_size, parse_size  # noqa: E402

from streammerge.journal import Written, read_written  # noqa: E402
from streammerge.target import staging_path  # noqa: E402

FILES = 24
LEAST_SHARE = 0.6
MOMENTS = {"while writing": 0.7, "when publishing": 0.15, "any time": 0.15}
AFTER_ANOTHER_KILL = 0.3
TIMEOUT_SECONDS = 300

Digests = dict[str, str]


class Failed(Exception):
    """Something that must not happen."""


@dataclass(slots=True)
class Experiment:
    """One checkpoint, merged again and again into one target.

    Attributes:
        source, target: of the merges.
        shard_size: of the result, so that it has about `FILES` files.
        expected: digests of what a merge writes that runs through.
        earlier: digests of an earlier result, which some merges replace.
        seconds: how long a merge takes.
        counts: what was seen.
    """

    source: Path
    target: Path
    shard_size: int
    rng: random.Random
    expected: Digests = field(default_factory=dict)
    earlier: Digests = field(default_factory=dict)
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def staging(self) -> Path:
        """The staging directory."""
        return Path(staging_path(str(self.target)))

    def start(self) -> subprocess.Popen[bytes]:
        """Start a merge."""
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "streammerge", "merge", self.source, self.target),
                *("--max-shard-size", str(self.shard_size), "--quiet", "--overwrite"),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def finish(self) -> None:
        """Merge to the end."""
        if self.start().wait(TIMEOUT_SECONDS) != 0:
            raise Failed("a merge failed that nobody killed")

    def prepare(self) -> None:
        """Find out what comes out and how long it takes; leave an earlier result aside."""
        started = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - started
        self.expected = digests(self.target)
        aside = self.target.with_name("earlier")
        aside.mkdir()
        for name in ("config.json", min(n for n in self.expected if n.endswith(".safetensors"))):
            shutil.copy(self.target / name, aside / name)
        self.earlier = digests(aside)
        shutil.rmtree(self.target)

    def begin(self) -> None:
        """Have no target, or an earlier result."""
        shutil.rmtree(self.target, ignore_errors=True)
        shutil.rmtree(self.staging, ignore_errors=True)
        if self.rng.random() < 0.5:
            shutil.copytree(self.target.with_name("earlier"), self.target)
            self.counts["over an earlier result"] += 1

    def kill_one(self) -> bool:
        """Start a merge and kill it; whether it was killed before its end."""
        (moment,) = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))
        amount = self.rng.random() * sum(map(os.path.getsize, self.source.glob("*.pt")))
        process = self.start()
        if moment == "any time":
            time.sleep(self.rng.random() * self.seconds * 1.2)
        while process.poll() is None and (
            (moment == "while writing" and self.written() <= amount)
            or (moment == "when publishing" and len(self.finished()) < len(self.expected))
        ):
            time.sleep(0.0005)
        process.kill()
        return process.wait() != 0

    def written(self) -> int:
        """Bytes of output that the file system has taken so far."""
        total = 0
        for path in (self.staging / "merged").glob("*.safetensors"):
            try:
                total += path.stat().st_blocks * 512
            except FileNotFoundError:  # published meanwhile
                return sys.maxsize
        return total

    def finished(self) -> list[Written]:
        """The files that the journal names and that are as it says."""
        merged = str(self.staging / "merged")
        return [f for f in read_written(str(self.staging / "journal")) if f.lies_in(merged)]

    def check_target(self) -> bool:
        """Whether the target is the result, which it is in full or not at all."""
        found = digests(self.target)
        if found not in ({}, self.earlier, self.expected):
            raise Failed(f"{self.target} is something in between: {sorted(found)}")
        return found == self.expected

    def check_kept(self, finished: list[Written]) -> None:
        """Files that were finished are still the same files."""
        places = [str(self.target), str(self.staging / "merged")]
        for file in finished:
            if not any(file.lies_in(place) for place in places):
                raise Failed(f"{file.name} was finished, but written again")

    def run(self, kills: int) -> None:
        """Kill so many merges and go on after each."""
        finished: list[Written] = []
        goes_on = False
        done = 0
        while done < kills:
            if not goes_on:
                finished = []
                self.begin()
            killed = self.kill_one()
            self.check_kept(finished)
            complete = self.check_target()
            if killed:
                done += 1
                self.counts["between"] += not complete and self.written() > 0
                self.counts["after the rename"] += complete
                self.counts["again"] += goes_on
            if complete:
                goes_on = False
                continue
            finished = self.finished()
            goes_on = self.rng.random() < AFTER_ANOTHER_KILL
            if not goes_on:
                self.finish()
                self.check_kept(finished)
                if not self.check_target():
                    raise Failed(f"{self.target} is not what a merge writes that runs through")
                if self.staging.exists():
                    raise Failed(f"{self.staging} is left")
                self.counts["kept"] += len(finished)


def digests(directory: Path) -> Digests:
    """Hash of every file below a directory; empty if there is none."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            digest = hashlib.blake2b()
            with path.open("rb") as stream:
                while data := stream.read(1 << 20):
                    digest.update(data)
            found[str(path.relative_to(directory))] = digest.hexdigest()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--size", type=parse_size, default="256MB")
    parser.add_argument(
        "--scratch", type=Path, help="where to work (default: the temporary folder)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="kill-and-resume-", dir=args.scratch))
    try:
        write_checkpoint(scratch / "source", model_of_size(args.size, 2), 4)
        rng = random.Random(args.seed)
        experiment = Experiment(
            scratch / "source", scratch / "out" / "merged", args.size // FILES, rng
        )
        experiment.prepare()
        started = time.monotonic()
        experiment.run(args.kills)
    finally:
        shutil.rmtree(scratch)
    counts = experiment.counts
    if counts["between"] < LEAST_SHARE * args.kills:
        raise Failed(f"only {counts['between']} kills between the first byte and the rename")
    print(
        f"{args.kills} kills: {counts['between']} between the first output byte and the rename, "
        f"{counts['after the rename']} after it; {counts['again']} of a merge that went on after "
        f"another kill; {counts['over an earlier result']} targets held an earlier result. "
        f"Every result byte-identical to that of a merge that ran through; "
        f"{counts['kept']} finished files kept inode and time. "
        f"{time.monotonic() - started:.0f} s."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
