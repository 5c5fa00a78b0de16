"""DTensor and FSDP2 parameters on several ranks: state moves by local shard, every bit as without offload."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import assert_same_state, values
from conformance.provers.virtual_device import VirtualDevice
from twinproof.engine import InlineEngine
from twinproof.errors import StaleMasterError, UnsupportedError


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return value


def _moments_bytes(params: list[torch.nn.Parameter]) -> int:
    return sum(2 * int(_local(param).nbytes) for param in params)


def _assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_state({**got, "state": _local(got["state"])}, {**expected, "state": _local(expected["state"])})


def _step_dtensors(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    placements = [Shard(0), Shard(1), Replicate()]
    # Seven rows on two ranks: shards of different size.
    whole = [values((7, 6), i) for i in range(3)]
    device = VirtualDevice(late=True)
    arms = []
    for _ in range(2):
        sharded = [distribute_tensor(w, mesh, [p], src_data_rank=None) for w, p in zip(whole, placements, strict=True)]
        params = [torch.nn.Parameter(value) for value in sharded]
        arms.append((params, torch.optim.AdamW(params, lr=0.1, foreach=False)))
    with device:
        (plain_params, plain), (params, optimizer) = arms
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=256)
        for step in range(3):
            for i, placement in enumerate(placements):
                grad = values((7, 6), 100 * step + i)
                for mine, _ in arms:
                    mine[i].grad = distribute_tensor(grad, mesh, [placement], src_data_rank=None)
            plain.step()
            optimizer.step()
        got = offloader.snapshot()
        offloader.load_state_dict(got)
        got = offloader.snapshot()
        residency = offloader.residency()
    device.check()
    assert_equal(residency.device_bytes, 0, where="residency")
    assert_equal(offloader.stats().payload_bytes, _moments_bytes(params), where="payload")
    for a, b in zip(params, plain_params, strict=True):
        assert_same_tensor(_local(a).detach(), _local(b).detach(), where="local shard")
    _assert_same_state(got, plain.state_dict())


@requirement("OPT-080", "DTensor parameters and their states MUST move by local shard, uneven and replicated ones too.")
def test_dtensors(rank_pool: Any) -> None:
    rank_pool.run(_step_dtensors, 2)


def _load_dtensors(rank: Rank, options: dict[str, Any]) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    placements = [Shard(0), Shard(1), Replicate()]
    arms = []
    for _ in range(2):
        whole = [
            distribute_tensor(values((7, 6), i), mesh, [placement], src_data_rank=None)
            for i, placement in enumerate(placements)
        ]
        params = [torch.nn.Parameter(value) for value in whole]
        arms.append((params, torch.optim.AdamW(params, lr=0.1, foreach=False)))
    with VirtualDevice() as device:
        (plain_params, plain), (params, optimizer) = arms
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=256, **options)
        for step in range(2):
            for i, placement in enumerate(placements):
                grad = values((7, 6), 100 * step + i)
                for mine, _ in arms:
                    mine[i].grad = distribute_tensor(grad, mesh, [placement], src_data_rank=None)
            plain.step()
            optimizer.step()
            offloader.load_state_dict(offloader.snapshot())
            for param in params:
                for name in ("exp_avg", "exp_avg_sq"):
                    state, where = optimizer.state[param][name], f"{name} after a load with {options}"
                    assert_equal(type(state).__name__, "DTensor", where=f"class of {where}")
                    placed: Any = param
                    assert_equal(state.placements, placed.placements, where=f"placements of {where}")
        got = offloader.snapshot()
        offloader.close()
    device.check()
    for a, b in zip(params, plain_params, strict=True):
        assert_same_tensor(_local(a).detach(), _local(b).detach(), where=f"local shard after loads with {options}")
    _assert_same_state(got, plain.state_dict())


@requirement(
    "OPT-390",
    "A load of sharded states MUST give DTensors of the same placements back, whenever memory of the device goes and "
    "also where they stay there, and steps MUST go on from them bit for bit.",
)
@pytest.mark.parametrize("options", [{}, {"release": "on_request"}, {"fraction": 0.4}], ids=["all", "request", "some"])
def test_loaded_dtensors(rank_pool: Any, options: dict[str, Any]) -> None:
    rank_pool.run(_load_dtensors, 2, options)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = model(values((5, 8), 1000 + step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_fsdp(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        models.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    (plain_model, plain), (model, optimizer) = models
    # The communication of FSDP runs outside of the proof; the step of the optimizer is what is proven here.
    device = VirtualDevice()
    with device:
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=256)
    for step in range(3):
        _train(plain_model, plain, step)
        model(values((5, 8), 1000 + step)).square().mean().backward()
        with device:
            optimizer.step()
        optimizer.zero_grad()
    with device:
        got = offloader.snapshot()
    device.check()
    assert_equal(offloader.stats().payload_bytes, _moments_bytes(list(model.parameters())), where="payload")
    _assert_same_state(got, plain.state_dict())
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert_same_tensor(_local(a).detach(), _local(b).detach(), where="local shard")


@requirement("OPT-081", "A model under FSDP2 MUST train bit for bit as without offload.")
def test_fsdp(rank_pool: Any) -> None:
    rank_pool.run(_train_fsdp, 2)


def _refuse_adafactor(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    param = torch.nn.Parameter(distribute_tensor(values((6, 4), 0), mesh, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.Adafactor([param])
    with raises(UnsupportedError, mentions=("Adafactor",)):
        offload.OptimizerStateOffloader(optimizer, engine=VirtualDevice().engine)
    assert_equal("step" in vars(optimizer), False, where="step taken over")


@requirement("OPT-086", "Adafactor on sharded parameters, whose factors span shards, MUST be refused at attachment.")
def test_sharded_adafactor(rank_pool: Any) -> None:
    rank_pool.run(_refuse_adafactor, 2)


def _write_dtensors(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))

    def made(dtype: torch.dtype) -> Any:
        return torch.nn.Parameter(distribute_tensor(values((7, 6), 1, dtype), mesh, [Shard(0)], src_data_rank=None))

    def trained(release: str | None) -> torch.Tensor:
        param = made(torch.float32)
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, foreach=False)
        with VirtualDevice() as device:
            offloader = None
            if release is not None:
                offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, release=release)
            for step in range(3):
                param.grad = distribute_tensor(values((7, 6), step), mesh, [Shard(0)], src_data_rank=None)
                if offloader is not None and release == "at_offload":
                    offloader.prefetch()
                elif offloader is not None:
                    offloader.offload()
                if step:
                    optimizer.state[param]["momentum_buffer"].mul_(0.5)
                if offloader is not None and release == "on_request":
                    offloader.release_gpu_memory()
                optimizer.step()
            if offloader is not None:
                offloader.close()
        found: torch.Tensor = _local(param).detach()
        return found

    plain = trained(None)
    for release in ("at_offload", "on_request"):
        assert_same_tensor(trained(release), plain, where=f"states that were written, {release}")
    for offloaded in (False, True):
        param = made(torch.bfloat16)
        masters = offload.MasterWeights([param])
        optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, foreach=False)
        with VirtualDevice() as device:
            if offloaded:
                offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
            else:
                masters.attach(optimizer)
            param.grad = distribute_tensor(values((7, 6), 5, torch.bfloat16), mesh, [Shard(0)], src_data_rank=None)
            with torch.no_grad():
                param.fill_(7.0)
            with raises(StaleMasterError, where=f"a parameter that was written, offloaded {offloaded}"):
                optimizer.step()


@requirement(
    "OPT-431",
    "Writes in place to a DTensor, which leave its shard's version as it is, MUST be seen as those to a plain tensor: "
    "of states behind prefetch() and behind offload(), and of a parameter behind its master's back.",
)
def test_written_dtensors(rank_pool: Any) -> None:
    rank_pool.run(_write_dtensors, 2)


class _Layers(torch.nn.Module):
    """Layers of which each call says which it goes through."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, value: torch.Tensor, chosen: tuple[int, ...], unused: tuple[int, ...]) -> torch.Tensor:
        for number in unused:
            self.layers[number](value)
        for number in chosen:
            value = self.layers[number](value)
        return value


