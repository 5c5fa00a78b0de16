"""Faults that ``test_advice`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_ROWS = "twinproof.kvstore.rows"

what_was_asked_is_not_told = patched(
    "Rows without an optimizer are told as such, and not that their layout has one.",
    mutated(f"{_ROWS}:check_trained", "source.options.layouts[table].optimizer", "source.layout(table).optimizer"),
    kills="KV-484",
)
states_without_advice = patched(
    "A state that no row holds is told beside an empty list.",
    mutated(f"{_ROWS}:RowSource.slot", 'sorted(slots) or f"a state: {IN_ROW}"', "sorted(slots)"),
    kills="KV-484",
)
loads_without_advice = patched(
    "A load of states into rows without an optimizer expects the optimizer none.",
    mutated(f"{_ROWS}:check_convertible", "expected=expected", "expected=target.optimizer"),
    kills="KV-484",
)
buckets_without_a_cut = patched(
    "Ids of other buckets are told without who cuts them.",
    mutated(f"{_ROWS}:check_buckets", ", the end left out, {cut}", ""),
    kills="KV-485",
)
sizes_left_to_torch = patched(
    "A table of too many bytes is left to torch.",
    mutated("twinproof.pipeline.config:initial_weight", "if size_bytes >= 2**63:", "if False:"),
    kills="KV-486",
)
one_size_too_few = patched(
    "The largest table that torch takes is refused.",
    mutated("twinproof.pipeline.config:initial_weight", "if size_bytes >= 2**63:", "if size_bytes >= 2**63 - 4:"),
    kills="KV-486",
)
