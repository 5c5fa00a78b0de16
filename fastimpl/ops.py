"""The only module that touches ``torch.ops``: loads the library, registers fake kernels, types the operators.

``bag_ops`` is the part of it for table-batched embeddings.

Prevents callers that depend on how an operator is registered, and stale autograd views of what an operator wrote: boxed
operators do not bump version counters, so the wrappers do.

A *descriptor* says how part of a rectangle of a row-major tensor lies in a file, in int64 words ``[ndim, base, skip,
count, shape..., offsets..., sizes...]``. ``base`` is the file offset of the tensor, ``skip`` and ``count`` select bytes
of the rectangle, the innermost dimension counts bytes. Several descriptors may follow each other; the dense buffer then
holds their bytes one after the other.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from fastimpl.bag_ops import (
    advise_huge_pages,
    bag_weight_gradients,
    bucketize,
    check_bag_ids,
    gather_blocks,
    mend_bag_ids,
    pool_bags,
    register_bag_fakes,
    step_bags,
)
from refimpl.offload.adam import AdamHyper

__all__ = [
    "KVHandle",
    "adam_step",
    "advise_huge_pages",
    "available",
    "bag_weight_gradients",
    "bucketize",
    "check_bag_ids",
    "file_read",
    "gather_blocks",
    "library_path",
    "mend_bag_ids",
    "pack",
    "pool_bags",
    "rect_place",
    "rect_read",
    "rect_take",
    "row_keys",
    "saved_rows_fit",
    "sort_ids",
    "step_bags",
    "strided_gather",
    "strided_scatter",
    "unpack",
]

_LIBRARY = "libfastimpl_ops.so"
_TESTED = ((2, 11), (2, 13))


def library_path() -> Path | None:
    """The built library, or None. Wheels and editable installs put it in different entries of the package's path."""
    import fastimpl

    found = [Path(folder) / _LIBRARY for folder in fastimpl.__path__]
    return next((path for path in found if path.exists()), None)


def _warn_if_untested() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not _TESTED[0] <= version <= _TESTED[1]:
        tested = " to ".join(".".join(map(str, v)) for v in _TESTED)
        warnings.warn(f"twinproof is tested on torch {tested}; this is {torch.__version__}", stacklevel=3)


@functools.cache
def available() -> bool:
    """Load the library once; False, with one warning, where it was not built."""
    path = library_path()
    if path is None:
        warnings.warn("fastimpl has no built library (FASTIMPL_BUILD=none): the reference is used", stacklevel=2)
        return False
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _warn_if_untested()
    for name in ("rect_place", "rect_take", "strided_gather", "strided_scatter", "adam_step", "pack", "unpack"):
        # These return nothing: under fake tensors there is nothing to make.
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    torch.library.register_fake("twinproof::rect_read", lambda file, dense, window, words: words.new_empty(3))
    _register_kv_fakes()
    register_bag_fakes()
    return True


