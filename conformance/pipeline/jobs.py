"""Models, batches and loaders that the requirements of schedules share, and the loop that they must equal.

The loop calls the model as anybody would: the model's sharded modules exchange, look up and update by themselves, and
no pipeline, nor anything that a pipeline is made of, has a part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.harness import assert_equal
from conformance.pipeline.batches import place_of, random_jagged, values_of
from conformance.pipeline.model import assert_bits, random_tables
from conformance.pipeline.sharding import collection_of, random_plan, sharded_of

KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")


@dataclass
class Batch:
    """One batch: dense features [B, 6], the ids of each of two modules, and targets [B]."""

    dense: torch.Tensor
    ids: list[Any]
    target: torch.Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """As torchrec's batches have it."""
        return Batch(self.dense.to(device), [each.to(device) for each in self.ids], self.target.to(device))


class Top(torch.nn.Linear):
    """A linear layer whose result is small, so that hundreds of steps leave finite numbers: NaNs are equal to NaNs."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """A power of two rounds nothing."""
        return super().forward(values) / 32


class Model(torch.nn.Module):
    """Dense bottom, two sharded collections, dense top; returns (losses [1], predictions [B])."""

    def __init__(self, collections: Sequence[torch.nn.Module], width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bottom = torch.nn.Linear(6, 5)
        self.collections = torch.nn.ModuleList(collections)
        self.dropout = torch.nn.Dropout(dropout)
        self.top = Top(5 + width, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss is the mean square of prediction less target."""
        dense = torch.tanh(self.bottom(batch.dense))
        pooled = [collection(ids).values() for collection, ids in zip(self.collections, _both(batch), strict=True)]
        predictions = self.top(self.dropout(torch.cat([dense, *pooled], dim=1)))[:, 0]
        return (predictions - batch.target).square().mean().reshape(1), predictions.detach()


def _both(batch: Batch) -> list[Any]:
    return [batch.ids[0], batch.ids[1]]


