"""What need not be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import assert_equal, requirement, succeeds
from conformance.kvstore.cases import ids_of, store_of
from conformance.provers.search_path import search_path

_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
from conformance.harness.implementation import component
kvstore = component(sys.argv[1], "kvstore")
stores = [kvstore.KVStore({"t": kvstore.RowLayout(4, optimizer="adam")}, optimizer_in_row=True) for _ in range(2)]
bag = kvstore.KVEmbeddingBag(stores[0])
bag(torch.arange(6).reshape(2, 3)).sum().backward()
kvstore.save(stores[0], sys.argv[2])
kvstore.load(stores[1], sys.argv[2])
ids = stores[0].ids("t")
same = torch.equal(stores[0].get_rows("t", ids), stores[1].get_rows("t", ids))
print(stores[0].evict(policy=kvstore.EvictionPolicy.count(2))["t"].evicted_count if same else "wrong")
"""


@pytest.mark.night
@requirement("KV-153", "Training, saving, loading and evicting rows MUST work where numpy is not installed.")
def test_without_numpy(impl: Any, kvstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", _WITHOUT_NUMPY, impl.__name__, str(tmp_path / "ck")]
    paths = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, cwd=tmp_path)
    assert_equal(done.stdout.strip(), "6", where=done.stderr[-500:])
    # In this process numpy is imported already; what remains is an import that happens meanwhile.
    monkeypatch.setitem(sys.modules, "numpy", None)
    store = store_of(kvstore)
    with succeeds("writing a row", "without numpy"):
        store.set("t", ids_of([1]), store.get("t", ids_of([1])))
