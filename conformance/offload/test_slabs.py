"""Host memory of the offloader: pages of its own, where they lie, and when they go."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_le, examples, raises, requirement
from conformance.offload.cases import values

SLABS = ("host_slabs",)


@pytest.mark.night
@requirement(
    "OPT-288",
    "Host memory MUST be zeroed pages of its own, live as long as a view of it, and be counted to the byte.",
    needs=SLABS,
)
@examples(25)
@given(st.lists(st.sampled_from([1, 4095, 4096, 4097, 300_000, 3 << 20]), min_size=1, max_size=4))
def test_pages(offload: Any, sizes: list[int]) -> None:
    from fastimpl import ops

    ops.available()
    gc.collect()
    before = ops.slab_counts()
    slabs = [ops.host_slab(size) for size in sizes]
    now = ops.slab_counts()
    assert_equal(now.live_count - before.live_count, len(sizes), where="slabs that live")
    assert_equal(now.live_bytes - before.live_bytes, sum(sizes), where="bytes that live")
    for slab, size in zip(slabs, sizes, strict=True):
        form = (tuple(slab.shape), slab.dtype, slab.data_ptr() % 4096, int(slab.count_nonzero()))
        assert_equal(form, ((size,), torch.uint8, 0, 0), where="form")
        slab.fill_(7)
    # None begins in another's last page.
    pages = {page for s in slabs for page in range(s.data_ptr() // 4096, (s.data_ptr() + s.numel() - 1) // 4096 + 1)}
    assert_equal(len(pages), sum(-(-size // 4096) for size in sizes), where="pages")
    views = [slab[-1:] for slab in slabs]
    slabs.clear()
    del slab
    assert_equal(ops.slab_counts().live_count - before.live_count, len(sizes), where="slabs that a view holds")
    assert_equal([int(view) for view in views], [7] * len(sizes), where="values under a view")
    views.clear()
    after = ops.slab_counts()
    assert_equal((after.live_count, after.live_bytes), (before.live_count, before.live_bytes), where="what is left")
    assert_equal(after.freed_count - before.freed_count, len(sizes), where="slabs that went")


@requirement(
    "OPT-289",
    "Where pages lie MUST be the node that was asked for or, with the reason, anywhere; that is no error.",
    needs=SLABS,
)
def test_nodes(offload: Any) -> None:
    from fastimpl import ops
    from fastimpl.streams import placement_of

    ops.available()
    plain, first, none = ops.host_slab(5000), ops.host_slab(5000, node=0), ops.host_slab(5000, node=900)
    assert_equal(ops.slab_facts(plain), ops.SlabFacts(False, -1, 0), where="no node")
    assert_equal(placement_of(plain[3:]), "not pinned, any NUMA node", where="no node")
    found = ops.slab_facts(first)
    assert_equal(
        (found is not None and found.node, placement_of(first)[:23]), (0, "not pinned, NUMA node 0"), where="0"
    )
    refused = ops.slab_facts(none)
    assert_equal(refused is not None and refused.node == 900 and refused.bind_error != 0, True, where=str(refused))
    assert_equal("refused with errno" in placement_of(none), True, where=placement_of(none))
    for slab in (first, none):
        slab.fill_(3)
        assert_equal(int(slab.sum(dtype=torch.int64)), 15_000, where="values")
    assert_equal((ops.slab_facts(torch.zeros(4)), placement_of(torch.zeros(4))), (None, ""), where="other memory")
    for wrong in (0, -1):
        with raises(RuntimeError, mentions=("size",)):
            ops.host_slab(wrong)


@requirement(
    "OPT-290",
    "An offloader MUST NOT leave host memory behind, nor take more from step to step, and say how its memory lies.",
    needs=SLABS,
)
def test_offloaders(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    gc.collect()
    before = ops.slab_counts()
    params = [torch.nn.Parameter(values((40, 30), i)) for i in range(6)]
    optimizer = torch.optim.AdamW(params)
    offloader = offload.OptimizerStateOffloader(optimizer, step_device="cpu", chunk_bytes=8192)
    for step in range(4):
        for i, param in enumerate(params):
            param.grad = values(param.shape, 10 * step + i)
        optimizer.step()
        count = ops.slab_counts().made_count
        assert_equal(count - before.made_count, 1, where=f"slabs made until step {step}")
    stats = offloader.stats()
    assert_equal(stats.host_placement, "not pinned, any NUMA node", where="placement")
    assert_equal(ops.slab_counts().live_bytes - before.live_bytes, stats.host_bytes, where="bytes")
    offloader.close()
    del offloader
    gc.collect()
    assert_equal(ops.slab_counts().live_count, before.live_count, where="slabs that live")


def _mapped_bytes() -> int:
    """Address space of this process: what was mapped and not unmapped, touched or not."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))


def _pages(offload: Any) -> int:
    from fastimpl import ops

    # Not touched: address space alone.
    memory = ops.host_slab(64 << 20)
    return int(memory.numel())


def _attached(offload: Any) -> int:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(8 << 20))])
    offloader = offload.OptimizerStateOffloader(optimizer, step_device="cpu")
    host_bytes = offloader.stats().host_bytes
    offloader.close()
    return int(host_bytes)


@requirement(
    "OPT-382",
    "Host memory MUST go back to the system when nothing of it is left: neither slabs nor offloaders that are closed "
    "leave pages mapped.",
    needs=SLABS,
)
def test_unmapped(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    for use in (_pages, _attached):
        use(offload)
    before, used_bytes = _mapped_bytes(), {_pages: 0, _attached: 0}
    for _ in range(12):
        for use in used_bytes:
            used_bytes[use] += use(offload)
    gc.collect()
    least_bytes = min(used_bytes.values())
    assert_le(1 << 29, least_bytes, where="bytes of host memory that came and went")
    # Threads that begin meanwhile map stacks and heaps of their own.
    assert_le(_mapped_bytes() - before, least_bytes // 2, where="bytes that stay mapped")


def _counts_in_a_child() -> list[int]:
    """Slabs that a forked child made, freed and has left, of three that it makes and drops."""
    from fastimpl import ops

    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Other threads hold no lock that the child takes.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        before = ops.slab_counts()
        for _ in range(3):
            ops.host_slab(5000)
        after = ops.slab_counts()
        found = [after.freed_count - before.freed_count, after.live_bytes - before.live_bytes]
        os.write(write_end, json.dumps(found).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as told:
        found = json.loads(told.read() or "[]")
    os.waitpid(child, 0)
    return list(found)


@requirement(
    "OPT-436",
    "Host memory that a forked child makes MUST go in the child as in its parent, whatever the parent made before.",
    needs=SLABS,
)
def test_forked_children(offload: Any) -> None:
    from fastimpl import ops

    ops.available()
    kept = ops.host_slab(5000)
    assert_equal(_counts_in_a_child(), [3, 0], where="slabs that went in the child, and bytes that stayed")
    kept.fill_(1)
