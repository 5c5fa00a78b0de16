"""Files and folders as saves and loads seldom find them: replaced, gone, cut short, on systems that lack something."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from conformance.checkpoint.cases import (
    FILE,
    PT,
    assert_folder,
    assert_loads,
    load,
    oracle,
    random_bits,
    save,
    save_ranks,
    save_with,
    tiled,
)
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_bytes,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from conformance.harness.raising import errors_inside
from twinproof.checkpoint import catalog, publish, shards
from twinproof.checkpoint.catalog import Part
from twinproof.checkpoint.format import lay_out, read_header
from twinproof.checkpoint.shards import MergeJob
from twinproof.errors import ConfigError, CorruptionError, FormatError, PlanError, StorageError

STATE = {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(3)}


@requirement(
    "CKPT-776",
    "Sums of pieces MUST make the sum of a tensor only where they are of each of its bytes once; pieces without bytes "
    "count for nothing, wherever they are said to lie, and a tensor without bytes needs none.",
)
def test_sums_of_pieces() -> None:
    content = bytes(range(1, 13))

    def part(first: int, last: int, begin: int = 8, file: str = "f") -> Part:
        piece = torch.frombuffer(bytearray(content[first:last] or b"-"), dtype=torch.uint8)
        return Part(file, begin, first, last - first, catalog.crc32(piece) if last > first else 0)

    whole = catalog.crc32(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    places = {"w": ("f", 8, 12), "e": ("f", 8, 0)}
    right: dict[str, list[Part]] = {
        "one piece": [part(0, 12)],
        "three pieces": [part(7, 12), part(0, 3), part(3, 7)],
        "pieces without bytes": [part(0, 12), part(5, 5), part(0, 0), part(12, 12), part(2, 2, file="g")],
    }
    for where, parts in right.items():
        with succeeds("sums", where=where):
            found = catalog.sums_of(places, parts)
        assert_equal(found, {"w": whole, "e": 0}, where=where)
    values = torch.frombuffer(bytearray(content), dtype=torch.int32).view(3, 1)
    for where, value in {"dense": values, "with gaps": values.repeat(1, 2)[:, :1]}.items():
        found_parts = catalog.parts_of("f", {"w": 8, "e": 8}, {"w": value, "e": torch.empty(0)})
        assert_equal(catalog.sums_of(places, found_parts), {"w": whole, "e": 0}, where=f"a tensor, {where}")
    wrong: dict[str, list[Part]] = {
        "none": [],
        "another file": [part(0, 12, file="g")],
        "another place": [part(0, 12, begin=20)],
        "no first byte": [part(1, 12)],
        "no last byte": [part(0, 11)],
        "a gap": [part(0, 4), part(5, 12)],
        "some twice": [part(0, 8), part(4, 12)],
        "all twice": [part(0, 12), part(0, 12)],
    }
    for where, parts in wrong.items():
        with raises(PlanError, mentions=("not every byte was summed once", "12 bytes", "where: w"), where=where):
            catalog.sums_of(places, parts)


def _fails(*_: object) -> None:
    raise ZeroDivisionError("a failure of no file system")


@requirement(
    "CKPT-777",
    "A file MUST be written to a name without a folder, and saves go on where the working folder is gone; where "
    "anything at all fails, the old file MUST stay, with nothing beside it, and the error be as it was.",
)
def test_single_files(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("f.safetensors", "./g.safetensors"):
        with succeeds("a save and a load", where=name):
            checkpoint.save_file(STATE, name)
            found = checkpoint.load_file(name)
        assert_same_tensors(found, STATE, where=name)
    monkeypatch.setattr(os, "fsync", _fails)
    for where in ("f.safetensors", "new.safetensors"):
        with raises(ZeroDivisionError, mentions=("no file system",), where=where):
            checkpoint.save_file({"w": torch.ones(9)}, tmp_path / where)
    monkeypatch.undo()
    assert_same_tensors(checkpoint.load_file(tmp_path / "f.safetensors"), STATE, where="the old file")
    assert_equal(sorted(os.listdir(tmp_path)), ["f.safetensors", "g.safetensors"], where="what is there")
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with succeeds("saves", where="no working folder"):
        for state in ({"w": torch.ones(2)}, STATE):
            save(checkpoint, state, tmp_path / "ck")
            checkpoint.save_file(state, tmp_path / "f.safetensors")
    assert_loads(checkpoint, tmp_path / "ck", STATE)
    assert_same_tensors(checkpoint.load_file(tmp_path / "f.safetensors"), STATE, where="a file")


@requirement(
    "CKPT-778",
    "Where a link of others in a checkpoint's folder cannot have a second name, it MUST stay the link that it is, one "
    "to nothing too; an error that says something else MUST end the save, and leave the old checkpoint.",
)
def test_links_of_others(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, codes = tmp_path / "ck", [errno.EPERM, errno.EXDEV, errno.ENOSPC]
    save(checkpoint, {"w": torch.ones(2)}, folder)
    (folder / "notes.txt").write_text("of others")
    (folder / "to nothing").symlink_to("absent")
    (folder / "to notes").symlink_to("notes.txt")

    def refused(*_: object, **__: object) -> None:
        raise OSError(codes[0], os.strerror(codes[0]))

    monkeypatch.setattr(os, "link", refused)
    for _ in range(2):
        with succeeds("a save", where=os.strerror(codes[0])):
            save(checkpoint, STATE, folder, durable=True)
        links = {name: os.readlink(folder / name) for name in ("to nothing", "to notes")}
        assert_equal(links, {"to nothing": "absent", "to notes": "notes.txt"}, where="links")
        assert_same_bytes(folder / "notes.txt", b"of others", where="a file")
        del codes[0]
    with raises(StorageError, mentions=("ENOSPC", "publishing"), where="no space"):
        save(checkpoint, {"w": torch.ones(2)}, folder)
    assert_loads(checkpoint, folder, STATE)
    assert_equal(os.listdir(tmp_path), ["ck"], where="what is left")


@requirement("CKPT-779", "A file that becomes shorter while its header is read MUST be refused by name.")
def test_headers_cut_while_read(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "f.safetensors", os.pread
    checkpoint.save_file(STATE, path)
    content = path.read_bytes()

    def shorter(descriptor: int, size_bytes: int, offset: int) -> bytes:
        found = read(descriptor, size_bytes, offset)
        if offset == 0:
            os.truncate(path, left_bytes)
        return found

    for left_bytes in (8, 9, 60):
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", shorter)
            with raises(
                FormatError, mentions=("cut short", f"got: {left_bytes - 8}", path.name), where=f"{left_bytes}"
            ):
                checkpoint.load_file(path)


@requirement(
    "CKPT-780",
    "A state without tensors MUST be saved as one file without tensors under every rule for the files, and loaded "
    "and verified as one.",
)
def test_no_tensors(checkpoint: Any, tmp_path: Path) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"max_shard_size": 1},
        {"max_shard_size": "5GB", "checksums": True},
        {"fqn_to_index_mapping": {}},
    )
    for number, options in enumerate(kinds):
        folder = tmp_path / f"{number}"
        with succeeds("a save and a load", where=str(options)):
            save(checkpoint, {}, folder, **options)
            load(checkpoint, {}, folder)
            catalog.verify(folder)
        assert_folder(folder, {FILE: []}, {}, has_sums="checksums" in options)


class _Meanwhile(DefaultLoadPlanner):
    """Does something when the load is planned, and nothing is read yet."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.action()
        target: torch.Tensor = super().resolve_tensor(read_item)
        return target


