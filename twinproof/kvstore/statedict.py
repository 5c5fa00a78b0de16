"""State dicts: what a checkpoint sees of a store, and the way back, also through torch's ``dcp.load``.

Prevents tensors of one table that come from different moments or list different ids: every view of a state dict reads
one snapshot and carries one list of ids. Torch's planner fills tensors in place; a view of a store has no memory to
fill, so rows that were read are written to the store, chunk by chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from twinproof import regime
from twinproof.checkpoint.planners import FillingPlanner, check_covered
from twinproof.checkpoint.publish import raise_first
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    MissingKeyError,
    PlanError,
    ShapeError,
    UnsupportedError,
    check_flags,
    sendable,
)
from twinproof.kvstore.deltas import DeltaStore, check_load_fits, evict_for_load, new_id_count, reserve_for_load
from twinproof.kvstore.options import RowLayout, check_ids, check_int
from twinproof.kvstore.rows import (
    Buckets,
    RowEngine,
    RowStore,
    Snapshot,
    TrackedSource,
    assemble_rows,
    check_buckets,
    check_convertible,
    chosen_buckets,
    convert_rows,
    rank_buckets,
    tables_of,
)
from twinproof.kvstore.views import Dealt, KVTensor, LazyRows, check_keys, dense_rows

__all__ = [
    "KVLoadPlanner",
    "check_agreed",
    "check_rows_of_rank",
    "gathered",
    "load_state_dict",
    "place_rows",
    "rank_and_world",
    "state_dict",
]


LOAD_CHUNK_ROWS = regime(65536, 2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rank_and_world(process_group: Any) -> tuple[int, int]:
    """This process among those of the group; alone where torch.distributed is not in use. Raises ConfigError."""
    if process_group is None and not dist.is_initialized():
        return 0, 1
    # Whoever makes a group of others gets a number that stands for none.
    rank = dist.get_rank(process_group) if _is_group(process_group) else -1
    if rank < 0:
        raise ConfigError(
            "this process is of no such group", got=process_group, expected="a group of its own", where="process_group"
        )
    return rank, dist.get_world_size(process_group)


def _is_group(process_group: Any) -> bool:
    return process_group is None or isinstance(process_group, dist.ProcessGroup)


def gathered(make: Callable[[], Any], process_group: Any) -> list[Any]:
    """``make()`` of every rank, by rank, in one exchange.

    An error of any rank ends all: that rank raises it as it is, the others DistributedError with the first one's.
    """
    world_size = rank_and_world(process_group)[1]
    if world_size == 1:
        return [make()]
    value, failure = None, None
    try:
        value = make()
    except BaseException as error:  # Also what ends a program: the others would wait for this rank.
        failure = error
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, (value, sendable(failure)), group=process_group)
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # Its traceback has this frame.
    raise_first([failed for _, failed in results])
    return [found for found, _ in results]


def check_agreed(asked: list[Any]) -> None:
    """Demand that all ranks, in order, asked for the same. Raises ConfigError."""
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise ConfigError("ranks that ask for different things", got=other, expected=asked[0], where=f"rank {rank}")


def place_rows(rows: list[LazyRows], counts: list[int], rank: int) -> None:
    """Tell this rank's rows where they stand among those of all ranks."""
    for lazy in rows:
        lazy.place(sum(counts), sum(counts[:rank]))


