"""Groups that users edit: parameters come, go, and change their group, and with it the options of their steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import SHAPES, Twins, in_host_memory, proven, reread, values
from twinproof.engine import InlineEngine

RELEASES = ("at_offload", "on_request")


def _bytes_of(*numbers: int) -> int:
    return sum(4 * torch.Size(SHAPES[number]).numel() for number in numbers)


def _moved(optimizer: Any) -> None:
    """A parameter without momentum goes to the group that has it."""
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))


def _shifted(optimizer: Any) -> None:
    """The group with momentum goes, and the one behind it gets it."""
    for param in optimizer.param_groups.pop(0)["params"]:
        optimizer.state.pop(param, None)
    optimizer.param_groups[0]["momentum"] = 0.9


class _Counted(InlineEngine):
    """Counts how often the host waits for a copy."""

    wait_count = 0

    def synchronize(self, event: Any) -> None:
        self.wait_count += 1


@requirement(
    "OPT-515",
    "Parameters that leave their groups at once, and those whose states get other places at once, MUST be moved with "
    "as many waits of the host as one.",
)
@pytest.mark.parametrize("what", ["leave", "other places"])
def test_many_at_once(offload: Any, what: str) -> None:
    waits = []
    for count in (1, 20):
        params = [torch.nn.Parameter(values((6,), i)) for i in range(21)]
        optimizer, engine = torch.optim.Adam(params), _Counted("cpu")
        offloader = offload.OptimizerStateOffloader(optimizer, engine=engine)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        states = [{name: value.clone() for name, value in optimizer.state[param].items()} for param in params]
        before = engine.wait_count
        if what == "leave":
            del optimizer.param_groups[0]["params"][:count]
        else:
            for param in params[:count]:
                optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].double()
        offloader.offload()
        offloader.settle()
        waits.append(engine.wait_count - before)
        for i, param in enumerate(params):
            assert_same_tensor(optimizer.state[param]["exp_avg"].float(), states[i]["exp_avg"], where=f"exp_avg {i}")
            assert_same_tensor(optimizer.state[param]["exp_avg_sq"], states[i]["exp_avg_sq"], where=f"exp_avg_sq {i}")
    assert_equal(waits[1], waits[0], where="waits for 20 parameters")


@requirement(
    "OPT-379",
    "A parameter that comes to a group with other options MUST have places for the states that they bring before the "
    "step that makes them, and so MUST one whose group changes its options and its number at once.",
)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("edit", "moving"), [(_moved, (0, 1)), (_shifted, (1, 2, 3))], ids=["moved", "shifted"])
def test_other_options(offload: Any, release: str, edit: Any, moving: tuple[int, ...]) -> None:
    with proven() as device:
        groups = [([0], {"momentum": 0.9}), ([1, 2, 3], {"momentum": 0.0})]
        twins = Twins(offload, device, "SGD", groups=groups, options={"lr": 0.1}, release=release)
        for _ in range(2):
            twins.step()
        for optimizer in (twins.plain, twins.optimizer):
            edit(optimizer)
        for _ in range(2):
            twins.step()
            twins.offloader.settle()
            twins.check()
            assert_equal(twins.offloader.stats().payload_bytes, _bytes_of(*moving), where="bytes that move")
        twins.offloader.offload()
        twins.offloader.release_gpu_memory()
        twins.offloader.settle()
        residency = twins.offloader.residency()
        assert_equal(
            (residency.device_bytes, residency.host_bytes), (0, _bytes_of(*moving)), where="device and host bytes"
        )
        twins.offloader.close()
        twins.step()


@requirement(
    "OPT-380",
    "A parameter that is in no group any more MUST NOT be held by the offloader after the next step, nor its states.",
)
@pytest.mark.parametrize(
    ("release", "step_device"), [*((release, "device") for release in RELEASES), ("at_offload", "cpu")]
)
def test_gone(offload: Any, release: str, step_device: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((16, 16), number)) for number in range(3)]
        optimizer = torch.optim.AdamW(params, foreach=False)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, chunk_bytes=1, release=release, step_device=step_device
        )

        def step() -> None:
            for number, param in enumerate(params):
                param.grad = values(param.shape, 10 + number)
            optimizer.step()

        step()
        offloader.offload()
        gone = params.pop(1)
        optimizer.param_groups[0]["params"] = list(params)
        del optimizer.state[gone]
        held: list[Any] = [weakref.ref(gone), weakref.ref(gone.grad)]
        step()
        del gone
        gc.collect()
        assert_equal([ref() is None for ref in held], [True, True], where="the parameter and its gradient are free")
        step()
        offloader.close()


def _turned(optimizer: Any) -> None:
    """The group without momentum gets it."""
    optimizer.param_groups[1]["momentum"] = 0.9


def _grown(optimizer: Any) -> None:
    """What was in no group yet comes to one with momentum."""
    optimizer.add_param_group({"params": [torch.nn.Parameter(values((4, 4), 9))], "momentum": 0.9})


@requirement(
    "OPT-385",
    "Where host memory lacks for what an edit of the groups brings, the step MUST fail with everything as it was, and "
    "the next one find its places when there is memory again.",
)
@pytest.mark.parametrize("edit", [_moved, _turned, _grown])
def test_no_memory_for_an_edit(offload: Any, edit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with proven() as device:
        groups = [([0], {"momentum": 0.9}), ([1, 2, 3], {"momentum": 0.0})]
        twins = Twins(offload, device, "SGD", groups=groups, options={"lr": 0.1})
        twins.step()
        for optimizer in (twins.plain, twins.optimizer):
            edit(optimizer)
        for optimizer in (twins.plain, twins.optimizer):
            for param in optimizer.param_groups[-1]["params"] if edit is _grown else ():
                param.grad = values(param.shape, 5)
        twins.set_gradients()
        refusals = []

        def refused(size_bytes: int) -> torch.Tensor:
            refusals.append(size_bytes)
            raise MemoryError("no host memory")

        with monkeypatch.context() as patch:
            patch.setattr(device.engine, "host_empty", refused)
            for _ in range(2):
                with raises(MemoryError, mentions=("no host memory",)):
                    twins.optimizer.step()
                assert_equal(twins.offloader.stats().step_count, 1, where="steps that were counted")
        assert_equal(len(refusals) > 1, True, where="memory was asked for again")
        for optimizer in (twins.optimizer, twins.plain):
            optimizer.step()
        twins.check()
        twins.step()
        twins.check()
        moving = [param for group in twins.plain.param_groups if group["momentum"] for param in group["params"]]
        payload_bytes = sum(param.nbytes for param in moving)
        assert_equal(twins.offloader.stats().payload_bytes, payload_bytes, where="bytes that move")
        residency = twins.offloader.residency()
        assert_equal(residency.device_bytes, 0, where="bytes on the device")
        twins.offloader.close()


@requirement(
    "OPT-386",
    "Where host memory lacks for states that come beside those that have places, with an option, with a load, or by a "
    "user who binds them in another form, no value MUST be lost, and they MUST have their places with the first call "
    "that finds memory.",
)
@pytest.mark.parametrize("way", ["turned", "loaded", "bound"])
def test_no_memory_beside_others(offload: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with proven() as device:
        options = {"lr": 0.1, "momentum": 0.0} if way == "turned" else {"lr": 0.1, "amsgrad": False}
        params = [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
        masters = offload.MasterWeights(params)
        optimizer: Any = getattr(torch.optim, "SGD" if way == "turned" else "Adam")(masters.parameters(), **options)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, master_weights=masters, chunk_bytes=512
        )

        def step(number: int) -> None:
            for i, param in enumerate(params):
                param.grad = values(param.shape, 100 * number + i, torch.bfloat16)
            optimizer.step()
            offloader.settle()

        def edit() -> None:
            if way == "turned":
                optimizer.param_groups[0]["momentum"] = 0.9
                step(2)
                return
            if way == "bound":
                # With gaps between the elements; no option and no list changes with it.
                for state in optimizer.state.values():
                    state["exp_avg"] = torch.stack([state["exp_avg"]] * 2, dim=-1)[..., 0]
                offloader.offload()
                return
            saved = offloader.snapshot()
            saved["param_groups"][0]["amsgrad"] = True
            for state in saved["state"].values():
                state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
            offloader.load_state_dict(saved)

        step(1)
        offloader.settle()
        before = [master.detach().clone() for master in masters.parameters()]

        def refused(size_bytes: int) -> torch.Tensor:
            raise MemoryError("no host memory")

        with monkeypatch.context() as patch:
            patch.setattr(device.engine, "host_empty", refused)
            with raises(MemoryError, mentions=("no host memory",)):
                edit()
            with _disable_current_modes():
                for master, value in zip(masters.parameters(), before, strict=True):
                    assert_same_tensor(master.detach(), value, where="a master after the failure")
        offloader.offload()
        for number in (2, 3):
            step(number)
        tensors = [state for states in optimizer.state.values() for state in states.values() if state.dim()]
        size_bytes = sum(state.nbytes for state in tensors) + sum(value.nbytes for value in before)
        residency = offloader.residency()
        assert_equal((residency.device_bytes, residency.host_bytes), (0, size_bytes), where="device and host bytes")
        assert_equal(offloader.stats().payload_bytes, size_bytes, where="bytes that move")
        assert_equal(offloader.stats().host_bytes, size_bytes, where="host memory")
        offloader.close()


@requirement(
    "OPT-387",
    "After a prefetch that is interrupted at any copy the next step MUST have the plain optimizer's bits.",
)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_interrupted_prefetch(offload: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for interrupted in range(4):
        with proven() as device:
            twins = Twins(offload, device, kind, slots=3)
            twins.step()
            real, count = device.engine.copy, 0

            def copy(target: torch.Tensor, source: torch.Tensor, real: Any = real, at: int = interrupted) -> None:
                nonlocal count
                count += 1
                if count == at + 1:
                    raise KeyboardInterrupt
                real(target, source)

            with monkeypatch.context() as patch:
                patch.setattr(device.engine, "copy", copy)
                with suppress(KeyboardInterrupt):
                    twins.offloader.prefetch()
            for _ in range(2):
                twins.step()
                twins.check()
            twins.offloader.close()


# What asks for memory, as (name, what both arms go through, what the offloaded one does then).
def _adds(optimizer: Any) -> None:
    """A larger parameter than all others, in a group of its own."""
    param = torch.nn.Parameter(values((40, 33), 77))
    optimizer.add_param_group({"params": [param], "lr": 0.2})
    param.grad = values(param.shape, 78)


def _binds(optimizer: Any) -> None:
    """A state of each matrix that lies by columns."""
    for number, state in enumerate(optimizer.state.values()):
        if state["exp_avg"].dim() == 2:
            rows, columns = state["exp_avg"].shape
            state["exp_avg"] = values((columns, rows), 90 + number).mT


def _turns(optimizer: Any) -> None:
    """States that an option brings; those that torch would miss begin anew."""
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()


_EDITS: dict[str, Any] = {"nothing": lambda _: None, "adds": _adds, "binds": _binds, "turns": _turns}


@pytest.mark.night
@requirement(
    "OPT-389",
    "Whichever request for memory fails, of the host or of the device, in a step, a prefetch, offload() or a load, no "
    "value MUST be lost: the same call succeeds when there is memory, and all that was selected has its place.",
)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("call", "edit"),
    # A step that has places to make for what a user bound makes them behind its arithmetic: it is over then.
    [
        *(("step", edit) for edit in ("nothing", "adds", "turns")),
        ("offload", "binds"),
        ("prefetch", "adds"),
        ("load_state_dict", "binds"),
    ],
)
def test_any_memory_fails(offload: Any, call: str, edit: str, release: str) -> None:
    options = {"lr": 0.1, "foreach": False}
    for refused in range(60):
        with proven() as device:
            twins = Twins(offload, device, "Adam", options=options, release=release, chunk_bytes=2048)
            twins.step()
            twins.set_gradients()
            for optimizer in (twins.plain, twins.optimizer):
                _EDITS[edit](optimizer)
            saved = reread(twins.plain.state_dict())
            arguments = (in_host_memory(device, saved),) if call == "load_state_dict" else ()
            made = twins.optimizer.step if call == "step" else partial(getattr(twins.offloader, call), *arguments)
            failed = _failing_once(device.engine, refused, made)
            if failed:
                with succeeds(f"{call} when there is memory again", where=f"request {refused} was refused"):
                    made()
            if call != "step":
                twins.optimizer.step()
            twins.plain.step()
            twins.step()
            twins.check()
            twins.offloader.offload()
            twins.offloader.release_gpu_memory()
            twins.offloader.settle()
            moving = [s for state in twins.optimizer.state.values() for s in state.values() if s.dim()]
            residency = twins.offloader.residency()
            found = residency.device_bytes, residency.host_bytes
            assert_equal(found, (0, sum(s.nbytes for s in moving)), where=f"request {refused}: device and host bytes")
            twins.offloader.close()
            if not failed:
                return
    assert_equal("60 requests", "fewer", where=f"{call} after {edit}")


def _failing_once(engine: Any, number: int, call: Any, names: Sequence[str] = ("host_empty", "device_empty")) -> bool:
    """Make a call whose request of that number for memory fails, of those of these names; whether there was one."""
    count = 0

    def counted(make: Any) -> Any:
        def empty(size_bytes: int) -> torch.Tensor:
            nonlocal count
            count += 1
            if count == number + 1:
                raise MemoryError("no memory")
            found: torch.Tensor = make(size_bytes)
            return found

        return empty

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(engine, name, counted(getattr(engine, name)))
        try:
            call()
        except MemoryError:
            return True
    return False


def _halved(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"] = state["exp_avg"].bfloat16()


def _by_columns(state: dict[str, torch.Tensor]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        if state[name].dim() == 2:
            state[name] = state[name].t().contiguous().t()


def _more(state: dict[str, torch.Tensor]) -> None:
    state["max_exp_avg_sq"] = state["exp_avg_sq"] * 2


@requirement(
    "OPT-462",
    "Where any request for host memory fails while a load is given its places, all that was loaded MUST be there, and "
    "the next call alone MUST bring it to the host once there is memory, without another load.",
)
@pytest.mark.parametrize("then", ["offload", "prefetch"])
@pytest.mark.parametrize("change", [_halved, _by_columns, _more])
def test_places_after_a_failure(offload: Any, change: Any, then: str) -> None:
    for refused in range(20):
        with proven() as device:
            twins = Twins(offload, device, "Adam", options={"lr": 0.1}, chunk_bytes=2048)
            twins.step()
            loaded = twins.offloader.snapshot()
            with _disable_current_modes():
                for number, state in loaded["state"].items():
                    if number != 1:
                        change(state)
                expected = {number: {k: v.clone() for k, v in held.items()} for number, held in loaded["state"].items()}
            load = partial(twins.offloader.load_state_dict, loaded)
            failed = _failing_once(device.engine, refused, load, ["host_empty"])
            with succeeds(then, where=f"host memory again behind request {refused}"):
                getattr(twins.offloader, then)()
                twins.offloader.offload()
            twins.offloader.settle()
            found = twins.optimizer.state_dict()["state"]
            with _disable_current_modes():
                for number, held in expected.items():
                    assert_equal(sorted(found[number]), sorted(held), where=f"states of {number}, request {refused}")
                    for name, value in held.items():
                        assert_same_tensor(found[number][name], value, where=f"{name} of {number}, request {refused}")
            size_bytes = sum(value.nbytes for held in found.values() for value in held.values() if value.dim())
            residency = twins.offloader.residency()
            places = residency.device_bytes, residency.host_bytes, residency.in_flight_bytes
            assert_equal(places, (0, size_bytes, 0), where=f"device, host and moving bytes behind request {refused}")
            twins.offloader.close()
            if not failed:
                assert_equal(refused > 0, True, where="a request that failed")
                return
    assert_equal("20 requests", "fewer", where=then)


@requirement(
    "OPT-484",
    "Where any request for memory of the device fails while parameters whose options have turned are given new places, "
    "each of them MUST have one place, and no more, with the next call, and the step be the plain optimizer's.",
)
def test_turned_without_device_memory(offload: Any) -> None:
    for refused in range(30):
        with proven() as device:
            twins = Twins(offload, device, "Adam", options={"lr": 0.1}, chunk_bytes=1 << 20)
            twins.step()
            with _disable_current_modes():
                expected = sum(3 * param.nbytes for param in twins.params)
            for optimizer in (twins.plain, twins.optimizer):
                optimizer.param_groups[0]["amsgrad"] = True
                for param, state in optimizer.state.items():
                    state["max_exp_avg_sq"] = torch.zeros_like(param)
            failed = _failing_once(device.engine, refused, twins.offloader.offload, ["device_empty"])
            where = f"request {refused} of memory of the device"
            with succeeds("offload()", where=f"memory again behind {where}"):
                twins.offloader.offload()
            assert_equal(len(twins.offloader.bundles), len(twins.params), where=f"parameters that move, {where}")
            assert_equal(twins.offloader.stats().payload_bytes, expected, where=f"bytes that move, {where}")
            assert_equal(twins.offloader.residency().device_bytes, 0, where=f"bytes on the device, {where}")
            twins.step()
            twins.check()
            twins.offloader.close()
            if not failed:
                assert_equal(refused > 1, True, where="requests that failed")
                return
    assert_equal("30 requests", "fewer", where="options that have turned")


_MOMENTS = ("exp_avg", "exp_avg_sq")


class _CopiesFail(InlineEngine):
    """A device that takes so many copies more."""

    copies_left = 1 << 30

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Raises when there are none left."""
        self.copies_left -= 1
        if self.copies_left < 0:
            raise MemoryError("no memory")
        super().copy(target, source)

    def holds(self, tensor: torch.Tensor) -> bool:
        """None is packed: each is a copy by itself."""
        return False


