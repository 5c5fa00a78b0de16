"""Faults that ``test_ranks`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

rows_of_any_layout_saved = patched(
    "Ranks save rows of any layout as the first rank's.",
    mutated("twinproof.kvstore.disk:_parts", "store.options.rows,", "[*store.options.rows],"),
    kills="KV-350",
)
tracked_by_some = patched(
    "A save names contents of which some ranks know no changes.",
    mutated("twinproof.kvstore.disk:_parts", "store.options.track_changes}", "None}"),
    kills="KV-350",
)
views_of_any_layout = patched(
    "Ranks make views of rows of any layout.",
    mutated("twinproof.kvstore.statedict:state_dict", "[source.layout(table) for table in names]", "[]"),
    kills="KV-350",
)
rank_outside_of_all = patched(
    "A process that is not of the group is a rank of it.",
    mutated("twinproof.kvstore.statedict:rank_and_world", "if rank < 0:", "if False:"),
    kills="KV-360",
)
any_group_asked = patched(
    "What is no group is asked for its ranks.",
    mutated("twinproof.kvstore.statedict:rank_and_world", "if _is_group(process_group)", "if True"),
    kills="KV-360",
)
