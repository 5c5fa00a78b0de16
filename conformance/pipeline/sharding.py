"""What the requirements of cut tables share: collections, plans, batches of all ranks, and the uncut oracle's step."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import Rank
from conformance.pipeline.batches import Jagged, generator_of, joined, place_of, random_jagged, values_of
from conformance.pipeline.model import Naive, assert_bits, fused_of, hyper_of
from twinproof.optimizers import OPTIMIZERS


def collection_of(pipeline: Any, configs: Any, weights: Any, **options: Any) -> Any:
    """The collection that is cut."""
    collection = pipeline.EmbeddingBagCollection(configs, **options)
    state = {f"embedding_bags.{c.name}.weight": w for c, w in zip(configs, weights, strict=True)}
    collection.load_state_dict(state)
    return collection


def sharded_of(
    pipeline: Any, collection: Any, plan: Any, optimizer: str, group: Any = None, *, device: Any = None, **options: Any
) -> Any:
    """The collection, cut by the plan, on the device, else where the suite's objects are."""
    fused = fused_of(pipeline, optimizer)
    sharded = pipeline.ShardedEmbeddingBagCollection(collection, plan, optimizer=fused, process_group=group, **options)
    return placed(pipeline, sharded) if device is None else sharded.to(device)


def placed(pipeline: Any, value: Any) -> Any:
    """A module, batch or tensor, sent to where the suite's objects are."""
    place = place_of(pipeline)
    return value if place.type == "cpu" else value.to(place)


def batches_of(rank: Rank, keys: Any, limits: Any, seed: int, *, uneven: bool = False, **options: Any) -> list[Jagged]:
    """Every rank's batch; uneven ones are of 1 to 4 samples, and the first rank's ids are few."""
    strides = [1 + (seed + r) % 4 if uneven else 3 for r in range(rank.world_size)]
    return [random_jagged(keys, limits, stride, 100 * seed + r, **options) for r, stride in enumerate(strides)]


def gradient_of(batches: list[Jagged], width: int, seed: int, rank: int) -> torch.Tensor:
    """The gradient of one rank's pooled columns."""
    return values_of((batches[rank].stride, width), 1000 * seed + rank)


def train(rank: Rank, sharded: Any, batches: list[Jagged], seed: int, pipeline: Any, place: Any = None) -> torch.Tensor:
    """One step of this rank, where the suite's objects are unless a place is named; its pooled columns."""
    place = place or rank.device
    pooled = sharded(batches[rank.rank].kjt(pipeline).to(place)).values()
    pooled.backward(gradient_of(batches, pooled.shape[1], seed, rank.rank).to(place))
    result: torch.Tensor = pooled.detach()
    return result


def expected_step(naive: Naive, batches: list[Jagged], seed: int, step: int) -> list[torch.Tensor]:
    """The oracle's step on all samples; each rank's pooled columns."""
    pooled = naive.pooled(joined(batches))
    world_size, width = len(batches), pooled.shape[1]
    grads = [gradient_of(batches, width, seed, r) / world_size for r in range(world_size)]
    naive.step(joined(batches), torch.cat(grads), hyper_of(step))
    return list(torch.split(pooled, [batch.stride for batch in batches]))


def assert_shards(sharded: Any, naive: Naive, where: str) -> None:
    """This rank's parts are the oracle's, bit for bit."""
    for name, (shard, weight, states) in sharded.local_shards().items():
        table = next(table for table in naive.tables if table.config.name == name)
        rows, columns = slice(*shard.rows), slice(*shard.columns)
        assert_bits(weight, table.weight[rows, columns], f"{where} weight of {name}")
        for state, value in states.items():
            whole = table.states[state]
            expected = whole[rows] if whole.shape[1] == 1 else whole[rows, columns]
            assert_bits(value, expected, f"{where} {state} of {name}")


def sharded_tensors(sharded: Any) -> dict[str, Any]:
    """Every tensor of a sharded collection, by name: what it names, and its tables and states."""
    found: dict[str, Any] = dict(sharded.named_parameters())
    found |= dict(sharded.named_buffers())
    for table, (_, weight, states) in sharded.local_shards().items():
        found |= {f"shard of {table}": weight, **{f"{name} of {table}": state for name, state in states.items()}}
    return found


def is_element_wise(optimizer: str) -> bool:
    """Whether a column block of a table is updated as the same columns of the whole table are."""
    return optimizer != "lamb" and not any(state.is_row_wise for state in OPTIMIZERS[optimizer].states)


def random_plan(pipeline: Any, configs: Any, world_size: int, seed: int, kinds: Any) -> dict[str, Any]:
    """A sharding of one of the kinds for each table."""
    generator = generator_of(seed)

    def draw(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=generator))

    plan = {}
    for config in configs:
        kind = kinds[draw(len(kinds))]
        if kind == "table_wise":
            plan[config.name] = pipeline.table_wise(draw(world_size))
        elif kind == "column_wise":
            most = min(world_size, config.embedding_dim)
            ranks = torch.randperm(world_size, generator=generator).tolist()[: 1 + draw(most)]
            plan[config.name] = pipeline.column_wise(ranks)
        else:
            plan[config.name] = pipeline.row_wise() if kind == "row_wise" else pipeline.data_parallel()
    return plan
