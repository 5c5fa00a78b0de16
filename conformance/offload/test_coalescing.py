"""Many small tensors as one: packing, and how few copies moving them takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, examples, raises, requirement
from conformance.offload.cases import Twins, in_host_memory, proven, values
from conformance.provers.virtual_device import VirtualDevice

PACK = ("packed_tensors",)


@requirement(
    "OPT-221",
    "Packing MUST write the bytes of every tensor to its place and no other; unpacking the inverse.",
    needs=PACK,
)
@examples(60)
@example([(70_000, 3, 8)] * 3)  # More than one thread takes.
@example([(5, 1, 2)] * 130)  # More than one call takes.
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9), st.sampled_from([1, 2, 4, 8])), max_size=40))
def test_packing(offload: Any, items: list[tuple[int, int, int]]) -> None:
    from fastimpl.offload.packing import pack, unpack

    kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}
    tensors, offsets, at = [], [], 0
    for number, (count, gap, width) in enumerate(items):
        tensors.append((values((count,), number) * 100).to(kinds[width]))
        offsets.append(at + gap)
        at += gap + count * width
    slab, expected = torch.full((2, at + 5), 0xEE, dtype=torch.uint8)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = tensor.view(torch.uint8)
    pack(tensors, slab, offsets)
    assert_same_tensor(slab, expected, where="slab")
    back = [torch.empty_like(tensor) for tensor in tensors]
    unpack(back, slab, offsets)
    for number, (got, tensor) in enumerate(zip(back, tensors, strict=True)):
        assert_same_tensor(got, tensor, where=f"tensor {number}")


@requirement(
    "OPT-262",
    "On a device, packing MUST take one launch for each 160 tensors.",
    needs=PACK,
)
def test_packing_launches(offload: Any) -> None:
    from fastimpl import ops
    from fastimpl.offload.packing import pack, unpack

    # Tensors without memory: where they would lie decides how a list is cut.
    tensors = [torch.empty(4, device="meta") for _ in range(321)]
    slab, offsets = torch.empty(16 * len(tensors), dtype=torch.uint8, device="meta"), list(range(0, 16 * 321, 16))
    for name, verb in (("pack", pack), ("unpack", unpack)):
        with mock.patch.object(ops, name) as called:
            verb(tensors, slab, offsets)
        lengths = [(len(call.args[0]), len(call.args[2])) for call in called.call_args_list]
        assert_equal(lengths, [(160, 160), (160, 160), (1, 1)], where=name)


@requirement(
    "OPT-222",
    "Packing MUST refuse tensors with gaps and places that overlap or lie outside; nothing is written.",
    needs=PACK,
)
def test_packing_misuse(offload: Any) -> None:
    from fastimpl.offload.packing import pack, unpack

    some = [values((8,), 0), values((8,), 1)]
    wrong: list[tuple[list[torch.Tensor], list[int]]] = [
        (some, [0]),
        (some, [0, 31]),
        (some, [40, 0]),
        (some, [0, 70]),
        (some, [-1, 40]),
        ([some[0], values((8, 2), 1)[:, 0]], [0, 32]),
        ([some[0], torch.zeros(1).expand(8)], [0, 32]),
    ]
    for tensors, offsets in wrong:
        for move in (pack, unpack):
            slab = torch.full((100,), 0xEE, dtype=torch.uint8)
            before = [tensor.clone() for tensor in tensors]
            with raises(RuntimeError, where=f"{move.__name__} at {offsets}"):
                move(tensors, slab, offsets)
            assert_same_tensor(slab, torch.full_like(slab, 0xEE), where="slab")
            for got, expected in zip(tensors, before, strict=True):
                assert_same_tensor(got, expected, where="tensor")


@requirement(
    "OPT-223", "Small states that are moved between steps MUST take one copy for each chunk and direction.", needs=PACK
)
def test_copies(offload: Any) -> None:
    with proven(late=True) as device:
        params = [values((3, 5 + i % 7), i) for i in range(60)]
        twins = Twins(offload, device, params=params, chunk_bytes=16_384)
        twins.step()
        twins.offloader.settle()
        chunk_count = twins.offloader.stats().chunk_count
        assert_le(2, chunk_count, where="chunks")
        for move in (twins.offloader.to_device, twins.offloader.to_host):
            before = device.engine.copy_count
            move(twins.offloader.bundles)
            assert_equal(device.engine.copy_count - before, chunk_count, where=f"copies of {move.__name__}")
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()


@pytest.mark.night
@requirement(
    "OPT-224",
    "States that are brought to the device and sent home again MUST keep what was written to them there, a replaced "
    "one too; when none was replaced, in one copy for each chunk and direction.",
    needs=PACK,
)
def test_written_meanwhile(offload: Any) -> None:
    for replaced in (False, True):
        with proven(late=True) as device:
            twins = Twins(offload, device, params=[values((3, 5 + i % 7), i) for i in range(60)], chunk_bytes=16_384)
            twins.step()
            before = device.engine.copy_count
            twins.offloader.to_device(twins.offloader.bundles)
            for arm, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                for param in arm:
                    optimizer.state[param]["exp_avg"].mul_(3)
                if replaced:
                    optimizer.state[arm[7]]["exp_avg"] = optimizer.state[arm[7]]["exp_avg"] + 1
            twins.offloader.offload()
            if not replaced:
                moves = 2 * twins.offloader.stats().chunk_count
                assert_equal(device.engine.copy_count - before, moves, where="copies there and back")
            twins.offloader.settle()
            assert_equal(twins.offloader.residency().device_bytes, 0, where="bytes left on the device")
            twins.check()
            twins.step()
            twins.check()
            twins.offloader.close()


@requirement(
    "OPT-397",
    "A state that is new to a chunk MUST leave the device with offload() whatever else is new beside it: numbers, "
    "texts, counters, and None.",
)
def test_new_states_of_kinds(offload: Any) -> None:
    others = {"count": 3, "text": "new", "scale": torch.tensor(2.0), "nothing": None}
    for place in range(len(others) + 1):
        names = [*others]
        names.insert(place, "average")
        with proven() as device:
            twins = Twins(offload, device, "SGD", chunk_bytes=0)
            twins.step()
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                new = {**others, "average": torch.zeros_like(params[1])}
                optimizer.state[params[1]].update((name, new[name]) for name in names)
            twins.offloader.offload()
            twins.offloader.settle()
            found = twins.optimizer.state[twins.params[1]]["average"]
            assert_equal(device.engine.holds(found), False, where=f"a new state behind {place} others, on the device")
            twins.step()
            twins.check()
            twins.offloader.close()


@requirement(
    "OPT-364",
    "A state that is new to some parameters of a chunk only, the first or a later one, MUST leave the device with "
    "offload().",
)
def test_new_state_of_one(offload: Any) -> None:
    for number in (0, -1):
        with proven() as device:
            twins = Twins(offload, device, "SGD", chunk_bytes=0)
            twins.step()
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                optimizer.state[params[number]]["average"] = torch.zeros_like(params[number])
            twins.offloader.offload()
            twins.offloader.settle()
            found = twins.optimizer.state[twins.params[number]]["average"]
            assert_equal(device.engine.holds(found), False, where=f"a new state of parameter {number} on the device")
            twins.check()
            twins.step()
            twins.check()
            twins.offloader.close()


@requirement(
    "OPT-457",
    "A small state that stays in host memory while its neighbours come and go MUST keep its values, whatever its size: "
    "as large as what is left between states, one element less or more.",
    needs=PACK,
)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129])
def test_neighbours_come_and_go(offload: Any, count: int) -> None:
    with proven(late=True) as device:
        params = [values((size,), seed) for seed, size in enumerate((128, count, 100, count, 64))]
        twins = Twins(offload, device, "SGD", params, options={"lr": 0.1, "momentum": 0.9}, chunk_bytes=16_384)
        for number in range(2):
            twins.step()
            twins.offloader.settle()
            outer = [twins.offloader.bundles[place] for place in ((0, 2, 4), (0, 2))[number]]
            twins.offloader.to_device(outer)
            twins.offloader.offload()
            twins.check()


_NAMES = tuple(enumerate(("exp_avg", "exp_avg_sq")))
# Shapes of which three are one, and two are places of as many bytes.
_SHAPES: tuple[tuple[int, ...], ...] = ((8, 8), (8, 8), (4, 16), (8, 8), (5, 3))
_FORMS: dict[str, Callable[[VirtualDevice, torch.Tensor], torch.Tensor]] = {
    "as planned": lambda _, value: value.clone(),
    "transposed": lambda _, value: value.t().contiguous().t(),
    "with gaps": lambda _, value: value.repeat_interleave(2, dim=1)[:, ::2],
    "of a half": lambda _, value: value.bfloat16(),
    "in host memory": lambda device, value: cast(torch.Tensor, in_host_memory(device, value)),
}
_MOVES: dict[str, Callable[[Any], Any]] = {
    "to_host": lambda offloader: offloader.to_host(offloader.bundles),
    "to_host of the first": lambda offloader: offloader.to_host(offloader.bundles[:1]),
    "offload": lambda offloader: offloader.offload(),
    "offload and release": lambda offloader: (offloader.offload(), offloader.release_gpu_memory()),
    "prefetch": lambda offloader: offloader.prefetch(),
    "its own load": lambda offloader: offloader.load_state_dict(offloader.snapshot()),
    "close": lambda offloader: offloader.close(),
}


@requirement(
    "OPT-460",
    "States that fit their places beside states that do not, by strides, dtype or where they lie, of parameters of "
    "equal shapes and of others, MUST have their values after every move.",
)
@pytest.mark.parametrize(
    ("move", "release"), [*((move, "at_offload") for move in _MOVES), ("offload and release", "on_request")]
)
def test_states_of_other_forms(offload: Any, move: str, release: str) -> None:
    # Not proven: forms are made while nobody steps, on whichever side.
    with VirtualDevice() as device:
        params = [values(shape, i) for i, shape in enumerate(_SHAPES)]
        twins = Twins(offload, device, "Adam", params, chunk_bytes=1 << 16, release=release)
        twins.step()
        pairs = [pair for pair in product(_FORMS, _FORMS) if "as planned" in pair or pair[0] == pair[1]]
        for number, forms in enumerate(pairs):
            twins.offloader.to_device(twins.offloader.bundles)
            twins.offloader.settle()
            expected: list[dict[str, torch.Tensor]] = []
            for i, param in enumerate(twins.params):
                state = twins.optimizer.state[param]
                # The first two have these forms, and the others what stands beside them in turn.
                form = (*forms, "as planned", *forms)[i] if i != 3 else list(_FORMS)[number % len(_FORMS)]
                wanted = {
                    name: values(param.shape, 10 * number + i + at, torch.bfloat16).float() for at, name in _NAMES
                }
                state["exp_avg"] = _FORMS[form](device, wanted["exp_avg"])
                state["exp_avg_sq"] = wanted["exp_avg_sq"].clone()
                expected.append(wanted)
            _MOVES[move](twins.offloader)
            twins.offloader.settle()
            for i, (param, wanted) in enumerate(zip(twins.params, expected, strict=True)):
                for name, value in wanted.items():
                    with _disable_current_modes():
                        found = twins.optimizer.state[param][name].float()
                        assert_same_tensor(
                            found, value, where=f"{name} of parameter {i}, {forms}, by {move}, {release}"
                        )
            if move == "close":
                twins.offloader = offload.OptimizerStateOffloader(
                    twins.optimizer, engine=device.engine, chunk_bytes=1 << 16, release=release
                )
        twins.offloader.close()


@requirement(
    "OPT-503",
    "States of exactly the size up to which they are packed MUST move in one copy for all of a chunk, and states one "
    "element larger each in its own, in both directions and with every bit.",
    needs=PACK,
)
@pytest.mark.parametrize("more", [0, 1])
def test_largest_that_is_packed(offload: Any, more: int) -> None:
    from fastimpl.offload.packing import PACKED_BYTES

    params = [values((PACKED_BYTES // 4 + more,), i) for i in range(3)]
    with proven(late=True) as device:
        twins = Twins(offload, device, "SGD", params, options={"lr": 0.1, "momentum": 0.9}, chunk_bytes=0)
        twins.step()
        twins.offloader.settle()
        for name, options in (("to_device", {"for_good": True}), ("to_host", {})):
            before = device.engine.copy_count
            getattr(twins.offloader, name)(twins.offloader.bundles, **options)
            copies = device.engine.copy_count - before
            assert_equal(copies, 3 if more else 1, where=f"copies of {name}, {more} more than fits")
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()
