"""Ids to the ranks that look them up: one exchange of sizes for any number of modules, then one of ids.

Each rank sends lengths and ids of exactly the features that another rank holds, in one message of int64 words; weights,
where there are any, in a second. Cost: 8 bytes for each id and each bag, once. Sizes of all blocks travel in the first
exchange, so that nothing is read back between the exchange of ids and the lookup.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from fastimpl import ops
from fastimpl.pipeline.route import Route
from twinproof.engine import weakly
from twinproof.kvstore.statedict import gathered
from twinproof.pipeline.jagged import Bags, offsets_of
from twinproof.pipeline.modules import LateCheck
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
    if total:
        ops.gather_blocks(data.contiguous(), begins.contiguous(), sizes.contiguous(), out)
    return out


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """Where each of the blocks begins that stand one after the other along the last dimension."""
    return sizes.cumsum(-1) - sizes


@dataclass(frozen=True)
class WayHome:
    """Where gradients of weights go: ``sizes``, int64 [ranks, slots] ids of each rank for each slot, came here.

    ``received`` ids came from each rank, ``sent`` went to each. ``positions`` in the batch of what was sent, int64 [sum
    of sent], are None where this rank wants no gradient.
    """

    sizes: torch.Tensor
    received: list[int]
    sent: list[int]
    positions: torch.Tensor | None

    def by_rank(self, grads: torch.Tensor) -> torch.Tensor:
        """By rank, then slot, from by slot, then rank."""
        begins = _starts(self.sizes.t().reshape(-1)).reshape(self.sizes.shape[::-1]).t().reshape(-1)
        return _blocks(grads, begins, self.sizes.reshape(-1), sum(self.received))


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
        # A function that held it would be a cycle, which kept what a batch has sent until a garbage collection.
        super().__init__(weakly(self._receive))
        self.layout, self._route, self._ctx, self._segments, self._failure = layout, route, ctx, segments, failure
        # Checks of this rank's ids whose answers the host reads with the sizes.
        self._late: Sequence[LateCheck] = ctx.late_checks if segments is not None else ()
        self._takes_some = route.takes_some and segments is not None
        self.words = self._sizes()
        self.received: torch.Tensor | None = None
        self.request: Any = None
        # Those whose sizes are read in one go, for the host waits each time; and what was read. Whoever gave them has
        # them: each is one of them.
        self.together: Sequence[weakref.ref[InputDist]] = ()
        self._said: list[int] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host knows what the ranks said."""
        return self._said is not None

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
        counts = self._route.slot_counts
        if self._segments is None:
            return torch.tensor([word for count in counts for word in [0, 1, 0, *[0] * count]], device=self._ctx.device)
        self._ends = self._segments.ends(self._route.segment_count)
        self._sent = self._ends.diff()[self._order()]
        # Filled where it is: a list of the host's would be a copy that the host waits for.
        head = self._sent.new_zeros(_HEAD)
        head[0].fill_(self._segments.stride)
        if self._late and self.layout.world_size > 1:
            head[1].copy_(torch.stack([check.has_failed() for check in self._late]).amax())
        head[2].fill_(self._segments.positions is not None)
        parts = [part for sizes in torch.split(self._sent, counts) for part in (head, sizes)]
        return torch.cat(parts)

    def _order(self) -> torch.Tensor:
        assert self._segments is not None
        return self._route.on(self._segments.lengths.device).order

    def _receive(self) -> Awaitable[list[Bags]]:
        rows, sent = self._read()
        if any(row[1] for row in rows) or (self.layout.world_size == 1 and self._failure is not None):
            self._raise_first()
        self._ctx.strides = [row[0] for row in rows]
        return self._exchange([row[_HEAD:] for row in rows], sent, wanted=any(row[2] for row in rows))

    def _read(self) -> tuple[list[list[int]], list[int]]:
        """What each rank said, and the ids of each segment sent, on the host."""
        if self._said is None:
            here, fused = self.words.device, [each for known in self.together if (each := known()) is not None]
            asked = [each for each in fused or (self,) if not each.is_read and each.words.device == here]
            messages = [each.message() for each in asked]
            found = torch.cat([part for message in messages for part in message]).tolist()
            for each, message in zip(asked, messages, strict=True):
                count = sum(part.numel() for part in message)
                each._hear(found[:count])
                found = found[count:]
        assert self._said is not None
        width = self._rows().shape[1]
        count = width * self.layout.world_size
        # A rank alone sends to itself what its words say.
        sent = self._said[count:] if self.layout.world_size > 1 else self._said[_HEAD:]
        return [self._said[at : at + width] for at in range(0, count, width)], sent

    def _hear(self, said: list[int]) -> None:
        """What ``message`` said. Of several modules' each is told its own, and raises at its own ``wait``."""
        if self._takes_some:
            self._ctx.bags.sizes, said = said[-self._feature_count :], said[: -self._feature_count]
        checks, self._late = self._late, ()
        end = len(said) - 2 * len(checks)
        for at, check in enumerate(checks):
            if self._failure is None:
                self._failure = check.failure(said[end + 2 * at], said[end + 2 * at + 1])
        self._ctx.late_checks = ()
        self._said, self.together = said[:end], ()

    @property
    def _feature_count(self) -> int:
        return len(self.layout.feature_tables)

    def message(self) -> list[torch.Tensor]:
        """What the host will read: the words of every rank, which are waited for, and the ids of each segment sent.

        Then what each check of this rank's ids found, in two words, and where features are taken out of its bags, the
        ids of each.
        """
        extras = [check.found for check in self._late]
        if self._takes_some:
            extras.append(self._ends[: self._feature_count + 1].diff())
        if self.layout.world_size == 1:
            self.received = self.words
            return [self.words, *extras]
        if self.received is None:
            fuse_input_dists([self])
        self.request.wait()
        sent = [] if self._segments is None else [self._sent]
        return [self._rows().reshape(-1), *sent, *extras]

    def _fail(self) -> None:
        # No function inside of another: a frame holds what its function does, though its variables are cleared.
        if self._failure is not None:
            raise self._failure

    def _raise_first(self) -> None:
        if self.layout.world_size == 1:
            self._fail()
        gathered(self._fail, self.group)

    def _taken(self, data: torch.Tensor, total: int) -> torch.Tensor:
        """What is sent of the data of all segments: ``total`` elements by receiving rank, then slot."""
        if self._route.sends_all_in_order:
            return data
        return _blocks(data, self._ends[:-1][self._order()], self._sent, total)

    def _exchange(self, sizes: list[list[int]], sizes_sent: list[int], *, wanted: bool) -> Awaitable[list[Bags]]:
        """Send lengths and ids; ``sizes[rank][slot]`` ids come from each rank for each slot."""
        assert self._segments is not None
        segments, counts = self._segments, self._route.slot_counts
        sent = [sum(part) for part in _split(sizes_sent, counts)]
        stride, strides = segments.stride, self._ctx.strides
        ids = self._taken(segments.indices, sum(sent))
        lengths = segments.lengths.reshape(self._route.segment_count, stride)[self._order()].reshape(-1)
        received = [sum(row) for row in sizes]
        mine = counts[self.layout.rank]
        pieces = zip(torch.split(lengths, [count * stride for count in counts]), torch.split(ids, sent), strict=True)
        words = torch.cat([part for pair in pieces for part in pair])
        out_words = [mine * other + count for other, count in zip(strides, received, strict=True)]
        in_words = [count * stride + ids_count for count, ids_count in zip(counts, sent, strict=True)]
        requests = [self._send(words, out_words, in_words)]
        if segments.weights is not None:
            requests.append(self._send(self._taken(segments.weights, sum(sent)), received, sent))
        if wanted:
            positions = segments.positions
            if positions is not None:
                positions = self._taken(positions, sum(sent))
            self._ctx.way_home = WayHome(self._sizes_received(), received, sent, positions)
        # A copy does not have what is given here, which would hold it in turn.
        told = copy.copy(self)
        return Awaitable(lambda: told._arrange(requests, sizes, out_words))

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
        words, weights = requests[0][0], requests[1][0] if len(requests) == 2 else None
        if self.layout.world_size > 1:
            # Where the blocks are is known on the device too: places made on the host would be copied there first.
            counts = self._sizes_received()
            words = self._by_slot(words, counts, sum(ends))
            if weights is not None:
                starts = _starts(counts.reshape(-1)).reshape(counts.shape)
                weights = _blocks(weights, starts.t().reshape(-1), counts.t().reshape(-1), weights.numel())
        length_count = self._route.slot_counts[self.layout.rank] * sum(self._ctx.strides)
        return self._bags(words[:length_count], words[length_count:], weights, sizes)

    def _rows(self) -> torch.Tensor:
        assert self.received is not None
        return self.received.reshape(self.layout.world_size, -1)

    def _sizes_received(self) -> torch.Tensor:
        """Ids that each rank sends for each slot, int64 [ranks, slots], on the device."""
        return self._rows()[:, _HEAD:]

    def _by_slot(self, words: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
        """Lengths, then ids, each by slot, then rank, from each rank's lengths and ids by slot."""
        slots = torch.arange(counts.shape[1], device=words.device)[:, None]
        strides = self._rows()[:, 0]
        length_counts = strides * counts.shape[1]
        begins = _starts(length_counts + counts.sum(1))
        lengths = begins + slots * strides
        ids = (begins + length_counts)[:, None] + _starts(counts)
        places = torch.cat([lengths.reshape(-1), ids.t().reshape(-1)])
        sizes = torch.cat([strides.expand_as(lengths).reshape(-1), counts.t().reshape(-1)])
        return _blocks(words, places, sizes, total)

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
    """Exchange the sizes of several modules in one collective for each group, which every rank starts in this order.

    What ``input_dist`` returned and nobody has waited for yet; those that were exchanged already are left out.
    """
    fresh = [each for each in dists if isinstance(each, InputDist) and not each.is_read]
    by_group, references = dict[Any, list[InputDist]](), [weakref.ref(each) for each in fresh]
    for each in fresh:
        each.together = references
        if each.received is None and each.layout.world_size > 1:
            # Tables of one model may be cut among different ranks.
            by_group.setdefault(each.group or dist.group.WORLD, []).append(each)
    for waiting in by_group.values():
        _exchange_sizes(waiting)


def _exchange_sizes(waiting: Sequence[InputDist]) -> None:
    """Of some modules, of one group."""
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
