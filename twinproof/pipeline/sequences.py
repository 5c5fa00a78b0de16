"""Collections of embedding tables whose rows are looked up one by one: torchrec's EmbeddingCollection."""

# TorchScript resolves annotations by value: they are no strings here.
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from twinproof.errors import ConfigError, UnsupportedError
from twinproof.optimizers import Hyper
from twinproof.pipeline.bags import TableBatchedEmbeddingBags, check_bounds
from twinproof.pipeline.config import FusedOptimizer
from twinproof.pipeline.data import JaggedTensor, KeyedJaggedTensor
from twinproof.pipeline.eager import eagerly
from twinproof.pipeline.foreign import own_batch
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.selection import select_each
from twinproof.pipeline.tables import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    check_tables,
    embedding_names,
    initial_weight,
    initialized,
)

__all__ = ["EmbeddingCollection", "EmbeddingCollectionBase"]


class _Rows(torch.autograd.Function):
    """The rows of ids, as float32 [N, D]; the backward gives the table a dense gradient."""

    @staticmethod
    def forward(ctx: Any, bags_type: Any, table: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.bags_type, ctx.table, ctx.ids = bags_type, table, ids
        return weight.detach()[ids].to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        table, ids, grad = ctx.table, ctx.ids, grads[0].contiguous()
        # Each id is a bag of its own, and one step of -1 from zero is the sum: duplicates are added as in every lookup.
        zeros = torch.zeros(table.num_embeddings, table.embedding_dim, device=grad.device)
        parts = {"data_type": torch.float32, "feature_names": ["rows"], "name": table.name}
        wide = EmbeddingBagConfig(table.num_embeddings, table.embedding_dim, **parts)
        sums = ctx.bags_type([wide], optimizer=FusedOptimizer("sgd"), weights=[zeros])
        sums._update(Bags(ids, torch.arange(ids.numel() + 1, device=ids.device)), grad, Hyper(-1.0))
        return None, None, None, sums.weight(0).to(table.dtype)


class EmbeddingCollectionBase(torch.nn.Module):
    """Several tables of one width on one device, looked up row by row, with dense gradients: torchrec's class.

    Args:
        tables: their configurations, ours or torchrec's, all of one ``embedding_dim``.
        device: of the tables; "meta" makes no memory.
        need_indices: results carry the looked up ids as their weights.
        use_gather_select, use_gather_select_per_sharding: of sharded collections; taken at their defaults alone.
        bounds_check: see ``TableBatchedEmbeddingBags``.

    Parameters are named ``embeddings.{table}.weight``. A row's gradient is the sum over its occurrences by feature,
    sample and position. A model that torch.fx or TorchScript has taken over looks up by torch's own kernels.

    Raises:
        ConfigError: tables of different width, or that are to be pooled. UnsupportedError: what is refused.
    """

    bags_type: type[Any]
    __jit_unused_properties__ = ("device",)

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: Any = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Mapping[str, bool] | None = None,
        *,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        if use_gather_select or use_gather_select_per_sharding:
            raise UnsupportedError("use_gather_select is of sharded collections, which are not here", got=True)
        if any(hasattr(table, "pooling") for table in tables):
            raise ConfigError("rows are not pooled here", got="pooling", expected="EmbeddingConfig", where="tables")
        self._configs, self._need_indices = check_tables(tables, EmbeddingConfig), need_indices
        self.bounds_check = bounds_check
        widths = sorted({table.embedding_dim for table in self._configs})
        if len(widths) > 1:
            raise ConfigError("tables of one collection have one embedding_dim", got=widths, where="tables")
        self._embedding_dim = widths[0]
        self.embeddings = torch.nn.ModuleDict({table.name: _table_module(table, device) for table in self._configs})
        self.feature_names = [feature for table in self._configs for feature in table.feature_names]
        names = iter(embedding_names(self._configs))
        self._names_by_table = [list(table.feature_names) for table in self._configs]
        self._result_names = [[next(names) for _ in part] for part in self._names_by_table]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return list(self._configs)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the result, by table."""
        return [list(names) for names in self._result_names]

    def embedding_dim(self) -> int:
        """The width of all tables."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether results carry the ids."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """False: it is of sharded collections."""
        return False

    def use_gather_select_per_sharding(self) -> None:
        """None: it is of sharded collections."""
        return

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next(self.parameters()).device

    def reset_parameters(self) -> None:
        """Fill every table by its ``init_fn`` again; tables on "meta" have nothing to fill."""
        for table in self._configs:
            weight: Any = self.embeddings[table.name].weight
            if not weight.is_meta:
                initialized(table, weight)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Feature -> its bags of rows: values float32 [N, D], with the lengths of the batch.

        Args:
            features: a batch, ours or torchrec's, on the device of the tables.

        Raises:
            MissingKeyError: a feature that is not in the batch. IdRangeError: an id outside its table, under "fatal".
            ShapeError: values that are no ids.
        """
        if torch.jit.is_scripting():
            return self._by_torch(features)
        return self._looked_up(features)

    @eagerly
    def _looked_up(self, batch: Any) -> dict[str, JaggedTensor]:
        if isinstance(batch, torch.fx.Proxy):
            return self._by_torch(cast(KeyedJaggedTensor, batch))
        features = own_batch(batch)
        if features.values().is_meta:
            return self._by_torch(features)
        found: dict[str, JaggedTensor] = {}
        for table, names, keys in zip(self._configs, self._names_by_table, self._result_names, strict=True):
            bags = [
                check_bounds(part, [table.num_embeddings], [table.name], self.bounds_check, self.bags_type)
                for part in select_each(features, names)
            ]
            ids, weight = torch.cat([part.indices for part in bags]).to(torch.int64), self.embeddings[table.name].weight
            rows = _Rows.apply(self.bags_type, table, ids, weight)  # type: ignore[no-untyped-call]
            parts = torch.split(rows, [part.indices.numel() for part in bags])
            for name, key, values in zip(names, keys, parts, strict=True):
                mine = features[name]
                found[key] = JaggedTensor(values, mine.values() if self._need_indices else None, mine.lengths())
        return found

    def _by_torch(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        parts = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for i, table in enumerate(self.embeddings.values()):
            for j, name in enumerate(self._names_by_table[i]):
                part = parts[name]
                ids = part.values() if self._need_indices else None
                found[self._result_names[i][j]] = JaggedTensor(table(part.values()).float(), ids, part.lengths())
        return found


def _table_module(table: EmbeddingConfig, device: Any) -> torch.nn.Embedding:
    """The table as torch's module, which torch's compilers know."""
    return torch.nn.Embedding(table.num_embeddings, table.embedding_dim, _weight=initial_weight(table, device))


class EmbeddingCollection(EmbeddingCollectionBase):
    __doc__ = EmbeddingCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags
