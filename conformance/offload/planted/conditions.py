"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

fraction_of_any_kind = patched(
    "What is no number is compared with zero and one.",
    mutated(
        "twinproof.offload.offloader:_check_options",
        "isinstance(fraction, (int, float)) and 0 <= fraction",
        "0 <= fraction",
    ),
    kills="OPT-464",
)

choice_that_is_a_tensor = patched(
    "A tensor of a flag is taken for the flag.",
    mutated(
        "twinproof.offload.offloader:_check_fused_update",
        "isinstance(fused_update, torch.Tensor) or fused_update not in",
        "fused_update not in",
    ),
    kills="OPT-464",
)

flags_that_agree_refused = patched(
    "A flag that is false by both of its names is refused.",
    mutated("twinproof.offload.offloader:_either", "if not value and other:", "if not value:"),
    kills="OPT-465",
)

derived_class_unbound = patched(
    "A class that is derived from the offloader's has no transfers.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init_subclass__", "if transfers is not None:", "if True:"
    ),
    kills="OPT-466",
)
