"""Errors of what was forgotten: they name the option that was left out, and not only what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import ids_of, save, store_of
from twinproof.errors import ConfigError


@requirement(
    "KV-484",
    "Where rows lack an optimizer's state that their layout names, steps, modules, verbs of states, loads and sharded "
    "tables MUST be refused with optimizer_in_row=True.",
)
def test_no_optimizer_in_the_row(kvstore: Any, pipeline: Any, tmp_path: Path) -> None:
    layout, ids, ones = kvstore.RowLayout(8, optimizer="adam"), ids_of([1]), torch.ones(1, 8)
    store = store_of(kvstore, layout, optimizer_in_row=False)
    save(kvstore, store_of(kvstore, layout), tmp_path / "ck")
    table = pipeline.EmbeddingBagConfig(1, 8, "t", feature_names=["f"])
    plan = {"t": pipeline.key_value(store, kvstore.Buckets(1))}
    fused = pipeline.FusedOptimizer("adam", lr=0.1)

    def sharded() -> object:
        collection = pipeline.EmbeddingBagCollection([table], device="meta")
        return pipeline.ShardedEmbeddingBagCollection(collection, plan, optimizer=fused)

    ways: dict[str, Callable[[], object]] = {
        "apply_gradients": lambda: store.apply_gradients("t", ids, ones, 0.1),
        "KVEmbedding": lambda: kvstore.KVEmbedding(store),
        "KVEmbeddingBag": lambda: kvstore.KVEmbeddingBag(store),
        "get_state": lambda: store.get_state("t", "momentum1", ids),
        "load": lambda: kvstore.load(store, tmp_path / "ck"),
        "a sharded table": sharded,
    }
    for name, way in ways.items():
        with raises(
            ConfigError, mentions=("adam" if name != "get_state" else "momentum1", "optimizer_in_row=True"), where=name
        ):
            way()
    plain = store_of(kvstore, kvstore.RowLayout(8))
    with raises(ConfigError, mentions=("optimizer='none'", "optimizer_in_row=True"), where="a layout without one"):
        plain.apply_gradients("t", ids, ones, 0.1)


def _refused(rank: Rank, root: str) -> list[str]:
    """What a rank is told whose store has an id of the other rank's buckets."""
    kvstore = rank.component("kvstore")
    store, said = store_of(kvstore, kvstore.RowLayout(4)), []
    store.set("t", ids_of([2]), torch.ones(1, 4))
    ways: list[Callable[[], object]] = [
        lambda: save(kvstore, store, Path(root) / "ck", buckets=kvstore.Buckets(2)),
        lambda: store.state_dict(),
    ]
    for way in ways:
        try:
            way()
            said.append("no error")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@requirement(
    "KV-485",
    "A rank whose store has ids of another rank's buckets MUST be told by save and state_dict which buckets it has, of "
    "how many, and that buckets= of save, state_dict and key_value cuts them.",
)
def test_ids_of_others(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    # Both have id 2, as ranks whose stores nobody cuts: with two buckets it is of rank 0, with one, too.
    said = rank_pool.run(_refused, 2, str(tmp_path), timeout_s=60)[1]
    for name, found, cut in zip(
        ("save", "state_dict"), said, ("1 to 2, the end left out, of the 2", "1 to 1, the end"), strict=True
    ):
        for word in ("ConfigError", "got: [2]", f"buckets {cut}", "buckets=", "key_value"):
            assert_equal(word in found, True, where=f"{name}: {word} in {found}")


@requirement(
    "KV-486",
    "A table of more bytes than a tensor may have MUST be refused with its name and sizes, on every device, and with "
    "what num_embeddings is for a key-value table; a table of fewer is made on meta.",
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tables_beyond_counting(pipeline: Any, device: str) -> None:
    for rows, columns in ((2**62, 16), (2**61, 1), (2**63 - 1, 1)):
        table = pipeline.EmbeddingBagConfig(rows, columns, "big", feature_names=["f"])
        said = ("where: big", f"{rows} x {columns}", "key_value", "num_embeddings")
        with raises(ConfigError, mentions=said, where=f"{rows} x {columns}"):
            pipeline.EmbeddingBagCollection([table], device=device)
    for rows, columns in ((2**61 - 1, 1), (2**50, 16)):
        table = pipeline.EmbeddingBagConfig(rows, columns, "big", feature_names=["f"])
        with succeeds("a table on meta", where=f"{rows} x {columns}"):
            pipeline.EmbeddingBagCollection([table], device="meta")
