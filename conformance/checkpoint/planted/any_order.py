"""Faults that ``test_any_order`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-630", at="twinproof.checkpoint.catalog:parse_sharding")
def offsets_by_position(original: Any, header: Any, file: str) -> Any:
    """Offsets of shards are taken in the order in which they stand, for the tensors in the order of the header."""
    found = original(header, file)
    return found and found._replace(offsets=dict(zip(header.entries, found.offsets.values(), strict=False)))
