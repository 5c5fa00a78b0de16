"""Lookups in C++, one pass over all tables forward, one sort and one pass back; and the modules bound to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastimpl import ops
from fastimpl.regimes import regime
from twinproof.optimizers import Hyper
from twinproof.pipeline import modules
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.modules import HeldTable

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "NativeLookup", "TableBatchedEmbeddingBags"]

_HUGE_BYTES = regime(4 << 20, 64)


def _plain(bags: Bags) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weights = None if bags.weights is None else bags.weights.detach().contiguous()
    return bags.indices.contiguous(), bags.offsets.contiguous(), weights


def _weights(tables: Sequence[HeldTable]) -> list[torch.Tensor]:
    return [table.weight for table in tables]


def _means(tables: Sequence[HeldTable]) -> list[bool]:
    return [table.is_mean for table in tables]


def _momenta(tables: Sequence[HeldTable], name: str) -> list[torch.Tensor]:
    # One for all tables without this state: each new tensor takes longer than the rest of the list.
    absent = torch.empty(0, dtype=torch.float32, device=tables[0].weight.device)
    return [table.states.get(name, absent) for table in tables]


class NativeLookup:
    """``Lookup`` by the operators.

    Attributes:
        max_blocks: of a pooling kernel's grid on a device; 0 is as many as fill it.
    """

    def __init__(self) -> None:
        self.max_blocks = 0

    def fresh(self, shape: tuple[int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Memory for a table or a state, not initialised."""
        # Rows are touched at random: in small pages every one would miss the translation cache as well.
        memory = torch.empty(shape, dtype=dtype, device=device)
        if memory.nbytes >= _HUGE_BYTES and memory.device.type == "cpu":
            ops.advise_huge_pages(memory)
        return memory

    def outside(self, bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        """How many ids are outside of their feature's rows, and the position of the first, or -1."""
        return ops.check_bag_ids(bags.indices.contiguous(), bags.offsets.contiguous(), row_counts)

    def settled(self, bags: Bags, row_counts: Sequence[int]) -> tuple[Bags, torch.Tensor] | None:
        """Bags that lead nowhere else, and what was wrong, on the device; None where the host knows at once."""
        if bags.indices.device.type == "cpu":
            return None
        ids, offsets, found = ops.settle_bags(bags.indices.contiguous(), bags.offsets.contiguous(), row_counts)
        return Bags(ids, offsets, bags.weights), found

    def mended(self, bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        """The ids, those outside of their feature's rows as 0."""
        return ops.mend_bag_ids(bags.indices.contiguous(), bags.offsets.contiguous(), row_counts)

    def pool(self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags) -> torch.Tensor:
        """Float32 [B, sum of D over features]."""
        width = sum(tables[table].weight.shape[1] for table in feature_tables)
        stride = (bags.offsets.numel() - 1) // len(feature_tables)
        out = torch.empty(stride, width, dtype=torch.float32, device=bags.indices.device)
        given = (_weights(tables), list(feature_tables), *_plain(bags), _means(tables), out)
        ops.pool_bags(*given, max_blocks=self.max_blocks)
        return out

    def spread(self, bags: Bags, grad: torch.Tensor, feature_count: int) -> torch.Tensor:
        """Float32 [N, D]: the bag's gradient once for each of its ids, times the id's weight."""
        by_bag = torch.cat(torch.split(grad, grad.shape[1] // feature_count, dim=1))
        grads = by_bag.repeat_interleave(bags.offsets.diff(), dim=0, output_size=bags.indices.numel())
        return grads if bags.weights is None else grads.mul_(bags.weights.detach()[:, None])

    def update(
        self,
        tables: Sequence[HeldTable],
        feature_tables: Sequence[int],
        bags: Bags,
        grad: torch.Tensor,
        optimizer: str,
        hyper: Hyper,
    ) -> None:
        """Step every row that was looked up once, in place."""
        ops.step_bags(
            _weights(tables),
            _momenta(tables, "momentum1"),
            _momenta(tables, "momentum2"),
            list(feature_tables),
            *_plain(bags),
            _means(tables),
            grad,
            optimizer,
            hyper.lr,
            hyper.eps,
            hyper.beta1,
            hyper.beta2,
            hyper.step,
        )

    def weight_gradients(
        self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags, grad: torch.Tensor
    ) -> torch.Tensor:
        """Float32 [N]: the bag's gradient times the row, summed over the row."""
        indices, offsets, _ = _plain(bags)
        features, means = list(feature_tables), _means(tables)
        return ops.bag_weight_gradients(_weights(tables), features, indices, offsets, means, grad)


class TableBatchedEmbeddingBags(modules.TableBatchedEmbeddingBags, engine=NativeLookup): ...


class EmbeddingBagCollection(modules.EmbeddingBagCollection, engine=NativeLookup): ...


class EmbeddingCollection(modules.EmbeddingCollection, engine=NativeLookup): ...
