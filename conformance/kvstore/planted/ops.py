"""Faults that ``test_ops`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import fault, swap


def _one_status(file: int, begin: int, dense: torch.Tensor) -> torch.Tensor:
    return dense.new_empty(1, dtype=torch.int64)


@fault(kills="KV-132", of="fastimpl")
def row_read_not_in_schema() -> Iterator[None]:
    """The schema of the operator that reads rows from a file does not say that it writes."""
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


@fault(kills="KV-133", at="fastimpl.ops:saved_rows_fit")
def saved_rows_by_their_keys_alone(original: Any, rows: torch.Tensor, ids: torch.Tensor, *order: Any) -> bool:
    """Saved rows pass the check when their keys are right, whether or not they are in use and in order."""
    return original(rows, ids, *order) or bool((rows.view(torch.int64)[:, 0] == ids).all())


@fault(kills="KV-134", at="fastimpl.ops:saved_rows_fit")
def start_before_the_rows(original: Any, rows: Any, ids: Any, ends: Any, start: int, size: int) -> bool:
    """A check of saved rows that is told to begin before the first row begins there."""
    return bool(original(rows, ids, ends, max(0, start), size))


@fault(kills="KV-213", of="fastimpl")
def another_version_is_read() -> Iterator[None]:
    """A table that is described in another version is taken as if it were of this one."""
    create = torch.ops.twinproof.kvstore_create

    def made(formats: torch.Tensor, shard_count: int) -> torch.Tensor:
        if formats.dtype is torch.int64 and formats.dim() == 2:
            formats = torch.cat([torch.full_like(formats[:, :1], 2), formats[:, 1:]], dim=1)
        found: torch.Tensor = create(formats, shard_count)
        return found

    with swap("torch:ops.twinproof.kvstore_create", made):
        yield


@fault(kills="KV-214", at="fastimpl.ops:KVHandle.write")
def values_before_the_weight(
    original: Any, handle: Any, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, *rest: Any
) -> int:
    """Values that would be written over the header are written behind it."""
    return int(original(handle, table, ids, values, max(16, begin), *rest))


@fault(kills="KV-214", at="fastimpl.ops:KVHandle.size")
def tables_beyond_the_last(original: Any, handle: Any, table: int) -> int:
    """A table beyond the last is the last."""
    return int(original(handle, min(0, table)))
