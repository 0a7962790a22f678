"""What the figures of the benchmarks rest on: how they are taken, and of which checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import goals
import numpy as np
import process_trees
import pytest
import report
import torch
from check_result import find_tensors, first_fault
from compare import CURVE_POINTS, Outcome, render, smallest, thinned
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoint import (
    DCP_FOLDER,
    Recipe,
    buffers,
    chunk,
    write_checkpoint,
    zero_partitions,
)
from model_shapes import FORMATS, LAYOUTS, MODELS, Model, Parameter, config, parameters, parse_size
from peers import PEERS, STREAMMERGE
from process_trees import (
    Bytes,
    Contender,
    Memory,
    Sample,
    Usage,
    evict,
    flush,
    measure_rounds,
    parse_fields,
    parse_io,
    parse_parent,
    parse_status,
    read_once,
    rotated,
    run,
)
from report import (
    NotCompared,
    Spread,
    compared,
    fill_section,
    machine_facts,
    machine_text,
    memory_text,
    ratios,
    spread,
    table,
)
from safetensors.torch import load_file, save_file
from strategies import fixed
from weights import PERIOD, Part, flat_part, pieces
from workspace import Workspace, parse_options

import streammerge

TINY = Model(64, 96, 2, 4, 2, 131)  # sizes that four ranks cannot share evenly
MIB = 2**20

STATUS = """Name:\tpython
State:\tS (sleeping)
PPid:\t12
VmPeak:\t  999999 kB
VmHWM:\t    2048 kB
VmRSS:\t    1500 kB
RssAnon:\t    1000 kB
RssFile:\t     400 kB
RssShmem:\t     100 kB
"""
ENDED = "Name:\tpython\nState:\tZ (zombie)\nPPid:\t12\n"
IO = """rchar: 100
wchar: 50
syscr: 3
syscw: 2
read_bytes: 4096
write_bytes: 8192
cancelled_write_bytes: 4096
"""
ROLLUP = """55d0c0000000-7ffc0000 ---p 00000000 00:00 0                  [rollup]
Rss:                1500 kB
Pss:                1200 kB
Anonymous:          1000 kB
"""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Undo what ``init_process_group`` and `Workspace` leave behind in this process."""
    hook = sys.excepthook
    with mock.patch.dict(os.environ):
        yield
    sys.excepthook = hook


# --- /proc ---


def test_memory_is_read_from_status() -> None:
    assert parse_status(STATUS) == Memory(1000 * 1024, 500 * 1024, 2048 * 1024)


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert parse_status(ENDED) is None
    assert parse_status("") is None


def test_bytes_are_read_from_io() -> None:
    assert dataclasses.astuple(parse_io(IO)) == (100, 50, 4096, 4096)


def test_fields_of_smaps_rollup() -> None:
    assert parse_fields(ROLLUP) == {"Rss": 1500, "Pss": 1200, "Anonymous": 1000}


@pytest.mark.parametrize("name", ["python", "a b", "a) R 1 (b"])
def test_the_parent_is_found_behind_any_name(name: str) -> None:
    assert parse_parent(f"77 ({name}) S 12 77 77 0 -1") == 12


def test_our_own_files_in_proc_are_read() -> None:
    own = Path("/proc/self")
    memory = parse_status((own / "status").read_text())
    assert memory is not None
    assert 0 < memory.anonymous + memory.file_backed <= memory.peak * 1.01
    assert parse_parent((own / "stat").read_text()) == os.getppid()


# --- runs ---


def test_a_run_counts_the_memory_of_all_its_processes(tmp_path: Path) -> None:
    child = f"import time; x = bytearray(60 << 20); time.sleep(.3); open({str(tmp_path / 'out')!r}"
    child += ", 'wb').write(x)"
    parent = "import subprocess, sys; x = bytearray(100 << 20); "
    parent += "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    usage = run([sys.executable, "-c", parent, child])
    assert usage.code == 0
    assert usage.errors == ()
    assert len(usage.peaks) == 2
    assert 160 * MIB < usage.peak < 230 * MIB
    assert 160 * MIB < usage.highest.anonymous < 200 * MIB
    assert usage.moved.written >= 60 * MIB
    assert usage.samples[0].seconds < usage.samples[-1].seconds <= usage.seconds


