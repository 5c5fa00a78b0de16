"""Faults that ``test_seldom_training`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_NATIVE = "twinproof.checkpoint.native"
_STATES = "twinproof.checkpoint.optimizer_states"

every_group_has_a_rate = patched(
    "An optimizer without a learning rate cannot be restored.",
    mutated(f"{_STATES}:_fill", ' for group in groups if "lr" in group]', " for group in groups]"),
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
        f"{_STATES}:_states_of",
        "if len(params) != len(names):\n        params = [None] * len(names)",
        "names = names[: len(params)]",
    ),
    kills="CKPT-791",
)
joint_parameters_need_no_states = patched(
    "Joint parameters whose optimizer has no states are passed over.",
    mutated(f"{_STATES}:OptimizerStates.targets", "(param is None or param.requires_grad)", "param is not None"),
    kills="CKPT-791",
)
joint_parameters_forgotten = patched(
    "Joint parameters of which the checkpoint has no states are passed over.",
    mutated(
        f"{_STATES}:OptimizerStates.targets", "left.update(keys if param is not None else ())", "left.update(keys)"
    ),
    kills="CKPT-791",
)
memory_for_anything = patched(
    "A target without memory gets memory of whatever was saved.",
    mutated(
        "twinproof.checkpoint.plan:with_memory",
        "isinstance(value, Unfilled) and isinstance(saved.get(name), TensorStorageMetadata)",
        "isinstance(value, Unfilled)",
    ),
    kills="CKPT-792",
)
other_keys_keep_what_they_had = patched(
    "What is no tensor is loaded beside the key that is no text, whose value stays as it was.",
    mutated(f"{_NATIVE}:load_native", 'return first, told, keys_as_text(told, "")', "return first, told, told"),
    kills="CKPT-808",
)
keys_stay_text = patched(
    "What was loaded under keys that are no text is handed out under their text.",
    mutated(f"{_NATIVE}:load_native", "with_own_keys(told, asked)", "asked"),
    kills="CKPT-808",
)
one_of_two_keys = patched(
    "Of two keys of one text the last one is loaded, without a word.",
    mutated(f"{_NATIVE}:keys_as_text", "if len(made) < len(value):", "if False:"),
    kills="CKPT-808",
)
objects_before_the_model = patched(
    "Objects are given what they said before the model is, which then undoes it.",
    mutated(
        f"{_NATIVE}:load_native",
        "loaded = together(taken, group)\n        together(lambda: give_back(state, loaded), group)",
        "together(lambda: give_back(state, with_own_keys(told, asked)), group)\n"
        "        loaded = together(taken, group)",
    ),
    kills="CKPT-846",
)
wrapped_names_left_to_torch = patched(
    "Torch alone gives a wrapped model what was loaded, and says that tables and rows are missing.",
    mutated(f"{_NATIVE}:set_model", "if any(isinstance(each, renaming) for each in model.modules()):", "if False:"),
    kills="CKPT-847",
)
renamed_in_any_order = patched(
    "Names of a wrapped model are told apart in another order than torch's.",
    mutated(f"{_NATIVE}:set_model", "[n for n in own if n not in given]", "sorted(n for n in own if n not in given)"),
    kills="CKPT-847",
)
containers_are_plain = patched(
    "An optimizer that names its states itself is asked as one of torch's, which has no names.",
    mutated(f"{_STATES}:optimizer_states", "speaks == [True]", "not speaks"),
    kills="CKPT-854",
)
containers_beside_others = patched(
    "An optimizer that names its states itself is taken beside others, as one of torch's.",
    mutated(f"{_STATES}:optimizer_states", "if any(speaks)", "if all(speaks)"),
    kills="CKPT-854",
)
groups_are_missed = patched(
    "An optimizer that says nothing of its groups ends in the error of a dictionary.",
    mutated(f"{_STATES}:_flat", '("state", "param_groups")', '("state",)'),
    kills="CKPT-854",
)
