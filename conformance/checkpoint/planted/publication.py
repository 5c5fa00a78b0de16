"""Faults in publication, durability and the reporting of errors."""

from __future__ import annotations

import os
from typing import Any

from conformance.checkpoint.planted.making import both, fast, nothing
from conformance.harness import swap, wrap

PUBLISH = "twinproof.checkpoint.publish"


def _never_again(original: Any, staging: Any) -> None:
    if staging.target.exists():
        staging.discard()
        return
    original(staging)


def _file_by_file(original: Any, staging: Any) -> None:
    """Move the files into place one by one, over those of the old checkpoint, as torch's consolidation does."""
    staging.target.mkdir(exist_ok=True)
    for name in sorted(os.listdir(staging.folder)):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


def _deleted_first(original: Any, staging: Any) -> None:
    if staging.target.exists():
        for name in staging.old_names:
            (staging.target / name).unlink()
        staging.old_names = []
    original(staging)


PLANTED = (
    both(
        "leftovers_stay",
        "What a save replaced stays beside it.",
        ("CKPT-100", "CKPT-328"),
        swap(f"{PUBLISH}:Staging._drop", nothing),
    ),
    both(
        "second_save_ignored",
        "A save over a checkpoint changes nothing.",
        ("CKPT-084",),
        wrap(f"{PUBLISH}:Staging._publish_folder", _never_again),
    ),
    both(
        "published_file_by_file",
        "An overwrite shows new files beside old ones, as in torch.",
        ("CKPT-300",),
        wrap(f"{PUBLISH}:Staging._publish_folder", _file_by_file),
    ),
    both(
        "old_deleted_first",
        "The old checkpoint is deleted before the new one is shown.",
        ("CKPT-300", "CKPT-305"),
        wrap(f"{PUBLISH}:Staging._publish_folder", _deleted_first),
    ),
    fast(
        "worker_error_swallowed",
        "An error in a thread is not reported; in torch it is lost.",
        ("CKPT-310", "CKPT-313"),
        swap("fastimpl.checkpoint.run:Runner._fail", nothing),
    ),
    both(
        "folders_not_synced",
        "Folders are not synced.",
        ("CKPT-320", "CKPT-321"),
        swap(f"{PUBLISH}:Staging._sync", nothing),
    ),
    fast(
        "mode_0600",
        "Files are readable by their owner only (safetensors #782).",
        ("CKPT-323",),
        wrap(
            "fastimpl.checkpoint.run:os.open",
            lambda original, path, flags, mode=0o777, **rest: original(
                path, flags, 0o600 if flags & os.O_CREAT else mode, **rest
            ),
        ),
    ),
    both(
        "overwrite_not_refused",
        "overwrite=False replaces all the same; torch does so silently.",
        ("CKPT-324",),
        wrap(
            f"{PUBLISH}:Staging.__init__",
            lambda original, staging, target, *, durable=True, overwrite=True: original(
                staging, target, durable=durable, overwrite=True
            ),
        ),
    ),
)
