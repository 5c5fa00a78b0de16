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

_PAUSED, _PAUSES = "fastimpl.checkpoint.pause:collector_paused", "fastimpl.checkpoint.pause:_Pauses"
_GOING = "fastimpl.checkpoint.pause:_pauses.going"

collector_stays_off = patched(
    "The collector goes on only behind what succeeds.",
    mutated(
        _PAUSED, "finally:", "except BaseException:\n        _pauses.going.discard(pause)\n        raise\n    else:"
    ),
    kills="CKPT-723",
)
collector_goes_on = patched(
    "Behind a save or a load the collector is on, whatever it was.",
    mutated(f"{_PAUSES}.end", " and self.was_enabled", ""),
    kills="CKPT-723",
)
collector_of_the_last = patched(
    "Of two that run at a time the later one finds the collector off, and leaves it so.",
    mutated(f"{_PAUSES}.begin", "if not self.going:", "if True:"),
    kills="CKPT-723",
)

paused_in_children = patched(
    "A pause of the collector goes on in a process that is forked in it.",
    mutated(f"{_PAUSES}.end_in_a_child", "if self.going and self.was_enabled:", "if False:"),
    kills="CKPT-861",
    of="fastimpl",
)


collector_off_before_it_counts = patched(
    "The collector is off before anybody knows that it has to go on again.",
    swap(_GOING, set()),  # What is left in it is no part of later tests.
    mutated(_PAUSED, "try:\n        _pauses.begin(pause)\n", "_pauses.begin(pause)\n    try:\n"),
    kills="CKPT-993",
    of="fastimpl",
)
collector_ends_once = patched(
    "What a handler of a signal ends behind a load leaves the collector off.",
    swap(_GOING, set()),
    mutated(_PAUSED, "_pauses.end(pause)\n            raise", "raise"),
    kills="CKPT-993",
    of="fastimpl",
)
