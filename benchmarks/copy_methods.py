"""Ways to copy ranges of cached files into new ones: what the writer's choices rest on.

    python benchmarks/copy_methods.py [--scratch DIR] [--rounds 4]

Copies four files of 400 MiB into one or two new files, with one or two threads, by the kernel or
through a buffer, with source and target at the same place of a page or not. Prints seconds, without
fsync, and processor seconds: the least of all rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

SIZE = 400 << 20
FILES = 4
STEP = 8 << 20
PAGE = 4096

# (source, target, source offset, target offset)
Copy = Callable[[int, int, int, int], None]


def by_kernel(source: int, target: int, start: int, offset: int) -> None:
    """Copy SIZE bytes with ``copy_file_range``."""
    done = 0
    while done < SIZE:
        step = min(STEP, SIZE - done)
        done += os.copy_file_range(source, target, step, start + done, offset + done)


def through_buffer(nbytes: int) -> Copy:
    """Copy SIZE bytes with reads and writes of `nbytes`."""

    def copy(source: int, target: int, start: int, offset: int) -> None:
        buffer = memoryview(bytearray(nbytes))
        done = 0
        while done < SIZE:
            count = os.preadv(source, [buffer[: SIZE - done]], start + done)
            done += os.pwrite(target, buffer[:count], offset + done)

    return copy


METHODS: dict[str, Copy] = {
    "copy_file_range": by_kernel,
    "buffer of 256 KiB": through_buffer(256 << 10),
    "buffer of 1 MiB": through_buffer(1 << 20),
    "buffer of 8 MiB": through_buffer(8 << 20),
}


def measure(
    sources: list[int], folder: Path, copy: Copy, threads: int, targets: int, shift: int
) -> tuple[float, float]:
    """Seconds and processor seconds of copying all sources; targets are new and deleted."""
    paths = [folder / f"target{i}" for i in range(targets)]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666) for path in paths]
    for fd in fds:
        os.ftruncate(fd, PAGE + shift + SIZE * FILES // targets)
    work = list(enumerate(sources))

    def loop() -> None:
        while work:
            try:
                i, source = work.pop()
            except IndexError:
                return
            copy(source, fds[i % targets], 64, 64 + shift + i // targets * SIZE)

    workers = [threading.Thread(target=loop) for _ in range(threads)]
    cpu, started = time.process_time(), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    result = time.perf_counter() - started, time.process_time() - cpu
    for fd, path in zip(fds, paths, strict=True):
        os.close(fd)
        path.unlink()
    os.sync()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="copy_methods-", dir=args.scratch) as name:
        folder = Path(name)
        sources = []
        block = os.urandom(1 << 20)
        for i in range(FILES):
            path = folder / f"source{i}"
            with path.open("wb") as file:
                for _ in range(SIZE // len(block) + 1):
                    file.write(block)
            sources.append(os.open(path, os.O_RDONLY))
        os.sync()
        cases = [
            (method, threads, targets, shift)
            for method in METHODS
            for threads, targets in ((1, 1), (2, 1), (2, 2))
            for shift in (0, 520)
        ]
        results: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            for case in cases:
                method, *rest = case
                taken = measure(sources, folder, METHODS[method], *rest)
                results.setdefault(case, []).append(taken)
        print("| way | threads | files | same place of a page | seconds | processor seconds |")
        print("|---|---|---|---|---|---|")
        for (method, threads, targets, shift), rounds in results.items():
            seconds = min(wall for wall, _ in rounds)
            cpu = min(used for _, used in rounds)
            same = "no" if shift else "yes"
            print(f"| {method} | {threads} | {targets} | {same} | {seconds:.2f} | {cpu:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
