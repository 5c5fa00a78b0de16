"""SemiSync from its start on, as one requirement: any program of what may happen to it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import examples, requirement
from conformance.pipeline.stale import StaleProgram


@requirement(
    "PIPE-423",
    "Through any program of steps, modes, edits, loads, models that take turns, loaders, failing loaders, forwards and "
    "optimizers, resets, frozen parameters and groups that are added, SemiSync MUST hold the bits of the loop that is "
    "one update stale, with and without stash_gradients, and count right.",
)
@examples(12)
@given(seed=st.integers(0, 10**9))
def test_any_stale_program(pipeline: Any, seed: int) -> None:
    class Program(StaleProgram):
        pass

    Program.pipeline = pipeline
    Program().run(seed)
