"""Torch's own HF checkpoint behind our names: ``--twinproof-impl conformance.peers.torch_checkpoint``.

Adds what the contract has and upstream lacks a spelling for (``close``, ``strict``), and nothing that upstream cannot
do: options it does not know stay a TypeError, and what it gets wrong stays wrong. Only options that say how to write,
and nothing about what, are taken and left unused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import _consolidate_hf_safetensors as merge
from torch.distributed.checkpoint import hf_storage, quantized_hf_storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

__all__ = ["CAPABILITIES", "checkpoint"]

# Upstream shards and merges whole tensors, loads through maps and copies from devices unpinned.
CAPABILITIES: frozenset[str] = frozenset()


class _Writer(hf_storage.HuggingFaceStorageWriter):
    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = True,
        enable_consolidation: bool = True,
        thread_count_consolidation: int = 1,
        *,
        block_bytes: int = 0,
        write_mode: str = "auto",
    ) -> None:
        mapping = None if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)
        rest = save_distributed, enable_consolidation, thread_count_consolidation
        super().__init__(os.fspath(path), mapping, thread_count, *rest)

    def close(self) -> None:
        """Upstream's writer keeps nothing open."""

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, strict: bool = True, **options: Any) -> None:
        super().__init__(allow_partial_load=not strict, **options)


class _QuantizedReader(quantized_hf_storage.QuantizedHuggingFaceStorageReader):
    def __init__(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        super().__init__(os.fspath(path), *arguments, **options)


class checkpoint:
    """The component."""

    QuantizedHuggingFaceStorageReader = _QuantizedReader

    HuggingFaceStorageWriter = _Writer
    HuggingFaceStorageReader = hf_storage.HuggingFaceStorageReader
    HuggingFaceSavePlanner = DefaultSavePlanner
    HuggingFaceLoadPlanner = _LoadPlanner
    consolidate_safetensors_files = staticmethod(merge.consolidate_safetensors_files)
    consolidate_safetensors_files_on_every_rank = staticmethod(merge.consolidate_safetensors_files_on_every_rank)
    save_file = staticmethod(save_file)
    load_file = staticmethod(load_file)
