"""Torch's own format (DCP) in folders that appear whole, and which of the two formats a folder has.

Torch's writer fills the visible folder file by file: a crash while it replaces a checkpoint leaves the old metadata
over new data. Here a native save is staged and shown at one instant, as an HF save is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from twinproof.checkpoint.catalog import read_index
from twinproof.checkpoint.format import INDEX_NAME, NATIVE_METADATA_NAME, SUFFIX, StrPath, local_path
from twinproof.checkpoint.publish import Staging, fsync_path
from twinproof.errors import FormatError, MissingCheckpointError, PlanError

__all__ = ["CheckpointFormat", "NativeStorageWriter", "detect_format", "formats_in"]


class CheckpointFormat(str, Enum):
    """What a checkpoint consists of."""

    DCP = "dcp"
    HF = "hf"


def detect_format(path: StrPath) -> CheckpointFormat:
    """Whether a folder is torch's (``.metadata``) or HF's (an index, or safetensors files), or a file is HF's.

    Raises:
        FormatError: both formats, neither, or a malformed index. CorruptionError: a file of the index is missing.
        MissingCheckpointError: there is nothing.
    """
    place = local_path(path)
    if place.is_file():
        if place.suffix == SUFFIX:
            return CheckpointFormat.HF
        raise FormatError("not a checkpoint", got=place.name, expected="a folder or a .safetensors file", where=place)
    if not place.is_dir():
        raise MissingCheckpointError("no checkpoint is there", expected="a folder or a .safetensors file", where=place)
    found = formats_in(place)
    if len(found) != 1:
        raise FormatError(
            "a checkpoint has one format",
            got="both" if found else f"neither in {sorted(os.listdir(place))[:5]}",
            expected=f"{NATIVE_METADATA_NAME} (torch's), or {INDEX_NAME} or safetensors files (HF)",
            where=place,
        )
    if CheckpointFormat.DCP in found:
        return CheckpointFormat.DCP
    read_index(place)
    return CheckpointFormat.HF


def formats_in(folder: Path) -> set[CheckpointFormat]:
    """The formats whose files a folder has; none of a save that a crash cut short."""
    names = os.listdir(folder)
    is_hf = any(name == INDEX_NAME or (name.endswith(SUFFIX) and not name.startswith(".")) for name in names)
    kinds = {CheckpointFormat.DCP: NATIVE_METADATA_NAME in names, CheckpointFormat.HF: is_hf}
    return {kind for kind, is_there in kinds.items() if is_there}


class NativeStorageWriter(FileSystemWriter):
    """Torch's ``FileSystemWriter``, whose checkpoint appears at one instant and replaces another whole.

    Each rank writes with one thread: with more, torch 2.13 reports success when a thread's write fails.

    Args:
        path: folder of the checkpoint.
        durable: fsync files and folders before the checkpoint becomes visible.
    """

    def __init__(self, path: StrPath, *, durable: bool = True) -> None:
        super().__init__(path, sync_files=False, thread_count=1)
        self.target, self.durable = local_path(path), durable
        self.staging: Staging | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The folder in which the checkpoint appears."""
        return self.target

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add, and nothing is made yet."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the hidden folder, on the coordinator; each rank is told its name and a prefix of its own."""
        self.staging = Staging(self.target, durable=self.durable)
        folder = os.fspath(self.staging.folder)
        prefixed = super().prepare_global_plan(plans)
        return [dataclasses.replace(plan, storage_data=(plan.storage_data, folder)) for plan in prefixed]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files into the hidden folder, and sync them."""
        prefix, folder = plan.storage_data
        self.path = Path(folder)
        written = super().write_data(dataclasses.replace(plan, storage_data=prefix), planner)
        self._sync({result.storage_data.relative_path for result in written.value()})
        return written

    def _sync(self, names: Iterable[str]) -> None:
        # Torch syncs a file before it empties Python's buffer into it, so the end of the file is in no sync of torch's.
        for name in names if self.durable else ():
            fsync_path(Path(self.path) / name)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and show the checkpoint; the coordinator only."""
        if self.staging is None:
            raise PlanError("nothing was written that could be finished", expected="prepare_global_plan, write_data")
        super().finish(metadata, results)
        self._sync([NATIVE_METADATA_NAME])
        self.staging.publish(None)
        self.staging = None

    def discard(self) -> None:
        """Remove what a failed save left; nothing where it succeeded."""
        if self.staging is not None:
            self.staging.discard()
            self.staging = None
