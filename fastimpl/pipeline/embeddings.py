"""Collections with dense gradients, over the lookups in C++."""

from __future__ import annotations

from fastimpl.pipeline.bags import TableBatchedEmbeddingBags
from refimpl.pipeline.embeddings import EmbeddingBagCollectionBase

__all__ = ["EmbeddingBagCollection"]


class EmbeddingBagCollection(EmbeddingBagCollectionBase):
    __doc__ = EmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags
