"""Where parameters are listed in an optimizer's groups, kept from step to step as long as the lists are the same.

Prevents a walk through all groups, with a hash of every parameter, for each step and each chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

__all__ = ["GroupPositions"]

# By group: its number, and positions of parameters in it.
Places = list[tuple[int, list[int]]]


class GroupPositions:
    """Positions of parameters, by group.

    Attributes:
        resident: listed parameters that are not among those that move.
    """

    def __init__(self) -> None:
        self.resident: set[torch.Tensor] = set()
        # What is known by its id is held, so that nothing else can have it: parameters as keys, lists as they are.
        self._at: dict[torch.Tensor, list[tuple[int, int]]] = {}
        self._ids: list[list[int]] = []
        self._moving: list[Sequence[torch.Tensor]] = []
        self._places: dict[int, Places] = {}

    def refresh(self, groups: Sequence[dict[str, Any]], moving: Sequence[Sequence[torch.Tensor]]) -> None:
        """Look whether the lists are as they were. ``moving``: lists that are other objects when they change."""
        ids = [list(map(id, group["params"])) for group in groups]
        if ids == self._ids and list(map(id, moving)) == list(map(id, self._moving)):
            return
        self._at, self._ids, self._moving, self._places = {}, ids, list(moving), {}
        for number, group in enumerate(groups):
            for i, param in enumerate(group["params"]):
                self._at.setdefault(param, []).append((number, i))
        self.resident = self._at.keys() - {param for params in moving for param in params}

    def places(self, params: Collection[torch.Tensor]) -> Places:
        """Of ``resident``, or one of ``moving``, remembered for it; parameters that are listed no more have none."""
        found = self._places.get(id(params))
        if found is None:
            wanted = sorted(at for param in params for at in self._at.get(param, ()))
            found = [(number, [i for _, i in some]) for number, some in groupby(wanted, key=itemgetter(0))]
            self._places[id(params)] = found
        return found
