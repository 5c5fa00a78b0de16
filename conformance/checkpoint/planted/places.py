"""Faults that ``test_places`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-480", at="fastimpl.checkpoint.device_copies:DoubleBuffer.copy")
def staged_twice(original: Any, buffers: Any, target: Any, source: Any) -> Any:
    """What is staged comes to the host by way of a pageable copy of its own."""
    if source.device.type != "cpu":
        source.cpu()
    return original(buffers, target, source)


@fault(kills="CKPT-481", at="fastimpl.checkpoint.device_copies:DoubleBuffer.copy")
def read_back_after_a_load(original: Any, buffers: Any, target: Any, source: Any) -> Any:
    """What was loaded to a device is read back at once."""
    event = original(buffers, target, source)
    if target.device.type != "cpu":
        target.cpu()
    return event
