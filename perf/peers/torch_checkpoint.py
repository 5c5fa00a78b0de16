"""The same jobs through torch's own HF checkpoint, and through two processes that do nothing but write.

torch's defaults are one thread to write shards and one to merge them; its best are four and four, one per file.
``plain_save`` is the limit: nothing planned, nothing exchanged, nothing published. ``per_run_save`` is what happens to
column shards without an exchange: one write for each contiguous run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from refimpl.checkpoint.memory import buffer_of

__all__ = ["consolidate", "load_state", "open_folder", "per_run_save", "plain_save", "save_shards", "save_state"]


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


def plain_save(
    parts: list[torch.Tensor], folder: Path, layout: list[tuple[str, bytes, list[int]]], *, rank: int, rank_count: int
) -> None:
    """Write this rank's rows of every tensor to where they belong in the final files, and sync.

    Args:
        parts: by tensor number, equal shares of the rows, contiguous.
        folder: where the files go; exists.
        layout: (file, header, tensor numbers) per file.
        rank: this rank; ranks start at different files, since writers of one inode wait for each other.
        rank_count: ranks that write.
    """
    first = rank * len(layout) // rank_count
    for file, header, numbers in [*layout[first:], *layout[:first]]:
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if rank == 0:
                os.pwrite(descriptor, header, 0)
            for position, number in enumerate(numbers):
                data = buffer_of(parts[number].view(torch.uint8))
                start = len(header) + (position * rank_count + rank) * len(data)
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], start + done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def per_run_save(
    parts: list[torch.Tensor], folder: Path, layout: list[tuple[str, bytes, list[int]]], *, rank: int, rank_count: int
) -> None:
    """Write this rank's columns of every tensor, row by row, to where they belong; arguments as of ``plain_save``."""
    for file, header, numbers in layout:
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if rank == 0:
                os.pwrite(descriptor, header, 0)
            for position, number in enumerate(numbers):
                data = buffer_of(parts[number].view(torch.uint8))
                run_bytes = len(data) // parts[number].shape[0]
                start = len(header) + position * rank_count * len(data) + rank * run_bytes
                for row in range(parts[number].shape[0]):
                    # A run is far below any limit of a single write, which is therefore never short on a local disk.
                    os.pwrite(descriptor, data[row * run_bytes : (row + 1) * run_bytes], start)
                    start += rank_count * run_bytes
        finally:
            os.close(descriptor)
