"""Faults that are planted together in one program: compiling, which is what they cost, is done once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from conformance.provers.simt import Fault, Planted, build, prove

__all__ = ["PlantedTogether"]


@dataclass(frozen=True)
class PlantedTogether:
    """A program whose ``main`` is that of ``simt/planted.h``.

    Args:
        source: the program.
        proofs: names of its proofs in a build with faults.
        faults: ``FAULT`` in their replacements is whether the program has this one.
        case_count, seed_count: of each proof with one fault.
    """

    source: Path
    proofs: Sequence[str]
    faults: Sequence[Planted]
    case_count: int
    seed_count: int

    @cached_property
    def _program(self) -> Path:
        return build(self.source, planted=self.faults)

    def found(self, number: int, proof: str | None = None) -> list[Fault]:
        """What ``proof``, else the first that sees it, reports of fault ``number``; they count from 1."""
        for name in self.proofs if proof is None else (proof,):
            (verdict,) = prove(
                self._program, only=f"{name} {number}", case_count=self.case_count, seed_count=self.seed_count
            )
            if verdict.faults:
                return list(verdict.faults)
        return []

    def found_without(self) -> list[Fault]:
        """What proofs report without a fault: nothing, or what is found with one shows little."""
        verdicts = [prove(self._program, only=f"{name} 0", case_count=5, seed_count=1)[0] for name in self.proofs]
        return [fault for verdict in verdicts for fault in verdict.faults]
