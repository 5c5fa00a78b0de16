"""``--twinproof-device`` of stores: what runs on it, for whom, and that stores really lie there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from conformance.provers.simt import why_no_prover

_PROGRAM = """
import torch
from conformance.harness.devices import prepare_device
from conformance.kvstore.simt import SimtHandle
from conformance.provers.pretend_device import MixedPlacesError
from fastimpl.kvstore.device import DeviceHandle
from fastimpl.kvstore import KVStore, RowLayout

calls, write, moved, prefetch = [], SimtHandle.write, [], SimtHandle.prefetch
SimtHandle.prefetch = lambda handle, table, ids: moved.append(ids.numel()) or prefetch(handle, table, ids)
SimtHandle.write = lambda handle, table, *rest: calls.append(table) or write(handle, table, *rest)
ids, weights = torch.tensor([7, -3]), torch.ones(2, 4)
for device in (None, "simt", "simt-host", "pretend"):
    if device:
        prepare_device(device, "fastimpl")
    store = KVStore({"t": RowLayout(4)})
    store.set("t", ids, weights)
    print(len(calls), store.can_fill, torch.equal(store.get("t", ids), weights), store.ids("t").tolist(), moved)
DeviceHandle._there = lambda handle, value: value
try:
    store.set("t", ids, weights)
except MixedPlacesError as error:
    print(error.got)
"""


def test_the_kernels_are_those_of_one_implementation(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("KV-001", "MUST be there")
    def test_there():
        pass
    """
    result = toy(tests, "--twinproof-device", "simt")
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*--twinproof-device simt: the kernels are fastimpl's, not toy.impl's*"])


@pytest.mark.night
@pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))
def test_stores_lie_on_it_once_they_are_bound() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "0 True True [-3, 7] []",
        "1 False True [-3, 7] []",
        # Half of the ids before they are written, all before they are read.
        "2 False True [-3, 7] [1, 2]",
        "3 False True [-3, 7] [1, 2]",
        # Ids that nobody brought there.
        "argument 2 of shape (2,) on the host",
    ]
