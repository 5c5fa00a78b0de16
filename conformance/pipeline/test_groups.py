"""G. Groups that are not all ranks: a job in some of them, and modules of one model in groups of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from conformance.harness import Rank, assert_equal, requirement
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import KINDS, Job, assert_same_state, outputs_of
from conformance.pipeline.model import Naive, assert_bits, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    random_plan,
    sharded_of,
    train,
)

SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TrainPipelineSparseDist", {}),
    (FUSED, {"embedding_lookup_before_optimizer": True}),
)


def _part_of(rank: Rank, groups: list[list[int]]) -> Rank:
    """This rank among those of its own group; every rank makes all of them."""
    made = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in groups]
    ranks, group = next((ranks, group) for ranks, group in made if rank.rank in ranks)
    return Rank(sorted(ranks).index(rank.rank), len(ranks), group, rank.implementation)


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


def _cut(rank: Rank, part: Rank) -> None:
    """Tables cut among this rank's part are the uncut ones of the part's batches."""
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


def _apart(rank: Rank, groups: list[list[int]]) -> None:
    pipeline, part = rank.component("pipeline"), _part_of(rank, groups)
    _cut(rank, part)
    # The first part ends before the other, which goes on without it.
    count = 2 if rank.rank in groups[0] else 4
    loop, job = Job(pipeline, 7, part), Job(pipeline, 7, part)
    found = outputs_of(job.schedule("TrainPipelineSparseDist"), iter(job.batches(count)))
    assert_equal(len(found), count, where=f"batches of the part of {part.world_size}")
    for number, (output, batch) in enumerate(zip(found, loop.batches(count), strict=True)):
        assert_bits(output, loop.step(batch), f"output {number}")
    assert_same_state(job, loop, "in the end")


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
    "Tables cut among some of the ranks MUST be the uncut tables of these ranks' batches; a schedule of some of the "
    "ranks MUST stop with its own, whatever the others do, and one of all MUST drive modules of different groups, with "
    "the loop's bits.",
)
def test_groups(rank_pool: Any) -> None:
    rank_pool.run(_apart, 4, [[0, 3], [2, 1]])
    rank_pool.run(_mixed, 3, [[0, 2], [1]])
