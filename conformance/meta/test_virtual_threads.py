"""The virtual device in more threads than one: what they do is seen there, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import UnsupportedError


def _in_thread(work: Callable[[], None]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # Handed to the thread that waits.
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("with_edge", [True, False])
def test_a_race_in_another_thread_is_found(with_edge: bool) -> None:
    with VirtualDevice() as device:
        engine, event = device.engine, device.engine.event()
        value = engine.device_empty(64).zero_()
        side = engine.stream("side")

        def work() -> None:
            with device.in_thread():
                assert engine.current() == "default"
                if with_edge:
                    engine.record(event, engine.current())
                    engine.wait(side, event)
                with engine.on(side):
                    torch.add(value, 1)
                    engine.keep(value, side)

        with engine.on(engine.stream("main's own")):
            assert _in_thread(work) is None
    assert [hazard.kind for hazard in device.hazards] == ([] if with_edge else ["race"])


def test_a_thread_that_is_not_watched_is_refused() -> None:
    with VirtualDevice() as device:
        engine, event = device.engine, device.engine.event()
        calls: list[Callable[[], object]] = [
            engine.current,
            engine.is_capturing,
            lambda: engine.record(event, "default"),
            lambda: engine.wait("default", event),
            lambda: engine.synchronize(event),
            lambda: engine.device_empty(1),
        ]
        for call in calls:

            def work(call: Callable[[], object] = call) -> None:
                call()

            error = _in_thread(work)
            assert isinstance(error, UnsupportedError)
            assert "other" in str(error)
    assert engine.current() == "default"
