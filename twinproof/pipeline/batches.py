"""Batches as users know them: torchrec's three types, pytrees, other libraries' batches, and what a lookup takes.

``KeyedTensor`` is in TorchScript's part of Python. Nothing of another library is imported: what has the protocol's
names is converted without a copy, and what has not is refused by name.
"""

# TorchScript resolves annotations by value: they are no strings here.
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from twinproof.errors import ConfigError, MissingKeyError, ShapeError, UnsupportedError
from twinproof.pipeline.jagged import (
    Bags,
    JaggedMeta,
    JaggedTensor,
    Keyed,
    check_ids,
    joined,
    recorded,
    span_text,
)
from twinproof.pipeline.keyed import KeyedJaggedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
    "own_batch",
    "permute_multi_embedding",
    "place_of",
    "regroup_kts",
    "select",
    "select_each",
]


class _Eager:
    """What only eager code does: TorchScript does not see it."""

    _keys: list[str]
    _length_per_key: list[int]
    _values: torch.Tensor
    _key_dim: int

    def _check(self) -> None:
        if torch.compiler.is_compiling() or not isinstance(self._values, torch.Tensor):
            return
        keys, widths, shape = self._keys, self._length_per_key, tuple(self._values.shape)
        if len(keys) != len(widths) or (keys and sum(widths) != shape[self._key_dim]):
            raise ShapeError("widths are not the columns", got=list(widths), expected=shape)

    def _refuse(self, key: str) -> None:
        raise MissingKeyError("not a feature of this tensor", got=key, expected=self._keys)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until ``stream`` has passed this point."""
        recorded(stream, self._values)

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, shape={tuple(self._values.shape)})"


class KeyedTensor(Keyed, _Eager, metaclass=JaggedMeta):
    """Columns of several features, side by side: [B, sum of widths].

    Args:
        keys: feature names; of a repeated one the last is found by name.
        length_per_key: width of each.
        values: any dtype; float32 where a lookup made them.
        key_dim: the dimension along which features stand side by side.
        offset_per_key, index_per_key: what would be computed, where the caller knows it.

    Raises:
        ShapeError: widths that are not the values' columns.
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: torch.Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: torch.Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        if not torch.jit.is_scripting():
            self._check()

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Tensors side by side along ``cat_dim``; the width of each is its size along ``key_dim``."""
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, widths, torch.cat(tensors, dim=cat_dim), key_dim)

    def values(self) -> torch.Tensor:
        """[B, sum of widths]."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which features stand side by side."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Width of each feature."""
        return self._length_per_key

    def __getitem__(self, key: str) -> torch.Tensor:
        """One feature's columns, a view. Raises MissingKeyError."""
        places = self._key_indices()
        if key not in places and not torch.jit.is_scripting():
            self._refuse(key)
        index = places[key]
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Feature name -> its columns, views."""
        found: dict[str, torch.Tensor] = {}
        for key in self._keys:
            found[key] = self[key]
        return found

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[torch.Tensor]:
        """For each group of names, their columns side by side. Raises MissingKeyError."""
        return _regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, torch.Tensor]:
        """``regroup``, the groups under these names. Raises ShapeError for another number of names."""
        _same_count(groups, keys)
        tensors = _regrouped(keyed_tensors, groups)
        found: dict[str, torch.Tensor] = {}
        for i, key in enumerate(keys):
            found[key] = tensors[i]
        return found

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.element_size() * self._values.numel()

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """The same columns on another device."""
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values.to(device, non_blocking=non_blocking),
            key_dim=self._key_dim,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
        )

    def __str__(self) -> str:
        if len(self._keys) == 0:
            return "KeyedTensor()\n"
        lines: list[str] = []
        for key in self._keys:
            rows: list[str] = []
            for row in self[key]:
                rows.append(span_text(row, 0, len(row)))
            lines.append('    "' + key + '": [' + ", ".join(rows) + "]")
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"


def _missing(keys: list[str], known: list[str]) -> None:
    raise MissingKeyError("not a feature of these tensors", got=keys, expected=sorted(known))


def _same_count(groups: list[list[str]], keys: list[str]) -> None:
    if len(groups) != len(keys):
        if not torch.jit.is_scripting():
            raise ShapeError("a name for each group", got=len(keys), expected=len(groups))
        raise ValueError("a name for each group")


@torch.fx.wrap
def _regrouped(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[torch.Tensor]:
    place: dict[str, int] = {}
    for i, tensor in enumerate(keyed_tensors):
        for key in tensor.keys():  # noqa: SIM118
            place[key] = i
    missing: list[str] = []
    for group in groups:
        for key in group:
            if key not in place:
                missing.append(key)
    if len(missing) > 0:
        if not torch.jit.is_scripting():
            _missing(missing, list(place.keys()))
        raise ValueError("not features of these tensors: " + ", ".join(missing))
    parts: list[torch.Tensor] = []
    for group in groups:
        columns = [keyed_tensors[place[key]][key] for key in group]
        parts.append(torch.cat(columns, dim=keyed_tensors[0].key_dim()))
    return parts


@torch.fx.wrap
def permute_multi_embedding(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[torch.Tensor]:
    """``KeyedTensor.regroup``, by the name of one of torchrec's ways to do it."""
    return _regrouped(keyed_tensors, groups)


