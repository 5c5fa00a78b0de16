"""Faults that ``test_places`` must notice."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch

from conformance.harness import fault, patched, swap
from conformance.pipeline.planted.planting import lookups
from twinproof.pipeline.jagged import Bags

_SHARDED = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"


@fault(kills="PIPE-320", at=f"{_SHARDED}._apply")
def tables_stay_behind(original: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
    """Only what torch has registered is sent to another device; cut tables are not."""
    return torch.nn.Module._apply(module, fn, recurse)  # type: ignore[no-untyped-call]


@fault(kills=("PIPE-320", "PIPE-427"), at="twinproof.pipeline.modules:TableBatchedEmbeddingBags._apply")
def tables_take_the_dtype(original: Any, lookups: Any, fn: Any, recurse: bool = True) -> Any:
    """Tables and states change their dtype with the parameters."""
    return torch.nn.Module._apply(lookups, fn, recurse)  # type: ignore[no-untyped-call]


def _number(values: torch.Tensor, number: int) -> int:
    return number


divided_by_a_number = patched(
    "Gradients are divided by a number of the host, of which CUDA takes the reciprocal.",
    swap("refimpl.pipeline:divisor_on", _number),
    swap("fastimpl.pipeline.columns:divisor_on", _number),
    kills="PIPE-542",
)

copies_divided_by_a_number = patched(
    "The gradients of tables that every rank has are.",
    swap("twinproof.pipeline.sharded:divisor_on", _number),
    kills="PIPE-542",
)


@fault(kills="PIPE-321", at=f"{_SHARDED}.input_dist")
def anchors_on_the_host(original: Any, module: Any, ctx: Any, features: Any) -> Any:
    """What leads autograd to exchanges of gradients is made on the host, whatever the device."""
    found = original(module, ctx, features)
    ctx.device = torch.device("cpu")
    return found


@fault(kills=("PIPE-321", "PIPE-323"), at="fastimpl.pipeline.route:Route.on")
def routes_on_the_host(original: Any, route: Any, device: torch.device) -> Any:
    """The order of segments and the rows of blocks lie on the host."""
    placed = original(route, device)
    blocks = {key: rows.cpu() for key, rows in placed.block_rows.items()}
    return replace(placed, order=placed.order.cpu(), block_rows=blocks)


@fault(kills="PIPE-321", at="refimpl.pipeline:_bag_of_each")
def numbers_of_bags_on_the_host(original: Any, bags: Any) -> torch.Tensor:
    """The bag of each id is numbered on the host."""
    found: torch.Tensor = original(bags).cpu()
    return found


@fault(kills="PIPE-322", at="fastimpl.pipeline.input_dist:InputDist._sizes")
def failure_told_from_the_host(original: Any, exchange: Any) -> torch.Tensor:
    """A rank that failed sends words of host memory, where the others' are on the device."""
    found: torch.Tensor = original(exchange)
    return found if exchange._segments is not None else found.cpu()


@fault(kills="PIPE-323", at="fastimpl.pipeline.input_dist:InputDist._sizes")
def sizes_sent_from_the_host(original: Any, exchange: Any) -> torch.Tensor:
    """The sizes of blocks are put together on the host, and copied to the device in every step."""
    found: torch.Tensor = original(exchange)
    return torch.tensor(found.tolist(), dtype=found.dtype, device=found.device)


@fault(kills=("PIPE-324", "PIPE-325"), at=lookups("pool"))
def offsets_on_the_host(original: Any, engine: Any, tables: Any, features: Any, bags: Any) -> Any:
    """Lookups read their offsets from host memory."""
    return original(engine, tables, features, Bags(bags.indices, bags.offsets.cpu(), bags.weights))


@fault(kills="PIPE-325", at=lookups("update"))
def states_on_the_host(original: Any, engine: Any, tables: Any, *rest: Any) -> None:
    """States are copied to the host for a step, and back behind it."""
    held = [table._replace(states={name: state.cpu() for name, state in table.states.items()}) for table in tables]
    original(engine, held, *rest)
    for table, moved in zip(tables, held, strict=True):
        for name, state in table.states.items():
            state.copy_(moved.states[name])


@fault(
    kills=("PIPE-326", "PIPE-327"), at=("refimpl.pipeline:AtOnce.copy", "fastimpl.pipeline.stages:StreamedStages.copy")
)
def batches_stay_on_the_host(original: Any, stages: Any, batch: Any) -> Any:
    """Batches are looked up where the loader made them."""
    device, stages._device = stages._device, torch.device("cpu")
    try:
        return original(stages, batch)
    finally:
        stages._device = device


@fault(kills="PIPE-330", at="fastimpl.pipeline:fuse_input_dists")
def sizes_read_one_by_one(original: Any, dists: Any) -> None:
    """Each module's sizes are copied to the host alone, and waited for alone."""
    original(dists)
    for each in dists:
        each.together = (weakref.ref(each),)


@fault(kills="PIPE-329", at="twinproof.pipeline.modules:StoreRows.read")
def ids_copied_to_the_store(original: Any, rows: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ids of a device are copied to a store of the host without a word, and its rows back."""
    found: torch.Tensor = original(rows, ids.cpu()).to(ids.device)
    return found


@fault(kills="PIPE-328", at="twinproof.pipeline.sharded:copy_into")
def loads_into_a_copy(original: Any, target: Any, value: Any) -> None:
    """Parts on a device are loaded into a copy on the host, which is dropped."""
    local = target.to_local()
    if local is None or local.device.type == "cpu":
        original(target, value)
