"""Batches as users know them: torchrec's three types, pytrees, other libraries' batches, and what a lookup takes.

``KeyedJaggedTensor`` and ``KeyedTensor`` are in TorchScript's part of Python. Nothing of another library is imported:
what has the protocol's names is converted without a copy, and what has not is refused by name.
"""

from collections.abc import Callable, Iterable, Sequence
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
    KeyedMoves,
    check_ids,
    cut_sizes,
    jagged_text,
    joined,
    joined_rows,
    permuted_spans,
    received_same,
    received_variable,
    recorded,
    refuse,
    running_sums,
    span_text,
    staggered,
    sums_by_splits,
    total,
)

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedCuts",
    "KeyedJaggedTensor",
    "KeyedSizes",
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


class KeyedSizes(Keyed, KeyedMoves):
    """Sizes of features, computed once each."""

    _scripted = True
    _variable_stride_per_key: bool | None

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
        found: list[list[int]] = ranks.to(torch.int64).tolist()
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
                refuse("config", "this batch carries no inverse indices", None, "names and rows", "inverse_indices")
            raise ValueError("this batch carries no inverse indices")
        return found

    def inverse_indices_or_none(self) -> tuple[list[str], torch.Tensor] | None:
        """The same, or None."""
        return self._inverse_indices

    def _over_batch(self, key: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one feature's own samples, as rows of the full batch's where features differ in size."""
        inverse, at = self._inverse_indices, -1
        if inverse is None or not self.variable_stride_per_key():
            return rows
        for index, name in enumerate(inverse[0]):
            # Of a repeated key the last is meant, as everywhere.
            at = index if name == key else at
        if at < 0:
            if not torch.jit.is_scripting():
                refuse("key", "no inverse indices of this feature", key, inverse[0], "batch")
            raise ValueError("no inverse indices of this feature")
        return rows.index_select(0, inverse[1][at])

    def length_per_key(self) -> list[int]:
        """Values of each feature; of a batch on "meta", which has no lengths, an even share."""
        if not torch.jit.is_scripting():
            self._check_features()
        found = self._length_per_key
        if found is None:
            count = len(self._keys)
            if count > 0 and self._values.is_meta:
                share = self._values.numel() // count
                found = [share + self._values.numel() % count] + [share] * (count - 1)
            elif count == 0:
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
        """For each of ``dist_tensors``, how much of it belongs to each run of ``key_splits`` features.

        Raises ConfigError for a run below zero, or for more features than there are.
        """
        if not torch.jit.is_scripting() and (total(key_splits) > len(self._keys) or min(key_splits or [0]) < 0):
            refuse("config", "runs are not of the features", key_splits, len(self._keys), "dist_splits")
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


class KeyedCuts(KeyedSizes):
    """The ways to take features out of a batch."""

    _scripted = True
    _made: "Callable[..., KeyedJaggedTensor]"

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Consecutive features, ``segments[i]`` in part i, views. Raises ConfigError when they are not all features."""
        if not torch.jit.is_scripting() and (total(segments) != len(self._keys) or min(segments or [0]) < 0):
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


class KeyedJaggedTensor(KeyedCuts, metaclass=JaggedMeta):
    """The bags of several features of one batch, feature-major.

    Args:
        keys: F feature names; of a repeated one the last is meant wherever it is looked up by name.
        values: [N, ...] by feature, then sample, then position; int64 or int32 ids where they are looked up.
        weights: [N, ...] or None; where ids are looked up [N], rounded to float32.
        lengths: integers [sum of strides], values of each bag; at least one of these two is given.
        offsets: integers [sum of strides + 1], where each bag begins.
        stride: samples B of every feature; needed only when there are no keys.
        stride_per_key_per_rank: samples of each feature by rank, [F, ranks], on the host: features of different sizes.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: what would be
            computed from the others, where the caller knows it.
        inverse_indices: names and, for each, the row of every sample of the full batch among the feature's own.

    No tensor is copied and nothing is changed; lists of names and sizes are its own.

    Raises:
        ConfigError: neither lengths nor offsets, or both and of different bags. ShapeError: parts that disagree.
        LengthTypeError: lengths or offsets that are no integers.
    """

    _fields = ("_values", "_weights", "_lengths", "_offsets", "_stride_per_key_per_rank", "_inverse_indices")

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: torch.Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], torch.Tensor] | None = None,
    ) -> None:
        self._keys: list[str] = list(keys)
        self._values: torch.Tensor = values
        self._weights: torch.Tensor | None = weights
        self._lengths: torch.Tensor | None = lengths
        self._offsets: torch.Tensor | None = offsets
        self._stride: int | None = stride
        self._stride_per_key_per_rank: torch.Tensor | None = (
            torch.tensor(stride_per_key_per_rank, dtype=torch.int32, device="cpu")
            if isinstance(stride_per_key_per_rank, list)
            else stride_per_key_per_rank
        )
        self._stride_per_key: list[int] | None = None if stride_per_key is None else list(stride_per_key)
        self._length_per_key: list[int] | None = None if length_per_key is None else list(length_per_key)
        self._lengths_offset_per_key: list[int] | None = (
            None if lengths_offset_per_key is None else list(lengths_offset_per_key)
        )
        self._offset_per_key: list[int] | None = None if offset_per_key is None else list(offset_per_key)
        self._index_per_key: dict[str, int] | None = None if index_per_key is None else dict(index_per_key)
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        rows = inverse_indices
        self._inverse_indices: tuple[list[str], torch.Tensor] | None = (
            None if rows is None else (list(rows[0]), rows[1])
        )
        # torchrec's own code sets it to False where the strides turn out to be all the same.
        self._variable_stride_per_key: bool | None = None
        self._checked: bool = False
        # Whether the host has seen that lengths or offsets cut the values.
        self._is_cut: bool = False
        if not torch.jit.is_scripting():
            self._check()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], torch.Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a batch from values and offsets, and know at once how many values each feature has."""
        ranks = stride_per_key_per_rank
        made = KeyedJaggedTensor(keys, values, weights, None, offsets, stride, ranks, inverse_indices=inverse_indices)
        return made.sync()

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], torch.Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a batch from values and lengths, and know at once how many values each feature has."""
        ranks = stride_per_key_per_rank
        made = KeyedJaggedTensor(keys, values, weights, lengths, None, stride, ranks, inverse_indices=inverse_indices)
        return made.sync()

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No features of no samples."""
        keys: list[str] = []
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor(keys, values, weights, torch.empty(0, dtype=lengths_dtype, device=device), None, 0)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """No features of as many samples; with a device, memory of the same sizes there, not initialised."""
        return _empty_like(kjt, device)

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """All features of parts with the same stride. Raises ConfigError, ShapeError where parts do not fit."""
        return _concat(kjt_list)

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """A batch of these features, of different sizes where bags differ in number. Raises ConfigError for none."""
        parts = list(jt_dict.values())
        strides = [part.lengths().numel() for part in parts]
        weights: list[torch.Tensor] = []
        for part in parts:
            scales = part.weights_or_none()
            if scales is not None:
                weights.append(scales)
        if not torch.jit.is_scripting():
            _check_dict(len(parts), len(weights))
        same = True
        for stride in strides:
            same = same and stride == strides[0]
        return KeyedJaggedTensor(
            list(jt_dict.keys()),
            torch.cat([part.values() for part in parts]),
            torch.cat(weights) if len(weights) > 0 else None,
            torch.cat([part.lengths() for part in parts]),
            None,
            strides[0] if same else None,
            None if same else torch.tensor(strides, dtype=torch.int32, device="cpu").reshape(-1, 1),
        ).sync()

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[torch.Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: torch.Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """The batch of all ranks from what they sent, ``dist_tensors`` of each by rank, then feature."""
        if variable_stride_per_key:
            lengths, values, weights = received_variable(tensors, recat)
            ranks = staggered(tensors[2], len(keys), num_workers, stagger)
            return KeyedJaggedTensor(keys, values, weights, lengths, None, None, ranks).sync()
        assert stride_per_rank is not None
        lengths, values, weights = received_same(tensors, recat, stride_per_rank)
        return KeyedJaggedTensor(keys, values, weights, lengths, None, total(stride_per_rank)).sync()

    def _made(
        self,
        keys: list[str],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        ranks: torch.Tensor | None,
        sizes: list[int],
    ) -> "KeyedJaggedTensor":
        """Some features of this batch. TorchScript wants every argument named inside of the class."""
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=None,
            stride=self.stride(),
            stride_per_key_per_rank=ranks,
            stride_per_key=None,
            length_per_key=sizes if len(keys) > 0 else None,
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=None,
        )

    def sync(self) -> "KeyedJaggedTensor":
        """Have ``length_per_key`` and ``offset_per_key`` on the host from here on."""
        if torch.jit.is_scripting() or not torch.compiler.is_compiling():
            self.offset_per_key()
        return self

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """The same batch on another device, its weights in another dtype."""
        values = self._values.to(device, non_blocking=non_blocking)
        if not torch.jit.is_scripting():
            self._count_here(values.device)
        weights, lengths, offsets, inverse = self._weights, self._lengths, self._offsets, self._inverse_indices
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
            if dtype is not None:
                weights = weights.to(dtype)
        moved = KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            offsets=None if offsets is None else offsets.to(device, non_blocking=non_blocking),
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank if self.variable_stride_per_key() else None,
            stride_per_key=self._stride_per_key,
            length_per_key=self._length_per_key,
            lengths_offset_per_key=self._lengths_offset_per_key,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
            jt_dict=None,
            inverse_indices=None if inverse is None else (inverse[0], inverse[1].to(device, non_blocking=non_blocking)),
        )
        moved._is_cut = self._is_cut
        return moved


def _check_dict(part_count: int, weighted_count: int) -> None:
    if part_count == 0:
        refuse("config", "no features to make a batch of: KeyedJaggedTensor.empty()", {}, "a feature", "from_jt_dict")
    if weighted_count not in (0, part_count):
        message = "some features have weights and some have none"
        refuse("config", message, weighted_count, part_count, "from_jt_dict")


@torch.fx.wrap
def _empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None) -> "KeyedJaggedTensor":
    variable, weights = kjt.variable_stride_per_key(), kjt._weights
    ranks = kjt._stride_per_key_per_rank if variable else None
    stride = None if variable else kjt.stride()
    if device is None:
        keys: list[str] = []
        none = None if weights is None else weights.new_empty(0)
        return KeyedJaggedTensor(keys, kjt._values.new_empty(0), none, kjt.lengths().new_empty(0), None, stride, ranks)
    if torch.jit.is_scripting():
        raise NotImplementedError("TorchScript makes no empty batch on another device")
    made: KeyedJaggedTensor = kjt._empty_copy(device)
    return made


@torch.fx.wrap
def _concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
    if len(kjt_list) == 0:
        if not torch.jit.is_scripting():
            refuse("config", "no batches to put together", kjt_list, "one batch or more", "concat")
        raise ValueError("no batches to put together")
    first = kjt_list[0]
    if not torch.jit.is_scripting():
        KeyedMoves._check_fits(kjt_list)
    keys: list[str] = []
    strides: list[list[int]] = []
    sizes: list[int] = []
    inverse: list[tuple[list[str], list[str], torch.Tensor]] = []
    known = True
    for kjt in kjt_list:
        keys.extend(kjt.keys())
        strides.extend(kjt.stride_per_key_per_rank())
        found = kjt._length_per_key
        known = known and found is not None
        if found is not None:
            sizes.extend(found)
        rows = kjt._inverse_indices
        if rows is not None:
            inverse.append((kjt._keys, rows[0], rows[1]))
    return KeyedJaggedTensor(
        keys,
        torch.cat([kjt.values() for kjt in kjt_list]),
        None if first._weights is None else torch.cat([kjt.weights() for kjt in kjt_list]),
        torch.cat([kjt.lengths() for kjt in kjt_list]),
        None,
        None if first.variable_stride_per_key() else first.stride(),
        strides if first.variable_stride_per_key() else None,
        length_per_key=sizes if known else None,
        inverse_indices=joined_rows(inverse) if len(inverse) > 0 else None,
    )


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
            raise ShapeError("widths are not the columns", got=list(widths), expected=shape, where="KeyedTensor")

    def _refuse(self, key: str) -> None:
        raise MissingKeyError("not a feature of this tensor", got=key, expected=self._keys, where="KeyedTensor")

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
        self._keys: list[str] = list(keys)
        self._length_per_key: list[int] = list(length_per_key)
        self._values: torch.Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = None if offset_per_key is None else list(offset_per_key)
        self._index_per_key: dict[str, int] | None = None if index_per_key is None else dict(index_per_key)
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
    raise MissingKeyError("not a feature of these tensors", got=keys, expected=sorted(known), where="keys")


def _same_count(groups: list[list[str]], keys: list[str]) -> None:
    if len(groups) != len(keys):
        if not torch.jit.is_scripting():
            raise ShapeError("a name for each group", got=len(keys), expected=len(groups), where="regroup")
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
    if min([len(group) for group in groups] + [1]) == 0:
        if not torch.jit.is_scripting():
            refuse("config", "a group of no features has no columns", groups, "a name in each group", "regroup")
        raise ValueError("a group of no features has no columns")
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
    if one is None or other is None or one.shape != other.shape:
        return one is other
    dtype = torch.promote_types(one.dtype, other.dtype)
    same = torch.allclose if dtype.is_floating_point else torch.equal
    return bool(same(one.to(dtype), other.to(one.device, dtype)))


def _same_bags(one: Any, other: Any) -> bool:
    pairs = [(one.values(), other.values()), (one.weights_or_none(), other.weights_or_none())]
    pairs += [(one.lengths(), other.lengths()), (one.offsets(), other.offsets())]
    return all(_close(mine, theirs) for mine, theirs in pairs)


@torch.fx.wrap
def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Whether both are bags of one feature with the same ids and lengths, and close weights, whatever their dtypes."""
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and _same_bags(jt_1, jt_2)


