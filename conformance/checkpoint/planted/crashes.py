"""Faults that only a kill, a full disk or a power cut brings to light."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conformance.checkpoint.planted.making import both, fast
from conformance.harness import swap, wrap

PUBLISH = "twinproof.checkpoint.publish"


def _one_call(descriptor: int, pieces: Any, offset: int | None) -> int:
    from twinproof.checkpoint.format import buffer_of

    views = [buffer_of(piece) for piece in pieces if piece.numel()]
    if offset is None:
        os.writev(descriptor, views)
    else:
        os.pwritev(descriptor, views, offset)
    return 1


def _not_durable(original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    original(*arguments, **{**options, "durable": False})


def _open_everything(original: Callable[[Path], Any], folder: Path) -> Any:
    from twinproof.checkpoint.format import read_header

    found = original(folder)
    for path in sorted(folder.glob("*.safetensors")) if found is not None else ():
        read_header(path)
    return found


def _index_first(original: Callable[[Any], None], staging: Any) -> None:
    """Files appear one by one, the index before all of them."""
    if staging.target.exists():
        original(staging)
        return
    staging.target.mkdir()
    for name in sorted(os.listdir(staging.folder), reverse=True):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


def _two_steps(original: Callable[[Any], None], staging: Any) -> None:
    """The old folder is removed, then the new one renamed."""
    if staging.target.exists():
        for name in set(os.listdir(staging.target)) - set(staging.old_names):
            os.rename(staging.target / name, staging.folder / name)
        shutil.rmtree(staging.target)
    os.rename(staging.folder, staging.target)


def _impatient_group(original: Callable[[Any], None], writer: Any) -> None:
    if writer.group is None and writer.options.save_distributed and dist.is_initialized() and dist.get_world_size() > 1:
        writer.group, writer._owns_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=0.2)), True


class _NeverRaised(Exception):
    """Stands where a real error class was caught."""


def _errors_at_close_lost(original: Callable[..., None], files: Any, *, durable: bool) -> None:
    try:
        original(files, durable=durable)
    except OSError:
        return


PLANTED = (
    fast(
        "sync_errors_lost",
        "An error of fsync or close is not reported.",
        ("CKPT-310", "CKPT-314"),
        wrap("fastimpl.checkpoint.run:FileSet.close", _errors_at_close_lost),
    ),
    fast(
        "short_write_taken_as_whole",
        "What a short write left over is not written.",
        ("CKPT-315",),
        swap("fastimpl.checkpoint.run:write_at", _one_call),
    ),
    both(
        "save_file_not_synced",
        "save_file shows its file before it is durable, as the safetensors library.",
        ("CKPT-322",),
        wrap("twinproof.checkpoint.shards:write_file", _not_durable),
    ),
    both(
        "broken_index_blocks",
        "A folder whose index is broken cannot be saved to.",
        ("CKPT-327",),
        swap(f"{PUBLISH}:TwinproofError", _NeverRaised),
    ),
    both(
        "unlisted_files_opened",
        "Files that the index does not list are parsed.",
        ("CKPT-412",),
        wrap("twinproof.checkpoint.catalog:read_index", _open_everything),
    ),
    both(
        "clearing_failure_raised",
        "A save fails because what it replaced could not be deleted.",
        ("CKPT-312",),
        swap(f"{PUBLISH}:Staging._drop", lambda staging, folder: shutil.rmtree(folder)),
    ),
    both(
        "index_shown_first",
        "A first save shows its index before its files.",
        ("CKPT-301",),
        wrap(f"{PUBLISH}:Staging._publish_folder", _index_first),
    ),
    both(
        "removed_then_renamed",
        "The old folder is removed before the new one has its name.",
        ("CKPT-302", "CKPT-304"),
        wrap(f"{PUBLISH}:Staging._publish_folder", _two_steps),
    ),
    fast(
        "impatient_group",
        "Ranks wait for a slow writer for a moment only.",
        ("CKPT-318",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter._make_group", _impatient_group),
    ),
)
