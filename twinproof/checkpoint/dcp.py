"""The storage writer and the storage readers that torch's distributed checkpoint drives.

Each exists once. An implementation binds an engine that moves tensor data: a ``SaveEngine`` to the writer, a
``LoadEngine`` to the reader. Options, checks, layout, agreement between ranks and publication are no engine's business.

Block-quantized weights are read as floating point: any slice, in bounded memory. Two layouts are known. *fp8*:
``X.weight`` [M, N] of an 8-bit float beside ``X.weight_scale_inv`` [ceil(M / s), ceil(N / s)]; each s x s block is
multiplied by its scale (DeepSeek-V3, s = 128). *MXFP4*: ``X_blocks`` uint8 [..., G, B], two 4-bit floats a byte, the
low one first, beside ``X_scales`` uint8 [..., G], powers of two with bias 127 (OCP MX v1.0; gpt-oss); read as [..., 2 G
B]; a scale of 255 makes NaN. Names and layouts are those of torch's ``QuantizedHuggingFaceStorageReader``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from twinproof import regime
from twinproof.checkpoint.catalog import (
    Catalog,
    Chunk,
    LoadEngine,
    LoadJob,
    MetadataChunks,
    Meter,
    Part,
    Progress,
    StoredRange,
    TensorRecord,
    UnreadMetadata,
    check_loaded,
    check_present,
    crc32,
    cut_rectangle,
    stored_ranges,
    sums_of,
    to_text,
)
from twinproof.checkpoint.format import (
    INDEX_NAME,
    StrPath,
    check_fillable,
    local_path,
    torch_dtype,
    waited,
)
from twinproof.checkpoint.groups import end_group, exchanging, is_gone, own_group
from twinproof.checkpoint.plan import (
    Arrangement,
    GlobalPlan,
    SaveEngine,
    SaveJob,
    StorageInfo,
    Told,
    WriterOptions,
    arrange,
    check_count,
    check_item_count,
    check_local_plan,
    check_sums,
    check_told,
    checksums,
    chunk_keys,
    exported_dtype,
    held_by_several,
    staged,
    told_by_ranks,
)
from twinproof.checkpoint.planners import check_blocks
from twinproof.checkpoint.publish import (
    StagedFolder,
    Staging,
    all_or_none,
    build_index,
    gather,
    gather_first,
    on_any_rank,
    raise_first,
    rank_count_of,
    reading,
    scatter,
    several_ranks,
)
from twinproof.checkpoint.scales import check_plain
from twinproof.checkpoint.shards import write_shards
from twinproof.checkpoint.whole import read_catalog
from twinproof.engine import Engine, engine_for, in_mode_of_caller
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    MissingKeyError,
    PlanError,
    UnsupportedError,
    check_flags,
    check_kind,
    sendable,
)

__all__ = [
    "Dequantize",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "Piece",
    "Quantized",
    "QuantizedHuggingFaceStorageReader",
    "UnreadMetadata",
    "find_quantized",
]

T = TypeVar("T")
_Self = TypeVar("_Self", bound="HuggingFaceStorageWriter")


class HuggingFaceStorageWriter(StorageWriter, AsyncStager):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save`` that writes final HF files.

    A subclass names its engine: ``class Writer(HuggingFaceStorageWriter, engine=Engine)``.

    Args:
        path: folder of the checkpoint, on a local or mounted file system.
        fqn_to_index_mapping: tensor name -> file index from 1. None and no ``max_shard_size``: one file.
        thread_count: threads of this rank.
        save_distributed: every rank takes part. False: one process saves everything; with more it raises.
        enable_consolidation: write final HF files. False: torch's one-file-per-rank shard layout, which takes neither
            ``max_shard_size`` nor ``single_file``.
        thread_count_consolidation: accepted for compatibility; there is no consolidation pass to thread.
        max_shard_size: bytes, or a decimal size like ``"5GB"``; files are filled greedily as huggingface_hub does.
        metadata: str -> str, stored in every file beside ``format: pt``. Keys of checksums and shards are refused.
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
        checksums: sum every tensor while it is written, and keep the sums in the metadata of the index, or of each
            shard file. Without them the index is torch's, byte for byte.
        progress: called on each rank with the bytes that it has written, and all that it will; from any of its threads,
            one at a time. The totals of all ranks are the sizes of all files. What it raises ends the save.
        process_group: CPU-capable group of exactly the ranks that save. None: made here, collectively, when
            torch.distributed is initialised with more than one rank and ``save_distributed`` is set. An asynchronous
            save refuses the default group.

    The ranks of a save name one folder, spelled alike, and give the same options; ``thread_count`` and ``progress`` are
    each rank's own.

    Raises:
        ConfigError: an option, or a combination, that cannot be honoured; one that rank 0 of a save does not have,
            before anything is written. DistributedError: another rank refused one of its own.
        PlanError: gaps, overlaps, ranks with different tensors under one name, parts that are not what was planned.
    """

    _make_engine: ClassVar[Callable[[], SaveEngine]]
    _crc32 = staticmethod(crc32)

    def __init_subclass__(cls, *, engine: Callable[[], SaveEngine] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if engine is not None:
            cls._make_engine = staticmethod(engine)

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
        checksums: bool = False,
        progress: Progress | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group, self._owns_group = process_group, False
        # Text is no flag, which all ranks are to hear.
        self._make_group(bool(save_distributed) or isinstance(save_distributed, str | bytes))
        # Of what one rank refuses the others hear here, and wait for it nowhere else.
        own = self.group if self._owns_group else None
        with exchanging(own), all_or_none(own, self.close):
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
                checksums=checksums,
                progress=progress,
            )
        self.path = self.options.path
        self._made_by = os.getpid(), threading.get_ident()
        self.save_id = uuid.uuid4().hex
        self.is_coordinator, self.rank = True, 0
        self.arrangement: Arrangement | None = None
        self.staging: Staging | None = None
        self.local_items: list[WriteItem] = []
        self._is_placeholder = False
        self._announced: Sequence[bytes] = ()
        self._parts: list[Part] = []
        self._engine = type(self)._make_engine()

    def _make_group(self, is_distributed: bool) -> None:
        if self.group is None and is_distributed and several_ranks(None) is not None:
            self.group, self._owns_group = own_group(self), True

    def close(self) -> None:
        """Give back the private process group, to the next save. Safe to call twice."""
        if self._owns_group:
            end_group(self.group)
        self.group, self._owns_group = None, False

    def __enter__(self: _Self) -> _Self:
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
        pickling, once in memory. See ``staged``.
        """
        result: dict[str, Any] = staged(state_dict)
        return result

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can save there: any local path."""
        return _is_local(checkpoint_id)

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
        is_apart = self._made_by != (os.getpid(), threading.get_ident())
        if is_apart and self.group is not None and not self._owns_group and self.group == dist.group.WORLD:
            raise ConfigError(
                "an asynchronous save exchanges bytes over the group that training uses: both would wait for ever",
                got="the default group",
                expected="none, or dist.new_group(backend='gloo')",
                where="process_group",
            )
        if kwargs.get("use_collectives") is False:
            raise ConfigError("HF files need a global plan", got=False, expected=True, where="use_collectives")
        if self._owns_group and is_gone(self.group):
            # The default group was made anew, and on every rank of it.
            self.group = None
        self._make_group(self.options.save_distributed)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what the format cannot hold, on every rank, before any file exists.

        What this rank has ``Told`` travels in ``storage_data``, which torch's removal of duplicates leaves alone.
        """
        check_local_plan(plan)
        self.local_items, self._is_placeholder = plan.items, not plan.usable
        told = Told(self._engine.announce(plan.items), plan.items)
        return SavePlan(plan.items, told, plan.planner_data, plan.usable)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the run's shape and lay out the checkpoint, on the coordinator only; each rank gets its own items."""
        if len(plans) > 1 and not self.options.save_distributed:
            raise ConfigError(
                "save_distributed=False saves from one process",
                got=f"{len(plans)} ranks",
                expected="1 rank",
                where="save_distributed",
            )
        # One that saves alone, as with no_dist, has no other rank to talk to either.
        if len(plans) != rank_count_of(self.group):
            size = "none" if self.group is None else f"{dist.get_world_size(self.group)} ranks"
            raise ConfigError(
                "the writer's group must hold exactly the ranks that save",
                got=size,
                expected=f"{len(plans)} ranks",
                where="process_group",
            )
        # With plan caching the planner hands out placeholders; the real plans are then taken in write_data.
        usable = all(plan.usable for plan in plans)
        self.arrangement = arrange(plans, self.options) if usable else None
        self._announced = [told.announced or b"" for told in told_by_ranks(plans)] if usable else ()
        return [SavePlan(plan.items, None, plan.planner_data, plan.usable) for plan in plans]

    def arranged(self, planner: SavePlanner) -> Arrangement:
        """The coordinator's arrangement, from this save's own plans or from a caching planner's merged ones."""
        if self.arrangement is None:
            plans = getattr(planner, "global_plan", None)
            if plans is None:
                raise PlanError(
                    "there is no global plan to write",
                    got=f"no call of prepare_global_plan, and no global_plan of {type(planner).__name__}",
                    expected="dcp.save, or a planner that caches plans and keeps its global_plan",
                    where="prepare_global_plan",
                )
            self.arrangement = arrange(plans, self.options)
        return self.arrangement

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data into the staging folder. Every rank raises when any rank failed.

        Raises ConfigError where this rank asks for another save than the coordinator.
        """
        with exchanging(self.group):
            begun_s = time.perf_counter()
            instruction, folder, told, planned_count = self._instructed(planner)

            def checked() -> None:
                check_told([told, self.options.told(self.path)])
                check_item_count(plan, planned_count)

            # What follows is not the same on ranks whose options differ, and they would wait for each other.
            self._settled(checked)
            if self.options.check_replicas:
                self._check_replicas(planner)
            prepared = self._settled(lambda: self._prepared(plan, planner, instruction, folder, begun_s))
            results, parts = self._settled(lambda: self._written(plan, planner, folder, prepared))
            if self.options.checksums:
                self._parts = [part for found in gather_first(parts, self.group) for part in found]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _prepared(
        self, plan: SavePlan, planner: SavePlanner, instruction: Any, folder: StagedFolder, begun_s: float
    ) -> Any:
        # A rank that writes shards waits for no other.
        if self.options.writes_shards:
            return None
        known = self._known(planner)
        job = SaveJob(self.options, self.rank, self.group, plan.items, known, planner, begun_s)
        return self._engine.prepare(job, instruction, folder)

    def _written(
        self, plan: SavePlan, planner: SavePlanner, folder: StagedFolder, prepared: Any
    ) -> tuple[list[WriteResult], Sequence[Part]]:
        parts: Sequence[Part] = ()
        places: Mapping[str, tuple[str, int]] = {}
        if self.options.writes_shards:
            file_bytes, crc = self._engine.file_bytes, type(self)._crc32
            # Where no rank has a tensor one file says so: a folder without any would be none.
            is_needed = self.arrangement is not None and not self.arrangement.tensors
            places = write_shards(folder, file_bytes, self.rank, plan.items, planner, self.options, crc, is_needed)
        else:
            parts = self._engine.write(prepared)
        return [self._result(item, places) for item in plan.items], parts

    def _settled(self, step: Callable[[], T]) -> T:
        """Run a step on every rank. If any failed, clear the staging folder and raise on every rank."""
        failure: BaseException | None = None
        try:
            result = step()
        except BaseException as error:  # Of whatever ends this rank's save the others must hear.
            failure = self._told(error)
        self.settle(failure)
        return result

    def _told(self, error: BaseException) -> BaseException:
        """An error of this rank as all ranks are told of it; torch sends what is raised to them, too."""
        found: BaseException = error if self.group is None else sendable(error)
        return found

    def _check_replicas(self, planner: SavePlanner) -> None:
        # Raises DistributedError on every rank where replicated chunks differ. What one rank has alone is not read.
        held = self._settled(lambda: self._held(planner))
        keys = self._settled(lambda: chunk_keys(held))
        several = self._settled(lambda: held_by_several(keys, self.group))
        mine = [item for item, key in zip(held, keys, strict=True) if key in several]
        sums = self._settled(lambda: checksums(mine, planner))
        self._settled(lambda: check_sums(sums, self.group))

    def _held(self, planner: SavePlanner) -> Sequence[WriteItem]:
        # Everything that this rank has. A planner that caches plans gives a placeholder for one that it gave before.
        if not self._is_placeholder:
            return self.local_items
        plan = SavePlanner._cached_save_plan.get(getattr(planner, "_cached_plans_key", ""))
        if plan is None:
            raise PlanError(
                "the replicas of this rank are not known",
                got=f"a placeholder of {type(planner).__name__}",
                expected="a plan, or one in torch's cache of plans",
                where="check_replicas",
            )
        return plan.items

    def _known(self, planner: SavePlanner) -> Sequence[WriteItem]:
        # Of a placeholder that is not in the cache nothing is known.
        with suppress(PlanError):
            return self._held(planner)
        return ()

    def _instructed(self, planner: SavePlanner) -> tuple[Any, StagedFolder, dict[str, Any], int]:
        """Coordinator: lay out, make the staging folder. Every rank: receive its part, or the coordinator's error.

        With it come what the coordinator asks for, and how many items this rank was planned to write.
        """
        messages: list[Any] = []
        failure: BaseException | None = None
        if self.is_coordinator:
            rank_count = rank_count_of(self.group)
            try:
                messages = self._instructions(planner, rank_count)
            except BaseException as error:
                failure = self._told(error)
                messages = [failure] * rank_count
        received = scatter(messages, self.group)
        if failure is not None:
            raise failure
        if isinstance(received, BaseException):
            raise_first([received])
        result: tuple[Any, StagedFolder, dict[str, Any], int] = received
        return result

    def _instructions(self, planner: SavePlanner, rank_count: int) -> list[Any]:
        arrangement = self.arranged(planner)
        options = self.options
        self.staging = Staging(
            self.path, durable=options.durable, overwrite=options.overwrite, is_indexed=options.is_indexed
        )
        try:
            folder, told = StagedFolder(self.staging.folder, self.options.durable), options.told(self.path)
            counts = arrangement.item_counts(rank_count)
            instructions: Sequence[Any] = [None] * rank_count
            if not self.options.writes_shards:
                plan = GlobalPlan(arrangement, self._announced, rank_count, self.options, folder)
                instructions = self._engine.instruct(plan)
            return [(part, folder, told, count) for part, count in zip(instructions, counts, strict=True)]
        except BaseException:
            self.staging.discard()
            raise

    def settle(self, failure: BaseException | None) -> None:
        """Learn of every rank's outcome; if any failed, clear the staging folder and raise on every rank."""
        if not on_any_rank(failure is not None, self.group):
            return
        failures = gather(failure, self.group)
        if self.staging is not None:
            self.staging.discard()
        if failure is not None:
            raise failure
        raise_first(failures)

    def _result(self, item: WriteItem, places: Mapping[str, tuple[str, int]]) -> WriteResult:
        # Where a tensor lies in final files only the coordinator knows, who adds it at the end.
        assert item.tensor_data is not None
        file, begin = places.get(item.index.fqn, ("", 0))
        dtype = exported_dtype(item.index.fqn, item.tensor_data.properties.dtype, self.options)
        size_bytes = item.tensor_data.chunk.sizes.numel() * dtype.itemsize
        info = StorageInfo(file, begin, size_bytes)
        return WriteResult(index=item.index, size_in_bytes=size_bytes, storage_data=info)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and show the checkpoint at one instant; the coordinator only."""
        if self.arrangement is None or self.staging is None:
            raise PlanError("nothing was written", got=None, expected="prepare_global_plan, write_data", where="finish")
        try:
            index = self._index(self.arrangement) if self.options.is_indexed else None
            self.staging.publish(index)
        except BaseException:
            self.staging.discard()
            raise
        metadata.storage_data = {result.index: self._placed(result) for rank in results for result in rank}

    def _placed(self, result: WriteResult) -> StorageInfo:
        info: StorageInfo = result.storage_data
        assert self.arrangement is not None
        tensor = self.arrangement.tensors[result.index.fqn]
        return info if self.options.writes_shards else StorageInfo(tensor.file, tensor.begin, info.length)

    def _index(self, arrangement: Arrangement) -> bytes:
        sums = []
        if self.options.checksums:
            places = {t.name: (t.file, t.begin, t.size_bytes) for t in arrangement.tensors.values()}
            sums.append(to_text(sums_of(places, self._parts)))
        return build_index(arrangement.weight_map, arrangement.total_size_bytes, *sums)


def _is_local(path: str | os.PathLike[str]) -> bool:
    try:
        local_path(path)
    except ConfigError:
        return False
    return True


class HuggingFaceStorageReader(StorageReader):
    """A ``StorageReader`` for ``dcp.load`` that reads HF files and torch's shard folders.

    A subclass names its engine: ``class Reader(HuggingFaceStorageReader, engine=Engine)``.

    Args:
        path: a folder (HF files with or without an index, or torch's shard folder), or one ``.safetensors`` file.
        thread_count: threads of this rank, also inside one file.
        cast: allow targets of another dtype, converted as ``Tensor.to`` does; else a mismatch raises. Weights of few
            bits that have scales beside them are refused: their numbers are not their values.
        verify_checksums: compare what is loaded with the checkpoint's checksums. A sum is of a whole stored chunk:
            tensors that are read in part are not compared; they are listed in ``unverified``, and logged.
        progress: called with this rank's bytes that were loaded, and all that will be.

    Attributes:
        unverified: names that the last load with ``verify_checksums`` could not compare.
    """

    _make_engine: ClassVar[Callable[[], LoadEngine]]
    _reads_scales = False
    _crc32 = staticmethod(crc32)

    def __init_subclass__(cls, *, engine: Callable[[], LoadEngine] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if engine is not None:
            cls._make_engine = staticmethod(engine)

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        *,
        cast: bool = False,
        verify_checksums: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        check_flags(cast=cast, verify_checksums=verify_checksums)
        if progress is not None:
            check_kind(progress, Callable, "progress", "a function of (done_bytes, total_bytes)")
        self.verify_checksums, self.progress = verify_checksums, progress
        self.unverified: tuple[str, ...] = ()
        self.path = local_path(path)
        self.thread_count = check_count(thread_count, "thread_count")
        self.cast = cast
        self.load_id = uuid.uuid4().hex
        self.catalog = Catalog()
        self._engine = type(self)._make_engine()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can load from there: any local path."""
        return _is_local(checkpoint_id)

    @property
    def checkpoint_id(self) -> Path:
        """The folder or file."""
        return self.path

    @property
    def fs(self) -> FileSystem:
        """Torch's view of local files; every path of this reader is one."""
        return FileSystem()

    @property
    def storage_data(self) -> Catalog:
        """What was found, as a mapping of stored chunks; see ``Catalog``."""
        return self.catalog

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another load, from ``checkpoint_id`` where given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, "checkpoint_id")
        self.load_id = uuid.uuid4().hex
        self.catalog = Catalog()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read every header that the checkpoint consists of.

        Raises:
            FormatError, CorruptionError, StorageError, FileNotFoundError. ``dcp.load`` keeps an error of this call as
            text, and asks again for one rank's metadata (``rank=``); what it gets then raises the error itself, with
            all that it carries, where the load is set up: inside ``CheckpointException.failures`` of that rank.
        """
        if "rank" in kwargs:
            try:
                return self._read_metadata()
            except Exception as error:
                return UnreadMetadata(error)
        return self._read_metadata()

    def _read_metadata(self) -> Metadata:
        self.catalog = read_catalog(self.path)
        tensors: dict[str, Any] = {}
        for name, record in self.catalog.tensors.items():
            # F6 has no torch dtype; it is listed so that a request for it fails by name, and only that.
            dtype = torch_dtype(record.dtype) or torch.uint8
            chunks: Any = MetadataChunks(record.chunks)
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(record.shape), chunks)
        return Metadata(
            state_dict_metadata=tensors, storage_data=self.catalog, storage_meta=StorageMeta(load_id=self.load_id)
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the catalog that read_metadata made. Raises what kept it from making one."""
        if isinstance(metadata, UnreadMetadata):
            raise metadata.error
        self.catalog = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add: every rank reads its own ranges."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place; nothing is written before all targets were checked.

        Raises:
            PlanError: a packed strided shard, under a planner that takes it for one block; see ``targets``.
            StorageError. CorruptionError: a file was cut short or replaced meanwhile, or bytes do not agree with their
                checksums; targets may then hold anything. ConfigError: ``verify_checksums``, and there are none.
        """
        begun_s = time.perf_counter()
        check_blocks(plan, planner)
        if self.verify_checksums:
            check_present(self.catalog, self.path)
        targets = self.targets(plan, planner)
        ranges = [self._range(item, target) for item, target in targets]
        meter = Meter(self.progress, sum(wanted.size_bytes for wanted in ranges))
        self._read(LoadJob(ranges, self.thread_count, begun_s, meter))
        if self.verify_checksums:
            self.unverified = check_loaded(self.catalog, ranges, type(self)._crc32, self.path, self.thread_count)
        self.catalog.check_unchanged(wanted.chunk.file for wanted in ranges)
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, job: LoadJob) -> None:
        files = list(dict.fromkeys(wanted.chunk.file for wanted in job.ranges))
        with reading(files, lambda: self.catalog.check_unchanged(files)):
            self._engine.read(job)

    def _range(self, item: ReadItem, target: torch.Tensor) -> StoredRange:
        index = item.storage_index
        record = self.catalog.tensors[index.fqn]
        dtype = torch_dtype(record.dtype)
        assert dtype is not None  # Checked with the targets.
        # Where the index says it is, or else anywhere: of many chunks not all are looked at.
        said = index.index or 0
        chunk = _holding(item, chain(record.chunks[said : said + 1], record.chunks))
        return StoredRange(index.fqn, chunk, dtype, tuple(item.storage_offsets), tuple(item.lengths), target)

    def targets(self, plan: LoadPlan, planner: LoadPlanner) -> list[tuple[ReadItem, torch.Tensor]]:
        """Every item with its target, all checked before any is written.

        Raises:
            UnsupportedError: a target without memory of a place for each value: meta, sparse, quantized, expanded; a
                stored dtype that torch lacks; see ``check_plain``.
            PlanError: shapes or (without ``cast``) dtypes that differ, all at once.
        """
        result, wrong = [], {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self.catalog.tensors:
                expected = "a name of read_metadata, whose result set_up_storage_reader takes"
                raise MissingKeyError("not in the checkpoint", got=name, expected=expected, where=str(self.path))
            target = waited(planner.resolve_tensor(item).detach())
            stored = torch_dtype(self.catalog.tensors[name].dtype)
            if stored is None or target.is_meta:
                got = self.catalog.tensors[name].dtype if stored is None else "meta target"
                where, expected = self.catalog.where(name), "a dtype of torch's, and a target with memory"
                raise UnsupportedError("this tensor cannot be loaded", got=got, expected=expected, where=where)
            check_fillable(target, name)
            if target.dtype != stored and not self.cast:
                wrong[name] = (target.dtype, stored)
            if target.size() != item.lengths:
                raise PlanError(
                    "target and read item differ in shape",
                    got=tuple(target.size()),
                    expected=tuple(item.lengths),
                    where=name,
                )
            if target.dtype != stored and self.cast:
                check_plain(self.catalog, name, target.dtype, reads_scales=self._reads_scales)
            result.append((item, target))
        if wrong:
            expected = "the same, or cast=True, which converts"
            raise PlanError("dtypes differ, as (target, saved)", got=wrong, expected=expected, where=str(self.path))
        return result


def _holding(item: ReadItem, chunks: Iterable[Chunk]) -> Chunk:
    """The chunk at the item's offset that has its range. Chunks without values share their offset with others."""
    index, begin, lengths = item.storage_index, item.storage_offsets, item.lengths
    at, too_small = tuple(index.offset or (0,) * len(lengths)), None
    for chunk in chunks:
        if chunk.offsets == at:
            bounds = zip(begin, lengths, chunk.sizes, strict=False)
            if len(begin) == len(lengths) == len(at) and all(
                0 <= b <= b + length <= size for b, length, size in bounds
            ):
                return chunk
            too_small = chunk
    if too_small is None:
        expected = "the offsets of a saved chunk"
        raise PlanError("the checkpoint has no chunk at this offset", got=at, expected=expected, where=index.fqn)
    got = f"offsets {tuple(begin)}, lengths {tuple(lengths)}"
    raise PlanError("beyond the chunk at this offset", got=got, expected=too_small.sizes, where=index.fqn)


