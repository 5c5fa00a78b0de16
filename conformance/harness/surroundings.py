"""What a caller may have set for its process or its thread, beside anything that is under test."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from conformance.harness.compare import assert_equal


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "wide numbers": partial(_default_dtype, torch.float64),
    "narrow numbers": partial(_default_dtype, torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": _deterministic,
    "mixed precision": partial(torch.autocast, "cpu", torch.bfloat16),
}

# By these names threads of ours are known; one that outlives what it was made for is a leak.
_THREADS = ("checkpoint-", "kvstore-evict", "twinproof-")


def _open_files() -> set[str]:
    """What this process has open in folders of tests; nothing where the system does not say."""
    folders, found = os.path.join(tempfile.gettempdir(), "pytest-of-"), []
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        # The listing itself had a descriptor, which is gone.
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return {path for path in found if path.startswith(folders)}


def process_state() -> dict[str, Any]:
    """What belongs to the process or the thread, which whoever works in it has to leave as it was."""
    return {
        "garbage collector": gc.isenabled(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads of an operator": torch.get_num_threads(),
    }


def _threads_of_ours() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith(_THREADS)}


@contextmanager
def without_collection() -> Iterator[None]:
    """What is in a cycle stays, as it does on a device until a garbage collection happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def process_left_as_it_was() -> Iterator[None]:
    """Raise Mismatch where what runs inside leaves the process otherwise; the next one finds it as it was."""
    before, opened, running = process_state(), _open_files(), _threads_of_ours()
    try:
        yield
        assert_equal(process_state(), before, where="the process behind the test")
        # One that an earlier test left may end in a later one, when garbage is collected.
        left = sorted(each.name for each in _threads_of_ours() - running)
        assert_equal({"threads of ours": left}, {"threads of ours": []}, where="the process behind the test")
        if _open_files() - opened:
            # An error that was caught may hold a file, in a circle that nobody has collected yet.
            gc.collect()
        assert_equal(sorted(_open_files() - opened), [], where="files open behind the test")
    finally:
        _restore(before)


def _restore(state: Mapping[str, Any]) -> None:
    (gc.enable if state["garbage collector"] else gc.disable)()
    torch.set_grad_enabled(state["gradients"])
    torch.set_default_dtype(state["default dtype"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])
    if torch.get_num_threads() != state["threads of an operator"]:
        torch.set_num_threads(state["threads of an operator"])
