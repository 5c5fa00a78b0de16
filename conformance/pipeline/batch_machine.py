"""The batch types' state machine: any program of what is done to batches, beside the same bags as lists.

A batch remembers what it has computed. Questions come in any order between cuts, copies, moves and exchanges, so that
whatever it remembers of a batch before is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from conformance.harness import assert_equal
from conformance.pipeline.batches import KEYS
from twinproof.pipeline.stages import move_batch

HELD_MAX, KEYS_MAX = 5, 6
CPU = torch.device("cpu")
Inverse = tuple[list[str], list[list[int]]]


@dataclass(frozen=True)
class Facts:
    """A batch as lists: ``bags[feature][sample]`` is a list of ids; the weight of id i is i / 4.

    ``ranks`` are the samples of each feature by rank, None where all features are of one size; ``stride`` those of the
    full batch.
    """

    keys: list[str]
    bags: list[list[list[int]]]
    weighted: bool
    stride: int
    ranks: list[list[int]] | None = None
    inverse: Inverse | None = None

    @property
    def strides(self) -> list[int]:
        """Samples of each feature."""
        return [len(feature) for feature in self.bags]

    @property
    def lengths(self) -> list[int]:
        """Ids of each bag."""
        return [len(bag) for feature in self.bags for bag in feature]

    @property
    def ids(self) -> list[int]:
        """All ids."""
        return [one for feature in self.bags for bag in feature for one in bag]

    @property
    def sizes(self) -> list[int]:
        """Ids of each feature."""
        return [sum(map(len, feature)) for feature in self.bags]

    def picked(self, order: list[int]) -> Facts:
        """Some features; inverse indices are of the whole batch."""
        ranks = None if self.ranks is None else [self.ranks[i] for i in order]
        keys, bags = [self.keys[i] for i in order], [self.bags[i] for i in order]
        return Facts(keys, bags, self.weighted, self.stride, ranks)

    def counted_anew(self) -> Facts:
        """Where nobody says how many samples the full batch has."""
        most = max(self.strides) if self.inverse is None else len(self.inverse[1][0])
        return dataclasses.replace(self, stride=most)


def sums(counts: list[int]) -> list[int]:
    """0, then the running sums."""
    return [0, *accumulate(counts)]


def weights_of(ids: list[int]) -> list[float]:
    """Of each id."""
    return [one / 4 for one in ids]


def _parts(parts: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(each.tolist() for each in (p.values(), p.lengths(), p.offsets())) for key, p in parts.items()}


def _expected_parts(facts: Facts) -> dict[str, Any]:
    found = {}
    for key, feature in zip(facts.keys, facts.bags, strict=True):
        lengths = [len(bag) for bag in feature]
        # Of no lengths at all torchrec's offsets are none either.
        offsets = sums(lengths) if facts.lengths else []
        found[key] = ([one for bag in feature for one in bag], lengths, offsets)
    return found


def _inverse(batch: Any) -> Any:
    found = batch.inverse_indices_or_none()
    return None if found is None else (found[0], found[1].tolist())


def _labels(facts: Facts) -> list[str]:
    return ["lengths", "values", *(["strides"] if facts.ranks else []), *(["weights"] if facts.weighted else [])]


def _tensors(facts: Facts) -> list[Any]:
    weights = [weights_of(facts.ids)] if facts.weighted else []
    return [facts.lengths, facts.ids, *([facts.strides] if facts.ranks else []), *weights]


def _splits(facts: Facts) -> list[list[int]]:
    """With a part for each feature."""
    return [
        facts.strides, facts.sizes, *([[1] * len(facts.keys)] if facts.ranks else []),
        *([facts.sizes] if facts.weighted else []),
    ]  # fmt: skip


# What is asked of a batch, and what it has to say.
QUESTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Facts], Any]]] = {
    "keys": (lambda b: b.keys(), lambda f: f.keys),
    "values": (lambda b: b.values().tolist(), lambda f: f.ids),
    "weights": (
        lambda b: None if b.weights_or_none() is None else b.weights().tolist(),
        lambda f: weights_of(f.ids) if f.weighted else None,
    ),
    "lengths": (lambda b: b.lengths().tolist(), lambda f: f.lengths),
    "offsets": (lambda b: b.offsets().tolist(), lambda f: sums(f.lengths)),
    "stride": (lambda b: b.stride(), lambda f: f.stride),
    "stride_per_key": (lambda b: b.stride_per_key(), lambda f: f.strides),
    "stride_per_key_per_rank": (lambda b: b.stride_per_key_per_rank(), lambda f: f.ranks or []),
    "variable_stride_per_key": (lambda b: b.variable_stride_per_key(), lambda f: f.ranks is not None),
    "length_per_key": (lambda b: b.length_per_key(), lambda f: f.sizes),
    "offset_per_key": (lambda b: b.offset_per_key(), lambda f: sums(f.sizes)),
    "lengths_offset_per_key": (lambda b: b.lengths_offset_per_key(), lambda f: sums(f.strides)),
    "index_per_key": (lambda b: b.index_per_key(), lambda f: {key: i for i, key in enumerate(f.keys)}),
    "inverse_indices": (_inverse, lambda f: f.inverse),
    "to_dict": (lambda b: _parts(b.to_dict()), _expected_parts),
    "by name": (lambda b: b[b.keys()[0]].values().tolist(), lambda f: _expected_parts(f)[f.keys[0]][0]),
    "dist_labels": (lambda b: b.dist_labels(), _labels),
    "dist_tensors": (lambda b: [part.tolist() for part in b.dist_tensors()], _tensors),
    "dist_splits": (lambda b: b.dist_splits([1] * len(b.keys())), _splits),
}
# What the caller of a batch may know already, by the argument's name.
KNOWN = ("stride_per_key", "length_per_key", "offset_per_key", "lengths_offset_per_key", "index_per_key")


def batch_of(pipeline: Any, facts: Facts, dtype: torch.dtype, *, by_offsets: bool, known: list[str]) -> Any:
    """The batch of these lists, by lengths or offsets, with some of what would be computed."""
    ids, lengths = torch.tensor(facts.ids, dtype=torch.int64), torch.tensor(facts.lengths, dtype=dtype)
    cuts = {"offsets": torch.tensor(sums(facts.lengths), dtype=dtype)} if by_offsets else {"lengths": lengths}
    options = {name: QUESTIONS[name][1](facts) for name in known}
    inverse = None if facts.inverse is None else (facts.inverse[0], torch.tensor(facts.inverse[1]))
    return pipeline.KeyedJaggedTensor(
        facts.keys,
        ids,
        torch.tensor(weights_of(facts.ids)) if facts.weighted else None,
        **cuts,
        stride_per_key_per_rank=facts.ranks,
        inverse_indices=inverse,
        **options,
    )


class BatchMachine(RuleBasedStateMachine):
    """See the module. The class attribute is set by the test that runs it."""

    pipeline: Any

    @initialize()
    def start(self) -> None:
        """Nothing is held."""
        self.held: list[tuple[Any, Facts]] = []
        self.next_id = 0

    def _hold(self, batch: Any, facts: Facts) -> None:
        self.held = [*self.held, (batch, facts)][-HELD_MAX:]

    def _one(self, number: int) -> tuple[Any, Facts]:
        if not self.held:
            self._hold(self._made(facts := self._facts([[1], [2]], [3], variable=False), torch.int64), facts)
        return self.held[number % len(self.held)]

    def _made(self, facts: Facts, dtype: torch.dtype, *, by_offsets: bool = False, known: Any = ()) -> Any:
        return batch_of(self.pipeline, facts, dtype, by_offsets=by_offsets, known=list(known))

    def _bag(self, size: int) -> list[int]:
        """Ids that nothing else has."""
        self.next_id += size
        return list(range(self.next_id - size, self.next_id))

    def _facts(self, ranks: list[list[int]], sizes: list[int], *, variable: bool, weighted: bool = False) -> Facts:
        """Features of these samples by rank; sizes of bags in turn."""
        count, bags = 0, list[list[list[int]]]()
        for row in ranks:
            bags.append([self._bag(sizes[(count + i) % len(sizes)]) for i in range(sum(row))])
            count += sum(row)
        most = max(len(feature) for feature in bags)
        if not variable:
            bags = [[*feature, *(self._bag(0) for _ in range(most - len(feature)))] for feature in bags]
        return Facts(KEYS[: len(ranks)], bags, weighted, most, ranks if variable else None)

    @rule(
        ranks=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=3),
        sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        variable=st.booleans(),
        weighted=st.booleans(),
        full=st.one_of(st.none(), st.integers(1, 5)),
        dtype=st.sampled_from([torch.int64, torch.int32]),
        by_offsets=st.booleans(),
        known=st.sets(st.sampled_from(KNOWN)),
    )
    def make(
        self,
        ranks: list[list[int]],
        sizes: list[int],
        variable: bool,
        weighted: bool,
        full: int | None,
        dtype: torch.dtype,
        by_offsets: bool,
        known: set[str],
    ) -> None:
        """A batch; with ``full`` samples of which features that differ in size hold some."""
        facts = self._facts(ranks, sizes, variable=variable, weighted=weighted)
        if variable and full is not None and min(facts.strides) > 0:
            rows = [[sample % stride for sample in range(full)] for stride in facts.strides]
            facts = dataclasses.replace(facts, inverse=(list(facts.keys), rows), stride=full)
        self._hold(self._made(facts, dtype, by_offsets=by_offsets, known=sorted(known)), facts)

    @rule(number=st.integers(0, HELD_MAX), name=st.sampled_from(sorted(QUESTIONS)))
    def ask(self, number: int, name: str) -> None:
        """One question."""
        batch, facts = self._one(number)
        found, expected = QUESTIONS[name]
        assert_equal(found(batch), expected(facts), where=name)

    @rule(number=st.integers(0, HELD_MAX), order=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def permute(self, number: int, order: list[int]) -> None:
        """Some features, in an order, perhaps again and again."""
        batch, facts = self._one(number)
        order = [i % len(facts.keys) for i in order]
        self._hold(batch.permute(order), facts.picked(order))

    @rule(number=st.integers(0, HELD_MAX), at=st.integers(0, 6))
    def split(self, number: int, at: int) -> None:
        """Two parts, of which one may be all and one nothing."""
        batch, facts = self._one(number)
        count = len(facts.keys)
        at %= count + 1
        for part, order in zip(batch.split([at, count - at]), (range(at), range(at, count)), strict=True):
            if len(order) == count:
                assert_equal(part is batch, True, where="a part that is all")
            elif order:
                self._hold(part, facts.picked(list(order)))

    @rule(number=st.integers(0, HELD_MAX))
    def concat(self, number: int) -> None:
        """All features twice."""
        batch, facts = self._one(number)
        if 2 * len(facts.keys) <= KEYS_MAX:
            inverse = None if facts.inverse is None else (facts.inverse[0] * 2, facts.inverse[1] * 2)
            ranks = None if facts.ranks is None else facts.ranks * 2
            twice = Facts(facts.keys * 2, facts.bags * 2, facts.weighted, facts.stride, ranks, inverse)
            made = self.pipeline.KeyedJaggedTensor.concat([batch, batch])
            self._hold(made, twice if ranks is None else twice.counted_anew())

    @rule(number=st.integers(0, HELD_MAX))
    def dictionary(self, number: int) -> None:
        """To a dictionary and back: repeated keys are gone, the last is meant."""
        batch, facts = self._one(number)
        last = {key: i for i, key in enumerate(facts.keys)}
        some = dataclasses.replace(facts.picked(list(last.values())), ranks=None).counted_anew()
        if len(set(some.strides)) > 1:
            some = dataclasses.replace(some, ranks=[[stride] for stride in some.strides])
        self._hold(self.pipeline.KeyedJaggedTensor.from_jt_dict(batch.to_dict()), some)

    @rule(
        number=st.integers(0, HELD_MAX),
        way=st.sampled_from(["to", "moved", "copied", "pickled", "mapped", "flat", "synced", "unsynced"]),
    )
    def same(self, number: int, way: str) -> None:
        """The same batch, somewhere else or by another hand."""
        batch, facts = self._one(number)
        if way in ("synced", "unsynced"):
            found = batch.sync() if way == "synced" else batch.unsync()
            assert_equal(found is batch, True, where=f"{way}: the batch itself")
            return
        made = {
            "to": lambda: batch.to(CPU),
            "moved": lambda: move_batch(batch, torch.clone, CPU),
            "copied": lambda: copy.deepcopy(batch),
            "pickled": lambda: pickle.loads(pickle.dumps(batch)),
            "mapped": lambda: pytree.tree_map_only(torch.Tensor, torch.clone, batch),
            "flat": batch.flatten_lengths,
        }[way]()
        if way == "flat":
            facts = dataclasses.replace(facts, inverse=None)
        self._hold(made, facts.counted_anew() if way == "mapped" else facts)

    @rule(number=st.integers(0, HELD_MAX), by_offsets=st.booleans(), turn=st.integers(0, 9))
    def filled(self, number: int, by_offsets: bool, turn: int) -> None:
        """Memory of a batch, with all that it remembers, gets another of the same sizes."""
        batch, facts = self._one(number)
        other = self._shuffled(facts, turn)
        target = move_batch(batch, torch.clone, CPU)
        source = self._made(other, batch.lengths().dtype, by_offsets=by_offsets)
        kept = other if facts.ranks is not None else dataclasses.replace(other, stride=facts.stride)
        assert_equal(target.copy_(source) is target, True, where="copy_ returns the batch")
        self._hold(target, kept)

    def _shuffled(self, facts: Facts, turn: int) -> Facts:
        """As many bags and ids, cut otherwise; features that differ in size take samples from each other."""
        strides, lengths = facts.strides, facts.lengths
        if facts.ranks is not None:
            donor = max(range(len(strides)), key=strides.__getitem__)
            if strides[donor] > 1 and len(strides) > 1:
                strides[donor] -= 1
                strides[(donor + 1 + turn % (len(strides) - 1)) % len(strides)] += 1
        lengths = [*lengths[turn % max(len(lengths), 1) :], *lengths[: turn % max(len(lengths), 1)]]
        bags, at = list[list[list[int]]](), 0
        for stride in strides:
            bags.append([self._bag(size) for size in lengths[at : at + stride]])
            at += stride
        ranks = None if facts.ranks is None else [[stride - 1, 1] if stride else [0, 0] for stride in strides]
        made = Facts(facts.keys, bags, facts.weighted, facts.stride, ranks, facts.inverse)
        return made if ranks is None else made.counted_anew()

    @rule(
        world_size=st.integers(1, 6),
        kind=st.sampled_from(["same", "by rank", "variable"]),
        features=st.integers(1, 3),
        strides=st.lists(st.integers(0, 3), min_size=1, max_size=7),
        sizes=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        weighted=st.booleans(),
        turn=st.integers(0, 3),
    )
    def exchange(
        self,
        world_size: int,
        kind: str,
        features: int,
        strides: list[int],
        sizes: list[int],
        weighted: bool,
        turn: int,
    ) -> None:
        """A batch of what ranks sent, in the order of ranks or, where sizes differ, staggered."""
        by_rank = []
        for rank in range(world_size):
            own = [strides[(rank * features + f) % len(strides)] for f in range(features)]
            if kind != "variable":
                own = [strides[0 if kind == "same" else rank % len(strides)]] * features
            by_rank.append(self._facts([[n] for n in own], sizes, variable=kind == "variable", weighted=weighted))
        parts = [self._made(facts, torch.int64) for facts in by_rank]
        tensors = [torch.cat(some) for some in zip(*(part.dist_tensors() for part in parts), strict=True)]
        staggers = [n for n in range(1, world_size + 1) if world_size % n == 0] if kind == "variable" else [1]
        stagger = staggers[turn % len(staggers)]
        # As torchrec's exchange in two stages has them: the ranks of each node, in turn.
        each = world_size // stagger
        order = [x + each * y for x in range(each) for y in range(stagger)]
        blocks = [rank * features + feature for feature in range(features) for rank in order]
        if kind == "by rank" and len({facts.stride for facts in by_rank}) > 1:
            # Samples one by one, for blocks are of different sizes.
            begins = sums([n for facts in by_rank for n in facts.strides])
            blocks = [at for block in blocks for at in range(begins[block], begins[block + 1])]
        recat = torch.tensor(blocks, dtype=torch.int32)
        known = None if kind == "variable" else [facts.stride for facts in by_rank]
        made = self.pipeline.KeyedJaggedTensor.dist_init(
            KEYS[:features], tensors, kind == "variable", world_size, recat, known, stagger
        )
        bags = [[bag for rank in order for bag in by_rank[rank].bags[feature]] for feature in range(features)]
        ranks = [[len(by_rank[rank].bags[feature]) for rank in order] for feature in range(features)]
        facts = Facts(KEYS[:features], bags, weighted, len(bags[0]), ranks if kind == "variable" else None)
        self._hold(made, facts if kind != "variable" else facts.counted_anew())

    def teardown(self) -> None:
        """Every question, of every batch."""
        for batch, facts in getattr(self, "held", []):
            for name, (found, expected) in QUESTIONS.items():
                assert_equal(found(batch), expected(facts), where=f"{name}, at the end")
