"""Faults that ``test_wrong_types`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.errors import ConfigError


@fault(kills="KV-230", at="twinproof.kvstore.disk:check_store")
def argument_not_named(original: Any, store: Any) -> None:
    """What is no store is refused without the argument that it was given for."""
    try:
        original(store)
    except ConfigError as error:
        raise ConfigError(error.message, got=error.got) from None


what_is_no_tensor_not_named = patched(
    "What is no tensor is refused without the argument that it was given for.",
    mutated(
        "twinproof.kvstore.options:check_tensor", 'expected="torch.Tensor", where=where)', 'expected="torch.Tensor")'
    ),
    kills="KV-283",
)

scores_not_named = patched(
    "Scores of a wrong shape or kind are refused without saying that they are scores.",
    mutated(
        "twinproof.kvstore.store:KVStore.set_scores", 'check_tensor(scores, "scores")', 'check_tensor(scores, "values")'
    ),
    kills="KV-283",
)

form_not_told = patched(
    "A save in a form that there is not is refused without the form.",
    mutated("twinproof.kvstore.disk:_parts", "got=form, ", ""),
    kills="KV-284",
)

thresholds_not_told = patched(
    "A threshold of an evictor is refused without its value.",
    mutated(
        "twinproof.kvstore.eviction:BackgroundEvictor.__init__", '"not a threshold", got=value,', '"not a threshold",'
    ),
    kills="KV-284",
)

flags_are_chunks = patched(
    "A chunk of rows may be any number above 0: True is 1.",
    mutated(
        "twinproof.kvstore.disk:_check_chunk", "type(chunk_rows) is not int or chunk_rows < 1", "not chunk_rows >= 1"
    ),
    kills="KV-284",
)
