"""A trainer that is killed while its manager saves, replaces and deletes goes on from a whole checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.checkpoint.crash_driver import Crashes, sampled
from conformance.checkpoint.crash_folders import nothing
from conformance.checkpoint.trainer import Trainer, alone, load
from conformance.harness import assert_equal, assert_same_tensors, requirement, succeeds
from conformance.harness.implementation import component
from conformance.provers.faults import WRITE_CALLS, Fault, FaultServer


def _train(implementation: str, folder: str, until: int, mode: str) -> Trainer:
    """Load the newest checkpoint, and train on; a checkpoint of each step, of which two are kept."""
    trainer = Trainer(1)
    options = {"interval": 1, "keep_latest_k": 2, "last_save_model_only": False, "async_mode": mode}
    with alone(), trainer.manager(component(implementation, "checkpoint"), folder, **options) as manager:
        load(manager)
        trainer.train(manager, until)
    return trainer


def _killed(implementation: str, folder: str, mode: str) -> None:
    _train(implementation, folder, 3, mode)


@requirement(
    "CKPT-889",
    "A trainer that was killed at any call of a manager's saves and deletions MUST find the last step or the new one "
    "whole, and end as one that was not killed; nothing of what the kill left MUST stay.",
)
@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.night)])
def test_killed_trainers(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, mode: str) -> None:
    run = Trainer(1)
    weights = {0: run.weights()}
    for step in range(1, 5):
        run.step()
        weights[step] = run.weights()
    crashes = Crashes(server, tmp_path, nothing, _killed, impl.__name__, "{root}/run", mode)
    trace = crashes.record()
    points = [Fault("rename", number, "kill") for number in range(1, 1 + trace.count("rename"))]
    points += [Fault(WRITE_CALLS, number, "torn") for number in sampled(trace.count(WRITE_CALLS), 2)]
    seen = set()
    for struck in crashes.killed(points):
        found = Trainer(2)
        options = {"interval": 1, "load_only": True}
        with found.manager(checkpoint, struck.root / "run", **options) as manager, succeeds("a load", struck.where):
            is_loaded = load(manager)
        step = found.counter.step
        assert_equal(is_loaded, step > 0, where=f"{struck.where}: whether there is a step")
        if is_loaded:
            assert_same_tensors(found.weights(), weights[step], where=f"{struck.where}: step {step}")
        seen.add(step)
        with succeeds("training on", struck.where):
            ended = _train(impl.__name__, str(struck.root / "run"), 4, mode)
        assert_same_tensors(ended.weights(), weights[4], where=f"{struck.where}: the end")
        names = sorted(path.name for path in (struck.root / "run").iterdir())
        assert_equal(names, ["step-3", "step-4"], where=f"{struck.where}: what stays")
    assert_equal(seen, {0, 1, 2, 3}, where="steps that were found")
