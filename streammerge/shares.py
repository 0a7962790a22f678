"""Who does which part of the work, where several processes share it. Pure.

Everything is laid out on a line of bytes that is cut into as many parts as there are processes.
The same sizes give the same cuts in every process; how large buffers are does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

# Cuts inside of files lie at multiples of this, the largest page size of Linux. No page is then
# written by two processes: an NFS client may write a whole page back where one byte has changed.
ALIGNMENT = 64 << 10
_SNAP = 16  # a file boundary is preferred within this part of a fair share


class FileRange(NamedTuple):
    """Consecutive bytes of a file.

    Attributes:
        file: index of the file.
        start, stop: the first byte, and the one after the last.
    """

    file: int
    start: int
    stop: int


def cut_files(sizes: Sequence[int], count: int) -> list[tuple[FileRange, ...]]:
    """Divide files among processes, by bytes.

    Each process gets consecutive files and parts of files, and, if a fair share is at least twice
    `ALIGNMENT`, at least half a fair share.

    Args:
        sizes: bytes of each file.
        count: number of processes.

    Returns:
        What each process writes. Together that is every byte once; empty files go to a process too.
    """
    cuts = [(0, 0), *(_cut(sizes, k, count) for k in range(1, count)), (len(sizes), 0)]
    return [tuple(_between(sizes, begin, end)) for begin, end in pairwise(cuts)]


def owner(start: int, nbytes: int, total: int, count: int) -> int:
    """The process to which a piece of work goes that is done as a whole: where its middle lies.

    Args:
        start, nbytes: the piece, on a line of `total` bytes.
        count: number of processes.
    """
    return min(count - 1, (2 * start + nbytes) * count // (2 * total)) if total else 0


def _cut(sizes: Sequence[int], k: int, count: int) -> tuple[int, int]:
    """Where the k-th share ends, as (file, offset): near k/count of all bytes."""
    total = sum(sizes)
    position = k * total // count
    slack = total // (_SNAP * count)
    for file, size in enumerate(sizes):
        if position < size:
            if position <= slack:
                return file, 0
            offset = (position + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT
            if size - position <= slack or offset >= size:
                return file + 1, 0
            return file, offset
        position -= size
    return len(sizes), 0


def _between(
    sizes: Sequence[int], begin: tuple[int, int], end: tuple[int, int]
) -> Iterator[FileRange]:
    for file in range(begin[0], min(end[0] + 1, len(sizes))):
        start = begin[1] if file == begin[0] else 0
        stop = end[1] if file == end[0] else sizes[file]
        if start < stop or (start == stop == sizes[file] == 0 and file < end[0]):
            yield FileRange(file, start, stop)
