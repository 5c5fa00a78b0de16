"""Faults that ``test_wrong_types`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.errors import UnsupportedError


@fault(kills="OPT-360", at="twinproof.offload.states:check_params")
def anything_is_a_parameter(original: Any, params: Any) -> Any:
    """What is no parameter is passed over."""
    import torch

    return [each for each in params if isinstance(each, torch.Tensor)] if isinstance(params, list) else []


@fault(kills="OPT-361", at="twinproof.offload.offloader:unwrapped")
def class_not_named(original: Any, optimizer: Any) -> Any:
    """What is no optimizer is refused without what it was."""
    try:
        return original(optimizer)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, got=None, expected=None, where=None) from None


unbound_class_goes_on = patched(
    "A class without transfers goes on until it needs them.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader.__init__", "if transfers is None:", "if False:"),
    kills="OPT-391",
)

flags_of_offloader_may_be_text = patched(
    "A flag that is text is taken: false is true.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__", "check_flags(pin_memory=pin_memory)", "pass"
    ),
    kills="OPT-419",
)

anything_is_a_master = patched(
    "What are no master weights are asked as if they were.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__",
        'check_kind(master_weights, MasterWeights, "master_weights", "MasterWeights")',
        "pass",
    ),
    kills="OPT-420",
)

first_of_an_engine_suffices = patched(
    "What has the first thing that an engine has is taken for one.",
    mutated("twinproof.engine:check_engine", "for name in names if", "for name in names[:1] if"),
    kills="OPT-536",
)
