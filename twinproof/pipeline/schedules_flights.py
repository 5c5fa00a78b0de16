"""Batches on their way through a pipeline: what is known of each, how it gets to the device, and how others see it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any, SupportsIndex

import torch

from twinproof.errors import ConfigError, PipelineError
from twinproof.pipeline.awaitables import Awaitable
from twinproof.pipeline.data import KeyedJaggedTensor

__all__ = ["Flight", "QueueView", "cut_off", "looked_up", "move_batch"]


def move_batch(
    batch: Any, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device, copy_stream: Any = None
) -> Any:
    """The batch with each tensor moved; what is none of ours and has a ``to`` of its own is asked to go.

    Raises:
        ConfigError: a ``to`` that takes no ``data_copy_stream``, where it is told one.
    """
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, KeyedJaggedTensor):
        return batch._map(move)
    if isinstance(batch, dict):
        return {key: move_batch(value, move, device, copy_stream) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [move_batch(part, move, device, copy_stream) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if hasattr(batch, "to"):
        return _asked_to_go(batch, device, copy_stream)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        fields = {name: move_batch(getattr(batch, name), move, device, copy_stream) for name in names}
        return dataclasses.replace(batch, **fields)
    return batch


def _asked_to_go(batch: Any, device: torch.device, copy_stream: Any) -> Any:
    if copy_stream is None:
        return batch.to(device, non_blocking=True)
    if "data_copy_stream" not in inspect.signature(batch.to).parameters:
        where = "enable_inplace_copy_batch"
        raise ConfigError("a batch whose to() takes no data_copy_stream", got=type(batch).__name__, where=where)
    return batch.to(device, non_blocking=True, data_copy_stream=copy_stream)


class Flight:
    """One batch on its way; also the context that stages are given with it, unless the pipeline has a context_type.

    Attributes:
        batch: on the device.
        index: how many batches came before it since the pipeline was made or reset.
        contexts, dists, inputs, results: by module name, as far as they have come.
        prepared: what modules on the way to sharded ones gave, by name.
        started, exchanged: whether the stages of its exchange of sizes, and of ids, were called in their places.
        was_sent, was_received: whether they did something, for whoever calls them by hand too.
        failure: what its exchange of ids raised, which is raised when it is this batch's turn.
        with_grad: whether a backward would find the lookups; None before them.
        pairs: SemiSync's lookups and what the forward sees of them, (looked up, leaf) each.
    """

    def __init__(self, batch: Any) -> None:
        self.batch, self.index = batch, 0
        self.given_context: Any = None
        self.failure: Exception | None = None
        self.with_grad: bool | None = None
        self.started = self.exchanged = self.was_sent = self.was_received = False
        self.contexts: dict[str, Any] = {}
        self.dists: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.prepared: dict[str, Any] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def context(self) -> Any:
        """What stages are given with the batch."""
        return self if self.given_context is None else self.given_context

    @property
    def postproc_fwd_results(self) -> dict[str, Any]:
        """Torchrec's name for what is prepared."""
        return self.prepared

    def forget(self) -> None:
        """Nothing was sent or looked up."""
        for some in (self.contexts, self.dists, self.inputs, self.results, self.prepared):
            some.clear()
        self.pairs = []
        self.started = self.exchanged = self.was_sent = self.was_received = False
        self.failure = self.with_grad = None


class QueueView(MutableSequence[Any]):
    """``batches`` or ``contexts`` of a pipeline as subclasses of torchrec's pipelines know them: deques in lock step.

    Removing a batch and then its context, or the other way round, removes one flight.

    Raises:
        PipelineError: an insertion other than at the end.
    """

    def __init__(self, queue: deque[Any], attribute: str, make: Callable[[Any], Any], removed: list[int]) -> None:
        self._queue, self._attribute, self._make = queue, attribute, make
        # How many batches were removed beyond contexts: one cell that both views of a pipeline share.
        self._removed, self._sign = removed, 1 if attribute == "batch" else -1

    def __len__(self) -> int:
        return len(self._queue)

    def __getitem__(self, index: Any) -> Any:
        found = [getattr(flight, self._attribute) for flight in self._queue]
        return found[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        flight = self._queue[index]
        setattr(flight, "batch" if self._sign > 0 else "given_context", value)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if self._removed[0] * self._sign < 0:
            self._removed[0] += self._sign
            return
        self._removed[0] += self._sign
        if isinstance(index, slice):
            raise PipelineError("one at a time", got=index, where="batches and contexts of a pipeline")
        del self._queue[index.__index__()]

    def insert(self, index: int, value: Any) -> None:
        """At the end: a batch that is on the device already, or the context of the first batch that lacks one."""
        lacking = [flight for flight in self._queue if flight.given_context is None]
        if self._sign > 0 and index == len(self._queue):
            self._queue.append(self._make(value))
        elif self._sign < 0 and lacking:
            lacking[0].given_context = value
        else:
            raise PipelineError("only batches, then their contexts, at the end", got=index, where=self._attribute)

    def append(self, value: Any) -> None:
        """See ``insert``."""
        self.insert(len(self._queue), value)

    def popleft(self) -> Any:
        """The first, which is removed."""
        found = self[0] if self._queue else None
        del self[0]
        return found

    def clear(self) -> None:
        """Both queues are empty."""
        self._queue.clear()
        self._removed[0] = 0

    def extend(self, values: Iterable[Any]) -> None:
        """See ``insert``."""
        for value in values:
            self.append(value)


def looked_up(module: Any, ctx: Any, given: Any) -> Any:
    """What the module's own forward would return: ours waits, torchrec's hands out its lazy result.

    torchrec's result knows what it is made of, which its backward hooks ask for, only from both steps at once.
    """
    both = getattr(module, "compute_and_output_dist", None)
    result = module.output_dist(ctx, module.compute(ctx, given)) if both is None else both(ctx, given)
    return result.wait() if isinstance(result, Awaitable) else result


def cut_off(result: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The same lookup, cut off from its tables: what a forward may differentiate without reaching them.

    Pooled columns, sequences by feature, tensors, and lazy results of torchrec's modules, which are waited for.
    ``pairs`` gets (looked up, leaf) for each tensor; the leaf's gradient is what belongs into the lookup's backward.

    Raises:
        PipelineError: a result of another kind.
    """
    # First, for a lazy result may answer like the one that it stands for.
    if hasattr(type(result), "wait"):
        types: Any = sys.modules.get("torchrec.distributed.types")
        found = cut_off(result.wait(), pairs)
        # A model of torchrec's may wait for what it is given.
        return types.LazyNoWait(found) if types is not None and isinstance(result, types.LazyAwaitable) else found
    if isinstance(result, torch.Tensor):
        leaf = result.detach().requires_grad_(result.is_floating_point())
        pairs.append((result, leaf))
        return leaf
    if isinstance(result, dict):
        return {key: cut_off(value, pairs) for key, value in result.items()}
    if hasattr(result, "key_dim") and hasattr(result, "length_per_key"):
        return type(result)(
            list(result.keys()), list(result.length_per_key()), cut_off(result.values(), pairs), result.key_dim()
        )
    if hasattr(result, "weights_or_none") and not hasattr(result, "keys"):
        values = cut_off(result.values(), pairs)
        return type(result)(values, result.weights_or_none(), lengths=result.lengths())
    raise PipelineError("a lookup's result that SemiSync cannot cut off", got=type(result).__name__, where="lookup")