PIECE_BYTES = regime(
    1 << 20, 24
)  # Stored bytes that a thread reads and converts at once: they stay in the core's cache.
FP8, MXFP4 = "fp8", "mxfp4"
_TARGETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_FP8_SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0", *_FP8)


@dataclass(frozen=True)
class Piece:
    """Stored values of one rectangle, and the scales of the blocks that it touches.

    Attributes:
        kind: ``fp8`` or ``mxfp4``.
        values: [rows, columns] of an 8-bit float; or uint8 [..., groups, bytes].
        scales: [block rows, block columns] of any float; or uint8 [..., groups].
        first: row and column of the first value in its block; or (0, first value in its group).
        block_size: rows and columns of a block; values of a group.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    first: tuple[int, int]
    block_size: int


# Writes the values of a piece, as float32 numbers rounded to the dtype of ``out``; ``out`` has any strides.
Dequantize = Callable[[Piece, torch.Tensor], None]


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor of a catalog: its scales, and what it is when it is read."""

    kind: str
    scales: str
    shape: tuple[int, ...]
    group: int  # Stored bytes of a group in the last two dimensions, of MXFP4; 0 else.

    def seen(self, chunk: Chunk) -> Chunk:
        """The chunk in coordinates of the values."""
        if self.kind == FP8:
            return chunk
        *offsets, first, _ = chunk.offsets
        *sizes, count, _ = chunk.sizes
        values = 2 * self.group
        return Chunk((*offsets, first * values), (*sizes, count * values), chunk.file, chunk.begin)


