"""Faults that ``test_triggers`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="KV-154", at="twinproof.kvstore.eviction:BackgroundEvictor._stepped")
def round_after_every_step(original: Any, evictor: Any, table: str) -> None:
    """The background evictor runs a round after every step of training."""
    evictor._step_count = 0
    evictor._trigger_steps, kept = 1, evictor._trigger_steps
    try:
        original(evictor, table)
    finally:
        evictor._trigger_steps = kept


@fault(kills="KV-155", at="twinproof.kvstore.eviction:BackgroundEvictor._has_many_bytes")
def memory_in_whole_units(original: Any, evictor: Any) -> bool:
    """The memory that triggers a round is rounded down to whole units."""
    # As upstream, which compares whole gigabytes.
    evictor._trigger_bytes, kept = (evictor._trigger_bytes or 0) // 1024 * 1024, evictor._trigger_bytes
    try:
        return bool(original(evictor))
    finally:
        evictor._trigger_bytes = kept


other_listeners_removed = patched(
    "To remove a listener of steps removes the others.",
    mutated(
        "twinproof.kvstore.store:KVStore.remove_listener",
        "in self._step_listeners if known != listener",
        "in self._step_listeners if known == listener",
    ),
    kills="KV-236",
)


waits_for_the_next_alone = patched(
    "Waiting ends when a round has begun.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor.wait", "(self._due or self._busy)", "self._due"),
    kills="KV-251",
)
