"""Faults that show when readers and writers meet, and after many saves."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.checkpoint.groups import own_group
from twinproof.checkpoint.manager import _Cleaner
from twinproof.checkpoint.whole import Known

replaced_files_unnoticed = patched(
    "Files that were replaced after their headers were read are read as if they were the same.",
    swap("twinproof.checkpoint.catalog:check_unchanged", nothing),
    kills=("CKPT-470", "CKPT-471"),
)


@fault(kills="CKPT-472", at="twinproof.checkpoint.publish:Staging._drop")
def replaced_checkpoint_left(original: Any, staging: Any, folder: Any) -> None:
    """What a save replaced stays beside it under a hidden name, once for each save."""
    folder.rename(folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:4]}"))


_kept: list[Any] = []


@fault(kills="CKPT-473", at="twinproof.checkpoint.manager:CheckpointManager._save")
def staged_states_kept(original: Any, manager: Any, step: Any, state: Any, *rest: Any) -> None:
    """The copies of an asynchronous save are kept for as long as the process lives."""
    original(manager, step, state, *rest)
    extra = state.get("extra")
    if extra is not None:
        _kept.append(extra.clone())


group_for_one_rank = patched(
    "A writer of one rank makes a process group for itself.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._make_group",
        "several_ranks(None) is not None",
        "dist.is_initialized()",
    ),
    kills="CKPT-516",
)

failed_blocks_keep_their_groups = patched(
    "A writer whose block ends by an error is not closed.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__exit__", "self.close()", "kind is not None or self.close()"
    ),
    kills="CKPT-718",
)
failed_blocks_keep_their_managers = patched(
    "A manager whose block ends by an error is not closed.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.__exit__", "self.close()", "kind is not None or self.close()"
    ),
    kills="CKPT-718",
)

refused_managers_keep_what_they_made = patched(
    "A manager whose construction fails does not give back what it has made by then.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.__init__", "self._group, self.close", "self._group, dict"),
    kills="CKPT-728",
)


@fault(kills="CKPT-728", at="twinproof.checkpoint.manager:CheckpointManager._set_up")
def retention_begins_before_the_checks(original: Any, manager: Any) -> None:
    """A thread begins before the options of the HF writer are checked, and ends where they are right alone."""
    cleaner = _Cleaner(manager.policy.folder, 1, Known())
    original(manager)
    cleaner.close()


@fault(kills="CKPT-728", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__init__")
def groups_before_the_checks(original: Any, writer: Any, *arguments: Any, **options: Any) -> None:
    """A writer makes a process group before it looks at its options, and keeps it where it refuses them."""
    made = own_group() if dist.is_initialized() and dist.get_world_size() > 1 else None
    original(writer, *arguments, **options)
    if made is not None:
        dist.destroy_process_group(made)


file_of_then_and_now = patched(
    "load_file does not look whether its file is still the one whose header it read.",
    mutated("twinproof.checkpoint.shards:load_file", "check_unchanged(path, header)\n    return", "return"),
    kills="CKPT-610",
)


def _own_group(_: object) -> Any:
    return dist.new_group(backend="gloo")


def _alone(group: Any, undo: Any) -> Any:
    return nullcontext()


groups_are_not_waited_for = patched(
    "A rank goes on while others still connect to the group that it has made.",
    swap("twinproof.checkpoint.dcp:all_or_none", _alone),
    swap("twinproof.checkpoint.manager:all_or_none", _alone),
    swap("twinproof.checkpoint.dcp:own_group", _own_group),
    swap("twinproof.checkpoint.manager:own_group", _own_group),
    kills="CKPT-642",
)
