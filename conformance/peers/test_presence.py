"""Peers that are not installed are skipped by name, with the reason, and only those."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from conformance.peers.__main__ import absent, main


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert absent(("json", "torch")) is None
    assert main(["naive_offload"]) == 0
    assert capsys.readouterr().out == ""
    adapter: Any = ModuleType("conformance.peers.invented")
    adapter.NEEDS = ("json", "no_such_package")
    monkeypatch.setitem(__import__("sys").modules, "conformance.peers.invented", adapter)
    assert main(["naive_offload", "invented"]) == 3
    assert capsys.readouterr().out.startswith("invented is skipped: no_such_package: ModuleNotFoundError")
    adapter.NEEDS, adapter.probe = (), lambda: 1 // 0
    assert main(["invented"]) == 3
    assert capsys.readouterr().out.startswith("invented is skipped: probe: ZeroDivisionError")


def test_a_broken_adapter_is_no_reason_to_skip() -> None:
    with pytest.raises(ModuleNotFoundError):
        main(["no_such_adapter"])
