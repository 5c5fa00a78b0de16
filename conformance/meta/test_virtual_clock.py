"""The virtual clock across the streams of a backward, whose edges are autograd's own."""

from __future__ import annotations

import torch

from conformance.provers.virtual_device import Costs, VirtualDevice


def test_a_backward_on_another_stream_takes_its_time_in_order() -> None:
    costs = Costs(op_s=lambda name, size_bytes: {"aten::mul": 3.0, "aten::exp": 2.0}.get(name, 0.0))
    with VirtualDevice(costs=costs) as device:
        engine = device.engine
        side, event = engine.stream("side"), engine.event()
        weight = torch.ones(3, requires_grad=True)
        engine.record(event, engine.current())
        engine.wait(side, event)
        with engine.on(side):
            looked_up = weight.exp()
            engine.record(event, side)
        engine.wait(engine.current(), event)
        engine.keep(looked_up, engine.current())
        (looked_up * looked_up).sum().backward()  # type: ignore[no-untyped-call]
    # exp, mul; the backward multiplies twice on the caller's stream, then once on the other, which the caller's joins.
    assert engine.time_s[side] == 2.0 + 3.0 + 2 * 3.0 + 3.0
    assert engine.time_s["default"] == engine.time_s[side]
    device.check()
