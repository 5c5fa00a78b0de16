"""Folders before a crash and after it: what is put there, and what three readers that share no code find afterwards.

They must find one state, whole, or nothing; strangers' files stay as they were.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from conformance.checkpoint.cases import INDEX, State, load, save, zeros_like
from conformance.checkpoint.crash_programs import MAPPING, make_state
from conformance.harness import Mismatch, assert_equal, assert_same_tensors, succeeds
from conformance.harness.raising import errors_inside
from conformance.provers.faults import Event, Outcome, Trace

__all__ = [
    "NEW",
    "NEXT",
    "OLD",
    "STRAY",
    "Torch",
    "assert_returned",
    "assert_state",
    "assert_stray",
    "carries_errno",
    "golden",
    "is_harmless",
    "is_shown",
    "leftovers",
    "nothing",
    "save_again",
    "save_seed",
    "state_in",
    "state_in_file",
    "tree",
]


# Seeds of make_state.
OLD, NEW, NEXT = 100, 200, 300
STRAY = {"config.json": b'{"a": 1}', "sub/tokenizer.model": b"\0\1", ".hidden": b""}


class Torch:
    """torch's own reader in the form that ``cases.load`` wants."""

    HuggingFaceStorageReader = HuggingFaceStorageReader


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


def save_seed(checkpoint: Any, path: Path, seed: int) -> None:
    """Save the state of that seed from this process."""
    save(checkpoint, make_state(seed), path, fqn_to_index_mapping=MAPPING)


def save_again(checkpoint: Any, path: Path, where: str) -> None:
    """Save the next state over whatever is there, and demand that every reader finds it."""
    with succeeds("the next save", where):
        save_seed(checkpoint, path, NEXT)
    assert_state(checkpoint, path, NEXT, where=f"saved after {where}")


def golden(checkpoint: Any, tmp_path: Path) -> Callable[[Path], object]:
    """Save the old state with strangers beside its files; the result puts a copy, as ``ck``, into a root."""
    source = tmp_path / "golden"
    save_seed(checkpoint, source / "ck", OLD)
    for name, content in STRAY.items():
        (source / "ck" / name).parent.mkdir(exist_ok=True)
        (source / "ck" / name).write_bytes(content)
    return lambda root: shutil.copytree(source, root, dirs_exist_ok=True)


def nothing(root: Path) -> None:
    """Leaves a root empty."""


def assert_stray(folder: Path, where: str) -> None:
    """Demand that the strangers are as they were."""
    found = {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in STRAY}
    assert_equal(found, STRAY, where=f"{where}: files of others")
