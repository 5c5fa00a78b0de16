"""What others did to the optimizer before: hooks on its state dict, steps that were kept, replaced or compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import Twins, assert_same_state, proven, proven_on, reread, values
from conformance.provers.pretend_device import on_host
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError


def _hooks(optimizer: Any) -> list[Any]:
    """Saved states are one entry of what is saved; a load halves the moments, and then the learning rate."""

    def unwrap(_: Any, saved: dict[str, Any]) -> Any:
        return saved["optimizer"]

    def halve(_: Any, saved: dict[str, Any]) -> Any:
        halved = {number: {**state, "exp_avg": state["exp_avg"] / 2} for number, state in saved["state"].items()}
        return {**saved, "state": halved}

    def slow(loaded: Any) -> None:
        loaded.param_groups[0]["lr"] /= 2

    return [
        optimizer.register_state_dict_post_hook(lambda _, state: {"optimizer": state}),
        optimizer.register_load_state_dict_pre_hook(unwrap),
        optimizer.register_load_state_dict_pre_hook(halve),
        optimizer.register_load_state_dict_post_hook(slow),
    ]


@requirement(
    "OPT-437",
    "Load hooks that the user has registered on the optimizer, before the offloader was attached or after, MUST run in "
    "their order around its load and the offloader's, and may make a state dict of what has another form.",
)
@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("verb", ["offloader", "optimizer"])
def test_load_hooks(offload: Any, attached_first: bool, verb: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "Adam")
        twins.step()
        handles = [] if attached_first else [*_hooks(twins.plain), *_hooks(twins.optimizer)]
        twins.offloader.close()
        twins.offloader = offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine, chunk_bytes=1024)
        handles += [*_hooks(twins.plain), *_hooks(twins.optimizer)] if attached_first else []
        saved = twins.offloader.snapshot()
        twins.step()
        with succeeds("a load", where=f"hooks of the user's, {verb}.load_state_dict"):
            getattr(twins, verb).load_state_dict(saved)
        twins.plain.load_state_dict(reread(saved))
        for handle in handles:
            handle.remove()
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-438",
    "Hooks of the user's on the optimizer's state dict and its load MUST find states that they may read and write, "
    "whether they were registered before the offloader's own or after: nothing is on its way.",
)
@pytest.mark.parametrize("attached_first", [False, True])
def test_hooks_look_at_states(offload: Any, attached_first: bool) -> None:
    def halve(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    def hook(optimizer: Any) -> None:
        optimizer.register_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(halve)

    with proven() as device:
        twins = Twins(offload, device, "Adam")
        twins.offloader.close()
        for optimizer in () if attached_first else (twins.plain, twins.optimizer):
            hook(optimizer)
        twins.offloader = offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine, chunk_bytes=1024)
        for optimizer in (twins.plain, twins.optimizer) if attached_first else ():
            hook(optimizer)
        twins.step()
        saved = twins.offloader.snapshot()
        expected = twins.plain.state_dict()
        with _disable_current_modes():
            assert_same_state(saved, expected)
        twins.step()
        twins.offloader.prefetch()
        twins.plain.load_state_dict(reread(saved))
        twins.optimizer.load_state_dict(reread(saved))
        twins.step()
        twins.check()
        twins.offloader.close()


def _arm(offload: Any, halves: bool) -> tuple[list[torch.Tensor], Any, Any]:
    """Parameters, their masters or None, and their optimizer."""
    dtype = torch.bfloat16 if halves else torch.float32
    params: list[torch.Tensor] = [torch.nn.Parameter(values((4, 6), i, dtype)) for i in range(3)]
    masters = offload.MasterWeights(params) if halves else None
    return params, masters, torch.optim.AdamW(params if masters is None else masters.parameters(), lr=0.1)


def _put_in_place(optimizer: Any) -> None:
    """Somebody's step, which changes an option and calls the one that it found."""
    found = optimizer.step

    def step(self: Any, *arguments: Any) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return found(*arguments)

    optimizer.step = MethodType(step, optimizer)


def _taken(way: str, optimizer: Any) -> Callable[..., Any]:
    """What the user calls as a step. It is taken before an offloader is attached."""
    if way == "kept":
        found: Callable[..., Any] = optimizer.step
        return found
    if way == "replaced over a scheduler's":
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    _put_in_place(optimizer)
    if way == "replaced below a scheduler's":
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    return lambda *arguments: optimizer.step(*arguments)


