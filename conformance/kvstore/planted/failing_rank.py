"""Planted bugs of calls that fail on one rank."""

from __future__ import annotations

from conformance.harness import mutated, patched

group_of_a_failed_save = patched(
    "The group that a save makes for itself is given back where the save succeeds.",
    mutated(
        "twinproof.checkpoint.groups:group_to_save_in",
        "        finally:\n            end_group(made)\n",
        "        except OSError:\n            raise\n        else:\n            end_group(made)\n",
    ),
    kills="KV-374",
    of="fastimpl",
)

who_waited_is_at_fault = patched(
    "A rank that waited for another says what it heard while it waited.",
    mutated("twinproof.kvstore.disk:_raise_named", " if not isinstance(failure, DistributedError)", ""),
    kills="KV-374",
    of="fastimpl",
)
