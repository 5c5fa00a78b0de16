"""Everything of a chunk in one list, planned once: one look tells where all of it is, and one copy moves it.

Prevents work in Python for every tensor of a move, which for small ones takes longer than the move: views of a block
are made by the run, addresses are compared as lists, and what lies on the device as it lies in host memory is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from fastimpl.regimes import regime
from twinproof.offload.states import MASTER, Bundle, is_movable, local_of, rebind

__all__ = ["BoundTensors", "ChunkLayout"]

# Larger tensors than this, on average, get memory of their own on the device: there the copies are what takes time.
_SMALL_BYTES = regime(1 << 18, 512)

_DTYPE = attrgetter("dtype")

_Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class BoundTensors:
    """What is bound now: the state of each parameter, each tensor and its address. ``is_wrapped``: perhaps DTensors."""

    states: list[dict[str, Any]]
    tensors: list[torch.Tensor]
    addresses: list[int]
    is_wrapped: bool


@dataclass
class _Run:
    """Places of one form that lie ``pitch_bytes`` apart, by their numbers in the layout."""

    form: _Form
    begin: int
    pitch_bytes: int = 0
    numbers: list[int] = field(default_factory=list)

    def add(self, number: int, begin: int) -> bool:
        """Take the next place in, if it is one of the run; the second place decides on the pitch."""
        gap = begin - self.begin
        if len(self.numbers) == 1:
            # Whole elements, as every place is aligned.
            self.pitch_bytes = gap
        if gap != len(self.numbers) * self.pitch_bytes:
            return False
        self.numbers.append(number)
        return True

    def views(self, block: torch.Tensor, *, counted: bool) -> Sequence[torch.Tensor]:
        """All of them in a block of uint8, in one call; ``counted``: writes to them count in the block's version."""
        dtype, shape, strides = self.form
        count, pitch = len(self.numbers), self.pitch_bytes // dtype.itemsize
        values = block.view(dtype)
        first = values.storage_offset() + self.begin // dtype.itemsize
        if count > 1 and not counted and pitch == shape[0] * strides[0]:
            # One behind the other without padding: rows of one tensor, which split fastest.
            rows = values.as_strided((count * shape[0], *shape[1:]), strides, first)
            return rows.unsafe_split_with_sizes([shape[0]] * count)
        found: Sequence[torch.Tensor] = values.as_strided((count, *shape), (pitch, *strides), first).unbind()
        return found


