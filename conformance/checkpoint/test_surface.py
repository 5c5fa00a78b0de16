"""O. The surface that is replaced: signatures, public names, options, and errors that say what is wrong."""

from __future__ import annotations

import errno
import inspect
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from conformance.checkpoint.cases import FILE, assert_loads, load, load_with, oracle, random_bits, save, tiled
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof import errors
from twinproof.checkpoint.publish import storage_error
from twinproof.errors import (
    ConfigError,
    DistributedError,
    MissingKeyError,
    PlanError,
    TwinproofError,
)

# What ours decides otherwise, on purpose.
DEFAULTS = {
    ("HuggingFaceStorageWriter", "save_distributed"): True,
    ("HuggingFaceStorageWriter", "enable_consolidation"): True,
}


def _pairs(checkpoint: Any) -> dict[str, tuple[Any, Any]]:
    return {
        "HuggingFaceStorageWriter": (dcp.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageWriter),
        "HuggingFaceStorageReader": (dcp.HuggingFaceStorageReader, checkpoint.HuggingFaceStorageReader),
        "HuggingFaceSavePlanner": (DefaultSavePlanner, checkpoint.HuggingFaceSavePlanner),
        "HuggingFaceLoadPlanner": (DefaultLoadPlanner, checkpoint.HuggingFaceLoadPlanner),
        "load_file": (safetensors.torch.load_file, checkpoint.load_file),
        "save_file": (safetensors.torch.save_file, checkpoint.save_file),
    }


@requirement(
    "CKPT-425",
    "inspect.signature of what is replaced MUST tell the truth: upstream's names in their places with their defaults, "
    "but for the two that are documented, and everything more by keyword alone.",
)
def test_signatures(checkpoint: Any) -> None:
    for name, (theirs, ours) in _pairs(checkpoint).items():
        expected = dict(inspect.signature(theirs).parameters)
        found = dict(inspect.signature(ours).parameters)
        assert_equal(list(found)[: len(expected)], list(expected), where=f"names of {name}")
        for parameter, there in expected.items():
            here = found[parameter]
            default = DEFAULTS.get((name, parameter), there.default)
            assert_equal((here.kind, here.default), (there.kind, default), where=f"{name}({parameter})")
        more = {found[parameter].kind for parameter in list(found)[len(expected) :]}
        assert_equal(more <= {inspect.Parameter.KEYWORD_ONLY}, True, where=f"what {name} has more: {sorted(found)}")


