"""What every pipeline does, whatever it overlaps; and the training pipelines under torchrec's names and arguments.

Prevents lost batches and ranks that wait for each other forever: batches are pulled at one place, every rank learns in
the same exchange whether every rank has one, and what was pulled is either processed or still held.

What a schedule overlaps is the implementation's: each class is bound to the stages of an implementation, and to a
schedule, which is a function that issues them for one step. torchrec's arguments stand in torchrec's positions, then
ours.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist

from twinproof.engine import weakly
from twinproof.errors import ConfigError, DistributedError, PipelineError, UnsupportedError, check_flags
from twinproof.kvstore.statedict import rank_and_world
from twinproof.optimizers import clear_gradients, trained_params
from twinproof.pipeline.config import LoaderEnds, check_answer, check_losses, check_parts, check_start
from twinproof.pipeline.sharding import made_for_training
from twinproof.pipeline.stages import (
    Attachment,
    BatchContext,
    Call,
    DenseGradients,
    FromBatch,
    Options,
    Placed,
    Prepared,
    Stages,
    Traces,
    check_asked,
    check_overrides,
    check_placement,
    cut_off,
    outdated,
    without_graph,
)
from twinproof.pipeline.torchrec_models import QueueView, TorchrecModels

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "In",
    "LookupPipeline",
    "Out",
    "Pipeline",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]

logger = logging.getLogger("twinproof.pipeline")

In = TypeVar("In")
Out = TypeVar("Out")
Made = TypeVar("Made")
# (pipeline, stages, batch) -> the model's output: one step, which calls each stage in its place.
Schedule = Callable[[Any, Any, Any], Any]

# What a rank says of its loader; the least of all ranks' counts.
_FAILED, _EXHAUSTED, _HAS_BATCH = 0, 1, 2


class Pipeline(TorchrecModels, LoaderEnds, Generic[In, Out]):
    """A training pipeline: ``progress(dataloader_iter)`` is one step and returns the model's output.

    Args:
        model: called with a batch, returns (losses, output); the sum of losses is what is differentiated, in
            evaluation they may be None. Sharded modules in it are driven by the pipeline, and belong to it until
            ``detach()``, or until nobody has the pipeline.
        optimizer: of the dense parameters. Tables update themselves in the backward.
        device: where batches go.
        execute_all_batches: False leaves the last batches, as many as are in flight, unprocessed and held.
        custom_model_fwd: called in place of the model, once a step.
        process_group: the ranks that step together; None is all of them, or none.
        engine: a ``twinproof.engine.Engine`` that stands in for the device's; plain loops have none, and refuse one.
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
            the next call, an interrupt or an exit at the end of this one, with the step whole and counted.
        enable_inplace_copy_batch: allocate copies on the caller's stream, so that its memory is used again sooner.
        strict: refuse an optimizer that updates what a lookup reads.

    In evaluation (``model.eval()``) a step is a forward: no gradient, no update, no ``zero_grad``. What was pulled
    before a switch is processed in the mode of the moment: where that decides what is computed ahead, by a branch of
    the forward or in a module that runs ahead, it is sent and looked up anew. ``progress`` raises StopIteration when
    there is no batch left, again each time; another iterator then goes on, after what is still held, and so does the
    same one, where it has batches again: ``iter()`` begins that of a ``DataLoader(persistent_workers=True)`` anew. All
    ranks stop together, at the first that has no batch, and each makes as many calls, behind an end too; what others
    have pulled stays held for the next iterator. An exception of the loader comes out unchanged on its rank, before
    anything is updated, and as DistributedError on the others; nothing is lost and the next call goes on.

    A pipeline is neither copied nor pickled; a copy of its model is a plain one, that nobody drives.

    After an exception in forward, backward or the optimizer, the batch counts as neither processed nor held; one
    process goes on with the next batch, ranks need ``reset()``, for they may have come to different points.

    Attributes:
        pulled_count: batches taken from loaders.
        processed_count: steps done; a resumed loader begins here.
        batches, contexts: in flight, the current one first.

    Raises:
        ConfigError: a model that cannot be traced, arguments that contradict or are refused, dense gradients that
            nobody reduces. PipelineError: a failed pipeline that was not reset. UnsupportedError: a copy, or a pickle.
    """

    ahead_count: ClassVar[int] = 0
    trains: ClassVar[bool] = True
    # What stands in for the forward of a driven module; nothing else can.
    _pipelined_forward_type = Prepared
    _make_stages: ClassVar[Callable[[torch.device, Options], Stages[Any]]]
    _schedule: ClassVar[Schedule]

    def __init_subclass__(
        cls,
        *,
        stages: Callable[[torch.device, Options], Stages[Any]] | None = None,
        schedule: Schedule | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        if stages is not None and schedule is not None:
            cls._make_stages, cls._schedule = stages, staticmethod(schedule)

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str, options: Options
    ) -> None:
        check_overrides(type(self))
        check_parts(model, optimizer if self.trains else None)
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self.options, self._group = options, options.process_group
        self._execute_all, self._forward = options.execute_all_batches, options.custom_model_fwd
        self._dmp_collection_sync_interval_batches = options.sync_interval_batches
        self._world_size = rank_and_world(self._group)[1]
        self.pulled_count = self.processed_count = self._next_index = 0
        self._queue: deque[BatchContext] = deque()
        self._held: deque[Any] = deque()
        removed: dict[str, list[Any]] = {"batch": [], "context": []}
        self.batches = QueueView(self._queue, "batch", self._adopted, removed, self._replace)
        self.contexts = QueueView(self._queue, "context", self._adopted, removed, self._replace)
        self._failed = False
        self._forget_loader()
        # Raised out of a list: an exception that a frame of its own traceback had would keep the pipeline.
        self._deferred: list[BaseException] = []
        self._current: BatchContext | None = None
        self._made: BatchContext | None = None
        self.calls: list[Call] = []
        self._late: dict[Any, Any] | None = None
        self._dense: DenseGradients | None = None
        self._attachment: Attachment | None = None
        self._traces: Traces
        self._is_hooked = False
        self._stages = type(self)._make_stages(self._device, options)
        self.attach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        what, instead = "a pipeline cannot be copied: it drives one model", "a copy of the model, and a pipeline of it"
        raise UnsupportedError(what, got="copy or pickle", expected=instead, where=type(self).__name__)

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Drive the model's sharded modules; another model with the same names may take the place of the first.

        ``sparse_dist`` starts the exchange of the first batch in flight at once, so that every rank must call this;
        without it the next step does.

        Raises:
            ConfigError: see the class; the pipeline goes on with the model that it has.
        """
        model = self._model if model is None else model
        # What is refused leaves the model that is driven.
        traces = Traces(model, pipeline_postproc=self.options.pipeline_postproc)
        self._refuse_late(traces.calls)
        self.detach()
        self._model, self._traces = model, traces
        self._drive()
        if sparse_dist and self._queue:
            self.start_exchange(self._queue[0])

    def _refuse_late(self, calls: list[Call]) -> None:
        late = [call.name for call in calls if self.options.strict and self.is_late(call)]
        if late:
            raise ConfigError("the optimizer updates what a lookup reads", got=late, expected="none", where="strict")

    def _drive(self) -> None:
        self.calls = self._traces.calls
        stale = [call.name for call in self.calls if self.options.looks_up_before_update and self.is_late(call)]
        if stale:
            logger.warning("parameters of the optimizer are read one update stale in %s", stale)
        self._attachment = Attachment(self.calls, weakly(self._result_of))

    def detach(self) -> torch.nn.Module:
        """Give the model back as it was; batches in flight stay, and ``progress`` attaches again."""
        self._dense = None
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
            # What was sent or looked up belongs to modules that may change now; batches are kept and sent again.
            for in_flight in self._queue:
                self._recall(in_flight)
        return self._model

    def reset(self) -> None:
        """Forget batches in flight and failures; every rank calls this."""
        for in_flight in self._queue:
            self._recall(in_flight)
        self.batches.clear()
        self._held.clear()
        self._failed = False
        self._forget_loader()
        self._current = self._made = None
        self._deferred.clear()
        self._next_index = 0

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; see the class. Raises StopIteration when no batch is left."""
        if self._failed:
            raise PipelineError("a step failed on some rank", got="progress()", expected="reset()", where="progress")
        if self._deferred:
            raise self._deferred.pop()
        if self._attachment is None:
            self.attach(sparse_dist=False)
        elif self._traces.follow(self._refuse_late, self.agree) or self._attachment.is_overlaid():
            # What was sent, and perhaps looked up, is of another mode, of what was read then, or of another forward.
            self.detach()
            self._drive()
        for in_flight in outdated(self._queue, self.agree):
            self._recall(in_flight)
        self._check_reducers()
        self._take_loader(dataloader_iter)
        self.fill_pipeline(dataloader_iter)
        if not self._queue or (self._dataloader_exhausted and not self._execute_all):
            raise self._forget_loader()
        # What users edit between steps is seen.
        batch, self._late = self._queue[0], {}
        try:
            output: Out = type(self)._schedule(self, self._stages, batch)
            self.dequeue_batch()
        except BaseException:
            if self._current is batch:
                self._drop(batch)
            raise
        finally:
            self._current = self._late = None
        self.processed_count += 1
        if self._deferred and not isinstance(self._deferred[0], Exception):
            # An interrupt, or what ends the program: nobody may ask for another step.
            raise self._deferred.pop()
        return output

    def _check_reducers(self) -> None:
        """Before the first update of an attached model or of other parameters, and before anything is pulled for it."""
        if self._world_size == 1 or not self._model.training or not self.trains:
            return
        # Parameters are thawed and groups are added while a model trains.
        if self._dense is not None and self._dense.is_current():
            return
        foreign = self._forward is not None
        dense = DenseGradients(self._model, self._optimizer, foreign=foreign)
        if self.options.reduce_dense_gradients is None:
            dense.check()
        self._dense = dense

    def _drop(self, in_flight: BatchContext) -> None:
        if in_flight in self._queue:
            self._queue.remove(in_flight)
        in_flight.forget()
        for other in self._queue:
            self._recall(other)
        self._failed = self._world_size > 1

    def take(self, batch: BatchContext) -> bool:
        """Begin the batch's own step: what raises from here on costs the batch. Returns whether the step trains.

        Raises:
            StopIteration: the loader has ended, and the last batches are not wanted. Exception: what the batch's
                exchange has raised before.
        """
        if self._dataloader_exhausted and not self._execute_all:
            raise self._forget_loader()
        self._current = batch
        self.raise_failure(batch)
        training = self._model.training and self.trains
        if training:
            clear_gradients(self._optimizer)
        return training

    def raise_failure(self, batch: BatchContext) -> None:
        """Raise what the batch's exchange raised, if it did."""
        if batch.failure is not None:
            raise batch.failure

    @property
    def is_training(self) -> bool:
        """Whether a lookup of now has a way back to its tables."""
        return self._model.training and self.trains

    def following(self) -> Any:
        """The batch behind the current one, if it is in flight."""
        return self._queue[1] if len(self._queue) > 1 else None

    def exchange_following(self) -> None:
        """S and I of the batch behind the current one."""
        following = self.following()
        if following is not None:
            self.exchange(following)

    def is_late(self, call: Call) -> bool:
        """Whether P updates what the module's lookup reads, which a step finds out once, and again of other groups."""
        sizes = tuple(len(group["params"]) for group in getattr(self._optimizer, "param_groups", ()))
        known = {} if self._late is None else self._late
        if (call.name, sizes) not in known:
            trained = known.setdefault(sizes, set())
            known[call.name, sizes] = self.trains and call.is_late(self._optimizer, trained)
        return bool(known[call.name, sizes])

    def pull(self, count: int | None = None) -> None:
        """H of as many batches as a forward finds in flight, ``count`` at most, if the loader has them."""
        most = self._count_before_forward
        self._pull_until(most if count is None else min(count, most))

    def pull_behind_forward(self) -> None:
        """The last batch ahead, where it waits for the forward. What a loader raises now must not undo the step."""
        if self.options.enqueues_behind_forward:
            try:
                self._pull_until(self.ahead_count + 1)
            except BaseException as error:
                self._deferred = [error]

    def _pull_until(self, count: int) -> None:
        """Have this many batches in flight, if the loader has them."""
        while len(self._queue) < count and not self._dataloader_exhausted:
            if not self.enqueue_batch(self._dataloader_iter):
                return

    @property
    def _count_before_forward(self) -> int:
        """Batches that are in flight when a forward begins, the current one among them."""
        return max(1, self.ahead_count + 1 - self.options.enqueues_behind_forward)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """A batch as the loader gives it, if every rank has one; None if not, and from then on."""
        return self._taken(dataloader_iter, lambda: None, lambda batch, _: batch)

    def _taken(
        self, dataloader_iter: Iterator[In], begin: Callable[[], Any], prepare: Callable[[In, Any], Made]
    ) -> Made | None:
        """What is made of the next batch and of what ``begin`` gives, if every rank has one; None if not, from then on.

        What fails on one rank fails on all before anything is exchanged. The others hold their batch, and so does that
        rank where ``begin`` failed; as in a loop, one that could not be prepared is gone.
        """
        self._take_loader(dataloader_iter)
        if self._dataloader_exhausted:
            return None
        failures: list[BaseException] = []
        made: Made | None = None
        said = _HAS_BATCH
        try:
            if not self._held:
                self._held.append(self._next())
            begun = begin()
        except StopIteration:
            said = _EXHAUSTED
        except BaseException as error:
            failures, said = [error], _FAILED
        if said == _HAS_BATCH:
            try:
                made = prepare(self._held[0], begun)
            except BaseException as error:
                failures, said = [error], _FAILED
                self._held.popleft()
        agreed = self.agree(said)
        if failures:
            raise failures.pop()
        if agreed == _FAILED:
            got, expected = "a loader that failed, or the copy of its batch", "a batch, or the loader's end"
            raise DistributedError("another rank gave no batch", got=got, expected=expected, where="progress")
        if agreed == _EXHAUSTED:
            self._end_loader()
            return None
        self._held.popleft()
        return made

    def _next(self) -> In:
        # Not before: ranks agree on what one of them refuses.
        # What is sent to a device is a copy.
        batch: In = self._pulled(self._queue if self._device.type == "cpu" else ())
        if batch is None:
            raise ConfigError("the loader gave None", got=None, expected="a batch", where=f"batch {self.pulled_count}")
        self.pulled_count += 1
        return batch

    def agree(self, said: int) -> int:
        """The least that any rank says."""
        if self._world_size == 1:
            return said
        # A group of one backend for devices only, NCCL's, takes no tensor of the host.
        on_host = "cpu" in dist.get_backend_config(self._group)
        words = torch.tensor([said], device="cpu" if on_host else self._device)
        dist.all_reduce(words, dist.ReduceOp.MIN, group=self._group)
        return int(words)

    def _recall(self, in_flight: BatchContext) -> None:
        """Forget how far a batch has come; what other ranks sent is received first, so that nothing is left behind.

        What an exchange raised is raised when the batch is sent again, at its own turn.
        """

        def work() -> None:
            for name in list(in_flight.dists):
                with contextlib.suppress(Exception):
                    in_flight.dists.pop(name).wait().wait()

        # Where it was sent: memory of one stream is read by no other on the way.
        self._stages.receive(work)
        in_flight.forget()

    def _replace(self, in_flight: BatchContext, batch: Any) -> None:
        """Another batch in the place of one in flight; one whose step is under way is past what was sent."""
        if in_flight is self._current or in_flight not in self._queue:
            in_flight.batch = batch
            return
        self._recall(in_flight)
        made: BatchContext = self._stages.adopt(batch)
        made.index, made.given_context = in_flight.index, in_flight.given_context
        self._queue[self._queue.index(in_flight)] = made

    def _result_of(self, name: str, given: Any) -> Any:
        if self._current is None:
            raise KeyError(name)
        ahead = self._current.asked.pop(name, None)
        if ahead is not None:
            check_asked(name, ahead, given, self._current.batch, is_hooked=self._is_hooked)
        prepared: dict[str, Any] = self._current.prepared
        if name in prepared:
            return prepared.pop(name)
        found = self._current.results.pop(name)
        # It was looked up for training, before it was known that the model calls it without gradients.
        return without_graph(found) if self._current.with_grad and not torch.is_grad_enabled() else found

    def _send(self, in_flight: BatchContext) -> None:
        """Start the exchange of ids for every module."""
        in_flight.was_sent = True
        postprocs = {name: module for call in self.calls for name, module in call.postprocs.items()}
        values = FromBatch(lambda: self.extract_model_input_from_batch(in_flight.batch), postprocs)
        failure: Exception | None = None
        with in_flight.reading(self.calls, postprocs.values()):
            try:
                for call in self.calls:
                    failure = failure or self._asked_for(in_flight, call, values)
                    ctx = in_flight.contexts[call.name] = call.module.create_context()
                    if failure is None:
                        positional, named = in_flight.asked[call.name]
                        in_flight.dists[call.name] = call.module.input_dist(ctx, *positional, **named)
                    else:
                        in_flight.dists[call.name] = call.module._failed_dist(ctx, failure, self._device)
            finally:
                del failure  # Its traceback may have this frame.
        in_flight.prepared |= values.results
        in_flight.asked |= values.asked

    def _asked_for(self, in_flight: BatchContext, call: Call, values: FromBatch) -> Exception | None:
        """Note what a module is called with; or what is raised on the way there, where the other ranks can be told.

        Where they cannot, they wait for this rank: what is raised comes out at once, and not at the batch's turn.
        """
        try:
            in_flight.asked[call.name] = call.arguments(values)
        except Exception as error:
            if self._world_size == 1:
                raise
            if all(hasattr(each.module, "_failed_dist") for each in self.calls):
                return error
            self._failed = True
            raise
        return None

    def _receive(self, in_flight: BatchContext) -> None:
        """End the exchange of sizes, which starts that of ids."""
        in_flight.was_received = True
        for name in in_flight.dists:  # What fails is in no variable of a frame that its exception has.
            in_flight.inputs[name] = in_flight.dists[name].wait()

    def start_exchange(self, batch: BatchContext) -> None:
        """S, once."""
        if not batch.started:
            with self.failure_noted(batch):
                batch.started = True  # An interrupt that comes before is none of an exchange.
                self.start_sparse_data_dist(batch.batch, batch.context)

    def exchange(self, batch: BatchContext) -> None:
        """S and I, each once."""
        self.start_exchange(batch)
        if not batch.exchanged and batch.failure is None:
            with self.failure_noted(batch):
                batch.exchanged = True
                self.wait_sparse_data_dist(batch.context)

    @contextlib.contextmanager
    def failure_noted(self, batch: BatchContext) -> Iterator[None]:
        """What a batch's exchange raises waits for that batch's turn."""
        try:
            yield
        except Exception as error:
            if self._failed:
                raise
            batch.failure = error
        except BaseException:
            # Half of an exchange is none, and ranks may have come to different points of theirs.
            self._failed = self._world_size > 1
            if not self._failed:
                self._recall(batch)
            raise

    def look_up(self, batch: BatchContext) -> None:
        """L and O of every module that was not looked up yet, behind S and I. What those raise is not raised here."""
        self.exchange(batch)
        missing = [call for call in self.calls if call.name not in batch.results]
        if batch.failure is None and missing:
            with self._grad_mode():
                self._stages.look_up(batch, missing, [call for call in missing if self.is_late(call)])
            batch.with_grad = self.is_training

    def _grad_mode(self) -> Any:
        return torch.set_grad_enabled(self.is_training and torch.is_grad_enabled())

    def run_forward(self, batch: BatchContext) -> tuple[torch.Tensor, Any]:
        """F: the losses and the model's output."""

        def work() -> tuple[torch.Tensor, Any]:
            with self._grad_mode():
                return check_answer((self._forward or self._model)(batch.batch), self._model)

        self._wait_for_batch()
        self._is_hooked = self._traces.has_hooks()
        found: tuple[torch.Tensor, Any] = self._stages.forward(batch, work)
        return found

    def run_backward(self, batch: BatchContext, losses: torch.Tensor) -> None:
        """B with T, then the average of replicas, if there are."""

        def work() -> None:
            self._backward(losses)
            self._update_tables(batch)

        self._stages.backward(work)
        self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, batch.context)
        self._stages.tables_updated(self.calls)

    def _update_tables(self, batch: BatchContext) -> None:
        """T, where the backward does not reach the tables."""

    def run_optimizer(self) -> None:
        """P: dense gradients of all ranks, where the pipeline was asked for their mean, then the optimizer's step."""

        def work() -> None:
            if self._dense is not None and self.options.reduce_dense_gradients:
                self._dense.reduce(self._group, self._world_size)
            self._step_dense()

        self._stages.optimize([call for call in self.calls if self.is_late(call)], work)

    def _step_dense(self) -> None:
        self._optimizer_step()

    def _optimizer_step(self) -> None:
        self._optimizer.step()

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have the batches in flight without which a step cannot begin."""
        self._take_loader(dataloader_iter)
        was_empty = not self._queue
        self._pull_until(1)
        if was_empty and self._queue:
            self._init_pipelined_modules(self._queue[0].batch, self._queue[0].context, self._pipelined_forward_type)

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Take one batch from the loader into in_flight; whether there was one on every rank."""
        self._take_loader(dataloader_iter)
        copy = self.inplace_copy_batch_to_gpu if self.options.copies_in_place else self.copy_batch_to_gpu
        with made_for_training():
            batch, context = copy(dataloader_iter)
        if batch is None:
            return False
        made, self._made = self._made, None
        in_flight = made if made is not None and made.context is context else self._adopted(batch, context)
        in_flight.batch = batch
        self._queue.append(in_flight)
        return True

    def dequeue_batch(self) -> None:
        """Forget the batch that was processed."""
        self._queue.popleft()

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        """The next batch on the device, and its context; None for both when there is none."""
        if type(self)._next_batch is not Pipeline._next_batch:
            # Whoever pulls in their own way does not count, and whoever asks the pipeline's own has counted.
            counted, batch = self.pulled_count, self._next_batch(dataloader_iter)
            self.pulled_count = max(self.pulled_count, counted + (batch is not None))
            made = None if batch is None else self._copied(batch, self._create_context())
        else:
            made = self._taken(dataloader_iter, self._create_context, self._copied)
        if made is None:
            return None, None
        self._made, self._next_index = made, made.index + 1
        return made.batch, made.context

    def _copied(self, batch: In, context: Any) -> BatchContext:
        made: BatchContext = self._stages.copy(batch)
        made.index, made.given_context = self._next_index, context
        return made

    def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        """As ``copy_batch_to_gpu``, where ``enable_inplace_copy_batch`` is asked for."""
        return self.copy_batch_to_gpu(dataloader_iter)

    def _create_context(self) -> Any:
        """What stages are given beside the next batch; None is the pipeline's own."""
        kind = self.options.context_type
        return None if kind is None else kind(index=self._next_index, version=1)

    def _backward(self, losses: torch.Tensor) -> None:
        """The backward of the sum of losses."""
        torch.sum(check_losses(losses, self._model), dim=0).backward()  # type: ignore[no-untyped-call]

    def _adopted(self, batch: Any, context: Any = None) -> BatchContext:
        """A batch that somebody else moved to the device, in flight."""
        in_flight: BatchContext = self._stages.adopt(batch)
        in_flight.index, in_flight.given_context = self._next_index, context
        self._next_index += 1
        return in_flight


