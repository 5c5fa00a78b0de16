"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

bounds_may_be_the_wrong_way_round = patched(
    "Bounds of first weights may be the wrong way round.",
    mutated("twinproof.pipeline.config:EmbeddingConfig.check", " and low <= high", ""),
    kills="PIPE-560",
)
upper_bound_may_be_infinite = patched(
    "The upper bound may be infinite.",
    mutated("twinproof.pipeline.config:EmbeddingConfig.check", " and math.isfinite(high)", ""),
    kills="PIPE-560",
)
lower_bound_may_be_infinite = patched(
    "The lower bound may be infinite.",
    mutated("twinproof.pipeline.config:EmbeddingConfig.check", "math.isfinite(low) and ", ""),
    kills="PIPE-560",
)
lengths_may_be_fractions = patched(
    "A length may be any number from 1 on.",
    mutated("twinproof.pipeline.modules:_check_lengths", "type(length) is not int or ", "length is not None and "),
    kills="PIPE-561",
)
lengths_may_be_zero = patched(
    "A length may be 0.",
    mutated("twinproof.pipeline.modules:_check_lengths", "length < 1", "length < 0"),
    kills="PIPE-561",
)
one_missing_feature_is_named = patched(
    "Of the missing features the first alone is named.",
    mutated("twinproof.pipeline.modules:_picked", "got=missing", "got=missing[:1]"),
    kills="PIPE-562",
)
short_programs_taken = patched(
    "A report of one step is made.",
    mutated("fastimpl.pipeline.overlap:overlap_report", "if count < 2:", "if count < -3:"),
    kills="PIPE-563",
)
parts_at_any_place = patched(
    "A part is taken for one at another place.",
    mutated("twinproof.pipeline.sharded:check_part", "if mine != theirs:", "if False:"),
    kills="PIPE-564",
)
contexts_of_anybody = patched(
    "The context of no batch is taken for the first one's.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._found",
        "raise PipelineError(",
        "return self._queue[0] if self._queue else PipelineError(",
    ),
    kills="PIPE-565",
)
