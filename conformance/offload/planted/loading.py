"""Faults that ``test_loading`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-075", at="twinproof.offload.driver:lies_on_device")
def loaded_states_left_on_the_host(original: Any, optimizer: Any, group: Any, name: Any) -> Any:
    """Loaded states that are not offloaded stay in host memory (NeMo-RL #3544)."""
    return False


@fault(kills="OPT-054", at="twinproof.offload.driver:MovePlan.foresee")
def old_places_kept(original: Any, plan: Any, param: Any, *given: Any) -> Any:
    """The layout keeps places for states that a load has removed."""
    before = dict(plan._foreseen.get(param, {}))
    tensors = original(plan, param, *given)
    plan._foreseen[param].update(before)
    return tensors


@fault(kills="OPT-055", at="twinproof.offload.offloader:OptimizerStateOffloader.snapshot")
def buffers_in_the_state(original: Any, offloader: Any) -> Any:
    """Host buffers are kept inside of the optimizer's state (DeepSpeed)."""
    for state in offloader.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg_offload_buffer"] = state["exp_avg"]
    return original(offloader)


@fault(kills="OPT-051", at="twinproof.offload.driver:_check_state")
def incomplete_states_loaded(original: Any, *_: Any) -> Any:
    """A load accepts incomplete states, and the next step fails."""


@fault(kills="OPT-082", at="twinproof.offload.driver:_settled")
def loaded_through_the_device(original: Any, *arguments: Any, moves: bool) -> Any:
    """A load brings everything to the device first (Megatron #4638)."""
    return original(*arguments, moves=False)


@fault(kills="OPT-246", at="twinproof.offload.driver:make_counters")
def counts_left_as_numbers(original: Any, optimizer: Any) -> Any:
    """A loaded step count that is a number stays one, which adding to it does not change."""


@fault(kills="OPT-088", at="twinproof.offload.offloader:load_states")
def loaded_options_merged(original: Any, plan: Any, state_dict: Any) -> None:
    """A load keeps options that the saved groups do not have."""
    before = [dict(group) for group in plan.optimizer.param_groups]
    original(plan, state_dict)
    for group, old in zip(plan.optimizer.param_groups, before, strict=True):
        group.update({key: value for key, value in old.items() if key not in group})


listed_twice_loaded_once = patched(
    "A parameter that is listed twice loses its states at the second place.",
    mutated("twinproof.offload.driver:check_states", "number not in states", "False"),
    kills="OPT-368",
)

names_go_with_a_load = patched(
    "A load of states without names takes the names of the optimizer's parameters away.",
    mutated("twinproof.offload.driver:_take_over", ', "param_names"}', "}"),
    kills="OPT-435",
)


@fault(kills="OPT-441", at="twinproof.offload.driver:_check_form")
def forms_unchecked(original: Any, state_dict: Any) -> None:
    """What is no state dict fails somewhere inside, by an error of Python's."""


numbers_for_moments = patched(
    "A moment that is no tensor is loaded, and fails once it moves.",
    mutated(
        "twinproof.offload.driver:_check_state",
        "if name in foreseen and not isinstance(value, torch.Tensor):",
        "if name in foreseen and isinstance(value, str):",
    ),
    kills="OPT-441",
)

own_states_refused = patched(
    "States of no parameter are refused, also those that the optimizer has itself.",
    mutated("twinproof.offload.driver:_is_own", "not plan.is_separable or key in plan.optimizer.state", "False"),
    kills="OPT-442",
)

own_states_dropped = patched(
    "States of no parameter are passed over by a load.",
    mutated(
        "twinproof.offload.driver:_take_over",
        "for key, own in states.items() if",
        "for key, own in () if",
    ),
    kills="OPT-442",
)

own_states_shared = patched(
    "States of no parameter are those of the state dict themselves.",
    mutated("twinproof.offload.driver:_take_over", "key: copied(own)", "key: own"),
    kills="OPT-442",
)


empty_groups_refused = patched(
    "A saved group's list of parameters is taken for missing where it is empty.",
    mutated(
        "twinproof.offload.driver:_check_form",
        'isinstance(group.get("params"), (list, tuple))',
        'group.get("params")',
    ),
    kills="OPT-495",
)

empty_groups_passed_over = patched(
    "Groups of no parameters are not compared.",
    mutated(
        "twinproof.offload.driver:check_states",
        "if ours != theirs:",
        "if [*filter(None, ours)] != [*filter(None, theirs)]:",
    ),
    kills="OPT-495",
)

options_of_empty_groups_stay = patched(
    "A load leaves the options of groups without parameters as they are.",
    mutated(
        "twinproof.offload.driver:_take_over",
        "group.update(options)",
        "group.update(options if group['params'] else {})",
    ),
    kills="OPT-495",
)


entries_made_by_looking = patched(
    "Placing scalars after a load makes an empty entry for every parameter without states.",
    mutated("twinproof.offload.driver:place_scalars", "optimizer.state.get(param, {})", "optimizer.state[param]"),
    kills="OPT-498",
)

entries_made_by_a_load = patched(
    "A load makes an entry for a parameter without states.",
    mutated("twinproof.offload.driver:_take_over", "if states[param]:", "if param in states:"),
    kills="OPT-498",
)

elements_counted = patched(
    "A loaded state is compared with its parameter by the number of elements.",
    mutated(
        "twinproof.offload.driver:_check_state",
        "tuple(local_of(value).shape) != expected",
        "local_of(value).numel() != functools.reduce(int.__mul__, expected, 1)",
    ),
    kills="OPT-499",
)

elements_of_masters_counted = patched(
    "Loaded masters are compared by their number of elements.",
    mutated(
        "twinproof.offload.states:MasterWeights.load",
        "[tuple(v.shape) for v in given], [tuple(m.shape) for m in self.pairs]",
        "[v.numel() for v in given], [m.numel() for m in self.pairs]",
    ),
    kills="OPT-499",
)

states_of_nothing_unchecked = patched(
    "A state of a parameter without elements is loaded in any shape.",
    mutated("twinproof.offload.driver:_check_state", "if not state:", "if not state or not local_of(param).numel():"),
    kills="OPT-499",
)
