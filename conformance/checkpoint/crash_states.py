"""The old, the new and the next state of the crash tests, and the strangers' files that live beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.checkpoint.cases import save
from conformance.checkpoint.crash_programs import MAPPING, make_state
from conformance.checkpoint.crash_reading import assert_state, succeeds
from conformance.harness import assert_equal

__all__ = ["NEW", "NEXT", "OLD", "STRAY", "assert_stray", "golden", "nothing", "save_again", "save_seed"]

# Seeds of make_state.
OLD, NEW, NEXT = 100, 200, 300
STRAY = {"config.json": b'{"a": 1}', "sub/tokenizer.model": b"\0\1", ".hidden": b""}


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