WAYS = ("kept", "replaced", "replaced over a scheduler's", "replaced below a scheduler's")


@requirement(
    "OPT-439",
    "A step that others took from the optimizer before an offloader was attached, to call it later or from their own "
    "in its place, MUST run and be the plain optimizer's, with its closure, hooks and masters, with all states on the "
    "device meanwhile and home behind it unless memory goes on request.",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
@pytest.mark.parametrize("name", ["cpu", "pretend"])
def test_steps_taken_before(offload: Any, way: str, halves: bool, release: str, name: str) -> None:
    with proven_on(name) as place:
        (plain_params, plain_masters, plain), (params, masters, optimizer) = (_arm(offload, halves) for _ in range(2))
        if halves:
            plain_masters.attach(plain)
        hooked: list[bool] = []
        optimizer.register_step_post_hook(lambda *_: hooked.append(True))
        plain_step, step = (_taken(way, each) for each in (plain, optimizer))
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=place.engine, master_weights=masters, chunk_bytes=256, release=release
        )
        for number in range(3):
            for arm in (plain_params, params):
                for i, param in enumerate(arm):
                    param.grad = values((4, 6), 10 * number + i, param.dtype)
            with succeeds("a step that was taken before", where=f"{way}, {release}"):
                losses = plain_step(lambda: 7.0), step(lambda: 7.0)
            assert_equal(losses, (7.0, 7.0), where="losses")
            left = offloader.residency()
            at = left.host_bytes + left.in_flight_bytes if release == "on_request" else left.device_bytes
            assert_equal(at, 0, where=f"bytes at the other place, {release}")
            offloader.prefetch()
        assert_equal((offloader.stats().step_count, len(hooked)), (3, 3), where="steps and calls of a step hook")
        offloader.settle()
        for i, (expected, param) in enumerate(zip(plain_params, params, strict=True)):
            with _disable_current_modes():
                assert_same_tensor(on_host(param.detach()), on_host(expected.detach()), where=f"parameter {i}")
        saved = offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(saved, plain.state_dict())
        offloader.close()


@requirement(
    "OPT-448",
    "Where the CPU steps, a step of others in the optimizer's place MUST be refused at attachment, and one that was "
    "kept when it is called, by name and with everything as it was.",
)
def test_steps_taken_before_the_cpu_steps(offload: Any) -> None:
    with proven() as device:
        params, _, optimizer = _arm(offload, halves=False)
        kept = optimizer.step
        _put_in_place(optimizer)
        with raises(ConfigError, mentions=("optimizer.step",)):
            offload.OptimizerStateOffloader(optimizer, engine=device.engine, step_device="cpu")
        del optimizer.step
        with offload.OptimizerStateOffloader(optimizer, engine=device.engine, step_device="cpu") as offloader:
            for param in params:
                param.grad = torch.ones_like(param)
            before = [param.detach().clone() for param in params]
            with raises(ConfigError, mentions=("optimizer.step",)):
                kept()
            for number, (param, value) in enumerate(zip(params, before, strict=True)):
                with _disable_current_modes():
                    assert_same_tensor(param.detach(), value, where=f"parameter {number} behind a refused step")
            optimizer.step()
            assert_equal(offloader.stats().step_count, 1, where="steps")


@requirement(
    "OPT-440",
    "A step that torch compiles, by itself or with the verbs around it, before the offloader is attached or after, "
    "MUST have the bits of the plain optimizer's compiled in the same way, and drive the transfers.",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of torch, while it compiles.
@pytest.mark.parametrize("early", [False, True])
def test_compiled(offload: Any, early: bool) -> None:
    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="eager")

    torch._dynamo.reset()
    (plain_params, _, plain), (params, _, optimizer) = (_arm(offload, halves=False) for _ in range(2))
    # A step of ours is none that a compiler looks into: it is the plain one, as it is.
    plain_step, step = (compiled(plain.step), compiled(optimizer.step)) if early else (plain.step, None)
    with offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), chunk_bytes=256) as offloader:

        def around() -> None:
            offloader.prefetch()
            optimizer.step()
            offloader.offload()

        step = compiled(around) if step is None else step
        for number in range(3):
            for arm in (plain_params, params):
                for i, param in enumerate(arm):
                    param.grad = values((4, 6), 10 * number + i)
            plain_step()
            with succeeds("a step", where="torch.compile"):
                step()
        assert_equal(offloader.stats().step_count, 3, where="steps that were offloaded")
        assert_equal(offloader.residency().device_bytes, 0, where="bytes on the device behind a step")
        for i, (expected, param) in enumerate(zip(plain_params, params, strict=True)):
            assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i}")
        assert_same_state(offloader.snapshot(), plain.state_dict())


