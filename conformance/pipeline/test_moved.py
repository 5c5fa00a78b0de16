"""H. Work that options move to another place of a step: still ordered, and on ranks still agreed."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.harness import Rank, assert_equal, requirement
from conformance.pipeline.cases import EVAL_FUSED, FUSED, Breaking, LoaderError
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.virtual_batches import on_host, virtual
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import DistributedError, PipelineError

MOVED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TrainPipelineSparseDist", {"enqueue_batch_after_forward": True}),
    (FUSED, {"enqueue_batch_after_forward": True, "embedding_lookup_after_opt": False}),
    (FUSED, {"embedding_lookup_after_opt": False, "use_emb_lookup_stream": True}),
    (EVAL_FUSED, {"enable_embedding_lookup_prefetch": True}),
    (EVAL_FUSED, {"enable_embedding_lookup_prefetch": True, "emb_lookup_stream": "new"}),
)


@pytest.mark.night
@requirement(
    "PIPE-308",
    "No two conflicting accesses MUST be unordered where batches are pulled behind the forward, or looked up before "
    "the optimizer or behind an evaluation, edits of tables on the caller's stream among them.",
    needs=("streams",),
)
def test_no_hazard_moved(pipeline: Any) -> None:
    found = []
    for name, options in MOVED:
        device, job = VirtualDevice(), Job(pipeline, 4, kinds=("table_wise", "row_wise"), device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(5))]
        with device:
            schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
            for _ in range(5):
                schedule.progress(loader)
                for collection in job.collections:
                    for _, weight, _ in collection.local_shards().values():
                        weight.mul_(1.5)
        found += [f"{name} {options}: {hazard}" for hazard in device.hazards]
    assert_equal(found, [], where="accesses that nothing orders")


def _late_error_on_one_rank(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    schedule = job.schedule(name, enqueue_batch_after_forward=True)
    at = {3} if rank.rank == 1 else set[int]()
    # One rank has a batch more, which is held in the end.
    loader = Breaking(job.batches(5 + rank.rank), at, LoaderError("here"))
    outcomes, batches = list[str](), loop.batches(5)
    for _ in range(8):
        try:
            output = schedule.progress(loader)
        except (LoaderError, DistributedError, PipelineError, StopIteration) as error:
            outcomes.append(type(error).__name__)
            continue
        assert_bits(output, loop.step(batches[outcomes.count("done")]), f"{name} call {len(outcomes)}")
        assert_same_state(job, loop, f"{name} call {len(outcomes)}")
        outcomes.append("done")
    failed = "LoaderError" if rank.rank == 1 else "DistributedError"
    expected = ["done", "done", failed, "done", "done", "done", "StopIteration", "StopIteration"]
    assert_equal(outcomes, expected, where=f"{name} outcomes of rank {rank.rank}")


@requirement(
    "PIPE-309",
    "On ranks, too, what one rank's loader raises behind the forward MUST come out of every rank's next call, by name, "
    "with the step whole; and ranks with different numbers of batches MUST stop together.",
)
def test_late_error_on_one_rank(rank_pool: Any) -> None:
    for name in ("TrainPipelineSparseDist", FUSED):
        rank_pool.run(_late_error_on_one_rank, 2, name)
