"""Faults that ``test_declarations`` must notice."""

from __future__ import annotations

from types import SimpleNamespace

from conformance.harness import mutated, patched, swap

record_of_pipeline_thawed = patched(
    "A record can be changed behind the back of whoever was given it.",
    swap("twinproof.pipeline.config:UniformInit.__dataclass_params__", SimpleNamespace(frozen=False)),
    kills="PIPE-378",
)

arguments_of_pipeline_without_names = patched(
    "Arguments are taken by their places alone.",
    mutated("twinproof.pipeline.batches:select", "*,", "/,"),
    kills="PIPE-379",
)
