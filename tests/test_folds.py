"""Folds of LoRA adapters against torch in float64 and against peft.

The sum must be that of float32, rounded once: its error is bounded by the rounding of the result
and by what sums in float32 of any order may lose. Where everything is an integer nothing is lost,
and every bit must be right.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import peft
import pytest
import rank_files
import torch
from checkpoints import save_plain, save_ranks, scratch
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformers.pytorch_utils import Conv1D

from streammerge import folds
from streammerge.bands import Band
from streammerge.checkpoint import Tensor
from streammerge.dtypes import FROM_TORCH
from streammerge.evaluate import buffer_nbytes, evaluate, least_buffer, value_bands
from streammerge.formats import describe
from streammerge.parallel import TORCH_STACK_SIZE, Team, run
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.values import Cast, Fold, Stored, Value

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BASES = (*DTYPES, torch.float8_e4m3fn)  # of which results are wider
LAYOUTS = ("dense", "offset", "padded", "permuted", "stepped")
SCALE = 0.3
MIB = 2**20


# --- what is folded ---


@dataclass(frozen=True)
class Case:
    """A weight, its adapter, how they are saved, and what is asked for.

    Attributes:
        form: of the weight: ``linear``, ``conv``, ``bias``, ``experts``; with in and out swapped
            ``transposed``, ``embedding``, ``transposed experts``.
        shape: of the weight.
        rank: per expert.
        dtypes: of W, A, B, magnitude and result.
        integers: whether the sum is exact in float32.
        dora: whether there is a magnitude.
        index, rows, swapped: the part of the weight, as `Stored` has it.
        shard_dims: of W, A, B and magnitude, over four ranks; None for one rank that has it all.
        layout: how some ranks store their local shard, as `rank_files.arrange` has it.
        seed: of the values.
    """

    form: str
    shape: tuple[int, ...]
    rank: int
    dtypes: tuple[torch.dtype, ...]
    integers: bool = False
    dora: bool = False
    index: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    swapped: bool = False
    shard_dims: tuple[int | None, ...] = (0, 0, 0, 0)
    layout: str = "dense"
    seed: int = 0

    @property
    def transposed(self) -> bool:
        return self.form.startswith("transposed") or self.form == "embedding"

    @property
    def experts(self) -> int:
        return self.shape[0] if self.form.endswith("experts") else 1

    @property
    def scale(self) -> float:
        return 3.0 if self.integers else SCALE

    def tensors(self) -> dict[str, torch.Tensor]:
        """W, A and B, and the magnitude, whole."""
        outer = self.shape[1:] if self.form.endswith("experts") else self.shape
        if self.form == "bias":
            shapes = {"w": outer, "b": outer}
        elif self.form == "conv":
            ones = (1,) * (len(outer) - 2)
            shapes = {"w": outer, "a": (self.rank, *outer[1:]), "b": (outer[0], self.rank, *ones)}
        else:
            out, inside = reversed(outer) if self.transposed else outer
            rank = self.rank * self.experts
            shapes = {"w": self.shape, "a": (rank, inside), "b": (out, rank)}
        if self.dora:
            shapes["m"] = outer[:1]
        dtypes = dict(zip("wabm", self.dtypes, strict=False))
        generator = torch.Generator().manual_seed(self.seed)
        found = {}
        for name, shape in shapes.items():
            if self.integers:
                most = 100 if name == "w" else 3
                value = torch.randint(-most, most + 1, shape, generator=generator)
            else:
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[name] = value.to(dtypes[name])
        return found

    def merge(self, tensors: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        """``W + scale * B @ A`` of whole tensors, by torch, as peft has it."""
        w, b = tensors["w"], tensors["b"]
        if self.form == "bias":
            return w + scale * b
        a = tensors["a"]
        if self.form == "conv":
            return w + scale * (b.flatten(1) @ a.flatten(1)).view_as(w)
        if not self.form.endswith("experts"):
            product = b @ a
            return w + scale * (product.T if self.transposed else product)
        b = b.view(b.shape[0], -1, self.experts)
        a = a.view(self.experts, -1, a.shape[1])
        equation = "ore,eri->eio" if self.transposed else "ore,eri->eoi"
        return w + scale * torch.einsum(equation, b, a)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a weight that is asked for."""
        part = whole[self.index]
        if self.rows is not None:
            first, count = self.rows
            part = part[first : first + count]
        return part.transpose(-1, -2) if self.swapped else part

    def fold(self, found: Mapping[str, Tensor]) -> Fold:
        """The same for `evaluate`, of the tensors of a checkpoint."""
        kind = "bias" if self.form == "bias" else "transposed" if self.transposed else "linear"
        return Fold(
            Stored(found["w"], self.index, self.rows, self.swapped),
            found.get("a"),
            found["b"],
            self.scale,
            kind,
            FROM_TORCH[str(self.dtypes[-1]).removeprefix("torch.")],
            found.get("m"),
            self.experts,
        )


