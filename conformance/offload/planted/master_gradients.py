"""Faults that ``test_master_gradients`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_STATES = "twinproof.offload.states"

gradients_cleared_of_masters_alone = patched(
    "Who clears the gradients of masters leaves those of the model.",
    mutated(f"{_STATES}:_take_grad", "if param is not None and master.is_driven:", "if False:"),
    kills="OPT-524",
)
gradients_seen_in_steps_alone = patched(
    "Between steps masters have no gradient.",
    mutated(f"{_STATES}:_shown_grad", "if _has_own(master, param) else param.grad", ""),
    kills="OPT-524",
)
gradients_of_another_dtype_lost = patched(
    "A gradient of another dtype that a master is given between steps is lost.",
    mutated(
        f"{_STATES}:_take_grad",
        " if isinstance(value, torch.Tensor) else value",
        " if value is not None and value.dtype == param.dtype else None",
    ),
    kills="OPT-524",
)

plain_masters_alone_show_gradients = patched(
    "A master that is a DTensor has no gradient between steps.",
    mutated(
        f"{_STATES}:_bind",
        "_master_class(kind)",
        "_master_class(kind) if kind is torch.nn.Parameter else kind",
    ),
    kills="OPT-525",
)


@fault(kills="OPT-526", at=f"{_STATES}:_bind")
def masters_stepped_one_by_one(original: Any, master: Any, param: Any) -> None:
    """Torch does not know the class of masters, and steps them one by one."""
    original(master, param)
    kind: Any = type(master)
    master.__class__ = type(kind)("Unknown", (kind,), {})


copied_masters_of_no_model = patched(
    "A copy of masters is of no model.",
    mutated(f"{_STATES}:MasterWeights.__setstate__", "_bind(master, param)", "pass"),
    kills="OPT-526",
)

shared_masters_bound_anew = patched(
    "A shallow copy of masters takes those that it shares from the steps of the first.",
    mutated(f"{_STATES}:_bind", "if isinstance(master, _Master):", "if False:"),
    kills="OPT-526",
)

cast_masters_stepped = patched(
    "A parameter that was its own master until it was cast is stepped in its new dtype.",
    mutated(f"{_STATES}:MasterWeights.check", "if master.dtype is not torch.float32:", "if False:"),
    kills="OPT-527",
)

gradients_of_the_step_that_failed = patched(
    "Masters keep the gradients of a step that raised, which the next step throws away.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._run", "self.masters.give_back()", "pass"),
    kills="OPT-593",
)

gradients_taken_with_the_step = patched(
    "A step that raised has cleared the gradients of the model.",
    mutated(f"{_STATES}:MasterWeights.give_back", "master.given = None", "master.given = param.grad = None"),
    kills="OPT-593",
)

models_never_go = patched(
    "A master is taken to have a model for ever.",
    mutated(f"{_STATES}:_has_own", "param is None or ", ""),
    kills="OPT-528",
)

cleared_with_the_model = patched(
    "Clearing the gradient of a master needs its model.",
    mutated(f"{_STATES}:_take_grad", "param is not None and master.is_driven", "master.is_driven"),
    kills="OPT-528",
)

cleared_by_nobody = patched(
    "Clearing the gradient of a master clears its parameter's, whoever steps it.",
    mutated(f"{_STATES}:_take_grad", "param is not None and master.is_driven", "param is not None"),
    kills="OPT-529",
)

gradients_of_any_kind = patched(
    "What a master is given is taken for a tensor.",
    mutated(f"{_STATES}:_take_grad", " if isinstance(value, torch.Tensor) else value", ""),
    kills="OPT-529",
)

gradients_of_the_failed_step_shown = patched(
    "Masters show what a failed step had taken, whatever gradients the model has got since.",
    mutated(f"{_STATES}:_has_own", "(param.grad is grad and grad._version == version)", "grad._version == version"),
    kills="OPT-540",
)

masters_that_left_stepped = patched(
    "A step of everything at once takes the gradients of masters that left their groups.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._step_whole",
        "masters = self._stepped_masters()",
        "masters = [] if self.masters is None else list(self.masters.pairs)",
    ),
    kills="OPT-570",
)

masters_that_left_checked = patched(
    "A parameter whose master left its group counts as changed behind its master's back.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._check_step",
        "self.masters.check(self._stepped_masters())",
        "self.masters.check(self.masters.pairs)",
    ),
    kills="OPT-570",
)

closures_of_masters_that_left = patched(
    "A closure gives its gradients to masters that the optimizer does not step, too.",
    mutated(
        f"{_STATES}:MasterWeights.with_closure",
        "some, count = self.stepped_by(optimizer), 0",
        "some, count = list(self.pairs), 0",
    ),
    kills="OPT-570",
)
