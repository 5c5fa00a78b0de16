"""Refusals and options of the batch types, tables and schedules that stand beside others of their kind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import random_jagged, values_of
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError, MissingKeyError, PipelineError, ShapeError


@requirement(
    "PIPE-560",
    "Bounds of first weights that are no numbers, not finite or the wrong way round MUST be refused by the table's "
    "name; equal ones are a constant.",
)
def test_bounds(pipeline: Any) -> None:
    wrong: tuple[tuple[Any, Any], ...] = (
        (1.0, 0.0),
        (-math.inf, 0.0),
        (0.0, math.inf),
        (math.nan, 1.0),
        (0.0, math.nan),
    )
    for kind in (pipeline.EmbeddingBagConfig, pipeline.EmbeddingConfig):
        make = pipeline.EmbeddingBagCollection if "Bag" in kind.__name__ else pipeline.EmbeddingCollection
        for low, high in (*wrong, ("0", 1.0), (0.0, [1.0])):
            with raises(ConfigError, mentions=("table",), where=f"{kind.__name__}: {low!r} to {high!r}"):
                make(tables=[kind(9, 4, "table", feature_names=["f"], weight_init_min=low, weight_init_max=high)])
        table = kind(9, 4, "table", feature_names=["f"], weight_init_min=0.5, weight_init_max=0.5)
        (weight,) = make(tables=[table]).parameters()
        assert_bits(weight.detach().cpu(), torch.full((9, 4), 0.5), f"{kind.__name__}: a constant")


@requirement(
    "PIPE-561",
    "Lengths of bags that are no whole numbers from 1 on MUST be refused by a processor of one feature and of several.",
)
def test_lengths_of_bags(pipeline: Any) -> None:
    for length in (0, -1, 1.5, True, "3", None):
        with raises(ConfigError, mentions=("max_feature_lengths",), where=f"{length!r}"):
            pipeline.PositionWeightedModule(length)
        with raises(ConfigError, mentions=("max_feature_lengths",), where=f"{length!r} among others"):
            pipeline.PositionWeightedModuleCollection({"a": 3, "b": length})
    with succeeds("processors", where="bags of one id"):
        found = pipeline.PositionWeightedModule(1), *pipeline.PositionWeightedModuleCollection({"a": 1}).parameters()
    assert_equal((tuple(found[0].position_weight.shape), tuple(found[1].shape)), ((1,), (1,)), where="bags of one id")


@requirement(
    "PIPE-562",
    "A batch that lacks features of processed tables MUST be refused with all that are missing, whichever they are.",
)
@pytest.mark.parametrize("missing", [["alpha"], ["omega"], ["alpha", "omega"]])
def test_missing_features(pipeline: Any, missing: list[str]) -> None:
    configs = [pipeline.EmbeddingBagConfig(9, 4, f"t{name}", feature_names=[name]) for name in ("alpha", "omega")]
    collection = collection_of(pipeline, configs, [values_of((9, 4), 1)] * 2, is_weighted=True)
    processors = {name: pipeline.PositionWeightedModule(4) for name in ("alpha", "omega")}
    module = pipeline.FeatureProcessedEmbeddingBagCollection(collection, torch.nn.ModuleDict(processors))
    kept = [name for name in ("alpha", "c", "omega") if name not in missing]
    batch = random_jagged(kept, [9] * len(kept), 3, 2).kjt(pipeline)
    with raises(MissingKeyError, mentions=missing):
        module(batch)


@requirement(
    "PIPE-563",
    "A report MUST be refused of a program too short for its margins, and of a margin below 0, with how many steps it "
    "takes.",
    needs=("streams",),
)
def test_short_programs(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import overlap_report
    from fastimpl.pipeline.recording import HostClock, Recorder
    from twinproof.engine import InlineEngine

    recorder = Recorder(InlineEngine(), HostClock())
    for _ in range(4):
        with recorder.step():
            torch.ones(2).add_(1)
    report = partial(overlap_report, recorder.program(), schedule="mine", device="none")
    for margin_count, needed in ((2, 6), (3, 8)):
        with raises(ConfigError, mentions=("too few steps", "4", str(needed), "mine"), where=f"margin {margin_count}"):
            report(margin_count=margin_count)
    with raises(ConfigError, mentions=("margin_count",)):
        report(margin_count=-1)
    for margin_count in (0, 1):
        with succeeds("a report", where=f"margin {margin_count}"):
            report(margin_count=margin_count)


def _load_of_others(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    tables = [pipeline.EmbeddingBagConfig(8, 4, "t", feature_names=["f"])]
    weights = [values_of((8, 4), 1)]
    made = partial(sharded_of, pipeline, collection_of(pipeline, tables, weights))
    by_rows, by_columns = (
        made(plan, "sgd") for plan in ({"t": pipeline.row_wise()}, {"t": pipeline.column_wise([0, 1])})
    )
    (before,) = (weight.clone() for _, weight, _ in by_rows.local_shards().values())
    with raises(ShapeError, mentions=("another place",), where="columns for rows"):
        by_rows.load_state_dict(by_columns.state_dict())
    for _, weight, _ in by_rows.local_shards().values():
        assert_bits(weight, before, "a part that was refused another's place")
    again = made({"t": pipeline.row_wise()}, "adagrad")
    for _, weight, _ in again.local_shards().values():
        weight.zero_()
    again.load_state_dict(by_rows.state_dict())
    for _, weight, _ in again.local_shards().values():
        assert_bits(weight, before, "a part at its own place")


@requirement(
    "PIPE-564",
    "A part of a table that lies at another place, of a plan that cuts otherwise, MUST be refused, and nothing be "
    "written; one at the same place is loaded.",
)
def test_parts_of_other_plans(pipeline: Any, rank_pool: Any) -> None:
    rank_pool.run(_load_of_others, 2)


@requirement(
    "PIPE-565",
    "A stage that is given the context of no batch in flight MUST refuse it by name and change nothing: the steps that "
    "follow are the loop's.",
)
@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", FUSED])
def test_foreign_contexts(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule, loader, batches = job.schedule(name), iter(job.batches(4)), loop.batches(4)
    assert_bits(schedule.progress(loader), loop.step(batches[0]), "step 0")
    for stage in ("start_sparse_data_dist", "wait_sparse_data_dist", "start_embedding_lookup"):
        if hasattr(schedule, stage):
            arguments = () if stage.startswith("wait") else (schedule.batches[0],)
            with raises(PipelineError, mentions=("context", "stage"), where=stage):
                getattr(schedule, stage)(*arguments, object())
    for step, batch in enumerate(batches[1:], 1):
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
        assert_same_state(job, loop, f"step {step}")
    assert_equal(len(schedule.batches), 0, where="batches in flight")
