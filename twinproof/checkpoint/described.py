"""What DCP's planners are told of a checkpoint: chunks that are made when one looks, and metadata that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from twinproof.checkpoint.catalog import Chunk

__all__ = ["MetadataChunks", "UnreadMetadata"]


class MetadataChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor as DCP wants them, made when a planner looks: most tensors of a shard folder never are."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._made: list[ChunkStorageMetadata] | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        # Planners do this several times for each tensor; what a Sequence inherits asks for one index after the other.
        return iter(self._all())

    def _all(self) -> list[ChunkStorageMetadata]:
        if self._made is None:
            self._made = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self._chunks]
        return self._made


class UnreadMetadata(Metadata):
    """Stands for metadata that could not be read; any look at it raises the error."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            raise self.error
        return super().__getattribute__(name)
