"""Faults that ``test_hostile`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.errors import FormatError


@fault(kills="CKPT-412", at="twinproof.checkpoint.catalog:read_index")
def unlisted_files_opened(original: Callable[[Path], Any], folder: Path) -> Any:
    """Files that the index does not list are parsed."""
    from twinproof.checkpoint.format import read_header

    found = original(folder)
    for path in sorted(folder.glob("*.safetensors")) if found is not None else ():
        read_header(path)
    return found


duplicate_keys_pass = patched(
    "Duplicate keys are accepted, and the last one wins.",
    swap("twinproof.checkpoint.format:_unique", dict),
    kills="CKPT-400",
)
cover_unchecked = patched(
    "Files with holes, overlaps or trailing bytes are accepted.",
    swap("twinproof.checkpoint.format:_check_cover", nothing),
    kills=("CKPT-401", "CKPT-405", "CKPT-406"),
)
index_leads_anywhere = patched(
    "An index may name any path.",
    swap("twinproof.checkpoint.catalog:_check_member", nothing),
    kills=("CKPT-402", "CKPT-404"),
)


@fault(kills="CKPT-410", at="twinproof.checkpoint.format:_parse_entry")
def foreign_dtype_blocks(original: Any, name: str, fields: Any, where: str) -> Any:
    """A tensor that torch cannot hold blocks its file; it does in torch's reader."""
    entry = original(name, fields, where)
    if entry.dtype.startswith("F6") or entry.kind != entry.dtype:
        raise FormatError("no torch dtype", got=entry.dtype, expected="no F6, and F4 of even width", where=where)
    return entry


@fault(kills="CKPT-411", at="twinproof.checkpoint.catalog:_link_stays_near")
def every_link_refused(original: Any, folder: Any, name: Any) -> Any:
    """Links are refused, those of the hub's cache too."""
    return False


@fault(kills="CKPT-403", at="twinproof.checkpoint.catalog:_Builder.add_file")
def later_file_wins(original: Any, builder: Any, file: str, header: Any, only: Any) -> None:
    """Of two files with one tensor the later wins, as if it were not stale; in torch too."""
    if "DCP_SHARDING_INFO" not in header.metadata:
        for name in header.entries:
            builder.catalog.tensors.pop(name, None)
    original(builder, file, header, only)


missing_number_ignored = patched(
    "A file that is missing from a numbered set without an index is not noticed.",
    swap("twinproof.checkpoint.catalog:_check_numbering", nothing),
    kills="CKPT-403",
)


def _sizes(change: Any) -> Any:
    """Change the dimensions before they are checked."""

    def around(original: Any, name: str, fields: Any, where: str) -> Any:
        shape = fields.get("shape") if isinstance(fields, dict) else None
        if isinstance(shape, list):
            fields = {**fields, "shape": [change(size) for size in shape]}
        return original(name, fields, where)

    return wrap("twinproof.checkpoint.format:_parse_entry", around)


def _whole(size: Any) -> Any:
    return int(size) if isinstance(size, float) and size.is_integer() else size


floats_are_sizes = patched("A dimension of 2.0 is taken for 2.", _sizes(_whole), kills=("CKPT-400", "CKPT-401"))


def _wrapped(size: Any) -> Any:
    return size % 2**64 if type(size) is int else size


sizes_wrap_around = patched("Dimensions are taken modulo 2**64.", _sizes(_wrapped), kills=("CKPT-400", "CKPT-401"))


@fault(kills=("CKPT-405", "CKPT-406"), at="twinproof.checkpoint.format:_check_cover")
def file_length_believed(original: Any, entries: Any, data_bytes: int, where: str) -> None:
    """A header is believed about the length of its file."""
    original(entries, max((entry.end for entry in entries.values()), default=data_bytes), where)


@fault(kills=("CKPT-402", "CKPT-404"), at="twinproof.checkpoint.catalog:_link_stays_near")
def links_lead_anywhere(original: Any, folder: Any, name: Any) -> Any:
    """A link may lead out of the folder."""
    return True


@fault(kills="CKPT-554", at="twinproof.checkpoint.format:parse_header")
def entries_of_any_length(original: Any, raw: bytes, data_bytes: int, where: str, cache: Any = None) -> Any:
    """Entries that were right in one file are so in every file that has them, whatever its length."""
    for (text, _), entries in list((cache or {}).items()):
        cache[text, data_bytes] = entries
    return original(raw, data_bytes, where, cache)


last_number_not_asked_for = patched(
    "The last of the numbered files may be missing.",
    mutated("twinproof.checkpoint.catalog:_check_numbering", "int(count) + 1", "int(count)"),
    kills="CKPT-635",
)

blobs_of_anybody = patched(
    "Links of a folder that is no snapshot are followed as those of a cache.",
    mutated("twinproof.checkpoint.catalog:_is_blob_of", 'home.parent.name == "snapshots" and', ""),
    kills="CKPT-636",
)

below_the_blobs = patched(
    "Links are followed to whatever lies below a folder of blobs.",
    mutated(
        "twinproof.checkpoint.catalog:_is_blob_of",
        'target.parent == hub / "blobs"',
        '(hub / "blobs") in target.parents',
    ),
    kills="CKPT-636",
)

snapshots_are_flat = patched(
    "Links of a folder inside of a snapshot are refused.",
    mutated("twinproof.checkpoint.catalog:_link_stays_near", "(home, *home.parents)", "(home,)"),
    kills="CKPT-636",
)

home_is_not_followed = patched(
    "Links are followed to their end, and the folder that they lie in is not.",
    mutated("twinproof.checkpoint.catalog:_link_stays_near", "home = folder.resolve()", "home = folder.absolute()"),
    kills="CKPT-411",
)


any_shard_is_torchs = patched(
    "Numbered files with the word shard in their name may be missing.",
    mutated(
        "twinproof.checkpoint.catalog:_check_numbering", 'not match[1].startswith("shard-")', '"shard" not in match[1]'
    ),
    kills="CKPT-635",
)

last_comma_passes = patched(
    "A header with a comma behind its metadata and nothing else is accepted.",
    mutated("twinproof.checkpoint.format:_split_metadata", ' and rest.lstrip()[:1] != "}"', ""),
    kills="CKPT-404",
)
