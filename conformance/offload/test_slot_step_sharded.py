"""DTensor parameters that one kernel updates in their slots: each rank its own shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement
from conformance.offload.cases import FUSED, values
from conformance.provers.virtual_device import VirtualDevice

# Seven rows on two ranks are shards of different size, and one row leaves a rank without any.
_FORMS: tuple[tuple[tuple[int, ...], Any], ...] = (
    ((7, 6), Shard(0)),
    ((7, 6), Shard(1)),
    ((5, 3), Replicate()),
    ((1, 4), Shard(0)),
)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
}
_DTYPES = (torch.float32, torch.bfloat16)


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


class _Arms:
    """The same numbers twice: as DTensors, and as plain tensors that are this rank's shards."""

    def __init__(self, offload: Any, mesh: DeviceMesh, device: VirtualDevice, name: str, dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.arms: list[tuple[list[torch.nn.Parameter], Any, Any]] = []
        sharded = [self._spread(number, number) for number in range(len(_FORMS))]
        for made in (sharded, [value.to_local() for value in sharded]):
            params = [torch.nn.Parameter(value.detach().clone().to(dtype)) for value in made]
            masters = offload.MasterWeights(params) if dtype is torch.bfloat16 else None
            kind, options = _KINDS[name]
            stepped = params if masters is None else list(masters.parameters())
            optimizer = getattr(torch.optim, kind)(stepped, **options)
            offloader = offload.OptimizerStateOffloader(
                optimizer, engine=device.engine, chunk_bytes=256, fused_update=True, master_weights=masters
            )
            self.arms.append((params, optimizer, offloader))

    def _spread(self, form: int, seed: int) -> DTensor:
        shape, placement = _FORMS[form]
        return distribute_tensor(values(shape, seed), self.mesh, [placement], src_data_rank=None)

    def step(self, number: int) -> None:
        """New gradients, then a step of both."""
        grads = [self._spread(form, 100 * (number + 1) + form) for form in range(len(_FORMS))]
        for arm, (params, optimizer, _) in enumerate(self.arms):
            for param, grad in zip(params, grads, strict=True):
                param.grad = (grad if arm == 0 else grad.to_local().clone()).to(param.dtype)
            optimizer.step()

    def check(self) -> None:
        """Weights and states of the DTensors are those of the plain tensors, bit for bit."""
        (sharded, _, mine), (plain, _, theirs) = self.arms
        got, expected = mine.snapshot()["state"], theirs.snapshot()["state"]
        with _disable_current_modes():
            for number, (a, b) in enumerate(zip(sharded, plain, strict=True)):
                assert_same_tensor(_local(a), b.detach(), where=f"shard of parameter {number}")
            assert_equal(got.keys(), expected.keys(), where="states")
            for number, state in expected.items():
                for name, value in state.items():
                    assert_same_tensor(_local(got[number][name]), value, where=f"{name} of parameter {number}")


def _fused(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for name in _KINDS:
        for dtype in _DTYPES:
            with VirtualDevice() as device:
                arms = _Arms(rank.component("offload"), mesh, device, name, dtype)
                versions = [param._version for param in arms.arms[0][0]]
                for number in range(3):
                    arms.step(number)
                for _, _, offloader in arms.arms:
                    assert_equal(offloader.stats().updates, ("fused",), where=f"way of {name} in {dtype}")
                arms.check()
                # Autograd looks at the version of what it saved, which is the DTensor.
                changed = [new._version > old for new, old in zip(arms.arms[0][0], versions, strict=True)]
                assert_equal(changed, [True] * len(_FORMS), where="versions")
            device.check()


@requirement(
    "OPT-343",
    "The kernel that updates chunks MUST update DTensors by local shard, with the bits of plain tensors.",
    needs=FUSED,
)
def test_shards(rank_pool: Any) -> None:
    for ranks in (1, 2):
        rank_pool.run(_fused, ranks)


@dataclass(frozen=True)
class _Left:
    """Two parameters of a group, the first a DTensor, that torch has to step, and a word of the reason."""

    reason: str
    placement: Any = field(default_factory=Replicate)
    grad_placement: Any = field(default_factory=Replicate)
    second: str = "as the first"


_LEFT = (
    _Left("sharded in another way", Shard(0), Replicate()),
    # As large as the parameter's on each rank; what it is takes the sum over all ranks.
    _Left("sharded in another way", Replicate(), Partial()),
    _Left("DTensors beside", second="plain"),
    _Left("several meshes", second="on another mesh"),
)


def _left(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh, other = (init_device_mesh("cpu", shape) for shape in ((rank.world_size,), (rank.world_size, 1)))

    def made(case: _Left, value: torch.Tensor, placement: Any, number: int) -> torch.Tensor:
        if number == 1 and case.second == "plain":
            return value
        if number == 1 and case.second == "on another mesh":
            return distribute_tensor(value, other, [placement, Replicate()], src_data_rank=None)
        if isinstance(placement, Partial):
            return DTensor.from_local(value * (rank.rank + 1), mesh, [placement])
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    for case in _LEFT:
        with VirtualDevice() as device:
            arms: list[tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Any]] = []
            for is_offloaded in (False, True):
                params = [torch.nn.Parameter(made(case, values((6, 4), n), case.placement, n)) for n in range(2)]
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)
                options = {"engine": device.engine, "fused_update": True}
                offloader = offload.OptimizerStateOffloader(optimizer, **options) if is_offloaded else None
                arms.append((params, optimizer, offloader))
            for step in range(2):
                for params, optimizer, _ in arms:
                    for n, param in enumerate(params):
                        param.grad = made(case, values((6, 4), 100 * (step + 1) + n), case.grad_placement, n)
                    optimizer.step()
            with _disable_current_modes():
                for a, b in zip(arms[1][0], arms[0][0], strict=True):
                    assert_same_tensor(_local(a), _local(b), where=f"{case.reason}: shard")
            (update,) = arms[1][2].stats().updates
            assert_equal((update.startswith("torch: "), case.reason in update), (True, True), where=update)


@requirement(
    "OPT-344",
    "A gradient that is sharded otherwise than its parameter, or still to be summed, and DTensors beside others or on "
    "several meshes, MUST be left to torch, bit for bit.",
    needs=FUSED,
)
def test_left_to_torch(rank_pool: Any) -> None:
    rank_pool.run(_left, 2)


@dataclass(frozen=True)
class _Summed:
    """Parameters and states, by their placements, that torch steps or refuses; a word of the reason where it steps."""

    kind: str
    placement: Any
    states: tuple[Any, ...]
    reason: str = "states that are sharded"


_SUMMED = (
    # What each rank has is still to be summed, of parameters and gradients alike.
    _Summed("AdamW", Partial(), (Partial(), Partial()), "sharded in another way"),
    _Summed("SGD", Partial(), (Partial(),), "sharded in another way"),
    _Summed("AdamW", Shard(0), (Replicate(), Replicate())),
    _Summed("SGD", Shard(0), (Replicate(),)),
    # As large as the parameter's on each rank, and a part of it.
    _Summed("AdamW", Replicate(), (Partial(), Replicate())),
    _Summed("SGD", Replicate(), (Partial(),)),
)
_STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def _outcome(optimizer: Any) -> str:
    """Of a step: what torch refuses it with, empty where it is done."""
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _as_torch(rank: Rank) -> None:
    offload, mesh = rank.component("offload"), init_device_mesh("cpu", (rank.world_size,))

    def made(seed: int, placement: Any) -> torch.Tensor:
        if isinstance(placement, Partial):
            return DTensor.from_local(values((6, 4), seed).square() * (rank.rank + 1), mesh, [placement])
        return distribute_tensor(values((6, 4), seed).square(), mesh, [placement], src_data_rank=None)

    for case in _SUMMED:
        where = f"{case.kind}, {case.placement} with states {case.states}"
        with VirtualDevice() as device:
            params = [torch.nn.Parameter(made(0, case.placement)) for _ in range(2)]
            plain, optimizer = (
                getattr(torch.optim, case.kind)([param], lr=0.1, **({"momentum": 0.9} if case.kind == "SGD" else {}))
                for param in params
            )
            for each, param in zip((plain, optimizer), params, strict=True):
                for n, (name, placement) in enumerate(zip(_STATES[case.kind], case.states, strict=False)):
                    counter = {"step": torch.tensor(1.0)} if case.kind == "AdamW" else {}
                    each.state[param] |= counter | {name: made(10 + n, placement)}
            offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, fused_update=True)
            for number in range(2):
                for param in params:
                    param.grad = made(100 + number, case.placement)
                expected, found = _outcome(plain), _outcome(optimizer)
                assert_equal(found, expected, where=f"{where}: what torch says to step {number}")
                if expected:
                    break
            else:
                with _disable_current_modes():
                    assert_same_tensor(_local(params[1]), _local(params[0]), where=where)
                (update,) = offloader.stats().updates
                assert_equal((update.startswith("torch: "), case.reason in update), (True, True), where=update)


@requirement(
    "OPT-493",
    "A parameter that is still to be summed over the ranks, as its gradient is, and states that are sharded otherwise "
    "than their parameter, as a user binds them, MUST be left to torch: its bits, or its refusal.",
    needs=FUSED,
)
def test_sums_and_states_of_others(rank_pool: Any) -> None:
    rank_pool.run(_as_torch, 2)
