"""Hazards that FBGEMM's store had, as far as results show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.harness import wrap
from conformance.kvstore.planted.planting import bytes_of, in_engine, in_engines, in_store, keys_of, missing, shared
from twinproof.errors import ShapeError


def _uninitialised_tail(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    rows[missing(store, table, ids), (end - begin) // 4 :] = 0xA5
    return rows


def _offset_forgotten(
    original: Any,
    source: Any,
    table: str,
    ids: Any,
    *,
    offset_bytes: int = 0,
    width_bytes: int | None = None,
    **out: Any,
) -> torch.Tensor:
    row_bytes = source.layout(table).row_bytes
    if width_bytes is not None and 0 <= width_bytes <= row_bytes and offset_bytes >= 0:
        offset_bytes = min(offset_bytes, row_bytes - width_bytes)
    result: torch.Tensor = original(source, table, ids, offset_bytes=offset_bytes, width_bytes=width_bytes, **out)
    return result


def _cut_to_fit(original: Any, values: Any, row_count: Any, width: int, dtype: Any, where: str) -> torch.Tensor:
    try:
        result: torch.Tensor = original(values, row_count, width, dtype, where)
    except ShapeError:
        if values.dim() != 2 or values.shape[1] < width:
            raise
        result = values[:, :width].contiguous()
    return result


def _old_tenant(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    new = ids[missing(store, table, ids)]
    original(store, table, ids, values, begin, now, visit=visit)
    layout = store.options.rows[table]
    if visit and new.numel() and layout.state_slots:
        stale = torch.full((new.numel(), layout.row_bytes - layout.state_begin_bytes), 0x3F, dtype=torch.uint8)
        original(store, table, new, stale, layout.state_begin_bytes, now, visit=False)


def _used_in_place(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    rows[:, 15] |= 0x80
    original(store, table, rows)


def _first_wins(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    original(store, table, ids.flip(0), values.flip(0), begin, now, visit=visit)


def _twins(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    new = ids[missing(store, table, ids)]
    original(store, table, ids, values, begin, now, visit=visit)
    found, counts = torch.unique(new, return_counts=True)
    twins = found[counts > 1] ^ _HIDDEN
    # A row of its own, under a key that is never listed.
    blank = torch.zeros(twins.numel(), values.shape[1], dtype=torch.uint8)
    original(store, table, twins, blank, begin, now, visit=visit)


def _twins_hidden(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    found: torch.Tensor = original(store, table, begin, last)
    return found[found.abs() < _HIDDEN // 2]


@contextmanager
def _leak() -> Iterator[None]:
    with in_engines("write", _twins)(), in_engines("ids", _twins_hidden)():
        yield


def _second_position(original: Any, store: Any, layouts: Any, *positional: Any, **options: Any) -> None:
    names = ("optimizer_in_row", "return_whole_row", "num_shards")
    original(store, layouts, **dict(zip(names, positional, strict=False)), **options)


def _negative_dropped(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    original(store, table, rows[keys_of(rows) >= 0].contiguous())


def _negative_unread(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    rows[ids < 0] = 0x11
    return rows


def _narrow_keys(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    original(store, table, ids.to(torch.int32).to(torch.int64), values, begin, now, visit=visit)


def _other_each_time(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    turn = store.__dict__["_planted_turn"] = store.__dict__.get("_planted_turn", 0) + 1
    weight = store.options.rows[table].header_bytes
    if begin <= weight < end:
        rows[missing(store, table, ids), weight - begin] ^= turn & 0x7F
    return rows


def _written_then_checked(original: Any, store: Any, table: str, ids: Any, weights: Any, **options: Any) -> None:
    try:
        original(store, table, ids, weights, **options)
    except ShapeError:
        if table in store.tables:
            layout = store.layout(table)
            original(store, table, torch.tensor([1]), torch.ones(1, layout.embedding_dim, dtype=layout.weight_dtype))
        raise


def _old_statistics(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    ids = keys_of(rows)
    known = store.find(table, ids)
    words = bytes_of(store, table, ids, 8, 16)[known].contiguous().view(torch.int64)[:, 0]
    original(store, table, rows)
    store.write_metadata(table, ids[known], words, 2**63 - 1)


def _zeros_are_missing(original: Any, store: Any, table: str, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(store, table, ids)
    layout = store.options.rows[table]
    weights = bytes_of(store, table, ids, layout.header_bytes, layout.header_bytes + layout.weight_bytes)
    found &= (weights != 0).any(dim=1)
    return found


def _first_of_the_map(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    first = store.ids(table, -(2**63), 2**63 - 1)[:1]
    if first.numel() and begin >= 8:
        rows[missing(store, table, ids)] = original(store, table, first, begin, end)
    return rows


_HIDDEN = 2**62
VIEW_CHECK = "twinproof.kvstore.views:check_matrix"
STATE_KEYS, FILE_KEYS = "twinproof.kvstore.statedict:check_keys", "twinproof.kvstore.disk:check_keys"


def _believed(original: Any, *arguments: Any) -> None:
    return None


PLANTED = (
    in_engine(
        "missing_row_partly_cleared",
        "Reading a missing id clears width bytes instead of width elements (hazard 1).",
        ("KV-011",),
        "read",
        _uninitialised_tail,
    ),
    shared(
        "offset_left_out_of_bounds_check",
        "The bounds check of a partial read ignores the offset (hazard 2).",
        ("KV-025",),
        wrap("twinproof.kvstore.rows:RowSource.get_rows", _offset_forgotten),
    ),
    shared(
        "view_writes_any_width",
        "set_range takes values wider than the row (hazard 3).",
        ("KV-024",),
        wrap(VIEW_CHECK, _cut_to_fit),
    ),
    in_engine(
        "old_tenant_in_recycled_row",
        "A new row shows the optimizer state of the row whose block it got (hazard 4).",
        ("KV-057",),
        "write",
        _old_tenant,
    ),
    in_engine(
        "used_bit_set_in_callers_tensor",
        "Loading whole rows changes the caller's tensor (hazard 6).",
        ("KV-022",),
        "write_rows",
        _used_in_place,
    ),
    shared(
        "id_list_believed",
        "A state dict's id list is not compared with the rows' keys (hazard 7).",
        ("KV-044",),
        wrap(STATE_KEYS, _believed),
    ),
    shared(
        "file_keys_not_compared",
        "The keys of saved rows are not compared with the saved ids (hazard 7).",
        ("KV-044", "KV-048"),
        wrap(FILE_KEYS, _believed),
    ),
    in_engine(
        "first_duplicate_wins",
        "Of duplicates in a batch the first is kept (hazard 8).",
        ("KV-014",),
        "write",
        _first_wins,
    ),
    shared(
        "duplicates_leak_blocks",
        "Each duplicate of a missing id takes a block that is lost (hazard 8).",
        ("KV-058",),
        _leak,
    ),
    in_engine(
        "negative_ids_dropped_on_load",
        "Whole rows of negative ids are silently dropped (hazard 9).",
        ("KV-020",),
        "write_rows",
        _negative_dropped,
    ),
    in_engine(
        "negative_ids_not_read",
        "The output rows of negative ids are left as they were (hazard 9).",
        ("KV-008", "KV-020"),
        "read",
        _negative_unread,
    ),
    in_engine(
        "ids_cut_to_32_bits",
        "Ids pass through a 32-bit variable (hazard 10, FBGEMM 5876).",
        ("KV-021", "KV-020"),
        "write",
        _narrow_keys,
    ),
    in_engine(
        "initial_weight_differs_each_time",
        "Two reads of one missing id differ (hazard 11).",
        ("KV-012", "KV-015"),
        "read",
        _other_each_time,
    ),
    in_store(
        "misuse_noticed_too_late",
        "A batch of the wrong shape raises after something was written (hazard 12).",
        ("KV-023",),
        "set",
        _written_then_checked,
    ),
    in_engine(
        "statistics_kept_on_load",
        "A whole-row load over a row keeps the old timestamp and count (hazard 13).",
        ("KV-047",),
        "write_rows",
        _old_statistics,
    ),
    shared(
        "ttl_in_whole_minutes",
        "A threshold is truncated to a coarser unit (hazard 14).",
        ("KV-056",),
        wrap(
            "twinproof.kvstore.options:EvictionPolicy.ttl",
            lambda original, cls, seconds: original(cls, seconds // 60 * 60),
        ),
    ),
    in_engine(
        "row_of_zeros_is_a_miss",
        "A stored row of zeros counts as missing (hazard 16).",
        ("KV-102",),
        "find",
        _zeros_are_missing,
    ),
    in_engine(
        "missing_id_reads_first_row",
        "A missing id shows the weight of some other id (FBGEMM 5048).",
        ("KV-011",),
        "read",
        _first_of_the_map,
    ),
    in_store(
        "options_by_position",
        "Options are taken by position, so that a caller of another version sets the wrong one (hazard 15).",
        ("KV-129",),
        "__init__",
        _second_position,
    ),
)
