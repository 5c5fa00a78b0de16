"""Faults in batches, pooled rows, gradients, steps and collections."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import swap
from conformance.pipeline.planted.planting import exported, fast, lookups, shared, shared_swap
from twinproof.pipeline.jagged import Bags, offsets_of

LOOKUPS = "TableBatchedEmbeddingBags"


def _unweighted(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    result: torch.Tensor = original(engine, tables, features, Bags(bags.indices, bags.offsets))
    return result


def _in_half(original: Any, *given: Any) -> torch.Tensor:
    pooled: torch.Tensor = original(*given)
    return pooled.to(torch.bfloat16).to(torch.float32)


def _half_of(bags: Bags, grad: torch.Tensor, count: int, part: slice) -> tuple[Bags, torch.Tensor]:
    """Some samples of a batch."""
    features = [bags.feature(f, count) for f in range(count)]
    ids, lengths, weights = [], [], []
    for feature in features:
        ends = feature.offsets.tolist()
        samples = range(len(ends) - 1)[part]
        ids += [feature.indices[ends[s] : ends[s + 1]] for s in samples]
        lengths += [ends[s + 1] - ends[s] for s in samples]
        if feature.weights is not None:
            weights += [feature.weights[ends[s] : ends[s + 1]] for s in samples]
    joined = torch.cat(weights) if weights else bags.weights
    empty = bags.indices[:0]
    order = torch.arange(grad.shape[0])[list(range(grad.shape[0])[part])]
    return Bags(torch.cat([empty, *ids]), offsets_of(torch.tensor(lengths, dtype=torch.int64)), joined), grad[order]


def _twice(original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any) -> None:
    half = grad.shape[0] // 2
    for part in (slice(0, half), slice(half, None)):
        original(engine, tables, features, *_half_of(bags, grad, len(features), part), *rest)


def _backwards(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    if bags.indices.numel() < 10_000:
        original(engine, tables, features, bags, grad, *rest)
        return
    turned, columns = _half_of(bags, grad, len(features), slice(None, None, -1))
    original(engine, tables, features, turned, columns.contiguous(), *rest)


def _undivided(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """A mean's gradient that was not divided: multiplied by what it will be divided by."""
    at, count, grads = 0, len(features), grad.clone()
    for feature, table in enumerate(features):
        width = tables[table].weight.shape[1]
        if tables[table].is_mean:
            grads[:, at : at + width] *= bags.feature(feature, count).lengths()
        at += width
    original(engine, tables, features, bags, grads, *rest)