@contextmanager
def saved(*cases: Case) -> Iterator[tuple[list[Fold], Sources]]:
    """The folds of rank files that four ranks save."""
    tensors = [case.tensors() for case in cases]

    def build(rank: int) -> dict[str, torch.Tensor]:
        mesh = rank_files.rank_mesh(init_device_mesh("cpu", (4,)))
        state = {}
        for number, case in enumerate(cases):
            layout = case.layout if rank % 2 == 0 else "dense"
            for (name, full), dim in zip(tensors[number].items(), case.shard_dims, strict=False):
                key = f"{number}.{name}"
                if dim is None:
                    state[key] = rank_files.arrange(full, layout)
                else:
                    state[key] = rank_files.dtensor(full, mesh, (Shard(dim),), layout=layout)
        return state

    with scratch() as folder:
        save_ranks(folder, build)
        checkpoint = describe(folder)
        found = {tensor.name: tensor for tensor in checkpoint.tensors}
        sources = Sources(checkpoint.files)
        try:
            yield (
                [
                    case.fold({name: found[f"{number}.{name}"] for name in tensors[number]})
                    for number, case in enumerate(cases)
                ],
                sources,
            )
        finally:
            sources.close()


def new_buffer(nbytes: int, at: int = 0) -> BandBuffer:
    """A buffer of exactly so many bytes, full of NaNs, that starts at an odd address if `at` is."""
    memory = memoryview(bytearray(b"\xff" * (at + nbytes)))
    return BandBuffer(nbytes, memory[at:])


def whole(value: Value, sources: Sources, buffer: BandBuffer | None = None) -> bytes:
    """All bands of a value."""
    buffer = buffer or new_buffer(least_buffer(value))
    bands = value_bands(value, len(buffer))
    return b"".join(bytes(evaluate(value, band, sources, buffer)) for band in bands)


def check(case: Case, data: bytes) -> None:
    """The bytes of a fold are its values."""
    *_, dtype = case.dtypes
    exact = {name: tensor.double() for name, tensor in case.tensors().items()}
    total = case.cut(case.merge(exact, case.scale))
    assert len(data) == total.numel() * dtype.itemsize
    if not data:
        return
    found = torch.frombuffer(bytearray(data), dtype=dtype).view(total.shape)
    if case.integers:
        assert torch.equal(found, total.to(dtype))
        return
    # The classical bound of a sum of products, and of the rounding of inputs to its dtype.
    unit = 2**-53 if torch.float64 in (case.dtypes[0], dtype) else 2**-24
    sizes = {name: tensor.abs() for name, tensor in exact.items()}
    lost = (case.rank + 6) * unit * case.cut(case.merge(sizes, case.scale))
    if case.dora:
        norms = total.norm(dim=1, keepdim=True)
        factors = exact["m"][:, None] / norms
        relative = lost.norm(dim=1, keepdim=True) / norms + 16 * unit  # error of the norms
        lost = factors.abs() * (lost + total.abs() * relative)
        total = total * factors
    limits = torch.finfo(dtype)
    allowed = lost + (total.abs() + lost) * limits.eps / 2 + limits.smallest_normal * limits.eps / 2
    errors = (found.double() - total).abs()
    assert (errors <= allowed).all(), (errors / allowed).max()


