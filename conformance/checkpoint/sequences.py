"""Several saves and loads with one writer, one reader and one planner: what an earlier one left must not be seen later.

A program is a list of steps for all ranks. The model is what stands in each folder: the state, and by whom it was cut
into files, and whether with sums. After a program each folder's files are the safetensors library's bytes for the last
state that was saved there, and its index states the sums of that state; a save that failed on one rank left the folder
as it was; no file stays open and no state is held.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from conformance.checkpoint.cases import INDEX, Tiled, assert_folder, assert_parts, tiled
from conformance.checkpoint.machine import FOLDERS, Spec, boxes_of, specs_strategy, state_of
from conformance.harness import Mismatch, Rank, assert_equal, assert_same_tensor

Step = tuple[Any, ...]


class RankFault(Exception):
    """What a tensor raises when it is asked for its memory on one rank."""


class Unreadable(Tiled):
    """A tensor of which one rank cannot give its part."""

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        raise RankFault("here")


def shared(state: dict[str, torch.Tensor], dim: int, rank: Rank, *, fill: bool = True) -> dict[str, Any]:
    """This rank's part: scalars are replicated, the rest is cut along one dimension."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if value.dim() == 0:
            found[name] = value.clone() if fill else torch.zeros_like(value)
        else:
            boxes = boxes_of(tuple(value.shape), dim, rank.world_size)
            found[name] = tiled(value, boxes, rank.rank, rank.world_size, fill=fill)
    return found


def program_on(rank: Rank, root: str, options: dict[str, Any], threads: int, caches: bool, steps: list[Step]) -> None:
    """All steps with the same objects, then a look at what they hold."""
    checkpoint = rank.component("checkpoint")
    home = Path(root)
    held: list[weakref.ref[torch.Tensor]] = []
    with checkpoint.HuggingFaceStorageWriter(home / FOLDERS[0], **options) as writer:
        reader = checkpoint.HuggingFaceStorageReader(home / FOLDERS[0], thread_count=threads)
        for number, (verb, folder, specs, dim, *fault) in enumerate(steps):
            state = state_of(specs)
            if verb == "save":
                parts = shared(state, dim, rank)
                if fault[0] == rank.rank:
                    parts = {name: _broken(part) for name, part in parts.items()}
                with _failing(fault[0] is not None, where=f"save {number}"):
                    dcp.save(parts, checkpoint_id=home / folder, storage_writer=writer, planner=_planner(caches))
                held += [weakref.ref(part) for value in parts.values() for part in getattr(value, "parts", {}).values()]
            else:
                parts = shared(state, dim, rank, fill=False)
                dcp.load(parts, checkpoint_id=home / folder, storage_reader=reader)
                _check(parts, state, f"load {number} on rank {rank.rank}")
            del parts, state
        gc.collect()
        # What torch's cache of plans holds is torch's.
        alive = [] if caches else [ref for ref in held if ref() is not None]
        assert_equal(len(alive), 0, where="tensors of saved states that are held")
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert_equal([name for name in opened if name.startswith(f"{home.resolve()}/")], [], where="files left open")


def _planner(caches: bool) -> DefaultSavePlanner:
    # Which rank stores a replica decides on the order of names, and so on the files: here the first does.
    return DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=caches)


def _broken(part: Any) -> Any:
    if not isinstance(part, Tiled):
        return part
    made: Any = torch.Tensor._make_subclass(Unreadable, torch.empty(0, dtype=part.dtype))
    made.parts, made.whole = part.parts, part.whole
    return made


@contextmanager
def _failing(fails: bool, *, where: str) -> Iterator[None]:
    """On every rank, whichever rank it is that fails."""
    if not fails:
        yield
        return
    try:
        yield
    except CheckpointException:
        return
    raise Mismatch("a save went through", got="no error", expected="CheckpointException", where=where)


def _check(parts: dict[str, Any], state: dict[str, torch.Tensor], where: str) -> None:
    for name, value in state.items():
        if value.dim() == 0:
            assert_same_tensor(parts[name], value, where=f"{name} of {where}")
        else:
            assert_parts(parts[name], value, where=f"{name} of {where}")


