"""Finding rank files by the pattern of their names, for names made by `str.replace`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import scratch
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

from streammerge import (
    CheckpointNotFoundError,
    InconsistentRanksError,
    SourceError,
    UsageError,
)
from streammerge.formats.rank_paths import find_rank_files, has_rank_files, parse_pattern

# Much of it means something in regular expressions or in str.format.
_TEXT = st.text("ab0.+*?()[]^$|\\ -_%éß", max_size=5)
_NAME = _TEXT.filter(lambda text: text not in ("", ".", ".."))


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """A pattern with both placeholders or only ``{rank}``, on one or several levels."""
    levels = draw(st.lists(_NAME, max_size=2))
    file = f"{draw(_TEXT)}{{rank}}{draw(_TEXT)}"
    if draw(st.booleans()):
        file = f"{{world}}-{file}"
    levels.append(file)
    return "/".join(draw(st.permutations(levels)))


@given(patterns(), st.integers(1, 13), st.integers(0, 2**32))
@fixed(60)
def test_finds_the_files_of_a_pattern(pattern: str, world_size: int, seed: int) -> None:
    with scratch() as folder:
        names = [
            pattern.replace("{rank}", str(rank)).replace("{world}", str(world_size))
            for rank in range(world_size)
        ]
        nodes = [folder / "node0", folder / "node1"]
        rng = random.Random(seed)
        expected = []
        for name in names:
            path = rng.choice(nodes) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            expected.append(str(path))
        for node in nodes:
            node.mkdir(exist_ok=True)
            (node / "other").touch()
        parsed = parse_pattern(pattern)
        found = find_rank_files([str(node) for node in nodes], parsed)
        assert found.paths == expected
        assert found.named == ("{world}" in pattern)
        for node in nodes:
            assert has_rank_files(str(node), parsed) == any(
                path.startswith(f"{node}/") for path in expected
            )

        gone = rng.randrange(world_size)
        os.unlink(expected[gone])
        if world_size == 1:
            with pytest.raises(CheckpointNotFoundError, match="no rank files here"):
                find_rank_files([str(node) for node in nodes], parsed)
        elif found.named or gone < world_size - 1:
            with pytest.raises(CheckpointNotFoundError, match=f"missing: rank {gone}( |$)"):
                find_rank_files([str(node) for node in nodes], parsed)
        else:  # the files have to tell
            left = find_rank_files([str(node) for node in nodes], parsed)
            assert left.paths == expected[:-1]


@pytest.mark.parametrize("pattern", ["{world}{rank}.pt", "{rank}00{world}", "a/{rank}{world}/b"])
def test_numbers_that_touch(pattern: str) -> None:
    with pytest.raises(UsageError, match="nothing keeps the two numbers apart"):
        parse_pattern(pattern)


def touch(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_only_digits_are_numbers(tmp_path: Path) -> None:
    touch(tmp_path, ["r0", "r1", "r-2", "r²", "r٣", "r1x", "R2", "xr3", "r"])
    found = find_rank_files([str(tmp_path)], parse_pattern("r{rank}"))
    assert found.paths == [f"{tmp_path}/r0", f"{tmp_path}/r1"]


def test_files_and_folders_on_the_way(tmp_path: Path) -> None:
    touch(tmp_path, ["r0/x", "r1/x", "r2"])
    found = find_rank_files([str(tmp_path)], parse_pattern("r{rank}/x"))
    assert found.paths == [f"{tmp_path}/r0/x", f"{tmp_path}/r1/x"]


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    touch(tmp_path, ["node1/x"])
    touch(tmp_path, ["source/r0/x"])
    (tmp_path / "source" / "r1").symlink_to(tmp_path / "node1")
    found = find_rank_files([str(tmp_path / "source")], parse_pattern("r{rank}/x"))
    assert len(found.paths) == 2


def test_the_same_file_in_two_sources(tmp_path: Path) -> None:
    """As given twice, or through a link."""
    touch(tmp_path, ["a/r0", "a/r1"])
    (tmp_path / "b").symlink_to("a")
    sources = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a")]
    assert find_rank_files(sources, parse_pattern("r{rank}")).paths == [
        f"{tmp_path}/a/r0",
        f"{tmp_path}/a/r1",
    ]


def test_a_rank_beyond_the_world_size(tmp_path: Path) -> None:
    touch(tmp_path, ["0of2", "1of2", "2of2"])
    with pytest.raises(InconsistentRanksError, match="2of2: rank 2 of a world size of 2"):
        find_rank_files([str(tmp_path)], parse_pattern("{rank}of{world}"))


def test_numbers_beyond_measure(tmp_path: Path) -> None:
    digits = "9" * 240
    touch(tmp_path, ["r0", f"r{digits}"])
    with pytest.raises(CheckpointNotFoundError, match=r"missing: ranks 1-9{239}8 \(the last is"):
        find_rank_files([str(tmp_path)], parse_pattern("r{rank}"))


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert not has_rank_files(gone, parse_pattern("r{rank}"))
    with pytest.raises(SourceError, match=f"{gone}: No such file or directory"):
        find_rank_files([gone], parse_pattern("r{rank}"))