class LookupPipeline(Pipeline[In, Out]):
    """A pipeline that looks up before the forward: two more of torchrec's stages."""

    def start_embedding_lookup(self, batch: Any, context: Any) -> None:
        """Look up what may be looked up now and was not yet."""
        if batch is not None:
            self.look_up(self._found(context))

    def look_up_ahead(self, batch: BatchContext) -> None:
        """``start_embedding_lookup`` before the batch's own step, in which what it raises is raised.

        Where the batch is not the next one, it is looked up again then. Ranks wait for each other, and stop at once.
        """
        with self.failure_noted(batch), made_for_training():
            self.start_embedding_lookup(batch.batch, batch.context)
        failures = [] if batch.failure is None else [batch.failure]
        if failures:
            batch.results.clear()
            batch.failure = failures[0] if batch is self._queue[0] else None
            self._failed = self._world_size > 1
            if self._failed:
                raise failures.pop()

    def wait_embedding_lookup(self) -> None:
        """Called before the forward: the caller's stream waits for the current batch's lookups."""
        if self._queue:
            self._stages.wait_for_lookup(self._queue[0])


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
        check_flags(defer_dp_lookup=defer_dp_lookup)
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
        stash_gradients: the dense part, too, steps with the gradients of the step before; the first such step, also
            behind ``reset()``, does not step, and the last gradients are never applied.
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
        check_flags(stash_gradients=stash_gradients)
        self._start_batch, self._stashes = check_start(start_batch), stash_gradients
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

    def reset(self) -> None:
        """As of every pipeline; stashed gradients, too, are forgotten, which ranks may have of different steps."""
        super().reset()
        self._stash = None

    def is_semi_sync(self) -> bool:
        """Whether the next batch is looked up before this one's update."""
        return len(self._queue) > 0 and self.processed_count >= self._start_batch

    def embedding_backward(self, context: Any) -> None:
        """The tables' update, from the gradients that the forward's copies of the lookups have got."""
        # Results of one module may share a graph, and what nobody trains, of a module of others, has none.
        ways = [
            (up, leaf.grad) for up, leaf in self._found(context).pairs if leaf.grad is not None and up.requires_grad
        ]
        if ways:
            torch.autograd.backward([looked_up for looked_up, _ in ways], [grad for _, grad in ways])

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
        # A group may list a parameter twice, whose gradient is stashed once.
        for param in dict.fromkeys(trained_params(self._optimizer)):
            grad = param.grad
            # A view is memory of somebody else, as DDP's buckets, which the next backward writes again.
            self._stash[param] = grad.clone() if grad is not None and grad._is_view() else grad
            param.grad = None if given is None else given.get(param)
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
        check_flags(
            enable_embedding_lookup_prefetch=enable_embedding_lookup_prefetch,
            embedding_lookup_before_optimizer=embedding_lookup_before_optimizer,
            reduce_dense_gradients=reduce_dense_gradients,
        )
        self.prefetches = enable_embedding_lookup_prefetch
        if embedding_lookup_before_optimizer or reduce_dense_gradients:
            where = (
                "embedding_lookup_before_optimizer" if embedding_lookup_before_optimizer else "reduce_dense_gradients"
            )
            raise ConfigError("an evaluation has no optimizer", got=True, expected=False, where=where)
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