# Layers that a step goes through, and those that it calls without use of what they give.
_WAYS = (((0, 2), ()), ((0, 1, 2), ()), ((0, 2), (1,)), ((2,), ()))


def _train_fsdp1(rank: Rank, options: dict[str, Any], is_nested: bool) -> None:
    offload, arms = rank.component("offload"), []
    settings: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for _ in range(2):
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = [torch.nn.Linear(6, 6) for _ in range(3)]
        parts = [FullyShardedDataParallel(layer, **settings) if is_nested else layer for layer in layers]
        model = FullyShardedDataParallel(_Layers(parts), **settings)
        arms.append((model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)))
    device = VirtualDevice()
    with device:
        offloader = offload.OptimizerStateOffloader(arms[1][1], engine=device.engine, chunk_bytes=256, **options)
    for step, (chosen, unused) in enumerate(_WAYS):
        for model, _ in arms:
            model(values((5, 6), 1000 + step), chosen, unused).square().mean().backward()
        arms[0][1].step()
        # The communication of FSDP runs outside of the proof; the step of the optimizer is what is proven here.
        with device, succeeds("a step", where=f"layers {chosen}, {is_nested=}, {options}"):
            arms[1][1].step()
        for _, optimizer in arms:
            optimizer.zero_grad()
    with device:
        got = offloader.snapshot()
        offloader.close()
    device.check()
    assert_same_state(got, arms[0][1].state_dict())
    for plain, mine in zip(*(model.parameters() for model, _ in arms), strict=True):
        assert_same_tensor(mine.detach(), plain.detach(), where=f"shard, {is_nested=}, {options}")


