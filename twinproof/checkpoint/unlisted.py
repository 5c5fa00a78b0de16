"""What else a folder has: files that hold what its index names in others, or other files than safetensors.

Prevents that an old checkpoint is read in silence where a newer one was written over it: torch's writer of shards
deletes nothing, and torch's reader, as transformers' of ``model.safetensors``, takes what the index does not name.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from twinproof.checkpoint.format import NATIVE_METADATA_NAME, STEP_NAME, SUFFIX, StrPath, read_header
from twinproof.errors import CorruptionError, FormatError, MissingCheckpointError

if TYPE_CHECKING:
    from twinproof.checkpoint.catalog import Catalog

__all__ = ["no_files", "with_unlisted"]

SHARDING_KEY = "DCP_SHARDING_INFO"
logger = logging.getLogger("twinproof.checkpoint")


def with_unlisted(folder: Path, catalog: Catalog) -> Catalog:
    """The catalog of an index, which says what was passed over. Headers alone are read; what has none says nothing.

    Raises:
        CorruptionError: shards of its tensors: which of both is the checkpoint, nobody can say.
    """
    listed = {os.path.basename(file) for file in catalog.headers}
    names = {name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith(".")}
    found = []
    for name in sorted(names - listed):
        try:
            header = read_header(folder / name)
        except (OSError, FormatError):
            continue
        if header.entries.keys().isdisjoint(catalog.tensors):
            continue
        if SHARDING_KEY in header.metadata:
            raise CorruptionError(
                "shards lie beside an index that has their tensors in other files",
                got=name,
                expected="shards, or the index and its files: the older ones deleted",
                where=os.fspath(folder),
            )
        found.append(name)
    if found:
        catalog.passed_over = tuple(found)
        logger.warning("%s: tensors of the index are also in %s, which it does not name: not read", folder, found[:20])
    return catalog


def no_files(folder: StrPath) -> MissingCheckpointError:
    """What a folder without safetensors files has instead, and who reads that."""
    names = sorted(os.listdir(folder))
    steps = sorted(filter(STEP_NAME.fullmatch, names), key=lambda name: int(name[5:]))
    got, expected = f"{names[:5]}", "safetensors files"
    if NATIVE_METADATA_NAME in names:
        got = f"a checkpoint in torch's format, with {NATIVE_METADATA_NAME}"
        expected += "; load_training, CheckpointManager and torch's dcp.load read torch's format"
    elif steps:
        got, expected = f"a folder of steps, the last of them {steps[-3:]}", "the folder of one of them"
    return MissingCheckpointError("no safetensors file", got=got, expected=expected, where=os.fspath(folder))
