"""Faults that ``test_parts_without_states`` must notice."""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import StateDictOptions

from conformance.harness import mutated, patched, swap

_NATIVE = "twinproof.checkpoint.native"
_STATES = "twinproof.checkpoint.optimizer_states"

states_required_of_each_part = patched(
    "A part without parameters ends a save as torch ends it.",
    swap(f"{_NATIVE}:_OR_NONE", StateDictOptions()),
    kills="CKPT-914",
)
nothing_given_to_torch = patched(
    "A part without parameters ends a load as torch ends it.",
    mutated(f"{_NATIVE}:set_model", "if not given:", "if False:"),
    kills="CKPT-914",
)
an_optimizer_for_each_part = patched(
    "A part that nobody trains needs an optimizer.",
    mutated(f"{_STATES}:OptimizerStates.__init__", "len(optimizers) < len(parts)", "False"),
    kills=("CKPT-914", "CKPT-915"),
)
states_required_of_each_optimizer = patched(
    "An optimizer without parameters ends a save as torch ends it.",
    mutated(f"{_STATES}:_flat", "if not params_of(optimizers):", "if False:"),
    kills="CKPT-915",
)
parts_taken_from_the_front = patched(
    "Optimizers are those of the first parts that have parameters.",
    mutated(
        f"{_STATES}:OptimizerStates.__init__",
        "any(param.requires_grad for param in part.parameters())]",
        "any(True for param in part.parameters())][: len(optimizers)]",
    ),
    kills="CKPT-915",
)
