"""Faults that ``test_jagged_types`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap, wrap
from conformance.pipeline.planted.planting import accepted


@fault(kills="PIPE-200", at="twinproof.pipeline.batches:KeyedJaggedTensor.permute")
def permute_takes_one(original: Any, self: Any, indices: Any) -> Any:
    """permute takes no tensor."""  # noqa: D403
    return self._made([], self._values[:0], None, self.lengths()[:0], None, [])


@fault(kills="PIPE-201", at="twinproof.pipeline.jagged:offsets_like")
def offsets_are_wide(original: Any, lengths: torch.Tensor) -> Any:
    """Offsets are int64."""
    return original(lengths).to(torch.int64)


ids_not_checked = patched(
    "A lookup takes whatever it is given.", swap("twinproof.pipeline.batches:check_ids", accepted), kills="PIPE-203"
)


float_lengths = patched(
    "Lengths of any dtype make bags.", swap("twinproof.pipeline.jagged:check_integers", accepted), kills="PIPE-204"
)


def _first(original: Any, batch: Any) -> Any:
    keys = batch.keys()
    return {key: keys.index(key) for key in keys}


first_of_a_key = patched(
    "A repeated key is the first.",
    wrap("twinproof.pipeline.batches:KeyedJaggedTensor._key_indices", _first),
    kills="PIPE-205",
)


@fault(kills="PIPE-208", at="twinproof.pipeline.batches:KeyedTensor.__str__")
def text_without_an_end(original: Any, tensor: Any) -> Any:
    """str() has no last line."""
    return original(tensor).strip()


@fault(kills="PIPE-209", at="twinproof.pipeline.jagged:padded")
def padding_is_zero(original: Any, data: Any, offsets: Any, width: int, padding_value: float) -> Any:
    """Padding is always zero."""
    return original(data, offsets, width, 0.0)


@fault(kills="PIPE-210", at="twinproof.pipeline.batches:JaggedTensor._copy_parts")
def stale_offsets(original: Any, bags: Any, source: Any, non_blocking: bool) -> Any:
    """copy_ leaves the offsets of before."""
    offsets = None if bags._offsets is None else bags._offsets.clone()
    original(bags, source, non_blocking)
    if offsets is not None:
        bags._offsets.copy_(offsets)


first_columns = patched(
    "A repeated key is the first.",
    wrap("twinproof.pipeline.batches:KeyedTensor._key_indices", _first),
    kills="PIPE-212",
)


@fault(kills="PIPE-215", at="twinproof.pipeline.batches:_same_bags")
def equal_by_values(original: Any, one: Any, other: Any) -> bool:
    """Batches of the same values are equal."""
    return one.values().shape == other.values().shape and torch.equal(one.values(), other.values())


stride_of_before = patched(
    "copy_ keeps the number of samples that was known of the batch before.",
    mutated("twinproof.pipeline.jagged:KeyedMoves.copy_", '*known, "_stride"', "*known"),
    kills="PIPE-397",
)
dictionary_kept_by_copies = patched(
    "copy_ keeps the dictionary that the batch was made with.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves.copy_",
        "self._jt_dict, self._checked, self._is_cut = None, False, False",
        "self._checked, self._is_cut = False, False",
    ),
    kills="PIPE-412",
)
dictionary_kept_by_moves = patched(
    "A batch that was moved, or has other weights, keeps the dictionary of the one before.",
    mutated("twinproof.pipeline.jagged:KeyedMoves._map", "(parts, _jt_dict=None)", "(parts)"),
    kills="PIPE-412",
)
checked_before_the_copy = patched(
    "A batch that was looked at once is not looked at again after copy_.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves.copy_",
        "self._jt_dict, self._checked, self._is_cut = None, False, False",
        "self._jt_dict, self._is_cut = None, False",
    ),
    kills="PIPE-416",
)
written_before_refused = patched(
    "copy_ looks at inverse indices when it has written the other parts.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves.copy_",
        "mine, theirs =",
        "self._copy_parts(kjt, non_blocking)\n    mine, theirs =",
    ),
    kills="PIPE-397",
)

bags_in_the_dtype_of_lengths = patched(
    "A lookup takes offsets in the dtype of lengths.",
    mutated("twinproof.pipeline.jagged:Eager.bags", "offsets_of(self.lengths().reshape(-1))", "self.offsets()"),
    kills="PIPE-402",
)
spread_in_the_dtype_of_lengths = patched(
    "Features that differ in size are spread by offsets in the dtype of lengths.",
    mutated("twinproof.pipeline.batches:_spread_over_batch", "part.bags().offsets[", "part.offsets().to(torch.int64)["),
    kills="PIPE-402",
)
weighted_in_the_dtype_of_lengths = patched(
    "Weights by position come with offsets in the dtype of lengths.",
    mutated("twinproof.pipeline.modules:_weighted_batch", "features.offsets_or_none()", "features.offsets()"),
    kills="PIPE-405",
)
each_in_the_dtype_of_lengths = patched(
    "A processor of its own for each feature gets offsets in the dtype of lengths.",
    mutated(
        "twinproof.pipeline.modules:FeatureProcessedEmbeddingBagCollection._processed",
        "compute_offsets=is_traced",
        "compute_offsets=True",
    ),
    kills="PIPE-405",
)


inverse_indices_not_kept = patched(
    "record_stream leaves inverse indices out.",
    mutated("twinproof.pipeline.jagged:KeyedMoves.record_stream", "self._inverse_indices is not None", "False"),
    kills="PIPE-441",
)
offsets_not_kept = patched(
    "record_stream leaves offsets out.",
    mutated("twinproof.pipeline.jagged:Eager.record_stream", ", self._offsets", ""),
    kills="PIPE-441",
)
columns_left_out = patched(
    "to_dict of pooled columns leaves them out.",
    mutated("twinproof.pipeline.batches:KeyedTensor.to_dict", "found[key] = self[key]", "pass"),
    kills="PIPE-212",
)

regrouped_side_by_side = patched(
    "Features with a dimension behind them are regrouped along that.",
    mutated(
        "twinproof.pipeline.batches:_regrouped",
        "keyed_tensors[0].key_dim()",
        "-1 if keyed_tensors[0].key_dim() else 0",
    ),
    kills="PIPE-212",
)
equal_however_dealt = patched(
    "Batches of the same bags are equal, whichever feature has them.",
    mutated(
        "twinproof.pipeline.batches:kjt_is_equal",
        " and kjt_1.stride_per_key() == kjt_2.stride_per_key()",
        "",
    ),
    kills="PIPE-215",
)


close_ids_are_equal = patched(
    "Batches with ids that are close are told equal.",
    mutated("twinproof.pipeline.batches:_close", "if dtype.is_floating_point else torch.equal", ""),
    kills="PIPE-522",
)
positions_rounded = patched(
    "Positions that the weights' dtype has not are rounded.",
    mutated("twinproof.pipeline.jagged:check_positions", "longest > most", "False"),
    kills="PIPE-523",
)
last_position_refused = patched(
    "The last position that a dtype has is refused.",
    mutated("twinproof.pipeline.jagged:check_positions", "longest > most", "longest >= most"),
    kills="PIPE-523",
)
offsets_stay_where_sizes_go = patched(
    "unsync() forgets the features' sizes and keeps their places.",
    mutated("twinproof.pipeline.batches:KeyedSizes.unsync", "self._offset_per_key = None", "pass"),
    kills="PIPE-535",
)

compared_in_the_dtype_of_the_first = patched(
    "Batches are compared in the dtype of the first one.",
    mutated("twinproof.pipeline.batches:_close", "torch.promote_types(one.dtype, other.dtype)", "one.dtype"),
    kills="PIPE-537",
)

refused_positions_believed = patched(
    "Who was refused to write positions takes weights for positions from then on.",
    mutated(
        "twinproof.pipeline.modules:PositionWeightedModule.pre_process_input",
        "_write_positions(features)",
        "self._pre_processed = True; _write_positions(features)",
    ),
    kills="PIPE-523",
)

offsets_beside_lengths_unseen = patched(
    "Bags look at the dtype of offsets only where they have no lengths.",
    mutated(
        "twinproof.pipeline.jagged:JaggedTensor._check",
        "check_integers(self._offsets",
        "check_integers(self._offsets if self._lengths is None else None",
    ),
    kills="PIPE-547",
)
lengths_beside_offsets_unseen = patched(
    "Batches look at the dtype of lengths only where they have no offsets.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check",
        "check_integers(self._lengths",
        "check_integers(self._lengths if self._offsets is None else None",
    ),
    kills="PIPE-547",
)
complex_weights_cut = patched(
    "A lookup scales rows by the real part of complex weights.",
    mutated("twinproof.pipeline.jagged:check_ids", "bags.weights.is_complex()", "False"),
    kills="PIPE-547",
)
