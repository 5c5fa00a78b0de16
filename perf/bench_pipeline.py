"""pytest-benchmark's view of the pipeline's kernels: a batch pooled and a step taken, checked after timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastimpl import ops

ROWS, DIM, BAGS, POOLING = 4096, 64, 256, 8


@pytest.fixture
def batch() -> dict[str, Any]:
    """One table of whole numbers, and its bags."""
    if not ops.available():
        pytest.skip("no library was built")
    table = torch.arange(ROWS * 1.0).unsqueeze(1).repeat(1, DIM)
    ids = torch.randint(0, ROWS, (BAGS * POOLING,), generator=torch.Generator().manual_seed(0))
    return {"table": table, "ids": ids, "offsets": torch.arange(BAGS + 1) * POOLING}


def test_pool(benchmark: Any, batch: dict[str, Any]) -> None:
    """Sums of rows."""
    out = torch.empty(BAGS, DIM)
    benchmark(ops.pool_bags, [batch["table"]], [0], batch["ids"], batch["offsets"], None, [False], out)
    assert torch.equal(out, batch["table"][batch["ids"]].view(BAGS, POOLING, DIM).sum(1))


def test_step(benchmark: Any, batch: dict[str, Any]) -> None:
    """Every row that occurs goes down by the number of its occurrences, any number of times."""
    table, before, grad = batch["table"], batch["table"].clone(), torch.ones(BAGS, DIM)
    none = [torch.empty(0)]
    bags = ([0], batch["ids"], batch["offsets"], None, [False], grad)
    benchmark(ops.step_bags, [table], none, none, *bags, "sgd", 1.0)
    counts = torch.bincount(batch["ids"], minlength=ROWS).unsqueeze(1)
    times = (before - table)[counts[:, 0] > 0][0, 0] / counts[counts > 0][0]
    assert times >= 1
    assert torch.equal(before - table, (counts * times).expand(-1, DIM))
