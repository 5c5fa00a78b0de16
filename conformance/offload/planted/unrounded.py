"""Faults that ``test_unrounded`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_STATES = "twinproof.offload.states"
_OFFLOADER = "twinproof.offload.offloader:OptimizerStateOffloader"

masters_that_nobody_rounds_taken = patched(
    "Masters that are neither given nor attached are stepped for nobody.",
    mutated(f"{_STATES}:check_rounded", "if not isinstance(param, _Master) or param.master_of.param is None:", "if 1:"),
    kills="OPT-541",
)
attached_anywhere_suffices = patched(
    "Masters that some other steps take gradients for count as attached to this optimizer.",
    mutated(f"{_STATES}:check_rounded", "if not any(", "if not param.is_driven and not any("),
    kills="OPT-541",
)
attached_beside_others_suffices = patched(
    "Masters beside others that are attached to the optimizer count as attached.",
    mutated(f"{_STATES}:check_rounded", " and param in each.pairs for each", " for each"),
    kills="OPT-541",
)

late_masters_taken = patched(
    "Whether masters are rounded is asked of those that are there at attachment.",
    mutated(
        "twinproof.offload.driver:MovePlan._check_place",
        "if not self.is_master(param):",
        "if not self.is_master(param) and not self.known:",
    ),
    kills="OPT-542",
)
masters_of_no_model_refused = patched(
    "Masters whose model is gone have to be rounded into it.",
    mutated(f"{_STATES}:check_rounded", " or param.master_of.param is None", ""),
    kills="OPT-542",
)

parameters_looked_at_before_masters = patched(
    "What a step on the CPU needs of parameters is said before that these are no masters that were given.",
    mutated(
        f"{_OFFLOADER}.__init__",
        "master_weights.check_stepped_by(optimizer)",
        "_check_options(optimizer, fraction, chunk_bytes, slots, step_device, release)"
        "; master_weights.check_stepped_by(optimizer)",
    ),
    kills="OPT-543",
)

step_on_the_cpu_not_told = patched(
    "Who has parameters on the CPU is not told of steps there.",
    mutated("twinproof.offload.driver:check_devices", "an accelerator, step_device='cpu', or", "an accelerator, or"),
    kills="OPT-544",
)

advice_that_loses_bits = patched(
    "Who loaded a model is told to round the masters to it.",
    mutated(f"{_STATES}:MasterWeights.check", "only where none were saved, or the write was meant", ""),
    kills="OPT-545",
)
names_of_an_offloader = patched(
    "Masters of a plain optimizer are told of methods that an offloader has.",
    mutated(f"{_STATES}:MasterWeights.check", "if self._mover is None else", "if False else"),
    kills="OPT-545",
)

masters_of_attachment_rounded = patched(
    "Masters of a group that is added later are stepped, and never rounded into the model.",
    mutated(
        f"{_STATES}:MasterWeights.attach",
        "optimizer.register_step_post_hook(lambda stepped, *_: self.end(self.stepped_by(stepped)))",
        "optimizer.register_step_post_hook(lambda *_, mine=self.stepped_by(optimizer): self.end(mine))",
    ),
    kills="OPT-564",
)
masters_of_attachment_given = patched(
    "Masters of a group that is added later get no gradients.",
    mutated(
        f"{_STATES}:MasterWeights.attach",
        "optimizer.register_step_pre_hook(self.before_step)",
        "optimizer.register_step_pre_hook(lambda *a, mine=self.stepped_by(optimizer): self.start(mine))",
    ),
    kills="OPT-564",
)


@fault(kills="OPT-565", at=f"{_STATES}:MasterWeights.attach")
def masters_of_attachment_show_gradients(original: Any, masters: Any, optimizer: Any) -> None:
    """Masters that the optimizer steps later have no gradients until then."""
    original(masters, optimizer)
    stepped = {param for group in optimizer.param_groups for param in group["params"]}
    for master in masters.parameters():
        master.is_driven = master in stepped
