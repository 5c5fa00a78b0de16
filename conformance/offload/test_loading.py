"""Where a load leaves each state, what it refuses, and what it must not hold on the device meanwhile."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, raises, requirement, succeeds
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
from conformance.offload.foreign import FusedAdam
from twinproof.errors import PlanError

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("AdamW", {"lr": 0.01, "foreach": False}),
    "foreach": ("Adam", {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "counters": ("NAdam", {"lr": 0.01}),
}


@requirement(
    "OPT-075",
    "A loaded state MUST lie where the optimizer would have made it, so that no kernel is given host memory: the rest "
    "of a fraction, and counters that kernels read, on the device.",
)
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_places_after_a_load(offload: Any, device: str, variant: str, fraction: float) -> None:
    kind, options = VARIANTS[variant]
    with proven_on(device) as place:
        twins = Twins(offload, place, kind, options=options, fraction=fraction)
        for _ in range(2):
            twins.step()
        state = twins.offloader.snapshot()
        twins.step()
        twins.offloader.load_state_dict(in_host_memory(place, state))
        twins.plain.load_state_dict(reread(state, fused=variant == "fused"))
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement(
    "OPT-368", "A load MUST give a parameter that is listed twice in its group the states that it was saved with."
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("listed", [[0, 0, 1], [0, 1, 0]])
def test_listed_twice(offload: Any, device: str, listed: list[int]) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, "Adam", groups=[(listed, {})])
        twins.step()
        state = twins.offloader.snapshot()
        twins.step()
        twins.offloader.load_state_dict(in_host_memory(place, state))
        twins.plain.load_state_dict(reread(state))
        assert_equal(
            sorted(twins.offloader.snapshot()["state"]), sorted(state["state"]), where="parameters with states"
        )
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-054", "A load into another variant MUST free the places of states that it no longer has.")
def test_other_variant(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        with_it = Twins(offload, place, "Adam", options={"amsgrad": True})
        without = Twins(offload, place, "Adam", options={"amsgrad": False})
        for twins in (with_it, without):
            for _ in range(2):
                twins.step()
        before = without.offloader.stats().host_bytes
        given = [with_it.offloader.snapshot(), without.offloader.snapshot()]
        for twins, state in ((without, given[0]), (with_it, given[1]), (without, given[1])):
            twins.offloader.load_state_dict(state)
            twins.plain.load_state_dict(reread(state))
            twins.step()
            twins.check()
            assert_equal(twins.offloader.residency().device_bytes, 0, where="state left on the device")
        payload = sum(2 * value.nbytes for value in without.params)
        assert_equal(without.offloader.stats().payload_bytes, payload, where="payload after the way back")
        assert_le(without.offloader.stats().host_bytes, before, where="host memory after the way back")
        with_it.offloader.close()
        without.offloader.close()


@requirement("OPT-055", "A saved state dict MUST be readable with weights_only and hold nothing of the offloader.")
def test_plain_data(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        for state in (twins.optimizer.state_dict(), twins.offloader.snapshot()):
            twins.offloader.settle()
            with _disable_current_modes():
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                read = torch.load(file, weights_only=True)
                assert_equal(sorted(read), ["param_groups", "state"], where="keys")
                keys = {key for one in read["state"].values() for key in one}
                assert_equal(keys, {"step", "exp_avg", "exp_avg_sq"}, where="states")
                assert_equal(sorted(read["param_groups"][0]), sorted(twins.plain.state_dict()["param_groups"][0]))
        twins.offloader.close()


@requirement(
    "OPT-051", "A state dict that lacks a state, or has one of no parameter, MUST be refused before anything changes."
)
def test_incomplete(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        for spoil in ("lacks", "stranger"):
            state = twins.offloader.snapshot()
            state["param_groups"][0]["lr"] = 77.0
            if spoil == "lacks":
                del state["state"][2]["exp_avg_sq"]
            else:
                state["state"][9] = state["state"][0]
            with raises(PlanError):
                twins.offloader.load_state_dict(state)
            twins.check()
        # No state at all is what a parameter without a gradient has.
        state = twins.offloader.snapshot()
        del state["state"][1]
        twins.offloader.load_state_dict(state)
        twins.plain.load_state_dict(reread(state))
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-082", "A load MUST NOT bring what it loads to the device, and neither may a first step but by slots.")
@pytest.mark.parametrize("how", ["load_state_dict", "snapshot"])
def test_load_stays_on_host(offload: Any, how: str) -> None:
    params = [values(shape, i) for i, shape in enumerate(4 * SHAPES)]
    with proven() as device:
        twins = Twins(offload, device, "Adam", params, options={"amsgrad": True})
        twins.step()
        state = twins.offloader.snapshot()
        device.tracker.sweep()
        before = device.tracker.peak_bytes = device.tracker.live_bytes
        moved = dict(device.engine.moved_bytes)
        if how == "load_state_dict":
            twins.offloader.load_state_dict(state)
        else:
            twins.offloader.snapshot()
        grown = device.tracker.peak_bytes - before
        assert_equal(device.engine.moved_bytes, moved, where="bytes moved")
        twins.offloader.close()
    assert_equal(grown, 0, where="device bytes")


@requirement("OPT-088", "A load MUST leave the saved options and no other, as torch's load does.")
def test_options_after_a_load(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, "SGD", groups=[([0, 1], {"lr": 0.1}), ([2, 3], {"momentum": 0.5})])
        twins.step()
        state = twins.offloader.snapshot()
        for optimizer in (twins.plain, twins.optimizer):
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            optimizer.param_groups[0].update(weight_decay=0.5, mine="a note")
        twins.step()
        twins.offloader.load_state_dict(state)
        twins.plain.load_state_dict(reread(state))
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-246",
    "A step count that is a number, as old checkpoints of torch and those of DeepSpeed's CPU Adam have it, MUST become "
    "what the optimizer counts with, as in torch's load.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_counts_that_are_numbers(offload: Any, device: str, step_device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, options={"lr": 0.01}, step_device=step_device)
        for optimizer in (twins.plain, twins.optimizer):
            twins.set_gradients()
            optimizer.step()
        state = twins.offloader.snapshot()
        for one in state["state"].values():
            one["step"] = 7
        twins.plain.load_state_dict(reread(state))
        twins.offloader.load_state_dict(state)
        got = twins.offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(got, twins.plain.state_dict())
        twins.step()
        got = twins.offloader.snapshot()
        with _disable_current_modes():
            for number, one in twins.plain.state_dict()["state"].items():
                assert_same_tensor(got["state"][number]["step"], one["step"], where=f"step of parameter {number}")
        twins.offloader.close()


@requirement(
    "OPT-435",
    "A load of states without names MUST leave the names of the optimizer's parameters as they are, as torch's does, "
    "by the offloader's verb and by the optimizer's.",
)
def test_names_stay(offload: Any) -> None:
    for loads in ("offloader", "optimizer"):
        with proven() as device:
            models = [torch.nn.Linear(3, 2) for _ in range(2)]
            saved = torch.optim.Adam(models[0].parameters(), lr=0.1)
            optimizer = torch.optim.Adam(list(models[1].named_parameters()), lr=0.1)
            offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine)
            (offloader if loads == "offloader" else optimizer).load_state_dict(saved.state_dict())
            found = optimizer.param_groups[0].get("param_names")
            assert_equal(found, ["weight", "bias"], where=f"names after the {loads}'s load")


_MOMENT = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(8, 16), "exp_avg_sq": torch.zeros(8, 16)}
# What is no state dict of an optimizer of four parameters.
SHAPELESS: dict[str, Any] = {
    "nothing": {},
    "None": None,
    "a list": [1],
    "a model's": {"weight": torch.zeros(3)},
    "no groups": {"state": {}},
    "no states": {"param_groups": [{"params": [0, 1, 2, 3]}]},
    "states in a list": {"state": [], "param_groups": [{"params": [0, 1, 2, 3]}]},
    "a group of no parameters": {"state": {}, "param_groups": [{"lr": 0.1}]},
    "names beside numbers": {"state": {"0": {}, 9: {}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
    "None for states": {"state": {0: None}, "param_groups": [{"params": [0, 1, 2, 3]}]},
    "a number for a moment": {"state": {0: {**_MOMENT, "exp_avg": 1.0}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
    "None for a moment": {"state": {0: {**_MOMENT, "exp_avg_sq": None}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
    "a scalar for a moment": {
        "state": {0: {**_MOMENT, "exp_avg": torch.tensor(1.0)}},
        "param_groups": [{"params": [0, 1, 2, 3]}],
    },
}


@requirement(
    "OPT-441",
    "What is no state dict of an optimizer, whatever it is, and states that are no tensors where tensors move, MUST be "
    "a PlanError of the offloader's load before anything is changed.",
)
@pytest.mark.parametrize("name", list(SHAPELESS))
def test_no_state_dict(offload: Any, name: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "Adam", options={"lr": 0.1})
        twins.step()
        with raises(PlanError, where=name):
            twins.offloader.load_state_dict(SHAPELESS[name])
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-442",
    "States that belong to no parameter, by names of the optimizer's own, MUST come back from a snapshot as from "
    "torch's load, in memory of their own; None for a momentum that is yet to be made MUST load as there.",
)
def test_states_of_no_parameter(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device, "SGD", options={"lr": 0.1, "momentum": 0.9})
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.state["shared"] = {"count": 3, "mean": values((4,), 7)}
            optimizer.state["gone"] = {"count": 1}
        twins.step()
        del twins.optimizer.state["gone"]
        saved = twins.offloader.snapshot()
        twins.optimizer.state["gone"] = {"count": 1}
        saved["state"][0]["momentum_buffer"] = None
        twins.step()
        with succeeds("a load", where="states of no parameter"):
            twins.offloader.load_state_dict(saved)
        saved["state"]["shared"]["count"] = 4
        found = twins.optimizer.state["shared"]
        assert_equal(found.get("count"), 3, where="a state of no parameter")
        assert_equal("gone" in twins.optimizer.state, False, where="one that was not saved is there")
        saved["state"]["shared"]["count"] = 3
        twins.plain.load_state_dict(reread(saved))
        with _disable_current_modes():
            assert_same_tensor(found["mean"], values((4,), 7), where="a tensor of no parameter")
        for optimizer in (twins.plain, twins.optimizer):
            del optimizer.state["shared"]
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement(
    "OPT-495",
    "An optimizer with groups of no parameters, wherever they stand among the others, MUST load what was saved of it, "
    "before its first step and behind it, by the offloader's verb and by its own, with the options of those groups; "
    "and one MUST be refused that has parameters there, or lacks the group.",
)
@pytest.mark.parametrize("listed", [([], [0, 1, 2, 3]), ([0, 1, 2, 3], []), ([0], [], [1, 2, 3], []), ([], [])])
def test_groups_of_no_parameters(offload: Any, listed: tuple[list[int], ...]) -> None:
    for first, way in itertools.product((0, 1), ("offloader", "optimizer")):
        with proven() as device:
            groups = [(numbers, {"weight_decay": 0.1 * place}) for place, numbers in enumerate(listed)]
            twins, where = Twins(offload, device, groups=groups), f"groups {listed}, {way}, behind {first} steps"
            for _ in range(first):
                twins.step()
            saved = twins.offloader.snapshot()
            twins.step()
            for group in twins.optimizer.param_groups:
                group["weight_decay"] = 0.5
            with succeeds("a load", where=where):
                getattr(twins, way).load_state_dict(saved)
            twins.plain.load_state_dict(reread(saved))
            twins.check()
            twins.step()
            twins.check()
            empty, some = listed.index([]), saved["param_groups"]
            wrong = {
                "parameters where there are none": [{**each, "params": each["params"] or [9]} for each in some],
                "a group less": some[:empty] + some[empty + 1 :],
                "a group more": [*some, {**some[empty]}],
            }
            for name, other in wrong.items():
                with raises(PlanError, mentions=["param_groups"], where=f"{name}, {where}"):
                    twins.offloader.load_state_dict({**saved, "param_groups": other})
                twins.check()
            twins.offloader.close()


@requirement(
    "OPT-498",
    "Every verb, load and step MUST leave a parameter that has no states without an entry in the optimizer's, and in "
    "its state dict: with masters and without, of torch's optimizers and of others, on either step device.",
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"step_device": "cpu"}),
        *itertools.product(("AdamW", "SGD", "FusedAdam"), ({"release": "at_offload"}, {"release": "on_request"})),
    ],
)
@pytest.mark.parametrize("halves", [False, True])
def test_no_entries(offload: Any, kind: str, options: dict[str, Any], halves: bool) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((4, 8), i, torch.bfloat16 if halves else torch.float32)) for i in range(3)]
        masters = offload.MasterWeights(params) if halves else None
        stepped = params if masters is None else list(masters.parameters())
        optimizer: Any = getattr(torch.optim, kind, FusedAdam)(stepped, lr=0.1)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters, **options)
        unstepped = offloader.snapshot()
        # SGD without momentum has no state at all.
        with_states = [] if kind == "SGD" else [0, 2]

        def step(*numbers: int) -> None:
            for number, param in enumerate(params):
                param.grad = torch.ones_like(param) if number in numbers else None
            optimizer.step()

        step(0, 2)
        saved = offloader.snapshot()
        calls: dict[str, tuple[list[int], Any]] = {
            "a step of none": (with_states, step),
            "a step of some": (with_states, lambda: step(2)),
            "offload()": (with_states, offloader.offload),
            "prefetch()": (with_states, offloader.prefetch),
            "release_gpu_memory()": (with_states, offloader.release_gpu_memory),
            "stats()": (with_states, lambda: [offloader.stats(), offloader.residency(), offloader.settle()]),
            "the optimizer's load": (with_states, lambda: optimizer.load_state_dict(saved)),
            "the offloader's load": (with_states, lambda: offloader.load_state_dict(saved)),
            "the optimizer's load of none": ([], lambda: optimizer.load_state_dict(unstepped)),
            "a step behind a load of none": ([], step),
            "the offloader's load of none": ([], lambda: offloader.load_state_dict(unstepped)),
            "a load of some": (with_states, lambda: offloader.load_state_dict(saved)),
            "close()": (with_states, offloader.close),
        }
        for name, (expected, call) in calls.items():
            call()
            held = [number for number, param in enumerate(stepped) if param in optimizer.state]
            assert_equal(held, expected, where=f"parameters with an entry after {name}")
            for state in (optimizer.state_dict(), *([] if name == "close()" else [offloader.snapshot()])):
                assert_equal(list(state["state"]), expected, where=f"numbers in a state dict after {name}")


_FORMS: dict[str, Any] = {
    "turned": lambda value: value.mT.contiguous(),
    "flat": lambda value: value.reshape(-1),
    "deeper": lambda value: value[None],
    "with a last dimension": lambda value: value[..., None],
    "in one row": lambda value: value.reshape(1, -1),
}


@requirement(
    "OPT-499",
    "A load of a state, or of a master, that has the number of elements of its own and another shape MUST be refused "
    "before anything changes, and so MUST a state of any other shape of a parameter without elements.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad", "RMSprop", "Adamax", "Rprop", "ASGD", "Adafactor", "Muon"])
def test_other_shapes(offload: Any, kind: str) -> None:
    with proven(this_branch_only=kind in ("ASGD", "Adafactor", "Rprop")) as device:
        # Torch steps Adafactor's and Muon's parameters only where they have elements.
        shapes: list[tuple[int, ...]] = [(3, 4), *([] if kind in ("Adafactor", "Muon") else [(0, 3)])]
        twins = Twins(offload, device, kind, [values(shape, i) for i, shape in enumerate(shapes)])
        twins.step()
        saved = twins.offloader.snapshot()
        for number, state in saved["state"].items():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.dim():
                    continue
                changed = {how: form(value) for how, form in _FORMS.items() if number == 0}
                changed |= {"of no elements": value.new_zeros(3, 0), "larger": value.new_zeros(4, 3)}
                for how, given in changed.items():
                    if given.shape == value.shape:
                        continue
                    wrong = {**saved, "state": {**saved["state"], number: {**state, name: given}}}
                    with raises(PlanError, mentions=[name], where=f"{name} of {number}, {how}"):
                        twins.offloader.load_state_dict(wrong)
                    twins.check()
        # What is no dense tensor has no form: it is the user's own, and taken as it is.
        for name, given in (("note", 3), ("table", torch.eye(2).to_sparse())):
            last = {**saved["state"][len(shapes) - 1], name: given}
            with succeeds("a load", where=f"{name} beside the states of {shapes[-1]}"):
                twins.offloader.load_state_dict({**saved, "state": {**saved["state"], len(shapes) - 1: last}})
            twins.offloader.load_state_dict(saved)
        twins.step()
        twins.check()
        twins.offloader.close()
        masters = offload.MasterWeights([torch.nn.Parameter(values((3, 4), 1, torch.bfloat16))])
        for how, form in _FORMS.items():
            with raises(PlanError, mentions=["values"], where=f"a master, {how}"):
                masters.load([form(values((3, 4), 2))])
