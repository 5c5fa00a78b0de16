"""Streams, events, copies and staging memory behind one small interface, so that stream programs can be proven.

Prevents orders that hold by luck: whatever pipeline and offload enqueue goes through an ``Engine``, and the virtual
device of the conformance suite is a third one, which sees every edge. ``CudaEngine`` is a thin layer over
``torch.cuda``; ``InlineEngine`` does everything at once, on the CPU.

Rules of the interface: a stream runs what was enqueued on it in order; ``wait`` orders a stream behind an event,
``synchronize`` the host; nothing else orders anything. Memory that one stream allocated and another uses must be
``keep``-ed for the other before the last reference goes.

Host memory for copies is pinned at its exact size, and unpinned when nobody has it any more: never inside a graph
capture, where waiting for the device is an error, nor in a forked child, where every CUDA call is.

``eagerly`` and ``FirstDerivatives`` say how lookups stand in graphs: of ``torch.compile`` not at all, of autograd once.

``weakly``, ``method_of`` and ``Weak`` keep pipelines and offloaders out of cycles of references. Those hold gigabytes
of a device until Python's garbage collector runs, which counts objects and not their bytes.

``locals_of_callers`` finds what torch was asked for where it hands nothing on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType, MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from twinproof.errors import ConfigError

__all__ = [
    "CudaEngine",
    "Engine",
    "FirstDerivatives",
    "InlineEngine",
    "Weak",
    "check_engine",
    "eagerly",
    "engine_for",
    "in_mode_of_caller",
    "locals_of_callers",
    "method_of",
    "outside_of_graphs",
    "pinned_empty",
    "release_dropped",
    "weakly",
]

P = ParamSpec("P")
T = TypeVar("T")


def eagerly(method: Callable[P, T]) -> Callable[P, T]:
    """The method, which ``torch.compile`` does not look into: one graph break, and no cost elsewhere.

    A traced lookup would fix shapes, steps and learning rates in a graph, and make a graph for each list of lengths.
    """

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Found here and not above: it imports the compiler, which an eager model never needs.
            disabled: Callable[P, T] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return disabled(*args, **options)
        return method(*args, **options)

    return call


@torch._disable_dynamo
def _called(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return function(*arguments, **options)


def outside_of_graphs(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which a compiler does not look into: it would take moves and bindings for arithmetic.

    Torch's own decorator would make a cycle of it, and keep what it holds until a garbage collection.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> T:
        found: T = _called(function, *arguments, **options)
        return found

    return call


class FirstDerivatives(torch.autograd.Function):
    """A function whose backward no graph goes through: kernels and exchanges make gradients that know of no other.

    Under ``create_graph=True`` such gradients would be constants, and what is differentiated again lack their part. By
    torch's own means its error says so where somebody does, and nothing is refused where nobody does.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        made: Any = staticmethod(once_differentiable(cls.backward))
        cls.backward = made  # type: ignore[method-assign]


def _there(found: Any, where: str) -> Any:
    if found is None:
        raise ConfigError(
            "what this belonged to has gone", got=None, expected="an owner that somebody keeps", where=where
        )
    return found


