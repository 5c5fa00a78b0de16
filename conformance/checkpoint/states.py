"""The state of every component, for saving it in every way: what a checkpoint must hold, and how training goes on.

What is expected is kept apart from the state dict, as plain tensors with their places in the global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard

from conformance.checkpoint.cases import mesh_of, random_bits, sharded
from conformance.harness import Rank, assert_equal, assert_same_tensor
from conformance.kvstore.cases import random_rows, store_of
from conformance.pipeline.model import random_tables
from conformance.pipeline.sharding import batches_of, collection_of, sharded_of, train

__all__ = ["MAKERS", "Made"]

Place = tuple[tuple[int, ...], torch.Tensor]


@dataclass
class Made:
    """A state dict, its global shapes, this rank's values at their offsets, and a step of training that changes all."""

    state: dict[str, Any]
    train: Callable[[], None]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Place] = field(default_factory=dict)

    def expect(self, name: str, shape: tuple[int, ...], value: torch.Tensor, offsets: tuple[int, ...] = ()) -> None:
        """The checkpoint holds ``value`` at ``offsets`` of a tensor of this shape."""
        self.shapes[name] = tuple(shape)
        self.parts[name] = (offsets or (0,) * len(shape), value.detach().clone())

    def targets(self) -> dict[str, torch.Tensor]:
        """Whole tensors to load into."""
        return {name: torch.zeros(shape, dtype=self.parts[name][1].dtype) for name, shape in self.shapes.items()}

    def compare(self, found: Mapping[str, torch.Tensor]) -> None:
        """Demand that whole tensors hold this rank's values."""
        for name, (offsets, value) in self.parts.items():
            place = tuple(slice(o, o + s) for o, s in zip(offsets, value.shape, strict=True))
            assert_same_tensor(found[name][place].contiguous(), value.contiguous(), where=name)

    def compare_local(self, found: Mapping[str, Any]) -> None:
        """Demand that a copy of the state dict holds this rank's values."""
        assert_equal(set(found), set(self.state), where="names")
        for name, (_, value) in self.parts.items():
            assert_same_tensor(local_of(found[name]).contiguous(), value.contiguous(), where=name)


def local_of(value: Any) -> torch.Tensor:
    """The values that a tensor has here."""
    for verb in ("to_local", "full_tensor"):
        if hasattr(value, verb):
            value = getattr(value, verb)()
            break
    assert isinstance(value, torch.Tensor)
    return value.detach()


def _store(rank: Rank, **options: Any) -> tuple[Any, Any]:
    kvstore = rank.component("kvstore")
    store = store_of(kvstore, {"t": kvstore.RowLayout(5, torch.float16, "adam")}, **options)
    buckets = kvstore.Buckets(6)
    begin, end = kvstore.rank_buckets(6, rank.world_size, rank.rank)
    keys = torch.tensor([key for key in range(-9, 14) if begin <= key % 6 < end])
    store.set_rows("t", random_rows(store, keys.tolist(), 5))
    store.apply_gradients("t", keys, torch.ones(keys.numel(), 5), 0.5, 3)
    return store, buckets


def _forget(store: Any) -> Callable[[], None]:
    def train_on() -> None:
        keys = store.ids("t")
        store.delete("t", keys[:2])
        store.apply_gradients("t", keys, torch.full((keys.numel(), 5), -4.0), 0.5, 4)

    return train_on


def _expect_rows(made: Made, store: Any, whole: bool, prefix: str = "t.") -> Made:
    views = {name.removeprefix(prefix): value for name, value in made.state.items() if name.startswith(prefix)}
    lazy, keys = views["weight"], views["weight_id"].full_tensor()[:, 0]
    values = {"weight": store.get_rows("t", keys) if whole else store.get("t", keys), "weight_id": keys[:, None]}
    values |= {name: store.get_state("t", name, keys) for name in ("momentum1", "momentum2")}
    values["metadata"] = store.metadata("t", keys)
    for name, value in values.items():
        place = (lazy.row_offset, 0)
        made.expect(prefix + name, (lazy.global_row_count, value.shape[1]), value, place)
    made.expect(f"{prefix}step", (1, 1), torch.tensor([[3]]))
    return made


def rows(rank: Rank) -> Made:
    """Whole rows of one moment, in chunks."""
    store, buckets = _store(rank, return_whole_row=True)
    return _expect_rows(Made(store.state_dict(buckets=buckets, chunk_rows=4), _forget(store)), store, True)


