"""What a saved store costs to look into grows with what is asked of it, and not with what it holds."""

from __future__ import annotations

import builtins
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, requirement
from conformance.kvstore.cases import assert_bits, ids_of, save, store_of, weights_of


def _saved(kvstore: Any, path: Path, row_count: int, bucket_count: int = 1) -> tuple[Any, torch.Tensor]:
    """A store on disk with ids 0, 1, 2 and so on, and its weights."""
    store = store_of(kvstore)
    weights = weights_of(store, row_count, 1)
    store.set("t", ids_of(range(row_count)), weights)
    save(kvstore, store, path, buckets=kvstore.Buckets(bucket_count))
    return store, weights


@requirement(
    "KV-460",
    "Rows of a saved store that stand side by side MUST be read together, each once, in whatever order and however "
    "often their ids are asked for.",
)
def test_neighbours(kvstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = _saved(kvstore, tmp_path / "ck", 64)
    rows = kvstore.SavedRows(tmp_path / "ck")
    rows.get("t", ids_of([0]))
    opens: list[Any] = []

    def counted(own: Any) -> Any:
        def opened(*given: Any, **options: Any) -> Any:
            opens.append(given[0])
            return own(*given, **options)

        return opened

    counts = []
    for asked in ([5], [*range(40, 8, -1), 12, 40], [*range(3), *range(60, 64)]):
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", counted(builtins.open))
            patch.setattr(os, "open", counted(os.open))
            opens.clear()
            found = rows.get("t", ids_of(asked))
        assert_bits(found, weights[asked], f"rows {asked}")
        counts.append(len(opens))
    assert_equal(counts[1:], [counts[0], 2 * counts[0]], where="files opened for one run of rows, and for two")


@requirement(
    "KV-461",
    "Where the buckets of a saved store end MUST be worked out once, and not for each chunk that is read.",
)
def test_many_chunks(kvstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = _saved(kvstore, tmp_path / "ck", 24, bucket_count=512)
    summed, own = [0], torch.Tensor.cumsum

    def counted(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        summed[0] += tensor.numel() if tensor.numel() == 512 else 0
        return own(tensor, *given, **options)

    monkeypatch.setattr(torch.Tensor, "cumsum", counted)
    counts = []
    for chunk_rows in (12, 2):
        store = store_of(kvstore)
        store.set("t", ids_of([5]), weights[:1])
        summed[0] = 0
        kvstore.load(store, tmp_path / "ck", chunk_rows=chunk_rows)
        assert_bits(store.get("t", ids_of(range(24))), weights, f"chunks of {chunk_rows}")
        counts.append(summed[0])
    assert_equal(counts[1], counts[0], where="sizes of buckets that are added up, with six times as many chunks")


@requirement(
    "KV-462",
    "A saved store MUST NOT take more than 16 bytes a row to find its rows by their ids.",
)
def test_found_rows(kvstore: Any, tmp_path: Path) -> None:
    _saved(kvstore, tmp_path / "ck", 4096)
    rows = kvstore.SavedRows(tmp_path / "ck")
    rows.size("t")
    tracemalloc.start()
    try:
        found = rows.contains("t", ids_of([0, 4095, 4096, -1]))
        python_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_equal(found.tolist(), [True, True, False, False], where="rows that are there")
    # Two numbers of 8 bytes a row lie in tensors, which Python does not count.
    assert_le(python_bytes, 4096 * 4, where="bytes of Python's own objects that are kept for 4096 rows")


@requirement(
    "KV-463",
    "The views of a table in a state dict MUST share one copy of its ids.",
)
def test_ids_of_views(kvstore: Any) -> None:
    layout = kvstore.RowLayout(4, optimizer="adam")
    store = store_of(kvstore, layout, optimizer_in_row=True)
    store.set("t", ids_of([3, 1, 2]), weights_of(store, 3, 1))
    views = [each for each in store.state_dict().values() if isinstance(each, kvstore.KVTensor)]
    assert_equal(len(views), 4, where="views of weight, metadata and two moments")
    copies = {view._ids.untyped_storage().data_ptr() for view in views}
    assert_equal(len(copies), 1, where="copies of the ids")


@requirement(
    "KV-451",
    "A table MUST keep each row while it grows past each power of two up to 2**16, read all rows in one batch, and "
    "show in a snapshot those of its moment, whatever is written over them.",
)
def test_powers_of_two(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(1))
    held: list[tuple[int, Any]] = []

    def write(begin: int, end: int, offset: float) -> None:
        ids = torch.arange(begin, end)
        store.set("t", ids, ids[:, None].to(torch.float32) + offset)

    def check(source: Any, count: int, offset: float, where: str) -> None:
        ids = torch.arange(count)
        assert_bits(source.get("t", ids), ids[:, None].to(torch.float32) + offset, where)

    size = 0
    for power in range(1, 17):
        for target in (2**power - 1, 2**power, 2**power + 1):
            # Rows one by one around each power: the first that does not fit may be any of these.
            write(size, target, 0.0)
            size = target
        check(store, size, 0.0, f"{size} rows")
        if power in (9, 12, 16):
            held.append((size, store.snapshot()))
    write(0, size, 0.5)
    check(store, size, 0.5, "all rows, written again")
    for count, snapshot in held:
        with snapshot as taken:
            check(taken, count, 0.0, f"a snapshot of {count} rows")
