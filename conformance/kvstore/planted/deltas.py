"""Faults that ``test_deltas`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault


@fault(kills="KV-125", at="twinproof.kvstore.disk:check_base")
def deltas_on_any_base(original: Any, store: Any, table: str, bases: Any, where: str) -> None:
    """Once anything was loaded, any delta is taken."""
    if store.fingerprints.loaded(store, table) == "empty":
        original(store, table, bases, where)


@fault(kills="KV-126", at="twinproof.kvstore.deltas:digest_rows")
def moments_of_ids(original: Any, source: Any, table: str, ids: Any) -> int:
    """A fingerprint depends on ids alone, so that another run's delta passes."""
    return int(ids.sum()) % 2**64


@fault(kills="KV-130", at="twinproof.kvstore.disk:named")
def bases_of_ranks_lost(original: Any, store: Any, by_rank: Any, since: Any) -> Any:
    """A save by several ranks does not name its base, because their marks differ."""
    names, bases, steps = original(store, by_rank, since)
    if len(by_rank) == 1:
        return names, bases, steps
    return names, dict.fromkeys(bases, ()), steps


class _Calls:
    count = 0


@fault(kills="KV-127", at="twinproof.kvstore.deltas:fingerprint_of")
def names_of_histories(original: Any, rows: Any, removed: Any, row_count: int, bases: Any) -> str:
    """A fingerprint depends on what was saved before."""
    _Calls.count += 1
    return str(original(rows, removed, row_count + _Calls.count, bases))


@fault(kills="KV-128", at="twinproof.kvstore.disk:read_content")
def old_deltas_keep_what_they_remove(original: Any, metadata: Any, path: str) -> Any:
    """Removed ids of a version 2 delta stay."""
    content = original(metadata, path)
    return dataclasses.replace(content, kind="full") if content.version == 2 else content