@torch.fx.wrap
def regroup_kts(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[torch.Tensor]:
    """``KeyedTensor.regroup``, by the name of another."""
    return _regrouped(keyed_tensors, groups)


class ComputeKJTToJTDict(torch.nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Feature name -> its bags."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(torch.nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """The features as one batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def _close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other)


def _same_bags(one: Any, other: Any) -> bool:
    pairs = [(one.values(), other.values()), (one.weights_or_none(), other.weights_or_none())]
    pairs += [(one.lengths(), other.lengths()), (one.offsets(), other.offsets())]
    return all(_close(mine, theirs) for mine, theirs in pairs)


@torch.fx.wrap
def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Whether both are bags of one feature with close values and weights, and the same lengths."""
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and _same_bags(jt_1, jt_2)


@torch.fx.wrap
def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Whether both are batches of the same features in the same order with equal bags."""
    if not (isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)):
        return False
    if kjt_1.keys() != kjt_2.keys() or kjt_1.stride_per_key() != kjt_2.stride_per_key():
        return False
    return _same_bags(kjt_1, kjt_2)


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


def place_of(batch: Any) -> torch.device:
    """The device of a batch that ``own_batch`` takes; the host's of anything else, which it will refuse."""
    nested = _nested_parts(batch)
    if nested:
        return next(iter(nested.values())).device
    if not all(callable(getattr(batch, name, None)) for name in _METHODS):
        return torch.device("cpu")
    found: torch.device = batch.values().device
    return found


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


def _check(features: KeyedJaggedTensor, names: Sequence[str], weights: torch.Tensor | None) -> None:
    keys = features.keys()
    missing = [name for name in names if name not in keys]
    if missing:
        raise MissingKeyError("not features of this batch", got=missing, expected=keys)
    check_ids(Bags(features.values(), features.values(), weights))


def select_each(features: KeyedJaggedTensor, names: Sequence[str]) -> list[Bags]:
    """The bags of each of these features, of as many samples as it has. Raises MissingKeyError, ShapeError."""
    _check(features, names, None)
    return [Bags(part.indices, part.offsets) for part in (features[name].bags() for name in names)]


def select(features: KeyedJaggedTensor, names: Sequence[str], *, weighted: bool) -> Bags:
    """The bags of these features in this order; a name may repeat, and of a repeated key the last is meant.

    Features of different sizes are spread over the full batch by their inverse indices.

    Raises:
        UnsupportedError: not a batch. MissingKeyError: features that are not in the batch. ConfigError: no weights
            where they are due; features of different sizes without inverse indices. ShapeError: values that are no ids.
    """
    features = own_batch(features)
    weights, keys = features.weights() if weighted else None, features.keys()
    _check(features, names, weights)
    if features.variable_stride_per_key():
        bags = joined([_spread_over_batch(features, name) for name in names])
    elif keys == list(names) and len(set(keys)) == len(keys):
        bags = features.bags()
    else:
        bags = joined([features[name].bags() for name in names])
    return Bags(bags.indices, bags.offsets, None if weights is None else bags.weights)


def _spread_over_batch(features: KeyedJaggedTensor, name: str) -> Bags:
    """The bags of one feature for every sample of the full batch, which may share a bag."""
    part, rows = features[name], _rows_of(features, name)
    lengths, begins = part.lengths()[rows].to(torch.int64), part.offsets()[:-1][rows].to(torch.int64)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(int(offsets[-1]), device=offsets.device)
    places = places + (begins - offsets[:-1]).repeat_interleave(lengths)
    weights = part.weights_or_none()
    return Bags(part.values()[places], offsets, None if weights is None else weights[places])


def _rows_of(features: KeyedJaggedTensor, name: str) -> torch.Tensor:
    inverse, strides = features.inverse_indices_or_none(), features.stride_per_key()
    stride = strides[features.index_per_key()[name]]
    if inverse is None:
        if len(set(strides)) > 1:
            message = "features of different sizes need inverse_indices, which say whose bag each sample has"
            raise ConfigError(message, got=strides, where="inverse_indices")
        return torch.arange(stride, device=features.device())
    if name not in inverse[0]:
        raise MissingKeyError("no inverse indices of this feature", got=name, expected=inverse[0])
    rows = inverse[1][inverse[0].index(name)].to(torch.int64)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= stride):
        got = (int(rows.min()), int(rows.max()))
        raise ShapeError("inverse indices outside of the feature", got=got, expected=f"0 to {stride - 1}", where=name)
    return rows
