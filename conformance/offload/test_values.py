"""Values: whatever moves, and however, every bit is that of the plain optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import OPTIMIZERS, SHAPES, Twins, proven_on, values
from twinproof.errors import UnsupportedError


@requirement("OPT-001", "Every supported optimizer MUST give the bits of the plain one after every step.")
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_every_optimizer(offload: Any, device: str, kind: str) -> None:
    # These two look at values of the device in their own arithmetic.
    with proven_on(device, this_branch_only=kind in ("Adafactor", "ASGD")) as place:
        twins = Twins(offload, place, kind)
        for _ in range(3):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-002", "The single, foreach and fused implementations MUST each be equal to themselves.")
@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_implementation_flags(offload: Any, device: str, flags: dict[str, Any], dtype: torch.dtype) -> None:
    with proven_on(device) as place:
        twins = Twins(
            offload, place, "AdamW", [values(s, i, dtype) for i, s in enumerate(SHAPES)], options={"lr": 0.01, **flags}
        )
        for _ in range(3):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-003", "A learning rate that changes between any two operations MUST be the next step's.")
@pytest.mark.parametrize("early", [True, False])
def test_schedulers(offload: Any, device: str, early: bool) -> None:
    with proven_on(device) as place, warnings.catch_warnings():
        warnings.simplefilter("error")
        twins = Twins(offload, place, options={"lr": 0.5})
        schedules = [torch.optim.lr_scheduler.ExponentialLR(twins.plain, 0.5)]
        if early:
            # Attached before the offloader: taken off and put on again below it.
            twins.offloader.close()
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(twins.optimizer, 0.5))
            twins.offloader = offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine, chunk_bytes=1024)
        else:
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(twins.optimizer, 0.5))
        for _ in range(3):
            twins.step()
            for schedule in schedules:
                schedule.step()
            twins.offloader.offload()
            twins.check()
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-006", "Each parameter MUST be stepped with its own group's options.")
def test_groups(offload: Any, device: str) -> None:
    groups = [([0, 3], {"lr": 0.1}), ([1], {"weight_decay": 0.5}), ([2], {"lr": 0.3, "weight_decay": 0.0})]
    with proven_on(device) as place:
        twins = Twins(offload, place, groups=groups, options={"lr": 0.01})
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-007", "A parameter without a gradient MUST keep its bits, its state and its step count.")
@given(skips=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=4))
def test_missing_gradients(offload: Any, device: str, skips: list[set[int]]) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        for skip in skips:
            twins.step(sorted(skip))
            twins.check()
        twins.offloader.close()


@requirement("OPT-009", "Accumulated and clipped gradients MUST give the bits of the plain loop.")
def test_accumulation_and_clipping(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        for _ in range(2):
            twins.optimizer.zero_grad()
            twins.plain.zero_grad()
            for _ in range(3):
                twins.set_gradients(add=True)
                twins.offloader.offload()
                twins.offloader.prefetch()
            for params in (twins.plain_params, twins.params):
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            twins.plain.step()
            twins.optimizer.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-011", "A step that a GradScaler skips MUST change nothing and leave the next one right.")
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(offload: Any, device: str, fused: bool) -> None:
    # A scaler asks the device whether to step, unless the optimizer's own kernel does.
    with proven_on(device, this_branch_only=not fused) as place:
        twins = Twins(offload, place, options={"lr": 0.01, "fused": fused})
        # One of the CPU asks a GPU for what it found, and does not wait for the answer.
        of = "cuda" if device == "cuda" else "cpu"
        scalers = [torch.amp.GradScaler(of, init_scale=4.0) for _ in range(2)]
        for number in range(4):
            twins.set_gradients()
            for scaler, optimizer, params in zip(
                scalers, (twins.plain, twins.optimizer), (twins.plain_params, twins.params), strict=True
            ):
                scaler.scale(torch.ones(1, device=of))
                if number == 1:
                    assert params[0].grad is not None
                    params[0].grad[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            twins.check()
        twins.offloader.close()


@requirement("OPT-015", "NaN payloads, infinities, denormals and signed zeros MUST cross the host unchanged.")
def test_special_values(offload: Any, device: str) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7F800000, 1, -(2**31), 0x7FFFFFFF, 0, -1] * 16, dtype=torch.int32)
    special = bits.view(torch.float32)
    with proven_on(device) as place:
        twins = Twins(offload, place, "SGD", [values((128,), 0), values((128,), 1)])
        twins.step()
        state = twins.plain.state_dict()
        for number in state["state"]:
            state["state"][number]["momentum_buffer"] = special.clone()
        twins.offloader.load_state_dict(state)
        got = twins.offloader.snapshot()
        twins.offloader.close()
    for number in got["state"]:
        assert_same_tensor(got["state"][number]["momentum_buffer"], special, where=f"parameter {number}")


@requirement("OPT-016", "Scalar, empty and odd-sized parameters MUST be stepped like any other.")
@pytest.mark.parametrize("kind", ["Adam", "Rprop"])
def test_odd_sizes(offload: Any, device: str, kind: str) -> None:
    sizes: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,), (15,), (17,), (255,), (257,)]
    # Rprop reads the sign of a scalar's gradient on the host.
    with proven_on(device, this_branch_only=kind == "Rprop") as place:
        twins = Twins(offload, place, kind, [values(size, i) for i, size in enumerate(sizes)])
        for _ in range(3):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-017", "State MUST keep the strides that the plain optimizer gives it.")
def test_strides(offload: Any, device: str) -> None:
    image = values((2, 3, 4, 5), 0).to(memory_format=torch.channels_last)
    with proven_on(device) as place:
        twins = Twins(offload, place, "Adam", [image, values((6, 4), 1).t()])
        for _ in range(2):
            twins.step()
            twins.check()
        twins.offloader.close()
        # A momentum begins as a copy of the gradient, with the gradient's strides.
        twins = Twins(offload, place, "SGD", [values((4, 6), 2)])
        for number in range(2):
            for arm in (twins.plain_params, twins.params):
                arm[0].grad = twins.placed(values((6, 4), 3 + number).t())
            twins.plain.step()
            twins.optimizer.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-020", "Chunk size, slots and fraction MUST NOT change a bit.")
@given(
    chunk_bytes=st.sampled_from([0, 1, 256, 512, 1024, 1 << 20]),
    slots=st.integers(1, 4),
    fraction=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**16),
)
def test_any_partition(
    offload: Any, device: str, chunk_bytes: int, slots: int, fraction: float, seed: int | None
) -> None:
    with proven_on(device, late=seed is not None, seed=seed) as place:
        twins = Twins(offload, place, chunk_bytes=chunk_bytes, slots=slots, fraction=fraction)
        for _ in range(3):
            twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-021", "At least the asked fraction of the bytes MUST move, by at most one parameter more; 0 is none.")
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_fraction(offload: Any, device: str, fraction: float) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, "Adam", options={}, fraction=fraction)
        twins.step()
        payload = twins.offloader.stats().payload_bytes
        twins.offloader.close()
    sizes = [2 * value.nbytes for value in (values(s, 0) for s in SHAPES)]
    assert_equal(fraction * sum(sizes) <= payload < fraction * sum(sizes) + max(sizes), True, where="selected bytes")
    if fraction == 0:
        assert_equal(payload, 0, where="bytes at fraction 0")


@requirement("OPT-024", "What is no optimizer, or steps sparse gradients only, MUST be refused at attachment, by name.")
def test_unsupported(offload: Any, device: str) -> None:
    class Mine:
        """Has parameters and steps them."""

        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": params}]

        def step(self) -> None:
            """Do nothing."""

    with proven_on(device) as place:
        for kind in (torch.optim.SparseAdam, Mine):
            optimizer: Any = kind([torch.nn.Parameter(values((3,), 0))])
            with raises(UnsupportedError, mentions=(kind.__name__,)):
                offload.OptimizerStateOffloader(optimizer, engine=place.engine)
            assert_equal("step" in vars(optimizer), False, where="step taken over")


@requirement("OPT-026", "A closure MUST be evaluated once, and its value returned.")
def test_closure(offload: Any, device: str) -> None:
    calls: list[int] = []
    with proven_on(device) as place:
        twins = Twins(offload, place)

        def closure() -> float:
            twins.set_gradients()
            calls.append(1)
            return 1.5

        got = twins.optimizer.step(closure)
        twins.plain.step()
        twins.check()
        twins.offloader.close()
    assert_equal((got, len(calls)), (1.5, 1), where="value and calls")


@requirement("OPT-027", "Step hooks MUST run once for each logical step, whatever the number of chunks.")
def test_hooks(offload: Any, device: str) -> None:
    seen: list[str] = []
    with proven_on(device) as place:
        twins = Twins(offload, place, chunk_bytes=1)
        twins.optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        twins.optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        twins.step()
        twins.offloader.close()
        twins.step()
        twins.plain.zero_grad()
    assert_equal(seen, ["pre", "post", "pre", "post"], where="hooks")
