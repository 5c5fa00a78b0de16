"""The store's state machine: any program of verbs, beside a dictionary of plain Python values and the reference.

The dictionary knows the rules in its own words: a row is a key, a timestamp, a count and byte strings for weight and
states, and a step of an optimizer is a textbook loop over one row. After every rule the implementation's rows must be
those bytes, and the reference's too.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import refimpl.kvstore as reference
from conformance.harness import assert_equal, assert_same_bytes
from conformance.kvstore.cases import (
    Clock,
    assert_bits,
    contents,
    ids_of,
    random_rows,
    rows_tensor,
    stamp_and_count,
    store_of,
    weights_of,
)
from conformance.kvstore.model import Row, stepped_body
from conformance.kvstore.strategies import close_batches, close_ids
from twinproof.errors import TwinproofError

COUNT_MAX = 2**31 - 1
TABLES = ("a", "b")
tables = st.sampled_from(TABLES)
seeds = st.integers(0, 1000)
# When a program begins: also at 0, next to where timestamps need their highest bit, and where they begin anew.
moments = st.sampled_from([1000, 0, 2**31 - 20, 2**32 - 20])


KINDS = ("ttl", "count", "ttl_count", "l2", "older_than", "score")


def policy_of(kvstore: Any, kind: str, now: int, ttl: int, threshold: int, decay: float = 1.0) -> Any:
    """A policy of any kind out of the same numbers."""
    policy = kvstore.EvictionPolicy
    return {
        "ttl": lambda: policy.ttl(ttl),
        "count": lambda: policy.count(threshold, decay),
        "ttl_count": lambda: policy.ttl_count(ttl, threshold, decay),
        "l2": lambda: policy.l2(float(threshold)),
        "older_than": lambda: policy.older_than(max(0, now - ttl)),
        "score": lambda: policy.score(threshold),
    }[kind]()


class StoreMachine(RuleBasedStateMachine):
    """See the module. Class attributes are set by the test that runs it."""

    kvstore: Any
    root: Path
    counter = 0

    @initialize(shards=st.integers(1, 5), seed=st.integers(0, 2**64 - 1), seconds=moments)
    def start(self, shards: int, seed: int, seconds: int = 1000) -> None:
        """An empty store, an empty reference, an empty model."""
        type(self).counter += 1
        self.home = self.root / str(type(self).counter)
        self.clock = Clock(seconds)
        self.options: dict[str, Any] = {"num_shards": shards, "seed": seed, "track_changes": True}
        self.store, self.twin = self.fresh(self.kvstore), self.fresh(reference)
        self.model: dict[str, dict[int, Row]] = {table: {} for table in TABLES}
        self.snapshots: list[tuple[Any, Any]] = []
        self.saved: dict[str, dict[int, bytes]] | None = None
        self.steps = dict.fromkeys(TABLES, 0)
        self.evicted_count = 0
        self.allocations_left: int | None = None
        self.initials: dict[tuple[str, int], bytes] = {}
        self.blank: Any = None

    @property
    def now(self) -> int:
        """The seconds of a header that is written now."""
        return self.clock.now % 2**32

    def wrote(self, table: str, keys: list[int]) -> None:
        """Rows were written by one call; for a machine that knows of capacities, marks and rounds."""

    def went(self, table: str, keys: list[int]) -> None:
        """Rows were removed by one call."""

    def fresh(self, kvstore: Any, **options: Any) -> Any:
        """An empty store."""
        layouts = {
            "a": kvstore.RowLayout(3, torch.float16, "partial_rowwise_adam"),
            "b": kvstore.RowLayout(4, torch.float32, "rowwise_adagrad"),
        }
        return store_of(kvstore, layouts, **{"clock": self.clock, **self.options, **options})

    def both(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """The verb on the implementation and on the reference; the former's answer."""
        answer = self.tried(args[0], lambda: getattr(self.store, verb)(*args, **kwargs))
        getattr(self.twin, verb)(*args, **kwargs)
        return answer

    @precondition(lambda self: hasattr(self.store, "fail_allocations"))
    @rule(allocations_left=st.sampled_from([0, 0, 1, 2, 3, None]))
    def run_short(self, allocations_left: int | None) -> None:
        """From now on calls that change something get memory so often at first, and then none."""
        self.allocations_left = allocations_left

    def tried(self, table: str, act: Callable[[], Any]) -> Any:
        """What the call says. Where memory is short nothing has happened, and it is made again."""
        if self.allocations_left is None:
            return act()
        mark = self.store.mark()
        self.store.fail_allocations(table, self.allocations_left)
        try:
            return act()
        except MemoryError as error:
            assert_equal(isinstance(error, TwinproofError), True, where=f"{error!r} is named")
        finally:
            self.store.fail_allocations(table, -1)
        self.nothing_happened(mark)
        return act()

    def nothing_happened(self, mark: int) -> None:
        """A call failed: all is as it was before."""
        self.rows_are_the_model()
        assert_equal(self.store.mark(), mark, where="the mark after a call that failed")

    def opened(self, table: str, key: int) -> Row:
        """The model's row, made on the spot where it was missing."""
        rows = self.model[table]
        if key not in rows:
            body = self.twin_initial(table, key)[16:]
            rows[key] = Row(self.now, 0, body)
        return rows[key]

    def twin_initial(self, table: str, key: int) -> bytes:
        """The initial row; the initializer has its own requirement."""
        if (table, key) not in self.initials:
            # One for all keys of a program, whose options are known by then.
            self.blank = self.fresh(reference, capacity=None) if self.blank is None else self.blank
            self.initials[table, key] = bytes(self.blank.get_rows(table, ids_of([key]))[0].numpy().tobytes())
        return self.initials[table, key]

    @rule(table=tables, keys=close_batches, seed=seeds)
    def set(self, table: str, keys: list[int], seed: int) -> None:
        """Weights: the last of duplicates wins, occurrences are counted."""
        weights = weights_of(self.store, len(keys), seed, table)
        self.both("set", table, ids_of(keys), weights)
        for key, weight in zip(keys, weights, strict=True):
            row, raw = self.opened(table, key), weight.view(torch.uint8).numpy().tobytes()
            row.body[: len(raw)] = raw
            row.timestamp, row.count = self.now, min(COUNT_MAX, row.count + 1)
        self.wrote(table, keys)

    @rule(table=tables, keys=close_batches, seed=seeds)
    def set_rows(self, table: str, keys: list[int], seed: int) -> None:
        """Whole rows: everything comes from the row."""
        rows = random_rows(self.store, keys, seed, table)
        self.both("set_rows", table, rows)
        for n, key in enumerate(keys):
            stamp, count = stamp_and_count(n, seed)
            self.model[table][key] = Row(stamp, count, rows[n].numpy().tobytes()[16:])
        self.wrote(table, keys)

    @rule(table=tables, keys=close_batches, seed=seeds)
    def set_state(self, table: str, keys: list[int], seed: int) -> None:
        """One state: headers stay, missing rows are made."""
        slot = self.store.layout(table).state_slots["momentum1"]
        values = torch.randn(len(keys), slot.count, generator=torch.Generator().manual_seed(seed))
        # Adagrad's state is a sum of squares, of which a step takes the root.
        values = values.abs() if table == "b" else values
        self.both("set_state", table, "momentum1", ids_of(keys), values)
        for key, value in zip(keys, values, strict=True):
            raw, begin = value.view(torch.uint8).numpy().tobytes(), slot.offset_bytes - 16
            self.opened(table, key).body[begin : begin + len(raw)] = raw
        self.wrote(table, keys)

    @rule(table=tables, keys=close_batches, seed=seeds, step=st.integers(1, 5))
    def apply_gradients(self, table: str, keys: list[int], seed: int, step: int) -> None:
        """An optimizer step: the values are those of textbook loops over a row, headers and ids the model's."""
        width = self.store.layout(table).embedding_dim
        drawn = torch.randn(len(keys), width, generator=torch.Generator().manual_seed(seed))
        gone = self.keys_made_nan(table, keys, drawn, step)
        places = [place for place, key in enumerate(keys) if key not in gone]
        keys, grads = [keys[place] for place in places], drawn[places]
        self.both("apply_gradients", table, ids_of(keys), grads, 0.5, step)
        for key in keys:
            row = self.opened(table, key)
            row.timestamp, row.count = self.now, min(COUNT_MAX, row.count + 1)
        for key in set(keys):
            row, own = self.model[table][key], [grads[place] for place, other in enumerate(keys) if other == key]
            row.body[:] = stepped_body(self.store.layout(table), bytes(row.body), own, step, 0.5)
        self.steps[table] = step
        self.wrote(table, keys)

    def keys_made_nan(self, table: str, keys: list[int], grads: torch.Tensor, step: int) -> list[int]:
        """The keys whose rows a step makes NaN: which NaN it is, nobody promises."""
        trial, layout = self.fresh(reference, capacity=None), self.twin.layout(table)
        trial.set_rows(table, self.twin.get_rows(table, ids_of(keys)))
        trial.apply_gradients(table, ids_of(keys), grads, 0.5, step)
        rows = trial.get_rows(table, ids_of(keys))
        slots = [(16, layout.embedding_dim, layout.weight_dtype)]
        slots += [(slot.offset_bytes, slot.count, slot.dtype) for slot in layout.state_slots.values()]
        parts = [rows[:, at : at + count * kind.itemsize].clone().view(kind) for at, count, kind in slots]
        is_nan = torch.cat([part.isnan().any(1, keepdim=True) for part in parts], 1).any(1)
        return [key for key, wrong in zip(keys, is_nan.tolist(), strict=True) if wrong]

    @rule(table=tables, row_count=st.sampled_from([0, 1, 20, 2000]), keys=close_batches)
    def make_ready(self, table: str, row_count: int, keys: list[int]) -> None:
        """Room for rows, and rows brought near: no row changes."""
        self.both("reserve", table, row_count)
        self.both("prefetch", table, ids_of(keys))

    @rule(table=tables, keys=close_batches)
    def delete(self, table: str, keys: list[int]) -> None:
        """Rows go; the answer is how many there were."""
        there = {key for key in keys if key in self.model[table]}
        assert_equal(self.both("delete", table, ids_of(keys)), len(there), where="deleted")
        for key in there:
            del self.model[table][key]
        self.went(table, sorted(there))

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.clock.now += seconds

    @rule(table=tables, keys=close_batches, score=st.sampled_from([0.0, -0.0, 1e-45, -0.5, 0.5, 2.0]))
    def set_scores(self, table: str, keys: list[int], score: float) -> None:
        """The count's bits of rows that are there, in ascending steps: of duplicates the last wins."""
        scores = [score * (1 + place % 3) for place in range(len(keys))]
        self.both("set_scores", table, ids_of(keys), torch.tensor(scores))
        there = {key: value for key, value in zip(keys, scores, strict=True) if key in self.model[table]}
        for key, value in there.items():
            self.model[table][key].count = struct.unpack("<I", struct.pack("<f", value))[0] & COUNT_MAX
        self.wrote(table, list(there))

    @rule(table=tables, keys=close_batches, seed=seeds)
    def set_metadata(self, table: str, keys: list[int], seed: int) -> None:
        """Timestamps and counts of rows that are there; used or not, they stay in use."""
        fields = {key: stamp_and_count(place, seed) for place, key in enumerate(keys)}
        words = [fields[key][0] | fields[key][1] << 32 | -(2**63) * (seed % 2) for key in keys]
        self.both("set_metadata", table, ids_of(keys), ids_of(words).reshape(-1, 1))
        there = [key for key in fields if key in self.model[table]]
        for key in there:
            row = self.model[table][key]
            row.timestamp, row.count = fields[key]
        self.wrote(table, there)

    @rule(table=tables, kind=st.sampled_from(KINDS), ttl=st.integers(0, 60), threshold=st.integers(0, 4))
    def evict(self, table: str, ttl: int, threshold: int, kind: str) -> None:
        """A round: exactly the rows of the predicate go."""
        rows, condemned = self.model[table], self.condemned(table, kind, ttl, threshold)
        stats = self.both("evict", table, policy=policy_of(reference, kind, self.now, ttl, threshold))[table]
        assert_equal(stats.processed_count, len(rows), where="processed")
        gone = [key for key, row in rows.items() if condemned(key, row)]
        assert_equal(stats.evicted_count, len(gone), where=f"evicted by {kind}")
        for key in gone:
            del rows[key]
        self.went(table, gone)
        self.evicted_count += len(gone)

    def condemned(self, table: str, kind: str, ttl: int, threshold: int) -> Callable[[int, Row], bool]:
        """Whom a round that begins now evicts, by the policy's own words."""
        now, layout = self.now, self.store.layout(table)
        ranked = sorted((row.count, key) for key, row in self.model[table].items())
        kept = set(ranked[-threshold:] if threshold else ranked)

        def square(row: Row) -> float:
            weight = torch.frombuffer(bytearray(row.body[: layout.weight_bytes]), dtype=layout.weight_dtype)
            return float(weight.double().square().sum())

        def is_old(row: Row) -> bool:
            return ttl > 0 and now - row.timestamp > ttl

        predicates: dict[str, Callable[[int, Row], bool]] = {
            "ttl": lambda key, row: is_old(row),
            "count": lambda key, row: row.count < threshold,
            "ttl_count": lambda key, row: is_old(row) and row.count < threshold,
            "l2": lambda key, row: square(row) < threshold**2,
            "older_than": lambda key, row: row.timestamp < max(0, now - ttl),
            "score": lambda key, row: (row.count, key) < min(kept, default=(0, 0)),
        }
        return predicates[kind]

    @rule(table=tables, keys=st.lists(close_ids, max_size=8), first=close_ids, last=close_ids)
    def read(self, table: str, keys: list[int], first: int, last: int) -> None:
        """Reads of present and missing ids agree with the model, in every way of reading."""
        self.read_source(self.store, self.expected()[table], table, keys, first, last)
        for taken, moment in self.snapshots:
            self.read_source(taken, moment[table], table, keys, first, last)
        assert_bits(
            self.store.get_rows(table, ids_of(keys)),
            self.twin.get_rows(table, ids_of(keys)),
            where="rows, implementation and reference",
        )

    def read_source(
        self, source: Any, held: dict[int, bytes], table: str, keys: list[int], first: int, last: int
    ) -> None:
        """Every read of a store or a moment that holds these rows."""
        ids, layout = ids_of(keys), source.layout(table)
        raw = rows_tensor([held.get(key) or self.twin_initial(table, key) for key in keys], layout.row_bytes)
        assert_bits(source.get_rows(table, ids), raw, where=f"rows of {table}")
        width = (last - first) % (layout.row_bytes + 1)
        part = source.get_rows(table, ids, offset_bytes=layout.row_bytes - width)
        assert_bits(part, raw[:, layout.row_bytes - width :].contiguous(), where=f"the last {width} bytes of {table}")
        weights = raw[:, 16 : 16 + layout.weight_bytes].contiguous().view(layout.weight_dtype)
        assert_bits(source.get(table, ids), weights, where=f"weights of {table}")
        count = len(keys) // 2
        assert_bits(source.get(table, ids, count=count)[:count], weights[:count], where=f"{count} weights of {table}")
        for name, slot in layout.state_slots.items():
            values = raw[:, slot.offset_bytes : slot.end_bytes].contiguous().view(slot.dtype)
            assert_bits(source.get_state(table, name, ids), values, where=f"{name} of {table}")
        words = raw[:, 8:16].contiguous().view(torch.int64)
        assert_bits(source.metadata(table, ids), words, where=f"metadata of {table}")
        there = [key in held for key in keys]
        assert_equal(source.contains(table, ids).tolist(), there, where=f"which ids of {table} have rows")
        listed = sorted(key for key in held if first <= key <= last)
        assert_equal(source.ids(table, first, last).tolist(), listed, where=f"ids of {table} in [{first}, {last}]")
        assert_equal(source.size(table), len(held), where=f"size of {table}")

    @precondition(lambda self: len(self.snapshots) < 2)
    @rule()
    def snapshot(self) -> None:
        """A point in time, remembered as bytes."""
        taken = self.tried("a", self.store.snapshot)
        self.snapshots.append((taken, self.expected()))
        self.snapped(taken)

    def snapped(self, taken: Any) -> None:
        """A snapshot was taken; for a machine that asks it more than its rows."""

    @precondition(lambda self: self.snapshots)
    @rule()
    def release(self) -> None:
        """The oldest snapshot still shows its moment, then goes."""
        taken, expected = self.snapshots.pop(0)
        with taken:
            assert_equal(contents(taken), expected, where="snapshot")

    @rule(bucket_count=st.integers(1, 5), form=st.sampled_from(["rows", "separate"]))
    def save(self, bucket_count: int, form: str) -> None:
        """Save all."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.kvstore.save(self.store, self.home, buckets=self.kvstore.Buckets(bucket_count), form=form, durable=False)
        self.saved, self.saved_steps, self.bucket_count = self.expected(), dict(self.steps), bucket_count

    @precondition(lambda self: self.saved is not None)
    @rule(
        chunk_rows=st.integers(1, 5),
        empty=st.booleans(),
        which=st.sampled_from([None, ("a",), ("b",), ("b", "a")]),
        weights_only=st.sampled_from([False, False, True]),
        part=st.sampled_from([None, None, (0, 1), (1, 2), (1, 5)]),
    )
    def load(
        self,
        chunk_rows: int,
        empty: bool,
        which: tuple[str, ...] | None = None,
        weights_only: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Load over what is there, or into a new store: listed rows are replaced, others stay. Some tables, some of
        their buckets, or weights alone.
        """
        assert self.saved is not None
        if empty:
            self.renew()
        owned = None if part is None else (min(part[0], self.bucket_count), min(part[1], self.bucket_count))
        options = {"tables": which, "weights_only": weights_only, "owned": owned}
        self.kvstore.load(self.store, self.home, chunk_rows=chunk_rows, **options)
        begin, end = owned or (0, self.bucket_count)
        for table in which or TABLES:
            rows = {key: row for key, row in self.saved[table].items() if begin <= key % self.bucket_count < end}
            self.take_over({table: self.without_states(table, rows) if weights_only else rows})
            if not weights_only:
                self.steps[table] = self.saved_steps[table]

    def without_states(self, table: str, rows: dict[int, bytes]) -> dict[int, bytes]:
        """The same rows, every state zero."""
        end = 16 + self.store.layout(table).weight_bytes
        return {key: row[:end] + bytes(len(row) - end) for key, row in rows.items()}

    def renew(self) -> None:
        """New stores."""
        self.store, self.twin = self.fresh(self.kvstore), self.fresh(reference)
        self.model = {table: {} for table in TABLES}
        self.steps = dict.fromkeys(TABLES, 0)

    def take_over(self, moment: dict[str, dict[int, bytes]]) -> None:
        """Rows were loaded."""
        for table, rows in moment.items():
            raw = rows_tensor(list(rows.values()), self.store.layout(table).row_bytes)
            self.twin.set_rows(table, raw)
            for key, row in rows.items():
                word = int.from_bytes(row[12:16], "little")
                self.model[table][key] = Row(int.from_bytes(row[8:12], "little"), word & COUNT_MAX, row[16:])

    def expected(self) -> dict[str, dict[int, bytes]]:
        """The model as bytes."""
        return {table: {key: row.raw(key) for key, row in rows.items()} for table, rows in self.model.items()}

    @invariant()
    def rows_are_the_model(self) -> None:
        """Implementation and reference hold exactly the model's rows."""
        if not hasattr(self, "model"):
            return
        expected = self.expected()
        for name, store in (("implementation", self.store), ("reference", self.twin)):
            found = contents(store)
            for table in TABLES:
                assert_equal(sorted(found[table]), sorted(expected[table]), where=f"{name}: ids of {table}")
                for key, row in expected[table].items():
                    assert_same_bytes(found[table][key], row, where=f"{name}: row {key} of {table}")
        found_steps = {table: self.store.step_count(table) for table in TABLES}
        assert_equal(found_steps, self.steps, where="steps")
        stats, total = self.store.stats(), sum(map(len, expected.values()))
        assert_equal((stats.row_count, stats.block_count), (total, total), where="stats")

    def teardown(self) -> None:
        """Give everything back."""
        for taken, _ in getattr(self, "snapshots", []):
            taken.close()
        if hasattr(self, "home"):
            shutil.rmtree(self.home, ignore_errors=True)
