"""Faults that ``test_seldom_ranks`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PLAN, _PLANNERS = "twinproof.checkpoint.plan", "twinproof.checkpoint.planners"
_DCP = "twinproof.checkpoint.dcp"
_EXCHANGE = "fastimpl.checkpoint.exchange:Exchange"

every_dimension_is_strided = patched(
    "A strided shard cuts every dimension.",
    mutated(f"{_PLANNERS}:_is_strided", " and placement.dim == dim", ""),
    kills="CKPT-775",
)
plain_shards_beside_strided = patched(
    "Of a tensor with a strided shard the other shards are left out.",
    mutated(f"{_PLANNERS}:_runs", "not placement.is_shard(dim) and not", "not"),
    kills="CKPT-775",
)
others_beside_packed = patched(
    "Other tensors than the packed ones are left out of a save.",
    mutated(
        f"{_PLANNERS}:HuggingFaceSavePlanner.create_local_plan",
        "[item for item in plan.items if item.index.fqn not in packed]",
        "list[WriteItem]()",
    ),
    kills="CKPT-775",
)
sharded_tensors_shared = patched(
    "An asynchronous save stores what a ShardedTensor holds later.",
    mutated(f"{_PLAN}:_copied", 'copy.deepcopy(value) if value.device.type == "cpu" else value.cpu()', "value"),
    kills="CKPT-781",
)
quantized_tensors_copied = patched(
    "Quantized tensors are copied, though no file holds them.",
    mutated(f"{_PLAN}:_copied", " and not value.is_quantized", ""),
    kills="CKPT-781",
)
any_group_saves = patched(
    "A writer's group may be of any ranks.",
    mutated(
        f"{_DCP}:HuggingFaceStorageWriter.prepare_global_plan",
        "len(plans) != rank_count_of(self.group)",
        "self.group is None and len(plans) > 1",
    ),
    kills="CKPT-782",
)
writers_end_groups_twice = patched(
    "A writer ends its group though all have ended.",
    mutated(
        f"{_DCP}:HuggingFaceStorageWriter.close", "end_group(self.group)", "dist.destroy_process_group(self.group)"
    ),
    kills="CKPT-783",
)
managers_end_groups_twice = patched(
    "A manager ends its group though all have ended.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.close",
        "end_group(self._group)",
        "dist.destroy_process_group(self._group)",
    ),
    kills="CKPT-783",
)
failing_posts_forgotten = patched(
    "A message that cannot be sent is forgotten.",
    mutated(f"{_EXCHANGE}._post", "current.failure = current.failure or error", "pass"),
    kills="CKPT-784",
    of="fastimpl",
)
lost_answers_forgotten = patched(
    "A message that does not arrive is told as one of a rank that has failed.",
    mutated(f"{_EXCHANGE}.finish", "failure = failure or DistributedError(", "DistributedError("),
    kills="CKPT-784",
    of="fastimpl",
)
failed_senders_forgotten = patched(
    "What a rank sends that has failed is taken for what was asked of it.",
    mutated(f"{_EXCHANGE}.finish", "if failure is None and failed:", "if False:"),
    kills="CKPT-784",
    of="fastimpl",
)
columns_are_runs = patched(
    "Columns of rows that are read when they are due are stored as whole rows.",
    mutated("fastimpl.checkpoint.blockio:LocalPart.place", " and self.is_run", ""),
    kills="CKPT-795",
    of="fastimpl",
)
all_ranks_share_theirs = patched(
    "A save by all ranks uses the group of the caller.",
    mutated(
        "twinproof.checkpoint.groups:group_to_save_in",
        "group is None or dist.get_world_size(group) == dist.get_world_size(everyone)",
        "group is None",
    ),
    kills="CKPT-796",
)
made_groups_stay = patched(
    "A group that was made for a save stays.",
    mutated("twinproof.checkpoint.groups:group_to_save_in", "end_group(made)", "pass"),
    kills="CKPT-796",
)
any_backend_saves = patched(
    "A group that carries nothing of the CPU passes.",
    mutated("twinproof.checkpoint.groups:group_to_save_in", 'if "cpu:" not in backends:', "if False:"),
    kills="CKPT-796",
)
unread_messages_forgotten = patched(
    "That nothing could be read for a message is forgotten by who was to send it.",
    mutated(
        f"{_EXCHANGE}.start",
        "current.failure = current.failure or error",
        "pass",
    ),
    kills="CKPT-797",
    of="fastimpl",
)
writers_refuse_alone = patched(
    "What one rank refuses of a writer it raises alone, and the others go on and wait for it.",
    mutated(
        f"{_DCP}:HuggingFaceStorageWriter.__init__",
        "all_or_none(own, self.close)",
        "all_or_none(None, self.close)",
    ),
    kills="CKPT-809",
)
managers_refuse_alone = patched(
    "What one rank refuses of a manager it raises alone, and the others go on and wait for it.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.__init__",
        "all_or_none(self._group, self.close)",
        "all_or_none(None, self.close)",
    ),
    kills="CKPT-809",
)
refused_writers_keep_their_groups = patched(
    "A writer that is refused keeps the group that it has made.",
    mutated(f"{_DCP}:HuggingFaceStorageWriter.__init__", "all_or_none(own, self.close)", "all_or_none(own, dict)"),
    kills="CKPT-809",
)
retention_ends_saves = patched(
    "A save that cannot ask for retention fails on the rank that asks.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._saved", "except Exception as error:", "except () as error:"
    ),
    kills="CKPT-810",
)
one_rank_saves_for_all = patched(
    "A rank that saves alone by a writer of all ranks waits for the others.",
    mutated(
        f"{_DCP}:HuggingFaceStorageWriter.prepare_global_plan",
        "if len(plans) != rank_count_of(self.group)",
        "self.group = self.group if len(plans) > 1 else None\n    if len(plans) != rank_count_of(self.group)",
    ),
    kills="CKPT-841",
)
adapted_alone = patched(
    "A rank whose adapter fails raises alone, and the others go on.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._load_hf",
        "together(lambda: self._set_model(self._from_hf(without_parts(targets), names)), self._group)",
        "self._set_model(self._from_hf(without_parts(targets), names))",
    ),
    kills="CKPT-842",
)


closed_without_a_look_at_the_group = patched(
    "A group that is gone is given back again.",
    mutated("twinproof.checkpoint.groups:_made", "group is not None and dist.is_initialized()", "group is not None"),
    kills="CKPT-783",
)
ranks_waited_for_as_torch_does = patched(
    "The group of a writer waits for ranks as long as torch does that was told nothing.",
    mutated("twinproof.checkpoint.groups:_patience", "max(_limit(), default_pg_timeout)", "default_pg_timeout"),
    kills="CKPT-862",
)
saved_over_a_group_that_is_gone = patched(
    "A writer goes on over the group that it made before.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.set_up_storage_writer", "is_gone(self.group)", "False"),
    kills="CKPT-862",
)
names_without_shards_lost = patched(
    "A name of which this rank has no shard is not asked for.",
    mutated(f"{_PLANNERS}:FillingPlanner.set_up_planner", "self.state_dict.update(without)", "pass"),
    kills=("CKPT-947", "CKPT-948"),
)
names_of_others_alone = patched(
    "What stands in a list where this rank has no shard stays what torch puts there.",
    mutated(
        f"{_PLANNERS}:FillingPlanner.set_up_planner",
        "self.state_dict.update(without)",
        "[self.state_dict.setdefault(name, value) for name, value in without.items()]",
    ),
    kills="CKPT-947",
)
flat_names_alone = patched(
    "Of targets that are not to be flattened, those without a shard are not asked for.",
    mutated(f"{_PLANNERS}:FillingPlanner.set_up_planner", "else (state_dict, {})", "else ({}, {})"),
    kills="CKPT-948",
)
