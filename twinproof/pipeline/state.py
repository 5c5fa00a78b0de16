"""Sharded tables as torch's distributed checkpoint sees them, and the way back.

A table is saved whole under one name, whatever the plan: each rank hands out its own rows and columns, so that another
plan, or another number of ranks, reads what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from twinproof.errors import ShapeError, UnsupportedError

__all__ = ["TableShard", "copy_into"]


class TableShard(torch.Tensor):
    """This rank's part, [r, c] at (row, column), of a global [E, D] tensor. Its shape is the global one.

    ``to_local()`` is the part itself, not a copy, or None on a rank that has none; other torch operations are refused,
    for they would need the whole. Save and load it through ``torch.distributed.checkpoint``.
    """

    _local: torch.Tensor | None
    _origin: tuple[int, int]

    @staticmethod
    def make(
        shape: tuple[int, int], dtype: torch.dtype, local: torch.Tensor | None, origin: tuple[int, int] = (0, 0)
    ) -> TableShard:
        """A part of a tensor of this global shape and dtype."""
        made: Any = torch.Tensor._make_wrapper_subclass(TableShard, shape, dtype=dtype, device=torch.device("cpu"))
        made._local, made._origin = local, origin
        result: TableShard = made
        return result

    def to_local(self) -> torch.Tensor | None:
        """The part, itself and not a copy."""
        return self._local

    @property
    def origin(self) -> tuple[int, int]:
        """Row and column at which the part begins."""
        return self._origin

    def __deepcopy__(self, memo: Any) -> TableShard:
        local = None if self._local is None else self._local.clone()
        return TableShard.make((self.shape[0], self.shape[1]), self.dtype, local, self._origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = None if self._local is None else tuple(self._local.shape)
        return f"TableShard(shape={tuple(self.shape)}, dtype={self.dtype}, local={local} at {self._origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise UnsupportedError("a part of a table, not the table: use to_local()", got=str(func), where="TableShard")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._local is None:
            return []
        return [ChunkStorageMetadata(torch.Size(self._origin), torch.Size(self._local.shape))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert self._local is not None
        return self._local


def copy_into(target: TableShard, value: Any, where: str) -> None:
    """Fill the part from a whole tensor, or from a part at the same place, which may be the very same memory.

    Raises:
        ShapeError: another shape, place or dtype. UnsupportedError: not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, where=where)
    if tuple(value.shape) != tuple(target.shape) or value.dtype != target.dtype:
        got, expected = (tuple(value.shape), value.dtype), (tuple(target.shape), target.dtype)
        raise ShapeError("not this table", got=got, expected=expected, where=where)
    local, (row, column) = target.to_local(), target.origin
    if isinstance(value, TableShard):
        source = value.to_local()
        places = [
            None if part is None else (at, tuple(part.shape))
            for part, at in ((source, value.origin), (local, target.origin))
        ]
        if places[0] != places[1]:
            raise ShapeError("a part at another place", got=places[0], expected=places[1], where=where)
    elif local is not None:
        source = value[row : row + local.shape[0], column : column + local.shape[1]]
    if local is not None and source is not None and source.data_ptr() != local.data_ptr():
        local.copy_(source)
