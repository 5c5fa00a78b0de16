"""Bags of ids of one feature, and what batches of one and of several features have in common.

Most of it is in TorchScript's part of Python, because user code scripts models that hold these types. Only eager code
checks a batch where it is made, moves it, and gives its memory back.
"""

import abc
import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.fx._symbolic_trace import ProxyableClassMeta

from twinproof.errors import (
    ConfigError,
    LengthTypeError,
    MissingKeyError,
    ShapeError,
    TwinproofError,
    UnsupportedError,
)

__all__ = [
    "Bags",
    "Eager",
    "Jagged",
    "JaggedMeta",
    "JaggedTensor",
    "Keyed",
    "KeyedMoves",
    "as_many",
    "check_ids",
    "check_integers",
    "check_places",
    "check_positions",
    "cut_sizes",
    "divisor_on",
    "jagged_text",
    "joined",
    "joined_rows",
    "longest",
    "of_tables",
    "offsets_like",
    "offsets_of",
    "padded",
    "permuted_spans",
    "positions_in",
    "received_same",
    "received_variable",
    "recorded",
    "refuse",
    "running_sums",
    "span_text",
    "staggered",
    "sums_by_splits",
    "total",
    "with_items",
    "with_tensors",
]


def running_sums(counts: list[int]) -> list[int]:
    """0, then the sums of the first n counts."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return ends


def total(counts: list[int]) -> int:
    """The sum of counts."""
    return running_sums(counts)[-1]


def sums_by_splits(counts: list[int], splits: list[int]) -> list[int]:
    """The sums of consecutive runs of counts, ``splits[i]`` of them in run i."""
    ends, at = running_sums(counts), running_sums(splits)
    return [ends[at[i + 1]] - ends[at[i]] for i in range(len(splits))]


def offsets_like(lengths: torch.Tensor) -> torch.Tensor:
    """[n + 1] in the dtype of lengths [n]: 0, then the running sums."""
    flat = lengths.reshape(-1)
    return torch.cat([flat.new_zeros(1), flat.cumsum(0).to(flat.dtype)])


def cut_sizes(lengths: torch.Tensor, strides: list[int]) -> list[int]:
    """Ids of each feature, on the host: the sums of consecutive lengths, ``strides[i]`` of them for feature i."""
    flat = lengths.reshape(-1)
    if len(strides) == 0 or flat.numel() == 0:
        return [0] * len(strides)
    same = True
    if not torch.jit.is_scripting():
        # Sizes of its own that a batch brings are numbers that an export does not know.
        same = not torch.compiler.is_exporting()
    for stride in strides:
        same = same and stride == strides[0]
    if same:
        sums = flat.reshape(len(strides), strides[0]).sum(dim=1)
    else:
        sums = torch.cat([part.sum().reshape(1) for part in torch.split(flat, strides)])
    sizes: list[int] = sums.tolist()
    return sizes


def longest(lengths: torch.Tensor) -> int:
    """The values of the longest bag, 0 where there is none."""
    return int(lengths.max().item()) if lengths.numel() > 0 else 0


def as_many(values: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Say to torch.export, which does not know the sizes of parts of a batch, that each id has a weight."""
    if weights is not None and torch.compiler.is_exporting():
        torch._check(weights.size(0) == values.size(0))  # type: ignore[no-untyped-call]


