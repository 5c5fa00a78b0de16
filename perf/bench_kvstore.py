"""pytest-benchmark's view of the row store: batches got and set, checked after timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastimpl.kvstore import KVStore, RowLayout

COUNT = 4096


@pytest.fixture
def store() -> Any:
    """4096 rows of 288 bytes."""
    with KVStore({"t": RowLayout(64, optimizer="rowwise_adagrad")}, optimizer_in_row=True) as made:
        made.set("t", torch.arange(COUNT), torch.arange(COUNT * 64.0).reshape(COUNT, 64))
        yield made


def test_get(benchmark: Any, store: Any) -> None:
    """Weights of random ids."""
    ids = torch.randint(0, COUNT, (1024,), generator=torch.Generator().manual_seed(0))
    got = benchmark(store.get, "t", ids)
    assert torch.equal(got, torch.arange(COUNT * 64.0).reshape(COUNT, 64)[ids])


def test_set_rows(benchmark: Any, store: Any) -> None:
    """Whole rows over themselves."""
    rows = store.get_rows("t", torch.arange(1024))
    benchmark(store.set_rows, "t", rows)
    assert torch.equal(store.get_rows("t", torch.arange(1024)), rows)
