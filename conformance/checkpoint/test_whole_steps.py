"""Steps that a copy brought in part, or a crash cut short: they are none, and nothing is deleted for them."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from conformance.checkpoint.cases import INDEX, load
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint import whole
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingCheckpointError,
    StorageError,
    UnsupportedError,
)

# One process saves and loads here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA, SHARD = "__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors"
NUMBERED = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
_Damage = Callable[[Path], Any]


def _manager(checkpoint: Any, folder: Path, value: float, **options: Any) -> tuple[Any, torch.nn.Linear]:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    given = {"interval": 1, "durable": False, **options}
    return checkpoint.CheckpointManager(folder, model=model, **given), model


def _saved(checkpoint: Any, folder: Path, count: int, **last: Any) -> None:
    """Steps from 1, each of a model that is full of its number; the last with these options."""
    for step in range(1, count + 1):
        manager, _ = _manager(checkpoint, folder, float(step), keep_latest_k=0, **(last if step == count else {}))
        with alone(), manager:
            manager.save(step, last_step=step == count)


def _loaded(checkpoint: Any, folder: Path, step: int = -1, **options: Any) -> tuple[bool, float]:
    manager, model = _manager(checkpoint, folder, 0.0, **options)
    with alone(), manager:
        return manager.load(step), float(model.weight.detach()[0, 0])


def _cut(name: str, size_bytes: int) -> _Damage:
    return lambda step: os.truncate(step / name, size_bytes)


def _gone(name: str) -> _Damage:
    return lambda step: (step / name).unlink()


def _last_byte(name: str) -> _Damage:
    return lambda step: os.truncate(step / name, (step / name).stat().st_size - 1)


def _without_index(step: Path) -> None:
    (step / INDEX).unlink()
    (step / NUMBERED[1]).unlink()


def _one_of_two(step: Path) -> None:
    content = (step / SHARD).read_bytes()
    assert_equal(content.count(b"[4, 4]"), 1, where="global shapes of the weight")
    (step / SHARD).write_bytes(content.replace(b"[4, 4]", b"[8, 4]"))


_OF_TORCH: dict[str, _Damage] = {
    "no data": _gone(DATA),
    "data cut short": _cut(DATA, 100),
    "the last byte is not there": _last_byte(DATA),
    "metadata of no bytes": _cut(".metadata", 0),
    "metadata cut short": _cut(".metadata", 200),
    "metadata that was never written": lambda step: (step / ".metadata").write_bytes(b"\0" * 500),
    "metadata of something else": lambda step: (step / ".metadata").write_bytes(pickle.dumps({"a": 1})),
}
_OF_HF: dict[str, _Damage] = {
    "no file": _gone(NUMBERED[1]),
    "a file cut short": _last_byte(NUMBERED[1]),
    "a header cut short": _cut(NUMBERED[0], 40),
    "a file of no bytes": _cut(NUMBERED[0], 0),
    "no index yet, nor the last file": _without_index,
}
_IN_HF = {"last_save_in_hf": True, "hf_options": {"max_shard_size": 70}}
_OF_SHARDS = {"last_save_in_hf": True, "hf_options": {"enable_consolidation": False}}
_CASES = {
    **{f"torch's: {what}": ({}, damage) for what, damage in _OF_TORCH.items()},
    **{f"HF: {what}": (_IN_HF, damage) for what, damage in _OF_HF.items()},
    "shards: one cut short": (_OF_SHARDS, _last_byte(SHARD)),
    "shards: another is missing": (_OF_SHARDS, _one_of_two),
}


@requirement(
    "CKPT-903",
    "A step whose files are missing or cut short, its metadata too, MUST be no checkpoint to a manager's load, which "
    "takes the newest that is whole and logs what the other lacks; asked for, it MUST be refused by name. One whose "
    "files came meanwhile MUST be loaded.",
)
def test_loads_pass_over_parts(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (what, (last, damage)) in enumerate(_CASES.items()):
        folder = tmp_path / f"{number}"
        _saved(checkpoint, folder, 3, **last)
        shutil.copytree(folder / "step-3", tmp_path / f"{number}-whole")
        damage(folder / "step-3")
        caplog.clear()
        with succeeds("a load", where=what):
            found = _loaded(checkpoint, folder)
        assert_equal(found, (True, 2.0), where=f"{what}: the newest that is whole")
        assert_equal("step-3 is no complete checkpoint" in caplog.text, True, where=f"{what}: what is logged")
        with raises(MissingCheckpointError, mentions=("got: 3", "[1, 2]"), where=f"{what}, asked for"):
            _loaded(checkpoint, folder, 3)
        shutil.rmtree(folder / "step-3")
        shutil.copytree(tmp_path / f"{number}-whole", folder / "step-3")
        if last:
            # The newest step is HF's, which holds no optimizer.
            with raises(ConfigError, mentions=("model alone", "step-3"), where=f"{what}: its files came"):
                _loaded(checkpoint, folder)
        else:
            assert_equal(_loaded(checkpoint, folder), (True, 3.0), where=f"{what}: its files came")
    shutil.rmtree(folder / "step-2")
    for step in (1, 3):
        _gone(".metadata" if step == 1 else SHARD)(folder / f"step-{step}")
    assert_equal(_loaded(checkpoint, folder), (False, 0.0), where="where none is whole")


@requirement(
    "CKPT-904",
    "A step whose files are missing or cut short MUST count for nothing in retention, and stay: whole ones MUST NOT be "
    "deleted for it, and a step that is as long as it says MUST count.",
)
def test_nothing_is_deleted_for_parts(checkpoint: Any, tmp_path: Path) -> None:
    for number, (what, (last, damage)) in enumerate(_CASES.items()):
        folder = tmp_path / f"{number}"
        _saved(checkpoint, folder, 3, **last)
        for is_damaged in (False, True):
            place = shutil.copytree(folder, tmp_path / f"{number}-{is_damaged}")
            if is_damaged:
                damage(place / "step-3")
            manager, _ = _manager(checkpoint, place, 4.0, keep_latest_k=2)
            with alone(), manager:
                manager.save(4)
            expected = ["step-2", "step-3", "step-4"] if is_damaged else ["step-3", "step-4"]
            assert_equal(sorted(os.listdir(place)), expected, where=f"{what}, {is_damaged=}: what is kept")


@requirement(
    "CKPT-905",
    "Metadata of torch's format that was cut short, or is none, MUST be a CorruptionError that names the file, to "
    "load_training and to a manager's initial load; what this torch does not know in it an UnsupportedError, and such "
    "a step MUST NOT be passed over.",
)
def test_metadata_that_is_none(checkpoint: Any, tmp_path: Path) -> None:
    _saved(checkpoint, tmp_path / "run", 1)
    metadata = tmp_path / "run" / "step-1" / ".metadata"
    whole_bytes = metadata.read_bytes()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training() -> None:
        with alone():
            checkpoint.load_training(metadata.parent, model, optimizer)

    def initial() -> None:
        _loaded(checkpoint, tmp_path / "other", initial_load_path=metadata.parent)

    for end in (0, 1, 20, 200, len(whole_bytes) // 2, len(whole_bytes) - 1):
        metadata.write_bytes(whole_bytes[:end])
        for way in (training, initial):
            with raises(CorruptionError, mentions=("cut short", os.fspath(metadata)), where=f"{way.__name__}, {end}"):
                way()
    metadata.write_bytes(whole_bytes.replace(b"TensorStorageMetadata", b"TensorStorageMetadatb"))
    with raises(UnsupportedError, mentions=("version of torch", os.fspath(metadata)), where="a later torch's"):
        training()
    with raises(UnsupportedError, mentions=("version of torch", os.fspath(metadata)), where="a later torch's step"):
        _loaded(checkpoint, tmp_path / "run")


@requirement(
    "CKPT-906",
    "The metadata of a step MUST be read once by a manager's retention and never where it saved the step, and a load "
    "MUST read no older one than it takes; headers of an HF step likewise. What was changed MUST be read again.",
)
def test_metadata_is_read_once(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(checkpoint, tmp_path / "made", 5, **_IN_HF)
    folder = tmp_path / "run"
    shutil.copytree(tmp_path / "made", folder)
    shutil.copytree(folder / "step-1", folder / "step-6")
    read: Counter[str] = Counter()
    ends, headers = whole.ends_of, whole.read_catalog

    def ends_of(metadata: Metadata) -> Any:
        read["metadata"] += 1
        return ends(metadata)

    def catalog_of(path: Path) -> Any:
        read[path.name] += 1
        return headers(path)

    load_pickle = pickle.load

    def counted(file: Any, **options: Any) -> Any:
        read[Path(os.fspath(file.name)).parent.name] += 1
        return load_pickle(file, **options)

    monkeypatch.setattr(pickle, "load", counted)
    monkeypatch.setattr(whole, "ends_of", ends_of)
    monkeypatch.setattr(whole, "read_catalog", catalog_of)
    assert_equal(_loaded(checkpoint, folder), (True, 1.0), where="the newest")
    # Once to see whether it is whole, once by torch's reader.
    assert_equal(read, Counter({"step-6": 2, "metadata": 1}), where="what a load reads")
    manager, _ = _manager(checkpoint, folder, 7.0, keep_latest_k=4)
    read.clear()
    with alone(), manager:
        for step in range(7, 11):
            manager.save(step)
    expected = {f"step-{step}": 1 for step in range(1, 7)}
    found = {name: count for name, count in read.items() if name != "metadata"}
    assert_equal(found, expected, where="what retention reads")
    assert_equal(sorted(os.listdir(folder)), ["step-10", "step-7", "step-8", "step-9"], where="what is kept")
    read.clear()
    hf = shutil.copytree(tmp_path / "made/step-5", folder / "step-11")
    for _ in range(2):
        with raises(ConfigError, mentions=("model alone", "step-11"), where="an HF step"):
            _loaded(checkpoint, folder)
    # Of step 10 the metadata, once by each: it is named as the newest that holds all.
    expected_reads = Counter({"step-11": 2, "step-10": 2, "metadata": 2})
    assert_equal(read, expected_reads, where="headers of an HF step, by two managers")
    known = whole.Known()
    for changed, is_native, change in (
        (hf, False, _last_byte(NUMBERED[0])),
        (folder / "step-10", True, _last_byte(".metadata")),
    ):
        copied = shutil.copytree(changed, tmp_path / "changed" / changed.name)
        for _ in range(2):
            whole.check_whole(copied, is_native=is_native, known=known)
        change(copied)
        with raises(CorruptionError, where=f"{changed.name}, changed since it was seen"):
            whole.check_whole(copied, is_native=is_native, known=known)
    _last_byte(NUMBERED[0])(hf)
    with succeeds("a load", where="an HF step that became shorter"):
        assert_equal(_loaded(checkpoint, folder), (True, 7.0), where="an HF step that became shorter")
    (folder / "step-12").mkdir()
    (folder / "step-12" / ".metadata").write_bytes((folder / "step-7/.metadata").read_bytes())
    assert_equal(_loaded(checkpoint, folder), (True, 7.0), where="before its files come")
    shutil.copy(folder / f"step-7/{DATA}", folder / "step-12")
    assert_equal(_loaded(checkpoint, folder), (True, 7.0), where="after they came")


@requirement(
    "CKPT-992",
    "Retention that looks at a step in the moment in which its save shows it MUST read none of its metadata, and leave "
    "it; what is to go MUST be gone behind the save.",
)
def test_looked_at_while_it_is_shown(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = _manager(checkpoint, tmp_path / "run", 1.0, keep_latest_k=1)
    remember, ends = whole.Known.remember, whole.ends_of
    looks, read = list[list[str]](), list[int]()

    def ends_of(metadata: Metadata) -> Any:
        read.append(1)
        return ends(metadata)

    def remembered(known: Any, folder: Path, *rest: Any) -> None:
        monkeypatch.setattr(whole, "ends_of", ends_of)
        # What its thread does, at the worst moment.
        manager._cleaner._clean()
        looks.append(sorted(os.listdir(tmp_path / "run")))
        monkeypatch.setattr(whole, "ends_of", ends)
        remember(known, folder, *rest)

    monkeypatch.setattr(whole.Known, "remember", remembered)
    with alone(), manager:
        for step in (1, 2):
            manager.save(step)
    assert_equal((looks, read), ([["step-1"], ["step-1", "step-2"]], []), where="what a look finds, and reads")
    assert_equal(os.listdir(tmp_path / "run"), ["step-2"], where="what is kept")


@requirement(
    "CKPT-907",
    "A step that a manager may not read MUST be a StorageError that names it, never one that is passed over: an older "
    "one would be loaded in its place. Nor MUST one be whose files contradict each other.",
)
def test_steps_that_cannot_be_read(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(checkpoint, tmp_path, 2, **_IN_HF)
    look, status = os.listdir, os.stat

    def refusing(real: Any, name: str) -> Any:
        def refused(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(name):
                raise PermissionError(13, "Permission denied")
            return real(path, *arguments, **options)

        return refused

    for what, verb, name in (("a folder", "listdir", "step-2"), ("a file", "stat", NUMBERED[0])):
        with monkeypatch.context() as patch:
            patch.setattr(os, verb, refusing({"listdir": look, "stat": status}[verb], name))
            with raises(StorageError, mentions=("EACCES", f"where: {tmp_path / 'step-2'}"), where=what):
                _loaded(checkpoint, tmp_path)
    # As torch's writer of shards leaves them in a folder with an index.
    shard = {"metadata": {"format": "pt", "DCP_SHARDING_INFO": '{"bias": {"saved_offsets": [0]}}'}}
    checkpoint.save_file({"bias": torch.ones(4)}, tmp_path / "step-2" / SHARD, **shard)
    with raises(ConfigError, mentions=("model alone", "step-2"), where="files that contradict each other"):
        _loaded(checkpoint, tmp_path)
    with raises(FormatError, mentions=("step-2",), where="an index that is none"):
        (tmp_path / "step-2" / INDEX).write_text("{}")
        _loaded(checkpoint, tmp_path)


@requirement(
    "CKPT-916",
    "A folder, an index, a safetensors file or metadata of torch's format that may not be read MUST be a StorageError "
    "that names it, to readers, consolidation, detect_format and load_training; what is not there stays as it is.",
)
def test_checkpoints_that_may_not_be_read(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(checkpoint, tmp_path, 2, **_IN_HF)
    native, hf = tmp_path / "step-1", tmp_path / "step-2"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = {"weight": torch.zeros(4, 4)}
    calls: dict[str, tuple[Any, str, Callable[[Path], Any]]] = {
        "a reader": (os, "open", lambda path: load(checkpoint, targets, path)),
        "consolidation": (os, "listdir", lambda path: checkpoint.consolidate_safetensors_files(path, tmp_path / "out")),
        "an index": (io, "open", lambda path: checkpoint.HuggingFaceStorageReader(path).read_metadata()),
        "detect_format": (os, "listdir", checkpoint.detect_format),
        "load_training": (io, "open", lambda path: checkpoint.load_training(path, model, optimizer)),
    }
    refused = {"a reader": hf / NUMBERED[0], "an index": hf / INDEX, "load_training": native / ".metadata"}
    for what, (module, verb, way) in calls.items():
        folder = native if what == "load_training" else hf
        place, real = refused.get(what, folder), getattr(module, verb)

        def refusing(path: Any, *arguments: Any, place: Path = place, real: Any = real, **options: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path) == os.fspath(place):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path, *arguments, **options)

        with monkeypatch.context() as patch, alone():
            patch.setattr(module, verb, refusing)
            with raises(StorageError, mentions=("EACCES", f"where: {place}"), where=what):
                way(folder)
        with alone(), raises(FileNotFoundError, where=f"{what} of nothing"):
            way(tmp_path / "nothing")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often metadata or headers of a folder were read, by its name."""
    count: Counter[str] = Counter()
    load_pickle, headers = pickle.load, whole.read_catalog

    def metadata(file: Any, **options: Any) -> Any:
        count[Path(os.fspath(file.name)).parent.name] += 1
        return load_pickle(file, **options)

    def catalog_of(path: Path) -> Any:
        count[path.name] += 1
        return headers(path)

    monkeypatch.setattr(pickle, "load", metadata)
    monkeypatch.setattr(whole, "read_catalog", catalog_of)
    return count


