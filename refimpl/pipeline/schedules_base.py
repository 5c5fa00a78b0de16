"""What every pipeline does, whatever it overlaps: batches, agreement among ranks, attachment, counts.

Prevents lost batches and ranks that wait for each other forever: batches are pulled at one place, every rank learns in
the same exchange whether every rank has one, and what was pulled is either processed or still held.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from refimpl.errors import ConfigError, DistributedError, PipelineError
from refimpl.kvstore.state import rank_and_world
from refimpl.pipeline.awaitables import Awaitable
from refimpl.pipeline.data import KeyedJaggedTensor, KeyedTensor
from refimpl.pipeline.rewrite import Attachment, Call, find_calls

__all__ = ["Flight", "PipelineBase", "as_leaf", "finished", "move_batch"]

AnyFlight = TypeVar("AnyFlight", bound="Flight")
Forward = Callable[[Any], tuple[torch.Tensor, Any]]
# What a rank says of its loader; the least of all ranks' counts.
_FAILED, _EXHAUSTED, _HAS_BATCH = 0, 1, 2


def move_batch(batch: Any, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    """The batch with each tensor moved; what is none of ours and has a ``to`` of its own is asked to go."""
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, KeyedJaggedTensor):
        return batch._map(move)
    if isinstance(batch, dict):
        return {key: move_batch(value, move, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [move_batch(part, move, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: move_batch(getattr(batch, f.name), move, device) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch


class Flight:
    """One batch on its way.

    Attributes:
        batch: on the device.
        contexts, dists, inputs, results: by module name, as far as they have come.
        failure: what its exchange of ids raised, which is raised when it is this batch's turn.
        with_grad: whether a backward would find the lookups; None before them.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.failure: Exception | None = None
        self.with_grad: bool | None = None
        self.contexts: dict[str, Any] = {}
        self.dists: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.results: dict[str, Any] = {}

    def forget(self) -> None:
        """Nothing was sent or looked up."""
        for some in (self.contexts, self.dists, self.inputs, self.results):
            some.clear()
        self.failure = self.with_grad = None


def finished(result: Any) -> Any:
    """What the module's own forward would return: ours waits, torchrec's hands out its lazy result."""
    return result.wait() if isinstance(result, Awaitable) else result


