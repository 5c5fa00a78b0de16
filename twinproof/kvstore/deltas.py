"""What a saved store says of itself, and names of its contents, so that a delta finds the rows it was taken from.

Prevents deltas on rows of another run, and deltas that were left out. A save of a store that tracks its changes names
the contents of each table by a fingerprint; a delta has its own, and that of the contents it changes: its base. The
fingerprint of a full save is a digest of its rows' ids, headers and first values; that of a delta, one of the same of
its rows, its removed ids, and its base; of one in which nothing changed, its base's. Equal contents have equal
fingerprints, in any order and over any number of ranks. Files call them ``moments``.

A load counts as one batch, whatever its chunks are: no later chunk fails to fit, and none evicts rows of earlier ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from twinproof import regime
from twinproof.errors import CapacityError, ConfigError, DeltaBaseError, FormatError, VersionError
from twinproof.kvstore.options import RowLayout, from_bytes
from twinproof.kvstore.rows import Buckets, RowSource, RowStore, TrackedSource, check_remembered
from twinproof.optimizers import STEP_MAX

__all__ = [
    "CONTENT_KEY",
    "EMPTY",
    "FORMAT_VERSION",
    "VERSION_KEY",
    "DeltaStore",
    "Fingerprints",
    "LoadedPart",
    "SaveNames",
    "SavedContent",
    "TableSummary",
    "check_base",
    "check_load_fits",
    "check_part",
    "evict_for_load",
    "named",
    "new_id_count",
    "part_after",
    "read_content",
    "reserve_for_load",
    "summary_of",
]


VERSION_KEY, CONTENT_KEY = "kvstore.version", "kvstore.content"
FORMAT_VERSION = 4
_VERSION_DIGITS = 9
KINDS, FORMS = ("full", "delta"), ("rows", "separate")


def check_free_keys(metadata: Mapping[str, str]) -> None:
    """Refuse metadata of a user's that brings an entry of a saved store's own. Raises ConfigError."""
    taken = sorted({VERSION_KEY, CONTENT_KEY} & metadata.keys())
    if taken:
        raise ConfigError("keys of the saved store itself", got=taken, expected="other names", where="metadata")


@dataclass(frozen=True)
class SavedContent:
    """What a saved store says of itself, in ``__metadata__``: everything but its tensors.

    ``fingerprints`` and ``bases``: by table, without those that have none. ``steps``: the last step of each table
    whose rows have an optimizer.
    """

    layouts: dict[str, RowLayout]
    buckets: Buckets
    kind: str
    form: str
    fingerprints: dict[str, str]
    bases: dict[str, tuple[str, ...]]
    steps: dict[str, int]
    version: int = FORMAT_VERSION

    def metadata(self) -> dict[str, str]:
        """The two entries of ``__metadata__``, as the newest version has them."""
        content = {
            "bases": {table: list(names) for table, names in self.bases.items() if names},
            "buckets": [self.buckets.total_count, self.buckets.hash_mode, self.buckets.bucket_size],
            "form": self.form,
            "kind": self.kind,
            "layouts": {table: json.loads(layout.to_json()) for table, layout in self.layouts.items()},
            "moments": self.fingerprints,
            "steps": self.steps,
        }
        return {
            VERSION_KEY: str(FORMAT_VERSION),
            CONTENT_KEY: json.dumps(content, sort_keys=True, separators=(",", ":")),
        }


def read_content(metadata: Mapping[str, str], path: str) -> SavedContent:
    """Parse the metadata of any version, of the store at ``path``. Raises FormatError, VersionError, ConfigError."""
    text = metadata.get(VERSION_KEY)
    # Of thousands of digits Python makes no int.
    if text is None or not text.isdecimal() or len(text) > _VERSION_DIGITS or not int(text) >= 1:
        got = text if text is None else text[:200]
        raise FormatError("not a saved store", got=got, expected=f"{VERSION_KEY} in __metadata__", where=path)
    if int(text) > FORMAT_VERSION:
        raise VersionError(
            "saved by a newer version", got=int(text), expected=f"1 to {FORMAT_VERSION}", where=f"{path}: {VERSION_KEY}"
        )
    try:
        found = json.loads(metadata[CONTENT_KEY])
    except (KeyError, ValueError, RecursionError) as error:
        raise FormatError(
            "not the content of a saved store", got=str(error)[:200], expected=f"JSON under {CONTENT_KEY}", where=path
        ) from None
    if not isinstance(found, dict):
        raise FormatError("not the content of a saved store", got=type(found).__name__, expected="dict", where=path)
    try:
        content = SavedContent(
            layouts={name: RowLayout.from_json(json.dumps(value)) for name, value in found["layouts"].items()},
            buckets=Buckets(*found.get("buckets", [1, "interleave", None])),
            kind=found.get("kind", "full"),
            form=found.get("form", "rows"),
            fingerprints={str(table): str(name) for table, name in found.get("moments", {}).items()},
            bases={str(table): tuple(map(str, names)) for table, names in found.get("bases", {}).items()},
            steps={str(table): _step(count) for table, count in found.get("steps", {}).items()},
            version=int(text),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        expected = "layouts, fingerprints, bases and steps by table"
        raise FormatError(
            "not the content of a saved store", got=str(error)[:200], expected=expected, where=path
        ) from None
    if content.kind not in KINDS or content.form not in FORMS or not content.layouts:
        got, expected = f"{content.kind}, {content.form}", f"one of {KINDS}, one of {FORMS}, and tables"
        raise FormatError("not the content of a saved store", got=got, expected=expected, where=path)
    return content


def _step(count: Any) -> int:
    if type(count) is not int or not 0 <= count <= STEP_MAX:
        raise ValueError(f"not a number of steps: {count!r}")
    return count


EMPTY = "empty"
DIGEST_BYTES = 64
CHUNK_ROWS = regime(65536, 3)
_FACTOR = -0x61C8864680B583EB


@dataclass(frozen=True)
class LoadedPart:
    """Which part of a save a table was loaded from.

    ``ranges``: [begin, end) of ``buckets``, ascending, none empty, none beside another. ``weights_only``: whether the
    load left states of the table's rows at zero.
    """

    buckets: Buckets
    ranges: tuple[tuple[int, int], ...]
    weights_only: bool

    def __str__(self) -> str:
        ranges = ", ".join(f"[{begin}, {end})" for begin, end in self.ranges) or "none"
        return f"{ranges} of {self.buckets}, weights_only={self.weights_only}"

    @property
    def is_whole(self) -> bool:
        """Whether these are all buckets."""
        return self.ranges == ((0, self.buckets.total_count),)

    def covers(self, other: LoadedPart) -> bool:
        """Whether each id of the other's buckets is of these, too. Of other counts or modes all buckets alone are."""
        if not other.ranges or self.is_whole:
            return True
        return self.buckets == other.buckets and all(
            any(begin <= first and behind <= end for begin, end in self.ranges) for first, behind in other.ranges
        )

    def joined(self, other: LoadedPart) -> LoadedPart:
        """What two loads of one save brought; the later one's alone, where they cannot be counted together."""
        if self.weights_only != other.weights_only or other.covers(self):
            return other
        if self.covers(other):
            return self
        if self.buckets != other.buckets:
            return other
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted((*self.ranges, *other.ranges)):
            if ranges and begin <= ranges[-1][1]:
                begin, end = ranges[-1][0], max(end, ranges.pop()[1])
            ranges.append((begin, end))
        return LoadedPart(self.buckets, tuple(ranges), self.weights_only)


