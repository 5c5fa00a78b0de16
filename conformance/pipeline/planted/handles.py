"""Faults that ``test_handles`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_HANDLE = "twinproof.pipeline.config:InBackwardOptimizer"
_PARTS = "twinproof.pipeline.sharded:TableParts"


@fault(kills="PIPE-740", at=f"{_HANDLE}.load_state_dict")
def states_are_left(original: Any, handle: Any, state: Any) -> None:
    """The optimizer in the backward loads its learning rate and step alone."""
    given = handle.state_dict()["state"] if handle._holder is not None else {}
    original(handle, {**state, "state": given})


states_of_one_table = patched(
    "State dicts of the optimizer have the states of the first table.",
    mutated(
        f"{_PARTS}.named_states", "in self.views(states=True).items()", "in [*self.views(states=True).items()][:1]"
    ),
    kills="PIPE-740",
)
handle_of_the_original = patched(
    "The optimizer of a copied collection has no tables.",
    mutated(f"{_PARTS}.__setstate__", "self._optimizer.bind(self)", "pass"),
    kills="PIPE-740",
)
no_states_pass = patched(
    "A state that is not in the state dict is left as it is.",
    mutated(f"{_PARTS}.load_named_states", "given = _flat(states)", "given = {**views, **_flat(states)}"),
    kills="PIPE-741",
)
others_pass = patched(
    "A state of another table is passed over.",
    mutated(f"{_PARTS}.load_named_states", "if others:", "if False:"),
    kills="PIPE-741",
)
anybody_takes_states = patched(
    "A handle without tables keeps the states that it is given.",
    mutated(f"{_HANDLE}.__setstate__", 'elif state["state"]:', "elif False:"),
    kills="PIPE-742",
)


@fault(kills="PIPE-742", at=f"{_HANDLE}.state_dict")
def none_of_deleted_tables(original: Any, handle: Any) -> Any:
    """The optimizer of a collection that was deleted has no states."""
    if handle._holder is not None and handle._holder() is None:
        handle._holder = None
    return original(handle)


second_states_are_the_first = patched(
    "Every state of a table is saved and loaded as its first.",
    mutated(f"{_PARTS}.views", "held.get(state), place", 'held.get("momentum1"), place'),
    kills="PIPE-743",
)
bare_errors_of_names = patched(
    "Torch misses the names of tables among the parameters of a model.",
    mutated(f"{_HANDLE}._check_names", "optim is self and", "False and"),
    kills="PIPE-795",
)
names_of_models_are_refused = patched(
    "Whoever asks for a model's state dict by names gets none that a hook makes.",
    mutated(f"{_HANDLE}._check_names", "optim is self and", "True and"),
    kills="PIPE-795",
)
loads_by_names_go_on = patched(
    "A load by names of parameters goes on to torch's own error.",
    mutated(f"{_HANDLE}.load_state_dict", "self._check_names()", "pass"),
    kills="PIPE-795",
)
