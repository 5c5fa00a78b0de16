"""Faults of key-value tables under schedules: rows that were read too early."""

from __future__ import annotations

from typing import Any

from conformance.harness import swap, wrap
from conformance.pipeline.planted.planting import fast

_PREFETCH = "fastimpl.pipeline.prefetch"


def _not_again(original: Any, rows: Any, *given: Any) -> None:
    ahead, held = rows._ahead(), rows._held
    rows._held = None
    original(rows, *given)
    rows._held = held
    if ahead is not None:
        ahead.mark.mark = rows.store.mark()


def _hoisted_whatever(original: Any, p: Any, call: Any) -> bool:
    return not p.is_late(call)


def _always_now(mark: Any) -> bool:
    return True


def _unused(original: Any, rows: Any, ids: Any) -> Any:
    original(rows, ids)
    rows._held = None
    return original(rows, ids)


PLANTED = (
    fast(
        "updated_rows_not_read_again",
        "Rows that the step before updates stay as they were prefetched.",
        ("PIPE-138", "PIPE-139"),
        wrap(f"{_PREFETCH}:PrefetchedRows.step", _not_again),
    ),
    fast(
        "prefetched_rows_outlive_edits",
        "Rows written between steps are not read again.",
        ("PIPE-138",),
        swap(f"{_PREFETCH}:StoreMark.is_now", _always_now),
    ),
    fast(
        "stored_rows_hoisted",
        "Rows of a store are looked up before the optimizer, and edits go unseen.",
        ("PIPE-138",),
        wrap("fastimpl.pipeline.schedules:may_hoist", _hoisted_whatever),
    ),
    fast(
        "prefetched_rows_read_twice",
        "Rows are read at the lookup although they were prefetched.",
        ("PIPE-145",),
        wrap(f"{_PREFETCH}:PrefetchedRows.read", _unused),
    ),
)
