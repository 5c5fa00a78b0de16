"""Options of a load that are given together: each means what it means alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import FILE, Contents, contents, filled, fresh, random_rows, save
from twinproof.errors import TwinproofError

KEYS, TOTAL = range(-5, 9), 3
CHOSEN = (None, ("a",), ("b",), ("b", "a"))
STEPS = {"a": 11, "b": 12}


def _source(kvstore: Any, **options: Any) -> Any:
    store = filled(kvstore, KEYS, **options)
    for table, step in STEPS.items():
        store.set_step_count(table, step)
    return store


def _target(kvstore: Any, keys: range, **options: Any) -> Any:
    """Tables that are empty, or have rows of which some are loaded over; and steps of their own."""
    store = fresh(kvstore, track_changes=True, **options)
    for number, table in enumerate("ab"):
        store.set_rows(table, random_rows(store, list(keys), 70 + number, table))
        store.set_step_count(table, 1 + number)
    return store


def _without_states(store: Any, table: str, rows: dict[int, bytes]) -> dict[int, bytes]:
    end = 16 + store.layout(table).weight_bytes
    return {key: row[:end] + bytes(len(row) - end) for key, row in rows.items()}


def _expected(
    store: Any, listed: Contents, tables: tuple[str, ...] | None, weights_only: bool, clear: bool = False
) -> tuple[Contents, dict[str, int]]:
    """What a store holds after a load of these rows, and its steps."""
    held, steps = contents(store), {table: store.step_count(table) for table in "ab"}
    for table in tables or "ab":
        rows = _without_states(store, table, listed[table]) if weights_only else listed[table]
        held[table] = rows if clear else held[table] | rows
        steps[table] = steps[table] if weights_only else STEPS[table]
    return held, steps


def _check(store: Any, expected: tuple[Contents, dict[str, int]], where: str) -> None:
    assert_equal(contents(store), expected[0], where=where)
    assert_equal({table: store.step_count(table) for table in "ab"}, expected[1], where=f"{where}: steps")


def _told(store: Any) -> tuple[Any, ...]:
    """All that a load that is refused leaves alone."""
    steps = [store.step_count(table) for table in "ab"]
    return contents(store), steps, store.mark(), [[ids.tolist() for ids in store.changes(t, 0)] for t in "ab"]


def _damaged(path: Path, names: tuple[str, ...]) -> None:
    """The ids of table "b" are all one: what was read of "a" before is right."""
    raw = bytearray((path / FILE).read_bytes())
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    for name in names:
        begin, end = (8 + length + at for at in entries[name]["data_offsets"])
        raw[begin:end] = (end - begin) // 8 * (1).to_bytes(8, "little")
    (path / FILE).write_bytes(raw)


def _loads() -> Iterator[tuple[dict[str, Any], range]]:
    """Options of a load, and the keys that are there before."""
    parts = (None, (0, 1), (1, TOTAL), (2, 2))
    for tables, weights_only, owned, chunk, keys in product(
        CHOSEN, (False, True), parts, (2, 100), (range(0), range(3, 12))
    ):
        yield {"tables": tables, "weights_only": weights_only, "owned": owned, "chunk_rows": chunk}, keys


@requirement(
    "KV-297",
    "Options of a load MUST each mean what they mean alone, in whatever company: tables, weights_only, a part of the "
    "buckets, rows of a chunk, either form, into empty tables and beside rows; a load that is refused MUST change "
    "nothing, no step or mark either.",
)
def test_options_of_loads(kvstore: Any, tmp_path: Path) -> None:
    source = _source(kvstore)
    for form in ("rows", "separate"):
        path, bad = tmp_path / form, tmp_path / f"{form}-damaged"
        for folder in (path, bad):
            save(kvstore, source, folder, form=form, buckets=kvstore.Buckets(TOTAL))
        _damaged(bad, ("b.ids",))
        for options, keys in _loads():
            begin, end = options["owned"] or (0, TOTAL)
            listed = {
                table: {key: row for key, row in rows.items() if begin <= key % TOTAL < end}
                for table, rows in contents(source).items()
            }
            store, where = _target(kvstore, keys), f"{form}, {options}, beside {len(keys)} rows"
            if "b" in (options["tables"] or "ab") and begin < end:
                before = _told(store)
                with raises(TwinproofError, where=f"damaged {where}"):
                    kvstore.load(store, bad, **options)
                assert_equal(_told(store), before, where=f"damaged {where}")
            expected = _expected(store, listed, options["tables"], options["weights_only"])
            report = kvstore.load(store, path, **options)
            _check(store, expected, where)
            counts = {table: len(listed[table]) for table in options["tables"] or ("a", "b")}
            assert_equal(report.row_counts, counts, where=f"{where}: rows that are reported")


@requirement(
    "KV-298",
    "Options of load_state_dict MUST each mean what they mean alone, in whatever company: tables, weights_only, clear, "
    "either form, views or plain tensors; one that is refused MUST change nothing, no step or mark either.",
)
def test_options_of_state_dicts(kvstore: Any) -> None:
    for whole, plain, tables, weights_only, clear, keys in product(
        (False, True), (False, True), CHOSEN, (False, True), (False, True), (range(0), range(3, 12))
    ):
        source = _source(kvstore, return_whole_row=whole)
        state = source.state_dict()
        if plain:
            state = {name: value.full_tensor() for name, value in state.items()}
        store, where = _target(kvstore, keys), f"{whole=} {plain=} {tables=} {weights_only=} {clear=}, {len(keys)} rows"
        if "b" in (tables or "ab"):
            before, wrong = _told(store), dict(state)
            wrong["b.weight_id"] = torch.full((len(KEYS) - 1, 1), 3, dtype=torch.int64)
            with raises(TwinproofError, where=f"damaged {where}"):
                store.load_state_dict(wrong, tables=tables, weights_only=weights_only, clear=clear)
            assert_equal(_told(store), before, where=f"damaged {where}")
        expected = _expected(store, contents(source), tables, weights_only, clear)
        found = store.load_state_dict(state, tables=tables, weights_only=weights_only, clear=clear)
        _check(store, expected, where)
        counts = {table: source.size(table) for table in tables or ("a", "b")}
        assert_equal(found, counts, where=f"{where}: rows that are told")


def load_parts(rank: Any, path: str) -> None:
    """A rank of two loads parts of a full save and of a delta, given groups, buckets and tables in every company."""
    kvstore, both = rank.component("kvstore"), dist.new_group([1, 0])
    alone = [dist.new_group([each]) for each in range(2)][rank.rank]
    listed = kvstore.SavedRows(Path(path) / "full")
    gone = kvstore.SavedRows(Path(path) / "delta")
    for group, part, tables in product((None, both, alone), (None, (0, 1), (1, TOTAL), (2, 2)), (None, ("b",))):
        place = (1, 0) if group is alone else (2, rank.rank)
        begin, end = part or kvstore.rank_buckets(TOTAL, *place)
        store, where = fresh(kvstore), f"rank {rank.rank} of {group}, {part=}, {tables=}"
        options = {"process_group": group, "owned": part, "tables": tables}
        report = kvstore.load(store, Path(path) / "full", **options)
        expected = {
            table: [key for key in listed.ids(table).tolist() if begin <= key % TOTAL < end]
            for table in tables or listed.tables
        }
        assert_equal(report.row_counts, {table: len(ids) for table, ids in expected.items()}, where=f"{where}: told")
        found = {table: store.ids(table).tolist() for table in expected}
        assert_equal(found, expected, where=f"{where}: ids")
        report = kvstore.load(store, Path(path) / "delta", **options)
        removed = {table: [key for key in gone.deleted(table).tolist() if key in ids] for table, ids in found.items()}
        counts = {table: len(ids) for table, ids in removed.items()}
        assert_equal(report.deleted_counts, counts, where=f"{where}: removed")
        left = {table: [key for key in ids if key not in removed[table]] for table, ids in found.items()}
        assert_equal({table: store.ids(table).tolist() for table in left}, left, where=f"{where}: ids behind a delta")


@requirement(
    "KV-375",
    "A load MUST bring and remove the buckets that it is told, else those of its rank in the group that it is given, "
    "else those of its rank among all, of the tables that it is told, whichever of these options stand together.",
)
def test_what_decides(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    store = _source(kvstore, track_changes=True)
    mark = save(kvstore, store, tmp_path / "full", buckets=kvstore.Buckets(TOTAL)).mark
    for table in "ab":
        store.delete(table, store.ids(table)[::2].contiguous())
    save(kvstore, store, tmp_path / "delta", since=mark, buckets=kvstore.Buckets(TOTAL))
    with succeeds("two ranks", where="an answer of both"):
        rank_pool.run(load_parts, 2, str(tmp_path), timeout_s=20)
