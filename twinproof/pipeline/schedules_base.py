"""What every pipeline does, whatever it overlaps: batches, agreement among ranks, attachment, counts.

Prevents lost batches and ranks that wait for each other forever: batches are pulled at one place, every rank learns in
the same exchange whether every rank has one, and what was pulled is either processed or still held.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from twinproof.errors import ConfigError, DistributedError, PipelineError
from twinproof.kvstore.statedict import rank_and_world
from twinproof.pipeline.rewrite import Attachment, Call, FromBatch, find_calls
from twinproof.pipeline.schedules_flights import QueueView, looked_up
from twinproof.pipeline.schedules_options import Options, check_overrides
from twinproof.pipeline.schedules_reducers import DenseGradients
from twinproof.pipeline.schedules_stages import In, Out, Stages

__all__ = ["In", "Out", "PipelineBase"]

# What a rank says of its loader; the least of all ranks' counts.
_FAILED, _EXHAUSTED, _HAS_BATCH = 0, 1, 2


class PipelineBase(Stages[In, Out]):
    """A training pipeline: ``progress(dataloader_iter)`` is one step and returns the model's output.

    Args:
        model: called with a batch, returns (losses, output); the sum of losses is what is differentiated, in
            evaluation they may be None. Sharded modules in it are driven by the pipeline, and belong to it until
            ``detach()``.
        optimizer: of the dense parameters. Tables update themselves in the backward.
        device: where batches go.
        execute_all_batches: False leaves the last batches, as many as are in flight, unprocessed and held.
        custom_model_fwd: called in place of the model, once a step.
        process_group: the ranks that step together; None is all of them, or none.
        engine: a ``fastimpl.streams.Engine`` that stands in for the device's; plain loops have none, and refuse one.
        reduce_dense_gradients: on several ranks, whether the gradients of the optimizer's parameters that no wrapper
            (DDP, FSDP) reduces are averaged here, before the optimizer. False is for those that are reduced in a way
            that cannot be seen; None refuses parameters without wrapper and without gradient hook.

    torchrec's arguments stand in torchrec's positions:
        apply_jit, free_features_storage_early, clear_data_dist_inputs: refused; the error says why.
        context_type: ``context_type(index=, version=)`` makes what stages are given beside a batch; None is our own.
        pipeline_postproc: run modules between the batch and a sharded module ahead, with its exchange.
        dmp_collection_sync_interval_batches: every how many batches torchrec's ``DMPCollection`` averages its
            replicas, behind the backward; None is never. Schedules without the argument do it for each batch.
        enqueue_batch_after_forward: pull the last batch ahead behind the forward; what its loader raises comes out of
            the next call.
        enable_inplace_copy_batch: allocate copies on the caller's stream, so that its memory is used again sooner.
        strict: refuse an optimizer that updates what a lookup reads.

    In evaluation (``model.eval()``) a step is a forward: no gradient, no update, no ``zero_grad``. What was pulled
    before a switch is processed in the mode of the moment. ``progress`` raises StopIteration when there is no batch
    left, again each time; another iterator then goes on, after what is still held. All ranks stop together, at the
    first that has no batch; what others have pulled stays held for the next iterator. An exception of the loader comes
    out unchanged on its rank, before anything is updated, and as DistributedError on the others; nothing is lost and
    the next call goes on.

    After an exception in forward, backward or the optimizer, the batch counts as neither processed nor held; one
    process goes on with the next batch, ranks need ``reset()``, for they may have come to different points.

    Attributes:
        pulled_count: batches taken from loaders.
        processed_count: steps done; a resumed loader begins here.
        batches, contexts: in flight, the current one first.

    Raises:
        ConfigError: a model that cannot be traced, arguments that contradict or are refused, dense gradients that
            nobody reduces. PipelineError: a failed pipeline that was not reset.
    """

    ahead_count = 0

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str, options: Options
    ) -> None:
        check_overrides(type(self))
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._options, self._engine, self._group = options, options.engine, options.process_group
        self._execute_all, self._forward = options.execute_all_batches, options.custom_model_fwd
        self._dmp_collection_sync_interval_batches = options.sync_interval_batches
        self._world_size = rank_and_world(self._group)[1]
        self.pulled_count = self.processed_count = self._next_index = 0
        self._queue: deque[Any] = deque()
        self._held: deque[Any] = deque()
        removed = [0]
        self.batches = QueueView(self._queue, "batch", self._adopted, removed)
        self.contexts = QueueView(self._queue, "context", self._adopted, removed)
        self._dataloader_iter: Iterator[In] | None = None
        self._dataloader_exhausted = self._failed = False
        self._deferred: BaseException | None = None
        self._current: Any = None
        self._made: Any = None
        self._calls: list[Call] = []
        self._dense: DenseGradients | None = None
        self._attachment: Attachment | None = None
        self.attach()

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Drive the model's sharded modules; another model with the same names may take the place of the first.

        ``sparse_dist`` starts the exchange of the first batch in flight at once, so that every rank must call this;
        without it the next step does.
        """
        self.detach()
        self._model = self._model if model is None else model
        self._calls = find_calls(self._model, pipeline_postproc=self._options.pipeline_postproc)
        late = [call.name for call in self._calls if self._options.strict and call.is_late(self._optimizer)]
        if late:
            raise ConfigError("the optimizer updates parameters that a lookup reads", got=late, where="strict")
        self._attachment = Attachment(self._calls, self._result_of)
        if sparse_dist and self._queue:
            self._start(self._queue[0])

    def detach(self) -> torch.nn.Module:
        """Give the model back as it was; batches in flight stay, and ``progress`` attaches again."""
        self._dense = None
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
            # What was sent or looked up belongs to modules that may change now; batches are kept and sent again.
            for flight in self._queue:
                self._recall(flight)
        return self._model

    def reset(self) -> None:
        """Forget batches in flight and failures; every rank calls this."""
        for flight in self._queue:
            self._recall(flight)
        self.batches.clear()
        self._held.clear()
        self._dataloader_iter, self._dataloader_exhausted, self._failed = None, False, False
        self._current = self._made = self._deferred = None
        self._next_index = 0

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; see the class. Raises StopIteration when no batch is left."""
        if self._failed:
            raise PipelineError("a step failed on this or another rank; reset() the pipeline", where="progress")
        if self._attachment is None:
            self.attach(sparse_dist=False)
        self._check_reducers()
        self._take_loader(dataloader_iter)
        self._raise_deferred()
        self.fill_pipeline(dataloader_iter)
        if not self._queue or (self._dataloader_exhausted and not self._execute_all):
            raise StopIteration
        flight = self._queue[0]
        self._begin(flight)
        if self._dataloader_exhausted and not self._execute_all:
            raise StopIteration
        self._current = flight
        try:
            if flight.failure is not None:
                raise flight.failure
            output: Out = self._step(flight)
        except BaseException:
            self._drop(flight)
            raise
        finally:
            self._current = None
        self.dequeue_batch()
        self.processed_count += 1
        return output

    def _check_reducers(self) -> None:
        """Before the first update of an attached model, and before anything is pulled for it."""
        if self._dense is not None or self._world_size == 1 or not self._model.training or not self.trains:
            return
        foreign = self._forward is not None
        dense = DenseGradients(self._model, self._optimizer, foreign=foreign)
        if self._options.reduce_dense_gradients is None:
            dense.check()
        self._dense = dense

    def _raise_deferred(self) -> None:
        error, self._deferred = self._deferred, None
        if error is not None:
            raise error

    def _drop(self, flight: Any) -> None:
        if flight in self._queue:
            self._queue.remove(flight)
        for other in self._queue:
            self._recall(other)
        self._failed = self._world_size > 1

    def _pull_until(self, count: int) -> None:
        """Have this many batches in flight, if the loader has them."""
        while len(self._queue) < count and not self._dataloader_exhausted:
            if not self.enqueue_batch(self._loader()):
                return

    def _pull_behind_forward(self) -> None:
        """The last batch ahead, where it waits for the forward. What a loader raises now must not undo the step."""
        if self._options.enqueues_behind_forward:
            try:
                self._pull_until(self.ahead_count + 1)
            except BaseException as error:
                self._deferred = error

    def _take_loader(self, dataloader_iter: Iterator[In]) -> None:
        """Another iterator than the last one has not ended."""
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False

    def _loader(self) -> Iterator[In]:
        assert self._dataloader_iter is not None
        return self._dataloader_iter

    @property
    def _count_before_forward(self) -> int:
        """Batches that are in flight when a forward begins, the current one among them."""
        return max(1, self.ahead_count + 1 - self._options.enqueues_behind_forward)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """A batch as the loader gives it, if every rank has one; None if not, and from then on."""
        self._take_loader(dataloader_iter)
        if self._dataloader_exhausted:
            return None
        failure: BaseException | None = None
        said = _HAS_BATCH
        if not self._held:
            try:
                self._held.append(self._next())
            except StopIteration:
                said = _EXHAUSTED
            except BaseException as error:
                failure, said = error, _FAILED
        agreed = self._agree(said)
        if failure is not None:
            raise failure
        if agreed == _FAILED:
            raise DistributedError("the loader of another rank failed", where="progress")
        if agreed == _EXHAUSTED:
            self._dataloader_exhausted = True
            return None
        found: In = self._held.popleft()
        return found

    def _next(self) -> In:
        batch = next(self._loader())
        if batch is None:
            raise ConfigError("the loader gave None in place of a batch", got=None, where=f"batch {self.pulled_count}")
        self.pulled_count += 1
        return batch

    def _agree(self, said: int) -> int:
        """The least that any rank says."""
        if self._world_size == 1:
            return said
        # A group of one backend for devices only, NCCL's, takes no tensor of the host.
        on_host = "cpu" in dist.get_backend_config(self._group)
        words = torch.tensor([said], device="cpu" if on_host else self._device)
        dist.all_reduce(words, dist.ReduceOp.MIN, group=self._group)
        return int(words)

    def _recall(self, flight: Any) -> None:
        """Forget how far a batch has come; what other ranks sent is received first, so that nothing is left behind.

        What an exchange raised is raised when the batch is sent again, at its own turn.
        """
        for given in flight.dists.values():
            with contextlib.suppress(Exception):
                given.wait().wait()
        flight.forget()

    def _result_of(self, name: str) -> Any:
        if self._current is None:
            raise KeyError(name)
        prepared: dict[str, Any] = self._current.prepared
        return (prepared if name in prepared else self._current.results).pop(name)

    def _send(self, flight: Any) -> None:
        """Start the exchange of ids for every module."""
        flight.was_sent = True
        postprocs = {name: module for call in self._calls for name, module in call.postprocs.items()}
        values = FromBatch(self.extract_model_input_from_batch(flight.batch), postprocs)
        for call in self._calls:
            positional, named = call.arguments(values)
            flight.contexts[call.name] = call.module.create_context()
            flight.dists[call.name] = call.module.input_dist(flight.contexts[call.name], *positional, **named)
        flight.prepared |= values.results

    def _receive(self, flight: Any) -> None:
        """End the exchange of sizes, which starts that of ids."""
        flight.was_received = True
        for name, given in flight.dists.items():
            flight.inputs[name] = given.wait()

    def _look_up(self, flight: Any, calls: list[Call] | None = None) -> None:
        for call in self._calls if calls is None else calls:
            given, ctx = flight.inputs[call.name].wait(), flight.contexts[call.name]
            flight.results[call.name] = looked_up(call.module, ctx, given)
            flight.dists.pop(call.name, None)

    def _run_forward(self, flight: Any) -> tuple[torch.Tensor, Any]:
        losses, output = (self._forward or self._model)(flight.batch)
        return losses, output

    def _begin(self, flight: Any) -> None:
        """Work before a step that updates nothing; what a loader raises here leaves every batch where it is."""

    def _reduce_dense(self) -> None:
        """Dense gradients of all ranks, where the pipeline was asked for their mean."""
        if self._dense is not None and self._options.reduce_dense_gradients:
            self._dense.reduce(self._group, self._world_size)

    def _step_dense(self) -> None:
        self._optimizer_step()

    def _optimizer_step(self) -> None:
        self._optimizer.step()

    @abstractmethod
    def _step(self, flight: Any) -> Any:
        """One batch, from wherever it is to the model's output."""

    @staticmethod
    def _own_next_batch() -> Any:
        return PipelineBase._next_batch