def test_a_run_that_fails_says_why() -> None:
    usage = run([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert usage.code == 3
    assert usage.errors == ("why",)


def test_a_limit_of_the_data_segment_holds() -> None:
    allocate = [sys.executable, "-c", "bytearray(200 << 20)"]
    assert run(allocate, data_limit=400 * MIB).code == 0
    limited = run(allocate, data_limit=100 * MIB)
    assert limited.code == 1
    assert limited.errors[-1] == "MemoryError"


def test_rounds_leave_no_target(tmp_path: Path) -> None:
    target = tmp_path / "output" / "target"
    make = Contender("make", ("mkdir", target, target.with_name("left")), target)
    nothing = Contender("nothing", ("true",), None)
    seen = []
    runs = measure_rounds([make, nothing], 3, on_run=lambda n, one: seen.append((n, one.name)))
    assert {name: len(taken) for name, taken in runs.items()} == {"make": 3, "nothing": 3}
    assert sorted(seen) == sorted(itertools.product(range(3), ("make", "nothing")))
    assert not list(target.parent.iterdir())


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What ``fsync`` was called for."""
    paths: list[Path] = []

    def fsync(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(process_trees.os, "fsync", fsync)
    return paths


def test_all_files_and_folders_are_flushed(tmp_path: Path, flushed: list[Path]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"1")
    (tmp_path / "other").write_bytes(b"")
    flush(tmp_path)
    assert len(flushed) == 5
    assert set(flushed) == {tmp_path, *tmp_path.rglob("*")}


def test_the_disk_is_waited_for_when_the_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "output" / "made"
    waits = []

    def wait(folder: Path) -> None:
        waits.append((folder, sorted(p.name for p in folder.iterdir())))
        time.sleep(0.2)

    monkeypatch.setattr(process_trees, "flush", wait)
    runs = measure_rounds([Contender("a", ("touch", made), made)], 1)
    assert waits == [(made.parent, ["made"])]
    assert runs["a"][0].durable_seconds >= runs["a"][0].seconds + 0.2


def test_what_writes_nothing_waits_for_nothing(flushed: list[Path]) -> None:
    usage = run(["true"])
    assert usage.durable_seconds == usage.seconds
    assert not flushed


@fixed(50)
@given(st.integers(1, 6), st.integers(0, 20))
def test_a_round_has_every_contender_once(count: int, number: int) -> None:
    contenders = [Contender(str(i), ("true",), None) for i in range(count)]
    order = rotated(contenders, number)
    assert sorted(c.name for c in order) == sorted(c.name for c in contenders)
    starts = {rotated(contenders, n)[0].name for n in range(2 * count)}
    assert starts == {c.name for c in contenders}


def test_files_are_read_and_evicted(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "a").write_bytes(bytes(3 * MIB))
    (tmp_path / "below" / "b").write_bytes(b"12345")
    evict(tmp_path)
    assert read_once(tmp_path) == 3 * MIB + 5


@fixed(200)
@given(st.integers(1, 1 << 34), st.integers(1, 1 << 34))
def test_the_smallest_limit_is_found(threshold: int, start: int) -> None:
    tried: list[int] = []

    def works(cap: int) -> bool:
        tried.append(cap)
        return cap >= threshold

    found = smallest(works, start)
    assert threshold <= found <= threshold * 1.2 + 2
    assert len(tried) < 60


def test_no_limit_is_enough() -> None:
    with pytest.raises(ValueError, match="nothing works"):
        smallest(lambda cap: False, 1)


# --- what is made of figures ---


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert str(spread([3.0, 1.0, 2.0])) == "2.00 (1.00 to 3.00)"


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "< 1 MiB"),
        (23 * MIB, "23 MiB"),
        (1500 * MIB, "1.46 GiB"),
        (20 * 2**30, "20.0 GiB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert memory_text(nbytes) == text


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_section_is_filled_again_and_again() -> None:
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n"
    once = fill_section(text, "x", r"new \1")
    assert once == "before\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nafter\n"
    assert fill_section(once, "x", r"new \1") == once
    with pytest.raises(ValueError, match="0 sections named y"):
        fill_section(text, "y", "")


def test_the_readme_has_every_section() -> None:
    readme = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text()
    for name in ("compare", "goals"):
        assert f"<!-- begin {name} -->" in readme
        assert f"<!-- end {name} -->" in readme


# --- tables ---


def usage(seconds: float, *peaks: int, durable: float | None = None) -> Usage:
    samples = (Sample(0.0, 1, 1), Sample(0.1, 30 * MIB, 10 * MIB), Sample(0.2, 20 * MIB, 0))
    moved = Bytes(3_600_000_000, 3_500_000_000, 0, 0)
    return Usage(
        0, seconds, durable or seconds, 1.5, tuple(p * MIB for p in peaks), samples, moved, ()
    )


def test_a_ratio_has_a_goal() -> None:
    mine, cp = [usage(2.0, 20), usage(4.0, 20)], [usage(2.0, 5), usage(2.0, 5)]
    assert goals.time_row("a", mine, cp, 1.5) == goals.Row(
        "a", "≤ 1.5", "1.50 (1.00 to 2.00)", met=True
    )
    assert not goals.time_row("a", mine, cp, 1.4).met


def test_memory_is_that_of_all_processes_of_the_worst_run() -> None:
    taken = [usage(1.0, 20, 10), usage(1.0, 20, 30)]
    assert goals.memory_row("a", taken, 48 * MIB) == goals.Row("a", "≤ 48 MiB", "50 MiB", met=False)
    over = goals.memory_row("a", taken, 32 * MIB, less=25 * MIB)
    assert over == goals.Row("a", "≤ 32 MiB", "25 MiB", met=True)


def test_rows_of_peers_come_from_what_was_kept() -> None:
    ours = Outcome(STREAMMERGE, "equal", [usage(1.0, 20, durable=2.0)], []).to_json()
    peer = Outcome(PEERS[4], "equal", [usage(9.0, 999, durable=15.0)], []).to_json()
    again = json.loads(json.dumps(peer))
    name = "verl's merger (stand-in), x"
    assert goals.peer_rows("x", again, ours) == [
        goals.Row(
            f"time of {name}, until on the disk, against ours", "≥ 8", "7.50 (7.50 to 7.50)", False
        ),
        goals.Row(
            f"time of {name}, not waiting for its data, against ours",
            *("none", "9.00 (9.00 to 9.00)", True),
        ),
        goals.Row(f"peak memory of {name}, against ours", "≥ 50", "50.0", False),
    ]


def test_memory_may_grow_with_chunks_beyond_100_000() -> None:
    assert goals.memory_limit() == goals.memory_limit(100_000) == 48 * MIB
    assert goals.memory_limit(200_000) == 48 * MIB + 6_400_000


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `compare` keeps what it measured, which is nothing yet."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path / "compare.json"


def test_what_compare_keeps_is_read_again(kept: Path) -> None:
    absent = Outcome(PEERS[-1], "not run: deepspeed is not installed").to_json()
    configs = {"x": [Outcome(STREAMMERGE, "equal", [usage(1.0, 20)], []).to_json(), absent]}
    kept.write_text(json.dumps({"configs": configs}))
    assert [outcome["name"] for outcome in compared()["x"]] == ["streammerge", PEERS[-1].name]


def test_results_that_lack_the_time_until_the_disk_are_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotCompared, match="--update first"):
        compared()
    outcome = Outcome(STREAMMERGE, "equal", [usage(1.0, 20)], []).to_json()
    del outcome["warm"][0]["durable_seconds"]
    kept.write_text(json.dumps({"configs": {"x": [outcome]}}))
    with pytest.raises(NotCompared, match="--update again"):
        compared()
    assert goals.main(["peers", "--work", str(tmp_path / "work")]) == 0
    said = capsys.readouterr().err
    assert said.startswith("peers: results/compare.json does not say when results were on the disk")


def test_the_tables_of_peers() -> None:
    ran = Outcome(
        STREAMMERGE,
        "equal",
        [usage(1.0, 20, durable=1.5)],
        [usage(2.0, 20, durable=3.0)],
        cap=18 * MIB,
    )
    slow = Outcome(PEERS[5], "equal", [usage(2.0, 50, durable=6.0)], [usage(2.0, 50)])
    absent = Outcome(PEERS[-1], "not run: deepspeed is not installed")
    times, memory, notes = render([ran, slow, absent]).split("\n\n")
    assert times.splitlines()[2] == (
        "| streammerge | rank-files | 1.00 (1.00 to 1.00) | 1.50 (1.50 to 1.50) | 1.0 "
        "| 3.00 (3.00 to 3.00) | 1.5 | 3.6 / 3.5 | equal |"
    )
    assert " | 6.00 (6.00 to 6.00) | 4.0 | " in times.splitlines()[3]
    assert times.endswith("| not run: deepspeed is not installed |")
    assert memory.splitlines()[2:] == [
        "| streammerge | 20 MiB | 1.0 | 30 MiB + 10 MiB | 18 MiB |",
        "| torch.load(mmap=True) | 50 MiB | 2.5 | 30 MiB + 10 MiB |  |",
    ]
    for lines in (times.splitlines(), memory.splitlines()):
        assert len({line.count("|") for line in lines}) == 1
    assert notes == "- torch.load(mmap=True): a plain merger of 10 lines."


@fixed(100)
@given(st.lists(st.integers(0, 1000), max_size=5 * CURVE_POINTS))
def test_a_thinned_curve_keeps_its_peak(residents: list[int]) -> None:
    samples = [Sample(float(i), resident, 0) for i, resident in enumerate(residents)]
    thin = thinned(samples)
    assert len(thin) <= CURVE_POINTS
    assert [sample for sample in samples if sample in thin] == thin
    highest = max(residents, default=0)
    assert max((sample.resident for sample in thin), default=0) == highest
    if len(samples) <= CURVE_POINTS:
        assert thin == samples


# --- where ---


def test_targets_may_be_elsewhere(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    (other / "output").mkdir(parents=True)
    assert Workspace(work).target.is_relative_to(work)
    workspace = Workspace(work, other)
    assert workspace.target.is_relative_to(other)
    measure_rounds([Contender("a", ("mkdir", workspace.target), workspace.target)], 1)
    assert sorted(p.name for p in other.iterdir()) == ["benchmark-output", "output"]
    assert not list(workspace.target.parent.iterdir())


def test_options_are_shared(capsys: pytest.CaptureFixture[str]) -> None:
    def parse(*argv: str) -> argparse.Namespace:
        return parse_options(argparse.ArgumentParser(), argv, ("a", "b"))

    assert parse("b", "--rounds", "3").names == ["b"]
    assert (parse().rounds, parse("--quick").rounds) == (5, 2)
    for argv, why in (
        (("--quick", "--update"), "--quick is for trying"),
        (("--target-dir", "x", "--update"), "--target-dir is for trying"),
        (("a", "c"), "c is none of a, b"),
        (("--rounds", "0"), "--rounds: at least 1"),
    ):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert why in capsys.readouterr().err


def test_machine_facts_name_both_file_systems(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path, tmp_path)
    same = machine_text(facts | {"file_system": "ext4", "target_file_system": "ext4"})
    assert ", ext4, " in same
    other = machine_text(facts | {"file_system": "ext4", "target_file_system": "tmpfs"})
    assert ", from ext4 to tmpfs, " in other
    assert facts["file_system"] == facts["target_file_system"]


# --- checkpoints ---


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("1.5MiB", 1572864), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_transformers_has_these_parameters(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = dataclasses.replace(TINY, model_type=model_type)
    made = config(model, "bfloat16")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**made)).state_dict()
    assert {p.name: p.shape for p in parameters(model)} == {
        name: tuple(tensor.shape) for name, tensor in theirs.items()
    }


def test_the_experts_are_as_many_as_the_goal_asks_for() -> None:
    for name in ("moe-256", "moe-256-thin"):
        listed = parameters(MODELS[name])
        assert len(listed) == len({p.name for p in listed}) == 45_069


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A made-up tensor, all of it."""
    data = b"".join(pieces(flat_part(name, 0, torch.Size(shape).numel()), dtype))
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


@fixed(50)
@given(st.data())
def test_a_rectangle_of_weights_is_cut_out_of_the_whole(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 2000))
    rows = data.draw(st.integers(1, max(1, 3_000_000 // columns)))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2)))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, columns)] * 2)))
    name = data.draw(st.text(max_size=3))
    found = b"".join(pieces(Part(name, columns, (first, last), (low, high)), torch.bfloat16))
    expected = whole(name, (rows, columns), torch.bfloat16)[first:last, low:high]
    assert found == expected.contiguous().view(torch.uint8).numpy().tobytes()


def test_weights_in_bfloat16_are_those_in_float32_rounded() -> None:
    shape = (PERIOD + 12_345,)
    exact = whole("a", shape, torch.float32)
    assert torch.equal(exact.bfloat16(), whole("a", shape, torch.bfloat16))
    assert np.abs(exact.mean().item()) < 1e-3
    assert not torch.equal(exact, whole("b", shape, torch.float32))


@fixed(100)
@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_are_those_of_torch(n: int, parts: int) -> None:
    expected = [tuple(c.tolist()) for c in torch.chunk(torch.arange(n), parts)]
    found = [chunk(n, parts, index) for index in range(parts)]
    cut = [tuple(range(start, start + length)) for start, length, _ in found]
    assert [c for c in cut if c] == [c for c in expected if c]


@fixed(100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 7))
def test_partitions_hold_every_element_once(lengths: list[int], count: int) -> None:
    listed = [Parameter(str(i), (length,), None) for i, length in enumerate(lengths)]
    cut = zero_partitions(listed, count)
    held = [
        (part.name, element) for _, parts in cut for part in parts for element in range(*part.rows)
    ]
    assert held == [(str(i), element) for i, n in enumerate(lengths) for element in range(n)]
    assert len({length for length, _ in cut}) == 1
    assert all(sum(part.numel for part in parts) <= length for length, parts in cut)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_files_hold_the_weights(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_checkpoint(source, TINY, 4, layout=layout, dtype=dtype, with_buffers=True)
    streammerge.merge(source, target, dtype="bfloat16")
    assert first_fault(TINY, dtype, find_tensors(target)) is None
    for name, buffer in buffers(TINY, 0).items():
        assert name in find_tensors(target)
        if buffer.ndim == 2:
            found = find_tensors(target)[name]
            assert found.shape[1] == buffer.shape[1]


def test_experts_are_merged(tmp_path: Path) -> None:
    model = dataclasses.replace(MODELS["moe-256-tiny"], experts=8, layers=1)
    write_checkpoint(tmp_path / "source", model, 4)
    streammerge.merge(tmp_path / "source", tmp_path / "target")
    assert first_fault(model, torch.bfloat16, find_tensors(tmp_path / "target")) is None


@pytest.mark.parametrize("layout", ["shard0", "tp"])
def test_torch_reads_its_own_formats(tmp_path: Path, layout: str) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for form in ("dcp", "safetensors"):
        write_checkpoint(tmp_path / form, TINY, 4, layout=layout, form=form)
    saved = tmp_path / "whole.pt"
    dcp_to_torch_save(tmp_path / "dcp" / DCP_FOLDER, saved)
    assert first_fault(TINY, torch.bfloat16, find_tensors(saved)) is None
    target = tmp_path / "target"
    target.mkdir()
    names = dict.fromkeys((p.name for p in parameters(TINY)), 1)
    consolidate_safetensors_files(str(tmp_path / "safetensors"), str(target), names)
    assert first_fault(TINY, torch.bfloat16, find_tensors(target)) is None


def test_partitions_of_zero_are_the_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", TINY, 3, form="zero")
    step = tmp_path / "source" / (tmp_path / "source" / "latest").read_text()
    partitions = [
        torch.load(step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")[
            "optimizer_state_dict"
        ]["single_partition_of_fp32_groups"][0]
        for rank in range(3)
    ]
    flat, at = torch.cat(partitions), 0
    module = torch.load(step / "mp_rank_00_model_states.pt")["module"]
    for parameter in parameters(TINY):
        expected = whole(parameter.name, parameter.shape, torch.float32)
        assert torch.equal(flat[at : at + parameter.numel].view(parameter.shape), expected)
        assert torch.equal(module[parameter.name], expected.bfloat16())
        at += parameter.numel
    assert not flat[at:].any()


def test_holes_are_refused_where_torch_writes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves no holes"):
        write_checkpoint(tmp_path / "source", TINY, 4, sparse=True, form="dcp")


def test_a_recipe_can_be_sent_to_another_process() -> None:
    import pickle

    recipe = Recipe(TINY, 4, "shard0", torch.bfloat16, {}, sparse=True)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


# --- results ---


@pytest.fixture
def result(tmp_path: Path) -> Path:
    state = {p.name: whole(p.name, p.shape, torch.bfloat16) for p in parameters(TINY)}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def rewrite(result: Path, name: str, tensor: torch.Tensor | None) -> None:
    state = load_file(result / "model.safetensors")
    del state[name]
    if tensor is not None:
        state[name] = tensor
    save_file(state, result / "model.safetensors")


def test_a_right_result_has_no_fault(result: Path) -> None:
    assert first_fault(TINY, torch.bfloat16, find_tensors(result)) is None


def test_faults_of_a_result_are_found(result: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    right = whole(name, (64, 96), torch.bfloat16)

    def fault(tensor: torch.Tensor | None) -> str | None:
        rewrite(result, name, tensor)
        found = first_fault(TINY, torch.bfloat16, find_tensors(result))
        rewrite(result, name, right)
        return found

    last = right.clone()
    last.view(torch.int16)[-1, -1] ^= 1
    assert fault(last) == f"{name}: values differ"
    swapped = right[[1, 0, *range(2, 64)]]
    assert fault(swapped) == f"{name}: values differ"
    assert fault(right.T.contiguous()) == f"{name}: shape (96, 64), expected (64, 96)"
    assert fault(right.float()) == f"{name}: torch.float32, expected torch.bfloat16"
    assert fault(right) is None
    rewrite(result, name, None)
    missing = first_fault(TINY, torch.bfloat16, find_tensors(result))
    assert missing == f"1 of 27 tensors missing: {name} ..."


def test_stand_ins_merge(tmp_path: Path) -> None:
    import standin_mmap
    import standin_verl

    source = tmp_path / "source"
    write_checkpoint(source, TINY, 4)
    for main in (standin_mmap.main, standin_verl.main):
        target = tmp_path / main.__module__
        main(source, target)
        assert first_fault(TINY, torch.bfloat16, find_tensors(target)) is None


def test_what_was_made_is_described(tmp_path: Path) -> None:
    for form in FORMATS:
        write_checkpoint(tmp_path / form, TINY, 2, form=form)
        described = json.loads((tmp_path / form / "made.json").read_text())
        assert Model(**described["model"]) == TINY
        assert described["dtype"] == ("float32" if form == "zero" else "bfloat16")
