"""Other threads beside one that attaches a pipeline: torch.fx replaces calls of modules for the whole process."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.pipeline.cases import TRAINING
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits

# No test takes as long: a wait that ends so is a failure.
_LIMIT_S = 120.0
_TRACING = [name for name in TRAINING if name != "TrainPipelineBase"]


class _Acting(torch.nn.Module):
    """A job's model, whose first trace does something on the way."""

    def __init__(self, model: torch.nn.Module, act: Callable[[], None]) -> None:
        super().__init__()
        self.model, self._acts = model, [act]

    def forward(self, batch: Any) -> Any:
        """As the model."""
        if isinstance(batch, torch.fx.Proxy) and self._acts:
            self._acts.pop()()
        return self.model(batch)


def _beside(act: Callable[[], None], told: list[str]) -> threading.Thread:
    """A thread that says what it fails of."""

    def run() -> None:
        try:
            act()
        except Exception as error:
            told.append(repr(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@requirement(
    "PIPE-730",
    "While a pipeline looks for the sharded modules of its model, modules that another thread calls, trains or reads "
    "MUST do what they do, and the model be driven as if nobody else was there.",
)
@pytest.mark.parametrize("name", _TRACING)
def test_modules_of_others(pipeline: Any, name: str) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    value, told = torch.ones(2, 3), list[str]()
    other(value).sum().backward()
    expected = [other(value).detach(), *(param.grad for param in other.parameters())]
    found: list[Any] = []

    def train() -> None:
        other.zero_grad()
        output = other(value)
        output.sum().backward()
        found.extend([output.detach(), *(param.grad for param in other.parameters())])

    def act() -> None:
        _beside(train, told).join(_LIMIT_S)

    job, loop = (Job(pipeline, 4, kinds=("table_wise",)) for _ in range(2))
    job.model = _Acting(job.model, act)  # type: ignore[assignment]
    schedule, loader = job.schedule(name, **({"start_batch": 10**6} if "Semi" in name else {})), iter(job.batches(3))
    for step, batch in enumerate(loop.batches(3)):
        assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
    assert_equal(told, [], where=f"errors of another thread, {name}")
    assert_equal(len(found), len(expected), where=f"results of another thread, {name}")
    for got, wanted in zip(found, expected, strict=True):
        assert_bits(got, wanted, f"results of another thread, {name}")
    job.model = job.model.model  # type: ignore[assignment]
    assert_same_state(job, loop, name)


def _wrapped_functions() -> list[tuple[dict[str, Any], str, Any]]:
    """What torch.fx replaces during a trace beside modules: the functions that were given to ``torch.fx.wrap``."""
    fx: Any = importlib.import_module("torch.fx._symbolic_trace")
    return [(scope, name, scope[name]) for (_, name), scope in fx._wrapped_fns_to_patch.items() if name in scope]


class _Seen:
    """A lock that says when the second thread asks for it."""

    def __init__(self, own: Any, asked: threading.Event) -> None:
        self._own, self._asked, self._first = own, asked, threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() != self._first:
            self._asked.set()
        self._own.acquire()

    def __exit__(self, *_: Any) -> None:
        self._own.release()


@requirement(
    "PIPE-731",
    "Pipelines that two threads attach at once MUST both train as their loops do, and leave torch's modules as they "
    "were.",
)
@pytest.mark.parametrize("name", _TRACING)
def test_two_at_once(pipeline: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, functions = (torch.nn.Module.__call__, torch.nn.Module.__getattr__), _wrapped_functions()
    met, over, told = threading.Event(), threading.Event(), list[str]()
    lock = threading.RLock()
    monkeypatch.setattr("twinproof.pipeline.tracing._ONE_TRACE", _Seen(lock, met))
    options = {"start_batch": 10**6} if "Semi" in name else {}
    threads = list[threading.Thread]()
    jobs, loops = ([Job(pipeline, seed, kinds=("table_wise",)) for seed in (4, 6)] for _ in range(2))

    def wait_inside() -> None:
        met.set()
        over.wait(_LIMIT_S)

    def attach_other() -> None:
        schedule, loader = jobs[1].schedule(name, **options), iter(jobs[1].batches(2))
        for step, batch in enumerate(loops[1].batches(2)):
            assert_bits(schedule.progress(loader), loops[1].step(batch), f"{name} step {step} of another thread")

    def begin_other() -> None:
        threads.append(_beside(attach_other, told))
        # It is inside of its model, or waits for this trace to end.
        met.wait(_LIMIT_S)

    for job, act in zip(jobs, (begin_other, wait_inside), strict=True):
        job.model = _Acting(job.model, act)  # type: ignore[assignment]
    try:
        with succeeds("a schedule beside another thread", where=name):
            schedule, loader = jobs[0].schedule(name, **options), iter(jobs[0].batches(2))
        for step, batch in enumerate(loops[0].batches(2)):
            with succeeds("a step beside another thread", where=f"{name} step {step}"):
                output = schedule.progress(loader)
            assert_bits(output, loops[0].step(batch), f"{name} step {step}")
            over.set()
        threads[0].join(_LIMIT_S)
        assert_equal(told, [], where=f"errors of another thread, {name}")
        now = torch.nn.Module.__call__, torch.nn.Module.__getattr__
        assert_equal(
            [each is own for each, own in zip(now, calls, strict=True)], [True, True], where="calls of torch's"
        )
    finally:
        over.set()
        # An implementation that lacks this pipeline has begun no other thread.
        for thread in threads:
            thread.join(_LIMIT_S)
        torch.nn.Module.__call__, torch.nn.Module.__getattr__ = calls  # type: ignore[method-assign]
        for scope, function, own in functions:
            scope[function] = own