class Fingerprints:
    """What one store held at its marks, and what each table was last loaded from, by fingerprint.

    Attributes:
        first_mark: marks before it have no names any more.
    """

    def __init__(self) -> None:
        self.first_mark = 0
        self._at: dict[int, dict[str, dict[str, LoadedPart | None]]] = {}
        self._loaded: dict[str, str | None] = {}
        self._parts: dict[str, LoadedPart | None] = {}

    def note(self, mark: int, names: dict[str, str], part: LoadedPart | None = None) -> None:
        """The tables hold at ``mark`` what these fingerprints name, or a part; the same contents may have several."""
        if mark < self.first_mark or not names:
            return
        known = self._at.setdefault(mark, {})
        for table, name in names.items():
            known.setdefault(table, {})[name] = part

    def at(self, mark: int, table: str) -> tuple[str, ...]:
        """The fingerprints of the table at a mark; none where it was neither saved nor loaded."""
        return tuple(sorted(set(self._at.get(mark, {}).get(table, ())) | ({EMPTY} if mark == 0 else set())))

    def carry(self, table: str, mark: int, to: int) -> None:
        """The table holds at mark ``to`` what it held at ``mark``: other tables have changed between the two."""
        for name, part in tuple(self._at.get(mark, {}).get(table, {}).items()):
            self.note(to, {table: name}, part)

    def parts_at(self, mark: int, table: str) -> dict[str, LoadedPart]:
        """Those of the fingerprints of which this process had a part at that mark, and the part."""
        known = self._at.get(mark, {}).get(table, {})
        return {name: part for name, part in known.items() if part is not None}

    @property
    def mark_count(self) -> int:
        """How many marks have names."""
        return len(self._at)

    def forget_before(self, mark: int) -> None:
        """Marks before this one are asked about no more."""
        self.first_mark = max(mark, self.first_mark)
        # A copy: another thread may note what it saved.
        for known in tuple(self._at):
            if known < self.first_mark:
                self._at.pop(known, None)

    def set_loaded(self, table: str, name: str | None, part: LoadedPart | None = None) -> None:
        """Remember what the table was loaded from, and which part of it; None is something without a fingerprint."""
        # The name last: a handler of a signal may raise in between, and a part without its name is no base.
        self._loaded[table] = None
        self._parts.pop(table, None)
        if name is not None:
            self._parts[table] = part
        self._loaded[table] = name

    def forget(self, table: str) -> None:
        """The table has nothing left of what it was loaded from, if it ever was."""
        if table in self._loaded:
            self._loaded[table] = None
        self._parts.pop(table, None)

    @contextmanager
    def forgetting(self, table: str) -> Iterator[None]:
        """Clear the table inside: it has nothing left of what it was loaded from, unless an Exception says otherwise.

        A handler of a signal may raise when all rows have gone: no base is left then either, nor where they have not.
        """
        is_known, name, part = table in self._loaded, self._loaded.get(table), self._parts.get(table)
        self.forget(table)
        try:
            yield
        except Exception:
            if is_known:
                self.set_loaded(table, name, part)
            raise
        # Another thread may have loaded it meanwhile.
        self.forget(table)

    def loaded(self, store: RowStore, table: str) -> str | None:
        """What the table was loaded from; an empty table that never was is ``EMPTY``."""
        if table not in self._loaded and store.size(table) == 0:
            return EMPTY
        return self._loaded.get(table)

    def loaded_part(self, table: str) -> LoadedPart | None:
        """Which part of it the table was loaded from; None is all that there was, or nothing that has a name."""
        return self._parts.get(table)


