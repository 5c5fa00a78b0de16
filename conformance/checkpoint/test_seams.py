"""Where the work is cut: owners of several files, windows, tasks; helpers that fail in any way, files that shrink."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import (
    DTYPES,
    FILE,
    State,
    Tiled,
    assert_folder,
    bits,
    load,
    load_with,
    part_of,
    random_bits,
    save,
    save_ranks,
    zeros_like,
)
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import leftovers
from conformance.harness import Rank, assert_equal, assert_same_bytes, assert_same_tensor, raises, requirement, succeeds
from conformance.harness.raising import errors_inside
from conformance.provers.faults import WRITE_CALLS, FaultServer
from twinproof.checkpoint.catalog import verify
from twinproof.errors import TwinproofError, UnsupportedError

# A file, or a run of one, of more bytes is read in several tasks; rows with small gaps are read by windows of so many.
TASK_BYTES, WINDOW_BYTES, GAP_BYTES = 8 << 20, 1 << 20, 4096


def _many(count: int) -> State:
    return {f"t{i:02}": random_bits(torch.float32, (5 + i % 3, 13 + 8 * i), i) for i in range(count)}


def _save_files(rank: Rank, path: str, options: dict[str, Any]) -> None:
    state: dict[str, Any] = {}
    for name, value in _many(10).items():
        rows, columns = value.shape
        boxes = [((0, 0), (rows, 3)), ((0, 3), (2, columns - 3)), ((2, 3), (rows - 2, columns - 3))]
        if int(name[1:]) % 3 == 0:
            # Whole on one rank: a block that nobody sends anything to.
            boxes = [((0, 0), (rows, columns))]
        first = int(name[1:]) % 2
        mine = boxes[(rank.rank + first) % rank.world_size :: rank.world_size]
        parts: dict[tuple[int, ...], torch.Tensor] = {
            offsets: part_of(value, offsets, sizes).contiguous() for offsets, sizes in mine
        }
        state[name] = Tiled.of(value.shape, parts, value.dtype)
    save_ranks(rank, state, Path(path), **options)


@requirement(
    "CKPT-483",
    "Files that are written front to back MUST hold the same bytes where a rank owns several files, whose tensors are "
    "partly its own and partly sent to it, for any block size.",
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_owners_of_several_files(checkpoint: Any, rank_pool: Any, tmp_path: Path, world_size: int) -> None:
    state = _many(10)
    mapping = {name: 1 + i // 2 for i, name in enumerate(state)}
    names = {f"model-{i:05}-of-00005.safetensors": [f"t{2 * i - 2:02}", f"t{2 * i - 1:02}"] for i in range(1, 6)}
    for block_bytes in (64, 256, 4096):
        path = tmp_path / f"{block_bytes}"
        options = {"write_mode": "sequential", "block_bytes": block_bytes, "thread_count": 2}
        rank_pool.run(_save_files, world_size, str(path), {**options, "fqn_to_index_mapping": mapping})
        assert_folder(path, names, state)


@requirement(
    "CKPT-484",
    "cast=True MUST convert as Tensor.to does between every two dtypes, of one width too, whole and in parts, and "
    "refuse what it refuses.",
)
def test_every_cast(checkpoint: Any, tmp_path: Path) -> None:
    # What becomes of a negative float, or one too large, in an integer, depends on the instruction that converts it.
    small = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) * 9
    stored = {
        f"{i:02}": small.to(dtype) if is_number(dtype) else random_bits(dtype, (7, 9), i)
        for i, dtype in enumerate(DTYPES)
    }
    save(checkpoint, stored, tmp_path / "ck")
    for target_dtype in DTYPES:
        expected: State = {}
        refused = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of complex values that lose a part.
            for name, value in stored.items():
                try:
                    expected[name] = value.to(target_dtype)
                except RuntimeError:
                    refused.append(name)
            plain = {name: zeros_like(value) for name, value in expected.items()}
            memory = {name: zeros_like(torch.empty(9, 7, dtype=target_dtype)) for name in expected}
            # A transposed one, and one row of each.
            turned = {name: bits(value).t().view(target_dtype) for name, value in memory.items()}
            rows = {
                name: Tiled.of((7, 9), {(2, 0): zeros_like(value[2:3])}, target_dtype)
                for name, value in expected.items()
            }
            for targets in (plain, turned, rows):
                load(checkpoint, targets, tmp_path / "ck", cast=True)
            for name in refused:
                target = zeros_like(torch.empty(7, 9, dtype=target_dtype))
                with raises(UnsupportedError, where=f"{stored[name].dtype} to {target_dtype}"):
                    load(checkpoint, {name: target}, tmp_path / "ck", cast=True)
        for name, value in expected.items():
            where = f"{stored[name].dtype} to {target_dtype}"
            assert_same_tensor(bits(plain[name]), bits(value), where=where)
            assert_same_tensor(bits(turned[name]).contiguous(), bits(value), where=f"{where}, transposed")
            assert_same_tensor(bits(rows[name].parts[2, 0]), bits(value[2:3]), where=f"{where}, a row")


def is_number(dtype: torch.dtype) -> bool:
    """Whether it has fractions, and torch makes values of it."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype is not torch.float4_e2m1fn_x2


