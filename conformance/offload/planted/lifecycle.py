"""Faults that ``test_lifecycle`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.offload.planted.planting import altered


@fault(kills="OPT-036", at="twinproof.offload.driver:MovePlan.adopt")
def new_params_unseen(original: Any, plan: Any, transfers: Any) -> Any:
    """Parameters of a later group are not offloaded."""
    return not plan.known and original(plan, transfers)


@fault(kills="OPT-034", at="fastimpl.offload.transfers:StreamedTransfers._update")
def groups_not_restored(original: Any, transfers: Any, params: Any, arithmetic: Any) -> Any:
    """A step that raises leaves copies in place of the parameter groups."""
    optimizer = transfers.plan.optimizer
    groups = optimizer.param_groups
    try:
        return original(transfers, params, arithmetic)
    except Exception:
        optimizer.param_groups = [dict(group) for group in groups]
        raise


@fault(kills="OPT-031", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__")
def state_made_by_attachment(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    """Attachment allocates optimizer state."""
    original(offloader, *arguments, **options)
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            offloader.optimizer.state[param]["exp_avg"] = torch.zeros_like(param)


@fault(kills="OPT-038", at="twinproof.offload.offloader:OptimizerStateOffloader.close")
def close_keeps_attached(original: Any, offloader: Any) -> None:
    """close() does not give the optimizer its own step back."""
    offloader.settle()


_KEPT: list[Any] = []


@fault(kills="OPT-037", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__")
def offloader_kept(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    """A global list keeps every offloader."""
    _KEPT.append(offloader)
    original(offloader, *arguments, **options)


@fault(kills="OPT-074", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__")
def options_corrected(original: Any, offloader: Any, optimizer: Any, *, engine: Any = None, **options: Any) -> None:
    """Options out of range are replaced in silence."""
    known = {"master_weights": options.get("master_weights"), "slots": 2}
    original(offloader, optimizer, engine=engine, **known)


@fault(kills="OPT-029", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def scalars_replaced(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """A step replaces scalar states by new tensors."""
    result = original(offloader, arithmetic)
    for state in offloader.optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                state[name] = value.clone()
    return result


@fault(kills="OPT-045", at="conformance.provers.virtual_device.engine:VirtualEngine.is_capturing")
def capture_ignored(original: Any, engine: Any) -> Any:
    """A step is recorded into a graph."""
    return False


@fault(kills="OPT-039", at="torch.optim:Optimizer.__getstate__")
def copies_without_state(original: Any, optimizer: Any) -> Any:
    """A copy of an offloaded optimizer has no state."""
    return {**original(optimizer), "state": {}}


@fault(kills="OPT-243", at="twinproof.offload.driver:MovePlan._forget_unlisted")
def unlisted_kept(original: Any, plan: Any, transfers: Any) -> Any:
    """A parameter that left its group is offloaded for ever."""


@fault(kills="OPT-243", at="fastimpl.offload.positions:GroupPositions.refresh")
def order_remembered(original: Any, listing: Any, groups: Any, moving: Any) -> None:
    """Where a parameter stands in its group is looked up once, and only a group of another length looked at again."""
    # A group that has grown or shrunk is noticed; another order is not.
    if [len(group["params"]) for group in groups] != list(map(len, listing._ids)) or not listing._moving:
        original(listing, groups, moving)


slots_written_before_their_allocation = patched(
    "A copy in does not wait for the stream that allocated its slot.",
    altered("_fetch_first", "wait", 1),
    kills=("OPT-031", "OPT-012"),
)


def _fetched_anyway(original: Any, offloader: Any) -> None:
    slots, fetched = offloader._slots, offloader._fetched
    original(offloader)
    offloader._slots, offloader._fetched = slots, fetched


@fault(kills="OPT-072", of="fastimpl")
def prefetched_values_trusted() -> Iterator[None]:
    """What was written to host memory after a prefetch is lost."""
    only_once = wrap(
        "fastimpl.offload.transfers:StreamedTransfers._fetch_first",
        lambda original, own: None if own._slots else original(own),
    )
    with only_once(), wrap("fastimpl.offload.transfers:StreamedTransfers.settle_for_writing", _fetched_anyway)():
        yield


first_version_only = patched(
    "Of the blocks that were prefetched from only the first is looked at for writes.",
    mutated(
        "fastimpl.offload.transfers:StreamedTransfers._fetch_first",
        "for chunk in self._chunks[: self._fetched])",
        "for chunk in self._chunks[:1])",
    ),
    kills="OPT-363",
)
no_version = patched(
    "What was written to host memory without a word after a prefetch is lost.",
    mutated(
        "fastimpl.offload.transfers:StreamedTransfers._fetch_first", "self._version_of(chunk) != chunk.version", "False"
    ),
    kills="OPT-363",
)


@fault(kills=("OPT-376", "OPT-377"), at="twinproof.offload.driver:MovePlan._forget_unlisted")
def unlisted_by_their_number(original: Any, plan: Any, transfers: Any) -> None:
    """Where as many parameters are listed as before, none of them counts as gone."""
    if sum(len(group["params"]) for group in plan.optimizer.param_groups) != len(plan.known):
        original(plan, transfers)


@fault(kills="OPT-376", at="twinproof.offload.driver:MovePlan._forget_unlisted")
def unlisted_beside_new_ones(original: Any, plan: Any, transfers: Any) -> None:
    """A parameter counts as gone only if a new one came, or fewer places are left."""
    listed = [param for group in plan.optimizer.param_groups for param in group["params"]]
    if not plan.known.issuperset(listed) or len(listed) < len(plan.known):
        original(plan, transfers)


step_of_others_dropped = patched(
    "close() drops the step that a scheduler or a user had put on the optimizer before.",
    mutated("twinproof.offload.driver:StepDriver.detach", "if self._before is None:", "if True:"),
    kills="OPT-381",
)

possible_values_not_said = patched(
    "A place to step that there is not is refused without those that there are.",
    mutated(
        "twinproof.offload.offloader:_check_options",
        'expected="device or cpu", where="step_device"',
        'where="step_device"',
    ),
    kills="OPT-074",
)

loads_after_close = patched(
    "A closed offloader loads a state dict.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict",
        "self._check_open()",
        "pass",
    ),
    kills="OPT-426",
)
