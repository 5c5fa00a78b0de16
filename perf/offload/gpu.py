"""What offloading costs on a GPU, each figure beside a copy rate of the same run.

Everything goes through an ``Engine``, so that the same code runs, without meaning, on the CPU, as it does in CI.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from fastimpl.streams import CudaEngine
from perf.harness.nvml import open_gpu
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.peers.torchao_offload import torchao_steps

__all__ = [
    "STATES",
    "exposed",
    "make_optimizer",
    "make_params",
    "measure_exposed",
    "measure_moves",
    "measure_steps_on_gpu",
    "moves",
    "steps",
    "timed",
    "wait",
]

_STEPS = 8  # Of one sample of exposed time.
_SIDE = 2048  # Of the matrices that stand for forward and backward.
STATES = ("exp_avg", "exp_avg_sq")

Program = Callable[[Any, Any, Workload, int, int], list[Round]]


def _on_gpu(program: Program, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU, which leaves the gate undecided."""
    if not torch.cuda.is_available():
        return []
    kind = rank.component("offload").OptimizerStateOffloader
    return program(CudaEngine(), kind, workload, round_count, seed)


def make_params(engine: Any, workload: Workload) -> list[torch.nn.Parameter]:
    """Parameters of the workload's shape on the device, each with a gradient."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(workload.tensor_count):
        value, grad = (torch.randn(workload.shape, generator=generator).to(engine.device) for _ in range(2))
        params.append(torch.nn.Parameter(value))
        params[-1].grad = grad
    return params


def make_optimizer(engine: Any, workload: Workload) -> torch.optim.Optimizer:
    """AdamW that stepped once; fused, so that the update needs no memory of its own."""
    optimizer = torch.optim.AdamW(make_params(engine, workload), lr=1e-3, fused=True)
    optimizer.step()
    return optimizer


def wait(engine: Any) -> None:
    """Until all that the current stream was given is over."""
    event = engine.event()
    engine.record(event, engine.current())
    engine.synchronize(event)


def timed(engine: Any, job: Callable[[], Any]) -> Sample:
    """A job from an idle stream to an idle stream."""
    wait(engine)
    begun = time.perf_counter()
    job()
    wait(engine)
    return {"seconds": time.perf_counter() - begun}


def _run(engine: Any, workload: Workload, jobs: dict[str, Any], round_count: int, seed: int) -> list[Round]:
    # A peer that is not installed has no job.
    runs = {who: partial(timed, engine, jobs[who]) for who in workload.contenders if who in jobs}
    with open_gpu() as gpu:
        return interleave(runs, round_count=round_count, seed=seed, gpu=gpu)


class _Copies:
    """The link's own rate, with pinned memory: one direction after the other, or both at once."""

    def __init__(self, engine: Any, size_bytes: int) -> None:
        self.engine = engine
        self.hosts = [engine.host_empty(size_bytes) for _ in range(2)]
        self.devices = [engine.device_empty(size_bytes) for _ in range(2)]
        self.streams = [engine.stream("copies-in"), engine.stream("copies-out")]
        for host, device in zip(self.hosts, self.devices, strict=True):
            host.zero_()
            device.zero_()

    def one_after_the_other(self) -> None:
        """Out, and in again."""
        self.engine.copy(self.hosts[0], self.devices[0])
        self.engine.copy(self.devices[0], self.hosts[0])

    def both_ways(self) -> None:
        """Out and in at the same time."""
        engine, events = self.engine, []
        pairs = ((self.devices[0], self.hosts[0]), (self.hosts[1], self.devices[1]))
        for stream, (target, source) in zip(self.streams, pairs, strict=True):
            with engine.on(stream):
                engine.copy(target, source)
            events.append(engine.event())
            engine.record(events[-1], stream)
        for event in events:
            engine.synchronize(event)


