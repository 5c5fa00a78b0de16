"""Faults that ``test_members`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

one_of_both_on_meta = patched(
    "A batch and tables of which one is on meta are taken.",
    mutated("twinproof.pipeline.modules:_are_on_meta", "if features.values().is_meta != weight.is_meta:", "if False:"),
    kills="PIPE-582",
)
indices_never_traced = patched(
    "A traced collection gives no indices.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingCollection._by_torch",
        "if self._need_indices else None",
        "if False else None",
    ),
    kills="PIPE-583",
)
traces_asked_for_sizes = patched(
    "A trace is asked whether its features differ in size.",
    mutated(
        "twinproof.pipeline.modules:FeatureProcessedEmbeddingBagCollection._processed",
        "if not is_traced and batch",
        "if batch",
    ),
    kills="PIPE-583",
)
weights_kept = patched(
    "The weights of several features stay as they are.",
    mutated(
        "twinproof.pipeline.modules:PositionWeightedModuleCollection.reset_parameters",
        "torch.nn.init.ones_(weight)",
        "pass",
    ),
    kills="PIPE-584",
)
no_ids_measured = patched(
    "The longest of no bags is looked for.",
    mutated("twinproof.pipeline.modules:_too_long", "positions.numel() and ", ""),
    kills="PIPE-584",
)
any_processor_cut = patched(
    "Cut tables take every processor.",
    mutated(
        "twinproof.pipeline.modules:position_processors",
        "type(part) in kinds and not part._pre_processed",
        'not getattr(part, "_pre_processed", False)',
    ),
    kills="PIPE-584",
)
nothing_unexpected = patched(
    "A table-batched module expects every name.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags._load_from_state_dict",
        "unexpected[:] = [each for each in unexpected if each != name]",
        "unexpected[:] = []",
    ),
    kills="PIPE-585",
)
all_taken = patched(
    "Cut tables expect every name.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._forget_loaded", "name not in self._loaded", "False"
    ),
    kills="PIPE-585",
)
nothing_missing = patched(
    "No cut table is missing.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._load_from_state_dict",
        "missing_keys += missing",
        "pass",
    ),
    kills="PIPE-585",
)
listed_without_prefix = patched(
    "A prefix is left out.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters",
        'f"{prefix}.embedding_bags.{name}.weight" if prefix else f"embedding_bags.{name}.weight"',
        'f"embedding_bags.{name}.weight"',
    ),
    kills="PIPE-586",
)
old_memory_listed = patched(
    "A table whose memory was exchanged is listed as before.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters",
        " or known.data_ptr() != weight.data_ptr()",
        "",
    ),
    kills="PIPE-586",
)
old_memory_counts = patched(
    "What was listed of a table counts on.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.listed_parameters",
        "if param.data_ptr() == weights[name].data_ptr():",
        "if weights:",
    ),
    kills="PIPE-586",
)
absent_parts_asked = patched(
    "A rank without a part asks where it is.",
    mutated("twinproof.pipeline.sharded:check_part", "local is not None and local.is_meta", "local.is_meta"),
    kills="PIPE-587",
)
parts_never_detached = patched(
    "A part cannot be detached.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        "if func in (aten.detach.default, aten.alias.default):",
        "if False:",
    ),
    kills="PIPE-587",
)
none_listed = patched(
    "A parameter that is None is listed.",
    mutated("twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.listed_parameters", " if param is not None", ""),
    kills="PIPE-588",
)
versions_of_none = patched(
    "The version of a member that is None is asked for.",
    mutated("fastimpl.pipeline.stages:_held_tensors", "if tensor is not None:", "if True:"),
    kills="PIPE-588",
    of="fastimpl",
)
any_partial_is_uniform = patched(
    "A function of one bound is taken for one of two.",
    mutated("twinproof.pipeline.config:own_config", ' and set(function.keywords) == {"a", "b"}', ""),
    kills="PIPE-589",
)
any_function_is_uniform = patched(
    "Any function with arguments is taken for a uniform one.",
    mutated(
        "twinproof.pipeline.config:own_config",
        'getattr(function, "func", None) is torch.nn.init.uniform_ and set(function.keywords) == {"a", "b"}',
        'hasattr(function, "func")',
    ),
    kills="PIPE-589",
)
absent_parts_read = patched(
    "What a configuration leaves out is asked for.",
    mutated("twinproof.pipeline.config:own_config", "for name in names if hasattr(table, name)", "for name in names"),
    kills="PIPE-589",
)
closures_lost = patched(
    "A closure is not called.",
    mutated("twinproof.pipeline.config:InBackwardOptimizer.step", "None if closure is None else closure()", "None"),
    kills="PIPE-590",
)
