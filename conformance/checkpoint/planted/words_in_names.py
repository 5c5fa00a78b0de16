"""Faults that ``test_words_in_names`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_NATIVE = "twinproof.checkpoint.native"
_STATES = "twinproof.checkpoint.optimizer_states"

prefix_taken_out_everywhere = patched(
    "The name of the optimizers is taken out of saved names wherever it stands.",
    mutated(f"{_NATIVE}:_below", "each.removeprefix(prefix)", "each.replace(prefix, '')"),
    kills="CKPT-740",
)
state_taken_out_everywhere = patched(
    "The word that begins names of states is taken out of them wherever it stands.",
    mutated(f"{_STATES}:_owner", "key.removeprefix(prefix)", "key.replace(prefix, '')"),
    kills="CKPT-740",
)
groups_taken_out_everywhere = patched(
    "The word that begins names of groups is taken out of them wherever it stands.",
    mutated(f"{_STATES}:_states_of", "name.removeprefix(GROUPS)", "name.replace(GROUPS, '')"),
    kills="CKPT-740",
)
weights_pass_for_states = patched(
    "What begins with the name of the optimizers is a state of theirs, though a parameter of the model has it.",
    mutated(f"{_NATIVE}:_below", " and each not in state", ""),
    kills="CKPT-745",
)
