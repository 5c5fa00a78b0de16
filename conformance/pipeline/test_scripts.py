"""Random programs of whatever may happen to a pipeline, against the loop that goes through the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from conformance.harness import Rank, requirement
from conformance.pipeline.cases import VARIANTS, LoaderError
from conformance.pipeline.jobs import Batch, Job, assert_same_state, exchange_models, share_optimizer
from conformance.pipeline.model import OPTIMIZERS, assert_bits
from twinproof.errors import DistributedError

EVENTS = ("eval", "train", "detach", "edit", "load", "iterator", "error", "reset", "fail", "other")


class ForwardError(Exception):
    """A model's own."""


class Source(Iterator[Batch]):
    """Batches by number; raises once in place of the next when it is told to."""

    def __init__(self, job: Job) -> None:
        self.job, self.number, self.fails = job, 0, False

    def __next__(self) -> Batch:
        if self.fails:
            self.fails = False
            raise LoaderError("here")
        self.number += 1
        return self.job.batches(1, self.number - 1)[0]


class Again(Iterator[Batch]):
    """Another iterator, which goes on where the source is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __next__(self) -> Batch:
        return next(self._source)


class Script:
    """One program over a pipeline and over the loop; another model of each waits for its turn.

    On two ranks the pipeline is asked for the mean of dense gradients, which the loop's hooks take.
    """

    def __init__(self, pipeline: Any, seed: int, rank: Rank | None) -> None:
        self.chosen = random.Random(seed)
        optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
        # Of more than two the sum depends on how many values travel together.
        asked = rank is not None and rank.world_size == 2
        options: dict[str, Any] = {"optimizer": optimizer, "reduces": not asked}
        self.job, self.idle = (Job(pipeline, seed, rank, plan=plan, **options) for plan in (0, 1))
        options["reduces"] = True
        self.loop, self.idle_loop = (Job(pipeline, seed, rank, plan=plan, **options) for plan in (0, 1))
        for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
            share_optimizer(job, idle)
        self.name, placement = self.chosen.choice(VARIANTS)
        # A forward that fails is for one process alone.
        own = {"custom_model_fwd": self._forward} if rank is None else {"reduce_dense_gradients": asked or None}
        self.schedule = self.job.schedule(self.name, **placement, **own)
        self.saved, self.idle_saved = (copy.deepcopy(job.model.state_dict()) for job in (self.loop, self.idle_loop))
        self.source, self.fails, self.alone = Source(self.job), False, rank is None
        self.loader: Iterator[Batch] = self.source
        # The number of the loop's next batch.
        self.at = 0

    def _forward(self, batch: Batch) -> Any:
        if self.fails:
            self.fails = False
            raise ForwardError("here")
        return self.job.model(batch)

    def run(self, events: Sequence[str]) -> None:
        """These events, a step after each."""
        for number, event in enumerate(events):
            getattr(self, f"_{event}")()
            self._step(f"{self.name}, event {number}: {event}")
        assert_same_state(self.idle, self.idle_loop, f"{self.name}: the other model")

    def _step(self, where: str) -> None:
        while True:
            try:
                output = self.schedule.progress(self.loader)
                break
            except (LoaderError, DistributedError):
                # Rows may have been looked up in the call that the loader ended.
                self._edit()
            except ForwardError:
                self.at += 1
        expected = self.loop.step(self.loop.batches(1, self.at)[0])
        self.at += 1
        assert_bits(output, expected, f"{where}: output")
        assert_same_state(self.job, self.loop, where)

    def _eval(self) -> None:
        for each in (self.job, self.loop):
            each.model.eval()

    def _train(self) -> None:
        for each in (self.job, self.loop):
            each.model.train()

    def _detach(self) -> None:
        self.schedule.detach()

    def _edit(self) -> None:
        # Of tables perhaps one rank's alone: all ranks choose the same.
        world_size = self.schedule._world_size
        whose = self.chosen.choice([None, *range(world_size)])
        with torch.no_grad():
            for each in (self.job, self.loop):
                each.model.top.weight.mul_(0.75)
                for collection in each.collections if whose in (None, self.job.rank) else ():
                    for _, weight, _ in collection.local_shards().values():
                        weight.mul_(0.5)

    def _load(self) -> None:
        for each in (self.job, self.loop):
            each.model.load_state_dict(self.saved)

    def _iterator(self) -> None:
        self.loader = Again(self.source)

    def _error(self) -> None:
        self.source.fails = True

    def _reset(self) -> None:
        self.schedule.reset()
        self.at = self.source.number

    def _other(self) -> None:
        for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
            exchange_models(job, idle)
            job.model.train(idle.model.training)
        self.saved, self.idle_saved = self.idle_saved, self.saved
        self.schedule.attach(self.job.model)

    def _fail(self) -> None:
        # A failed step of ranks is for reset(), which other events are.
        self.fails = self.alone


@requirement(
    "PIPE-148",
    "Whatever program of steps, modes, detachments, edits, loads, iterators, loader errors, resets, failing forwards "
    "and other models a pipeline goes through, it MUST have the loop's outputs and state after every step.",
)
def test_any_script(pipeline: Any) -> None:
    for seed in range(30, 42):
        script = Script(pipeline, seed, None)
        script.run([script.chosen.choice(EVENTS) for _ in range(12)])


def _script(rank: Rank, seed: int) -> None:
    script = Script(rank.component("pipeline"), seed, rank)
    # Each once, in a random order, and one of them again behind another model.
    script.run([*script.chosen.sample(EVENTS, len(EVENTS)), "other", script.chosen.choice(EVENTS)])


@requirement(
    "PIPE-149",
    "The same MUST hold on 1 to 4 ranks, but for failing forwards, whoever averages the dense gradients "
    "and whichever ranks' tables are edited.",
)
def test_any_script_on_ranks(rank_pool: Any) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_script, world_size, 55 + world_size)
