"""The batch types as nodes of torch's pytrees: tensors are leaves, which may be anything while torch maps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from twinproof.errors import ShapeError
from twinproof.pipeline.jagged_tensor import JaggedTensor
from twinproof.pipeline.keyed_jagged import KeyedJaggedTensor
from twinproof.pipeline.keyed_tensor import KeyedTensor

__all__: list[str] = []


def _parts(batch: Any) -> list[Any]:
    parts = [getattr(batch, name) for name in type(batch)._fields]
    if type(batch) is KeyedJaggedTensor and parts[-1] is not None:
        parts[-1] = parts[-1][1]
    return parts


def _named(batch: Any, context: Any) -> tuple[list[tuple[Any, Any]], Any]:
    named = [(GetAttrKey(name), part) for name, part in zip(type(batch)._fields, _parts(batch), strict=True)]
    return named, context


def _unflatten_jagged(parts: Iterable[Any], context: Any) -> JaggedTensor:
    values, weights, lengths, offsets = parts
    # Leaves need not be tensors, so that nothing can be checked.
    made = JaggedTensor.__new__(JaggedTensor)
    made._values, made._weights, made._lengths, made._offsets = values, weights, lengths, offsets
    return made


def _context_keyed(batch: KeyedJaggedTensor) -> list[list[str]]:
    return [list(batch._keys), [] if batch._inverse_indices is None else list(batch._inverse_indices[0])]


def _unflatten_keyed(leaves: Iterable[Any], context: list[list[str]]) -> KeyedJaggedTensor:
    parts: list[Any] = list(leaves)
    fields = KeyedJaggedTensor._fields
    if len(parts) > len(fields):
        raise ShapeError("more parts than a batch has", got=len(parts), expected=len(fields))
    values, weights, lengths, offsets, ranks, inverse = parts + [None] * (len(fields) - len(parts))
    made = KeyedJaggedTensor.empty()
    made._keys, made._stride, made._values, made._weights = list(context[0]), None, values, weights
    made._lengths, made._offsets, made._stride_per_key_per_rank = lengths, offsets, ranks
    made._inverse_indices = None if inverse is None else (list(context[1]), inverse)
    return made


def _unflatten_columns(parts: Iterable[Any], context: tuple[list[str], list[int], int]) -> KeyedTensor:
    made = KeyedTensor.__new__(KeyedTensor)
    made._keys, made._length_per_key, made._key_dim = context
    made._values = next(iter(parts))
    made._offset_per_key = made._index_per_key = None
    return made


register_pytree_node(
    JaggedTensor,
    lambda batch: (_parts(batch), None),
    _unflatten_jagged,
    flatten_with_keys_fn=lambda batch: _named(batch, None),
    serialized_type_name="twinproof.pipeline.JaggedTensor",
)
register_pytree_node(
    KeyedJaggedTensor,
    lambda batch: (_parts(batch), _context_keyed(batch)),
    _unflatten_keyed,
    flatten_with_keys_fn=lambda batch: _named(batch, _context_keyed(batch)),
    serialized_type_name="twinproof.pipeline.KeyedJaggedTensor",
)
register_pytree_node(
    KeyedTensor,
    lambda columns: ([columns._values], (list(columns._keys), list(columns._length_per_key), columns._key_dim)),
    _unflatten_columns,
    flatten_with_keys_fn=lambda columns: (
        [(GetAttrKey("_values"), columns._values)],
        (list(columns._keys), list(columns._length_per_key), columns._key_dim),
    ),
    serialized_type_name="twinproof.pipeline.KeyedTensor",
)
register_pytree_flatten_spec(JaggedTensor, lambda batch, spec: _parts(batch))
register_pytree_flatten_spec(KeyedJaggedTensor, lambda batch, spec: _parts(batch))


def _columns_of_spec(columns: KeyedTensor, spec: Any) -> list[Any]:
    keys, _, _ = spec.context
    # An exported model takes features in the order that it was traced with.
    return list(KeyedTensor.regroup([columns], [list(keys)]))


register_pytree_flatten_spec(KeyedTensor, _columns_of_spec)
