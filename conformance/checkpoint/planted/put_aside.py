"""Faults that ``test_put_aside`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_MANAGER, _FORMAT = "twinproof.checkpoint.manager", "twinproof.checkpoint.format"

only_copies_unnamed = patched(
    "Who asks for a checkpoint that is put aside is told that there is none.",
    mutated("twinproof.checkpoint.native:detect_format", "check_put_aside(place)", "pass"),
    kills="CKPT-885",
)
only_copies_unnamed_by_readers = patched(
    "A reader of a checkpoint that is put aside says that there is no such file.",
    mutated("twinproof.checkpoint.catalog:read_catalog", "check_put_aside(path)", "pass"),
    kills="CKPT-885",
)
files_are_copies = patched(
    "A hidden file counts as a copy of a checkpoint.",
    mutated(f"{_FORMAT}:copies_put_aside", "copy.is_dir() and", ""),
    kills="CKPT-885",
)
steps_stay_aside = patched(
    "A manager takes an older step, or starts afresh, where the newest is put aside.",
    swap(f"{_MANAGER}:_bring_back", lambda folder, aside: None),
    kills=("CKPT-886", "CKPT-887"),
)
readers_bring_back = patched(
    "A manager that only loads renames what is put aside.",
    mutated(f"{_MANAGER}:CheckpointManager._find", "if not policy.load_only:", "if True:"),
    kills="CKPT-886",
)
readers_start_afresh = patched(
    "A manager that only loads says nothing of what is put aside.",
    mutated(f"{_MANAGER}:CheckpointManager._find", "step in aside or (aside and not complete)", "False"),
    kills="CKPT-886",
)
oldest_copies_come_back = patched(
    "Of several copies of a step the oldest is shown again.",
    mutated(f"{_FORMAT}:copies_put_aside", ", reverse=True", ""),
    kills="CKPT-887",
)
steps_that_cannot_come_back_pass = patched(
    "What cannot be renamed back ends in a bare error.",
    mutated(f"{_MANAGER}:_bring_back", "raise storage_error", "raise error; raise storage_error"),
    kills="CKPT-887",
)
left_by_killed_saves_stays = patched(
    "What killed saves left fills the disk.",
    swap(f"{_MANAGER}:_left_by_saves", lambda folder: []),
    kills="CKPT-888",
)
saves_at_work_are_deleted = patched(
    "What another save is still writing is deleted.",
    mutated(f"{_MANAGER}:_Cleaner._hide_left", "or changed_s(path) != seen_s", ""),
    kills="CKPT-888",
)
only_copies_are_deleted = patched(
    "The only copy of a step is deleted as what a killed save left.",
    mutated(f"{_MANAGER}:_Cleaner._hide_left", "is_needed or", ""),
    kills="CKPT-888",
)