def _last_feature_lost(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    grads = grad.clone()
    if len(features) > len(tables):
        grads[:, -1:] = 0
    original(engine, tables, features, bags, grads, *rest)


def _decayed(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    original(engine, tables, features, bags, grad, *rest)
    for table in tables:
        for state in table.states.values():
            named = torch.zeros(state.shape[0], dtype=torch.bool)
            named[bags.indices.long().clamp(0, state.shape[0] - 1)] = True
            state[~named] *= 0.9


def _counted_early(original: Any, module: Any, bags: Bags) -> torch.Tensor:
    module.fused_optimizer.step_count += 1
    result: torch.Tensor = original(module, bags)
    return result


def _rate_seen(original: Any, module: Any, bags: Bags) -> torch.Tensor:
    module._seen = module.fused_optimizer.param_groups[0]["lr"]
    result: torch.Tensor = original(module, bags)
    return result


def _rate_kept(original: Any, module: Any, bags: Bags, grad: torch.Tensor) -> None:
    group = module.fused_optimizer.param_groups[0]
    now, group["lr"] = group["lr"], module._seen
    original(module, bags, grad)
    group["lr"] = now


def _skipped_when_empty(original: Any, module: Any, bags: Bags, grad: torch.Tensor) -> None:
    if bags.indices.numel():
        original(module, bags, grad)


def _last_row(original: Any, engine: Any, bags: Bags, row_counts: Any) -> torch.Tensor:
    mended: torch.Tensor = original(engine, bags, row_counts)
    return torch.where(mended == bags.indices, mended, min(row_counts) - 1)


def _mended_in_place(original: Any, engine: Any, bags: Bags, row_counts: Any) -> torch.Tensor:
    return bags.indices.copy_(original(engine, bags, row_counts))


class _Silent:
    def warning(self, *args: Any) -> None:
        """Nothing."""


def _gradients_undivided(original: Any, *given: Any) -> torch.Tensor:
    found: torch.Tensor = original(*given)
    return found * 1.5


def _step_first(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    grad, module = grads[0].contiguous(), ctx.module
    module._step(ctx.bags, grad)
    return None, module._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[1] else None, None, None


def _always(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    grad, module = grads[0].contiguous(), ctx.module
    weights = module._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[1] else None
    module._step(Bags(ctx.bags.indices, ctx.bags.offsets), grad)
    return None, weights, None, None


def _strides_ignored(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    packed = torch.as_strided(bags.indices, bags.indices.shape, (1,)).clamp(0, 5)
    result: torch.Tensor = original(engine, tables, features, Bags(packed, bags.offsets, bags.weights))
    return result


def _tail_lost(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    pooled: torch.Tensor = original(engine, tables, features, bags)
    at = 0
    for table in features:
        width = tables[table].weight.shape[1]
        pooled[:, at + width // 4 * 4 : at + width] = 0
        at += width
    return pooled


def _cached(original: Any, module: Any, bags: Bags) -> torch.Tensor:
    seen = module.__dict__.setdefault("_cache", {})
    for index in range(len(module.tables)):
        seen.setdefault(index, module.weight(index).clone())
    kept = [module.weight(index).clone() for index in range(len(module.tables))]
    for index, weight in seen.items():
        module.weight(index).copy_(weight)
    result: torch.Tensor = original(module, bags)
    for index, weight in enumerate(kept):
        module.weight(index).copy_(weight)
    return result


def _large_eps(original: Any, config: Any, lr: float, step: int) -> Any:
    from dataclasses import replace

    hyper = original(config, lr, step)
    return replace(hyper, eps=hyper.eps + 1e-3)


def _one_step_late(original: Any, config: Any, lr: float, step: int) -> Any:
    return original(config, lr, step + 1)


def _accepted(*args: Any, **options: Any) -> None:
    return None


def _rounded_sum(original: Any, engine: Any, tables: Any, *rest: Any) -> None:
    before = [{name: state.clone() for name, state in table.states.items()} for table in tables]
    original(engine, tables, *rest)
    for table, states in zip(tables, before, strict=True):
        for name, old in states.items():
            state = table.states[name]
            state.copy_(old + (state - old) * 0.5)


def _step_forgotten(original: Any, optimizer: Any) -> dict[str, Any]:
    return {**original(optimizer), "step_count": 0}


def _never() -> bool:
    return False


PLANTED = (
    shared(
        "copies_count_from_zero",
        "A copy of lookups counts steps from 0 again.",
        ("PIPE-117",),
        "twinproof.pipeline.lookups:InBackwardOptimizer.__getstate__",
        _step_forgotten,
    ),
    fast(
        "lookups_are_traced",
        "A compiler looks into lookups, and makes a graph of each step and length.",
        ("PIPE-116",),
        swap("torch.compiler:is_compiling", _never),
    ),
    lookups("per_sample_weights_ignored", "Pooled rows ignore weights.", ("PIPE-012",), "pool", _unweighted),
    lookups("pooled_in_half_precision", "Pooled rows pass through bfloat16.", ("PIPE-012",), "pool", _in_half),
    lookups(
        "duplicates_not_reduced_first",
        "A row that two halves of a batch name is updated twice.",
        ("PIPE-010",),
        "update",
        _twice,
    ),
    lookups(
        "mean_gradient_not_divided",
        "A mean's gradient is not divided.",
        ("PIPE-010",),
        "update",
        _undivided,
    ),
    lookups(
        "shared_feature_gradient_lost",
        "The last feature of a shared table loses gradients.",
        ("PIPE-110",),
        "update",
        _last_feature_lost,
    ),
    lookups("untouched_states_decay", "Rows without ids lose state.", ("PIPE-011",), "update", _decayed),
    lookups(
        "heavy_rows_summed_backwards",
        "Rows named very often are summed in another order.",
        ("PIPE-017",),
        "update",
        _backwards,
    ),
    exported(
        "step_counted_at_lookup",
        "The step is counted by the lookup, evaluation and repeats included (FBGEMM).",
        ("PIPE-018", "PIPE-020"),
        (f"{LOOKUPS}._pool", _counted_early),
    ),
    exported(
        "learning_rate_of_the_lookup",
        "The learning rate is read by the lookup (FBGEMM).",
        ("PIPE-019",),
        (f"{LOOKUPS}._pool", _rate_seen),
        (f"{LOOKUPS}._step", _rate_kept),
    ),
    exported(
        "empty_step_not_counted",
        "A batch without ids is no step.",
        ("PIPE-064",),
        (f"{LOOKUPS}._step", _skipped_when_empty),
    ),
    lookups("bad_id_is_last_row", "A bad id reads the last row.", ("PIPE-040",), "mended", _last_row),
    lookups(
        "bad_id_mended_in_place",
        "Ids of the caller are changed.",
        ("PIPE-040",),
        "mended",
        _mended_in_place,
    ),
    shared_swap(
        "bad_id_not_logged", "Warning says nothing.", ("PIPE-040",), "twinproof.pipeline.lookups:logger", _Silent()
    ),
    lookups(
        "weight_gradient_scaled",
        "The weights' gradient is scaled.",
        ("PIPE-013",),
        "weight_gradients",
        _gradients_undivided,
    ),
    shared_swap(
        "weight_gradient_after_step",
        "The weights' gradient reads rows that the step has changed.",
        ("PIPE-013",),
        "twinproof.pipeline.lookups:_Lookup.backward",
        staticmethod(_step_first),
    ),
    shared_swap(
        "weights_ignored_backward",
        "Gradients of rows ignore weights.",
        ("PIPE-010",),
        "twinproof.pipeline.lookups:_Lookup.backward",
        staticmethod(_always),
    ),
    lookups(
        "strides_of_ids_ignored",
        "Ids are read as if contiguous.",
        ("PIPE-068",),
        "pool",
        _strides_ignored,
    ),
    lookups(
        "columns_beyond_four_lost",
        "Dims that 4 does not divide lose columns.",
        ("PIPE-015",),
        "pool",
        _tail_lost,
    ),
    exported(
        "lookups_cached", "Lookups read the tables of the first one.", ("PIPE-061",), (f"{LOOKUPS}._pool", _cached)
    ),
    shared(
        "eps_too_large", "Eps is another.", ("PIPE-014",), "twinproof.pipeline.config:FusedOptimizer.hyper", _large_eps
    ),
    shared(
        "bias_correction_one_late",
        "Adam's step counts from 2.",
        ("PIPE-014", "PIPE-020"),
        "twinproof.pipeline.config:FusedOptimizer.hyper",
        _one_step_late,
    ),
    shared_swap(
        "bag_offsets_not_checked",
        "Offsets that do not cut the ids are taken.",
        ("PIPE-104",),
        "twinproof.pipeline.lookups:TableBatchedEmbeddingBags._check_offsets",
        _accepted,
    ),
    lookups(
        "row_state_of_whole_table",
        "A row's mean is over more columns than its block has.",
        ("PIPE-079",),
        "update",
        _rounded_sum,
    ),
)
