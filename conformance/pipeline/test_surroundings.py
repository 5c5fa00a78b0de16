"""What the process is beside the pipeline: a default device that a caller has set for its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.pipeline.jobs import KINDS, Job, assert_same_state
from conformance.pipeline.model import assert_bits, random_tables
from conformance.pipeline.sharding import random_plan

SCHEDULES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def _within_meta(batches: list[Any]) -> Iterator[Any]:
    # The loader is the user's, and makes its batches where it likes.
    for batch in batches:
        with torch.device("cpu"):
            yield batch


@requirement(
    "PIPE-421",
    "The process's default device MUST NOT decide where anything lies: cutting, lookups, steps, schedules and state "
    "dicts under another one MUST be those without.",
)
def test_default_device(pipeline: Any) -> None:
    for seed, name in enumerate(SCHEDULES):
        loop, job = (Job(pipeline, seed, device="cpu") for _ in range(2))
        batches = loop.batches(4)
        expected = [loop.step(batch) for batch in batches[:2]]
        with torch.device("meta"), succeeds("a loop", where=name):
            found = [job.step(batch) for batch in batches[:2]]
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_bits(mine, theirs, f"{name}: output of step {step}")
        assert_same_state(job, loop, f"{name}: steps")
        plain = loop.schedule(name)
        with torch.device("meta"), succeeds("a schedule", where=name):
            schedule = job.schedule(name)
        straight, fed = iter(batches), _within_meta(batches)
        for step in range(len(batches)):
            output = plain.progress(straight)
            with torch.device("meta"), succeeds("a step", where=name):
                seen = schedule.progress(fed)
            assert_bits(seen, output, f"{name}: output {step} of a schedule")
        assert_same_state(job, loop, f"{name}: a schedule")
        for index, collection in enumerate(job.collections):
            with torch.device("meta"), succeeds("a state dict", where=name):
                state = {**collection.state_dict(), **collection.optimizer_state_dict()}
            whole = {**loop.collections[index].state_dict(), **loop.collections[index].optimizer_state_dict()}
            assert_equal(sorted(state), sorted(whole), where=f"{name}: names of collection {index}")
            for key, value in whole.items():
                assert_equal(state[key].device.type, "cpu", where=f"{name}: {key}")
                assert_bits(state[key], value, f"{name}: {key}")


def _made(pipeline: Any, configs: Any, plan: Any) -> dict[str, torch.Tensor]:
    """What is made of nothing: first weights of cut tables, and what batches say of their sizes."""
    cut = pipeline.ShardedEmbeddingBagCollection(pipeline.EmbeddingBagCollection(configs, device="meta"), plan, seed=3)
    found = dict(cut.state_dict())
    ids, lengths = torch.arange(6, device="cpu"), torch.tensor([2, 1, 0, 3], device="cpu")
    batches = {
        "of two sizes": pipeline.KeyedJaggedTensor(["f", "g"], ids, None, lengths, None, None, [[1], [3]]),
        "of one": pipeline.KeyedJaggedTensor(["f", "g"], ids, None, lengths),
        "empty": pipeline.KeyedJaggedTensor.empty(device=torch.device("cpu")),
    }
    other = pipeline.KeyedJaggedTensor(["h", "i"], ids, None, lengths, None, None, [[1], [3]])
    batches["joined"] = pipeline.KeyedJaggedTensor.concat([batches["of two sizes"], other])
    for name, batch in batches.items():
        found[f"{name}: lengths"], found[f"{name}: offsets"] = batch.lengths(), batch.offsets()
        strides = batch.stride_per_key_per_rank()
        found[f"{name}: strides"] = torch.tensor(strides, device="cpu")
        found[f"{name}: per key"] = torch.tensor(batch.length_per_key(), device="cpu")
    jagged = pipeline.JaggedTensor(ids, lengths=lengths)
    return found | {"jagged: offsets": jagged.offsets(), "jagged: dense": jagged.to_padded_dense(3)}


@requirement(
    "PIPE-422",
    "First weights of tables that are cut from meta, and what a batch says of its sizes, MUST NOT follow the process's "
    "default device.",
)
def test_made_of_nothing(pipeline: Any) -> None:
    configs, _, _, _ = random_tables(pipeline, 3)
    plan = random_plan(pipeline, configs, 1, 3, KINDS)
    expected = _made(pipeline, configs, plan)
    with torch.device("meta"), succeeds("what is made of nothing", where="on meta"):
        found = _made(pipeline, configs, plan)
    for name, value in expected.items():
        assert_equal(found[name].device.type, value.device.type, where=f"{name}: device")
        assert_bits(found[name], value, name)
