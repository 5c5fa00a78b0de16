"""Planners that do what DCP's defaults lack: packed strided shards, complete lists of errors, reported extras.

The default planners work with our writers and readers too, but for packed shards: torch takes one that is several
blocks for one block, saves none of them, and fills it with the rows of others.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from twinproof.checkpoint.catalog import Box, check_tiling
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    MissingKeyError,
    PlanError,
    UnsupportedError,
    check_flags,
)

__all__ = [
    "FillingPlanner",
    "HuggingFaceLoadPlanner",
    "HuggingFaceSavePlanner",
    "PartOfRows",
    "check_agreed",
    "check_blocks",
    "check_covered",
    "check_parts",
    "check_planned",
    "local_boxes",
]

logger = logging.getLogger("twinproof.checkpoint")


_Run = tuple[int, int]  # Consecutive indices of one dimension: the first, and how many.


def _runs(size: int, dim: int, tensor: DTensor) -> list[_Run]:
    # Which indices of one dimension are local: apply each placement to 0..size-1, outermost mesh dimension first.
    held = [(0, size)] if size else []
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for mesh_dim, placement in enumerate(tensor.placements):
        if not placement.is_shard(dim) and not _is_strided(placement, dim):
            continue
        ways, mine = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # A strided shard cuts into split_factor parts first and takes its share of every part, as torch.chunk does.
        count = sum(length for _, length in held)
        part = -(-count // getattr(placement, "split_factor", 1))
        shares = []
        for begin in range(0, count, part) if count else ():
            end = min(begin + part, count)
            share = -(-(end - begin) // ways)
            shares.append((min(begin + mine * share, end), min(begin + (mine + 1) * share, end)))
        held = _taken(held, shares)
    return held


def _taken(held: Sequence[_Run], shares: Iterable[tuple[int, int]]) -> list[_Run]:
    """What lies at positions [low, high) of these runs, one behind the other; shares ascend."""
    result: list[_Run] = []
    rest, start = iter(held), 0
    first, count = next(rest, (0, 0))
    for low, high in shares:
        while low < high:
            if start + count <= low:
                start += count
                first, count = next(rest)
                continue
            upto, at = min(high, start + count), first + low - start
            if result and sum(result[-1]) == at:
                at, low = result[-1][0], low - result.pop()[1]
            result.append((at, upto - low))
            low = upto
    return result


def _is_strided(placement: Any, dim: int) -> bool:
    return type(placement).__name__ == "_StridedShard" and placement.dim == dim


def local_boxes(tensor: DTensor) -> list[tuple[Box, tuple[int, ...]]]:
    """Rectangles of the global tensor that this rank holds, each with its offsets inside the local tensor."""
    result: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
    for dim, size in enumerate(tensor.shape):
        runs = _runs(size, dim, tensor)
        positions = [0, *accumulate(count for _, count in runs)][: len(runs)]
        result = [
            ([*o, first], [*z, count], [*p, position])
            for o, z, p in result
            for (first, count), position in zip(runs, positions, strict=True)
        ]
    return [(Box(tuple(o), tuple(z)), tuple(p)) for o, z, p in result]


_Blocks = dict[tuple[int, ...], tuple[Box, tuple[int, ...]]]


class _PackedShards:
    """Shards made of several blocks, by name: their blocks by offsets, with their offsets in the local tensor.

    A planner asks for them once for each of its tensors' blocks, and they are found once a plan.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Blocks] = {}

    def blocks(self, fqn: str, value: Any) -> _Blocks:
        """Those of a shard; none of any other value."""
        if not isinstance(value, DTensor) or not any(type(p).__name__ == "_StridedShard" for p in value.placements):
            return {}
        if fqn not in self._known:
            found = local_boxes(value) if value.device_mesh.get_coordinate() is not None else []
            self._known[fqn] = {box.offsets: (box, at) for box, at in found} if len(found) > 1 else {}
        return self._known[fqn]

    def part(self, fqn: str, value: Any, offset: torch.Size | None) -> torch.Tensor | None:
        """The local memory of one block; None where a value is not made of several. Raises PlanError."""
        blocks, at = self.blocks(fqn, value), tuple(offset or ())
        if not blocks:
            return None
        if at not in blocks:
            raise PlanError("this rank holds no such chunk", got=at, expected="the offsets of one it holds", where=fqn)
        box, position = blocks[at]
        local: torch.Tensor = value.to_local()
        return local[tuple(slice(p, p + s) for p, s in zip(position, box.sizes, strict=True))]


