"""Which bags go to which rank: a pure function of the plan, and the arithmetic of one exchange on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinproof.pipeline.sharding import KINDS, Group, Layout

__all__ = ["Cut", "Placed", "Route"]


@dataclass(frozen=True)
class Cut:
    """Features whose bags are cut by rank in one pass: all row-wise ones, or those of one key-value table."""

    key: tuple[int, int]
    tables: tuple[int, ...]
    features: tuple[int, ...]
    is_stored: bool


@dataclass(frozen=True)
class Placed:
    """A route in the memory of one device: ``order`` int64, and int64 rows of a block by the key of each cut."""

    order: torch.Tensor
    block_rows: dict[tuple[int, int], torch.Tensor]


class Route:
    """Segments are bags of one feature: first every feature whole, then each cut's features for each rank.

    Attributes:
        cuts: in the order of their segments.
        order: the segments that are sent, by receiving rank, then in the order of that rank's slots.
        sends_all_in_order: whether these are all segments as they stand, so that nothing moves.
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
        self.order = segments
        self.sends_all_in_order = segments == list(range(self.segment_count))
        self._block_rows = {
            cut.key: [layout.block_rows(table) for table in cut.tables] for cut in self.cuts if not cut.is_stored
        }
        self._placed: dict[torch.device, Placed] = {}

    def on(self, device: torch.device) -> Placed:
        """The same as tensors of a device, which are sent there once: each time would be a copy that is waited for."""
        if device not in self._placed:
            blocks = {key: torch.tensor(rows, device=device) for key, rows in self._block_rows.items()}
            order = torch.tensor(self.order, dtype=torch.int64, device=device)
            self._placed[device] = Placed(order, blocks)
        return self._placed[device]


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
