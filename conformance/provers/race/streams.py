"""torch's own stream API over the engine of a watch: classes and functions that take the place of torch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from conformance.provers.race.memory import Use
from conformance.provers.race.watcher import DEVICE, Watcher, is_device
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.engine import DEFAULT
from conformance.provers.virtual_device.engine import Event as VirtualEvent
from twinproof.errors import UnsupportedError

__all__ = ["Event", "Stream", "api_of"]

_TOTAL_BYTES = 80 << 30


class Stream:
    """Stands for ``torch.cuda.Stream`` and ``torch.Stream``."""

    watcher: Watcher
    name: str

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        if device is not None and not is_device(device):
            raise UnsupportedError("a stream of another device", got=str(device), expected=DEVICE, where="Stream")
        if options:
            self.watcher.gap("bypass", "Stream", "a stream by its number is not known here")
        self.name, self.priority = self.watcher.engine.new_stream(priority), priority

    @classmethod
    def named(cls, name: str) -> Stream:
        """The stream of a name that the engine has given."""
        made = cls.__new__(cls)
        made.name, made.priority = name, cls.watcher.engine.priorities.get(name, 0)
        return made

    @property
    def device(self) -> torch.device:
        """The only device."""
        return torch.device(DEVICE, 0)

    device_index, device_type = 0, 1

    @property
    def stream_id(self) -> int:
        """0 for the default stream."""
        return 0 if self.name == DEFAULT else hash(self.name) & 0x7FFFFFFF

    @property
    def cuda_stream(self) -> int:
        """A number; who launches on it by himself is not seen."""
        self.watcher.gap("address", "cuda_stream", "whoever launches on this handle is not seen")
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest."""
        return 0, -5

    def wait_event(self, event: Event) -> None:
        """Later work of this stream comes after what the event recorded."""
        self.watcher.engine.wait(self.name, event.virtual)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream comes after what ``stream`` was given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind what this stream was given so far."""
        found = event if event is not None else _event_of(self)
        found.record(self)
        return found

    def synchronize(self) -> None:
        """The host waits."""
        self.watcher.engine.synchronize_stream(self.name)

    def query(self) -> bool:
        """Always over: an answer that another run may not give."""
        self.watcher.gap("time", "Stream.query", "the host asks how far a stream is")
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        """Never: graphs are refused."""
        return False

    def __enter__(self) -> Stream:
        self.watcher.engine.push(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.engine.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream {self.name}>"


class Event:
    """Stands for ``torch.cuda.Event`` and ``torch.Event``."""

    watcher: Watcher

    def __init__(self, *given: Any, **options: Any) -> None:
        # ``torch.cuda.Event`` takes flags, ``torch.Event`` a device.
        options |= dict(zip(("enable_timing", "blocking", "interprocess"), given, strict=False))
        if options.get("interprocess") is True:
            self.watcher.gap("bypass", "Event", "other processes wait for this event")
        self.virtual: VirtualEvent = self.watcher.engine.event()
        self.mark: Use | None = None

    @property
    def device(self) -> torch.device:
        """The only device."""
        return torch.device(DEVICE, 0)

    @property
    def event_id(self) -> int:
        """Any number."""
        return id(self)

    def record(self, stream: Stream | None = None) -> None:
        """Behind what the stream, or the current one, was given so far."""
        engine = self.watcher.engine
        name = engine.current() if stream is None else stream.name
        # The event itself may have been waited for: those edges stay as they were.
        self.virtual = engine.event()
        engine.record(self.virtual, name)
        site = self.watcher.site("Event.record")
        self.mark = Use(name, engine.tracker.clocks[name].get(name, 0), True, 0, 0, str(site), site)

    def wait(self, stream: Stream | None = None) -> None:
        """The stream, or the current one, goes on after it."""
        engine = self.watcher.engine
        engine.wait(engine.current() if stream is None else stream.name, self.virtual)

    def synchronize(self) -> None:
        """The host waits."""
        self.watcher.engine.synchronize(self.virtual)

    def query(self) -> bool:
        """Always over: an answer that another run may not give."""
        if self.virtual.clock is not None and not self._is_known():
            self.watcher.gap("time", "Event.query", "the host asks how far a stream is")
            self.synchronize()
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of the virtual clock."""
        for event in (self, end_event):
            if event.mark is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            if not event._is_known():
                site = self.watcher.site("elapsed_time")
                self.watcher.memories.note_event(event.mark, Use(HOST, 0, False, 0, 0, str(site), site))
        self.watcher.gap("time", "elapsed_time", "the host looks at times, which differ from run to run")
        return 1e3 * (end_event.virtual.time_s - self.virtual.time_s)

    def _is_known(self) -> bool:
        # An event is over when its stream has come to it: by then all is over that the stream had waited for.
        known = self.watcher.memories.clocks[HOST]
        return self.virtual.clock is None or all(known.covers(*one) for one in self.virtual.clock.items())

    def ipc_handle(self) -> bytes:
        """Not here."""
        raise UnsupportedError("an event of several processes", got="ipc_handle", expected="one process", where="Event")


