"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

steps_on_the_default_device = patched(
    "The step in a state dict lies on the default device of the process.",
    mutated("twinproof.pipeline.sharded:TableParts.optimizer_state_dict", ', device="cpu"', ""),
    kills="PIPE-421",
)
first_weights_on_the_default_device = patched(
    "Rows of first weights are counted on the default device of the process.",
    mutated("twinproof.pipeline.sharding:initial_shard", 'shard.rows[1]), device="cpu")', "shard.rows[1]))"),
    kills="PIPE-422",
)
strides_on_the_default_device = patched(
    "Strides of a batch lie on the default device of the process.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.__init__", 'dtype=torch.int32, device="cpu"', "dtype=torch.int32"
    ),
    kills="PIPE-422",
)
