"""H. Stream safety of programs: whatever happens between steps, and whatever the model reads, everything is ordered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import assert_equal, requirement
from conformance.pipeline.cases import EVAL_FUSED, FUSED, LoaderError
from conformance.pipeline.jobs import (
    Batch,
    Between,
    Job,
    Shifted,
    assert_same_state,
    exchange_models,
    share_optimizer,
)
from conformance.pipeline.model import assert_bits
from conformance.pipeline.virtual_batches import KINDS, on_host, virtual
from conformance.provers.virtual_device import VirtualDevice

# Steps of a program.
STEPS = 10
EVENTS = ("edit", "eval", "train", "detach", "attach", "iterator", "error", "dense", "other")
# By these seeds edits meet lookups that are under way.
PROGRAMS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (23, FUSED, {"emb_lookup_stream": "new"}),
    (25, "TrainPipelineSemiSync", {"start_batch": 2}),
    (21, "TrainPipelineSparseDist", {"enqueue_batch_after_forward": True}),
    (24, FUSED, {"emb_lookup_stream": "new", "embedding_lookup_before_optimizer": True}),
    (26, EVAL_FUSED, {"enable_embedding_lookup_prefetch": True, "emb_lookup_stream": "new"}),
)


class Source(Iterator[Any]):
    """Batches in the virtual device's host memory; raises once where it is told to."""

    def __init__(self, device: VirtualDevice, job: Job) -> None:
        # Made before the device sees anything: it would take them for its own work.
        batches = on_host(device, job.batches(STEPS + 4))
        self._batches, self.fails = iter([virtual(device, batch) for batch in batches]), False

    def __next__(self) -> Any:
        if self.fails:
            self.fails = False
            raise LoaderError("here")
        return next(self._batches)


class Again(Iterator[Any]):
    """Another iterator, which goes on where the source is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __next__(self) -> Any:
        return next(self._source)


class Program:
    """All events in a random order, a step behind each, of a schedule on the virtual device and of the loop."""

    def __init__(self, pipeline: Any, seed: int, name: str, options: dict[str, Any]) -> None:
        self.name, self.device, self.chosen = name, VirtualDevice(), random.Random(seed)
        self.job, self.loop = (Job(pipeline, seed, kinds=KINDS, device="cpu") for _ in range(2))
        # Another model of each, cut otherwise, waits for its turn.
        self.idle, self.idle_loop = (Job(pipeline, seed, kinds=KINDS, plan=1, device="cpu") for _ in range(2))
        for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
            share_optimizer(job, idle)
            for each in (job, idle):
                each.model = Between(each.model, Shifted(pipeline), reads_them=True)  # type: ignore[assignment]
        self.is_exact = "Semi" not in name
        with self.device:
            self.schedule = self.job.schedule(name, engine=self.device.engine, pipeline_postproc=True, **options)
        self.source = Source(self.device, self.job)
        self.loader: Iterator[Any] = self.source
        self.steps = 0

    def run(self) -> None:
        """The program; nothing is unordered in it."""
        events = [*EVENTS, *self.chosen.sample(EVENTS, STEPS - 1 - len(EVENTS))]
        self.chosen.shuffle(events)
        for event in ["nothing", *events]:
            with self.device:
                self._do(event)
                while True:
                    try:
                        output = self.schedule.progress(self.loader)
                        break
                    except LoaderError:
                        # Rows may have been looked up in the call that the loader ended.
                        self._do("edit")
                with torch.utils._python_dispatch._disable_current_modes():
                    self._compare(output, f"{self.name} step {self.steps}: {event}")
            self.steps += 1
        hazards = [str(hazard) for hazard in self.device.hazards]
        assert_equal(hazards, [], where=f"{self.name} hazards of {events}")

    def _compare(self, output: torch.Tensor, where: str) -> None:
        batch: Batch = self.loop.batches(1, self.steps)[0]
        was_training = self.loop.model.training
        self.loop.model.train(was_training and "Train" in self.name)
        expected = self.loop.step(batch)
        self.loop.model.train(was_training)
        if self.is_exact:
            self.device.engine.settle_all()
            assert_bits(output, expected, f"{where}: output")
            assert_same_state(self.job, self.loop, where)

    def _do(self, event: str) -> None:
        if event in ("eval", "train"):
            for each in (self.job, self.loop):
                each.model.train(event == "train")
        elif event in ("edit", "dense"):
            self._write(event)
        elif event == "detach":
            self.schedule.detach()
        elif event == "attach":
            self.schedule.attach()
        elif event == "other":
            for job, idle in ((self.job, self.idle), (self.loop, self.idle_loop)):
                exchange_models(job, idle)
                job.model.train(idle.model.training)
            self.schedule.attach(self.job.model)
        elif event == "iterator":
            self.loader = Again(self.source)
        self.source.fails |= event == "error"

    def _write(self, event: str) -> None:
        with torch.no_grad():
            for each in (self.job, self.loop):
                if event == "dense":
                    each.model.model.top.weight.mul_(0.75)  # type: ignore[union-attr, operator]
                    continue
                for collection in each.collections:
                    for _, weight, _ in collection.local_shards().values():
                        weight.mul_(0.5)


@requirement(
    "PIPE-368",
    "Through any program of edits, modes, detach, attach, other models, iterators and loader errors, where ids come "
    "from a module that the dense part reads too, no two conflicting accesses of a schedule MUST be unordered, nothing "
    "released early, and every bit the loop's.",
    needs=("streams",),
)
def test_any_program_ordered(pipeline: Any) -> None:
    for seed, name, options in PROGRAMS:
        Program(pipeline, seed, name, options).run()
