"""Megatron's verbs (facts/offload.md 1.1), for loops that call them; a step needs none of them. And ``with``."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

__all__ = ["MegatronVerbs"]

_Self = TypeVar("_Self", bound="MegatronVerbs")


class MegatronVerbs:
    """The names of Megatron's offloaders, in terms of ours."""

    def offload(
        self,
        states: bool = True,
        masters: bool = True,
        *,
        offload_optimizer_states: bool | None = None,
        offload_master_weights: bool | None = None,
    ) -> None:
        """See ``OffloaderBase``."""
        raise NotImplementedError

    def prefetch(self) -> None:
        """See ``OffloaderBase``."""
        raise NotImplementedError

    def close(self) -> None:
        """See ``OffloaderBase``."""
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reload(self) -> None:
        """``prefetch``."""
        self.prefetch()

    def offload_states(self) -> None:
        """``offload``."""
        self.offload()

    def reload_offloaded_states(self) -> None:
        """``prefetch``."""
        self.prefetch()

    def release_gpu_memory(self) -> None:
        """See ``OffloaderBase``."""
        raise NotImplementedError

    def release_offloaded_gpu_states(self) -> None:
        """``release_gpu_memory``."""
        self.release_gpu_memory()

    def sync_before_step(self) -> None:
        """Nothing to wait for: a step orders itself."""
        self._check_open()

    def mark_optimizer_states_initialized(self) -> None:
        """Nothing to mark: states are taken over as they appear."""
        self._check_open()
