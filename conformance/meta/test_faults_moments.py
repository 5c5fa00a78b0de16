"""The interruptions of a program: at the moment that was asked for, once, and never elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.faults import FaultError, Interruption, each_moment, interrupted


def test_each_moment(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def attempt(nth: int) -> Interruption:
        order: list[str] = []
        with interrupted(tmp_path / "a", nth, lambda: order.append("between")) as hook:
            for name in ("a1", "b", "a2"):
                (tmp_path / name).write_text(name)
                order.append(name)
        seen.append(order)
        return hook

    assert each_moment(attempt) == 2
    assert seen == [["between", "a1", "b", "a2"], ["a1", "b", "between", "a2"], ["a1", "b", "a2"]]
    (tmp_path / "a3").write_text("")
    assert seen[-1] == ["a1", "b", "a2"]


def test_nothing_seen(tmp_path: Path) -> None:
    def attempt(nth: int) -> Interruption:
        with interrupted(tmp_path / "a", nth, lambda: None) as hook:
            (tmp_path / "a").write_text("")
        return hook

    with pytest.raises(FaultError, match="only 1 moment"):
        each_moment(attempt)
