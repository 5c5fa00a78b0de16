"""Table-batched lookups in C++: one pass over all tables forward, one sort and one pass back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastimpl import ops
from twinproof.optimizers import Hyper
from twinproof.pipeline.bags import TableBatchedEmbeddingBagsBase
from twinproof.pipeline.jagged import Bags

__all__ = ["TableBatchedEmbeddingBags"]

_NONE = torch.empty(0)
_HUGE_BYTES = 4 << 20


def _plain(bags: Bags) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weights = None if bags.weights is None else bags.weights.detach().contiguous()
    return bags.indices.contiguous(), bags.offsets.contiguous(), weights


class TableBatchedEmbeddingBags(TableBatchedEmbeddingBagsBase):
    __doc__ = TableBatchedEmbeddingBagsBase.__doc__

    @staticmethod
    def fresh(shape: tuple[int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        # Rows are touched at random: in small pages every one would miss the translation cache as well.
        memory = torch.empty(shape, dtype=dtype, device=device)
        if memory.nbytes >= _HUGE_BYTES and memory.device.type == "cpu":
            ops.advise_huge_pages(memory)
        return memory

    @staticmethod
    def outside(bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        return ops.check_bag_ids(bags.indices.contiguous(), bags.offsets.contiguous(), row_counts)

    @staticmethod
    def mended(bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        return ops.mend_bag_ids(bags.indices.contiguous(), bags.offsets.contiguous(), row_counts)

    def _weights(self) -> list[torch.Tensor]:
        return [self.weight(index) for index in range(len(self.tables))]

    def _means(self) -> list[bool]:
        return [self._mean(index) for index in range(len(self.tables))]

    def _momenta(self, name: str) -> list[torch.Tensor]:
        return [self.states(index).get(name, _NONE) for index in range(len(self.tables))]

    def _pool(self, bags: Bags) -> torch.Tensor:
        width = sum(self.tables[table].embedding_dim for table in self.feature_tables)
        stride = (bags.offsets.numel() - 1) // len(self.feature_tables)
        out = torch.empty(stride, width, device=bags.indices.device)
        ops.pool_bags(self._weights(), self.feature_tables, *_plain(bags), self._means(), out)
        return out

    def _update(self, bags: Bags, grad: torch.Tensor, hyper: Hyper) -> None:
        ops.step_bags(
            self._weights(),
            self._momenta("momentum1"),
            self._momenta("momentum2"),
            self.feature_tables,
            *_plain(bags),
            self._means(),
            grad,
            self.fused_optimizer.config.kind,
            hyper.lr,
            hyper.eps,
            hyper.beta1,
            hyper.beta2,
            hyper.step,
        )

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        indices, offsets, _ = _plain(bags)
        return ops.bag_weight_gradients(self._weights(), self.feature_tables, indices, offsets, self._means(), grad)
