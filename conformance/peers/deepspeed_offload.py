"""DeepSpeed's CPU Adam behind our names: ``--twinproof-impl conformance.peers.deepspeed_offload``, steps on the CPU.

Only the arithmetic is DeepSpeed's: the engine around it, which copies gradients down and weights up, is not part of
the package's optimizer, so that parameters have to be where it steps. It compiles its operator when it is first made.
"""

from __future__ import annotations

import importlib
from types import MethodType
from typing import Any

import torch

from twinproof.offload.states import copied

__all__ = ["CAPABILITIES", "NEEDS", "offload"]

CAPABILITIES: frozenset[str] = frozenset()
NEEDS = ("deepspeed.ops.adam", "ninja")


def probe() -> None:
    """Compile the operator, which takes a minute the first time."""
    importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()


class _Offloader:
    def __init__(
        self,
        optimizer: Any,
        *,
        step_device: str,
        master_weights: None = None,
        engine: Any = None,
        chunk_bytes: int = 0,
        slots: int = 1,
    ) -> None:
        kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        self.optimizer = optimizer
        options = {"adamw_mode": isinstance(optimizer, torch.optim.AdamW)}
        if master_weights is not None or step_device != "cpu":
            raise TypeError("DeepSpeedCPUAdam has no masters, and steps on the CPU only")
        self.peer = kind([dict(group) for group in optimizer.param_groups], **options)
        # States and groups are torch's in form, so that the two can share them.
        self.peer.state = optimizer.state
        optimizer.step = MethodType(lambda _, closure=None: self._step(closure), optimizer)

    def _step(self, closure: Any = None) -> Any:
        for mine, theirs in zip(self.peer.param_groups, self.optimizer.param_groups, strict=True):
            mine.update(theirs)
        return self.peer.step(closure)

    def settle(self) -> None:
        """Nothing is on its way."""

    def snapshot(self) -> Any:
        return copied(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        self.peer.load_state_dict({**state_dict, "param_groups": self.peer.state_dict()["param_groups"]})

    def close(self) -> None:
        self.optimizer.__dict__.pop("step", None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class offload:
    """The component."""

    OptimizerStateOffloader = _Offloader
