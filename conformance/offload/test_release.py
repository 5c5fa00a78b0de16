"""Which part moves, and when memory of the device goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import PLAIN_SGD, SHAPES, Twins, in_host_memory, proven, proven_on, reread, values
from twinproof.errors import ConfigError

MASTER_BYTES = sum(4 * values(shape, 0).numel() for shape in SHAPES)


def _with_masters(offload: Any, device: Any, **options: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    params: list[torch.Tensor] = [
        torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)
    ]
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    made = offload.OptimizerStateOffloader(
        optimizer, engine=device.engine, master_weights=masters, chunk_bytes=512, **options
    )
    return made, masters, params


def _step(offloader: Any, params: list[torch.Tensor], seed: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(param.shape, 100 * seed + i, torch.bfloat16)
    offloader.optimizer.step()


FLAGS: list[tuple[dict[str, bool], int]] = [
    ({"states": False}, MASTER_BYTES),
    ({"masters": False}, 2 * MASTER_BYTES),
    ({"states": False, "masters": False}, 0),
    ({"offload_optimizer_states": False}, MASTER_BYTES),
    ({"offload_master_weights": False}, 2 * MASTER_BYTES),
    ({}, 3 * MASTER_BYTES),
]


@requirement(
    "OPT-250",
    "offload() MUST move states and masters as its flags say, by its own names and by Megatron's, and nothing else.",
)
@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_flags(offload: Any, device: str, flags: dict[str, bool], expected: int) -> None:
    for release in ("at_offload", "on_request"):
        with proven_on(device) as place:
            offloader, _, params = _with_masters(offload, place, release=release)
            _step(offloader, params, 1)
            offloader.settle()
            offloader.to_device(offloader.bundles)
            assert_equal(offloader.residency().host_bytes, 0, where="before")
            offloader.offload(**flags)
            offloader.release_gpu_memory()
            offloader.settle()
            assert_equal(offloader.residency().host_bytes, expected, where=f"moved with {flags}, {release}")
            _step(offloader, params, 2)
            with raises(ConfigError, mentions=("states", "offload_optimizer_states")):
                offloader.offload(states=False, offload_optimizer_states=True)
            offloader.close()


@requirement(
    "OPT-251",
    "With release on request a step MUST leave everything on the device, offload() copy it out, and "
    "release_gpu_memory() let it go; what is read or written in between is the device's, and nothing is lost.",
)
def test_release(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device, release="on_request")
        for number in range(3):
            if number == 1:
                twins.offloader.prefetch()
                assert_equal(twins.offloader.residency().host_bytes, 0, where="after a prefetch")
            twins.step()
            payload = twins.offloader.stats().payload_bytes
            before = device.engine.moved_bytes["d2h"]
            assert_equal(twins.offloader.residency().device_bytes, payload, where="after a step")
            twins.offloader.offload()
            assert_equal(device.engine.moved_bytes["d2h"] - before, payload, where="copied by offload()")
            assert_equal(twins.offloader.residency().device_bytes, payload, where="before the release")
            if number == 2:
                # A state that is written in between: the host gets what was written.
                for arm, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                    twins.offloader.settle()
                    optimizer.state[arm[0]]["exp_avg"].mul_(0.5)
            twins.offloader.release_gpu_memory()
            twins.offloader.settle()
            assert_equal(twins.offloader.residency().host_bytes, payload, where="after the release")
            twins.check()
        twins.offloader.release_gpu_memory()
        twins.step()
        twins.check()
        # A step between offload() and the release: what it stepped does not go.
        twins.offloader.offload()
        twins.step()
        twins.offloader.release_gpu_memory()
        assert_equal(twins.offloader.residency().host_bytes, 0, where="released after a step")
        twins.check()
        twins.offloader.close()
        twins.step()
    with proven() as device, raises(ConfigError, mentions=("release",)):
        Twins(offload, device, release="soon")
    with proven() as device, raises(ConfigError, mentions=("step_device",)):
        Twins(offload, device, release="on_request", step_device="cpu")


@requirement(
    "OPT-362",
    "With release on request release_gpu_memory() MUST let go what any offload() since the last use has copied out, "
    "both kinds in one call or each in its own, and lose nothing.",
)
@pytest.mark.parametrize("calls", [("states", "masters"), ("masters", "states"), ("masters",)])
def test_released_by_kind(offload: Any, device: str, calls: tuple[str, ...]) -> None:
    with proven_on(device) as place:
        # Places of one unit of alignment each: between two of states lies exactly one of a master.
        params: list[torch.Tensor] = [torch.nn.Parameter(values((64,), i, torch.bfloat16)) for i in range(3)]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=place.engine, master_weights=masters, release="on_request"
        )
        for number in range(2):
            _step(offloader, params, number)
            expected = [master.detach().clone() for master in masters.parameters()]
            for kind in calls:
                offloader.offload(states=kind == "states", masters=kind == "masters")
            offloader.release_gpu_memory()
            offloader.settle()
            size_bytes = 3 * 4 * 64
            kept_bytes = 2 * size_bytes if calls == ("masters",) else 0
            assert_equal(offloader.residency().device_bytes, kept_bytes, where=f"kept after {calls}")
            with _disable_current_modes():
                for master, value in zip(masters.parameters(), expected, strict=True):
                    assert_same_tensor(master.detach(), value, where=f"master released after {calls}")
        offloader.close()


@requirement(
    "OPT-383",
    "With release on request, a state that is bound to another tensor between offload() and the release MUST be that "
    "tensor's afterwards, however often either was written, and lie where the host keeps it.",
)
@pytest.mark.parametrize("chunk_bytes", [512, 1 << 20])
def test_bound_in_between(offload: Any, chunk_bytes: int) -> None:
    with proven() as device:
        twins = Twins(offload, device, release="on_request", chunk_bytes=chunk_bytes)
        for number in range(3):
            twins.step()
            twins.offloader.offload()
            twins.offloader.settle()
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                state = optimizer.state[params[number]]
                other = values(params[number].shape, 50 + number).abs()
                # As many writes as the tensor has seen that it takes the place of.
                while other._version < state["exp_avg_sq"]._version:
                    other.add_(0.0)
                state["exp_avg_sq"] = other
            twins.offloader.release_gpu_memory()
            twins.offloader.settle()
            assert_equal(twins.offloader.residency().device_bytes, 0, where="bytes on the device after the release")
            twins.check()
        twins.offloader.close()


@requirement(
    "OPT-591",
    "With release on request, a state that is bound to a view of its memory, or in another dtype, between offload() "
    "and the release MUST be that tensor's afterwards, dtype and strides included.",
)
@pytest.mark.parametrize("chunk_bytes", [512, 1 << 20])
def test_other_form_in_between(offload: Any, chunk_bytes: int) -> None:
    cases: tuple[tuple[str, Any, str, Any], ...] = (
        ("AdamW", {}, "exp_avg", torch.Tensor.t),
        ("SGD", PLAIN_SGD, "momentum_buffer", lambda value: value.to(torch.bfloat16)),
    )
    for kind, options, name, form in cases:
        with proven() as device:
            given = [values((16, 16), i) for i in range(3)]
            twins = Twins(offload, device, kind, given, options=options, release="on_request", chunk_bytes=chunk_bytes)
            for number in range(3):
                twins.step()
                twins.offloader.offload()
                twins.offloader.settle()
                for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                    state = optimizer.state[params[number]]
                    state[name] = form(state[name])
                twins.offloader.release_gpu_memory()
                twins.offloader.settle()
                assert_equal(twins.offloader.residency().device_bytes, 0, where="bytes on the device after the release")
                twins.check()
            twins.offloader.close()
    with proven() as device:
        offloader, masters, halves = _with_masters(offload, device, release="on_request")
        _step(offloader, halves, 1)
        offloader.offload()
        square = list(masters.parameters())[SHAPES.index((16, 16))]
        square.data = square.data.t()
        expected = square.detach().clone()
        offloader.release_gpu_memory()
        offloader.settle()
        with _disable_current_modes():
            assert_same_tensor(square.detach().contiguous(), expected.contiguous(), where="a master after the release")
        offloader.close()


@requirement("OPT-259", "Masters that are read between offload() and the release MUST be those of the last step.")
def test_masters_read_in_between(offload: Any, device: str) -> None:
    with proven_on(device, late=True) as place:
        offloader, masters, params = _with_masters(offload, place, release="on_request")
        for number in range(2):
            _step(offloader, params, number)
            stepped = [master.detach().clone() for master in masters.parameters()]
            offloader.offload()
            read = [master.detach().clone() for master in masters.parameters()]
            offloader.release_gpu_memory()
            offloader.settle()
            with _disable_current_modes():
                for value, expected, master in zip(read, stepped, masters.parameters(), strict=True):
                    assert_same_tensor(value, expected, where="master read in between")
                    assert_same_tensor(master.detach(), expected, where="master after the release")
        offloader.close()


@requirement(
    "OPT-261",
    "With release on request a step after a load MUST run on the device, with the states that were loaded, which may "
    "come from host memory.",
)
def test_load(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, release="on_request")
        twins.step()
        saved = reread(twins.offloader.snapshot())
        for released in (False, True):
            twins.step()
            twins.plain.load_state_dict(reread(saved))
            twins.offloader.load_state_dict(in_host_memory(place, saved))
            if released:
                twins.offloader.release_gpu_memory()
                twins.offloader.settle()
                assert_equal(twins.offloader.residency().device_bytes, 0, where="on the device after the release")
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement(
    "OPT-501",
    "A copy to the host and its binding MUST be two calls of to_host where they are asked for one by one: the first "
    "leaves everything bound to the device, the second copies nothing, and no bit is lost.",
)
def test_copied_then_bound(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device, release="on_request")
        for number in range(2):
            twins.step()
            offloader, before = twins.offloader, device.engine.moved_bytes["d2h"]
            payload = offloader.stats().payload_bytes
            offloader.to_host(offloader.bundles, binds=False)
            offloader.settle()
            assert_equal(device.engine.moved_bytes["d2h"] - before, payload, where=f"copied, step {number}")
            assert_equal(offloader.residency().device_bytes, payload, where=f"bound to the device, step {number}")
            offloader.to_host(offloader.bundles, copies=False)
            offloader.settle()
            assert_equal(device.engine.moved_bytes["d2h"] - before, payload, where=f"copied in all, step {number}")
            assert_equal(offloader.residency().host_bytes, payload, where=f"bound to the host, step {number}")
            twins.check()
        twins.offloader.close()


@requirement(
    "OPT-502",
    "Each of Megatron's verbs MUST do what ours does that it stands for: reload and reload_offloaded_states bring "
    "everything to the device, offload_states copies it out, release_offloaded_gpu_states lets it go.",
)
@pytest.mark.parametrize("verb", ["reload", "reload_offloaded_states"])
def test_verbs_of_megatron(offload: Any, verb: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, release="on_request")
        twins.step()
        offloader, payload = twins.offloader, twins.offloader.stats().payload_bytes
        for number in range(2):
            offloader.mark_optimizer_states_initialized()
            before = device.engine.moved_bytes["d2h"]
            offloader.offload_states()
            assert_equal(device.engine.moved_bytes["d2h"] - before, payload, where="bytes that offload_states copied")
            offloader.release_offloaded_gpu_states()
            offloader.settle()
            assert_equal(offloader.residency().host_bytes, payload, where=f"released, turn {number}")
            getattr(offloader, verb)()
            assert_equal(offloader.residency().device_bytes, payload, where=f"on the device after {verb}()")
            offloader.sync_before_step()
            twins.step()
            twins.check()
        offloader.close()