def find_quantized(catalog: Catalog, block_size: int) -> dict[str, Quantized]:
    """Every tensor that has scales beside it, by name.

    Raises:
        UnsupportedError: scales beside a tensor that is neither a matrix of an 8-bit float nor MXFP4.
        CorruptionError: scales whose shape does not fit.
    """
    found: dict[str, Quantized] = {}
    for name in catalog.tensors:
        for suffix, stored, make in ((".weight_scale_inv", ".weight", _fp8), ("_scales", "_blocks", _mxfp4)):
            values = name.removesuffix(suffix) + stored
            if name.endswith(suffix) and values in catalog.tensors:
                found[values] = make(catalog, values, name, block_size)
    return found


def _fp8(catalog: Catalog, values: str, scales: str, block_size: int) -> Quantized:
    record, scale = catalog.tensors[values], catalog.tensors[scales]
    if record.dtype not in _FP8 or len(record.shape) != 2:
        got = f"{record.dtype} {list(record.shape)}"
        raise UnsupportedError("not a block-quantized matrix", got=got, expected=_FP8, where=catalog.where(values))
    expected = tuple(-(-size // block_size) for size in record.shape)
    _check_scales(catalog, scales, scale, expected, _FP8_SCALES)
    return Quantized(FP8, scales, tuple(record.shape), 0)


def _mxfp4(catalog: Catalog, values: str, scales: str, block_size: int) -> Quantized:
    del block_size  # The stored shape says it.
    record, scale = catalog.tensors[values], catalog.tensors[scales]
    if record.dtype != "U8" or len(record.shape) < 2:
        got = f"{record.dtype} {list(record.shape)}"
        raise UnsupportedError("not MXFP4 blocks", got=got, expected="U8 [..., G, B]", where=catalog.where(values))
    *before, groups, group = record.shape
    if any(chunk.sizes[-1] != group for chunk in record.chunks):
        where = catalog.where(values)
        raise UnsupportedError("a group is cut", got="parts in several chunks", expected="it in one chunk", where=where)
    _check_scales(catalog, scales, scale, (*before, groups), ("U8",))
    return Quantized(MXFP4, scales, (*before, 2 * groups * group), group)


def _check_scales(
    catalog: Catalog, name: str, scale: TensorRecord, expected: Sequence[int], dtypes: Sequence[str]
) -> None:
    if scale.dtype not in dtypes:
        where = catalog.where(name)
        raise UnsupportedError("scales of another dtype", got=scale.dtype, expected=dtypes, where=where)
    if tuple(scale.shape) != tuple(expected):
        raise CorruptionError(
            "the scales do not fit the values",
            got=list(scale.shape),
            expected=list(expected),
            where=catalog.where(name),
        )


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """A ``StorageReader`` for ``dcp.load`` that gives block-quantized weights as floating point.

    A value is its stored number times its scale, rounded to float32 once, then to ``target_dtype``, then to the dtype
    of the target. Tensors without scales are converted as ``Tensor.to`` does, those with scales of other forms refused.

    Args:
        path: a folder or one file, as ``HuggingFaceStorageReader``; no index is needed.
        thread_count: threads of this rank.
        target_dtype: float32, bfloat16, float16 or float64.
        block_size: rows and columns of a block of 8-bit floats.
        verify_checksums: as ``HuggingFaceStorageReader``; stored values and scales are read once more for it.

    Raises:
        ConfigError: another dtype or size. ``dcp.load`` raises UnsupportedError and CorruptionError of what it finds.
    """

    _dequantize: ClassVar[Dequantize]
    _reads_scales = True

    def __init_subclass__(cls, *, dequantize: Dequantize | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if dequantize is not None:
            cls._dequantize = staticmethod(dequantize)

    def __init__(
        self,
        path: StrPath,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
        *,
        verify_checksums: bool = False,
    ) -> None:
        super().__init__(path, thread_count, cast=True, verify_checksums=verify_checksums)
        if target_dtype not in _TARGETS:
            raise ConfigError("not a target dtype", got=target_dtype, expected=_TARGETS, where="target_dtype")
        self.target_dtype = target_dtype
        self.block_size = check_count(block_size, "block_size")
        self.quantized: dict[str, Quantized] = {}

    def _read_metadata(self) -> Metadata:
        metadata = super()._read_metadata()
        self.quantized = find_quantized(self.catalog, self.block_size)
        for name, form in self.quantized.items():
            chunks: Any = MetadataChunks([form.seen(chunk) for chunk in self.catalog.tensors[name].chunks])
            properties = TensorProperties(dtype=self.target_dtype)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(form.shape), chunks)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the catalog that read_metadata made."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.quantized = find_quantized(self.catalog, self.block_size)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place; nothing is written before all targets were checked."""
        check_blocks(plan, planner)
        mine = [item for item in plan.items if item.storage_index.fqn in self.quantized]
        plain = dataclasses.replace(plan, items=[i for i in plan.items if i.storage_index.fqn not in self.quantized])
        targets = [(item, self._target(item, planner)) for item in mine]
        # Every thread has a current stream of its own: what goes to a device goes behind the caller's.
        engines = {target.device: engine_for(target.device) for _, target in targets}
        streams = {device: (engine, engine.current()) for device, engine in engines.items()}
        future = super().read_data(plain, planner)
        pieces = [piece for item, target in targets for piece in self._pieces(item, target)]
        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="checkpoint-dequantize") as pool:
            for _ in pool.map(in_mode_of_caller(partial(self._load, streams)), pieces):
                pass
        if self.verify_checksums and mine:
            stored = list(self._stored_whole(mine))
            compared = check_loaded(self.catalog, stored, type(self)._crc32, self.path, self.thread_count)
            self.unverified = tuple(sorted({*self.unverified, *compared}))
        read = {item.storage_index.fqn for item in mine}
        names = read | {self.quantized[name].scales for name in read}
        self.catalog.check_unchanged(chunk.file for name in names for chunk in self.catalog.tensors[name].chunks)
        for item, target in targets:
            planner.commit_tensor(item, target)
        return future

    def _target(self, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        target = waited(planner.resolve_tensor(item).detach())
        name = item.storage_index.fqn
        if target.is_meta or not target.is_floating_point():
            got, expected = "meta target" if target.is_meta else target.dtype, "a floating-point target with memory"
            raise UnsupportedError(
                "a quantized tensor is read as floating point", got=got, expected=expected, where=name
            )
        check_fillable(target, name)
        if target.size() != item.lengths:
            raise PlanError(
                "target and read item differ in shape",
                got=tuple(target.size()),
                expected=tuple(item.lengths),
                where=name,
            )
        return target

    def _pieces(self, item: ReadItem, target: torch.Tensor) -> Iterator[_Part]:
        name = item.storage_index.fqn
        chunk = self._seen_chunk(item)
        offsets = tuple(a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True))
        value_bytes = 1.0 if self.quantized[name].kind == FP8 else 0.5
        for begin, sizes in cut_rectangle(tuple(item.lengths), max(1, int(PIECE_BYTES / value_bytes))):
            index = tuple(slice(first, first + size) for first, size in zip(begin, sizes, strict=True))
            at = tuple(a + b for a, b in zip(offsets, begin, strict=True))
            yield _Part(name, at, sizes, target[index])

    def _stored_whole(self, items: Sequence[ReadItem]) -> Iterator[StoredRange]:
        # What a checksum can be compared with: chunks that were read whole, and scales, which belong to all of them.
        nowhere = torch.empty(0, device="meta")
        parts = {item.storage_index.fqn for item in items if self._seen_chunk(item).sizes != tuple(item.lengths)}
        for name in dict.fromkeys(item.storage_index.fqn for item in items):
            for stored in (name, self.quantized[name].scales):
                record = self.catalog.tensors[stored]
                dtype = torch_dtype(record.dtype)
                assert dtype is not None
                for chunk in record.chunks:
                    sizes = () if name in parts else chunk.sizes
                    yield StoredRange(stored, chunk, dtype, (0,) * len(sizes), sizes, nowhere)

    def _seen_chunk(self, item: ReadItem) -> Chunk:
        name = item.storage_index.fqn
        return _holding(item, map(self.quantized[name].seen, self.catalog.tensors[name].chunks))

    def _load(self, streams: Mapping[torch.device, tuple[Engine, Any]], part: _Part) -> None:
        form = self.quantized[part.name]
        if form.kind == FP8:
            first = tuple(offset % self.block_size for offset in part.offsets)
            block = self.block_size
            stored = part.offsets, part.sizes
        else:
            block = 2 * form.group
            *before, begin = part.offsets
            *counts, count = part.sizes
            groups = begin // block, -(-(begin + count) // block)
            first = 0, begin % block
            stored = (*before, groups[0], 0), (*counts, groups[1] - groups[0], form.group)
        divisor = self.block_size if form.kind == FP8 else 1
        of_scales = stored if form.kind == FP8 else (stored[0][:-1], stored[1][:-1])
        low = tuple(offset // divisor for offset in of_scales[0])
        high = tuple(-(-(o + s) // divisor) for o, s in zip(*of_scales, strict=True))
        values, value_ranges = stored_ranges(part.name, self.catalog.tensors[part.name], *stored)
        scales, scale_ranges = stored_ranges(
            form.scales, self.catalog.tensors[form.scales], low, tuple(h - o for h, o in zip(high, low, strict=True))
        )
        self._read(LoadJob([*value_ranges, *scale_ranges], 1, time.perf_counter()))
        piece = Piece(form.kind, values, scales, (first[0], first[1]), block)
        # Rounded to the target dtype on the way, as a tensor of that dtype would be.
        is_seen = part.target.dtype == self.target_dtype or self.target_dtype == torch.float32
        is_direct = is_seen and part.target.is_cpu
        out = part.target if is_direct else torch.empty(part.sizes, dtype=self.target_dtype, device="cpu")
        type(self)._dequantize(piece, out)
        if not is_direct:
            engine, stream = streams[part.target.device]
            with engine.on(stream):
                part.target.copy_(out)


@dataclass(frozen=True)
class _Part:
    """A rectangle of a quantized tensor in coordinates of its values, and where it goes."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor
