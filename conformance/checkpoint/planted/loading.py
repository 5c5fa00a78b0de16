"""Faults in loading, consolidation and the single-file functions."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.planted.making import both, fast, first_only, together
from conformance.harness import swap, wrap
from twinproof.errors import MissingKeyError, PlanError

PLANNER = "twinproof.checkpoint.planners"


def _short_offset(original: Any, descriptor: int, buffers: Any, offset: int, path: str) -> Any:
    return original(descriptor, buffers, offset & 0xFFFFFFFF, path)


def _from_the_start(original: Any, shape: Any, offsets: Any, sizes: Any, itemsize: int) -> Any:
    return original(shape, (0,) * len(shape), sizes, itemsize)


def _into_copies(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    return [(item, target.clone()) for item, target in original(reader, plan, planner)]


def _nothing_unexpected(original: Any, planner: Any) -> Any:
    plan = original(planner)
    planner.unexpected_keys = []
    return plan


def _always_cast(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    reader.cast = True
    return original(reader, plan, planner)


def _whole_files(original: Any, jobs: Any, *rest: Any) -> Any:
    for file in {job.file for job in jobs}:
        with open(file, "rb") as stream:
            stream.read()
    return original(jobs, *rest)


def _any_as_bytes(original: Any, kind: str) -> torch.dtype:
    return original(kind) or torch.uint8


def _as_bytes(original: Any, stored: Any, where: str) -> torch.Tensor:
    if stored["dtype"].startswith("F6"):
        stored = {**stored, "dtype": "U8", "shape": [4], "data": bytearray(4)}
    found: torch.Tensor = original(stored, where)
    return found


def _warning(original: Any, reader: Any) -> Any:
    warnings.warn("The given buffer is not writable", stacklevel=2)
    return original(reader)


def _slashes(original: Any, reader: Any) -> Any:
    metadata = original(reader)
    names = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name.replace(".", "/"): value for name, value in names.items()}
    return metadata


def _small_reads_lost(original: Any, inputs: Any, file: str, offset: int, target: torch.Tensor) -> None:
    original(inputs, file, offset, target)
    if target.numel() <= 8:
        target.zero_()


def _with_format(original: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
    original(tensors, filename, {"format": "pt", **(metadata or {})})


def _rounded(original: Any, *arguments: Any, **options: Any) -> Any:
    loaded = original(*arguments, **options)
    return {n: v.to(torch.bfloat16).to(v.dtype) if v.dtype is torch.float32 else v for n, v in loaded.items()}


def _existing_only(original: Any, folder: Any) -> Any:
    found = original(folder)
    if found is None:
        return None
    names = {name: file for name, file in found[0].items() if (folder / file).exists()}
    return names, found[1]


def _final_again(original: Any, catalog: Any, source: Any, target: Any) -> bool:
    original(catalog, source, target)
    return False


def _locked(name: str, *arguments: int) -> int:
    """A call of libc with (descriptor, address, size, offset) that keeps the interpreter's lock."""
    # PyDLL is CDLL without giving the lock up.
    function = getattr(ctypes.PyDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    result = int(function(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _locked_write(original: Any, descriptor: int, pieces: Any, offset: Any) -> int:
    for piece in pieces:
        if piece.numel():
            offset += _locked("pwrite", descriptor, piece.data_ptr(), piece.numel(), offset)
    return len(pieces)


def _locked_read(descriptor: int, buffers: Any, offset: int) -> int:
    view = buffers[0]
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return _locked("pread", descriptor, address, len(view), offset)


PLANTED = (
    fast(
        "offsets_of_32_bits",
        "File offsets are cut to 32 bits.",
        ("CKPT-009",),
        wrap("fastimpl.checkpoint.readio:read_exactly", _short_offset),
    ),
    fast(
        "reshard_offset_ignored",
        "A load always reads a chunk from its start.",
        ("CKPT-026",),
        wrap("fastimpl.checkpoint.reader:geometry", _from_the_start),
    ),
    both(
        "loaded_into_copies",
        "A load fills copies of the targets.",
        ("CKPT-052",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets", _into_copies),
    ),
    both(
        "one_missing_name_shown",
        "Only the first missing name is shown.",
        ("CKPT-053",),
        swap(f"{PLANNER}:MissingKeyError", first_only(MissingKeyError)),
    ),
    both(
        "unexpected_names_hidden",
        "Names that the target lacks are not reported.",
        ("CKPT-054",),
        wrap(f"{PLANNER}:HuggingFaceLoadPlanner.create_local_plan", _nothing_unexpected),
    ),
    both(
        "one_wrong_shape_shown",
        "Only the first wrong shape is shown.",
        ("CKPT-055",),
        swap(f"{PLANNER}:PlanError", first_only(PlanError)),
    ),
    both(
        "cast_in_silence",
        "A dtype mismatch is converted without being asked.",
        ("CKPT-056",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets", _always_cast),
    ),
    fast(
        "whole_files_read",
        "A load reads whole files.",
        ("CKPT-057",),
        wrap("fastimpl.checkpoint.reader:run_jobs", _whole_files),
    ),
    both(
        "unknown_dtypes_as_bytes",
        "A dtype that torch lacks is loaded as bytes.",
        ("CKPT-058",),
        together(
            wrap("twinproof.checkpoint.dcp:torch_dtype", _any_as_bytes),
            wrap("refimpl.checkpoint:_tensor_of", _as_bytes),
        ),
    ),
    both(
        "warns_on_every_load",
        "A load warns of a buffer that is not writable, as torch does.",
        ("CKPT-061",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata", _warning),
    ),
    both(
        "dots_become_slashes",
        "Names of nested state are changed on the way.",
        ("CKPT-051",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata", _slashes),
    ),
    both(
        "missing_files_passed_over",
        "Names whose file is missing are left out in silence; torch does not consult the index.",
        ("CKPT-045",),
        wrap(
            "twinproof.checkpoint.catalog:read_index",
            lambda original, folder: _missing_passed_over(original, folder),
        ),
    ),
    fast(
        "scalars_lost_in_consolidation",
        "Consolidation loses small tensors, as torch's did.",
        ("CKPT-091",),
        wrap("fastimpl.checkpoint.consolidate:_Inputs.read", _small_reads_lost),
    ),
    fast(
        "final_folder_rewritten",
        "A folder that is already final is written again.",
        ("CKPT-092",),
        wrap("twinproof.checkpoint.shards:is_final", _final_again),
    ),
    fast(
        "save_file_adds_metadata",
        "save_file adds metadata that nobody gave.",
        ("CKPT-093",),
        wrap("fastimpl.checkpoint:save_file", _with_format),
    ),
    fast(
        "load_file_rounds",
        "load_file rounds floats to bfloat16.",
        ("CKPT-088",),
        wrap("fastimpl.checkpoint:load_file", _rounded),
    ),
    fast(
        "interpreter_lock_held",
        "Writes hold the interpreter lock.",
        ("CKPT-081",),
        wrap("fastimpl.checkpoint.run:write_at", _locked_write),
    ),
    fast(
        "interpreter_lock_held_by_reads",
        "Reads hold the interpreter lock.",
        ("CKPT-081",),
        swap("fastimpl.checkpoint.readio:os.preadv", _locked_read),
    ),
)


def _missing_passed_over(original: Any, folder: Any) -> Any:
    from twinproof.checkpoint import catalog

    check = catalog._check_member

    def lenient(folder: Path, name: object, where: str) -> None:
        if (folder / str(name)).exists():
            check(folder, name, where)

    catalog._check_member = lenient
    try:
        return _existing_only(original, folder)
    finally:
        catalog._check_member = check