@requirement(
    "CKPT-426",
    "Writer and reader MUST have the public names of torch's by which a tool inspects them, with the same values, and "
    "storage_data MUST be a mapping of stored chunks.",
)
def test_names(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": random_bits(torch.bfloat16, [3, 5], 1), "b": torch.tensor(2.0), "c": torch.zeros(0, 2)}
    options: dict[str, Any] = {
        "fqn_to_index_mapping": {"a": 1, "b": 1, "c": 2},
        "thread_count": 3,
        "save_distributed": True,
        "enable_consolidation": True,
        "thread_count_consolidation": 2,
    }
    ours = save(checkpoint, state, tmp_path / "ck", durable=False, **options)
    theirs = dcp.HuggingFaceStorageWriter(str(tmp_path / "ck"), **options)
    names = (
        *("metadata_path", "fqn_to_index_mapping", "save_distributed", "enable_consolidation", "thread_count"),
        *("consolidated_output_path", "overwrite"),
    )
    for name in names:
        assert_equal(getattr(ours, name), getattr(theirs, name), where=name)
    assert_equal(Path(ours.fs.concat_path(ours.path, ours.metadata_path)).exists(), True, where="fs, path")
    for kind in (checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader):
        with succeeds("validate_checkpoint_id", where=f"{kind.__name__}, of the class"):
            valid = [kind.validate_checkpoint_id(place) for place in ("a/b", tmp_path, "hf://a/b", 7)]
        assert_equal(valid, [True, True, False, False], where=f"valid places for a {kind.__name__}")
    meta, before = ours.storage_meta(), (ours.checkpoint_id, ours.save_id)
    assert_equal((meta.checkpoint_id, meta.save_id), before, where="storage_meta")
    for place, expected_place in ((None, before[0]), (str(tmp_path / "next"), tmp_path / "next")):
        known = ours.save_id
        ours.reset(place)
        assert_equal((ours.checkpoint_id, ours.save_id == known), (expected_place, False), where="after a reset")
    their_reader = dcp.HuggingFaceStorageReader(str(tmp_path / "ck"))
    expected = their_reader.read_metadata().storage_data
    reader = checkpoint.HuggingFaceStorageReader(tmp_path / "ck")
    found = reader.read_metadata().storage_data
    assert_equal((set(found), len(found)), (set(expected), 3), where="chunks")
    for index, chunk in found.items():
        there = expected[index]
        assert_equal((tuple(chunk.shape), chunk.dtype), (tuple(there.shape), there.dtype), where=index.fqn)
        assert_equal(Path(chunk.relative_path).name, Path(there.relative_path).name, where=f"file of {index.fqn}")
        raw = Path(chunk.relative_path).read_bytes()[chunk.offset : chunk.offset + chunk.length]
        expected_bytes = state[index.fqn].contiguous().reshape(-1).view(torch.uint8)
        assert_equal(raw, bytes(expected_bytes.tolist()), where=f"bytes of {index.fqn}")
    assert_equal(MetadataIndex("a", (1, 0)) in found, False, where="a chunk that is not there")
    assert_equal(found.get(MetadataIndex("z", (0,))), None, where="a name that is not there")
    assert_equal(reader.storage_data is found, True, where="the reader's")


def _failure(path: Path, checkpoint: Any) -> BaseException:
    reader = checkpoint.HuggingFaceStorageReader(path)
    try:
        load_with(reader, {"a": torch.zeros(3)})
    except CheckpointException as error:
        return error.failures[0][0]
    raise AssertionError("nothing was raised")


@requirement(
    "CKPT-427",
    "What keeps read_metadata from reading MUST be in dcp.load's CheckpointException with its class, and with got, "
    "expected and where.",
)
def test_wrapped_errors(checkpoint: Any, tmp_path: Path) -> None:
    content = oracle({"a": torch.ones(3)}, None)
    broken = {"short": content[:-4], "not a header": b"\xff" * 64, "no JSON": (8).to_bytes(8, "little") + b"{x      "}
    for name, raw in broken.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / FILE).write_bytes(raw)
        with raises(TwinproofError, where=name) as direct:
            checkpoint.HuggingFaceStorageReader(folder).read_metadata()
        found = _failure(folder, checkpoint)
        expected: Any = direct.error
        got = [getattr(found, field, None) for field in ("message", "got", "expected", "where")]
        wanted = [getattr(expected, field) for field in ("message", "got", "expected", "where")]
        assert_equal((type(found), got), (type(expected), wanted), where=name)
    assert_equal(type(_failure(tmp_path / "none", checkpoint)), FileNotFoundError, where="no folder")
    unread = checkpoint.HuggingFaceStorageReader(tmp_path / "none").read_metadata(rank=0)
    with raises(FileNotFoundError, where="a look at metadata that could not be read"):
        unread.state_dict_metadata.keys()


@requirement(
    "CKPT-428",
    "An error MUST say what is wrong where it is: a meta tensor, in one process too; a writer or reader that is used "
    "without a plan or without metadata.",
)
def test_messages(checkpoint: Any, tmp_path: Path) -> None:
    with raises(TwinproofError, mentions=["meta", "layer.w"], where="a meta tensor") as caught:
        save(checkpoint, {"layer.w": torch.empty(2, 3, device="meta")}, tmp_path / "ck")
    assert_equal(isinstance(caught.error, DistributedError), False, where="another rank's failure in one process")
    with raises(TwinproofError, mentions=["meta", "layer.w"], where="checked replicas"):
        save(checkpoint, {"layer.w": torch.empty(2, 3, device="meta")}, tmp_path / "ck", check_replicas=True)
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck")
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(2)}, None, True)
    plan = planner.create_local_plan()
    with raises(PlanError, mentions=["prepare_global_plan"], where="data without a plan"):
        writer.write_data(plan, planner)
    with raises(PlanError, mentions=["prepare_global_plan"], where="an end without a plan"):
        writer.finish(None, [])
    assert_equal(SavePlan([]).items, [], where="plan")
    save(checkpoint, {"a": torch.ones(2)}, tmp_path / "one")
    reader = checkpoint.HuggingFaceStorageReader(tmp_path / "one")
    saved = reader.read_metadata().state_dict_metadata["a"]
    items = create_read_items_for_chunk_list("a", saved, list(saved.chunks))
    reader.reset()
    target = DefaultLoadPlanner()
    target.set_up_planner({"a": torch.zeros(2)}, None, True)
    with raises(MissingKeyError, mentions=["read_metadata", "a"], where="data without metadata"):
        reader.read_data(LoadPlan(items), target)


