"""Faults that ``test_unsynced`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PUBLISH = "twinproof.checkpoint.publish"

folders_have_to_sync = patched(
    "A save fails where a file system cannot sync folders.",
    mutated(f"{_PUBLISH}:fsync_path", "if error.errno not in _NO_FOLDER_SYNC or", "if True or"),
    kills="CKPT-932",
)
folders_need_not_sync = patched(
    "Whatever the sync of a folder says is passed over.",
    mutated(f"{_PUBLISH}:fsync_path", "if error.errno not in _NO_FOLDER_SYNC or", "if"),
    kills="CKPT-932",
)
replaced_ones_dropped_unsynced = patched(
    "What was replaced is deleted although a power cut may bring back its name.",
    mutated(f"{_PUBLISH}:Staging.discard", "if self._is_unsynced:", "if False:"),
    kills="CKPT-933",
)
shown_in_silence = patched(
    "The error of the last sync does not say that the checkpoint is shown.",
    mutated(f"{_PUBLISH}:_sync_shown", "it is shown, and a power cut may undo that: syncing", "syncing"),
    kills="CKPT-933",
)
