"""Embedded databases that hold the same rows: from a tensor of ids to a tensor of rows, each at its fastest.

What was tried for each is said where it matters: sorted batches gain more than any setting, and a list of keys in one
call gains nothing over a loop in C that asks for each. Files lie where the caller says, on tmpfs for the gates, and
nothing is ever synced to disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch

__all__ = ["DATABASES", "Database", "filled_database", "installed"]

_MAP_BYTES = 16 << 30
_CHUNK_ROWS = 100_000


class Database:
    """Rows by id: ids int64 [n], rows uint8 [n, row_bytes]; every id that is read is there.

    ``get`` and ``set`` are the fastest way that was found, ``get_batch`` and ``set_batch`` the database's own calls for
    batches, with the keys as they come. Rows that are handed out lie in new memory.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def get(self, ids: torch.Tensor) -> torch.Tensor:
        """Keys in order, one after the other: sorting a tensor costs little, and neighbours share pages."""
        ordered, order = ids.sort()
        rows = _matrix(self._read(_keys(ordered)), self._row_bytes)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def get_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """One call for all keys."""
        return _matrix(self._read_many(_keys(ids)), self._row_bytes)

    def set(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """One batch, in order of keys; ids are distinct."""
        ordered, order = ids.sort()
        self._write(_keys(ordered), _values(rows[order]))

    def set_batch(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """One batch."""
        self._write(_keys(ids), _values(rows))

    def settle(self) -> None:
        """Make reading what was written as cheap as it gets."""

    def close(self) -> None:
        """Give everything back."""

    def _read(self, keys: list[bytes]) -> Iterable[bytes]:
        raise NotImplementedError

    def _read_many(self, keys: list[bytes]) -> Iterable[bytes]:
        raise NotImplementedError

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        raise NotImplementedError


def _keys(ids: torch.Tensor) -> list[bytes]:
    """Big-endian and without sign, so that the database's order of bytes is the order of the numbers."""
    raw = (ids ^ -(2**63)).view(torch.uint8).reshape(-1, 8).flip(1).contiguous()
    return _values(raw)


def _values(rows: torch.Tensor) -> list[bytes]:
    # numpy makes a list of bytes twice as fast as slicing does.
    found: list[bytes] = rows.contiguous().numpy().view(f"V{rows.shape[1]}")[:, 0].tolist()
    return found


def _matrix(values: Iterable[bytes], row_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(values), dtype=torch.uint8).reshape(-1, row_bytes)


class PlainDict(Database):
    """A Python dictionary of bytes."""

    def __init__(self, folder: Path, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self._rows = dict[int, bytes]()

    def get(self, ids: torch.Tensor) -> torch.Tensor:
        """Order means nothing to a dictionary."""
        return _matrix(map(self._rows.__getitem__, ids.tolist()), self._row_bytes)

    def set(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """As ``get``."""
        self._rows.update(zip(ids.tolist(), _values(rows), strict=True))


class Lmdb(Database):
    """LMDB without syncing, locks or read-ahead, written through a shared map; a transaction for each batch.

    ``Cursor.getmulti`` is slower than ``Transaction.get`` for each key: it makes a pair for each.
    """

    def __init__(self, folder: Path, row_bytes: int) -> None:
        import lmdb

        super().__init__(row_bytes)
        self._environment: Any = lmdb.open(
            str(folder / "lmdb"),
            map_size=_MAP_BYTES,
            sync=False,
            metasync=False,
            writemap=True,
            lock=False,
            readahead=False,
            meminit=False,
        )

    def _read(self, keys: list[bytes]) -> Iterable[bytes]:
        with self._environment.begin() as transaction:
            return list(map(transaction.get, keys))

    def _read_many(self, keys: list[bytes]) -> Iterable[bytes]:
        with self._environment.begin() as transaction:
            return [value for _, value in transaction.cursor().getmulti(keys)]

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(zip(keys, values, strict=True))

    def close(self) -> None:
        """As Database."""
        self._environment.close()


class RocksDb(Database):
    """RocksDB with plain tables, which are made for memory, without compression and log; a write batch for each batch.

    Block-based tables with a hash index were slower to read, ``multi_get`` slower than ``get`` for each key.
    """

    def __init__(self, folder: Path, row_bytes: int) -> None:
        import rocksdict

        super().__init__(row_bytes)
        self._module = rocksdict
        tables = rocksdict.PlainTableFactoryOptions()
        tables.user_key_length, tables.bloom_bits_per_key = 8, 10
        tables.hash_table_ratio, tables.index_sparseness = 0.75, 1
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(2)
        options.set_write_buffer_size(256 << 20)
        options.set_max_write_buffer_number(4)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_allow_mmap_reads(True)
        options.set_prefix_extractor(rocksdict.SliceTransform.create_fixed_prefix(8))
        options.set_plain_table_factory(tables)
        self._store: Any = rocksdict.Rdict(str(folder / "rocksdb"), options)
        self._how = rocksdict.WriteOptions()
        # The package types this property as a method.
        cast(Any, self._how).disable_wal = True

    def _read(self, keys: list[bytes]) -> Iterable[bytes]:
        return map(self._store.get, keys)

    def _read_many(self, keys: list[bytes]) -> Iterable[bytes]:
        found: list[bytes] = self._store[keys]
        return found

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        batch = self._module.WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        self._store.write(batch, self._how)

    def settle(self) -> None:
        """Put all that was written into one sorted run, which reads best."""
        self._store.flush()
        self._store.compact_range(None, None)

    def close(self) -> None:
        """As Database."""
        self._store.close()


# Name -> (module that must be installed, None for Python itself; class).
DATABASES: dict[str, tuple[str | None, Callable[[Path, int], Database]]] = {
    "dict": (None, PlainDict),
    "lmdb": ("lmdb", Lmdb),
    "rocksdb": ("rocksdict", RocksDb),
}


def installed(name: str) -> bool:
    """Whether it is a database, and its package is there."""
    module = DATABASES[name][0] if name in DATABASES else ""
    return module is None or (module != "" and importlib.util.find_spec(module) is not None)


def filled_database(name: str, folder: Path, ids: torch.Tensor, rows: torch.Tensor) -> Database:
    """A database of these rows."""
    made = DATABASES[name][1](folder, rows.shape[1])
    for start in range(0, ids.numel(), _CHUNK_ROWS):
        made.set(ids[start : start + _CHUNK_ROWS], rows[start : start + _CHUNK_ROWS])
    made.settle()
    return made