@requirement(
    "OPT-444",
    "Parameters of another device than the offloader's, which a later group brings, parameters on meta, and an "
    "optimizer without any where no engine is given, MUST be refused by name before anything changes.",
)
def test_devices_of_parameters(offload: Any) -> None:
    with proven_on("pretend") as place:
        twins = Twins(offload, place)
        twins.step()
        stranger = torch.nn.Parameter(torch.zeros(3, 3))
        twins.optimizer.add_param_group({"params": [stranger]})
        before = [param.detach().clone() for param in twins.params]
        twins.set_gradients()
        stranger.grad = torch.ones_like(stranger)
        with raises(ConfigError, mentions=("one device", "cpu", "(3, 3)")):
            twins.optimizer.step()
        for number, (param, value) in enumerate(zip(twins.params, before, strict=True)):
            assert_same_tensor(on_host(param.detach()), on_host(value), where=f"parameter {number}")
        del twins.optimizer.param_groups[1]
        twins.plain.step()
        twins.optimizer.step()
        twins.check()
        twins.offloader.close()
    for step_device in ("device", "cpu"):
        meta = torch.optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))])
        with raises(ConfigError, mentions=("meta",)):
            offload.OptimizerStateOffloader(meta, engine=InlineEngine("cpu"), step_device=step_device)
        with raises(ConfigError, mentions=("meta",)):
            offload.OptimizerStateOffloader(meta, step_device=step_device)
        empty = torch.optim.AdamW([{"params": []}])
        with raises(ConfigError, mentions=("no parameters",)):
            offload.OptimizerStateOffloader(empty, step_device=step_device)
        assert_equal(["step" in vars(each) for each in (meta, empty)], [False, False], where="steps taken over")


@requirement(
    "OPT-451",
    "An offloader that a step hook of the user's closes, before the step or behind it and wherever it stands among "
    "others, MUST leave this step and the next ones the plain optimizer's, masters among them.",
)
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_closed_by_a_hook(offload: Any, when: str, attached_first: bool, halves: bool) -> None:
    with proven() as device:
        (plain_params, plain_masters, plain), (params, masters, optimizer) = (_arm(offload, halves) for _ in range(2))
        if halves:
            plain_masters.attach(plain)
        made: list[Any] = []
        hook = getattr(optimizer, f"register_step_{when}_hook")
        close = lambda *_: made[0].close()  # noqa: E731
        if not attached_first:
            handle = hook(close)
        made.append(offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters))
        if attached_first:
            handle = hook(close)
        hook(lambda *_: None)
        for number in range(3):
            for arm in (plain_params, params):
                for i, param in enumerate(arm):
                    param.grad = values((4, 6), 10 * number + i, param.dtype)
            with succeeds("a step", where=f"step {number}, closed in the first"):
                optimizer.step()
            plain.step()
            handle.remove()
            for i, (expected, param) in enumerate(zip(plain_params, params, strict=True)):
                with _disable_current_modes():
                    assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i} after {number}")
        saved, expected_state = optimizer.state_dict(), plain.state_dict()
        with _disable_current_modes():
            assert_same_state(saved, expected_state)


class _Derived(torch.optim.AdamW):
    """With nothing of its own."""


