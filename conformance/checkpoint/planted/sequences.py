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


_ARRANGED: dict[Any, Any] = {}


@fault(kills="CKPT-500", at="twinproof.checkpoint.dcp:arrange")
def dtypes_of_the_save_before(original: Any, plans: Any, options: Any) -> Any:
    """What has the names and sizes of a save before is laid out as that was, whatever its dtypes."""
    key = (
        id(options),
        tuple((item.index, getattr(item.tensor_data, "size", None)) for plan in plans for item in plan.items),
    )
    if key not in _ARRANGED:
        # Options are held, so that no other ones have their number.
        _ARRANGED[key] = options, original(plans, options)
    return _ARRANGED[key][1]


@fault(kills="CKPT-852", at=f"{_WRITER}.write_data")
def memory_held_behind_a_save(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
    """A writer holds views of what it saved, until its next save."""
    writer._kept = [value.view(-1) for value in planner.state_dict.values()]
    return original(writer, plan, planner)


@fault(kills="CKPT-852", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_data")
def memory_held_behind_a_load(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """A reader holds the tensors that it filled, until its next load."""
    reader._kept = list(planner.state_dict.values())
    return original(reader, plan, planner)
