"""Faults that ``test_cpu_step_sharded`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="OPT-215", at="fastimpl.offload.cpu_step:prepare_states")
def cpu_shard_unwrapped(original: Any, optimizer: Any, update: Any, home: Any) -> None:
    """States of a first step are plain tensors, which no checkpoint reshards."""
    original(optimizer, update, home)
    state = optimizer.state[update.bundle.param]
    for name in update.state_names:
        state[name] = getattr(state[name], "_local_tensor", state[name])
