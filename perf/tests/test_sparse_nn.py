"""SparseNN on two ranks, small: every contender that is installed trains the same model, which the job checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.harness import RankPool
from fastimpl import ops
from perf.harness.workloads import read_workloads
from perf.peers.torchrec_model import installed
from perf.pipeline import JOBS

pytestmark = pytest.mark.skipif(not ops.available(), reason="no library was built")


@pytest.mark.night
def test_contenders_train_the_same_model(tmp_path: Path) -> None:
    workload = read_workloads()["sparse-nn-tiny"]
    small = replace(workload, contenders=("ours", "fused", "sparse-dist", "base", "torchrec", "torchrec-sparse-dist"))
    with RankPool("fastimpl") as pool:
        by_rank = pool.run(JOBS[small.job], 2, small, str(tmp_path), 2, 0)
    expected = {name for name in small.contenders if "torchrec" not in name or installed()}
    assert [[set(found) for found in rounds] for rounds in by_rank] == [[expected] * 2] * 2
