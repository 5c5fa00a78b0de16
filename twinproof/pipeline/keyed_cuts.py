"""Some features of a batch, as batches and by name. In TorchScript's part of Python."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from twinproof.pipeline.jagged_tensor import JaggedTensor
from twinproof.pipeline.keyed_moves import refuse
from twinproof.pipeline.keyed_sizes import KeyedSizes
from twinproof.pipeline.spans import jagged_text, permuted_spans, running_sums, total

if TYPE_CHECKING:
    from twinproof.pipeline.keyed_jagged import KeyedJaggedTensor

__all__ = ["KeyedCuts"]


class KeyedCuts(KeyedSizes):
    """The ways to take features out of a batch."""

    _scripted = True
    _made: "Callable[..., KeyedJaggedTensor]"

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Consecutive features, ``segments[i]`` in part i, views. Raises ConfigError when they are not all features."""
        if not torch.jit.is_scripting() and (total(segments) != len(self._keys) or min(segments) < 0):
            refuse("config", "segments are not the features", segments, len(self._keys), "split")
        starts, ends, bags = running_sums(segments), self.offset_per_key(), self.lengths_offset_per_key()
        weights, ranks = self._weights, self._stride_per_key_per_rank
        parts: list[KeyedJaggedTensor] = []
        for i in range(len(segments)):
            first, last = starts[i], starts[i + 1]
            if segments[i] == len(self._keys):
                parts.append(self)  # type: ignore[arg-type]
                continue
            values = self._values[ends[first] : ends[last]]
            parts.append(
                self._made(
                    self._keys[first:last],
                    values,
                    None if weights is None else weights[ends[first] : ends[last]],
                    self.lengths().reshape(-1)[bags[first] : bags[last]],
                    None if ranks is None or not self.variable_stride_per_key() else ranks[first:last],
                    self.length_per_key()[first:last],
                )
            )
        return parts

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> "KeyedJaggedTensor":
        """The features at ``indices``, in that order, which may repeat; ``indices_tensor`` holds the same numbers.

        Raises ConfigError for an index that is none of a feature, or a tensor of other numbers.
        """
        if not torch.jit.is_scripting():
            self._check_order(indices, indices_tensor)
        ends, sizes = self.offset_per_key(), self.length_per_key()
        weights, ranks = self._weights, self._stride_per_key_per_rank
        if ranks is not None:
            ranks = ranks[indices] if self.variable_stride_per_key() else None
        return self._made(
            [self._keys[i] for i in indices],
            permuted_spans(self._values, ends, indices),
            None if weights is None else permuted_spans(weights, ends, indices),
            permuted_spans(self.lengths().reshape(-1), self.lengths_offset_per_key(), indices),
            ranks,
            [sizes[i] for i in indices],
        )

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The same batch with lengths of one dimension."""
        ranks = self._stride_per_key_per_rank if self.variable_stride_per_key() else None
        lengths = self.lengths().reshape(-1)
        return self._made(self._keys, self._values, self._weights, lengths, ranks, self.length_per_key())

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature, views. Raises MissingKeyError."""
        places = self._key_indices()
        if key not in places and not torch.jit.is_scripting():
            refuse("key", "not a feature of this batch", key, self._keys, "KeyedJaggedTensor")
        i, weights = places[key], self._weights
        ends, bags = self.offset_per_key(), self.lengths_offset_per_key()
        return JaggedTensor(
            self._values[ends[i] : ends[i + 1]],
            None if weights is None else weights[ends[i] : ends[i + 1]],
            self.lengths().reshape(-1)[bags[i] : bags[i + 1]],
            None,
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Feature name -> its bags, whose offsets are computed here or when they are asked for."""
        known: dict[str, JaggedTensor] | None = self._jt_dict
        if known is not None:
            return known
        found: dict[str, JaggedTensor] = {}
        for key in self._keys:
            part = self[key]
            if compute_offsets:
                # Of no lengths at all torchrec's offsets are none either.
                part._offsets = part.offsets() if self.lengths().numel() > 0 else part.lengths()
            found[key] = part
        return found

    def __str__(self) -> str:
        if len(self._keys) == 0 or (self._offsets is None and self._lengths is None):
            return "KeyedJaggedTensor()\n"
        bags, weights = self.lengths_offset_per_key(), self._weights
        lines: list[str] = []
        for i, key in enumerate(self._keys):
            text = jagged_text(self._values, self.offsets(), bags[i], bags[i + 1])
            if weights is not None:
                scales = jagged_text(weights, self.offsets(), bags[i], bags[i + 1])
                text = '{\n        "values": ' + text + ',\n        "weights": ' + scales + "\n    }"
            lines.append('    "' + key + '": ' + text)
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"
