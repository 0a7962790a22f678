"""Peak memory of whole processes that merge checkpoints of several gigabytes.

The sources are sparse, so that only the output takes space on the disk. It is removed at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_checkpoint as maker
import pytest
import safetensors
import torch
import zero_checkpoints
from torch.distributed.tensor import DTensor, Shard
from zero_checkpoints import Zero

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the kernel does not tell the peak memory"
)

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
LIMIT = 64 * MIB

# ru_maxrss would start with the peak of the process that forks the child; VmHWM does not.
CHILD = """
import json, resource, sys

data_limit, *argv = sys.argv[1:]
if int(data_limit):
    resource.setrlimit(resource.RLIMIT_DATA, (int(data_limit), int(data_limit)))

{work}

def fields(path):
    with open(path) as file:
        return dict(line.split(":", 1) for line in file)

print(json.dumps({{
    "code": code,
    "peak": int(fields("/proc/self/status")["VmHWM"].split()[0]) * 1024,
    "written": int(fields("/proc/self/io")["wchar"]),
    "children": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    "modules": [name for name in ("torch", "numpy") if name in sys.modules],
}}))
"""
MERGE = "from streammerge.cli import main\ncode = main(argv)"
IMPORT_TORCH = "import torch\ncode = int(torch.ones(8).to(torch.bfloat16).sum()) - 8"


@pytest.fixture(autouse=True)
def _excepthook() -> Iterator[None]:
    """Undo what ``init_process_group`` leaves behind in this process."""
    hook = sys.excepthook
    yield
    sys.excepthook = hook


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory that is emptied at once, as pytest keeps those of its last runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def need_space(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes + 10**9:
        pytest.skip(f"needs {nbytes / 1e9 + 1:.0f} GB of free disk space, found {free / 1e9:.1f}")


def make(dst: Path, size: str, world_size: int, layout: str, **options: Any) -> int:
    """Write a checkpoint and return the bytes of its weights."""
    dtype = options.setdefault("dtype", torch.bfloat16)
    chosen = {name: options.pop(name, None) for name in ("largest", "tensors")}
    if chosen["largest"]:
        chosen["largest"] = maker.parse_size(chosen["largest"])
    model = maker.model_of_size(maker.parse_size(size), dtype.itemsize, **chosen)
    maker.write_checkpoint(dst, model, world_size, layout=layout, **options)
    return sum(dtype.itemsize * torch.Size(p.shape).numel() for p in maker.parameters(model))


def run_child(work: str, *argv: str | Path, data_limit: int = 0) -> dict[str, Any]:
    """Run ``work`` in a fresh interpreter and return what it says about itself."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(work=work), str(data_limit), *map(str, argv)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["code"] == 0, done.stderr
    return figures


def merge(source: Path, target: Path, *options: str, data_limit: int = 0) -> dict[str, Any]:
    argv = ["merge", str(source), str(target), "--quiet", *options]
    return run_child(MERGE, *argv, data_limit=data_limit)


def check_without_torch(figures: dict[str, Any]) -> None:
    assert figures["peak"] <= LIMIT, f"peak {figures['peak'] / MIB:.1f} MiB"
    assert figures["modules"] == []
    assert figures["children"] == 0  # their memory would count too


def rank_files(source: Path) -> list[dict[str, torch.Tensor]]:
    """Load every rank file, in the order of ranks."""
    count = len(list(source.glob("*.pt")))
    names = [f"model_world_size_{count}_rank_{rank}.pt" for rank in range(count)]
    return [torch.load(source / name, weights_only=False, mmap=True) for name in names]


