"""Paths that are none, and an asynchronous save over the group that training uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from conformance.checkpoint.cases import assert_loads
from conformance.harness import Rank, assert_equal, assert_flags_are_no_text, raises, requirement
from twinproof.errors import ConfigError


def _takers(checkpoint: Any, path: Any) -> list[Callable[[], Any]]:
    """Whatever takes a path, with this one."""
    model = torch.nn.Linear(2, 2)
    return [
        lambda: checkpoint.HuggingFaceStorageWriter(path),
        lambda: checkpoint.HuggingFaceStorageReader(path),
        lambda: checkpoint.CheckpointManager(path, model=model, interval=1),
        lambda: checkpoint.save_file({}, path),
        lambda: checkpoint.load_file(path),
        lambda: checkpoint.detect_format(path),
    ]


@requirement("CKPT-542", "What is no path MUST be refused with what it was, by writer, reader, manager, single files.")
@pytest.mark.parametrize("path", [7, None, b"ck", ["ck"]])
def test_paths(checkpoint: Any, path: Any) -> None:
    for take in _takers(checkpoint, path):
        with raises(ConfigError, mentions=("not a path", repr(path), "a str or a Path")):
            take()


@requirement(
    "CKPT-960",
    "A path with a NUL, which no file has, MUST be refused with what it was, by writer, reader, manager, single files "
    "and a merge; Python would say that a byte is embedded, and not in what.",
)
def test_paths_with_a_nul(checkpoint: Any, tmp_path: Path) -> None:
    for path in (f"{tmp_path}/a\0b", Path(f"{tmp_path}/a\0b")):
        merge = checkpoint.consolidate_safetensors_files
        merges: list[Callable[[], Any]] = [partial(merge, path, tmp_path / "out"), partial(merge, tmp_path, path)]
        for number, take in enumerate([*_takers(checkpoint, path), *merges]):
            with raises(ConfigError, mentions=("NUL", "a\\x00b", "expected: no NUL"), where=f"{type(path)}, {number}"):
                take()
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")


def _save_on_default_group(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    own = dist.new_group(backend="gloo")
    state = {"w": torch.full((4,), 3.0)}
    with checkpoint.HuggingFaceStorageWriter(f"{path}/async", process_group=dist.group.WORLD) as writer:
        future: Any = dcp.async_save(dict(state), storage_writer=writer, process_group=own)
        with raises(ConfigError, mentions=("process_group", "new_group"), where="asynchronous"):
            getattr(future, "upload_completion", future).result()
    assert_equal(Path(f"{path}/async").exists(), False, where="nothing is written")
    with checkpoint.HuggingFaceStorageWriter(f"{path}/sync", process_group=dist.group.WORLD) as writer:
        dcp.save(dict(state), storage_writer=writer)
    with checkpoint.HuggingFaceStorageWriter(f"{path}/own", process_group=own) as writer:
        future = dcp.async_save(dict(state), storage_writer=writer, process_group=own)
        getattr(future, "upload_completion", future).result()
    dist.destroy_process_group(own)


@requirement(
    "CKPT-543",
    "An asynchronous save by a writer that was given the default group MUST be refused on every rank, before anything "
    "is exchanged; a save that is not asynchronous may use it.",
)
def test_training_group(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_on_default_group, 2, str(tmp_path))
    for name in ("sync", "own"):
        assert_loads(checkpoint, tmp_path / name, {"w": torch.full((4,), 3.0)})


@requirement(
    "CKPT-546",
    "Plans of several ranks MUST be refused by a writer that saves from one process, and by one whose group does not "
    "have just these ranks, with how many there are and how many it has.",
)
def test_plans_of_too_many(checkpoint: Any, tmp_path: Path) -> None:
    for rank_count in (2, 3):
        plans = [SavePlan([]) for _ in range(rank_count)]
        for options, said in (
            ({}, ("got: none", "process_group")),
            ({"save_distributed": False}, ("expected: 1 rank",)),
        ):
            writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", **options)
            with raises(ConfigError, mentions=(f"{rank_count} ranks", *said), where=f"{rank_count} ranks, {options}"):
                writer.prepare_global_plan(plans)


@requirement(
    "CKPT-679",
    "A flag of a writer, reader, planner, manager or save that is text MUST be refused by its name, "
    'before anything is written: "false" is true.',
)
def test_flags(checkpoint: Any, tmp_path: Path) -> None:
    model, folder = torch.nn.Linear(2, 2), tmp_path / "ck"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("HuggingFaceStorageWriter", "HuggingFaceStorageReader", "QuantizedHuggingFaceStorageReader"):
        kind = getattr(checkpoint, name)
        assert_flags_are_no_text(kind, partial(kind, folder), where=name)
    for name in ("HuggingFaceSavePlanner", "HuggingFaceLoadPlanner"):
        assert_flags_are_no_text(getattr(checkpoint, name), where=name)
    manager = checkpoint.CheckpointManager
    assert_flags_are_no_text(manager, partial(manager, folder, model=model, interval=1), where="CheckpointManager")
    with manager(folder, model=model, interval=1) as made:
        assert_flags_are_no_text(manager.save, partial(made.save, 1), where="save")
    save_file, save_training = checkpoint.save_file, checkpoint.save_training
    assert_flags_are_no_text(save_file, partial(save_file, {}, tmp_path / "file"), where="save_file")
    saved = partial(save_training, folder, model, optimizer, 1)
    assert_flags_are_no_text(save_training, saved, where="save_training")
    assert_equal(sorted(path.name for path in tmp_path.rglob("*") if path.is_file()), [], where="what was written")


@requirement(
    "CKPT-680",
    "Metadata, tensors of a file, numbers of files, tensors to keep and what is told of progress that are of another "
    "type MUST be refused by their name when they are given.",
)
def test_options(checkpoint: Any, tmp_path: Path) -> None:
    writer, reader = checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader
    consolidate = partial(checkpoint.consolidate_safetensors_files, tmp_path, tmp_path / "out")
    calls: dict[str, list[tuple[Callable[..., Any], list[Any]]]] = {
        "metadata": [
            (partial(writer, tmp_path / "ck"), ["pt", 7, ["pt"]]),
            (partial(checkpoint.save_file, {}, tmp_path / "file"), ["pt", 7, ["pt"]]),
        ],
        "tensors": [(lambda tensors: checkpoint.save_file(tensors, tmp_path / "file"), ["a", None, [torch.zeros(1)]])],
        "fqn_to_index_mapping": [(partial(writer, tmp_path / "ck"), ["a", 7, [1]]), (consolidate, ["a", 7, [1]])],
        "export_keep": [(partial(writer, tmp_path / "ck"), ["a", 7, None])],
        "progress": [(partial(writer, tmp_path / "ck"), ["a", 7]), (partial(reader, tmp_path / "ck"), ["a", 7])],
    }
    for name, cases in calls.items():
        for call, values in cases:
            for value in values:
                with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"{name}={value!r}"):
                    call(**{name: value})


@requirement(
    "CKPT-839",
    "Names and patterns that are no text, of a file mapping, of states and of tensors to keep, MUST be refused by the "
    "option's name when they are given; so is a model that is none, and a class in place of a state.",
)
def test_names(checkpoint: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, scheduler = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.lr_scheduler.LinearLR
    writer = partial(checkpoint.HuggingFaceStorageWriter, tmp_path / "ck", export_dtype="bfloat16")
    manager = partial(checkpoint.CheckpointManager, tmp_path / "run", model=model, interval=1)
    consolidate = partial(checkpoint.consolidate_safetensors_files, tmp_path, tmp_path / "out")
    save = partial(checkpoint.save_training, tmp_path / "step-1", model, optimizer, 1)
    calls: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        ("fqn_to_index_mapping", writer, {"fqn_to_index_mapping": {"a": 1, 3: 1}}),
        ("fqn_to_index_mapping", consolidate, {"fqn_to_index_mapping": {None: 1}}),
        ("export_keep", writer, {"export_keep": ["a", None]}),
        ("export_keep", manager, {"export_dtype": "bfloat16", "export_keep": [re.compile("a")]}),
        ("states", manager, {"states": {"a": model, 3: model}}),
        ("states", manager, {"states": {"a": scheduler}}),
        ("states", save, {"states": {3: model, "a": model}}),
        ("states", save, {"states": {"a": scheduler}}),
    ]
    for name, call, options in calls:
        with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"{options}"):
            call(**options)
    for given in (None, 5, model.parameters()):
        with raises(ConfigError, mentions=("not a model", "where: model"), where=f"{type(given).__name__} as a model"):
            checkpoint.save_training(tmp_path / "step-1", given, optimizer, 1)
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")
