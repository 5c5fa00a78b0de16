"""K. A trainer's policy: when it saves, in which format, what it loads, and what is kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from conformance.checkpoint.cases import DTYPES, INDEX, mesh_of, random_bits, save
from conformance.checkpoint.trainer import Fused, Renamed, Split, Trainer, alone, load
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import ConfigError, FormatError, MissingCheckpointError, TwinproofError

# One process saves and loads here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _steps(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: (len(name), name))


def _stager(*, is_async: bool) -> Any:
    """Torch's own stager, without the pinned memory that no machine without an accelerator has."""
    make: Any = DefaultStager
    return make(StagingOptions(False, False, use_async_staging=is_async, use_non_blocking_copy=False))


def _bits(losses: list[float]) -> list[str]:
    return [loss.hex() for loss in losses]


@requirement(
    "CKPT-430",
    "detect_format MUST say DCP for a folder with .metadata, HF for one with an index or safetensors files and for one "
    "such file, and MUST refuse both, neither, and an index whose files are missing.",
)
def test_detect_format(checkpoint: Any, tmp_path: Path) -> None:
    kinds = checkpoint.CheckpointFormat
    save(checkpoint, {"w": torch.ones(3)}, tmp_path / "hf")
    save(checkpoint, {"w": torch.ones(3)}, tmp_path / "single", single_file=True)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, kind in (
        ("hf", kinds.HF),
        ("single", kinds.HF),
        ("single/model.safetensors", kinds.HF),
        ("dcp", kinds.DCP),
    ):
        assert_equal(checkpoint.detect_format(tmp_path / name), kind, where=name)
    shutil.copytree(tmp_path / "dcp", tmp_path / "both")
    shutil.copytree(tmp_path / "hf", tmp_path / "both", dirs_exist_ok=True)
    (tmp_path / "neither").mkdir()
    (tmp_path / "neither" / "__0_0.distcp").touch()
    (tmp_path / "text.txt").touch()
    for name, said in (("both", "both"), ("neither", "neither"), ("text.txt", "text.txt")):
        with raises(FormatError, mentions=[said], where=name):
            checkpoint.detect_format(tmp_path / name)
    with raises(MissingCheckpointError, where="nothing"):
        checkpoint.detect_format(tmp_path / "nothing")
    next((tmp_path / "hf").glob("*.safetensors")).unlink()
    with raises(TwinproofError, mentions=["model-00001"], where="a missing file"):
        checkpoint.detect_format(tmp_path / "hf")


_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"interval": 0}, "interval"),
    ({"keep_latest_k": -1}, "keep_latest_k"),
    ({"keep_latest_k": True}, "keep_latest_k"),
    ({"async_mode": "threads"}, "async_mode"),
    ({"last_save_in_hf": True, "last_save_model_only": False}, "last_save_model_only"),
    ({"last_save_in_safetensors_format": True, "last_save_model_weights_only": False}, "last_save_model_only"),
    ({"last_save_in_hf": True, "last_save_in_safetensors_format": False}, "last_save_in_safetensors_format"),
    ({"last_save_model_only": False, "last_save_model_weights_only": True}, "last_save_model_weights_only"),
    ({"initial_load_in_hf": True, "initial_load_path": "x", "initial_load_model_only": False}, "model_only"),
    ({"initial_load_in_hf": True}, "initial_load_path"),
    ({"initial_load_model_only": False}, "initial_load_path"),
    ({"initial_load_path": "x", "initial_load_in_hf_quantized": True}, "initial_load_in_hf"),
    ({"export_dtype": "bfloat16", "last_save_model_only": False}, "export_dtype"),
    ({"export_dtype": "int8"}, "export_dtype"),
    ({"export_keep": ["*.bias"]}, "export_dtype"),
    ({"load_only": True, "enable_first_step_checkpoint": True}, "load_only"),
    ({"exclude_from_loading": ["model"]}, "model"),
    ({"exclude_from_loading": ["optimizer"]}, "lr_scheduler"),
    ({"exclude_from_loading": ["nobody"]}, "nobody"),
    ({"hf_options": {"max_shard_size": "5GB"}}, "last_save_in_hf"),
    ({"hf_options": {"max_shards": 3}, "last_save_in_hf": True}, "max_shards"),
    ({"hf_options": {"durable": False}, "last_save_in_hf": True}, "durable"),
    ({"hf_options": {"max_shard_size": "5 apples"}, "last_save_in_hf": True}, "max_shard_size"),
    ({"states": {"model": torch.nn.Linear(1, 1)}}, "model"),
    ({"states": {"rng": 3}}, "rng"),
    ({"stager": _stager(is_async=False)}, "stager"),
    ({"folder": "s3://bucket/run"}, "s3"),
]


