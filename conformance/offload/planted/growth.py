"""Faults that ``test_growth`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-560", at="fastimpl.offload.cpu_step:HostStep._update")
def groups_walked_for_each_chunk(original: Any, step: Any, work: Any, pairs: Any) -> None:
    """A chunk that the CPU steps looks its groups up among all parameters of the optimizer."""
    assert {param for group in step.plan.optimizer.param_groups for param in group["params"]}
    original(step, work, pairs)


@fault(kills="OPT-560", at="fastimpl.offload.transfers:StreamedTransfers._update_chunk")
def positions_found_for_each_chunk(original: Any, transfers: Any, number: int, chunk: Any, arithmetic: Any) -> None:
    """Where the parameters of a chunk stand in their groups is found anew."""
    transfers._positions._ids = []
    transfers._positions.refresh(transfers.plan.optimizer.param_groups, transfers._positions._moving)
    original(transfers, number, chunk, arithmetic)


each_noted_by_itself = patched(
    "Whenever a master is rounded, all parameters in its tensor are looked at.",
    mutated("twinproof.offload.states:MasterWeights._note", "self._waiting is None", "True"),
    kills="OPT-561",
)
noted_for_each_chunk = patched(
    "What the masters of a chunk wrote is noted behind the chunk.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._step", "self.masters is None", "True"),
    kills="OPT-561",
)
forms_forgotten = patched(
    "The states of each parameter are foreseen anew.",
    mutated("twinproof.offload.driver:expected_states", "known[form] = found", "pass"),
    kills="OPT-562",
)
