"""Values once more: options that are tensors, mixed dtypes, complex and tied parameters, variants of the arithmetic."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_tensor, examples, requirement, succeeds
from conformance.offload.cases import OPTIMIZERS, SHAPES, Twins, in_host_memory, proven, proven_on, values
from conformance.offload.foreign import FusedAdam

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1}),
    ("Adam", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
]


@requirement("OPT-028", "Every variant of an optimizer's arithmetic MUST give the plain one's bits.")
@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_variants(offload: Any, device: str, kind: str, options: dict[str, Any]) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, kind, options=options)
        for _ in range(3):
            twins.step()
            twins.check()
        twins.offloader.close()


@requirement("OPT-004", "A learning rate that is a tensor MUST be the same object and its new value the next step's.")
def test_tensor_learning_rate(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place, options={"lr": 0.5, "fused": True})
        rates = [torch.full((), 0.5, device=place.engine.device) for _ in range(2)]
        for optimizer, rate in zip((twins.plain, twins.optimizer), rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
        for factor in (1.0, 0.5, 0.25):
            for rate in rates:
                rate.mul_(factor)
            twins.offloader.prefetch()
            twins.step()
        assert_equal(twins.optimizer.param_groups[0]["lr"] is rates[1], True, where="identity of the learning rate")
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["lr"] = 0.5
        twins.check()
        twins.offloader.close()


@requirement("OPT-010", "Gradients clipped by value MUST give the plain loop's bits, and clipping by norm its norm.")
def test_clipping(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        for _ in range(2):
            twins.set_gradients()
            norms = [torch.nn.utils.clip_grad_norm_(arm, 0.5) for arm in (twins.plain_params, twins.params)]
            for arm in (twins.plain_params, twins.params):
                torch.nn.utils.clip_grad_value_(arm, 0.01)
            twins.plain.step()
            twins.optimizer.step()
            twins.check()
        twins.offloader.close()
    assert_same_tensor(norms[1], norms[0], where="norm")


@requirement("OPT-013", "Parameters of several dtypes MUST be stepped together, each state keeping its dtype for ever.")
def test_mixed_dtypes(offload: Any, device: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    params = [values(shape, i, dtype) for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))]
    with proven_on(device) as place:
        twins = Twins(offload, place, "AdamW", params, options={"lr": 0.01, "foreach": False}, chunk_bytes=1)
        for _ in range(3):
            twins.step()
            twins.offloader.load_state_dict(twins.offloader.snapshot())
            twins.check()
        twins.offloader.close()


@requirement("OPT-018", "A parameter listed twice in a group MUST be stepped as torch steps it, and moved once.")
def test_tied(offload: Any, device: str) -> None:
    with proven_on(device) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate parameters")
        twins = Twins(offload, place, "SGD", groups=[([0, 1, 0], {}), ([2, 3], {})])
        for _ in range(3):
            twins.step()
            twins.check()
        payload = twins.offloader.stats().payload_bytes
        twins.offloader.close()
    assert_equal(payload, sum(param.nbytes for param in twins.params), where="payload")


@requirement("OPT-023", "Complex parameters and sizes around vector widths MUST be stepped and loaded like any other.")
def test_complex_and_odd(offload: Any, device: str) -> None:
    numbers = [1, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097]
    complex_param = torch.complex(values((6,), 1), values((6,), 2))
    with proven_on(device) as place:
        for params in ([values((n,), n) for n in numbers], [complex_param, values((4,), 3)]):
            twins = Twins(offload, place, "Adam", params, options={"foreach": False})
            for _ in range(2):
                twins.step()
                twins.check()
                with succeeds("a load", where="what a snapshot gave"):
                    twins.offloader.load_state_dict(twins.offloader.snapshot())
            twins.offloader.close()


@requirement("OPT-022", "The order of parameters MUST NOT change a value, and the selection MUST be a function of it.")
@given(order=st.permutations(range(len(SHAPES))), fraction=st.floats(0, 1))
@examples(20)
def test_order(offload: Any, device: str, order: list[int], fraction: float) -> None:
    chosen = []
    with proven_on(device) as place:
        for _ in range(2):
            params = [values(SHAPES[i], i) for i in order]
            twins = Twins(offload, place, "AdamW", params, fraction=fraction)
            for _ in range(2):
                twins.step()
            twins.check()
            chosen.append([tuple(bundle.param.shape) for bundle in twins.offloader.bundles])
            twins.offloader.close()
    assert_equal(chosen[1], chosen[0], where="selected parameters")
    assert_equal(chosen[0], [SHAPES[i] for i in order][: len(chosen[0])], where="in the order of the parameters")


# Sizes that differ, so that no shape is another's by chance, and dimensions of one element.
_DIMENSIONS = ((), (5,), (1,), (3, 4), (1, 7), (7, 1), (2, 3, 4), (2, 3, 1, 4), (4, 3, 3, 2), (2, 1, 3, 2, 4))


@requirement(
    "OPT-496",
    "The states for which a parameter has places before its first step MUST be those that torch makes in it, by name, "
    "shape and dtype, whatever the optimizer, its options and the parameter's dimensions are; and a load MUST take "
    "what was saved of them.",
)
@pytest.mark.parametrize(("kind", "options"), [*OPTIMIZERS.items(), *VARIANTS])
def test_foreseen_states(offload: Any, kind: str, options: dict[str, Any]) -> None:
    # These look at values of the device in their own arithmetic, or at the sign of a scalar on the host.
    with proven(this_branch_only=kind in ("Adafactor", "ASGD", "Rprop")) as device:
        params = [values(shape, 3, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in _DIMENSIONS]
        twins = Twins(offload, device, kind, params, options=options)
        twins.offloader.offload()
        foreseen = {
            id(bundle.param): {name: (place.shape, place.dtype) for name, place in bundle.places.items()}
            for bundle in twins.offloader.bundles
        }
        twins.step()
        moved = 0
        for plain, param in zip(twins.plain_params, twins.params, strict=True):
            made = {
                name: (tuple(value.shape), value.dtype)
                for name, value in twins.plain.state.get(plain, {}).items()
                if isinstance(value, torch.Tensor) and value.dim()
            }
            moved += sum(math.prod(shape) * each.itemsize for shape, each in made.values())
            assert_equal(foreseen.get(id(param), {}), made, where=f"{kind}, a parameter of {tuple(param.shape)}")
        assert_equal(twins.offloader.stats().payload_bytes, moved, where="bytes that move")
        saved = twins.offloader.snapshot()
        with succeeds("a load", where=f"{kind} of its own states"):
            twins.offloader.load_state_dict(in_host_memory(device, saved))
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


_COUNTS = (96, 40, 24)
# Which of them are of half precision.
_HALVES = tuple(itertools.product((True, False), repeat=len(_COUNTS)))
# Bytes by which a parameter is selected: of its states and its master; of itself where no state is foreseen.
_WEIGHTS: dict[str, Any] = {
    "FusedAdam": (FusedAdam, lambda count, is_half: 4 * count),
    "Adam": (torch.optim.Adam, lambda count, is_half: (12 if is_half else 8) * count),
    "SGD": (torch.optim.SGD, lambda count, is_half: 4 * count if is_half else 0),
}


@requirement(
    "OPT-497",
    "A fraction MUST be of the bytes of all states and masters where states are foreseen, and of all parameters where "
    "they are not, in the order of the parameters: whichever of them are float32, and thus their own masters. Of all "
    "of them everything MUST move.",
)
@pytest.mark.parametrize("kind", list(_WEIGHTS))
def test_fractions_beside_masters(offload: Any, kind: str) -> None:
    make, weight = _WEIGHTS[kind]
    for halves in _HALVES:
        sizes = [weight(count, is_half) for count, is_half in zip(_COUNTS, halves, strict=True)]
        for fraction in (0.0, 0.3, 0.7, 1.0):
            with proven() as device:
                dtypes = [torch.bfloat16 if is_half else torch.float32 for is_half in halves]
                params = [
                    torch.nn.Parameter(values((count,), number, dtype))
                    for number, (count, dtype) in enumerate(zip(_COUNTS, dtypes, strict=True))
                ]
                masters = offload.MasterWeights(params)
                optimizer = make(masters.parameters(), lr=0.01)
                offloader = offload.OptimizerStateOffloader(
                    optimizer, engine=device.engine, master_weights=masters, fraction=fraction
                )
                for _ in range(2):
                    for param in params:
                        param.grad = torch.ones_like(param)
                    optimizer.step()
                offloader.settle()
                where = f"{kind}, halves {halves}, fraction {fraction}"
                before = [sum(sizes[:number]) for number in range(len(sizes))]
                wanted = [n for n, done in enumerate(before) if sizes[n] and done < fraction * sum(sizes)]
                stepped = list(masters.parameters())
                chosen = [n for bundle in offloader.bundles for n, p in enumerate(stepped) if p is bundle.param]
                assert_equal(chosen, wanted, where=f"parameters that move, {where}")
                moving = [value for n in wanted for value in optimizer.state[stepped[n]].values()]
                moving = [value for value in moving if isinstance(value, torch.Tensor) and value.dim()]
                payload = sum(value.nbytes for value in moving + [stepped[n] for n in wanted if halves[n]])
                assert_equal(offloader.stats().payload_bytes, payload, where=f"bytes that move, {where}")
                residency = offloader.residency()
                assert_equal((residency.device_bytes, residency.host_bytes), (0, payload), where=f"places, {where}")
                offloader.close()
