"""Faults that ``test_training`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap, wrap
from conformance.kvstore.planted.planting import engines
from refimpl import optimizers as formulas
from twinproof.errors import ShapeError
from twinproof.optimizers import OPTIMIZERS


@fault(kills="KV-077", at="KVStore.state_dict")
def state_dict_of_live_rows(original: Any, store: Any, **options: Any) -> Any:
    """Weight and state are read at different moments (DeepRec-AI/DeepRec#1023)."""
    return original(store, **(options | {"snapshot": False}))


@fault(kills="KV-094", at="twinproof.kvstore.modules:KVEmbeddingBag._ends")
def offsets_not_checked(original: Any, module: Any, input: Any, offsets: Any) -> torch.Tensor:
    """Offsets that do not cut the ids are taken."""
    try:
        ends: torch.Tensor = original(module, input, offsets)
    except ShapeError:
        return torch.tensor([0, input.numel()])
    return ends


@fault(kills=("KV-092", "KV-093"), at=engines("update"))
def duplicate_gradients_overwrite(
    original: Any, store: Any, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Any, now: int
) -> None:
    """Of duplicate gradients the last one counts."""
    last = {key: position for position, key in enumerate(ids.tolist())}
    kept = grads.clone()
    for position, key in enumerate(ids.tolist()):
        if last[key] != position:
            kept[position] = 0
    original(store, table, ids, kept, hyper, now)


@fault(kills="KV-076", at=engines("update"))
def bias_correction_of_step_one(
    original: Any, store: Any, table: str, ids: Any, grads: Any, hyper: Any, now: int
) -> None:
    """Adam corrects every step like the first."""
    original(store, table, ids, grads, dataclasses.replace(hyper, step=1), now)


@fault(kills="KV-092", at="refimpl.optimizers:row_sum")
def row_sum_left_to_right(original: Any, values: torch.Tensor) -> torch.Tensor:
    """The elements of a row are summed from left to right."""
    total = torch.zeros(values.shape[0], 1, dtype=values.dtype)
    for element in range(values.shape[1]):
        total = total + values[:, element : element + 1]
    return total


@fault(kills="KV-093", at="twinproof.kvstore.modules:KVEmbeddingBag.forward")
def mean_is_a_sum(original: Any, module: Any, input: Any, offsets: Any = None) -> Any:
    """A mean is not divided."""
    mode, module.mode = module.mode, "sum"
    try:
        return original(module, input, offsets)
    finally:
        module.mode = mode


def _told_adam(original: Any, *arguments: Any) -> Any:
    message = original(*arguments)
    is_lamb = message.optimizer == OPTIMIZERS["lamb"].code
    return message._replace(optimizer=OPTIMIZERS["adam"].code) if is_lamb else message


steps_never_scaled = patched(
    "LAMB steps as Adam does.",
    swap("refimpl.optimizers:FORMULAS", formulas.FORMULAS | {"lamb": formulas.adam}),
    wrap("fastimpl.kvstore.native:_table_message", _told_adam),
    kills="KV-160",
)
ids_kept_as_they_are = patched(
    "A lookup keeps the ids beside what torch saves for a backward.",
    mutated("twinproof.kvstore.modules:_Lookup.forward", "ctx.save_for_backward(ids)", "ctx.ids = ids"),
    mutated("twinproof.kvstore.modules:_Lookup.backward", "(ids,) = ctx.saved_tensors", "ids = ctx.ids"),
    kills="KV-218",
)


@fault(kills="KV-092", at="KVStore.apply_gradients")
def eps_is_always_the_default(original: Any, store: Any, *args: Any, eps: float = 0.0, **options: Any) -> None:
    """Eps is taken and ignored."""
    original(store, *args, **options)


@fault(kills="KV-160", at="KVStore.apply_gradients")
def betas_are_always_the_defaults(
    original: Any, store: Any, *args: Any, beta1: float = 0.0, beta2: float = 0.0, **options: Any
) -> None:
    """Betas are taken and ignored."""
    original(store, *args, **options)


@fault(kills="KV-340", at="fastimpl.kvstore.modules:KVEmbeddingBag._pool", of="fastimpl")
def one_id_a_bag(original: Any, rows: torch.Tensor, ends: torch.Tensor) -> Any:
    """As many bags as ids are taken for bags of one id each."""
    return rows if rows.shape[0] == ends.numel() - 1 else original(rows, ends)


_MODULE = "twinproof.kvstore.modules:_StoreRows"
frozen_rows_trained = patched(
    "Rows of a frozen module are trained.",
    mutated(f"{_MODULE}.requires_grad_", "self._anchor.requires_grad_(requires_grad)", "None"),
    kills="KV-357",
)
frozen_for_good = patched(
    "What is frozen once is never trained again.",
    mutated(f"{_MODULE}.requires_grad_", "_anchor.requires_grad_(requires_grad)", "_anchor.requires_grad_(False)"),
    kills="KV-357",
)
hyperparameters_of_the_first_step = patched(
    "Hyperparameters that no step takes are found by the first step.",
    mutated(f"{_MODULE}.__init__", "Hyper(lr=lr, eps=eps, beta1=beta1, beta2=beta2)", "None"),
    kills="KV-358",
)
buckets_of_the_first_state_dict = patched(
    "What is no buckets is found by the first state dict.",
    mutated(f"{_MODULE}.__init__", "chosen_buckets(buckets)", "None"),
    kills="KV-358",
)
one_step_of_a_backward = patched(
    "Lookups of one backward take steps of one number.",
    mutated(f"{_MODULE}._step", "None if isinstance(self.store, KVStore) else self.step_count + 1", "1"),
    kills="KV-359",
)


offsets_beside_whole_bags = patched(
    "Offsets beside ids [bags, n] are ignored.",
    mutated(
        "twinproof.kvstore.modules:KVEmbeddingBag._ends",
        "    if offsets is None:\n        if input.dim() != 2:",
        "    if offsets is None or input.dim() == 2:\n        if input.dim() != 2:",
    ),
    kills="KV-373",
)


lookups_of_nothing_take_no_step = patched(
    "The backward of a lookup of no ids takes no step.",
    mutated(f"{_MODULE}._step", "self.store.apply_gradients(", "ids.numel() and self.store.apply_gradients("),
    kills="KV-415",
)
_APPLY = "twinproof.kvstore.store:KVStore.apply_gradients"
steps_of_nothing_uncounted = patched(
    "A step with no ids is not counted.",
    mutated(_APPLY, "if step is None else step", "if step is None and len(ids) else step or self.step_count(table)"),
    kills="KV-415",
)
steps_of_nothing_unheard = patched(
    "Nobody hears of a step with no ids.",
    mutated(_APPLY, "_tell(self._step_listeners, table)", "_tell(self._step_listeners if len(ids) else (), table)"),
    kills="KV-415",
)
_LOOKUP = "twinproof.kvstore.modules:_Lookup.backward"
steps_of_no_number_are_left_out = patched(
    "A lookup whose gradient is not finite takes no step, as if a scaler had skipped it.",
    mutated(
        _LOOKUP,
        "ctx.module._step(ids, grads[0].contiguous())",
        "grads[0].isfinite().all() and ctx.module._step(ids, grads[0].contiguous())",
    ),
    kills="KV-422",
)
gradients_are_cut = patched(
    "Large gradients are cut before they come to the rows.",
    mutated(_LOOKUP, "grads[0].contiguous()", "grads[0].clamp(-2, 2).contiguous()"),
    kills="KV-422",
)


@fault(kills="KV-424", at="twinproof.kvstore.modules:KVEmbeddingBag.forward")
def bags_traced(original: Any, module: Any, input: Any, offsets: Any = None) -> Any:
    """The compiler looks into a lookup of bags."""
    return original.__wrapped__(module, input, offsets)


@fault(kills="KV-424", at="twinproof.kvstore.modules:KVEmbedding.forward")
def embeddings_traced(original: Any, module: Any, input: Any) -> Any:
    """The compiler looks into a lookup of rows."""
    return original.__wrapped__(module, input)


@fault(kills="KV-448", at="twinproof.kvstore.modules:KVEmbeddingBag._ends")
def cuts_of_the_call_before(original: Any, module: Any, ids: torch.Tensor, offsets: Any) -> Any:
    """Where bags end is remembered by the number of ids."""
    known = vars(module).setdefault("cuts", {})
    if ids.numel() not in known:
        known[ids.numel()] = original(module, ids, offsets)
    return known[ids.numel()]
