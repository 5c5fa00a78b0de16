"""Faults that ``test_collections`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from twinproof.pipeline.config import EmbeddingConfig


@fault(kills="PIPE-224", at="twinproof.pipeline.modules:_Rows.backward")
def row_gradient_twice(original: Any, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of some rows are added twice."""
    *none, dense = original(ctx, *grads)
    return (*none, dense * (1 + (dense.abs().amax(1, keepdim=True) > 1)))


@fault(kills="PIPE-225", at="twinproof.pipeline.modules:check_tables")
def other_tables_dropped(original: Any, given: Any, kind: Any) -> Any:
    """Tables behind the first are dropped."""
    return original(given[:1] if kind is EmbeddingConfig else given, kind)


@fault(kills="PIPE-226", at="twinproof.pipeline.jagged:KeyedMoves._with_weights")
def processors_weigh_one(original: Any, batch: Any, weights: torch.Tensor) -> Any:
    """Processors by name weigh everything 1."""
    return original(batch, torch.ones_like(weights))


@fault(kills="PIPE-227", at="twinproof.pipeline.modules:EmbeddingBagCollection._looked_up")
def traced_collections_differ(original: Any, module: Any, batch: Any) -> Any:
    """A collection gives half of what it gives when traced."""
    found = original(module, batch)
    if isinstance(batch, torch.fx.Proxy):
        return found
    return type(found)(found.keys(), found.length_per_key(), found.values() * 0.5)


@fault(kills="PIPE-228", at="twinproof.pipeline.modules:EmbeddingBagCollection._on_meta")
def one_row_on_meta(original: Any, module: Any, features: Any) -> Any:
    """Batches on meta have one sample."""
    found = original(module, features)
    return type(found)(found.keys(), found.length_per_key(), found.values()[:1])


@fault(kills="PIPE-229", at="twinproof.pipeline.batches:own_batch")
def foreign_ids_turned(original: Any, batch: Any) -> Any:
    """Ids of other libraries' batches are read backwards."""
    found = original(batch)
    if found is batch:
        return found
    return type(found)(found.keys(), found.values().flip(0), found.weights_or_none(), found.lengths())


@fault(kills="PIPE-230", at="twinproof.pipeline.batches:_of_nested")
def nested_under_other_names(original: Any, parts: Any) -> Any:
    """Nested tensors change their names."""
    return original(dict(zip(parts, reversed(parts.values()), strict=True)))


nested_of_one_size = patched(
    "Nested tensors are taken for features of equally many bags, whatever each has.",
    mutated("twinproof.pipeline.batches:_of_nested", "stride_per_key_per_rank=ranks", "stride_per_key_per_rank=None"),
    kills="PIPE-403",
)
weighted_without_inverse_indices = patched(
    "Weights by position come without the inverse indices of the batch.",
    mutated("twinproof.pipeline.modules:_weighted_batch", "features.inverse_indices_or_none()", "None"),
    kills="PIPE-226",
)
indices_as_given = patched(
    "Indices of results are those of the batch, whatever row was read.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingCollection._looked_up", "part.indices.to(", "features[name].values().to("
    ),
    kills="PIPE-499",
)


names_are_the_collections = patched(
    "A result's names are the list that its collection makes all results with.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingBagCollection._looked_up",
        "list(self._embedding_names)",
        "self._embedding_names",
    ),
    mutated("twinproof.pipeline.batches:KeyedTensor.__init__", "= list(keys)", "= keys"),
    kills="PIPE-529",
)
names_are_the_sharded_collections = patched(
    "A result's names are the list that its sharded collection makes all results with.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.output_dist",
        "list(self._embedding_names), widths, exchanged",
        "self._embedding_names, widths, exchanged",
    ),
    mutated("twinproof.pipeline.batches:KeyedTensor.__init__", "= list(keys)", "= keys"),
    kills="PIPE-529",
)
no_parts_of_no_features = patched(
    "A batch without features cannot be split.",
    mutated("twinproof.pipeline.batches:KeyedCuts.split", "segments or [0]", "segments"),
    kills="PIPE-529",
)

halves_of_scripted_rows = patched(
    "A traced collection of rows gives them in the dtype of the table.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingCollection._by_torch",
        "table(part.values()).float()",
        "table(part.values())",
    ),
    kills="PIPE-538",
)
features_as_others_say = patched(
    "A traced collection of pooled rows has the features that a configuration names.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingBagCollection.__init__",
        "self._names_by_table = [list(table.feature_names) for table in self._configs]",
        "self._names_by_table = [list(table.feature_names) for table in tables]",
    ),
    kills="PIPE-620",
)
rows_as_others_say = patched(
    "A collection of rows has the features that a configuration names.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingCollection.__init__",
        "self._names_by_table = [list(table.feature_names) for table in self._configs]",
        "self._names_by_table = [list(table.feature_names) or ['t0'] for table in tables]",
    ),
    kills="PIPE-620",
)
rows_of_samples_spread = patched(
    "A traced lookup spreads the rows of features that have the samples of the batch.",
    mutated(
        "twinproof.pipeline.batches:KeyedSizes._over_batch",
        "if inverse is None or not self.variable_stride_per_key():",
        "if inverse is None:",
    ),
    kills="PIPE-642",
)
rows_of_features_traced = patched(
    "A traced lookup gives rows of each feature's own samples.",
    mutated(
        "twinproof.pipeline.batches:KeyedSizes._over_batch",
        "if inverse is None or not self.variable_stride_per_key():",
        "if inverse is not None or not self.variable_stride_per_key():",
    ),
    kills="PIPE-642",
)

looked_up_where_exported = patched(
    "An export goes through the library's own lookup, whose operators look at numbers.",
    mutated("twinproof.pipeline.modules:EmbeddingBagCollection.forward", "torch.compiler.is_exporting()", "False"),
    kills="PIPE-669",
)
weights_of_another_number = patched(
    "An export is not told that each id has a weight.",
    mutated("twinproof.pipeline.jagged:as_many", "weights is not None", "weights is None"),
    kills="PIPE-669",
)
sizes_where_exported = patched(
    "An export asks whether features are of one size.",
    mutated("twinproof.pipeline.jagged:cut_sizes", "not torch.compiler.is_exporting()", "True"),
    kills="PIPE-669",
)
