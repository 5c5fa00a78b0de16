"""Faults that ``test_second_uses`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

rows_given_back_again = patched(
    "Rows behind a lock are given back whenever somebody closes their store.",
    mutated("twinproof.kvstore.store:_LockedReader.close", "if not self.closed:", "if True:"),
    kills="KV-394",
)

sources_are_there = patched(
    "A view is pickled as if its source were always there.",
    mutated(
        "twinproof.kvstore.views:KVTensor.__reduce_ex__",
        "if self._source is not None and self._description is None:",
        "if self._description is None:",
    ),
    kills="KV-396",
)

layouts_were_always_kept = patched(
    "A view that was pickled without a layout is asked for it.",
    mutated("twinproof.kvstore.views:KVTensor._means_the_same", "self._layout is None or ", ""),
    kills="KV-397",
)

no_rows_are_searched = patched(
    "Ids are looked for in a copy of no rows as in one of some.",
    mutated("twinproof.kvstore.views:_HeldReader._places", "if self._sorted.numel() else", "if True else"),
    kills="KV-398",
)

copies_name_no_ids = patched(
    "A copy of a view names none of its ids.",
    mutated("twinproof.kvstore.views:_HeldReader.ids", "(self._unique >= begin)", "(self._unique is begin)"),
    kills="KV-452",
)

rows_of_nothing = patched(
    "Rows of a kind that does not say how they are read are memory that nobody has written.",
    mutated(
        "twinproof.kvstore.views:LazyRows.read_rows",
        "raise NotImplementedError",
        "return torch.empty((length, *self.shape[1:]), dtype=self.dtype)",
    ),
    kills="KV-410",
)

stand_ins_are_not_counted_for = patched(
    "An object that stands in for a store is left to number its steps itself.",
    mutated("twinproof.kvstore.modules:_StoreRows._step", "isinstance(self.store, KVStore)", "True"),
    kills="KV-400",
)
stand_ins_asked_for_state = patched(
    "An object that stands in for a store is asked for a state dict, whether it gives any or not.",
    mutated("twinproof.kvstore.modules:_StoreRows._save_to_state_dict", "not isinstance(self.store, KVStore)", "False"),
    kills="KV-400",
)

always_strict = patched(
    "Names that are missing are reported, asked for or not.",
    mutated("twinproof.kvstore.modules:_StoreRows._load_from_state_dict", "if strict:", "if True:"),
    kills="KV-401",
)


@fault(kills="KV-409", at="inspect:getsource", of="fastimpl")
def library_taken_for_granted(original: Any, module: Any) -> str:
    """The component binds its own store, whether its library was built or not."""
    return str(original(module)).replace("TYPE_CHECKING or ops.available()", "True")


@fault(kills="KV-409", at="inspect:getsource", of="fastimpl")
def promises_of_a_library(original: Any, module: Any) -> str:
    """The component promises what its library does, whether it was built or not."""
    return str(original(module)).replace("if ops.available()\n    else ()", "if True else ()")


own_policies_without_time = patched(
    "A round by the table's own policy lets old rows be.",
    mutated(
        "twinproof.kvstore.store:KVStore.start_eviction",
        "chosen = policy if policy is not None else self.options.evictions[table]",
        "chosen = policy or (self.options.evictions[table] and EvictionPolicy.count(0))",
    ),
    kills="KV-412",
)

memory_of_the_rows_there_are = patched(
    "What is loaded gets memory for the rows that there are.",
    mutated("twinproof.kvstore.views:LazyRows.memory_for", "torch.empty(sizes,", "torch.empty(self.shape,"),
    kills="KV-413",
)
states_of_weights = patched(
    "A view of weights is taken for a state of its rows' optimizer.",
    mutated(
        "twinproof.kvstore.views:KVTensor.state_optimizer",
        ' or self.view_name in ("row", "weight", "metadata")',
        "",
    ),
    kills="KV-476",
)
layouts_are_always_kept = patched(
    "A view is taken to have been pickled with the layout of its rows.",
    mutated("twinproof.kvstore.views:KVTensor.state_optimizer", "self._layout is None or ", ""),
    kills="KV-476",
)
