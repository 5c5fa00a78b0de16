"""Faults that ``test_wrapped`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

wrappers_have_memory = patched(
    "A tensor without memory of its own is stored: by whatever lies at no address, or by a system's error.",
    mutated("twinproof.checkpoint.format:has_memory", "tensor.data_ptr() != 0", "True"),
    kills=("CKPT-830", "CKPT-831"),
)
wrappers_answer_nothing = patched(
    "Every wrapper is refused, though it answers with plain values.",
    mutated("twinproof.checkpoint.format:check_storable", "not has_memory(as_bits(plain))", "True"),
    kills="CKPT-830",
)
collectives_not_waited_for = patched(
    "What a collective is still to fill passes for a wrapper.",
    mutated("twinproof.checkpoint.format:waited", "isinstance(tensor, AsyncCollectiveTensor)", "False"),
    kills=("CKPT-830", "CKPT-831"),
)