@requirement(
    "CKPT-785",
    "A file that is gone, or a folder by now, when it is read MUST be an error that names the file and what the system "
    "says: read whole, by columns, or converted; and an input of a merge too.",
    needs=("ranged_reads",),
)
def test_gone_before_it_is_read(checkpoint: Any, tmp_path: Path) -> None:
    whole = random_bits(torch.float32, (64, 8), 1)
    half = tiled(whole, [((0, 0), (64, 4)), ((0, 4), (64, 4))], 0, 2, fill=False)
    targets: dict[str, Any] = {
        "whole": torch.zeros(64, 8),
        "by columns": half,
        "converted": torch.zeros(64, 8, dtype=torch.float64),
    }
    path = tmp_path / "ck" / FILE

    def to_folder() -> None:
        path.unlink(missing_ok=True)
        path.mkdir(exist_ok=True)

    cases: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
        "gone": (lambda: path.unlink(missing_ok=True), ("opening failed", "ENOENT", FILE)),
        "a folder": (to_folder, ("reading failed", "EISDIR", FILE)),
    }
    for what, (action, said) in cases.items():
        for where, target in targets.items():
            shutil.rmtree(tmp_path / "ck", ignore_errors=True)
            save(checkpoint, {"w": whole}, tmp_path / "ck")
            with raises(StorageError, mentions=said, where=f"{what}, {where}"):
                load(checkpoint, {"w": target}, tmp_path / "ck", planner=_Meanwhile(action), cast=True)


