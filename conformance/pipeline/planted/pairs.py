"""Faults that ``test_pairs`` must notice: each is seen where two options meet, and nowhere else."""

from __future__ import annotations

from conformance.harness import mutated, patched

_SHARDED = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"
_FUSED = "fastimpl.pipeline.schedules"

replicas_alone_count_no_step = patched(
    "A backward of tables that are all data-parallel is not counted as a step.",
    mutated(f"{_SHARDED}.output_dist", "parts if sent else [exchanged, *parts]", "parts"),
    kills="PIPE-494",
)
pooling_of_the_first_table = patched(
    "Tables that are looked up together are pooled as the first of them.",
    mutated(
        f"{_SHARDED}._make_lookup",
        "if first.rule.is_partial else self.tables[shard.table].pooling",
        "if first.rule.is_partial else self.tables[group.shards[0].table].pooling",
    ),
    kills="PIPE-494",
)
homes_among_the_cut_features = patched(
    "Gradients of weights come home as if the features of row-wise tables were all that there are.",
    mutated(
        "fastimpl.pipeline.exchange:AllToAll._segments", "positions=where[part.positions]", "positions=part.positions"
    ),
    kills="PIPE-494",
)
stashed_before_the_start = patched(
    "Gradients are stashed from the first step on, wherever staleness starts.",
    mutated(
        "twinproof.pipeline.driver:TrainPipelineSemiSync._step_dense",
        "if not self._stashes or self.processed_count < self._start_batch:",
        "if not self._stashes:",
    ),
    kills="PIPE-495",
)
stored_rows_ahead_of_edits = patched(
    "Rows of key-value tables are looked up before the optimizer too, where no edit is seen.",
    mutated(f"{_FUSED}:may_hoist", "not is_stored and not p.is_late(call)", "not p.is_late(call)"),
    kills="PIPE-495",
)
last_batches_processed_where_pulled_late = patched(
    "The last batches are processed, though they are not wanted, where the loader's end was found before a forward.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.take",
        "if self._dataloader_exhausted and not self._execute_all:",
        "if self.options.enqueues_behind_forward and self._dataloader_exhausted and not self._execute_all:",
    ),
    kills="PIPE-495",
)
other_name_contradicts_nothing = patched(
    "A lookup before the optimizer, by its other name, may be behind the next exchange.",
    mutated(
        "twinproof.pipeline.stages:check_placement", "(before and after_dist)", "(before_optimizer and after_dist)"
    ),
    kills="PIPE-496",
)
processors_of_replicas_taken = patched(
    "Feature processors are taken where a table is data-parallel.",
    mutated(
        f"{_SHARDED}._check_processed",
        "sharding.rule.is_partial or sharding.rule.is_replicated",
        "sharding.rule.is_partial",
    ),
    kills="PIPE-496",
)
