"""Faults that ``test_declarations`` must notice."""

from __future__ import annotations

from types import SimpleNamespace

from conformance.harness import mutated, patched, swap

record_of_kvstore_thawed = patched(
    "A record can be changed behind the back of whoever was given it.",
    swap("twinproof.kvstore.deltas:SavedContent.__dataclass_params__", SimpleNamespace(frozen=False)),
    kills="KV-228",
)

arguments_of_kvstore_without_names = patched(
    "Arguments are taken by their places alone.",
    mutated("twinproof.kvstore.disk:_check_table", "*,", "/,"),
    kills="KV-229",
)