class PipelineBase(Generic[AnyFlight]):
    """A training pipeline: ``progress(dataloader_iter)`` is one step and returns the model's output.

    Args:
        model: called with a batch, returns (losses, output); the sum of losses is what is differentiated. Sharded
            modules in it are driven by the pipeline, and belong to it until ``detach()``.
        optimizer: of the dense parameters. Tables update themselves in the backward.
        device: where batches go.
        execute_all_batches: False leaves the last batches, as many as are in flight, unprocessed and held.
        custom_model_fwd: called in place of the model, once a step.
        process_group: the ranks that step together; None is all of them, or none.
        engine: a ``fastimpl.streams.Engine`` that stands in for the device's; plain loops need none.

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

    Raises:
        ConfigError: a model that cannot be traced. PipelineError: a failed pipeline that was not reset.
    """

    ahead_count = 0

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str = "cpu",
        execute_all_batches: bool = True,
        custom_model_fwd: Forward | None = None,
        *,
        process_group: Any = None,
        engine: Any = None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._engine = engine
        self._execute_all, self._forward, self._group = execute_all_batches, custom_model_fwd, process_group
        self._world_size = rank_and_world(process_group)[1]
        self.pulled_count = self.processed_count = 0
        self._queue: deque[AnyFlight] = deque()
        self._held: deque[Any] = deque()
        self._loader: Iterator[Any] | None = None
        self._exhausted = self._failed = False
        self._current: AnyFlight | None = None
        self._calls: list[Call] = []
        self._attachment: Attachment | None = None
        self.attach()

    def attach(self, model: torch.nn.Module | None = None) -> None:
        """Drive the model's sharded modules; another model with the same names may take the place of the first."""
        self.detach()
        self._model = self._model if model is None else model
        self._calls = find_calls(self._model)
        self._attachment = Attachment(self._calls, self._result_of)

    def detach(self) -> torch.nn.Module:
        """Give the model back as it was; batches in flight stay, and ``progress`` attaches again."""
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
        self._queue.clear()
        self._held.clear()
        self._loader, self._exhausted, self._failed, self._current = None, False, False, None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """One step; see the class. Raises StopIteration when no batch is left."""
        if self._failed:
            raise PipelineError("a step failed on this or another rank; reset() the pipeline", where="progress")
        if self._attachment is None:
            self.attach()
        if dataloader_iter is not self._loader:
            self._loader, self._exhausted = dataloader_iter, False
        self._fill()
        if not self._queue or (self._exhausted and not self._execute_all):
            raise StopIteration
        flight = self._queue[0]
        self._begin(flight)
        if self._exhausted and not self._execute_all:
            raise StopIteration
        self._current = flight
        try:
            if flight.failure is not None:
                raise flight.failure
            output = self._step(flight)
        except BaseException:
            self._drop(flight)
            raise
        finally:
            self._current = None
        self._queue.remove(flight)
        self.processed_count += 1
        return output

    def _drop(self, flight: AnyFlight) -> None:
        if flight in self._queue:
            self._queue.remove(flight)
        for other in self._queue:
            self._recall(other)
        self._failed = self._world_size > 1

    def _fill(self) -> None:
        """Have the batch of this step and those ahead of it."""
        while len(self._queue) <= self.ahead_count and self._pull():
            pass

    def _pull(self) -> bool:
        """Take one batch from the loader into flight, if every rank has one."""
        if self._exhausted:
            return False
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
            self._exhausted = True
            return False
        self._queue.append(self._flight_of(self._held.popleft()))
        return True

    def _next(self) -> Any:
        assert self._loader is not None
        batch = next(self._loader)
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

    @abstractmethod
    def _flight_of(self, batch: Any) -> AnyFlight:
        """The batch on the device."""

    def _recall(self, flight: AnyFlight) -> None:
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
        return self._current.results.pop(name)

    def _send(self, flight: AnyFlight) -> None:
        """Start the exchange of ids for every module."""
        for call in self._calls:
            positional, named = call.arguments(flight.batch)
            flight.contexts[call.name] = call.module.create_context()
            flight.dists[call.name] = call.module.input_dist(flight.contexts[call.name], *positional, **named)

    def _receive(self, flight: AnyFlight) -> None:
        """End the exchange of sizes, which starts that of ids."""
        for name, given in flight.dists.items():
            flight.inputs[name] = given.wait()

    def _look_up(self, flight: AnyFlight, calls: list[Call] | None = None) -> None:
        for call in self._calls if calls is None else calls:
            given, ctx = flight.inputs[call.name].wait(), flight.contexts[call.name]
            flight.results[call.name] = finished(call.module.output_dist(ctx, call.module.compute(ctx, given)))
            flight.dists.pop(call.name, None)

    def _run_forward(self, flight: AnyFlight) -> tuple[torch.Tensor, Any]:
        losses, output = (self._forward or self._model)(flight.batch)
        return torch.sum(losses, dim=0), output

    def _begin(self, flight: AnyFlight) -> None:
        """Work before a step that updates nothing; what a loader raises here leaves every batch where it is."""

    def _step_dense(self) -> None:
        self._optimizer.step()

    @abstractmethod
    def _step(self, flight: AnyFlight) -> Any:
        """One batch, from wherever it is to the model's output."""


def as_leaf(result: Any) -> Any:
    """The same pooled columns, cut off from the lookup, whose gradient stays where it is."""
    leaf = result.values().detach().requires_grad_()
    made = KeyedTensor if isinstance(result, KeyedTensor) else type(result)
    return made(list(result.keys()), list(result.length_per_key()), leaf, result.key_dim())
