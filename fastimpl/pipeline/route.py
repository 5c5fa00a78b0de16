"""Which bags go to which rank: a pure function of the plan, and the arithmetic of one exchange on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinproof.pipeline.lookups import Group

__all__ = ["Cut", "Route"]


@dataclass(frozen=True)
class Cut:
    """Features whose bags are cut by rank: all row-wise ones, or those of one key-value table."""

    kind: str
    tables: tuple[int, ...]
    features: tuple[int, ...]


class Route:
    """Segments are bags of one feature: first every feature whole, then each cut's features for each rank.

    Args:
        rank_groups: the lookups of each rank.
        feature_count: features of a batch.

    Attributes:
        cuts: in the order of their segments.
        order: int64, the segments that are sent, by receiving rank, then in the order of that rank's slots.
        slot_counts: segments that each rank receives from each.
    """

    def __init__(self, rank_groups: Sequence[Sequence[Group]], feature_count: int) -> None:
        self.cuts = self._find_cuts(rank_groups)
        self.slot_counts = [sum(len(group.slots) for group in groups) for groups in rank_groups]
        begins, begin = [], feature_count
        for cut in self.cuts:
            begins.append(begin)
            begin += len(cut.features) * len(rank_groups)
        segments = []
        for rank, groups in enumerate(rank_groups):
            for group in groups:
                index = self._cut_of(group)
                for slot in group.slots:
                    if index is None:
                        segments.append(slot.feature)
                        continue
                    features = self.cuts[index].features
                    segments.append(begins[index] + rank * len(features) + features.index(slot.feature))
        self.order = torch.tensor(segments, dtype=torch.int64)

    @staticmethod
    def _find_cuts(rank_groups: Sequence[Sequence[Group]]) -> list[Cut]:
        tables: dict[tuple[str, int], dict[int, int]] = {}
        for group in (group for groups in rank_groups for group in groups):
            kind, table = group.shards[0].kind, group.shards[0].table
            if kind in ("row_wise", "key_value"):
                found = tables.setdefault((kind, -1 if kind == "row_wise" else table), {})
                found |= {slot.feature: slot.shard.table for slot in group.slots}
        return [
            Cut(kind, tuple(features[f] for f in sorted(features)), tuple(sorted(features)))
            for (kind, _), features in sorted(tables.items())
        ]

    def _cut_of(self, group: Group) -> int | None:
        """The index of the group's cut; None for whole features."""
        first = group.slots[0]
        for index, cut in enumerate(self.cuts):
            if cut.kind == first.shard.kind and first.feature in cut.features:
                return index
        return None
