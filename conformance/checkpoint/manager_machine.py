"""A trainer's manager as a state machine: saves, failing ones too, loads, waits and managers anew, against a dict.

The model is a dict: step -> weights and counter, as of the save that completed there last, with a save that is on its
way beside it. What fails is told once, by the next call that waits; what is kept is what retention says, whenever its
thread gets to it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import assert_equal, assert_same_tensors, raises, succeeds
from twinproof.errors import MissingCheckpointError

# Often what needs another before it: a program of free choice seldom has a checkpoint to load.
VERBS = ("save", "save", "save", "train", "load_newest", "load_any", "load_any", "load_absent", "wait", "reopen")
calls = st.tuples(st.sampled_from(VERBS), st.integers(0, 59))


class Breakable:
    """A state whose write fails, as that of a full disk does, where it was so when it was copied."""

    def __init__(self) -> None:
        self.is_broken = False

    def __deepcopy__(self, memo: Any) -> Breakable:
        copied = Breakable()
        copied.is_broken = self.is_broken
        return copied

    def __reduce__(self) -> Any:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        return dict, ()

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""


class Saved(NamedTuple):
    """What a checkpoint holds."""

    weights: dict[str, torch.Tensor]
    step_count: int


class ManagerMachine(RuleBasedStateMachine):
    """See the module. Class attributes are set by the test that runs it."""

    checkpoint: Any
    root: Path
    counter = 0
    manager: Any = None

    @initialize(keep=st.integers(0, 2), is_async=st.booleans(), program=st.lists(calls, min_size=12, max_size=16))
    def start(self, keep: int, is_async: bool, program: list[tuple[str, int]]) -> None:
        """A fresh folder for every program."""
        type(self).counter += 1
        self.folder, self.keep = self.root / str(type(self).counter), keep
        self.trainer, self.breakable = Trainer(1), Breakable()
        self.complete: dict[int, Saved] = {}
        self.pending: tuple[int, Saved, bool] | None = None
        self.open(is_async)
        for verb, number in program:
            self.call(verb, number)

    @rule(verb=st.sampled_from(VERBS), number=st.integers(0, 59))
    def call(self, verb: str, number: int) -> None:
        """One call; ``number`` says what is meant."""
        if verb == "save":
            self.save(1 + number % 5, fails=number // 5 % 4 == 3)
        elif verb == "train":
            self.trainer.step()
        elif verb.startswith("load_"):
            self.load(verb.removeprefix("load_"), number)
        elif verb == "wait":
            self.wait()
        else:
            self.reopen(number % 2 == 0)

    def open(self, is_async: bool) -> None:
        """A manager of the folder."""
        self.is_async = is_async
        self.manager = self.trainer.manager(
            self.checkpoint,
            self.folder,
            states={**self.trainer.states, "breakable": self.breakable},
            interval=1,
            keep_latest_k=self.keep,
            async_mode="async" if is_async else "disabled",
        )

    # The model.

    def settled(self, call: Any, where: str) -> bool:
        """Make a call that waits for the save on its way; whether that save has failed, which the call then says."""
        pending, self.pending = self.pending, None
        if pending is not None and pending[2]:
            with raises(BaseException, mentions=["No space left"], where=f"{where} after a save that fails"):
                call()
            return True
        if pending is not None:
            self.completed(*pending[:2])
        return False

    def completed(self, step: int, saved: Saved) -> None:
        """A save is visible; what retention deletes goes, at once or later."""
        self.complete[step] = saved
        if self.keep:
            for old in sorted(self.complete)[: -self.keep]:
                if old != step:
                    del self.complete[old]

    # The calls.

    def save(self, step: int, fails: bool) -> None:
        """Of any step: a run may have gone back."""

        def call() -> None:
            with alone():
                self.manager.save(step)

        self.breakable.is_broken = fails
        try:
            if self.settled(call, "save"):
                return
            saved = Saved(self.trainer.weights(), self.trainer.counter.step)
            if fails and not self.is_async:
                with raises(BaseException, mentions=["No space left"], where="a save that fails"):
                    call()
                return
            with succeeds("a save", where=f"step {step}"):
                call()
        finally:
            self.breakable.is_broken = False
        if self.is_async:
            self.pending = step, saved, fails
        else:
            self.completed(step, saved)

    def load(self, which: str, number: int) -> None:
        """The newest, or that of a step; one that retention deletes is not asked for, as it may still be there."""
        there = sorted({*self.complete, *([self.pending[0]] if self.pending is not None else [])})
        absent = 9 if self.keep else next(step for step in range(1, 7) if step not in there)
        step = {"newest": -1, "any": there[number % len(there)] if there else -1, "absent": absent}[which]

        def call() -> bool:
            with alone():
                return bool(self.manager.load(step))

        if self.settled(call, "load"):
            return
        if step == -1 and not self.complete:
            with succeeds("a load of nothing", where="load"):
                assert_equal(call(), False, where="loaded")
            return
        chosen = max(self.complete) if step == -1 else step
        if chosen not in self.complete:
            if chosen == absent:
                with raises(MissingCheckpointError, mentions=[str(step)], where=f"load of step {step}"):
                    call()
            return
        self.trainer.step()
        with succeeds("a load", where=f"step {step}"):
            assert_equal(call(), True, where="loaded")
        saved = self.complete[chosen]
        assert_equal(self.trainer.counter.step, saved.step_count, where=f"counter of step {step}")
        assert_same_tensors(self.trainer.weights(), saved.weights, where=f"weights of step {step}")

    def wait(self) -> None:
        """For the save on its way."""
        if not self.settled(self.manager.maybe_wait_for_saving, "a wait"):
            with succeeds("a wait", where="wait"):
                self.manager.maybe_wait_for_saving()

    def reopen(self, is_async: bool) -> None:
        """Close, which waits for everything, and go on with another manager."""
        self.close()
        self.open(is_async)

    def close(self) -> None:
        """What is there then is what the model says."""
        if not self.settled(self.manager.close, "close"):
            with succeeds("close", where="close"):
                self.manager.close()
        names = os.listdir(self.folder) if self.folder.exists() else []
        assert_equal(sorted(names), sorted(f"step-{step}" for step in self.complete), where="what is kept")

    def teardown(self) -> None:
        """A last look."""
        if self.manager is not None:
            try:
                self.close()
            finally:
                # Its threads end in any case; what it says then is no news.
                with suppress(BaseException):
                    self.manager.close()
