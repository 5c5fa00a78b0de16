"""The constructors of the schedules of both implementations: torchrec's arguments in its positions, then ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from twinproof.errors import ConfigError
from twinproof.pipeline.schedules_base import PipelineBase
from twinproof.pipeline.schedules_options import Options, check_placement, refuse
from twinproof.pipeline.schedules_stages import In, Out

__all__ = [
    "BaseArguments",
    "EvalArguments",
    "EvalFusedArguments",
    "FusedArguments",
    "PrefetchArguments",
    "SemiSyncArguments",
    "SparseDistArguments",
]

Forward = Callable[[Any], tuple[torch.Tensor, Any]]
Device = torch.device | str


class BaseArguments(PipelineBase[In, Out]):
    """Of ``TrainPipelineBase``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
        *,
        execute_all_batches: bool = True,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine, reduce_dense_gradients)
        options = _with(options, sync_interval_batches=1, copies_in_place=enable_inplace_copy_batch)
        super().__init__(model, optimizer, device, options)


class SparseDistArguments(PipelineBase[In, Out]):
    """Of ``TrainPipelineSparseDist``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        refuse(
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine, reduce_dense_gradients)
        options = _with(
            options,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=dmp_collection_sync_interval_batches,
            enqueues_behind_forward=enqueue_batch_after_forward,
            copies_in_place=enable_inplace_copy_batch,
        )
        super().__init__(model, optimizer, device, options)


class FusedArguments(PipelineBase[In, Out]):
    """Of ``TrainPipelineFusedSparseDist``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        embedding_lookup_before_optimizer: bool = False,
        defer_dp_lookup: bool = False,
        use_emb_lookup_stream: bool | None = None,
        embedding_lookup_after_opt: bool | None = None,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        refuse(
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine, reduce_dense_gradients)
        options = _with(
            options,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=1,
            enqueues_behind_forward=enqueue_batch_after_forward,
            copies_in_place=enable_inplace_copy_batch,
            strict=strict,
            placed=check_placement(
                emb_lookup_stream,
                use_emb_lookup_stream,
                embedding_lookup_after_data_dist,
                embedding_lookup_before_optimizer,
                embedding_lookup_after_opt,
            ),
        )
        super().__init__(model, optimizer, device, options)


class SemiSyncArguments(PipelineBase[In, Out]):
    """Of ``TrainPipelineSemiSync``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        refuse(
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        self._start_batch, self._stashes = start_batch, stash_gradients
        self._stash: dict[torch.Tensor, torch.Tensor | None] | None = None
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine, reduce_dense_gradients)
        options = _with(
            options,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=dmp_collection_sync_interval_batches,
            copies_in_place=enable_inplace_copy_batch,
            strict=strict,
        )
        super().__init__(model, optimizer, device, options)


class PrefetchArguments(PipelineBase[In, Out]):
    """Of ``PrefetchTrainPipelineSparseDist``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        refuse(
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine, reduce_dense_gradients)
        options = _with(
            options,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=1,
            copies_in_place=enable_inplace_copy_batch,
        )
        super().__init__(model, optimizer, device, options)


class EvalArguments(PipelineBase[In, Out]):
    """Of ``EvalPipelineSparseDist``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device = "cpu",
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        execute_all_batches: bool = True,
        custom_model_fwd: Forward | None = None,
        process_group: Any = None,
        engine: Any = None,
    ) -> None:
        refuse(
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        options = Options(execute_all_batches, custom_model_fwd, process_group, engine)
        options = _with(options, pipeline_postproc=pipeline_postproc, copies_in_place=enable_inplace_copy_batch)
        super().__init__(model, optimizer, device, options)


class EvalFusedArguments(FusedArguments[In, Out]):
    """Of ``EvalPipelineFusedSparseDist``: torchrec hands all but the last to the training pipeline."""

    def __init__(self, *args: Any, enable_embedding_lookup_prefetch: bool = False, **options: Any) -> None:
        self._prefetches = enable_embedding_lookup_prefetch
        for name in ("embedding_lookup_before_optimizer", "reduce_dense_gradients"):
            if options.get(name):
                raise ConfigError("an evaluation has no optimizer", got=options[name], where=name)
        super().__init__(*args, **options)


def _with(options: Options, **given: Any) -> Options:
    return dataclasses.replace(options, **given)
