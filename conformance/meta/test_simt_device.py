"""One source, two executions: nvcc takes what the prover has run."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import SimtError, device_usage, why_no_nvcc

pytestmark = pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))

_SOURCE = Path(__file__).parent / "simt" / "kernels.cu"


@pytest.mark.night
def test_the_same_source_compiles_for_devices() -> None:
    found = device_usage(_SOURCE, architectures=["80", "90"])
    assert len(found) == 2 * 12
    assert {usage.architecture for usage in found} == {"80", "90"}
    assert all(0 < usage.register_count <= 64 for usage in found)
    assert all(usage.spill_bytes == 0 for usage in found)


def test_spills_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "hungry.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) hungry(float* p) {\n"
        "  float v[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) v[i] = p[i * 7];\n"
        "  __syncthreads();\n#pragma unroll\n  for (int i = 0; i < 96; ++i) p[i] = v[(i * 31) % 96] * v[i];\n}\n",
        encoding="utf-8",
    )
    (usage,) = device_usage(source, architectures=["90"])
    assert usage.spill_bytes > 0


def test_what_nvcc_refuses_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "bad.cu"
    source.write_text("__global__ void bad() { nothing(); }\n", encoding="utf-8")
    with pytest.raises(SimtError, match="nothing"):
        device_usage(source, architectures=["90"])
