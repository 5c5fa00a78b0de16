"""What a manager hands on: the options of the HF writer, beside what an adapter says."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.cases import FILE, INDEX, save
from conformance.checkpoint.trainer import Counter, Fused, Renamed, Split, Trainer, alone, load
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensors, raises, requirement, succeeds
from twinproof.checkpoint import manager as manager_module
from twinproof.errors import ConfigError, CorruptionError, MissingCheckpointError, MissingKeyError, PlanError

# One process saves here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _options_of(names: list[str]) -> dict[str, dict[str, Any]]:
    """Ways to ask for other files, by name, for tensors of these names."""
    return {
        "nothing": {},
        "one file": {"single_file": True},
        "a size": {"max_shard_size": 300},
        "a mapping": {"fqn_to_index_mapping": {name: 1 + number % 3 for number, name in enumerate(names)}},
        "one file, pages": {"single_file": True, "page_align": True, "metadata": {"run": "7"}},
        "a size, checksums": {"max_shard_size": "1KB", "checksums": True, "thread_count": 2},
        "blocks": {"block_bytes": 64, "write_mode": "sequential", "check_replicas": True},
        "shards": {"enable_consolidation": False},
    }


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@requirement(
    "CKPT-621",
    "An HF save of a manager with hf_options MUST be, byte for byte, what the writer makes with them of what the "
    "adapter gives; the adapter's mapping MUST count where no option says how files are cut, and only there.",
)
@pytest.mark.parametrize(
    "adapter", [None, Renamed, Fused, Split], ids=lambda kind: kind.__name__.lower() if kind else "none"
)
def test_hf_options(checkpoint: Any, tmp_path: Path, adapter: Any) -> None:
    made, trainer = adapter() if adapter is not None else None, Trainer(1)
    state = trainer.weights() if made is None else made.to_hf(trainer.weights())
    for name, options in _options_of(sorted(state)).items():
        given = {"last_save_in_hf": True, "state_dict_adapter": made, "hf_options": options}
        manages = succeeds("a save", where=f"hf_options: {name}")
        with alone(), manages, trainer.manager(checkpoint, tmp_path / name, **given) as manager:
            manager.save(1, last_step=True)
        own = getattr(made, "fqn_to_index_mapping", None)
        says = {"single_file", "max_shard_size", "fqn_to_index_mapping"} & options.keys()
        expected = {**options, "fqn_to_index_mapping": own} if own is not None and not says else options
        save(checkpoint, state, tmp_path / f"{name}, by the writer", durable=False, **expected)
        found, wanted = _files(tmp_path / name / "step-1"), _files(tmp_path / f"{name}, by the writer")
        assert_equal(sorted(found), sorted(wanted), where=f"files with {name}")
        assert_equal([file for file in found if found[file] != wanted[file]], [], where=f"files that differ, {name}")


@requirement(
    "CKPT-623",
    "A folder that is named as no manager names one, with zeros before its number or other digits, MUST be no "
    "checkpoint of it: neither loaded nor counted nor deleted.",
)
def test_names_of_folders(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with alone(), Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=2) as manager:
        for step in (1, 2):
            manager.save(step)
    strange = ["step-07", "step-\u0663", "step-+3", "Step-4"]
    for name in strange:
        shutil.copytree(folder / "step-2", folder / name)
    fresh = Trainer(2)
    with fresh.manager(checkpoint, folder, interval=1, keep_latest_k=2) as manager:
        with succeeds("a load", where="beside folders of other names"):
            assert_equal(load(manager), True, where="loaded")
        with raises(MissingCheckpointError, mentions=["7", "1, 2"], where="a step that is none"):
            load(manager, 7)
        with alone():
            manager.save(3)
    left = sorted(path.name for path in folder.iterdir())
    assert_equal(left, sorted(["step-2", "step-3", *strange]), where="what is left after retention")


@requirement(
    "CKPT-634",
    "A file, a link to nothing or to a file, a pipe and an empty folder that are named as checkpoints MUST be none: "
    "loads, saves and retention pass them over and leave them alone.",
)
def test_no_folders(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step-7").write_text("a note")
    (folder / "step-8").symlink_to("nothing")
    (folder / "step-9").symlink_to("step-7")
    os.mkfifo(folder / "step-10")
    (folder / "step-11").mkdir()
    strange = sorted(path.name for path in folder.iterdir())
    with Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=1) as manager:
        with succeeds("a load", where="beside what is no checkpoint"):
            assert_equal(load(manager), False, where="loaded")
        with alone(), succeeds("a save", where="beside what is no checkpoint"):
            for step in (1, 2):
                manager.save(step)
        with raises(MissingCheckpointError, mentions=["got: 7", "2]"], where="a step that is none"):
            load(manager, 7)
        with succeeds("a load", where="beside what is no checkpoint"):
            assert_equal(load(manager), True, where="loaded")
    left = sorted(path.name for path in folder.iterdir())
    assert_equal(left, sorted(["step-2", *strange]), where="what is left after retention")


class _Reads:
    """An adapter that changes nothing, and brings readers of a kind."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(state_dict)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(hf_state_dict)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return self.make(path)


