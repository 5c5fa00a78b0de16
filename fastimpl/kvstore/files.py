"""``save`` and ``load`` through the fast checkpoint. Meaning: ``refimpl.kvstore.files``."""

from __future__ import annotations

import os
from typing import Any

from fastimpl.checkpoint import HuggingFaceStorageWriter
from refimpl.kvstore import files as reference
from refimpl.kvstore.base import KVStoreBase
from refimpl.kvstore.files import LoadReport, SaveReport

__all__ = ["load", "save"]


def save(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> SaveReport:
    return reference.save_with(HuggingFaceStorageWriter, store, path, **options)


def load(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> LoadReport:
    return reference.load(store, path, **options)


save.__doc__, load.__doc__ = reference.save.__doc__, reference.load.__doc__
