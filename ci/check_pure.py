"""In a pure-Python install: fastimpl runs on the reference, with exactly one warning, and saves and loads right."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastimpl
    import fastimpl.checkpoint as checkpoint

own = [str(w.message) for w in caught if "fastimpl" in str(w.message)]
assert len(own) == 1, own
assert fastimpl.build_info()["library"] is None
assert Path(fastimpl.__file__).parent.parent.name == "pure", fastimpl.__file__

state = {"a": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7)}
with tempfile.TemporaryDirectory() as folder:
    dcp.save(dict(state), storage_writer=checkpoint.HuggingFaceStorageWriter(f"{folder}/ck"), no_dist=True)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(target, storage_reader=checkpoint.HuggingFaceStorageReader(f"{folder}/ck"), no_dist=True)
assert all(torch.equal(target[name], state[name]) for name in state)
print("pure-Python build: saved and loaded on the reference, one warning")
