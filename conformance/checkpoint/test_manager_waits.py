"""Calls of a manager while an asynchronous save is on its way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.trainer import Trainer, load
from conformance.harness import assert_equal, raises, requirement, succeeds

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


class _Gated:
    """A state that is written once a gate is open; ``fails``: then its write fails."""

    def __init__(self, gate: threading.Event, *, fails: bool = False) -> None:
        self.gate, self.fails = gate, fails

    def __deepcopy__(self, memo: Any) -> _Gated:
        return self

    def __reduce__(self) -> Any:
        self.gate.wait(60)
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