def state_dict(
    store: RowStore,
    engine: RowEngine,
    tables: tuple[str, ...] | None,
    buckets: Buckets | None,
    process_group: Any,
    *,
    snapshot: bool,
    chunk_rows: int | None,
) -> dict[str, Any]:
    """See ``KVStore.state_dict``."""
    rank, world_size = rank_and_world(process_group)
    sorted_ids: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    moment: list[TrackedSource] = []

    def local_counts() -> tuple[Any, dict[str, tuple[int, int]]]:
        # What one rank must not be asked is found here, where the others hear of it.
        check_flags(snapshot=snapshot)
        if chunk_rows is not None:
            check_int(chunk_rows, "chunk_rows", 1)
        chosen, names = chosen_buckets(buckets), tables_of(store.tables, tables)
        source: TrackedSource = store.snapshot() if snapshot else store
        moment.append(source)
        begin, end = rank_buckets(chosen.total_count, world_size, rank)
        for table in names:
            sorted_ids[table] = engine.sort_ids(source.ids(table), chosen, begin, end)
        asked = {"buckets": chosen, "tables": names, "whole rows": store.return_whole_row}
        asked["layouts"] = [source.layout(table) for table in names]
        return asked, {table: (ids.shape[0], source.step_count(table)) for table, (ids, _) in sorted_ids.items()}

    try:
        told = gathered(local_counts, process_group)
        check_agreed([asked for asked, _ in told])
    except BaseException:
        # Whoever keeps the error would keep the rows of the moment with it.
        for taken in moment if snapshot else ():
            taken.close()
        raise
    by_rank = [counts for _, counts in told]
    total_count = chosen_buckets(buckets).total_count
    begin, end = rank_buckets(total_count, world_size, rank)
    (source,) = moment
    result: dict[str, Any] = {}
    for table, (ids, bucket_counts) in sorted_ids.items():
        whole = store.return_whole_row

        def view(name: str, read_only: bool, table: str = table, ids: torch.Tensor = ids) -> KVTensor:
            # Nobody else has these ids: all views of the table share them.
            return KVTensor.over(source, ids[:, 0], name, read_only, table=table, chunk_rows=chunk_rows)

        rows: dict[str, LazyRows] = {
            "weight": view("row" if whole else "weight", False),
            "weight_id": dense_rows(ids, chunk_rows),
            "metadata": view("metadata", True),
        }
        rows |= {name: view(name, whole) for name in source.layout(table).state_slots}
        place_rows(list(rows.values()), [counts[table][0] for counts in by_rank], rank)
        rows["bucket"] = dense_rows(bucket_counts)
        rows["bucket"].place(total_count, begin)
        if source.layout(table).optimizer != "none":
            # A rank whose rows nobody asked for has taken no step.
            step = torch.tensor([[max(counts[table][1] for counts in by_rank)]], device="cpu")
            rows["step"] = dense_rows(step, sink=None if snapshot else _step_sink(store, table))
        # One for all entries of the table. Where nobody named buckets, nothing says whose rows are whose.
        dealt = None if buckets is None else Dealt(buckets, begin, end)
        for name, lazy in rows.items():
            lazy.dealt, lazy.entry = dealt, name
        result |= {f"{table}.{name}": value for name, value in rows.items()}
    return result


def _step_sink(store: RowStore, table: str) -> Callable[[torch.Tensor], Callable[[], None]]:
    def checked(found: torch.Tensor) -> Callable[[], None]:
        step = _one_step(found, table)
        return lambda: store.set_step_count(table, step)

    return checked


@dataclass(frozen=True)
class _Incoming:
    """One table of a state dict: ``layout`` of its whole rows, None in the separate form."""

    ids: torch.Tensor
    weight: torch.Tensor
    layout: RowLayout | None
    metadata: torch.Tensor | None
    states: dict[str, torch.Tensor]
    step: int | None = None

    def of_this_moment(self, store: RowStore, moments: dict[int, Any]) -> _Incoming:
        """The same; what are views of this store are views of its present moment, one for all tables."""

        def kept(value: Any) -> Any:
            return value.staged(moments) if _is_view_of(store, value) else value

        states = {name: kept(value) for name, value in self.states.items()}
        return replace(self, weight=kept(self.weight), metadata=kept(self.metadata), states=states)

    def chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.ids.numel(), LOAD_CHUNK_ROWS):
            yield start, min(LOAD_CHUNK_ROWS, self.ids.numel() - start)


