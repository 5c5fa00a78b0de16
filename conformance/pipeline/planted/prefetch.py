"""Faults that ``test_prefetch`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills=("PIPE-138", "PIPE-139"), at="fastimpl.pipeline.prefetch:PrefetchedRows.step")
def updated_rows_not_read_again(original: Any, rows: Any, *given: Any) -> None:
    """Rows that the step before updates stay as they were prefetched."""
    ahead, held = rows._ahead(), rows._held
    rows._held = None
    original(rows, *given)
    rows._held = held
    if ahead is not None:
        ahead.mark.mark = rows.store.mark()


@fault(kills="PIPE-138", at="fastimpl.pipeline.prefetch:StoreMark.is_now")
def prefetched_rows_outlive_edits(original: Any, mark: Any) -> bool:
    """Rows written between steps are not read again."""
    return True


@fault(kills="PIPE-138", at="fastimpl.pipeline.schedules:may_hoist")
def stored_rows_hoisted(original: Any, p: Any, call: Any) -> bool:
    """Rows of a store are looked up before the optimizer, and edits go unseen."""
    return not p.is_late(call)


@fault(kills="PIPE-145", at="fastimpl.pipeline.prefetch:PrefetchedRows.read")
def prefetched_rows_read_twice(original: Any, rows: Any, ids: Any) -> Any:
    """Rows are read at the lookup although they were prefetched."""
    original(rows, ids)
    rows._held = None
    return original(rows, ids)


rows_evicted_by_the_update = patched(
    "Rows that an update evicted for its table's capacity are taken as they were read ahead.",
    mutated("fastimpl.pipeline.prefetch:PrefetchedRows._read_again", "may_evict or", "False or"),
    kills="PIPE-543",
    of="fastimpl",
)


@fault(kills="PIPE-543", at="fastimpl.pipeline.prefetch:PrefetchedRows.step", of="fastimpl")
def rows_changed_in_the_update(original: Any, rows: Any, *given: Any) -> None:
    """Whatever changes a store during a table's update is taken for the update alone."""
    ahead = rows._ahead()
    known = ahead is not None and ahead.mark.is_now()
    original(rows, *given)
    if known:
        ahead.mark.mark = rows.store.mark()


changes_before_an_update_missed = patched(
    "What somebody changes before an update is taken for the update's.",
    mutated(
        "fastimpl.pipeline.prefetch:PrefetchedRows.step",
        "if ahead is not None and self.store.mark() == ahead.mark.mark + 1:",
        "if ahead is not None:\n        ahead.mark.mark = self.store.mark() - 1",
    ),
    kills="PIPE-597",
    of="fastimpl",
)
