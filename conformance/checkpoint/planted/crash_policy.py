"""Faults that ``test_crash_policy`` must notice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, patched, swap


@fault(kills="CKPT-322", at="twinproof.checkpoint.shards:write_file")
def save_file_not_synced(original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """save_file shows its file before it is durable, as the safetensors library."""
    original(*arguments, **{**options, "durable": False})


class _NeverRaised(Exception):
    """Stands where a real error class was caught."""


broken_index_blocks = patched(
    "A folder whose index is broken cannot be saved to.",
    swap("twinproof.checkpoint.publish:TwinproofError", _NeverRaised),
    kills="CKPT-327",
)


@fault(kills=("CKPT-320", "CKPT-322"), at="fastimpl.checkpoint.run:FileSet.close")
def data_not_synced(original: Any, *arguments: Any, durable: bool, **options: Any) -> None:
    """Files are shown without having been synced."""
    original(*arguments, durable=False, **options)


@fault(kills="CKPT-321", at="twinproof.checkpoint.publish:_missing_parents")
def new_parents_not_synced(original: Any, target: Any) -> Any:
    """Folders that a save had to make are not synced."""
    return []


@fault(kills="CKPT-323", at="twinproof.checkpoint.publish:os.open")
def umask_ignored(original: Any, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
    """Files are writable by everyone, whatever the umask."""
    descriptor = int(original(path, flags, mode, **rest))
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o666)
    return descriptor


strangers_deleted = patched(
    "Files that are no part of the checkpoint vanish with the old one.",
    swap("twinproof.checkpoint.trees:Others.carry", nothing),
    swap("twinproof.checkpoint.trees:Others.bring_over", nothing),
    swap("twinproof.checkpoint.trees:Others.settle", lambda _, old, new: shutil.rmtree(old)),
    kills="CKPT-325",
)
folders_not_synced = patched(
    "Folders are not synced.",
    swap("twinproof.checkpoint.publish:Staging._sync", nothing),
    kills=("CKPT-320", "CKPT-321"),
)


@fault(kills="CKPT-323", at="fastimpl.checkpoint.run:os.open")
def mode_0600(original: Any, path: Any, flags: Any, mode: Any = 511, **rest: Any) -> Any:
    """Files are readable by their owner only (safetensors #782)."""
    return original(path, flags, 0o600 if flags & os.O_CREAT else mode, **rest)


@fault(kills="CKPT-324", at="twinproof.checkpoint.publish:Staging.__init__")
def overwrite_not_refused(original: Any, staging: Any, target: Any, **options: Any) -> Any:
    """overwrite=False replaces all the same; torch does so silently."""
    return original(staging, target, **{**options, "overwrite": True})
