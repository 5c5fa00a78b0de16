"""State dicts in every residency, snapshots, and loads that neither cast nor forget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import (
    SHAPES,
    Twins,
    assert_same_state,
    in_host_memory,
    proven,
    proven_on,
    reread,
    values,
)
from twinproof.errors import PlanError
from twinproof.offload.states import copied


@requirement("OPT-046", "state_dict() MUST be the plain optimizer's whatever is in flight, without extra keys.")
def test_state_dict_anytime(offload: Any, device: str) -> None:
    with proven_on(device, late=True) as place:
        twins = Twins(offload, place)
        for prepare in ("prefetch", "offload", "settle"):
            twins.step()
            getattr(twins.offloader, prepare)()
            got = twins.optimizer.state_dict()
            with _disable_current_modes():
                assert_same_state(got, twins.plain.state_dict())
        twins.offloader.close()


@requirement("OPT-047", "Taking a state dict MUST NOT bring state back to the device.")
def test_state_dict_stays_on_host(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        twins.offloader.settle()
        moved = dict(device.engine.moved_bytes)
        twins.offloader.snapshot()
        twins.optimizer.state_dict()
        assert_equal(device.engine.moved_bytes, moved, where="bytes moved by a snapshot")
        assert_equal(twins.offloader.residency().device_bytes, 0, where="residency")
        twins.offloader.close()


@requirement("OPT-048", "A state dict MUST load into any other residency and continue as the plain run does.")
def test_load_across(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        first, second, third = (Twins(offload, place, **o) for o in ({}, {"chunk_bytes": 1}, {"fraction": 0.5}))
        for _ in range(2):
            first.step()
        state = first.offloader.snapshot()
        for other, how in ((second, second.optimizer.load_state_dict), (third, third.offloader.load_state_dict)):
            other.step()
            for mine, theirs in zip(other.params + other.plain_params, 2 * first.params, strict=True):
                with torch.no_grad():
                    mine.copy_(theirs)
            # Torch's load takes the tensors of the dict themselves, counters among them.
            how(reread(state))
            other.plain.load_state_dict(reread(state))
            assert_equal(other.offloader.residency().device_bytes, 0, where="residency after a load")
            for _ in range(2):
                other.step()
                other.check()
        for twins in (first, second, third):
            twins.offloader.close()


@requirement("OPT-014", "float32 moments of bf16 parameters MUST come back from a state dict unrounded.")
def test_no_cast_on_load(offload: Any, device: str) -> None:
    params = [values(shape, i, torch.bfloat16) for i, shape in enumerate(SHAPES)]
    with proven_on(device) as place:
        twins = Twins(offload, place, "Adam", params)
        twins.step()
        state = twins.offloader.snapshot()
        for number in state["state"]:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                state["state"][number][name] = values(SHAPES[number], 7)
        twins.offloader.load_state_dict(state)
        got = twins.offloader.snapshot()
        residency = twins.offloader.residency()
        twins.offloader.close()
    for number in state["state"]:
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_tensor(got["state"][number][name], values(SHAPES[number], 7), where=f"{name} of {number}")
    assert_equal(residency.device_bytes, 0, where="residency after a load")


@requirement("OPT-050", "A snapshot MUST never change, whatever the next steps do.")
def test_snapshot_isolation(offload: Any, device: str) -> None:
    with proven_on(device, late=True, seed=0) as place:
        twins = Twins(offload, place)
        twins.step()
        snapshot = twins.offloader.snapshot()
        expected = {
            number: {name: torch.as_tensor(value).clone() for name, value in state.items()}
            for number, state in twins.plain.state_dict()["state"].items()
        }
        for _ in range(2):
            twins.step()
        twins.offloader.settle()
        with _disable_current_modes():
            for number, state in expected.items():
                for name, value in state.items():
                    got = torch.as_tensor(snapshot["state"][number][name])
                    assert_same_tensor(got, value, where=f"{name} of parameter {number}")
        twins.offloader.close()


@requirement("OPT-053", "A state dict that does not fit MUST be a PlanError before anything is changed.")
def test_wrong_state_dict(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        for spoil in ("groups", "shape"):
            state = twins.offloader.snapshot()
            if spoil == "groups":
                state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:-1]
            else:
                state["state"][3]["exp_avg"] = values((3, 3), 0)
                state["param_groups"][0]["lr"] = 77.0
            with raises(PlanError):
                twins.offloader.load_state_dict(state)
            twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


def _memory_of(value: Any) -> set[int]:
    """Storages of all tensors inside, and the lists, dicts and sets themselves."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    own = {id(value)} if isinstance(value, dict | list | set) else set()
    return own.union(*map(_memory_of, inner))


@requirement(
    "OPT-375",
    "A snapshot MUST share no memory with the optimizer, nor an optimizer with what was loaded into it: neither "
    "states nor options that are tensors, lists or dicts.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_nothing_shared(offload: Any, step_device: str) -> None:
    with proven() as device:
        options = in_host_memory(device, {"lr": torch.tensor(0.02)})
        twins = Twins(offload, device, "AdamW", options={**options, "foreach": False}, step_device=step_device)
        twins.optimizer.param_groups[0].update(notes=[1, [2.5]], names={"a": in_host_memory(device, torch.ones(1))})

        def shared(state: dict[str, Any]) -> int:
            groups = [{key: v for key, v in group.items() if key != "params"} for group in twins.optimizer.param_groups]
            held = _memory_of([*groups, *twins.optimizer.state.values()])
            return len(held & _memory_of(state))

        twins.step()
        snapshot = twins.offloader.snapshot()
        assert_equal(shared(snapshot), 0, where="pieces of memory that a snapshot shares")
        given = copied(snapshot)
        twins.offloader.load_state_dict(snapshot)
        assert_equal(shared(snapshot), 0, where="pieces of memory that the optimizer shares with what was loaded")
        # What is written to either is not seen by the other.
        for group in twins.optimizer.param_groups:
            group["lr"].fill_(0.5)
            group["notes"].append(3)
            group["names"]["a"].zero_()
        twins.offloader.settle_for_writing()
        for state in twins.optimizer.state.values():
            state["step"].add_(1)
        with _disable_current_modes():
            assert_same_state(snapshot, given)
        twins.offloader.close()