def files_of(state: dict[str, torch.Tensor], limit: int | None) -> dict[str, list[str]]:
    """How huggingface_hub cuts a state into files; None: all in one.

    A tensor above the limit has a file of its own at once; the next file begins where another would not fit.
    """
    groups: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, value in state.items():
        if limit is not None and value.nbytes > limit:
            groups.append([name])
            continue
        if current and limit is not None and size + value.nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(name)
        size += value.nbytes
    groups += [current] if current else []
    return {f"model-{k:05d}-of-{len(groups):05d}.safetensors": names for k, names in enumerate(groups, start=1)}


step_strategy = st.one_of(
    st.tuples(st.just("save"), st.sampled_from(FOLDERS), specs_strategy, st.integers(0, 2), st.just(None)),
    st.tuples(st.just("save"), st.sampled_from(FOLDERS), specs_strategy, st.integers(0, 2), st.just(None)),
    st.tuples(st.just("save"), st.sampled_from(FOLDERS), specs_strategy, st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("load"), st.sampled_from(FOLDERS), st.none(), st.integers(0, 2)),
)


class SequenceMachine(RuleBasedStateMachine):
    """See the module. Class attributes are set by the test that runs it."""

    pool: Any
    root: Path
    counter = 0

    @initialize()
    def start(self) -> None:
        """A fresh folder for every program."""
        type(self).counter += 1
        self.home = self.root / f"sequence-{type(self).counter}"
        self.home.mkdir()
        self.model: dict[str, tuple[dict[str, Spec], dict[str, list[str]], bool]] = {}

    @rule(
        world=st.integers(1, 3),
        limit=st.none() | st.sampled_from([1, 100, 400, 10_000]),
        sequential=st.booleans(),
        threads=st.integers(1, 3),
        caches=st.booleans(),
        sums=st.booleans(),
        steps=st.lists(step_strategy, min_size=2, max_size=5),
    )
    def program(
        self,
        world: int,
        limit: int | None,
        sequential: bool,
        threads: int,
        caches: bool,
        sums: bool,
        steps: list[Step],
    ) -> None:
        """One writer, one reader, several steps."""
        options: dict[str, Any] = {"max_shard_size": limit, "thread_count": threads, "checksums": sums}
        options["write_mode"] = "sequential" if sequential else "random"
        chosen: list[Step] = []
        for verb, folder, specs, dim, *fault in steps:
            if verb == "save":
                fails = fault[0] is not None and fault[0] < world and any(shape for _, shape, _ in specs.values())
                # A rank whose part is empty is never asked for it.
                fails = fails and self._has_part(specs, dim, world, fault[0])
                chosen.append((verb, folder, specs, dim, fault[0] if fails else None))
                if not fails:
                    self.model[folder] = (specs, files_of(state_of(specs), limit), sums)
            elif folder in self.model:
                chosen.append((verb, folder, self.model[folder][0], dim))
        self.pool.run(program_on, world, str(self.home), options, threads, caches, chosen)

    @staticmethod
    def _has_part(specs: dict[str, Spec], dim: int, world: int, rank: int) -> bool:
        return any(
            0 not in sizes
            for _, shape, _ in specs.values()
            if shape
            for _, sizes in boxes_of(shape, dim, world)[rank::world]
        )

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 1), world=st.integers(1, 3), dim=st.integers(0, 2))
    def load_elsewhere(self, which: int, world: int, dim: int) -> None:
        """By another reader, on another number of ranks."""
        folder = sorted(self.model)[which % len(self.model)]
        self.pool.run(program_on, world, str(self.home), {}, 1, False, [("load", folder, self.model[folder][0], dim)])

    @invariant()
    def folders_are_the_model(self) -> None:
        """Each holds the last state that was saved there, and nothing lies beside."""
        if not hasattr(self, "home"):
            return
        for folder, (specs, files, sums) in self.model.items():
            assert_folder(self.home / folder, files, state_of(specs), has_sums=sums)
            assert_equal(sorted(os.listdir(self.home / folder)), sorted([*files, INDEX]), where=folder)
        assert_equal(sorted(os.listdir(self.home)), sorted(self.model), where="folders, and what is hidden among them")
