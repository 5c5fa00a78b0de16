"""Faults that ``test_dropped`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

offloaders_hold_their_holder = patched(
    "What the optimizer has of its offloader holds the optimizer.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._without_keeps", "object.__new__(type(self))", "self"),
    kills="OPT-537",
)
decorators_of_torch_hold_steps = patched(
    "A step is kept by torch's decorator, which holds itself.",
    mutated(
        "twinproof.engine:outside_of_graphs",
        "functools.wraps(function)",
        "torch._disable_dynamo",
    ),
    kills="OPT-537",
)
steps_hold_their_optimizer = patched(
    "The step that stands on an optimizer holds it.",
    mutated("twinproof.engine:method_of", "weakly(method)", "lambda *given: method(*given)"),
    kills="OPT-537",
)


@fault(kills="OPT-538", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__")
def optimizers_not_held(original: Any, offloader: Any, *args: Any, **options: Any) -> None:
    """An offloader has its optimizer only as long as somebody else has it."""
    original(offloader, *args, **options)
    offloader._keeps = None


gone_optimizers_stepped = patched(
    "A step of an optimizer that has gone finds None in its place.",
    mutated("twinproof.engine:_there", "found is None", "False"),
    kills="OPT-539",
)
