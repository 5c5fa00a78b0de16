"""What a store is told: row layouts, initial values, eviction policies, capacities; and the checks of every argument.

Prevents rows that only their own writer can read, and half-applied batches. Sizes and offsets of a row are closed forms
of four numbers, the same bytes as in FBGEMM's DRAM store; width, dtype, device, stride and length of every argument are
checked here, before anything is touched.

One row::

    byte 0   8    key, int64
         8   4    timestamp, uint32, seconds
        12   4    bits 0-30 count (or the low 31 bits of a non-negative float32 score), bit 31 used
        16   ..   weight: D elements, padded with zeros to a multiple of 4 elements
         ..  ..   optimizer state, in the order of ``state_slots``; padded with zeros to 4 elements of the weight dtype
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from twinproof.errors import (
    ConfigError,
    FormatError,
    ShapeError,
    UnsupportedError,
    check_flags,
    check_kind,
    check_number,
)
from twinproof.optimizers import OPTIMIZERS

__all__ = [
    "COUNT_MAX",
    "GOLDEN",
    "HEADER_BYTES",
    "ID_DTYPES",
    "METADATA_OFFSET",
    "Clock",
    "EvictionPolicy",
    "EvictionStats",
    "Header",
    "Initializer",
    "RowLayout",
    "StateSlot",
    "StoreOptions",
    "StoreStats",
    "as_bytes",
    "check_count",
    "check_dense",
    "check_ids",
    "check_int",
    "check_matrix",
    "check_rows",
    "check_strided",
    "check_tensor",
    "from_bytes",
    "initial_weights",
    "mix",
    "pack_header",
    "per_table",
    "signed64",
    "unpack_header",
]


HEADER_BYTES = 16
METADATA_OFFSET = 8  # Where timestamp, count and the used bit begin.
COUNT_MAX = 2**31 - 1
TIMESTAMP_MAX = 2**32 - 1
ROW_BYTES_END = 2**40  # No row has so many.
_USED_BIT = -(2**63)
_PAD_ELEMENTS = 4
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _name(dtype: torch.dtype, where: str) -> str:
    for name, known in _DTYPES.items():
        if known is dtype:
            return name
    raise ConfigError("not a dtype of weights or states", got=dtype, expected=sorted(_DTYPES), where=where)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class StateSlot:
    """Where one optimizer state lies: ``offset_bytes`` from the start of the row, ``count`` elements of ``dtype``."""

    offset_bytes: int
    count: int
    dtype: torch.dtype

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Sizes and offsets of one table's rows.

    Args:
        embedding_dim: D, elements of a weight, at least 1. FBGEMM has multiples of 4 only.
        weight_dtype: float32, float16 or bfloat16.
        optimizer: one of ``OPTIMIZERS``.
        state_dtypes: state name -> dtype, float32 where not named; row-wise Adagrad's is always float32.

    Raises:
        ConfigError: a value outside these.
    """

    embedding_dim: int
    weight_dtype: torch.dtype = torch.float32
    optimizer: str = "none"
    state_dtypes: Mapping[str, torch.dtype] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if type(self.embedding_dim) is not int or self.embedding_dim < 1:
            raise ConfigError("not a width", got=self.embedding_dim, expected="an int >= 1", where="embedding_dim")
        _name(self.weight_dtype, "weight_dtype")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise ConfigError("not an optimizer", got=self.optimizer, expected=sorted(OPTIMIZERS), where="optimizer")
        states = {state.name: state for state in OPTIMIZERS[self.optimizer].states}
        if self.state_dtypes is not None:
            check_kind(self.state_dtypes, Mapping, "state_dtypes", "state name -> dtype")
        given = dict(self.state_dtypes or {})
        for name, dtype in given.items():
            if name not in states:
                raise ConfigError(
                    "this optimizer has no such state", got=name, expected=[*states], where="state_dtypes"
                )
            _name(dtype, f"state_dtypes[{name!r}]")
            if states[name].is_float32 and dtype is not torch.float32:
                raise ConfigError(
                    "a state of another dtype", got=dtype, expected=torch.float32, where=f"state_dtypes[{name!r}]"
                )
        object.__setattr__(self, "state_dtypes", {name: given.get(name, torch.float32) for name in states})
        if self.row_bytes >= ROW_BYTES_END:
            got, most = f"{self.row_bytes} bytes", f"fewer than {ROW_BYTES_END} bytes"
            raise ConfigError("a wider row than there can be", got=got, expected=most, where="embedding_dim")

    @property
    def header_bytes(self) -> int:
        """16."""
        return HEADER_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of the D weight elements, which begin at ``header_bytes``; padding is not counted."""
        return self.embedding_dim * self.weight_dtype.itemsize

    @property
    def state_begin_bytes(self) -> int:
        """Where the optimizer state begins: behind the weight and its padding to 4 elements."""
        return HEADER_BYTES + _round_up(self.embedding_dim, _PAD_ELEMENTS) * self.weight_dtype.itemsize

    @property
    def state_slots(self) -> dict[str, StateSlot]:
        """State name -> slot, in row order."""
        # Each state has one since the layout was made.
        assert self.state_dtypes is not None
        slots: dict[str, StateSlot] = {}
        end = self.state_begin_bytes
        for state in OPTIMIZERS[self.optimizer].states:
            name, row_wise = state.name, state.is_row_wise
            dtype = self.state_dtypes[name]
            # Nothing to round up when D is a multiple of 4, as FBGEMM demands; other widths must not misalign a state.
            begin = _round_up(end, dtype.itemsize)
            slots[name] = StateSlot(begin, 1 if row_wise else self.embedding_dim, dtype)
            end = slots[name].end_bytes
            if self.optimizer == "partial_rowwise_adam" and row_wise:
                end = _round_up(end, 4)
        return slots

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        slots = self.state_slots.values()
        state_bytes = max((slot.end_bytes for slot in slots), default=self.state_begin_bytes) - self.state_begin_bytes
        itemsize = self.weight_dtype.itemsize
        return self.state_begin_bytes + _round_up(-(-state_bytes // itemsize), _PAD_ELEMENTS) * itemsize

    @property
    def value_ranges(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges of a row that carry values: header, weight, states. All other bytes are padding: zero."""
        ranges = [(0, HEADER_BYTES), (HEADER_BYTES, HEADER_BYTES + self.weight_bytes)]
        return (*ranges, *((slot.offset_bytes, slot.end_bytes) for slot in self.state_slots.values()))

    def without_optimizer(self) -> RowLayout:
        """The same weight, no state."""
        return RowLayout(self.embedding_dim, self.weight_dtype)

    def to_json(self) -> str:
        """Canonical text; ``from_json`` is its inverse."""
        states = {name: _name(dtype, name) for name, dtype in (self.state_dtypes or {}).items()}
        content = {
            "embedding_dim": self.embedding_dim,
            "optimizer": self.optimizer,
            "state_dtypes": states,
            "weight_dtype": _name(self.weight_dtype, "weight_dtype"),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RowLayout:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        try:
            content: dict[str, Any] = json.loads(text)
            states = {name: _DTYPES[dtype] for name, dtype in content.pop("state_dtypes").items()}
            weight = _DTYPES[content.pop("weight_dtype")]
            layout = cls(content.pop("embedding_dim"), weight, content.pop("optimizer"), states)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            got, where = f"{str(text)[:200]} ({type(error).__name__}: {error})", "row layout"
            raise FormatError(
                "not a row layout", got=got, expected="the JSON that to_json wrote", where=where
            ) from None
        if content:
            expected = "embedding_dim, weight_dtype, optimizer, state_dtypes"
            raise FormatError(
                "a row layout with unknown fields", got=sorted(content), expected=expected, where="row layout"
            )
        return layout


@dataclass(frozen=True)
class Header:
    """The fields of n metaheaders: int64 [n] ``ids``, ``timestamps`` and ``counts``, bool [n] ``used``."""

    ids: torch.Tensor
    timestamps: torch.Tensor
    counts: torch.Tensor
    used: torch.Tensor


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """[n, w] of any dtype as uint8 [n, w * itemsize]; the same memory where it is dense."""
    # Empty and one-element tensors may carry strides that a view of another width refuses.
    flat = values.contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8)
    return flat.reshape(values.shape[0], values.shape[1] * values.element_size())


