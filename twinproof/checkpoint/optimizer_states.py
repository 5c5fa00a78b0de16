"""Optimizers as one state of a checkpoint, by the names of the parameters that they step.

Prevents states that go by the place of a parameter, which another cut of the model or another order changes; and
states of parameters that no step has reached, which a load would have to make up.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from twinproof.errors import ConfigError, PlanError, TwinproofError, UnsupportedError

__all__ = ["GROUPS", "OptimizerStates", "State", "merged", "optimizer_states", "params_of"]

State = dict[str, Any]
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizerStates(Stateful):
    """Optimizers as one state whose names are those of the parameters, so that ranks may change between runs.

    A parameter that no step has reached has no states: none are saved, and a load leaves it without. Parts that are
    frozen, or have no parameters, need no optimizer.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        is_one_model = len(parts) == 1 and len(optimizers) > 0
        if not is_one_model and len(optimizers) < len(parts):
            parts = [part for part in parts if any(param.requires_grad for param in part.parameters())]
        if not is_one_model and len(parts) != len(optimizers):
            raise ConfigError(
                "each part of the model that is trained has one optimizer",
                got=len(optimizers),
                expected=len(parts),
                where="optimizers",
            )
        self.pairs = (
            [(parts[0], list(optimizers))]
            if is_one_model
            else [(part, [optimizer]) for part, optimizer in zip(parts, optimizers, strict=True)]
        )
        self._filled: list[torch.optim.Optimizer] = []

    def check_params(self) -> None:
        """Refuse parameters that are none of the model's, which no save could name, before one is made.

        An optimizer with a ``state_dict`` of its own is not judged: it may leave them out. Raises ConfigError.
        """
        for part, mine in self.pairs:
            plain = [each for each in mine if type(each).state_dict is torch.optim.Optimizer.state_dict]
            if foreign := _of_no_model(part, plain):
                raise foreign

    def state_dict(self) -> State:
        """The states that there are."""
        return merged(_flat(part, mine) for part, mine in self.pairs)

    def targets(self, saved: Collection[str]) -> State:
        """What a load of a checkpoint with these names fills. Optimizers without states get them.

        Raises:
            PlanError: the checkpoint has states of a parameter for which its optimizer has none.
        """
        result: State = {}
        # Whom another load gave states may have trained since.
        self._filled = []
        has_states = any(name.startswith(_STATE) for name in saved)
        for part, mine in self.pairs:
            for optimizer in mine:
                if has_states and not _has_states(optimizer):
                    self._filled.append(optimizer)
                    _fill(optimizer)
            flat = _flat(part, mine)
            states = _states_of(flat, mine)
            with_states = {_owner(name, states) for name in saved if name.startswith(_STATE)}
            left: set[str] = set()
            for name, (param, keys) in states.items():
                if name not in with_states:
                    # What shares a parameter cannot be forgotten alone: torch names what the checkpoint lacks.
                    left.update(keys if param is not None else ())
                elif not keys and (param is None or param.requires_grad):
                    raise PlanError(
                        "the checkpoint has states of a parameter, and the optimizer none to load them into",
                        got=name,
                        expected="an optimizer of the same options, that has stepped all parameters or none",
                        where="optimizers",
                    )
            result = merged([result, {key: value for key, value in flat.items() if key not in left}])
        return result

    def load_state_dict(self, state_dict: State) -> None:
        """Take what ``targets`` gave; parameters whose states it did not ask for have none."""
        for part, mine in self.pairs:
            flat = _flat(part, mine)
            if not flat:
                continue
            for param, keys in _states_of(flat, mine).values():
                if keys and param is not None and keys[0] not in state_dict:
                    for optimizer in mine:
                        optimizer.state.pop(param, None)
                    for key in keys:
                        del flat[key]
            with _unstepped(mine), _without_empty_groups(mine):
                set_optimizer_state_dict(part, mine, {name: state_dict[name] for name in flat}, options=_FLAT)
            # Torch makes an entry for each parameter, of which one that no step has reached says nothing.
            for optimizer in mine:
                for param in [param for param, states in optimizer.state.items() if not states]:
                    del optimizer.state[param]

    def undo(self) -> None:
        """Optimizers that had no states before the load that failed have none."""
        for optimizer in self._filled:
            optimizer.state.clear()


