"""Options of the writer, checked once at construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinproof.checkpoint.files import check_mapping, local_path, parse_size
from twinproof.checkpoint.layout import check_metadata
from twinproof.errors import ConfigError

__all__ = ["WriterOptions", "check_count"]

FORMAT_METADATA = {"format": "pt"}  # Readers of the HF ecosystem refuse files without it (facts/checkpoint.md 3.2).
WRITE_MODES = ("auto", "random", "sequential")
BLOCK_BYTES_MIN = 64  # Elements are at most 8 bytes and never straddle a unit of this size.
_EXPORTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_count(value: Any, where: str) -> int:
    """An int of at least 1, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("not a count", got=value, expected="an int >= 1", where=where)
    return value


@dataclass(frozen=True)
class WriterOptions:
    """What a save is to produce; see ``HuggingFaceStorageWriter`` for each field."""

    path: Path
    mapping: dict[str, int] | None
    thread_count: int
    save_distributed: bool
    enable_consolidation: bool
    max_shard_size: int | None
    file_metadata: dict[str, str]
    durable: bool
    overwrite: bool
    export_dtype: torch.dtype | None
    export_keep: tuple[str, ...]
    single_file: bool
    page_align: bool
    check_replicas: bool
    write_mode: str
    block_bytes: int

    @property
    def writes_shards(self) -> bool:
        """Whether torch's one-file-per-rank layout was asked for; one process always writes final files (D15)."""
        return self.save_distributed and not self.enable_consolidation

    @classmethod
    def make(
        cls,
        path: Any,
        *,
        mapping: Mapping[str, int] | None,
        thread_count: int,
        thread_count_consolidation: int,
        max_shard_size: int | str | None,
        metadata: Mapping[str, str] | None,
        export_dtype: torch.dtype | str | None,
        export_keep: Sequence[str],
        single_file: bool,
        write_mode: str,
        block_bytes: int,
        **flags: bool,
    ) -> WriterOptions:
        """Check every option and combination. Raises ConfigError."""
        if mapping is not None and max_shard_size is not None:
            raise ConfigError(
                "two rules for the files", got="both", expected="one of fqn_to_index_mapping, max_shard_size"
            )
        if single_file and (mapping is not None or max_shard_size is not None):
            raise ConfigError("single_file leaves nothing to split", got=True, where="single_file")
        if (metadata or {}).get("format", "pt") != "pt":
            raise ConfigError(
                "the format of these files is fixed", got=(metadata or {})["format"], expected="pt", where="metadata"
            )
        check_count(thread_count_consolidation, "thread_count_consolidation")
        if write_mode not in WRITE_MODES:
            raise ConfigError("not a write mode", got=write_mode, expected=WRITE_MODES, where="write_mode")
        if check_count(block_bytes, "block_bytes") < BLOCK_BYTES_MIN or block_bytes & (block_bytes - 1):
            raise ConfigError("not a block size", got=block_bytes, expected="a power of two >= 64", where="block_bytes")
        if isinstance(export_keep, str):
            raise ConfigError("export_keep is a sequence of patterns", got=export_keep, where="export_keep")
        return cls(
            path=local_path(path),
            mapping=check_mapping(mapping),
            thread_count=check_count(thread_count, "thread_count"),
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
            file_metadata=check_metadata({**FORMAT_METADATA, **(metadata or {})}),
            export_dtype=_export(export_dtype),
            export_keep=tuple(export_keep),
            single_file=single_file,
            write_mode=write_mode,
            block_bytes=block_bytes,
            **flags,
        )


def _export(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = _EXPORTS.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _EXPORTS.values():
        raise ConfigError("not an export dtype", got=dtype, expected=sorted(_EXPORTS), where="export_dtype")
    return found