class Weak(Generic[T]):
    """An attribute that does not keep what it is set to. Reading it raises ConfigError where that has gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._where = f"_weak_{name}", name

    def __set__(self, instance: Any, value: T) -> None:
        vars(instance)[self._name] = weakref.ref(value)

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return cast("T", self)
        return cast("T", _there(vars(instance)[self._name](), self._where))


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """The bound method, which does not keep its object. Raises ConfigError where that has gone."""
    bound = cast("MethodType", method)
    function, of = bound.__func__, weakref.ref(bound.__self__)

    def call(*given: Any, **options: Any) -> T:
        return cast("T", function(_there(of(), function.__name__), *given, **options))

    return call


def method_of(function: Callable[..., T], instance: Any) -> Callable[..., T]:
    """The function as a method of the instance, which it does not keep: what may be set on that instance itself.

    It has the name, the documentation, the signature and the ``__func__`` of a bound method.
    """
    method = MethodType(function, instance)
    call: Any = functools.wraps(function)(weakly(method))
    call.__func__, call.__signature__ = function, inspect.signature(method)
    return cast("Callable[..., T]", call)


class Engine(Protocol):
    """What a stream program may ask for.

    Attributes:
        device: where its kernels run.
        stands_for_device: whether copies between ``host_empty`` and ``device_empty`` memory mean anything here.
    """

    device: torch.device
    stands_for_device: bool

    def stream(self, name: str, priority: int = 0) -> Stream:
        """A new stream; make it once and keep it. ``name`` is for reports; ``priority`` is as torch's: lower is first.

        Only who asks for a priority gives one: an engine without the argument serves all others.
        """

    def event(self) -> Event:
        """A new event, to be recorded any number of times."""

    def current(self) -> Stream:
        """The stream that ops of this thread go to."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Send ops and copies of this thread to ``stream``."""

    def record(self, event: Event, stream: Stream) -> None:
        """Set the event behind what ``stream`` has been given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on runs behind the event; the host goes on. Never recorded: no wait."""

    def synchronize(self, event: Event) -> None:
        """Block the host until the event; other work goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream: same shape and dtype, dense, one of them host memory or both device."""

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """``copy`` for each pair; an engine may do it in one call. Targets are apart."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of ``tensor`` is not reused until ``stream`` has done what it has been given so far."""

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        """Device memory, uint8, allocated on the current stream and not initialised."""

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8, pinned at its exact size where that is possible, and not initialised."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the device's memory."""

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name what is enqueued inside, for reports and profiles."""


def check_engine(engine: Any) -> Engine:
    """Demand all that an engine has: most of it is asked for in the middle of a step. Raises ConfigError."""
    names = [name for name in (*Engine.__annotations__, *vars(Engine)) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(engine, name)]
    if missing:
        got = f"{type(engine).__name__} without {', '.join(missing)}"
        raise ConfigError("not an engine", got=got, expected="twinproof.engine.Engine", where="engine")
    return engine  # type: ignore[no-any-return]


class InlineEngine:
    """Everything is over when the call returns: the CPU, where host and device memory are one."""

    stands_for_device = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def stream(self, name: str, priority: int = 0) -> Stream:
        """A name."""
        return name

    def event(self) -> Event:
        """Nothing to remember."""
        return None

    def current(self) -> Stream:
        """The only one."""
        return "host"

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """No change."""
        return contextlib.nullcontext()

    def record(self, event: Event, stream: Stream) -> None:
        """Everything so far is over."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing is open."""

    def synchronize(self, event: Event) -> None:
        """Nothing is open."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """One by one."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """References are enough."""

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Always: host and device are one."""
        return True

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Nobody asks."""
        return contextlib.nullcontext()


class CudaEngine:
    """``torch.cuda``; one H200 has run it, and no machine with several GPUs."""

    stands_for_device = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        found = torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device()) if found.index is None else found

    def stream(self, name: str, priority: int = 0) -> Stream:
        """A stream of torch's pool of that priority."""
        return torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        """An event without timing, which is the cheap kind."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        """What torch says it is."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """The stream context of torch, which also sets the device."""
        return torch.cuda.stream(stream)

    def record(self, event: Event, stream: Stream) -> None:
        """Queue the event."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Queue the wait."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Block on this event only."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``cudaMemcpyAsync`` on the current stream; host sides must be pinned to overlap."""
        target.copy_(source, non_blocking=True)

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """One by one."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``record_stream``; host memory needs none, its owner waits before it lets go."""
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        """The caching allocator's, on the current stream."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """On pages of its own, pinned at its exact size: see ``twinproof.engine``."""
        return pinned_empty(size_bytes, self.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """As torch says."""
        return tensor.is_cuda

    def is_capturing(self) -> bool:
        """As torch says."""
        return torch.cuda.is_current_stream_capturing()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A range of torch's profiler, which a trace shows on the host and on the device."""
        return torch.profiler.record_function(name)


def engine_for(device: torch.device) -> Engine:
    """The engine of a device kind."""
    return CudaEngine(device) if device.type == "cuda" else InlineEngine(device)


_PAGE_BYTES = 4096


def in_mode_of_caller(work: Callable[..., T]) -> Callable[..., T]:
    """The callable for other threads, which have no mode of their own: it runs in the inference mode of this thread.

    Tensors made in inference mode can be written to in no other.
    """
    is_on = torch.is_inference_mode_enabled()

    def run(*args: Any) -> T:
        with torch.inference_mode(is_on):
            return work(*args)

    return run


class _Region(NamedTuple):
    memory: torch.Tensor  # Keeps the pages until they are unpinned.
    pointer: int
    device: torch.device
    process: int


# Dropped while it could not be unpinned. It belongs to the process: whoever made it may be gone.
_dropped: list[_Region] = []


def pinned_empty(size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [size_bytes] on pages of its own, pinned; torch's own pinned memory is rounded up to a power of two.

    Args:
        size_bytes: of the memory; none is pinned for 0.
        device: the CUDA device whose copies use it: they are waited for before it is unpinned.
    """
    release_dropped()
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    from torch.cuda._pin_memory_utils import pin_memory

    pages_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = torch.empty(pages_bytes + _PAGE_BYTES, dtype=torch.uint8, device="cpu")
    memory = memory[-memory.data_ptr() % _PAGE_BYTES :][:size_bytes]
    region = _Region(memory, memory.data_ptr(), device, os.getpid())
    pin_memory(region.pointer, size_bytes)
    # Another storage of the same pages: it can go while the region stays.
    handed_out: torch.Tensor = torch.from_dlpack(memory)
    weakref.finalize(handed_out.untyped_storage(), _drop, region).atexit = False
    return handed_out


def release_dropped() -> None:
    """Unpin what was dropped while that was impossible, if it is possible now."""
    # One at a time: where unpinning fails the others stay, and so does what another thread drops meanwhile.
    for _ in range(len(_dropped)):
        try:
            region = _dropped.pop(0)
        except IndexError:
            return  # Another thread has released the rest.
        _drop(region)


def _drop(region: _Region) -> None:
    if region.process != os.getpid():
        # The parent's pages, copied on write: they are pinned there, and not here.
        return
    if torch.cuda.is_current_stream_capturing():
        _dropped.append(region)
        return
    from torch.cuda._pin_memory_utils import unpin_memory

    # Copies may still run to it; and memory freed while registered stays pinned under somebody else's data.
    try:
        torch.cuda.synchronize(region.device)
        unpin_memory(region.pointer)
    except BaseException:
        _dropped.append(region)
        raise


def locals_of_callers(name: str) -> Iterator[Any]:
    """What a local of this name is in each call of torch's that is under way, the innermost first; None: it has none.

    No other call is looked at: one that was keeps what its locals were until it ends, before Python 3.13.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            yield frame.f_locals.get(name)
        frame = frame.f_back


# Streams and events are opaque: only the engine that made them looks inside.
Stream = Any
Event = Any
