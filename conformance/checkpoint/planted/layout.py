"""Faults in headers, dtypes, names and the order of tensors."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import torch

from conformance.checkpoint.planted.making import (
    both,
    fast,
    header_text,
    library_entries,
    library_order,
    library_text,
    together,
)
from conformance.harness import swap, wrap
from twinproof.checkpoint import format

LAY_OUT = "twinproof.checkpoint.plan:lay_out"


def _shape_lost(original: Any, name: str, dtype: torch.dtype, shape: Any) -> list[int]:
    return [0] if 0 in shape else original(name, dtype, shape)


def _float4_as_in_torch(entry: dict[str, Any]) -> dict[str, Any]:
    shape = entry["shape"]
    return {**entry, "shape": [*shape[:-1], shape[-1] // 2]} if entry["dtype"] == "F4" else entry


def _unpadded(original: Any, *arguments: Any, **options: Any) -> Any:
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


def _only_format(original: Any, tensors: Any, metadata: Any = None, **options: Any) -> Any:
    return original(tensors, {"format": "pt"}, **options)


def _changing_order(original: Any, metadata: Any) -> Any:
    _changing_order.turn = not getattr(_changing_order, "turn", False)  # type: ignore[attr-defined]
    items = list(original(metadata).items())
    return dict(items if _changing_order.turn else reversed(items))  # type: ignore[attr-defined]


def _empty_without_metadata(original: Any, tensors: Any, metadata: Any = None, **options: Any) -> Any:
    members = list(tensors)
    return original(members, metadata if members else None, **options)


def _first_part(original: Any, tensor: Any, offset: Any) -> torch.Tensor:
    from twinproof.checkpoint.planners import local_boxes

    result: torch.Tensor = original(tensor, local_boxes(tensor)[0][0].offsets)
    return result


_ASCII = SimpleNamespace(
    **{**vars(json), "dumps": lambda value, **options: json.dumps(value, **{**options, "ensure_ascii": True})}
)


_CASTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64}


PLANTED = (
    both(
        "empty_shape_lost",
        "A zero-size tensor keeps its dtype only.",
        ("CKPT-005",),
        together(
            wrap("twinproof.checkpoint.format:format_shape", _shape_lost),
            library_entries(lambda entry: {**entry, "shape": [0] if 0 in entry["shape"] else entry["shape"]}),
        ),
    ),
    both(
        "float4_not_doubled",
        "The header shows torch's shape for float4.",
        ("CKPT-006",),
        together(
            swap("twinproof.checkpoint.format:format_shape", lambda name, dtype, shape: list(shape)),
            library_entries(_float4_as_in_torch),
        ),
    ),
    both(
        "dtype_misnamed",
        "float16 is announced as bfloat16.",
        ("CKPT-011",),
        together(
            swap("twinproof.checkpoint.format:_NAMES", {**format._NAMES, torch.float16: "BF16"}),
            library_entries(lambda entry: {**entry, "dtype": "BF16" if entry["dtype"] == "F16" else entry["dtype"]}),
        ),
    ),
    both(
        "sorted_by_name_alone",
        "Tensors lie by name, whatever their dtype.",
        ("CKPT-012", "CKPT-014"),
        together(
            swap("twinproof.checkpoint.format:_RANK", dict.fromkeys(format.DTYPES, 0)), library_order(lambda name: name)
        ),
    ),
    both("page_of_512", "page_align pads to 512.", ("CKPT-013",), swap("twinproof.checkpoint.format:PAGE_BYTES", 512)),
    fast(
        "header_not_padded",
        "The header is not padded to 8, as torch's consolidation.",
        ("CKPT-014",),
        wrap(LAY_OUT, _unpadded),
    ),
    both(
        "names_sorted_by_locale",
        "Names are sorted without regard to case.",
        ("CKPT-015",),
        together(
            wrap("twinproof.checkpoint.format:check_name", lambda original, name: _Folded(original(name))),
            library_order(str.casefold),
        ),
    ),
    both(
        "names_escaped",
        "Names are escaped to ASCII.",
        ("CKPT-016",),
        together(
            swap("twinproof.checkpoint.format:json", _ASCII),
            library_text(lambda text: header_text(json.loads(text), ensure_ascii=True)),
        ),
    ),
    fast(
        "metadata_dropped",
        "User metadata is dropped, as torch's consolidation.",
        ("CKPT-017",),
        wrap(LAY_OUT, _only_format),
    ),
    both(
        "header_limit_ignored",
        "A header that no reader takes is written.",
        ("CKPT-018",),
        swap("twinproof.checkpoint.format:HEADER_BYTES_MAX", 1 << 40),
    ),
    fast(
        "metadata_in_random_order",
        "Metadata keys change places between saves.",
        ("CKPT-020",),
        wrap("twinproof.checkpoint.format:check_metadata", _changing_order),
    ),
    both(
        "packed_blocks_confused",
        "Every block of a packed shard holds the first one's values.",
        ("CKPT-025",),
        wrap("twinproof.checkpoint.planners:_part", _first_part),
    ),
    fast(
        "empty_state_without_format",
        "A file without tensors lacks its format.",
        ("CKPT-050",),
        wrap(LAY_OUT, _empty_without_metadata),
    ),
    both(
        "integers_cast_on_export",
        "An export casts integers too.",
        ("CKPT-060",),
        swap("twinproof.checkpoint.plan:_CASTABLE", _CASTABLE),
    ),
)
