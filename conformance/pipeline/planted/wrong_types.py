"""Faults that ``test_wrong_types`` must notice: a check that is left out, so that a bare error of Python comes."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, swap
from twinproof.errors import ConfigError


@fault(kills="PIPE-380", at="twinproof.pipeline.modules:check_tables")
def one_table_taken_apart(original: Any, tables: Any, kind: Any) -> Any:
    """A single configuration passes for a list, and the message does not say what a list holds."""
    try:
        return original(tables, kind)
    except ConfigError as error:
        raise ConfigError(error.message, got=error.got, expected=None, where=error.where) from None


@fault(kills="PIPE-381", at="twinproof.pipeline.sharding:check_plan")
def shardings_not_named(original: Any, tables: Any, plan: Any, world_size: int) -> Any:
    """A plan of strings is refused without the table that it is for."""
    try:
        return original(tables, plan, world_size)
    except ConfigError as error:
        raise ConfigError(error.message, got=error.got, expected=error.expected, where=None) from None


@fault(kills="PIPE-382", at="twinproof.pipeline.driver:check_answer")
def any_answer_passes(original: Any, answer: Any, model: Any) -> Any:
    """What the forward returned is taken for losses, whatever it is."""
    return answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, answer)


@fault(kills="PIPE-383", at="twinproof.pipeline.stages:untraceable")
def reason_alone(original: Any, model: Any, error: Exception) -> ConfigError:
    """A model that cannot be traced is refused without what can be done."""
    return ConfigError("the model cannot be traced", got=repr(error), expected=None, where=None)


@fault(kills="PIPE-384", at="twinproof.pipeline.driver:check_parts")
def parts_not_looked_at(original: Any, model: Any, optimizer: Any) -> None:
    """Anything passes for a model and for an optimizer, until a step is made."""


flags_may_be_text = patched(
    "A flag that is text is taken: false is true.",
    mutated("twinproof.pipeline.stages:Options.__post_init__", "strict=self.strict,", ""),
    kills="PIPE-488",
)

any_check_of_ids = patched(
    "What is no check of ids passes for one, which then says nothing of bad ids.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.__init__",
        "check_bounds_kind(bounds_check)",
        "bounds_check",
    ),
    kills="PIPE-489",
)

letters_are_features = patched(
    "A string passes for a list of features: each letter is one.",
    mutated("twinproof.pipeline.config:EmbeddingConfig.__post_init__", "isinstance(names, str | bytes) or ", ""),
    kills="PIPE-490",
)

no_engine_where_it_is_false = patched(
    "An engine that counts as false is none, and the device's own stands in for it.",
    mutated(
        "fastimpl.pipeline.stages:StreamedStages.__init__",
        "engine_for(device) if options.engine is None else check_engine(options.engine)",
        "check_engine(options.engine or engine_for(device))",
    ),
    kills="PIPE-670",
    of="fastimpl",
)

loaders_are_iterators = patched(
    "What is no iterator is Python's error.",
    swap("twinproof.pipeline.config:check_loader", lambda loader: loader),
    kills="PIPE-696",
)
iterables_are_iterators = patched(
    "What can be iterated passes for an iterator.",
    mutated("twinproof.pipeline.config:check_loader", '"__next__"', '"__iter__"'),
    kills="PIPE-696",
)
any_forward = patched(
    "What cannot be called is called.",
    mutated("twinproof.pipeline.stages:Options.__post_init__", "if self.custom_model_fwd is not None:", "if False:"),
    kills="PIPE-697",
)
no_forward_where_it_is_false = patched(
    "A forward that counts as false is none.",
    mutated(
        "twinproof.pipeline.stages:Options.__post_init__", "self.custom_model_fwd is not None", "self.custom_model_fwd"
    ),
    kills="PIPE-697",
)
any_start = patched(
    "What is no number of a batch is compared with one.",
    swap("twinproof.pipeline.driver:check_start", lambda start_batch: start_batch),
    kills="PIPE-697",
)
