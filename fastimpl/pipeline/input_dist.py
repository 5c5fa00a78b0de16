"""Ids to the ranks that look them up: one exchange of sizes for any number of modules, then one of ids.

Each rank sends lengths and ids of exactly the features that another rank holds, in one message of int64 words; weights,
where there are any, in a second. Cost: 8 bytes for each id and each bag, once. Sizes of all blocks travel in the first
exchange, so that nothing is read back between the exchange of ids and the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from fastimpl import ops
from fastimpl.pipeline.route import Route
from twinproof.kvstore.statedict import gathered
from twinproof.pipeline.jagged import Bags, offsets_of
from twinproof.pipeline.sharding import Awaitable, Layout, ShardedContext

__all__ = ["InputDist", "Segments", "fuse_input_dists"]

# Words before the sizes: samples of the sender, whether it failed, and whether its weights require a gradient.
_HEAD = 3


@dataclass(frozen=True)
class Segments:
    """Bags that may be sent, ``stride`` a segment: lengths int64 [segments * stride], and ids and weights in order.

    ``positions`` of the ids in the batch are known where weights require a gradient.
    """

    lengths: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor | None
    stride: int
    positions: torch.Tensor | None = None

    def then(self, other: Segments) -> Segments:
        """These and more of the same stride."""
        weights, positions = self.weights, self.positions
        if weights is not None and other.weights is not None:
            weights = torch.cat([weights, other.weights])
        if positions is not None and other.positions is not None:
            positions = torch.cat([positions, other.positions])
        lengths = torch.cat([self.lengths, other.lengths])
        return Segments(lengths, torch.cat([self.indices, other.indices]), weights, self.stride, positions)

    def ends(self, segment_count: int) -> torch.Tensor:
        """Where the ids of each segment begin, and the end: int64 [segments + 1]."""
        return offsets_of(self.lengths.reshape(segment_count, self.stride).sum(1))


def _blocks(data: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor, total: int) -> torch.Tensor:
    out = torch.empty(total, dtype=data.dtype, device=data.device)
    ops.gather_blocks(data.contiguous(), begins, sizes, out)
    return out


def _gather(data: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    table = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).t().contiguous()
    return _blocks(data, table[0], table[1], sum(size for _, size in places))


@dataclass(frozen=True)
class WayHome:
    """Where gradients of weights go: ``sizes[rank][slot]`` ids came from each rank, and ``sent`` went to each.

    ``positions`` in the batch of what was sent, int64 [sum of sent], are None where this rank wants no gradient.
    """

    sizes: list[list[int]]
    sent: list[int]
    positions: torch.Tensor | None

    @property
    def received(self) -> list[int]:
        """Ids that came from each rank."""
        return [sum(row) for row in self.sizes]

    def by_rank(self, grads: torch.Tensor) -> torch.Tensor:
        """By rank, then slot, from by slot, then rank."""
        flat = [row[slot] for slot in range(len(self.sizes[0])) for row in self.sizes]
        begins, count = list(accumulate(flat, initial=0)), len(self.sizes)
        places = [(begins[slot * count + r], size) for r, row in enumerate(self.sizes) for slot, size in enumerate(row)]
        return _gather(grads, places)


class InputDist(Awaitable[Awaitable[list[Bags]]]):
    """One module's exchange. Sizes are sent by ``fuse_input_dists``, or at the first ``wait``.

    Args:
        layout, route: of the tables.
        ctx: gets the strides of all ranks.
        segments: this rank's, or None where ``failure`` says why there are none.
        failure: what this rank raised; every rank raises the first rank's.
    """

    def __init__(
        self,
        layout: Layout,
        route: Route,
        ctx: ShardedContext,
        segments: Segments | None,
        failure: Exception | None = None,
    ) -> None:
        super().__init__(self._receive)
        self.layout, self._route, self._ctx, self._segments, self._failure = layout, route, ctx, segments, failure
        self.words = self._sizes()
        self.received: torch.Tensor | None = None
        self.request: Any = None

    @property
    def group(self) -> Any:
        """The ranks."""
        return self.layout.process_group

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Words sent to each rank, and received from each."""
        counts, mine = self._route.slot_counts, self._route.slot_counts[self.layout.rank]
        return [_HEAD + count for count in counts], [_HEAD + mine] * len(counts)

    def _sizes(self) -> torch.Tensor:
        """For each rank: samples, failed, and the ids of each segment that goes there."""
        counts, order = self._route.slot_counts, self._route.order
        if self._segments is None:
            return torch.cat([torch.tensor([0, 1, 0] + [0] * count) for count in counts])
        segment_count = self._route.segment_count
        self._ends = self._segments.ends(segment_count)
        self._sent = self._ends.diff()[order]
        head = torch.tensor([self._segments.stride, 0, self._segments.positions is not None])
        parts = [part for sizes in torch.split(self._sent, counts) for part in (head, sizes)]
        return torch.cat(parts)

    def _receive(self) -> Awaitable[list[Bags]]:
        if self.layout.world_size == 1:
            self.received = self.words
        elif self.received is None:
            fuse_input_dists([self])
        if self.request is not None:
            self.request.wait()
        assert self.received is not None
        rows = self.received.reshape(self.layout.world_size, -1).tolist()
        if any(row[1] for row in rows):
            self._raise_first()
        self._ctx.strides = [row[0] for row in rows]
        return self._exchange([row[_HEAD:] for row in rows], wanted=any(row[2] for row in rows))

    def _raise_first(self) -> None:
        def fail() -> None:
            if self._failure is not None:
                raise self._failure

        gathered(fail, self.group)

    def _exchange(self, sizes: list[list[int]], *, wanted: bool) -> Awaitable[list[Bags]]:
        """Send lengths and ids; ``sizes[rank][slot]`` ids come from each rank for each slot."""
        assert self._segments is not None
        segments, counts, order = self._segments, self._route.slot_counts, self._route.order
        sent = [sum(part) for part in _split(self._sent.tolist(), counts)]
        stride, strides = segments.stride, self._ctx.strides
        ids = _blocks(segments.indices, self._ends[:-1][order], self._sent, sum(sent))
        lengths = segments.lengths.reshape(self._route.segment_count, stride)[order].reshape(-1)
        received = [sum(row) for row in sizes]
        mine = counts[self.layout.rank]
        pieces = zip(torch.split(lengths, [count * stride for count in counts]), torch.split(ids, sent), strict=True)
        words = torch.cat([part for pair in pieces for part in pair])
        out_words = [mine * other + count for other, count in zip(strides, received, strict=True)]
        in_words = [count * stride + ids_count for count, ids_count in zip(counts, sent, strict=True)]
        requests = [self._send(words, out_words, in_words)]
        if segments.weights is not None:
            weights = _blocks(segments.weights, self._ends[:-1][order], self._sent, sum(sent))
            requests.append(self._send(weights, received, sent))
        if wanted:
            positions = segments.positions
            if positions is not None:
                positions = _blocks(positions, self._ends[:-1][order], self._sent, sum(sent))
            self._ctx.way_home = WayHome(sizes, sent, positions)
        return Awaitable(lambda: self._arrange(requests, sizes, out_words))

    def _send(self, data: torch.Tensor, out: list[int], sent: list[int]) -> tuple[torch.Tensor, Any]:
        if self.layout.world_size == 1:
            return data, None
        result = torch.empty(sum(out), dtype=data.dtype, device=data.device)
        return result, dist.all_to_all_single(result, data, out, sent, group=self.group, async_op=True)

    def _arrange(self, requests: list[tuple[torch.Tensor, Any]], sizes: list[list[int]], ends: list[int]) -> list[Bags]:
        """Received blocks, by rank, then slot, as bags of each lookup: by slot, then rank."""
        for _, request in requests:
            if request is not None:
                request.wait()
        words, strides = requests[0][0], self._ctx.strides
        at = [0, *accumulate(ends)]
        slots = range(self._route.slot_counts[self.layout.rank])
        lengths = [(at[r] + slot * stride, stride) for slot in slots for r, stride in enumerate(strides)]
        starts = [list(accumulate([at[r] + len(slots) * strides[r], *row])) for r, row in enumerate(sizes)]
        ids = [(starts[r][slot], row[slot]) for slot in slots for r, row in enumerate(sizes)]
        moved = _gather(words, lengths + ids)
        length_count = len(slots) * sum(strides)
        weights = None
        if len(requests) == 2:
            base = [0, *accumulate(sum(row) for row in sizes)]
            starts = [list(accumulate([base[r], *row])) for r, row in enumerate(sizes)]
            places = [(starts[r][slot], row[slot]) for slot in slots for r, row in enumerate(sizes)]
            weights = _gather(requests[1][0], places)
        return self._bags(moved[:length_count], moved[length_count:], weights, sizes)

    def _bags(
        self, lengths: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, sizes: list[list[int]]
    ) -> list[Bags]:
        """The bags of each lookup."""
        result, slot, at = [], 0, 0
        samples = sum(self._ctx.strides)
        for group in self.layout.groups:
            until = slot + len(group.slots)
            count = sum(sum(row[slot:until]) for row in sizes)
            part = slice(at, at + count)
            offsets = offsets_of(lengths[slot * samples : until * samples])
            result.append(Bags(ids[part], offsets, None if weights is None else weights[part]))
            slot, at = until, at + count
        return result


