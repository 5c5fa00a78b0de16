"""Faults that ``test_arguments`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-280", at="twinproof.pipeline.driver:check_placement", of="fastimpl")
def placement_ignored(original: Any, stream: str, use: Any, after_dist: bool, before: bool, after_opt: Any) -> Any:
    """embedding_lookup_after_opt=False is taken and ignored."""
    return original(stream, use, after_dist, before, after_opt or None)


@fault(kills="PIPE-281", at="twinproof.pipeline.driver:check_placement")
def one_stream_wins(original: Any, stream: str, use: Any, after_dist: bool, before: bool, after_opt: Any) -> Any:
    """Of two names for the lookup's stream one wins silently."""
    return original(stream if use is None else "data_dist", use, after_dist, before, after_opt)


@fault(kills="PIPE-282", at="TrainPipelineSparseDist.__init__")
def another_order(
    original: Any, schedule: Any, model: Any, optimizer: Any, device: Any = "cpu", *args: Any, **options: Any
) -> None:
    """Arguments stand in other positions than torchrec's."""
    # Our own order before torchrec's was taken over.
    if len(args) > 1 and "custom_model_fwd" not in options:
        args = (args[0], False, *args[2:])
        options["custom_model_fwd"] = None
    original(schedule, model, optimizer, device, *args, **options)


@fault(kills="PIPE-283", at="twinproof.pipeline.stages:refuse")
def meaningless_arguments_taken(original: Any, **given: bool) -> None:
    """Arguments without a meaning here are taken."""


interval_of_none_taken = patched(
    "Replicas are averaged every 0 batches, which the first step cannot.",
    mutated("twinproof.pipeline.stages:Options.__post_init__", "interval < 1", "interval < 0"),
    kills="PIPE-442",
)
stale_in_silence = patched(
    "SemiSync does not say that the optimizer updates what a lookup reads.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync.__init__", "looks_up_before_update=True,", ""),
    kills="PIPE-453",
)
unused_ranks_taken = patched(
    "Ranks of a sharding that uses none are taken.",
    mutated("twinproof.pipeline.sharding:TableSharding._check_parts", "len(self.ranks) != needed", "False"),
    kills="PIPE-520",
)
unused_stores_taken = patched(
    "Buckets and stores of a sharding that uses none are taken.",
    mutated("twinproof.pipeline.sharding:TableSharding._check_parts", "is_stored != is_one or (", "False or ("),
    kills="PIPE-520",
)
bags_ignore_arguments = patched(
    "An argument of table-batched bags that has no effect beside another is taken.",
    mutated("twinproof.pipeline.config:check_given", "value is not None and unused is not None", "False"),
    kills="PIPE-521",
)
weights_too_many = patched(
    "Weights beyond the tables are dropped.",
    mutated("twinproof.pipeline.config:check_given", "len(weights) != len(tables)", "len(weights) < len(tables)"),
    kills="PIPE-521",
)

anything_steps_in_the_backward = patched(
    "What is no fused optimizer passes for one, until its learning rate is asked for.",
    mutated(
        "twinproof.pipeline.config:InBackwardOptimizer.__init__",
        "check_kind(config, FusedOptimizer,",
        "check_kind(config, object,",
    ),
    kills="PIPE-685",
)
false_is_no_optimizer = patched(
    "An optimizer that is false is passed over, and the default one taken.",
    mutated(
        "twinproof.pipeline.sharded:_optimizer_of",
        "carried if optimizer is None else optimizer",
        "optimizer or carried",
    ),
    kills="PIPE-685",
)
seeds_of_more_bits = patched(
    "A seed may have more bits than 64, which are dropped.",
    mutated("twinproof.pipeline.sharding:check_seed", "2**64", "2**65"),
    kills="PIPE-685",
)

masters_are_no_tables = patched(
    "Of an optimizer with masters, the masters are taken for all that it trains.",
    mutated(
        "twinproof.pipeline.stages:Call.is_late",
        "for param in trained_params(optimizer)",
        'for group in optimizer.param_groups for param in group["params"]',
    ),
    kills="PIPE-541",
)
freed_where_copied_in_place = patched(
    "The storage of features is freed early, it is said, where batches are copied in place.",
    mutated(
        "twinproof.pipeline.stages:Options.__post_init__",
        "free_features_storage_early=self.free_features_storage_early,\n        clear_data_dist_inputs="
        "self.clear_data_dist_inputs,\n    )\n    interval",
        "free_features_storage_early=self.free_features_storage_early and not self.copies_in_place,\n        "
        "clear_data_dist_inputs=self.clear_data_dist_inputs,\n    )\n    interval",
    ),
    kills="PIPE-625",
)
scripted_where_strict = patched(
    "A pipeline that is strict scripts its modules, it is said.",
    mutated(
        "twinproof.pipeline.stages:Options.__post_init__",
        "refuse(\n        apply_jit=self.apply_jit,",
        "refuse(\n        apply_jit=self.apply_jit and not self.strict,",
    ),
    kills="PIPE-625",
)
