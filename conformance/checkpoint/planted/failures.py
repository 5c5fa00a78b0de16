"""Faults of a save that fails, is interrupted or overlaps, and of what such a save leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conformance.checkpoint.planted.making import both, nothing, ref
from conformance.harness import swap, wrap

PUBLISH = "twinproof.checkpoint.publish"


def _in_place(path: str, pieces: Iterable[bytes | memoryview], **options: Any) -> None:
    # Opened before the values are taken, as a writer does that streams.
    with open(path, "wb") as file:
        file.writelines(pieces)


def _unfinished_first(original: Callable[[Path], Any], path: Path) -> Any:
    """The catalog of the newest hidden folder beside the checkpoint, which a killed save left."""
    unfinished = sorted(path.parent.glob(f".{path.name}.saving-*"))
    return original(unfinished[-1] if unfinished else path)


def _cause_replaced(original: Callable[..., None], writer: Any, failure: BaseException | None) -> None:
    original(writer, None if failure is None else RuntimeError("a rank could not write its files"))


def _plain_failure(original: Callable[..., Any], writer: Any, plan: Any, planner: Any) -> Any:
    try:
        return original(writer, plan, planner)
    except Exception:
        raise RuntimeError("the save failed") from None


def _interrupted_is_done(original: Callable[..., bool], a: Path, b: Path) -> bool:
    try:
        return original(a, b)
    except OSError as error:
        if error.errno != errno.EINTR:
            raise
        return True


def _short_write_dropped(descriptor: int, content: memoryview) -> None:
    os.write(descriptor, content)


PLANTED = (
    both(
        "save_file_in_place",
        "save_file writes into the file that is there, as the safetensors library does.",
        ("CKPT-303", "CKPT-317", "CKPT-326"),
        swap("twinproof.checkpoint.shards:write_file", _in_place),
    ),
    both(
        "unfinished_save_loaded",
        "A load takes what a killed save left beside the checkpoint for the newest one.",
        ("CKPT-306",),
        wrap("twinproof.checkpoint.dcp:read_catalog", _unfinished_first),
    ),
    both(
        "failed_save_stays",
        "A save that failed leaves its hidden folder.",
        ("CKPT-311", "CKPT-314", "CKPT-317"),
        swap(f"{PUBLISH}:Staging.discard", nothing),
    ),
    both(
        "cause_replaced",
        "Ranks learn that a save failed, but not of which error.",
        ("CKPT-313",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.settle", _cause_replaced),
    ),
    both(
        "background_cause_replaced",
        "The future of a save says that it failed, but not of which error.",
        ("CKPT-319",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data", _plain_failure),
    ),
    both(
        "interrupted_exchange_is_done",
        "An exchange of folders that a signal interrupts is taken for done.",
        ("CKPT-316",),
        wrap(f"{PUBLISH}:_exchange", _interrupted_is_done),
    ),
    ref(
        "short_write_dropped",
        "What a short write left over is not written.",
        ("CKPT-315",),
        swap("twinproof.checkpoint.publish:_write_all", _short_write_dropped),
    ),
)
