"""Faults that ``test_loaded_parts`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_CHECK = "twinproof.kvstore.deltas:check_part"
_COVERS = "twinproof.kvstore.deltas:LoadedPart.covers"
_JOINED = "twinproof.kvstore.deltas:LoadedPart.joined"
_AFTER = "twinproof.kvstore.deltas:part_after"

deltas_of_any_buckets = patched(
    "A delta is taken for buckets that its base was not loaded for.",
    mutated(_CHECK, "not held.covers(asked)", "False"),
    kills="KV-431",
)
last_part_alone = patched(
    "Of full loads of one save for several ranges the last one alone counts.",
    mutated(_AFTER, "held.joined(asked)", "asked"),
    kills="KV-431",
)
gaps_are_loaded = patched(
    "Of full loads of one save for several ranges all that lies between counts as loaded.",
    mutated(_JOINED, "begin <= ranges[-1][1]", "True"),
    kills="KV-431",
)

deltas_of_any_states = patched(
    "A delta is taken with states where its base was loaded without.",
    mutated(_CHECK, "held.weights_only and not asked.weights_only", "False"),
    kills="KV-434",
)
states_of_no_optimizer = patched(
    "Rows without states count as loaded without them.",
    mutated("twinproof.kvstore.disk:_part", " and bool(store.layout(table).state_slots)", ""),
    kills="KV-434",
)
without_states_for_ever = patched(
    "A table that was once loaded without states counts so after a full load with them.",
    mutated(_AFTER, "held is None or name != store.fingerprints.loaded(store, table)", "held is None"),
    mutated(_JOINED, "self.weights_only != other.weights_only or other.covers(self)", "False"),
    kills="KV-434",
)

nothing_is_something = patched(
    "A delta of nothing is loaded only where one with rows would be.",
    mutated(_CHECK, " or _is_idle(store, saved, table)", ""),
    kills="KV-437",
)
nothing_narrows = patched(
    "A delta of nothing leaves the buckets and states that it was loaded for.",
    mutated(_AFTER, "return held\n", "return asked\n"),
    kills="KV-437",
)
nothing_is_counted_together = patched(
    "A delta of nothing counts together with its base as full loads do.",
    mutated(_AFTER, "if _is_idle(store, saved, table):", "if False:"),
    kills="KV-437",
)

ranges_of_any_buckets = patched(
    "Buckets of a delta are looked for among those of its base by their numbers, whatever ids they have.",
    mutated(_COVERS, "self.buckets == other.buckets and all(", "all("),
    kills="KV-438",
)
whole_bases_do_not_count = patched(
    "A base that was loaded whole takes no delta of other buckets.",
    mutated(_COVERS, " or self.is_whole", ""),
    kills="KV-438",
)
ranges_side_by_side = patched(
    "Ranges of full loads that lie side by side stay two, and are never the whole.",
    mutated(_JOINED, "begin <= ranges[-1][1]", "begin < ranges[-1][1]"),
    kills="KV-438",
)

deltas_of_any_part = patched(
    "A delta of a part of what was loaded goes for one of the whole.",
    mutated("twinproof.kvstore.deltas:_held_by_all", "if len(parts) == len(by_rank) else None", "if False else None"),
    kills="KV-450",
)
part_of_each_rank = patched(
    "Parts of ranks do not count together.",
    mutated("twinproof.kvstore.deltas:_held_by_all", "reduce(LoadedPart.joined, parts)", "parts[0]"),
    kills="KV-450",
)
parts_hide_full_saves = patched(
    "A part that was loaded hides the full save that was made at the same mark.",
    mutated("twinproof.kvstore.deltas:_held_by_all", "lacking and not held", "lacking"),
    kills="KV-450",
)

pieces_have_no_name = patched(
    "A table that several loads have filled has no name.",
    mutated("twinproof.kvstore.deltas:note_load", "sizes.get(table, 0) if name in", "0 if name in"),
    kills="KV-453",
)
rows_of_others_are_named = patched(
    "Whatever was there before a load is taken for rows of the save.",
    mutated(
        "twinproof.kvstore.deltas:note_load",
        "sizes.get(table, 0) if name in store.fingerprints.at(mark, table) else 0",
        "sizes.get(table, 0)",
    ),
    kills="KV-453",
)

_LOAD = "twinproof.kvstore.disk:StoreFiles.load"

nothing_is_a_base_beside_others = patched(
    "A load for no bucket makes the empty table a base beside others.",
    mutated("twinproof.kvstore.deltas:_held_by_all", "tuple(sorted(held)) or ", "tuple(sorted(held)) + "),
    kills="KV-464",
    of="refimpl",
)
nothing_has_a_name = patched(
    "A load for no bucket makes rows those of the save of which nothing was loaded.",
    mutated(_LOAD, "clear or asked[table].ranges or not store.size(table)", "True"),
    kills="KV-464",
)
empty_tables_have_none = patched(
    "A load for no bucket gives a table without rows no name.",
    mutated(_LOAD, " or not store.size(table)", ""),
    kills="KV-464",
)
nothing_needs_a_base = patched(
    "A delta is refused for no bucket, where rows have another base.",
    mutated(_LOAD, "if table in named_anew:", "if True:"),
    kills="KV-471",
)
parts_of_any_buckets_join = patched(
    "Ranges of other buckets are counted together.",
    mutated(_JOINED, "if self.buckets != other.buckets:", "if False:"),
    kills="KV-475",
)
first_part_of_two = patched(
    "Of parts that cannot be counted together the earlier one counts.",
    mutated(
        _JOINED,
        "if self.buckets != other.buckets:\n        return other",
        "if self.buckets != other.buckets:\n        return self",
    ),
    kills="KV-475",
)
