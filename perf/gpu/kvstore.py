"""Steps of the row store: none, since it has no CUDA half."""

from perf.harness.steps import Step

__all__ = ["STEPS"]

STEPS: tuple[Step, ...] = ()