@requirement(
    "CKPT-431",
    "A manager MUST refuse, at construction and by name, an option that it cannot honour or that has no effect.",
)
@pytest.mark.parametrize(("options", "said"), _REFUSED, ids=[str(number) for number in range(len(_REFUSED))])
def test_validation(checkpoint: Any, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    given = dict(options)
    folder = given.pop("folder", tmp_path / "run")
    with raises(ConfigError, mentions=[said], where=str(options)):
        Trainer(1).manager(checkpoint, folder, **given).close()
    assert_equal((tmp_path / "run").exists(), False, where="nothing is made")


@requirement(
    "CKPT-432",
    "Intermediate saves MUST be DCP and the last one HF, model alone, where asked for; a run that starts from that "
    "folder MUST have the losses, bit for bit, of one that starts from the same weights natively.",
)
def test_last_save_in_hf(checkpoint: Any, tmp_path: Path) -> None:
    first = Trainer(1)
    with first.manager(checkpoint, tmp_path / "run1", interval=5, last_save_in_safetensors_format=True) as manager:
        assert_equal(load(manager), False, where="a fresh start")
        first.train(manager, until=10)
    kinds = checkpoint.CheckpointFormat
    for step, kind in ((5, kinds.DCP), (10, kinds.HF)):
        assert_equal(checkpoint.detect_format(tmp_path / f"run1/step-{step}"), kind, where=f"step {step}")
    index = json.loads((tmp_path / "run1/step-10" / INDEX).read_text())
    assert_equal(sorted(index["weight_map"]), sorted(first.model.state_dict()), where="the model alone")
    native = Trainer(2)
    native.model.load_state_dict(first.weights())
    started = Trainer(3)
    losses: list[list[str]] = []
    for trainer, options in ((native, {}), (started, {"initial_load_path": tmp_path / "run1/step-10"})):
        with trainer.manager(checkpoint, tmp_path / f"run2-{len(losses)}", **options) as manager:
            assert_equal(load(manager), bool(options), where="whether something was loaded")
            assert_equal(trainer.counter.step, 0, where="steps of an initial load")
            losses.append(_bits(trainer.train(manager, until=6)))
    assert_equal(losses[1], losses[0], where="losses")


@requirement(
    "CKPT-433",
    "A run that is resumed from a native save MUST have the losses and weights, bit for bit, of one that never "
    "stopped: optimizer, scheduler, data loader and step come back.",
)
def test_resume(checkpoint: Any, tmp_path: Path) -> None:
    straight = Trainer(1)
    with straight.manager(checkpoint, tmp_path / "straight", last_save_model_only=False) as manager:
        losses = straight.train(manager, until=7)
    for stop, chosen in ((4, -1), (5, 2)):
        folder = tmp_path / f"stopped-{stop}"
        stopped = Trainer(1)
        with stopped.manager(checkpoint, folder, last_save_model_only=False) as manager:
            stopped.train(manager, until=stop)
        resumed = Trainer(9)
        with resumed.manager(checkpoint, folder, last_save_model_only=False) as manager:
            assert_equal(load(manager, chosen), True, where="loaded")
            begun = stop if chosen == -1 else chosen
            assert_equal(resumed.counter.step, begun, where="the step")
            assert_equal(_bits(resumed.train(manager, until=7)), _bits(losses[begun:]), where=f"losses after {begun}")
        assert_same_tensors(resumed.weights(), straight.weights(), where="weights")


def _sharded_run(rank: Rank, folder: str, until: int, options: dict[str, Any]) -> tuple[bool, list[str]]:
    trainer = Trainer(1, mesh_of(rank))
    with trainer.manager(rank.component("checkpoint"), folder, **options) as manager:
        loaded = load(manager)
        return loaded, _bits(trainer.train(manager, until=until))


@requirement(
    "CKPT-434",
    "A run whose model is sharded over ranks MUST be resumed on another number of ranks from its native save, and "
    "started there from its HF save, in every async mode: losses are those of one that never stopped.",
)
def test_sharded(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for mode in ("disabled", "async"):
        full = {"last_save_model_only": False, "async_mode": mode}
        # Every rank sees the same batches: a mean over two ranks is that of one, bit for bit.
        straight = rank_pool.run(_sharded_run, 1, str(tmp_path / f"{mode}-straight"), 6, full)[0][1]
        for before, after in ((2, 1), (1, 2)) if mode == "disabled" else ((2, 1),):
            folder = str(tmp_path / f"{mode}-{before}-{after}")
            rank_pool.run(_sharded_run, before, folder, 3, full)
            found = rank_pool.run(_sharded_run, after, folder, 6, full)
            assert_equal(found, [(True, straight[3:])] * after, where=f"{mode}: {before} ranks, then {after}")
        hf = {"last_save_in_hf": True, "async_mode": mode}
        rank_pool.run(_sharded_run, 2, str(tmp_path / f"{mode}-hf"), 3, hf)
        start = {"initial_load_path": str(tmp_path / f"{mode}-hf/step-3"), "last_save_model_only": False}
        losses = [rank_pool.run(_sharded_run, n, str(tmp_path / f"{mode}-from-{n}"), 3, start)[0] for n in (1, 2)]
        assert_equal(losses[1], losses[0], where=f"{mode}: started from HF on two ranks and on one")
        assert_equal(losses[0][0] and losses[0][1] != straight[:3], True, where="other weights than a fresh run's")


@requirement(
    "CKPT-435",
    "An HF checkpoint MUST never be loaded where more than the model was asked for, and nothing else be taken for HF.",
)
def test_hf_holds_the_model(checkpoint: Any, tmp_path: Path) -> None:
    first = Trainer(1)
    with first.manager(checkpoint, tmp_path / "run", last_save_in_hf=True) as manager:
        first.train(manager, until=2)
    hf = tmp_path / "run/step-2"
    with Trainer(2).manager(checkpoint, tmp_path / "run") as manager, raises(ConfigError, mentions=["step-2", "model"]):
        load(manager)
    whole = {"initial_load_path": hf, "initial_load_model_only": False}
    with Trainer(2).manager(checkpoint, tmp_path / "a", **whole) as manager, raises(ConfigError, mentions=["step-2"]):
        load(manager)
    second = Trainer(2)
    with second.manager(checkpoint, tmp_path / "b", last_save_model_only=False) as manager:
        second.train(manager, until=2)
    strict = {"initial_load_path": tmp_path / "b/step-2", "initial_load_in_hf": True}
    with Trainer(3).manager(checkpoint, tmp_path / "c", **strict) as manager, raises(ConfigError, mentions=["dcp"]):
        load(manager)
    # A model put in step-0 by hand is where a run begins.
    (tmp_path / "d").mkdir()
    shutil.copytree(hf, tmp_path / "d/step-0")
    seeded = Trainer(4)
    with seeded.manager(checkpoint, tmp_path / "d") as manager:
        assert_equal(load(manager), True, where="step-0")
    assert_same_tensors(seeded.weights(), first.weights(), where="weights of step-0")


@requirement(
    "CKPT-436",
    "A load MUST take the newest complete checkpoint of the folder, that of the step asked for, or else the initial "
    "one; an incomplete step is none; a missing one, and one of both formats, MUST be a named error.",
)
def test_what_is_loaded(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)
    with trainer.manager(checkpoint, tmp_path / "run", last_save_model_only=False) as manager:
        trainer.train(manager, until=4)
    (tmp_path / "run/step-6").mkdir()
    (tmp_path / "run/step-6/__0_0.distcp").write_bytes(b"\0" * 64)
    (tmp_path / "run/step-8x").mkdir()
    with Trainer(2).manager(checkpoint, tmp_path / "empty", last_save_model_only=False) as manager:
        Trainer(2).train(manager, until=2)
    other = Trainer(3)
    with other.manager(checkpoint, tmp_path / "run", initial_load_path=tmp_path / "empty/step-2") as manager:
        assert_equal(load(manager), True, where="loaded")
        assert_equal(other.counter.step, 4, where="the newest complete step, not the initial one")
        with raises(MissingCheckpointError, mentions=["6", "2, 4"], where="an incomplete step"):
            load(manager, 6)
    absent = other.manager(checkpoint, tmp_path / "new", initial_load_path=tmp_path / "absent")
    with absent as manager, raises(MissingCheckpointError, mentions=["absent"], where="an absent initial checkpoint"):
        load(manager)
    without = ["optimizer", "lr_scheduler", "dataloader"]
    fresh = Trainer(5)
    with fresh.manager(checkpoint, tmp_path / "run", exclude_from_loading=without) as manager:
        load(manager)
    assert_equal((fresh.counter.step, fresh.loader.given_count), (4, 0), where="what is excluded is left alone")
    assert_same_tensors(fresh.weights(), trainer.weights(), where="the model")
    (tmp_path / "run/step-6/.metadata").touch()
    save(checkpoint, {"w": torch.ones(2)}, tmp_path / "else")
    shutil.copytree(tmp_path / "else", tmp_path / "run/step-6", dirs_exist_ok=True)
    both = raises(FormatError, mentions=["step-6", "both"], where="both formats")
    with Trainer(6).manager(checkpoint, tmp_path / "run") as manager, both:
        load(manager)


@requirement("CKPT-707", "What a manager excludes from its loads it MUST save: one without the option restores it.")
def test_what_is_excluded_is_saved(checkpoint: Any, tmp_path: Path) -> None:
    trainer, later = Trainer(1), Trainer(2)
    without = ["optimizer", "lr_scheduler", "dataloader"]
    with trainer.manager(checkpoint, tmp_path, exclude_from_loading=without, last_save_model_only=False) as manager:
        trainer.train(manager, until=2)
    with later.manager(checkpoint, tmp_path) as manager, succeeds("a load", where="by another manager"):
        load(manager)
    assert_equal(later.loader.given_count, trainer.loader.given_count, where="batches that were given")


@requirement(
    "CKPT-437",
    "A manager MUST save at multiples of the interval, at the last step, after the first where asked for, and never "
    "with load_only or where it is not enabled; the answer of save says whether it did. A closed one MUST refuse.",
)
def test_when_it_saves(checkpoint: Any, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"interval": 3}, ["step-3", "step-5"]),
        ({"interval": 5}, ["step-5"]),
        ({"interval": 9, "enable_first_step_checkpoint": True}, ["step-1", "step-5"]),
        ({"interval": 1, "load_only": True}, []),
        ({"interval": 1, "enable": False}, []),
    ]
    for number, (options, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Trainer(1).manager(checkpoint, folder, **options) as manager:
            said = [f"step-{step}" for step in range(1, 6) if manager.save(step, last_step=step == 5)]
        assert_equal(said, expected, where=f"{options}: what save answered")
        assert_equal(_steps(folder), expected, where=f"{options}: what is there")
    with Trainer(1).manager(checkpoint, tmp_path / "zero", interval=2) as manager:
        assert_equal(manager.save(0), False, where="before the first step")
        assert_equal(manager.save(0, last_step=True), True, where="a seed checkpoint")
        with raises(ConfigError, mentions=["curr_step"]):
            manager.save(-1)
    verbs: tuple[Callable[[], Any], ...] = (lambda: manager.save(4), lambda: load(manager))
    for verb in verbs:
        with raises(ConfigError, mentions=["closed"], where="after close"):
            verb()


class _Broken:
    """A state that fails to be pickled, as a full disk would fail its write: after files were made."""

    def __init__(self) -> None:
        self.is_broken = False

    def __deepcopy__(self, memo: Any) -> _Broken:
        copied = _Broken()
        copied.is_broken = self.is_broken
        return copied

    def __reduce__(self) -> Any:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        return _Broken, ()

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""


@requirement(
    "CKPT-438",
    "A native save MUST appear whole and at one instant, also over another checkpoint of either format; a save that "
    "fails MUST leave what was there, and nothing else.",
)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_native_saves_are_whole(checkpoint: Any, tmp_path: Path, mode: str) -> None:
    broken, trainer = _Broken(), Trainer(1)
    options = {"states": {**trainer.states, "broken": broken}, "async_mode": mode}
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        trainer.train(manager, until=1)
        trainer.step()
        manager.save(2)
        manager.maybe_wait_for_saving()
        before = {path.name: path.read_bytes() for path in (tmp_path / "run/step-2").iterdir()}
        broken.is_broken = True
        with raises(BaseException, mentions=["No space left"], where=mode):
            manager.save(2)
            manager.maybe_wait_for_saving()
        assert_equal(_steps(tmp_path / "run"), ["step-1", "step-2"], where="after a failed save")
        after = {path.name: path.read_bytes() for path in (tmp_path / "run/step-2").iterdir()}
        assert_equal(after == before, True, where="the old checkpoint's bytes")
        broken.is_broken = False
        save(checkpoint, {"w": torch.ones(2)}, tmp_path / "run/step-4")
        (tmp_path / "run/step-4/config.json").write_text("{}")
        manager.save(4)
        manager.maybe_wait_for_saving()
        names = sorted(path.name for path in (tmp_path / "run/step-4").iterdir())
        assert_equal(names, [".metadata", "__0_0.distcp", "config.json"], where="over an HF checkpoint")
        manager.save(6)
    save(checkpoint, {"w": torch.ones(2)}, tmp_path / "run/step-6")
    assert_equal(checkpoint.detect_format(tmp_path / "run/step-6"), checkpoint.CheckpointFormat.HF, where="HF over DCP")


def _retention(checkpoint: Any, folder: Path, keep: int, prepare: Callable[[Path], None]) -> list[str]:
    with Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=keep) as manager:
        for step in range(1, 6):
            manager.save(step)
            prepare(folder)
    return _steps(folder)


