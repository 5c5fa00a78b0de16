"""Jagged batches of ids by feature, and pooled embeddings by feature: torchrec's KeyedJaggedTensor and KeyedTensor.

Prevents batches whose parts disagree: keys, lengths and values are checked once, where a batch is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from refimpl.errors import ConfigError, MissingKeyError, ShapeError
from refimpl.pipeline.jagged import Bags, joined, offsets_of

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]

_IDS = (torch.int64, torch.int32)


class _Jagged:
    """Values and the bags that they are cut into, by lengths or offsets, exactly one of which is given."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ConfigError("exactly one of lengths and offsets", where=type(self).__name__)
        self._values, self._weights, self._offsets = values, weights, offsets
        self._lengths = offsets.diff() if lengths is None and offsets is not None else lengths

    def values(self) -> torch.Tensor:
        """Ids [N]."""
        return self._values

    def weights_or_none(self) -> torch.Tensor | None:
        """Per-sample weights [N], or None."""
        return self._weights

    def weights(self) -> torch.Tensor:
        """Per-sample weights [N]. Raises ConfigError when there are none."""
        if self._weights is None:
            raise ConfigError("this batch carries no weights", where="weights")
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Ids of each bag, [bags]."""
        assert self._lengths is not None
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where each bag begins, [bags + 1]; computed once."""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths())
        return self._offsets

    def bags(self) -> Bags:
        """The same, as lookups take it; offsets are int64."""
        return Bags(self._values, self.offsets().to(torch.int64), self._weights)


class JaggedTensor(_Jagged):
    """The bags of one feature: values [N], lengths [B] and, where there are any, weights [N]."""