@requirement(
    "CKPT-683",
    "A manager that verifies MUST compare checksums with the reader of an adapter too, and MUST refuse by name one "
    "that compares none.",
)
def test_readers_of_adapters(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)
    save(checkpoint, trainer.weights(), tmp_path / "hf", checksums=True)
    own = _Reads(lambda path: checkpoint.HuggingFaceStorageReader(path, cast=True))
    options = {"initial_load_path": tmp_path / "hf", "initial_load_in_hf": True}

    def loaded(name: str, adapter: Any, **rest: Any) -> bool:
        with Trainer(2).manager(checkpoint, tmp_path / name, state_dict_adapter=adapter, **options, **rest) as manager:
            return bool(load(manager))

    others = _Reads(dcp.HuggingFaceStorageReader)
    assert_equal(loaded("right", own, verify_checksums=True), True, where="bytes that agree")
    assert_equal(loaded("torch's", others), True, where="a reader of torch's that is to compare nothing")
    with raises(ConfigError, mentions=["verify_checksums", "adapter"], where="a reader of torch's"):
        loaded("torch's, compared", others, verify_checksums=True)
    file = tmp_path / "hf" / FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert_equal(loaded("not compared", own), True, where="a flipped bit, not compared")
    with raises(CorruptionError, mentions=["checksums"], where="a flipped bit"):
        loaded("wrong", own, verify_checksums=True)


@requirement(
    "CKPT-721",
    "A load MUST delete no checkpoint, neither by a manager that only loads nor by one that keeps fewer than there "
    "are; the first save is what does.",
)
@pytest.mark.parametrize("load_only", [True, False])
def test_loads_delete_nothing(checkpoint: Any, tmp_path: Path, load_only: bool) -> None:
    folder, every = tmp_path / "run", [f"step-{step}" for step in range(1, 5)]
    with alone(), Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=0) as manager:
        for step in range(1, 5):
            manager.save(step)
    options: dict[str, Any] = {"load_only": True} if load_only else {"interval": 1, "keep_latest_k": 2}
    for step in (1, -1, 2):
        with alone(), Trainer(2).manager(checkpoint, folder, **options) as manager:
            manager.load(step)
        assert_equal(sorted(os.listdir(folder)), every, where=f"behind a load of {step}")
    if not load_only:
        with alone(), Trainer(2).manager(checkpoint, folder, **options) as manager:
            manager.load(1)
            manager.save(5)
        assert_equal(sorted(os.listdir(folder)), ["step-4", "step-5"], where="behind a save")


