"""SemiSync from its start on, as one requirement: any program of what may happen to it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, requirement, succeeds
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.stale import StaleLoop, StaleProgram


@requirement(
    "PIPE-423",
    "Through any program of steps, modes, edits, loads, models that take turns, loaders, failing loaders, forwards and "
    "optimizers, resets, frozen parameters and groups that are added, SemiSync MUST hold the bits of the loop that is "
    "one update stale, with and without stash_gradients, and count right.",
)
@examples(12)
@given(seed=st.integers(0, 10**9))
def test_any_stale_program(pipeline: Any, seed: int) -> None:
    class Program(StaleProgram):
        pass

    Program.pipeline = pipeline
    Program().run(seed)


@requirement(
    "PIPE-634",
    "reset() MUST forget gradients that SemiSync has stashed: the first step behind it steps no dense parameter, and "
    "the steps that follow step with the gradients of the step before, as from its start on.",
)
def test_stash_of_a_reset(pipeline: Any) -> None:
    job, loop = (Job(pipeline, 7, kinds=("table_wise", "row_wise")) for _ in range(2))
    schedule = job.schedule("TrainPipelineSemiSync", start_batch=0, stash_gradients=True)
    batches, loader, number = [loop.there(each) for each in loop.batches(16)], iter(job.batches(16)), 0
    for _ in range(2):
        schedule.reset()
        # What is in flight is gone; the loop is one that has stashed nothing.
        at, stale = schedule.pulled_count, StaleLoop(loop, 0, stashes=True)
        for step in range(3):
            before = [param.detach().clone() for param in job.model.top.parameters()]
            expected = stale.step(batches[at], batches[at + 1], number)
            assert_bits(schedule.progress(loader), expected, f"step {number}")
            assert_same_state(job, loop, f"step {number}")
            after = list(job.model.top.parameters())
            stands = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            assert_equal(stands, step == 0, where=f"step {number}: dense parameters stand still")
            at, number = at + 1, number + 1


def _take_turns(schedule: Any, job: Job) -> None:
    schedule.attach(Job(job.pipeline, 8, kinds=("table_wise",)).model)
    schedule.attach(job.model)


@requirement(
    "PIPE-681",
    "start_batch MUST count the steps of the pipeline, through resets, other iterators, models that take turns and a "
    "detach: a step of that number or a later one looks ahead whatever came before it, and none before it does.",
)
def test_start_behind_events(pipeline: Any) -> None:
    events: dict[str, Callable[[Any, Job], Any]] = {
        "reset": lambda schedule, job: schedule.reset(),
        "another iterator": lambda schedule, job: None,
        "another model": _take_turns,
        "a detach": lambda schedule, job: (schedule.detach(), schedule.attach()),
    }
    for (event, act), start, before in product(events.items(), (0, 2, 3), (1, 2, 4)):
        job, loop = (Job(pipeline, 7, kinds=("table_wise",)) for _ in range(2))
        schedule = job.schedule("TrainPipelineSemiSync", start_batch=start)
        batches, loader = [loop.there(each) for each in loop.batches(12)], iter(job.batches(12))
        stale, where = StaleLoop(loop, start, stashes=False), f"{event} behind {before} steps, start {start}"
        number = 0
        for part in (before, 4):
            # What is in flight at a reset is gone; the others keep it, and all but a new iterator look it up anew.
            at = schedule.pulled_count if event == "reset" else number
            stale.ready = stale.ready if event == "another iterator" else None
            for _ in range(part):
                expected = stale.step(batches[at], batches[at + 1], number)
                assert_bits(schedule.progress(loader), expected, f"{where}: step {number}")
                assert_same_state(job, loop, f"{where}: step {number}")
                at, number = at + 1, number + 1
            with succeeds(event, where=where):
                act(schedule, job)
            if event == "another iterator":
                loader = iter(job.batches(12)[schedule.pulled_count :])
