"""Random batches as lists, and the same as the implementation's class."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Of batches whose features differ in size.
KEYS = ["a", "b", "c"]


def generator_of(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def values_of(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(tuple(shape), generator=generator_of(seed)).to(dtype)


def place_of(pipeline: Any) -> torch.device:
    """Where the suite's objects are; a package has none of its own."""
    return torch.device(getattr(pipeline, "device", "cpu"))


@dataclass(frozen=True)
class Jagged:
    """Bags of several features as lists: ``bags[feature][sample]`` is a list of ids, ``weights`` likewise."""

    keys: list[str]
    bags: list[list[list[int]]]
    weights: list[list[list[float]]] | None = None

    @property
    def stride(self) -> int:
        """Samples."""
        return len(self.bags[0])

    def kjt(self, pipeline: Any, *, dtype: torch.dtype = torch.int64, by_offsets: bool = False) -> Any:
        """The batch as the implementation's class."""
        ids = torch.tensor([i for feature in self.bags for bag in feature for i in bag], dtype=dtype)
        lengths = torch.tensor([len(bag) for feature in self.bags for bag in feature], dtype=dtype)
        weights = None
        if self.weights is not None:
            weights = torch.tensor([w for feature in self.weights for bag in feature for w in bag])
        if by_offsets:
            offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0).to(dtype)
            return pipeline.KeyedJaggedTensor(self.keys, ids, weights, offsets=offsets)
        return pipeline.KeyedJaggedTensor(self.keys, ids, weights, lengths=lengths, stride=self.stride)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids int64 [N], offsets int64 [F * B + 1] and weights, as a table-batched lookup takes them."""
        ids = torch.tensor([i for feature in self.bags for bag in feature for i in bag], dtype=torch.int64)
        offsets = torch.tensor([0, *(len(bag) for feature in self.bags for bag in feature)]).cumsum(0)
        if self.weights is None:
            return ids, offsets, None
        return ids, offsets, torch.tensor([w for feature in self.weights for bag in feature for w in bag])

    def picked(self, features: Sequence[str]) -> Jagged:
        """Some features, in this order."""
        order = [self.keys.index(name) for name in features]
        weights = None if self.weights is None else [self.weights[i] for i in order]
        return Jagged(list(features), [self.bags[i] for i in order], weights)


def joined(parts: Sequence[Jagged]) -> Jagged:
    """Samples of all parts, in this order."""

    def feature(every: list[Any]) -> list[Any]:
        return [[bag for part in every for bag in part[f]] for f in range(len(parts[0].keys))]

    weights = [part.weights for part in parts]
    return Jagged(parts[0].keys, feature([part.bags for part in parts]), None if None in weights else feature(weights))


def random_jagged(
    keys: Sequence[str], rows: Sequence[int], stride: int, seed: int, *, longest: int = 4, weighted: bool = False
) -> Jagged:
    """Bags of 0 to ``longest`` ids of 0 to ``rows[feature] - 1``, with duplicates; weights of both signs and zero."""
    generator = generator_of(seed)

    def bag(limit: int) -> list[int]:
        length = int(torch.randint(0, longest + 1, (1,), generator=generator))
        found: list[int] = torch.randint(0, limit, (length,), generator=generator).tolist()
        return found

    bags = [[bag(limit) for _ in range(stride)] for limit in rows]
    if not weighted:
        return Jagged(list(keys), bags)
    weights = [[(torch.randint(-4, 5, (len(b),), generator=generator) / 3).tolist() for b in f] for f in bags]
    return Jagged(list(keys), bags, weights)


def as_lists(kjt: Any) -> Jagged:
    """A batch as lists, read through its keyed parts."""
    bags, weights = [], []
    for key in kjt.keys():  # noqa: SIM118
        part, ends = kjt[key], kjt[key].offsets().tolist()
        pairs = list(itertools.pairwise(ends))
        bags.append([part.values()[a:b].tolist() for a, b in pairs])
        if part.weights_or_none() is not None:
            weights.append([part.weights()[a:b].tolist() for a, b in pairs])
    return Jagged(kjt.keys(), bags, weights or None)


def random_bags(strides: list[int], seed: int, limit: int = 9) -> list[list[list[int]]]:
    """``bags[feature][sample]``, ``strides[feature]`` of them, of 0 to 3 ids."""
    return [random_jagged(["x"], [limit], stride, seed + i, longest=3).bags[0] for i, stride in enumerate(strides)]


def vbe_of(pipeline: Any, bags: Any, *, weighted: bool = False, **options: Any) -> Any:
    """The batch; the weight of an id is a third of its place."""
    ids = torch.tensor([i for feature in bags for bag in feature for i in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int32)
    weights = torch.arange(len(ids)) / 3 if weighted else None
    options = {"stride_per_key_per_rank": [[len(feature)] for feature in bags], **options}
    return pipeline.KeyedJaggedTensor(KEYS[: len(bags)], ids, weights, lengths, **options)
