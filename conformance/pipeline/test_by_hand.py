"""Pipelines whose stages are called by hand, and whose queues and pulls a subclass keeps by itself."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import FUSED, TRAINING, Context, LoaderError
from conformance.pipeline.jobs import Batch, Job, assert_same_state
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, PipelineError

LOOKING_UP = (FUSED, "TrainPipelineSemiSync")
AHEAD = ("TrainPipelineSparseDist", *LOOKING_UP)


def _options(name: str) -> dict[str, Any]:
    return {"start_batch": 10**6} if "Semi" in name else {}


def _assert_steps(schedule: Any, loader: Any, job: Job, loop: Job, batches: list[Batch], where: str) -> None:
    """The steps that follow are the loop's."""
    for step, batch in enumerate(batches):
        with succeeds("a step", where=f"{where}: step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{where}: step {step}")
        assert_same_state(job, loop, f"{where}: step {step}")


@requirement(
    "PIPE-566",
    "Stages that are given no batch, or find none in flight, as before the first and behind the last, MUST do nothing: "
    "the steps that follow are the loop's.",
)
@pytest.mark.parametrize("name", AHEAD)
def test_stages_without_a_batch(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    options = {"start_batch": 0} if "Semi" in name else {}
    schedule, batches = job.schedule(name, **options), loop.batches(2)
    for moment in ("before the first batch", "behind the last"):
        stages = ["start_sparse_data_dist", *(["start_embedding_lookup"] if name in LOOKING_UP else [])]
        for stage in stages:
            with succeeds(stage, where=moment):
                getattr(schedule, stage)(None, None)
        if name in LOOKING_UP:
            with succeeds("wait_embedding_lookup", where=moment):
                schedule.wait_embedding_lookup()
        if "Semi" in name:
            assert_equal(schedule.is_semi_sync(), False, where=f"{moment}: a batch whose lookup may be early")
        if moment == "before the first batch":
            loader = iter(job.batches(1))
            assert_bits(schedule.progress(loader), loop.step(batches[0]), "the one step")
    with raises(StopIteration):
        schedule.progress(loader)
    assert_bits(schedule.progress(iter(job.batches(1, 1))), loop.step(batches[1]), "a step of another loader")


@requirement(
    "PIPE-567",
    "A batch that takes the place of the current one within its step MUST be what its forward gets, with what was "
    "looked up already; one in the place of a batch whose context alone was removed MUST stand in that place.",
)
@pytest.mark.parametrize("name", AHEAD)
def test_replaced_within_its_step(pipeline: Any, name: str) -> None:
    def changed(batch: Batch) -> Batch:
        return Batch(batch.dense + 1, batch.ids, batch.target)

    class Mine(getattr(pipeline, name)):  # type: ignore[misc]
        """Changes the dense part when the batch is needed on the device."""

        def _wait_for_batch(self) -> None:
            super()._wait_for_batch()
            self.batches[0] = changed(self.batches[0])

    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule = Mine(job.model, job.optimizer, job.device, **_options(name))
    _assert_steps(schedule, iter(job.batches(3)), job, loop, [changed(each) for each in loop.batches(3)], name)

    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(3))
    schedule.fill_pipeline(loader)
    schedule.enqueue_batch(loader)
    schedule.contexts.popleft()
    another = job.there(job.batch(20))
    with succeeds("another batch", where="in place of one without its context"):
        schedule.batches[0] = another
    assert_equal(schedule.batches[0] is another, True, where="what stands in its place")
    assert_equal(schedule.batches.popleft() is another, True, where="what is removed then")
    _assert_steps(schedule, loader, job, loop, loop.batches(3)[1:], f"{name}, behind what was removed")


class Ending(Iterator[Any]):
    """Ends behind its batches, and has more for whoever asks again; counts what it was asked."""

    def __init__(self, batches: list[Any], more: list[Any]) -> None:
        self._given, self.asked_count = [*batches, None, *more], 0

    def __next__(self) -> Any:
        self.asked_count += 1
        found = self._given.pop(0)
        if found is None:
            raise StopIteration
        return found


