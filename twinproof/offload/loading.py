"""Takes a state dict over: every value unrounded, and each where the optimizer itself would have made it.

Prevents float32 moments that a load rounds to bf16, half-done loads, and states that a load leaves on the host beside
a model on a device (facts/offload.md 3.11, 3.23).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from twinproof.errors import PlanError
from twinproof.offload.states import Place, check_plain, expected_states, is_movable, lies_on_device, local_of, view_of

__all__ = ["check_saved", "check_states", "copied", "load_states"]


def copied(value: Any) -> Any:
    """A copy of its own memory; deepcopy would copy the whole block behind every view."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def check_saved(_: Any, state_dict: dict[str, Any]) -> None:
    """Refuse what cannot be moved, before torch's own load changes anything. Raises UnsupportedError."""
    for number, state in state_dict["state"].items():
        for name, value in state.items() if isinstance(state, dict) else ():
            check_plain(value, f"state {name} of parameter {number}")


def check_states(offloader: Any, state_dict: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """The states by our parameters.

    Raises:
        PlanError: other groups, parameters, states or shapes than the optimizer has. UnsupportedError: see
            ``check_saved``.
    """
    check_saved(offloader.optimizer, state_dict)
    optimizer, saved = offloader.optimizer, state_dict["param_groups"]
    ours, theirs = [len(group["params"]) for group in optimizer.param_groups], [len(group["params"]) for group in saved]
    if ours != theirs:
        raise PlanError("other parameter groups", got=theirs, expected=ours, where="param_groups")
    found: dict[torch.Tensor, dict[str, Any]] = {}
    states = dict(state_dict["state"])
    for group, other in zip(optimizer.param_groups, saved, strict=True):
        options = {key: value for key, value in {**group, **other}.items() if key != "params"}
        for param, number in zip(group["params"], other["params"], strict=True):
            found[param] = states.pop(number, {})
            _check_state(offloader, param, found[param], options, f"parameter {number}")
    if states:
        raise PlanError("states of no parameter", got=sorted(states), expected="numbers of param_groups", where="state")
    return found


def _check_state(
    offloader: Any, param: torch.Tensor, state: dict[str, Any], options: dict[str, Any], where: str
) -> None:
    # A parameter that never had a gradient has no state at all.
    if not state or not local_of(param).numel():
        return
    foreseen: dict[str, tuple[int, ...]] = offloader.foreseen(param)
    if any(name not in state for name in foreseen):
        # The saved options may be another variant's, without amsgrad for instance.
        foreseen = {name: tuple(t.shape) for name, t in expected_states(offloader.optimizer, param, options).items()}
    missing = [name for name in foreseen if name not in state]
    if missing:
        raise PlanError("states are missing", got=sorted(state), expected=sorted(foreseen), where=where)
    for name, value in state.items():
        # A state that was not foreseen, another variant's moment, has the form of its parameter, unless it is known.
        known = offloader.optimizer.state.get(param, {}).get(name) if not offloader.is_separable else None
        if not offloader.is_separable and not isinstance(known, torch.Tensor):
            continue
        form = param if known is None else known
        expected = foreseen.get(name, tuple(local_of(form).shape))
        if is_movable(value) and tuple(local_of(value).shape) != expected:
            got = tuple(local_of(value).shape)
            raise PlanError("a state of another shape", got=got, expected=expected, where=f"{name} of {where}")


def load_states(offloader: Any, state_dict: dict[str, Any]) -> None:
    """Replace options and states by copies of the saved ones.

    Raises:
        PlanError: see ``check_states``; nothing has changed then.
    """
    states = check_states(offloader, state_dict)
    optimizer, selected = offloader.optimizer, {bundle.param for bundle in offloader.bundles}
    for group, other in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {key: copied(value) for key, value in other.items() if key != "params"}
        # As with torch's load, what the saved group does not have goes: a scheduler's initial_lr, for instance.
        for key in group.keys() - options.keys() - optimizer.defaults.keys() - {"params"}:
            del group[key]
        group.update(options)
        for param in group["params"]:
            optimizer.state.pop(param, None)
            if states[param]:
                optimizer.state[param] = {
                    name: _settled(offloader, group, name, value, moves=param in selected)
                    for name, value in states[param].items()
                }
    make_counters(optimizer)


def make_counters(optimizer: Any) -> None:
    """As torch's load ends: counters that are numbers, in old checkpoints for instance, become what it counts with."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _settled(offloader: Any, group: dict[str, Any], name: str, value: Any, *, moves: bool) -> Any:
    """A copy of a loaded state, where it belongs; what moves is on its way to host memory anyway."""
    found = copied(value)
    if not isinstance(value, torch.Tensor) or (moves and is_movable(value)):
        return found
    if not lies_on_device(offloader.optimizer, group, name):
        return found.cpu()
    source = local_of(found)
    # An empty tensor of the same form says which strides a dense one has.
    strides = tuple(torch.empty_like(source, device="meta").stride())
    place = Place(0, source.dtype, tuple(source.shape), strides)
    here = view_of(offloader.engine.device_empty(max(place.size_bytes, source.element_size())), place, 0)
    if source.numel():
        offloader.engine.copy(here, source)
        offloader.wait_for_copy()
    if source is found:
        return here
    found._local_tensor = here
    return found
