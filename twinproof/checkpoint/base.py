"""What both writers share: options, checks, the conversation with DCP, publication. No tensor data moves here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from twinproof.checkpoint.arrange import Arrangement, arrange, check_local_plan
from twinproof.checkpoint.files import INDEX_NAME, build_index, local_path
from twinproof.checkpoint.options import WriterOptions
from twinproof.checkpoint.outcome import raise_first
from twinproof.checkpoint.publish import Staging
from twinproof.checkpoint.replicas import checksums, compare_checksums
from twinproof.checkpoint.staging import staged
from twinproof.errors import ConfigError, PlanError

__all__ = ["WriterBase"]


class WriterBase(StorageWriter, AsyncStager):
    """Constructor and planning of ``HuggingFaceStorageWriter``; see the subclasses.

    Args:
        path: folder of the checkpoint, on a local or mounted file system.
        fqn_to_index_mapping: tensor name -> file index from 1. None and no ``max_shard_size``: one file.
        thread_count: threads of this rank.
        save_distributed: every rank takes part. False: one process saves everything; with more it raises.
        enable_consolidation: write final HF files. False: torch's one-file-per-rank shard layout.
        thread_count_consolidation: accepted for compatibility; there is no consolidation pass to thread.
        max_shard_size: bytes, or a decimal size like ``"5GB"``; files are filled greedily as huggingface_hub does.
        metadata: str -> str, stored in every file beside ``format: pt``.
        durable: fsync files and folders before the checkpoint becomes visible.
        overwrite: replace a checkpoint that is already there, atomically; else raise CheckpointExistsError.
        export_dtype: cast float64/32/16 and bfloat16 to this dtype while writing.
        export_keep: ``fnmatch`` patterns of names that are not cast.
        single_file: write ``model.safetensors`` without an index.
        page_align: pad each header so that data starts at a multiple of 4096.
        check_replicas: compare the bytes of replicated tensors across ranks before writing; else replicas are trusted.
        write_mode: ``random`` writes at offsets from every rank; ``sequential`` lets one rank write each file front to
            back, for targets without random access; ``auto`` probes the target.
        block_bytes: unit of exchange and of writes, a power of two; bounds the memory of a save, never its result.
        process_group: CPU-capable group of exactly the ranks that save. None: made here, collectively, when
            torch.distributed is initialised with more than one rank and ``save_distributed`` is set.

    Raises:
        ConfigError: an option, or a combination, that cannot be honoured.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = True,
        enable_consolidation: bool = True,
        thread_count_consolidation: int = 1,
        *,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        durable: bool = True,
        overwrite: bool = True,
        export_dtype: torch.dtype | str | None = None,
        export_keep: Sequence[str] = (),
        single_file: bool = False,
        page_align: bool = False,
        check_replicas: bool = False,
        write_mode: str = "auto",
        block_bytes: int = 8 << 20,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.options = WriterOptions.make(
            path,
            mapping=fqn_to_index_mapping,
            thread_count=thread_count,
            thread_count_consolidation=thread_count_consolidation,
            max_shard_size=max_shard_size,
            metadata=metadata,
            export_dtype=export_dtype,
            export_keep=export_keep,
            single_file=single_file,
            save_distributed=save_distributed,
            enable_consolidation=enable_consolidation,
            durable=durable,
            overwrite=overwrite,
            page_align=page_align,
            check_replicas=check_replicas,
            write_mode=write_mode,
            block_bytes=block_bytes,
        )
        self.path = self.options.path
        self.group = process_group
        self._owns_group = False
        self.save_id = uuid.uuid4().hex
        self.is_coordinator, self.rank = True, 0
        self.arrangement: Arrangement | None = None
        self.staging: Staging | None = None
        self.local_items: list[WriteItem] = []
        self._make_group()

    def _make_group(self) -> None:
        wanted = self.options.save_distributed and dist.is_available() and dist.is_initialized()
        if self.group is None and wanted and dist.get_world_size() > 1:
            self.group, self._owns_group = dist.new_group(backend="gloo"), True

    def close(self) -> None:
        """Give back the private process group. Safe to call twice."""
        if self._owns_group and self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group, self._owns_group = None, False

    def __enter__(self) -> WriterBase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot travel to the process of an async save; that process makes its own.
        return {**self.__dict__, "group": None, "_owns_group": False}

    # What ``stage`` gives is complete when it returns.
    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What ``dcp.async_save`` writes: tensors copied to the CPU, a row store's rows as those of one moment.

        Rows stay in their store and are read while the save writes them; an async save in a process gets them by
        pickling, once in memory. See ``twinproof.checkpoint.staging``.
        """
        result: dict[str, Any] = staged(state_dict)
        return result

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can save there: any local path."""
        try:
            local_path(checkpoint_id)
        except ConfigError:
            return False
        return True

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self.path

    # Public names of torch's writer, for what inspects one.

    @property
    def fs(self) -> FileSystem:
        """Torch's view of local files; every path of this writer is one."""
        return FileSystem()

    @property
    def metadata_path(self) -> str:
        """Name of the index."""
        return INDEX_NAME

    @property
    def fqn_to_index_mapping(self) -> dict[str, int] | None:
        """As given."""
        return None if self.options.mapping is None else dict(self.options.mapping)

    @property
    def save_distributed(self) -> bool:
        """As given."""
        return self.options.save_distributed

    @property
    def enable_consolidation(self) -> bool:
        """As given."""
        return self.options.enable_consolidation

    @property
    def consolidated_output_path(self) -> str | None:
        """Where final files appear; None when shards are written."""
        return None if self.options.writes_shards else str(self.path)

    @property
    def thread_count(self) -> int:
        """As given."""
        return self.options.thread_count

    @property
    def overwrite(self) -> bool:
        """As given."""
        return self.options.overwrite

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another save, at ``checkpoint_id`` where given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, "checkpoint_id")
        self.save_id = uuid.uuid4().hex
        self.arrangement, self.staging = None, None

    def storage_meta(self) -> StorageMeta:
        """Identifies this save to the planner."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank's role; in the process of an async save, make the private group."""
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank") or 0
        if kwargs.get("use_collectives") is False:
            raise ConfigError("HF files need a global plan", got=False, expected=True, where="use_collectives")
        self._make_group()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what the format cannot hold, on every rank, before any file exists."""
        check_local_plan(plan)
        self.local_items = plan.items
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the run's shape and lay out the checkpoint, on the coordinator only."""
        if len(plans) > 1 and not self.options.save_distributed:
            raise ConfigError(
                "save_distributed=False saves from one process", got=f"{len(plans)} ranks", expected="1 rank"
            )
        if len(plans) > 1 and (self.group is None or dist.get_world_size(self.group) != len(plans)):
            size = "none" if self.group is None else f"{dist.get_world_size(self.group)} ranks"
            raise ConfigError(
                "the writer's group must hold exactly the ranks that save",
                got=size,
                expected=f"{len(plans)} ranks",
                where="process_group",
            )
        # With plan caching the planner hands out placeholders; the real plans are then taken in write_data.
        self.arrangement = arrange(plans, self.options) if all(plan.usable for plan in plans) else None
        return plans

    def arranged(self, planner: SavePlanner) -> Arrangement:
        """The coordinator's arrangement, from this save's own plans or from a caching planner's merged ones."""
        if self.arrangement is None:
            plans = getattr(planner, "global_plan", None)
            if plans is None:
                raise PlanError(
                    "there is no global plan to write",
                    got=f"no call of prepare_global_plan, and no global_plan of {type(planner).__name__}",
                    expected="dcp.save, or a planner that caches plans and keeps its global_plan",
                )
            self.arrangement = arrange(plans, self.options)
        return self.arrangement

    def gather(self, mine: Any) -> list[Any]:
        """This rank's object and every other's, in rank order."""
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def settle(self, failure: BaseException | None) -> None:
        """Learn of every rank's outcome; if any failed, clear the staging folder and raise on every rank."""
        failures = self.gather(failure)
        if any(f is not None for f in failures):
            self.discard_staging()
            if failure is not None:
                raise failure
            raise_first(failures)

    def check_replicas(self, planner: SavePlanner) -> None:
        """With the option, compare replicated chunks across ranks. Raises DistributedError on every rank."""
        if not self.options.check_replicas:
            return
        outcome: Any
        try:
            outcome = checksums(self.local_items, planner)
        except Exception as error:
            outcome = error
        outcomes = self.gather(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        raise_first([found if isinstance(found, Exception) else None for found in outcomes])
        compare_checksums(outcomes)

    def open_staging(self) -> Path:
        """Make the staging folder; the coordinator only. Raises CheckpointExistsError, StorageError."""
        self.staging = Staging(self.path, durable=self.options.durable, overwrite=self.options.overwrite)
        return self.staging.folder

    def discard_staging(self) -> None:
        """Remove the staging folder, if there is one."""
        if self.staging is not None:
            self.staging.discard()

    def begin_staging(self) -> Path:
        """The coordinator makes the staging folder; every rank learns where it is, or why there is none."""
        outcome: Path | Exception | None = None
        if self.is_coordinator:
            try:
                outcome = self.open_staging()
            except Exception as error:
                outcome = error
        outcomes = self.gather(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        raise_first([found if isinstance(found, Exception) else None for found in outcomes])
        return next(Path(found) for found in outcomes if found is not None)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and show the checkpoint at one instant; the coordinator only."""
        if self.arrangement is None or self.staging is None:
            raise PlanError("nothing was written that could be finished", expected="prepare_global_plan, write_data")
        indexed = not self.options.single_file and not self.options.writes_shards
        index = build_index(self.arrangement.weight_map, self.arrangement.total_size_bytes) if indexed else None
        try:
            self.staging.publish(index)
        except BaseException:
            self.staging.discard()
            raise
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
