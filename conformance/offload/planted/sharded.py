"""Faults that ``test_sharded`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills=("OPT-080", "OPT-081"), at="twinproof.offload.driver:expected_states")
def sharded_states_left(original: Any, optimizer: Any, param: Any, group: Any) -> Any:
    """The states of DTensors stay on the device (pytorch #144397)."""
    return {} if hasattr(param, "_local_tensor") else original(optimizer, param, group)


@fault(kills="OPT-086", at="twinproof.offload.driver:expected_states")
def sharded_factors(original: Any, optimizer: Any, param: Any, group: Any) -> Any:
    """Adafactor's factored states get the shape of each shard, not of the whole parameter."""
    return original(optimizer, getattr(param, "_local_tensor", param), group)
