"""The bags of several features of one batch: torchrec's KeyedJaggedTensor.

The class body is in TorchScript's part of Python; checks, moves and streams stand in ``keyed_moves``, which only eager
code sees.
"""

import torch

from twinproof.pipeline.jagged_parts import JaggedMeta
from twinproof.pipeline.jagged_tensor import JaggedTensor
from twinproof.pipeline.keyed_cuts import KeyedCuts
from twinproof.pipeline.keyed_makers import received_same, received_variable, staggered
from twinproof.pipeline.keyed_moves import KeyedMoves, refuse
from twinproof.pipeline.spans import total

__all__ = ["KeyedJaggedTensor"]


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
