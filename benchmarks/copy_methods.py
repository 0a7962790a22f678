"""Ways to copy ranges of cached files into new ones: what the writer's choices rest on.

    python benchmarks/copy_methods.py [--work DIR] [--rounds 4]

The first table copies four files of 400 MiB into one or two new files, with one or two threads, by
the kernel or through a buffer, with source and target at the same place of a page or not; without
fsync. The second copies them into one new file until all is on the disk, in ways that treat the
page cache differently. Prints seconds and processor seconds: the least of all rounds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from report import table

SIZE = 400 << 20
FILES = 4
KERNEL_STEP = 8 << 20
PAGE = 4096
UNALIGNED = 520  # how far source and target may be apart in a page

# (source, target, source offset, target offset)
Copy = Callable[[int, int, int, int], None]
Figures = tuple[float, float]


def by_kernel(nbytes: int = KERNEL_STEP) -> Copy:
    """Copy SIZE bytes with ``copy_file_range``, `nbytes` per call."""

    def copy(source: int, target: int, start: int, offset: int) -> None:
        done = 0
        while done < SIZE:
            step = min(nbytes, SIZE - done)
            done += os.copy_file_range(source, target, step, start + done, offset + done)

    return copy


def through_buffer(nbytes: int) -> Copy:
    """Copy SIZE bytes with reads and writes of `nbytes`."""

    def copy(source: int, target: int, start: int, offset: int) -> None:
        # A map starts at a page, which O_DIRECT asks for.
        buffer = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        done = 0
        while done < SIZE:
            count = os.preadv(source, [buffer[: SIZE - done]], start + done)
            done += os.pwrite(target, buffer[:count], offset + done)

    return copy


def in_steps(copy: Copy, after: Callable[[int, int, int], None]) -> Copy:
    """Copy, then do something with (target, offset, nbytes) of what was copied."""

    def copy_and_more(source: int, target: int, start: int, offset: int) -> None:
        copy(source, target, start, offset)
        after(target, offset, SIZE)

    return copy_and_more


def sync_and_drop(target: int, offset: int, nbytes: int) -> None:
    """Write a range to the disk and put it out of the page cache."""
    os.fdatasync(target)
    os.posix_fadvise(target, offset, nbytes, os.POSIX_FADV_DONTNEED)


METHODS: dict[str, Copy] = {
    "copy_file_range": by_kernel(),
    "buffer of 256 KiB": through_buffer(256 << 10),
    "buffer of 1 MiB": through_buffer(1 << 20),
    "buffer of 8 MiB": through_buffer(8 << 20),
}

# Ways that end on the disk: how a range is copied, flags of open, whether space is reserved.
TO_DISK: dict[str, tuple[Copy, int, bool]] = {
    "copy_file_range, 8 MiB a call": (by_kernel(), 0, False),
    "copy_file_range, 400 MiB a call": (by_kernel(SIZE), 0, False),
    "buffer of 1 MiB": (through_buffer(1 << 20), 0, False),
    "buffer of 1 MiB, posix_fallocate": (through_buffer(1 << 20), 0, True),
    "buffer of 1 MiB, fdatasync every 400 MiB": (
        in_steps(through_buffer(1 << 20), lambda target, offset, nbytes: os.fdatasync(target)),
        0,
        False,
    ),
    "the same, then DONTNEED": (in_steps(through_buffer(1 << 20), sync_and_drop), 0, False),
    "buffer of 1 MiB, O_DIRECT": (through_buffer(1 << 20), os.O_DIRECT, False),
    "buffer of 8 MiB, O_DIRECT": (through_buffer(8 << 20), os.O_DIRECT, False),
    "buffer of 8 MiB, O_DIRECT, posix_fallocate": (through_buffer(8 << 20), os.O_DIRECT, True),
}


@contextmanager
def new_files(folder: Path, count: int, nbytes: int, flags: int = 0) -> Iterator[list[int]]:
    """Open new files of `nbytes`; they are deleted, and the disk comes to rest, at the end."""
    paths = [folder / f"target{i}" for i in range(count)]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o666) for path in paths]
    try:
        for fd in fds:
            os.ftruncate(fd, nbytes)
        yield fds
    finally:
        for fd, path in zip(fds, paths, strict=True):
            os.close(fd)
            path.unlink()
        os.sync()


def timed(work: Callable[[], None]) -> Figures:
    """Return seconds and processor seconds of some work."""
    cpu, started = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def measure_cached(
    sources: list[int], folder: Path, copy: Copy, threads: int, targets: int, shift: int
) -> Figures:
    """Copy all sources with some threads into some files, in the page cache."""
    work = list(enumerate(sources))

    def loop(fds: list[int]) -> None:
        while work:
            try:
                i, source = work.pop()
            except IndexError:
                return
            copy(source, fds[i % targets], 64, 64 + shift + i // targets * SIZE)

    def run(fds: list[int]) -> None:
        workers = [threading.Thread(target=loop, args=[fds]) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    with new_files(folder, targets, PAGE + shift + SIZE * FILES // targets) as fds:
        return timed(lambda: run(fds))


def measure_to_disk(
    sources: list[int], folder: Path, copy: Copy, flags: int, *, reserve: bool
) -> Figures:
    """Copy all sources into one file, one after the other, and wait for the disk."""

    def run(fd: int) -> None:
        if reserve:
            os.posix_fallocate(fd, 0, FILES * SIZE)
        for i, source in enumerate(sources):
            copy(source, fd, 64, i * SIZE)
        os.fsync(fd)

    with new_files(folder, 1, FILES * SIZE, flags) as (fd,):
        return timed(lambda: run(fd))


def make_sources(folder: Path) -> list[int]:
    """Make files that are in the page cache, and open them."""
    block = os.urandom(1 << 20)
    sources = []
    for i in range(FILES):
        path = folder / f"source{i}"
        with path.open("wb") as file:
            for _ in range(SIZE // len(block) + 1):
                file.write(block)
        sources.append(os.open(path, os.O_RDONLY))
    os.sync()
    return sources


def least(rounds: list[Figures]) -> list[str]:
    """Return the least seconds and processor seconds of all rounds."""
    return [f"{min(figures):.2f}" for figures in zip(*rounds, strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, help="folder on the disk to measure", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args(argv)
    cases = [
        (method, threads, targets, shift)
        for method in METHODS
        for threads, targets in ((1, 1), (2, 1), (2, 2))
        for shift in (0, UNALIGNED)
    ]
    cached: dict[tuple[str, int, int, int], list[Figures]] = {case: [] for case in cases}
    to_disk: dict[str, list[Figures]] = {way: [] for way in TO_DISK}
    with tempfile.TemporaryDirectory(prefix="copy_methods-", dir=args.work) as name:
        folder = Path(name)
        sources = make_sources(folder)
        for _ in range(args.rounds):
            for case, taken in cached.items():
                method, *rest = case
                taken.append(measure_cached(sources, folder, METHODS[method], *rest))
            for way, taken in to_disk.items():
                copy, flags, reserve = TO_DISK[way]
                taken.append(measure_to_disk(sources, folder, copy, flags, reserve=reserve))
    header = ["seconds", "processor seconds"]
    rows = (
        [method, str(threads), str(targets), "no" if shift else "yes", *least(taken)]
        for (method, threads, targets, shift), taken in cached.items()
    )
    print(table(["in the cache", "threads", "files", "same place of a page", *header], rows))
    print()
    print(table(["to the disk", *header], ([way, *least(taken)] for way, taken in to_disk.items())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
