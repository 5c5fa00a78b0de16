"""``DCP_SHARDING_INFO``: where the tensors of a shard file lie in the global tensors (facts/checkpoint.md 1.2)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from twinproof.checkpoint.parse import Header, parse_json_object
from twinproof.errors import FormatError

__all__ = ["SHARDING_KEY", "Sharding", "parse_sharding"]

SHARDING_KEY = "DCP_SHARDING_INFO"
_TORCH_ENTRY = re.compile(r'"([^"\\]*)": \{"saved_offsets": \[([0-9]{1,18}(?:, [0-9]{1,18})*)\]\}')

Offsets = tuple[int, ...]


class Sharding(NamedTuple):
    """Offsets of each tensor of a file, and the global shapes that the file declares."""

    offsets: dict[str, Offsets]
    shapes: dict[str, Offsets]


def parse_sharding(header: Header, file: str) -> Sharding | None:
    """The sharding information of a header, None in a final file. Raises FormatError."""
    text = header.metadata.get(SHARDING_KEY)
    if text is None:
        return None
    where = f"{file}: {SHARDING_KEY}"
    offsets = _as_torch_writes_it(text)
    shapes: dict[str, Offsets] = {}
    if offsets is None:
        info = parse_json_object(text.encode(), where)
        offsets = {name: _numbers(info[name], "saved_offsets", where) for name in info}
        shapes = {n: _numbers(value, "global_shape", where) for n, value in info.items() if "global_shape" in value}
    missing = header.entries.keys() - offsets.keys()
    if missing:
        raise FormatError("tensors without sharding information", got=sorted(missing)[:20], where=where)
    for name, entry in header.entries.items():
        if len(offsets[name]) != len(entry.shape):
            place = f"{file}: tensor {name!r}"
            raise FormatError(
                "saved_offsets do not fit the tensor",
                got=offsets[name],
                expected=f"{len(entry.shape)} integers",
                where=place,
            )
    return Sharding(offsets, shapes)


def _as_torch_writes_it(text: str) -> dict[str, Offsets] | None:
    # One expression finds all entries; only if they put together again are the very text is the shortcut taken.
    found = _TORCH_ENTRY.findall(text)
    again = ", ".join([f'"{name}": {{"saved_offsets": [{numbers}]}}' for name, numbers in found])
    if not found or "{" + again + "}" != text:
        return None
    texts = {numbers for _, numbers in found}
    if any(number != "0" and number.startswith("0") for numbers in texts for number in numbers.split(", ")):
        return None
    parsed = {numbers: tuple(map(int, numbers.split(", "))) for numbers in texts}
    result = {name: parsed[numbers] for name, numbers in found}
    return result if len(result) == len(found) else None


def _numbers(info: Any, key: str, where: str) -> Offsets:
    numbers = info.get(key) if isinstance(info, dict) else None
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise FormatError(f"{key} is not a list of sizes", got=str(info)[:200], where=where)
    return tuple(numbers)
