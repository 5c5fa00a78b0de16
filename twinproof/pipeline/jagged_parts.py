"""What a batch of one feature and one of several have in common: their parts, and how torch's compilers see them."""

import abc
from types import FunctionType
from typing import Any

import torch
from torch.fx._symbolic_trace import ProxyableClassMeta

from twinproof.errors import ConfigError, LengthTypeError, ShapeError
from twinproof.pipeline.jagged import Bags, offsets_of
from twinproof.pipeline.spans import offsets_like

__all__ = ["Eager", "Jagged", "JaggedMeta", "check_integers", "recorded"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class JaggedMeta(abc.ABCMeta, ProxyableClassMeta):
    """A class that torch.fx can see being made, and whose bases' methods TorchScript can see.

    With proxies as arguments it becomes a node of the graph. TorchScript compiles what stands in a class's own body
    alone: the methods of bases that say ``_scripted = True`` are put there too.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **options: Any) -> Any:
        for base in (each for direct in bases for each in direct.__mro__):
            if vars(base).get("_scripted"):
                for attribute, value in vars(base).items():
                    if isinstance(value, (FunctionType, staticmethod)):
                        body.setdefault(attribute, value)
        return super().__new__(mcs, name, bases, body, **options)


def check_integers(tensor: torch.Tensor | None, name: str, where: str) -> None:
    """Demand integers, or no elements. Raises LengthTypeError."""
    if tensor is not None and tensor.dtype not in _INTEGERS and tensor.numel() != 0:
        raise LengthTypeError(f"{name} must be integers", got=tensor.dtype, expected=_INTEGERS, where=where)


def recorded(stream: Any, *parts: Any) -> None:
    """Keep the memory of the parts that are tensors of a device until ``stream`` has passed this point."""
    for part in parts:
        if part is not None and part.device.type != "cpu":
            part.record_stream(stream)


def _no_weights() -> None:
    raise ConfigError("this batch carries no weights", where="weights")


def _no_bags() -> None:
    raise ConfigError("this batch has neither lengths nor offsets", where="lengths")


def _count_fits(lengths: torch.Tensor, values: torch.Tensor) -> None:
    most = torch.iinfo(lengths.dtype).max if lengths.dtype in _INTEGERS else values.shape[0]
    if not torch.compiler.is_compiling() and values.shape[0] > most:
        got, expected = values.shape[0], f"at most {most}"
        raise ShapeError(f"offsets of {lengths.dtype} cannot count the values", got=got, expected=expected)


class Jagged:
    """Values and the bags that they are cut into, by lengths or offsets; in TorchScript's part of Python."""

    _scripted = True
    _values: torch.Tensor
    _weights: torch.Tensor | None
    _lengths: torch.Tensor | None
    _offsets: torch.Tensor | None

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def values(self) -> torch.Tensor:
        """[N, ...]."""
        return self._values

    def weights(self) -> torch.Tensor:
        """[N, ...]. Raises ConfigError when there are none."""
        weights = self._weights
        if weights is None:
            if not torch.jit.is_scripting():
                _no_weights()
            raise ValueError("this batch carries no weights")
        return weights

    def weights_or_none(self) -> torch.Tensor | None:
        """[N, ...] or None."""
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Values of each bag, [bags]; computed once."""
        lengths, offsets = self._lengths, self._offsets
        if lengths is None:
            if offsets is None:
                if not torch.jit.is_scripting():
                    _no_bags()
                raise ValueError("neither lengths nor offsets")
            lengths = torch.diff(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> torch.Tensor | None:
        """As given or computed so far."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where each bag begins, [bags + 1], in the dtype of lengths; computed once.

        Raises ShapeError where that dtype cannot count the values.
        """
        lengths, offsets = self._lengths, self._offsets
        if offsets is None:
            if lengths is None:
                if not torch.jit.is_scripting():
                    _no_bags()
                raise ValueError("neither lengths nor offsets")
            if not torch.jit.is_scripting():
                _count_fits(lengths, self._values)
            offsets = offsets_like(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> torch.Tensor | None:
        """As given or computed so far."""
        return self._offsets


class Eager(Jagged):
    """What only eager code does: TorchScript does not see it."""

    _scripted = False

    def bags(self) -> Bags:
        """The same, as lookups take it; offsets are int64."""
        offsets = self._offsets
        if offsets is None or offsets.numel() == 0:
            assert self._lengths is not None
            offsets = offsets_of(self._lengths.reshape(-1))
        return Bags(self._values, offsets.to(torch.int64), self._weights)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every part until ``stream`` has passed this point."""
        recorded(stream, self._values, self._weights, self._lengths, self._offsets)

    def _copy_parts(self, source: Any, non_blocking: bool) -> None:
        """Fill every part from a batch of the same sizes. Raises ShapeError."""
        pairs = [(self._values, source.values()), (self._weights, source.weights_or_none())]
        if self._lengths is not None:
            pairs.append((self._lengths, source.lengths()))
        if self._offsets is not None:
            pairs.append((self._offsets, source.offsets()))
        found = [None if part is None else tuple(part.shape) for _, part in pairs]
        expected = [None if part is None else tuple(part.shape) for part, _ in pairs]
        if found != expected:
            raise ShapeError("not a batch of these sizes", got=found, expected=expected, where="copy_")
        for mine, theirs in pairs:
            if mine is not None and theirs is not None:
                mine.copy_(theirs, non_blocking=non_blocking)
