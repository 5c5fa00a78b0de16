"""Faults that ``test_crash_errors`` must notice."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.errors import StorageError


@fault(kills=("CKPT-310", "CKPT-314"), at="fastimpl.checkpoint.run:FileSet.close")
def sync_errors_lost(original: Callable[..., None], files: Any, *, durable: bool) -> None:
    """An error of fsync or close is not reported."""
    try:
        original(files, durable=durable)
    except OSError:
        return


@fault(kills="CKPT-315", at="fastimpl.checkpoint.run:write_at")
def short_write_taken_as_whole(original: Any, descriptor: int, pieces: Any, offset: int | None) -> int:
    """What a short write left over is not written."""
    from twinproof.checkpoint.format import buffer_of

    views = [buffer_of(piece) for piece in pieces if piece.numel()]
    if offset is None:
        os.writev(descriptor, views)
    else:
        os.pwritev(descriptor, views, offset)
    return 1


@fault(kills="CKPT-312", at="twinproof.checkpoint.publish:Staging._drop")
def clearing_failure_raised(original: Any, staging: Any, folder: Any) -> Any:
    """A save fails because what it replaced could not be deleted."""
    return shutil.rmtree(folder)


@fault(kills="CKPT-318", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter._make_group", of="fastimpl")
def impatient_group(original: Callable[[Any, bool], None], writer: Any, is_distributed: bool) -> None:
    """Ranks wait for a slow writer only 0.2 seconds."""
    if writer.group is None and is_distributed and dist.is_initialized() and dist.get_world_size() > 1:
        writer.group, writer._owns_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=0.2)), True


failed_save_stays = patched(
    "A save that failed leaves its hidden folder.",
    swap("twinproof.checkpoint.publish:Staging.discard", nothing),
    kills=("CKPT-311", "CKPT-314", "CKPT-317"),
)


@fault(kills="CKPT-313", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.settle")
def cause_replaced(original: Callable[..., None], writer: Any, failure: BaseException | None) -> None:
    """Ranks learn that a save failed, but not of which error."""
    original(writer, None if failure is None else RuntimeError("a rank could not write its files"))


@fault(kills="CKPT-316", at="twinproof.checkpoint.publish:_exchange")
def interrupted_exchange_is_done(original: Callable[..., bool], a: Path, b: Path) -> bool:
    """An exchange of folders that a signal interrupts is taken for complete."""
    try:
        return original(a, b)
    except OSError as error:
        if error.errno != errno.EINTR:
            raise
        return True


@fault(kills="CKPT-315", at="twinproof.checkpoint.publish:_write_all", of="refimpl")
def short_write_dropped(original: Any, descriptor: int, content: memoryview) -> None:
    """What a short write left over is not written."""
    os.write(descriptor, content)


@fault(kills="CKPT-310", at="fastimpl.checkpoint.run:FileSet.write")
def write_error_logged_only(original: Any, files: Any, file: int, start: int, pieces: Any) -> int:
    """A block that could not be written is only logged, as in torch's writer with several threads."""
    try:
        return int(original(files, file, start, pieces))
    except StorageError as error:
        logging.getLogger("twinproof.checkpoint").info("a block was not written: %s", error)
        return 0


@fault(kills="CKPT-314", at="twinproof.checkpoint.publish:Staging.publish")
def publication_fails_unnamed(original: Any, staging: Any, index: Any) -> None:
    """An error of publication loses its errno."""
    try:
        original(staging, index)
    except StorageError:
        raise StorageError(
            "publishing failed", got=None, expected="no error of the system", where=str(staging.target)
        ) from None


@fault(kills="CKPT-318", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter._make_group")
def callers_group_used(original: Any, writer: Any, is_distributed: bool) -> None:
    """A save waits in the caller's process group, with its timeout."""
    if writer.group is None and dist.is_initialized() and dist.get_world_size() > 1:
        writer.group = dist.group.WORLD


worker_error_swallowed = patched(
    "An error in a thread is not reported; in torch it is lost.",
    swap("fastimpl.checkpoint.run:Runner._fail", nothing),
    kills=("CKPT-310", "CKPT-313"),
)


@fault(kills="CKPT-544", at="fastimpl.checkpoint.run:FileSet.copy")
def short_copy_taken_as_whole(original: Any, files: Any, file: int, start: int, *source: int) -> int:
    """What the system's own copy left over is not written."""
    descriptor, offset, count = source
    os.copy_file_range(descriptor, files._descriptor(file), count, offset, start)
    return count


@fault(kills="CKPT-544", at="fastimpl.checkpoint.consolidate:_Carrier._copy")
def refused_copy_begins_again(original: Any, carrier: Any, block: Any, pieces: Any) -> Any:
    """A run that the system copies in part is read from where the copy began."""
    copied, rest = original(carrier, block, pieces)
    skips = {piece.begin: piece.skip for piece in pieces}
    return copied, [replace(piece, skip=skips[piece.begin]) for piece in rest]


@fault(kills="CKPT-544", at="fastimpl.checkpoint.run:FileSet.copy")
def failed_copy_is_a_refusal(original: Any, files: Any, *range_: int) -> int:
    """An error of the disk during a copy is taken for a system that does not copy."""
    try:
        return int(original(files, *range_))
    except StorageError:
        return 0


header_read_by_one_call = patched(
    "Of a header that comes in pieces the first one is taken for all of it.",
    mutated("twinproof.checkpoint.format:_read_at", "if not pieces[-1]:", "if pieces:"),
    kills="CKPT-553",
)


rest_read_from_the_same_place = patched(
    "What a read left over is read from where the read began.",
    mutated("fastimpl.checkpoint.readio:read_exactly", "offset += got", "offset += 0"),
    kills="CKPT-553",
)


_ANYTHING = "except BaseException as error:", "except Exception as error:"

stopped_while_it_writes = patched(
    "Of what ends a program while data is written no other rank is told.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter._settled", *_ANYTHING),
    kills="CKPT-686",
)
stopped_while_it_compares = patched(
    "Of what ends a program while replicas are compared no other rank is told.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._check_replicas",
        "self._settled(lambda: checksums(mine, planner))",
        "checksums(mine, planner)",
    ),
    kills="CKPT-691",
)
stopped_while_it_arranges = patched(
    "Of what ends the coordinator while it arranges a save no other rank is told.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter._instructed", *_ANYTHING),
    kills="CKPT-691",
)
stopped_before_a_save = patched(
    "Of what ends a program in a step of all ranks no other rank is told.",
    mutated("twinproof.checkpoint.publish:together", *_ANYTHING),
    kills="CKPT-691",
)