@requirement(
    "CKPT-950",
    "What is known of steps that were read MUST be bounded: of more than are kept, those that were read last stay "
    "known, and the others are read again.",
)
def test_known_steps_are_bounded(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    _saved(checkpoint, tmp_path, 3)
    monkeypatch.setattr(whole, "_KNOWN_MAX", 2)
    known = whole.Known()
    # Step 1 is changed behind the second look, so that step 2 is the oldest when the third comes.
    for number, (step, is_read) in enumerate([(1, 1), (2, 1), (1, 0), (1, 1), (3, 1), (1, 0), (3, 0), (2, 1), (1, 1)]):
        if number == 3:
            os.utime(tmp_path / "step-1" / ".metadata", (1, 1))
        read.clear()
        with succeeds("a look", where=f"look {number}"):
            whole.check_whole(tmp_path / f"step-{step}", is_native=True, known=known)
        assert_equal(read[f"step-{step}"], is_read, where=f"look {number}, at step {step}: what is read")


@requirement(
    "CKPT-951",
    "Files of others in an HF step, hidden ones too, MUST NOT make its headers be read again when they change.",
)
def test_others_in_hf_steps(checkpoint: Any, tmp_path: Path, read: Counter[str]) -> None:
    _saved(checkpoint, tmp_path, 1, **_IN_HF)
    known = whole.Known()
    for name in ("", "notes.txt", f".{NUMBERED[0]}", "notes.txt"):
        if name:
            with open(tmp_path / "step-1" / name, "a") as file:
                file.write("of others")
        whole.check_whole(tmp_path / "step-1", is_native=False, known=known)
        assert_equal(read["step-1"], 1, where=f"how often headers were read, behind {name}")


@requirement(
    "CKPT-952",
    "A step of torch's format whose metadata says nothing of files, or names storage of another kind, MUST count in "
    "retention as it is, and its metadata be read once.",
)
def test_storage_of_others(checkpoint: Any, tmp_path: Path, read: Counter[str]) -> None:
    for what in ("nothing", "another kind"):
        folder = tmp_path / what
        _saved(checkpoint, folder, 3)
        path = folder / "step-3" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.storage_data = None if what == "nothing" else dict.fromkeys(metadata.storage_data, ("db", 1))
        path.write_bytes(pickle.dumps(metadata))
        manager, _ = _manager(checkpoint, folder, 4.0, keep_latest_k=3)
        with alone(), manager:
            for step in (4, 5):
                manager.save(step)
        assert_equal(sorted(os.listdir(folder)), ["step-3", "step-4", "step-5"], where=f"{what}: what is kept")
        # Retention looks once for as many saves as were made meanwhile: looks of our own are counted.
        known = whole.Known()
        read.clear()
        for number in range(2):
            with succeeds("a look", where=f"{what}: look {number}"):
                whole.check_whole(folder / "step-3", is_native=True, known=known)
        assert_equal(read["step-3"], 1, where=f"{what}: how often its metadata was read")


@requirement(
    "CKPT-953",
    "An HF step whose files are as long as they say MUST count in retention, whatever else is wrong with their "
    "headers; a load of it MUST be refused by name.",
)
def test_malformed_headers(checkpoint: Any, tmp_path: Path) -> None:
    wrong = {"no JSON": (b"{", b"["), "another dtype": (b"F32", b"F99")}
    for what, (before, after) in wrong.items():
        folder = tmp_path / what
        _saved(checkpoint, folder, 3, **_IN_HF)
        path = folder / "step-3" / NUMBERED[0]
        path.write_bytes(path.read_bytes().replace(before, after, 1))
        manager, _ = _manager(checkpoint, folder, 4.0, keep_latest_k=2)
        with alone(), succeeds("a save", where=what), manager:
            manager.save(4)
        assert_equal(sorted(os.listdir(folder)), ["step-3", "step-4"], where=f"{what}: what is kept")
        with raises((FormatError, UnsupportedError), mentions=(NUMBERED[0],), where=f"{what}: a load"):
            load(checkpoint, {"weight": torch.zeros(4, 4)}, folder / "step-3")
