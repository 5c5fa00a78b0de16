"""What both readers share: options, metadata, and the checks before anything is written. No tensor data moves here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from twinproof.checkpoint.base import WriterBase
from twinproof.checkpoint.catalog import Catalog, Chunk, read_catalog
from twinproof.checkpoint.files import local_path
from twinproof.checkpoint.layout import torch_dtype
from twinproof.checkpoint.options import check_count
from twinproof.errors import MissingKeyError, PlanError, UnsupportedError

__all__ = ["ReaderBase"]


class _Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor as DCP wants them, made when a planner looks: most tensors of a shard folder never are."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._made: list[ChunkStorageMetadata] | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self._chunks]
        return self._made[index]


class UnreadMetadata(Metadata):
    """Stands for metadata that could not be read; any look at it raises the error."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data") and "error" in vars(self):
            raise self.error
        return super().__getattribute__(name)


class ReaderBase(StorageReader):
    """Constructor, metadata and checks of ``HuggingFaceStorageReader``; see the subclasses.

    Args:
        path: a folder (HF files with or without an index, or torch's shard folder), or one ``.safetensors`` file.
        thread_count: threads of this rank, also inside one file.
        cast: allow targets of another dtype, converted as ``Tensor.to`` does; else a mismatch raises.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1, *, cast: bool = False) -> None:
        super().__init__()
        self.path = local_path(path)
        self.thread_count = check_count(thread_count, "thread_count")
        self.cast = cast
        self.load_id = uuid.uuid4().hex
        self.catalog = Catalog()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can load from there: any local path."""
        return WriterBase.validate_checkpoint_id(checkpoint_id)

    @property
    def checkpoint_id(self) -> Path:
        """The folder or file."""
        return self.path

    @property
    def fs(self) -> FileSystem:
        """Torch's view of local files; every path of this reader is one."""
        return FileSystem()

    @property
    def storage_data(self) -> Catalog:
        """What was found, as a mapping of stored chunks; see ``Catalog``."""
        return self.catalog

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another load, from ``checkpoint_id`` where given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, "checkpoint_id")
        self.load_id = uuid.uuid4().hex
        self.catalog = Catalog()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read every header that the checkpoint consists of.

        Raises:
            FormatError, CorruptionError, FileNotFoundError. ``dcp.load`` keeps an error of this call as text alone, and
            asks again for one rank's metadata (``rank=``); what it gets then raises the error itself, with all that it
            carries, where the load is set up: inside ``CheckpointException.failures`` of that rank.
        """
        if "rank" in kwargs:
            try:
                return self._read_metadata()
            except Exception as error:
                return UnreadMetadata(error)
        return self._read_metadata()

    def _read_metadata(self) -> Metadata:
        self.catalog = read_catalog(self.path)
        tensors: dict[str, Any] = {}
        for name, record in self.catalog.tensors.items():
            # F6 has no torch dtype; it is listed so that a request for it fails by name, and only that.
            dtype = torch_dtype(record.dtype) or torch.uint8
            chunks: Any = _Chunks(record.chunks)
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(record.shape), chunks)
        return Metadata(
            state_dict_metadata=tensors, storage_data=self.catalog, storage_meta=StorageMeta(load_id=self.load_id)
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the catalog that read_metadata made. Raises what kept it from making one."""
        if isinstance(metadata, UnreadMetadata):
            raise metadata.error
        self.catalog = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add: every rank reads its own ranges."""
        return plans

    def chunk_of(self, index: MetadataIndex) -> Chunk:
        """The stored chunk that a read item names."""
        record = self.catalog.tensors.get(index.fqn)
        if record is None:
            raise MissingKeyError("not in the checkpoint", got=index.fqn, where=str(self.path))
        offset = tuple(index.offset or (0,) * len(record.shape))
        if (
            index.index is not None
            and index.index < len(record.chunks)
            and record.chunks[index.index].offsets == offset
        ):
            return record.chunks[index.index]
        found = [chunk for chunk in record.chunks if chunk.offsets == offset]
        if not found:
            raise PlanError("the checkpoint has no chunk at this offset", got=offset, where=index.fqn)
        return found[0]

    def targets(self, plan: LoadPlan, planner: LoadPlanner) -> list[tuple[ReadItem, torch.Tensor]]:
        """Every item with its target, all checked before any is written.

        Raises:
            UnsupportedError: a target without memory, or a stored dtype that torch lacks.
            PlanError: shapes or (without ``cast``) dtypes that differ, all at once.
        """
        result, wrong = [], {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self.catalog.tensors:
                expected = "a name of read_metadata, whose result set_up_storage_reader takes"
                raise MissingKeyError("not in the checkpoint", got=name, expected=expected, where=str(self.path))
            target = planner.resolve_tensor(item).detach()
            stored = torch_dtype(self.catalog.tensors[name].dtype)
            if stored is None or target.is_meta:
                got = self.catalog.tensors[name].dtype if stored is None else "meta target"
                raise UnsupportedError("this tensor cannot be loaded", got=got, where=self.catalog.where(name))
            if target.dtype != stored and not self.cast:
                wrong[name] = (target.dtype, stored)
            if target.size() != item.lengths:
                raise PlanError(
                    "target and read item differ in shape",
                    got=tuple(target.size()),
                    expected=tuple(item.lengths),
                    where=name,
                )
            result.append((item, target))
        if wrong:
            raise PlanError("dtypes differ, as (target, saved); cast=True converts", got=wrong, where=str(self.path))
        return result
