"""The loop that people write, behind our names: every state to the CPU and back, tensor by tensor, around each step.

Ours, as the peer that always runs. Copies block, every one has fresh memory, nothing is planned and nothing checked;
what it lacks stays a TypeError or an AttributeError, and what a loop forgets stays forgotten.
"""

from __future__ import annotations

from typing import Any

import torch

from twinproof.engine import InlineEngine
from twinproof.offload.offloader import Residency
from twinproof.offload.states import copied

__all__ = ["CAPABILITIES", "NEEDS", "offload"]

CAPABILITIES: frozenset[str] = frozenset()
# What has to be importable for this adapter to run: nothing but torch.
NEEDS: tuple[str, ...] = ()


class _Offloader:
    def __init__(self, optimizer: Any, *, engine: Any = None, chunk_bytes: int = 0, slots: int = 1) -> None:
        self.optimizer, self.engine = optimizer, InlineEngine() if engine is None else engine
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._each(self._to_device)),
            optimizer.register_step_post_hook(lambda *_: self.offload()),
            optimizer.register_load_state_dict_post_hook(lambda _: self.offload()),
        ]
        self.offload()

    def _each(self, move: Any) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                # A counter stays: on the device it would be read by the host, once for each parameter.
                if torch.is_tensor(value) and value.dim() > 0:
                    state[name] = move(value)

    def _copied(self, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        flat = memory.view(value.dtype)
        there = flat.as_strided(value.shape, value.stride(), flat.storage_offset())
        self.engine.copy(there, value)
        event = self.engine.event()
        self.engine.record(event, self.engine.current())
        self.engine.synchronize(event)
        return there

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        return self._copied(value, self.engine.device_empty(value.nbytes))

    def offload(self) -> None:
        """The loop."""
        self._each(lambda value: self._copied(value, self.engine.host_empty(value.nbytes)))

    def prefetch(self) -> None:
        """Nothing is known before the step."""

    def settle(self) -> None:
        """Every copy has been waited for."""

    def residency(self) -> Residency:
        """What the engine takes for memory of the device."""
        values = [
            v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()
        ]
        here = sum(value.nbytes for value in values if self.engine.holds(value))
        return Residency(here, sum(value.nbytes for value in values) - here)

    def snapshot(self) -> Any:
        return copied(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def close(self) -> None:
        self._each(self._to_device)
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class offload:
    """The component."""

    OptimizerStateOffloader = _Offloader
