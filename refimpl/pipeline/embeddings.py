"""Collections of embedding tables with dense gradients, and weights of ids by their position in the bag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from refimpl.errors import ConfigError, IdRangeError, MissingKeyError
from refimpl.optimizers import Hyper
from refimpl.pipeline.bags import TableBatchedEmbeddingBags, check_bounds, initial_weight
from refimpl.pipeline.config import EmbeddingBagConfig, FusedOptimizer, check_tables, embedding_names
from refimpl.pipeline.data import KeyedJaggedTensor, KeyedTensor
from refimpl.pipeline.eager import eagerly
from refimpl.pipeline.jagged import Bags
from refimpl.pipeline.selection import select

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionBase",
    "FeatureProcessedEmbeddingBagCollection",
    "PositionWeightedModuleCollection",
]


class _Pooled(torch.autograd.Function):
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
        wide = [EmbeddingBagConfig(**{**vars(table), "data_type": torch.float32}) for table in tables]
        sums = ctx.bags_type(wide, optimizer=FusedOptimizer("sgd"), weights=zeros)
        sums._update(ctx.bags, grad, Hyper(-1.0))
        dense = [sums.weight(i).to(table.data_type) for i, table in enumerate(tables)]
        return None, None, None, weights, *dense


class _Table(torch.nn.Module):
    def __init__(self, config: EmbeddingBagConfig, device: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(initial_weight(config, device))


class EmbeddingBagCollectionBase(torch.nn.Module):
    """Several tables on one device, whose gradients are dense: torchrec's ``EmbeddingBagCollection``.

    Args:
        tables: their configurations.
        is_weighted: batches carry per-sample weights, which get a gradient where they require one.
        device: of the tables; "meta" makes no memory, for a collection that will be sharded.
        bounds_check: see ``TableBatchedEmbeddingBags``.

    Parameters are named ``embedding_bags.{table}.weight``.
    """

    bags_type: Any

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: Any = None,
        *,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        self._configs, self._is_weighted, self.bounds_check = check_tables(tables), is_weighted, bounds_check
        self.embedding_bags = torch.nn.ModuleDict({table.name: _Table(table, device) for table in tables})
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self._feature_tables = [table for table in self._configs for _ in table.feature_names]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return list(self._configs)

    def embedding_names(self) -> list[str]:
        """The keys of the result."""
        return embedding_names(self._configs)

    def is_weighted(self) -> bool:
        """Whether batches carry weights."""
        return self._is_weighted

    @eagerly
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature, float32 [B, D] side by side, by table, then feature.

        Raises:
            MissingKeyError: a feature that is not in the batch. ConfigError: no weights where they are due.
            IdRangeError: an id outside its table, under "fatal".
        """
        bags = select(features, self.feature_names, weighted=self._is_weighted)
        counts = [table.num_embeddings for table in self._feature_tables]
        names = [table.name for table in self._feature_tables]
        bags = check_bounds(bags, counts, names, self.bounds_check, self.bags_type)
        params = [self.embedding_bags[table.name].weight for table in self._configs]
        pooled = _Pooled.apply(self.bags_type, self._configs, bags, bags.weights, *params)  # type: ignore[no-untyped-call]
        return KeyedTensor(self.embedding_names(), [table.embedding_dim for table in self._feature_tables], pooled)


class EmbeddingBagCollection(EmbeddingBagCollectionBase):
    __doc__ = EmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags


class PositionWeightedModuleCollection(torch.nn.Module):
    """Weights of ids by position: the n-th id of a bag of feature f weighs ``position_weights.f[n]``, 1 at first.

    Args:
        max_feature_lengths: feature -> positions; a longer bag is refused.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: Any = None) -> None:
        super().__init__()
        if any(type(length) is not int or length < 1 for length in max_feature_lengths.values()):
            raise ConfigError("not lengths of bags", got=dict(max_feature_lengths), expected="ints >= 1")
        self.position_weights = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.ones(length, device=device))
                for name, length in max_feature_lengths.items()
            }
        )

    def weights(self, name: str, bags: Bags, position_weights: torch.Tensor) -> torch.Tensor:
        """Float32 [N] for the ids of one feature. Raises IdRangeError for a bag longer than the weights."""
        positions = torch.arange(bags.indices.numel(), device=bags.indices.device)
        positions = positions - bags.offsets[:-1].repeat_interleave(bags.offsets.diff())
        longest = int(bags.offsets.diff().max()) if bags.offsets.numel() > 1 else 0
        if longest > position_weights.numel():
            raise IdRangeError(
                "a bag longer than its weights", got=longest, expected=position_weights.numel(), where=name
            )
        return position_weights.index_select(0, positions)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with these weights. Raises MissingKeyError for a feature without weights."""
        missing = [key for key in features.keys() if key not in self.position_weights]  # noqa: SIM118
        if missing:
            raise MissingKeyError("no position weights", got=missing, expected=sorted(self.position_weights))
        weights = [
            self.weights(key, part.bags(), self.position_weights[key]) for key, part in features.to_dict().items()
        ]
        return KeyedJaggedTensor(features.keys(), features.values(), torch.cat(weights), lengths=features.lengths())


class FeatureProcessedEmbeddingBagCollection(torch.nn.Module):
    """A weighted collection whose weights a feature processor makes: torchrec's class, for position weights.

    Raises:
        ConfigError: a collection without weights, or features that have no processor.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollectionBase, feature_processors: PositionWeightedModuleCollection
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError("feature processors need a weighted collection", got=False, expected=True)
        missing = [n for n in embedding_bag_collection.feature_names if n not in feature_processors.position_weights]
        if missing:
            raise ConfigError("features without a processor", got=missing, where="feature_processors")
        self._embedding_bag_collection, self._feature_processors = embedding_bag_collection, feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Weights by position, then the collection."""
        names = list(dict.fromkeys(self._embedding_bag_collection.feature_names))
        picked = features.permute([features.keys().index(name) for name in names])
        result: KeyedTensor = self._embedding_bag_collection(self._feature_processors(picked))
        return result
