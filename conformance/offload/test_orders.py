"""Any order of what a user may do between steps and inside them: values, and what is promised besides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from conformance.harness import assert_equal, examples, requirement, run_machine
from conformance.offload.cases import Twins
from conformance.offload.orders import MemoryWatch, OrdersMachine
from conformance.provers.virtual_device import VirtualDevice


@requirement(
    "OPT-340",
    "States that are rebound, dropped or written, options that are toggled, hooks that edit or raise inside a step, "
    "and parameters that leave and return MUST leave the plain optimizer's bits, groups and options, in any order.",
)
def test_any_order(offload: Any) -> None:
    class Machine(OrdersMachine):
        pass

    Machine.offload = offload
    run_machine(Machine, settings=settings(examples(30), stateful_step_count=25))


@requirement(
    "OPT-341",
    "After any verb or step the host memory that is alive MUST be what stats() says, and no memory of the device be "
    "held but what a state lies in, and slots that were prefetched; after close() none.",
)
def test_memory_in_any_order(offload: Any) -> None:
    class Machine(OrdersMachine):
        watches_memory, late = True, False

    Machine.offload = offload
    run_machine(Machine, settings=settings(examples(25), stateful_step_count=20))


@requirement(
    "OPT-342",
    "With release on request no memory of the device MUST be held once release_gpu_memory() has let go what a "
    "prefetch brought and a step used, however small the states are.",
)
def test_nothing_is_held_after_a_release(offload: Any) -> None:
    with VirtualDevice() as device:
        memory = MemoryWatch(device.engine)
        twins = Twins(offload, device, release="on_request", chunk_bytes=1 << 20)
        for number in range(3):
            twins.offloader.prefetch()
            twins.step()
            twins.offloader.offload()
            twins.offloader.release_gpu_memory()
            twins.offloader.settle()
            held = list(memory.held("device").values())
            assert_equal(held, [], where=f"device memory that is alive after release {number}")
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-372",
    "A chunk of small states that was brought to the device as one block MUST hold none of it once it has left, one "
    "state of it replaced meanwhile or not, by offload() or by a step.",
)
@pytest.mark.parametrize("replaced", [False, True])
def test_no_block_is_held(offload: Any, replaced: bool) -> None:
    with VirtualDevice() as device:
        memory = MemoryWatch(device.engine)
        twins = Twins(offload, device, chunk_bytes=1 << 20)
        for leave in (twins.offloader.offload, twins.step, twins.offloader.offload):
            twins.step()
            twins.offloader.to_device(twins.offloader.bundles)
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                state = optimizer.state[params[1]]
                state["exp_avg"] = state["exp_avg"] + 1 if replaced else state["exp_avg"]
            leave()
            twins.offloader.settle()
            held = list(memory.held("device").values())
            assert_equal(held, [], where="device memory that is alive when all is home")
        twins.check()
        twins.offloader.close()
