"""F. Dtypes that nobody asked for: weights of a batch in any, and modules that are cast with the model around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.every_module import EVERY, batch_of, cut, looked_up, lookups, whole
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import placed

DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64)


def _trained(pipeline: Any, module: Any, weights: torch.Tensor, where: str) -> torch.Tensor:
    """The result; a loss of it goes back."""
    with succeeds("a step", where=where):
        found = looked_up(pipeline, module, batch_of(3), weights)
        found.backward(values_of(found.shape, 9).to(found.device))  # type: ignore[no-untyped-call]
    return found.detach()


def _weighted(pipeline: Any, make: Callable[[], Any], dtype: torch.dtype, where: str) -> None:
    """A step with weights of the dtype, and one with what they are in float32."""
    given = (4 * values_of((len(batch_of(3).flat()[0]),), 5)).to(dtype)
    other = given.to(torch.float32)
    for each in (given, other):
        each.requires_grad_(dtype.is_floating_point)
    mine, theirs = (placed(pipeline, make()) for _ in range(2))
    found, expected = _trained(pipeline, mine, given, where), _trained(pipeline, theirs, other, where)
    assert_bits(found, expected, f"{where}: pooled")
    if dtype.is_floating_point:
        mine_of, theirs_of = (each.grad for each in (given, other))
        assert_equal((mine_of is None, theirs_of is None), (False, False), where=f"{where}: no gradient of weights")
        if mine_of is not None and theirs_of is not None:
            assert_bits(mine_of, theirs_of.to(dtype), f"{where}: gradient of weights")
    for (name, one), two in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        local = (each.to_local() if hasattr(each, "to_local") else each for each in (one, two))
        assert_equal(*([None if part is None else part.tolist() for part in local]), where=f"{where}: {name}")


@requirement(
    "PIPE-425",
    "Weights of a batch MUST be looked up, of whatever dtype they are, as what they are in float32, and get gradients "
    "of their own dtype, by every collection of bags, cut or not, and by table-batched lookups.",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_weights(pipeline: Any, dtype: torch.dtype) -> None:
    for make in (whole, cut, lookups):
        _weighted(pipeline, lambda make=make: make(pipeline), dtype, f"{make.__name__} {dtype}")  # type: ignore[misc]


def _weighted_on_ranks(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for first in range(len(DTYPES)):
        # Each rank's batch has a dtype of its own; those that want no gradient take part in the others' exchange.
        dtype = DTYPES[(first + rank.rank) % len(DTYPES)]
        make = lambda: cut(pipeline, rank.group, rank.world_size)  # noqa: E731
        _weighted(pipeline, make, dtype, f"rank {rank.rank} {dtype}")


@requirement("PIPE-426", "So MUST they on several ranks, also where the batches of ranks have weights of other dtypes.")
def test_weights_on_ranks(rank_pool: Any) -> None:
    rank_pool.run(_weighted_on_ranks, 2)


@requirement(
    "PIPE-427",
    "A module that is cast to another dtype MUST train as the same numbers in float32: its parameters are of that "
    "dtype, and so are their gradients; tables with an optimizer in the backward, and its states, stay what they were.",
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_cast(pipeline: Any, dtype: torch.dtype) -> None:
    # Thirds, of which sums in another dtype are others.
    weights = values_of((len(batch_of(3).flat()[0]),), 5) / 3
    for make in EVERY:
        where = f"{make.__name__} {dtype}"
        module = placed(pipeline, make(pipeline))
        kept = {name: value.dtype for name, value in module.named_buffers()}
        cast = module.to(dtype)
        wide = copy.deepcopy(cast).to(torch.float32)
        assert_equal({name: value.dtype for name, value in cast.named_buffers()}, kept, where=f"{where}: dtypes kept")
        found, expected = (_trained(pipeline, each, weights, where) for each in (cast, wide))
        assert_bits(found, expected, f"{where}: rows")
        grads = {name: param.grad for name, param in wide.named_parameters() if param.grad is not None}
        for name, param in cast.named_parameters():
            if name in grads:
                assert_equal(param.dtype, dtype, where=f"{where}: dtype of {name}")
                assert_bits(param.grad, grads[name].to(dtype), f"{where}: gradient of {name}")
        for (name, one), two in zip(cast.named_buffers(), wide.buffers(), strict=True):
            assert_bits(one, two, f"{where}: {name} after a step")
