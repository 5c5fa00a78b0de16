"""The verbs in any order, exceptions, copies of the optimizer, and everything that is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import Twins, assert_same_state, proven, proven_on, reread, values
from conformance.provers.pretend_device import on_host
from twinproof.errors import ConfigError, OffloadConflictError


@requirement(
    "OPT-031", "Verbs that are repeated, or come before the first step, MUST change nothing and make no state."
)
def test_verbs_are_idempotent(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        for verb in ("prefetch", "offload", "offload", "prefetch", "prefetch", "reload", "sync_before_step"):
            getattr(twins.offloader, verb)()
        assert_equal(len(twins.optimizer.state), 0, where="states before the first step")
        twins.step()
        moved = dict(device.engine.moved_bytes)
        twins.offloader.offload()
        twins.offloader.offload()
        assert_equal(device.engine.moved_bytes, moved, where="bytes moved by a second offload")
        twins.offloader.prefetch()
        twins.offloader.prefetch()
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-034", "An exception inside the step MUST lose nothing, restore the groups, and let the next step work."
)
@pytest.mark.parametrize("broken", range(4))
def test_exception_in_step(offload: Any, device: str, broken: int) -> None:
    with proven_on(device) as place:
        single: list[tuple[list[int], dict[str, Any]]] = [([number], {}) for number in range(4)]
        twins = Twins(offload, place, "SGD", groups=single, options={"lr": 0.1, "momentum": 0.9})
        twins.step()
        groups = twins.optimizer.param_groups
        before = twins.offloader.snapshot()
        twins.set_gradients()
        groups[broken]["lr"] = None
        with raises(TypeError):
            twins.optimizer.step()
        groups[broken]["lr"] = 0.1
        assert_equal(twins.optimizer.param_groups is groups, True, where="param_groups restored")
        assert_equal(twins.offloader.residency().device_bytes, 0, where="state left on the device")
        after = twins.offloader.snapshot()
        with _disable_current_modes():
            for number in before["state"]:
                kept, now = (state["state"][number]["momentum_buffer"] for state in (before, after))
                stepped = kept.clone().mul_(0.9).add_(on_host(twins.params[number].grad).cpu())
                assert_equal(torch.equal(now, kept) or torch.equal(now, stepped), True, where=f"state {number}")
        # The retry: both arms go on from the same values.
        twins.plain.load_state_dict(reread(after))
        for plain, param in zip(twins.plain_params, twins.params, strict=True):
            with torch.no_grad():
                plain.copy_(param)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-036", "A group that is added after attachment MUST take part from the next step on.")
def test_added_group(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        twins.offloader.prefetch()
        for arm, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
            arm.append(torch.nn.Parameter(twins.placed(values((70, 50), 99))))
            optimizer.add_param_group({"params": [arm[-1]], "lr": 0.5})
        for _ in range(2):
            twins.step()
            twins.check()
        assert_equal(twins.offloader.residency().device_bytes, 0, where="residency")
        # Two moments of every parameter, the new one's too.
        payload = sum(2 * param.nbytes for param in twins.params)
        assert_equal(twins.offloader.stats().payload_bytes, payload, where="payload")
        twins.offloader.close()


@requirement("OPT-038", "close() MUST leave a plain optimizer with its own step and all values, twice as well as once.")
def test_close(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        for _ in range(2):
            twins.step()
        twins.offloader.close()
        twins.offloader.close()
        assert_equal("step" in vars(twins.optimizer), False, where="step still taken over")
        moved = dict(device.engine.moved_bytes)
        twins.step()
        assert_equal(device.engine.moved_bytes, moved, where="bytes moved after close")
        got = twins.optimizer.state_dict()
        with _disable_current_modes():
            assert_same_state(got, twins.plain.state_dict())
        with raises(ConfigError, mentions=("closed",)):
            twins.offloader.offload()
        with offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine) as again:
            twins.step()
            assert_equal(again.stats().step_count, 1, where="steps of a second offloader")


_VERBS = ("offload", "prefetch", "reload", "release_gpu_memory", "snapshot", "refresh_masters", "sync_before_step")


@requirement(
    "OPT-426",
    "Every verb of a closed offloader MUST be refused by name, and MUST leave states, masters and parameters as they "
    "are, a state dict and masters that it is given among them.",
)
def test_closed_verbs(offload: Any) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(((3, 5), (4,)))]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
        offloader = offload.OptimizerStateOffloader(optimizer, master_weights=masters, engine=device.engine)
        saved: list[Any] = []
        for _ in range(2):
            for number, param in enumerate(params):
                param.grad = values(tuple(param.shape), 7 + number, torch.bfloat16)
            optimizer.step()
            saved.append(offloader.snapshot())
        offloader.close()
        with _disable_current_modes():
            before = copy.deepcopy((optimizer.state_dict(), params, list(masters.parameters())))
        verbs: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys((*_VERBS, "mark_optimizer_states_initialized"), ()),
            "load_state_dict": (saved[0],),
            "load_masters": ([torch.zeros(param.shape) for param in params],),
        }
        for verb, given in verbs.items():
            with raises(ConfigError, mentions=("closed",), where=verb):
                getattr(offloader, verb)(*given)
            with _disable_current_modes():
                assert_same_state(optimizer.state_dict(), before[0])
                for kept, now in ((before[1], params), (before[2], list(masters.parameters()))):
                    for number, (old, new) in enumerate(zip(kept, now, strict=True)):
                        assert_same_tensor(new.detach(), old.detach(), where=f"{verb}: tensor {number}")


@requirement(
    "OPT-381",
    "close() MUST give the optimizer the very step back that it was attached to, a scheduler's or a user's too, and "
    "leave one that was put on top of ours meanwhile, which then calls the step that it was attached to.",
)
@pytest.mark.parametrize("below", ["nothing", "scheduler", "user"])
@pytest.mark.parametrize("above", ["nothing", "scheduler", "user"])
def test_steps_of_others(offload: Any, below: str, above: str) -> None:
    calls: list[str] = []

    def wrap(optimizer: Any, who: str, where: str) -> None:
        if who == "scheduler":
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        elif who == "user":
            inner = optimizer.step

            def step(_: Any) -> None:
                if optimizer is twins.optimizer:
                    calls.append(where)
                inner()

            # Schedulers take methods only.
            optimizer.step = MethodType(step, optimizer)

    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        twins.offloader.close()
        for optimizer in (twins.plain, twins.optimizer):
            wrap(optimizer, below, "below")
        before = vars(twins.optimizer).get("step")
        with offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine, chunk_bytes=1024) as offloader:
            twins.step()
            for optimizer in (twins.plain, twins.optimizer):
                wrap(optimizer, above, "above")
            top = vars(twins.optimizer)["step"]
            twins.step()
            assert_equal(offloader.stats().step_count, 2, where="steps that were offloaded")
        # A scheduler finds its mark on ours, and puts nothing on top.
        expected = top if above == "user" else before
        assert_equal(vars(twins.optimizer).get("step") is expected, True, where="the step after close()")
        calls.clear()
        moved = dict(device.engine.moved_bytes)
        twins.step()
        last = ["above"] * (above == "user") + ["below"] * (below == "user")
        assert_equal(calls, last, where="steps of the user's")
        assert_equal(device.engine.moved_bytes, moved, where="bytes moved after close()")
        got = twins.optimizer.state_dict()
        with _disable_current_modes():
            assert_same_state(got, twins.plain.state_dict())


@requirement("OPT-037", "An offloader and its memory MUST go when the optimizer and it are dropped.")
def test_garbage(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        twins.offloader.settle()
        dead = weakref.ref(twins.offloader)
        del twins
        gc.collect()
        device.tracker.sweep()
        hosts = sum(memory.size_bytes for memory in device.tracker.memories() if memory.on_host)
    assert_equal((dead() is None, hosts), (True, 0), where="offloader and its host memory")


@requirement("OPT-039", "A copy of the optimizer MUST be complete, plain and independent; the original goes on.")
def test_copies(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        twins.offloader.settle()
        with _disable_current_modes():
            copies = [copy.deepcopy(twins.optimizer), pickle.loads(pickle.dumps(twins.optimizer))]
            for other in copies:
                assert_equal("step" in vars(other), False, where="step of a copy")
                assert_same_state(other.state_dict(), twins.plain.state_dict())
                for group in other.param_groups:
                    for param in group["params"]:
                        param.grad = torch.ones_like(param)
                other.step()
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-040", "A second offloader, or one on a CPU-step optimizer, MUST be refused with both named.")
def test_conflicts(offload: Any) -> None:
    class CPUOffloadOptimizer(torch.optim.SGD):
        pass

    with proven() as device:
        twins = Twins(offload, device)
        with raises(OffloadConflictError, mentions=("AdamW", "OptimizerStateOffloader")):
            offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine)
        with raises(OffloadConflictError, mentions=("CPUOffloadOptimizer",)):
            other = CPUOffloadOptimizer([torch.nn.Parameter(values((3,), 0))], lr=0.1)
            offload.OptimizerStateOffloader(other, engine=device.engine)
        with raises(OffloadConflictError, mentions=("cpu",)):
            offload.OptimizerStateOffloader(twins.plain)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-045", "A step while a graph is being captured MUST be refused with everything as it was.")
def test_capture(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        device.engine.capturing = True
        with raises(OffloadConflictError, mentions=("capture",)):
            twins.optimizer.step()
        device.engine.capturing = False
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-074",
    "An option out of range MUST be a ConfigError that names it, what it is and what it may be; the optimizer stays.",
)
def test_options(offload: Any, device: str) -> None:
    # What stands there, and what is possible.
    wrong: list[tuple[str, Any, str]] = [
        ("fraction", -0.1, "0 to 1"), ("fraction", 1.5, "0 to 1"), ("fraction", float("nan"), "0 to 1"),
        ("chunk_bytes", -1, "an int >= 0"), ("chunk_bytes", 1.5, "an int >= 0"), ("slots", 0, "an int >= 1"),
        ("step_device", "gpu", "device or cpu"), ("release", "soon", "at_offload or on_request"),
        ("fused_update", 3, "(None, True, False)"),
    ]  # fmt: skip
    with proven_on(device) as place:
        optimizer = torch.optim.SGD([torch.nn.Parameter(values((3,), 0))], lr=0.1)
        for name, value, possible in wrong:
            with raises(ConfigError, mentions=(f"where: {name}", str(value), possible), where=f"{name}={value}"):
                offload.OptimizerStateOffloader(optimizer, engine=place.engine, **{name: value})
            assert_equal("step" in vars(optimizer), False, where="step taken over")


@requirement("OPT-042", "no_grad, autocast and another current stream around the calls MUST change nothing.")
def test_surroundings(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        side, event = device.engine.stream("side"), device.engine.event()
        twins.set_gradients()
        twins.plain.step()
        device.engine.record(event, device.engine.current())
        device.engine.wait(side, event)
        with torch.no_grad(), torch.autocast("cpu"), device.engine.on(side):
            twins.offloader.prefetch()
            twins.optimizer.step()
            for param in twins.params:
                device.engine.keep(param, side)
            device.engine.record(event, side)
        device.engine.wait(device.engine.current(), event)
        twins.step()
        twins.check()
        twins.offloader.close()
        device.engine.synchronize_stream(side)
        for plain, param in zip(twins.plain_params, twins.params, strict=True):
            with _disable_current_modes():
                assert_same_tensor(param.detach(), plain.detach(), where="parameter")


@requirement("OPT-029", "A scalar state, such as a step count, MUST stay where the optimizer put it.")
def test_scalars_stay(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, "Adam")
        twins.step()
        before = [id(state["step"]) for state in twins.optimizer.state.values()]
        twins.step()
        after = [id(state["step"]) for state in twins.optimizer.state.values()]
        twins.offloader.close()
    assert_equal(after, before, where="identity of the step counts")


@requirement("OPT-072", "Values that the host writes after a prefetch MUST be those of the next step.")
def test_written_after_prefetch(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, "SGD")
        twins.step()
        twins.offloader.prefetch()
        twins.offloader.settle_for_writing()
        for optimizer in (twins.plain, twins.optimizer):
            for state in optimizer.state.values():
                state["momentum_buffer"].fill_(0.5)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-363",
    "What the host writes to any block of its memory after a prefetch has arrived MUST be in the next step, though no "
    "call says so.",
)
def test_written_without_a_word(offload: Any) -> None:
    for written in (0, -1):
        with proven() as device:
            # What comes with a later group lies in a block of its own.
            twins = Twins(offload, device, "SGD", groups=[([0], {})], slots=2)
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                optimizer.add_param_group({"params": params[1:2]})
            twins.step()
            twins.offloader.prefetch()
            for stream in ("offload-h2d", "offload-d2h"):
                device.engine.synchronize_stream(stream)
            for params, optimizer in ((twins.plain_params[:2], twins.plain), (twins.params[:2], twins.optimizer)):
                optimizer.state[params[written]]["momentum_buffer"].fill_(0.5)
            twins.step()
            with _disable_current_modes():
                for plain, param in zip(twins.plain_params, twins.params, strict=True):
                    assert_same_tensor(param.detach(), plain.detach(), where=f"after a write to block {written}")
            twins.offloader.close()


@requirement(
    "OPT-243",
    "A parameter that is taken out of its group MUST be stepped no more and its state moved no more; the order of the "
    "others MUST NOT matter, and it MUST take part again when it is listed again.",
)
def test_unlisted(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        payload_bytes = twins.offloader.stats().payload_bytes
        moved_bytes = sum(state.nbytes for state in twins.plain.state[twins.plain_params[1]].values() if state.dim())
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["params"].pop(1)
        twins.step()
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["params"].reverse()
        twins.step()
        assert_equal(twins.offloader.stats().payload_bytes, payload_bytes - moved_bytes, where="payload of the others")
        with _disable_current_modes():
            for plain, param in zip(twins.plain_params, twins.params, strict=True):
                assert_same_tensor(param.detach(), plain.detach(), where="a parameter after a step of the others")
        for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
            del optimizer.state[params[1]]
        twins.step()
        twins.check()
        for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
            optimizer.param_groups[0]["params"].append(params[1])
        for _ in range(2):
            twins.step()
            twins.check()
        assert_equal(twins.offloader.stats().payload_bytes, payload_bytes, where="payload of all again")
        twins.offloader.close()


@requirement(
    "OPT-376",
    "A parameter whose place in a group another one takes, a new one or one that is listed already, MUST be moved and "
    "counted no more, and its state be back on the device.",
)
@pytest.mark.parametrize("taker", ["new", "listed"])
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
def test_replaced(offload: Any, taker: str, release: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((32 << number, 16), number)) for number in range(4)]
        optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:3]}], foreach=False)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=1, release=release)

        def step() -> None:
            for number, param in enumerate(params):
                param.grad = values(param.shape, 10 + number)
            optimizer.step()
            offloader.settle()

        step()
        gone = optimizer.param_groups[0]["params"][1]
        optimizer.param_groups[0]["params"][1] = params[3] if taker == "new" else params[0]
        step()
        taken = [params[0], params[2], *([params[3]] if taker == "new" else [])]
        size_bytes = sum(2 * param.nbytes for param in taken)
        assert_equal(offloader.stats().payload_bytes, size_bytes, where="bytes that move")
        assert_equal({id(bundle.param) for bundle in offloader.bundles}, set(map(id, taken)), where="what moves")
        on_host = [offloader.transfers.is_on_host(state) for state in optimizer.state[gone].values() if state.dim()]
        assert_equal(on_host, [False, False], where="its state in host memory")
        before = dict(device.engine.moved_bytes)
        step()
        offloader.offload()
        offloader.release_gpu_memory()
        moved = device.engine.moved_bytes["d2h"] - before["d2h"]
        assert_equal(moved, size_bytes, where="bytes that a step and offload() send home")
        del optimizer.state[gone]
        offloader.close()
        assert_equal(offloader.stats().host_bytes, 0, where="host memory after close()")
