"""Faults of operators: what torch is told of them, and what they take as right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap


def _one_status(file: int, begin: int, dense: torch.Tensor) -> torch.Tensor:
    return dense.new_empty(1, dtype=torch.int64)


@contextmanager
def _without_alias_mark() -> Iterator[None]:
    """An operator of the same behaviour whose schema does not say that it writes."""
    # torch's own stubs lack types here.
    library: Any = torch.library.Library("twinproof_planted_rows", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        library.define("kvstore_read_file(int file, int begin, Tensor dense) -> Tensor")
        library.impl("kvstore_read_file", torch.ops.twinproof.kvstore_read_file.default, "CPU")
        torch.library.register_fake("twinproof_planted_rows::kvstore_read_file", _one_status, lib=library)
        with swap("torch:ops.twinproof.kvstore_read_file", torch.ops.twinproof_planted_rows.kvstore_read_file):
            yield
    finally:
        library._destroy()


def _keys_alone(original: Any, rows: torch.Tensor, ids: torch.Tensor, *order: Any) -> bool:
    return original(rows, ids, *order) or bool((rows.view(torch.int64)[:, 0] == ids).all())


def _any_start(original: Any, rows: Any, ids: Any, ends: Any, start: int, size: int) -> bool:
    return bool(original(rows, ids, ends, max(0, start), size))


def _room_for_all(original: Any, store: Any, table: str, ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
    store.reserve(table, store.size(table) + ids.numel())
    return original(store, table, ids, *rest, **options)


PLANTED = (
    PlantedBug(
        "row_read_not_in_schema",
        "The schema of the operator that reads rows from a file does not say that it writes.",
        ("KV-132",),
        "fastimpl",
        _without_alias_mark,
    ),
    PlantedBug(
        "saved_rows_by_their_keys_alone",
        "Saved rows pass the check when their keys are right, whether or not they are in use and in order.",
        ("KV-133",),
        "fastimpl",
        wrap("fastimpl.ops:saved_rows_fit", _keys_alone),
    ),
    PlantedBug(
        "start_before_the_rows",
        "A check of saved rows that is told to begin before the first row begins there.",
        ("KV-134",),
        "fastimpl",
        wrap("fastimpl.ops:saved_rows_fit", _any_start),
    ),
    PlantedBug(
        "duplicates_need_room",
        "A batch makes room for as many rows as it has ids, duplicates and rows that are there included.",
        ("KV-135",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeRows.write", _room_for_all),
    ),
)
