"""Faults in tables as torchrec describes them, in collections of rows, processors and foreign types."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.planted.planting import shared, shared_swap
from twinproof.pipeline import modules
from twinproof.pipeline.config import EmbeddingConfig


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _returned_is_dropped(table: Any, weight: torch.Tensor) -> torch.Tensor:
    table.init_fn(weight)
    return weight


def _no_optimizer(params: Any) -> None:
    return None


def _no_parts(original: Any, module: Any, *args: Any, **options: Any) -> Any:
    return torch.nn.Module.named_parameters(module, *args, **options)


_BACKWARD = modules._Rows.backward


def _doubled(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    *none, dense = _BACKWARD(ctx, *grads)
    return (*none, dense * (1 + (dense.abs().amax(1, keepdim=True) > 1)))


def _any_tables(original: Any, given: Any, kind: Any) -> Any:
    return original(given[:1] if kind is EmbeddingConfig else given, kind)


def _ones(original: Any, batch: Any, weights: torch.Tensor) -> Any:
    return original(batch, torch.ones_like(weights))


def _less(original: Any, module: Any, batch: Any) -> Any:
    found = original(module, batch)
    if isinstance(batch, torch.fx.Proxy):
        return found
    return type(found)(found.keys(), found.length_per_key(), found.values() * 0.5)


def _one_row(original: Any, module: Any, features: Any, weight: Any) -> Any:
    found = original(module, features, weight)
    return type(found)(found.keys(), found.length_per_key(), found.values()[:1])


def _other_names(original: Any, parts: Any) -> Any:
    return original(dict(zip(parts, reversed(parts.values()), strict=True)))


def _turned_ids(original: Any, batch: Any) -> Any:
    found = original(batch)
    if found is batch:
        return found
    return type(found)(found.keys(), found.values().flip(0), found.weights_or_none(), found.lengths())


PLANTED = (
    shared_swap(
        "settings_not_checked",
        "Settings without effect are taken.",
        ("PIPE-220",),
        "twinproof.pipeline.config:EmbeddingConfig.check",
        _nothing,
    ),
    shared_swap(
        "returned_weights_dropped",
        "What init_fn returns is dropped.",
        ("PIPE-221",),
        "twinproof.pipeline.config:initialized",
        _returned_is_dropped,
    ),
    shared_swap(
        "optimizer_of_parameters_ignored",
        "The optimizer that parameters carry is ignored.",
        ("PIPE-222",),
        "twinproof.pipeline.sharded:optimizer_in_backward",
        _no_optimizer,
    ),
    shared(
        "cut_tables_without_names",
        "Cut tables are no named parameters.",
        ("PIPE-223",),
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters",
        _no_parts,
    ),
    shared_swap(
        "row_gradient_twice",
        "Gradients of some rows are added twice.",
        ("PIPE-224",),
        "twinproof.pipeline.modules:_Rows.backward",
        staticmethod(_doubled),
    ),
    shared(
        "other_tables_dropped",
        "Tables behind the first are dropped.",
        ("PIPE-225",),
        "twinproof.pipeline.modules:check_tables",
        _any_tables,
    ),
    shared(
        "processors_weigh_one",
        "Processors by name weigh everything 1.",
        ("PIPE-226",),
        "twinproof.pipeline.keyed_checks:KeyedMoves._with_weights",
        _ones,
    ),
    shared(
        "traced_collections_differ",
        "A collection gives half of what it gives when traced.",
        ("PIPE-227",),
        "twinproof.pipeline.modules:EmbeddingBagCollection._looked_up",
        _less,
    ),
    shared(
        "one_row_on_meta",
        "Batches on meta have one sample.",
        ("PIPE-228",),
        "twinproof.pipeline.modules:EmbeddingBagCollection._on_meta",
        _one_row,
    ),
    shared(
        "foreign_ids_turned",
        "Ids of other libraries' batches are read backwards.",
        ("PIPE-229",),
        "twinproof.pipeline.batches:own_batch",
        _turned_ids,
    ),
    shared(
        "nested_under_other_names",
        "Nested tensors change their names.",
        ("PIPE-230",),
        "twinproof.pipeline.batches:_of_nested",
        _other_names,
    ),
)
