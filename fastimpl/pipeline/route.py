"""Which bags go to which rank: a pure function of the plan, and the arithmetic of one exchange on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinproof.pipeline.sharding import KINDS, Group, Layout

__all__ = ["Cut", "Placed", "Route"]


@dataclass(frozen=True)
class Cut:
    """Features whose bags are cut by rank in one pass: all row-wise ones, or all whose rows lie in the same buckets.

    Attributes:
        table: one of those that are cut.
        features: whose bags are in the pass; what is not of a cut table is sent nowhere.
        block_rows: of each feature's blocks; None where ids are dealt by bucket.
    """

    key: tuple[int, int]
    table: int
    features: tuple[int, ...]
    block_rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Placed:
    """A route in the memory of one device: ``order`` int64, and int64 rows of a block by the key of each cut."""

    order: torch.Tensor
    block_rows: dict[tuple[int, int], torch.Tensor]


# The size of the blocks of a feature that is not cut.
_WHOLE = 0


class Route:
    """Segments are bags of one feature: first every feature whole, then each cut's features for each rank.

    Args:
        layout: of the tables.
        cuts_all: whether a cut goes over all features, where ids are checked later: to take some out the host would
            wait to know how many ids they have.

    Attributes:
        cuts_all: as given.
        cuts: in the order of their segments.
        order: the segments that are sent, by receiving rank, then in the order of that rank's slots.
        sends_all_in_order: whether these are all segments as they stand, so that nothing moves.
        slot_counts: segments that each rank receives from each.
        segment_count: segments of a batch.
        takes_some: whether some features are looked up in replicated tables, out of this rank's own bags: the host has
            to know where these are.
    """

    def __init__(self, layout: Layout, *, cuts_all: bool = False) -> None:
        self.cuts, self.cuts_all = _find_cuts(layout, cuts_all=cuts_all), cuts_all
        replicated = set(layout.replicated)
        own = sum(table in replicated for table in layout.feature_tables)
        self.takes_some = 0 < own < len(layout.feature_tables)
        self.slot_counts = [sum(len(group.slots) for group in groups) for groups in layout.rank_groups]
        begins, self.segment_count = dict[tuple[int, int], int](), len(layout.feature_tables)
        for cut in self.cuts:
            begins[cut.key] = self.segment_count
            self.segment_count += len(cut.features) * layout.world_size
        places = {cut.key: {feature: place for place, feature in enumerate(cut.features)} for cut in self.cuts}
        first_buckets = _first_buckets(layout)
        segments = []
        for rank, groups in enumerate(layout.rank_groups):
            for group in groups:
                key = _key_of(group, first_buckets)
                for slot in group.slots:
                    if key not in begins:
                        segments.append(slot.feature)
                        continue
                    mine = places[key]
                    segments.append(begins[key] + rank * len(mine) + mine[slot.feature])
        self.order = segments
        self.sends_all_in_order = segments == list(range(self.segment_count))
        self._block_rows = {cut.key: cut.block_rows for cut in self.cuts if cut.block_rows is not None}
        self._placed: dict[torch.device, Placed] = {}

    def on(self, device: torch.device) -> Placed:
        """The same as tensors of a device, which are sent there once: each time would be a copy that is waited for."""
        if device not in self._placed:
            blocks = {key: torch.tensor(rows, device=device) for key, rows in self._block_rows.items()}
            order = torch.tensor(self.order, dtype=torch.int64, device=device)
            self._placed[device] = Placed(order, blocks)
        return self._placed[device]


def _first_buckets(layout: Layout) -> list[int]:
    """Of each table the first one whose rows lie in the same buckets."""
    first: dict[Any, int] = {}
    return [first.setdefault(sharding.buckets, table) for table, sharding in enumerate(layout.shardings)]


def _key_of(group: Group, first_buckets: Sequence[int]) -> tuple[int, int]:
    """Equal for the groups of all ranks that look up parts of tables which are cut in one pass."""
    shard = group.shards[0]
    kind, _ = KINDS[shard.kind].lookup_of(shard)
    return kind, first_buckets[shard.table]


def _find_cuts(layout: Layout, *, cuts_all: bool) -> list[Cut]:
    first_buckets = _first_buckets(layout)
    tables: dict[tuple[int, int], dict[int, int]] = {}
    for group in (group for groups in layout.rank_groups for group in groups):
        if group.slots[0].is_partial:
            found = tables.setdefault(_key_of(group, first_buckets), {})
            found.update({slot.feature: slot.shard.table for slot in group.slots})
    return [_cut(layout, key, tables[key], cuts_all=cuts_all) for key in sorted(tables)]


def _cut(layout: Layout, key: tuple[int, int], tables: dict[int, int], *, cuts_all: bool) -> Cut:
    features = tuple(range(len(layout.feature_tables)) if cuts_all else sorted(tables))
    table = tables[min(tables)]
    if layout.shardings[table].rule.is_stored:
        return Cut(key, table, features, None)
    blocks = tuple(layout.block_rows(tables[feature]) if feature in tables else _WHOLE for feature in features)
    return Cut(key, table, features, blocks)
