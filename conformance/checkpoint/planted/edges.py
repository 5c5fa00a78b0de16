"""Faults that ``test_edges`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import mutated, patched, swap
from fastimpl.checkpoint.device_copies import copies_for_device

_READER = "fastimpl.checkpoint.reader:HuggingFaceStorageReader"
_WRITER = "fastimpl.checkpoint.writer:HuggingFaceStorageWriter"


def _forget(each: Any, choose: Any) -> None:
    """What is told is not kept."""


_NEVER_TOLD = property(lambda each: copies_for_device, _forget)

least_age_is_too_young = patched(
    "A leftover that is exactly as old as it has to be is kept.",
    mutated("fastimpl.checkpoint.__main__:_clean", "each.age_s >= 3600", "each.age_s > 3600"),
    kills="CKPT-817",
    of="fastimpl",
)
last_load_alone_counts = patched(
    "A reader of quantized tensors tells the bytes of its last read alone.",
    mutated("fastimpl.checkpoint.quantized:_AddedRanges.read", "stats.read_bytes +=", "stats.read_bytes ="),
    kills="CKPT-818",
    of="fastimpl",
)
reader_forgets_its_copies = patched(
    "A reader says that it copies as at first, whatever it was told.",
    swap(f"{_READER}.choose_copies", _NEVER_TOLD),
    kills="CKPT-819",
    of="fastimpl",
)
writer_forgets_its_copies = patched(
    "A writer says that it copies as at first, whatever it was told.",
    swap(f"{_WRITER}.choose_copies", _NEVER_TOLD),
    kills="CKPT-819",
    of="fastimpl",
)
one_element_too_many = patched(
    "A shape of exactly 2 to the power of 60 elements passes.",
    mutated("twinproof.checkpoint.format:_parse_entry", "count >= 2**60", "count > 2**60"),
    kills="CKPT-820",
)
nothing_is_never_too_much = patched(
    "A shape without elements passes whatever its other sizes are.",
    mutated("twinproof.checkpoint.format:_parse_entry", "count *= size or 1", "count *= size"),
    kills="CKPT-820",
)
stagers_are_not_waited_for = patched(
    "A manager does not let the stager that it is given be waited for.",
    mutated(
        "twinproof.checkpoint.manager:_StagedTogether.synchronize_staging", "self._stager.synchronize_staging()", "pass"
    ),
    kills="CKPT-822",
)
two_keys_of_the_library = patched(
    "A file of the library with two keys of metadata stays as it is, whichever of them is first.",
    mutated("twinproof.checkpoint.format:with_options", "layout.metadata or {}) < 2", "layout.metadata or {}) <= 2"),
    kills="CKPT-823",
)
longest_header_refused = patched(
    "A header of the greatest length that the format allows is refused.",
    mutated("twinproof.checkpoint.format:lay_out", "> HEADER_BYTES_MAX:", ">= HEADER_BYTES_MAX:"),
    kills="CKPT-824",
)
longest_remote_header_warned_of = patched(
    "A header of the greatest length that remote readers read is warned of.",
    mutated("twinproof.checkpoint.format:lay_out", "> HEADER_BYTES_REMOTE:", ">= HEADER_BYTES_REMOTE:"),
    kills="CKPT-824",
)
