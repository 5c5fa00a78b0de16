"""The batch types' state machine: any program of what is done to batches, beside the same bags as lists.

A batch remembers what it has computed. Questions come in any order between cuts, copies, moves and exchanges, so that
whatever it remembers of a batch before is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from conformance.harness import assert_equal
from conformance.pipeline.batches import KEYS, place_of
from twinproof.pipeline.stages import move_batch

HELD_MAX, KEYS_MAX = 5, 6
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


def _or(known: torch.Tensor | None, compute: Callable[[], torch.Tensor]) -> Any:
    """What is known, if it is, or what is computed."""
    return (compute() if known is None else known).tolist()


def _is_counted(batch: Any) -> bool:
    """Whether ``size_in_bytes`` is that of the parts that can be seen; sizes by rank are of four bytes or of eight."""
    parts = (batch.values(), batch.weights_or_none(), batch.lengths_or_none(), batch.offsets_or_none())
    rest = batch.size_in_bytes() - sum(part.nbytes for part in parts if part is not None)
    count = sum(map(len, batch.stride_per_key_per_rank()))
    return rest in (4 * count, 8 * count)


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
    "length_per_key_or_none": (lambda b: b.length_per_key_or_none() or b.length_per_key(), lambda f: f.sizes),
    "offset_per_key_or_none": (lambda b: b.offset_per_key_or_none() or b.offset_per_key(), lambda f: sums(f.sizes)),
    "lengths_or_none": (lambda b: _or(b.lengths_or_none(), b.lengths), lambda f: f.lengths),
    "offsets_or_none": (lambda b: _or(b.offsets_or_none(), b.offsets), lambda f: sums(f.lengths)),
    "size_in_bytes": (_is_counted, lambda f: True),
    "dist_labels": (lambda b: b.dist_labels(), _labels),
    "dist_tensors": (lambda b: [part.tolist() for part in b.dist_tensors()], _tensors),
    "dist_splits": (lambda b: b.dist_splits([1] * len(b.keys())), _splits),
}
# What the caller of a batch may know already, by the argument's name.
KNOWN = ("stride_per_key", "length_per_key", "offset_per_key", "lengths_offset_per_key", "index_per_key")


def batch_of(pipeline: Any, facts: Facts, dtype: torch.dtype, *, by_offsets: bool, known: list[str]) -> Any:
    """The batch of these lists, by lengths or offsets, with some of what would be computed."""
    made = partial(torch.tensor, device=place_of(pipeline))
    ids, lengths = made(facts.ids, dtype=torch.int64), made(facts.lengths, dtype=dtype)
    cuts = {"offsets": made(sums(facts.lengths), dtype=dtype)} if by_offsets else {"lengths": lengths}
    options = {name: QUESTIONS[name][1](facts) for name in known}
    inverse = None if facts.inverse is None else (facts.inverse[0], made(facts.inverse[1]))
    return pipeline.KeyedJaggedTensor(
        facts.keys,
        ids,
        made(weights_of(facts.ids)) if facts.weighted else None,
        **cuts,
        stride_per_key_per_rank=facts.ranks,
        inverse_indices=inverse,
        **options,
    )


SEEDS = st.integers(0, 10**6)


class BatchMachine(RuleBasedStateMachine):
    """See the module. The class attribute is set by the test that runs it.

    Hypothesis draws the program. What each step is about comes from a seed: small numbers are dull batches.
    """

    pipeline: Any

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        """Two batches."""
        self.held: list[tuple[Any, Facts]] = []
        self.next_id = 0
        self.make(2 * seed)
        self.make(2 * seed + 1)

    def _hold(self, batch: Any, facts: Facts) -> None:
        for old in self.held[: -HELD_MAX + 1]:
            self._check(*old)
        self.held = [*self.held, (batch, facts)][-HELD_MAX:]

    def _check(self, batch: Any, facts: Facts) -> None:
        """Every question."""
        for name, (found, expected) in QUESTIONS.items():
            assert_equal(found(batch), expected(facts), where=f"{name}, at last")

    def _one(self, seed: int) -> tuple[random.Random, Any, Facts]:
        chosen = random.Random(seed)
        return chosen, *chosen.choice(self.held)

    def _made(self, facts: Facts, dtype: torch.dtype, *, by_offsets: bool = False, known: Any = ()) -> Any:
        return batch_of(self.pipeline, facts, dtype, by_offsets=by_offsets, known=list(known))

    def _bag(self, size: int) -> list[int]:
        """Ids that nothing else has."""
        self.next_id += size
        return list(range(self.next_id - size, self.next_id))

    def _facts(self, chosen: random.Random, ranks: list[list[int]], *, variable: bool, weighted: bool) -> Facts:
        """Features of these samples by rank, of one size unless they are ``variable``."""
        most = max(map(sum, ranks))
        strides = [sum(row) if variable else most for row in ranks]
        bags = [[self._bag(chosen.choice([0, 1, 1, 2, 3])) for _ in range(stride)] for stride in strides]
        return Facts(KEYS[: len(ranks)], bags, weighted, most, ranks if variable else None)

    @rule(seed=SEEDS)
    def make(self, seed: int) -> None:
        """A batch of what is known; of a full batch, features that differ in size may hold some samples."""
        chosen = random.Random(seed)
        ranks = [[chosen.randint(0, 3), chosen.randint(0, 2)] for _ in range(chosen.choice([1, 2, 3, 3]))]
        facts = self._facts(chosen, ranks, variable=chosen.random() < 0.6, weighted=chosen.random() < 0.5)
        if facts.ranks is not None and min(facts.strides) > 0 and chosen.random() < 0.5:
            full = chosen.randint(1, 5)
            rows = [[chosen.randrange(stride) for _ in range(full)] for stride in facts.strides]
            facts = dataclasses.replace(facts, inverse=(list(facts.keys), rows), stride=full)
        known = chosen.sample(KNOWN, chosen.randint(0, len(KNOWN)))
        dtype = chosen.choice([torch.int64, torch.int32])
        self._hold(self._made(facts, dtype, by_offsets=chosen.random() < 0.5, known=known), facts)

    @rule(seed=SEEDS, name=st.sampled_from(sorted(QUESTIONS)))
    def ask(self, seed: int, name: str) -> None:
        """One question."""
        _, batch, facts = self._one(seed)
        found, expected = QUESTIONS[name]
        assert_equal(found(batch), expected(facts), where=name)

    @rule(seed=SEEDS)
    def permute(self, seed: int) -> None:
        """Some features, in an order, perhaps again and again."""
        chosen, batch, facts = self._one(seed)
        order = [chosen.randrange(len(facts.keys)) for _ in range(chosen.randint(1, 4))]
        self._hold(batch.permute(order), facts.picked(order))

    @rule(seed=SEEDS)
    def split(self, seed: int) -> None:
        """Two parts, of which one may be all and one nothing."""
        chosen, batch, facts = self._one(seed)
        count = len(facts.keys)
        at = chosen.randint(0, count)
        for part, order in zip(batch.split([at, count - at]), (range(at), range(at, count)), strict=True):
            if len(order) == count:
                assert_equal(part is batch, True, where="a part that is all")
            elif order:
                self._hold(part, facts.picked(list(order)))

    @rule(seed=SEEDS)
    def concat(self, seed: int) -> None:
        """A batch, and some of it again or another of as many samples."""
        chosen, batch, facts = self._one(seed)
        parts = [(batch, facts)]
        if facts.inverse is None:
            order = [chosen.randrange(len(facts.keys)) for _ in range(chosen.randint(1, 2))]
            other = self._shuffled(chosen, facts)
            parts.append((batch.permute(order), facts.picked(order)))
            parts.append((self._made(other, torch.int64, by_offsets=chosen.random() < 0.5), other))
        else:
            parts.append((move_batch(batch, torch.clone, place_of(self.pipeline)), facts))
        parts = parts[: 1 + chosen.randint(1, 2)]
        if sum(len(part.keys) for _, part in parts) > KEYS_MAX:
            return
        chosen.shuffle(parts)
        every = [part for _, part in parts]
        ranks = None if facts.ranks is None else [row for part in every for row in part.ranks or []]
        inverse = [part.inverse for part in every if part.inverse is not None]
        whole = Facts(
            [key for part in every for key in part.keys],
            [feature for part in every for feature in part.bags],
            facts.weighted,
            facts.stride,
            ranks,
            ([name for names, _ in inverse for name in names], [row for _, rows in inverse for row in rows])
            if inverse
            else None,
        )
        made = self.pipeline.KeyedJaggedTensor.concat([part for part, _ in parts])
        self._hold(made, whole if ranks is None else whole.counted_anew())

    @rule(seed=SEEDS)
    def dictionary(self, seed: int) -> None:
        """To a dictionary and back: repeated keys are gone, the last is meant."""
        _, batch, facts = self._one(seed)
        last = {key: i for i, key in enumerate(facts.keys)}
        some = dataclasses.replace(facts.picked(list(last.values())), ranks=None).counted_anew()
        if len(set(some.strides)) > 1:
            some = dataclasses.replace(some, ranks=[[stride] for stride in some.strides])
        self._hold(self.pipeline.KeyedJaggedTensor.from_jt_dict(batch.to_dict()), some)

    @rule(seed=SEEDS, way=st.sampled_from(["to", "moved", "copied", "pickled", "mapped", "flat", "synced", "unsynced"]))
    def same(self, seed: int, way: str) -> None:
        """The same batch, somewhere else or by another hand."""
        _, batch, facts = self._one(seed)
        if way in ("synced", "unsynced"):
            found = batch.sync() if way == "synced" else batch.unsync()
            assert_equal(found is batch, True, where=f"{way}: the batch itself")
            return
        made = {
            "to": lambda: batch.to(place_of(self.pipeline)),
            "moved": lambda: move_batch(batch, torch.clone, place_of(self.pipeline)),
            "copied": lambda: copy.deepcopy(batch),
            "pickled": lambda: pickle.loads(pickle.dumps(batch)),
            "mapped": lambda: pytree.tree_map_only(torch.Tensor, torch.clone, batch),
            "flat": batch.flatten_lengths,
        }[way]()
        if way == "flat":
            facts = dataclasses.replace(facts, inverse=None)
        self._hold(made, facts.counted_anew() if way == "mapped" else facts)

    @rule(seed=SEEDS)
    def filled(self, seed: int) -> None:
        """Memory of a batch, with all that it remembers, gets another of the same sizes."""
        chosen, batch, facts = self._one(seed)
        other = self._shuffled(chosen, facts)
        target = move_batch(batch, torch.clone, place_of(self.pipeline))
        source = self._made(other, batch.lengths().dtype, by_offsets=chosen.random() < 0.5)
        assert_equal(target.copy_(source) is target, True, where="copy_ returns the batch")
        self._hold(target, other)

    @rule(seed=SEEDS)
    def rewritten(self, seed: int) -> None:
        """Ids and lengths are written in place, and the batch is told to forget what it knew of the sizes."""
        chosen, batch, facts = self._one(seed)
        target = move_batch(batch, torch.clone, place_of(self.pipeline))
        if target.offsets_or_none() is None:
            lengths = facts.lengths
            chosen.shuffle(lengths)
            bags, at = list[list[list[int]]](), 0
            for stride in facts.strides:
                bags.append([self._bag(size) for size in lengths[at : at + stride]])
                at += stride
            facts = dataclasses.replace(facts, bags=bags)
            target.lengths().copy_(torch.tensor(lengths))
            target.values().copy_(torch.tensor(facts.ids))
            if facts.weighted:
                target.weights().copy_(torch.tensor(weights_of(facts.ids)))
            self._hold(target.unsync(), facts)

    def _shuffled(self, chosen: random.Random, facts: Facts) -> Facts:
        """As many bags and ids, cut otherwise; features that differ in size take samples from each other."""
        strides, lengths = facts.strides, facts.lengths
        if facts.ranks is not None:
            donor = max(range(len(strides)), key=strides.__getitem__)
            if strides[donor] > 1:
                strides[donor] -= 1
                strides[chosen.randrange(len(strides))] += 1
        chosen.shuffle(lengths)
        bags, at = list[list[list[int]]](), 0
        for stride in strides:
            bags.append([self._bag(size) for size in lengths[at : at + stride]])
            at += stride
        ranks = None
        if facts.ranks is not None:
            rest = [0] * (len(facts.ranks[0]) - 1)
            ranks = [[*rest, stride] if chosen.random() < 0.5 else [stride, *rest] for stride in strides]
        made = Facts(facts.keys, bags, facts.weighted, facts.stride, ranks, facts.inverse)
        return made if ranks is None else made.counted_anew()

    @rule(seed=SEEDS)
    def exchange(self, seed: int) -> None:
        """A batch of what ranks sent, in the order of ranks or, where sizes differ, staggered."""
        chosen = random.Random(seed)
        world_size, features = chosen.choice([1, 2, 3, 4, 6, 6]), chosen.randint(1, 3)
        kind, weighted = chosen.choice(["same", "by rank", "variable", "variable"]), chosen.random() < 0.5
        by_rank, stride = list[Facts](), chosen.randint(0, 3)
        for _ in range(world_size):
            stride = stride if kind == "same" else chosen.randint(0, 3)
            own = [[chosen.randint(0, 3)] if kind == "variable" else [stride] for _ in range(features)]
            by_rank.append(self._facts(chosen, own, variable=kind == "variable", weighted=weighted))
        parts = [self._made(facts, torch.int64) for facts in by_rank]
        tensors = [torch.cat(some) for some in zip(*(part.dist_tensors() for part in parts), strict=True)]
        staggers = [n for n in range(1, world_size + 1) if world_size % n == 0] if kind == "variable" else [1]
        stagger = chosen.choice(staggers)
        # As torchrec's exchange in two stages has them: the ranks of each node, in turn.
        each = world_size // stagger
        order = [x + each * y for x in range(each) for y in range(stagger)]
        blocks = [rank * features + feature for feature in range(features) for rank in order]
        if kind == "by rank" and len({facts.stride for facts in by_rank}) > 1:
            # Samples one by one, for blocks are of different sizes.
            begins = sums([n for facts in by_rank for n in facts.strides])
            blocks = [at for block in blocks for at in range(begins[block], begins[block + 1])]
        recat = torch.tensor(blocks, dtype=torch.int32, device=place_of(self.pipeline))
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
            self._check(batch, facts)
