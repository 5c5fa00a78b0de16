"""Pooled columns of several features side by side: torchrec's KeyedTensor. In TorchScript's part of Python."""

from typing import Any

import torch

from twinproof.errors import MissingKeyError, ShapeError
from twinproof.pipeline.jagged_parts import JaggedMeta, recorded
from twinproof.pipeline.spans import running_sums, span_text

__all__ = ["KeyedTensor", "permute_multi_embedding", "regroup_kts"]


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


class KeyedTensor(_Eager, metaclass=JaggedMeta):
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

    def keys(self) -> list[str]:
        """Feature names."""
        return self._keys

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

    def offset_per_key(self) -> list[int]:
        """Where each feature's columns begin, and the end; computed once."""
        found = self._offset_per_key
        if found is None:
            found = running_sums(self._length_per_key)
            self._offset_per_key = found
        return found

    def _key_indices(self) -> dict[str, int]:
        found = self._index_per_key
        if found is None:
            places: dict[str, int] = {}
            for index, key in enumerate(self._keys):
                places[key] = index
            found = places
            self._index_per_key = found
        return found

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
