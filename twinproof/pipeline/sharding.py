"""Where each table lives: the kinds of sharding, the shards that follow from a plan, and what ranks exchange.

All of it is a pure function of the tables, the plan and the ranks, so that each rank knows every other rank's part.
"""

from __future__ import annotations

import operator
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from twinproof import regime
from twinproof.errors import ConfigError, DistributedError
from twinproof.kvstore.options import Initializer, initial_weights
from twinproof.kvstore.rows import Buckets, bucket_number, bucket_of, nearest_bucket_of
from twinproof.pipeline.config import EmbeddingBagConfig, UniformInit, initial_weight
from twinproof.pipeline.jagged import Bags, joined
from twinproof.pipeline.modules import Lookup

__all__ = [
    "KINDS",
    "Awaitable",
    "Exchange",
    "Group",
    "LateBuckets",
    "Layout",
    "Ready",
    "Shard",
    "ShardedContext",
    "ShardingKind",
    "Slot",
    "TableSharding",
    "column_wise",
    "data_parallel",
    "initial_shard",
    "key_value",
    "made_for_training",
    "row_wise",
    "settle_buckets",
    "table_wise",
]

Value = TypeVar("Value")


def made_for_training() -> AbstractContextManager[Any]:
    """Around what is made of a batch ahead of its turn, which may train where the step of now is inside inference mode.

    Tensors that inference mode makes are never saved for a backward.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class Awaitable(Generic[Value]):
    """``wait()`` gives the value, the same one each time; the work is done once."""

    def __init__(self, finish: Callable[[], Value]) -> None:
        self._finish: Callable[[], Value] | None = finish
        self._value: Value
        self._failure: Exception | None = None

    def wait(self) -> Value:
        """The value; what ``finish`` raised is raised each time."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                with made_for_training():
                    self._value = finish()
            except Exception as error:
                self._failure = error
                # What raised it holds what it belongs to, which holds it.
                traceback.clear_frames(error.__traceback__)
            except BaseException as error:
                # Half of an exchange cannot be ended by another try.
                self._failure = DistributedError(
                    "interrupted in the middle",
                    got=type(error).__name__,
                    expected="an exchange to its end",
                    where="wait",
                )
                raise
        if self._failure is not None:
            failures = [self._failure]
            # Nor is this frame to hold what holds the exception.
            del self
            raise failures.pop()
        return self._value


class Ready(Awaitable[Value]):
    """A value that is here already."""

    def __init__(self, value: Value) -> None:
        super().__init__(lambda: value)


INIT_ROWS = regime(65536, 3)


@dataclass(frozen=True)
class Shard:
    """Rows and columns [begin, end) of one table on one rank; ``part`` counts the column blocks of the table."""

    table: int
    rank: int
    kind: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    part: int = 0

    @property
    def width(self) -> int:
        """Columns."""
        return self.columns[1] - self.columns[0]


