"""Collections with dense gradients, over the lookups in C++."""

from __future__ import annotations

from fastimpl.pipeline.bags import TableBatchedEmbeddingBags
from twinproof.pipeline.embeddings import EmbeddingBagCollectionBase
from twinproof.pipeline.sequences import EmbeddingCollectionBase

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class EmbeddingBagCollection(EmbeddingBagCollectionBase):
    __doc__ = EmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags


class EmbeddingCollection(EmbeddingCollectionBase):
    __doc__ = EmbeddingCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags
