"""How work is divided among processes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streammerge.shares import ALIGNMENT, FileRange, cut_files, owner

PAGE = 64 << 10

files = st.lists(
    st.one_of(
        st.integers(0, 10),
        st.integers(0, 4 * PAGE),
        st.integers(0, 40 * PAGE),
        st.integers(1, 40).map(lambda pages: pages * PAGE),
    ),
    max_size=12,
)
counts = st.integers(1, 20)


def covered(shares: list[tuple[FileRange, ...]]) -> Counter[tuple[int, int]]:
    """How often each stretch between two borders is written."""
    parts = [part for share in shares for part in share]
    borders: dict[int, set[int]] = {}
    for part in parts:
        borders.setdefault(part.file, set()).update((part.start, part.stop))
    seen: Counter[tuple[int, int]] = Counter()
    for file, start, stop in parts:
        seen.update((file, border) for border in borders[file] if start <= border < stop)
    return seen


@given(sizes=files, count=counts)
@example(sizes=[], count=3)
@example(sizes=[0, 0], count=3)
@example(sizes=[5, 0], count=1)
def test_every_byte_is_written_once(sizes: list[int], count: int) -> None:
    shares = cut_files(sizes, count)
    assert len(shares) == count
    parts = [part for share in shares for part in share]
    for part in parts:
        assert 0 <= part.start <= part.stop <= sizes[part.file]
    assert set(covered(shares).values()) <= {1}
    for file, size in enumerate(sizes):
        mine = [part for part in parts if part.file == file]
        assert mine, "also an empty file has to be finished by somebody"
        assert sum(part.stop - part.start for part in mine) == size
    for share in shares:
        assert len({part.file for part in share}) == len(share)


@given(sizes=files, count=counts)
@example(sizes=[40 * PAGE], count=20)
@example(sizes=[2 * PAGE - 1] * 6, count=5)
def test_shares_are_fair(sizes: list[int], count: int) -> None:
    fair = sum(sizes) / count
    for share in cut_files(sizes, count):
        nbytes = sum(part.stop - part.start for part in share)
        assert abs(nbytes - fair) <= max(fair / 8 + 2, PAGE)
        if fair >= 2 * PAGE:
            assert nbytes >= fair / 2


@given(sizes=files, count=counts)
def test_no_page_has_two_writers(sizes: list[int], count: int) -> None:
    for share in cut_files(sizes, count):
        for part in share:
            assert part.start % PAGE == 0
            assert part.stop % PAGE == 0 or part.stop == sizes[part.file]


def test_one_process_writes_whole_files() -> None:
    assert cut_files([3, 0, 10**12], 1) == [
        (FileRange(0, 0, 3), FileRange(1, 0, 0), FileRange(2, 0, 10**12))
    ]


def test_files_stay_whole_where_that_is_nearly_fair() -> None:
    sizes = [10**9 + 10**6 * i for i in range(8)]
    assert [[part.file for part in share] for share in cut_files(sizes, 4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_a_file_above_a_fair_share_is_split() -> None:
    gib = 1 << 30
    first, second, third = cut_files([3 * gib, gib // 64], 3)
    assert [part.file for part in first + second] == [0, 0]
    assert first[0].stop == second[0].start
    assert abs(first[0].stop - gib) < gib // 100
    assert {part.file for part in third} == {0, 1}


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=50),
    count=st.integers(1, 10),
)
def test_pieces_have_one_owner_each_in_order(sizes: list[int], count: int) -> None:
    total, at, owners = sum(sizes), 0, []
    load = [0] * count
    for size in sizes:
        rank = owner(at, size, total, count)
        load[rank] += size
        owners.append(rank)
        at += size
    assert owners == sorted(owners)
    assert owners[0] >= 0
    assert owners[-1] < count
    # Nobody gets more than a fair share and the half of a piece at each end of it.
    assert max(load) <= total / count + max(sizes)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_pieces_are_dealt_evenly(count: int) -> None:
    dealt = Counter(owner(10 * i, 10, 10 * 14 * count, count) for i in range(14 * count))
    assert dealt == dict.fromkeys(range(count), 14)


def test_the_alignment_is_that_of_the_largest_pages() -> None:
    """64 KiB, as some kernels for arm64 and ppc64 have it."""
    assert ALIGNMENT == PAGE
