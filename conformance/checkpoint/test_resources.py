"""Threads, descriptors, memory and system calls: bounded, and never part of the result."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import (
    FILE,
    PT,
    assert_loads,
    load,
    mesh_of,
    oracle,
    own_count,
    random_bits,
    save,
    zeros_like,
)
from conformance.checkpoint.crash_folders import assert_returned
from conformance.harness import (
    Rank,
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from conformance.harness.descriptors import descriptors_left
from conformance.provers.faults import READ_CALLS, WRITE_CALLS, Fault, FaultServer
from conformance.provers.search_path import search_path
from twinproof.errors import CorruptionError, StorageError, TwinproofError

MIB = 1 << 20


@requirement(
    "CKPT-078",
    "Threads from 1 to 16 and blocks from 4 KiB to 64 MiB MUST give the same bytes and load the same values.",
)
def test_threads_and_blocks(checkpoint: Any, tmp_path: Path) -> None:
    state = {f"w{i}": random_bits(torch.float32, (37, 211 + i), i) for i in range(9)} | {"t": torch.randn(40, 30).t()}
    expected = oracle(state, PT)
    for threads, block in ((1, 4096), (3, 8192), (16, 4096), (4, 64 * MIB), (2, 65536)):
        path = tmp_path / f"{threads}-{block}"
        save(checkpoint, state, path, thread_count=threads, block_bytes=block)
        assert_same_bytes(path / FILE, expected, where=path.name)
        targets = {name: zeros_like(value.contiguous()) for name, value in state.items()}
        load(checkpoint, targets, path, thread_count=threads)
        assert_same_tensors(targets, {name: value.contiguous() for name, value in state.items()}, where=path.name)


def _descriptors(folder: Path) -> Counter[str]:
    """What this process has open of the folder's files, or without a name: how often each target is open."""
    opened: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            # Pipes, sockets and the like are "kind:[number]"; what else the process opens in between is not the save's.
            if not target.startswith("/") or target.startswith(f"{folder.resolve()}/"):
                opened[target] += 1
    return opened


