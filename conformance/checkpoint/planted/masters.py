"""Faults of optimizers of shards among the states, in a process that is new."""

from __future__ import annotations

from conformance.harness import mutated, patched

states_of_shards_come_whole = patched(
    "States that a fresh optimizer of shards does not have come back whole, on every rank.",
    mutated("twinproof.checkpoint.native:_memory_for", "isinstance(param, DTensor)", "False"),
    kills="CKPT-890",
)
states_of_another_parameter = patched(
    "A state is read into memory as the first parameter has it.",
    mutated("twinproof.checkpoint.native:with_places", "get(str(path[2]))", 'get("0")'),
    kills="CKPT-890",
)
shards_of_another_shape = patched(
    "A state of shards that has another shape than its parameter comes back whole.",
    mutated("twinproof.checkpoint.native:_memory_for", "len(saved.chunks) > 1", "False"),
    kills="CKPT-891",
)
tensors_beside_states_have_no_memory = patched(
    "A tensor that an optimizer has beside the states of its parameters is read into nothing.",
    mutated(
        "twinproof.checkpoint.native:with_places",
        "if isinstance(saved, TensorStorageMetadata):",
        'if isinstance(saved, TensorStorageMetadata) and path[1] == "state":',
    ),
    kills="CKPT-899",
)
