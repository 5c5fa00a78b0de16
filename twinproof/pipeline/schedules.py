"""The training pipelines under torchrec's names: torchrec's arguments in torchrec's positions, then ours.

What a schedule overlaps is the implementation's: each class is bound to the stages of an implementation, and to a
schedule, which is a function that issues them for one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from twinproof.errors import ConfigError
from twinproof.pipeline.driver import In, LookupPipeline, Out, Pipeline
from twinproof.pipeline.stages import BatchContext, Options, Placed, check_placement, cut_off

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]

Forward = Callable[[Any], tuple[torch.Tensor, Any]]
Device = torch.device | str


class TrainPipelineBase(Pipeline[In, Out]):
    """Nothing overlaps but the copy of the next batch. Arguments, promises and errors: see ``Pipeline``."""

    ahead_count = 1

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
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            reduce_dense_gradients,
            sync_interval_batches=1,
            copies_in_place=enable_inplace_copy_batch,
        )
        super().__init__(model, optimizer, device, options)


class TrainPipelineSparseDist(Pipeline[In, Out]):
    """The exchange of ids overlaps the step before. Arguments, promises and errors: see ``Pipeline``."""

    ahead_count = 2

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
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            reduce_dense_gradients,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=dmp_collection_sync_interval_batches,
            enqueues_behind_forward=enqueue_batch_after_forward,
            copies_in_place=enable_inplace_copy_batch,
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(model, optimizer, device, options)


class PrefetchTrainPipelineSparseDist(Pipeline[In, Out]):
    """As ``TrainPipelineSparseDist``, with the rows of key-value tables read while the step before runs.

    torchrec's prefetches into a cache on the device; rows that the step before updates are read again here, so that
    nothing is stale. Arguments, promises and errors: see ``Pipeline``.
    """

    ahead_count = 2

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
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            reduce_dense_gradients,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=1,
            copies_in_place=enable_inplace_copy_batch,
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(model, optimizer, device, options)


class TrainPipelineFusedSparseDist(LookupPipeline[In, Out]):
    """The lookup, too, overlaps the dense optimizer of the step before (torchrec PR 2916).

    Args of its own, which move work and never change a result:
        emb_lookup_stream: "data_dist", "new" or "current". ``use_emb_lookup_stream`` is the PR's name for "new".
        embedding_lookup_after_data_dist: look up behind the start of the next batch's exchange.
        embedding_lookup_before_optimizer: look the next batch up before the dense optimizer; modules whose parameters
            the optimizer updates are looked up behind it. ``embedding_lookup_after_opt=False`` is the PR's name.
        defer_dp_lookup: what the optimizer updates is always looked up behind it; both values are the same here.
        emb_lookup_stream_priority: of the stream that "new" makes, as ``priority`` of ``torch.cuda.Stream``: below 0
            its kernels go first, where the device has room for one of several. 0, as every other stream has it.
        emb_lookup_max_blocks: the most blocks of a pooling kernel's grid, so that what runs beside it finds room. None
            fills the device; engines without a device ignore it.

    All other arguments, promises and errors: see ``Pipeline``.
    """

    ahead_count = 2

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
        emb_lookup_stream_priority: int = 0,
        emb_lookup_max_blocks: int | None = None,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            reduce_dense_gradients,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=1,
            enqueues_behind_forward=enqueue_batch_after_forward,
            copies_in_place=enable_inplace_copy_batch,
            strict=strict,
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
            placed=replace(
                check_placement(
                    emb_lookup_stream,
                    use_emb_lookup_stream,
                    embedding_lookup_after_data_dist,
                    embedding_lookup_before_optimizer,
                    embedding_lookup_after_opt,
                ),
                priority=emb_lookup_stream_priority,
                max_blocks=emb_lookup_max_blocks,
            ),
        )
        super().__init__(model, optimizer, device, options)


class TrainPipelineSemiSync(LookupPipeline[In, Out]):
    """From ``start_batch`` on, a batch is looked up before the update of the one before it.

    What a lookup reads is one update stale then: tables, and whatever of data-parallel tables and feature processors
    the optimizer updates. The rest of the dense part is not, and before ``start_batch`` every bit is the exact loop's.

    Args of its own:
        stash_gradients: the dense part, too, steps with the gradients of the step before; the first such step does not
            step, and the last gradients are never applied.
        strict: refuse an optimizer that updates what a lookup reads, rather than say so in the log.

    All other arguments, promises and errors: see ``Pipeline``.
    """

    ahead_count = 3

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
        self._start_batch, self._stashes = start_batch, stash_gradients
        self._stash: dict[torch.Tensor, torch.Tensor | None] | None = None
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            reduce_dense_gradients,
            pipeline_postproc=pipeline_postproc,
            sync_interval_batches=dmp_collection_sync_interval_batches,
            copies_in_place=enable_inplace_copy_batch,
            strict=strict,
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
            placed=Placed("new"),
            looks_up_before_update=True,
        )
        super().__init__(model, optimizer, device, options)

    def is_semi_sync(self) -> bool:
        """Whether the next batch is looked up before this one's update."""
        return len(self._queue) > 0 and self.processed_count >= self._start_batch

    def embedding_backward(self, context: Any) -> None:
        """The tables' update, from the gradients that the forward's copies of the lookups have got."""
        for looked_up, leaf in self._found(context).pairs:
            if leaf.grad is not None:
                looked_up.backward(leaf.grad)  # type: ignore[no-untyped-call]

    def cut(self, batch: BatchContext) -> None:
        """The forward sees the lookups cut off from their tables, so that T is a step of its own."""
        for call in self.calls:
            batch.results[call.name] = cut_off(batch.results[call.name], batch.pairs)

    def needs_lookup(self, batch: BatchContext) -> bool:
        """Whether the batch was not looked up yet; a lookup of evaluation has no way back, and is forgotten."""
        if batch.with_grad is not None:
            if batch.with_grad >= self._model.training:
                return False
            batch.results.clear()
        return True

    def _update_tables(self, batch: BatchContext) -> None:
        """T, behind the lookup of the next batch."""
        self.embedding_backward(batch.context)

    def _step_dense(self) -> None:
        """One optimizer step, with the gradients of the step before if they are stashed; the first has none."""
        if not self._stashes or self.processed_count < self._start_batch:
            self._optimizer_step()
            return
        given, self._stash = self._stash, {}
        for param in (param for group in self._optimizer.param_groups for param in group["params"]):
            self._stash[param], param.grad = param.grad, None if given is None else given.get(param)
        if given is not None:
            self._optimizer_step()


