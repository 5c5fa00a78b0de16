"""The operators of the row store, typed. ``fastimpl.ops`` loads the library and offers them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["KVFilling", "KVHandle", "file_read", "register_fakes", "row_keys", "saved_rows_fit", "sort_ids"]

Handle = TypeVar("Handle", bound="KVHandle")


def register_fakes() -> None:
    """Fake kernels of what a traced model may call: lookups and fused steps. A store is made outside of it.

    opcheck cannot run operators that take a handle: it clones its arguments, and a cloned handle is refused.
    """
    for name in ("kvstore_read", "kvstore_fail_after", "kvstore_close", "kvstore_set_step"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    changes = ("kvstore_write", "kvstore_write_rows", "kvstore_write_metadata", "kvstore_update")
    for name in (*changes, "kvstore_prefetch", "kvstore_forget", "kvstore_step"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: 0)
    torch.library.register_fake(
        "twinproof::kvstore_contains", lambda handle, table, ids: ids.new_empty(ids.shape, dtype=bool)
    )
    torch.library.register_fake(
        "twinproof::kvstore_sort_ids",
        lambda ids, total, size, begin, end: (ids.new_empty(ids.numel(), 1), ids.new_empty(end - begin, 1), 0),
    )
    torch.library.register_fake(
        "twinproof::kvstore_keys", lambda rows: rows.new_empty(rows.shape[0], dtype=torch.int64)
    )
    torch.library.register_fake(
        "twinproof::kvstore_read_file", lambda file, begin, dense: dense.new_empty(1, dtype=torch.int64)
    )
    torch.library.register_fake("twinproof::kvstore_saved_fit", lambda *args: True)
    for name in ("kvstore_fill", "kvstore_fill_publish"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: 0)
    for name in ("kvstore_delete", "kvstore_evict"):
        torch.library.register_fake(f"twinproof::{name}", lambda handle, *args: handle.new_empty(2))


class KVHandle:
    """A store of rows, or a snapshot of one, behind its handle tensor; typed, with nothing decided here.

    ``table`` is an index. Ids are int64 [n], contiguous, on the CPU. Methods that return a status give 0, -1 where
    memory ran out, or the number of distinct ids that the table cannot hold; the table is then as it was.

    Raises:
        RuntimeError: arguments that do not fit, or a handle that is dead ("handle: ...").
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def operators(cls) -> Any:
        """Where the operators are; another library of the same ones has another name."""
        return torch.ops.twinproof

    @classmethod
    def create(cls: type[Handle], formats: torch.Tensor, shard_count: int) -> Handle:
        """An empty store; formats int64, a ``TableMessage`` for each table. It lies where they do."""
        return cls(cls.operators().kvstore_create(formats, shard_count))

    def close(self) -> None:
        """Give the store back as soon as no running call and no snapshot needs it."""
        self.operators().kvstore_close(self.tensor)

    def read(self, table: int, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        """Bytes [begin, end) of the ids' rows into ``out``, of any dtype and n * (end - begin) bytes. Written."""
        self.operators().kvstore_read(self.tensor, table, ids, begin, end, out)
        torch.autograd.graph.increment_version(out)

    def contains(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]."""
        found: torch.Tensor = self.operators().kvstore_contains(self.tensor, table, ids)
        return found

    def ids(self, table: int, first: int, last: int) -> torch.Tensor:
        """Ids in [first, last], ascending."""
        found: torch.Tensor = self.operators().kvstore_ids(self.tensor, table, first, last)
        return found

    def size(self, table: int) -> int:
        """Rows."""
        return int(self.operators().kvstore_size(self.tensor, table))

    def changes(self, table: int, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids that changed and ids that went after a mark, both ascending; the first mark that could be asked about."""
        changed, removed, first_mark = self.operators().kvstore_changes(self.tensor, table, since)
        return changed, removed, int(first_mark)

    def forget(self, mark: int) -> int:
        """Drop what only marks before this one need; a status."""
        return int(self.operators().kvstore_forget(self.tensor, mark))

    def mark(self) -> int:
        """The number of the last complete change."""
        return int(self.operators().kvstore_mark(self.tensor))

    def write(self, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, visit: bool) -> int:
        """Place uint8 [n, w] at byte ``begin``; a status."""
        return int(self.operators().kvstore_write(self.tensor, table, ids, values, begin, now, visit))

    def write_rows(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> int:
        """Replace whole rows, uint8 [n, row_bytes]; a status."""
        return int(self.operators().kvstore_write_rows(self.tensor, table, ids, rows))

    def write_metadata(self, table: int, ids: torch.Tensor, words: torch.Tensor, mask: int) -> int:
        """Set masked bits of bytes 8-15 of rows that exist; a status."""
        return int(self.operators().kvstore_write_metadata(self.tensor, table, ids, words, mask))

    def update(
        self, table: int, ids: torch.Tensor, grads: torch.Tensor, hyper: torch.Tensor, now: int, step: int
    ) -> int:
        """One optimizer step, grads float32 [n, D], hyper float64 [8] as ``Hyper`` of common/optimizers.h; a status.

        The table's step is ``step`` from then on.
        """
        return int(self.operators().kvstore_update(self.tensor, table, ids, grads, hyper, now, step))

    def set_step(self, table: int, step: int) -> None:
        """Say which step the last update was."""
        self.operators().kvstore_set_step(self.tensor, table, step)

    def step(self, table: int) -> int:
        """The step of the last update, of a snapshot as it was then; 0 before the first."""
        return int(self.operators().kvstore_step(self.tensor, table))

    def delete(self, table: int, ids: torch.Tensor) -> tuple[int, int]:
        """A status, and how many rows went."""
        status, count = self.operators().kvstore_delete(self.tensor, table, ids).tolist()
        return status, count

    def clear(self, table: int) -> int:
        """Remove every row; a status."""
        return int(self.operators().kvstore_clear(self.tensor, table))

    def begin_round(self, table: int, keep_count: int) -> tuple[torch.Tensor, list[int]]:
        """Ids of this moment, ascending, and [mark, has cutoff, score, id] when the best ``keep_count`` stay."""
        ids, facts = self.operators().kvstore_begin_round(self.tensor, table, keep_count)
        return ids, facts.tolist()

    def evict(self, table: int, ids: torch.Tensor, plan: torch.Tensor) -> tuple[int, int]:
        """A status, and how many of the ids the plan, an ``EvictionMessage``, removed."""
        status, count = self.operators().kvstore_evict(self.tensor, table, ids, plan).tolist()
        return status, count

    def reserve(self, table: int, row_count: int) -> int:
        """Allocate and touch memory for so many rows; a status."""
        return int(self.operators().kvstore_reserve(self.tensor, table, row_count))

    def prefetch(self, table: int, ids: torch.Tensor) -> int:
        """Bring rows of ids [n] into the cache, where there is one; a status."""
        return int(self.operators().kvstore_prefetch(self.tensor, table, ids))

    def stats(self) -> tuple[torch.Tensor, int]:
        """Int64 [tables * 7]: rows, blocks, row, held and map bytes, evicted rows, removals' bytes; snapshots alive."""
        counts, snapshot_count = self.operators().kvstore_stats(self.tensor)
        return counts, int(snapshot_count)

    def snapshot(self: Handle) -> Handle | None:
        """A handle of this moment; None where memory ran out."""
        taken = self.operators().kvstore_snapshot(self.tensor)
        return type(self)(taken) if taken.numel() else None

    def fill(self, table: int, row_count: int, ahead: int) -> KVFilling | None:
        """Rows that wait for an empty table, with memory for so many; None where memory ran out.

        ``ahead``: how many changes of the store will come between now and their publishing, if it is known.
        """
        opened = self.operators().kvstore_fill_open(self.tensor, table, row_count, ahead)
        return KVFilling(opened) if opened.numel() else None

    def fail_after(self, table: int, allocation_count: int) -> None:
        """For tests: after so many more allocations of this table all fail; -1 ends it."""
        self.operators().kvstore_fail_after(self.tensor, table, allocation_count)


class KVFilling:
    """Rows beside an empty table, in the order of a file, which come into it in one step or not at all."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def add(self, file: int, begin: int, ids: torch.Tensor, ends: torch.Tensor, start: int, bucket_size: int) -> int:
        """Read, check and keep the rows of ids [n], which lie from byte ``begin`` of an open file on.

        ``start``, ``ends`` and ``bucket_size`` as for ``saved_rows_fit``. 0; -1: memory ran out; 1: they cannot be read
        or are not what was saved, and nothing can be done with the filling any more but to close it.
        """
        return int(torch.ops.twinproof.kvstore_fill(self.tensor, file, begin, ids, ends, start, bucket_size))

    def publish(self) -> int:
        """Make them the table's: 0; -1: memory ran out; 1: the table is not empty any more."""
        return int(torch.ops.twinproof.kvstore_fill_publish(self.tensor))

    def close(self) -> None:
        """Give back what the table did not take."""
        torch.ops.twinproof.kvstore_close(self.tensor)


def sort_ids(
    ids: torch.Tensor, total_count: int, bucket_size: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids [n, 1] by bucket, ascending inside; counts [end - begin, 1]; how many ids lie outside [begin, end).

    Nothing is sorted when there are any. ``bucket_size`` 0 is id mod ``total_count``, else id // bucket_size.
    """
    found, counts, outside_count = torch.ops.twinproof.kvstore_sort_ids(ids, total_count, bucket_size, begin, end)
    return found, counts, int(outside_count)


def file_read(file: int, begin: int, dense: torch.Tensor) -> bool:
    """Fill ``dense`` from byte ``begin`` of an open file on; False where the file ends early or cannot be read."""
    torch.autograd.graph.increment_version(dense)
    return int(torch.ops.twinproof.kvstore_read_file(file, begin, dense).item()) == 0


def row_keys(rows: torch.Tensor) -> torch.Tensor:
    """The first 8 bytes of each row, uint8 [n, >= 16], as int64 [n]."""
    return torch.ops.twinproof.kvstore_keys(rows)  # type: ignore[no-any-return]


def saved_rows_fit(rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, start: int, bucket_size: int) -> bool:
    """Whether saved rows are in use, have these keys, and stand in order from ``start``; ``ends`` are the buckets'."""
    return bool(torch.ops.twinproof.kvstore_saved_fit(rows, ids, ends, start, bucket_size))