# --- any fold ---


FORMS = ("linear", "transposed", "conv", "bias", "experts", "transposed experts", "DoRA")


@st.composite
def cases(draw: st.DrawFn, form: str) -> Case:
    """Any shape, dtypes, placements and part of a form of weight, or of a linear one with DoRA."""
    dora = form == "DoRA"
    form = "linear" if dora else form
    ndim = {"bias": 1, "conv": draw(st.integers(3, 5))}.get(form, 2)
    size = st.one_of(st.integers(1, 4), st.integers(5, 40))
    shape = [draw(size), draw(size), *(draw(st.integers(1, 3)) for _ in range(3))][:ndim]
    index: tuple[int, ...] = ()
    rows = None
    if form.endswith("experts"):
        shape.insert(0, draw(st.integers(1, 5)))
        if draw(st.booleans()):
            index = (draw(st.integers(0, shape[0] - 1)),)
            if draw(st.booleans()):
                first = draw(st.integers(0, shape[1] - 1))
                rows = (first, draw(st.integers(1, shape[1] - first)))
    elif draw(st.integers(0, 9)) == 0:
        shape[draw(st.integers(0, min(1, ndim - 1)))] = 0
    dims = {"conv": (2, 2, 2), "bias": (1, 1)}.get(form, (2, 2, 2, 1))
    return Case(
        form,
        tuple(shape),
        draw(st.sampled_from((1, 2, 3, 8, 33))),
        (draw(st.sampled_from(BASES)), *(draw(st.sampled_from(DTYPES)) for _ in range(4))),
        integers=not dora and draw(st.booleans()),
        dora=dora,
        index=index,
        rows=rows,
        swapped=ndim == 2 and not dora and draw(st.booleans()),
        shard_dims=tuple(draw(st.sampled_from((None, *range(n)))) for n in dims),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**32)),
    )


@contextmanager
def small_blocks(numel: int, rows: int, scratch: int) -> Iterator[None]:
    """Many blocks and stripes in small tensors."""
    with ExitStack() as stack:
        sizes = {"_BLOCK_NUMEL": numel, "_LEAST_ROWS": rows, "_SCRATCH_NUMEL": scratch}
        for name, value in sizes.items():
            stack.enter_context(mock.patch.object(folds, name, value))
        yield


@pytest.mark.parametrize("form", FORMS)
def test_any_fold(form: str) -> None:
    seen = Counter[str]()

    @fixed(60)
    @given(case=cases(form), scratch=st.sampled_from((1, 20, 1 << 15)), at=st.integers(0, 70))
    def folding_gives_what_torch_computes(case: Case, scratch: int, at: int) -> None:
        with saved(case) as ((fold,), sources):
            assert fold.shape == tuple(case.cut(torch.empty(case.shape)).shape)
            for numel, rows in ((1, 1), (60, 3), (1 << 18, 32)):
                with small_blocks(numel, rows, scratch):
                    check(case, whole(fold, sources, new_buffer(least_buffer(fold), at)))
        seen["exact"] += case.integers
        seen["part"] += case.index != () or case.swapped

    folding_gives_what_torch_computes()
    assert seen["exact"] >= 5 or form == "DoRA"
    assert seen["part"] >= 8 or form in ("conv", "bias", "DoRA")


# --- what the bytes do not depend on ---


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@fixed(80)
@given(
    case=st.sampled_from(FORMS).flatmap(cases),
    numel=st.sampled_from((30, 1 << 18)),
    scratch=st.sampled_from((1, 20, 1 << 15)),
    at=st.integers(0, 70),
    more=st.integers(0, 5_000),
    threads=st.integers(1, 2),
)
def test_bytes_depend_on_neither_placements_nor_buffer_nor_scratch(
    case: Case, numel: int, scratch: int, at: int, more: int, threads: int
) -> None:
    plain = replace(case, shard_dims=(None,) * 4, layout="dense")
    with saved(case, plain) as ((fold, same), sources), small_blocks(numel, 2, 1 << 15):
        expected = whole(same, sources)
        assert whole(fold, sources) == expected
        with torch_threads(threads), small_blocks(numel, 2, scratch):
            assert whole(fold, sources, new_buffer(least_buffer(fold) + more, at)) == expected


