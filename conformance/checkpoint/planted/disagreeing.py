"""Faults that ``test_disagreeing`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PLANNERS, _SHARDS = "twinproof.checkpoint.planners", "twinproof.checkpoint.shards"

told_by_the_plan_alone = patched(
    "The writer compares what is left of the plans when torch has removed what begins at one place.",
    mutated("twinproof.checkpoint.plan:arrange", "*told.items, ", ""),
    kills="CKPT-944",
)
removed_before_it_is_compared = patched(
    "The planner of managers and save_training does not compare.",
    mutated(
        f"{_PLANNERS}:HuggingFaceSavePlanner.create_global_plan",
        "check_agreed([plan.items for plan in all_plans])",
        "pass",
    ),
    kills="CKPT-944",
)
objects_beside_tensors = patched(
    "An object beside a tensor of its name is none of this check.",
    mutated(f"{_PLANNERS}:check_agreed", "if form != expected", "if form and expected and form != expected"),
    kills="CKPT-944",
)
shards_as_they_come = patched(
    "A shard file holds the part that a rank has, whatever was planned.",
    mutated(f"{_SHARDS}:_shard", "check_planned(item, value)", "pass"),
    kills="CKPT-945",
)
states_as_they_come = patched(
    "A save in torch's format holds the part that a rank has, whatever was planned.",
    mutated(
        f"{_PLANNERS}:HuggingFaceSavePlanner.transform_object",
        "check_planned(write_item, object, any_dtype=True)",
        "pass",
    ),
    kills="CKPT-945",
)
reference_assembles_what_comes = patched(
    "The reference puts tensors together of the parts that come, whatever was planned.",
    mutated("twinproof.checkpoint.plan:SaveJob.chunks", "check_planned(item, value)", "pass"),
    kills="CKPT-945",
    of="refimpl",
)
targets_as_they_come = patched(
    "A load of all states does not compare the parts of targets with their placements.",
    mutated(f"{_PLANNERS}:check_parts", "if wrong:", "if False:"),
    kills="CKPT-946",
)