def from_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``as_bytes``."""
    return raw.contiguous().reshape(-1).view(dtype).reshape(raw.shape[0], raw.shape[1] // dtype.itemsize)


def _field(header: Header, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    where, count = f"header.{name}", check_tensor(header.ids, "header.ids").numel()
    value = check_tensor(getattr(header, name), where)
    if value.dtype not in dtypes:
        raise UnsupportedError("not a dtype of this field", got=value.dtype, expected=dtypes, where=where)
    if tuple(value.shape) != (count,):
        raise ShapeError("one entry for each id", got=tuple(value.shape), expected=(count,), where=where)
    return value


def pack_header(header: Header) -> torch.Tensor:
    """The metaheaders as uint8 [n, 16], little-endian; timestamps are taken mod 2**32, counts saturate at 2**31 - 1.

    Numbers may be int32, too. Raises ShapeError, UnsupportedError.
    """
    fields = (_field(header, name, ID_DTYPES).to(torch.int64) for name in ("ids", "timestamps", "counts"))
    ids, timestamps, counts = fields
    words = (timestamps & TIMESTAMP_MAX) | (counts.clamp(0, COUNT_MAX) << 32)
    words = torch.where(_field(header, "used", (torch.bool,)), words | _USED_BIT, words)
    return as_bytes(torch.stack([ids, words], dim=1))


def unpack_header(rows: torch.Tensor) -> Header:
    """The fields of rows, uint8 [n, >= 16]. Raises ShapeError, UnsupportedError."""
    plain = check_tensor(rows, "rows")
    if plain.dtype is not torch.uint8 or plain.dim() != 2 or plain.shape[1] < HEADER_BYTES:
        got, expected = (plain.dtype, tuple(plain.shape)), f"uint8 [n, >= {HEADER_BYTES}]"
        raise ShapeError("not rows that begin with a header", got=got, expected=expected, where="rows")
    words = from_bytes(plain[:, :HEADER_BYTES], torch.int64)
    return Header(words[:, 0].clone(), words[:, 1] & TIMESTAMP_MAX, (words[:, 1] >> 32) & COUNT_MAX, words[:, 1] < 0)


ID_DTYPES = (torch.int64, torch.int32)


_CPU = ("cpu",)


def check_tensor(value: Any, where: str) -> torch.Tensor:
    """A tensor of any kind, else UnsupportedError."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, expected="torch.Tensor", where=where)
    return value


