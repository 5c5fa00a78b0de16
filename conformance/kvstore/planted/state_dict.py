"""Faults that ``test_state_dict`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="KV-115", at="twinproof.kvstore.statedict:_check_values")
def integers_taken_for_states(original: Any, value: Any, shape: Any, dtypes: Any, where: str) -> None:
    """Values of any dtype are converted to the row's."""
    original(value, shape, (*dtypes, getattr(value, "dtype", None)), where)


@fault(kills="KV-116", at="twinproof.kvstore.statedict:_check_values")
def only_rows_are_counted(original: Any, value: Any, shape: Any, dtypes: Any, where: str) -> None:
    """Values of another width than the row's are found when they are written."""
    width = value.shape[1] if getattr(value, "dim", int)() == 2 else shape[1]
    original(value, (shape[0], width), dtypes, where)


ids_of_the_first_rows = patched(
    "The ids of later rows begin with those of the first.",
    mutated("twinproof.kvstore.statedict:_check", "ids[start : start + length]", "ids[:length]"),
    kills="KV-237",
)
half_words_set = patched(
    "Of words that are set the times alone arrive.",
    mutated("twinproof.kvstore.store:KVStore.set_metadata", "values, -1", "values, 2**32 - 1"),
    kills="KV-238",
)
own_rows_read_too_late = patched(
    "Views of the store itself are read when the load has begun to write.",
    mutated("twinproof.kvstore.statedict:load_state_dict", "incoming.of_this_moment(store, moments)", "incoming"),
    kills="KV-217",
)
moments_left_open = patched(
    "The moment of which views are read is held for as long as the store.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "opened.enter_context(moment)",
        "store.__dict__.setdefault('_held', []).append(moment)",
    ),
    kills="KV-217",
)
values_without_memory = patched(
    "Values of any kind of tensor are looked at when they are written.",
    mutated(
        "twinproof.kvstore.statedict:_check_memory",
        "value.layout is not torch.strided or value.is_nested or is_wrapper",
        "False",
    ),
    kills="KV-344",
)
wrapped_values_taken = patched(
    "Tensors that other tensors stand for are taken for plain ones.",
    mutated("twinproof.kvstore.statedict:_check_memory", "value.is_nested or is_wrapper", "value.is_nested"),
    kills="KV-344",
)
signs_left_behind = patched(
    "A negative view is turned away when it is written.",
    mutated("twinproof.kvstore.statedict:_part", ".resolve_neg()", ""),
    kills="KV-344",
)

_CHECK = "twinproof.kvstore.statedict:_check"
read_when_others_are_gone = patched(
    "Rows that cannot be read are found when those before them are gone.",
    mutated(_CHECK, "if is_whole or elsewhere else ()", "if is_whole else ()"),
    kills="KV-362",
)
metadata_found_later = patched(
    "Timestamps and counts that cannot be read are found when rows are gone.",
    mutated(_CHECK, "[] if incoming.metadata is None else [incoming.metadata]", "[]"),
    kills="KV-362",
)
names_end_at_their_first_dot = patched(
    "A table's name ends at its first dot.",
    mutated(
        "twinproof.kvstore.modules:_StoreRows._save_to_state_dict",
        'name.removeprefix(self.table + ".")',
        'name.split(".", 1)[1]',
    ),
    kills="KV-365",
)
states_are_not_tried = patched(
    "Optimizer states that come from elsewhere are read when the rows before them are gone.",
    mutated("twinproof.kvstore.statedict:_check", "*incoming.states.values(), ", ""),
    kills="KV-366",
)

states_looked_at = patched(
    "States are looked at, too, where weights alone are loaded.",
    mutated("twinproof.kvstore.statedict:_incoming", "() if weights_only else target", "target"),
    kills="KV-435",
)
states_of_any_optimizer = patched(
    "Views of states are taken for those of any optimizer.",
    mutated("twinproof.kvstore.statedict:_check_optimizer", "found not in (None, target.optimizer)", "False"),
    kills="KV-436",
)
shapes_before_optimizers = patched(
    "Views of states of another width are refused by their shape, which does not say why.",
    mutated(
        "twinproof.kvstore.statedict:_incoming",
        '_check_optimizer(value, target, f"{table}.{name}")',
        '_check_values(value, (ids.numel(), target.state_slots[name].count), _FLOATS, f"{table}.{name}"); '
        '_check_optimizer(value, target, f"{table}.{name}")',
    ),
    kills="KV-436",
)
modules_are_told_of_an_option = patched(
    "Who loads a module without states is told of an option that modules have not.",
    mutated("twinproof.kvstore.statedict:_incoming", "all, or the store's load_state_dict with", "all, or"),
    kills="KV-492",
)
