"""Faults that ``test_declarations`` must notice."""

from __future__ import annotations

from types import SimpleNamespace

from conformance.harness import mutated, patched, swap

record_of_offload_thawed = patched(
    "A record can be changed behind the back of whoever was given it.",
    swap("twinproof.offload.driver:Update.__dataclass_params__", SimpleNamespace(frozen=False)),
    kills="OPT-358",
)

arguments_of_offload_without_names = patched(
    "Arguments are taken by their places alone.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader.__init__", "*,", "/,"),
    kills="OPT-359",
)
