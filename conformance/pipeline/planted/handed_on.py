"""Faults that ``test_handed_on`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

rows_not_taken = patched(
    "A batch that is made by lengths has no inverse indices.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.from_lengths_sync",
        "stride, ranks, inverse_indices=inverse_indices)",
        "stride, ranks)",
    ),
    kills="PIPE-611",
)
weights_not_taken = patched(
    "A batch that is made by offsets has no weights.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.from_offsets_sync",
        "KeyedJaggedTensor(keys, values, weights, None",
        "KeyedJaggedTensor(keys, values, None, None",
    ),
    kills="PIPE-611",
)
rows_waited_for = patched(
    "A copy of inverse indices to a device is waited for.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.to",
        "inverse[1].to(device, non_blocking=non_blocking)",
        "inverse[1].to(device)",
    ),
    kills="PIPE-612",
)
parts_waited_for = patched(
    "Parts are copied into a batch one after the other.",
    mutated(
        "twinproof.pipeline.jagged:Eager._copy_parts",
        "mine.copy_(theirs, non_blocking=non_blocking)",
        "mine.copy_(theirs)",
    ),
    kills="PIPE-612",
)
rows_left_behind = patched(
    "A batch elsewhere has the inverse indices of the first, where they are.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._map",
        "(self._inverse_indices[0], move(self._inverse_indices[1]))",
        "self._inverse_indices",
    ),
    kills="PIPE-613",
)
no_text_by_offsets = patched(
    "A batch by offsets alone has no text.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.__str__",
        "(self._offsets is None and self._lengths is None)",
        "self._lengths is None",
    ),
    kills="PIPE-614",
)
cubes_printed = patched(
    "Of values of three dimensions nothing is printed.",
    mutated(
        "twinproof.pipeline.jagged:span_text",
        'raise ValueError("only values of one or two dimensions are printed")',
        'return ""',
    ),
    kills="PIPE-614",
)
columns_as_they_stand = patched(
    "Columns that are flattened by a spec come in their own order.",
    mutated(
        "twinproof.pipeline.batches:_columns_of_spec",
        "list(KeyedTensor.regroup([columns], [list(keys)]))",
        "[columns._values]",
    ),
    kills="PIPE-615",
)
positions_stay_trained = patched(
    "Weights by position stay as they were trained.",
    mutated(
        "twinproof.pipeline.modules:PositionWeightedModuleCollection.reset_parameters",
        "torch.nn.init.ones_(weight)",
        "torch.nn.init.ones_(weight.clone())",
    ),
    kills="PIPE-616",
)
made_on_the_host = patched(
    "Weights by position are made on the host.",
    mutated(
        "twinproof.pipeline.modules:PositionWeightedModule.__init__",
        "torch.ones(max_feature_length, device=device)",
        "torch.ones(max_feature_length)",
    ),
    kills="PIPE-616",
)
closures_passed_over = patched(
    "A closure of the backward's optimizer is not run.",
    mutated(
        "twinproof.pipeline.config:InBackwardOptimizer.step",
        "return None if closure is None else closure()",
        "return None",
    ),
    kills="PIPE-616",
)
prefix_of_replicas_alone = patched(
    "Parts of cut tables are named without the prefix.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters",
        'f"{prefix}.embedding_bags.{name}.weight" if prefix else',
        'f"embedding_bags.{name}.weight" if prefix else',
    ),
    kills="PIPE-617",
)
parts_below_themselves = patched(
    "Parts of cut tables are listed by whoever does not look below.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters",
        "self._parts.named_weights() if recurse else ()",
        "self._parts.named_weights()",
    ),
    kills="PIPE-617",
)
ids_alone_are_kept = patched(
    "The context of a sharded module keeps its ids alone.",
    mutated(
        "twinproof.pipeline.sharding:ShardedContext.record_stream",
        "self.bags.record_stream(stream)",
        "self.bags.indices.record_stream(stream)",
    ),
    kills="PIPE-641",
)
batches_counted_twice = patched(
    "A batch that an override has of the pipeline's own is counted by both.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.copy_batch_to_gpu",
        "= max(self.pulled_count, counted + (batch is not None))",
        "+= batch is not None",
    ),
    kills="PIPE-641",
)
batches_pulled_twice = patched(
    "The pipeline's own next batch is the one behind it.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._next_batch",
        "lambda batch, _: batch",
        "lambda batch, _: next(dataloader_iter, batch)",
    ),
    kills="PIPE-641",
)
dictionaries_of_callers_kept = patched(
    "A batch of a dictionary answers by the caller's.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.from_jt_dict",
        "reshape(-1, 1),",
        "reshape(-1, 1), jt_dict=jt_dict,",
    ),
    kills="PIPE-621",
)
names_of_callers_kept = patched(
    "A batch has the caller's list of names.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.__init__", "list(keys)", "keys"),
    kills="PIPE-621",
)
