"""The operators under the offload component: the formula's bits on every path, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_tensor, examples, raises, requirement
from conformance.offload.cases import BLOCK_ELEMENTS, assert_same_numbers, values
from refimpl.optimizers import adam_step
from twinproof.optimizers import AdamHyper

ADAM = ("fused_cpu_adam",)
ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-40, 3.3e38, 1e-20)


def _arguments(count: int, grad: torch.dtype, weight: torch.dtype | None, largest: bool, seed: int) -> list[Any]:
    """Lists as ``ops.adam_step`` takes them, of one tensor, with odd values in all of them."""
    whole = [values((count,), seed + i) for i in range(5)]
    for number, tensor in enumerate(whole):
        if number in (3, 4):
            tensor.abs_()
        for position, odd in enumerate(ODD):
            at = (7 * position + 3 * number) % count if count else 0
            if count > 20 and (number < 3 or not odd < 0):
                tensor[at] = odd
    master, average, square, square_max = whole[1:]
    rounded = [] if weight is None else [torch.zeros(count, dtype=weight)]
    return [[whole[0].to(grad)], [master], [average], [square], [square_max] if largest else [], rounded]


_NAMES = ("grads", "masters", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "weights")


@requirement(
    "OPT-211",
    "One pass MUST have the bits of the formula, for every dtype and value, on every vector unit.",
    needs=ADAM,
)
@examples(60)
@given(
    count=st.integers(0, 300),
    grad=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    weight=st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32]),
    largest=st.booleans(),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    step=st.sampled_from([1, 2, 1000]),
)
def test_bits(
    offload: Any, count: int, grad: torch.dtype, weight: torch.dtype | None, largest: bool, step: int, **options: Any
) -> None:
    from fastimpl import ops

    ops.available()
    hyper = AdamHyper.of(lr=0.01, betas=(0.9, 0.999), eps=1e-8, step=step, **options)
    expected = _arguments(count, grad, weight, largest, count)
    adam_step(hyper, *(column[0] if column else None for column in expected))  # type: ignore[arg-type]
    for isa in _units():
        got = _arguments(count, grad, weight, largest, count)
        ops.adam_step(hyper, *got, isa=isa)
        for name, mine, theirs in zip(_NAMES, got, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert_same_numbers(a, b, where=f"{name} with unit {isa}")


def _units() -> list[int]:
    """Those that this machine has, and the choice of the operator."""
    kinds = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": [-1, 0, 1, 2], "AVX2": [-1, 0, 1]}.get(kinds, [-1, 0])


@requirement("OPT-212", "The number of threads MUST NOT change a bit.", needs=ADAM)
def test_threads(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    hyper = AdamHyper.of(lr=0.01, betas=(0.9, 0.999), eps=1e-8, step=2, weight_decay=0.1, decoupled=True)
    before, expected = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            lists = _arguments(200_001, torch.bfloat16, torch.bfloat16, True, 5)
            ops.adam_step(hyper, *lists)
            expected = expected or lists
            for name, mine, theirs in zip(_NAMES, lists, expected, strict=True):
                assert_same_tensor(mine[0], theirs[0], where=f"{name} with {count} threads")
    finally:
        torch.set_num_threads(before)


@requirement(
    "OPT-367",
    "A parameter that is larger than what a thread takes at a time MUST have the formula's bits in every element, one "
    "that is left over for itself among them.",
    needs=ADAM,
)
@pytest.mark.parametrize("count", [BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS + 1])
def test_blocks(offload: Any, count: int) -> None:
    from fastimpl import ops

    ops.available()
    hyper = AdamHyper.of(lr=0.01, betas=(0.9, 0.999), eps=1e-8, step=2, weight_decay=0.1, decoupled=True)
    lists, expected = (_arguments(count, torch.bfloat16, torch.bfloat16, True, 3) for _ in range(2))
    ops.adam_step(hyper, *lists)
    adam_step(hyper, *(column[0] for column in expected))
    for name, mine, theirs in zip(_NAMES, lists, expected, strict=True):
        assert_same_numbers(mine[0], theirs[0], where=f"{name} of {count} elements")


@requirement("OPT-213", "Operators MUST pass torch.library.opcheck, and version counters see writes.", needs=ADAM)
def test_opcheck(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    lists = _arguments(30, torch.bfloat16, torch.bfloat16, True, 1)
    hyper = AdamHyper.of(lr=0.01, betas=(0.9, 0.999), eps=1e-8, step=2, weight_decay=0.1, decoupled=True)
    slab, some = torch.zeros(600, dtype=torch.uint8), [values((5,), 1), values((3, 4), 2)]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.twinproof.offload_adam_step, (*lists, list(hyper.values), False, False, -1)),
        (torch.ops.twinproof.offload_pack, (some, slab, [0, 256])),
        (torch.ops.twinproof.offload_unpack, (some, slab, [0, 256])),
    ]
    for operator, arguments in calls:
        outcome = torch.library.opcheck(operator.default, arguments, raise_exception=False)
        wrong = {name: str(result) for name, result in outcome.items() if result != "SUCCESS"}
        assert_equal(wrong, {}, where=str(operator))
    written = [*(column[0] for column in lists[1:]), slab, *some]
    before = [tensor._version for tensor in written]
    ops.adam_step(hyper, *lists)
    ops.pack(some, slab, [0, 256])
    ops.unpack(some, slab, [0, 256])
    seen = [tensor._version > version for tensor, version in zip(written, before, strict=True)]
    assert_equal(seen, [True] * len(written), where="versions")


@requirement("OPT-214", "Lists that do not fit each other MUST be refused, with nothing written.", needs=ADAM)
def test_misuse(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    hyper = AdamHyper.of(lr=0.01, betas=(0.9, 0.999), eps=1e-8, step=2, weight_decay=0.1, decoupled=True)
    wrong: list[tuple[int, Any]] = [
        (0, []),
        (0, [torch.zeros(30, dtype=torch.int32)]),
        (0, [torch.zeros(29)]),
        (1, [torch.zeros(30, dtype=torch.bfloat16)]),
        (2, [torch.zeros(31)]),
        (3, [torch.zeros(60)[::2]]),
        (4, [torch.zeros(30, dtype=torch.float64)]),
        (5, [torch.zeros(30, dtype=torch.float64)]),
    ]
    for place, value in wrong:
        lists, untouched = (_arguments(30, torch.bfloat16, torch.bfloat16, True, 1) for _ in range(2))
        lists[place] = value
        with raises(RuntimeError, where=f"{_NAMES[place]} of {value}"):
            ops.adam_step(hyper, *lists)
        for number, (mine, theirs) in enumerate(zip(lists, untouched, strict=True)):
            if number != place:
                assert_same_tensor(mine[0], theirs[0], where=_NAMES[number])
    lists = _arguments(30, torch.bfloat16, torch.bfloat16, True, 1)
    with raises(RuntimeError, mentions=("isa",)):
        ops.adam_step(hyper, *lists, isa=3)
