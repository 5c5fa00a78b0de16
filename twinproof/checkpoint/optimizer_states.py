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
        # Of the last ``targets``: each parameter, and the names of its states that were asked for.
        self._asked: dict[str, tuple[torch.Tensor, list[str]]] = {}
        # Of the last ``not_asked``: the parameters of the states that no fresh optimizer asks for.
        self.later: dict[str, torch.Tensor] = {}

    def check_params(self) -> None:
        """Refuse parameters that are none of the model's, which no save could name, before one is made.

        An optimizer with a ``state_dict`` of its own is not judged: it may leave them out. Raises ConfigError.
        """
        for part, mine in self.pairs:
            plain = [each for each in mine if type(each).state_dict is torch.optim.Optimizer.state_dict]
            if foreign := _of_no_model(part, plain):
                raise foreign
            _check_apart(plain)

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
        self._asked = {}
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
            self._asked |= {name: (param, keys) for name, (param, keys) in states.items() if param is not None}
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

    def not_asked(self, saved: Iterable[str]) -> list[str]:
        """What a checkpoint with these names has of parameters here, and ``targets`` did not ask for.

        States that an optimizer makes behind its first step, or by another option that the checkpoint has, and options
        that a fresh one has not. Of a parameter without states here, as of one that is not trained, no states.
        """
        self.later, options, groups = {}, [], self._groups()
        for name in saved:
            owner = _owner(name, self._asked)
            if owner is None:
                continue
            param, keys = self._asked[owner]
            if name.startswith(_STATE) and keys and name not in keys:
                self.later[name] = param
            # The names of parameters are the program's, for it may deal them to other groups by now.
            elif name.startswith(GROUPS) and _key(name, owner) not in ("param_names", *groups[param]):
                options.append(name)
        return [*self.later, *options]

    def _groups(self) -> dict[torch.Tensor, dict[str, Any]]:
        every = (group for _, mine in self.pairs for each in mine for group in each.param_groups)
        return {param: group for group in every for param in group["params"]}

    def _take_later(self, state_dict: State) -> None:
        """Take what ``not_asked`` named: states where their parameter is, but for counts, as torch has it.

        And states of frozen parameters, which torch leaves out of a load, and so out of the optimizer.
        """
        groups = self._groups()
        steppers = {param: each for _, mine in self.pairs for each in mine for param in params_of([each])}
        for name, value in state_dict.items():
            owner = _owner(name, self._asked)
            if owner is None:
                continue
            param, _ = self._asked[owner]
            if name in self.later or (name.startswith(_STATE) and not param.requires_grad):
                is_moved = isinstance(value, torch.Tensor) and value.dim() > 0
                # Of mappings among the states torch makes names with dots.
                *before, last = _key(name, owner).split(".")
                state = steppers[param].state[param]
                for key in before:
                    state = state.setdefault(key, {})
                state[last] = value.to(param.device) if is_moved else value
            elif name.startswith(GROUPS):
                groups[param].setdefault(_key(name, owner), value)

    def _check_options(self, state_dict: State) -> None:
        """Demand that the options of parameters in one group are the same: torch takes the first one's for all."""
        of_param: dict[str, dict[str, Any]] = {name: {} for name in self._asked}
        for name, value in state_dict.items():
            owner = _owner(name, self._asked) if name.startswith(GROUPS) else None
            if owner is not None:
                of_param[owner][_key(name, owner)] = value
        groups, firsts = self._groups(), dict[int, str]()
        for name, (param, _) in self._asked.items():
            first = firsts.setdefault(id(groups[param]), name)
            mine, others = of_param[name], of_param[first]
            wrong = [key for key in sorted(mine.keys() | others.keys()) if not _alike(key, mine, others)]
            if wrong:
                raise PlanError(
                    "parameters of one group were saved with different options",
                    got={key: {first: others.get(key), name: mine.get(key)} for key in wrong},
                    expected="groups as those of the optimizer that was saved",
                    where="optimizers",
                )

    def load_state_dict(self, state_dict: State) -> None:
        """Take what ``targets`` gave; parameters whose states it did not ask for have none.

        Raises PlanError where parameters of one group had different options, before any optimizer is changed.
        """
        self._check_options(state_dict)
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
        self._take_later(state_dict)

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
_NOTHING = object()


def _of_no_model(part: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> ConfigError | None:
    own = set(map(id, part.parameters()))
    count = sum(id(param) not in own for param in params_of(optimizers))
    what = "an optimizer steps parameters that are none of the model's"
    got = f"{count} such parameters, of {', '.join(type(each).__name__ for each in optimizers)}"
    expected = "parameters of the model; an optimizer of others, as of master weights, among the states"
    return ConfigError(what, got=got, expected=expected, where="optimizers") if count else None


def _check_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Demand optimizers of different parameters: of two states of one name torch keeps the last. Raises ConfigError."""
    count = sum(len(params_of([each])) for each in optimizers) - len(params_of(optimizers))
    if count:
        raise ConfigError(
            "several optimizers step the same parameters, whose names their states would share",
            got=f"{count} such parameters, of {', '.join(type(each).__name__ for each in optimizers)}",
            expected="optimizers of different parameters; another one among the states",
            where="optimizers",
        )


def _flat(part: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> State:
    if not params_of(optimizers):
        return {}
    _check_apart(optimizers)
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


def _alike(key: str, mine: State, others: State) -> bool:
    """Whether two parameters have the same value of an option, or none. Names of a group's parameters may differ."""
    a, b = (options.get(key, _NOTHING) for options in (mine, others))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    # As text, too: of what is not a number, and of values that compare by identity, or not at all.
    return key == "param_names" or repr(a) == repr(b) or a == b


def _key(name: str, owner: str) -> str:
    """What stands behind the name of a parameter, of a state or an option."""
    return name.removeprefix(GROUPS if name.startswith(GROUPS) else _STATE).removeprefix(f"{owner}.")


def _owner(key: str, names: Container[str]) -> str | None:
    """The parameter whose state or option this is: the longest name that it begins with. Names, keys may have dots."""
    prefix = GROUPS if key.startswith(GROUPS) else _STATE
    name = key.removeprefix(prefix).rpartition(".")[0]
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