@torch.fx.wrap
def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Whether both are batches of the same features in the same order with equal bags, see ``jt_is_equal``."""
    are_batches = isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)
    same = are_batches and kjt_1.keys() == kjt_2.keys() and kjt_1.stride_per_key() == kjt_2.stride_per_key()
    return same and _same_bags(kjt_1, kjt_2)


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
        raise ShapeError("more parts than a batch has", got=len(parts), expected=len(fields), where="KeyedJaggedTensor")
    values, weights, lengths, offsets, ranks, inverse = parts + [None] * (len(fields) - len(parts))
    made = KeyedJaggedTensor.empty()
    made._keys, made._stride, made._values, made._weights = list(context[0]), None, values, weights
    made._lengths, made._offsets, made._stride_per_key_per_rank = lengths, offsets, ranks
    made._inverse_indices = None if inverse is None else (list(context[1]), inverse)
    return made


def _unflatten_columns(parts: Iterable[Any], context: tuple[list[str], list[int], int]) -> KeyedTensor:
    made = KeyedTensor.__new__(KeyedTensor)
    made._keys, made._length_per_key, made._key_dim = list(context[0]), list(context[1]), context[2]
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
    return torch.device(batch.values().device)


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
            fault = "values between the bags of a nested tensor"
            raise ShapeError(fault, got=part.lengths(), expected=sizes, where=name)
        lengths.append(sizes)
    values = torch.cat([part.values() for part in parts.values()])
    ranks = [[sizes.numel()] for sizes in lengths] if len({sizes.numel() for sizes in lengths}) > 1 else None
    return KeyedJaggedTensor(list(parts), values, lengths=torch.cat(lengths), stride_per_key_per_rank=ranks)


def _check(features: KeyedJaggedTensor, names: Sequence[str], weights: torch.Tensor | None) -> None:
    known = features.index_per_key()
    missing = [name for name in names if name not in known]
    if missing:
        raise MissingKeyError("not features of this batch", got=missing, expected=features.keys(), where="features")
    check_ids(Bags(features.values(), features.values(), weights))


def select_each(features: KeyedJaggedTensor, names: Sequence[str]) -> list[Bags]:
    """The bags of each of these features, of as many samples as it has. Raises MissingKeyError, ShapeError."""
    _check(features, names, None)
    return [Bags(part.indices, part.offsets, is_cut=features._is_cut) for part in (features[n].bags() for n in names)]


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
        bags = _spread_over_batch(features, names)
    elif keys == list(names) and len(set(keys)) == len(keys):
        bags = features.bags()
    else:
        bags = joined([features[name].bags() for name in names])
    weights = None if weights is None or bags.weights is None else bags.weights.to(torch.float32)
    return Bags(bags.indices, bags.offsets, weights, is_cut=features._is_cut)


def _spread_over_batch(features: KeyedJaggedTensor, names: Sequence[str]) -> Bags:
    """The bags of these features for every sample of the full batch, of which some may share a bag."""
    parts, rows = [features[name] for name in names], [_rows_of(features, name) for name in names]
    if not rows[0].numel():
        none, weights = features.values()[:0], features.weights_or_none()
        return Bags(none, none.new_zeros(1, dtype=torch.int64), None if weights is None else weights[:0])
    lengths, begins, seen = [], [], []
    for part, mine in zip(parts, rows, strict=True):
        # Rows are known to the host a line further down; until then one that is outside is another.
        inside = mine.clamp(min=0, max=max(part.lengths().numel() - 1, 0))
        lengths.append(torch.nn.functional.pad(part.lengths(), (0, 1))[inside].to(torch.int64))
        begins.append(part.bags().offsets[inside])
        seen.append(torch.stack([mine.min(), mine.max(), lengths[-1].sum()]))
    found = torch.stack(seen).tolist()
    for name, part, (least, most, _) in zip(names, parts, found, strict=True):
        if least < 0 or most >= part.lengths().numel():
            expected = f"0 to {part.lengths().numel() - 1}"
            raise ShapeError("inverse indices outside of the feature", got=(least, most), expected=expected, where=name)
    return joined([_repeated(*each) for each in zip(parts, lengths, begins, (n for *_, n in found), strict=True)])


def _repeated(part: JaggedTensor, lengths: torch.Tensor, begins: torch.Tensor, count: int) -> Bags:
    """Bags of these lengths, ``count`` ids in all, which begin there in the feature."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    starts = (begins - offsets[:-1]).repeat_interleave(lengths, output_size=count)
    places = starts + torch.arange(count, device=starts.device)
    weights = part.weights_or_none()
    return Bags(part.values()[places], offsets, None if weights is None else weights[places])


def _rows_of(features: KeyedJaggedTensor, name: str) -> torch.Tensor:
    """The row of every sample among the feature's own, int64."""
    inverse, strides = features.inverse_indices_or_none(), features.stride_per_key()
    if inverse is None:
        if len(set(strides)) > 1:
            expected = "one size, or inverse_indices, which say whose bag each sample has"
            raise ConfigError("features of different sizes", got=strides, expected=expected, where="inverse_indices")
        return torch.arange(strides[features.index_per_key()[name]], device=features.device())
    if name not in inverse[0]:
        raise MissingKeyError("no inverse indices of this feature", got=name, expected=inverse[0], where="batch")
    # Of a repeated key the last is meant, as everywhere.
    return inverse[1][len(inverse[0]) - 1 - inverse[0][::-1].index(name)].to(torch.int64)
