"""What several faults of checkpoint are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.harness import wrap
from twinproof.checkpoint.catalog import Catalog
from twinproof.errors import CorruptionError, TwinproofError

Patch = Callable[[], AbstractContextManager[Any]]


def nothing(*arguments: Any, **options: Any) -> None:
    """In place of a check: everything passes."""


def first_only(error: type[TwinproofError]) -> Callable[..., TwinproofError]:
    """In place of an error class: of several faults only the first is shown."""

    def make(message: str, *, got: Any, **rest: Any) -> TwinproofError:
        shown = got[:1] if isinstance(got, list) else dict(list(got.items())[:1]) if isinstance(got, dict) else got
        return error(message, got=shown, **rest)

    return make


def zero(data: torch.Tensor) -> torch.Tensor:
    """Zeros in place of the bytes."""
    return data.zero_()


def bytes_where(condition: Callable[[Any], bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Change what the fast version takes from the tensors that a condition on their source picks."""

    def around(original: Any, source: Any, begin: int, end: int) -> torch.Tensor:
        data: torch.Tensor = original(source, begin, end)
        return change(data.clone()) if condition(source) else data

    return wrap("fastimpl.checkpoint.source:Source.dense", around)


def values_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Change a tensor before the fast version takes its bytes."""
    return wrap(
        "fastimpl.checkpoint.source:Source.__init__",
        lambda original, source, value, dtype: original(source, change(value), dtype),
    )


def library_text(change: Callable[[bytes], bytes]) -> Patch:
    """Change the text of the header in every file that the reference has the safetensors library make."""

    def around(original: Any, tensors: Any, layout: Any) -> list[bytes]:
        content = b"".join(original(tensors, layout))
        start = 8 + int.from_bytes(content[:8], "little")
        text = change(content[8:start])
        return [len(text).to_bytes(8, "little") + text + content[start:]]

    return wrap("refimpl.checkpoint:file_bytes", around)


def header_text(header: dict[str, Any], **options: Any) -> bytes:
    """A header as text, padded to whole words."""
    text = json.dumps(header, separators=(",", ":"), **{"ensure_ascii": False, **options}).encode()
    return text + b" " * (-len(text) % 8)


def library_entries(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """Change the entry of every tensor in the headers of those files."""

    def entries(text: bytes) -> bytes:
        header = json.loads(text)
        return header_text({name: value if name == "__metadata__" else change(value) for name, value in header.items()})

    return library_text(entries)


def library_order(key: Callable[[str], Any] | None) -> Patch:
    """Have the tensors lie in another order in those files: by ``key`` of the name; None is the caller's order."""

    def around(original: Any, tensors: Any, layout: Any) -> list[bytes]:
        content = b"".join(original(tensors, layout))
        start = 8 + int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8:start]), content[start:]
        changed = {name: value for name, value in header.items() if name == "__metadata__"}
        pieces: list[bytes] = []
        for name in tensors if key is None else sorted(tensors, key=key):
            begin, end = header[name]["data_offsets"]
            at = sum(map(len, pieces))
            pieces.append(data[begin:end])
            changed[name] = {**header[name], "data_offsets": [at, at + end - begin]}
        text = header_text(changed)
        return [len(text).to_bytes(8, "little") + text, *pieces]

    return wrap("refimpl.checkpoint:file_bytes", around)


def broken_taken_as_empty(original: Any, path: Any) -> Catalog:
    """Around ``read_catalog``: a folder that is broken is one without tensors."""
    try:
        found: Catalog = original(path)
    except CorruptionError:
        return Catalog()
    return found


def parts_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Change the bits of a chunk before the reference sends it to the coordinator."""

    def around(original: Any, *arguments: Any) -> Any:
        name, offsets, bits = original(*arguments)
        return name, offsets, change(bits)

    return wrap("refimpl.checkpoint:_part", around)
