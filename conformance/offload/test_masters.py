"""bf16 parameters with float32 masters, alone and offloaded."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import SHAPES, proven, proven_on, reread, values
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, OffloadConflictError, PlanError, StaleMasterError


class _Arms:
    """float32 AdamW on copies, the oracle; and bf16 parameters whose masters are stepped, offloaded or not."""

    def __init__(self, offload: Any, device: Any, *, offloaded: bool) -> None:
        start = [values(shape, i, torch.bfloat16) for i, shape in enumerate(SHAPES)]
        self.oracle = [torch.nn.Parameter(value.float()) for value in start]
        self.params = [torch.nn.Parameter(value.clone()) for value in start]
        self.masters = offload.MasterWeights(self.params)
        self.optimizers = [
            torch.optim.AdamW(self.oracle, lr=1e-4),
            torch.optim.AdamW(self.masters.parameters(), lr=1e-4),
        ]
        self.offloader = None
        if offloaded:
            self.offloader = offload.OptimizerStateOffloader(
                self.optimizers[1], engine=device.engine, master_weights=self.masters, chunk_bytes=512
            )
        else:
            self.masters.attach(self.optimizers[1])
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for i, (oracle, param) in enumerate(zip(self.oracle, self.params, strict=True)):
            grad = values(param.shape, 100 * self.count + i, torch.bfloat16)
            oracle.grad, param.grad = grad.float(), grad
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        """Masters are the float32 run; parameters are those, rounded to nearest even."""
        if self.offloader is not None:
            self.offloader.settle()
        with _disable_current_modes():
            for oracle, master, param in zip(self.oracle, self.masters.parameters(), self.params, strict=True):
                assert_same_tensor(master.detach(), oracle.detach(), where="master")
                bits = oracle.detach().view(torch.int32)
                rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
                assert_same_tensor(param.detach(), rounded, where="parameter")


@requirement(
    "OPT-012", "Parameters MUST be the masters rounded to nearest even, masters the float32 run, offloaded or not."
)
def test_masters(offload: Any, device: str) -> None:
    for offloaded in (False, True):
        with proven_on(device, late=offloaded) as place:
            arms = _Arms(offload, place, offloaded=offloaded)
            for _ in range(4):
                arms.step()
                arms.check()
                assert_equal([p.grad for p in arms.params], [None] * len(arms.params), where="gradients after a step")
            if arms.offloader is not None:
                assert_equal(arms.offloader.residency().device_bytes, 0, where="residency of masters")
                arms.offloader.close()
                arms.check()


@requirement(
    "OPT-041", "A parameter that was written behind its master's back MUST be noticed, and refresh_masters() adopt it."
)
def test_stale_masters(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, offloaded=True)
        assert arms.offloader is not None
        arms.step()
        loaded = values(SHAPES[0], 77, torch.bfloat16)
        with torch.no_grad():
            arms.params[0].copy_(loaded)
            arms.oracle[0].copy_(loaded.float())
        arms.offloader.settle()
        before = [master.detach().clone() for master in arms.masters.parameters()]
        with raises(StaleMasterError, mentions=("refresh_masters",)):
            arms.step()
        arms.offloader.settle()
        with _disable_current_modes():
            for master, value in zip(arms.masters.parameters(), before, strict=True):
                assert_same_tensor(master.detach(), value, where="master after a refused step")
        arms.offloader.prefetch()
        arms.offloader.refresh_masters()
        # The refused step reached the plain optimizer, which starts again from the same values.
        arms.optimizers[0].load_state_dict(reread(arms.offloader.snapshot()))
        for oracle, master in zip(arms.oracle, arms.masters.parameters(), strict=True):
            with torch.no_grad():
                oracle.copy_(master)
        arms.offloader.settle()
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement("OPT-049", "A load that gives states another form MUST leave masters and every other state as they are.")
def test_load_of_another_form(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, offloaded=True)
        assert arms.offloader is not None
        arms.step()
        state = arms.offloader.snapshot()
        state["param_groups"][0]["amsgrad"] = True
        # The last parameter has no state yet, and keeps its place in the block that the others leave.
        del state["state"][3]
        for number in state["state"]:
            state["state"][number]["max_exp_avg_sq"] = values(SHAPES[number], 9).square()
        arms.offloader.load_state_dict(state)
        arms.optimizers[0].load_state_dict(reread(state))
        for _ in range(2):
            arms.step()
            arms.check()
        arms.offloader.close()


@requirement("OPT-044", "Saved masters MUST load into parameters and masters alike; others are refused first.")
def test_load_masters(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, offloaded=True)
        assert arms.offloader is not None
        arms.step()
        saved = [values(shape, 500 + i) for i, shape in enumerate(SHAPES)]
        with raises(PlanError, mentions=("values",)):
            arms.offloader.load_masters(saved[:-1])
        arms.check()
        arms.offloader.prefetch()
        arms.offloader.load_masters(saved)
        for oracle, value in zip(arms.oracle, saved, strict=True):
            with torch.no_grad():
                oracle.copy_(value)
        arms.check()
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement("OPT-043", "Masters of what is not floating-point, or of a parameter twice, MUST be refused.")
def test_wrong_masters(offload: Any) -> None:
    param = torch.nn.Parameter(values((3,), 0, torch.bfloat16))
    with raises(ConfigError, mentions=("params",)):
        offload.MasterWeights([param, param])
    with raises(ConfigError, mentions=("params",)):
        offload.MasterWeights([torch.zeros(3, dtype=torch.int64)])


@requirement(
    "OPT-331",
    "Masters that the optimizer does not step, or steps beside others, MUST be refused, with how many of each, and "
    "left as they were.",
)
@pytest.mark.parametrize(
    ("stepped", "others", "said"), [(2, 1, "1 others, 0"), (1, 0, "0 others, 1"), (0, 3, "3 others, 2")]
)
def test_masters_of_another_optimizer(offload: Any, device: str, stepped: int, others: int, said: str) -> None:
    with proven_on(device) as place:
        params = [torch.nn.Parameter(values((3,), number, torch.bfloat16)) for number in range(2)]
        masters = offload.MasterWeights(params)
        foreign = [torch.nn.Parameter(values((2,), number)) for number in range(others)]
        optimizer = torch.optim.SGD([*list(masters.parameters())[:stepped], *foreign], lr=0.1)
        with raises(ConfigError, mentions=(f"{said} masters missing", "master_weights.parameters()")):
            offload.OptimizerStateOffloader(optimizer, engine=place.engine, master_weights=masters)
        # What was refused is free for another.
        right = torch.optim.SGD(masters.parameters(), lr=0.1)
        offload.OptimizerStateOffloader(right, engine=place.engine, master_weights=masters).close()


@requirement(
    "OPT-369",
    "A float32 parameter of a group that is added beside masters MUST be stepped as its own master, on either step "
    "device, and its sparse gradient be refused as any other.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_added_beside_masters(offload: Any, step_device: str) -> None:
    with proven() as device:
        made = []
        for masters in (offload.MasterWeights([torch.nn.Parameter(values(SHAPES[0], 0, torch.bfloat16))]), None):
            params = [torch.nn.Parameter(values(shape, 7)) for shape in SHAPES[:2]]
            optimizer = torch.optim.AdamW(params[:1] if masters is None else masters.parameters(), lr=0.01)
            offloader = offload.OptimizerStateOffloader(
                optimizer, engine=device.engine, master_weights=masters, step_device=step_device
            )
            optimizer.add_param_group({"params": params[1:]})
            for number in range(2):
                params[1].grad = values(SHAPES[1], number)
                said = _error_of(optimizer.step)
            assert_equal(said, "", where=f"what a step on {step_device} raised")
            params[1].grad = values(SHAPES[1], 9).to_sparse()
            refused = _error_of(optimizer.step).partition(":")[0]
            assert_equal(refused, "UnsupportedError", where="what a sparse gradient raised")
            offloader.close()
            made.append(params[1])
        with _disable_current_modes():
            assert_same_tensor(made[0].detach(), made[1].detach(), where=f"beside masters, stepped on {step_device}")


def _error_of(step: Any) -> str:
    """What a step raises, in words; empty if nothing."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@requirement(
    "OPT-370",
    "Masters that ran with a plain optimizer, as close() leaves them, MUST get their gradients chunk by chunk again "
    "once they are offloaded anew, and run with the plain optimizer behind the next close().",
)
def test_attached_anew(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms, held = _Arms(offload, place, offloaded=True), list[int]()
        masters, optimizer = arms.masters, arms.optimizers[1]
        for _ in range(2):
            assert arms.offloader is not None
            arms.step()
            arms.check()
            arms.offloader.close()
            arms.step()
            arms.check()
            arms.offloader = offload.OptimizerStateOffloader(
                optimizer, engine=place.engine, master_weights=masters, chunk_bytes=512
            )
        optimizer.register_step_pre_hook(
            lambda *_: held.append(sum(master.grad.dtype is torch.float32 for master in masters.parameters()))
        )
        arms.step()
        arms.check()
        assert arms.offloader is not None
        arms.offloader.close()
    assert_equal(held, [0], where="masters that have a gradient of their own before the first chunk")


class _Stopped(Exception):
    """Raised by a hook of the test's own."""


@requirement(
    "OPT-428",
    "A step that another hook stops behind the masters' own MUST leave the gradients as they are, and the next one "
    "MUST take what they are by then: grown in place, another tensor, or none.",
)
@pytest.mark.parametrize("offloaded", [False, True], ids=["plain", "offloaded"])
def test_stopped_steps(offload: Any, device: str, offloaded: bool) -> None:
    with proven_on(device, late=offloaded) as place:
        arms = _Arms(offload, place, offloaded=offloaded)
        arms.step()
        stops = [False]

        def stop(*_: Any) -> None:
            if stops[0]:
                raise _Stopped

        arms.optimizers[1].register_step_pre_hook(stop)
        for meanwhile in ("grown", "replaced", "gone", "as it was"):
            for i, param in enumerate(arms.params):
                param.grad = values(param.shape, 10 + i, torch.bfloat16)
            stops[0] = True
            with raises(_Stopped, where=meanwhile):
                arms.optimizers[1].step()
            stops[0] = False
            for i, (oracle, param) in enumerate(zip(arms.oracle, arms.params, strict=True)):
                assert param.grad is not None
                if meanwhile == "grown":
                    param.grad += values(param.shape, 20 + i, torch.bfloat16)
                elif meanwhile == "replaced":
                    param.grad = values(param.shape, 30 + i, torch.bfloat16)
                elif meanwhile == "gone":
                    param.grad = None
                oracle.grad = None if param.grad is None else param.grad.float()
            for optimizer in arms.optimizers:
                optimizer.step()
            arms.check()


@requirement(
    "OPT-429",
    "An offloader that is refused, or finds no memory, MUST leave masters that run with a plain optimizer as they are: "
    "its steps go on, and it can be offloaded later.",
)
@pytest.mark.parametrize(
    ("reason", "wrong"), [("no engine", {"engine": None}), ("no memory", {}), ("no such part", {"fraction": 2.0})]
)
def test_refused_offloaders(offload: Any, reason: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with proven() as place:
        arms = _Arms(offload, place, offloaded=False)
        optimizer, options = arms.optimizers[1], {"engine": place.engine, "master_weights": arms.masters}
        arms.step()

        def none_left(size_bytes: int) -> torch.Tensor:
            raise MemoryError(f"{size_bytes} bytes")

        with monkeypatch.context() as patch:
            if reason == "no memory":
                patch.setattr(place.engine, "host_empty", none_left)
            with raises((ConfigError, OffloadConflictError, MemoryError), where=reason):
                offload.OptimizerStateOffloader(optimizer, **{**options, **wrong})
        for _ in range(2):
            arms.step()
            arms.check()
        arms.offloader = offload.OptimizerStateOffloader(optimizer, **options, chunk_bytes=512)
        for _ in range(2):
            arms.step()
            arms.check()


def _halved(masters: Any, _: Any) -> None:
    for master in masters.parameters():
        master.mul_(0.5)


def _one_halved(number: int, masters: Any, _: Any) -> None:
    list(masters.parameters())[number].mul_(0.5)


def _refreshed(masters: Any, params: Any) -> None:
    for param in params:
        param.fill_(3.0)
    masters.refresh()


def _loaded(masters: Any, _: Any) -> None:
    masters.load([2 * master.detach() for master in masters.parameters()])


@requirement(
    "OPT-430",
    "What is written to masters between prefetch() and the step, to all or to one of any chunk, in place or by "
    "refresh() or load(), MUST be what the step begins with, as with a plain optimizer.",
)
@pytest.mark.parametrize(
    "write",
    [_halved, _refreshed, _loaded, *(partial(_one_halved, number) for number in range(len(SHAPES)))],
    ids=["in place", "refresh", "load", *(f"number {number} alone" for number in range(len(SHAPES)))],
)
def test_written_behind_a_prefetch(offload: Any, write: Any) -> None:
    made = []
    for offloaded in (False, True):
        arms = _Arms(offload, SimpleNamespace(engine=InlineEngine()), offloaded=offloaded)
        for step in range(3):
            if arms.offloader is not None:
                arms.offloader.prefetch()
            if step == 2:
                with torch.no_grad():
                    write(arms.masters, arms.params)
            arms.step()
        if arms.offloader is not None:
            arms.offloader.close()
        made.append([param.detach() for param in arms.params])
    for number, (mine, plain) in enumerate(zip(made[1], made[0], strict=True)):
        assert_same_tensor(mine, plain, where=f"parameter {number}")


@requirement(
    "OPT-432",
    "A closure MUST be evaluated on the model as the masters are by then, and the gradients that it makes be theirs, "
    "alone and offloaded, where it is evaluated once a step and where more often; it may clear them by the optimizer's "
    "zero_grad() alone; those that it does not clear add up, as torch's do.",
)
@pytest.mark.parametrize("clears", ["the model's", "the optimizer's", "nobody's"])
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_closures(offload: Any, kind: str, clears: str) -> None:
    inputs = torch.tensor([[1.0, 2.0], [2.0, -1.0], [0.0, 1.0]], dtype=torch.bfloat16)
    steps = dict[str, list[float]]()
    for way in ("by hand", "attached", "offloaded"):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
        masters = offload.MasterWeights([weight])
        wide = torch.nn.Parameter(weight.detach().float()) if way == "by hand" else next(masters.parameters())
        optimizer = getattr(torch.optim, kind)([wide], lr=0.125)
        if way == "attached":
            masters.attach(optimizer)
        elif way == "offloaded":
            offload.OptimizerStateOffloader(optimizer, engine=InlineEngine(), master_weights=masters)
        seen = steps[way] = []

        def closure(
            way: str = way, weight: Any = weight, wide: Any = wide, seen: Any = seen, optimizer: Any = optimizer
        ) -> torch.Tensor:
            if way == "by hand":
                weight.data.copy_(wide)
            if clears == "the optimizer's":
                optimizer.zero_grad()
            if clears == "the model's" or (clears == "the optimizer's" and way == "by hand"):
                weight.grad = None
            loss: torch.Tensor = (inputs @ weight).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            if way == "by hand":
                wide.grad = weight.grad.float()
            seen += weight.tolist()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            if way == "by hand":
                weight.grad = None
        seen += wide.tolist()
    for way in ("attached", "offloaded"):
        assert_equal(steps[way], steps["by hand"], where=f"weights at each evaluation, and the masters, {way}")


@requirement(
    "OPT-447",
    "Parameters that are views of one tensor, which count their writes together, MUST be stepped with masters as any "
    "others, alone and offloaded, on either step device; a write to one from outside MUST still be noticed.",
)
@pytest.mark.parametrize("how", ["alone", "device", "cpu"])
def test_views_of_one_tensor(offload: Any, how: str) -> None:
    with proven() as device:
        flat = values((40,), 3, torch.bfloat16)
        params: list[torch.Tensor] = [torch.nn.Parameter(part) for part in torch.split(flat, 10)]
        apart: list[torch.Tensor] = [torch.nn.Parameter(part.clone()) for part in torch.split(flat, 10)]
        arms: list[tuple[Any, Any, list[torch.Tensor]]] = []
        for each in (params, apart):
            masters: Any = offload.MasterWeights(each)
            optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
            if how == "alone":
                masters.attach(optimizer)
                load = masters.load
            else:
                load = offload.OptimizerStateOffloader(
                    optimizer, engine=device.engine, master_weights=masters, step_device=how, chunk_bytes=256
                ).load_masters
            arms.append((load, optimizer, each))
        for number in range(4):
            for load, optimizer, each in arms:
                for i, param in enumerate(each):
                    param.grad = None if (i + number) % 4 == 0 else values((10,), 10 * number + i, torch.bfloat16)
                with succeeds("a step", where=f"step {number}"):
                    optimizer.step()
                if number == 2:
                    load([values((10,), 70 + i) for i in range(4)])
        for i, (got, expected) in enumerate(zip(params, apart, strict=True)):
            with _disable_current_modes():
                assert_same_tensor(got.detach(), expected.detach(), where=f"parameter {i}")
        with torch.no_grad():
            params[2].mul_(2.0)
        with raises(StaleMasterError):
            arms[0][1].step()


_NO_MASTERS: dict[str, Any] = {
    "a dict": {"weight": torch.zeros(3, 2)},
    "None": None,
    "a tensor": torch.zeros(3, 2),
    "lists": [[[0.0] * 2] * 3, [[0.0] * 2] * 3],
    "a complex one": [torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.complex64)],
    "one on meta": [torch.zeros(3, 2), torch.zeros(3, 2, device="meta")],
    "a sparse one": [torch.zeros(3, 2), torch.eye(3, 2).to_sparse()],
}


@requirement(
    "OPT-449",
    "What are no tensors, or have no numbers at hand that masters can take, MUST be a PlanError of a load of masters, "
    "alone and offloaded, before any master or parameter is changed.",
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # Torch 2.11, of its own accord.
@pytest.mark.filterwarnings("error:Casting complex values")
@pytest.mark.parametrize("what", list(_NO_MASTERS))
@pytest.mark.parametrize("offloaded", [False, True])
def test_no_values_of_masters(offload: Any, what: str, offloaded: bool) -> None:
    params: list[torch.Tensor] = [torch.nn.Parameter(values((3, 2), i, torch.bfloat16)) for i in range(2)]
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    load = masters.load
    if offloaded:
        load = offload.OptimizerStateOffloader(
            optimizer, engine=InlineEngine("cpu"), master_weights=masters
        ).load_masters
    with raises(PlanError, where=what):
        load(_NO_MASTERS[what])
    for number, (param, master) in enumerate(zip(params, masters.parameters(), strict=True)):
        assert_same_tensor(param.detach(), values((3, 2), number, torch.bfloat16), where=f"parameter {number}")
        assert_same_tensor(master.detach(), param.detach().float(), where=f"master {number}")


@requirement(
    "OPT-452",
    "When a step with masters is over, nothing MUST hold the gradients that it took: neither those of the model nor "
    "the masters', alone and offloaded, with a closure and without.",
)
@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_gradients_end_with_the_step(offload: Any, is_offloaded: bool, has_closure: bool) -> None:
    param = torch.nn.Parameter(values((40,), 3, torch.bfloat16))
    masters = offload.MasterWeights([param])
    master = next(masters.parameters())
    optimizer = torch.optim.AdamW([master], lr=0.1)
    if is_offloaded:
        offload.OptimizerStateOffloader(optimizer, engine=InlineEngine(), master_weights=masters)
    else:
        masters.attach(optimizer)
    seen: list[weakref.ref[torch.Tensor]] = []

    def backward() -> torch.Tensor:
        loss = (param * 2).sum()
        torch.autograd.backward(loss)
        assert param.grad is not None
        seen.append(weakref.ref(param.grad))
        return loss.detach()

    for _ in range(2):
        if has_closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        gc.collect()
        assert_equal((param.grad, master.grad), (None, None), where="gradients behind a step")
        assert_equal([each() for each in seen], [None] * len(seen), where="whether somebody holds a gradient")


# Whose gradient a hook frees, by parameter; the last has none from the beginning.
_FREED = ("none", "parameter", "master", "both", "no gradient")
_POINTS = [(kind, when) for kind in ("pre", "post") for when in ("before ours", "behind ours")]


def _free(params: list[torch.Tensor], masters: Any) -> None:
    for what, param, master in zip(_FREED, params, masters.parameters(), strict=True):
        if what in ("parameter", "both"):
            param.grad = None
        if what in ("master", "both"):
            master.grad = None


def _is_stepped(what: str, way: str, kind: str, when: str) -> bool:
    """Whether a master has a gradient when the optimizer looks."""
    if what == "no gradient" or kind == "post":
        return what != "no gradient"
    # Both are one until a master has one of its own: in a step that an offloader drives, behind all hooks.
    is_given = when == "behind ours" and way != "its own"
    return what == "none" or (what == "parameter" and is_given)


@requirement(
    "OPT-461",
    "A step hook that frees gradients of parameters, of masters or of both, wherever it stands among the hooks, MUST "
    "leave each parameter with the value of its master, stepped where it had a gradient when the optimizer looked.",
)
@pytest.mark.parametrize("way", ["attached", "its own", "kept"])
@pytest.mark.parametrize(("kind", "when"), _POINTS)
def test_gradients_freed_by_hooks(offload: Any, way: str, kind: str, when: str) -> None:
    with proven() as device:
        params: list[torch.Tensor] = [torch.nn.Parameter(values((5,), i, torch.bfloat16)) for i in range(len(_FREED))]
        oracle = [torch.nn.Parameter(param.detach().float()) for param in params]
        masters, plain = offload.MasterWeights(params), torch.optim.SGD(oracle, lr=0.5, momentum=0.9)
        optimizer = torch.optim.SGD(masters.parameters(), lr=0.5, momentum=0.9)
        step, frees = optimizer.step, [False]

        def hook(*_: Any) -> None:
            if frees[0]:
                _free(params, masters)

        register = getattr(optimizer, f"register_step_{kind}_hook")
        if when == "before ours":
            register(hook)
        offloader = None
        if way == "attached":
            masters.attach(optimizer)
        else:
            offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
        if when == "behind ours":
            register(hook)
        for number in range(4):
            frees[0] = number % 2 == 1
            for i, (what, param, twin) in enumerate(zip(_FREED, params, oracle, strict=True)):
                grad = values((5,), 10 * number + i, torch.bfloat16)
                param.grad = None if what == "no gradient" else grad
                is_stepped = what != "no gradient" and (not frees[0] or _is_stepped(what, way, kind, when))
                twin.grad = grad.float() if is_stepped else None
            plain.step()
            with succeeds("a step", where=f"step {number}, {kind} hook {when}, {way}"):
                (optimizer.step if way == "its own" else step)()
            if offloader is not None:
                offloader.settle()
            for what, param, master, twin in zip(_FREED, params, masters.parameters(), oracle, strict=True):
                where = f"{what} freed, step {number}, {kind} hook {when}, {way}"
                with _disable_current_modes():
                    assert_same_tensor(master.detach(), twin.detach(), where=f"master, {where}")
                    assert_same_tensor(param.detach(), twin.detach().bfloat16(), where=f"parameter, {where}")
                assert_equal(twin.grad is None or master.grad is param.grad is None, True, where=f"gradients, {where}")
        if offloader is not None:
            offloader.close()


class _InterruptedBehindWrite(TorchFunctionMode):
    """Raises KeyboardInterrupt, as a signal does, behind what counts the nth write to the parameters."""

    def __init__(self, params: list[torch.nn.Parameter], nth: int) -> None:
        super().__init__()
        self._params, self._left = params, nth
        self._seen, self._count_write = self._written(), torch.autograd.graph.increment_version

    def _written(self) -> int:
        return sum(param._version for param in self._params)

    def _look(self) -> None:
        if self._written() != self._seen:
            self._seen, self._left = self._written(), self._left - 1
            if self._left < 0:
                self._left = 1 << 30
                raise KeyboardInterrupt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look()
        return result

    def count_write(self, tensors: Any) -> None:
        """In place of torch's."""
        self._count_write(tensors)
        self._look()


@requirement(
    "OPT-530",
    "An interrupt behind any write of masters to their parameters, in a step or in load(), MUST leave both such that "
    "the next step is made and rounds every master: no parameter counts as changed behind its master's back.",
)
@pytest.mark.parametrize("way", ["attached", "on the CPU", "load"])
def test_interrupted_behind_a_write(offload: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for nth in range(len(SHAPES)):
        params = [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
        if way == "on the CPU":
            offload.OptimizerStateOffloader(optimizer, master_weights=masters, step_device="cpu", chunk_bytes=512)
        else:
            masters.attach(optimizer)
        act = optimizer.step
        if way == "load":
            act = partial(masters.load, [master.detach() * 2 for master in masters.parameters()])

        def give(params: list[torch.nn.Parameter] = params) -> None:
            for i, param in enumerate(params):
                param.grad = values(param.shape, 10 + i, torch.bfloat16)

        give()
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            mode = _InterruptedBehindWrite(params, nth)
            patch.setattr(torch.autograd.graph, "increment_version", mode.count_write)
            with mode:
                act()
        give()
        with succeeds("the next step", where=f"an interrupt behind write {nth}"):
            optimizer.step()
        for number, (param, master) in enumerate(zip(params, masters.parameters(), strict=True)):
            where = f"parameter {number}, an interrupt behind write {nth}"
            assert_same_tensor(param.detach(), master.detach().bfloat16(), where=where)
