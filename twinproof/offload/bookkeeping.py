"""Which tensors an offloader moves as parameters, options and states come and go; and what an implementation says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.offload.masters import MasterWeights
from twinproof.offload.states import (
    MASTER,
    Bundle,
    check_separate,
    chunks_of,
    expected_states,
    is_movable,
    local_of,
    make_bundle,
    options_on,
    select,
)
from twinproof.offload.verbs import MegatronVerbs

__all__ = ["Bookkeeping", "Wanted"]

Wanted = Callable[[Bundle, str], bool]


class Bookkeeping(MegatronVerbs):
    """The plan of what moves; ``OffloaderBase`` has the constructor and the verbs."""

    optimizer: Optimizer
    masters: MasterWeights | None
    fraction: float
    chunk_bytes: int
    is_separable: bool
    release_stage: str
    bundles: list[Bundle]
    _foreseen: dict[torch.Tensor, dict[str, torch.Tensor]]
    _flags: dict[int, dict[str, bool]]
    _known: set[torch.Tensor]
    _kept_masters: set[torch.Tensor]
    _listed_count: int

    # What an implementation says.

    def default_engine(self, device: torch.device) -> Any:
        """The engine of a device."""
        raise NotImplementedError

    def step(self, arithmetic: Callable[[], None]) -> None:
        """One logical step: everything that was selected is on the device while ``arithmetic`` runs on it."""
        raise NotImplementedError

    def to_host(
        self, bundles: Iterable[Bundle], *, only: Wanted | None = None, copies: bool = True, binds: bool = True
    ) -> None:
        """Move what is on the device to the host and bind it there; nothing for what is there already.

        ``only``: whether a name of a bundle is meant; None: all. ``binds=False``: copy, and leave the binding.
        ``copies=False``: bind, where a copy was made before.
        """
        raise NotImplementedError

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Move what is on the host to the device and bind it there; ``for_good``: each in memory of its own."""
        raise NotImplementedError

    def send_as_planned(self) -> bool:
        """Do all that ``offload`` does, if everything is where the plan knows it; False, and nothing done, if not."""
        return False

    def settle(self) -> None:
        """Wait until host memory holds what it is to hold."""
        raise NotImplementedError

    def settle_for_writing(self) -> None:
        """Wait until the host may write to its memory: nothing reads it any more either."""
        self.settle()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a local tensor lies in this offloader's host memory."""
        raise NotImplementedError

    def place(self, bundles: list[Bundle]) -> list[Bundle]:
        """Give bundles their host memory."""
        raise NotImplementedError

    def unplace(self, bundle: Bundle) -> None:
        """Bring a bundle to the device and forget its host memory."""
        raise NotImplementedError

    def release(self) -> None:
        """Let all host memory go; nothing is bound to it any more."""
        raise NotImplementedError

    # The plan.

    def _adopt_params(self) -> None:
        """Plan for parameters and options that were not there before: after ``add_param_group`` or a load."""
        new: list[Bundle] = []
        found: set[torch.Tensor] = set()  # A parameter may be listed twice.
        turned = False
        for number, group in enumerate(self.optimizer.param_groups):
            flags = options_on(group)
            is_turned, self._flags[number] = self._flags.get(number, flags) != flags, flags
            turned |= is_turned
            for param in group["params"]:
                is_known = param in self._known or param in found
                if is_known and not is_turned:
                    continue
                tensors = self.foresee(param, group)
                if is_known:
                    continue
                found.add(param)
                if self._is_master(param):
                    tensors = {MASTER: local_of(param.detach()), **tensors}
                # Of an unknown optimizer nothing is foreseen: a parameter without a place gets one with its states.
                if tensors or (not self.is_separable and local_of(param).numel()):
                    new.append(make_bundle(param, tensors))
        listed_count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if found or listed_count != self._listed_count:
            self._forget_unlisted()
            self._listed_count = listed_count
        self.bundles += self.place(select(new, self.fraction))
        self._known.update(found)
        if turned:
            self._refit()

    def _forget_unlisted(self) -> None:
        """Give what was taken out of its group back to the device, where its state is the user's."""
        listed = {param for group in self.optimizer.param_groups for param in group["params"]}
        gone = [bundle for bundle in self.bundles if bundle.param not in listed]
        self.bundles = [bundle for bundle in self.bundles if bundle.param in listed]
        for bundle in gone:
            self.unplace(bundle)
        self._known &= listed

    def _refit(self) -> None:
        """Make new places for states that a load gave another dtype, shape or name than was foreseen, or took away."""
        wrong: dict[int, Bundle] = {}
        for number, bundle in enumerate(self.bundles):
            state = self.optimizer.state.get(bundle.param, {})
            if not self.is_separable:
                check_separate(bundle.param, state, number)
            found = {name: local_of(value) for name, value in state.items() if is_movable(value)}
            strangers = [
                name
                for name, tensor in found.items()
                if not self.is_on_host(tensor) and (name not in bundle.places or not bundle.places[name].fits(tensor))
            ]
            foreseen = self._foreseen[bundle.param]
            kept = {name for name in bundle.places if name == MASTER or name in foreseen or name in found}
            if strangers or len(kept) < len(bundle.places) or not foreseen.keys() <= kept:
                placed = {name: bundle.places[name].as_meta() for name in bundle.places if name in kept}
                wrong[number] = make_bundle(bundle.param, {**placed, **foreseen, **placed, **found})
        # As many at a time as a chunk holds: what lies there and stays, a master for instance, passes the device.
        for some in chunks_of(wrong.values(), self.chunk_bytes):
            ids = set(map(id, some))
            for number in [number for number, bundle in wrong.items() if id(bundle) in ids]:
                self.unplace(self.bundles[number])
                self.bundles[number] = wrong[number]
            self.place(some)
            if self.release_stage == "at_offload":
                self.to_host(some)

    def _is_master(self, param: torch.Tensor) -> bool:
        is_ours = self.masters is not None and self.masters.pairs.get(param, param) is not param
        return is_ours or param in self._kept_masters

    def foreseen(self, param: torch.Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the states that a step makes for a parameter."""
        return {name: tuple(tensor.shape) for name, tensor in self._foreseen[param].items()}

    def foresee(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The states that a step will make for a parameter, as meta tensors, remembered."""
        self._foreseen[param] = expected_states(self.optimizer, param, group) if local_of(param).numel() else {}
        return self._foreseen[param]
