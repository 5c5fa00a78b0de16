"""Faults that ``test_scaled`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_EXCHANGED = "twinproof.pipeline.sharded:_Exchanged"

zeros_are_no_step = patched(
    "A backward whose gradients are all zero is no step.",
    mutated(f"{_EXCHANGED}.backward", "ctx.optimizer.count_step()", "grads[0].any() and ctx.optimizer.count_step()"),
    kills="PIPE-748",
)
overflows_left_out = patched(
    "What is not finite does not come to the tables.",
    mutated(f"{_EXCHANGED}.backward", "grads[0].contiguous()", "grads[0].nan_to_num(0, 0, 0).contiguous()"),
    kills="PIPE-748",
)