# Of chunks that begin at one place torch keeps one, whatever they are: the others are gone before a writer is asked.


def check_agreed(everyone: Sequence[Sequence[WriteItem]]) -> None:
    """Demand that what ranks have under one name is one tensor; ``everyone``: all that each rank has, in rank order.

    Raises:
        PlanError: another shape, another dtype, or an object beside a tensor.
    """
    first: dict[str, tuple[tuple[torch.dtype, tuple[int, ...]] | None, int]] = {}
    for rank, items in enumerate(everyone):
        for item in items:
            data, name = item.tensor_data, item.index.fqn
            form = None if data is None else (data.properties.dtype, tuple(data.size))
            expected, seen = first.setdefault(name, (form, rank))
            if form != expected:
                raise PlanError(
                    "ranks disagree about a tensor",
                    got=f"{_form(form)} on rank {rank}",
                    expected=f"{_form(expected)} as on rank {seen}, or names of their own",
                    where=name,
                )


def _form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "an object" if form is None else f"{form[0]} {list(form[1])}"


def check_planned(item: WriteItem, value: torch.Tensor, *, any_dtype: bool = False) -> None:
    """Demand that the values of an item are what was planned: a DTensor may be made of parts that are not.

    Raises:
        PlanError: another shape, or another dtype.
    """
    data = item.tensor_data
    assert data is not None
    dtype = value.dtype if any_dtype else data.properties.dtype
    if tuple(value.shape) != tuple(data.chunk.sizes) or value.dtype != dtype:
        raise PlanError(
            "the data is not what was planned",
            got=f"{value.dtype} {list(value.shape)}",
            expected=f"{dtype} {list(data.chunk.sizes)}",
            where=item.index.fqn,
        )


class HuggingFaceSavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner that also saves shards made of several disjoint blocks (packed QKV or expert weights).

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank: as there.
        dedup_replicated_tensors, enable_plan_caching: only their defaults.

    Raises:
        ConfigError: what this planner does not do.
        PlanError: ranks have different tensors under one name, or parts of other shapes than the layout says.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        check_flags(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )
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
        self._shards = _PackedShards()

    def create_local_plan(self) -> SavePlan:
        """One write item per block of a packed shard; everything else as torch plans it."""
        self._shards = _PackedShards()
        packed = {fqn: value for fqn, value in self.state_dict.items() if self._shards.blocks(fqn, value)}
        plan = super().create_local_plan()
        if not packed:
            return plan
        items = [item for item in plan.items if item.index.fqn not in packed]
        for fqn, value in packed.items():
            properties = TensorProperties.create_from_tensor(value.to_local())
            for box, _ in self._shards.blocks(fqn, value).values():
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk=chunk, properties=properties, size=value.size())
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As torch makes it, of ranks that agree."""
        check_agreed([plan.items for plan in all_plans])
        result: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return result

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The local data of a write item."""
        part = self._shards.part(index.fqn, self.state_dict.get(index.fqn), index.offset)
        return super().lookup_object(index) if part is None else part

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As torch makes it, of data that has the planned shape: of others nobody could read a part."""
        if write_item.type != WriteItemType.BYTE_IO:
            check_planned(write_item, object, any_dtype=True)
        return super().transform_object(write_item, object)


class FillingPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner that fills packed shards by their blocks, and all of what is asked for; see ``check_covered``.

    Args:
        flatten_state_dict, flatten_sharded_tensors, allow_partial_load: as there.

    Raises:
        MissingKeyError: all names that the checkpoint lacks. PlanError: all shapes that differ.
    """

    # What an error says that is expected in the place of other names.
    _names = "names of the checkpoint"

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._shards = _PackedShards()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As torch does, with names of ShardedTensors of which this rank has no shard, and none that torch makes up.

        Torch leaves those out, and takes a checkpoint that has names which the targets lack for one of torch 2.3.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        found, paths = flatten_state_dict(state_dict) if self.flatten_state_dict else (state_dict, {})
        without = {n: v for n, v in found.items() if isinstance(v, ShardedTensor) and not v.local_shards()}
        self.state_dict.update(without)
        self.mappings.update({name: paths[name] for name in without if name in paths})
        # Torch puts None in the place of a mapping without entries in a list, and then misses it in the checkpoint.
        for name in self.state_dict.keys() - found.keys():
            del self.state_dict[name]

    def create_local_plan(self) -> LoadPlan:
        """One read item per block of a packed shard and chunk that it lies in; everything else as torch plans it."""
        assert self.metadata is not None
        try:
            plan: LoadPlan = super().create_local_plan()
        except (RuntimeError, ValueError):
            # Torch names the first that is wrong, and reads checkpoints of its older releases under other names.
            self._check_asked(self.metadata.state_dict_metadata)
            raise
        chunks = self._with_blocks(plan, self.state_dict)
        check_covered(plan, {**self.state_dict, **chunks}, self.metadata.state_dict_metadata)
        return plan

    def _check_asked(self, saved: Mapping[str, Any]) -> None:
        """Demand names and shapes of the checkpoint."""
        missing = sorted(self.state_dict.keys() - saved.keys())
        if missing and not self.allow_partial_load:
            raise MissingKeyError(
                "names are not in the checkpoint", got=missing, expected=self._names, where="state_dict"
            )
        wrong = {
            fqn: (tuple(value.size()), tuple(saved[fqn].size))
            for fqn, value in self.state_dict.items()
            if isinstance(value, torch.Tensor)
            and isinstance(saved.get(fqn), TensorStorageMetadata)
            and value.size() != saved[fqn].size
        }
        if wrong:
            raise PlanError("shapes differ, as (target, saved)", got=wrong, expected="equal shapes", where="state_dict")

    def _with_blocks(self, plan: LoadPlan, targets: Mapping[str, Any]) -> dict[str, list[ChunkStorageMetadata]]:
        """Plan these targets' packed shards anew; the answer is their blocks, by name. See ``check_parts``."""
        assert self.metadata is not None
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        self._shards = _PackedShards()
        packed = sorted(fqn for fqn, value in targets.items() if fqn in saved and self._shards.blocks(fqn, value))
        chunks = {fqn: self._packed_chunks(fqn, targets[fqn]) for fqn in packed}
        plan.items = [item for item in plan.items if item.dest_index.fqn not in chunks]
        for fqn, wanted in chunks.items():
            plan.items += create_read_items_for_chunk_list(fqn, saved[fqn], wanted)
        check_parts({fqn: value for fqn, value in targets.items() if fqn not in chunks})
        return chunks

    def _packed_chunks(self, fqn: str, value: Any) -> list[ChunkStorageMetadata]:
        blocks = self._shards.blocks(fqn, value).values()
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in blocks]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local memory that a read item fills."""
        part = self._shards.part(index.fqn, self.state_dict[index.fqn], index.offset)
        return super().lookup_tensor(index) if part is None else part


class PartOfRows(torch.Tensor):
    """Memory for rows [first, first + n) of a saved tensor: a target of a load, of which no other row is read.

    Its shape is that of the saved tensor, [N, ...]; ``to_local()`` is the memory itself, [n, ...]. Other operations of
    torch's are refused, for they would need the whole.
    """

    _rows: torch.Tensor
    _first: int

    @staticmethod
    def make(row_count: int, rows: torch.Tensor, first: int) -> PartOfRows:
        """These rows, [n, ...], as those from ``first`` on of ``row_count``."""
        shape = (row_count, *rows.shape[1:])
        made: Any = torch.Tensor._make_wrapper_subclass(PartOfRows, shape, dtype=rows.dtype, device=rows.device)
        made._rows, made._first = rows, first
        result: PartOfRows = made
        return result

    def to_local(self) -> torch.Tensor:
        """The memory, itself and not a copy."""
        return self._rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartOfRows(shape={tuple(self.shape)}, {self._rows.shape[0]} rows from {self._first})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UnsupportedError(
            "some of the rows, not all", got=str(func), expected="an operation on to_local()", where="PartOfRows"
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self._rows.shape[0]:
            return []
        zeros = (0,) * (self.dim() - 1)
        return [ChunkStorageMetadata(torch.Size((self._first, *zeros)), torch.Size(self._rows.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._rows


def check_parts(targets: Mapping[str, Any]) -> None:
    """Demand that parts of DTensors are of the shapes that their placements say: torch reads by what these say.

    Raises:
        PlanError: all that are not, at once.
    """
    wrong = {
        fqn: (tuple(value.to_local().shape), tuple(chunk.sizes))
        for fqn, value in targets.items()
        if isinstance(value, DTensor)
        for chunk in _asked_chunks(value)
        if value.to_local().shape != chunk.sizes
    }
    if wrong:
        expected = "what the placements say"
        raise PlanError(
            "parts of targets differ in shape, as (is, said)", got=wrong, expected=expected, where=min(wrong)
        )


def check_blocks(plan: LoadPlan, planner: LoadPlanner) -> None:
    """Demand that no packed shard is filled as if it were one block, as torch's planner does: with rows of others.

    Raises:
        PlanError: what is to be read goes to none of a target's blocks.
    """
    if isinstance(planner, FillingPlanner):
        return
    # One of somebody else's may have no state dict.
    targets, shards = getattr(planner, "state_dict", {}), _PackedShards()
    for item in plan.items:
        fqn, at = item.dest_index.fqn, tuple(item.dest_index.offset or ())
        blocks = shards.blocks(fqn, targets.get(fqn))
        if not blocks:
            continue
        box, _ = blocks.get(at, (None, None))
        ends = [first + count for first, count in zip(item.dest_offsets, item.lengths, strict=True)]
        if box is None or any(end > size for end, size in zip(ends, box.sizes, strict=True)):
            raise PlanError(
                "a packed shard is to be filled as if it were one block: it would get rows of other ranks",
                got=f"{tuple(item.lengths)} at {at}, by {type(planner).__name__}",
                expected="dcp.load with planner=HuggingFaceLoadPlanner()",
                where=fqn,
            )


class HuggingFaceLoadPlanner(FillingPlanner):
    """DefaultLoadPlanner that checks every name and shape before anything is read, and fills packed shards.

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
        PlanError: shapes that differ, all at once. CorruptionError: targets of which the checkpoint lacks a part.
    """

    _names = "names of the checkpoint, or allow_partial_load=True"

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool | None = None,
    ) -> None:
        check_flags(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
            strict=strict,
        )
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
        self._check_asked(saved)
        return super().create_local_plan()


# Torch plans to read what the checkpoint has of a target, and leaves the rest of it as it was, without a word.


def check_covered(plan: LoadPlan, targets: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Demand that what a rank is to read fills all of its targets. What nobody asks for may be missing.

    Args:
        plan: of one rank.
        targets: name -> a tensor, or the chunks of it that are asked for.
        saved: ``state_dict_metadata`` of the checkpoint.

    Raises:
        CorruptionError: the checkpoint has no values for some elements; all such names at once.
    """
    read: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            place = item.dest_index.fqn, tuple(item.dest_index.offset or ())
            read.setdefault(place, set()).add(Box(tuple(item.dest_offsets), tuple(item.lengths)))
    wrong = {}
    for fqn, target in targets.items():
        if isinstance(saved.get(fqn), TensorStorageMetadata):
            chunks = _asked_chunks(target)
            found = sum(_filled_count(chunk.sizes, read.get((fqn, tuple(chunk.offsets)), set())) for chunk in chunks)
            wanted = sum(math.prod(chunk.sizes) for chunk in chunks)
            if found < wanted:
                wrong[fqn] = f"{found} of {wanted} elements"
    if wrong:
        raise CorruptionError(
            "the chunks of the checkpoint leave elements of targets out",
            got=dict(sorted(wrong.items())[:20]),
            expected="each element in a chunk",
            where=f"{len(wrong)} tensors" if len(wrong) > 1 else min(wrong),
        )