class Shifted(torch.nn.Module):
    """Ids that a module without parameters makes of those of the batch; counts its calls."""

    def __init__(self, pipeline: Any, *, trained: bool = False) -> None:
        super().__init__()
        self.kind, self.calls = pipeline.KeyedJaggedTensor, 0
        if trained:
            self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: Any) -> Any:
        """Every id of a table's first rows."""
        self.calls += 1
        return self.kind(ids.keys(), ids.values() // 2, ids.weights_or_none(), lengths=ids.lengths())


class Between(torch.nn.Module):
    """The job's model, whose first ids go through a module; ``reads_them``: the dense part, too, reads what it gave."""

    def __init__(self, model: Any, shifted: Shifted, *, reads_them: bool = False) -> None:
        super().__init__()
        self.model, self.shifted, self.reads_them = model, shifted, reads_them

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model, shifted = self.model, self.shifted(batch.ids[0])
        pooled = [model.collections[0](shifted).values(), model.collections[1](batch.ids[1]).values()]
        dense = torch.tanh(model.bottom(batch.dense))
        if self.reads_them:
            dense = dense + shifted.values().sum() / 8
        scores = model.top(torch.cat([dense, *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


class Job:
    """One training job: everything about it follows from the seed and the ranks.

    Args:
        pipeline: the implementation.
        rank: None trains alone, without a group.
        optimizer: of the tables; dense parameters have SGD with momentum, by odd seeds each in a group of its own.
        processed: ids weigh by their position, by parameters that the dense optimizer updates.
        kvstore: every other table lives in a store of this component, one for each collection; None is no store.
        reduces: whether gradient hooks average the dense gradients of all ranks, which otherwise nobody does.
        device: where the model is sent, else where the suite's objects are, but for tables in stores, which are the
            host's; batches are, too.
        plan: another number is another plan for the same tables.
    """

    def __init__(
        self,
        pipeline: Any,
        seed: int,
        rank: Any = None,
        *,
        optimizer: str = "adagrad",
        kinds: Any = KINDS,
        dropout: float = 0.0,
        processed: bool = False,
        kvstore: Any = None,
        reduces: bool = True,
        device: Any = None,
        plan: int = 0,
    ) -> None:
        self.pipeline, self.seed, self.rank = pipeline, seed, 0 if rank is None else rank.rank
        world_size, group = (1, None) if rank is None else (rank.world_size, rank.group)
        # Not every implementation has other dims, or trains in bfloat16 on the CPU; neither is what a schedule changes.
        kinds_of_tables: dict[str, Any] = {"dtypes": (torch.float32, torch.float16), "multiple": 4}
        self.tables = [random_tables(pipeline, 2 * seed + i, **kinds_of_tables) for i in range(2)]
        collections: list[Any] = []
        self.stored: list[tuple[Any, str, torch.Tensor]] = []
        for index, (configs, weights, _, _) in enumerate(self.tables):
            cuts = random_plan(pipeline, configs, world_size, seed + index + 100 * plan, kinds)
            if kvstore is not None:
                cuts |= self._stored(kvstore, configs[::2], weights[::2], optimizer, world_size)
            whole = collection_of(pipeline, configs, weights, is_weighted=processed)
            if processed:
                names = {name: 4 for config in configs for name in config.feature_names}
                processors = pipeline.PositionWeightedModuleCollection(names)
                whole = pipeline.FeatureProcessedEmbeddingBagCollection(whole, processors)
            # All are sent together below.
            collections.append(sharded_of(pipeline, whole, cuts, optimizer, group, device="cpu"))
        self.width = sum(c.embedding_dim * len(c.feature_names) for configs, *_ in self.tables for c in configs)
        self.collections = collections
        self.model = Model(collections, self.width, dropout)
        with torch.no_grad():
            for index, param in enumerate(
                p for n, p in self.model.named_parameters() if not n.startswith("collections")
            ):
                param.copy_(values_of(param.shape, 77 + index))
        if device is None:
            device = place_of(pipeline) if kvstore is None else "cpu"
        self.device = torch.device(device)
        self.model.to(self.device)
        if world_size > 1 and reduces:
            self._reduce(group, world_size)
        params = list(self.model.parameters())
        groups = [{"params": [param]} for param in params] if seed % 2 and params else [{"params": params}]
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)

    def _reduce(self, group: Any, world_size: int) -> None:
        """Means of the dense gradients, by a hook for each: what is reduced in collections is so by themselves."""

        def average(param: torch.Tensor) -> None:
            assert param.grad is not None
            dist.all_reduce(param.grad.div_(world_size), group=group)

        for name, param in self.model.named_parameters():
            if not name.startswith("collections"):
                param.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]

    def _stored(self, kvstore: Any, configs: Any, weights: Any, optimizer: str, world_size: int) -> dict[str, Any]:
        """Tables in one store, with this rank's rows in it."""
        layouts = {
            c.name: kvstore.RowLayout(c.embedding_dim, weight_dtype=c.data_type, optimizer=optimizer) for c in configs
        }
        store, buckets = kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1), kvstore.Buckets(4)
        begin, end = kvstore.rank_buckets(4, world_size, self.rank)
        for config, weight in zip(configs, weights, strict=True):
            ids = torch.arange(config.num_embeddings)
            mine = ids[(ids % 4 >= begin) & (ids % 4 < end)]
            store.set(config.name, mine, weight[mine])
            self.stored.append((store, config.name, mine))
        return {config.name: self.pipeline.key_value(store, buckets) for config in configs}

    def batch(self, number: int, stride: int = 4) -> Batch:
        """Batch ``number`` of this rank."""
        seed = 1000 * self.seed + 10 * number + self.rank
        ids = [
            random_jagged(keys, limits, stride, seed + 500 * i).kjt(self.pipeline)
            for i, (_, _, keys, limits) in enumerate(self.tables)
        ]
        return Batch(values_of((stride, 6), seed), ids, values_of((stride,), seed + 1))

    def batches(self, count: int, first: int = 0) -> list[Batch]:
        """Some batches, of 1 to 5 samples."""
        return [self.batch(number, 1 + (self.seed + number) % 5) for number in range(first, first + count)]

    def there(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def step(self, batch: Batch) -> torch.Tensor:
        """One step of the loop; the model's output."""
        batch = self.there(batch)
        if not self.model.training:
            with torch.no_grad():
                seen: torch.Tensor = self.model(batch)[1]
            return seen
        self.optimizer.zero_grad()
        losses, output = self.model(batch)
        losses.sum().backward()
        self.optimizer.step()
        found: torch.Tensor = output
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of every bit that training changes."""
        found = {f"dense {name}": value.detach().clone() for name, value in self.model.named_parameters()}
        for index, param in enumerate(self.model.parameters()):
            momentum = self.optimizer.state.get(param, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"momentum {index}"] = momentum.clone()
        for index, collection in enumerate(self.collections):
            for name, (_, weight, states) in collection.local_shards().items():
                found[f"{index} {name}"] = weight.clone()
                found |= {f"{index} {name} {state}": value.clone() for state, value in states.items()}
            found[f"{index} steps"] = torch.tensor(collection.fused_optimizer.step_count)
        for index, (store, table, ids) in enumerate(self.stored):
            found[f"stored {index}"] = store.get_rows(table, ids)
        return found

    def schedule(self, name: str, **options: Any) -> Any:
        """A pipeline that drives the job's model."""
        group = self.collections[0].process_group
        options = {"device": self.device, "process_group": group, **options}
        return getattr(self.pipeline, name)(self.model, self.optimizer, **options)


def share_optimizer(job: Job, idle: Job) -> None:
    """Another job of equal names, whose model differs, comes under the dense optimizer of the first."""
    job.optimizer.add_param_group({"params": list(idle.model.parameters())})
    idle.optimizer = job.optimizer
    with torch.no_grad():
        idle.model.top.weight.mul_(-1.0)
        for collection in idle.collections:
            for _, weight, _ in collection.local_shards().values():
                weight.mul_(-0.5)


def exchange_models(job: Job, idle: Job) -> None:
    """Each has the model of the other from here on."""
    job.model, idle.model = idle.model, job.model
    job.collections, idle.collections = idle.collections, job.collections


def assert_same_state(got: Job, expected: Job, where: str) -> None:
    """Every bit that training changes."""
    mine, theirs = got.state(), expected.state()
    assert_equal(sorted(mine), sorted(theirs), where=f"{where} names of what is held")
    for name, value in mine.items():
        assert_bits(value, theirs[name], f"{where} {name}")
        assert_equal(bool(theirs[name].isfinite().all()), True, where=f"{where} {name}: finite, so that all is seen")


def outputs_of(schedule: Any, batches: Iterator[Any]) -> list[torch.Tensor]:
    """What ``progress`` returns until it stops."""
    found = []
    while True:
        try:
            found.append(schedule.progress(batches))
        except StopIteration:
            return found
