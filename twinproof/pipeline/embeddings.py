"""Collections of embedding tables with dense gradients, pooled by bag: torchrec's EmbeddingBagCollection."""

# TorchScript resolves annotations by value: they are no strings here.
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from twinproof.errors import ConfigError
from twinproof.optimizers import Hyper
from twinproof.pipeline.bags import TableBatchedEmbeddingBags, check_bounds
from twinproof.pipeline.config import FusedOptimizer
from twinproof.pipeline.data import KeyedJaggedTensor, KeyedTensor
from twinproof.pipeline.eager import eagerly
from twinproof.pipeline.foreign import own_batch
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.selection import select
from twinproof.pipeline.tables import EmbeddingBagConfig, check_tables, embedding_names, initial_weight, initialized

__all__ = ["EmbeddingBagCollection", "EmbeddingBagCollectionBase", "Pooled", "table_module"]


class Pooled(torch.autograd.Function):
    """Pooled rows of several weights; the backward gives each a dense gradient."""

    @staticmethod
    def forward(ctx: Any, bags_type: Any, tables: Any, bags: Bags, weights: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.kernels = bags_type(
            tables, optimizer=FusedOptimizer("sgd"), weights=[param.detach().contiguous() for param in params]
        )
        ctx.bags, ctx.bags_type = bags, bags_type
        pooled: torch.Tensor = ctx.kernels._pool(bags)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad, tables = grads[0].contiguous(), ctx.kernels.tables
        weights = ctx.kernels._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[3] else None
        # Duplicates are summed as in every lookup: one step of -1 from zero is the sum itself.
        zeros = [torch.zeros_like(ctx.kernels.weight(i), dtype=torch.float32) for i in range(len(tables))]
        wide = [replace(table, data_type=torch.float32) for table in tables]
        sums = ctx.bags_type(wide, optimizer=FusedOptimizer("sgd"), weights=zeros)
        sums._update(ctx.bags, grad, Hyper(-1.0))
        dense = [sums.weight(i).to(table.dtype) for i, table in enumerate(tables)]
        return None, None, None, weights, *dense


def table_module(table: EmbeddingBagConfig, device: Any) -> torch.nn.EmbeddingBag:
    """The table as torch's module, which torch's compilers know."""
    rows, columns = table.num_embeddings, table.embedding_dim
    weight, mode = initial_weight(table, device), "mean" if table.is_mean else "sum"
    return torch.nn.EmbeddingBag(rows, columns, mode=mode, include_last_offset=True, _weight=weight)


class EmbeddingBagCollectionBase(torch.nn.Module):
    """Several tables on one device, whose gradients are dense: torchrec's ``EmbeddingBagCollection``.

    Args:
        tables: their configurations, ours or torchrec's.
        is_weighted: batches carry per-sample weights, which get a gradient where they require one.
        device: of the tables; "meta" makes no memory, for a collection that will be sharded.
        bounds_check: see ``TableBatchedEmbeddingBags``.

    Parameters are named ``embedding_bags.{table}.weight``. A model that torch.fx or TorchScript has taken over looks up
    by torch's own kernels: the same sums, rounded in their order.
    """

    bags_type: type[Any]
    __jit_unused_properties__ = ("device",)

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: Any = None,
        *,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        self._configs, self._is_weighted = check_tables(tables, EmbeddingBagConfig), is_weighted
        self.bounds_check = bounds_check
        self.embedding_bags = torch.nn.ModuleDict({table.name: table_module(table, device) for table in self._configs})
        self.feature_names = [feature for table in self._configs for feature in table.feature_names]
        self._feature_tables = [table for table in self._configs for _ in table.feature_names]
        self._names_by_table = [list(table.feature_names) for table in self._configs]
        self._embedding_names = embedding_names(self._configs)
        self._widths = [table.embedding_dim for table in self._feature_tables]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return list(self._configs)

    def embedding_names(self) -> list[str]:
        """The keys of the result."""
        return embedding_names(self._configs)

    def is_weighted(self) -> bool:
        """Whether batches carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next(self.parameters()).device

    def reset_parameters(self) -> None:
        """Fill every table by its ``init_fn`` again; tables on "meta" have nothing to fill."""
        for table in self._configs:
            weight: Any = self.embedding_bags[table.name].weight
            if not weight.is_meta:
                initialized(table, weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature, float32 [B, D] side by side, by table, then feature.

        Args:
            features: a batch, ours or torchrec's, on the device of the tables.

        Raises:
            MissingKeyError: a feature that is not in the batch. ConfigError: no weights where they are due.
            IdRangeError: an id outside its table, under "fatal". ShapeError: values that are no ids.
        """
        if torch.jit.is_scripting():
            return self._by_torch(features)
        return self._looked_up(features)

    @eagerly
    def _looked_up(self, batch: Any) -> KeyedTensor:
        if isinstance(batch, torch.fx.Proxy):
            return self._by_torch(cast(KeyedJaggedTensor, batch))
        features = own_batch(batch)
        params: list[Any] = [self.embedding_bags[table.name].weight for table in self._configs]
        if features.values().is_meta or params[0].is_meta:
            return self._on_meta(features, params[0])
        bags = select(features, self.feature_names, weighted=self._is_weighted)
        counts = [table.num_embeddings for table in self._feature_tables]
        names = [table.name for table in self._feature_tables]
        bags = check_bounds(bags, counts, names, self.bounds_check, self.bags_type)
        pooled = Pooled.apply(self.bags_type, self._configs, bags, bags.weights, *params)  # type: ignore[no-untyped-call]
        return KeyedTensor(self._embedding_names, self._widths, pooled)

    def _on_meta(self, features: KeyedJaggedTensor, weight: torch.Tensor) -> KeyedTensor:
        if not (features.values().is_meta and weight.is_meta):
            found = (features.device(), weight.device)
            raise ConfigError("a batch and tables of which one is on meta", got=found, where="EmbeddingBagCollection")
        pooled = torch.empty(features.stride(), sum(self._widths), device="meta")
        return KeyedTensor(self._embedding_names, self._widths, pooled)

    def _by_torch(self, features: KeyedJaggedTensor) -> KeyedTensor:
        parts = features.to_dict()
        pooled: list[torch.Tensor] = []
        for i, table in enumerate(self.embedding_bags.values()):
            for name in self._names_by_table[i]:
                part = parts[name]
                weights = part.weights() if self._is_weighted else None
                pooled.append(table(part.values(), part.offsets(), weights).float())
        return KeyedTensor(self._embedding_names, self._widths, torch.cat(pooled, dim=1))


class EmbeddingBagCollection(EmbeddingBagCollectionBase):
    __doc__ = EmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags
