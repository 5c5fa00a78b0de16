"""The checkpoint state machine: saves, overwrites, loads, reshards and consolidations against a dict of tensors.

The model is a dict: folder -> state. After every step each folder's files must be the safetensors library's bytes for
the model's state. A step that disturbs another folder, or leaves something behind, is seen at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.checkpoint.cases import (
    INDEX,
    assert_folder,
    assert_parts,
    cut,
    load_ranks,
    random_bits,
    save_ranks,
    tiled,
)
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises
from twinproof.errors import CheckpointExistsError

Spec = tuple[str, tuple[int, ...], int]
FOLDERS = ("a", "b")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "F8": torch.float8_e4m3fn, "B": torch.bool}


def state_of(specs: dict[str, Spec]) -> dict[str, torch.Tensor]:
    """Tensors from what was drawn: name -> (dtype, shape, seed)."""
    return {name: random_bits(_DTYPES[dtype], shape, seed) for name, (dtype, shape, seed) in specs.items()}


def boxes_of(shape: tuple[int, ...], dim: int, ways: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shape cut in one dimension into uneven parts, one for each rank."""
    if not shape:
        return [((), ())]
    dim %= len(shape)
    edges = [shape[dim] * way * way // (ways * ways) for way in range(1, ways)]
    return cut(shape, [edges if d == dim else [] for d in range(len(shape))])


def save_on(rank: Rank, path: str, specs: dict[str, Spec], dim: int, options: dict[str, Any]) -> None:
    """Save from every rank; scalars are replicated, the rest is cut."""
    state: dict[str, Any] = {}
    for name, value in state_of(specs).items():
        boxes = boxes_of(tuple(value.shape), dim, rank.world_size)
        state[name] = value if value.dim() == 0 else tiled(value, boxes, rank.rank, rank.world_size)
    save_ranks(rank, state, Path(path), **options)


def load_on(rank: Rank, path: str, specs: dict[str, Spec], dim: int, threads: int) -> None:
    """Load on every rank and compare with what was saved."""
    state = state_of(specs)
    targets: dict[str, Any] = {}
    for name, value in state.items():
        boxes = boxes_of(tuple(value.shape), dim, rank.world_size)
        if value.dim() == 0:
            targets[name] = torch.zeros_like(value)
        else:
            targets[name] = tiled(value, boxes, rank.rank, rank.world_size, fill=False)
    load_ranks(rank, targets, Path(path), thread_count=threads)
    for name, value in state.items():
        if value.dim() == 0:
            assert_same_tensor(targets[name], value, where=name)
            continue
        assert_parts(targets[name], value, where=f"{name} on rank {rank.rank}")


def consolidate_on(rank: Rank, source: str, target: str, mapping: dict[str, int]) -> None:
    """Consolidate from every rank."""
    rank.component("checkpoint").consolidate_safetensors_files_on_every_rank(source, target, mapping)


specs_strategy = st.dictionaries(
    st.sampled_from(["w", "b", "norm", "é"]),
    st.tuples(
        st.sampled_from(sorted(_DTYPES)), st.lists(st.integers(1, 7), max_size=3).map(tuple), st.integers(0, 1000)
    ),
    min_size=1,
    max_size=4,
)
worlds = st.integers(1, 3)


class CheckpointMachine(RuleBasedStateMachine):
    """See the module. Class attributes are set by the test that runs it."""

    pool: Any
    root: Path
    counter = 0

    @initialize()
    def start(self) -> None:
        """A fresh folder for every program."""
        type(self).counter += 1
        self.home = self.root / str(type(self).counter)
        self.home.mkdir()
        self.model: dict[str, tuple[dict[str, Spec], dict[str, list[str]]]] = {}

    def _files(self, specs: dict[str, Spec], file_count: int) -> tuple[dict[str, int], dict[str, list[str]]]:
        count = min(file_count, len(specs))
        mapping = {name: 1 + i % count for i, name in enumerate(specs)}
        return mapping, {
            f"model-{k:05d}-of-{count:05d}.safetensors": [n for n, i in mapping.items() if i == k]
            for k in range(1, count + 1)
        }

    @rule(
        folder=st.sampled_from(FOLDERS),
        specs=specs_strategy,
        world=worlds,
        dim=st.integers(0, 2),
        count=st.integers(1, 3),
        block=st.sampled_from([64, 4096]),
    )
    def save(self, folder: str, specs: dict[str, Spec], world: int, dim: int, count: int, block: int) -> None:
        """Save, over whatever is there."""
        mapping, files = self._files(specs, count)
        options = {"fqn_to_index_mapping": mapping, "block_bytes": block}
        self.pool.run(save_on, world, str(self.home / folder), specs, dim, options)
        self.model[folder] = (specs, files)

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 1), world=worlds)
    def save_without_overwrite(self, which: int, world: int) -> None:
        """Refused, and nothing changes."""
        folder = sorted(self.model)[which % len(self.model)]
        with raises(CheckpointExistsError):
            self.pool.run(save_on, world, str(self.home / folder), {"w": ("F32", (3,), 1)}, 0, {"overwrite": False})

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 1), world=worlds, dim=st.integers(0, 2), threads=st.integers(1, 3))
    def load(self, which: int, world: int, dim: int, threads: int) -> None:
        """Load at any number of ranks, cut along any dimension."""
        folder = sorted(self.model)[which % len(self.model)]
        self.pool.run(load_on, world, str(self.home / folder), self.model[folder][0], dim, threads)

    @rule(
        folder=st.sampled_from(FOLDERS),
        specs=specs_strategy,
        world=worlds,
        dim=st.integers(0, 2),
        count=st.integers(1, 2),
    )
    def consolidate(self, folder: str, specs: dict[str, Spec], world: int, dim: int, count: int) -> None:
        """Save in torch's shard layout beside it, then consolidate over whatever is there."""
        mapping, files = self._files(specs, count)
        shards = self.home / f"shards-{len(os.listdir(self.home))}"
        self.pool.run(
            save_on, world, str(shards), specs, dim, {"enable_consolidation": False, "fqn_to_index_mapping": mapping}
        )
        self.pool.run(consolidate_on, world, str(shards), str(self.home / folder), mapping)
        self.model[folder] = (specs, files)

    @invariant()
    def folders_are_the_model(self) -> None:
        """Every folder holds exactly the oracle's bytes; nothing hidden is left over."""
        for folder, (specs, files) in getattr(self, "model", {}).items():
            assert_folder(self.home / folder, files, state_of(specs))
            assert_equal(sorted(os.listdir(self.home / folder)), sorted([*files, INDEX]), where=folder)
        hidden = [name for name in os.listdir(self.home) if name.startswith(".")] if hasattr(self, "home") else []
        assert_equal(hidden, [], where="leftovers")
