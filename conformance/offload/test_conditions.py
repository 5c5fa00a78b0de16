"""Options, refusals and second uses that are met one at a time: each condition holds for a reason of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import (
    FUSED,
    CpuArm,
    Place,
    Twins,
    assert_same_state,
    even,
    in_host_memory,
    proven,
    proven_on,
    reread,
    values,
)
from conformance.offload.foreign import Factored
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, PlanError, StaleMasterError, UnsupportedError

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
    class Counted(offload.OptimizerStateOffloader):  # type: ignore[misc]
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


# What a load is given in place of a state dict's parts, and a word of the refusal.
_NO_STATE_DICTS: dict[str, tuple[dict[str, Any], str]] = {
    "groups that are numbers": ({"param_groups": [3]}, "not an optimizer's state dict"),
    "groups that are lists": ({"param_groups": [[0, 1, 2, 3]]}, "not an optimizer's state dict"),
    "own state under a tuple": ({"state": {("own", 1): 3}}, "states of no parameter"),
    "own state under None": ({"state": {None: {"count": 3}}}, "states of no parameter"),
    "own state under a name": ({"state": {"own": 3}}, "states of no parameter"),
}


@requirement(
    "OPT-467",
    "A load whose groups are no mappings, or that has a state of no parameter, under a key of any kind, which the "
    "optimizer does not have, MUST be refused with PlanError and change nothing.",
)
@pytest.mark.parametrize("name", sorted(_NO_STATE_DICTS))
def test_forms_of_loads(offload: Any, name: str) -> None:
    given, word = _NO_STATE_DICTS[name]
    with proven() as device:
        twins = Twins(offload, device, "Adagrad")
        twins.step()
        saved = twins.offloader.snapshot()
        wrong = {**saved, **given, "state": {**saved["state"], **given.get("state", {})}}
        with raises(PlanError, mentions=(word,), where=name):
            twins.offloader.load_state_dict(wrong)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-468",
    "A load that has a parameter, listed twice by the optimizer, under two numbers with states of each MUST give it "
    "the last ones, as torch's load does.",
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_saved_under_two_numbers(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device, "Adam", [values((8,), 0), values((4, 4), 1)], groups=[([0, 0, 1], {})])
        twins.step()
        saved = twins.offloader.snapshot()
        with _disable_current_modes():
            other = {key: value * 2 if value.dim() else value for key, value in saved["state"][1].items()}
        # As an optimizer saves that had three parameters.
        saved["state"] = {0: other, **saved["state"]}
        saved["param_groups"][0]["params"] = [0, 1, 2]
        twins.plain.load_state_dict(reread(saved))
        with succeeds("a load", where="one parameter under two numbers"):
            twins.offloader.load_state_dict(in_host_memory(device, saved))
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement(
    "OPT-469",
    "Numbers in a state that are no tensors MUST come through loads, the optimizer's own and the offloader's, beside "
    "master weights as without.",
)
@pytest.mark.parametrize("halves", [False, True])
def test_notes(offload: Any, halves: bool) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((4, 6), i, torch.bfloat16 if halves else torch.float32)) for i in range(2)]
        masters = offload.MasterWeights(params) if halves else None
        optimizer = torch.optim.Adam(params if masters is None else masters.parameters())
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        notes: list[Any] = [2.5, 7]
        for state, note in zip(optimizer.state.values(), notes, strict=True):
            state["note"] = note
        for loaded in (optimizer, offloader):
            saved = offloader.snapshot()
            with succeeds("a load", where=f"{type(loaded).__name__}, masters {halves}"):
                loaded.load_state_dict(in_host_memory(device, saved))
            found = [offloader.snapshot()["state"][number]["note"] for number in range(2)]
            assert_equal(found, notes, where=f"notes after a load of {type(loaded).__name__}")
            for param in params:
                param.grad = torch.ones_like(param)
            with succeeds("a step", where=f"after a load of {type(loaded).__name__}"):
                optimizer.step()
        offloader.close()


@requirement(
    "OPT-470",
    "A step on the CPU whose gradients have a dtype that it does not step with, or for which states are missing since "
    "an option was turned on, MUST be refused by name, with everything as it was and ready to go on.",
)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("fault", ["gradient", "states"])
def test_refused_by_the_cpu(offload: Any, fault: str, halves: bool) -> None:
    if fault == "gradient" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no grad_dtype")
    with proven() as device:
        arm = CpuArm(offload, device, halves=halves)
        arm.step()
        before = arm.offloader.snapshot()
        for i, param in enumerate(arm.params):
            param.grad = values(param.shape, i, param.dtype)
        if fault == "gradient":
            last: Any = arm.params[-1]
            last.grad, last.grad_dtype = None, torch.float64
            last.grad = values(last.shape, 9, torch.float64)
            mentions = ("gradient", "float64", "bfloat16")
        else:
            arm.optimizer.param_groups[0]["amsgrad"] = True
            mentions = ("moments", "missing", "max_exp_avg_sq")
        with raises(UnsupportedError, mentions=mentions, where=f"{fault}, masters {halves}"):
            arm.optimizer.step()
        arm.optimizer.param_groups[0]["amsgrad"] = False
        if fault == "gradient":
            last.grad, last.grad_dtype = None, last.dtype
        after = arm.offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(after, before)
        arm.check()
        arm.step()
        arm.check()
        arm.offloader.close()


@requirement(
    "OPT-471",
    "A parameter that the optimizer itself cannot step MUST be refused by the step that would have to foresee its "
    "states, with the optimizer's own reason, and the others go on once it is gone.",
)
@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        # Muon looks at the dimensions of those alone that it is made with.
        ("Muon", lambda: values((8,), 7), ("ValueError", "2D", "where: Muon")),
        ("Adam", lambda: torch.eye(3).to_sparse_csr(), ("unsupported tensor layout", "where: Adam")),
    ],
    ids=["Muon", "sparse"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_states_that_cannot_be_foreseen(offload: Any, kind: str, given: Any, reason: tuple[str, ...]) -> None:
    with proven() as device:
        twins = Twins(offload, device, kind)
        twins.step()
        twins.optimizer.add_param_group({"params": [torch.nn.Parameter(given())]})
        twins.set_gradients()
        with raises(UnsupportedError, mentions=("cannot be foreseen", *reason), where=kind):
            twins.optimizer.step()
        del twins.optimizer.param_groups[1]
        twins.plain.step()
        twins.optimizer.step()
        twins.check()
        twins.offloader.close()


class _Normed(torch.optim.SGD):
    """Torch's arithmetic, on gradients that are scaled by the norm of those of their group."""

    def _init_group(self, group: Any, params: Any, grads: Any, momenta: Any) -> bool:
        answer = super()._init_group(group, params, grads, momenta)  # type: ignore[no-untyped-call]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        grads[:] = [grad / norm for grad in grads]
        return bool(answer)


