"""Faults that ``test_crash`` must notice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.harness import fault, patched, swap
from twinproof.errors import CheckpointExistsError


@fault(kills="CKPT-301", at="twinproof.checkpoint.publish:Staging._publish_folder")
def index_shown_first(original: Callable[[Any], None], staging: Any) -> None:
    """A first save shows its index before its files."""
    if staging.target.exists():
        original(staging)
        return
    staging.target.mkdir()
    for name in sorted(os.listdir(staging.folder), reverse=True):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


@fault(kills=("CKPT-302", "CKPT-304"), at="twinproof.checkpoint.publish:Staging._publish_folder")
def removed_then_renamed(original: Callable[[Any], None], staging: Any) -> None:
    """The old folder is removed before the new one has its name."""
    if staging.target.exists():
        for name in set(os.listdir(staging.target)) - set(staging.old_names):
            os.rename(staging.target / name, staging.folder / name)
        shutil.rmtree(staging.target)
    os.rename(staging.folder, staging.target)


@fault(kills=("CKPT-303", "CKPT-317", "CKPT-326"), at="twinproof.checkpoint.shards:write_file")
def save_file_in_place(original: Any, path: str, pieces: Iterable[bytes | memoryview], **options: Any) -> None:
    """save_file writes into the file that is there, as the safetensors library does."""
    # Opened before the values are taken, as a writer does that streams.
    with open(path, "wb") as file:
        file.writelines(pieces)


@fault(kills="CKPT-306", at="twinproof.checkpoint.dcp:read_catalog")
def unfinished_save_loaded(original: Callable[[Path], Any], path: Path) -> Any:
    """A load takes what a killed save left beside the checkpoint for the newest one."""
    unfinished = sorted(path.parent.glob(f".{path.name}.saving-*"))
    return original(unfinished[-1] if unfinished else path)


_SAME_EVERY_TIME = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32))

staging_name_reused = patched(
    "Every save has the same hidden folder, which an interrupted one leaves in the way.",
    swap("twinproof.checkpoint.publish:uuid", _SAME_EVERY_TIME),
    kills="CKPT-302",
)


@fault(kills=("CKPT-302", "CKPT-306"), at="twinproof.checkpoint.publish:warn_of_leftovers")
def leftovers_refused(original: Any, parent: Any, name: str) -> None:
    """A save refuses to run beside what an interrupted one left."""
    leftovers = [found for found in os.listdir(parent) if found.startswith(f".{name}.saving-")]
    if leftovers:
        raise CheckpointExistsError(
            "an interrupted save left files", got=leftovers, expected="none of them", where=str(parent)
        )


@fault(kills="CKPT-300", at="twinproof.checkpoint.publish:Staging._publish_folder")
def published_file_by_file(original: Any, staging: Any) -> None:
    """An overwrite shows new files beside old ones, as in torch."""
    staging.target.mkdir(exist_ok=True)
    for name in sorted(os.listdir(staging.folder)):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


@fault(kills=("CKPT-300", "CKPT-305"), at="twinproof.checkpoint.publish:Staging._publish_folder")
def old_deleted_first(original: Any, staging: Any) -> None:
    """The old checkpoint is deleted before the new one is shown."""
    if staging.target.exists():
        for name in staging.old_names:
            (staging.target / name).unlink()
        staging.old_names = []
    original(staging)


@fault(kills="CKPT-304", at="twinproof.checkpoint.catalog:Catalog.check_unchanged")
def shards_deleted_early(original: Any, catalog: Any, *files: Any) -> None:
    """Consolidation deletes shard files once they are read, before its result is in force."""
    original(catalog, *files)
    # A load names its files; a consolidation means all.
    for record in catalog.tensors.values() if not files else ():
        for chunk in record.chunks:
            Path(chunk.file).unlink(missing_ok=True)
