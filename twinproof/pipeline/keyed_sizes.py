"""How many samples and values each feature of a batch has, on the host. In TorchScript's part of Python."""

from typing import Any

import torch

from twinproof.pipeline.keyed_moves import KeyedMoves, refuse
from twinproof.pipeline.spans import cut_sizes, running_sums, sums_by_splits

__all__ = ["KeyedSizes"]


class KeyedSizes(KeyedMoves):
    """Sizes of features, computed once each."""

    _scripted = True
    _index_per_key: dict[str, int] | None
    _variable_stride_per_key: bool | None

    def keys(self) -> list[str]:
        """Feature names."""
        return self._keys

    def stride(self) -> int:
        """Samples; where features differ in size those of the full batch, or of the largest feature."""
        stride, ranks, inverse = self._stride, self._stride_per_key_per_rank, self._inverse_indices
        if stride is None:
            lengths, offsets = self._lengths, self._offsets
            stride = 0
            if len(self._keys) > 0 and ranks is not None and ranks.numel() > 0:
                if inverse is not None and inverse[1].numel() > 0:
                    stride = inverse[1].size(-1)
                else:
                    stride = int(ranks.sum(dim=1).max().item())
            elif len(self._keys) > 0 and offsets is not None and offsets.numel() > 0:
                stride = (offsets.numel() - 1) // len(self._keys)
            elif len(self._keys) > 0 and lengths is not None:
                stride = lengths.numel() // len(self._keys)
            self._stride = stride
        return stride

    def stride_per_key(self) -> list[int]:
        """Samples of each feature, over all ranks."""
        found, ranks = self._stride_per_key, self._stride_per_key_per_rank
        if found is None:
            if ranks is None:
                found = [self.stride()] * len(self._keys)
            elif ranks.dim() == 2:
                sums: list[int] = ranks.sum(dim=1).tolist()
                found = sums
            else:
                found = [0] * 0
            self._stride_per_key = found
        return found

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Samples of each feature by rank; [] where all features are of one size."""
        ranks = self._stride_per_key_per_rank
        if ranks is None:
            return []
        found: list[list[int]] = ranks.tolist()
        return found

    def variable_stride_per_key(self) -> bool:
        """Whether features differ in size."""
        known = self._variable_stride_per_key
        if known is not None:
            return known
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], torch.Tensor]:
        """Names and, for each, the row of every sample of the full batch. Raises ConfigError where there are none."""
        found = self._inverse_indices
        if found is None:
            if not torch.jit.is_scripting():
                refuse("config", "this batch carries no inverse indices", None, None, "inverse_indices")
            raise ValueError("this batch carries no inverse indices")
        return found

    def inverse_indices_or_none(self) -> tuple[list[str], torch.Tensor] | None:
        """The same, or None."""
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """Values of each feature; of a batch on "meta", which has no lengths, an even share."""
        if not torch.jit.is_scripting():
            self._check_features()
        found = self._length_per_key
        if found is None:
            count, lengths = len(self._keys), self._lengths
            if count > 0 and self._values.is_meta:
                share = self._values.numel() // count
                found = [share + self._values.numel() % count] + [share] * (count - 1)
            elif count == 0 or (lengths is None and self._offsets is None):
                found = [0] * 0
            else:
                found = cut_sizes(self.lengths(), self.stride_per_key())
                if not torch.jit.is_scripting():
                    self._check_total(found)
            self._length_per_key = found
        return found

    def length_per_key_or_none(self) -> list[int] | None:
        """As given or computed so far."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each feature's values begin, and the end."""
        sizes, found = self.length_per_key(), self._offset_per_key
        if found is None:
            found = running_sums(sizes)
            self._offset_per_key = found
        return found

    def offset_per_key_or_none(self) -> list[int] | None:
        """As given or computed so far."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Where each feature's lengths begin, and the end."""
        found = self._lengths_offset_per_key
        if found is None:
            found = running_sums(self.stride_per_key())
            self._lengths_offset_per_key = found
        return found

    def index_per_key(self) -> dict[str, int]:
        """Feature name -> its place; of a repeated one the last."""
        return self._key_indices()

    def _key_indices(self) -> dict[str, int]:
        found = self._index_per_key
        if found is None:
            places: dict[str, int] = {}
            for index, key in enumerate(self._keys):
                places[key] = index
            found = places
            self._index_per_key = found
        return found

    def unsync(self) -> Any:
        """Forget what the host knows of the sizes, so that it is read again."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def size_in_bytes(self) -> int:
        """Bytes of all parts that are there."""
        size = self._values.element_size() * self._values.numel()
        for part in [self._weights, self._lengths, self._offsets, self._stride_per_key_per_rank]:
            if part is not None:
                size += part.element_size() * part.numel()
        return size

    def dist_labels(self) -> list[str]:
        """What ``dist_tensors`` are."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """For each of ``dist_tensors``, how much of it belongs to each run of ``key_splits`` features."""
        sizes = sums_by_splits(self.length_per_key(), key_splits)
        splits = [sums_by_splits(self.stride_per_key(), key_splits), sizes]
        if self.variable_stride_per_key():
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(sizes)
        return splits

    def dist_tensors(self) -> list[torch.Tensor]:
        """What is sent to other ranks, by feature: lengths, values, samples where they differ, weights."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key(), device=self.device()))
        weights = self._weights
        if weights is not None:
            tensors.append(weights)
        return tensors
