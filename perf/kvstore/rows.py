"""The store that is measured, its ids and its rows, and the same rows as one matrix, in the order of the ids."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.workloads import Workload

__all__ = ["TABLE", "THREADS", "Filled", "clock", "fill", "fresh_memory", "row_layout"]

TABLE = "t"
THREADS = 2
_WORDS_BESIDE_WEIGHT = 8  # The metaheader, and row-wise Adagrad's state with its padding.
_HALF_WORDS_BESIDE_WEIGHT = 6  # The same beside float16.


def clock() -> int:
    """The time of every row."""
    return 1_700_000_000


@dataclass(frozen=True)
class Filled:
    """A store of ``ids``, int64 [n] in random order, whose rows are ``matrix``, uint8 [n, row_bytes]."""

    store: Any
    ids: torch.Tensor
    matrix: torch.Tensor
    batch: int

    def places(self, generator: torch.Generator) -> torch.Tensor:
        """Positions of a batch, uniform over the store."""
        return torch.randint(0, self.ids.numel(), (self.batch,), generator=generator)

    def check(self, places: torch.Tensor, got: torch.Tensor, who: str) -> None:
        """The rows are right, bit for bit. Raises Mismatch."""
        # As words: torch gathers and compares bytes one by one.
        expected = torch.index_select(self.matrix.view(torch.int64), 0, places)
        if not torch.equal(got.view(torch.uint8).reshape(places.numel(), -1).view(torch.int64), expected):
            raise Mismatch(f"{who} read other rows than were written")


def fresh_memory(shape: Sequence[int]) -> torch.Tensor:
    """Uint8 memory that no one has touched, in huge pages as the store's own."""
    # Shared memory, which Python's default is, has small pages whatever it is advised.
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(*shape)


def row_layout(kvstore: Any, workload: Workload) -> Any:
    """Rows of as many bytes as the workload says, with row-wise Adagrad's state. Raises Mismatch.

    Float32 pads the state to 16 bytes and float16 to 8: which of them it is follows from the width.
    """
    if workload.shape[1] % 4 == 0:
        layout = kvstore.RowLayout(workload.shape[1] - _WORDS_BESIDE_WEIGHT, optimizer="rowwise_adagrad")
    else:
        dim = 2 * (workload.shape[1] - _HALF_WORDS_BESIDE_WEIGHT)
        layout = kvstore.RowLayout(dim, torch.float16, optimizer="rowwise_adagrad")
    if layout.row_bytes != 4 * workload.shape[1]:
        raise Mismatch("not as long as the workload says", got=layout.row_bytes, expected=4 * workload.shape[1])
    return layout


def fill(rank: Rank, workload: Workload) -> Filled:
    """A store with every row written once, its memory touched."""
    torch.set_num_threads(THREADS)
    kvstore = rank.component("kvstore")
    batch, layout = workload.shape[0], row_layout(kvstore, workload)
    store = kvstore.KVStore({TABLE: layout}, optimizer_in_row=True, clock=clock)
    count = batch * workload.tensor_count
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(count, generator=generator) * 0x9E3779B1 - 2**40
    store.reserve(TABLE, count)
    matrix = fresh_memory((count, layout.row_bytes))
    for start in range(0, count, batch):
        some = ids[start : start + batch]
        store.set(
            TABLE, some, torch.rand(some.numel(), layout.embedding_dim, generator=generator).to(layout.weight_dtype)
        )
        store.get_rows(TABLE, some, out=matrix[start : start + batch])
    return Filled(store, ids, matrix, batch)