def _incoming(store: RowStore, table: str, state: Mapping[str, Any], *, weights_only: bool) -> _Incoming:
    target = store.layout(table)
    missing = [name for name in (f"{table}.weight", f"{table}.weight_id") if name not in state]
    if missing:
        raise MissingKeyError(
            "names are not in the state dict", got=missing, expected="weight and weight_id", where=table
        )
    weight, ids = state[f"{table}.weight"], _flat(state[f"{table}.weight_id"], table)
    _check_memory(weight, f"{table}.weight")
    if torch.unique(ids).numel() != ids.numel():
        found, counts = torch.unique(ids, return_counts=True)
        got, where = found[counts > 1][:10].tolist(), f"{table}.weight_id"
        raise CorruptionError("an id stands twice", got=got, expected="distinct ids", where=where)
    if weight.dim() != 2 or weight.shape[0] != ids.numel():
        raise ShapeError("ids and rows differ in number", got=tuple(weight.shape), expected=ids.numel(), where=table)
    step = None if weights_only else _step(state, table)
    if weight.dtype is torch.uint8:
        layout = _row_layout(store, table, weight)
        _check_values(weight, (ids.numel(), weight.shape[1]), (torch.uint8,), f"{table}.weight")
        check_convertible(layout, target, weights_only=weights_only, where=table)
        return _Incoming(ids, weight, layout, None, {}, step)
    _check_values(weight, (ids.numel(), target.embedding_dim), _FLOATS, f"{table}.weight")
    # Those of another optimizer may have the same names, and another width or no tensors at all.
    wanted = () if weights_only else target.state_slots
    states = {name: state[f"{table}.{name}"] for name in wanted if f"{table}.{name}" in state}
    if not weights_only and len(states) < len(target.state_slots):
        absent = sorted(set(target.state_slots) - set(states))
        expected = "all, or the store's load_state_dict with weights_only=True"
        raise MissingKeyError("optimizer states are missing", got=absent, expected=expected, where=table)
    for name, value in states.items():
        _check_optimizer(value, target, f"{table}.{name}")
        _check_values(value, (ids.numel(), target.state_slots[name].count), _FLOATS, f"{table}.{name}")
    metadata = state.get(f"{table}.metadata")
    if metadata is not None:
        _check_values(metadata, (ids.numel(), 1), (torch.int64,), f"{table}.metadata")
    return _Incoming(ids, weight, None, metadata, states, step)


def _step(state: Mapping[str, Any], table: str) -> int | None:
    """The step of a state dict, if it has one. Raises CorruptionError, ShapeError, UnsupportedError."""
    value = state.get(f"{table}.step")
    if value is None:
        return None
    return _one_step(_flat(value, table, "step"), table)


def _one_step(found: torch.Tensor, table: str) -> int:
    plain = found.reshape(-1).tolist()
    if len(plain) != 1 or plain[0] < 0:
        raise CorruptionError("not a number of steps", got=plain[:10], expected="one, >= 0", where=f"{table}.step")
    step: int = plain[0]
    return step


