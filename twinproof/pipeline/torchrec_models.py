"""What torchrec's models, hooks and subclasses of its pipelines ask of ours; nothing of torchrec is imported."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any, SupportsIndex

import torch

from twinproof.engine import weakly
from twinproof.errors import ConfigError, PipelineError
from twinproof.pipeline.stages import Call, unwrapped

__all__ = ["QueueView", "TorchrecModels"]


class TorchrecModels:
    """The stages of a pipeline that only models of torchrec have a part in."""

    _model: torch.nn.Module
    _current: Any
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
        PipelineError: an insertion other than at the end.
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

    def __setitem__(self, index: Any, value: Any) -> None:
        batch = self._items()[index]
        if self._is_batches:
            self._replace(batch, value)
        else:
            batch.given_context = value

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if isinstance(index, slice):
            raise PipelineError(
                "one at a time", got=index, expected="an index", where="batches and contexts of a pipeline"
            )
        batch = self._items()[index.__index__()]
        if batch in self._left:
            self._left.remove(batch)
        else:
            self._queue.remove(batch)
            self._removed["context" if self._is_batches else "batch"].append(batch)

    def insert(self, index: int, value: Any) -> None:
        """At the end: a batch that is on the device already, or the context of the first batch that lacks one."""
        lacking = [batch for batch in self._queue if batch.given_context is None]
        if self._is_batches and index == len(self):
            self._queue.append(self._make(value))
        elif lacking and not self._is_batches:
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
