"""Faults that ``test_upkeep`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.checkpoint.catalog import Verified


@fault(kills="CKPT-533", at="fastimpl.checkpoint.__main__:verify_catalog")
def only_structure_verified(original: Any, catalog: Any, *arguments: Any) -> Verified:
    """The command line looks at the structure alone, and says that it looked at the bytes."""
    return Verified(tuple(sorted(catalog.tensors)), ())


values_compared_as_numbers = patched(
    "diff compares numbers: NaN differs from itself, and 0 equals -0.",
    swap("fastimpl.checkpoint.__main__:as_bits", lambda tensor: tensor),
    kills="CKPT-534",
)


@fault(kills="CKPT-534", at="fastimpl.checkpoint.__main__:cut_rectangle")
def last_rows_not_compared(original: Any, sizes: Any, limit: int) -> Any:
    """Diff leaves the last rows out."""
    return list(original(sizes, 8))[:-1]


@fault(kills="CKPT-535", at="fastimpl.checkpoint.__main__:cut_rectangle")
def compared_whole(original: Any, sizes: Any, limit: int) -> Any:
    """Diff reads tensors whole."""
    return original(sizes, 1 << 62)


@fault(kills=("CKPT-536", "CKPT-537"), at="twinproof.checkpoint.publish:Leftover.__init__")
def only_copy_is_spare(original: Any, leftover: Any, *fields: Any) -> None:
    """The only copy of a checkpoint passes for something to delete."""
    original(leftover, *fields[:-1], False)


@fault(kills="CKPT-536", at="fastimpl.checkpoint.__main__:find_leftovers")
def age_not_looked_at(original: Any, *arguments: Any) -> Any:
    """Clean deletes what a running save makes."""
    return [dataclasses.replace(found, age_s=1e9) for found in original(*arguments)]


leftovers_not_named = patched(
    "A save says nothing of what earlier ones left.",
    swap("twinproof.checkpoint.publish:warn_of_leftovers", nothing),
    kills="CKPT-537",
)

age_of_what_lies_in_the_folder = patched(
    "Of what interrupted saves left only the first level is looked at for its age.",
    mutated("twinproof.checkpoint.publish:changed_s", "_below(path)", "(path, *path.glob('*'))"),
    kills="CKPT-536",
)
vanished_folders_raise = patched(
    "A folder that vanishes while its age is looked at is an error.",
    mutated("twinproof.checkpoint.publish:changed_s", "_below(path)", "(path, *path.rglob('*'))"),
    kills="CKPT-609",
)
rule_of_sizes_ignored = patched(
    "Of two rules for the files of a merge the second is passed over.",
    mutated("twinproof.checkpoint.shards:_checked", "mapping is not None and max_shard_size is not None", "False"),
    kills="CKPT-608",
)
first_place_of_the_last_piece = patched(
    "The first difference is that of the last piece.",
    mutated("fastimpl.checkpoint.__main__:_difference", "place = place or [", "place = ["),
    kills="CKPT-602",
)
places_inside_the_piece = patched(
    "The first difference is counted from the beginning of its piece.",
    mutated("fastimpl.checkpoint.__main__:_difference", "[a + b for", "[b for"),
    kills="CKPT-602",
)

hours_of_a_minute = patched(
    "What is to be older than so many hours has to be older than so many minutes.",
    mutated("fastimpl.checkpoint.__main__:_clean", "3600 * options.older_than", "60 * options.older_than"),
    kills="CKPT-657",
)

typed_path_is_cleaned = patched(
    "What is to be cleaned goes by the path as it was typed.",
    mutated("fastimpl.checkpoint.__main__:_clean", "options.path.resolve()", "options.path"),
    kills="CKPT-714",
    of="fastimpl",
)
