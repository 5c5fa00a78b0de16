"""Faults that ``test_steps`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="KV-140", at="twinproof.kvstore.deltas:SavedContent.metadata")
def step_in_no_file(original: Any, content: Any) -> Any:
    """The optimizer's step is in no file, and Adam begins again."""
    return original(dataclasses.replace(content, steps={}))


@fault(kills="KV-141", at="twinproof.kvstore.disk:SavedRows.__init__")
def old_files_reset_the_step(original: Any, saved: Any, *arguments: Any, **options: Any) -> None:
    """A file that tells no step sets it to zero."""
    original(saved, *arguments, **options)
    saved.steps = {table: saved.steps.get(table, 0) for table in saved.tables}


@fault(kills="KV-142", at="twinproof.kvstore.store:KVStore.load_state_dict")
def module_keeps_other_rows(original: Any, store: Any, state: Any, **options: Any) -> Any:
    """A module that was loaded keeps rows that the state dict does not have."""
    return original(store, state, **options | {"clear": False})


modules_count_alone = patched(
    "A module counts its own steps from the first that it took.",
    mutated(
        "twinproof.kvstore.modules:_StoreRows._step",
        "step = None if isinstance(self.store, KVStore) else self.step_count + 1",
        "step = self.__dict__['_taken'] = self.__dict__.get('_taken', self.step_count) + 1",
    ),
    kills="KV-246",
)


@fault(kills="KV-248", at="twinproof.kvstore.store:KVStore.snapshot")
def steps_of_today(original: Any, store: Any) -> Any:
    """A snapshot tells the store's steps of today."""
    taken = original(store)
    taken.step_count = store.step_count
    return taken


_STEP, _MADE = "twinproof.kvstore.modules:_StoreRows._step", "self.__dict__.setdefault('_first_{0}', self.{0})"
rate_of_the_first_step = patched(
    "A module steps with the learning rate that it had at its first step.",
    mutated(_STEP, "self.lr", _MADE.format("lr")),
    kills="KV-257",
)
second_beta_left_out = patched(
    "A module's beta2 does not come to its optimizer.", mutated(_STEP, ", beta2=self.beta2", ""), kills="KV-257"
)
eps_left_out = patched(
    "A module's eps does not come to its optimizer.", mutated(_STEP, "eps=self.eps, ", ""), kills="KV-257"
)
one_bucket_of_a_module = patched(
    "The state dict of a module has its rows in one bucket.",
    mutated("twinproof.kvstore.modules:_StoreRows._save_to_state_dict", "buckets=self.buckets, ", ""),
    kills="KV-274",
)
steps_of_any_size = patched(
    "A number of steps is set that no tensor holds.",
    mutated("twinproof.kvstore.store:KVStore.set_step_count", "not 0 <= step <= STEP_MAX", "step < 0"),
    kills="KV-279",
)
steps_of_double_precision = patched(
    "The step of a state dict is a number of double precision on its way.",
    mutated(
        "twinproof.kvstore.statedict:_one_step",
        "step: int = plain[0]",
        "step: int = min(int(float(plain[0])), 2**63 - 1)",
    ),
    kills="KV-279",
)
_STATE = "twinproof.kvstore.statedict:state_dict"
step_of_this_rank = patched(
    "A state dict tells the step of its own rank.",
    mutated(_STATE, "max(counts[table][1] for counts in by_rank)", "by_rank[rank][table][1]"),
    kills="KV-294",
)
removals_of_all_ranks_reported = patched(
    "A save reports the removed ids of all ranks as this rank's.",
    mutated("twinproof.kvstore.disk:StoreFiles.save", "part.deleted.numel()", "sum(part.deleted_counts)"),
    kills="KV-294",
)
saved_step_of_the_first_rank = patched(
    "A save tells the step of the first rank.",
    mutated("twinproof.kvstore.deltas:named", "max(found[table].step for found in by_rank)", "by_rank[0][table].step"),
    kills="KV-294",
)


@fault(kills="KV-337", at=("fastimpl.kvstore.store:NativeRows.update", "refimpl.kvstore:DictRows.update"))
def rows_of_zeros_never_move(original: Any, rows: Any, table: str, ids: Any, grads: Any, hyper: Any, now: int) -> None:
    """LAMB scales the step of a row by the norm of its weights, also where that is zero."""
    layout = rows.options.rows[table]
    weights = torch.empty(ids.numel(), layout.weight_bytes, dtype=torch.uint8)
    rows.read(table, ids, 16, 16 + layout.weight_bytes, weights)
    moving = weights.bool().any(dim=1) | (layout.optimizer != "lamb")
    original(rows, table, ids[moving], grads[moving], hyper, now)


_LOAD = "twinproof.kvstore.modules:_StoreRows._load_from_state_dict"
_GIVEN = "(state_dict, prefix, local_metadata"
tables_alone_loaded = patched(
    "Of a subclass of a module the table alone is loaded.",
    mutated(_LOAD, _GIVEN, "({}, prefix, local_metadata"),
    kills="KV-353",
)
hooks_without_the_table = patched(
    "Hooks before a load change a copy of what is loaded into the table.",
    mutated(_LOAD, _GIVEN, "(dict(state_dict), prefix, local_metadata"),
    kills="KV-353",
)
names_of_states_taken_twice = patched(
    "A buffer of a subclass is saved where the state of its name belongs.",
    mutated(
        "twinproof.kvstore.modules:_StoreRows._check_names",
        "set(self._fields())",
        "{*('weight', 'weight_id', 'bucket', 'metadata', 'step')}",
    ),
    kills="KV-353",
)


loads_of_nothing_skipped = patched(
    "A module passes over a state dict that lists no rows.",
    mutated(_LOAD, "if not needed:", "if not needed and state_dict[given['weight_id']].numel():"),
    kills="KV-417",
)
_LOAD_STATE = "twinproof.kvstore.statedict:load_state_dict"
tables_of_no_rows_stay = patched(
    "A load that clears leaves a table alone for which it has no rows.",
    mutated(_LOAD_STATE, "if clear:\n", "if clear and incoming.ids.numel():\n"),
    kills="KV-417",
)
steps_of_no_rows_stay = patched(
    "The step of a table of no rows is not loaded.",
    mutated(_LOAD_STATE, "if incoming.step is not None:", "if incoming.step is not None and incoming.ids.numel():"),
    kills="KV-417",
)


@fault(kills="KV-430", at="twinproof.kvstore.store:KVStore.apply_gradients")
def steps_without_a_number_are_the_first(
    original: Any, store: Any, table: str, ids: Any, grads: Any, lr: float, step: int | None = 1, **options: Any
) -> None:
    """A step without a number is the first one."""
    original(store, table, ids, grads, lr, step, **options)
