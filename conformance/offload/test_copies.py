"""Copies of many tensors in one call: their bytes, neighbours as one, and one call for each chunk and direction."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_tensor, examples, raises, requirement
from conformance.offload.cases import Twins, proven, values

COPIES = ("copies_in_one_call",)
_GUARD = 0xEE


def _laid_out(items: list[tuple[int, int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A block, and tensors of it: (elements, gap before, block), one behind the other; in blocks of their own."""
    blocks, tensors = [], []
    for which in (0, 1):
        spans, at = [], 0
        for count, gap, block in items:
            if block == which:
                spans.append((at + 4 * gap, count))
                at += 4 * (gap + count)
        blocks.append((torch.full((at + 8,), _GUARD, dtype=torch.uint8), iter(spans)))
    for _, _, block in items:
        memory, spans_left = blocks[block]
        begin, count = next(spans_left)
        tensors.append(memory[begin : begin + 4 * count].view(torch.float32))
    return torch.stack([torch.nn.functional.pad(b, (0, 200_000 - b.numel())) for b, _ in blocks]), tensors


@requirement(
    "OPT-284",
    "Copies of many tensors in one call MUST write the bytes of each and no others, and count neighbours as one.",
    needs=COPIES,
)
@examples(60)
@example([(30_000, 0, 0)] * 3)  # More than one thread takes.
@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([0, 0, 0, 3]), st.integers(0, 1)), max_size=30))
def test_bytes(offload: Any, items: list[tuple[int, int, int]]) -> None:
    from fastimpl import ops

    ops.available()
    sources: list[torch.Tensor] = []
    for number, (count, _, _) in enumerate(items):
        sources.append(values((count,), number))
    # Sources lie as the targets do, so that neighbours there are neighbours here.
    _, homes = _laid_out(items)
    for home, source in zip(homes, sources, strict=True):
        home.copy_(source)
    _, targets = _laid_out(items)
    count = ops.copy_count(targets, homes)
    ops.copy_all(targets, homes)
    for number, (got, expected) in enumerate(zip(targets, sources, strict=True)):
        assert_same_tensor(got, expected, where=f"tensor {number}")
    blocks = {tensor.untyped_storage().data_ptr(): tensor for tensor in targets if tensor.numel()}
    for tensor in blocks.values():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        covered = torch.zeros(whole.numel(), dtype=torch.bool)
        for other in targets:
            if other.numel() and other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                begin = 4 * int(other.storage_offset())
                covered[begin : begin + other.nbytes] = True
        assert_equal(bool((whole[~covered] == _GUARD).all()), True, where="bytes between and behind")
    runs, last = 0, None
    for target in targets:
        if target.numel():
            place = (target.untyped_storage().data_ptr(), target.data_ptr())
            runs += place != last
            last = (place[0], place[1] + target.nbytes)
    assert_equal(count, runs, where="copies")


@requirement("OPT-285", "Copies that do not fit MUST be refused in one call, with nothing written.", needs=COPIES)
def test_misuse(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    wrong: list[tuple[torch.Tensor, torch.Tensor]] = [
        (torch.zeros(4), torch.ones(5)),
        (torch.zeros(4), torch.ones(4, dtype=torch.int32)),
        (torch.zeros(8)[::2], torch.ones(8)[::2]),
        (torch.zeros(2, 3), torch.ones(3, 2).t()),
        (torch.zeros(4), torch.ones(4, 1)),
    ]
    for target, source in wrong:
        before, first = target.clone(), torch.zeros(3)
        with raises(RuntimeError, where=f"{tuple(source.shape)} to {tuple(target.shape)}"):
            ops.copy_all([first, target], [torch.ones(3), source])
        assert_same_tensor(target, before, where="target")
        assert_same_tensor(first, torch.zeros(3), where="the target before")
    with raises(RuntimeError):
        ops.copy_all([torch.zeros(3)], [])


@requirement(
    "OPT-286", "The operator MUST pass torch.library.opcheck, and version counters see its writes.", needs=COPIES
)
def test_opcheck(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    targets, sources = [torch.zeros(5), torch.zeros(2, 3)], [values((5,), 1), values((2, 3), 2)]
    operator = torch.ops.twinproof.offload_copy.default
    outcome = torch.library.opcheck(operator, (targets, sources), raise_exception=False)
    assert_equal({n: str(r) for n, r in outcome.items() if r != "SUCCESS"}, {}, where="opcheck")
    before = [tensor._version for tensor in targets]
    ops.copy_all(targets, sources)
    assert_equal([t._version > v for t, v in zip(targets, before, strict=True)], [True, True], where="versions")


@requirement(
    "OPT-287",
    "Moving a chunk MUST take one call for each direction, whatever lies in it, and each copy is seen by itself.",
    needs=COPIES,
)
def test_calls(offload: Any) -> None:
    with proven(late=True) as device:
        # Large ones, which are copied by themselves, and small ones between them.
        params = [values((300, 300) if i % 4 else (5, 7), i) for i in range(12)]
        twins = Twins(offload, device, params=params, chunk_bytes=2_400_000)
        before = device.engine.call_count
        twins.step()
        chunk_count = twins.offloader.stats().chunk_count
        # States that a step made go to their places in the slot in one call, and home in another.
        assert_equal(device.engine.call_count - before, 2 * chunk_count, where="calls of the first step")
        for move in (twins.offloader.to_device, twins.offloader.to_host):
            before, copies = device.engine.call_count, device.engine.copy_count
            move(twins.offloader.bundles)
            assert_equal(device.engine.call_count - before, chunk_count, where=f"calls of {move.__name__}")
            assert_equal(device.engine.copy_count - copies > chunk_count, True, where="copies are more")
        twins.check()
        twins.step()
        twins.check()
        twins.offloader.close()
