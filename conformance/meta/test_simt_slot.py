"""The kernel of the update in a slot: the bits of the book under many schedules, and each planted fault is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
_KERNEL, _PLAN, _FORMULA = "offload/slot_kernel.h", "offload/slot_plan.h", "offload/foreach.h"


def test_updates_have_the_bits_of_the_book() -> None:
    verdicts = prove(build(_SOURCES / "slot.cpp"), case_count=15, seed_count=8)
    assert len(verdicts) == 5
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 240


@pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))
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
    _Bug("a tail as a whole vector", _KERNEL, "at + kVec <= count", "at < count", _BOUNDS),
    _Bug("a vector at any address", _PLAN, "bits % 16 == 0", "true", ("misaligned",)),
    _Bug(
        "the alignment of the parameter alone",
        _PLAN,
        " |= reinterpret_cast<uintptr_t>(state)",
        " |= 0",
        ("misaligned",),
    ),
    _Bug("an element past the end", _KERNEL, "i < at + kVec && i < count", "i < at + kVec && i <= count", _BOUNDS),
    _Bug("a tail left out", _KERNEL, "i < at + kVec && i < count", "i + 1 < at + kVec && i < count"),
    _Bug(
        "turns that overlap",
        _KERNEL,
        "(turn * threads + simt::thread())",
        "(turn + simt::thread())",
        ("race", "wrong-result"),
    ),
    _Bug("the block before", _KERNEL, ".first_block <= block", ".first_block < block", ("wrong-result", *_BOUNDS)),
    _Bug("numbers of the first group", _KERNEL, "hypers[entry.hyper]", "hypers[0]"),
    _Bug(
        "a state that is not stored",
        _KERNEL,
        "if constexpr (kStates > 2) entry.third",
        "if constexpr (kStates > 3) entry.third",
    ),
    _Bug(
        "what a launch has no room for is left out",
        _PLAN,
        "if (!add_to_slot(kernel, blocks, named, list[next], hypers, threads)) break;",
        "add_to_slot(kernel, blocks, named, list[next], hypers, threads);",
    ),
    _Bug("a product that rounds", _FORMULA, ": std::fma(alpha, a * b, sum)", ": sum + alpha * (a * b)"),
    _Bug("a moment that is not rounded", _FORMULA, "T::round(second * h.kept)", "second * h.kept"),
)


@pytest.mark.parametrize("bug", _BUGS, ids=lambda bug: bug.name)
def test_planted_faults_are_found(bug: _Bug) -> None:
    program = build(_SOURCES / "slot_of_one.cpp", planted=Planted(bug.name, bug.header, bug.old, bug.new))
    (verdict,) = prove(program, case_count=12, seed_count=6)
    assert verdict.faults
    assert {fault.kind for fault in verdict.faults} <= set(bug.kinds), "\n".join(map(str, verdict.faults))
