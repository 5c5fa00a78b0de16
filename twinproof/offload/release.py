"""What was copied to the host and still lies on the device, until its memory is let go.

Prevents a tensor that is written after its copy from being lost: what changed is copied again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twinproof.offload.states import Bundle, bindings

__all__ = ["Leaving"]


class Leaving:
    """Tensors that were copied out, and their versions then; see ``OffloaderBase.release_gpu_memory``."""

    def __init__(self) -> None:
        self._noted: dict[tuple[torch.Tensor, str], tuple[torch.Tensor, int]] = {}

    def clear(self) -> None:
        """Nothing is to go: it is about to be used on the device."""
        self._noted.clear()

    def note(self, offloader: Any, only: Callable[[Bundle, str], bool]) -> None:
        """What is on the device now and is about to be copied."""
        for bundle in offloader.bundles:
            for name, tensor in bindings(offloader.optimizer, bundle):
                if only(bundle, name) and not offloader.is_on_host(tensor):
                    self._noted[bundle.param, name] = (tensor, tensor._version)

    def release(self, offloader: Any) -> None:
        """Bind what was copied to the host."""
        noted, self._noted = self._noted, {}
        changed: set[tuple[torch.Tensor, str]] = set()
        copied_out: set[tuple[torch.Tensor, str]] = set()
        for bundle in offloader.bundles:
            for name, tensor in bindings(offloader.optimizer, bundle):
                copied = noted.get((bundle.param, name))
                if copied is not None:
                    is_same = copied[0].data_ptr() == tensor.data_ptr() and copied[1] == tensor._version
                    (copied_out if is_same else changed).add((bundle.param, name))
        bundles = offloader.bundles
        offloader.to_host(bundles, only=lambda bundle, name: (bundle.param, name) in copied_out, copies=False)
        if changed:
            offloader.to_host(bundles, only=lambda bundle, name: (bundle.param, name) in changed)