@requirement(
    "CKPT-786",
    "A merge whose input goes before it is opened MUST be an error that names the file, with nothing made.",
    needs=("counted_io",),
)
def test_gone_while_merged(checkpoint: Any, tmp_path: Path) -> None:
    from fastimpl.checkpoint.consolidate import consolidate_with_progress

    state = {name: random_bits(torch.uint8, (3 << 20,), seed) for seed, name in enumerate("ab")}
    mapping = {"a": 1, "b": 2}
    save(checkpoint, state, tmp_path / "shards", enable_consolidation=False, fqn_to_index_mapping=mapping)
    last = max((tmp_path / "shards").iterdir())

    def goes(done_bytes: int, total_bytes: int) -> None:
        last.unlink(missing_ok=True)

    with raises(StorageError, mentions=("opening failed", "ENOENT", last.name), where="gone"):
        consolidate_with_progress(tmp_path / "shards", tmp_path / "out", mapping, num_threads=1, progress=goes)
    assert_equal(os.listdir(tmp_path), ["shards"], where="what is there")


def _refuses(code: int) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@requirement(
    "CKPT-787",
    "Where files cannot be written at any place but their end a save MUST write them from front to back, and fail by "
    "name if told to do otherwise; any other error, and writes of nothing, MUST be errors that name the file.",
    needs=("counted_io",),
)
def test_systems_without_random_access(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{n}": random_bits(torch.float32, (40 + n,), n) for n in range(5)}
    codes = (errno.ESPIPE, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
    for code in codes:
        folder, name = tmp_path / f"{code}", errno.errorcode[code]
        with monkeypatch.context() as patch:
            for call in ("pwrite", "pwritev"):
                patch.setattr(os, call, _refuses(code))
            with succeeds("a save", where=name):
                save(checkpoint, state, folder, block_bytes=64)
            with raises(StorageError, mentions=("writing failed", FILE), where=f"{name}, at places"):
                save(checkpoint, state, tmp_path / "random", block_bytes=64, write_mode="random")
        assert_same_bytes(folder / FILE, oracle(state, PT), where=name)
    with monkeypatch.context() as patch, raises(OSError, mentions=("quota",), where="the probe fails"):
        patch.setattr(os, "pwrite", _refuses(errno.EDQUOT))
        save(checkpoint, state, tmp_path / "random")
    for mode, call in (("random", "pwritev"), ("sequential", "writev")):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_: 0)
            with raises(StorageError, mentions=("wrote nothing", "EIO", FILE), where=f"{call} of nothing"):
                save(checkpoint, state, tmp_path / "random", write_mode=mode)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert_equal(left, sorted(f"{code}" for code in set(codes)), where="what is left")


class _NoThread(threading.Thread):
    """Of a system that has no more threads for writes."""

    def start(self) -> None:
        if self.name.startswith("checkpoint-write"):
            raise RuntimeError("can't start new thread")
        super().start()


class _NoMemory:
    """Copies for which a thread gets no memory."""

    def of_thread(self) -> Any:
        raise MemoryError("no pinned memory")


def _no_scratch(_: object) -> Any:
    raise MemoryError("no scratch")


@requirement(
    "CKPT-788",
    "A save whose threads cannot start, or that gets no memory for writes or for copies from a device, MUST raise what "
    "failed and leave nothing; the next one MUST succeed.",
    needs=("counted_io",),
)
def test_no_threads(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastimpl.checkpoint import run

    state = {f"{n}": random_bits(torch.float32, (400,), n) for n in range(8)}
    options = {"block_bytes": 256, "thread_count": 3}
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", _NoThread)
        with raises(RuntimeError, mentions=("new thread",), where="no thread"):
            save(checkpoint, state, tmp_path / "ck", **options)
    assert_equal(list(tmp_path.iterdir()), [], where="what is left without threads")
    for thread_count in (1, 3):
        writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", **{**options, "thread_count": thread_count})
        writer.choose_copies = lambda _: _NoMemory()
        with raises(MemoryError, mentions=("pinned memory",), where="no memory"):
            save_with(writer, state)
        assert_equal(list(tmp_path.iterdir()), [], where="what is left without memory")
    # The first is that of the calling thread's rounds.
    made = iter([run._Thread])
    with monkeypatch.context() as patch:
        patch.setattr(run, "_Thread", lambda starts: next(made, _no_scratch)(starts))
        with raises(MemoryError, mentions=("no scratch",), where="no scratch"):
            save(checkpoint, state, tmp_path / "ck", **options)
    assert_equal(list(tmp_path.iterdir()), [], where="what is left without scratch")
    with succeeds("a save", where="the next one"):
        save(checkpoint, state, tmp_path / "ck", **options)
    assert_same_bytes(tmp_path / "ck" / FILE, oracle(state, PT), where="the next one")


@requirement(
    "CKPT-789",
    "A block of more tensors than one call of the system takes MUST still be written in one call.",
    needs=("counted_io",),
)
def test_many_tensors_in_a_block(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastimpl.checkpoint import blockio

    monkeypatch.setattr(blockio, "_IOV_MAX", 4)
    monkeypatch.setattr(blockio, "_ZERO_COPY_BYTES", 64)
    for count in (1, 2, 3, 7):
        state = {f"{n}": random_bits(torch.float32, (200 + n,), n) for n in range(count)}
        writer = save(checkpoint, state, tmp_path / f"{count}")
        assert_same_bytes(tmp_path / f"{count}" / FILE, oracle(state, PT), where=f"{count} tensors")
        assert_equal(writer.stats.write_count, 1, where=f"calls for {count} tensors")


@requirement(
    "CKPT-793",
    "Where the system cannot exchange two folders at once, a save over a checkpoint MUST replace it all the same, keep "
    "files of others, and leave nothing beside it.",
)
def test_systems_without_exchange(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ck"
    save(checkpoint, {"w": torch.ones(2)}, folder)
    (folder / "notes.txt").write_text("of others")
    # The C library of such a system has no function of that name.
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    with succeeds("a save", where="no exchange"):
        save(checkpoint, STATE, folder)
    monkeypatch.undo()
    assert_loads(checkpoint, folder, STATE)
    assert_same_bytes(folder / "notes.txt", b"of others", where="a file of others")
    assert_equal(os.listdir(tmp_path), ["ck"], where="what is left")


@requirement(
    "CKPT-794",
    "A block, of a save or of a merge, whose contents do not fill it MUST be an error of its file, and never written "
    "with other bytes in the gap; what is merged MUST be synced where that was asked for, and there alone.",
    needs=("counted_io",),
)
def test_blocks_with_gaps(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastimpl.checkpoint.blockio import assemble
    from fastimpl.checkpoint.consolidate import merge
    from fastimpl.checkpoint.wire import OwnBlock

    for size_bytes in (4, 5, 64):
        block, scratch = OwnBlock(2, 0, size_bytes, 0, -1, ()), torch.zeros(64, dtype=torch.uint8)
        if size_bytes == 4:
            with succeeds("a block", where="filled by its header"):
                pieces = assemble(block, b"head", [], [], scratch)
            assert_equal(b"".join(bytes(piece.tolist()) for piece in pieces), b"head", where="a filled block")
            continue
        with raises(CorruptionError, mentions=("missing bytes", f"{size_bytes}", "file 2 at 0"), where="a gap"):
            assemble(block, b"head", [], [], scratch)
    value = random_bits(torch.float32, (64, 3), 1)
    shards, synced = tmp_path / "shards", list[int]()
    parts = [((0, 0), (40, 3)), ((40, 0), (24, 3))]
    for number, (offsets, sizes) in enumerate(parts):
        _write_shard(shards, number, value[offsets[0] :][: sizes[0]], offsets)
    monkeypatch.setattr(os, "fsync", synced.append)
    for is_durable in (False, True):
        found = catalog.read_catalog(shards)
        layouts = {FILE: lay_out([("w", torch.float32, (64, 3))], PT)}
        out = tmp_path / f"durable {is_durable}"
        out.mkdir()
        job, folder = MergeJob(found, layouts, 0, 1, 1), publish.StagedFolder(out, is_durable)
        with succeeds("a merge", where=f"durable {is_durable}"):
            merge(job, folder)
        assert_same_bytes(out / FILE, oracle({"w": value}, PT), where=f"durable {is_durable}")
        assert_equal(bool(synced), is_durable, where=f"synced, durable {is_durable}")
        del found.tensors["w"].chunks[1:]
        with raises(CorruptionError, mentions=("missing bytes", FILE), where="a merge with a gap"):
            merge(job, folder)


def _write_shard(folder: Path, number: int, value: torch.Tensor, offsets: tuple[int, ...]) -> None:
    folder.mkdir(exist_ok=True)
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": list(offsets)}})}
    safetensors.torch.save_file({"w": value.contiguous()}, folder / f"{number}.safetensors", info)


class _Listed:
    """A folder's entries as they were a moment ago."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self.entries = iter(entries)

    def __enter__(self) -> _Listed:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def __iter__(self) -> _Listed:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self.entries)

    def close(self) -> None:
        """Nothing is open."""


@requirement(
    "CKPT-799",
    "A file that vanishes behind the look at a leftover's folder MUST stop neither the look nor a save, and its save "
    "count as one that is still at work.",
)
def test_files_of_leftovers_that_vanish(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, scandir = tmp_path / ".ck.saving-0123456789ab", os.scandir

    def vanishing(path: Any = ".") -> Any:
        with scandir(path) as entries:
            found = _Listed(list(entries))
        if isinstance(path, (str, os.PathLike)) and os.fspath(path) == os.fspath(left):
            (left / FILE).unlink(missing_ok=True)
        return found

    def look() -> float:
        left.mkdir(exist_ok=True)
        (left / FILE).write_bytes(b"1")
        for each in (left / FILE, left):
            os.utime(each, (0, 0))
        with succeeds("a look", where="at leftovers"):
            (found,) = publish.find_leftovers(tmp_path, "ck")
        return found.age_s

    assert_equal(look() > 3600, True, where="old, with its file")
    monkeypatch.setattr(os, "scandir", vanishing)
    assert_equal(abs(look()) < 600, True, where="new, as its file vanishes")
    with succeeds("a save", where="as a file vanishes"):
        save(checkpoint, STATE, tmp_path / "ck")
    monkeypatch.undo()
    assert_loads(checkpoint, tmp_path / "ck", STATE)


def _save_shards_of(rank: Rank, path: str, holders: tuple[int, ...], options: dict[str, Any]) -> None:
    # Each rank has a name of its own, and what it has not nobody has.
    state = {f"r{rank.rank}": torch.full((3,), rank.rank)} if rank.rank in holders else {}
    with succeeds("a save", where=f"rank {rank.rank} of those with tensors, {holders}"):
        save_ranks(rank, state, Path(path), enable_consolidation=False, **options)


def _assert_nothing(checkpoint: Any, folder: Path, where: str) -> None:
    """A folder of shards without tensors is loaded, verified, found and merged as one."""
    with succeeds("what reads a checkpoint", where=where):
        load(checkpoint, {}, folder)
        found = catalog.verify(folder)
        kind = checkpoint.detect_format(folder)
        checkpoint.consolidate_safetensors_files(folder, folder.with_name(f"{folder.name}-merged"))
    assert_equal((found.checked, found.unchecked, kind.name), ((), (), "HF"), where=where)
    assert_folder(folder.with_name(f"{folder.name}-merged"), {FILE: []}, {})
    with raises(RuntimeError, mentions=("w",), where=f"{where}: a name"):
        load(checkpoint, {"w": torch.ones(1)}, folder)


@requirement(
    "CKPT-812",
    "Shards of a state without tensors on any rank MUST be one file without tensors, which is loaded, verified, found "
    "and merged as a checkpoint of none; a rank without tensors beside others with some MUST write no file.",
)
def test_shards_of_nothing(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    options: tuple[dict[str, Any], ...] = ({}, {"checksums": True}, {"fqn_to_index_mapping": {}}, {"page_align": True})
    name = "shard-0000{}-model-00001-of-00001.safetensors".format
    for number, given in enumerate(options):
        folder = tmp_path / f"alone-{number}"
        # Over an old one, too.
        for state in ({}, {"w": torch.ones(2)}, {}) if "fqn_to_index_mapping" not in given else ({},):
            save(checkpoint, state, folder, enable_consolidation=False, **given)
        assert_equal(os.listdir(folder), [name(1)], where=f"files of one process, {given}")
        _assert_nothing(checkpoint, folder, f"one process, {given}")
    for holders in ((), (0,), (1,), (2,), (0, 2)):
        folder = tmp_path / f"ranks-{len(holders)}-{holders[:1]}"
        rank_pool.run(_save_shards_of, 3, str(folder), holders, {})
        expected = [name(rank + 1) for rank in holders or (0,)]
        assert_equal(sorted(os.listdir(folder)), expected, where=f"files where ranks {holders} have tensors")
        if holders:
            assert_loads(checkpoint, folder, {f"r{rank}": torch.full((3,), rank) for rank in holders})
        else:
            _assert_nothing(checkpoint, folder, "three ranks")


def _others_at(path: Path) -> dict[str, Callable[[], object]]:
    """Ways to put something else in the place of a file of one matrix ``w`` [60, 8]."""

    def put(state: dict[str, torch.Tensor]) -> None:
        path.unlink(missing_ok=True)
        safetensors.torch.save_file(state, path)

    def to_folder() -> None:
        path.unlink(missing_ok=True)
        path.mkdir(exist_ok=True)

    return {
        "another name": lambda: put({"x": torch.ones(1)}),
        "another rank": lambda: put({"w": torch.ones(60 * 8)}),
        "another shape": lambda: put({"w": torch.ones(8, 60)}),
        "fewer rows": lambda: put({"w": torch.ones(6, 8)}),
        "another dtype": lambda: put({"w": torch.ones(60, 8, dtype=torch.float64)}),
        "half": lambda: os.truncate(path, path.stat().st_size // 2 if path.stat().st_size > 1000 else 0),
        "nothing in it": lambda: os.truncate(path, 0),
        "gone": lambda: path.unlink(missing_ok=True),
        "a folder": to_folder,
    }


def _other() -> None:
    raise CorruptionError("another file", got="another", expected="the one that was there", where="a")


@requirement(
    "CKPT-813",
    "A file that is gone, another one or shorter when it is read, after its header was, MUST be a named error of the "
    "file, whatever reads it: a reader, load_file or a merge; a target's own failure MUST stay what it is.",
)
def test_other_files_when_read(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, folder = {"w": random_bits(torch.float32, (60, 8), 1)}, tmp_path / "ck"
    path, named = folder / "f.safetensors", (CorruptionError, StorageError)

    def after(real: Any, action: Callable[[], object]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            action()
            return found

        return call

    for what, action in _others_at(path).items():
        for way in ("a reader", "load_file", "a merge"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            checkpoint.save_file(state, path)
            with monkeypatch.context() as patch, raises(named, mentions=(path.name,), where=f"{what}, {way}"):
                if way == "a reader":
                    load(checkpoint, {"w": torch.zeros(60, 8)}, folder, planner=_Meanwhile(action))
                elif way == "load_file":
                    patch.setattr(shards, "read_header", after(read_header, action))
                    checkpoint.load_file(path)
                else:
                    patch.setattr(shards, "StagedFolder", after(publish.StagedFolder, action))
                    checkpoint.consolidate_safetensors_files(folder, tmp_path / "out")
        assert_equal((tmp_path / "out").exists(), False, where=f"{what}: what was merged")
    for name, error in (("a", StorageError), ("b", CorruptionError)):
        with (
            raises(error, mentions=("where: a",), where=f"a file that is gone, {name}"),
            publish.reading(["a"], _other),
        ):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    shutil.rmtree(folder)
    save(checkpoint, state, folder)

    def full(done_bytes: int, total_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a log")

    found: list[str] = []
    try:
        load(checkpoint, {"w": torch.zeros(60, 8)}, folder, progress=full)
    except BaseException as error:
        found = [type(each).__name__ for each in errors_inside(error)]
    assert_equal(("OSError" in found, "StorageError" in found), (True, False), where=f"of progress: {found}")


@requirement(
    "CKPT-840",
    "save_file MUST write behind a link, which stays, and leave the file's permissions as they were; over what is no "
    "file, a pipe or a device, it MUST be refused by name, and what is there stay.",
)
def test_files_that_are_there(checkpoint: Any, tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "real.safetensors", tmp_path / "link.safetensors", tmp_path / "pipe"
    link.symlink_to("real.safetensors")
    for value in (1.0, 2.0):
        state = {"w": torch.full((2,), value)}
        with succeeds("a save", where=f"by a link, {value}"):
            checkpoint.save_file(state, link)
        assert_equal((link.is_symlink(), path.is_symlink()), (True, False), where="the link")
        assert_same_tensors(checkpoint.load_file(path), state, where="the file behind the link")
        assert_equal(path.stat().st_mode & 0o777, 0o644 if value == 1.0 else 0o600, where="permissions")
        path.chmod(0o600)
    os.mkfifo(pipe)
    with raises(ConfigError, mentions=("no file", str(pipe)), where="a pipe"):
        checkpoint.save_file({"w": torch.ones(2)}, pipe)
    with raises(StorageError, mentions=("EISDIR", str(tmp_path)), where="a folder"):
        checkpoint.save_file({"w": torch.ones(2)}, tmp_path)
    assert_equal(pipe.is_fifo(), True, where="the pipe")
    assert_equal(len(list(tmp_path.iterdir())), 3, where="what is there")
