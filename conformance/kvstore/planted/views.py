"""Faults that ``test_views`` must notice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from twinproof.kvstore.rows import check_row_range


@fault(kills="KV-087", at="twinproof.kvstore.views:KVTensor.__new__")
def first_of_several_tables(original: Any, cls: Any, source: Any, *arguments: Any, **options: Any) -> Any:
    """A view that does not say its table shows the first one."""
    if options.get("table") is None:
        options["table"] = source.tables[0]
    return original(cls, source, *arguments, **options)


@fault(kills="KV-040", at="twinproof.kvstore.views:KVTensor.over")
def optimizer_view_over_other_ids(original: Any, cls: Any, *arguments: Any, **options: Any) -> Any:
    """A state's view lists its ids in another order than the weights."""
    made = original(cls, *arguments, **options)
    if made.view_name.startswith("momentum"):
        made._ids = made._ids.sort().values
    return made


@fault(kills="KV-086", at="twinproof.kvstore.views:LazyRows.__create_write_items__")
def row_width_from_embedding_dim(original: Any, lazy: Any, fqn: str, object: Any) -> Any:
    """The global width of whole rows is D instead of the row's bytes."""
    items = original(lazy, fqn, object)
    for item in items if getattr(lazy, "view_name", "") == "row" else ():
        width = lazy.source.layout(lazy.table).embedding_dim
        vars(item.tensor_data)["size"] = torch.Size((item.tensor_data.size[0], width))
    return items


def _stale_counts() -> AbstractContextManager[Any]:
    counts: dict[str, int] = {}

    def around(original: Any, lazy: Any, fqn: str, object: Any) -> Any:
        items = original(lazy, fqn, object)
        for item in items:
            count = counts.setdefault(fqn, item.tensor_data.size[0])
            vars(item.tensor_data)["size"] = torch.Size((count, *item.tensor_data.size[1:]))
        return items

    return wrap("twinproof.kvstore.views:LazyRows.__create_write_items__", around)


stale_row_count = patched("Global row counts are those of the first state dict.", _stale_counts, kills="KV-086")


@fault(kills=("KV-037", "KV-045"), at="twinproof.kvstore.views:KVTensor.set_weights_and_ids")
def read_only_state_written(original: Any, view: Any, values: Any, ids: Any) -> int:
    """A write to the read-only view of momentum1 reaches the store."""
    read_only, view.read_only = view.read_only, view.read_only and view.view_name != "momentum1"
    try:
        return int(original(view, values, ids))
    finally:
        view.read_only = read_only


@fault(kills="KV-037", at="twinproof.kvstore.views:KVTensor.set_weights_and_ids")
def skipped_rows_not_reported(original: Any, view: Any, values: Any, ids: Any) -> int:
    """A read-only view reports no skipped rows."""
    original(view, values, ids)
    return 0


@fault(kills="KV-038", at="twinproof.kvstore.views:KVTensor.__reduce_ex__")
def read_only_lost_in_pickle(original: Any, view: Any, protocol: Any) -> Any:
    """Pickling loses the read-only flag."""
    rebuild, (ids, width, dtype, state) = original(view, protocol)
    return rebuild, (ids, width, dtype, state | {"read_only": False})


@fault(kills="KV-039", at="twinproof.kvstore.views:LazyRows.narrow")
def narrow_one_row_on(original: Any, lazy: Any, dim: int, start: int, length: int) -> torch.Tensor:
    """A range of two rows begins one row late."""
    check_row_range(dim, start, length, lazy.shape[0])
    rows: torch.Tensor = lazy.read_rows(min(start + (length == 2), max(0, lazy.shape[0] - length)), length)
    return rows


@fault(kills="KV-041", at="twinproof.kvstore.views:KVTensor.get_weights_by_ids")
def local_keys_in_views(original: Any, view: Any, ids: torch.Tensor) -> torch.Tensor:
    """Views carry local keys (FBGEMM 4735)."""
    rows: torch.Tensor = original(view, ids)
    if view.view_name == "row" and rows.numel():
        rows[:, :8] = (ids + 2**62).reshape(-1, 1).view(torch.uint8)
    return rows


