"""What a store and a snapshot have in common: reading rows. Checks here, bytes from four primitives of the subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import torch

from twinproof.errors import ConfigError, MissingKeyError, ShapeError
from twinproof.kvstore.checks import check_count, check_ids, check_matrix
from twinproof.kvstore.config import StoreOptions
from twinproof.kvstore.layout import COUNT_MAX, HEADER_BYTES, RowLayout, StateSlot, from_bytes

__all__ = ["METADATA_OFFSET", "RowSource", "SnapshotBase", "TrackedSource"]

METADATA_OFFSET = 8
ID_MIN, ID_MAX = -(2**63), 2**63 - 1


class RowSource(ABC):
    """Rows by table and id. Reading never inserts: a missing id reads as its initial row (key, initial weight, zeros).

    Attributes:
        options: the checked options; ``options.rows[table]`` is the layout of the rows as they are stored.
        read_only: whether views of this source drop their writes.
    """

    options: StoreOptions
    read_only = False

    # The four primitives. Arguments are checked: a known table, contiguous int64 ids on the CPU, a range inside the
    # row. Each call sees one state of the table, raises StoreClosedError after close, and returns fresh memory.

    @abstractmethod
    def _read(self, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) of each row, uint8 [n, end - begin]; of the initial row where an id is missing."""

    @abstractmethod
    def _find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]: whether each id has a row."""

    @abstractmethod
    def _ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        """The ids in [begin, last], both included, ascending."""

    @abstractmethod
    def _size(self, table: str) -> int:
        """The number of rows."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, in order of construction."""
        return tuple(self.options.layouts)

    def layout(self, table: str) -> RowLayout:
        """The layout of the table's rows as stored: without optimizer state unless ``optimizer_in_row``."""
        if table not in self.options.rows:
            raise ConfigError("no such table", got=table, expected=sorted(self.options.rows), where="table")
        return self.options.rows[table]

    def slot(self, table: str, state: str) -> StateSlot:
        """Where a state lies in the row. Raises ConfigError when the stored row has no such state."""
        slots = self.layout(table).state_slots
        if state not in slots:
            raise ConfigError("the row holds no such state", got=state, expected=sorted(slots), where=table)
        return slots[state]

    def get(
        self, table: str, ids: torch.Tensor, *, out: torch.Tensor | None = None, count: int | None = None
    ) -> torch.Tensor:
        """Weights [n, D] of ids [n], in the weight dtype.

        Args:
            table: the table.
            ids: int64 or int32 [n], any values, duplicates allowed.
            out: filled and returned instead of a fresh tensor; rows past ``count`` are left alone.
            count: only the first ``count`` ids are read; rows of a fresh result past it are zero.

        Raises:
            ConfigError, ShapeError, UnsupportedError, StoreClosedError.
        """
        layout, checked = self.layout(table), check_ids(ids)
        used = check_count(count, checked.numel())
        if out is not None:
            check_matrix(out, checked.numel(), layout.embedding_dim, layout.weight_dtype, "out")
        end = HEADER_BYTES + layout.weight_bytes
        if out is not None and used == checked.numel():
            self._read_into(table, checked, HEADER_BYTES, end, out.view(torch.uint8))
            return out
        weights = from_bytes(self._read(table, checked[:used], HEADER_BYTES, end), layout.weight_dtype)
        if out is None and used == checked.numel():
            return weights
        result = torch.zeros(checked.numel(), layout.embedding_dim, dtype=layout.weight_dtype) if out is None else out
        result[:used] = weights
        return result

    def get_rows(
        self,
        table: str,
        ids: torch.Tensor,
        *,
        offset_bytes: int = 0,
        width_bytes: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Whole rows, uint8 [n, row_bytes]; or ``width_bytes`` of each from ``offset_bytes``; into ``out`` if given.

        A missing id reads as an unused row: its key, timestamp, count and used bit 0, the initial weight, zero state.

        Raises:
            ShapeError: a range outside the row. ConfigError, UnsupportedError, StoreClosedError.
        """
        row_bytes, checked = self.layout(table).row_bytes, check_ids(ids)
        end = row_bytes if width_bytes is None else offset_bytes + width_bytes
        if not 0 <= offset_bytes <= end <= row_bytes:
            raise ShapeError("not a range of the row", got=(offset_bytes, end), expected=f"within {row_bytes} bytes")
        if out is None:
            return self._read(table, checked, offset_bytes, end)
        check_matrix(out, checked.numel(), end - offset_bytes, torch.uint8, "out")
        return self._read_into(table, checked, offset_bytes, end, out)

    def _read_into(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """``_read`` into memory of the caller, which is returned."""
        return out.copy_(self._read(table, ids, begin, end))

    def get_state(self, table: str, name: str, ids: torch.Tensor) -> torch.Tensor:
        """One optimizer state of ids [n], [n, count] in its own dtype; zeros where an id is missing.

        Raises:
            ConfigError: the stored row has no such state. ShapeError, UnsupportedError, StoreClosedError.
        """
        slot, checked = self.slot(table, name), check_ids(ids)
        return from_bytes(self._read(table, checked, slot.offset_bytes, slot.end_bytes), slot.dtype)

    def metadata(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bytes 8-15 of each header as int64 [n, 1]: ``timestamp | count << 32 | used << 63``, as FBGEMM exports it."""
        self.layout(table)
        return from_bytes(self._read(table, check_ids(ids), METADATA_OFFSET, HEADER_BYTES), torch.int64)

    def get_scores(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """The scores of ids, float32 [n]: the 31 bits of the count as a non-negative float32.

        Raises:
            MissingKeyError: ids without a row.
        """
        checked = check_ids(ids)
        missing = checked[~self.contains(table, checked)]
        if missing.numel():
            raise MissingKeyError("ids without a row have no score", got=missing[:10].tolist(), where=table)
        return ((self.metadata(table, checked)[:, 0] >> 32) & COUNT_MAX).to(torch.int32).view(torch.float32)

    def contains(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]: whether each id has a row."""
        self.layout(table)
        return self._find(table, check_ids(ids))

    def ids(self, table: str, begin: int = ID_MIN, last: int = ID_MAX) -> torch.Tensor:
        """The ids of the table in [begin, last], both included, ascending, int64 [n]."""
        self.layout(table)
        return self._ids(table, begin, last)

    def size(self, table: str) -> int:
        """The number of rows of the table."""
        self.layout(table)
        return self._size(table)

    def descriptor(self) -> dict[str, Any] | None:
        """What another process needs to find these rows again; None when it cannot. See ``KVTensor``."""
        return None


class TrackedSource(RowSource):
    """A store or a snapshot of one: it also knows what changed since some moment, and how far its optimizers are."""

    _steps: dict[str, int]

    def step_count(self, table: str) -> int:
        """The step of the table's last ``apply_gradients``, or of what was loaded since; 0 before the first."""
        self.layout(table)
        return self._steps.get(table, 0)

    @abstractmethod
    def _changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of rows that changed after mark ``since``, and ids that were removed after it; both ascending."""

    @abstractmethod
    def mark(self) -> int:
        """The present moment for ``changes``: an int that grows with every change."""

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of rows with any byte written after ``mark()`` gave ``since``, and ids removed after it; ascending.

        Raises:
            ConfigError: without ``track_changes``, or a mark from the future.
        """
        self.layout(table)
        if not self.options.track_changes:
            raise ConfigError("changes are not tracked", got=False, expected=True, where="track_changes")
        if type(since) is not int or not 0 <= since <= self.mark():
            raise ConfigError("not a mark of this store", got=since, expected=f"0 to {self.mark()}", where="since")
        return self._changes(table, since)


class SnapshotBase(TrackedSource):
    """The rows of one moment, which later writes do not change; a context manager."""

    read_only = True

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; twice is harmless. Reading afterwards raises StoreClosedError."""

    def __enter__(self) -> SnapshotBase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