class _Serial:
    """The loop that people write: states come in one by one, are stepped, and leave, all on one stream."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.homes: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for state in optimizer.state.values():
            for name in STATES:
                home = engine.host_empty(state[name].nbytes).view(state[name].dtype).view(state[name].shape)
                home.copy_(state[name])
                self.homes.append((state, name, home))
                state[name] = home

    def step(self) -> None:
        """In, update, out."""
        for state, name, home in self.homes:
            state[name] = home.to(self.engine.device, non_blocking=True, copy=True)
        self.optimizer.step()
        for state, name, home in self.homes:
            home.copy_(state[name], non_blocking=True)
            state[name] = home
        wait(self.engine)


def moves(engine: Any, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """All states out and in: ``ours``, as many bytes in one pinned ``copy``.

    By tensor, a pageable ``loop`` and a ``pinned`` one; and as many bytes copied ``twice``.
    """
    optimizer, copies = make_optimizer(engine, workload), _Copies(engine, 2 * workload.payload_bytes)
    tensors = [state[name].clone() for state in optimizer.state.values() for name in STATES]
    # One block, so that the loop's memory is as good as ours.
    block, size_bytes = engine.host_empty(2 * workload.payload_bytes), workload.tensor_bytes
    homes = [
        block[i * size_bytes : (i + 1) * size_bytes].view(tensor.dtype).view(tensor.shape)
        for i, tensor in enumerate(tensors)
    ]
    offloader = kind(optimizer, engine=engine)
    before = offloader.snapshot()["state"]

    def ours() -> None:
        offloader.to_device(offloader.bundles)
        offloader.offload()
        offloader.settle()

    def loop() -> None:
        for number, tensor in enumerate(tensors):
            tensors[number] = tensor.to("cpu", copy=True).to(engine.device, copy=True)

    def pinned() -> None:
        for home, tensor in zip(homes, tensors, strict=True):
            engine.copy(home, tensor)
        for home, tensor in zip(homes, tensors, strict=True):
            engine.copy(tensor, home)

    def twice() -> None:
        copies.one_after_the_other()
        copies.one_after_the_other()

    jobs = {"ours": ours, "copy": copies.one_after_the_other, "loop": loop, "pinned": pinned, "twice": twice}
    rounds = _run(engine, workload, jobs, round_count, seed)
    after = offloader.snapshot()["state"]
    offloader.close()
    for number, state in before.items():
        for name in STATES:
            if not torch.equal(after[number][name], state[name]):
                raise Mismatch("moving changed a state", where=f"{name} of {number}")
    return rounds


def steps(engine: Any, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """A step, a chunk for each parameter: ``ours``, ``serial``, ``plain``, ``attached``; and ``duplex`` copies."""
    copies = _Copies(engine, 2 * workload.payload_bytes)
    optimizers = {who: make_optimizer(engine, workload) for who in ("ours", "serial", "plain", "attached")}
    chunk_bytes = 2 * workload.tensor_bytes
    offloader = kind(optimizers["ours"], engine=engine, chunk_bytes=chunk_bytes)
    attached = kind(optimizers["attached"], engine=engine, fraction=0.0)
    serial = _Serial(engine, optimizers["serial"])

    def ours() -> None:
        optimizers["ours"].step()
        offloader.settle()

    jobs = {
        "ours": ours,
        "serial": serial.step,
        "plain": optimizers["plain"].step,
        "attached": optimizers["attached"].step,
        "duplex": copies.both_ways,
    }
    rounds = _run(engine, workload, jobs, round_count, seed)
    _check_same(optimizers)
    for one in (offloader, attached):
        one.close()
    return rounds


def _check_same(optimizers: dict[str, torch.optim.Optimizer]) -> None:
    first, *others = (optimizer.param_groups[0]["params"] for optimizer in optimizers.values())
    for other in others:
        if not all(map(torch.equal, first, other)):
            raise Mismatch("contenders stepped to other values")


def exposed(engine: Any, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """Training steps with forward and backward as long as the transfers, each: ``plain``, ``ours``, ``blocking``.

    ``torchao``, where it is installed, steps on the CPU: its values are not compared.
    """
    optimizers = {who: make_optimizer(engine, workload) for who in ("plain", "ours", "blocking")}
    chunk_bytes, work = 2 * workload.tensor_bytes, _work(engine, workload)
    offloader = kind(optimizers["ours"], engine=engine, chunk_bytes=chunk_bytes, slots=workload.tensor_count)
    serial = _Serial(engine, optimizers["blocking"])

    def train(between: Callable[[], Any], step: Callable[[], Any]) -> None:
        for _ in range(_STEPS):
            work()  # The forward pass hides the copies out,
            between()
            work()  # the backward pass those in.
            step()

    jobs = {
        "plain": partial(train, lambda: None, optimizers["plain"].step),
        "ours": partial(train, offloader.prefetch, optimizers["ours"].step),
        "blocking": partial(train, lambda: None, serial.step),
    }
    torchao = torchao_steps(make_params(engine, workload), lr=1e-3) if "torchao" in workload.contenders else None
    if torchao is not None:
        jobs["torchao"] = partial(train, *torchao)
    rounds = _run(engine, workload, jobs, round_count, seed)
    _check_same(optimizers)
    offloader.close()
    return rounds


def _work(engine: Any, workload: Workload) -> Callable[[], None]:
    """Products of matrices that take at least as long as all states take one way while others go the other way."""
    copies = _Copies(engine, 2 * workload.payload_bytes)
    left, right, out = (torch.ones(_SIDE, _SIDE, device=engine.device) for _ in range(3))

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    for job in (copies.both_ways, partial(products, 1)):
        timed(engine, job)  # First touches and the choice of a kernel.
    transfers_s = max(timed(engine, copies.both_ways)["seconds"] for _ in range(3))
    product_s = min(timed(engine, partial(products, 10))["seconds"] for _ in range(3)) / 10
    return partial(products, int(transfers_s / product_s) + 1)


measure_moves = partial(_on_gpu, moves)
measure_steps_on_gpu = partial(_on_gpu, steps)
measure_exposed = partial(_on_gpu, exposed)
