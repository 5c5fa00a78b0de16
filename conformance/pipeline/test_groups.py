"""G. Groups that are not all ranks: a job in some of them, and modules of one model in groups of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from conformance.harness import Rank, assert_equal, raises, requirement
from conformance.pipeline.cases import EVALUATION, FUSED, TRAINING, with_bad_id
from conformance.pipeline.jobs import KINDS, Job, assert_same_state, outputs_of
from conformance.pipeline.model import Naive, assert_bits, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    placed,
    random_plan,
    sharded_of,
    train,
)
from twinproof.errors import IdRangeError

SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TrainPipelineSparseDist", {}),
    (FUSED, {"embedding_lookup_before_optimizer": True}),
)


def _part_of(rank: Rank, groups: list[list[int]]) -> Rank:
    """This rank among those of its own group; every rank makes all of them."""
    made = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in groups]
    ranks, group = next((ranks, group) for ranks, group in made if rank.rank in ranks)
    return Rank(sorted(ranks).index(rank.rank), len(ranks), group, rank.implementation, rank.device)


class MixedJob(Job):
    """The job of all ranks, whose second module's tables are cut among some of them."""

    def __init__(self, pipeline: Any, seed: int, rank: Rank, part: Rank) -> None:
        super().__init__(pipeline, seed, rank)
        configs, weights, _, _ = self.tables[1]
        plan = random_plan(pipeline, configs, part.world_size, seed + 1, KINDS[:3])
        cut = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad", part.group)
        self.collections[1] = self.model.collections[1] = cut
        params = [param for name, param in self.model.named_parameters() if "collections.1" not in name]
        self.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.5)


def _output_of(schedule: Any, loader: Any) -> torch.Tensor | None:
    """Of one step, or None where there is none."""
    try:
        output: torch.Tensor = schedule.progress(loader)
    except StopIteration:
        return None
    return output


def _cut(rank: Rank, part: Rank, *, is_first: bool) -> None:
    """Tables cut among this rank's part are the uncut ones of the part's batches; a bad id of one is the part's own."""
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 9)
    plan = random_plan(pipeline, configs, part.world_size, 9, ("table_wise", "column_wise"))
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad", part.group)
    naive = Naive(configs, weights, "adagrad")
    for step in (1, 2):
        batches = batches_of(part, keys, limits, step, uneven=True)
        pooled = train(part, sharded, batches, step, pipeline)
        assert_bits(pooled, expected_step(naive, batches, step, step)[part.rank], f"step {step} pooled")
        assert_shards(sharded, naive, f"step {step}")
        if is_first:
            ids = batches[part.rank].kjt(pipeline)
            with raises(IdRangeError, mentions=(str(10**6),)):
                sharded(placed(pipeline, with_bad_id(pipeline, ids) if part.rank == 1 else ids))


def _apart(rank: Rank, groups: list[list[int]]) -> None:
    pipeline, part, is_first = rank.component("pipeline"), _part_of(rank, groups), rank.rank in groups[0]
    _cut(rank, part, is_first=is_first)
    # The first part ends before the other, which goes on without it.
    count = 2 if is_first else 4
    # Of two gradients the mean is the same whoever takes it.
    loop, job = (Job(pipeline, 7, part, reduces=each) for each in (True, False))
    schedule, loader = job.schedule(FUSED, reduce_dense_gradients=True), iter(job.batches(count))
    for step, batch in enumerate(loop.batches(count)):
        expected = loop.step(batch)
        found = _output_of(schedule, loader)
        assert_equal(found is None, False, where=f"step {step} of {count}: stopped")
        assert found is not None
        assert_bits(found, expected, f"step {step} output")
        assert_same_state(job, loop, f"step {step}")
    assert_equal(len(outputs_of(schedule, loader)), 0, where="batches behind the last")


def _mixed(rank: Rank, groups: list[list[int]]) -> None:
    pipeline, part = rank.component("pipeline"), _part_of(rank, groups)
    for name, options in SCHEDULES:
        loop, job = (MixedJob(pipeline, 7, rank, part) for _ in range(2))
        schedule, loader = job.schedule(name, **options), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            where = f"{name} step {step}"
            assert_bits(schedule.progress(loader), loop.step(batch), f"{where} output")
            assert_same_state(job, loop, where)


@requirement(
    "PIPE-367",
    "Tables cut among some of the ranks MUST be the uncut tables of these ranks' batches, and bad ids their affair; a "
    "schedule of some of the ranks MUST average gradients and stop with its own, whatever the others do, and one of "
    "all ranks MUST drive modules of different groups, with the loop's bits.",
)
def test_groups(rank_pool: Any) -> None:
    rank_pool.run(_apart, 4, [[0, 3], [2, 1]])
    rank_pool.run(_mixed, 3, [[0, 2], [1]])


def _every_schedule(rank: Rank, groups: list[list[int]]) -> None:
    pipeline, part = rank.component("pipeline"), _part_of(rank, groups)
    # The first part ends before the other, which goes on without it.
    count = 1 if rank.rank in groups[0] else 3
    for name in (*TRAINING, *EVALUATION):
        job = Job(pipeline, 7, part)
        found = outputs_of(job.schedule(name), iter(job.batches(count)))
        assert_equal(len(found), count, where=f"steps of {name} on rank {rank.rank}")


@requirement(
    "PIPE-692",
    "A schedule of some of the ranks MUST make as many steps as these have batches, for every class of schedule, those "
    "that evaluate too, whatever the other ranks have.",
)
def test_every_schedule(rank_pool: Any) -> None:
    rank_pool.run(_every_schedule, 2, [[0], [1]])


def _looked_up_again(rank: Rank) -> None:
    # No lookup is exchanged, so that ranks which do not agree are seen to and do not wait for each other.
    pipeline, part = rank.component("pipeline"), _part_of(rank, [[0], [1]])
    for edited in (0, 1):
        job, lookups = Job(pipeline, 4, part, kinds=("table_wise", "row_wise")), list[int]()
        for collection in job.collections:

            def compute(*args: Any, wrapped: Any = collection.compute, lookups: list[int] = lookups) -> Any:
                lookups.append(1)
                return wrapped(*args)

            collection.compute = compute
        schedule = job.schedule(
            FUSED, process_group=rank.group, embedding_lookup_before_optimizer=True, reduce_dense_gradients=True
        )
        loader = iter(job.batches(4))
        schedule.progress(loader)
        if rank.rank == edited:
            for _, weight, _ in job.collections[0].local_shards().values():
                weight.mul_(1.5)
        before = len(lookups)
        schedule.progress(loader)
        # Two modules: of this batch what is outdated, and of the next.
        assert_equal(len(lookups) - before, 4, where=f"lookups of rank {rank.rank}, edited on rank {edited}")


@requirement(
    "PIPE-432",
    "Where one rank's tables were written since a lookup was hoisted, every rank MUST look up again: ranks that do not "
    "agree would wait for each other's exchange.",
    needs=("streams",),
)
def test_looked_up_again(rank_pool: Any) -> None:
    rank_pool.run(_looked_up_again, 2)
