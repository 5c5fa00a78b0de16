"""What is left of pipelines that are copied, or dropped, and of the models that they drove."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import EVALUATION, TRAINING
from conformance.pipeline.jobs import Job, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import UnsupportedError


@requirement(
    "PIPE-672",
    "A copy or a pickle of a pipeline, with batches in flight or without, MUST be refused by name; the pipeline goes "
    "on bit for bit, and a copy of its model is a plain one.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_copied_pipelines(pipeline: Any, name: str) -> None:
    copies: dict[str, Any] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
    outputs: list[Any] = []
    for is_copied in (True, False):
        job = Job(pipeline, 17)
        schedule, loader = job.schedule(name), iter(job.batches(5))
        outputs.append([])
        for _ in range(2):
            for kind, make in copies.items() if is_copied else ():
                count = len(schedule.batches)
                mentions = ("drives one model", "a copy of the model", f"where: {name}")
                with raises(UnsupportedError, mentions=mentions, where=f"{kind}, {count} in flight"):
                    make(schedule)
                assert_equal(len(schedule.batches), count, where=f"{kind}: batches in flight")
            outputs[-1].append(schedule.progress(loader))
        outputs[-1] += outputs_of(schedule, loader)
        if is_copied:
            copied, plain = copy.deepcopy(schedule._model), schedule.detach()
            with succeeds("a forward", where="the copied model"):
                predictions = copied(job.batch(0))[1]
            assert_bits(predictions, plain(job.batch(0))[1], where="the copied model")
    for step, (got, expected) in enumerate(zip(*outputs, strict=True)):
        assert_bits(got, expected, where=f"step {step}")