class _Wrapped(torch.optim.SGD):
    """With a step of its own, which is torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@requirement(
    "OPT-458",
    "A closure MUST be evaluated once in a step, before any parameter is stepped, whatever the number of chunks: of "
    "torch's optimizers and of classes derived from them, with a step of their own and without.",
)
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, _Derived, _Wrapped], ids=lambda kind: kind.__name__
)
def test_closures_of_derived_classes(offload: Any, kind: Any) -> None:
    with proven() as device:
        arms = []
        for _ in range(2):
            params = [torch.nn.Parameter(values((40,), seed)) for seed in range(4)]
            arms.append((params, kind(params, lr=0.1)))
        (plain_params, _), (params, optimizer) = arms
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=200)
        for number in range(3):
            seen: list[list[list[torch.Tensor]]] = [[], []]
            for (own, stepped), calls in zip(arms, seen, strict=True):

                def closure(own: Any = own, calls: Any = calls, number: int = number) -> float:
                    calls.append([param.detach().clone() for param in own])
                    for i, param in enumerate(own):
                        param.grad = values((40,), 10 * number + i)
                    return float(number)

                answer = stepped.step(closure)
                assert_equal(answer, float(number), where=f"answer of step {number}")
            assert_equal([len(calls) for calls in seen], [1, 1], where=f"evaluations in step {number}")
            with _disable_current_modes():
                for expected, found in zip(seen[0][0], seen[1][0], strict=True):
                    assert_same_tensor(found, expected, where=f"weights that the closure of step {number} saw")
        with _disable_current_modes():
            for i, (expected, param) in enumerate(zip(plain_params, params, strict=True)):
                assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i}")
        offloader.close()


class _Stopped(Exception):
    """Raised by the test's own closure or hook."""


_STOPS = ("closure", "hook before", "hook behind", "arithmetic")


def _stopping(optimizer: Any, where: str, stops: list[bool]) -> Callable[[], float]:
    """A closure; where it is told, it or a hook of the optimizer stops the step."""

    def stop(*_: Any) -> None:
        if stops[0]:
            raise _Stopped

    if where == "hook before":
        optimizer.register_step_pre_hook(stop)
    if where == "hook behind":
        optimizer.register_step_post_hook(stop)

    def closure() -> float:
        if where == "closure":
            stop()
        return 1.0

    return closure


@requirement(
    "OPT-463",
    "A step that was kept and that an error stops, in its closure, its arithmetic or a hook of the user's, MUST leave "
    "the next one as it leaves the plain optimizer's, counted and with states home, of classes that step twice, too.",
)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, _Wrapped], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("at", _STOPS)
def test_kept_steps_that_are_stopped(offload: Any, at: str, kind: Any, halves: bool) -> None:
    with proven() as device:
        arms, stops = [], [False]
        for is_plain in (True, False):
            dtype = torch.bfloat16 if halves else torch.float32
            params: list[Any] = [torch.nn.Parameter(values((4, 6), i, dtype)) for i in range(3)]
            masters = offload.MasterWeights(params) if halves else None
            optimizer = kind(params if masters is None else masters.parameters(), lr=0.1, momentum=0.9, foreach=False)
            # Hooks behind the arithmetic come before ours: what they stop is not over.
            kept, closure = optimizer.step, _stopping(optimizer, at, stops)
            if is_plain and masters is not None:
                masters.attach(optimizer)
            if not is_plain:
                offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
            arms.append((params, optimizer, kept, closure))
        done = 0
        for number in range(6):
            stops[0] = number in (1, 3, 4)
            for params, optimizer, kept, closure in arms:
                for i, param in enumerate(params):
                    param.grad = values((4, 6), 10 * number + i, param.dtype)
                right = optimizer.param_groups[0]["lr"]
                if stops[0] and at == "arithmetic":
                    optimizer.param_groups[0]["lr"] = "none"
                if stops[0]:
                    with raises(Exception if at == "arithmetic" else _Stopped, where=f"step {number}, {at}"):
                        kept(closure)
                else:
                    with succeeds("a step", where=f"step {number}, stopped before in {at}"):
                        kept(closure)
                optimizer.param_groups[0]["lr"] = right
            done += not stops[0]
            if stops[0]:
                continue
            offloader.settle()
            assert_equal(offloader.stats().step_count, done, where=f"steps that were made, stopped in {at}")
            assert_equal(offloader.residency().device_bytes, 0, where=f"bytes on the device, stopped in {at}")
            for i, (expected, param) in enumerate(zip(arms[0][0], arms[1][0], strict=True)):
                with _disable_current_modes():
                    assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i}, stopped in {at}")
        offloader.close()