@requirement(
    "OPT-472",
    "A class derived from one of torch's that gathers its parameters in a way of its own MUST be stepped as a whole, "
    "bit for bit: they may depend on each other.",
)
def test_groups_gathered_otherwise(offload: Any) -> None:
    with proven() as device:
        arms = [[torch.nn.Parameter(values((40,), i)) for i in range(4)] for _ in range(2)]
        plain, optimizer = (_Normed(params, lr=0.1, momentum=0.9) for params in arms)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=200)
        for number in range(3):
            for params in arms:
                for i, param in enumerate(params):
                    param.grad = values((40,), 10 * number + i)
            plain.step()
            optimizer.step()
            for i, (expected, param) in enumerate(zip(*arms, strict=True)):
                with _disable_current_modes():
                    assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i} of step {number}")
        assert_equal(offloader.is_separable, False, where="is_separable")
        offloader.close()


@requirement(
    "OPT-473",
    "Entries of None among the masters that a wrapper keeps, as Megatron's have them for parameters of other ranks, "
    "MUST be passed over: where there are no others, memory goes with the step.",
)
@pytest.mark.parametrize("name", ["shard_fp32_from_float16_groups", "fp32_from_float16_groups"])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_masters_of_other_ranks(offload: Any, name: str, kept: int) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((8, 8), i)) for i in range(2)]
        optimizer = torch.optim.Adagrad(params, lr=0.1)
        given = SimpleNamespace(optimizer=optimizer, **{name: [[None], [*params[:kept], None]]})
        offloader = offload.OptimizerStateOffloader(given, engine=device.engine)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        states = sum(param.nbytes for param in params)
        left = offloader.residency().device_bytes
        # Kept masters, and with them all, stay on the device until they are rounded.
        expected = 0 if kept == 0 else states + sum(param.nbytes for param in params[:kept])
        assert_equal(left, expected, where=f"bytes on the device behind a step, {kept} masters in {name}")
        offloader.close()