class KeyedJaggedTensor(_Jagged):
    """The bags of several features of one batch, feature-major.

    Args:
        keys: F distinct feature names.
        values: int64 or int32 ids [N], by feature, then sample, then position.
        weights: float32 [N], one for each id, or None.
        lengths: int64 or int32 [F * B], ids of each bag; exactly one of these two is given.
        offsets: [F * B + 1], where each bag begins.
        stride: B; needed only when there are no keys.

    Nothing is copied and nothing is changed.

    Raises:
        ConfigError: keys that repeat; lengths and offsets both or neither. ShapeError: parts that disagree.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = tuple(keys)
        self._length_per_key: list[int] | None = None
        if len(set(self._keys)) != len(self._keys):
            raise ConfigError("a feature is named twice", got=self._keys, where="keys")
        self._stride = self.lengths().numel() // len(self._keys) if self._keys else stride or 0
        self._check(stride)

    def _check(self, stride: int | None) -> None:
        assert self._lengths is not None
        expected = len(self._keys) * self._stride
        if self._lengths.dim() != 1 or self._lengths.numel() != expected or stride not in (None, self._stride):
            got = (tuple(self._lengths.shape), stride)
            raise ShapeError("lengths are [keys * stride]", got=got, expected=(len(self._keys), self._stride))
        if self._values.dim() != 1 or self._values.dtype not in _IDS or self._lengths.dtype not in _IDS:
            found = (tuple(self._values.shape), self._values.dtype, self._lengths.dtype)
            raise ShapeError("ids and lengths are int64 or int32, and flat", got=found, where="values")
        if self._weights is not None and (self._weights.shape != self._values.shape):
            raise ShapeError("one weight for each id", got=tuple(self._weights.shape), expected=self._values.numel())
        # Other devices are not waited for: a lookup checks what it reads.
        if self._values.device.type == "cpu":
            total, least = int(self._lengths.sum()), int(self._lengths.min()) if expected else 0
            if total != self._values.numel() or least < 0:
                raise ShapeError("lengths do not cut the values", got=(total, least), expected=self._values.numel())

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Make a batch from values and lengths."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Make a batch from values and offsets."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def concat(cls, parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All features of parts with the same stride. Raises ConfigError when only some parts have weights."""
        weighted = [part._weights is not None for part in parts]
        if any(weighted) != all(weighted):
            raise ConfigError("some parts have weights and some have none", got=weighted, where="concat")
        if len({part._stride for part in parts}) > 1:
            raise ShapeError("parts of different stride", got=[part._stride for part in parts], where="concat")
        bags = joined([part.bags() for part in parts])
        return cls([key for part in parts for key in part._keys], bags.indices, bags.weights, offsets=bags.offsets)

    def keys(self) -> list[str]:
        """Feature names."""
        return list(self._keys)

    def stride(self) -> int:
        """B, samples of the batch."""
        return self._stride

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Ids of each feature, on the host; computed once."""
        if self._length_per_key is None:
            self._length_per_key = self.lengths().reshape(len(self._keys), -1).sum(1).tolist() if self._keys else []
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each feature's ids begin, and the end."""
        ends = [0]
        for length in self.length_per_key():
            ends.append(ends[-1] + length)
        return ends

    def sync(self) -> KeyedJaggedTensor:
        """Have ``length_per_key`` on the host from here on."""
        self.length_per_key()
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature. Raises MissingKeyError."""
        if key not in self._keys:
            raise MissingKeyError("not a feature of this batch", got=key, expected=self._keys)
        index, ends = self._keys.index(key), self.offset_per_key()
        ids = slice(ends[index], ends[index + 1])
        bags = slice(index * self._stride, (index + 1) * self._stride)
        return JaggedTensor(
            self._values[ids], None if self._weights is None else self._weights[ids], self.lengths()[bags]
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Feature name -> its bags."""
        return {key: self[key] for key in self._keys}

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The features at ``indices``, in that order. Raises ConfigError for an index that is none of a feature."""
        if any(not 0 <= index < len(self._keys) for index in indices):
            raise ConfigError("not a feature", got=list(indices), expected=f"0 to {len(self._keys) - 1}")
        none = Bags(self._values[:0], self.offsets()[:1], None if self._weights is None else self._weights[:0])
        keys = [self._keys[index] for index in indices]
        bags = joined([none, *(self[key].bags() for key in keys)])
        return KeyedJaggedTensor(keys, bags.indices, bags.weights, offsets=bags.offsets, stride=self._stride)

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive features, ``segments[i]`` in part i. Raises ConfigError when they are not all features."""
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise ConfigError("segments are not the features", got=list(segments), expected=len(self._keys))
        starts = [sum(segments[:i]) for i in range(len(segments))]
        return [self.permute(range(start, start + count)) for start, count in zip(starts, segments, strict=True)]

    def _map(self, move: Any) -> KeyedJaggedTensor:
        moved = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        moved.__dict__.update(self.__dict__)
        for name in ("_values", "_weights", "_lengths", "_offsets"):
            value = getattr(self, name)
            setattr(moved, name, None if value is None else move(value))
        return moved

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same batch on another device."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedJaggedTensor:
        """The same batch in page-locked host memory."""
        return self._map(torch.Tensor.pin_memory)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every part until ``stream`` has passed this point."""
        for value in (self._values, self._weights, self._lengths, self._offsets):
            if value is not None and value.device.type != "cpu":
                value.record_stream(stream)

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={list(self._keys)}, stride={self._stride}, values={self._values.numel()})"


class KeyedTensor:
    """Pooled embeddings of several features, side by side: float32 [B, sum of widths].

    Raises:
        ConfigError: keys that repeat. ShapeError: widths that are not the values' columns.
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor, key_dim: int = 1
    ) -> None:
        self._keys, self._widths, self._values, self._key_dim = list(keys), list(length_per_key), values, key_dim
        if len(set(self._keys)) != len(self._keys):
            raise ConfigError("a feature is named twice", got=self._keys, where="keys")
        if len(self._keys) != len(self._widths) or sum(self._widths) != values.shape[key_dim]:
            raise ShapeError("widths are not the columns", got=self._widths, expected=tuple(values.shape))

    @classmethod
    def from_tensor_list(cls, keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1) -> KeyedTensor:
        """Tensors side by side along ``key_dim``."""
        return cls(keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat(list(tensors), key_dim), key_dim)

    def keys(self) -> list[str]:
        """Feature names."""
        return self._keys

    def values(self) -> torch.Tensor:
        """Float32 [B, sum of widths]."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which features stand side by side."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Width of each feature."""
        return self._widths

    def offset_per_key(self) -> list[int]:
        """Where each feature's columns begin, and the end."""
        return [sum(self._widths[:i]) for i in range(len(self._widths) + 1)]

    def __getitem__(self, key: str) -> torch.Tensor:
        """One feature's columns, a view. Raises MissingKeyError."""
        if key not in self._keys:
            raise MissingKeyError("not a feature of this tensor", got=key, expected=self._keys)
        index = self._keys.index(key)
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._widths[index])

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Feature name -> its columns."""
        return {key: self[key] for key in self._keys}

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        """For each group of names, their columns side by side. Raises MissingKeyError."""
        found = {key: tensor for tensor in keyed_tensors for key in tensor.keys()}  # noqa: SIM118
        missing = [key for group in groups for key in group if key not in found]
        if missing:
            raise MissingKeyError("not a feature of these tensors", got=missing, expected=sorted(found))
        return [torch.cat([found[key][key] for key in group], dim=1) for group in groups]

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, shape={tuple(self._values.shape)})"
