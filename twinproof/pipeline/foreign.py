"""Batches of other libraries, by the names of their methods: torchrec's KeyedJaggedTensor is taken as ours.

Nothing is imported: what has the protocol's names is converted, without a copy, and what has not is refused by name. So
is a mapping from features to torch's jagged nested tensors, as a TensorDict holds them, by one copy.
"""

from __future__ import annotations

from typing import Any

import torch

from twinproof.errors import ShapeError, UnsupportedError
from twinproof.pipeline.data import KeyedJaggedTensor

__all__ = ["own_batch"]

_METHODS = ("keys", "values", "weights_or_none", "lengths_or_none", "offsets_or_none")


def own_batch(batch: Any) -> KeyedJaggedTensor:
    """The batch as ours: itself, one that shares the tensors of another library's, or one of nested tensors.

    Raises:
        UnsupportedError: none of these. ShapeError: nested tensors with values between their bags.
    """
    if isinstance(batch, KeyedJaggedTensor):
        return batch
    nested = _nested_parts(batch)
    if nested:
        return _of_nested(nested)
    if not all(callable(getattr(batch, name, None)) for name in _METHODS):
        raise UnsupportedError(
            "not a batch: make one by KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)",
            got=f"{type(batch).__module__}.{type(batch).__qualname__}",
            expected="a KeyedJaggedTensor, ours or torchrec's, or a mapping to jagged nested tensors",
            where="features",
        )
    ranks = getattr(batch, "_stride_per_key_per_rank", None) if batch.variable_stride_per_key() else None
    return KeyedJaggedTensor(
        list(batch.keys()),
        batch.values(),
        batch.weights_or_none(),
        batch.lengths_or_none(),
        batch.offsets_or_none(),
        getattr(batch, "_stride", None),
        ranks,
        length_per_key=batch.length_per_key_or_none(),
        inverse_indices=batch.inverse_indices_or_none(),
    )


def _nested_parts(batch: Any) -> dict[str, torch.Tensor]:
    """Feature -> jagged nested tensor, where the batch is a mapping of nothing else."""
    if not (callable(getattr(batch, "keys", None)) and hasattr(batch, "__getitem__")) or hasattr(
        batch, "lengths_or_none"
    ):
        return {}
    parts = {str(key): batch[key] for key in batch.keys()}  # noqa: SIM118 - a TensorDict is iterated by its samples
    is_jagged = [isinstance(part, torch.Tensor) and part.layout == torch.jagged for part in parts.values()]
    return parts if all(is_jagged) else {}


def _of_nested(parts: dict[str, Any]) -> KeyedJaggedTensor:
    lengths = []
    for name, part in parts.items():
        sizes = part.offsets().diff()
        if part.lengths() is not None and not torch.equal(part.lengths(), sizes):
            raise ShapeError(
                "values between the bags of a nested tensor", got=part.lengths(), expected=sizes, where=name
            )
        lengths.append(sizes)
    values = torch.cat([part.values() for part in parts.values()])
    return KeyedJaggedTensor(list(parts), values, lengths=torch.cat(lengths))
