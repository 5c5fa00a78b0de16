"""Attaching to an optimizer that has run already, and attachment that fails."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, raises, requirement
from conformance.offload.support import Twins, proven


@requirement(
    "OPT-087",
    "An offloader MUST take over the state of an optimizer that has run already, and a prefetch that follows at once "
    "MUST bring those values.",
)
def test_attached_late(offload: Any) -> None:
    for late in (False, True):
        with proven(late=late) as device:
            twins = Twins(offload, device)
            twins.offloader.close()
            for _ in range(2):
                twins.step()
            twins.offloader = offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine, chunk_bytes=1024)
            assert_equal(twins.offloader.residency().device_bytes, 0, where="residency after attachment")
            twins.offloader.prefetch()
            twins.step()
            twins.check()
            twins.offloader.close()


class _OutOfMemory(RuntimeError):
    """What pinning raises when the host has no more."""


@requirement("OPT-035", "Attachment that fails for lack of host memory MUST leave a plain optimizer that goes on.")
def test_no_host_memory(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        twins.offloader.close()
        twins.step()
        real = device.engine.host_empty

        def refuse(size_bytes: int) -> torch.Tensor:
            raise _OutOfMemory(f"{size_bytes} bytes")

        device.engine.host_empty = refuse  # type: ignore[method-assign]
        with raises(_OutOfMemory):
            offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine)
        device.engine.host_empty = real  # type: ignore[method-assign]
        assert_equal("step" in vars(twins.optimizer), False, where="step taken over")
        twins.step()
        with offload.OptimizerStateOffloader(twins.optimizer, engine=device.engine) as twins.offloader:
            twins.step()
            twins.check()
