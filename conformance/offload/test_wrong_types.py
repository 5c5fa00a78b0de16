"""What cannot be offloaded is refused with what could be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_flags_are_no_text, raises, requirement
from conformance.offload.cases import even, proven
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, UnsupportedError
from twinproof.offload import offloader


@requirement(
    "OPT-360", "MasterWeights of a model, a tensor, a name or a list of names MUST be refused with what it takes."
)
@pytest.mark.parametrize("kind", ["model", "tensor", "name", "names", "number"])
def test_masters(offload: Any, kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    wrong = {"model": model, "tensor": model.weight, "name": "weight", "names": ["weight"], "number": 7}
    with raises(ConfigError, mentions=("where: params", "model.parameters()"), where=kind):
        offload.MasterWeights(wrong[kind])


@requirement("OPT-361", "An offloader of what is no optimizer MUST be refused with what it got and what it takes.")
@pytest.mark.parametrize("kind", ["model", "params", "name"])
def test_optimizers(offload: Any, kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    wrong = {"model": model, "params": list(model.parameters()), "name": "adam"}
    given = type(wrong[kind]).__name__
    with raises(UnsupportedError, mentions=(given, "torch.optim.Optimizer", "where: optimizer"), where=kind):
        offload.OptimizerStateOffloader(wrong[kind])


@requirement(
    "OPT-391",
    "The class that implementations bind to their transfers, taken as it is, MUST refuse with where bound ones are.",
)
def test_unbound(offload: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with raises(ConfigError, mentions=("no transfers", "fastimpl.offload", "refimpl.offload")):
        offloader.OptimizerStateOffloader(optimizer)


@requirement(
    "OPT-419", 'A flag of an offloader or of its verbs that is text MUST be refused by its name: "false" is true.'
)
def test_flags(offload: Any) -> None:
    with proven() as device:
        kind = offload.OptimizerStateOffloader
        assert_flags_are_no_text(kind, partial(even, offload, device), where="OptimizerStateOffloader")
        assert_flags_are_no_text(kind.offload, even(offload, device).offloader.offload, where="offload")


@requirement("OPT-420", "What are no master weights MUST be refused with what they are.")
@pytest.mark.parametrize("masters", ["masters", 7, {}])
def test_no_masters(offload: Any, masters: Any) -> None:
    mentions = ("where: master_weights", "expected: MasterWeights", f"got: {type(masters).__name__}")
    with proven() as device, raises(ConfigError, mentions=mentions):
        even(offload, device, master_weights=masters)


class _NoCopies:
    """An engine, but for the verb that comes first in the middle of a step."""

    def __getattr__(self, name: str) -> Any:
        if name == "copy":
            raise AttributeError(name)
        return getattr(InlineEngine(), name)


@requirement("OPT-536", "What is no engine MUST be refused with what it lacks, before anything is taken over.")
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_no_engines(offload: Any, step_device: str) -> None:
    for engine in (object(), 0, "", _NoCopies(), InlineEngine):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
        said = f"got: {type(engine).__name__} without {'device' if engine is InlineEngine else ''}"
        with raises(ConfigError, mentions=("where: engine", said), where=repr(engine)):
            offload.OptimizerStateOffloader(optimizer, engine=engine, step_device=step_device)
        assert_equal("step" in vars(optimizer), False, where=f"step taken over, engine {engine!r}")