@requirement(
    "CKPT-429",
    "The options of torch's planners and of safetensors' load_file MUST work or be refused by name; what a file cannot "
    "hold MUST be a ValueError as there, and of a meta tensor a RuntimeError.",
)
def test_options(checkpoint: Any, tmp_path: Path) -> None:
    values = {"x": torch.ones(2), "y": {"z": torch.arange(3)}}
    flat = {"x": torch.ones(2), "y.z": torch.arange(3)}
    planner = checkpoint.HuggingFaceSavePlanner(True, False, None, True)
    save(checkpoint, values, tmp_path / "ck", planner=planner)
    assert_loads(checkpoint, tmp_path / "ck", flat)
    save(checkpoint, flat, tmp_path / "flat", planner=checkpoint.HuggingFaceSavePlanner(flatten_state_dict=False))
    assert_loads(checkpoint, tmp_path / "flat", flat)
    for options in ({"enable_plan_caching": True}, {"dedup_replicated_tensors": True}):
        with raises(ConfigError, mentions=list(options), where=str(options)):
            checkpoint.HuggingFaceSavePlanner(**options)
    flags = ({"flatten_state_dict": False, "strict": False}, {"flatten_sharded_tensors": False, "strict": False})
    for partial in ({"allow_partial_load": True}, {"strict": False}, *flags):
        targets = {"x": torch.zeros(2), "missing": torch.full((2,), 7.0)}
        loading = checkpoint.HuggingFaceLoadPlanner(**partial)
        load(checkpoint, targets, tmp_path / "ck", planner=loading)
        assert_same_tensors(targets, {"x": torch.ones(2), "missing": torch.full((2,), 7.0)}, where=str(partial))
        assert_equal(loading.missing_keys, ["missing"], where=str(partial))
        load(checkpoint, {"x": torch.zeros(2)}, tmp_path / "ck", planner=loading)
        assert_equal(loading.missing_keys, [], where=f"{partial}: a load of what is there, by the same planner")
    for strict in ({}, {"strict": True}, {"allow_partial_load": False}):
        with raises(MissingKeyError, where=str(strict)):
            load(checkpoint, {"q": torch.ones(1)}, tmp_path / "ck", planner=checkpoint.HuggingFaceLoadPlanner(**strict))
    with raises(ConfigError, mentions=["allow_partial_load"], where="both"):
        checkpoint.HuggingFaceLoadPlanner(allow_partial_load=True, strict=True)
    for backend in ("mmap", "pread"):
        found = checkpoint.load_file(tmp_path / "ck" / FILE, backend=backend)
        assert_same_tensors(found, flat, where=backend)
    with raises(ConfigError, mentions=["backend"], where="another backend"):
        checkpoint.load_file(tmp_path / "ck" / FILE, backend="io_uring")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(3).to_sparse()
    for value, kind in (({}, ValueError), (sparse, ValueError), (torch.empty(1, device="meta"), RuntimeError)):
        with raises(kind, where=str(kind)) as caught:
            checkpoint.save_file({"v": value}, tmp_path / "v.safetensors")
        assert_equal(isinstance(caught.error, TwinproofError), True, where="named")


def _placed(rank: Rank, path: str, options: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], tuple[Any, ...]]:
    """What the metadata of a save says of every item: its file, the offset of its tensor there, and its bytes."""
    state: dict[str, Any] = {
        "w": tiled(torch.rand(9, 4), [((0, 0), (5, 4)), ((5, 0), (4, 4))], rank.rank, 2),
        "n": torch.arange(3),
        "kept": torch.ones(2),
    }
    with rank.component("checkpoint").HuggingFaceStorageWriter(path, **options) as writer:
        found = dcp.save(state, storage_writer=writer)
    data = found.storage_data.items()
    return {(i.fqn, tuple(i.offset or ())): (s.relative_path, s.offset, s.length) for i, s in data}


