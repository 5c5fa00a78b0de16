"""Faults that ``test_data`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, swap
from conformance.pipeline.planted.planting import accepted


@fault(kills="PIPE-100", at="KeyedJaggedTensor.permute")
def permute_loses_weights(original: Any, batch: Any, indices: Any) -> Any:
    """A permuted batch has no weights."""
    found = original(batch, indices)
    found._weights = None
    return found


batch_not_checked = patched(
    "Parts that disagree make a batch.",
    swap("twinproof.pipeline.batches:KeyedJaggedTensor._check_features", accepted),
    kills="PIPE-101",
)


@fault(kills="PIPE-102", at="KeyedTensor.regroup")
def regroup_keeps_order(original: Any, tensors: Any, groups: Any) -> Any:
    """Groups keep the tensors' order."""
    order = [key for tensor in tensors for key in tensor.keys()]  # noqa: SIM118
    return original(tensors, [sorted(group, key=order.index) for group in groups if set(group) <= set(order)])


steps_down_of_bytes_taken = patched(
    "Sizes are of the dtype of offsets: of uint8 none is below 0.",
    mutated("twinproof.pipeline.jagged:KeyedMoves._sizes", "offsets.to(torch.int64).diff()", "offsets.diff()"),
    kills="PIPE-447",
)


sizes_of_the_last_part = patched(
    "A batch put together has the sizes of those parts alone whose sizes are known, if the last is one.",
    mutated("twinproof.pipeline.batches:_concat", "known = known and found is not None", "known = found is not None"),
    kills="PIPE-454",
)
sizes_of_the_known_parts = patched(
    "A batch put together has the sizes of those parts alone whose sizes are known.",
    mutated("twinproof.pipeline.batches:_concat", "known = known and found is not None", "known = len(sizes) > 0"),
    kills="PIPE-454",
)

checked_before_it_was = patched(
    "A batch counts as looked at as soon as somebody begins to.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_features",
        "if lengths is None and (",
        "self._checked = True\n    if lengths is None and (",
    ),
    kills="PIPE-549",
)
sizes_known_before_they_agree = patched(
    "Sizes that are not those given are refused and then known.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_features",
        "begins = self._offset_per_key",
        "begins, self._offset_per_key = self._offset_per_key, None",
    ),
    kills="PIPE-549",
)
strides_known_before_they_agree = patched(
    "Strides that do not add up are refused once, and counted anew after that.",
    mutated(
        "twinproof.pipeline.jagged:KeyedMoves._check_strides",
        "strides = self.stride_per_key()",
        "strides = self.stride_per_key()\n    self._stride_per_key = None",
    ),
    kills="PIPE-549",
)


@fault(kills="PIPE-619", at=("twinproof.pipeline.batches:own_batch", "twinproof.pipeline.modules:own_batch"))
def known_sizes_are_checked_ones(original: Any, batch: Any) -> Any:
    """Another library's batch whose sizes are known is taken for checked."""
    made = original(batch)
    if made is not batch:
        made._checked = made._is_cut = made._length_per_key is not None
    return made


sizes_of_others_not_asked = patched(
    "Sizes that another library's batch knows are not held against its lengths.",
    mutated(
        "twinproof.pipeline.batches:own_batch",
        "length_per_key=batch.length_per_key_or_none()",
        "length_per_key=None",
    ),
    kills="PIPE-619",
)
samples_of_others_not_asked = patched(
    "Samples that another library's batch knows are not held against its lengths.",
    mutated("twinproof.pipeline.batches:own_batch", 'getattr(batch, "_stride", None)', "None"),
    kills="PIPE-619",
)
