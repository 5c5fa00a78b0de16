"""More faults in what a save takes, exchanges and writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.checkpoint.planted.making import SOURCE, bytes_where, fast, values_changed
from conformance.harness import wrap


def _second_half_zero(data: torch.Tensor) -> torch.Tensor:
    data.view(-1, 8)[:, 4:] = 0
    return data


def _without_last_row(value: torch.Tensor) -> torch.Tensor:
    if value.dim() != 2 or value.shape[0] % 2 == 0:
        return value
    changed = value.clone()
    changed[-1] = 0
    return changed


def _truncated(original: Any, source: Any, value: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and value.dtype is torch.float32:
        value = (value.view(torch.int32) & -65536).view(torch.float32)
    original(source, value, dtype)


def _data_begin(message: torch.Tensor) -> int:
    return 16 + 8 * int(message[8:16].view(torch.int64))


def _one_word_early(original: Any, window: torch.Tensor, block: Any, message: torch.Tensor) -> int:
    begin, early = _data_begin(message), message.clone()
    early[begin:] = message[begin - 8 : -8]
    return int(original(window, block, early))


def _twice(original: Any, *arguments: Any) -> None:
    original(*arguments)
    original(*arguments)


def _register(length: int) -> None:
    name = "twinproof::checkpoint_read"
    fake = lambda file, dense, window, words: words.new_empty(length)  # noqa: E731
    torch.library.register_fake(name, fake, allow_override=True)


@contextmanager
def _fake_kernel_lies() -> Iterator[None]:
    _register(2)
    try:
        yield
    finally:
        _register(3)


PLANTED = (
    fast(
        "complex_stored_half",
        "Of a complex number 32 bits are stored, as in torch's consolidation.",
        ("CKPT-001",),
        bytes_where(lambda s: s.dtype is torch.complex64, _second_half_zero),
    ),
    fast(
        "last_row_lost",
        "The last row of a shard with an odd number of rows is not stored.",
        ("CKPT-022",),
        values_changed(_without_last_row),
    ),
    fast(
        "export_truncates",
        "An export cuts the low bits off instead of rounding to nearest even.",
        ("CKPT-060",),
        wrap(SOURCE, _truncated),
    ),
    fast(
        "message_read_early",
        "The data of an exchanged message is taken one word early.",
        ("CKPT-019", "CKPT-021"),
        wrap("fastimpl.checkpoint.blockio:_place_message", _one_word_early),
    ),
    fast(
        "blocks_written_twice",
        "Every block is written twice, as by two holders of one replica.",
        ("CKPT-035", "CKPT-089"),
        wrap("fastimpl.checkpoint.run:Runner._write", _twice),
    ),
    fast(
        "fake_kernel_lies",
        "An operator's fake kernel announces another shape than the operator gives.",
        ("CKPT-103",),
        _fake_kernel_lies,
    ),
)
