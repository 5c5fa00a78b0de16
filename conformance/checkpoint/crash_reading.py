"""What a folder holds after a crash, by three readers that share no code: it must be one state, whole, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from conformance.checkpoint.cases import INDEX, State, load, zeros_like
from conformance.checkpoint.crash_programs import make_state
from conformance.harness import Mismatch, assert_equal, assert_same_tensors
from conformance.harness.raising import errors_inside
from conformance.provers.faults import Event, Outcome, Trace

__all__ = [
    "Torch",
    "assert_returned",
    "assert_state",
    "carries_errno",
    "is_harmless",
    "is_shown",
    "leftovers",
    "state_in",
    "state_in_file",
    "succeeds",
    "tree",
]


class Torch:
    """torch's own reader in the form that ``cases.load`` wants."""

    HuggingFaceStorageReader = HuggingFaceStorageReader


@contextmanager
def succeeds(what: str, where: str) -> Iterator[None]:
    """Turn any error inside into a mismatch: here it is an answer to the question, not an accident of the test."""
    try:
        yield
    except (Mismatch, KeyboardInterrupt, SystemExit, pytest.skip.Exception):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        got = f"{type(error).__name__}: {error}"
        raise Mismatch(f"{what} fails", got=got, expected="no error", where=where) from error


def assert_returned(outcomes: Iterable[Outcome], where: str) -> None:
    """Demand that every process returned a result."""
    for outcome in outcomes:
        with succeeds("the process", where):
            outcome.value()


def _by_index(folder: Path) -> State:
    """What a plain reader finds: the index, then the files that it names, with the safetensors library."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    opened = {file: load_file(folder / file) for file in sorted(set(weight_map.values()))}
    stored = {name: file for file, tensors in opened.items() for name in tensors}
    assert_equal(weight_map, stored, where=f"{folder.name}: index and files")
    return {name: opened[file][name] for name, file in weight_map.items()}


def _same(got: State, expected: State) -> bool:
    try:
        assert_same_tensors(got, expected)
    except Mismatch:
        return False
    return True


def state_in(checkpoint: Any, folder: Path, seeds: Iterable[int], *, where: str) -> int | None:
    """Which of the seeds' states the folder holds, by every reader; None where there is no checkpoint at all.

    Raises:
        Mismatch: a mixture, a part, another state, or readers that disagree.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    if INDEX not in names:
        raise Mismatch("a part of a checkpoint is visible", got=sorted(names), expected="all or nothing", where=where)
    seeds = list(seeds)
    with succeeds("reading what is visible", where):
        found = _by_index(folder)
    seed = next((seed for seed in seeds if _same(found, make_state(seed))), None)
    if seed is None:
        raise Mismatch("neither the old state nor the new one", got=sorted(names), expected=seeds, where=where)
    assert_state(checkpoint, folder, seed, where=where)
    return seed


def assert_state(checkpoint: Any, folder: Path, seed: int, *, where: str) -> None:
    """Demand that the implementation's reader, torch's and the plain one give the state, bit for bit."""
    expected = make_state(seed)
    with succeeds("reading by the index", where):
        assert_same_tensors(_by_index(folder), expected, where=f"{where}: safetensors")
    for name, reader in (("implementation", checkpoint), ("torch", Torch)):
        targets = {key: zeros_like(tensor) for key, tensor in expected.items()}
        with succeeds(f"the reader of {name}", where):
            load(reader, targets, folder)
        assert_same_tensors(targets, expected, where=f"{where}: reader of {name}")


def state_in_file(checkpoint: Any, path: Path, seeds: Iterable[int], *, where: str) -> int | None:
    """The same for one file, by ``load_file`` of the implementation and of the library."""
    if not path.exists():
        return None
    with succeeds("load_file", where):
        found: dict[str, torch.Tensor] = load_file(path)
        assert_same_tensors(checkpoint.load_file(path), found, where=where)
    seed = next((seed for seed in seeds if _same(found, make_state(seed))), None)
    if seed is None:
        raise Mismatch("neither the old file nor the new one", got=sorted(found), expected=list(seeds), where=where)
    return seed


def is_shown(trace: Trace, target: Path) -> bool:
    """Whether a rename onto the target, or of a file in it, succeeded: from there on the new state may be the valid
    one.
    """
    return any(event.succeeded and _lands_on(event, str(target)) for event in trace.only("rename"))


def is_harmless(trace: Trace, target: Path) -> bool:
    """Whether no struck call could lose anything: it began after the new state was in force, or was a ``mkdir``.

    A ``mkdir`` of a folder that is there fails anyhow, and a folder that is not there fails what comes next.
    """
    shown = [event.begin for event in trace.only("rename") if event.succeeded and _lands_on(event, str(target))]
    return bool(shown) and all(event.call == "mkdir" or event.begin > min(shown) for event in trace.struck)


def _lands_on(event: Event, target: str) -> bool:
    return event.path2 == target or os.path.dirname(event.path2) == target


def carries_errno(error: BaseException, code: int) -> bool:
    """Whether ``error`` is, or carries from any rank, the OSError with this number, or the message of one."""
    texts = (os.strerror(code), f"Errno {code}]")
    return any(
        getattr(inner, "errno", None) == code or any(text in str(inner) for text in texts)
        for inner in errors_inside(error)
    )


def leftovers(parent: Path, *kept: str) -> list[str]:
    """What lies beside the files and folders that should be there."""
    return sorted(set(os.listdir(parent)) - set(kept))


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a folder: inode, modification time and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_ino, status.st_mtime_ns, content)
    return found
