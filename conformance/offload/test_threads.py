"""Steps and verbs from more threads than one, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from conformance.harness import raises, requirement
from conformance.offload.cases import Twins, proven
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import UnsupportedError


def _in_thread(work: Callable[[], Any]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # Handed to the thread that waits.
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@contextmanager
def _on_side(device: VirtualDevice, side: str, twins: Twins) -> Iterator[None]:
    """On a stream behind the caller's, which comes behind it afterwards; parameters and gradients are used on both."""
    engine, event = device.engine, device.engine.event()
    engine.record(event, engine.current())
    engine.wait(side, event)
    with engine.on(side):
        yield
        engine.record(event, side)
    engine.wait(engine.current(), event)
    for param in (*twins.params, *twins.plain_params):
        engine.keep(param, side)
        if param.grad is not None:
            engine.keep(param.grad, side)


@requirement("OPT-233", "Calls from several threads, and of several streams, MUST give the bits of one.")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("with_side", [False, True])
def test_threads_take_turns(offload: Any, late: bool, with_side: bool) -> None:
    with proven(late=late) as device:
        twins = Twins(offload, device, slots=2, chunk_bytes=512)
        side = device.engine.stream("side")

        def work(*verbs: Callable[[], Any]) -> None:
            with device.in_thread(), _on_side(device, side, twins) if with_side else nullcontext():
                for verb in verbs:
                    verb()

        for number in range(5):
            twins.set_gradients()
            twins.plain.step()
            if number % 3 == 0:
                twins.offloader.prefetch()
                _in_thread(lambda: work(twins.optimizer.step))
            elif number % 3 == 1:
                _in_thread(lambda: work(twins.offloader.prefetch))
                twins.optimizer.step()
            else:
                _in_thread(lambda: work(twins.optimizer.step, twins.offloader.snapshot, twins.offloader.offload))
            twins.check()
        twins.offloader.close()


@requirement("OPT-241", "A step in a thread that the device does not watch MUST be refused with everything as it was.")
def test_unwatched_thread(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        with raises(UnsupportedError, mentions=("thread",)):
            _in_thread(twins.optimizer.step)
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()
