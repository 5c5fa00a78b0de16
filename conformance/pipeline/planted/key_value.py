"""Faults of key-value tables under schedules: rows that were read too early."""

from __future__ import annotations

from typing import Any

from conformance.harness import swap, wrap
from conformance.pipeline.planted.planting import fast

_PREFETCH = "fastimpl.pipeline.prefetch"


def _not_again(original: Any, bags: Any, some: Any, grad: Any) -> None:
    ahead, held = bags._ahead(), bags._held
    bags._held = None
    original(bags, some, grad)
    bags._held = held
    if ahead is not None:
        ahead.moment.mark = bags.store.mark()


def _hoisted_whatever(original: Any, schedule: Any, call: Any) -> bool:
    return not schedule._is_late(call)


def _always_now(moment: Any) -> bool:
    return True


def _unused(original: Any, bags: Any, some: Any) -> Any:
    original(bags, some)
    bags._held = None
    return original(bags, some)


PLANTED = (
    fast(
        "updated_rows_not_read_again",
        "Rows that the step before updates stay as they were prefetched.",
        ("PIPE-138", "PIPE-139"),
        wrap(f"{_PREFETCH}:PrefetchedBags._step", _not_again),
    ),
    fast(
        "prefetched_rows_outlive_edits",
        "Rows written between steps are not read again.",
        ("PIPE-138",),
        swap(f"{_PREFETCH}:_Moment.is_now", _always_now),
    ),
    fast(
        "stored_rows_hoisted",
        "Rows of a store are looked up before the optimizer, and edits go unseen.",
        ("PIPE-138",),
        wrap("fastimpl.pipeline.schedules:_LooksUp._may_hoist", _hoisted_whatever),
    ),
    fast(
        "prefetched_rows_read_twice",
        "Rows are read at the lookup although they were prefetched.",
        ("PIPE-145",),
        wrap(f"{_PREFETCH}:PrefetchedBags._rows", _unused),
    ),
)