@requirement(
    "OPT-592",
    "Where the device has no memory for what left its group, the next step MUST give it back; what has returned by "
    "then MUST be stepped once and offloaded, as if the step that failed had not been tried.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_no_memory_for_what_left(offload: Any, step_device: str) -> None:
    for copies_left in range(5):
        for waits in (False, True):
            where = f"{copies_left} copies, a step between: {waits}"
            arms = []
            for copies in (1 << 30, copies_left):
                engine = _CopiesFail("cpu")
                params = [torch.nn.Parameter(values((4, 3), i)) for i in range(3)]
                optimizer = torch.optim.AdamW(params, lr=0.1)
                options = {"engine": engine, "chunk_bytes": 0, "step_device": step_device}
                offloader = offload.OptimizerStateOffloader(optimizer, **options)
                listed = optimizer.param_groups[0]["params"]
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.param_groups[0]["params"] = listed[:1]
                if copies < 4:
                    engine.copies_left = copies
                    with raises(MemoryError, where=where):
                        offloader.offload()
                    engine.copies_left = 1 << 30
                if waits:
                    params[0].grad = torch.ones_like(params[0])
                    optimizer.step()
                    found = [offloader.transfers.is_on_host(optimizer.state[p]["exp_avg"]) for p in params]
                    assert_equal(found, [True, False, False], where=f"on the host after {where}")
                optimizer.param_groups[0]["params"] = listed
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                assert_equal(offloader.residency().device_bytes, 0, where=f"bytes on the device after {where}")
                arms.append([*params, *(optimizer.state[param][name] for param in params for name in _MOMENTS)])
            for number, (got, expected) in enumerate(zip(*reversed(arms), strict=True)):
                assert_same_tensor(got.detach(), expected.detach(), where=f"tensor {number} after {where}")
