"""From state dicts to final files: what each rank takes of its own, and at which offset of which file it will lie.

Headers and offsets are a pure function of the global plan, so nothing is written twice. What is to be done with the
plan is a ``SaveEngine``'s business. Sizes of files are split as huggingface_hub splits them.
"""

from __future__ import annotations

import copy
import logging
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from twinproof.checkpoint.catalog import Box, Part, Progress, check_key, check_tiling
from twinproof.checkpoint.format import (
    SHARDING_KEY,
    SINGLE_NAME,
    FileLayout,
    as_bits,
    buffer_of,
    check_metadata,
    check_name,
    check_storable,
    dtype_name,
    file_name,
    lay_out,
    local_path,
)
from twinproof.checkpoint.planners import FillingPlanner, PartOfRows, check_agreed, check_planned
from twinproof.checkpoint.publish import StagedFolder, from_first, gather_first
from twinproof.errors import (
    ConfigError,
    DistributedError,
    PlanError,
    UnsupportedError,
    check_flags,
    check_kind,
)

__all__ = [
    "FORMAT_METADATA",
    "Arrangement",
    "Export",
    "GlobalPlan",
    "GlobalTensor",
    "SaveEngine",
    "SaveJob",
    "Stageable",
    "StorageInfo",
    "Told",
    "WriterOptions",
    "arrange",
    "assign_files",
    "check_count",
    "check_item_count",
    "check_local_plan",
    "check_mapping",
    "check_sums",
    "check_told",
    "checksums",
    "chunk_keys",
    "exported_dtype",
    "held_by_several",
    "parse_size",
    "set_stored_rows",
    "staged",
    "stored_rows",
    "stored_tables",
    "told_by_ranks",
    "with_memory",
    "without_parts",
]

logger = logging.getLogger("twinproof.checkpoint")


@runtime_checkable
class Unfilled(Protocol):
    """A tensor without memory that a load could fill, whose owner takes what was loaded by its ``load_state_dict``.

    One that several ranks can load has two attributes more: ``dealt``, a ``Dealing`` that all entries of its table
    share, and ``entry``, what it is of the table.
    """

    def memory_for(self, sizes: torch.Size) -> torch.Tensor:
        """Memory for what a checkpoint has under its name, of these sizes."""
        ...


class Dealing(Protocol):
    """How the rows of a table are dealt to ranks: by buckets, in whose order they are saved.

    Of a table "bucket" has the counts, int64 [buckets, 1], "weight_id" the ids, int64 [N, 1], and "step" is one value
    for all ranks; all else are rows, [N, ...].
    """

    begin: int
    end: int

    @property
    def has_all(self) -> bool:
        """Whether this rank has the rows of all buckets."""
        ...

    def check_count(self, count: int, where: str) -> None:
        """Demand as many buckets as were saved. Raises ConfigError."""
        ...

    def rows(self, counts: torch.Tensor, row_count: int, where: str) -> tuple[int, int]:
        """The rows [begin, end) of this rank among the saved ones. Raises CorruptionError."""
        ...

    def check_ids(self, ids: torch.Tensor, counts: torch.Tensor, where: str) -> None:
        """Demand that ids, int64 [n], are of this rank's buckets. Raises ConfigError."""
        ...


_Change = Callable[[str, Any], Any]


