"""Faults that ``test_declarations`` must notice."""

from __future__ import annotations

from types import SimpleNamespace

from conformance.harness import mutated, patched, swap

record_of_checkpoint_thawed = patched(
    "A record can be changed behind the back of whoever was given it.",
    swap("twinproof.checkpoint.catalog:StoredChunk.__dataclass_params__", SimpleNamespace(frozen=False)),
    kills="CKPT-518",
)

arguments_of_checkpoint_without_names = patched(
    "Arguments are taken by their places alone.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__init__", "*,", "/,"),
    kills="CKPT-519",
)
