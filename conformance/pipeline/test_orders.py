"""Two models, batches that are taken by hand, options that change: any order of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.pipeline.orders import OrdersMachine


@requirement(
    "PIPE-360",
    "Through any program in which models take turns, batches are taken by hand, options change and parameters are "
    "frozen, every schedule MUST hold the loop's bits, leave the idle model alone, and count right.",
)
def test_any_order(pipeline: Any) -> None:
    class Machine(OrdersMachine):
        pass

    Machine.pipeline = pipeline
    run_machine(Machine, settings=settings(examples(60), stateful_step_count=20))
