"""Faults that ``test_export`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault


@fault(kills="OPT-089", at="twinproof.offload.offloader:_engine_of")
def first_device_taken(original: Any, optimizer: Any, step_device: str, engine: Any, transfers: Any) -> Any:
    """Parameters on several devices are accepted, and the first device is used."""
    if engine is None:
        return transfers.default_engine(torch.device("cpu"))
    return original(optimizer, step_device, engine, transfers)
