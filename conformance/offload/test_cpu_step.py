"""Steps on the CPU: the formula's bits, torch's accuracy, what moves, and what is refused."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import (
    assert_equal,
    assert_le,
    assert_same_tensor,
    assert_within_derived,
    raises,
    requirement,
    succeeds,
)
from conformance.offload.cases import (
    CPU_OPTIONS,
    SHAPES,
    CpuArm,
    Place,
    Twins,
    assert_same_state,
    in_host_memory,
    proven,
    proven_on,
    reread,
    values,
)
from refimpl.optimizers import adam_step
from twinproof.errors import ConfigError, OffloadConflictError, UnsupportedError
from twinproof.optimizers import AdamHyper


@requirement("OPT-201", "A step on the CPU MUST have the bits of the formula, in masters, states and parameters.")
@pytest.mark.parametrize("options", CPU_OPTIONS)
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "masters"])
def test_bits(offload: Any, device: str, options: str, halves: bool) -> None:
    for chunk_bytes, slots in ((4096, 2), (1, 3), (0, 1)):
        with proven_on(device, late=True) as place:
            arm = CpuArm(offload, place, options, halves=halves, chunk_bytes=chunk_bytes, slots=slots)
            for number in range(3):
                arm.step(skip=(1,) if number == 1 else ())
                arm.check()
            if not isinstance(arm.options.get("lr"), torch.Tensor):
                arm.optimizer.param_groups[0]["lr"] = 0.5
            arm.step()
            arm.check()
            arm.offloader.close()


@requirement("OPT-202", "Steps on the CPU MUST err at most twice as much as torch's AdamW, against float64.")
@pytest.mark.parametrize("options", ["adamw", "adam", "amsgrad"])
def test_accuracy(offload: Any, options: str) -> None:
    kind, chosen = CPU_OPTIONS[options]
    with proven() as device:
        twins = Twins(offload, device, kind, options=chosen, step_device="cpu")
        wide = [torch.nn.Parameter(param.detach().double()) for param in twins.plain_params]
        exact = getattr(torch.optim, kind)(wide, foreach=False, **chosen)
        for _ in range(8):
            twins.set_gradients()
            for param, plain in zip(wide, twins.plain_params, strict=True):
                assert plain.grad is not None
                param.grad = plain.grad.double()
            for optimizer in (twins.plain, twins.optimizer, exact):
                optimizer.step()
        twins.offloader.settle()
        with _disable_current_modes():
            for i, (param, plain, true) in enumerate(zip(twins.params, twins.plain_params, wide, strict=True)):
                assert_within_derived(param.detach(), plain.detach(), true.detach(), where=f"parameter {i}")
        twins.offloader.close()


@requirement(
    "OPT-203", "A step on the CPU MUST move each gradient down and each weight up, and no state; states stay there."
)
def test_bytes(offload: Any) -> None:
    # Multiples of the alignment, so that no padding is counted.
    shapes = ((16, 16), (128,), (8, 64))
    for halves in (False, True):
        with proven() as device:
            arm = CpuArm(offload, device, halves=halves, shapes=shapes, chunk_bytes=0)
            arm.step()
            before = dict(device.engine.moved_bytes)
            arm.step()
            moved = {way: device.engine.moved_bytes[way] - before[way] for way in ("d2h", "h2d")}
            elements = sum(param.numel() for param in arm.params)
            # bfloat16: a gradient down, a weight up. float32 without masters: the weight comes down as well.
            expected = {"d2h": elements * (2 if halves else 8), "h2d": elements * (2 if halves else 4)}
            assert_equal(moved, expected, where=f"bytes moved, masters {halves}")
            residency = arm.offloader.residency()
            states = elements * (12 if halves else 8)
            assert_equal((residency.device_bytes, residency.host_bytes), (0, states), where="residency")
            arm.offloader.close()


@requirement("OPT-204", "What a step on the CPU cannot do MUST be refused at attachment, with what is wrong named.")
def test_refusals(offload: Any, device: str) -> None:
    def attach(optimizer: torch.optim.Optimizer, **options: Any) -> None:
        offload.OptimizerStateOffloader(optimizer, engine=place.engine, step_device="cpu", **options)

    with proven_on(device) as place:
        params = [torch.nn.Parameter(values((4, 4), 0))]
        halves = [torch.nn.Parameter(values((4, 4), 0, torch.bfloat16))]
        with raises(UnsupportedError, mentions=("SGD", "step_device")):
            attach(torch.optim.SGD(params, lr=0.1))
        for option in ("capturable", "differentiable", "fused"):
            optimizer = torch.optim.AdamW(params, foreach=False)
            optimizer.param_groups[0][option] = True
            with raises(ConfigError, mentions=(option, "step_device")):
                attach(optimizer)
            assert_equal("step" in vars(optimizer), False, where="step taken over")
        with raises(ConfigError, mentions=("bfloat16", "master_weights")):
            attach(torch.optim.AdamW(halves))
        wrapper: Any = SimpleNamespace(optimizer=torch.optim.AdamW(params), fp32_from_float16_groups=[params])
        for masters, told in ((None, "None"), (offload.MasterWeights(halves), "given")):
            said = ("masters itself", "step_device='cpu'", f"master_weights={told}")
            with raises(ConfigError, mentions=said, where=f"a wrapper with masters, master_weights {told}"):
                attach(wrapper, master_weights=masters)
        optimizer = torch.optim.AdamW(params)
        attach(optimizer)
        with raises(OffloadConflictError, mentions=("AdamW", "OptimizerStateOffloader")):
            attach(optimizer)


@requirement("OPT-205", "A gradient that the CPU cannot step with MUST be refused before anything of the step changes.")
def test_refused_gradients(offload: Any) -> None:
    with proven() as device:
        arm = CpuArm(offload, device)
        arm.step()
        before = arm.offloader.snapshot()
        for i, param in enumerate(arm.params):
            param.grad = values(param.shape, i)
        with _disable_current_modes():
            arm.params[3].grad = values(SHAPES[3], 3).to_sparse()
        with raises(UnsupportedError, mentions=("gradient",)):
            arm.optimizer.step()
        after = arm.offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(after, before)
        arm.check()
        arm.step()
        arm.check()
        arm.offloader.close()


@requirement(
    "OPT-425",
    "A step on the CPU that is refused MUST change nothing where some parameters are stepped by torch, neither these "
    "nor the others, whichever parameter is at fault.",
)
@pytest.mark.parametrize("fault", ["state", "loaded state", "gradient"])
def test_refused_beside_others(offload: Any, fault: str) -> None:
    params = [values((64,), i) for i in range(4)]
    place = Place(torch.device("cpu"), None)
    twins = Twins(offload, place, "AdamW", params, options={"lr": 0.1}, step_device="cpu", fraction=0.5)
    twins.step()
    ours = {id(bundle.param) for bundle in twins.offloader.bundles}
    selected = [i for i, param in enumerate(twins.params) if id(param) in ours]
    assert_equal(0 < len(selected) < 4, True, where=f"parameters that are stepped here: {selected}")
    for i in selected:
        before = twins.offloader.snapshot()
        kept = twins.optimizer.state[twins.params[i]]["exp_avg"]
        twins.set_gradients()
        if fault == "state":
            twins.optimizer.state[twins.params[i]]["exp_avg"] = kept.bfloat16()
        elif fault == "loaded state":
            spoilt = twins.offloader.snapshot()
            spoilt["state"][i]["exp_avg"] = spoilt["state"][i]["exp_avg"].bfloat16()
            twins.offloader.load_state_dict(spoilt)
            assert_equal(
                twins.optimizer.state[twins.params[i]]["exp_avg"].dtype, torch.bfloat16, where="what is loaded"
            )
        else:
            twins.params[i].grad = values((64,), i).to_sparse()
        weights = [param.detach().clone() for param in twins.params]
        with raises(UnsupportedError, where=f"the {fault} of parameter {i}"):
            twins.optimizer.step()
        for j, (param, weight) in enumerate(zip(twins.params, weights, strict=True)):
            assert_same_tensor(param.detach(), weight, where=f"parameter {j} after a refused step of {i}")
        if fault == "loaded state":
            assert_same_state(twins.offloader.snapshot(), spoilt)
            twins.offloader.load_state_dict(before)
        else:
            twins.optimizer.state[twins.params[i]]["exp_avg"] = kept
        assert_same_state(twins.offloader.snapshot(), before)
    twins.offloader.close()


@requirement(
    "OPT-206",
    "States of steps on the CPU MUST be those of the plain optimizer: it goes on after close, or from a load.",
)
def test_exchange(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, step_device="cpu")
        twins.set_gradients()
        twins.optimizer.step()
        state = twins.offloader.snapshot()
        with torch.no_grad():
            for plain, param in zip(twins.plain_params, twins.params, strict=True):
                plain.copy_(param)
        twins.plain.load_state_dict(reread(state))
        twins.offloader.close()
        # Both are plain now.
        twins.step()
        got = twins.optimizer.state_dict()
        with _disable_current_modes():
            assert_same_state(got, twins.plain.state_dict())
            for i, (plain, param) in enumerate(zip(twins.plain_params, twins.params, strict=True)):
                assert_same_tensor(param.detach(), plain.detach(), where=f"parameter {i}")
    with proven_on(device) as place:
        arm, other = CpuArm(offload, place), CpuArm(offload, place)
        arm.step()
        state = arm.offloader.snapshot()
        other.offloader.load_state_dict(state)
        with torch.no_grad():
            for mine, theirs in zip(other.params, arm.params, strict=True):
                mine.copy_(theirs)
        other.weights, other.moments, other.counts = arm.weights, arm.moments, arm.counts
        other.step_count = 1
        other.step()
        other.check()
        other.offloader.close()
        arm.offloader.close()


@requirement("OPT-207", "A float32 parameter that was written between steps MUST be stepped from what was written.")
def test_written_parameters(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arm = CpuArm(offload, place)
        arm.step()
        written = values(SHAPES[2], 55)
        with torch.no_grad():
            arm.params[2].copy_(written)
        arm.params[0].data = values(SHAPES[0], 56)
        with _disable_current_modes():
            arm.weights[2].copy_(written)
            arm.weights[0].copy_(values(SHAPES[0], 56))
        arm.step()
        arm.check()
        arm.offloader.close()


@requirement("OPT-208", "With a fraction, what is not selected MUST be stepped on the device by the plain optimizer.")
def test_fraction(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, options={"lr": 0.01}, step_device="cpu", fraction=0.4)
        chosen = {id(bundle.param) for bundle in twins.offloader.bundles}
        rest = [i for i, param in enumerate(twins.params) if id(param) not in chosen]
        assert_equal(0 < len(rest) < len(twins.params), True, where="some are selected")
        for _ in range(2):
            twins.step()
        twins.offloader.settle()
        with _disable_current_modes():
            for i in rest:
                assert_same_tensor(twins.params[i].detach(), twins.plain_params[i].detach(), where=f"parameter {i}")
            for i, (param, plain) in enumerate(zip(twins.params, twins.plain_params, strict=True)):
                torch_moved = (plain.detach() - values(SHAPES[i], i)).abs().max()
                moved = (param.detach() - values(SHAPES[i], i)).abs().max()
                assert_equal(bool(moved > torch_moved / 2), True, where=f"parameter {i} was stepped")
        twins.offloader.close()


@requirement("OPT-209", "On parameters that are on the CPU, step_device='cpu' MUST work without an engine.")
def test_cpu_parameters(offload: Any) -> None:
    param = torch.nn.Parameter(values((33, 7), 1))
    weight, first, second = param.detach().clone(), torch.zeros(33, 7), torch.zeros(33, 7)
    optimizer = torch.optim.AdamW([param], lr=0.1)
    with offload.OptimizerStateOffloader(optimizer, step_device="cpu"):
        for number in range(1, 4):
            param.grad = values((33, 7), number + 10)
            optimizer.step()
            hyper = AdamHyper.of(
                lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=number, decoupled=True
            )  # fmt: skip
            adam_step(hyper, param.grad, weight, first, second)
            assert_same_tensor(param.detach(), weight, where=f"after {number} steps")


@requirement(
    "OPT-581",
    "A step on the CPU MUST count in float32 as torch does, and correct its averages by that count, also where the "
    "count no longer moves, at 2**24.",
)
def test_counts_of_float32(offload: Any) -> None:
    # Of these betas the corrections of neighbours of 2**24 differ in float32.
    betas, first_step = (0.9, 1 - 2.0**-26), (1 << 24) - 3
    param = torch.nn.Parameter(values((33, 7), 1))
    weight, first, second = param.detach().clone(), torch.zeros(33, 7), torch.zeros(33, 7)
    optimizer = torch.optim.AdamW([param], lr=0.1, betas=betas)
    with offload.OptimizerStateOffloader(optimizer, step_device="cpu"):
        optimizer.state[param].update(
            step=torch.tensor(float(first_step)), exp_avg=first.clone(), exp_avg_sq=second.clone()
        )
        for number in range(first_step + 1, first_step + 7):
            param.grad = values((33, 7), number)
            optimizer.step()
            count = min(number, 1 << 24)
            hyper = AdamHyper.of(lr=0.1, betas=betas, eps=1e-8, weight_decay=0.01, step=count, decoupled=True)
            adam_step(hyper, param.grad, weight, first, second)
            assert_equal(float(optimizer.state[param]["step"]), float(count), where=f"the count of step {number}")
            assert_same_tensor(param.detach(), weight, where=f"after step {number}")


@requirement("OPT-210", "Steps on the CPU MUST be right in any order that their edges allow, with any number of slots.")
def test_edges(offload: Any, device: str) -> None:
    for halves, slots, seed in ((False, 1, None), (True, 2, 1), (False, 2, None), (True, 3, 2)):
        with proven_on(device, late=True, seed=seed) as place:
            arm = CpuArm(offload, place, halves=halves, chunk_bytes=1, slots=slots)
            for _ in range(3):
                arm.step()
            arm.check()
            arm.offloader.close()


# Another value of each option of torch's Adam and AdamW.
_OTHER: dict[str, Any] = {
    "lr": 0.05,
    "betas": (0.5, 0.7),
    "eps": 0.3,
    "weight_decay": 0.4,
    "amsgrad": True,
    "maximize": True,
    "decoupled_weight_decay": True,
    "foreach": True,
    "capturable": True,
    "differentiable": True,
    "fused": True,
}


@requirement(
    "OPT-388",
    "A step on the CPU MUST take every option of torch's Adam and AdamW as torch takes it, given to the optimizer or "
    "to one of its groups, or refuse it by name: none may be without effect.",
)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("in_group", [False, True], ids=["all", "a group"])
def test_every_option(offload: Any, kind: str, in_group: bool) -> None:
    names = set(inspect.signature(getattr(torch.optim, kind)).parameters) - {"params"}
    assert_equal(sorted(names - set(_OTHER)), [], where=f"options of {kind} that are not known here")
    for name in sorted(names):
        value = {name: _OTHER[name]}
        groups = [([0, 1], {}), ([2, 3], value if in_group else {})]
        # A square that decays fast is less than its largest value soon.
        options = {"weight_decay": 0.2, "betas": (0.9, 0.6), **({} if in_group else value)}
        # Parameters on the CPU need no device.
        attach = partial(
            Twins, offload, Place(torch.device("cpu"), None), kind, groups=groups, options=options, step_device="cpu"
        )
        if name in ("capturable", "differentiable", "fused"):
            with raises(ConfigError, mentions=(name, "step_device")):
                attach()
            continue
        twins = attach()
        for _ in range(3):
            twins.step()
        for i, (param, plain) in enumerate(zip(twins.params, twins.plain_params, strict=True)):
            error = float((param.detach() - plain.detach()).abs().max())
            assert_le(error, 1e-5, where=f"{value}, parameter {i}: distance from torch's step")
        twins.offloader.close()


@requirement(
    "OPT-421",
    "Groups of one chunk that differ in one option MUST each be stepped on the CPU with their own.",
)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_groups_of_one_chunk(offload: Any, kind: str) -> None:
    refused = ("capturable", "differentiable", "fused")
    for name, value in sorted(_OTHER.items()):
        if name in refused or name not in inspect.signature(getattr(torch.optim, kind)).parameters:
            continue
        groups = [([0, 2], {name: value}), ([1, 3], {}), ([4], {name: value})]
        options = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.9, 0.6)}
        params = [values(shape, seed) for seed, shape in enumerate(((3, 5), (7,), (64,), (8, 8), (5,)))]
        place = Place(torch.device("cpu"), None)
        attached = partial(Twins, offload, place, kind, params, groups=groups, options=options)
        twins = attached(step_device="cpu", chunk_bytes=1 << 20)
        with succeeds("three steps", where=f"{name}={value} in two of three groups"):
            for _ in range(3):
                twins.step()
        for i, (param, plain) in enumerate(zip(twins.params, twins.plain_params, strict=True)):
            error = float((param.detach() - plain.detach()).abs().max())
            assert_le(error, 1e-5, where=f"{name}={value}, parameter {i}: distance from torch's step")
        twins.offloader.close()


@requirement(
    "OPT-299",
    "States that a user binds in another memory format than the parameter's MUST be stepped with the formula's bits.",
)
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "masters"])
def test_other_formats(offload: Any, halves: bool) -> None:
    shapes = ((3, 5), (2, 3, 4, 5), (7,))
    with proven() as device:
        arm = CpuArm(offload, device, halves=halves, shapes=shapes)
        arm.step()
        for param in arm.optimizer.param_groups[0]["params"]:
            state = arm.optimizer.state[param]
            for name in ("exp_avg", "exp_avg_sq"):
                with _disable_current_modes():
                    turned = state[name].movedim(0, -1).contiguous()
                # The dimensions lie in memory from the first to the last.
                state[name] = in_host_memory(device, turned).movedim(-1, 0)
        for _ in range(2):
            arm.step()
            arm.check()
        arm.offloader.close()


def _with_steps_of_one(value: torch.Tensor, step: int) -> torch.Tensor:
    """The same memory, with this stride in each dimension of one element, where a stride means nothing."""
    with _disable_current_modes():
        strides = [step if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)]
        return value.as_strided(value.shape, strides, value.storage_offset())


@requirement(
    "OPT-374",
    "What stride a dimension of one element has, in parameters, gradients or states, MUST NOT matter to a step on the "
    "CPU.",
)
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "masters"])
def test_strides_of_one(offload: Any, device: str, halves: bool) -> None:
    shapes = ((1, 6), (6, 1), (3, 1, 4), (2, 3, 1, 1))
    for given, bound in ((1, 1), (7, 1), (1, 5), (5, 7)):
        with proven_on(device) as place:
            laid = partial(_with_steps_of_one, step=given)
            arm = CpuArm(offload, place, halves=halves, shapes=shapes, laid=laid)
            with succeeds("a step", where=f"strides {given} of parameters, {bound} of states"):
                arm.step()
                for state in arm.optimizer.state.values():
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = _with_steps_of_one(state[name], bound)
                arm.step()
            arm.check()
            arm.offloader.close()


@requirement(
    "OPT-434",
    "A parameter that a group lists twice, which torch steps twice, MUST be refused where the CPU steps.",
)
def test_listed_twice(offload: Any) -> None:
    param, other = (torch.nn.Parameter(values((4, 3), seed)) for seed in (1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = torch.optim.AdamW([param, other, param], lr=0.1)
    with raises(ConfigError, mentions=("once", "group 0"), where="a parameter listed twice"):
        offload.OptimizerStateOffloader(optimizer, step_device="cpu")


@requirement(
    "OPT-455",
    "A parameter of another dtype than float32, which the CPU does not step, MUST be refused by name wherever it "
    "stands: in any place of any group, and in a group that is added later.",
)
def test_other_dtypes_anywhere(offload: Any) -> None:
    for dtype, place in product((torch.bfloat16, torch.float64), range(4)):
        params = [torch.nn.Parameter(values((2, 3), seed)) for seed in range(4)]
        params[place] = torch.nn.Parameter(params[place].detach().to(dtype))
        groups, where = [{"params": params[:3]}, {"params": params[3:]}], f"{dtype} at {place}"
        told = (str(dtype), "master_weights", f"group {place // 3}")
        with raises(ConfigError, mentions=told, where=where):
            offload.OptimizerStateOffloader(torch.optim.AdamW(groups), step_device="cpu")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(values((2, 3), 1))])
    offloader = offload.OptimizerStateOffloader(optimizer, step_device="cpu")
    late = [torch.nn.Parameter(values((2, 3), 2)), torch.nn.Parameter(values((2, 3), 3).bfloat16())]
    optimizer.add_param_group({"params": late})
    kept = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    with raises(ConfigError, mentions=("torch.bfloat16", "group 1"), where="a group that was added"):
        optimizer.step()
    for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        assert_same_tensor(param.detach(), kept[number], where=f"parameter {number} of a refused step")
    offloader.close()
