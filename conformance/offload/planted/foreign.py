"""Faults that ``test_foreign`` must notice."""

from __future__ import annotations

from types import MethodType
from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills=("OPT-252", "OPT-260"), at="twinproof.offload.offloader:OptimizerStateOffloader._step_whole")
def cut_into_parts(original: Any, offloader: Any, arithmetic: Any) -> None:
    """An unknown optimizer is cut into parts."""
    groups = offloader.optimizer.param_groups
    offloader._bring_all()
    try:
        for group in groups:
            for param in group["params"]:
                offloader.optimizer.param_groups = [{**group, "params": [param]}]
                arithmetic()
    finally:
        offloader.optimizer.param_groups = groups
        if offloader.options.release == "at_offload":
            offloader.offload()


@fault(kills="OPT-257", at="twinproof.offload.driver:StepDriver._make")
def options_of_steps_lost(original: Any, driver: Any) -> Any:
    """A step passes on its closure and drops its other arguments."""
    made = original(driver)

    def step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        return made.__func__(optimizer, *arguments)

    return MethodType(step, driver.optimizer)


@fault(kills="OPT-253", at="twinproof.offload.driver:known_kind")
def subclass_unknown(original: Any, kind: type) -> None:
    """A subclass of a known optimizer is treated as unknown."""
    del kind


@fault(kills="OPT-258", at="twinproof.offload.driver:_check_state")
def shapes_of_params(original: Any, plan: Any, param: Any, state: Any, options: Any, where: str) -> None:
    """States of another shape than the parameter's are dropped."""
    was, plan.is_separable = plan.is_separable, True
    try:
        original(plan, param, state, options, where)
    except Exception:
        state.clear()
    finally:
        plan.is_separable = was


@fault(kills="OPT-256", at="twinproof.offload.driver:check_separate")
def shared_memory_parted(original: Any, *given: Any) -> Any:
    """States that share memory are moved apart."""


@fault(kills="OPT-254", at="twinproof.offload.offloader:unwrapped")
def masters_of_wrapper_stay(original: Any, given: Any) -> Any:
    """The masters of a wrapper stay on the device."""
    return original(given)[0], []


neighbours_refused = patched(
    "States that lie side by side count as states that share memory.",
    mutated("twinproof.offload.states:check_separate", "span.begin < other.end", "span.begin <= other.end"),
    kills="OPT-365",
)

parameter_not_said = patched(
    "States that share memory are refused without the parameter that has them.",
    mutated("twinproof.offload.states:check_separate", "where=f\"parameter {' and '.join(map(str, numbers))}\",", ""),
    kills="OPT-256",
)

known_by_name = patched(
    "An optimizer that has the name of one of torch's is taken for it.",
    mutated("twinproof.offload.driver:known_kind", "and base is getattr(torch.optim, base.__name__, None)", ""),
    kills="OPT-252",
)


own_parameter_not_looked_at = patched(
    "States that share memory with their parameter are moved.",
    mutated("twinproof.offload.states:check_separate", "state if span.name == _OWN else every", "state"),
    kills="OPT-395",
)

others_not_looked_at = patched(
    "Only states of one parameter are compared.",
    mutated(
        "twinproof.offload.states:check_separate",
        "if span.home == other.home and",
        "if span.number == other.number and span.home == other.home and",
    ),
    kills="OPT-395",
)

the_last_before_it_alone = patched(
    "A state is compared with what begins last before it, and not with what reaches furthest.",
    mutated(
        "twinproof.offload.states:check_separate",
        "every = max(every, span, key=lambda each: (each.home == span.home, each.end))",
        "every = span",
    ),
    kills="OPT-522",
)

parameters_in_one_piece_refused = patched(
    "Parameters that overlap in memory are refused as states are.",
    mutated("twinproof.offload.states:check_separate", "state if span.name == _OWN else every", "every"),
    kills="OPT-395",
)

containers_stepped_whole = patched(
    "An optimizer that has others inside is taken for one of its own arithmetic, and nothing moves.",
    mutated("twinproof.offload.driver:unwrapped", "if several is not None:", 'if several == "chained_optimizers":'),
    kills="OPT-255",
)

empty_places_for_optimizers = patched(
    "Where an optimizer has a place for others, it is taken for filled.",
    mutated(
        "twinproof.offload.driver:_has_optimizers",
        "isinstance(part, tuple) and part else",
        "isinstance(part, tuple) else",
    ),
    kills="OPT-255",
)