@requirement(
    "CKPT-607",
    "The metadata that dcp.save returns MUST say on every rank, of every item of every rank, the file that holds it, "
    "the offset of its tensor there, and its bytes as they are stored.",
)
def test_metadata_of_a_save(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for name, options in {
        "files": {"fqn_to_index_mapping": {"w": 1, "n": 2, "kept": 2}},
        "cast": {"export_dtype": "bfloat16", "export_keep": ["kept"]},
        "shards": {"enable_consolidation": False},
    }.items():
        folder = tmp_path / name
        results = rank_pool.run(_placed, 2, str(folder), options)
        assert_equal(results[1], results[0], where=f"{name}: what the ranks are told")
        items = {("w", (0, 0)): 20, ("w", (5, 0)): 16, ("n", (0,)): 3, ("kept", (0,)): 2}
        assert_equal(sorted(results[0]), sorted(items), where=f"{name}: items")
        for (fqn, offsets), (file, offset, size_bytes) in results[0].items():
            where = f"{name}: {fqn} at {offsets}"
            assert_equal((folder / file).is_file(), True, where=f"{where}: {file!r} is a file")
            content = (folder / file).read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            entry = json.loads(content[8:start])[fqn]
            begin, end = entry["data_offsets"]
            width = (end - begin) // math.prod(entry["shape"])
            assert_equal((offset, size_bytes), (start + begin, items[fqn, offsets] * width), where=where)


@requirement(
    "CKPT-678",
    "Every named error MUST say what was got, None included, what was expected and where, as text in this order and as "
    "attributes, not be made without one of them, be the error of Python's that its place asks for, and come out of a "
    "pickle as it was, errno included.",
)
def test_errors(checkpoint: Any) -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        full: dict[str, Any] = {"got": [1], "expected": "two", "where": ("a", 3)}
        for absent in full:
            with raises(TypeError, mentions=(f"{absent!r}",), where=f"{name} without {absent}"):
                kind("what is wrong", **{key: value for key, value in full.items() if key != absent})
        for said in (full, {"got": None, "expected": 0, "where": "here"}, {"got": 0, "expected": None, "where": "a"}):
            where, error = f"{name}, {said}", kind("what is wrong", **said)
            text = "; ".join(["what is wrong", *(f"{key}: {value}" for key, value in said.items())])
            for each in (error, pickle.loads(pickle.dumps(error))):
                assert_equal(type(each), kind, where=where)
                assert_equal(str(each), text, where=where)
                for key in ("got", "expected", "where"):
                    assert_equal(getattr(each, key), said[key], where=f"{key} of {where}")
                assert_equal(each.message, "what is wrong", where=where)
    refused = storage_error(OSError(errno.ENOSPC, "No space left on device"), "cannot write", "a file")
    for each in (refused, pickle.loads(pickle.dumps(refused))):
        found = (each.errno, each.strerror, each.filename)
        assert_equal(found, (errno.ENOSPC, refused.strerror, refused.filename), where="what the system said")
    known = {
        "ConfigError": ValueError,
        "MissingKeyError": KeyError,
        "StorageError": OSError,
        "IdRangeError": IndexError,
    }
    for name, base in known.items():
        assert_equal(issubclass(getattr(errors, name), base), True, where=f"{name} is a {base.__name__}")


def _sent(rank: Rank, path: str) -> None:
    group = dist.new_group(backend="gloo")
    # A rank that ended the group while another still connects to it would fail the other.
    dist.barrier(group)
    kind = rank.component("checkpoint").HuggingFaceStorageWriter
    # Not every package takes a group; one that it made itself does not travel either.
    given = {"process_group": group} if "process_group" in inspect.signature(kind).parameters else {}
    with kind(path, **given) as writer:
        with succeeds("pickling", where="a writer of two ranks"):
            sent = pickle.loads(pickle.dumps(writer))
        facts = (getattr(sent, "group", None), str(sent.path), getattr(writer, "group", group) is not None)
        assert_equal(facts, (None, str(writer.path), True), where="the group, the path, and the group that stayed")
    dist.destroy_process_group(group)


@requirement(
    "CKPT-821",
    "A writer of a group MUST travel to another process without its group, which stays with the writer that was sent; "
    "torch's public name for files MUST be there on both sides, and what was found MUST be there when it is empty.",
)
def test_writers_that_travel(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_sent, 2, str(tmp_path / "ck"))
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "one", save_distributed=False)
    save(checkpoint, {"w": torch.ones(2)}, tmp_path / "full")
    reader = checkpoint.HuggingFaceStorageReader(tmp_path / "full")
    files = [type(side.fs).__name__ for side in (writer, reader)]
    assert_equal(files, ["FileSystem", "FileSystem"], where="fs")
    save(checkpoint, {}, tmp_path / "none")
    empty = checkpoint.HuggingFaceStorageReader(tmp_path / "none").storage_data
    assert_equal((len(empty), bool(empty)), (0, True), where="what was found of nothing")
