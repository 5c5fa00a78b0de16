"""An error at any call of the library's own code, on one rank that saves a store with others.

A load is each rank's own: it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import Rank, assert_equal, requirement
from conformance.kvstore.cases import fresh, random_rows
from conformance.provers.any_call import Ended, assert_told, fail_each

_BUCKETS = 5


def _part(rank: Rank) -> Any:
    """A store with this rank's part of 80 ids, in two tables."""
    kvstore = rank.component("kvstore")
    begin, end = kvstore.rank_buckets(_BUCKETS, rank.world_size, rank.rank)
    store = fresh(kvstore, track_changes=True)
    for table in ("a", "b"):
        ids = [key for key in range(-40, 40) if begin <= key % _BUCKETS < end]
        store.set_rows(table, random_rows(store, ids, 1, table))
    return store


def _saved(rank: Rank, folder: Path, group: Any, **options: Any) -> Callable[[], object]:
    kvstore, store = rank.component("kvstore"), _part(rank)
    chosen = {"buckets": kvstore.Buckets(_BUCKETS), "chunk_rows": 7, "process_group": group, **options}
    return lambda: kvstore.save(store, folder, **chosen)


_PROGRAMS: dict[str, Callable[[Rank, Path, Any], Callable[[], object]]] = {
    "rows": lambda rank, root, group: _saved(rank, root / "new", group, checksums=True),
    "columns": lambda rank, root, group: _saved(rank, root / "new", group, form="separate"),
    "changes": lambda rank, root, group: _saved(rank, root / "new", group, since=0),
}


def _fail_each_of(rank: Rank, root: str, what: str, at: int, most: int | None) -> list[Ended]:
    folder = Path(root)

    def look() -> tuple[list[str], None]:
        return sorted({path.name for path in folder.iterdir()} - {"new"}), None

    return fail_each(lambda group: _PROGRAMS[what](rank, folder, group), look, at=at, most=most)


@requirement(
    "KV-374",
    "Where any call of the library's own code fails on one rank of a save of a store, every rank MUST be "
    "told in time, and no folder and no process group be left; the next save MUST succeed.",
    needs=("streamed_saves",),
)
@pytest.mark.parametrize("most", [8, pytest.param(None, marks=pytest.mark.night)])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", sorted(_PROGRAMS))
def test_any_call_of_a_store(
    kvstore: Any, rank_pool: Any, tmp_path: Path, what: str, at: int, most: int | None
) -> None:
    by_rank = rank_pool.run(_fail_each_of, 2, str(tmp_path), what, at, most, timeout_s=600)
    for each in by_rank[at]:
        assert_told(each, f"{what} on rank {at}")
    assert_equal(len(by_rank[at]) > 0, True, where="calls that failed")