@requirement(
    "CKPT-439",
    "Retention MUST keep the newest complete checkpoints, as many as asked for, and the one just saved: an incomplete "
    "one counts for nothing and is not deleted, and 0 keeps all.",
)
def test_retention(checkpoint: Any, tmp_path: Path) -> None:
    def incomplete(folder: Path) -> None:
        for step in (7, 8):
            if not (folder / f"step-{step}").exists():
                # Whole at one instant: a fault that deletes it meets no half of it.
                made = folder.with_name(f"{folder.name}-made")
                made.mkdir()
                (made / "__0_0.distcp").touch()
                made.rename(folder / f"step-{step}")

    every = [f"step-{step}" for step in range(1, 6)]
    for keep, expected in ((0, every), (1, every[-1:]), (2, every[-2:]), (9, every)):
        assert_equal(_retention(checkpoint, tmp_path / f"{keep}", keep, lambda folder: None), expected, where=f"{keep}")
        found = _retention(checkpoint, tmp_path / f"{keep}-incomplete", keep, incomplete)
        assert_equal(found, [*expected, "step-7", "step-8"], where=f"{keep}, newer ones incomplete")
    # A run that goes back to an earlier step has later ones before it.
    with Trainer(1).manager(checkpoint, tmp_path / "2", interval=1, keep_latest_k=2) as manager:
        manager.save(3)
    assert_equal(_steps(tmp_path / "2"), ["step-3", "step-4", "step-5"], where="saved after going back")


