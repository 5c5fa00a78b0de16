"""What torchrec's models, hooks and subclasses of its pipelines ask of ours; nothing of torchrec is imported."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any, SupportsIndex

import torch

from twinproof.engine import weakly
from twinproof.errors import ConfigError, PipelineError
from twinproof.pipeline.sharding import made_for_training
from twinproof.pipeline.stages import BatchContext, Call, unwrapped

__all__ = ["QueueView", "TorchrecModels"]


class TorchrecModels:
    """Stages by torchrec's names, which its users override or call, and what only models of torchrec have a part in."""

    _model: torch.nn.Module
    _current: Any
    _queue: deque[BatchContext]
    _made: BatchContext | None
    _stages: Any
    _send: Callable[[BatchContext], None]
    _receive: Callable[[BatchContext], None]
    calls: list[Call]

    @property
    def _pipelined_modules(self) -> list[Any]:
        return [call.module for call in self.calls]

    @property
    def _pipelined_postprocs(self) -> list[Any]:
        return list({name: module for call in self.calls for name, module in call.postprocs.items()}.values())

    def sync_embeddings(self, model: Any, interval_batches: int | None, context: Any = None) -> None:
        """Average a ``DMPCollection``'s replicas every so many batches; without a context the step's batch counts."""
        # By name and by class: a place without torchrec has no such model, and a mock of one has its class.
        is_collection = any(kind.__name__ == "DMPCollection" for kind in model.__class__.__mro__)
        if is_collection and interval_batches is not None:
            counted = self._current if context is None else context
            if counted is None:
                raise PipelineError(
                    "outside of a step a context says which batch",
                    got=None,
                    expected="the context of a batch",
                    where="sync_embeddings",
                )
            if counted.index % interval_batches == 0:
                model.sync()

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Start the exchange of sizes."""
        found = None if batch is None else self._found(context)
        if found is not None and not found.was_sent:
            with made_for_training():
                self._stages.send(found, lambda: self._send(found))

    def wait_sparse_data_dist(self, context: Any) -> None:
        """End the exchange of sizes, and start that of ids."""
        found = self._found(context)
        if not found.was_received:
            self._stages.receive(lambda: self._receive(found))

    def extract_model_input_from_batch(self, batch: Any) -> Any:
        """What the arguments of sharded modules are computed from."""
        return batch

    def clear_sparse_data_dist_inputs(self, context: Any) -> None:
        """Nothing: what an exchange was given goes with its lookup."""

    def _init_pipelined_modules(self, batch: Any, context: Any, pipelined_forward: Any = None) -> None:
        """Called when the first batch has come into an empty pipeline; modules are driven already."""

    def _wait_for_batch(self) -> None:
        """Called before each forward; whoever needs the batch on the device waits for it besides."""

    def _found(self, context: Any) -> BatchContext:
        """The batch in flight that a context belongs to."""
        if isinstance(context, BatchContext):
            return context
        for in_flight in (*self._queue, self._made):
            if in_flight is not None and in_flight.given_context is context:
                return in_flight
        got, expected = type(context).__name__, "the context of one"
        raise PipelineError("the context of no batch in flight", got=got, expected=expected, where="a stage")

    def register_backward_hook(self, site: Any, work: Callable[[Any], None]) -> None:
        """Call ``work(pipeline)`` in each backward when the gradient that torchrec's ``InjectionSite`` names is there.

        Raises:
            ConfigError: a site that is not torchrec's.
        """
        injection: Any = sys.modules.get("torchrec.distributed.train_pipeline.backward_injection")
        if injection is None or not isinstance(site, injection.InjectionSite):
            raise ConfigError(
                "not one of torchrec's injection sites",
                got=type(site),
                expected="an InjectionSite",
                where="register_backward_hook",
            )
        injection.register_backward_hook(site, unwrapped(self._model), lambda grad: work(self))


class QueueView(MutableSequence[Any]):
    """``batches`` or ``contexts`` of a pipeline as subclasses of torchrec's pipelines know them: deques in lock step.

    Removing a batch and then its context, or the other way round, removes one batch in flight. Until then what was not
    removed yet stands in its place, as in two deques. A batch that is put in the place of another is sent and looked
    up anew.

    Raises:
        PipelineError: an insertion other than at the end, or of a context elsewhere than at the first batch without; a
            slice that is removed or assigned.
    """

    def __init__(
        self,
        queue: deque[Any],
        attribute: str,
        make: Callable[[Any], Any],
        removed: dict[str, list[Any]],
        replace: Callable[[Any, Any], None],
    ) -> None:
        self._queue, self._attribute, self._make, self._replace = queue, attribute, weakly(make), weakly(replace)
        # Batches that are in one of the queues only, by the one that they are still in: both views share it.
        self._removed, self._is_batches = removed, attribute == "batch"
        self._left = removed[attribute]

    def _items(self) -> list[Any]:
        return sorted([*self._left, *self._queue], key=lambda batch: batch.index) if self._left else list(self._queue)

    def __len__(self) -> int:
        return len(self._left) + len(self._queue)

    def __getitem__(self, index: Any) -> Any:
        found = [getattr(batch, self._attribute) for batch in self._items()]
        return found[index]

    def _at(self, index: SupportsIndex | slice) -> BatchContext:
        if isinstance(index, slice):
            raise PipelineError(
                "one at a time", got=index, expected="an index", where="batches and contexts of a pipeline"
            )
        found: BatchContext = self._items()[index.__index__()]
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        batch = self._at(index)
        if self._is_batches:
            self._replace(batch, value)
        else:
            batch.given_context = value

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        batch = self._at(index)
        if batch in self._left:
            self._left.remove(batch)
        else:
            self._queue.remove(batch)
            self._removed["context" if self._is_batches else "batch"].append(batch)

    def insert(self, index: int, value: Any) -> None:
        """At the end: a batch that is on the device already, or the context of the first batch that lacks one.

        A context also where that batch stands, which is the end of the contexts that were put here by hand.
        """
        # Behind the last, as a deque has it, is the end too.
        at_end, lacking = index >= len(self), [batch for batch in self._queue if batch.given_context is None][:1]
        if self._is_batches and at_end:
            self._queue.append(self._make(value))
        elif not self._is_batches and lacking and (at_end or self._items()[index : index + 1] == lacking):
            lacking[0].given_context = value
        else:
            expected = "a batch at the end, or the context of one that lacks it"
            raise PipelineError(
                "batches come at the end, and contexts after them", got=index, expected=expected, where=self._attribute
            )

    def append(self, value: Any) -> None:
        """See ``insert``."""
        self.insert(len(self), value)

    def popleft(self) -> Any:
        """The first, which is removed."""
        found = self[0]
        del self[0]
        return found

    def clear(self) -> None:
        """Both queues are empty."""
        self._queue.clear()
        for left in self._removed.values():
            left.clear()

    def extend(self, values: Iterable[Any]) -> None:
        """See ``insert``."""
        for value in values:
            self.append(value)
