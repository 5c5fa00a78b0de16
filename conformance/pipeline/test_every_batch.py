"""Every small batch, beside the same bags as lists: all sizes, all orders of two questions, all cuts.

A machine draws long programs of large batches; here nothing is drawn, so that no size and no order is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

import torch

from conformance.harness import assert_equal, requirement
from conformance.pipeline.batch_machine import QUESTIONS, Facts, batch_of, sums, weights_of
from conformance.pipeline.batches import KEYS, place_of
from conformance.pipeline.model import assert_bits

_MOST = 3
# What a cut is asked by everybody; the other questions follow in turn.
_ALWAYS = ("values", "weights", "lengths", "stride_per_key", "to_dict")


def _facts_of(strides: tuple[int, ...], *, same: bool, weighted: bool, turn: int) -> Facts:
    """Features of these sizes; bags of 0, 1 and 2 ids in turn, no id twice."""
    count = sum(strides)
    lengths = [(bag + turn) % 3 for bag in range(count)]
    ends = sums(lengths)
    bags = [list(range(begin, end)) for begin, end in pairwise(ends)]
    cuts = sums(list(strides))
    features = [bags[begin:end] for begin, end in pairwise(cuts)]
    ranks = None if same else [[stride] for stride in strides]
    return Facts(KEYS[: len(strides)], features, weighted, max(strides), ranks)


def _small() -> Iterator[Facts]:
    """Each size of each of up to three features, then those of one size."""
    sizes = list(chain.from_iterable(product(range(_MOST), repeat=count) for count in (1, 2, 3)))
    for turn, strides in enumerate(sizes):
        yield _facts_of(strides, same=False, weighted=turn % 2 == 0, turn=turn)
    for turn, (count, stride) in enumerate(product((1, 2, 3), range(_MOST))):
        yield _facts_of((stride,) * count, same=True, weighted=turn % 2 == 0, turn=turn)


def _made(pipeline: Any, facts: Facts, *, by_offsets: bool) -> Any:
    return batch_of(pipeline, facts, torch.int64, by_offsets=by_offsets, known=[])


def _ask(batch: Any, facts: Facts, name: str, where: str) -> None:
    found, expected = QUESTIONS[name]
    assert_equal(found(batch), expected(facts), where=f"{name}, {where}: {facts}")


@requirement(
    "PIPE-553",
    "Every batch of up to three features of up to two samples each MUST answer every question by the lists that it was "
    "made of, made by lengths or by offsets, and whichever other question, sync or unsync came before.",
)
def test_questions(pipeline: Any) -> None:
    for facts, by_offsets in product(_small(), (False, True)):
        batch = _made(pipeline, facts, by_offsets=by_offsets)
        for name in QUESTIONS:
            _ask(batch, facts, name, f"offsets {by_offsets}")
    firsts: dict[str, Callable[[Any], Any]] = {name: found for name, (found, _) in QUESTIONS.items()}
    firsts |= {"sync": lambda b: b.sync(), "unsync": lambda b: b.unsync()}
    some = [_facts_of(strides, same=False, weighted=True, turn=1) for strides in ((2, 1, 3), (0, 2))]
    some.append(_facts_of((2, 2), same=True, weighted=False, turn=2))
    for facts, by_offsets, first in product(some, (False, True), firsts):
        for name in QUESTIONS:
            batch = _made(pipeline, facts, by_offsets=by_offsets)
            firsts[first](batch)
            _ask(batch, facts, name, f"offsets {by_offsets}, behind {first}")
        synced = _made(pipeline, facts, by_offsets=by_offsets)
        firsts[first](synced)
        synced.sync()
        known = (synced.length_per_key_or_none(), synced.offset_per_key_or_none())
        assert_equal(known, (facts.sizes, sums(facts.sizes)), where=f"known by sync behind {first}")


def _cuts(pipeline: Any, facts: Facts, batch: Any) -> Iterator[tuple[str, Any, Facts]]:
    """Permutations with repeats of up to three features, splits, a dictionary's features, parts put together."""
    places = range(len(facts.keys))
    for order in chain.from_iterable(product(places, repeat=count) for count in (1, 2, 3)):
        yield f"permute {order}", batch.permute(list(order)), facts.picked(list(order))
    for begin, end in ((a, b) for a in places for b in range(a + 1, len(facts.keys) + 1)):
        parts = batch.split([begin, end - begin, len(facts.keys) - end])
        yield f"split {begin} to {end}", parts[1], facts.picked(list(range(begin, end)))
    unlike = len(set(facts.strides)) > 1
    apart = replace(facts, ranks=[[stride] for stride in facts.strides] if unlike else None)
    yield "of a dictionary", pipeline.KeyedJaggedTensor.from_jt_dict(batch.to_dict()), apart
    for at in range(1, len(facts.keys)):
        joined = pipeline.KeyedJaggedTensor.concat(batch.split([at, len(facts.keys) - at]))
        yield f"split and put together at {at}", joined, facts


@requirement(
    "PIPE-554",
    "Every such batch MUST keep each feature's bags, weights and sizes in every order and choice of its features, in "
    "every split, as a dictionary and back, and put together again.",
)
def test_cuts(pipeline: Any) -> None:
    others = [name for name in QUESTIONS if name not in _ALWAYS]
    for number, facts in enumerate(_small()):
        batch = _made(pipeline, facts, by_offsets=number % 2 == 0)
        for turn, (where, cut, expected) in enumerate(_cuts(pipeline, facts, batch)):
            # What a cut knows of the full batch is asked by the machine.
            expected = replace(expected, stride=cut.stride())
            for name in (*_ALWAYS, others[turn % len(others)]):
                _ask(cut, expected, name, where)


