"""Collections with dense gradients, and weights by position."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_within_derived, examples, raises, requirement
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.model import Naive, assert_bits, random_tables
from conformance.pipeline.sharding import collection_of
from refimpl.optimizers import Hyper
from twinproof.errors import ConfigError, IdRangeError, MissingKeyError


@requirement(
    "PIPE-110",
    "A collection MUST give pooled rows by feature and dense gradients whose duplicates are summed in order, whatever "
    "the order of features in the batch; a feature of several tables is named feature@table.",
)
@examples(30)
@given(seed=st.integers(0, 10**6), weighted=st.booleans(), turn=st.integers(0, 3))
def test_collection(pipeline: Any, seed: int, weighted: bool, turn: int) -> None:
    configs, weights, keys, limits = random_tables(pipeline, seed, dtypes=[torch.float32])
    batch = random_jagged(keys, limits, 4, seed, weighted=weighted)
    turned = batch.picked([*keys[turn:], *keys[:turn]])
    collection = collection_of(pipeline, configs, weights, is_weighted=weighted)
    result, naive = collection(turned.kjt(pipeline)), Naive(configs, weights, "sgd")
    features = [name for config in configs for name in config.feature_names]
    names = [
        f"{name}@{config.name}" if features.count(name) > 1 else name
        for config in configs
        for name in config.feature_names
    ]
    assert_equal(result.keys(), names, where="names")
    assert_bits(result.values().detach(), naive.pooled(batch), "pooled")
    grad = values_of(result.values().shape, seed)
    result.values().backward(grad)
    # A step of -1 from zero is the sum of gradients.
    sums = Naive(configs, [torch.zeros_like(weight) for weight in weights], "sgd")
    sums.step(batch, grad, Hyper(-1.0))
    for config, table in zip(configs, sums.tables, strict=True):
        found = collection.embedding_bags[config.name].weight.grad
        assert_bits(found, table.weight, f"gradient of {config.name}")


@requirement(
    "PIPE-111",
    "Feature processors MUST weigh each id by its position in the bag, and get the gradient of these weights, within "
    "twice the error of the naive sum.",
)
def test_positions(pipeline: Any, tolerance_factor: float) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 5, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 5), i) for i in range(2)]
    collection = collection_of(pipeline, configs, weights, is_weighted=True)
    processors = pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4})
    with torch.no_grad():
        for i in range(2):
            processors.position_weights[f"f{i}"].copy_(values_of((4,), 10 + i))
    model = pipeline.FeatureProcessedEmbeddingBagCollection(collection, processors)
    batch = random_jagged(["f1", "f0"], [6, 6], 5, 3, longest=4)
    scales = [
        [processors.position_weights[key][: len(b)].tolist() for b in f]
        for key, f in zip(batch.keys, batch.bags, strict=True)
    ]
    weighted = Jagged(batch.keys, batch.bags, scales)
    pooled = model(batch.kjt(pipeline)).values()
    assert_bits(pooled.detach(), Naive(configs, weights, "sgd").pooled(weighted), "pooled")
    grad = values_of(pooled.shape, 4)
    pooled.backward(grad)
    for index in range(2):
        bags, columns = batch.bags[batch.keys.index(f"f{index}")], grad[:, 5 * index : 5 * index + 5]
        sums = []
        for dtype in (torch.float32, torch.float64):
            total = torch.zeros(4, dtype=dtype)
            for sample, bag in enumerate(bags):
                for position, row in enumerate(bag):
                    total[position] += (columns[sample].to(dtype) * weights[index][row].to(dtype)).sum()
            sums.append(total)
        found = processors.position_weights[f"f{index}"].grad
        assert_within_derived(found, sums[0], sums[1], factor=tolerance_factor, where=f"position weights of f{index}")
    with raises(IdRangeError, mentions=("f0", "5", "4")):
        model(Jagged(["f0", "f1"], [[[1, 1, 1, 1, 1]], [[]]]).kjt(pipeline))


@requirement(
    "PIPE-105",
    "Tables, plans and batches that cannot be honoured MUST be refused by name when a module is made or called.",
)
def test_refusals(pipeline: Any) -> None:
    make = pipeline.EmbeddingBagConfig
    for bad in ({"num_embeddings": 0}, {"embedding_dim": 0}, {"data_type": torch.float64}, {"pooling": "SUM"}):
        with raises(ConfigError):
            make(**{"num_embeddings": 4, "embedding_dim": 4, "name": "t", "feature_names": ["f"], **bad})
    good = make(4, 4, "t", feature_names=["f"])
    for tables in ([], [good, good], [make(4, 4)], [make(4, 4, "t", feature_names=["f", "f"])]):
        with raises(ConfigError):
            pipeline.EmbeddingBagCollection(tables)
    for name in ("items", "training", "a.b"):
        with raises(ConfigError, mentions=(name, "ModuleDict"), where=name):
            pipeline.EmbeddingBagCollection([good, make(4, 4, name, feature_names=["f"])])
        with raises(ConfigError, mentions=(name, "ModuleDict"), where=name):
            pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(4, 4, name, feature_names=["f"])])
    collection = pipeline.EmbeddingBagCollection([good])
    with raises(MissingKeyError, mentions=("f",)):
        collection(Jagged(["g"], [[[1]]]).kjt(pipeline))
    with raises(IdRangeError, mentions=("4", "table t")):
        collection(Jagged(["f"], [[[4]]]).kjt(pipeline))
    with raises(ConfigError, mentions=("weights",)):
        pipeline.EmbeddingBagCollection([good], is_weighted=True)(Jagged(["f"], [[[1]]]).kjt(pipeline))
    with raises(ConfigError):
        pipeline.FeatureProcessedEmbeddingBagCollection(collection, pipeline.PositionWeightedModuleCollection({"f": 3}))
    for plan in ({}, {"t": pipeline.table_wise(1)}, {"u": pipeline.table_wise(0)}, {"t": pipeline.column_wise([0, 0])}):
        with raises(ConfigError):
            pipeline.ShardedEmbeddingBagCollection(collection, plan)
    with raises(ConfigError):
        pipeline.FusedOptimizer("madgrad")
    for lr in (float("nan"), float("inf"), 1e39):
        with raises(ConfigError, mentions=("lr", f"{lr}"), where=f"lr={lr}"):
            pipeline.FusedOptimizer("sgd", lr=lr)