# Threads that enter and leave ``catch_warnings`` restore each other's filters; this one is below all of them.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@requirement("CKPT-079", "Concurrent saves and loads MUST not interfere, and MUST leave no file descriptor open.")
def test_concurrency(checkpoint: Any, tmp_path: Path) -> None:
    states = [{f"w{i}": random_bits(torch.float32, (50, 40), 10 * k + i) for i in range(5)} for k in range(4)]
    # What is opened once per process is opened here.
    save(checkpoint, states[0], tmp_path / "first", thread_count=2)
    assert_loads(checkpoint, tmp_path / "first", states[0], thread_count=3)
    gc.collect()
    before = _descriptors(tmp_path)
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(3):
                save(checkpoint, states[k], tmp_path / str(k), thread_count=2)
                assert_loads(checkpoint, tmp_path / str(k), states[k], thread_count=3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert_equal(sorted((_descriptors(tmp_path) - before).elements()), [], where="descriptors left open")


@requirement(
    "CKPT-719", "Threads that begin to write a file at one moment MUST open it once: a save leaves no descriptor."
)
def test_files_opened_together(checkpoint: Any, tmp_path: Path) -> None:
    state = {f"w{i}": random_bits(torch.float32, (40, 50), i) for i in range(8)}
    real, meeting = os.open, threading.Barrier(2)

    def open_together(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_WRONLY and str(path).endswith(".safetensors"):
            # Where one thread opens for all, nobody else comes, and nobody waits again.
            with suppress(threading.BrokenBarrierError):
                meeting.wait(1.0)
        return real(path, flags, *rest, **options)

    before = _descriptors(tmp_path)
    with mock.patch("os.open", open_together):
        save(checkpoint, state, tmp_path / "ck", thread_count=4, block_bytes=64, durable=False)
    assert_equal(sorted((_descriptors(tmp_path) - before).elements()), [], where="descriptors left open")
    assert_loads(checkpoint, tmp_path / "ck", state)


@requirement(
    "CKPT-654",
    "Consolidation of more files than a thread keeps open MUST leave none of them open, with any number of threads, "
    "also where an input is spoilt.",
)
def test_inputs_of_a_merge(checkpoint: Any, tmp_path: Path) -> None:
    count = 70
    state = {f"w{i:02}": random_bits(torch.float32, (3, 5), i) for i in range(count)}
    mapping = {name: 1 + i for i, name in enumerate(state)}
    for folder in ("parts", "cut"):
        save(
            checkpoint, state, tmp_path / folder, fqn_to_index_mapping=mapping, checksums=folder == "cut", durable=False
        )
    spoilt = tmp_path / "cut" / f"model-00066-of-{count:05d}.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    gc.collect()
    before = _descriptors(tmp_path)
    for threads in (1, 3):
        checkpoint.consolidate_safetensors_files(tmp_path / "parts", tmp_path / f"whole-{threads}", num_threads=threads)
        assert_same_bytes(tmp_path / f"whole-{threads}" / FILE, oracle(state, PT), where=f"{threads} threads")
        with raises(CorruptionError, mentions=("w65",), where=f"a flipped byte, {threads} threads"):
            checkpoint.consolidate_safetensors_files(tmp_path / "cut", tmp_path / "none", num_threads=threads)
        left = sorted((_descriptors(tmp_path) - before).elements())
        assert_equal(left, [], where=f"files left open by {threads} threads")


@contextmanager
def _files_up_to(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@requirement(
    "CKPT-706",
    "A save, a single file and a consolidation that cannot write to their end MUST leave no file open, on any number "
    "of threads.",
)
@pytest.mark.parametrize("threads", [1, 3])
def test_files_of_failed_writes(checkpoint: Any, tmp_path: Path, threads: int) -> None:
    state = {f"w{i}": random_bits(torch.float32, (100, 50), i) for i in range(6)}
    mapping = {name: 1 + i for i, name in enumerate(state)}
    save(checkpoint, state, tmp_path / "parts", fqn_to_index_mapping=mapping, durable=False)
    ways: dict[str, Callable[[Path], Any]] = {
        "a merge": lambda out: checkpoint.consolidate_safetensors_files(tmp_path / "parts", out, num_threads=threads),
        "a save": lambda out: save(checkpoint, state, out, thread_count=threads, durable=False),
        "a file": lambda out: checkpoint.save_file(state, out),
    }
    for name, way in ways.items():
        way(tmp_path / f"first {name}")
        gc.collect()
        before = _descriptors(tmp_path)
        for attempt in range(2):
            with _files_up_to(70_000), raises(BaseException, where=f"{name} to a full disk"):
                way(tmp_path / f"{name} {attempt}")
        assert_equal(sorted((_descriptors(tmp_path) - before).elements()), [], where=f"files left open by {name}")


def _peak(action: Any) -> int:
    """Growth of the resident set's high-water mark, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = own_count("status", "VmRSS") * 1024
    action()
    return own_count("status", "VmHWM") * 1024 - before


def _measure(rank: Rank, path: str, rows: int, dim: int) -> tuple[int, int]:
    shape = [rows, 512]
    shape[dim] //= rank.world_size
    mesh = mesh_of(rank)
    state = {
        f"w{i}": DTensor.from_local(torch.full(shape, float(i)), mesh, [Shard(dim)], run_check=False) for i in range(8)
    }
    checkpoint = rank.component("checkpoint")
    growth = []
    for repeat in range(2):
        with checkpoint.HuggingFaceStorageWriter(f"{path}-{repeat}") as writer:
            growth.append(_peak(lambda writer=writer: dcp.save(dict(state), storage_writer=writer)))
    load_growth = _peak(lambda: dcp.load(dict(state), storage_reader=checkpoint.HuggingFaceStorageReader(f"{path}-0")))
    dist.barrier()
    return min(growth), load_growth


@pytest.mark.night
@requirement(
    "CKPT-080",
    "A save MUST add at most 64 MiB and a row block of memory per rank, whatever the model's size; a load 64 MiB.",
    needs=("bounded_memory",),
)
def test_memory(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for dim in (0, 1):
        for rows in (8192, 32768):
            measured = rank_pool.run(_measure, 2, str(tmp_path / f"{dim}-{rows}"), rows, dim)
            for save_growth, load_growth in measured:
                assert_le(save_growth, (64 + 8) * MIB, where=f"save, dim {dim}, {rows} rows")
                assert_le(load_growth, 64 * MIB, where=f"load, dim {dim}, {rows} rows")
        for path in tmp_path.iterdir():
            for file in path.iterdir():
                file.unlink()


# No right program ever waits for it: a thread that may run is scheduled sooner on any machine.
_HELD_S = 5.0
_HELD = {
    "save": (programs.save_letting_go, (*WRITE_CALLS, "fsync", "fdatasync")),
    "load": (programs.load_letting_go, READ_CALLS),
}


@pytest.mark.night
@pytest.mark.parametrize("what", sorted(_HELD))
@requirement("CKPT-081", "Other Python threads MUST make progress while a checkpoint is written and read.")
def test_gil(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str) -> None:
    program, calls = _HELD[what]
    save(checkpoint, programs.make_state(1), tmp_path / "ck", fqn_to_index_mapping=programs.MAPPING)
    # Each call on a file is held until Python code of another thread has run.
    fault = Fault(calls, 1, "hold", times=0, delay_s=_HELD_S)
    for threads in (1, 3):
        where = f"{what}, {threads} threads"
        args = impl.__name__, str(tmp_path / "ck"), 1, threads
        outcome = server.run_forked(program, *args, root=tmp_path, faults=[fault])
        alone = [f"{event.call} {event.size}" for event in outcome.trace.struck if event.errno == errno.ETIMEDOUT]
        assert_equal(alone, [], where=f"{where}: calls while which no other thread could run")
        assert_returned([outcome], where)
        # What does not pass through such a call is not seen, and would prove nothing.
        held_bytes = sum(max(event.result, 0) for event in outcome.trace.struck)
        assert_le(outcome.value(), held_bytes, where=f"{where}: bytes that passed through held calls")


_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from conformance.harness.implementation import component
checkpoint = component(sys.argv[1], "checkpoint")
state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True)}
dcp.save(dict(state), storage_writer=checkpoint.HuggingFaceStorageWriter(sys.argv[2]), no_dist=True)
target = {"a": torch.zeros(2, 3), "b": torch.tensor(False)}
dcp.load(target, storage_reader=checkpoint.HuggingFaceStorageReader(sys.argv[2]), no_dist=True)
checkpoint.save_file(state, sys.argv[2] + "/one.safetensors")
assert torch.equal(checkpoint.load_file(sys.argv[2] + "/one.safetensors")["a"], state["a"])
print("saved" if all(torch.equal(target[k], state[k]) for k in state) else "wrong")
"""


@pytest.mark.night
@requirement("CKPT-082", "Saving and loading MUST work where numpy is not installed.")
def test_without_numpy(impl: Any, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", _WITHOUT_NUMPY, impl.__name__, str(tmp_path / "ck")]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert_equal(done.stdout.strip(), "saved", where=done.stderr[-500:])
    # In this process the modules are imported already; what remains is an import that happens while saving.
    monkeypatch.setitem(sys.modules, "numpy", None)
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True)}
    with succeeds("saving and loading", "without numpy"):
        save(checkpoint, state, tmp_path / "again")
        assert_loads(checkpoint, tmp_path / "again", state)
        checkpoint.save_file(state, tmp_path / "one.safetensors")
        assert_same_tensors(checkpoint.load_file(tmp_path / "one.safetensors"), state, where="one file")


def _count_calls(rank: Rank, path: str, rows: int, columns: int) -> tuple[int, int]:
    mesh = mesh_of(rank)
    local = torch.zeros(rows, columns // rank.world_size)
    state = {f"w{i}": DTensor.from_local(local, mesh, [Shard(1)], run_check=False) for i in range(2)}
    checkpoint = rank.component("checkpoint")
    with checkpoint.HuggingFaceStorageWriter(path) as writer:
        dcp.save(state, storage_writer=writer)
    return writer.stats.write_count, writer.stats.written_bytes


@requirement(
    "CKPT-089",
    "A save MUST need at most payload / 4 MiB + 8 write calls per rank and file, 4-byte runs included.",
    needs=("counted_io",),
)
def test_write_calls(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rows, columns in ((2 * MIB, 2), (4096, 1024)):
        counted = rank_pool.run(_count_calls, 2, str(tmp_path / str(columns)), rows, columns)
        payload = 2 * rows * columns * 4
        assert_le(sum(calls for calls, _ in counted), payload / (4 * MIB) + 8 * 2, where=f"{columns} columns: calls")
        size = (tmp_path / str(columns) / FILE).stat().st_size
        assert_equal(sum(written for _, written in counted), size, where=f"{columns} columns: bytes")


class _Clock:
    """A clock for ``time.perf_counter``: each look at it is three times as late as the one before.

    No sum of two of its times is a difference of two.
    """

    def __init__(self) -> None:
        self.times = [2.0**-40]

    @property
    def now_s(self) -> float:
        return self.times[-1]

    def __call__(self) -> float:
        self.times.append(3 * self.now_s)
        return self.now_s

    def is_between_two(self, seconds: float) -> bool:
        """Whether so many seconds lie between two looks."""
        return any(later - seconds in self.times for later in self.times if later > seconds)


def _seconds(stats: Any) -> dict[str, float]:
    return {name: value for name, value in vars(stats).items() if name.endswith("_s")}


@requirement(
    "CKPT-507",
    "The figures of a save and of a load MUST be right: zeros before the first; seconds by phase that one clock shows, "
    "no phase twice, bytes and calls as the system counts them, and what ranks send to each other.",
    needs=("counted_io",),
)
def test_figures(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    state = {f"w{i}": random_bits(torch.float32, (5, 7 + i), i) for i in range(3)}
    for kind in (checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader):
        assert_equal(set(vars(kind(tmp_path / "ck").stats).values()), {0}, where=f"before the first, {kind.__name__}")
    begun_s = 2.0**-40
    with mock.patch("time.perf_counter", _Clock()) as clock:
        stats = save(checkpoint, state, tmp_path / "ck", thread_count=1).stats
        _assert_phases(_seconds(stats), begun_s, clock.now_s, {"plan_s", "write_s", "fsync_s", "publish_s"})
        assert_equal(clock.is_between_two(stats.plan_s), True, where=f"seconds of the plan: {stats.plan_s}")
        begun_s = clock.now_s
        targets = {name: zeros_like(value) for name, value in state.items()}
        read = load(checkpoint, targets, tmp_path / "ck", thread_count=1).stats
        _assert_phases(_seconds(read), begun_s, clock.now_s, {"plan_s", "read_s"})
        assert_equal(clock.is_between_two(read.plan_s), True, where=f"seconds of the plan: {read.plan_s}")
    size = (tmp_path / "ck" / FILE).stat().st_size
    assert_equal((stats.written_bytes, stats.write_count, stats.sent_bytes), (size, 1, 0), where="of a save")
    values_bytes = sum(value.numel() * 4 for value in state.values())
    # Neighbours in a file are read at once into memory of the host, and one by one on their way to a device.
    read_count = 1 if checkpoint.device == "cpu" else len(state)
    assert_equal((read.read_bytes, read.read_count), (values_bytes, read_count), where="of a load")
    assert_le(1, stats.plan_bytes, where="bytes of the plan")
    for sent, told, exchange_s in rank_pool.run(_sent_bytes, 2, str(tmp_path / "both")):
        assert_equal(told, sent, where="bytes that a rank sent")
        assert_le(1e-12, exchange_s, where="seconds of the exchange")


def _assert_phases(seconds: dict[str, float], begun_s: float, ended_s: float, phases: set[str]) -> None:
    shown = {name for name, value in seconds.items() if value > 0}
    assert_equal(shown, phases, where=f"phases that took time, of {seconds}")
    assert_le(sum(seconds.values()), ended_s - begun_s, where=f"seconds of all phases: {seconds}")


def _sent_bytes(rank: Rank, path: str) -> tuple[int, int, float]:
    local = torch.zeros(40, 6)
    state = {"w": DTensor.from_local(local, mesh_of(rank), [Shard(1)], run_check=False)}
    sent: list[int] = []
    original = dist.isend

    def send(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return original(tensor, *arguments, **options)

    with (
        mock.patch.object(dist, "isend", send),
        mock.patch("time.perf_counter", _Clock()),
        rank.component("checkpoint").HuggingFaceStorageWriter(path, thread_count=1, block_bytes=256) as writer,
    ):
        dcp.save(state, storage_writer=writer)
    return sum(sent), writer.stats.sent_bytes, writer.stats.exchange_s


@requirement(
    "CKPT-734",
    "A file that is refused MUST be closed: by a reader, by load_file and by a merge, whether its header is too long, "
    "cut short or wrong, its data is missing, or it is no file.",
)
def test_refused_files_are_closed(checkpoint: Any, tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    contents = {
        "nothing": b"",
        "half a length": b"123",
        "a header too long": (1 << 40).to_bytes(8, "little") + header,
        "a header cut short": (1000).to_bytes(8, "little") + b"{",
        "a header that is none": (4).to_bytes(8, "little") + b"[12]",
        "data cut short": len(header).to_bytes(8, "little") + header + b"x",
        "no file": None,
    }
    for what, content in contents.items():
        folder = tmp_path / what
        file = folder / "model.safetensors"
        folder.mkdir()
        file.mkdir() if content is None else file.write_bytes(content)
        uses: dict[str, Callable[[], object]] = {
            "a reader": checkpoint.HuggingFaceStorageReader(folder).read_metadata,
            "load_file": partial(checkpoint.load_file, file),
            "a merge": partial(checkpoint.consolidate_safetensors_files, folder, tmp_path / "merged"),
        }
        for name, use in uses.items():
            before = sorted(os.listdir("/proc/self/fd"))
            with raises((TwinproofError, OSError), where=f"{name}, {what}"):
                use()
            assert_equal(sorted(os.listdir("/proc/self/fd")), before, where=f"descriptors behind {name}, {what}")


class _Lock:
    """A lock that tells when a thread asks for it while another has it."""

    def __init__(self, asked: threading.Event) -> None:
        self._lock, self._asked = threading.Lock(), asked

    def __enter__(self) -> None:
        if self._lock.locked():
            self._asked.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@requirement(
    "CKPT-857",
    "A progress function MUST be called by one thread at a time, with numbers that ascend to the last, in a save and "
    "in a load by several threads.",
    needs=("counted_io",),
)
@pytest.mark.parametrize("work", ["save", "load"])
def test_progress_by_turns(checkpoint: Any, tmp_path: Path, work: str) -> None:
    state = {f"w{i}": random_bits(torch.float32, (600, 500), i) for i in range(8)}
    mapping = {name: 1 + i for i, name in enumerate(state)}
    inside, overlaps, told, asked = list[int](), list[int](), list[int](), threading.Event()

    def progress(done: int, total: int) -> None:
        overlaps.extend(inside)
        inside.append(done)
        told.append(done)
        if overlaps:
            asked.set()
        # The first waits until another thread would tell something, too.
        if len(told) == 1:
            asked.wait(30)
        inside.remove(done)

    locks = SimpleNamespace(**{**vars(threading), "Lock": lambda: _Lock(asked)})
    options: dict[str, Any] = {"fqn_to_index_mapping": mapping, "durable": False}
    if work == "load":
        save(checkpoint, state, tmp_path / "ck", **options)
    with mock.patch("twinproof.checkpoint.catalog.threading", locks):
        if work == "save":
            save(checkpoint, state, tmp_path / "ck", progress=progress, thread_count=2, **options)
        else:
            load(checkpoint, state, tmp_path / "ck", progress=progress, thread_count=2)
    assert_equal(asked.is_set(), True, where=f"another thread had something to tell, {work}")
    assert_equal((overlaps, told), ([], sorted(told)), where=f"calls beside another, and all that was told, {work}")


@requirement(
    "CKPT-963",
    "A save, a merge or a load for which the process may not open enough files MUST succeed, or be a StorageError that "
    "names the file, the process's limit and, in a save, how many files it writes; nothing is shown then, none is left "
    "open, and the next one succeeds.",
)
@pytest.mark.parametrize("left_count", [0, 6])
def test_too_few_descriptors(checkpoint: Any, tmp_path: Path, left_count: int) -> None:
    state = {f"w{i:02}": random_bits(torch.float32, (3, 5), i) for i in range(20)}
    mapping = {name: 1 + i for i, name in enumerate(state)}
    for name, whole in {"ck": True, "parts": False}.items():
        options = {"fqn_to_index_mapping": mapping, "durable": False, "enable_consolidation": whole}
        save(checkpoint, state, tmp_path / name, **options)
    merge = partial(checkpoint.consolidate_safetensors_files, tmp_path / "parts", fqn_to_index_mapping=mapping)
    ways: dict[str, Callable[[Path], Any]] = {
        "a merge": merge,
        "a save": lambda out: save(checkpoint, state, out, fqn_to_index_mapping=mapping, durable=False),
        "a load": lambda _: assert_loads(checkpoint, tmp_path / "ck", state),
    }
    for name, way in ways.items():
        way(tmp_path / f"first {name}")
        gc.collect()
        before, failure, out = _descriptors(tmp_path), None, tmp_path / name
        with descriptors_left(left_count) as limit:
            try:
                way(out)
            except BaseException as error:
                failure = error
        if failure is not None:
            counts = ("one of 20",) if left_count and name == "a save" else ()
            said = ("EMFILE", f"limit of {limit}", "ulimit -n", f"where: {tmp_path}", *counts)
            with raises(StorageError, mentions=said, where=f"{name} with {left_count} descriptors"):
                raise failure
            assert_equal(out.exists(), False, where=f"something is shown by {name}")
            # It holds frames.
            failure = None
        assert_equal(sorted((_descriptors(tmp_path) - before).elements()), [], where=f"files left open by {name}")
        with succeeds(name, where="with as many as before"):
            way(out)
