"""Faults that ``test_stager`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-422", at="twinproof.checkpoint.plan:_copied")
def staged_by_storage(original: Any, value: Any, *rest: Any) -> Any:
    """An asynchronous save forgets that a tensor is conjugated or negated."""
    # As torch's stager does: the storage is copied, and what stands beside it is forgotten.
    if type(value) is torch.Tensor and (value.is_conj() or value.is_neg()):
        value = torch._conj(value) if value.is_conj() else torch._neg_view(value)
    return original(value, *rest)


@fault(kills="CKPT-423", at="twinproof.checkpoint.plan:_copied")
def meta_staged_as_memory(original: Any, value: Any, *rest: Any) -> Any:
    """A meta tensor is staged as memory that nobody filled."""
    # As torch's stager does: what has no memory becomes memory.
    return torch.zeros(value.shape) if value.is_meta else original(value, *rest)


conjugate_taken_for_plain = patched(
    "Two views of the same memory are staged as one where they differ in conjugation.",
    mutated("twinproof.checkpoint.plan:_identity", "value.is_conj()", "0"),
    kills="CKPT-616",
)
negation_taken_for_plain = patched(
    "Two views of the same memory are staged as one where they differ in negation.",
    mutated("twinproof.checkpoint.plan:_identity", "value.is_neg()", "0"),
    kills="CKPT-616",
)
dtypes_taken_for_one = patched(
    "Two views of the same memory are staged as one where they differ in dtype.",
    mutated("twinproof.checkpoint.plan:_identity", "value.dtype", "0"),
    kills="CKPT-616",
)
strides_taken_for_one = patched(
    "Two views of the same memory and shape are staged as one where they differ in strides.",
    mutated("twinproof.checkpoint.plan:_identity", ", value.stride()", ""),
    kills="CKPT-620",
)
shapes_taken_for_one = patched(
    "Two views of the same memory and strides are staged as one where they differ in shape.",
    mutated("twinproof.checkpoint.plan:_identity", ", tuple(value.shape)", ""),
    kills="CKPT-620",
)
other_layouts_by_reference = patched(
    "What the format of HF does not hold is staged as it is for torch's, too, and written on meanwhile.",
    mutated("twinproof.checkpoint.native:NativeStorageWriter.stage", "any_layout=True", "any_layout=False"),
    kills="CKPT-845",
)
meta_copied = patched(
    "A meta tensor is copied, which cannot be.",
    mutated("twinproof.checkpoint.plan:_copied", "value.is_meta or not", "not"),
    kills="CKPT-845",
)
objects_copied_flat = patched(
    "Of an object the copy shares what it holds.",
    mutated("twinproof.checkpoint.plan:_staged", "return copy.deepcopy(value)", "return copy.copy(value)"),
    kills="CKPT-991",
)
