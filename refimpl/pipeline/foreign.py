"""Batches of other libraries, by the names of their methods: torchrec's KeyedJaggedTensor is taken as ours.

Nothing is imported: what has the protocol's names is converted, without a copy, and what has not is refused by name.
"""

from __future__ import annotations

from typing import Any

from refimpl.errors import UnsupportedError
from refimpl.pipeline.data import KeyedJaggedTensor

__all__ = ["own_batch"]

_METHODS = ("keys", "values", "weights_or_none", "lengths_or_none", "offsets_or_none")


def own_batch(batch: Any) -> KeyedJaggedTensor:
    """The batch as ours: itself, or one that shares the tensors of another library's.

    Raises:
        UnsupportedError: neither.
    """
    if isinstance(batch, KeyedJaggedTensor):
        return batch
    if not all(callable(getattr(batch, name, None)) for name in _METHODS):
        raise UnsupportedError(
            "not a batch: make one by KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)",
            got=f"{type(batch).__module__}.{type(batch).__qualname__}",
            expected="a KeyedJaggedTensor, ours or torchrec's",
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
