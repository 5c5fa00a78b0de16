"""Putting a watch in the place of torch's own API for as long as it lasts, in every thread that the program starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # Modes load it at their first op; it must not see what is put in place here.
import torch.autograd
import torch.cuda
from torch.overrides import _get_current_function_mode_stack

from conformance.provers.race.around import around
from conformance.provers.race.collectives import collectives
from conformance.provers.race.functions import FunctionsMode
from conformance.provers.race.points import site_here
from conformance.provers.race.storages import replaced
from conformance.provers.race.streams import api_of
from conformance.provers.race.watcher import DEVICE, OpsMode, Watcher
from twinproof.errors import UnsupportedError

__all__ = ["in_place"]


def _modes() -> list[Any]:
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


@contextmanager
def in_thread(watcher: Watcher) -> Iterator[None]:
    """Watch the calling thread; its current stream is the default one."""
    ident = threading.get_ident()
    watcher.engine.threads.add(ident)
    try:
        with FunctionsMode(watcher), OpsMode(watcher):
            yield
    finally:
        watcher.engine.forget_thread(ident)


@contextmanager
def in_place(watcher: Watcher) -> Iterator[None]:
    """Torch's stream API is the watch's, until the end. Refuses to stand in front of a device that is in use."""
    if getattr(torch.cuda.Stream, "watcher", None) is not None:
        raise UnsupportedError("a watch within a watch", got="watch()", expected="one at a time", where="race")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            "CUDA is in use in this process, and its work would not be seen", got="initialized CUDA",
            expected="a process without it, as with CUDA_VISIBLE_DEVICES=''", where="race",
        )  # fmt: skip
    api = api_of(watcher)
    with ExitStack() as stack:

        def put(place: Any, name: str, value: Any) -> None:
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, value))

        for name, value in api.cuda.items():
            put(torch.cuda, name, value)
        for name, value in api.accelerator.items():
            put(torch.accelerator, name, value)
        for place in (torch, torch.cuda.streams):
            put(place, "Stream", api.stream)
            put(place, "Event", api.event)
        put(torch.autograd, "_engine_run_backward", _backward(watcher, torch.autograd._engine_run_backward))
        put(torch.autograd.Function, "apply", _applied(watcher, vars(torch.autograd.Function)["apply"].__func__))
        put(torch, "compile", _uncompiled(watcher))
        put(torch.amp.autocast_mode.autocast, "__init__", _autocast(torch.amp.autocast_mode.autocast.__init__))
        hooks = torch.autograd.graph.saved_tensors_hooks
        put(hooks, "__init__", _saved_tensors_hooks(watcher, hooks.__init__))
        for place, name, value in (*replaced(watcher), *around(api.cuda)):
            put(place, name, value)
        # Its arguments are parsed before a mode is asked.
        put(torch.Tensor, "record_stream", _record_stream(watcher))
        put(threading.Thread, "start", _start(watcher))
        stack.enter_context(collectives(watcher))
        stack.enter_context(in_thread(watcher))
        yield


@contextmanager
def _answering(watcher: Watcher) -> Iterator[None]:
    """Torch has called the program back from within a call that our own mode has handled, where it is off."""
    if any(isinstance(mode, FunctionsMode) for mode in _modes()):
        yield
    else:
        with FunctionsMode(watcher):
            yield


def _saved_tensors_hooks(watcher: Watcher, original: Callable[..., None]) -> Callable[..., None]:
    def hooked(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(value: Any) -> Any:
            with _answering(watcher):
                return hook(value)

        return called

    def start(context: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        original(context, hooked(pack_hook), hooked(unpack_hook))

    return start


def _backward(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(roots: Any, *args: Any, **options: Any) -> Any:
        if not watcher.engine.is_watched():
            return original(roots, *args, **options)
        with ExitStack() as stack:
            stack.enter_context(_answering(watcher))
            # Of torch's engine: gradients, whether the graph stays and gets one of its own, inputs.
            gradients, inputs = args[0], args[3] if len(args) > 3 else ()
            stack.enter_context(watcher.engine.backward.running(roots, gradients, inputs))
            stack.enter_context(watcher.engine.following_nodes())
            stack.enter_context(watcher.calling(False, None))
            return original(roots, *args, **options)

    return run_backward


def _applied(watcher: Watcher, original: Callable[..., Any]) -> Any:
    """``autograd.Function.apply``, which no mode of torch sees: its node is of the stream behind its forward."""

    def apply(function: Any, *args: Any, **options: Any) -> Any:
        result = original(function, *args, **options)
        if watcher.engine.is_watched():
            watcher.engine.backward.note_nodes(result, lambda: site_here("").point, is_function=True)
        return result

    return classmethod(apply)


def _uncompiled(watcher: Watcher) -> Callable[..., Any]:
    def compile_nothing(model: Any = None, **options: Any) -> Any:
        watcher.gap(
            "bypass", "torch.compile", "the program runs as it is written; what a compiler makes of it is not seen"
        )
        return model if model is not None else lambda given: given

    return compile_nothing


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    def start(context: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **options: Any) -> None:
        if device_type == DEVICE:
            # Tensors of the device hold memory of the host to torch; the dtype is that of a GPU.
            device_type, dtype = "cpu", dtype or torch.float16
        original(context, device_type, dtype, *args, **options)

    return start


def _record_stream(watcher: Watcher) -> Callable[..., None]:
    def record_stream(tensor: torch.Tensor, s: Any) -> None:
        if watcher.on_device(tensor):
            watcher.engine.keep(tensor, s.name)

    return record_stream


def _start(watcher: Watcher) -> Callable[..., None]:
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            with in_thread(watcher):
                run()

        thread.run = watched  # type: ignore[method-assign]
        original(thread)

    return start
