"""More faults in headers, file names, the index, and which chunks make up a tensor."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from conformance.checkpoint.planted.making import (
    Patch,
    both,
    first_only,
    library_order,
    library_text,
    nothing,
    together,
)
from conformance.harness import swap, wrap
from twinproof.errors import PlanError, UnsupportedError

LAYOUT = "twinproof.checkpoint.format"
INDEX = "twinproof.checkpoint.dcp:build_index"
TOTAL = "twinproof.checkpoint.plan:Arrangement.total_size_bytes"
ASSIGN = "twinproof.checkpoint.plan:assign_files"
SPLIT = "twinproof.checkpoint.plan:_split_greedily"
CATALOG = "twinproof.checkpoint.catalog"


def _laid_out(around: Any) -> Patch:
    """Wrap ``lay_out`` where the saves of the fast version look it up."""
    return together(wrap("twinproof.checkpoint.plan:lay_out", around), wrap(f"{LAYOUT}:lay_out", around))


def _named(kind: type[str]) -> Patch:
    """Have names compare as ``kind`` says while they are sorted."""
    return wrap(f"{LAYOUT}:check_name", lambda original, name: kind(original(name)))


class _AsGiven(str):
    """A name that stays where it was given."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return False


def _padded_with_nul(original: Any, *arguments: Any, **options: Any) -> Any:
    layout = original(*arguments, **options)
    return dataclasses.replace(layout, header=_nul_for_spaces(layout.header))


def _nul_for_spaces(header: bytes) -> bytes:
    text = header.rstrip(b" ")
    return text + b"\0" * (len(header) - len(text))


def _next_file(original: Any, weight_map: Any, total: int) -> bytes:
    files = sorted(set(weight_map.values()))
    following = dict(zip(files, [*files[1:], *files[:1]], strict=True))
    return bytes(original({name: following[file] for name, file in weight_map.items()}, total))


def _as_given(original: Any, weight_map: Any, total: int) -> bytes:
    content = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _elements_counted(arrangement: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in arrangement.tensors.values())


def _highest_index_counted(original: Any, sizes: Any, mapping: Any, *rest: Any, **options: Any) -> Any:
    groups = original(sizes, mapping, *rest, **options)
    count = max(mapping.values()) if mapping else len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups.values(), start=1)}


def _later_wins(original: Any, builder: Any, file: str, header: Any, only: Any) -> None:
    if "DCP_SHARDING_INFO" not in header.metadata:
        for name in header.entries:
            builder.catalog.tensors.pop(name, None)
    original(builder, file, header, only)


PLANTED = (
    both(
        "padded_with_nul",
        "A header is padded with NUL bytes.",
        ("CKPT-013",),
        together(_laid_out(_padded_with_nul), library_text(_nul_for_spaces)),
    ),
    both(
        "names_as_given",
        "Tensors lie in the order of the state dict, as torch's consolidation writes them.",
        ("CKPT-015", "CKPT-019"),
        together(_named(_AsGiven), library_order(None)),
    ),
    both(
        "long_header_without_a_word",
        "A header that model hubs cannot parse is written without a warning.",
        ("CKPT-018",),
        swap(f"{LAYOUT}:HEADER_BYTES_REMOTE", 1 << 40),
    ),
    both(
        "total_counts_elements",
        "total_size counts elements, not bytes.",
        ("CKPT-037",),
        swap(TOTAL, property(_elements_counted)),
    ),
    both(
        "index_points_elsewhere",
        "The index names the file after the one that holds a tensor.",
        ("CKPT-038", "CKPT-040"),
        wrap(INDEX, _next_file),
    ),
    both(
        "sixth_digit_taken",
        "More files than five digits can number are taken.",
        ("CKPT-039",),
        swap("twinproof.checkpoint.plan:FILE_COUNT_MAX", 1 << 40),
    ),
    both(
        "one_lacking_name_shown",
        "Of the names that the mapping lacks only the first is shown.",
        ("CKPT-041",),
        swap("twinproof.checkpoint.plan:PlanError", first_only(PlanError)),
    ),
    both(
        "highest_index_counted",
        "Names say '-of-N' for the mapping's highest index, whatever is saved.",
        ("CKPT-042",),
        wrap(ASSIGN, _highest_index_counted),
    ),
    both(
        "full_file_is_too_full",
        "A tensor that just fits into a file goes to the next one.",
        ("CKPT-043",),
        wrap(SPLIT, lambda original, sizes, limit: original(sizes, limit - 1)),
    ),
    both("index_as_given", "The index names tensors in the state dict's order.", ("CKPT-044",), wrap(INDEX, _as_given)),
    both(
        "one_leaf_shown",
        "Of the leaves that are no tensors only the first is shown.",
        ("CKPT-049",),
        swap("twinproof.checkpoint.plan:UnsupportedError", first_only(UnsupportedError)),
    ),
    both(
        "later_file_wins",
        "Of two files with one tensor the later wins, as if it were not stale; in torch too.",
        ("CKPT-403",),
        wrap(f"{CATALOG}:_Builder.add_file", _later_wins),
    ),
    both(
        "missing_number_ignored",
        "A file that is missing from a numbered set without an index is not noticed.",
        ("CKPT-403",),
        swap(f"{CATALOG}:_check_numbering", nothing),
    ),
    both(
        "one_process_writes_shards",
        "One process that asks for no consolidation gets shards and no final files; in torch too.",
        ("CKPT-095",),
        swap(
            "twinproof.checkpoint.plan:WriterOptions.writes_shards",
            property(lambda options: not options.enable_consolidation),
        ),
    ),
)
