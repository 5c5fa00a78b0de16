"""The operators under the offload component, called as nobody should: each refuses, and nothing is written."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, assert_refused, assert_same_tensor, requirement

NEEDS = ("fused_updates",)
_ADAM_NUMBERS = [0.9, 0.1, 0.99, 0.01, 1.0, 1.0, 1e-8, 0.0, 1.0]
_SLOT_NUMBERS = [1.0, 0.0, 0.1, 0.9, 0.1, 1.0, -0.1, 1e-8, 0.0]

Call = tuple[Any, list[Any]]


def _changed(good: list[Any], changes: dict[str, dict[int, Any]], operator: Any) -> dict[str, Call]:
    return {what: (operator, [by.get(i, value) for i, value in enumerate(good)]) for what, by in changes.items()}


def _adam() -> dict[str, Call]:
    ones, gaps = [torch.ones(6)], [torch.ones(12)[::2]]
    good: list[Any] = [*([torch.ones(6)] for _ in range(4)), [], [], _ADAM_NUMBERS, False, False, 0]
    changes: dict[str, dict[int, Any]] = {
        "no gradient": {0: []},
        "two gradients": {0: ones * 2},
        "a gradient of another shape": {0: [torch.ones(5)]},
        "a gradient of float64": {0: [torch.ones(6, dtype=torch.float64)]},
        "masters of bfloat16": {1: [torch.ones(6, dtype=torch.bfloat16)]},
        "masters with gaps": dict.fromkeys(range(4), gaps),
        "averages of float64": {2: [torch.ones(6, dtype=torch.float64)]},
        "no squares": {3: []},
        "two maxima": {4: ones * 2},
        "weights of another shape": {5: [torch.ones(2, 3)]},
        "weights of float64": {5: [torch.ones(6, dtype=torch.float64)]},
        "eight numbers": {6: _ADAM_NUMBERS[:8]},
        "ten numbers": {6: [*_ADAM_NUMBERS, 0.0]},
        "an instruction set that nobody has": {9: 99},
        "an instruction set of -2": {9: -2},
    }
    return _changed(good, changes, torch.ops.twinproof.offload_adam_step)


def _slot() -> dict[str, Call]:
    good: list[Any] = [2, *([torch.ones(6)] for _ in range(4)), [], [0], _SLOT_NUMBERS]
    changes: dict[str, dict[int, Any]] = {
        "numbers of -1": {6: [-1]},
        "numbers that are not there": {6: [1]},
        "flags of -1": {7: [*_SLOT_NUMBERS[:8], -1.0]},
        "flags that mean nothing": {7: [*_SLOT_NUMBERS[:8], 16.0]},
        "half a set of numbers": {7: [*_SLOT_NUMBERS, 1.0]},
        "a state of two dimensions": {3: [torch.ones(2, 3)]},
        "parameters with gaps": {number: [torch.ones(12)[::2]] for number in range(1, 5)},
    }
    return _changed(good, changes, torch.ops.twinproof.offload_slot_step)


def _packs() -> dict[str, Call]:
    good: list[Any] = [[torch.ones(3), torch.ones(2)], torch.zeros(64, dtype=torch.uint8), [0, 16]]
    changes: dict[str, dict[int, Any]] = {
        "a slab of float32": {1: torch.zeros(16)},
        "a slab with gaps": {1: torch.zeros(128, dtype=torch.uint8)[::2]},
        "a slab of two dimensions": {1: torch.zeros(8, 8, dtype=torch.uint8)},
        "an offset less": {2: [0]},
        "an offset before the first byte": {2: [-1, 16]},
        "offsets that overlap": {2: [0, 11]},
        "offsets that descend": {2: [16, 0]},
        "an offset whose tensor ends behind the slab": {2: [0, 57]},
        "an offset at the end of its range": {2: [0, 2**63 - 1]},
        "a tensor with gaps": {0: [torch.ones(6)[::2], torch.ones(2)]},
        "a transposed tensor with gaps": {0: [torch.ones(3, 4).t()[:, :2], torch.ones(2)]},
    }
    calls: dict[str, Call] = {}
    for name in ("pack", "unpack"):
        found = _changed(good, changes, getattr(torch.ops.twinproof, f"offload_{name}"))
        calls |= {f"{name}: {what}": call for what, call in found.items()}
    return calls


def _copies() -> dict[str, Call]:
    good: list[Any] = [[torch.ones(3), torch.ones(2)], [torch.zeros(3), torch.zeros(2)]]
    changes: dict[str, dict[int, Any]] = {
        "a target less": {0: [torch.ones(3)]},
        "another dtype": {1: [torch.zeros(3), torch.zeros(2, dtype=torch.int32)]},
        "another shape": {1: [torch.zeros(3), torch.zeros(1, 2)]},
        "other strides": {0: [torch.ones(2, 2), torch.ones(2)], 1: [torch.zeros(2, 2).t(), torch.zeros(2)]},
        "gaps": {0: [torch.ones(3), torch.ones(4)[::2]], 1: [torch.zeros(3), torch.zeros(4)[::2]]},
    }
    calls: dict[str, Call] = {}
    for name in ("copy", "copy_count"):
        found = _changed(good, changes, getattr(torch.ops.twinproof, f"offload_{name}"))
        calls |= {f"{name}: {what}": call for what, call in found.items()}
    make = torch.ops.twinproof.offload_slab
    for what, numbers in {
        "a slab of 0 bytes": (0, -1, -1),
        "a slab of -1 bytes": (-1, -1, -1),
        "a slab for device -2": (4096, -2, -1),
        "a slab on node -2": (4096, -1, -2),
    }.items():
        calls[what] = (make, list(numbers))
    return calls


@requirement(
    "OPT-345",
    "Every operator of offload MUST refuse tensors and numbers that do not fit each other, and then write nothing; to "
    "pack nothing is no misfit.",
    needs=NEEDS,
)
def test_misfits(offload: Any) -> None:
    from fastimpl import ops

    assert_equal(ops.available(), True, where="the library")
    made_count = ops.slab_counts().made_count
    for group, calls in (("adam", _adam()), ("slot", _slot()), ("slabs", _packs()), ("copies", _copies())):
        for what, (operator, arguments) in calls.items():
            assert_refused(operator, arguments, where=f"{group}: {what}")
    assert_equal(ops.slab_counts().made_count, made_count, where="slabs made by calls that were refused")
    operators = torch.ops.twinproof
    slab = torch.full((8,), 7, dtype=torch.uint8)
    operators.offload_pack([], slab, [])
    operators.offload_unpack([], slab, [])
    assert_equal(operators.offload_copy_count([], []), 0, where="copies of nothing")
    assert_same_tensor(slab, torch.full((8,), 7, dtype=torch.uint8), where="slab after nothing")
