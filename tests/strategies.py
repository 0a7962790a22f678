"""Hypothesis strategies for checkpoints and for the options of a merge.

A *kind* of checkpoint (`CHECKPOINTS`) has a trait in every example, by construction. Whatever else
is in an example is drawn freely. Sizes are small: an example has at most 12 ranks and a few KiB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from rank_files import (
    DTYPES,
    LAYOUTS,
    NOT_IN_LEGACY_FILES,
    Checkpoint,
    Entry,
    FullyShard,
    MeshPlan,
    ShardOrder,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Draw = Callable[[st.SearchStrategy], object]

FLOATING_DTYPES = tuple(
    dtype
    for dtype in DTYPES
    if dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2  # torch cannot convert it
)
_FP4 = torch.float4_e2m1fn_x2
_MAX_NUMEL = 6_000
_LARGE_NUMEL = 5_200  # more bytes than the smallest buffers, in any dtype

# Parts of names that JSON, sorting and file systems may trip over.
_SUFFIXES = ("", ".weight", ".bias", ".é", ".日本語", '."q"', ".\\", ".\n", ".\x7f", ".🤗", " ")

_MESHES_1D = ((1,), (2,), (3,), (4,), (5,), (6,), (8,))
_MESHES_2D = ((2, 2), (1, 2), (2, 1), (2, 3), (3, 2), (1, 4), (4, 1), (1, 1), (2, 4), (4, 2))
_MESHES_3D = (
    (1, 2, 2),
    (2, 1, 2),
    (2, 2, 1),
    (1, 1, 2),
    (2, 2, 2),
    (3, 1, 2),
    (1, 3, 2),
    (2, 2, 3),
)
_NAMES = (("fsdp",), ("dp", "tp"), ("ddp", "fsdp", "tp"))


def fixed(examples: int) -> settings:
    """The same examples on every run, however slow the machine."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class MergeOptions:
    """The options of a merge that must not change what it writes, and the one that splits it.

    Attributes:
        max_shard_size: bytes.
    """

    memory: str
    workers: int
    max_shard_size: int


MEMORY = {
    "4KiB": 4 << 10,
    "5KB": 5_000,
    "7KiB": 7 << 10,
    "16KiB": 16 << 10,
    "1MiB": 1 << 20,
    "16MiB": 16 << 20,
}

merge_options = st.builds(
    MergeOptions,
    memory=st.sampled_from(tuple(MEMORY)),
    workers=st.integers(1, 3),
    max_shard_size=st.sampled_from((1, 100, 512, 1_000, 2_000, 3_500, 10_000, 5_000_000_000)),
)

small_budgets = st.builds(
    replace, merge_options, memory=st.sampled_from([m for m, n in MEMORY.items() if n < 5_100])
)

small_files = st.builds(replace, merge_options, max_shard_size=st.sampled_from((1, 100, 512)))


