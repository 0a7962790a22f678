"""Tensors put together from chunks that say themselves where they belong."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from streammerge.checkpoint import Boxes, ChunkLayout
from streammerge.placement import Box, check_tiling

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a chunk


class Layouts:
    """Layouts, of which tensors of the same shape that are cut alike share one."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[tuple[int, ...], int], list[ChunkLayout]] = {}
        self._zeros: dict[int, array[int]] = {}

    def layout(self, shape: tuple[int, ...], chunks: Sequence[Bounds]) -> ChunkLayout:
        """The layout of a tensor.

        Args:
            shape: global shape.
            chunks: in the order of the slots.

        Raises:
            PlacementError: they do not tile the tensor.
        """
        bounds = array("q", [n for offsets, sizes in chunks for n in (*offsets, *sizes)])
        known = self._layouts.setdefault((shape, hash(bounds.tobytes())), [])
        for layout in known:
            if layout.boxes.bounds == bounds:
                return layout
        check_tiling(shape, [Box.whole_shard(*chunk) for chunk in chunks])
        known.append(ChunkLayout(Boxes(len(shape), bounds)))
        return known[-1]

    def zeros(self, count: int) -> array[int]:
        """A column of `count` zeros, which nobody changes."""
        if count not in self._zeros:
            self._zeros[count] = array("q", bytes(8 * count))
        return self._zeros[count]
