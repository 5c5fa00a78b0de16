"""Faults that ``test_batch_parts`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

last_ranks_alike = patched(
    "Ranks have as many samples where the first and the last have.",
    mutated(
        "twinproof.pipeline.batches:received_same",
        "same = same and stride == stride_per_rank[0]",
        "same = stride == stride_per_rank[0]",
    ),
    kills="PIPE-600",
)
no_samples_divided = patched(
    "Samples of ranks that have none are divided into blocks.",
    mutated("twinproof.pipeline.batches:received_same", "if block == 0:", "if block < 0:"),
    kills="PIPE-600",
)
received_without_an_order = patched(
    "An order of receipt that is empty is one of nothing.",
    mutated("twinproof.pipeline.batches:received_variable", "recat is None or recat.numel() == 0", "recat is None"),
    kills="PIPE-600",
)
empty_rows_are_samples = patched(
    "Inverse indices without elements say that there are no samples.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.stride",
        "inverse is not None and inverse[1].numel() > 0",
        "inverse is not None",
    ),
    kills="PIPE-601",
)
ranks_of_none = patched(
    "Sizes by rank of no ranks are sizes.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.stride",
        "ranks is not None and ranks.numel() > 0",
        "ranks is not None",
    ),
    kills="PIPE-601",
)
sums_alone_fit = patched(
    "Sizes of features fit where their sum does.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_strides",
        "sum(strides) != bag_count or len(strides) != key_count",
        "sum(strides) != bag_count",
    ),
    kills="PIPE-602",
)
cut_once = patched(
    "Lengths that were changed are not held against the values.",
    mutated("twinproof.pipeline.jagged:KeyedMoves._check_total", "if not _is_traced()", "if not self._checked"),
    kills="PIPE-602",
)
orders_told_by_length = patched(
    "An order that is told twice is the same where both are as long.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_order",
        "if not same or not (known or indices_tensor.tolist() == list(indices)):",
        "if not same:",
    ),
    kills="PIPE-603",
)
segments_below_zero = patched(
    "Segments are features where their sum is.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.split",
        "(total(segments) != len(self._keys) or min(segments or [0]) < 0)",
        "total(segments) != len(self._keys)",
    ),
    kills="PIPE-603",
)
strides_joined_unseen = patched(
    "Batches of other numbers of samples are put together.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_fits",
        "not any(variable) and len({part.stride() for part in parts}) > 1",
        "False",
    ),
    kills="PIPE-603",
)
rows_cut_short = patched(
    "Lengths of dense rows are looked at from below alone.",
    mutated("twinproof.pipeline.jagged:_check_rows", "least < 0 or most > expected[1]", "least < 0"),
    kills="PIPE-712",
)
rows_below_zero = patched(
    "Lengths of dense rows are looked at from above alone.",
    mutated("twinproof.pipeline.jagged:_check_rows", "if least < 0 or most", "if most"),
    kills="PIPE-712",
)
runs_of_any_sum = patched(
    "Runs of features are held against the number of features by their sum alone.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.dist_splits",
        "(total(key_splits) > len(self._keys) or min(key_splits or [0]) < 0)",
        "total(key_splits) > len(self._keys)",
    ),
    kills="PIPE-712",
)
sizes_kept_against_the_word = patched(
    "What is cut of a batch that was told to be of one size has sizes of its own.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.split",
        "None if ranks is None or not self.variable_stride_per_key() else ranks[first:last]",
        "None if ranks is None else ranks[first:last]",
    ),
    kills="PIPE-604",
)
words_not_heard = patched(
    "A batch that was told to be of one size is asked for its sizes.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.variable_stride_per_key",
        "if known is not None:",
        "if known:",
    ),
    kills="PIPE-604",
)
nothing_of_a_wrong_dtype = patched(
    "Lengths without elements are of a wrong dtype.",
    mutated("twinproof.pipeline.jagged:check_integers", " and tensor.numel() != 0", ""),
    kills="PIPE-605",
)
weights_asked_of_nothing = patched(
    "What is like a batch without weights has some.",
    mutated(
        "twinproof.pipeline.jagged:JaggedTensor.empty",
        "if is_weighted else None",
        "if is_weighted or weights_dtype is not None else None",
    ),
    kills="PIPE-605",
)
weights_moved_as_they_are = patched(
    "Weights that are moved keep their dtype.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.to", "weights = weights.to(dtype)", "pass"),
    kills="PIPE-606",
)
dictionaries_made_anew = patched(
    "A dictionary that was given is made anew.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.to_dict", "if known is not None:", "if known == {}:"),
    kills="PIPE-606",
)
weights_of_one_side = patched(
    "A batch without weights is equal to one that has some.",
    mutated("twinproof.pipeline.batches:_close", "return one is other", "return one is None or one is other"),
    kills="PIPE-607",
)
rows_bound_not_copied = patched(
    "Inverse indices are taken over instead of copied.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves.copy_",
        "mine[1].copy_(theirs[1], non_blocking=non_blocking)",
        "theirs[1]",
    ),
    kills="PIPE-607",
)
rows_under_old_names = patched(
    "copy_ keeps the names of the inverse indices.",
    mutated("twinproof.pipeline.jagged:KeyedMoves.copy_", "(theirs[0], mine[1]", "(mine[0], mine[1]"),
    kills="PIPE-607",
)
rows_lost_in_a_tree = patched(
    "Inverse indices are no part of a pytree.",
    mutated("twinproof.pipeline.batches:_unflatten_keyed", "None if inverse is None else", "None if True else"),
    kills="PIPE-608",
)
sizes_of_others_unread = patched(
    "Another library's batch is of one size.",
    mutated(
        "twinproof.pipeline.batches:own_batch", "if batch.variable_stride_per_key() else None", "if False else None"
    ),
    kills="PIPE-609",
)
lengths_between_offsets_refused = patched(
    "Nested tensors that know their lengths are refused.",
    mutated(
        "twinproof.pipeline.batches:_of_nested",
        "part.lengths() is not None and not torch.equal(part.lengths(), sizes)",
        "part.lengths() is not None",
    ),
    kills="PIPE-609",
)
complex_weights_hold_nothing = patched(
    "Complex weights are asked for the limits of an integer.",
    mutated(
        "twinproof.pipeline.jagged:check_positions",
        "dtype.is_floating_point or dtype.is_complex",
        "dtype.is_floating_point",
    ),
    kills="PIPE-610",
)
longest_of_nothing = patched(
    "The longest position of a batch without ids is asked for.",
    mutated("twinproof.pipeline.jagged:check_positions", "positions.numel() and not", "not"),
    kills="PIPE-610",
)
samples_of_parts_forgotten = patched(
    "Samples of parts that are put together are counted by their features.",
    mutated(
        "twinproof.pipeline.batches:_concat", "None if first.variable_stride_per_key() else first.stride(),", "None,"
    ),
    kills="PIPE-618",
)
samples_of_cuts_forgotten = patched(
    "Samples of what is cut of a batch are counted by its features.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor._made", "stride=self.stride()", "stride=None"),
    kills="PIPE-618",
)
samples_lost_on_the_way = patched(
    "Samples of a batch that is moved are counted by its features.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.to", "stride=self._stride,", "stride=None,"),
    kills="PIPE-618",
)
staggered_in_other_columns = patched(
    "Ranks that are staggered stand in rows of as many as columns should have.",
    mutated("twinproof.pipeline.batches:staggered", "view(stagger, -1)", "view(num_workers // stagger, -1)"),
    kills="PIPE-682",
)