class EvalPipelineSparseDist(Pipeline[In, Out]):
    """Forward only, without gradient, whatever the model's mode. Arguments, promises and errors: see ``Pipeline``."""

    ahead_count = 2
    trains = False

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
        options = Options(
            execute_all_batches,
            custom_model_fwd,
            process_group,
            engine,
            pipeline_postproc=pipeline_postproc,
            copies_in_place=enable_inplace_copy_batch,
            apply_jit=apply_jit,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(model, optimizer, device, options)


class EvalPipelineFusedSparseDist(TrainPipelineFusedSparseDist[In, Out]):
    """As ``EvalPipelineSparseDist``, with the lookup issued early.

    Takes the arguments of ``TrainPipelineFusedSparseDist``, but for those about the optimizer, and
        enable_embedding_lookup_prefetch: look the next batch up behind this one's forward, which may overlap it.

    All other arguments, promises and errors: see ``Pipeline``.
    """

    trains = False

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
        enable_embedding_lookup_prefetch: bool = False,
        embedding_lookup_before_optimizer: bool = False,
        defer_dp_lookup: bool = False,
        use_emb_lookup_stream: bool | None = None,
        embedding_lookup_after_opt: bool | None = None,
        emb_lookup_stream_priority: int = 0,
        emb_lookup_max_blocks: int | None = None,
        process_group: Any = None,
        engine: Any = None,
        reduce_dense_gradients: bool | None = None,
    ) -> None:
        self.prefetches = enable_embedding_lookup_prefetch
        if embedding_lookup_before_optimizer or reduce_dense_gradients:
            where = (
                "embedding_lookup_before_optimizer" if embedding_lookup_before_optimizer else "reduce_dense_gradients"
            )
            raise ConfigError("an evaluation has no optimizer", got=True, where=where)
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            pipeline_postproc,
            custom_model_fwd,
            strict,
            emb_lookup_stream,
            embedding_lookup_after_data_dist,
            enable_inplace_copy_batch,
            enqueue_batch_after_forward,
            free_features_storage_early,
            clear_data_dist_inputs,
            defer_dp_lookup=defer_dp_lookup,
            use_emb_lookup_stream=use_emb_lookup_stream,
            embedding_lookup_after_opt=embedding_lookup_after_opt,
            emb_lookup_stream_priority=emb_lookup_stream_priority,
            emb_lookup_max_blocks=emb_lookup_max_blocks,
            process_group=process_group,
            engine=engine,
            reduce_dense_gradients=reduce_dense_gradients,
        )
