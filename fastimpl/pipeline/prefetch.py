"""Rows of key-value tables that are read before their lookup, and are never stale."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.lookups import KeyValueBags

__all__ = ["Prefetched", "PrefetchedBags", "prefetch"]


class _Moment:
    """The number of the last change of a store whose effect on prefetched rows is known."""

    def __init__(self, store: Any) -> None:
        self.store, self.mark = store, store.mark()

    def is_now(self) -> bool:
        """Whether the store has not changed since."""
        found: bool = self.store.mark() == self.mark
        return found


class Prefetched:
    """Rows, in the store's dtype [n, D], of one batch's ids [n] in one table, as they were at a moment."""

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, moment: _Moment) -> None:
        self.ids, self.rows, self.moment = ids, rows, moment


class PrefetchedBags(KeyValueBags):
    """``KeyValueBags`` that take rows which were read ahead, for one batch at a time.

    A store numbers its changes. The table's own update is followed by a second look at the rows that both batches
    have; after any other change the rows are read again when they are looked up.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: weakref.ref[Prefetched] | None = None

    def _ahead(self) -> Prefetched | None:
        return None if self._held is None else self._held()

    def prefetch(self, bags: Bags, moment: _Moment) -> Prefetched:
        """Read a batch's rows; they belong to the caller."""
        found = Prefetched(bags.indices, super()._rows(bags), moment)
        self._held = weakref.ref(found)
        return found

    def _rows(self, bags: Bags) -> torch.Tensor:
        ahead = self._ahead()
        if ahead is None or ahead.ids is not bags.indices:
            return super()._rows(bags)
        self._held = None
        return ahead.rows if ahead.moment.is_now() else super()._rows(bags)

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        ahead = self._ahead()
        known = ahead is not None and ahead.moment.is_now()
        super()._step(bags, grad)
        # One change more is this update's; a second would be somebody else's, to rows that are not known here.
        if ahead is not None and known and self.store.mark() == ahead.moment.mark + 1:
            shared = torch.isin(ahead.ids, bags.indices).nonzero()[:, 0]
            if shared.numel():
                ahead.rows[shared] = self.store.get(self.table.name, ahead.ids[shared]).to(torch.float32)
            ahead.moment.mark += 1


def prefetch(modules: Iterable[Any], dist_input: Iterable[Bags]) -> list[Prefetched]:
    """Read ahead the rows of every key-value table among the lookups; tables of one store share its moment."""
    moments: dict[int, _Moment] = {}
    found = []
    for module, bags in zip(modules, dist_input, strict=True):
        if isinstance(module, PrefetchedBags):
            moment = moments.setdefault(id(module.store), _Moment(module.store))
            found.append(module.prefetch(bags, moment))
    return found
