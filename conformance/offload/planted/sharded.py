"""Faults that ``test_sharded`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap


@fault(kills=("OPT-080", "OPT-081"), at="twinproof.offload.driver:expected_states")
def sharded_states_left(original: Any, optimizer: Any, param: Any, *given: Any) -> Any:
    """The states of DTensors stay on the device (pytorch #144397)."""
    return {} if hasattr(param, "_local_tensor") else original(optimizer, param, *given)


@fault(kills="OPT-086", at="twinproof.offload.driver:expected_states")
def sharded_factors(original: Any, optimizer: Any, param: Any, *given: Any) -> Any:
    """Adafactor's factored states get the shape of each shard, not of the whole parameter."""
    return original(optimizer, getattr(param, "_local_tensor", param), *given)


loaded_shards_lose_their_mesh = patched(
    "A load puts shards on the device as plain tensors.",
    mutated("twinproof.offload.driver:_settled", "if source is found:", "if True:"),
    kills="OPT-390",
)

versions_of_shards_alone = patched(
    "Whether a DTensor was written is asked of its shard, whose version an operation on the DTensor leaves.",
    mutated("twinproof.offload.states:version_of", "tensor._version,", "local_of(tensor)._version,"),
    kills="OPT-431",
)

plain_states_alone_are_looked_at = patched(
    "Whether a state was written behind a prefetch is asked of the block alone, where a DTensor's shard only lies.",
    mutated("fastimpl.offload.transfers:StreamedTransfers._version_of", "is not tensor or name", "is name or name"),
    kills="OPT-431",
    of="fastimpl",
)


@fault(kills="OPT-500", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def layers_left_out_are_stepped(original: Any, offloader: Any, arithmetic: Any) -> None:
    """A layer that a step did not go through is stepped with a gradient of zeros."""
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
    original(offloader, arithmetic)


states_in_the_order_of_steps = patched(
    "States stand in the order in which they were stepped, another one on each rank.",
    swap("twinproof.offload.offloader:place_in_order", lambda optimizer, known_count: None),
    kills=("OPT-520", "OPT-521"),
)
only_states_of_the_first_step = patched(
    "States that come in a later step stand in the order in which they were stepped.",
    mutated("twinproof.offload.states:place_in_order", "len(held) == known_count", "known_count"),
    kills="OPT-520",
)
loads_keep_the_order = patched(
    "Behind a load states stand in the order in which they stood before it.",
    mutated("twinproof.offload.driver:_take_over", "put_in_order(held, [", "put_in_order({}, [] and ["),
    kills="OPT-520",
)
