"""Program points: file, line and function of the program under test, outside of torch and of the provers."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["Point", "Site", "is_program", "site_here"]

# The separator matters: torchrec and torchao lie beside torch, and begin with its name.
_SKIPPED = (
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parent.parent / "virtual_device") + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    "<",
)
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Point:
    """One place in a program.

    Attributes:
        file: the path as Python knows it.
        line: of the file, from 1.
        function: whose body it is.
    """

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """``file:line``: the file from the current folder, or from the installed packages, on."""
        if _INSTALLED in self.file:
            return f"{self.file.rpartition(_INSTALLED)[2]}:{self.line}"
        inside = os.path.relpath(self.file)
        return f"{Path(self.file).name if inside.startswith('..') else inside}:{self.line}"

    def __str__(self) -> str:
        return self.short if self.function in ("", "<module>") else f"{self.short} {self.function}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"file": self.file, "line": self.line, "function": self.function}


@dataclass(frozen=True)
class Site:
    """What was done, and where.

    Attributes:
        op: operator or call.
        point: the innermost place outside of torch.
        called_from: the innermost place outside of installed packages, when that is another one.
        forward: of a backward operator, the place of its forward operator.
    """

    op: str
    point: Point
    called_from: Point | None = None
    forward: Point | None = None

    def __str__(self) -> str:
        text = f"{self.op} at {self.point}"
        if self.forward is not None and self.forward != self.point:
            text += f" (backward of {self.forward.short})"
        if self.called_from is not None:
            text += f" (called from {self.called_from.short})"
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        others = {"called_from": self.called_from, "forward": self.forward}
        return {
            "op": self.op,
            **self.point.to_json(),
            **{name: None if other is None else other.to_json() for name, other in others.items()},
        }


def is_program(name: str) -> bool:
    """Whether a file is the program's, or of a package that it uses; not torch, a prover or Python's library."""
    if name.startswith(_SKIPPED):
        return False
    return _INSTALLED in name or not name.startswith(_LIBRARY)


def _point_of(frame: FrameType) -> Point:
    return Point(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _points_here() -> tuple[Point, Point | None]:
    frame: FrameType | None = sys._getframe(1)
    first: Point | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if is_program(name):
            if first is None:
                first = _point_of(frame)
                if _INSTALLED not in name:
                    return first, None
            elif _INSTALLED not in name:
                return first, _point_of(frame)
        frame = frame.f_back
    return first or Point("torch", 0, ""), None


def site_here(op: str, *, forward: Point | None = None) -> Site:
    """``op`` at the place that the calling thread has come to."""
    point, called_from = _points_here()
    return Site(op, point, called_from, forward)