@requirement(
    "PIPE-568",
    "A loader that has ended MUST NOT be asked again, whichever stage asks for a batch: enqueue_batch gives False and "
    "the copy no batch, until another loader comes, or StopIteration has come out of progress().",
)
@pytest.mark.parametrize("name", TRAINING)
def test_ended_loaders(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule, loader = job.schedule(name, **_options(name)), Ending(job.batches(2), job.batches(2, 8))
    for expected in (True, True, False, False, False):
        assert_equal(schedule.enqueue_batch(loader), expected, where="a batch more")
    copies = [schedule.copy_batch_to_gpu(loader) for _ in range(2)]
    assert_equal(copies, [(None, None)] * 2, where="copies of a loader that has ended")
    batches = loop.batches(5)
    _assert_steps(schedule, loader, job, loop, batches[:2], name)
    with raises(StopIteration):
        schedule.progress(loader)
    assert_equal(loader.asked_count, 3, where="how often the loader was asked")
    assert_equal(schedule.enqueue_batch(loader), True, where="a batch behind the end that was told")
    batches = [*loop.batches(1, 8), *batches[2:]]
    _assert_steps(schedule, iter(job.batches(3, 2)), job, loop, batches, f"{name}, another loader")


@requirement(
    "PIPE-569",
    "A copy that a subclass makes by itself MUST be the batch in flight, and the context that it gives with it the "
    "batch's own, whether or not it asked the pipeline's copy for them.",
)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", AHEAD)
def test_own_copies(pipeline: Any, name: str, asks: bool) -> None:
    job, loop, given = Job(pipeline, 3), Job(pipeline, 3), list[Context]()

    class Mine(getattr(pipeline, name)):  # type: ignore[misc]
        """Copies by hand."""

        def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> Any:
            """The batch where the model is, and a context of our own."""
            batch = super().copy_batch_to_gpu(dataloader_iter)[0] if asks else next(dataloader_iter, None)
            if batch is None:
                return None, None
            given.append(Context(index=len(given), version=2))
            return job.there(batch), given[-1]

    schedule, loader = Mine(job.model, job.optimizer, job.device, **_options(name)), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"step {step}")
        held = [any(context is each for each in given) for context in schedule.contexts]
        assert_equal(held, [True] * len(schedule.batches), where=f"step {step}: contexts in flight are the copy's")
    assert_equal(len(given), 4, where="batches that were copied")
    assert_same_state(job, loop, name)


@requirement(
    "PIPE-570",
    "What a step raises MUST come out as it is where a subclass removed the batch before, as one that skips it does; "
    "the next step is that of the next batch.",
)
@pytest.mark.parametrize("name", AHEAD)
def test_removed_before_an_error(pipeline: Any, name: str) -> None:
    job, loop, error = Job(pipeline, 3), Job(pipeline, 3), LoaderError("of the step")

    class Mine(getattr(pipeline, name)):  # type: ignore[misc]
        """Removes a batch that it will not process."""

        skips = True

        def _wait_for_batch(self) -> None:
            if self.skips:
                self.dequeue_batch()
                raise error

    schedule, loader = Mine(job.model, job.optimizer, job.device, **_options(name)), iter(job.batches(3))
    with raises(LoaderError, where="a batch that was removed") as caught:
        schedule.progress(loader)
    assert_equal(caught.error is error, True, where="the error is the step's own")
    schedule.skips = False
    _assert_steps(schedule, loader, job, loop, loop.batches(3)[1:], f"{name}, behind what was removed")


