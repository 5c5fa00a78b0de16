"""What the process is beside the offloader: a default device that a caller has set for its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import requirement, succeeds
from conformance.offload.cases import CpuArm, proven


@requirement(
    "OPT-378",
    "The process's default device MUST NOT decide where states and host memory of a step on the CPU lie: steps under "
    "another one, the first among them, MUST be those without.",
)
@pytest.mark.parametrize("halves", [False, True])
def test_default_device(offload: Any, halves: bool) -> None:
    with proven() as device:
        arm = CpuArm(offload, device, halves=halves)
        step = arm.optimizer.step

        def under_meta() -> None:
            with torch.device("meta"), succeeds("a step", where="on meta"):
                step()

        arm.optimizer.step = under_meta
        for _ in range(3):
            arm.step()
            arm.check()
        arm.offloader.close()
