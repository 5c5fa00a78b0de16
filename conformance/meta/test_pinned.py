"""Pinned host memory without a GPU: what would be called of CUDA, when, and what memory is there meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.cuda import _pin_memory_utils

from twinproof import engine
from twinproof.engine import CudaEngine

DEVICE = torch.device("cuda", 0)


class _Cuda:
    """Notes the calls that would go to CUDA."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pinned: dict[int, int] = {}
        self.is_capturing = False

    def pin(self, pointer: int, size_bytes: int) -> None:
        self.calls.append("pin")
        self.pinned[pointer] = size_bytes

    def unpin(self, pointer: int) -> None:
        self.calls.append("unpin")
        assert self.calls[-2] == "synchronize"
        del self.pinned[pointer]

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE
        assert not self.is_capturing, "waiting for the device ends a capture"
        self.calls.append("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Cuda]:
    made = _Cuda()
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", made.pin)
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", made.unpin)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    yield made
    made.is_capturing = False
    engine.release_dropped()
    assert made.pinned == {}


def test_memory_is_pinned_at_its_size_on_pages_of_its_own(cuda: _Cuda) -> None:
    engine = CudaEngine(DEVICE)
    for size_bytes in (1, 4095, 4096, 4097, 3 << 20):
        memory = engine.host_empty(size_bytes)
        assert (memory.shape, memory.dtype, memory.data_ptr() % 4096) == ((size_bytes,), torch.uint8, 0)
        assert cuda.pinned == {memory.data_ptr(): size_bytes}
        view = memory[1:]
        del memory
        # A view holds it.
        assert len(cuda.pinned) == 1
        view.fill_(7)
        del view
        assert cuda.pinned == {}
    assert engine.host_empty(0).numel() == 0


def test_memory_that_is_dropped_during_a_capture_stays_until_the_capture_is_over(cuda: _Cuda) -> None:
    memory = engine.pinned_empty(5000, DEVICE)
    memory.fill_(3)
    pointer = memory.data_ptr()
    cuda.is_capturing = True
    del memory
    # Neither waited for nor unpinned, and the pages are nobody else's: a captured copy may name them.
    assert (cuda.calls, list(cuda.pinned)) == (["pin"], [pointer])
    assert engine._dropped[0].memory.tolist() == [3] * 5000
    engine.release_dropped()
    assert list(cuda.pinned) == [pointer]
    cuda.is_capturing = False
    other = engine.pinned_empty(100, DEVICE)
    assert list(cuda.pinned) == [other.data_ptr()]
    del other


def test_a_forked_child_calls_nothing(cuda: _Cuda) -> None:
    memory = engine.pinned_empty(100, DEVICE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del memory
            code = 0 if cuda.calls == ["pin"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cuda.calls == ["pin"]
    del memory
    assert cuda.calls == ["pin", "synchronize", "unpin"]


def test_memory_that_cannot_be_unpinned_stays(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memories = [engine.pinned_empty(100 * count, DEVICE) for count in (1, 2, 3)]
    pinned = list(cuda.pinned)
    cuda.is_capturing = True
    memories.clear()
    cuda.is_capturing = False

    def fail(device: torch.device) -> None:
        raise RuntimeError("a capture of another thread")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", fail)
        with pytest.raises(RuntimeError, match="another thread"):
            engine.release_dropped()
    # Memory that is freed while it is pinned would be pinned under somebody else's data.
    assert sorted(region.pointer for region in engine._dropped) == sorted(pinned) == sorted(cuda.pinned)
    engine.release_dropped()
    assert cuda.pinned == {}
