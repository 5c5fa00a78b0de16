"""Faults that ``test_module_memory`` must notice."""

from __future__ import annotations

import functools

from conformance.harness import mutated, patched, swap
from twinproof.checkpoint import catalog

products_remembered = patched(
    "Products of sums are remembered without a bound, and their arguments hardly ever come again.",
    swap("twinproof.checkpoint.catalog:_product", functools.lru_cache(maxsize=None)(catalog._product)),
    kills="CKPT-741",
)
headers_remembered = patched(
    "Headers are remembered from one load to the next.",
    mutated(
        "twinproof.checkpoint.catalog:read_catalog",
        "cache: HeaderCache = {}",
        "cache: HeaderCache = vars(read_catalog)",
    ),
    kills="CKPT-741",
)
metadata_remembered = patched(
    "What was read of all checkpoints is kept by the class of their readers.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader._read_metadata",
        "self.catalog = read_catalog(self.path)",
        "self.catalog = vars(HuggingFaceStorageReader._read_metadata).setdefault(str(self.path), "
        "read_catalog(self.path))",
    ),
    kills="CKPT-741",
)
