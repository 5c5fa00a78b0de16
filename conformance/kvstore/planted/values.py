"""Faults that ``test_values`` must notice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import as_rows, bytes_of, engines, keys_of


@fault(kills="KV-016", at=engines("write_rows"))
def first_duplicate_row_wins(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """Of whole rows with one key in a batch the first is kept."""
    original(store, table, rows.flip(0))


@fault(kills="KV-018", at=engines("ids"))
def ids_of_an_empty_table_are_floats(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    """The id list of an empty table has another dtype."""
    found: torch.Tensor = original(store, table, begin, last)
    return found if found.numel() else torch.tensor([])


@fault(kills="KV-019", at=engines("write"))
def first_id_of_a_batch_counted_twice(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """The first id of a batch is counted twice."""
    original(store, table, ids, values, begin, now, visit=visit)
    if ids.numel():
        original(store, table, ids[:1], values[:1], begin, now, visit=visit)


@fault(kills="KV-026", at="twinproof.kvstore.rows:RowSource.get_state")
def state_in_the_weights_dtype(original: Any, source: Any, table: str, name: str, ids: Any) -> torch.Tensor:
    """An optimizer state is shown in the dtype of the weights."""
    state: torch.Tensor = original(source, table, name, ids)
    weight = source.layout(table).weight_dtype
    return state.view(weight) if weight.itemsize == state.dtype.itemsize else state


@fault(kills="KV-027", at="twinproof.kvstore.store:check_ids")
def narrow_ids_without_sign(original: Any, ids: Any, *where: Any, **places: Any) -> torch.Tensor:
    """Negative int32 ids are widened without their sign."""
    checked: torch.Tensor = original(ids, *where, **places)
    return checked & 0xFFFFFFFF if ids.dtype == torch.int32 else checked


@fault(kills="KV-025", at="twinproof.kvstore.rows:RowSource.get_rows")
def offset_left_out_of_bounds_check(
    original: Any,
    source: Any,
    table: str,
    ids: Any,
    *,
    offset_bytes: int = 0,
    width_bytes: int | None = None,
    **out: Any,
) -> torch.Tensor:
    """The bounds check of a partial read ignores the offset."""
    row_bytes = source.layout(table).row_bytes
    if width_bytes is not None and 0 <= width_bytes <= row_bytes and offset_bytes >= 0:
        offset_bytes = min(offset_bytes, row_bytes - width_bytes)
    result: torch.Tensor = original(source, table, ids, offset_bytes=offset_bytes, width_bytes=width_bytes, **out)
    return result


@fault(kills="KV-014", at=engines("write"))
def first_duplicate_wins(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """Of duplicates in a batch the first is kept."""
    original(store, table, ids.flip(0), values.flip(0), begin, now, visit=visit)


@fault(kills="KV-020", at=engines("write_rows"))
def negative_ids_dropped_on_load(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """Whole rows of negative ids are silently dropped."""
    original(store, table, rows[keys_of(rows) >= 0].contiguous())


@fault(kills=("KV-008", "KV-020"), at=engines("read"))
@as_rows
def negative_ids_not_read(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """The output rows of negative ids are left as they were."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    rows[ids < 0] = 0x11
    return rows


@fault(kills=("KV-021", "KV-020"), at=engines("write"))
def ids_cut_to_32_bits(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """Ids pass through a 32-bit variable (FBGEMM 5876)."""
    original(store, table, ids.to(torch.int32).to(torch.int64), values, begin, now, visit=visit)


@fault(kills="KV-008", at="KVStore.set")
def denormals_flushed(original: Any, store: Any, table: str, ids: Any, weights: torch.Tensor, **options: Any) -> None:
    """Small weights are flushed to zero."""
    flushed = weights.where(weights.abs() >= torch.finfo(weights.dtype).tiny, torch.zeros_like(weights))
    original(store, table, ids, flushed.where(~weights.isnan(), weights), **options)


@fault(kills="KV-014", at=engines("write"))
def duplicates_counted_once(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A batch counts each id once."""
    last = {key: position for position, key in enumerate(ids.tolist())}
    positions = list(last.values())
    original(store, table, ids[positions], values[positions].contiguous(), begin, now, visit=visit)


@fault(kills="KV-014", at=engines("write"))
def counts_begin_again(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A count past 2**31 - 1 begins again."""
    found = Counter(ids.tolist())
    named, times = torch.tensor([*found]), torch.tensor([*found.values()])
    words = bytes_of(store, table, named, 8, 16).contiguous().view(torch.int64)[:, 0]
    original(store, table, ids, values, begin, now, visit=visit)
    if visit:
        counts = ((words >> 32) & (2**31 - 1)) + times
        past = counts >= 2**31
        store.write_metadata(table, named[past], counts[past] % 2**31 << 32, (2**31 - 1) << 32)


@fault(kills=("KV-009", "KV-054"), at=engines("write_rows"))
def whole_rows_get_a_new_timestamp(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """Whole-row writes stamp the rows anew."""
    original(store, table, rows)
    ids = keys_of(rows)
    words = torch.full_like(ids, int(store.options.clock())) | (torch.ones_like(ids) << 32)
    store.write_metadata(table, ids, words, 2**32 - 1)


@fault(kills="KV-017", at="twinproof.kvstore.rows:RowSource.get")
def count_ignored_with_out(
    original: Any, source: Any, table: str, ids: Any, *, out: Any = None, count: Any = None
) -> Any:
    """Entries past count are read into out."""
    return original(source, table, ids, out=out, count=None if out is not None else count)


@fault(kills="KV-111", at="twinproof.kvstore.rows:RowSource._read")
def rows_beside_out(original: Any, source: Any, table: str, ids: Any, begin: int, end: int, out: Any = None) -> Any:
    """Rows are read into a copy of out."""
    return original(source, table, ids, begin, end, None if out is None else out.clone())


values_of_one_refused = patched(
    "Values of one element cannot be written where a dimension has another stride.",
    mutated(
        "twinproof.kvstore.options:as_bytes",
        "values.contiguous().as_strided((values.numel(),), (1,))",
        "values.contiguous().reshape(-1)",
    ),
    kills="KV-338",
)
