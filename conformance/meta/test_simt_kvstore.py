"""The kernels of a store on a device: the rows of the host's table in every schedule, and each planted fault is found.

The faults, at least three of each kernel, are planted in one program, which is told by number which of them it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from conformance.provers.simt import Planted, build, prove, why_no_prover
from twinproof.optimizers import FUSED_OPTIMIZERS

needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
_PROOFS = {
    "cache",
    "growth",
    "guess",
    "index",
    "left lines",
    "lines",
    "log",
    "moments",
    "removals",
    "rest",
    "rows",
    *FUSED_OPTIMIZERS,
}
_KERNELS = {
    "AddRows",
    "AssignSlots",
    "CondemnRows",
    "CopyRows",
    "CountUp",
    # What the host does about them.
    "DeviceTable",
    "DropLines",
    "EraseEntries",
    "FillSets",
    "FindIds",
    "HashIds",
    "HideNewer",
    "InsertRest",
    "InsertRuns",
    "KeysOfRows",
    "ListBuckets",
    "ListRows",
    "ListRuns",
    "ListSets",
    "MarkOlder",
    "MarkRuns",
    "MarkSlots",
    "MoveRows",
    "PickAt",
    "PickMarked",
    "RankRows",
    "ReadInitial",
    "ReadRows",
    "SetMarks",
    "SortableKeys",
    "SortableSlots",
    "TellFound",
    "TouchLines",
    "UpdateRows",
    "WriteMetadata",
    "WriteValues",
    "WriteWhole",
}
_KINDS = {
    "wrong": ("wrong-result",),
    "outside": ("out-of-bounds",),
    "lanes": ("mask", "returned-lane", "deadlock", "shuffle-outside-mask"),
    # What a wrong index or list leads to, in whichever kernel comes first.
    "later": ("wrong-result", "out-of-bounds", "race", "uninitialized"),
}


@dataclass(frozen=True)
class _Fault:
    """``proof`` finds it in ``kernel``, and reports one of ``kinds``."""

    kernel: str
    proof: str
    kinds: tuple[str, ...]
    planted: Planted


def _faults() -> Iterator[_Fault]:
    for block in (_SOURCES / "kvstore_faults.txt").read_text(encoding="utf-8").split("\n= ")[1:]:
        head, *lines = block.split("\n")
        kernel, proof, header, kinds, name = head.split(" | ")
        old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
        found = tuple(kind for word in kinds.split() for kind in _KINDS.get(word, (word,)))
        yield _Fault(kernel, proof, found, Planted(f"{kernel}: {name}", f"kvstore/{header}", old, new))


_FAULTS = tuple(_faults())


@cache
def _planted_program() -> Path:
    return build(_SOURCES / "kvstore_planted.cpp", planted=[fault.planted for fault in _FAULTS])


@pytest.mark.night
@needs_prover
def test_rows_are_those_of_the_host() -> None:
    verdicts = prove(build(_SOURCES / "kvstore.cpp"), case_count=20, seed_count=1)
    assert {verdict.name for verdict in verdicts} == _PROOFS
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 40


@needs_prover
def test_without_a_fault_nothing_is_found() -> None:
    for proof in sorted({fault.proof for fault in _FAULTS}):
        (verdict,) = prove(_planted_program(), only=f"{proof} 0", case_count=3, seed_count=1)
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))


def test_each_kernel_has_three_faults() -> None:
    counts = Counter(fault.kernel for fault in _FAULTS)
    assert set(counts) == _KERNELS
    assert min(counts.values()) >= 3


@needs_prover
@pytest.mark.parametrize("number", range(len(_FAULTS)), ids=[fault.planted.name for fault in _FAULTS])
def test_a_planted_fault_is_found(number: int) -> None:
    fault = _FAULTS[number]
    (verdict,) = prove(_planted_program(), only=f"{fault.proof} {number + 1}", case_count=60, seed_count=1)
    assert verdict.faults
    assert {found.kind for found in verdict.faults} <= set(fault.kinds), "\n".join(map(str, verdict.faults))