@requirement(
    "OPT-474",
    "A differentiable step in which some parameters have no gradient MUST be the plain optimizer's.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_differentiable_without_gradients(offload: Any, kind: str) -> None:
    with proven() as device:
        params, plain_params = ([values((3, 4), i) for i in range(3)] for _ in range(2))
        optimizer, plain = (
            getattr(torch.optim, kind)(each, lr=0.1, differentiable=True) for each in (params, plain_params)
        )
        with offload.OptimizerStateOffloader(optimizer, engine=device.engine) as offloader:
            for number in range(3):
                for each in (params, plain_params):
                    for i, param in enumerate(each):
                        param.grad = None if i == number else values((3, 4), 10 * number + i)
                plain.step()
                with succeeds("a step", where=f"parameter {number} has no gradient"):
                    optimizer.step()
            saved = offloader.snapshot()
            with _disable_current_modes():
                for i, (param, expected) in enumerate(zip(params, plain_params, strict=True)):
                    assert_same_tensor(param, expected, where=f"parameter {i}")
                assert_same_state(saved, plain.state_dict())


def _closure_steps(offload: Any, device: Any, kind: str, way: str, by_name: bool) -> list[torch.Tensor]:
    """Weights at each evaluation of three steps' closures, and the masters behind them."""
    params: list[Any] = [torch.nn.Parameter(values((4, 6), i, torch.bfloat16)) for i in range(2)]
    masters = offload.MasterWeights(params)
    more = {"max_iter": 3} if kind == "LBFGS" else {}
    optimizer = getattr(torch.optim, kind)(masters.parameters(), lr=0.25, **more)
    kept, seen = optimizer.step, list[torch.Tensor]()
    if way == "attached":
        masters.attach(optimizer)
    else:
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
    if way == "closed":
        optimizer.register_step_pre_hook(lambda *_: offloader.close())

    def closure() -> torch.Tensor:
        loss = torch.zeros(())
        for param in params:
            param.grad = param.detach() * 0.5
            with _disable_current_modes():
                seen.append(param.detach().clone())
                loss = loss + param.detach().float().square().sum() / 4
        return loss

    step = kept if way == "kept" else optimizer.step
    for _ in range(3):
        with succeeds("a step", where=f"{kind}, {way}, closure given by name: {by_name}"):
            step(closure=closure) if by_name else step(closure)
    if way in ("offloaded", "kept"):
        offloader.close()
    with _disable_current_modes():
        return seen + [master.detach().clone() for master in masters.parameters()]


@requirement(
    "OPT-475",
    "A closure of a step with masters MUST be evaluated alike whether it is given by its name or its place: alone, "
    "offloaded, in a step that was kept, and in one whose hook closes the offloader.",
)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("way", ["attached", "offloaded", "kept", "closed"])
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_closures_by_name(offload: Any, kind: str, way: str, by_name: bool) -> None:
    with proven(this_branch_only=True) as device:
        expected = _closure_steps(offload, device, kind, "attached", False)
        found = _closure_steps(offload, device, kind, way, by_name)
        where = f"{kind}, {way}, closure given by name: {by_name}"
        assert_equal(len(found), len(expected), where=f"evaluations of {where}")
        with _disable_current_modes():
            for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert_same_tensor(mine, theirs, where=f"weights {number} of {where}")


class _Twice(torch.optim.SGD):
    """Evaluates a closure twice and changes nothing in between."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
                closure()
        return super().step()


@requirement(
    "OPT-476",
    "Float32 parameters among masters, which are their own, MUST NOT be written by refresh_masters() nor between two "
    "evaluations of a closure: what autograd has saved of them stays good.",
)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_masters_of_their_own(offload: Any, is_offloaded: bool) -> None:
    params: list[Any] = [torch.nn.Parameter(values((4, 6), i, (torch.float32, torch.bfloat16)[i])) for i in range(2)]
    masters = offload.MasterWeights(params)
    optimizer, versions = _Twice(masters.parameters(), lr=0.1), list[int]()
    if is_offloaded:
        offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), master_weights=masters)
    else:
        masters.attach(optimizer)

    def closure() -> None:
        versions.append(params[0]._version)
        for param in params:
            param.grad = torch.ones_like(param)

    optimizer.step(closure)
    # The second is evaluated by torch's own step, which is called without it.
    assert_equal(versions[1], versions[0], where="version of a float32 parameter between two evaluations")
    loss = (params[0].square() * params[1].float()).sum()
    masters.refresh()
    with succeeds("a backward pass", where="behind refresh()"):
        loss.backward()


@requirement(
    "OPT-477",
    "A parameter that a hook has written behind its master's back MUST be noticed by the next step, although another "
    "one in the same piece of memory, with a count of writes of its own, was stepped meanwhile.",
)
def test_written_beside_another(offload: Any) -> None:
    memory = values((2, 8), 0, torch.bfloat16)
    # Through .data, each has a count of its own.
    params: list[Any] = [torch.nn.Parameter(memory[row].data) for row in range(2)]
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    writes = [False]

    def write(*_: Any) -> None:
        if writes[0]:
            params[1].detach().mul_(2)

    optimizer.register_step_pre_hook(write)
    for number in range(2):
        writes[0] = number == 1
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    writes[0] = False
    params[0].grad = torch.ones_like(params[0])
    with raises(StaleMasterError, mentions=("refresh()",)):
        optimizer.step()


@requirement(
    "OPT-478",
    "An offloader that is closed by a hook of a step inside of another step of the optimizer MUST leave both, and the "
    "next ones, the plain optimizer's.",
)
@pytest.mark.parametrize("when", ["pre", "post"])
def test_closed_by_a_step_inside(offload: Any, when: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "SGD")
        depth = {twins.plain: 0, twins.optimizer: 0}

        def inside(optimizer: Any, *_: Any) -> None:
            if depth[optimizer] == 0:
                depth[optimizer] = 1
                optimizer.step()
            elif depth[optimizer] == 1 and optimizer is twins.optimizer:
                twins.offloader.close()

        for optimizer in (twins.plain, twins.optimizer):
            # Another one behind it, to which this one has to come.
            for hook in (inside, lambda *_: None):
                getattr(optimizer, f"register_step_{when}_hook")(hook)
        for number in range(3):
            with succeeds("a step", where=f"step {number}, closed inside of the first, {when}"):
                twins.step()
            depth[twins.plain] = depth[twins.optimizer] = 2
            for i, (param, expected) in enumerate(zip(twins.params, twins.plain_params, strict=True)):
                with _disable_current_modes():
                    assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i} after step {number}")
        saved, expected_state = twins.optimizer.state_dict(), twins.plain.state_dict()
        with _disable_current_modes():
            assert_same_state(saved, expected_state)


class _Gradient(torch.Tensor):
    """A class of the user's, which may change what torch does."""


# Optimizer, options, which parameters a group lists, and a word of the way in which it is updated.
_LEFT_OR_TAKEN: dict[str, tuple[str, dict[str, Any], list[int], str]] = {
    "betas": ("AdamW", {"lr": 0.01, "betas": (torch.tensor(0.9), torch.tensor(0.99))}, [0, 1], "betas are tensors"),
    "listed twice": ("SGD", {"lr": 0.1, "momentum": 0.9}, [0, 1, 0], "listed twice"),
    "gradients": ("SGD", {"lr": 0.1, "momentum": 0.9}, [0, 1], "a gradient of class _Gradient"),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, [0, 1], "fused"),
}