def check_dense(value: Any, where: str) -> torch.Tensor:
    """A tensor of plain rows and columns, else ShapeError for a nested or sparse one, UnsupportedError for none."""
    found = check_tensor(value, where)
    if found.is_nested or found.layout is not torch.strided:
        got = "a nested tensor" if found.is_nested else found.layout
        raise ShapeError("not a dense tensor", got=got, expected="ids as a dense tensor", where=where)
    return found


def check_int(value: Any, where: str, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """An int from ``least`` to ``most``, else ConfigError."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            "not a whole number in this range", got=value, expected=f"an int from {least} to {most}", where=where
        )
    return value


def check_plain(value: Any, where: str, places: tuple[str, ...] = _CPU) -> torch.Tensor:
    """A dense contiguous tensor in one of these places (types of devices), else ShapeError or UnsupportedError."""
    plain = check_tensor(value, where)
    if plain.device.type not in places:
        expected = " or ".join(places)
        raise ShapeError("a tensor on another device than the store", got=plain.device, expected=expected, where=where)
    if plain.layout is not torch.strided or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        got = plain.layout if plain.layout is not torch.strided else tuple(plain.stride())
        raise ShapeError("not contiguous; call .contiguous()", got=got, expected="dense and contiguous", where=where)
    return plain.detach()


def check_strided(values: Any, where: str) -> torch.Tensor:
    """Values [n, w] in memory of the CPU, strided any way; contiguous. Raises ShapeError, UnsupportedError."""
    given = check_tensor(values, where)
    if given.dim() != 2:
        raise ShapeError("values are [n, w]", got=tuple(given.shape), expected="[n, w]", where=where)
    is_strided = given.layout is torch.strided and given.device.type == "cpu"
    return check_plain(given.resolve_conj().resolve_neg().contiguous() if is_strided else given, where)


def check_ids(ids: Any, where: str = "ids", places: tuple[str, ...] = _CPU) -> torch.Tensor:
    """Ids as int64 [n], from int32 or int64 [n]; every value is an id. Raises ShapeError, UnsupportedError."""
    plain = check_plain(ids, where, places)
    if plain.dtype not in ID_DTYPES:
        raise UnsupportedError("not a dtype of ids", got=plain.dtype, expected=ID_DTYPES, where=where)
    if plain.dim() != 1:
        raise ShapeError("ids are one-dimensional", got=tuple(plain.shape), expected="[n]", where=where)
    return plain.to(torch.int64)


def check_matrix(
    values: Any,
    row_count: int | None,
    width: int,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    where: str,
    places: tuple[str, ...] = _CPU,
) -> torch.Tensor:
    """Values [row_count, width] of the dtype. Raises ShapeError, UnsupportedError."""
    plain = check_plain(values, where, places)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if plain.dtype not in dtypes:
        raise UnsupportedError("another dtype than the store's", got=plain.dtype, expected=dtypes, where=where)
    expected = ("n" if row_count is None else row_count, width)
    if plain.dim() != 2 or plain.shape[1] != width or (row_count is not None and plain.shape[0] != row_count):
        raise ShapeError("another shape than expected", got=tuple(plain.shape), expected=expected, where=where)
    return plain


def check_rows(rows: Any, row_bytes: int, places: tuple[str, ...] = _CPU) -> torch.Tensor:
    """Whole rows, uint8 [n, row_bytes]. Raises ShapeError, UnsupportedError."""
    return check_matrix(rows, None, row_bytes, torch.uint8, "rows", places)


def check_count(count: Any, length: int) -> int:
    """The first ``count`` of ``length`` entries; None is all. Raises ConfigError."""
    if count is None:
        return length
    if type(count) is not int or not 0 <= count <= length:
        raise ConfigError("not a count of the entries", got=count, expected=f"0 to {length}", where="count")
    return count


Clock = Callable[[], int]
Value = TypeVar("Value")

ROW_MEMORIES = ("device", "host")
CACHE_ROWS_MAX = 2**31
POLICIES = ("ttl", "count", "ttl_count", "l2", "timestamp", "score")


def signed64(word: int) -> int:
    """The low 64 bits of an int as an int64."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def float32(value: float) -> float:
    """``value`` rounded to float32. Raises ConfigError when it is not finite there."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        rounded = math.nan
    if not math.isfinite(rounded):
        raise ConfigError("not a finite float32", got=value, expected="a finite number", where="value")
    return rounded


@dataclass(frozen=True)
class Initializer:
    """The weight of an id that was never written: a pure function of (seed, table index, id, element).

    The index is the table's place among those of its store. Saves hold neither: who loads one has to give both.

    ``kind`` "zeros", or "uniform" from low to high. All arithmetic on 64-bit words wraps; ``>>`` is logical;
    ``mix`` is the finaliser of splitmix64::

        mix(z)   z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                 z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                 z ^ (z >> 31)
        G        = 0x9E3779B97F4A7C15
        table    = mix(seed + G * (table_index + 1))
        row      = mix(table ^ id)                      id as its 64 two's complement bits
        word     = mix(row + G * (element + 1))
        unit     = (word >> 40) * 2**-24                exact: 24 bits
        value    = float32(float64(low) + float64(span) * unit)

    with low and high rounded to float32 first, and span = float32(high - low). The float64 product of two 24-bit
    numbers is exact, so a fused multiply-add gives the same bits. The value is then rounded to the weight dtype, to
    nearest even. ``table_index`` counts from 0 in the order of ``layouts``.

    Raises:
        ConfigError: an unknown kind, bounds that are not finite, or low > high.
    """

    kind: str = "uniform"
    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in ("zeros", "uniform"):
            raise ConfigError("not an initializer", got=self.kind, expected=("zeros", "uniform"), where="kind")
        object.__setattr__(self, "low", float32(self.low))
        object.__setattr__(self, "high", float32(self.high))
        if self.low > self.high:
            raise ConfigError("an empty range", got=(self.low, self.high), expected="low <= high", where="Initializer")
        float32(self.high - self.low)

    @property
    def span(self) -> float:
        """float32(high - low)."""
        return float32(self.high - self.low)

    @classmethod
    def zeros(cls) -> Initializer:
        """Every missing weight is zero."""
        return cls("zeros", 0.0, 0.0)

    @classmethod
    def uniform(cls, low: float, high: float) -> Initializer:
        """Uniform from low to high, reproducible for each id."""
        return cls("uniform", low, high)


@dataclass(frozen=True)
class EvictionPolicy:
    """Which rows a round evicts. Use the class methods; a threshold of 0 means never.

    With ``now`` from the clock, and the header's timestamp and count, a row goes when

    - ttl: ``now - timestamp > ttl_seconds``
    - count: ``floor(count * decay) < count_threshold``; the decayed count is written back to rows that stay
    - ttl_count: both; counts are decayed as above
    - l2: the sum of squares of the D weights ``< l2_threshold ** 2``, in float64, summed in eight lanes
    - timestamp: ``timestamp < timestamp_threshold``
    - score: it is not among the ``keep_count`` rows of highest (score, id); scores are set with ``set_scores`` and
      live in the count's 31 bits, so ``set`` does not count under this policy. Scores are ordered by their bits.

    Raises:
        ConfigError: a value out of range.
    """

    kind: str
    ttl_seconds: int = 0
    count_threshold: int = 0
    decay: float = 1.0
    l2_threshold: float = 0.0
    timestamp_threshold: int = 0
    keep_count: int = 0

    def __post_init__(self) -> None:
        check_number(self.decay, "decay")
        check_number(self.l2_threshold, "l2_threshold")
        if self.kind not in POLICIES:
            raise ConfigError("not an eviction policy", got=self.kind, expected=POLICIES, where="kind")
        for name in ("ttl_seconds", "count_threshold", "timestamp_threshold", "keep_count"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError("not a threshold", got=value, expected="an int >= 0", where=name)
        if not 0.0 <= self.decay <= 1.0:
            raise ConfigError("not a decay", got=self.decay, expected="0 <= decay <= 1", where="decay")
        if not 0.0 <= self.l2_threshold < math.inf:
            raise ConfigError("not a threshold", got=self.l2_threshold, expected=">= 0, finite", where="l2_threshold")

    @classmethod
    def ttl(cls, ttl_seconds: int) -> EvictionPolicy:
        """Rows not written for longer than this."""
        return cls("ttl", ttl_seconds=ttl_seconds)

    @classmethod
    def count(cls, threshold: int, decay: float = 1.0) -> EvictionPolicy:
        """Rows written too seldom."""
        return cls("count", count_threshold=threshold, decay=decay)

    @classmethod
    def ttl_count(cls, ttl_seconds: int, threshold: int, decay: float = 1.0) -> EvictionPolicy:
        """Rows that are both old and seldom written."""
        return cls("ttl_count", ttl_seconds=ttl_seconds, count_threshold=threshold, decay=decay)

    @classmethod
    def l2(cls, threshold: float) -> EvictionPolicy:
        """Rows whose weight is short."""
        return cls("l2", l2_threshold=threshold)

    @classmethod
    def older_than(cls, timestamp: int) -> EvictionPolicy:
        """Rows last written before this moment."""
        return cls("timestamp", timestamp_threshold=timestamp)

    @classmethod
    def score(cls, keep_count: int) -> EvictionPolicy:
        """All but the best ``keep_count`` rows."""
        return cls("score", keep_count=keep_count)


@dataclass(frozen=True)
class EvictionStats:
    """One round over one table: rows looked at, rows evicted."""

    processed_count: int
    evicted_count: int


@dataclass(frozen=True)
class StoreStats:
    """Exact counters of a store.

    ``row_count`` rows in the maps; ``block_count`` rows allocated in the pools, the same unless rows leak;
    ``row_bytes`` their payload, ``allocated_bytes`` memory held for rows, ``map_bytes`` for finding them;
    ``snapshot_count`` snapshots alive; ``evicted_count`` rows evicted so far; ``changes_bytes`` memory of the ids that
    went and are remembered for ``changes``.
    """

    row_count: int
    block_count: int
    row_bytes: int
    allocated_bytes: int
    map_bytes: int
    snapshot_count: int
    evicted_count: int
    changes_bytes: int


def per_table(value: Value | Mapping[str, Value], tables: tuple[str, ...], where: str) -> dict[str, Value]:
    """One value for each table, from one for all or a mapping that names every table. Raises ConfigError."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(tables, value)
    if set(value) != set(tables):
        raise ConfigError("one entry per table", got=sorted(value), expected=sorted(tables), where=where)
    return {table: value[table] for table in tables}


@dataclass(frozen=True)
class StoreOptions:
    """The checked options of a store; see ``KVStore`` for each."""

    layouts: dict[str, RowLayout]
    rows: dict[str, RowLayout]
    optimizer_in_row: bool
    num_shards: int
    seed: int
    initializers: dict[str, Initializer]
    evictions: dict[str, EvictionPolicy | None]
    capacities: dict[str, int | None]
    clock: Clock
    track_changes: bool
    device: str
    row_memory: str
    cache_rows: dict[str, int]

    @classmethod
    def make(
        cls,
        layouts: Mapping[str, RowLayout],
        *,
        initializer: Any,
        eviction: Any,
        capacity: Any,
        cache_rows: Any,
        optimizer_in_row: bool,
        **rest: Any,
    ) -> StoreOptions:
        """Check everything. Raises ConfigError."""
        if not isinstance(layouts, Mapping) or not layouts:
            raise ConfigError("at least one table", got=layouts, expected="table name -> RowLayout", where="layouts")
        for table, layout in layouts.items():
            if not isinstance(table, str) or not table or not isinstance(layout, RowLayout):
                raise ConfigError("not a table", got=(table, layout), expected="str -> RowLayout", where="layouts")
        names = tuple(layouts)
        check_flags(optimizer_in_row=optimizer_in_row, track_changes=rest["track_changes"])
        rest["track_changes"] = bool(rest["track_changes"])
        options = cls(
            layouts=dict(layouts),
            rows={name: layout if optimizer_in_row else layout.without_optimizer() for name, layout in layouts.items()},
            optimizer_in_row=bool(optimizer_in_row),
            initializers=per_table(initializer, names, "initializer"),
            evictions=per_table(eviction, names, "eviction"),
            capacities=per_table(capacity, names, "capacity"),
            cache_rows=per_table(cache_rows, names, "cache_rows"),
            **rest,
        )
        options._check()
        return options

    def _check(self) -> None:
        if type(self.num_shards) is not int or not 1 <= self.num_shards <= 4096:
            raise ConfigError("not a shard count", got=self.num_shards, expected="1 to 4096", where="num_shards")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**64:
            raise ConfigError("not a seed", got=self.seed, expected="an int of 64 bits", where="seed")
        if not callable(self.clock):
            raise ConfigError("not a clock", got=self.clock, expected="a callable giving seconds", where="clock")
        if self.row_memory not in ROW_MEMORIES:
            raise ConfigError("not a memory of rows", got=self.row_memory, expected=ROW_MEMORIES, where="row_memory")
        if self.row_memory == "host" and self.device == "cpu":
            raise ConfigError("row_memory is for a store on a GPU", got=self.device, expected="cuda", where="device")
        for table, cached in self.cache_rows.items():
            where = f"cache_rows[{table!r}]"
            if type(cached) is not int or not 0 <= cached <= CACHE_ROWS_MAX:
                raise ConfigError("not a number of rows", got=cached, expected=f"0 to {CACHE_ROWS_MAX}", where=where)
            if cached and self.row_memory != "host":
                raise ConfigError("a cache is for rows in host memory", got=cached, expected=0, where=where)
        for table in self.layouts:
            capacity, policy = self.capacities[table], self.evictions[table]
            if capacity is not None and (type(capacity) is not int or not 1 <= capacity < 2**63):
                most = f"1 to {2**63 - 1} rows"
                raise ConfigError("not a capacity", got=capacity, expected=most, where=f"capacity[{table!r}]")
            if policy is not None and not isinstance(policy, EvictionPolicy):
                raise ConfigError("not a policy", got=policy, expected="EvictionPolicy", where=f"eviction[{table!r}]")
            initializer, where = self.initializers[table], f"initializer[{table!r}]"
            if not isinstance(initializer, Initializer):
                raise ConfigError("not an initializer", got=initializer, expected="Initializer", where=where)


GOLDEN = signed64(0x9E3779B97F4A7C15)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right; torch's own is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 words that wrap."""
    words = (words ^ _shift(words, 30)) * signed64(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * signed64(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def initial_weights(
    initializer: Initializer, seed: int, table_index: int, ids: torch.Tensor, embedding_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [n, embedding_dim] of ids int64 [n] that were never written."""
    if initializer.kind == "zeros":
        return torch.zeros(ids.numel(), embedding_dim, dtype=dtype, device="cpu")
    table = mix(torch.tensor([signed64(seed + GOLDEN * (table_index + 1))], device="cpu"))
    row = mix(table ^ ids)
    elements = torch.arange(1, embedding_dim + 1, device="cpu") * GOLDEN
    words = mix(row[:, None] + elements[None, :])
    unit = _shift(words, 40).to(torch.float64) * 2.0**-24
    return (initializer.low + initializer.span * unit).to(torch.float32).to(dtype)
