"""What a save or a load takes from a state dict: planners, copies for asynchronous saves, checksums of replicas.

The planners do what DCP's defaults lack: packed strided shards, complete lists of errors, reported extras. The default
planners work with our writers and readers too.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from twinproof.checkpoint.catalog import Box
from twinproof.checkpoint.format import as_bits, buffer_of, check_storable
from twinproof.errors import ConfigError, DistributedError, MissingKeyError, PlanError

__all__ = [
    "HuggingFaceLoadPlanner",
    "HuggingFaceSavePlanner",
    "Stageable",
    "checksums",
    "compare_checksums",
    "local_boxes",
    "staged",
]

logger = logging.getLogger("twinproof.checkpoint")


def _indices(size: int, dim: int, tensor: DTensor) -> torch.Tensor:
    # Which indices of one dimension are local: apply each placement to 0..size-1, outermost mesh dimension first.
    held = torch.arange(size)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for mesh_dim, placement in enumerate(tensor.placements):
        if not placement.is_shard(dim) and not _is_strided(placement, dim):
            continue
        ways, mine = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # A strided shard cuts into split_factor parts first and takes its share of every part.
        parts = torch.chunk(held, getattr(placement, "split_factor", 1)) if held.numel() else ()
        chosen = [share for part in parts for share in torch.chunk(part, ways)[mine : mine + 1]]
        held = torch.cat(chosen) if chosen else held[:0]
    return held


def _is_strided(placement: Any, dim: int) -> bool:
    return type(placement).__name__ == "_StridedShard" and placement.dim == dim


def _runs(indices: torch.Tensor) -> list[tuple[int, int]]:
    # Consecutive indices as (first, count).
    if not indices.numel():
        return []
    cuts = torch.nonzero(indices[1:] - indices[:-1] != 1).flatten().tolist()
    starts = [0, *(c + 1 for c in cuts)]
    ends = [*starts[1:], indices.numel()]
    return [(int(indices[a]), b - a) for a, b in zip(starts, ends, strict=True)]


def local_boxes(tensor: DTensor) -> list[tuple[Box, tuple[int, ...]]]:
    """Rectangles of the global tensor that this rank holds, each with its offsets inside the local tensor."""
    result: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
    for dim, size in enumerate(tensor.shape):
        runs = _runs(_indices(size, dim, tensor))
        positions = [sum(count for _, count in runs[:i]) for i in range(len(runs))]
        result = [
            ([*o, first], [*z, count], [*p, position])
            for o, z, p in result
            for (first, count), position in zip(runs, positions, strict=True)
        ]
    return [(Box(tuple(o), tuple(z)), tuple(p)) for o, z, p in result]


def _is_packed(value: Any) -> bool:
    return (
        isinstance(value, DTensor)
        and value.device_mesh.get_coordinate() is not None
        and any(type(p).__name__ == "_StridedShard" for p in value.placements)
        and len(local_boxes(value)) > 1
    )


def _part(tensor: DTensor, offset: torch.Size | None) -> torch.Tensor:
    for box, position in local_boxes(tensor):
        if box.offsets == tuple(offset or ()):
            local = tensor.to_local()
            return local[tuple(slice(p, p + s) for p, s in zip(position, box.sizes, strict=True))]
    raise PlanError("this rank holds no such chunk", got=tuple(offset or ()), where="HuggingFaceSavePlanner")


class HuggingFaceSavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner that also saves shards made of several disjoint blocks (packed QKV or expert weights).

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank: as there.
        dedup_replicated_tensors, enable_plan_caching: only their defaults.

    Raises:
        ConfigError: what this planner does not do.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        if enable_plan_caching:
            raise ConfigError(
                "this planner does not cache plans", got=True, expected=False, where="enable_plan_caching"
            )
        if dedup_replicated_tensors is not None:
            # Torch takes it, warns, and does nothing with it.
            got, expected = dedup_replicated_tensors, "dedup_save_to_lowest_rank"
            raise ConfigError(
                "replicas are always stored once", got=got, expected=expected, where="dedup_replicated_tensors"
            )
        super().__init__(flatten_state_dict, flatten_sharded_tensors, None, dedup_save_to_lowest_rank)

    def create_local_plan(self) -> SavePlan:
        """One write item per block of a packed shard; everything else as torch plans it."""
        packed = {fqn: value for fqn, value in self.state_dict.items() if _is_packed(value)}
        plan = super().create_local_plan()
        if not packed:
            return plan
        items = [item for item in plan.items if item.index.fqn not in packed]
        for fqn, value in packed.items():
            properties = TensorProperties.create_from_tensor(value.to_local())
            for box, _ in local_boxes(value):
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk=chunk, properties=properties, size=value.size())
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The local data of a write item."""
        value: Any = self.state_dict.get(index.fqn)
        return _part(value, index.offset) if _is_packed(value) else super().lookup_object(index)


class HuggingFaceLoadPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner that checks every name and shape before anything is read.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as there.
        allow_partial_load: leave targets untouched whose names the checkpoint lacks; else raise.
        strict: the same, the other way round; None follows ``allow_partial_load``.

    Attributes:
        missing_keys: names in the target that the checkpoint lacks.
        unexpected_keys: names in the checkpoint that the target lacks; logged as one warning.

    Raises:
        ConfigError: ``strict`` together with ``allow_partial_load``.
        MissingKeyError: all missing names at once, with ``strict``.
        PlanError: shapes that differ, all at once.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool | None = None,
    ) -> None:
        if strict and allow_partial_load:
            raise ConfigError("a strict load is no partial one", got="both", expected="one", where="allow_partial_load")
        self.strict = not allow_partial_load if strict is None else strict
        super().__init__(flatten_state_dict, flatten_sharded_tensors, not self.strict)
        self.missing_keys: list[str] = []
        self.unexpected_keys: list[str] = []

    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank's part of the state dict."""
        saved: dict[str, Any] = self.metadata.state_dict_metadata if self.metadata is not None else {}
        self.missing_keys = sorted(self.state_dict.keys() - saved.keys())
        self.unexpected_keys = sorted(saved.keys() - self.state_dict.keys())
        if self.unexpected_keys:
            logger.warning(
                "the checkpoint holds %d names that were not asked for: %s",
                len(self.unexpected_keys),
                ", ".join(self.unexpected_keys[:20]),
            )
        if self.strict and self.missing_keys:
            raise MissingKeyError("names are not in the checkpoint", got=self.missing_keys, where="state_dict")
        wrong = {
            fqn: (tuple(value.size()), tuple(saved[fqn].size))
            for fqn, value in self.state_dict.items()
            if fqn in saved and isinstance(value, torch.Tensor) and value.size() != saved[fqn].size
        }
        if wrong:
            raise PlanError("shapes differ, as (target, saved)", got=wrong, where="state_dict")
        packed = {fqn for fqn, value in self.state_dict.items() if fqn in saved and _is_packed(value)}
        plan = super().create_local_plan()
        plan.items = [item for item in plan.items if item.dest_index.fqn not in packed]
        for fqn in sorted(packed):
            plan.items += self._packed_items(fqn, saved[fqn])
        return plan

    def _packed_items(self, fqn: str, saved: TensorStorageMetadata) -> list[ReadItem]:
        boxes = local_boxes(self.state_dict[fqn])
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in boxes]
        return create_read_items_for_chunk_list(fqn, saved, chunks)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local memory that a read item fills."""
        value = self.state_dict[index.fqn]
        return _part(value, index.offset) if _is_packed(value) else super().lookup_tensor(index)


# What an asynchronous save reads while training goes on. Torch's own stager copies the storages of tensors whose
# data_ptr() is not 0 and takes new, unfilled memory for all others; conjugated views lose their conjugation. Here a
# tensor is copied by its value, or handed on.


@runtime_checkable
class Stageable(Protocol):
    """A tensor that knows a form of itself which later writes do not change."""

    def staged(self, memo: dict[int, Any]) -> torch.Tensor:
        """That form; ``memo`` belongs to one state dict, so that what its tensors share is taken once."""
        ...


def staged(state_dict: Any) -> Any:
    """The same structure with tensors on the CPU that nothing else writes to.

    Tensors that are one memory stay one. What the format refuses (meta, sparse, quantized tensors, objects) is handed
    on, so that the plan refuses it on every rank.
    """
    return _staged(state_dict, {}, {})


def _staged(value: Any, seen: dict[Any, Any], memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, seen, memo)
    if isinstance(value, Mapping):
        return {key: _staged(each, seen, memo) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_staged(each, seen, memo) for each in value)
    return copy.deepcopy(value)


def _tensor(value: torch.Tensor, seen: dict[Any, Any], memo: dict[int, Any]) -> torch.Tensor:
    key = _identity(value)
    if key not in seen:
        # The original stays alive as long as its key counts.
        seen[key] = (_copied(value, memo), value)
    result: torch.Tensor = seen[key][0]
    return result


def _identity(value: torch.Tensor) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return id(value)
    flags = value.is_conj(), value.is_neg(), value.dtype, value.device
    return (value.data_ptr(), tuple(value.shape), value.stride(), flags) if value.data_ptr() else id(value)


def _own_names(cls: type) -> set[str]:
    return {name for each in cls.__mro__ if each not in torch.Tensor.__mro__ for name in vars(each)}


def _attributes_copied(value: torch.Tensor) -> torch.Tensor:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged_dict: Any = stager.stage({"value": value})
        result: torch.Tensor = staged_dict["value"]
        return result
    finally:
        stager.close()


def _copied(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if isinstance(value, Stageable):
        return value.staged(memo)
    if isinstance(value, ShardedTensor):
        return copy.deepcopy(value) if value.device.type == "cpu" else value.cpu()
    if hasattr(value, "__create_write_items__") and not isinstance(value, DTensor):
        # A tensor that plans its own save knows how to copy itself, or keeps what it plans in attributes.
        return copy.deepcopy(value) if "__deepcopy__" in _own_names(type(value)) else _attributes_copied(value)
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return value
    return value.detach().to("cpu", copy=True)


# Whether chunks that several ranks hold have the same bytes: without the check one of them is stored.

ChunkKey = tuple[str, tuple[int, ...]]


def checksums(items: Sequence[WriteItem], planner: SavePlanner) -> dict[ChunkKey, int]:
    """CRC-32 of every local chunk's bytes. One chunk is copied at a time, where its memory is not one row."""
    sums = {}
    for item in items:
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        check_storable(value, item.index.fqn)
        data = as_bits(value).cpu().contiguous()
        sums[item.index.fqn, tuple(item.index.offset or ())] = zlib.crc32(buffer_of(data))
    return sums


def compare_checksums(everyone: Sequence[Mapping[ChunkKey, int]]) -> None:
    """Raise DistributedError, the same on every rank, for the first chunk on which two ranks differ."""
    seen: dict[ChunkKey, tuple[int, int]] = {}
    for rank, sums in enumerate(everyone):
        for chunk, value in sums.items():
            first = seen.setdefault(chunk, (rank, value))
            if first[1] != value:
                raise DistributedError(
                    "replicas differ", got=f"rank {rank}", expected=f"the bytes of rank {first[0]}", where=chunk[0]
                )
