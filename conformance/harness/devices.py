"""The devices that the suite can run on, by name. Nothing of torch is imported before one is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = [
    "DEVICES",
    "absent_capabilities",
    "fixtures_on",
    "is_kept_from",
    "kernel_sources",
    "place_of",
    "prepare_device",
    "stems_on",
]

DEVICES = ("cpu", "pretend", "simt", "simt-host", "cuda", "cuda-host")
_OF_OBJECTS = ("pretend", "cuda")
_PLACED = ("pipeline", "checkpoint")
_OF_STORES = ("pretend", "simt", "simt-host", "cuda", "cuda-host")
_REAL = ("cuda", "cuda-host")
_MAKE_A_PRETEND_DEVICE = {"on_pretend", "PretendDevice", "PretendEngine"}


def kernel_sources() -> Path | None:
    """The folder of fastimpl's CUDA sources, where the package has them."""
    import fastimpl

    found = [Path(folder) / "csrc" for folder in fastimpl.__path__]
    return next((path for path in found if path.is_dir()), None)


def fixtures_on(name: str, implementation: str) -> frozenset[str]:
    """The fixtures by which tests run on a device: who takes one, and who has a store, which is itself on it."""
    fixtures = {"device"} if name in _OF_OBJECTS else set()
    if _has_stores(name, implementation):
        fixtures |= {"kvstore"} if name == "pretend" else {"kvstore", "rank_pool"}
    return frozenset(fixtures)


def stems_on(name: str) -> frozenset[str]:
    """The components whose tests all run on a device: what they make is put there, see ``place_of``."""
    return frozenset(_PLACED if name == "pretend" else ())


def is_kept_from(name: str, test: Callable[..., Any]) -> bool:
    """Whether a test cannot run in a process that works on a device: it makes the pretend device, by itself.

    Torch knows one accelerator in a process, and takes a Python backend before CUDA: no backward of CUDA tensors ends
    any more from then on (pytorch/pytorch#161129).
    """
    if name not in _REAL:
        return False
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    waiting, seen = [inspect.unwrap(inner)], set[Any]()
    while waiting:
        function = waiting.pop()
        seen.add(function)
        for word in _words_of(function.__code__):
            if word in _MAKE_A_PRETEND_DEVICE:
                return True
            found = function.__globals__.get(word)
            if inspect.isfunction(found) and found.__module__ == function.__module__ and found not in seen:
                waiting.append(found)
    return False


def _words_of(code: CodeType) -> Iterator[str]:
    """All names that a function uses of its module, those of functions inside of it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_of(constant)


def place_of(name: str, stem: str) -> str:
    """Where tests of a component put what they make, unless they say so themselves."""
    return name if name in _OF_OBJECTS and stem in _PLACED else "cpu"


def _has_stores(name: str, implementation: str) -> bool:
    return name in _OF_STORES and implementation == "fastimpl"


def prepare_device(name: str, implementation: str) -> None:
    """Make ``torch.device(name)`` known to torch, and bind stores to it where the implementation's can lie there."""
    if name == "pretend":
        from conformance.checkpoint.placed import bind_lookups
        from conformance.provers.pretend_device import PretendDevice

        PretendDevice(sources=kernel_sources())
        bind_lookups()
    if _has_stores(name, implementation):
        from conformance.kvstore.simt import bind

        bind(name)


def absent_capabilities(name: str, implementation: str) -> frozenset[str]:
    """What an implementation does not have on that device, whatever it declares."""
    if not _has_stores(name, implementation):
        return frozenset()
    from conformance.kvstore.simt import LACKS

    return LACKS
