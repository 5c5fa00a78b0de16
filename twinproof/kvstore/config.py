"""What a store is told at construction: initial values, eviction, buckets. Checked once, shared by both versions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from twinproof.errors import ConfigError
from twinproof.kvstore.layout import RowLayout

__all__ = [
    "Clock",
    "EvictionPolicy",
    "EvictionStats",
    "Initializer",
    "StoreOptions",
    "StoreStats",
    "per_table",
    "signed64",
]

Clock = Callable[[], int]
Value = TypeVar("Value")

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
        raise ConfigError("not a finite float32", got=value)
    return rounded


@dataclass(frozen=True)
class Initializer:
    """The weight of an id that was never written: a pure function of (seed, table index, id, element).

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
            raise ConfigError("an empty range", got=(self.low, self.high), expected="low <= high")
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
    - l2: the sum of squares of the D weights ``< l2_threshold ** 2``, in float64, see ``refimpl.optimizers.row_sum``
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
    ``snapshot_count`` snapshots alive; ``evicted_count`` rows evicted so far.
    """

    row_count: int
    block_count: int
    row_bytes: int
    allocated_bytes: int
    map_bytes: int
    snapshot_count: int
    evicted_count: int


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

    @classmethod
    def make(
        cls,
        layouts: Mapping[str, RowLayout],
        *,
        initializer: Any,
        eviction: Any,
        capacity: Any,
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
        options = cls(
            layouts=dict(layouts),
            rows={name: layout if optimizer_in_row else layout.without_optimizer() for name, layout in layouts.items()},
            optimizer_in_row=bool(optimizer_in_row),
            initializers=per_table(initializer, names, "initializer"),
            evictions=per_table(eviction, names, "eviction"),
            capacities=per_table(capacity, names, "capacity"),
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
        for table in self.layouts:
            capacity, policy = self.capacities[table], self.evictions[table]
            if capacity is not None and (type(capacity) is not int or capacity < 1):
                raise ConfigError("not a capacity", got=capacity, expected="rows >= 1", where=f"capacity[{table!r}]")
            if policy is not None and not isinstance(policy, EvictionPolicy):
                raise ConfigError("not a policy", got=policy, expected="EvictionPolicy", where=f"eviction[{table!r}]")
            if not isinstance(self.initializers[table], Initializer):
                raise ConfigError("not an initializer", got=self.initializers[table], where=f"initializer[{table!r}]")
        if self.device != "cpu":
            raise ConfigError("not a device of this store", got=self.device, expected="cpu", where="device")
