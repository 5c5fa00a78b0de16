"""The databases of the row store's bench say what a dictionary says, in every way they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perf.peers.databases import DATABASES, filled_database, installed


@pytest.mark.parametrize("name", DATABASES)
def test_a_database_gives_back_what_it_was_given(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(500, generator=generator) - 250
    rows = torch.randint(0, 256, (500, 24), generator=generator, dtype=torch.uint8)
    database = filled_database(name, tmp_path, ids, rows)
    places = torch.randint(0, 500, (300,), generator=generator)
    assert torch.equal(database.get(ids[places]), rows[places])
    rows[:100] = rows[100:200]
    database.set(ids[:100], rows[:100])
    assert torch.equal(database.get(ids), rows)
    if name != "dict":
        rows[:50] = 0
        database.set_batch(ids[:50], rows[:50])
        assert torch.equal(database.get_batch(ids), rows)
    database.close()


def test_what_is_no_database_is_not_installed() -> None:
    assert not installed("ours")
