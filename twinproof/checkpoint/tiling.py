"""Rectangles that tile a tensor: the one check that no byte is missing and none is written twice.

Prevents the silent zeros, truncations and last-writer-wins of facts/checkpoint.md D7, D8 and D10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from twinproof.errors import TwinproofError

__all__ = ["Box", "check_tiling", "is_simple_tiling"]

PlainBox = tuple[tuple[int, ...], tuple[int, ...]]  # A Box without its names: (offsets, sizes).


class Box(NamedTuple):
    """A rectangle of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _overlap(a: Box, b: Box) -> bool:
    return all(
        ao < bo + bs and bo < ao + az for ao, az, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _first_overlap(boxes: list[Box], dim: int) -> tuple[Box, Box] | None:
    # Sweep along one dimension; only boxes that the sweep line still crosses are compared.
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in active:
            if _overlap(box, other):
                return other, box
        active.append(box)
    return None


def _is_chain(shape: tuple[int, ...], boxes: Sequence[PlainBox]) -> bool:
    # Nearly every tiling is a split of one dimension; this linear check answers for those.
    first_offsets, first_sizes = boxes[0]
    split = next((d for d, size in enumerate(first_sizes) if size != shape[d]), None)
    if split is None:
        return len(boxes) == 1 and not any(first_offsets)
    position = 0
    head, tail = shape[:split], shape[split + 1 :]
    before, after = (0,) * len(head), (0,) * len(tail)
    for offsets, sizes in sorted(boxes):
        if offsets != (*before, position, *after) or sizes != (*head, sizes[split], *tail):
            return False
        position += sizes[split]
    return position == shape[split]


def is_simple_tiling(shape: Sequence[int], boxes: Sequence[PlainBox]) -> bool:
    """Whether the boxes split one dimension and cover the shape exactly once. Fast; False proves nothing."""
    shape = tuple(shape)
    return bool(shape) and bool(boxes) and _rank_fits(shape, boxes) and _is_chain(shape, boxes)


def check_tiling(shape: Sequence[int], boxes: Sequence[Box], error: type[TwinproofError], where: str) -> None:
    """Raise ``error`` unless the boxes cover ``shape`` exactly once. Empty boxes need only lie inside.

    Raises:
        error: naming the tensor and the box at fault.
    """
    shape = tuple(shape)
    filled = [box for box in boxes if 0 not in box.sizes]
    if is_simple_tiling(shape, filled):
        return
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise error("a chunk lies outside the tensor", got=box, expected=f"inside {list(shape)}", where=where)
    dim = max(range(len(shape)), key=lambda d: shape[d], default=0)
    clash = _first_overlap(filled, dim) if shape else (filled[0], filled[1]) if len(filled) > 1 else None
    if clash is not None:
        raise error("two chunks overlap", got=clash, where=where)
    volume = sum(math.prod(box.sizes) for box in filled)
    if volume != math.prod(shape):
        raise error(
            "chunks leave a gap",
            got=f"{volume} elements",
            expected=f"{math.prod(shape)} elements of {list(shape)}",
            where=where,
        )


def _rank_fits(shape: tuple[int, ...], boxes: Sequence[PlainBox]) -> bool:
    rank = len(shape)
    return all(len(offsets) == rank == len(sizes) for offsets, sizes in boxes)
