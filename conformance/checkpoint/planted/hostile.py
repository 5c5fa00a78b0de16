"""Holes in the strict parser: what a reader must refuse passes, or what it must take is refused."""

from __future__ import annotations

from typing import Any

from conformance.checkpoint.planted.making import both, nothing
from conformance.harness import swap, wrap
from twinproof.errors import FormatError

PARSE = "twinproof.checkpoint.format"


def _refuse_extra(original: Any, name: str, fields: Any, where: str) -> Any:
    if isinstance(fields, dict) and len(fields) > 3:
        raise FormatError("unknown field", got=sorted(fields), where=f"{where}: tensor {name!r}")
    return original(name, fields, where)


def _refuse_foreign(original: Any, name: str, fields: Any, where: str) -> Any:
    entry = original(name, fields, where)
    if entry.dtype.startswith("F6") or entry.kind != entry.dtype:
        raise FormatError("no torch dtype", got=entry.dtype, where=where)
    return entry


PLANTED = (
    both("duplicate_keys_pass", "The last of two equal keys wins.", ("CKPT-400",), swap(f"{PARSE}:_unique", dict)),
    both(
        "cover_unchecked",
        "Holes, overlaps and trailing bytes pass.",
        ("CKPT-401", "CKPT-405", "CKPT-406"),
        swap(f"{PARSE}:_check_cover", nothing),
    ),
    both(
        "index_leads_anywhere",
        "An index may name any path.",
        ("CKPT-402", "CKPT-404"),
        swap("twinproof.checkpoint.catalog:_check_member", nothing),
    ),
    both(
        "unknown_fields_refused",
        "A field beyond the three is refused.",
        ("CKPT-407", "CKPT-408", "CKPT-409"),
        wrap(f"{PARSE}:_parse_entry", _refuse_extra),
    ),
    both(
        "foreign_dtype_blocks",
        "A tensor that torch cannot hold blocks its file; it does in torch's reader.",
        ("CKPT-410",),
        wrap(f"{PARSE}:_parse_entry", _refuse_foreign),
    ),
    both(
        "every_link_refused",
        "Links are refused, those of the hub's cache too.",
        ("CKPT-411",),
        swap("twinproof.checkpoint.catalog:_link_stays_near", lambda folder, name: False),
    ),
)
