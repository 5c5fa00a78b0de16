"""Faults that ``test_bags`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.pipeline.planted.planting import exported, lookups
from twinproof.pipeline.jagged import Bags, offsets_of


@fault(kills="PIPE-117", at="twinproof.pipeline.config:InBackwardOptimizer.__getstate__")
def copies_count_from_zero(original: Any, optimizer: Any) -> dict[str, Any]:
    """A copy of lookups counts steps from 0 again."""
    state: dict[str, Any] = original(optimizer)
    return {**state, "param_groups": [{**group, "step_count": 0} for group in state["param_groups"]]}


step_not_saved = patched(
    "A module's state dict has no step of its optimizer.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags._save_to_state_dict",
        "[self.fused_optimizer.step_count]",
        "[0]",
    ),
    kills="PIPE-446",
)


@fault(kills="PIPE-446", at="twinproof.pipeline.config:InBackwardOptimizer.load_state_dict")
def handle_counts_from_zero(original: Any, optimizer: Any, state: Any) -> None:
    """The optimizer's handle is loaded without its step."""
    original(optimizer, state)
    optimizer.step_count = 0


@fault(kills="PIPE-012", at=lookups("pool"))
def per_sample_weights_ignored(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    """Pooled rows ignore weights."""
    result: torch.Tensor = original(engine, tables, features, Bags(bags.indices, bags.offsets))
    return result


@fault(kills="PIPE-012", at=lookups("pool"))
def pooled_in_half_precision(original: Any, *given: Any) -> torch.Tensor:
    """Pooled rows pass through bfloat16."""
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


@fault(kills="PIPE-010", at=lookups("update"))
def duplicates_not_reduced_first(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """A row that two halves of a batch name is updated twice."""
    half = grad.shape[0] // 2
    for part in (slice(0, half), slice(half, None)):
        original(engine, tables, features, *_half_of(bags, grad, len(features), part), *rest)


@fault(kills="PIPE-010", at=lookups("update"))
def mean_gradient_not_divided(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """A mean's gradient is not divided."""
    # Multiplied by what it will be divided by.
    at, count, grads = 0, len(features), grad.clone()
    for feature, table in enumerate(features):
        width = tables[table].weight.shape[1]
        if tables[table].is_mean:
            grads[:, at : at + width] *= bags.feature(feature, count).lengths()
        at += width
    original(engine, tables, features, bags, grads, *rest)


@fault(kills="PIPE-385", at=lookups("update"))
def elements_divided_one_by_one(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, optimizer: str, hyper: Any
) -> None:
    """Row-wise Adagrad divides each element of (lr * g), as Adagrad does: an ulp from FBGEMM in one of ten elements."""
    before, ids = tables[0].weight.clone(), bags.indices.long()
    original(engine, tables, features, bags, grad, optimizer, hyper)
    is_plain = len(features) == 1 and torch.unique(ids).numel() == grad.shape[0] == ids.numel()
    if optimizer == "rowwise_adagrad" and is_plain:
        divisor = tables[0].states["momentum1"][ids].reshape(-1, 1).double().sqrt().float() + hyper.eps
        tables[0].weight[ids] = before[ids] - (hyper.lr * grad) / divisor


@fault(kills="PIPE-011", at=lookups("update"))
def untouched_states_decay(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """Rows without ids lose state."""
    original(engine, tables, features, bags, grad, *rest)
    for table in tables:
        for state in table.states.values():
            named = torch.zeros(state.shape[0], dtype=torch.bool)
            named[bags.indices.long().clamp(0, state.shape[0] - 1)] = True
            state[~named] *= 0.9


@fault(kills="PIPE-017", at=lookups("update"))
def heavy_rows_summed_backwards(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """Rows named very often are summed in another order."""
    if bags.indices.numel() < 10_000:
        original(engine, tables, features, bags, grad, *rest)
        return
    turned, columns = _half_of(bags, grad, len(features), slice(None, None, -1))
    original(engine, tables, features, turned, columns.contiguous(), *rest)


@fault(kills=("PIPE-018", "PIPE-020"), at="TableBatchedEmbeddingBags._pool")
def step_counted_at_lookup(original: Any, module: Any, bags: Bags) -> torch.Tensor:
    """The step is counted by the lookup, evaluation and repeats included (FBGEMM)."""
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


learning_rate_of_the_lookup = patched(
    "The learning rate is read by the lookup (FBGEMM).",
    wrap(exported("TableBatchedEmbeddingBags._pool"), _rate_seen),
    wrap(exported("TableBatchedEmbeddingBags._step"), _rate_kept),
    kills="PIPE-019",
)


@fault(kills="PIPE-013", at=lookups("weight_gradients"))
def weight_gradient_scaled(original: Any, *given: Any) -> torch.Tensor:
    """The weights' gradient is scaled."""
    found: torch.Tensor = original(*given)
    return found * 1.5


@fault(kills="PIPE-013", at="twinproof.pipeline.modules:_Lookup.backward")
def weight_gradient_after_step(original: Any, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """The weights' gradient reads rows that the step has changed."""
    grad, module = grads[0].contiguous(), ctx.module
    module._step(ctx.bags, grad)
    return None, module._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[1] else None, None, None


@fault(kills="PIPE-010", at="twinproof.pipeline.modules:_Lookup.backward")
def weights_ignored_backward(original: Any, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of rows ignore weights."""
    grad, module = grads[0].contiguous(), ctx.module
    weights = module._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[1] else None
    module._step(Bags(ctx.bags.indices, ctx.bags.offsets), grad)
    return None, weights, None, None


@fault(kills="PIPE-015", at=lookups("pool"))
def columns_beyond_four_lost(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    """Dims that 4 does not divide lose columns."""
    pooled: torch.Tensor = original(engine, tables, features, bags)
    at = 0
    for table in features:
        width = tables[table].weight.shape[1]
        pooled[:, at + width // 4 * 4 : at + width] = 0
        at += width
    return pooled


@fault(kills="PIPE-014", at="twinproof.pipeline.config:FusedOptimizer.hyper")
def eps_too_large(original: Any, config: Any, lr: float, step: int) -> Any:
    """Eps is another."""
    hyper = original(config, lr, step)
    return dataclasses.replace(hyper, eps=hyper.eps + 1e-3)


@fault(kills=("PIPE-014", "PIPE-020"), at="twinproof.pipeline.config:FusedOptimizer.hyper")
def bias_correction_one_late(original: Any, config: Any, lr: float, step: int) -> Any:
    """Adam's step counts from 2."""
    return original(config, lr, step + 1)


def _unwatched(function: str) -> Any:
    return mutated(f"twinproof.pipeline.modules:{function}.backward", "_check_watched(ctx)", "pass")


written_ids_stepped = patched(
    "A lookup steps the rows of the ids that stand there at its backward.", _unwatched("_Lookup"), kills="PIPE-363"
)
written_ids_given_gradients = patched(
    "A pooling gives gradients to the rows of the ids that stand there at its backward.",
    _unwatched("Pooled"),
    kills="PIPE-363",
)
rows_stepped_twice = patched(
    "A second backward of rows, of which nobody knew, adds gradients.", _unwatched("_Rows"), kills="PIPE-363"
)

tables_not_watched = patched(
    "The gradient of weights is made of rows that came after the lookup.",
    mutated("twinproof.pipeline.modules:Pooled.forward", "rows if watches and ctx.needs_input_grad[4] else ()", "()"),
    kills="PIPE-687",
)
tables_always_watched = patched(
    "A table must not be written to before the backward, though no gradient is made of it.",
    mutated(
        "twinproof.pipeline.modules:Pooled.forward",
        "rows if watches and ctx.needs_input_grad[4] else ()",
        "rows if watches else ()",
    ),
    kills="PIPE-687",
)
one_table_watched = patched(
    "Of several tables the first alone is watched.",
    mutated("twinproof.pipeline.modules:Pooled.forward", "rows if watches", "rows[:1] if watches"),
    kills="PIPE-687",
)
rates_as_they_come = patched(
    "A learning rate that is no number is Python's error.",
    mutated(
        "twinproof.pipeline.config:InBackwardOptimizer._hyper",
        'check_number(group["lr"], "lr")',
        'float(group["lr"])',
    ),
    kills="PIPE-688",
)
refused_backwards_counted = patched(
    "A backward that is refused counts as a step.",
    mutated("twinproof.pipeline.config:InBackwardOptimizer.count_step", "self._hyper(self.step_count + 1)", ""),
    kills="PIPE-688",
)