@requirement(
    "CKPT-722",
    "Options that are collections MUST be taken as they are when they are given: what the caller changes in them later "
    "changes no file, of a writer or of a manager.",
)
@pytest.mark.parametrize("who", ["writer", "manager"])
def test_options_changed_later(checkpoint: Any, tmp_path: Path, who: str) -> None:
    trainer = Trainer(1)
    state, found = trainer.weights(), []
    for changed in (False, True):
        mapping = {name: 1 + number % 2 for number, name in enumerate(sorted(state))}
        kept, metadata = [sorted(state)[0]], {"run": "7"}
        options = {"fqn_to_index_mapping": mapping, "export_keep": kept, "metadata": metadata}
        folder = tmp_path / f"{who} {changed}"
        if who == "writer":
            maker = checkpoint.HuggingFaceStorageWriter(folder, export_dtype="bfloat16", durable=False, **options)
        else:
            given = {"last_save_in_hf": True, "export_dtype": "bfloat16", "export_keep": kept}
            of_files: dict[str, Any] = {"fqn_to_index_mapping": mapping, "metadata": metadata}
            maker = trainer.manager(checkpoint, folder, hf_options=of_files, **given)
        if changed:
            mapping.update(dict.fromkeys(mapping, 1))
            kept.append(sorted(state)[1])
            metadata["run"] = "8"
            if who == "manager":
                of_files["single_file"] = of_files.pop("fqn_to_index_mapping") is not None
        with alone(), maker:
            if who == "writer":
                dcp.save(dict(state), storage_writer=maker)
            else:
                maker.save(1, last_step=True)
        found.append(_files(folder if who == "writer" else folder / "step-1"))
    assert_equal(sorted(found[1]), sorted(found[0]), where="names of files")
    for name, data in found[0].items():
        assert_same_bytes(found[1][name], data, where=name)


