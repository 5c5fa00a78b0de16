"""Faults that ``test_sequences`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-500", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data")
def saved_state_held(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
    """A writer holds the state that it saved, until the next save or its end."""
    writer._kept = planner
    return original(writer, plan, planner)


@fault(kills="CKPT-501", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.reset")
def only_the_first_save_synced(original: Any, writer: Any, checkpoint_id: Any = None) -> None:
    """From its second save on a writer shows files that it has not synced."""
    original(writer, checkpoint_id)
    if getattr(writer, "_has_saved", False):
        writer.options = dataclasses.replace(writer.options, durable=False)
    writer._has_saved = True


_WRITER = "twinproof.checkpoint.dcp:HuggingFaceStorageWriter"


@fault(kills="CKPT-500", at=(f"{_WRITER}.settle", f"{_WRITER}.finish"))
def nothing_shown_after_a_failure(original: Any, writer: Any, *arguments: Any, **named: Any) -> Any:
    """After a save that failed on some rank, the writer's later saves are thrown away without a word."""
    if len(arguments) + len(named) == 2 and getattr(writer, "_has_failed", False):
        writer.staging.discard()
        return None
    try:
        return original(writer, *arguments, **named)
    except Exception:
        writer._has_failed = True
        raise
