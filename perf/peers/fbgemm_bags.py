"""FBGEMM's table-batched embeddings on the CPU, with their fused optimizers; where it is not installed, none."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fastimpl import ops
from perf.peers import fbgemm_code

__all__ = ["FbgemmBags", "installed"]

_OPTIMIZERS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
_COMMON = "fbgemm_gpu.split_table_batched_embeddings_ops_common"
_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_CONFIGS = "fbgemm_gpu.split_embedding_configs"


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("fbgemm_gpu") is not None


def _move_to_huge_pages(tensor: torch.Tensor) -> None:
    if tensor.numel():
        memory = torch.empty_like(tensor)
        ops.advise_huge_pages(memory)
        tensor.data = memory.copy_(tensor)


class FbgemmBags:
    """Tables with sum pooling, of which feature t looks up table t. Output is float32, rounding is to nearest.

    FBGEMM allocates its tables and states in small pages; ``has_huge_pages`` moves them to huge ones, as ours are. Its
    code for these tables is generated here, and takes no turns between AVX and SSE (``fbgemm_code``).
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], optimizer: str, lr: float, eps: float, *, has_huge_pages: bool = True
    ) -> None:
        with warnings.catch_warnings():
            # Its import warns about what this torch deprecates.
            warnings.simplefilter("ignore")
            common, training, configs = (importlib.import_module(name) for name in (_COMMON, _TRAINING, _CONFIGS))
            half = tables[0].dtype == torch.float16
            on_cpu = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
            self._bags: Any = training.SplitTableBatchedEmbeddingBagsCodegen(
                [(*table.shape, *on_cpu) for table in tables],
                optimizer=getattr(configs.EmbOptimType, _OPTIMIZERS[optimizer]),
                learning_rate=lr,
                eps=eps,
                stochastic_rounding=False,
                weights_precision=configs.SparseType.FP16 if half else configs.SparseType.FP32,
                output_dtype=configs.SparseType.FP32,
            )
        if has_huge_pages:
            for name in ("weights_host", "momentum1_host"):
                _move_to_huge_pages(getattr(self._bags, name))
        self.tables: list[torch.Tensor] = self._bags.split_embedding_weights()
        self._generate()
        for mine, given in zip(self.tables, tables, strict=True):
            mine.copy_(given)

    def _generate(self) -> None:
        """The code of a step, by one whose gradient is zero: it leaves momenta at zero."""
        for table in self.tables:
            table.zero_()
        pooled = self.pool(torch.zeros(0, dtype=torch.int64), torch.zeros(len(self.tables) + 1, dtype=torch.int64))
        self.step(pooled, torch.zeros_like(pooled))
        fbgemm_code.reencode()

    def pool(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[B, columns], with a graph; offsets of all tables, feature-major, [T * B + 1]."""
        pooled: torch.Tensor = self._bags(indices, offsets)
        return pooled

    def step(self, pooled: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward and update, which are one here too."""
        pooled.backward(grad)  # type: ignore[no-untyped-call]