class DeltaStore(RowStore):
    """A store that remembers fingerprints, for its deltas and those that it loads."""

    fingerprints: Fingerprints


def check_base(store: DeltaStore, table: str, bases: tuple[str, ...], where: str) -> None:
    """Demand that the table was loaded from one of ``bases``; none is no demand. Raises DeltaBaseError."""
    found = store.fingerprints.loaded(store, table)
    if bases and found not in bases:
        raise DeltaBaseError("a delta on another base than the table's", got=found, expected=bases, where=where)


def check_part(store: DeltaStore, saved: SavedContent, table: str, asked: LoadedPart, where: str) -> None:
    """Demand that the part of a delta that is asked for finds its rows here, and their states if it brings states.

    Rows of buckets that the base was not loaded for would be there where the delta lists them, and missing where it
    does not; states likewise. Raises DeltaBaseError.
    """
    held = store.fingerprints.loaded_part(table)
    if held is None or not asked.ranges or not saved.bases.get(table) or _is_idle(store, saved, table):
        return
    if not held.covers(asked) or (held.weights_only and not asked.weights_only):
        raise DeltaBaseError(
            "a delta for buckets or states that its base was not loaded for", got=held, expected=asked, where=where
        )


def part_after(store: DeltaStore, saved: SavedContent, table: str, asked: LoadedPart) -> LoadedPart | None:
    """Which part of a save the table will have when the part that is asked for was loaded."""
    held, name = store.fingerprints.loaded_part(table), saved.fingerprints.get(table)
    if _is_idle(store, saved, table):
        return held
    return asked if held is None or name != store.fingerprints.loaded(store, table) else held.joined(asked)


def _is_idle(store: DeltaStore, saved: SavedContent, table: str) -> bool:
    """Whether this is a delta in which nothing changed, of what the table was loaded from: it goes by that name."""
    return saved.kind == "delta" and saved.fingerprints.get(table) == store.fingerprints.loaded(store, table)


def _digest(words: torch.Tensor) -> int:
    """Of int64 [n, w], whatever the order of the n; additive, and counts modulo 2**64."""
    found = torch.zeros(words.shape[0], dtype=torch.int64, device="cpu")
    for column in words.unbind(dim=1):
        found = (found ^ column) * _FACTOR
        found ^= found >> 29
    return int((found * _FACTOR).sum())


