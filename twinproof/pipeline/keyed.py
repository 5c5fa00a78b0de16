"""The bags of several features of one batch: torchrec's KeyedJaggedTensor.

The class is in TorchScript's part of Python; what only eager code sees stands in ``keyed_checks``.
"""

# TorchScript resolves annotations by value: they are no strings here.
from collections.abc import Callable
from typing import Any

import torch

from twinproof.pipeline.jagged import (
    JaggedMeta,
    JaggedTensor,
    Keyed,
    cut_sizes,
    jagged_text,
    permuted_spans,
    running_sums,
    sums_by_splits,
    total,
)
from twinproof.pipeline.keyed_checks import KeyedMoves, refuse

__all__ = ["KeyedCuts", "KeyedJaggedTensor", "KeyedSizes", "received_same", "received_variable", "staggered"]


def received_same(
    tensors: list[torch.Tensor], recat: torch.Tensor | None, stride_per_rank: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Lengths, values and weights that ranks sent, in the order of features: by rank and feature before.

    ``recat`` holds, for each block of the result, the block that was received; a block is the samples of one rank and
    feature, or a single sample where ranks have different numbers of them. None is the order of receipt.
    """
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[2] if len(tensors) > 2 else None
    if recat is None or recat.numel() == 0:
        return lengths, values, weights
    order: list[int] = recat.tolist()
    same = True
    for stride in stride_per_rank:
        same = same and stride == stride_per_rank[0]
    block = stride_per_rank[0] if same else 1
    if block == 0:
        return lengths, values, weights
    blocks = [block] * (lengths.numel() // block)
    ends = running_sums(cut_sizes(lengths, blocks))
    if weights is not None:
        weights = permuted_spans(weights, ends, order)
    return permuted_spans(lengths, running_sums(blocks), order), permuted_spans(values, ends, order), weights


def received_variable(
    tensors: list[torch.Tensor], recat: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``received_same`` where each rank has its own number of samples of each feature: ``tensors[2]``."""
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[3] if len(tensors) > 3 else None
    if recat is None or recat.numel() == 0:
        return lengths, values, weights
    order: list[int] = recat.tolist()
    blocks: list[int] = tensors[2].tolist()
    ends = running_sums(cut_sizes(lengths, blocks))
    if weights is not None:
        weights = permuted_spans(weights, ends, order)
    return permuted_spans(lengths, running_sums(blocks), order), permuted_spans(values, ends, order), weights


def staggered(strides: torch.Tensor, key_count: int, num_workers: int, stagger: int) -> torch.Tensor:
    """Samples of each feature by rank, [F, ranks], on the host; what was received is by rank, then feature.

    With ``stagger`` the ranks stand in columns of ``stagger`` rows and are read column by column.
    """
    if strides.numel() == 0:
        return torch.zeros([key_count, 1], dtype=torch.int64)
    found = strides.view(num_workers, key_count).t().cpu()
    if stagger > 1:
        found = found[:, torch.arange(num_workers).view(stagger, -1).t().reshape(-1)]
    return found


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


class KeyedJaggedTensor(KeyedCuts, metaclass=JaggedMeta):
    """The bags of several features of one batch, feature-major.

    Args:
        keys: F feature names; of a repeated one the last is meant wherever it is looked up by name.
        values: [N, ...] by feature, then sample, then position; int64 or int32 ids where they are looked up.
        weights: [N, ...] or None; float32 [N] where ids are looked up.
        lengths: integers [sum of strides], values of each bag; at least one of these two is given.
        offsets: integers [sum of strides + 1], where each bag begins.
        stride: samples B of every feature; needed only when there are no keys.
        stride_per_key_per_rank: samples of each feature by rank, [F, ranks], on the host: features of different sizes.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: what would be
            computed from the others, where the caller knows it.
        inverse_indices: names and, for each, the row of every sample of the full batch among the feature's own.

    Nothing is copied and nothing is changed.

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
            torch.tensor(stride_per_key_per_rank, dtype=torch.int32)
            if isinstance(stride_per_key_per_rank, list)
            else stride_per_key_per_rank
        )
        self._stride_per_key: list[int] | None = stride_per_key
        self._length_per_key: list[int] | None = length_per_key
        self._lengths_offset_per_key: list[int] | None = lengths_offset_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        self._inverse_indices: tuple[list[str], torch.Tensor] | None = inverse_indices
        # torchrec's own code sets it to False where the strides turn out to be all the same.
        self._variable_stride_per_key: bool | None = None
        self._checked: bool = False
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
        """A batch of these features; of different sizes where their bags differ in number."""
        parts = list(jt_dict.values())
        strides = [part.lengths().numel() for part in parts]
        weights = [part.weights() for part in parts if part.weights_or_none() is not None]
        if len(weights) != 0 and len(weights) != len(parts):
            refuse("config", "some features have weights and some have none", len(weights), len(parts), "from_jt_dict")
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
            None if same else torch.tensor(strides, dtype=torch.int32).reshape(-1, 1),
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
        weights, lengths, offsets, inverse = self._weights, self._lengths, self._offsets, self._inverse_indices
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
            if dtype is not None:
                weights = weights.to(dtype)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values.to(device, non_blocking=non_blocking),
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
        raise ValueError("no batches to put together")
    first = kjt_list[0]
    if not torch.jit.is_scripting():
        KeyedMoves._check_fits(kjt_list)
    keys: list[str] = []
    strides: list[list[int]] = []
    sizes: list[int] = []
    inverse_keys: list[str] = []
    inverse: list[torch.Tensor] = []
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
            inverse_keys.extend(rows[0])
            inverse.append(rows[1])
    return KeyedJaggedTensor(
        keys,
        torch.cat([kjt.values() for kjt in kjt_list]),
        None if first._weights is None else torch.cat([kjt.weights() for kjt in kjt_list]),
        torch.cat([kjt.lengths() for kjt in kjt_list]),
        None,
        None if first.variable_stride_per_key() else first.stride(),
        strides if first.variable_stride_per_key() else None,
        length_per_key=sizes if known else None,
        inverse_indices=(inverse_keys, torch.cat(inverse)) if len(inverse) > 0 else None,
    )
