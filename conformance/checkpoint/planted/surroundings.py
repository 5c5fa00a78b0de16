"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import mutated, patched, swap


def given(work: Any) -> Any:
    """What it was given."""
    return work


places_of_blocks_on_the_default_device = patched(
    "What lies where in a block is told on the default device of the process.",
    mutated("fastimpl.checkpoint.blockio:LocalPart.place", ', device="cpu"', ""),
    kills="CKPT-622",
)

numbers_of_the_default_dtype = patched(
    "Values of 8-bit floats are multiplied in the default dtype of the process.",
    mutated(
        "fastimpl.checkpoint.quantized:dequantize",
        "torch.empty(rows.shape, dtype=torch.float32,",
        "torch.empty(rows.shape,",
    ),
    kills="CKPT-641",
)

threads_without_the_mode = patched(
    "Threads of a load run in no inference mode, whatever the caller's is.",
    swap("twinproof.checkpoint.dcp:in_mode_of_caller", given),
    swap("fastimpl.checkpoint.readio:in_mode_of_caller", given),
    kills="CKPT-641",
)
