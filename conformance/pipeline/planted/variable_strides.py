"""Faults that ``test_variable_strides`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-202", at="twinproof.pipeline.batches:KeyedJaggedTensor.stride")
def stride_is_the_least(original: Any, kjt: Any) -> Any:
    """The stride is the smallest feature's."""
    return min(kjt.stride_per_key()) if kjt.variable_stride_per_key() else original(kjt)


@fault(kills="PIPE-211", at="twinproof.pipeline.batches:received_same")
def as_received(original: Any, tensors: Any, recat: Any, *rest: Any) -> Any:
    """What ranks sent stays in the order of ranks."""
    return original(tensors, None, *rest)


@fault(kills="PIPE-213", at="twinproof.pipeline.batches:_rows_of")
def inverse_the_other_way(original: Any, *args: Any) -> Any:
    """Samples have the bags of others."""
    return original(*args).flip(0)


strides_not_counted = patched(
    "Sizes of features that differ take no bytes.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.size_in_bytes", ", self._stride_per_key_per_rank]", "]"),
    kills="PIPE-455",
)
weights_take_no_bytes = patched(
    "Weights of one feature take no bytes.",
    mutated("twinproof.pipeline.jagged:JaggedTensor.size_in_bytes", "[self._weights, ", "["),
    kills="PIPE-455",
)

inverse_named_by_features = patched(
    "Inverse indices of parts stand under their features' names, in whatever order the part names them.",
    mutated("twinproof.pipeline.batches:_concat", "(kjt._keys, rows[0]", "(kjt._keys, kjt._keys"),
    kills="PIPE-548",
)
inverse_of_others = patched(
    "What a part says of features that it has not is kept.",
    mutated("twinproof.pipeline.jagged:joined_rows", "if name in keys", "if True"),
    kills="PIPE-548",
)
inverse_of_the_first = patched(
    "Of a repeated feature the bags are the last part's, and the inverse indices the first's.",
    mutated("twinproof.pipeline.batches:_rows_of", "len(inverse[0]) - 1 - inverse[0][::-1]", "inverse[0]"),
    kills="PIPE-548",
)
