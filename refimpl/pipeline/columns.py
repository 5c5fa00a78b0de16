"""Pooled columns, as the ranks make them and as the result has them: the two directions of one layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refimpl.pipeline.config import EmbeddingBagConfig, PoolingType
from refimpl.pipeline.jagged import Bags
from refimpl.pipeline.lookups import Group, is_partial
from refimpl.pipeline.shards import Slot

__all__ = ["Columns"]


class Columns:
    """The columns of all features but those of data-parallel tables, by table, then feature.

    Args:
        tables: all of them.
        rank_groups: the lookups of each rank, whose columns stand in the order of their slots.
        dense: the data-parallel tables.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], rank_groups: Sequence[Sequence[Group]], dense: Sequence[int]
    ) -> None:
        self.slots: list[list[Slot]] = [[slot for group in groups for slot in group.slots] for groups in rank_groups]
        feature_tables = [index for index, table in enumerate(tables) for _ in table.feature_names]
        self._tables = [tables[index] for index in feature_tables]
        self.begins, self.width = [], 0
        for index, table in zip(feature_tables, self._tables, strict=True):
            self.begins.append(self.width)
            self.width += 0 if index in dense else table.embedding_dim

    def _places(self, rank: int) -> list[tuple[Slot, slice, slice]]:
        """(slot, its columns of the result, its columns of the rank's block)."""
        places, at = [], 0
        for slot in self.slots[rank]:
            begin = self.begins[slot.feature] + slot.shard.columns[0]
            width = slot.shard.width
            places.append((slot, slice(begin, begin + width), slice(at, at + width)))
            at += width
        return places

    def _means(self) -> list[int]:
        """Features whose partial sums become means here, where the whole bag is known."""
        partial = {slot.feature for slots in self.slots for slot in slots if is_partial(slot.shard)}
        return sorted(f for f in partial if self._tables[f].pooling is PoolingType.MEAN)

    def _of(self, feature: int) -> slice:
        return slice(self.begins[feature], self.begins[feature] + self._tables[feature].embedding_dim)

    def assemble(self, blocks: Sequence[torch.Tensor], bags: Bags) -> torch.Tensor:
        """Float32 [B, width] from the ranks' blocks [B, columns of the rank] for this rank's own bags.

        Partial sums are added from +0 in ascending rank; then a mean is divided by the number of ids of the bag.
        """
        stride = (bags.offsets.numel() - 1) // len(self._tables)
        result = torch.zeros(stride, self.width, device=bags.offsets.device)
        for rank, block in enumerate(blocks):
            for slot, there, here in self._places(rank):
                if is_partial(slot.shard):
                    result[:, there] += block[:, here]
                else:
                    result[:, there] = block[:, here]
        for feature in self._means():
            result[:, self._of(feature)] /= bags.feature(feature, len(self._tables)).lengths()
        return result

    def take_apart(self, grad: torch.Tensor, bags: Bags) -> list[torch.Tensor]:
        """``assemble`` backwards: the gradient [B, columns of the rank] of each rank's block."""
        means = self._means()
        if means:
            grad = grad.clone()
        for feature in means:
            grad[:, self._of(feature)] /= bags.feature(feature, len(self._tables)).lengths()
        empty = grad[:, :0]
        return [
            torch.cat([empty, *(grad[:, there] for _, there, _ in self._places(rank))], dim=1)
            for rank in range(len(self.slots))
        ]
