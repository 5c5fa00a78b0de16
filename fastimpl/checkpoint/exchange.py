"""Short runs travel to the rank that owns their block, one bounded round at a time.

Prevents ranks that wait for a rank which has already failed: whoever fails goes on sending messages of the planned
length with a failed status, so every round completes and every owner learns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from fastimpl.checkpoint.blockio import LocalPart
from fastimpl.checkpoint.device_copies import CopyStarts, Stager
from fastimpl.checkpoint.wire import HEADER_WORDS, STATUS_FAILED, STATUS_OK, OwnBlock, message_size_bytes
from twinproof.errors import DistributedError

__all__ = ["Exchange", "Round"]


def _frame(parts: Sequence[LocalPart], *, failed: bool) -> torch.Tensor:
    """The message for one block: status, descriptors, bytes. A failed rank sends the same length without its bytes."""
    words = [word for part in parts for word in part.descriptor()]
    data_bytes = sum(part.count for part in parts)
    message = torch.empty(message_size_bytes(len(words), data_bytes), dtype=torch.uint8, device="cpu")
    at = 8 * (HEADER_WORDS + len(words))
    head = [STATUS_FAILED if failed else STATUS_OK, len(words), *words]
    message[:at].view(torch.int64).copy_(torch.tensor(head, device="cpu"))
    for part in () if failed else parts:
        message[at : at + part.count].copy_(part.data())
        at += part.count
    return message


@dataclass
class Round:
    """What is in flight: received messages, requests to wait for, sent messages that must stay alive, first failure."""

    inbox: list[torch.Tensor] = field(default_factory=list)
    senders: list[int] = field(default_factory=list)  # Who sends each of them.
    requests: list[dist.Work] = field(default_factory=list)
    outbox: list[torch.Tensor] = field(default_factory=list)
    failure: BaseException | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that the round holds."""
        return sum(message.numel() for message in (*self.inbox, *self.outbox))


class Exchange:
    """The rounds of one save on one rank.

    Args:
        group: CPU-capable group of the ranks that save; never the caller's default group.
        owned: this rank's exchanged blocks, by round.
        foreign: by round, the other ranks' blocks that hold local bytes, with those bytes.
        starts: where copies from each device begin.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        owned: Mapping[int, OwnBlock],
        foreign: Mapping[int, Sequence[tuple[OwnBlock, Sequence[LocalPart]]]],
        starts: CopyStarts,
    ) -> None:
        self.group, self.owned, self.foreign = group, owned, foreign
        self.sent_bytes = 0
        self.stager = Stager(starts)

    def start(self, turn: int, *, failed: bool) -> Round:
        """Post this round's receives and sends. A post that fails is noted, and the others are made all the same."""
        current = Round()
        block = self.owned.get(turn)
        for rank, size_bytes in block.senders if block else ():
            message = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
            message[0] = STATUS_FAILED  # What an owner sees of a message that never came.
            current.inbox.append(message)
            current.senders.append(rank)
            self._post(current, partial(dist.irecv, message, group_src=rank, group=self.group, tag=turn))
        for target, parts in self.foreign.get(turn, ()):
            try:
                self.stager.finish(self.stager.start(() if failed else parts))
                message = _frame(parts, failed=failed)
            except BaseException as error:
                current.failure = current.failure or error
                message = _frame(parts, failed=True)
            current.outbox.append(message)
            self.sent_bytes += message.numel()
            self._post(current, partial(dist.isend, message, group_dst=target.owner, group=self.group, tag=turn))
        return current

    @staticmethod
    def _post(current: Round, verb: Callable[[], dist.Work | None]) -> None:
        try:
            request = verb()
            if request is None:
                raise DistributedError(
                    "this rank is not in the writer's group",
                    got="another rank",
                    expected="one of the group",
                    where="process_group",
                )
            current.requests.append(request)
        except RuntimeError as error:
            current.failure = current.failure or error

    @staticmethod
    def finish(current: Round) -> None:
        """Wait for a round. Raises DistributedError when a sender failed or a connection broke."""
        failure = current.failure
        for request in current.requests:
            try:
                request.wait()
            except RuntimeError as error:
                failure = failure or DistributedError(
                    "a rank went away during the exchange",
                    got=str(error)[:200],
                    expected="every message",
                    where="exchange",
                )
        messages = zip(current.senders, current.inbox, strict=True)
        failed = [rank for rank, message in messages if int(message[:8].view(torch.int64)[0]) != STATUS_OK]
        if failure is None and failed:
            got = f"{len(failed)} of {len(current.inbox)} senders"
            failure = DistributedError(
                "a sending rank failed", got=got, expected="the bytes of every sender", where=f"rank {failed[0]}"
            )
        if failure is not None:
            raise failure