class _Ended(BaseException):
    """What is no Exception, as a task that was cancelled or a process that is to end."""


@contextmanager
def _helpers_raise(name: str, error: BaseException) -> Iterator[list[int]]:
    """The first call of a function of ``os`` in a helper's thread raises; how often it was called there."""
    calls: list[int] = []
    hit = threading.Event()
    original, before, main = getattr(os, name), threading.active_count(), threading.current_thread()

    def called(*arguments: Any) -> Any:
        if threading.current_thread() is main:
            # A helper that there is comes to its first call.
            if threading.active_count() > before:
                hit.wait(20)
            return original(*arguments)
        calls.append(1)
        hit.set()
        if len(calls) == 1:
            raise error
        return original(*arguments)

    with mock.patch.object(os, name, called):
        yield calls


@requirement(
    "CKPT-485",
    "Whatever a helper's thread raises, of any class, MUST be raised by the call that it helps, with nothing of a save "
    "or of a merge shown.",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [_Ended, ValueError, MemoryError])
def test_any_error_of_a_helper(checkpoint: Any, tmp_path: Path, kind: type[BaseException]) -> None:
    state = {f"{i}": random_bits(torch.float32, (1 << 18,), i) for i in range(12)}
    mapping = {name: 1 + int(name) % 4 for name in state}
    save(checkpoint, state, tmp_path / "whole", fqn_to_index_mapping=mapping)
    save(checkpoint, state, tmp_path / "shards", enable_consolidation=False)
    targets = {name: zeros_like(value) for name, value in state.items()}
    options = {"fqn_to_index_mapping": mapping, "thread_count": 3, "block_bytes": 1 << 18}
    calls: dict[str, tuple[str, Callable[[], object]]] = {
        "save": ("pwritev", lambda: save(checkpoint, state, tmp_path / "new", **options)),
        "load": ("preadv", lambda: load(checkpoint, targets, tmp_path / "whole", thread_count=3)),
        "merge": (
            "pwritev",
            lambda: checkpoint.consolidate_safetensors_files(tmp_path / "shards", tmp_path / "new", mapping, 3),
        ),
    }
    for what, (name, call) in calls.items():
        with _helpers_raise(name, kind("of a helper")) as seen:
            caught: BaseException | None = None
            try:
                call()
            except BaseException as error:
                caught = error
        where = f"{what}: {len(seen)} calls in helpers"
        if not seen:
            continue
        carried: list[type[BaseException]] = []
        queue: list[BaseException | None] = [caught]
        while queue:
            inner = queue.pop()
            if inner is not None:
                carried.append(type(inner))
                failures = getattr(inner, "failures", {})
                queue += [inner.__cause__, *(found[0] for found in failures.values())]
        assert_equal(kind in carried, True, where=f"{where}: {kind.__name__} among {carried}")
        assert_equal((tmp_path / "new").exists(), False, where=f"{where}: something is shown")


class _Tells:
    """Progress that raises: out of the main thread, or at its call of a number."""

    def __init__(self, error: BaseException, at: int | None) -> None:
        self._error, self._at, self._main = error, at, threading.current_thread()
        self.calls, self.raised = 0, threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.calls += 1
        is_helper = threading.current_thread() is not self._main
        if self.calls == self._at or (self._at is None and is_helper):
            self.raised.set()
            raise self._error


