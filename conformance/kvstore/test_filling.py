"""Loads into empty stores: all of them or nothing, whatever is found last and whoever looks meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from conformance.harness import assert_equal, raises, requirement
from conformance.kvstore.cases import (
    FILE,
    assert_bits,
    assert_contents,
    between_tables,
    contents,
    filled,
    fresh,
    ids_of,
    random_rows,
    save,
)
from twinproof.errors import CorruptionError, TwinproofError


def _at(raw: bytes, name: str) -> tuple[int, int]:
    """Where a tensor of a file lies: its first byte and the one behind its last."""
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + begin, 8 + length + end


@requirement(
    "KV-137",
    "A load into an empty store that finds its very last row wrong MUST leave every table empty, the mark as it was; "
    "the next load MUST be whole.",
)
def test_last_row_wrong(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(20))
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(3))
    raw, expected = (tmp_path / "ck" / FILE).read_bytes(), contents(store)
    row_bytes = store.layout("b").row_bytes
    last = _at(raw, "b.rows")[1] - row_bytes
    ruined = {
        "unused": raw[: last + 15] + b"\0" + raw[last + 16 :],
        "another key": raw[:last] + b"\x55" + raw[last + 1 :],
    }
    for name, bad in ruined.items():
        for chunk_rows in (1, 7, 1000):
            other = fresh(kvstore)
            mark, where = other.mark(), f"{name}, {chunk_rows} rows a chunk"
            (tmp_path / "ck" / FILE).write_bytes(bad)
            with raises(CorruptionError, where=where):
                kvstore.load(other, tmp_path / "ck", chunk_rows=chunk_rows)
            assert_contents(other, {table: {} for table in expected}, where=where)
            assert_equal(other.mark(), mark, where=f"{where}, mark")
            (tmp_path / "ck" / FILE).write_bytes(raw)
            kvstore.load(other, tmp_path / "ck", chunk_rows=chunk_rows)
            assert_contents(other, expected, where=f"{where}, loaded again")


@requirement(
    "KV-138",
    "Rows that a load brings MUST count as changed after every mark, and be no part of any snapshot, that was taken "
    "before they could be read, also in the middle of the load; a table that is written meanwhile MUST keep what the "
    "load does not list.",
)
def test_looked_at_meanwhile(kvstore: Any, tmp_path: Path) -> None:
    source = filled(kvstore, range(20))
    save(kvstore, source, tmp_path / "ck")
    expected = contents(source)
    for writes in ("a", "b", None):
        store = fresh(kvstore, track_changes=True)
        before = store.snapshot()
        seen: list[Any] = []
        extra = random_rows(store, [99], 5, table=writes or "a")

        def look(table: str, store: Any = store, seen: Any = seen, writes: Any = writes, extra: Any = extra) -> None:
            if table != "a":
                return
            seen.append((store.mark(), store.snapshot(), contents(store)))
            if writes is not None:
                store.set_rows(writes, extra)
                seen.append((store.mark(), store.snapshot(), contents(store)))

        with between_tables(look):
            kvstore.load(store, tmp_path / "ck")
        wanted = {table: dict(rows) for table, rows in expected.items()}
        if writes is not None:
            wanted[writes][99] = extra.numpy().tobytes()
        assert_contents(store, wanted, where=f"a write to {writes}")
        assert_contents(before, {table: {} for table in expected}, where="a snapshot before")
        nothing = fresh(kvstore)
        for snapshot, then in ((before, {table: {} for table in wanted}), *(found[1:] for found in seen)):
            for table, keys in wanted.items():
                there, missing = (
                    [key in then[table] for key in keys],
                    ids_of([key for key in keys if key not in then[table]]),
                )
                assert_equal(snapshot.contains(table, ids_of([*keys])).tolist(), there, where=f"{table}, contained")
                initial = nothing.get_rows(table, missing)
                assert_bits(snapshot.get_rows(table, missing), initial, where=f"{table}, rows that came later")
        for mark, snapshot, then in seen:
            assert_contents(snapshot, then, where="a snapshot meanwhile")
            for table in store.tables:
                assert_equal(store.changes(table, 0)[0].tolist(), sorted(wanted[table]), where=f"{table}, in all")
                unnoticed = set(wanted[table]) - set(then[table]) - set(store.changes(table, mark)[0].tolist())
                assert_equal(sorted(unnoticed), [], where=f"{table}, not changed")
            snapshot.close()
        before.close()


@requirement(
    "KV-139",
    "An id that stands twice, or out of order, at the seam of two chunks MUST be refused before anything is written.",
)
def test_seams(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(6))
    save(kvstore, store, tmp_path / "ck")
    raw = (tmp_path / "ck" / FILE).read_bytes()
    row_bytes = store.layout("a").row_bytes
    for name, twice in (("twice", 2), ("out of order", 0)):
        # Row 3 of table a says that it is another one, in both tensors.
        ids, rows = _at(raw, "a.ids")[0] + 3 * 8, _at(raw, "a.rows")[0] + 3 * row_bytes
        bad = bytearray(raw)
        bad[ids : ids + 8] = bad[rows : rows + 8] = twice.to_bytes(8, "little")
        (tmp_path / "ck" / FILE).write_bytes(bad)
        for chunk_rows in (1, 3, 100):
            for other in (fresh(kvstore), filled(kvstore, [50])):
                before = contents(other)
                with raises(TwinproofError, mentions=("bucket order",), where=f"{name}, {chunk_rows} rows a chunk"):
                    kvstore.load(other, tmp_path / "ck", chunk_rows=chunk_rows)
                assert_contents(other, before, where=f"{name}, {chunk_rows} rows a chunk")
    assert_equal(store.contains("a", ids_of([3])).tolist(), [True], where="the store that was saved")


@requirement(
    "KV-250",
    "A load MUST leave no file open, whether it ends well or finds a row wrong, in an empty store and beside rows.",
)
def test_files_are_closed(kvstore: Any, tmp_path: Path) -> None:
    save(kvstore, filled(kvstore, range(20)), tmp_path / "ck")
    raw = (tmp_path / "ck" / FILE).read_bytes()
    last = _at(raw, "b.rows")[1] - 1

    def load_all() -> None:
        for content in (raw, raw[: _at(raw, "a.rows")[0]] + b"\x55" + raw[_at(raw, "a.rows")[0] + 1 :], raw[:last]):
            (tmp_path / "ck" / FILE).write_bytes(content)
            for store in (fresh(kvstore), filled(kvstore, [50])):
                with contextlib.suppress(TwinproofError):
                    kvstore.load(store, tmp_path / "ck", chunk_rows=7)

    load_all()
    before = len(os.listdir("/proc/self/fd"))
    load_all()
    assert_equal(len(os.listdir("/proc/self/fd")), before, where="open files")