def optimizer_states(parts: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Optimizers as one state; one that says itself that it is ``Stateful``, as torchtitan's container, as it is."""
    speaks = [Stateful in type(each).__mro__ for each in optimizers]
    if speaks == [True]:
        return optimizers[0]
    if any(speaks):
        raise ConfigError(
            "an optimizer that names its states itself beside others",
            got=[type(each).__name__ for each in optimizers],
            expected="it alone, or plain ones",
            where="optimizers",
        )
    return OptimizerStates(parts, optimizers)


_STATE, GROUPS = "state.", "param_groups."


def _of_no_model(part: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> ConfigError | None:
    own = set(map(id, part.parameters()))
    count = sum(id(param) not in own for param in params_of(optimizers))
    what = "an optimizer steps parameters that are none of the model's"
    got = f"{count} such parameters, of {', '.join(type(each).__name__ for each in optimizers)}"
    expected = "parameters of the model; an optimizer of others, as of master weights, among the states"
    return ConfigError(what, got=got, expected=expected, where="optimizers") if count else None


def _flat(part: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> State:
    if not params_of(optimizers):
        return {}
    with _unstepped(optimizers), _without_empty_groups(optimizers):
        try:
            found: State = get_optimizer_state_dict(part, optimizers, options=_FLAT)
        except KeyError as error:
            foreign = _of_no_model(part, optimizers)
            if not foreign and error.args[0] in ("state", "param_groups"):
                raise ConfigError(
                    "an optimizer whose state_dict is not as torch's",
                    got=f"no {error.args[0]} in that of {', '.join(type(each).__name__ for each in optimizers)}",
                    expected="one that derives from torch's Stateful, or it among the states",
                    where="optimizers",
                ) from error
            if not foreign:
                raise
            raise foreign from error
        except NotImplementedError as error:
            raise UnsupportedError(
                "states of this optimizer cannot be saved by the names of parameters",
                got=str(error),
                expected="tensors, numbers, or mappings of them",
                where=", ".join(type(each).__name__ for each in optimizers),
            ) from error
        return found


@contextmanager
def _without_empty_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Sets aside groups without parameters, which torch cannot name: their options are as the program made them."""
    aside = [
        (each, place, group)
        for each in optimizers
        for place, group in enumerate(each.param_groups)
        if not group["params"]
    ]
    for each, place, _ in reversed(aside):
        del each.param_groups[place]
    try:
        yield
    finally:
        # A load makes the list of groups anew.
        for each, place, group in aside:
            each.param_groups.insert(place, group)


@contextmanager
def _unstepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Prevents that torch steps an optimizer that has neither states nor gradients: that changes how it goes on.

    Even at a learning rate of 0 it counts, and makes what NAdam, Rprop and SGD with dampening begin with.
    """
    given: list[torch.Tensor] = []
    for optimizer in optimizers:
        params = params_of([optimizer])
        if params and not optimizer.state and all(param.grad is None for param in params):
            given.append(min(params, key=torch.Tensor.numel))
            given[-1].grad = torch.zeros_like(given[-1])
    try:
        yield
    finally:
        for param in given:
            param.grad = None


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of an optimizer that has none, as torch does: it steps with gradients of 0 at a rate of 0.

    Torch leaves one that has gradients as it is, so that its states would not be loaded.
    """
    groups = optimizer.param_groups
    gradients = [(param, param.grad) for param in params_of([optimizer])]
    rates = [(group, group["lr"]) for group in groups if "lr" in group]
    try:
        for param, _ in gradients:
            param.grad = _no_change(optimizer, param) if param.requires_grad else None
        for group, rate in rates:
            group["lr"] = torch.tensor(0.0) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    except TwinproofError:
        raise
    except Exception as error:
        raise UnsupportedError(
            "the optimizer has no states, and cannot make them by a step without a closure and with gradients of 0",
            got=f"{type(error).__name__}: {error}",
            expected="one that has stepped before the load",
            where=type(optimizer).__name__,
        ) from error
    finally:
        for param, gradient in gradients:
            param.grad = gradient
        for group, rate in rates:
            group["lr"] = rate


def _no_change(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    # This one takes gradients of some rows alone.
    if isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros(param.shape, dtype=param.dtype, device=param.device, layout=torch.sparse_coo)
    return torch.zeros_like(param)


def params_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of all groups, in their order."""
    return list(dict.fromkeys(p for each in optimizers for group in each.param_groups for p in group["params"]))


def _has_states(optimizer: torch.optim.Optimizer) -> bool:
    # A load leaves an empty state for each parameter that has none.
    return any(not isinstance(state, dict) or state for state in optimizer.state.values())


def _states_of(flat: State, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, tuple[Any, list[str]]]:
    """Name of a parameter -> (the parameter, the names of its states); None for those that share one, as in FSDP1."""
    names = list(
        dict.fromkeys(name.removeprefix(GROUPS).rpartition(".")[0] for name in flat if name.startswith(GROUPS))
    )
    params: Sequence[Any] = params_of(optimizers)
    if len(params) != len(names):
        params = [None] * len(names)
    result: dict[str, tuple[Any, list[str]]] = {name: (param, []) for name, param in zip(names, params, strict=True)}
    for key in flat:
        if key.startswith(_STATE):
            owner = _owner(key, result)
            assert owner is not None
            result[owner][1].append(key)
    return result


def _owner(key: str, names: Container[str]) -> str | None:
    """The parameter whose state this is: the longest name that it begins with. Names and keys may have dots."""
    name = key.removeprefix(_STATE).rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def merged(dicts: Iterable[State]) -> State:
    """State dicts as one. Raises PlanError where two have one name."""
    result: State = {}
    for found in dicts:
        twice = sorted(result.keys() & found.keys())
        if twice:
            raise PlanError(
                "parts of the model have the same name", got=twice[:5], expected="distinct names", where="model"
            )
        result.update(found)
    return result