F32, BF16, F16, F64 = DTYPES
# Several blocks each, of the sizes that real weights have.
LARGE = (
    Case("linear", (700, 1000), 24, (BF16, F32, F32, F32, BF16), shard_dims=(1, 1, 0, 0)),
    Case("linear", (90, 20_000), 5, (F32, BF16, F16, F32, BF16), shard_dims=(0, 1, 1, 0)),
    Case("linear", (700, 1000), 24, (BF16, F32, F32, F32, F32), dora=True, layout="stepped"),
    Case("transposed", (1500, 300), 8, (F16, F32, F32, F32, F16), layout="permuted"),
    Case("transposed", (700, 900), 8, (BF16, BF16, BF16, F32, BF16), swapped=True),
    Case("experts", (3, 600, 500), 4, (BF16, BF16, F32, F32, BF16), shard_dims=(1, 0, 1, 0)),
    Case("experts", (3, 600, 500), 4, (BF16,) * 5, index=(1,), rows=(300, 300), swapped=True),
    Case("conv", (200, 100, 3, 5), 16, (F32, F32, F32, F32, F32)),
    Case("bias", (300_000,), 1, (BF16, BF16, BF16, F32, BF16)),
)


@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_do_not_depend_on_workers(threads: int) -> None:
    """Several threads, each with a buffer that starts anywhere."""
    with saved(*LARGE) as (values, sources):
        expected = [whole(value, sources) for value in values]
        for case, data in zip(LARGE, expected, strict=True):
            check(case, data)
        jobs = [(i, band) for i, value in enumerate(values) for band in value_bands(value, 0)]
        assert len(jobs) >= 20
        found = dict.fromkeys(jobs, b"")
        random.Random(1).shuffle(jobs)
        places = itertools.count(1, 13)

        def make_worker(team: Team) -> Callable[[tuple[int, Band]], None]:
            at = next(places)
            buffer = new_buffer(max(map(least_buffer, values)) + 10 * at, at)

            def work(job: tuple[int, Band]) -> None:
                found[job] = bytes(evaluate(values[job[0]], job[1], sources, buffer))

            return work

        with torch_threads(threads):
            run(iter(jobs), make_worker, 3, stack_size=TORCH_STACK_SIZE)
        for i, data in enumerate(expected):
            assert b"".join(found[job] for job in found if job[0] == i) == data, LARGE[i]


def test_nothing_stays_of_what_a_buffer_was_used_for() -> None:
    """Bands of folds that differ in one thing, of experts, of reads and casts, in any order."""
    one = Case("linear", (12, 10), 3, (BF16, F32, F32, F32, BF16), seed=1)
    experts = Case("experts", (3, 8, 10), 3, (BF16, F32, F32, F32, BF16), seed=2)
    with (
        saved(one, replace(one, seed=3), replace(one, dora=True), experts) as (found, sources),
        small_blocks(20, 2, 16),
    ):
        first, other, dora, packed = found
        values: list[Value] = [
            *found,
            replace(first, scale=0.7),
            replace(first, dtype="F32"),
            replace(first, a=other.a),
            replace(first, b=other.b),
            replace(first, base=other.base),
            replace(dora, magnitude=None),
            *(replace(packed, base=replace(packed.base, index=(e,))) for e in range(3)),
            replace(packed, base=replace(packed.base, index=(1,), rows=(3, 5))),
            first.base,
            Cast(first.base, "F32"),
            packed.base,
        ]
        jobs = [(value, band) for value in values for band in value_bands(value, 100)]
        sizes = [buffer_nbytes(value, band.numel) for value, band in jobs]
        expected = [
            bytes(evaluate(*job, sources, new_buffer(size)))
            for job, size in zip(jobs, sizes, strict=True)
        ]
        assert len(set(expected)) > 60
        buffer = new_buffer(max(sizes), 3)
        rng = random.Random(5)
        for at in rng.choices(range(len(jobs)), k=2_000):
            assert evaluate(*jobs[at], sources, buffer) == expected[at], jobs[at]
            if rng.random() < 0.2:  # as a copy through the buffer does
                buffer.memory[:] = rng.randbytes(len(buffer))


