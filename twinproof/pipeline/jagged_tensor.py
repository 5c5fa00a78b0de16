"""The bags of one feature: torchrec's JaggedTensor. In TorchScript's part of Python."""

import torch

from twinproof.errors import ConfigError
from twinproof.pipeline.jagged_parts import Eager, JaggedMeta, check_integers
from twinproof.pipeline.spans import jagged_text, padded

__all__ = ["JaggedTensor"]


class JaggedTensor(Eager, metaclass=JaggedMeta):
    """The bags of one feature.

    Args:
        values: [N, ...], by bag, then position; any dtype.
        weights: [N, ...] or None.
        lengths: integers [bags], values of each bag; at least one of these two is given.
        offsets: integers [bags + 1], where each bag begins.

    Nothing is copied and nothing is changed; that lengths cut the values is checked where many features make a batch.

    Raises:
        ConfigError: neither lengths nor offsets. LengthTypeError: either of another dtype than integers.
    """

    _fields = ("_values", "_weights", "_lengths", "_offsets")

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        self._values: torch.Tensor = values
        self._weights: torch.Tensor | None = weights
        self._lengths: torch.Tensor | None = lengths
        self._offsets: torch.Tensor | None = offsets
        if not torch.jit.is_scripting():
            self._check()

    @torch.jit.unused
    def _check(self) -> None:
        if self._lengths is None and self._offsets is None:
            raise ConfigError("at least one of lengths and offsets", where="JaggedTensor")
        if not torch.compiler.is_compiling():
            check_integers(self._lengths, "lengths", "JaggedTensor")
            check_integers(self._offsets, "offsets", "JaggedTensor")

    @torch.jit.unused
    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Fill every part from bags of the same sizes; returns self. Raises ShapeError."""
        self._copy_parts(jt, non_blocking)
        return self

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """No bags."""
        none = torch.empty(0, dtype=lengths_dtype, device=device)
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=none,
            offsets=none,
        )

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """No bags, of the same dtypes; with a device, memory of the same sizes there, not initialised."""
        if device is not None:
            return JaggedTensor(
                torch.empty_like(jt.values(), device=device),
                None if jt._weights is None else torch.empty_like(jt.weights(), device=device),
                None if jt._lengths is None else torch.empty_like(jt.lengths(), device=device),
                None if jt._offsets is None else torch.empty_like(jt.offsets(), device=device),
            )
        weights = None if jt._weights is None else jt.weights().new_empty(0)
        return JaggedTensor(jt.values().new_empty(0), weights, jt.lengths().new_empty(0), None)

    @staticmethod
    def from_dense_lengths(
        values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> "JaggedTensor":
        """The first ``lengths[i]`` of each row of values [B, W], and of weights [B, W]."""
        mask = _first(values, lengths)
        return JaggedTensor(values[mask], _masked(weights, mask), lengths)

    @staticmethod
    def from_dense(values: list[torch.Tensor], weights: list[torch.Tensor] | None = None) -> "JaggedTensor":
        """A bag for each tensor of values; lengths are int32."""
        joined = torch.cat(values)
        sizes = torch.tensor([len(value) for value in values], dtype=torch.int32, device=joined.device)
        return JaggedTensor(joined, None if weights is None else torch.cat(weights), sizes)

    def to_dense(self) -> list[torch.Tensor]:
        """The values of each bag, views."""
        ends: list[int] = self.offsets().tolist()
        return [self._values[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        """The weights of each bag, views, or None."""
        weights = self._weights
        if weights is None:
            return None
        ends: list[int] = self.offsets().tolist()
        return [weights[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """[bags, desired_length, ...]; without a length, that of the longest bag."""
        width = int(self.lengths().max().item()) if desired_length is None else desired_length
        return padded(self._values, self.offsets(), width, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        """``to_padded_dense`` of the weights, or None."""
        weights = self._weights
        if weights is None:
            return None
        width = int(self.lengths().max().item()) if desired_length is None else desired_length
        return padded(weights, self.offsets(), width, padding_value)

    def size_in_bytes(self) -> int:
        """Bytes of all parts that are there."""
        size = self._values.element_size() * self._values.numel()
        for part in [self._weights, self._lengths, self._offsets]:
            if part is not None:
                size += part.element_size() * part.numel()
        return size

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """The same bags on another device."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
            None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            None if offsets is None else offsets.to(device, non_blocking=non_blocking),
        )

    def __str__(self) -> str:
        count, weights = self.offsets().size(0) - 1, self._weights
        text = jagged_text(self._values, self.offsets(), 0, count)
        if weights is None:
            return "JaggedTensor({\n    " + text + "\n})\n"
        scales = jagged_text(weights, self.offsets(), 0, count)
        return 'JaggedTensor({\n    "values": ' + text + ',\n    "weights": ' + scales + "\n})\n"


@torch.fx.wrap
def _first(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """True for the first ``lengths[i]`` columns of row i."""
    return torch.arange(values.size(1), device=values.device).unsqueeze(0) < lengths.unsqueeze(1)


@torch.fx.wrap
def _masked(values: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[mask]