def _asked_chunks(target: Any) -> Sequence[ChunkStorageMetadata]:
    if not isinstance(target, torch.Tensor):
        return target if isinstance(target, list) else ()
    # A rank outside the mesh asks for nothing.
    if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
        return ()
    chunks: Sequence[ChunkStorageMetadata] = _create_chunk_list(target)
    return chunks


def _filled_count(sizes: Sequence[int], boxes: Collection[Box]) -> int:
    """Elements of a rectangle that lie in one of these boxes inside it. Boxes may overlap: replicas do."""
    if 0 in sizes:
        return 0
    try:
        # Nearly always they tile it, which is fast to see.
        check_tiling(sizes, list(boxes), CorruptionError, "")
    except CorruptionError:
        return _union(list(boxes), 0)
    return math.prod(sizes)


def _union(boxes: Sequence[Box], dim: int) -> int:
    if not boxes or dim == len(boxes[0].sizes):
        return len(boxes[:1])
    edges = sorted({edge for box in boxes for edge in (box.offsets[dim], box.offsets[dim] + box.sizes[dim])})
    return sum(
        (high - low) * _union([b for b in boxes if b.offsets[dim] <= low < b.offsets[dim] + b.sizes[dim]], dim + 1)
        for low, high in pairwise(edges)
    )