@requirement(
    "OPT-500",
    "A model under FullyShardedDataParallel MUST train bit for bit as without offload where a step goes through some "
    "of its layers only, or makes no use of what one gives, and where a rank has nothing of a parameter.",
)
@pytest.mark.parametrize("options", [{}, {"release": "on_request"}, {"fraction": 0.4}], ids=["all", "request", "some"])
@pytest.mark.parametrize("is_nested", [True, False], ids=["units", "one"])
def test_fsdp1_some_layers(rank_pool: Any, options: dict[str, Any], is_nested: bool) -> None:
    rank_pool.run(_train_fsdp1, 2, options, is_nested)


def _numbers(optimizer: torch.optim.Optimizer) -> list[int]:
    """The parameters that have states, in the order of the states."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [next(n for n, param in enumerate(params) if param is key) for key in optimizer.state]


@requirement(
    "OPT-520",
    "States MUST stand in the order in which the plain optimizer's stand, whichever of them are offloaded, in whatever "
    "chunks and wherever they are stepped, also where parameters get gradients later, and behind a load.",
)
def test_order_of_states(offload: Any) -> None:
    sizes = [3, 40, 2, 17, 64, 1]
    for fraction, first, step_device in product((0.3, 0.7, 1.0), ((), (0, 4), (1, 2, 5)), ("device", "cpu")):
        where = f"fraction {fraction}, {step_device}, at first none of {first}"
        params = [[torch.nn.Parameter(values((size,), n)) for n, size in enumerate(sizes)] for _ in range(2)]
        groups: list[list[dict[str, Any]]] = [
            [{"params": mine[:3]}, {"params": mine[3:], "lr": 0.1}] for mine in params
        ]
        plain, optimizer = (torch.optim.AdamW(each, foreach=False) for each in groups)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=InlineEngine(), chunk_bytes=64, fraction=fraction, step_device=step_device
        )
        for step in range(2):
            for each, mine in zip((plain, optimizer), params, strict=True):
                for number, param in enumerate(mine):
                    skips = step == 0 and number in first
                    param.grad = None if skips else values(param.shape, 50 * step + number)
                each.step()
            assert_equal(_numbers(optimizer), _numbers(plain), where=f"{where}: step {step}")
            keys = [list(each.state_dict()["state"]) for each in (optimizer, plain)]
            assert_equal(keys[0], keys[1], where=f"{where}: step {step}, state_dict()")
        saved = plain.state_dict()
        saved["state"] = {number: saved["state"][number] for number in (4, 1, 5, 0, 2, 3)}
        plain.load_state_dict(saved)
        offloader.load_state_dict(saved)
        assert_equal(_numbers(optimizer), _numbers(plain), where=f"{where}: behind a load")
        saved["state"] = {number: saved["state"][number] if number != 5 else {} for number in (3, 5, 0, 2, 4, 1)}
        offloader.load_state_dict(saved)
        assert_equal(_numbers(optimizer), [3, 0, 2, 4, 1], where=f"{where}: behind a load of all but one")


def _export_whole(rank: Rank) -> None:
    offload, mesh = rank.component("offload"), init_device_mesh("cpu", (rank.world_size,))
    ways: dict[str, dict[str, Any]] = {
        "cpu": {"step_device": "cpu"},
        "chunks": {"engine": InlineEngine(), "chunk_bytes": 32},
        "some": {"engine": InlineEngine(), "chunk_bytes": 32, "fraction": 0.5},
    }
    for shapes, (way, options) in product(([(2, 4), (1, 4)], [(1, 4), (2, 4), (1, 4), (4, 2), (1, 2)]), ways.items()):
        where = f"{shapes}, {way}"
        model = torch.nn.ParameterList(torch.nn.Parameter(values(shape, n)) for n, shape in enumerate(shapes))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        offload.OptimizerStateOffloader(optimizer, **options)
        for step in range(2):
            for number, param in enumerate(model.parameters()):
                whole = values(param.shape, 50 * step + number)
                param.grad = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
        with succeeds("a full state dict", where=where):
            whole_states: Any = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            )
        found = whole_states["state"]
        assert_equal(list(found), [name for name, _ in model.named_parameters()], where=f"{where}: parameters")
        for name, param in model.named_parameters():
            for key, value in optimizer.state[param].items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                assert_same_tensor(found[name][key], whole, where=f"{where}: {name}.{key}")


@requirement(
    "OPT-521",
    "Torch's full state dict of an offloaded optimizer MUST have the states of each parameter, also where parameters "
    "have fewer rows than there are ranks, so that some of their shards are empty.",
)
def test_full_state_dicts(rank_pool: Any) -> None:
    for count in (2, 3):
        rank_pool.run(_export_whole, count)
