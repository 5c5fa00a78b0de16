"""Faults that ``test_async`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched, swap


@fault(kills="CKPT-094", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.arranged")
def cached_layout_reused(original: Any, writer: Any, planner: Any) -> Any:
    """A save takes the layout of an earlier one from a cached plan."""
    found = getattr(type(planner), "_planted_first", None)
    if found is None:
        found = type(planner)._planted_first = original(writer, planner)
    writer.arrangement = found
    return found


@fault(kills="CKPT-095", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.prepare_global_plan")
def several_ranks_unchecked(original: Any, writer: Any, plans: Any) -> Any:
    """save_distributed=False is not refused with several ranks; torch writes a corrupt file."""
    writer.options = dataclasses.replace(writer.options, save_distributed=True)
    return original(writer, plans)


one_process_writes_shards = patched(
    "One process that asks for no consolidation gets shards and no final files; in torch too.",
    swap(
        "twinproof.checkpoint.plan:WriterOptions.writes_shards",
        property(lambda options: not options.enable_consolidation),
    ),
    kills="CKPT-095",
)


@fault(kills="CKPT-084", at="twinproof.checkpoint.publish:Staging._publish_folder")
def second_save_ignored(original: Any, staging: Any) -> None:
    """A save over a checkpoint changes nothing."""
    if staging.target.exists():
        staging.discard()
        return
    original(staging)


announced_by_the_last_save = patched(
    "A save whose plans come from a cache goes by the replicas that were announced to the save before.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.prepare_global_plan",
        "if usable else ()",
        "if usable else self._announced",
    ),
    kills="CKPT-729",
    of="fastimpl",
)

layout_of_placeholders = patched(
    "A save whose plans come from a cache is laid out by what stands in their place.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.prepare_global_plan",
        "arrange(plans, self.options) if usable else None",
        "arrange(plans, self.options)",
    ),
    kills="CKPT-646",
)

copies_of_one_rank_fail_alone = patched(
    "What a rank raises while it copies for an asynchronous save is told to no other rank.",
    mutated(
        "twinproof.checkpoint.manager:_StagedTogether.stage",
        "together(lambda: self._stager.stage(state_dict), self._group)",
        "self._stager.stage(state_dict)",
    ),
    kills="CKPT-700",
)

ranks_without_items_are_unknown = patched(
    "A rank that holds nothing is taken for one whose plan comes from a cache.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._held",
        "if not self._is_placeholder:",
        "if self.local_items:",
    ),
    kills="CKPT-729",
)

placeholders_hold_nothing = patched(
    "A rank whose own plan comes from a cache while those of others are new does not know the replicas that it holds.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._prepared",
        "self._known(planner)",
        "self.local_items",
    ),
    kills="CKPT-729",
    of="fastimpl",
)


only_what_is_written_is_compared = patched(
    "With a plan from a cache only those replicas are compared that this rank is to write.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._held",
        "SavePlanner._cached_save_plan",
        "SavePlanner._cached_final_save_plan",
    ),
    kills="CKPT-708",
)