# --- memory ---

# Prints the bytes of buffer that each fold takes, and by how much the peak of the process grew
# while they were in one buffer that was there before.
MEASURE = """
import json, sys
from streammerge.evaluate import evaluate, least_buffer, value_bands
from streammerge.formats import describe
from streammerge.reader import BandBuffer
from streammerge.sources import Sources
from streammerge.values import Fold, Stored

def peak():
    with open("/proc/self/status") as file:
        return int(dict(line.split(":", 1) for line in file)["VmHWM"].split()[0]) * 1024

def prepare(folder, kind, dtype, swapped):
    checkpoint = describe(folder)
    w, a, b, *m = checkpoint.tensors
    return Fold(Stored(w, swapped=swapped), a, b, 0.3, kind, dtype, *m), Sources(checkpoint.files)

def compute(value, sources):
    for band in value_bands(value, 0):
        evaluate(value, band, sources, buffer)
    sources.close()
    return least_buffer(value)

jobs = json.loads(sys.argv[1])
small, large = ([prepare(f"{folder}/{size}", *how) for folder, how in jobs]
                for size in ("small", "large"))
buffer = BandBuffer(max(least_buffer(value) for value, _ in large))
buffer.memory[:] = b"\\1" * len(buffer)
for job in small:
    compute(*job)  # loads code
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forgets the peak
before = peak()
for job in large:
    print(json.dumps([compute(*job), peak() - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak memory to ask for")
def test_memory(tmp_path: Path) -> None:
    """Beside the buffer, a BLAS needs some: MKL copies up to 8,000 columns of the right matrix."""
    cases = {
        "linear": (8192, 4096, ("linear", "BF16", False)),
        "DoRA": (4096, 8192, ("linear", "F32", False)),
        "transposed": (8192, 4096, ("transposed", "BF16", False)),
        "swapped": (2048, 1024, ("transposed", "BF16", True)),
    }
    for name, (*large, (kind, *_)) in cases.items():
        for size, (rows, columns) in {"small": (96, 64), "large": large}.items():
            out, inside = (rows, columns) if kind == "linear" else (columns, rows)
            state = {
                "w": torch.zeros(rows, columns, dtype=torch.bfloat16),
                "a": torch.zeros(64, inside),
                "b": torch.zeros(out, 64),
            }
            if name == "DoRA":
                state["m"] = torch.ones(out)
            save_plain(tmp_path / name / size, [state])
    jobs = json.dumps([(str(tmp_path / name), how) for name, (*_, how) in cases.items()])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, jobs],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    for name, line in zip(cases, done.stdout.splitlines(), strict=True):
        buffer, growth = json.loads(line)
        assert buffer < 6 * MIB, name
        assert growth <= 5 * MIB, f"{name}: {growth / MIB:.1f} MiB"


# --- against peft ---


class Experts(nn.Module):
    """A stack of matrices as a model has it."""

    def __init__(self, weight: torch.Tensor, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.is_transposed = transposed


def layer_of(case: Case, weight: torch.Tensor) -> nn.Module:
    """A module with the weight of a case, or its bias."""
    if case.form.endswith("experts"):
        return Experts(weight, case.transposed)
    module: nn.Module
    if case.form == "bias":
        module = nn.Linear(4, *case.shape)
        module.bias.data = weight
        return module
    if case.form == "conv":
        kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(case.shape)]
        module = kind(case.shape[1], case.shape[0], case.shape[2:], bias=False)
    elif case.form == "transposed":
        module = Conv1D(case.shape[1], case.shape[0])
    elif case.form == "embedding":
        module = nn.Embedding(*case.shape)
    else:
        module = nn.Linear(case.shape[1], case.shape[0], bias=False)
    module.weight.data = weight
    return module


def merge_by_peft(case: Case, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What peft makes of the tensors of a case."""
    experts = case.form.endswith("experts")
    config = peft.LoraConfig(
        r=case.rank,
        lora_alpha=case.scale * case.rank,
        target_modules=[] if experts else ["layer"],
        target_parameters=["layer.weight"] if experts else None,
        fan_in_fan_out=case.form == "transposed",
        use_dora=case.dora,
        lora_bias=case.form == "bias",
    )
    model = nn.ModuleDict({"layer": layer_of(case, tensors["w"].clone())})
    wrapped = peft.get_peft_model(model, config)
    keys = {
        "a": "lora_A.default.weight",
        "b": "lora_B.default.weight",
        "m": "lora_magnitude_vector.default.weight",
    }
    if case.form == "embedding":
        keys = {"a": "lora_embedding_A.default", "b": "lora_embedding_B.default"}
    elif case.form == "bias":
        keys = {"b": "lora_B.default.bias"}
    state = {
        f"base_model.model.layer.{key}": tensors[name]
        for name, key in keys.items()
        if name in tensors
    }
    assert not wrapped.load_state_dict(state, strict=False).unexpected_keys
    merged = wrapped.merge_and_unload().state_dict()
    return merged["layer.bias" if case.form == "bias" else "layer.weight"]


