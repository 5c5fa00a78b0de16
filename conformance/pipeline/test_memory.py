"""I. Memory: nothing grows from step to step, and a batch that is done is gone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from conformance.harness import assert_equal, requirement
from conformance.pipeline.models import Job, outputs_of

LONGEST = ("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def live() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their storages."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


@requirement("PIPE-103", "200 steady steps MUST leave as many tensors, and as many bytes in them, as 20 did.")
def test_growth(pipeline: Any) -> None:
    for name in LONGEST:
        job = Job(pipeline, 14)
        schedule, batch = job.schedule(name), job.batch(0)
        loader = iter([batch] * 210)
        for step in range(200):
            schedule.progress(loader)
            if step == 20:
                before = live()
        assert_equal(live(), before, where=f"{name} tensors and bytes")


@requirement(
    "PIPE-131", "A batch that was processed MUST be gone once the caller lets go of it, in steady state and at the end."
)
def test_released(pipeline: Any) -> None:
    for name in LONGEST:
        job = Job(pipeline, 15)
        schedule = job.schedule(name)
        seen: list[Any] = []

        def loader(job: Job = job, seen: list[Any] = seen) -> Any:
            for number in range(6):
                batch = job.batch(number)
                seen.append(weakref.ref(batch.dense))
                yield batch
                del batch

        batches = loader()
        for step in range(3):
            schedule.progress(batches)
            alive = [reference() is not None for reference in seen[: step + 1]]
            assert_equal(alive, [False] * (step + 1), where=f"{name} processed batches after step {step}")
        outputs_of(schedule, batches)
        assert_equal([reference() is not None for reference in seen], [False] * 6, where=f"{name} batches at the end")
