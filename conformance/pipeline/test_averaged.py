"""D. Averages of a model with cut tables, which are no parameters of the model around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import random_jagged, values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import UnsupportedError

ROWS, WIDTH, NAMES = 8, 4, ("a", "b")


class _Model(torch.nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        self.top = torch.nn.Linear(2 * WIDTH, 1)
        torch.nn.init.constant_(self.top.weight, 0.5)

    def forward(self, batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.top(self.tables(batch).values())
        return result


class _Averaged(AveragedModel):
    """As frameworks derive from it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, use_buffers=True)


def _collection(pipeline: Any, weights: Any = None) -> Any:
    configs = [pipeline.EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in NAMES]
    return collection_of(pipeline, configs, weights or [values_of((ROWS, WIDTH), seed) for seed in (1, 2)])


def _model(pipeline: Any, *shardings: Any) -> _Model:
    plan = dict(zip(NAMES, shardings, strict=True))
    return _Model(sharded_of(pipeline, _collection(pipeline), plan, "sgd", device="cpu"))


def _batch(pipeline: Any, seed: int) -> Any:
    return random_jagged(list(NAMES), [ROWS, ROWS], 3, seed).kjt(pipeline)


def _step(pipeline: Any, model: _Model, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    model(_batch(pipeline, seed)).square().sum().backward()
    optimizer.step()


@requirement(
    "PIPE-746",
    "Torch's AveragedModel, and what derives from it, MUST refuse a model with trained cut tables by their names: it "
    "would never average them. Where each table is a parameter, or frozen, it MUST be made.",
)
@pytest.mark.parametrize("kind", [AveragedModel, _Averaged])
def test_averaged_models(pipeline: Any, kind: Any) -> None:
    one, row, column, whole = (
        pipeline.table_wise(0),
        pipeline.row_wise(),
        pipeline.column_wise([0]),
        pipeline.data_parallel(),
    )
    for first, second, names in ((one, row, "['a', 'b']"), (column, whole, "['a']"), (whole, row, "['b']")):
        with raises(UnsupportedError, mentions=(f"got: {names}", "local_weights()", "AveragedModel"), where=names):
            kind(_model(pipeline, first, second))
    # Tables that each rank has whole are the dense optimizer's, and averaged as what it steps.
    model = _model(pipeline, whole, whole)
    with succeeds("an average", where="data-parallel tables"):
        averaged = kind(model)
        averaged.update_parameters(model)
        first = [param.detach().clone() for param in model.parameters()]
        _step(pipeline, model, 1)
        averaged.update_parameters(model)
    mean: Any = get_swa_avg_fn()  # type: ignore[no-untyped-call]
    for before, now, got in zip(first, model.parameters(), averaged.module.parameters(), strict=True):
        assert_bits(got.detach(), mean(before, now.detach(), torch.tensor(1)), "a parameter")
    frozen = _model(pipeline, one, whole)
    frozen.tables.requires_grad_(False)
    with succeeds("an average", where="a frozen table"):
        kind(frozen)
    # A parameter that it lists is told alike.
    dict(frozen.tables.named_parameters())["embedding_bags.a.weight"].requires_grad_(True)
    with raises(UnsupportedError, mentions=("got: ['a']",), where="a table that is trained again"):
        kind(frozen)


@requirement(
    "PIPE-747",
    "A copy of a model whose parameters and ``local_weights()`` are averaged beside it, by torch's own functions, MUST "
    "look up the averaged tables, and leave the original as it is.",
)
def test_averaged_by_hand(pipeline: Any) -> None:
    model = _model(pipeline, pipeline.row_wise(), pipeline.table_wise(0))
    with succeeds("a copy", where="a model"):
        averaged = copy.deepcopy(model)
    average: Any = get_ema_multi_avg_fn(0.75)  # type: ignore[no-untyped-call]
    expected = [weight.clone() for weight in model.tables.local_weights()]
    for step in range(3):
        _step(pipeline, model, step)
        now = model.tables.local_weights()
        before = [weight.clone() for weight in now]
        average([*averaged.parameters(), *averaged.tables.local_weights()], [*model.parameters(), *now], step)
        expected = [torch.lerp(old, new, 0.25) for old, new in zip(expected, before, strict=True)]
        for weight, kept in zip(model.tables.local_weights(), before, strict=True):
            assert_bits(weight, kept, f"the original, step {step}")
    for weight, mean in zip(averaged.tables.local_weights(), expected, strict=True):
        assert_bits(weight, mean, "an averaged table")
    order = list(averaged.tables.local_shards())
    means = [expected[order.index(name)] for name in NAMES]
    batch = _batch(pipeline, 9)
    found, uncut = averaged.tables(batch).values(), _collection(pipeline, means)(batch).values()
    assert_bits(found.detach(), uncut.detach(), "what the averaged model looks up")
    assert_equal(sorted(order), list(NAMES), where="tables")
