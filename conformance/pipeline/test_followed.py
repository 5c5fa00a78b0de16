"""What torch.fx does not see of a forward on the way to its sharded modules.

Branches on what a batch is, and regions of autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import place_of
from conformance.pipeline.cases import FUSED, TRAINING
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of
from twinproof.errors import PipelineError

_ROWS, _DIM = 12, 3


class _Batch:
    """Two sets of weighted bags, of which a forward takes one."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other, self.takes_other = one, other, True

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        """The same on a device."""
        return type(self)(*(part.to(device, non_blocking=non_blocking) for part in (self.one, self.other)))


class _Other(_Batch):
    """One of which the other bags are taken."""


class _Made(_Batch):
    """One whose bags are made anew each time that they are asked for."""

    @property
    def copied(self) -> Any:
        """Equal to the first."""
        kjt = self.one
        return type(kjt)(kjt.keys(), kjt.values().clone(), kjt.weights().clone(), kjt.lengths().clone())


@dataclass(slots=True)
class _Slotted:
    """As the first, without a dictionary of its own."""

    one: Any
    other: Any
    takes_other: bool = True

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        """The same on a device."""
        return _Slotted(self.one.to(device), self.other.to(device))


@torch.fx.wrap
def _chosen(batch: Any) -> Any:
    return batch.other if isinstance(batch, _Other) else batch.one


@torch.fx.wrap
def _drawn(ids: torch.Tensor) -> torch.Tensor:
    return torch.randint_like(ids, 1, _ROWS)


def _by_class(batch: Any) -> Any:
    return batch.other if isinstance(batch, _Other) else batch.one


# What a forward does that calls its tables with the other bags, where torch.fx sees the first, and of which batches.
_UNSEEN: dict[str, tuple[Any, Any]] = {
    "a class": (_Other, _by_class),
    "a flag": (_Batch, lambda batch: batch.other if batch.takes_other is True else batch.one),
    "slots": (_Slotted, lambda batch: batch.other if batch.takes_other is True else batch.one),
    "ids alone": (_Other, lambda batch: (batch.one, _by_class(batch).values())),
    "ids or computed ones": (_Other, lambda b: (b.one, b.other.values() if type(b) is _Other else b.one.values() * 1)),
    "computed ids or some": (_Other, lambda b: (b.one, b.other.values() * 1 if type(b) is _Other else b.one.values())),
    "names": (_Other, lambda batch: (["g", "f"] if isinstance(batch, _Other) else ["f", "g"], batch.one)),
    "a dictionary": (_Other, lambda batch: {"f": batch.one} if isinstance(batch, _Other) else batch.one),
}
# What calls them with the same in both.
_SEEN: dict[str, tuple[Any, Any]] = {
    "another class": (_Batch, _by_class),
    "behind torch.fx.wrap": (_Other, lambda batch: _chosen(batch)),
    "the same ids": (_Other, lambda batch: (batch.one, _by_class(batch).values() * 0)),
    "equal copies": (_Made, lambda batch: batch.copied if type(batch) is _Made else batch.one),
    "drawn ids": (_Batch, lambda batch: (batch.one, _drawn(batch.one.values()))),
}


def _tables_of(pipeline: Any) -> Any:
    config = pipeline.EmbeddingBagConfig(_ROWS, _DIM, "t", feature_names=["f"])
    weight = torch.arange(_ROWS * _DIM, dtype=torch.float32).view(_ROWS, _DIM)
    return pipeline.ShardedEmbeddingBagCollection(
        collection_of(pipeline, [config], [weight], is_weighted=True),
        {"t": pipeline.table_wise(0)},
        optimizer=pipeline.FusedOptimizer("sgd", lr=0.1),
    )


class _Choosing(torch.nn.Module):
    """A table of one feature, and a forward that chooses by ``choose`` what it is called with."""

    def __init__(self, pipeline: Any, choose: Any) -> None:
        super().__init__()
        self.tables = _tables_of(pipeline)
        self.choose, self.kind = choose, pipeline.KeyedJaggedTensor

    def forward(self, batch: Any) -> Any:
        """The squares of its columns, and these."""
        given = self.choose(batch)
        if isinstance(given, tuple):
            first, second = given
            keys, bags, values = (first, second, second.values()) if isinstance(first, list) else (["f"], first, second)
            given = self.kind(keys, values, bags.weights(), bags.lengths())
        columns = self.tables(given).values()
        return columns.square().mean(), columns.detach().clone()


