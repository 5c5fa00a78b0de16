"""A, B. Schedules: the loop's bits after every step, in order, whatever overlaps; fill, drain and what is held."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, raises, requirement
from conformance.pipeline.cases import EVAL_FUSED, EXACT, FUSED, VARIANTS, Variants
from conformance.pipeline.jobs import Job, assert_same_state, outputs_of
from conformance.pipeline.model import OPTIMIZERS, assert_bits
from twinproof.errors import ConfigError


def _equal(pipeline: Any, rank: Rank | None, seeds: range, variants: Variants, device: str) -> None:
    for seed in seeds:
        optimizer, dropout = OPTIMIZERS[seed % len(OPTIMIZERS)], 0.3 * (seed % 2)
        for name, options in variants:
            kinds: dict[str, Any] = {"optimizer": optimizer, "dropout": dropout, "device": device}
            loop, job = (Job(pipeline, seed, rank, **kinds) for _ in range(2))
            schedule, loader = job.schedule(name, **options), iter(job.batches(5))
            for step, batch in enumerate(loop.batches(5)):
                torch.manual_seed(step)
                expected = loop.step(batch)
                torch.manual_seed(step)
                where = f"{name} {options} seed {seed} step {step}"
                assert_bits(schedule.progress(loader), expected, f"{where} output")
                assert_same_state(job, loop, where)
            with raises(StopIteration):
                schedule.progress(loader)


@requirement(
    "PIPE-120",
    "Base, SparseDist, FusedSparseDist with every placement of the lookup, and SemiSync before its start MUST give the "
    "loop's outputs, tables, optimizer states, dense parameters and dropout, bit for bit after every step.",
)
def test_equal_alone(pipeline: Any, device: str) -> None:
    _equal(pipeline, None, range(len(OPTIMIZERS)), VARIANTS, device)


def _equal_on_ranks(rank: Rank, seeds: range) -> None:
    # A third of the schedules each: four sizes of the group see them all, and some twice.
    _equal(rank.component("pipeline"), rank, seeds, VARIANTS[(rank.world_size - 1) % 3 :: 3], rank.device)


@requirement("PIPE-121", "The same MUST hold on 1 to 4 ranks, for plans that mix every kind of sharding.")
def test_equal_on_ranks(rank_pool: Any, device: str) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_equal_on_ranks, world_size, range(world_size + 1, world_size + 2))


class Asked(Iterator[Any]):
    """Batches; counts how often it was asked."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self.count = iter(batches), 0

    def __next__(self) -> Any:
        self.count += 1
        return next(self._batches)


@requirement(
    "PIPE-122",
    "n batches MUST give n outputs in order, n = 0, 1, 2, 3, 4, 10; an empty loader changes nothing; StopIteration "
    "comes again and again, and a loader that has ended is not asked again while batches are in flight.",
)
def test_counts(pipeline: Any) -> None:
    for name in (*EXACT, "EvalPipelineSparseDist", "EvalPipelineFusedSparseDist"):
        for count in (0, 1, 2, 3, 4, 10):
            job, loop = Job(pipeline, 3), Job(pipeline, 3)
            schedule, batches = job.schedule(name), Asked(job.batches(count))
            if name.startswith("Eval"):
                loop.model.eval()
            expected = [loop.step(batch) for batch in loop.batches(count)]
            found = outputs_of(schedule, batches)
            assert_equal(len(found), count, where=f"{name} outputs of {count}")
            assert_equal(batches.count, count + 1, where=f"{name} how often the loader was asked")
            for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                assert_bits(got, wanted, f"{name} output {number} of {count}")
            for _ in range(3):
                with raises(StopIteration):
                    schedule.progress(batches)
            assert_equal(batches.count, count + 4, where=f"{name} how often, behind the end")
            assert_equal((schedule.pulled_count, schedule.processed_count), (count, count), where="counts")
            assert_same_state(job, loop, f"{name} after {count}")


@requirement(
    "PIPE-123",
    "At most one batch beyond the current one MUST be pulled by Base, two by SparseDist and Fused, three by SemiSync; "
    "the counts of pulled and processed batches MUST say so.",
)
def test_pulled_ahead(pipeline: Any) -> None:
    ahead = dict(zip((*EXACT, "TrainPipelineSemiSync"), (1, 2, 2, 3), strict=True))
    for name, limit in ahead.items():
        job = Job(pipeline, 4)
        schedule, loader = job.schedule(name), iter(job.batches(9))
        for step in range(1, 10):
            schedule.progress(loader)
            expected = (min(9, step + limit), step)
            assert_equal((schedule.pulled_count, schedule.processed_count), expected, where=f"{name} after {step}")