def whole(values: list[torch.Tensor], layout: str) -> torch.Tensor:
    """Put the local shards of one key together, in the reverse order of sharding."""
    first = values[0]
    if not isinstance(first, DTensor):
        return first
    local = [value._local_tensor for value in values if isinstance(value, DTensor)]
    placement = first.placements[-1]
    assert isinstance(placement, Shard)
    if layout == "hsdp":
        return torch.cat(local[: len(local) // 2], placement.dim)
    if layout == "tp":
        columns = [torch.cat(local[tp::2]) for tp in range(2)]
        return torch.cat(columns, placement.dim) if len(first.placements) == 2 else columns[0]
    return torch.cat(local, placement.dim)


def weights_files(target: Path) -> dict[str, Path]:
    """Map each name to the file that holds it."""
    files = sorted(target.glob("*.safetensors"))
    found = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    if len(files) > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file.name for name, file in found.items()}
    return found


def check_headers(source: Path, target: Path, dtype: torch.dtype | None = None) -> int:
    """Compare names, shapes and dtypes with those of a rank file; return the bytes of all tensors.

    ``safe_open`` refuses a file whose size differs from what its header says.
    """
    path = next(source.glob("*_rank_0.pt"))
    expected = torch.load(path, weights_only=False, map_location="meta")
    found = weights_files(target)
    assert found.keys() == expected.keys()
    total = 0
    for name, value in expected.items():
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        with safetensors.safe_open(found[name], "pt") as opened:
            view = opened.get_slice(name)
            assert view.get_shape() == list(value.shape), name
            assert view.get_dtype() == SAFETENSORS_NAMES[kind], name
        total += value.numel() * kind.itemsize
    return total


SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def test_the_maker_writes_what_torch_save_writes(scratch: Path) -> None:
    make(scratch / "source", "2MB", 4, "tp", with_buffers=True)
    for path in (scratch / "source").glob("*.pt"):
        again = scratch / "again" / path.name  # the same name: it is the root of the members
        again.parent.mkdir(exist_ok=True)
        torch.save(torch.load(path, weights_only=False), again)
        with zipfile.ZipFile(path) as ours, zipfile.ZipFile(again) as theirs:
            assert ours.testzip() is None
            assert ours.namelist() == theirs.namelist()
            for name in ours.namelist():
                # Identities of strings shape the pickle, and the pickle the id.
                if not name.endswith(("/data.pkl", "serialization_id")):
                    assert ours.read(name) == theirs.read(name), name


@pytest.mark.parametrize("with_buffers", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("layout", ["shard0", "shard1", "tp", "hsdp"])
def test_values(scratch: Path, layout: str, with_buffers: bool) -> None:
    source, target = scratch / "source", scratch / "target"
    need_space(scratch, 200_000_000)
    make(source, "60MB", 8, layout, with_buffers=with_buffers, tensors=100)
    options = ["--max-shard-size", "20MB"] + (["--memory", "64KiB"] if with_buffers else [])
    check_without_torch(merge(source, target, *options, data_limit=LIMIT))

    ranks = rank_files(source)
    found = weights_files(target)
    assert len(set(found.values())) > 2
    assert found.keys() == ranks[0].keys()
    for name, file in found.items():
        expected = whole([rank[name] for rank in ranks], layout)
        with safetensors.safe_open(file, "pt") as opened:
            tensor = opened.get_tensor(name)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


MANY = {"largest": "2GB", "tensors": 200}
WIDE = {"largest": "2GB", "tensors": 14}


@pytest.mark.parametrize(
    ("layout", "size", "world_size", "options", "data_limit"),
    [
        pytest.param("shard0", "4GB", 8, {}, 0, id="shard0-4GB"),
        pytest.param("shard0", "12GB", 8, {"with_buffers": True}, LIMIT, id="shard0-12GB-buffers"),
        pytest.param("shard1", "4GB", 8, {"with_buffers": True}, LIMIT, id="shard1-4GB-buffers"),
        pytest.param("shard1", "4GB", 2, {}, LIMIT, id="shard1-4GB-2ranks"),
        pytest.param("tp", "4GB", 8, {}, 0, id="tp-4GB"),
        pytest.param("tp", "4GB", 8, {"with_buffers": True}, LIMIT, id="tp-4GB-buffers"),
        # Wide rows, as each is cut into 64 runs.
        pytest.param("shard1", "3.1GB", 64, WIDE, LIMIT, id="shard1-64ranks-2GB-tensor"),
        pytest.param("tp", "2.2GB", 64, MANY, LIMIT, id="tp-64ranks-2GB-tensor"),
    ],
)
def test_peak_without_torch(
    scratch: Path, layout: str, size: str, world_size: int, options: dict[str, Any], data_limit: int
) -> None:
    need_space(scratch, int(1.1 * maker.parse_size(size)))
    source, target = scratch / "source", scratch / "target"
    made = make(source, size, world_size, layout, sparse=True, **options)
    assert made == pytest.approx(maker.parse_size(size), rel=0.05)
    figures = merge(source, target, data_limit=data_limit)
    total = check_headers(source, target)
    assert total >= made
    assert figures["written"] >= total  # as the data are zeros: they must not just be skipped
    check_without_torch(figures)


@pytest.fixture(scope="module")
def torch_peak() -> int:
    """Peak memory in bytes of a process that imports torch and converts one tensor."""
    figures = run_child(IMPORT_TORCH)
    assert "torch" in figures["modules"]
    return int(figures["peak"])


@pytest.mark.parametrize(("layout", "memory"), [("shard0", 16), ("tp", 64)])
@pytest.mark.parametrize(
    ("dtype", "converted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["to_float32", "to_bfloat16"],
)
def test_peak_with_torch(
    scratch: Path,
    torch_peak: int,
    dtype: torch.dtype,
    converted: torch.dtype,
    layout: str,
    memory: int,
) -> None:
    source, target = scratch / "source", scratch / "target"
    need_space(scratch, 2_000_000_000)
    options = {"largest": "400MB", "with_buffers": True, "sparse": True, "dtype": dtype}
    make(source, "800MB", 8, layout, **options)
    name = str(converted).removeprefix("torch.")
    figures = merge(source, target, "--dtype", name, "--memory", f"{memory}MiB")
    total = check_headers(source, target, converted)
    assert figures["written"] >= total
    assert "torch" in figures["modules"]
    most = torch_peak + (32 + memory) * MIB
    assert figures["peak"] <= most, f"{figures['peak'] / MIB:.0f} of {most / MIB:.0f} MiB"
    assert figures["children"] == 0


def write_zero(folder: Path, stage: int, rows: int, world_size: int = 3) -> torch.Tensor:
    """A ZeRO checkpoint of one large parameter, which partitions cut in the middle of rows."""
    zero = Zero(stage, world_size, groups=({"norm": (5,), "weight": (rows, 4097)},))
    return zero_checkpoints.write(zero, folder).masters["weight"]


@pytest.mark.parametrize("stage", [2, 3])
def test_peak_of_zero_without_torch(scratch: Path, stage: int) -> None:
    need_space(scratch, 2_500_000_000)
    source, target = scratch / "source", scratch / "target"
    weight = write_zero(source, stage, rows=20_000)
    assert weight.nbytes > 4 * LIMIT
    check_without_torch(merge(source, target, "--raw", data_limit=LIMIT))
    with safetensors.safe_open(target / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("weight"), weight)


@pytest.mark.parametrize("stage", [2, 3])
def test_peak_of_zero_with_torch(scratch: Path, torch_peak: int, stage: int) -> None:
    need_space(scratch, 2_500_000_000)
    source, target = scratch / "source", scratch / "target"
    weight = write_zero(source, stage, rows=20_000)
    figures = merge(source, target, "--dtype", "auto", "--memory", "16MiB")
    most = torch_peak + (32 + 16) * MIB
    assert weight.nbytes > most - torch_peak
    assert figures["peak"] <= most, f"{figures['peak'] / MIB:.0f} of {most / MIB:.0f} MiB"
    with safetensors.safe_open(target / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("weight"), weight.bfloat16())
