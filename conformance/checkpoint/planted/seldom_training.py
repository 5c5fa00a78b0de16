"""Faults that ``test_seldom_training`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_NATIVE = "twinproof.checkpoint.native"

every_group_has_a_rate = patched(
    "An optimizer without a learning rate cannot be restored.",
    mutated(f"{_NATIVE}:_fill", ' for group in groups if "lr" in group]', " for group in groups]"),
    kills="CKPT-790",
)
anything_is_a_list = patched(
    "Whatever can be gone through once passes for a list of optimizers.",
    mutated(f"{_NATIVE}:_training", "isinstance(several, Sequence) and all(", "all("),
    kills="CKPT-790",
)
joint_parameters_are_one = patched(
    "Of parameters that are joined to one all but the first are left out.",
    mutated(
        f"{_NATIVE}:_states_of",
        "if len(params) != len(names):\n        params = [None] * len(names)",
        "names = names[: len(params)]",
    ),
    kills="CKPT-791",
)
joint_parameters_need_no_states = patched(
    "Joint parameters whose optimizer has no states are passed over.",
    mutated(f"{_NATIVE}:OptimizerStates.targets", "(param is None or param.requires_grad)", "param is not None"),
    kills="CKPT-791",
)
joint_parameters_forgotten = patched(
    "Joint parameters of which the checkpoint has no states are passed over.",
    mutated(
        f"{_NATIVE}:OptimizerStates.targets", "left.update(keys if param is not None else ())", "left.update(keys)"
    ),
    kills="CKPT-791",
)
memory_for_anything = patched(
    "A target without memory gets memory of whatever was saved.",
    mutated(
        "twinproof.checkpoint.plan:with_memory",
        "not isinstance(value, Unfilled) or not isinstance(saved, TensorStorageMetadata)",
        "not isinstance(value, Unfilled)",
    ),
    kills="CKPT-792",
)
