"""What it costs to cut many tables among many ranks grows with their parts, and with no product of more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from conformance.harness import assert_equal, assert_le, requirement
from conformance.pipeline.cases import TRAINING
from conformance.pipeline.jobs import Job
from fastimpl.pipeline import route
from twinproof import optimizers
from twinproof.pipeline import sharding, stages


def _lines(work: Callable[[], object]) -> int:
    """Lines of Python that it runs, each turn of a loop among them."""
    count = 0

    def local(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, given: local)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class _Looked(tuple[int, ...]):
    """Features of a cut that count who looks one up among all."""

    looks = 0
    __slots__ = ()

    def index(self, *given: Any) -> int:
        _Looked.looks += 1
        return super().index(*given)

    def __contains__(self, feature: object) -> bool:
        _Looked.looks += 1
        return super().__contains__(feature)


def _layout(pipeline: Any, table_count: int, world_size: int) -> Any:
    tables = [
        pipeline.EmbeddingBagConfig(64, 2, f"t{index}", feature_names=[f"f{index}"]) for index in range(table_count)
    ]
    plan = {table.name: pipeline.row_wise() for table in tables}
    return lambda: sharding.Layout(tables, plan, None, 0, world_size)


@requirement(
    "PIPE-710",
    "To find which part of which table is on which rank MUST cost what grows with the number of parts: twice as many "
    "tables, or ranks, cost twice as much; no feature of a route is looked for among all.",
    needs=("bag_kernels",),
)
def test_many_parts(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = _lines(_layout(pipeline, 16, 16))
    for table_count, world_size in ((32, 16), (16, 32)):
        many = _lines(_layout(pipeline, table_count, world_size))
        assert_le(many, 2 * few, where=f"lines for {table_count} tables on {world_size} ranks, of {few} for 16 on 16")
    own = route.Cut
    monkeypatch.setattr(route, "Cut", lambda key, table, features, rows: own(key, table, _Looked(features), rows))
    _Looked.looks = 0
    made = route.Route(_layout(pipeline, 8, 4)())
    assert_equal(len(made.order), 8 * 4, where="segments that are sent")
    assert_equal(_Looked.looks, 0, where="features that are looked for among all")


@requirement(
    "PIPE-711",
    "A step MUST list what its optimizer trains once for all sharded modules, and not for each.",
)
def test_many_modules(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listings, own = [0], optimizers.trained_params

    def counted(optimizer: Any) -> list[Any]:
        listings[0] += 1
        return own(optimizer)

    monkeypatch.setattr(stages, "trained_params", counted)
    for name in TRAINING:
        job = Job(pipeline, 6, kinds=("data_parallel",))
        assert_le(2, len(job.collections), where="collections")
        schedule, loader = job.schedule(name), iter(job.batches(4))
        schedule.progress(loader)
        listings[0] = 0
        schedule.progress(loader)
        assert_le(listings[0], 1, where=f"{name}: listings in a step of {len(job.collections)} collections")