class _Sizes:
    """What torch's spec code asks of a mesh: the size of a dim."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def size(self, mesh_dim: int) -> int:
        return self._sizes[mesh_dim]


def _one_in(draw: Draw, n: int) -> bool:
    """True once in n draws; False in the simplest example."""
    return draw(st.integers(1, n)) == n


# --- meshes ---------------------------------------------------------------------------------------


@st.composite
def root_meshes(
    draw: Draw, shapes: Sequence[tuple[int, ...]], *, named: bool | None = None
) -> MeshPlan:
    """A mesh over all ranks in their order."""
    shape = draw(st.sampled_from(shapes))
    if named is None:
        named = draw(st.booleans())
    ranks = tuple(range(math.prod(shape)))
    return MeshPlan(shape, ranks, _NAMES[len(shape) - 1] if named else None)


@st.composite
def _permuted_meshes(draw: Draw) -> MeshPlan:
    """Any order of ranks in 1-D; else transposed, or with lines swapped."""
    named = draw(st.booleans())
    if draw(st.booleans()):
        size = draw(st.integers(2, 6))
        ranks = draw(st.permutations(range(size)))
        return MeshPlan((size,), tuple(ranks), _NAMES[0] if named else None)
    shape = draw(st.sampled_from(((2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 1, 3))))
    grid = torch.arange(math.prod(shape)).view(shape)
    axes = draw(st.permutations(range(len(shape))))
    grid = grid.permute(axes)
    for dim in range(grid.ndim):
        order = draw(st.permutations(range(grid.shape[dim])))
        grid = grid.index_select(dim, torch.tensor(order))
    ranks = tuple(grid.flatten().tolist())
    return MeshPlan(tuple(grid.shape), ranks, _NAMES[grid.ndim - 1] if named else None)


def in_order(plan: MeshPlan) -> bool:
    """Whether coordinates in the mesh are positions in its process groups: lines are ascending."""
    grid = torch.tensor(plan.ranks).view(plan.shape)
    return all(bool((grid.diff(dim=dim) > 0).all()) for dim in range(grid.ndim))


# Meshes whose ranks are not in order.
permuted_meshes = _permuted_meshes().filter(lambda plan: list(plan.ranks) != sorted(plan.ranks))


@st.composite
def sliced_meshes(draw: Draw) -> MeshPlan:
    """A slice of a named 2-D or 3-D mesh: the other mesh dims hold undeclared copies."""
    root = draw(root_meshes(_MESHES_2D + _MESHES_3D, named=True))
    count = draw(st.integers(1, len(root.shape) - 1))
    dims = draw(st.sampled_from(tuple(itertools.combinations(root.names, count))))
    return replace(root, dims=dims)


@st.composite
def flattened_meshes(draw: Draw) -> MeshPlan:
    """Two mesh dims made one, as for data plus context parallelism; they need not be neighbours."""
    root = draw(root_meshes(_MESHES_3D, named=True))
    dims = draw(st.sampled_from(tuple(itertools.combinations(root.names, 2))))
    return replace(root, dims=dims, flatten=True)


any_mesh = st.one_of(
    root_meshes(_MESHES_1D + _MESHES_2D),
    root_meshes(_MESHES_3D),
    permuted_meshes,
    sliced_meshes(),
    flattened_meshes(),
)


@st.composite
def meshes_beside(draw: Draw, first: MeshPlan, world_size: int) -> tuple[MeshPlan, ...]:
    """More meshes of the same job: slices of the same root, one of all ranks, one of a few."""
    plans = []
    for _ in range(draw(st.integers(0, 2))):
        what = draw(st.sampled_from(("slice", "line", "subset")))
        if what == "slice" and first.names is not None and len(first.names) > 1:
            count = draw(st.integers(1, len(first.names) - 1))
            dims = draw(st.sampled_from(tuple(itertools.combinations(first.names, count))))
            plans.append(MeshPlan(first.shape, first.ranks, first.names, dims))
        elif what == "subset":
            ranks = draw(
                st.lists(st.integers(0, world_size - 1), min_size=1, max_size=4, unique=True)
            )
            plans.append(MeshPlan((len(ranks),), tuple(sorted(ranks))))
        else:
            plans.append(MeshPlan((world_size,), tuple(range(world_size))))
    return tuple(plans)


# --- placements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Placements over a mesh, and what they do to the tensor dims.

    Attributes:
        parts: for each tensor dim, into how many it is split.
        divisors: for each tensor dim, what its size must be a multiple of.
    """

    placements: tuple[Placement, ...]
    order: ShardOrder | None
    parts: tuple[int, ...]
    divisors: tuple[int, ...]