@fault(kills="KV-085", at="twinproof.kvstore.views:KVTensor.get_weights_by_ids")
def detached_view_reads_zeros(original: Any, view: Any, ids: torch.Tensor) -> torch.Tensor:
    """A view without rows behind it reads zeros."""
    if view._source is None and view._description is None:
        return torch.zeros(ids.numel(), view.shape[1], dtype=view.dtype)
    rows: torch.Tensor = original(view, ids)
    return rows


@fault(kills="KV-084", at="twinproof.kvstore.views:check_keys")
def view_takes_any_keys(original: Any, *arguments: Any) -> None:
    """set_range does not look at the keys of the rows."""


range_of_another_layout = patched(
    "A view that is attached to another source keeps the bytes of the first one's layout.",
    mutated(
        "twinproof.kvstore.views:KVTensor.attach",
        "self._source, self._range = source, (begin, end)",
        "self._source = source",
    ),
    kills="KV-247",
)
travels_with_the_first_source = patched(
    "A view that is attached goes on travelling as one of the rows that it was made over.",
    mutated("twinproof.kvstore.views:KVTensor.attach", "self._description = source.reopened()", "pass"),
    kills="KV-269",
)
attached_and_still_written = patched(
    "A view stays as writable as it was when it is attached to rows that nobody writes.",
    mutated("twinproof.kvstore.views:KVTensor.attach", "self.read_only = self.read_only or source.read_only", "pass"),
    kills="KV-273",
)
ids_of_the_caller = patched(
    "A view keeps the caller's tensor of ids.",
    mutated("twinproof.kvstore.views:KVTensor.__new__", "check_ids(ids).clone()", "check_ids(ids)"),
    kills="KV-260",
)
ids_handed_out = patched(
    "A view hands out the very ids that it reads by.",
    mutated("twinproof.kvstore.views:KVTensor.ids", "self._ids.clone()", "self._ids"),
    kills="KV-260",
)
indices_of_the_caller = patched(
    "A wrapper keeps the caller's tensor of ids.",
    mutated("twinproof.kvstore.modules:KVTensorWrapper.__init__", ".clone()", ""),
    kills="KV-260",
)

read_only_takes_other_keys = patched(
    "A read-only view skips rows of other keys without a look at them.",
    mutated(
        "twinproof.kvstore.views:KVTensor.set_weights_and_ids",
        'if self.view_name == "row":\n        check_keys',
        'if self.view_name == "row" and not self.read_only:\n        check_keys',
    ),
    kills="KV-315",
)
read_only_wrappers_take_all = patched(
    "A read-only wrapper takes whatever it is given.",
    mutated(
        "twinproof.kvstore.modules:KVTensorWrapper.set_weights_and_ids",
        "checked = check_ids(ids)",
        "checked = check_ids(ids)\n    if self.read_only: return",
    ),
    kills="KV-315",
)

_MEANS_THE_SAME = "twinproof.kvstore.views:KVTensor._means_the_same"
any_rows_of_this_width = patched(
    "A view of whole rows is attached to whatever rows have as many bytes.",
    mutated(_MEANS_THE_SAME, 'self.view_name in ("weight", "metadata")', 'self.view_name[:8] != "momentum"'),
    kills="KV-352",
)
any_state_of_this_name = patched(
    "A view of a state is attached to the state of that name of any optimizer.",
    mutated(_MEANS_THE_SAME, "self._layout.optimizer == layout.optimizer", "True"),
    kills="KV-352",
)
weights_of_one_optimizer = patched(
    "A view of weights is attached only to rows of the same layout.",
    mutated(_MEANS_THE_SAME, 'self.view_name in ("weight", "metadata")', "False"),
    kills="KV-352",
)

memory_of_ids_is_handed_out = patched(
    "Ids and buckets of a state dict are handed out as the memory that all its views read.",
    mutated("twinproof.kvstore.views:_Dense.read_rows", ".clone()", ""),
    kills="KV-367",
)


@fault(kills="KV-419", at="twinproof.kvstore.views:LazyRows.__copy__")
def shallow_copies_are_detached(original: Any, lazy: Any) -> Any:
    """A shallow copy is what a journey to another process would leave of it."""
    rebuild, arguments = lazy.__reduce_ex__(4)
    return rebuild(*arguments)


@fault(kills="KV-419", at="twinproof.kvstore.views:LazyRows.__copy__")
def shallow_copies_are_deep(original: Any, lazy: Any) -> Any:
    """A shallow copy has the rows of its moment."""
    return lazy.in_memory()
