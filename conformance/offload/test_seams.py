"""Sizes next to every threshold, groups and dtypes side by side in one chunk, slots that grow, every rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, requirement
from conformance.harness.threads import torch_threads
from conformance.offload.cases import TASK_BYTES, CpuArm, Twins, assert_same_numbers, proven_on, values
from conformance.provers.pretend_device import on_host
from refimpl.optimizers import adam_step
from twinproof.optimizers import AdamHyper

ADAM, PACK = ("fused_cpu_adam",), ("packed_tensors",)
UNITS = {"AVX512": [-1, 0, 1, 2], "AVX2": [-1, 0, 1]}.get(torch.backends.cpu.get_cpu_capability(), [-1, 0])


@requirement(
    "OPT-292",
    "Packing MUST move every byte of tensors of n times 256 KiB, one byte less and one more, alone and beside small "
    "ones, with any number of threads; unpacking the inverse.",
    needs=PACK,
)
def test_pieces(offload: Any) -> None:
    from fastimpl.offload.packing import pack, unpack

    edges = [count * TASK_BYTES + more for count in (1, 2, 3) for more in (-1, 0, 1)]
    lists = [*([edge] for edge in edges), [5, *edges[:3], 0, 1], [TASK_BYTES - 7, 7, 1], [1] * 3 + edges[3:6]]
    generator = torch.Generator().manual_seed(1)
    for sizes in lists:
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        offsets = torch.tensor([0, *[size + 3 for size in sizes]]).cumsum(0)[:-1].tolist()
        expected = torch.full((offsets[-1] + sizes[-1] + 3,), 0xEE, dtype=torch.uint8)
        for tensor, offset in zip(tensors, offsets, strict=True):
            expected[offset : offset + tensor.numel()] = tensor
        for thread_count in (1, 2, 3):
            where = f"{sizes}, {thread_count} threads"
            slab = torch.full_like(expected, 0xEE)
            back = [torch.full_like(tensor, 0x55) for tensor in tensors]
            with torch_threads(thread_count):
                pack(tensors, slab, offsets)
                unpack(back, slab, offsets)
            assert_same_tensor(slab, expected, where=f"slab of {where}")
            for number, (got, tensor) in enumerate(zip(back, tensors, strict=True)):
                assert_same_tensor(got, tensor, where=f"tensor {number} of {where}")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor.detach()).cpu()


class _Groups:
    """float32, bfloat16 and float16 parameters in turn, in groups that decay, do not, and differ; and the formula."""

    def __init__(self, offload: Any, device: Any, **options: Any) -> None:
        dtypes = [torch.bfloat16, torch.float32, torch.float16] * 3
        self.params = [torch.nn.Parameter(values((5, 3 + i), i, dtype)) for i, dtype in enumerate(dtypes)]
        self.masters = offload.MasterWeights(self.params)
        stepped = list(self.masters.parameters())
        self.groups: list[dict[str, Any]] = [
            {"weight_decay": 0.3},
            {"weight_decay": 0.0},
            {"lr": 0.5, "betas": (0.5, 0.7), "eps": 1e-3},
        ]
        # Neighbours in memory are of different groups, and each group has every dtype.
        self.group_of = [number // 3 if number % 2 else (number + 1) % 3 for number in range(9)]
        listed = [
            {"params": [param for param, of in zip(stepped, self.group_of, strict=True) if of == number], **group}
            for number, group in enumerate(self.groups)
        ]
        self.optimizer = torch.optim.AdamW(listed, lr=0.05)
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer, engine=device.engine, master_weights=self.masters, step_device="cpu", **options
        )
        with _disable_current_modes():
            # The oracle steps on the CPU, as what it is compared with does: a GPU divides by a number in another way.
            self.weights = [_on_cpu(param).float().clone() for param in self.params]
            self.moments = [[torch.zeros_like(weight) for _ in range(2)] for weight in self.weights]
        self.counts = [0] * 9

    def step(self, number: int, skip: tuple[int, ...]) -> None:
        for i, param in enumerate(self.params):
            param.grad = None if i in skip else values(param.shape, 100 * number + i, param.dtype)
        with _disable_current_modes():
            grads = [None if param.grad is None else _on_cpu(param.grad) for param in self.params]
        self.optimizer.step()
        self.offloader.settle()
        with _disable_current_modes():
            for i, grad in enumerate(grads):
                if grad is None:
                    continue
                self.counts[i] += 1
                numbers: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
                numbers |= self.groups[self.group_of[i]]
                hyper = AdamHyper.of(step=self.counts[i], decoupled=True, **numbers)
                adam_step(hyper, grad, self.weights[i], *self.moments[i])
            for i, (param, weight) in enumerate(zip(self.params, self.weights, strict=True)):
                where = f"parameter {i}, {param.dtype}, group {self.group_of[i]}, step {number}"
                assert_same_tensor(_on_cpu(param), weight.to(param.dtype), where=where)
            for master, weight in zip(self.masters.parameters(), self.weights, strict=True):
                assert_same_tensor(_on_cpu(master), weight, where=f"a master, step {number}")


@requirement(
    "OPT-293",
    "A step on the CPU MUST step each parameter by the numbers of its own group and count, and round it to its own "
    "dtype, where groups, dtypes, counts and masters are mixed in one chunk.",
)
@pytest.mark.parametrize(("chunk_bytes", "slots"), [(0, 1), (1, 2), (600, 2)])
def test_mixed(offload: Any, device: str, chunk_bytes: int, slots: int) -> None:
    with proven_on(device, late=True) as place:
        groups = _Groups(offload, place, chunk_bytes=chunk_bytes, slots=slots)
        for number, skip in enumerate(((), (1, 3, 5), (0, 2), ())):
            groups.step(number, skip)
        groups.offloader.close()


@requirement(
    "OPT-294",
    "Steps MUST be right, without a hazard, where a step moves more than the one before it, and then less: slots grow "
    "while copies of the last step are still under way.",
)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_growing_slots(offload: Any, device: str, slots: int) -> None:
    shapes = ((3,), (5, 7), (64, 8), (40, 33), (2,))
    for halves in (False, True):
        for seed in (None, 1):
            with proven_on(device, late=True, seed=seed) as place:
                arm = CpuArm(offload, place, halves=halves, shapes=shapes, chunk_bytes=1, slots=slots)
                for skip in ((1, 2, 3, 4), (2, 3), (0, 1), (), (2, 3, 4), ()):
                    arm.step(skip=skip)
                arm.check()
                arm.offloader.close()
    with proven_on(device, late=True) as place:
        # In slots of the place, whose states are made when a parameter has its first gradient.
        given = [values(shape, i) for i, shape in enumerate(shapes)]
        twins = Twins(offload, place, params=given, slots=slots)
        skips: tuple[tuple[int, ...], ...] = ((1, 2, 3, 4), (2, 3), (3,), (), ())
        for number, absent in enumerate(skips):
            if number % 2:
                twins.offloader.prefetch()
            twins.step(skip=absent)
            twins.check()
        assert_equal(twins.offloader.residency().device_bytes, 0, where="bytes left on the device")
        twins.offloader.close()


@requirement(
    "OPT-295",
    "A step MUST round weights to 16 bits to nearest even for every exponent and every pattern of bits, and keep NaNs "
    "NaNs whatever their payload.",
    needs=ADAM,
)
def test_every_rounding(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    master = ((torch.arange(65536, dtype=torch.int32) << 16)[:, None] | low).view(torch.float32).reshape(-1)
    zeros = torch.zeros_like(master)
    # A step of no length: the weights are the masters, rounded.
    hyper = AdamHyper.of(lr=0.0, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0, step=1, decoupled=True)
    for dtype in (torch.bfloat16, torch.float16):
        for unit in UNITS:
            given, weight = master.clone(), torch.zeros(master.numel(), dtype=dtype)
            ops.adam_step(hyper, [zeros], [given], [zeros.clone()], [zeros.clone()], [], [weight], isa=unit)
            assert_same_numbers(given, master, where=f"masters on unit {unit}")
            assert_same_numbers(weight, master.to(dtype), where=f"weights of {dtype} on unit {unit}")
