"""torchrec's own sharded modules, driven by our pipeline as by torchrec's: the same bits, on two ranks.

No requirement of the contract, which is about our modules: that whoever has a torchrec model may change the pipeline
alone. Skipped where torchrec is not installed; ci/peers installs it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal
from conformance.pipeline.models import Job, assert_same_state
from conformance.pipeline.support import assert_bits

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu")), reason="needs torchrec"
)

PLACEMENTS: tuple[dict[str, Any], ...] = ({}, {"embedding_lookup_before_optimizer": True})


def _job(rank: Rank, kinds: tuple[str, ...]) -> Job:
    from conformance.peers import torchrec_pipeline

    # Of this seed no table is of one row: cut by row it would leave a rank none, which FBGEMM refuses on the CPU.
    job = Job(torchrec_pipeline.pipeline, 6, rank, kinds=kinds)
    # Tables that update themselves in the backward are parameters of torchrec's modules, but not of the optimizer.
    params = [
        param
        for name, param in job.model.named_parameters()
        if not name.startswith("collections") or "data_parallel" in kinds
    ]
    job.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.5)
    return job


def _driven(rank: Rank, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    from fastimpl.pipeline import TrainPipelineFusedSparseDist

    loop, theirs, ours = (_job(rank, kinds) for _ in range(3))
    schedule = TrainPipelineFusedSparseDist(
        ours.model, ours.optimizer, device="cpu", process_group=rank.group, **options
    )
    assert_equal(len(schedule._calls), 2, where="torchrec's modules that are driven")
    upstream = theirs.schedule("TrainPipelineSparseDist")
    loaders = iter(theirs.batches(6)), iter(ours.batches(6))
    for step, batch in enumerate(loop.batches(6)):
        expected = loop.step(batch)
        assert_bits(upstream.progress(loaders[0]), expected, f"torchrec's pipeline, step {step}")
        assert_bits(schedule.progress(loaders[1]), expected, f"our pipeline, step {step}")
        assert_same_state(theirs, loop, f"torchrec's pipeline, step {step}")
        assert_same_state(ours, loop, f"our pipeline, step {step}")


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kinds", [("table_wise", "row_wise"), ("data_parallel", "table_wise")], ids="-".join)
def test_fused_drives_torchrec(rank_pool: Any, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    rank_pool.run(_driven, 2, kinds, options)
