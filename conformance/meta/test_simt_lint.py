"""What goes around ``simt.h`` is found by its text; what does not is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import include_folders, violations
from conformance.provers.simt.lint import is_kernel, main

_HEAD = '#include "common/simt.h"\n'
_AROUND = [
    "const int i = threadIdx.x;",
    "if (blockIdx.x == 0) return;",
    "__syncthreads();",
    "__syncwarp();",
    "sum += __shfl_xor_sync(mask, sum, 1);",
    "const unsigned mask = __activemask();",
    "atomicAdd(&total, 1);",
    "cuda::atomic_ref<int, cuda::thread_scope_device> ref(total);",
    "__shared__ float tile[32];",
    "__threadfence();",
    'asm volatile("");',
    "const auto* p = rows;",
    "float* const p = rows;",
    "void f(const float* rows) const;",
    "Global<const float*> rows;",
    "const float x = *rows;",
    "*out = 1;",
    "return f(*out);",
    "const int64_t n = table->dim;",
    "const auto x = ids[at];",
    "const auto x = batch.ids[at];",
    "const auto p = rows.data();",
    "reinterpret_cast<float4&>(x) = y;",
    "memcpy(to, from, 4);",
    "const int first = __builtin_ctz(mask);",
]
_WITHIN = [
    "const int64_t n = a * b * (c - 1);",
    "float sums[8] = {}; for (int i = 0; i < 8; ++i) sums[i] += row.values[i] * 2;",
    "simt::Vector<float, 4> quad[4]; quad[0] = rows.load_vector<4>(at);",
    "rows.load(at); // threadIdx, *p and __syncthreads() of a comment",
    "sums.atomic_add(at, 1U);",
    "simt::sync_block();",
    "const T value = from.load(2 * i) && !done;",
]


@pytest.mark.parametrize("line", _AROUND)
def test_what_goes_around_is_found(line: str) -> None:
    found = list(violations(f"{_HEAD}\n{line}\n"))
    assert found
    assert {number for number, _ in found} == {3}
    assert all(line.strip() in what for _, what in found)


@pytest.mark.parametrize("line", _WITHIN)
def test_what_does_not_is_left_alone(line: str) -> None:
    assert list(violations(f"{_HEAD}\n{line}\n")) == []


def test_kernels_are_those_that_include_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel, other, launcher = tmp_path / "kernel.h", tmp_path / "other.h", tmp_path / "launcher.cu"
    kernel.write_text(f"{_HEAD}__syncthreads();\n", encoding="utf-8")
    other.write_text("float* p;\n", encoding="utf-8")
    launcher.write_text(f"{_HEAD}float* p;\n", encoding="utf-8")
    assert main([str(other), str(launcher)]) == 0
    assert main([str(kernel), str(other), str(launcher)]) == 1
    assert f"{kernel}:2: a kernel goes around simt.h, an intrinsic: __syncthreads();" in capsys.readouterr().out


def test_the_tests_own_kernels_are_within() -> None:
    text = (Path(__file__).parent / "simt" / "kernels.h").read_text(encoding="utf-8")
    assert is_kernel(text)
    assert list(violations(text)) == []


def test_the_libraries_kernels_are_within() -> None:
    folder = include_folders()[2]
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.h") if path.name != "simt.h"}
    for name, text in texts.items():
        assert not is_kernel(text) or list(violations(text)) == [], name
