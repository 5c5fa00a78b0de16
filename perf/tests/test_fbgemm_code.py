"""FBGEMM's functions compute the same after their momenta are re-encoded."""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct

import pytest
import torch

from perf.peers import fbgemm_code
from perf.peers.fbgemm_bags import FbgemmBags, installed
from perf.pipeline.tables import EPS, LR

# f(sum of eight squares as [8] floats, momentum) in the calling convention of Linux: loads, and the registers that
# FBGEMM's function has when it comes to the momentum.
_ENTRY = "c5fc1007 4989f0 4d31d2 c5ff7cc0 c5ff7cc0"
_SUM = "f30f10c8 c4e37d19c001 f30f58c1 488d6424fc c70424"
_MOMENTUM = "c4e279180c24 c5f85bc9 488d642404 f30f5ec1 f3430f100c10 f30f58c1 f3430f110410 f30f51c0"
_RETURN = "c5f877 c3"


def _function(columns: int) -> bytes:
    return bytes.fromhex(_ENTRY + _SUM) + struct.pack("<I", columns) + bytes.fromhex(_MOMENTUM + _RETURN)


def _run(code: bytes, squares: list[float], momentum: float) -> tuple[float, float]:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    begin = ctypes.c_char.from_buffer(page)
    call = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p)(ctypes.addressof(begin))
    given, state = (ctypes.c_float * 8)(*squares), ctypes.c_float(momentum)
    root = call(ctypes.addressof(given), ctypes.addressof(state))
    return root, state.value


@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the code is that of x86 with AVX",
)
@pytest.mark.parametrize("columns", [8, 64, 512])
def test_same_results(columns: int) -> None:
    squares, momentum = [0.1 * (i + 1) for i in range(8)], 0.7
    legacy = _function(columns)
    vex, count = fbgemm_code.reencoded(legacy)
    assert (count, len(vex)) == (1, len(legacy))
    assert vex != legacy
    expected = _run(legacy, squares, momentum)
    assert expected[1] > momentum
    assert _run(vex, squares, momentum) == expected


def test_only_the_momentum_changes() -> None:
    around, one = bytes(range(256)), _function(16)
    changed, count = fbgemm_code.reencoded(around + one + around + one)
    assert count == 2
    assert changed.startswith(around)
    assert changed[len(around + one) :].startswith(around)
    assert fbgemm_code.reencoded(changed) == (changed, 0)
    # A part of it is other code.
    assert fbgemm_code.reencoded(one[:-10]) == (one[:-10], 0)


@pytest.mark.skipif(not installed(), reason="fbgemm-gpu-cpu is not installed")
def test_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of FBGEMM as it is, then re-encoded; no other test has rows of 24, whose code is shared."""
    tables = [torch.linspace(-1, 1, 50 * 24).view(50, 24)]
    ids, offsets = torch.arange(50), torch.arange(51)
    grad = torch.arange(50.0 * 24).view(50, 24).remainder(17).sub(8).div(8)

    def trained() -> torch.Tensor:
        bags = FbgemmBags(tables, "rowwise_adagrad", LR, EPS)
        for _ in range(2):
            bags.step(bags.pool(ids, offsets), grad)
        return bags.tables[0]

    with monkeypatch.context() as patched:
        patched.setattr(fbgemm_code, "reencode", lambda: 0)
        expected = trained()
    assert fbgemm_code.reencode() == 1
    assert torch.equal(trained(), expected)
    assert fbgemm_code.reencode() == 0
