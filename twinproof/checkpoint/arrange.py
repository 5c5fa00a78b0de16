"""From the save plans of all ranks to the final files: which tensor, of which dtype, at which offset of which file.

Headers and offsets are a pure function of the global plan, so nothing is written twice (facts/checkpoint.md 7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from twinproof.checkpoint.files import assign_files
from twinproof.checkpoint.layout import FileLayout, check_name, dtype_name, lay_out
from twinproof.checkpoint.options import WriterOptions
from twinproof.checkpoint.pause import collector_paused
from twinproof.checkpoint.tiling import Box, check_tiling
from twinproof.errors import PlanError, UnsupportedError

__all__ = ["Arrangement", "GlobalTensor", "arrange", "check_local_plan", "exported_dtype"]

_CASTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass
class GlobalTensor:
    """One tensor of the checkpoint. ``parts`` holds (rank, item position in that rank's plan, box)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, int, Box]] = field(default_factory=list)
    file: str = ""
    begin: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Arrangement:
    """The whole checkpoint: tensors by name, layout by file name."""

    tensors: dict[str, GlobalTensor]
    files: dict[str, FileLayout]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name."""
        return {name: tensor.file for name, tensor in self.tensors.items()}

    @property
    def total_size_bytes(self) -> int:
        """Payload of all tensors, headers not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def exported_dtype(name: str, dtype: torch.dtype, options: WriterOptions) -> torch.dtype:
    """The dtype on disk: only float64/32/16 and bfloat16 are cast, names that match ``export_keep`` are not."""
    if options.export_dtype is None or dtype not in _CASTABLE or any(fnmatchcase(name, p) for p in options.export_keep):
        return dtype
    return options.export_dtype


def check_local_plan(plan: SavePlan) -> None:
    """Refuse what the format cannot hold before any file is made: facts/checkpoint.md D6. Raises UnsupportedError."""
    leaves = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO or item.tensor_data is None]
    if leaves:
        raise UnsupportedError(
            "safetensors holds tensors only", got=sorted(leaves), expected="tensors", where="state_dict"
        )
    for item in plan.items:
        assert item.tensor_data is not None
        check_name(item.index.fqn)
        dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        if item.tensor_data.properties.layout is not torch.strided:
            raise UnsupportedError(
                "only strided tensors can be stored", got=item.tensor_data.properties.layout, where=item.index.fqn
            )


def _collect(plans: Sequence[SavePlan], options: WriterOptions) -> dict[str, GlobalTensor]:
    tensors: dict[str, GlobalTensor] = {}
    sources: dict[str, torch.dtype] = {}
    for rank, plan in enumerate(plans):
        for position, item in enumerate(plan.items):
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            tensor = tensors.get(name)
            if tensor is None:
                sources[name] = data.properties.dtype
                tensor = tensors[name] = GlobalTensor(
                    name, exported_dtype(name, data.properties.dtype, options), tuple(data.size)
                )
            elif data.size != tensor.shape or data.properties.dtype != sources[name]:
                got = f"{data.properties.dtype} {list(data.size)} on rank {rank}"
                raise PlanError(
                    "ranks disagree about a tensor",
                    got=got,
                    expected=f"{sources[name]} {list(tensor.shape)}",
                    where=name,
                )
            tensor.parts.append((rank, position, Box(data.chunk.offsets, data.chunk.sizes)))
    return tensors


@collector_paused()
def arrange(plans: Sequence[SavePlan], options: WriterOptions) -> Arrangement:
    """Lay out a checkpoint from every rank's deduplicated plan.

    Raises:
        PlanError: gaps, overlaps, ranks that disagree, names without a file index.
        ConfigError: header or file count beyond the format's limits.
    """
    tensors = _collect(plans, options)
    for tensor in tensors.values():
        check_tiling(tensor.shape, [box for _, _, box in tensor.parts], PlanError, tensor.name)
    sizes = {name: tensor.size_bytes for name, tensor in tensors.items()}
    groups = assign_files(sizes, options.mapping, options.max_shard_size, single_file=options.single_file)
    files: dict[str, FileLayout] = {}
    for file, names in groups.items():
        members = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
        files[file] = lay_out(members, options.file_metadata, page_align=options.page_align)
        for name in names:
            tensors[name].file, tensors[name].begin = file, files[file].begins[name]
    return Arrangement(tensors, files)
