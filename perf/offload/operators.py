"""Calls of offload's CUDA operators: many tensors of mixed sizes, packed and unpacked; updates in a slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perf.gpu.operators import Calls, OperatorCall

__all__ = ["CALLS"]

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
# Elements of one tensor: around a word, and what a launch's blocks share.
_SIZES = (1, 7, 16, 1_000, 65_537)


def _lists(count: int, generator: torch.Generator) -> Iterator[tuple[str, list[torch.Tensor], list[int], int]]:
    """(label, tensors of together about ``count`` elements, offsets, bytes of the slab): aligned, and not."""
    for label, align in (("aligned", 256), ("unaligned", 1)):
        tensors: list[torch.Tensor] = []
        offsets, at, left = [], 3 if align == 1 else 0, count
        while left > 0:
            size = min(left, _SIZES[len(tensors) % len(_SIZES)])
            dtype = _DTYPES[len(tensors) % len(_DTYPES)]
            made = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tensors.append(made.view(dtype))
            offsets.append(at)
            at = -(-(at + made.numel()) // align) * align
            left -= size
        yield label, tensors, offsets, at


def _pack(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, tensors, offsets, size_bytes in _lists(count, generator):
        slab = torch.zeros(size_bytes, dtype=torch.uint8)
        yield OperatorCall(label, (tensors, slab, offsets), 2 * sum(tensor.nbytes for tensor in tensors))


def _unpack(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, tensors, offsets, size_bytes in _lists(count, generator):
        slab = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        yield OperatorCall(label, (targets, slab, offsets), 2 * sum(tensor.nbytes for tensor in tensors))


# Kind, states, dtype. Codes are those of ``fastimpl.offload.slot_step``.
_UPDATES = (
    ("adam, float32", 2, 2, torch.float32),
    ("amsgrad, float32", 3, 3, torch.float32),
    ("momentum, float32", 1, 1, torch.float32),
    ("adagrad, float32", 4, 1, torch.float32),
    ("adam, bfloat16", 2, 2, torch.bfloat16),
    ("adam, float16", 2, 2, torch.float16),
)
# keep, decay, lerp, kept, added, root, step, eps, flags: decoupled decay, and then coupled decay, maximized.
_NUMBERS = [
    *(0.999, 0.0, 0.1, 0.999, 0.001, 0.0316, -0.01, 1e-8, 2.0),
    *(1.0, 0.01, 0.6, 0.9, 1.0, 1.0, -0.02, 1e-3, 5.0),
]


def _update(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, kind, state_count, dtype in _UPDATES:
        # A large tensor, small ones, and more of them than one launch takes.
        sizes = [count - count // 4, *(max(1, count // 4 // 90) for _ in range(90)), 7, 0]
        lists = [
            list(torch.rand(sum(sizes), generator=generator).to(dtype).split_with_sizes(sizes))
            for _ in range(2 + state_count)
        ]
        params, grads, *states = lists
        states += [[]] * (3 - state_count)
        hyper_of = [i % 2 for i in range(len(sizes))]
        # Parameter and states are read and written, the gradient is read.
        moved = (3 + 2 * state_count) * sum(sizes) * dtype.itemsize
        yield OperatorCall(label, (kind, params, grads, *states, hyper_of, _NUMBERS), moved)


def _copies(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    # Neighbours of one block, which are one copy, and tensors of their own.
    for label, sizes, is_block in (
        ("one block", [max(1, count // 100)] * 100, True),
        ("tensors", [max(1, count // 50 + i) for i in range(50)], False),
    ):
        block = torch.randint(0, 1 << 30, (sum(sizes),), dtype=torch.int32, generator=generator)
        sources = (
            list(block.split_with_sizes(sizes))
            if is_block
            else [part.clone() for part in block.split_with_sizes(sizes)]
        )
        targets = [torch.zeros_like(source) for source in sources]
        yield OperatorCall(label, (targets, sources), 2 * block.nbytes)


CALLS: dict[str, Calls] = {
    "offload_copy": _copies,
    "offload_pack": _pack,
    "offload_slot_step": _update,
    "offload_unpack": _unpack,
}
