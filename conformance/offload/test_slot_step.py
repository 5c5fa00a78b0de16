"""The update of a chunk in its slot by one kernel: torch's bits on CUDA, and torch's own step for all else."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, examples, raises, requirement, succeeds
from conformance.offload.cases import (
    BLOCK_ELEMENTS,
    FUSED,
    SHAPES,
    Twins,
    assert_same_numbers,
    in_host_memory,
    proven,
    values,
)
from conformance.offload.foreach import foreach_step
from conformance.provers.virtual_device import VirtualDevice

ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-40, 3.3e38, 1e-20)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Name, options: every kind of update, and every flag of each.
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "momentum-max": ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "adam": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adam-max": ("Adam", {"lr": 0.02, "maximize": True, "betas": (0.3, 0.0)}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adam-decoupled": ("Adam", {"lr": 0.02, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    "amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "eps": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01}),
    "adagrad-max": ("Adagrad", {"maximize": True, "initial_accumulator_value": 0.25}),
}
_STATES = {
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adagrad": ("sum",),
}


# Numbers at which a formula takes its other form.
TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam-half": ("Adam", {"lr": 0.02, "betas": (0.5, 0.95)}),
    "adam-above": ("Adam", {"lr": 0.02, "betas": (0.5000001, 0.95)}),
    "adam-whole": ("AdamW", {"lr": 0.02, "betas": (0.0, 0.0)}),
    "adagrad-eps": ("Adagrad", {"lr": 0.1, "eps": 0.03}),
    "adam-eps": ("Adam", {"lr": 0.02, "eps": 0.03}),
    "sgd-whole": ("SGD", {"lr": 1.0, "momentum": 1.0, "nesterov": True}),
}


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """Optimizer and complete options, as a group has them."""
    kind, given_options = {**COVERED, **TURNS}[name]
    group = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], **given_options).param_groups[0]
    return kind, {key: value for key, value in group.items() if key != "params"}


def _state_names(kind: str, options: dict[str, Any]) -> tuple[str, ...]:
    if kind == "SGD" and not options["momentum"]:
        return ()
    return _STATES[kind] if options.get("amsgrad") or kind in ("SGD", "Adagrad") else _STATES[kind][:2]


def _numbers(count: int, dtype: torch.dtype, seed: int, *, positive: bool = False) -> torch.Tensor:
    made = values((count,), seed)
    for position, odd in enumerate(ODD if count > 20 else ()):
        made[(7 * position + 3 * seed) % count] = odd
    return (made.abs() if positive else made).to(dtype)


def _call(name: str, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A parameter, its gradient, and the states of an optimizer, with odd values in all of them."""
    names = _state_names(*_options(name))
    states = {key: _numbers(count, dtype, 3 + i, positive=i > 0 or key == "sum") for i, key in enumerate(names)}
    return _numbers(count, dtype, 1), _numbers(count, dtype, 2), states


def _step(name: str, param: Any, grad: Any, states: dict[str, torch.Tensor], step: int) -> None:
    from fastimpl import ops
    from fastimpl.offload.slot_step import KINDS, hyper_of

    ops.available()
    kind, options = _options(name)
    code = {"SGD": "momentum" if states else "sgd", "Adagrad": "adagrad"}.get(kind, "adam")
    code = "amsgrad" if options.get("amsgrad") else code
    lists = [[state] for state in states.values()] + [[]] * (3 - len(states))
    decoupled = options.get("decoupled_weight_decay", False)
    ops.slot_step(KINDS[code][0], [param], [grad], lists, [0], hyper_of(code, options, step, decoupled=decoupled))


