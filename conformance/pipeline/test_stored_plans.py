"""E. Key-value tables of one collection: stores that they share or not, buckets that differ, other tables beside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, requirement
from conformance.pipeline.batches import Jagged, generator_of, joined, random_jagged, values_of
from conformance.pipeline.model import OPTIMIZERS, Naive, assert_bits
from conformance.pipeline.sharding import assert_shards, collection_of, random_plan
from refimpl.optimizers import Hyper

WIDTH, LR = 4, 0.5
# What any hash puts somewhere, and what chunks of 3 and more hold.
ANY_KEYS = [-1, 0, 7, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1, 12]
CHUNK_KEYS = [0, 2, 3, 5, 8, 11, 6, 14]
# Names of which one begins with another, and the end of the name of a table that is not the collection's.
NAMES, OTHER = ["t", "t1", "t1_0", "t10"], "0x"
BAD_IDS = [-1, 10**6, 2**63 - 1]


class Stored:
    """One collection on one rank: some of its tables are in stores, which hold other tables too.

    Numbers are small multiples of powers of two, so that no order of sums shows.
    """

    def __init__(self, rank: Rank, seed: int, sizes: Sequence[int] = ()) -> None:
        self.rank, self.seed, self.chosen = rank, seed, random.Random(seed)
        self.sizes = list(sizes)
        self.pipeline, self.kvstore = rank.component("pipeline"), rank.component("kvstore")
        poolings = [self.pipeline.PoolingType.SUM, self.pipeline.PoolingType.MEAN]
        self.features = {name: [f"{name}.a", f"{name}.b"][: self.chosen.randint(1, 2)] for name in NAMES}
        self.configs = [
            self.pipeline.EmbeddingBagConfig(
                len(ANY_KEYS), WIDTH, name, feature_names=self.features[name], pooling=self.chosen.choice(poolings)
            )
            for name in NAMES
        ]
        self.weights = [self._numbers((len(ANY_KEYS), WIDTH), i) for i in range(len(NAMES))]
        names = sorted(self.chosen.sample(NAMES, 1 + seed % len(NAMES)))
        self.buckets = {name: self._buckets() for name in names}
        self.stores = self._stores(self.chosen.choice([[names], [[name] for name in names]]))
        kinds = ("table_wise", "row_wise", "column_wise")
        plan = random_plan(self.pipeline, self.configs, rank.world_size, seed, kinds)
        plan |= {name: self.pipeline.key_value(self.stores[name], buckets) for name, buckets in self.buckets.items()}
        self.sharded = self.pipeline.ShardedEmbeddingBagCollection(
            collection_of(self.pipeline, self.configs, self.weights),
            plan,
            optimizer=self.pipeline.FusedOptimizer("sgd", lr=LR),
            process_group=rank.group,
            bounds_check=self.chosen.choice(["warning", "ignore"]),
        )
        self.naive = Naive(self.configs, self.weights, "sgd")

    def _numbers(self, shape: tuple[int, int], seed: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator_of(100 * self.seed + seed)) / 4

    def _buckets(self) -> Any:
        if self.sizes:
            return self.kvstore.Buckets(5, "chunk", self.sizes.pop())
        if self.chosen.random() < 0.3:
            return self.kvstore.Buckets(5, "chunk", self.chosen.choice([3, 4, 15]))
        return self.kvstore.Buckets(self.chosen.choice([1, 2, 3, 4, 5, 7]))

    def _stores(self, groups: list[list[str]]) -> dict[str, Any]:
        """Table -> its store, with this rank's rows; tables of a group share one."""
        found: dict[str, Any] = {}
        for tables in groups:
            others = [name + OTHER for name in tables]
            layouts = dict.fromkeys([*tables, *others], self.kvstore.RowLayout(WIDTH, optimizer="sgd"))
            store = self.kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1)
            for other in others:
                # Dealt by nobody: every rank has them.
                store.set(other, torch.arange(9), torch.ones(9, WIDTH))
            for name in tables:
                mine, keys = self.mine(name), self.keys(name)
                rows = self.weights[NAMES.index(name)][[keys.index(key) for key in mine]]
                store.set(name, torch.tensor(mine, dtype=torch.int64), rows)
            found |= dict.fromkeys(tables, store)
        return found

    def keys(self, name: str) -> list[int]:
        """The id of each row of a table."""
        if name not in self.buckets:
            return list(range(len(ANY_KEYS)))
        return CHUNK_KEYS if self.buckets[name].hash_mode == "chunk" else ANY_KEYS

    def mine(self, name: str) -> list[int]:
        """The ids of a stored table that are this rank's."""
        buckets = self.buckets[name]
        count, size = buckets.total_count, buckets.bucket_size
        begin, end = self.kvstore.rank_buckets(count, self.rank.world_size, self.rank.rank)
        return [key for key in self.keys(name) if begin <= (key % count if size is None else key // size) < end]

    def batches(self, step: int) -> list[Jagged]:
        """Every rank's batch, by rows."""
        names, found = [feature for name in NAMES for feature in self.features[name]], []
        for rank in range(self.rank.world_size):
            drawn = random.Random(1000 * self.seed + 10 * step + rank)
            sizes = [[drawn.choice([0, 1, 2, 4]) for _ in range(2 + rank % 2)] for _ in names]
            bags = [[[drawn.randrange(len(ANY_KEYS)) for _ in range(size)] for size in row] for row in sizes]
            found.append(Jagged(names, bags))
        return found

    def with_ids(self, batch: Jagged) -> Any:
        """The batch of ids; some of row 0 of what is in no store are ids that the table does not have."""
        bags = []
        for feature, rows in zip(batch.keys, batch.bags, strict=True):
            name = feature.partition(".")[0]
            keys = self.keys(name)
            bad = [0] if name in self.buckets else [0, *BAD_IDS]
            bags.append(
                [[keys[row] if row or name in self.buckets else self.chosen.choice(bad) for row in bag] for bag in rows]
            )
        return Jagged(batch.keys, bags).kjt(self.pipeline)

    def train(self, step: int) -> None:
        """One step of this rank and of the oracle; pooled columns, and rows where they live, are its bits."""
        batches, world_size, where = self.batches(step), self.rank.world_size, f"seed {self.seed} step {step}"
        pooled = self.sharded(self.with_ids(batches[self.rank.rank])).values()
        expected = torch.split(self.naive.pooled(joined(batches)), [batch.stride for batch in batches])
        assert_bits(pooled.detach(), expected[self.rank.rank], f"{where} pooled")
        shapes = [(batch.stride, pooled.shape[1]) for batch in batches]
        grads = [self._numbers(shape, 10 * step + rank) for rank, shape in enumerate(shapes)]
        # Means divide by 1, 2 and 4 alone.
        pooled.backward(world_size * grads[self.rank.rank])
        self.naive.step(joined(batches), torch.cat(grads), Hyper(LR, step))
        assert_shards(self.sharded, self.naive, where)
        for name in self.buckets:
            mine, keys = self.mine(name), self.keys(name)
            rows = self.naive.tables[NAMES.index(name)].weight[[keys.index(key) for key in mine]]
            ids = torch.tensor(mine, dtype=torch.int64)
            assert_bits(self.stores[name].get(name, ids), rows, f"{where} rows of {name}")

    def check_state(self) -> None:
        """What a checkpoint is given: the rows of the collection's own tables, all of them, each once."""
        state = self.sharded.key_value_state_dict(snapshot=False)
        parts = ("weight", "weight_id", "bucket", "metadata", "step")
        expected = sorted(f"embedding_bags.{name}.{part}" for name in self.buckets for part in parts)
        assert_equal(sorted(state), expected, where=f"seed {self.seed} names")
        for name in self.buckets:
            count = state[f"embedding_bags.{name}.weight"].global_row_count
            assert_equal(count, len(self.keys(name)), where=f"seed {self.seed} rows of {name} on all ranks")


def _trained(rank: Rank, seeds: range, sizes: Sequence[int] = ()) -> None:
    for seed in seeds:
        stored = Stored(rank, seed, sizes)
        for step in (1, 2):
            stored.train(step)


@requirement(
    "PIPE-365",
    "Key-value tables MUST be dealt each by its own buckets, in stores that they share or not, beside tables of every "
    "other kind and ids that these do not have, any key among theirs, and train as the uncut tables.",
)
def test_any_stored_plan(rank_pool: Any) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_trained, world_size, range(8 * world_size, 8 * world_size + 4))


def _trained_by_sizes(rank: Rank) -> None:
    for sizes in permutations((3, 4, 15)):
        # A seed of which three tables are in stores.
        _trained(rank, range(2, 3), sizes)


@requirement(
    "PIPE-768",
    "Key-value tables that are dealt by as many chunk buckets of other sizes MUST each be dealt by its own, in any "
    "order, and train as the uncut tables.",
)
def test_sizes_of_buckets(rank_pool: Any) -> None:
    for world_size in (2, 3):
        rank_pool.run(_trained_by_sizes, world_size)


@requirement(
    "PIPE-458",
    "The rows of a key-value table MUST be stepped with the learning rate, eps and betas of the optimizer, whatever "
    "they are, and with its step.",
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hyperparameters(pipeline: Any, kvstore: Any, optimizer: str) -> None:
    config, weight = pipeline.EmbeddingBagConfig(6, WIDTH, "t", feature_names=["f"]), values_of((6, WIDTH), 1)
    store = kvstore.KVStore({"t": kvstore.RowLayout(WIDTH, optimizer=optimizer)}, optimizer_in_row=True)
    store.set("t", torch.arange(6), weight)
    hyper = {"lr": 0.25, "eps": 0.5, "beta1": 0.5, "beta2": 0.75}
    sharded = pipeline.ShardedEmbeddingBagCollection(
        collection_of(pipeline, [config], [weight]),
        {"t": pipeline.key_value(store, kvstore.Buckets(4))},
        optimizer=pipeline.FusedOptimizer(optimizer, **hyper),
    )
    naive = Naive([config], [weight], optimizer)
    for step in (1, 2, 3):
        batch, grad = random_jagged(["f"], [6], 3, step), values_of((3, WIDTH), step)
        sharded(batch.kjt(pipeline)).values().backward(grad)
        naive.step(batch, grad, Hyper(0.25, step, 0.5, 0.5, 0.75))
        assert_bits(store.get("t", torch.arange(6)), naive.tables[0].weight, f"{optimizer} rows after step {step}")


def _saved(rank: Rank, seeds: range) -> None:
    for seed in seeds:
        Stored(rank, seed).check_state()


@requirement(
    "PIPE-366",
    "A collection's key_value_state_dict() MUST hold the rows of its own tables, each by the buckets that deal it, and "
    "nothing of other tables of their stores, whatever these are called and whoever deals them.",
)
def test_stored_state(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_saved, world_size, range(8 * world_size, 8 * world_size + 5))
