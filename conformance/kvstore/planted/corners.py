"""Faults in corners: empty batches, narrow ids, refusals that do not come, the schema of the file."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import swap, wrap
from conformance.kvstore.planted.planting import both, in_engine, in_store, shared
from twinproof.errors import ConfigError, ShapeError


def _first_row_wins(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    original(store, table, rows.flip(0))


def _untyped_when_empty(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    found: torch.Tensor = original(store, table, begin, last)
    return found if found.numel() else torch.tensor([])


def _first_id_counted_again(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    original(store, table, ids, values, begin, now, visit=visit)
    if ids.numel():
        original(store, table, ids[:1], values[:1], begin, now, visit=visit)


def _in_the_weights_dtype(original: Any, source: Any, table: str, name: str, ids: Any) -> torch.Tensor:
    state: torch.Tensor = original(source, table, name, ids)
    weight = source.layout(table).weight_dtype
    return state.view(weight) if weight.itemsize == state.dtype.itemsize else state


def _unsigned(original: Any, ids: Any, *where: Any) -> torch.Tensor:
    checked: torch.Tensor = original(ids, *where)
    return checked & 0xFFFFFFFF if ids.dtype == torch.int32 else checked


def _local(original: Any, saved: Any, table: str, begin: int, last: int) -> torch.Tensor:
    found: torch.Tensor = original(saved, table, begin, last)
    return found - found[:1]


def _live_state_dict(original: Any, store: Any, **options: Any) -> Any:
    return original(store, **(options | {"snapshot": False}))


def _tolerant(original: Any, row_layout: Any) -> None:
    try:
        original(row_layout)
    except ConfigError:
        object.__setattr__(row_layout, "state_dtypes", {})


def _first_table(original: Any, cls: Any, source: Any, *arguments: Any, **options: Any) -> Any:
    if options.get("table") is None:
        options["table"] = source.tables[0]
    return original(cls, source, *arguments, **options)


def _unchecked_offsets(original: Any, module: Any, input: Any, offsets: Any) -> torch.Tensor:
    try:
        bags: torch.Tensor = original(module, input, offsets)
    except ShapeError:
        return torch.zeros(input.numel(), dtype=torch.int64)
    return bags


def _as_columns(original: Any, rows: torch.Tensor, *chunk_rows: Any) -> Any:
    return original(rows.reshape(-1, 1), *chunk_rows)


def _saved_as_columns(original: Any, files: Any, part: Any) -> Any:
    return {name: value.reshape(value.shape[0], -1) for name, value in original(files, part).items()}


def _place_forgotten(original: Any, planner: Any, read_item: Any, tensor: torch.Tensor) -> None:
    if int((read_item.dest_index.offset or (0,))[0]) == 0:
        original(planner, read_item, tensor)


def _always_due(original: Any, evictor: Any, table: str) -> None:
    trigger, evictor._trigger_rows = evictor._trigger_rows, 1
    try:
        original(evictor, table)
    finally:
        evictor._trigger_rows = trigger


PLANTED = (
    shared(
        "weight_padded_to_eight",
        "The weight is padded to eight elements instead of four.",
        ("KV-004", "KV-005"),
        swap("twinproof.kvstore.options:_PAD_ELEMENTS", 8),
    ),
    in_engine(
        "first_duplicate_row_wins",
        "Of whole rows with one key in a batch the first is kept.",
        ("KV-016",),
        "write_rows",
        _first_row_wins,
    ),
    in_engine(
        "ids_of_an_empty_table_are_floats",
        "The id list of an empty table has another dtype.",
        ("KV-018",),
        "ids",
        _untyped_when_empty,
    ),
    in_engine(
        "first_id_of_a_batch_counted_twice",
        "The place in the batch reaches the row.",
        ("KV-019",),
        "write",
        _first_id_counted_again,
    ),
    shared(
        "state_in_the_weights_dtype",
        "An optimizer state is shown in the dtype of the weights.",
        ("KV-026",),
        wrap("twinproof.kvstore.rows:RowSource.get_state", _in_the_weights_dtype),
    ),
    shared(
        "narrow_ids_without_sign",
        "Negative int32 ids are widened without their sign.",
        ("KV-027",),
        wrap("twinproof.kvstore.store:check_ids", _unsigned),
    ),
    shared(
        "saved_ids_are_local",
        "Saved rows list ids that count from the first one (FBGEMM 4739).",
        ("KV-035",),
        wrap("twinproof.kvstore.disk:_SavedReader.ids", _local),
    ),
    shared(
        "timestamps_in_minutes",
        "Timestamps are stored in another unit than seconds.",
        ("KV-055",),
        wrap("twinproof.kvstore.store:KVStore.now", lambda original, store: original(store) // 60),
    ),
    in_store(
        "state_dict_of_live_rows",
        "Weight and state are read at different moments (DeepRec 1023).",
        ("KV-077",),
        "state_dict",
        _live_state_dict,
    ),
    shared(
        "impossible_layouts_accepted",
        "A layout that cannot be honoured is taken.",
        ("KV-080",),
        wrap("twinproof.kvstore.options:RowLayout.__post_init__", _tolerant),
    ),
    shared(
        "first_of_several_tables",
        "A view that does not say its table shows the first one.",
        ("KV-087",),
        wrap("twinproof.kvstore.views:KVTensor.__new__", _first_table),
    ),
    shared(
        "offsets_not_checked",
        "Offsets that do not cut the ids are taken.",
        ("KV-094",),
        wrap("twinproof.kvstore.modules:KVEmbeddingBag._bags", _unchecked_offsets),
    ),
    shared(
        "ids_saved_as_a_column",
        "Ids are saved as [N, 1] instead of [N].",
        ("KV-100",),
        both(
            wrap("fastimpl.kvstore.files:dense_rows", _as_columns),
            wrap("refimpl.kvstore:WholeTensors.tensors", _saved_as_columns),
        ),
    ),
    shared(
        "only_the_first_chunk_committed",
        "Torch's load writes the first chunk of each view alone.",
        ("KV-103",),
        wrap("twinproof.kvstore.statedict:KVLoadPlanner.commit_tensor", _place_forgotten),
    ),
    shared(
        "background_threshold_ignored",
        "The background evictor starts a round after every write.",
        ("KV-104",),
        wrap("twinproof.kvstore.eviction:BackgroundEvictor._written", _always_due),
    ),
)
