"""Faults that ``test_layout`` must notice."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any

import torch

from conformance.checkpoint.planted.planting import (
    Patch,
    header_text,
    library_entries,
    library_order,
    library_text,
)
from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.checkpoint import format


@fault(kills=("CKPT-019", "CKPT-104"), at="fastimpl.ops:place_rectangles")
def placed_backwards(original: Any, window: Any, start: Any, dense: Any, words: Any) -> Any:
    """A rectangle's bytes are placed in reverse."""
    return original(window, start, dense.flip(0), words)


dtype_misnamed = patched(
    "float16 is announced as bfloat16.",
    swap("twinproof.checkpoint.format:_NAMES", {**format._NAMES, torch.float16: "BF16"}),
    library_entries(lambda entry: {**entry, "dtype": "BF16" if entry["dtype"] == "F16" else entry["dtype"]}),
    kills="CKPT-011",
)
sorted_by_name_alone = patched(
    "Tensors lie by name, whatever their dtype.",
    swap("twinproof.checkpoint.format:_RANK", dict.fromkeys(format.DTYPES, 0)),
    library_order(lambda name: name),
    kills=("CKPT-012", "CKPT-014"),
)
page_of_512 = patched(
    "page_align pads to 512 bytes.", swap("twinproof.checkpoint.format:PAGE_BYTES", 512), kills="CKPT-013"
)


@fault(kills="CKPT-014", at="twinproof.checkpoint.plan:lay_out", of="fastimpl")
def header_not_padded(original: Any, *arguments: Any, **options: Any) -> Any:
    """The header is not padded to 8, as torch's consolidation."""
    layout = original(*arguments, **options)
    text = layout.header[8:].rstrip(b" ")
    shift = len(layout.header) - 8 - len(text)
    begins = {name: begin - shift for name, begin in layout.begins.items()}
    header = len(text).to_bytes(8, "little") + text
    return dataclasses.replace(layout, header=header, begins=begins, file_bytes=layout.file_bytes - shift)


class _Folded(str):
    """A name that sorts without regard to case."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return self.casefold() < other.casefold()


names_sorted_by_locale = patched(
    "Names are sorted without regard to case.",
    wrap("twinproof.checkpoint.format:check_name", lambda original, name: _Folded(original(name))),
    library_order(str.casefold),
    kills="CKPT-015",
)


_ASCII = SimpleNamespace(
    **{**vars(json), "dumps": lambda value, **options: json.dumps(value, **{**options, "ensure_ascii": True})}
)

names_escaped = patched(
    "Names are escaped to ASCII.",
    swap("twinproof.checkpoint.format:json", _ASCII),
    library_text(lambda text: header_text(json.loads(text), ensure_ascii=True)),
    kills="CKPT-016",
)


@fault(kills="CKPT-017", at="twinproof.checkpoint.plan:lay_out", of="fastimpl")
def metadata_dropped(original: Any, tensors: Any, metadata: Any = None, **options: Any) -> Any:
    """User metadata is dropped, as torch's consolidation."""
    return original(tensors, {"format": "pt"}, **options)


header_limit_ignored = patched(
    "A header that no reader takes is written.",
    swap("twinproof.checkpoint.format:HEADER_BYTES_MAX", 1 << 40),
    kills="CKPT-018",
)


_TURNS = itertools.count()


@fault(kills="CKPT-020", at="twinproof.checkpoint.format:check_metadata", of="fastimpl")
def metadata_in_random_order(original: Any, metadata: Any) -> Any:
    """Metadata keys change places between saves."""
    items = list(original(metadata).items())
    return dict(reversed(items) if next(_TURNS) % 2 else items)


def _padded_with_nul(original: Any, *arguments: Any, **options: Any) -> Any:
    layout = original(*arguments, **options)
    return dataclasses.replace(layout, header=_nul_for_spaces(layout.header))


def _nul_for_spaces(header: bytes) -> bytes:
    text = header.rstrip(b" ")
    return text + b"\0" * (len(header) - len(text))


padded_with_nul = patched(
    "A header is padded with NUL bytes.",
    wrap(("twinproof.checkpoint.plan:lay_out", "twinproof.checkpoint.format:lay_out"), _padded_with_nul),
    library_text(_nul_for_spaces),
    kills="CKPT-013",
)


def _named(kind: type[str]) -> Patch:
    """Have names compare as ``kind`` says while they are sorted."""
    return wrap("twinproof.checkpoint.format:check_name", lambda original, name: kind(original(name)))


class _AsGiven(str):
    """A name that stays where it was given."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return False


names_as_given = patched(
    "Tensors lie in the order of the state dict, as torch's consolidation writes them.",
    _named(_AsGiven),
    library_order(None),
    kills=("CKPT-015", "CKPT-019"),
)
long_header_without_a_word = patched(
    "A header that model hubs cannot parse is written without a warning.",
    swap("twinproof.checkpoint.format:HEADER_BYTES_REMOTE", 1 << 40),
    kills="CKPT-018",
)


def _data_begin(message: torch.Tensor) -> int:
    return 16 + 8 * int(message[8:16].view(torch.int64))


@fault(kills=("CKPT-019", "CKPT-021"), at="fastimpl.checkpoint.blockio:_place_message")
def message_read_early(original: Any, window: torch.Tensor, block: Any, message: torch.Tensor) -> int:
    """The data of an exchanged message is taken one word early."""
    begin, early = _data_begin(message), message.clone()
    early[begin:] = message[begin - 8 : -8]
    return int(original(window, block, early))


@fault(kills="CKPT-458", at="twinproof.checkpoint.dcp:Staging")
def saved_beside_the_path(original: Any, target: Any, **options: Any) -> Any:
    """A save by one process leaves its files in a folder ``sharded`` of the path, as torch 2.13."""
    return original(target / "sharded", **options)


offsets_of_shards_by_the_user = patched(
    "User metadata may say that the whole tensors of a file are parts of others.",
    mutated("twinproof.checkpoint.plan:WriterOptions.make", "SHARDING_KEY in (metadata or {})", "False"),
    kills="CKPT-687",
)

pages_of_the_library = patched(
    "A file of the library stays as it is, though its data was to begin at a page.",
    mutated("twinproof.checkpoint.format:with_options", " and not layout.page_align", ""),
    kills="CKPT-013",
)

_INSTRUCT = "fastimpl.checkpoint.writer:PlannedWrites.instruct"

sequential_where_the_probe_says = patched(
    "The folder alone decides whether files are written from front to back.",
    mutated(
        _INSTRUCT,
        'mode == "sequential" or (mode == "auto" and not _has_random_access(plan.folder.path))',
        'mode != "random" and not _has_random_access(plan.folder.path)',
    ),
    kills="CKPT-802",
    of="fastimpl",
)

auto_is_sequential = patched(
    "A save that may choose writes every file from front to back.",
    mutated(_INSTRUCT, 'mode == "auto" and not _has_random_access(plan.folder.path)', 'mode == "auto"'),
    kills="CKPT-802",
    of="fastimpl",
)

sequential_by_many = patched(
    "Files that are written from front to back are shared among ranks.",
    mutated(_INSTRUCT, "block_bytes, sequential=sequential)", "block_bytes)"),
    kills="CKPT-802",
    of="fastimpl",
)
