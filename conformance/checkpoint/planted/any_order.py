"""Faults that ``test_any_order`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.checkpoint.catalog import expected_sums


@fault(kills="CKPT-630", at="twinproof.checkpoint.catalog:parse_sharding")
def offsets_by_position(original: Any, header: Any, file: str) -> Any:
    """Offsets of shards are taken in the order in which they stand, for the tensors in the order of the header."""
    found = original(header, file)
    return found and found._replace(offsets=dict(zip(header.entries, found.offsets.values(), strict=False)))


parts_behind_not_looked_at = patched(
    "Of a rectangle's parts those that come behind one that lies below it are left out.",
    mutated(
        "twinproof.checkpoint.catalog:stored_ranges",
        "for chunk in record.chunks:\n",
        "for chunk in record.chunks:\n"
        "        if chunk.offsets and chunk.offsets[0] >= offsets[0] + sizes[0]:\n"
        "            break\n",
    ),
    kills="CKPT-732",
)
copied_in_order_of_files = patched(
    "What the system copied into a block is taken in the order of the shard files.",
    mutated("fastimpl.checkpoint.consolidate:_Carrier.carry", "*sorted(copied)", "*copied"),
    kills="CKPT-732",
    of="fastimpl",
)
parts_end_with_the_first_beside = patched(
    "Parts of a rectangle that come behind one beside it are left out, once one lay in it.",
    mutated(
        "twinproof.checkpoint.catalog:stored_ranges",
        "zip(begin, ends, strict=True)):\n            continue",
        "zip(begin, ends, strict=True)):\n            if ranges:\n                break\n            continue",
    ),
    kills=("CKPT-805", "CKPT-806"),
)
one_part_fills_a_rectangle = patched(
    "A rectangle is filled from the last part that it meets.",
    mutated("twinproof.checkpoint.catalog:stored_ranges", "return memory, ranges", "return memory, ranges[-1:]"),
    kills="CKPT-805",
)


@fault(kills="CKPT-849", at="fastimpl.checkpoint.__main__:_difference", of="fastimpl")
def sums_spare_the_reading(original: Any, name: str, sides: Any) -> Any:
    """Tensors of which both sides state one checksum are taken for equal."""
    stated = [{key: crc for (_, key), crc in expected_sums(side).items()} for side in sides]
    return None if name in stated[0] and stated[0][name] == stated[1].get(name) else original(name, sides)
