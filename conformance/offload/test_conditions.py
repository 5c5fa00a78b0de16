"""Options, refusals and second uses that are met one at a time: each condition holds for a reason of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.offload.cases import even, proven, values
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError

_NO_FRACTIONS: list[Any] = ["half", None, [0.5], 1j]
_NO_CHOICES: list[Any] = [torch.tensor(True), torch.tensor(False), torch.ones(2), "yes", 2]


@requirement(
    "OPT-464",
    "A fraction that is no number and a fused_update that is neither None nor a flag, a tensor of one among them, MUST "
    "be refused by name, with the optimizer as it was.",
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("fraction", each) for each in _NO_FRACTIONS] + [("fused_update", each) for each in _NO_CHOICES],
    ids=str,
)
def test_kinds_of_options(offload: Any, name: str, value: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with raises(ConfigError, mentions=(f"where: {name}", "expected"), where=f"{name}={value!r}"):
        offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), **{name: value})
    assert_equal("step" in vars(optimizer), False, where="step taken over")


@requirement(
    "OPT-465",
    "A flag of offload() that is given by both of its names with one value MUST have that value, false as well as "
    "true.",
)
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_flags_given_twice(offload: Any, states: bool, masters: bool) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((8, 8), i, torch.bfloat16)) for i in range(2)]
        weights = offload.MasterWeights(params)
        optimizer = torch.optim.Adagrad(weights.parameters(), lr=0.1)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=weights)
        offloader.to_device(offloader.bundles)
        # One state of the size of the master: either is a half of it all.
        whole = offloader.residency().device_bytes
        with succeeds("offload() with flags that agree", where=f"states {states}, masters {masters}"):
            offloader.offload(states, masters, offload_optimizer_states=states, offload_master_weights=masters)
        expected = whole // 2 * (2 - states - masters)
        assert_equal(offloader.residency().device_bytes, expected, where="bytes on the device")
        offloader.close()


@requirement("OPT-466", "A class that a user derives from the offloader's MUST work like it, with nothing to bind.")
def test_derived_offloaders(offload: Any) -> None:
    class Counted(offload.OptimizerStateOffloader):  # type: ignore[misc, name-defined]
        """Counts the calls of a verb."""

        offloads = 0

        def offload(self, *arguments: Any, **options: Any) -> None:
            self.offloads += 1
            super().offload(*arguments, **options)

    with proven() as device:
        twins = even(offload, device)
        twins.offloader.close()
        with succeeds("an attachment", where="a derived class"):
            twins.offloader = Counted(twins.optimizer, engine=device.engine, chunk_bytes=1024)
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.offload()
        assert_equal(twins.offloader.offloads > 0, True, where="calls of its own verb")
        twins.offloader.close()
