"""Faults that ``test_deltas`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched


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


removals_of_every_part = patched(
    "A load of a part of a delta removes the ids of all parts.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "removed[(found >= begin) & (found < end)]", "removed"),
    kills="KV-244",
)


@fault(kills="KV-244", at="twinproof.kvstore.disk:_Load.write")
def rows_of_every_part(original: Any, job: Any, table: str, waiting: Any, ids: Any) -> tuple[int, int]:
    """A load of a part into an empty table reports the rows of all parts."""
    was_empty = job.store.size(table) == 0
    count, other_count = original(job, table, waiting, ids)
    return int(job.saved.size(table)) if was_empty else count, other_count


_NOTE = "twinproof.kvstore.deltas:note_load"
weights_alone_are_a_base = patched(
    "A load of weights alone counts as all that was saved.",
    mutated(_NOTE, " and not weights_only", ""),
    kills="KV-245",
)
rounded_rows_are_a_base = patched(
    "A load that rounds its rows counts as what was saved.",
    mutated(_NOTE, "saved.layouts[table] == store.layout(table)", "True"),
    kills="KV-245",
)
other_rows_are_a_base = patched(
    "A load beside other rows counts as what was saved.",
    mutated(_NOTE, "counts[table] == store.size(table)", "True"),
    kills="KV-245",
)
newer_rows_are_a_base = patched(
    "A delta that was loaded beside rows newer than its base counts as what was saved.",
    mutated(
        _NOTE, "bool(set(store.fingerprints.at(mark, table)) & set(saved.bases.get(table, ())))", "bool(saved.bases)"
    ),
    kills="KV-291",
)
deltas_of_weights_are_a_base = patched(
    "A delta of which the weights alone were loaded counts as what was saved.",
    mutated(
        _NOTE,
        "whole and bool(set(store.fingerprints.at(mark, table)) & set(saved.bases.get(table, ())))",
        "bool(set(store.fingerprints.at(mark, table)) & set(saved.bases.get(table, ())))",
    ),
    kills="KV-291",
)
names_outlive_broken_loads = patched(
    "A load that ends in the middle leaves the name of what was loaded before.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "store.fingerprints.set_loaded(table, None)", "pass"),
    kills="KV-258",
)
failed_saves_named = patched(
    "A save is remembered before it is written.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.save",
        "planned_s = time.perf_counter()",
        "planned_s = time.perf_counter(); store.fingerprints.note(mark, fingerprints)",
    ),
    kills="KV-259",
)
state_dicts_change_no_name = patched(
    "A table that was loaded from a state dict goes by the name of what it was loaded from before.",
    mutated("twinproof.kvstore.statedict:load_state_dict", "store.fingerprints.set_loaded(table, None)", "pass"),
    kills="KV-263",
)
views_change_no_name = patched(
    "A table that was loaded through its views goes by the name of what it was loaded from before.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner._write",
        'cast("DeltaStore", view.source).fingerprints.set_loaded(view.table, None)',
        "pass",
    ),
    kills="KV-263",
)
ids_of_no_bucket_are_refused = patched(
    "A delta that removes an id outside of all buckets cannot be loaded.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "nearest_bucket_of(removed", "bucket_of(removed"),
    kills="KV-295",
)
ids_of_no_bucket_stay = patched(
    "Removed ids outside of all buckets are nobody's.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "nearest_bucket_of(removed, saved.buckets)",
        "removed.div(saved.buckets.bucket_size or 1, rounding_mode='floor')",
    ),
    kills="KV-295",
)
state_dicts_forget_before_they_look = patched(
    "A state dict that is refused leaves tables that take no delta.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "names = tables_of(store.tables, tables)",
        "names = tables_of(store.tables, tables); [store.fingerprints.set_loaded(each, None) for each in names]",
    ),
    kills="KV-300",
)
loads_forget_before_they_look = patched(
    "A file that is refused leaves tables that take no delta.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "gone = {}",
        "gone = {}; [store.fingerprints.set_loaded(each, None) for each in names if saved.kind == 'full']",
    ),
    kills="KV-300",
)


mark_of_the_end = patched(
    "A save reports the mark of its end, not of the moment that it holds: what was written meanwhile is in no delta.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.save",
        "SaveReport(counts, deleted, mark, phases)",
        "SaveReport(counts, deleted, store.mark(), phases)",
    ),
    kills="KV-308",
)

one_name_for_a_moment = patched(
    "Of several saves of one moment the last alone is a base of deltas.",
    mutated(
        "twinproof.kvstore.deltas:Fingerprints.note",
        "known.setdefault(table, {})[name] = part",
        "known[table] = {name: part}",
    ),
    kills="KV-312",
)

the_beginning_has_no_name = patched(
    "A delta since the beginning names no base: it loads over anything.",
    mutated("twinproof.kvstore.deltas:Fingerprints.at", "{EMPTY} if mark == 0 else set()", "set()"),
    kills="KV-314",
)
named_without_a_base = patched(
    "A delta of a moment that nothing names has a name: the next one loads after it alone.",
    mutated("twinproof.kvstore.deltas:named", "if since is None or bases[table]:", "if True:"),
    kills="KV-314",
)

mark_of_later_on = patched(
    "A save reports the store's mark of later on, and not its snapshot's.",
    mutated("twinproof.kvstore.disk:StoreFiles.save", "source.mark()", "store.mark()"),
    kills="KV-333",
)

cleared_and_still_a_base = patched(
    "A table that was cleared counts as what it was loaded from.",
    mutated("twinproof.kvstore.store:KVStore.clear", "with self.fingerprints.forgetting(table):", "if True:"),
    kills="KV-356",
)
cleared_is_no_beginning = patched(
    "A table that was cleared is no base of any delta, though it was never loaded.",
    mutated("twinproof.kvstore.deltas:Fingerprints.forget", "if table in self._loaded:", "if True:"),
    kills="KV-356",
)
every_table_forgotten = patched(
    "When one table is cleared, the others are no bases any more.",
    mutated(
        "twinproof.kvstore.deltas:Fingerprints.forget",
        "self._loaded[table] = None",
        "self._loaded.update(dict.fromkeys(self._loaded))",
    ),
    kills="KV-356",
)