def _split(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    ends = [0, *accumulate(counts)]
    return [values[a:b] for a, b in pairwise(ends)]


def fuse_input_dists(dists: Sequence[Awaitable[Any]]) -> None:
    """Exchange the sizes of several modules of one group in one collective, which every rank starts in this order.

    What ``input_dist`` returned and nobody has waited for yet; those that were exchanged already are left out.
    """
    waiting = [each for each in dists if isinstance(each, InputDist) and each.received is None]
    waiting = [each for each in waiting if each.layout.world_size > 1]
    if not waiting:
        return
    sent, received = zip(*(each.splits for each in waiting), strict=True)
    by_rank = [torch.split(each.words, counts) for each, counts in zip(waiting, sent, strict=True)]
    words = torch.cat([parts[rank] for rank in range(len(sent[0])) for parts in by_rank])
    out, given = ([sum(counts) for counts in zip(*some, strict=True)] for some in (received, sent))
    result = torch.empty(sum(out), dtype=torch.int64, device=words.device)
    request = dist.all_to_all_single(result, words, out, given, group=waiting[0].group, async_op=True)
    rows = result.reshape(len(sent[0]), -1)
    at = 0
    for each, counts in zip(waiting, received, strict=True):
        # A view: the words are there when the request is over.
        each.received, each.request = rows[:, at : at + counts[0]], request
        at += counts[0]
