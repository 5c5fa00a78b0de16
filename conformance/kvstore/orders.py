"""What lives on beside a store while it is written: snapshots, views, state dicts, eviction rounds, marks, deltas.

The dictionary of plain Python knows what each of them must show. Tables may have a capacity; writes may be of a part of
a row that is not there. After every rule each snapshot, view and round is what it was promised to be, and the counts.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import refimpl.kvstore as reference
from conformance.harness import assert_equal, assert_same_bytes, raises, succeeds
from conformance.kvstore.cases import contents, ids_of, random_bits, rows_tensor
from conformance.kvstore.machine import KINDS, TABLES, StoreMachine, moments, policy_of, seeds, tables
from conformance.kvstore.model import Row
from conformance.kvstore.strategies import close_batches, close_ids
from twinproof.errors import CapacityError, ConfigError, StoreClosedError, TwinproofError

CAPACITY = 13
VIEWS = ("weight", "momentum1")
Moment = dict[str, dict[int, bytes]]


@dataclass
class Round:
    """An eviction round: of the implementation, of the reference, and what must come of it."""

    both: tuple[Any, Any]
    table: str
    condemned: Callable[[int, Row], bool]
    decay: float
    left: list[int]
    slice_rows: int
    touched: set[int] = field(default_factory=set)
    processed_count: int = 0
    evicted_count: int = 0


@dataclass
class Mark:
    """A moment of a store, and what changed since."""

    number: int
    changed: dict[str, set[int]]
    removed: dict[str, set[int]]
    base: Path | None = None


class OrdersMachine(StoreMachine):
    """See the module."""

    # By snapshot: what it said of changes, marks and steps when it was taken.
    told: dict[int, dict[str, Any]]

    @initialize(
        shards=st.integers(1, 5),
        seed=st.integers(0, 2**64 - 1),
        capacity=st.sampled_from([None, CAPACITY]),
        by_count=st.booleans(),
        seconds=moments,
    )
    def start(
        self, shards: int, seed: int, seconds: int = 1000, capacity: int | None = None, by_count: bool = False
    ) -> None:
        """As the other machine; table "b" may be bounded, by age or by count."""
        super().start(shards, seed, seconds)
        self.capacity, self.by_count = capacity, by_count
        policy = self.kvstore.EvictionPolicy.count(1) if by_count else None
        self.options |= {"capacity": {"a": None, "b": capacity}, "eviction": {"a": None, "b": policy}}
        self.renew()

    def renew(self) -> None:
        """New stores; what lives beside them is of them, but for snapshots, which are looked at a last time."""
        for number, (taken, moment) in enumerate(self.snapshots):
            assert_equal(contents(taken), moment, where=f"snapshot {number} of a store that is no longer used")
            taken.close()
        self.snapshots = []
        super().renew()
        self.views: list[tuple[Any, str, str, list[int]]] = []
        self.states: list[tuple[Any, Moment, dict[str, int]]] = []
        self.rounds: list[Round] = []
        self.marks: list[Mark] = []
        self.first_mark = 0
        self.told = {}
        self.evicted_count = 0

    # What a write means for what lives on.

    def wrote(self, table: str, keys: list[int]) -> None:
        """Rows of one call; those that it pushed out go."""
        for mark in self.marks:
            mark.changed[table] |= set(keys)
            mark.removed[table] -= set(keys)
        for found in self.rounds:
            found.touched |= set(keys) if found.table == table else set()
        self.evicted_count += self.push_out(table, set(keys))

    def push_out(self, table: str, batch: set[int]) -> int:
        """Rows beyond the capacity: the oldest, or the rarest, first; never one of the batch."""
        rows = self.model[table]
        if table != "b" or self.capacity is None or len(rows) <= self.capacity:
            return 0
        ranks = sorted((row.count if self.by_count else row.timestamp, key) for key, row in rows.items())
        gone = [key for _, key in ranks if key not in batch][: len(rows) - self.capacity]
        for key in gone:
            del rows[key]
        self.went(table, gone)
        return len(gone)

    def went(self, table: str, keys: list[int]) -> None:
        """Rows that are there no more."""
        for mark in self.marks:
            mark.changed[table] -= set(keys)
            mark.removed[table] |= set(keys)
        for found in self.rounds:
            found.touched |= set(keys) if found.table == table else set()

    # Views.

    @precondition(lambda self: len(self.views) < 3)
    @rule(table=tables, name=st.sampled_from(VIEWS), keys=st.lists(close_ids, min_size=1, max_size=8))
    def view(self, table: str, name: str, keys: list[int]) -> None:
        """Of rows that are there, or not."""
        self.views.append((self.kvstore.KVTensor(self.store, ids_of(keys), name, table=table), table, name, keys))

    @precondition(lambda self: self.views)
    @rule(which=st.integers(0, 2), first=st.integers(0, 7), count=st.integers(1, 8), seed=seeds)
    def write_view(self, which: int, first: int, count: int, seed: int) -> None:
        """A part of rows: others of their bytes stay, of a missing row they are the initial ones."""
        made, table, name, keys = self.views[which % len(self.views)]
        some = keys[first : first + count]
        if not some:
            return
        values = random_bits(made.dtype, (len(some), made.shape[1]), seed)
        if name == "momentum1":
            # A state is no NaN, and a sum of squares has no sign: a step takes its root.
            values = torch.ones_like(values) * (1 + seed % 7)
        skipped = self.tried(table, lambda: made.set_range(0, first, len(some), values))
        assert_equal(skipped, 0, where="rows that a view skipped")
        begin = self.part(table, name)[0]
        self.twin.place(table, ids_of(some), values, begin)
        for key, value in zip(some, values, strict=True):
            raw = value.view(torch.uint8).numpy().tobytes()
            self.opened(table, key).body[begin - 16 : begin - 16 + len(raw)] = raw
        self.wrote(table, some)

    @rule(
        table=tables, keys=close_batches, begin=st.integers(16, 80), width=st.integers(1, 40), fill=st.integers(0, 99)
    )
    def write_columns(self, table: str, keys: list[int], begin: int, width: int, fill: int) -> None:
        """Any columns behind the header, wherever values and padding begin; padding stays zero."""
        layout = self.store.layout(table)
        first = min(begin, layout.row_bytes - 1)
        end = min(first + width, layout.row_bytes)
        # Numbers, of any dtype.
        raw = torch.full((len(keys), end - first), fill, dtype=torch.uint8)
        self.both("place", table, ids_of(keys), raw, first)
        parts = [self.part(table, name) for name in ("weight", *layout.state_slots)]
        for key in keys:
            body = self.opened(table, key).body
            for at in range(first, end):
                if any(lower <= at < upper for lower, upper in parts):
                    body[at - 16] = fill
        self.wrote(table, keys)

    def part(self, table: str, name: str) -> tuple[int, int]:
        """The bytes of a row that a view shows."""
        layout = self.store.layout(table)
        if name == "weight":
            return 16, 16 + layout.weight_bytes
        slot = layout.state_slots[name]
        return slot.offset_bytes, slot.offset_bytes + slot.count * slot.dtype.itemsize

    # Rounds.

    @precondition(lambda self: len(self.rounds) < 2)
    @rule(
        table=tables,
        kind=st.sampled_from(["count", "count", *KINDS]),
        threshold=st.integers(0, 3),
        ttl=st.integers(0, 60),
        decay=st.sampled_from([1.0, 0.5, 0.9]),
        slice_rows=st.integers(1, 4),
    )
    def begin_round(
        self, table: str, threshold: int, decay: float, slice_rows: int, kind: str = "count", ttl: int = 0
    ) -> None:
        """Over the rows of this moment."""
        policies = [policy_of(one, kind, self.now, ttl, threshold, decay) for one in (self.kvstore, reference)]
        begun = [
            store.start_eviction(table, policy=policy, slice_rows=slice_rows)
            for store, policy in zip((self.store, self.twin), policies, strict=True)
        ]
        left = sorted(self.model[table])
        decay = decay if "count" in kind else 1.0
        condemned = self.condemned(table, kind, ttl, threshold)
        self.rounds.append(Round((begun[0], begun[1]), table, condemned, decay, left, slice_rows))

    @precondition(lambda self: self.rounds)
    @rule(which=st.integers(0, 1), cancels=st.sampled_from([False, False, False, True]))
    def step_round(self, which: int, cancels: bool) -> None:
        """A slice: rows that were written since the round began stay as they are."""
        found = self.rounds[which % len(self.rounds)]
        some, found.left = found.left[: found.slice_rows], found.left[found.slice_rows :]
        self.tried(found.table, found.both[0].step)
        found.both[1].step()
        rows, gone, decayed = self.model[found.table], [], []
        for key in some:
            if key in found.touched or key not in rows:
                continue
            fewer = Row(rows[key].timestamp, math.floor(rows[key].count * found.decay), bytes(rows[key].body))
            if found.condemned(key, fewer):
                gone.append(key)
            elif fewer.count != rows[key].count:
                rows[key].count = fewer.count
                decayed.append(key)
        for key in gone:
            del rows[key]
        touched = set(found.touched)
        if decayed:
            self.wrote(found.table, decayed)
        self.went(found.table, gone)
        # Its own changes are no business of the round.
        found.touched = touched
        found.processed_count += len(some)
        found.evicted_count += len(gone)
        self.evicted_count += len(gone)
        if cancels:
            for one in found.both:
                one.cancel()
            found.left = []
        if not found.left:
            self.rounds.remove(found)
        stats = found.both[0].stats
        got = (stats.processed_count, stats.evicted_count, found.both[0].done)
        assert_equal(got, (found.processed_count, found.evicted_count, not found.left), where="a round's counts")

    # Marks, snapshots, state dicts, and files.

    @precondition(lambda self: len(self.marks) < 2)
    @rule(is_saved=st.booleans())
    def mark(self, is_saved: bool) -> None:
        """Changes are told from here on; what there is may be saved, as the base of deltas."""
        empty = [{table: set[int]() for table in TABLES} for _ in range(2)]
        self.marks.append(Mark(self.store.mark(), empty[0], empty[1]))
        if is_saved:
            self.marks[-1].base = self.bases / str(self.marks[-1].number)
            self.kvstore.save(self.store, self.marks[-1].base, durable=False)

    @precondition(lambda self: self.marks)
    @rule(which=st.integers(0, 1))
    def forget_changes(self, which: int) -> None:
        """Older marks are over; what snapshots say of them stays."""
        first = self.marks[which % len(self.marks)].number
        self.store.forget_changes(before=first)
        self.first_mark = max(self.first_mark, first)
        self.marks = [mark for mark in self.marks if mark.number >= self.first_mark]
        for table in TABLES if self.first_mark else ():
            with raises(ConfigError, where=f"changes of {table} since a mark that is over"):
                self.store.changes(table, self.first_mark - 1)

    @property
    def bases(self) -> Path:
        """The folder of what was saved at marks."""
        return self.home.with_name(f"{self.home.name}-bases")

    def teardown(self) -> None:
        """Give everything back."""
        super().teardown()
        if hasattr(self, "home"):
            shutil.rmtree(self.bases, ignore_errors=True)

    def snapped(self, taken: Any) -> None:
        """What it says of changes, marks and steps stays what the store said then."""
        self.told[id(taken)] = self.answers(self.store, [self.first_mark, *(mark.number for mark in self.marks)])

    def answers(self, source: Any, since: list[int]) -> dict[str, Any]:
        """Of a store or a moment."""
        found = {
            f"{table} since {number}": [ids.tolist() for ids in source.changes(table, number)]
            for table in TABLES
            for number in since
        }
        return found | {"since": since, "mark": source.mark(), "steps": [source.step_count(t) for t in TABLES]}

    @rule(table=tables, step=st.integers(0, 2**62))
    def set_step_count(self, table: str, step: int) -> None:
        """As when training is resumed."""
        self.store.set_step_count(table, step)
        self.steps[table] = step

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 1))
    def close_any(self, which: int) -> None:
        """Snapshots go in any order."""
        taken, _ = self.snapshots.pop(which % len(self.snapshots))
        taken.close()
        with raises(StoreClosedError):
            taken.ids("a")

    @precondition(lambda self: len(self.states) < 2)
    @rule(whole=st.booleans(), bucket_count=st.integers(1, 4))
    def take_state(self, whole: bool, bucket_count: int) -> None:
        """A state dict of this moment, in either form, which is read later."""
        self.store.set_return_whole_row(whole)
        state = self.store.state_dict(buckets=self.kvstore.Buckets(bucket_count))
        self.states.append((state, self.expected(), dict(self.steps)))

    @precondition(lambda self: self.states)
    @rule(
        which=st.integers(0, 1),
        clear=st.booleans(),
        chosen=st.sampled_from([None, ("a",), ("b", "a")]),
        weights_only=st.sampled_from([False, False, True]),
    )
    def load_state(
        self, which: int, clear: bool, chosen: tuple[str, ...] | None = None, weights_only: bool = False
    ) -> None:
        """A moment comes back: rows that it lists, and with ``clear`` no others; of some tables, or weights alone."""
        state, moment, steps = self.states.pop(which % len(self.states))
        self.store.load_state_dict(state, clear=clear, tables=chosen, weights_only=weights_only)
        del state
        gc.collect()
        for table in chosen or TABLES:
            rows = self.without_states(table, moment[table]) if weights_only else moment[table]
            self.take_over({table: rows}, clear=clear)
            if not weights_only:
                self.steps[table] = steps[table]

    def take_over(self, moment: Moment, *, clear: bool = False) -> None:
        """Rows were loaded, as one write of all of a table's."""
        for table, rows in moment.items():
            if clear:
                others = [key for key in self.model[table] if key not in rows]
                self.forget(table, others)
            for key, raw in rows.items():
                word = int.from_bytes(raw[12:16], "little")
                self.model[table][key] = Row(int.from_bytes(raw[8:12], "little"), word & (2**31 - 1), raw[16:])
            before = set(self.model[table])
            self.wrote(table, list(rows))
            gone = sorted(before - set(self.model[table]))
            # The reference is told, row by row, what it has to hold.
            self.twin.delete(table, ids_of(gone))
            self.twin.set_rows(table, self.rows_of(table, list(rows)))
        # Whether what a load pushes out counts as evicted, nobody promises.
        self.evicted_count = self.store.stats().evicted_count

    def forget(self, table: str, keys: list[int]) -> None:
        """Rows go from model and reference."""
        for key in keys:
            del self.model[table][key]
        self.twin.delete(table, ids_of(keys))
        self.went(table, keys)

    def rows_of(self, table: str, keys: list[int]) -> torch.Tensor:
        """The model's rows as a tensor."""
        return rows_tensor([self.model[table][key].raw(key) for key in keys], self.store.layout(table).row_bytes)

    @precondition(lambda self: self.marks)
    @rule(which=st.integers(0, 1), form=st.sampled_from(["rows", "separate"]), bucket_count=st.integers(1, 4))
    def save_delta(self, which: int, form: str, bucket_count: int) -> None:
        """What changed since a mark, in a file, holds those rows and names those that went."""
        mark, home = self.marks[which % len(self.marks)], self.home / "delta"
        shutil.rmtree(home, ignore_errors=True)
        options = {"buckets": self.kvstore.Buckets(bucket_count), "form": form, "durable": False}
        self.kvstore.save(self.store, home, since=mark.number, **options)
        found, expected = contents(self.kvstore.SavedRows(home)), self.expected()
        for table in TABLES:
            listed = {key: expected[table][key] for key in mark.changed[table]}
            assert_equal(found[table], listed, where=f"rows of a delta of {table}")
        if mark.base is not None:
            follower = self.fresh(self.kvstore)
            for path in (mark.base, home):
                with succeeds("load", where=path.name):
                    self.kvstore.load(follower, path)
            assert_equal(contents(follower), expected, where="rows of a base and its delta")
            assert_equal([follower.step_count(t) for t in TABLES], [*self.steps.values()], where="steps of a delta")
        shutil.rmtree(home, ignore_errors=True)

    # Calls that are refused.

    @rule(table=tables, keys=close_batches, seed=seeds)
    def refused(self, table: str, keys: list[int], seed: int) -> None:
        """Wrong widths and lengths, and a batch larger than the table, change nothing."""
        width = self.store.layout(table).embedding_dim
        wrong = [torch.zeros(len(keys), width + 1), torch.zeros(len(keys) + 1, width)]
        before, counters = self.answers(self.store, [self.first_mark]), self.store.stats()
        for values in wrong:
            with raises(TwinproofError):
                self.store.set(table, ids_of(keys), values.to(self.store.layout(table).weight_dtype))
            with raises(TwinproofError):
                self.store.apply_gradients(table, ids_of(keys), values, 0.5)
        if self.capacity is not None:
            many = list(range(100, 101 + CAPACITY))
            ones = torch.ones(len(many), 4)
            verbs: list[Callable[[], Any]] = [
                lambda: self.store.set_rows("b", self.raw_rows(many)),
                lambda: self.store.set("b", ids_of(many), ones),
                lambda: self.store.set_state("b", "momentum1", ids_of(many), ones[:, :1].contiguous()),
                lambda: self.store.apply_gradients("b", ids_of(many), ones, 0.5, 9),
            ]
            for verb in verbs:
                with raises(CapacityError):
                    verb()
        assert_equal(
            self.answers(self.store, [self.first_mark]),
            before,
            where="changes, mark and steps after calls that are refused",
        )
        now = self.store.stats()
        counted = [(s.row_count, s.block_count, s.evicted_count, s.snapshot_count) for s in (now, counters)]
        assert_equal(counted[0], counted[1], where="counters after calls that are refused")

    def raw_rows(self, keys: list[int]) -> torch.Tensor:
        """Initial rows of any ids of table "b", in use."""
        rows: torch.Tensor = self.store.get_rows("b", ids_of(keys))
        rows[:, 15] |= 0x80
        return rows

    @rule(table=tables)
    def clear(self, table: str) -> None:
        """Every row of a table goes."""
        self.both("clear", table)
        gone = list(self.model[table])
        self.model[table].clear()
        self.went(table, gone)

    # What always holds.

    def nothing_happened(self, mark: int) -> None:
        """What lives on beside the store is as it was, too."""
        super().nothing_happened(mark)
        self.what_lives_on_is_right()

    @invariant()
    def what_lives_on_is_right(self) -> None:
        """Views show what is there now; snapshots and marks what they promised; counts add up."""
        if not hasattr(self, "rounds"):
            return
        expected = self.expected()
        for made, table, name, keys in self.views:
            begin, end = self.part(table, name)
            shown = made.full_tensor()
            for key, value in zip(keys, shown, strict=True):
                row = expected[table].get(key) or self.twin_initial(table, key)
                raw = value.contiguous().view(torch.uint8).numpy().tobytes()
                assert_same_bytes(raw, row[begin:end], where=f"{name} of {key} in a view of {table}")
        for number, (taken, moment) in enumerate(self.snapshots):
            assert_equal(contents(taken), moment, where=f"snapshot {number}")
            told = self.told[id(taken)]
            assert_equal(self.answers(taken, told["since"]), told, where=f"what snapshot {number} says")
        for mark in self.marks:
            for table in TABLES:
                found = [ids.tolist() for ids in self.store.changes(table, mark.number)]
                promised = [sorted(mark.changed[table]), sorted(mark.removed[table])]
                assert_equal(found, promised, where=f"changed and removed ids of {table} since {mark.number}")
        stats = self.store.stats()
        counts = (stats.snapshot_count, stats.evicted_count)
        assert_equal(counts, (len(self.snapshots) + len(self.states), self.evicted_count), where="snapshots, evicted")
