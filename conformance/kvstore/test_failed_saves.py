"""What a save that fails says: this project's errors, on the rank at fault and on the others, and not torch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conformance.harness import Rank, assert_equal, raises, requirement
from conformance.kvstore.cases import contents, filled, fresh, save, store_of
from twinproof.errors import CheckpointExistsError, ConfigError, DistributedError, StorageError


@requirement(
    "KV-467",
    "A save that cannot write MUST raise the named error itself, a folder that is there, a file in the way and a name "
    "that no file has among them, and leave what is there as it was.",
)
def test_refused_places(kvstore: Any, tmp_path: Path) -> None:
    store, file = filled(kvstore, range(4)), tmp_path / "file"
    save(kvstore, store, tmp_path / "there")
    file.write_text("text")
    before = sorted(path.name for path in tmp_path.iterdir())
    ways: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
        "a folder that is there": (
            CheckpointExistsError,
            "there",
            lambda: save(kvstore, store, tmp_path / "there", overwrite=False),
        ),
        "a file in the way": (StorageError, "file", lambda: save(kvstore, store, file / "under")),
        "a NUL": (ConfigError, "NUL", lambda: save(kvstore, store, tmp_path / "a\0b")),
    }
    for name, (kind, said, way) in ways.items():
        with raises(kind, mentions=(said, "got: ", "expected: ", "where: "), where=name) as failure:
            way()
        # Not inside of torch's, where ``raises`` finds it, too.
        assert_equal(type(failure.outer).__name__, kind.__name__, where=name)
        assert_equal(sorted(path.name for path in tmp_path.iterdir()), before, where=name)
    with raises(ConfigError, mentions=("NUL", "where: path"), where="a load"):
        kvstore.load(store, tmp_path / "a\0b")
    other = fresh(kvstore)
    kvstore.load(other, tmp_path / "there")
    assert_equal(contents(other), contents(store), where="what was there")


def _said(rank: Rank, root: str, at_fault: int) -> list[str]:
    """What a rank says of saves of which one rank's writer refuses its plan, or knows another folder."""
    kvstore, folder = rank.component("kvstore"), Path(root)
    store = store_of(kvstore, kvstore.RowLayout(4))
    said = StorageError("writing failed", got="ENOSPC", expected="no error of the system", where="a disk")
    errors: list[BaseException | None] = [said, OSError(28, "No space left on device"), KeyError("another"), None]
    found = []
    for error in errors:
        is_here = rank.rank == at_fault
        path = folder / f"of {rank.rank}" if error is None and is_here else folder / "new"
        failing = mock.patch.object(
            rank.component("checkpoint").HuggingFaceStorageWriter, "prepare_local_plan", side_effect=error
        )
        with failing if error is not None and is_here else nullcontext():
            try:
                save(kvstore, store, path, buckets=kvstore.Buckets(2))
                found.append("no error")
            except BaseException as raised:
                found.append(type(raised).__name__)
    return found


@requirement(
    "KV-468",
    "Where one rank's writer fails, that rank MUST raise its own error, if it is this project's or the system's, and "
    "every other rank DistributedError; all of them errors of this project where they name other folders.",
)
@pytest.mark.parametrize("at_fault", [0, 1])
def test_one_rank_fails(kvstore: Any, rank_pool: Any, tmp_path: Path, at_fault: int) -> None:
    by_rank = rank_pool.run(_said, 2, str(tmp_path), at_fault, timeout_s=60)
    mine, others = by_rank[at_fault], by_rank[1 - at_fault]
    assert_equal(mine[:3], ["StorageError", "OSError", "CheckpointException"], where="the rank at fault")
    assert_equal(others[:3], ["DistributedError"] * 3, where="the other rank")
    assert_equal({mine[3], others[3]} - {"ConfigError", "DistributedError"}, set(), where="other folders")
    assert_equal(list(tmp_path.iterdir()), [], where="what is left")


@requirement(
    "KV-473",
    "A save of which no rank knows more than that another one failed MUST raise that DistributedError itself.",
)
def test_nobody_knows(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    error = DistributedError("another rank failed", got="a rank that is gone", expected="no failure", where="rank 1")
    store = filled(kvstore, range(4))
    failing = mock.patch.object(checkpoint.HuggingFaceStorageWriter, "prepare_local_plan", side_effect=error)
    with failing, raises(DistributedError, mentions=("a rank that is gone",), where="a save") as failure:
        save(kvstore, store, tmp_path / "new")
    assert_equal(type(failure.outer).__name__, "DistributedError", where="what is raised itself")
    assert_equal(list(tmp_path.iterdir()), [], where="what is left")