def live_rows(rank: Rank) -> Made:
    """Views of the store itself, weights and states apart."""
    store, buckets = _store(rank)
    state = store.state_dict(buckets=buckets, chunk_rows=4, snapshot=False)
    return _expect_rows(Made(state, _forget(store)), store, False)


def module_with_rows(rank: Rank) -> Made:
    """A module whose rows live in a store, beside dense parameters, as torch's own state dicts give it."""
    store, buckets = _store(rank, return_whole_row=True)
    bag = rank.component("kvstore").KVEmbeddingBag(store, buckets=buckets)
    torch.manual_seed(3)
    over = torch.nn.Linear(5, 2)
    step = _forget(store)

    def train_on() -> None:
        step()
        over.weight.data.fill_(7.0)

    made = Made(get_model_state_dict(torch.nn.ModuleDict({"bag": bag, "over": over})), train_on)
    made.expect("over.weight", (2, 5), over.weight)
    return _expect_rows(made, store, True, "bag.")


def plain(rank: Rank) -> Made:
    """Tensors of several kinds, the same on every rank."""
    values = {
        "single": random_bits(torch.float32, [7, 5], 2),
        "half": random_bits(torch.bfloat16, [6, 4], 1),
        "part": random_bits(torch.int64, [9, 9], 3)[2:5],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }

    def train_on() -> None:
        for value in values.values():
            value.fill_(1)

    made = Made(dict(values), train_on)
    for name, value in values.items():
        made.expect(name, tuple(value.shape), value)
    return made


def dtensors(rank: Rank) -> Made:
    """Shards of both dimensions, uneven, and a replica."""
    mesh, whole = mesh_of(rank), {name: random_bits(torch.float32, [9, 7], n) for n, name in enumerate("abc")}
    placements = {"a": Shard(0), "b": Shard(1), "c": Replicate()}
    state = {name: sharded(value, mesh, [placements[name]]) for name, value in whole.items()}

    def train_on() -> None:
        for value in state.values():
            value.to_local().fill_(-1.0)

    made = Made(dict(state), train_on)
    for name, value in state.items():
        dim = {"a": 0, "b": 1, "c": None}[name]
        size = -(-whole[name].shape[dim or 0] // rank.world_size)
        offsets = tuple(size * rank.rank if d == dim else 0 for d in range(2))
        made.expect(name, (9, 7), value.to_local(), offsets)
    return made


def tables(rank: Rank) -> Made:
    """Tables cut over the ranks, with optimizer states and the step."""
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 4, rows=13, multiple=4)
    kinds = (pipeline.row_wise(), pipeline.column_wise(list(range(rank.world_size))), pipeline.table_wise(0))
    plan = {config.name: kind for config, kind in zip(configs, kinds, strict=True)}
    collection = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adam", rank.group)
    train(rank, collection, batches_of(rank, keys, limits, 1), 1, pipeline)

    def train_on() -> None:
        train(rank, collection, batches_of(rank, keys, limits, 2), 2, pipeline)

    made = Made({**collection.state_dict(), **collection.optimizer_state_dict()}, train_on)
    for name, value in made.state.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if local is not None:
            made.expect(name, tuple(value.shape), local, getattr(value, "origin", ()))
    return made


def offloaded(rank: Rank) -> Made:
    """Optimizer states that an offloader keeps on the host, by torch's own state dict, tensors only."""
    offload = rank.component("offload")
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    offloader = offload.OptimizerStateOffloader(optimizer, step_device="cpu")

    def step(factor: float) -> None:
        model(torch.ones(3, 6) * factor).square().sum().backward()
        optimizer.step()
        offloader.settle()

    step(1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    state = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    made = Made(state, lambda: step(-3.0))
    for name, value in state.items():
        made.expect(name, tuple(value.shape), value)
    assert_equal(len(state), 6, where="tensors of Adam's state")
    return made


MAKERS: dict[str, Callable[[Rank], Made]] = {
    "rows": rows,
    "live rows": live_rows,
    "module with rows": module_with_rows,
    "plain": plain,
    "dtensors": dtensors,
    "tables": tables,
    "offloaded": offloaded,
}


def agreed(outcome: str) -> str:
    """What every rank found, or what one of them did."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcome if len(set(outcomes)) == 1 else " | ".join(map(str, outcomes))
