"""Faults that ``test_pinned`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PUBLISH = "twinproof.checkpoint.publish:Staging._publish_in_place"

index_beside_unsynced_names = patched(
    "The index appears in a folder whose other new names are not on disk.",
    mutated(_PUBLISH, "if name in _LAST_NAMES:", "if False:"),
    kills="CKPT-603",
)
index_among_the_files = patched(
    "The index appears in the order of names.",
    mutated(_PUBLISH, "key=lambda name: (name in _LAST_NAMES, name)", "key=lambda name: name"),
    kills="CKPT-603",
)
first_files_stay = patched(
    "What had appeared before a failure stays.",
    mutated(_PUBLISH, "in reversed(shown)", "in ()"),
    kills="CKPT-604",
)
