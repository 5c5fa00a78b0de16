"""Calls of a manager while a save, or the deletion of old ones, is on its way."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import settings

import twinproof.checkpoint.manager as manager_module
from conformance.checkpoint.cases import assert_loads, save
from conformance.checkpoint.manager_machine import ManagerMachine
from conformance.checkpoint.trainer import Trainer, alone, load
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_tensor,
    examples,
    raises,
    requirement,
    run_machine,
    succeeds,
)
from conformance.provers.faults import Interruption, each_moment, interrupted
from twinproof.checkpoint.trees import check_unmounted
from twinproof.errors import MissingCheckpointError

# One process saves and loads here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Waited:
    """A save on its way that goes on when somebody waits for it, and not before."""

    def __init__(self, future: Any, gate: threading.Event) -> None:
        self._future, self._gate = future, gate

    def result(self, *arguments: Any) -> Any:
        """Open the gate, then wait."""
        self._gate.set()
        return self._future.result(*arguments)

    def done(self) -> bool:
        """As the future says."""
        return bool(self._future.done())

    def exception(self) -> BaseException | None:
        """As the future says."""
        found: BaseException | None = self._future.exception()
        return found


class _Interrupted(_Waited):
    """One whose first wait is interrupted, when the save has begun."""

    was_interrupted = False

    def result(self, *arguments: Any) -> Any:
        """Once what a signal's handler raises."""
        if not self.was_interrupted:
            self.was_interrupted = True
            raise TimeoutError("of an alarm's handler")
        return super().result(*arguments)


class _Gated:
    """A state that is written once a gate is open; ``fails``: then its write fails."""

    def __init__(self, gate: threading.Event, *, fails: bool = False) -> None:
        self.gate, self.fails = gate, fails

    def __deepcopy__(self, memo: Any) -> _Gated:
        return self

    def __reduce__(self) -> Any:
        self.gate.wait(20)
        if self.fails:
            raise OSError(28, "No space left on device")
        return dict, ()

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""