@requirement(
    "PIPE-571",
    "register_backward_hook MUST hand a site of torchrec's to torchrec with the model inside of its wrappers and work "
    "that gets the pipeline, and refuse every other site by name, with torchrec there or not.",
)
def test_injection_sites(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedModelParallel(torch.nn.Module):
        """A wrapper by torchrec's name."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    class InjectionSite:
        """In place of torchrec's."""

    registered, worked = list[tuple[Any, ...]](), list[Any]()
    there = types.ModuleType("backward_injection")
    there.InjectionSite = InjectionSite  # type: ignore[attr-defined]
    there.register_backward_hook = lambda *given: registered.append(given)  # type: ignore[attr-defined]
    job, site = Job(pipeline, 3), InjectionSite()
    kind, wrapped = pipeline.TrainPipelineSparseDist, DistributedModelParallel(job.model)
    schedule = kind(wrapped, job.optimizer, job.device)
    for is_there in (False, True):
        name = "torchrec.distributed.train_pipeline.backward_injection"
        monkeypatch.setitem(sys.modules, name, there if is_there else None)
        for wrong in ("top", None, object(), *([] if is_there else [site])):
            with raises(ConfigError, mentions=("register_backward_hook",), where=f"{wrong!r}, {is_there}"):
                schedule.register_backward_hook(wrong, worked.append)
    assert_equal(registered, [], where="sites that were refused")
    schedule.register_backward_hook(site, worked.append)
    ((given_site, model, work),) = registered
    assert_equal((given_site is site, model is job.model), (True, True), where="what torchrec is given")
    work(torch.ones(1))
    assert_equal([each is schedule for each in worked], [True], where="what the work is given")


@requirement(
    "PIPE-572",
    "Batches and contexts MUST be appended one by one or several at once, each context to the first batch without one, "
    "and contexts in flight be exchanged; an insertion elsewhere and a slice MUST be refused, with nothing changed.",
)
@pytest.mark.parametrize("kind", [Context, None])
def test_queues_by_hand(pipeline: Any, kind: Any) -> None:
    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule = job.schedule("TrainPipelineSparseDist", context_type=kind)
    schedule.enqueue_batch(iter(job.batches(1)))
    first, given = schedule.contexts[0], [job.there(batch) for batch in job.batches(2, 1)]
    schedule.batches.extend(given)
    mine = [Context(index=number, version=9) for number in range(3)]
    if kind is None:
        # The pipeline's own stands in for it until it is given one.
        schedule.contexts.append(mine[0])
    schedule.contexts.extend(mine[1:])
    expected = [first if kind else mine[0], *mine[1:]]
    assert_equal([a is b for a, b in zip(schedule.contexts, expected, strict=True)], [True] * 3, where="contexts")
    assert_equal([a is b for a, b in zip(schedule.batches[1:], given, strict=True)], [True] * 2, where="batches")
    schedule.batches.append(job.there(job.batch(9)))
    for queue, where in ((schedule.batches, 0), (schedule.batches, 2)):
        with raises(PipelineError, mentions=("at the end",), where=f"an insertion at {where}"):
            queue.insert(where, job.there(job.batch(8)))
    for queue in (schedule.batches, schedule.contexts):
        with raises(PipelineError, mentions=("one at a time",), where="a slice"):
            del queue[0:2]
    schedule.batches.pop()
    schedule.contexts.pop()
    assert_equal([a is b for a, b in zip(schedule.contexts, expected, strict=True)], [True] * 3, where="then")
    another = Context(index=0, version=3)
    schedule.contexts[0] = another
    assert_equal(schedule.contexts[0] is another, True, where="a context in place of another")
    _assert_steps(schedule, iter([]), job, loop, loop.batches(3), "what was put there by hand")


@requirement(
    "PIPE-704",
    "A context MUST be inserted where the first batch without one stands, or at the end, which means the same; "
    "anywhere else it is refused, and so is a slice that is assigned, with nothing changed.",
)
def test_contexts_inserted(pipeline: Any) -> None:
    job = Job(pipeline, 3)
    schedule = job.schedule("TrainPipelineSparseDist", context_type=Context)
    schedule.enqueue_batch(iter(job.batches(1)))
    schedule.batches.extend([job.there(batch) for batch in job.batches(3, 1)])
    first, mine = schedule.contexts[0], [Context(index=number, version=9) for number in range(1, 4)]
    for where in (0, 2, 3, -1, -4):
        with raises(PipelineError, mentions=("context",), where=f"an insertion at {where}"):
            schedule.contexts.insert(where, mine[0])
    with succeeds("an insertion", where="where the first stands that has none"):
        schedule.contexts.insert(1, mine[0])
    schedule.contexts.insert(4, mine[1])
    schedule.contexts.insert(99, mine[2])
    expected = [first, *mine]
    assert_equal([a is b for a, b in zip(schedule.contexts, expected, strict=True)], [True] * 4, where="contexts")
    batch = job.there(job.batch(9))
    for queue, other in ((schedule.batches, batch), (schedule.contexts, mine[0])):
        with raises(PipelineError, mentions=("one at a time",), where="a slice that is assigned"):
            queue[1:3] = [other, other]
    assert_equal([a is b for a, b in zip(schedule.contexts, expected, strict=True)], [True] * 4, where="then")
    schedule.batches.insert(99, batch)
    assert_equal(schedule.batches[-1] is batch, True, where="a batch behind the last")


@requirement(
    "PIPE-721",
    "A batch that is put in the place of one in flight MUST have its context, which stages are given beside it from "
    "then on.",
)
def test_replaced_batches_keep_contexts(pipeline: Any) -> None:
    job, loop, seen = Job(pipeline, 3), Job(pipeline, 3), list[Any]()

    class Watched(pipeline.TrainPipelineSparseDist):  # type: ignore[misc]
        def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
            seen.append(context)
            super().start_sparse_data_dist(batch, context)

    schedule = Watched(job.model, job.optimizer, job.device, context_type=Context)
    loader = iter(job.batches(2))
    schedule.enqueue_batch(loader)
    schedule.enqueue_batch(loader)
    before, other = list(schedule.contexts), job.batch(9)
    schedule.batches[1] = job.there(other)
    assert_equal([a is b for a, b in zip(schedule.contexts, before, strict=True)], [True] * 2, where="contexts")
    _assert_steps(schedule, iter([]), job, loop, [loop.batch(0), other], "a batch in the place of one in flight")
    assert_equal({any(each is context for context in before) for each in seen}, {True}, where="contexts of stages")


@requirement(
    "PIPE-573",
    "A second call of a driven module in one forward MUST be refused as such, whether or not hooks watch it.",
)
@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_called_twice(pipeline: Any, name: str, is_hooked: bool) -> None:
    job = Job(pipeline, 3)
    if is_hooked:
        job.model.register_forward_pre_hook(lambda *_: None)

    def forward(batch: Batch) -> Any:
        job.model(batch)
        return job.model(batch)

    schedule = job.schedule(name, custom_model_fwd=forward, **_options(name))
    with raises(PipelineError, mentions=("once in a forward", "collections.0")):
        schedule.progress(iter(job.batches(3)))