class ChunkLayout:
    """The places of a chunk's bundles.

    Args:
        bundles: at least one, laid out one behind the other, from byte ``begin`` of a block on.
        host: their part of the block, uint8.
        begin: see above.

    Attributes:
        here: a block of the device in which everything lies as it does in ``host``; None when there is none, or when
            it is not known to be whole. Only views of this layout's making are bound to it.
        params: of the bundles.
        payload_bytes: of all tensors.
    """

    def __init__(self, bundles: Sequence[Bundle], host: torch.Tensor, begin: int) -> None:
        self.here: torch.Tensor | None = None
        self._bundles, self._host = list(bundles), host
        self.params = [bundle.param for bundle in bundles]
        self._names = [list(bundle.places) for bundle in bundles]
        places = [
            (bundle.offset_bytes - begin + place.offset_bytes, place)
            for bundle in bundles
            for place in bundle.places.values()
        ]
        self._begins = [at for at, _ in places]
        self._kinds = {name for names in self._names for name in names}
        # The usual case, for which loops of the interpreter's own do: all have the same states, and no master moves.
        is_even = MASTER not in self._kinds and all(names == self._names[0] for names in self._names)
        self._even = self._names[0] if is_even else []
        self._runs: list[_Run] = []
        open_runs: dict[_Form, _Run] = {}
        for number, (at, place) in enumerate(places):
            form = (place.dtype, place.shape, place.strides)
            if form not in open_runs or not open_runs[form].add(number, at):
                open_runs[form] = _Run(form, at, numbers=[number])
                self._runs.append(open_runs[form])
        self.payload_bytes = sum(place.size_bytes for _, place in places)
        self.is_small = self.payload_bytes <= _SMALL_BYTES * len(places)
        # Prefetching looks at the version of host memory, so that what the user writes there counts.
        self._homes = self.views(host, counted=True)
        self._home_addresses = list(map(torch.Tensor.data_ptr, self._homes))
        self._sizes = list(map(torch.Tensor.size, self._homes))
        self._strides = list(map(torch.Tensor.stride, self._homes))
        self._dtypes = list(map(_DTYPE, self._homes))
        self._has_complex = any(dtype.is_complex for dtype in set(self._dtypes))

    @torch.no_grad()
    def views(self, block: torch.Tensor, *, counted: bool = False) -> Sequence[torch.Tensor]:
        """Each tensor in a block of the size of ``host``; see ``_Run.views``."""
        if len(self._runs) == 1:
            # All of one form: in the order of the layout already.
            return self._runs[0].views(block, counted=counted)
        found: list[Any] = [None] * len(self._begins)
        for run in self._runs:
            for number, view in zip(run.numbers, run.views(block, counted=counted), strict=True):
                found[number] = view
        return found

    def look(self, optimizer: Optimizer) -> BoundTensors | None:
        """What is bound now; None when something does not exist, or is no tensor."""
        states: list[Any] = list(map(optimizer.state.get, self.params))
        try:
            if len(self._even) > 1:
                found = list(chain.from_iterable(map(itemgetter(*self._even), states)))
            else:
                rows = zip(states, self.params, self._names, strict=True)
                found = [state[name] if name != MASTER else param for state, param, names in rows for name in names]
        except (KeyError, TypeError):
            return None
        kinds = set(map(type, found))
        if not all(issubclass(kind, torch.Tensor) for kind in kinds):
            return None
        is_wrapped = not kinds <= {torch.Tensor, torch.nn.Parameter}
        tensors = [local_of(tensor) for tensor in found] if is_wrapped else found
        return BoundTensors(states, tensors, list(map(torch.Tensor.data_ptr, tensors)), is_wrapped)

    def is_home(self, bound: BoundTensors) -> bool:
        """Whether everything lies at its place in host memory."""
        return bound.addresses == self._home_addresses

    def is_tidy(self, bound: BoundTensors) -> bool:
        """Whether everything has its place in one block, in host memory or ``here``, and the form that it has there."""
        is_in_place = self.is_home(bound) or self.is_here(bound)
        return is_in_place and self._are_read_as_planned(bound.tensors)

    def is_intact(self) -> bool:
        """Whether the views that are bound are what was planned: users have them, and may give them other memory."""
        is_there = list(map(torch.Tensor.data_ptr, self._homes)) == self._home_addresses
        return is_there and self._are_read_as_planned(self._homes)

    def _are_read_as_planned(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all have the forms of their places: a state's transpose begins where the state does."""
        # One by one: lists of tuples, which are many, would have the interpreter collect garbage.
        return (
            list(map(_DTYPE, tensors)) == self._dtypes
            and all(map(eq, map(torch.Tensor.size, tensors), self._sizes))
            and all(map(eq, map(torch.Tensor.stride, tensors), self._strides))
            and not (self._has_complex and any(map(torch.Tensor.is_conj, tensors)))
        )

    def is_here(self, bound: BoundTensors) -> bool:
        """Whether everything lies at its place in ``here``; the block lives, so nothing else has these addresses."""
        return self.here is not None and self.is_in(bound, self.here)

    def is_in(self, bound: BoundTensors, block: torch.Tensor) -> bool:
        """Whether everything lies in a block of uint8 as it lies in host memory."""
        base = block.data_ptr()
        return bound.addresses == [base + begin for begin in self._begins]

    def has_others(self, bound: BoundTensors) -> bool:
        """Whether there are states that would have to move and have no place."""
        states = [state for state in bound.states if state]
        # In the order of the states, which is the same in each process; a set's is not.
        for name in dict.fromkeys(chain.from_iterable(states)):
            if name in self._kinds:
                continue
            values = [state[name] for state in states if name in state]
            if set(map(type, values)) == {torch.Tensor} and not any(map(torch.Tensor.dim, values)):
                continue  # Counters, which are many: told in one go.
            if any(map(is_movable, values)):
                return True
        return False

    def bind(self, optimizer: Optimizer, bound: BoundTensors, views: Sequence[torch.Tensor] | None = None) -> None:
        """Bind everything to views; None: to host memory, whose views were made once."""
        views = self._homes if views is None else views
        if bound.is_wrapped or MASTER in self._kinds:
            names = [(bundle, name) for bundle, some in zip(self._bundles, self._names, strict=True) for name in some]
            for (bundle, name), view in zip(names, views, strict=True):
                rebind(optimizer, bundle, name, view)
            return
        for at, name in enumerate(self._even):
            for state, view in zip(bound.states, views[at :: len(self._even)], strict=True):
                state[name] = view
        if self._even:
            return
        number = 0
        for state, some in zip(bound.states, self._names, strict=True):
            for name in some:
                state[name] = views[number]
                number += 1
