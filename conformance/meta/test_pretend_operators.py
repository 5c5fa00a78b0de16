"""Operators of a library on the pretend device: reached where they have a CUDA kernel, refused where they have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastimpl
from conformance.provers.pretend_device import (
    Launcher,
    MixedPlacesError,
    NoKernelError,
    PretendDevice,
    launchers_of,
)
from fastimpl import ops

SOURCES = Path(fastimpl.__file__).parent / "csrc"


@pytest.fixture
def library() -> Iterator[Any]:
    make: Any = torch.library.Library
    made = make("twinproof_meta", "DEF")
    made.define("twice(Tensor value) -> Tensor")
    made.define("host_only(Tensor value) -> Tensor")
    for name in ("twice", "host_only"):
        made.impl(name, lambda value: value * 2, "CPU")
    made.impl("twice", lambda value: value * 2, "CUDA")
    yield made
    made._destroy()


def test_an_operator_with_a_kernel_runs_and_counts_as_one_launch(library: Any) -> None:
    with PretendDevice() as device:
        value = torch.ones(2, device=device.device)
        begin = device.mark
        made = torch.ops.twinproof_meta.twice(value)
        assert made.device == device.device
        assert device.counts(begin).launches == 1
        assert made.tolist() == [2, 2]


def test_an_operator_without_a_kernel_is_refused(library: Any) -> None:
    with PretendDevice() as device, pytest.raises(NoKernelError, match="twinproof_meta::host_only"):
        torch.ops.twinproof_meta.host_only(torch.ones(2, device=device.device))


LAUNCHERS = """
inline void wait_here(int x) { check(cudaStreamSynchronize(x)); }
// A comment: cudaStreamSynchronize(x)
template <typename T>
class Call {
 public:
  explicit Call(const T& like) : like_(like), guard_(like.device()) { f(); }
  const T* upload(const std::vector<T>& values) {
    cudaMemcpyAsync(there, values, 8, cudaMemcpyHostToDevice, stream_);
    return there;
  }
  void read_back(int* here) {
    cudaMemcpyAsync(here, there, 8, cudaMemcpyDeviceToHost, stream_);
    wait_here(stream_);
  }
};
Tensor both_cuda(Tensor a) {
  Call call(a);
  with_ids(a, [&](auto id) {
    call.upload(a);
    if (a) { call.upload(b); }
    call.read_back(c);
    call.read_back(c);
  });
  return a;
}
void none_cuda(Tensor a) { launch<<<1, 1>>>(a); }
STABLE_TORCH_LIBRARY_IMPL(mine, CUDA, m) {
  m.impl("both", TORCH_BOX(&both_cuda));
  m.impl("none", TORCH_BOX(&none_cuda));
}
"""


def test_waits_and_uploads_of_launchers_are_read_from_their_sources(tmp_path: Path) -> None:
    (tmp_path / "call.cuh").write_text(LAUNCHERS[: LAUNCHERS.index("Tensor both")])
    (tmp_path / "mine.cu").write_text(LAUNCHERS[LAUNCHERS.index("Tensor both") :])
    assert launchers_of(tmp_path) == {"mine::both": Launcher(2, 2), "mine::none": Launcher(0, 0)}


def test_the_sources_register_what_the_built_library_has() -> None:
    assert ops.available()
    if not ops.cuda_operators():
        pytest.skip("the library was built without CUDA")
    if not SOURCES.is_dir():
        pytest.skip("no sources beside the library")
    assert sorted(launchers_of(SOURCES)) == [f"twinproof::{name}" for name in ops.cuda_operators()]


def test_our_operators_are_reached_with_what_their_launchers_wait_for() -> None:
    assert ops.available()
    launchers = launchers_of(SOURCES)
    if not launchers:
        pytest.skip("no sources beside the library")
    with PretendDevice(sources=SOURCES) as device:
        data = torch.arange(6.0, device=device.device)
        begins, sizes = (torch.tensor(some, device=device.device) for some in ([4, 0], [2, 1]))
        out = torch.empty(3, device=device.device)
        begin = device.mark
        ops.gather_blocks(data, begins, sizes, out)
        counts, expected = device.counts(begin), launchers["twinproof::pipeline_gather_blocks"]
        assert out.tolist() == [4, 5, 0]
        assert (counts.launches, counts.host_waits) == (1, expected.wait_count)
        assert counts.to_device.hidden_count == expected.upload_count
        with pytest.raises(MixedPlacesError, match="pipeline_gather_blocks"):
            ops.gather_blocks(data, begins.cpu(), sizes, out)
        with pytest.raises(NoKernelError, match="pipeline_advise_huge_pages"):
            ops.advise_huge_pages(data)
