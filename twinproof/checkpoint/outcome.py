"""What a step of a save reports: results for DCP, and failures that every rank must learn of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from twinproof.checkpoint.arrange import Arrangement
from twinproof.errors import DistributedError

__all__ = ["StorageInfo", "raise_first", "write_results"]


@dataclass(frozen=True)
class StorageInfo:
    """Where a written item lies: file name inside the folder, file offset of its tensor, bytes of this item."""

    relative_path: str
    offset: int
    length: int


def raise_first(failures: Sequence[BaseException | None]) -> None:
    """Raise DistributedError for the first rank that failed, with its error as the cause."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise DistributedError(
                "another rank failed", got=f"{type(failure).__name__}: {failure}", where=f"rank {rank}"
            ) from failure


def write_results(items: Sequence[WriteItem], arrangement: Arrangement | None) -> list[WriteResult]:
    """What DCP collects of each written item; only the coordinator knows the offsets."""
    results = []
    for item in items:
        size_bytes = item.tensor_storage_size() or 0
        tensor = arrangement.tensors[item.index.fqn] if arrangement is not None else None
        info = StorageInfo(tensor.file if tensor else "", tensor.begin if tensor else 0, size_bytes)
        results.append(WriteResult(index=item.index, size_in_bytes=size_bytes, storage_data=info))
    return results
