"""What torchrec's own models and hooks ask of a pipeline that drives them; nothing of torchrec is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from twinproof.errors import ConfigError, PipelineError
from twinproof.pipeline.stages import Call, unwrapped

__all__ = ["TorchrecModels"]


class TorchrecModels:
    """The stages of a pipeline that only models of torchrec have a part in."""

    _model: torch.nn.Module
    _current: Any
    calls: list[Call]

    @property
    def _pipelined_modules(self) -> list[Any]:
        return [call.module for call in self.calls]

    @property
    def _pipelined_postprocs(self) -> list[Any]:
        return list({name: module for call in self.calls for name, module in call.postprocs.items()}.values())

    def sync_embeddings(self, model: Any, interval_batches: int | None, context: Any = None) -> None:
        """Average a ``DMPCollection``'s replicas every so many batches; without a context the step's batch counts."""
        # By name and by class: a place without torchrec has no such model, and a mock of one has its class.
        is_collection = any(kind.__name__ == "DMPCollection" for kind in model.__class__.__mro__)
        if is_collection and interval_batches is not None:
            counted = self._current if context is None else context
            if counted is None:
                raise PipelineError("outside of a step a context says which batch", got=None, where="sync_embeddings")
            if counted.index % interval_batches == 0:
                model.sync()

    def register_backward_hook(self, site: Any, work: Callable[[Any], None]) -> None:
        """Call ``work(pipeline)`` in each backward when the gradient that torchrec's ``InjectionSite`` names is there.

        Raises:
            ConfigError: a site that is not torchrec's.
        """
        injection: Any = sys.modules.get("torchrec.distributed.train_pipeline.backward_injection")
        if injection is None or not isinstance(site, injection.InjectionSite):
            raise ConfigError("not one of torchrec's injection sites", got=type(site), where="register_backward_hook")
        injection.register_backward_hook(site, unwrapped(self._model), lambda grad: work(self))
