"""torchrec's own sharded modules, driven by our pipeline as by torchrec's: the same bits, on two ranks.

No requirement of the contract, which is about our modules: that whoever has a torchrec model may change the pipeline
alone. Skipped where torchrec is not installed; ci/peers installs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises
from conformance.pipeline.batches import values_of
from conformance.pipeline.jobs import Batch, Job, assert_same_state
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu")), reason="needs torchrec"
)

PLACEMENTS: tuple[dict[str, Any], ...] = ({}, {"embedding_lookup_before_optimizer": True})


def _job(rank: Rank, kinds: tuple[str, ...]) -> Job:
    from conformance.peers import torchrec_pipeline

    # Of this seed no table is of one row: cut by row it would leave a rank none, which FBGEMM refuses on the CPU.
    job = Job(torchrec_pipeline.pipeline, 6, rank, kinds=kinds)
    # Tables that update themselves in the backward are parameters of torchrec's modules, but not of the optimizer.
    params = [
        param
        for name, param in job.model.named_parameters()
        if not name.startswith("collections") or "data_parallel" in kinds
    ]
    job.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.5)
    return job


def _driven(rank: Rank, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    from fastimpl.pipeline import TrainPipelineFusedSparseDist

    loop, theirs, ours = (_job(rank, kinds) for _ in range(3))
    schedule: Any = TrainPipelineFusedSparseDist(
        ours.model, ours.optimizer, device="cpu", process_group=rank.group, **options
    )
    assert_equal(len(schedule.calls), 2, where="torchrec's modules that are driven")
    upstream = theirs.schedule("TrainPipelineSparseDist")
    loaders = iter(theirs.batches(6)), iter(ours.batches(6))
    for step, batch in enumerate(loop.batches(6)):
        expected = loop.step(batch)
        assert_bits(upstream.progress(loaders[0]), expected, f"torchrec's pipeline, step {step}")
        assert_bits(schedule.progress(loaders[1]), expected, f"our pipeline, step {step}")
        assert_same_state(theirs, loop, f"torchrec's pipeline, step {step}")
        assert_same_state(ours, loop, f"our pipeline, step {step}")


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kinds", [("table_wise", "row_wise"), ("data_parallel", "table_wise")], ids="-".join)
def test_fused_drives_torchrec(rank_pool: Any, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    rank_pool.run(_driven, 2, kinds, options)


def _semi_sync(rank: Rank, start: int) -> None:
    import fastimpl.pipeline
    import refimpl.pipeline

    loop, plain, ours = (_job(rank, ("table_wise", "row_wise")) for _ in range(3))
    schedules: list[Any] = [
        package.pipeline.TrainPipelineSemiSync(
            job.model, job.optimizer, start_batch=start, process_group=rank.group, strict=True
        )
        for package, job in ((refimpl, plain), (fastimpl, ours))
    ]
    loaders = [iter(job.batches(6)) for job in (plain, ours)]
    for step, batch in enumerate(loop.batches(6)):
        expected = schedules[0].progress(loaders[0])
        assert_bits(schedules[1].progress(loaders[1]), expected, f"start {start} step {step}")
        assert_same_state(ours, plain, f"start {start} step {step}")
        # Stale from the second step behind the start on, and no sooner.
        exact = loop.step(batch)
        assert_equal(torch.equal(exact, expected), step <= start, where=f"start {start} step {step} is the loop's")


@pytest.mark.parametrize("start", [0, 2])
def test_semi_sync_drives_torchrec(rank_pool: Any, start: int) -> None:
    rank_pool.run(_semi_sync, 2, start)


def _module(name: str) -> Any:
    return importlib.import_module(name)


class Net(torch.nn.Module):
    """torchrec's collection and a dense layer; returns (loss [1], scores [B])."""

    def __init__(self, collection: torch.nn.Module) -> None:
        super().__init__()
        self.collection, self.top = collection, torch.nn.Linear(24, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean square of score less target."""
        scores = self.top(self.collection(batch.ids[0]).values())[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


def _parallel(rank: Rank) -> tuple[Any, torch.optim.Optimizer]:
    """A ``DistributedModelParallel`` of one table-wise and one row-wise table, and its dense optimizer."""
    torchrec, types = _module("torchrec"), _module("torchrec.distributed.types")
    plans, kinds = _module("torchrec.distributed.sharding_plan"), _module("fbgemm_gpu.split_embedding_configs")
    configs = [
        torchrec.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[feature])
        for name, feature, rows, dim in (("t0", "a", 20, 16), ("t1", "b", 30, 8))
    ]
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    optimizer = {"optimizer": kinds.EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    sharder = _module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params=optimizer)
    chosen = {"t0": plans.table_wise(rank=1, compute_kernel="fused"), "t1": plans.row_wise(compute_kernel="fused")}
    plan = plans.construct_module_sharding_plan(collection, chosen, sharder, 2, 2, device_type="cpu")
    torch.manual_seed(3)
    model = _module("torchrec.distributed.model_parallel").DistributedModelParallel(
        Net(collection),
        env=types.ShardingEnv.from_process_group(rank.group),
        device=torch.device("cpu"),
        plan=types.ShardingPlan({"collection": plan}),
        sharders=[sharder],
    )
    for name, table in model.state_dict().items():
        if name.startswith("collection"):
            for shard in table.local_shards():
                shard.tensor.copy_(values_of(tuple(shard.tensor.shape), 9))
    dense = [param for name, param in model.named_parameters() if not name.startswith("collection")]
    return model, torch.optim.SGD(dense, lr=0.05, momentum=0.5)


def _bits_of(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        parts = value.local_shards() if hasattr(value, "local_shards") else []
        found |= {f"{name} {number}": part.tensor.clone() for number, part in enumerate(parts)}
        if not parts and isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            found[name] = value.clone()
    return found


def _model_parallel(rank: Rank) -> None:
    from fastimpl.pipeline import TrainPipelineFusedSparseDist

    (theirs, their_optimizer), (ours, our_optimizer) = (_parallel(rank) for _ in range(2))
    upstream = _module("torchrec.distributed.train_pipeline").TrainPipelineSparseDist(
        theirs, their_optimizer, torch.device("cpu")
    )
    schedule: Any = TrainPipelineFusedSparseDist(ours, our_optimizer, device="cpu", process_group=rank.group)
    assert_equal(len(schedule.calls), 1, where="torchrec's modules that are driven")
    pipelineable = _module("torchrec.streamable").Pipelineable
    batches, batch_class = list[Any](), type("Pipelined", (PlainBatch, pipelineable), {})
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        lengths = torch.randint(0, 4, (8,), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        kjt = _module("torchrec").KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
        batches.append(batch_class(values_of((4, 6), step), [kjt], values_of((4,), step)))
    loaders = iter(batches), iter(batches)
    for step in range(6):
        expected = upstream.progress(loaders[0])
        assert_bits(schedule.progress(loaders[1]), expected, f"our pipeline, step {step}")
        bits = _bits_of(theirs)
        assert_equal(len(bits) >= 3, True, where="what is compared")
        for name, value in _bits_of(ours).items():
            assert_bits(value, bits[name], f"step {step}: {name}")


class PlainBatch(Batch):
    """What torchrec's pipelines ask of a batch."""

    def record_stream(self, stream: Any) -> None:
        """There are no streams on the CPU."""

    def pin_memory(self) -> Any:
        """There is nothing to pin for."""
        return self


def test_fused_drives_distributed_model_parallel(rank_pool: Any) -> None:
    rank_pool.run(_model_parallel, 2)


def _batch(kind: Any) -> Any:
    ids, lengths = torch.tensor([1, 2, 3, 4, 5, 0, 7]), torch.tensor([2, 1, 0, 1, 0, 3])
    return kind.from_lengths_sync(["f1", "f0"], ids, lengths)


def _tables(kind: Any, pooling: Any, dtype: Any) -> list[Any]:
    parts = {"num_embeddings": 8, "embedding_dim": 4, "data_type": dtype}
    names = [{"name": f"t{i}", "feature_names": [f"f{i}"]} for i in range(2)]
    poolings = ({}, {}) if pooling is None else ({"pooling": pooling.SUM}, {"pooling": pooling.MEAN})
    return [kind(**parts, **name, **some) for name, some in zip(names, poolings, strict=True)]


@pytest.mark.parametrize("package", ["refimpl", "fastimpl"])
def test_types_are_exchanged(package: str) -> None:
    ours, theirs = _module(f"{package}.pipeline"), _module("torchrec")
    configs, regroup = _module("torchrec.modules.embedding_configs"), _module("torchrec.modules.regroup")
    tables = _tables(configs.EmbeddingBagConfig, configs.PoolingType, configs.DataType.FP32)
    modules = [ours.EmbeddingBagCollection(tables), theirs.EmbeddingBagCollection(tables=tables)]
    modules[1].load_state_dict(modules[0].state_dict())
    cut = ours.ShardedEmbeddingBagCollection(modules[0], {"t0": ours.table_wise(0), "t1": ours.row_wise()})
    batches = [_batch(kind.KeyedJaggedTensor) for kind in (ours, theirs)]
    expected = modules[1](batches[1]).values()
    for module in (*modules, cut):
        for batch in batches:
            torch.testing.assert_close(module(batch).values(), expected)
    found = regroup.KTRegroupAsDict([["f1"], ["f0"]], ["a", "b"])([modules[0](batches[0])])
    torch.testing.assert_close(torch.cat([found["b"], found["a"]], dim=1), expected)
    rows = _tables(configs.EmbeddingConfig, None, configs.DataType.FP32)
    sequences = [ours.EmbeddingCollection(rows), theirs.EmbeddingCollection(tables=rows)]
    sequences[1].load_state_dict(sequences[0].state_dict())
    for batch in batches:
        for name, bags in sequences[0](batch).items():
            assert_bits(bags.values(), sequences[1](batch)[name].values(), f"rows of {name}")
    with raises(UnsupportedError, mentions=("EmbeddingBagCollection of ours",)):
        ours.ShardedEmbeddingBagCollection(modules[1], {"t0": ours.table_wise(0), "t1": ours.row_wise()})


@pytest.mark.parametrize("name", ["float64", "INT8"])
def test_torchrecs_dtypes_without_tables(name: str) -> None:
    configs, ours = _module("torchrec.modules.embedding_configs"), _module("refimpl.pipeline")
    dtype = torch.float64 if name == "float64" else configs.DataType.INT8
    with raises(ConfigError, mentions=("dtype", name)):
        ours.EmbeddingBagCollection(_tables(configs.EmbeddingBagConfig, configs.PoolingType, dtype))
