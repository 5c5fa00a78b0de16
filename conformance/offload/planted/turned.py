"""Faults that ``test_turned`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

stateless_for_ever = patched(
    "What had no states when it was first planned for never has any.",
    mutated("twinproof.offload.driver:MovePlan._adopt_listed", "not (tensors and param in stateless)", "param.is_leaf"),
    kills="OPT-350",
)

places_after_the_step = patched(
    "States that an option brings get no places beside masters.",
    mutated("twinproof.offload.driver:MovePlan.refit", "not foreseen.keys() <= kept", "foreseen.keys() is kept"),
    kills="OPT-351",
)

nothing_moves = patched(
    "States without elements are taken for some that move.",
    mutated("twinproof.offload.states:is_movable", "numel() > 0", "numel() >= 0"),
    kills="OPT-352",
)

places_of_nothing = patched(
    "Places stay when their states are taken away.",
    mutated("twinproof.offload.driver:MovePlan.refit", "len(kept) < len", "len(kept) > len"),
    kills="OPT-354",
)

rows_told_by_their_elements = patched(
    "States that fill what lies between them are taken for rows of one tensor, whatever order their dimensions have.",
    mutated(
        "fastimpl.offload.layout:_Run.views",
        "pitch == shape[0] * strides[0]",
        "pitch == torch.Size(shape).numel()",
    ),
    kills="OPT-519",
    of="fastimpl",
)