def _block(size: int, count: int) -> int:
    """The size of all blocks but the last ones: ceil(size / count)."""
    return -(-size // count)


def _blocks(size: int, count: int) -> list[tuple[int, int]]:
    """[0, size) in blocks of one size; the empty ones at the end are left out."""
    block = _block(size, count)
    return [(begin, min(begin + block, size)) for begin in range(0, size, block)]


class ShardingKind(ABC):
    """One way to cut a table, which answers what the rest of the component asks about it.

    Attributes:
        name: as ``TableSharding.kind`` says it.
        is_partial: a bag's rows may lie on several ranks, whose sums are added.
        is_replicated: every rank holds the whole table as a parameter of the dense optimizer; it has no shards.
        is_stored: rows live in a ``KVStore``: ids are any int64, and a write leaves no version to compare.
    """

    name: ClassVar[str]
    is_partial: ClassVar[bool] = False
    is_replicated: ClassVar[bool] = False
    is_stored: ClassVar[bool] = False

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a block of rows and columns, which a state dict saves as its part of the table."""
        return not (self.is_replicated or self.is_stored)

    def check(self, table: EmbeddingBagConfig, ranks: Sequence[int]) -> None:
        """Demand ranks that this kind can use. Raises ConfigError."""
        return

    @abstractmethod
    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """The shards of the table with this index, by column block or rank."""

    def lookup_of(self, shard: Shard) -> tuple[int, int]:
        """A sort key: shards of one rank with equal keys are looked up together, in ascending order of keys."""
        return (0, 0)

    def owners(self, ids: torch.Tensor, table: EmbeddingBagConfig, sharding: TableSharding, world: int) -> torch.Tensor:
        """The rank whose shard has the row of each id, int64 [n]; only where a bag's rows lie on several ranks."""
        raise NotImplementedError(f"whole bags go to every shard of a {self.name} table")

    def checked_owners(
        self, ids: torch.Tensor, table: EmbeddingBagConfig, sharding: TableSharding, world: int
    ) -> torch.Tensor:
        """The same where ids were checked, or the answer is still to be read: nobody waits, no id is refused."""
        return self.owners(ids, table, sharding, world)


class TableWise(ShardingKind):
    """The whole table on one rank."""

    name = "table_wise"

    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """One."""
        return [Shard(index, ranks[0], self.name, (0, table.num_embeddings), (0, table.embedding_dim))]


class ColumnWise(ShardingKind):
    """Blocks of columns on distinct ranks."""

    name = "column_wise"

    def check(self, table: EmbeddingBagConfig, ranks: Sequence[int]) -> None:
        """Distinct ranks, at most one for each column."""
        if not 1 <= len(set(ranks)) == len(ranks) <= table.embedding_dim:
            expected = f"1 to {table.embedding_dim} distinct ranks"
            raise ConfigError("not ranks of blocks of columns", got=tuple(ranks), expected=expected, where=table.name)

    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """Blocks of ceil(D / ranks) columns."""
        rows, blocks = (0, table.num_embeddings), _blocks(table.embedding_dim, len(ranks))
        found = enumerate(zip(ranks, blocks, strict=False))
        return [Shard(index, rank, self.name, rows, block, part) for part, (rank, block) in found]


class RowWise(ShardingKind):
    """Blocks of rows on all ranks."""

    name = "row_wise"
    is_partial = True

    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """Blocks of ceil(E / ranks) rows."""
        columns, blocks = (0, table.embedding_dim), _blocks(table.num_embeddings, world_size)
        return [Shard(index, rank, self.name, block, columns) for rank, block in enumerate(blocks)]

    def lookup_of(self, shard: Shard) -> tuple[int, int]:
        """All row blocks of a rank together."""
        return (1, 0)

    def owners(self, ids: torch.Tensor, table: EmbeddingBagConfig, sharding: TableSharding, world: int) -> torch.Tensor:
        """By block."""
        return torch.div(ids, _block(table.num_embeddings, world), rounding_mode="floor")


class DataParallel(ShardingKind):
    """The whole table on every rank."""

    name = "data_parallel"
    is_replicated = True

    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """None: nothing is exchanged but gradients."""
        return []


class KeyValue(ShardingKind):
    """Rows in each rank's own store, by bucket."""

    name = "key_value"
    is_partial = True
    is_stored = True

    def shards(self, index: int, table: EmbeddingBagConfig, ranks: Sequence[int], world_size: int) -> list[Shard]:
        """One on every rank, whose rows are found by id."""
        return [Shard(index, rank, self.name, (0, 0), (0, table.embedding_dim)) for rank in range(world_size)]

    def lookup_of(self, shard: Shard) -> tuple[int, int]:
        """Each table by itself."""
        return (2, shard.table)

    def owners(self, ids: torch.Tensor, table: EmbeddingBagConfig, sharding: TableSharding, world: int) -> torch.Tensor:
        """Id -> bucket -> rank. Raises what ``bucket_of`` raises, and waits to know."""
        assert sharding.buckets is not None
        return self._owners(bucket_of(ids, sharding.buckets), sharding.buckets, world)

    def checked_owners(
        self, ids: torch.Tensor, table: EmbeddingBagConfig, sharding: TableSharding, world: int
    ) -> torch.Tensor:
        """Id -> the nearest bucket -> rank."""
        assert sharding.buckets is not None
        return self._owners(nearest_bucket_of(ids, sharding.buckets), sharding.buckets, world)

    def _owners(self, buckets: torch.Tensor, dealt: Buckets, world: int) -> torch.Tensor:
        # As ``rank_buckets`` has it, without its ends: nothing is sent to where the ids are.
        share, extra = divmod(dealt.total_count, world)
        first = extra * (share + 1)
        of_larger = buckets.div(share + 1, rounding_mode="floor")
        of_others = (buckets - first).div(max(share, 1), rounding_mode="floor") + extra
        return torch.where(buckets < first, of_larger, of_others)


KINDS: dict[str, ShardingKind] = {
    kind.name: kind for kind in (TableWise(), RowWise(), ColumnWise(), DataParallel(), KeyValue())
}


@dataclass(frozen=True)
class TableSharding:
    """Where one table lives; made by ``table_wise`` and its siblings.

    Args:
        kind: one of ``KINDS``.
        ranks: one of a table-wise table, those of a column-wise one, and none of any other.
        buckets, store: of a key-value table, and None of any other.

    Raises:
        ConfigError: what is none of these.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    buckets: Buckets | None = None
    store: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError("not a kind of sharding", got=self.kind, expected=tuple(KINDS), where="kind")
        ranks: Any = self.ranks
        if not isinstance(ranks, (tuple, list)):
            got = type(ranks).__name__
            raise ConfigError("ranks come in a tuple", got=got, expected="a tuple of ranks", where="ranks")
        # A frozen record of a list could change, and has no hash.
        object.__setattr__(self, "ranks", tuple(ranks))
        self._check_parts()

    def _check_parts(self) -> None:
        """Demand what this kind needs, and nothing that it does not use. Raises ConfigError."""
        needed = {"table_wise": 1, "column_wise": len(self.ranks)}.get(self.kind, 0)
        if len(self.ranks) != needed:
            raise ConfigError(
                f"not the ranks of {self.kind}", got=self.ranks, expected=f"{needed} of them", where="ranks"
            )
        is_stored, found = self.rule.is_stored, (isinstance(self.buckets, Buckets), hasattr(self.store, "layout"))
        for name, is_one, value in zip(("buckets", "store"), found, (self.buckets, self.store), strict=True):
            if is_stored != is_one or (value is not None and not is_stored):
                expected = f"the {name} of a KVStore's table" if is_stored else "None"
                raise ConfigError(f"not the {name} of {self.kind}", got=repr(value), expected=expected, where=name)

    @property
    def rule(self) -> ShardingKind:
        """What answers questions about this kind."""
        return KINDS[self.kind]


def table_wise(rank: int) -> TableSharding:
    """The whole table on one rank."""
    return TableSharding("table_wise", (rank,))


def row_wise() -> TableSharding:
    """Rows on all ranks in blocks of ceil(E / W), the last ones shorter or empty."""
    return TableSharding("row_wise")


def column_wise(ranks: Sequence[int]) -> TableSharding:
    """Columns in blocks of ceil(D / len(ranks)), one for each of these distinct ranks."""
    # What is no list of ranks is refused there.
    is_list = isinstance(ranks, Iterable) and not isinstance(ranks, str)
    return TableSharding("column_wise", tuple(ranks) if is_list else ranks)  # type: ignore[arg-type]


def data_parallel() -> TableSharding:
    """The whole table on every rank, as a parameter of the dense optimizer; its gradient is the mean over ranks."""
    return TableSharding("data_parallel")


def key_value(store: Any, buckets: Buckets) -> TableSharding:
    """Rows in each rank's own ``KVStore``, dealt by bucket as ``rank_buckets`` says; the store has the table's name.

    A backward's step of the rows is the collection's, but never below the one after ``store.step_count(table)``, so
    that rows which were loaded with their step go on from it, as rows that a ``KVEmbedding`` has trained meanwhile.
    Each rank asks its own store: who sets or trains a table beside the collection does it alike on every rank.

    ``save_training`` and ``CheckpointManager`` save the rows with the model, and any number of ranks that has the same
    buckets loads them, each its own. No ``state_dict()`` has them, but ``key_value_state_dict()`` of the collection.
    """
    return TableSharding("key_value", (), buckets, store)


def check_plan(tables: Sequence[EmbeddingBagConfig], plan: Mapping[str, TableSharding], world_size: int) -> None:
    """Demand one sharding for each table and ranks of this world. Raises ConfigError."""
    names = [table.name for table in tables]
    expected = "table name -> TableSharding, as table_wise(rank), row_wise(), column_wise(ranks) make them"
    if not isinstance(plan, Mapping):
        raise ConfigError("not a plan", got=repr(plan)[:200], expected=expected, where="plan")
    for name, sharding in plan.items():
        if not isinstance(sharding, TableSharding):
            raise ConfigError("not a sharding", got=repr(sharding)[:200], expected=expected, where=f"plan[{name!r}]")
    if sorted(plan) != sorted(names):
        raise ConfigError("the plan does not name the tables", got=sorted(plan), expected=sorted(names), where="plan")
    for table in tables:
        ranks = plan[table.name].ranks
        if any(type(rank) is not int or not 0 <= rank < world_size for rank in ranks):
            raise ConfigError("not ranks of this group", got=ranks, expected=f"0 to {world_size - 1}", where=table.name)
        plan[table.name].rule.check(table, ranks)


@dataclass(frozen=True)
class Slot:
    """Pooled columns that one shard makes for one feature; ``feature`` counts by table, then as named there."""

    feature: int
    shard: Shard

    @property
    def is_partial(self) -> bool:
        """Whether these columns are sums of some of a bag's rows, which are added to those of other ranks."""
        return KINDS[self.shard.kind].is_partial


@dataclass(frozen=True)
class Group:
    """One lookup of one rank: its shards, and their slots in the order of its columns."""

    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(slot.shard.width for slot in self.slots)


class Layout:
    """Which part of which table is on which rank, and which pooled columns it makes.

    Args:
        tables: all of them, in the order of the collection.
        plan: table name -> its sharding.
        process_group: the ranks; None is all of them.
        rank, world_size: this process in the group.

    Attributes:
        shardings: of each table.
        feature_tables: the index of the table of each feature; features count by table, then as named there.
        shards: all shards, by table, then column block or rank.
        rank_groups: the lookups of each rank: whole tables and column blocks, then row blocks, then each stored table.
        replicated: indices of the tables that every rank holds.
        begins: where the columns of each feature begin in the exchanged result, [features].
        width: columns of the exchanged result: of all features but those of replicated tables.

    Raises:
        ConfigError: a plan that does not fit.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        plan: Mapping[str, TableSharding],
        process_group: Any,
        rank: int,
        world_size: int,
    ) -> None:
        check_plan(tables, plan, world_size)
        self.tables, self.shardings = tuple(tables), [plan[table.name] for table in tables]
        self.process_group, self.rank, self.world_size = process_group, rank, world_size
        self.feature_tables = [index for index, table in enumerate(tables) for _ in table.feature_names]
        self.shards = [
            shard
            for index, (table, sharding) in enumerate(zip(self.tables, self.shardings, strict=True))
            for shard in sharding.rule.shards(index, table, sharding.ranks, world_size)
        ]
        self.replicated = [index for index, sharding in enumerate(self.shardings) if sharding.rule.is_replicated]
        self._features_of: list[list[int]] = [[] for _ in tables]
        for feature, index in enumerate(self.feature_tables):
            self._features_of[index].append(feature)
        by_rank: list[list[Shard]] = [[] for _ in range(world_size)]
        for shard in self.shards:
            by_rank[shard.rank].append(shard)
        self.rank_groups = [self._groups_of(shards) for shards in by_rank]
        self.begins, self.width, replicated = list[int](), 0, set(self.replicated)
        for index in self.feature_tables:
            self.begins.append(self.width)
            self.width += 0 if index in replicated else tables[index].embedding_dim

    def _groups_of(self, shards: Sequence[Shard]) -> list[Group]:
        """The lookups of one rank, which has these."""
        by_key: dict[tuple[int, int], list[Shard]] = {}
        for shard in shards:
            by_key.setdefault(KINDS[shard.kind].lookup_of(shard), []).append(shard)
        return [
            Group(tuple(some), tuple(Slot(f, shard) for shard in some for f in self.features_of_table(shard.table)))
            for _, some in sorted(by_key.items())
        ]

    @property
    def groups(self) -> list[Group]:
        """This rank's lookups."""
        return self.rank_groups[self.rank]

    def features_of_table(self, table: int) -> list[int]:
        """The features that are looked up in one table."""
        return self._features_of[table]

    def table_of(self, feature: int) -> EmbeddingBagConfig:
        """The table of a feature."""
        return self.tables[self.feature_tables[feature]]

    def features(self, bags: Bags, features: Sequence[int]) -> Bags:
        """The bags of some features, from those of all."""
        if len(features) == len(self.feature_tables):
            return bags
        parts = bags.by_feature(len(self.feature_tables))
        return joined([parts[feature] for feature in features])

    def block_rows(self, table: int) -> int:
        """Rows of each rank's block of a table that is cut by rows."""
        return _block(self.tables[table].num_embeddings, self.world_size)

    def owners(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """The rank of each id of a table that is cut by rows or by bucket, int64 [n]."""
        return self.shardings[table].rule.owners(ids, self.tables[table], self.shardings[table], self.world_size)

    def checked_owners(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """The same where ids were checked, or the answer is still to be read: nobody waits, no id is refused."""
        rule = self.shardings[table].rule
        return rule.checked_owners(ids, self.tables[table], self.shardings[table], self.world_size)

    def means(self) -> list[int]:
        """Features whose partial sums become means where the whole bag is known."""
        partial = {slot.feature for groups in self.rank_groups for g in groups for slot in g.slots if slot.is_partial}
        return sorted(feature for feature in partial if self.table_of(feature).is_mean)


class LateBuckets:
    """A check of ids that buckets may not have, whose answer is still on the device: see ``LateCheck``.

    Args:
        bags: of so many features.
        feature_count: how many.
        features: those whose ids are dealt by ``buckets``.
    """

    def __init__(
        self, bags: Bags, feature_count: int, features: Sequence[int], buckets: Buckets, found: torch.Tensor
    ) -> None:
        self._bags, self._feature_count, self._features, self._buckets = bags, feature_count, features, buckets
        self.found = found

    def has_failed(self) -> torch.Tensor:
        """On the device: whether ``failure`` will be an error, as int64."""
        return (self.found[0] != 0).to(torch.int64)

    def failure(self, count: int, first: int) -> Exception | None:
        """What ``bucket_of`` would have raised."""
        if count == 0:
            return None
        parts = self._bags.by_feature(self._feature_count)
        try:
            bucket_of(torch.cat([parts[feature].indices for feature in self._features]), self._buckets)
        except ConfigError as error:
            return error
        return None


def settle_buckets(
    bags: Bags, feature_count: int, features: Sequence[int], buckets: Buckets, engine: Lookup
) -> LateBuckets | None:
    """A check of the ids of some features, where ``bucket_of`` would wait; None where the host knows at once."""
    # A bucket's number is a row of a table of so many rows.
    numbers = Bags(bucket_number(bags.indices, buckets), bags.offsets)
    dealt = set(features)
    row_counts = [buckets.total_count if feature in dealt else -1 for feature in range(feature_count)]
    settled = engine.settled(numbers, row_counts)
    return None if settled is None else LateBuckets(bags, feature_count, features, buckets, settled[1])


class ShardedContext:
    """One batch on its way through ``input_dist``, ``compute`` and ``output_dist``.

    Attributes:
        bags: this rank's own, of all features.
        strides: samples of each rank.
        way_home: of gradients of the batch's weights, where any rank's require one; otherwise None.
        passing: what every rank's backward has to visit: parameters of the feature processors, or ``SentWeights``.
        prefetched: what a pipeline read ahead, held for the batch's own lookup.
        device: where the batch is, known even of one that cannot be looked up.
        late_checks: of this rank's ids, whose answers are still on the device. The exchange reads them with the sizes,
            before anything is looked up, and raises what the first says that has failed.
    """

    bags: Bags
    device: torch.device = torch.device("cpu")
    strides: list[int]
    way_home: Any = None
    passing: tuple[torch.Tensor, ...] = ()
    prefetched: Any = None
    late_checks: Sequence[Any] = ()

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of the batch until ``stream`` has passed this point."""
        self.bags.record_stream(stream)


class Exchange(Protocol):
    """What moves between the ranks of cut tables: ids there, pooled columns back, gradients there again.

    This is the seam because the meaning and the cost of sharding lie here. The plan, the lookups and the state are the
    same, whether every rank is told everything or each is sent exactly what it needs. All calls are collective: every
    rank makes them in the same order. An exchange is made of a ``Layout``, and knows nothing else of its collection.
    """

    def input_dist(self, ctx: ShardedContext, select: Callable[[], Bags]) -> Awaitable[Awaitable[list[Bags]]]:
        """Send ids to the ranks that look them up.

        ``select()`` gives this rank's checked bags of all features; what it raises on one rank, or leaves to the
        context's ``late_checks``, every rank raises. Sets ``bags``, ``strides`` and ``way_home`` of the context. The
        first ``wait`` ends the exchange of sizes, the second that of ids; it gives the bags of each lookup of this rank
        over all ranks' samples, feature-major and by rank.
        """

    def columns(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Float32 [B, ``Layout.width``] for this rank's samples, from each lookup's [all ranks' samples, columns].

        Partial sums are added from +0 in ascending rank; then a mean is divided by the number of ids of the bag.
        """

    def gradients(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        """``columns`` backwards: the gradient of each lookup's output, divided by the number of ranks."""

    def weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        """Float32 [N] for the ids of this rank's batch, from those of each lookup's ids, one lookup after the other.

        An id that several shards look up gets the sum from +0, by rank, then slot.
        """

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's value, from +0 in ascending rank."""


def check_seed(seed: Any) -> None:
    """Demand a seed as a store takes it: a fraction would make other weights than any number. Raises ConfigError."""
    if not hasattr(seed, "__index__") or not -(2**63) <= operator.index(seed) < 2**64:
        raise ConfigError("not a seed", got=seed, expected="an int of 64 bits", where="seed")


def initial_shard(table: EmbeddingBagConfig, index: int, shard: Shard, seed: int) -> torch.Tensor:
    """The shard's first weights, the same for every plan.

    Uniform ones follow the rule of ``kvstore.Initializer`` with the row as id. An ``init_fn`` of the user's fills the
    whole table on every rank, from torch's generator seeded by ``seed`` and the table's place; the rest is dropped.
    """
    if not isinstance(table.init_fn, UniformInit):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            whole = initial_weight(table)
        part = whole[slice(*shard.rows), slice(*shard.columns)]
        # Rows of the whole table would keep its memory on every rank.
        return part if part.numel() == whole.numel() else part.clone(memory_format=torch.contiguous_format)
    initializer = Initializer.uniform(table.init_fn.low, table.init_fn.high)
    weight = torch.empty(shard.rows[1] - shard.rows[0], shard.width, dtype=table.dtype, device="cpu")
    for begin in range(*shard.rows, INIT_ROWS):
        ids = torch.arange(begin, min(begin + INIT_ROWS, shard.rows[1]), device="cpu")
        rows = initial_weights(initializer, seed, index, ids, table.embedding_dim, table.dtype)
        weight[begin - shard.rows[0] :][: ids.numel()] = rows[:, slice(*shard.columns)]
    return weight
