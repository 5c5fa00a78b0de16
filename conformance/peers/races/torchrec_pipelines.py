"""One of torchrec's own pipelines over its own sharded tables: ``torchrec_pipelines.py CLASS [OPTION=VALUE ...]``.

The pipeline, its streams and its sharded modules are torchrec's. Of FBGEMM the CPU's kernels stand in for those of a
device, behind tables that count as memory of the device: what one of them reads and writes is in its schema. One rank.
Besides the options of the pipeline: ``cold=True`` starts right after the tables are made, without a synchronize;
``edit=True`` scales a table between two steps.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def _module(name: str) -> Any:
    return importlib.import_module(name)


torchrec = _module("torchrec")
training = _module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = _module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
plans = _module("torchrec.distributed.sharding_plan")

FEATURES = ("f0", "f1")
_Lookups: Any = training.SplitTableBatchedEmbeddingBagsCodegen
_Pipelineable: Any = torchrec.streamable.Pipelineable


class _OnHost(_Lookups):  # type: ignore[misc]
    """FBGEMM's lookup for the CPU, with its tables on the device."""

    def __init__(self, embedding_specs: Any, *args: Any, **options: Any) -> None:
        place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        options["device"] = torch.device("cpu")
        super().__init__([(rows, width, *place) for rows, width, *_ in embedding_specs], *args, **options)
        self.to("cuda")
        self.current_device = torch.device("cuda", 0)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(num_embeddings=64, embedding_dim=8, name=f"t_{name}", feature_names=[name])
            for name in FEATURES
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = torch.nn.Linear(16, 1, device="cuda")

    def forward(self, batch: Any) -> Any:
        out = self.over(self.ebc(batch.sparse).values())
        return out.mean(), out


@dataclass
class _Batch(_Pipelineable):  # type: ignore[misc]
    sparse: Any

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return _Batch(self.sparse.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> Any:
        return _Batch(self.sparse.pin_memory())


def _batches(count: int) -> Iterator[Any]:
    make = torchrec.KeyedJaggedTensor.from_lengths_sync
    for _ in range(count):
        lengths = torch.randint(0, 4, (16,))
        yield _Batch(make(list(FEATURES), torch.randint(0, 64, (int(lengths.sum()),)), lengths)).pin_memory()


def _sharded() -> Any:
    embeddingbag = _module("torchrec.distributed.embeddingbag")
    kind = _module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    sharder = embeddingbag.EmbeddingBagCollectionSharder(fused_params={"optimizer": kind, "learning_rate": 0.1})
    model = _Model()
    cut = plans.table_wise(rank=0, compute_kernel="fused")
    plan = plans.construct_module_sharding_plan(
        model.ebc,
        {f"t_{name}": cut for name in FEATURES},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cuda",
    )
    return _module("torchrec.distributed.model_parallel").DistributedModelParallel(
        model,
        device=torch.device("cuda"),
        plan=_module("torchrec.distributed.types").ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )


def main(kind: str, options: dict[str, Any]) -> None:
    """Six batches."""
    _module("torchrec.distributed.batched_embedding_kernel").SplitTableBatchedEmbeddingBagsCodegen = _OnHost
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    cold, edit = options.pop("cold", False), options.pop("edit", False)
    model = _sharded()
    dense = [param for name, param in model.named_parameters() if "over" in name]
    if not cold:
        torch.cuda.synchronize()
    pipelines = _module("torchrec.distributed.train_pipeline.train_pipelines")
    pipeline = getattr(pipelines, kind)(model, torch.optim.SGD(dense, lr=0.1), torch.device("cuda"), **options)
    batches, done = _batches(6), 0
    while True:
        if edit and done == 2:
            for name, param in model.named_parameters():
                if "t_f0" in name:
                    param.data.mul_(2)
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        done += 1
    dist.destroy_process_group()


def _value(text: str) -> Any:
    return {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)


if __name__ == "__main__":
    main(sys.argv[1], {name: _value(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])})
