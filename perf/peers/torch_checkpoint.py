"""The same jobs through torch's own HF checkpoint.

torch's defaults are one thread to write shards and one to merge them; its best are four and four, one per file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["consolidate", "load_state", "open_folder", "save_shards", "save_state"]


def save_state(state: Mapping[str, Any], folder: Path, mapping: dict[str, int], *, thread_count: int) -> None:
    """Save on every rank: a shard folder, then the coordinator merges it into final files."""
    writer = HuggingFaceStorageWriter(
        os.fspath(folder),
        fqn_to_index_mapping=mapping,
        thread_count=thread_count,
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=thread_count,
    )
    save(dict(state), storage_writer=writer)


def save_shards(state: Mapping[str, Any], folder: Path, mapping: dict[str, int]) -> None:
    """Save on every rank, without the merge."""
    writer = HuggingFaceStorageWriter(os.fspath(folder), fqn_to_index_mapping=mapping, save_distributed=True)
    save(dict(state), storage_writer=writer)


def load_state(targets: Mapping[str, Any], folder: Path, *, thread_count: int) -> None:
    """Load into the targets on every rank."""
    load(dict(targets), storage_reader=HuggingFaceStorageReader(os.fspath(folder), thread_count=thread_count))


def consolidate(source: Path, target: Path, mapping: dict[str, int], *, thread_count: int) -> None:
    """Merge a shard folder in this process."""
    consolidate_safetensors_files(os.fspath(source), os.fspath(target), mapping, num_threads=thread_count)


def open_folder(folder: Path) -> Metadata:
    """Read every header of a folder."""
    metadata: Metadata = HuggingFaceStorageReader(os.fspath(folder)).read_metadata()
    return metadata
