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
pooled_in_the_default_dtype = patched(
    "Pooled columns are of the default dtype of the process.",
    mutated("fastimpl.pipeline.lookups:NativeLookup.pool", "dtype=torch.float32, ", ""),
    kills=("PIPE-430", "PIPE-431"),
)
columns_in_the_default_dtype = patched(
    "Columns of all ranks are put together in the default dtype of the process.",
    mutated("fastimpl.pipeline.columns:Columns.assemble", "dtype=torch.float32, ", ""),
    kills=("PIPE-430", "PIPE-431"),
)
sums_in_the_default_dtype = patched(
    "Gradients of rows are added in the default dtype of the process.",
    mutated("twinproof.pipeline.modules:_Rows.backward", "dtype=torch.float32, ", ""),
    kills="PIPE-430",
)
spoiled_by_inference_mode = patched(
    "What is made of the next batch in an evaluation inside inference mode cannot be trained on.",
    mutated("twinproof.pipeline.sharding:made_for_training", "if torch.is_inference_mode_enabled()", "if False"),
    kills="PIPE-431",
)
hosts_memory_recorded = patched(
    "What a lookup takes is recorded on the host, too.",
    mutated(
        "twinproof.pipeline.jagged:Bags.record_stream",
        'part is not None and part.device.type != "cpu"',
        "part is not None",
    ),
    kills="PIPE-640",
)
parts_that_are_not_there_recorded = patched(
    "Weights that are not there are recorded.",
    mutated("twinproof.pipeline.jagged:Bags.record_stream", "part is not None and ", ""),
    kills="PIPE-640",
)
