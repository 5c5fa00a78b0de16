"""Two tables of different kinds, and saving them, for the requirements about checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.kvstore.support import EXTREMES, Clock, random_rows, store_of

FILE = "model-00001-of-00001.safetensors"


def layouts_of(kvstore: Any) -> dict[str, Any]:
    """Two tables of different kinds."""
    return {
        "a": kvstore.RowLayout(6, torch.float16, "partial_rowwise_adam", {"momentum1": torch.bfloat16}),
        "b": kvstore.RowLayout(4, torch.float32, "adagrad"),
    }


def filled(kvstore: Any, keys: Any = EXTREMES, **options: Any) -> Any:
    """Two tables of random rows."""
    store = store_of(kvstore, layouts_of(kvstore), **options)
    store.set_rows("a", random_rows(store, list(keys), 1, "a"))
    store.set_rows("b", random_rows(store, list(keys)[1:], 2, "b"))
    return store


def fresh(kvstore: Any, **options: Any) -> Any:
    """The same tables, empty, of another seed and time."""
    return store_of(kvstore, layouts_of(kvstore), **({"seed": 1234, "clock": Clock(7)} | options))


def save(kvstore: Any, store: Any, path: Path, **options: Any) -> Any:
    """Save without waiting for the disk."""
    return kvstore.save(store, path, durable=False, **options)