def _bags(pipeline: Any, lengths: tuple[int, ...], begin: int | None, *, weighted: bool) -> tuple[Any, list[int]]:
    """One feature by its lengths, or by offsets from ``begin``; values are 0, 1, 2 and so on. And its offsets."""
    ends = [(begin or 0) + end for end in sums(list(lengths))]
    # Of offsets from behind 0 there are values behind the last bag, too.
    values = torch.arange(ends[-1] + (1 if begin else 0), device=place_of(pipeline))
    made = torch.tensor(lengths, device=values.device), torch.tensor(ends, device=values.device)
    weights = values / 4 if weighted else None
    if begin is None:
        return pipeline.JaggedTensor(values, weights, lengths=made[0]), ends
    return pipeline.JaggedTensor(values, weights, offsets=made[1]), ends


def _rows(ends: list[int]) -> list[list[int]]:
    return [list(range(begin, end)) for begin, end in pairwise(ends)]


def _padded(ends: list[int], width: int) -> list[list[float]]:
    return [[*row[:width], *[-1] * (width - len(row))] for row in _rows(ends)]


def _weights(found: Any) -> Any:
    return None if found is None else [row.tolist() for row in found]


_OF_ONE: dict[str, tuple[Callable[[Any], Any], Callable[[list[int], bool], Any]]] = {
    "lengths": (lambda b: b.lengths().tolist(), lambda e, w: [len(row) for row in _rows(e)]),
    "offsets": (lambda b: b.offsets().tolist(), lambda e, w: e),
    "to_dense": (lambda b: [row.tolist() for row in b.to_dense()], lambda e, w: _rows(e)),
    "to_dense_weights": (
        lambda b: _weights(b.to_dense_weights()),
        lambda e, w: [weights_of(row) for row in _rows(e)] if w else None,
    ),
    "to_padded_dense": (lambda b: b.to_padded_dense(2, -1).tolist(), lambda e, w: _padded(e, 2)),
    "to": (lambda b: [row.tolist() for row in b.to(b.device()).to_dense()], lambda e, w: _rows(e)),
    "weights": (lambda b: b.weights_or_none() is not None, lambda e, w: w),
}


@requirement(
    "PIPE-555",
    "Every feature of up to three bags MUST answer for the bags that its lengths or offsets cut, of offsets from "
    "behind 0 too, whichever question came before; offsets that were given MUST stay.",
)
def test_one_feature(pipeline: Any) -> None:
    cases = chain.from_iterable(product(range(_MOST), repeat=count) for count in (1, 2, 3))
    for lengths, begin, weighted in product(cases, (None, 0, 2), (False, True)):
        for first, name in product(_OF_ONE, repeat=2):
            bags, ends = _bags(pipeline, lengths, begin, weighted=weighted)
            _OF_ONE[first][0](bags)
            found, expected = _OF_ONE[name]
            where = f"{name} behind {first} of {lengths} from {begin}"
            assert_equal(found(bags), expected(ends, weighted), where=where)
            if begin is not None:
                kept = bags.offsets_or_none()
                assert_equal(None if kept is None else kept.tolist(), ends, where=f"given offsets, {where}")


@requirement(
    "PIPE-556",
    "Columns MUST be regrouped by every list of up to three names of one or two tensors, a name that stands twice "
    "among them, into memory of their own: what is written there changes no tensor.",
)
def test_every_group(pipeline: Any) -> None:
    def made(names: list[str], first: int) -> tuple[Any, dict[str, torch.Tensor]]:
        widths = [1 + place for place in range(len(names))]
        columns = [torch.full((2, width), float(first + place)) for place, width in enumerate(widths)]
        tensor = pipeline.KeyedTensor(names, widths, torch.cat(columns, dim=1).to(place_of(pipeline)))
        return tensor, dict(zip(names, columns, strict=True))

    for names in ([["a"]], [["a", "b"]], [["a", "a"]], [["b", "a", "b"]], [["a", "b"], ["c"]], [["a"], ["a", "b"]]):
        tensors, columns = list[Any](), dict[str, torch.Tensor]()
        for number, own in enumerate(names):
            tensor, known = made(own, 10 * number)
            tensors.append(tensor)
            columns |= known
        before = [tensor.values().clone() for tensor in tensors]
        for group in chain.from_iterable(product(columns, repeat=count) for count in (1, 2, 3)):
            expected = torch.cat([columns[name] for name in group], dim=1)
            groups = [list(group)]
            results = {
                "regroup": pipeline.KeyedTensor.regroup(tensors, groups)[0],
                "regroup_as_dict": pipeline.KeyedTensor.regroup_as_dict(tensors, groups, ["x"])["x"],
                "regroup_kts": pipeline.regroup_kts(tensors, groups)[0],
                "permute_multi_embedding": pipeline.permute_multi_embedding(tensors, groups)[0],
            }
            for way, found in results.items():
                where = f"{way} of {names} into {group}"
                assert_bits(found.cpu(), expected, where)
                found.fill_(-1)
                for tensor, values in zip(tensors, before, strict=True):
                    assert_bits(tensor.values(), values, f"a tensor behind a write to its group: {where}")