def _check_memory(value: Any, where: str) -> None:
    """Demand lazy rows, or a tensor whose memory can be read, strided any way. Raises UnsupportedError."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, expected="a tensor", where=where)
    if isinstance(value, LazyRows):
        return
    # Of a DTensor or a FakeTensor torch would first say in the middle of the load that it has no such memory.
    is_wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if value.layout is not torch.strided or value.is_nested or is_wrapper:
        got = type(value).__name__ if is_wrapper else "nested" if value.is_nested else value.layout
        raise UnsupportedError("values without plain memory", got=got, expected="a strided tensor", where=where)


def _check_values(value: Any, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], where: str) -> None:
    """Demand a tensor, lazy or strided any way, that converts to what the row holds. ShapeError, UnsupportedError."""
    _check_memory(value, where)
    if value.dtype not in dtypes:
        raise UnsupportedError("not a dtype of these values", got=value.dtype, expected=dtypes, where=where)
    if tuple(value.shape) != shape:
        raise ShapeError("another shape than expected", got=tuple(value.shape), expected=shape, where=where)
    if value.device.type != "cpu":
        raise ShapeError("a tensor on another device than the store", got=value.device, expected="cpu", where=where)


def _check_optimizer(value: Any, target: RowLayout, where: str) -> None:
    """Demand that a view of a state is one of the same optimizer; nothing else knows. Raises ConfigError."""
    found = value.state_optimizer if isinstance(value, KVTensor) else None
    if found not in (None, target.optimizer):
        raise ConfigError(
            "other optimizer state than the store's rows; weights_only=True loads weights alone",
            got=found,
            expected=target.optimizer,
            where=where,
        )


def _row_layout(store: RowStore, table: str, weight: torch.Tensor) -> RowLayout:
    if isinstance(weight, KVTensor):
        return weight.source.layout(weight.table)
    for layout in (store.options.rows[table], store.options.layouts[table]):
        if weight.shape[1] == layout.row_bytes:
            return layout
    expected = store.options.rows[table].row_bytes
    raise ConfigError("not whole rows of this table", got=weight.shape[1], expected=expected, where=f"{table}.weight")


def _flat(ids: Any, table: str, field: str = "weight_id") -> torch.Tensor:
    where = f"{table}.{field}"
    _check_memory(ids, where)
    plain = ids.full_tensor() if isinstance(ids, LazyRows) else ids
    return check_ids(plain.reshape(-1).resolve_neg(), where)


def _part(value: torch.Tensor, start: int, length: int) -> torch.Tensor:
    # A negative view has the bytes of what it is the negative of.
    return value.narrow(0, start, length).contiguous().resolve_neg()


def check_rows_of_rank(
    state: Mapping[str, Any], table: str, buckets: Buckets | None, process_group: Any = None
) -> None:
    """Demand that the rows of a table in a state dict are those of this rank's buckets, and all of one process.

    Rows that are absent are left to ``load_state_dict``. Raises ConfigError.
    """
    rank, world_size = rank_and_world(process_group)
    ids, counts = state.get(f"{table}.weight_id"), state.get(f"{table}.bucket")
    if ids is None:
        return
    total_count = chosen_buckets(buckets).total_count
    begin, end = rank_buckets(total_count, world_size, rank)
    flat = _flat(ids, table)
    # One process may be given the counts of more or fewer buckets that others had.
    is_part = world_size == 1 and getattr(ids, "global_row_count", flat.numel()) != flat.numel()
    if is_part or (world_size > 1 and counts is not None and counts.shape[0] != end - begin):
        raise ConfigError(
            "rows of one rank of others",
            got=f"{flat.numel()} rows",
            expected=f"those of {end - begin} buckets of {total_count}, by load_training or a manager, or kvstore.load",
            where=f"{table}.weight_id",
        )
    check_buckets(flat, chosen_buckets(buckets), begin, end)


def _check(store: RowStore, incoming: _Incoming, table: str) -> None:
    values = [incoming.weight, *incoming.states.values(), *([] if incoming.metadata is None else [incoming.metadata])]
    # Rows of a store that was closed, or of files that went, would be missed when the rows before them are gone.
    elsewhere = [value for value in values if isinstance(value, LazyRows) and not _is_view_of(store, value)]
    is_whole = incoming.layout is not None
    for start, length in incoming.chunks() if is_whole or elsewhere else ():
        parts = {id(value): _part(value, start, length) for value in elsewhere}
        if is_whole:
            rows = parts.get(id(incoming.weight))
            found = _part(incoming.weight, start, length) if rows is None else rows
            check_keys(found, incoming.ids[start : start + length], table)


def _is_view_of(store: RowStore, value: Any) -> bool:
    return isinstance(value, KVTensor) and value.source is store


def _rows(
    store: RowStore, table: str, incoming: _Incoming, start: int, length: int, *, now: int, weights_only: bool
) -> torch.Tensor:
    target, ids = store.layout(table), incoming.ids[start : start + length]
    if incoming.layout is not None:
        rows = _part(incoming.weight, start, length)
        return convert_rows(rows, incoming.layout, target, weights_only=weights_only)
    words = torch.full_like(ids, now)
    if incoming.metadata is not None:
        words = _part(incoming.metadata, start, length)[:, 0]
    values = {name: _part(value, start, length) for name, value in incoming.states.items()}
    return assemble_rows(target, ids, words, {"weight": _part(incoming.weight, start, length), **values})


def _remove_others(store: RowStore, table: str, ids: torch.Tensor) -> None:
    """Remove the rows of all ids but these, int64 [n]."""
    present = store.ids(table)
    store.delete(table, present[~torch.isin(present, ids)])


def load_state_dict(
    store: DeltaStore,
    engine: RowEngine,
    state: Mapping[str, Any],
    begun: list[str],
    *,
    weights_only: bool,
    tables: tuple[str, ...] | None,
    clear: bool,
) -> dict[str, int]:
    """See ``KVStore.load_state_dict``; rows go to the engine: who listens is told when all are there.

    ``begun`` gets the names of the tables whose rows are written, each before its first.
    """
    check_flags(weights_only=weights_only, clear=clear)
    if not isinstance(state, Mapping):
        raise UnsupportedError("not a state dict", got=type(state).__name__, expected="a mapping", where="state")
    names = tables_of(store.tables, tables)
    found = {table: _incoming(store, table, state, weights_only=weights_only) for table in names}
    for table, incoming in found.items():
        check_load_fits(store, table, incoming.ids.numel())
        _check(store, incoming, table)
    # Room for all of them first: memory that is short between two chunks would leave some rows new and some old.
    for table, incoming in found.items():
        reserve_for_load(store, table, new_id_count(store, table, incoming.ids))
    # One moment for the rows of all chunks and tables that bring none.
    now = store.now()
    moments: dict[int, Snapshot] = {}
    with ExitStack() as opened:
        # Rows of the store itself would be read when they are gone, or are those of another table.
        kept = {table: incoming.of_this_moment(store, moments) for table, incoming in found.items()}
        for moment in moments.values():
            opened.enter_context(moment)
        for table, incoming in kept.items():
            # What it was loaded from before is no base of deltas any more.
            store.fingerprints.set_loaded(table, None)
            begun.append(table)
            evict_for_load(store, table, incoming.ids)
            for start, length in incoming.chunks():
                rows = _rows(store, table, incoming, start, length, now=now, weights_only=weights_only)
                engine.write_rows(table, rows)
            if clear:
                # Last: rows that went first would be missed where the new ones cannot be had.
                _remove_others(store, table, incoming.ids)
            if incoming.step is not None:
                store.set_step_count(table, incoming.step)
    return {table: incoming.ids.numel() for table, incoming in found.items()}


class KVLoadPlanner(FillingPlanner):
    """``DefaultLoadPlanner`` that also loads into ``KVTensor``s of a store.

    Load ``{table}.weight_id`` first, as a plain tensor; views of these ids are then the targets for all else. Where the
    store has the very rows of the checkpoint, ``store.state_dict(snapshot=False)`` is the target as it is: its ids and
    bucket counts are compared. Nothing is written before all of this rank was read and compared, and room was made in
    all tables: a load that is refused, or whose rows memory is short for, leaves the store as it was, but for what a
    live snapshot's copies or a capacity lack, as in ``load_state_dict``. Who listens to the store is told behind the
    last row. In a table with a capacity the load is one batch. Memory is that of all rows, once more. ``load`` is
    bounded by a chunk.

    Raises:
        UnsupportedError: views of a moment, which nothing can be loaded into. PlanError: other numbers of rows or
            widths than the checkpoint's. MissingKeyError: names that the checkpoint lacks. CapacityError: views of more
            ids than a table may hold. CorruptionError: the checkpoint lacks a part of what is asked for.
    """

    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank's rows, and for everything else as torch plans it."""
        lazy = {fqn: value for fqn, value in self.state_dict.items() if isinstance(value, LazyRows)}
        assert self.metadata is not None
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        if not lazy:
            return super().create_local_plan()
        for value in lazy.values():
            value.check_target()
        missing = sorted(lazy.keys() - saved.keys())
        if missing and not self.allow_partial_load:
            expected = "names of the checkpoint, or allow_partial_load=True"
            raise MissingKeyError("names are not in the checkpoint", got=missing, expected=expected, where="state_dict")
        rest = {fqn: value for fqn, value in self.state_dict.items() if fqn not in lazy}
        plan = create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load)
        chunks = self._with_blocks(plan, rest)
        found = {fqn: value for fqn, value in lazy.items() if fqn in saved}
        for store, table, ids in _written_ids(found.values()):
            check_load_fits(store, table, ids.numel())
        for fqn, value in found.items():
            plan.items += _read_items(fqn, value, saved[fqn])
        check_covered(plan, {**rest, **chunks, **{fqn: value.global_chunks() for fqn, value in found.items()}}, saved)
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Note what is to come."""
        self._left = sum(item.type is LoadItemType.TENSOR for item in new_plan.items)
        self._waiting: list[tuple[LazyRows, int, torch.Tensor]] = []
        # Torch's reader of HF files commits in several threads.
        self._lock = threading.Lock()
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Memory for what is read: of rows, which have none, exactly as much as is read."""
        view = self.state_dict[read_item.dest_index.fqn]
        if isinstance(view, LazyRows):
            return torch.empty(tuple(read_item.lengths), dtype=view.dtype, device="cpu")
        found: torch.Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Check what was read; with the last of it, write all rows to their stores.

        Raises:
            PlanError: a checkpoint that cut rows apart. CorruptionError: whole rows whose keys are not the view's ids,
                other ids than the views', or no number of steps.
        """
        view = self.state_dict[read_item.dest_index.fqn]
        if isinstance(view, LazyRows):
            if tensor.shape[1:] != view.shape[1:]:
                raise PlanError(
                    "rows that were cut apart",
                    got=tuple(tensor.shape),
                    expected=tuple(view.shape[1:]),
                    where=read_item.dest_index.fqn,
                )
            # Items for rows are of this planner's making, and say where their chunk is.
            offset = read_item.dest_index.offset
            assert offset is not None
            first = int(offset[0]) - view.row_offset + int(read_item.dest_offsets[0])
            view.check_found(first, tensor)
        with self._lock:
            if isinstance(view, LazyRows):
                self._waiting.append((view, first, tensor))
            # Only what fits counts, so that a load that does not fit writes nothing.
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._write()

    def _write(self) -> None:
        """Write all that waits: rows, then timestamps and counts of the rows that are there by then, then steps."""
        written = _written_ids(view for view, _, _ in self._waiting)
        # Room for all of them first: memory that is short between two views would leave states of two moments in a row.
        for store, table, ids in written:
            reserve_for_load(store, table, new_id_count(store, table, ids))
        for view, _, _ in self._waiting:
            if isinstance(view, KVTensor):
                # As a load of a state dict: a delta finds its base here no more.
                cast("DeltaStore", view.source).fingerprints.set_loaded(view.table, None)
        with ExitStack() as told:
            for store, table, _ in reversed(written):
                told.callback(store.tell_written, table)
            # The chunks are one batch: none evicts the rows of another.
            for store, table, ids in written:
                evict_for_load(store, table, ids)
            for view, first, rows in sorted(self._waiting, key=lambda waiting: _turn(waiting[0])):
                view.accept(first, rows.contiguous())
            self._waiting = []


def _written_ids(views: Iterable[LazyRows]) -> list[tuple[RowStore, str, torch.Tensor]]:
    """Stores, tables, and the distinct ids of which a load into all these views may insert rows."""
    by_table: dict[tuple[int, str], list[KVTensor]] = {}
    for view in views:
        if isinstance(view, KVTensor) and not view.read_only:
            by_table.setdefault((id(view.source), view.table), []).append(view)
    return [
        (cast("RowStore", some[0].source), table, torch.unique(torch.cat([view.ids for view in some])))
        for (_, table), some in by_table.items()
    ]


def _turn(view: LazyRows) -> int:
    if isinstance(view, KVTensor):
        return int(view.view_name == "metadata")
    return 2


def _read_items(fqn: str, value: LazyRows, saved: Any) -> list[ReadItem]:
    size = (value.global_row_count, *value.shape[1:])
    if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != size:
        got = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else type(saved).__name__
        raise PlanError("other rows than the checkpoint's", got=size, expected=got, where=fqn)
    return create_read_items_for_chunk_list(fqn, saved, value.global_chunks())
