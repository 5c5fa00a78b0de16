"""Copies of a store that begin anew, and jobs that load table by table: what they hold, and what deltas may follow."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.kvstore.cases import assert_contents, between_tables, contents, ids_of, save, store_of
from twinproof.errors import ConfigError, DeltaBaseError

TOTAL = 4


def _store(kvstore: Any, tables: str = "ab", **options: Any) -> Any:
    return store_of(kvstore, {name: kvstore.RowLayout(4, optimizer="adagrad") for name in tables}, **options)


def _written(store: Any, table: str, ids: Any, value: float = 1.0) -> None:
    store.set(table, ids_of(ids), torch.full((len(ids), 4), value))


def _part(held: dict[str, dict[int, bytes]], table: str, buckets: range) -> dict[int, bytes]:
    return {key: row for key, row in held[table].items() if key % TOTAL in buckets}


@requirement(
    "KV-456",
    "A full load with clear=True MUST leave a table with exactly the rows that it lists, whatever was there, tell how "
    "many went, be the base of its deltas for what it lists alone, and touch no other table.",
)
@examples(40)
@example(held=[], saved=[1, 2], capacity=None, owned=(0, 4))
@example(held=[1, 9, 50], saved=[1, 2, 3, 4], capacity=5, owned=(0, 4))
@given(
    st.lists(st.integers(0, 30), unique=True, max_size=12),
    st.lists(st.integers(0, 30), unique=True, max_size=12),
    st.sampled_from([None, 12, 13]),
    st.sampled_from([(0, 4), (1, 3), (2, 2)]),
)
def test_cleared(
    kvstore: Any,
    tmp_path_factory: Any,
    held: list[int],
    saved: list[int],
    capacity: int | None,
    owned: tuple[int, int],
) -> None:
    folder, buckets = tmp_path_factory.mktemp("kv"), kvstore.Buckets(TOTAL)
    source = _store(kvstore, track_changes=True)
    _written(source, "a", saved, 2.0)
    mark = save(kvstore, source, folder / "full", buckets=buckets).mark
    full = contents(source)
    _written(source, "a", [3, 40], 3.0)
    source.delete("a", ids_of(saved[:1]))
    save(kvstore, source, folder / "delta", since=mark, buckets=buckets)
    copy = _store(kvstore, capacity=capacity)
    _written(copy, "a", held)
    _written(copy, "b", [7])
    before, asked = contents(copy), range(*owned)
    report = kvstore.load(copy, folder / "full", tables=("a",), owned=owned, clear=True)
    expected = _part(full, "a", asked)
    assert_equal(contents(copy), {"a": expected, "b": before["b"]}, where="rows")
    found = (report.row_counts["a"], report.deleted_counts["a"])
    assert_equal(found, (len(expected), len(set(held) - set(expected))), where="rows loaded, and gone")
    with succeeds("its delta", where=str(owned)):
        kvstore.load(copy, folder / "delta", tables=("a",), owned=owned)
    assert_equal(_part(contents(copy), "a", asked), _part(contents(source), "a", asked), where="behind the delta")


@requirement(
    "KV-459",
    "What clear=True took away MUST be no part of any base, and with a delta it MUST be refused and change nothing.",
)
def test_cleared_parts(kvstore: Any, tmp_path: Path) -> None:
    source, buckets = _store(kvstore, "a", track_changes=True), kvstore.Buckets(TOTAL)
    _written(source, "a", range(8))
    mark = save(kvstore, source, tmp_path / "full", buckets=buckets).mark
    _written(source, "a", range(8), 5.0)
    save(kvstore, source, tmp_path / "delta", since=mark, buckets=buckets)
    copy = _store(kvstore, "a")
    for owned in ((0, 2), (2, 4)):
        kvstore.load(copy, tmp_path / "full", owned=owned, clear=True)
    before = contents(copy)
    assert_equal(sorted(before["a"]), [2, 3, 6, 7], where="the last part")
    with raises(DeltaBaseError, where="a delta of both parts"):
        kvstore.load(copy, tmp_path / "delta")
    with raises(ConfigError, mentions=("clear", "delta"), where="a delta that clears"):
        kvstore.load(copy, tmp_path / "delta", owned=(2, 4), clear=True)
    assert_contents(copy, before, where="behind refusals")
    with succeeds("the delta of the part that is there", where="(2, 4)"):
        kvstore.load(copy, tmp_path / "delta", owned=(2, 4))


def _bases(kvstore: Any, store: Any, path: Path, mark: int) -> set[str]:
    save(kvstore, store, path, since=mark)
    return set(kvstore.SavedRows(path).bases)


@requirement(
    "KV-457",
    "Tables that are loaded one after the other MUST be bases of the deltas that follow, as those loaded at once are, "
    "each with the part that was loaded; a table that was written to meanwhile MUST be none.",
)
@pytest.mark.parametrize("first", ["a", "b"])
def test_table_by_table(kvstore: Any, tmp_path: Path, first: str) -> None:
    second = {"a": "b", "b": "a"}[first]
    source = _store(kvstore, track_changes=True)
    for table in "ab":
        _written(source, table, range(6))
    save(kvstore, source, tmp_path / "full", buckets=kvstore.Buckets(TOTAL))
    resumed, written, in_part = (_store(kvstore, track_changes=True) for _ in range(3))

    def write(table: str) -> None:
        if table == second:
            _written(written, first, [3], 7.0)

    for store, owned in ((resumed, (0, TOTAL)), (written, (0, TOTAL)), (in_part, (0, 2))):
        kvstore.load(store, tmp_path / "full", tables=(first,), owned=owned)
        with between_tables(write) if store is written else nullcontext():
            kvstore.load(store, tmp_path / "full", tables=(second,))
    mark = resumed.mark()
    _written(resumed, first, [9])
    assert_equal(_bases(kvstore, resumed, tmp_path / "delta", mark), {"a", "b"}, where="bases")
    other = _store(kvstore)
    _written(other, first, [77])
    with raises(DeltaBaseError, where="a store that never had the base"):
        kvstore.load(other, tmp_path / "delta", tables=(first,))
    assert_equal(_bases(kvstore, written, tmp_path / "two", written.mark()), {second}, where="written meanwhile")
    with raises(ConfigError, mentions=("part", first), where="a base of which a part was loaded"):
        save(kvstore, in_part, tmp_path / "three", since=in_part.mark())
