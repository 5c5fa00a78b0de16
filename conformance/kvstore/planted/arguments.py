"""Faults that ``test_arguments`` must notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conformance.harness import fault, mutated, patched

one_id_loses_its_dimension = patched(
    "One id as [1, 1] is squeezed to none of its dimensions, and refused.",
    mutated("twinproof.kvstore.store:_flat", "return plain.reshape(-1)", "return plain.squeeze()"),
    kills="KV-301",
)
buckets_as_narrow_as_ids = patched(
    "The buckets of int32 ids are computed in int32.",
    mutated("twinproof.kvstore.rows:bucket_number", "ids.to(torch.int64)", "ids"),
    kills="KV-301",
)
no_bytes_are_all_bytes = patched(
    "No bytes of a row are read as all of them.",
    mutated("twinproof.kvstore.rows:RowSource.get_rows", "if width_bytes is None else", "if not width_bytes else"),
    kills="KV-302",
)
no_step_is_none_given = patched(
    "A state dict of an untrained table leaves the step as it was.",
    mutated("twinproof.kvstore.statedict:load_state_dict", "if incoming.step is not None:", "if incoming.step:"),
    kills="KV-302",
)
no_tables_are_all_tables = patched(
    "A state dict that is loaded into no table is loaded into all.",
    mutated("twinproof.kvstore.rows:tables_of", "if tables is None:", "if not tables:"),
    kills="KV-302",
)


@fault(kills="KV-303", at="twinproof.kvstore.options:per_table")
def tables_may_be_left_out(original: Any, value: Any, tables: tuple[str, ...], where: str) -> Any:
    """A table that an option by table leaves out has none."""
    if isinstance(value, Mapping) and set(value) < set(tables):
        value = {table: value.get(table) for table in tables}
    return original(value, tables, where)


@fault(kills="KV-303", at="twinproof.kvstore.options:per_table")
def values_by_place(original: Any, value: Any, tables: tuple[str, ...], where: str) -> Any:
    """Options by table are dealt to the tables in the order in which they are given."""
    found = original(value, tables, where)
    return dict(zip(tables, value.values(), strict=True)) if isinstance(value, dict) else found


layouts_are_the_callers = patched(
    "The mapping of layouts is kept, and read when a state dict is loaded.",
    mutated("twinproof.kvstore.options:StoreOptions.make", "layouts=dict(layouts)", "layouts=layouts"),
    kills="KV-304",
)


@fault(kills="KV-305", at=("fastimpl.ops.kvstore:KVHandle.read", "refimpl.kvstore:DictReader.read"))
def filled_behind_autograd(
    original: Any, reader: Any, table: Any, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor
) -> None:
    """Memory that a read fills counts as it did before."""
    version = out._version
    original(reader, table, ids, begin, end, out)
    torch._C._autograd._unsafe_set_version_counter((out,), (version,))


moments_by_chunk = patched(
    "Rows of a state dict have the moment of their chunk.",
    mutated("twinproof.kvstore.statedict:load_state_dict", "now=now, weights", "now=store.now(), weights"),
    kills="KV-309",
)


@fault(kills="KV-309", at="twinproof.kvstore.store:KVStore.apply_gradients")
def step_counted_before_the_clock(original: Any, store: Any, table: str, *arguments: Any, **options: Any) -> None:
    """A step is counted before it is taken."""
    if len(arguments) > 3:
        store.set_step_count(table, arguments[3])
    original(store, table, *arguments, **options)


callers_memory_as_dense = patched(
    "Weights are read into a caller's memory as if it had the strides of dense rows.",
    mutated(
        "twinproof.kvstore.rows:RowSource.get",
        "result[:used].view(torch.uint8) if out is None else as_bytes(out[:used])",
        "result[:used].view(torch.uint8)",
    ),
    kills="KV-487",
)
