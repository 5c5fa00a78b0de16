"""Faults in the bytes of rows, in values, headers, ids and buckets."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import swap, wrap
from conformance.kvstore.planted.planting import (
    exported,
    in_engine,
    in_store,
    keys_of,
    missing,
    reference,
    shared,
)
from twinproof.kvstore import rows as shared_rows
from twinproof.optimizers import OPTIMIZERS


def _used_lost(original: Any, header: Any) -> torch.Tensor:
    packed: torch.Tensor = original(header)
    packed[header.counts >= 2**31 - 1, 15] &= 0x7F
    return packed


def _time_in_count(original: Any, header: Any) -> torch.Tensor:
    packed: torch.Tensor = original(header)
    packed[:, 12] ^= packed[:, 11]
    return packed


def _sign_kept(original: Any, store: Any, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
    original(store, table, ids, words & ~(1 << 32), mask)


def _swapped_states() -> dict[str, Any]:
    states = dict(OPTIMIZERS)
    kind = states["partial_rowwise_adam"]
    return states | {kind.name: dataclasses.replace(kind, states=tuple(reversed(kind.states)))}


def _padding_kept(original: Any, row_layout: Any, rows: torch.Tensor) -> torch.Tensor:
    result = rows.clone()
    result[:, 15] |= 0x80
    return result


def _first_tables_layout(original: Any, source: Any, table: str, state: str) -> Any:
    slot = original(source, table, state)
    widest = max(source.layout(name).state_begin_bytes for name in source.tables)
    room = source.layout(table).row_bytes - slot.end_bytes
    return dataclasses.replace(slot, offset_bytes=slot.offset_bytes + min(room, widest - 16) // 4 * 4)


def _state_dtypes_lost(original: Any, cls: Any, text: str) -> Any:
    found = original(cls, text)
    return cls(found.embedding_dim, found.weight_dtype, found.optimizer)


def _inserting_read(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    new = ids[missing(store, table, ids)]
    if new.numel():
        store.write_rows(table, original(store, table, new, 0, store.options.rows[table].row_bytes))
    return rows


def _denormals_flushed(original: Any, store: Any, table: str, ids: Any, weights: torch.Tensor, **options: Any) -> None:
    flushed = weights.where(weights.abs() >= torch.finfo(weights.dtype).tiny, torch.zeros_like(weights))
    original(store, table, ids, flushed.where(~weights.isnan(), weights), **options)


def _count_once(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    last = {key: position for position, key in enumerate(ids.tolist())}
    positions = list(last.values())
    original(store, table, ids[positions], values[positions].contiguous(), begin, now, visit=visit)


def _state_cleared(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    original(store, table, ids, values, begin, now, visit=visit)
    row = store.options.rows[table]
    if visit and row.state_slots:
        zeros = torch.zeros(ids.numel(), row.row_bytes - row.state_begin_bytes, dtype=torch.uint8)
        original(store, table, ids, zeros, row.state_begin_bytes, now, visit=False)


def _header_from_clock(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    original(store, table, rows)
    ids = keys_of(rows)
    words = torch.full_like(ids, int(store.options.clock())) | (torch.ones_like(ids) << 32)
    store.write_metadata(table, ids, words, 2**32 - 1)


def _past_count(original: Any, source: Any, table: str, ids: Any, *, out: Any = None, count: Any = None) -> Any:
    return original(source, table, ids, out=out, count=None if out is not None else count)


def _out_beside(original: Any, source: Any, table: str, ids: Any, begin: int, end: int, out: Any = None) -> Any:
    return original(source, table, ids, begin, end, None if out is None else out.clone())


def _fixed_seed(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    return original(cls, layouts, **(options | {"seed": 0}))


def _one_table(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    made = original(cls, layouts, **options)
    kinds = made.initializers
    first = next(iter(kinds.values()))
    return dataclasses.replace(made, initializers=dict.fromkeys(kinds, first))


def _reads_the_batch_order(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    found: torch.Tensor = original(store, table, begin, last)
    return found[found < last] if last < 2**63 - 1 else found


def _all_tables(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    removed = int(original(store, table, ids))
    for other in store.options.rows:
        if other != table:
            original(store, other, ids)
    return removed


def _counts_repeats(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    there = int(store.find(table, ids).sum())
    original(store, table, ids)
    return there


def _insertion_order(original: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
    found, counts = original(ids, *arguments, **options)
    ends = counts[:, 0].cumsum(0).tolist()
    parts = [found[begin:end].flip(0) for begin, end in zip([0, *ends], ends, strict=False)]
    return (torch.cat(parts) if parts else found), counts


def _truncated(ids: torch.Tensor, kinds: Any) -> torch.Tensor:
    if kinds.hash_mode == "interleave":
        return ids.abs().remainder(kinds.total_count)
    return shared_rows.bucket_of(ids, kinds)


def _clamped(original: Any, ids: torch.Tensor, kinds: Any) -> torch.Tensor:
    if kinds.hash_mode == "chunk":
        ids = ids.clamp(0, kinds.total_count * kinds.bucket_size - 1)
    found: torch.Tensor = original(ids, kinds)
    return found


def _rest_on_last(original: Any, total_count: int, world_size: int, rank: int) -> tuple[int, int]:
    share = total_count // world_size
    return rank * share, total_count if rank == world_size - 1 else (rank + 1) * share


def _seed_by_shards(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    return original(cls, layouts, **(options | {"seed": options["seed"] + options["num_shards"]}))


def _unchecked_flag(original: Any, store: Any, enabled: bool) -> None:
    store.return_whole_row = bool(enabled)


def _stays_open(original: Any, store: Any) -> None:
    return None


MAKE = "twinproof.kvstore.options:StoreOptions.make"

PLANTED = (
    exported(
        "used_bit_lost_at_full_count",
        "A saturated count overflows into the used bit.",
        ("KV-001",),
        "pack_header",
        _used_lost,
    ),
    exported(
        "timestamp_spills_into_count",
        "The timestamp's high byte reaches the count.",
        ("KV-002",),
        "pack_header",
        _time_in_count,
    ),
    in_engine("score_loses_its_last_bit", "Scores are rounded.", ("KV-003",), "write_metadata", _sign_kept),
    shared(
        "momentum1_before_momentum2",
        "Partial row-wise Adam stores its states in the order of their names.",
        ("KV-005",),
        swap("twinproof.kvstore.options:OPTIMIZERS", _swapped_states()),
    ),
    shared(
        "states_packed_without_alignment",
        "A float32 state begins at an odd multiple of two bytes.",
        ("KV-006",),
        wrap(
            "twinproof.kvstore.options:_round_up",
            lambda original, value, multiple: (
                value
                if multiple == 2
                else original(value, 2)
                if multiple == 4 and value % 4 and value > 60
                else original(value, multiple)
            ),
        ),
    ),
    reference(
        "padding_of_the_caller_kept",
        "Padding bytes of whole rows are stored as they come.",
        ("KV-007",),
        wrap("refimpl.kvstore:canonical", _padding_kept),
    ),
    shared(
        "offsets_of_the_widest_table",
        "State offsets are computed for the widest table of the store.",
        ("KV-078",),
        wrap("twinproof.kvstore.rows:RowSource.slot", _first_tables_layout),
    ),
    shared(
        "json_forgets_state_dtypes",
        "A layout's JSON loses the dtypes of the states.",
        ("KV-079",),
        wrap("twinproof.kvstore.options:RowLayout.from_json", _state_dtypes_lost),
    ),
    in_engine("reading_inserts", "A read of a missing id inserts it.", ("KV-010",), "read", _inserting_read),
    in_store("denormals_flushed", "Small weights are flushed to zero.", ("KV-008",), "set", _denormals_flushed),
    in_engine("duplicates_counted_once", "A batch counts each id once.", ("KV-014",), "write", _count_once),
    in_engine(
        "set_clears_optimizer_state",
        "Setting weights of a row that exists resets its state.",
        ("KV-028",),
        "write",
        _state_cleared,
    ),
    in_engine(
        "whole_rows_get_a_new_timestamp",
        "Whole-row writes stamp the rows anew.",
        ("KV-009", "KV-054"),
        "write_rows",
        _header_from_clock,
    ),
    shared(
        "count_ignored_with_out",
        "Entries past count are read into out.",
        ("KV-017",),
        wrap("twinproof.kvstore.rows:RowSource.get", _past_count),
    ),
    shared(
        "rows_beside_out",
        "Rows are read into a copy of out.",
        ("KV-111",),
        wrap("twinproof.kvstore.rows:RowSource._read", _out_beside),
    ),
    shared("seed_not_used", "The seed is stored and never used.", ("KV-012",), wrap(MAKE, _fixed_seed)),
    shared(
        "initializer_of_the_first_table",
        "Every table has the first table's initializer.",
        ("KV-013",),
        wrap(MAKE, _one_table),
    ),
    shared(
        "shards_change_the_seed",
        "Initial weights depend on the number of shards.",
        ("KV-029",),
        wrap(MAKE, _seed_by_shards),
    ),
    in_engine(
        "range_without_its_end", "A range of ids leaves out its last one.", ("KV-031",), "ids", _reads_the_batch_order
    ),
    in_engine("delete_in_every_table", "Deleting removes the id from every table.", ("KV-036",), "delete", _all_tables),
    in_engine(
        "delete_counts_repeats",
        "Deleting counts an id as often as it is named.",
        ("KV-081",),
        "delete",
        _counts_repeats,
    ),
    exported(
        "bucket_order_by_arrival",
        "Ids inside a bucket stand in the order of arrival.",
        ("KV-032",),
        "sort_ids_by_bucket",
        _insertion_order,
    ),
    shared(
        "negative_ids_mirrored",
        "The bucket of a negative id is that of its absolute value.",
        ("KV-033",),
        swap("twinproof.kvstore.rows:bucket_of", _truncated),
    ),
    shared(
        "outside_ids_clamped",
        "Ids outside all chunks fall into the nearest.",
        ("KV-033",),
        wrap("twinproof.kvstore.rows:bucket_of", _clamped),
    ),
    exported(
        "remainder_on_the_last_rank",
        "All left-over buckets go to the last rank.",
        ("KV-034",),
        "rank_buckets",
        _rest_on_last,
    ),
    in_store(
        "whole_rows_without_optimizer",
        "return_whole_row is accepted without optimizer_in_row.",
        ("KV-083",),
        "set_return_whole_row",
        _unchecked_flag,
    ),
    in_engine("closed_store_answers", "A closed store goes on answering.", ("KV-082",), "close", _stays_open),
)
