"""Faults that ``test_without_numpy`` must notice."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from conformance.harness import fault


@fault(kills="KV-153", at="refimpl.kvstore:DictRows.put")
def rows_by_numpy(original: Any, engine: Any, table: str, rows: Any) -> None:
    """The rows of the reference pass through numpy, which need not be installed."""
    importlib.import_module("numpy")
    original(engine, table, torch.from_numpy(rows.numpy()))
