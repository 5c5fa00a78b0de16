"""The pipelines' state machine: any program of what may happen to a schedule, beside the plain loop.

The loop goes through the same edits, modes and loads, and takes the batches that the schedule should; after every step
of the machine both hold the same bits, and the schedule's counts are the machine's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conformance.harness import assert_equal
from conformance.pipeline.cases import EVALUATION, FUSED, VARIANTS, LoaderError
from conformance.pipeline.jobs import Batch, Job, assert_same_state
from conformance.pipeline.model import OPTIMIZERS, assert_bits

LATE = {"enqueue_batch_after_forward": True}
PROGRAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    *VARIANTS,
    ("TrainPipelineSparseDist", LATE),
    (FUSED, {**LATE, "embedding_lookup_after_opt": False}),
    ("PrefetchTrainPipelineSparseDist", {}),
    *((name, {}) for name in EVALUATION),
    ("EvalPipelineFusedSparseDist", {"enable_embedding_lookup_prefetch": True}),
)


class ForwardError(Exception):
    """A model's own."""


class Numbered(Iterator[Batch]):
    """Batches by number from a common count; ends after some, and raises once where it is told to."""

    def __init__(self, machine: ScheduleMachine, count: int | None = None) -> None:
        self._machine, self._left = machine, count

    def __next__(self) -> Batch:
        machine = self._machine
        if machine.loader_fails:
            machine.loader_fails = False
            raise LoaderError("here")
        if self._left is not None:
            if self._left == 0:
                raise StopIteration
            self._left -= 1
        machine.pulled += 1
        return machine.job.batches(1, machine.pulled - 1)[0]

    @property
    def ended(self) -> bool:
        """Whether it has no batch left."""
        return self._left == 0


class ScheduleMachine(RuleBasedStateMachine):
    """See the module. The class attribute is set by the test that runs it."""

    pipeline: Any

    @initialize(program=st.sampled_from(PROGRAMS), optimizer=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 3))
    def start(self, program: tuple[str, dict[str, Any]], optimizer: str, seed: int) -> None:
        """A schedule, and the loop."""
        self.name, options = program
        self.job, self.loop = (Job(self.pipeline, seed, optimizer=optimizer) for _ in range(2))
        self.schedule = self.job.schedule(self.name, custom_model_fwd=self._forward, **options)
        self.saved = copy.deepcopy(self.loop.model.state_dict())
        # Batches taken from loaders, the number of the loop's next one, and steps.
        self.pulled = self.at = self.steps = 0
        self.loader_fails = self.forward_fails = False
        self.loader = Numbered(self)

    def _forward(self, batch: Batch) -> Any:
        if self.forward_fails:
            self.forward_fails = False
            raise ForwardError("here")
        return self.job.model(batch)

    def _expected(self) -> torch.Tensor:
        """The loop's output for its next batch."""
        batch, was_training = self.loop.batches(1, self.at)[0], self.loop.model.training
        self.at += 1
        self.loop.model.train(was_training and self.name not in EVALUATION)
        found = self.loop.step(batch)
        self.loop.model.train(was_training)
        return found

    @rule(count=st.integers(1, 3))
    def progress(self, count: int) -> None:
        """Some steps; what a loader or a forward raises comes out, and a loader that has ended stops them."""
        for _ in range(count):
            try:
                output = self.schedule.progress(self.loader)
            except LoaderError:
                # Rows may have been looked up in the call that the loader ended.
                self.edit()
                continue
            except ForwardError:
                self.at += 1
                continue
            except StopIteration:
                assert_equal(self.loader.ended, True, where=f"{self.name}: a loader that ended")
                assert_equal(self.at, self.pulled, where=f"{self.name}: all that was pulled was processed")
                return
            assert_bits(output, self._expected(), f"{self.name}: output")
            self.steps += 1

    @rule(training=st.booleans())
    def mode(self, training: bool) -> None:
        """Training or evaluation."""
        for each in (self.job, self.loop):
            each.model.train(training)

    @rule()
    def edit(self) -> None:
        """Weights are written in place."""
        with torch.no_grad():
            for each in (self.job, self.loop):
                each.model.top.weight.mul_(0.75)
                for collection in each.collections:
                    for _, weight, _ in collection.local_shards().values():
                        weight.mul_(0.5)

    @rule()
    def load(self) -> None:
        """The first state comes back."""
        for each in (self.job, self.loop):
            each.model.load_state_dict(self.saved)

    @rule(again=st.booleans(), sparse_dist=st.booleans())
    def detach(self, again: bool, sparse_dist: bool) -> None:
        """The model is given back; a step, or attach, takes it again."""
        self.schedule.detach()
        if again:
            self.schedule.attach(sparse_dist=sparse_dist)

    @rule(left=st.one_of(st.none(), st.integers(0, 4)))
    def iterator(self, left: int | None) -> None:
        """Another loader, which may end."""
        self.loader = Numbered(self, left)

    @rule(steps=st.integers(0, 3))
    def fail_loader(self, steps: int) -> None:
        """The next pull raises; perhaps now, behind some steps."""
        if steps > 1:
            self.progress(steps - 1)
        self.loader_fails = True
        if steps:
            self.progress(2)

    @rule()
    def fail_forward(self) -> None:
        """The next forward raises."""
        self.forward_fails = True

    @rule()
    def reset(self) -> None:
        """What is in flight is forgotten."""
        self.schedule.reset()
        self.at = self.pulled

    @invariant()
    def same(self) -> None:
        """Every bit that training changes, and the counts."""
        if not hasattr(self, "schedule"):
            return
        assert_same_state(self.job, self.loop, self.name)
        counts = (self.schedule.pulled_count, self.schedule.processed_count, len(self.schedule.batches))
        expected = (self.pulled, self.steps, self.pulled - self.at)
        assert_equal(counts, expected, where=f"{self.name}: batches pulled, processed, in flight")
