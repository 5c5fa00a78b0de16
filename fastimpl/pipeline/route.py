"""Which bags go to which rank: a pure function of the plan, and the arithmetic of one exchange on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinproof.pipeline.sharding import KINDS, Group, Layout

__all__ = ["Cut", "Route"]


@dataclass(frozen=True)
class Cut:
    """Features whose bags are cut by rank in one pass: all row-wise ones, or those of one key-value table."""

    key: tuple[int, int]
    tables: tuple[int, ...]
    features: tuple[int, ...]
    is_stored: bool


class Route:
    """Segments are bags of one feature: first every feature whole, then each cut's features for each rank.

    Attributes:
        cuts: in the order of their segments.
        order: int64, the segments that are sent, by receiving rank, then in the order of that rank's slots.
        slot_counts: segments that each rank receives from each.
        segment_count: segments of a batch.
    """

    def __init__(self, layout: Layout) -> None:
        self.cuts = _find_cuts(layout)
        self.slot_counts = [sum(len(group.slots) for group in groups) for groups in layout.rank_groups]
        begins, self.segment_count = dict[tuple[int, int], int](), len(layout.feature_tables)
        for cut in self.cuts:
            begins[cut.key] = self.segment_count
            self.segment_count += len(cut.features) * layout.world_size
        features = {cut.key: cut.features for cut in self.cuts}
        segments = []
        for rank, groups in enumerate(layout.rank_groups):
            for group in groups:
                key = _key_of(group)
                for slot in group.slots:
                    if key not in begins:
                        segments.append(slot.feature)
                        continue
                    mine = features[key]
                    segments.append(begins[key] + rank * len(mine) + mine.index(slot.feature))
        self.order = torch.tensor(segments, dtype=torch.int64)


def _key_of(group: Group) -> tuple[int, int]:
    """Equal for the groups of all ranks that look up blocks of the same tables."""
    return KINDS[group.shards[0].kind].lookup_of(group.shards[0])


def _find_cuts(layout: Layout) -> list[Cut]:
    tables: dict[tuple[int, int], dict[int, int]] = {}
    for group in (group for groups in layout.rank_groups for group in groups):
        if group.slots[0].is_partial:
            tables.setdefault(_key_of(group), {}).update({slot.feature: slot.shard.table for slot in group.slots})
    return [_cut(layout, key, tables[key]) for key in sorted(tables)]


def _cut(layout: Layout, key: tuple[int, int], tables: dict[int, int]) -> Cut:
    features = tuple(sorted(tables))
    is_stored = layout.shardings[tables[features[0]]].rule.is_stored
    return Cut(key, tuple(tables[feature] for feature in features), features, is_stored)
