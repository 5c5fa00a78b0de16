"""Faults that ``test_missing`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import as_rows, bytes_of, engines, missing


@fault(kills="KV-011", at=engines("read"))
@as_rows
def missing_row_partly_cleared(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Reading a missing id clears width bytes instead of width elements."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    rows[missing(store, table, ids), (end - begin) // 4 :] = 0xA5
    return rows


@fault(kills=("KV-012", "KV-015"), at=engines("read"))
@as_rows
def initial_weight_differs_each_time(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Two reads of one missing id differ."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    turn = store.__dict__["_planted_turn"] = store.__dict__.get("_planted_turn", 0) + 1
    weight = store.options.rows[table].header_bytes
    if begin <= weight < end:
        rows[missing(store, table, ids), weight - begin] ^= turn & 0x7F
    return rows


@fault(kills="KV-102", at=engines("find"))
def row_of_zeros_is_a_miss(original: Any, store: Any, table: str, ids: torch.Tensor) -> torch.Tensor:
    """A stored row of zeros counts as missing."""
    found: torch.Tensor = original(store, table, ids)
    layout = store.options.rows[table]
    weights = bytes_of(store, table, ids, layout.header_bytes, layout.header_bytes + layout.weight_bytes)
    found &= (weights != 0).any(dim=1)
    return found


@fault(kills="KV-011", at=engines("read"))
@as_rows
def missing_id_reads_first_row(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """A missing id shows the weight of some other id (FBGEMM 5048)."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    first = store.ids(table, -(2**63), 2**63 - 1)[:1]
    if first.numel() and begin >= 8:
        rows[missing(store, table, ids)] = original(store, table, first, begin, end)
    return rows


@fault(kills="KV-010", at=engines("read"))
@as_rows
def reading_inserts(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A read of a missing id inserts it."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    new = ids[missing(store, table, ids)]
    if new.numel():
        store.write_rows(table, original(store, table, new, 0, store.options.rows[table].row_bytes))
    return rows


@fault(kills="KV-012", at="twinproof.kvstore.options:StoreOptions.make")
def seed_not_used(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    """The seed is stored and never used."""
    return original(cls, layouts, **(options | {"seed": 0}))


@fault(kills="KV-013", at="twinproof.kvstore.options:StoreOptions.make")
def initializer_of_the_first_table(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    """Every table has the first table's initializer."""
    made = original(cls, layouts, **options)
    kinds = made.initializers
    first = next(iter(kinds.values()))
    return dataclasses.replace(made, initializers=dict.fromkeys(kinds, first))


words_mixed_otherwise = patched(
    "Who computes initial values by the definition shifts by a bit less.",
    mutated("twinproof.kvstore.options:mix", "_shift(words, 27)", "_shift(words, 26)"),
    kills="KV-232",
)


@fault(kills="KV-264", at=engines("read"))
def states_left_as_they_were(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor
) -> None:
    """Of an id without a row, what begins with the weight is read no farther than the weight."""
    behind = 16 + store.options.rows[table].weight_bytes
    before = out.clone()
    original(store, table, ids, begin, end, out)
    if begin == 16 and end > behind:
        new = ~store.find(table, ids)
        out[new, behind - begin :] = before[new, behind - begin :]


@fault(kills="KV-299", at=engines("write"))
def partial_write_of_a_missing_row_zeroes_it(
    original: Any,
    engine: Any,
    table: str,
    ids: torch.Tensor,
    values: torch.Tensor,
    begin: int,
    now: int,
    *,
    visit: bool,
) -> None:
    """A state that is written to a bounded table makes its missing rows with zero weights, not with initial ones."""
    missing = ids[~engine.find(table, ids)]
    original(engine, table, ids, values, begin, now, visit=visit)
    row = engine.options.rows[table]
    if not visit and begin > 16 and missing.numel() and engine.options.capacities[table] is not None:
        original(
            engine,
            table,
            missing,
            torch.zeros(missing.numel(), row.weight_bytes, dtype=torch.uint8),
            16,
            now,
            visit=False,
        )


some_scores_are_enough = patched(
    "Scores of ids of which one has a row are given, of the others as zero.",
    mutated(
        "twinproof.kvstore.rows:RowSource.get_scores",
        "if missing.numel():",
        "if missing.numel() and missing.numel() == checked.numel():",
    ),
    kills="KV-316",
)


seeds_by_the_number_of_tables = patched(
    "Initial weights depend on how many tables the store has.",
    mutated("twinproof.kvstore.store:KVStore.__init__", "seed=seed,", "seed=seed + len(layouts),"),
    kills="KV-490",
)
seeds_in_files = patched(
    "A save writes the seed of its store.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.save",
        "writer_with(content.metadata() | named_by_user)",
        'writer_with(content.metadata() | {"seed": str(store.options.seed)} | named_by_user)',
    ),
    kills="KV-490",
)