@requirement(
    "OPT-272",
    "An update in a slot MUST have the roundings of torch's foreach path on CUDA, of all dtypes and values.",
    needs=FUSED,
)
@examples(80)
@given(
    name=st.sampled_from(sorted(COVERED)),
    count=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    step=st.sampled_from([1, 2, 1000]),
)
def test_bits(offload: Any, name: str, count: int, dtype: torch.dtype, step: int) -> None:
    kind, options = _options(name)
    expected, grad, theirs = _call(name, count, dtype)
    state: dict[str, Any] = {**theirs, "step": step - 1}
    foreach_step(kind, options, expected, grad, state)
    param, grad, states = _call(name, count, dtype)
    _step(name, param, grad, states, step)
    assert_same_numbers(param, expected, where=f"parameter of {name}")
    for key, value in states.items():
        assert_same_numbers(value, state[key], where=f"{key} of {name}")


@requirement(
    "OPT-366",
    "An update in a slot MUST have these roundings too at the numbers where a formula takes its other form, and in "
    "every element of a parameter that is larger than what a thread takes at a time.",
    needs=FUSED,
)
@pytest.mark.parametrize(
    ("name", "count"), [*((name, 200) for name in TURNS), ("adam", BLOCK_ELEMENTS + 1), ("sgd", 2 * BLOCK_ELEMENTS + 1)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_turns(offload: Any, name: str, count: int, dtype: torch.dtype) -> None:
    kind, options = _options(name)
    expected, grad, theirs = _call(name, count, dtype)
    state: dict[str, Any] = {**theirs, "step": 1}
    foreach_step(kind, options, expected, grad, state)
    param, grad, states = _call(name, count, dtype)
    _step(name, param, grad, states, 2)
    assert_same_numbers(param, expected, where=f"parameter of {name}, {count} elements")
    for key, value in states.items():
        assert_same_numbers(value, state[key], where=f"{key} of {name}, {count} elements")


@requirement("OPT-273", "Neither threads nor vectors MUST change a bit of an update in a slot.", needs=FUSED)
def test_threads(offload: Any) -> None:
    before = torch.get_num_threads()
    found: list[list[torch.Tensor]] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            param, grad, states = _call("amsgrad", 200_001, torch.bfloat16)
            _step("amsgrad", param, grad, states, 2)
            found.append([param, *states.values()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert_same_tensor(mine.view(torch.int16), first.view(torch.int16), where="bits")


class _Groups:
    """An offloaded optimizer of two groups, and what its chunks have to become."""

    def __init__(self, offload: Any, device: Any, name: str, *, halves: bool = False, **more: Any) -> None:
        self.kind, options = COVERED[name]
        dtype = torch.bfloat16 if halves else torch.float32
        self.params = [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate((*SHAPES, (5, 3)))]
        self.masters = offload.MasterWeights(self.params) if halves else None
        stepped = list(self.masters.parameters()) if self.masters is not None else self.params
        groups = [{"params": stepped[:2]}, {"params": stepped[2:], "lr": 0.05, "weight_decay": 0.2}]
        self.optimizer = getattr(torch.optim, self.kind)(groups, **options)
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer,
            engine=device.engine,
            master_weights=self.masters,
            **{"chunk_bytes": 2048, "fused_update": True, **more},
        )
        self.step_count = 0

    def set_gradients(self, skip: tuple[int, ...] = ()) -> None:
        self.step_count += 1
        for i, param in enumerate(self.params):
            param.grad = None if i in skip else values(param.shape, 1000 * self.step_count + i, param.dtype)

    def look(self) -> list[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
        """(options, weight, state) of every parameter, copied, the counter as a number."""
        snapshot = self.offloader.snapshot()
        found: list[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]] = []
        with _disable_current_modes():
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = {
                        key: value.clone() if value.dim() else float(value)
                        for key, value in snapshot["state"].get(len(found), {}).items()
                    }
                    found.append((group, param.detach().clone(), state))
        return found

    def step(self, skip: tuple[int, ...] = ()) -> None:
        """One step, and the bits that it must have."""
        self.set_gradients(skip)
        grads = [None if p.grad is None else p.grad.detach().float().clone() for p in self.params]
        before = self.look()
        self.optimizer.step()
        after = self.look()
        with _disable_current_modes():
            for i, (grad, (options, weight, state)) in enumerate(zip(grads, before, strict=True)):
                if grad is not None:
                    foreach_step(self.kind, options, weight, grad, state)
                where = f"parameter {i} in step {self.step_count}"
                assert_same_tensor(after[i][1], weight, where=where)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        assert_same_tensor(after[i][2][key], value, where=f"{key} of {where}")
                    else:
                        assert_equal(after[i][2][key], value, where=f"{key} of {where}")
                if self.masters is not None:
                    assert_same_tensor(self.params[i].detach(), weight.to(torch.bfloat16), where=f"rounded {where}")


@requirement(
    "OPT-274",
    "Chunks that one kernel updates MUST have its bits in every group, by that group's numbers, without a hazard.",
    needs=FUSED,
)
@pytest.mark.parametrize(
    ("name", "halves"), [(n, h) for n in sorted(COVERED) for h in (False, True) if h or n != "sgd"]
)
def test_chunks(offload: Any, name: str, halves: bool) -> None:
    with proven() as device:
        groups = _Groups(offload, device, name, halves=halves)
        groups.set_gradients()
        groups.optimizer.step()
        for skip in ((), (1,), ()):
            groups.step(skip)
            assert_equal(groups.offloader.stats().updates, ("fused", "fused"), where="updates")
        # A schedule changes numbers between steps.
        groups.optimizer.param_groups[1]["lr"] = 0.3
        groups.step()
        groups.offloader.close()


@requirement(
    "OPT-275",
    "Chunks that one kernel updates MUST have the same bits when copies run as late as their edges allow.",
    needs=FUSED,
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_late_copies(offload: Any, seed: int | None) -> None:
    with VirtualDevice(late=True, seed=seed) as device:
        groups = _Groups(offload, device, "adamw", chunk_bytes=512)
        groups.set_gradients()
        groups.optimizer.step()
        for _ in range(3):
            groups.offloader.prefetch()
            groups.step()
    device.check()


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@requirement(
    "OPT-276",
    "A chunk MUST be updated by one call, whatever the number of its parameters and groups, and no chunk by two.",
    needs=FUSED,
)
@pytest.mark.parametrize("chunk_bytes", [0, 2048, 1])
def test_one_call_a_chunk(offload: Any, chunk_bytes: int) -> None:
    with VirtualDevice() as device:
        groups = _Groups(offload, device, "adamw", chunk_bytes=chunk_bytes)
        groups.set_gradients()
        groups.optimizer.step()
        groups.set_gradients()
        with _Calls() as calls:
            groups.optimizer.step()
        count = groups.offloader.stats().chunk_count
        assert_equal(calls.names.count("offload_slot_step"), count, where="calls")
        assert_equal(calls.names.count("sqrt"), 0, where="torch's own")


# Options of an optimizer that the kernel lacks, and a word of the reason.
_LEFT: dict[str, tuple[str, dict[str, Any], str]] = {
    "another class": ("RMSprop", {}, "RMSprop"),
    "foreach": ("AdamW", {"foreach": False}, "foreach=False"),
    "fused": ("AdamW", {"fused": True}, "fused=True"),
    "not fused": ("AdamW", {"fused": False}, "fused=False"),
    "not fused SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": False}, "fused=False"),
    "tensor-lr": ("AdamW", {"lr": torch.tensor(0.01)}, "lr is a tensor"),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "nesterov"),
}


@requirement(
    "OPT-277",
    "What the kernel does not cover MUST be torch's own step, bit for bit, and stats() MUST give the reason.",
    needs=FUSED,
)
@pytest.mark.parametrize("name", sorted(_LEFT))
def test_left_to_torch(offload: Any, name: str) -> None:
    kind, options, reason = _LEFT[name]
    with proven() as device:
        twins = Twins(offload, device, kind, options=in_host_memory(device, options), fused_update=True)
        for _ in range(3):
            twins.step()
            twins.check()
            (update,) = twins.offloader.stats().updates
            assert_equal((update.startswith("torch: "), reason in update), (True, True), where=update)


@requirement(
    "OPT-278",
    "A parameter that torch's foreach path would not take MUST leave its whole group to torch, bit for bit.",
    needs=FUSED,
)
def test_forms_left_to_torch(offload: Any) -> None:
    scalar, wide = values((3,), 1)[0].clone(), values((4, 6), 2).double()
    for odd, reason in ((scalar, "dimensions"), (wide, "float64")):
        with proven() as device:
            params = [values((4, 6), 3), odd, values((8,), 4)]
            twins = Twins(offload, device, "AdamW", params, groups=[((0, 1), {}), ((2,), {})], fused_update=True)
            for _ in range(2):
                for arm in (twins.plain_params, twins.params):
                    for i, param in enumerate(arm):
                        param.grad = values((24,), 7 * i + 1)[: param.numel()].view(param.shape).to(param.dtype)
                twins.plain.step()
                twins.optimizer.step()
            update = twins.offloader.stats().updates[0]
            assert_equal((update.startswith("torch: "), reason in update), (True, True), where=update)
            with _disable_current_modes():
                for i in (0, 1):
                    assert_same_tensor(twins.params[i].detach(), twins.plain_params[i].detach(), where=f"parameter {i}")
    with proven() as device:
        # Strides that differ from their gradient's.
        twins = Twins(offload, device, "AdamW", [values((4, 6), 1), values((8,), 2)], fused_update=True)
        for _ in range(2):
            twins.set_gradients()
            for arm in (twins.plain_params, twins.params):
                arm[0].grad = values((6, 4), twins.step_count).t()
            twins.plain.step()
            twins.optimizer.step()
        twins.check()
        assert_equal("strides" in twins.offloader.stats().updates[0], True, where="reason")


@requirement(
    "OPT-456",
    "A state whose elements lie in another order than its parameter's, as a load of dense ones leaves it, MUST leave "
    "its group to torch, bit for bit, until they lie alike again.",
    needs=FUSED,
)
@pytest.mark.parametrize("name", ["adagrad", "momentum", "nesterov"])
def test_states_in_another_order(offload: Any, name: str) -> None:
    kind, options = COVERED[name]
    with proven() as device:
        options = in_host_memory(device, options)
        twins = Twins(
            offload, device, kind, [values((6, 4), 1).t(), values((8,), 2)], options=options, fused_update=True
        )
        twins.step()
        states = twins.plain.state_dict()
        for dense in (True, False):
            for optimizer in (twins.plain, twins.optimizer):
                optimizer.load_state_dict(_laid(states, dense=dense))
            for _ in range(2):
                twins.set_gradients()
                for param in (twins.plain_params[0], twins.params[0]):
                    param.grad = _by_columns(param.grad)
                twins.plain.step()
                with succeeds("a step", where=f"{name}, states dense {dense}"):
                    twins.optimizer.step()
                twins.check()
                (update,) = twins.offloader.stats().updates
                assert_equal("another form" in update, dense, where=f"{name}, states dense {dense}: {update}")
            states = twins.plain.state_dict()


def _by_columns(matrix: Any) -> torch.Tensor:
    columns: torch.Tensor = matrix.t().contiguous().t()
    return columns


def _laid(states: dict[str, Any], *, dense: bool) -> dict[str, Any]:
    """A copy of an optimizer's states: matrices in order of rows, or of columns."""
    laid = {
        number: {
            key: value.t().contiguous().t()
            if value.dim() == 2 and not dense
            else value.clone(memory_format=torch.contiguous_format)
            for key, value in state.items()
        }
        for number, state in states["state"].items()
    }
    return {**states, "state": laid}


@requirement(
    "OPT-427",
    "A gradient of another dtype than its parameter's, as torch's grad_dtype allows it, MUST leave its group to torch, "
    "bit for bit.",
    needs=FUSED,
)
@pytest.mark.parametrize("name", ["momentum", "adagrad"])
def test_gradients_of_other_dtypes(offload: Any, name: str) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no grad_dtype")
    kind, options = COVERED[name]
    with proven() as device:
        twins = Twins(offload, device, kind, [values((4, 6), 1), values((8,), 2)], options=options, fused_update=True)
        for param in (*twins.plain_params, *twins.params):
            param.grad_dtype = torch.bfloat16
        for number in range(2):
            for arm in (twins.plain_params, twins.params):
                for i, param in enumerate(arm):
                    param.grad = values(tuple(param.shape), 5 * number + i, torch.bfloat16)
            twins.plain.step()
            with succeeds("a step", where=f"{name} {number}"):
                twins.optimizer.step()
            twins.check()
            (update,) = twins.offloader.stats().updates
            assert_equal((update.startswith("torch: "), "bfloat16" in update), (True, True), where=update)


@requirement(
    "OPT-279",
    "Unless it is asked for, the kernel MUST NOT update where torch rounds otherwise; forbidden, it MUST NOT anywhere.",
    needs=FUSED,
)
@pytest.mark.parametrize("wanted", [None, False])
def test_not_asked_for(offload: Any, wanted: bool | None) -> None:
    with proven() as device:
        twins = Twins(offload, device, "AdamW", fused_update=wanted)
        for _ in range(3):
            twins.step()
            twins.check()
        assert_equal([u.startswith("torch: ") for u in twins.offloader.stats().updates], [True], where="updates")


@requirement(
    "OPT-330",
    "On a GPU the kernel MUST update under the releases of torch whose order of operations was read, the first and the "
    "last among them, and under no other.",
    needs=FUSED,
)
@pytest.mark.parametrize(
    ("release", "is_read"),
    [
        ("2.10.2", False),
        ("2.11.0+cu130", True),
        ("2.12.1", True),
        ("2.13.0+cu130", True),
        ("2.14.0", False),
        ("3.11.0", False),
    ],
)
def test_releases(offload: Any, release: str, is_read: bool) -> None:
    slot_step = importlib.import_module("fastimpl.offload.slot_step")
    assert_equal(slot_step.order_is_read(release), is_read, where=release)


@requirement(
    "OPT-280",
    "Where torch's CPU rounds in the same order, in SGD, an update in a slot MUST have the bits of torch.",
    needs=FUSED,
)
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no multiply-add here")
@pytest.mark.parametrize("name", ["momentum", "nesterov", "momentum-max"])
def test_sgd_of_torch(offload: Any, name: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "SGD", options=COVERED[name][1], fused_update=True)
        for _ in range(4):
            twins.step()
            twins.check()
        assert_equal(twins.offloader.stats().updates, ("fused",), where="updates")


@requirement(
    "OPT-281", "The operator MUST pass torch.library.opcheck, and version counters see its writes.", needs=FUSED
)
def test_opcheck(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    param, grad, states = _call("amsgrad", 30, torch.float32)
    columns = [[state] for state in states.values()]
    numbers = [1.0, 0.0, 0.1, 0.9, 0.1, 1.0, -0.1, 1e-8, 0.0]
    arguments = (3, [param], [grad], *columns, [0], numbers)
    outcome = torch.library.opcheck(torch.ops.twinproof.offload_slot_step.default, arguments, raise_exception=False)
    assert_equal({n: str(r) for n, r in outcome.items() if r != "SUCCESS"}, {}, where="opcheck")
    written = [param, *states.values()]
    before = [tensor._version for tensor in written]
    ops.slot_step(3, [param], [grad], columns, [0], numbers)
    assert_equal([t._version > v for t, v in zip(written, before, strict=True)], [True] * 4, where="versions")


@requirement(
    "OPT-282", "Lists that do not fit each other MUST be refused by the operator, with nothing written.", needs=FUSED
)
def test_misuse(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    numbers = [1.0, 0.0, 0.1, 0.9, 0.1, 1.0, -0.1, 1e-8, 0.0]
    wrong: list[tuple[int, Any]] = [
        (0, 5),
        (0, -1),
        (1, [torch.ones(60)[::2]]),
        (1, [torch.ones(30, dtype=torch.float64)]),
        (2, []),
        (2, [torch.ones(30, dtype=torch.bfloat16)]),
        (2, [torch.ones(29)]),
        (3, [[torch.ones(30)], [], []]),
        (3, [[torch.ones(30)], [torch.ones(31)], []]),
        (3, [[torch.ones(30)], [torch.ones(30)], [torch.ones(30)]]),
        (4, [1]),
        (4, []),
        (5, numbers[:8]),
        (5, [*numbers[:8], 16.0]),
    ]
    for place, value in wrong:
        params, states = [torch.ones(30)], [[torch.ones(30)], [torch.ones(30)], []]
        arguments: list[Any] = [2, params, [torch.ones(30)], states, [0], numbers]
        arguments[place] = value
        with raises(RuntimeError, where=f"argument {place}: {value}"):
            ops.slot_step(*arguments)
        for tensor in [*params, *states[0], *states[1]]:
            assert_same_tensor(tensor, torch.ones(30), where=f"after argument {place}")


@requirement(
    "OPT-353",
    "A parameter without gaps MUST be updated by the kernel in any order of its dimensions, with the bits of one whose "
    "order is plain; one with gaps MUST NOT.",
    needs=FUSED,
)
def test_orders_of_dimensions(offload: Any) -> None:
    orders = {"plain": (0, 1, 2), "turned": (2, 1, 0), "last first": (1, 2, 0)}
    found = {}
    for name, order in orders.items():
        back = tuple(order.index(dim) for dim in range(3))
        with proven() as device:
            given = values((4, 6, 5), 1).permute(order).contiguous().permute(back)
            twins = Twins(offload, device, "AdamW", [given, values((8,), 2)], fused_update=True)
            for number in range(2):
                for param in twins.params:
                    param.grad = torch.empty_like(param).copy_(values(param.shape, 10 + number))
                twins.optimizer.step()
            assert_equal(twins.offloader.stats().updates, ("fused",), where=f"update of a parameter, {name}")
            twins.offloader.settle()
            with _disable_current_modes():
                found[name] = twins.params[0].detach().clone(memory_format=torch.contiguous_format)
        assert_same_tensor(found[name], found["plain"], where=f"a parameter, {name}")
    with proven() as device:
        wide = values((4, 6, 10), 1)[..., ::2]
        twins = Twins(offload, device, "AdamW", [wide, values((8,), 2)], fused_update=True)
        twins.params[0].data = values((4, 6, 10), 1)[..., ::2]
        for param in twins.params:
            param.grad = torch.empty_strided(param.shape, param.stride()).copy_(values(param.shape, 10))
        twins.optimizer.step()
        assert_equal("gaps" in twins.offloader.stats().updates[0], True, where="reason")


@requirement(
    "OPT-355",
    "Unless it is asked for, the kernel MUST update on CUDA alone, and name any other kind of device.",
    needs=FUSED,
)
def test_kinds_of_devices(offload: Any) -> None:
    from fastimpl.offload.slot_step import SlotUpdates

    for kind in ("cpu", "cuda", "meta", "mps", "xpu", "privateuseone"):
        for wanted in (None, True):
            plan: Any = SimpleNamespace(
                options=SimpleNamespace(fused_update=wanted), engine=SimpleNamespace(device=torch.device(kind))
            )
            found = SlotUpdates(plan)._why_nowhere()
            is_foreign = wanted is None and kind != "cuda"
            said = f"otherwise on {torch.device(kind).type}"  # Another test may have named the last one.
            assert_equal(said in found, is_foreign, where=f"{kind}, fused_update={wanted}: {found!r}")
