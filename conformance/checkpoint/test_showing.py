"""Saves that end, by an error or an interrupt, at or behind the call that shows a checkpoint in another one's place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_loads, save
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint import publish

OLD, NEW = {"w": torch.zeros(4)}, {"w": torch.ones(4)}


class _Ending:
    """A call that ends a save the ``number``-th time that it is made, before its work or behind it."""

    def __init__(self, call: Callable[..., Any], number: int, behind: bool, kind: type[BaseException]) -> None:
        self._call, self._number, self._behind, self._kind, self._count = call, number, behind, kind, 0

    def __call__(self, *given: Any) -> Any:
        self._count += 1
        if self._count != self._number:
            return self._call(*given)
        if self._behind:
            self._call(*given)
        raise self._kind(errno.EIO, os.strerror(errno.EIO), "here")


def _end_at(patch: pytest.MonkeyPatch, folder: Path, at: str, behind: bool, kind: type[BaseException]) -> None:
    exchange, rename = publish._exchange, os.rename
    if at == "exchange":
        patch.setattr(publish, "_exchange", _noting(folder, _Ending(exchange, 1, behind, kind)))
        return
    ending = _Ending(rename, {"first rename": 1, "second rename": 2}[at], behind, kind)

    def renamed(source: Any, target: Any) -> None:
        # Between the two there is no folder of this name.
        is_ours = folder in (Path(source), Path(target)) and ending._count < 2
        (ending if is_ours else rename)(source, target)

    patch.setattr(publish, "_exchange", _noting(folder, lambda *_: False))
    patch.setattr(os, "rename", renamed)


def _noting(folder: Path, call: Callable[..., bool]) -> Callable[..., bool]:
    """The call, behind a note that another program leaves in the folder at the last moment."""

    def noted(*given: Any) -> bool:
        (folder / "notes").write_text("kept")
        return call(*given)

    return noted


@requirement(
    "CKPT-968",
    "A save that fails or is interrupted at the call that shows it in an old checkpoint's place, or behind it, MUST "
    "leave under its name the old one, or the new one where that was shown, with what others wrote, and hide nothing.",
)
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at", ["exchange", "first rename", "second rename"])
def test_ends_while_shown(checkpoint: Any, tmp_path: Path, at: str, behind: bool, kind: Any) -> None:
    folder = tmp_path / "ck"
    save(checkpoint, OLD, folder)
    with pytest.MonkeyPatch.context() as patch:
        _end_at(patch, folder, at, behind, kind)
        with raises(BaseException, mentions=("Input/output error",), where="the save"):
            save(checkpoint, NEW, folder)
    is_shown = behind and at != "first rename"
    with succeeds("a load", where="what is there behind it"):
        assert_loads(checkpoint, folder, NEW if is_shown else OLD)
    assert_equal((folder / "notes").exists(), True, where="what another program wrote meanwhile")
    assert_equal(os.listdir(tmp_path), ["ck"], where="the folder above")
    with succeeds("the next save", where="behind it"):
        save(checkpoint, NEW, folder)
