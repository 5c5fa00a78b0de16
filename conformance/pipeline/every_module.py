"""One module of each kind that looks rows up, over the same tables, on the host; and what any of them finds."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.sharding import collection_of, sharded_of

FEATURES = ["f0", "f1", "f2"]


def _configs(pipeline: Any) -> list[Any]:
    poolings = (pipeline.PoolingType.SUM, pipeline.PoolingType.MEAN, pipeline.PoolingType.SUM)
    return [
        pipeline.EmbeddingBagConfig(7, 4, f"t{i}", feature_names=[FEATURES[i]], pooling=pooling)
        for i, pooling in enumerate(poolings)
    ]


def whole(pipeline: Any, *, is_weighted: bool = True) -> Any:
    """Three tables with dense gradients; one feature each."""
    weights = [values_of((7, 4), seed) for seed in range(3)]
    return collection_of(pipeline, _configs(pipeline), weights, is_weighted=is_weighted)


def cut(pipeline: Any, group: Any = None, world_size: int = 1) -> Any:
    """The same, cut by three plans."""
    plan = {"t0": pipeline.row_wise(), "t1": pipeline.table_wise(world_size - 1), "t2": pipeline.data_parallel()}
    return sharded_of(pipeline, whole(pipeline), plan, "sgd", group, device="cpu")


def lookups(pipeline: Any) -> Any:
    """The same with Adam in the backward."""
    weights = [values_of((7, 4), seed) for seed in range(3)]
    fused = pipeline.FusedOptimizer("adam", lr=0.5)
    return pipeline.TableBatchedEmbeddingBags(_configs(pipeline), optimizer=fused, weights=weights)


def processed(pipeline: Any) -> Any:
    """The same with weights by position, for two of the features."""
    processors = pipeline.PositionWeightedModuleCollection(dict.fromkeys(FEATURES[:2], 4))
    with torch.no_grad():
        for seed, weight in enumerate(processors.position_weights.values()):
            weight.copy_(values_of((4,), 20 + seed))
    return pipeline.FeatureProcessedEmbeddingBagCollection(whole(pipeline), processors)


def processed_cut(pipeline: Any) -> Any:
    """Those, cut."""
    plan = {f"t{i}": pipeline.table_wise(0) for i in range(3)}
    return sharded_of(pipeline, processed(pipeline), plan, "sgd", device="cpu")


def rows(pipeline: Any) -> Any:
    """A table whose rows are looked up one by one."""
    return pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(7, 4, "t", feature_names=FEATURES)])


def batch_of(seed: int) -> Jagged:
    """A batch of the three features."""
    return random_jagged(FEATURES, [7, 7, 7], 5, seed)


def looked_up(pipeline: Any, module: Any, batch: Jagged, weights: torch.Tensor | None) -> torch.Tensor:
    """What any of these modules finds, side by side, where it is."""
    place = next(iter([*module.parameters(), *module.buffers()])).device
    kjt, weights = batch.kjt(pipeline).to(place), None if weights is None else weights.to(place)
    if isinstance(module, pipeline.TableBatchedEmbeddingBags):
        found: torch.Tensor = module(kjt.values(), kjt.offsets(), weights)
        return found
    result = module(pipeline.KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, lengths=kjt.lengths()))
    if isinstance(result, dict):
        return torch.cat([part.values() for part in result.values()])
    values: torch.Tensor = result.values()
    return values


EVERY = (whole, cut, lookups, processed, processed_cut, rows)
