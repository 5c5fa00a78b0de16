"""Faults that only a machine that stops can show."""

from __future__ import annotations

import os
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-460", at="twinproof.checkpoint.publish:_create")
def index_not_synced(original: Any, path: Any, pieces: Any, *, durable: bool, **options: Any) -> None:
    """The index is shown before its bytes are on disk: it may be empty after a power cut."""
    original(path, pieces, durable=durable and not str(path).endswith(".index.json"), **options)


@fault(kills="CKPT-460", at="twinproof.checkpoint.publish:Staging._publish_folder")
def renamed_before_the_sync(original: Any, staging: Any) -> None:
    """The folder is renamed first and synced afterwards, as if the order of calls were that of the disk."""
    sync, staging._sync, staging._sync_above = staging._sync, nothing, nothing
    try:
        original(staging)
    finally:
        del staging._sync, staging._sync_above
    sync(staging.target)


@fault(kills="CKPT-461", at="twinproof.checkpoint.native:NativeStorageWriter._sync")
def native_data_synced_too_early(original: Any, writer: Any, names: Any) -> None:
    """Python's buffer is emptied after the sync, as in torch 2.13 (pytorch #183878): the end of a file may be lost."""


@fault(kills="CKPT-462", at="twinproof.checkpoint.publish:Staging._sync")
def durable_all_the_same(original: Any, staging: Any, path: Any) -> None:
    """Folders are synced whatever was asked for."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


_PUBLISH = "twinproof.checkpoint.publish:Staging._publish_folder"

old_one_deleted_first = patched(
    "The old checkpoint is deleted before the new name is on disk.",
    mutated(
        _PUBLISH,
        "self._sync_above()\n    self._drop(replaced)",
        "self._drop(replaced)\n    self._sync_above()",
    ),
    kills="CKPT-552",
)

copies_not_synced = patched(
    "A file that is copied, where a second name is not possible, is not synced.",
    mutated("twinproof.checkpoint.trees:Others._second", "if stat.S_ISREG(status.st_mode):", "if False:"),
    kills="CKPT-605",
)

native_files_of_one_rank_synced = patched(
    "Of a native save the files of the coordinator alone are synced.",
    mutated(
        "twinproof.checkpoint.native:NativeStorageWriter.write_data",
        "self._sync({result",
        "None if self.staging is None else self._sync({result",
    ),
    kills="CKPT-803",
)

own_blocks_of_one_rank_synced = patched(
    "Of the blocks of a file those that the first rank wrote are synced.",
    mutated(
        "fastimpl.checkpoint.writer:PlannedWrites.write",
        "durable=durable and",
        "durable=durable and not __import__('torch').distributed.get_rank() and",
    ),
    kills="CKPT-803",
    of="fastimpl",
)
