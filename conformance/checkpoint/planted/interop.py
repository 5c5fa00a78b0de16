"""Faults that ``test_interop`` must notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.planted.planting import broken_taken_as_empty
from conformance.harness import fault, mutated, patched, wrap


@fault(kills="CKPT-087", at="twinproof.checkpoint.plan:local_path")
def urls_become_folders(original: Any, path: Any, where: Any = "path") -> Any:
    """A URL is taken for a local path; in torch it is."""
    return Path(path)


@fault(kills="CKPT-091", at="fastimpl.checkpoint.consolidate:_Inputs.read")
def scalars_lost_in_consolidation(original: Any, inputs: Any, file: str, offset: int, target: torch.Tensor) -> None:
    """Consolidation loses small tensors, as torch's did."""
    original(inputs, file, offset, target)
    if target.numel() <= 8:
        target.zero_()


@fault(kills="CKPT-092", at="twinproof.checkpoint.shards:is_final", of="fastimpl")
def final_folder_rewritten(original: Any, catalog: Any, source: Any, target: Any) -> bool:
    """A folder that is already final is written again."""
    original(catalog, source, target)
    return False


@fault(kills="CKPT-093", at="fastimpl.checkpoint:save_file")
def save_file_adds_metadata(original: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
    """save_file adds metadata that nobody gave."""
    original(tensors, filename, {"format": "pt", **(metadata or {})})


@fault(kills="CKPT-088", at="fastimpl.checkpoint:load_file")
def load_file_rounds(original: Any, *arguments: Any, **options: Any) -> Any:
    """load_file rounds floats to bfloat16."""
    loaded = original(*arguments, **options)
    return {n: v.to(torch.bfloat16).to(v.dtype) if v.dtype is torch.float32 else v for n, v in loaded.items()}


@fault(kills="CKPT-091", at="twinproof.checkpoint.shards:output_metadata", of="fastimpl")
def shard_metadata_kept(original: Any, catalog: Any) -> dict[str, str]:
    """Final files keep metadata that only shards should have."""
    return {**original(catalog), "DCP_VERSION": "1.0"}


final_folder_not_verified = patched(
    "A final folder that is broken is called consolidated.",
    wrap("twinproof.checkpoint.shards:read_catalog", broken_taken_as_empty),
    kills="CKPT-092",
    of="fastimpl",
)


@fault(kills="CKPT-091", at="refimpl.checkpoint:assemble")
def reference_merge_loses_scalars(original: Any, shape: Any, dtype: Any, parts: Any) -> torch.Tensor:
    """Consolidation loses the values of 0-dim tensors; torch's does."""
    found: torch.Tensor = original(shape, dtype, parts)
    return found.zero_() if found.dim() == 0 else found


reference_trusts_final_folders = patched(
    "A final folder that is broken is called consolidated.",
    wrap("twinproof.checkpoint.shards:read_catalog", broken_taken_as_empty),
    kills="CKPT-092",
    of="refimpl",
)

folders_by_their_names = patched(
    "A folder that is named in two ways is taken for two.",
    mutated(
        "twinproof.checkpoint.shards:is_final",
        "os.path.realpath(input_dir) == os.path.realpath(output_dir)",
        "input_dir == output_dir",
    ),
    kills="CKPT-653",
)

final_by_its_spelling = patched(
    "Whether a folder is to become itself goes by how its paths are written.",
    mutated(
        "twinproof.checkpoint.shards:is_final",
        "os.path.realpath(input_dir) == os.path.realpath(output_dir)",
        "input_dir == output_dir",
    ),
    kills="CKPT-713",
)
