"""The command line as a user meets it: options, messages, progress, signals, exit codes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import checkpoints
import pytest
import torch
from oracles import assert_same_tensors, load_directory, raw_bits
from safetensors import safe_open
from safetensors.torch import load_file

import streammerge
from streammerge import Progress, merge_non_dtensor_shards
from streammerge.arguments import (
    check_parser,
    inspect_parser,
    merge_parser,
    upload_parser,
    verify_parser,
)
from streammerge.cli import main
from streammerge.progress import ProgressDisplay

ROOT = Path(__file__).resolve().parents[1]
STORED = "fsdp2_w4__t213"
TIMEOUT_SECONDS = 60

FLOATS = {
    "double": torch.tensor([1 / 3, -1e300, float("inf")], dtype=torch.float64),
    "single": torch.tensor([1 / 3, 65520.0, -0.0, 1e-42]),
    "half": torch.tensor([1 / 3, 65504.0], dtype=torch.float16),
    "brain": torch.tensor([1 / 3, 3e38], dtype=torch.bfloat16),
    "eighth": torch.tensor([0.25, 448.0]).to(torch.float8_e4m3fn),
}
OTHERS = {
    "steps": torch.tensor([2**62, -1]),
    "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    "short": torch.tensor([-(2**15)], dtype=torch.int16),
    "mask": torch.tensor([True, False]),
    "phase": torch.tensor([1 + 2j], dtype=torch.complex64),
}


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def call(*arguments: str | Path) -> Done:
        code = main([*map(str, arguments)])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoints.save_plain(tmp_path / "source", [{**FLOATS, **OTHERS}] * 2)
    return tmp_path / "source"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def process(*arguments: str | Path, **options: Any) -> Done:
    """Run ``python -m streammerge`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "streammerge", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        **{"env": environment(), **options},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def child(code: str, *arguments: str | Path) -> Done:
    """Run Python code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env=environment(),
    )
    return Done(done.returncode, done.stdout, done.stderr)


# --- arguments ------------------------------------------------------------------------------------


def test_the_options_are_these() -> None:
    common = ["--debug", "--help", "--json", "--quiet", "--verbose", "-h"]
    source = ["--format", "--pattern", "--prefix", "--tag"]
    assert option_strings(inspect_parser()) == sorted([*common, *source])
    assert option_strings(check_parser()) == sorted([*common, "--no-model"])
    assert option_strings(upload_parser()) == sorted([*common, "--private"])
    both = [
        *common,
        *source,
        "--assets",
        "--base",
        "--compat",
        "--device",
        "--dtype",
        "--keep-dtype",
        "--keep-packed",
        "--lora",
        "--lora-alpha",
        "--memory",
        "--names-from",
        "--raw",
        "--rslora",
        "--transpose-experts",
        "--untie",
        "--workers",
    ]
    assert option_strings(merge_parser()) == sorted(
        [
            *both,
            "--check-crc",
            "--dry-run",
            "--max-shard-size",
            "--overwrite",
            "--private",
            "--push-to-hub",
            "--replicas",
            "--restart",
            "--verify",
        ]
    )
    assert option_strings(verify_parser()) == sorted([*both, "--atol", "--rtol"])


def test_the_choices_and_defaults_are_these() -> None:
    actions = {action.dest: action for action in merge_parser()._actions}
    assert {name: list(a.choices) for name, a in actions.items() if a.choices} == {
        "format": ["auto", "fsdp", "bin", "dcp", "dcp-safetensors", "deepspeed", "hf", "hf-bin"],
        "dtype": ["keep", "auto", "float32", "float16", "bfloat16"],
        "device": ["auto", "cpu", "cuda"],
        "replicas": ["check", "first", "check-all"],
        "lora": ["fold", "split", "keep"],
        "transpose_experts": ["yes", "no"],
        "compat": [4],
    }
    assert {name: a.default for name, a in actions.items() if name not in ("help", "paths")} == {
        "format": "auto",
        "prefix": None,
        "pattern": None,
        "tag": None,
        "dtype": "keep",
        "keep_dtype": [],
        "assets": None,
        "untie": False,
        "keep_packed": False,
        "names_from": None,
        "transpose_experts": None,
        "compat": None,
        "lora": None,
        "lora_alpha": None,
        "rslora": False,
        "base": None,
        "device": "auto",
        "replicas": "check",
        "check_crc": False,
        "verify": False,
        "max_shard_size": "5GB",
        "memory": None,
        "workers": None,
        "push_to_hub": None,
        "private": False,
        "raw": False,
        "overwrite": False,
        "restart": False,
        "dry_run": False,
        "json": False,
        "quiet": False,
        "verbose": False,
        "debug": False,
    }


def option_strings(parser: Any) -> list[str]:
    return sorted(option for action in parser._actions for option in action.option_strings)


@pytest.mark.parametrize(
    "words",
    [
        "merge S D --quiet --max-shard-size 30",
        "merge --quiet --max-shard-size 30 S D",
        "merge S --quiet D --max-shard-size 30",
        "merge S --max-shard-size 30 D --quiet",
        "--quiet merge --max-shard-size=30 S D",
        "--max-shard-size 30 --quiet merge S D",
        "merge --quiet --max-shard-size 30 -- S D",
    ],
)
def test_options_may_stand_anywhere(words: str, source: Path, tmp_path: Path, run: Run) -> None:
    places = {"S": source, "D": tmp_path / "merged"}
    done = run(*(places.get(word, word) for word in words.split()))
    assert done == Done(0, "", "")
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1


def test_names_that_look_like_options(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.rename(tmp_path / "--raw")
    monkeypatch.chdir(tmp_path)
    assert run("merge", "--quiet", "--", "--raw", "-merge").code == 0
    assert (tmp_path / "-merge" / "model.safetensors").exists()


def test_a_directory_of_the_name_of_a_command(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.rename(tmp_path / "merge")
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "merge").code == 0
    assert run("merge", "merge", "inspect", "--quiet").code == 0
    assert (tmp_path / "inspect" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("mrge S D", "'mrge'"),
        ("--quiet", "command"),
        ("merge", "directory"),
        ("merge S", "source and a target"),
        ("inspect", "directory"),
        ("inspect S --raw", "--raw"),
        ("merge S D --qiet", "--qiet"),
        ("merge S D --quie", "--quie"),
        ("merge S D --dtype", "--dtype"),
        ("merge S D --dtype int8", "'int8'"),
        ("merge S D --replicas some", "'some'"),
        ("merge S D --device tpu", "'tpu'"),
        ("merge S D --workers two", "'two'"),
        ("merge S D --workers 0", "workers must be at least 1"),
        ("merge S D --memory much", "'much'"),
        ("merge S D --memory -1", "'-1'"),
        ("merge S D --memory 4095", "at least 4,096 bytes"),
        ("merge S D --max-shard-size 5XB", "'5XB'"),
        ("merge S D --max-shard-size 0", "at least 1 byte"),
        ("merge S D --quiet --verbose", "--verbose"),
        ("merge S D --raw --dtype bfloat16", "raw"),
        ("merge S D --raw --lora fold", "raw"),
        ("merge S D --raw --keep-dtype w*", "raw"),
        ("merge S D --private", "--push-to-hub"),
        ("merge S D --compat 5", "--compat"),
        ("merge S D --lora-alpha much", "--lora-alpha"),
        ("merge S D --lora split", "no LoRA adapter"),
        ("check", "directory"),
        ("check S D", "one directory"),
        ("upload S", "repository"),
        ("merge S D --dry-run --workers -2", "workers"),
    ],
)
def test_wrong_usage(words: str, part: str, source: Path, tmp_path: Path, run: Run) -> None:
    before = checkpoints.snapshot(tmp_path)
    places = {"S": source, "D": tmp_path / "merged"}

    done = run(*(places.get(word, word) for word in words.split()))

    assert done.code == 2
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("streammerge: error: ")
    assert part in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    assert checkpoints.snapshot(tmp_path) == before


@pytest.mark.parametrize("size", ["1000TB", "9" * 30 + "GB", "9" * 400])
@pytest.mark.parametrize("option", ["--memory", "--max-shard-size"])
def test_sizes_without_measure(
    option: str, size: str, source: Path, tmp_path: Path, run: Run
) -> None:
    done = run("merge", source, tmp_path / "merged", option, size, "--dtype", "bfloat16")
    assert "unexpected" not in done.err
    assert done.code in (0, 2)


@pytest.mark.parametrize("command", ["merge", "inspect"])
def test_help_of_a_command(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"usage: streammerge {command} SRC [SRC ...]")
    parser = {"merge": merge_parser, "inspect": inspect_parser}[command]()
    for option in option_strings(parser):
        assert option in done.out
    assert max(map(len, done.out.splitlines())) <= max(80, int(os.environ.get("COLUMNS", "80")))


def test_help_of_all(run: Run) -> None:
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    assert "merge SRC [SRC ...] DST" in done.out
    assert "inspect SRC" in done.out
    assert "exit codes: 0 done, 1 failed, 2 wrong usage" in done.out


def test_no_arguments_at_all(run: Run) -> None:
    done = run()
    assert done.code == 2
    assert "merge SRC [SRC ...] DST" in done.out + done.err


def test_version(run: Run) -> None:
    assert run("--version") == Done(0, f"streammerge {streammerge.__version__}\n", "")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", streammerge.__version__)


# --- what is said ---------------------------------------------------------------------------------

SUMMARY = re.compile(
    r"(?P<target>/\S+): (?P<tensors>\d+) tensors, (?P<bytes>[\d.]+ k?B) in "
    r"(?P<seconds>\d+\.\d) s \((?P<rate>[\d.]+ [kMG]?B)/s\), peak memory (?P<peak>[\d.]+ MB)"
)


def test_summary(source: Path, tmp_path: Path, run: Run) -> None:
    done = run("merge", source, tmp_path / "merged")
    assert done.code == 0
    assert_warnings_only(done.err)
    found = SUMMARY.fullmatch(done.out.rstrip("\n"))
    assert found is not None, done.out
    assert found["target"] == str(tmp_path / "merged")
    expected = {**FLOATS, **OTHERS}
    assert int(found["tensors"]) == len(expected)
    assert found["bytes"] == f"{sum(t.nbytes for t in expected.values())} B"
    assert float(found["peak"].split()[0]) > 20


def assert_warnings_only(err: str) -> None:
    """Of a checkpoint without config and tokenizer, at least that is said."""
    lines = err.splitlines()
    assert all(line.startswith("streammerge: warning: ") for line in lines), err
    assert any("config.json and tokenizer missing" in line for line in lines), err


def test_quiet_says_nothing(source: Path, tmp_path: Path, run: Run) -> None:
    assert run("merge", source, tmp_path / "merged", "--quiet") == Done(0, "", "")
    assert run("inspect", source, "--quiet") == Done(0, "", "")
    assert run("merge", source, tmp_path / "other", "--quiet", "--dry-run") == Done(0, "", "")
    refused = run("merge", source, tmp_path / "merged", "--quiet")
    assert refused.code == 1
    assert refused.err.startswith("streammerge: error: ")


def test_verbose_says_more(tmp_path: Path, run: Run) -> None:
    state = {"w": torch.ones(2), **{f"m{i}._extra_state": None for i in range(9)}}
    checkpoints.save_plain(tmp_path / "source", [state] * 2)

    short = run("merge", tmp_path / "source", tmp_path / "a")
    long = run("merge", tmp_path / "source", tmp_path / "b", "--verbose")

    assert "and 6 more" in short.out
    assert "m8._extra_state" not in short.out
    assert "m8._extra_state" in long.out
    assert "model.safetensors" in long.out
    assert "compared the copies of 1 tensors, 16 B, on cpu" in long.out
    assert SUMMARY.search(long.out)


def test_what_is_left_out_is_named(tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored(STORED, tmp_path / "source")
    (tmp_path / "source" / "huggingface" / "pytorch_model.bin").write_bytes(b"old weights")
    (tmp_path / "source" / "huggingface" / "chat_template.jinja").write_text("{{ x }}")
    done = run("merge", tmp_path / "source", tmp_path / "merged")
    assert "pytorch_model.bin" in done.out
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {"model.safetensors", "config.json", "chat_template.jinja"}


def test_copies_that_differ_are_named(tmp_path: Path, run: Run) -> None:
    states = [{"a": torch.ones(3), "b": torch.full((3,), float(rank))} for rank in range(3)]
    checkpoints.save_plain(tmp_path / "source", states)
    arguments = ("merge", tmp_path / "source", tmp_path / "merged", "--replicas", "first")
    for option in ((), ("--quiet",), ("--json",)):
        done = run(*arguments, "--overwrite", *option)
        assert done.code == 0
        assert "'b'" in done.err
        assert "ranks 1, 2" in done.err
        assert "'a'" not in done.err
    differences = json.loads(done.out)["replicas"]["differences"]
    assert [(d["name"], d["ranks"]) for d in differences] == [("b", [1, 2])]
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")["b"], torch.zeros(3))


def test_json(source: Path, tmp_path: Path, run: Run) -> None:
    done = run("merge", source, tmp_path / "merged", "--json", "--max-shard-size", "30")
    assert done.code == 0
    assert_warnings_only(done.err)
    report = json.loads(done.out)
    expected = {**FLOATS, **OTHERS}
    assert report["target"] == str(tmp_path / "merged")
    assert sorted(report["files"]) == sorted(p.name for p in (tmp_path / "merged").iterdir())
    assert report["tensors"] == len(expected)
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert report["seconds"] > 0
    assert report["bytes_per_second"] > 0
    assert report["peak_memory"] > 20e6
    assert report["replicas"]["tensors"] == len(expected)
    assert report["replicas"]["bytes"] == 2 * report["bytes"]
    assert report["replicas"]["differences"] == []
    assert report["skipped"] == report["left_out"] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("merge S D --json", 1),
        ("--json merge nowhere D", 1),
        ("inspect nowhere --json", 1),
        ("merge S D --json --dtype int8", 2),
        ("mrge --json", 2),
    ],
)
def test_json_of_a_failure(words: str, code: int, source: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "merged").write_text("in the way")
    places = {"S": source, "D": tmp_path / "merged"}
    done = run(*(places.get(word, word) for word in words.split()))
    assert done.code == code
    found = json.loads(done.out)
    assert found["exit_code"] == code
    assert f"streammerge: error: {found['error']}\n" in done.err
    assert set(found) == {"error", "hint", "exit_code"}


# --- looking first --------------------------------------------------------------------------------


def test_dry_run(tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored(STORED, tmp_path / "source")
    (tmp_path / "source" / "huggingface" / "model.safetensors").write_bytes(b"old")
    before = checkpoints.snapshot(tmp_path)
    target = tmp_path / "new" / "merged"
    arguments = ("merge", tmp_path / "source", target, "--max-shard-size", "5KB")

    text = run(*arguments, "--dry-run")
    found = run(*arguments, "--dry-run", "--json")

    assert (text.code, text.err, found.code, found.err) == (0, "", 0, "")
    assert checkpoints.snapshot(tmp_path) == before
    plan = json.loads(found.out)
    assert plan["dry_run"] is True
    assert plan["disk_bytes_missing"] == 0
    assert plan["left_out"] == ["model.safetensors"]
    assert "side files not copied: model.safetensors" in text.out
    assert f"{plan['predicted_peak_memory'] / 1e6:.1f} MB peak memory" in text.out

    # It says what then happens.
    assert run(*arguments, "--quiet").code == 0
    sizes = {path.name: path.stat().st_size for path in target.iterdir()}
    index = sizes.pop("model.safetensors.index.json")
    texts = [text for text in plan["texts"] if text["name"] != "model.safetensors.index.json"]
    assert {f["name"]: f["bytes"] for f in plan["files"] + plan["assets"] + texts} == sizes
    assert plan["index"] is True
    assert plan["disk_bytes"] == sum(sizes.values()) + index
    for name, size in sizes.items():
        assert f"{name}  {size:,} bytes" in text.out
    tensors = {t["name"]: t for f in plan["files"] for t in f["tensors"]}
    expected = load_file(checkpoints.DATA / STORED / "expected.safetensors")
    del expected["lm_head.weight"]  # tied
    assert {name: t["shape"] for name, t in tensors.items()} == {
        name: list(tensor.shape) for name, tensor in expected.items()
    }
    assert plan["tensor_bytes"] == sum(tensor.nbytes for tensor in expected.values())


def test_dry_run_names_what_is_skipped(tmp_path: Path, run: Run) -> None:
    state = {"w": torch.ones(2), "m._extra_state": None}
    checkpoints.save_plain(tmp_path / "source", [state])
    done = run("merge", tmp_path / "source", tmp_path / "merged", "--dry-run")
    assert "m._extra_state" in done.out


def test_dry_run_names_missing_space(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((1, 1, 10**9, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    arguments = ("merge", source, tmp_path / "merged", "--dry-run")
    text, found = run(*arguments), run(*arguments, "--json")
    assert (text.code, found.code) == (0, 0)
    plan = json.loads(found.out)
    assert plan["disk_bytes_missing"] == plan["disk_bytes"] - 100
    assert f"the disk lacks {plan['disk_bytes_missing']} B" in text.out


def test_inspect_as_text(run: Run) -> None:
    source = checkpoints.DATA / "fsdp2_hsdp_2x2__t213"
    done = run("inspect", source)
    assert (done.code, done.err) == (0, "")
    assert "world size 4" in done.out
    assert re.search(r"^mesh 2x2 \(\w+, \w+\)$", done.out, re.MULTILINE)
    expected = load_file(source / "expected.safetensors")
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.split()}
    for name, tensor in expected.items():
        assert str(list(tensor.shape)) in rows[name]
        assert rows[name].split()[-1] == f"{tensor.nbytes:,}"
    assert any("(Replicate(), Shard(0))" in row for row in rows.values())
    numel = sum(tensor.numel() for tensor in expected.values())
    assert f"{len(expected)} tensors, {numel:,} parameters" in done.out


def test_inspect_as_json(run: Run) -> None:
    source = checkpoints.DATA / "fsdp2_tp_2x2__t213"
    done = run("inspect", source, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    expected = load_file(source / "expected.safetensors")
    assert found["root"] == str(source)
    assert found["world_size"] == 4
    assert [file["path"] for file in found["files"]] == [
        str(checkpoints.rank_file(source, rank)) for rank in range(4)
    ]
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(tensors) == set(expected)
    with safe_open(source / "expected.safetensors", "pt") as stored:
        for name, tensor in expected.items():
            assert tensors[name]["shape"] == list(tensor.shape)
            assert tensors[name]["bytes"] == tensor.nbytes
            assert tensors[name]["dtype"] == stored.get_slice(name).get_dtype()
    shardings = {tuple(tensor["placements"] or ()) for tensor in found["tensors"]}
    assert ("_StridedShard(0, split_factor=2)", "Shard(0)") in shardings
    assert {"shape": [2, 2], "parallel": 1} in [
        {key: mesh[key] for key in ("shape", "parallel")} for mesh in found["meshes"]
    ]
    assert found["totals"]["tensors"] == len(expected)
    assert found["totals"]["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert found["totals"]["parameters"] == sum(tensor.numel() for tensor in expected.values())


def test_inspect_names_what_is_no_tensor(tmp_path: Path, run: Run) -> None:
    checkpoints.save_plain(tmp_path / "source", [{"w": torch.ones(2), "m._extra_state": None}])
    assert "m._extra_state" in run("inspect", tmp_path / "source").out
    found = json.loads(run("inspect", tmp_path / "source", "--json").out)
    assert found["skipped"] == [{"name": "m._extra_state", "kind": "None"}]


def test_inspect_writes_and_reads_no_data(tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored(STORED, tmp_path / "source")
    text = run("inspect", tmp_path / "source").out
    before = checkpoints.snapshot(tmp_path)
    for rank in range(4):
        path = checkpoints.rank_file(tmp_path / "source", rank)
        with zipfile.ZipFile(path) as archive:
            names = [name.split("/", 1)[1] for name in archive.namelist() if "/data/" in name]
        for name in names:
            start, end = checkpoints.member_range(path, name)
            checkpoints.poke(path, start, b"\xff" * (end - start))
    changed = checkpoints.snapshot(tmp_path)
    assert changed != before
    assert run("inspect", tmp_path / "source").out == text
    assert checkpoints.snapshot(tmp_path) == changed


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [([0, 1], [2, 3]), ([3], [0, 2], [1])])
def test_several_sources(nodes: tuple[list[int], ...], tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored(STORED, tmp_path / "whole")
    sources = [tmp_path / f"node{i}" for i in range(len(nodes))]
    for folder, ranks in zip(sources, nodes, strict=True):
        folder.mkdir()
        for rank in ranks:
            path = checkpoints.rank_file(tmp_path / "whole", rank)
            path.rename(folder / path.name)
    (tmp_path / "whole" / "huggingface").rename(sources[-1] / "huggingface")

    assert run("merge", *sources, tmp_path / "merged", "--quiet", "--raw").code == 0

    expected = load_file(checkpoints.DATA / STORED / "expected.safetensors")
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)
    assert (tmp_path / "merged" / "config.json").exists()
    assert run("inspect", *sources).code == 0


def test_the_same_source_twice(source: Path, tmp_path: Path, run: Run) -> None:
    assert run("merge", source, f"{source}/", tmp_path / "merged", "--quiet").code == 0


def test_a_parent_as_source(tmp_path: Path, run: Run) -> None:
    parent = tmp_path / "global_step_100"
    checkpoints.copy_stored(STORED, parent / "actor")
    (parent / "data").mkdir()
    (parent / "data" / "loader.pt").write_bytes(b"")
    (parent / ".cache").mkdir()
    # Into the parent itself, twice: the first result is no candidate.
    for options in ((), ("--overwrite",)):
        assert run("merge", parent, parent / "merged", "--quiet", "--raw", *options).code == 0
    expected = load_file(checkpoints.DATA / STORED / "expected.safetensors")
    assert_same_tensors(load_directory(parent / "merged"), expected)


def test_relative_paths(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)
    assert run("merge", ".", "../merged/", "--quiet").code == 0
    assert_same_tensors(load_directory(tmp_path / "merged"), {**FLOATS, **OTHERS})


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_leaves_what_is_no_float(dtype: str, source: Path, tmp_path: Path, run: Run) -> None:
    assert run("merge", source, tmp_path / "merged", "--dtype", dtype, "--quiet").code == 0
    target = getattr(torch, dtype)
    expected = {name: tensor.to(target) for name, tensor in FLOATS.items()} | OTHERS
    assert_same_tensors(load_directory(tmp_path / "merged"), expected)


def test_every_run_writes_the_same(tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored("fsdp2_moe__t213", tmp_path / "source")
    names = sorted(path.name for path in (tmp_path / "source").glob("*.pt"))
    found = set()
    for i, options in enumerate(
        (
            ("--workers", "1"),
            ("--workers", "4"),
            ("--workers", "3", "--memory", "16KiB"),
            ("--workers", "1", "--memory", "4KiB"),
            ("--replicas", "check-all"),
        )
    ):
        target = tmp_path / f"merged{i}"
        common = ("--max-shard-size", "3KB", "--dtype", "float16", "--quiet")
        assert run("merge", tmp_path / "source", target, *common, *options).code == 0
        found.add(tuple(checkpoints.digests(target).items()))
        # The order in which the directory lists the files must not matter.
        for name in names if i % 2 else reversed(names):
            path = tmp_path / "source" / name
            path.rename(path.with_suffix(".aside"))
            path.with_suffix(".aside").rename(path)
    assert len(found) == 1
    assert len(found.pop()) > 3


@pytest.mark.parametrize("errors", [{}, {"sendfile": errno.EINVAL}])
@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_every_way_to_copy_writes_the_same(
    code: int,
    errors: dict[str, int],
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoints.DATA / STORED
    assert run("merge", source, tmp_path / "kernel", "--quiet").code == 0
    calls = []
    for name, number in {"copy_file_range": code, **errors}.items():

        def fail(*_: object, name: str = name, number: int = number) -> int:
            calls.append(name)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, fail)
    assert run("merge", source, tmp_path / "other", "--quiet", "--memory", "4KiB").code == 0
    assert set(calls) == {"copy_file_range", *errors}
    assert checkpoints.digests(tmp_path / "other") == checkpoints.digests(tmp_path / "kernel")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path, run: Run) -> None:
    checkpoints.copy_stored(STORED, tmp_path / "source")
    extra = tmp_path / "source" / "huggingface" / "tokenizer"
    extra.mkdir()
    (extra / "vocab.txt").write_text("a\n")
    (extra / "vocab.txt").chmod(0o400)
    target = tmp_path / "new" / "merged"
    previous = os.umask(umask)
    try:
        options = ("--max-shard-size", "5KB", "--quiet")
        assert run("merge", tmp_path / "source", target, *options).code == 0
    finally:
        os.umask(previous)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in target.rglob("*")}
    files = {path.name: mode for path, mode in modes.items() if path.is_file()}
    assert {"config.json", "vocab.txt", "model.safetensors.index.json"} <= set(files)
    assert set(files.values()) == {0o666 & ~umask}
    for folder in (target.parent, target, target / "tokenizer"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


# --- the process ----------------------------------------------------------------------------------


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, streammerge, streammerge.cli; print({'torch', 'numpy'} & {*sys.modules})"
    assert child(code) == Done(0, "set()\n", "")


def test_public_names_are_there() -> None:
    assert sorted(streammerge.__all__) == streammerge.__all__
    for name in streammerge.__all__:
        assert hasattr(streammerge, name)


def test_the_module_and_the_entry_point_are_one(source: Path, tmp_path: Path) -> None:
    entry_point = re.search(
        r'^\[project\.scripts\]\nstreammerge = "(\S+):(\S+)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert entry_point is not None
    module, function = entry_point.groups()
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    for arguments in (("inspect", source), ("merge", source), ("--help",), ("inspect", "nowhere")):
        assert child(code, *arguments) == process(*arguments)


def test_a_reader_that_has_seen_enough(source: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "streammerge", "inspect", str(source)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in environment().items() if k != "PYTHONUNBUFFERED"},
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("option", [(), ("--json",)])
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_under_the_output(option: tuple[str, ...], exists: bool, source: Path) -> None:
    path = source if exists else source / "nowhere"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "streammerge", "inspect", str(path), *option],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    what = "standard output: No space left on device" if exists else f"{path}: no such directory"
    assert done.stderr == f"streammerge: error: {what}\n"
    assert done.returncode == 1


def test_an_error_without_a_file_is_not_one_of_the_output(
    source: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a network have no file either."""

    def fail(*_: object) -> NoReturn:
        raise ConnectionError("no route")

    monkeypatch.setattr("streammerge.cli.check_directory", fail)
    done = run("check", source)
    assert done.code == 1
    assert done.err.startswith("streammerge: error: unexpected ConnectionError: no route\n")


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    checkpoints.save_plain(tmp_path / "source", [{"größe": torch.ones(2)}])
    ascii_only = environment(PYTHONIOENCODING="ascii")
    done = process("inspect", tmp_path / "source", env=ascii_only)
    assert done.code == 0, done.err
    target = os.fsencode(tmp_path) + b"/merged\xff"
    done = process("merge", tmp_path / "source", os.fsdecode(target))
    assert done.code == 0, done.err
    assert os.path.isfile(target + b"/model.safetensors")


def test_names_steer_no_terminal(tmp_path: Path, run: Run) -> None:
    """Nor do they look like lines of ours."""
    state = {"_orig_mod.a\x1b[2Jb": torch.ones(2), "c\nwarning: d": torch.ones(2)}
    checkpoints.save_plain(tmp_path / "source", [{"model": state, "e\x9bf": 3}])
    results = [tmp_path / "merged\n", tmp_path / "dry"]
    for command in (
        ["inspect", tmp_path / "source"],
        ["merge", tmp_path / "source", results[0], "--dtype", "float16", "--verbose"],
        ["merge", tmp_path / "source", results[1], "--dry-run", "--verbose", "--untie"],
        ["verify", tmp_path / "source", results[0], "--raw"],
        ["check", results[0], "--no-model"],
    ):
        done = run(*command)
        assert done.code in (0, 3), done.err
        lines = [*done.out.split("\n"), *done.err.split("\n")]
        assert all(map(str.isprintable, lines))
        assert not [line for line in lines if line.startswith("warning: d")]


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream(closed: str, source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streammerge", "merge", str(source), str(tmp_path / "merged")]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}>&-', "sh", *command],
        env=environment(),
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0
    assert_same_tensors(load_directory(tmp_path / "merged"), {**FLOATS, **OTHERS})


def test_debug_shows_where_it_failed(tmp_path: Path) -> None:
    done = process("inspect", tmp_path / "nowhere", "--debug")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err
    assert f"streammerge: error: {tmp_path}/nowhere: no such directory" in done.err


# --- progress -------------------------------------------------------------------------------------

# Slow in an honest way: the files are merged as ever, with a pause before each copy.
SLOW_MERGE = """
import sys, time
import streammerge.writer
from streammerge.cli import main

copy_range = streammerge.writer._copy_range
def slow_copy_range(*arguments):
    time.sleep({pause})
    copy_range(*arguments)
streammerge.writer._copy_range = slow_copy_range
{setup}
sys.exit(main(sys.argv[1:]))
"""


def test_no_bar_where_no_terminal_is(tmp_path: Path) -> None:
    checkpoints.save_many(tmp_path / "source", tensors=40, numel=100)
    code = SLOW_MERGE.format(pause=0.01, setup="")
    done = child(code, "merge", tmp_path / "source", tmp_path / "merged", "--raw")
    assert done.code == 0
    assert done.err == ""


def test_a_line_now_and_then(tmp_path: Path) -> None:
    total = checkpoints.save_many(tmp_path / "source", tensors=40, numel=100)
    assert total == 16_000
    setup = "import streammerge.progress; streammerge.progress._SECONDS_PER_LINE = 0.05"
    code = SLOW_MERGE.format(pause=0.03, setup=setup)
    options = ("--max-shard-size", "800", "--workers", "1", "--raw")
    done = child(code, "merge", tmp_path / "source", tmp_path / "merged", *options)
    assert done.code == 0
    lines = done.err.splitlines()
    pattern = re.compile(
        r"streammerge: merging [\d.]+ k?B of 16\.0 kB \((\d+)%\), [\d.]+ k?B/s(, \d+ s to go)?"
    )
    shares = [pattern.fullmatch(line) for line in lines]
    assert len(shares) >= 2
    assert all(shares), done.err
    percents = [int(share[1]) for share in shares if share]
    assert percents == sorted(percents)
    assert percents[-1] <= 100

    quiet = child(code, "merge", tmp_path / "source", tmp_path / "other", "--quiet")
    assert (quiet.out, quiet.err) == ("", "")


@pytest.mark.parametrize("columns", [80, 0])
def test_a_bar_on_a_terminal(columns: int, tmp_path: Path) -> None:
    """Also on one that does not know its width, as many a container's."""
    checkpoints.save_many(tmp_path / "source", tensors=40, numel=100)
    code = SLOW_MERGE.format(pause=0.03, setup="")
    options = ("--max-shard-size", "800", "--workers", "1")
    arguments = ("merge", tmp_path / "source", tmp_path / "merged", *options)
    status, shown, out = on_terminal(code, *arguments, columns=columns)
    assert status == 0
    assert "\r" in shown
    assert "merging" in shown
    assert re.search(r"\d+%\|.*\| [\d.]+k?/16\.0k \[\d\d:\d\d<\d\d:\d\d, +[\d.]+k?B/s\]", shown)
    assert SUMMARY.search(out)


def test_no_bar_on_a_terminal_if_quiet(tmp_path: Path) -> None:
    checkpoints.save_many(tmp_path / "source", tensors=4, numel=100)
    code = SLOW_MERGE.format(pause=0.01, setup="")
    status, shown, out = on_terminal(
        code, "merge", tmp_path / "source", tmp_path / "merged", "--quiet"
    )
    assert (status, shown, out) == (0, "", "")


def on_terminal(code: str, *arguments: str | Path, columns: int = 80) -> tuple[int, str, str]:
    """Run Python code whose stderr is a terminal; returns exit code, stderr and stdout."""
    terminal, other_end = pty.openpty()
    fcntl.ioctl(
        other_end, termios.TIOCSWINSZ, struct.pack("4H", 24 if columns else 0, columns, 0, 0)
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=other_end,
        text=True,
        env=environment(),
    ) as running:
        os.close(other_end)
        shown = b""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while time.monotonic() < deadline:
                ready, _, _ = select.select([terminal], [], [], 1)
                if not ready:
                    continue
                try:
                    data = os.read(terminal, 4096)
                except OSError:  # EIO: nobody has the other end open any more
                    break
                if not data:
                    break
                shown += data
            out, _ = running.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            running.kill()
            os.close(terminal)
    return running.returncode, shown.decode(), out


@pytest.mark.parametrize(
    "command", ["inspect {0}", "merge {0} {1} --dry-run --verbose", "merge {0} {1} --verbose"]
)
def test_what_a_name_holds_steers_no_terminal(tmp_path: Path, run: Run, command: str) -> None:
    odd = "a\x1b[31mred\nwarning: all is well"
    source = tmp_path / "source"
    checkpoints.save_plain(source, [{f"_orig_mod.{odd}": torch.ones(2), f"{odd}!": 3}])
    done = run(*command.format(source, tmp_path / "merged").split())
    lines = (done.out + done.err).splitlines()
    assert all(map(str.isprintable, lines))
    assert sum(ascii(odd)[1:-1] in line for line in lines) >= 2


def test_the_callback_of_a_merge(tmp_path: Path) -> None:
    total = checkpoints.save_many(tmp_path / "source", tensors=5, numel=1000, world_size=3)
    states: list[Progress] = []
    streammerge.merge(tmp_path / "source", tmp_path / "merged", progress=states.append)
    phases = [state.phase for state in states]
    assert phases == sorted(phases)
    assert set(phases) == {"compare", "write"}
    for phase, amount in (("compare", 3 * total), ("write", total)):
        seen = [state for state in states if state.phase == phase]
        assert {state.total for state in seen} == {amount}
        assert [state.done for state in seen] == sorted(state.done for state in seen)
        assert seen[-1].done == amount


def test_a_phase_without_bytes_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(sys.stderr) as display:
        display(Progress("compare", 0, 0))
        display(Progress("write", 0, 0))
    assert capsys.readouterr().err == ""


# --- signals --------------------------------------------------------------------------------------

# Sends itself signals once the copying has begun.
SELF_SIGNAL = """
import os, signal, threading
import streammerge.writer as writer

begun = threading.Event()
def signalling_copy_range(*arguments):
    begun.set()
    slow_copy_range(*arguments)
writer._copy_range = signalling_copy_range

def send():
    begun.wait()
    for _ in range({times}):
        time.sleep(0.15)  # not when progress is shown, every 0.1 s
        os.kill(os.getpid(), signal.{name})
threading.Thread(target=send, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("name", "times", "code", "word"),
    [
        ("SIGINT", 1, 130, "interrupted"),
        ("SIGINT", 2, 130, "interrupted"),
        ("SIGTERM", 1, 143, "terminated"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_signal(name: str, times: int, code: int, word: str, old: bool, tmp_path: Path) -> None:
    checkpoints.save_many(tmp_path / "source", tensors=200, numel=100)
    arguments: list[str | Path] = ["merge", tmp_path / "source", tmp_path / "new" / "merged"]
    if old:
        arguments += ["--overwrite"]
        streammerge.merge(tmp_path / "source", tmp_path / "new" / "merged")
    before = checkpoints.snapshot(tmp_path)
    setup = SELF_SIGNAL.format(name=name, times=times)

    done = child(SLOW_MERGE.format(pause=0.5, setup=setup), *arguments, "--max-shard-size", "900")

    assert done.code == code
    assert done.out == ""
    assert done.err == f"streammerge: error: {word}; nothing was published\n"
    assert checkpoints.snapshot(tmp_path) == before


def test_the_terminal_is_told_on_a_signal(tmp_path: Path) -> None:
    checkpoints.save_many(tmp_path / "source", tensors=200, numel=100)
    setup = SELF_SIGNAL.format(name="SIGINT", times=1)
    code = SLOW_MERGE.format(pause=0.5, setup=setup)
    arguments = ("merge", tmp_path / "source", tmp_path / "merged", "--max-shard-size", "900")
    status, shown, _ = on_terminal(code, *arguments)
    assert status == 130
    # The bar is taken away before the line is written.
    assert shown.replace("\r\n", "\n").endswith(
        "\rstreammerge: error: interrupted; nothing was published\n"
    )


def test_a_bar_interrupted_while_it_is_drawn_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)

    def draw(**_: object) -> None:
        stream.write("merging: 0%")
        raise KeyboardInterrupt

    monkeypatch.setattr("tqdm.tqdm", draw)
    with pytest.raises(KeyboardInterrupt), ProgressDisplay(stream) as display:
        display(Progress("write", 0, 10))
    assert re.fullmatch(r"merging: 0%\r {79}\r", stream.getvalue())


def test_json_of_an_interrupted_merge(tmp_path: Path) -> None:
    checkpoints.save_many(tmp_path / "source", tensors=200, numel=100)
    setup = SELF_SIGNAL.format(name="SIGINT", times=1)
    code = SLOW_MERGE.format(pause=0.2, setup=setup)
    arguments = ("merge", tmp_path / "source", tmp_path / "merged", "--max-shard-size", "900")
    done = child(code, *arguments, "--json")
    assert done.code == 130
    assert json.loads(done.out)["exit_code"] == 130


def test_the_handler_of_the_caller_comes_back(source: Path, tmp_path: Path, run: Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run("merge", source, tmp_path / "merged", "--quiet").code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- merge_non_dtensor_shards ---------------------------------------------------------------------

NAN = torch.tensor([float("nan"), 1.0])
OTHER_NAN = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.tensor([], dtype=torch.int8),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([0.5, 2.0]).to(torch.float8_e5m2),
        NAN,
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["2-d", "0-d", "bool", "empty", "bfloat16", "complex", "float8", "nan", "parameter"],
)
def test_copies_that_are_equal(tensor: torch.Tensor) -> None:
    copies = [tensor, tensor.clone(), tensor.clone()]
    assert merge_non_dtensor_shards("model.weight", copies) is copies[0]
    assert merge_non_dtensor_shards("model.weight", copies[:1]) is copies[0]


def test_copies_that_are_stored_differently() -> None:
    full = torch.arange(6.0).view(2, 3)
    turned = full.t().contiguous().t()
    assert not turned.is_contiguous()
    assert merge_non_dtensor_shards("w", [full, turned]) is full
    assert merge_non_dtensor_shards("w", [turned, full]) is turned
    values = torch.tensor([1 + 2j, 3 - 4j])
    conjugated = values.conj_physical().conj()
    assert conjugated.is_conj()
    assert merge_non_dtensor_shards("w", [values, conjugated]) is values
    assert merge_non_dtensor_shards("w", [conjugated, values]) is conjugated
    expanded = torch.ones(1).expand(4)
    assert merge_non_dtensor_shards("w", [expanded, torch.ones(4)]) is expanded


@pytest.mark.parametrize(
    ("first", "other", "parts"),
    [
        (torch.ones(3), torch.tensor([1.0, 1.0, 2.0]), ["value"]),
        (torch.tensor(1), torch.tensor(2), ["value"]),
        (torch.tensor([True]), torch.tensor([False]), ["value"]),
        (torch.zeros(1), -torch.zeros(1), ["value"]),
        (NAN, OTHER_NAN, ["value"]),
        (torch.ones(3), torch.ones(3, 1), ["shape", "[3, 1]", "[3]"]),
        (torch.ones(3), torch.ones(4), ["shape", "[4]", "[3]"]),
        (torch.ones(0), torch.ones(0, 2), ["shape", "[0, 2]", "[0]"]),
        (torch.ones(3), torch.ones(3).half(), ["dtype", "torch.float16", "torch.float32"]),
        (torch.ones(3), torch.ones(3).int(), ["dtype", "torch.int32", "torch.float32"]),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), ["value"]),
    ],
)
@pytest.mark.parametrize("rank", [1, 3])
def test_copies_that_differ(
    first: torch.Tensor, other: torch.Tensor, parts: list[str], rank: int
) -> None:
    copies = [first.clone() for _ in range(4)]
    copies[rank] = other
    with pytest.raises(ValueError, match=rf"'model\.norm\.bias'.*\brank {rank}\b") as caught:
        merge_non_dtensor_shards("model.norm.bias", copies)
    for part in parts:
        assert part in str(caught.value)


def test_no_copies() -> None:
    with pytest.raises(ValueError, match="'w'"):
        merge_non_dtensor_shards("w", [])


def test_the_same_answer_without_torch(tmp_path: Path) -> None:
    """The command compares bytes; it must call equal what torch calls equal on raw bits."""
    pairs = {
        "zero": (torch.zeros(2), -torch.zeros(2)),
        "same nan": (NAN, NAN.clone()),
        "other nan": (NAN, OTHER_NAN),
        "turned": (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t()),
        "conj": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj()),
    }
    for name, copies in pairs.items():
        equal = torch.equal(raw_bits(copies[0].resolve_conj()), raw_bits(copies[1].resolve_conj()))
        checkpoints.save_plain(tmp_path / name, [{"w": copy} for copy in copies])
        done = process("merge", tmp_path / name, tmp_path / f"{name} merged", "--quiet")
        assert done.code == (0 if equal else 1), (name, done)


def test_converting_without_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    source, target = checkpoints.DATA / "fsdp2_w4__t213", tmp_path / "merged"

    assert main(["merge", str(source), str(target), "--dtype", "float16"]) == 1

    assert "needs torch, which cannot be imported" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["merge", str(source), str(target)]) == 0