@st.composite
def splits(
    draw: Draw,
    sizes: Sequence[int],
    ndim: int,
    *,
    ordered: str | None = None,
    sharded: bool = False,
) -> Split:
    """Any mix of placements.

    Args:
        sizes: of the mesh dims.
        ndim: of the tensor.
        ordered: how to say that several mesh dims split a tensor dim in another order than from
            left to right: "strided" (`_StridedShard`) or "explicit" (the spec's `shard_order`).
            The split will then have such a dim, so there must be two mesh dims.
        sharded: at least one mesh dim of more than one rank must shard.
    """
    dims: list[int | None] = [
        draw(st.one_of(st.integers(0, ndim - 1), st.none())) if ndim else None for _ in sizes
    ]
    large = [mesh_dim for mesh_dim, size in enumerate(sizes) if size > 1]
    if sharded and large and all(dims[mesh_dim] is None for mesh_dim in large):
        dims[draw(st.sampled_from(large))] = draw(st.integers(0, ndim - 1))
    if ordered:
        # The left one of two mesh dims comes after the right one, which must be larger than one
        # for a split factor to show it.
        right = draw(st.sampled_from([m for m in large if m > 0]))
        left = draw(st.integers(0, right - 1))
        dims[left] = dims[right] = draw(st.integers(0, ndim - 1))
    base: tuple[Placement, ...] = tuple(Replicate() if d is None else Shard(d) for d in dims)
    entries = []
    for tensor_dim in sorted({d for d in dims if d is not None}):
        mesh_dims = [m for m, d in enumerate(dims) if d == tensor_dim]
        if ordered and tensor_dim == dims[right]:
            others = [m for m in mesh_dims if m not in (left, right)]
            mesh_dims = [right, left]
            for other in others:
                mesh_dims.insert(draw(st.integers(0, len(mesh_dims))), other)
        entries.append(ShardOrderEntry(tensor_dim, tuple(mesh_dims)))
    parts = [1] * ndim
    for mesh_dim, tensor_dim in enumerate(dims):
        if tensor_dim is not None:
            parts[tensor_dim] *= sizes[mesh_dim]
    order: ShardOrder | None = None
    if ordered == "explicit":
        order = tuple(entries)
    elif ordered == "strided":
        base = DTensorSpec._convert_shard_order_to_StridedShard(
            tuple(entries),
            base,
            _Sizes(sizes),  # type: ignore[arg-type]
        )
    return Split(base, order, tuple(parts), (1,) * ndim)


@st.composite
def blocked_splits(draw: Draw, sizes: Sequence[int], ndim: int) -> Split:
    """A `_StridedShard` whose split factor no mesh dim gives: each rank holds several blocks.

    torch's versions agree on these for even sizes only, and where it alone splits a tensor dim.
    """
    plain = draw(splits(sizes, ndim, sharded=True))
    mesh_dim = draw(
        st.sampled_from([m for m, p in enumerate(plain.placements) if isinstance(p, Shard)])
    )
    dim = plain.placements[mesh_dim].dim
    placements = [
        Replicate() if isinstance(p, Shard) and p.dim == dim else p for p in plain.placements
    ]
    factor = draw(st.sampled_from((5, 7)))  # no mesh dims of these strategies multiply to it
    placements[mesh_dim] = _StridedShard(dim, split_factor=factor)
    parts, divisors = list(plain.parts), [1] * ndim
    parts[dim] = sizes[mesh_dim]
    divisors[dim] = factor * sizes[mesh_dim]
    return Split(tuple(placements), None, tuple(parts), tuple(divisors))


# --- entries --------------------------------------------------------------------------------------


