"""Faults that ``test_beside_steps`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-582", at="twinproof.offload.driver:StepDriver._step_known")
def groups_replaced_in_a_step(original: Any, driver: Any, *arguments: Any, **options: Any) -> Any:
    """The optimizer has copies of some of its groups while they are stepped."""
    arithmetic, optimizer = driver._arithmetic, driver.optimizer

    def replacing(some: Any) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = [dict(group) for group in some.param_groups]
        try:
            arithmetic(optimizer)
        finally:
            optimizer.param_groups = groups

    driver._arithmetic = replacing
    try:
        return original(driver, *arguments, **options)
    finally:
        driver._arithmetic = arithmetic


notes_of_a_step_lost = patched(
    "What torch's step notes on the optimizer is lost with what stands for it.",
    mutated("twinproof.offload.states:standing_for", "= vars(optimizer)", "= dict(vars(optimizer))"),
    kills="OPT-582",
    of="fastimpl",
)
