"""What a pipeline may be asked for: which arguments contradict, and which of torchrec's have no meaning here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from twinproof.errors import ConfigError

__all__ = ["LOOKUP_STREAMS", "NOT_CALLED", "Options", "Placed", "check_overrides", "check_placement", "refuse"]

LOOKUP_STREAMS = ("data_dist", "new", "current")

REASONS = {
    "apply_jit": "modules are not scripted: script the model's own before the pipeline is made",
    "free_features_storage_early": "a batch's storage is needed again after a loader's error, detach() or an edit",
    "clear_data_dist_inputs": "what an exchange was given is freed by itself when its lookup is over",
}

# What torchrec's progress() calls, or makes its forwards of, and ours has no place for.
NOT_CALLED = (
    "_connect",
    "_copy_batch_to_gpu",
    "_grad_swap",
    "_mlp_forward",
    "_mlp_optimizer_step",
    "_pipeline_model",
    "_pipelined_forward_type",
    "_progress_prefetch",
    "_set_module_context",
    "_validate_optimizer",
)


@dataclass(frozen=True)
class Placed:
    """Where lookups run: the stream, behind the start of the next exchange or not, and before the optimizer or not."""

    stream: str = "data_dist"
    after_dist: bool = False
    before_optimizer: bool = False


@dataclass(frozen=True)
class Options:
    """What all schedules understand; each class's constructor says which of it is asked for by which name.

    Attributes:
        sync_interval_batches: every how many batches a ``DMPCollection`` averages its replicas; None is never.
        enqueues_behind_forward: whether the last batch ahead is pulled behind the forward, not before it.
        copies_in_place: whether copies on the device are allocated by the caller's stream.
    """

    execute_all_batches: bool = True
    custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None
    process_group: Any = None
    engine: Any = None
    reduce_dense_gradients: bool | None = None
    context_type: Any = None
    pipeline_postproc: bool = False
    sync_interval_batches: int | None = None
    enqueues_behind_forward: bool = False
    copies_in_place: bool = False
    strict: bool = False
    placed: Placed = Placed()


def refuse(**given: bool) -> None:
    """Raises ConfigError, with the reason, for an argument of torchrec's that is asked for and has no meaning here."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: {REASONS[name]}", got=value, expected=False, where=name)


def check_overrides(kind: type) -> None:
    """Raises ConfigError for a subclass with methods of torchrec's pipelines that nothing here would call."""
    for each in kind.__mro__:
        if each.__module__.startswith(("refimpl.", "fastimpl.")):
            return
        overridden = [name for name in NOT_CALLED if name in vars(each)]
        if overridden:
            raise ConfigError("methods that no stage of this pipeline calls", got=overridden, where=each.__qualname__)


def check_placement(
    emb_lookup_stream: str,
    use_emb_lookup_stream: bool | None,
    after_dist: bool,
    before_optimizer: bool,
    after_opt: bool | None,
) -> Placed:
    """Where lookups run; two names of torchrec PR 2916 are taken too. Raises ConfigError for what contradicts."""
    if emb_lookup_stream not in LOOKUP_STREAMS:
        raise ConfigError("not a lookup stream", got=emb_lookup_stream, expected=LOOKUP_STREAMS)
    before = before_optimizer or after_opt is False
    if (before_optimizer and after_opt) or (before and after_dist):
        placements = {
            "embedding_lookup_before_optimizer": before_optimizer,
            "embedding_lookup_after_data_dist": after_dist,
            "embedding_lookup_after_opt": after_opt,
        }
        raise ConfigError("placements of the lookup that contradict", got=placements)
    if use_emb_lookup_stream is None:
        return Placed(emb_lookup_stream, after_dist, before)
    stream = "new" if use_emb_lookup_stream else "data_dist"
    # The default cannot be told from a stream that was asked for, any other can.
    if emb_lookup_stream not in ("data_dist", stream):
        streams = {"emb_lookup_stream": emb_lookup_stream, "use_emb_lookup_stream": use_emb_lookup_stream}
        raise ConfigError("lookup streams that contradict", got=streams)
    return Placed(stream, after_dist, before)
