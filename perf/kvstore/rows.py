"""The store that is measured, its ids and its rows, and the same rows as one matrix, in the order of the ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.workloads import Workload

__all__ = ["Filled", "fill"]

TABLE = "t"
THREADS = 2
_WORDS_BESIDE_WEIGHT = 8  # The metaheader, and row-wise Adagrad's state with its padding.


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

    def weights(self) -> torch.Tensor:
        """The weights of all rows, float32 [n, D], in memory of their own."""
        return self.matrix.view(torch.float32)[:, 4:-4].contiguous()

    def check_weights(self, places: torch.Tensor, got: torch.Tensor, who: str) -> None:
        """The weights are right, bit for bit. Raises Mismatch."""
        expected = self.matrix[places].view(torch.int32)[:, 4:-4]
        if not torch.equal(got.view(torch.int32).reshape(expected.shape), expected):
            raise Mismatch(f"{who} read other weights than were written")

    def check(self, places: torch.Tensor, got: torch.Tensor, who: str) -> None:
        """The rows are right, bit for bit. Raises Mismatch."""
        if not torch.equal(got.view(torch.uint8).reshape(places.numel(), -1), self.matrix[places]):
            raise Mismatch(f"{who} read other rows than were written")


def fill(rank: Rank, workload: Workload) -> Filled:
    """A store with every row written once, its memory touched."""
    torch.set_num_threads(THREADS)
    kvstore = rank.component("kvstore")
    batch, words = workload.shape
    layout = kvstore.RowLayout(words - _WORDS_BESIDE_WEIGHT, optimizer="rowwise_adagrad")
    store = kvstore.KVStore({TABLE: layout}, optimizer_in_row=True, clock=lambda: 1_700_000_000)
    if layout.row_bytes != 4 * words:
        raise Mismatch("the row is not as long as the workload says", got=layout.row_bytes, expected=4 * words)
    count = batch * workload.tensor_count
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(count, generator=generator) * 0x9E3779B1 - 2**40
    store.reserve(TABLE, count)
    parts = []
    for some in ids.split(batch):  # type: ignore[no-untyped-call]
        store.set(TABLE, some, torch.rand(some.numel(), layout.embedding_dim, generator=generator))
        parts.append(store.get_rows(TABLE, some))
    return Filled(store, ids, torch.cat(parts), batch)
