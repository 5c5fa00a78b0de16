"""Pooled columns, as the ranks make them and as the result has them: the two directions of one layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.pipeline.jagged import Bags, divisor_on
from twinproof.pipeline.sharding import Layout, Slot

__all__ = ["Columns"]


class Columns:
    """The columns of all features but those of data-parallel tables, by table, then feature.

    Args:
        layout: the lookups of each rank, whose columns stand in the order of their slots.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self.begins = layout, layout.begins
        self.slots: list[list[Slot]] = [[s for group in groups for s in group.slots] for groups in layout.rank_groups]
        self._count, self._mean_features = len(layout.feature_tables), layout.means()
        self.places = [self._places(rank) for rank in range(len(self.slots))]
        # Of the features whose sums become means: rank and columns of its block, found once for all steps.
        self._mean_places = self._places_of(set(self._mean_features))
        self.widths = [sum(slot.shard.width for slot in slots) for slots in self.slots]
        has_partial = any(slot.is_partial for slots in self.slots for slot in slots)
        # Then each column is written once, by one block.
        self._is_covered = not has_partial and sum(self.widths) == layout.width

    def _places(self, rank: int) -> list[tuple[bool, slice, slice]]:
        """(partial sums, columns of the result, columns of the rank's block); neighbours in both are one."""
        places: list[tuple[bool, slice, slice]] = []
        at = 0
        for slot in self.slots[rank]:
            begin, width = self.begins[slot.feature] + slot.shard.columns[0], slot.shard.width
            partial, there, here = slot.is_partial, slice(begin, begin + width), slice(at, at + width)
            if places and places[-1][0] == partial and places[-1][1].stop == begin:
                _, before, block = places.pop()
                there, here = slice(before.start, there.stop), slice(block.start, here.stop)
            places.append((partial, there, here))
            at += width
        return places

    def _places_of(self, features: set[int]) -> dict[int, list[tuple[int, slice]]]:
        """Feature -> (rank, columns of the rank's block), by rank, then slot."""
        found: dict[int, list[tuple[int, slice]]] = {feature: [] for feature in features}
        for rank, slots in enumerate(self.slots):
            at = 0
            for slot in slots:
                if slot.feature in found:
                    found[slot.feature].append((rank, slice(at, at + slot.shard.width)))
                at += slot.shard.width
        return found

    def _means(self) -> list[int]:
        """Features whose partial sums become means here, where the whole bag is known."""
        return self._mean_features

    def _of(self, feature: int) -> slice:
        return slice(self.begins[feature], self.begins[feature] + self._layout.table_of(feature).embedding_dim)

    def assemble(self, blocks: Sequence[torch.Tensor], bags: Bags) -> torch.Tensor:
        """Float32 [B, width] from the ranks' blocks [B, columns of the rank] for this rank's own bags.

        Partial sums are added from +0 in ascending rank; then a mean is divided by the number of ids of the bag.
        """
        stride = (bags.offsets.numel() - 1) // self._count
        make = torch.empty if self._is_covered else torch.zeros
        result = make(stride, self._layout.width, dtype=torch.float32, device=bags.offsets.device)
        for rank, block in enumerate(blocks):
            for partial, there, here in self.places[rank]:
                if partial:
                    result[:, there] += block[:, here]
                else:
                    result[:, there] = block[:, here]
        for feature in self._means():
            result[:, self._of(feature)] /= bags.lengths_of(feature, self._count)
        return result

    def take_apart(self, grad: torch.Tensor, bags: Bags, divisor: int) -> torch.Tensor:
        """``assemble`` backwards: the gradient over ``divisor``, each rank's block [B, columns of the rank] in turn."""
        stride = grad.shape[0]
        words = grad.new_empty(stride * sum(self.widths))
        parts = torch.split(words, [stride * width for width in self.widths])
        blocks = [part.view(stride, width) for part, width in zip(parts, self.widths, strict=True)]
        over = divisor_on(grad, divisor)
        for block, places in zip(blocks, self.places, strict=True):
            for _, there, here in places:
                torch.div(grad[:, there], over, out=block[:, here])
        for feature in self._means():
            lengths = bags.lengths_of(feature, self._count)
            for rank, here in self._mean_places[feature]:
                blocks[rank][:, here] /= lengths
        return words