@st.composite
def shapes(
    draw: Draw,
    split: Split,
    *,
    roomy: bool = False,
    starved: bool = False,
    large: bool = False,
) -> tuple[int, ...]:
    """A global shape for a split.

    Args:
        large: at least `_LARGE_NUMEL` elements.
        roomy: the first rank's shard has at least two elements in each dim.
        starved: one dim is shorter than the number of its parts, so that ranks are left empty.
    """
    ndim = len(split.parts)
    short = None
    if starved:
        short = draw(st.sampled_from([d for d in range(ndim) if split.parts[d] > 1]))
    sizes: list[int] = []
    room = _MAX_NUMEL
    for dim, (parts, divisor) in enumerate(zip(split.parts, split.divisors, strict=True)):
        if divisor > 1:
            size = divisor * draw(st.integers(2 if roomy else 1, 2))
        elif dim == short:
            size = draw(st.integers(1, parts - 1))
        elif roomy:
            size = draw(st.integers(2 * parts, 2 * parts + 5))
        else:
            low = 0 if not (starved or large) and _one_in(draw, 8) else 1
            size = draw(st.integers(low, 2 * parts + 3))
            if room > 600 and _one_in(draw, 8):
                size += draw(st.integers(10, 200))  # larger than the smallest buffers
        sizes.append(size)
        room //= max(size, 1)
    if large:
        dim = draw(st.sampled_from([d for d in range(ndim) if split.divisors[d] == 1]))
        others = math.prod(sizes) // sizes[dim]
        sizes[dim] = max(sizes[dim], -(-_LARGE_NUMEL // others))
    return tuple(sizes)


_seeds = st.integers(0, 2**31)


@st.composite
def dtensors(
    draw: Draw,
    key: str,
    index: int,
    plan: MeshPlan,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    ordered: str | None = None,
    blocked: bool = False,
    sharded: bool = False,
    starved: bool = False,
    strided: bool = False,
    large: bool = False,
) -> Entry:
    """A DTensor on the mesh `plan`, the checkpoint's `index`-th.

    Args:
        ordered, blocked, sharded: see `splits` and `blocked_splits`.
        starved, large: see `shapes`.
        strided: rank 0 holds a non-contiguous local shard.
    """
    demanding = ordered or blocked or sharded or starved or large
    ndim = draw(st.integers(2 if strided else 1 if demanding else 0, 4))
    split = draw(
        blocked_splits(plan.sizes, ndim)
        if blocked
        else splits(plan.sizes, ndim, ordered=ordered, sharded=sharded or starved)
    )
    if not in_order(plan):
        # Where several mesh dims split a tensor dim, `full_tensor` takes sizes from coordinates but
        # data from process groups: no uneven tensor is right in torch itself.
        dims = [p.dim for p in split.placements if not isinstance(p, Replicate)]
        nested = {dim: split.parts[dim] for dim in dims if dims.count(dim) > 1}
        divisors = [nested.get(dim, divisor) for dim, divisor in enumerate(split.divisors)]
        split = replace(split, divisors=tuple(divisors))
    shape = draw(shapes(split, roomy=strided, starved=starved, large=large))
    dtype = draw(st.sampled_from([d for d in dtypes if ndim or d != _FP4]))
    entry = Entry(
        key,
        dtype,
        shape,
        draw(_seeds),
        mesh=index,
        placements=split.placements,
        shard_order=split.order,
        # torch's Parameter forgets a DTensor's shard_order, so nobody can save one.
        parameter=split.order is None and _one_in(draw, 4),
    )
    if strided:
        return draw(_non_contiguous(entry))
    if _one_in(draw, 3):
        entry = replace(entry, layout=draw(st.sampled_from(LAYOUTS)))
        entry = replace(entry, layout_every=draw(st.integers(1, 3)))
    free = [d for d in range(ndim) if split.parts[d] == 1 and shape[d] > 1]
    if free and _one_in(draw, 8):
        fused = (draw(st.sampled_from(free)), draw(st.integers(2, 3)))
        return replace(entry, fused=fused, parameter=False)
    return replace(entry, tied=_one_in(draw, 8))


@st.composite
def _non_contiguous(draw: Draw, entry: Entry) -> Entry:
    """Rank 0 stores the tensor, or its shard, with gaps, transposed or with stride 0."""
    layouts = ("stepped", "expanded", "permuted", "channels_last")
    layout = draw(st.sampled_from(layouts if len(entry.shape) > 1 else layouts[:2]))
    every = draw(st.integers(1, 3))
    if layout == "expanded":
        dim = draw(st.integers(0, len(entry.shape) - 1))
        return replace(entry, layout="view", expand=dim, layout_every=every)
    return replace(entry, layout=layout, layout_every=every)


@st.composite
def plain_tensors(
    draw: Draw,
    key: str,
    world_size: int,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    strided: bool = False,
) -> Entry:
    """A buffer or unwrapped parameter: the same on all ranks that have it, often on one alone."""
    ndim = draw(st.integers(1 if strided else 0, 4))
    none = Split((), None, (1,) * ndim, (1,) * ndim)
    entry = Entry(
        key,
        draw(st.sampled_from([d for d in dtypes if ndim or d != _FP4])),
        draw(shapes(none, roomy=strided)),
        draw(_seeds),
        parameter=_one_in(draw, 4),
        holders=draw(holders(world_size)),
    )
    if strided:
        entry = draw(_non_contiguous(entry))
        # Some rank must be there to hold it so.
        return replace(entry, layout_every=1)
    entry = replace(
        entry,
        layout=draw(st.sampled_from(LAYOUTS)),
        layout_every=draw(st.integers(1, 3)),
    )
    if ndim and _one_in(draw, 4):
        dim = draw(st.integers(0, ndim - 1))
        return replace(entry, fused=(dim, draw(st.integers(2, 3))), parameter=False)
    return replace(entry, tied=_one_in(draw, 8))


@st.composite
def holders(draw: Draw, world_size: int) -> tuple[int, ...] | None:
    """The ranks that have a plain tensor: all (None), one, or some."""
    how = draw(st.sampled_from(("all", "all", "one", "some")))
    if how == "all":
        return None
    if how == "one":
        return (draw(st.integers(0, world_size - 1)),)
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, unique=True)
    return tuple(sorted(draw(ranks)))


@st.composite
def parallel_mesh(draw: Draw, plan: MeshPlan) -> tuple[int, ...]:
    """The ranks of one of the parallel meshes of a slice: a pipeline stage."""
    assert plan.names is not None
    assert plan.dims is not None
    outside = [d for d, name in enumerate(plan.names) if name not in plan.dims]
    grid = torch.tensor(plan.ranks).view(plan.shape)
    for dim in reversed(outside):
        grid = grid.select(dim, draw(st.integers(0, plan.shape[dim] - 1)))
    return tuple(sorted(grid.flatten().tolist()))


def _key(draw: Draw, number: int) -> str:
    return f"layers.{number}{draw(st.sampled_from(_SUFFIXES))}"


@st.composite
def checkpoints(
    draw: Draw,
    plan: MeshPlan,
    required: Sequence[Entry],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    legacy: bool | None = None,
) -> Checkpoint:
    """A checkpoint around the entries that make its kind; `plan` is its first mesh."""
    world_size = max(plan.ranks) + 1
    if _one_in(draw, 6):
        world_size += 1  # a rank outside the first mesh
    if legacy is None:
        legacy = _one_in(draw, 6)
    if legacy:
        dtypes = [dtype for dtype in dtypes if dtype not in NOT_IN_LEGACY_FILES]
        required = [
            entry
            if entry.dtype not in NOT_IN_LEGACY_FILES
            else replace(entry, dtype=draw(st.sampled_from(dtypes)))
            for entry in required
        ]
    plans = (plan, *draw(meshes_beside(plan, world_size)))
    entries = list(required)
    for number in range(len(required), len(required) + draw(st.integers(0, 3))):
        key = _key(draw, number)
        index = draw(st.integers(-1, len(plans) - 1))
        entry = draw(
            plain_tensors(key, world_size, dtypes=dtypes)
            if index < 0
            else dtensors(key, index, plans[index], dtypes=dtypes)
        )
        entries.insert(draw(st.integers(0, len(entries))), entry)
    return Checkpoint(
        world_size,
        plans,
        tuple(entries),
        legacy=legacy,
        protocol=draw(st.integers(2, 4)),
        wrapped=_one_in(draw, 4),
        extra_state=_one_in(draw, 4),
        location=draw(st.sampled_from(("cpu", "cpu", "cuda:0", "cuda:3"))),
    )


# --- kinds ----------------------------------------------------------------------------------------


@st.composite
def three_dims(draw: Draw) -> Checkpoint:
    """A 3-D mesh, in order."""
    plan = draw(root_meshes(_MESHES_3D))
    ordered = draw(st.sampled_from((None, "explicit")))
    if ordered and all(size == 1 for size in plan.shape[1:]):
        ordered = None
    entry = draw(dtensors(_key(draw, 0), 0, plan, ordered=ordered, sharded=True))
    return draw(checkpoints(plan, [entry]))


@st.composite
def strided_shards(draw: Draw) -> Checkpoint:
    """`_StridedShard`: mesh dims that split a tensor dim from right to left, or otherwise."""
    shapes_ = [s for s in _MESHES_2D + _MESHES_3D if math.prod(s[1:]) > 1]
    plan = draw(root_meshes(shapes_))
    if _one_in(draw, 5):
        entry = draw(dtensors(_key(draw, 0), 0, plan, blocked=True))
    else:
        entry = draw(dtensors(_key(draw, 0), 0, plan, ordered="strided"))
    return draw(checkpoints(plan, [entry]))


@st.composite
def shard_orders(draw: Draw) -> Checkpoint:
    """An order of the mesh dims that the spec's `shard_order` states."""
    shapes_ = [s for s in _MESHES_2D + _MESHES_3D if math.prod(s[1:]) > 1]
    plan = draw(root_meshes(shapes_))
    entry = draw(dtensors(_key(draw, 0), 0, plan, ordered="explicit"))
    return draw(checkpoints(plan, [entry]))


@st.composite
def empty_ranks(draw: Draw) -> Checkpoint:
    """Fewer rows than ranks."""
    roomy = any_mesh.filter(lambda plan: max(plan.sizes) > 1)
    plan = draw(roomy.filter(lambda plan: len(plan.sizes) == 1 or in_order(plan)))
    entry = draw(dtensors(_key(draw, 0), 0, plan, starved=True))
    return draw(checkpoints(plan, [entry]))


@st.composite
def slices(draw: Draw) -> Checkpoint:
    """A sliced mesh; the ranks outside it hold copies."""
    plan = draw(sliced_meshes())
    entry = draw(dtensors(_key(draw, 0), 0, plan))
    return draw(checkpoints(plan, [entry]))


@st.composite
def pipeline_stages(draw: Draw) -> Checkpoint:
    """A sliced mesh; one parallel mesh alone has the key."""
    plan = draw(sliced_meshes())
    entries = []
    for number in range(draw(st.integers(1, 3))):
        entry = draw(dtensors(_key(draw, number), 0, plan))
        entries.append(replace(entry, holders=draw(parallel_mesh(plan))))
    return draw(checkpoints(plan, entries))


@st.composite
def non_contiguous_shards(draw: Draw) -> Checkpoint:
    """Local shards of a DTensor that are transposed, strided or expanded."""
    plan = draw(any_mesh)
    ordered = draw(st.sampled_from((None, "strided", "explicit")))
    if all(size == 1 for size in plan.sizes[1:]):
        ordered = None
    entry = draw(dtensors(_key(draw, 0), 0, plan, ordered=ordered, strided=True))
    return draw(checkpoints(plan, [entry]))


@st.composite
def non_contiguous_buffers(draw: Draw) -> Checkpoint:
    """Plain tensors that are transposed, strided or expanded."""
    plan = draw(root_meshes(_MESHES_1D))
    entry = draw(plain_tensors(_key(draw, 0), max(plan.ranks) + 1, strided=True))
    return draw(checkpoints(plan, [entry]))


@st.composite
def permuted_ranks(draw: Draw) -> Checkpoint:
    """A mesh whose ranks are not in order."""
    plan = draw(permuted_meshes)
    ordered = draw(st.sampled_from((None, "strided")))
    if all(size == 1 for size in plan.sizes[1:]):
        ordered = None
    entry = draw(dtensors(_key(draw, 0), 0, plan, ordered=ordered, sharded=True))
    return draw(checkpoints(plan, [entry]))


@st.composite
def flattened(draw: Draw) -> Checkpoint:
    """Two mesh dims made one."""
    plan = draw(flattened_meshes())
    entry = draw(dtensors(_key(draw, 0), 0, plan))
    return draw(checkpoints(plan, [entry]))


@st.composite
def large_tensors(draw: Draw) -> Checkpoint:
    """A tensor that is larger than the buffers of `small_budgets`, stored anyhow."""
    plan = draw(any_mesh.filter(in_order))
    ordered = draw(st.sampled_from((None, "strided", "explicit")))
    if all(size == 1 for size in plan.sizes[1:]):
        ordered = None
    strided = _one_in(draw, 3)
    entry = draw(dtensors(_key(draw, 0), 0, plan, ordered=ordered, strided=strided, large=True))
    return draw(checkpoints(plan, [replace(entry, fused=None)]))


@st.composite
def empty_tensors(draw: Draw) -> Checkpoint:
    """Several tensors without elements between others: huggingface_hub keeps those in one file."""
    plan = draw(root_meshes(_MESHES_1D[:4] + _MESHES_2D[:3]))
    entries = []
    for number in range(draw(st.integers(4, 6))):
        key = _key(draw, number)
        entry = draw(st.one_of(dtensors(key, 0, plan, sharded=True), plain_tensors(key, 1)))
        if entry.shape and (number in (0, 3) or draw(st.booleans())):
            dim = draw(st.integers(0, len(entry.shape) - 1))
            shape = (*entry.shape[:dim], 0, *entry.shape[dim + 1 :])
            entry = replace(entry, shape=shape, expand=None, fused=None)
        entries.append(entry)
    return draw(checkpoints(plan, entries))


@st.composite
def long_runs(draw: Draw) -> Checkpoint:
    """A tensor of a megabyte: even parts of it are worth a system call of their own."""
    plan = draw(root_meshes(((2,), (3,), (2, 2))))
    ordered = draw(st.sampled_from((None, "strided"))) if len(plan.shape) > 1 else None
    split = draw(splits(plan.sizes, 3, ordered=ordered, sharded=True))
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    entry = Entry(
        _key(draw, 0),
        draw(st.sampled_from((torch.float64, torch.int64, torch.complex64))),
        (outer, 130_000 // (outer * inner) + draw(st.integers(0, 3)), inner),
        draw(_seeds),
        mesh=0,
        placements=split.placements,
        layout=draw(st.sampled_from(LAYOUTS)),
    )
    return draw(checkpoints(plan, [entry]))


@st.composite
def conjugates(draw: Draw) -> Checkpoint:
    """Complex tensors stored as their conjugates, on some of the ranks."""
    plan = draw(any_mesh)
    entry = draw(dtensors(_key(draw, 0), 0, plan, dtypes=[torch.complex64]))
    every = draw(st.integers(1, 3))
    entry = replace(entry, layout="conj", layout_every=every, fused=None)
    return draw(checkpoints(plan, [entry]))


@st.composite
def legacy_files(draw: Draw) -> Checkpoint:
    """Files in the format of torch before 1.6, with storages that keys share."""
    plan = draw(any_mesh)
    dtypes = [dtype for dtype in DTYPES if dtype not in NOT_IN_LEGACY_FILES]
    entry = draw(dtensors(_key(draw, 0), 0, plan, dtypes=dtypes))
    return draw(checkpoints(plan, [entry], legacy=True))


# (mesh, dims that FSDP2 gets, tensor-parallel dim)
_FSDP_JOBS = (
    ((1,), ("fsdp",), ()),
    ((2,), ("fsdp",), ()),
    ((3,), ("fsdp",), ()),
    ((4,), ("fsdp",), ()),
    ((6,), ("fsdp",), ()),
    ((2, 2), ("dp", "tp"), ()),
    ((1, 3), ("dp", "tp"), ()),
    ((2, 1), ("dp", "tp"), ()),
)
_FSDP_TP_JOBS = (
    ((2, 2), ("dp",), ("tp",)),
    ((3, 2), ("dp",), ("tp",)),
    ((2, 3), ("dp",), ("tp",)),
    ((4, 1), ("dp",), ("tp",)),
    ((1, 4), ("dp",), ("tp",)),
    ((2, 2, 2), ("ddp", "fsdp"), ("tp",)),
    ((1, 2, 2), ("ddp", "fsdp"), ("tp",)),
    ((2, 1, 2), ("ddp", "fsdp"), ("tp",)),
)


@st.composite
def fully_sharded(draw: Draw, jobs: Sequence[tuple]) -> Checkpoint:
    """FSDP2 itself makes the local shards: padded storages, uneven and empty ones."""
    shape, data_dims, tensor_dims = draw(st.sampled_from(jobs))
    plan = MeshPlan(shape, tuple(range(math.prod(shape))), _NAMES[len(shape) - 1])
    data_size = shape[len(data_dims) - 1]
    tensor_size = shape[-1] if tensor_dims else 1
    entries = []
    for number in range(draw(st.integers(1, 3))):
        ndim = draw(st.integers(1, 3))
        dim = draw(st.sampled_from([0, 0, ndim - 1]))
        tensor_dim = draw(st.sampled_from([None, *range(ndim)])) if tensor_dims else None
        sizes = []
        for d in range(ndim):
            parts = (data_size if d == dim else 1) * (tensor_size if d == tensor_dim else 1)
            if d and d == dim:
                sizes.append(parts * draw(st.integers(1, 2)))  # FSDP2 wants these even
            else:
                sizes.append(draw(st.integers(1, 2 * parts + 3)))
        placements: tuple[Placement, ...] = ()
        if tensor_dims:
            placements = (Replicate() if tensor_dim is None else Shard(tensor_dim),)
        entries.append(
            Entry(
                f"weight_{number}",
                draw(st.sampled_from([d for d in DTYPES if d != _FP4])),
                tuple(sizes),
                draw(_seeds),
                mesh=0,
                placements=placements,
                fully_shard=FullyShard(dim, data_dims, tensor_dims),
            )
        )
    return draw(checkpoints(plan, entries))


CHECKPOINTS: dict[str, st.SearchStrategy[Checkpoint]] = {
    "3-D mesh": three_dims(),
    "_StridedShard": strided_shards(),
    "shard_order": shard_orders(),
    "empty rank": empty_ranks(),
    "sliced mesh": slices(),
    "pipeline stages": pipeline_stages(),
    "non-contiguous local": non_contiguous_shards(),
    "non-contiguous buffer": non_contiguous_buffers(),
    "permuted ranks": permuted_ranks(),
    "flattened mesh": flattened(),
    "tensor above the budget": large_tensors(),
    "empty tensors": empty_tensors(),
    "long runs": long_runs(),
    "conj bit": conjugates(),
    "legacy files": legacy_files(),
    "FSDP2": fully_sharded(_FSDP_JOBS),
    "FSDP2 over TP": fully_sharded(_FSDP_TP_JOBS),
}

# The options that bring out what a kind is about; the others take any.
OPTIONS: dict[str, st.SearchStrategy[MergeOptions]] = {
    "tensor above the budget": small_budgets,
    "empty tensors": small_files,
}


@st.composite
def float_checkpoints(draw: Draw) -> Checkpoint:
    """Tensors to convert, and some of dtypes that a conversion must leave alone."""
    plan = draw(any_mesh)
    dtype = st.sampled_from(FLOATING_DTYPES)
    ordered = draw(st.sampled_from((None, "strided")))
    if all(size == 1 for size in plan.sizes[1:]):
        ordered = None
    entries = [
        draw(dtensors(_key(draw, 0), 0, plan, dtypes=[draw(dtype)], ordered=ordered)),
        draw(plain_tensors(_key(draw, 1), max(plan.ranks) + 1, dtypes=[draw(dtype)])),
    ]
    entries = [replace(entry, numbers=True) for entry in entries]
    kept = [d for d in DTYPES if not d.is_floating_point]
    entries.append(draw(dtensors(_key(draw, 2), 0, plan, dtypes=kept)))
    return draw(checkpoints(plan, entries, dtypes=[d for d in DTYPES if d != _FP4]))
