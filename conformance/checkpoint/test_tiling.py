"""Rectangles that tile a tensor: no byte is missing and none is there twice, found by counting each element."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from twinproof.errors import CorruptionError

_SHAPES = st.lists(st.integers(0, 9), max_size=3)


@st.composite
def _tilings(draw: Any) -> tuple[list[int], list[Any]]:
    """A shape and rectangles that tile it, cut one after the other, in any order, or nearly so."""
    from twinproof.checkpoint.catalog import Box

    shape = draw(_SHAPES)
    boxes = [((0,) * len(shape), tuple(shape))]
    for number, dim, at in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 8)), max_size=5)
    ):
        offsets, sizes = boxes[number % len(boxes)]
        if dim < len(shape) and at < sizes[dim]:
            boxes.remove((offsets, sizes))
            behind = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
            boxes.append((offsets, tuple(at if d == dim else s for d, s in enumerate(sizes))))
            boxes.append((behind, tuple(s - at if d == dim else s for d, s in enumerate(sizes))))
    change = draw(st.sampled_from(("none", "none", "drop", "twice", "shift", "grow", "rank", "more", "below")))
    if change != "none" and boxes:
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim, step = draw(st.integers(0, 2)), draw(st.sampled_from((-2, -1, 1, 2)))
        moved = tuple(o + step * (d == dim) for d, o in enumerate(offsets))
        grown = tuple(max(s + step * (d == dim), 0) for d, s in enumerate(sizes))
        boxes += {
            "drop": [],
            "twice": [(offsets, sizes)] * 2,
            "shift": [(moved, sizes)],
            "grow": [(offsets, grown)],
            "rank": [draw(st.sampled_from((((*offsets, 0), sizes), (offsets, (*sizes, 1)), (offsets, sizes[1:]))))],
            "more": [((*offsets, 0), (*sizes, 1))],
            "below": [(offsets, tuple(-s for s in sizes))],
        }[change]
    elif change == "none" and shape and draw(st.integers(0, 3)) == 0:
        # Any rectangles inside, few of which tile anything.
        ends = st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape))
        found = draw(st.lists(ends, min_size=2, max_size=6))
        boxes = [(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in found]
    order = draw(st.permutations(range(len(boxes))))
    return shape, [Box(*boxes[place]) for place in order]


def _fault(shape: list[int], boxes: list[Any]) -> str:
    # What is wrong with them, in the order in which it is looked for; "" where they tile the shape.
    for offsets, sizes in boxes:
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return "outside"
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for place in product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            counts[place] += 1
    return "overlap" if max(counts.values(), default=0) > 1 else "gap" if 0 in counts.values() else ""


@requirement(
    "CKPT-517",
    "Rectangles MUST be taken as a tiling exactly where each element of the tensor is in one of them, whatever their "
    "order, their number and the rank of the tensor; the error MUST say whether one lies outside, two overlap, or some "
    "are missing, how many there are, and show those at fault.",
)
@examples(300)
@given(_tilings())
def test_tilings(checkpoint: Any, case: tuple[list[int], list[Any]]) -> None:
    _assert_verdict(*case)


@requirement(
    "CKPT-547",
    "So it MUST be for every two rectangles of a short tensor, and of a small matrix.",
)
def test_every_two(checkpoint: Any) -> None:
    from twinproof.checkpoint.catalog import Box

    lines = [(begin, size) for begin in range(8) for size in range(9 - begin)]
    for (a, m), (b, n) in product(lines, lines):
        _assert_verdict([8], [Box((a,), (m,)), Box((b,), (n,))])
    places = [(begin, size) for begin in range(3) for size in range(1, 4 - begin)]
    cells = [Box((a, b), (m, n)) for (a, m), (b, n) in product(places, places)]
    for first, second in product(cells, cells):
        _assert_verdict([3, 3], [first, second])


def _assert_verdict(shape: list[int], boxes: list[Any]) -> None:
    from twinproof.checkpoint.catalog import check_tiling, is_simple_tiling

    expected, where = _fault(shape, boxes), f"{shape}: {boxes}"
    if not expected:
        with succeeds("check_tiling", where=where):
            check_tiling(shape, boxes, CorruptionError, "t")
        filled = [box for box in boxes if 0 not in box.sizes]
        split = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in filled)]
        is_simple = bool(shape) and bool(filled) and len(split) <= 1
        assert_equal(is_simple_tiling(shape, filled), is_simple, where=f"split of one dimension, {where}")
        return
    words = {"outside": f"inside {shape}", "overlap": "overlap", "gap": "elements"}[expected]
    with raises(CorruptionError, mentions=(words,), where=where) as refused:
        check_tiling(shape, boxes, CorruptionError, "t")
    assert_equal(is_simple_tiling(shape, boxes), False, where=where)
    error: Any = refused.error
    if expected == "overlap":
        first, second = error.got
        both = [max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True)]
        assert_equal(all(both), True, where=f"{error.got} overlap")
        assert_equal(boxes.count(first) > 0 and boxes.count(second) > (first == second), True, where=f"{error.got}")
    if expected == "gap":
        total = 1
        for size in shape:
            total *= size
        held = sum(len(list(product(*map(range, box.sizes)))) for box in boxes)
        assert_equal((error.got, error.expected), (f"{held} elements", f"{total} elements of {shape}"), where=where)
