"""Plain torch: a bag of embeddings for each table, sparse gradients, and the optimizer that takes them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

__all__ = ["TorchBags"]


class TorchBags:
    """Tables with sum pooling, of which feature t looks up table t; ``optimizer`` is sgd or adagrad."""

    def __init__(self, tables: Sequence[torch.Tensor], optimizer: str, lr: float, eps: float) -> None:
        self._bags = [
            torch.nn.EmbeddingBag(table.shape[0], table.shape[1], mode="sum", sparse=True, _weight=table.clone())
            for table in tables
        ]
        weights = [bag.weight for bag in self._bags]
        self._optimizer: torch.optim.Optimizer
        if optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(weights, lr=lr, eps=eps)
        else:
            self._optimizer = torch.optim.SGD(weights, lr=lr)
        self.tables = [weight.detach() for weight in weights]

    def pool(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[B, columns], with a graph; offsets of all tables, feature-major, [T * B + 1]."""
        begins = offsets[:-1].view(len(self._bags), -1)
        ends = [*begins[1:, 0].tolist(), indices.numel()]
        pooled = []
        for bag, some, end in zip(self._bags, begins, ends, strict=True):
            first = int(some[0])
            pooled.append(bag(indices[first:end], some - first))
        return torch.cat(pooled, 1)

    def step(self, pooled: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward and update."""
        self._optimizer.zero_grad()
        with warnings.catch_warnings():
            # Sparse Adagrad makes tensors without checks, and says so at the first.
            warnings.simplefilter("ignore")
            pooled.backward(grad)  # type: ignore[no-untyped-call]
            self._optimizer.step()