@pytest.mark.parametrize(
    "case",
    [
        Case("linear", (50, 40), 6, (F32,) * 5),
        Case("linear", (50, 40), 6, (F32,) * 5, dora=True),
        Case("transposed", (50, 40), 6, (F32,) * 5),
        Case("embedding", (50, 40), 6, (F32,) * 5),
        Case("conv", (50, 40, 3), 6, (F32,) * 5),
        Case("conv", (20, 10, 3, 2), 6, (F32,) * 5),
        Case("conv", (20, 10, 3, 2, 2), 6, (F32,) * 5),
        Case("conv", (50, 40, 1, 1), 6, (F32,) * 5),
        Case("bias", (50,), 6, (F32,) * 5),
        Case("experts", (5, 40, 30), 6, (F32,) * 5),
        Case("experts", (1, 40, 30), 6, (F32,) * 5),
        Case("transposed experts", (5, 40, 30), 6, (F32,) * 5),
    ],
    ids=lambda case: f"{case.form} {'x'.join(map(str, case.shape))}{' DoRA' * case.dora}",
)
@pytest.mark.parametrize("integers", [False, True])
def test_peft_agrees(case: Case, integers: bool) -> None:
    case = replace(case, integers=integers and not case.dora)
    expected = merge_by_peft(case, case.tensors())
    with saved(case) as ((fold,), sources), small_blocks(300, 2, 100):
        found = torch.frombuffer(bytearray(whole(fold, sources)), dtype=F32).view_as(expected)
    tolerance = 0 if case.integers else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_dora_rows_without_a_norm_are_those_of_peft(tmp_path: Path) -> None:
    """Rows of zeros have no direction: peft divides by zero."""
    case = Case("linear", (50, 40), 6, (F32,) * 5, dora=True)
    tensors = case.tensors()
    tensors["w"][3] = tensors["b"][3] = 0
    tensors["w"][4] = tensors["b"][4] = tensors["m"][4] = 0
    tensors["m"][5] = 0
    expected = merge_by_peft(case, tensors)
    assert expected[3:5].isnan().all()
    assert not expected[5].any()
    save_plain(tmp_path, [tensors])
    checkpoint = describe(tmp_path)
    sources = Sources(checkpoint.files)
    fold = case.fold({tensor.name: tensor for tensor in checkpoint.tensors})
    found = torch.frombuffer(bytearray(whole(fold, sources)), dtype=F32).view_as(expected)
    sources.close()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