@requirement(
    "OPT-479",
    "Betas that are tensors, a parameter that is listed twice and a gradient of a class of its own MUST be left to "
    "torch, and nesterov without weight decay MUST NOT be where it maximizes; all with torch's bits.",
    needs=FUSED,
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no multiply-add here")
@pytest.mark.parametrize("name", sorted(_LEFT_OR_TAKEN))
def test_left_or_taken(offload: Any, name: str) -> None:
    kind, options, listed, word = _LEFT_OR_TAKEN[name]
    place, given = Place(torch.device("cpu"), InlineEngine("cpu")), [values((8, 16), 0), values((64,), 1)]
    twins = Twins(offload, place, kind, given, options=options, groups=[(listed, {})], fused_update=True, chunk_bytes=0)
    for number in range(3):
        twins.set_gradients()
        if name == "gradients":
            for arm in (twins.plain_params, twins.params):
                arm[0].grad = values((8, 16), number).as_subclass(_Gradient)
        twins.plain.step()
        with succeeds("a step", where=f"{name}, step {number}"):
            twins.optimizer.step()
        twins.check()
        # In the first step torch makes the states.
        (update,) = twins.offloader.stats().updates
        assert_equal(word in update, number > 0 or word not in ("fused", "listed twice"), where=f"{number}: {update}")
    twins.offloader.close()


@requirement(
    "OPT-480",
    "On a device whose backend is written in Python the kernel MUST update as elsewhere, and leave a group to torch, "
    "bit for bit, while its counters lie on the device.",
    needs=FUSED,
)
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_counters_on_the_device(offload: Any, kind: str) -> None:
    with proven_on("pretend") as place:
        twins = Twins(offload, place, kind, options={"lr": 0.01}, fused_update=True)
        for _ in range(2):
            twins.step()
        assert_equal(twins.offloader.stats().updates, ("fused",), where=f"update of {kind}")
        saved = twins.offloader.snapshot()
        twins.plain.load_state_dict(saved)
        with torch.no_grad():
            for plain, param in zip(twins.plain_params, twins.params, strict=True):
                plain.copy_(param)
        for optimizer in (twins.plain, twins.optimizer):
            for state in optimizer.state.values():
                state["step"] = state["step"].to(place.engine.device)
        twins.step()
        update = twins.offloader.stats().updates[0]
        assert_equal("a counter that is not on the host" in update, True, where=update)
        twins.check()
        twins.offloader.close()


def _missing(*_: Any, **__: Any) -> None:
    raise RuntimeError("an operator of a library that was not built")


@requirement(
    "OPT-481",
    "Where no library was built, steps MUST be torch's on the device and the formula's on the CPU, bit for bit, with "
    "none of its operators called, and stats() MUST say that there is no library.",
    needs=FUSED,
)
@pytest.mark.parametrize("name", ["device", "cpu", "cpu with masters"])
def test_without_a_library(offload: Any, name: str) -> None:
    from fastimpl import ops

    operators: dict[str, Any] = dict.fromkeys(("adam_step", "pack", "slot_step", "unpack"), _missing)
    with mock.patch.multiple(ops, available=lambda: False, **operators), proven() as device:
        arm: Any = None
        with succeeds("an attachment and steps", where=f"no library, {name}"):
            if name == "device":
                arm = Twins(offload, device, "AdamW", fused_update=True)
            else:
                arm = CpuArm(offload, device, halves=name != "cpu")
            for number in range(3):
                arm.step(skip=(1,) if number == 1 else ())
                arm.offloader.prefetch()
        arm.check()
        if name == "device":
            assert_equal(arm.offloader.stats().updates, ("torch: no library",), where="updates")
        with succeeds("close()", where=f"no library, {name}"):
            arm.offloader.close()


@requirement(
    "OPT-482",
    "Unless it is asked for, the kernel MUST NOT update on CUDA under a release of torch whose order of operations was "
    "not read, and stats() MUST name the release.",
    needs=FUSED,
)
@pytest.mark.parametrize("wanted", [None, True])
@pytest.mark.parametrize("release", ["2.10.0", "2.99.1+cu140"])
def test_releases_that_were_not_read(offload: Any, release: str, wanted: bool | None) -> None:
    from fastimpl.offload.slot_step import SlotUpdates

    plan: Any = SimpleNamespace(
        options=SimpleNamespace(fused_update=wanted), engine=SimpleNamespace(device=torch.device("cuda"))
    )
    with mock.patch.object(torch, "__version__", release):
        found = SlotUpdates(plan)._why_nowhere()
    assert_equal(f"torch {release} was not read" in found, wanted is None, where=f"{wanted}: {found!r}")


class _Masked(Factored):
    """With a sparse state, which is none that has a place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["mask"] = (state["row"] > 0.9).float().to_sparse()


@requirement(
    "OPT-483",
    "A sparse state MUST stay on the device with its values, through steps and through loads, the optimizer's own and "
    "the offloader's, while those beside it move: of an optimizer that makes it, and of one of torch's that has it.",
)
@pytest.mark.parametrize("loads", [None, "optimizer", "offloader"])
@pytest.mark.parametrize("kind", [_Masked, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
def test_sparse_states(offload: Any, kind: Any, loads: str | None) -> None:
    arms = [[torch.nn.Parameter(values((4, 6), i)) for i in range(2)] for _ in range(2)]
    plain, optimizer = (kind(params, lr=0.1) for params in arms)
    if kind is not _Masked:
        for each in (plain, optimizer):
            for number, state in enumerate(each.state.values()):
                state["mask"] = values((4,), number).to_sparse()
    offloader = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"))
    for number in range(3):
        for params in arms:
            for i, param in enumerate(params):
                param.grad = values((4, 6), 10 * number + i)
        plain.step()
        with succeeds("a step", where=f"{kind.__name__}, step {number}"):
            optimizer.step()
        if loads is not None:
            saved = offloader.snapshot()
            with succeeds("a load", where=f"{loads}.load_state_dict of a sparse state"):
                (offloader if loads == "offloader" else optimizer).load_state_dict(saved)
        assert_equal(offloader.residency().device_bytes, 0, where="bytes of states that move, on the device")
        found, expected = offloader.snapshot()["state"], plain.state_dict()["state"]
        for i, (mine, theirs) in enumerate(zip(*reversed(arms), strict=True)):
            assert_same_tensor(mine.detach(), theirs.detach(), where=f"parameter {i} of step {number}")
            assert_equal(sorted(found[i]), sorted(expected[i]), where=f"states of parameter {i}")
            for name, value in expected[i].items():
                assert_equal(found[i][name].layout, value.layout, where=f"layout of {name}")
                assert_same_tensor(found[i][name].to_dense(), value.to_dense(), where=f"{name} of parameter {i}")
    offloader.close()


@requirement(
    "OPT-485",
    "A state that is the optimizer's own, under a key of any kind, MUST be loaded: by one that is none of torch's "
    "whether it has it already or not, and by one of torch's that has it.",
)
@pytest.mark.parametrize("key", ["own", ("own", 1), None])
@pytest.mark.parametrize("kind", [Factored, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
def test_own_states(offload: Any, kind: Any, key: Any) -> None:
    optimizer = kind([torch.nn.Parameter(values((4, 6), 0))], lr=0.1)
    offloader = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"))
    saved = offloader.snapshot()
    saved["state"][key] = {"count": 3}
    if kind is not Factored:
        optimizer.state[key] = {"count": 1}
    with succeeds("a load", where=f"{kind.__name__}, own state under {key!r}"):
        offloader.load_state_dict(saved)
    assert_equal(optimizer.state[key], {"count": 3}, where=f"own state of {kind.__name__} under {key!r}")
    offloader.close()
