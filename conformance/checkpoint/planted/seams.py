"""Faults that ``test_seams`` must notice."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.checkpoint.format import torch_dtype
from twinproof.checkpoint.publish import StagedFolder
from twinproof.errors import CorruptionError


@fault(kills="CKPT-483", at="fastimpl.checkpoint.run:Runner._next")
def files_of_an_owner_mixed(original: Any, runner: Any, before: Any) -> Any:
    """Whole blocks go before the exchanged ones that begin behind them, whatever the file."""
    if before is not None and runner.solo and runner.solo[0].start <= before.start:
        return runner.solo.popleft() if runner.failure is None else None
    return original(runner, before)


@fault(kills="CKPT-484", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets")
def equal_widths_reinterpreted(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """Between dtypes of one width the bits are copied, not the values."""
    result = []
    for item, target in original(reader, plan, planner):
        stored = torch_dtype(reader.catalog.tensors[item.storage_index.fqn].dtype)
        is_alike = stored not in (None, target.dtype) and stored.itemsize == target.dtype.itemsize
        result.append((item, target.view(stored) if is_alike else target))
    return result


@fault(kills="CKPT-485", at="fastimpl.checkpoint.run:Runner._fail")
def ended_helpers_of_a_save(original: Any, runner: Any, error: BaseException) -> None:
    """A helper's thread of a save that ends by what is no Exception is not missed."""
    if isinstance(error, Exception):
        original(runner, error)


@fault(kills="CKPT-485", at="fastimpl.checkpoint.consolidate:_drain")
def ended_helpers_of_a_merge(original: Any, plan: Any, queues: Any, files: Any, failures: Any, progress: Any) -> None:
    """A helper's thread of a merge that ends by what is no Exception is not missed."""
    own: list[BaseException] = []
    original(plan, queues, files, own, progress)
    failures += [error for error in own if isinstance(error, Exception)]


told_outside_the_guard = patched(
    "What progress raises in a thread that writes ends that thread, and nobody else hears of it.",
    mutated(
        "fastimpl.checkpoint.run:Runner._write",
        "        self.meter.add(size_bytes)\n"
        "    except BaseException as error:\n"
        "        self._fail(error)\n"
        "        return\n",
        "    except BaseException as error:\n"
        "        self._fail(error)\n"
        "        return\n"
        "    self.meter.add(size_bytes)\n",
    ),
    mutated("fastimpl.checkpoint.run:Runner._work", "except BaseException as error:", "except OSError as error:"),
    kills="CKPT-726",
)

loads_go_on_without_a_helper = patched(
    "What progress raises in a helper of a load is not asked for.",
    mutated("fastimpl.checkpoint.readio:_run_on_threads", "other.result()", "other.exception()"),
    kills="CKPT-726",
)


@fault(kills="CKPT-726", at="twinproof.checkpoint.catalog:Meter.add")
def progress_raises_in_vain(original: Any, meter: Any, size_bytes: int) -> None:
    """What progress raises is dropped."""
    with suppress(BaseException):
        original(meter, size_bytes)


def _read_to_the_end(original: Any, descriptor: int, buffers: Any, offset: int, path: str) -> int:
    try:
        return int(original(descriptor, buffers, offset, path))
    except CorruptionError:
        return 1


def _end_is_success(original: Any, *arguments: Any) -> Any:
    status, calls, read_bytes = original(*arguments)
    return max(status, 0), calls, read_bytes


shrinking_files_not_looked_at = patched(
    "A file that became shorter is read as far as it goes, and nobody looks whether it is another one now.",
    wrap("fastimpl.checkpoint.readio:read_exactly", _read_to_the_end),
    wrap("fastimpl.ops:read_rectangle", _end_is_success),
    swap("twinproof.checkpoint.catalog:Catalog.check_unchanged", nothing),
    kills="CKPT-486",
    of="fastimpl",
)


@fault(kills="CKPT-487", at="fastimpl.ops:read_rectangle")
def first_window_only(original: Any, file: int, dense: torch.Tensor, window: Any, words: torch.Tensor) -> Any:
    """The rows behind a rectangle's first window come from the window before."""
    found = original(file, dense, window, words)
    if dense.numel() > window.numel() // 2:
        half = dense.numel() // 2
        dense[half : half + 64] = dense[:64].clone()
    return found


@fault(kills="CKPT-487", at="fastimpl.checkpoint.readio:_slices")
def run_cut_one_late(original: Any, jobs: Any, slice_bytes: int) -> Any:
    """Of a run that takes several tasks, the later ones begin a byte early."""
    for part in original(jobs, slice_bytes):
        yield part if part.skip == 0 else type(part)(part.job, part.skip - 1, part.count)


@fault(kills="CKPT-488", at="fastimpl.checkpoint.consolidate:merge")
def first_rank_syncs(original: Any, job: Any, folder: StagedFolder, *rest: Any, **options: Any) -> None:
    """Of a consolidation on every rank, the first rank alone syncs what it wrote."""
    original(job, StagedFolder(folder.path, durable=folder.durable and job.rank == 0), *rest, **options)


@fault(kills="CKPT-488", at="fastimpl.checkpoint.run:FileSet.close")
def first_file_synced(original: Any, files: Any, *, durable: bool) -> None:
    """A rank syncs the first of the files that it wrote."""
    opened = dict(files._open)
    for number in list(opened)[1:]:
        files._open.pop(number)
    original(files, durable=durable)
    files._open.update(list(opened.items())[1:])
    original(files, durable=False)


end_of_file_is_success = patched(
    "A file that ends is taken for one that was read.",
    wrap("fastimpl.ops:read_rectangle", _end_is_success),
    kills="CKPT-489",
)


shares_cut_elements = patched(
    "A thread's share of a load ends wherever its bytes end, also inside an element.",
    mutated("fastimpl.checkpoint.readio:_files", "share - share % GAP_BYTES", "share"),
    kills="CKPT-717",
    of="fastimpl",
)
