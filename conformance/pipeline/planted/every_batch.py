"""Faults that ``test_every_batch`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

sizes_known_are_all = patched(
    "Where sizes of features are known, sync makes nothing.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.sync",
        "if torch.jit.is_scripting() or",
        "if self._length_per_key is None and",
    ),
    kills="PIPE-553",
)
alike_on_average = patched(
    "Features of a dictionary are of one size where their sizes are so on average.",
    mutated(
        "twinproof.pipeline.batches:KeyedJaggedTensor.from_jt_dict",
        "same = True\n    for stride in strides:\n        same = same and stride == strides[0]\n",
        "same = sum(strides) == strides[0] * len(strides)\n",
    ),
    kills="PIPE-554",
)
given_offsets_let_go = patched(
    "Offsets go once lengths are known.",
    mutated(
        "twinproof.pipeline.jagged:Jagged.lengths",
        "self._lengths = lengths",
        "self._lengths, self._offsets = lengths, None",
    ),
    kills="PIPE-555",
)
all_as_they_stand = patched(
    "One tensor into one group of all its names is its own memory.",
    mutated(
        "twinproof.pipeline.batches:KeyedTensor.regroup_as_dict",
        "tensors = _regrouped(keyed_tensors, groups)",
        "kt = keyed_tensors[0]; tensors = [kt._values] if groups == [kt._keys] else _regrouped(keyed_tensors, groups)",
    ),
    kills="PIPE-556",
)
