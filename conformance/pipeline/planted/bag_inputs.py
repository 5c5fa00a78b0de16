"""Faults that ``test_bag_inputs`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from conformance.pipeline.planted.planting import lookups
from twinproof.pipeline.jagged import Bags


@fault(kills="PIPE-064", at="TableBatchedEmbeddingBags._step")
def empty_step_not_counted(original: Any, module: Any, bags: Bags, grad: torch.Tensor) -> None:
    """A batch without ids is no step."""
    if bags.indices.numel():
        original(module, bags, grad)


@fault(kills="PIPE-040", at=lookups("mended"))
def bad_id_is_last_row(original: Any, engine: Any, bags: Bags, row_counts: Any) -> torch.Tensor:
    """A bad id reads the last row."""
    mended: torch.Tensor = original(engine, bags, row_counts)
    return torch.where(mended == bags.indices, mended, min(row_counts) - 1)


@fault(kills="PIPE-040", at=lookups("mended"))
def bad_id_mended_in_place(original: Any, engine: Any, bags: Bags, row_counts: Any) -> torch.Tensor:
    """Ids of the caller are changed."""
    return bags.indices.copy_(original(engine, bags, row_counts))


class _Silent:
    def warning(self, *args: Any) -> None:
        """Nothing."""


bad_id_not_logged = patched(
    "Warning says nothing.", swap("twinproof.pipeline.modules:logger", _Silent()), kills="PIPE-040"
)


@fault(kills="PIPE-068", at=lookups("pool"))
def strides_of_ids_ignored(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    """Ids are read as if contiguous."""
    packed = torch.as_strided(bags.indices, bags.indices.shape, (1,)).clamp(0, 5)
    result: torch.Tensor = original(engine, tables, features, Bags(packed, bags.offsets, bags.weights))
    return result


@fault(kills="PIPE-061", at="TableBatchedEmbeddingBags._pool")
def lookups_cached(original: Any, module: Any, bags: Bags) -> torch.Tensor:
    """Lookups read the tables of the first one."""
    seen = module.__dict__.setdefault("_cache", {})
    for index in range(len(module.tables)):
        seen.setdefault(index, module.weight(index).clone())
    kept = [module.weight(index).clone() for index in range(len(module.tables))]
    for index, weight in seen.items():
        module.weight(index).copy_(weight)
    result: torch.Tensor = original(module, bags)
    for index, weight in enumerate(kept):
        module.weight(index).copy_(weight)
    return result


@fault(kills="PIPE-104", at="twinproof.pipeline.modules:TableBatchedEmbeddingBags._check_offsets")
def bag_offsets_not_checked(original: Any, *args: Any, **options: Any) -> None:
    """Offsets that do not cut the ids are taken."""


weights_lost_where_mended = patched(
    "A batch with an id outside its table is looked up without its weights.",
    mutated(
        "twinproof.pipeline.modules:_check_now",
        "engine.mended(bags, row_counts), bags.offsets, bags.weights",
        "engine.mended(bags, row_counts), bags.offsets",
    ),
    kills="PIPE-434",
)
strided_weights_refused = patched(
    "Weights that are a strided view are refused where their table is cut by rows.",
    mutated("fastimpl.pipeline.exchange:AllToAll._segments", "else bags.weights.contiguous()", "else bags.weights"),
    kills="PIPE-439",
)
strided_offsets_refused = patched(
    "Offsets that are a strided view are refused where a table is cut by rows.",
    mutated("fastimpl.pipeline.exchange:AllToAll._segments", "bags.offsets.contiguous()", "bags.offsets"),
    kills="PIPE-439",
)
names_by_table = patched(
    "Table-batched lookups name the table that stands where the feature does.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags.checked",
        "[self.tables[table].name for table in self.feature_tables]",
        "[table.name for table in self.tables]",
    ),
    kills="PIPE-626",
)
names_of_pooled_by_table = patched(
    "A collection names the table that stands where the feature does.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingBagCollection._looked_up",
        "self._feature_tables), strict=True)\n",
        "self._feature_tables), strict=True)\n    names = [table.name for table in self._configs] * 4\n",
    ),
    kills="PIPE-626",
)
ids_of_a_store_checked = patched(
    "Ids of a key-value table are checked as those of the others.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._local_bags",
        "-1 if self.plan[t].rule.is_stored else ",
        "",
    ),
    kills="PIPE-626",
)