def positions_in(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Int64 [N]: the place of each of ``count`` ids in its bag; lengths on meta do not say how many there are."""
    wide = lengths.reshape(-1).to(torch.int64)
    is_told = wide.is_meta
    if not torch.jit.is_scripting():
        is_told = is_told or torch.compiler.is_exporting()
    begins = (wide.cumsum(0) - wide).repeat_interleave(wide, output_size=count if is_told else None)
    return torch.arange(count, device=lengths.device) - begins


def permuted_spans(data: torch.Tensor, ends: list[int], order: list[int]) -> torch.Tensor:
    """The spans ``[ends[i], ends[i + 1])`` of data for each i of ``order``, one after the other."""
    if len(order) == 0:
        return data[:0]
    return torch.cat([data[ends[i] : ends[i + 1]] for i in order])


def padded(data: torch.Tensor, offsets: torch.Tensor, width: int, padding_value: float) -> torch.Tensor:
    """[bags, width, ...] from data [N, ...]: what is longer than ``width`` is cut, what is shorter is filled up."""
    sizes = torch.diff(offsets).clamp(max=width)
    columns = torch.arange(width, device=data.device)
    mask = columns.unsqueeze(0) < sizes.unsqueeze(1)
    source = (offsets[:-1].unsqueeze(1) + columns.unsqueeze(0))[mask]
    shape: list[int] = list(data.shape)
    dense = torch.full([mask.size(0), width] + shape[1:], padding_value, dtype=data.dtype, device=data.device)  # noqa: RUF005 - TorchScript
    dense[mask] = data[source]
    return dense


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
    order: list[int] = recat.to(torch.int64).tolist()
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
    order: list[int] = recat.to(torch.int64).tolist()
    blocks: list[int] = tensors[2].to(torch.int64).tolist()
    ends = running_sums(cut_sizes(lengths, blocks))
    if weights is not None:
        weights = permuted_spans(weights, ends, order)
    return permuted_spans(lengths, running_sums(blocks), order), permuted_spans(values, ends, order), weights


def staggered(strides: torch.Tensor, key_count: int, num_workers: int, stagger: int) -> torch.Tensor:
    """Samples of each feature by rank, [F, ranks], on the host; what was received is by rank, then feature.

    With ``stagger`` the ranks stand in columns of ``stagger`` rows and are read column by column.
    """
    if strides.numel() == 0:
        return torch.zeros([key_count, 1], dtype=torch.int64, device="cpu")
    found = strides.view(num_workers, key_count).t().cpu()
    if stagger > 1:
        found = found[:, torch.arange(num_workers, device="cpu").view(stagger, -1).t().reshape(-1)]
    return found


def span_text(values: torch.Tensor, begin: int, end: int) -> str:
    """Values [begin, end) as a list, of one dimension or two. Raises ValueError for more."""
    parts: list[str] = []
    if values.dim() == 1:
        for value in values[begin:end]:
            parts.append(str(value.item()))
    elif values.dim() == 2:
        for row in values[begin:end]:
            cells: list[str] = []
            for cell in row:
                cells.append(str(cell.item()))
            parts.append("[" + ", ".join(cells) + "]")
    else:
        raise ValueError("only values of one or two dimensions are printed")
    return "[" + ", ".join(parts) + "]"


def jagged_text(values: torch.Tensor, offsets: torch.Tensor, first: int, last: int) -> str:
    """Bags [first, last) as a list of lists."""
    ends: list[int] = offsets.to(torch.int64).tolist()
    parts: list[str] = []
    for bag in range(first, last):
        parts.append(span_text(values, ends[bag], ends[bag + 1]))
    return "[" + ", ".join(parts) + "]"


_IDS = (torch.int64, torch.int32)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Int64 [n + 1]: 0, then the running sums of lengths [n]."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


class Bags:
    """Bags of F features, feature-major: ``indices`` int64 [N], ``offsets`` int64 [F * B + 1], ``weights`` or None.

    ``sizes`` are the ids of each feature, where the host knows them; ``is_cut`` says that it has seen the offsets cut
    the ids.
    """

    def __init__(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        sizes: list[int] | None = None,
        is_cut: bool = False,
    ) -> None:
        self.indices, self.offsets, self.weights, self.sizes = indices, offsets, weights, sizes
        self.is_cut = is_cut

    def feature(self, index: int, feature_count: int) -> "Bags":
        """The bags of one feature."""
        stride = (self.offsets.numel() - 1) // feature_count
        ends = self.offsets[index * stride : (index + 1) * stride + 1]
        ids = slice(int(ends[0]), int(ends[-1]))
        return Bags(self.indices[ids], ends - ends[0], None if self.weights is None else self.weights[ids])

    def by_feature(self, feature_count: int) -> "list[Bags]":
        """The bags of every feature; where the host does not know their sizes it looks once, and waits for that."""
        stride = (self.offsets.numel() - 1) // feature_count
        begins: list[int] = [0] * (feature_count + 1)
        if self.sizes is not None:
            begins = running_sums(self.sizes)
        elif stride:
            # A copy first: in a backward torch calls ``tolist`` of no subclass.
            begins = self.offsets[::stride].cpu().tolist()
        found = []
        for index in range(feature_count):
            ids, ends = slice(begins[index], begins[index + 1]), self.offsets[index * stride : (index + 1) * stride + 1]
            weights = None if self.weights is None else self.weights[ids]
            found.append(Bags(self.indices[ids], ends - begins[index], weights))
        return found

    def detached(self) -> "Bags":
        """The same, whose weights get no gradient."""
        return Bags(self.indices, self.offsets, None if self.weights is None else self.weights.detach(), self.sizes)

    def wants_gradient(self) -> bool:
        """Whether the weights require a gradient."""
        return self.weights is not None and self.weights.requires_grad

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every part until ``stream`` has passed this point."""
        for part in (self.indices, self.offsets, self.weights):
            if part is not None and part.device.type != "cpu":
                part.record_stream(stream)

    def lengths(self) -> torch.Tensor:
        """Ids of each bag, at least 1, as float32 [B, 1]: what a mean divides by."""
        return self.lengths_of(0, 1)

    def lengths_of(self, index: int, feature_count: int) -> torch.Tensor:
        """``lengths`` of one feature's bags, without a look at how many ids it has."""
        stride = (self.offsets.numel() - 1) // feature_count
        ends = self.offsets[index * stride : (index + 1) * stride + 1]
        return ends.diff().clamp(min=1).to(torch.float32)[:, None]


def check_ids(bags: Bags) -> None:
    """Demand what a lookup can read: flat int64 or int32 ids, and one real weight for each. Raises ShapeError."""
    if bags.indices.dim() != 1 or bags.indices.dtype not in _IDS:
        found = (tuple(bags.indices.shape), bags.indices.dtype)
        raise ShapeError("not ids that can be looked up", got=found, expected="flat int64 or int32", where="values")
    if bags.weights is not None and bags.weights.shape != bags.indices.shape:
        raise ShapeError(
            "one weight for each id", got=tuple(bags.weights.shape), expected=bags.indices.numel(), where="weights"
        )
    if bags.weights is not None and bags.weights.is_complex():
        raise ShapeError("weights are real numbers", got=bags.weights.dtype, expected=torch.float32, where="weights")


def joined(parts: Sequence[Bags]) -> "Bags":
    """Bags one after the other: of one part or more, which have weights all or none."""
    weights = [part.weights for part in parts if part.weights is not None]
    return Bags(
        torch.cat([part.indices for part in parts]),
        offsets_of(torch.cat([part.offsets.diff() for part in parts])),
        torch.cat(weights) if weights else None,
    )


def of_tables(
    kept: Sequence[int],
    count: int,
    feature_tables: Sequence[int],
    widths: Sequence[int],
    bags: Bags,
    grad: torch.Tensor,
) -> tuple[list[int], Bags, torch.Tensor]:
    """Of some of ``count`` tables the table of each feature, their bags, and their columns of ``grad`` [B, widths]."""
    if len(kept) == count:
        return list(feature_tables), bags, grad
    places = {table: place for place, table in enumerate(kept)}
    features = [feature for feature, table in enumerate(feature_tables) if table in places]
    parts, columns = bags.by_feature(len(widths)), torch.split(grad, list(widths), dim=1)
    tables = [places[feature_tables[feature]] for feature in features]
    whole = joined([parts[feature] for feature in features])
    return tables, whole, torch.cat([columns[feature] for feature in features], dim=1)


def check_places(bags: Bags, weights: Sequence[torch.Tensor]) -> None:
    """Raises ConfigError where some of what is read is on meta, whose kernels leave a result as its memory was."""
    parts = [bags.indices, *weights, *(() if bags.weights is None else (bags.weights,))]
    places = {part.device for part in parts}
    if len(places) > 1 and torch.device("meta") in places:
        raise ConfigError(
            "a batch and tables of which one is on meta", got=places, expected="all or none", where="lookup"
        )


def joined_rows(parts: list[tuple[list[str], list[str], torch.Tensor]]) -> tuple[list[str], torch.Tensor]:
    """Inverse indices of batches that are put together: of each its features, names and rows.

    What a batch says of features that it has not is left out, for another may have them.
    """
    names: list[str] = []
    rows = [parts[0][2][:0]]
    for keys, named, found in parts:
        for index, name in enumerate(named):
            if name in keys:
                names.append(name)
                rows.append(found[index : index + 1])
    return names, torch.cat(rows)


def divisor_on(values: torch.Tensor, number: int) -> "int | torch.Tensor":
    """``number``, in a form by which ``values`` are divided with one rounding wherever they lie.

    CUDA divides by a number of the host as it multiplies by its reciprocal, which can lose one bit. It divides by what
    lies on the device. Reciprocals of powers of two are exact.
    """
    if values.device.type == "cpu" or number & (number - 1) == 0:
        return number
    return torch.full((1,), number, dtype=values.dtype, device=values.device)


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

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``: torch's class has a call that takes anything."""
        make: Any = cls.__init__  # type: ignore[misc]
        return inspect.Signature(list(inspect.signature(make).parameters.values())[1:])


def check_integers(tensor: torch.Tensor | None, name: str, where: str) -> None:
    """Demand integers, or no elements. Raises LengthTypeError."""
    if tensor is not None and not hasattr(tensor, "dtype"):
        raise LengthTypeError(f"{name} are a tensor", got=type(tensor).__name__, expected=torch.Tensor, where=where)
    if tensor is not None and tensor.dtype not in _INTEGERS and tensor.numel() != 0:
        raise LengthTypeError(f"{name} must be integers", got=tensor.dtype, expected=_INTEGERS, where=where)


def check_positions(positions: torch.Tensor, dtype: torch.dtype) -> None:
    """Demand a dtype in which each of these numbers is one of its own. Raises ConfigError."""
    if dtype.is_floating_point or dtype.is_complex:
        # Of a float all integers up to 2 / eps.
        most = int(2 / torch.finfo(dtype).eps)
    else:
        most = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    longest = int(positions.max()) if positions.numel() and not positions.is_meta else 0
    if longest > most:
        got, expected = (longest, dtype), f"positions up to {most}, or weights of float32"
        raise ConfigError("weights of this dtype cannot hold positions", got=got, expected=expected, where="weights")


def recorded(stream: Any, *parts: Any) -> None:
    """Keep the memory of the parts that are tensors of a device until ``stream`` has passed this point."""
    for part in parts:
        if part is not None and part.device.type != "cpu":
            part.record_stream(stream)


def _no_weights() -> None:
    raise ConfigError("this batch carries no weights", got=None, expected="one for each value", where="weights")


def _no_bags() -> None:
    raise ConfigError(
        "this batch has neither lengths nor offsets", got=None, expected="at least one of them", where="lengths"
    )


def _count_fits(lengths: torch.Tensor, values: torch.Tensor) -> None:
    most = torch.iinfo(lengths.dtype).max if lengths.dtype in _INTEGERS else values.shape[0]
    if not torch.compiler.is_compiling() and values.shape[0] > most:
        got, expected = values.shape[0], f"at most {most}"
        raise ShapeError(
            f"offsets of {lengths.dtype} cannot count the values", got=got, expected=expected, where="offsets"
        )


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


class Keyed:
    """Names of features and where each begins, computed once; in TorchScript's part of Python."""

    _scripted = True
    _keys: list[str]
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    length_per_key: Any

    def keys(self) -> list[str]:
        """Feature names."""
        return self._keys

    def offset_per_key(self) -> list[int]:
        """Where each feature begins, and the end; computed once."""
        sizes, found = self.length_per_key(), self._offset_per_key
        if found is None:
            found = running_sums(sizes)
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


class Eager(Jagged):
    """What only eager code does: TorchScript does not see it."""

    _scripted = False

    def bags(self) -> "Bags":
        """The same, as lookups take it; offsets are int64."""
        offsets = self._offsets
        if offsets is None or offsets.numel() == 0:
            offsets = offsets_of(self.lengths().reshape(-1))
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
            # Both are there, or neither is.
            if mine is not None:
                mine.copy_(theirs, non_blocking=non_blocking)


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
            raise ConfigError(
                "neither lengths nor offsets", got=None, expected="at least one of them", where="JaggedTensor"
            )
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
        """The first ``lengths[i]`` of each row of values [B, W], and of weights [B, W].

        Raises ShapeError where there is not a length for each row, and on the host for one outside 0 to W.
        """
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
        ends: list[int] = self.offsets().to(torch.int64).tolist()
        return [self._values[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        """The weights of each bag, views, or None."""
        weights = self._weights
        if weights is None:
            return None
        ends: list[int] = self.offsets().to(torch.int64).tolist()
        return [weights[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """[bags, desired_length, ...]; without a length that of the longest bag, 0 where there is none."""
        width = longest(self.lengths()) if desired_length is None else desired_length
        return padded(self._values, self.offsets(), width, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        """``to_padded_dense`` of the weights, or None."""
        weights = self._weights
        if weights is None:
            return None
        width = longest(self.lengths()) if desired_length is None else desired_length
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
    """True for the first ``lengths[i]`` columns of row i. Raises LengthTypeError, ShapeError."""
    if not torch.jit.is_scripting():
        check_integers(lengths, "lengths", "from_dense_lengths")
        _check_rows(values, lengths)
    return torch.arange(values.size(1), device=values.device).unsqueeze(0) < lengths.unsqueeze(1)


@torch.jit.unused
def _check_rows(values: torch.Tensor, lengths: torch.Tensor) -> None:
    """Demand a length for each row of [B, W], and where the host knows the numbers none outside 0 to W."""
    expected = tuple(values.shape[:2])
    if lengths.shape != expected[:1] or len(expected) < 2:
        raise ShapeError("a length for each row", got=tuple(lengths.shape), expected=expected, where="lengths")
    if _is_traced() or type(lengths) not in _PLAIN or lengths.device.type != "cpu" or lengths.numel() == 0:
        return
    least, most = int(lengths.min()), int(lengths.max())
    if least < 0 or most > expected[1]:
        raise ShapeError("lengths do not cut the rows", got=(least, most), expected=(0, expected[1]), where="lengths")


@torch.fx.wrap
def _masked(values: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[mask]


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Bags or columns, of a subclass too, with each of their tensors changed."""
    made = copy.copy(batch)
    vars(made).update({name: change(part) for name, part in vars(batch).items() if isinstance(part, torch.Tensor)})
    return made


def with_items(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A dictionary or a list with each of its values changed; a subclass keeps its attributes, and its class."""
    made = copy.copy(batch)
    for key, value in list(batch.items() if isinstance(batch, dict) else enumerate(batch)):
        made[key] = change(value)
    return made


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
    _is_cut: bool
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
            raise ConfigError(
                "neither lengths nor offsets", got=offsets, expected="at least one of them", where="KeyedJaggedTensor"
            )
        self._check_strides(lengths.numel() if lengths is not None else max(len(self.offsets()) - 1, 0))
        count = self._values.shape[0]
        if self._weights is not None and self._weights.shape[0] < count:
            raise ShapeError("a weight for each value", got=self._weights.shape[0], expected=count, where="weights")
        found, known = self._length_per_key, self._sizes()
        if found is not None and (known if known is not None else [count]) != (found if known else [sum(found)]):
            raise ShapeError(
                "length_per_key is not of these lengths", got=found, expected=known or count, where="length_per_key"
            )
        begins = self._offset_per_key
        if known is not None and begins is not None and running_sums(known)[: max(len(begins), len(known))] != begins:
            raise ShapeError(
                "offset_per_key is not of these lengths",
                got=begins,
                expected=running_sums(known),
                where="offset_per_key",
            )
        self._length_per_key, self._offset_per_key = found if known is None else known, None
        self._checked, self._is_cut = True, known is not None

    def _count_here(self, device: torch.device) -> None:
        """Count the values of each feature while their lengths lie on the host, which would wait to ask a device.

        Parts that disagree are refused where they are looked up, as on the host.
        """
        if self._length_per_key is None and self._values.device.type == "cpu" and device.type not in ("cpu", "meta"):
            with contextlib.suppress(TwinproofError):
                self._check_features()

    def _sizes(self) -> list[int] | None:
        """Values of each feature, where the host may read them. Raises ShapeError, ConfigError."""
        lengths, offsets, count = self._lengths, self._offsets, self._values.shape[0]
        if any(part is not None and part.device.type != "cpu" for part in (lengths, offsets)):
            return None
        if offsets is not None and offsets.numel() > 0:
            # Of uint8, a step down is a size above 0.
            first, last, sizes = int(offsets[0]), int(offsets[-1]), offsets.to(torch.int64).diff()
            if (first, last) != (0, count) or bool((sizes < 0).any()):
                raise ShapeError(
                    "offsets do not cut the values", got=(first, last), expected=(0, count), where="offsets"
                )
            if lengths is not None and not torch.equal(lengths.reshape(-1).to(sizes.dtype), sizes):
                raise ConfigError(
                    "lengths and offsets are not of the same bags",
                    got=offsets,
                    expected=lengths,
                    where="lengths, offsets",
                )
        else:
            sizes = torch.empty(0, dtype=torch.int64, device="cpu") if lengths is None else lengths.reshape(-1)
            total, least = int(sizes.sum()), int(sizes.min()) if sizes.numel() else 0
            if total != count or least < 0:
                raise ShapeError("lengths do not cut the values", got=(total, least), expected=count, where="lengths")
        return cut_sizes(sizes, self.stride_per_key())

    def _check_strides(self, bag_count: int) -> None:
        ranks, key_count = self._stride_per_key_per_rank, len(self._keys)
        if ranks is not None and (ranks.dim() != 2 or ranks.shape[0] != key_count):
            expected = (key_count, "ranks")
            raise ShapeError(
                "stride_per_key_per_rank is not [keys, ranks]",
                got=tuple(ranks.shape),
                expected=expected,
                where="stride_per_key_per_rank",
            )
        strides = self.stride_per_key()
        if sum(strides) != bag_count or len(strides) != key_count or min(strides) < 0:
            raise ShapeError("lengths are [keys * stride]", got=bag_count, expected=strides, where="lengths")
        known = self._lengths_offset_per_key
        if known is not None and known != running_sums(strides):
            raise ShapeError(
                "lengths_offset_per_key is not of these strides",
                got=known,
                expected=strides,
                where="lengths_offset_per_key",
            )

    def bags(self) -> Bags:
        """The same, as lookups take it; offsets are int64. Raises what a batch whose parts disagree raises."""
        self._check_features()
        return super().bags()

    def _check_order(self, indices: Sequence[int], indices_tensor: torch.Tensor | None) -> None:
        if any(not 0 <= index < len(self._keys) for index in indices):
            raise ConfigError(
                "not a feature", got=list(indices), expected=f"0 to {len(self._keys) - 1}", where="indices"
            )
        if indices_tensor is not None:
            same = indices_tensor.shape == (len(indices),)
            known = indices_tensor.device.type != "cpu" or type(indices_tensor) is not torch.Tensor
            if not same or not (known or indices_tensor.tolist() == list(indices)):
                raise ConfigError("not the same order", got=indices_tensor, expected=list(indices), where="permute")
        self._check_weights()

    def _check_total(self, sizes: list[int]) -> None:
        if not _is_traced() and type(self._values) in _PLAIN and sum(sizes) != self._values.shape[0]:
            raise ShapeError(
                "lengths do not cut the values", got=sum(sizes), expected=self._values.shape[0], where="lengths"
            )

    def _check_weights(self) -> None:
        if self._weights is not None and self._weights.shape[0] != self._values.shape[0]:
            got, expected = tuple(self._weights.shape), self._values.shape[0]
            raise ShapeError("one weight for each value", got=got, expected=expected, where="weights")

    @staticmethod
    def _check_fits(parts: Sequence[Any]) -> None:
        """Demand parts that make one batch."""
        others = [type(part) for part in parts if not isinstance(part, KeyedMoves)]
        if others:
            expected = "KeyedJaggedTensor(keys, values, weights, lengths)"
            raise UnsupportedError("not batches of ours", got=others, expected=expected, where="concat")
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
                raise ConfigError(
                    f"some parts have {name} and some have none", got=found, expected="all or none", where="concat"
                )
        rank_counts = [len(row) for part in parts for row in part.stride_per_key_per_rank()[:1]]
        if len(set(rank_counts)) > 1:
            raise ShapeError(
                "parts of different numbers of ranks", got=rank_counts, expected="one number", where="concat"
            )
        sample_counts = [part.inverse_indices()[1].shape[-1] for part in parts if part.inverse_indices_or_none()]
        if len(set(sample_counts)) > 1:
            message = "inverse indices of different numbers of samples"
            raise ShapeError(message, got=sample_counts, expected="one number", where="concat")
        if not any(variable) and len({part.stride() for part in parts}) > 1:
            got = [part.stride() for part in parts]
            raise ShapeError("parts of different stride", got=got, expected="one stride", where="concat")

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The same batch with every part moved; strides stay on the host."""
        moved = type(self).__new__(type(self))
        parts = {name: getattr(self, name) for name in _PARTS}
        parts = {name: None if value is None else move(value) for name, value in parts.items()}
        self._count_here(parts["_values"].device)
        moved.__dict__.update(self.__dict__)
        moved.__dict__.update(parts, _jt_dict=None)
        if self._inverse_indices is not None:
            moved._inverse_indices = (self._inverse_indices[0], move(self._inverse_indices[1]))
        return moved

    def _with_weights(self, weights: torch.Tensor) -> Any:
        """The same batch with other weights."""
        made = self._map(lambda part: part)
        made._weights = weights
        return made

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every part until ``stream`` has passed this point."""
        super().record_stream(stream)
        if self._inverse_indices is not None:
            recorded(stream, self._inverse_indices[1])

    def _empty_copy(self, device: torch.device) -> Any:
        """Memory of the same sizes, not initialised, on a device."""
        made = self._map(lambda part: torch.empty_like(part, device=device))
        made._checked = made._is_cut = False
        return made

    def pin_memory(self) -> Any:
        """The same batch in page-locked host memory."""
        return self._map(torch.Tensor.pin_memory)

    def copy_(self, kjt: Any, non_blocking: bool = False) -> Any:
        """Fill every part from a batch of the same features and sizes; returns self. Raises ShapeError, ConfigError."""
        if list(kjt.keys()) != self._keys:
            raise ConfigError("not a batch of these features", got=list(kjt.keys()), expected=self._keys, where="copy_")
        mine, theirs = self._inverse_indices, kjt.inverse_indices_or_none()
        if (mine is None) != (theirs is None):
            found, due = ("none", "some") if theirs is None else ("some", "none")
            raise ConfigError("one batch has inverse indices and one has none", got=found, expected=due, where="copy_")
        if mine is not None and mine[1].shape != theirs[1].shape:
            got, expected = tuple(theirs[1].shape), tuple(mine[1].shape)
            raise ShapeError("not inverse indices of these sizes", got=got, expected=expected, where="copy_")
        self._copy_parts(kjt, non_blocking)
        known = ("_stride_per_key_per_rank", "_stride_per_key", "_length_per_key", "_lengths_offset_per_key")
        for name in (*known, "_stride", "_offset_per_key", "_index_per_key"):
            setattr(self, name, getattr(kjt, name))
        self._jt_dict, self._checked, self._is_cut = None, False, False
        if mine is not None:
            self._inverse_indices = (theirs[0], mine[1].copy_(theirs[1], non_blocking=non_blocking))
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
