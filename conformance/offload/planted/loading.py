"""Faults in where a load leaves states, what it refuses, and what it leaves behind."""

from __future__ import annotations

from typing import Any

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"
LOADING = "twinproof.offload.plan"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _remembers_all(original: Any, plan: Any, param: Any, group: Any) -> Any:
    before = dict(plan._foreseen.get(param, {}))
    tensors = original(plan, param, group)
    plan._foreseen[param].update(before)
    return tensors


def _through_the_device(original: Any, *arguments: Any, moves: bool) -> Any:
    return original(*arguments, moves=False)


def _buffers_in_state(original: Any, offloader: Any) -> Any:
    for state in offloader.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg_offload_buffer"] = state["exp_avg"]
    return original(offloader)


PLANTED = (
    _bug(
        "loaded_states_left_on_the_host",
        "What does not move stays where the file left it (NeMo-RL #3544).",
        ("OPT-075",),
        swap(f"{LOADING}:lies_on_device", lambda optimizer, group, name: False),
    ),
    _bug(
        "old_places_kept",
        "Places of states that a load took away are kept.",
        ("OPT-054",),
        wrap(f"{LOADING}:MovePlan.foresee", _remembers_all),
    ),
    _bug(
        "buffers_in_the_state",
        "Host buffers are kept inside of the optimizer's state (DeepSpeed).",
        ("OPT-055",),
        wrap(f"{BASE}.snapshot", _buffers_in_state),
    ),
    _bug(
        "incomplete_states_loaded",
        "States that are missing are noticed in the next step.",
        ("OPT-051",),
        swap(f"{LOADING}:_check_state", lambda *_: None),
    ),
    _bug(
        "loaded_through_the_device",
        "A load brings everything to the device first (Megatron #4638).",
        ("OPT-082",),
        wrap(f"{LOADING}:_settled", _through_the_device),
    ),
    _bug(
        "counts_left_as_numbers",
        "A loaded step count that is a number stays one, which adding to it does not change.",
        ("OPT-246",),
        swap(f"{LOADING}:make_counters", lambda optimizer: None),
    ),
)
