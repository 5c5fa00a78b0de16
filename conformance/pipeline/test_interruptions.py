"""C, D. Interruptions and modes: whatever stops a step, what was updated is whole, and what was pulled is known."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_le, raises, requirement, succeeds
from conformance.pipeline.cases import EXACT, FUSED, WITHOUT_PREFETCH, Breaking, Context, LoaderError, with_bad_id
from conformance.pipeline.jobs import Batch, Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, DistributedError, PipelineError


@requirement(
    "PIPE-033",
    "What the loader raises, an interrupt too, MUST come out of progress() unchanged, with every update whole; the "
    "next calls MUST go on without a batch lost or seen twice.",
)
def test_loader_error(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        for at in range(5):
            for error in (LoaderError("here"), KeyboardInterrupt()):
                job, loop = Job(pipeline, 3), Job(pipeline, 3)
                schedule = job.schedule(name)
                loader, found, errors = Breaking(job.batches(5), {at}, error), [], []
                while True:
                    try:
                        found.append(schedule.progress(loader))
                    except StopIteration:
                        break
                    except (LoaderError, KeyboardInterrupt) as caught:
                        errors.append(caught)
                        done = Job(pipeline, 3)
                        for batch in done.batches(5)[: len(found)]:
                            done.step(batch)
                        assert_same_state(job, done, f"{name} error at {at}")
                assert_equal(errors, [error], where=f"{name} errors at {at}")
                expected = [loop.step(batch) for batch in loop.batches(5)]
                assert_equal(len(found), 5, where=f"{name} outputs, error at {at}")
                for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                    assert_bits(got, wanted, f"{name} output {number}, error at {at}")


def _outputs_around_an_error(rank: Rank, schedule: Any, loader: Any, where: str) -> list[torch.Tensor]:
    """All outputs of a loader of fewer than eight batches, of which one stops each rank: rank 1 by its own error."""
    found, errors = list[torch.Tensor](), list[str]()
    for _ in range(8):
        try:
            found.append(schedule.progress(loader))
        except StopIteration:
            break
        except (LoaderError, DistributedError) as error:
            errors.append(type(error).__name__)
    assert_equal(errors, ["LoaderError" if rank.rank == 1 else "DistributedError"], where=f"{where} errors")
    return found


def _error_on_one_rank(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    schedule = job.schedule(name)
    at = {2} if rank.rank == 1 else set[int]()
    found = _outputs_around_an_error(rank, schedule, Breaking(job.batches(5), at, LoaderError("here")), name)
    expected = [loop.step(batch) for batch in loop.batches(5)]
    assert_equal(len(found), 5, where=f"{name} outputs")
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_bits(got, wanted, f"{name} output {number}")


@requirement(
    "PIPE-126",
    "What one rank's loader raises MUST stop every rank before the same step, by name, and all MUST be able to go on.",
)
def test_error_on_one_rank(rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        rank_pool.run(_error_on_one_rank, 2, name)


class Unmovable(Batch):
    """A batch that no device takes."""

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """As where there is no memory left."""
        raise LoaderError("no memory")


def _unmovable_on_one_rank(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    schedule, given, expected = job.schedule(name), job.batches(6), loop.batches(6)
    if rank.rank == 1:
        given[2] = Unmovable(given[2].dense, given[2].ids, given[2].target)
        del expected[2]
    found = _outputs_around_an_error(rank, schedule, iter(given), name)
    assert_equal(len(found), 5, where=f"{name} outputs")
    for number, (got, batch) in enumerate(zip(found, expected, strict=False)):
        assert_bits(got, loop.step(batch), f"{name} output {number}")


@requirement(
    "PIPE-461",
    "What the copy of one rank's batch raises MUST stop every rank before anything is exchanged, by name, and all MUST "
    "be able to go on: that rank with its next batch, the others with the one they hold.",
)
def test_unmovable_on_one_rank(rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        rank_pool.run(_unmovable_on_one_rank, 2, name)


def _uneven(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 5, rank), Job(pipeline, 5, rank)
    schedule = job.schedule(name)
    count = (3, 6, 4)[rank.rank]
    batches = job.batches(8)
    loader = iter(batches[:count])
    found = outputs_of(schedule, loader)
    assert_equal(len(found), 3, where=f"{name} outputs: all stop with the first rank")
    assert_equal(schedule.processed_count, 3, where="processed")
    # What was pulled is held: the next iterator goes on behind it.
    held = schedule.pulled_count - 3
    found += outputs_of(schedule, iter(batches[3 + held : 8]))
    expected = [loop.step(batch) for batch in loop.batches(8)]
    assert_equal(len(found), 8, where=f"{name} outputs of all")
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_bits(got, wanted, f"{name} output {number}")


@requirement(
    "PIPE-127",
    "Ranks with different numbers of batches MUST stop together, at the first that has none, holding what they pulled.",
)
def test_uneven(rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        rank_pool.run(_uneven, 3, name)


@requirement(
    "PIPE-030",
    "None in place of a batch MUST be refused by name and not counted; the batches around it are all processed.",
)
def test_none(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        job, loop = Job(pipeline, 6), Job(pipeline, 6)
        schedule, found, refusals = job.schedule(name), [], 0
        batches = job.batches(4)
        loader = iter([*batches[:2], None, *batches[2:]])
        while True:
            try:
                found.append(schedule.progress(loader))
            except StopIteration:
                break
            except ConfigError as error:
                assert_equal("None" in str(error), True, where="the refusal")
                refusals += 1
        counts = (refusals, len(found), schedule.pulled_count, schedule.processed_count)
        assert_equal(counts, (1, 4, 4, 4), where=f"{name} refusals, outputs, batches pulled and processed")
        for number, (got, batch) in enumerate(zip(found, loop.batches(4), strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number}")


@requirement(
    "PIPE-035",
    "An exception in forward, or a bad id, MUST come out at that batch's own step, leave no half-done exchange, and "
    "the next batch MUST be processed as if the failed one had not been there.",
)
def test_step_errors(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        for place in ("forward", "bad id"):
            job, loop = Job(pipeline, 7), Job(pipeline, 7)
            batches = job.batches(5)
            schedule = job.schedule(
                name, custom_model_fwd=_failing(job.model, batches[2] if place == "forward" else None)
            )
            if place == "bad id":
                batches[2].ids[1] = with_bad_id(pipeline, batches[2].ids[1])
            loader, found, outcomes = iter(batches), [], []
            for _ in range(5):
                try:
                    found.append(schedule.progress(loader))
                    outcomes.append("done")
                except Exception as error:
                    outcomes.append(type(error).__name__)
            wrong = "IdRangeError" if place == "bad id" else "LoaderError"
            assert_equal(outcomes, ["done", "done", wrong, "done", "done"], where=f"{name} {place}")
            expected = [loop.step(batch) for number, batch in enumerate(loop.batches(5)) if number != 2]
            for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                assert_bits(got, wanted, f"{name} {place} output {number}")
            assert_same_state(job, loop, f"{name} {place}")
            assert_equal((schedule.pulled_count, schedule.processed_count), (5, 4), where="counts")


@requirement(
    "PIPE-037",
    "An exception in the backward before the tables' update MUST leave all as it was, and one in the dense optimizer "
    "the tables updated and the dense part not; the next batch MUST go on from there.",
)
def test_late_errors(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        for place in ("backward", "optimizer"):
            job, loop = Job(pipeline, 13), Job(pipeline, 13)
            schedule, loader, failing = job.schedule(name), iter(job.batches(5)), [False]

            def fail(*args: Any, failing: list[bool] = failing) -> None:
                if failing[0]:
                    raise LoaderError("late")

            if place == "optimizer":
                job.optimizer.register_step_pre_hook(fail)
            else:
                job.model.top.weight.register_hook(fail)  # type: ignore[no-untyped-call]
            for number, batch in enumerate(loop.batches(5)):
                failing[0] = number == 2
                if number != 2:
                    assert_bits(schedule.progress(loader), loop.step(batch), f"{name} {place} output {number}")
                    continue
                with raises(LoaderError):
                    schedule.progress(loader)
                if place == "optimizer":
                    loop.optimizer.zero_grad()
                    loop.model(loop.there(batch))[0].sum().backward()
                assert_same_state(job, loop, f"{name} {place}")


class Interrupted(Batch):
    """A batch whose copy is interrupted."""

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """As by the user."""
        raise KeyboardInterrupt


@requirement(
    "PIPE-459",
    "An interrupt in the copy of a batch or in the forward MUST cost that batch alone, as any error there: the next "
    "calls go on behind it, with the loop's bits.",
)
def test_interrupts(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        for place in ("copy", "forward"):
            job, loop = Job(pipeline, 7), Job(pipeline, 7)
            given = job.batches(5)
            forward = _failing(job.model, given[2] if place == "forward" else None, KeyboardInterrupt())
            schedule, found, errors = job.schedule(name, custom_model_fwd=forward), list[Any](), list[str]()
            if place == "copy":
                given[2] = Interrupted(given[2].dense, given[2].ids, given[2].target)
            loader = iter(given)
            for _ in range(5):
                try:
                    found.append(schedule.progress(loader))
                except (Exception, KeyboardInterrupt) as error:
                    errors.append(type(error).__name__)
            assert_equal((errors, len(found)), (["KeyboardInterrupt"], 4), where=f"{name} {place}: errors and outputs")
            expected = [batch for number, batch in enumerate(loop.batches(5)) if number != 2]
            for number, (got, batch) in enumerate(zip(found, expected, strict=True)):
                assert_bits(got, loop.step(batch), f"{name} {place} output {number}")
            assert_same_state(job, loop, f"{name} {place}")


class _Interrupt:
    """Interrupts the first call, from here on, of one function of the driver; ``names`` are those that were called."""

    def __init__(self, name: str) -> None:
        self.name, self.names = name, dict[str, None]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__") == "twinproof.pipeline.driver":
            name = f"{frame.f_code.co_name}, line {frame.f_code.co_firstlineno}"
            if name == self.name and name not in self.names:
                self.names[name] = None
                raise KeyboardInterrupt
            self.names[name] = None


@requirement(
    "PIPE-677",
    "Behind an interrupt at a step's first call of any function of the driver a schedule MUST go on, step by step, to "
    "the loader's end, and see no batch twice.",
)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.night) if each == EXACT[0] else each for each in WITHOUT_PREFETCH]
)
def test_interrupted_calls(pipeline: Any, name: str) -> None:
    waiting, known = [""], {""}
    while waiting:
        struck = waiting.pop()
        job, forwarded = Job(pipeline, 7), list[float]()

        def forward(batch: Any, job: Job = job, forwarded: list[float] = forwarded) -> Any:
            forwarded.append(float(batch.dense.double().sum()))
            return job.model(batch)

        schedule = job.schedule(name, custom_model_fwd=forward)
        loader, interrupt = iter(job.batches(5)), _Interrupt(struck)
        schedule.progress(loader)
        sys.setprofile(interrupt)
        try:
            schedule.progress(loader)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        waiting += [each for each in interrupt.names if each not in known]
        known.update(interrupt.names)
        where = f"{name}, an interrupt of {struck}"
        with succeeds("the steps behind it", where=where):
            count = len(outputs_of(schedule, loader))
        # One batch may be lost with the step, and one that was on its way.
        assert_le(2, count, where=f"{where}: steps behind it")
        assert_equal(len(forwarded), len(set(forwarded)), where=f"{where}: batches seen")


def _failing(model: Any, batch: Any, error: BaseException | None = None) -> Any:
    def forward(given: Any) -> Any:
        if batch is not None and torch.equal(given.target.cpu(), batch.target):
            raise error or LoaderError("in forward")
        return model(given)

    return forward


def _failed_on_ranks(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 8, rank), Job(pipeline, 8, rank)
    batches = job.batches(6)
    schedule = job.schedule(name, custom_model_fwd=_failing(job.model, batches[1]))
    loader = iter(batches)
    schedule.progress(loader)
    with raises(LoaderError):
        schedule.progress(loader)
    with raises(PipelineError, mentions=("reset",)):
        schedule.progress(loader)
    schedule.reset()
    rest = outputs_of(schedule, iter(job.batches(3, 20)))
    expected = [loop.step(batch) for batch in [loop.batches(1)[0], *loop.batches(3, 20)]][1:]
    for number, (got, wanted) in enumerate(zip(rest, expected, strict=True)):
        assert_bits(got, wanted, f"{name} output {number} after reset")


@requirement(
    "PIPE-039",
    "After a failed step ranks MUST refuse to go on until reset(), which leaves no exchange behind: what follows is as "
    "from a fresh pipeline.",
)
def test_failed_on_ranks(rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        rank_pool.run(_failed_on_ranks, 2, name)


def _reset_with_held(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    job, seen = Job(pipeline, 7, rank), list[torch.Tensor]()

    def forward(batch: Any) -> Any:
        seen.append(batch.dense)
        return job.model(batch)

    schedule = job.schedule("TrainPipelineSparseDist", custom_model_fwd=forward)
    outputs_of(schedule, iter(job.batches(4 if rank.rank == 0 else 2)))
    schedule.reset()
    seen.clear()
    outputs_of(schedule, iter(job.batches(2, 20)))
    assert_equal(len(seen), 2, where="steps after reset()")
    for number, batch in enumerate(job.batches(2, 20)):
        assert_bits(seen[number], batch.dense, f"the batch of step {number} after reset()")


@requirement(
    "PIPE-417",
    "reset() MUST forget what a rank holds because another rank had no batch: what follows is the new loader's first.",
)
def test_held_is_forgotten(rank_pool: Any) -> None:
    rank_pool.run(_reset_with_held, 2)


class Refusing(Context):
    """A context that cannot be made the first time that it is asked for the third batch."""

    refusals: ClassVar[list[int]] = []

    def __init__(self, *, index: int, version: int) -> None:
        super().__init__(index=index, version=version)
        if index == 2 and self.refusals:
            raise LoaderError(f"context {self.refusals.pop()}")


def _contexts_refused(pipeline: Any, rank: Rank | None) -> None:
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    refuses, errors = rank is None or rank.rank == 1, list[str]()
    Refusing.refusals[:] = [2] if refuses else []
    schedule = job.schedule("TrainPipelineSparseDist", context_type=Refusing)
    loader, found = iter(job.batches(5)), list[torch.Tensor]()
    for _ in range(8):
        try:
            found.append(schedule.progress(loader))
        except StopIteration:
            break
        except (LoaderError, DistributedError) as error:
            errors.append(type(error).__name__)
    assert_equal(errors, ["LoaderError" if refuses else "DistributedError"], where="errors")
    assert_equal((len(found), schedule.pulled_count, schedule.processed_count), (5, 5, 5), where="outputs and counts")
    for number, (got, batch) in enumerate(zip(found, loop.batches(5), strict=True)):
        assert_bits(got, loop.step(batch), f"output {number}")
    assert_same_state(job, loop, "behind all")


@requirement(
    "PIPE-700",
    "Where a batch's context cannot be made, the batch MUST be held and come with the next call, whose context can be: "
    "none is lost, and the steps are the loop's.",
)
def test_contexts_refused(pipeline: Any) -> None:
    _contexts_refused(pipeline, None)


def _contexts_refused_on_one_rank(rank: Rank) -> None:
    _contexts_refused(rank.component("pipeline"), rank)


@requirement(
    "PIPE-701",
    "A context that one rank cannot make MUST stop every rank before anything is exchanged, by name, with all batches "
    "held; and all MUST be able to go on.",
)
def test_contexts_refused_on_one_rank(rank_pool: Any) -> None:
    rank_pool.run(_contexts_refused_on_one_rank, 2)


def _interrupted_on_one_rank(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    schedule, is_struck = job.schedule(name, enqueue_batch_after_forward=True), rank.rank == 1
    loader = Breaking(job.batches(5), {3} if is_struck else set[int](), KeyboardInterrupt())
    outcomes, batches = list[str](), iter(loop.batches(5))
    while schedule.processed_count < 5:
        counted, output = schedule.processed_count, None
        try:
            output = schedule.progress(loader)
        except (KeyboardInterrupt, DistributedError, StopIteration) as error:
            outcomes.append(type(error).__name__)
        if schedule.processed_count > counted:
            expected = loop.step(next(batches))
            if output is not None:
                outcomes.append("done")
                assert_bits(output, expected, f"{name} step {counted}")
        assert_same_state(job, loop, f"{name} call {len(outcomes)}")
    struck = ["done", "KeyboardInterrupt", "done", "done", "done"]
    others = ["done", "done", "DistributedError", "done", "done", "done"]
    assert_equal(outcomes, struck if is_struck else others, where=f"{name}: outcomes")


@requirement(
    "PIPE-720",
    "An interrupt in one rank's loader, read behind the forward, MUST come out at the end of its call, and as "
    "DistributedError of the others' next call, before which nothing is exchanged: all go on with the loop's bits.",
)
def test_interrupts_behind_on_one_rank(rank_pool: Any) -> None:
    for name in ("TrainPipelineSparseDist", FUSED):
        rank_pool.run(_interrupted_on_one_rank, 2, name)


@requirement(
    "PIPE-702",
    "An interrupt or an exit in a loader that is read behind the forward MUST come out at the end of that very call, "
    "with the step whole and counted; the next calls go on without a batch lost.",
)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_behind_the_forward(pipeline: Any, kind: type[BaseException]) -> None:
    for name in ("TrainPipelineSparseDist", FUSED):
        job, loop = Job(pipeline, 5), Job(pipeline, 5)
        schedule = job.schedule(name, enqueue_batch_after_forward=True)
        loader, outcomes = Breaking(job.batches(6), {3}, kind()), list[str]()
        for number, batch in enumerate(loop.batches(6)):
            expected, output = loop.step(batch), None
            try:
                output = schedule.progress(loader)
            except (KeyboardInterrupt, SystemExit) as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("done")
                assert_bits(output, expected, f"{name} step {number}")
            assert_same_state(job, loop, f"{name} step {number}")
            assert_equal(schedule.processed_count, number + 1, where=f"{name}: steps counted")
        assert_equal(outcomes, ["done", kind.__name__, *["done"] * 4], where=f"{name}: outcomes")
