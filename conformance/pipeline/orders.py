"""More of what may happen to a schedule between two steps: another model takes the place, batches are taken by hand.

Two models of equal names, cut by different plans, share the schedule and one dense optimizer, and so do the loop's two.
The one that is not driven must stand still. Options of the optimizer change, parameters stop to train and train again.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from conformance.harness import assert_equal
from conformance.pipeline.cases import LoaderError
from conformance.pipeline.jobs import Job, assert_same_state, exchange_models, share_optimizer
from conformance.pipeline.machine import PROGRAMS, ScheduleMachine
from conformance.pipeline.model import OPTIMIZERS


class OrdersMachine(ScheduleMachine):
    """See the module."""

    @initialize(program=st.sampled_from(PROGRAMS), optimizer=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 3))
    def start(self, program: tuple[str, dict[str, Any]], optimizer: str, seed: int) -> None:
        """A schedule and the loop, and another model of each."""
        super().start(program, optimizer, seed)
        self.idle, self.idle_loop = (Job(self.pipeline, seed, optimizer=optimizer, plan=1) for _ in range(2))
        for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
            share_optimizer(job, idle)
        self.idle_saved = copy.deepcopy(self.idle_loop.model.state_dict())

    @rule(sparse_dist=st.booleans(), training=st.booleans())
    def other_model(self, sparse_dist: bool, training: bool) -> None:
        """The other one is driven from here on, by the batches that are in flight first."""
        for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
            exchange_models(job, idle)
            job.model.train(training)
        self.saved, self.idle_saved = self.idle_saved, self.saved
        self.schedule.attach(self.job.model, sparse_dist=sparse_dist)

    @rule(fills=st.booleans())
    def take(self, fills: bool) -> None:
        """A batch is taken by hand, as loops do that warm up; then anything may happen."""
        before, had_ended = self.pulled, self.loader.ended
        try:
            found = self.schedule.fill_pipeline(self.loader) if fills else self.schedule.enqueue_batch(self.loader)
        except LoaderError:
            assert_equal(self.pulled, before, where=f"{self.name}: batches of a loader that failed")
            return
        if not fills:
            # A loader that fails at its end says so in the step after it.
            assert_equal(found, self.pulled == before + 1, where=f"{self.name}: whether there was a batch")
            if had_ended:
                assert_equal(found, False, where=f"{self.name}: a batch of a loader that has ended")

    @rule(lr=st.sampled_from([0.05, 0.2]), momentum=st.sampled_from([0.0, 0.5]))
    def change_options(self, lr: float, momentum: float) -> None:
        """Of the dense optimizer, in place."""
        for job in (self.job, self.loop):
            for group in job.optimizer.param_groups:
                group.update(lr=lr, momentum=momentum)

    @rule(trains=st.booleans())
    def freeze(self, trains: bool) -> None:
        """A dense parameter trains, or does not."""
        for job in (self.job, self.loop):
            job.model.bottom.weight.requires_grad_(trains)

    @invariant()
    def idle_stands_still(self) -> None:
        """The model that is not driven is what it was when it was left."""
        if hasattr(self, "idle_loop"):
            assert_same_state(self.idle, self.idle_loop, f"{self.name}: the other model")
