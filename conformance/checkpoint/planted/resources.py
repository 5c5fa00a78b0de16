"""Faults that ``test_resources`` must notice."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-078", at="fastimpl.checkpoint.run:write_at")
def worker_threads_write_blanks(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    """Blocks that worker threads write are blank."""
    if (
        threading.current_thread() is not threading.main_thread()
        and "checkpoint-write" in threading.current_thread().name
    ):
        pieces = [torch.zeros_like(piece) for piece in pieces]
    return int(original(descriptor, pieces, offset))


@fault(kills="CKPT-079", at="fastimpl.checkpoint.run:FileSet.close")
def descriptor_left_open(original: Any, files: Any, *, durable: bool) -> None:
    """Each save leaves a file descriptor open."""
    for descriptor in list(files._open.values())[:1]:
        os.dup(descriptor)
    original(files, durable=durable)


files_opened_without_the_lock = patched(
    "Threads look whether a file is open, and open it, each for itself.",
    mutated("fastimpl.checkpoint.run:FileSet._descriptor", "with self._lock:", "if True:"),
    kills="CKPT-719",
    of="fastimpl",
)


@fault(kills="CKPT-080", at="fastimpl.checkpoint.source:Source.__init__")
def whole_copies_kept(original: Any, source: Any, value: torch.Tensor, dtype: torch.dtype) -> None:
    """A save keeps a second copy of every tensor."""
    original(source, value.clone(), dtype)


@fault(kills="CKPT-089", at="fastimpl.checkpoint.run:write_at")
def writes_cut_small(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    """Blocks are written in pieces of 64 KiB."""
    calls = 0
    for piece in pieces:
        for begin in range(0, piece.numel(), 65536):
            part = piece[begin : begin + 65536]
            calls += original(descriptor, [part], offset)
            offset = None if offset is None else offset + part.numel()
    return calls


def _locked(name: str, *arguments: int) -> int:
    """A call of libc with (descriptor, address, size, offset) that keeps the interpreter's lock."""
    # PyDLL is CDLL without giving the lock up.
    function = getattr(ctypes.PyDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    result = int(function(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@fault(kills="CKPT-081", at="fastimpl.checkpoint.run:write_at")
def interpreter_lock_held(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    """Writes hold the interpreter lock."""
    for piece in pieces:
        if piece.numel():
            offset += _locked("pwrite", descriptor, piece.data_ptr(), piece.numel(), offset)
    return len(pieces)


@fault(kills="CKPT-081", at="fastimpl.checkpoint.readio:os.preadv")
def interpreter_lock_held_by_reads(original: Any, descriptor: int, buffers: Any, offset: int) -> int:
    """Reads hold the interpreter lock."""
    view = buffers[0]
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return _locked("pread", descriptor, address, len(view), offset)


@fault(kills="CKPT-082", at="twinproof.checkpoint.dcp:build_index")
def numpy_needed(original: Callable[..., bytes], *arguments: Any) -> bytes:
    """The index is built with numpy, which need not be installed."""
    importlib.import_module("numpy")
    return original(*arguments)


publishing_timed_by_remainder = patched(
    "The seconds of publishing are a remainder, which is the difference only while the clock runs for long already.",
    mutated(
        "fastimpl.checkpoint.writer:HuggingFaceStorageWriter.finish",
        "time.perf_counter() - begun_s",
        "time.perf_counter() % begun_s",
    ),
    kills="CKPT-507",
)
last_message_alone_counted = patched(
    "Of what a rank sends the last message alone is counted.",
    mutated("fastimpl.checkpoint.exchange:Exchange.start", "self.sent_bytes += ", "self.sent_bytes = "),
    kills="CKPT-507",
)

plans_that_take_for_ever = patched(
    "The seconds of a plan are the time at which it ended.",
    mutated(
        "fastimpl.checkpoint.writer:PlannedWrites.prepare",
        "time.perf_counter() - job.begun_s",
        "time.perf_counter() + job.begun_s",
    ),
    kills="CKPT-507",
)

forgotten_inputs_stay_open = patched(
    "An input that is forgotten for another one is not closed.",
    mutated(
        "fastimpl.checkpoint.consolidate:_Inputs.descriptor",
        "os.close(self._open.popitem(last=False)[1])",
        "self._open.popitem(last=False)",
    ),
    kills="CKPT-654",
    of="fastimpl",
)

inputs_stay_open_where_writing_fails = patched(
    "A merge that cannot write to its end leaves its inputs open.",
    mutated("fastimpl.checkpoint.consolidate:_drain", "finally:", "else:"),
    kills="CKPT-706",
    of="fastimpl",
)


refused_headers_stay_open = patched(
    "A file whose header is refused stays open.",
    mutated(
        "twinproof.checkpoint.format:read_header",
        "finally:\n        os.close(descriptor)\n",
        "except OSError:\n        os.close(descriptor)\n        raise\n    else:\n        os.close(descriptor)\n",
    ),
    kills="CKPT-734",
)

progress_beside_its_lock = patched(
    "The progress function is called behind the lock under which bytes are counted.",
    mutated(
        "twinproof.checkpoint.catalog:Meter.add",
        "            self._done_bytes += size_bytes\n            self._progress(",
        "            self._done_bytes += size_bytes\n        self._progress(",
    ),
    kills="CKPT-857",
)

the_limit_of_descriptors_is_nowhere = patched(
    "Of too many open files the system's word is all that is said.",
    mutated("twinproof.checkpoint.publish:storage_error", "error.errno == errno.EMFILE", "False"),
    kills=("CKPT-963", "KV-491"),
)
files_to_write_are_not_counted = patched(
    "A file that cannot be opened for writing is told as the system tells it.",
    mutated("fastimpl.checkpoint.run:FileSet._descriptor", "raise storage_error(", "raise error; raise storage_error("),
    kills="CKPT-963",
    of="fastimpl",
)