@requirement(
    "CKPT-625",
    "A load MUST wait for the asynchronous save that is on its way and take it where it is the one that is meant; the "
    "failure of that save MUST surface there, once, and then nothing be loaded.",
)
@pytest.mark.parametrize("step", [-1, 2, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_load_waits(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, fails: bool) -> None:
    gate, real = threading.Event(), dcp.async_save
    monkeypatch.setattr(dcp, "async_save", lambda *args, **options: _Waited(real(*args, **options), gate))
    trainer, gated = Trainer(1), _Gated(gate)
    options = {"states": {**trainer.states, "gated": gated}, "async_mode": "async", "interval": 1}
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        trainer.step()
        manager.save(1)
        manager.maybe_wait_for_saving()
        gate.clear()
        gated.fails = fails
        trainer.step()
        manager.save(2)
        trainer.step()
        try:
            if fails:
                with raises(BaseException, mentions=["No space left"], where="the load after a save that fails"):
                    load(manager, step)
                assert_equal(trainer.counter.step, 3, where="what a load that was not made has changed")
                with succeeds("a load", where="once the failure was told"):
                    load(manager, 1)
            else:
                with succeeds("a load", where="of what is on its way"):
                    load(manager, step)
            expected = 1 if fails or step == 1 else 2
            assert_equal(trainer.counter.step, expected, where="the step that was loaded")
            assert_equal(gate.is_set(), True, where="the load has waited for the save")
        finally:
            gate.set()


@requirement(
    "CKPT-859",
    "An interrupt of any wait for an asynchronous save, of close() too, MUST leave the save on its way and the manager "
    "open: the next call MUST wait for it, and it MUST be there then.",
)
@pytest.mark.parametrize("verb", ["maybe_wait_for_saving", "close", "save", "load"])
def test_interrupted_waits(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    gate, real = threading.Event(), dcp.async_save
    monkeypatch.setattr(dcp, "async_save", lambda *args, **options: _Interrupted(real(*args, **options), gate))
    trainer = Trainer(1)
    options = {"states": {**trainer.states, "gated": _Gated(gate)}, "async_mode": "async", "interval": 1}
    manager = trainer.manager(checkpoint, tmp_path / "run", **options)
    trainer.step()
    try:
        manager.save(1)
        with raises(TimeoutError, where=verb):
            getattr(manager, verb)(*{"save": [2], "load": [1]}.get(verb, []))
        with succeeds("the next call", where=f"behind an interrupt of {verb}"):
            load(manager, 1)
        manager.close()
    finally:
        gate.set()
    later = Trainer(2)
    with later.manager(checkpoint, tmp_path / "run", states=later.states, interval=1) as other:
        assert_equal(load(other), True, where=f"whether there is a checkpoint, behind an interrupt of {verb}")
    assert_equal(later.counter.step, 1, where="the step that was loaded")


def _save_apart(rank: Rank, folder: str) -> list[str]:
    """Saves of which each is one of its rank alone, as torch makes them where the default group has gone."""
    trainer = Trainer(1)
    trainer.step()
    told = []
    for mode in ("async", "disabled"):
        manager = trainer.manager(rank.component("checkpoint"), Path(folder), interval=1, async_mode=mode)

        def apart(state: Any, *, storage_writer: Any, real: Any = dcp.save, **_: Any) -> Any:
            answer = Future[Any]()
            try:
                answer.set_result(real(state, storage_writer=storage_writer, no_dist=True))
            except BaseException as error:
                answer.set_exception(error)
            return answer if mode == "async" else answer.result()  # noqa: B023

        with mock.patch.object(dcp, "async_save", apart), mock.patch.object(dcp, "save", apart):
            try:
                manager.save(1)
                manager.close()
            except BaseException as error:
                told.append(str(error))
                manager.close()
    return told


@requirement(
    "CKPT-860",
    "A save of several ranks that each rank comes to alone, since the default group has gone, MUST be refused with "
    "both numbers, and nothing be there.",
)
def test_ranks_apart(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for told in rank_pool.run(_save_apart, 2, str(tmp_path / "run")):
        found = ["other ranks save" in each and "got: 1" in each and "expected: 2" in each for each in told]
        assert_equal(found, [True, True], where=f"what was told: {told}")
    shown = sorted(each.name for each in tmp_path.glob("run/*") if not each.name.startswith("."))
    assert_equal(shown, [], where="checkpoints of one rank")


def _retention() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "twinproof-retention"}


@requirement(
    "CKPT-865",
    "A manager that is dropped without close() MUST take its thread of retention along, and one that only loads MUST "
    "have none.",
)
def test_dropped_managers(checkpoint: Any, tmp_path: Path) -> None:
    trainer, before = Trainer(1), _retention()
    with trainer.manager(checkpoint, tmp_path / "run", keep_latest_k=2, load_only=True):
        assert_equal(_retention() - before, set(), where="threads of a manager that only loads")
    manager = trainer.manager(checkpoint, tmp_path / "run", keep_latest_k=2, interval=1)
    trainer.step()
    manager.save(1)
    threads = _retention() - before
    assert_equal(len(threads), 1, where="threads of a manager")
    del manager
    gc.collect()
    for thread in threads:
        thread.join(3)
        assert_equal(thread.is_alive(), False, where="the thread of a manager that was dropped")


@requirement(
    "CKPT-736",
    "Each save that is asked for MUST be made of the states of its call, also of a step whose asynchronous save is on "
    "its way: the same save once more, and the last one, in its own format.",
)
def test_one_step_saved_twice(checkpoint: Any, tmp_path: Path) -> None:
    for last in (False, True):
        trainer, folder = Trainer(1), tmp_path / str(last)
        options = {"async_mode": "async", "interval": 2, "last_save_in_hf": True}
        with trainer.manager(checkpoint, folder, **options) as manager:
            assert_equal(manager.save(2), True, where="the first save")
            manager.maybe_wait_for_staging()
            trainer.step()
            expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            assert_equal(manager.save(2, last_step=last), True, where=f"once more, last {last}")
        kind = checkpoint.detect_format(folder / "step-2").name
        assert_equal(kind, "HF" if last else "DCP", where=f"format, last {last}")
        if last:
            assert_loads(checkpoint, folder / "step-2", expected)
            continue
        other = Trainer(7)
        with other.manager(checkpoint, folder, **options) as manager:
            load(manager, 2)
        for name, value in other.model.state_dict().items():
            assert_same_tensor(value, expected[name], where=f"{name} of a second save")


@requirement(
    "CKPT-628",
    "A checkpoint that is saved while older ones are still being deleted MUST be kept, also of a run that went back to "
    "an earlier step: what was asked for after the save before it never deletes it.",
)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_saved_during_a_deletion(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    begun, gate, real = threading.Event(), threading.Event(), shutil.rmtree

    def slow(path: Any, *arguments: Any, **options: Any) -> None:
        if "deleting" in os.fspath(path):
            begun.set()
            gate.wait(20)
        real(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    trainer = Trainer(1)
    try:
        with trainer.manager(checkpoint, tmp_path / "run", interval=1, keep_latest_k=1, async_mode=mode) as manager:
            # The deletion of step 4 takes its time: 6 is saved, and then 3 by a run that went back.
            for step in (4, 5, 6, 3):
                manager.save(step)
                manager.maybe_wait_for_saving()
                if step == 5:
                    assert_equal(begun.wait(20), True, where="a deletion has begun")
            assert_equal("step-3" in os.listdir(tmp_path / "run"), True, where="the last save is there")
            gate.set()
    finally:
        gate.set()
    left = sorted(os.listdir(tmp_path / "run"))
    assert_equal(left, ["step-3", "step-6"], where="the newest and the one that was saved last")


@requirement(
    "CKPT-643",
    "A checkpoint that somebody deletes while a load or retention looks at the folder, at any moment, MUST be none to "
    "it: others MUST be found, and the steps that are there be told.",
)
@pytest.mark.parametrize("is_hf", [False, True])
@pytest.mark.parametrize("is_whole", [True, False])
def test_deleted_while_looked_at(checkpoint: Any, tmp_path: Path, is_hf: bool, is_whole: bool) -> None:
    trainer = Trainer(1)
    with trainer.manager(checkpoint, tmp_path / "made", interval=1) as manager:
        for step in (1, 2):
            trainer.step()
            manager.save(step)
    if is_hf:
        shutil.rmtree(tmp_path / "made/step-1")
        save(checkpoint, {"w": torch.ones(2)}, tmp_path / "made/step-1")

    def delete(folder: Path) -> None:
        shutil.rmtree(folder)
        if not is_whole:
            # Its files are gone, the folder is not yet.
            folder.mkdir()

    def once(nth: int, step: int) -> Interruption:
        folder, late = tmp_path / f"{step}-{nth}", Trainer(2)
        shutil.copytree(tmp_path / "made", folder)
        with (
            late.manager(checkpoint, folder, interval=1) as manager,
            interrupted(folder, nth, lambda: delete(folder / "step-1")) as hook,
        ):
            if step == 7:
                with raises(MissingCheckpointError, mentions=["got: 7", "2]"], where=f"none, moment {nth}"):
                    load(manager, 7)
            else:
                with succeeds("a load", where=f"the newest, moment {nth}"):
                    assert_equal(load(manager), True, where="loaded")
                assert_equal(late.counter.step, 2, where=f"the newest, moment {nth}")
        return hook

    for step in (-1, 7):
        each_moment(partial(once, step=step))


@requirement(
    "CKPT-710",
    "Where the newest checkpoints go between the moment when a load sees them and the one when it takes one, it MUST "
    "load the newest that is left.",
)
@pytest.mark.parametrize("gone", [(3,), (2, 3)])
def test_newest_gone_while_found(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[int, ...]
) -> None:
    trainer, late, seen = Trainer(1), Trainer(2), manager_module.complete_steps
    with trainer.manager(checkpoint, tmp_path / "run", interval=1) as manager:
        for step in (1, 2, 3):
            trainer.step()
            manager.save(step)

    def deleted_behind(folder: Path) -> Any:
        found = seen(folder)
        for step in gone:
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
        return found

    with late.manager(checkpoint, tmp_path / "run", interval=1) as manager:
        monkeypatch.setattr(manager_module, "complete_steps", deleted_behind)
        with succeeds("a load", where=f"{gone} are gone"):
            assert_equal(load(manager), True, where="loaded")
        monkeypatch.undo()
    assert_equal(late.counter.step, min(gone) - 1, where=f"the newest but {gone}")


class _AtItsLoad:
    """A state that does something in the middle of a load: once the checkpoint is found, before it is read."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action, self.is_loading = action, False

    def state_dict(self) -> dict[str, Any]:
        if self.is_loading:
            self.action()
        return {"is_there": torch.tensor(1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""


@requirement(
    "CKPT-644",
    "A checkpoint that a load has found MUST stay until it is loaded, though retention may delete it meanwhile; after "
    "the load retention MUST delete it.",
)
def test_loaded_during_a_deletion(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, begun, gate, looked = tmp_path / "run", threading.Event(), threading.Event(), threading.Semaphore(0)
    remove, look, main = shutil.rmtree, os.listdir, threading.current_thread()

    def slow(path: Any, *arguments: Any, **options: Any) -> None:
        if "step-1.deleting" in os.fspath(path):
            begun.set()
            gate.wait(20)
        remove(path, *arguments, **options)

    def counted(path: Any = ".") -> list[str]:
        found = look(path)
        if path == folder and threading.current_thread() is not main:
            looked.release()
        return found

    def retention_goes_on() -> None:
        # It lists the folder twice for what it was asked for last: for checkpoints, and for what it has hidden.
        gate.set()
        seen = [looked.acquire(timeout=20) for _ in range(2)]
        assert_equal((seen, "step-2" in look(folder)), ([True, True], True), where="what is being loaded")

    monkeypatch.setattr(shutil, "rmtree", slow)
    trainer, state = Trainer(1), _AtItsLoad(retention_goes_on)
    options = {"states": {**trainer.states, "hook": state}, "interval": 1, "keep_latest_k": 1}
    try:
        with trainer.manager(checkpoint, folder, **options) as manager:
            for step in (1, 2):
                trainer.step()
                manager.save(step)
            # The deletion of step 1 takes its time: that of step 2 is asked for behind it.
            assert_equal(begun.wait(20), True, where="the deletion of step 1 has begun")
            monkeypatch.setattr(os, "listdir", counted)
            manager.save(3)
            state.is_loading = True
            with succeeds("a load", where="of what retention is about to delete"):
                assert_equal(load(manager, 2), True, where="loaded")
            assert_equal(trainer.counter.step, 2, where="the step that was loaded")
    finally:
        gate.set()
    assert_equal(sorted(look(folder)), ["step-3"], where="after the load")


@requirement(
    "CKPT-969",
    "A step that is saved again while retention looks at what was saved under its name before MUST stay.",
)
def test_saved_again_meanwhile(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, begun, gate = check_unmounted, threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        if path == tmp_path / "run" / "step-1" and threading.current_thread() is not threading.main_thread():
            begun.set()
            gate.wait(60)
        looks(path)

    trainer = Trainer(1)
    try:
        with trainer.manager(checkpoint, tmp_path / "run", interval=1, keep_latest_k=1) as manager:
            trainer.step()
            manager.save(1)
            monkeypatch.setattr(manager_module, "check_unmounted", slow)
            manager.save(2)
            assert_equal(begun.wait(60), True, where="retention looks at step 1")
            trainer.step()
            manager.save(1)
            gate.set()
    finally:
        gate.set()
    found = sorted(os.listdir(tmp_path / "run"))
    assert_equal(found, ["step-1", "step-2"], where="the newest step, and the last saved")


@requirement(
    "CKPT-855",
    "An old checkpoint that was moved elsewhere and is linked to MUST be let go by retention as any other: the link "
    "goes, without a trace, and what it led to stays whole.",
)
def test_linked_checkpoint(checkpoint: Any, tmp_path: Path) -> None:
    trainer, folder = Trainer(1), tmp_path / "run"
    with trainer.manager(checkpoint, folder, interval=1, keep_latest_k=1) as manager:
        trainer.step()
        manager.save(1)
        os.rename(folder / "step-1", tmp_path / "archive")
        os.symlink(tmp_path / "archive", folder / "step-1")
        content = sorted(os.listdir(tmp_path / "archive"))
        trainer.step()
        manager.save(2)
    assert_equal(os.listdir(folder), ["step-2"], where="the manager's folder")
    left = os.listdir(tmp_path / "archive") if (tmp_path / "archive").exists() else []
    assert_equal(sorted(left), content, where="what was moved")


@requirement("CKPT-705", "What a load found that then failed MUST be deleted by later saves as any other checkpoint.")
def test_let_go_by_a_load_that_failed(checkpoint: Any, tmp_path: Path) -> None:
    def fails() -> None:
        raise ZeroDivisionError("a state that cannot be loaded")

    trainer, state = Trainer(1), _AtItsLoad(fails)
    options = {"states": {**trainer.states, "hook": state}, "interval": 1, "keep_latest_k": 1}
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        trainer.step()
        manager.save(1)
        state.is_loading = True
        with raises(BaseException, mentions=("cannot be loaded",), where="the load"):
            load(manager, 1)
        state.is_loading = False
        for step in (2, 3):
            trainer.step()
            manager.save(step)
    assert_equal(sorted(os.listdir(tmp_path / "run")), ["step-3"], where="what is kept")


@requirement(
    "CKPT-629",
    "After any program of saves, failing and asynchronous ones among them, loads, waits and managers anew, each load "
    "MUST give what its step holds, each failure be told once, and that be kept which retention says.",
)
def test_any_program(checkpoint: Any, tmp_path: Path) -> None:
    class Machine(ManagerMachine):
        pass

    Machine.checkpoint, Machine.root = checkpoint, tmp_path
    run_machine(Machine, settings=settings(examples(20), stateful_step_count=3))


@requirement(
    "CKPT-863",
    "A manager's folders, that of its saves and the initial one, MUST be those that its paths named when it was made, "
    "wherever the process works later, and with .. behind what is no folder.",
)
@pytest.mark.parametrize("path", ["run", "gone/../run"])
def test_folders_stay(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    with alone():
        trainer = Trainer(1)
        manager = trainer.manager(checkpoint, path, interval=1, keep_latest_k=1)
        second = trainer.manager(checkpoint, "none", interval=1, initial_load_path=f"{path}/step-2")
        manager.save(1)
        monkeypatch.chdir(tmp_path / "later")
        manager.save(2)
        assert_equal(manager.load(), True, where="there is something to load")
        with succeeds("a load", where="of the initial checkpoint"):
            second.load()
        manager.close()
        second.close()
    assert_equal(os.listdir(tmp_path / "run"), ["step-2"], where="the folder of both saves")
    assert_equal(os.listdir(tmp_path / "later"), [], where="the folder in which the process works")
