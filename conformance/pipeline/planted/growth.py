"""Faults that ``test_growth`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-710", at="twinproof.pipeline.sharding:Layout.features_of_table")
def features_looked_for(original: Any, layout: Any, table: int) -> list[int]:
    """The features of a table are looked for among those of all tables, for each part of it."""
    found = []
    for feature, index in enumerate(layout.feature_tables):
        if index == table:
            found.append(feature)
    return found


@fault(kills="PIPE-710", at="twinproof.pipeline.sharding:Layout._groups_of")
def parts_looked_for(original: Any, layout: Any, shards: Any) -> Any:
    """The parts of a rank are looked for among those of all ranks."""
    mine = []
    for shard in layout.shards:
        if shards and shard.rank == shards[0].rank:
            mine.append(shard)
    return original(layout, mine)


places_looked_for = patched(
    "The place of a feature in a cut is looked for among all.",
    mutated(
        "fastimpl.pipeline.route:Route.__init__",
        "{feature: place for place, feature in enumerate(cut.features)}",
        "{feature: cut.features.index(feature) for feature in cut.features}",
    ),
    kills="PIPE-710",
)
trained_listed_for_each = patched(
    "What the optimizer trains is listed for each module that reads parameters.",
    mutated("twinproof.pipeline.driver:Pipeline.is_late", "known.setdefault(sizes, set())", "set()"),
    kills="PIPE-711",
)