def digest_ids(ids: torch.Tensor) -> int:
    """Of ids int64 [n]."""
    return _digest(ids.reshape(-1, 1))


def digest_rows(source: RowSource, table: str, ids: torch.Tensor) -> int:
    """Of the first bytes of the rows of ids int64 [n], header and first values: one cache line of each."""
    width = min(DIGEST_BYTES, source.layout(table).row_bytes) // 8 * 8
    parts = (part.contiguous() for part in torch.split(ids, CHUNK_ROWS))
    rows = (source.get_rows(table, part, width_bytes=width) for part in parts)
    return sum(_digest(from_bytes(some, torch.int64)) for some in rows)


def fingerprint_of(rows: Iterable[int], removed: Iterable[int], row_count: int, bases: tuple[str, ...]) -> str:
    """32 hexadecimal digits, from the digests of all ranks."""
    text = f"{sum(rows) % 2**64} {sum(removed) % 2**64} {row_count} {' '.join(bases)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TableSummary:
    """What one rank saves of a table: counts, digests for the fingerprint, and the optimizer's step.

    ``base_parts``: those of ``bases`` that this rank had a part of, and the part.
    """

    row_count: int
    deleted_count: int
    rows_digest: int = 0
    deleted_digest: int = 0
    bases: tuple[str, ...] = ()
    step: int = 0
    base_parts: Mapping[str, LoadedPart] = field(default_factory=dict)


# Fingerprints, those of the bases, and optimizers' steps, by table.
SaveNames = tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]


def summary_of(
    store: DeltaStore,
    source: TrackedSource,
    table: str,
    ids: torch.Tensor,
    deleted: torch.Tensor | None,
    since: int | None,
) -> TableSummary:
    """This rank's part of a table in a save of ``source``; digests only where changes are tracked.

    Raises ConfigError where the store was told to forget ``since``.
    """
    gone = ids[:0] if deleted is None else deleted
    if not store.options.track_changes:
        return TableSummary(ids.numel(), gone.numel(), step=source.step_count(table))
    bases = () if since is None else store.fingerprints.at(since, table)
    base_parts = {} if since is None else store.fingerprints.parts_at(since, table)
    if since is not None:
        # Of a moment that was taken before the store forgot: without its bases the delta would load anywhere.
        check_remembered(since, store.fingerprints.first_mark)
    digests = digest_rows(source, table, ids), digest_ids(gone)
    return TableSummary(ids.numel(), gone.numel(), *digests, bases, source.step_count(table), base_parts)


def named(store: DeltaStore, by_rank: list[dict[str, TableSummary]], since: int | None) -> SaveNames:
    """Each table's fingerprint and those of its bases, the same on every rank; none where nothing is tracked.

    And the furthest step of each table whose rows have an optimizer. Raises ConfigError for a delta since a mark at
    which the ranks together had a part of what it would be a delta of.
    """
    names: dict[str, str] = {}
    bases: dict[str, tuple[str, ...]] = {}
    for table in store.tables if store.options.track_changes else ():
        parts = [found[table] for found in by_rank]
        bases[table] = _held_by_all(table, parts)
        # A delta on a base without a fingerprint leads nowhere that a later delta could name.
        if since is None or bases[table]:
            names[table] = _name_of(parts, since, bases[table])
    trained = [table for table in store.tables if store.layout(table).optimizer != "none"]
    return names, bases, {table: max(found[table].step for found in by_rank) for table in trained}


def _held_by_all(table: str, by_rank: list[TableSummary]) -> tuple[str, ...]:
    """The bases that all ranks name and have all buckets of, together.

    ``EMPTY`` where they name only those of whose buckets they have none.

    With others the delta would say that it leaves rows which none of these ranks has: those of the other buckets.
    """
    held, lacking, are_empty = set[str](), list[LoadedPart](), False
    for name in sorted(set(by_rank[0].bases).intersection(*(one.bases for one in by_rank))):
        parts = [one.base_parts[name] for one in by_rank if name in one.base_parts]
        together = reduce(LoadedPart.joined, parts) if len(parts) == len(by_rank) else None
        if together is None or together.is_whole:
            held.add(name)
        elif together.ranges:
            lacking.append(together)
        else:
            are_empty = True
    if lacking and not held:
        got, expected = "; ".join(map(str, lacking)), "a load of all buckets over the ranks, or a mark of a full save"
        raise ConfigError("a delta of what was loaded in part", got=got, expected=expected, where=f"since, {table}")
    # Beside another name it would let a store that never had these contents take the delta.
    return tuple(sorted(held)) or ((EMPTY,) if are_empty else ())