@requirement(
    "CKPT-765",
    "A manager that is not enabled MUST neither load nor save, the last step included, and MUST make nothing; it is "
    "opened and closed as any other.",
)
def test_not_enabled(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with alone(), Trainer(1).manager(checkpoint, folder, interval=1) as manager:
        manager.save(2)
    content, trainer = _files(folder / "step-2"), Trainer(2)
    before = trainer.weights()
    for where in (folder, tmp_path / "absent"):
        off = trainer.manager(checkpoint, where, interval=1, keep_latest_k=1, enable=False)
        with alone(), off as manager, succeeds("what is asked of it", where=where.name):
            saved = [manager.save(3), manager.save(4, last_step=True)]
            loaded = [manager.load(), manager.load(2), manager.load(9)]
            manager.maybe_wait_for_saving()
        assert_equal((saved, loaded), ([False] * 2, [False] * 3), where=f"answers in {where.name}")
    assert_same_tensors(trainer.weights(), before, where="weights")
    assert_equal([path.name for path in tmp_path.rglob("step-*")], ["step-2"], where="checkpoints")
    assert_equal((_files(folder / "step-2") == content, (tmp_path / "absent").exists()), (True, False), where="files")


@requirement(
    "CKPT-766",
    "Steps that are no whole numbers from 0, states that are named as parameters, to save_training also as what it "
    "names itself, and pinned memory without an accelerator MUST be refused by name, and nothing be made or loaded; "
    "two names of one option may agree.",
)
def test_refused_by_managers(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(1)
    with alone(), trainer.manager(checkpoint, tmp_path / "run", interval=1) as manager:
        for step in ("3", True, 3.0, None, -1, torch.tensor(3)):
            with raises(ConfigError, mentions=("not a step", "curr_step"), where=f"step {step!r}"):
                manager.save(step)
    assert_equal(sorted(tmp_path.rglob("step-*")), [], where="what was made")
    with alone(), trainer.manager(checkpoint, tmp_path / "good", interval=1) as manager:
        manager.save(2)
    late = Trainer(2)
    before = late.weights()
    taken = {**late.states, "0.weight": Counter()}
    with alone(), late.manager(checkpoint, tmp_path / "good", interval=1, states=taken) as manager:
        for verb in (lambda: manager.save(3), manager.load):
            with raises(PlanError, mentions=("name of a parameter", "0.weight"), where="a name of both"):
                verb()
    for name in ("0.weight", "optimizer", "train_state"):
        with raises(PlanError, mentions=(f"['{name}']", "where: states"), where=f"save_training, {name}"):
            checkpoint.save_training(tmp_path / "one", late.model, late.optimizer, 1, states={name: Counter()})
    assert_equal((tmp_path / "one").exists(), False, where="what save_training made")
    assert_same_tensors(late.weights(), before, where="weights")
    assert_equal(sorted(path.name for path in tmp_path.rglob("step-*")), ["step-2"], where="what is there")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with raises(ConfigError, mentions=("accelerator", "async_mode"), where="no accelerator"):
        trainer.manager(checkpoint, tmp_path / "good", async_mode="async_with_pinned_mem")
    for both in (
        {"last_save_in_hf": True, "last_save_in_safetensors_format": True},
        {"last_save_model_only": False, "last_save_model_weights_only": False},
    ):
        with (
            succeeds("two names that agree", where=str(both)),
            trainer.manager(checkpoint, tmp_path, **both) as manager,
        ):
            found = {name: getattr(manager.policy, name) for name in both if hasattr(manager.policy, name)}
        assert_equal(found, {next(iter(both)): next(iter(both.values()))}, where=str(both))


# Each newer name of an option, its older one, and options that are taken, or refused, with either value of it.
_OLDER_NAMES: dict[tuple[str, str], dict[bool, tuple[dict[str, Any], ...]]] = {
    ("last_save_in_hf", "last_save_in_safetensors_format"): {
        True: (
            {"hf_options": {"max_shard_size": "1GB"}},
            {"hf_options": {"single_file": True, "checksums": True}},
            {"hf_options": {"nothing of the writer": 1}},
            {"export_dtype": "bfloat16"},
            {"last_save_model_only": False},
            {"load_only": True},
        ),
        False: (
            {"hf_options": {"max_shard_size": "1GB"}},
            {"last_save_model_only": False},
            {"export_dtype": "float16"},
        ),
    },
    ("last_save_model_only", "last_save_model_weights_only"): {
        True: ({"last_save_in_hf": True, "hf_options": {"page_align": True}}, {"export_dtype": "bfloat16"}),
        False: (
            {"last_save_in_hf": True},
            {"last_save_in_safetensors_format": True},
            {"export_dtype": "bfloat16"},
            {"enable_first_step_checkpoint": True},
        ),
    },
}


def _outcome(checkpoint: Any, folder: Path, options: dict[str, Any]) -> Any:
    """The files of a last save by a manager with these options, HF ones with their sums; or why it is refused."""
    try:
        with Trainer(1).manager(checkpoint, folder, **options) as manager:
            manager.save(3, last_step=True)
    except ConfigError as error:
        return "refused", *error.args
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return there, {path.name: zlib.crc32(path.read_bytes()) for path in folder.glob("step-3/model*")}


@requirement(
    "CKPT-801",
    "An option of a manager by its older name MUST do what its newer name does, beside each option that depends on it: "
    "the same files, or the same refusal.",
)
def test_older_names(checkpoint: Any, tmp_path: Path) -> None:
    count = 0
    for names, cases in _OLDER_NAMES.items():
        for value, beside in cases.items():
            for options in ({}, *beside):
                found = []
                for name in names:
                    folder = tmp_path / f"{count}" / "run"
                    with alone():
                        found.append(_outcome(checkpoint, folder, {name: value, **options}))
                    count += 1
                assert_equal(found[1], found[0], where=f"{names[1]}={value} with {options}")


class _Extra(torch.nn.Linear):
    """A layer with a state that is no tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


@requirement(
    "CKPT-767",
    "A manager MUST save and restore an optimizer that is none of torch's by what it says of itself, and what a model "
    "has beside tensors, a last save of the model alone and its dtype included.",
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_states_of_another_kind(checkpoint: Any, tmp_path: Path, dtype: str | None) -> None:
    first, late = _Extra([1, "a", None]), _Extra(0)
    with torch.no_grad():
        for value in first.parameters():
            value.copy_(value.bfloat16())
    optimizers = Counter(), Counter()
    optimizers[0].step = 7
    make = checkpoint.CheckpointManager
    with alone(), succeeds("saves and loads", where="an optimizer of another kind"):
        with make(tmp_path / "run", model=first, optimizers=optimizers[0], interval=1) as manager:
            manager.save(1)
        with make(tmp_path / "run", model=late, optimizers=optimizers[1], interval=1) as manager:
            manager.load()
    assert_equal((optimizers[1].step, late.extra), (7, [1, "a", None]), where="restored")
    last, start = tmp_path / "last", {"initial_load_path": tmp_path / "last" / "step-2"}
    late = _Extra(0)
    with alone(), succeeds("saves and loads", where="the model alone"):
        with make(last, model=first, interval=1, export_dtype=dtype) as manager:
            manager.save(2, last_step=True)
        with make(tmp_path / "new", model=late.to(torch.bfloat16) if dtype else late, interval=1, **start) as manager:
            manager.load()
    assert_equal(late.extra, [1, "a", None], where="restored of the model alone")
    wanted, found = ({n: v.detach() for n, v in model.named_parameters()} for model in (first, late))
    assert_same_tensors(found, {n: v.bfloat16() if dtype else v for n, v in wanted.items()}, where="weights")


def _break(folder: Path, step: int, content: dict[str, str]) -> None:
    (folder / f"step-{step}").mkdir(parents=True)
    for name, text in content.items():
        (folder / f"step-{step}" / name).write_text(text)


@requirement(
    "CKPT-768",
    "A checkpoint whose index names a file that is missing MUST be passed over and logged, by loads and by retention; "
    "what retention cannot look at, hide or delete MUST be logged, and fail no save, nor keep others from deletion.",
)
def test_retention_beside_what_is_broken(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    folder, trainer, late = tmp_path / "run", Trainer(1), Trainer(2)
    options: dict[str, Any] = {"interval": 1, "keep_latest_k": 1}
    _break(folder, 9, {INDEX: json.dumps({"weight_map": {"w": FILE}})})
    hidden = folder / ".step-7.deleting-0123456789ab"
    hidden.write_text("no folder")
    with alone(), trainer.manager(checkpoint, folder, **options) as manager:
        for step in (1, 2):
            trainer.step()
            manager.save(step)
    left = sorted(os.listdir(folder))
    assert_equal(left, sorted([hidden.name, "step-2", "step-9"]), where="beside an index without its file")
    assert_equal(f"{hidden} could not be deleted" in caplog.text, True, where="what is no folder is logged")
    with late.manager(checkpoint, folder, **options) as manager, succeeds("a load", where="the newest whole one"):
        assert_equal(load(manager), True, where="loaded")
        with raises(MissingCheckpointError, mentions=("9",), where="the broken one"):
            load(manager, 9)
    assert_equal(late.counter.step, 2, where="the newest whole one")
    assert_equal("step-9 is no complete checkpoint" in caplog.text, True, where="what is broken is logged")
    seen = manager_module.is_whole

    def one_goes(path: Path, *rest: Any) -> Any:
        found = seen(path, *rest)
        shutil.rmtree(folder / "step-2", ignore_errors=True)
        return found

    monkeypatch.setattr(manager_module, "is_whole", one_goes)
    with alone(), trainer.manager(checkpoint, folder, **options) as manager:
        _copy_step(folder, 2, 3)
        manager.save(4)
    monkeypatch.undo()
    assert_equal(sorted(os.listdir(folder)), sorted([hidden.name, "step-4", "step-9"]), where="where one has gone")
    assert_equal("step-2 could not be deleted" in caplog.text, True, where="what has gone is logged")
    _break(folder, 6, {INDEX: "{}", ".metadata": ""})
    with alone(), trainer.manager(checkpoint, folder, **options) as manager, succeeds("a save", where="beside both"):
        manager.save(5)
    assert_equal("could not be looked at" in caplog.text, True, where="two formats are logged")
    assert_equal({"step-4", "step-5", "step-6"} <= set(os.listdir(folder)), True, where="nothing is deleted then")


def _copy_step(folder: Path, step: int, other: int) -> None:
    shutil.copytree(folder / f"step-{step}", folder / f"step-{other}")


@requirement(
    "CKPT-811",
    "What is no collection of names, as text whose letters would be names, MUST be refused by name where states to "
    "leave alone are meant, and what is no module where the model or a part of it is.",
)
def test_names_and_modules(checkpoint: Any, tmp_path: Path) -> None:
    trainer, linear = Trainer(1), torch.nn.Linear(1, 1)
    names: tuple[Any, ...] = ("", "dataloader", b"", iter(["dataloader"]), 3, None, [b"dataloader"], ["dataloader", 1])
    for given in names:
        with raises(ConfigError, mentions=("not names", "exclude_from_loading"), where=f"names {given!r}"):
            trainer.manager(checkpoint, tmp_path / "run", exclude_from_loading=given)
    models: tuple[Any, ...] = ("", "linear", b"l", None, 3, [linear, "linear"], {"linear": linear}, [[linear]])
    for given in models:
        with raises(ConfigError, mentions=("not a model", "where: model"), where=f"a model {given!r}"):
            checkpoint.CheckpointManager(tmp_path / "run", model=given, interval=1)
    for given in (["dataloader"], ("dataloader",), {"dataloader"}, {"dataloader": 1}.keys()):
        with trainer.manager(checkpoint, tmp_path / "run", exclude_from_loading=given) as manager:
            assert_equal(manager.policy.exclude_from_loading, ("dataloader",), where=f"names {given!r}")
    for given in (linear, [linear], (each for each in [linear]), torch.nn.Sequential(linear)):
        with succeeds("a manager", where=f"a model {given!r}"):
            checkpoint.CheckpointManager(tmp_path / "run", model=given, interval=1).close()
    assert_equal((tmp_path / "run").exists(), False, where="what was made")


@requirement(
    "CKPT-837",
    "Where no state is a scheduler, a manager MUST take the optimizer alone as what a load leaves alone.",
)
def test_optimizers_without_schedulers(checkpoint: Any, tmp_path: Path) -> None:
    trainer, fresh = Trainer(1), Trainer(2)
    trainer.step()
    with alone(), trainer.manager(checkpoint, tmp_path / "run", states={}, interval=1) as manager:
        manager.save(1)
    with succeeds("a manager", where="without a scheduler"):
        manager = fresh.manager(checkpoint, tmp_path / "run", states={}, exclude_from_loading=["optimizer"])
    with manager:
        assert_equal(load(manager), True, where="a load")
    assert_same_tensors(fresh.weights(), trainer.weights(), where="weights")
    assert_equal(len(fresh.optimizer.state), 0, where="states of the optimizer")


@requirement(
    "CKPT-838",
    "What is no step MUST be refused by name by a manager's load, as True, 1.0 and text are, whatever was saved.",
)
def test_steps_to_load(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)
    with alone(), trainer.manager(checkpoint, tmp_path / "run", interval=1) as manager:
        manager.save(1)
        for given in (True, 1.0, "1", None, torch.tensor(1)):
            with raises(ConfigError, mentions=("not a step", f"got: {given}", "where: step"), where=f"step {given!r}"):
                manager.load(given)
        for step in (1, -1):
            assert_equal(manager.load(step), True, where=f"step {step}")


class _Adapts:
    """An adapter whose ways are these functions."""

    def __init__(self, to_hf: Any = dict, from_hf: Any = dict) -> None:
        self.to_hf, self.from_hf = to_hf, from_hf


@requirement(
    "CKPT-864",
    "What is no adapter, a class and what maps one way among it, MUST be refused by name when a manager is made, and "
    "not at the last save; so MUST be, when it is given, what one gives that is no state, or lacks names of the model.",
)
def test_adapters_that_are_none(checkpoint: Any, tmp_path: Path) -> None:
    trainer, fresh = Trainer(1), Trainer(2)
    one_way = _Adapts()
    del one_way.from_hf
    for given in (Renamed, one_way, object(), {"to_hf": dict, "from_hf": dict}, 0, False):
        with raises(ConfigError, mentions=("not an adapter", "where: state_dict_adapter"), where=f"{given!r}"):
            trainer.manager(checkpoint, tmp_path / "run", state_dict_adapter=given)
    folder, in_hf = tmp_path / "hf", {"last_save_in_hf": True}
    refused = raises(ConfigError, mentions=("state_dict_adapter.to_hf", "got: list"), where="a list to be saved")
    with trainer.manager(checkpoint, folder, state_dict_adapter=_Adapts(to_hf=list), **in_hf) as manager, refused:
        manager.save(1, last_step=True)
    assert_equal(list(folder.glob("*")), [], where="what a save left that was refused")
    save(checkpoint, trainer.weights(), tmp_path / "start")
    name = sorted(fresh.weights())[-1]

    def without(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != name}

    ways: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "state_dict_adapter.to_hf", _Adapts(to_hf=list)),
        (ConfigError, "state_dict_adapter.from_hf", _Adapts(from_hf=list)),
        (MissingKeyError, "state_dict_adapter.from_hf", _Adapts(from_hf=without)),
    ]
    for kind, where, adapter in ways:
        options = {"initial_load_path": tmp_path / "start", "state_dict_adapter": adapter}
        refused = raises(kind, mentions=(f"where: {where}", "got: "), where=where)
        with fresh.manager(checkpoint, tmp_path / "fresh", **options) as manager, refused:
            load(manager)


@requirement(
    "CKPT-987",
    "A model-only last save MUST hold each entry of the model in its own shape and with its own values, also where "
    "several have no elements, or begin at one address, in the dtype that is asked for.",
)
@pytest.mark.parametrize("in_hf", [False, True])
@pytest.mark.parametrize("export", [None, "bfloat16"])
def test_entries_at_one_address(checkpoint: Any, tmp_path: Path, export: str | None, in_hf: bool) -> None:
    trainer, whole = Trainer(1), torch.arange(12.0).reshape(4, 3)
    parts = {
        "keys": torch.empty(0, 8),
        "values": torch.empty(0, 16),
        "all": whole,
        "rows": whole[:2],
        "turned": whole.t(),
    }
    for name, part in parts.items():
        trainer.model.register_buffer(name, part)
    options = {"export_dtype": export, "last_save_in_hf": in_hf, "last_save_model_only": True}
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        trainer.train(manager, until=3)
    dtype = torch.float32 if export is None else torch.bfloat16
    expected = {name: value.to(dtype) for name, value in trainer.weights().items()}
    reader = (checkpoint.HuggingFaceStorageReader if in_hf else dcp.FileSystemReader)(tmp_path / "run" / "step-3")
    stored: Any = reader.read_metadata().state_dict_metadata
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    assert_equal({name: tuple(stored[name].size) for name in stored}, shapes, where="stored shapes")
    targets = {name: torch.empty(value.shape, dtype=dtype) for name, value in expected.items()}
    with succeeds("a load", where="of what the last save holds"):
        dcp.load(targets, storage_reader=reader, no_dist=True)
    assert_same_tensors(targets, expected, where="what was saved")


@requirement(
    "CKPT-988",
    "A load that would take a last save of the model alone MUST be refused with the newest whole step that holds all, "
    "where there is one; a load of that step MUST restore everything.",
)
def test_steps_beside_a_last_save(checkpoint: Any, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", {"interval": 1, "last_save_in_hf": True, "keep_latest_k": 0}
    with alone(), Trainer(1).manager(checkpoint, folder, **options) as manager:
        manager.save(4, last_step=True)
    told = ("model alone", "expected: it as initial_load_path")
    with (
        Trainer(2).manager(checkpoint, folder, **options) as manager,
        raises(ConfigError, mentions=told, where="nothing else is there"),
    ):
        load(manager)
    trainer = Trainer(1)
    with alone(), trainer.manager(checkpoint, folder, **options) as manager:
        for step in (1, 2, 3):
            trainer.step()
            manager.save(step)
    os.unlink(folder / "step-3" / "__0_0.distcp")
    late = Trainer(2)
    with late.manager(checkpoint, folder, **options) as manager:
        with raises(ConfigError, mentions=("model alone", "load(step=2), the newest"), where="the newest is the last"):
            load(manager)
        assert_equal(load(manager, 2), True, where="the step that is named")
    assert_equal(late.counter.step, 2, where="what was restored")
