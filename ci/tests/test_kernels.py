"""The judge of registers and spills, on reports as the compiler prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

_NAMES = {
    "PoolQuad": "_ZN8fastimpl6device14for_each_indexINS_8pipeline8PoolQuadIiEEEEvT_l",
    "ShareStep": (
        "_ZN8fastimpl6device14for_each_indexIN50_GLOBAL__N__033c8a62_11_pipeline_cu_d8ec9543_125279ShareStepIiEEEEvT_l"
    ),
    "StepRows": "_ZN4simt6detail3runIN8fastimpl8pipeline8StepRowsILNS2_9OptimizerE6ELi1ELj32EEEEEvT_",
    "for_each_word": (
        "_ZN49_GLOBAL__N__044ae866_10_offload_cu_8a7536d6_1186513for_each_word"
        "ILb0EEEvN8fastimpl7offload9PackBatchIXT_EEE"
    ),
}


@pytest.fixture(name="kernels", scope="module")
def _kernels(program: Callable[[str], Any]) -> Any:
    return program("kernels")


def _entry(
    name: str, architecture: int, registers: int, *, stack: int = 0, spills: Sequence[int] = (0, 0)
) -> list[str]:
    mangled = _NAMES[name]
    return [
        f"ptxas info    : Compiling entry function '{mangled}' for 'sm_{architecture}'",
        f"ptxas info    : Function properties for {mangled}",
        f"    {stack} bytes stack frame, {spills[0]} bytes spill stores, {spills[1]} bytes spill loads",
        f"ptxas info    : Used {registers} registers, used 0 barriers, 400 bytes cmem[0]",
    ]


def _judged(kernels: Any, *entries: list[str], architectures: Sequence[str] = ("90",), **bounds: int) -> list[str]:
    table = kernels.worst(kernels.read_report(line for entry in entries for line in entry))
    limits = {name: {"registers": registers, "stack_bytes": 0, "spill_bytes": 0} for name, registers in bounds.items()}
    return list(kernels.violations(table, limits, architectures))


def test_names_are_short(kernels: Any) -> None:
    entries = [line for name in _NAMES for line in _entry(name, 90, 30)]
    assert set(kernels.worst(kernels.read_report(entries))) == set(_NAMES)


def test_within_bounds(kernels: Any) -> None:
    assert _judged(kernels, _entry("PoolQuad", 90, 40), _entry("ShareStep", 90, 8), PoolQuad=40, ShareStep=8) == []


@pytest.mark.parametrize(
    ("entries", "bounds", "said"),
    [
        ([_entry("PoolQuad", 90, 41)], {"PoolQuad": 40}, "registers got 41, at most 40"),
        ([_entry("PoolQuad", 90, 40, stack=16)], {"PoolQuad": 40}, "stack_bytes got 16, at most 0"),
        ([_entry("PoolQuad", 90, 40, spills=(4, 0))], {"PoolQuad": 40}, "ours spill none"),
        ([_entry("PoolQuad", 90, 40)], {}, "is not in ci/kernels.json"),
        ([_entry("PoolQuad", 90, 40)], {"PoolQuad": 40, "SumStep": 40}, "SumStep: is in ci/kernels.json and was not"),
        ([_entry("PoolQuad", 80, 40)], {"PoolQuad": 40}, "was not compiled for 90"),
        ([_entry("PoolQuad", 90, 32), _entry("PoolQuad", 90, 64)], {"PoolQuad": 40}, "registers got 64"),
    ],
)
def test_violations(kernels: Any, entries: list[list[str]], bounds: dict[str, int], said: str) -> None:
    found = _judged(kernels, *entries, **bounds)
    assert any(said in line for line in found), found


def test_a_spill_cannot_be_written_off(kernels: Any) -> None:
    table = kernels.worst(kernels.read_report(_entry("PoolQuad", 90, 40, stack=8, spills=(4, 4))))
    assert any("ours spill none" in line for line in kernels.violations(table, kernels.bounds_of(table), ()))


def test_a_log_without_kernels_is_no_pass(kernels: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[1/2] Building CXX object\n")
    assert kernels.main([str(tmp_path / "log")]) == 1
    assert kernels.main([str(tmp_path / "no-such-log")]) == 1
