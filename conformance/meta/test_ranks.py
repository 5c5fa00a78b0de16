"""The rank pool reports every way in which a rank can go wrong, at once and by name, and then serves again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from conformance.harness import Mismatch, RankDied, RankError, RankPool, RankTimeout, assert_same_tensor, raises
from conformance.meta import rank_jobs
from conformance.provers.ranks import pool as ranks
from twinproof.errors import StorageError


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool("refimpl", world_size_max=3) as shared:
        yield shared


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_output_and_group(pool: RankPool, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    results = pool.run(rank_jobs.who, world_size, "hello\nworld", twice=True)
    total = world_size * (world_size + 1)
    assert results == [(rank, world_size, total, "refimpl", 1) for rank in range(world_size)]
    lines = capsys.readouterr().out.splitlines()
    for rank in range(world_size):
        assert [f"[rank {rank}] hello", f"[rank {rank}] world", f"[rank {rank}] from below"] == lines[:3]
        del lines[:3]


def test_tensors_travel_by_value(pool: RankPool) -> None:
    tensor = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    for result in pool.run(rank_jobs.give, 1, tensor):
        assert_same_tensor(result, tensor)


def test_a_comparison_on_a_rank_is_a_comparison(pool: RankPool) -> None:
    with pytest.raises(Mismatch, match=r"\[rank 1\] values differ") as caught:
        pool.run(rank_jobs.compare, 3)
    assert (caught.value.got, caught.value.expected, caught.value.where) == ("1", "0", "table")


def test_the_first_failure_is_the_cause(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"\[rank 1\] StorageError: disk is full") as caught:
        pool.run(rank_jobs.fail, 3)
    assert isinstance(caught.value.__cause__, StorageError)
    assert isinstance(caught.value.__cause__.__cause__, ValueError)
    assert "first was rank 1:" in str(caught.value)
    # The peers' collective ends with the failed rank; nobody waits for a timeout.
    assert set(caught.value.errors) == {0, 1, 2}
    assert time.monotonic() - started < 30
    assert pool.run(rank_jobs.give, 3, 7) == [7, 7, 7]


def test_checkpoint_exceptions_and_their_failures_arrive(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(rank_jobs.fail_in_checkpoint, 2)
    assert all(isinstance(error, CheckpointException) for error in caught.value.errors.values())
    with raises(StorageError, mentions=("disk is full",)) as raised:
        pool.run(rank_jobs.fail_in_checkpoint, 2)
    assert isinstance(raised.error, StorageError)
    assert raised.error.got == 28


def test_what_does_not_pickle_becomes_text(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"\[rank 0\] RemoteError: Stubborn: stubborn"):
        pool.run(rank_jobs.fail_stubbornly, 1)
    with pytest.raises((AttributeError, TypeError), match=r"[Pp]ickle"):
        pool.run(lambda rank: None, 1)


@pytest.mark.parametrize("code", [7, -signal.SIGKILL])
def test_a_death_is_reported_at_once(pool: RankPool, code: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankDied, match=rf"\[rank 1\] died with exit code {code}") as caught:
        pool.run(rank_jobs.die, 2, code)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    assert time.monotonic() - started < 30
    assert pool.run(rank_jobs.give, 2, 7) == [7, 7]


def test_a_hang_shows_the_stacks(pool: RankPool) -> None:
    with pytest.raises(RankTimeout) as caught:
        pool.run(rank_jobs.hang, 3, timeout_s=0.5)
    text = str(caught.value)
    assert "no answer within 0.5 s" in text
    assert "[rank 0]" in text
    assert 'rank_jobs.py", line' in text
    assert "[rank 2]" not in text
    assert pool.run(rank_jobs.give, 3, 7) == [7, 7, 7]


def test_a_rank_that_cannot_end_itself(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_TIMEOUT_GRACE_S", 0.2)
    monkeypatch.setattr(ranks, "_FAILURE_GRACE_S", 0.2)
    with pytest.raises(RankTimeout, match=r"from ranks \[0\]"):
        pool.run(rank_jobs.stop, 1, timeout_s=0.2)


def test_a_skip_on_a_rank_is_a_skip(pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="implementation refimpl has no no_such_component"):
        pool.run(rank_jobs.touch_absent, 2)


@pytest.mark.parametrize("world_size", [0, 4])
def test_world_sizes_are_bounded(pool: RankPool, world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size must be 1 to 3"):
        pool.run(rank_jobs.give, world_size, 1)
