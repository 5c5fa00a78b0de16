"""Faults in state dicts, loads, copies and masters."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"
STATES = "twinproof.offload.states"
FAST = "fastimpl.offload.transfers:StreamedTransfers"
_KEPT: list[Any] = []


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def _through_torch(offloader: Any, state_dict: dict[str, Any]) -> None:
    offloader.optimizer.load_state_dict(state_dict)


def _live(offloader: Any) -> dict[str, Any]:
    found: dict[str, Any] = offloader.optimizer.state_dict()
    return found


def _options_of_attachment(original: Any, offloader: Any, arithmetic: Any) -> Any:
    groups = offloader.optimizer.param_groups
    first = offloader.__dict__.setdefault("_first", [{k: v for k, v in g.items() if k != "params"} for g in groups])
    now = [dict(group) for group in groups]
    for group, then in zip(groups, first, strict=False):
        group.update(then)
    try:
        return original(offloader, arithmetic)
    finally:
        for group, current in zip(groups, now, strict=True):
            group.update(current)


def _quieted(original: Any, value: Any) -> Any:
    return value.detach() + 0 if isinstance(value, torch.Tensor) else original(value)


def _brings_back(original: Any, optimizer: Any, hook: Any, *rest: Any) -> Any:
    def brings(*arguments: Any) -> Any:
        found = getattr(optimizer, "_twinproof_offloader", None)
        if found is not None:
            found.to_device(found.bundles)
        return hook(*arguments)

    return original(optimizer, brings, *rest)


def _groups_first(original: Any, offloader: Any, state_dict: dict[str, Any]) -> Any:
    for group, other in zip(offloader.optimizer.param_groups, state_dict["param_groups"], strict=False):
        group.update({key: value for key, value in other.items() if key != "params"})
    return original(offloader, state_dict)


def _each_once(original: Any, masters: Any, params: Any) -> None:
    original(masters, [p for p in dict.fromkeys(params) if p.is_floating_point()])


def _truncated(original: Any, masters: Any, some: Any) -> None:
    for master in some:
        param = masters.pairs[master]
        if param is not master and master.grad is not None:
            with torch.no_grad():
                param.copy_((master.view(torch.int32) >> 16 << 16).view(torch.float32))
            master.grad = param.grad = None
            masters._note(master)


def _masters_only(original: Any, masters: Any, values: Any) -> None:
    before = [param.detach().clone() for param in masters.pairs.values()]
    original(masters, values)
    for (master, param), value in zip(masters.pairs.items(), before, strict=True):
        with torch.no_grad():
            param.copy_(value)
        masters._note(master)


def _forgets_the_place(transfers: Any, bundle: Any) -> None:
    for chunk in transfers._chunks:
        chunk.bundles = [other for other in chunk.bundles if other is not bundle]
    transfers._chunks = [chunk for chunk in transfers._chunks if chunk.bundles]


def _scalars_forgotten(original: Any, offloader: Any, state_dict: dict[str, Any]) -> Any:
    state = {
        number: {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) and v.dim() == 0 else v for k, v in one.items()}
        for number, one in state_dict["state"].items()
    }
    return original(offloader, {**state_dict, "state": state})


def _without_state(original: Any, optimizer: Any) -> Any:
    return {**original(optimizer), "state": {}}


PLANTED = (
    _bug(
        "masters_left_in_a_forgotten_block",
        "What a bundle still has in its old block counts as moved.",
        ("OPT-049",),
        swap("fastimpl.offload.transfers:StreamedTransfers.unplace", _forgets_the_place),
        "fastimpl",
    ),
    _bug(
        "masters_loaded_without_parameters",
        "Loaded masters do not reach the parameters before the next step.",
        ("OPT-044",),
        wrap("twinproof.offload.masters:MasterWeights.load", _masters_only),
    ),
    _bug("strides_lost", "State comes back contiguous.", ("OPT-017",), swap(f"{STATES}:_dense_strides", _contiguous)),
    _bug(
        "load_casts",
        "A load goes through torch's, which casts to the parameter's dtype.",
        ("OPT-014",),
        swap(f"{BASE}.load_state_dict", _through_torch),
    ),
    _bug("snapshot_is_live", "A snapshot is the live state.", ("OPT-050",), swap(f"{BASE}.snapshot", _live)),
    _bug(
        "options_of_attachment",
        "The learning rate is that of attachment.",
        ("OPT-003",),
        wrap(f"{BASE}._run", _options_of_attachment),
    ),
    _bug(
        "values_quieted",
        "NaN payloads and signed zeros are lost in a load.",
        ("OPT-015",),
        wrap("twinproof.offload.plan:copied", _quieted),
    ),
    _bug(
        "state_dict_brings_back",
        "A state dict brings everything back to the device.",
        ("OPT-047",),
        wrap("torch.optim:Optimizer.register_state_dict_pre_hook", _brings_back),
    ),
    _bug(
        "failed_load_half_done",
        "A load that is refused has changed the groups.",
        ("OPT-053",),
        wrap(f"{BASE}.load_state_dict", _groups_first),
    ),
    _bug(
        "masters_deduplicated",
        "Doubtful parameters are skipped in silence.",
        ("OPT-043",),
        wrap("twinproof.offload.masters:MasterWeights.__init__", _each_once),
    ),
    _bug(
        "masters_truncated",
        "Masters are cut to bf16 instead of rounded.",
        ("OPT-012",),
        wrap("twinproof.offload.masters:MasterWeights.end", _truncated),
    ),
    _bug(
        "stale_masters_unnoticed",
        "A loaded model is overwritten by old masters.",
        ("OPT-041",),
        swap("twinproof.offload.masters:MasterWeights.check", lambda masters, some: None),
    ),
    _bug(
        "counts_forgotten_on_load",
        "Step counts start again after a load.",
        ("OPT-048",),
        wrap(f"{BASE}.load_state_dict", _scalars_forgotten),
    ),
    _bug(
        "copies_without_state",
        "A copy of an offloaded optimizer has no state.",
        ("OPT-039",),
        wrap("torch.optim:Optimizer.__getstate__", _without_state),
    ),
)
