"""Faults that ``test_hostile_verdicts`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.errors import FormatError


@fault(kills=("CKPT-407", "CKPT-408", "CKPT-409"), at="twinproof.checkpoint.format:_parse_entry")
def unknown_fields_refused(original: Any, name: str, fields: Any, where: str) -> Any:
    """A tensor's header with a field besides dtype, shape and data_offsets is refused."""
    if isinstance(fields, dict) and len(fields) > 3:
        expected, place = "dtype, shape, data_offsets", f"{where}: tensor {name!r}"
        raise FormatError("unknown field", got=sorted(fields), expected=expected, where=place)
    return original(name, fields, where)


surrogates_pass = patched(
    "A name with an unpaired surrogate is accepted.",
    swap("twinproof.checkpoint.format:_check_unicode", nothing),
    kills="CKPT-408",
)
any_depth_passes = patched(
    "A header with any depth of nesting is accepted.",
    swap("twinproof.checkpoint.format:_DEPTH_MAX", 1 << 20),
    kills="CKPT-408",
)

empty_tensors_come_first = patched(
    "Tensors are ordered by where they begin alone: an empty one has to be listed before the one that begins there.",
    mutated("twinproof.checkpoint.format:_check_cover", "item[1][2:]", "item[1].begin"),
    kills="CKPT-624",
)