@contextmanager
def _helpers_first(told: threading.Event) -> Iterator[None]:
    """Where there are helpers, the main thread writes and reads nothing before they have told of something."""
    before, main = threading.active_count(), threading.current_thread()

    def behind(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if threading.current_thread() is main and threading.active_count() > before:
                told.wait(20)
            return original(*arguments)

        return called

    with ExitStack() as stack:
        for name in ("pwritev", "preadv", "copy_file_range"):
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, behind(getattr(os, name))))
        yield


def _told_ways(checkpoint: Any, folder: Path) -> dict[str, Callable[[_Tells | None], Any]]:
    """Everything that tells how far it is, with several threads where it can; what is written is ``new``."""
    state = {f"{i}": random_bits(torch.float32, (1 << 18,), i) for i in range(12)}
    mapping = {name: 1 + int(name) % 4 for name in state}
    for name, options in (("whole", {"checksums": True}), ("shards", {"enable_consolidation": False})):
        save(checkpoint, state, folder / name, fqn_to_index_mapping=mapping, durable=False, **options)
    targets = {name: zeros_like(value) for name, value in state.items()}
    saved = {"fqn_to_index_mapping": mapping, "thread_count": 3, "block_bytes": 1 << 18, "durable": False}

    def save_later(tell: Any) -> None:
        writer = checkpoint.HuggingFaceStorageWriter(folder / "new", progress=tell, **saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of one process that saves alone.
            future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
            future.result()

    def merge(tell: Any) -> None:
        from fastimpl.checkpoint.consolidate import consolidate_with_progress

        consolidate_with_progress(folder / "shards", folder / "new", mapping, num_threads=3, progress=tell)

    ways: dict[str, Callable[[Any], Any]] = {
        "a save": lambda tell: save(checkpoint, state, folder / "new", progress=tell, **saved),
        "a save front to back": lambda tell: save(
            checkpoint, state, folder / "new", progress=tell, write_mode="sequential", **saved
        ),
        "a save with sums": lambda tell: save(
            checkpoint, state, folder / "new", progress=tell, checksums=True, **saved
        ),
        "a save of shards": lambda tell: save(
            checkpoint, state, folder / "new", progress=tell, enable_consolidation=False, **saved
        ),
        "a save in the background": save_later,
        "a load": lambda tell: load(checkpoint, targets, folder / "whole", progress=tell, thread_count=3),
        "verify": lambda tell: verify(folder / "whole", progress=tell, thread_count=3),
    }
    return {**ways, "a merge": merge} if "staged_copies" in getattr(checkpoint, "CAPABILITIES", ()) else ways


@requirement(
    "CKPT-726",
    "What progress raises, in whichever thread and at whichever call, MUST be raised by the save, load, verification "
    "or merge that tells it, with nothing shown and nothing left.",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [_Ended, ValueError])
def test_any_error_of_progress(checkpoint: Any, tmp_path: Path, kind: type[BaseException]) -> None:
    for what, way in _told_ways(checkpoint, tmp_path).items():
        heard = _Tells(kind("never"), 0)
        with succeeds(what, where="progress that raises nothing"):
            way(heard)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        tells, caught = _Tells(kind("cancelled"), None), list[BaseException]()
        with _helpers_first(tells.raised):
            try:
                way(tells)
            except BaseException as error:
                caught += errors_inside(error)
        # An implementation without helpers has nobody who could raise there.
        expected = tells.raised.is_set()
        assert_equal(kind in map(type, caught), expected, where=f"{what}: raised in a helper, seen by the caller")
        left = leftovers(tmp_path, "whole", "shards", *(() if expected else ("new",)))
        assert_equal(left, [], where=f"{what}, in a helper: what is left")
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        for at in sorted({1, 2, heard.calls // 2, heard.calls}):
            with raises(kind, mentions=["cancelled"], where=f"{what}, call {at} of {heard.calls}"):
                way(_Tells(kind("cancelled"), at))
            assert_equal(leftovers(tmp_path, "whole", "shards"), [], where=f"{what}, call {at}: what is left")


@requirement(
    "CKPT-486",
    "A file that becomes shorter after its header was read MUST be a named error on every way of reading: whole, in "
    "rows, in columns with small and with large gaps, by one thread and by several.",
)
@pytest.mark.parametrize("thread_count", [1, 3])
def test_files_that_shrink(checkpoint: Any, tmp_path: Path, thread_count: int) -> None:
    whole = {"w": random_bits(torch.float32, (96, 4096), 1), "x": random_bits(torch.float32, (5,), 2)}
    boxes = {"rows": ((32, 0), (64, 4096)), "columns": ((0, 100), (96, 3900)), "narrow": ((0, 4000), (96, 50))}
    targets: dict[str, dict[str, Any]] = {"whole": {name: zeros_like(value) for name, value in whole.items()}}
    for name, (offsets, sizes) in boxes.items():
        targets[name] = {"w": Tiled.of((96, 4096), {offsets: torch.zeros(sizes)}, torch.float32)}
    for name, target in targets.items():
        path = tmp_path / name
        save(checkpoint, whole, path)
        reader = checkpoint.HuggingFaceStorageReader(path, thread_count=thread_count)
        read, size = reader.read_data, (path / FILE).stat().st_size

        def read_too_late(*arguments: Any, read: Any = read, path: Path = path, size: int = size) -> Any:
            # The tail of the only matrix goes; the header still tells of it.
            os.truncate(path / FILE, size - 16384)
            return read(*arguments)

        reader.read_data = read_too_late
        with raises((OSError, TwinproofError), mentions=[FILE], where=f"{name}, {thread_count} threads"):
            load_with(reader, target)


@requirement(
    "CKPT-487",
    "Rectangles MUST be read right, to the byte, where they take several windows and tasks: rows with gaps just below "
    "and above what is read along, in several planes, runs longer than a task, into targets of any strides.",
)
def test_windows_and_tasks(checkpoint: Any, tmp_path: Path) -> None:
    shapes = {
        "wide": (70, 40_000),
        "planes": (3, 40, 20_001),
        "long": (2, TASK_BYTES + 4099),
        "deep": (2, 3, 5, 7, 11_000),
    }
    state = {name: random_bits(torch.uint8, shape, i) for i, (name, shape) in enumerate(shapes.items())}
    save(checkpoint, state, tmp_path / "ck")
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        # Gaps of one byte less than what is read along, as many, and one more; windows end anywhere in a row.
        *(("wide", (1, 17), (68, 40_000 - GAP_BYTES + more)) for more in (-1, 0, 1)),
        ("wide", (0, 0), (70, 40_000 - 1)),
        ("wide", (3, 39_000), (60, 1000)),
        ("planes", (0, 1, 1), (3, 38, 20_000)),
        ("planes", (1, 0, 0), (2, 40, 20_000)),
        ("planes", (0, 39, 5), (3, 1, 17_000)),
        ("long", (0, 1), (2, TASK_BYTES + 4097)),
        ("long", (1, 0), (1, TASK_BYTES + 4099)),
        ("deep", (0, 1, 1, 1, 3), (2, 2, 3, 5, 10_500)),
    ]
    for name, offsets, sizes in boxes:
        expected = part_of(state[name], offsets, sizes).contiguous()
        for thread_count in (1, 2, 3):
            for turned in (False, True):
                memory = torch.zeros(sizes[::-1] if turned else sizes, dtype=torch.uint8)
                target = memory.permute(*range(len(sizes) - 1, -1, -1)) if turned else memory
                load(
                    checkpoint,
                    {name: Tiled.of(shapes[name], {offsets: target}, torch.uint8)},
                    tmp_path / "ck",
                    thread_count=thread_count,
                )
                where = f"{name} at {offsets}, {sizes}, {thread_count} threads, turned {turned}"
                assert_same_bytes(target.contiguous().numpy().tobytes(), expected.numpy().tobytes(), where=where)


@requirement(
    "CKPT-717",
    "A load MUST be cut between elements, however many bytes there are in all: into targets of other strides or "
    "dtypes, by one thread or by several.",
)
def test_cuts_between_elements(checkpoint: Any, tmp_path: Path) -> None:
    for dtype in (torch.int16, torch.float64):
        size = torch.empty(0, dtype=dtype).element_size()
        # Shares of one thread and of two are windows or more, and no whole number of elements in most cases.
        whole = random_bits(torch.int32, (10 << 18,), 1).view(dtype)[: (10 << 20) // size - 3]
        for extra in (1, 10, 23):
            state = {"w": whole, "few": random_bits(torch.uint8, (extra,), 2)}
            folder = tmp_path / f"{dtype} {extra}"
            save(checkpoint, state, folder)
            for thread_count in (1, 2):
                where = f"{dtype}, {extra} bytes more, {thread_count} threads"
                spread = torch.zeros(2 * whole.numel(), dtype=dtype)[::2]
                with succeeds("a load", where=where):
                    load(
                        checkpoint,
                        {"w": spread, "few": torch.zeros_like(state["few"])},
                        folder,
                        thread_count=thread_count,
                    )
                assert_same_tensor(spread.contiguous(), whole, where=where)


@requirement(
    "CKPT-488",
    "Every rank that wrote to a file of a save or of a consolidation on every rank MUST sync that file itself after "
    "its last write, before any of it is shown.",
)
@pytest.mark.parametrize("what", ["save", "consolidate"])
def test_every_rank_syncs(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str) -> None:
    if what == "save":
        options = {"thread_count": 2, "block_bytes": 64}
        crashes = Crashes(
            server, tmp_path, lambda root: None, programs.save_together, "{root}/ck", 7, options, world_size=2
        )
    else:

        def shards(root: Path) -> None:
            save(checkpoint, programs.make_state(7), root / "shards", enable_consolidation=False)

        crashes = Crashes(
            server, tmp_path, shards, programs.consolidate_together, "{root}/shards", "{root}/ck", world_size=2
        )
    trace = crashes.record()
    shown = min(event.begin for event in trace.only(("rename", "link")))
    unsynced = []
    for event in trace.only(WRITE_CALLS, suffix=".safetensors"):
        synced = [
            sync
            for sync in trace.only(("fsync", "fdatasync"), rank=event.rank)
            if sync.inode == event.inode and sync.begin > event.end and sync.end < shown
        ]
        if not synced:
            unsynced.append((event.rank, Path(event.path).name))
    assert_equal(sorted(set(unsynced)), [], where="ranks and the files that they wrote and did not sync")
    found = [f"{item.kind}: {item.path.removeprefix(trace.root)}" for item in trace.order_violations()]
    assert_equal(found, [], where="what a power cut could destroy")


@requirement(
    "CKPT-489",
    "Any part of a rectangle MUST be read right through a window of any size, and the operator that reads it MUST say "
    "that the file ends before the part's last byte, and that it cannot be read.",
    needs=("staged_copies",),
)
def test_read_operator(checkpoint: Any, tmp_path: Path) -> None:
    from fastimpl import ops

    ops.available()
    shape, offsets, sizes, base = (2, 5, 11), (0, 1, 2), (2, 3, 7), 13
    whole = random_bits(torch.uint8, shape, 1)
    rectangle = part_of(whole, offsets, sizes).contiguous().view(-1)
    places = part_of(torch.arange(whole.numel()).view(shape), offsets, sizes).reshape(-1)
    path = tmp_path / "file"
    for skip, count in ((0, 42), (0, 1), (5, 30), (7, 14), (20, 22), (41, 1)):
        words = torch.tensor([3, base, skip, count, *shape, *offsets, *sizes])
        last = base + int(places[skip + count - 1])
        for window_bytes in (1, 3, 7, 11, 12, 30, 200):
            window, where = torch.empty(window_bytes, dtype=torch.uint8), f"{skip}, {count}, window {window_bytes}"
            for length in (base + whole.numel(), last + 1, last, base + int(places[skip])):
                path.write_bytes((bytes(base) + whole.numpy().tobytes())[:length])
                dense = torch.zeros(count, dtype=torch.uint8)
                with path.open("rb") as file:
                    status = ops.read_rectangle(file.fileno(), dense, window, words)[0]
                assert_equal(status, 0 if length > last else -1, where=f"{where}: status, a file of {length}")
                if status == 0:
                    assert_same_tensor(dense, rectangle[skip : skip + count], where=f"{where}, a file of {length}")
        with path.open("ab") as file:
            dense = torch.zeros(count, dtype=torch.uint8)
            status = ops.read_rectangle(file.fileno(), dense, torch.empty(9, dtype=torch.uint8), words)[0]
        assert_equal(status, errno.EBADF, where=f"{skip}, {count}: status of a file that cannot be read")