def _register_kv_fakes() -> None:
    """Fake kernels of what a traced model may call: lookups and fused steps. A store is made outside of it.

    opcheck cannot run operators that take a handle: it clones its arguments, and a cloned handle is refused.
    """
    for name in ("kv_read", "kv_fail_after", "kv_close"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    for name in ("kv_write", "kv_write_rows", "kv_write_metadata", "kv_update"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: 0)
    torch.library.register_fake(
        "twinproof::kv_contains", lambda handle, table, ids: ids.new_empty(ids.shape, dtype=bool)
    )
    torch.library.register_fake(
        "twinproof::kv_sort_ids",
        lambda ids, total, size, begin, end: (ids.new_empty(ids.numel(), 1), ids.new_empty(end - begin, 1), 0),
    )
    torch.library.register_fake("twinproof::kv_keys", lambda rows: rows.new_empty(rows.shape[0], dtype=torch.int64))
    torch.library.register_fake(
        "twinproof::file_read", lambda file, begin, dense: dense.new_empty(1, dtype=torch.int64)
    )
    torch.library.register_fake("twinproof::kv_saved_fit", lambda *args: True)
    for name in ("kv_delete", "kv_evict"):
        torch.library.register_fake(f"twinproof::{name}", lambda handle, *args: handle.new_empty(2))


def rect_place(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """Copy dense bytes of rectangles to where they lie in a window of the file.

    Args:
        window: uint8 [n], CPU; file bytes ``window_start`` and on. Written.
        window_start: file offset of ``window[0]``.
        dense: uint8 [sum of counts].
        descriptors: int64, see the module.

    Raises:
        RuntimeError: shapes or descriptors that do not fit; nothing is written then.
    """
    torch.ops.twinproof.rect_place(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(window)


def rect_take(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """The inverse of ``rect_place``: ``dense`` is written."""
    torch.ops.twinproof.rect_take(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(dense)


def rect_read(file: int, dense: torch.Tensor, window: torch.Tensor, descriptor: torch.Tensor) -> tuple[int, int, int]:
    """Read part of a rectangle from a file, gaps between its rows included, and keep the rectangle.

    Args:
        file: open file descriptor.
        dense: uint8 [count of the descriptor], CPU. Written.
        window: uint8 scratch; one read fills at most this much. Written.
        descriptor: int64, one descriptor; its base is a file offset.

    Returns:
        (status, calls, bytes): status is 0, an errno, or -1 where the file ends early.
    """
    status, calls, read_bytes = torch.ops.twinproof.rect_read(file, dense, window, descriptor).tolist()
    torch.autograd.graph.increment_version([dense, window])
    return status, calls, read_bytes


def strided_gather(source: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Copy elements ``start`` and on, in row-major order, of a tensor of any strides into dense bytes.

    Args:
        source: any dtype of 1, 2, 4 or 8 bytes, at most 16 dimensions, CPU or CUDA.
        start: flat index of the first element.
        dense: uint8 [whole elements], same device. Written.
    """
    torch.ops.twinproof.strided_gather(source, start, dense)
    torch.autograd.graph.increment_version(dense)


def strided_scatter(target: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """The inverse of ``strided_gather``: ``target`` is written."""
    torch.ops.twinproof.strided_scatter(target, start, dense)
    torch.autograd.graph.increment_version(target)


def adam_step(
    hyper: AdamHyper,
    grads: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    isa: int = -1,
) -> None:
    """One step of Adam or AdamW in one pass over host memory, to the bit that of ``refimpl.offload.adam``.

    Args:
        hyper: the same for all of them.
        grads: of the masters' shapes and strides, all float32, all bfloat16 or all float16, CPU.
        masters: float32, dense. Written.
        exp_avgs: float32. Written.
        exp_avg_sqs: float32. Written.
        max_exp_avg_sqs: float32, with amsgrad; else empty. Written.
        weights: of one dtype as the gradients are; get the masters, rounded to nearest even. Or empty. Written.
        isa: 0 plain, 1 AVX2, 2 AVX-512, -1 the best that this machine has; changes no bit.

    Raises:
        RuntimeError: lists that do not fit each other, or an ``isa`` that this machine lacks; nothing is written then.
    """
    if not masters:
        return
    lists = (masters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, weights)
    torch.ops.twinproof.adam_step(grads, *lists, hyper.values, hyper.maximize, hyper.coupled, isa)
    for written in lists:
        torch.autograd.graph.increment_version(written)


def pack(sources: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy the bytes of many tensors into one slab: one call, on CUDA a launch for each 160 of them.

    Args:
        sources: dense, of any dtypes, CPU or one CUDA device.
        slab: uint8 [n], same device. Written.
        offsets: first byte of each tensor in the slab; ascending, apart.

    Raises:
        RuntimeError: tensors with gaps, on another device, or places that do not fit; nothing is written then.
    """
    torch.ops.twinproof.pack(sources, slab, offsets)
    torch.autograd.graph.increment_version(slab)


def unpack(targets: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """The inverse of ``pack``: ``targets`` are written."""
    torch.ops.twinproof.unpack(targets, slab, offsets)
    torch.autograd.graph.increment_version(targets)


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
    def create(cls, formats: torch.Tensor, shard_count: int) -> KVHandle:
        """An empty store; formats int64 [tables, 19], see ``read_format`` in kvstore.cpp."""
        return cls(torch.ops.twinproof.kv_create(formats, shard_count))

    def close(self) -> None:
        """Give the store back as soon as no running call and no snapshot needs it."""
        torch.ops.twinproof.kv_close(self.tensor)

    def read(self, table: int, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        """Bytes [begin, end) of the ids' rows into ``out``, of any dtype and n * (end - begin) bytes. Written."""
        torch.ops.twinproof.kv_read(self.tensor, table, ids, begin, end, out)
        torch.autograd.graph.increment_version(out)

    def contains(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]."""
        found: torch.Tensor = torch.ops.twinproof.kv_contains(self.tensor, table, ids)
        return found

    def ids(self, table: int, first: int, last: int) -> torch.Tensor:
        """Ids in [first, last], ascending."""
        found: torch.Tensor = torch.ops.twinproof.kv_ids(self.tensor, table, first, last)
        return found

    def size(self, table: int) -> int:
        """Rows."""
        return int(torch.ops.twinproof.kv_size(self.tensor, table))

    def changes(self, table: int, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids that changed and ids that went after a mark, both ascending."""
        changed, removed = torch.ops.twinproof.kv_changes(self.tensor, table, since)
        return changed, removed

    def mark(self) -> int:
        """The number of the last complete change."""
        return int(torch.ops.twinproof.kv_mark(self.tensor))

    def write(self, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, visit: bool) -> int:
        """Place uint8 [n, w] at byte ``begin``; a status."""
        return int(torch.ops.twinproof.kv_write(self.tensor, table, ids, values, begin, now, visit))

    def write_rows(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> int:
        """Replace whole rows, uint8 [n, row_bytes]; a status."""
        return int(torch.ops.twinproof.kv_write_rows(self.tensor, table, ids, rows))

    def write_metadata(self, table: int, ids: torch.Tensor, words: torch.Tensor, mask: int) -> int:
        """Set masked bits of bytes 8-15 of rows that exist; a status."""
        return int(torch.ops.twinproof.kv_write_metadata(self.tensor, table, ids, words, mask))

    def update(self, table: int, ids: torch.Tensor, grads: torch.Tensor, hyper: torch.Tensor, now: int) -> int:
        """One optimizer step, grads float32 [n, D], hyper float64 [8] as ``Hyper`` in kv_update.h; a status."""
        return int(torch.ops.twinproof.kv_update(self.tensor, table, ids, grads, hyper, now))

    def delete(self, table: int, ids: torch.Tensor) -> tuple[int, int]:
        """A status, and how many rows went."""
        status, count = torch.ops.twinproof.kv_delete(self.tensor, table, ids).tolist()
        return status, count

    def clear(self, table: int) -> int:
        """Remove every row; a status."""
        return int(torch.ops.twinproof.kv_clear(self.tensor, table))

    def begin_round(self, table: int, keep_count: int) -> tuple[torch.Tensor, list[int]]:
        """Ids of this moment, ascending, and [mark, has cutoff, score, id] when the best ``keep_count`` stay."""
        ids, facts = torch.ops.twinproof.kv_begin_round(self.tensor, table, keep_count)
        return ids, facts.tolist()

    def evict(self, table: int, ids: torch.Tensor, plan: torch.Tensor) -> tuple[int, int]:
        """A status, and how many of the ids the plan, int64 [11], removed."""
        status, count = torch.ops.twinproof.kv_evict(self.tensor, table, ids, plan).tolist()
        return status, count

    def reserve(self, table: int, row_count: int) -> int:
        """Allocate and touch memory for so many rows; a status."""
        return int(torch.ops.twinproof.kv_reserve(self.tensor, table, row_count))

    def stats(self) -> tuple[torch.Tensor, int]:
        """Int64 [tables * 6]: rows, blocks, row, held and map bytes, evicted rows; and snapshots alive."""
        counts, snapshot_count = torch.ops.twinproof.kv_stats(self.tensor)
        return counts, int(snapshot_count)

    def snapshot(self) -> KVHandle | None:
        """A handle of this moment; None where memory ran out."""
        taken = torch.ops.twinproof.kv_snapshot(self.tensor)
        return KVHandle(taken) if taken.numel() else None

    def fail_after(self, table: int, allocation_count: int) -> None:
        """For tests: after so many more allocations of this table all fail; -1 ends it."""
        torch.ops.twinproof.kv_fail_after(self.tensor, table, allocation_count)


def sort_ids(
    ids: torch.Tensor, total_count: int, bucket_size: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids [n, 1] by bucket, ascending inside; counts [end - begin, 1]; how many ids lie outside [begin, end).

    Nothing is sorted when there are any. ``bucket_size`` 0 is id mod ``total_count``, else id // bucket_size.
    """
    found, counts, outside_count = torch.ops.twinproof.kv_sort_ids(ids, total_count, bucket_size, begin, end)
    return found, counts, int(outside_count)


def file_read(file: int, begin: int, dense: torch.Tensor) -> bool:
    """Fill ``dense`` from byte ``begin`` of an open file on; False where the file ends early or cannot be read."""
    torch.autograd.graph.increment_version(dense)
    return int(torch.ops.twinproof.file_read(file, begin, dense).item()) == 0


def row_keys(rows: torch.Tensor) -> torch.Tensor:
    """The first 8 bytes of each row, uint8 [n, >= 16], as int64 [n]."""
    return torch.ops.twinproof.kv_keys(rows)  # type: ignore[no-any-return]


def saved_rows_fit(rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, start: int, bucket_size: int) -> bool:
    """Whether saved rows are in use, have these keys, and stand in order from ``start``; ``ends`` are the buckets'."""
    return bool(torch.ops.twinproof.kv_saved_fit(rows, ids, ends, start, bucket_size))