class Device:
    """Stands for ``torch.cuda.device`` and ``torch.accelerator.device_index``: there is one."""

    def __init__(self, device: Any = None) -> None:
        is_device(DEVICE if device in (None, -1) else device)
        self.idx, self.prev_idx = 0, -1

    def __enter__(self) -> None:
        """It is the current one already."""

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""


class DeviceOf(Device):
    """Stands for ``torch.cuda.device_of``: the device of a tensor or of a storage."""

    def __init__(self, obj: Any) -> None:
        super().__init__()


def _event_of(stream: Stream) -> Event:
    kind: type[Event] = stream.event_class  # type: ignore[attr-defined]
    return kind()


def api_of(watcher: Watcher) -> SimpleNamespace:
    """The classes and functions of ``torch.cuda`` and ``torch.accelerator``, bound to a watch."""
    event: type[Event] = type("Event", (Event,), {"watcher": watcher})
    stream: type[Stream] = type("Stream", (Stream,), {"watcher": watcher, "event_class": event})
    engine, memories = watcher.engine, watcher.memories

    def current_stream(device: Any = None) -> Stream:
        return stream.named(engine.current())

    def default_stream(device: Any = None) -> Stream:
        return stream.named(DEFAULT)

    def set_stream(given: Any) -> None:
        if given is not None:
            engine.set_current(given.name)

    @contextmanager
    def on(given: Any) -> Iterator[None]:
        if given is None:
            yield
            return
        with given:
            yield

    def synchronize(device: Any = None) -> None:
        engine.synchronize_all()

    def allocated(*_: Any, **__: Any) -> int:
        memories.sweep_all()
        return memories.live_bytes

    def peak(*_: Any, **__: Any) -> int:
        return memories.peak_bytes

    def reset_peak(*_: Any, **__: Any) -> None:
        memories.peak_bytes = allocated()

    def statistics(*_: Any, **__: Any) -> dict[str, int]:
        known = {"allocated_bytes.all.current": allocated(), "allocated_bytes.all.peak": memories.peak_bytes}
        return defaultdict(int, {"num_ooms": 0, "num_alloc_retries": 0, **known})

    def sleep(cycles: int) -> None:
        name = engine.current()
        engine.add_op(name, memories.clocks.advance(name), watcher.site("_sleep"), cycles * 1e-9)

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            watcher.gap("bypass", name, "this call is not modelled")
            expected = "streams, events and copies"
            raise UnsupportedError(
                "a call that the race prover does not model", got=name, expected=expected, where="torch.cuda"
            )

        return refused

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731 -- a dozen names for it follow.
    cuda = {
        "Stream": stream, "Event": event, "stream": on, "StreamContext": on, "current_stream": current_stream,
        "default_stream": default_stream, "set_stream": set_stream, "synchronize": synchronize,
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": nothing, "device": Device, "device_of": DeviceOf, "init": nothing,
        "_lazy_init": nothing, "_lazy_call": lambda call, **_: None, "empty_cache": nothing, "ipc_collect": nothing,
        "get_device_name": lambda *_, **__: "race prover", "get_device_capability": lambda *_, **__: (9, 0),
        "get_device_properties": lambda *_, **__: SimpleNamespace(
            name="race prover", major=9, minor=0, total_memory=_TOTAL_BYTES, multi_processor_count=132, warp_size=32
        ),
        "is_bf16_supported": lambda *_, **__: True, "memory_allocated": allocated, "max_memory_allocated": peak,
        "memory_reserved": allocated, "max_memory_reserved": peak, "reset_peak_memory_stats": reset_peak,
        "mem_get_info": lambda *_, **__: (_TOTAL_BYTES - allocated(), _TOTAL_BYTES),
        "memory_stats": statistics, "reset_max_memory_allocated": reset_peak,
        "reset_accumulated_memory_stats": nothing, "set_per_process_memory_fraction": nothing,
        "manual_seed": nothing, "manual_seed_all": nothing, "_sleep": sleep,
        "is_current_stream_capturing": lambda: False, "get_arch_list": lambda: ["sm_90"],
        **{name: refuse(f"torch.cuda.{name}") for name in (
            "CUDAGraph", "graph", "make_graphed_callables", "ExternalStream", "caching_allocator_alloc", "MemPool",
        )},
    }  # fmt: skip
    accelerator = {
        "is_available": lambda: True, "current_accelerator": lambda *_, **__: torch.device(DEVICE),
        "device_count": lambda: 1, "current_device_index": lambda: 0, "current_device_idx": lambda: 0,
        "set_device_index": nothing, "set_device_idx": nothing, "current_stream": current_stream,
        "set_stream": set_stream, "synchronize": synchronize, "device_index": Device,
        "empty_cache": nothing, "memory_allocated": allocated, "max_memory_allocated": peak,
        "memory_reserved": allocated, "max_memory_reserved": peak, "reset_peak_memory_stats": reset_peak,
    }  # fmt: skip
    return SimpleNamespace(cuda=cuda, accelerator=accelerator, stream=stream, event=event)
