"""The peers of table-batched embeddings train as the kernels do, and the jobs that compare them run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import Rank
from fastimpl import ops
from perf.harness.workloads import read_workloads
from perf.peers.fbgemm_bags import FbgemmBags, installed
from perf.peers.plain_bags import read_rows
from perf.peers.torch_bags import TorchBags
from perf.pipeline import JOBS
from perf.pipeline.tables import BAG_COUNT, EPS, LR, OurBags, Plan, make_batch, make_tables

built = pytest.mark.skipif(not ops.available(), reason="no library was built")
POOLING = 3


@built
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("peer_class", [FbgemmBags, TorchBags])
def test_peers_train_as_the_kernels_do(peer_class: type[FbgemmBags | TorchBags], optimizer: str) -> None:
    if peer_class is FbgemmBags and not installed():
        pytest.skip("fbgemm-gpu-cpu is not installed")
    tables = make_tables(2, (200, 8), torch.float32)
    peer = peer_class(list(tables), optimizer, LR, EPS)
    ours = OurBags(tables, optimizer)
    offsets = torch.arange(2 * BAG_COUNT + 1) * POOLING
    generator = torch.Generator().manual_seed(0)
    grad = torch.empty(BAG_COUNT, 16).random_(0, 17, generator=generator).sub_(8).div_(8)
    ids = make_batch(Plan(optimizer, pooling=POOLING), 2, 200, generator)
    pooled = peer.pool(ids, offsets)
    assert torch.equal(pooled, ours.pool(ids, offsets))
    before = tables.clone()
    peer.step(pooled, grad)
    ours.step(ours.pool(ids, offsets), grad)
    for mine, theirs, was in zip(ours.tables, peer.tables, before, strict=True):
        # Sums of gradients are exact here; what follows rounds a few times, in another order of operations each.
        assert (mine - theirs).abs().max() <= 4 * torch.finfo(torch.float32).eps * (mine - was).abs().max()
        assert not torch.equal(mine, was)


def test_rows_are_read() -> None:
    rows = torch.arange(40).view(10, 4)
    places = torch.tensor([3, 3, 9, 0])
    assert read_rows(rows, places, 2) == int(rows[places].sum())


def _shapes() -> list[Any]:
    """The shapes of the jobs that train: one a job at each change, the others at night."""
    names: dict[str, list[str]] = {}
    for workload in read_workloads().values():
        if workload.job.startswith("train-"):
            names.setdefault(workload.job, []).append(workload.name)
    return [
        pytest.param(name, marks=[pytest.mark.night] if name != min(of_job) else [])
        for of_job in names.values()
        for name in sorted(of_job)
    ]


@built
@pytest.mark.parametrize("name", _shapes())
def test_every_job_runs_on_a_small_shape(name: str, tmp_path: Path) -> None:
    workload = read_workloads()[name]
    small = replace(workload, shape=(300, 8), tensor_count=2)
    threads = torch.get_num_threads()
    no_group: Any = None
    rounds = JOBS[small.job](Rank(0, 1, no_group, "fastimpl"), small, str(tmp_path), 2, 0)
    torch.set_num_threads(threads)
    expected = {who for who in small.contenders if not who.startswith("fbgemm") or installed()}
    assert [set(found) for found in rounds] == [expected] * 2
    assert all(sample["seconds"] >= sample["forward_seconds"] > 0 for found in rounds for sample in found.values())