@requirement(
    "PIPE-124",
    "Another iterator MUST go on where the last one ended, after what is still held; epochs are then one long loader.",
)
def test_epochs(pipeline: Any) -> None:
    for name in (*EXACT, "TrainPipelineSemiSync"):
        job, loop = Job(pipeline, 5), Job(pipeline, 5)
        schedule, found = job.schedule(name), []
        for first, count in ((0, 3), (3, 0), (3, 1), (4, 4)):
            found += outputs_of(schedule, iter(job.batches(count, first)))
        assert_equal(len(found), 8, where=f"{name} outputs of four iterators")
        for number, (got, batch) in enumerate(zip(found, loop.batches(8), strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number}")
        # An iterator that is left in the middle: what was pulled from it is processed first.
        left, taken = iter(job.batches(6, 8)), iter(job.batches(3, 20))
        first = schedule.progress(left)
        pulled = schedule.pulled_count - 8
        rest = outputs_of(schedule, taken)
        expected = [*loop.batches(pulled, 8), *loop.batches(3, 20)]
        for number, (got, batch) in enumerate(zip([first, *rest], expected, strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number} over two iterators")


@requirement(
    "PIPE-026",
    "execute_all_batches=False MUST stop when the loader ends and hold what is in flight: two batches of SparseDist "
    "and Fused, one of Base; the next iterator processes them first.",
)
def test_not_all(pipeline: Any) -> None:
    for name, left in zip(EXACT, (1, 2, 2), strict=True):
        job, loop = Job(pipeline, 6), Job(pipeline, 6)
        schedule = job.schedule(name, execute_all_batches=False)
        found = outputs_of(schedule, iter(job.batches(6)))
        assert_equal(len(found), 6 - left, where=f"{name} outputs")
        found += outputs_of(schedule, iter(job.batches(4, 6)))
        for number, (got, batch) in enumerate(zip(found, loop.batches(10 - left), strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number}")


@requirement("PIPE-130", "From its start SemiSync MUST be the loop whose tables are one update stale, bit for bit.")
def test_semi_sync(pipeline: Any) -> None:
    import refimpl.pipeline as reference

    _equal_to_stale((pipeline, reference), (0, 2, 5), stash=False)


@requirement(
    "PIPE-136",
    "With stash_gradients SemiSync MUST step the dense part with the gradients of the step before, from its start on; "
    "the first such step has none and does not step.",
)
def test_stashed(pipeline: Any) -> None:
    import refimpl.pipeline as reference

    _equal_to_stale((pipeline, reference), (0, 2), stash=True)


@requirement(
    "PIPE-508",
    "With stash_gradients a parameter that a group of the optimizer lists twice MUST have the gradient of the step "
    "before in every step, as one that is listed once.",
)
def test_stashed_twice(pipeline: Any) -> None:
    found, zero = list[Any](), torch.zeros(0)
    for is_twice in (False, True):
        job, seen = Job(pipeline, 7, kinds=("table_wise", "row_wise")), list[Any]()
        params = list(job.model.parameters())
        with warnings.catch_warnings():
            # Torch warns of it, and will refuse it some day.
            warnings.simplefilter("ignore")
            job.optimizer = torch.optim.SGD(params + params[:1] * is_twice, lr=0.0)
        # No gradient at all is none of 0.
        job.optimizer.register_step_pre_hook(
            lambda *_, params=params, seen=seen: seen.append(
                [zero if p.grad is None else p.grad.clone() for p in params]
            )
        )
        outputs_of(job.schedule("TrainPipelineSemiSync", start_batch=0, stash_gradients=True), iter(job.batches(4)))
        found.append(seen)
    assert_equal([len(steps) for steps in found], [3, 3], where="steps")
    for step, (expected, mine) in enumerate(zip(*found, strict=True)):
        for index, (grad, other) in enumerate(zip(mine, expected, strict=True)):
            assert_bits(grad, other, f"gradient {index} of step {step}")


def _is_refused(job: Job, name: str) -> bool:
    """Whether strict refuses the job's optimizer, by the names of both modules."""
    try:
        job.schedule(name, strict=True)
    except ConfigError as error:
        return "collections.0" in str(error) and "collections.1" in str(error)
    return False


@requirement(
    "PIPE-137",
    "SemiSync and Fused with strict MUST refuse an optimizer that updates what a lookup reads, in whichever of its "
    "groups, by the names of the modules; without it, and where nothing is updated, they MUST run.",
)
def test_strict(pipeline: Any) -> None:
    for seed in (6, 7):
        for kinds, processed in ((("data_parallel",), False), (("table_wise",), True)):
            job = Job(pipeline, seed, kinds=kinds, processed=processed)
            # An evaluation updates nothing.
            for name, expected in (("TrainPipelineSemiSync", True), (FUSED, True), (EVAL_FUSED, False)):
                assert_equal(_is_refused(job, name), expected, where=f"{name} seed {seed} {kinds}: refused")
            outputs_of(job.schedule("TrainPipelineSemiSync", start_batch=1), iter(job.batches(3)))
            job.optimizer = None  # type: ignore[assignment]
            outputs_of(job.schedule(EVAL_FUSED, strict=True), iter(job.batches(2)))
        Job(pipeline, seed, kinds=("table_wise",)).schedule("TrainPipelineSemiSync", strict=True)


def _equal_to_stale(packages: tuple[Any, ...], starts: tuple[int, ...], *, stash: bool) -> None:
    for start in starts:
        jobs = [Job(package, 7, kinds=("table_wise", "row_wise")) for package in packages]
        options = {"start_batch": start, "stash_gradients": stash}
        schedules = [job.schedule("TrainPipelineSemiSync", **options) for job in jobs]
        loaders = [iter(job.batches(6)) for job in jobs]
        stale = StaleLoop(Job(packages[0], 7, kinds=("table_wise", "row_wise")), start, stash=stash)
        for step in range(6):
            expected = stale.step(step)
            for package, schedule, loader in zip(("under test", "reference"), schedules, loaders, strict=True):
                assert_bits(schedule.progress(loader), expected, f"start {start} step {step} {package}")
            assert_same_state(jobs[0], stale.job, f"start {start} step {step}")


class StaleLoop:
    """SemiSync by hand, with the modules' three steps: batch n + 1 is looked up before update n."""

    def __init__(self, job: Job, start: int, *, stash: bool) -> None:
        self.job, self.start, self.ready, self.stash = job, start, None, stash
        self.stashed: list[Any] | None = None

    def _look_up(self, number: int) -> Any:
        batch = self.job.there(self.job.batches(6)[number])
        return batch, [
            collection(ids).values() for collection, ids in zip(self.job.model.collections, batch.ids, strict=True)
        ]

    def step(self, number: int) -> torch.Tensor:
        """One step; the output."""
        job = self.job
        batch, pooled = self.ready or self._look_up(number)
        job.optimizer.zero_grad()
        leaves = [each.detach().requires_grad_() for each in pooled]
        dense = torch.tanh(job.model.bottom(batch.dense))
        predictions = job.model.top(torch.cat([dense, *leaves], dim=1))[:, 0]
        loss = (predictions - batch.target).square().mean()
        self.ready = self._look_up(number + 1) if number >= self.start and number < 5 else None
        loss.backward()
        for each, leaf in zip(pooled, leaves, strict=True):
            each.backward(leaf.grad)
        if not self.stash or number < self.start:
            job.optimizer.step()
        else:
            params = list(job.model.parameters())
            before, self.stashed = self.stashed, [param.grad for param in params]
            for param, grad in zip(params, before or (), strict=before is not None):
                param.grad = grad
            if before is not None:
                job.optimizer.step()
        found: torch.Tensor = predictions.detach()
        return found


@requirement("PIPE-125", "Placements of the lookup that contradict, and unknown streams, MUST be refused by name.")
def test_placements(pipeline: Any) -> None:
    job = Job(pipeline, 8)
    for options in (
        {"emb_lookup_stream": "other"},
        {"embedding_lookup_before_optimizer": True, "embedding_lookup_after_data_dist": True},
        {"embedding_lookup_before_optimizer": True, "embedding_lookup_after_opt": True},
    ):
        with raises(ConfigError):
            job.schedule(FUSED, **options)


@requirement(
    "PIPE-129",
    "What the dense optimizer updates and a lookup reads, feature processors and data-parallel tables, MUST be looked "
    "up behind the optimizer, under every placement of the lookup: never stale.",
)
def test_late_lookups(pipeline: Any) -> None:
    for name, options in VARIANTS[:-1]:
        for processed, kinds in ((True, ("table_wise", "column_wise")), (False, ("data_parallel", "table_wise"))):
            loop, job = (Job(pipeline, 9, kinds=kinds, processed=processed) for _ in range(2))
            schedule, loader = job.schedule(name, **options), iter(job.batches(5))
            for step, batch in enumerate(loop.batches(5)):
                where = f"{name} {options} processed {processed} step {step}"
                assert_bits(schedule.progress(loader), loop.step(batch), where)
                assert_same_state(job, loop, where)
