"""The stages of a pipeline under torchrec's names: what a subclass may call or override, and ``progress`` calls."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from twinproof.errors import ConfigError, PipelineError
from twinproof.pipeline.rewrite import Call, Prepared, unwrapped
from twinproof.pipeline.schedules_flights import Flight
from twinproof.pipeline.schedules_options import Options

__all__ = ["In", "LookupStages", "Out", "Stages"]

In = TypeVar("In")
Out = TypeVar("Out")


class Stages(ABC, Generic[In, Out]):
    """Each stage is called by ``progress`` at its place, for each batch once; an override may call ``super()``'s.

    ``context`` is what ``copy_batch_to_gpu`` returned with the batch, or what ``_create_context`` made for it.
    """

    trains = True
    # What stands in for the forward of a driven module; nothing else can.
    _pipelined_forward_type = Prepared
    _model: torch.nn.Module
    _options: Options
    _queue: deque[Any]
    _calls: list[Call]
    _made: Any
    _next_index: int
    pulled_count: int

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have the batches in flight without which a step cannot begin."""
        self._take_loader(dataloader_iter)
        was_empty = not self._queue
        self._pull_until(self._count_to_begin)
        if was_empty and self._queue:
            self._init_pipelined_modules(self._queue[0].batch, self._queue[0].context, self._pipelined_forward_type)

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Take one batch from the loader into flight; whether there was one on every rank."""
        self._take_loader(dataloader_iter)
        copy = self.inplace_copy_batch_to_gpu if self._options.copies_in_place else self.copy_batch_to_gpu
        batch, context = copy(dataloader_iter)
        if batch is None:
            return False
        made, self._made = self._made, None
        flight = made if made is not None and made.context is context else self._adopted(batch, context)
        flight.batch = batch
        self._queue.append(flight)
        return True

    def dequeue_batch(self) -> None:
        """Forget the batch that was processed."""
        self._queue.popleft()

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        """The next batch on the device, and its context; None for both when there is none."""
        if type(self)._next_batch is not self._own_next_batch():
            # Whoever pulls in their own way does not count.
            batch = self._next_batch(dataloader_iter)
            self.pulled_count += batch is not None
        else:
            batch = self._next_batch(dataloader_iter)
        if batch is None:
            return None, None
        self._made = self._flight_of(batch)
        self._made.index = self._next_index
        self._made.given_context = self._create_context()
        self._next_index = self._made.index + 1
        return self._made.batch, self._made.context

    def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        """As ``copy_batch_to_gpu``, where ``enable_inplace_copy_batch`` is asked for."""
        return self.copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: In | None, context: Any) -> None:
        """Start the exchange of sizes."""
        if batch is not None and not self._found(context).was_sent:
            self._send(self._found(context))

    def wait_sparse_data_dist(self, context: Any) -> None:
        """End the exchange of sizes, and start that of ids."""
        if not self._found(context).was_received:
            self._receive(self._found(context))

    def extract_model_input_from_batch(self, batch: In) -> Any:
        """What the arguments of sharded modules are computed from."""
        return batch

    def clear_sparse_data_dist_inputs(self, context: Any) -> None:
        """Nothing: what an exchange was given goes with its lookup."""

    def sync_embeddings(self, model: Any, interval_batches: int | None, context: Any = None) -> None:
        """Average the replicas of a ``DMPCollection`` every so many batches, behind the backward."""
        # By name and by class: a place without torchrec has no such model, and a mock of one has its class.
        is_collection = any(kind.__name__ == "DMPCollection" for kind in model.__class__.__mro__)
        if is_collection and interval_batches is not None and context.index % interval_batches == 0:
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

    @property
    def _pipelined_modules(self) -> list[Any]:
        return [call.module for call in self._calls]

    @property
    def _pipelined_postprocs(self) -> list[Any]:
        return list({name: module for call in self._calls for name, module in call.postprocs.items()}.values())

    def _init_pipelined_modules(self, batch: In, context: Any, pipelined_forward: Any = None) -> None:
        """Called when the first batch has come into an empty pipeline; modules are driven already."""

    def _create_context(self) -> Any:
        """What stages are given beside the next batch; None is the pipeline's own."""
        kind = self._options.context_type
        return None if kind is None else kind(index=self._next_index, version=1)

    def _wait_for_batch(self) -> None:
        """Called before each forward; whoever needs the batch on the device waits for it besides."""

    def _backward(self, losses: torch.Tensor) -> None:
        """The backward of the sum of losses."""
        if losses is None:
            raise ConfigError("a model in training returns losses", got=None, where=type(self._model).__name__)
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]

    def _found(self, context: Any) -> Any:
        """The flight that a context belongs to."""
        if isinstance(context, Flight):
            return context
        for flight in (*self._queue, self._made):
            if flight is not None and flight.given_context is context:
                return flight
        raise PipelineError("the context of no batch in flight", got=type(context).__name__, where="a stage")

    def _adopted(self, batch: Any, context: Any = None) -> Any:
        """The flight of a batch that somebody else moved to the device."""
        flight = self._arrived(batch)
        flight.index, flight.given_context = self._next_index, context
        self._next_index += 1
        return flight

    def _start(self, flight: Any) -> None:
        """The exchange of sizes, once."""
        if not flight.started and flight.failure is None:
            flight.started = True
            with self._noted(flight):
                self.start_sparse_data_dist(flight.batch, flight.context)

    def _exchange(self, flight: Any) -> None:
        """Both exchanges, each once."""
        self._start(flight)
        if not flight.exchanged and flight.failure is None:
            flight.exchanged = True
            with self._noted(flight):
                self.wait_sparse_data_dist(flight.context)

    @contextlib.contextmanager
    def _noted(self, flight: Any) -> Iterator[None]:
        """What a batch's exchange raises waits for that batch's turn."""
        try:
            yield
        except Exception as error:
            flight.failure = error

    @property
    @abstractmethod
    def _count_to_begin(self) -> int:
        """Batches without which a step cannot begin."""

    @staticmethod
    @abstractmethod
    def _own_next_batch() -> Any:
        """``_next_batch``, if nobody overrides it."""

    @abstractmethod
    def _pull_until(self, count: int) -> None: ...

    @abstractmethod
    def _take_loader(self, dataloader_iter: Iterator[In]) -> None: ...

    @abstractmethod
    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None: ...

    @abstractmethod
    def _flight_of(self, batch: Any) -> Any:
        """The batch of a loader, on the device."""

    @abstractmethod
    def _arrived(self, batch: Any) -> Any:
        """A flight for a batch that is on the device."""

    @abstractmethod
    def _send(self, flight: Any) -> None: ...

    @abstractmethod
    def _receive(self, flight: Any) -> None: ...


class LookupStages(Stages[In, Out]):
    """Stages of schedules that look up before the forward."""

    def start_embedding_lookup(self, batch: Any, context: Any) -> None:
        """Look up what may be looked up now and was not yet."""
        if batch is not None:
            self._look_up_missing(self._found(context))

    def wait_embedding_lookup(self) -> None:
        """Called before the forward, which waits for the lookups that it needs besides."""

    @abstractmethod
    def _look_up_missing(self, flight: Any) -> None: ...