@requirement(
    "CKPT-440",
    "A checkpoint that cannot be deleted MUST neither fail a save nor stop the others from being deleted; it is tried "
    "again, and what is half deleted MUST never be taken for a checkpoint.",
)
def test_failing_deletes(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failing = shutil.rmtree, [True]

    def fails_half_way(path: Any, *arguments: Any, **options: Any) -> None:
        if failing[0] and "step-1" in os.fspath(path) and "saving" not in os.fspath(path):
            next(child for child in Path(path).iterdir() if child.suffix == ".distcp").unlink()
            raise OSError(39, "Directory not empty")
        real(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", fails_half_way)
    folder = tmp_path / "run"
    with Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=2) as manager:
        for step in range(1, 4):
            manager.save(step)
    left = [name for name in os.listdir(folder) if not name.startswith(".")]
    assert_equal(sorted(left), ["step-2", "step-3"], where="what looks like a checkpoint")
    assert_equal(len(os.listdir(folder)), 3, where="and the half of one, hidden")
    failing[0] = False
    with Trainer(1).manager(checkpoint, folder, interval=1, keep_latest_k=2) as manager:
        manager.save(4)
    assert_equal(_steps(folder), ["step-3", "step-4"], where="tried again")


@requirement(
    "CKPT-441",
    "In every async mode, for native and for HF saves, what is saved MUST be the states of the call, whatever the "
    "trainer does after it returned, or after staging where that is awaited.",
)
@pytest.mark.parametrize("last_step", [False, True])
def test_async_modes(checkpoint: Any, tmp_path: Path, last_step: bool) -> None:
    for mode, stager in (("async", None), ("async_with_pinned_mem", _stager(is_async=True))):
        trainer = Trainer(1)
        options = {"async_mode": mode, "stager": stager, "last_save_in_hf": True, "interval": 1}
        with trainer.manager(checkpoint, tmp_path / mode, **options) as manager:
            trainer.step()
            expected = trainer.weights()
            manager.save(1, last_step=last_step)
            manager.maybe_wait_for_staging()
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.fill_(-1.0)
            manager.maybe_wait_for_saving()
            assert_equal(_steps(tmp_path / mode), ["step-1"], where=f"{mode}: visible after the wait")
        loaded = Trainer(2)
        path = tmp_path / mode / "step-1"
        with loaded.manager(checkpoint, tmp_path / f"{mode}-new", initial_load_path=path) as manager:
            load(manager)
        assert_same_tensors(loaded.weights(), expected, where=mode)


@contextmanager
def _settled(manager: Any) -> Iterator[None]:
    """Close the manager at the end, whatever came: a save in another thread must not run beside a failure's report.

    Python 3.11.7 and before cannot take apart sources in two threads at once (cpython #106905), and both do.
    """
    try:
        yield
    finally:
        with suppress(BaseException):
            manager.close()


@requirement(
    "CKPT-442",
    "The failure of an asynchronous save MUST surface at the next call that waits for it, once, and the saves after it "
    "MUST succeed; close waits for the last one.",
)
def test_async_failures(checkpoint: Any, tmp_path: Path) -> None:
    broken, trainer = _Broken(), Trainer(1)
    options = {"states": {"broken": broken}, "async_mode": "async", "interval": 1}
    manager = trainer.manager(checkpoint, tmp_path / "run", **options)
    with _settled(manager):
        broken.is_broken = True
        manager.save(1)
        waits: tuple[Callable[[], Any], ...] = (lambda: manager.save(2), manager.maybe_wait_for_saving)
        for wait in waits:
            with raises(BaseException, mentions=["No space left"], where="the next call"):
                wait()
            broken.is_broken = False
            manager.save(3)
            manager.maybe_wait_for_saving()
            broken.is_broken = True
            manager.save(4)
        broken.is_broken = False
        with raises(BaseException, mentions=["No space left"], where="close"):
            manager.close()
    assert_equal(_steps(tmp_path / "run"), ["step-3"], where="what is there")
    manager.close()
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        for step in range(5, 15):
            manager.save(step)
    assert_equal(_steps(tmp_path / "run"), [f"step-{step}" for step in range(5, 15)], where="ten back to back")


@requirement(
    "CKPT-443",
    "export_dtype MUST cast what a model-only last save holds, native and HF alike, floats alone and none that "
    "export_keep names; intermediate saves keep their dtypes.",
)
def test_export_dtype(checkpoint: Any, tmp_path: Path) -> None:
    for in_hf in (False, True):
        trainer = Trainer(1)
        trainer.model.register_buffer("steps", torch.tensor([3, 4]))
        folder = tmp_path / f"{in_hf}"
        options = {"export_dtype": "bfloat16", "export_keep": ["*.bias"], "last_save_in_hf": in_hf}
        with trainer.manager(checkpoint, folder, **options) as manager:
            trainer.train(manager, until=3)
        expected = {n: v if n.endswith("bias") or n == "steps" else v.bfloat16() for n, v in trainer.weights().items()}
        targets = {name: torch.empty_like(value) for name, value in expected.items()}
        reader = checkpoint.HuggingFaceStorageReader if in_hf else dcp.FileSystemReader
        # A load converts: what was stored is asked for.
        stored: Any = reader(folder / "step-3").read_metadata().state_dict_metadata
        dtypes = {name: stored[name].properties.dtype for name in stored}
        assert_equal(dtypes, {n: v.dtype for n, v in expected.items()}, where=f"stored dtypes, in_hf={in_hf}")
        dcp.load(targets, storage_reader=reader(folder / "step-3"), no_dist=True)
        assert_same_tensors(targets, expected, where=f"in_hf={in_hf}")
        whole: dict[str, Any] = {"0.weight": torch.empty(12, 6)}
        dcp.load(whole, checkpoint_id=folder / "step-2", no_dist=True)
        assert_equal(whole["0.weight"].bfloat16().float().equal(whole["0.weight"]), False, where="an intermediate save")


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@requirement(
    "CKPT-631",
    "A model-only last save, native and HF, MUST store a tensor of each dtype that torch has with that dtype, or with "
    "export_dtype where it is a float of 16 bits or more.",
)
@pytest.mark.parametrize("in_hf", [False, True])
@pytest.mark.parametrize("export", [None, *_CAST[1:]])
def test_every_stored_dtype(checkpoint: Any, tmp_path: Path, export: torch.dtype | None, in_hf: bool) -> None:
    model = torch.nn.Module()
    for number, dtype in enumerate(DTYPES):
        model.register_buffer(f"b{number}", random_bits(dtype, (6,), number))
    options: dict[str, Any] = {"export_dtype": export, "last_save_in_hf": in_hf, "durable": False}
    with alone(), checkpoint.CheckpointManager(tmp_path, model=model, interval=1, **options) as manager:
        manager.save(1, last_step=True)
    reader = checkpoint.HuggingFaceStorageReader if in_hf else dcp.FileSystemReader
    # A load converts, and would hide it.
    stored: Any = reader(tmp_path / "step-1").read_metadata().state_dict_metadata
    for number, dtype in enumerate(DTYPES):
        expected = dtype if export is None or dtype not in _CAST else export
        assert_equal(stored[f"b{number}"].properties.dtype, expected, where=f"{dtype} with export_dtype={export}")


_NAMES = {
    Renamed: ["h.0.bias", "h.0.weight", "h.2.bias", "h.2.weight"],
    Fused: ["0.weight", "2.weight", "biases"],
    Split: ["0.bias", "2.bias", "2.weight", "gate", "up"],
}


@requirement(
    "CKPT-444",
    "A StateDictAdapter that renames, transposes, fuses or splits MUST decide the names, layouts and files of an HF "
    "save, and the load through it MUST give the model back, bit for bit.",
)
@pytest.mark.parametrize("adapter", list(_NAMES), ids=lambda adapter: adapter.__name__.lower())
def test_adapters(checkpoint: Any, tmp_path: Path, adapter: Any) -> None:
    made = adapter()
    assert_equal(isinstance(made, checkpoint.StateDictAdapter), True, where="the protocol")
    trainer = Trainer(1)
    with torch.no_grad():
        for number, parameter in enumerate(trainer.model.parameters()):
            parameter.copy_(random_bits(torch.float32, parameter.shape, number))
    with trainer.manager(checkpoint, tmp_path / "run", last_save_in_hf=True, state_dict_adapter=made) as manager:
        manager.save(1, last_step=True)
    index = json.loads((tmp_path / "run/step-1" / INDEX).read_text())["weight_map"]
    assert_equal(sorted(index), _NAMES[adapter], where="names in the files")
    assert_equal(len(set(index.values())), 2 if adapter is Renamed else 1, where="files")
    whole = made.to_hf(trainer.weights())
    stored = {name: checkpoint.load_file(tmp_path / "run/step-1" / index[name])[name] for name in index}
    assert_same_tensors(stored, {n: v.contiguous() for n, v in whole.items()}, where="layouts in the files")
    loaded = Trainer(2)
    options = {"initial_load_path": tmp_path / "run/step-1", "state_dict_adapter": made}
    with loaded.manager(checkpoint, tmp_path / "new", **options) as manager:
        load(manager)
    assert_same_tensors(loaded.weights(), trainer.weights(), where="the model")


class _Llama:
    """A trainer's own names and layouts of a Llama: projections fused, as kernels want them; split for HF."""

    fused = (("self_attn.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (16, 8, 8)),
             ("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj"), (24, 24)))  # fmt: skip

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in state_dict.items():
            found = next((each for each in self.fused if f".{each[0]}." in name), None)
            if found is None:
                result[name.replace("decoder.", "model.", 1)] = value
                continue
            own, parts, sizes = found
            for part, piece in zip(parts, value.split(sizes), strict=True):
                result[name.replace("decoder.", "model.", 1).replace(own, part)] = piece
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        left, result = dict(hf_state_dict), {}
        for own, parts, _ in self.fused:
            for name in [name for name in hf_state_dict if f".{parts[0]}." in name]:
                pieces = [left.pop(name.replace(parts[0], part)) for part in parts]
                result[name.replace("model.", "decoder.", 1).replace(parts[0], own)] = torch.cat(pieces)
        return {**{name.replace("model.", "decoder.", 1): value for name, value in left.items()}, **result}


def _module_of(state: dict[str, Any]) -> torch.nn.Module:
    """A tree of modules with these parameters."""
    root = torch.nn.Module()
    for name, value in state.items():
        *parents, own = name.split(".")
        place = root
        for parent in parents:
            if parent not in place._modules:
                place.add_module(parent, torch.nn.Module())
            place = place.get_submodule(parent)
        place.register_parameter(own, torch.nn.Parameter(value.clone()))
    return root


@requirement(
    "CKPT-446",
    "A Llama that a trainer holds under its own names, projections fused, saved as HF, MUST open with from_pretrained "
    "and give the same logits, and be loaded back into the trainer's names.",
)
def test_llama(checkpoint: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    llama: Any = LlamaForCausalLM
    original, adapter = llama(config).eval(), _Llama()
    own = adapter.from_hf(original.state_dict())
    assert_equal("decoder.layers.1.self_attn.qkv.weight" in own, True, where="fused names")
    trained = _module_of(own)
    options = {"last_save_in_hf": True, "hf_options": {"max_shard_size": "8KB"}, "state_dict_adapter": adapter}
    with alone(), checkpoint.CheckpointManager(tmp_path / "run", model=trained, interval=9, **options) as manager:
        manager.save(3, last_step=True)
    folder = tmp_path / "run/step-3"
    config.save_pretrained(folder)
    opened = llama.from_pretrained(folder).eval()
    tokens = torch.arange(40).reshape(4, 10)
    with torch.no_grad():
        assert_same_tensor(opened(tokens).logits, original(tokens).logits, where="logits")
    fresh = _module_of({name: torch.zeros_like(value) for name, value in own.items()})
    options = {"initial_load_path": folder, "state_dict_adapter": adapter}
    with alone(), checkpoint.CheckpointManager(tmp_path / "new", model=fresh, interval=9, **options) as manager:
        assert_equal(manager.load(), True, where="loaded")
    assert_same_tensors(dict(fresh.state_dict()), own, where="the trainer's names")


def _one_rank_is_asked(rank: Rank, folder: str) -> str:
    trainer = Trainer(1, mesh_of(rank))
    checkpoint = rank.component("checkpoint")
    with trainer.manager(checkpoint, folder) as manager:
        trainer.step()
        trainer.step()
        manager.save(2)
        # What the other rank's view of the file system lacks for a moment.
        hidden = trainer.manager(checkpoint, folder if rank.rank == 0 else f"{folder}-elsewhere")
        with hidden:
            found = hidden._agreed(lambda: hidden._find(-1))
        try:
            load(manager, 3)
        except MissingCheckpointError as error:
            return f"{found[0].name if found else 'nothing'} {type(error).__name__}"
    return "no error"


@requirement(
    "CKPT-445",
    "Which checkpoint is loaded MUST be decided on one rank and be the same on all; named errors are raised on all.",
)
def test_ranks_agree(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    said = rank_pool.run(_one_rank_is_asked, 2, str(tmp_path / "run"))
    assert_equal(said, ["step-2 MissingCheckpointError"] * 2, where="ranks")
