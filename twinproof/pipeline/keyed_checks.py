"""What only eager code does with a batch: check it where it is made, move it, give its memory back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from twinproof.errors import ConfigError, MissingKeyError, ShapeError, UnsupportedError
from twinproof.pipeline.jagged import Bags, Eager, check_integers, cut_sizes, running_sums

__all__ = ["KeyedMoves", "refuse"]

# Anything else is a stand-in, whose numbers nobody knows: of a tracer, or of a map over a pytree.
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
_PARTS = ("_values", "_weights", "_lengths", "_offsets")


def refuse(fault: str, message: str, got: Any, expected: Any, where: str) -> None:
    """Raise the named error; TorchScript, which cannot, raises one of its own."""
    named = {"config": ConfigError, "key": MissingKeyError, "shape": ShapeError}
    raise named[fault](message, got=got, expected=expected, where=where)


def _is_traced() -> bool:
    tracing: bool = torch.jit.is_tracing()  # type: ignore[no-untyped-call]
    return tracing or torch.compiler.is_compiling()


class KeyedMoves(Eager):
    """The part of ``KeyedJaggedTensor`` that TorchScript does not see."""

    _keys: list[str]
    _stride: int | None
    _stride_per_key_per_rank: torch.Tensor | None
    _stride_per_key: list[int] | None
    _length_per_key: list[int] | None
    _lengths_offset_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _jt_dict: Any
    _checked: bool
    _inverse_indices: tuple[list[str], torch.Tensor] | None
    stride_per_key: Any

    def _check(self) -> None:
        """Demand what can be seen without a look at the numbers."""
        if not torch.compiler.is_compiling():
            check_integers(self._lengths, "lengths", "KeyedJaggedTensor")
            check_integers(self._offsets, "offsets", "KeyedJaggedTensor")

    def _check_features(self) -> None:
        """Demand parts that agree, once, before a feature is taken from them.

        Other devices are not waited for: there only what the host knows is checked, and a lookup checks what it reads.
        """
        lengths, offsets, parts = self._lengths, self._offsets, [self._values, self._lengths, self._offsets]
        if self._checked or _is_traced() or not self._keys or any(type(p) not in _PLAIN for p in parts):
            return
        if lengths is None and (offsets is None or (offsets.numel() == 0 and self._values.numel() > 0)):
            raise ConfigError("at least one of lengths and offsets", got=offsets, where="KeyedJaggedTensor")
        self._check_strides(lengths.numel() if lengths is not None else max(len(self.offsets()) - 1, 0))
        count = self._values.shape[0]
        if self._weights is not None and self._weights.shape[0] < count:
            raise ShapeError("a weight for each value", got=self._weights.shape[0], expected=count)
        found, known = self._length_per_key, self._sizes()
        if found is not None and (known if known is not None else [count]) != (found if known else [sum(found)]):
            raise ShapeError("length_per_key is not of these lengths", got=found, expected=known or count)
        begins = self._offset_per_key
        if known is not None and begins is not None and running_sums(known)[: max(len(begins), len(known))] != begins:
            raise ShapeError("offset_per_key is not of these lengths", got=begins, expected=running_sums(known))
        self._length_per_key, self._offset_per_key = found if known is None else known, None
        self._checked = True

    def _sizes(self) -> list[int] | None:
        """Values of each feature, where the host may read them. Raises ShapeError, ConfigError."""
        lengths, offsets, count = self._lengths, self._offsets, self._values.shape[0]
        if any(part is not None and part.device.type != "cpu" for part in (lengths, offsets)):
            return None
        if offsets is not None and offsets.numel() > 0:
            first, last, sizes = int(offsets[0]), int(offsets[-1]), offsets.diff()
            if (first, last) != (0, count) or bool((sizes < 0).any()):
                raise ShapeError("offsets do not cut the values", got=(first, last), expected=(0, count))
            if lengths is not None and not torch.equal(lengths.reshape(-1).to(sizes.dtype), sizes):
                raise ConfigError("lengths and offsets are not of the same bags", got=offsets, expected=lengths)
        else:
            sizes = torch.empty(0, dtype=torch.int64) if lengths is None else lengths.reshape(-1)
            total, least = int(sizes.sum()), int(sizes.min()) if sizes.numel() else 0
            if total != count or least < 0:
                raise ShapeError("lengths do not cut the values", got=(total, least), expected=count)
        return cut_sizes(sizes, self.stride_per_key())

    def _check_strides(self, bag_count: int) -> None:
        ranks, key_count = self._stride_per_key_per_rank, len(self._keys)
        if ranks is None and self._stride is None and bag_count % key_count:
            raise ShapeError("lengths are [keys * stride]", got=bag_count, expected=f"{key_count} * stride")
        if ranks is not None and (ranks.dim() != 2 or ranks.shape[0] != key_count):
            expected = (key_count, "ranks")
            raise ShapeError("stride_per_key_per_rank is not [keys, ranks]", got=tuple(ranks.shape), expected=expected)
        strides = self.stride_per_key()
        if sum(strides) != bag_count or len(strides) != key_count or min(strides) < 0:
            raise ShapeError("lengths are [keys * stride]", got=bag_count, expected=strides)
        known = self._lengths_offset_per_key
        if known is not None and known != running_sums(strides):
            raise ShapeError("lengths_offset_per_key is not of these strides", got=known, expected=strides)

    def bags(self) -> Bags:
        """The same, as lookups take it; offsets are int64. Raises what a batch whose parts disagree raises."""
        self._check_features()
        return super().bags()

    def _check_order(self, indices: Sequence[int], indices_tensor: torch.Tensor | None) -> None:
        if any(not 0 <= index < len(self._keys) for index in indices):
            raise ConfigError("not a feature", got=list(indices), expected=f"0 to {len(self._keys) - 1}")
        if indices_tensor is not None:
            same = indices_tensor.shape == (len(indices),)
            known = indices_tensor.device.type != "cpu" or type(indices_tensor) is not torch.Tensor
            if not same or not (known or indices_tensor.tolist() == list(indices)):
                raise ConfigError("not the same order", got=indices_tensor, expected=list(indices), where="permute")
        self._check_weights()

    def _check_total(self, sizes: list[int]) -> None:
        if not _is_traced() and type(self._values) in _PLAIN and sum(sizes) != self._values.shape[0]:
            raise ShapeError("lengths do not cut the values", got=sum(sizes), expected=self._values.shape[0])

    def _check_weights(self) -> None:
        if self._weights is not None and self._weights.shape[0] != self._values.shape[0]:
            got, expected = tuple(self._weights.shape), self._values.shape[0]
            raise ShapeError("one weight for each value", got=got, expected=expected)

    @staticmethod
    def _check_fits(parts: Sequence[Any]) -> None:
        """Demand parts that make one batch."""
        others = [type(part) for part in parts if not isinstance(part, KeyedMoves)]
        if others:
            message = "not batches of ours: make each by KeyedJaggedTensor(keys, values, weights, lengths)"
            raise UnsupportedError(message, got=others, where="concat")
        for part in parts:
            part._check_features()
            part._check_weights()
        variable = [part.variable_stride_per_key() for part in parts]
        facts = {
            "weights": [part.weights_or_none() is not None for part in parts],
            "strides of their own": variable,
            "inverse indices": [part.inverse_indices_or_none() is not None for part in parts],
        }
        for name, found in facts.items():
            if any(found) != all(found):
                raise ConfigError(f"some parts have {name} and some have none", got=found, where="concat")
        if not any(variable) and len({part.stride() for part in parts}) > 1:
            raise ShapeError("parts of different stride", got=[part.stride() for part in parts], where="concat")

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The same batch with every part moved; strides stay on the host."""
        moved = type(self).__new__(type(self))
        moved.__dict__.update(self.__dict__)
        moved._jt_dict = None
        for name in _PARTS:
            value = getattr(self, name)
            setattr(moved, name, None if value is None else move(value))
        if self._inverse_indices is not None:
            moved._inverse_indices = (self._inverse_indices[0], move(self._inverse_indices[1]))
        return moved

    def _with_weights(self, weights: torch.Tensor) -> Any:
        """The same batch with other weights."""
        made = self._map(lambda part: part)
        made._weights = weights
        return made

    def _empty_copy(self, device: torch.device) -> Any:
        """Memory of the same sizes, not initialised, on a device."""
        made = self._map(lambda part: torch.empty_like(part, device=device))
        made._checked = False
        return made

    def pin_memory(self) -> Any:
        """The same batch in page-locked host memory."""
        return self._map(torch.Tensor.pin_memory)

    def copy_(self, kjt: Any, non_blocking: bool = False) -> Any:
        """Fill every part from a batch of the same features and sizes; returns self. Raises ShapeError, ConfigError."""
        if list(kjt.keys()) != self._keys:
            raise ConfigError("not a batch of these features", got=list(kjt.keys()), expected=self._keys)
        self._copy_parts(kjt, non_blocking)
        known = ("_stride_per_key_per_rank", "_stride_per_key", "_length_per_key", "_lengths_offset_per_key")
        for name in (*known, "_offset_per_key", "_index_per_key"):
            setattr(self, name, getattr(kjt, name))
        self._jt_dict, self._checked = None, False
        mine, theirs = self._inverse_indices, kjt.inverse_indices_or_none()
        if mine is not None and theirs is not None:
            self._inverse_indices = (theirs[0], mine[1].copy_(theirs[1], non_blocking=non_blocking))
        elif mine is not None or theirs is not None:
            raise ConfigError("one batch has inverse indices and one has none", where="copy_")
        return self

    def clear_storage(self) -> int:
        """Give the memory of every part back, for all that share it; returns how many bytes there were."""
        parts = [part for part in (getattr(self, name) for name in _PARTS) if part is not None]
        size: int = sum(part.element_size() * part.numel() for part in parts)
        for part in parts:
            part.untyped_storage().resize_(0)
        return size

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, values={tuple(self._values.shape)})"
