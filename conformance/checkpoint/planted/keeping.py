"""More faults in errors, interruption, durability and rights."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from conformance.checkpoint.planted.making import both, fast, nothing
from conformance.harness import swap, wrap
from twinproof.errors import CheckpointExistsError, StorageError

PUBLISH = "twinproof.checkpoint.publish"
OPEN = "twinproof.checkpoint.publish:os.open"


def _unnamed(original: Any, staging: Any, index: Any) -> None:
    try:
        original(staging, index)
    except StorageError:
        raise StorageError("publishing failed", where=str(staging.target)) from None


def _logged_only(original: Any, files: Any, file: int, start: int, pieces: Any) -> int:
    try:
        return int(original(files, file, start, pieces))
    except StorageError as error:
        logging.getLogger("twinproof.checkpoint").info("a block was not written: %s", error)
        return 0


def _callers_group(writer: Any) -> None:
    if writer.group is None and dist.is_initialized() and dist.get_world_size() > 1:
        writer.group = dist.group.WORLD


def _refuses_leftovers(parent: Any, prefix: str) -> None:
    leftovers = [name for name in os.listdir(parent) if name.startswith(prefix)]
    if leftovers:
        raise CheckpointExistsError("an interrupted save left files", got=leftovers, where=str(parent))


_SAME_EVERY_TIME = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32))


def _for_everyone(original: Any, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
    descriptor = int(original(path, flags, mode, **rest))
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o666)
    return descriptor


def _not_synced(original: Any, *arguments: Any, durable: bool, **options: Any) -> None:
    original(*arguments, durable=False, **options)


PLANTED = (
    fast(
        "write_error_logged_only",
        "A block that could not be written is logged, and the save goes on; torch with several threads.",
        ("CKPT-310",),
        wrap("fastimpl.checkpoint.run:FileSet.write", _logged_only),
    ),
    both(
        "publication_fails_unnamed",
        "An error of publication loses its number.",
        ("CKPT-314",),
        wrap(f"{PUBLISH}:Staging.publish", _unnamed),
    ),
    both(
        "callers_group_used",
        "A save waits in the caller's process group, with its timeout.",
        ("CKPT-318",),
        swap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter._make_group", _callers_group),
    ),
    both(
        "staging_name_reused",
        "Every save has the same hidden folder, which an interrupted one leaves in the way.",
        ("CKPT-302",),
        swap(f"{PUBLISH}:uuid", _SAME_EVERY_TIME),
    ),
    both(
        "leftovers_refused",
        "A save refuses to run beside what an interrupted one left.",
        ("CKPT-302", "CKPT-306"),
        swap(f"{PUBLISH}:Staging._warn_of_leftovers", staticmethod(_refuses_leftovers)),
    ),
    fast(
        "data_not_synced",
        "Files are shown without having been synced.",
        ("CKPT-320", "CKPT-322"),
        wrap("fastimpl.checkpoint.run:FileSet.close", _not_synced),
    ),
    both(
        "new_parents_not_synced",
        "Folders that a save had to make are not synced.",
        ("CKPT-321",),
        swap(f"{PUBLISH}:_missing_parents", lambda target: []),
    ),
    both(
        "umask_ignored", "Files are writable by everyone, whatever the umask.", ("CKPT-323",), wrap(OPEN, _for_everyone)
    ),
    both(
        "strangers_deleted",
        "Files that are no part of the checkpoint vanish with the old one.",
        ("CKPT-325",),
        swap(f"{PUBLISH}:_carry", nothing),
    ),
)