def replaced(state: Mapping[str, Any], change: _Change, path: str = "") -> dict[str, Any]:
    """The same state, with ``change(name, value)`` in the place of each value in its dicts and lists, however deep.

    What holds nothing that changes stays the same object.
    """

    def made_of(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            inner = replaced(value, change, f"{name}.")
            changed = {key: each for key, each in inner.items() if each is not value[key]}
            if not changed:
                return value
            # A module's state dict says more of itself than its entries, as their versions.
            made: Any = copy.copy(value)
            made.update(changed)
            return made
        if isinstance(value, list):
            # Torch names what stands in a list by its place.
            entries = [made_of(f"{name}.{place}", each) for place, each in enumerate(value)]
            return entries if any(a is not b for a, b in zip(entries, value, strict=True)) else value
        return change(name, value)

    return {key: made_of(f"{path}{key}", value) for key, value in state.items()}


def with_memory(targets: Mapping[str, Any], reader: StorageReader, rank_count: int) -> dict[str, Any]:
    """The same targets, also nested ones; those without memory, as a row store's, as memory of what was saved.

    Of rows that are dealt to ranks it is that of this rank's alone, a ``PartOfRows``. Which these are is read here:
    their counts and ids. ``without_parts`` of the filled targets is what their owners take.

    Raises:
        UnsupportedError: several ranks, and nothing says which rows are whose. ConfigError: rows that were saved by
            other buckets. CorruptionError: counts that are not those of the rows; what a reader raises.
    """
    metadata, tables = reader.read_metadata(), dict[int, _SavedTable]()
    saved: dict[str, Any] = metadata.state_dict_metadata

    def is_saved(name: str, value: Any) -> bool:
        return isinstance(value, Unfilled) and isinstance(saved.get(name), TensorStorageMetadata)

    def noted(name: str, value: Any) -> Any:
        dealt = getattr(value, "dealt", None) if is_saved(name, value) else None
        if dealt is not None and not (rank_count == 1 and dealt.has_all):
            tables.setdefault(id(dealt), _SavedTable(dealt)).names[value.entry] = name
        return value

    def filled(name: str, value: Any) -> Any:
        if not is_saved(name, value):
            return value
        sizes, table = saved[name].size, tables.get(id(getattr(value, "dealt", None)))
        if table is None and rank_count > 1:
            raise _undealt(name, rank_count)
        if table is None or value.entry == "step":
            return value.memory_for(sizes)
        begin, end = table.place_of(value.entry)
        return PartOfRows.make(sizes[0], value.memory_for(torch.Size((end - begin, *sizes[1:]))), begin)

    replaced(targets, noted)
    for table in tables.values():
        table.find(reader, metadata, rank_count)
    return replaced(targets, filled)


def without_parts(targets: Mapping[str, Any]) -> dict[str, Any]:
    """The same targets; what is memory of some rows of a saved tensor as these rows alone."""
    return replaced(targets, lambda _, value: value.to_local() if isinstance(value, PartOfRows) else value)


class _SavedTable:
    """A table that is dealt to ranks: the names of its entries, and the rows of this rank among those of all."""

    def __init__(self, dealt: Dealing) -> None:
        self.dealt, self.names = dealt, dict[str, str]()
        self.rows = (0, 0)

    def place_of(self, entry: str) -> tuple[int, int]:
        return (self.dealt.begin, self.dealt.end) if entry == "bucket" else self.rows

    def find(self, reader: StorageReader, metadata: Metadata, rank_count: int) -> None:
        """Find this rank's rows by the counts that were saved, and look at their ids; see ``with_memory``."""
        saved: dict[str, Any] = metadata.state_dict_metadata
        sizes = {name: saved[name].size for name in self.names.values()}
        if not {"bucket", "weight_id"} <= self.names.keys():
            raise _undealt(min(self.names.values()), rank_count)
        name, id_name = self.names["bucket"], self.names["weight_id"]
        self.dealt.check_count(sizes[name].numel(), name)
        saved_counts = torch.empty(sizes[name], dtype=torch.int64, device="cpu")
        _read({name: saved_counts}, reader, metadata)
        counts = saved_counts.reshape(-1)
        for entry, each in self.names.items():
            if entry not in ("bucket", "step"):
                self.rows = self.dealt.rows(counts, sizes[each][0], each)
        begin, end = self.rows
        ids = torch.empty((end - begin, *sizes[id_name][1:]), dtype=torch.int64, device="cpu")
        _read({id_name: PartOfRows.make(sizes[id_name][0], ids, begin)}, reader, metadata)
        self.dealt.check_ids(ids.reshape(-1), counts, id_name)


def _undealt(name: str, rank_count: int) -> UnsupportedError:
    return UnsupportedError(
        "rows that are dealt to ranks, and nothing says which are whose",
        got=f"{rank_count} ranks",
        expected="buckets= of the module or of state_dict(), with counts and ids in the checkpoint; kvstore.load, or "
        "dcp.load with KVLoadPlanner",
        where=name,
    )


def _read(targets: dict[str, Any], reader: StorageReader, metadata: Metadata) -> None:
    """Fill targets on this rank alone, ahead of a load of all ranks. Raises what the reader does."""
    planner = FillingPlanner()
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()


# Rows that a module's own state dict does not have: each rank of a plan has others, and gathers their counts.


class HoldsRows(Protocol):
    """A module with such rows, as a sharded collection with key-value tables. Every rank makes these calls."""

    @property
    def key_value_tables(self) -> tuple[str, ...]:
        """Names of the tables that have them; none where there are none."""
        ...

    def key_value_state_dict(self) -> dict[str, Any]:
        """This rank's rows as tensors that know where they stand among those of all; none where there are none."""
        ...

    def load_key_value_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's rows, by the same names; others may stand beside them."""
        ...


def _holders(part: torch.nn.Module) -> Iterator[tuple[str, HoldsRows]]:
    """Each of a model's, and what stands in front of its names in ``get_model_state_dict``: wrappers have no names."""
    verb = "key_value_state_dict"
    for path, module in part.named_modules():
        # Asked of the class: some wrappers have every attribute of what they wrap.
        if all(callable(getattr(type(module), each, None)) for each in (verb, f"load_{verb}")):
            (name,) = _get_fqns(part, f"{path}.{verb}" if path else verb)
            yield name.removesuffix(verb), cast("HoldsRows", module)


def stored_tables(part: torch.nn.Module) -> list[str]:
    """The tables whose rows modules of a model hold beside its state dict, behind the names of their modules."""
    return [f"{prefix}{table}" for prefix, module in _holders(part) for table in module.key_value_tables]


def stored_rows(part: torch.nn.Module) -> dict[str, Any]:
    """The rows that modules of a model hold beside its state dict, of this moment."""
    return {
        f"{prefix}{name}": rows
        for prefix, module in _holders(part)
        for name, rows in module.key_value_state_dict().items()
    }


def set_stored_rows(part: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules of a model the rows that ``stored_rows`` has of them; what else a state has is passed over."""
    for prefix, module in _holders(part):
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        module.load_key_value_state_dict(own)


# What an asynchronous save reads while training goes on. Torch's own stager copies the storages of tensors whose
# data_ptr() is not 0 and takes new, unfilled memory for all others; conjugated views lose their conjugation. Here a
# tensor is copied by its value, or handed on.


@runtime_checkable
class Stageable(Protocol):
    """A tensor that knows a form of itself which later writes do not change."""

    def staged(self, memo: dict[int, Any]) -> torch.Tensor:
        """That form; ``memo`` belongs to one state dict, so that what its tensors share is taken once."""
        ...


def staged(state_dict: Any, *, any_layout: bool = False) -> Any:
    """The same structure with tensors on the CPU that nothing else writes to.

    Tensors that are one memory stay one. What the format refuses (meta, sparse, quantized tensors, objects) is handed
    on, so that the plan refuses it on every rank; ``any_layout``: for a format that holds sparse and quantized ones.
    """
    return _staged(state_dict, {}, {}, any_layout)


def _staged(value: Any, seen: dict[Any, Any], memo: dict[int, Any], any_layout: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, seen, memo, any_layout)
    if isinstance(value, Mapping):
        return {key: _staged(each, seen, memo, any_layout) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_staged(each, seen, memo, any_layout) for each in value)
    return copy.deepcopy(value)


def _tensor(value: torch.Tensor, seen: dict[Any, Any], memo: dict[int, Any], any_layout: bool) -> torch.Tensor:
    key = _identity(value)
    if key not in seen:
        # The original stays alive as long as its key counts.
        seen[key] = (_copied(value, memo, any_layout), value)
    result: torch.Tensor = seen[key][0]
    return result


def _identity(value: torch.Tensor) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return id(value)
    flags = value.is_conj(), value.is_neg(), value.dtype, value.device
    return (value.data_ptr(), tuple(value.shape), value.stride(), flags) if value.data_ptr() else id(value)


def _own_names(cls: type) -> set[str]:
    return {name for each in cls.__mro__ if each not in torch.Tensor.__mro__ for name in vars(each)}


def _attributes_copied(value: torch.Tensor) -> torch.Tensor:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged_dict: Any = stager.stage({"value": value})
        result: torch.Tensor = staged_dict["value"]
        return result
    finally:
        stager.close()


def _copied(value: torch.Tensor, memo: dict[int, Any], any_layout: bool) -> torch.Tensor:
    if isinstance(value, Stageable):
        return value.staged(memo)
    if isinstance(value, ShardedTensor):
        return copy.deepcopy(value) if value.device.type == "cpu" else value.cpu()
    if hasattr(value, "__create_write_items__") and not isinstance(value, DTensor):
        # A tensor that plans its own save knows how to copy itself, or keeps what it plans in attributes.
        return copy.deepcopy(value) if "__deepcopy__" in _own_names(type(value)) else _attributes_copied(value)
    is_plain = value.layout is torch.strided and not value.is_quantized
    if value.is_meta or not (is_plain or any_layout):
        return value
    return value.detach().to("cpu", copy=True)


# Whether chunks that several ranks hold have the same bytes: without the check one of them is stored.

ChunkKey = tuple[str, tuple[int, ...]]


def _offsets(item: WriteItem) -> tuple[int, ...]:
    # A planner may leave them out of the item's index.
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def checksums(items: Sequence[WriteItem], planner: SavePlanner) -> dict[ChunkKey, int]:
    """CRC-32 of every local chunk's bytes. One chunk is copied at a time, where its memory is not one row."""
    sums = {}
    for item in items:
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        check_storable(value, item.index.fqn)
        data = as_bits(value).cpu().contiguous()
        sums[item.index.fqn, _offsets(item)] = zlib.crc32(buffer_of(data))
    return sums


def chunk_keys(items: Sequence[WriteItem]) -> list[int]:
    """64 bits that stand for the chunk of each item, the same on every rank that has it."""
    texts = (repr((item.index.fqn, _offsets(item))).encode() for item in items)
    return [int.from_bytes(blake2b(text, digest_size=8).digest(), "little") for text in texts]


def held_by_several(keys: Sequence[int], group: dist.ProcessGroup | None) -> set[int]:
    """Those of this rank's keys that another rank has, too. Every rank calls this; the first one counts."""
    everyone = gather_first(array("Q", keys).tobytes(), group)
    return set(array("Q", from_first(lambda: _several([array("Q", found) for found in everyone]), group)))


def _several(everyone: Sequence[Sequence[int]]) -> list[bytes]:
    counts = Counter(key for found in everyone for key in set(found))
    return [array("Q", (key for key in found if counts[key] > 1)).tobytes() for found in everyone]


def check_sums(mine: Mapping[ChunkKey, int], group: dist.ProcessGroup | None) -> None:
    """``compare_checksums`` of all ranks, by the first of them: nobody else needs the sums."""
    everyone = gather_first(mine, group)
    # In a tuple: by itself it would be taken for a failure of the first rank.
    (difference,) = from_first(lambda: [(_difference(everyone),)] * len(everyone), group)
    if difference is not None:
        raise difference


def _difference(everyone: Sequence[Mapping[ChunkKey, int]]) -> DistributedError | None:
    try:
        compare_checksums(everyone)
    except DistributedError as error:
        return error
    return None


def compare_checksums(everyone: Sequence[Mapping[ChunkKey, int]]) -> None:
    """Raise DistributedError, the same on every rank, for the first chunk on which two ranks differ."""
    seen: dict[ChunkKey, tuple[int, int]] = {}
    for rank, sums in enumerate(everyone):
        for chunk, value in sums.items():
            first = seen.setdefault(chunk, (rank, value))
            if first[1] != value:
                raise DistributedError(
                    "replicas differ", got=f"rank {rank}", expected=f"the bytes of rank {first[0]}", where=chunk[0]
                )


FILE_COUNT_MAX = 99_999  # The pattern has five digits.
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
FORMAT_METADATA = {"format": "pt"}  # Readers of the HF ecosystem refuse files without it.
WRITE_MODES = ("auto", "random", "sequential")
BLOCK_BYTES_MIN = 64  # Elements are at most 8 bytes and never straddle a unit of this size.
_EXPORTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_count(value: Any, where: str) -> int:
    """An int of at least 1, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("not a count", got=value, expected="an int >= 1", where=where)
    return value


@dataclass(frozen=True)
class Export:
    """Which tensors are cast to which dtype on the way to disk; see :func:`exported_dtype`."""

    export_dtype: torch.dtype | None
    export_keep: tuple[str, ...]

    @classmethod
    def make(cls, dtype: torch.dtype | str | None, keep: Sequence[str]) -> Export:
        """Raises ConfigError."""
        if isinstance(keep, str) or not isinstance(keep, Sequence):
            raise ConfigError("not patterns", got=keep, expected="a sequence of patterns", where="export_keep")
        for pattern in keep:
            check_kind(pattern, str, "export_keep", "patterns that are text")
        return cls(_export(dtype), tuple(keep))


@dataclass(frozen=True)
class WriterOptions:
    """What a save is to produce; see ``HuggingFaceStorageWriter`` for each field."""

    path: Path
    mapping: dict[str, int] | None
    thread_count: int
    save_distributed: bool
    enable_consolidation: bool
    max_shard_size: int | None
    file_metadata: dict[str, str]
    durable: bool
    overwrite: bool
    export_dtype: torch.dtype | None
    export_keep: tuple[str, ...]
    single_file: bool
    page_align: bool
    check_replicas: bool
    write_mode: str
    block_bytes: int
    checksums: bool = False
    progress: Progress | None = None

    @property
    def writes_shards(self) -> bool:
        """Whether torch's one-file-per-rank layout was asked for; one process always writes final files."""
        return self.save_distributed and not self.enable_consolidation

    @property
    def is_indexed(self) -> bool:
        """Whether an index says which files are the checkpoint's."""
        return not self.single_file and not self.writes_shards

    def told(self, path: Path) -> dict[str, Any]:
        """By the argument's name what every rank has to ask for alike in a save to ``path``; the mapping by a sum."""
        own = ("path", "mapping", "thread_count", "progress", "file_metadata")
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        return {
            "path": str(path.absolute()),
            "metadata": self.file_metadata,
            "fqn_to_index_mapping": self._sum,
            **found,
        }

    @cached_property
    def _sum(self) -> str | None:
        # A name for each tensor is too much to send with every save.
        text = repr(sorted((self.mapping or {}).items())).encode()
        return (
            None if self.mapping is None else f"{len(self.mapping)} names, {blake2b(text, digest_size=8).hexdigest()}"
        )

    @classmethod
    def make(
        cls,
        path: Any,
        *,
        mapping: Mapping[str, int] | None,
        thread_count: int,
        thread_count_consolidation: int,
        max_shard_size: int | str | None,
        metadata: Mapping[str, str] | None,
        export_dtype: torch.dtype | str | None,
        export_keep: Sequence[str],
        single_file: bool,
        write_mode: str,
        block_bytes: int,
        progress: Any = None,
        **flags: bool,
    ) -> WriterOptions:
        """Check every option and combination. Raises ConfigError."""
        check_key(metadata)
        if SHARDING_KEY in (metadata or {}):
            # In a final file it would say that the tensors are parts of others; shard files have their own.
            raise ConfigError("this key is kept for shards", got=SHARDING_KEY, expected="other keys", where="metadata")
        check_flags(single_file=single_file, **flags)
        if mapping is not None and max_shard_size is not None:
            raise ConfigError(
                "two rules for the files",
                got="both",
                expected="one of fqn_to_index_mapping, max_shard_size",
                where="fqn_to_index_mapping, max_shard_size",
            )
        if single_file and (mapping is not None or max_shard_size is not None):
            raise ConfigError(
                "single_file leaves nothing to split", got="a rule beside it", expected="it alone", where="single_file"
            )
        cut = "single_file" if single_file else "max_shard_size" if max_shard_size is not None else None
        if cut is not None and flags.get("save_distributed") and not flags.get("enable_consolidation"):
            raise ConfigError(
                "shard files are cut by rank and by fqn_to_index_mapping alone",
                got=f"{cut} with enable_consolidation=False",
                expected="one of them",
                where=cut,
            )
        if (metadata or {}).get("format", "pt") != "pt":
            raise ConfigError(
                "the format of these files is fixed", got=(metadata or {})["format"], expected="pt", where="metadata"
            )
        if single_file and flags.get("checksums"):
            raise ConfigError(
                "single_file has no index for checksums", got=True, expected="max_shard_size instead", where="checksums"
            )
        if progress is not None and not callable(progress):
            expected = "a function of (done_bytes, total_bytes)"
            raise ConfigError("not a function", got=type(progress).__name__, expected=expected, where="progress")
        check_count(thread_count_consolidation, "thread_count_consolidation")
        if write_mode not in WRITE_MODES:
            raise ConfigError("not a write mode", got=write_mode, expected=WRITE_MODES, where="write_mode")
        if check_count(block_bytes, "block_bytes") < BLOCK_BYTES_MIN or block_bytes & (block_bytes - 1):
            raise ConfigError("not a block size", got=block_bytes, expected="a power of two >= 64", where="block_bytes")
        export = Export.make(export_dtype, export_keep)
        return cls(
            path=local_path(path),
            mapping=check_mapping(mapping),
            thread_count=check_count(thread_count, "thread_count"),
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
            file_metadata=check_metadata({**FORMAT_METADATA, **(metadata or {})}),
            export_dtype=export.export_dtype,
            export_keep=export.export_keep,
            single_file=single_file,
            write_mode=write_mode,
            block_bytes=block_bytes,
            progress=progress,
            **flags,
        )


def check_told(told: Sequence[dict[str, Any]]) -> None:
    """Demand that all ask for one save: ``WriterOptions.told`` of some ranks. Raises ConfigError by the argument."""
    for name, first in told[0].items():
        for other in told[1:]:
            if other[name] != first:
                got, expected = repr(other[name]), repr(first)
                raise ConfigError("ranks ask for different saves", got=got, expected=expected, where=name)


def _export(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = _EXPORTS.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _EXPORTS.values():
        raise ConfigError("not an export dtype", got=dtype, expected=sorted(_EXPORTS), where="export_dtype")
    return found


# Which tensor goes to which file.


def parse_size(size: int | str) -> int:
    """Bytes, or a decimal size such as ``"5GB"`` as huggingface_hub reads it. Raises ConfigError."""
    given = size
    if isinstance(size, str):
        number, unit = size.strip()[:-2], size.strip()[-2:].upper()
        try:
            size = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise ConfigError(
                "not a size", got=size, expected="bytes, or a number with KB, MB, GB or TB", where="max_shard_size"
            ) from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError("not a size", got=given, expected=">= 1", where="max_shard_size")
    return size


def check_mapping(mapping: Mapping[str, int] | None) -> dict[str, int] | None:
    """``fqn_to_index_mapping`` with indices 1..N, none left out; else ConfigError."""
    if mapping is None:
        return None
    check_kind(mapping, Mapping, "fqn_to_index_mapping", "name -> file index")
    for name, index in mapping.items():
        check_kind(name, str, "fqn_to_index_mapping", "names that are text")
        if type(index) is not int or index < 1:
            where = f"fqn_to_index_mapping[{name!r}]"
            raise ConfigError("not a file index", got=index, expected="an int from 1", where=where)
    used = set(mapping.values())
    if len(used) > FILE_COUNT_MAX:
        raise ConfigError(
            "too many files", got=len(used), expected=f"<= {FILE_COUNT_MAX}", where="fqn_to_index_mapping"
        )
    if used != set(range(1, len(used) + 1)):
        raise ConfigError(
            "file indices leave gaps", got=sorted(used)[:20], expected=f"1..{len(used)}", where="fqn_to_index_mapping"
        )
    return dict(mapping)


def _split_greedily(sizes_bytes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    # This is huggingface_hub's split: an oversize tensor gets its own file and does not close the file being filled.
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes_bytes.items():
        if size > limit_bytes:
            files.append([name])
            continue
        if filled + size > limit_bytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*files, current] if current else files


def assign_files(
    sizes_bytes: Mapping[str, int],
    mapping: Mapping[str, int] | None,
    max_shard_size: int | str | None,
    *,
    single_file: bool = False,
) -> dict[str, list[str]]:
    """File name -> tensor names, for tensors in state-dict order.

    Raises:
        PlanError: names that ``mapping`` lacks, all of them at once.
        ConfigError: more files than five digits can number.
    """
    if single_file:
        return {SINGLE_NAME: list(sizes_bytes)}
    if mapping is not None:
        missing = sorted(sizes_bytes.keys() - mapping.keys())
        if missing:
            raise PlanError(
                "names without a file index", got=missing, expected="one each", where="fqn_to_index_mapping"
            )
        extra = sorted(mapping.keys() - sizes_bytes.keys())
        if extra:
            logger.warning(
                "fqn_to_index_mapping names %d tensors that are not saved: %s", len(extra), ", ".join(extra[:20])
            )
        groups: list[list[str]] = [[] for _ in range(max(mapping.values(), default=1))]
        for name in sizes_bytes:
            groups[mapping[name] - 1].append(name)
        # An index whose every name is absent (a tied head, say) yields no file; the others are numbered on.
        groups = [group for group in groups if group] or [[]]
    elif max_shard_size is not None:
        groups = _split_greedily(sizes_bytes, parse_size(max_shard_size)) or [[]]
    else:
        groups = [list(sizes_bytes)]
    if len(groups) > FILE_COUNT_MAX:
        raise ConfigError("too many files", got=len(groups), expected=f"<= {FILE_COUNT_MAX}", where="max_shard_size")
    return {file_name(i, len(groups)): group for i, group in enumerate(groups, start=1)}


# Where each tensor lies.

_CASTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass
class GlobalTensor:
    """One tensor of the checkpoint. ``parts`` holds (rank, item position in that rank's plan, box)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, int, Box]] = field(default_factory=list)
    file: str = ""
    begin: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Arrangement:
    """The whole checkpoint: tensors by name, layout by file name."""

    tensors: dict[str, GlobalTensor]
    files: dict[str, FileLayout]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name."""
        return {name: tensor.file for name, tensor in self.tensors.items()}

    def item_counts(self, rank_count: int) -> list[int]:
        """How many items each rank writes."""
        found = Counter(rank for tensor in self.tensors.values() for rank, _, _ in tensor.parts)
        return [found[rank] for rank in range(rank_count)]

    @property
    def total_size_bytes(self) -> int:
        """Payload of all tensors, headers not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def exported_dtype(name: str, dtype: torch.dtype, options: WriterOptions | Export) -> torch.dtype:
    """The dtype on disk: only float64/32/16 and bfloat16 are cast, names that match ``export_keep`` are not."""
    if options.export_dtype is None or dtype not in _CASTABLE or any(fnmatchcase(name, p) for p in options.export_keep):
        return dtype
    return options.export_dtype


def check_local_plan(plan: SavePlan) -> None:
    """Refuse what the format cannot hold before any file is made. Raises UnsupportedError."""
    leaves = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO or item.tensor_data is None]
    if leaves:
        raise UnsupportedError(
            "safetensors holds tensors only", got=sorted(leaves), expected="tensors", where="state_dict"
        )
    for item in plan.items:
        assert item.tensor_data is not None
        check_name(item.index.fqn)
        dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        layout = item.tensor_data.properties.layout
        if layout is not torch.strided:
            raise UnsupportedError(
                "a tensor without dense memory cannot be stored", got=layout, expected="strided", where=item.index.fqn
            )


@dataclass(frozen=True)
class Told:
    """What a rank tells the coordinator beside its plan, in ``storage_data``, which torch's planner leaves alone.

    Attributes:
        announced: what its engine announced.
        items: all that it has. Pickled beside the plan that has the same list, it is a few bytes.
    """

    announced: bytes | None
    items: Sequence[WriteItem]


def told_by_ranks(plans: Sequence[SavePlan]) -> list[Told]:
    """What each rank told; nothing where a planner does not hand it on."""
    return [plan.storage_data if isinstance(plan.storage_data, Told) else Told(None, ()) for plan in plans]


def check_item_count(plan: SavePlan, planned_count: int) -> None:
    """Refuse a plan that has changed since the checkpoint was laid out by it: bytes would be missing. PlanError."""
    if len(plan.items) != planned_count:
        raise PlanError(
            "the planner's last plan has not the items that were planned",
            got=f"{len(plan.items)} items",
            expected=f"{planned_count} items",
            where="finish_plan",
        )


def _collect(plans: Sequence[SavePlan], options: WriterOptions) -> dict[str, GlobalTensor]:
    tensors: dict[str, GlobalTensor] = {}
    for rank, plan in enumerate(plans):
        for position, item in enumerate(plan.items):
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            tensor = tensors.get(name)
            if tensor is None:
                dtype = exported_dtype(name, data.properties.dtype, options)
                tensor = tensors[name] = GlobalTensor(name, dtype, tuple(data.size))
            tensor.parts.append((rank, position, Box(data.chunk.offsets, data.chunk.sizes)))
    return tensors


def arrange(plans: Sequence[SavePlan], options: WriterOptions) -> Arrangement:
    """Lay out a checkpoint from every rank's deduplicated plan, and from what it has ``Told`` of all that it has.

    Raises:
        PlanError: gaps, overlaps, ranks that disagree, names without a file index.
        ConfigError: header or file count beyond the format's limits.
    """
    check_agreed([[*told.items, *plan.items] for told, plan in zip(told_by_ranks(plans), plans, strict=True)])
    tensors = _collect(plans, options)
    for tensor in tensors.values():
        check_tiling(tensor.shape, [box for _, _, box in tensor.parts], PlanError, tensor.name)
    sizes = {name: tensor.size_bytes for name, tensor in tensors.items()}
    groups = assign_files(sizes, options.mapping, options.max_shard_size, single_file=options.single_file)
    files: dict[str, FileLayout] = {}
    for file, names in groups.items():
        members = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
        files[file] = lay_out(members, options.file_metadata, page_align=options.page_align)
        for name in names:
            tensors[name].file, tensors[name].begin = file, files[file].begins[name]
    return Arrangement(tensors, files)


@dataclass(frozen=True)
class StorageInfo:
    """Where a written item lies: file name inside the folder, file offset of its tensor, bytes of this item."""

    relative_path: str
    offset: int
    length: int


# The seam between the writer and what moves its bytes.


@dataclass(frozen=True)
class GlobalPlan:
    """What the coordinator knows when it instructs the ranks.

    ``announced`` holds what each rank's engine announced; it is empty where a planner cached the plans.
    """

    arrangement: Arrangement
    announced: Sequence[bytes]
    rank_count: int
    options: WriterOptions
    folder: StagedFolder


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of a save.

    Attributes:
        items: the write items that this rank stores; each chunk of the state dict is stored by one rank.
        local_items: everything that this rank holds, replicas that another rank stores included.
        planner: ``resolve_data`` gives the tensor of an item.
        group: the ranks that save, in rank order; None is this process alone.
        begun_s: ``time.perf_counter()`` when the save of the data began.
    """

    options: WriterOptions
    rank: int
    group: dist.ProcessGroup | None
    items: Sequence[WriteItem]
    local_items: Sequence[WriteItem]
    planner: SavePlanner
    begun_s: float

    def chunks(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """(name, offsets in the global tensor, values) of every item that this rank stores. Raises PlanError.

        Values are as the planner has them, and of the shape and dtype that were planned.
        """
        for item in self.items:
            value = self.planner.resolve_data(item)
            assert isinstance(value, torch.Tensor)
            check_planned(item, value)
            yield item.index.fqn, _offsets(item), value


class SaveEngine(Protocol):
    """Brings the bytes of a checkpoint into files that nobody sees yet.

    The writer talks to DCP, checks, lays out, opens the staging folder, learns of every rank's failure and publishes.
    An engine only decides how bytes get from the tensors of all ranks to the files that the plan names. The methods
    are called in this order, all but the second on every rank, that on the coordinator. No rank writes unless every
    rank has prepared. While it writes, an engine raises its own rank's error, and only after this rank has taken part
    in every exchange: nobody waits for a rank that failed. It makes no file visible and syncs every file that it
    wrote, where ``folder.durable`` says so.
    """

    def announce(self, items: Sequence[WriteItem]) -> bytes | None:
        """What the coordinator is to know of this rank's items before duplicates are removed from the plans."""
        ...

    def instruct(self, plan: GlobalPlan) -> Sequence[Any]:
        """For each rank, in rank order, an object that can be pickled and that ``prepare`` receives there."""
        ...

    def prepare(self, job: SaveJob, instruction: Any, folder: StagedFolder) -> Any:
        """What ``write`` needs: all that can fail on this rank alone. Raises UnstorableError, PlanError."""
        ...

    def write(self, prepared: Any) -> Sequence[Part]:
        """Bring this rank's bytes into the files of the folder; with ``checksums`` of the options, say their sums.

        The parts of all ranks hold every byte of every tensor once. Raises StorageError.
        """
        ...

    def file_bytes(self, tensors: Mapping[str, torch.Tensor], layout: FileLayout) -> Iterable[bytes | memoryview]:
        """The bytes of one file, in order, for a file that one process writes alone."""
        ...
