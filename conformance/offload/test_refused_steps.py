"""Steps that are refused, each way: nothing has moved, nothing is counted, and the next step is as if none had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import assert_same_state, values
from twinproof.engine import InlineEngine
from twinproof.errors import TwinproofError

SHAPES = ((4, 6), (24,), (6, 2), (3, 3))


class _Device(InlineEngine):
    """The CPU in the place of a device."""

    stands_for_device = True
    captures = False

    def is_capturing(self) -> bool:
        return self.captures


class _Arm:
    """Parameters that an offloaded optimizer steps, by its own step or by one that was kept before attachment."""

    def __init__(self, offload: Any, kind: str, halves: bool, **options: Any) -> None:
        dtype = torch.bfloat16 if halves else torch.float32
        self.params = [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
        self.masters = offload.MasterWeights(self.params) if halves else None
        stepped = self.params if self.masters is None else list(self.masters.parameters())
        extra = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer: Any = getattr(torch.optim, kind)(stepped, lr=0.1, **extra)
        self.kept = self.optimizer.step
        self.engine = _Device()
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer, engine=self.engine, master_weights=self.masters, chunk_bytes=300, **options
        )

    def give(self, seed: int) -> None:
        """Gradients for a step."""
        for i, param in enumerate(self.params):
            param.grad = values(param.shape, 100 * seed + i, param.dtype)

    def told(self) -> tuple[Any, ...]:
        """Where everything is, what is counted, and whether it is the same memory."""
        state = [value for held in self.optimizer.state.values() for value in held.values()]
        tensors = [value for value in (*self.weights(), *state) if isinstance(value, torch.Tensor)]
        grads = [(id(param.grad), None if param.grad is None else param.grad._version) for param in self.params]
        places = [(value.data_ptr(), value._version) for value in tensors]
        return self.offloader.residency(), self.offloader.stats(), places, grads

    def weights(self) -> list[torch.Tensor]:
        """Parameters and masters."""
        masters = [] if self.masters is None else list(self.masters.parameters())
        return [tensor.detach() for tensor in (*self.params, *masters)]

    def held(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Copies of parameters, masters and states."""
        return [tensor.clone() for tensor in self.weights()], self.offloader.snapshot()


def _check_same(found: Any, expected: Any, where: str) -> None:
    for number, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert_same_tensor(mine, theirs, where=f"weight {number} {where}")
    assert_same_state(found[1], expected[1])


# What is wrong with an arm while one of these is open, and right again behind it.
@contextmanager
def _sparse(arm: _Arm) -> Iterator[None]:
    kept = arm.params[2].grad
    assert kept is not None
    arm.params[2].grad = kept.to_sparse()
    yield
    arm.params[2].grad = kept


@contextmanager
def _with_graph(arm: _Arm) -> Iterator[None]:
    kept, group = arm.params[1].grad, arm.optimizer.param_groups[0]
    assert kept is not None
    arm.params[1].grad, group["differentiable"] = kept.clone().requires_grad_() * 1, True
    yield
    arm.params[1].grad, group["differentiable"] = kept, False


@contextmanager
def _captured(arm: _Arm) -> Iterator[None]:
    arm.engine.captures = True
    yield
    arm.engine.captures = False


@contextmanager
def _of_no_memory(arm: _Arm) -> Iterator[None]:
    arm.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.empty(3, device="meta"))]})
    yield
    del arm.optimizer.param_groups[-1]


@contextmanager
def _stale(arm: _Arm, number: int) -> Iterator[None]:
    with torch.no_grad():
        arm.params[number].mul_(2)
    yield
    arm.offloader.refresh_masters()


@contextmanager
def _with_option(arm: _Arm, name: str, value: Any) -> Iterator[None]:
    group = arm.optimizer.param_groups[0]
    kept, group[name] = group[name], value
    yield
    group[name] = kept


@contextmanager
def _of_other_states(arm: _Arm, name: str, change: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """One state of a parameter that is stepped on the CPU is of another kind, or there is none."""
    state = arm.optimizer.state[arm.offloader.bundles[-1].param]
    kept, found = state[name], change(state[name])
    if found is None:
        del state[name]
    else:
        state[name] = found
    yield
    state[name] = kept


@contextmanager
def _loaded(arm: _Arm, name: str) -> Iterator[None]:
    """A load has brought a state of another dtype."""
    right, wrong = arm.offloader.snapshot(), arm.offloader.snapshot()
    listed = list(map(id, arm.optimizer.param_groups[0]["params"]))
    state = wrong["state"][listed.index(id(arm.offloader.bundles[-1].param))]
    state[name] = state[name].bfloat16()
    arm.offloader.load_state_dict(wrong)
    yield
    arm.offloader.load_state_dict(right)


@contextmanager
def _nothing(_: _Arm) -> Iterator[None]:
    yield


Fault = Callable[[_Arm], AbstractContextManager[None]]


def _faults(step_device: str, halves: bool, is_kept: bool) -> dict[str, Fault]:
    """Ways by which a step is refused."""
    found: dict[str, Fault] = {"sparse": _sparse, "captured": _captured, "meta": _of_no_memory}
    if not halves and step_device == "device":
        found["graph"] = _with_graph
    if halves:
        found |= {f"stale {number}": partial(_stale, number=number) for number in (0, 3)}
    if step_device == "cpu":
        found |= {f"{name} on": partial(_with_option, name=name, value=True) for name in ("capturable", "fused")}
        found["rates"] = partial(_with_option, name="betas", value=(torch.tensor(0.9), torch.tensor(0.99)))
        for name in ("exp_avg", "exp_avg_sq"):
            found[f"half {name}"] = partial(_of_other_states, name=name, change=torch.Tensor.bfloat16)
            found[f"no {name}"] = partial(_of_other_states, name=name, change=lambda _: None)
            found[f"loaded {name}"] = partial(_loaded, name=name)
    if step_device == "cpu" and is_kept:
        found["nothing"] = _nothing
    return found


def _bring(arm: _Arm, how: str) -> None:
    if how == "prefetched":
        arm.offloader.prefetch()
    elif how == "brought":
        arm.offloader.to_device(arm.offloader.bundles)


@requirement(
    "OPT-459",
    "A step that is refused, for whatever reason and by whichever step of the optimizer, MUST move and count nothing, "
    "wherever states and masters are by then, and the next right step MUST be as if it had not been called.",
)
@pytest.mark.parametrize("is_kept", [False, True], ids=["own", "kept"])
@pytest.mark.parametrize("halves", [False, True], ids=["floats", "halves"])
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_refused(offload: Any, step_device: str, halves: bool, is_kept: bool) -> None:
    cases = [("at_offload", "home", 0.5), *product(["at_offload"], ("home", "prefetched", "brought"), [1.0])]
    if step_device == "device":
        cases.append(("on_request", "home", 1.0))
    for release, how, fraction in cases:
        kind = "SGD" if step_device == "device" and release == "at_offload" else "AdamW"
        options = {"step_device": step_device, "release": release, "fraction": fraction}
        refused, twin = (_Arm(offload, kind, halves, **options) for _ in range(2))
        for number, (name, fault) in enumerate(_faults(step_device, halves, is_kept).items()):
            where = f"{name}, {release}, {how}, {fraction=}"
            for arm in (refused, twin):
                arm.give(3 * number)
                arm.optimizer.step()
                _bring(arm, how)
                arm.give(3 * number + 1)
                with fault(arm):
                    before, held = arm.told(), [tensor.clone() for tensor in arm.weights()]
                    if arm is refused:
                        with raises(TwinproofError, where=where):
                            (arm.kept if is_kept else arm.optimizer.step)()
                        found = arm.told()
                        for part, what in enumerate(("residency", "counts", "memory", "gradients")):
                            assert_equal(found[part], before[part], where=f"{what} behind {where}")
                        for weight, expected in zip(arm.weights(), held, strict=True):
                            assert_same_tensor(weight, expected, where=f"weights behind {where}")
            _step_both(refused, twin, is_kept and step_device == "device", where)
        for arm in (refused, twin):
            arm.offloader.close()


def _step_both(refused: _Arm, twin: _Arm, is_kept: bool, where: str) -> None:
    """The right step, of both."""
    counts = [arm.offloader.stats().step_count for arm in (refused, twin)]
    for arm in (refused, twin):
        with succeeds("a right step", where=where):
            (arm.kept if is_kept else arm.optimizer.step)()
    steps = [arm.offloader.stats().step_count for arm in (refused, twin)]
    assert_equal(steps, [count + 1 for count in counts], where=f"steps that are counted behind {where}")
    assert_equal(refused.offloader.residency(), twin.offloader.residency(), where=f"residency of a step behind {where}")
    _check_same(refused.held(), twin.held(), f"of a step behind {where}")
