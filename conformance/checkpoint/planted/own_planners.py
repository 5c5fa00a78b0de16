"""Faults that ``test_own_planners`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_CATALOG = "twinproof.checkpoint.catalog"
_DCP = "twinproof.checkpoint.dcp"
_FORMAT = "twinproof.checkpoint.format"
_PLAN, _PLANNERS = "twinproof.checkpoint.plan", "twinproof.checkpoint.planners"

shards_by_the_index = patched(
    "Shard files say of a tensor's place what the index of its item says.",
    mutated(
        "twinproof.checkpoint.shards:_shard", "tuple(item.tensor_data.chunk.offsets)", "tuple(item.index.offset or ())"
    ),
    kills="CKPT-769",
)
replicas_by_the_index = patched(
    "Items without an offset in their index cannot be compared.",
    mutated(f"{_PLAN}:_offsets", "tuple(item.tensor_data.chunk.offsets)", "tuple(item.index.offset)"),
    kills="CKPT-769",
)
items_without_data_pass = patched(
    "An item that says nothing of its tensor passes as one of a tensor.",
    mutated(f"{_PLAN}:check_local_plan", " or item.tensor_data is None", ""),
    kills="CKPT-770",
)
sizes_of_the_first_part = patched(
    "The first part of a tensor says its size, whatever the others say.",
    mutated(f"{_PLANNERS}:check_agreed", "form != expected", "(form or ())[:1] != (expected or ())[:1]"),
    kills="CKPT-770",
)
last_part_of_a_shard = patched(
    "A shard file holds the last of several parts.",
    mutated(
        "twinproof.checkpoint.shards:write_shards", "if len({s.name for s in members}) != len(members):", "if False:"
    ),
    kills="CKPT-770",
)
any_memory_is_filled = patched(
    "A target of any layout is filled.",
    mutated(f"{_FORMAT}:check_fillable", "target.layout != torch.strided or ", ""),
    kills="CKPT-771",
)
quantized_targets_filled = patched(
    "A quantized target is filled.",
    mutated(f"{_FORMAT}:check_fillable", " or target.is_quantized", ""),
    kills="CKPT-771",
)
objects_have_sizes = patched(
    "A target that is no tensor is asked for its size.",
    mutated(f"{_PLANNERS}:FillingPlanner._check_asked", "isinstance(value, torch.Tensor)\n", "True\n"),
    kills="CKPT-772",
)
saved_objects_have_sizes = patched(
    "What was saved beside tensors is asked for its size.",
    mutated(
        f"{_PLANNERS}:FillingPlanner._check_asked",
        "isinstance(saved.get(fqn), TensorStorageMetadata)",
        "fqn in saved",
    ),
    kills="CKPT-772",
)
scales_need_values = patched(
    "Scales are looked up with their values, which may not be there.",
    mutated(f"{_DCP}:find_quantized", "if name.endswith(suffix) and values in catalog.tensors:", "if name != values:"),
    kills="CKPT-772",
)
lookups_need_offsets = patched(
    "A look-up without an offset finds scalars alone.",
    mutated(f"{_CATALOG}:Catalog.__getitem__", "index.offset or (0,) * len(record.shape)", "index.offset or ()"),
    kills="CKPT-773",
)
unknown_names_are_a_crash = patched(
    "A look-up of an unknown name is no KeyError.",
    mutated(f"{_CATALOG}:Catalog.__getitem__", "if record is not None:", "if True:"),
    kills="CKPT-773",
)
two_dots_pass = patched(
    "A name that begins with two dots passes in an index.",
    mutated(f"{_CATALOG}:_check_member", ' or name.startswith("..")', ""),
    kills="CKPT-774",
)
hidden_files_keep_saves_out = patched(
    "A hidden file keeps a save out of its folder.",
    mutated("twinproof.checkpoint.publish:Staging._check_others", ' and not name.startswith(".")', ""),
    kills="CKPT-774",
)
parts_before_tensors_pass = patched(
    "A part that begins before its tensor passes.",
    mutated(f"{_CATALOG}:check_tiling", "o >= 0 and s >= 0", "s >= 0"),
    kills="CKPT-798",
)
no_checkpoint_is_a_crash = patched(
    "A load planner that was told of no checkpoint does not say what is missing.",
    mutated(f"{_PLANNERS}:HuggingFaceLoadPlanner.create_local_plan", " if self.metadata is not None else {}", ""),
    kills="CKPT-798",
)
lost_items_pass = patched(
    "A planner's last plan passes whatever it has.",
    mutated("twinproof.checkpoint.plan:check_item_count", "len(plan.items) != planned_count", "False"),
    kills="CKPT-814",
)
more_items_pass = patched(
    "A planner's last plan may have more items than were planned.",
    mutated(
        "twinproof.checkpoint.plan:check_item_count",
        "len(plan.items) != planned_count",
        "len(plan.items) < planned_count",
    ),
    kills="CKPT-814",
)
lost_replicas_are_a_bare_error = patched(
    "A replica that is not there any more is a bare KeyError.",
    mutated("fastimpl.checkpoint.writer:_replica", "if chunk not in by_chunk:", "if False:"),
    kills="CKPT-815",
    of="fastimpl",
)
