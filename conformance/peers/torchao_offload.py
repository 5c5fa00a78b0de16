"""torchao's ``CPUOffloadOptimizer`` behind our names: ``--twinproof-impl conformance.peers.torchao_offload``.

It makes an optimizer for each parameter of the host's copies. Without an accelerator its own code runs with streams
that carry out at once and memory that is not pinned: its values are under test here, its order is not.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from twinproof.offload.offloader import Residency
from twinproof.offload.states import copied

__all__ = ["CAPABILITIES", "NEEDS", "offload"]

CAPABILITIES: frozenset[str] = frozenset()
NEEDS = ("torchao.optim",)


class _AtOnce:
    """``torch``, whose ``cuda`` has streams that are never behind; nothing is pinned."""

    _stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    _stream.record_event = lambda: SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        Stream=lambda: _AtOnce._stream, current_stream=lambda: _AtOnce._stream, stream=lambda _: nullcontext()
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: torch.Tensor, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        return torch.empty_like(tensor, **options)


def _standing_in() -> AbstractContextManager[Any]:
    if torch.cuda.is_available():
        return nullcontext()
    module = importlib.import_module("torchao.optim.cpu_offload")
    return mock.patch.multiple(module, torch=_AtOnce(), get_available_devices=lambda: ["cpu", "cuda"])


class _Offloader:
    def __init__(self, optimizer: Any, *, engine: Any = None, chunk_bytes: int = 0, slots: int = 1) -> None:
        self.optimizer, kind = optimizer, importlib.import_module("torchao.optim").CPUOffloadOptimizer
        known = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        groups = [dict(group) for group in optimizer.param_groups]
        with _standing_in():
            self.peer = kind(groups, type(optimizer), minimal_size=0, **options)
        optimizer.step = MethodType(lambda _, closure=None: self._step(closure), optimizer)

    def _step(self, closure: Any = None) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                # Its users write options to its own groups, one for each parameter.
                options = {name: value for name, value in group.items() if name != "params"}
                self.peer.optim_dict[param].param_groups[0].update(options)
        with _standing_in():
            return self.peer.step(lambda: self._announced(closure))

    def _announced(self, closure: Any) -> Any:
        loss = None if closure is None else closure()
        for param in self.peer.optim_dict:
            # Gradients that were set by hand: a backward pass would have said so.
            for hook in (param._post_accumulate_grad_hooks or {}).values() if param.grad is not None else ():
                hook(param)
        return loss

    def offload(self) -> None:
        """States never leave the host."""

    prefetch = settle = offload

    def residency(self) -> Residency:
        """The same."""
        return Residency(
            0, sum(v.nbytes for o in self.peer.optim_dict.values() for s in o.state.values() for v in s.values())
        )

    def snapshot(self) -> Any:
        states = enumerate(self.peer.state_dict()["offloaded"])
        state = {number: one["state"][0] for number, one in states if one["state"]}
        return copied({**self.optimizer.state_dict(), "state": state})

    def load_state_dict(self, state_dict: Any) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = zip(numbers, self.peer.state_dict()["offloaded"], strict=False)
        self.peer.load_state_dict({"offloaded": [{**one, "state": {0: state_dict["state"][n]}} for n, one in own]})

    def close(self) -> None:
        self.optimizer.__dict__.pop("step", None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class offload:
    """The component."""

    OptimizerStateOffloader = _Offloader
