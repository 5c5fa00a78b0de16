"""What is no store is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.harness import raises, requirement
from twinproof.errors import ConfigError


@requirement("KV-230", "save, load and the modules MUST refuse what is no store with what it was and what they take.")
@pytest.mark.parametrize("verb", ["save", "load", "KVEmbedding", "KVEmbeddingBag"])
@pytest.mark.parametrize("store", ["name", {"t": 4}])
def test_stores(kvstore: Any, tmp_path: Path, verb: str, store: Any) -> None:
    arguments = (store, tmp_path / "ck") if verb in ("save", "load") else (store,)
    with raises(ConfigError, mentions=("where: store", type(store).__name__, "a KVStore"), where=verb):
        getattr(kvstore, verb)(*arguments)
