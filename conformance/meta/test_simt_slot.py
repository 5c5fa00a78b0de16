"""The kernel of the update in a slot: the bits of the book under many schedules, and each planted fault is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.meta.simt_faults import PlantedTogether
from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
_KERNEL, _PLAN, _FORMULA = "offload/slot_kernel.h", "offload/slot_plan.h", "offload/foreach.h"


@pytest.mark.parametrize("seed_count", [1, pytest.param(8, marks=pytest.mark.night)])
def test_updates_have_the_bits_of_the_book(seed_count: int) -> None:
    verdicts = prove(build(_SOURCES / "slot.cpp"), case_count=15, seed_count=seed_count)
    assert len(verdicts) == 5
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 2 * 15 * seed_count


@pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))
@pytest.mark.night  # ci/kernels.py judges the kernels as ci/setup has built them.
def test_the_table_stays_in_the_arguments() -> None:
    # A table that is indexed by a number of the block may be copied to the stack of every thread.
    found = device_usage(_SOURCES / "slot.cu", architectures=["90"])
    assert len(found) == 15
    assert all(usage.spill_bytes == 0 and usage.stack_bytes == 0 for usage in found), found
    assert all(usage.register_count <= 128 for usage in found), found


@dataclass(frozen=True)
class _Bug:
    """``old`` becomes ``new`` in a header; what is found is one of ``kinds``."""

    name: str
    header: str
    old: str
    new: str
    kinds: tuple[str, ...] = ("wrong-result",)


_BOUNDS = ("out-of-bounds", "race")
_BUGS = (
    _Bug("a tail as a whole vector", _KERNEL, "at + kVec <= count", "at + (FAULT ? 1 : kVec) <= count", _BOUNDS),
    _Bug("a vector at any address", _PLAN, "bits % 16 == 0", "(FAULT || bits % 16 == 0)", ("misaligned",)),
    _Bug(
        "the alignment of the parameter alone",
        _PLAN,
        " |= reinterpret_cast<uintptr_t>(state)",
        " |= FAULT ? 0 : reinterpret_cast<uintptr_t>(state)",
        ("misaligned",),
    ),
    _Bug("an element past the end", _KERNEL, "&& i < count", "&& i < count + FAULT", _BOUNDS),
    _Bug("a tail left out", _KERNEL, "i < at + kVec", "i + FAULT < at + kVec"),
    _Bug(
        "turns that overlap",
        _KERNEL,
        "(turn * threads + simt::thread())",
        "((FAULT ? turn : turn * threads) + simt::thread())",
        ("race", "wrong-result"),
    ),
    _Bug(
        "the block before",
        _KERNEL,
        ".first_block <= block",
        ".first_block + FAULT <= block",
        ("wrong-result", *_BOUNDS),
    ),
    _Bug("numbers of the first group", _KERNEL, "hypers[entry.hyper]", "hypers[FAULT ? 0 : entry.hyper]"),
    _Bug(
        "a state that is not stored",
        _KERNEL,
        "if constexpr (kStates > 2) entry.third",
        "if constexpr (kStates > 2) if (!FAULT) entry.third",
    ),
    _Bug(
        "what a launch has no room for is left out",
        _PLAN,
        "if (!add_to_slot(kernel, blocks, named, list[next], hypers, threads)) break;",
        "if (!add_to_slot(kernel, blocks, named, list[next], hypers, threads) && !FAULT) break;",
    ),
    _Bug(
        "a product that rounds",
        _FORMULA,
        ": std::fma(alpha, a * b, sum)",
        ": FAULT ? sum + alpha * (a * b) : std::fma(alpha, a * b, sum)",
    ),
    _Bug(
        "a moment that is not rounded",
        _FORMULA,
        "T::round(second * h.kept)",
        "(FAULT ? second * h.kept : T::round(second * h.kept))",
    ),
)


_PLANTED = PlantedTogether(
    _SOURCES / "slot_of_one.cpp",
    ("amsgrad",),
    [Planted(bug.name, bug.header, bug.old, bug.new) for bug in _BUGS],
    case_count=12,
    seed_count=6,
)


def test_without_a_fault_nothing_is_found() -> None:
    assert _PLANTED.found_without() == []


@pytest.mark.parametrize("number", range(1, len(_BUGS) + 1), ids=[bug.name for bug in _BUGS])
def test_planted_faults_are_found(number: int) -> None:
    found = _PLANTED.found(number)
    assert found
    assert {fault.kind for fault in found} <= set(_BUGS[number - 1].kinds), "\n".join(map(str, found))