def _bags(pipeline: Any, seed: int, *, has_nan: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(6, generator=generator)
    weights[seed % 6] = float("nan") if has_nan else 0.75
    ids = torch.randint(1, _ROWS, (6,), generator=generator)
    return pipeline.KeyedJaggedTensor(["f"], ids, weights, torch.tensor([4, 2]))


def _batches(pipeline: Any, kind: Any) -> list[Any]:
    return [kind(_bags(pipeline, step), _bags(pipeline, 50 + step)) for step in range(4)]


@requirement(
    "PIPE-769",
    "A forward that calls a sharded module with another part of its batch than torch.fx has seen, behind a branch on "
    "what the batch is, MUST be refused by name before anything is updated; where both are the same, it MUST go on.",
)
@pytest.mark.parametrize("way", [*_UNSEEN, *_SEEN])
@pytest.mark.parametrize("name", TRAINING)
def test_branches_on_batches(pipeline: Any, name: str, way: str) -> None:
    kind, choose = (_UNSEEN | _SEEN)[way]
    device = place_of(pipeline)
    model, loop = (_Choosing(pipeline, choose).to(device) for _ in range(2))
    options = {"embedding_lookup_before_optimizer": True} if name == FUSED else {}
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
    schedule = getattr(pipeline, name)(model, dense, device, **options)
    loader = iter(_batches(pipeline, kind))
    before = model.tables.local_weights()[0].clone()
    for step, batch in enumerate(_batches(pipeline, kind) if way in _SEEN else ()):
        with succeeds("a step", where=f"{name}, {way}, step {step}"):
            output = schedule.progress(loader)
        if name != "TrainPipelineSemiSync" and way != "drawn ids":
            losses, expected = loop(batch.to(device))
            losses.backward()
            assert_bits(output, expected, f"{name}, {way}, step {step}")
    for step in range(2 if way in _UNSEEN else 0):
        with raises(PipelineError, mentions=("torch.fx", "where: tables"), where=f"{name}, {way}, step {step}"):
            schedule.progress(loader)
        assert_bits(model.tables.local_weights()[0], before, f"the table behind {name}, {way}, step {step}")
        assert_equal(schedule.processed_count, 0, where=f"steps of {name}, {way}")


class _Cast(torch.nn.Module):
    """A table whose weights are products, in the regions of autocast that ``way`` names."""

    def __init__(self, pipeline: Any, way: str, device: torch.device) -> None:
        super().__init__()
        self.tables, self.way, self.kind = _tables_of(pipeline), way, pipeline.KeyedJaggedTensor
        self.scale = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        torch.nn.init.constant_(self.scale.weight, 1.2345678)
        self.low = partial(torch.autocast, device.type, torch.bfloat16)
        self.kept = self.low()

    def forward(self, bags: Any) -> Any:
        """The squares of the table's columns, and these."""
        given = bags.weights().unsqueeze(1)
        if self.way == "around all":
            with self.kept:
                return self.looked_up(bags, self.scale(given))
        if self.way == "around functions":
            given = torch.matmul(given, given[:1].t())
            with self.low():
                given = torch.matmul(given, given[:1].t())
            return self.looked_up(bags, torch.matmul(given, given[:1].t()))
        if self.way == "off inside":
            with self.low(), self.low(enabled=False):
                return self.looked_up(bags, self.scale(given))
        if self.way == "on inside":
            with self.low(enabled=False), self.low():
                return self.looked_up(bags, self.scale(given))
        if self.way == "nowhere":
            return self.looked_up(bags, torch.matmul(given, given[:1].t()))
        # By its mode.
        with self.low(enabled=self.training):
            return self.looked_up(bags, torch.matmul(given, given[:1].t()))

    def looked_up(self, bags: Any, weights: Any) -> Any:
        """Of these weights, in any dtype."""
        given = self.kind(["f"], bags.values(), weights.squeeze(1).float(), bags.lengths())
        columns = self.tables(given).values()
        return columns.square().mean(), columns.detach().clone()


@requirement(
    "PIPE-770",
    "What is computed ahead of a forward MUST be computed in the regions of torch.autocast in which the forward "
    "computes it, entered for all of it or for a part, one in another, and by its mode: each step has the loop's bits.",
)
@pytest.mark.parametrize("way", ["around all", "around functions", "off inside", "on inside", "by its mode"])
@pytest.mark.parametrize("name", TRAINING)
def test_regions_of_autocast(pipeline: Any, name: str, way: str) -> None:
    _assert_cast(pipeline, name, way, is_in=lambda step: False)


@requirement(
    "PIPE-771",
    "So MUST it be in the regions that the caller of a batch's own step is in, who may have entered or left some since "
    "the batch was sent.",
)
@pytest.mark.parametrize("way", ["around functions", "around all", "nowhere"])
@pytest.mark.parametrize("name", TRAINING)
def test_regions_of_the_caller(pipeline: Any, name: str, way: str) -> None:
    _assert_cast(pipeline, name, way, is_in=lambda step: step in (2, 3, 6))


def _cast_on_ranks(rank: Rank) -> None:
    for name in (FUSED, "TrainPipelineSparseDist"):
        _assert_cast(rank.component("pipeline"), name, "nowhere", is_in=lambda step: step in (2, 3, 6), rank=rank)


@requirement("PIPE-772", "So MUST it be on several ranks, whose callers enter the same regions for the same steps.")
def test_regions_of_callers_on_ranks(rank_pool: Any) -> None:
    rank_pool.run(_cast_on_ranks, 2)


def _assert_cast(pipeline: Any, name: str, way: str, *, is_in: Callable[[int], bool], rank: Rank | None = None) -> None:
    """A schedule has the bits of the loop, its caller in a region of autocast at some of the steps."""
    device = place_of(pipeline)
    model, loop = (_Cast(pipeline, way, device).to(device) for _ in range(2))
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
    options = {} if name == "TrainPipelineBase" else {"pipeline_postproc": True}
    schedule = getattr(pipeline, name)(model, dense, device, **options)
    batches = [_bags(pipeline, step + (10 * rank.rank if rank else 0), has_nan=False) for step in range(8)]
    loader = iter(batches)
    for step, batch in enumerate(batches):
        for each in (model, loop):
            each.train(way != "by its mode" or step not in (2, 3, 6))
        where = f"{name}, {way}, step {step}"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_in(step)):
            with succeeds("a step", where=where):
                output = schedule.progress(loader)
            losses, expected = loop(batch.to(device))
        if loop.training:
            losses.backward()
        assert_bits(output, expected, where)
        for got, known in zip(model.tables.local_weights(), loop.tables.local_weights(), strict=True):
            assert_bits(got, known, f"the table behind {where}")
