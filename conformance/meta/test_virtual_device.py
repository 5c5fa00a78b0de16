"""The virtual device finds planted races of every kind, names both points, and is silent on right programs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import Mismatch
from conformance.provers.virtual_device import Costs, Hazard, VirtualDevice, VirtualEngine

N = 64


def _floats(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.float32)


class _RoundTrip:
    """Device to host on one stream, back on another, with every edge; each edge can be left out."""

    def __init__(self, engine: VirtualEngine, without: str = "") -> None:
        self.engine, self.without = engine, without
        self.out, self.back = engine.stream("out"), engine.stream("back")
        self.host = engine.host_empty(4 * N)

    def edge(self, name: str, behind: str, ahead: str) -> None:
        if name == self.without:
            return
        event = self.engine.event()
        if self.without == f"{name}-backwards":
            behind, ahead = ahead, behind
        self.engine.record(event, ahead if self.without != f"{name}-wrong-stream" else self.back)
        self.engine.wait(behind, event)

    def run(self) -> torch.Tensor:
        engine = self.engine
        value = _floats(engine.device_empty(4 * N))
        value.copy_(torch.arange(N, dtype=torch.float32))
        self.edge("before-out", self.out, engine.current())
        with engine.on(self.out):
            engine.copy(_floats(self.host), value)
        self.edge("reuse", engine.current(), self.out)
        value.zero_()
        result = _floats(engine.device_empty(4 * N))
        self.edge("before-back", self.back, engine.current())
        self.edge("round", self.back, self.out)
        with engine.on(self.back):
            engine.copy(result, _floats(self.host))
        self.edge("after-back", engine.current(), self.back)
        doubled = result * 2
        # The host may not give memory back that is still being copied.
        for stream in (self.out, self.back):
            engine.synchronize_stream(stream)
        return doubled


def _run(without: str = "", *, late: bool = False) -> tuple[list[Hazard], torch.Tensor]:
    with VirtualDevice(late=late) as device:
        result = _RoundTrip(device.engine, without).run()
    return device.hazards, result


WRONG = [(edge, how) for edge in ("before-out", "reuse", "after-back") for how in ("", "-backwards", "-wrong-stream")]
WRONG.remove(("after-back", "-wrong-stream"))  # There the wrong stream would be the right one.


def test_a_right_program_is_silent() -> None:
    for late in (False, True):
        hazards, result = _run(late=late)
        assert hazards == []
        assert torch.equal(result, 2 * torch.arange(N, dtype=torch.float32))


@pytest.mark.parametrize(("edge", "how"), WRONG)
def test_an_edge_that_is_missing_or_wrong_is_found(edge: str, how: str) -> None:
    hazards, _ = _run(edge + how)
    assert hazards
    assert all(
        "test_virtual_device.py" in hazard.first and "test_virtual_device.py" in hazard.second for hazard in hazards
    )


def test_the_round_through_the_host_needs_its_edge() -> None:
    # Without "reuse" the compute stream does not know of the copy out, so only "round" orders the copy back behind it.
    with VirtualDevice() as device:
        engine = device.engine
        out, back, host = engine.stream("out"), engine.stream("back"), engine.host_empty(4 * N)
        source, target = engine.device_empty(4 * N), engine.device_empty(4 * N)
        for stream in (out, back):
            event = engine.event()
            engine.record(event, engine.current())
            engine.wait(stream, event)
        with engine.on(out):
            engine.copy(host, source)
        with engine.on(back):
            engine.copy(target, host)
    assert [hazard.kind for hazard in device.hazards] == ["race"]


@pytest.mark.parametrize(("edge", "wrong"), [("before-out", True), ("after-back", True), ("", False)])
def test_a_missing_edge_becomes_wrong_bytes(edge: str, wrong: bool) -> None:
    _, result = _run(edge if edge != "before-out" else "reuse", late=True)
    assert torch.equal(result, 2 * torch.arange(N, dtype=torch.float32)) is not wrong


def _host_read(engine: VirtualEngine, *, right: bool) -> None:
    host, stream, event = engine.host_empty(4 * N), engine.stream("out"), engine.event()
    value = torch.ones(N)
    engine.record(event, engine.current())
    engine.wait(stream, event)
    with engine.on(stream):
        engine.copy(_floats(host), value)
        engine.record(event, stream)
    if right:
        engine.synchronize(event)
    _floats(host).tolist()
    engine.synchronize(event)


def _release(engine: VirtualEngine, *, right: bool) -> None:
    host, stream, event = engine.host_empty(4 * N), engine.stream("out"), engine.event()
    value = torch.ones(N)
    engine.record(event, engine.current())
    engine.wait(stream, event)
    with engine.on(stream):
        engine.copy(_floats(host), value)
    if right:
        engine.keep(value, stream)
    del value
    torch.ones(1)
    engine.synchronize_stream(stream)


def _two_writers(engine: VirtualEngine, *, right: bool) -> None:
    target, event = engine.device_empty(4 * N), engine.event()
    streams = [engine.stream("a"), engine.stream("b")]
    engine.record(event, engine.current())
    for stream in streams:
        engine.wait(stream, event)
        with engine.on(stream):
            target.fill_(1)
            engine.keep(target, stream)
            if right:
                engine.record(event, stream)
    for stream in streams:
        engine.synchronize_stream(stream)


def _disjoint_writers(engine: VirtualEngine, *, right: bool) -> None:
    target, event = engine.device_empty(4 * N), engine.event()
    engine.record(event, engine.current())
    for i, stream in enumerate((engine.stream("a"), engine.stream("b"))):
        engine.wait(stream, event)
        with engine.on(stream):
            target[i * N : (i + 1) * N + (0 if right else 1)].fill_(1)
            engine.keep(target, stream)
    for name in ("a", "b"):
        engine.synchronize_stream(name)


def _host_write(engine: VirtualEngine, *, right: bool) -> None:
    # The source of a copy that is still in flight is overwritten by the host.
    host, stream, event = engine.host_empty(4 * N), engine.stream("in"), engine.event()
    target = engine.device_empty(4 * N)
    host.zero_()
    engine.record(event, engine.current())
    engine.wait(stream, event)
    with engine.on(stream):
        engine.copy(target, host)
        engine.keep(target, stream)
        engine.record(event, stream)
    if right:
        engine.synchronize(event)
    host.fill_(1)
    engine.synchronize(event)


def _freed_host(engine: VirtualEngine, *, right: bool) -> None:
    host, stream, event = engine.host_empty(4 * N), engine.stream("out"), engine.event()
    value = torch.ones(N)
    engine.record(event, engine.current())
    engine.wait(stream, event)
    with engine.on(stream):
        engine.copy(_floats(host), value)
        engine.record(event, stream)
    if right:
        engine.synchronize(event)
    del host
    torch.ones(1)
    engine.synchronize(event)


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (_host_read, "host-read"),
        (_release, "released"),
        (_two_writers, "race"),
        (_disjoint_writers, "race"),
        (_host_write, "host-read"),
        (_freed_host, "released"),
    ],
)
def test_each_kind_is_found_and_its_right_form_is_silent(program: Callable[..., None], kind: str) -> None:
    with VirtualDevice() as device:
        program(device.engine, right=True)
    assert device.hazards == []
    device.check()
    with VirtualDevice() as device:
        program(device.engine, right=False)
    assert {hazard.kind for hazard in device.hazards} == {kind}
    with pytest.raises(Mismatch, match=kind):
        device.check()


def _train(device: VirtualDevice, *, joined: bool) -> torch.Tensor:
    """A training step whose first layer runs on a stream of its own, autograd included."""
    torch.manual_seed(0)
    engine, event = device.engine, device.engine.event()
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], foreach=False)
    side, data = engine.stream("side"), torch.randn(3, 4)
    for _ in range(3):
        engine.record(event, engine.current())
        engine.wait(side, event)
        with engine.on(side):
            hidden = first(data)
            engine.keep(hidden, engine.current())
            engine.record(event, side)
        if joined:
            engine.wait(engine.current(), event)
        second(hidden).square().sum().backward()
        optimizer.step()
        for param in first.parameters():
            assert param.grad is not None
            engine.keep(param.grad, engine.current())
        optimizer.zero_grad()
    return first.weight.detach().clone()


def test_a_whole_training_loop_is_seen() -> None:
    with VirtualDevice() as device:
        seen = _train(device, joined=True)
    assert device.hazards == []
    with VirtualDevice() as other:
        assert torch.equal(_train(other, joined=False), seen)
    assert {hazard.kind for hazard in other.hazards} <= {"race", "released"}
    assert other.hazards


@given(seed=st.integers(0, 2**32 - 1))
def test_random_programs_with_their_edges_are_silent_and_right(seed: int) -> None:
    """Ops on random streams; every op waits for the last one that touched what it touches."""
    chance = random.Random(seed)
    with VirtualDevice(late=True, seed=seed) as device:
        engine = device.engine
        streams = [engine.current(), engine.stream("a"), engine.stream("b")]
        cells = [_floats(engine.device_empty(16)) for _ in range(3)]
        hosts = [_floats(engine.host_empty(16)) for _ in range(2)]
        for cell in cells:
            cell.zero_()
        plain = [[0.0] * 4 for _ in cells]
        stored: list[list[float] | None] = [None] * len(hosts)
        touched: dict[int, list[object]] = {}

        def ordered(stream: str, *places: int) -> None:
            for place in places:
                for event in touched.get(place, []):
                    engine.wait(stream, event)  # type: ignore[arg-type]

        def done(stream: str, *places: int) -> None:
            event = engine.event()
            engine.record(event, stream)
            for place in places:
                touched.setdefault(place, []).append(event)

        done(engine.current(), 0, 1, 2)
        for _ in range(20):
            stream, i, h = chance.choice(streams), chance.randrange(3), chance.randrange(2)
            kind = chance.choice(["add", "out", "in"])
            ordered(stream, i, 10 + h)
            with engine.on(stream):
                if kind == "add":
                    cells[i].add_(1.0)
                    plain[i] = [x + 1.0 for x in plain[i]]
                elif kind == "out":
                    engine.copy(hosts[h], cells[i])
                    stored[h] = list(plain[i])
                elif stored[h] is not None:
                    engine.copy(cells[i], hosts[h])
                    plain[i] = list(stored[h] or [])
                engine.keep(cells[i], stream)
            done(stream, i, 10 + h)
        for stream in streams:
            engine.synchronize_stream(stream)
        got = [cell.tolist() for cell in cells]
    assert device.hazards == []
    assert got == plain


def test_bytes_and_the_virtual_clock() -> None:
    costs = Costs(h2d_s_per_byte=2.0, d2h_s_per_byte=1.0, op_s=lambda name, size_bytes: 5.0 if "add" in name else 0.0)
    with VirtualDevice(costs=costs) as device:
        engine = device.engine
        host, other, memory = engine.host_empty(100), engine.host_empty(100), engine.device_empty(100)
        second = engine.device_empty(100)
        assert device.tracker.live_bytes == 200
        up, down, event = engine.stream("up"), engine.stream("down"), engine.event()
        engine.record(event, engine.current())
        for stream in (up, down):
            engine.wait(stream, event)
        with engine.on(up):
            engine.copy(memory, host)
        with engine.on(down):
            engine.copy(other, second)
        torch.ones(3).add_(1)
    assert engine.moved_bytes == {"h2d": 100, "d2h": 100, "d2d": 0}
    # Both directions and the op run at the same time.
    assert engine.makespan_s == 200.0
    assert engine.busy_s["d2h"] == 100.0
    assert engine.time_s["default"] == 5.0


@pytest.mark.parametrize(
    ("look", "hazard_count"),
    [
        (lambda host: torch.empty_like(host, device="meta"), 0),
        (lambda host: host.new_empty(3), 0),
        (lambda host: host.clone(), 1),
    ],
    ids=["empty_like", "new_empty", "clone"],
)
def test_the_form_of_memory_may_be_looked_at_while_it_is_written(
    look: Callable[[torch.Tensor], object], hazard_count: int
) -> None:
    with VirtualDevice() as device:
        engine = device.engine
        value, host = engine.device_empty(4 * N), engine.host_empty(4 * N)
        out, made = engine.stream("out"), engine.event()
        engine.record(made, engine.current())
        engine.wait(out, made)
        with engine.on(out):
            engine.copy(host, value)
        look(host)
        engine.synchronize_stream(out)
    assert [hazard.kind for hazard in device.hazards] == ["host-read"] * hazard_count
