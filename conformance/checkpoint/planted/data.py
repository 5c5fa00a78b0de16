"""Faults in the bytes that a save takes from tensors, exchanges and writes."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from conformance.checkpoint.planted.making import SOURCE, bytes_where, fast, nothing, values_changed
from conformance.harness import swap, wrap


def _zero(data: torch.Tensor) -> torch.Tensor:
    return data.zero_()


def _memory_as_it_lies(value: torch.Tensor) -> torch.Tensor:
    room = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    if value.is_contiguous() or value.numel() > room:
        return value
    bits = value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
    flat = bits.as_strided((value.numel(),), (1,))
    return flat.view(value.dtype).reshape(value.shape)


def _canonical_nan(data: torch.Tensor) -> torch.Tensor:
    values = data.view(torch.int32)
    is_nan = (values & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, torch.full_like(values, 0x7FC00000), values).view(torch.uint8)


def _seen_storage(original: Any, item: Any, job: Any) -> Any:
    source = original(item, job)
    seen = job.__dict__.setdefault("_planted_seen", set())
    pointer = source.value.untyped_storage().data_ptr()
    if pointer in seen and pointer:
        return type(source)(torch.zeros_like(source.value), source.dtype)
    seen.add(pointer)
    return source


def _blank_replicas(original: Any, plan: Any, items: Any, sources: Any, job: Any) -> Any:
    blank = {k: type(s)(torch.zeros_like(s.value), s.dtype) if k < 0 else s for k, s in sources.items()}
    return original(plan, items, blank, job)


def _last_byte_lost(original: Any, parts: Any, *, failed: bool) -> torch.Tensor:
    message: torch.Tensor = original(parts, failed=failed)
    words = int(message[8:16].view(torch.int64))
    data_bytes = sum(part.count for part in parts)
    message[16 + 8 * words + data_bytes - 1] ^= 0x5A
    return message


def _blank_in_workers(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    if (
        threading.current_thread() is not threading.main_thread()
        and "checkpoint-write" in threading.current_thread().name
    ):
        pieces = [torch.zeros_like(piece) for piece in pieces]
    return int(original(descriptor, pieces, offset))


def _one_kept(original: Any, files: Any, *, durable: bool) -> None:
    for descriptor in list(files._open.values())[:1]:
        os.dup(descriptor)
    original(files, durable=durable)


def _whole_copy(original: Any, source: Any, value: torch.Tensor, dtype: torch.dtype) -> None:
    original(source, value.clone(), dtype)


def _small_writes(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    calls = 0
    for piece in pieces:
        for begin in range(0, piece.numel(), 65536):
            part = piece[begin : begin + 65536]
            calls += original(descriptor, [part], offset)
            offset = None if offset is None else offset + part.numel()
    return calls


PLANTED = (
    fast(
        "scalar_becomes_zero",
        "A 0-dim tensor loses its value, as in torch's consolidation.",
        ("CKPT-004",),
        bytes_where(lambda s: s.value.dim() == 0, _zero),
    ),
    fast(
        "integers_become_zero",
        "Integer tensors are stored without their values (compare torch #192485).",
        ("CKPT-001",),
        bytes_where(lambda s: s.dtype is torch.int16, _zero),
    ),
    fast(
        "nan_payloads_lost",
        "Every NaN becomes the canonical one.",
        ("CKPT-002",),
        bytes_where(lambda s: s.dtype is torch.float32, _canonical_nan),
    ),
    fast(
        "conjugate_ignored",
        "A lazy conjugate is stored without its sign.",
        ("CKPT-003",),
        values_changed(lambda v: v.conj() if v.is_conj() else v),
    ),
    fast(
        "strides_ignored",
        "A strided view is stored as its memory lies.",
        ("CKPT-007",),
        values_changed(_memory_as_it_lies),
    ),
    fast(
        "storage_offset_ignored",
        "A view is stored from the start of its storage.",
        ("CKPT-008",),
        values_changed(lambda v: v.as_strided(v.size(), v.stride(), 0) if v.numel() else v),
    ),
    fast(
        "meta_tensors_pass",
        "A meta tensor is not refused by name.",
        ("CKPT-010",),
        swap("fastimpl.checkpoint.writer:check_storable", nothing),
    ),
    fast(
        "tied_stored_empty",
        "The second name of a storage is stored as zeros.",
        ("CKPT-047", "CKPT-048"),
        wrap("fastimpl.checkpoint.writer:_source", _seen_storage),
    ),
    fast(
        "placed_backwards",
        "A rectangle's bytes are placed in reverse.",
        ("CKPT-019", "CKPT-104"),
        wrap(
            "fastimpl.ops:rect_place",
            lambda original, window, start, dense, words: original(window, start, dense.flip(0), words),
        ),
    ),
    fast(
        "message_loses_a_byte",
        "The last byte of each exchanged message is wrong.",
        ("CKPT-021", "CKPT-022", "CKPT-096"),
        wrap("fastimpl.checkpoint.exchange:_frame", _last_byte_lost),
    ),
    fast(
        "inner_shards_reversed",
        "Shards of tensors with three and more dimensions are stored in reverse.",
        ("CKPT-023",),
        values_changed(lambda v: v.flip(0) if v.dim() > 2 else v),
    ),
    fast(
        "shared_replica_is_blank",
        "What a rank supplies in place of another replica is zeros.",
        ("CKPT-024",),
        wrap("fastimpl.checkpoint.writer:_parts", _blank_replicas),
    ),
    fast(
        "vectors_lost",
        "Replicated vectors are stored as zeros.",
        ("CKPT-028", "CKPT-090"),
        bytes_where(lambda s: s.value.dim() == 1, _zero),
    ),
    fast(
        "replicas_written_by_one",
        "One rank writes all of a replicated tensor.",
        ("CKPT-035",),
        swap("fastimpl.checkpoint.writer:find_holders", lambda arrangement, held: {}),
    ),
    fast(
        "worker_threads_write_blanks",
        "Blocks that worker threads write are blank.",
        ("CKPT-078",),
        wrap("fastimpl.checkpoint.run:write_at", _blank_in_workers),
    ),
    fast(
        "descriptor_left_open",
        "Each save leaves a file descriptor open.",
        ("CKPT-079",),
        wrap("fastimpl.checkpoint.run:FileSet.close", _one_kept),
    ),
    fast("whole_copies_kept", "A save keeps a second copy of every tensor.", ("CKPT-080",), wrap(SOURCE, _whole_copy)),
    fast(
        "writes_cut_small",
        "Blocks are written in pieces of 64 KiB.",
        ("CKPT-089",),
        wrap("fastimpl.checkpoint.run:write_at", _small_writes),
    ),
    fast(
        "export_keep_ignored",
        "The keep-list of an export is not looked at.",
        ("CKPT-060",),
        swap("twinproof.checkpoint.plan:fnmatchcase", lambda name, pattern: False),
    ),
    fast(
        "copies_not_waited_for",
        "A block is written before its bytes came from the device.",
        ("CKPT-101",),
        swap("fastimpl.checkpoint.device_copies:Stager.finish", staticmethod(nothing)),
    ),
    fast(
        "buffer_reused_early",
        "A buffer is filled again while its copy is still to run.",
        ("CKPT-102",),
        swap("fastimpl.checkpoint.device_copies:DoubleBuffer._settle", nothing),
    ),
    fast(
        "version_not_bumped",
        "Operators write behind autograd's back.",
        ("CKPT-106",),
        swap("torch.autograd.graph:increment_version", nothing),
    ),
    fast(
        "misuse_ignored",
        "What an operator refuses is passed over in silence.",
        ("CKPT-105",),
        wrap("fastimpl.ops:rect_place", lambda original, *a: _silenced(original, *a)),
    ),
)


def _silenced(original: Any, *arguments: Any) -> None:
    try:
        original(*arguments)
    except RuntimeError:
        return
