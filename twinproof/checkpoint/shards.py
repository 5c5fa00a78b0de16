"""torch's shard layout, one file per rank and output file: what ``enable_consolidation=False`` asks for.

Layout: ``shard-RRRRR-model-IIIII-of-NNNNN.safetensors`` with ``DCP_SHARDING_INFO`` (facts/checkpoint.md 1.2). Ours adds
``global_shape`` to each entry, so that a missing last shard is an error and not a shorter tensor (D8).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from twinproof.checkpoint.arrange import exported_dtype
from twinproof.checkpoint.base import WriterBase
from twinproof.checkpoint.files import file_name
from twinproof.checkpoint.options import WriterOptions
from twinproof.checkpoint.sharding import SHARDING_KEY
from twinproof.checkpoint.single import layout_of, write_tensors
from twinproof.errors import PlanError

__all__ = ["Shard", "save_shards"]


class Shard(NamedTuple):
    """One local chunk: name, offsets in the global tensor, global shape, local data."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor


def _metadata(shards: list[Shard], options: WriterOptions) -> dict[str, str]:
    info = {s.name: {"saved_offsets": list(s.offsets), "global_shape": list(s.shape)} for s in shards}
    return {**options.file_metadata, SHARDING_KEY: json.dumps(info), "DCP_VERSION": "1.0"}


def _write_shards(folder: Path, rank: int, shards: Iterable[Shard], options: WriterOptions) -> None:
    mapping = options.mapping
    groups: dict[int, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(1 if mapping is None else mapping[shard.name], []).append(shard)
    count = 1 if mapping is None else max(mapping.values())
    for index, members in sorted(groups.items()):
        if len({s.name for s in members}) != len(members):
            raise PlanError(
                "the shard layout holds one chunk of a tensor per rank", got="several", where=f"rank {rank}"
            )
        tensors = {s.name: s.data for s in members}
        path = os.fspath(folder / file_name(index, count, rank + 1))
        write_tensors(path, tensors, layout_of(tensors, _metadata(members, options)), durable=options.durable)


def save_shards(writer: WriterBase, plan: SavePlan, planner: SavePlanner) -> None:
    """Write this rank's shard files into the staging folder.

    Raises:
        PlanError: two chunks of one tensor on a rank. DistributedError, StorageError.
    """
    if writer.is_coordinator:
        writer.arranged(planner)
    folder = writer.begin_staging()
    failure: Exception | None = None
    try:
        _write_shards(
            folder, writer.rank, [_shard(item, planner, writer.options) for item in plan.items], writer.options
        )
    except Exception as error:
        failure = error
    writer.settle(failure)


def _shard(item: WriteItem, planner: SavePlanner, options: WriterOptions) -> Shard:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    assert item.tensor_data is not None
    value = value.detach().to(exported_dtype(item.index.fqn, value.dtype, options))
    return Shard(item.index.fqn, tuple(item.index.offset or ()), tuple(item.tensor_data.size), value)