def _name_of(parts: list[TableSummary], since: int | None, bases: tuple[str, ...]) -> str:
    """The fingerprint of a table in a save; of a delta in which nothing changed, the first of its bases'.

    Such a delta leaves its base's contents, so that no loader needs another name. With one of its own each delta of an
    idle store would be one base more for all that follow. ``EMPTY`` is not passed on: a table that was loaded by that
    name and then written by hand would go for one that was never loaded.
    """
    known = [name for name in bases if name != EMPTY]
    if since is not None and known and not any(part.row_count or part.deleted_count for part in parts):
        return known[0]
    digests = [part.rows_digest for part in parts], [part.deleted_digest for part in parts]
    return fingerprint_of(*digests, sum(part.row_count for part in parts), bases)


def check_load_fits(store: RowStore, table: str, row_count: int) -> None:
    """Demand that the table may hold this many distinct ids. Raises CapacityError."""
    capacity = store.options.capacities[table]
    if capacity is not None and row_count > capacity:
        raise CapacityError("a load larger than the table", got=row_count, expected=f"<= {capacity}", where=table)


def new_id_count(store: RowStore, table: str, ids: torch.Tensor) -> int:
    """How many of distinct ids int64 [n] have no row."""
    return int((~store.contains(table, ids)).sum())


def reserve_for_load(store: RowStore, table: str, new_count: int, gone_count: int = 0) -> None:
    """Make room for rows of so many new ids, less those that go first. Raises AllocationError, and nothing changed."""
    row_count, capacity = store.size(table) + new_count - gone_count, store.options.capacities[table]
    store.reserve(table, row_count if capacity is None else min(row_count, capacity))


def evict_for_load(store: RowStore, table: str, ids: torch.Tensor) -> None:
    """Remove what a write of all ``ids`` (distinct int64 [n]) at once would evict: never one of them.

    The rows that go are those of ``KVStore``'s rule for ``capacity``.
    """
    capacity = store.options.capacities[table]
    if capacity is None:
        return
    excess = store.size(table) + new_id_count(store, table, ids) - capacity
    if excess <= 0:
        return
    present = store.ids(table)
    others = present[~torch.isin(present, ids)]
    words = store.metadata(table, others)[:, 0]
    policy = store.options.evictions[table]
    by_count = policy is not None and policy.kind in ("score", "count", "ttl_count")
    # Ids ascend already, so that a stable sort leaves ties in their order.
    ranks = (words >> 32) & (2**31 - 1) if by_count else words & (2**32 - 1)
    store.delete(table, others[ranks.argsort(stable=True)[:excess]].contiguous())


def _is_unchanged(store: DeltaStore, table: str, mark: int) -> bool:
    """Whether a table is known to be what it was at a mark; False where changes are not tracked, or are forgotten."""
    try:
        changed, removed = store.changes(table, mark)
    except ConfigError:
        return False
    return changed.numel() == removed.numel() == 0


def note_load(
    store: DeltaStore,
    saved: SavedContent,
    counts: dict[str, int],
    mark: int,
    sizes: Mapping[str, int],
    parts: Mapping[str, LoadedPart | None],
    weights_only: bool,
) -> None:
    """Remember what was loaded; and where a table now is just that, that its deltas may be based on it.

    ``mark`` and ``sizes``, the rows of each table that stayed, are those of before the load; ``counts`` are the rows
    that it wrote, of the tables that it loaded. What others held before, they hold now if nothing of them has changed.
    """
    now = store.mark()
    for table in store.tables:
        # Looked through only where there is a name to keep.
        if table not in counts and store.fingerprints.at(mark, table) and _is_unchanged(store, table, mark):
            store.fingerprints.carry(table, mark, now)
    for table in counts:
        name = saved.fingerprints.get(table)
        store.fingerprints.set_loaded(table, name, parts[table])
        whole = saved.layouts[table] == store.layout(table) and not weights_only
        if saved.kind == "full":
            # Of several loads of one save, each of other rows, all rows are its own.
            kept = sizes.get(table, 0) if name in store.fingerprints.at(mark, table) else 0
            whole = whole and kept + counts[table] == store.size(table)
        else:
            whole = whole and bool(set(store.fingerprints.at(mark, table)) & set(saved.bases.get(table, ())))
        # Nobody can ask another store for its changes since a mark.
        if name is not None and whole and store.options.track_changes:
            store.fingerprints.note(now, {table: name}, parts[table])
