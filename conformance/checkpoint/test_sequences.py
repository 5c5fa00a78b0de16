"""Several saves and loads with the same objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.distributed.checkpoint.api import CheckpointException

from conformance.checkpoint.cases import assert_folder, load_with, save_with
from conformance.checkpoint.machine import Spec, state_of
from conformance.checkpoint.sequences import SequenceMachine, files_of, program_on
from conformance.harness import assert_equal, examples, requirement, run_machine
from conformance.provers.faults import FaultServer


@requirement(
    "CKPT-500",
    "One writer and one reader MUST serve any sequence of saves and loads of other states, orders, shapes, shardings "
    "and folders as fresh ones would, saves that fail on one rank among them, and hold no state and no file.",
)
def test_any_sequence(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    class Machine(SequenceMachine):
        pool, root = rank_pool, tmp_path

    # Few programs are drawn, and some of them hold nothing.
    few, more = ({f"w{place}": ("F32", (4, 3), place) for place in range(count)} for count in (1, 3))
    steps = [
        ("save", "a", few, 0, None),
        ("save", "b", more, 0, 1),
        ("save", "b", more, 1, None),
        ("load", "a", few, 1),
    ]
    # Of the same names and sizes.
    flags: dict[str, Spec] = {"w0": ("B", (4, 3), 0)}
    floats: dict[str, Spec] = {"w0": ("F8", (4, 3), 0)}
    others = [("save", "a", floats, 0, None), ("save", "b", flags, 0, None)]
    for name, options, program in (("first", {"checksums": True}, steps), ("second", {}, others)):
        (tmp_path / name).mkdir()
        rank_pool.run(program_on, 2, str(tmp_path / name), options, 2, False, program)
    assert_folder(tmp_path / "second/b", files_of(state_of(flags), None), state_of(flags), has_sums=False)
    run_machine(Machine, settings=settings(examples(5), stateful_step_count=5))


class RecordedRanks:
    """Ranks whose calls on files are recorded, in place of a pool of ranks."""

    def __init__(self, server: FaultServer, root: Path) -> None:
        self._server, self._root = server, root

    def run(self, function: Callable[..., object], world: int, *args: Any) -> None:
        """All ranks, then a look at the order of what they wrote, synced and showed."""
        found = self._server.run_ranks_forked(function, world, *args, root=self._root, timeout_s=60.0)
        for outcome in found.outcomes:
            outcome.value()
        trace = found[0].trace
        wrong = [
            f"{item.kind}: {item.path.removeprefix(trace.root)}: {item.detail}" for item in trace.order_violations()
        ]
        assert_equal(wrong, [], where="what a power cut could destroy")


@requirement(
    "CKPT-501",
    "Each of several durable saves with one writer, by all ranks, MUST sync its files before it shows them, the first "
    "as the last, whatever was saved, loaded or failed before.",
)
def test_synced_in_any_sequence(checkpoint: Any, server: FaultServer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    class Machine(SequenceMachine):
        pass

    Machine.pool, Machine.root = RecordedRanks(server, root), root
    run_machine(Machine, settings=settings(examples(3), stateful_step_count=3))


def _watched(names: str) -> tuple[dict[str, torch.Tensor], list[weakref.ref[Any]]]:
    """Tensors over arrays that live until the last of a tensor, of its views and of its memory has gone."""
    arrays = [np.full((6, 4), number, np.float32) for number in range(len(names))]
    return dict(zip(names, map(torch.from_numpy, arrays), strict=True)), list(map(weakref.ref, arrays))


_KEPT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sums": {"checksums": True},
    "sequential": {"write_mode": "sequential"},
    "shards": {"enable_consolidation": False},
    "files": {"max_shard_size": 100},
}


@requirement(
    "CKPT-852",
    "A writer and a reader that live on MUST hold none of the memory that was saved or loaded, in any form, a writer "
    "whose save failed neither.",
)
@pytest.mark.parametrize("form", list(_KEPT_OPTIONS))
def test_memory_is_given_back(checkpoint: Any, tmp_path: Path, form: str) -> None:
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", overwrite=True, **_KEPT_OPTIONS[form])
    reader = checkpoint.HuggingFaceStorageReader(tmp_path / "ck")

    def failing(state: dict[str, torch.Tensor]) -> None:
        with pytest.raises(CheckpointException):
            save_with(writer, {**state, "meta": torch.empty(2, device="meta")})

    works: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "a save": lambda state: save_with(writer, state),
        "a second save": lambda state: save_with(writer, state),
        "a failed save": failing,
        "a load": lambda state: load_with(reader, state),
    }
    for where, work in works.items():
        state, arrays = _watched("abc")
        work(state)
        del state
        gc.collect()
        assert_equal(sum(array() is not None for array in arrays), 0, where=f"tensors that are held behind {where}")
