"""What is in flight, as subclasses of torchrec's pipelines know it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any, SupportsIndex

from twinproof.errors import PipelineError
from twinproof.references import weakly

__all__ = ["QueueView"]


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
            raise PipelineError("one at a time", got=index, where="batches and contexts of a pipeline")
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
            raise PipelineError("only batches, then their contexts, at the end", got=index, where=self._attribute)

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
